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
from jls._tools.check.carried import Carried, Named, match
from jls._tools.check.leaves import as_numbers, as_numpy, same
from jls._tools.check.program import Program
from jls._tools.check.static import Numbers, numbers_in, static_roots, subtree
from jls._tools.check.subject import Subject, subject_of
from jls._tools.reading.arguments import Arguments, BoundArguments, Item, items_of
from jls._tools.reading.scales import Scale
from jls._tools.reading.slow import logging_if_slow
from jls._tree import is_concrete, is_extended, is_inexact

Leaves = list[Any]
Numbered = Mapping[int, np.ndarray]  # numbers, by leaf

# Ten runs or so are enough for most steps. `MOST_STEPS` good steps and a run for each
# of `LOWER` are 23, which leaves nine for the faults of a step that needs all of these.
RUNS = 32
_HOST = "host"

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


class Trial(NamedTuple):
    """A run of the step to make."""

    given: Leaves  # of its arguments
    what: str  # it is for
    changes: Mapping[int, Any] = {}  # other values for some leaves


class Run(NamedTuple):
    """One run of the step, on the host, and what it did."""

    given: Leaves  # all leaves of the arguments
    # The arguments of a good step after it: the states of the scalers, and all that
    # does not come back, are as at the start.
    next: Leaves
    before: Numbered  # the numbers in what is carried, and in scales
    after: Numbered
    compiled: bool
    diverged: frozenset[int]  # leaves of which devices hold different copies
    changed: frozenset[int]  # carried leaves, and jls's own
    nonfinite: frozenset[int]  # carried leaves in which an inf or NaN is new
    # Loss scales, by leaf: of those that saw an overflow, as far as the scaler's state
    # shows, and of those of which a call, or every call, was skipped.
    backed_off: frozenset[int]
    skipped_once: frozenset[int]
    skipped: frozenset[int]

    def keeps(self, leaves: Iterable[int]) -> bool:
        """Whether leaves are as they were."""
        return self.changed.isdisjoint(leaves)

    def comes_out_as(self, other: "Run", leaves: Iterable[int]) -> bool:
        """Whether another run left the same numbers."""
        return all(same(self.after[i], other.after[i]) for i in leaves)

    def counted(self, scale: Scale, counter: str) -> int:
        """By how much a counter of the wrapper rose."""
        return _rise(self.before, self.after, scale.counters[counter])


def run_of(
    subject: Subject,
    given: Leaves,
    next_one: Leaves,
    new: Mapping[int, Any],
    compiled: bool = False,
    diverged: frozenset[int] = frozenset(),
) -> Run:
    """What a run did.

    Args:
      subject: the step.
      given: all leaves of the arguments.
      next_one: those of a good step after it.
      new: the leaves that came back.
      compiled: whether the step was compiled.
      diverged: leaves of which devices hold different copies.
    """
    numbers = subject.carried.compared | subject.own
    before = {i: as_numpy(given[i]) for i in numbers | subject.carried.leaves}
    after = before | {i: as_numpy(x) for i, x in new.items()}
    # What a wrapper has counted; of a bare scaler, whether it saw an overflow.
    skips, calls = dict[int, int](), dict[int, int]()
    backed_off = frozenset(
        x.at for x in subject.scales if _has_backed_off(before, after, x)
    )
    for x in subject.scales:
        skips[x.at] = calls[x.at] = int(x.at in backed_off)
        if x.counters:
            skips[x.at] = _rise(before, after, x.counters["skips"])
            calls[x.at] = _rise(before, after, x.counters["steps"])
    once = frozenset(at for at in skips if skips[at] > 0)
    return Run(
        given,
        next_one,
        before,
        after,
        compiled,
        diverged,
        frozenset(i for i in numbers if not same(before[i], after[i])),
        nonfinite_since(subject, before, after),
        backed_off,
        once,
        frozenset(at for at in once if skips[at] == calls[at]),
    )


