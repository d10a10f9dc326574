# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the scalers: defaults, checks, first state, moves, counts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._tree import is_array
from jls._types import LossScaler, ScalerState, StateT, StaticPartial

# Defaults of the factories. Factors and interval are torch's, 2^15 is the largest power
# of two in float16, and 2^24 the cap of NVIDIA's apex.
INIT_SCALE, MIN_SCALE, MAX_SCALE = 2.0**15, 1.0, 2.0**24
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
GROWTH_INTERVAL = 2000

# The rule for a factor, and its bounds: of float32, the number after 1 and before it.
RAISING = "finite and > 1", 1.0 + 2.0**-23, _validate.LARGEST
_FACTORS = {
    "growth_factor": RAISING,
    "backoff_factor": ("in (0, 1)", _validate.SMALLEST, 1.0 - 2.0**-24),
}


def make(
    init: Callable[..., StateT],
    adjust: Callable[..., StateT],
    given: Mapping[str, Any],
    **names: str,
) -> LossScaler[StateT]:
    """Returns a scaler from the users' arguments, or raises for the first bad one.

    Args:
      init: takes `init_scale`, the first loss scale.
      adjust: takes all other arguments as hyperparameters. Both may be a `Partial` that
        has others bound.
      given: by their names, `init_scale`, factors, intervals, and the bounds
        `min_scale` and `max_scale`; without these, those of float32.
      **names: what users call an argument, for errors, where it is not its name here.
    """
    ours = {name: own for own, name in names.items()}
    given = {"min_scale": _validate.SMALLEST, "max_scale": _validate.LARGEST, **given}
    found = {ours.get(name, name): (name, value) for name, value in given.items()}
    factors = {
        name: _validate.number(*found.pop(name), *rule)
        for name, rule in _FACTORS.items()
        if name in found
    }
    scales = [found.pop(name) for name in ("min_scale", "init_scale", "max_scale")]
    low, first, high = _validate.ascending(dict(scales)).values()
    intervals = {name: _validate.interval(*pair) for name, pair in found.items()}
    return LossScaler(
        _bind(init, init_scale=first),
        _bind(adjust, **factors, **intervals, min_scale=low, max_scale=high),
    )


def _bind(function: Callable[..., Any], **more: Any) -> Partial:
    """Binds hyperparameters beside those that are bound already.

    A `Partial` around a `Partial` would hide the inner one's leaves.
    """
    if isinstance(function, Partial):
        return Partial(function.func, **more, **function.keywords)
    return Partial(function, **more)


def switch(func: Callable[..., Any], **switches: Any) -> StaticPartial:
    """`func` with static switches bound."""
    return StaticPartial(func, tuple(switches.items()))


def start_at(*args: Any, init_scale: ArrayLike) -> ScalerState:
    """The first state of a scaler that keeps a `ScalerState`."""
    if args:
        raise TypeError(
            "scaler.init takes no arguments: it knows no parameters. Of an optimizer: "
            "jls.loss_scaled(optimizer, scaler).init(params)."
        )
    return ScalerState(
        loss_scale=jnp.array(init_scale, jnp.float32),
        finite_count=jnp.zeros((), jnp.int32),
        nonfinite_count=jnp.zeros((), jnp.int32),
    )


def move(
    loss_scale: Array,
    up: Array,
    down: Array,
    *,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    min_scale: ArrayLike,
    max_scale: ArrayLike,
) -> Array:
    """`loss_scale` one growth higher if `up`, one backoff lower if `down`."""
    floored = jnp.maximum(loss_scale * f32(backoff_factor), f32(min_scale))
    # A scale that was set below the floor stays: an overflow never raises it.
    backed_off = jnp.minimum(loss_scale, floored)
    higher = jnp.minimum(loss_scale * f32(growth_factor), f32(max_scale))
    return jnp.where(up, higher, jnp.where(down, backed_off, loss_scale))


def is_due(count: Array, interval: ArrayLike) -> Array:
    """Whether one step more than `count` fills `interval`.

    Compared before counting, so that no count can wrap; with `>=`, since an interval
    may be lowered during a run.
    """
    return count >= jnp.asarray(interval, jnp.int32) - 1


def count_up(count: Array, when: ArrayLike = True) -> Array:
    """`count`, and one more if `when`; stays at the int32 maximum."""
    # One more than the maximum wraps to the minimum.
    return jnp.maximum(count, count + jnp.asarray(when, jnp.int32))


def bounds_of(scaler: LossScaler) -> tuple[float, float] | None:
    """The bounds of the loss scale on the host; None if they are not known."""
    low, high = (
        scalar(scaler.hyperparameters, name) for name in ("min_scale", "max_scale")
    )
    return None if low is None or high is None else (low, high)


def scalar(hyperparameters: Mapping[str, Any], name: str) -> float | None:
    """A hyperparameter on the host; None if it is absent or has several values."""
    value: Any = hyperparameters.get(name)
    return float(value) if is_array(value) and np.ndim(value) == 0 else None


def f32(value: ArrayLike) -> Array:
    """A hyperparameter as the device computes with it."""
    return jnp.asarray(value, jnp.float32)
