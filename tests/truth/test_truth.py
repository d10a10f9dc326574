"""An autocast is its reference but for the last bits of float32: promise 18.

    python tests/truth/test_truth.py                  all rows and models
    python tests/truth/test_truth.py --seeds 0:300    random programs, of `seeds.txt`

It prints those that are wrong, and counts the others, and why some were left out.
"""

import argparse
import collections
import functools
import warnings
from pathlib import Path
from typing import NamedTuple

import guarded_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float32_programs import PROGRAMS
from guarded_programs import TABLE, random_program
from jax import lax
from reference_autocast import Interpreter, as_written, evaluate, rounded
from truth import HALVES, SHARE, Truth, share, with_gradients

import jls

# The seeds of the random programs: never others, and none is left out for being wrong.
SEEDS = [int(x) for x in Path(__file__).with_name("seeds.txt").read_text().split()]


@functools.lru_cache(maxsize=4)
def truth_by_name(kind, name):
    program = program_by_name(kind, name)
    return program, Truth(*program)


def program_by_name(kind, name):
    if kind == "seed":
        return random_program(name)[0]
    return (TABLE if kind == "row" else PROGRAMS)[name]()


def judged(kind, name, half, run=jax.jit, cast=jls.autocast):
    """A verdict, the lines of a comparison if there are any, and how wrong they are."""
    (loss, params, batch), truth = truth_by_name(kind, name)
    if reason := truth.why_left_out(half):
        return Verdict(f"left out: {reason}")
    results = run(with_gradients(cast(loss, half)))(params, batch, truth.scale)
    return verdict(truth, truth.named(results), half)


class Verdict(NamedTuple):
    said: str
    lines: tuple = ()

    @property
    def is_wrong(self):
        return self.said == "wrong"

    @property
    def is_left_out(self):
        return self.said.startswith("left out")


def verdict(truth, found, half):
    lines = truth.compare(found, half)
    # A program that is right needs no look at its choices.
    if share(lines) <= SHARE:
        return Verdict("right", lines)
    if reason := truth.why_unsure(half):
        return Verdict(f"left out: {reason}", lines)
    is_right = truth.is_off_by_last_bits(lines, half)
    return Verdict("right, by last bits of float32" if is_right else "wrong", lines)


def explained(kind, name, half, lines):
    """What an assertion says."""
    made_of = f" ({random_program(name)[1]})" if kind == "seed" else ""
    title = f"{kind} {name}{made_of}, {half}: {share(lines):.3g}"
    return "\n    ".join([title, *map(str, lines)])


def more(is_more):
    return [pytest.mark.more] * bool(is_more)


# In a normal run a row is jitted in one of the dtypes; with `--all` in both, and eager,
# and those that are like another one.
ALIKE = {"log1p_of_a_negative_bound", "odds_of_nearly_one", "entropy", "huge_and_tiny"}
ALIKE |= {"fast_variance", "below_every_half", "exp_less_the_maximum_of_rolled_rows"}
ALIKE |= {"roots_and_powers", "cumulative_product_of_shares", "cumulative_sum"}
ALIKE |= {"tiny_weights", "rms_norm", "softmax", "leaky_relu", "gelu", "silu"}
ALIKE |= {"remat", "small_steps_in_fori", "sampler", "inner_optimizer", "lstm"}
ALIKE |= {"erf_inv_of_a_clip", "exp_less_the_maximum_of_a_half", "softplus"}
ALIKE |= {"tiny_squares", "log_of_exp", "shared_weights", "attention"}
ALIKE |= {"residual_stream"}
ROWS = [
    pytest.param(name, half, run, marks=more(name in ALIKE or (i + j) % 2 or k), id=id_)
    for i, name in enumerate(TABLE)
    for j, half in enumerate(HALVES)
    for k, run in enumerate([jax.jit, lambda fun: fun])
    for id_ in [f"{name}-{half}-{['jit', 'eager'][k]}"]
]
# Those that take the longest, which `test_any_program` runs too.
LONG = {"gpt_unrolled", "gpt_scan_remat", "gpt_scan_policy", "attention_of_jax"}
LONG |= {"experts_cond_ragged", "associative_scan", "mlp_vmap_map"}
LONG |= {"convolutions_batch_norm", "fourier_and_linear_algebra"}
LONG |= {"variational_autoencoder", "gradient_penalty"}
MODELS = [
    pytest.param(name, half, marks=more(name in LONG or i % 2 != j))
    for i, name in enumerate(PROGRAMS)
    for j, half in enumerate(HALVES)
]
# In a normal run the first 24, and what XLA's own float32 moves as far; each in one of
# the two dtypes.
RANDOM = [
    pytest.param(seed, half, marks=more((i >= 24 and seed != 98) or i % 2 != j))
    for i, seed in enumerate(SEEDS)
    for j, half in enumerate(HALVES)
]

JUDGED = []  # of the random programs that ran


pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore:autocast to .* found no product"),
]


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


# An autocast.


@pytest.mark.parametrize(("name", "half", "run"), ROWS)
def test_a_right_program_is_its_reference(name, half, run):
    found = judged("row", name, half, run)
    assert not found.is_left_out
    assert not found.is_wrong, explained("row", name, half, found.lines)


@pytest.mark.parametrize(("name", "half"), MODELS)
def test_so_is_a_model(name, half):
    found = judged("program", name, half)
    assert not found.is_wrong, explained("program", name, half, found.lines)


@pytest.mark.parametrize(("seed", "half"), RANDOM)
def test_so_is_a_random_program(seed, half):
    found = judged("seed", seed, half)
    JUDGED.append(not found.is_left_out)
    assert not found.is_wrong, explained("seed", seed, half, found.lines)


