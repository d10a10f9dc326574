# SPDX-License-Identifier: Apache-2.0
"""Every advice of `jls.why`, done as it says: in its dtype, and the NaN is gone."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.scipy.special import entr, erfinv, xlogy

import jls
from jls._tools.origin import advice

pytestmark = pytest.mark.standard_promotion

DTYPES = ("float16", "bfloat16", "float32")
# What an advice writes for a small number, and for a distance from 1.
SMALL = {"float16": 1e-4, "bfloat16": 1e-12, "float32": 1e-12}
DIVISOR = SMALL | {"float16": 1e-2}
EDGE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}


class Case(NamedTuple):
    """A program and what the advice makes of it; `s` is the number in the advice."""

    advice: str  # its name in `jls._tools.origin.advice`
    bad: object  # x -> loss
    mended: object  # (x, s) -> loss
    x: list
    words: str
    number: dict = SMALL
    is_forward: bool = False
    dtypes: tuple[str, ...] = DTYPES


LABELS = jnp.array([0, 5])


def arc(fun, x, is_forward=False):
    """A function that ends at -1 and 1."""
    return Case(
        "ARC",
        lambda x: fun(x).sum(),
        lambda x, s: fun(jnp.clip(x, -1 + s, 1 - s)).sum(),
        x,
        "jnp.clip(x, -1 + {0}, 1 - {0})",
        EDGE,
        is_forward=is_forward,
    )


CASES = {
    "root": Case(
        "SQRT",
        lambda x: jnp.sqrt(x).sum(),
        lambda x, s: jnp.sqrt(x + s).sum(),
        [0.0, 1.0],
        "jnp.sqrt(x + {})",
    ),
    "norm": Case(
        "SQRT",
        lambda x: jnp.sqrt((x**2).sum()),
        lambda x, s: jnp.sqrt((x**2).sum() + s),
        [0.0, 0.0],
        "jnp.sqrt(x + {})",
    ),
    "power": Case(
        "POWER",
        lambda x: (x**0.5).sum(),
        lambda x, s: ((x + s) ** 0.5).sum(),
        [0.0, 1.0],
        "(x + {}) ** p",
    ),
    "log": Case(
        "LOG_0",
        lambda x: jnp.log(x).sum(),
        lambda x, s: jnp.log(x + s).sum(),
        [0.0, 1.0],
        "jnp.log(x + {})",
        is_forward=True,
    ),
    "quotient": Case(
        "DIVIDE",
        lambda x: x[1] / x[0],
        lambda x, s: x[1] / (x[0] + s),
        [0.0, 1.0],
        "add {} to the divisor",
        DIVISOR,
        is_forward=True,
    ),
    "entropy": Case(
        "ENTROPY",
        lambda p: -(p * jnp.log(p)).sum(),
        lambda p, s: -(p * jnp.log(p + s)).sum(),
        [0.0, 1.0],
        "x * jnp.log(y + {})",
        is_forward=True,
    ),
    "arccos": arc(jnp.arccos, [1.0, 0.5]),
    "arcsin": arc(jnp.arcsin, [-1.0, 0.5]),
    "arccos out of its range": arc(jnp.arccos, [1.1, 0.5], is_forward=True),
    "arcsin out of its range": arc(jnp.arcsin, [-1.1, 0.5], is_forward=True),
    "arctanh": arc(jnp.arctanh, [1.0, 0.5], is_forward=True),
    "arctanh out of its range": arc(jnp.arctanh, [-1.1, 0.5], is_forward=True),
    "derivative of arctanh": arc(jnp.arctanh, [1.0, -1.0]),
    "erfinv": arc(erfinv, [1.0, 0.5], is_forward=True),
    "erfinv out of its range": arc(erfinv, [-1.1, 0.5], is_forward=True),
    "arccosh": Case(
        "ARCCOSH",
        lambda x: jnp.arccosh(x).sum(),
        lambda x, s: jnp.arccosh(jnp.maximum(x, 1 + s)).sum(),
        [0.9, 2.0],
        "jnp.maximum(x, 1 + {})",
        EDGE,
        is_forward=True,
    ),
    "derivative of arccosh": Case(
        "ARCCOSH",
        lambda x: jnp.arccosh(x).sum(),
        lambda x, s: jnp.arccosh(jnp.maximum(x, 1 + s)).sum(),
        [1.0, 2.0],
        "jnp.maximum(x, 1 + {})",
        EDGE,
    ),
    "eigenvectors": Case(
        "EIGENVECTORS",
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
        "NOT_POSITIVE",
        lambda x: jnp.linalg.cholesky(jnp.diag(x)).sum(),
        lambda x, s: jnp.linalg.cholesky(jnp.diag(x) + s * jnp.eye(2)).sum(),
        [-1e-7, 1.0],
        "add {} * jnp.eye(n)",
        EDGE,
        is_forward=True,
        dtypes=("float32",),
    ),
    "where": Case(
        "WHERE",
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum(),
        lambda x, s: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0).sum(),
        [0.0, 1.0],
        "f(jnp.where(ok, x, 1.0))",
    ),
    "root of a negative number": Case(
        "ROOT_NEGATIVE",
        lambda x: jnp.sqrt(x).sum(),
        lambda x, s: jnp.sqrt(jnp.maximum(x, s)).sum(),
        [-1e-3, 1.0],
        "jnp.maximum(x, {})",
        is_forward=True,
    ),
    "inverse root of a negative number": Case(
        "ROOT_NEGATIVE",
        lambda x: jax.lax.rsqrt(x).sum(),
        lambda x, s: jax.lax.rsqrt(jnp.maximum(x, s)).sum(),
        [-1e-3, 1.0],
        "jnp.maximum(x, {})",
        DIVISOR,
        is_forward=True,
    ),
    "exp": Case(
        "EXP",
        lambda x: jnp.log(jnp.exp(x).sum()),
        lambda x, s: jax.nn.logsumexp(x),
        [1000.0, 1.0],
        "stay with logarithms",
        is_forward=True,
    ),
    "masked row": Case(
        "SOFTMAX",
        lambda x: jax.nn.softmax(x - jnp.inf).sum(),
        lambda x, s: jax.nn.softmax((x - jnp.inf).at[0].set(0.0)).sum(),
        [1.0, 1.0],
        "Give such a row one finite number",
        is_forward=True,
    ),
    "log of a negative number": Case(
        "LOG_NEGATIVE",
        lambda x: jnp.log(x).sum(),
        lambda x, s: jnp.log(jnp.maximum(x, s)).sum(),
        [-2.0, 1.0],
        "jnp.log(jnp.maximum(x, {}))",
        is_forward=True,
    ),
    "log1p of -1": Case(
        "LOG1P",
        lambda x: jnp.log1p(x).sum(),
        lambda x, s: jnp.log1p(jnp.maximum(x, -1 + s)).sum(),
        [-1.0, 1.0],
        "jnp.log1p(jnp.maximum(x, -1 + {}))",
        EDGE,
        is_forward=True,
    ),
    "log1p of less": Case(
        "LOG1P",
        lambda x: jnp.log1p(x).sum(),
        lambda x, s: jnp.log1p(jnp.maximum(x, -1 + s)).sum(),
        [-2.0, 1.0],
        "jnp.log1p(jnp.maximum(x, -1 + {}))",
        EDGE,
        is_forward=True,
    ),
    "power of a negative number": Case(
        "POWER_NEGATIVE",
        lambda x: (x**0.5).sum(),
        lambda x, s: (jnp.maximum(x, s) ** 0.5).sum(),
        [-2.0, 1.0],
        "jnp.maximum(x, {}) ** p",
        is_forward=True,
    ),
    "index": Case(
        "INDEX",
        lambda x: jnp.take(x, LABELS).sum(),
        lambda x, s: jnp.where(
            LABELS < 2, jnp.take(x, jnp.clip(LABELS, 0, 2 - 1)), 0.0
        ).sum(),
        [1.0, 2.0],
        "jnp.clip(i, 0, n - 1), and leave such a row out of the loss",
        is_forward=True,
    ),
    "over float16": Case(
        "BEYOND_NARROW",
        lambda x: (x * x).sum(),
        lambda x, s: (x.astype(jnp.float32) * x.astype(jnp.float32)).sum(),
        [300.0, 1.0],
        "Compute this line in float32",
        is_forward=True,
        dtypes=("float16",),
    ),
    "over float16, smaller": Case(
        "BEYOND_NARROW",
        lambda x: (x * x).sum(),
        lambda x, s: ((x / 16) * (x / 16)).sum(),
        [300.0, 1.0],
        "make its operands smaller",
        is_forward=True,
        dtypes=("float16",),
    ),
    "over float32": Case(
        "BEYOND",
        lambda x: (x * x).sum(),
        lambda x, s: ((x / jnp.max(jnp.abs(x))) ** 2).sum(),
        [1e20, 1.0],
        "x / jnp.max(jnp.abs(x))",
        is_forward=True,
        dtypes=("bfloat16", "float32"),
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
    text = re.sub(r"\s+", " ", str(why))
    number = case.number[dtype]
    written = f"{number:.0e}".replace("e-0", "e-")
    assert case.words.format(written) in text
    words = _any_number(getattr(advice, case.advice))
    assert any(re.fullmatch(words, birth.advice) for birth in why.births)
    assert jnp.asarray(number, dtype) > 0
    loss, grads = jax.value_and_grad(case.mended)(x, jnp.asarray(number, dtype))
    assert jls.all_finite(loss)
    assert jls.all_finite(grads)


def _any_number(words):
    return re.sub(r"\\{.*?\\}", ".+", re.escape(words))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_norm_that_overflows_is_mended_by_a_clip_of_each_element(dtype):
    """No float16 gradient is that large."""
    params = {"w": jnp.ones(2)}
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    reports = []
    for inner in (clip, optax.chain(optax.clip(1e6), clip)):
        optimizer = jls.skip_nonfinite(inner)

        def loss_fn(params, x):
            return jnp.sum(params["w"].astype(dtype) * x)

        step = jax.jit(jls.train_step(loss_fn, optimizer))
        args = params, optimizer.init(params), jnp.asarray(2e19, dtype)
        found = [birth.advice for birth in jls.why(step, *args).births]
        reports.append((found, bool(step(*args)[2].skipped)))
    assert reports == [([advice.NORM_OVERFLOWS], True), ([], False)]
    assert "optax.clip(1e6)" in advice.NORM_OVERFLOWS


@pytest.mark.parametrize("scope", ["router", "router.first", ""])
def test_an_overflow_under_an_autocast_is_mended_by_the_keep_that_is_written(scope):
    def router(x, w):
        if not scope:
            return x @ w
        with jax.named_scope(scope):
            return x @ w

    def loss_fn(x, w):
        return jnp.mean((router(x, w) * 1e-6) @ w)

    x, w = jnp.full((2, 8), 300.0), jnp.full((8, 8), 300.0)
    why = jls.why(jls.autocast(loss_fn, jnp.float16), x, w)
    assert not any(birth.advice for birth in why.births)
    keep = kept_in(why)
    assert keep is not None
    cast = jls.autocast(loss_fn, jnp.float16, keep=keep)
    assert not jls.why(cast, x, w).births
    assert jls.all_finite(cast(x, w))


def kept_in(why):
    found = re.match(r"In float32 this is finite: keep=(.+)", "".join(why.notes[:1]))
    return found and eval(found[1])


def test_the_keep_of_an_overflow_finds_that_scope_alone():
    """Not block_10 beside block_1, wherever the autocast is called."""

    def loss_fn(x, w):
        with jax.named_scope("block_10"):
            x = x @ w * 1e-3
        with jax.named_scope("block_1"):
            x = x @ w
        return jnp.mean((x * 1e-6) @ w)

    def whole(x, w):
        with jax.named_scope("outer"):
            return jls.autocast(loss_fn, jnp.float16)(x, w)

    x, w = jnp.full((2, 8), 30.0), jnp.full((8, 8), 200.0)
    for fun in (whole, jax.value_and_grad(whole)):
        assert kept_in(jls.why(fun, x, w)) == r"^block_1$"


def test_a_backward_overflow_under_an_autocast_names_no_keep():
    """A loss scale mends it."""

    def loss_fn(x, w):
        return 1e3 * jnp.sum((x @ w) @ w)

    fun = jax.grad(jls.autocast(loss_fn, jnp.float16))
    why = jls.why(fun, jnp.ones((2, 8)), 30 * jnp.ones((8, 8)))
    assert why.births[0].place.function == "loss_fn"
    assert "keep=" not in str(why)


def test_each_advice_has_a_test():
    written = {name for name in vars(advice) if name.isupper() and name[0] != "_"}
    no_advice = {"CAME_IN", "WRITTEN"}  # they say what it is, and name no line to write
    by_hand = {"NORM_OVERFLOWS"}
    assert written == {case.advice for case in CASES.values()} | no_advice | by_hand


def test_the_functions_for_an_entropy_have_no_finite_gradient():
    """So the advice does not send to them."""
    assert not jls.all_finite(jax.grad(entr)(0.0))
    assert not jls.all_finite(jax.grad(xlogy, (0, 1))(0.0, 0.0))


def test_of_an_entropy_the_product_is_mended_and_not_the_logarithm():
    why = jls.why(CASES["entropy"].bad, jnp.array([0.0, 1.0]))
    assert [x.place.operation for x in why.births] == ["log", "mul"]
    assert "jax.nn.log_softmax" not in str(why)


def test_no_advice_is_for_what_is_not_in_the_program():
    """Neither a root nor a power is written in these."""
    inverses = "arccos", "derivative of arctanh", "derivative of arccosh"
    for name in (*inverses, "eigenvectors"):
        case = CASES[name]
        why = jls.why(jax.grad(case.bad), jnp.array(case.x))
        assert "sqrt" not in str(why).split("made")[1]
        assert "** p" not in str(why)
        assert "quotient" not in str(why)


BESIDE = {
    "SQRT": lambda arc, x, y: (jnp.sqrt(x) + arc(y)).sum(),
    "POWER": lambda arc, x, y: (x**-1 + arc(y)).sum(),
    "DIVIDE": lambda arc, x, y: (y / x + arc(y)).sum(),
}


@pytest.mark.parametrize("arc", [jnp.arctanh, jnp.arccos, jnp.arccosh])
@pytest.mark.parametrize("name", BESIDE)
def test_a_derivative_beside_an_arc_function_is_not_of_it(name, arc):
    """In one line with it, and of another argument."""
    y = jnp.full(1, 1.5 if arc is jnp.arccosh else 0.5)
    fun = jax.grad(lambda x, y: BESIDE[name](arc, x, y), (0, 1))
    found = [x.advice for x in jls.why(fun, jnp.zeros(1), y).births]
    words = _any_number(getattr(advice, name))
    assert any(re.fullmatch(words, x) for x in found)
    assert not any("arc" in x for x in found)
