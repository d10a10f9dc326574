"""The picture of what was compiled for a target."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from benchmarks.contestants import FLOOR
from benchmarks.plot import style
from benchmarks.report import contestants_of
from benchmarks.target_report import extra_bytes

# The first of them that have room.
KERNEL_TICKS = [0, 200, 40, 1000, 20]
BYTE_TICKS = [0, 2, -2, 8, -8, 32, -32, 128, 1, -1, 4, 16, 64]
# Inches. With text of 11 points legible on a phone.
WIDTH, NAMES, ROW, TOP, BOTTOM = 7.2, 2.55, 0.36, 0.95, 0.75
TICK = 0.42  # from one to the next


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
    names = [name for name in contestants_of(results) if name != FLOOR]
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
    panels: Any = figure.subplots(
        1,
        len(measures),
        sharey=True,
        squeeze=False,
        width_ratios=widths,
        gridspec_kw={
            "left": NAMES / WIDTH,
            "right": 0.965,
            "wspace": 0.1,
            "bottom": BOTTOM / height,
            "top": 1.0 - TOP / height,
        },
    )[0]
    for axes, (label, measure) in zip(panels, measures.items(), strict=True):
        _draw(axes, workloads, names, measure)
        axes.set_xlabel(label, fontsize=11, labelpad=4)
    _bytes_axis(panels[0])
    for axes in panels[1:]:
        _kernels_axis(axes)
    panels[0].set_yticks(range(len(workloads)), list(workloads))
    panels[0].set_ylim(len(workloads) - 0.5, -0.5)
    _title(figure, panels[0], results["about"])
    figure.savefig(path, dpi=150)
    if path.suffix == ".png":  # few colours make a small file
        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(256)
        few.save(path, optimize=True)
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
    axes.tick_params(labelsize=11, length=0, pad=4)
    axes.grid(axis="x", color="#cfcfcf", linewidth=0.8, zorder=1)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _bytes_axis(axes: Any) -> None:
    """Even up to 2 bytes, beyond that each step doubles."""
    axes.set_xscale("symlog", linthresh=2.0, linscale=1.2)
    axes.set_xlabel(f"{axes.get_xlabel()},\nlogarithmic beyond 2")
    ends = axes.dataLim
    low, high = 1.4 * min(ends.x0, -0.1), 1.25 * max(ends.x1, 4.0)
    axes.set_xlim(low, high)
    _set_ticks(axes, BYTE_TICKS)
    axes.xaxis.set_major_formatter(lambda x, _: _signed(x))


def _kernels_axis(axes: Any) -> None:
    """Even, and beyond 60 % drawn together, if there is as much as 150 %."""
    ends = axes.dataLim
    if ends.x1 > 150:
        axes.set_xscale("symlog", linthresh=60.0, linscale=1.6)
        axes.set_xlabel(f"{axes.get_xlabel()},\nlogarithmic beyond 60")
        high = 1.4 * ends.x1
        axes.set_xlim(min(1.2 * ends.x0, -3.0), high)
        _set_ticks(axes, KERNEL_TICKS)
    else:
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, -1.0), high + 0.1 * (high - low))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: _signed(x))


def _set_ticks(axes: Any, ticks: list[int]) -> None:
    """Those that lie on the axis, and leave each other room."""
    low, high = axes.get_xlim()
    width = axes.get_position().width * WIDTH
    shown: dict[int, float] = {}
    for tick in (tick for tick in ticks if low <= tick <= high):
        place = axes.transAxes.inverted().transform(axes.transData.transform((tick, 0)))
        if all(abs(place[0] - other) * width > TICK for other in shown.values()):
            shown[tick] = place[0]
    axes.set_xticks(sorted(shown))
    axes.set_xticks([], minor=True)


def _signed(tick: float) -> str:
    return f"{tick:+g}" if tick else "0"


def _title(figure: Any, axes: Any, about: dict[str, Any]) -> None:
    """At the left edge of the rows' names: what, how, and whose dots are whose."""
    width, height = figure.get_size_inches()
    versions = about["versions"]
    figure.text(
        0.12 / width,
        1 - 0.12 / height,
        about["device"],
        fontsize=14,
        fontweight="bold",
        va="top",
    )
    figure.text(
        0.12 / width,
        1 - 0.42 / height,
        f"{about['how']}; beyond plain optax; jls {versions['jls']}, "
        f"jax {versions['jax']}",
        fontsize=10,
        color="#555555",
        va="top",
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=6,
        fontsize=11,
        frameon=False,
        handletextpad=0.2,
        borderaxespad=0.3,
        columnspacing=1.2,
    )
