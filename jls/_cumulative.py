# SPDX-License-Identifier: Apache-2.0
"""As `dynamic`, but non-finite steps add up: finite ones do not make up for them.

    finite            finite_count + 1
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the M-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
                      nonfinite_count = 0
    N = growth_interval, counted consecutively; M = backoff_interval, counted since the
    last backoff

It is what the documentation of Paddle's GradScaler says ("accumulated"); Paddle's code
counts consecutively, as `dynamic` does.
"""

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._move import is_due, moved
from jls._static import start_at
from jls._tree import as_flag
from jls._types import LossScaler, LossScaleState


def _adjust(
    state: LossScaleState,
    grads_finite: Array | bool,
    *,
    growth_interval: ArrayLike,
    backoff_interval: ArrayLike,
    **factors_and_bounds: ArrayLike,
) -> LossScaleState:
    _validate.policy_state(state, LossScaleState)
    finite = as_flag("grads_finite", grads_finite)
    up = finite & is_due(state.finite_count, growth_interval)
    down = ~finite & is_due(state.nonfinite_count, backoff_interval)
    bad = jnp.where(finite, state.nonfinite_count, state.nonfinite_count + 1)
    return LossScaleState(
        loss_scale=moved(state.loss_scale, up, down, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, state.finite_count + 1, 0),
        nonfinite_count=jnp.where(down, 0, bad),
    )


def cumulative(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    backoff_interval: int = 2,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> LossScaler:
    """Returns a policy that backs off after so many non-finite steps in all.

    As `jls.dynamic`, except that neither a finite step nor a growth resets the count of
    non-finite steps; only a backoff does. With a `backoff_interval` of 1 the two are
    the same.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale.
      growth_interval: >= 1, consecutive finite optimizer steps before a growth.
      backoff_interval: >= 1, non-finite steps since the last backoff, consecutive or
        not, before the next. Each of them is skipped.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.

    Returns:
      A `LossScaler`, whose hyperparameters are pytree leaves.

    Raises:
      TypeError: if a factor or bound is not a real number, or an interval not an
        integer.
      ValueError: if one is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.cumulative(8.0, backoff_interval=2)
      >>> state = scaler.init()
      >>> for grads_finite in (False, True, False):
      ...     state = scaler.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      8.0
      8.0
      4.0
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
    return LossScaler(
        Partial(start_at, loss_scale=first_scale), Partial(_adjust, **hyperparameters)
    )
