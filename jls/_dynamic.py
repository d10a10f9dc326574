# SPDX-License-Identifier: Apache-2.0
"""A loss scale that finds itself: grow after N finite steps, back off on overflow.

    finite            finite_count + 1, nonfinite_count = 0
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the M-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
                      nonfinite_count = 0
    N = growth_interval, M = backoff_interval, both counted consecutively

Differs from other systems in:
1. Flax up to 0.12.12 grows on finite step N + 1, DeepSpeed does so after an overflow;
   here, in torch, jmp, Keras, Paddle and MindSpore on step N.
2. torch, Paddle and Keras have neither floor nor cap, so their scale can reach 0 or
   inf; here it stays in [min_scale, max_scale].
3. jmp, Flax and MindSpore raise a scale that is below the floor to the floor on an
   overflow; here an overflow never raises it.
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
    state: LossScaleState, grads_finite: Array | bool, **hyperparameters: ArrayLike
) -> LossScaleState:
    _validate.policy_state(state, LossScaleState)
    finite = as_flag("grads_finite", grads_finite)
    return after_step(state, finite, finite, **hyperparameters)


def after_step(
    state: LossScaleState,
    finite: Array,
    counts: Array,
    *,
    growth_interval: ArrayLike,
    backoff_interval: ArrayLike,
    **factors_and_bounds: ArrayLike,
) -> LossScaleState:
    """The next state; a finite step that does not count restarts `finite_count`."""
    up = counts & is_due(state.finite_count, growth_interval)
    down = ~finite & is_due(state.nonfinite_count, backoff_interval)
    return LossScaleState(
        loss_scale=moved(state.loss_scale, up, down, **factors_and_bounds),
        finite_count=jnp.where(counts & ~up, state.finite_count + 1, 0),
        nonfinite_count=jnp.where(finite | down, 0, state.nonfinite_count + 1),
    )


def dynamic(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    backoff_interval: int = 1,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> LossScaler:
    """Returns a policy that grows the loss scale and backs off after an overflow.

    The first steps of a run may be skipped while the scale comes down to what the
    gradients allow; later about one step in `growth_interval` is. For a run of a few
    thousand steps a `growth_interval` of 25 to 200 finds the scale sooner.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale.
      growth_interval: >= 1, consecutive finite optimizer steps before a growth, which
        happens on the last of them.
      backoff_interval: >= 1, consecutive non-finite steps before a backoff. Each of
        them is skipped.
      min_scale: >= 2**-126. May be below 1, for a loss that is itself too large.
      max_scale: <= 2**126.

    Factors and bounds that are not powers of two are allowed, but then scaling and
    unscaling round.

    Returns:
      A `LossScaler`. Its hyperparameters are pytree leaves: pass it to a jitted
      function as an argument and they change without a retrace.

    Raises:
      TypeError: if a factor or bound is not a real number, or an interval not an
        integer.
      ValueError: if one is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.dynamic(8.0, growth_interval=2)
      >>> state = scaler.init()
      >>> for grads_finite in (True, True, False):
      ...     state = scaler.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      8.0
      16.0
      8.0

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      section 3.2. The names are those of torch.amp.GradScaler.
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
