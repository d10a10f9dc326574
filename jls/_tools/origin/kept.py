# SPDX-License-Identifier: Apache-2.0
"""Which scopes of a loss have to stay float32 for a batch: the `keep` of an autocast.

Those that hold a number of the forward pass beyond the range of float16. Of a step that
is in half already, its narrow values count, with the numbers that they have in float32.
Of a float32 step what the products take and give that an autocast would compute in
half. A number beyond the range that is written in the program, such as a mask, does no
harm.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jls._autocast.keep import Choice
from jls._program.control import Site
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import (
    is_float32,
    is_half_atom,
    is_inexact_atom,
    is_literal,
    is_narrow_atom,
    variables_in,
)
from jls._program.places import is_differentiated, is_transposed, modules_in_loss
from jls._program.primitives import primitive_of
from jls._program.products import PRODUCTS
from jls._scopes import AUTOCAST, FLOAT8, KEPT, UPDATE, marks_of
from jls._text import listed
from jls._tools.origin.trail import Constant, OpResult, RunValue, Trail
from jls._tools.reading.keep import Keep, Unit, argument_of, keep_of, unit_of

# Half of the last step above the largest float16: it rounds to inf.
_BEYOND = 65520.0
_VANISHING = 2.0**-25  # rounds to 0


class Kept(NamedTuple):
    """What has to stay float32."""

    keep: Keep = None
    note: str = ""  # where the numbers are
    write: str = ""  # the argument of an autocast; "" where there can be none
    units: tuple[Unit, ...] = ()  # those in which they are


class HalfOperation(NamedTuple):
    """An operation of the forward pass, with the values of it that are half."""

    frame: Frame
    site: Site
    half: list[Any]  # its operands and results in half
    floats: list[Any]  # all of its operands, half or not


class Forward:
    """The forward pass of a step.

    Args:
      main: the frame of the whole step.
      forward: the variables that the loss comes from; None if that is not known.

    Attributes:
      half_operations: those with values in half, or products that a cast makes half.
      has_float16: whether something in it is float16 now.
    """

    def __init__(self, main: Frame, forward: set[Variable] | None) -> None:
        every = [(f, f.site_of(n)) for f, n in main.operations()]
        found = [
            (frame, site)
            for frame, site in every
            if forward is None
            or any((frame, x) in forward for x in site.equation.outvars)
            if not is_transposed(site) and marks_of(site).isdisjoint((UPDATE, FLOAT8))
        ]
        self._all = [x for x in found if is_differentiated(x[1])] or found
        frames = {frame for frame, _ in self._all}
        made = [
            x
            for frame, site in every
            if frame in frames and FLOAT8 not in marks_of(site)
            for x in site.equation.outvars
        ]
        self.has_float16 = any(map(is_narrow_atom, made))
        self._is_cast = any(AUTOCAST in marks_of(site) for _, site in self._all)
        self.half_operations = self._half_operations(any(map(is_half_atom, made)))

    def _half_operations(self, has_half: bool) -> list[HalfOperation]:
        choice, found = Choice(jnp.float16, None), list[HalfOperation]()
        for frame, site in self._all:
            equation = site.equation
            operands, results = variables_in(equation.invars), equation.outvars
            name = equation.primitive.name
            half = list[Any]()
            # A reader of the result of a cast is touched by it. An autocast casts
            # outside of all scopes.
            if has_half and name != "convert_element_type":
                # What a choice leaves out does no harm, such as scores behind a mask.
                given = () if name == "select_n" else operands
                half = [x for x in (*given, *results) if is_half_atom(x)]
            elif not has_half and name in PRODUCTS:
                is_wide = choice.why_wide(site) is not None
                half = [] if is_wide else [*filter(is_float32, operands), *results]
            if half:
                floats = list(filter(is_inexact_atom, operands))
                found.append(HalfOperation(frame, site, half, floats))
        return found

    def has_vanished(self, trail: Trail) -> bool:
        """Whether all that a product takes vanishes in float16, in such a run."""
        return any(
            0 < trail.size(value).finite <= _VANISHING
            for x in self.half_operations
            if x.site.equation.primitive.name in PRODUCTS
            for atom in filter(is_narrow_atom, x.half)
            for value in trail.in_every_iteration(x.frame, atom)
        )

    def kept(self, trail: Trail) -> Kept:
        """What has to stay float32.

        Args:
          trail: of a run in float32, with records of the values in half.
        """

        @functools.cache
        def is_beyond(frame: Frame, atom: Any) -> bool:
            """Whether a value of the data, not of a mask, is beyond float16's range."""
            return any(
                trail.size(value).finite >= _BEYOND and not _is_written(trail, value)
                for value in trail.in_every_iteration(frame, atom)
            )

        every = self.half_operations
        found = [x for x in every if any(is_beyond(x.frame, y) for y in x.half)]
        born = [x for x in found if not any(is_beyond(x.frame, y) for y in x.floats)]
        return self._as_keep(_units(found), _units(born))

    def _as_keep(self, found: list[Unit], born: list[Unit]) -> Kept:
        if not found:
            return Kept()
        names, first = (
            list(dict.fromkeys(x.name for x in some)) for some in (found, born)
        )
        first = first or names[:1]
        others = [x for x in names if x not in first]
        note = f"Forward values leave the range of float16 in {listed(first)}"
        if not self.has_float16:
            note = f"In float16 forward values would be out of range in {listed(first)}"
        if others:
            note += f", and go on to {listed(others)}: `keep` has them all"
        keep = self.keep_of(found, _units(self.half_operations))
        if not self.has_float16:
            return Kept(keep, note, argument(keep))
        if self._is_cast:
            return Kept(keep, f"{note}. {AGAIN}", argument(keep), tuple(found))
        return Kept(keep, f"{note}. Compute that in float32. {AGAIN}")

    def keep_of(self, found: Sequence[Unit], every: Sequence[Unit]) -> Keep:
        """A `keep` of some units of `every`, and of what is kept already."""
        sites = [site for _, site in self._all]
        before = [unit_of(site) for site in sites if KEPT in marks_of(site)]
        scopes = set(map(modules_in_loss, sites))
        return keep_of(list(dict.fromkeys([*before, *found])), every, scopes)


