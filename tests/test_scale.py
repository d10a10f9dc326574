import functools
import inspect
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import W, assert_identical, run

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
def test_scale_and_unscale_compute_in_at_least_float32(jit_or_eager, dtype, wide):
    x = jnp.array([1.0, -2.0], dtype)
    scale = jit_or_eager(jls.scale)
    unscale = jit_or_eager(jls.unscale)
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


def test_complex_parts_are_scaled_apart(jit_or_eager):
    fun = jit_or_eager(jls.unscale)
    unscaled = fun(STATE, jax.lax.complex(jnp.inf, jnp.float32(1024.0)))
    assert (unscaled.real, unscaled.imag) == (jnp.inf, 1.0)


@pytest.mark.parametrize("exponent", [-126, -3, 5, 15, 24, 100, 126])
def test_round_trip_is_bitwise_for_powers_of_two(jit_or_eager, exponent):
    state = jls.static(2.0**exponent).init()
    x = jax.random.normal(jax.random.key(0), (1000,)) * 2.0 ** -(exponent // 2)
    scale = jit_or_eager(jls.scale)
    unscale = jit_or_eager(jls.unscale)
    assert np.array_equal(unscale(state, scale(state, x)), x)


def test_unscale_at_the_largest_scale_flushes_nothing(jit_or_eager):
    state = jls.static(2.0**126).init()
    unscale = jit_or_eager(jls.unscale)
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
    with pytest.raises(ValueError, match=r"got 2: at 'actor', 'critic'"):
        fun(two, *args)


def test_stacked_state_outside_of_vmap_is_a_value_error_that_names_vmap():
    stacked = jax.vmap(lambda _: STATE)(jnp.arange(4))
    with pytest.raises(ValueError, match=r"got shape \(4,\)\. If jax.vmap or jax.pmap"):
        jls.scale(stacked, 1.0)
    assert jax.vmap(jls.scale, (0, None))(stacked, 1.0).tolist() == [1024.0] * 4


# Differentiation ----------------------------------------------------------------------


DYNAMIC = jls.dynamic(2.0**12).init()


def half_loss(w, x):
    """True gradients of about 1e-9, below the smallest float16, 6e-8."""
    return jnp.sum((w * x).astype(jnp.float32)) * 1e-6


def test_gradients_that_vanish_in_float16_survive(jit_or_eager):
    w, x = jnp.ones(3, jnp.float16), jnp.float16(2.0**-10)
    assert jax.grad(half_loss)(w, x).tolist() == [0.0] * 3
    value_and_grad = jit_or_eager(jls.value_and_grad(half_loss))
    loss, grads = value_and_grad(DYNAMIC, w, x)
    assert grads.dtype == jnp.float32
    np.testing.assert_allclose(grads, 1e-6 * 2.0**-10, rtol=1e-2)
    np.testing.assert_allclose(loss, 3e-6 * 2.0**-10, rtol=1e-6)


def test_loss_is_true_and_finite_when_the_gradients_overflow(jit_or_eager):
    def loss_fn(w):
        return jnp.sum(w.astype(jnp.float32))

    state = jls.static(2.0**17).init()
    value_and_grad = jit_or_eager(jls.value_and_grad(loss_fn))
    loss, grads = value_and_grad(state, jnp.ones(2, jnp.float16))
    assert loss == 2.0
    # XLA on a GPU leaves out the cast to float16, and with it the overflow.
    is_true = jax.default_backend() == "gpu" and grads.tolist() == [1.0, 1.0]
    assert is_true or not jls.all_finite(grads)


def test_loss_keeps_its_dtype_and_its_value_when_the_scaled_one_overflows():
    state = jls.static(2.0**100).init()
    loss, grads = jls.value_and_grad(lambda w: w * 1e20)(state, jnp.float32(2.0))
    assert (loss.dtype, loss) == (jnp.float32, np.float32(2e20))
    assert jnp.isinf(grads)


def test_aux_and_keyword_arguments_pass_through():
    def loss_fn(w, *, factor, power=1):
        return jnp.sum(w**power) * factor, {"n": 3, "w": w}

    fun = jls.value_and_grad(loss_fn, has_aux=True)
    (loss, aux), grads = fun(DYNAMIC, jnp.arange(3.0), factor=jnp.float32(2.0), power=2)
    assert (loss, aux["n"], aux["w"].tolist()) == (10.0, 3, [0.0, 1.0, 2.0])
    assert grads.tolist() == [0.0, 4.0, 8.0]
    grads, aux = jls.grad(loss_fn, has_aux=True)(DYNAMIC, jnp.ones(2), factor=3.0)
    assert (grads.tolist(), aux["n"]) == ([3.0, 3.0], 3)
    assert fun.__name__ == "loss_fn"
    assert list(inspect.signature(fun).parameters) == ["state", "args", "kwargs"]


def test_loss_function_may_have_an_argument_called_state():
    def loss_fn(w, state):
        return w * state

    assert jls.grad(loss_fn)(DYNAMIC, jnp.float32(2.0), state=3.0) == 3.0


def test_transform_of_another_form_is_refused():
    with pytest.raises(TypeError, match="transform must be of the form"):
        jls.grad(lambda w: w**2, transform=jax.grad)(DYNAMIC, jnp.float32(2.0))


def test_argnums_do_not_count_the_state():
    def loss_fn(a, b, c):
        return a * b * c

    args = (jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0))
    assert jls.grad(loss_fn, argnums=1)(DYNAMIC, *args) == 10.0
    assert jls.grad(loss_fn, argnums=(0, 2))(DYNAMIC, *args) == (15.0, 6.0)


