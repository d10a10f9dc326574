"""An autocast equals its reference bit for bit where float32 rounds nothing.

Promise 18, on programs of small integers. Zeros may differ by their sign.

`python tests/truth/test_exact.py [-k REGEX] [--all]` prints those that differ.
"""

import argparse
import collections
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_programs import EXACT, OTHERS, READERS, WRAPS, integers
from reference_autocast import PRODUCTS, Interpreter, as_written, evaluate, is_float
from shared import bits

import jls

HALVES = ("float16", "bfloat16")
RUNS = {"jit": jax.jit, "eager": lambda fun: fun}


@functools.lru_cache(maxsize=1)
def made(name):
    """A program, its arguments, and the cotangent of its result."""
    fun, params, (least, most, over) = EXACT[name]()
    shape = jax.eval_shape(fun, params).shape
    weights = integers(np.random.RandomState(1), least, most, *shape, over=over)
    return fun, params, weights


def with_gradient(fun):
    """The result of `fun(params)`, and what a cotangent of it gives."""

    def both(params, weights):
        result, pull = jax.vjp(fun, params)
        return {"result": result, "gradient": pull(weights)[0]}

    return both


@functools.lru_cache(maxsize=4)
def expected(name, half):
    fun, *args = made(name)
    return evaluate(with_gradient(as_written(fun)), half, *args)


def got(name, half, run, cast=jls.autocast):
    fun, *args = made(name)
    return run(with_gradient(cast(fun, half)))(*args)


def unsigned(tree):
    """The bits, those of -0 as of 0."""
    return bits(jax.tree.map(lambda x: np.where(x == 0, 0, x), tree))


def difference(found, right):
    """The results that differ, and by how much."""
    said = []
    for path, x in jax.tree.leaves_with_path(found):
        y = functools.reduce(lambda tree, key: tree[key.key], path, right)
        x, y = np.asarray(x), np.asarray(y)
        at = np.argwhere(~((x == y) | (np.isnan(x) & np.isnan(y))))
        if len(at):
            i = tuple(at[0])
            name = jax.tree_util.keystr(path)
            said.append(f"{name}: {len(at)} of {x.size}, {i}: {x[i]} for {y[i]}")
    return said


def is_more(i, name, half, run):
    """In a normal run each reader once, in a dtype and a wrap by turns."""
    kind, _, wrap = name.partition("-")
    if name in OTHERS:
        return (i + HALVES.index(half)) % 2 or run == "eager"
    turn = list(READERS).index(kind)
    wraps = ["", "between", *(x.__name__ for x in WRAPS)]
    turns, place = divmod(turn, len(wraps))
    chosen = wraps[place] if f"{kind}-{wraps[place]}" in EXACT else ""
    is_turn = chosen == wrap and (turns + place + HALVES.index(half)) % 2
    return not is_turn or (run == "eager") != (place % 4 == turns % 4)


CASES = [
    pytest.param(name, half, run, marks=[pytest.mark.more] * more)
    for i, name in enumerate(EXACT)
    for half in HALVES
    for run in RUNS
    for more in [bool(is_more(i, name, half, run))]
]

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(("name", "half", "run"), CASES)
def test_an_autocast_is_its_reference_to_the_bit(name, half, run):
    found, right = got(name, half, RUNS[run]), expected(name, half)
    assert unsigned(found) == unsigned(right), difference(found, right)


# What is done to an autocast.


def forwards(fun):
    def both(params, weights):
        tangents = jax.tree.map(lambda x: jnp.sign(x[::-1]), params)
        return jax.jvp(fun, (params,), (tangents,))

    return both


def of_vmap(fun):
    def both(params, weights):
        two = jax.tree.map(lambda x: jnp.stack([x, -x]), params)
        return jax.vmap(lambda p: with_gradient(fun)(p, weights))(two)

    return both


def of_scan(fun):
    def both(params, weights):
        two = jax.tree.map(lambda x: jnp.stack([x, -x]), params)
        total = jax.tree.map(jnp.zeros_like, params)

        def step(total, p):
            found = with_gradient(fun)(p, weights)
            return jax.tree.map(jnp.add, total, found["gradient"]), found["result"]

        return jax.lax.scan(step, total, two)

    return both


def of_remat(fun):
    return with_gradient(jax.checkpoint(fun))


def of_a_gradient(fun):
    """Second derivatives, of half the square."""

    def both(params, weights):
        def slope(params):
            result, pull = jax.vjp(fun, params)
            return pull(jnp.sign(result))[0]

        result, pull = jax.vjp(slope, params)
        return result, pull(jax.tree.map(jnp.sign, params))[0]

    return both


