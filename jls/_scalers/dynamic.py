# SPDX-License-Identifier: Apache-2.0
"""A loss scale that grows after N finite steps and backs off after an overflow.

    finite            finite_count + 1, nonfinite_count = 0
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the M-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
                      nonfinite_count = 0
    N = growth_interval, M = backoff_interval, both counted consecutively

With consecutive=False a finite step leaves nonfinite_count alone: the non-finite steps
since the last backoff add up. That is what the documentation of Paddle's GradScaler
says ("accumulated"); Paddle's code counts consecutively.

Differs from other systems in:
1. Flax up to 0.12.12 grows on finite step N + 1, and DeepSpeed since 0.17.1 does after
   an overflow; here, as in torch, jmp, Keras, Paddle and MindSpore, it is step N.
2. torch, Paddle and Keras have neither floor nor cap, so their scale can reach 0 or
   inf; here it stays in [min_scale, max_scale].
3. jmp, Flax and MindSpore raise a scale that is below the floor to the floor on an
   overflow; here an overflow never raises it.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jls import _validate
from jls._scalers import rule
from jls._text import naming_arguments
from jls._tree import as_flag
from jls._types import LossScaler, ScalerState


def dynamic_adjust(
    state: ScalerState,
    grads_finite: Array | bool,
    *,
    growth_interval: ArrayLike,
    backoff_interval: ArrayLike,
    consecutive: bool,
    **factors_and_bounds: ArrayLike,
) -> ScalerState:
    _validate.scaler_state(state, ScalerState)
    finite = as_flag("grads_finite", grads_finite)
    up = finite & rule.is_due(state.finite_count, growth_interval)
    down = ~finite & rule.is_due(state.nonfinite_count, backoff_interval)
    kept = 0 if consecutive else state.nonfinite_count
    bad = jnp.where(finite, kept, state.nonfinite_count + 1)
    return ScalerState(
        loss_scale=rule.move(state.loss_scale, up, down, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, state.finite_count + 1, 0),
        nonfinite_count=jnp.where(down, 0, bad),
    )


@naming_arguments(
    initial_scale="init_scale",
    scale="init_scale",
    loss_scale="init_scale",
    growth="growth_factor",
    interval="growth_interval",
    period="growth_interval",
)
def dynamic(
    init_scale: float = rule.INIT_SCALE,
    *,
    growth_factor: float = rule.GROWTH_FACTOR,
    backoff_factor: float = rule.BACKOFF_FACTOR,
    growth_interval: int = rule.GROWTH_INTERVAL,
    backoff_interval: int = 1,
    consecutive: bool = True,
    min_scale: float = rule.MIN_SCALE,
    max_scale: float = rule.MAX_SCALE,
) -> LossScaler[ScalerState]:
    """Returns a scaler that grows the loss scale and backs off after an overflow.

    The first steps of a run may be skipped while the scale comes down to what the
    gradients allow; later about one step in `growth_interval` is. For a run of a few
    thousand steps, a `growth_interval` of 25 to 200 finds the scale sooner.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale.
      growth_interval: >= 1, consecutive finite optimizer steps before a growth, which
        happens on the last of them.
      backoff_interval: >= 1, non-finite steps before a backoff. Each of them is
        skipped.
      consecutive: whether those have to be consecutive. False counts all since the
        last backoff: neither a finite step nor a growth restarts their count.
      min_scale: >= 2**-126. May be below 1, for a loss that is itself too large.
      max_scale: <= 2**126. A scale above it, from a run with another bound or set by
        hand, comes down to it instead of growing.

    Factors and bounds that are not powers of two are allowed, but then scaling and
    unscaling round.

    Returns:
      A `jls.types.LossScaler`. Its numbers are pytree leaves: pass it to a jitted
      function as an argument and they change without a retrace.

    Raises:
      TypeError: if a factor or bound is not a real number, an interval not an integer,
        or `consecutive` not a bool.
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
    given = locals()
    consecutive = _validate.flag("consecutive", given.pop("consecutive"))
    return rule.make(
        rule.start_at, rule.switch(dynamic_adjust, consecutive=consecutive), given
    )
