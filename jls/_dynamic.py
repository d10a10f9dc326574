# SPDX-License-Identifier: Apache-2.0
"""A loss scale that finds itself: grow after N finite steps, back off on overflow.

    finite            finite_count + 1, nonfinite_count = 0
    the N-th of them  scale = min(scale * growth_factor, max_scale), finite_count = 0
    not finite        finite_count = 0, nonfinite_count + 1
    the M-th of them  scale = min(scale, max(scale * backoff_factor, min_scale)),
                      nonfinite_count = 0
    N = growth_interval, M = backoff_interval, both counted consecutively

Differs from other systems in:
1. Flax <= 0.12.8 and DeepSpeed grow on finite step N + 1; here, in torch, jmp, Keras,
   Paddle and MindSpore on step N.
2. torch, Paddle and Keras have neither floor nor cap, so their scale can reach 0 or
   inf; here it stays in [min_scale, max_scale].
3. jmp, Flax and MindSpore raise a scale that is below the floor to the floor on an
   overflow; here an overflow never raises it.
"""

import itertools

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._static import start_at
from jls._tree import as_flag
from jls._types import LossScaler, LossScaleState


def _adjust(
    state: LossScaleState,
    grads_finite: Array | bool,
    *,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    growth_interval: ArrayLike,
    backoff_interval: ArrayLike,
    min_scale: ArrayLike,
    max_scale: ArrayLike,
) -> LossScaleState:
    finite = as_flag("grads_finite", grads_finite)
    loss_scale, finite_count, nonfinite_count = state

    def f32(value):
        return jnp.asarray(value, jnp.float32)

    grown = jnp.minimum(loss_scale * f32(growth_factor), f32(max_scale))
    floored = jnp.maximum(loss_scale * f32(backoff_factor), f32(min_scale))
    backed_off = jnp.minimum(loss_scale, floored)

    # Compared before counting, so that no count can wrap; `>=` since an interval may be
    # lowered during a run.
    grow_due = finite_count >= jnp.asarray(growth_interval, jnp.int32) - 1
    backoff_due = nonfinite_count >= jnp.asarray(backoff_interval, jnp.int32) - 1
    return LossScaleState(
        loss_scale=jnp.where(
            finite,
            jnp.where(grow_due, grown, loss_scale),
            jnp.where(backoff_due, backed_off, loss_scale),
        ),
        finite_count=jnp.where(finite & ~grow_due, finite_count + 1, 0),
        nonfinite_count=jnp.where(finite | backoff_due, 0, nonfinite_count + 1),
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
    thousand steps a `growth_interval` of 100 to 200 finds the scale sooner.

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
    just_above, just_below = 1.0 + 2.0**-23, 1.0 - 2.0**-24  # in float32
    growth_factor = _validate.number(
        "growth_factor",
        growth_factor,
        "finite and > 1 in float32",
        just_above,
        2.0**126,
    )
    backoff_factor = _validate.number(
        "backoff_factor", backoff_factor, "in (0, 1) in float32", 2.0**-126, just_below
    )
    given = {"min_scale": min_scale, "init_scale": init_scale, "max_scale": max_scale}
    scales = {name: _validate.scale_value(name, s) for name, s in given.items()}
    for low, high in itertools.combinations(scales, 2):
        checkable = not any(map(_validate.is_unchecked, (scales[low], scales[high])))
        if checkable and scales[low] > scales[high]:
            raise ValueError(
                f"{low} must be <= {high}, got {given[low]!r} > {given[high]!r}."
            )
    return LossScaler(
        Partial(start_at, loss_scale=scales["init_scale"]),
        Partial(
            _adjust,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=_validate.interval("growth_interval", growth_interval),
            backoff_interval=_validate.interval("backoff_interval", backoff_interval),
            min_scale=scales["min_scale"],
            max_scale=scales["max_scale"],
        ),
    )
