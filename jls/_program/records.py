# SPDX-License-Identifier: Apache-2.0
"""What a run of a program has recorded of its operations.

Each has one record, made of keys of float32: integers in the order of the numbers, with
NaN at both ends.

    ends       u32[..., n, 2]: the largest and the smallest number of n arrays, with an
               axis for each scan around the operation
    others     several arrays of keys: only where there are just calls and scans around
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.control import Indices
from jls._program.frames import Frame

Tree = dict[int, Any]  # by the index of the equation: of an operation, or of a call

NEVER = np.uint32(0xFFFF_FFFF)

_SIGN, _INF = 0x8000_0000, 0x7F80_0000
ZERO_KEY = np.uint32(_SIGN)
INF_KEY = np.uint32(_SIGN | _INF)
MINUS_INF_KEY = np.uint32(_SIGN - 1 - _INF)


def key_of(x: Array) -> Array:
    """The keys of float32: `u32[...]`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(_SIGN)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def floats_from_keys(keys: Any) -> np.ndarray:
    """The numbers that keys stand for: `f32[...]`."""
    keys = np.asarray(keys, np.uint32)
    bits = np.where(keys >= _SIGN, keys - np.uint32(_SIGN), ~keys)
    return bits.astype(np.uint32).view(np.float32)


class First(NamedTuple):
    """The record of the first of some iterations of a while loop."""

    record: Any
    iterations: Any  # u32[..., 2]: the first and the last of them


class WhileRecords(NamedTuple):
    """The records of an operation in two iterations of a while loop."""

    bad: First  # those in which a number is inf or NaN; without one, the ends of all
    nan: First  # those in which a number is NaN


# How they are read, on the host.


class Records(NamedTuple):
    """The records of one run."""

    tree: Tree
    only: frozenset[Indices] | None = None  # the operations recorded; None: all

    def at(self, indices: Indices) -> Any:
        """The record in a place of the program; None if there is none."""
        found: Any = self.tree
        for index in indices:
            found = found.get(index) if isinstance(found, dict) else None
        return found

    def numbers(self, indices: Indices) -> list[np.ndarray]:
        """The numbers that were recorded of an operation: `f32[..., n, 2]`, or others.

        Of a while loop the bad ones, or the largest and the smallest; [] if there is no
        record.
        """
        found = self.at(indices)
        while isinstance(found, WhileRecords):
            found = found.bad.record
        if isinstance(found, dict):
            return []
        return list(map(floats_from_keys, jax.tree.leaves(found)))

    def ends(
        self, frame: Frame, key: Indices, iterations: tuple[int, ...]
    ) -> np.ndarray:
        """The ends in one iteration of each loop: `u32[n, 2]`.

        Args:
          frame: the program of the operation.
          key: the place in it.
          iterations: of the loops around it; of a scan, the slice.

        Returns:
          `u32[0, 2]` if the iteration was not kept.
        """
        found = self._in_iterations(frame, key, iterations)
        return found if isinstance(found, np.ndarray) else _NOTHING

    def first_bad(
        self,
        frame: Frame,
        key: Indices,
        iterations: tuple[int, ...],
        result: int,
        shared: int,
    ) -> tuple[int, ...]:
        """The first of the iterations in a row in which a result is bad as in this one.

        Of a while loop no other iteration was recorded.

        Args:
          frame: the program of the operation.
          key: the place in it.
          iterations: the last of them.
          result: which of its arrays.
          shared: the number of outer loops to leave as they are.
        """
        found = list(iterations)
        for i, loop in list(enumerate(frame.loops()))[shared:]:
            every = self._in_iterations(frame, key, tuple(found), every=i)
            if isinstance(every, WhileRecords) and loop.kind == "while":
                _, found[i] = _kept_of(every, found[i])
            elif isinstance(every, np.ndarray) and loop.kind == "scan":
                ends = every[:, result]
                found[i] = _start_of_run(ends, found[i], loop.is_reversed)
        return tuple(found)

    def _in_iterations(
        self,
        frame: Frame,
        key: Indices,
        iterations: tuple[int, ...],
        every: int | None = None,
    ) -> Any:
        """The record in an iteration, or what is recorded of all those of loop `every`.

        [] if the iteration was not kept.
        """
        found = self.at((*frame.site.indices, *key))
        loops = list(zip(frame.loops(), iterations, strict=True))
        axis = 0
        for i, (loop, iteration) in enumerate(loops):
            if loop.kind == "scan" and i == every:
                axis += 1
            elif loop.kind == "scan":
                found = jax.tree.map(lambda x, i=iteration, a=axis: x.take(i, a), found)
        for i, (loop, iteration) in enumerate(loops):
            if loop.kind == "while" and isinstance(found, WhileRecords):
                if i == every or found.bad.iterations.ndim > 1:
                    break
                found, _ = _kept_of(found, iteration)
        return found


