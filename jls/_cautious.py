# SPDX-License-Identifier: Apache-2.0
"""As `dynamic`, but a step counts towards growth only if the next scale would hold it.

    next scale        min(scale * growth_factor, max_scale)
    limit             the largest number of `dtype`, divided by 2**headroom
    largest * next scale <= limit    as a finite step of `dynamic`
    finite, but above the limit      finite_count = 0, nonfinite_count = 0
    not finite                       as `dynamic`

`dynamic` finds the highest scale by overflowing: one step in `growth_interval` is lost
for that, and the gradients that tell what would happen were there all the time.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._dynamic import after_step
from jls._magnitude import as_magnitude
from jls._move import f32, grown
from jls._static import start_at
from jls._types import LossScaleState, MagnitudeScaler


def _adjust(
    state: LossScaleState,
    largest: Array | float,
    *,
    limit: ArrayLike,
    **hyperparameters: ArrayLike,
) -> LossScaleState:
    _validate.policy_state(state, LossScaleState)
    largest = as_magnitude(largest)
    factor, cap = hyperparameters["growth_factor"], hyperparameters["max_scale"]
    fits = largest * grown(state.loss_scale, factor, cap) <= f32(limit)
    return after_step(state, jnp.isfinite(largest), fits, **hyperparameters)


def cautious(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    backoff_interval: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    headroom: float = 1.0,
    dtype: Any = jnp.float16,
) -> MagnitudeScaler:
    """Returns `jls.dynamic`, but one that does not grow into an overflow.

    It grows after `growth_interval` consecutive steps of which each would have been
    finite at the next scale too. So it stays below the scale at which the gradients of
    the parameters overflow, instead of finding it anew by a skipped step every
    `growth_interval` steps. It sees only the gradients of the parameters: if those of
    the activations are larger by more than `headroom`, it overflows as `dynamic` does.
    It sees what reaches the wrapper: clip inside of `jls.loss_scaled`, and leave
    headroom where float16 gradients are summed or averaged before, over micro-batches
    or devices.

    Args:
      init_scale: see `jls.dynamic`, as for the next six.
      growth_factor: finite and > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, steps in a row that have to fit the next scale.
      backoff_interval: >= 1.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.
      headroom: bits, from 0 to 126, to be left above the largest gradient.
      dtype: in which the backward pass computes: a floating-point dtype of 8 to 32
        bits.

    Returns:
      A `jls.MagnitudeScaler`, whose `adjust(state, largest)` takes `jls.max_abs` of the
      true gradients.

    Raises:
      TypeError, ValueError: see `jls.dynamic` and `jls.suggest_scale`.

    Example:
      >>> scaler = jls.cautious(8.0, growth_interval=2, headroom=0.0)
      >>> state = scaler.init()
      >>> for largest in (5000.0, 5000.0, 5.0, 5.0):  # float16 ends at 65504
      ...     state = scaler.adjust(state, largest)
      ...     print(state.loss_scale)
      8.0
      8.0
      8.0
      16.0
    """
    first_scale, hyperparameters = _validate.policy(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        backoff_interval=backoff_interval,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    hyperparameters["limit"] = _validate.limit(headroom, dtype)
    return MagnitudeScaler(
        Partial(start_at, loss_scale=first_scale), Partial(_adjust, **hyperparameters)
    )
