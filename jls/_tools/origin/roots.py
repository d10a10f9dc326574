# SPDX-License-Identifier: Apache-2.0
"""The values that decide whether a step is skipped: where a search begins.

A step that is skipped returns its old state, and no result is bad. So the roots are the
values that the wrapper checks, and the results that do not come from its update.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jls import _scopes
from jls._program.frames import Frame, Variable
from jls._scopes import marks_of
from jls._tools.reading.updates import Checked

LOSS, GRADIENTS, NEW, CHECKED = "loss", "gradients", "updates", "checked values"
NORM = "sum of the squares of the gradients"  # of a clip inside, which is the check
_ROLES = {
    _scopes.LOSS: LOSS,
    _scopes.GRADIENTS: GRADIENTS,
    _scopes.NORM: NORM,
    _scopes.NEW: NEW,
    _scopes.CHECKED: CHECKED,
}


class CheckedValues(NamedTuple):
    """The values that one wrapper checks, or one call of `jls.all_finite`."""

    found: dict[str, list[Variable]]
    scale: int | None  # the input of the program that is its loss scale

    @property
    def variables(self) -> list[Variable]:
        return [x for found in self.found.values() for x in found]

    @property
    def before_update(self) -> list[Variable]:
        """The variables that the loss scale can affect: not the new parameters."""
        roles = [role for role in self.found if role != NEW]
        return [x for role in roles for x in self.found[role]]


def checked_values(
    calls: Sequence[Checked], main: Frame, scales: Sequence[int]
) -> list[CheckedValues]:
    """The values that the wrappers in a program check, in order.

    Args:
      calls: what is read of the program.
      main: the frame of the program.
      scales: which inputs of the program are loss scales.
    """
    frames, every = main.by_site(), []
    for call in calls:
        found = {
            _ROLES[role]: [(frames[x.around], x.atom) for x in given.values()]
            for role, given in call.given.items()
            if given
        }
        scale = None if call.scale is None else scales[call.scale]
        every.append(CheckedValues(found, scale))
    return [x for x in every if x.found]


def before_update(frame: Frame, atom: Any) -> list[Variable]:
    """The sources of a variable; none of what the update of a wrapper computes."""
    maker = frame.makers.get(atom)
    is_of_update = maker and _scopes.UPDATE in marks_of(frame.site_of(maker.position))
    return [] if is_of_update else frame.sources(atom)
