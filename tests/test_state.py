import json
from typing import NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared import assert_identical, bad_leaves

import jls
from jls._types import FIELDS

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones(2)}


class OwnState(NamedTuple):
    params: dict
    opt_state: tuple


def optimizer():
    return jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0, growth_interval=2))


def bare():
    return jls.dynamic(8.0).init()


def wrapped():
    return optimizer().init(PARAMS)


def chained():
    return optax.chain(optax.clip(1.0), optimizer(), optax.scale(2.0)).init(PARAMS)


def injected():
    make = optax.inject_hyperparams(lambda rate: optimizer())
    return make(rate=0.1).init(PARAMS)


def multi_steps():
    return optax.MultiSteps(optimizer(), 2).init(PARAMS)


def own():
    return OwnState(PARAMS, chained())


def train_state():
    model = linen.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())


def equinox_pair():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    return model, optimizer().init(eqx.filter(model, eqx.is_array))


def nnx_optimizer():
    return nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optimizer(), wrt=nnx.Param)


STATES = [
    wrapped,
    chained,
    injected,
    multi_steps,
    own,
    train_state,
    equinox_pair,
    nnx_optimizer,
]


@pytest.mark.parametrize("make", [bare, *STATES])
def test_loss_scale_is_found_wherever_it_is(make):
    scale = jls.loss_scale(make())
    assert isinstance(scale, jax.Array)
    assert (scale, scale.dtype, scale.shape) == (8.0, jnp.float32, ())


@pytest.mark.parametrize("make", STATES)
def test_metrics_are_device_scalars_under_fixed_names(make):
    metrics = jls.metrics(make())
    assert all(isinstance(value, jax.Array) for value in metrics.values())
    assert all(value.shape == () for value in metrics.values())
    start = dict.fromkeys(FIELDS, 0) | {"loss_scale": 8.0}
    assert jax.device_get(metrics) == {name: start[name] for name in metrics}


def test_metrics_of_a_bare_state_are_the_loss_scale_alone():
    assert jls.metrics(bare()) == {"loss_scale": 8.0}


@pytest.mark.parametrize("make", [bare, *STATES])
@pytest.mark.parametrize("value", [64, 64.0, np.float64(64), np.array([64]), "device"])
def test_set_loss_scale_keeps_everything_but_the_scale_and_its_counts(make, value):
    state = make()
    structure = jax.tree.structure(state)
    value = jnp.array([64.0]) if isinstance(value, str) else value
    before = jax.tree.leaves(state)
    changed = jls.set_loss_scale(state, value)
    assert jax.tree.structure(changed) == structure
    assert jls.loss_scale(changed) == 64.0
    assert not jls.loss_scale(changed).weak_type
    differ = [a is not b for a, b in zip(before, jax.tree.leaves(changed), strict=True)]
    assert sum(differ) == 3  # loss_scale, finite_count, nonfinite_count


def test_set_loss_scale_restarts_the_counts():
    state = bare()._replace(finite_count=jnp.int32(5), nonfinite_count=jnp.int32(1))
    assert jls.set_loss_scale(state, 4.0) == (4.0, 0, 0)
    assert state.finite_count == 5


def test_set_loss_scale_changes_an_nnx_optimizer_in_place():
    optimizer = nnx_optimizer()
    assert jls.set_loss_scale(optimizer, 2.0) is optimizer
    assert jls.loss_scale(optimizer) == 2.0


def test_nnx_streams_beside_the_state_are_no_state():
    """`nnx.Rngs` has every attribute that is asked for."""
    tree = {"rngs": nnx.Rngs(0), "optimizer": nnx_optimizer()}
    assert jls.loss_scale(tree) == jls.metrics(tree)["loss_scale"] == 8.0


def test_set_loss_scale_does_not_retrace_nor_recompile():
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return optimizer().update(PARAMS, state, PARAMS)[1]

    mesh = Mesh(jax.devices()[:1], "i")
    placed = jax.device_put(wrapped(), NamedSharding(mesh, PartitionSpec()))
    for start in (wrapped(), placed):
        state = step(step(start))
        compiled = step._cache_size()
        state = step(jls.set_loss_scale(state, 32.0))
        assert step._cache_size() == compiled
        assert jls.loss_scale(state) == 32.0
    assert len(traces) == 2  # one for each placement


def test_one_compilation_serves_a_run_on_a_committed_device():
    params = jax.device_put(PARAMS, jax.devices()[0])
    opt = optimizer()
    step = jax.jit(lambda params, state: opt.update(params, state, params)[1])
    state = opt.init(params)
    for _ in range(3):
        state = step(params, state)
    value = jax.device_put(jnp.float32(4.0), jax.devices()[0])
    state = step(params, jls.set_loss_scale(state, value))
    assert step._cache_size() == 1
    assert jls.loss_scale(state) == 4.0


def test_a_container_of_ones_own_may_call_a_field_loss_scale():
    class Container(NamedTuple):
        params: dict
        loss_scale: jls.types.ScalerState

    assert jls.loss_scale(Container(PARAMS, bare())) == 8.0


