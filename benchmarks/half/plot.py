"""Pictures: the memory of a step by chip, and the losses of trainings."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.half.programs import WAYS, half_of
from benchmarks.plot import clear, save_small
from benchmarks.targets import TARGETS
from jls._tools.figure import BLACK, GREEN, JLS, use_grid

MODEL = "transformer, scan"
COLOURS = {"float32": "#999999", "by hand": "#E69F00", "autocast": JLS}
LABELS = {
    "float32": "float32",
    "by hand": "dtype= by hand",
    "autocast": "jls.autocast",
}
# What parameters are stored in: the float32 line is wide, since two others lie on it.
STORED: dict[str, dict[str, Any]] = {
    "float32": {"color": "#bbbbbb", "linewidth": 7},
    "plain bfloat16": {"color": "#E69F00", "linewidth": 2.5},
    "stochastic": {"color": JLS, "linewidth": 2},
    "exact": {"color": JLS, "linestyle": "none", "marker": "o", "markersize": 5.5},
}
# Narrower and narrower, since curves may coincide.
CURVES = {
    "float32": ("float32", BLACK, 6),
    "bfloat16 autocast": ("bfloat16", GREEN, 4.5),
    "float16 autocast": ("float16 with a loss scale", JLS, 3),
    "float16 without a scale": ("float16 without one", "#D55E00", 1.5),
}


def save(results: dict[str, Any], path: Path) -> None:
    """Bars, three for each chip; each of the last two says its part of float32."""
    chips = {
        name: results[name]["models"][MODEL]
        for name in TARGETS
        if len(results.get(name, {}).get("models", {}).get(MODEL, {})) == len(WAYS)
    }
    figure = Figure(figsize=(7.2, 1.1 + 0.72 * len(chips)), layout="constrained")
    axes: Any = figure.subplots()
    for row, ways in enumerate(chips.values()):
        whole = ways["float32"]["temporary_bytes"]
        for i, way in enumerate(WAYS):
            size = ways[way]["temporary_bytes"]
            place = row + 0.27 * (i - 1)
            label = LABELS[way] if row == 0 else None
            axes.barh(place, size / 1e9, 0.25, color=COLOURS[way], label=label)
            part = "" if way == "float32" else f"  ({size / whole:.0%})"
            said = f" {size / 1e9:.1f}{part}"
            axes.text(size / 1e9, place, said, va="center", fontsize=9)
    names = [_name(name) for name in chips]
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    clear(axes)
    axes.set_xlabel("temporary memory of one step, GB (part of float32)", fontsize=10)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    axes.set_title(
        "Transformer of 136 million parameters, 8 x 512 words; compiled, not run",
        fontsize=10,
        loc="left",
        color="#555555",
    )
    save_small(figure, path, 64)


def save_training(results: dict[str, Any], path: Path) -> None:
    """The loss on the validation of the first seed, and what a step costs."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes: Any = figure.subplots()
    for name, (label, colour, width) in CURVES.items():
        if name in results:
            one = results[name][0]
            cost = f"{one['steps_per_second']:.0f} steps a second"
            memory = f"{one['temporary_bytes'] / 1e9:.2g} GB"
            said = f"{label}: {one['losses'][-1]:.3f}, {cost}, {memory}"
            style = {"color": colour, "linewidth": width}
            axes.plot(one["steps"], one["losses"], label=said, **style)
    clear(axes)
    axes.grid(axis="y", color="#cfcfcf", linewidth=0.8, zorder=1)
    axes.set_xlabel("step", fontsize=10)
    axes.set_title("loss on held-out text", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)
    save_small(figure, path, 64)


def _name(target: str) -> str:
    """The chip, and below it the half precision that it is fast in."""
    one = TARGETS[target]
    chip = one.chip.removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    return f"{chip}\n{half_of(one).__name__}"


def save_stored(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """By step, of each way: by how much the loss fell, and how far parameters went."""
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, style in STORED.items():
        steps = results[way][0]["steps"]
        losses, ways = (
            np.mean([one[name] for one in results[way]], axis=0)
            for name in ("losses", "ways")
        )
        label = f"jls: {way}" if style["color"] == JLS else way
        left.plot(steps, losses - losses[0], label=label, **style)
        right.plot(steps[1:], ways[1:], **style)
    left.set_title("Change of the loss", fontsize=12, loc="left")
    right.set_title("Share of the way of float32", fontsize=12, loc="left")
    right.set_ylim(-0.05, 1.15)
    right.set_yticks([0, 0.5, 1])
    left.locator_params(axis="y", nbins=4)
    for axes in (left, right):
        use_grid(axes)
        axes.set_xlabel("step", fontsize=11)
        axes.set_xlim(left=0)
        axes.tick_params(labelsize=11, length=0)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=12)
    save_small(figure, path, 64)
