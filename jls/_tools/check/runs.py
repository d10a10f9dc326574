# SPDX-License-Identifier: Apache-2.0
"""Runs a step on copies of its arguments, and notes what each run did.

Between the runs everything is on the host: on the devices there is what the caller
holds, and the copies and the results of one run.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._mistakes import is_jit_disabled
from jls._notes import noted
from jls._text import listed
from jls._tools.check.carried import Carried, Named, match
from jls._tools.check.leaves import as_numbers, as_numpy, own_leaves, same
from jls._tools.check.static import Numbers, numbers_in, static_roots, subtree
from jls._tools.reading.arguments import Arguments, BoundArguments, Item, items_of
from jls._tools.reading.patience import logging_if_slow
from jls._tools.reading.reading import Reading, Result
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
    """One run of the step, on the host."""

    runner: "Runner"
    given: Leaves  # all leaves of the arguments
    returned: Leaves  # the same, with those that came back
    before: Mapping[int, np.ndarray]  # the numbers in what is carried, and in scales
    after: Mapping[int, np.ndarray]
    compiled: bool
    diverged: frozenset[int]  # leaves of which devices hold different copies

    @property
    def next(self) -> Leaves:
        """The arguments of a good step after it.

        The states of the scalers, and all that does not come back, are as at the start.
        """
        runner = self.runner
        kept = runner.carried.leaves - {i for x in runner.scales for i in x.state}
        pairs = enumerate(zip(self.returned, runner.start, strict=True))
        return [new if i in kept else old for i, (new, old) in pairs]

    def changed(self, exempt: Mapping[int, Any] = {}) -> set[int]:
        """The carried leaves that it changed."""
        return {
            i
            for i in self.runner.carried.compared
            if not self.keeps([i], exempt.get(i))
        }

    def keeps(self, leaves: Iterable[int], exempt: Any | None = None) -> bool:
        """Whether leaves are as they were."""
        return all(same(self.before[i], self.after[i], exempt) for i in leaves)

    def comes_out_as(self, other: "Run", leaves: Iterable[int]) -> bool:
        """Whether another run left the same in these leaves."""
        return all(same(self.after[i], other.after[i]) for i in leaves)

    def moved(self) -> bool:
        """Whether every wrapper moved some of the parameters that it trains."""
        params = self.runner.params
        return bool(params) and not any(map(self.keeps, params))

    def nonfinite(
        self, exempt: Mapping[int, Any] = {}, since: "Run | None" = None
    ) -> set[int]:
        """The carried leaves in which an inf or NaN is new; not jls's own.

        Args:
          exempt: the indices of elements that do not count, by leaf.
          since: the run before which it is new; this one if None.
        """
        old = (since or self).before
        return {
            i
            for i in self.runner.carried.compared - self.runner.own
            if is_inexact(self.after[i])
            and is_new(old[i], self.after[i], exempt.get(i)).any()
        }

    def counted(self, scale: Scale, counter: str) -> int:
        """By how much a counter of the wrapper rose."""
        at = scale.counters[counter]
        return int((self.after[at] - self.before[at]).sum())

    def was_skipped(self, scale: Scale) -> bool:
        """Whether every call of the wrapper in this run skipped."""
        if not scale.counters:
            return self.backed_off(scale)
        calls = self.counted(scale, "steps")
        return calls > 0 and calls == self.counted(scale, "skips")

    def all_skipped(self) -> bool:
        return all(map(self.was_skipped, self.runner.scales))

    def any_skipped(self) -> bool:
        return any(
            self.counted(x, "skips") > 0 if x.counters else self.backed_off(x)
            for x in self.runner.scales
        )

    def backed_off(self, scale: Scale) -> bool:
        """Whether the scaler saw an overflow, as far as its state shows."""
        old, new = self.before[scale.at], self.after[scale.at]
        if np.any(new < old) or self._rose(scale, "nonfinite_count"):
            return True
        has_grown = "finite_count" not in scale.fields or np.any(new > old)
        return not has_grown and not self._rose(scale, "finite_count")

    def _rose(self, scale: Scale, field: str) -> bool:
        at = scale.fields.get(field)
        return at is not None and bool(np.any(self.after[at] > self.before[at]))


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
        self.carried = Carried()
        self._named = named
        # The leaves of the arguments, on the host; at a lower loss scale, if need be.
        self.start = _to_host(arguments.leaves)
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
        self.carried = match(
            self.arguments, outputs, changed, self.scales, self._named, self.reading
        )

    @functools.cached_property
    def own(self) -> set[int]:
        return own_leaves(self.scales)

    @functools.cached_property
    def trained(self) -> frozenset[int]:
        """Floating-point leaves that come back and have an update in them.

        Or themselves and gradients that were unscaled: where there is no wrapper, and
        where one is around a part of the optimizer. Without a program, all of them.
        """
        items, reading = self.arguments.items, self.reading
        floats = self.carried.compared - self.own
        floats = frozenset(i for i in floats if is_inexact(items[i].value))
        if reading is None:
            return floats
        bits = reading.flow.bit_of_gradients
        beside = (self._following([i], reading.bit(i)) for i in floats)
        beside = self._following(frozenset().union(*beside), bits)
        return self._following(floats, reading.bits_of_updates) | beside

    @functools.cached_property
    def params(self) -> list[frozenset[int]]:
        """The leaves that each wrapper trains, without its own state."""
        items, reading = self.arguments.items, self.reading
        roots = [scale.path for scale in self.scales]
        outside = frozenset(
            i
            for i in self.trained
            if not any(items[i].path[: len(root)] == root for root in roots)
        )
        if reading is None or not reading.calls:
            return [outside] if outside else []
        groups = [
            self._following(outside, bits)
            for k in reading.calls
            if (bits := reading.bits_of_calls(k))
        ]
        return [group for group in groups if group]

    @property
    def doubted(self) -> set[int]:
        """The trained leaves that a skip may change, as far as the program shows."""
        return {i for i in self.trained if not self.is_proved_to_stay([i])}

    def _following(self, leaves: Iterable[int], bits: int) -> frozenset[int]:
        """The leaves whose new values are computed from a set of bits."""
        results = {i: self.result(i) for i in leaves}
        return frozenset(i for i, x in results.items() if x and x.now.follows & bits)

    def result(self, leaf: int) -> Result | None:
        """The facts about a carried leaf, if the program can be read."""
        if self.reading is None:
            return None
        if leaf in self.carried.in_place:
            return self.reading.objects.get(self.arguments.items[leaf].path)
        return self.reading.outputs.get(self.carried.sources[leaf])

    def is_proved_to_stay(self, leaves: Iterable[int], is_skipped: bool = True) -> bool:
        """Whether all of `leaves` come back as they were, if they come back.

        Args:
          leaves: some leaves.
          is_skipped: in a step that is skipped; else in every step.
        """
        results = {i: self.result(i) for i in self.carried.leaves.intersection(leaves)}
        return bool(results) and all(
            self.reading is not None
            and result is not None
            and self.reading.leaf_of(result.skipped if is_skipped else result.now) == i
            for i, result in results.items()
        )

    def run(self, leaves: Leaves, trial: str, changes: Mapping[int, Any] = {}) -> Run:
        """One call of the step with copies of `leaves`.

        Args:
          leaves: of its arguments.
          trial: what the call is for.
          changes: other values for some leaves.
        """
        leaves = [
            filled(x, changes[i]) if i in changes else x for i, x in enumerate(leaves)
        ]
        call = self._copies(leaves)
        result, compiled = self._call(call, trial)
        outputs, objects = items_of(result), call.read()
        if not self.carried.leaves:  # there is no program
            self._match(outputs, {})
        if self.numbers is None:
            before = self._by_name(self.arguments.rebuild(leaves))
            self.numbers = numbers_in(before), numbers_in(self._returned(call, result))
        new = self._carried_values(outputs, objects)
        diverged = frozenset(i for i, x in new.items() if _copies_differ(x))
        for i, value in new.items():
            self._places[i] = _placement_of(value)
            if is_concrete(value):
                self.devices |= value.sharding.device_set
        new = dict(zip(new, _to_host(list(new.values())), strict=True))
        returned = [new.get(i, leaf) for i, leaf in enumerate(leaves)]
        before, after = (
            {i: as_numpy(x[i]) for i in self.carried.leaves | self.own}
            for x in (leaves, returned)
        )
        return Run(self, leaves, returned, before, after, compiled, diverged)

    def calls_in_a_row(self, count: int) -> tuple[list[Numbers], list[bool]]:
        """Calls the step, each time with what it returned the time before.

        Returns:
          The static numbers before the first call and after each, and whether each call
          was compiled.
        """
        leaves, given, compiled = self.start, {}, list[bool]()
        found = [numbers_in(self._by_name(self.arguments.rebuild(leaves)))]
        for number in range(1, count + 1):
            call = self._copies(leaves)
            fresh = self._by_name(call) | given
            args = tuple(fresh[name] for name in self.arguments.names)
            kwargs = {name: fresh[name] for name in call.kwargs}
            call = call._replace(args=args, kwargs=kwargs)
            trial = f"call {number} in a row"
            result, is_compiled = self._call(call, trial)
            compiled.append(is_compiled)
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
        items, roots = self.arguments.items, dict[str, tuple[str, ...]]()
        for i, source in self.carried.sources.items():
            name, *inner = items[i].path
            root = source[: len(source) - len(inner)]
            if source[len(root) :] == tuple(inner):
                roots.setdefault(name, root)
        by_name = self._by_name(call)
        roots |= static_roots(by_name, result, roots)
        returned = {name: subtree(result, root) for name, root in roots.items()}
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
            with noted("eager step"), logging_if_slow(_SLOW):
                result = self.step(*call.args, **call.kwargs)
        except Exception as error:
            error.add_note(f"jls.check_step ran the step on copies: {trial}.")
            raise
        finally:
            _COMPILED.reset(token)
        compiled = any(name not in _LOOPS for name in names) and not is_jit_disabled()
        return result, compiled

    def _carried_values(
        self, outputs: Sequence[Item], objects: Sequence[Item]
    ) -> dict[int, Any]:
        """What came back, by leaf; not what the step has donated."""
        returned = {item.path: item.value for item in outputs}
        values = {i: returned[path] for i, path in self.carried.sources.items()}
        in_place = {item.path: item.value for item in objects}
        names = {i: self.arguments.items[i].path for i in self.carried.in_place}
        return values | {i: in_place[x] for i, x in names.items() if x in in_place}

    # Loss scales.

    def at_scale(self, scale: Scale, value: Any) -> dict[int, Any]:
        """Another loss scale, and the count of finite steps at 0."""
        count = scale.fields.get("finite_count")
        if count is None:
            return {scale.at: value}
        # Below 0 steps do not count yet.
        return {scale.at: value, count: np.minimum(as_numpy(self.start[count]), 0)}

    def names(self, leaves: Iterable[int]) -> str:
        """The paths of leaves, the first three of them."""
        return listed([self.arguments.items[i].name for i in sorted(leaves)])


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


def _to_host(leaves: Leaves) -> Leaves:
    """`leaves` with numpy arrays, all fetched at once.

    Keys and weakly typed arrays, which numpy has not, stay where they are.
    """
    moves = [_is_on_device(leaf) and not leaf.weak_type for leaf in leaves]
    fetched = iter(jax.device_get(list(itertools.compress(leaves, moves))))
    # A view would keep the array on the device.
    return [
        np.array(next(fetched)) if move else leaf
        for leaf, move in zip(leaves, moves, strict=True)
    ]


def _is_on_device(leaf: Any) -> bool:
    return is_concrete(leaf) and not is_extended(leaf) and not leaf.is_deleted()


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


def is_new(old: Any, new: Any, exempt: Any | None = None) -> np.ndarray:
    """Where an inf or NaN is that was not there, but for the indices `exempt`."""
    found = np.array(np.isfinite(as_numbers(old)) & ~np.isfinite(as_numbers(new)))
    if exempt is not None:
        found[exempt] = False
    return found


def filled(leaf: Any, value: Any) -> np.ndarray:
    """`value` in the shape and the dtype of `leaf`."""
    old = as_numpy(leaf)
    return np.array(np.broadcast_to(np.asarray(value), old.shape), old.dtype)


def with_nan(leaf: Any) -> np.ndarray:
    """`leaf` with NaN for its first element."""
    array = np.array(as_numpy(leaf))
    array[(0,) * array.ndim] = np.nan
    return array


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