def test_int_and_complex_arguments():
    def loss_fn(tree):
        return jnp.sum(tree["w"]) * tree["n"].astype(jnp.float32)

    transform = functools.partial(jax.value_and_grad, allow_int=True)
    fun = jls.value_and_grad(loss_fn, transform=transform)
    _, grads = fun(DYNAMIC, {"w": jnp.ones(2), "n": jnp.int32(3)})
    assert grads["w"].tolist() == [3.0, 3.0]
    assert grads["n"].dtype == jax.dtypes.float0
    grads = jls.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(DYNAMIC, jnp.array([3.0 + 4j]))
    assert grads == jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(jnp.array([3.0 + 4j]))


def test_every_leaf_kind_passes_through(jit_or_eager):
    tree = {
        "w": jnp.ones(2),
        "h": jnp.ones(2, jnp.bfloat16),
        "f8": jnp.ones(2, jnp.float8_e5m2),
        "z": jnp.ones(1, jnp.complex64),
        "n": None,
        "i": jnp.int32(3),
        "b": jnp.asarray(True),
        "k": jax.random.key(0),
        "m": optax.MaskedNode(),
        "s": jnp.tanh,  # what JAX cannot take, Equinox filters out
    }

    def loss_fn(tree):
        inexact = [
            tree[name].astype(jnp.complex64).real for name in ("w", "h", "f8", "z")
        ]
        return sum(jnp.sum(leaf) for leaf in inexact) * tree["i"].astype(jnp.float32)

    fun = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
    loss, grads = fun(DYNAMIC, tree)
    assert loss == 21.0
    assert {name: g.dtype.name for name, g in grads.items() if eqx.is_array(g)} == {
        "w": "float32",
        "h": "float32",
        "f8": "float32",
        "z": "complex64",
    }
    assert all(jnp.all(g == 3.0) for g in jax.tree.leaves(grads))

    transform = functools.partial(jax.value_and_grad, allow_int=True)
    del tree["s"]
    value_and_grad = jit_or_eager(jls.value_and_grad(loss_fn, transform=transform))
    _, grads = value_and_grad(DYNAMIC, tree)
    assert grads["w"].tolist() == [3.0, 3.0]
    assert {grads[name].dtype for name in "ibk"} == {jax.dtypes.float0}
    assert (grads["n"], grads["m"]) == (None, optax.MaskedNode())


