"""Compiles workloads and contestants for targets; runs nothing."""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import target_report
from benchmarks.compiled import abstract, compile_step, warm_up
from benchmarks.contestants import ALL
from benchmarks.placement import MESHES, Placement, whole
from benchmarks.target_workloads import SIZE, TINY, target_workloads
from benchmarks.targets import TARGETS, MissingCompilerError, Target
from benchmarks.workloads import Workload

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "flax", "jls")
# What is compiled for many chips.
MANY_CHIPS = ("adamw", "clip + adamw")


def run_all(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The figures by target; those whose compiler is missing are left out."""
    missing = None
    results: dict[str, Any] = {}
    for target in chosen_targets(options):
        try:
            target.check()
        except MissingCompilerError as error:
            missing = error
            if options.target == "all":
                print(f"Skipped {error}")
            continue
        where = path_for(options.json, target.name, options)
        one = results[target.name] = run(target, options, names, where)
        if one["workloads"]:
            print(*target_report.tables(one), sep="\n\n")
            print(*target_report.lines(one), sep="\n")
            print(f"Figures: {where}")
    if missing and not results:
        raise missing
    return results


def chosen_targets(options: argparse.Namespace) -> list[Target]:
    """All, or the one that was named."""
    names = TARGETS if options.target == "all" else [options.target]
    return [TARGETS[name] for name in names]


def path_for(given: Path | None, target: str, options: argparse.Namespace) -> Path:
    """The path given; with the target's name if there are several, or none is given.

    Many chips have a file of their own, which leaves the figures of one chip alone.
    """
    if given and options.target != "all":
        return given
    path = given or Path("benchmarks.json")
    chips = "" if given or options.chips == [1] else "_chips"
    return path.with_name(f"{path.stem}_{target}{chips}{path.suffix}")


def run(
    target: Target, options: argparse.Namespace, names: list[str], where: Path
) -> dict[str, Any]:
    """Compiles all that was asked for; writes the figures after each workload."""
    start = time.perf_counter()
    results: dict[str, Any] = {"about": about(target), "workloads": {}}
    todo = chosen(options)
    for i, (name, workload, chips, mesh) in enumerate(todo):
        seconds = time.perf_counter() - start
        print(f"[{i + 1}/{len(todo)}] {target.name}: {name}", flush=True)
        if options.minutes and seconds > 60 * options.minutes:
            print("Out of time: skipping the rest.")
            break
        devices = target.devices(chips)
        placement = MESHES[mesh](devices) if mesh else whole(devices)
        if i == 0:
            warm_up(placement)
        mine = contestants(workload, names, bool(options.contestants))
        one = run_workload(workload, mine, target, placement)
        results["workloads"][name] = {"chips": chips, "mesh": mesh, **one}
        results["about"]["seconds"] = time.perf_counter() - start
        where.write_text(json.dumps(results, indent=2) + "\n")
    return results


def run_workload(
    workload: Workload, names: list[str], target: Target, placement: Placement
) -> dict[str, Any]:
    """The figures of all contestants."""
    problem = abstract(workload.problem)
    leaves = jax.tree.leaves(problem.params)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = compile_step(workload, name, problem, target, placement)
        # The others may compile: whatever it is, it is one row.
        except Exception as error:
            first = str(error).partition("\n")[0]
            results[name] = {"error": f"{type(error).__name__}: {first}"[:300]}
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "leaves": len(leaves),
        "results": results,
    }


Listed = tuple[str, Workload, int, str | None]


def chosen(options: argparse.Namespace) -> list[Listed]:
    """Those whose name was given, or has in it what was given."""
    listed = list(listed_workloads(options))
    named = [one for one in listed if options.workloads in (one[0], one[1].name)]
    return named or [one for one in listed if options.workloads in one[0]]


def listed_workloads(options: argparse.Namespace) -> Iterator[Listed]:
    """The name, the workload, the number of chips, and the mesh if there are many."""
    size = TINY if options.sizes == "tiny" else SIZE
    for chips in options.chips:
        batch, length = size.tokens
        tokens = (max(batch, chips), length)  # a sequence for each chip
        listed = list(target_workloads(size._replace(tokens=tokens)))
        for mesh in [None] if chips == 1 else MESHES:
            for workload in listed:
                name = workload.name
                if mesh and name in MANY_CHIPS:
                    name = f"{name}, {mesh}, {chips} chips"
                elif mesh:
                    continue
                if workload.quick or not options.quick:
                    yield name, workload, chips, mesh


def contestants(workload: Workload, names: list[str], named: bool) -> list[str]:
    """Those that this workload compares, or those that the user named."""
    mine = [name for name in names if name in (workload.contestants or ALL)]
    if workload.only and not named:
        mine = [name for name in mine if name in workload.only]
    return mine


def versions() -> dict[str, str]:
    """The versions of what makes a program, where it is installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def about(target: Target) -> dict[str, Any]:
    """What was compiled for what, with versions."""
    return {
        "how": "compiled, not run",
        "target": target.name,
        "device": target.chip,
        "kind": target.kind,
        "memory": target.memory,
        "versions": versions(),
        "python": platform.python_version(),
        "seconds": 0.0,
    }
