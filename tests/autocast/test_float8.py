"""`compute_dtype=jnp.float8_e4m3fn`: which products, what they are, what is kept."""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import reference
import test_truth
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from reading import off, products, saved, size_in_bytes
from reference_autocast import FLOAT8
from shared import assert_identical

import jls
from jls._autocast import autocast, float8

pytestmark = pytest.mark.standard_promotion

E4M3, E5M2 = float8.E4M3, float8.E5M2
# The largest magnitude that is used, the bits of the mantissa, the smallest number.
FORMATS = {E4M3: (224.0, 3, 2.0**-9), E5M2: (57344.0, 2, 2.0**-16)}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Products of 16 and more take float8, on a CPU too."""
    monkeypatch.setattr(float8, "LEAST", 16)
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: None)


def normal(*shape, seed=0):
    rng = np.random.default_rng((seed, *shape))
    return jnp.float32(rng.normal(size=shape))


# Rounding.


def quantized(x, dtype):
    array, power = jax.jit(functools.partial(float8.quantized, dtype=dtype))(x)
    return np.asarray(array).astype(np.float64), float(power)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("exponent", [-110, -40, -9, 0, 1, 30, 100, 118])
def test_operand_is_rounded_by_the_rule(dtype, exponent):
    rng = np.random.default_rng(exponent + 200)
    numbers = rng.normal(size=400) * np.exp(rng.normal(size=400) * 3)
    numbers = (numbers / np.max(np.abs(numbers)) * rng.uniform(1, 2)).tolist()
    x = jnp.asarray(numbers, jnp.bfloat16) * jnp.asarray(2.0**exponent, jnp.bfloat16)
    expected, power = reference.float8(
        np.asarray(x, np.float64).tolist(), *FORMATS[dtype]
    )
    found, ours = quantized(x, dtype)
    assert ours == 2.0**power
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_of_float8_stays_what_it_is(dtype):
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    numbers = codes.astype(np.float32)
    numbers = numbers[np.abs(numbers) <= FORMATS[dtype][0]]  # no NaN either
    for shift in (-30, 0, 5):
        found, power = quantized(jnp.asarray(numbers) * 2.0**shift, dtype)
        assert power == 2.0**-shift
        assert found.tolist() == numbers.tolist()
        # And those between two of them go to the nearer one, as ml_dtypes rounds.
        between = np.sort(numbers)
        between = np.float32((between[1:] + between[:-1]) / 2 * 1.001)
        # Below the smallest one XLA of jax 0.8 rounds twice.
        between = between[np.abs(between) > FORMATS[dtype][2]]
        given = np.append(between, FORMATS[dtype][0]).astype(np.float32)
        found, _ = quantized(jnp.asarray(given * np.float32(2.0**shift)), dtype)
        rounded = given.astype(jnp.dtype(dtype)).astype(np.float64)
        assert found.tolist() == rounded.tolist()
    unused = {E4M3: 1, E5M2: 0}[dtype]  # exponents
    assert ml_dtypes.finfo(dtype).max == FORMATS[dtype][0] * 2**unused


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_nan(dtype, bad):
    x = normal(64).at[5].set(bad)
    found, _ = quantized(x, dtype)
    assert np.isnan(found[5])
    if np.isinf(bad):  # XLA's maximum on a CPU may lose NaN
        assert np.isnan(found).all()


def test_zeros_and_the_smallest_numbers_are_rounded():
    found, power = quantized(jnp.zeros(16), E4M3)
    assert not found.any()
    assert power == 2.0**100
    found, _ = quantized(jnp.full(16, 2.0**-120, jnp.bfloat16), E4M3)
    assert np.isfinite(found).all()


# A product.


def by_hand(x, w):
    """The product and its derivative, with operands rounded as the rule says."""

    def rounded(x, dtype):
        flat = np.asarray(x.astype(jnp.bfloat16), np.float64).ravel().tolist()
        numbers, exponent = reference.float8(flat, *FORMATS[dtype])
        return np.reshape(numbers, x.shape), exponent

    def product(one, other):
        (a, i), (b, j) = one, other
        return a @ b * 2.0 ** -(i + j)

    def turned(one):
        return one[0].T, one[1]

    a, b = rounded(x, E4M3), rounded(w, E4M3)
    y = product(a, b)

    def back(g):
        given = rounded(g, E5M2)
        return product(given, turned(b)), product(turned(a), given)

    return y, back


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**60])
def test_product_and_derivative_are_those_of_rounded_operands(scale):
    x, w, g = normal(48, 32) * scale, normal(32, 64, seed=1), normal(48, 64, seed=2)
    y, pull = jax.vjp(jax.jit(jls.autocast(jnp.matmul, FLOAT8)), x, w)
    expected, back = by_hand(x, w)
    results = [y, *pull(g)]
    for found, right in zip(results, [expected, *back(g)], strict=True):
        np.testing.assert_allclose(
            np.asarray(found), right, rtol=2.0**-8, atol=2.0**-16 * np.abs(right).max()
        )


def test_product_of_one_huge_and_one_tiny_operand_is_in_range():
    x, w = normal(16, 16) * 2.0**120, normal(16, 16, seed=1) * 2.0**-88
    y = jls.autocast(jnp.matmul, FLOAT8)(x, w)
    assert off(y, x @ w) < 0.1
    x, w = normal(16, 16) * 2.0**-90, normal(16, 16, seed=1) * 2.0**-90
    assert not np.any(jls.autocast(jnp.matmul, FLOAT8)(x, w))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["x", "w", "g"])
def test_every_element_that_float32_would_make_nonfinite_is_so(bad, where):
    given = {"x": normal(48, 32), "w": normal(32, 64, seed=1), "g": normal(48, 64)}
    given[where] = given[where].at[3, 5].set(bad)

    def all_of(fun):
        y, pull = jax.vjp(fun, given["x"], given["w"])
        return y, *pull(given["g"])

    ours = jax.jit(lambda: all_of(jls.autocast(jnp.matmul, FLOAT8)))()
    for found, right in zip(ours, all_of(jnp.matmul), strict=True):
        assert not np.any(np.isfinite(found) & ~np.isfinite(right))


def test_an_inf_makes_nan_of_the_whole_result():
    cast = jls.autocast(jnp.matmul, FLOAT8)
    x, w, g = normal(48, 32).at[3, 5].set(np.inf), normal(32, 64), normal(48, 64)
    y, pull = jax.vjp(cast, x, w)
    of_x, of_w = pull(g)
    assert np.isnan(y).all()
    assert np.isfinite(of_x).all()  # which needs w and g
    assert np.isnan(of_w).all()
    _, pull = jax.vjp(cast, normal(48, 32), w)
    assert all(np.isnan(z).all() for z in pull(g.at[0, 0].set(np.inf)))


def loss_fn(params, x):
    h = jax.nn.gelu(x @ params["in"] + params["b"])
    return jnp.mean((h @ params["out"] - 1) ** 2)


def make_params():
    return {"in": normal(32, 64) / 6, "b": jnp.zeros(64), "out": normal(64, 32) / 8}


def make_step(wrapper, jit=jax.jit):
    optimizer = wrapper(optax.adam(1e-2))
    step = jls.train_step(loss_fn, optimizer, compute_dtype=E4M3)
    return jit(step), optimizer.init(make_params())


@pytest.mark.cover(2)
@pytest.mark.parametrize("wrapper", [jls.skip_nonfinite, jls.loss_scaled])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["in", "out", "x"])
@pytest.mark.parametrize("run", [jax.jit, lambda fun: fun])
def test_step_is_skipped_if_an_operand_is_not_finite(wrapper, bad, where, run):
    step, state = make_step(wrapper, run)
    params, x = make_params(), normal(48, 32)
    if where == "x":
        x = x.at[3, 5].set(bad)
    else:
        params[where] = params[where].at[3, 5].set(bad)
    new, _, report = step(params, state, x)
    assert report.skipped
    assert_identical(new, params)


def test_loss_scale_changes_no_bit():
    grads = {}
    for scale in (1.0, 2.0**15, 2.0**-10):
        state = jls.static(scale).init()
        cast = jls.autocast(loss_fn, FLOAT8)
        fun = jax.jit(jls.value_and_grad(cast))
        grads[scale] = fun(state, make_params(), normal(48, 32))[1]
    for found in grads.values():
        assert_identical(found, grads[1.0])


def test_training_goes_as_in_bfloat16():
    found = {}
    for dtype in (jnp.bfloat16, E4M3):
        optimizer = jls.skip_nonfinite(optax.adam(1e-2))
        step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=dtype))
        params = make_params()
        state = optimizer.init(params)
        for i in range(60):
            params, state, report = step(params, state, normal(48, 32, seed=i % 3))
        found[dtype] = float(report.loss)
    assert found[E4M3] < 1.2 * found[jnp.bfloat16] + 0.01


# Which products.


def dtypes_of(fun, *args):
    """The dtypes of the operands of each product of a loss and its gradient."""
    cast = jls.autocast(lambda *args: jnp.sum(fun(*args)), FLOAT8)
    grad = jax.grad(cast, argnums=tuple(range(len(args))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [x.operands[:2] for x in products(grad, *args)]
    return [tuple(x.removeprefix("float8_") for x in pair) for pair in found]


IN_FLOAT8 = [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e5m2", "e4m3fn")]
IN_BFLOAT16 = [("bfloat16", "bfloat16")] * 3


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((2048, 2048), (2048, 2048), IN_FLOAT8),
        ((2, 1024, 2048), (2048, 4096), IN_FLOAT8),  # batch and length are rows
        ((2047, 2048), (2048, 2048), IN_BFLOAT16),
        ((2048, 2032), (2032, 2048), IN_BFLOAT16),
        ((2048, 2048), (2048, 2040), IN_BFLOAT16),
        ((2064, 2048), (2048, 2048), IN_FLOAT8),
        ((2056, 2048), (2048, 2048), IN_BFLOAT16),  # no multiple of 16
        ((4, 2048, 2048), (4, 2048, 2048), IN_BFLOAT16),  # a batch dimension
    ],
)
def test_large_products_take_float8(monkeypatch, left, right, expected):
    monkeypatch.undo()
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: None)
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (left, right)]
    assert dtypes_of(jnp.matmul, *shapes) == expected


def test_products_of_other_kinds_stay_bfloat16():
    x, w = normal(2, 32, 32, 16), normal(3, 3, 16, 16)

    def convolution(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert dtypes_of(convolution, x, w) == IN_BFLOAT16
    sizes = jnp.array([16, 32])
    found = dtypes_of(
        lambda x, w: lax.ragged_dot(x, w, sizes), normal(48, 32), normal(2, 32, 16)
    )
    assert set(found) == {("bfloat16", "bfloat16")}


def test_products_that_bfloat16_leaves_as_they_are_stay_so():
    def fun(x, w):
        with jax.named_scope("router"):
            kept = x @ w
        return kept + jnp.dot(x, w, precision="highest") + x @ w

    cast = jls.autocast(lambda x, w: jnp.sum(fun(x, w)), FLOAT8, keep="router")
    found = [x.operands[0] for x in products(cast, normal(48, 32), normal(32, 64))]
    assert found == ["float32", "float32", "float8_e4m3fn"]


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_products_with_a_derivative_of_their_own_stay_bfloat16(kind):
    rule = {"jvp": jax.custom_jvp, "vjp": jax.custom_vjp}[kind]

    @rule
    def layer(x, w):
        return jnp.tanh(x @ w)

    if kind == "jvp":

        @layer.defjvp
        def _(primals, tangents):
            return jax.jvp(lambda x, w: jnp.tanh(x @ w), primals, tangents)

    else:
        layer.defvjp(
            lambda x, w: jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w),
            lambda pull, g: pull(g),
        )
    x, w = normal(48, 32), normal(32, 32)
    found = dtypes_of(lambda x, w: layer(x, w) @ w, x, w)
    assert found.count(("bfloat16", "bfloat16")) == 3
    assert sorted(set(found)) == [("bfloat16", "bfloat16"), *sorted(set(IN_FLOAT8))]


def scanned(params, x):
    return lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, params)[0]


def unrolled(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return x


def remat(params, x):
    for w in params:
        x = x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return x


def jitted(params, x):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    for w in params:
        x = x + layer(x, w)
    return x


def mapped(params, x):
    def one(x):
        return unrolled(params, x[None])[0]

    return jax.vmap(one)(x)


def branched(params, x):
    for w in params:
        x = lax.cond(x[0, 0] < 9, lambda x, w=w: x + jnp.tanh(x @ w), lambda x: x, x)
    return x


FORMS = [scanned, unrolled, remat, jitted, mapped, branched]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_program_give_the_same(form):
    params, x = normal(3, 32, 32) / 6, normal(48, 32)

    def loss(form):
        return lambda params, x: jnp.mean((form(params, x) - 1) ** 2)

    right = jax.jit(jax.grad(jls.autocast(loss(unrolled), FLOAT8)))(params, x)
    cast = jax.grad(jls.autocast(loss(form), FLOAT8))
    assert off(jax.jit(cast)(params, x), right) < 0.02
    assert off(right, jax.grad(loss(unrolled))(params, x)) < 0.15
    narrow = [x.operands[0] for x in products(cast, params, x)]
    assert {"float8_e4m3fn", "float8_e5m2"} <= set(narrow)


POLICIES = [
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_with_any_policy_gives_the_same(policy):
    params, x = normal(2, 32, 32) / 6, normal(48, 32)

    def loss(form):
        return lambda params, x: jnp.mean((form(params, x) - 1) ** 2)

    form = jax.checkpoint(unrolled, policy=getattr(jax.checkpoint_policies, policy))
    right = jax.jit(jax.grad(jls.autocast(loss(unrolled), FLOAT8)))(params, x)
    found = jax.jit(jax.grad(jls.autocast(loss(form), FLOAT8)))(params, x)
    assert off(found, right) < 0.01


def test_an_autocast_can_be_mapped():
    params, xs = make_params(), normal(3, 48, 32)
    grad = jax.grad(jls.autocast(loss_fn, FLOAT8))
    found = jax.vmap(grad, in_axes=(None, 0))(params, xs)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], found)
        assert off(one, grad(params, xs[i])) < 0.01


def test_checks_of_jax_find_nothing():
    args = make_params(), normal(48, 32)
    with jax.enable_checks(True):
        jax.jit(jax.grad(jls.autocast(loss_fn, FLOAT8)))(*args)


def test_forward_mode_is_refused_by_jax():
    cast = jls.autocast(loss_fn, FLOAT8)
    args = make_params(), normal(48, 32)
    with pytest.raises(TypeError, match="forward mode"):
        jax.jvp(cast, args, args)


@pytest.mark.cover(2)
@pytest.mark.parametrize("form", [scanned, unrolled, remat])
@pytest.mark.parametrize("wrong", ["params", "x"])
def test_second_derivative_is_refused(form, wrong):
    cast = jls.autocast(lambda params, x: jnp.mean(form(params, x)), FLOAT8)
    place = ["params", "x"].index(wrong)

    def penalty(params, x):
        return jnp.sum(jax.jit(jax.grad(cast))(params, x) ** 2)

    with pytest.raises(TypeError, match=r"differentiated twice. Put the autocast"):
        jax.grad(penalty, place)(normal(3, 32, 32) / 6, normal(48, 32))


def test_second_derivative_of_a_linear_program_is_refused():
    grad = jax.grad(jls.autocast(lambda w, x: jnp.mean(x @ w), FLOAT8))
    with pytest.raises(TypeError, match="differentiated twice"):
        jax.grad(lambda x: jnp.sum(grad(normal(32, 32), x)))(normal(48, 32))


def test_gradient_may_be_used_in_a_program_that_is_differentiated():
    params, x = normal(3, 32, 32) / 6, normal(48, 32)

    def adapted(loss):
        def outer(params, x):
            grads = lax.stop_gradient(jax.grad(loss)(params, x))
            return loss(params - 0.1 * grads, x)

        return jax.jit(jax.grad(outer))(params, x)

    def loss(params, x):
        return jnp.mean((scanned(params, x) - 1) ** 2)

    def penalty(params):
        return jnp.sum(jax.grad(loss)(params, x) ** 2)

    assert off(adapted(jls.autocast(loss, FLOAT8)), adapted(loss)) < 0.15
    inside = jax.grad(jls.autocast(penalty, FLOAT8))(params)
    assert off(inside, jax.grad(penalty)(params)) < 0.15


def test_sizes_are_those_of_a_micro_batch(monkeypatch):
    monkeypatch.setattr(float8, "LEAST", 32)
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    params = {**make_params()}

    def kinds(micro_batches):
        step = jls.train_step(
            loss_fn, optimizer, compute_dtype=E4M3, micro_batches=micro_batches
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = products(step, params, optimizer.init(params), normal(64, 32))
        return {x.operands[0] for x in found}

    assert kinds(2) == {"float8_e4m3fn", "float8_e5m2"}
    assert kinds(4) == {"bfloat16"}


# Libraries.


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one, self.two = (
            nnx.Linear(32, 64, rngs=rngs),
            nnx.Linear(64, 32, rngs=rngs),
        )

    def __call__(self, x):
        return self.two(nnx.gelu(self.one(x)))


def linen_step(optimizer, dtype):
    model = Linen()
    params = model.init(jax.random.key(0), jnp.zeros((1, 32)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def loss(state, x):
        return jnp.mean((state.apply_fn(state.params, x) - 1) ** 2)

    return jax.jit(jls.train_step(loss, compute_dtype=dtype)), state


def linen_losses(optimizer, dtype, batches):
    step, state = linen_step(optimizer, dtype)
    for x in batches:
        state, report = step(state, x)
        yield report.loss


def nnx_losses(tx, dtype, batches):
    model = Nnx()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(
        jls.train_step(lambda m, x: jnp.mean((m(x) - 1) ** 2), compute_dtype=dtype)
    )
    for x in batches:
        yield step(model, optimizer, x).loss


def equinox_losses(optimizer, dtype, batches):
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - 1) ** 2)

    state = optimizer.init(params)
    step = jax.jit(jls.train_step(loss, optimizer, compute_dtype=dtype))
    for x in batches:
        params, state, report = step(params, state, x)
        yield report.loss


def haiku_losses(optimizer, dtype, batches):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 32])(x)))
    params = model.init(jax.random.key(0), batches[0])

    def loss(params, x):
        return jnp.mean((model.apply(params, x) - 1) ** 2)

    state = optimizer.init(params)
    step = jax.jit(jls.train_step(loss, optimizer, compute_dtype=dtype))
    for x in batches:
        params, state, report = step(params, state, x)
        yield report.loss


@pytest.mark.parametrize(
    "losses", [linen_losses, nnx_losses, equinox_losses, haiku_losses]
)
def test_libraries(losses):
    batches = [normal(48, 32, seed=i) for i in range(5)]
    found = {
        dtype: np.float32(
            [*losses(jls.skip_nonfinite(optax.adam(3e-3)), dtype, batches)]
        )
        for dtype in (jnp.float32, E4M3)
    }
    assert not np.array_equal(found[E4M3], found[jnp.float32])
    np.testing.assert_allclose(found[E4M3], found[jnp.float32], rtol=0.1)
    assert found[E4M3][-1] < found[E4M3][0]


# What is kept for the derivative.


def bare(params, x):
    for w in params:
        x = x @ w
    return jnp.mean(x)


def twice(params, x):
    """A result of a product that a gelu needs too."""
    h = x @ params[0]
    return jnp.mean(jax.nn.gelu(h) @ params[1] + h @ params[2])


def attention(params, x):
    x = (x - jnp.mean(x, -1, keepdims=True)) / jnp.std(x, -1, keepdims=True)
    q, k, v = (x @ w for w in params)
    return jnp.mean(jax.nn.softmax(q @ k.T) @ v)


KEPT = {
    "bare": bare,
    "mlp": lambda params, x: jnp.mean(unrolled(params, x) ** 2),
    "scan": lambda params, x: jnp.mean(scanned(params, x) ** 2),
    "remat": lambda params, x: jnp.mean(remat(params, x) ** 2),
    "twice": twice,
    "attention": attention,
    "jitted": lambda params, x: jnp.mean(jitted(params, x) ** 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_no_more_is_kept_than_in_bfloat16(name):
    loss = KEPT[name]
    params, x = [normal(64, 64, seed=i) / 8 for i in range(3)], normal(64, 64)
    params = jnp.stack(params) if name == "scan" else params

    def kept(dtype):
        return size_in_bytes(saved(jls.autocast(loss, dtype), params, x))

    assert kept(E4M3) <= kept(jnp.bfloat16) + 64  # and the powers


@pytest.mark.parametrize("is_first", [True, False])
def test_layer_in_a_rule_and_outside_has_two_bodies(is_first):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    @jax.custom_jvp
    def ruled(x, w):
        return layer(x, w)

    @ruled.defjvp
    def _(primals, tangents):
        return jax.jvp(layer, primals, tangents)

    def loss(x, w):
        one, other = (ruled, layer) if is_first else (layer, ruled)
        return jnp.sum(other(one(x, w), w))

    cast = jls.autocast(loss, FLOAT8)
    found = [x.operands[0] for x in products(cast, normal(48, 32), normal(32, 32))]
    right = ["bfloat16", "float8_e4m3fn"]
    assert found == (right if is_first else right[::-1])


# Truth.


JUDGED = ["row rms_norm", "row small_steps_unrolled", "row rotation"]
JUDGED += ["row average_that_starts_from_data", "row associative_scan"]
# Of a gradient inside, the reference does not know what belongs to the derivative.
JUDGED += ["program nested_jit"]
LONG = ["program flash_attention_custom_vjp", "program equilibrium_while_custom_vjp"]
LONG += ["program shard_map_tensor_parallel", "row slow_average_of_a_target"]


@pytest.mark.parametrize(
    "name", [*JUDGED, *(pytest.param(x, marks=pytest.mark.more) for x in LONG)]
)
def test_a_right_program_is_its_reference(monkeypatch, name):
    monkeypatch.setattr(float8, "LEAST", 1)
    monkeypatch.setattr(float8, "_MULTIPLE", 1)
    found = test_truth.judged(*name.split(), FLOAT8)
    said = test_truth.explained(*name.split(), FLOAT8, found.lines)
    assert not found.is_wrong, said
    assert not found.is_left_out, found.said


# What it says.


def test_other_float8_is_refused():
    for dtype in (E5M2, jnp.float8_e4m3fnuz, "float8_e4m3b11fnuz"):
        with pytest.raises(ValueError, match=r"Write jnp.float8_e4m3fn: operands"):
            jls.autocast(loss_fn, dtype)


def test_no_large_product_is_said():
    cast = jls.autocast(loss_fn, FLOAT8)
    with pytest.warns(jls.JlsWarning, match="no product for float8"):
        cast(make_params(), normal(8, 32))


def test_chip_without_float8_is_said_once(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(float8, "LEAST", 16)
    float8.warn_of_chip.cache_clear()
    cast = jls.autocast(loss_fn, FLOAT8)
    with pytest.warns(jls.JlsWarning, match=r"float8 on cpu: .* Write jnp.bfloat16"):
        cast(make_params(), normal(48, 32))
    cast(make_params(), normal(48, 32))


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "has_it"),
    [
        ("cpu", "cpu", None, False),
        ("gpu", "Tesla T4", "7.5", False),
        ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", False),
        ("gpu", "NVIDIA L4", "8.9", True),
        ("gpu", "NVIDIA H100 80GB HBM3", "9.0", True),
        ("gpu", "NVIDIA B200", "10.0", True),
        ("gpu", "AMD Instinct MI300X", "gfx942", False),
        ("tpu", "TPU v5e", None, False),
        ("tpu", "TPU7x", None, True),
    ],
)
def test_which_chips_have_float8(monkeypatch, platform, kind, capability, has_it):
    class Device:
        device_kind = kind

    Device.platform = platform
    if capability:
        Device.compute_capability = capability
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert float8.has_float8() == has_it


@pytest.mark.parametrize("wrapper", [jls.skip_nonfinite, jls.loss_scaled])
def test_tools_read_float8(wrapper):
    step, state = make_step(wrapper)
    args = make_params(), state, normal(48, 32)
    check = jls.check_step(step, *args)
    assert check.ok
    assert not check.not_tried
    dtypes = {name: count for name, count, _ in check.precision.products}
    assert dtypes == {"float8_e4m3fn": 2, "float8_e5m2": 3}
    assert not check.precision.wide
    found = jls.calibrate(step, *args)
    assert found.ceiling is None
    says = "bfloat16 needs no loss scale" in check.half
    assert says == (wrapper is jls.loss_scaled)


def test_precision_says_why_a_product_is_not_float8():
    def loss(params, x):
        h = x @ params["in"]
        q = h.reshape(4, -1, 64)
        y = jax.nn.softmax(q @ q.transpose(0, 2, 1)) @ q
        return jnp.mean((y.reshape(-1, 64) @ params["out"][:, :8]) ** 2)

    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jax.jit(jls.train_step(loss, optimizer, compute_dtype=E4M3))
    params = make_params()
    found = jls.check_step(step, params, optimizer.init(params), normal(64, 32))
    assert found.ok
    reasons = {reason for _, reason in found.precision.wide}
    assert reasons == {"too small for float8", "no float8 form"}


def test_an_inf_is_followed_to_where_it_came_in():
    cast = jls.autocast(loss_fn, FLOAT8)
    params = make_params()
    params["out"] = params["out"].at[3, 5].set(np.inf)
    found = jls.why(jax.jit(jax.grad(cast)), params, normal(48, 32))
    assert [x.place.module for x in found.births] == ["params/out"]
