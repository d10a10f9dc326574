"""Compiles workloads and contestants for targets; runs nothing."""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import target_report
from benchmarks.compiled import (
    Compiled,
    abstract,
    compile_step,
    warm_up,
    what_only_one_launches,
)
from benchmarks.contestants import ALL, OURS
from benchmarks.placement import MESHES, Placement, whole
from benchmarks.target_workloads import SIZE, TINY, target_workloads
from benchmarks.targets import TARGETS, MissingCompilerError, Target
from benchmarks.workloads import Workload

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "optax", "flax", "jls")
# How libtpu says so: of temporary memory alone, or of all.
OUT_OF_MEMORY = re.compile(
    r"required for (HLO temporaries) \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)|"
    r"Used ([\d.]+)G of ([\d.]+)G hbm"
)
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
        where = path_for(options.json, ".json", target.name, options)
        one = results[target.name] = run(target, options, names, where)
        if one["workloads"]:
            print(*target_report.tables(one), sep="\n\n")
            print(*target_report.lines(one, options.explain), sep="\n")
            print(f"Figures: {where}")
            if not options.no_plot:
                from benchmarks import target_plot

                picture = path_for(options.plot, ".png", target.name, options)
                if target_plot.save(one, picture):
                    print(f"Picture: {picture}")
        if "interrupted" in one["about"]:
            break
    if missing and not results:
        raise missing
    return results


def chosen_targets(options: argparse.Namespace) -> list[Target]:
    """All, or the one that was named."""
    names = TARGETS if options.target == "all" else [options.target]
    return [TARGETS[name] for name in names]


def path_for(
    given: Path | None, suffix: str, target: str, options: argparse.Namespace
) -> Path:
    """The path given; with the target's name if there are several, or none is given.

    Many chips have a file of their own, which leaves the figures of one chip alone.
    """
    if given and options.target != "all":
        return given
    path = given or Path(f"benchmarks{suffix}")
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
        try:
            one = run_workload(workload, mine, target, placement)
        except KeyboardInterrupt:
            results["about"]["interrupted"] = True
            break
        results["workloads"][name] = {"chips": chips, "mesh": mesh, **one}
        results["about"]["seconds"] = time.perf_counter() - start
        where.write_text(json.dumps(results, indent=2) + "\n")
    return results


def run_workload(
    workload: Workload, names: list[str], target: Target, placement: Placement
) -> dict[str, Any]:
    """The figures of all contestants, and what only jls launches where it has more."""
    problem = abstract(workload.problem)
    leaves = jax.tree.leaves(problem.params)
    compiled: dict[str, Compiled] = {}
    results: dict[str, Any] = {}
    for name in names:
        try:
            compiled[name] = compile_step(workload, name, problem, target, placement)
            results[name] = compiled[name].figures
        # The others may compile: whatever it is, it is one row.
        except Exception as error:
            results[name] = {"error": shortened(error)}
    one = {
        "parameters": sum(leaf.size for leaf in leaves),
        "leaves": len(leaves),
        "results": results,
    }
    worse = target_report.where_not_least("", one)
    if worse:
        # The list is of kernels.
        fewest = [x.peer for x in worse if x.figure == "kernels"]
        peer = [*fewest, worse[0].peer][0]
        ours, theirs = compiled[OURS].program, compiled[peer].program
        if ours and theirs:
            lines = what_only_one_launches(ours, theirs)
            one["only_jls"] = {"beside": peer, "kernels": lines}
    return one


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


def shortened(error: Exception) -> str:
    """One line. Out of memory says by how much."""
    text = str(error)
    if found := OUT_OF_MEMORY.search(text):
        needs, has = float(found[2] or found[4]), float(found[3] or found[5])
        what = "its temporary memory" if found[1] else "it"
        return (
            f"does not fit: {what} needs {needs} GiB, {needs - has:.2f} GiB more than "
            f"there are"
        )
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def about(target: Target) -> dict[str, Any]:
    """What was compiled for what, with versions."""
    versions = versions_of(PACKAGES)
    import jls

    return {
        "how": "compiled, not run",
        "target": target.name,
        "device": target.chip,
        "kind": target.kind,
        "memory": target.memory,
        "versions": versions | {"jls": jls.__version__},
        "python": platform.python_version(),
        "seconds": 0.0,
    }
