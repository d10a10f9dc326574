# SPDX-License-Identifier: Apache-2.0
"""Runs a step on copies of its arguments, and notes what each run did.

Between the runs everything is on the host: on the devices there is what the caller
holds, and the copies and the results of one run.
"""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._mistakes import eager_steps_allowed, is_jit_disabled
from jls._placement import place_like
from jls._program.facts import Value
from jls._text import listed
from jls._tools.check.carried import Carried, Named, match
from jls._tools.check.leaves import as_numbers, as_numpy, own_leaves, same
from jls._tools.check.static import Numbers, numbers_in, subtree
from jls._tools.reading.arguments import Arguments, BoundArguments, Item, items_of
from jls._tools.reading.patience import logging_if_slow
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale
from jls._tree import is_array, is_concrete, is_extended, is_inexact

Leaves = list[Any]

# A loop or a branch outside of jit is compiled in each call; that is not the step.
_LOOPS = ("jit(scan)", "jit(while)", "jit(cond)")
_SLOW = (
    "jls.check_step is compiling and running the step; this takes as long as your "
    "first step does."
)

_COMPILED: contextvars.ContextVar[list[str] | None]
_COMPILED = contextvars.ContextVar("_COMPILED", default=None)


class OutOfRunsError(Exception):
    """No run is left."""


class Run(NamedTuple):
    """The arguments and the results of one run of the step."""

    before: Leaves  # all leaves of the arguments
    after: Leaves  # the same, with those that came back
    outputs: list[Item]  # what else the step returned
    compiled: bool
    diverged: frozenset[int]  # leaves of which devices hold different copies


