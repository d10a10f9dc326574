# SPDX-License-Identifier: Apache-2.0
"""Like `dynamic`, but only steps that the next scale would hold count towards growth.

    next scale        min(scale * growth_factor, max_scale)
    limit             the largest number of `dtype`, divided by 2**headroom
    max_abs * next scale <= limit    like a finite step of `dynamic`
    finite, but above the limit      finite_count = 0, nonfinite_count = 0
    not finite                       like `dynamic`

`dynamic` finds the highest scale by overflowing, which costs one step in
`growth_interval`. The gradients show beforehand what would happen.
"""

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike, DTypeLike

from jls import _validate
from jls._scalers.rule import (
    BACKOFF_FACTOR,
    GROWTH_FACTOR,
    GROWTH_INTERVAL,
    INIT_SCALE,
    MAX_SCALE,
    MIN_SCALE,
    after_step,
    f32,
    grow,
    make,
    start_at,
)
from jls._types import LossScaler, ScalerState


def cautious_adjust(
    state: ScalerState,
    max_abs: Array | float,
    *,
    limit: ArrayLike,
    **hyperparameters: ArrayLike,
) -> ScalerState:
    _validate.scaler_state(state, ScalerState)
    largest = _validate.magnitude(max_abs)
    factor, cap = hyperparameters["growth_factor"], hyperparameters["max_scale"]
    fits = largest * grow(state.loss_scale, factor, cap) <= f32(limit)
    finite = jnp.isfinite(largest)
    return after_step(state, finite, fits, consecutive=True, **hyperparameters)


def cautious(
    init_scale: float = INIT_SCALE,
    *,
    growth_factor: float = GROWTH_FACTOR,
    backoff_factor: float = BACKOFF_FACTOR,
    growth_interval: int = GROWTH_INTERVAL,
    backoff_interval: int = 1,
    min_scale: float = MIN_SCALE,
    max_scale: float = MAX_SCALE,
    headroom: float = 1.0,
    dtype: DTypeLike = jnp.float16,
) -> LossScaler[ScalerState]:
    """Returns a scaler like `jls.dynamic` that does not grow into an overflow.

    It grows after `growth_interval` consecutive steps, each of which would have been
    finite at the next scale too. So it stays below the scale at which the gradients of
    the parameters overflow, where `jls.dynamic` loses one step in `growth_interval` to
    find that scale again. It sees only the gradients of the parameters: if those of the
    activations are larger by more than `headroom`, it overflows as `jls.dynamic` does.
    And it sees them as they reach the wrapper: clip inside `jls.loss_scaled`, and leave
    headroom if float16 gradients are summed or averaged before, over micro-batches or
    devices.

    Args:
      init_scale: see `jls.dynamic`, also for the next six.
      growth_factor: finite and > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, steps in a row that have to fit the next scale.
      backoff_interval: >= 1.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.
      headroom: bits to leave free above the largest gradient, from 0 to 126.
      dtype: the dtype of the backward pass: floating point, of 8 to 32 bits.

    Returns:
      A `jls.types.LossScaler` that sees "max_abs": its `adjust(state, max_abs)` takes
      `jls.max_abs` of the true gradients.

    Raises:
      TypeError, ValueError: see `jls.dynamic`; also if `dtype` is not floating point,
        or `headroom` out of range.

    Example:
      >>> scaler = jls.cautious(8.0, growth_interval=2, headroom=0.0)
      >>> state = scaler.init()
      >>> for max_abs in (5000.0, 5000.0, 5.0, 5.0):  # float16 ends at 65504
      ...     state = scaler.adjust(state, max_abs)
      ...     print(state.loss_scale)
      8.0
      8.0
      8.0
      16.0
    """
    return make(
        start_at,
        Partial(cautious_adjust, limit=_validate.limit(headroom, dtype)),
        sees="max_abs",
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        backoff_interval=backoff_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
