import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from shared import assert_identical, both

import jls


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, 0.0),
        ({"n": 7, "flag": True, "none": None, "key": jax.random.key(0)}, 0.0),
        ([np.zeros((0, 3), np.float32), np.float32(-2.0)], 2.0),
        ({"a": np.array([0.5, -3.0]), "b": np.float16([1.0])}, 3.0),
        (np.array([3e38, -3e38], np.float32), np.float32(3e38)),
        (np.array([1.0, np.nan], np.float32), np.inf),
        ([np.array([-np.inf], np.float16), np.ones(2)], np.inf),
        (np.array([3 + 4j, -5j], np.complex64), 5.0),
        (np.array([complex(1.0, np.nan)], np.complex64), np.inf),
        (np.array([-448.0], ml_dtypes.float8_e4m3fn), 448.0),
        (np.array([np.nan], ml_dtypes.float8_e4m3fn), np.inf),
        (np.array([1.5], ml_dtypes.bfloat16), 1.5),
        (2.5, 2.5),
    ],
)
def test_max_abs_is_the_largest_magnitude_or_inf(tree, expected):
    arrays = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
    )
    for value in (jls.max_abs(tree), jls.max_abs(arrays)):
        assert_identical(value, np.float32(expected))
    jitted = jax.jit(lambda: jls.max_abs(arrays))()
    assert_identical(jitted, np.float32(expected))


def test_a_float64_beyond_float32_is_finite():
    with jax.enable_x64(True):
        largest = np.float32(np.finfo(np.float32).max)
        assert_identical(jls.max_abs(jnp.array([1e300])), largest)
        assert jls.max_abs(jnp.array([1.0, jnp.inf])) == jnp.inf


def test_max_abs_is_finite_exactly_if_all_finite():
    rng = np.random.default_rng(0)
    values = np.array([0.0, 1e-45, -1e-39, 1.0, 3e38, np.inf, -np.inf, np.nan])
    trees = rng.choice(values, (500, 4), p=[0.18] * 5 + [0.03, 0.03, 0.04])
    for check in both(lambda t: (jnp.isfinite(jls.max_abs(t)), jls.all_finite(t))):
        finite = [check(jnp.asarray(tree, jnp.float32)) for tree in trees]
        assert all(ours == theirs for ours, theirs in finite)
        assert {bool(theirs) for _, theirs in finite} == {True, False}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(65, 64), (100_000,), (10, 1000), (3, 3, 64, 64)])
def test_one_nan_among_many_is_seen(shape, dtype):
    """XLA's maximum on a CPU loses it."""
    many = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    for place in (0, 1234, many.size - 1):
        bad = many.reshape(-1).at[place].set(jnp.nan).reshape(shape)
        for check in both(jls.max_abs):
            assert check(bad) == jnp.inf
        assert jax.vmap(jls.max_abs)(jnp.stack([many, bad])).tolist()[1] == jnp.inf
    assert jls.max_abs(jnp.full(shape, jnp.nan, dtype)) == jnp.inf
    assert jls.max_abs(many) == jnp.max(jnp.abs(many)).astype(jnp.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("scaler", [jls.cautious(8.0), jls.log_max(8.0)])
def test_one_nan_among_many_is_never_committed(scaler, wrap):
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)
    params = {"w": jnp.ones((65, 64)), "b": jnp.ones(3)}
    grads = {"w": jnp.ones((65, 64)).at[7, 7].set(jnp.nan), "b": jnp.ones(3)}
    updates, state = wrap(optimizer.update)(grads, optimizer.init(params), params)
    assert not state.applied
    assert state.nonfinite_leaves.tolist() == [False, True]
    assert jls.all_finite(updates)
    assert jls.loss_scale(state) == 4.0


def test_devices_agree_on_the_largest():
    many = jnp.array([[1.0, -7.0], [2.0, 3.0]])
    agreed = jax.vmap(lambda x: jls.max_abs(x, "i"), axis_name="i")(many)
    assert agreed.tolist() == [7.0, 7.0]
    mesh = Mesh(jax.devices()[:1], "i")
    check = jax.shard_map(
        lambda x: jls.max_abs(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    assert check(many) == 7.0
    with pytest.raises(NameError, match="axis_name 'j' is not bound"):
        jls.max_abs(many, "j")


def keep(state, largest):
    return state._replace(loss_scale=largest)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_wrapper_hands_the_policy_the_largest_true_gradient(wrap):
    scaler = jls.MagnitudeScaler(jls.static(8.0).init, keep)
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    update = wrap(optimizer.update)
    state = optimizer.init(params)
    grads = {"w": jnp.array([0.25, -4.0]), "b": jnp.array(2.0)}
    updates, state = update(grads, state, params)
    assert (jls.loss_scale(state), state.applied) == (4.0, True)
    assert updates["w"].tolist() == [-0.125, 2.0]
    bad = grads | {"b": jnp.array(jnp.nan)}
    _, state = update(bad, state, params)
    assert (jls.loss_scale(state), state.skips) == (jnp.inf, 1)
    assert state.nonfinite_leaves.tolist() == [True, False]
    _, state = update(grads, state, params, value=jnp.nan)
    assert (jls.loss_scale(state), state.nonfinite_losses) == (jnp.inf, 1)  # kept
    _, state = update(grads, state, params, overflow=jnp.array(True))
    assert (jls.loss_scale(state), state.applied) == (jnp.inf, True)
    _, state = update(grads, state, params)
    assert jls.loss_scale(state) == 4.0


def test_devices_of_an_axis_hand_the_policy_one_magnitude():
    scaler = jls.MagnitudeScaler(jls.static(8.0).init, keep)
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler, axis_name="i")
    params = jnp.ones(2)

    def step(grads, value):
        state = optimizer.init(params)
        return optimizer.update(grads, state, params, value=value)[1]

    devices = jax.vmap(step, axis_name="i")
    grads = jnp.array([[1.0, 2.0], [-5.0, 3.0]])
    state = devices(grads, jnp.ones(2))
    assert state.scaler_state.loss_scale.tolist() == [5.0, 5.0]
    state = devices(grads.at[0, 1].set(jnp.inf), jnp.ones(2))
    assert state.scaler_state.loss_scale.tolist() == [jnp.inf, jnp.inf]
    assert state.applied.tolist() == [False, False]
    state = devices(grads, jnp.array([1.0, jnp.nan]))
    assert state.nonfinite_losses.tolist() == [1, 1]


def test_agreement_takes_one_collective():
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.cautious(), axis_name="i")
    params = jnp.ones(4)

    def step(grads, value):
        state = optimizer.init(params)
        return optimizer.update(grads, state, params, value=value)[0]

    mesh = Mesh(jax.devices()[:1], "i")
    spec = {"mesh": mesh, "in_specs": (P("i"), P()), "out_specs": P("i")}
    jaxpr = str(jax.make_jaxpr(jax.shard_map(step, **spec))(params, jnp.ones(())))
    assert jaxpr.count("pmax") == 1
    assert not any(name in jaxpr for name in ("pmin", "psum", "all_gather"))