class Runner:
    """Runs the step; knows what it carries and how many runs are left."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Arguments,
        scales: Sequence[Scale],
        named: Named,
        reading: Reading | None,
        runs: int,
        around: Iterable[type] = (),
    ) -> None:
        self.step, self.arguments, self.scales = step, arguments, scales
        self.around = frozenset(around)  # types of states that hold a wrapper's
        self.reading, self.left = reading, runs
        # The static numbers in the arguments, before and after the first run.
        self.numbers: tuple[Numbers, Numbers] | None = None
        self._named = named
        self._carried: Carried | None = None
        self._places = list(map(_placement_of, arguments.leaves))
        self.devices = set[jax.Device]()  # that hold what comes back
        if reading is not None:
            changed = {
                i: reading.leaf_of(result.now) != i
                for i, item in enumerate(arguments.items)
                if (result := reading.objects.get(item.path)) is not None
            }
            self._match(reading.traced.outputs, changed)

    def _match(self, outputs: Sequence[Item], changed: Mapping[int, bool]) -> None:
        self._carried = match(
            self.arguments, outputs, changed, self.scales, self._named, self.reading
        )

    @property
    def carried(self) -> Carried:
        assert self._carried is not None
        return self._carried

    @functools.cached_property
    def own(self) -> set[int]:
        return own_leaves(self.scales)

    @functools.cached_property
    def trained(self) -> frozenset[int]:
        """Floating-point leaves that come back and have an update in them.

        Where there is no wrapper, they have gradients in them that were unscaled.
        Without a program to read: as many as the wrapper has parameters.
        """
        floats = [
            i
            for i in self.carried.compared - self.own
            if is_inexact(self.arguments.items[i].value)
        ]
        if self.reading is None:
            return frozenset(self._of_the_size_of_parameters(floats))
        updates = self.reading.bits_of_updates
        return frozenset(i for i in floats if self._now(i).follows & updates)

    def _now(self, leaf: int) -> Any:
        result = self.result(leaf)
        return result.now if result else _NOTHING

    def result(self, leaf: int) -> Any:
        """The facts about a carried leaf, if the program can be read."""
        if self.reading is None:
            return None
        if leaf in self.carried.in_place:
            return self.reading.objects.get(self.arguments.items[leaf].path)
        return self.reading.outputs.get(self.carried.sources[leaf])

    def _of_the_size_of_parameters(self, floats: Sequence[int]) -> set[int]:
        items = self.arguments.items
        found = set[int]()
        for scale in self.scales:
            flags = scale.counters.get("nonfinite_leaves")
            count = -1 if flags is None else np.shape(items[flags].value)[-1]
            outside = [
                i for i in floats if items[i].path[: len(scale.root)] != scale.root
            ]
            for end in range(1, max((len(items[i].path) for i in outside), default=0)):
                for root in {items[i].path[:end] for i in outside}:
                    part = [i for i in outside if items[i].path[:end] == root]
                    found |= set(part) if len(part) == count else set()
            if count == -1 or (count == 1 and not found):
                found |= set(outside)
        return found

    @functools.cached_property
    def params(self) -> list[frozenset[int]]:
        """The leaves that each wrapper trains, without its own state."""
        items = self.arguments.items
        roots = [scale.root for scale in self.scales]
        outside = [
            i
            for i in sorted(self.trained)
            if not any(items[i].path[: len(root)] == root for root in roots)
        ]
        if self.reading is None or not self.reading.calls:
            return [frozenset(outside)]
        groups = [
            frozenset(i for i in outside if self._now(i).follows & bits)
            for k in self.reading.calls
            if (bits := self.reading.bits_of_calls(k))
        ]
        return [group for group in groups if group]

    def run(self, leaves: Sequence[Any], trial: str) -> Run:
        """One call of the step with copies of `leaves`."""
        call = self._copies(leaves)
        result, compiled = self._call(call, trial)
        outputs, objects = items_of(result), call.read()
        if self._carried is None:
            new = {item.path: item.value for item in objects}
            changed = {
                i: not same(item.value, new[item.path])
                for i, item in enumerate(self.arguments.items)
                if item.path in new and is_array(item.value)
            }
            self._match(outputs, changed)
        if self.numbers is None:
            before = self._by_name(self.arguments.rebuild(leaves))
            after = self._returned(call, result)
            self.numbers = numbers_in(before), numbers_in(after)
        after = self._after(leaves, outputs, objects)
        diverged = frozenset(i for i in self.carried.leaves if _copies_differ(after[i]))
        for i in self.carried.leaves:
            self._places[i] = _placement_of(after[i])
            if is_concrete(after[i]):
                self.devices |= after[i].sharding.device_set
            after[i] = _to_host(after[i])
        taken = set(self.carried.sources.values())
        others = [
            x._replace(value=_to_host(x.value)) for x in outputs if x.path not in taken
        ]
        return Run(list(leaves), after, others, compiled, diverged)

    def calls_in_a_row(self, count: int) -> tuple[list[Numbers], bool]:
        """Calls the step, each time with what it returned the time before.

        Returns:
          The static numbers before the first call and after each, and whether the last
          one was compiled.
        """
        leaves, given, compiled = self.arguments.leaves, {}, False
        found = [numbers_in(self._by_name(self.arguments.rebuild(leaves)))]
        for number in range(1, count + 1):
            call = self._copies(leaves)
            fresh = self._by_name(call) | given
            args = tuple(fresh[name] for name in self.arguments.names)
            kwargs = {name: fresh[name] for name in call.kwargs}
            call = call._replace(args=args, kwargs=kwargs)
            trial = f"call {number} in a row"
            result, compiled = self._call(call, trial)
            given = self._returned(call, result)
            found.append(numbers_in(given))
        return found, compiled

    def _by_name(self, call: BoundArguments) -> dict[str, Any]:
        return {
            **dict(zip(self.arguments.names, call.args, strict=True)),
            **call.kwargs,
        }

    def _returned(self, call: BoundArguments, result: Any) -> dict[str, Any]:
        """The arguments that came back whole, as a loop passes them on."""
        items, returned = self.arguments.items, {}
        for i, source in self.carried.sources.items():
            name, *inner = items[i].path
            root = source[: len(source) - len(inner)]
            if name not in returned and source[len(root) :] == tuple(inner):
                returned[name] = subtree(result, root)
        by_name = self._by_name(call)
        return returned | {name: by_name[name] for name in self.arguments.in_place}

    def _copies(self, leaves: Sequence[Any]) -> BoundArguments:
        pairs = zip(leaves, self._places, strict=True)
        return self.arguments.rebuild([_copy_to(leaf, place) for leaf, place in pairs])

    def _call(self, call: BoundArguments, trial: str) -> tuple[Any, bool]:
        """The result of the step, and whether it was compiled."""
        if self.left <= 0:
            raise OutOfRunsError
        self.left -= 1
        names: list[str] = []
        _listen()
        token = _COMPILED.set(names)
        try:
            with eager_steps_allowed(), logging_if_slow(_SLOW):
                result = self.step(*call.args, **call.kwargs)
        except Exception as error:
            error.add_note(f"jls.check_step ran the step on copies: {trial}.")
            raise
        finally:
            _COMPILED.reset(token)
        compiled = any(name not in _LOOPS for name in names) and not is_jit_disabled()
        return result, compiled

    def _after(
        self, leaves: Sequence[Any], outputs: Sequence[Item], objects: Sequence[Item]
    ) -> Leaves:
        after = list(leaves)
        returned = {item.path: item.value for item in outputs}
        for i, path in self.carried.sources.items():
            after[i] = returned[path]
        in_place = {item.path: item.value for item in objects}
        for i in self.carried.in_place:
            # The values of the copies, in buffers that no later run donates.
            after[i] = in_place.get(self.arguments.items[i].path, leaves[i])
        return after

    # Loss scales.

    def set_scale(self, leaves: Leaves, scale: Scale, value: Any) -> Leaves:
        """`leaves` with another loss scale, and the count of finite steps at 0."""
        new = list(leaves)
        new[scale.at] = filled(leaves[scale.at], value)
        count = scale.fields.get("finite_count")
        if count is not None:  # below 0 steps do not count yet
            new[count] = filled(leaves[count], np.minimum(as_numpy(leaves[count]), 0))
        return new

    def put_back(self, leaves: Leaves, base: Leaves) -> Leaves:
        """`leaves` with the scaler states and all that is not carried as in `base`."""
        kept = self.carried.leaves - {i for x in self.scales for i in x.state}
        return [leaves[i] if i in kept else base[i] for i in range(len(base))]

    # The effects of a run.

    def counted(self, run: Run, scale: Scale, counter: str) -> int:
        """By how much a counter of the wrapper rose."""
        at = scale.counters[counter]
        return int((as_numpy(run.after[at]) - as_numpy(run.before[at])).sum())

    def was_skipped(self, run: Run, scale: Scale) -> bool:
        """Whether every call of the wrapper in this run skipped."""
        if not scale.counters:
            return self.backed_off(run, scale)
        calls = self.counted(run, scale, "steps")
        return calls > 0 and calls == self.counted(run, scale, "skips")

    def all_skipped(self, run: Run) -> bool:
        return all(self.was_skipped(run, scale) for scale in self.scales)

    def any_skipped(self, run: Run) -> bool:
        return any(
            self.counted(run, x, "skips") > 0 if x.counters else self.backed_off(run, x)
            for x in self.scales
        )

    def scaler_changed(self, run: Run, scale: Scale) -> bool:
        """Whether the run changed the state of the scaler."""
        return any(not same(run.before[i], run.after[i]) for i in scale.state)

    def backed_off(self, run: Run, scale: Scale) -> bool:
        """Whether the scaler saw an overflow, as far as its state shows."""
        old, new = (as_numpy(x[scale.at]) for x in (run.before, run.after))
        if np.any(new < old):
            return True
        bad = scale.fields.get("nonfinite_count")
        if bad is not None and np.any(
            as_numpy(run.after[bad]) > as_numpy(run.before[bad])
        ):
            return True
        good = scale.fields.get("finite_count")
        if good is None or np.any(new > old):
            return False
        return not np.any(as_numpy(run.after[good]) > as_numpy(run.before[good]))

    def changed(self, run: Run, exempt: Mapping[int, Any] = {}) -> set[int]:
        """The carried leaves that the run changed."""
        return {
            i
            for i in self.carried.compared
            if not same(run.before[i], run.after[i], exempt.get(i))
        }

    def moved(self, run: Run) -> bool:
        """Whether every wrapper moved some of the parameters that it trains."""
        return bool(self.params) and all(
            any(not same(run.before[i], run.after[i]) for i in group)
            for group in self.params
        )

    def nonfinite(self, run: Run, exempt: Mapping[int, Any] = {}) -> set[int]:
        """The carried leaves in which an inf or NaN is new; not jls's own."""
        return {
            i
            for i in self.carried.compared - self.own
            if is_inexact(run.after[i])
            and _is_new(run.before[i], run.after[i], exempt.get(i))
        }

    def names(self, leaves: Sequence[int] | set[int] | frozenset[int]) -> str:
        """The paths of leaves, the first three of them."""
        return listed([self.arguments.items[i].name for i in sorted(leaves)])


