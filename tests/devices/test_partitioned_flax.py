"""Flax models that say themselves how they are split, as its guides write it."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from shared import bad_leaves, bits, is_placed_as

import jls

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec
MESH = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
X = jax.random.normal(jax.random.key(1), (16, 16))
# One row of 16 overflows in float16, on one half of the mesh.
BATCHES = [X, X[::-1], X.at[3].multiply(1e3), -X, X]
APPLIED = [True, True, False, True, True]
SCALES = [2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**13]
INNER = optax.adamw(1e-2)
GUARDED = jls.loss_scaled(INNER, jls.dynamic(2.0**12, growth_interval=2))
NORMAL, ZEROS = nn.initializers.lecun_normal(), nn.initializers.zeros_init()


def on_mesh(x):
    return jax.device_put(x, NamedSharding(MESH, P("data")))


def smooth(x):
    return jnp.mean(jnp.sqrt(1.0 + (x.astype(jnp.float32) - 1.0) ** 2))


def is_one_for_all(state):
    leaves = jax.tree.leaves(state._replace(inner_state=None))
    return all(leaf.sharding.is_fully_replicated for leaf in leaves)


# Linen: boxed parameters.


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dtype=jnp.float16)
        split = functools.partial(nn.with_partitioning, NORMAL)
        bias = nn.with_partitioning(ZEROS, ("model",))
        x = dense(32, kernel_init=split(("data", "model")), bias_init=bias)(x)
        x = nn.relu(x)
        return dense(8, kernel_init=split(("model", "data")), use_bias=False)(x)


LINEN = LinenModel()


def create(tx, key):
    params = LINEN.init(key, X)["params"]
    return TrainState.create(apply_fn=LINEN.apply, params=params, tx=tx)


def linen_loss(state, x):
    return smooth(state.apply_fn({"params": state.params}, x))


def linen_state(tx):
    """The state in its place, and its shardings."""
    init = functools.partial(create, tx)
    shardings = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), MESH)
    return jax.jit(init, out_shardings=shardings)(jax.random.key(0)), shardings


def test_linen_state_is_placed_as_with_the_bare_optimizer():
    state, _ = linen_state(GUARDED)
    bare, _ = linen_state(INNER)
    assert isinstance(state.params["Dense_0"]["kernel"], nn.Partitioned)
    assert is_placed_as(state.opt_state.inner_state, bare.opt_state)
    assert is_one_for_all(state.opt_state)
    moments = state.opt_state.inner_state[0].mu
    assert moments["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")
    assert nn.get_partition_spec(moments)["Dense_1"]["kernel"] == P("model", "data")


def test_linen_trains_with_boxed_params():
    state, shardings = linen_state(GUARDED)
    start = state
    step = jax.jit(
        jls.train_step(chex.assert_max_traces(linen_loss, n=1)),
        in_shardings=(shardings, NamedSharding(MESH, P("data"))),
        out_shardings=(shardings, None),
    )
    scales = []
    for x, applied in zip(BATCHES, APPLIED, strict=True):
        before = bits(state.params) + bits(state.opt_state.inner_state)
        state, report = step(state, on_mesh(x))
        after = bits(state.params) + bits(state.opt_state.inner_state)
        assert report.skipped == (not applied)
        assert (before == after) == (not applied)
        scales.append(float(report.loss_scale))
    assert scales == SCALES
    assert is_placed_as(state, start)
    assert isinstance(state.params["Dense_0"]["kernel"], nn.Partitioned)
    assert bad_leaves(state, state.params) == [
        "Dense_0/kernel/value",
        "Dense_1/kernel/value",
    ]
    assert jls.health(state, state.params).verdict == "ok"

    # Without a mesh: the same decisions, and the same numbers but for roundings.
    state1 = create(GUARDED, jax.random.key(0))
    step1 = jax.jit(jls.train_step(linen_loss))
    for x in BATCHES:
        state1, _ = step1(state1, x)
    decisions = [s.opt_state._replace(inner_state=None) for s in (state, state1)]
    assert bits(decisions[0]) == bits(decisions[1])
    ours, one = nn.unbox(state.params), nn.unbox(state1.params)
    chex.assert_trees_all_close(ours, one, atol=2e-3)


def test_linen_state_of_an_eager_init_stays_in_its_place():
    placed, shardings = linen_state(GUARDED)
    state = TrainState.create(apply_fn=LINEN.apply, params=placed.params, tx=GUARDED)
    assert is_placed_as(state.opt_state, placed.opt_state)
    # Flax starts to count with the Python number 0, which would be traced apart.
    state = state.replace(step=jax.device_put(jnp.int32(0), shardings.step))
    step = jax.jit(jls.train_step(linen_loss))
    for x in BATCHES:
        state, _ = step(state, on_mesh(x))
    assert jls.metrics(state)["skips"] == 1
    assert is_placed_as(state.opt_state, placed.opt_state)
    assert step._cache_size() == 1


# NNX: the specs are in the metadata of the variables.


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, dtype=jnp.float16, rngs=rngs)
        split = functools.partial(nnx.with_partitioning, NORMAL)
        bias = nnx.with_partitioning(ZEROS, ("model",))
        kernels = split(("data", "model")), split(("model", "data"))
        self.first = linear(16, 32, kernel_init=kernels[0], bias_init=bias)
        self.last = linear(32, 8, kernel_init=kernels[1], use_bias=False)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def nnx_pair(tx, start):
    """A model and its optimizer on the mesh."""

    def make():
        model = NnxModel(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for node in (model, optimizer):
            state = nnx.state(node)
            specs = nnx.get_partition_spec(state)
            if start == "jitted":
                state = jax.lax.with_sharding_constraint(state, specs)
            nnx.update(node, state)
        return model, optimizer

    return nnx.jit(make)() if start == "jitted" else make()


@pytest.mark.parametrize("start", ["jitted", "eager"])
def test_nnx_trains_a_partitioned_model(start):
    with jax.set_mesh(MESH):
        model, optimizer = nnx_pair(GUARDED, start)
        _, bare = nnx_pair(INNER, start)
        state = optimizer.opt_state
        assert is_placed_as(nnx.state(state.inner_state), nnx.state(bare.opt_state))
        assert all(
            leaf.sharding.is_fully_replicated
            for leaf in jax.tree.leaves(nnx.state(state._replace(inner_state=())))
        )
        placed = nnx.state((model, optimizer))
        moment = state.inner_state[0].mu["first"]["kernel"].get_value()
        assert moment.sharding.spec == P("data", "model")
        traces = []

        def loss_fn(model, x):
            traces.append(1)
            return smooth(model(x))

        step = nnx.jit(jls.train_step(loss_fn))
        scales = []
        for x, applied in zip(BATCHES, APPLIED, strict=True):
            before = bits(nnx.state((model, state.inner_state)))
            report = step(model, optimizer, on_mesh(x))
            state = optimizer.opt_state
            after = bits(nnx.state((model, state.inner_state)))
            assert report.skipped == (not applied)
            assert (before == after) == (not applied)
            scales.append(float(report.loss_scale))
        assert scales == SCALES
        assert len(traces) == 1
        assert is_placed_as(nnx.state((model, optimizer)), placed)
        params = nnx.state(model, nnx.Param)
        assert bad_leaves(optimizer, params) == [
            "first/kernel",
            "last/kernel",
        ]
        assert jls.health(optimizer, params).verdict == "ok"
        assert jls.metrics(optimizer)["skips"] == 1
