"""`jls.check_step` on plain steps, and what it says; more steps in tests/corpus."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import right_steps
import steps
from flax import nnx
from right_steps import RIGHT
from shared import bits
from steps import BATCH, GRADIENTS, TOLD, X, plain, plain_loss, plain_params, wrap

import jls
from jls._tools.check.codes import CODES
from jls._tools.check.mistakes.skips import LEAVE_OUT
from jls._tools.check.mistakes.table import MISTAKES

# The mistakes that are planted here are warned of too, but for those of right steps.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::jls.JlsWarning"),
]


def check(step, args, kwargs=None):
    return jls.check_step(step, *args, **(kwargs or {}))


# Steps in plain JAX and in Flax NNX, and each mistake that every library can make.


@pytest.mark.parametrize(
    "name", ["plain_by_hand", "nnx_train_step", "linen_train_step"]
)
@pytest.mark.filterwarnings("error")
def test_right_step_is_not_called_broken(name):
    result = check(*RIGHT[name]())
    assert result.ok, str(result)
    assert result.broken == ()
    # Most codes are tried: an audit that looks at nothing calls nothing broken.
    assert len(result.not_tried) <= 4


# Those that are found by reading are read in test_reading.py. Here one of each kind is
# named by a whole call; with --all each.
def one_of(names):
    first, *others = names
    return [first, *(pytest.param(x, marks=pytest.mark.more) for x in others)]


@pytest.mark.parametrize("mistake", one_of(GRADIENTS))
def test_mistake_in_the_gradients_is_named(mistake):
    gradients, code = GRADIENTS[mistake]
    assert check(*plain(gradients)).broken == (code,)


@pytest.mark.parametrize("told", one_of(TOLD))
def test_loss_that_the_optimizer_is_not_told_is_named(told):
    assert check(*plain(tell=TOLD[told])).broken == ("loss not passed",)


def test_weight_decay_outside_is_not_atomic():
    assert check(*plain(wrap=steps.decay_outside)).broken == ("not atomic",)


def test_accumulation_outside_never_recovers():
    result = check(*plain(steps.with_the_scale_alone, wrap=steps.accumulate_outside))
    assert "never recovers" in result.broken
    assert "acc_grads" in result.seen["never recovers"]
    assert set(result.broken) <= {"never recovers", "nan committed", "not atomic"}


def test_jit_in_each_call_is_retraced():
    step, args = plain()
    runs = []

    def compiles(*args):
        runs.append(args)
        return jax.jit(lambda *args: step.__wrapped__(*args))(*args)

    result = check(compiles, args)
    assert result.broken == ("retraced",)
    assert len(runs) <= 5  # an early end: three good steps, and the traces
    assert "not atomic" in result.not_tried


@pytest.mark.parametrize(
    "read",
    [float, lambda x: x.item(), np.asarray, jax.device_get],
    ids=["float", "item", "numpy", "device_get"],
)
def test_value_read_at_the_host_is_named(read):
    step, args = plain()

    def reads(*args):
        result = step(*args)
        read(result[-1])
        return result

    assert check(reads, args).broken == ("host sync",)


@pytest.mark.parametrize("every", one_of([3, 5, 7, 10, 20]))
def test_value_read_now_and_then_is_no_sync(every):
    step, args = plain()
    calls = []

    def reads(*args):
        result = step(*args)
        calls.append(None)
        if len(calls) % every == 0:
            float(result[-1])
        return result

    # Wherever the count of calls is when the step is traced.
    for _ in range(3):
        calls.append(None)
        assert check(reads, args).ok


def test_text_with_a_value_is_not_taken_for_right():
    step, args = plain()

    def reads(*args):
        result = step(*args)
        f"{result[-1]:.3f}"
        return result

    result = jls.check_step(reads, *args, carried=(0, 1))
    assert "host sync" in {*result.broken, *result.not_tried}


def test_reading_of_numpy_arrays_is_no_sync():
    step, (params, opt_state, batch) = plain()
    batch = jax.tree.map(np.asarray, batch)

    def prepares(params, opt_state, batch):
        assert float(batch["x"].max()) != 0
        return step(params, opt_state, batch)

    assert check(prepares, (params, opt_state, batch)).ok


def test_plain_step_that_returns_what_it_got_is_no_step():
    @jax.jit
    def step(params, opt_state, batch):
        return params, opt_state, plain_loss(params, batch)

    args = plain()[1]
    assert check(step, args).broken == ("no step",)


def test_old_state_that_comes_back_is_no_step():
    step, args = plain()

    @jax.jit
    def forgets(params, opt_state, batch):
        params, _, loss = step(params, opt_state, batch)
        return params, opt_state, loss

    result = check(forgets, args)
    assert result.broken == ("no step",)
    assert "the old state" in result.seen["no step"]
    text = " ".join(str(result).split())
    assert (
        "write return optax.apply_updates(params, updates) and the new opt_state"
        in text
    )
    assert "nnx" not in text


def test_nnx_step_under_jax_jit_is_told_of_nnx_jit():
    model, optimizer, batch = RIGHT["nnx_train_step"]()[1]
    result = check(jax.jit(jls.train_step(steps.nnx_loss)), (model, optimizer, batch))
    assert result.broken == ("no step",)
    assert "step = nnx.jit(jls.train_step(loss_fn))" in " ".join(str(result).split())


def test_advice_on_nnx_is_for_nnx_whatever_carries_the_scale():
    """A bare scale has no optimizer that knows of the skip: no `jls.atomic`."""
    scaler, batch = jls.dynamic(2.0**10), jnp.ones((4, 2))
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = jls.loss_scaled(optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, batch):
        return jnp.mean(model(batch) ** 2)

    def with_bare_scale(grad_fn):
        @nnx.jit
        def step(model, state, batch):
            loss, grads = grad_fn(state, model, batch)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
            return scaler.adjust(state, jls.all_finite(grads)), loss

        return check(step, (model, scaler.init(), batch)).write

    @nnx.jit
    def with_optimizer(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    unscaled = with_bare_scale(lambda _, *args: nnx.value_and_grad(loss_fn)(*args))
    assert "=nnx.value_and_grad)(state, model, batch)" in unscaled["not scaled"]
    grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
    commits = with_bare_scale(grad_fn)["nan committed"]
    assert "jls.select(jls.all_finite(grads), new, old)" in commits
    wrapped = check(with_optimizer, (model, optimizer, batch)).write
    assert "=nnx.value_and_grad)(optimizer, model, batch)" in wrapped["not scaled"]


def test_lines_of_an_nnx_step_have_the_names_of_its_arguments():
    """Also where these are the usual names of others."""

    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def step(m, o, x):
        loss, grads = nnx.value_and_grad(loss_fn)(m, x, x)
        o.update(m, grads)
        return loss

    def with_labels(optimizer, model, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer, x, y)
        model.update(optimizer, grads)
        return loss

    def in_a_dict(both, x):
        return step(both["model"], both["optimizer"], x)

    def with_bare_scale(m, s, x):
        loss, grads = nnx.value_and_grad(loss_fn)(m, x, x)
        params = nnx.state(m, nnx.Param)
        nnx.update(m, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return jls.dynamic(8.0).adjust(s, jls.all_finite(grads)), loss

    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrap(optax.sgd(0.1)), wrt=nnx.Param)
    both, x = {"model": model, "optimizer": optimizer}, jnp.arange(8.0).reshape(4, 2)
    write = check(nnx.jit(step), (model, optimizer, x)).write
    assert write["not scaled"].endswith("(o, m, x)")
    assert write["loss not passed"] == "o.update(m, grads, value=loss)"
    assert write["nan committed"].startswith("with jls.atomic(o, m): around")
    assert "in the model. If some state" in write["nan committed"]
    write = check(nnx.jit(with_labels), (model, optimizer, x, x)).write
    assert write["not scaled"].endswith("(model, optimizer, x, y)")
    assert write["loss not passed"] == "model.update(optimizer, grads, value=loss)"
    write = check(nnx.jit(in_a_dict), (both, x)).write  # each is a part of one
    assert write["not scaled"].endswith("(optimizer, model, batch)")
    bare = nnx.jit(with_bare_scale), (model, jls.dynamic(8.0).init(), x)
    assert check(*bare).write["not scaled"].endswith("(s, m, x)")


def test_advice_of_each_kind_is_kept():
    """A batch statistic that stays NaN, with a mask around the wrapper."""
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    mask = nnx.State({"bias": False, "scale": True})
    tx = optax.masked(jls.loss_scaled(optax.sgd(0.1)), mask)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch) - 1) ** 2)

        grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer, model)
        optimizer.update(model, grads, value=loss)
        return loss

    result = check(step, (model, optimizer, jnp.arange(8.0).reshape(4, 2)))
    line = result.write["nan committed"]
    assert line.index("optax.masked(inner, mask)") < line.index("with jls.atomic(")
    assert "carried=" in line


def with_mask_outside(inner):
    return optax.masked(wrap(inner), {"w1": False, "w2": True})


def test_wrapper_inside_a_mask_is_told_of_the_mask():
    result = check(*plain(wrap=with_mask_outside))
    assert not result.ok
    text = " ".join(str(result).split())
    assert "jls.loss_scaled(optax.masked(inner, mask))" in text
    assert "MultiSteps" not in text
    assert "nan_to_num" not in text


@pytest.mark.parametrize("other", ["sgd", "adam"])
def test_wrapper_in_a_partition_is_told_of_the_whole(other):
    def beside_a_bare_one(inner):
        parts = {"guarded": wrap(inner), "bare": getattr(optax, other)(1e-3)}
        return optax.multi_transform(parts, {"w1": "guarded", "w2": "bare"})

    result = check(*plain(wrap=beside_a_bare_one))
    assert {"nan committed", "not atomic"} <= set(result.broken)
    assert "params/w2" in result.seen["not atomic"]
    for code in ("nan committed", "not atomic"):
        line = "jls.loss_scaled(optax.multi_transform(parts, labels)), with no wrapper"
        assert result.write[code].startswith(line)
        assert "optax.masked" not in result.write[code]


def test_frozen_part_beside_the_wrapper_is_right():
    def beside_a_frozen_one(inner):
        parts = {"guarded": wrap(inner), "frozen": optax.set_to_zero()}
        return optax.multi_transform(parts, {"w1": "guarded", "w2": "frozen"})

    result = check(*plain(wrap=beside_a_frozen_one))
    assert result.ok, str(result)
    assert not result.not_tried


def test_cleaned_gradients_are_told_of_what_cleans_them():
    text = " ".join(str(check(*plain(steps.cleaned))).split())
    assert "no jnp.nan_to_num, no elementwise clip" in text
    assert "optax.masked" not in text


def test_accumulation_outside_is_told_to_go_inside():
    result = check(*plain(steps.with_the_scale_alone, wrap=steps.accumulate_outside))
    text = " ".join(str(result).split())
    assert "jls.loss_scaled(optax.MultiSteps(inner, k)), accumulation inside" in text


def forgetful(wrap=wrap, inner=lambda: optax.adam(1e-3), returned=None):
    """A step that does not apply its updates, and its arguments."""
    optimizer = wrap(inner())

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        more = () if returned is None else (returned(params, updates),)
        return params, opt_state, loss, *more

    params, _, batch = plain()[1]
    return step, (params, optimizer.init(params), batch)


@pytest.mark.parametrize("inner", [optax.adam, optax.sgd, optax.lion])
@pytest.mark.parametrize("of", [wrap, jls.skip_nonfinite], ids=["scaled", "skips"])
def test_updates_that_are_never_applied_are_no_step(of, inner):
    result = check(*forgetful(of, lambda: inner(1e-3)))
    assert result.broken == ("no step",)
    assert "reach nothing that comes back" in result.seen["no step"]
    assert result.where["no step"].function == "step"
    assert "return optax.apply_updates(params, updates)" in result.write["no step"]
    with pytest.raises(AssertionError, match="no step"):
        result.raise_if_broken()


def test_updates_of_one_of_two_wrappers_that_are_never_applied_are_no_step():
    step, args = plain()

    @jax.jit
    def two(one, other, one_state, other_state, batch):
        new, one_state, loss = step(one, one_state, batch)
        _, other_state, _ = step(other, other_state, batch)
        return new, other, one_state, other_state, loss

    params, opt_state, batch = args
    result = check(two, (params, params, opt_state, opt_state, batch))
    assert result.broken == ("no step",)


def test_updates_for_the_outside_are_not_called_forgotten():
    """The loop applies them, which no program shows."""
    result = check(*forgetful(returned=lambda params, updates: updates))
    assert result.ok
    headline = " ".join(str(result).splitlines()[:2])
    assert "Not tried: no step, not atomic, never recovers" in headline
    for code in ("no step", "not atomic"):
        assert "applied to nothing that comes back" in result.not_tried[code]
    with pytest.raises(AssertionError, match="applied to nothing"):
        result.raise_if_broken(not_tried="raise")


def test_parameters_beside_their_old_values_are_right():
    result = check(*forgetful(returned=optax.apply_updates))
    assert "no step" not in result.broken


def test_parameters_in_integers_are_not_called_forgotten():
    """A table of eight bits is trained, and the float32 start comes back too."""
    optimizer = wrap(optax.sgd(1e-3))

    @jax.jit
    def step(first, table, opt_state, batch):
        params = {name: first[name] + table[name] / 128.0 for name in first}
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        change = jax.tree.map(lambda x: jnp.sign(x).astype(jnp.int8), updates)
        return first, jax.tree.map(jnp.add, table, change), opt_state, loss

    params, _, batch = plain()[1]
    table = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int8), params)
    args = params, table, optimizer.init(params), batch
    assert "no step" not in check(step, args).broken


SUBTRACTED = "The updates of optax are negative already"


def subtracting(inner, turn=lambda grads: grads):
    optimizer = wrap(inner)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(
            turn(grads), opt_state, params, value=loss
        )
        params = jax.tree.map(lambda p, u: p - u, params, updates)
        return params, opt_state, loss

    params, _, batch = plain()[1]
    return step, (params, optimizer.init(params), batch)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(1e-3),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2),
    ],
    ids=["sgd", "schedule", "injected", "lion", "MultiSteps"],
)
def test_updates_that_are_subtracted_are_noted(inner):
    result = check(*subtracting(inner))
    assert result.ok
    (note,) = [x for x in result.notes if x.startswith(SUBTRACTED)]
    assert "in <lambda> (test_check_step.py:" in note
    assert "optax.apply_updates(params, updates)" in note


@pytest.mark.parametrize(
    "inner",
    [optax.scale_by_adam(), optax.chain(optax.adam(1e-3), optax.scale(-1.0))],
    ids=["no rate", "turned round"],
)
def test_updates_that_are_made_to_be_subtracted_are_not_noted(inner):
    result = check(*subtracting(inner))
    assert not any(x.startswith(SUBTRACTED) for x in result.notes)


def test_updates_that_are_subtracted_for_a_reason_are_not_noted():
    turned = subtracting(optax.sgd(1e-3), partial(jax.tree.map, jnp.negative))
    optimizer = wrap(optax.sgd(1e-3))

    @jax.jit
    def logging(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        beside = jax.tree.map(lambda p, u: jnp.mean(p - u), params, updates)
        return optax.apply_updates(params, updates), opt_state, (loss, beside)

    params, _, batch = plain()[1]
    for step, args in (turned, (logging, (params, optimizer.init(params), batch))):
        notes = check(step, args).notes
        assert not any(x.startswith(SUBTRACTED) for x in notes)


def cleaned_while_scaled(state, loss_fn, params, transform):
    def scaled(params):
        loss = loss_fn(params)
        return jls.scale(state, loss), loss

    (_, loss), grads = transform(scaled, has_aux=True)(params)
    clean = partial(jnp.nan_to_num, posinf=0.0, neginf=0.0)
    return loss, jls.unscale(state, jax.tree.map(clean, grads))


@pytest.mark.parametrize(
    ("gradients", "evidence"),
    [
        (cleaned_while_scaled, "with a loss scale of inf the gradients overflowed"),
        # Of an infinite scale the gradients are NaN, which a clip keeps.
        (steps.clipped_by_element, "an inf in the gradients was lost by"),
    ],
    ids=["while they are scaled", "where NaN stays"],
)
def test_overflow_that_is_hidden_is_named(gradients, evidence):
    result = check(*plain(gradients, inner=optax.sgd(0.1)))
    assert result.broken == ("overflow hidden",)
    assert evidence in result.seen["overflow hidden"]


def with_spikes(start):
    """A step with a spike policy, from a state that `start` changes before."""
    policy = jls.spikes()
    optimizer = jls.loss_scaled(optax.sgd(0.01), steps.SCALER, spikes=policy)

    @jax.jit
    def step(params, opt_state, batch):
        opt_state = start(opt_state, policy)
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return step, (params, optimizer.init(params), BATCH)


def test_spike_policy_that_is_started_anew_in_each_step_is_named():
    def anew(opt_state, policy):
        return opt_state._replace(spike_state=policy.init())

    assert check(*with_spikes(anew)).broken == ("spike not skipped",)
    right = check(*with_spikes(lambda opt_state, policy: opt_state))
    assert right.ok
    assert not {"spike not skipped"} & {*right.not_tried, *right.not_applicable}


# What cannot be told.


def test_random_numbers_of_the_host_hide_no_leak_and_make_none():
    random = np.random.default_rng(0)

    def augmented(gradients):
        step, (params, opt_state, batch) = plain(gradients)

        def augments(params, opt_state, batch):
            noise = random.normal(size=batch["x"].shape).astype(np.float32)
            return step(params, opt_state, {**batch, "x": batch["x"] + noise})

        return augments, (params, opt_state, batch)

    assert check(*augmented(steps.right_gradients)).ok
    assert check(*augmented(steps.twice_unscaled)).broken == ("scale leaks",)


def test_static_scale_of_1_needs_no_scaling():
    result = check(*RIGHT["skip_nonfinite_in_bfloat16"]())
    assert "static" in result.not_applicable["not scaled"]
    assert "static" in result.not_applicable["scale leaks"]
    assert "scale that moves" in result.not_applicable["loss not passed"]
    assert not result.not_tried
    result.raise_if_broken(not_tried="raise")


def test_step_that_returns_no_loss_has_to_pass_it_all_the_same():
    step, args = plain(tell=steps.tell_nothing)
    quiet = jax.jit(lambda *args: step(*args)[:2])
    assert check(quiet, args).broken == ("loss not passed",)
    step, args = plain()
    quiet = jax.jit(lambda *args: step(*args)[:2])
    check(quiet, args).raise_if_broken(not_tried="raise")


def test_parameters_that_never_move_are_told():
    late = optax.sgd(lambda count: jnp.where(count < 100, 0.0, 0.1))
    result = check(*plain(inner=late))
    assert result.ok
    for code in ("no step", "never recovers"):
        assert "did not move in 16 good steps" in result.not_tried[code]
    leaks = check(*plain(steps.twice_unscaled, inner=late))
    assert leaks.broken == ("scale leaks",)
    never = check(*plain(inner=optax.sgd(0.0)))
    assert never.broken == ("no step",)


def with_sum_of(more, batch):
    total = sum(leaf.sum() for leaf in jax.tree.leaves(more))
    return {**batch, "x": batch["x"] + 1e-3 * total}


def test_of_an_argument_with_many_arrays_one_gets_a_fault():
    step, (params, opt_state, batch) = plain()
    more = {f"unused{i:02}": jnp.ones(2) for i in range(40)}
    runs = []

    def outer(params, opt_state, more, batch):
        runs.append(None)
        return step(params, opt_state, with_sum_of(more, batch))

    assert not check(outer, (params, opt_state, more, batch)).not_tried
    assert len(runs) < 16


def test_arrays_for_which_no_run_is_left_are_named():
    step, (params, opt_state, batch) = plain()
    more = [{f"x{k}": jnp.ones(2) for k in range(8)} for _ in range(5)]

    def outer(params, opt_state, batch, *more):
        return step(params, opt_state, with_sum_of(more, batch))

    result = check(jax.jit(outer), (params, opt_state, batch, *more))
    assert result.ok
    name = "NaN in argument 7/x7"
    assert result.not_tried[name] == "no run was left"
    assert f"{name}: no run was left" in " ".join(str(result).split())


def test_array_that_no_gradient_depends_on_gets_no_fault():
    """NaN in a learning rate makes NaN of all parameters, with a finite loss."""
    optimizer = wrap(optax.identity())

    @jax.jit
    def step(params, opt_state, rates, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        updates = jax.tree.map(lambda u: -rates[0] * u, updates)
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    args = params, optimizer.init(params), jnp.full(3, 0.1), BATCH
    check(step, args).raise_if_broken(not_tried="raise")


def test_at_most_32_runs_and_two_windows():
    step, args = plain(inner=optax.MultiSteps(optax.adam(1e-2), 4))
    runs = []

    def counted(*args):
        runs.append(None)
        return step(*args)

    assert check(counted, args).ok
    assert len(runs) <= 32 + 2 * 4


def test_step_is_compiled_as_often_as_it_needs_by_itself():
    traces = []
    step, args = plain()

    def traced(*args):
        traces.append(None)
        return step.__wrapped__(*args)

    check(jax.jit(traced), args)
    assert len(traces) == 1


# Carried arguments.


def test_metrics_that_a_bad_step_spoils_can_be_left_out():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def whole(run, batch):
        params, opt_state, loss = step(run["params"], run["opt"], batch)
        total = {"loss": run["total"]["loss"] + loss}
        return {"params": params, "opt": opt_state, "total": total}, loss

    run = {"params": params, "opt": opt_state, "total": {"loss": jnp.zeros(())}}
    result = check(whole, (run, batch))
    assert "nan committed" in result.broken
    assert "run/total/loss" in result.seen["nan committed"]
    for key in (0, "run"):
        assert jls.check_step(whole, run, batch, carried={key: ["params", "opt"]}).ok


def test_predictions_shaped_like_targets_are_not_carried():
    step, (params, opt_state, batch) = plain()

    @jax.jit
    def predicts(params, opt_state, x, y):
        params, opt_state, loss = step(params, opt_state, {"x": x, "y": y})
        return params, opt_state, loss, steps.predict(params, x).astype(jnp.float32)

    assert check(predicts, (params, opt_state, batch["x"], batch["y"])).ok


def test_nearest_of_two_trees_that_look_alike_is_carried():
    step, args = RIGHT["gradients_come_back_too"]()
    result = check(step, args)
    assert result.ok
    assert "never recovers" not in result.not_tried


def test_arguments_stay_as_they_are_also_if_donated():
    step, args = plain(donate_argnums=(0, 1))
    before = bits(args)
    jls.check_step(step, *args)
    assert bits(args) == before  # and none of them is deleted
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))


def test_nnx_objects_stay_as_they_are():
    step, args = RIGHT["nnx_train_step"]()
    before = bits(right_steps.nnx_values(args[:2]))
    jls.check_step(step, *args)
    assert bits(right_steps.nnx_values(args[:2])) == before


def test_objects_bound_by_cached_partial_stay_as_they_are():
    model, optimizer, batch = right_steps.nnx_arguments()
    jitted = nnx.jit(jls.train_step(steps.nnx_loss))
    before = bits(right_steps.nnx_values((model, optimizer)))
    assert jls.check_step(nnx.cached_partial(jitted, model, optimizer), batch).ok
    assert bits(right_steps.nnx_values((model, optimizer))) == before


def test_numpy_arrays_and_dicts_stay_as_they_are():
    step, (params, opt_state, batch) = plain()
    batch = jax.tree.map(np.array, batch)

    def careless(params, opt_state, batch):
        result = step(params, opt_state, dict(batch))
        batch["x"] *= 0
        batch["more"] = 1
        return result

    jls.check_step(careless, params, opt_state, batch)
    assert batch.keys() == {"x", "y"}
    np.testing.assert_array_equal(batch["x"], X)


def test_nothing_is_raised_where_jax_looks_for_nan():
    with jax.debug_nans(True):
        assert check(*plain()).ok


# Calibration.


def test_scale_is_lowered_until_the_step_is_not_skipped():
    step, (params, opt_state, batch) = plain(steps.twice_unscaled)
    opt_state = jls.set_loss_scale(opt_state, 2.0**60)
    assert check(step, (params, opt_state, batch)).broken == ("scale leaks",)


def test_step_that_is_skipped_at_every_scale_is_an_error():
    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        grads = jax.tree.map(lambda g: g * jnp.nan, grads)
        updates, opt_state = wrap(optax.sgd(0.1)).update(
            grads, opt_state, params, value=loss
        )
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    args = params, wrap(optax.sgd(0.1)).init(params), BATCH
    with pytest.raises(ValueError, match="must not be skipped at every loss scale"):
        check(step, args)


def test_batch_with_a_bad_loss_is_an_error():
    step, (params, opt_state, batch) = plain()
    bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    with pytest.raises(ValueError, match="the loss of these arguments must be finite"):
        check(step, (params, opt_state, bad))


def test_forward_pass_that_overflows_is_not_blamed_on_the_batch_alone():
    @jax.jit
    def step(params, opt_state, batch):
        def loss_fn(params):
            big = plain_loss(params, batch).astype(jnp.float16) * 60000
            return (big * 60000).astype(jnp.float32)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = wrap(optax.sgd(0.1)).update(
            grads, opt_state, params, value=loss
        )
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    args = params, wrap(optax.sgd(0.1)).init(params), BATCH
    with pytest.raises(ValueError, match=r"or the forward pass overflows: see jls.hea"):
        check(step, args)


def test_donated_state_is_named():
    step, (params, opt_state, batch) = plain(donate_argnums=(0, 1))
    step(params, opt_state, batch)
    with pytest.raises(ValueError, match="params/w1 was donated to an earlier step"):
        check(step, (params, opt_state, batch))


@pytest.mark.parametrize("numbers", [(0.005, True, 3), (jnp.float32(0.005), True, 3)])
def test_python_numbers_among_the_arguments(numbers):
    """Of SAC: a rate, a switch and a count; and a target that a bad step moves too."""
    optimizer = wrap(optax.adam(0.1))

    @partial(jax.jit, static_argnums=(5, 6))
    def step(params, target, opt_state, batch, rate, is_on, count):
        loss, grads = jls.value_and_grad(plain_loss)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        if is_on and count:
            target = optax.incremental_update(params, target, rate)
        return params, target, opt_state, loss

    params = plain_params()
    target = jax.tree.map(lambda x: 2 * x + 1, params)
    result = check(step, (params, target, optimizer.init(params), BATCH, *numbers))
    assert not set(result.broken) - {"not atomic"}


# Errors.


def test_step_that_does_not_run_raises_its_error_with_the_trial():
    def step(params, opt_state, batch):
        raise KeyError("of the step")

    with pytest.raises(KeyError, match="of the step") as caught:
        check(step, plain()[1])
    assert any("the first good step" in note for note in caught.value.__notes__)


def test_step_that_raises_in_a_fault_is_not_called_broken():
    step, args = plain()

    def stops(*args):
        result = step(*args)
        if not jnp.isfinite(result[2]):
            raise FloatingPointError
        return result

    result = jls.check_step(stops, *args, carried=(0, 1))
    assert result.broken == ("host sync",)
    assert "raised FloatingPointError" in result.not_tried["NaN in argument 2/x"]


def test_arguments_without_a_loss_scale_are_an_error():
    step, (params, opt_state, batch) = plain()
    with pytest.raises(ValueError, match="closes over its state") as caught:
        jls.check_step(lambda batch: step(params, opt_state, batch), batch)
    assert "got dict" in str(caught.value)
    assert "If not: optimizer = jls.loss_scaled(optimizer)." in str(caught.value)
    with pytest.raises(ValueError, match="got no arguments"):
        jls.check_step(lambda: None)


def test_step_that_does_not_return_its_state_is_an_error():
    step, args = plain()

    def loss_only(params, opt_state, batch):
        return step(params, opt_state, batch)[2]

    with pytest.raises(ValueError, match="'opt_state', which holds the loss scale"):
        check(loss_only, args)


@pytest.mark.parametrize(
    ("carried", "error", "match"),
    [
        ("params", TypeError, "must be positions and names"),
        (1, TypeError, "must be positions and names"),
        ([0.5], TypeError, "must be positions and names"),
        ([7], ValueError, "positions below 3, got 7"),
        (["no"], ValueError, "must name arguments with arrays, got 'no'"),
        ([0, 1, 2], ValueError, "of 'batch', which carried names"),
    ],
)
def test_bad_carried_are_errors(carried, error, match):
    step, args = plain()
    with pytest.raises(error, match=match):
        jls.check_step(step, *args, carried=carried)


def test_step_must_be_a_function():
    with pytest.raises(TypeError, match="step must be a function"):
        jls.check_step(3)


# The text.


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda x: x.code)
def test_every_line_to_write_fits_on_a_screen(mistake):
    for line in (mistake.write, *mistake.write_with.values()):
        write = {mistake.code: line + LEAVE_OUT}
        text = str(jls.types.StepCheck(broken=(mistake.code,), write=write))
        assert all(len(row) <= 80 for row in text.splitlines())


def test_every_code_is_a_mistake_that_is_looked_for_once():
    assert sorted(x.code for x in MISTAKES) == sorted(CODES)


def test_the_docstring_lists_the_codes_in_their_order():
    text = " ".join(str(jls.check_step.__doc__).split())
    listed = text.split("the codes of the mistakes: ")[1].split(". ")[0]
    assert re.findall('"(.*?)"', listed) == list(CODES)


def test_table_of_a_right_step():
    text = str(check(*plain()))
    headline, *rows, note = text.splitlines()
    assert headline == "jls.check_step: no mistake in all 13 that apply."
    heads = [row[:19].strip() for row in rows if row[:19].strip()]
    away = {"spike not skipped", "summed over devices", "out of sync"}
    assert heads == [*(code for code in CODES if code not in away), "precision"]
    assert all(len(row) <= 80 for row in rows)
    assert text.count(" ok ") == 13
    assert note == "Carried: params, opt_state. Taken as data: batch."


def test_the_precision_of_a_step_is_in_its_table_and_headline():
    optimizer = wrap(optax.sgd(0.1))

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w1"])
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    texts = {}
    for dtype in (jnp.float32, jnp.float16):
        step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=dtype))
        params = plain_params()
        result = jls.check_step(step, params, optimizer.init(params), BATCH)
        assert result.ok
        assert result.precision is not None
        texts[dtype] = str(result)
    half, whole = texts[jnp.float16], texts[jnp.float32]
    assert half.startswith("jls.check_step: no mistake in all 13 that apply.\n")
    assert "precision                    float16 in 100 % of the mult" in half
    assert " ".join(whole.split()).startswith(
        "jls.check_step: no mistake in all 13 that apply, but no product is half: the "
        "loss scale does nothing. no step "
    )
    assert "precision                    float32 in 100 % of the mult" in whole
    assert "\n                   write     jls.train_step(..., compute_dtype=" in whole
    assert " write " not in half


def test_a_broken_step_says_its_mistakes_before_its_precision():
    half = "no product is half"
    text = str(jls.types.StepCheck(broken=("no step",), half=half))
    assert text.startswith(
        "jls.check_step found 1 mistake: no step. Besides, no product is half."
    )


def test_a_step_without_a_program_has_no_precision_and_says_why():
    result = check(*RIGHT["ahead_of_time"]())
    assert result.precision is None
    assert result.half == ""
    reason = "The precision is not known: the step is compiled ahead of time."
    assert reason in result.notes


def test_table_of_a_broken_step_has_the_line_to_write():
    result = check(*plain(steps.unscaled_gradients, tell=steps.tell_nothing))
    text = " ".join(str(result).split())
    assert text.startswith(
        "jls.check_step found 2 mistakes: not scaled, loss not passed."
    )
    assert "BROKEN the gradients that the optimizer is given do not depend on" in text
    assert "write loss, grads = jls.value_and_grad(loss_fn)(opt_state, params" in text
    assert "optimizer.update(grads, opt_state, params, value=loss)" in text
    assert "steps.py:" in text


def test_raise_if_broken_is_for_tests():
    check(*plain()).raise_if_broken()
    broken = check(*plain(tell=steps.tell_nothing))
    with pytest.raises(AssertionError, match="loss not passed    BROKEN"):
        broken.raise_if_broken()
    with pytest.raises(ValueError, match=r"not_tried must be .*got 'warn'"):
        broken.raise_if_broken(not_tried="warn")


def test_not_jitted_is_a_note():
    step, args = plain()
    eager = step.__wrapped__
    assert "Not jitted as passed: step = jax.jit(step)." in check(eager, args).notes
    assert len(check(step, args).notes) == 1
    assert len(check(lambda *args: step(*args), args).notes) == 1


# What it costs.


def test_at_most_three_times_the_carried_state_is_on_the_device():
    """What the caller holds, the copies that the step gets, and what it returns."""
    optimizer = wrap(optax.adam(1e-2))
    params = {f"w{i}": jnp.ones((256, 256)) for i in range(4)}
    opt_state = optimizer.init(params)
    carried = sum(x.nbytes for x in jax.tree.leaves((params, opt_state)))
    most = []

    @partial(jax.jit, donate_argnums=())
    def update(params, opt_state, x):
        def loss_fn(params):
            for w in params.values():
                x_new = jnp.tanh(x @ w)
            return jnp.mean(x_new**2)

        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    def step(*args):
        result = update(*args)
        if all(isinstance(x, jax.Array) for x in jax.tree.leaves(args)):
            # Views of the host keep the memory of a CPU, but no array.
            most.append(sum(x.nbytes for x in jax.live_arrays()))
        return result

    before = sum(x.nbytes for x in jax.live_arrays())
    assert check(step, (params, opt_state, jnp.ones((2, 256)))).ok
    assert len(most) > 4
    assert max(most) - before <= 2.1 * carried


def test_step_that_takes_long_says_what_it_does(monkeypatch, caplog):
    monkeypatch.setattr("jls._tools.reading.slow._PATIENCE_IN_SECONDS", 0.0)
    assert check(*plain()).ok
    assert "compiling and running the step" in caplog.text


# Steps with operations that have no rule.


def test_host_callback_on_the_way_of_the_gradients_is_said():
    def through_the_host(state, loss_fn, params, transform):
        scaled = transform(lambda p: jls.scale(state, loss_fn(p)))
        loss, grads = scaled(params)
        grads = jax.tree.map(
            lambda g: jax.pure_callback(lambda x: np.asarray(x), g, g), grads
        )
        return loss / jls.loss_scale(state), jls.unscale(state, grads)

    result = check(*plain(through_the_host))
    assert result.ok
    assert "pure_callback" in result.not_tried["scale leaks"]


def test_callback_beside_the_gradients_hides_nothing():
    def logged(state, loss_fn, params, transform):
        loss, grads = steps.right_gradients(state, loss_fn, params, transform)
        jax.debug.callback(lambda x: None, loss)
        return loss, grads

    result = check(*plain(logged))
    assert result.ok
    assert not result.not_tried


def test_place_of_a_mistake_is_a_line_of_the_user():
    result = check(*plain(steps.clipped_while_scaled))
    place = result.where["scale leaks"]
    assert place.file == steps.__file__
    assert place.function == "clipped_while_scaled"
    assert f"steps.py:{place.line}" in str(result)


def test_scale_that_is_never_adjusted_is_stuck():
    result = check(*steps.never_adjusted())
    assert result.broken == ("scale stuck",)
    assert "scaler.adjust" in result.write["scale stuck"]


def narrowed(cast, state, loss_fn, params, transform):
    loss, grads = steps.right_gradients(state, loss_fn, params, transform)
    return loss, jax.tree.map(cast, grads)


NARROW = {
    "float16 and back": (lambda g: g.astype(jnp.float16).astype(jnp.float32), True),
    "bfloat16 and back": (lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), False),
    "scaled, float16 and back": (
        lambda g: (g * 1024.0).astype(jnp.float16).astype(jnp.float32) / 1024.0,
        False,
    ),
}


@pytest.mark.parametrize("how", one_of(NARROW))
def test_gradients_that_become_float16_are_named(how):
    cast, is_mistake = NARROW[how]
    result = check(*plain(partial(narrowed, cast)))
    assert result.broken == (("gradients narrowed",) if is_mistake else ())
    is_noted = "except a cast of scaled ones" in result.seen.get(
        "gradients narrowed", ""
    )
    assert is_noted == how.startswith("scaled")


def test_three_wrappers_are_told_apart():
    optimizer = wrap(optax.adam(1e-2))

    def make(gradients):
        @jax.jit
        def step(params, states, batch):
            new, loss = {}, 0.0
            for name in params:
                state = states[name]
                make_them = gradients if name == "c" else steps.right_gradients
                loss, grads = make_them(
                    state,
                    lambda p: plain_loss(p, batch),
                    params[name],
                    jax.value_and_grad,
                )
                updates, states[name] = optimizer.update(
                    grads, state, params[name], value=loss
                )
                new[name] = optax.apply_updates(params[name], updates)
            return new, states, loss

        params = {name: plain_params() for name in "abc"}
        return step, (params, {x: optimizer.init(params[x]) for x in params}, BATCH)

    assert not check(*make(steps.right_gradients)).not_tried
    result = check(*make(steps.unscaled_gradients))
    assert result.broken == ("not scaled",)
    assert "states/c" in result.seen["not scaled"]
