"""Trains a transformer on text, in float32, in five ways in half precision, in float8.

Bytes of the modules of Python's standard library, in one order; the last hundredth is
for validation. In float16 with `jls.dynamic()`, and without a loss scale; in bfloat16
and float8 with `jls.skip_nonfinite`. Float8 is for larger models; here products of any
size take it. Prints the loss on the validation, which is computed in
float32, as training goes on, the steps a second and the temporary memory of a step.
"""

import argparse
import json
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls
from benchmarks.half.models import Model, transformer
from jls._autocast import float8

BYTES = 256


class Way(NamedTuple):
    """The dtype on the layers, and that of the autocast."""

    dtype: Any = None
    compute_dtype: Any = None
    is_scaled: bool = True  # if it is float16

    @property
    def half(self) -> Any:
        """What it computes in, or None."""
        return self.dtype or self.compute_dtype


WAYS = {
    "float32": Way(),
    "bfloat16 by hand": Way(dtype=jnp.bfloat16),
    "bfloat16 autocast": Way(compute_dtype=jnp.bfloat16),
    "float16 by hand": Way(dtype=jnp.float16),
    "float16 autocast": Way(compute_dtype=jnp.float16),
    "float16 without a scale": Way(compute_dtype=jnp.float16, is_scaled=False),
    "float8 autocast": Way(compute_dtype=jnp.float8_e4m3fn),
}


class Size(NamedTuple):
    """Width, layers and heads; batch and length; for how many batches one validates."""

    shape: tuple[int, int, int] = (384, 6, 6)
    tokens: tuple[int, int] = (32, 512)
    validated: int = 8


SIZES = {
    "gpu": Size(),
    "cpu": Size((128, 2, 4), (8, 64), 64),
    "million": Size((192, 2, 6), (8, 64), 64),  # of parameters
    "tiny": Size((16, 1, 2), (2, 16), 1),
}


def text(*without: str) -> np.ndarray:
    """The bytes of all modules of the standard library, without tests and folders."""
    folder = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "test", "tests", *without}
    files = [
        path
        for path in folder.rglob("*.py")
        if not others & {*path.relative_to(folder).parts}
    ]
    ordered = sorted(files, key=lambda path: str(path.relative_to(folder)))
    # Neighbours in one folder are alike: what is held back comes from all.
    shuffled = np.random.default_rng(0).permutation(len(ordered))
    joined = b"\n".join(ordered[i].read_bytes() for i in shuffled)
    return np.frombuffer(joined, np.uint8)


def batches(
    data: np.ndarray, tokens: tuple[int, int], seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bytes and the bytes that follow them, from random places, for ever."""
    random = np.random.default_rng(seed)
    count, length = tokens
    while True:
        starts = random.integers(0, len(data) - length - 1, count)
        rows = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        yield rows[:, :-1], rows[:, 1:]


def losses(
    model: Model, way: Way, data: np.ndarray, size: Size, steps: int, seed: int
) -> dict[str, Any]:
    """The loss on the validation, ten times in one run, and what a step costs."""
    held = len(data) // 100
    seen, unseen = data[:-held], data[-held:]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20 + 1, steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    is_scaled = way.half == jnp.float16 and way.is_scaled
    optimizer: Any = (jls.loss_scaled if is_scaled else jls.skip_nonfinite)(inner)

    def loss_of(params, batch, dtype):
        loss, _ = model.loss(dtype)(params, {}, batch)
        return loss

    loss_fn = partial(loss_of, dtype=way.dtype)
    step = jls.train_step(loss_fn, optimizer, compute_dtype=way.compute_dtype)
    step = jax.jit(step, donate_argnums=(0, 1))
    validate: Callable[..., Any] = jax.jit(partial(loss_of, dtype=None))
    fixed = batches(unseen, size.tokens, 0)
    checks = [next(fixed) for _ in range(size.validated)]
    made = jax.jit(model.make(None).init)(jax.random.key(seed), checks[0][0])
    params, opt_state = made["params"], jax.jit(optimizer.init)(made["params"])
    results: dict[str, Any] = {"seed": seed, "steps": [], "losses": []}
    fed = batches(seen, size.tokens, seed)
    with warnings.catch_warnings(action="ignore", category=jls.JlsWarning):
        lowered = step.lower(params, opt_state, next(fed))  # warns of no loss scale
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    spent, start = 0.0, time.perf_counter()
    for i in range(1, steps + 1):
        params, opt_state, _ = compiled(params, opt_state, next(fed))
        if i % max(1, steps // 10) == 0:
            jax.block_until_ready(params)
            spent += time.perf_counter() - start
            found = [float(validate(params, check)) for check in checks]
            results["steps"].append(i)
            results["losses"].append(float(np.mean(found)))
            start = time.perf_counter()
    return results | {
        "health": str(jls.health(opt_state, params)),
        "steps_per_second": results["steps"][-1] / spent,
        "temporary_bytes": int(memory.temp_size_in_bytes),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One row for each way and seed."""
    (first, *_), *_ = results.values()
    heads = ("way", "seed", *(f"step {step:,}" for step in first["steps"]))
    rows = [heads, ("---", *["--:"] * (len(heads) - 1))]
    for way, runs in results.items():
        for run in runs:
            rows.append(
                (way, f"{run['seed']}", *(f"{loss:.4f}" for loss in run["losses"]))
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains each way with each seed; returns the losses."""
    options = _parser().parse_args(arguments)
    device = jax.default_backend()
    size = SIZES[options.size or ("cpu" if device == "cpu" else "gpu")]
    model = transformer("scan", (BYTES, *size.shape), size.tokens)
    data = text()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {len(data):,} bytes")
    results: dict[str, Any] = {}
    for seed in options.seeds:
        for name in options.ways:
            with mock.patch.object(float8, "LEAST", 16):
                one = losses(model, WAYS[name], data, size, options.steps, seed)
            results.setdefault(name, []).append(one)
            cost = f"{one['steps_per_second']:.1f} steps a second"
            memory = f"{one['temporary_bytes'] / 1e9:.2f} GB"
            last = f"{one['losses'][-1]:.4f}"
            print(f"{name}, seed {seed}: {last}, {cost}, {memory}", flush=True)
            print(f"  {one['health'].splitlines()[0]}", flush=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    if options.plot:
        from benchmarks.half import plot  # it takes a second to import matplotlib

        plot.save_training(results, options.plot)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half.training", description=__doc__
    )
    add = parser.add_argument
    add("--steps", type=int, default=3000, help="default: 3000")
    add("--seeds", type=int, nargs="+", default=[0, 1], help="default: 0 1")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    add("--size", choices=list(SIZES), help="default: that of the device")
    add("--json", type=Path, default=Path("benchmarks_training.json"), metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="draw no picture by default")
    return parser


if __name__ == "__main__":
    main()
