# SPDX-License-Identifier: Apache-2.0
"""`jls.underflow`: the share of gradients that a narrow dtype loses at a loss scale."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jls import _validate
from jls._bits import (
    Boundaries,
    is_finite,
    magnitudes,
    rounding_boundaries,
    scaled_boundary,
)
from jls._reduce import count_true
from jls._state import check_scale, loss_scale
from jls._tree import named_floats
from jls._types import exportable


@exportable
class UnderflowShares(NamedTuple):
    """Shares of values by what rounding does to them; the classes are disjoint.

    All other values keep their precision. If there are no values, all shares are 0.

    Example:
      >>> jls.underflow(1024.0, jnp.array([0.0, 1e-3])).total.zero
      Array(0.5, dtype=float32)
    """

    zero: Array  # f32[]   zero in the true gradient, at any loss scale
    nonfinite: Array  # f32[]   inf or NaN in the true gradient, at any loss scale
    vanished: Array  # f32[3]  not zero, and rounded to zero
    subnormal: Array  # f32[3]  rounded to a subnormal number: some precision is lost
    overflowed: Array  # f32[3]  finite, and rounded to inf


@exportable
class Underflow(NamedTuple):
    """Result of `jls.underflow`; arrays of three are for the three loss scales.

    Example:
      >>> jls.underflow(1024.0, jnp.ones(2)).loss_scale
      Array([ 512., 1024., 2048.], dtype=float32)
    """

    loss_scale: Array  # f32[3]  one backoff down, the current one, one growth up
    total: UnderflowShares  # of all values of the tree
    leaves: dict[str, UnderflowShares]  # by the path of the leaf
    histogram: Array  # f32[254]  i: numbers of magnitudes from 2**(i-126) to 2**(i-125)


def underflow(
    state: Any,
    grads: Any,
    *,
    dtype: DTypeLike = jnp.float16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
) -> Underflow:
    """Returns which share of `grads` a narrow dtype loses, and at which loss scale.

    An overflow shows in the loss scale; an underflow shows nowhere. This rounds each
    value times the loss scale to `dtype`, as the backward pass has to, and counts: at
    the current scale, one backoff below it and one growth above. If `vanished` is far
    smaller one growth up, the scale is too low; `jls.calibrate` finds a better one.

    It takes one pass over the data and one for the histogram, and is pure, of fixed
    shapes: call it in the jitted step, through `jax.lax.cond` if only now and then.

    Gradients that underflowed while they were computed are zeros here: what is `zero`
    at this scale, but not at a larger one or in float32, has been lost.

    Args:
      state: anything that carries exactly one loss scale; or a loss scale itself, a
        number or an array of shape `()`, from 2**-126 to 2**126.
      grads: true gradients, as `jls.value_and_grad` returns them. Leaves that are not
        floating point are left out; a complex value counts as two.
      dtype: the dtype of the backward pass: floating point, of 8 to 32 bits. It rounds
        to nearest, ties to even, and keeps subnormal numbers. On hardware that flushes
        them, `vanished` and `subnormal` together are lost.
      growth_factor: the scaler's, > 1.
      backoff_factor: the scaler's, in (0, 1).

    Returns:
      A `jls.types.Underflow`: the three loss scales, kept within 2**-126 and 2**126;
      the shares of each leaf and of the whole tree; and a histogram of the true
      magnitudes of the whole tree, by powers of two. It leaves out zero, inf and NaN,
      its first bin also has the subnormal numbers, and its counts are exact up to
      2**24.

    Raises:
      TypeError: if `dtype` is not floating point, or a number is not real.
      ValueError: if `dtype` or a number is out of range, or `state` carries no loss
        scale, or several. Traced scales and arrays of factors are not checked.

    Example:
      >>> grads = {"w": jnp.array([1e-3, 1e-6, 2e-9, 0.0]), "b": jnp.array([1.0, 1e-9])}
      >>> report = jls.underflow(jls.static(16.0).init(), grads)
      >>> for name, shares in report.leaves.items():
      ...     print(name, shares.zero, shares.vanished, shares.subnormal)
      b 0.0 [0.5 0.5 0. ] [0.  0.  0.5]
      w 0.25 [0.25 0.   0.  ] [0.25 0.5  0.5 ]
      >>> int(jnp.argmax(report.histogram)) - 126  # the most frequent power of two
      -30

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      figure 3: a histogram of gradients, and the range of float16 beside it.
    """
    is_number = _validate.is_real(state) or isinstance(
        state, jax.Array | np.ndarray | np.generic
    )
    present = check_scale(state) if is_number else loss_scale(state)
    up = _validate.raising_factor("growth_factor", growth_factor)
    down = _validate.lowering_factor("backoff_factor", backoff_factor)
    paths, leaves = named_floats(grads)
    scales, total, shares, histogram = _measure(
        jnp.asarray(present, jnp.float32),
        jnp.asarray(up, jnp.float32),
        jnp.asarray(down, jnp.float32),
        leaves,
        rounding_boundaries(dtype),
    )
    return Underflow(scales, total, dict(zip(paths, shares, strict=True)), histogram)


def measure_small(
    state: Any, grads: optax.Updates, dtype: DTypeLike
) -> dict[str, Array]:
    """Whether `grads` are too small for the loss scale of `state`, in numbers.

    Returns:
      small: `f32[]`, the share of the nonzero finite values that are below the smallest
        normal number of `dtype` once scaled.
      all_zero: `bool[]`, whether there are values, and all of them are 0.
    """
    leaves = named_floats(grads)[1]
    small, all_zero = _small_share(
        leaves, loss_scale(state), rounding_boundaries(dtype)
    )
    return {"small": small, "all_zero": all_zero}


@functools.partial(jax.jit, static_argnums=4)
def _measure(
    present: Array, up: Array, down: Array, leaves: list[Any], ends: Boundaries
) -> tuple[Array, UnderflowShares, list[UnderflowShares], Array]:
    scales = jnp.stack([present * down, present, present * up])
    scales = jnp.clip(scales, _validate.SMALLEST, _validate.LARGEST)
    bounds = jnp.stack([scaled_boundary(boundary, scales) for boundary in ends])
    counts, sizes = [jnp.zeros(11, jnp.float32)], [0]
    histogram = jnp.zeros(254, jnp.float32)
    for leaf in leaves:
        patterns = magnitudes(leaf)
        counts.append(jnp.stack([_fate_counts(p, bounds) for p in patterns]).sum(0))
        sizes.append(sum(p.size for p in patterns))
        histogram += jnp.stack([_histogram(p) for p in patterns]).sum(0)
    shares = [_shares(*pair) for pair in zip(counts[1:], sizes[1:], strict=True)]
    return scales, _shares(jnp.stack(counts).sum(0), sum(sizes)), shares, histogram


def _fate_counts(pattern: Array, bounds: Array) -> Array:
    """The numbers of zeros, of non-finite values, and of each fate at each scale."""
    is_zero, finite = pattern == 0, is_finite(pattern)
    masks = [is_zero, ~finite]
    nonzero, normal, overflow = bounds
    masks += [~is_zero & (pattern < start) for start in nonzero]
    masks += [
        (pattern >= start) & (pattern < end)
        for start, end in zip(nonzero, normal, strict=True)
    ]
    masks += [finite & (pattern >= start) for start in overflow]
    digits, _ = count_true(masks)
    high, low = digits.astype(jnp.float32).T
    return high * 2.0**32 + low


def _shares(counts: Array, size: int) -> UnderflowShares:
    # Behind a barrier, so that leaves of other sizes share the compiled divisions.
    shares = counts / lax.optimization_barrier(jnp.float32(max(size, 1)))
    zero, nonfinite = shares[:2]
    return UnderflowShares(zero, nonfinite, *shares[2:].reshape(3, 3))


def _histogram(pattern: Array, group_size: int = 2**31) -> Array:
    """Counts by exponent, `f32[254]`; in groups, so that no uint32 wraps."""
    # Zero goes where inf and NaN are, which are cut off.
    zero = jnp.uint32(255)
    bins = jnp.where(pattern == 0, zero, jnp.maximum(pattern >> 23, jnp.uint32(1)))
    # A symbolic size of `jax.export` is less than 2**35.
    is_known = not is_symbolic_dim(pattern.size)
    groups = pattern.size // group_size + 1 if is_known else 16
    if groups > 1:
        lengths = [math.inf if is_symbolic_dim(n) else n for n in pattern.shape]
        axis = lengths.index(max(lengths))
        position = lax.broadcasted_iota(jnp.uint32, pattern.shape, axis)
        width = jnp.asarray(pattern.shape[axis] // groups + 1, jnp.uint32)
        bins += position // width * 256
    # Not indexed by group and bin: with two indices XLA takes six times as long. On an
    # explicit mesh the devices add up what they have counted.
    home = NamedSharding(jax.typeof(pattern).sharding.mesh, PartitionSpec())
    counts = jnp.zeros(groups * 256, jnp.uint32)
    counts = counts.at[bins].add(jnp.uint32(1), out_sharding=home)
    return counts.reshape(groups, 256).astype(jnp.float32).sum(0)[1:255]


@functools.partial(jax.jit, static_argnums=2)
def _small_share(
    leaves: list[Any], loss_scale: Array, ends: Boundaries
) -> tuple[Array, Array]:
    cut = scaled_boundary(ends.normal, loss_scale)
    few = many = others = jnp.float32(0.0)
    for leaf in leaves:
        for pattern in magnitudes(leaf):
            counts = is_finite(pattern) & (pattern > 0)
            few += jnp.sum(counts & (pattern < cut), dtype=jnp.float32)
            many += jnp.sum(counts, dtype=jnp.float32)
            others += jnp.sum(~is_finite(pattern), dtype=jnp.float32)
    size = sum(leaf.size for leaf in map(jnp.asarray, leaves))
    return few / jnp.maximum(many, 1.0), (many + others == 0) & (size > 0)
