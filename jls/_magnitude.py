# SPDX-License-Identifier: Apache-2.0
"""How large the values of a tree are, and so whether all are finite: in one pass.

As integers, the bits of floating-point numbers without their sign are in the order of
the magnitudes, with inf above all finite numbers and NaN above inf. A maximum of
integers cannot lose a NaN, as one of floats does on XLA CPU (jax 0.10 and 0.12).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._tree import AxisName, agree, bound_names, floats, is_inexact, widen


def all_finite(tree: Any, axis_name: AxisName = None) -> Array:
    """Returns whether no leaf of `tree` holds an inf or a NaN.

    Looks at each element, never at a sum that could overflow by itself. Leaves that
    are not floating point (None, int, bool, PRNG keys, float0, functions) count as
    finite, and so does an empty tree.

    Args:
      tree: any pytree.
      axis_name: the axis or axes of `shard_map`, `pmap` or `vmap` whose devices have to
        agree. Under plain `jit` nothing is needed: sharded arrays are global there.

    Returns:
      `bool[]`, the same on every device of `axis_name`.

    Raises:
      TypeError: if `axis_name` is neither a string nor a tuple of strings.
      NameError: if an axis of `axis_name` is not bound where this is called.

    Example:
      >>> jls.all_finite({"w": jnp.array([3e38, 3e38]), "n": 7, "b": None})
      Array(True, dtype=bool)
      >>> jls.all_finite([jnp.ones(3), jnp.array([1.0, jnp.nan])])
      Array(False, dtype=bool)
    """
    return agree(jnp.all(finite_leaves(tree)), axis_name)


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


def finite_leaves(tree: Any) -> Array:
    """Of each floating-point leaf, `bool[n]`, whether no element is inf or NaN."""
    if _reduces_two_at_once():
        return leaf_magnitudes(tree) < jnp.inf
    # XLA has no `is-finite` for 8-bit floats.
    flags = [jnp.all(jnp.isfinite(widen(x))) for x in floats(tree)]
    return jnp.stack(flags) if flags else jnp.ones(0, jnp.bool_)


def leaf_magnitudes(tree: Any) -> Array:
    """Of each floating-point leaf, `f32[n]`, the largest magnitude; inf for NaN too."""
    leaves = floats(tree)
    if not leaves:
        return jnp.zeros(0)
    # Put together first, so that what follows is no kernel for each leaf.
    bits, is_over = map(jnp.stack, zip(*map(_largest, leaves), strict=True))
    return jnp.where(is_over, jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def agree_on_largest(magnitudes: Array, axis_name: AxisName) -> Array:
    """The largest of each over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    return lax.pmax(magnitudes, names) if names else magnitudes


@functools.partial(jax.jit, inline=True)
def _largest(leaf: Any) -> tuple[Array, Array]:
    """The bits of the largest magnitude, an `f32`; whether there is an inf or NaN."""
    array = widen(leaf)
    if jnp.iscomplexobj(array):
        real, imag = _largest(array.real), _largest(array.imag)
        return jnp.maximum(real[0], imag[0]), real[1] | imag[1]
    integer = jnp.int32 if array.dtype == jnp.float32 else jnp.int64
    without_sign = jnp.asarray(jnp.iinfo(integer).max, integer)
    inf = lax.bitcast_convert_type(jnp.asarray(jnp.inf, array.dtype), integer)
    bits = lax.bitcast_convert_type(array, integer) & without_sign
    most, is_over = _max_and_any(bits, inf)
    if integer != jnp.int32:
        largest = lax.bitcast_convert_type(most, array.dtype)
        bounded = jnp.minimum(largest, float(np.finfo(np.float32).max)).astype(
            jnp.float32
        )
        most = lax.bitcast_convert_type(bounded, jnp.int32)
    return most, is_over


def _reduces_two_at_once() -> bool:
    """Whether the reduction of two arrays is faster than that of one.

    XLA CPU makes two or three passes of the reduction of one large array, and one pass
    of that of two: 2.3 ms for 21 million numbers, where their maximum alone takes 33,
    and `jnp.isfinite` with `jnp.all` 10. But what `jit` has spread over devices it
    would gather for that.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _max_and_any(bits: Array, inf: Array) -> tuple[Array, Array]:
    """The largest of `bits`, and whether any is `inf` or more."""
    zero = jnp.zeros((), bits.dtype)
    if not _reduces_two_at_once():
        most = jnp.max(bits, initial=zero)
        return most, most >= inf

    def join(a, b):
        return jnp.maximum(a[0], b[0]), a[1] | b[1]

    axes, false = tuple(range(bits.ndim)), jnp.asarray(False)
    return lax.reduce((bits, bits >= inf), (zero, false), join, axes)


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
