# SPDX-License-Identifier: Apache-2.0
"""Whether what `jls.bfloat16_params` made is what reaches the parameters.

Its updates lead to numbers of bfloat16. What changes them after it leads in between,
and is rounded to nearest: most parameters stand still, and the others move too far.
"""

import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jls._notes import noted
from jls._program.control import Site
from jls._program.jaxprs import is_inexact_atom, names_around
from jls._program.primitives import primitive_of
from jls._program.walk import Question, walk
from jls._scopes import STORED
from jls._text import path_name
from jls._types import JlsWarning

# What to write where they are changed.
ALL_INSIDE = "Put all of it inside, schedule and learning rate too"


class Way(Enum):
    """What a value has to do with the updates of a `jls.bfloat16_params`.

    Of a value that is one of two, the later counts.
    """

    FACTOR = "it may be a flag or a mask, by which they may be multiplied"
    NONE = "nothing, or more than is looked at"
    FOLLOWS = "the sum or product of a parameter that has moved and something else"
    MADE = "an update as it was made"
    APPLIED = "the sum of one and something else"
    STORED = "such a sum, in bfloat16: a parameter"
    CHANGED = "an update that was changed, or a parameter that has one in it"


class Ways(Question[Way]):
    """How the updates go through a program: chosen, masked, changed, applied."""

    def of_constant(self, value: Any) -> Way:
        is_scalar = np.ndim(value) == 0
        is_flag = is_scalar and not isinstance(value, Tracer | jax.Array)
        is_mask = not is_scalar or (is_flag and value in (0, 1))
        return Way.FACTOR if is_mask else Way.NONE

    def results_of(self, site: Site, operands: Sequence[Way]) -> Sequence[Way]:
        equation = site.equation
        return [self._of_result(site, operands, x) for x in equation.outvars]

    def _of_result(self, site: Site, operands: Sequence[Way], result: Any) -> Way:
        equation = site.equation
        if any(_is_stored(x) for x in site.equations):
            return Way.MADE
        if not is_inexact_atom(result):
            is_flag = getattr(result.aval, "dtype", None) == np.bool_
            return Way.FACTOR if is_flag else Way.NONE
        row, name = primitive_of(equation), equation.primitive.name
        if row.moves or name in ("convert_element_type", "reduce_precision"):
            way = self._joined(operands[row.data])
            is_stored = way is Way.APPLIED and result.aval.dtype == jnp.bfloat16
            return Way.STORED if is_stored else way
        ways = set(operands)
        if name in ("mul", "div", "neg"):
            if Way.FACTOR in ways and len(operands) == 2:
                (other,) = ways - {Way.FACTOR} or {Way.FACTOR}
                return other
            ways -= {Way.NONE}
            if ways and ways <= {Way.STORED, Way.FOLLOWS}:
                return Way.FOLLOWS
            is_one = len(ways) == 1
            return Way.CHANGED if is_one and ways & OF_UPDATES else Way.NONE
        if name in ("add", "sub", "add_any"):
            if ways & {Way.STORED, Way.FOLLOWS} and not ways & _STILL_UPDATES:
                return Way.FOLLOWS
            return _SUMS.get(
                frozenset(x for x in operands if x in OF_UPDATES), Way.CHANGED
            )
        return Way.NONE

    def join(self, site: Site, one: Way, other: Way) -> Way:
        return one if one is other else self._joined([one, other])

    def slice(self, value: Way) -> Way:
        return value

    def _joined(self, ways: Sequence[Way]) -> Way:
        return max(ways, key=_ORDER.index, default=Way.NONE)


_ORDER = [*Way]
OF_UPDATES = {Way.MADE, Way.APPLIED, Way.STORED, Way.CHANGED}
_STILL_UPDATES = {Way.MADE, Way.APPLIED, Way.CHANGED}
# Of what is added up; in a program of several steps to parameters that have moved.
_SUMS = {
    frozenset(): Way.NONE,
    frozenset([Way.MADE]): Way.APPLIED,
    frozenset([Way.MADE, Way.STORED]): Way.APPLIED,
}


def _is_stored(equation: Any) -> bool:
    return any(name.text == STORED for name in names_around(equation))


def ways_of(program: Any) -> list[Way]:
    """The ways of the results of a program."""
    jaxpr = getattr(program, "jaxpr", program)
    inputs = [
        Way.FACTOR if getattr(x.aval, "shape", ()) else Way.NONE for x in jaxpr.invars
    ]
    return walk(program, inputs, Ways())


def changed_in(
    update: Callable[[Any], Any], grads: Any, updates: Any, made: list[Any]
) -> str | None:
    """The first update that is not as a `jls.bfloat16_params` made it, by name.

    Args:
      update: makes updates of gradients.
      grads: the gradients.
      updates: what came of them.
      made: what was noted of it: paths and updates of bfloat16 parameters.
    """
    known = {path: update for pairs in made for path, update in pairs}
    flat, _ = jax.tree_util.tree_flatten_with_path(updates)
    if all(x is known.get(path, x) for path, x in flat):
        return None  # without the time to trace it once more
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(grads)):
        return None  # one that runs operation by operation would be traced in each step
    with warnings.catch_warnings(), noted("update", apart=True):
        warnings.simplefilter("ignore", JlsWarning)  # given where the step is taken
        program = jax.make_jaxpr(update)(grads)
    for (path, _), way in zip(flat, ways_of(program), strict=True):
        if path in known and way in (Way.APPLIED, Way.CHANGED):
            return path_name(path)
    return None
