"""The lists of `torch.autocast`, operation by operation: where jls agrees, and why not.

They are those of torch/testing/_internal/autocast_test_lists.py, each as one writes it
in JAX, between two products and behind the last one, in float16.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reading import operations, products

import jls
from jls._autocast.keep import Choice
from jls._autocast.kinds import Fact, Kind, Kinds
from jls._autocast.leads import Leads

X = jnp.asarray(np.random.RandomState(0).rand(4, 8) * 0.5 + 0.25, jnp.float32)
W = jnp.asarray(np.random.RandomState(1).rand(8, 8) * 0.2, jnp.float32)
HALF, F32 = "float16", "float32"

# What torch computes in half.
IN_HALF = {
    "matmul": lambda x: x @ W,
    "mm": lambda x: jnp.matmul(x, W),
    "bmm": lambda x: jnp.einsum("bij,bjk->bik", x[None], W[None]),
    "baddbmm": lambda x: x[None] + jnp.einsum("bij,bjk->bik", x[None], W[None]),
    "addmm": lambda x: x + x @ W,
    "mv": lambda x: x @ W[0],
    "linear": lambda x: x @ W.T + W[:1],
    "einsum": lambda x: jnp.einsum("ij,jk->ik", x, W),
    "conv": lambda x: lax.conv(x[None, None], W[None, None, :3, :3], (1, 1), "SAME"),
    "conv_transpose": lambda x: lax.conv_transpose(
        x[None, :, :, None], W[:3, :3, None, None], (1, 1), "SAME"
    ),
}
# What torch computes in float32, and so does jls, where the result goes into a product.
IN_FLOAT32 = {
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "cosh": jnp.cosh,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log10": jnp.log10,
    "log2": jnp.log2,
    "log1p": jnp.log1p,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "pow": lambda x: x**1.5,
    "pow of a number": lambda x: 1.5**x,
    "softplus": jax.nn.softplus,
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "cumprod": lambda x: jnp.cumprod(x, axis=0),
    "binary_cross_entropy": lambda x: -(x * jnp.log(x) + (1 - x) * jnp.log(1 - x)),
}
STORED = "computed in float32, stored in half: a product rounds it anyway"
SMALL = "a sum is float32, and what is small decides nothing"
FOLLOWS = "what is an argument follows, as with dtype= on a layer; torch makes float32"
# What torch has in float32, and jls in half, with the reason.
OTHERWISE = {
    "softmax": (jax.nn.softmax, STORED),
    "log_softmax": (jax.nn.log_softmax, STORED),
    "layer_norm": (
        lambda x: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
        STORED,
    ),
    "normalize": (lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), STORED),
    "x ** 2": (lambda x: x**2, STORED),
    "x ** 3": (lambda x: x**3, STORED),
    "x * norm": (lambda x: x * jnp.linalg.norm(x), SMALL),
    "x / sum": (lambda x: x / jnp.sum(x), SMALL),
    "x * prod": (lambda x: x * jnp.prod(x, axis=1, keepdims=True), SMALL),
    "x - logsumexp": (
        lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
        SMALL,
    ),
    "x * mse": (lambda x: x * jnp.mean((x - 0.5) ** 2), SMALL),
    "x * l1": (lambda x: x * jnp.mean(jnp.abs(x - 0.5)), SMALL),
    "x + bias": (lambda x: x + W[:1], FOLLOWS),
    "x * argument": (lambda x: x * X, FOLLOWS),
    "cat": (lambda x: jnp.concatenate([x[:2], X[:2]]), FOLLOWS),
    "stack": (lambda x: jnp.stack([x, X]), FOLLOWS),
}
# What torch lists nowhere: it runs in the dtype of its operand, here too.
NOWHERE = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "abs": jnp.abs,
    "sqrt": jnp.sqrt,
    "max_pool": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"
    ),
    "transpose": lambda x: x.T.reshape(4, 8),
    "masked_fill": lambda x: jnp.where(X > 0.5, x, 0),
    "dropout": lambda x: jnp.where(X > 0.5, x / 0.5, 0),
    "index": lambda x: x[jnp.array([1, 0, 3, 2])],
}


def whole(fun):
    def two_products(x, w):
        y = fun(x @ w)
        y = y.reshape(-1, y.shape[-1])
        return y @ jnp.ones((y.shape[-1], 2))

    return two_products


def enters(fun):
    """The dtype that `fun` has for jls, before the last product rounds it."""
    program = jax.make_jaxpr(whole(fun))(X, W)
    choice = Choice(jnp.float16, None)
    leads = Leads(choice)
    leads.read(program, [False])
    kinds = Kinds(choice, leads)
    kinds.read(program, [Fact(Kind.GIVEN, name=object())] * 2)
    (operand, _) = program.eqns[-1].invars
    for number, equation in enumerate(program.eqns):
        if operand in equation.outvars:
            results = kinds.steps[number,].results
            fact = results[equation.outvars.index(operand)]
            return HALF if fact.is_half else F32
    raise AssertionError(operand)


@pytest.mark.parametrize("name", IN_HALF)
def test_products_are_half_as_in_torch(name):
    cast = jls.autocast(lambda x, w: IN_HALF[name](x @ w), jnp.float16)
    assert {d for one in products(cast, X, W) for d in one.operands} == {HALF}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_is_float32_in_torch_is_float32(name):
    assert enters(IN_FLOAT32[name]) == F32


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_float32_in_torch_and_half_here_is_as_near_as_one_rounding(name):
    fun, reason = OTHERWISE[name]
    assert reason in (STORED, SMALL, FOLLOWS)
    assert enters(fun) == HALF
    y = (X.astype(HALF) @ W.astype(HALF)).astype(F32)
    cast = jls.autocast(lambda x, w: fun(x @ w) @ jnp.eye(8), jnp.float16)
    if fun(y).shape == (4, 8):
        np.testing.assert_allclose(cast(X, W), fun(y), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NOWHERE)
def test_what_torch_does_not_list_is_half_between_products(name):
    assert enters(NOWHERE[name]) == HALF


ALL = IN_FLOAT32 | {name: fun for name, (fun, _) in OTHERWISE.items()} | NOWHERE


@pytest.mark.parametrize("name", ALL)
def test_behind_the_last_product_all_of_them_are_float32(name):
    def loss(x, w):
        return jnp.sum(ALL[name](x @ w))

    found = operations(jls.autocast(loss, jnp.float16), X, W)
    index = next(i for i, one in enumerate(found) if one.name == "dot_general")
    computed = [one for one in found[index + 1 :] if one.name != "convert_element_type"]
    assert {dtype for one in computed for dtype in one.results} <= {
        F32,
        "bool",
        "int32",
    }
