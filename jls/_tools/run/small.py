# SPDX-License-Identifier: Apache-2.0
"""Whether gradients are too small for the loss scale."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jls import _validate
from jls._reduce import float32_parts
from jls._tree import named_floats


def measure_small(
    loss_scale: ArrayLike, grads: optax.Updates, dtype: DTypeLike
) -> dict[str, Array]:
    """The numbers of `Small`, but for the name of the dtype, on the device.

    Returns:
      small: `f32[]`, the share of the nonzero finite values that `dtype`, rounding to
        nearest, has no normal number for once they are scaled.
      all_zero: `bool[]`, whether there are values, and all of them are 0.
    """
    info = jnp.finfo(dtype)
    normal = float(info.smallest_normal) - float(info.smallest_subnormal) / 2
    # XLA flushes a product, or a bound, that is subnormal in float32.
    bound = max(normal, _validate.SMALLEST)
    leaves = named_floats(grads)[1]
    small, all_zero = _small_share(leaves, loss_scale, bound)
    return {"small": small, "all_zero": all_zero}


_INF = 0x7F800000  # those of NaN are larger


@functools.partial(jax.jit, static_argnums=2)
def _small_share(
    leaves: list[Any], loss_scale: Array, bound: float
) -> tuple[Array, Array]:
    few = many = others = jnp.float32(0.0)
    for leaf in leaves:
        for part in float32_parts(leaf):
            # In the bits without their sign, since XLA takes a subnormal number for 0.
            bits = lax.bitcast_convert_type(part, jnp.int32) & 0x7FFFFFFF
            finite = bits < _INF
            counts = finite & (bits > 0)
            is_small = jnp.abs(part) * loss_scale < bound
            few += jnp.sum(counts & is_small, dtype=jnp.float32)
            many += jnp.sum(counts, dtype=jnp.float32)
            others += jnp.sum(~finite, dtype=jnp.float32)
    size = sum(leaf.size for leaf in map(jnp.asarray, leaves))
    return few / jnp.maximum(many, 1.0), (many + others == 0) & (size > 0)
