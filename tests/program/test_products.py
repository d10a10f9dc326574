"""The multiplications of a program, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jls._program.frames import Frame
from jls._program.products import products_in

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
DOT = 2 * 4 * 4  # multiplications of X @ W
IMAGES, KERNEL = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 6))
ROWS, GROUPS = jnp.ones((6, 4)), jnp.ones((3, 4, 5))
SIZES = jnp.array([1, 2, 3], jnp.int32)


def convolve(x, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def counts(fun, *args):
    frame = Frame(jax.make_jaxpr(fun)(*args))
    return [product.multiplications for product in products_in(frame)]


def gradient(fun, argument):
    return jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), argument)


def looped(x, w):
    return lax.fori_loop(0, 7, lambda _, x: x @ w, x)


def scanned(x, w):
    def body(x, _):
        return lax.scan(lambda x, _: (x @ w, None), x, length=3)[0] @ w, None

    return lax.scan(body, x, length=5)[0]


def until_large(x, w):
    return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)


def chosen(x, w):
    return lax.cond(jnp.sum(x) > 0, lambda x: x @ w @ w, lambda x: x @ w, x)


def called_twice(x, w):
    layer = jax.jit(lambda x: x @ w)
    return layer(layer(x))


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (lambda x, w: x @ w, (X, W), [DOT]),
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (X[None], W[None]), [DOT]),
        (jnp.vdot, (W[0], W[0]), [4]),
        (convolve, (IMAGES, KERNEL), [2 * 6 * 4 * 22**2]),
        (
            lambda x, k: convolve(x, k, groups=2),
            (IMAGES, KERNEL[:, :, :2]),
            [2 * 6 * 2 * 22**2],
        ),
        (lambda x, k: convolve(x, k, stride=2), (IMAGES, KERNEL), [2 * 6 * 4 * 11**2]),
        (lax.ragged_dot, (ROWS, GROUPS, SIZES), [6 * 4 * 5]),
        (looped, (X, W), [7 * DOT]),
        (scanned, (X, W), [5 * 3 * DOT, 5 * DOT]),
        (until_large, (X, W), [DOT]),
        (chosen, (X, W), [0, DOT, DOT]),  # JAX has the false branch first
        (called_twice, (X, W), [DOT, DOT]),
    ],
)
def test_a_product_counts_with_the_loops_around_it(fun, args, expected):
    assert counts(fun, *args) == expected


CONVOLUTIONS = {
    "no padding": {"padding": "VALID"},
    "padding": {"padding": ((3, 0), (0, 5))},
    "strides": {"padding": "SAME", "window_strides": (2, 3)},
    "holes": {"padding": "VALID", "rhs_dilation": (2, 3)},
    "transposed": {"padding": ((1, 2), (0, 3)), "lhs_dilation": (2, 3)},
    "groups": {"padding": "SAME", "feature_group_count": 2},
    "batches": {"padding": "SAME", "batch_group_count": 2},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_counts_as_in_xla(options, on_cpu):
    """Padding is not multiplied, nor are the zeros between dilated elements."""
    options = {"window_strides": (1, 1)} | options
    kernel = KERNEL[:, :, : 4 // options.get("feature_group_count", 1)]

    def fun(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)

    for one in (fun, jax.grad(lambda *args: jnp.sum(fun(*args)), (0, 1))):
        cost = jax.jit(one).lower(IMAGES, kernel).cost_analysis()
        assert 2 * sum(counts(one, IMAGES, kernel)) == cost["flops"]


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda x, w: x @ w, (X, W)),
        (lambda x, k: convolve(x, k, stride=2), (IMAGES, KERNEL)),
        (lambda x, k: convolve(x, k, groups=2), (IMAGES, KERNEL[:, :, :2])),
        (lambda x, w: lax.ragged_dot(x, w, SIZES), (ROWS, GROUPS)),
        (lambda x, w: lax.ragged_dot(x, w, SIZES), (ROWS[:5], GROUPS)),
        (scanned, (X, W)),
    ],
    ids=["dot", "stride", "groups", "ragged", "few rows", "scan"],
)
def test_a_gradient_takes_what_the_product_takes(fun, args, argument):
    forward = sum(counts(fun, *args))
    both = sum(counts(gradient(fun, argument), *args))
    through = forward if fun is scanned and argument else 0  # x of each layer too
    assert both == 2 * forward + through


def test_of_two_branches_with_as_many_the_narrower_one_counts():
    def half(x):
        return (x.astype(jnp.float16) @ W.astype(jnp.float16)).astype(jnp.float32)

    def both(x, first, second):
        return lax.cond(jnp.sum(x) > 0, first, second, x)

    for branches in ((half, lambda x: x @ W), (lambda x: x @ W, half)):
        frame = Frame(jax.make_jaxpr(lambda x, b=branches: both(x, *b))(X))
        found = {x.dtype.name: x.multiplications for x in products_in(frame)}
        assert found == {"float16": DOT, "float32": 0}


def test_a_scan_of_nothing_multiplies_nothing():
    def fun(x):
        return lax.scan(lambda x, _: (x @ W, None), x, length=0)[0]

    assert counts(fun, X) == [0]
    np.testing.assert_array_equal(fun(X), X)
