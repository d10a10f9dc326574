"""The picture of the figures."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from PIL import Image

from benchmarks.contestants import FLOOR, OURS
from benchmarks.tables import contestants_of
from jls._tools.figure import BLACK, GREEN, JLS

# Okabe and Ito's colours; the marks differ in shape too, for print in grey.
COLOURS = {
    OURS: JLS,
    "apply_if_finite": "#E69F00",
    "flax": GREEN,
    "jmp": "#CC79A7",
    "mpx": "#56B4E9",
}
MARKERS = {OURS: "D", "apply_if_finite": "o", "flax": "s", "jmp": "v", "mpx": "^"}
TICKS = [0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0]
WIDTH, ROW = 7.0, 0.36  # inches


def style(name: str) -> dict[str, Any]:
    """How a contestant's points look."""
    is_ours = name == OURS
    return {
        "color": COLOURS.get(name),
        "marker": MARKERS.get(name, "o"),
        "markersize": 6 if is_ours else 5,
        "zorder": 4 if is_ours else 3,
    }


def clear(axes: Any) -> None:
    """Takes the frame away, and draws lines for the numbers."""
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#cfcfcf", linewidth=0.8, zorder=1)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def save_small(figure: Figure, path: Path, colours: int) -> None:
    """Few colours make a small file."""
    figure.savefig(path, dpi=150)
    if path.suffix == ".png":
        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(colours)
        few.save(path, optimize=True)


def save(results: dict[str, Any], path: Path) -> None:
    """Ratios as points with their quartiles."""
    workloads = results["workloads"]
    names = [name for name in contestants_of(workloads) if name != FLOOR]
    height = 1.6 + ROW * max(len(workloads), 2)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    _draw_ratios(figure.subplots(), workloads, names)
    about = results["about"]
    figure.suptitle(f"{about['device']}, jax {about['jax']}", fontsize=12)
    figure.savefig(path, dpi=150)


def _draw_ratios(axes: Any, workloads: dict[str, Any], names: list[str]) -> None:
    """One row for each workload, the contestants below each other."""
    for i, name in enumerate(names):
        shift = 0.15 * (i - (len(names) - 1) / 2)
        points = [
            (row + shift, one["ratio"])
            for row, workload in enumerate(workloads.values())
            if "ratio" in (one := workload["results"].get(name, {}))
        ]
        if points:
            medians = [one["median"] for _, one in points]
            below = [one["median"] - one["q1"] for _, one in points]
            above = [one["q3"] - one["median"] for _, one in points]
            heights = [height for height, _ in points]
            axes.errorbar(
                medians,
                heights,
                xerr=[below, above],
                label=name,
                linestyle="none",
                **style(name),
            )
    for row in range(0, len(workloads), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    axes.axvline(1.0, color=BLACK, linewidth=0.8, zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_xlim()
    shown = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks(range(len(workloads)), list(workloads))
    axes.set_ylim(max(len(workloads), 1) - 0.5, -0.5)
    axes.set_xlabel("time of a step / plain optax: median and quartiles")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            ncols=len(names),
            frameon=False,
            columnspacing=1.2,
            handletextpad=0.3,
        )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
