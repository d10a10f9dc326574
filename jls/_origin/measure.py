# SPDX-License-Identifier: Apache-2.0
"""How large an array is, in one number: the bits of its largest magnitude.

As integers, since bits of magnitudes are ordered like the magnitudes, with inf and NaN
on top. XLA's maximum of floats loses NaN on a CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.jaxprs import is_inexact
from jls._program.replay import INF

_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
# 8-bit floats whose bits are ordered like their magnitudes, NaN last.
_ORDERED = ("float8_e4m3fn", "float8_e5m2")


def largest(x: Array) -> Array:
    """The bits of the largest magnitude in `x`, as float32 has them: `u32[]`.

    Above those of inf if there is a NaN. Float64 beyond float32 counts as its largest.
    """
    if not x.size:
        return jnp.uint32(0)
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    sizes = [_largest(part) for part in parts]
    return sizes[0] if len(sizes) == 1 else jnp.maximum(*sizes)


def _largest(x: Array) -> Array:
    info = jnp.finfo(x.dtype)
    if info.bits == 64:
        return _largest_double(x)
    if info.bits < 16 and x.dtype.name not in _ORDERED:
        x = x.astype(jnp.float32)
        info = jnp.finfo(jnp.float32)
    # In the array's own width: XLA drops a cast and back, and an overflow with it.
    word = _WORDS[info.bits]
    bits = lax.bitcast_convert_type(x, word) & word((1 << (info.bits - 1)) - 1)
    most, _ = _ends(bits, bits)
    most = lax.bitcast_convert_type(most, x.dtype).astype(jnp.float32)
    return lax.bitcast_convert_type(most, jnp.uint32)


def _ends(high: Array, low: Array) -> Sequence[Array]:
    """The largest of one array of integers and the smallest of the other.

    Together: what is reduced alone, XLA CPU writes to memory first.
    """
    limits = jnp.iinfo(high.dtype)
    start = np.array(limits.min, high.dtype), np.array(limits.max, low.dtype)

    def both(a, b):
        return lax.max(a[0], b[0]), lax.min(a[1], b[1])

    return lax.reduce((high, low), start, both, tuple(range(high.ndim)))


def _largest_double(x: Array) -> Array:
    size = jnp.abs(x)
    most = jnp.max(jnp.where(jnp.isfinite(size), size, 0.0))
    most = jnp.minimum(most, float(jnp.finfo(jnp.float32).max)).astype(jnp.float32)
    bits = lax.bitcast_convert_type(most, jnp.uint32)
    bits = jnp.where(jnp.any(jnp.isinf(size)), jnp.uint32(INF), bits)
    return jnp.where(jnp.any(jnp.isnan(size)), jnp.uint32(INF + 1), bits)


class Range(NamedTuple):
    """What is in an operand of an operation that is not defined everywhere."""

    nearest: float  # the smallest magnitude
    low: float
    high: float


# A range is kept in words below the bits of inf, so that it is not taken for a size:
# without the last two bits of each number.
_DROPPED = 2
_SIGN = 0x8000_0000


def range_of(x: Array) -> list[Array]:
    """The rows of a `Range`: `u32[]` each."""
    if not x.size or jnp.iscomplexobj(x):
        return [jnp.uint32(0)] * 3
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(_SIGN)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)
    _, nearest = _ends(ordered, bits & ~sign)
    high, low = _ends(ordered, ordered)
    return [word >> _DROPPED for word in (nearest, low, high)]


def read_range(rows: np.ndarray) -> Range:
    """The numbers of the three rows."""
    nearest, low, high = (int(row) << _DROPPED for row in rows)
    return Range(as_float(nearest), _signed(low), _signed(high))


def _signed(ordered: int) -> float:
    if ordered >= _SIGN:
        return as_float(ordered - _SIGN)
    return -as_float((_SIGN - 1 - ordered) & ~((1 << _DROPPED) - 1))


def as_float(bits: int) -> float:
    """The magnitude that bits stand for."""
    return np.uint32(bits).view(np.float32).item()


def bits_of(value: Any) -> int:
    """The same as `largest`, of a constant and on the host."""
    if not (isinstance(value, float | complex) or is_inexact(value)):
        return 0
    array = np.asarray(value)
    if not array.size:
        return 0
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    parts = array.astype(wide)
    sizes = np.maximum(np.abs(parts.real), np.abs(parts.imag))
    if np.isnan(sizes).any():
        return INF + 1
    if np.isinf(sizes).any():
        return INF
    most = min(float(sizes.max()), float(np.finfo(np.float32).max))
    return int(np.float32(most).view(np.uint32))
