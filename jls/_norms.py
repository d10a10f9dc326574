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
from jax.core import Tracer
from jax.typing import ArrayLike

from jls._tree import floats, widen


def global_norm(tree: Any) -> Array:
    """The L2 norm over all leaves, `f32[]`; inf or NaN if a leaf is not finite."""
    leaves = _wide(tree)
    norm = _norm(leaves)
    return jnp.where(jnp.isfinite(norm), norm, _careful_norm(leaves))


def norm_of_step(grads: Any, seen: Any, is_seen: ArrayLike) -> Array:
    """That of `grads`, of which the optimizer has seen `seen`: the same, if `is_seen`.

    An optimizer that clips needs the norm of what it sees, and XLA CPU computes it once
    for both. Elsewhere the host might have to wait for the flag of a branch.
    """
    norm = _norm(_wide(seen))
    if not isinstance(norm, Tracer) or jax.default_backend() != "cpu":
        return global_norm(grads)
    # Selected out here, since a branch needs in memory all that it reads.
    pairs = zip(_wide(seen), _wide(grads), strict=True)
    given = [jnp.where(is_seen, x, y) for x, y in pairs]
    is_done = is_seen & jnp.isfinite(norm)
    return lax.cond(is_done, lambda: norm, lambda: global_norm(given))


def _wide(tree: Any) -> list[Array]:
    return [widen(leaf) for leaf in floats(tree)]


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
