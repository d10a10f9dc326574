"""What holds for any program, on random ones of up to twenty operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reading import products
from shared import assert_identical

import jls

N = 6
UNARY = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "exp": lambda x: jnp.exp(jnp.clip(x, -3, 3)),
    "square": lambda x: x**2,
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 1e-3),
    "negative": lambda x: -x,
    "transpose": lambda x: x.T,
    "reverse": lambda x: x[::-1],
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "norm": lambda x: (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 0.1),
    "cumsum": lambda x: jnp.cumsum(x, axis=0) / N,
    "sum": lambda x: jnp.sum(x, axis=1, keepdims=True) / N,
    "max": lambda x: jnp.max(x, axis=0, keepdims=True),
    "sort": lambda x: jnp.sort(x, axis=1),
    "gather": lambda x: x[jnp.array([1, 0, 2, 2, 5, 4]) % len(x)],
    "clamp": lambda x: jnp.clip(x, -2, 2),
    "mask": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e30)),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)))(x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: 0.5 * x, x),
    "jit": lambda x: jax.jit(jax.nn.silu)(x),
    "scan": lambda x: lax.scan(lambda c, r: (0.5 * c + r, c), x[0], x)[1],
    "while": lambda x: lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x), x),
}
BINARY = {
    "add": jnp.add,
    "multiply": lambda x, y: jnp.tanh(x) * y,
    "where": lambda x, y: jnp.where(x > y, x, y),
    "concatenate": lambda x, y: jnp.concatenate([y[:1] + x[:1], x + y])[1:],
}
MATMUL = {
    "matmul": lambda x, y: (x + jnp.zeros((N, N))) @ (y + jnp.zeros((N, N))) / N,
    "scan of products": lambda x, y: lax.scan(
        lambda c, _: (jnp.tanh(c @ (y + jnp.zeros((N, N)))), None),
        x + jnp.zeros((N, N)),
        length=2,
    )[0],
}


def random_program(seed, with_products):
    """A program, and the names of its operations."""
    chosen = np.random.RandomState(seed)
    tables = [UNARY, BINARY, *([MATMUL] if with_products else [])]
    plan = []
    for count in range(chosen.randint(5, 20)):
        table = tables[chosen.randint(len(tables))]
        name = sorted(table)[chosen.randint(len(table))]
        plan.append((table[name], table is UNARY, chosen.randint(2 + count, size=2)))

    def fun(x, w):
        values = [x, w]
        for operation, is_unary, numbers in plan:
            one, other = (values[n] for n in numbers)
            values.append(operation(one) if is_unary else operation(one, other))
        return {"last": values[-1], "all": sum(jnp.mean(v) for v in values)}

    return fun


def arguments(seed):
    chosen = np.random.RandomState(seed)
    return tuple(jnp.asarray(chosen.randn(N, N), jnp.float32) for _ in range(2))


@pytest.mark.filterwarnings("ignore:autocast to float16 found no product")
@pytest.mark.parametrize("seed", range(10))
def test_without_a_product_nothing_changes(seed):
    fun, args = random_program(seed, False), arguments(seed)
    cast = jls.autocast(fun, jnp.float16)
    with jax.numpy_rank_promotion("allow"):
        assert_identical(jax.jit(cast)(*args), jax.jit(fun)(*args))


@pytest.mark.cover(1)
@pytest.mark.filterwarnings("ignore:autocast to .* found no product")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(100, 130))
def test_with_products_structure_dtypes_and_finiteness_are_those_of_float32(seed, half):
    fun, args = random_program(seed, True), arguments(seed)
    cast = jls.autocast(fun, half)

    def total(f):
        return jax.value_and_grad(lambda *args: f(*args)["all"], argnums=(0, 1))

    with jax.numpy_rank_promotion("allow"):
        assert jax.eval_shape(cast, *args) == jax.eval_shape(fun, *args)
        plain, ours = jax.jit(total(fun))(*args), jax.jit(total(cast))(*args)
        inside = {dtype for x in products(total(cast), *args) for dtype in x.operands}
    assert inside <= {half}
    if all(bool(jnp.all(jnp.abs(x) < 1e3)) for x in jax.tree.leaves(plain)):
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(ours))
        np.testing.assert_allclose(ours[0], plain[0], rtol=0.05, atol=0.05)
