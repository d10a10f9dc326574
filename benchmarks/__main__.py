"""Measures what a guarded train step costs, compared with plain optax and other guards.

Compiles, warms up and steps each contestant on each workload; prints tables, writes the
figures as JSON and a picture. Times compilation and steps separately.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax

import jls
from benchmarks import figures, on_target, report, target_report
from benchmarks.contestants import ALL, FLOOR, MAIN, available
from benchmarks.sizes import SIZES
from benchmarks.targets import TARGETS, MissingCompilerError
from benchmarks.workloads import Workload, workloads

PICTURES = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what the command line asks for; returns the figures that it writes."""
    start = time.perf_counter()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.markdown:
        return _print_markdown(parser, options.markdown)
    _check(parser, options)
    if options.target:
        return _on_targets(parser, options)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device = jax.default_backend()
    if options.device not in (None, device):
        parser.error(f"JAX finds no {options.device} here: its backend is {device}")
    names = _chosen_contestants(parser, options.contestants)
    sizes = options.sizes or ("quick" if options.quick else device)
    if sizes not in SIZES:
        sizes = "gpu"  # another accelerator
    size = SIZES[sizes]
    listed = list(workloads(size))
    todo = [w for w in listed if w.name == options.workloads]
    todo = todo or [w for w in listed if options.workloads in w.name]
    if options.quick:
        names = names if options.contestants else [n for n in names if n in MAIN]
        todo = todo if options.workloads else [w for w in todo if w.quick]
    if not todo:
        parser.error(f"no workload has {options.workloads!r} in its name; see --list")
    if options.list:
        print("\n".join(workload.name for workload in todo))
        return {}
    options.json = options.json or Path("benchmarks.json")
    options.plot = options.plot or Path("benchmarks.png")
    minutes = options.minutes or (0.8 if options.quick else 8.0)
    deadline = start + 60 * minutes
    results: dict[str, Any] = {"about": _about(sizes), "workloads": {}}
    for i, workload in enumerate(todo):
        left = deadline - time.perf_counter()
        print(f"[{i + 1}/{len(todo)}] {workload.name}, {left:.0f} s left")
        if left < 0:
            print("Out of time: skipping the rest.")
            break
        share = left / (len(todo) - i)
        one = run(workload, names, share, deadline, options)
        results["workloads"][workload.name] = one
        results["about"]["seconds"] = time.perf_counter() - start
        # After each workload, so that an interrupted run leaves its figures.
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if results["workloads"]:
        report.show(results)
        print(f"Figures: {options.json}")
        if not options.no_times:
            from benchmarks import plot  # it takes a second to import matplotlib

            plot.save(results, options.plot)
            print(f"Picture: {options.plot}")
    return results


