# SPDX-License-Identifier: Apache-2.0
"""The rounding of a float32 times a loss scale to a narrower dtype, in integers.

The bit pattern of a magnitude grows with the magnitude, and XLA flushes subnormal
numbers to zero, on a CPU in comparisons too.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jls._tree import widen

INF = 0x7F80_0000  # the pattern of inf in float32; those of NaN are larger
SIGNIFICAND = 0x7F_FFFF
HIDDEN_BIT = 0x80_0000


class Boundary(NamedTuple):
    """A magnitude at which the outcome of rounding changes."""

    value: float
    ties_below: bool  # whether `value` itself rounds like what is smaller


class Boundaries(NamedTuple):
    """The three boundaries of a dtype, rounding to nearest, ties to even."""

    nonzero: Boundary  # below it a magnitude becomes zero
    normal: Boundary  # below it, subnormal
    overflow: Boundary  # above it, inf, or NaN where there is no inf


def rounding_boundaries(dtype: DTypeLike) -> Boundaries:
    """The boundaries of `dtype`, or an error that says what it should have been."""
    rule = (
        "dtype must be a floating-point dtype of 8 to 32 bits with a sign, such as "
        "jnp.float16, jnp.bfloat16 or jnp.float8_e5m2,"
    )
    if isinstance(dtype, Array | np.ndarray):
        raise TypeError(f"{rule} got an array of {dtype.dtype}: pass its dtype.")
    try:
        given = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{rule} got {dtype!r}.") from None
    if dtype is None or not jnp.issubdtype(given, jnp.floating):
        raise TypeError(f"{rule} got {dtype if dtype is None else given}.")
    info = jnp.finfo(given)
    if not 8 <= info.bits <= 32 or info.nmant == 0:
        raise ValueError(f"{rule} got {given}.")
    tiniest, largest = float(info.smallest_subnormal), float(info.max)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - 1 - info.nmant)
    return Boundaries(
        nonzero=Boundary(tiniest / 2, ties_below=True),
        normal=Boundary(float(info.smallest_normal) - tiniest / 2, ties_below=False),
        # The last bit of the largest number is even where NaN took its neighbour.
        overflow=Boundary(largest + unit / 2, ties_below=(largest / unit) % 2 == 0),
    )


def magnitudes(leaf: Any) -> list[Array]:
    """The magnitudes in `leaf` as `u32[...]` patterns; of a complex leaf, both parts.

    Float64 is rounded to float32. What is beyond its range counts as the largest finite
    number, what is below its normal numbers as the smallest one.
    """
    array = widen(leaf)
    is_complex = jnp.iscomplexobj(array)
    parts = [array.real, array.imag] if is_complex else [jnp.asarray(array)]
    return [_pattern(part) for part in parts]


def _pattern(part: Array) -> Array:
    if part.dtype == jnp.float32:
        return lax.bitcast_convert_type(part, jnp.uint32) & jnp.uint32(
            SIGNIFICAND | INF
        )
    size, info = jnp.abs(part), np.finfo(np.float32)
    bounded = jnp.clip(size, float(info.smallest_normal), float(info.max))
    pattern = lax.bitcast_convert_type(bounded.astype(jnp.float32), jnp.uint32)
    pattern = jnp.where(size < float(info.smallest_normal), jnp.uint32(1), pattern)
    pattern = jnp.where(size == 0, jnp.uint32(0), pattern)
    return jnp.where(jnp.isfinite(size), pattern, jnp.uint32(INF))


def is_finite(pattern: Array) -> Array:
    return pattern < jnp.uint32(INF)


def scaled_boundary(boundary: Boundary, loss_scale: Array) -> Array:
    """The smallest magnitudes that are past `boundary` once multiplied by `loss_scale`.

    Exact for every scale that is a normal number: a long division of integers.

    Args:
      boundary: one of `rounding_boundaries(dtype)`.
      loss_scale: `f32[...]`.

    Returns:
      `u32[...]`, patterns; the pattern of inf where no finite magnitude is past it.
    """
    scale = lax.bitcast_convert_type(loss_scale, jnp.uint32)
    divisor, scale_exponent = normalized(scale)
    fraction, exponent = math.frexp(boundary.value)
    dividend = jnp.uint32(int(math.ldexp(fraction, 25)))
    quotient, remainder = dividend // divisor, dividend % divisor
    for _ in range(3):  # eight bits at a time, since a remainder has 24
        remainder = remainder << 8
        quotient, remainder = (
            (quotient << 8) | (remainder // divisor),
            remainder % divisor,
        )
    # Now boundary / scale is quotient * 2**(exponent - scale_exponent - 26), plus a
    # fraction.
    has_26_bits = (quotient >> 25).astype(jnp.int32)
    biased = exponent - scale_exponent - 2 + has_26_bits + 127
    is_subnormal = biased < 1
    shift = 1 + has_26_bits + jnp.where(is_subnormal, 1 - biased, 0)
    shift = jnp.minimum(shift, 31).astype(jnp.uint32)
    kept = quotient >> shift
    is_above = ((kept << shift) != quotient) | (remainder != 0) | boundary.ties_below
    base = jnp.where(is_subnormal, 0, biased - 1).astype(jnp.uint32) << 23
    return jnp.minimum(base + kept + is_above.astype(jnp.uint32), jnp.uint32(INF))


def normalized(pattern: Array) -> tuple[Array, Array]:
    """The significand in [2**23, 2**24), `u32`, and the exponent of its first bit."""
    zeros = lax.clz(jnp.minimum(pattern, jnp.uint32(HIDDEN_BIT)))
    shift = jnp.where(zeros < 32, zeros, jnp.uint32(8)) - jnp.uint32(8)
    significand = (pattern & jnp.uint32(SIGNIFICAND)) << shift
    exponent = (pattern >> 23).astype(jnp.int32)
    return (
        jnp.where(exponent == 0, significand, significand | jnp.uint32(HIDDEN_BIT)),
        jnp.maximum(exponent, 1) - 127 - shift.astype(jnp.int32),
    )
