"""Whether the bytes of the compiled programs rank the contestants as the clock does."""

from itertools import combinations
from typing import Any

# Bytes that differ by less are a tie.
TIE = 0.005


def add(results: dict[str, Any]) -> None:
    """Writes into each timed workload what bytes and clock say of each pair."""
    for workload in results["workloads"].values():
        ranked = compare(workload["results"])
        if ranked:
            workload["rank"] = ranked


def compare(figures: dict[str, Any]) -> dict[str, Any]:
    """Both orders, and the pairs that bytes and clock put in opposite order.

    A pair is a tie by the clock if the quartiles of the two overlap, and by bytes if
    these differ by less than half a percent. A tie contradicts nothing.
    """
    timed = {
        name: one
        for name, one in figures.items()
        if "ratio" in one and "bytes_accessed" in one
    }
    if len(timed) < 2:
        return {}
    pairs = list(combinations(timed, 2))
    opposed = [
        [one, other]
        for one, other in pairs
        if _by_bytes(timed[one], timed[other]) * _by_clock(timed[one], timed[other]) < 0
    ]
    return {
        "by_bytes": sorted(timed, key=lambda name: timed[name]["bytes_accessed"]),
        "by_clock": sorted(timed, key=lambda name: _spread(timed[name])["median"]),
        "pairs": len(pairs),
        "opposed": opposed,
    }


def line(results: dict[str, Any]) -> str | None:
    """What the report says of all workloads."""
    ranks = {
        name: one["rank"] for name, one in results["workloads"].items() if "rank" in one
    }
    if not ranks:
        return None
    pairs = sum(one["pairs"] for one in ranks.values())
    opposed = [
        f"{name}: {pair[0]} and {pair[1]}"
        for name, one in ranks.items()
        for pair in one["opposed"]
    ]
    said = f"Compiled bytes and clock agree on {pairs - len(opposed)} of {pairs} pairs"
    return f"{said}; not on {'; '.join(opposed)}" if opposed else said


def _by_bytes(one: dict[str, Any], other: dict[str, Any]) -> int:
    mine, theirs = one["bytes_accessed"], other["bytes_accessed"]
    if abs(mine - theirs) <= TIE * max(mine, theirs):
        return 0
    return 1 if mine > theirs else -1


def _by_clock(one: dict[str, Any], other: dict[str, Any]) -> int:
    mine, theirs = _spread(one), _spread(other)
    if mine["q1"] > theirs["q3"]:
        return 1
    return -1 if mine["q3"] < theirs["q1"] else 0


def _spread(one: dict[str, Any]) -> dict[str, float]:
    """Of the ratio to plain optax, in which a slow minute of the machine cancels."""
    return one["ratio"]
