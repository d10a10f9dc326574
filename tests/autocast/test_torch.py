"""The lists of `torch.autocast`, operation by operation: only products are half.

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
from jls._program.primitives import TABLE

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
# What torch computes in float32, and so does jls.
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
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "layer_norm": lambda x: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
    "normalize": lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x * norm": lambda x: x * jnp.linalg.norm(x),
    "x / sum": lambda x: x / jnp.sum(x),
    "x * prod": lambda x: x * jnp.prod(x, axis=1, keepdims=True),
    "x - logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
    "x * mse": lambda x: x * jnp.mean((x - 0.5) ** 2),
    "x * l1": lambda x: x * jnp.mean(jnp.abs(x - 0.5)),
    "x + bias": lambda x: x + W[:1],
    "x * argument": lambda x: x * X,
    "cat": lambda x: jnp.concatenate([x[:2], X[:2]]),
    "stack": lambda x: jnp.stack([x, X]),
}
# What torch lists nowhere: there it runs in the dtype of its operand.
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


@pytest.mark.parametrize("name", IN_HALF)
def test_products_are_half_as_in_torch(name):
    cast = jls.autocast(lambda x, w: IN_HALF[name](x @ w), jnp.float16)
    assert {d for one in products(cast, X, W) for d in one.operands} == {HALF}


ALL = IN_FLOAT32 | NOWHERE
# What is moved of a product, or is the largest of it, is as good in half.
EXACT = {name for name, row in TABLE.items() if row.moves or row.degree == "same"}
EXACT |= {"convert_element_type", "jit", "pjit"}


@pytest.mark.parametrize("name", ALL)
def test_between_two_products_all_of_them_are_rounded_once(name):
    fun = ALL[name]
    y = fun((X.astype(HALF) @ W.astype(HALF)).astype(F32))
    v = jnp.eye(y.shape[-1])
    cast = jls.autocast(lambda x, w: fun(x @ w) @ v, jnp.float16)
    np.testing.assert_allclose(cast(X, W), y.astype(HALF), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_behind_the_last_product_all_of_them_are_float32(name):
    def loss(x, w):
        return jnp.sum(ALL[name](x @ w))

    found = operations(jls.autocast(loss, jnp.float16), X, W)
    index = next(i for i, one in enumerate(found) if one.name == "dot_general")
    computed = [one for one in found[index + 1 :] if one.name not in EXACT]
    assert {dtype for one in computed for dtype in one.results} <= {
        F32,
        "bool",
        "int32",
    }
