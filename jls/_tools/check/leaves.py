# SPDX-License-Identifier: Apache-2.0
"""Leaves of a step's arguments, and their values."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._tools.reading.arguments import Item, Keys
from jls._train_state import FP8
from jls._tree import is_array, is_extended

# Flax keeps the amax history and the scales of its fp8 layers in variables whose
# gradients are their next values. Their numbers follow the loss scale, rightly.
_FP8 = (FP8, "OverwriteWithGradient")


def is_fp8(item: Item) -> bool:
    return item.variable_type in _FP8 or any(key in _FP8 for key in item.path)


def subtrees(items: Sequence[Item]) -> dict[Keys, list[int]]:
    """The leaves below each path."""
    found = defaultdict[Keys, list[int]](list)
    for i, item in enumerate(items):
        for end in range(len(item.path) + 1):
            found[item.path[:end]].append(i)
    return found


# Values on the host.


def as_numpy(leaf: Any) -> np.ndarray:
    if is_array(leaf) and is_extended(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def as_numbers(leaf: Any) -> np.ndarray:
    """A floating-point leaf in a width in which differences are exact enough."""
    value = as_numpy(leaf)
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def same(old: Any, new: Any, exempt: Any | None = None) -> bool:
    """Equal numbers; NaN equals NaN, and a subnormal number may have become 0.

    An element at index `exempt` may differ.
    """
    a, b = as_numpy(old), as_numpy(new)
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    tiny = float(jnp.finfo(a.dtype).tiny)
    with np.errstate(invalid="ignore"):
        x, y = as_numbers(a), as_numbers(b)
        equal = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) < tiny)
    if exempt is not None:
        equal = np.array(equal)
        equal[exempt] = True
    return bool(np.all(equal))


def is_rounding(old: Any, new: Any) -> bool:
    """Whether two arrays differ by 4 units in the last place at most; narrow ones 1.

    Random vectors of 3 to 8,192 elements moved by 1.3 units when they were normalized
    once more on a CPU; 4 leave room for other chips. Narrow ones are computed in
    float32, and rounded once, when they are stored.
    """
    eps = float(jnp.finfo(as_numpy(old).dtype).eps)
    # The eps of float32 is 1.2e-7, that of float16 9.8e-4.
    most = 4 * eps if eps < 1e-5 else eps
    x, y = as_numbers(old), as_numbers(new)
    with np.errstate(invalid="ignore", over="ignore"):
        return same(old, new) or bool(np.all(np.abs(x - y) <= most * np.abs(x)))
