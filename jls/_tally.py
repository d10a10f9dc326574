# SPDX-License-Identifier: Apache-2.0
"""Which values a tree has, and counting them in one pass over the data."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._locate import unwrapped
from jls._tree import is_inexact

Arrays = tuple[Array, ...]


def inexact_leaves(tree: Any) -> tuple[list[str], list[Any]]:
    """The paths and the values of the floating-point leaves of `tree`.

    NNX keeps each leaf in a variable; its path is that of the variable in the model.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: hasattr(node, "get_value")
    )
    found = [(path, unwrapped(leaf)) for path, leaf in flat]
    found = [(path, leaf) for path, leaf in found if is_inexact(leaf)]
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found
    ]
    if len(set(names)) < len(names):  # {"a/b": x, "a": {"b": y}}
        names = [jax.tree_util.keystr(path) for path, _ in found]
    return names, [leaf for _, leaf in found]


def tally(
    masks: Sequence[Array], keys: Sequence[Array] = (), wraps_at: int = 2**32
) -> tuple[Array, list[Array]]:
    """How often each of `masks` is true, and the largest of each of `keys`, or 0.

    In one reduction: of several, XLA would make a pass over the data each.

    Args:
      masks: `bool[...]`, all of one shape.
      keys: numbers >= 0 of that shape.
      wraps_at: from how many elements on the counts are carried into a second digit.
        That costs ten times as much, since XLA does not vectorize it.

    Returns:
      `u32[n, 2]`, the counts in base 2**32, high digit first; and the maxima.
    """
    shape = [*masks, *keys][0].shape
    lows = tuple(mask.astype(jnp.uint32) for mask in masks)
    has_highs = math.prod(shape) >= wraps_at
    highs = tuple(map(jnp.zeros_like, lows)) if has_highs else ()
    n, m = len(highs), len(highs) + len(lows)
    operands = (*highs, *lows, *keys)
    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)
    combine = functools.partial(_combine, n, m)
    totals = lax.reduce(operands, zeros, combine, range(len(shape)))
    low = jnp.stack(totals[n:m]) if masks else jnp.zeros((0,), jnp.uint32)
    high = jnp.stack(totals[:n]) if highs else jnp.zeros_like(low)
    return jnp.stack([high, low], axis=-1), list(totals[m:])


def _combine(n: int, m: int, a: Arrays, b: Arrays) -> Arrays:
    """The digits of `a` and `b` added and their keys compared: high, low, keys."""
    low = list(map(jnp.add, a[n:m], b[n:m]))
    carry = [c.astype(jnp.uint32) for c in map(jnp.less, low, a[n:m])]
    high = map(jnp.add, map(jnp.add, a[:n], b[:n]), carry)
    return (*high, *low, *map(jnp.maximum, a[m:], b[m:]))