def test_a_state_of_python_numbers_works():
    state = jls.types.ScalerState(8.0, 0, 0)
    assert isinstance(jls.loss_scale(state), jax.Array)
    assert jls.scale(state, jnp.bfloat16(2.0)) == 16.0
    adjusted = jls.dynamic(8.0).adjust(state, False)
    assert adjusted == (4.0, 0, 0)


def test_set_loss_scale_does_not_consult_the_scaler_and_the_scaler_goes_on():
    state = jls.set_loss_scale(wrapped(), 2.0**126)
    _, state = optimizer().update({"w": jnp.array([1.0, jnp.nan])}, state, PARAMS)
    assert jls.loss_scale(state) == 2.0**125


def test_set_loss_scale_under_jit_takes_a_traced_value():
    state = jax.jit(jls.set_loss_scale)(wrapped(), jnp.float32(-1.0))
    assert jls.loss_scale(state) == -1.0


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), 10**400, 1e-40, np.array(2.0**127)]
)
@pytest.mark.parametrize("make", [bare, nnx_optimizer])
def test_set_loss_scale_out_of_range_is_a_value_error(make, value):
    state = make()
    with pytest.raises(ValueError, match="loss_scale must be from 2"):
        jls.set_loss_scale(state, value)
    assert jls.loss_scale(state) == 8.0


@pytest.mark.parametrize("value", [[], np.ones(2), jnp.ones((1, 1)), np.ones((0,))])
def test_set_loss_scale_of_another_shape_is_an_error(value):
    with pytest.raises((ValueError, TypeError), match="loss_scale must "):
        jls.set_loss_scale(bare(), value)


@pytest.mark.parametrize("value", ["8", None, True, 8j, [8.0], np.array(True), bare])
def test_set_loss_scale_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="loss_scale must be a real number"):
        jls.set_loss_scale(bare(), value)


@pytest.mark.parametrize(
    "read", [jls.loss_scale, jls.metrics, lambda state: jls.set_loss_scale(state, 8.0)]
)
def test_none_or_two_loss_scales_are_a_value_error_that_names_the_paths(read):
    with pytest.raises(ValueError, match="must carry a loss scale, got tuple without"):
        read(optax.adam(0.1).init(PARAMS))
    two = OwnState(wrapped(), (chained(),))
    with pytest.raises(ValueError, match=r"exactly one .* got 2: at 'params/scaler_st"):
        read(two)


def test_readers_work_under_jit_and_in_nnx_jit():
    assert jax.jit(jls.loss_scale)(train_state()) == 8.0
    assert nnx.jit(lambda opt: jls.metrics(opt)["loss_scale"])(nnx_optimizer()) == 8.0


# Which leaves were not finite ---------------------------------------------------------


LAYERS = {
    "a": jnp.ones(2),
    "frozen": jnp.int32(3),
    "layer": {"kernel": jnp.ones((2, 2)), "none": None, "z": jnp.full(2, 1 + 1j)},
}


def grads(**bad):
    leaves = {
        "a": jnp.ones(2),
        "kernel": jnp.ones((2, 2)),
        "z": jnp.full(2, 1 + 1j),
    } | bad
    return {
        "a": leaves["a"],
        "frozen": np.zeros((), jax.dtypes.float0),
        "layer": {"kernel": leaves["kernel"], "none": None, "z": leaves["z"]},
    }


def identity():
    return optax.stateless(lambda updates, params: updates)


CASES = [
    ({"a": jnp.array([1.0, jnp.nan])}, ["a"]),
    ({"kernel": jnp.full((2, 2), -jnp.inf)}, ["layer/kernel"]),
    ({"z": jnp.array([1.0, complex(1, np.inf)])}, ["layer/z"]),
    (
        {"a": jnp.full(2, jnp.inf), "z": jnp.full(2, complex(np.nan, 0))},
        ["a", "layer/z"],
    ),
]


@pytest.mark.parametrize(("bad", "names"), CASES)
def test_bad_gradients_of_the_last_skipped_step_are_named(jit_or_eager, bad, names):
    optimizer = jls.loss_scaled(identity(), jls.dynamic(8.0))
    update = jit_or_eager(optimizer.update)
    state = optimizer.init(LAYERS)
    assert bad_leaves(state, LAYERS) == []
    for step in (grads(), grads(**bad), grads()):  # it is remembered
        _, state = update(step, state, LAYERS)
    assert bad_leaves(state, LAYERS) == names
    _, state = update(grads(a=jnp.full(2, jnp.nan)), state, LAYERS)
    assert bad_leaves(state, LAYERS) == ["a"]


def test_step_skipped_for_its_loss_alone_names_no_parameter():
    optimizer = jls.loss_scaled(identity(), jls.dynamic(8.0))
    state = optimizer.init(LAYERS)
    _, state = optimizer.update(grads(a=jnp.full(2, jnp.inf)), state, LAYERS)
    _, state = optimizer.update(grads(), state, LAYERS, value=jnp.nan)
    assert bad_leaves(state, LAYERS) == []
    assert state.last_skip_reason == 2


