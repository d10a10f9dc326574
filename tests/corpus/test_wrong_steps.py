"""`jls.check_step` names each planted mistake.

Those that every library can make are tried in plain JAX by
tests/check/test_check_step.py.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import right_programs
import right_steps
import steps
from flax import nnx
from right_programs import PROGRAMS, learn_then_act
from right_steps import RIGHT
from steps import BATCH, GRADIENTS, PLACES, TOLD, X, plain, wrap

import jls

# The mistakes that are planted here are warned of too, but for those of right steps.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]


def check(step, args, kwargs=None):
    return jls.check_step(step, *args, **(kwargs or {}))


OTHERS = [library for library in PLACES if library != "plain"]


# Mistakes that every library can make.


@pytest.mark.parametrize("library", OTHERS)
@pytest.mark.parametrize("mistake", GRADIENTS)
def test_mistake_in_the_gradients_is_named(library, mistake):
    gradients, code = GRADIENTS[mistake]
    assert check(*PLACES[library](gradients)).broken == (code,)


@pytest.mark.parametrize("library", OTHERS)
@pytest.mark.parametrize("told", TOLD)
def test_loss_that_the_optimizer_is_not_told_is_named(library, told):
    assert check(*PLACES[library](tell=TOLD[told])).broken == ("loss not passed",)


@pytest.mark.parametrize("library", OTHERS)
def test_weight_decay_outside_is_not_atomic(library):
    result = check(*PLACES[library](wrap=steps.decay_outside))
    assert result.broken == ("not atomic",)


@pytest.mark.parametrize("library", OTHERS)
def test_accumulation_outside_never_recovers(library):
    gradients = steps.with_the_scale_alone
    result = check(*PLACES[library](gradients, wrap=steps.accumulate_outside))
    assert "never recovers" in result.broken
    assert "acc_grads" in result.seen["never recovers"]
    assert set(result.broken) <= {"never recovers", "nan committed", "not atomic"}


# Mistakes in the gradients, further.


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize(
    "mistake", ["unscaled twice", "scaled twice", "never unscaled"]
)
def test_leak_is_seen_with_other_optimizers(inner, mistake):
    gradients, code = GRADIENTS[mistake]
    assert code in check(*plain(gradients, inner=inner)).broken


def test_leak_that_is_too_small_to_move_the_parameters_is_seen():
    step, (params, opt_state, batch) = plain(
        steps.twice_unscaled, inner=optax.sgd(1e-3)
    )
    opt_state = jls.set_loss_scale(opt_state, 2.0**20)
    result = check(step, (params, opt_state, batch))
    assert result.broken == ("scale leaks",)


@pytest.mark.parametrize("norm", [1.0, 10.0])
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adamw(1e-3)])
def test_leak_that_clipping_hides_is_seen(norm, inner):
    clip = optax.clip_by_global_norm(norm)
    result = check(*plain(steps.never_unscaled, inner=optax.chain(clip, inner)))
    assert result.broken == ("scale leaks",)
    assert "still multiplied by the loss scale" in result.seen["scale leaks"]
    where = result.where["scale leaks"]
    assert (where.function, where.operation) == ("never_unscaled", "mul")


def one_weight(gradients, seed, size, shape=(1,)):
    """A step with one weight, whose float16 gradients vanish near a scale of 1.

    Of a shape with more elements they all have one gradient.
    """
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(2.0**10))
    y = size * jax.random.normal(jax.random.key(seed), (5,))

    @jax.jit
    def step(w, opt_state, y):
        def loss_fn(w):
            ones = jnp.ones(5, jnp.float16)
            terms = ones * w.astype(jnp.float16)[:, None]
            return jnp.sum(terms.astype(jnp.float32) * y)

        loss, grads = gradients(opt_state, loss_fn, w, jax.value_and_grad)
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss

    w = jnp.zeros(shape)
    return step, (w, optimizer.init(w), y)


@pytest.mark.parametrize("seed", [513, 1558, 1626, 1847])
@pytest.mark.parametrize("shape", [(1,), (3,)])
def test_gradient_of_a_few_quanta_is_no_leak(seed, shape):
    assert check(*one_weight(steps.right_gradients, seed, 2.0**-24, shape)).ok


def test_leak_in_one_weight_is_seen():
    step = one_weight(steps.twice_unscaled, 0, 1.0)
    assert check(*step).broken == ("scale leaks",)


def test_overflow_that_an_elementwise_clip_outside_hides_is_seen():
    optimizer = optax.chain(optax.clip(10.0), wrap(optax.sgd(0.1)))

    @jax.jit
    def step(w, opt_state, x):
        def loss_fn(w):
            return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)) * 1.0)

        def widened(w):
            return loss_fn(w).astype(jnp.float32)

        loss, grads = jls.value_and_grad(widened)(opt_state, w)
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss

    w = jnp.ones(4)
    result = check(step, (w, optimizer.init(w), jnp.abs(X) + 1))
    assert result.broken == ("overflow hidden",)
    assert result.where["overflow hidden"].operation in ("clamp", "max")


def test_two_scales_that_are_swapped_are_named():
    result = check(*RIGHT["two_losses_with_two_scales"](swapped=True))
    assert result.broken == ("not scaled",)
    said = "of g_state/scaler_state were scaled by d_state/scaler_state"
    assert said in result.seen["not scaled"]


def test_two_scales_are_tried_alone():
    step, (g, d, g_state, d_state, y) = RIGHT["two_losses_with_two_scales"]()

    @jax.jit
    def crossed(g, d, g_state, d_state, y):
        # The second loss is scaled by the state of the first.
        lent = d_state._replace(scaler_state=steps.SCALER.init())
        g, d, g_state, new, *losses = step(g, d, g_state, lent, y)
        scaler_state = steps.SCALER.adjust(d_state.scaler_state, new.applied)
        return g, d, g_state, new._replace(scaler_state=scaler_state), *losses

    result = check(crossed, (g, d, g_state, d_state, y))
    assert result.broken == ("not scaled",)
    assert "d_state" in result.seen["not scaled"]


# What a bad step leaves behind.


def average_outside(params, average, opt_state, batch, *, step):
    params, opt_state, loss = step(params, opt_state, batch)
    average = optax.incremental_update(params, average, 0.1)
    return params, average, opt_state, loss


def test_average_that_goes_on_is_no_mistake_but_said():
    step, (params, opt_state, batch) = plain()
    average = jax.tree.map(lambda p: p + 1, params)
    outer = jax.jit(functools.partial(average_outside, step=step))
    result = check(outer, (params, average, opt_state, batch))
    assert result.ok
    text = " ".join(str(result).split())
    assert "but average/w1, average/w2: an average, which goes on" in text


def test_average_in_a_chain_outside_is_said_of_a_fresh_state_too():
    def wrap_first(inner):
        return optax.chain(wrap(inner), jls.params_ema(0.9))

    result = check(*plain(wrap=wrap_first))
    assert result.ok
    assert "an average, which goes on" in result.seen["not atomic"]


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "in a pair"])
def test_decay_of_few_numbers_is_no_noise(whole):
    optimizer = steps.decay_outside(optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params):
            return jnp.mean((x @ params["w"]) ** 2)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": jnp.ones(1 + whole)}
    result = check(step, (params, optimizer.init(params), X[:, : 1 + whole]))
    assert result.broken == ("not atomic",)


def test_average_beside_a_buffer_is_said():
    def follow(params, target, opt_state, count):
        return optax.incremental_update(params, target, 0.05)

    step, args = learn_then_act(follow)
    result = check(jax.jit(step), args)
    assert result.ok
    assert "target/0/b" in result.seen["not atomic"]


def test_decay_beside_a_buffer_is_not_atomic():
    step, args = learn_then_act(right_programs.follow)

    @jax.jit
    def decays(*args):
        (params, *rest), loss = step(*args)
        return (jax.tree.map(lambda leaf: 0.99 * leaf, params), *rest), loss

    result = check(decays, args)
    assert result.broken == ("not atomic",)
    assert "argument 0/0/b" in result.seen["not atomic"]


@pytest.mark.parametrize("shape", [(4,), ()])
def test_one_array_beside_an_environment_is_looked_at(shape):
    step, args = right_programs.one_array(jnp.full(shape, 0.5), wrong=True)
    result = check(step, args)
    assert "nan committed" in result.broken
    assert "params" in result.seen["nan committed"]
    assert "env" not in result.seen["nan committed"]
    # The step has an optimizer, and moves its parameters without it.
    assert "applied to nothing that comes back" in result.not_tried["not atomic"]


def test_parameter_that_is_a_number_is_found():
    step, args = right_programs.one_array(jnp.float32(0.5), inner=optax.sgd(0.05))

    @jax.jit
    def alone(params, opt_state, x):
        params, opt_state, _, loss = step(params, opt_state, args[2], x)
        return params, opt_state, loss

    arguments = args[0], args[1], args[3]
    result = check(alone, arguments)
    assert result.ok
    assert not result.not_tried
    assert result.notes[0].startswith("Carried: params, opt_state.")


def test_running_norm_of_bad_gradients_is_named():
    step, (state, batch) = PROGRAMS["last_norms_and_no_loss"]()

    @jax.jit
    def running(state, batch):
        new = step(state, batch)
        return {**new, "norms": 0.9 * state["norms"] + 0.1 * new["norms"]}

    result = check(running, (state, batch))
    assert result.broken == ("nan committed",)
    assert "state/norms" in result.seen["nan committed"]


def test_hidden_state_that_is_spoiled_is_named():
    step, args = right_programs.recurrent(lambda applied, hidden: hidden)
    result = check(step, args)
    assert result.broken == ("nan committed", "never recovers")
    assert "state/hidden" in result.seen["nan committed"]


def test_what_is_left_to_its_author_is_said():
    check_of_noise = check(*PROGRAMS["langevin_with_a_key_carried"]())
    said = "but params/w1, params/w2: noise is added"
    assert said in " ".join(str(check_of_noise).split())
    check_of_memory = check(*PROGRAMS["memory_of_batches"]())
    assert "state/memory/x" in check_of_memory.seen["nan committed"]


def test_parameter_that_is_one_array_is_carried():
    """Its place is not taken by a moment, which has the same form."""
    optimizer = steps.decay_outside(optax.adam(1e-2))

    @jax.jit
    def step(w, opt_state, x):
        loss, grads = jls.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(opt_state, w)
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        return opt_state, optax.apply_updates(w, updates), loss

    w = jnp.ones(4)
    result = check(step, (w, optimizer.init(w), X))
    assert result.broken == ("not atomic",)
    assert result.seen["not atomic"].endswith("it changed w")


def test_linen_batch_statistics_without_select_are_committed():
    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            return right_steps.statistics_loss(state, params, batch)

        (loss, new), grads = jls.value_and_grad(loss_fn, has_aux=True)(
            state.opt_state, state.params
        )
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state, **new), loss

    state = right_steps.statistics_state(wrap(optax.adam(1e-2)))
    result = check(step, (state, BATCH))
    assert result.broken == ("nan committed",)
    assert "batch_stats" in result.seen["nan committed"]


def test_nnx_batch_statistics_without_select_are_committed():
    step, _ = steps.nnx_step()
    result = check(step, right_steps.nnx_arguments())
    assert result.broken == ("nan committed",)
    assert "model/norm/mean" in result.seen["nan committed"]


def test_equinox_state_without_select_is_committed():
    def gradients(model, opt_state, batch):
        return jls.value_and_grad(
            lambda m: steps.equinox_loss(m, batch), transform=eqx.filter_value_and_grad
        )(opt_state, model)

    _, (model, opt_state, batch) = steps.equinox()
    optimizer = wrap(optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, mean, opt_state, batch):
        loss, grads = gradients(model, opt_state, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        mean = {"x": 0.9 * mean["x"] + 0.1 * batch["x"].mean(0)}
        return eqx.apply_updates(model, updates), mean, opt_state, loss

    result = check(step, (model, {"x": jnp.zeros(4)}, opt_state, batch))
    assert result.broken == ("nan committed",)


def test_flax_apply_gradients_drops_the_loss():
    @jax.jit
    def step(state, batch):
        loss, grads = jls.value_and_grad(
            lambda params: steps.linen_loss(state, params, batch)
        )(state.opt_state, state.params)
        return state.apply_gradients(grads=grads), loss

    result = check(step, (steps.linen_state(wrap(optax.adam(1e-2))), BATCH))
    assert result.broken == ("loss not passed",)


def test_bare_scaler_without_select_commits():
    scaler = jls.dynamic(2.0**10)

    @jax.jit
    def step(w, state, x):
        def loss_fn(w):
            return jnp.mean((x @ w) ** 2)

        loss, grads = jls.value_and_grad(loss_fn)(state, w)
        state = scaler.adjust(state, jls.all_finite(grads))
        return w - 0.1 * grads, state, loss

    result = check(step, (jnp.ones(4), scaler.init(), X))
    assert set(result.broken) == {"nan committed", "not atomic", "never recovers"}
    assert "w kept an inf or NaN" in result.seen["never recovers"]


def test_bare_scaler_is_told_with_the_gradients_scaled():
    def gradients(state, loss_fn, w):
        return loss_fn(w), jax.grad(lambda w: jls.scale(state, loss_fn(w)))(w)

    assert "scale leaks" in check(*right_steps.bare(gradients)).broken


def test_scaler_that_is_never_told_of_an_overflow():
    scaler = jls.dynamic(2.0**10)

    @jax.jit
    def step(w, state, x):
        loss, grads = jls.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state, w)
        grads = jnp.nan_to_num(grads, posinf=0.0, neginf=0.0)
        return w - 0.1 * grads, scaler.adjust(state, True), loss

    result = check(step, (jnp.ones(4), scaler.init(), X))
    assert result.broken == ("overflow hidden",)


# No step, retraced, host sync.


def test_nnx_updates_that_jax_jit_loses_are_no_step():
    step = jax.jit(jls.train_step(steps.nnx_loss))
    result = check(step, right_steps.nnx_arguments())
    assert result.broken == ("no step",)
    tried_by_faults = {"nan committed", "not atomic", "never recovers"}
    assert tried_by_faults <= result.not_tried.keys()
    assert "nnx.jit" in str(result)


@pytest.mark.parametrize("library", OTHERS)
def test_jit_in_each_call_is_retraced(library):
    step, args = PLACES[library]()
    jit = {"nnx": nnx.jit, "equinox": eqx.filter_jit}.get(library, jax.jit)
    inner = step.__wrapped__
    runs = []

    def compiles(*args):
        runs.append(args)
        return jit(lambda *args: inner(*args))(*args)

    result = check(compiles, args)
    assert result.broken == ("retraced",)
    assert len(runs) <= 5  # an early end: three good steps, and the traces
    assert "not atomic" in result.not_tried


def test_step_that_retraces_now_and_then_is_tried_all_the_same():
    step, args = plain(steps.unscaled_gradients)
    calls = []

    def now_and_then(*args):
        calls.append(args)
        chosen = jax.jit(lambda *a: step.__wrapped__(*a)) if len(calls) == 4 else step
        return chosen(*args)

    assert check(now_and_then, args).broken == ("retraced", "not scaled")


@pytest.mark.parametrize("library", OTHERS)
def test_value_read_at_the_host_is_named(library):
    step, args = PLACES[library]()

    def reads(*args):
        result = step(*args)
        float(result if library == "nnx" else result[-1])
        return result

    assert check(reads, args).broken == ("host sync",)
