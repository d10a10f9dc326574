# SPDX-License-Identifier: Apache-2.0
"""Which programs are known to sum the squares of all their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import eval_jaxpr

from jls._program.squares import find_sum_of_squares

pytestmark = pytest.mark.standard_promotion  # optax promotes integers

A = jnp.array([[1.0, 2.0], [-3.0, 0.5]])
B = jnp.array([4.0, 0.25])
S = jnp.float32(-2.0)
C = jnp.array([1.0 + 2.0j, -1.5j])


def find(fun, *inputs):
    jaxpr = jax.make_jaxpr(fun)(*inputs).jaxpr
    return find_sum_of_squares(jaxpr, jaxpr.invars)


def by_products(*leaves):
    return jnp.sqrt(sum(jnp.sum((x.conj() * x).real) for x in leaves))


def by_parts(*leaves):
    return sum(
        jnp.sum(jnp.square(jnp.real(x)) + jnp.square(jnp.imag(x))) for x in leaves
    )


def clipped(*leaves):
    return optax.clip_by_global_norm(1.0).update(leaves, optax.EmptyState())[0]


def used_again(*leaves):
    return [x + y**2 for x, y in zip(clipped(*leaves), leaves, strict=True)]


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_sum_over_devices_counts_as_the_sum(is_logged):
    def clip(*leaves):
        squares = sum(jnp.sum(x**2) for x in leaves)
        total = jax.lax.psum(squares, "d")
        divisor = squares if is_logged else total
        return [x / jnp.sqrt(divisor) for x in leaves], total

    jaxpr = jax.make_jaxpr(clip, axis_env=[("d", 2)])(A, B).jaxpr
    found = find_sum_of_squares(jaxpr, jaxpr.invars)
    (over_devices,) = (x for x in jaxpr.eqns if x.primitive.name.startswith("psum"))
    assert found.total is over_devices.outvars[0]
    assert len(found.jaxpr.outvars) == 3


def test_a_sum_over_some_of_the_devices_does_not_count():
    def clip(x):
        groups = [[0, 1], [2, 3]]
        return jax.lax.psum(jnp.sum(x**2), "d", axis_index_groups=groups)

    jaxpr = jax.make_jaxpr(clip, axis_env=[("d", 4)])(A).jaxpr
    found = find_sum_of_squares(jaxpr, jaxpr.invars)
    assert found.total is jaxpr.eqns[-2].outvars[0]


SUMS = {
    "optax": clipped,
    "products": by_products,
    "parts": by_parts,
    "used again": used_again,
}
TREES = {"reals": (A, B, S), "complex": (A, C), "one": (B,)}


@pytest.mark.parametrize("leaves", TREES.values(), ids=TREES)
@pytest.mark.parametrize("fun", SUMS.values(), ids=SUMS)
def test_the_sum_is_found_with_that_of_each_leaf(fun, leaves):
    found = find(fun, *leaves)
    *of_each, total = eval_jaxpr(found.jaxpr, [], *leaves)
    expected = [np.sum(np.abs(np.asarray(x)) ** 2) for x in leaves]
    np.testing.assert_allclose(of_each, expected, rtol=1e-6)
    np.testing.assert_allclose(total, sum(expected), rtol=1e-6)


def test_what_else_the_program_computes_is_left_out():
    found = find(used_again, A, B)
    names = [equation.primitive.name for equation in found.jaxpr.eqns]
    assert "div" not in names
    assert names.count("reduce_sum") == 2


NO_SUMS = {
    "some leaves": lambda a, b: jnp.sum(a**2) + jnp.sum(b),
    "one leaf": lambda a, b: jnp.sum(a**2),
    "one leaf twice": lambda a, b: jnp.sum(a**2) + jnp.sum(a**2),
    "one leaf twice, and the other": lambda a, b: (
        jnp.sum(a**2) + jnp.sum(a**2) + jnp.sum(b**2)
    ),
    "rows": lambda a, b: jnp.sum(a**2, axis=1) + jnp.sum(b**2),
    "two leaves multiplied": lambda a, b: jnp.sum(a[0] * b) + jnp.sum(a**2),
    "not squared": lambda a, b: jnp.sum(a) + jnp.sum(b),
    "cubed": lambda a, b: jnp.sum(a**3) + jnp.sum(b**3),
    "of something else": lambda a, b: jnp.sum((2 * a) ** 2) + jnp.sum(b**2),
    "clipped before": lambda a, b: sum(
        jnp.sum(jnp.clip(x, -1, 1) ** 2) for x in (a, b)
    ),
    "rounded before": lambda a, b: sum(
        jnp.sum(x.astype(jnp.float16).astype(jnp.float32) ** 2) for x in (a, b)
    ),
    "with another term": lambda a, b: jnp.sum(a**2) + (1.0 + jnp.sum(b**2)),
    "a difference": lambda a, b: jnp.sum(a**2) - jnp.sum(b**2),
}


@pytest.mark.parametrize("fun", NO_SUMS.values(), ids=NO_SUMS)
def test_no_other_sum_is_taken_for_it(fun):
    assert find(fun, A, B) is None


def test_of_complex_numbers_both_parts_count():
    assert find(lambda c: jnp.sum(jnp.real(c) ** 2), C) is None
    assert find(lambda c: jnp.sum((c * c).real), C) is None
    assert find(lambda c: jnp.sum(jnp.real(c) ** 2) + 0 * jnp.sum(c.imag), C) is None


WITHOUT = {
    "adam": optax.adam(0.1),
    "lamb": optax.lamb(0.1),
    "block rms": optax.clip_by_block_rms(1.0),
    "adaptive": optax.adaptive_grad_clip(1.0),
    "elements": optax.clip(1.0),
    "zero_nans": optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1.0)),
    "momentum first": optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1.0)),
}


@pytest.mark.parametrize("inner", WITHOUT.values(), ids=WITHOUT)
def test_optimizers_without_a_clip_by_the_norm_of_all_gradients(inner):
    params = {"a": A, "b": B}
    state = inner.init(params)
    leaves, structure = jax.tree.flatten(params)

    def update(*grads):
        return inner.update(structure.unflatten(grads), state, params)

    assert find(update, *leaves) is None
