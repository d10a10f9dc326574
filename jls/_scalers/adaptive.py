# SPDX-License-Identifier: Apache-2.0
"""Like `dynamic`, with an interval that adapts: it climbs a ladder, and falls off.

    finite, or not    like `dynamic` with a backoff on each non-finite step
    a growth          growth_count + 1, nonfinite_count = 0
    the 3rd growth    the next longer interval, growth_count = 0
    not finite        nonfinite_count + 1
    the 3rd of them   above the shortest interval: down to the foot, both counts 0
    the foot          an interval of 1, below those that are given

The rule of MindFormers' AdaptiveLossScaleUpdateCell. Worth knowing about it: a finite
step does not reset nonfinite_count, an overflow does not reset growth_count, and where
the third has no effect (growths at the longest interval, overflows at the shortest) the
count wraps from 3 to 0, so four more are needed. Differs in:
1. It has no cap; here the scale stops at max_scale.
2. It raises a scale below 1 to 1 on an overflow; here an overflow never raises it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._scalers.rule import (
    BACKOFF_FACTOR,
    GROWTH_FACTOR,
    INIT_SCALE,
    MAX_SCALE,
    MIN_SCALE,
    is_due,
    make,
    move,
    start_at,
)
from jls._text import format_numbers, format_record
from jls._tree import as_flag
from jls._types import LossScaler, exportable


@exportable
class AdaptiveState(NamedTuple):
    """State of `jls.adaptive`. `jls.set_loss_scale` restarts the first two counts.

    Example:
      >>> jls.adaptive(2.0**10).init().rung
      Array(1, dtype=int32)
    """

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  consecutive finite steps since the scale last changed
    nonfinite_count: Array  # i32[]  non-finite steps since the last growth, modulo 4
    growth_count: Array  # i32[]  growths since the interval last changed, modulo 4
    rung: Array  # i32[]  of the ladder: 0 is the foot, i the i-th of `intervals`

    def __repr__(self) -> str:
        return format_record("AdaptiveState", **format_numbers(self._asdict()))


def adaptive_init(init_scale: ArrayLike, init_rung: ArrayLike) -> AdaptiveState:
    return AdaptiveState(
        *start_at(init_scale),
        growth_count=jnp.zeros((), jnp.int32),
        rung=jnp.array(init_rung, jnp.int32),
    )


def adaptive_adjust(
    state: AdaptiveState,
    grads_finite: Array | bool,
    *,
    intervals: tuple[ArrayLike, ...],
    **factors_and_bounds: ArrayLike,
) -> AdaptiveState:
    _validate.scaler_state(state, AdaptiveState)
    finite = as_flag("grads_finite", grads_finite)
    loss_scale, finite_count, nonfinite_count, growth_count, rung = state

    ladder = jnp.stack([jnp.asarray(i, jnp.int32) for i in (1, *intervals)])
    up = finite & is_due(finite_count, ladder[rung])
    growths = jnp.where(up, (growth_count + 1) % 4, growth_count)
    climb = up & (growths == 3) & (rung < len(intervals))
    bad = jnp.where(
        up, 0, jnp.where(finite, nonfinite_count, (nonfinite_count + 1) % 4)
    )
    fall = ~finite & (bad == 3) & (rung > 1)
    return AdaptiveState(
        loss_scale=move(loss_scale, up, ~finite, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, finite_count + 1, 0),
        nonfinite_count=jnp.where(fall, 0, bad),
        growth_count=jnp.where(climb | fall, 0, growths),
        rung=jnp.where(fall, 0, jnp.where(climb, rung + 1, rung)),
    )


def adaptive(
    init_scale: float = INIT_SCALE,
    *,
    growth_factor: float = GROWTH_FACTOR,
    backoff_factor: float = BACKOFF_FACTOR,
    intervals: Iterable[int] = (20, 30, 40, 50, 100, 200, 500, 1000),
    init_interval: int | None = None,
    min_scale: float = MIN_SCALE,
    max_scale: float = MAX_SCALE,
) -> LossScaler[AdaptiveState]:
    """Returns a scaler that grows often while the scale is being found, rarely later.

    Three growths lead to the next longer interval. Three non-finite steps without a
    growth in between lead down to an interval of 1, from which the climb starts again,
    except at the shortest interval.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale on every non-finite step.
      intervals: the ladder: from the shortest to the longest number of consecutive
        finite optimizer steps before a growth, each >= 1.
      init_interval: the first interval, one of `intervals`; None for the shortest.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.

    Returns:
      A `jls.types.LossScaler` whose state is a `jls.types.AdaptiveState`. Its
      hyperparameters are pytree leaves.

    Raises:
      TypeError: if a factor or bound is not a real number, `intervals` not a
        sequence, or an interval not an integer.
      ValueError: if one is out of range, if `intervals` is empty or not in order, or
        `init_interval` not one of them. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.adaptive(8.0, intervals=(1, 2))
      >>> state = scaler.init()
      >>> for grads_finite in (True, True, True, True, True):
      ...     state = scaler.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      16.0
      32.0
      64.0
      64.0
      128.0

    References:
      AdaptiveLossScaleUpdateCell of MindFormers.
    """
    steps = _check_intervals(intervals)
    rung = 1 if init_interval is None else 1 + _position(init_interval, steps)
    return make(
        Partial(adaptive_init, init_rung=rung),
        Partial(adaptive_adjust, intervals=steps),
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
        max_scale=max_scale,
    )


def _check_intervals(intervals: Iterable[int]) -> tuple[int, ...]:
    is_many = isinstance(intervals, Iterable) and getattr(intervals, "ndim", 1)
    if isinstance(intervals, str | bytes) or not is_many:
        raise TypeError(
            "intervals must be a sequence of integers, got "
            f"{type(intervals).__name__} {intervals!r}."
        )
    steps = tuple(
        _validate.interval(f"intervals[{i}]", x) for i, x in enumerate(intervals)
    )
    numbers = [x for x in steps if not _validate.is_unchecked(x)]
    if not steps or numbers != sorted(numbers):
        raise ValueError(
            "intervals must be one or more, from the shortest to the longest, got "
            f"{steps!r}."
        )
    return steps


def _position(init_interval: int, intervals: tuple[int, ...]) -> int:
    first = _validate.host_interval("init_interval", init_interval)
    if first not in intervals:
        raise ValueError(
            f"init_interval must be one of intervals, {intervals!r}, got {first!r}."
        )
    return intervals.index(first)
