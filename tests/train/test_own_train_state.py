"""A `TrainState` of the user's own: other fields, other names."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import struct
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion


@struct.dataclass
class Scenic:
    """As in Scenic: the count has another name, and the model has a state."""

    tx: Any = struct.field(pytree_node=False)
    params: Any
    opt_state: Any
    global_step: Any
    model_state: Any


@struct.dataclass
class Uncounted:
    tx: Any = struct.field(pytree_node=False)
    params: Any
    opt_state: Any


@struct.dataclass
class Renamed:
    """No name is Flax's; `target` is a tree like the weights."""

    optimizer: Any = struct.field(pytree_node=False)
    weights: Any
    moments: Any
    key: Any


class Module(eqx.Module):
    tx: Any = eqx.field(static=True)
    params: Any
    opt_state: Any
    step: Any


TX = jls.loss_scaled(optax.adam(0.5), jls.dynamic(64.0))
PARAMS = {"w": jnp.ones(2)}


def loss_fn(state, batch):
    params = state.weights if isinstance(state, Renamed) else state.params
    loss = jnp.sum(params["w"] * batch)
    return (loss, {"model_state": batch}) if isinstance(state, Scenic) else loss


STATES = {
    Scenic: {"global_step": 3, "model_state": jnp.zeros(2)},
    Uncounted: {},
    Module: {"step": 3},
}
GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])


@pytest.mark.parametrize("kind", [*STATES, Renamed])
def test_the_fields_are_found_and_rolled_back(kind, jit_or_eager):
    opt_state = TX.init(PARAMS)
    if kind is Renamed:
        state = Renamed(TX, PARAMS, opt_state, jax.random.key(0))
    else:
        state = kind(tx=TX, params=PARAMS, opt_state=opt_state, **STATES[kind])
    step = jit_or_eager(jls.train_step(loss_fn, carried=kind is Scenic))
    good, report = step(state, GOOD)
    assert not report.skipped
    assert type(good) is kind
    skipped, report = step(good, BAD)
    assert report.skipped

    def kept(state):
        names = ("weights", "params", "key", "model_state")
        return {
            name: jax.random.key_data(x) if name == "key" else x
            for name in names
            if (x := getattr(state, name, None)) is not None
        }

    assert_identical(kept(skipped), kept(good))
    assert jls.metrics(skipped)["skips"] == 1
    for name in ("step", "global_step"):
        assert getattr(skipped, name, 5) == 5  # counts calls
    if kind is Scenic:
        assert_identical(good.model_state, GOOD)


@struct.dataclass
class Ambiguous:
    optimizer: Any = struct.field(pytree_node=False)
    weights: Any
    target: Any
    opt_state: Any


@struct.dataclass
class Bare:
    optimizer: Any = struct.field(pytree_node=False)
    params: Any
    moments: Any


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            Ambiguous(TX, PARAMS, PARAMS, TX.init(PARAMS)),
            r"one field that holds the parameters of that optimizer, got 2\. Call the",
        ),
        (
            Bare(optax.sgd(0.1), PARAMS, optax.sgd(0.1).init(PARAMS)),
            "the state of an optimizer made by jls, got 0",
        ),
    ],
)
def test_what_cannot_be_told_is_asked_for(state, message):
    with pytest.raises(ValueError, match=message):
        jls.train_step(loss_fn)(state, GOOD)


@struct.dataclass
class Mine:
    optimizer: Any = struct.field(pytree_node=False)
    weights: Any
    batch_stats: Any
    moments: Any


@pytest.mark.parametrize("bad", ["weights", "batch_stats"])
def test_health_looks_at_fields_of_any_name(bad):
    state = Mine(TX, PARAMS, jnp.zeros(2), TX.init(PARAMS))
    health = jls.health(state)
    assert health.verdict == "no step"
    assert health.numbers["min_scale"] == 1.0  # the optimizer is found, too
    assert set(health.numbers["poisoned_leaves"]) == {"params", "opt_state", "carried"}
    nan = jax.tree.map(lambda x: x * jnp.nan, getattr(state, bad))
    assert jls.health(state.replace(**{bad: nan})).verdict == "poisoned"


class Whole(eqx.Module):
    """The model is no tree of floating-point arrays alone."""

    optimizer: Any = eqx.field(static=True)
    model: eqx.nn.MLP
    opt_state: Any


def test_a_whole_equinox_model_may_be_a_field(jit_or_eager):
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    opt_state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    state = Whole(TX, model, opt_state)

    def loss_fn(state, batch):
        return jnp.mean(jax.vmap(state.model)(batch) ** 2)

    step = jls.train_step(loss_fn)
    step = eqx.filter_jit(step) if jit_or_eager is jax.jit else step
    good, report = step(state, jnp.ones((3, 2)))
    assert not report.skipped
    assert jax.tree.structure(good) == jax.tree.structure(state)
    bad, report = step(good, jnp.full((3, 2), jnp.nan))
    assert report.skipped
    arrays = (eqx.filter(x.model, eqx.is_array) for x in (bad, good))
    assert_identical(*arrays)
    assert jls.health(good).verdict == "ok"
