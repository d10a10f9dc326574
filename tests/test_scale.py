import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import both

import jls

STATE = jls.static(1024.0).init()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.complex64, jnp.complex64),
        (jnp.float8_e5m2, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float32),
    ],
)
def test_scale_and_unscale_compute_in_at_least_float32(dtype, wide):
    x = jnp.array([1.0, -2.0], dtype)
    for scale, unscale in zip(both(jls.scale), both(jls.unscale), strict=True):
        scaled, unscaled = scale(STATE, x), unscale(STATE, x)
        assert scaled.dtype == unscaled.dtype == wide
        assert scaled.tolist() == [1024.0, -2048.0]
        assert unscaled.tolist() == [2.0**-10, -(2.0**-9)]


def test_float64_and_complex128_are_not_narrowed():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.complex128):
            x = jnp.asarray(1e300, dtype)
            assert jls.scale(STATE, x) == 1024e300
            assert jls.unscale(STATE, x).dtype == dtype


def test_what_is_not_floating_point_passes_untouched():
    key, float0 = jax.random.key(1), np.zeros(2, jax.dtypes.float0)
    tree = [None, 3, True, jnp.int8(3), key, float0, jnp.tanh, "s", optax.MaskedNode()]
    for fun in (jls.scale, jls.unscale):
        *arrays, masked = fun(STATE, tree)
        assert all(a is b for a, b in zip(arrays, tree[:-1], strict=True))
        assert masked == optax.MaskedNode()
    assert jls.scale(STATE, {}) == {}


def test_python_numbers_are_scaled():
    assert jls.scale(STATE, 0.5) == 512.0
    assert jls.unscale(STATE, 2j) == 2j / 1024


def test_complex_parts_are_scaled_apart():
    for fun in both(jls.unscale):
        unscaled = fun(STATE, jax.lax.complex(jnp.inf, jnp.float32(1024.0)))
        assert (unscaled.real, unscaled.imag) == (jnp.inf, 1.0)


@pytest.mark.parametrize("exponent", [-126, -3, 5, 15, 24, 100, 126])
def test_round_trip_is_bitwise_for_powers_of_two(exponent):
    state = jls.static(2.0**exponent).init()
    x = jax.random.normal(jax.random.key(0), (1000,)) * 2.0 ** -(exponent // 2)
    for scale, unscale in zip(both(jls.scale), both(jls.unscale), strict=True):
        assert np.array_equal(unscale(state, scale(state, x)), x)


def test_unscale_at_the_largest_scale_flushes_nothing():
    state = jls.static(2.0**126).init()
    for unscale in both(jls.unscale):
        assert unscale(state, jnp.full(4, 2.0**126)).tolist() == [1.0] * 4


def test_tiny_float16_gradients_survive_unscaling():
    state = jls.static(2.0**15).init()
    unscaled = jls.unscale(state, jnp.array([2.0**-10, 2.0**-14], jnp.float16))
    assert unscaled.tolist() == [2.0**-25, 2.0**-29]


def test_scale_is_differentiable_and_linear():
    assert jax.grad(lambda x: jls.scale(STATE, 3 * x))(2.0) == 3072.0
    assert jax.grad(lambda x: jls.unscale(STATE, 3 * x))(2.0) == 3.0 / 1024


def test_float16_loss_warns_once_for_each_trace():
    scale = jax.jit(lambda state, loss: jls.scale(state, loss))
    with pytest.warns(UserWarning, match="Reduce the loss in float32") as caught:
        [scale(STATE, jnp.float16(1.0)) for _ in range(3)]
    assert len(caught) == 1


def test_float16_that_is_no_loss_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jls.scale(STATE, jnp.ones(3, jnp.float16))


@pytest.mark.parametrize("fun", [jls.scale, jls.unscale, jls.loss_scale])
def test_state_without_or_with_two_loss_scales_is_a_value_error(fun):
    args = () if fun is jls.loss_scale else (1.0,)
    with pytest.raises(ValueError, match="must carry a loss scale, got dict without"):
        fun({"a": jnp.ones(2)}, *args)
    two = {"actor": STATE, "critic": jls.dynamic().init()}
    with pytest.raises(ValueError, match=r"got 2: at '\['actor'\]', '\['critic'\]'"):
        fun(two, *args)


def test_stacked_state_outside_of_vmap_is_a_value_error_that_names_vmap():
    stacked = jax.vmap(lambda _: STATE)(jnp.arange(4))
    with pytest.raises(ValueError, match=r"got shape \(4,\) at .* jax.vmap stacked it"):
        jls.scale(stacked, 1.0)
    assert jax.vmap(jls.scale, (0, None))(stacked, 1.0).tolist() == [1024.0] * 4
