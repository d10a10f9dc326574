"""An autocast changes products and nothing else: promise 18, against `truth`.

`python tests/autocast/test_truth.py --seeds 0:200` judges many random programs, and
prints those that fail, and why others were left out.
"""

import argparse
import collections
import functools
import hashlib
import os
import warnings
from pathlib import Path

import guarded_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float32_programs import PROGRAMS
from guarded_programs import TABLE, random_program
from jax import lax
from truth import HALVES, Truth, rounded, rounding, with_gradients

import jls
from jls import _autocast

# Seeds of random programs that an autocast has got wrong once.
FAILED = ()


@functools.lru_cache(maxsize=4)
def truth_by_name(kind, name):
    program = program_by_name(kind, name)
    return program, Truth(*program)


def program_by_name(kind, name):
    if kind == "seed":
        return random_program(name)[0]
    return (TABLE if kind == "row" else PROGRAMS)[name]()


def judged(kind, name, half, run=jax.jit, cast=jls.autocast):
    """The lines of a comparison; or why there are none."""
    (loss, params, batch), truth = truth_by_name(kind, name)
    if reason := truth.why_left_out(half):
        return reason
    results = run(with_gradients(cast(loss, half)))(params, batch, truth.scale)
    return truth.compare(truth.named(results), half)


def wrong(lines):
    return [line for line in lines if not line.is_right]


def explained(kind, name, half, lines):
    """What an assertion says."""
    made_of = f" ({random_program(name)[1]})" if kind == "seed" else ""
    return "\n".join([f"{kind} {name}{made_of}, {half}:", *map(str, wrong(lines))])


def fresh_seeds(count):
    """Others for each change of the code, and the same for the same code."""
    files = [*Path(_autocast.__file__).parent.glob("*.py")]
    text = b"".join(file.read_bytes() for file in sorted(files))
    first = os.environ.get("JLS_SEED") or int(hashlib.sha256(text).hexdigest()[:6], 16)
    return [int(first) + i for i in range(count)]


def more(is_more):
    return [pytest.mark.more] * bool(is_more)


