# SPDX-License-Identifier: Apache-2.0
"""The values of a program while it is rewritten: in memory, or not computed yet.

A chain of elementwise operations in which a mean, a norm or a sum takes part is put off
until something else needs its result. It is then computed in float32 from what is in
memory, rounded once, and computed again for the derivative: what is kept until then are
its operands in half, and no array of float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._autocast.kinds import Fact
from jls._program.jaxprs import bind
from jls._program.primitives import primitive_of

MOST = 8  # operations of a chain, all of which are computed again


def rounded(value: Any, dtype: Any, is_beyond: bool) -> Any:
    """float32 in half; a finite number beyond the range becomes the largest one."""
    if not is_beyond and isinstance(value, Array):
        return lax.convert_element_type(value, dtype)
    largest = np.float32(jnp.finfo(dtype).max)
    if not isinstance(value, Array):
        value = np.asarray(value, np.float32)
        value = np.where(np.isfinite(value), np.clip(value, -largest, largest), value)
        return value.astype(dtype)
    return lax.convert_element_type(_clamped(value, largest), dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _clamped(value: Any, largest: np.float32) -> Any:
    """Finite numbers up to the largest one; inf and NaN as they are."""
    clamped = lax.clamp(-largest, value, largest)
    return lax.select(lax.is_finite(value), clamped, value)


@_clamped.defjvp
def _tangent_of_clamped(largest, primals, tangents):
    """The tangent as in float32: no array has to say where a number was clamped."""
    return _clamped(*primals, largest), *tangents


class Stored:
    """An array in memory. If it is in half, the program has it in float32."""

    def __init__(self, array: Any, is_half: bool, is_beyond: bool = False) -> None:
        self.array, self.is_half, self._is_beyond = array, is_half, is_beyond

    def wide(self) -> Any:
        """The array as the program has it."""
        if self.is_half:
            return lax.convert_element_type(self.array, jnp.float32)
        return self.array

    def half(self, dtype: Any) -> Any:
        # Anew for each use: the gradients of a shared weight are summed in float32.
        if self.is_half:
            return self.array
        return rounded(self.array, dtype, self._is_beyond)


class Chain:
    """The result of an operation in float32 that is not computed yet."""

    def __init__(
        self, equation: Any, operands: Sequence["Stored | Chain"], fact: Fact
    ) -> None:
        self._equation, self._fact = equation, fact
        self._operands = operands
        row, name = primitive_of(equation), equation.primitive.name
        inner = [x for x in operands if isinstance(x, Chain)]
        self.count = (row.cast != "shape") + sum(x.count for x in inner)
        is_product = name == "mul" and any(map(is_number, operands))
        self._is_linear = row.saves_nothing or is_product
        self._is_linear &= all(x._is_linear for x in inner)
        self._wide: Stored | None = None
        self._half: Stored | None = None

    @classmethod
    def is_of_number(cls, equation: Any, operands: Sequence["Stored | Chain"]) -> bool:
        """Whether an operation gives a number in the program a shape."""
        is_shape = primitive_of(equation).cast == "shape"
        return is_shape and all(map(is_number, operands))

    @property
    def is_half(self) -> bool:
        """Whether it is half where it is stored."""
        return self._fact.is_half

    @property
    def stored(self) -> Stored | None:
        """What of it is in memory already."""
        return self._half if self.is_half else self._wide

    def wide(self) -> Any:
        if self._wide is None:
            self._wide = Stored(self._compute(lambda x: x), False, self._fact.is_beyond)
        return self._wide.array

    def half(self, dtype: Any) -> Any:
        if self._half is None:
            is_beyond = self._fact.is_beyond
            if self.is_of_number(self._equation, self._operands):
                (number,) = (x.half(dtype) for x in self._operands)
                (array,) = bind(self._equation, [number])
            else:
                array = self._compute(lambda x: rounded(x, dtype, is_beyond))
            self._half = Stored(array, True)
        return self._half.array

    def _compute(self, finish: Callable[[Any], Any]) -> Any:
        leaves = list(self._leaves().values())

        def run(*arrays):
            known = {
                id(leaf): Stored(array, leaf.is_half).wide()
                for leaf, array in zip(leaves, arrays, strict=True)
            }
            return finish(self._in_float32(known))

        if not self._is_linear:
            run = jax.checkpoint(run, prevent_cse=False)
        return run(*(leaf.array for leaf in leaves))

    def _leaves(self) -> dict[int, Stored]:
        found: dict[int, Stored] = {}
        for operand in self._operands:
            if isinstance(operand, Chain):
                found |= operand._leaves()
            elif not is_number(operand):
                found[id(operand)] = operand
        return found

    def _in_float32(self, known: dict[int, Any]) -> Any:
        if id(self) not in known:
            operands = [
                x._in_float32(known)
                if isinstance(x, Chain)
                else known.get(id(x), x.array)
                for x in self._operands
            ]
            (known[id(self)],) = bind(self._equation, operands)
        return known[id(self)]


Held = Stored | Chain


def is_number(held: Held) -> bool:
    """Whether it is a number in the program."""
    return (
        isinstance(held, Stored)
        and not isinstance(held.array, Array)
        and not np.shape(held.array)
    )
