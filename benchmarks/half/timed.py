"""Runs a step in float32, with `dtype=` by hand, and under `jls.autocast`, here.

Each with AdamW, without a loss scale. In each round all three take a tenth of a second.
Prints the table, and writes the figures as JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import figures, tables
from benchmarks.half.models import Model, without_params
from benchmarks.half.programs import MODELS, TINY, WAYS, run_of

BY_HAND = "by hand"
HEAD = ("model", *(f"{way}, ms" for way in WAYS), "autocast / by hand", "memory, MB")


def steps_of(model: Model, way: str, half: Any) -> figures.Steps:
    """The compiled step and its arguments: random parameters, and a random batch."""
    key = jax.random.key(0)
    words_or_images, labels = (_filled(x, key) for x in (model.inputs, model.labels))
    made = jax.jit(model.make(None).init)(key, words_or_images)
    variables = {"params": made["params"], "others": without_params(made)}
    run = run_of(model, way, half)
    step = jax.jit(run.step, donate_argnums=(0, 1))
    state = jax.jit(run.init)(variables)
    return figures.Steps(step, variables, state, (words_or_images, labels))


def _filled(shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, 0, 64, shape.dtype)
    return jax.random.normal(key, shape.shape, shape.dtype)


def measured(
    model: Model, half: Any, seconds: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """By way: the time, what it is of the time by hand, and the temporary memory."""
    ways = {way: steps_of(model, way, half) for way in WAYS}
    results: dict[str, dict[str, Any]] = {}
    for way, steps in ways.items():
        steps.seconds_per_step(2)  # warm up
        memory: Any = steps.compiled.memory_analysis()
        results[way] = {
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "compile_seconds": steps.seconds[1],
        }
    samples = figures.measure(ways, seconds, rounds, 0.1, floor=BY_HAND)
    for way, timed in figures.ratios(samples, floor=BY_HAND):
        results[way] |= timed
    return results


def row(model: str, results: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    times = [results[way]["seconds_per_step"]["median"] * 1e3 for way in WAYS]
    ratio = results["autocast"]["ratio"]
    memory = [results[way]["temporary_bytes"] / 1e6 for way in WAYS]
    cells = [
        model,
        *(f"{time:.2f}" for time in times),
        "{median:.2f} ({q1:.2f}-{q3:.2f})".format(**ratio),
        "; ".join(f"{size:,.0f}" for size in memory),
    ]
    return tables.row(cells)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what the command line asks for; returns the figures."""
    options = _parser().parse_args(arguments)
    device = jax.devices()[0].device_kind
    results: dict[str, Any] = {"device": device, "jax": jax.__version__, "models": {}}
    half = jnp.dtype(options.half)
    print(f"{device}, jax {jax.__version__}, {half.name}\n")
    print(tables.head(HEAD))
    models = TINY if options.tiny else MODELS
    for name, make in models.items():
        if options.models in name:
            one = measured(make(), half, options.seconds, options.rounds)
            results["models"][name] = one
            print(row(name, one), flush=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half.timed", description=__doc__
    )
    add = parser.add_argument
    add("--models", default="", metavar="TEXT", help="those with TEXT in their name")
    add("--half", default="bfloat16", choices=["bfloat16", "float16"])
    add("--tiny", action="store_true", help="models that compile in no time")
    add("--seconds", type=float, default=10.0, help="for each model; default: 10")
    add("--rounds", type=int, default=31, help="default: 31")
    add("--json", type=Path, default=Path("benchmarks_timed.json"), metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
