# SPDX-License-Identifier: Apache-2.0
"""What each wrapper of jls was given in a step, by the scopes of its operations."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jls._program.control import Site
from jls._program.facts import Number, Value
from jls._program.jaxprs import is_inexact_atom, is_literal
from jls._scopes import CHECKED, GRADIENTS, LOSS, NEW, NORM, SCALE, UPDATE, marks_of

# The scopes in which a wrapper, or `jls.all_finite`, looks at something.
ROLES = (LOSS, GRADIENTS, NORM, NEW, CHECKED)


class SeenValue(NamedTuple):
    """A value that is looked at."""

    around: tuple[int, ...]  # the place of its program
    atom: Any  # the variable
    value: Value

    @property
    def is_data(self) -> bool:
        """Whether it is more than a number in the program."""
        return not isinstance(self.value.known, Number) or bool(self.value.depends)


@dataclasses.dataclass(eq=False)
class UpdateCall:
    """What one call of a wrapper's `update` looks at, or of `jls.all_finite`."""

    bit: int  # in `follows`: its gradients
    site: Site  # of its first operation
    is_update: bool
    scale: int | None = None  # the index of its loss scale
    given: dict[str, dict[Any, SeenValue]] = dataclasses.field(default_factory=dict)
    is_over: bool = False

    def values(self, role: str) -> list[Value]:
        """The facts about what it looks at in this role, except for numbers."""
        return [x.value for x in self.given.get(role, {}).values() if x.is_data]


class Updates:
    """The calls, noted in the order of the program.

    Args:
      first_bit: the first bit for the gradients of a call.
    """

    def __init__(self, first_bit: int) -> None:
        self.calls: dict[tuple[int, ...], UpdateCall] = {}  # by the place of its site
        self.reaches_gradients = 0  # a set of bits: inputs that gradients depend on
        self._first_bit = first_bit
        self._open: UpdateCall | None = None
        self._gradients: dict[int, tuple[Value, int]] = {}  # by identity, with bits

    def note(self, site: Site, operands: Sequence[Value]) -> frozenset[str]:
        """Notes what an operation, or a call, looks at; and its scopes."""
        marks = marks_of(site)
        if not marks:
            self._open = None
            return marks
        outside = marks_of(Site(site.equations[:-1], ()))
        role = next((x for x in ROLES if x in marks and x not in outside), None)
        call = self._call(site, UPDATE in marks, role)
        if role is not None:
            self._look(call, role, site, operands)
        if SCALE in marks:
            call.is_over = True
            scales = [x.scale for x in operands if x.scale is not None]
            call.scale = scales[0] if scales else call.scale
        return marks

    def _call(self, site: Site, is_update: bool, role: str | None) -> UpdateCall:
        call = self._open
        is_next = call is not None and call.is_over and role in (GRADIENTS, LOSS)
        if call is None or is_next or call.is_update != is_update:
            old = self.calls.get(site.indices)
            bit = old.bit if old else self._first_bit << len(self.calls)
            call = self._open = UpdateCall(bit, site, is_update)
            self.calls[site.indices] = call
        return call

    def _look(
        self, call: UpdateCall, role: str, site: Site, operands: Sequence[Value]
    ) -> None:
        given = call.given.setdefault(role, {})
        for atom, value in zip(site.equation.invars, operands, strict=True):
            if is_literal(atom) or not is_inexact_atom(atom) or role in value.roles:
                continue
            around = site.indices[:-1]
            one = given[around, atom] = SeenValue(around, atom, value)
            if call.is_update and one.is_data and role in (GRADIENTS, LOSS):
                self.reaches_gradients |= value.depends
                if role == GRADIENTS:
                    self._gradients[id(value)] = value, call.bit

    def widened(self, old: Value, new: Value) -> None:
        """Notes that a wrapper has cast a gradient."""
        if id(old) in self._gradients:
            self._gradients[id(new)] = new, self._gradients[id(old)][1]

    def marked(self, value: Value) -> Value:
        """An operand of the inner optimizer, which follows the gradients given."""
        _, bit = self._gradients.get(id(value), (None, 0))
        return (
            value
            if value.follows & bit == bit
            else value.replace(follows=value.follows | bit)
        )
