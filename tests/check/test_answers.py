"""Answers of `jls.check_step` that were not true once: an "ok", or an alarm."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from steps import plain

import jls

pytestmark = pytest.mark.standard_promotion

X = jnp.ones((4, 3))


def squares(params, x):
    return jnp.mean((x @ params) ** 2)


def make(inner=None, **options):
    optimizer = jls.loss_scaled(inner or optax.adam(0.1), **options)
    params = jnp.ones(3)
    return optimizer, params, optimizer.init(params)


def right_step(optimizer, params, opt_state, x):
    loss, grads = jls.value_and_grad(squares)(opt_state, params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def words(check):
    return " ".join(str(check).split())


# Static numbers, for each of which the step is compiled anew.


class CountingState(TrainState):
    # It changes once, and comes first.
    phase: int = flax.struct.field(pytree_node=False, default=0)
    epoch: int = flax.struct.field(pytree_node=False, default=0)


@pytest.mark.parametrize("by", [1, 0])
def test_a_number_in_a_static_field_that_counts_is_retraced(by):
    optimizer, params, _ = make()
    state = CountingState.create(apply_fn=None, params=params, tx=optimizer)
    step = jls.train_step(lambda state, x: squares(state.params, x))

    @jax.jit
    def counting(state, x):
        state, report = step(state, x)
        return state.replace(phase=1, epoch=state.epoch + by), report

    check = jls.check_step(counting, state, X)
    assert check.broken == (("retraced",) if by else ())
    if by:
        assert "state/epoch is a static number that counts, 0, 1, 2" in words(check)


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.calls, self.is_training = 0, False


@pytest.mark.parametrize("counts", [True, False])
def test_an_attribute_of_a_module_that_counts_is_retraced(counts):
    """One that is set, as by `model.train()`, changes once: the step is right."""

    def loss_fn(model, x):
        model.calls += counts
        model.is_training = True
        return jnp.mean(model.linear(x) ** 2)

    def step(model, optimizer, x):
        grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer, model, x)
        optimizer.update(model, grads, value=loss)
        model.calls, model.is_training = model.calls + counts, True

    model = Net()
    tx = jls.loss_scaled(optax.adam(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    check = jls.check_step(nnx.jit(step), model, optimizer, X)
    assert check.broken == (("retraced",) if counts else ()), check
    if counts:
        assert "model/calls is a static number that counts" in words(check)


class Rates(NamedTuple):
    rate: float
    count: int = 3


@dataclasses.dataclass(frozen=True)
class Settings:  # a leaf
    rate: float


STATICS = {
    "dict": lambda rate: {"rate": rate},
    "nested": lambda rate: {"a": {"rate": rate, "ticks": [2, "name"]}},
    "list": lambda rate: [rate],
    "NamedTuple": Rates,
    "dataclass": Settings,
    "number": lambda rate: rate,
}


def step_with(make, jit, factor):
    optimizer = jls.loss_scaled(optax.sgd(0.1))

    def numbers(rates):
        leaves = jax.tree.leaves(rates)
        return [x.rate if isinstance(x, Settings) else x for x in leaves]

    @jit
    def step(w, state, rates, x):
        (rate, *_) = numbers(rates)
        loss, grads = jls.value_and_grad(squares)(state, w, x)
        grads = jax.tree.map(lambda g: g * rate, grads)
        updates, state = optimizer.update(grads, state, w, value=loss)
        rates = make(factor * rate if factor else 0.5)
        return optax.apply_updates(w, updates), state, rates, loss

    params = jnp.ones(3)
    return step, params, optimizer.init(params), make(1.0), X


@pytest.mark.parametrize("kind", STATICS)
def test_a_number_that_comes_back_other_in_each_call_is_retraced(kind):
    """`eqx.filter_jit` takes Python numbers for static."""
    check = jls.check_step(*step_with(STATICS[kind], eqx.filter_jit, 0.99))
    assert check.broken == ("retraced",), check
    assert "is a static number that counts, 1.0, 0.99, 0.9801" in words(check)
    once = jls.check_step(*step_with(STATICS[kind], eqx.filter_jit, 0))
    assert once.broken == ()
    assert "is a static number, 1.0, that comes back as 0.5" in words(once)
    same = jls.check_step(*step_with(STATICS[kind], eqx.filter_jit, 1))
    assert same.broken == ()
    assert "static number" not in words(same)


@pytest.mark.parametrize("kind", ["dict", "list", "NamedTuple", "number"])
def test_a_number_that_jax_jits_is_none_that_is_static(kind):
    check = jls.check_step(*step_with(STATICS[kind], jax.jit, 0.99))
    assert check.broken == ()
    assert "static number" not in words(check)


class Module(eqx.Module):
    w: jax.Array
    calls: float = 0.0


@pytest.mark.parametrize("counts", [True, False])
def test_a_float_in_an_equinox_model_that_counts_is_retraced(counts):
    optimizer = jls.loss_scaled(optax.adam(0.1))
    model = Module(jnp.ones(3))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x):
        return jnp.mean((x @ model.w) ** 2)

    @eqx.filter_jit
    def step(model, opt_state, x):
        grad_fn = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
        loss, grads = grad_fn(opt_state, model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        model = eqx.apply_updates(model, updates)
        return Module(model.w, model.calls + counts), opt_state

    check = jls.check_step(step, model, opt_state, X)
    assert check.broken == (("retraced",) if counts else ()), check


def test_a_number_that_counts_outside_of_the_jitted_part_is_right():
    optimizer, params, _ = make()
    state = CountingState.create(apply_fn=None, params=params, tx=optimizer)
    inner = jax.jit(functools.partial(right_step, optimizer))

    def step(state, x):
        params, opt_state = inner(state.params, state.opt_state, x)
        return state.replace(params=params, opt_state=opt_state, epoch=state.epoch + 1)

    assert jls.check_step(step, state, X).ok


def test_a_weakly_typed_parameter_is_noted():
    optimizer, _, _ = make()

    def loss_fn(params, x):
        return jnp.mean((x * params["scale"]) ** 2)

    step = jax.jit(jls.train_step(loss_fn, optimizer))
    for scale, count in ((jnp.asarray(1.0), 1), (jnp.float32(1.0), 0)):
        params = {"scale": scale}
        check = jls.check_step(step, params, optimizer.init(params), X)
        assert check.ok
        notes = [x for x in check.notes if "params/scale is weakly typed" in x]
        assert len(notes) == count


def test_nothing_is_compiled_anew_where_jit_is_disabled():
    optimizer, params, opt_state = make()
    step = jax.jit(functools.partial(right_step, optimizer))
    with jax.disable_jit():
        check = jls.check_step(step, params, opt_state, X)
    assert check.ok
    assert set(check.not_tried) == {"retraced"}


@pytest.mark.parametrize(
    "setting",
    [
        jax.checking_leaks,
        functools.partial(jax.debug_nans, True),
        functools.partial(jax.debug_infs, True),
    ],
)
def test_settings_of_jax_change_no_answer(setting):
    step, args = plain()
    expected = str(jls.check_step(step, *args))
    with setting():
        assert str(jls.check_step(step, *args)) == expected


# States that narrow, in which a loss scale becomes inf.


def to_half(tree):
    def cast(x):
        return x.astype(jnp.float16) if x.dtype == jnp.float32 else x

    return jax.tree.map(cast, tree)


def narrowing(part):
    optimizer, params, opt_state = make()

    @jax.jit
    def step(params, opt_state, x):
        params, opt_state = right_step(optimizer, params, opt_state, x)
        half = to_half(opt_state)
        if part == "moments":
            half = opt_state._replace(inner_state=half.inner_state)
        return params, half

    return step, optimizer, params, opt_state


@pytest.mark.parametrize("part", ["all", "moments"])
def test_a_state_that_comes_back_narrower_is_named(part):
    step, _, params, opt_state = narrowing(part)
    check = jls.check_step(step, params, opt_state, X)
    assert check.broken == ("state narrowed",)
    assert "opt_state/inner_state/0/mu" in check.seen["state narrowed"]
    assert "came back as float16" in check.seen["state narrowed"]
    assert check.not_tried["retraced"] == "mend the dtypes of the state first"


def test_a_state_that_came_in_narrow_is_named_and_refused_by_update():
    step, optimizer, params, opt_state = narrowing("all")
    params, narrow = step(params, opt_state, X)
    check = jls.check_step(step, params, narrow, X)
    assert check.broken == ("state narrowed",)
    assert "opt_state/scaler_state came in as float16" in words(check)
    rule = r"loss scale must be float32, got float16.* without a cast.*upgrade_state"
    for run in (step, functools.partial(right_step, optimizer)):
        with pytest.raises(TypeError, match=rule):
            run(params, narrow, X)
    wide = jls.upgrade_state(opt_state, opt_state._replace(scaler_state=narrow[1]))
    assert wide.scaler_state.loss_scale.dtype == jnp.float32
    assert wide.scaler_state.loss_scale == narrow.scaler_state.loss_scale
    right_step(optimizer, params, wide, X)


def test_moments_that_are_narrow_by_choice_are_right():
    optimizer, params, opt_state = make(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    step = jax.jit(functools.partial(right_step, optimizer))
    assert jls.check_step(step, params, opt_state, X).ok


def bf16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@pytest.mark.parametrize("beside", ["another network", "a snapshot", "a metric"])
def test_what_is_narrow_beside_a_whole_state_is_right(beside):
    wide, params, opt_state = make()
    narrow, _, other = make(optax.adam(0.1, mu_dtype=jnp.bfloat16))

    @jax.jit
    def step(params, opt_state, other, x):
        new, opt_state = right_step(wide, params, opt_state, x)
        if beside == "another network":
            _, other = right_step(narrow, params, other, x)
        snapshot = {
            "a snapshot": bf16(opt_state),
            "a metric": {"loss_scale": bf16(opt_state.scaler_state.loss_scale)},
        }
        return new, opt_state, other, snapshot.get(beside)

    check = jls.check_step(step, params, opt_state, other, X, carried=(0, 1, 2))
    assert "state narrowed" not in check.broken, check


# What is carried, and what is only read.


def test_a_path_with_words_of_optax_excuses_no_missing_loss():
    optimizer, _, _ = make()

    def loss_fn(params, x):
        return squares(params["steps_since_sync"], x)

    @jax.jit
    def step(params, opt_state, x):
        grads = jls.grad(loss_fn)(opt_state, params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"steps_since_sync": jnp.ones(3)}
    check = jls.check_step(step, params, optimizer.init(params), X)
    assert check.broken == ("loss not passed",)


def test_a_result_that_looks_like_an_argument_is_in_the_headline():
    optimizer, params, opt_state = make()

    @jax.jit
    def step(params, opt_state, h, x):
        params, opt_state = right_step(optimizer, params, opt_state, x)
        return params, opt_state, jnp.tanh(h @ h)

    args = params, opt_state, jnp.ones((3, 3)), X
    check = jls.check_step(step, *args)
    assert check.ok
    assert "carried=(0, 1)" in check.not_tried["h"]
    assert "13 that apply, but no product is half" in words(check)
    assert "does nothing. Not tried: h." in words(check)
    with pytest.raises(AssertionError, match="looks like it"):
        check.raise_if_broken(not_tried="raise")
    assert "h" not in jls.check_step(step, *args, carried=(0, 1, 2)).not_tried


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_of_an_average_may_have_the_axis_of_pmap(shape):
    optimizer, params, opt_state = make()

    @jax.jit
    def step(params, opt_state, average, rate, x):
        params, opt_state = right_step(optimizer, params, opt_state, x)
        average = rate * average + (1 - rate) * params
        return params, opt_state, average, rate

    rate = jnp.full(shape, 0.9)
    check = jls.check_step(step, params, opt_state, 2 * params, rate, X)
    assert check.ok, check


def test_a_state_that_is_only_read_leaves_nothing_untried():
    """As a critic's step is given the whole state of the actor."""
    optimizer, params, opt_state = make()

    @jax.jit
    def step(params, opt_state, actor, x):
        target = x @ actor.params
        loss, grads = jls.value_and_grad(lambda w: jnp.mean((x @ w - target) ** 2))(
            opt_state, params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    actor = TrainState.create(apply_fn=None, params=3 * params, tx=make()[0])
    check = jls.check_step(step, params, opt_state, actor, X)
    assert check.ok
    assert not check.not_tried, check


def test_gradients_cleaned_while_they_are_scaled_are_named():
    """With an infinite scale the loss is NaN: a skip for another reason."""

    def cleaned(state, loss_fn, params, transform):
        del transform
        scaled, grads = jax.value_and_grad(lambda p: jls.scale(state, loss_fn(p)))(
            params
        )
        grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
        return scaled / jls.loss_scale(state), jls.unscale(state, grads)

    check = jls.check_step(*_flat(plain(cleaned)))
    assert check.broken == ("overflow hidden",)
    assert check.where["overflow hidden"].file == __file__


def _flat(made):
    step, args = made
    return step, *args


@pytest.mark.parametrize("reduce", [jnp.nansum, jnp.sum])
def test_a_loss_that_hides_a_nan_of_the_batch_is_noted(reduce):
    optimizer, params, opt_state = make()

    def loss_fn(params, x):
        return reduce((x @ params) ** 2)

    step = jax.jit(jls.train_step(loss_fn, optimizer))
    check = jls.check_step(step, params, opt_state, X)
    assert check.ok
    assert ("stays finite with NaN in" in words(check)) == (reduce is jnp.nansum)


def test_the_line_to_write_for_an_equinox_model_passes_its_transform():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def make_step(value_and_grad):
        @eqx.filter_jit
        def step(model, opt_state, batch):
            loss, grads = value_and_grad(opt_state, model, batch)
            updates, opt_state = optimizer.update(grads, opt_state, value=loss)
            return eqx.apply_updates(model, updates), opt_state

        return step

    bare = eqx.filter_value_and_grad(loss_fn)
    args = model, opt_state, X
    check = jls.check_step(make_step(lambda state, *args: bare(*args)), *args)
    assert check.broken == ("not scaled",)
    line = "jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)"
    assert f"loss, grads = {line}(opt_state, model, batch)" in check.write["not scaled"]
    namespace = {"jls": jls, "eqx": eqx, "loss_fn": loss_fn}
    assert jls.check_step(make_step(eval(line, namespace)), *args).ok


def test_statistics_that_come_back_in_the_aux_of_a_report_are_not_data():
    """Without a name they may be metrics: they are not tried."""

    def loss_fn(params, batch, stats):
        mean = 0.9 * stats["mean"] + 0.1 * batch.mean(0)
        return jnp.mean(((batch - mean) @ params) ** 2), {"mean": mean}

    optimizer, params, opt_state = make()
    step = jax.jit(jls.train_step(loss_fn, optimizer, has_aux=True))
    args, stats = (params, opt_state, X), {"mean": jnp.zeros(3)}
    check = jls.check_step(step, *args, stats=stats)
    assert check.ok
    assert check.not_tried.keys() == {"stats"}
    check = jls.check_step(step, *args, stats=stats, carried=(0, 1, "stats"))
    assert "nan committed" in check.broken


def test_metrics_in_the_aux_of_a_report_leave_the_batch_as_data():
    def loss_fn(params, batch):
        loss = jnp.mean((batch["x"] @ params) ** 2)
        return loss, {"x": batch["x"] * 2, "loss": loss}

    optimizer, params, opt_state = make()
    step = jax.jit(jls.train_step(loss_fn, optimizer, has_aux=True))
    check = jls.check_step(step, params, opt_state, {"x": X})
    assert check.ok
    assert not check.not_tried
    assert "Taken as data: batch." in str(check)


# Steps that train nothing, or not what they say.


def step_of(change, optimizer=None, loss_fn=squares):
    """A right step, with something changed in what it returns."""
    optimizer = optimizer or jls.loss_scaled(optax.adam(0.1), jls.dynamic(1024.0))
    params = jnp.linspace(0.1, 1.0, 16)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, x)
        updates, new = optimizer.update(grads, opt_state, params, value=loss)
        new_params = optax.apply_updates(params, updates)
        return change(new_params, new, opt_state, updates, optimizer.init)

    x = jnp.sin(jnp.arange(64.0)).reshape(4, 16)
    return step, params, optimizer.init(params), x


