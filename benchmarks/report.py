"""What the figures say: tables, and where jls is not the least."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.contestants import FLOOR, OURS, WHOLE
from benchmarks.tables import Table, compilation, matrix
from benchmarks.tracing import GUARDS

MEGA = 1e6
# Tolerated beside one percent: a few scalars, the loss scale and the counters.
SCALARS = 4096
# Of what is measured here: the figure, its name, and how much more is tolerated.
MEASURED = (
    ("bytes_accessed", "bytes", 1.01, SCALARS),
    ("temporary_bytes", "bytes of temporary memory", 1.01, SCALARS),
)


class Worse(NamedTuple):
    """A figure in which jls is not the least of those that protect as much."""

    line: str
    figure: str
    peer: str


def show(results: dict[str, Any]) -> None:
    """Prints all tables."""
    about = results["about"]
    print(
        f"{about['device']}, jax {about['jax']}, optax {about['optax']}, "
        f"sizes: {about['sizes']}, {about['seconds']:.0f} s"
    )
    print(*tables(results), sep="\n\n")
    for name, one in results["torch"].items():
        if isinstance(one, dict):
            print(f"torch AdamW {name}: with / without GradScaler {_text(one)}")
    for name, workload in results["workloads"].items():
        for worse in not_least(name, workload, MEASURED):
            print(worse.line)
    print(*errors(results["workloads"]), sep="\n")


def tables(results: dict[str, Any]) -> list[Table]:
    """All tables."""
    workloads = results["workloads"]
    made = []
    if any("ratio" in f for w in workloads.values() for f in w["results"].values()):
        spread = "median (quartiles)"
        title = f"Time of a step / plain optax: {spread}"
        made.append(matrix(workloads, title, lambda one, *_: _text(one), FLOOR))
        title = f"Extra time of a step, microseconds: {spread}"
        made.append(matrix(workloads, title, _extra, FLOOR))
    made += [
        matrix(workloads, "Bytes accessed, MB, by XLA's count", _bytes),
        matrix(workloads, "Temporary / peak memory, MB", _memory),
        matrix(workloads, "Kernels (and collectives) of a step", _kernels),
        matrix(workloads, "Seconds to trace / to compile; times plain", compilation),
    ]
    if results.get("tracing"):
        made.append(_tracing(results["tracing"]))
    made.append(_behaviour(results["behaviour"]))
    return [*made, _limits(results["limits"])] if results["limits"] else made


def not_least(
    name: str,
    workload: dict[str, Any],
    measures: Sequence[tuple[str, str, float, float]],
) -> list[Worse]:
    """Where jls has more than the least of the peers that skip as much."""
    results, worse = workload["results"], []
    ours = results.get(OURS, {})
    for field, what, factor, more in measures:
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


def errors(workloads: dict[str, Any]) -> list[str]:
    """Where a contestant did not run, or was not timed, and why."""
    return [
        f"{workload}, {name}: {one[field]}"
        for workload, figures in workloads.items()
        for name, one in figures["results"].items()
        for field in ("error", "no_times")
        if field in one
    ]


def limits(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The least extra bytes of a guard, beside those of each contestant."""
    rows = []
    for name, workload in results["workloads"].items():
        reads, figures = workload["least_reads"], workload["results"]
        bare = figures.get(FLOOR, {}).get("bytes_accessed")
        if reads is not None and bare:
            least = reads * workload["gradient_bytes"]
            more = {
                peer: (one["bytes_accessed"] - bare) / bare
                for peer, one in figures.items()
                if peer != FLOOR and "bytes_accessed" in one
            }
            row = {"workload": name, "bare_bytes": bare, "least_extra": least / bare}
            rows.append(row | {"extra": more})
    return rows


def _text(one: dict[str, Any]) -> str:
    if "ratio" not in one:
        return "-"
    return "{median:.2f} ({q1:.2f}-{q3:.2f})".format(**one["ratio"])


def _extra(one: dict[str, Any], *_: Any) -> str:
    if "extra_seconds" not in one:
        return "-"
    times = {name: 1e6 * seconds for name, seconds in one["extra_seconds"].items()}
    return "{median:.0f} ({q1:.0f} to {q3:.0f})".format(**times)


def _bytes(one: dict[str, Any], *_: Any) -> str:
    return f"{one['bytes_accessed'] / MEGA:.2f}"


def _memory(one: dict[str, Any], *_: Any) -> str:
    return f"{one['temporary_bytes'] / MEGA:.2f} / {one['peak_bytes'] / MEGA:.2f}"


def _kernels(one: dict[str, Any], *_: Any) -> str:
    collectives = one["collectives"]
    return f"{one['kernels']}" + (f" ({collectives})" if collectives else "")


def _tracing(rows: dict[str, Any]) -> Table:
    title = "Tracing an update: CPU ms, calls of Python a leaf; others / plain optax"
    names = [name for name in GUARDS if any(name in row for row in rows.values())]
    cells = []
    for update, row in rows.items():
        bare = row[FLOOR]
        first = f"{1e3 * bare['seconds']:.0f}, {bare['calls_per_leaf']:,.0f}"
        others = (
            ", ".join(f"{row[name][x] / bare[x]:.2f}" for x in bare)
            for name in names[1:]
        )
        cells.append([update, first, *others])
    return Table(title, ["update", *names], cells)


def _behaviour(behaviour: dict[str, Any]) -> Table:
    said = {None: "not seen on CPU", True: "yes", False: "no"}
    rows = [
        [name, f"{one['traces_of_50_steps']}", said[one["no_transfer_to_host"]]]
        for name, one in behaviour.items()
    ]
    heads = ["contestant", "traces", "no transfer to the host"]
    return Table("50 steps from the documented start", heads, rows)


def _limits(limits: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in limits for name in row["extra"]))
    rows = []
    for row in limits:
        extra = [f"{row['extra'][n]:.3f}" if n in row["extra"] else "-" for n in names]
        numbers = f"{row['bare_bytes'] / MEGA:.2f}", f"{row['least_extra']:.3f}"
        rows.append([row["workload"], *numbers, *extra])
    title = "Extra bytes of an update / bytes of the bare one"
    return Table(title, ["workload", "bare, MB", "least", *names], rows)
