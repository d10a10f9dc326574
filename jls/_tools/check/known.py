# SPDX-License-Identifier: Apache-2.0
"""The rules for what is known of a result: a number, or an input that it is."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.jaxprs import is_exact_cast
from jls._program.rules import MOVES, UNCHANGED
from jls._tools.check.values import Number, Same, Value


def known_result(
    equation: Any, operands: Sequence[Value], aval: Any, avals: Sequence[Any]
) -> Same | Number | None:
    """The input or the number that a result is; None if neither is known.

    Args:
      equation: the operation.
      operands: the facts about its operands.
      aval: of the result.
      avals: of the inputs of the program.
    """
    name = equation.primitive.name
    known = [x.known for x in operands]
    if not known:
        return None
    numbers = [x.value for x in known if isinstance(x, Number)]
    first = known[0]
    if name in ("and", "or") and aval.dtype == bool:
        decisive = name == "or"
        if decisive in numbers:
            return Number(decisive)
        others = [x for x in known if not isinstance(x, Number)]
        return others[0] if len(others) == 1 and numbers else _folded(equation, known)
    if name == "select_n":
        cases = known[1:]
        if isinstance(first, Number):
            return cases[int(first.value)]
        return cases[0] if all(x == cases[0] for x in cases) else None
    if name == "convert_element_type":
        return _cast(first, aval, avals)
    if name in ("mul", "div", "add", "add_any", "sub"):
        neutral = _without_neutral(name, known)
        if neutral is not None:
            return neutral
    if name in MOVES and len(numbers) == len(known):
        return first if all(x == first for x in known) else None
    if name in MOVES and isinstance(first, Number) and name in _ONE_OF_MANY:
        return first
    is_whole = isinstance(first, Same) and aval.size == avals[first.number].size
    if name in UNCHANGED or name in ("broadcast_in_dim", "slice"):
        return first if is_whole or isinstance(first, Number) else None
    if name in _EXTREMES:
        return first if isinstance(first, Number) else None
    return _folded(equation, known)


def _cast(known: Any, aval: Any, avals: Sequence[Any]) -> Same | Number | None:
    if isinstance(known, Number):
        is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
        if is_integer and not abs(known.value) < 2.0**31:
            return None  # it depends on the platform
        with np.errstate(all="ignore"):
            return number_in(np.asarray(known.value).astype(aval.dtype))
    if isinstance(known, Same):
        old, new = avals[known.number].dtype, aval.dtype
        return known if is_exact_cast(old, new) else None
    return None


def held_inputs(
    name: str, operands: Sequence[Value], data: list[Value], aval: Any
) -> int:
    """The inputs whose elements a result holds, moved at most: a set of bits."""
    if name == "convert_element_type":
        return operands[0].holds
    if name not in MOVES or not data:
        return 0
    is_choice = name == "select_n" and (operands[0].is_splat or not aval.ndim)
    unite = operator.and_ if is_choice else operator.or_
    return functools.reduce(unite, (x.holds for x in data))


_ONE_OF_MANY = frozenset(["broadcast_in_dim", "gather", "dynamic_slice", "pad"])


_EXTREMES = frozenset(
    ["reduce_and", "reduce_or", "reduce_max", "reduce_min", "pmax", "pmin"]
)


def weights_of(
    name: str, operands: Sequence[Value]
) -> tuple[tuple[int, float], ...] | None:
    """The weights of inputs in a sum, as far as numbers say them."""
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
    elif name in ("add", "add_any", "sub"):
        # A sum of 0: the updates of a skip.
        weights = [() if n == 0 else w for n, w in zip(numbers, weights, strict=True)]
    elif name not in UNCHANGED and name != "convert_element_type":
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
    # A larger constant is data, and costs time to compare.
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


_FOLDS: dict[str, Callable[..., Any]] = {
    "not": np.invert,
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "is_finite": np.isfinite,
}


def _folded(equation: Any, known: Sequence[Any]) -> Number | None:
    """The number that an operation gives for numbers, with their dtypes' overflow."""
    fold = _FOLDS.get(equation.primitive.name)
    if fold is None or not all(isinstance(x, Number) for x in known):
        return None
    with np.errstate(all="ignore"):
        pairs = zip(known, equation.invars, strict=True)
        operands = [np.asarray(x.value).astype(atom.aval.dtype) for x, atom in pairs]
        return number_in(np.asarray(fold(*operands)))


def _without_neutral(name: str, known: Sequence[Any]) -> Any:
    """The other operand if one is neutral: x * 1, x / 1, x + (-0.0), x - 0.0."""

    def is_neutral(x: Any, place: int) -> bool:
        if not isinstance(x, Number):
            return False
        if name in ("mul", "div"):
            return x.value == 1 and (place == 1 or name == "mul")
        if x.value != 0 or (name == "sub" and place == 0):
            return False
        is_negative = math.copysign(1, x.value) < 0
        return isinstance(x.value, int) or is_negative == (name != "sub")

    first, second = known
    if isinstance(first, Same) and is_neutral(second, 1):
        return first
    if isinstance(second, Same) and is_neutral(first, 0):
        return second
    return None
