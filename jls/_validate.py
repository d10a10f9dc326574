# SPDX-License-Identifier: Apache-2.0
"""Checks of hyperparameters: Python and numpy numbers only, arrays pass unchecked."""

import math
import numbers
from typing import Any

import jax
import numpy as np

# The smallest and the largest scale whose reciprocal is a normal float32: XLA turns
# `x / s` into `x * (1 / s)` and flushes subnormal numbers to zero.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def is_unchecked(value: Any) -> bool:
    """Whether `value` is an array or a tracer, whose number may not be known yet."""
    return isinstance(value, jax.Array | np.ndarray)


def is_real(value: Any) -> bool:
    """Whether `value` is a Python or numpy number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def number(name: str, value: Any) -> float | None:
    """`value` rounded to float32 as the device will; None for an array."""
    if is_unchecked(value):
        return None
    if not is_real(value):
        raise TypeError(
            f"{name} must be a real number, got {type(value).__name__} {value!r}."
        )
    try:
        exact = float(value)
    except OverflowError:  # an int of more than 308 digits
        exact = math.inf if value > 0 else -math.inf
    with np.errstate(over="ignore"):
        return float(np.float32(exact))


def in_range(name: str, value: Any, rule: str, low: float, high: float) -> float | None:
    """`value` as float32, which must lie in [low, high]; None for an array."""
    rounded = number(name, value)
    if rounded is not None and not low <= rounded <= high:
        raise ValueError(f"{name} must be {rule}, got {value!r}.")
    return rounded


def scale_value(name: str, value: Any) -> float | None:
    """A loss scale that the arithmetic of every device can take."""
    return in_range(name, value, "from 2**-126 to 2**126", SMALLEST, LARGEST)


def interval(name: str, value: Any) -> None:
    """A count of optimizer steps, an integer that fits int32."""
    if is_unchecked(value):
        return
    if not (is_real(value) and hasattr(value, "__index__")):
        raise TypeError(
            f"{name} must be an integer, got {type(value).__name__} {value!r}."
        )
    if not 1 <= value < 2**31:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {value!r}.")
