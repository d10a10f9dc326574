"""Figures of a step: read from the compiled program, and measured."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import contestants
from benchmarks.contestants import FLOOR, Rules
from benchmarks.hlo import Program
from benchmarks.workloads import Problem, Workload

LEAST_ROUNDS = 5  # even when time is short


class Steps:
    """A step that is compiled, and then taken again and again."""

    def __init__(self, step: Any, params: Any, state: Any, batch: Any, cycle: int = 1):
        # Copies, since donation destroys its arguments.
        self.params = jax.tree.map(jnp.copy, params)
        self.state, self.batch, self.cycle = state, batch, cycle
        start = time.perf_counter()
        lowered = step.lower(self.params, self.state, self.batch)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        self.seconds = traced - start, time.perf_counter() - traced

    def seconds_per_step(self, cycles: int) -> float:
        """Times whole cycles, until the last result is there."""
        params, state, loss = self.params, self.state, None
        steps = cycles * self.cycle
        start = time.perf_counter()
        for _ in range(steps):
            params, state, loss = self.compiled(params, state, self.batch)
        jax.block_until_ready((params, state, loss))
        elapsed = time.perf_counter() - start
        self.params, self.state = params, state
        return elapsed / steps


class Contest(Steps):
    """One contestant on one workload."""

    def __init__(self, workload: Workload, name: str, problem: Problem):
        make = contestants.ALL[name]
        run = make(workload.optimizer, problem.loss_fn, Rules())
        sharding = jax.tree.leaves(problem.params)[0].sharding
        state = jax.device_put(run.init(problem.params), sharding)
        step = jax.jit(run.step, donate_argnums=(0, 1), out_shardings=sharding)
        super().__init__(step, problem.params, state, problem.good, workload.cycle)

    def figures(self) -> dict[str, Any]:
        """The figures that need no run."""
        cost: Any = self.compiled.cost_analysis()
        memory: Any = self.compiled.memory_analysis()
        program = Program(self.compiled.as_text() or "")
        return {
            "bytes_accessed": int(cost["bytes accessed"]),
            "temporary_bytes": int(memory.temp_size_in_bytes),
            "peak_bytes": int(memory.peak_memory_in_bytes),
            "kernels": program.kernels,
            "trace_seconds": self.seconds[0],
            "compile_seconds": self.seconds[1],
        }


def measure(
    contests: Mapping[str, Steps],
    seconds: float,
    max_rounds: int,
    sample: float,
    floor: str = FLOOR,
) -> dict[str, list[float]]:
    """Seconds per step of each contestant, in rounds; each steps once in each round.

    Neighbours in time are compared with each other, so that a machine that is slow for
    a while is slow for all. The order changes from round to round.
    """
    base = contests[floor]
    cycles = round(sample / (base.seconds_per_step(1) * base.cycle))
    names, samples = list(contests), {name: [] for name in contests}
    start = time.perf_counter()
    for i in range(max_rounds):
        if i >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(contests[name].seconds_per_step(max(1, cycles)))
    return samples


def spread(values: list[float]) -> dict[str, float]:
    """The median and the quartiles: half of all values lie between these."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def ratios(
    samples: dict[str, list[float]], floor: str = FLOOR
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The time of each contestant and how it compares, pair by pair, with the floor."""
    base = samples[floor]
    for name, values in samples.items():
        pairs = list(zip(values, base, strict=True))
        yield (
            name,
            {
                "rounds": len(values),
                "seconds_per_step": spread(values),
                "ratio": spread([value / least for value, least in pairs]),
            },
        )
