# SPDX-License-Identifier: Apache-2.0
"""Like `dynamic`, with a budget of non-finite steps; once it is spent, each backs off.

    finite            finite_count + 1
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the H-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
    and so does each one after it; the count keeps growing
    refill            nonfinite_count = 0: on a growth, or on any finite step
    N = growth_interval, H = hysteresis

The rule of Megatron's DynamicGradScaler and DeepSpeed's DynamicLossScaler. Differs from
them in:
1. They have no cap; here the scale stops at max_scale.
2. They raise a scale that is below the floor to the floor on an overflow; here an
   overflow never raises it.
3. DeepSpeed raises an exception on an overflow at the floor; here the scale stays.
4. DeepSpeed since 0.17.1 grows on finite step N + 1 after an overflow: see
   `jls.presets.deepspeed`.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jls import _validate
from jls._scalers import rule
from jls._text import naming_arguments
from jls._tree import as_flag
from jls._types import LossScaler, ScalerState

Refill = Literal["growth", "finite"]


def hysteresis_adjust(
    state: ScalerState,
    grads_finite: Array | bool,
    *,
    growth_interval: ArrayLike,
    hysteresis: ArrayLike,
    refill: Refill,
    **factors_and_bounds: ArrayLike,
) -> ScalerState:
    _validate.scaler_state(state, ScalerState)
    finite = as_flag("grads_finite", grads_finite)
    up = finite & rule.is_due(state.finite_count, growth_interval)
    down = ~finite & rule.is_due(state.nonfinite_count, hysteresis)
    refilled = finite if refill == "finite" else up
    bad = rule.count_up(state.nonfinite_count, ~finite)
    return ScalerState(
        loss_scale=rule.move(state.loss_scale, up, down, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, state.finite_count + 1, 0),
        nonfinite_count=jnp.where(refilled, 0, bad),
    )


@naming_arguments()
def hysteresis(
    init_scale: float = rule.INIT_SCALE,
    *,
    growth_factor: float = rule.GROWTH_FACTOR,
    backoff_factor: float = rule.BACKOFF_FACTOR,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    refill: Refill = "growth",
    min_scale: float = rule.MIN_SCALE,
    max_scale: float = rule.MAX_SCALE,
) -> LossScaler[ScalerState]:
    """Returns a scaler that tolerates a few non-finite steps before it backs off.

    The first `hysteresis - 1` non-finite steps leave the scale alone, so that a rare
    bad batch does not cost a factor of two. Each one after them backs off, until the
    budget is refilled. `nonfinite_count` counts them since the last refill.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale]; a float if it is
        below 16: `hysteresis(2)` is an error, and not a loss scale of 2.
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
      A `jls.types.LossScaler`, whose numbers are pytree leaves.

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
    given = locals()
    refill = _validate.choice("refill", given.pop("refill"), get_args(Refill))
    if type(init_scale) is int and 0 < init_scale < 16 and hysteresis == 2:
        raise ValueError(
            f"init_scale must be a float if it is below 16, got {init_scale}. Write "
            f"hysteresis(hysteresis={init_scale}) for the count of steps, or "
            f"init_scale={init_scale:.1f}."
        )
    return rule.make(
        rule.start_at, rule.switch(hysteresis_adjust, refill=refill), given
    )
