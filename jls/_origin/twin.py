# SPDX-License-Identifier: Apache-2.0
"""The float32 twin of a float16 program: which values float16 loses at a loss scale.

The same program, with float32 in the place of all that is narrower (`_program.alone`).
In there no value overflows or vanishes, so each is what it would be without float16.
Of each float16 value of the backward pass is recorded, behind its two ends:

    counts    how many of a sample are 0, how many vanish in float16, how many are in
              each of the powers of two of float16, how many overflow
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._origin.record import Recorded, as_large_as, ends_of
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import is_literal, is_narrow
from jls._program.places import Place
from jls._program.replay import Rounds, floats_of, key_of
from jls._program.walk import Site

LOWEST, HIGHEST = -25, 15  # the powers of two whose numbers float16 does not lose
_BINS = HIGHEST - LOWEST + 1
_SAMPLE = 2**14  # elements of an array that are counted


class Cotangent(NamedTuple):
    """A float16 value of the backward pass, as it would be in float32.

    Example:
      >>> jls.types.Cotangent._fields
      ('place', 'largest', 'vanishing', 'shares')
    """

    place: Place
    largest: float  # magnitude, at a loss scale of 1
    vanishing: float  # of those not 0, the share that is rounded to 0 at `init_scale`
    # 41 shares of those not 0, at `init_scale`: i is from 2**(i - 25) to 2**(i - 24)
    shares: tuple[float, ...]


class Spread(NamedTuple):
    """What is in the values of one operation, in all rounds of the loops around it."""

    largest: float  # magnitude
    vanishing: float  # the share of those that are not 0 that round to 0 in float16
    shares: np.ndarray  # f64[41]  the share of each power of two, from LOWEST


class Twin(Recorded):
    """The twin of a program.

    Args:
      program: a jaxpr.
      root: its frame.
      roots: the variables to follow back.
      counted: variables of float16 whose values are counted.
    """

    WIDE = True

    def __init__(
        self,
        program: Any,
        root: Frame,
        roots: Iterable[Variable],
        counted: Iterable[Variable],
    ) -> None:
        super().__init__(program, root, roots)
        self._counted: dict[tuple[int, ...], set[int]] = {}
        for frame, atom in counted:
            number, result = frame.makers[atom]
            key = (*frame.site.numbers, number)
            self._counted.setdefault(key, set()).add(result)

    def _record(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Array | None:
        found = ends_of(results)
        counted = self._counted.get(site.numbers)
        if found is None or not counted:
            return found
        # Twice: of several rounds or devices, the even ones are the largest numbers.
        counts = [jnp.repeat(_counts(results[i]), 2) for i in sorted(counted)]
        return jnp.concatenate([found, *map(key_of, counts)])

    def spread(self, records: Any, variable: Variable) -> Spread | None:
        """What one run has shown of a counted variable."""
        frame, atom = variable
        number, result = frame.makers[atom]
        key = (*frame.site.numbers, number)
        for part in key:
            records = records.get(part) if isinstance(records, dict) else None
        if isinstance(records, Rounds):
            records = records.bad
        if records is None:
            return None
        size = len(frame.jaxpr.eqns[number].outvars)
        rows = floats_of(records.reshape(-1, records.shape[-1]))
        place = 2 * size + 2 * _COUNTS * sorted(self._counted[key]).index(result)
        counts = rows[:, place : place + 2 * _COUNTS : 2].astype(np.float64).sum(0)
        largest = float(np.abs(rows[:, 2 * result : 2 * result + 2]).max())
        present = counts[1:].sum()
        if not (present and math.isfinite(largest)):
            return None
        return Spread(largest, counts[1] / present, counts[2:-1] / present)


_COUNTS = _BINS + 3


def _counts(x: Array) -> Array:
    """How many values of a sample of `x` are 0, vanish, are in each bin, are above."""
    flat = jnp.ravel(x)
    step = -(-flat.size // _SAMPLE)
    while math.gcd(step, flat.size) > 1 and step > 1:  # not one channel of many
        step += 1
    sample = jnp.abs(flat[::step] if step > 1 else flat).astype(jnp.float32)
    _, exponent = jnp.frexp(sample)  # 1 for 1.0
    inside = jnp.clip(exponent - 1, LOWEST - 1, HIGHEST + 1) - LOWEST + 2
    bins = jnp.where(sample == 0, 0, inside)
    return jnp.zeros(_COUNTS, jnp.float32).at[bins].add(jnp.float32(1.0))


def narrow_after(scale: Variable, roots: Iterable[Variable]) -> list[Variable]:
    """What is narrower than float32 between a loss scale and the roots.

    The results of operations, in the order of the program.
    """
    ahead: dict[Variable, list[Variable]] = {}
    for variable in behind(roots):
        frame, atom = variable
        for source in frame.sources(atom):
            if not is_literal(source[1]):
                ahead.setdefault(source, []).append(variable)
    stack, reached = [scale], set[Variable]()
    while stack:
        variable = stack.pop()
        if variable not in reached:
            reached.add(variable)
            stack += ahead.get(variable, [])
    return sorted(filter(_is_made_narrow, reached), key=_order)


def _is_made_narrow(variable: Variable) -> bool:
    frame, atom = variable
    if atom not in frame.makers or not is_narrow(atom):
        return False
    number, result = frame.makers[atom]
    is_call = bool(frame.called(number))
    return not is_call and as_large_as(frame.jaxpr.eqns[number], result) is None


def _order(variable: Variable) -> tuple[int, ...]:
    frame, atom = variable
    return (*frame.site.numbers, *frame.makers[atom])
