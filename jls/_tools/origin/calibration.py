# SPDX-License-Identifier: Apache-2.0
"""The result of `jls.calibrate`, and its text."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from jls._program.places import Place
from jls._text import and_more, no_field, scale_in_words, wrapped
from jls._tools.origin.losses import PrecisionLoss
from jls._tools.origin.result import place_in_lines, place_in_words
from jls._tools.origin.twin import Cotangent
from jls._tools.reading.keep import Keep
from jls._tools.reading.precision import Precision, in_words

_MAX_PLACES = 5  # in one list of the text: it fits on a screen
_MIN_SHARE = 0.01  # of gradients that vanish: a smaller share is no reason to act


class Calibration(NamedTuple):
    """Result of `jls.calibrate`: the loss scale to start with, and what limits it.

    `print` it; `plot()` is a picture.

    Example:
      >>> state = jls.dynamic().init()
      >>> result = jls.calibrate(jls.value_and_grad(jnp.sum), state, jnp.ones(3))
      >>> result.init_scale, result.ceiling  # float32 needs none
      (1.0, None)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    init_scale: float  # half of the ceiling, within the scaler's bounds if known
    ceiling: float | None = None  # the largest that is finite; None: none is needed
    limited_by: Place | None = None  # what overflows first at twice the ceiling
    # Where gradients vanish at `init_scale`, and what share of them; the largest first.
    vanishing: tuple[tuple[Place, float], ...] = ()
    notes: tuple[str, ...] = ()
    cotangents: tuple[Cotangent, ...] = ()  # in the order of the program
    write: str = ""  # what to write in the step, or before it; "" if nothing
    precision: Precision | None = None  # what share of the step is half
    half: str = ""  # what the headline says of half precision; "" if nothing
    # The places that have to stay float32, for `jls.autocast`; None if there are none.
    keep: Keep = None
    # With `losses=True`: the lines that lose precision, by the factor.
    losses: tuple[PrecisionLoss, ...] = ()

    def plot(self, axes: Any = None) -> Any:
        """Draws the float16 gradients of each module on the range of float16.

        Each row is a module, or a line of the source. It shows how the magnitudes of
        its float16 gradients spread over the powers of two, at a loss scale of 1 and at
        `init_scale`; the darker, the more. On the left of float16 they vanish, on the
        right they overflow. The row that limits the scale is marked. On the right is
        the share of each row that vanishes; the field `vanishing` has those of single
        operations. Needs Matplotlib.

        Args:
          axes: one of Matplotlib's Axes, or None.

        Returns:
          The Figure.

        Raises:
          TypeError: if `axes` is something else.
          ValueError: if there is nothing to draw: no float16 follows the loss scale.
          ImportError: without Matplotlib.

        Example:
          >>> result.plot().savefig("calibration.png")  # doctest: +SKIP
        """
        if not self.cotangents:
            reason = self.notes[0] if self.notes else "Only float16 is drawn"
            raise ValueError(
                "There is nothing to draw: no float16 follows the loss scale. "
                f"{reason}."
            )
        try:
            from jls._tools.origin.calibration_plot import plot
        except ImportError as error:
            error.add_note("Calibration.plot needs Matplotlib: pip install matplotlib")
            raise
        return plot(self.cotangents, self.init_scale, self.limited_by, axes)

    def __str__(self) -> str:
        notes = [*self.notes] or [""]
        if self.ceiling is not None:
            start = scale_in_words(self.init_scale)
            notes = [f"Start with a loss scale of {start}", *self.notes]
        first = notes.pop(0)
        if not self.half:
            first = f"{first[:1].lower()}{first[1:]}"
        text = "jls.calibrate: " + ". ".join(filter(None, (self.half, first))) + "."
        limit = self.limited_by if self.limited_by and self.limited_by.file else None
        if self.ceiling is not None:
            most, above = map(scale_in_words, (self.ceiling, 2 * self.ceiling))
            text += f" This batch allows {most}; at {above} float16 overflows"
            text += ", first here:" if limit else "."
        lines = wrapped(text)
        if limit:
            lines += ["", *place_in_lines(limit), *wrapped(f"  {limit.operation}")]
        for note in notes:
            lines += ["", *wrapped(f"{note}.")]
        lines += self._vanishing_in_lines()
        if self.losses:
            items = [
                f"{place_in_words(x.place)}: {x.error:.1%} off, "
                f"{x.factor:.0f} times as much as its operands"
                for x in self.losses
            ]
            lines += ["", "These lines lose precision:", *_list(items)]
        if self.precision is not None:
            lines += ["", *wrapped(f"Precision: {in_words(self.precision)}.")]
        write = [x for y in self.write.splitlines() for x in wrapped(f"Write: {y}")]
        return "\n".join([*lines, "", *write] if write else lines)

    def _vanishing_in_lines(self) -> list[str]:
        shares = [pair for pair in self.vanishing if pair[1] >= _MIN_SHARE]
        if self.ceiling is None or not shares:
            return []
        start = scale_in_words(self.init_scale)
        text = f"At {start} these gradients vanish in part."
        if 2 * self.init_scale >= self.ceiling:
            text += (
                " Another scale would not help: compute them in float32 if they matter."
            )
        largest = dict[str, float]()  # of each line
        for at, share in shares:
            largest.setdefault(place_in_words(at), share)
        items = [f"{share:.0%}  {words}" for words, share in largest.items()]
        return ["", *wrapped(text), *_list(items)]

    def __repr__(self) -> str:
        return str(self)


def _list(items: Iterable[str]) -> list[str]:
    every = list(items)
    lines = [
        line for item in every[:_MAX_PLACES] for line in wrapped(f"  {item}", "    ")
    ]
    more = and_more(every, _MAX_PLACES)
    return [*lines, f"  {more}"] if more else lines
