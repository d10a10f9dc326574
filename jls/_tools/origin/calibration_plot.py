# SPDX-License-Identifier: Apache-2.0
"""The picture of a `jls.types.Calibration`: its float16 gradients, module by module.

This module imports Matplotlib. It is itself imported only to draw something.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from jls._program.places import Place, line_of_cell
from jls._text import format_scale
from jls._tools.figure import BLACK, GREY, JLS, RED, WIDTH, ShownFigure, with_exponent
from jls._tools.origin.twin import HIGHEST, LOWEST, Cotangent

LOSS = "#F0F0F0"  # the background beyond the range of float16
_MOST_ROWS = 24
_WORTH_SAYING = 0.01  # the least share of vanishing values that is written
_NORMAL = -14  # the smallest power of two that float16 has in full precision


class _Row(NamedTuple):
    """The gradients of a module, or of a line."""

    name: str
    shares: np.ndarray  # f64[41], at the initial scale
    vanishing: float
    largest: float  # at a loss scale of 1
    limits: bool


def plot(
    cotangents: Sequence[Cotangent],
    init_scale: float,
    limit: Place | None,
    axes: Any = None,
) -> Figure:
    rows = _rows(cotangents, limit)
    shift = round(math.log2(init_scale))
    if axes is None:
        # Not pyplot: it keeps figures in global state, and a notebook shows them twice.
        figure = ShownFigure(
            figsize=(WIDTH, 1.6 + 0.36 * len(rows)), layout="constrained"
        )
        axes = figure.subplots()
    if not isinstance(axes, Axes):
        raise TypeError(f"axes must be one of Matplotlib's Axes, got {axes!r}.")
    _draw_range(axes, min(LOWEST, LOWEST - shift))
    for y, row in enumerate(rows):
        shares = np.array([row.vanishing, *row.shares])
        _strip(axes, y - 0.2, shares, -shift, GREY)
        _strip(axes, y + 0.2, shares, 0, JLS)
        at_1 = _share_below(row, LOWEST + shift)
        if at_1 >= _WORTH_SAYING:
            arrow = "\N{RIGHTWARDS ARROW}"
            axes.annotate(
                f"{at_1:.0%} {arrow} {row.vanishing:.0%}\nvanish",
                (1.0, y),  # to the right of the row
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                linespacing=1.0,
            )
        if row.limits:
            x = math.log2(row.largest * init_scale)
            axes.plot([x, x], [y - 0.02, y + 0.42], color=RED, lw=2.4)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(RED if row.limits else BLACK)
    axes.set_ylim(len(rows) + 0.2, -0.6)  # room for words below the rows
    start = with_exponent(format_scale(init_scale))
    axes.legend(
        handles=[
            Patch(color=GREY, label="loss scale 1"),
            Patch(color=JLS, label=f"loss scale {start}"),
            Patch(color=RED, label=f"overflows first: {_line(limit)}"),
        ],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        borderaxespad=0.3,
    )
    axes.set_xlabel("magnitude of the float16 gradients")
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def _draw_range(axes: Axes, low: int) -> None:
    """Draws the axis, and the range of float16 on it."""
    low, high = low - 1, HIGHEST + 9
    axes.set_xlim(low, high)
    axes.axvspan(low, LOWEST, color=LOSS, zorder=0)
    axes.axvspan(HIGHEST + 1, high, color=LOSS, zorder=0)
    axes.axvline(_NORMAL, color=GREY, lw=0.8, ls=":", zorder=1)
    words = (
        ((low + LOWEST) / 2, "vanish"),
        ((LOWEST + _NORMAL) / 2, "lose\nprecision"),
        ((_NORMAL + HIGHEST + 1) / 2, "float16"),
        ((HIGHEST + 1 + high) / 2, "overflow"),
    )
    for x, word in words:
        axes.text(
            x,
            0.015,
            word,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=8,
            linespacing=0.9,
            color=GREY,
        )
    axes.xaxis.set_major_locator(MultipleLocator(8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{int(x)}}}$"))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _strip(axes: Axes, y: float, shares: np.ndarray, shift: int, color: str) -> None:
    """Draws one bar: a cell is darker if more values have its power of two.

    Its first cell has all the values that vanish at `init_scale`.
    """
    present = np.flatnonzero(shares)
    if not present.size:
        return
    first, last = present[0], present[-1]
    shown = np.sqrt(shares[first : last + 1] / shares.max())
    colors = LinearSegmentedColormap.from_list("", ["#FFFFFF", color])
    left = LOWEST - 1 + first + shift
    axes.pcolormesh(
        np.arange(left, left + len(shown) + 1),
        [y - 0.17, y + 0.17],
        0.15 + 0.85 * shown[None],
        cmap=colors,
        vmin=0,
        vmax=1,
        zorder=2,
    )


def _rows(cotangents: Sequence[Cotangent], limit: Place | None) -> list[_Row]:
    """The modules, or lines that are in none, in the order of the forward pass."""
    every = cotangents[::-1]
    names = _names([x.place for x in every])
    groups: dict[str, list[Cotangent]] = {}
    for name, cotangent in zip(names, every, strict=True):
        groups.setdefault(name, []).append(cotangent)
    at = limit and limit._replace(iteration=())
    return [
        _Row(
            name,
            np.mean([x.shares for x in group], axis=0),
            float(np.mean([x.vanishing for x in group])),
            max(x.largest for x in group),
            any(x.place._replace(iteration=()) == at for x in group),
        )
        for name, group in groups.items()
    ]


def _names(places: Sequence[Place]) -> list[str]:
    """The labels of the rows: modules, without the path that all have in common."""
    paths = [
        # The scope of an einsum has an arrow: it is no module.
        tuple(part for part in x.module.split("/") if "->" not in part)
        for x in places
    ]
    modules = [x for x in paths if any(x)] or [()]
    ends = zip(min(modules), max(modules), strict=False)
    common = len([*itertools.takewhile(lambda x: x[0] == x[1], ends)])
    # The model itself keeps its name.
    paths = [
        (x[common:] or x[-1:]) if any(x) else (_line(place),)
        for x, place in zip(paths, places, strict=True)
    ]
    for depth in range(max(map(len, paths)), 0, -1):
        names = ["/".join(x[:depth]) for x in paths]
        if len(set(names)) <= _MOST_ROWS or depth == 1:
            return names
    return []


def _line(place: Place | None) -> str:
    if place is None or not place.file:
        return "line not known"
    return line_of_cell(place) or f"{Path(place.file).name}:{place.line}"


def _share_below(row: _Row, exponent: int) -> float:
    """The share of the values that are below a power of two."""
    count = min(max(exponent - LOWEST, 0), len(row.shares))
    return row.vanishing + float(row.shares[:count].sum())
