"""What was compiled for a target: tables, and lines about what stands out."""

from typing import Any

from benchmarks.contestants import FLOOR
from benchmarks.report import MEGA, SCALARS, errors, not_least
from benchmarks.tables import Table, compilation, matrix

# Tolerated: a few numbers for each leaf are no pass over the parameters.
BYTES_PER_PARAMETER = 0.01


def tables(results: dict[str, Any]) -> list[Table]:
    """One for one chip, one for many chips, and one for the compiler's time."""
    workloads = results["workloads"]
    one = {name: w for name, w in workloads.items() if w["chips"] == 1}
    many = {name: w for name, w in workloads.items() if w["chips"] > 1}
    title = f"{results['about']['device']}: {results['about']['how']}"
    costs = "bytes per parameter (+: beyond plain optax); kernels; temporary MB"
    seconds = "CPU seconds to trace / to compile; the others: times plain optax"
    made = [matrix(one, f"{title}; {costs}", _costs)] if one else []
    if many:
        made.append(_collectives(many, f"{title}; figures of one chip"))
    return [*made, matrix(workloads, f"{title}; {seconds}", compilation)]


def lines(results: dict[str, Any]) -> list[str]:
    """Where jls is not the least and why, what does not fit, what did not compile."""
    said = []
    about, workloads = results["about"], results["workloads"]
    for name, workload in workloads.items():
        said += where_not_least(name, workload)
    if any(one.get("kernels", 0) is None for _, _, one in _figures(workloads)):
        said.append(
            "?: this libtpu is newer than jaxlib, which cannot read its program"
        )
    for name, contestant, one in _figures(workloads):
        if "too_large_by" in one:
            sizes = one["total_bytes"], one["too_large_by"], about["memory"]
            needs, more, has = (f"{size / 1e9:.2f} GB" for size in sizes)
            said.append(
                f"{name}, {contestant}: does not fit: needs {needs}, {more} more than "
                f"the {has} of a {about['device']}"
            )
    return said + errors(workloads)


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


def where_not_least(name: str, workload: dict[str, Any]) -> list[str]:
    """Where jls has more than the least of the peers that skip as much."""
    slack = BYTES_PER_PARAMETER * workload["parameters"]
    measures = (
        ("bytes_accessed", "bytes", 1.0, slack),
        ("kernels", "kernels", 1.0, 0),
        ("temporary_bytes", "bytes of temporary memory", 1.01, SCALARS),
    )
    return not_least(name, workload, measures)


def _figures(workloads: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, contestant, one)
        for name, workload in workloads.items()
        for contestant, one in workload["results"].items()
    ]


def _costs(one: dict[str, Any], bare: dict[str, Any], parameters: int) -> str:
    size, floor = one["bytes_accessed"], bare.get("bytes_accessed")
    is_extra = one is not bare and floor is not None
    per = (
        f"{(size - floor) / parameters:+.2f}"
        if is_extra
        else f"{size / parameters:.1f}"
    )
    return f"{per}; {_kernels(one)}; {one['temporary_bytes'] / MEGA:,.0f}"


def _collectives(workloads: dict[str, Any], title: str) -> Table:
    rows = []
    for name, contestant, one in _figures(workloads):
        if "error" in one:
            rows.append([name, contestant, *"-----"])
            continue
        bare = workloads[name]["results"].get(FLOOR, {}).get("bytes_accessed")
        is_floor = contestant == FLOOR
        sent = (
            f"{x['count']} {kind} ({x['bytes'] / MEGA:,.0f} MB)"
            for kind, x in one["collectives"].items()
        )
        more = more_collectives(workloads[name], contestant)
        rows.append(
            [
                name if is_floor else "",
                contestant,
                f"{one['bytes_accessed'] / MEGA:,.0f}",
                f"{100 * (one['bytes_accessed'] / bare - 1):+.2f} %" if bare else "-",
                _kernels(one),
                f"{one['temporary_bytes'] / MEGA:,.0f}",
                ", ".join(sent) if is_floor else more,
            ]
        )
    heads = ["workload", "contestant", "MB", "extra", "kernels", "temporary MB"]
    last = "collectives; of the others, those beyond plain optax"
    return Table(title, [*heads, last], rows, words=2)


def _kernels(one: dict[str, Any]) -> str:
    return "?" if one["kernels"] is None else f"{one['kernels']}"
