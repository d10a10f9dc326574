"""The derivative of a loss under `jls.autocast`: as exact as in float32, and as small.

What a loss makes of logits in half, its derivative sums in float32. For the label that
is picked it writes no array as large as the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reading import named, off, operations

import jls

HALVES = [jnp.float16, jnp.bfloat16]
HALF = pytest.mark.parametrize("half", HALVES, ids=["float16", "bfloat16"])
X = jnp.asarray(np.random.RandomState(0).randn(4, 8), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(8, 8), jnp.float32)


def loss_of(x, w, labels):
    """Cross entropy of labels; without a bias, as where weights are tied."""
    logs = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


@HALF
def test_a_confident_loss_has_the_gradient_of_one_by_hand(half):
    # What the label adds to the derivative of a logit all but cancels the rest.
    labels = jnp.arange(64) % 16
    x, w = jax.nn.one_hot(labels, 16), 9 * jnp.eye(16)

    def by_hand(x, w, labels):
        logits = (x.astype(half) @ w.astype(half)).astype(jnp.float32)
        logs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))

    exact, hand, ours = (
        jax.grad(lambda w, fun=fun: 1024 * fun(x, w, labels))(w)
        for fun in (loss_of, by_hand, jls.autocast(loss_of, half))
    )
    assert off(ours, exact) <= 1.2 * off(hand, exact) < 0.01


def test_cotangents_of_a_norm_are_summed_in_float32():
    def norm(x):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    cast = jls.autocast(lambda x, w: jnp.sum(norm(x @ w) @ w), jnp.float16)
    found = named("add_any", jax.grad(cast), X, W)
    assert found
    assert {x.results for x in found} == {("float32",)}


@HALF
def test_the_derivative_of_a_picked_element_is_made_where_it_is_read(half):
    labels = jnp.asarray([0, 3, 7, -1])
    cast = jls.autocast(loss_of, half)
    names = {x.name for x in operations(jax.grad(cast), X, W, labels)}
    assert not names & {"scatter-add", "scatter"}
    assert named("scatter-add", jax.grad(loss_of), X, W, labels)


@pytest.mark.cover(2)
@pytest.mark.parametrize("labels", [[0, 3, 7, 5], [-1, -8, 2, 2], [8, 100, -9, 1]])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_the_derivative_of_a_picked_element_is_the_same_number(labels, dtype, mode):
    labels = jnp.asarray(np.asarray(labels).astype(dtype))
    if mode == "promise_in_bounds":
        labels = labels % 8

    def fun(x, w, rows, weights):
        picked = jnp.take_along_axis(rows, labels[:, None], axis=-1, mode=mode)
        return jnp.sum(jnp.sin(x @ w)) + jnp.sum(picked * weights)

    rows, weights = jnp.arange(32.0).reshape(4, 8), jnp.arange(1.0, 5.0)[:, None]
    cast = jls.autocast(fun, "bfloat16")
    ours, plain = (jax.grad(f, 2)(X, W, rows, weights) for f in (cast, fun))
    np.testing.assert_array_equal(ours, plain)
    tangents = jnp.ones_like(rows)
    one, other = (
        jax.jvp(lambda rows, f=f: f(X * 0, W, rows, weights), (rows,), (tangents,))
        for f in (cast, fun)
    )
    np.testing.assert_array_equal(one, other)


def test_a_pick_in_a_vmap_and_one_that_is_kept():
    def one(x, w, label):
        return jax.nn.log_softmax(x @ w)[label]

    def fun(x, w, labels):
        with jax.named_scope("loss"):
            return jnp.mean(jax.vmap(one, (0, None, 0))(x, w, labels))

    args = X, W, jnp.asarray([0, 3, 7, 1])
    grad = jax.grad(jls.autocast(fun, "bfloat16"), 1)
    assert off(grad(*args), jax.grad(fun, 1)(*args)) < 0.01

    def two(x, w, labels):
        logs = jax.nn.log_softmax(x @ w @ w)
        with jax.named_scope("loss"):
            return jnp.mean(jnp.take_along_axis(logs, labels[:, None], -1))

    kept = jls.autocast(two, "bfloat16", keep="loss")
    assert named("scatter-add", jax.grad(kept), *args)


def test_a_pick_in_a_loop_keeps_the_indices_alone():
    def fun(x, w, labels):
        return lax.map(lambda pair: loss_of(pair[0], w, pair[1]), (x, labels)).mean()

    cast = jls.autocast(fun, "bfloat16")
    args = jnp.stack([X, X]), W, jnp.asarray([[0, 3, 7, 1], [1, 2, 3, 4]])
    loops = named("scan", jax.grad(cast), *args)
    stacks = [x.aval for one in loops for x in one.equation.outvars]
    assert not [x for x in stacks if x.dtype == bool and x.shape[-1:] == (8,)]


def test_what_is_float32_in_a_loop_is_cast_there():
    def fun(x, w):
        y = x @ w
        total = lax.scan(lambda s, _: (s + jnp.sum(jnp.exp(y)), None), 0.0, length=3)[0]
        loop = lax.fori_loop(0, 3, lambda _, s: s + jnp.sum(jnp.exp(y)), 0.0)
        return jnp.sum(jnp.exp(y)) + total + lax.stop_gradient(loop)

    cast = jls.autocast(fun, "bfloat16")
    assert off([cast(X, W)], [fun(X, W)]) < 0.02
    grad = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)) + cast(x, w)))
    assert jnp.all(jnp.isfinite(grad(X, W)))


def test_what_is_cast_in_a_while_loop_is_cast_anew_behind_it():
    def fun(x, w):
        y = x @ w
        loop = lax.fori_loop(0, jnp.int32(3), lambda _, s: s + jnp.sum(jnp.exp(y)), 0.0)
        return loop + jnp.sum(jnp.exp(y))

    assert off([jls.autocast(fun, "bfloat16")(X, W)], [fun(X, W)]) < 0.02
