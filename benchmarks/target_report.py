"""Prints what was compiled for a target as tables."""

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import FLOOR, OURS, WHOLE
from benchmarks.report import MEGA, SCALARS, contestants_of

# Tolerated: a few numbers for each leaf are no pass over the parameters.
BYTES_PER_PARAMETER = 0.01


class Worse(NamedTuple):
    """A figure in which jls is not the least of those that protect as much."""

    line: str
    figure: str
    peer: str


def show(results: dict[str, Any], console: Console, explain: bool = False) -> None:
    """Prints all tables, and a line wherever jls is not the least."""
    for table in tables(results):
        console.print(table)
    for line in lines(results, explain):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def tables(results: dict[str, Any]) -> list[Table]:
    """One for one chip, one for many chips, and one for the compiler's time."""
    workloads = results["workloads"]
    one = {name: w for name, w in workloads.items() if w["chips"] == 1}
    many = {name: w for name, w in workloads.items() if w["chips"] > 1}
    about = results["about"]
    title = f"{about['device']}: {about['how']}"
    compilation = "CPU seconds to trace / to compile; the others: times plain optax"
    made = []
    if one:
        made.append(_costs(one, title))
    if many:
        made.append(_collectives(many, f"{title}; figures of one chip"))
    if any(f.get("optimal_seconds") for _, _, f in _figures(workloads)):
        made.append(_estimates(workloads, f"{title}; the compiler's estimate, ms"))
    made.append(_compilation(workloads, f"{title}; {compilation}"))
    return made


def lines(results: dict[str, Any], explain: bool = False) -> list[str]:
    """Where jls is not the least and why, what does not fit, what did not compile."""
    said = []
    about = results["about"]
    for name, workload in results["workloads"].items():
        said += [worse.line for worse in not_least(name, workload)]
        if "only_jls" in workload:
            only = workload["only_jls"]
            shown = only["kernels"] if explain else only["kernels"][:3]
            more = len(only["kernels"]) - len(shown)
            said.append(f"    Only jls launches, beside {only['beside']}:")
            said += [f"    {line}" for line in shown]
            kinds = "kind" if more == 1 else "kinds"
            said += [f"    and {more} more {kinds}: --explain"] if more else []
    figures = _figures(results["workloads"])
    if any(one.get("kernels", 0) is None for _, _, one in figures):
        said.append(
            "?: this libtpu is newer than jaxlib, which cannot read its program"
        )
    for name, contestant, one in figures:
        if "too_large_by" in one:
            said.append(
                f"{name}, {contestant}: does not fit: needs {_gb(one['total_bytes'])}, "
                f"{_gb(one['too_large_by'])} more than the {_gb(about['memory'])} of a "
                f"{about['device']}"
            )
        if "error" in one:
            said.append(f"{name}, {contestant}: {one['error']}")
    return said


def extra_bytes(workload: dict[str, Any], name: str) -> float | None:
    """Bytes for each parameter that a contestant moves beyond plain optax."""
    results = workload["results"]
    bare = results.get(FLOOR, {}).get("bytes_accessed")
    mine = results.get(name, {}).get("bytes_accessed")
    if bare is None or mine is None:
        return None
    return (mine - bare) / workload["parameters"]


def more_collectives(workload: dict[str, Any], name: str) -> str:
    """What a contestant sends beyond plain optax: "+2 all-reduce (+64 bytes)".

    "all-reduce (+64 bytes)" is more in as many.
    """
    results = workload["results"]
    bare = results.get(FLOOR, {}).get("collectives", {})
    mine = results.get(name, {}).get("collectives", {})
    none = {"count": 0, "bytes": 0}
    said = []
    for kind in sorted({*bare, *mine}):
        one, other = mine.get(kind, none), bare.get(kind, none)
        if one != other:
            count, size = one["count"] - other["count"], one["bytes"] - other["bytes"]
            more = f"{count:+} {kind}" if count else kind
            said.append(f"{more} ({size:+,} bytes)")
    return ", ".join(said) or "none"


