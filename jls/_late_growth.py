# SPDX-License-Identifier: Apache-2.0
"""A policy that does not count the first finite step after an overflow, or of a run.

DeepSpeed counts the steps between two, so that its first growth after an overflow comes
on finite step N + 1 and the next ones N steps apart.
"""

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from jls._tree import as_flag
from jls._types import AdjustFn, InitFn, LossScaler, LossScaleState


def _init(*, init: InitFn) -> LossScaleState:
    return init()._replace(finite_count=jnp.full((), -1, jnp.int32))


def _adjust(
    state: LossScaleState, grads_finite: Array | bool, *, adjust: AdjustFn
) -> LossScaleState:
    finite = as_flag("grads_finite", grads_finite)
    state = adjust(state, finite)
    return state._replace(finite_count=jnp.where(finite, state.finite_count, -1))


def late_growth(scaler: LossScaler) -> LossScaler:
    """`scaler`, whose `finite_count` begins at -1 instead of 0."""
    return LossScaler(
        Partial(_init, init=scaler.init), Partial(_adjust, adjust=scaler.adjust)
    )
