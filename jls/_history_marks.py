# SPDX-License-Identifier: Apache-2.0
"""Lines and marks that stay clear from one row to a hundred thousand."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colours; the marks differ in shape too, for print in grey.
BLACK, BLUE, GREEN, RED = "#000000", "#0072B2", "#009E73", "#D55E00"
POINTS = 2000  # a line of more is drawn as at most this many medians with their range


def draw_line(panel: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """The finite values; the line goes on over the others."""
    values = values.astype(np.float64)
    is_finite = np.isfinite(values)
    x, y = steps[is_finite], values[is_finite]
    if not y.size:
        panel.set_yticks([])
        center = {"ha": "center", "va": "center", "transform": panel.transAxes}
        panel.text(0.5, 0.5, "no finite value", color="gray", **center)
        return
    if np.all(y > 0):
        _use_log_axis(panel, np.log10(y.max()) - np.log10(y.min()))
    panel.margins(y=0.12)  # room for the ticks under the line
    label = None
    if len(y) > POINTS:
        size = -(-len(y) // POINTS)
        parts = [slice(i, i + size) for i in range(0, len(y), size)]
        lowest = [np.min(y[part]) for part in parts]
        highest = [np.max(y[part]) for part in parts]
        x = np.array([np.median(x[part]) for part in parts])
        y = np.array([np.median(y[part]) for part in parts])
        panel.fill_between(x, lowest, highest, color=BLUE, alpha=0.25, linewidth=0)
        label = f"median and range of {size} rows"
    marker = "o" if len(y) <= 40 else None
    panel.plot(x, y, color=BLUE, linewidth=1.4, marker=marker, ms=3.5, label=label)


def _use_log_axis(panel: Axes, decades: float) -> None:
    """A log axis with plain numbers, as many as can be read."""
    panel.set_yscale("log")
    if decades < 0.7:
        panel.yaxis.set_major_locator(MaxNLocator(5))
    else:
        between = (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
        panel.yaxis.set_major_locator(LogLocator(subs=between))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def draw_rug(
    panel: Axes,
    x: np.ndarray,
    limit: int,
    height: float,
    marker: str,
    color: str,
    size: float,
    label: str | None,
) -> None:
    """Marks along the panel at a height between 0, its foot, and 1."""
    x = x[thinned(x, limit)]
    panel.plot(
        x,
        np.full(len(x), height),
        transform=panel.get_xaxis_transform(),
        linestyle="none",
        marker=marker,
        markersize=size,
        markeredgewidth=1.6 if len(x) < 100 else 0.8,
        color=color,
        label=label,
    )


def thinned(x: np.ndarray, limit: int) -> np.ndarray:
    """Indices of at most `limit` of the numbers, spread as they are."""
    if len(x) <= limit:
        return np.arange(len(x))
    slots = (x - x.min()) / (x.max() - x.min() or 1.0) * (limit - 1)
    return np.unique(slots.astype(np.int64), return_index=True)[1]
