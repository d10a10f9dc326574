"""The picture of what was compiled for a target."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.contestants import FLOOR, OURS
from benchmarks.report import contestants_of
from benchmarks.target_report import extra_bytes

COLOURS = {
    "jls": "#0072b2",
    "apply_if_finite": "#e69f00",
    "flax": "#009e73",
    "jmp": "#cc79a7",
    "mpx": "#56b4e9",
}
MARKERS = {"jls": "D", "apply_if_finite": "o", "flax": "s", "jmp": "v", "mpx": "^"}


def save(results: dict[str, Any], path: Path) -> bool:
    """Dots: extra bytes for each parameter on one chip, by workload and contestant.

    Returns whether there was anything to draw.
    """
    workloads = {
        name: one
        for name, one in results["workloads"].items()
        if one["chips"] == 1
        and any(extra_bytes(one, n) is not None for n in one["results"] if n != FLOOR)
    }
    names = [name for name in contestants_of(results) if name != FLOOR]
    if not workloads or not names:
        return False
    rows = list(workloads)
    figure = Figure(figsize=(11, 2.2 + 0.58 * len(rows)), layout="constrained")
    axes: Any = figure.add_subplot()
    for i, name in enumerate(names):
        # jls is drawn last, on top; the others beside each other.
        shift = 0.27 * (i - (len(names) - 1) / 2)
        points = [
            (extra, row + shift)
            for row, one in enumerate(workloads.values())
            if (extra := extra_bytes(one, name)) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                MARKERS.get(name, "o"),
                **{"color": COLOURS.get(name), "label": name, "markersize": 8},
                **{"markeredgecolor": "white", "markeredgewidth": 0.8},
                zorder=4 if name == OURS else 3,
            )
    for row in range(0, len(rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", zorder=0)
    axes.axvline(0.0, color="black", linewidth=1.2, zorder=1)
    axes.set_xscale("symlog", linthresh=2.0, linscale=1.2)
    ticks = [-32, -8, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64]
    low, high = axes.get_xlim()
    low, high = min(low, -0.3), max(high, 4.0) * 1.1
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(
        shown, [f"{tick:+g}" if tick else "0" for tick in shown], minor=False
    )
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelsize=13, length=0)
    axes.grid(axis="x", color="#cccccc", linewidth=0.8, zorder=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("extra bytes for each parameter, beyond plain optax", fontsize=14)
    axes.legend(
        **{"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": len(names)},
        **{"fontsize": 13, "frameon": False, "handletextpad": 0.2},
    )
    about = results["about"]
    versions = about["versions"]
    figure.suptitle(
        f"{about['device']}: {about['how']} (jls {versions['jls']}, "
        f"jax {versions['jax']})",
        fontsize=15,
    )
    figure.savefig(path, dpi=110)
    return True