def stopped(params, x):
    return squares(jax.lax.stop_gradient(params), x)


def as_it_is(params, new, *_):
    return params, new


CONSTANT = {
    "the gradients are 0": ({"loss_fn": stopped}, as_it_is),
    "the learning rate is 0": (
        {"optimizer": jls.loss_scaled(optax.adam(0.0))},
        as_it_is,
    ),
    "comes back as it was in each step: opt_state/inner_state/0/mu": (
        {},
        lambda p, new, old, *_: (p, new._replace(inner_state=old.inner_state)),
    ),
    "is set back in each step: opt_state/inner_state/0/mu": (
        {},
        lambda p, new, old, u, init: (
            p,
            new._replace(inner_state=init(p).inner_state),
        ),
    ),
}


@pytest.mark.parametrize("evidence", CONSTANT)
def test_a_step_that_trains_nothing_is_no_step(evidence):
    options, change = CONSTANT[evidence]
    check = jls.check_step(*step_of(change, **options))
    assert check.broken == ("no step",), str(check)
    assert evidence in check.seen["no step"]
    assert not check
    with pytest.raises(AssertionError, match="no step"):
        check.raise_if_broken()


def test_a_wrapped_transformation_with_a_constant_state_is_carried_on():
    """One that pulls parameters back to where they began."""

    def update(updates, state, params=None):
        pull = jax.tree.map(lambda g, p, q: g + 0.1 * (p - q), updates, params, state)
        return pull, state

    anchor = optax.GradientTransformation(lambda params: params * 1, update)
    inner = optax.chain(anchor, optax.scale(-0.1))
    assert jls.check_step(*step_of(as_it_is, jls.loss_scaled(inner)))


