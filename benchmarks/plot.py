"""The picture of the figures."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.contestants import FLOOR
from benchmarks.report import contestants_of


def save(results: dict[str, Any], path: Path) -> None:
    """Ratios as points with their quartiles, and the two curves of growth."""
    names = contestants_of(results)
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    workloads = results["workloads"]
    rows = [name for name in workloads if workloads[name]["growth"] is None]
    kinds = ("leaves", "parameters")
    curves = {k: [w for w in workloads.values() if w["growth"] == k] for k in kinds}
    curves = {kind: points for kind, points in curves.items() if len(points) > 1}
    figure = Figure(figsize=(12, max(5.0, 2 + 0.5 * len(rows))), layout="constrained")
    mosaic: Any = [["ratio", kind] for kind in curves] or [["ratio"]]
    panels = figure.subplot_mosaic(mosaic, width_ratios=[2, 1][: len(mosaic[0])])
    ratio = panels["ratio"]
    for i, name in enumerate(names):
        points = [
            (row + 0.12 * (len(names) / 2 - i), one["ratio"])
            for row, workload in zip(range(len(rows), 0, -1), rows, strict=True)
            if "ratio" in (one := workloads[workload]["results"].get(name, {}))
        ]
        if name != FLOOR and points:
            medians = [one["median"] for _, one in points]
            below = [one["median"] - one["q1"] for _, one in points]
            above = [one["q3"] - one["median"] for _, one in points]
            heights = [height for height, _ in points]
            style = {"fmt": "o", "color": colours[name], "markersize": 4}
            ratio.errorbar(medians, heights, xerr=[below, above], label=name, **style)
    ratio.axvline(1.0, color="black", linewidth=0.8)
    ratio.set_xscale("log")
    ratio.xaxis.set_minor_locator(NullLocator())
    ticks = [0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0]
    low, high = ratio.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    ratio.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ratio.set_yticks(range(len(rows), 0, -1), rows)
    ratio.set_ylim(0.4, len(rows) + 0.6)
    ratio.set_xlabel("time of a step / plain optax: median and quartiles")
    if ratio.get_legend_handles_labels()[0]:
        ratio.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))
    for kind, points in curves.items():
        axes = panels[kind]
        for name in names:
            line = [
                (one[kind], one["results"][name]["extra_seconds"])
                for one in points
                if name != FLOOR and "extra_seconds" in one["results"].get(name, {})
            ]
            if line:
                low, middle, high = (
                    [1e6 * seconds[q] for _, seconds in line]
                    for q in ("q1", "median", "q3")
                )
                sizes = [size for size, _ in line]
                axes.plot(sizes, middle, "o-", color=colours[name])
                axes.fill_between(sizes, low, high, color=colours[name], alpha=0.2)
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=100.0)  # an extra time may be below 0
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.margins(y=0.1)
        if axes.get_ylim()[0] > -100.0:
            axes.set_ylim(bottom=0.0)
        axes.set_xlabel(kind)
        axes.set_ylabel("extra microseconds / step")
    figure.suptitle(f"{results['about']['device']}, jax {results['about']['jax']}")
    figure.savefig(path, dpi=120)