def test_nnx_parameters_are_named_by_their_path_in_the_model():
    model = nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    )
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    bad = jax.tree.map(jnp.ones_like, params)
    bad.layers[0].bias.set_value(jnp.full(3, jnp.nan))
    optimizer.update(model, bad)
    assert bad_leaves(optimizer, params) == ["layers/0/bias"]


class Scales(NamedTuple):
    """Parameters, one of which has the name that a scaler's state has."""

    loss_scale: jax.Array
    w: jax.Array


def test_a_parameter_called_loss_scale_is_none(jit_or_eager):
    params = Scales(jnp.ones(2), jnp.ones(3))
    tx = jls.loss_scaled(optax.adam(0.1), jls.dynamic(64.0))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)

    @jit_or_eager
    def step(state):
        loss, grads = jls.value_and_grad(lambda p: jnp.sum(p.w**2))(state, state.params)
        return state.apply_gradients(grads=grads), loss

    state, loss = step(state)
    assert loss == 3.0
    for carrier in (state, state.opt_state, state.opt_state.scaler_state):
        assert jls.loss_scale(carrier) == 64.0
        assert jls.metrics(carrier)["loss_scale"] == 64.0
        changed = jls.set_loss_scale(carrier, 8.0)
        assert jls.loss_scale(changed) == 8.0
        chex.assert_trees_all_equal_structs(carrier, changed)
    moved = jls.set_loss_scale(state, 8.0)
    assert_identical(moved.params, state.params)
    assert_identical(moved.opt_state.inner_state, state.opt_state.inner_state)
    assert jls.health(state.opt_state, state.params).verdict == "ok"
    jls.check_in_sync(state)


def test_two_scales_are_still_an_error_beside_a_wrapper():
    two = (wrapped(), bare())
    with pytest.raises(ValueError, match=r"got 2: at '0/scaler_state', '1'"):
        jls.loss_scale(two)


@pytest.mark.parametrize("make", [bare, wrapped, chained, injected, train_state])
def test_metrics_on_the_host_are_those_on_the_device_after_one_transfer(
    make, monkeypatch
):
    state, device_get, transfers = make(), jax.device_get, []

    def counted(tree):
        transfers.append(tree)
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    numbers = jls.metrics(state, host=True)
    assert len(transfers) == 1
    assert list(numbers) == list(jls.metrics(state))
    assert {type(x) for x in numbers.values()} <= {bool, int, float}
    assert json.loads(json.dumps(numbers)) == jax.device_get(jls.metrics(state))
    assert numbers["loss_scale"] == 8.0


def test_metrics_on_the_host_of_a_traced_state_name_the_ones_for_jit():
    write = r"Under jit write jls\.metrics\(state\), without host=True\."
    with pytest.raises(TypeError, match=f"state must be concrete, got .*{write}"):
        jax.jit(lambda state: jls.metrics(state, host=True) and 0)(wrapped())
    with pytest.raises(ValueError, match="must carry a loss scale"):
        jls.metrics({"w": jnp.ones(2)}, host=True)


# The hyperparameters of optax.inject_hyperparams.


def injected(**kwargs):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, **kwargs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: jls.loss_scaled(injected()),
        lambda: jls.loss_scaled(optax.chain(optax.clip(1.0), injected())),
        lambda: jls.skip_nonfinite(optax.MultiSteps(injected(), 1)),
    ],
    ids=["bare", "chain", "MultiSteps"],
)
def test_hyperparams_inside_are_read_and_set_by_optax(make, jit_or_eager):
    optimizer, params = make(), jnp.ones(2)

    @jit_or_eager
    def step(state, rate):
        state = optax.tree.set(state, learning_rate=rate)
        return optimizer.update(params, state, params)

    updates, state = step(optimizer.init(params), jnp.float32(0.25))
    np.testing.assert_array_equal(updates, [-0.25, -0.25])
    assert optax.tree.get(state, "learning_rate") == 0.25
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))


@jax.tree_util.register_pytree_node_class
class Registered:
    """A train state that is no dataclass; its parameters look like a scaler's state."""

    def __init__(self, tx, params, opt_state):
        self.tx, self.params, self.opt_state = tx, params, opt_state

    def replace(self, **fields):
        return Registered(**{**vars(self), **fields})

    def tree_flatten(self):
        return (self.params, self.opt_state), self.tx

    @classmethod
    def tree_unflatten(cls, tx, children):
        return cls(tx, *children)


def test_a_train_state_that_replaces_its_fields_itself_is_read():
    tx = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(64.0))
    params = jls.types.StaticState(jnp.float32(3.0))
    state = Registered(tx, params, tx.init(params))
    assert jls.loss_scale(state) == 64.0
    assert jls.metrics(state, host=True)["steps"] == 0
