# SPDX-License-Identifier: Apache-2.0
"""The demo's plot: the losses, and under them the loss scale with its skips."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from jls._text import format_scale
from jls._tools.cli.demo_report import Runs, megabytes, percent
from jls._tools.figure import (
    BLACK,
    GREY,
    JLS,
    RED,
    WIDTH,
    draw_rug,
    with_exponent,
)

# The runs in their order. Line styles differ too: clear to every eye and in print.
STYLES = {
    "float32": {"color": BLACK, "linestyle": "-", "linewidth": 3.5, "alpha": 0.35},
    "float16, no scale": {"color": RED, "linestyle": "--", "linewidth": 1.8},
    "float16 with jls": {"color": JLS, "linestyle": "-", "linewidth": 1.3},
    "bfloat16, no scale": {"color": GREY, "linestyle": ":", "linewidth": 1.5},
}


def save(runs: Runs, output: Path) -> None:
    """Writes the plot, in the format of `output`'s suffix."""
    # Not pyplot: it keeps figures in global state and may look for a display.
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    losses, scale = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(runs.scaled.losses) + 1)
    for (name, style), run in zip(STYLES.items(), runs, strict=True):
        label = f"{name}: {percent(run.accuracy)} accuracy, {megabytes(run.memory)}"
        losses.plot(steps, run.losses, label=label, **style)
    losses.set_yscale("log")
    losses.set_ylabel("training loss")
    losses.set_title("One float32 network on handwritten digits, trained four times")
    title = "accuracy, memory that the backward pass needs"
    losses.legend(
        loc="center right", title=title, fontsize="small", title_fontsize="small"
    )

    skipped = ~runs.scaled.applied
    scale.step(steps, runs.scaled.scales, where="post", color=JLS, label="loss scale")
    label = f"skipped steps ({np.sum(skipped)})"
    draw_rug(scale, steps[skipped], len(steps), 0.05, "|", RED, 12, label)
    scale.set_yscale("log", base=2)
    scale.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: with_exponent(format_scale(y)))
    )
    scale.margins(y=0.15)  # room for the marks under the line
    scale.set_ylabel("loss scale")
    scale.set_xlabel("step")
    scale.set_title("The loss scale that jls found")
    scale.legend(loc="upper left")
    for axes in (losses, scale):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=180)
