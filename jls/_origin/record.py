# SPDX-License-Identifier: Apache-2.0
"""Runs a program once, compiled, with the size of each result beside it.

What is recorded, row by row:

    an operation      the largest magnitude of each result; where it is not defined
                      everywhere, the range of the operand that it depends on
    a scan            the largest magnitude of each slice that a round gets
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._origin.measure import largest, range_of
from jls._program.frames import Frame, behind
from jls._program.jaxprs import is_inexact
from jls._program.replay import INF, SLICES, Records, Seen, replay
from jls._program.rules import UNCHANGED
from jls._program.walk import Site

# The results are as large as the operands: not looked at.
_SAME_SIZE = UNCHANGED | {"abs", "broadcast_in_dim", "conj", "neg", "rev", "transpose"}
# Not defined everywhere, or beyond every number soon: the operand that decides.
SINGULAR = {
    "acos": 0,
    "acosh": 0,
    "asin": 0,
    "atanh": 0,
    "cosh": 0,
    "div": 1,
    "exp": 0,
    "exp2": 0,
    "expm1": 0,
    "integer_pow": 0,
    "log": 0,
    "log1p": 0,
    "pow": 0,
    "rsqrt": 0,
    "sinh": 0,
    "sqrt": 0,
}


def as_large_as(equation: Any, result: int) -> Any | None:
    """The operand that is as large as a result, for every number; None if none is."""
    name, operands = equation.primitive.name, equation.invars
    if name in _SAME_SIZE:
        return operands[result] if len(operands) == len(equation.outvars) else None
    if name == "convert_element_type" and is_inexact(operands[0]):
        old, new = (jnp.finfo(x.aval.dtype) for x in (operands[0], equation.outvars[0]))
        is_wider = new.bits > old.bits and float(new.max) >= float(old.max)
        return operands[0] if is_wider or new.dtype == old.dtype else None
    return None


class Run(NamedTuple):
    """What one run of a program has shown."""

    arguments: list[np.ndarray]  # u32[4]: the size and the range
    records: Records


class Recorded:
    """A program with a record beside each operation that its roots depend on.

    Args:
      program: a jaxpr.
      root: its frame.
      roots: the variables to follow back.
    """

    def __init__(
        self, program: Any, root: Frame, roots: Iterable[tuple[Frame, Any]]
    ) -> None:
        self._program = program
        seen = behind(roots)
        self._read = [(root, x) in seen for x in root.jaxpr.invars]
        self._wanted = {
            (*frame.site.numbers, number)
            for frame in root.all()
            for number, equation in enumerate(frame.jaxpr.eqns)
            if any((frame, x) in seen for x in equation.outvars)
        } | {
            (*frame.site.numbers, SLICES)
            for frame in root.all()
            if frame.kind == "scan"
        }
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, inputs: Sequence[Any], compiled: bool = True) -> Run:
        """One run; without `compiled` one operation at a time."""
        inputs = [jnp.asarray(x) for x in inputs]
        run = self.compiled(inputs) if compiled else self._run
        return Run(*jax.tree.map(np.asarray, run(inputs)))

    def compiled(self, inputs: Sequence[Any]) -> jax.stages.Compiled:
        """The program for inputs like these, compiled at the first call."""
        if self._compiled is None:
            inputs = [jnp.asarray(x) for x in inputs]
            self._compiled = jax.jit(self._run).lower(inputs).compile()
        return self._compiled

    def _run(self, inputs: Sequence[Array]) -> tuple[list[Array], Records]:
        _, records = replay(self._program, inputs, self._watch)
        pairs = zip(inputs, self._read, strict=True)
        return [
            _of_argument(x) if is_read else _UNREAD for x, is_read in pairs
        ], records

    def _watch(self, site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Seen:
        if site.numbers not in self._wanted:
            return Seen(results)
        rows = [largest(x) if is_inexact(x) else jnp.uint32(0) for x in results]
        if site.numbers[-1] == SLICES:
            return Seen(results, jnp.stack(rows)[:, None] if rows else None)
        equation = site.equation
        if all(as_large_as(equation, i) is not None for i in range(len(results))):
            return Seen(results)
        decisive = SINGULAR.get(equation.primitive.name)
        if decisive is not None:
            rows += range_of(jnp.asarray(inputs[decisive]))
        return Seen(results, jnp.stack(rows)[:, None])


_UNREAD = np.zeros(4, np.uint32)


def _of_argument(x: Array) -> Array:
    return jnp.stack([largest(x), *range_of(x)])


def is_bad(bits: int) -> bool:
    return bits >= INF


def is_nan(bits: int) -> bool:
    return bits > INF
