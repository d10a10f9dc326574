# SPDX-License-Identifier: Apache-2.0
"""Finds the schedule that an optax optimizer was given as its learning rate.

optax keeps it nowhere but in the closure of an update function: `adamw(schedule)` ends
in `scale_by_learning_rate(schedule)`, whose state is a count. So this walks the
closures of an optimizer. Functions are known by their code objects, which all closures
that one `def` makes share; names of optax's own do not matter.

It answers only where there is one answer. A constant rate is not found: from inside,
`adamw(1e-3)` is an `optax.scale(-1e-3)` like any other.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax import Array
from jax.tree_util import DictKey

from jls._closures import cells, held_by

Group = tuple[str, ...]  # the keys of the dicts on the way: labels of optax.partition

# Closures that hold more than this are not an optimizer's alone.
_MOST_PARTS = 2**14
_ABSENT = object()  # the code of no function


class Scheduled(NamedTuple):
    """A learning rate that a schedule gives."""

    schedule: Callable[[Array], Any]
    step: Array  # i32[], the count that it is called with


class _Source(NamedTuple):
    """A transformation that multiplies the updates by a number of the user's."""

    group: Group
    schedule: Callable[[Array], Any] | None  # None: a constant, or not a learning rate


def find_schedules(
    optimizer: Any, opt_state: Any, others: list[Group]
) -> dict[Group, Scheduled]:
    """The schedule and the count of each group of which they are certain.

    Args:
      optimizer: anything with `update`.
      opt_state: its state before the step.
      others: groups with a learning rate from elsewhere.

    Returns:
      A dict by group. The group is () if there is one source of learning rates in all.
    """
    sources = _sources(optimizer.update)
    flat, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_count)
    counts = [(group_of(path), node.count) for path, node in flat if _is_count(node)]
    found: dict[Group, Scheduled] = {}
    for source in sources:
        rivals = [x.group for x in sources if x is not source] + others
        near = [pair for pair in counts if _overlap(pair[0], source.group)]
        if (
            source.schedule is None
            or any(_overlap(group, source.group) for group in rivals)
            or len(near) != 1
        ):
            continue
        ((group, count),) = near
        # The names of optax.named_chain are in its state alone.
        if group[: len(source.group)] == source.group and count.shape == ():
            found[source.group] = Scheduled(source.schedule, count)
    if len(sources) == len(found) == 1 and not others:
        return {(): next(iter(found.values()))}
    return found


def group_of(path: tuple[Any, ...]) -> Group:
    """The keys of the dicts on a path in a state."""
    return tuple(str(key.key) for key in path if isinstance(key, DictKey))


def _overlap(a: Group, b: Group) -> bool:
    return all(x == y for x, y in zip(a, b, strict=False))


def _is_count(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _sources(update: Any) -> list[_Source]:
    """Factors of the updates in `update`; none if it is too large to read."""
    by_schedule, by_rate, by_constant = _codes()
    found: list[_Source] = []
    left: list[tuple[Group, Any]] = [((), update)]
    visited: dict[tuple[Group, int], Any] = {}
    while left:
        group, part = left.pop()
        if (group, id(part)) in visited:
            continue
        visited[group, id(part)] = part
        if len(visited) > _MOST_PARTS:
            return []
        code = getattr(part, "__code__", None)
        if code is by_schedule:
            rates = [x for x in cells(part) if getattr(x, "__code__", None) is by_rate]
            held = [x for rate in rates for x in cells(rate) if callable(x)]
            schedule = held[0] if len(held) == 1 else None
            found.append(_Source(group, schedule))
        elif code is by_constant:
            if not all(map(_is_sign, cells(part))):
                found.append(_Source(group, None))
        else:
            left += [((*group, *key), inner) for key, inner in _objects_in(part)]
    return found


def _is_sign(step_size: Any) -> bool:
    return isinstance(step_size, int | float) and abs(step_size) == 1


@functools.cache
def _codes() -> tuple[Any, Any, Any]:
    """The code of three functions of this optax.

    The update of `scale_by_schedule`; the step size that `scale_by_learning_rate` gives
    it, in whose closure the schedule is; and the update of `scale`.
    """

    def schedule(count):
        return count

    by_schedule = optax.scale_by_learning_rate(schedule).update
    step_sizes = [x for x in cells(by_schedule) if schedule in cells(x)]
    functions = by_schedule, *step_sizes, optax.scale(2.0).update
    codes = [getattr(function, "__code__", None) for function in functions]
    # Another optax may build them otherwise: then nothing is found.
    found = len(codes) == 3 and None not in codes
    return (codes[0], codes[1], codes[2]) if found else (_ABSENT, _ABSENT, _ABSENT)


def _objects_in(part: Any) -> Iterator[tuple[Group, Any]]:
    """Objects in `part` that may hold update functions, with their keys in a dict."""
    held = [*held_by(part)]
    if not (held or inspect.isfunction(part)):
        # Of a jitted function that is what it wraps.
        held = [((), x) for x in getattr(part, "__dict__", {}).values()]
    return ((key, x) for key, x in held if _is_looked_into(x))


def _is_looked_into(part: Any) -> bool:
    if isinstance(part, type):
        return False
    if isinstance(part, Mapping | tuple | list) or callable(part):
        return True
    return dataclasses.is_dataclass(part) or hasattr(type(part), "update")
