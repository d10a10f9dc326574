# SPDX-License-Identifier: Apache-2.0
"""The size of an array: its largest and its smallest number, with NaN at the ends.

Computed with keys of float32, integers in the order of the numbers, since XLA's maximum
of floats loses NaN on a CPU.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.jaxprs import is_inexact_atom
from jls._program.records import ZERO_KEY, floats_from_keys, key_of

_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}
# 8-bit floats whose bits are ordered like the numbers, NaN last.
_ORDERED = ("float8_e4m3fn", "float8_e5m2")
_LARGEST = float(np.finfo(np.float32).max)


class Size(NamedTuple):
    """The largest and the smallest number of an array; NaN if it holds one."""

    high: float = 0.0
    low: float = 0.0

    @property
    def is_nan(self) -> bool:
        return math.isnan(self.high) or math.isnan(self.low)

    @property
    def is_bad(self) -> bool:
        return not (math.isfinite(self.high) and math.isfinite(self.low))

    @property
    def nonfinite(self) -> set[str]:
        """Which of "nan", "inf" and "-inf" are in it."""
        found = {"inf"} if self.high == math.inf else set[str]()
        found |= {"-inf"} if self.low == -math.inf else set()
        return {"nan"} if self.is_nan else found

    @property
    def magnitude(self) -> float:
        """The largest magnitude."""
        return math.nan if self.is_nan else max(abs(self.high), abs(self.low))

    @property
    def finite(self) -> float:
        """The largest finite magnitude, as far as it is known."""
        ends = [abs(x) for x in self if math.isfinite(x)]
        return max(ends) if ends else self.magnitude


NOTHING = Size()


def read_size(ends: np.ndarray) -> Size:
    """The size that two keys stand for."""
    return Size(*floats_from_keys(ends).tolist())


def ends_of(arrays: Sequence[Any]) -> Array | None:
    """The ends of each array: `u32[n, 2]`; zeros for integers.

    Of a complex one, of its parts. Float64 beyond float32 counts as its largest.
    """
    keys = list[Array]()
    for x in arrays:
        own, dtype = _own_keys(x)
        is_own = dtype != np.float32
        keys += list(_in_float32(jnp.stack(own), dtype)) if is_own else own
    return jnp.stack(keys).reshape(-1, 2) if keys else None


def own_ends_of(arrays: Sequence[Any]) -> tuple[tuple[Array, ...], list[Any]]:
    """The ends of each array in its own dtype, and the dtype of each.

    To stack them, and to bring them to float32, would double the kernels of a program.
    """
    pairs = list(map(_own_keys, arrays))
    keys = tuple(key for found, _ in pairs for key in found)
    return keys, [dtype for found, dtype in pairs for _ in found]


def _own_keys(x: Any) -> tuple[list[Array], Any]:
    """The ends of an array, as keys of a dtype that may be narrower than float32.

    Returns:
      Two unsigned integers of the width of the dtype, and the dtype.
    """
    if not (is_inexact_atom(x) and x.size):
        return [jnp.uint32(ZERO_KEY)] * 2, np.dtype(np.float32)
    is_own = jnp.finfo(x.dtype).bits == 16 or x.dtype.name in _ORDERED
    return list(_own_ends(x)), x.dtype if is_own else np.dtype(np.float32)


# Compiled apart, so that JAX traces it once for all arrays of one shape and dtype.
@jax.jit
def _own_ends(x: Array) -> Sequence[Array]:
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    found = [_ends(part) for part in parts]
    if len(found) == 1:
        return found[0]
    (high, low), (other_high, other_low) = found
    return [jnp.maximum(high, other_high), jnp.minimum(low, other_low)]


def _ends(x: Array) -> Sequence[Array]:
    info = jnp.finfo(x.dtype)
    if info.bits == 64:
        return _ends_of_double(x)
    if info.bits < 16 and x.dtype.name not in _ORDERED:
        x = x.astype(jnp.float32)
        info = jnp.finfo(jnp.float32)
    # In the array's own width: XLA drops a cast and back, and an overflow with it.
    word = _WORDS[info.bits]
    sign, every = word(1 << (info.bits - 1)), word((1 << info.bits) - 1)
    bits = lax.bitcast_convert_type(x, word)
    keys = jnp.where(bits >= sign, bits ^ every, bits | sign)
    return _reduce(keys, keys)


def _in_float32(keys: Any, dtype: Any) -> Array:
    """Keys of a narrower dtype as keys of float32."""
    bits = jnp.finfo(dtype).bits
    word = _WORDS[bits]
    sign, every = word(1 << (bits - 1)), word((1 << bits) - 1)
    own = jnp.where(keys >= sign, keys ^ sign, keys ^ every)
    return key_of(lax.bitcast_convert_type(own, dtype).astype(jnp.float32))


def in_float32(keys: Sequence[Any], dtypes: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of keys of several dtypes as keys of float32, on the host."""
    found = list(map(np.asarray, keys))
    for dtype in set(dtypes) - {np.dtype(np.float32)}:
        places = [i for i, x in enumerate(dtypes) if x == dtype]
        flat = np.concatenate([np.ravel(found[i]) for i in places])
        rest = np.asarray(_in_float32(jnp.asarray(flat), dtype))
        for i in places:
            shape, size = found[i].shape, found[i].size
            found[i], rest = rest[:size].reshape(shape), rest[size:]
    return found


def _reduce(high: Array, low: Array) -> Sequence[Array]:
    """The largest of one array of integers and the smallest of the other.

    They are reduced together: XLA CPU would write each of them to memory for a
    reduction of its own.
    """
    limits = jnp.iinfo(high.dtype)
    start = np.array(limits.min, high.dtype), np.array(limits.max, low.dtype)

    def both(a, b):
        return lax.max(a[0], b[0]), lax.min(a[1], b[1])

    return lax.reduce((high, low), start, both, tuple(range(high.ndim)))


def _ends_of_double(x: Array) -> tuple[Array, Array]:
    has_nan = jnp.any(jnp.isnan(x))

    def key(end):
        inside = jnp.clip(end, -_LARGEST, _LARGEST)
        end = jnp.where(jnp.isinf(end), end, inside).astype(jnp.float32)
        return key_of(jnp.where(has_nan, jnp.float32(jnp.nan), end))

    return key(jnp.max(x)), key(jnp.min(x))


def size_of_constant(value: Any) -> Size:
    """The size of a constant, on the host."""
    if not (isinstance(value, float | complex) or is_inexact_atom(value)):
        return NOTHING
    array = np.asarray(value)
    if not array.size:
        return NOTHING
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    parts = np.stack([wide.real, wide.imag]) if np.iscomplexobj(wide) else wide
    if np.isnan(parts).any():
        return Size(math.nan, math.nan)
    return Size(float(parts.max()), float(parts.min()))
