# SPDX-License-Identifier: Apache-2.0
"""Reading and setting the loss scale of a running job, wherever it is kept."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jls._buffers import put
from jls._locate import find, is_scaler_state, is_wrapper_state, locate, unwrapped
from jls._tree import is_concrete
from jls._types import SCALARS
from jls._validate import is_real, scale_value

State = TypeVar("State")


def loss_scale(state: Any) -> Array:
    """Returns the loss scale that the next step will use.

    Args:
      state: anything that carries exactly one loss scale: a `LossScaleState`, an optax
        state however nested, a Flax `TrainState`, an `nnx.Optimizer`.

    Returns:
      `f32[]`, on the device; `float()` of it waits for the step. Outside of jit it is
      the state's own buffer, which a step that donates the state deletes.

    Raises:
      ValueError: if `state` carries no loss scale, or several.

    Example:
      >>> jls.loss_scale(jls.dynamic().init())
      Array(32768., dtype=float32)
    """
    return jnp.asarray(locate(state).loss_scale)


def metrics(state: Any) -> dict[str, Array]:
    """Returns what a logger wants to know, as scalars on the device.

    Fetch them with one `jax.device_get(...)` every so many steps, or return them from a
    `jax.lax.scan` to stack them. No call waits for the device. Outside of jit they are
    the state's own buffers: fetch them before a step that donates the state.

    Args:
      state: anything that carries exactly one loss scale.

    Returns:
      A flat dict: `loss_scale` (f32[], the next step's), `applied` (bool[], was the
      last step applied), and the counts `steps`, `skips`, `consecutive_skips`,
      `nonfinite_losses` and `nonfinite_updates` (i32[]), and `skip_reason` (i32[], of
      the last skipped step: 0 none yet, 1 gradients, 2 loss, 3 updates). Of a bare
      `LossScaleState` the `loss_scale` alone.

    Raises:
      ValueError: if `state` carries no loss scale, or several.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> {name: value.item() for name, value in jls.metrics(state).items()}
      {'loss_scale': 32768.0, 'applied': False, 'steps': 0, 'skips': 0, \
'consecutive_skips': 0, 'nonfinite_losses': 0, 'nonfinite_updates': 0, \
'skip_reason': 0}
    """
    values = {"loss_scale": loss_scale(state)}
    for _, wrapper in find(state, is_wrapper_state):
        for name in SCALARS:
            values[name] = unwrapped(getattr(wrapper, name))
    return values


def set_loss_scale(state: State, value: ArrayLike) -> State:
    """Returns `state` with the loss scale set by hand and its counts restarted at 0.

    Structure, dtypes and placement stay, so that a jitted step does not retrace. The
    bounds of a policy are not consulted: it goes on from the new scale.

    Args:
      state: anything that carries exactly one loss scale.
      value: a number, or an array of shape `()` or `(1,)`; from 2**-126 to 2**126.
        Stored as float32 in a buffer of its own.

    Returns:
      A state like `state`. An `nnx.Optimizer` is changed in place and returned.

    Raises:
      TypeError: if `value` is not a real number.
      ValueError: if it has another shape or is out of range, or if `state` carries no
        loss scale, or several. Traced values are not checked.

    Example:
      >>> state = jls.set_loss_scale(jls.dynamic().init(), 1024)
      >>> state.loss_scale
      Array(1024., dtype=float32)
    """
    new_scale = checked_scale(value)
    scaler_state = locate(state)  # one, or an error, before anything changes
    ((_, node),) = find(state, is_scaler_state)
    fresh = {"loss_scale": new_scale}
    for count in ("finite_count", "nonfinite_count"):
        if count in node._fields:
            # Below 0 they do not count yet, or never.
            fresh[count] = jnp.minimum(getattr(scaler_state, count), 0)
    if hasattr(node.loss_scale, "set_value"):  # NNX: each leaf is a variable
        for name, new in fresh.items():
            variable = getattr(node, name)
            variable.set_value(_placed_like(variable.get_value(), new))
        return state
    restarted = node._replace(
        **{name: _placed_like(getattr(node, name), new) for name, new in fresh.items()}
    )
    return jax.tree.map(
        lambda x: restarted if is_scaler_state(x) else x, state, is_leaf=is_scaler_state
    )


def checked_scale(value: Any) -> Array:
    """The loss scale `value` as `f32[]` in a fresh buffer."""
    if not _is_real_array(value) and not is_real(value):
        got = getattr(value, "dtype", None) or f"{type(value).__name__} {value!r}"
        raise TypeError(f"loss_scale must be a real number or array, got {got}.")
    shape = np.shape(value)
    if shape not in ((), (1,)):
        raise ValueError(f"loss_scale must have shape () or (1,), got shape {shape}.")
    if isinstance(value, Tracer):
        return jnp.array(value, jnp.float32, copy=True).reshape(())
    # Through the host: the value's device must not become that of the state.
    exact = np.asarray(value).item() if _is_real_array(value) else value
    return jnp.array(scale_value("loss_scale", exact), jnp.float32)


def _is_real_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic) and any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )


def _placed_like(old: Any, new: Array) -> Array:
    """`new` on the devices of `old`: another placement would compile the step again."""
    if is_concrete(new) and is_concrete(old) and old.committed:
        return put(new, old.sharding)
    return new
