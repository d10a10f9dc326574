"""The table of `jls.autocast`: what each operation of a float32 program becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from reading import named, off, only, operations, products
from shared import assert_identical

import jls

HALVES = [jnp.float16, jnp.bfloat16]
HALF = pytest.mark.parametrize("half", HALVES, ids=["float16", "bfloat16"])
X = jnp.asarray(np.random.RandomState(0).randn(4, 8), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(8, 8), jnp.float32)
F32 = "float32"


def name_of(half):
    return jnp.dtype(half).name


def between(fun, half, keep=None):
    """`fun` between two products, under an autocast."""
    return jls.autocast(lambda x, w: fun(x @ w) @ w, half, keep=keep)


def behind(fun, half):
    """`fun` behind the last product."""
    return jls.autocast(lambda x, w: fun(x @ w), half)


# Products.


@HALF
def test_a_product_is_half_operands_and_result(half):
    cast = jls.autocast(jnp.matmul, half)
    (product,) = products(cast, X, W)
    assert product.operands == (name_of(half),) * 2
    assert product.results == (name_of(half),)
    assert cast(X, W).dtype == jnp.float32


def test_a_convolution_and_a_ragged_dot_are_half():
    def convolve(x, w):
        return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")

    def ragged(x, w):
        return lax.ragged_dot(x, w[None], jnp.array([4], jnp.int32))

    for fun in (convolve, ragged):
        (product,) = products(jls.autocast(fun, jnp.float16), X, W)
        assert {*product.operands[:2], *product.results} == {"float16"}


def test_no_algorithm_of_a_product_is_asked_for():
    (product,) = products(jls.autocast(jnp.matmul, jnp.float16), X, W)
    assert product.equation.params["precision"] is None


def test_the_backward_products_are_half_too():
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    found = products(jax.grad(jls.autocast(loss, jnp.float16), argnums=(0, 1)), X, W)
    assert len(found) == 6
    assert {dtype for one in found for dtype in one.operands} == {"float16"}


def in_float32(x, w):
    dimensions = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=jnp.float32)


@pytest.mark.filterwarnings("ignore:autocast to float16 found no product")
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jnp.vdot(x, x),
        lambda x, w: jnp.einsum("bd,bd->b", x, x),
        lambda x, w: jnp.matmul(x, w, precision="highest"),
        lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        lambda x, w: x.astype(jnp.int32) @ w.astype(jnp.int32),
        lambda x, w: x.astype(jnp.complex64) @ w.astype(jnp.complex64),
        lambda x, w: in_float32(x.astype(jnp.float16), w.astype(jnp.float16)),
        lambda x, w: in_float32(x.astype(jnp.bfloat16), w),
    ],
    ids=[
        "vdot",
        "batched",
        "precision=",
        "bfloat16",
        "int32",
        "complex64",
        "float16 to float32",
        "bfloat16 and float32",
    ],
)
def test_inner_products_and_what_asks_for_more_stay_as_written(fun):
    (plain,) = products(fun, X, W)
    (product,) = products(jls.autocast(fun, jnp.float16), X, W)
    assert product[:3] == plain[:3]
    cast = jax.jit(jls.autocast(fun, jnp.float16))
    assert_identical(cast(X, W), jax.jit(fun)(X, W))


def test_the_default_precision_of_the_user_counts_for_what_stays_float32():
    def fun(x, w):
        return jnp.vdot(x, x) + jnp.sum(x @ w)

    with jax.default_matmul_precision("highest"):
        inner, product = products(jls.autocast(fun, jnp.float16), X, W)
    highest = (lax.Precision.HIGHEST,) * 2
    assert inner.equation.params["precision"] == highest
    assert product.equation.params["precision"] is None
    assert product.results == ("float16",)


def test_a_precision_that_is_asked_for_is_not_that_of_the_default():
    def fun(x, w):
        return jnp.matmul(x, w, precision="high") @ w

    with jax.default_matmul_precision("highest"):
        first, _ = products(jls.autocast(fun, jnp.float16), X, W)
    assert first.equation.params["precision"] == (lax.Precision.HIGH,) * 2


def test_a_product_with_an_operand_in_half_is_half():
    def fun(x, w):
        return in_float32(x, w.astype(jnp.float16))

    (product,) = products(jls.autocast(fun, jnp.float16), X, W)
    assert product.operands == ("float16", "float16")


OUTER = {
    "outer": lambda x, y: jnp.einsum("i,j->ij", x, y),
    "of a single column": lambda x, y: x[:, None] @ y[None],
    "batched": lambda x, y: jnp.einsum("bi,bj->bij", x[None], y[None])[0],
}


@HALF
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_angles_of_a_rotary_embedding_are_float32(outer, half):
    def fun(x, w, positions):
        frequencies = 1e-4 ** (jnp.arange(4) / 4)
        angles = outer(positions.astype(jnp.float32), frequencies)
        turned = (x @ w) * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        return jnp.sum(jnp.square(turned @ w))

    args = X, W, jnp.arange(len(X)) + 4000
    cast = jls.autocast(fun, half)
    assert off(cast(*args), fun(*args)) < 4 * jnp.finfo(half).eps
    dtypes = [x.results[0] for x in products(cast, *args)]
    assert sorted(dtypes) == sorted([name_of(half), F32, name_of(half)])


@HALF
def test_an_outer_product_is_computed_element_by_element_in_float32(half):
    def fun(x, w):
        y = jnp.tanh(x @ w)
        return jnp.sum(jnp.einsum("bi,bj->bij", y, y) @ w)

    cast = jls.autocast(fun, half)
    outer = products(cast, X, W)[1]
    assert (*outer.operands, *outer.results) == (F32,) * 3


def test_an_outer_product_behind_the_last_product_is_float32():
    def fun(x, w):
        return jnp.einsum("bi,bj->bij", x @ w, jnp.sum(x, axis=1, keepdims=True))

    assert products(jls.autocast(fun, jnp.float16), X, W)[1].results == (F32,)


# Between two products.


ELEMENTWISE = {
    "tanh": jnp.tanh,
    "max": lambda x: jnp.maximum(x, 0.0),
    "logistic": jax.nn.sigmoid,
    "mul": lambda x: 2 * x,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(jnp.abs(x)),
    "pow": lambda x: jnp.abs(x) ** 1.5,
    "integer_pow": lambda x: x**3,
    "div": lambda x: 1 / x,
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "tan": jnp.tan,
    "add": lambda x: x + W[:1],
    "sub": lambda x: x - 1e-9,
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1),
}


@pytest.mark.cover(1)
@HALF
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_are_float32(name, half):
    cast = between(ELEMENTWISE[name], half)
    assert {x.results[0] for x in named(name, cast, X, W)} == {F32}
    h = (X.astype(half) @ W.astype(half)).astype(F32)
    once = ELEMENTWISE[name](h).astype(half) @ W.astype(half)
    assert off(cast(X, W), once.astype(F32)) < float(jnp.finfo(half).eps) / 2


@HALF
def test_a_chain_that_is_moved_is_rounded_where_a_product_takes_it(half):
    def fun(x):
        y = jnp.sin(x) * 1e-3
        return jnp.concatenate([y[:, :4], 1 - y[:, 4:]], axis=1)

    cast = between(fun, half)
    h = (X.astype(half) @ W.astype(half)).astype(F32)
    once = fun(h).astype(half) @ W.astype(half)
    assert off(cast(X, W), once.astype(F32)) < float(jnp.finfo(half).eps) / 2


def norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * W[:1] + W[1:2]


@HALF
def test_a_chain_with_a_mean_is_rounded_once_at_its_end(half):
    cast = between(norm, half)
    h = (X.astype(half) @ W.astype(half)).astype(half)
    once = norm(h.astype(jnp.float32)).astype(half)
    assert_identical(cast(X, W), (once @ W.astype(half)).astype(jnp.float32))


def test_a_power_beyond_the_range_is_float32_on_the_way():
    big = jnp.full((4, 8), 300.0)  # its square is beyond float16
    cast = jls.autocast(lambda x, w: (((x @ w) ** 2) * 1e-3) @ w, jnp.float16)
    np.testing.assert_allclose(cast(big, jnp.eye(8)), big**2 * 1e-3, rtol=1e-3)


@pytest.mark.parametrize("factor", [1e6, 4e-8, 1e-30, 1e30])
def test_a_constant_is_the_constant(factor):
    def fun(x, w):
        return (((x @ w) * factor) * (1 / factor)) @ w

    x = jnp.full((4, 8), 0.5)
    assert off(jls.autocast(fun, jnp.float16)(x, W), fun(x, W)) < 2e-3


def test_a_denominator_is_not_0():
    def fun(x, w):
        h = x @ w
        g = h * h
        return (h * g / g) @ w

    x = jnp.full((4, 8), 1e-4)
    assert off(jls.autocast(fun, jnp.float16)(x, jnp.eye(8)), x) < 2e-3


@HALF
@pytest.mark.parametrize("moved", [lambda s: s[::-1], lambda s: jnp.roll(s, 1, 0)])
def test_an_exp_less_another_maximum_is_in_range(moved, half):
    def fun(x, w):
        s = x @ w
        return jnp.exp(moved(s) - jnp.max(s, axis=1, keepdims=True)) * 1e-3 @ w

    x = jnp.asarray([[0.0] * 8, [12.0] * 8])
    assert off(jls.autocast(fun, half)(x, jnp.eye(8)), fun(x, jnp.eye(8))) < 0.01


GUARDS = {
    "log1p": lambda p: jnp.log1p(-jnp.minimum(p, 1 - 1e-6)),
    "logit": lambda p: jnp.log(jnp.clip(p, 1e-5, 1 - 1e-5) / (1 - p + 1e-5)),
    "arccos": lambda p: jnp.arccos(jnp.clip(p, -1 + 1e-6, 1 - 1e-6)),
    "arctanh": lambda p: jnp.arctanh(jnp.clip(p, -1 + 1e-6, 1 - 1e-6)),
    "erf_inv": lambda p: lax.erf_inv(jnp.minimum(p, 1 - 1e-6)),
    "gumbel": lambda p: -jnp.log(-jnp.log(jnp.clip(p, 1e-6, 1 - 1e-6))),
    "quotient": lambda p: 1e-4 / (1 - jnp.minimum(p, 1 - 1e-4)),
    "in the log": lambda p: jnp.log(1 - p + 1e-6),
}


@pytest.mark.cover(1)
@HALF
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_guards(name, half):
    def loss(w, x):
        return jnp.mean((GUARDS[name](jax.nn.sigmoid(9 * x @ w)) @ w) ** 2)

    for grad in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        ours = grad(jls.autocast(loss, half))(W, X)
        assert jnp.all(jnp.isfinite(ours))


def test_a_relu_with_a_derivative_of_its_own_keeps_it():
    @jax.custom_jvp
    def relu(x):
        return jax.nn.relu(x)

    relu.defjvps(lambda t, ans, x: jnp.where(x > -0.5, 3 * t, 0.0))

    def steps(x, w):
        for _ in range(4):
            x = relu(x + 0.1 * jnp.sin(x @ w))
        return jnp.sum(x)

    cast = jls.autocast(steps, jnp.float16)
    assert off(jax.grad(cast)(X, W), jax.grad(steps)(X, W)) < 4e-3


# float32.


@pytest.mark.parametrize(
    ("name", "fun"),
    [
        ("reduce_sum", lambda x: jnp.sum(x, axis=0, keepdims=True)),
        ("reduce_sum", lambda x: jnp.mean(x, axis=0, keepdims=True)),
        ("cumsum", lambda x: jnp.cumsum(x, axis=0)),
        ("scatter-add", lambda x: jnp.zeros((4, 8)).at[jnp.array([0, 0])].add(x[:2])),
        ("cumprod", lambda x: jnp.cumprod(x, axis=0)),
    ],
)
@HALF
def test_sums_are_float32(name, fun, half):
    (found,) = named(name, between(fun, half), X, W)
    assert found.results == (F32,)
    assert set(found.operands) <= {F32, "int32"}


def test_a_psum_is_float32():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def fun(x):
        total = jax.shard_map(
            lambda x: lax.psum(jnp.tanh(x), "d"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return total(x)

    (found,) = named("psum", between(fun, jnp.float16), X, W)
    assert found.operands == found.results == (F32,)


def of_host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, shape, x, vmap_method="sequential")


def of_pallas(x):
    def kernel(operand, result):
        result[...] = jnp.dot(operand[...], operand[...].T)[:, :1] * operand[...]

    return pallas.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


@pytest.mark.parametrize(
    ("name", "fun"), [("pure_callback", of_host), ("pallas_call", of_pallas)]
)
def test_what_jax_does_not_see_into_is_as_written(name, fun):
    cast = between(fun, jnp.float16)
    (found,) = named(name, cast, X, W)
    assert found.operands == found.results == (F32,)
    assert off(cast(X, W), fun(X @ W) @ W) < 4e-3
    inside = [one for one in products(cast, X, W) if name in one.calls]
    assert {dtype for one in inside for dtype in one.operands} <= {F32}


@HALF
@pytest.mark.parametrize("fun", [jnp.tanh, jnp.exp, jnp.abs])
def test_all_that_follows_the_last_product_is_float32(fun, half):
    found = operations(behind(fun, half), X, W)[-1]
    assert found.results == (F32,)


LOWEST = jnp.finfo(jnp.float32).min
MASKS = {
    "chosen": lambda x, w: jnp.where(jnp.eye(4, 8, dtype=bool), x @ w, LOWEST),
    "chosen and moved": lambda x, w: jnp.where(
        jnp.eye(8, 4, dtype=bool), (x @ w).T, LOWEST
    ).T[:, ::-1],
    "chosen, and far from the largest float32": lambda x, w: (
        jnp.where(jnp.eye(8, 4, dtype=bool), (x @ w).T, -1e9).T
    ),
    "chosen of a chain": lambda x, w: jnp.where(
        jnp.eye(4, 8, dtype=bool), jnp.sin(x @ w), LOWEST
    ),
    "an array": lambda x, w: np.full((4, 8), -1e9, np.float32) + 0 * (x @ w)[0, 0],
}


@pytest.mark.parametrize("name", MASKS)
def test_a_finite_constant_that_a_product_takes_is_the_largest_number(name):
    cast = jls.autocast(lambda x, w: MASKS[name](x, w) @ w, jnp.float16)
    largest = float(jnp.finfo(jnp.float16).max)
    if name == "an array":  # what is computed with it is as it is
        assert not jnp.any(jnp.isfinite(cast(X, jnp.eye(8))))
    else:
        result = cast(X, jnp.ones((8, 8)) / 64)
        assert jnp.all(jnp.isfinite(result))
        assert jnp.min(result) < -largest / 64


def test_a_number_that_is_not_selected_is_no_mask():
    def fun(x, w):
        return lax.pad(x @ w, jnp.float32(1e8), [(0, 4, 0), (0, 0, 0)]) @ w

    result = jls.autocast(fun, jnp.float16)(X, jnp.ones((8, 8)) / 64)
    assert jnp.all(jnp.isinf(result[4:]))


@pytest.mark.cover(2)
@HALF
@pytest.mark.parametrize("lowest", [-1e9, -1e30, float(LOWEST)])
@pytest.mark.parametrize("kind", ["constant", "argument", "added"])
def test_a_masked_softmax_is_that_of_float32(kind, lowest, half):
    causal = jnp.tril(jnp.ones((4, 4), bool))

    def fun(x, w, mask):
        scores = x @ w @ x.T
        if kind == "constant":
            scores = jnp.where(causal, scores, lowest)
        elif kind == "argument":
            scores = scores + mask
        else:
            scores = scores + (1.0 - causal.astype(jnp.float32)) * lowest
        return jnp.mean(jnp.sin(jax.nn.softmax(0.5 * scores) @ x @ w))

    args = X, W, jnp.where(causal, 0, lowest)
    cast = jls.autocast(fun, half)
    eps = float(jnp.finfo(half).eps)
    assert off(cast(*args), fun(*args)) < 16 * eps
    assert off(jax.grad(cast)(*args), jax.grad(fun)(*args)) < 16 * eps
    # Where a number was within the range is not asked.
    names = {one.name for one in operations(jax.grad(cast), *args)}
    assert not names & {"clamp", "is_finite"}


@pytest.mark.parametrize("of", [lambda y: y, jnp.sin], ids=["a product", "a chain"])
def test_an_infinite_constant_stays_infinite(of):
    def fun(x, w):
        return jnp.where(jnp.eye(4, 8, dtype=bool), of(x @ w), -jnp.inf) @ w

    assert jnp.all(jnp.isinf(jls.autocast(fun, jnp.float16)(X, jnp.ones((8, 8)) / 64)))


def test_a_scatter_that_computes_is_as_written():
    def fun(x):
        return jnp.sin(x).at[jnp.array([0, 1])].apply(jnp.cos)

    cast = between(fun, jnp.float16)
    assert only("scatter", cast, X, W) == only("sin", cast, X, W) == F32
    assert off(cast(X, W), fun(X @ W) @ W) < 2e-3


def test_an_explicit_cast_rounds_as_it_says():
    def fun(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32) * 3

    h = (X.astype(jnp.float16) @ W.astype(jnp.float16)).astype(F32)
    assert only("mul", between(fun, jnp.float16), X, W) == F32
    assert off(behind(fun, jnp.float16)(X, W), fun(h)) == 0


# Loops and branches.


@HALF
@pytest.mark.parametrize("is_fast", [False, True])
def test_a_norm_of_a_residual_stream_far_from_0_has_its_derivative(half, is_fast):
    def normed(x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        squares = jnp.mean(x**2, axis=-1, keepdims=True) - mean**2
        two_pass = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
        return (x - mean) * lax.rsqrt((squares if is_fast else two_pass) + 1e-6)

    def loss(w, x):
        for _ in range(3):
            x = x + jnp.tanh(normed(x) @ w)
        return jnp.sum(jnp.sin(normed(x)))

    ours = jax.grad(jls.autocast(loss, half))(W, X + 100)
    assert off(ours, jax.grad(loss)(W, X + 100)) < 4 * float(jnp.finfo(half).eps)


@pytest.mark.cover(1)
@HALF
@pytest.mark.parametrize("loop", ["scan", "fori", "while"])
def test_a_loop_of_small_steps_moves(loop, half):
    def step(c, w):
        return c + 1e-3 * jnp.tanh(c @ w)

    def fun(x, w):
        if loop == "scan":
            return lax.scan(lambda c, _: (step(c, w), None), x, length=300)[0]
        if loop == "fori":
            return lax.fori_loop(0, 300, lambda _, c: step(c, w), x)
        return lax.while_loop(
            lambda s: s[0] < 300, lambda s: (s[0] + 1, step(s[1], w)), (0, x)
        )[1]

    moved = jax.jit(jls.autocast(fun, half))(X, W) - X
    assert off(moved, fun(X, W) - X) < 4 * float(jnp.finfo(half).eps)
    if loop != "while":
        ours = jax.grad(lambda w: jnp.sum(jls.autocast(fun, half)(X, w) ** 2))(W)
        plain = jax.grad(lambda w: jnp.sum(fun(X, w) ** 2))(W)
        assert off(ours, plain) < 8 * float(jnp.finfo(half).eps)


@HALF
def test_cotangents_of_what_is_the_same_in_each_iteration_are_summed_in_float32(half):
    def fun(x, w):
        keys = x @ w

        def body(c, _):
            return 0.9 * c + 0.1 * jnp.tanh(c @ w), jnp.sum(c @ keys.T)

        return jnp.sum(lax.scan(body, jnp.ones((4, 8)), length=500)[1])

    ours = jax.jit(jax.grad(jls.autocast(fun, half)))(X, W)
    assert off(ours, jax.grad(fun)(X, W)) < 4 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_each_lane_of_a_batched_while_ends_by_itself(transform):
    def one(x, last):
        return lax.while_loop(
            lambda state: state[1] < last,
            lambda state: (jnp.tanh(state[0] @ W) + 1, state[1] + 1),
            (x, 0),
        )

    def fun(x):
        return jax.vmap(one)(x, jnp.arange(4))

    cast = transform(jls.autocast(fun, jnp.float16))
    assert_identical(cast(X)[1], jnp.arange(4))
    assert off(cast(X)[0], fun(X)[0]) < 2e-3
    assert {one.results[0] for one in products(cast, X)} == {"float16"}


def test_a_product_in_the_smaller_branch_alone_is_half():
    def large(x):
        with jax.named_scope("large"):
            return x @ W @ W

    def fun(x):
        return lax.cond(x[0, 0] > 0, large, lambda x: x @ W, x)

    cast = jls.autocast(fun, jnp.float16, keep="large")
    assert {x.operands[0] for x in products(cast, X)} == {"float16", "float32"}


def test_the_gradient_of_a_shared_weight_is_summed_in_float32():
    def loss(w):
        x = X
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    sums = named("add_any", jax.grad(jls.autocast(loss, jnp.float16)), W)
    of_weight = [x for x in sums if x.equation.outvars[0].aval.shape == W.shape]
    assert [x.results[0] for x in of_weight] == [F32, F32]


def test_the_gradient_of_a_weight_in_a_scan_is_summed_in_float32():
    def loss(w):
        x = lax.scan(lambda x, _: (jnp.tanh(x @ w), None), X, length=3)[0]
        return jnp.sum(x)

    found = operations(jax.grad(jls.autocast(loss, jnp.float16)), W)
    sums = [x for x in found if x.name == "add_any" and x.calls]
    assert sums
    assert {
        x.results[0] for x in sums if x.equation.outvars[0].aval.shape == W.shape
    } == {F32}


# Calls.


def params_of(equation):
    """Of a hi primitive its own, as checkpoints are with jax_remat3."""
    return getattr(equation.params.get("_prim"), "params", equation.params)


def test_a_nested_jit_stays_one_with_what_it_donates():
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=0)
    cast = jls.autocast(lambda x, w: inner(x, w) @ w, jnp.float16)
    name = {"jit", "pjit"}
    (found,) = [x for x in operations(cast, X, W) if x.name in name]
    assert found.equation.params["donated_invars"] == (True, False)
    assert found.results == (F32,)


def test_calls_that_become_the_same_share_a_body():
    def layer(x, w):
        return jnp.tanh(x @ w) + 0.5

    one = jax.jit(layer)

    def loss(x, w):
        for _ in range(4):
            x = one(x, w)
        return x

    cast = jls.autocast(loss, jnp.float16)
    calls = [x for x in operations(cast, X, W) if x.name in ("jit", "pjit")]
    calls = [x for x in calls if not x.calls]
    assert [call.results for call in calls] == [(F32,)] * 4
    assert len({id(call.equation.params["jaxpr"]) for call in calls}) == 1
    inlined = jls.autocast(
        lambda x, w: [x := layer(x, w) for _ in range(4)][-1], jnp.float16
    )
    assert_identical(cast(X, W), inlined(X, W))


def test_calls_of_an_argument_and_of_half_share_no_body():
    @jax.jit
    def layer(x, w):
        return x @ w

    cast = jls.autocast(lambda x, w: layer(x @ w, w) + layer(x, w), jnp.float16)
    for product in products(cast, X, W):
        assert product.operands == ("float16", "float16")


def test_calls_that_are_kept_share_no_body():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(x, w):
        for name in ("half", "whole", "half"):
            with jax.named_scope(name):
                x = layer(x, w)
        return x @ w

    cast = jls.autocast(loss, jnp.float16, keep="whole")
    found = [x.results[0] for x in named("dot_general", cast, X, W)]
    assert found == ["float16", "float32", "float16", "float16"]


def test_a_checkpoint_keeps_its_policy_and_prevents_what_it_prevented():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(x, w):
        inner = jax.checkpoint(
            lambda x: jnp.tanh(x @ w), policy=policy, prevent_cse=False
        )
        return inner(x) @ w

    found = [
        x
        for x in operations(jls.autocast(fun, jnp.float16), X, W)
        if "policy" in params_of(x.equation) and not x.calls
    ]
    assert params_of(found[0].equation)["policy"] == policy
    assert params_of(found[0].equation)["prevent_cse"] is False


def test_a_rule_of_custom_jvp_is_kept():
    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvps(lambda t, ans, x: 3 * t)

    def loss(x, w):
        return jnp.sum(straight(x @ w) @ w)

    cast = jls.autocast(loss, jnp.float16)
    plain, ours = jax.grad(loss)(X, W), jax.grad(cast)(X, W)
    np.testing.assert_allclose(ours, plain, rtol=2e-2, atol=0.2)
    assert {d for x in products(jax.grad(cast), X, W) for d in x.operands} == {
        "float16"
    }


def test_a_rule_of_custom_vjp_gets_and_gives_float32_with_products_in_half():
    seen = []

    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    def forwards(x, w):
        seen.append(x.dtype)
        return x @ w, (x, w)

    def backwards(saved, g):
        seen.append(g.dtype)
        x, w = saved
        return 3 * (g @ w.T), x.T @ g

    layer.defvjp(forwards, backwards)

    def loss(x, w):
        return jnp.sum(layer(x @ w, w) ** 2)

    cast = jls.autocast(loss, jnp.float16)
    np.testing.assert_allclose(
        jax.grad(cast)(X, W), jax.grad(loss)(X, W), rtol=2e-2, atol=0.5
    )
    assert {x.name for x in seen} == {F32}
    found = products(jax.grad(cast), X, W)
    assert {d for x in found for d in x.operands} == {"float16"}


# keep.


def scoped(x, w):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return jnp.tanh(x @ w)


def test_keep_leaves_a_scope_as_written():
    cast = jls.autocast(lambda x, w: scoped(x, w) @ w, jnp.float16, keep="second")
    assert [x.results[0] for x in products(cast, X, W)] == ["float16", F32, "float16"]
    assert [x.results[0] for x in named("tanh", cast, X, W)] == [F32, F32]


def test_keep_finds_operations_of_a_rule_by_their_own_scopes():
    @jax.custom_jvp
    def fun(x):
        with jax.named_scope("plain"):
            x = x @ W
        with jax.named_scope("exact"):
            return x @ W

    @fun.defjvp
    def rule(primals, tangents):
        with jax.named_scope("exact"):
            tangent = tangents[0] @ W
        with jax.named_scope("plain"):
            return fun(primals[0]), tangent @ W

    cast = jls.autocast(lambda x: fun(x @ W), jnp.float16, keep="exact")
    (value, tangent) = ([], [])
    for one in products(lambda x: jax.jvp(cast, (x,), (x,)), X):
        (value if one.calls else tangent).append(one.operands[0])
    assert value == ["float16", F32]
    # Of the product before the function; of the rule, first "exact", then "plain".
    assert tangent == ["float16", "float16", F32, "float16"]


@HALF
def test_an_integer_part_of_a_running_value_is_the_same_in_the_derivative(half):
    def loss(x, w):
        for _ in range(3):
            x = x + 1e-3 * jnp.tanh(x @ w)
        cell = (3 * x).astype(jnp.int32).astype(jnp.float32)
        return jnp.sum(cell * jnp.mean(x)) + jnp.sum(cell * x)

    x, w = jnp.full((4, 8), 1.9999), jnp.zeros((8, 8))  # 3 * 1.9999 is below 6
    np.testing.assert_allclose(jax.grad(jls.autocast(loss, half))(x, w), 10, rtol=1e-3)


def test_keep_reaches_into_a_scan():
    def fun(x, w):
        return lax.scan(lambda x, _: (scoped(x, w), None), x, length=2)[0]

    cast = jls.autocast(fun, jnp.float16, keep="^first$")
    assert [x.results[0] for x in products(cast, X, W)] == [F32, "float16"]


def test_keep_may_be_a_function_of_a_place():
    places = []

    def is_kept(place):
        places.append(place)
        return place.function == "scoped" and place.module == "first"

    cast = jls.autocast(scoped, jnp.float16, keep=is_kept)
    assert [x.results[0] for x in products(cast, X, W)] == [F32, "float16"]
    assert {type(place) for place in places} == {jls.types.Place}
    assert {place.iteration for place in places} == {()}


def test_what_leaves_a_kept_part_is_rounded_by_who_takes_it():
    def fun(x, w):
        y = x @ w
        with jax.named_scope("exact"):
            z = y @ w
        return (z * 1.0001) @ w

    cast = jls.autocast(fun, jnp.float16, keep="exact")
    assert [x.operands[0] for x in products(cast, X, W)] == ["float16", F32, "float16"]
    assert only("mul", cast, X, W) == F32


# Without a product.


@pytest.mark.filterwarnings("ignore:autocast to float16 found no product")
def test_without_a_product_not_a_bit_changes():
    def fun(x, w):
        y = jax.nn.gelu(norm(x)) + jnp.vdot(w, w)
        return jax.nn.softmax(y), jnp.sum(jnp.exp(y) / (1e-9 + jnp.abs(y)))

    for f in (fun, lambda x, w: jax.grad(lambda x: fun(x, w)[1])(x)):
        assert_identical(jax.jit(jls.autocast(f, jnp.float16))(X, W), jax.jit(f)(X, W))


def test_a_custom_jvp_may_have_no_results():
    """Checkpointed loops of Equinox have some."""

    @jax.custom_jvp
    def nothing(x):
        return []

    nothing.defjvp(lambda primals, tangents: ([], []))

    def fun(w, x):
        nothing(x @ w)
        return jnp.mean((x @ w) ** 2)

    cast = jls.autocast(fun, jnp.float16)
    assert off(jax.grad(cast)(W, X), jax.grad(fun)(W, X)) < 2e-3


def test_a_custom_jvp_may_have_integers_for_operands_and_results():
    @jax.custom_jvp
    def counted(count, x):
        return count + 1, jnp.tanh(x)

    @counted.defjvp
    def rule(primals, tangents):
        count, y = counted(*primals)
        return (count, y), (tangents[0], tangents[1] * (1 - y**2))

    def fun(w, x):
        count, y = counted(3, x @ w)
        return jnp.mean((y @ w) ** 2) * count

    cast = jls.autocast(fun, jnp.float16)
    assert off(jax.grad(cast)(W, X), jax.grad(fun)(W, X)) < 2e-3
    assert all("float32" not in one.operands for one in products(jax.grad(cast), W, X))


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_a_rule_of_custom_vjp_sees_what_is_differentiated(jit):
    """Equinox refuses a gradient of what it was told has none, such as a time."""
    seen = []

    @jax.custom_vjp
    def layer(w, x, time):
        return x @ w * time, jnp.sum(x)

    def forwards(w, x, time):
        seen.append((w.perturbed, x.perturbed, time.perturbed))
        return layer(w.value, x.value, time.value), (w.value, x.value, time.value)

    def backwards(saved, cotangents):
        w, x, time = saved
        g = cotangents[0] * time
        return x.T @ g, g @ w.T, None

    layer.defvjp(forwards, backwards, symbolic_zeros=True)

    def loss(w, x, time):
        hidden, _ = layer(w, jnp.tanh(x @ w), time)
        return jnp.mean(hidden**2)

    cast = jls.autocast(loss, jnp.float16)
    for argnums, expected in ((0, (True, True, False)), (1, (False, True, False))):
        seen.clear()
        ours = jit(jax.grad(cast, argnums))(W, X, jnp.float32(2.0))
        assert set(seen) == {expected}
        assert off(ours, jax.grad(loss, argnums)(W, X, jnp.float32(2.0))) < 2e-3


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_a_result_of_a_custom_vjp_may_be_unused(jit):
    @jax.custom_vjp
    def both(y):
        return 2 * y, 3 * y

    def backwards(_, cotangents):
        return (2 * cotangents[0] + 3 * cotangents[1],)

    both.defvjp(lambda y: (both(y), None), backwards)

    def loss(w, x):
        return jnp.mean((both(x @ w)[0] @ w) ** 2)

    cast = jls.autocast(loss, jnp.float16)
    assert off(jit(jax.grad(cast))(W, X), jax.grad(loss)(W, X)) < 2e-3


def test_a_custom_vjp_may_close_over_an_array():
    @jax.custom_vjp
    def scaled(y):
        return y * X

    scaled.defvjp(lambda y: (scaled(y), None), lambda _, cotangent: (cotangent * X,))

    def fun(w, x):
        return jnp.mean((scaled(x @ w) @ w) ** 2)

    cast = jls.autocast(fun, jnp.float16)
    assert off(jax.grad(cast)(W, X), jax.grad(fun)(W, X)) < 2e-3


def closing_over(where):
    """A loss with a rule of custom_vjp that closes over an array computed in it."""

    def fun(w, x):
        scale = jnp.mean(x) + 1

        @jax.custom_vjp
        def scaled(y):
            return y * (scale if "primal" in where else 2.0)

        def forwards(y):
            return scaled(y) + (scale if "forwards" in where else 0.0), None

        def backwards(_, cotangent):
            return (cotangent * (scale if "backwards" in where else 2.0),)

        scaled.defvjp(forwards, backwards)
        return jnp.mean((scaled(x @ w) @ w) ** 2)

    return fun


# Older versions of JAX rename the variables of a program.
IS_OLD = jax.__version_info__ < (0, 10)


@pytest.mark.skipif(IS_OLD, reason="then the function is left as written, see below")
@pytest.mark.parametrize("where", ["primal", "forwards", "backwards"])
@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_a_rule_of_custom_vjp_may_close_over_an_array_of_the_program(where, jit):
    fun = closing_over(where)
    cast = jit(jax.grad(jls.autocast(fun, jnp.float16)))
    assert off(cast(W, X), jax.grad(fun)(W, X)) < 2e-3
    assert {one.operands[0] for one in products(cast, W, X)} == {"float16"}


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
def test_where_that_array_is_lost_the_function_runs_as_written(jit, monkeypatch):
    monkeypatch.setattr("jls._autocast.rewrite.variable_of", lambda value: None)
    fun = closing_over("backwards")
    with pytest.warns(jls.JlsWarning, match="an argument of the custom_vjp"):
        ours = jit(jax.grad(jls.autocast(fun, jnp.float16)))(W, X)
    assert_identical(ours, jit(jax.grad(fun))(W, X))
