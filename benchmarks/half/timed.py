"""Runs a step in float32, with `dtype=` by hand, and under `jls.autocast`, here.

Wide models run under `jls.autocast` to bfloat16, and to float8. Each with AdamW,
without a loss scale. In each round each takes a tenth of a second.
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
from benchmarks.half.programs import MODELS, TINY, WIDE, run_of, ways_of


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
    model: Model, names: Sequence[str], half: Any, seconds: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """By way: the time, what it is of the last but one, and the temporary memory."""
    ways = {way: steps_of(model, way, half) for way in names}
    results: dict[str, dict[str, Any]] = {}
    for way, steps in ways.items():
        steps.seconds_per_step(2)  # warm up
        memory: Any = steps.compiled.memory_analysis()
        results[way] = {
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "compile_seconds": steps.seconds[1],
        }
    samples = figures.measure(ways, seconds, rounds, 0.1, floor=names[-2])
    for way, timed in figures.ratios(samples, floor=names[-2]):
        results[way] |= timed
    return results


def head(ways: Sequence[str]) -> str:
    """The head of the table of models that run in these ways."""
    times = [f"{way}, ms" for way in ways]
    return tables.head(["model", *times, f"{ways[-1]} / {ways[-2]}", "memory, MB"])


def row(model: str, results: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    ways = [*results.values()]
    times = [one["seconds_per_step"]["median"] * 1e3 for one in ways]
    ratio = ways[-1]["ratio"]
    memory = [one["temporary_bytes"] / 1e6 for one in ways]
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
    print(f"{device}, jax {jax.__version__}, {half.name}")
    made = TINY if options.tiny else MODELS | WIDE
    for models in (MODELS, WIDE):
        chosen = [name for name in models if options.models in name]
        if chosen:
            print(f"\n{head(ways_of(chosen[0]))}")
        for name in chosen:
            one = measured(
                made[name](), ways_of(name), half, options.seconds, options.rounds
            )
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