def _units(half_operations: Iterable[HalfOperation]) -> list[Unit]:
    return list(dict.fromkeys(unit_of(x.site) for x in half_operations))


AGAIN = "Then call jls.calibrate again for the loss scale"


def argument(keep: Keep) -> str:
    """The argument to write, in a line of 80 columns if it is an expression."""
    if not isinstance(keep, str):
        return f"keep=calibration.keep  # {keep!r}"
    return argument_of(keep, 80 - len("Write: ")) or "keep=calibration.keep"


def _is_written(trail: Trail, value: RunValue) -> bool:
    """Whether the largest number of a value stands in the program: of a mask.

    A mask is added, chosen, or a number in the program times at most 1; what has been
    computed of its elements is as good as the mask.
    """
    for _ in range(_LONGEST):
        origin = trail.origin(value)
        if isinstance(origin, Constant):
            return True
        if not isinstance(origin, OpResult):
            return False
        equation, operands = origin.site.equation, trail.operands(origin)
        row, name = primitive_of(equation), equation.primitive.name
        if not operands or not (row.moves or row.is_elementwise):
            return False
        if row.degree == "product":
            written = [x for x in operands if is_literal(x.atom)]
            size = trail.size(value).finite
            if any(_BEYOND <= size <= trail.size(x).finite for x in written):
                return True
            operands = [x for x in operands if not is_literal(x.atom)] or operands
        value = max(operands, key=lambda x: trail.size(x).finite)
        is_choice = row.degree == "choice" or name == "select_n"
        if not is_choice and trail.size(value).finite < _BEYOND:
            return False
    return False


_LONGEST = 1000  # operations to go back, those of each iteration of a loop again
