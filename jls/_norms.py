# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients that do not overflow on the way.

The square of a float32 over 1.8e19 is inf: so is `optax.global_norm` then, and clipping
divides by it. Here the squares are summed a second time, of values so much smaller that
no finite sum overflows, and that sum counts where the first one is not finite. Elements
under 1e-19, whose squares vanish, count as 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._tree import is_inexact, widen


def global_norm(tree: Any, branches: bool = False) -> Array:
    """The L2 norm over all leaves, `f32[]`; inf or NaN if a leaf is not finite.

    With `branches` the second sum is in a branch, for where that is cheap.
    """
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    norm = _norm(leaves)
    if branches:
        return lax.cond(jnp.isfinite(norm), lambda: norm, lambda: _careful_norm(leaves))
    return jnp.where(jnp.isfinite(norm), norm, _careful_norm(leaves))


def _careful_norm(leaves: list[Array]) -> Array:
    tiny = 2.0**-96  # 2**64 squares of the largest number times this have a finite sum
    return _norm([leaf * tiny for leaf in leaves]) / tiny


def _norm(leaves: list[Array]) -> Array:
    total = jnp.zeros((), jnp.float32)
    for leaf in leaves:
        for part in (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,):
            # As optax.global_norm has it, so that XLA computes the two only once.
            total += jnp.sum(jnp.square(part)).astype(jnp.float32)
    return jnp.sqrt(total)