def _print_markdown(parser: argparse.ArgumentParser, files: list[Path]) -> dict:
    try:
        for path in files:
            results = json.loads(path.read_text())
            is_compiled = "how" in results["about"]
            tables = (target_report if is_compiled else report).tables(results)
            print(*tables, sep="\n\n", end="\n\n")
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--markdown takes files that --json has written: {error!r}")
    return {}


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Before anything runs: what cannot be written is not worth minutes of work."""
    if options.rounds < 3:
        parser.error(f"--rounds must be at least 3, got {options.rounds}")
    if options.minutes is not None and options.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {options.minutes:g}")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name} {path}: there is no folder {path.parent}")
    if options.plot and options.plot.suffix not in PICTURES:
        known = " or ".join(PICTURES)
        parser.error(f"--plot must end in {known}, got {options.plot}")
    if options.target and options.device:
        parser.error("--device does not go with --target, which runs nothing")
    if options.target and options.sizes not in (None, "tiny"):
        parser.error(f"with --target, --sizes must be tiny, got {options.sizes}")
    if options.chips != [1] and not options.target:
        parser.error("--chips needs --target")


def _on_targets(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> dict[str, Any]:
    """The figures by target, of what is compiled and not run."""
    targets = on_target.chosen_targets(options)
    for chips in options.chips:
        if chips < 1 or chips & (chips - 1):
            parser.error(f"--chips must be powers of two, got {chips}")
        for target in targets:
            if chips > target.most_chips:
                parser.error(
                    f"--chips must be at most {target.most_chips} for {target.name}, "
                    f"got {chips}"
                )
    jax.config.update("jax_platforms", "cpu")
    names = _chosen_contestants(parser, options.contestants)
    listed = [one[0] for one in on_target.chosen(options)]
    if not listed:
        parser.error(f"no workload has {options.workloads!r} in its name; see --list")
    if options.list:
        print("\n".join(listed))
        return {}
    try:
        return on_target.run_all(options, names)
    except MissingCompilerError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def run(
    workload: Workload,
    names: list[str],
    share: float,
    deadline: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The figures of all contestants on one workload, in about `share` seconds."""
    start = time.perf_counter()
    problem = workload.problem()
    leaves = jax.tree.leaves(problem.params)
    if workload.only and not options.contestants:
        names = [name for name in names if name in workload.only]
    results, contests = {}, {}
    if jax.default_backend() != "cpu":
        # Once for nothing: the first compilation also pays for choosing kernels.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            figures.Contest(workload, FLOOR, problem)
    for name in names:
        if name != FLOOR and time.perf_counter() > deadline:
            results[name] = {"error": "out of time"}
            continue
        try:
            contest = figures.Contest(workload, name, problem)
            results[name] = contest.figures()
            if not options.no_times:
                contest.seconds_per_step(2)  # warm up
                contests[name] = contest
        # Another contestant may fit into memory, or take this dtype.
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    if FLOOR in contests and time.perf_counter() < deadline:
        seconds = max(0.0, share - (time.perf_counter() - start))
        sample = 0.02 if options.quick else 0.1
        samples = figures.measure(contests, seconds, options.rounds, sample)
        for name, timed in figures.ratios(samples):
            results[name] |= timed
    return {
        "leaves": len(leaves),
        "parameters": sum(leaf.size for leaf in leaves),
        "results": {name: results[name] for name in names},
    }


def _about(sizes: str) -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "sizes": sizes,
        "jax": jax.__version__,
        "optax": optax.__version__,
        "jls": jls.__version__,
        "seconds": 0.0,
    }


def _chosen_contestants(
    parser: argparse.ArgumentParser, wanted: list[str] | None
) -> list[str]:
    here = available()
    for name in wanted or []:
        if name not in here:
            parser.error(f"--contestants {name}: it is not installed here")
    return [name for name in here if name == FLOOR or name in (wanted or here)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few small workloads, in about a minute")
    add("--device", choices=["cpu", "gpu"], help="default: what JAX chooses")
    add(
        "--target",
        choices=[*TARGETS, "all"],
        help="compile for this chip, which need not be here; run nothing",
    )
    add(
        "--chips",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="with --target: so many chips, in three kinds of meshes",
    )
    add(
        "--markdown",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print the figures of these JSON files as Markdown; run nothing",
    )
    add(
        "--workloads",
        default="",
        metavar="TEXT",
        help="the workload of this name, or all whose name contains it",
    )
    add("--contestants", nargs="+", choices=list(ALL), help=f"{FLOOR} always runs too")
    add("--list", action="store_true", help="print the names of the workloads")
    add("--sizes", choices=list(SIZES), help="default: those of the device")
    add(
        "--minutes",
        type=float,
        help="stop after about this many (default: 8, quick: 0.8, --target: no limit)",
    )
    add("--rounds", type=int, default=31, help="default: 31, at least 3")
    add("--no-times", action="store_true", help="compile only, run nothing")
    add("--json", type=Path, metavar="FILE", help="default: benchmarks.json")
    add("--plot", type=Path, metavar="FILE", help="default: benchmarks.png")
    return parser


if __name__ == "__main__":
    main()
