# SPDX-License-Identifier: Apache-2.0
"""`python -m jls doctor`: what this machine does well, as measured."""

import functools
import os
import textwrap
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jls._reduce import all_finite
from jls._scale import value_and_grad
from jls._tree import select
from jls._wrapper import loss_scaled

# By how much a 16-bit matrix product has to be faster to be worth it.
WORTH_IT = 1.3

# How often a wrapped step is timed against a bare one.
TURNS = 7

NOT_OK = (
    "Something that jls relies on does not hold here: look for fast-math in XLA_FLAGS, "
    "and do not trust jls until it does."
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
    on_cpu = jax.default_backend() == "cpu"
    speeds = _matmul_speeds(384 if on_cpu else 4096)
    checks = _checks()
    overheads = _step_overheads(128 if on_cpu else 2048)
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_gflops": speeds,
        "checks": checks,
        "step_overhead": median(overheads),
        "step_overhead_range": [min(overheads), max(overheads)],
        "advice": advice(speeds),
        "ok": all(checks.values()),
    }


def advice(speeds: dict[str, float]) -> str:
    """Which dtype to use, in one sentence."""
    gains = {name: speed / speeds["float32"] for name, speed in speeds.items()}
    if gains["bfloat16"] >= max(WORTH_IT, 0.8 * gains["float16"]):
        return (
            "Train in bfloat16 with jls.skip_nonfinite: it is fast here and needs no "
            "loss scale."
        )
    if gains["float16"] >= WORTH_IT:
        return (
            "Train in float16 with jls.loss_scaled: it is fast here, and bfloat16 is "
            "not."
        )
    return (
        "Train in float32 with jls.skip_nonfinite: neither 16-bit format is much "
        "faster here. (They still halve the memory.)"
    )


def report(findings: dict[str, Any]) -> str:
    """The findings for a person to read."""
    speeds = findings["matmul_gflops"]
    kinds = findings["devices"]
    lines = [
        f"jax {findings['jax']} on {findings['backend']}: "
        f"{len(kinds)} x {', '.join(sorted(set(kinds)))}",
        f"XLA_FLAGS: {findings['xla_flags'] or 'none'}",
        "",
        "How fast a matrix product is",
    ]
    for name, speed in speeds.items():
        ratio = speed / speeds["float32"]
        lines.append(f"  {name:9} {speed:10.0f} GFLOP/s   {ratio:5.2f} x float32")
    lines += ["", "What jls relies on, inside jit"]
    for name, holds in findings["checks"].items():
        lines.append(f"  {'yes' if holds else 'NO ':4} {name}")
    low, high = findings["step_overhead_range"]
    overhead = (
        f"A wrapped train step took about {findings['step_overhead']:.2f} x the time "
        f"of a bare one ({low:.2f} to {high:.2f} in {TURNS} turns; five small layers, "
        "adamw)."
    )
    lines += [
        "",
        textwrap.fill(overhead, 80),
        "",
        textwrap.fill(findings["advice"], 80),
    ]
    if not findings["ok"]:
        lines += ["", textwrap.fill(NOT_OK, 80)]
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


def _matmul_speeds(size: int) -> dict[str, float]:
    """Billions of operations per second, by dtype; measured in turns."""
    product = jax.jit(lambda x: x @ x)
    matrices = {
        name: jnp.ones((size, size), name)
        for name in ("float32", "bfloat16", "float16")
    }
    times = {name: [] for name in matrices}
    for _ in range(5):
        for name, matrix in matrices.items():
            times[name].append(_seconds(lambda matrix=matrix: product(matrix)))
    return {name: 2 * size**3 / min(taken) / 1e9 for name, taken in times.items()}


def _step_overheads(width: int) -> list[float]:
    """The time of a wrapped step relative to a bare one, in each of the turns."""
    bare, wrapped = (_step_of(width, is_wrapped) for is_wrapped in (False, True))
    return [_seconds(wrapped, 3) / _seconds(bare, 3) for _ in range(TURNS)]


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
    """How long a compiled call takes; the shortest of several."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
