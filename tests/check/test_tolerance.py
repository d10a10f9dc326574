# SPDX-License-Identifier: Apache-2.0
"""Loops that end by a tolerance are noted, if products in half give the number."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jls

pytestmark = pytest.mark.standard_promotion

W, X = jnp.eye(4) / 3, jnp.ones((2, 4))


def moved(w, z):
    return jnp.tanh(z @ w + 0.1)


def solved(w, x, *, tolerance=1e-5, is_over=None, product=moved):
    """Iterates to a fixed point, of which the derivative is one more iteration."""

    def goes_on(state):
        z, before, n = state
        is_far = jnp.linalg.norm(z - before) > tolerance
        return is_far & (n < 20)

    def body(state):
        z, _, n = state
        return product(w, z), z, n + 1

    start = jnp.zeros_like(x) + 1.0, jnp.zeros_like(x), 0
    found, *_ = lax.while_loop(is_over or goes_on, body, start)
    return jnp.mean(moved(w, lax.stop_gradient(found)) ** 2)


def by_a_flag(w, x):
    def body(state):
        z, _, n = state
        new = moved(w, z)
        return new, (jnp.max(jnp.abs(new - z)) < 1e-4) | (n > 20), n + 1

    found, *_ = lax.while_loop(lambda x: ~x[1], body, (x, False, 0))
    return jnp.mean(moved(w, lax.stop_gradient(found)) ** 2)


def of_each_row(w, x):
    one = jax.vmap(solved, (None, 0))
    return jnp.mean(one(w, x[:, None]))


def by_an_argument(w, x):
    return solved(w, x, tolerance=jnp.mean(jnp.abs(w)) * 1e-4)


ROUNDED = {
    "a tolerance": solved,
    "a flag": by_a_flag,
    "of each row": of_each_row,
    "a relative one": by_an_argument,
    "in a jit": lambda w, x: jax.jit(solved)(w, x),
}


def with_dtype(dtype, loss, keep=None):
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jls.train_step(loss, optimizer, compute_dtype=dtype, keep=keep)
    return jls.check_step(jax.jit(step), W, optimizer.init(W), X)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_loop_that_ends_by_a_rounded_number_is_noted(name):
    check = with_dtype(jnp.bfloat16, ROUNDED[name])
    assert check.ok
    (note,) = (x for x in check.notes if "tolerance" in x)
    assert "ends by a tolerance" in note
    assert "test_tolerance.py:" in note


def a_count(w, x):
    return solved(w, x, is_over=lambda state: state[2] < 3)


def a_wide_one(w, x):
    return solved(w, x, tolerance=0.5)


def without_a_product(w, x):
    return solved(w, x, product=lambda w, z: jnp.tanh(z * w[0] + 0.1))


def by_ids(w, x):
    def body(state):
        ids, n = state
        return jnp.argmax(jax.nn.one_hot(ids, 4) @ w), n + 1

    ids, n = lax.while_loop(lambda x: (x[0] != 2) & (x[1] < 5), body, (0, 0))
    return jnp.mean(moved(w, x) ** 2) * n + ids


RIGHT = {
    "a count": (a_count, jnp.bfloat16, None),
    "a wide tolerance": (a_wide_one, jnp.bfloat16, None),
    "no product in it": (without_a_product, jnp.bfloat16, None),
    "the ids of a sample": (by_ids, jnp.bfloat16, None),
    "float32": (solved, jnp.float32, None),
    "kept": (solved, jnp.bfloat16, lambda place: place.function == "moved"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_loops_are_not_noted(name):
    loss, dtype, keep = RIGHT[name]

    def whole(w, x):  # a product that may be half
        return loss(w, x) + jnp.mean((x @ w) ** 2)

    check = with_dtype(dtype, whole, keep)
    assert not [x for x in check.notes if "tolerance" in x]
