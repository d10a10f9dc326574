"""What the figures say: tables, and where jls is not the least."""

from collections.abc import Sequence
from typing import Any

from benchmarks.contestants import FLOOR, OURS, WHOLE
from benchmarks.tables import Table, compilation, matrix

MEGA = 1e6
# Tolerated beside one percent: a few scalars, the loss scale and the counters.
SCALARS = 4096
# Of what is measured here: the figure, its name, and how much more is tolerated.
MEASURED = (
    ("bytes_accessed", "bytes", 1.01, SCALARS),
    ("temporary_bytes", "bytes of temporary memory", 1.01, SCALARS),
)


def show(results: dict[str, Any]) -> None:
    """Prints all tables."""
    about = results["about"]
    print(
        f"{about['device']}, jax {about['jax']}, optax {about['optax']}, "
        f"sizes: {about['sizes']}, {about['seconds']:.0f} s"
    )
    print(*tables(results), sep="\n\n")
    for name, workload in results["workloads"].items():
        for worse in not_least(name, workload, MEASURED):
            print(worse)
    print(*errors(results["workloads"]), sep="\n")


def tables(results: dict[str, Any]) -> list[Table]:
    """All tables."""
    workloads = results["workloads"]
    made = [
        matrix(workloads, "Bytes accessed, MB, by XLA's count", _bytes),
        matrix(workloads, "Temporary / peak memory, MB", _memory),
        matrix(workloads, "Kernels of a step", _kernels),
        matrix(workloads, "Seconds to trace / to compile; times plain", compilation),
    ]
    if any("ratio" in f for w in workloads.values() for f in w["results"].values()):
        title = "Time of a step / plain optax: median (quartiles)"
        made.insert(0, matrix(workloads, title, lambda one, *_: _text(one), FLOOR))
    return made


def not_least(
    name: str,
    workload: dict[str, Any],
    measures: Sequence[tuple[str, str, float, float]],
) -> list[str]:
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
            worse.append(f"{name}: jls needs more: {said}")
    return worse


def errors(workloads: dict[str, Any]) -> list[str]:
    """Where a contestant did not run, and why."""
    return [
        f"{workload}, {name}: {one['error']}"
        for workload, figures in workloads.items()
        for name, one in figures["results"].items()
        if "error" in one
    ]


def _text(one: dict[str, Any]) -> str:
    if "ratio" not in one:
        return "-"
    return "{median:.2f} ({q1:.2f}-{q3:.2f})".format(**one["ratio"])


def _bytes(one: dict[str, Any], *_: Any) -> str:
    return f"{one['bytes_accessed'] / MEGA:.2f}"


def _memory(one: dict[str, Any], *_: Any) -> str:
    return f"{one['temporary_bytes'] / MEGA:.2f} / {one['peak_bytes'] / MEGA:.2f}"


def _kernels(one: dict[str, Any], *_: Any) -> str:
    return f"{one['kernels']}"
