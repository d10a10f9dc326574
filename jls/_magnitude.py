# SPDX-License-Identifier: Apache-2.0
"""How large the values of a tree are; tells as well whether all are finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._tree import AxisName, bound_names, is_inexact, widen


def max_abs(tree: Any, axis_name: AxisName = None) -> Array:
    """Returns the largest magnitude in `tree`, or inf if a value is inf or NaN.

    What the policies that see magnitudes, `jls.cautious` and `jls.log_max`, want to
    know of the true gradients. One pass over the data; its result is finite if and only
    if `jls.all_finite(tree)`.

    Args:
      tree: any pytree. Leaves that are not floating point do not count. Of a complex
        value, the larger of its two parts counts.
      axis_name: see `jls.all_finite`.

    Returns:
      `f32[]`, the same on every device of `axis_name`. Of an empty tree 0. A finite
      float64 beyond the range of float32 counts as the largest float32.

    Raises:
      TypeError, NameError: see `jls.all_finite`.

    Example:
      >>> jls.max_abs({"w": jnp.array([0.5, -3.0]), "n": 7})
      Array(3., dtype=float32)
      >>> jls.max_abs([jnp.array([1.0, jnp.nan])])
      Array(inf, dtype=float32)
    """
    return jnp.max(agree_on_largest(leaf_magnitudes(tree), axis_name), initial=0.0)


def leaf_magnitudes(tree: Any) -> Array:
    """Of each floating-point leaf, `f32[n]`, the largest magnitude; inf for NaN too."""
    return jnp.stack(
        [
            jnp.zeros((), jnp.float32),
            *map(_magnitude, filter(is_inexact, jax.tree.leaves(tree))),
        ]
    )[1:]


def agree_on_largest(magnitudes: Array, axis_name: AxisName) -> Array:
    """The largest of each over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    return lax.pmax(magnitudes, names) if names else magnitudes


def _magnitude(leaf: Any) -> Array:
    array = widen(leaf)
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    largest = jnp.max(jnp.stack(list(map(_largest, parts))))
    bounded = jnp.minimum(largest, float(np.finfo(np.float32).max)).astype(jnp.float32)
    return jnp.where(jnp.isfinite(largest), bounded, jnp.inf)


def _largest(part: Array) -> Array:
    # A maximum of many values loses NaN on XLA CPU (jax 0.10 and 0.12): it sees none.
    sizes = jnp.where(jnp.isfinite(part), jnp.abs(part), jnp.inf)
    return jnp.max(sizes, initial=0.0)


def as_magnitude(largest: Any) -> Array:
    """`largest` as `f32[]`, or an error that says what it should have been."""
    is_float = is_inexact(largest) and not jnp.iscomplexobj(largest)
    if not is_float:
        dtype = getattr(largest, "dtype", None)
        got = f"{type(largest).__name__} {largest!r}" if dtype is None else f"{dtype}"
        raise TypeError(
            "largest must be one floating-point number, the largest magnitude of the "
            f"gradients, got {got}. jls.max_abs(grads) makes one."
        )
    if jnp.shape(largest) != ():
        raise ValueError(
            f"largest must have shape (), got shape {jnp.shape(largest)}. "
            "Reduce it with jnp.max, or call the function under jax.vmap."
        )
    return jnp.asarray(largest, jnp.float32)
