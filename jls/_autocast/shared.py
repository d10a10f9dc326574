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
import numpy as np
from jax import Array

from jls._program.jaxprs import (
    Operation,
    effects_of,
    is_program,
    jitted_inline,
    operation_of,
    traced_as,
)

_MOST = 2048  # operations and chains that are remembered


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
    """An operation of arrays and of numbers."""

    operation: Operation
    operands: tuple[Number | None, ...]  # None is an array

    def __call__(self, *arrays: Any) -> list[Any]:
        given = iter(arrays)
        values = [next(given) if x is None else x.value for x in self.operands]
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


def bind_shared(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation of a program, with other operands."""
    operation = operation_of(equation)
    kept = [
        None if np.shape(x) or isinstance(x, Array) else Number(x) for x in operands
    ]
    arrays = [x for x, number in zip(operands, kept, strict=True) if number is None]
    single = _Single(operation, tuple(kept))
    is_plain = not effects_of(equation) and not any(
        is_program(value) for _, value in operation.params
    )
    with traced_as(equation):
        return call_shared(single, arrays) if is_plain else single(*arrays)
