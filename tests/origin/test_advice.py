# SPDX-License-Identifier: Apache-2.0
"""Every advice of `jls.why`, done as it says: in its dtype, and the NaN is gone."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.scipy.special import entr

import jls

pytestmark = pytest.mark.standard_promotion

DTYPES = ("float16", "bfloat16", "float32")
# What an advice writes for a small number, and for a distance from 1.
SMALL = {"float16": 1e-4, "bfloat16": 1e-12, "float32": 1e-12}
EDGE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}


class Case(NamedTuple):
    """A program and what the advice makes of it; `s` is the number in the advice."""

    bad: object  # x -> loss
    mended: object  # (x, s) -> loss
    x: list
    words: str
    number: dict = SMALL
    is_forward: bool = False
    dtypes: tuple[str, ...] = DTYPES


CASES = {
    "root": Case(
        lambda x: jnp.sqrt(x).sum(),
        lambda x, s: jnp.sqrt(x + s).sum(),
        [0.0, 1.0],
        "jnp.sqrt(x + {})",
    ),
    "norm": Case(
        lambda x: jnp.sqrt((x**2).sum()),
        lambda x, s: jnp.sqrt((x**2).sum() + s),
        [0.0, 0.0],
        "jnp.sqrt(x + {})",
    ),
    "power": Case(
        lambda x: (x**0.5).sum(),
        lambda x, s: ((x + s) ** 0.5).sum(),
        [0.0, 1.0],
        "(x + {}) ** p",
    ),
    "log": Case(
        lambda x: jnp.log(x).sum(),
        lambda x, s: jnp.log(x + s).sum(),
        [0.0, 1.0],
        "jnp.log(x + {})",
        is_forward=True,
    ),
    "quotient": Case(
        lambda x: x[1] / x[0],
        lambda x, s: x[1] / (x[0] + s),
        [0.0, 1.0],
        "add {} to the divisor",
        is_forward=True,
    ),
    "entropy": Case(
        lambda p: -(p * jnp.log(p)).sum(),
        lambda p, s: entr(p).sum(),
        [0.0, 1.0],
        "jax.scipy.special.entr(p)",
        is_forward=True,
    ),
    "arccos": Case(
        lambda x: jnp.arccos(x).sum(),
        lambda x, s: jnp.arccos(jnp.clip(x, -1 + s, 1 - s)).sum(),
        [1.0, 0.5],
        "jnp.clip(x, -1 + {0}, 1 - {0})",
        EDGE,
    ),
    "arcsin": Case(
        lambda x: jnp.arcsin(x).sum(),
        lambda x, s: jnp.arcsin(jnp.clip(x, -1 + s, 1 - s)).sum(),
        [-1.0, 0.5],
        "jnp.clip(x, -1 + {0}, 1 - {0})",
        EDGE,
    ),
    "eigenvectors": Case(
        lambda x: (jnp.linalg.eigh(jnp.diag(x))[1][:, 0] ** 3).sum(),
        lambda x, s: (
            jnp.linalg.eigh(jnp.diag(x + s * jnp.arange(3)))[1][:, 0] ** 3
        ).sum(),
        [1.0, 1.0, 1.0],
        "jnp.diag({} * jnp.arange(n))",
        EDGE,
        dtypes=("float32",),
    ),
    "cholesky": Case(
        lambda x: jnp.linalg.cholesky(jnp.diag(x)).sum(),
        lambda x, s: jnp.linalg.cholesky(jnp.diag(x) + s * jnp.eye(2)).sum(),
        [-1e-7, 1.0],
        "add {} * jnp.eye(n)",
        EDGE,
        is_forward=True,
        dtypes=("float32",),
    ),
    "where": Case(
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(),
        lambda x, s: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0).sum(),
        [0.0, 1.0],
        "f(jnp.where(ok, x, 1.0))",
    ),
    "variance": Case(
        lambda x: jnp.sqrt(x).sum(),
        lambda x, s: jnp.sqrt(jnp.maximum(x, 0.0) + s).sum(),
        [-1e-3, 1.0],
        "jnp.maximum(x, 0.0)",
        is_forward=True,
    ),
    "exp": Case(
        lambda x: jnp.log(jnp.exp(x).sum()),
        lambda x, s: jax.nn.logsumexp(x),
        [1000.0, 1.0],
        "stay with logarithms",
        is_forward=True,
    ),
    "masked row": Case(
        lambda x: jax.nn.softmax(x - jnp.inf).sum(),
        lambda x, s: jax.nn.softmax((x - jnp.inf).at[0].set(0.0)).sum(),
        [1.0, 1.0],
        "Give such a row one finite number",
        is_forward=True,
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes],
)
def test_advice_done_as_it_says_mends_the_program(name, dtype):
    case = CASES[name]
    x = jnp.array(case.x, dtype)
    fun = case.bad if case.is_forward else jax.grad(case.bad)
    why = jls.why(fun, x)
    advice = re.sub(r"\s+", " ", str(why))
    number = case.number[dtype]
    written = f"{number:.0e}".replace("e-0", "e-")
    assert case.words.format(written) in advice
    assert jnp.asarray(number, dtype) > 0
    loss, grads = jax.value_and_grad(case.mended)(x, jnp.asarray(number, dtype))
    assert jls.all_finite(loss)
    assert case.is_forward or jls.all_finite(grads)


def test_of_an_entropy_the_product_is_mended_and_not_the_logarithm():
    why = jls.why(CASES["entropy"].bad, jnp.array([0.0, 1.0]))
    assert [x.place.operation for x in why.births] == ["log", "mul"]
    assert "jax.nn.log_softmax" not in str(why)


def test_no_advice_is_for_what_is_not_in_the_program():
    """Neither a root nor a power is written in these."""
    for name in ("arccos", "eigenvectors"):
        case = CASES[name]
        why = jls.why(jax.grad(case.bad), jnp.array(case.x))
        assert "sqrt" not in str(why).split("made")[1]
        assert "** p" not in str(why)
