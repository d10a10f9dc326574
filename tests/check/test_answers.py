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
