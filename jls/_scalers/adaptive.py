# SPDX-License-Identifier: Apache-2.0
"""Like `dynamic`, with an interval that adapts: it climbs a ladder, and falls off.

    finite, or not    like `dynamic` with a backoff on each non-finite step
    a growth          growth_count + 1, nonfinite_count = 0
    the 3rd growth    the next longer interval, growth_count = 0
    not finite        nonfinite_count + 1
    the 3rd of these  if above the shortest interval: down to the foot, both counts 0
    the foot          an interval of 1, below the intervals that are given

This is the rule of MindFormers' AdaptiveLossScaleUpdateCell, for `jls.presets`. A
finite step resets nonfinite_count only if it is a growth. An overflow resets
growth_count only on a fall to the foot. The third growth has no effect at the longest
interval, and the third overflow has none at the shortest or the foot: the count wraps
from 3 to 0, so four more are needed. There are two differences:
1. MindFormers has no cap; here the scale stops at max_scale.
2. MindFormers raises a scale below 1 to 1 on an overflow; here no overflow raises it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jls import _validate
from jls._scalers.rule import is_due, move, start_at
from jls._text import format_state
from jls._tree import as_flag
from jls._types import exportable


@exportable
class AdaptiveState(NamedTuple):
    """State of `jls.presets.mindformers_adaptive`.

    `jls.set_loss_scale` restarts the first two counts.

    Example:
      >>> jls.presets.mindformers_adaptive(2.0**10, 2, 20).init().rung
      Array(1, dtype=int32)
    """

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  consecutive finite steps since the scale last changed
    nonfinite_count: Array  # i32[]  non-finite steps since the last growth, modulo 4
    growth_count: Array  # i32[]  growths since the interval last changed, modulo 4
    rung: Array  # i32[]  of the ladder: 0 is the foot, i the i-th of `intervals`

    __repr__ = format_state


def adaptive_init(init_scale: ArrayLike, init_rung: ArrayLike) -> AdaptiveState:
    return AdaptiveState(
        *start_at(init_scale=init_scale),
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
