"""Checkpoints of sharded states, restored onto this mesh or another."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

P = PartitionSpec
DEVICES = np.array(jax.devices())
LINE = NamedSharding(Mesh(DEVICES, ("d",)), P("d"))
PLACES = {
    "line": LINE,
    "grid": NamedSharding(Mesh(DEVICES.reshape(2, 4), ("a", "b")), P("b", "a")),
    "four devices": NamedSharding(Mesh(DEVICES[:4], ("d",)), P(None, "d")),
    "replicated": NamedSharding(Mesh(DEVICES, ("d",)), P()),
    "one device": jax.sharding.SingleDeviceSharding(DEVICES[3]),
}
INNER = optax.adamw(0.1)
OPTIMIZER = jls.loss_scaled(INNER, jls.dynamic(8.0, growth_interval=3))


@jax.jit
def step(params, state, x):
    loss, grads = jls.value_and_grad(lambda p: jnp.sum(jnp.tanh(p["w"]) * x))(
        state, params
    )
    updates, state = OPTIMIZER.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


def start(sharding):
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8) / 64, sharding)}
    return params, OPTIMIZER.init(params)


def train(run, batches=(1.0, jnp.inf, 2.0, 0.5)):
    for x in batches:
        run = step(*run, jnp.float32(x))
    return run


def shardings(tree):
    return [
        (leaf.sharding.device_set, leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    ]


def pointers(tree):
    return [
        leaf.__array_interface__["data"][0]
        if isinstance(leaf, np.ndarray)
        else shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in getattr(leaf, "addressable_shards", [None])
    ]


def assert_own(tree, *others):
    """Each shard of `tree` has a buffer of its own."""
    ours = pointers(tree)
    assert len(set(ours)) == len(ours)
    assert not set(ours) & set(pointers(others))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_orbax_restores_onto_any_other_mesh(is_async, tmp_path):
    saved = train(start(LINE))
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=is_async)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(4, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
        for place in PLACES.values():
            target = start(place)
            args = ocp.args.StandardRestore(target)
            restored = manager.restore(4, args=args)
            assert_identical(restored, saved)
            assert shardings(restored) == shardings(target)
            # As the run that was moved there by hand, and traced no further.
            moved = jax.tree.map(
                lambda leaf, like: jax.device_put(leaf, like.sharding), saved, target
            )
            expected = train(moved)
            assert_identical(train(restored), expected)
            if place is LINE:
                assert_identical(train(saved), expected)


@pytest.mark.parametrize("place", PLACES)
def test_upgraded_states_go_where_the_target_is(place, tmp_path):
    saved = train(start(LINE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", saved)
        checkpointer.wait_until_finished()
        raw = checkpointer.restore(tmp_path / "a")
    target = start(PLACES[place])
    for form in (raw, serialization.to_state_dict(jax.tree.map(np.asarray, saved))):
        upgraded = jls.upgrade_state(target, form)
        assert_identical(upgraded, saved)
        assert shardings(upgraded) == shardings(target)
        train(upgraded)
        assert_own(upgraded, target, raw)


@pytest.mark.parametrize("place", PLACES)
def test_wrapped_states_stay_where_they_are(place):
    params, state = start(PLACES[place])
    bare = INNER.init(params)
    for given in (bare, jax.tree.map(np.asarray, bare)):
        wrapped = jls.wrap_state(OPTIMIZER, given, params)
        assert_identical(wrapped, state)
        assert shardings(wrapped) == shardings(state)
        assert shardings(jls.unwrap_state(wrapped)) == shardings(state.inner_state)
        assert_own(wrapped, given, bare, params)


def test_a_wrapped_sharded_run_traces_once():

    @jax.jit
    @chex.assert_max_traces(n=1)
    def counted(params, state):
        return step(params, state, jnp.float32(1.0))

    params, _ = start(LINE)
    run = params, jls.wrap_state(OPTIMIZER, INNER.init(params), params)
    for _ in range(3):
        run = counted(*run)
    assert counted._cache_size() == 1
