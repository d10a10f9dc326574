# SPDX-License-Identifier: Apache-2.0
"""A loss scale computed from recent gradient maxima.

    finite            allowed = the largest power of two with
                                max_abs * allowed <= the largest of dtype / 2**headroom
    ceiling           the least `allowed` of this window, and that of the one before it
    a window          ends with its N-th finite step, N = window
    not finite        overflow_ceiling = min(overflow_ceiling, scale * backoff_factor)
    M finite steps    overflow_ceiling doubles, M = growth_interval
    next scale        the least of the three ceilings, within [min_scale, max_scale];
                      never higher after an overflow
    only zeros in both windows: 2 * scale instead of their ceilings

OpenSeq2Seq's LogMax fits a normal distribution to the logarithm of the largest gradient
and predicts from its mean and deviation. Differs in:
1. An overflow enters its averages of logarithms as the number 65536, and a step of
   gradients that are all 0 as -inf, so that one such step sends the scale to an end of
   its range for thousands of steps or for ever. Here only finite values enter; an
   overflow records that its scale was too high.
2. Its averages forget by a half-life; here a gradient is remembered for N to 2 N steps.
3. Its scale is any number; here it is a power of two, which scales without rounding.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from jls import _validate
from jls._bits import INF
from jls._scalers.rule import (
    BACKOFF_FACTOR,
    GROWTH_INTERVAL,
    MAX_SCALE,
    MIN_SCALE,
    f32,
    is_due,
    make,
)
from jls._text import format_numbers, format_record
from jls._types import LossScaler, exportable


@exportable
class RecentMaxState(NamedTuple):
    """State of `jls.recent_max`. A ceiling is inf until something is known.

    Example:
      >>> jls.recent_max(8.0).init().ceiling
      Array(inf, dtype=float32)
    """

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  finite steps since overflow_ceiling last changed
    window_count: Array  # i32[]  finite steps of the current window
    ceiling: Array  # f32[]  the highest loss scale that all steps of the window allow
    previous_ceiling: Array  # f32[]  the ceiling of the window before it
    overflow_ceiling: Array  # f32[]  the ceiling that overflows have left

    def __repr__(self) -> str:
        return format_record("RecentMaxState", **format_numbers(self._asdict()))


def recent_max_init(init_scale: ArrayLike) -> RecentMaxState:
    return RecentMaxState(
        loss_scale=jnp.array(init_scale, jnp.float32),
        finite_count=jnp.zeros((), jnp.int32),
        window_count=jnp.zeros((), jnp.int32),
        ceiling=jnp.array(jnp.inf, jnp.float32),
        previous_ceiling=jnp.array(jnp.inf, jnp.float32),
        overflow_ceiling=jnp.array(jnp.inf, jnp.float32),
    )


def recent_max_adjust(
    state: RecentMaxState,
    max_abs: Array | float,
    *,
    window: ArrayLike,
    growth_interval: ArrayLike,
    backoff_factor: ArrayLike,
    min_scale: ArrayLike,
    max_scale: ArrayLike,
    limit: ArrayLike,
) -> RecentMaxState:
    _validate.scaler_state(state, RecentMaxState)
    largest = _validate.magnitude(max_abs)
    finite = jnp.isfinite(largest)
    scale = state.loss_scale
    allowed = _power_of_two_below(f32(limit) / largest)
    ceiling = jnp.where(finite, jnp.minimum(state.ceiling, allowed), state.ceiling)
    known = jnp.minimum(ceiling, state.previous_ceiling)
    grows = finite & is_due(state.finite_count, growth_interval)
    relaxed = jnp.where(grows, 2 * state.overflow_ceiling, state.overflow_ceiling)
    # XLA turns subnormal numbers to 0, from which no doubling leads back.
    lowered = jnp.maximum(scale * f32(backoff_factor), _validate.SMALLEST)
    lowered = jnp.minimum(state.overflow_ceiling, lowered)
    overflow_ceiling = jnp.where(finite, relaxed, lowered)
    target = jnp.where(jnp.isinf(known), 2 * scale, known)
    target = jnp.minimum(target, overflow_ceiling)
    target = jnp.clip(target, f32(min_scale), f32(max_scale))
    ends = finite & is_due(state.window_count, window)
    counted = state.window_count + finite.astype(jnp.int32)
    return RecentMaxState(
        # A scale that was set below the floor stays: an overflow never raises it.
        loss_scale=jnp.where(finite, target, jnp.minimum(scale, target)),
        finite_count=jnp.where(finite & ~grows, state.finite_count + 1, 0),
        window_count=jnp.where(ends, 0, counted),
        ceiling=jnp.where(ends, jnp.inf, ceiling),
        previous_ceiling=jnp.where(ends, ceiling, state.previous_ceiling),
        overflow_ceiling=overflow_ceiling,
    )


def _power_of_two_below(value: Array) -> Array:
    """The largest power of two that is not above `value` > 0; inf for inf."""
    pattern = lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(INF)
    return lax.bitcast_convert_type(pattern, jnp.float32)


def recent_max(
    init_scale: float = 1.0,
    *,
    window: int = 100,
    growth_interval: int = GROWTH_INTERVAL,
    backoff_factor: float = BACKOFF_FACTOR,
    min_scale: float = MIN_SCALE,
    max_scale: float = MAX_SCALE,
    headroom: float = 2.0,
    dtype: DTypeLike = jnp.float16,
) -> LossScaler[RecentMaxState]:
    """Returns a scaler that sets the loss scale from recent gradient maxima.

    The scale is the largest power of two at which the largest gradient of the last
    `window` to 2 * `window` finite steps, times 2**headroom, is finite. It is right
    from the second step on, and goes down as soon as gradients grow, before they
    overflow: no step is skipped as long as gradients grow by less than 2**headroom from
    one step to the next.

    It sees only the gradients of the parameters, as `jls.cautious` does; the headroom
    has to cover those of the activations too. If it does not, gradients overflow, and
    the scale moves like that of `jls.dynamic` until they no longer do. It sees them as
    they reach the wrapper: clip inside it, and leave headroom if gradients are averaged
    before.

    Each step computes the scale again, so one set by `jls.set_loss_scale` lasts for a
    single step.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale]. The first step finds
        a better one, unless it overflows; its own small gradients may underflow.
      window: >= 1, finite steps; what happened more than two windows ago is forgotten.
      growth_interval: >= 1, finite steps after an overflow until a scale twice as high
        is allowed, and so on.
      backoff_factor: in (0, 1). After an overflow we know only that the scale was too
        high: this times the scale is the highest one allowed.
      min_scale: >= 2**-126.
      max_scale: <= 2**126. Gradients that are all 0 double the scale up to here, since
        all of them may have underflowed.
      headroom: bits to leave free above the largest gradient, from 0 to 126.
      dtype: the dtype of the backward pass: floating point, of 8 to 32 bits.

    Returns:
      A `jls.types.LossScaler` that sees "max_abs": its `adjust(state, max_abs)` takes
      `jls.max_abs` of the true gradients. The scale is a power of two if `init_scale`,
      bounds and factor are.

    Raises:
      TypeError: if a number is not real, an interval not an integer, or `dtype`
        not floating point.
      ValueError: if one is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.recent_max()
      >>> state = scaler.init()
      >>> for max_abs in (0.25, 0.025, 20.0, jnp.inf):  # float16 ends at 65504
      ...     state = scaler.adjust(state, max_abs)
      ...     print(state.loss_scale)
      32768.0
      32768.0
      512.0
      256.0

    References:
      Kuchaiev et al., Mixed-Precision Training for NLP and Speech Recognition with
      OpenSeq2Seq, 2018, arXiv:1805.10387, for the idea.
    """
    return make(
        recent_max_init,
        Partial(recent_max_adjust, limit=_validate.limit(headroom, dtype)),
        sees="max_abs",
        init_scale=init_scale,
        window=window,
        growth_interval=growth_interval,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
        max_scale=max_scale,
    )