@pytest.mark.cover(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["product_of_a_product", "less_its_roll", "itself"])
@pytest.mark.parametrize(
    "outside", [forwards, of_vmap, of_scan, of_remat, of_a_gradient]
)
def test_so_is_what_jax_makes_of_it(outside, name, half):
    fun, *args = made(name)
    found = jax.jit(outside(jls.autocast(fun, half)))(*args)
    right = evaluate(outside(as_written(fun)), half, *args)
    assert unsigned(found) == unsigned(right)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_so_is_one_with_scopes_that_are_kept(run, half):
    fun, params, _ = made("operands_with_many_bits")

    def twice(p):
        s = fun(p)
        with jax.named_scope("head"):
            head = p["x"] @ p["w"] - s[::-1]
        return s, head, head @ jnp.sign(p["w"])

    cast = jls.autocast(twice, half, keep="head")
    found = run(cast)(params)
    right = evaluate(as_written(twice, keep="head"), half, params)
    assert unsigned(found) == unsigned(right)


# The programs are what they say.


SUMS = (*PRODUCTS, "reduce_sum", "cumsum", "reduce_window_sum", "scatter-add")
SUMS += ("add", "sub", "add_any")


class InFloat64(Interpreter):
    """An interpreter with which nothing but products may round."""

    def bind(self, equation, operands, **params):
        name, floats = equation.primitive.name, [x for x in operands if is_float(x)]
        params = equation.params | params
        # A scatter has a program of its own.
        wider = np.float32 if name.startswith("scatter") else np.float64
        operands = [wider(x) if is_float(x) else x for x in operands]
        if wider is np.float64:
            wide = {key: np.dtype("float64") for key, x in params.items() if is_32(x)}
            params |= wide
        results = super().bind(equation, operands, **params)
        for x in filter(is_float, results):
            np.testing.assert_array_equal(x, np.float32(x), f"{name} rounds")
        if name in SUMS and floats:
            sizes = [np.abs(x) if is_float(x) else x for x in operands]
            if name == "sub":
                most = sizes[0] + sizes[1]
            else:
                (most,) = super().bind(equation, sizes, **params)
            units = [least_bit(x) for x in floats]
            unit = np.prod(units) if name in PRODUCTS else np.min(units)
            # In any order, with any intermediate results.
            assert np.max(most, initial=0) / unit < 2**24, f"{name} may round"
        return results


def is_32(value):
    return isinstance(value, np.dtype | type) and value == np.dtype("float32")


def least_bit(x):
    """The largest power of two of which all numbers are multiples."""
    x = np.abs(np.asarray(x, float))
    fractions, exponents = np.frexp(x[x > 0])
    whole = np.ldexp(fractions, 53).astype(int)
    return np.min(np.ldexp((whole & -whole) * 1.0, exponents - 53), initial=1e30)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.more] * ("-in_" in x)) for x in EXACT]
)
def test_float32_rounds_nothing_in_these_programs_but_products(name):
    fun, *args = made(name)
    program = jax.make_jaxpr(with_gradient(as_written(fun)))(*args)
    for half in HALVES:
        with jax.enable_x64(True):
            results = InFloat64(half).run(program, jax.tree.leaves(args))
        assert all(np.all(np.isfinite(x)) for x in results)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.more] * (x not in OTHERS)) for x in EXACT],
)
def test_in_float32_the_reference_is_the_program(name):
    fun, *args = made(name)
    found = evaluate(with_gradient(as_written(fun)), "float32", *args)
    right = jax.jit(with_gradient(fun))(*args)
    for x, y in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * np.max(np.abs(y)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="which programs: a regular expression")
    parser.add_argument("--all", action="store_true", help="also all wraps of readers")
    parser.add_argument("--jit", action="store_true", help="not eager")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes, wrong = collections.Counter(), collections.defaultdict(list)
    for name in EXACT:
        if not re.search(asked.k, name) or (
            not (asked.all or asked.k) and "-in_" in name
        ):
            continue
        for half in HALVES:
            right = expected(name, half)
            for run in list(RUNS)[: 1 if asked.jit else 2]:
                try:
                    said = difference(got(name, half, RUNS[run]), right)
                except Exception as error:
                    said = [f"{type(error).__name__}: {str(error)[:200]}"]
                outcomes[f"{half} {run} {'wrong' if said else 'right'}"] += 1
                if said:
                    wrong[name].append(f"{half} {run}")
                    print(f"{name} {half} {run}:", *said, sep="\n    ", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:5} {outcome}")
    total = sum(outcomes.values())
    print(f"{sum(map(len, wrong.values()))} of {total} wrong, {len(wrong)} programs")


if __name__ == "__main__":
    main()
