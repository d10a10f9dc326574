# SPDX-License-Identifier: Apache-2.0
"""Draws what `jls.compare` found."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from jls._program.places import Place
from jls._tools.figure import JLS, RED, WIDTH, ShownFigure, use_grid
from jls._tools.origin.result import place_in_words

_LEAST = 1e-9  # errors below are drawn at the foot


def draw(every: Sequence[tuple[Place, float]], birth: Any) -> Any:
    """The error of each operation, in the order of the program; the birth is marked."""
    figure = ShownFigure(figsize=(WIDTH, 3.2), layout="constrained")
    axes = figure.add_subplot()
    errors = np.array([error for _, error in every], np.float64)
    axes.semilogy(np.maximum(errors, _LEAST), ".", markersize=4, color=JLS)
    axes.set_xlabel("operation, in the order of the program")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("relative error")
    use_grid(axes)
    if birth:
        places = [place._replace(iteration=()) for place, _ in every]
        first = birth.a._replace(iteration=())
        at = places.index(first) if first in places else 0
        axes.plot([at], [max(birth.error, _LEAST)], "v", color=RED)
        sides = zip("ab", (birth.a, birth.b), strict=True)
        title = [f"{name}: {place_in_words(place)}" for name, place in sides]
        axes.set_title("\n".join(title), fontsize=9, loc="left", color=RED)
    return figure
