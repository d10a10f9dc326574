# SPDX-License-Identifier: Apache-2.0
"""Operations that are traced once, however often a program has them.

JAX differentiates and transposes each equation that is bound, with a trace of its own
each time. Of a jitted function it does so once for each type of its operands; where
that is inlined, it leaves no trace in the program. So equal operations, and equal
chains of them, such as those of twelve layers, cost one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.jaxprs import (
    Operation,
    effects_of,
    is_program,
    jitted_inline,
    operation_of,
    traced_as,
)

_MOST = 2048  # operations and chains that are remembered


class Cast(NamedTuple):
    """A dtype that a float32 array is rounded to, or one in half is float32 again."""

    dtype: Any

    def __call__(self, value: Any) -> Any:
        """The array, or number, in this dtype.

        A finite number in the program that is beyond its range, such as a mask, becomes
        the largest one.
        """
        if isinstance(value, Array):
            return lax.convert_element_type(value, self.dtype)
        largest = np.float32(jnp.finfo(self.dtype).max)
        value = np.asarray(value, np.float32)
        clipped = np.clip(value, -largest, largest)
        return np.where(np.isfinite(value), clipped, value).astype(self.dtype)


TO_FLOAT32 = Cast(jnp.dtype(jnp.float32))


class Number:
    """A number in a program, by its bits."""

    def __init__(self, value: Any) -> None:
        self.value = value
        array = np.asarray(value)
        self._bits = type(value), array.dtype, array.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self._bits == other._bits

    def __hash__(self) -> int:
        return hash(self._bits)


class _Single(NamedTuple):
    """An operation with what becomes of each operand before."""

    operation: Operation
    operands: tuple[Cast | Number | None, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        given, values = iter(arrays), []
        for operand in self.operands:
            if isinstance(operand, Number):
                values.append(operand.value)
            else:
                values.append(operand(next(given)) if operand else next(given))
        return self.operation.bind(values)


@functools.lru_cache(_MOST)
def _jitted(fun: Callable[..., Any], mesh: Any, *static: Any) -> Callable[..., Any]:
    """`fun` as a function of its own for each mesh: a type may name one.

    Args:
      fun: the function.
      mesh: the mesh.
      static: its first arguments.
    """
    del mesh
    return jitted_inline(lambda *arrays: fun(*static, *arrays))


def call_shared(fun: Callable[..., Any], arrays: Sequence[Any], *static: Any) -> Any:
    """`fun` of arrays, traced once for all functions that are equal to it.

    Args:
      fun: a function.
      arrays: its last arguments.
      static: its first ones, which have a hash, or `fun` is not shared.
    """
    try:
        jitted = _jitted(fun, jax.sharding.get_abstract_mesh(), *static)
    except TypeError:  # a parameter has no hash
        return fun(*static, *arrays)
    return jitted(*arrays)


def bind_shared(
    equation: Any,
    operands: Sequence[Any],
    casts: Sequence[Cast | None] | None = None,
    **params: Any,
) -> list[Any]:
    """The results of an equation with other operands, and with other parameters.

    Args:
      equation: of a program.
      operands: an array or a number for each of its operands.
      casts: what each is cast to before.
      params: in the place of those of the equation.
    """
    casts = casts or [None] * len(operands)
    operation = operation_of(equation, **params)
    arrays, kept = [], []
    for value, cast in zip(operands, casts, strict=True):
        if isinstance(value, Array):
            arrays.append(value)
            kept.append(cast)
        elif np.shape(value):
            arrays.append(cast(value) if cast else value)
            kept.append(None)
        else:
            kept.append(Number(cast(value) if cast else value))
    single = _Single(operation, tuple(kept))
    is_plain = not effects_of(equation) and not any(
        is_program(value) for _, value in operation.params
    )
    with traced_as(equation):
        return call_shared(single, arrays) if is_plain else single(*arrays)