def test_float64_gradients_are_not_narrowed():
    with jax.enable_x64(True):
        loss, grads = jls.value_and_grad(lambda w: w * 1e300)(
            DYNAMIC, jnp.float64(1e-5)
        )
        assert (loss.dtype, grads.dtype, grads) == (jnp.float64, jnp.float64, 1e300)


def test_gradient_of_a_growth_step_is_true():
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0, growth_interval=2))
    params = jnp.float32(1.0)
    state, seen = optimizer.init(params), []
    for _ in range(5):
        loss, grads = jls.value_and_grad(lambda p: 3.0 * p)(state, params)
        _, state = optimizer.update(grads, state, params)
        seen.append((float(loss), float(grads)))
    assert seen == [(3.0, 3.0)] * 5
    assert jls.loss_scale(state) == 32.0


@pytest.mark.parametrize("exponent", [1, 10, 24])
def test_one_compiled_step_gives_the_same_bits_at_every_power_of_two(exponent):
    x = jax.random.normal(jax.random.key(0), (8, 4))

    @jax.jit
    def grads(state, w):
        return jls.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state, w)

    w = jax.random.normal(jax.random.key(1), (4, 3))
    at_one = grads(jls.static(1.0).init(), w)
    assert np.array_equal(grads(jls.static(2.0**exponent).init(), w), at_one)


def test_nnx_transform_keeps_batch_statistics_and_other_variables():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    def loss_fn(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    x = jax.random.normal(jax.random.key(0), (5, 3))
    plain, scaled = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(loss_fn)(plain, x)
    fun = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
    our_loss, our_grads = fun(DYNAMIC, scaled, x)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-6)
    chex.assert_trees_all_close(our_grads, grads, rtol=1e-7, atol=1e-6)
    assert np.array_equal(scaled.norm.mean[...], plain.norm.mean[...])
    assert not np.array_equal(scaled.norm.mean[...], np.zeros(2))


def loss_by_keyword(model, x, y=0.0, *, scale=1.0):
    return jnp.mean((model(x) - y) ** 2) * scale


@functools.wraps(loss_by_keyword)
def wrapped(*args, **kwargs):
    return loss_by_keyword(*args, **kwargs)


def opaque(*args, **kwargs):
    return loss_by_keyword(*args, **kwargs)


class Task:
    def loss(self, model, x, y=0.0):
        return loss_by_keyword(model, x, y)