def _rise(before: Numbered, after: Numbered, at: int) -> int:
    return int((after[at] - before[at]).sum())


def _has_backed_off(before: Numbered, after: Numbered, scale: Scale) -> bool:
    def rose(field: str) -> bool:
        at = scale.fields.get(field)
        return at is not None and bool(np.any(after[at] > before[at]))

    if np.any(after[scale.at] < before[scale.at]) or rose("nonfinite_count"):
        return True
    has_grown = "finite_count" not in scale.fields or rose("loss_scale")
    return not has_grown and not rose("finite_count")


class Runner:
    """Runs the step, and knows how many runs are left."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Arguments,
        program: Program,
        named: Named,
    ) -> None:
        self.step, self.arguments, self.left = step, arguments, RUNS
        # Whether a static number came back as another one from the first run.
        self.numbers_change: bool | None = None
        # The leaves of the arguments, on the host; at a lower loss scale, if need be.
        self.start = to_host(self.arguments.leaves)
        self._places = list(map(_placement_of, self.arguments.leaves))
        self.devices = set[jax.Device]()  # that hold what comes back
        self._named = named
        self.subject = subject_of(program, arguments.items, Carried())
        if program.reading is not None:
            self._match(program.reading.traced.outputs)

    def _match(self, outputs: Sequence[Item]) -> None:
        program, items, scales, reading, *_ = self.subject
        carried = match(self.arguments, outputs, scales, self._named, reading)
        self.subject = subject_of(program, items, carried)

    def run(self, given: Leaves, what: str, changes: Mapping[int, Any] = {}) -> Run:
        """One call of the step with copies of its arguments; see `Trial`."""
        leaves = with_changes(given, changes)
        call = self._copies(leaves)
        result, compiled = self._call(call, what)
        outputs, objects = items_of(result), call.read()
        if not self.subject.carried.leaves:  # there is no program
            self._match(outputs)
        subject = self.subject
        if self.numbers_change is None:
            before = numbers_in(self._by_name(self.arguments.rebuild(leaves)))
            after = numbers_in(self._returned(call, result))
            self.numbers_change = any(after.get(k, x) != x for k, x in before.items())
        by_path = [{x.path: x.value for x in items} for items in (outputs, objects)]
        new = subject.carried.pick(subject.items, *by_path)
        diverged = frozenset(i for i, x in new.items() if _copies_differ(x))
        for i, value in new.items():
            self._places[i] = _placement_of(value)
            if is_concrete(value):
                self.devices |= value.sharding.device_set
        new = dict(zip(new, to_host(list(new.values())), strict=True))
        kept = subject.carried.leaves - {i for x in subject.scales for i in x.state}
        pairs = enumerate(zip(leaves, self.start, strict=True))
        next_one = [new.get(i, x) if i in kept else old for i, (x, old) in pairs]
        return run_of(subject, leaves, next_one, new, compiled, diverged)

    def calls_in_a_row(self, count: int) -> tuple[list[Numbers], list[bool]]:
        """Calls the step, each time with what it returned the time before.

        Returns:
          The static numbers before the first call and after each, and whether each was
          compiled.
        """
        leaves, given, compiled = self.start, {}, list[bool]()
        found = [numbers_in(self._by_name(self.arguments.rebuild(leaves)))]
        for number in range(1, count + 1):
            call = self._copies(leaves)
            fresh = self._by_name(call) | given
            args = tuple(fresh[name] for name in self.arguments.names)
            kwargs = {name: fresh[name] for name in call.kwargs}
            call = call._replace(args=args, kwargs=kwargs)
            result, is_compiled = self._call(call, f"call {number} in a row")
            compiled.append(is_compiled)
            given = self._returned(call, result)
            found.append(numbers_in(given))
        return found, compiled

    def _by_name(self, call: BoundArguments) -> dict[str, Any]:
        return dict(zip(self.arguments.names, call.args, strict=True)) | call.kwargs

    def _returned(self, call: BoundArguments, result: Any) -> dict[str, Any]:
        """The arguments that came back whole, as a loop passes them on."""
        items, roots = self.arguments.items, dict[str, tuple[str, ...]]()
        for i, source in self.subject.carried.sources.items():
            name, *inner = items[i].path
            root = source[: len(source) - len(inner)]
            if source[len(root) :] == tuple(inner):
                roots.setdefault(name, root)
        by_name = self._by_name(call)
        roots |= static_roots(by_name, result, roots)
        returned = {name: subtree(result, root) for name, root in roots.items()}
        return returned | {name: by_name[name] for name in self.arguments.in_place}

    def _copies(self, leaves: Sequence[Any]) -> BoundArguments:
        return self.arguments.rebuild(list(map(_copy_to, leaves, self._places)))

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


def _placement_of(leaf: Any) -> Any:
    """The sharding of an array, None if it is not committed to any, or `_HOST`."""
    if not is_concrete(leaf):
        return _HOST
    return leaf.sharding if leaf.committed else None


def _copy_to(leaf: Any, place: Any) -> Any:
    """A leaf in a buffer of its own, on the devices where the step expects it."""
    if isinstance(leaf, np.ndarray):
        if place is _HOST:
            return leaf.copy()
        # Two steps: on a CPU, device_put shares the memory of numpy arrays.
        leaf = jax.device_put(leaf, place)
    return jnp.array(leaf, copy=True) if is_concrete(leaf) else leaf


def to_host(leaves: Leaves) -> Leaves:
    """`leaves` with numpy arrays, all fetched at once.

    Keys and weakly typed arrays, which numpy has not, stay where they are.
    """
    moves = [
        is_concrete(x) and not (is_extended(x) or x.is_deleted() or x.weak_type)
        for x in leaves
    ]
    fetched = iter(jax.device_get(list(itertools.compress(leaves, moves))))
    # A view would keep the array on the device.
    return [
        np.array(next(fetched)) if move else leaf
        for leaf, move in zip(leaves, moves, strict=True)
    ]


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
    """Where an inf or NaN is that was not there, except for the indices `exempt`."""
    found = np.array(np.isfinite(as_numbers(old)) & ~np.isfinite(as_numbers(new)))
    if exempt is not None:
        found[exempt] = False
    return found


def nonfinite_since(
    subject: Subject,
    old: Numbered,
    new: Numbered,
    exempt: Mapping[int, Any] = {},
) -> frozenset[int]:
    """The carried leaves in which an inf or NaN is new; not jls's own.

    Args:
      subject: the step.
      old: numbers by leaf.
      new: later ones.
      exempt: the indices of elements that do not count, by leaf.
    """
    return frozenset(
        i
        for i in subject.carried.compared - subject.own
        if is_inexact(new[i]) and is_new(old[i], new[i], exempt.get(i)).any()
    )


def at_scale(leaves: Leaves, scale: Scale, value: Any) -> dict[int, Any]:
    """Changes to another loss scale, with the count of finite steps at 0."""
    count = scale.fields.get("finite_count")
    if count is None:
        return {scale.at: value}
    # Below 0 steps do not count yet.
    return {scale.at: value, count: np.minimum(as_numpy(leaves[count]), 0)}


def with_changes(leaves: Leaves, changes: Mapping[int, Any]) -> Leaves:
    """`leaves` with other values for some, in their shapes and dtypes."""
    leaves = list(leaves)
    for i, value in changes.items():
        old = as_numpy(leaves[i])
        leaves[i] = np.array(np.broadcast_to(value, old.shape), old.dtype)
    return leaves


# Compilations.


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    names = _COMPILED.get()
    if names is not None and event.endswith("backend_compile_duration"):
        names.append(str(kwargs.get("fun_name", "")))
