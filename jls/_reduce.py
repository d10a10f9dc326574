# SPDX-License-Identifier: Apache-2.0
"""One pass over leaves, one collective over devices: finite, max_abs, norms, counts.

The functions that take `floats` work on a list of floating-point leaves. They widen one
at a time, where they reduce it: eagerly, a wide copy of all of them would cost memory.

Without their sign, the bits of floating-point numbers are integers in the order of the
magnitudes, with inf above all finite numbers and NaN above inf. A maximum of integers
cannot lose a NaN, as one of floats does on XLA CPU (jax 0.10 and 0.12).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from jls._tree import floats_of, widen

AxisName = str | tuple[str, ...] | None


# Devices.


def check_axis_name(axis_name: Any) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says what it should have been."""
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name must be a str, a tuple of str or None, got {axis_name!r}."
        )
    return names


def bound_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says which is not bound."""
    names = check_axis_name(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"axis_name {name!r} is not bound here. Call under jax.shard_map, "
                "jax.pmap or jax.vmap with that axis; under plain jit leave it out."
            ) from None
    return names


def varying_axes(array: Array) -> frozenset[str]:
    """The axes of `shard_map` over which `array` differs, where JAX keeps track."""
    kind: Any = jax.typeof(array)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # since jax 0.12


def agree(flags: Array, axis_name: AxisName) -> Array:
    """`flags` and-ed over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    if not names:
        return flags
    return lax.pmin(flags.astype(jnp.int32), names).astype(jnp.bool_)


def agree_on_max(magnitudes: Array, axis_name: AxisName) -> Array:
    """The maximum of each over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    return lax.pmax(magnitudes, names) if names else magnitudes


# Finiteness and magnitude.


def all_finite(tree: Any, axis_name: AxisName = None) -> Array:
    """Returns whether every element of `tree` is finite: neither inf nor NaN.

    Looks at each element, never at a sum, which could overflow by itself. Leaves that
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
    return agree(jnp.all(finite_leaves(floats_of(tree))), axis_name)


def max_abs(tree: Any, axis_name: AxisName = None) -> Array:
    """Returns the largest magnitude in `tree`, or inf if a value is inf or NaN.

    What `jls.cautious` and `jls.recent_max` need to know about the true gradients. It
    takes one pass over the data, and is finite if and only if `jls.all_finite(tree)`.

    Args:
      tree: any pytree. Leaves that are not floating point do not count. A complex value
        counts by the larger of its two parts.
      axis_name: see `jls.all_finite`.

    Returns:
      `f32[]`, the same on every device of `axis_name`; 0 for an empty tree. A finite
      float64 beyond the range of float32 counts as the largest float32.

    Raises:
      TypeError, NameError: see `jls.all_finite`.

    Example:
      >>> jls.max_abs({"w": jnp.array([0.5, -3.0]), "n": 7})
      Array(3., dtype=float32)
      >>> jls.max_abs([jnp.array([1.0, jnp.nan])])
      Array(inf, dtype=float32)
    """
    magnitudes = leaf_magnitudes(floats_of(tree))
    return jnp.max(agree_on_max(magnitudes, axis_name), initial=0.0)


def finite_leaves(floats: Sequence[Any]) -> Array:
    """For each leaf, `bool[n]`, whether all of its elements are finite."""
    if _reduces_two_at_once():
        return leaf_magnitudes(floats) < jnp.inf
    # XLA has no `is-finite` for 8-bit floats.
    flags = [jnp.all(jnp.isfinite(widen(leaf))) for leaf in floats]
    return jnp.stack(flags) if flags else jnp.ones(0, jnp.bool_)