# In a normal run a row is jitted in one dtype, eager in the other; with `--all` both,
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
    pytest.param(name, half, run, marks=more(name in ALIKE or (i + j + k) % 2), id=id_)
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
# In a normal run the first 40, each in one of the two dtypes.
RANDOM = [
    pytest.param(seed, half, marks=more(i >= 40 or i % 2 != j))
    for i, seed in enumerate(fresh_seeds(200))
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
def test_a_right_program_is_off_by_what_rounding_products_explains(name, half, run):
    lines = judged("row", name, half, run)
    assert not isinstance(lines, str)
    assert not wrong(lines), explained("row", name, half, lines)


@pytest.mark.parametrize(("name", "half"), MODELS)
def test_so_is_a_model(name, half):
    lines = judged("program", name, half)
    if isinstance(lines, str):
        pytest.skip(lines)
    assert not wrong(lines), explained("program", name, half, lines)


@pytest.mark.parametrize(("seed", "half"), RANDOM)
def test_so_is_a_random_program(seed, half):
    lines = judged("seed", seed, half)
    JUDGED.append(not isinstance(lines, str))
    if isinstance(lines, str):
        pytest.skip(lines)
    assert not wrong(lines), explained("seed", seed, half, lines)


def test_most_random_programs_are_judged():
    if len(JUDGED) < 20:
        pytest.skip("few of them ran in this process")
    assert np.mean(JUDGED) > 0.6


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("seed", FAILED)
def test_so_is_a_random_program_that_once_was_not(seed, half):
    lines = judged("seed", seed, half)
    if isinstance(lines, str):
        pytest.skip(lines)
    assert not wrong(lines), explained("seed", seed, half, lines)


# The reference.


@pytest.mark.parametrize("half", HALVES)
def test_to_nearest_is_what_a_cast_does(half):
    state = np.random.RandomState(0)
    x = state.randn(4000) * 10.0 ** state.randint(-9, 6, 4000)
    x = np.float32([*x, 0.0, -0.0, np.inf, np.nan, 65504, 65519, 65520, 1 + 2**-11])
    cast = np.asarray(jnp.asarray(x).astype(half).astype(jnp.float32))
    np.testing.assert_array_equal(rounded(jnp.asarray(x), rounding(half)), cast)


@pytest.mark.parametrize("half", HALVES)
def test_dithered_is_either_neighbour_and_right_on_average(half):
    x = jnp.asarray(np.random.RandomState(0).uniform(1, 2, 4000), jnp.float32)
    found = np.stack([rounded(x, rounding(half, seed)) for seed in range(1, 33)])
    unit = float(jnp.finfo(half).eps)
    assert np.all(np.abs(found - x) < unit)
    np.testing.assert_array_equal(found, jnp.asarray(found).astype(half))
    assert np.mean(found[0] != found[1]) > 0.2
    assert abs(np.mean(found - x)) < 0.01 * unit


@pytest.mark.parametrize("half", HALVES)
def test_the_reference_rounds_as_a_program_by_hand(half):
    def loss(dot, params):
        y = dot(jnp.tanh(dot(params["x"], params["w"])), params["v"])
        return jnp.mean(y**2, -1)

    def by_hand(a, b):
        return (a.astype(half) @ b.astype(half)).astype(jnp.float32)

    program = TABLE["silu"]()
    params = {"x": program.params["x"], "w": program.params["in"][0]}
    params["v"] = program.params["out"]
    truth = Truth(lambda params, _: {"loss": loss(jnp.dot, params)}, params, None)
    fun = with_gradients(lambda params, _: {"loss": loss(by_hand, params)})
    found = truth.named(fun(params, None, truth.scale))
    ((reference, _),) = truth.runs(half, [0])
    for name, right in reference.items():
        # Sums in another order may round otherwise once.
        np.testing.assert_allclose(
            found[name], right, atol=float(jnp.finfo(half).eps) * np.abs(right).max()
        )
        if name in truth.given:
            scaled = jnp.asarray(right * float(truth.scale), jnp.float32)
            np.testing.assert_array_equal(scaled.astype(half), scaled)
    gradients = {f"['gradient']['{x}']" for x in params}
    assert truth.given == gradients


def test_without_a_product_the_reference_is_float32():
    _, truth = truth_by_name("row", "without_a_product")
    for half in HALVES:
        assert set(truth.errors(half).values()) == {0.0}


def test_what_an_autocast_leaves_as_written_is_so_in_the_reference():
    def loss(params, _):
        x, y = params["x"], params["y"]
        outer = jnp.einsum("i,j->ij", x, y)
        exact = jnp.dot(outer, outer, precision="highest")
        return {"loss": jnp.tanh(jnp.sum(exact, 1)) + jnp.dot(x, y)}

    truth = Truth(loss, {"x": jnp.linspace(0.1, 1, 8), "y": jnp.linspace(1, 2, 8)}, 0)
    assert set(truth.errors("bfloat16").values()) == {0.0}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", list(TABLE)[::8])
def test_other_roundings_of_products_are_right(name, half):
    _, truth = truth_by_name("row", name)
    ((found, _),) = truth.runs(half, [11])
    assert not wrong(truth.compare(found, half))


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
    lines = judged("row", name, half, cast=lambda *_: loss)
    found = {line.name for line in wrong(lines)}
    assert {"['result']['loss']", "['result']['before']"} <= found


def main():
    """Judges many programs, and prints the wrong ones, and what there was."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", metavar="FROM:TO", help="random programs")
    parser.add_argument("--eager", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = [("row", name) for name in TABLE] + [("program", name) for name in PROGRAMS]
    if asked.seeds:
        first, last = map(int, asked.seeds.split(":"))
        cases = [("seed", seed) for seed in range(first, last)]
    run = (lambda fun: fun) if asked.eager else jax.jit
    outcomes = collections.Counter()
    for kind, name in cases:
        for half in HALVES:
            lines = judged(kind, name, half, run)
            if isinstance(lines, str):
                outcomes[f"left out: {lines}"] += 1
            elif wrong(lines):
                outcomes["wrong"] += 1
                print(explained(kind, name, half, lines), flush=True)
            else:
                outcomes["right"] += 1
    for outcome, count in outcomes.most_common():
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
