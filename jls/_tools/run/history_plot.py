# SPDX-License-Identifier: Apache-2.0
"""The picture of a `jls.History`: loss, loss scale and gradient norm over the steps.

Matplotlib is imported here, and this module only when something is drawn.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from jls._text import format_scale
from jls._tools.figure import (
    BLACK,
    GREEN,
    GREY,
    JLS,
    PURPLE,
    RED,
    WIDTH,
    ShownFigure,
    draw_rug,
    thin,
    with_exponent,
)
from jls._tools.run.columns import (
    Columns,
    column,
    count_backoffs,
    growths_and_backoffs,
    skip_counts,
    spike_counts,
)

POINTS = 2000  # a line of more is drawn as at most this many medians with their range
NORMS = "global_norm", "grad_norm"
TICKS = 400  # more would be too close together to see
MARKS = 120


def plot(columns: Columns, axes: Any = None) -> Figure:
    panels = _panels(columns)
    if axes is None:
        # Not pyplot: it keeps figures in global state, and a notebook shows them twice.
        heights = [3, *[2] * (len(panels) - 1)]
        size = (WIDTH, 0.9 + 0.9 * sum(heights))
        figure = ShownFigure(figsize=size, layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights)
        figure.align_ylabels()
    given = list(np.ravel(np.asarray(axes, object)))
    for panel in given:
        if not isinstance(panel, Axes):
            raise TypeError(f"axes must be matplotlib's Axes, got {panel!r}.")
    if len(given) != len(panels):
        names = ", ".join(name for name, _ in panels)
        raise ValueError(
            f"axes must be as many as there are panels, {len(panels)} ({names}), got "
            f"{len(given)}."
        )
    steps = column(columns, "step").astype(np.float64)
    low, high = steps.min(), steps.max()
    margin = 0.02 * (high - low) or 0.5
    spikes = spike_counts(columns)
    others = skip_counts(columns) - spikes
    for panel, (name, draw) in zip(given, panels, strict=True):
        panel.set_xlim(low - margin, high + margin)
        draw(panel, columns, steps)
        for counts, word, style in (
            (others, "skipped steps", ("|", RED, 9)),
            (spikes, "skipped spikes", ("D", PURPLE, 4)),
        ):
            if counts.any():
                # Explained once, in the first panel.
                label = f"{word} ({np.sum(counts)})" if panel is given[0] else None
                draw_rug(panel, steps[counts > 0], TICKS, 0.045, *style, label)
        panel.set_ylabel(name)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        # Above the panel, where it covers nothing.
        handles, labels = panel.get_legend_handles_labels()
        if not labels:
            continue
        panel.legend(
            handles,
            labels,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderaxespad=0.1,
            ncols=min(3, len(labels)),
            frameon=False,
            fontsize="small",
            columnspacing=1.2,
            handletextpad=0.5,
        )
    given[-1].set_xlabel("step")
    given[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    return given[0].get_figure(root=True)


Draw = Callable[[Axes, Columns, np.ndarray], None]


def _panels(columns: Columns) -> list[tuple[str, Draw]]:
    panels: list[tuple[str, Draw]] = []
    if "loss" in columns:
        panels.append(("loss", _draw_loss))
    if "loss_scale" in columns:
        panels.append(("loss scale", _draw_scale))
    if any(name in columns for name in NORMS):
        panels.append(("gradient norm", _draw_norm))
    if not columns["step"] or not panels:
        got = "no rows" if not columns["step"] else f"only {', '.join(columns)}"
        raise ValueError(
            "plot needs at least one row, and loss, loss_scale, global_norm or "
            f"grad_norm in it, got {got}."
        )
    return panels


def _draw_loss(panel: Axes, columns: Columns, steps: np.ndarray) -> None:
    losses = column(columns, "loss")
    is_known = _is_known(columns, "loss")
    _draw_line(panel, steps[is_known], losses[is_known])
    _draw_limit(panel, steps, column(columns, "limit_loss"))
    # A skipped step has its tick already. One with a bad loss and no tick was either
    # applied, which is serious, or nobody recorded whether it was.
    bad = is_known & ~np.isfinite(losses) & (skip_counts(columns) == 0)
    if bad.any():
        label = f"loss inf or NaN ({np.sum(bad)})"
        draw_rug(panel, steps[bad], MARKS, 0.95, "x", BLACK, 6, label)


def _draw_norm(panel: Axes, columns: Columns, steps: np.ndarray) -> None:
    name = next(name for name in NORMS if name in columns)
    is_known = _is_known(columns, name)
    _draw_line(panel, steps[is_known], column(columns, name)[is_known])
    _draw_limit(panel, steps, column(columns, "limit_norm"))


def _is_known(columns: Columns, name: str) -> np.ndarray:
    return np.array([value is not None for value in columns[name]], bool)


def _draw_limit(panel: Axes, steps: np.ndarray, limits: np.ndarray) -> None:
    """Above which a value is a spike, where it is judged; as far as the panel goes."""
    limits = np.where(np.isfinite(limits), limits, np.nan)
    if np.isnan(limits).all():
        return
    at = thin(steps, POINTS)
    label = "limit of spikes"
    panel.set_ylim(panel.get_ylim())  # a limit far above the values does not count
    panel.plot(steps[at], limits[at], "--", color=GREY, linewidth=1, label=label)


def _draw_scale(panel: Axes, columns: Columns, steps: np.ndarray) -> None:
    scales = column(columns, "loss_scale").astype(np.float64)
    is_known = np.isfinite(scales) & (scales > 0)
    x, y = steps[is_known], scales[is_known]
    panel.set_yscale("log", base=2)
    if not y.size:
        return
    grown, backed_off = growths_and_backoffs(y)
    corners = grown | backed_off
    corners[[0, -1]] = True  # between the corners the line is level
    marker = "o" if len(y) == 1 else None
    panel.step(
        x[corners], y[corners], where="post", color=JLS, lw=1.6, marker=marker, ms=3.5
    )
    backoffs = count_backoffs(columns, np.sum(backed_off))
    for where, shape, color, label in (
        (grown, "^", GREEN, f"growth ({np.sum(grown)})"),
        (backed_off, "v", RED, f"backoff ({backoffs})"),
    ):
        if where.any():
            at = np.flatnonzero(where)[thin(x[where], MARKS)]
            style = {"linestyle": "none", "marker": shape, "ms": 6.5, "color": color}
            panel.plot(
                x[at], y[at], mec="white", mew=0.6, zorder=3, label=label, **style
            )
    low, high = np.log2(y.min()), np.log2(y.max())
    room = max(1.0, 0.2 * (high - low))
    panel.set_ylim(2.0 ** (low - room), 2.0 ** (high + room / 2))
    panel.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(
        FuncFormatter(lambda scale, _: with_exponent(format_scale(scale)))
    )


# Lines and marks that stay clear from one row to a hundred thousand.


def _draw_line(panel: Axes, steps: np.ndarray, values: np.ndarray) -> None:
    """A line, with a gap where a value is not finite."""
    values = values.astype(np.float64)
    is_finite = np.isfinite(values)
    x, y = steps, np.where(is_finite, values, np.nan)
    if not is_finite.any():
        panel.set_yticks([])
        center = {"ha": "center", "va": "center", "transform": panel.transAxes}
        panel.text(0.5, 0.5, "no finite value", color=GREY, **center)
        return
    low, high = np.nanmin(y), np.nanmax(y)
    if low > 0:
        _use_log_axis(panel, np.log10(high) - np.log10(low))
    panel.margins(y=0.12)  # room for the ticks under the line
    label = None
    if len(y) > POINTS:
        size = -(-len(y) // POINTS)
        parts = [slice(i, i + size) for i in range(0, len(y), size)]
        known = [y[part][is_finite[part]] for part in parts]
        known = [part if part.size else np.array([np.nan]) for part in known]
        lowest, highest = map(np.min, known), map(np.max, known)
        x = np.array([np.median(x[part]) for part in parts])
        y = np.array([np.median(part) for part in known])
        panel.fill_between(x, [*lowest], [*highest], color=JLS, alpha=0.25, linewidth=0)
        label = f"median and range of {size} rows"
    marker = "o" if len(y) <= 40 else None
    panel.plot(x, y, color=JLS, linewidth=1.4, marker=marker, ms=3.5, label=label)
    is_gap = np.isnan(np.pad(y, 1, constant_values=np.nan))
    is_alone = ~is_gap[1:-1] & is_gap[:-2] & is_gap[2:]  # a line of one point
    if marker is None and is_alone.any():
        panel.plot(x[is_alone], y[is_alone], "o", color=JLS, ms=1.5)


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
