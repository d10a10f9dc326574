# SPDX-License-Identifier: Apache-2.0
"""The values that decide whether a step is skipped: where a search begins.

A step that is skipped returns its old state, and no result is bad. So the roots are the
values that the wrapper checks, and the results that do not come from its update.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jls import _scopes
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import is_inexact_atom, is_literal
from jls._scopes import marks_of

LOSS, GRADIENTS, NEW, CHECKED = "loss", "gradients", "updates", "checked values"
NORM = "sum of the squares of the gradients"  # of a clip inside, which is the check
_ROLES = {
    _scopes.LOSS: LOSS,
    _scopes.GRADIENTS: GRADIENTS,
    _scopes.NORM: NORM,
    _scopes.NEW: NEW,
    _scopes.CHECKED: CHECKED,
}


@dataclasses.dataclass(eq=False)
class CheckedValues:
    """The values that one wrapper checks, or one call of `jls.all_finite`."""

    found: dict[str, list[Variable]] = dataclasses.field(default_factory=dict)
    scale: int | None = None  # the input of the program that is its loss scale

    def add(self, role: str, variable: Variable) -> None:
        variables = self.found.setdefault(role, [])
        if variable not in variables:
            variables.append(variable)

    @property
    def variables(self) -> list[Variable]:
        return [x for found in self.found.values() for x in found]

    @property
    def before_update(self) -> list[Variable]:
        """The variables that the loss scale can affect: not the new parameters."""
        roles = [role for role in self.found if role != NEW]
        return [x for role in roles for x in self.found[role]]


def checked_values(root: Frame, scales: Sequence[int]) -> list[CheckedValues]:
    """The values that the wrappers in a program check, in order.

    Args:
      root: the frame of the program.
      scales: which inputs of the program are loss scales.
    """
    found: list[CheckedValues] = []
    for frame in root.all():
        _look_in(frame, set(scales), found)
    return [checked for checked in found if checked.found]


def _look_in(frame: Frame, scales: set[int], found: list[CheckedValues]) -> None:
    current: CheckedValues | None = None
    around = marks_of(frame.site) if frame.site.equations else _scopes.NONE
    for number, equation in enumerate(frame.jaxpr.eqns):
        every = marks_of(frame.site_of(number))
        marks = every - around
        roles = [role for mark, role in _ROLES.items() if mark in marks]
        if not roles and _scopes.SCALE not in marks:
            current = current if every else None
            continue
        if current is None or (roles and current.scale is not None):
            current = CheckedValues()
            found.append(current)
        operands = [x for x in equation.invars if not is_literal(x)]
        if _scopes.SCALE in marks:
            of_scales = scales & {_input_of(frame, x) for x in operands}
            current.scale = next(iter(of_scales), current.scale)
        for atom in filter(is_inexact_atom, operands):
            maker = frame.makers.get(atom)
            own = marks_of(frame.site_of(maker.number)) if maker else _scopes.NONE
            if roles and not any(_ROLES.get(x) == roles[0] for x in own):
                current.add(roles[0], (frame, atom))


def _input_of(frame: Frame, atom: Any) -> int | None:
    """The input of the program that a variable is, passed from call to call."""
    here: Frame | None = frame
    while here is not None and not is_literal(atom) and atom in here.inputs:
        index = here.inputs[atom]
        if here.parent is None:
            return index
        atom, here = here.given(index), here.parent
    return None


def is_of_update(frame: Frame, atom: Any) -> bool:
    """Whether a variable is computed in the update of a wrapper."""
    maker = frame.makers.get(atom)
    return maker is not None and _scopes.UPDATE in marks_of(frame.site_of(maker.number))
