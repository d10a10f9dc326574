"""Prints the figures as tables."""

from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import FLOOR, OURS, WHOLE
from benchmarks.tracing import GUARDS

MEGA = 1e6
# Tolerated beside one percent: a few scalars, the loss scale and the counters.
SCALARS = 4096


def contestants_of(results: dict[str, Any]) -> list[str]:
    """The names of the contestants, in order."""
    names = [name for one in results["workloads"].values() for name in one["results"]]
    return list(dict.fromkeys(names))


def show(results: dict[str, Any], console: Console) -> None:
    """Prints all tables."""
    about = results["about"]
    console.print(
        f"{about['device']}, jax {about['jax']}, optax {about['optax']}, "
        f"sizes: {about['sizes']}, {about['seconds']:.0f} s"
    )
    for table in tables(results, console.width >= 135):
        console.print(table)
    for name, one in results["torch"].items():
        if isinstance(one, dict):
            ratio = _text(one["ratio"])
            console.print(f"torch AdamW {name}: with / without GradScaler {ratio}")
    for line in [*not_least(results), *errors(results)]:
        console.print(line)


def tables(results: dict[str, Any], wide: bool = True) -> list[Table]:
    """All tables; wide ones have quartiles."""
    made = []
    runs = [one for w in results["workloads"].values() for one in w["results"].values()]
    if any("ratio" in one for one in runs):
        spread = "median (quartiles)" if wide else "median"
        title = f"Time of a step / plain optax: {spread}"
        made.append(_matrix(results, title, partial(_ratio, wide), FLOOR))
        title = f"Extra time of a step, microseconds: {spread}"
        made.append(_matrix(results, title, partial(_extra, wide), FLOOR))
    made.append(_matrix(results, "Bytes accessed, MB, by XLA's count", _bytes))
    made.append(_matrix(results, "Temporary / peak memory, MB", _memory))
    made.append(_matrix(results, "Kernels (and collectives) of a step", _kernels))
    made.append(_matrix(results, "Tracing + compilation, s", _compilation))
    if results.get("tracing"):
        made.append(_tracing(results["tracing"]))
    made.append(_behaviour(results))
    if results["limits"]:
        made.append(_limits(results))
    return made


def not_least(results: dict[str, Any]) -> list[str]:
    """Where jls needs over 1 % more than the best peer that skips as much."""
    lines = []
    for name, workload in results["workloads"].items():
        ours = workload["results"].get(OURS, {})
        for field in ("bytes_accessed", "temporary_bytes"):
            peers = {
                peer: one[field]
                for peer, one in workload["results"].items()
                if peer in WHOLE and peer != OURS and field in one
            }
            if not peers or field not in ours:
                continue
            least = min(peers, key=lambda peer: peers[peer])
            if ours[field] > 1.01 * peers[least] + SCALARS:
                lines.append(
                    f"jls needs more: {name}, {field} {ours[field]:,}, "
                    f"{least} {peers[least]:,}"
                )
    return lines


def errors(results: dict[str, Any]) -> list[str]:
    """Where a contestant did not run, or was not timed, and why."""
    return [
        f"{name} {said}: {workload}, {one[field]}"
        for workload, figures in results["workloads"].items()
        for name, one in figures["results"].items()
        for field, said in (("error", "did not run"), ("no_times", "was not timed"))
        if field in one
    ]


def limits(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The least extra bytes of a guard, beside those of each contestant."""
    rows = []
    for name, workload in results["workloads"].items():
        reads, figures = workload["least_reads"], workload["results"]
        bare = figures.get(FLOOR, {}).get("bytes_accessed")
        if reads is None or not bare:
            continue
        least = reads * workload["gradient_bytes"]
        more = {
            peer: (one["bytes_accessed"] - bare) / bare
            for peer, one in figures.items()
            if peer != FLOOR and "bytes_accessed" in one
        }
        rows.append(
            {
                "workload": name,
                "bare_bytes": bare,
                "least_extra_bytes": least,
                "least_extra": least / bare,
                "extra": more,
            }
        )
    return rows


def _matrix(
    results: dict[str, Any], title: str, cell: Any, without: str | None = None
) -> Table:
    names = [name for name in contestants_of(results) if name != without]
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    for name in names:
        table.add_column(name, justify="right")
    for workload, one in results["workloads"].items():
        found = [one["results"].get(name) for name in names]
        cells = ["" if f is None else "-" if "error" in f else cell(f) for f in found]
        table.add_row(workload, *cells)
    return table


def _ratio(wide: bool, one: dict[str, Any]) -> str:
    return _text(one["ratio"], wide) if "ratio" in one else "-"


def _extra(wide: bool, one: dict[str, Any]) -> str:
    if "extra_seconds" not in one:
        return "-"
    low, middle, high = (1e6 * one["extra_seconds"][q] for q in ("q1", "median", "q3"))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})" if wide else f"{middle:.0f}"


def _text(value: dict[str, float], wide: bool = True) -> str:
    quartiles = f" ({value['q1']:.2f}-{value['q3']:.2f})" if wide else ""
    return f"{value['median']:.2f}{quartiles}"


def _bytes(one: dict[str, Any]) -> str:
    return f"{one['bytes_accessed'] / MEGA:.2f}"


def _memory(one: dict[str, Any]) -> str:
    return f"{one['temporary_bytes'] / MEGA:.2f} / {one['peak_bytes'] / MEGA:.2f}"


def _kernels(one: dict[str, Any]) -> str:
    collectives = one["collectives"]
    return f"{one['kernels']}" + (f" ({collectives})" if collectives else "")


def _compilation(one: dict[str, Any]) -> str:
    return f"{one['trace_seconds']:.2f} + {one['compile_seconds']:.2f}"


def _tracing(rows: dict[str, Any]) -> Table:
    title = (
        "Tracing an update: CPU ms, calls of Python a leaf; the others / plain optax"
    )
    table = Table(title=title, title_justify="left")
    names = [name for name in GUARDS if any(name in row for row in rows.values())]
    table.add_column("update")
    for name in names:
        table.add_column(name, justify="right")
    for update, row in rows.items():
        bare = row[FLOOR]
        cells = [f"{1e3 * bare['seconds']:.0f}, {bare['calls_per_leaf']:,.0f}"]
        for name in names[1:]:
            ratios = (row[name][figure] / bare[figure] for figure in bare)
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(update, *cells)
    return table


def _behaviour(results: dict[str, Any]) -> Table:
    table = Table(title="50 steps from the documented start", title_justify="left")
    for heading in ("contestant", "traces", "no transfer to the host"):
        table.add_column(heading)
    said = {None: "not seen on CPU", True: "yes", False: "no"}
    for name, one in results["behaviour"].items():
        quiet = said[one["no_transfer_to_host"]]
        table.add_row(name, str(one["traces_of_50_steps"]), quiet)
    return table


def _limits(results: dict[str, Any]) -> Table:
    title = "Extra bytes of an update / bytes of the bare one"
    table = Table(title=title, title_justify="left")
    names = [name for name in contestants_of(results) if name != FLOOR]
    for heading in ("workload", "bare, MB", "least", *names):
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    for row in results["limits"]:
        extra = [f"{row['extra'][n]:.3f}" if n in row["extra"] else "-" for n in names]
        bare, least = row["bare_bytes"] / MEGA, row["least_extra"]
        table.add_row(row["workload"], f"{bare:.2f}", f"{least:.3f}", *extra)
    return table