@pytest.mark.filterwarnings("ignore:.*the loss does not depend on the parameters")
@pytest.mark.parametrize("inner", ["train_step", "skip_nonfinite"])
def test_zero_gradients_are_seen_without_a_loss_scale_and_in_train_step(inner):
    optimizer = jls.skip_nonfinite(optax.adam(0.1))
    step, params, opt_state, x = step_of(as_it_is, optimizer, stopped)
    if inner == "train_step":
        step = jax.jit(jls.train_step(stopped, optimizer))
    check = jls.check_step(step, params, opt_state, x)
    assert check.broken == ("no step",)
    assert "stop_gradient" in words(check)


def test_zero_gradients_of_a_part_are_a_note():
    def loss_fn(params, x):
        return squares(jax.lax.stop_gradient(params["a"]) + params["b"], x)

    optimizer = jls.loss_scaled(optax.adam(0.1))
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    check = jls.check_step(step, params, optimizer.init(params), X)
    assert check
    assert not check.doubts
    assert "The gradients of 1 of 2 arrays are 0" in words(check)


SCALER_SET_BACK = {
    "a fresh scaler": lambda p, new, old, u, init: (
        p,
        new._replace(scaler_state=init(p).scaler_state),
    ),
    "a number": lambda p, new, *_: (p, jls.set_loss_scale(new, 1024.0)),
    "the count of finite steps": lambda p, new, *_: (
        p,
        new._replace(
            scaler_state=new.scaler_state._replace(
                finite_count=jnp.zeros((), jnp.int32)
            )
        ),
    ),
}


