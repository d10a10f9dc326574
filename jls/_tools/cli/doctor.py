# SPDX-License-Identifier: Apache-2.0
"""`python -m jls doctor`: measures which dtype suits this machine."""

import functools
import os
import platform
import textwrap
import time
from collections.abc import Callable
from importlib import metadata
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jls._reduce import all_finite
from jls._scale import value_and_grad
from jls._tree import select
from jls._wrapper import loss_scaled

# A 16-bit matrix product has to be this much faster to be worth its lost precision.
WORTH_IT = 1.3

# The number of rounds of measurements. In each, everything takes its turn.
TURNS = 7

# bfloat16 may be this much slower than float16, since it needs no loss scale.
NEAR = 0.85

NOT_OK = (
    "Something that jls relies on does not hold here: look for fast-math in XLA_FLAGS, "
    "and do not trust jls until it does."
)

NO_ACCELERATOR = (
    "JAX has no GPU or TPU here, so run this again where you train. As a rule, train "
    "in float16 with jls.loss_scaled on a T4, V100 or RTX 20, and in bfloat16 with "
    "jls.skip_nonfinite on TPUs and newer GPUs."
)

CHECKS = (
    "an inf is seen",
    "a NaN is seen",
    "a float16 overflow is seen",
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
    medians = {name: median(turns) for name, turns in speeds.items()}
    checks = _checks()
    # Wide enough that starting the step does not count.
    overheads = _step_overheads(128 if backend == "cpu" else 2048)
    dtype, wrapper = choose(medians)
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "optax": optax.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "backend": backend,
        "devices": [device.device_kind for device in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_size": size,
        "matmul_gflops": medians,
        "matmul_gflops_range": {
            name: [min(turns), max(turns)] for name, turns in speeds.items()
        },
        "checks": checks,
        "step_overhead": median(overheads),
        "step_overhead_range": [min(overheads), max(overheads)],
        "dtype": dtype,
        "wrapper": wrapper,
        "advice": advice(medians),
        "write": lines_to_write(dtype, wrapper),
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
    bfloat16, float16 = (
        f"{speeds[name] / speeds['float32']:.1f} x" for name in ("bfloat16", "float16")
    )
    reason = {
        "float32": f"bfloat16 runs at {bfloat16} its speed here, float16 at {float16}. "
        "(Either halves the memory of activations.)",
        "bfloat16": f"it runs at {bfloat16} the speed of float32 here, and needs no "
        "loss scale.",
        "float16": f"it runs at {float16} the speed of float32 here, bfloat16 at "
        f"{bfloat16}.",
    }
    return f"Train in {dtype} with {wrapper}: {reason[dtype]}"


def lines_to_write(dtype: str, wrapper: str) -> str:
    """The code that trains a float32 model in a dtype."""
    wrap = f"optimizer = {wrapper}(optimizer)\n"
    if dtype == "float32":
        return f"{wrap}step = jls.train_step(loss_fn, optimizer)"
    return (
        f"{wrap}step = jls.train_step(loss_fn, optimizer,\n"
        f"                      compute_dtype=jnp.{dtype})"
    )


def report(findings: dict[str, Any], width: int = 80) -> str:
    """The findings for a person to read, in `width` columns, at least 52."""
    size, speeds = findings["matmul_size"], findings["matmul_gflops"]
    kinds = findings["devices"]
    lines = [
        f"jls {findings['jls']}, jax {findings['jax']} on {findings['backend']}: "
        f"{len(kinds)} x {', '.join(sorted(set(kinds)))}",
        f"XLA_FLAGS: {findings['xla_flags'] or 'none'}",
        "",
        f"Matrix product in GFLOP/s ({size} x {size}, {TURNS} rounds)",
        f"  {'':8} {'median':>9}  {'lowest to highest':^19}  x float32",
    ]
    for name, speed in speeds.items():
        low, high = findings["matmul_gflops_range"][name]
        ratio = speed / speeds["float32"]
        lines.append(
            f"  {name:8} {speed:9.0f}  {low:8.0f} to {high:<7.0f}  {ratio:9.2f}"
        )
    lines += ["", "What jls relies on, inside jit"]
    for name, holds in findings["checks"].items():
        lines.append(f"  {'yes' if holds else 'NO ':4} {name}")
    low, high = findings["step_overhead_range"]
    overhead = (
        f"A wrapped train step took about {findings['step_overhead']:.2f} x the time "
        f"of a bare one ({low:.2f} to {high:.2f} in {TURNS} rounds; five small layers, "
        "adamw)."
    )
    closing = [overhead]
    if findings["backend"] == "cpu":
        closing.append(NO_ACCELERATOR)
    closing.append(findings["advice"])
    if not findings["ok"]:
        closing.append(NOT_OK)
    for text in closing:
        lines += ["", textwrap.fill(text, width)]
    lines += ["", "Write:", textwrap.indent(findings["write"], "  ")]
    return "\n".join(lines)


def _checks() -> dict[str, bool]:
    large = jnp.array([3e38, 1.0])
    zeros = jnp.zeros(2)
    half = jnp.full(2, 6e4, jnp.float16)

    @jax.jit
    def look(large, zeros, half):
        inf, nan, overflowed = large * 10, zeros / zeros, half + half
        return {
            "an inf is seen": ~all_finite(inf),
            "a NaN is seen": ~all_finite(nan),
            "a float16 overflow is seen": ~all_finite(overflowed),
            "finite numbers are called finite": all_finite((large, zeros, half)),
            "a select keeps a NaN out": all_finite(select(False, nan, zeros)),
            "powers of two scale exactly": jnp.all(
                large * 2.0**-20 / 2.0**-20 == large
            ),
        }

    holds = jax.device_get(look(large, zeros, half))
    return {name: bool(holds[name]) for name in CHECKS}


def _matmul_speeds(size: int) -> dict[str, list[float]]:
    """Billions of operations per second, by dtype, in each of the turns."""
    product = jax.jit(lambda x: x @ x)
    matrices = {
        name: jnp.ones((size, size), name)
        for name in ("float32", "bfloat16", "float16")
    }
    speeds = {name: [] for name in matrices}
    for _ in range(TURNS):
        for name, matrix in matrices.items():
            seconds = _seconds(lambda matrix=matrix: product(matrix))
            speeds[name].append(2 * size**3 / seconds / 1e9)
    return speeds


def _step_overheads(width: int) -> list[float]:
    """The time of a wrapped step relative to a bare one, in each of the turns."""
    bare, wrapped = (_step_of(width, is_wrapped) for is_wrapped in (False, True))
    return [_seconds(wrapped) / _seconds(bare) for _ in range(TURNS)]


def _step_of(width: int, is_wrapped: bool) -> Callable[[], Any]:
    """A jitted train step of a small network, with donated state; call it to run it."""
    optimizer = optax.adamw(1e-3)
    optimizer = loss_scaled(optimizer) if is_wrapped else optimizer
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    carry = params, optimizer.init(params)
    batch = jax.random.normal(keys[0], (4 * width, width))

    def loss_fn(params):
        x = batch
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean(x**2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        if is_wrapped:
            loss, grads = value_and_grad(loss_fn)(state, params)
            updates, state = optimizer.update(grads, state, params, value=loss)
        else:
            grads = jax.grad(loss_fn)(params)
            updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def call():
        nonlocal carry
        carry = step(*carry)
        return carry

    return call


def _seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of several calls, once the function is compiled."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return max(median(times), 1e-9)  # the resolution of the clock
