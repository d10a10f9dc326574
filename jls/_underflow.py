# SPDX-License-Identifier: Apache-2.0
"""What the float16 of a backward pass makes of gradients, at three loss scales."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls import _validate
from jls._locate import locate
from jls._read import checked_scale
from jls._rounding import Edges, cuts, edges, is_finite, magnitudes
from jls._tally import inexact_leaves, tally
from jls._types import exportable


@exportable
class UnderflowShares(NamedTuple):
    """Which shares of some values meet which fate; no value meets two.

    Those that are left keep their precision. Of no values, all shares are 0.

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
    """What `jls.underflow` returns. Three numbers are for the three loss scales.

    Example:
      >>> jls.underflow(1024.0, jnp.ones(2)).loss_scale
      Array([ 512., 1024., 2048.], dtype=float32)
    """

    loss_scale: Array  # f32[3]  one backoff down, the present one, one growth up
    total: UnderflowShares  # of all values of the tree
    leaves: dict[str, UnderflowShares]  # by the path of the leaf
    histogram: Array  # f32[254]  i: numbers of magnitudes from 2**(i-126) to 2**(i-125)


def underflow(
    state: Any,
    grads: Any,
    *,
    dtype: Any = jnp.float16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
) -> Underflow:
    """Returns which share of `grads` a narrow dtype loses, and at which loss scale.

    An overflow shows in the loss scale, an underflow nowhere. This rounds each value
    times the loss scale to `dtype`, as the backward pass has to, and counts: at the
    present scale, one backoff below it and one growth above. Where `vanished` is far
    smaller one growth up, the scale is too low; `jls.suggest_scale` finds a better one.

    One pass over the data and one for the histogram; pure, of fixed shapes: call it in
    the jitted step, every so many steps through `jax.lax.cond` if need be.

    Gradients that underflowed already while they were computed are zeros here: what is
    `zero` at this scale and is not with a larger one, or in float32, has been lost.

    Args:
      state: anything that carries exactly one loss scale; or a loss scale itself, a
        number or an array of shape `()`, from 2**-126 to 2**126.
      grads: true gradients, as `jls.value_and_grad` gives them. Leaves that are not
        floating point are left out; a complex value counts as two.
      dtype: in which the backward pass computes: a floating-point dtype of 8 to 32
        bits. It rounds to nearest, ties to even, and keeps subnormal numbers. On
        hardware that flushes them, `vanished` and `subnormal` together are lost.
      growth_factor: that of the policy, > 1.
      backoff_factor: that of the policy, in (0, 1).

    Returns:
      `Underflow`: the three loss scales, kept within 2**-126 and 2**126; the shares of
      each leaf and of the whole tree; and a histogram of the true magnitudes of the
      whole tree, by powers of two. It leaves out zero, inf and NaN, its first bin has
      the subnormal numbers as well, and its counts are exact up to 2**24.

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
    present = checked_scale(state) if is_number else locate(state).loss_scale
    up = _validate.raising_factor("growth_factor", growth_factor)
    down = _validate.lowering_factor("backoff_factor", backoff_factor)
    paths, leaves = inexact_leaves(grads)
    scales, total, shares, histogram = _underflow(
        jnp.asarray(present, jnp.float32),
        jnp.asarray(up, jnp.float32),
        jnp.asarray(down, jnp.float32),
        leaves,
        edges(dtype),
    )
    return Underflow(scales, total, dict(zip(paths, shares, strict=True)), histogram)


@functools.partial(jax.jit, static_argnums=4)
def _underflow(
    present: Array, up: Array, down: Array, leaves: list[Any], ends: Edges
) -> tuple[Array, UnderflowShares, list[UnderflowShares], Array]:
    scales = jnp.stack([present * down, present, present * up])
    scales = jnp.clip(scales, _validate.SMALLEST, _validate.LARGEST)
    bounds = jnp.stack([cuts(edge, scales) for edge in ends])
    counts, sizes = [jnp.zeros(11, jnp.float32)], [0]
    histogram = jnp.zeros(254, jnp.float32)
    for leaf in leaves:
        patterns = magnitudes(leaf)
        counts.append(jnp.stack([_counts(p, bounds) for p in patterns]).sum(0))
        sizes.append(sum(p.size for p in patterns))
        histogram += jnp.stack([_histogram(p) for p in patterns]).sum(0)
    shares = [_shares(*pair) for pair in zip(counts[1:], sizes[1:], strict=True)]
    return scales, _shares(jnp.stack(counts).sum(0), sum(sizes)), shares, histogram


def _counts(pattern: Array, bounds: Array) -> Array:
    """How many are zero, how many not finite, how many of each fate at each scale."""
    is_zero, finite = pattern == 0, is_finite(pattern)
    masks = [is_zero, ~finite]
    nonzero, normal, overflow = bounds
    masks += [~is_zero & (pattern < start) for start in nonzero]
    masks += [
        (pattern >= start) & (pattern < end)
        for start, end in zip(nonzero, normal, strict=True)
    ]
    masks += [finite & (pattern >= start) for start in overflow]
    digits, _ = tally(masks)
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
    groups = pattern.size // group_size + 1
    if groups > 1:
        axis = max(range(pattern.ndim), key=lambda i: pattern.shape[i])
        position = lax.broadcasted_iota(jnp.uint32, pattern.shape, axis)
        bins += position // (pattern.shape[axis] // groups + 1) * 256
    # Not indexed by group and bin: with two indices XLA takes six times as long.
    counts = jnp.zeros(groups * 256, jnp.uint32).at[bins].add(jnp.uint32(1))
    return counts.reshape(groups, 256).astype(jnp.float32).sum(0)[1:255]