def not_least(name: str, workload: dict[str, Any]) -> list[Worse]:
    """Where jls has more than the least of the peers that skip as much."""
    results = workload["results"]
    ours = results.get(OURS, {})
    slack = BYTES_PER_PARAMETER * workload["parameters"]
    worse = []
    for field, what, factor, more in (
        ("bytes_accessed", "bytes", 1.0, slack),
        ("kernels", "kernels", 1.0, 0),
        ("temporary_bytes", "bytes of temporary memory", 1.01, SCALARS),
    ):
        peers = {
            peer: one[field]
            for peer, one in results.items()
            if peer in WHOLE and peer != OURS and one.get(field) is not None
        }
        if not peers or ours.get(field) is None:
            continue
        least = min(peers, key=lambda peer: peers[peer])
        if ours[field] > factor * peers[least] + more:
            said = f"{what} {ours[field]:,}, {least} {peers[least]:,}"
            worse.append(Worse(f"{name}: jls needs more: {said}", field, least))
    return worse


def _figures(workloads: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, contestant, one)
        for name, workload in workloads.items()
        for contestant, one in workload["results"].items()
    ]


def _table(workloads: dict[str, Any], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    for name in contestants_of({"workloads": workloads}):
        table.add_column(name, justify="right")
    return table


def _costs(workloads: dict[str, Any], title: str) -> Table:
    what = "bytes per parameter (+: beyond plain optax); kernels; temporary MB"
    table = _table(workloads, f"{title}; {what}")
    for name, workload in workloads.items():
        cells = []
        for contestant in contestants_of({"workloads": workloads}):
            one = workload["results"].get(contestant)
            if one is None or "error" in one:
                cells.append("" if one is None else "-")
                continue
            extra = extra_bytes(workload, contestant)
            per = one["bytes_accessed"] / workload["parameters"]
            first = (
                f"{per:.1f}"
                if contestant == FLOOR or extra is None
                else f"{extra:+.2f}"
            )
            temporary = one["temporary_bytes"] / MEGA
            cells.append(f"{first}; {_kernels(one)}; {temporary:,.0f}")
        table.add_row(name, *cells)
    return table


def _estimates(workloads: dict[str, Any], title: str) -> Table:
    table = _table(workloads, title)
    for name, workload in workloads.items():
        row = [
            workload["results"].get(contestant, {}).get("optimal_seconds")
            for contestant in contestants_of({"workloads": workloads})
        ]
        table.add_row(name, *["-" if x is None else f"{1e3 * x:.2f}" for x in row])
    return table


def _compilation(workloads: dict[str, Any], title: str) -> Table:
    table = _table(workloads, title)
    for name, workload in workloads.items():
        results, cells = workload["results"], []
        bare = results.get(FLOOR, {})
        for contestant in contestants_of({"workloads": workloads}):
            one = results.get(contestant, {})
            if "trace_seconds" not in one or "trace_seconds" not in bare:
                cells.append("" if contestant not in results else "-")
                continue
            floor = contestant == FLOOR
            pair = [
                one[field] / (1.0 if floor else bare[field])
                for field in ("trace_seconds", "compile_seconds")
            ]
            cells.append(f"{pair[0]:.2f} / {pair[1]:.2f}")
        table.add_row(name, *cells)
    return table


def _collectives(workloads: dict[str, Any], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    table.add_column("contestant")
    for heading in ("MB", "extra", "kernels", "temporary MB"):
        table.add_column(heading, justify="right")
    table.add_column("collectives; of the others, those beyond plain optax")
    for name, contestant, one in _figures(workloads):
        if "error" in one:
            table.add_row(name, contestant, "-")
            continue
        results = workloads[name]["results"]
        bare = results.get(FLOOR, {}).get("bytes_accessed")
        floor = contestant == FLOOR
        table.add_row(
            name if floor else "",
            contestant,
            f"{one['bytes_accessed'] / MEGA:,.0f}",
            f"{100 * (one['bytes_accessed'] / bare - 1):+.2f} %" if bare else "-",
            _kernels(one),
            f"{one['temporary_bytes'] / MEGA:,.0f}",
            _sent(one) if floor else more_collectives(workloads[name], contestant),
        )
    return table


def _sent(one: dict[str, Any]) -> str:
    found = one["collectives"].items()
    return ", ".join(
        f"{x['count']} {kind} ({x['bytes'] / MEGA:,.0f} MB)" for kind, x in found
    )


def _kernels(one: dict[str, Any]) -> str:
    return "?" if one["kernels"] is None else f"{one['kernels']}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
