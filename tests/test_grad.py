import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import both

import jls

STATE = jls.dynamic(2.0**12).init()


def half_loss(w, x):
    """True gradients of about 1e-9, below the smallest float16, 6e-8."""
    return jnp.sum((w * x).astype(jnp.float32)) * 1e-6


def test_gradients_that_vanish_in_float16_survive():
    w, x = jnp.ones(3, jnp.float16), jnp.float16(2.0**-10)
    assert jax.grad(half_loss)(w, x).tolist() == [0.0] * 3
    for value_and_grad in both(jls.value_and_grad(half_loss)):
        loss, grads = value_and_grad(STATE, w, x)
        assert grads.dtype == jnp.float32
        np.testing.assert_allclose(grads, 1e-6 * 2.0**-10, rtol=1e-2)
        np.testing.assert_allclose(loss, 3e-6 * 2.0**-10, rtol=1e-6)


def test_loss_is_true_and_finite_when_the_gradients_overflow():
    def loss_fn(w):
        return jnp.sum(w.astype(jnp.float32))

    state = jls.static(2.0**17).init()
    for value_and_grad in both(jls.value_and_grad(loss_fn)):
        loss, grads = value_and_grad(state, jnp.ones(2, jnp.float16))
        assert loss == 2.0
        assert not jls.all_finite(grads)


def test_loss_keeps_its_dtype_and_its_value_when_the_scaled_one_overflows():
    state = jls.static(2.0**100).init()
    loss, grads = jls.value_and_grad(lambda w: w * 1e20)(state, jnp.float32(2.0))
    assert (loss.dtype, loss) == (jnp.float32, np.float32(2e20))
    assert jnp.isinf(grads)


def test_aux_and_keyword_arguments_pass_through():
    def loss_fn(w, *, factor, power=1):
        return jnp.sum(w**power) * factor, {"n": 3, "w": w}

    fun = jls.value_and_grad(loss_fn, has_aux=True)
    (loss, aux), grads = fun(STATE, jnp.arange(3.0), factor=jnp.float32(2.0), power=2)
    assert (loss, aux["n"], aux["w"].tolist()) == (10.0, 3, [0.0, 1.0, 2.0])
    assert grads.tolist() == [0.0, 4.0, 8.0]
    grads, aux = jls.grad(loss_fn, has_aux=True)(STATE, jnp.ones(2), factor=3.0)
    assert (grads.tolist(), aux["n"]) == ([3.0, 3.0], 3)
    assert fun.__name__ == "loss_fn"
    assert list(inspect.signature(fun).parameters) == ["state", "args", "kwargs"]


def test_loss_function_may_have_an_argument_called_state():
    def loss_fn(w, state):
        return w * state

    assert jls.grad(loss_fn)(STATE, jnp.float32(2.0), state=3.0) == 3.0


def test_transform_of_another_form_is_refused():
    with pytest.raises(TypeError, match="transform must be of the form"):
        jls.grad(lambda w: w**2, transform=jax.grad)(STATE, jnp.float32(2.0))


def test_argnums_do_not_count_the_state():
    def loss_fn(a, b, c):
        return a * b * c

    args = (jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0))
    assert jls.grad(loss_fn, argnums=1)(STATE, *args) == 10.0
    assert jls.grad(loss_fn, argnums=(0, 2))(STATE, *args) == (15.0, 6.0)


def test_int_and_complex_arguments():
    def loss_fn(tree):
        return jnp.sum(tree["w"]) * tree["n"].astype(jnp.float32)

    transform = functools.partial(jax.value_and_grad, allow_int=True)
    fun = jls.value_and_grad(loss_fn, transform=transform)
    _, grads = fun(STATE, {"w": jnp.ones(2), "n": jnp.int32(3)})
    assert grads["w"].tolist() == [3.0, 3.0]
    assert grads["n"].dtype == jax.dtypes.float0
    grads = jls.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(STATE, jnp.array([3.0 + 4j]))
    assert grads == jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(jnp.array([3.0 + 4j]))


def test_every_leaf_kind_passes_through():
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
    loss, grads = fun(STATE, tree)
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
    for value_and_grad in both(jls.value_and_grad(loss_fn, transform=transform)):
        _, grads = value_and_grad(STATE, tree)
        assert grads["w"].tolist() == [3.0, 3.0]
        assert {grads[name].dtype for name in "ibk"} == {jax.dtypes.float0}
        assert (grads["n"], grads["m"]) == (None, optax.MaskedNode())


def test_float64_gradients_are_not_narrowed():
    with jax.enable_x64(True):
        loss, grads = jls.value_and_grad(lambda w: w * 1e300)(STATE, jnp.float64(1e-5))
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
    our_loss, our_grads = fun(STATE, scaled, x)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), our_grads, grads
    )
    assert np.array_equal(scaled.norm.mean[...], plain.norm.mean[...])
    assert not np.array_equal(scaled.norm.mean[...], np.zeros(2))


def test_equinox_transform():
    model = eqx.nn.MLP(3, "scalar", 4, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    x = jax.random.normal(jax.random.key(1), (5, 3))
    expected, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
    fun = jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)
    for value_and_grad in (fun, eqx.filter_jit(fun)):
        loss, our_grads = value_and_grad(STATE, model, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), our_grads, grads
        )


def test_composes_with_vmap_scan_checkpoint_and_second_derivatives():
    def loss_fn(w, x):
        return jnp.sum(jnp.sin(w * x))

    w, xs = jnp.float32(0.5), jnp.arange(3.0)
    fun = jls.grad(jax.checkpoint(loss_fn))
    by_vmap = jax.vmap(fun, (None, None, 0))(STATE, w, xs)
    by_scan = jax.lax.scan(lambda c, x: (c, fun(STATE, w, x)), 0, xs)[1]
    expected = jax.vmap(jax.grad(loss_fn), (None, 0))(w, xs)
    np.testing.assert_allclose(by_vmap, expected, rtol=1e-6)
    np.testing.assert_allclose(by_scan, expected, rtol=1e-6)
    second = jax.grad(lambda w: fun(STATE, w, xs[1]))(w)
    np.testing.assert_allclose(second, -jnp.sin(w), rtol=1e-6)


def test_float16_loss_warns_once_when_traced():
    fun = jax.jit(jls.value_and_grad(lambda w: jnp.sum(w)))
    with pytest.warns(UserWarning, match="Reduce the loss in float32") as caught:
        [fun(STATE, jnp.ones(2, jnp.float16)) for _ in range(3)]
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
def test_what_is_no_loss_is_refused(loss, error, message):
    for value_and_grad in both(jls.value_and_grad(lambda w: loss)):
        with pytest.raises(error, match=message):
            value_and_grad(STATE, jnp.float32(1.0))


@pytest.mark.parametrize("result", [jnp.float32(1.0), (jnp.float32(1.0), 2, 3)])
def test_has_aux_without_a_pair_is_refused(result):
    with pytest.raises(TypeError, match=r"must return the pair \(loss, aux\), got"):
        jls.value_and_grad(lambda w: result, has_aux=True)(STATE, jnp.float32(1.0))


def test_state_without_a_loss_scale_is_refused_before_the_loss_function_runs():
    def loss_fn(w):
        raise AssertionError

    with pytest.raises(ValueError, match="a loss scale, got ScaleByAdamState"):
        jls.grad(loss_fn)(optax.scale_by_adam().init(jnp.ones(2)), jnp.ones(2))