_NOTHING = Value()


class _Placement(NamedTuple):
    """The devices of an array."""

    sharding: Any  # None if it is not committed to any


def _placement_of(leaf: Any) -> _Placement | None:
    if not is_concrete(leaf):
        return None
    return _Placement(leaf.sharding if leaf.committed else None)


def _copy_to(leaf: Any, place: _Placement | None) -> Any:
    """A leaf in a buffer of its own, on the devices where the step expects it."""
    if is_concrete(leaf):
        return jnp.array(leaf, copy=True)
    if not isinstance(leaf, np.ndarray):
        return leaf
    if place is None:
        return leaf.copy()
    if place.sharding is not None:
        # Two steps: on a CPU, device_put shares the memory of numpy arrays.
        leaf = jax.device_put(leaf, place.sharding)
    return jnp.array(leaf, copy=True)


def _to_host(leaf: Any) -> Any:
    if not is_concrete(leaf) or is_extended(leaf) or leaf.is_deleted():
        return leaf
    # A view would keep the array on the device.
    return np.array(leaf) if leaf.is_fully_addressable else leaf


def _copies_differ(leaf: Any) -> bool:
    """Whether devices hold different bits of the same part of an array."""
    if not is_concrete(leaf) or leaf.is_deleted():
        return False
    if len(leaf.sharding.device_set) < 2:
        return False
    if is_extended(leaf):
        leaf = jax.random.key_data(leaf)
    first: dict[str, bytes] = {}
    for shard in leaf.addressable_shards:
        bits = np.asarray(shard.data).tobytes()
        if first.setdefault(str(shard.index), bits) != bits:
            return True
    return False


