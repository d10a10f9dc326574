# SPDX-License-Identifier: Apache-2.0
"""A loss scale that fits the gradients at hand."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jls import _validate
from jls._locate import locate
from jls._rounding import Edges, cuts, edges, is_finite, magnitudes, normalized
from jls._tally import inexact_leaves, tally

_UNKNOWN = 2.0**15  # the `init_scale` of `jls.dynamic`


def suggest_scale(
    grads: Any, *, headroom: float = 4.0, dtype: Any = jnp.float16
) -> Array:
    """Returns the largest power of two that scales `grads` without an overflow.

    At that loss scale, the largest magnitude in `grads` times 2**headroom still is
    finite in `dtype`. Calibrate a run with it instead of waiting for a dynamic scale to
    find its level, one skipped step or 2000 finite ones at a time:
    `opt_state = jls.set_loss_scale(opt_state, jls.suggest_scale(grads))`.

    It sees only the gradients that it is given, those of the parameters. What overflows
    earlier in the backward pass, in the gradients of activations, it cannot know: that
    is what the headroom is for, and what the dynamic scale still watches over.

    Args:
      grads: true gradients, of one batch or several, as `jls.value_and_grad` gives
        them. NaN and inf never count, nor do leaves that are not floating point.
      headroom: bits, from 0 to 126. The default leaves room for gradients 16 times as
        large, which is 4 of the 40 powers of two of float16; the others are below.
      dtype: in which the backward pass computes: a floating-point dtype of 8 to 32
        bits.

    Returns:
      `f32[]`, from 2**-126 to 2**126. Where `grads` have no finite value but zero there
      is nothing to go by: 2**15 then, with which `jls.dynamic` begins. Zero may mean
      that all of them underflowed, so a scale as low as 1 would be no safer.

    Raises:
      TypeError: if `dtype` is not floating point, or `headroom` not a real number.
      ValueError: if either is out of range.

    Example:
      >>> grads = {"w": jnp.array([3e-6, -1e-4]), "b": jnp.array([0.0, jnp.nan])}
      >>> scale = jls.suggest_scale(grads)
      >>> jnp.log2(scale), scale * 1e-4 * 2**4  # float16 ends at 65504
      (Array(25., dtype=float32), Array(53687.09, dtype=float32))
      >>> jls.set_loss_scale(jls.dynamic().init(), scale).loss_scale == scale
      Array(True, dtype=bool)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      section 3.2: a factor whose product with the largest gradient is below 65504.
    """
    bits = _validate.host_number("headroom", headroom, "from 0 to 126", 0.0, 126.0)
    edge = edges(dtype).overflow
    fraction, exponent = math.frexp(edge.value / 2.0**bits)
    # Significands from here on overflow at a scale with which smaller ones do not.
    first = math.ldexp(fraction, 24)
    first = math.floor(first) + 1 if edge.ties_below else math.ceil(first)
    return _largest_fit(inexact_leaves(grads)[1], first, exponent)


def too_small(state: Any, grads: Any, dtype: Any) -> dict[str, Array]:
    """What tells whether `grads` are too small for the loss scale of `state`.

    Returns:
      small: `f32[]`, of the finite values but 0, the share below the smallest normal
        number of `dtype` once scaled.
      all_zero: `bool[]`, whether there are values, and all of them are 0.
      suggested_scale: `f32[]`, see `suggest_scale`.
    """
    leaves = inexact_leaves(grads)[1]
    small, all_zero = _small_share(leaves, locate(state).loss_scale, edges(dtype))
    suggested = suggest_scale(grads, dtype=dtype)
    return {"small": small, "all_zero": all_zero, "suggested_scale": suggested}


@functools.partial(jax.jit, static_argnums=2)
def _small_share(
    leaves: list[Any], loss_scale: Array, ends: Edges
) -> tuple[Array, Array]:
    cut = cuts(ends.normal, loss_scale)
    few = many = others = jnp.float32(0.0)
    for leaf in leaves:
        for pattern in magnitudes(leaf):
            counts = is_finite(pattern) & (pattern > 0)
            few += jnp.sum(counts & (pattern < cut), dtype=jnp.float32)
            many += jnp.sum(counts, dtype=jnp.float32)
            others += jnp.sum(~is_finite(pattern), dtype=jnp.float32)
    size = sum(leaf.size for leaf in map(jnp.asarray, leaves))
    return few / jnp.maximum(many, 1.0), (many + others == 0) & (size > 0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _largest_fit(leaves: list[Any], first: int, exponent: int) -> Array:
    largest = jnp.uint32(0)
    for leaf in leaves:
        for pattern in magnitudes(leaf):
            key = jnp.where(is_finite(pattern), pattern, jnp.uint32(0))
            largest = jnp.maximum(largest, tally([], [key])[1][0])
    significand, leading = normalized(largest)
    power = exponent - 1 - leading - (significand >= first).astype(jnp.int32)
    scale = jnp.ldexp(jnp.float32(1.0), jnp.clip(power, -126, 126))
    return jnp.where(largest == 0, jnp.float32(_UNKNOWN), scale)