BY_KEYWORD = {
    "plain": loss_by_keyword,
    "wrapped": wrapped,
    "opaque": opaque,
    "method": Task().loss,
    "partial": functools.partial(loss_by_keyword, scale=2.0),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("library", ["nnx", "equinox", "jax"])
@pytest.mark.parametrize("loss", BY_KEYWORD)
def test_data_by_keyword(loss, library):
    fun, x = BY_KEYWORD[loss], jnp.ones((5, 3))
    options, model = {}, lambda x: x @ jnp.ones((3, 1))
    if library == "nnx":
        options = {"transform": nnx.value_and_grad}
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    if library == "equinox":
        options = {"transform": eqx.filter_value_and_grad}
        model = jax.vmap(eqx.nn.Linear(3, 1, key=jax.random.key(0)))
    if library == "jax":
        inner = fun

        def fun(w, **kwargs):
            return inner(lambda x: x @ w, **kwargs)

        model = jnp.ones((3, 1))
    ours = jls.value_and_grad(fun, **options)
    for given in ({"x": x}, {"y": jnp.ones((5, 1)), "x": x}):
        loss, _ = ours(DYNAMIC, model, **given)
        np.testing.assert_allclose(loss, fun(model, **given), rtol=1e-6)


@pytest.mark.parametrize("wraps", [False, True])
def test_nnx_models_by_keyword_are_the_ones_that_argnums_names(wraps):
    def loss_fn(actor, critic, x):
        return jnp.mean(actor(x)) + 2 * jnp.mean(critic(x))

    @functools.wraps(loss_fn)
    def wrapped(*args, **kwargs):
        return loss_fn(*args, **kwargs)

    actor, critic = (nnx.Linear(3, 1, rngs=nnx.Rngs(i)) for i in (0, 1))
    transform = functools.partial(nnx.value_and_grad)
    fun = jls.value_and_grad(
        wrapped if wraps else loss_fn, argnums=(0, 1), transform=transform
    )
    x = jnp.ones((5, 3))
    _, (of_actor, of_critic) = fun(DYNAMIC, actor, x=x, critic=critic)
    assert of_actor["bias"][...] == 1.0
    assert of_critic["bias"][...] == 2.0
    nothing = jls.value_and_grad(opaque, argnums=(0, 1), transform=transform)
    with pytest.raises(TypeError, match="could not be resolved to positions"):
        nothing(DYNAMIC, actor, x=x, y=critic)


def test_equinox_transform():
    model = eqx.nn.MLP(3, "scalar", 4, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    x = jax.random.normal(jax.random.key(1), (5, 3))
    expected, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
    fun = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
    for value_and_grad in (fun, eqx.filter_jit(fun)):
        loss, our_grads = value_and_grad(DYNAMIC, model, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        chex.assert_trees_all_close(our_grads, grads, rtol=1e-7, atol=1e-6)


def test_composes_with_vmap_scan_checkpoint_and_second_derivatives():
    def loss_fn(w, x):
        return jnp.sum(jnp.sin(w * x))

    w, xs = jnp.float32(0.5), jnp.arange(3.0)
    fun = jls.grad(jax.checkpoint(loss_fn))
    by_vmap = jax.vmap(fun, (None, None, 0))(DYNAMIC, w, xs)
    by_scan = jax.lax.scan(lambda c, x: (c, fun(DYNAMIC, w, x)), 0, xs)[1]
    expected = jax.vmap(jax.grad(loss_fn), (None, 0))(w, xs)
    np.testing.assert_allclose(by_vmap, expected, rtol=1e-6)
    np.testing.assert_allclose(by_scan, expected, rtol=1e-6)
    second = jax.grad(lambda w: fun(DYNAMIC, w, xs[1]))(w)
    np.testing.assert_allclose(second, -jnp.sin(w), rtol=1e-6)


def test_float16_loss_warns_once_when_traced():
    fun = jax.jit(jls.value_and_grad(lambda w: jnp.sum(w)))
    with pytest.warns(UserWarning, match="Reduce the loss in float32") as caught:
        [fun(DYNAMIC, jnp.ones(2, jnp.float16)) for _ in range(3)]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (jnp.ones(3), ValueError, r"must be a scalar of shape \(\), got shape \(3,\)"),
        (jnp.ones(1), ValueError, r"must be a scalar of shape \(\), got shape \(1,\)"),
        (jnp.int32(3), TypeError, "must be real floating point, got dtype int32"),
        (jnp.complex64(3), TypeError, "must be real floating point, got dtype complex"),
        (None, TypeError, "must return one real floating-point scalar, got NoneType"),
        ((jnp.float32(1.0), 2), TypeError, r"got tuple. .* \(loss, aux\)"),
        ({"loss": 1.0}, TypeError, "scalar, got dict"),
        ("loss", TypeError, "scalar, got str"),
    ],
)
def test_what_is_no_loss_is_refused(jit_or_eager, loss, error, message):
    value_and_grad = jit_or_eager(jls.value_and_grad(lambda w: loss))
    with pytest.raises(error, match=message):
        value_and_grad(DYNAMIC, jnp.float32(1.0))


@pytest.mark.parametrize("result", [jnp.float32(1.0), (jnp.float32(1.0), 2, 3)])
def test_has_aux_without_a_pair_is_refused(result):
    with pytest.raises(TypeError, match=r"must return the pair \(loss, aux\), got"):
        jls.value_and_grad(lambda w: result, has_aux=True)(DYNAMIC, jnp.float32(1.0))


def test_state_without_a_loss_scale_is_refused_before_the_loss_function_runs():
    def loss_fn(w):
        raise AssertionError

    with pytest.raises(ValueError, match="a loss scale, got ScaleByAdamState"):
        jls.grad(loss_fn)(optax.scale_by_adam().init(jnp.ones(2)), jnp.ones(2))


# What went wrong elsewhere ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_unscale_keeps_small_half_precision_gradients(jit_or_eager, dtype):
    """jmp J3: float16 gradients divided in float16 became zero."""
    state = jls.static(2.0**15).init()
    grads = jnp.array([2.0**-10, 2.0**-14], dtype)
    assert_identical(
        jit_or_eager(jls.unscale)(state, grads), jnp.array([2.0**-25, 2.0**-29])
    )


def test_scale_is_computed_in_float32(jit_or_eager):
    """jmp J4, M3: the scale or the loss in float16 made inf or 0 of the product."""
    with pytest.warns(UserWarning, match="the loss is float16"):
        scaled = jit_or_eager(jls.scale)(jls.static(2.0**16).init(), jnp.float16(1.0))
    assert_identical(scaled, jnp.float32(2.0**16))
    tiny = jls.scale(jls.static(2.0**-26).init(), jnp.float32(1.0))
    assert tiny == 2.0**-26


def test_a_half_precision_loss_warns_and_a_float32_one_has_its_gradient():
    """jmp J4b: the cotangent of a float16 loss is the scale cast to float16, inf."""
    state = jls.static(2.0**16).init()
    w = jnp.float16(1.0)
    with pytest.warns(UserWarning, match="Reduce the loss in float32"):
        jls.grad(lambda w: w * jnp.float16(2.0**-8))(state, w)
    loss, grads = jls.value_and_grad(lambda w: w.astype(jnp.float32) / 256)(state, w)
    assert loss == grads == 2.0**-8


@pytest.mark.parametrize("exponent", [-126, -9, 1, 15, 24, 100, 126])
def test_scaling_by_a_power_of_two_is_exact_in_any_fusion(jit_or_eager, exponent):
    """jmp J10, J11b, X1, X2: division rounded or not, by what XLA fused it with."""
    state = jls.static(2.0**exponent).init()
    x = jax.random.uniform(jax.random.key(0), 1000, minval=1.0, maxval=2.0)
    assert_identical(
        jit_or_eager(lambda s, x: jls.unscale(s, jls.scale(s, x)))(state, x), x
    )
    quotient = jit_or_eager(jls.unscale)(state, x)
    assert_identical(np.asarray(quotient), np.ldexp(np.asarray(x), -exponent))


def test_complex_leaves_keep_their_imaginary_part(jit_or_eager):
    """flax F5: cast to float32, gradients lost it."""
    z = jnp.array([2 + 3j, -1 + 0.5j], jnp.complex64)

    def loss_fn(z):
        return jnp.sum(jnp.real(z) * 3 + jnp.imag(z) ** 2)

    state = jls.dynamic(2.0**10).init()
    assert_identical(jit_or_eager(jls.grad(loss_fn))(state, z), jax.grad(loss_fn)(z))
    assert not jls.all_finite(z + jnp.complex64(complex(0, np.inf)))


def test_float64_leaves_are_not_narrowed():
    """flax F14: cast to float32, a finite 1e300 was an overflow."""
    with jax.enable_x64(True):
        w = jnp.full(2, 1e300, jnp.float64)
        grads = jls.unscale(jls.dynamic(8.0).init(), w)
        assert grads.dtype == jnp.float64
        assert grads.tolist() == [1.25e299] * 2
        _, state = run(jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0)), w, [w])
        assert state.applied
        assert state.scaler_state.loss_scale.dtype == jnp.float32