def _is_new(old: Any, new: Any, exempt: Any | None) -> bool:
    found = np.array(np.isfinite(as_numbers(old)) & ~np.isfinite(as_numbers(new)))
    if exempt is not None:
        found[exempt] = False
    return bool(found.any())


def filled(leaf: Any, value: Any) -> Any:
    """`value` in the shape and the dtype of `leaf`."""
    array = np.array(np.broadcast_to(np.asarray(value), np.shape(leaf)))
    array = array.astype(np.asarray(leaf).dtype)
    return place_like(jnp.array(array), leaf) if is_concrete(leaf) else array


def planted(leaf: Any, value: float = np.nan) -> Any:
    """`leaf` with its first element replaced."""
    array = np.array(as_numpy(leaf))
    array[(0,) * array.ndim] = value
    return place_like(jnp.array(array), leaf) if is_concrete(leaf) else array


def may_take_fault(leaf: Any) -> bool:
    """Whether `leaf` is a floating-point array of one dimension or more."""
    is_large = isinstance(leaf, jax.Array | np.ndarray) and leaf.size and leaf.ndim
    return (
        bool(is_large)
        and not is_extended(leaf)
        and is_array(leaf)
        and (jnp.issubdtype(leaf.dtype, jnp.floating))
    )


# Compilations.


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    names = _COMPILED.get()
    if names is not None and event.endswith("backend_compile_duration"):
        names.append(str(kwargs.get("fun_name", "")))
