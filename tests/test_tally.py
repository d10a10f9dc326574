import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jls._tally import _combine, inexact_leaves, tally

BOTH = pytest.mark.parametrize("wraps_at", [1, 2**32], ids=["carried", "plain"])


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 3), (2, 3, 5)])
def test_tally_counts_masks_and_finds_maxima(wraps_at, shape):
    x = np.random.default_rng(0).uniform(size=shape).astype(np.float32)
    masks, keys = [x > 0.3, x > 0.6, x > 2], [x, 2 * x]
    counts, maxima = jax.jit(tally, static_argnums=2)(masks, keys, wraps_at)
    assert (counts.dtype, counts.shape) == (jnp.uint32, (3, 2))
    assert counts.tolist() == [[0, int(mask.sum())] for mask in masks]
    assert [float(m) for m in maxima] == [key.max(initial=0) for key in keys]
    assert jax.jit(tally)([], keys)[1] == maxima


@BOTH
def test_tally_works_under_vmap(wraps_at):
    x = jnp.arange(12.0).reshape(3, 4)
    counts, (largest,) = jax.vmap(lambda row: tally([row > 4], [row], wraps_at))(x)
    assert counts.tolist() == [[[0, 0]], [[0, 3]], [[0, 4]]]
    assert largest.tolist() == [3.0, 7.0, 11.0]


def test_partial_counts_are_added_with_their_carry():
    numbers = [5, 2**31, 2**32 - 1, 2**32, 3 * 2**32 + 7, 2**40 + 2**31]
    for a in numbers:
        for b in numbers:
            digits = [np.array([x >> 32, x % 2**32], np.uint32) for x in (a, b)]
            high, low = _combine(1, 2, *(tuple(map(jnp.asarray, d)) for d in digits))
            assert int(high) * 2**32 + int(low) == a + b


def test_tally_of_a_leaf_of_2_to_33_elements_has_both_digits():
    mask = jax.ShapeDtypeStruct((2**20, 2**13), jnp.bool_)
    jaxpr = jax.make_jaxpr(lambda mask: tally([mask]))(mask)
    (reduce,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce")
    assert len(reduce.outvars) == 2
    small = jax.make_jaxpr(lambda mask: tally([mask]))(jnp.zeros(3, bool))
    (reduce,) = (eqn for eqn in small.eqns if "reduce" in eqn.primitive.name)
    assert len(reduce.outvars) == 1


def test_inexact_leaves_have_paths_that_are_told_apart():
    tree = {"a/b": 1.0, "a": {"b": jnp.ones(2), "n": 3}}
    paths, leaves = inexact_leaves(tree)
    assert paths == ["['a']['b']", "['a/b']"]
    assert leaves[1] == 1.0
    assert inexact_leaves({"a": [1.0, None, 2j]})[0] == ["a/0", "a/2"]
