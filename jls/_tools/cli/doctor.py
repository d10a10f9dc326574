# SPDX-License-Identifier: Apache-2.0
"""`python -m jls doctor`: measures which dtype suits this machine."""

import os
import platform
import textwrap
import time
from importlib import metadata
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jls._autocast.float8 import LEAST, has_float8
from jls._reduce import all_finite
from jls._tree import select

# A 16-bit matrix product has to be this much faster to be worth its lost precision.
WORTH_IT = 1.3

# The number of rounds of measurements. In each, every dtype takes its turn.
TURNS = 25

# bfloat16 may be this much slower than float16, since it needs no loss scale.
NEAR = 0.85

NOT_OK = "Look for fast-math in XLA_FLAGS, and do not trust jls until all of it holds."
NO_ACCELERATOR = "JAX has no GPU or TPU here: run this again where you train."

CHECKS = (
    *(f"{x} is seen" for x in ("an inf", "a NaN", "a float16 overflow")),
    "finite numbers are called finite",
    "a select keeps a NaN out",
    "powers of two scale exactly",
)


def examine() -> dict[str, Any]:
    """All findings, ready for JSON."""
    backend = jax.default_backend()
    # Large enough that starting the product does not count.
    size = {"cpu": 384, "gpu": 8192}.get(backend, 4096)
    speeds = _matmul_speeds(size)
    checks = _checks()
    return {
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "python": platform.python_version(),
        "system": platform.platform(),
        "backend": backend,
        "devices": [device.device_kind for device in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_size": size,
        "matmul_gflops": speeds,
        "checks": checks,
        "advice": advice(speeds),
        "write": lines_to_write(*choose(speeds)),
        "ok": all(checks.values()),
    }


def choose(speeds: dict[str, float]) -> tuple[str, str]:
    """The dtype to train in, and jls's wrapper for it."""
    if max(speeds.values()) < WORTH_IT * speeds["float32"]:
        return "float32", "jls.skip_nonfinite"
    if speeds["bfloat16"] >= NEAR * speeds["float16"]:
        return "bfloat16", "jls.skip_nonfinite"
    return "float16", "jls.loss_scaled"


def advice(speeds: dict[str, float]) -> str:
    """The recommendation, in a sentence with its reason."""
    dtype, wrapper = choose(speeds)
    bfloat16, float16 = (speeds[x] / speeds["float32"] for x in ("bfloat16", "float16"))
    text = (
        f"Train in {dtype} with {wrapper}: bfloat16 runs at {bfloat16:.1f} x the speed "
        f"of float32 here, float16 at {float16:.1f} x."
    )
    if dtype == "bfloat16" and has_float8():
        text += f" A model {LEAST} wide or more may be faster in float8_e4m3fn."
    return text


def lines_to_write(dtype: str, wrapper: str) -> str:
    """The code that trains a float32 model in a dtype."""
    cast = f",\n                      compute_dtype=jnp.{dtype}"
    arguments = "loss_fn, optimizer" + (cast if dtype != "float32" else "")
    return f"optimizer = {wrapper}(optimizer)\nstep = jls.train_step({arguments})"


def report(findings: dict[str, Any], width: int = 80) -> str:
    """The findings for a person to read, in `width` columns, at least 52."""
    size, speeds = findings["matmul_size"], findings["matmul_gflops"]
    kinds = findings["devices"]
    where = f"{findings['backend']}: {len(kinds)} x {', '.join(sorted(set(kinds)))}"
    lines = [
        f"jls {findings['jls']}, jax {findings['jax']} on {where}",
        f"XLA_FLAGS: {findings['xla_flags'] or 'none'}",
        "",
        f"Matrix product ({size} x {size}, median of {TURNS})",
    ]
    for name, speed in speeds.items():
        times = f"{speed / speeds['float32']:7.2f} x float32"
        lines.append(f"  {name:8} {speed:9.0f} GFLOP/s  {times}")
    lines += ["", "What jls relies on, inside jit"]
    for name, holds in findings["checks"].items():
        lines.append(f"  {'yes' if holds else 'NO ':4} {name}")
    closing = [NO_ACCELERATOR] * (findings["backend"] == "cpu") + [findings["advice"]]
    for text in closing + [NOT_OK] * (not findings["ok"]):
        lines += ["", textwrap.fill(text, width)]
    lines += ["", "Write:", textwrap.indent(findings["write"], "  ")]
    return "\n".join(lines)


def _checks() -> dict[str, bool]:
    @jax.jit
    def look(large, zeros, half):
        inf, nan, overflowed = large * 10, zeros / zeros, half + half
        seen = [~all_finite(x) for x in (inf, nan, overflowed)]
        is_kept_out = all_finite(select(False, nan, zeros))
        is_exact = jnp.all(large * 2.0**-20 / 2.0**-20 == large)
        return [*seen, all_finite((large, zeros, half)), is_kept_out, is_exact]

    large, half = jnp.array([3e38, 1.0]), jnp.full(2, 6e4, jnp.float16)
    return dict(zip(CHECKS, map(bool, look(large, jnp.zeros(2), half)), strict=True))


def _matmul_speeds(size: int) -> dict[str, float]:
    """Billions of operations per second by dtype, the median of turns."""
    product = jax.jit(lambda x: x @ x)
    seconds = {name: list[float]() for name in ("float32", "bfloat16", "float16")}
    for _ in range(TURNS):
        for name, times in seconds.items():
            matrix = jnp.ones((size, size), name)
            jax.block_until_ready(product(matrix))  # compiled, once
            start = time.perf_counter()
            jax.block_until_ready(product(matrix))
            # At least the resolution of the clock.
            times.append(max(time.perf_counter() - start, 1e-9))
    return {name: 2 * size**3 / median(x) / 1e9 for name, x in seconds.items()}