def test_loss_is_the_true_one_when_the_scaled_one_overflows(jit_or_eager):
    """flax F3: its own example returned inf / inf, NaN, as the loss."""
    state = jls.dynamic(2.0**100, max_scale=2.0**126).init()
    differentiate = jls.value_and_grad(lambda w: w * jnp.float32(1e30))
    loss, grads = jit_or_eager(differentiate)(state, jnp.float32(2.0))
    assert loss == jnp.float32(2e30)
    assert not jls.all_finite(grads)


def test_keyword_arguments_reach_the_loss_function():
    """flax F6: unexpected keyword argument."""
    differentiate = jls.value_and_grad(lambda w, *, k: jnp.sum(w * k))
    loss, grads = differentiate(jls.dynamic(8.0).init(), W, k=jnp.float32(3.0))
    assert loss == -3.0
    assert grads.tolist() == [3.0, 3.0]


def test_scale_gives_back_a_gradient_that_is_a_next_value():
    """flax F7: the float8 layers overwrite a leaf with its "gradient", as it is."""

    @jax.custom_vjp
    def layer(x, history):
        return x

    layer.defvjp(lambda x, h: (x, None), lambda _, g: (g, jnp.full(3, 896.0)))
    state = jls.dynamic(1024.0).init()
    loss_fn = jls.grad(lambda w, h: jnp.sum(layer(w, h)), argnums=(0, 1))
    grads, history = loss_fn(state, W, jnp.zeros(3))
    assert grads.tolist() == [1.0, 1.0]
    assert jls.scale(state, history).tolist() == [896.0] * 3


