# SPDX-License-Identifier: Apache-2.0
"""A few numbers of an array, by which two arrays are compared.

    bits          a sum that is another one if a bit of the array is
    norm          the root of the sum of the squares
    projections   eight sums with random signs, the same on every machine

The distance of two arrays is that of their projections, to a third or so. Numbers over
1 count by their logarithm, so that a mask of -1e9 does not hide all else, and an inf is
only large.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jls._placement import replicated
from jls._program.records import ZERO_KEY, Merging
from jls._tree import is_extended

PROJECTIONS = 8
WIDTH = PROJECTIONS + 2
# Iterations of a while loop that are kept; the last one is kept too.
FIRST = 8
_BLOCK = 64  # a sum of so many numbers is exact to a few units of float32
_LARGE = 2**20  # elements: from there on a sketch is made on the device
_ONE = np.int32(0x3F80_0000)  # the bits of 1.0
_NAN = np.float32(130.0)  # over an inf, which is 129
_LEAST = 2.0**-149  # the distance of two arrays of which a bit differs


def has_numbers(value: Any) -> bool:
    """Whether an array, or what it is in a program, has a sketch."""
    value = getattr(value, "aval", value)
    return hasattr(value, "dtype") and not is_extended(value) and value.size > 0


def sketch_all(arrays: Sequence[Any]) -> Any:
    """The sketches of some arrays, one after the other: `u32[n]`."""
    if any(isinstance(x, Tracer) or np.size(x) > _LARGE for x in arrays):
        return jnp.concatenate(list(map(_on_device, arrays)))
    # To compile it for each shape would take longer than all else.
    with np.errstate(all="ignore"):
        return np.concatenate([_sketch(np.asarray(x), np) for x in arrays])


# Compiled apart, so that JAX traces it once for all arrays of one shape and dtype.
@jax.jit
def _on_device(x: Array) -> Array:
    return _sketch(replicated(x), jnp)


def _sketch(x: Any, xp: Any) -> Any:
    """The sketch of an array, by NumPy or by JAX: `u32[WIDTH]`."""
    if xp.iscomplexobj(x):
        x = xp.stack([x.real, x.imag])
    x = x.ravel()
    if x.dtype.itemsize < 8:
        x = x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32)
    words = x.view(np.uint32)
    bits = _mixed(words) * (random_bits(words.size, xp) | np.uint32(1))
    small = _compressed(x.astype(np.float32), xp)
    sums = _projected(small, xp)
    norm = xp.sqrt(_sum((small * small)[:, None], xp))
    floats = xp.concatenate([norm, sums]).view(np.uint32)
    return xp.concatenate([bits.sum(dtype=np.uint32).reshape(1), floats])


def _projected(x: Any, xp: Any) -> Any:
    """Sums with random signs: those of a column times those of a row: `f32[n]`."""
    rows = xp.pad(x, (0, -x.size % _BLOCK)).reshape(-1, _BLOCK)
    if xp is np:
        sums = rows @ _SIGNS
    else:
        sums = jnp.dot(rows, _SIGNS, precision=lax.Precision.HIGHEST)
    return _sum(sums * _signs(rows.shape[0], xp), xp)


def _signs(count: int, xp: Any) -> Any:
    number = xp.arange(PROJECTIONS, dtype=np.uint32)[None]
    bits = random_bits(count, xp)[:, None] >> number
    return 1 - 2 * (bits & np.uint32(1)).astype(np.float32)


def random_bits(count: int, xp: Any = jnp) -> Any:
    """The same random bits on every machine: `u32[count]`."""
    return _mixed(xp.arange(count, dtype=np.uint32))


def _mixed(x: Any) -> Any:
    """The bits of integers, mixed."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB_352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846C_A68B)
    return x ^ (x >> np.uint32(16))


def _compressed(x: Any, xp: Any) -> Any:
    """Numbers up to 1 as they are, and one more for each power of two beyond."""
    size = xp.abs(x)
    exponent = (size.view(np.int32) - _ONE).astype(np.float32) * np.float32(2.0**-23)
    large = xp.where(x < 0, -1 - exponent, 1 + exponent)
    return xp.where(size <= 1, x, xp.where(xp.isnan(x), _NAN, large))


def _sum(x: Any, xp: Any) -> Any:
    """Sums of columns, whose error does not grow with the number of rows."""
    while len(x) > _BLOCK:
        x = xp.pad(x, ((0, -len(x) % _BLOCK), (0, 0)))
        x = x.reshape(-1, _BLOCK, x.shape[1]).sum(1)
    return x.sum(0)


_SIGNS = _signs(_BLOCK, np)


def _before(full: Any, shape: Any) -> Array:
    return full(jax.ShapeDtypeStruct((FIRST + 1, *shape.shape), shape.dtype))


def _after(iteration: Array, record: Array, kept: Array) -> Array:
    at = jnp.minimum(iteration, FIRST).astype(jnp.int32)
    return lax.dynamic_update_index_in_dim(kept, record, at, 0)


def _of_devices(records: Array) -> Array:
    """The sketch of the arrays of all devices together."""
    if records.shape[-1] % WIDTH:  # the number of iterations of a loop
        return jnp.max(records, 0)
    records = records.reshape(*records.shape[:-1], -1, WIDTH)
    numbers = lax.bitcast_convert_type(records[..., 1:], jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(numbers[..., :1]), 0))
    sums = jnp.sum(numbers[..., 1:], 0)
    bits = jnp.sum(records[..., :1], 0, dtype=jnp.uint32)
    floats = lax.bitcast_convert_type(jnp.concatenate([norm, sums], -1), jnp.uint32)
    one = jnp.concatenate([bits, floats], -1)
    is_there = jnp.any(records[..., 1:2] != ZERO_KEY, 0)
    one = jnp.where(is_there, one, jnp.uint32(ZERO_KEY))
    return one.reshape(*one.shape[:-2], -1)


# Of a while loop the records of the first iterations and of the last one are stacked.
MERGING = Merging(_before, _after, _of_devices)


def apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far two values are apart, from their sketches: `f64[...]`, relative.

    0 where all bits are equal, or where one of them was not computed.

    Args:
      one: `u32[..., results, WIDTH]`, with an axis for each loop.
      other: the same of another run; it may have more or fewer iterations.
    """
    lengths = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    cut = tuple(map(slice, lengths))
    one, other = one[cut], other[cut]
    first, second = (x[..., 1:].copy().view(np.float32) for x in (one, other))
    first, second = first.astype(np.float64), second.astype(np.float64)
    absent = (one[..., 1] == ZERO_KEY) | (other[..., 1] == ZERO_KEY)
    has_bits = (one[..., :2] != other[..., :2]).any(-1) & ~absent
    distance = np.sqrt(np.mean((first - second)[..., 1:] ** 2, -1))
    size = np.maximum(first[..., 0], second[..., 0])
    error = np.divide(distance, size, np.zeros_like(size), where=size > 0)
    error = np.where(has_bits, np.maximum(error, _LEAST), 0.0)
    return np.asarray(error.max(-1, initial=0.0))