@pytest.mark.parametrize("name", SCALER_SET_BACK)
def test_a_scaler_that_is_set_back_in_each_step_is_stuck(name):
    check = jls.check_step(*step_of(SCALER_SET_BACK[name]))
    assert check.broken == ("scale stuck",), str(check)
    assert "in each step" in check.seen["scale stuck"]


DOUBTFUL = {
    "the updates are added twice": lambda p, new, old, u, init: (
        optax.apply_updates(p, u),
        new,
    ),
    "the updates are applied to nothing that comes back": (
        lambda p, new, old, u, init: (u, new)
    ),
    "the new parameters are rounded to float16": lambda p, new, *_: (
        p.astype(jnp.float16).astype(jnp.float32),
        new,
    ),
    "the new parameters are rounded to bfloat16": lambda p, new, *_: (
        p.astype(jnp.bfloat16).astype(jnp.float32),
        new,
    ),
}


@pytest.mark.parametrize("doubt", DOUBTFUL)
def test_what_may_be_meant_is_in_the_headline(doubt):
    check = jls.check_step(*step_of(DOUBTFUL[doubt]))
    assert check.ok
    assert check.doubts == (doubt,)
    assert doubt in words(check).partition("no step ")[0]


@pytest.mark.parametrize("warm_up", [4, 40])
def test_parameters_that_stand_still_are_in_the_headline(warm_up):
    rate = optax.join_schedules(
        [optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [warm_up]
    )
    check = jls.check_step(*step_of(as_it_is, jls.loss_scaled(optax.adam(rate))))
    assert check.ok
    still = "the parameters did not move in 16 good steps"
    assert check.doubts == ((still,) if warm_up == 40 else ())
    assert ("no step" in check.not_tried) == (warm_up == 40)


# Gradients of `jax.grad`, which `jls.skip_nonfinite` takes.


def root_of(params, x):
    """A row of zeros has a finite loss, and a gradient of NaN."""
    return jnp.mean(jnp.sqrt(jnp.sum((x @ params["a"]) ** 2, -1))) + params["b"].sum()


CLEANERS = {
    "nan_to_num": jnp.nan_to_num,
    "clip": lambda g: jnp.clip(g, -1.0, 1.0),
    "where": lambda g: jnp.where(jnp.isfinite(g), g, 0.0),
    "nothing": lambda g: g,
    "times 2": lambda g: 2 * g,
    "where, but its own": lambda g: jnp.where(g > 0, g, 2 * g),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("cleaner", CLEANERS)
@pytest.mark.parametrize("of", ["jax", "jls"])
def test_an_overflow_is_hidden_from_a_guard_without_a_loss_scale(of, cleaner):
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}

    @jax.jit
    def step(params, opt_state, x):
        if of == "jax":
            loss, grads = jax.value_and_grad(root_of)(params, x)
        else:
            loss, grads = jls.value_and_grad(root_of)(opt_state, params, x)
        grads = jax.tree.map(CLEANERS[cleaner], grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    check = jls.check_step(step, params, optimizer.init(params), X)
    hides = cleaner in ("nan_to_num", "clip", "where")
    assert ("overflow hidden" in check.broken) == hides, str(check)
    if not hides:
        assert "overflow hidden" not in check.not_tried


# A solve, of which the loss scale is no factor although the program adds to it.


def solved(matrix, ridge, right):
    return jnp.linalg.solve(matrix + ridge * jnp.eye(len(matrix)), right)


def mixed_step(penalty, ridge):
    """The backward pass mixes values by a solve; a penalty is not scaled."""

    @jax.custom_vjp
    def layer(x):
        return x

    def backward(_, ct):
        rows = jnp.stack([ct, jnp.roll(ct, 1), jnp.roll(ct, 3)])
        weights = solved(rows @ rows.T, ridge, jnp.ones(3))
        return (weights / weights.sum() @ jnp.stack([ct, ct, ct]),)

    layer.defvjp(lambda x: (x, None), backward)
    optimizer = jls.loss_scaled(optax.adam(0.1), jls.dynamic(1024.0))

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params):
            loss = jnp.mean((x @ layer(params) - 1) ** 2)
            return jls.scale(opt_state, loss) + penalty * (params**2).sum(), loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        grads = jls.unscale(opt_state, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.linspace(0.1, 1.0, 16)
    x = jnp.sin(jnp.arange(64.0)).reshape(4, 16)
    return step, params, optimizer.init(params), x


@pytest.mark.parametrize("ridge", [0.0, 1e-8])
def test_a_solve_in_the_backward_pass_leaks_no_scale(ridge):
    check = jls.check_step(*mixed_step(0.0, ridge))
    assert check.ok, str(check)
    assert "scale leaks" not in check.not_tried


@pytest.mark.parametrize("penalty", [1e-5, 1e-2])
def test_a_penalty_that_is_added_to_a_scaled_loss_leaks_the_scale(penalty):
    check = jls.check_step(*mixed_step(penalty, 1e-8))
    assert check.broken == ("scale leaks",), str(check)
    assert "mixed by add" in check.seen["scale leaks"]
