# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Of arrays not the numbers, which may be unknown yet."""

import itertools
import math
import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._locate import is_wrapper_state
from jls._rounding import edges

# XLA flushes subnormal numbers to zero. These are the smallest normal float32, and the
# largest power of two whose reciprocal is one: XLA turns `x / s` into `x * (1 / s)`.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def is_unchecked(value: Any) -> bool:
    """Whether `value` is an array or a tracer, whose number may not be known yet."""
    return isinstance(value, jax.Array | np.ndarray)


def is_real(value: Any) -> bool:
    """Whether `value` is a Python or numpy number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def number(name: str, value: Any, rule: str, low: float, high: float) -> Any:
    """`value` as the float32 that the device will see, which lies in [low, high]."""
    if is_unchecked(value):
        return _numeric(name, value)
    if not is_real(value):
        raise TypeError(
            f"{name} must be a real number, got {type(value).__name__} {value!r}."
        )
    try:
        exact = float(value)
    except OverflowError:  # an int of more than 308 digits
        exact = math.inf if value > 0 else -math.inf
    with np.errstate(over="ignore"):
        rounded = float(np.float32(exact))
    if not low <= rounded <= high:
        raise ValueError(f"{name} must be {rule} (as float32), got {value!r}.")
    return rounded


def host_number(name: str, value: Any, rule: str, low: float, high: float) -> float:
    """`value` likewise, or an error if only the device knows it."""
    if is_unchecked(value):
        raise TypeError(
            f"{name} must be a real number known before the function is traced, got "
            f"{value!r}. Pass a Python number."
        )
    return number(name, value, rule, low, high)


def _numeric(name: str, value: Any) -> Any:
    if not any(jnp.issubdtype(value.dtype, x) for x in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got an array of {value.dtype}.")
    return value


def _whole(name: str, value: Any) -> Any:
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an integer, got an array of {value.dtype}. Convert it "
            "with .astype(jnp.int32)."
        )
    return value


def scale_value(name: str, value: Any) -> Any:
    """A loss scale that the arithmetic of every device can take."""
    return number(name, value, "from 2**-126 to 2**126", SMALLEST, LARGEST)


def raising_factor(name: str, value: Any) -> Any:
    """A factor that raises a loss scale."""
    just_above = 1.0 + 2.0**-23
    return number(name, value, "finite and > 1 in float32", just_above, LARGEST)


def lowering_factor(name: str, value: Any) -> Any:
    """A factor that lowers a loss scale."""
    just_below = 1.0 - 2.0**-24
    return number(name, value, "in (0, 1) in float32", SMALLEST, just_below)


def interval(name: str, value: Any) -> Any:
    """A count of optimizer steps, an integer that fits int32."""
    if is_unchecked(value):
        return _whole(name, value)
    if not (is_real(value) and hasattr(value, "__index__")):
        raise TypeError(
            f"{name} must be an integer, got {type(value).__name__} {value!r}."
        )
    if not 1 <= value < 2**31:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {value!r}.")
    return int(value)


def host_interval(name: str, value: Any) -> int:
    """As `interval`, for Python to count with: no tracer."""
    if is_unchecked(value):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name} must be an integer known before tracing, got an array of "
                f"{value.dtype}{list(value.shape)}. Pass a Python number."
            ) from None
    return interval(name, value)


def limit(headroom: Any, dtype: Any) -> Any:
    """The largest number of `dtype`, less `headroom` bits."""
    edges(dtype)  # or an error
    headroom = number("headroom", headroom, "from 0 to 126", 0.0, 126.0)
    return float(jnp.finfo(dtype).max) / 2.0**headroom


def function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}.")


def flag(name: str, value: Any) -> bool:
    """A switch that is read in Python."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def ascending(**given: Any) -> dict[str, Any]:
    """Loss scales of which none is below one before it."""
    scales = {name: scale_value(name, value) for name, value in given.items()}
    for low, high in itertools.combinations(scales, 2):
        checkable = not any(map(is_unchecked, (scales[low], scales[high])))
        if checkable and scales[low] > scales[high]:
            raise ValueError(
                f"{low} must be <= {high}, got {given[low]!r} > {given[high]!r}."
            )
    return scales


def policy(
    *,
    init_scale: Any,
    growth_factor: Any,
    backoff_factor: Any,
    min_scale: Any,
    max_scale: Any,
    **intervals: Any,
) -> tuple[Any, dict[str, Any]]:
    """The first scale of a policy, and its hyperparameters by name."""
    factors = {
        "growth_factor": raising_factor("growth_factor", growth_factor),
        "backoff_factor": lowering_factor("backoff_factor", backoff_factor),
    }
    scales = ascending(min_scale=min_scale, init_scale=init_scale, max_scale=max_scale)
    steps = {name: interval(name, value) for name, value in intervals.items()}
    return scales.pop("init_scale"), factors | scales | steps


def policy_state(state: Any, state_type: Any) -> None:
    """Raises unless `state` has what a policy with such states reads."""
    if not set(state_type._fields) <= set(getattr(state, "_fields", ())):
        raise TypeError(
            f"state must be the policy's own, a {state_type.__name__} as scaler.init() "
            f"makes it, got {type(state).__name__}. Of the state of jls.loss_scaled, "
            "pass opt_state.scaler_state."
        )


def wrapper_state(state: Any) -> None:
    if not is_wrapper_state(state):
        raise TypeError(
            "state must be a LossScaledState as the optimizer's init makes it, got "
            f"{type(state).__name__}. The order is update(grads, state, params)."
        )
