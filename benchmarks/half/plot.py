"""The pictures: the memory of a step by chip and way; the losses of a training."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.half.programs import WAYS, half_of
from benchmarks.plot import clear, save_small
from benchmarks.targets import TARGETS
from jls._tools.figure import BLACK, GREEN, JLS

MODEL = "transformer, scan"
COLOURS = {"float32": "#999999", "by hand": "#E69F00", "autocast": JLS}
LABELS = {
    "float32": "float32",
    "by hand": "dtype= by hand",
    "autocast": "jls.autocast",
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