def leaf_magnitudes(floats: Sequence[Any]) -> Array:
    """For each leaf, `f32[n]`, its largest magnitude; inf where it is not finite."""
    if not floats:
        return jnp.zeros(0)
    # Stacked first, so that what follows is not a kernel for each leaf.
    bits, is_over = map(jnp.stack, zip(*map(_max_bits, floats), strict=True))
    return jnp.where(is_over, jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def any_nan(floats: Sequence[Any]) -> Array:
    """Whether a leaf holds a NaN."""
    flags = [jnp.any(jnp.isnan(widen(leaf))) for leaf in floats]
    return jnp.any(jnp.stack(flags)) if flags else jnp.asarray(False)


@functools.partial(jax.jit, inline=True)
def _max_bits(leaf: Any) -> tuple[Array, Array]:
    """The bits of the largest magnitude, an `f32`; whether there is an inf or NaN."""
    array = widen(leaf)
    if jnp.iscomplexobj(array):
        real, imag = _max_bits(array.real), _max_bits(array.imag)
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
    """Whether reducing two arrays together is faster than reducing one.

    XLA CPU reduces one large array in two or three passes, and a pair of arrays in a
    single pass: 2.3 ms for 21 million numbers, where their maximum alone takes 33, and
    `jnp.isfinite` with `jnp.all` 10. But it would gather arrays that `jit` has spread
    over several devices.
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


# Norms. The square of a float32 over 1.8e19 is inf: so is `optax.global_norm` then, and
# clipping divides by it. That of one below 1e-23 is 0. Here the values are divided by a
# power of two near the largest of them, which changes no digit.


def global_norm(floats: Sequence[Any]) -> Array:
    """The L2 norm over all leaves, `f32[]`; inf or NaN if a leaf is not finite."""
    floats = list(map(widen, floats))
    if _reduces_two_at_once():
        # The check for finiteness has found the largest: XLA does that only once.
        largest = jnp.max(leaf_magnitudes(floats), initial=0.0)
        power = _power_of_two_below(largest)
        return _norm(floats, lax.reciprocal(power)) * power
    norm = _norm(floats, jnp.float32(1.0))
    # 2**64 squares of the largest number times this have a finite sum.
    tiny = jnp.float32(2.0**-96)
    return jnp.where(jnp.isfinite(norm), norm, _norm(floats, tiny) / tiny)


def _power_of_two_below(magnitude: Array) -> Array:
    """One whose reciprocal is normal; for 0, and beyond the ends, the nearest."""
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    exponent = lax.bitcast_convert_type(bits & jnp.int32(0x7F800000), jnp.float32)
    return jnp.clip(exponent, 2.0**-126, 2.0**126)


def _norm(floats: Sequence[Array], factor: Array) -> Array:
    """The norm of the products with `factor`."""
    total = jnp.zeros((), jnp.float32)
    for leaf in floats:
        for part in (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,):
            squares = jnp.square(part * factor.astype(part.dtype))
            total += jnp.sum(squares).astype(jnp.float32)
    return jnp.sqrt(total)


# Counts.

Arrays = tuple[Array, ...]


def count_true(
    masks: Sequence[Array], keys: Sequence[Array] = (), wraps_at: int = 2**32
) -> tuple[Array, list[Array]]:
    """How often each of `masks` is true, and the largest of each of `keys`, or 0.

    In one reduction, since several would each cost a pass over the data.

    Args:
      masks: `bool[...]`, all of one shape.
      keys: numbers >= 0 of that shape.
      wraps_at: from how many elements on the counts are carried into a second digit.
        That costs ten times as much, since XLA does not vectorize it. A symbolic number
        of `jax.export` may be as large.

    Returns:
      `u32[n, 2]`, the counts in base 2**32, high digit first; and the maxima.
    """
    shape = [*masks, *keys][0].shape
    lows = tuple(mask.astype(jnp.uint32) for mask in masks)
    size = math.prod(shape)
    has_highs = is_symbolic_dim(size) or size >= wraps_at
    highs = tuple(map(jnp.zeros_like, lows)) if has_highs else ()
    n, m = len(highs), len(highs) + len(lows)
    operands = (*highs, *lows, *keys)
    zeros = tuple(jnp.zeros((), operand.dtype) for operand in operands)
    combine = functools.partial(_add_digits, n, m)
    totals = lax.reduce(operands, zeros, combine, range(len(shape)))
    low = jnp.stack(totals[n:m]) if masks else jnp.zeros((0,), jnp.uint32)
    high = jnp.stack(totals[:n]) if highs else jnp.zeros_like(low)
    return jnp.stack([high, low], axis=-1), list(totals[m:])


def _add_digits(n: int, m: int, a: Arrays, b: Arrays) -> Arrays:
    """The digits of `a` and `b` added and their keys compared: high, low, keys."""
    low = list(map(jnp.add, a[n:m], b[n:m]))
    carry = [c.astype(jnp.uint32) for c in map(jnp.less, low, a[n:m])]
    high = map(jnp.add, map(jnp.add, a[:n], b[:n]), carry)
    return (*high, *low, *map(jnp.maximum, a[m:], b[m:]))
