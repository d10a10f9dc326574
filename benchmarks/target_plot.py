"""The picture of what was compiled for a target."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.contestants import FLOOR
from benchmarks.plot import clear, save_small, style
from benchmarks.tables import contestants_of
from benchmarks.target_report import extra_bytes

KERNEL_TICKS = [0, 40, 200, 1000]
BYTE_TICKS = [-16, -2, 0, 2, 16, 128]
# Inches. With text of 11 points legible on a phone.
WIDTH, NAMES, ROW, TOP, BOTTOM = 7.2, 2.55, 0.36, 0.95, 0.75


def save(results: dict[str, Any], path: Path) -> bool:
    """Dots: what a step adds to plain optax on one chip, by workload and contestant.

    To the left bytes, to the right kernels, where they are known. Returns whether there
    was anything to draw.
    """
    workloads = {
        name: one
        for name, one in results["workloads"].items()
        if one["chips"] == 1
        and any(extra_bytes(one, n) is not None for n in one["results"] if n != FLOOR)
    }
    names = [name for name in contestants_of(results["workloads"]) if name != FLOOR]
    if not workloads or not names:
        return False
    measures = {"extra bytes per parameter": extra_bytes}
    if any(
        extra_kernels(one, n) is not None for one in workloads.values() for n in names
    ):
        measures["extra kernels, %"] = extra_kernels
    widths = [1.6, 1.0][: len(measures)]
    height = TOP + ROW * len(workloads) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    # By hand, so that a row is as high in every picture.
    edges = {"left": NAMES / WIDTH, "right": 0.965, "wspace": 0.1}
    edges |= {"bottom": BOTTOM / height, "top": 1.0 - TOP / height}
    kind: Any = {"width_ratios": widths, "gridspec_kw": edges}
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False, **kind)[0]
    for axes, (label, measure) in zip(panels, measures.items(), strict=True):
        _draw(axes, workloads, names, measure)
        axes.set_xlabel(label, fontsize=11, labelpad=4)
    _scale(panels[0], 2.0, BYTE_TICKS, 0.1)
    for axes in panels[1:]:
        _scale(axes, 60.0, KERNEL_TICKS, 1.0)
    panels[0].set_yticks(range(len(workloads)), list(workloads))
    panels[0].set_ylim(len(workloads) - 0.5, -0.5)
    _title(figure, panels[0], results["about"])
    save_small(figure, path, 256)
    return True


def extra_kernels(workload: dict[str, Any], name: str) -> float | None:
    """How many percent more kernels a contestant launches than plain optax."""
    results = workload["results"]
    bare = results.get(FLOOR, {}).get("kernels")
    mine = results.get(name, {}).get("kernels")
    return None if bare is None or mine is None else 100 * (mine / bare - 1)


def _draw(axes: Any, workloads: dict[str, Any], names: list[str], measure: Any) -> None:
    """One row for each workload, the contestants below each other."""
    for i, name in enumerate(names):
        shift = 0.62 / max(len(names), 3) * 1.15 * (i - (len(names) - 1) / 2)
        points = [
            (extra, row + shift)
            for row, one in enumerate(workloads.values())
            if (extra := measure(one, name)) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                label=name,
                clip_on=False,
                markeredgecolor="white",
                markeredgewidth=0.5,
                **style(name),
            )
    for row in range(0, len(workloads), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    axes.axvline(0.0, color="black", linewidth=1.2, zorder=2)
    axes.tick_params(labelsize=11, pad=4)
    clear(axes)


def _scale(axes: Any, even: float, ticks: list[int], least: float) -> None:
    """Even up to so much, beyond that logarithmic, if there is more."""
    ends = axes.dataLim
    low, high = 1.4 * min(ends.x0, -least), 1.25 * max(ends.x1, 2 * even)
    axes.set_xscale("symlog", linthresh=even, linscale=1.2)
    axes.set_xlabel(f"{axes.get_xlabel()},\nlogarithmic beyond {even:g}")
    axes.set_xlim(low, high)
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda x, _: _signed(x))


def _signed(tick: float) -> str:
    return f"{tick:+g}" if tick else "0"


def _title(figure: Any, axes: Any, about: dict[str, Any]) -> None:
    """At the left edge of the rows' names: what, how, and whose dots are whose."""
    width, height = figure.get_size_inches()
    versions = about["versions"]
    how = f"{about['how']}; beyond plain optax; jls {versions['jls']}"
    left, top = 0.12 / width, 1 - 0.12 / height
    figure.text(left, top, about["device"], fontsize=14, fontweight="bold", va="top")
    text = f"{how}, jax {versions['jax']}"
    below = 1 - 0.42 / height
    figure.text(left, below, text, fontsize=10, color="#555555", va="top")
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": 6}
    axes.legend(**place, fontsize=11, frameon=False, handletextpad=0.2)
