# SPDX-License-Identifier: Apache-2.0
"""A loss scale that stays what it is."""

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._tree import as_flag
from jls._types import FIXED, LossScaler, LossScaleState


def start_at(loss_scale: ArrayLike) -> LossScaleState:
    """The first state of a policy that keeps `LossScaleState`."""
    return LossScaleState(
        loss_scale=jnp.array(loss_scale, jnp.float32),
        finite_count=jnp.zeros((), jnp.int32),
        nonfinite_count=jnp.zeros((), jnp.int32),
    )


def _start(loss_scale: ArrayLike) -> LossScaleState:
    # Without the policy, the state alone would not tell that its scale is a fixed one.
    return start_at(loss_scale)._replace(finite_count=jnp.full((), FIXED, jnp.int32))


def _adjust(state: LossScaleState, grads_finite: Array | bool) -> LossScaleState:
    _validate.policy_state(state, LossScaleState)
    as_flag("grads_finite", grads_finite)
    return state


def static(loss_scale: float = 1.0) -> LossScaler:
    """Returns a policy that never changes the loss scale.

    Steps with non-finite gradients are skipped all the same. With a scale of 1 it is
    the guard without the scaling: see `jls.skip_nonfinite`. Change the scale from the
    host between two steps with `jls.set_loss_scale`.

    Args:
      loss_scale: from 2**-126 to 2**126; powers of two scale without rounding.

    Returns:
      A `LossScaler` whose `adjust` returns the state it is given.

    Raises:
      TypeError: if `loss_scale` is not a real number.
      ValueError: if it is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.static(128.0)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(128., dtype=float32)
    """
    loss_scale = _validate.scale_value("loss_scale", loss_scale)
    return LossScaler(Partial(_start, loss_scale=loss_scale), Partial(_adjust))
