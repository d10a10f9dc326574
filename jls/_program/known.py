# SPDX-License-Identifier: Apache-2.0
"""The rules for what is known of a result: a number, or an input that it is."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.facts import Number, Operation, Same
from jls._program.jaxprs import is_exact_cast


def known_result(op: Operation, avals: Sequence[Any]) -> Same | Number | None:
    """The input or the number that a result is; None if neither is known.

    Args:
      op: the operation.
      avals: of the inputs of the program.
    """
    name, row, aval = op.name, op.row, op.aval
    known = [x.known for x in op.operands]
    if not known:
        return None
    numbers = [x.value for x in known if isinstance(x, Number)]
    first = known[0]
    if name in ("and", "or") and aval.dtype == bool:
        decisive = name == "or"
        if decisive in numbers:
            return Number(decisive)
        others = [x for x in known if not isinstance(x, Number)]
        return others[0] if len(others) == 1 and numbers else _folded(op)
    if name == "select_n":
        cases = known[1:]
        if isinstance(first, Number):
            return cases[int(first.value)]
        return cases[0] if all(x == cases[0] for x in cases) else None
    if name == "convert_element_type":
        return _cast(first, aval, avals)
    if len(row.neutral) == len(known):
        for number, other, neutral in zip(known, known[::-1], row.neutral, strict=True):
            if isinstance(other, Same) and _is(number, neutral):
                return other
    if isinstance(first, Number):
        if row.moves:
            return first if all(x.known == first for x in op.data) else None
        if row.is_extreme:
            return first
    if isinstance(first, Same) and (
        row.moves == "same" or name in ("broadcast_in_dim", "slice")
    ):
        return first if aval.size == avals[first.index].size else None
    return _folded(op)


def _cast(known: Any, aval: Any, avals: Sequence[Any]) -> Same | Number | None:
    if isinstance(known, Number):
        is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
        if is_integer and not abs(known.value) < 2.0**31:
            return None  # it depends on the platform
        with np.errstate(all="ignore"):
            return number_in(np.asarray(known.value).astype(aval.dtype))
    if isinstance(known, Same):
        old, new = avals[known.index].dtype, aval.dtype
        return known if is_exact_cast(old, new) else None
    return None


def held_inputs(op: Operation) -> int:
    """The inputs whose elements a result holds, moved at most: a set of bits."""
    if op.name == "convert_element_type":
        return op.operands[0].holds
    if not op.row.moves or not op.data:
        return 0
    is_choice = op.name == "select_n" and (op.operands[0].is_splat or not op.aval.ndim)
    unite = operator.and_ if is_choice else operator.or_
    return functools.reduce(unite, (x.holds for x in op.data))


def weights_of(op: Operation) -> tuple[tuple[int, float], ...] | None:
    """The weights of inputs in a sum, as far as numbers say them."""
    name, operands = op.name, op.operands
    weights = [x.weights for x in operands]
    numbers = [x.known.value if isinstance(x.known, Number) else None for x in operands]
    factor = 1.0
    if name == "mul" and None in weights:
        at = weights.index(None)
        number = numbers[at]
        if number is None:
            return None
        factor, weights = number, [weights[1 - at]]
    elif name == "div" and numbers[1]:
        factor, weights = 1 / numbers[1], weights[:1]
    elif name == "neg":
        factor = -1.0
    elif op.row.degree == "sum" and op.row.neutral:
        # A sum of 0: the updates of a skip.
        weights = [() if n == 0 else w for n, w in zip(numbers, weights, strict=True)]
    elif op.row.moves != "same" and name != "convert_element_type":
        return None
    total: dict[int, float] = {}
    for place, part in enumerate(weights):
        if part is None:
            return None
        sign = -1.0 if name == "sub" and place else 1.0
        for i, weight in part:
            total[i] = total.get(i, 0.0) + sign * factor * weight
    return tuple(sorted(total.items()))


def number_in(value: Any) -> Number | None:
    """The number that all elements equal, if they do."""
    # Numbers in a program are of JAX's own types in some versions.
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        if not isinstance(value, bool | int | float):
            return None
        dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    # A larger constant is data, such as a table of positions; zeros and ones of that
    # size are made by a broadcast. To compare 2**16 elements takes some 10 us.
    if np.size(value) != 1 and not (0 < np.size(value) <= 2**16):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    flat = np.asarray(value).ravel()
    if flat.size > 1 and np.any(flat != flat[0]):
        return None
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return Number(0.0) if flat[0] == 0 else None
    if jnp.issubdtype(dtype, jnp.inexact):
        return Number(float(flat[0]))
    return Number(flat[0].item())


def _folded(op: Operation) -> Number | None:
    """The number that an operation gives for numbers, with their dtypes' overflow."""
    known = [x.known.value for x in op.operands if isinstance(x.known, Number)]
    if op.row.fold is None or len(known) < len(op.operands):
        return None
    with np.errstate(all="ignore"):
        pairs = zip(known, op.equation.invars, strict=True)
        operands = [np.asarray(x).astype(atom.aval.dtype) for x, atom in pairs]
        return number_in(np.asarray(op.row.fold(*operands)))


def _is(known: Any, number: float | None) -> bool:
    """Whether a number is known, and is this one; -0.0 is not 0.0, but 0 is both."""
    value: Any = known.value if isinstance(known, Number) else None
    if number is None or value != number:
        return False
    return isinstance(value, int) or np.signbit(value) == np.signbit(number)
