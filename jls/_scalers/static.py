# SPDX-License-Identifier: Apache-2.0
"""A loss scale that never moves."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._text import naming_arguments
from jls._tree import as_flag
from jls._types import LossScaler, StaticState


def static_init(loss_scale: ArrayLike) -> StaticState:
    return StaticState(jnp.array(loss_scale, jnp.float32))


def static_adjust(state: StaticState, grads_finite: Array | bool) -> StaticState:
    _validate.scaler_state(state, StaticState, exact=True)
    as_flag("grads_finite", grads_finite)
    return state


def is_static(scaler: Any) -> bool:
    """Whether `scaler` was made by `static`."""
    return getattr(scaler.adjust, "func", None) is static_adjust


@naming_arguments(scale="loss_scale", init_scale="loss_scale")
def static(loss_scale: float = 1.0) -> LossScaler[StaticState]:
    """Returns a scaler that never changes the loss scale.

    Steps with non-finite gradients are skipped all the same. With a scale of 1 nothing
    is scaled, and only the skipping is left: see `jls.skip_nonfinite`. To change the
    scale between two steps, from the host, call `jls.set_loss_scale`.

    Args:
      loss_scale: from 2**-126 to 2**126; powers of two scale without rounding.

    Returns:
      A `jls.types.LossScaler` whose `adjust` returns the state it is given.

    Raises:
      TypeError: if `loss_scale` is not a real number.
      ValueError: if it is out of range. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.static(128.0)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(128., dtype=float32)
    """
    loss_scale = _validate.scale_value("loss_scale", loss_scale)
    return LossScaler(
        Partial(static_init, loss_scale=loss_scale), Partial(static_adjust)
    )
