"""Figures of a step that is compiled for a target, and not run."""

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.contestants import ALL, Rules, Run
from benchmarks.hlo import Program
from benchmarks.placement import Placement
from benchmarks.targets import Target
from benchmarks.workloads import Problem, Workload

TRACES = 3  # the fastest counts


def abstract(make: Callable[[], Problem]) -> Problem:
    """The problem with shapes in the place of arrays, which need no memory."""
    loss_fns = []

    def arrays():
        problem = make()
        loss_fns.append(problem.loss_fn)
        return problem.params, problem.good, problem.bad

    params, good, bad = jax.eval_shape(arrays)
    return Problem(params, loss_fns[0], good, bad)


def compile_step(
    workload: Workload, name: str, problem: Problem, target: Target, where: Placement
) -> dict[str, Any]:
    """One contestant on one workload, compiled as its first step would be.

    Seconds are CPU time, of all threads: what else the machine does hardly counts.
    """
    make = (workload.contestants or ALL)[name]
    run = make(workload.optimizer, problem.loss_fn, Rules())
    batch = problem.good
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jls warns of narrow parameters
        state = jax.eval_shape(run.init, problem.params)
        args = (
            where.sharded(problem.params),
            where.sharded(state),
            where.sharded_batch(batch),
        )
        lowered, traced = _traced(run, args)
        start = time.process_time()
        compiled = lowered.compile()
        seconds = time.process_time() - start
    program = _program(compiled)
    counted = program.bytes if program else 0
    cost: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    figures = {
        # Where the compiler does not say, the program does.
        "bytes_accessed": int(cost.get("bytes accessed", 0)) or counted,
        "kernels": program.kernels if program else None,
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "total_bytes": int(total),
        "collectives": program.collectives if program else {},
        "trace_seconds": traced,
        "compile_seconds": seconds,
    }
    if total > target.memory:
        figures["too_large_by"] = int(total - target.memory)
    return figures


def warm_up(where: Placement) -> None:
    """Compiles for nothing: the first time also pays for loading the compiler."""
    x = where.sharded(jax.ShapeDtypeStruct((1024, 1024), jnp.float32))
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()


def _traced(run: Run, args: Any) -> tuple[Any, float]:
    """The step, lowered, and the seconds that takes when nothing is cached."""
    seconds, lowered = [], None
    shardings = jax.tree.map(lambda leaf: leaf.sharding, args[:2])
    for _ in range(TRACES):
        # A new jit each time, and none of what JAX remembers of the last.
        step = jax.jit(
            run.step, donate_argnums=(0, 1), out_shardings=(*shardings, None)
        )
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        lowered = step.lower(*args)
        seconds.append(time.process_time() - start)
        if sum(seconds) > 10.0:
            break
    return lowered, min(seconds)


def _program(compiled: Any) -> Program | None:
    """None where libtpu is newer than jaxlib, which then cannot read some programs."""
    try:
        return Program(compiled.as_text() or "")
    except jax.errors.JaxRuntimeError:
        if not compiled.cost_analysis():
            raise
        return None