def test_most_random_programs_are_judged():
    if len(JUDGED) < 20:
        pytest.skip("few of them ran in this process")
    assert np.mean(JUDGED) > 0.6


# The reference.


@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_what_a_cast_of_jax_does(half):
    state = np.random.RandomState(0)
    x = state.randn(4000) * 10.0 ** state.randint(-9, 6, 4000)
    x = np.float32([*x, 0.0, -0.0, np.inf, np.nan, 65504, 65519, 65520, 1 + 2**-11])
    cast = np.asarray(jnp.asarray(x).astype(half).astype(jnp.float32))
    np.testing.assert_array_equal(rounded(x, half), cast)


@pytest.mark.parametrize("half", HALVES)
def test_the_reference_rounds_as_a_product_with_rules_of_its_own(half):
    def less(x):
        return x.astype(half).astype(jnp.float32)

    @jax.custom_vjp
    def product(x, w):
        return less(less(x) @ less(w))

    def backwards(saved, g):
        x, w = saved
        return less(less(g) @ less(w).T), less(less(x).T @ less(g))

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backwards)

    def fun(dot, p):
        s = dot(p["x"], p["w"])
        s = dot(20 * s - 19 * s[::-1] + s.max(), p["v"])
        return jnp.stack([s, s[:, ::-1]]).max(0)

    state = np.random.RandomState(0)
    shapes = {"x": (4, 8), "w": (8, 8), "v": (8, 8)}
    p = {k: state.randint(-31, 32, shape) / 16 for k, shape in shapes.items()}
    p = jax.tree.map(jnp.float32, p)

    def both(fun):
        def pulled(p):
            result, pull = jax.vjp(fun, p)
            return result, pull(jnp.round(result * 9))[0]

        return pulled

    right = both(functools.partial(fun, product))(p)
    found = evaluate(both(as_written(functools.partial(fun, jnp.dot))), half, p)
    jax.tree.map(np.testing.assert_array_equal, found, right)


def test_without_a_product_the_reference_is_float32():
    _, truth = truth_by_name("row", "without_a_product")
    for half in HALVES:
        jax.tree.map(
            np.testing.assert_array_equal, truth.given(half), truth.given("float32")
        )


def test_what_an_autocast_leaves_as_written_is_so_in_the_reference():
    def loss(params, _):
        x, y = params["x"], params["y"]
        outer = jnp.einsum("i,j->ij", x, y)
        exact = jnp.dot(outer, outer, precision="highest")
        with jax.named_scope("head"):
            kept = exact @ exact
        return {"loss": jnp.tanh(jnp.sum(kept, 1)) + jnp.dot(x, y)}

    args = {"x": jnp.linspace(0.1, 1, 8), "y": jnp.linspace(1, 2, 8)}, 0, jnp.float32(1)
    both = with_gradients(as_written(loss, keep="head"))
    found = evaluate(both, "bfloat16", *args)
    jax.tree.map(np.testing.assert_array_equal, found, evaluate(both, "float32", *args))


# The verdict.


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", list(TABLE)[::8])
def test_another_float32_is_right(name, half):
    _, truth = truth_by_name("row", name)
    found = verdict(truth, truth.given(half, noise=99), half)
    assert not found.is_wrong, explained("row", name, half, found.lines)


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["log1p_of_a_bound", "small_steps_in_a_scan"])
def test_what_rounds_more_than_products_is_wrong(name, half):
    info = jnp.finfo(half)

    def less(x):
        return lax.reduce_precision(x, info.nexp, info.nmant)

    def bound(h, p):
        return jnp.log1p(-jnp.minimum(less(guarded_programs.chance(h)), 1 - 1e-6))

    def steps(h, p):
        def step(c, _):
            return less(c + 2e-3 * jnp.tanh(c @ p["w"])), None

        return lax.scan(step, h, length=guarded_programs.STEPS)[0]

    part = bound if name.startswith("log1p") else steps
    loss = guarded_programs.framed(part, seed=1).loss
    assert judged("row", name, half, cast=lambda *_: loss).is_wrong


@pytest.mark.parametrize("half", HALVES)
def test_so_is_what_rounds_less(half):
    """A product's result that is not rounded, or an operand."""
    (loss, params, batch), truth = truth_by_name("row", "layer_norm")

    class Less(Interpreter):
        def bind(self, equation, operands, **params):
            results = super().bind(equation, operands, **params)
            self.exact = results
            return results

        def _product(self, equation, operands):
            super()._product(equation, operands)
            return self.exact[0]

    both = with_gradients(as_written(loss))
    args = params, batch, truth.scale
    program, shape = jax.make_jaxpr(both, return_shape=True)(*args)
    results = Less(half).run(program, jax.tree.leaves(args))
    found = truth.named(jax.tree.unflatten(jax.tree.structure(shape), results))
    assert verdict(truth, found, half).is_wrong


def main():
    """Judges many programs, and prints the wrong ones, and what there was."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", metavar="FROM:TO", help="which lines of seeds.txt")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="the right ones too")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [("row", name) for name in TABLE] + [("program", name) for name in PROGRAMS]
    if asked.seeds:
        first, last = map(int, asked.seeds.split(":"))
        cases = [("seed", seed) for seed in SEEDS[first:last]]
    run = (lambda fun: fun) if asked.eager else jax.jit
    outcomes = collections.Counter()
    for kind, name in cases:
        for half in HALVES:
            try:
                found = judged(kind, name, half, run)
            except Exception as error:
                found = Verdict(f"{type(error).__name__}: {error}"[:80])
                print(f"{kind} {name}, {half}: {error}"[:400], flush=True)
            outcomes[found.said] += 1
            if found.lines and (asked.verbose or found.is_wrong):
                print(explained(kind, name, half, found.lines), flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
