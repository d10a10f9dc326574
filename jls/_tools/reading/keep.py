# SPDX-License-Identifier: Apache-2.0
"""The `keep` of an autocast that holds some products of a step, and no others."""

import bisect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from jls._program.control import Site
from jls._program.places import Place, modules_in_loss, place_of


class Unit(NamedTuple):
    """The facts by which a `keep` finds a product: scope, file and function.

    In an `InFunctions` one of them may be None: any.
    """

    scope: str | None
    file: str | None
    function: str | None

    @property
    def name(self) -> str:
        return self.scope or self.function or "a line that is not known"

    def holds(self, other: "Unit") -> bool:
        pairs = zip(self, other, strict=True)
        return all(mine is None or mine == its for mine, its in pairs)


class InFunctions(NamedTuple):
    """A `keep` by functions, where modules have no scope: call it with a `Place`."""

    units: tuple[Unit, ...]

    def __call__(self, place: Place) -> bool:
        here = Unit(place.module, place.file, place.function)
        return any(unit.holds(here) for unit in self.units)

    def __repr__(self) -> str:
        return f"<keep of {', '.join(map(_in_words, self.units))}>"


Keep = str | Callable[[Place], bool] | None
T = TypeVar("T")


def unit_of(site: Site) -> Unit:
    place = place_of(site)
    return Unit(modules_in_loss(site), place.file, place.function)


def least(units: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> list[T]:
    """The units that have to be float32 for a run that is as it has to be.

    Args:
      units: all of them.
      holds: whether a run with these in float32 is so.

    Returns:
      [] if that does not help, or none has to. None of them can be left out.
    """
    left = units
    if not units or not holds(units):
        return []
    needed = list[T]()
    while not holds(needed):
        # With so many of the first ones it holds.
        high = bisect.bisect_left(
            range(len(left)), True, key=lambda n: holds([*needed, *left[:n]])
        )
        if not high:
            break
        needed.append(left[high - 1])
        left = left[: high - 1]
    for one in needed[:-1]:
        others = [x for x in needed if x != one]
        if holds(others):
            needed = others
    return [x for x in units if x in needed]


def keep_of(
    found: Collection[Unit], every: Iterable[Unit], scopes: Iterable[str] = ()
) -> str | InFunctions:
    """What holds these units, and no others.

    Args:
      found: the units.
      every: all of the step.
      scopes: all scopes of the loss.
    """
    every = {*every, *found}

    def is_own(unit: Unit) -> bool:
        """Whether it holds none but those that were found."""
        return all(x in found for x in every if unit.holds(x))

    by_scope = [x._replace(file=None, function=None) for x in found]
    if all(x.scope and is_own(x) for x in by_scope):
        return pattern([x.scope for x in by_scope if x.scope], scopes)
    units = []
    for one, scope in zip(found, by_scope, strict=True):
        function = one._replace(scope=None)
        tried = (function, scope) if one.scope else (function,)
        units.append(next(filter(is_own, tried), one))
    return InFunctions(tuple(dict.fromkeys(units)))


def argument_of(keep: Keep, most: int = 74) -> str:
    """The argument to write; "" if it is longer than `most`."""
    if isinstance(keep, InFunctions):
        found = " or ".join(dict.fromkeys(map(_condition, keep.units)))
        text = f"keep=lambda place: {found}"
    else:
        text = f'keep=r"{keep}"'
    return text if len(text) <= most else ""


def _condition(unit: Unit) -> str:
    """An expression that holds a unit, by the names that it has in one file."""
    parts = []
    if unit.function is not None:
        name = "file" if not unit.function else "function"
        parts.append(f'place.{name} == "{unit.function}"')
    if unit.scope is not None:
        parts.append(f'place.module == "{unit.scope}"')
    return " and ".join(parts)


def _in_words(unit: Unit) -> str:
    if unit.function is None:
        return repr(unit.scope)
    name = f"{unit.function} ({Path(unit.file or '').name})"
    if not unit.function:
        name = "lines that are not known"
    return f"{name} in {unit.scope!r}" if unit.scope else name


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
