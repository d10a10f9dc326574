# SPDX-License-Identifier: Apache-2.0
"""The result of `jls.why`, and its text."""

import linecache
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax.numpy as jnp

from jls._program.places import Place, line_of_cell, short_path
from jls._text import and_more, listed, no_field, wrapped

_OTHERS = 5  # births beside the first in the text: it fits on a screen

ARGUMENT, CONSTANT = "argument", "constant"


class Birth(NamedTuple):
    """An operation that made inf or NaN from finite numbers, or NaN from inf.

    Example:
      >>> jls.why(lambda x: jnp.log(x), jnp.zeros(3)).births[0].kind
      'inf'
    """

    kind: Literal["inf", "nan"]
    place: Place  # of an argument: the operation is "argument", the module its path
    # The largest magnitude of each floating operand, as far as it was kept in a loop.
    operands: tuple[float, ...] = ()
    dtype: str = ""  # of the result
    range: tuple[float, float] | None = None  # of the operand that decides, if one does
    advice: str = ""  # one sentence for the known patterns
    is_negative: bool = False  # of an inf: whether each one is -inf


class Why(NamedTuple):
    """Result of `jls.why`: where each inf and NaN in the results was born.

    `print` it: the first birth with its line of the source, then others, then what to
    do about it. It is true if a result is not finite, or an argument.

    Example:
      >>> why = jls.why(jnp.sum, jnp.ones(3))
      >>> why.births, bool(why)
      ((), False)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    births: tuple[Birth, ...] = ()  # in the order of the program
    results: tuple[str, ...] = ()  # what is not finite, by name
    # Whether it is gone at a lower loss scale; None without a loss scale.
    is_from_scale: bool | None = None
    notes: tuple[str, ...] = ()
    is_early: bool = False  # whether no line is to blame, which is said before any line

    def __bool__(self) -> bool:
        return bool(self.births or self.results)

    def __str__(self) -> str:
        if self.notes and not self.results:
            note = self.notes[0]
            return "\n".join(wrapped(f"jls.why: {note[0].lower()}{note[1:]}."))
        lines = wrapped(f"jls.why: {_headline(self)}")
        if self.is_from_scale or self.is_early:
            lines += _paragraphs(self.notes)
        # Bad arguments were there before all else.
        at_first = [*self.births[:1], *filter(_came_in, self.births[1:])]
        if at_first:
            lines.append("")
            lines += [x for b in at_first[: _OTHERS + 1] for x in _in_three_lines(b)]
            if more := and_more(at_first, _OTHERS + 1):
                lines.append(f"  {more}, see .births")
        if others := [x for x in self.births[1:] if not _came_in(x)]:
            lines += ["", "Later in the run:"]
            lines += [x for birth in others[:_OTHERS] for x in _in_one_line(birth)]
            if more := and_more(others, _OTHERS):
                lines.append(f"  {more}, see .births")
        if not (self.is_from_scale or self.is_early):
            advices = [x.advice for x in self.births[: _OTHERS + 1] if x.advice]
            lines += _paragraphs([*self.notes, *[*dict.fromkeys(advices)][:2]])
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


# The text.


def _paragraphs(notes: Iterable[str]) -> list[str]:
    lines = []
    for note in notes:
        lines += ["", *wrapped(note if note.endswith((".", ")")) else f"{note}.")]
    return lines


def _headline(why: Why) -> str:
    if not why.results:
        return "no inf and no NaN reaches a result."
    names = list(why.results)
    if len(names) == 2:
        return f"not finite: {names[0]} and {names[1]}."
    return f"not finite: {listed(names)}."


def _came_in(birth: Birth) -> bool:
    return birth.place.operation == ARGUMENT


def _in_three_lines(birth: Birth) -> list[str]:
    place = birth.place
    if _came_in(birth):
        return wrapped(f"  {_event_in_words(birth)}")
    return [*place_in_lines(place), *wrapped(f"  {_event_in_words(birth)}", "    ")]


def place_in_lines(place: Place) -> list[str]:
    """A place in words, and its line of the source."""
    lines = wrapped(f"  {place_in_words(place)}", "    ")
    code = linecache.getline(place.file, place.line).strip() if place.file else ""
    if code:
        lines.append(f"      {code if len(code) <= 74 else f'{code[:70]} ...'}")
    return lines


def _in_one_line(birth: Birth) -> list[str]:
    if _came_in(birth):
        return wrapped(f"  {_event_in_words(birth)}")
    return wrapped(f"  {place_in_words(birth.place)}: {_event_in_words(birth)}", "    ")


def place_in_words(place: Place) -> str:
    line = f"{short_path(place.file)}:{place.line}" if place.file else "line not known"
    parts = [line_of_cell(place) or line]
    if place.function:
        parts[0] += f" in {place.function}"
    if place.module:
        parts.append(f"module {place.module}")
    if place.iteration:
        parts.append(f"iteration {list(place.iteration)}")
    if place.is_backward:
        parts.append("backward")
    return ", ".join(parts)


def _event_in_words(birth: Birth) -> str:
    """An operation, its result and its operands, in words."""
    operation = birth.place.operation
    if operation == ARGUMENT:
        return f"{_kind_in_words(birth)} came in: {birth.place.module} ({birth.dtype})"
    if operation == CONSTANT:
        return f"{_kind_in_words(birth)} is a number of the program here"
    text = f"{operation} made {_kind_in_words(birth)}"
    operands = [_format_value(x) for x in birth.operands]
    dtype = f"({birth.dtype}{_limit(birth)})"
    if not operands:
        return f"{text} {dtype}"
    if birth.range is not None and all(map(math.isfinite, birth.range)):
        low, high = map(_format_value, birth.range)
        between = low if low == high else f"numbers from {low} to {high}"
        if operation == "div" and len(operands) == 1:  # of the divisor
            return f"{text} by a division by {between} {dtype}"
        if operation == "div":
            up_to = "up to " if birth.operands[0] else ""
            return f"{text} of {up_to}{operands[0]}, divided by {between} {dtype}"
        return f"{text} of {between} {dtype}"
    up_to = "up to " if any(map(math.isfinite, birth.operands)) else ""
    return f"{text} of {up_to}{' and '.join(operands[:3])} {dtype}"


def _limit(birth: Birth) -> str:
    """The largest number of float16, which is soon reached; "" for other dtypes."""
    is_soon = birth.dtype.startswith("float16") and birth.kind == "inf"
    return f", at most {float(jnp.finfo(birth.dtype).max):g}" if is_soon else ""


def _kind_in_words(birth: Birth) -> str:
    inf = "-inf" if birth.is_negative else "inf"
    return "NaN" if birth.kind == "nan" else inf


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    text = f"{value:.4g}"
    # Just over 1, where some functions end, is not 1.
    return f"{value:.9g}" if text in ("1", "-1") and abs(value) != 1 else text
