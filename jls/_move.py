# SPDX-License-Identifier: Apache-2.0
"""How a loss scale moves: up to a cap, down to a floor, when a count is full."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def f32(value: ArrayLike) -> Array:
    """A hyperparameter as the device computes with it."""
    return jnp.asarray(value, jnp.float32)


def grown(loss_scale: Array, growth_factor: ArrayLike, max_scale: ArrayLike) -> Array:
    """`loss_scale` one growth higher."""
    return jnp.minimum(loss_scale * f32(growth_factor), f32(max_scale))


def moved(
    loss_scale: Array,
    up: Array,
    down: Array,
    *,
    growth_factor: ArrayLike,
    backoff_factor: ArrayLike,
    min_scale: ArrayLike,
    max_scale: ArrayLike,
) -> Array:
    """`loss_scale` one growth higher if `up`, one backoff lower if `down`."""
    floored = jnp.maximum(loss_scale * f32(backoff_factor), f32(min_scale))
    # A scale that was set below the floor stays: an overflow never raises it.
    backed_off = jnp.minimum(loss_scale, floored)
    higher = grown(loss_scale, growth_factor, max_scale)
    return jnp.where(up, higher, jnp.where(down, backed_off, loss_scale))


def is_due(count: Array, interval: ArrayLike) -> Array:
    """Whether one step more than `count` fills `interval`.

    Compared before counting, so that no count can wrap; `>=` since an interval may be
    lowered during a run.
    """
    return count >= jnp.asarray(interval, jnp.int32) - 1


def counted_up(count: Array) -> Array:
    """`count + 1`, the int32 maximum at most."""
    return jnp.minimum(count, jnp.iinfo(jnp.int32).max - 1) + 1
