# SPDX-License-Identifier: Apache-2.0
"""Which scopes of a loss have to stay float32 for a batch: the `keep` of an autocast.

Those that hold a number of the forward pass beyond the range of float16. Of a step that
is in half already, its narrow values count, with the numbers that they have in float32.
Of a float32 step those that an autocast would store in half. A number beyond the range
that is written in the program, such as a mask, does no harm.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jls._autocast.keep import Choice
from jls._program.control import Site, calls_of
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import (
    Program,
    is_float32,
    is_half_atom,
    is_inexact_atom,
    is_literal,
    is_narrow_atom,
    variables_in,
)
from jls._program.places import (
    Place,
    is_differentiated,
    is_transposed,
    modules_in_loss,
    place_of,
)
from jls._program.primitives import primitive_of
from jls._scopes import AUTOCAST, KEPT, UPDATE, marks_of
from jls._text import listed
from jls._tools.origin.trail import Constant, OpResult, RunValue, Trail

# Half of the last step above the largest float16: it rounds to inf.
_BEYOND = 65520.0
# Each round casts around what is kept so far: after a few there is nothing new.
_MOST_ROUNDS = 20


class InFunctions(NamedTuple):
    """A `keep` by functions, where modules have no scope: call it with a `Place`."""

    functions: tuple[tuple[str, str], ...]  # file, function
    scopes: tuple[str, ...] = ()

    def __call__(self, place: Place) -> bool:
        is_of_one = (place.file, place.function) in self.functions
        return is_of_one or place.module in self.scopes

    def __repr__(self) -> str:
        names = [f"{name} ({Path(file).name})" for file, name in self.functions]
        return f"<keep of {', '.join([*names, *map(repr, self.scopes)])}>"


Keep = str | Callable[[Place], bool] | None


class Kept(NamedTuple):
    """What has to stay float32."""

    keep: Keep = None
    note: str = ""  # where the numbers are
    write: str = ""  # the argument of an autocast; "" where there can be none


class Touch(NamedTuple):
    """An operation of the forward pass, with the values of it that are half."""

    frame: Frame
    position: int
    operands: list[Any]
    results: list[Any]

    @property
    def site(self) -> Site:
        return self.frame.site_of(self.position)

    @property
    def atoms(self) -> list[Any]:
        return [*self.operands, *self.results]

    @property
    def floats(self) -> list[Any]:
        """All of its operands, half or not."""
        operands = variables_in(self.frame.jaxpr.eqns[self.position].invars)
        return list(filter(is_inexact_atom, operands))


class Forward:
    """The forward pass of a step.

    Args:
      program: of the whole step.
      main: its frame.
      forward: the variables that the loss comes from; None if that is not known.
    """

    def __init__(
        self, program: Program, main: Frame, forward: set[Variable] | None
    ) -> None:
        self._program, self._main = program, main
        found = [
            (frame, index)
            for frame, index in main.operations()
            if forward is None
            or any((frame, x) in forward for x in frame.jaxpr.eqns[index].outvars)
            if not is_transposed(frame.site_of(index))
            and UPDATE not in marks_of(frame.site_of(index))
        ]
        inside = [(f, n) for f, n in found if is_differentiated(f.site_of(n))]
        self._sites = inside or found
        made = [x for frame in {f for f, _ in self._sites} for x in frame.makers]
        self._has_half = any(map(is_half_atom, made))
        self._has_float16 = any(map(is_narrow_atom, made))
        self.is_cast = any(AUTOCAST in marks_of(f.site_of(i)) for f, i in self._sites)

    def touches(self) -> list[Touch]:
        """The operations with values in half, or that an autocast would make half."""
        return self._of_dtypes() if self._has_half else self._of_cast([])

    def kept(self, trail: Trail, touches: Sequence[Touch]) -> Kept:
        """What has to stay float32.

        Args:
          trail: of a run in float32, in which the values of `touches` are recorded.
          touches: those that `touches` gave.
        """
        known: dict[Variable, bool] = {}

        def is_beyond(frame: Frame, atom: Any) -> bool:
            if (frame, atom) not in known:
                known[frame, atom] = _is_beyond(trail, frame, atom)
            return known[frame, atom]

        found: dict[tuple[int, ...], Site] = {}
        born = list[Site]()
        for _ in range(_MOST_ROUNDS):
            more = [
                touch
                for touch in touches
                if touch.site.indices not in found
                and any(is_beyond(touch.frame, x) for x in touch.atoms)
            ]
            if not found:
                born = [
                    touch.site
                    for touch in more
                    if not any(is_beyond(touch.frame, x) for x in touch.floats)
                ]
            found |= {touch.site.indices: touch.site for touch in more}
            if not more or self._has_half:
                break
            touches = self._of_cast(list(found.values()))
        return self._as_keep([found[indices] for indices in sorted(found)], born)

    def _of_dtypes(self) -> list[Touch]:
        every = [
            Touch(
                frame,
                index,
                list(filter(is_half_atom, variables_in(equation.invars))),
                list(filter(is_half_atom, equation.outvars)),
            )
            for frame, index in self._sites
            # What reads the result of a cast is touched by it. An autocast casts
            # outside of all scopes.
            if not _is_cast(equation := frame.jaxpr.eqns[index])
        ]
        return [x for x in every if x.atoms]

    def _of_cast(self, kept: list[Site]) -> list[Touch]:
        """What an autocast of the forward pass would store in half.

        Args:
          kept: operations whose scopes stay as written.
        """
        sites = {frame.indices_of(index) for frame, index in self._sites}
        choice = _OfForward(sites, set(map(_scope, kept)))
        found = []
        for frame, index in self._sites:
            equation = frame.jaxpr.eqns[index]
            is_product = primitive_of(equation).cast == "product"
            if is_product and choice.why_wide(frame.site_of(index)) is None:
                operands = list(filter(is_float32, variables_in(equation.invars)))
                found.append(Touch(frame, index, operands, list(equation.outvars)))
        return found

    def _as_keep(self, sites: list[Site], born: list[Site]) -> Kept:
        if not sites:
            return Kept()
        every = [frame.site_of(index) for frame, index in self._sites]
        before = [site for site in every if KEPT in marks_of(site)]
        scopes = list(dict.fromkeys(map(_scope, [*before, *sites])))
        names = list(dict.fromkeys(map(_name, sites)))
        first = list(dict.fromkeys(map(_name, born or sites[:1])))
        others = [x for x in names if x not in first]
        note = f"Forward values leave the range of float16 in {listed(first)}"
        if not self._has_float16:
            note = f"In float16 forward values would be out of range in {listed(first)}"
        if others:
            note += f", and go on to {listed(others)}: `keep` has them all"
        functions = tuple(x for x in scopes if not isinstance(x, str))
        named = tuple(x for x in scopes if isinstance(x, str))
        modules = set(map(modules_in_loss, every))
        keep = InFunctions(functions, named) if functions else pattern(named, modules)
        if not self._has_float16:
            return Kept(keep, note, _argument(keep))
        if self.is_cast:
            return Kept(keep, f"{note}. {_AGAIN}", _argument(keep))
        return Kept(keep, f"{note}. Compute that in float32. {_AGAIN}")


class _OfForward(Choice):
    """Float16 for the forward pass alone, but for some scopes of it."""

    def __init__(self, sites: set[tuple[int, ...]], kept: set[Any]) -> None:
        super().__init__(jnp.float16, None)
        self._sites, self._kept = sites, kept

    def is_kept(self, site: Site) -> bool:
        is_other = site.indices not in self._sites and not calls_of(site.equation)
        return is_other or _scope(site) in self._kept


_AGAIN = "Then call jls.calibrate again for the loss scale"


def _argument(keep: Keep) -> str:
    """The argument to write, in a line of 80 columns if it is an expression."""
    if not isinstance(keep, str):
        return f"keep=calibration.keep  # {keep!r}"
    text = f'keep=r"{keep}"'
    return text if len(text) <= 80 - len("Write: ") else "keep=calibration.keep"


def _is_cast(equation: Any) -> bool:
    return equation.primitive.name == "convert_element_type"


def _scope(site: Site) -> str | tuple[str, str]:
    """The scope of an operation; where it has none, its file and function."""
    scope = modules_in_loss(site)
    if scope:
        return scope
    place = place_of(site)
    return place.file, place.function


def _name(site: Site) -> str:
    scope = _scope(site)
    return scope if isinstance(scope, str) else scope[1] or "the loss"


def pattern(scopes: Sequence[str], every: Iterable[str] = ()) -> str:
    """A regular expression of these scopes, and of no others.

    Of a scope that is kept with all that is inside it, by `every` scope of the loss,
    the parts are not listed.
    """
    kept, found = set(scopes), list[str]()
    for scope in scopes:
        parents = [x for x in _parents(scope) if _is_whole(x, kept, every)]
        one = re.escape(parents[0]) + "(/.*)?" if parents else re.escape(scope)
        if one not in found:
            found.append(one)
    return f"^({'|'.join(found)})$" if len(found) > 1 else f"^{found[0]}$"


def _parents(scope: str) -> list[str]:
    """A scope and those around it, outermost first."""
    parts = scope.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _is_whole(scope: str, kept: set[str], every: Iterable[str]) -> bool:
    inside = [x for x in every if x == scope or x.startswith(f"{scope}/")]
    return len(inside) > 1 and kept.issuperset(inside)


def _is_beyond(trail: Trail, frame: Frame, atom: Any) -> bool:
    """Whether a value of the data, not of a mask, is beyond the range of float16."""
    return any(
        _size(trail, value) >= _BEYOND and not _is_written(trail, value)
        for value in trail.in_every_iteration(frame, atom)
    )


def _size(trail: Trail, value: RunValue) -> float:
    return trail.size(value).finite


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
            if any(_BEYOND <= _size(trail, value) <= _size(trail, x) for x in written):
                return True
            operands = [x for x in operands if not is_literal(x.atom)] or operands
        value = max(operands, key=lambda x: _size(trail, x))
        if name not in _CHOICES and _size(trail, value) < _BEYOND:
            return False
    return False


_LONGEST = 1000  # operations to go back, those of each iteration of a loop again
_CHOICES = ("select_n", "max", "min", "clamp")


def variables_of(touches: Iterable[Touch]) -> Iterator[Variable]:
    """The values to record."""
    for touch in touches:
        for atom in touch.atoms:
            yield touch.frame, atom
