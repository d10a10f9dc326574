# SPDX-License-Identifier: Apache-2.0
"""The figure that the pictures of jls are drawn on, and their colours.

Matplotlib is imported here, and this module only when something is drawn.
"""

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours. Each has one meaning in all pictures, those of the notebooks,
# documentation and benchmarks too; shapes differ as well, for print in grey.
JLS = "#0072B2"
GREEN = "#009E73"  # the loss scale has grown
RED = "#D55E00"  # a step was skipped; what overflows
PURPLE = "#AA4499"  # a spike was skipped; Tol's, far enough from the red
BLACK, GREY = "#000000", "#777777"

# Inches. With text of 10 points, which is Matplotlib's, still legible on a phone.
WIDTH = 6.4


def with_exponent(scale: str) -> str:
    """A loss scale such as "2^15" in Matplotlib's own notation of a power."""
    return f"$2^{{{scale[2:]}}}$" if scale.startswith("2^") else scale


class ShownFigure(Figure):
    """A figure that a notebook shows even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


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
    x = x[thin(x, limit)]
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


def thin(x: np.ndarray, limit: int) -> np.ndarray:
    """Indices of at most `limit` of the numbers, spread as they are."""
    if len(x) <= limit:
        return np.arange(len(x))
    slots = (x - x.min()) / (x.max() - x.min() or 1.0) * (limit - 1)
    return np.unique(slots.astype(np.int64), return_index=True)[1]
