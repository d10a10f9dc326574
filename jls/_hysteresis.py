# SPDX-License-Identifier: Apache-2.0
"""As `dynamic`, with a budget of non-finite steps; once it is spent, each backs off.

    finite            finite_count + 1
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the H-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
    and each after it the same; the count goes on
    refill            nonfinite_count = 0: on a growth, or on any finite step
    N = growth_interval, H = hysteresis

The rule of Megatron's DynamicGradScaler and DeepSpeed's DynamicLossScaler. Differs from
them in:
1. They have no cap; here the scale stops at max_scale.
2. They raise a scale that is below the floor to the floor on an overflow; here an
   overflow never raises it.
3. DeepSpeed raises an exception on an overflow at the floor; here the scale stays.
4. DeepSpeed grows on finite step N + 1 after an overflow: see `jls.presets.deepspeed`.
"""

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._move import counted_up, is_due, moved
from jls._static import start_at
from jls._tree import as_flag
from jls._types import LossScaler, LossScaleState


def _adjust(
    state: LossScaleState,
    grads_finite: Array | bool,
    any_finite_step_refills: bool,
    *,
    growth_interval: ArrayLike,
    hysteresis: ArrayLike,
    **factors_and_bounds: ArrayLike,
) -> LossScaleState:
    _validate.policy_state(state, LossScaleState)
    finite = as_flag("grads_finite", grads_finite)
    up = finite & is_due(state.finite_count, growth_interval)
    down = ~finite & is_due(state.nonfinite_count, hysteresis)
    refill = finite if any_finite_step_refills else up
    bad = jnp.where(finite, state.nonfinite_count, counted_up(state.nonfinite_count))
    return LossScaleState(
        loss_scale=moved(state.loss_scale, up, down, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, state.finite_count + 1, 0),
        nonfinite_count=jnp.where(refill, 0, bad),
    )


# Two functions, not one with a string: the leaves of a policy are numbers.
def _adjust_refilled_by_growth(
    state: LossScaleState, grads_finite: Array | bool, **hyperparameters: ArrayLike
) -> LossScaleState:
    return _adjust(state, grads_finite, False, **hyperparameters)


def _adjust_refilled_by_finite(
    state: LossScaleState, grads_finite: Array | bool, **hyperparameters: ArrayLike
) -> LossScaleState:
    return _adjust(state, grads_finite, True, **hyperparameters)


_ADJUST = {"growth": _adjust_refilled_by_growth, "finite": _adjust_refilled_by_finite}


def hysteresis(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    refill: str = "growth",
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> LossScaler:
    """Returns a policy that tolerates a few non-finite steps before it backs off.

    The first `hysteresis - 1` non-finite steps leave the scale alone, so that a rare
    bad batch does not cost a factor of two. Every one after them backs off, until the
    budget is refilled. `nonfinite_count` is the number since then.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale.
      growth_interval: >= 1, consecutive finite optimizer steps before a growth.
      hysteresis: >= 1, the non-finite step since the last refill that first backs off.
        Each of them is skipped. With 1 every non-finite step backs off.
      refill: what refills the budget. "growth": a growth of the scale, as in Megatron
        and by default in DeepSpeed. "finite": any finite step, as in DeepSpeed with
        consecutive_hysteresis.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.

    Returns:
      A `LossScaler`, whose hyperparameters but `refill` are pytree leaves.

    Raises:
      TypeError: if a factor or bound is not a real number, an interval not an integer,
        or `refill` not a string.
      ValueError: if one is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.hysteresis(8.0, hysteresis=2)
      >>> state = scaler.init()
      >>> for grads_finite in (False, True, False, False):
      ...     state = scaler.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      8.0
      8.0
      4.0
      2.0
    """
    if not isinstance(refill, str):
        raise TypeError(
            f"refill must be a str, got {type(refill).__name__} {refill!r}."
        )
    if refill not in _ADJUST:
        raise ValueError(f'refill must be "growth" or "finite", got {refill!r}.')
    first_scale, hyperparameters = _validate.policy(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return LossScaler(
        Partial(start_at, loss_scale=first_scale),
        Partial(_ADJUST[refill], **hyperparameters),
    )
