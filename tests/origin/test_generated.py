# SPDX-License-Identifier: Apache-2.0
"""Whether `jls.why` names the lines of random programs that are bad by construction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import generate, judge
from jax import lax
from operations import (
    BACKWARD,
    CONTAINERS,
    FORWARD,
    NEVER_TAKEN,
    SAFE,
    SAFE_OF_TWO,
)

pytestmark = pytest.mark.standard_promotion

SEEDS = [
    *range(24),
    *(pytest.param(seed, marks=pytest.mark.more) for seed in range(24, 200)),
]
NUMBERS = [
    np.zeros(4),
    np.full(4, 2.0),
    np.full(4, -2.0),
    np.array([0.0, 1.0, -1.0, 0.1]),
    *np.random.default_rng(0).uniform(-2, 2, (3, 4)),
]


@functools.cache
def verdict_of(seed):
    return judge(generate(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_birth_is_at_the_line_where_it_was_planted(seed):
    print(generate(seed).text)
    verdict = verdict_of(seed)
    print(verdict.text)
    assert verdict.word in ("right", "not judged"), verdict.reason


def test_most_programs_can_be_judged():
    """A program that is bad as it is, or no longer bad, asks for nothing."""
    verdicts = [verdict_of(seed) for seed in range(24)]
    assert sum(x.word == "right" and x.reason == "" for x in verdicts) >= 12
    assert sum(x.word == "not judged" for x in verdicts) <= 1


def runs(code, t):
    """The results of an expression, and their derivatives with respect to x and y."""
    names = {"jax": jax, "jnp": jnp, "lax": lax}
    fun = eval(f"lambda x, y, t: {code}", names)

    @jax.jit
    def run(x, y):
        result, pull = jax.vjp(lambda x, y: fun(x, y, jnp.float32(t)), x, y)
        return result, pull(jnp.ones_like(result))

    for x in NUMBERS:
        for y in NUMBERS[:4]:
            yield run(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))


def is_finite(*trees):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(trees))


@pytest.mark.more
@pytest.mark.parametrize("code", [*SAFE, *SAFE_OF_TWO, *CONTAINERS])
def test_safe_expressions_are_safe(code):
    for result, slopes in runs(code, 0.0):
        assert result.shape == (4,)
        assert result.dtype == jnp.float32
        assert is_finite(result, slopes)
        assert jnp.abs(result).max() <= 2.001


@pytest.mark.more
@pytest.mark.parametrize(("value", "code"), NEVER_TAKEN)
def test_what_is_never_taken_is_bad_and_does_no_harm(value, code):
    assert not any(is_finite(result) for result, _ in runs(value, 0.0))
    for result, slopes in runs(f"(lambda x, z: {code})(x, {value})", 0.0):
        assert is_finite(result, slopes)
        assert jnp.abs(result).max() <= 2.001


@pytest.mark.more
@pytest.mark.parametrize("birth", FORWARD + BACKWARD, ids=lambda birth: birth.code)
def test_births_are_safe_until_they_are_bad(birth):
    code = f"(lambda x: {birth.code})({birth.before})"
    for result, slopes in runs(code, 0.0):
        assert is_finite(result, slopes)
        assert jnp.abs(result).max() <= 2.001
    last_result, last_slopes = [*runs(code, 1.0)][-1]
    assert is_finite(last_result) == birth.is_backward
    assert birth.is_backward <= (not is_finite(last_slopes))