_NOTHING = np.zeros((0, 2), np.uint32)


def _start_of_run(ends: np.ndarray, index: int, is_reversed: bool) -> int:
    """The first of the iterations in a row in which a result is bad as in this one."""
    signs = np.stack(
        [
            (ends > INF_KEY).any(1) | (ends < MINUS_INF_KEY).any(1),
            ends[:, 0] == INF_KEY,
            ends[:, 1] == MINUS_INF_KEY,
        ],
        axis=1,
    )
    if not signs[index].any():
        return index
    step = 1 if is_reversed else -1
    while 0 <= index + step < len(ends) and (signs[index + step] == signs[index]).all():
        index += step
    return index


def _kept_of(found: WhileRecords, index: int) -> tuple[Any, int]:
    """The record of an iteration of a while loop, and the first in which it was so.

    [] if it was not kept.
    """
    for record, (first, last) in (found.nan, found.bad):
        if first <= index <= last:
            return record, int(first)
    is_finite = found.bad.iterations[0] == NEVER
    return found.bad.record if is_finite else _NOTHING, index


# How those of several iterations or devices become one.


class Merging(NamedTuple):
    """How the records of an operation in several iterations or devices become one."""

    before: Callable[..., Any]  # a loop: from `full(shapes, value)`, and a record
    after: Callable[..., Any]  # an iteration: from its number, its record, what is kept
    of_devices: Callable[[Any], Any]  # from records that are stacked by device


def _before_iterations(full: Callable[..., Any], shape: Any) -> WhileRecords:
    """The records of an operation before the first iteration."""
    axes = jax.tree.leaves(shape)[0].shape[:-2]  # the lengths of the scans around
    never = jax.ShapeDtypeStruct((*axes, 2), jnp.uint32)
    nothing = First(full(shape), full(never).at[..., 0].set(NEVER))
    return WhileRecords(nothing, nothing)


def _is_bad(record: Any) -> tuple[Array, Array]:
    """Whether a number of an operation is inf or NaN, and whether one is NaN."""
    if isinstance(record, WhileRecords):
        return _is_bad(record.bad.record)[0], _is_bad(record.nan.record)[1]
    bad = (record >= INF_KEY) | (record <= MINUS_INF_KEY)
    nan = (record > INF_KEY) | (record < MINUS_INF_KEY)
    return jnp.any(bad, axis=(-2, -1)), jnp.any(nan, axis=(-2, -1))


def _after_iteration(iteration: Array, new: Any, old: WhileRecords) -> WhileRecords:
    """The records of an operation after one more iteration."""
    is_bad, is_nan = _is_bad(new)

    def kept(old: First, happened: Array) -> First:
        first, last = old.iterations[..., 0], old.iterations[..., 1]
        is_first = happened & (first == NEVER)
        first = jnp.where(is_first, iteration, first)
        last = jnp.where(happened, iteration, last)
        record = _select_records(is_first, new, old.record)
        return First(record, jnp.stack([first, last], axis=-1))

    bad = kept(old.bad, is_bad)
    is_finite = bad.iterations[..., 0] == NEVER
    ends = jax.tree.map(_wider, old.bad.record, new)
    record = _select_records(is_finite, ends, bad.record)
    return WhileRecords(First(record, bad.iterations), kept(old.nan, is_nan))


def _wider(one: Array, other: Array) -> Array:
    """The ends of both."""
    is_high = jnp.arange(2) == 0
    return jnp.where(is_high, jnp.maximum(one, other), jnp.minimum(one, other))


def _select_records(pred: Array, new: Any, old: Any) -> Any:
    def select(new, old):
        return jnp.where(jnp.expand_dims(pred, range(pred.ndim, new.ndim)), new, old)

    return jax.tree.map(select, new, old)


def _of_worst_device(record: Any) -> Any:
    """The record of the device with the worst numbers, of records stacked by device."""
    bad, nan = _is_bad(record)
    worst = jnp.argmax(bad.astype(jnp.int32) + nan.astype(jnp.int32), axis=0)[None]

    def take(x):
        index = worst.reshape(worst.shape + (1,) * (x.ndim - worst.ndim))
        return jnp.take_along_axis(x, index, axis=0)[0]

    if isinstance(record, WhileRecords):
        return jax.tree.map(take, record)
    of_all = _wider(jnp.max(record, axis=0), jnp.min(record, axis=0))
    return _select_records(jnp.any(bad, axis=0), take(record), of_all)


WORST = Merging(_before_iterations, _after_iteration, _of_worst_device)
