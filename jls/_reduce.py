# SPDX-License-Identifier: Apache-2.0
"""One pass over the leaves of a tree: finite, norms, counts.

The functions that take `floats` work on a list of floating-point leaves. They widen one
at a time, where they reduce it: eagerly, a wide copy of all of them would cost memory.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from jls._devices import AxisName, agree
from jls._program.writer import of_each
from jls._scopes import CHECKED
from jls._text import describe
from jls._tree import floats_of, widen, widen_as_stored

# Finiteness.


def all_finite(tree: Any, axis_name: AxisName = None) -> Array:
    """Returns whether every element of `tree` is finite: neither inf nor NaN.

    Exact: finite elements never count as an overflow, however large or many. Leaves
    that are not floating point (None, int, bool, PRNG keys, float0, functions) count as
    finite, and so does an empty tree.

    Args:
      tree: any pytree.
      axis_name: the axis or axes of `shard_map`, `pmap` or `vmap` whose devices have to
        agree. Plain `jit` needs no axis: sharded arrays are global there.

    Returns:
      `bool[]`, the same on every device of `axis_name`.

    Raises:
      TypeError: if `tree` holds only text, or if `axis_name` is neither a string nor a
        tuple of strings.
      NameError: if an axis of `axis_name` is not bound where this is called.

    Example:
      >>> jls.all_finite({"w": jnp.array([3e38, 3e38]), "n": 7, "b": None})
      Array(True, dtype=bool)
      >>> jls.all_finite([jnp.ones(3), jnp.array([1.0, jnp.nan])])
      Array(False, dtype=bool)
    """
    leaves = jax.tree.leaves(tree)
    if leaves and all(isinstance(x, str) for x in leaves):
        raise TypeError(
            f"tree must hold numbers, got {describe(tree)} with text alone. Pass the "
            "arrays."
        )
    with jax.named_scope(CHECKED):
        are_finite = finite_leaves(floats_of(tree))
    return agree(jnp.all(are_finite), axis_name)


def finite_leaves(floats: Sequence[Any], roles: Sequence[str] = ()) -> Array:
    """For each leaf, `bool[n]`, whether all of its elements are finite.

    Args:
      floats: the leaves.
      roles: a name for each, the same for leaves that lie on devices in the same way.
        Without it large leaves are not reduced together.
    """
    if not floats:
        return jnp.ones(0, jnp.bool_)
    if not any(map(jnp.ndim, floats)):  # such as a loss: nothing to reduce
        return jnp.stack([jnp.isfinite(widen_as_stored(leaf)) for leaf in floats])
    return _by_platform(list(floats), "finite", tuple(roles))


def any_nan(floats: Sequence[Any]) -> Array:
    """Whether a leaf holds a NaN."""
    flags = [jnp.any(jnp.isnan(widen(leaf))) for leaf in floats]
    return jnp.any(jnp.stack(flags)) if flags else jnp.asarray(False)


def global_norm(
    floats: Sequence[Any], roles: Sequence[str] = (), as_clip: bool = False
) -> Array:
    """The L2 norm over all leaves, `f32[]`; inf or NaN if a leaf is not finite.

    Its squares do not overflow; the norm does, over 3.4e38. On GPU and TPU the squares
    of magnitudes below 1e-23 are 0. For `roles` see `finite_leaves`. `as_clip` computes
    it as clipping does: inf if a square overflows.
    """
    name = "norm_of_squares" if as_clip else "norm"
    return _by_platform(list(floats), name, tuple(roles)) if floats else jnp.float32(0)


# Which reduction is best differs by platform, and the program decides, not the host.
#
# XLA CPU writes an array to memory before it reduces it, unless two are reduced
# together. XLA TPU fuses a sum, and no other reduction, with the norm of clipping and
# what else reads the gradients. On GPU any will do, in as few kernels as possible.


class Reductions(NamedTuple):
    """How a platform reduces a list of leaves; see `_CPU`, `_GPU` and `_TPU`."""

    finite: Callable[[list[Array]], Array]  # bool[n]
    norm: Callable[[list[Array]], Array]  # f32[]
    norm_of_squares: Callable[[list[Array]], Array]  # f32[]


@functools.partial(jax.jit, static_argnames=("name", "roles"))
def _by_platform(floats: list[Array], name: str, roles: tuple[str, ...]) -> Array:
    """The reduction of that name on the platform that the program is compiled for."""
    if name == "finite":
        floats = lax.stop_gradient(floats)
    return lax.platform_dependent(
        floats,
        cpu=getattr(_CPU, name),
        tpu=getattr(_TPU, name),
        default=getattr(_on_gpu(roles), name),
    )


# Functions that reduce a leaf, or a stack of leaves, return an array of a number for
# each. They are traced for every shape, so they are written in `lax`: `jax.numpy` takes
# three times as long. What they return is concatenated, so that what follows runs once.


def _max_and_nan_of_each(floats: list[Array]) -> list[Array]:
    results = zip(*of_each(_max_and_nan, floats), strict=True)
    return [lax.concatenate(result, 0) for result in results]


# A number for each leaf: f32[n].
Sums = Callable[[list[Array]], Array]


def _tiny_sums(floats: list[Array]) -> Array:
    return lax.concatenate([x for (x,) in of_each(_tiny_sum_of_squares, floats)], 0)


# On GPU leaves of one type are reduced together, since a kernel for each costs more to
# launch than to run: those of one role, as in the layers of a model, and small ones, up
# to 2**16 elements. (Large ones of different roles may be sharded in different ways:
# XLA would move them.) More than 32 together take XLA longer to compile, and launch
# hardly fewer kernels.
_SMALL, _TOGETHER = 2**16, 32


def _sums_together(
    roles: Sequence[str], sum_of: Callable[..., Array], floats: list[Array]
) -> Array:
    """The sum of each leaf, with fewer kernels where there are many leaves."""
    groups = _groups(floats, roles)
    stacks = [i for group in groups if len(group) > 1 for i in group]
    rows = of_each(_as_row, [floats[i] for i in stacks])
    stacked = {i: row for i, (row,) in zip(stacks, rows, strict=True)}
    results = []
    for group in groups:
        leaves = [stacked.get(i, floats[i]) for i in group]
        stack = lax.concatenate(leaves, 0) if len(group) > 1 else leaves[0]
        results.append(sum_of(stack, is_stack=len(group) > 1))
    sums = lax.concatenate(results, 0)
    order = np.argsort([i for group in groups for i in group])
    return sums if np.all(np.diff(order) == 1) else sums[order]


def _as_row(leaf: Array) -> Array:
    return lax.expand_dims(leaf, (0,))


def _groups(floats: list[Array], roles: Sequence[str]) -> list[list[int]]:
    """The places of leaves that are reduced together: of one type, and of one role.

    Small ones that share their role with no other are together all the same.
    """
    kinds = list(zip(map(jax.typeof, floats), roles or range(len(floats)), strict=True))
    counts = Counter(kinds)
    groups: dict[Any, list[list[int]]] = {}
    for i, (leaf, kind) in enumerate(zip(floats, kinds, strict=True)):
        if counts[kind] == 1:
            is_small = not is_symbolic_dim(leaf.size) and leaf.size <= _SMALL
            kind = kind[0] if is_small else i
        of_kind = groups.setdefault(kind, [[]])
        if len(of_kind[-1]) == _TOGETHER:
            of_kind.append([])
        of_kind[-1].append(i)
    return [group for of_kind in groups.values() for group in of_kind]


def float32_parts(leaf: Any) -> list[Array]:
    """The real parts of `leaf` as float32; what is beyond its range is the largest."""
    array = widen_as_stored(leaf)
    if array.dtype == jnp.float32:
        return [array]
    parts = [array.real, array.imag] if jnp.iscomplexobj(array) else [array]
    if parts[0].dtype == jnp.float32:
        return parts
    most = float(np.finfo(np.float32).max)

    def narrow(part):
        return jnp.where(jnp.isfinite(part), jnp.clip(part, -most, most), part)

    return [narrow(part).astype(jnp.float32) for part in parts]


def _axes(array: Array, is_stack: bool) -> tuple[int, ...]:
    return tuple(range(1 if is_stack else 0, array.ndim))


def _per_leaf(number: Array, is_stack: bool) -> Array:
    """The numbers of a stack of leaves, or the number of one leaf as an array."""
    return number if is_stack else lax.broadcast(number, (1,))


def _larger_and_either(a: Sequence[Any], b: Sequence[Any]) -> tuple[Array, Array]:
    return lax.max(a[0], b[0]), lax.bitwise_or(a[1], b[1])


@jax.jit
def _max_and_nan(leaf: Array) -> tuple[Array, Array]:
    """A flag for NaN too: XLA CPU drops it from a maximum (jax 0.10 and 0.12)."""
    pairs = [(lax.abs(part), lax.ne(part, part)) for part in float32_parts(leaf)]
    start, axes = (np.float32(0.0), np.bool_(False)), _axes(leaf, False)
    found = [lax.reduce(pair, start, _larger_and_either, axes) for pair in pairs]
    most, has_nan = functools.reduce(_larger_and_either, found)
    return _per_leaf(most, False), _per_leaf(has_nan, False)


# The sum of 2**64 squares of the largest float32 times this is finite.
_TINY = np.float32(2.0**-96)


@functools.partial(jax.jit, static_argnames="is_stack")
def _tiny_sum_of_squares(leaf: Array, is_stack: bool = False) -> Array:
    """Finite if and only if all elements are.

    Elements below 2**36 count as 2**36, so that no square is subnormal. The sum becomes
    a norm only where squares have overflowed: beside such elements that is negligible.

    XLA turns `(x * 2**40) * 2**-96` into `x * 2**-56`, which could be finite where
    `x * 2**40` is not, and the square of a product into a product of squares, which
    could overflow. `lax.abs` and the select keep them apart.
    """
    least = np.float32(2.0**-60)

    def total(part):
        size = lax.mul(lax.abs(part), _TINY)
        size = lax.select_n(lax.lt(size, least), size, lax.full_like(size, least))
        return lax.reduce_sum(lax.square(size), _axes(size, is_stack))

    totals = functools.reduce(lax.add, map(total, float32_parts(leaf)))
    return _per_leaf(totals, is_stack)


# Norms. The square of a float32 over 1.8e19 is inf: so is `optax.global_norm` then, and
# clipping divides by it. That of one below 1e-23 is 0, or below 1e-19 where XLA flushes
# subnormals.


def _norm_of_scaled(floats: list[Array]) -> Array:
    """One sum, after division by a power of two near the largest magnitude.

    Scaling by a power of two is exact. The check for finiteness has found the largest
    magnitude; XLA merges the two reductions if both use all of their results.
    """
    largest, has_nan = _max_and_nan_of_each(lax.stop_gradient(floats))
    largest = jnp.max(jnp.where(has_nan, jnp.inf, largest))
    power = power_of_two_below(largest)
    parts = [part for leaf in floats for part in float32_parts(leaf)]
    # An inf or NaN stays. Without the select XLA CPU would write the
    # reciprocal to memory for each element.
    is_known, inverse = largest < jnp.inf, lax.reciprocal(power)
    scaled = [lax.select(is_known, x * inverse, x) for x in parts]
    return _norm_of_squares(scaled) * power


def _norm_or_norm_of_tiny(
    tiny: Sums, norm_of: Callable[[list[Array]], Array], floats: list[Array]
) -> Array:
    """Two sums, which XLA merges with those of clipping and of the check."""
    norm, totals = norm_of(floats), tiny(floats)
    is_done = norm < jnp.inf
    # The select keeps XLA from turning the sum of a concatenation into additions.
    of_tiny = jnp.sqrt(jnp.sum(jnp.where(is_done, 1.0, totals))) / _TINY
    return jnp.where(is_done, norm, of_tiny)


def power_of_two_below(magnitude: Array) -> Array:
    """The largest power of two up to `magnitude`, within [2**-126, 2**126].

    There neither the power nor its reciprocal is subnormal.
    """
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    exponent = lax.bitcast_convert_type(bits & jnp.int32(0x7F800000), jnp.float32)
    return jnp.clip(exponent, 2.0**-126, 2.0**126)


def _norm_of_squares(floats: Sequence[Array]) -> Array:
    return jnp.sqrt(sum(x for leaf in floats for x in _sums_of_parts(leaf, False)))


def _norm_of_squares_together(roles: Sequence[str], floats: list[Array]) -> Array:
    return jnp.sqrt(jnp.sum(_sums_together(roles, _sum_of_squares, floats)))


@functools.partial(jax.jit, static_argnames="is_stack")
def _sum_of_squares(leaf: Array, is_stack: bool) -> Array:
    sums = _sums_of_parts(leaf, is_stack)
    return _per_leaf(functools.reduce(lax.add, sums), is_stack)


def _sums_of_parts(leaf: Array, is_stack: bool) -> list[Array]:
    parts = float32_parts(leaf)
    return [lax.reduce_sum(lax.square(part), _axes(part, is_stack)) for part in parts]


# By platform.


def _finite_by_max(floats: list[Array]) -> Array:
    largest, has_nan = _max_and_nan_of_each(floats)
    return (largest < jnp.inf) & ~has_nan


def _by_sums(tiny: Sums, norm_of: Callable[[list[Array]], Array]) -> Reductions:
    return Reductions(
        lambda floats: jnp.isfinite(tiny(floats)),
        functools.partial(_norm_or_norm_of_tiny, tiny, norm_of),
        norm_of,
    )


def _on_gpu(roles: Sequence[str]) -> Reductions:
    """With the leaves of each of `roles` together."""
    return _by_sums(
        functools.partial(_sums_together, roles, _tiny_sum_of_squares),
        functools.partial(_norm_of_squares_together, roles),
    )


_CPU = Reductions(_finite_by_max, _norm_of_scaled, _norm_of_squares)
_TPU = _by_sums(_tiny_sums, _norm_of_squares)


# Counts.

Arrays = tuple[Array, ...]


def count_true(masks: Sequence[Array], wraps_at: int = 2**32) -> Array:
    """How often each of `masks` is true.

    In one reduction, since several would each cost a pass over the data.

    Args:
      masks: `bool[...]`, all of one shape.
      wraps_at: from how many elements on the counts are carried into a second digit.
        That costs ten times as much, since XLA does not vectorize it.

    Returns:
      `u32[n, 2]`, the counts in base 2**32, high digit first.
    """
    lows = tuple(mask.astype(jnp.uint32) for mask in masks)
    has_highs = lows[0].size >= wraps_at
    digits = (*map(jnp.zeros_like, lows), *lows) if has_highs else lows
    zeros = (np.uint32(0),) * len(digits)
    add = _add_digits if has_highs else lambda a, b: tuple(map(jnp.add, a, b))
    totals = lax.reduce(digits, zeros, add, range(lows[0].ndim))
    low = jnp.stack(totals[-len(lows) :])
    high = jnp.stack(totals[: len(lows)]) if has_highs else jnp.zeros_like(low)
    return jnp.stack([high, low], axis=-1)


def _add_digits(a: Arrays, b: Arrays) -> Arrays:
    """Numbers of two digits added: all high digits, then all low ones."""
    n = len(a) // 2
    low = list(map(jnp.add, a[n:], b[n:]))
    carry = [c.astype(jnp.uint32) for c in map(jnp.less, low, a[n:])]
    high = map(jnp.add, map(jnp.add, a[:n], b[:n]), carry)
    return (*high, *low)