def test_integer_and_empty_parameters_can_be_differentiated():
    """flax F8, F9: allow_int was out of reach."""
    transform = functools.partial(jax.value_and_grad, allow_int=True)
    params = {"w": W, "n": jnp.int32(2), "none": None}
    differentiate = jls.grad(lambda p: jnp.sum(p["w"] ** 2), transform=transform)
    grads = differentiate(jls.dynamic(8.0).init(), params)
    assert grads["w"].tolist() == [2.0, -4.0]
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["none"] is None


def test_vmapped_state_is_a_clear_error():
    """flax R13: a scale of shape (4,) went on silently."""
    states = jax.vmap(lambda _: jls.dynamic(8.0).init())(jnp.arange(4))
    for function in (jls.scale, jls.unscale):
        with pytest.raises(ValueError, match=r"must have shape \(\).*jax.vmap"):
            function(states, W)
    with pytest.raises(ValueError, match=r"must have shape \(\).*jax.vmap"):
        jls.value_and_grad(jnp.sum)(states, W)


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("has_aux", [True, False])
def test_loss_is_in_at_least_float32_as_the_gradients_are(dtype, has_aux, jit_or_eager):
    def loss_fn(w):
        loss = jnp.sum(w.astype(jnp.float32)).astype(dtype)
        return (loss, loss) if has_aux else loss

    w = jnp.ones(3, dtype)
    grad_fn = jit_or_eager(jls.value_and_grad(loss_fn, has_aux=has_aux))
    loss, grads = grad_fn(jls.static(2.0).init(), w)
    if has_aux:
        loss, aux = loss
        assert aux.dtype == dtype  # it is the caller's, and stays
    assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.float32)
    assert loss == 3.0


def test_loss_of_float64_stays():
    with jax.enable_x64(True):
        grad_fn = jls.value_and_grad(lambda w: jnp.sum(w) / 3)
        loss, _ = grad_fn(jls.static(2.0).init(), jnp.ones(2, jnp.float64))
    assert loss.dtype == jnp.float64
