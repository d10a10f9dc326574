# SPDX-License-Identifier: Apache-2.0
"""Evaluates a program with a hook on each operation.

It goes into calls, rematerialized programs, custom rules, loops, branches and programs
over several devices, so the hook sees the operations in there too. The records that it
makes are returned beside the results:

    call              the records of its operations
    scan              the same, stacked along a first axis
    while             for each operation the records of two iterations: the first with a
                      number that is not finite, and the first with one that is NaN
    cond              the records of all branches, zeros for those that were not taken
    shard_map         for each operation the record of the device with the worst numbers

What is kept of a while loop and of several devices can be chosen: see `Merging`.
"""

from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import AS_WRITTEN, Arithmetic
from jls._program.control import (
    MAIN,
    Call,
    Indices,
    Site,
    calls_of,
    evaluate,
    live,
    rebuild,
)
from jls._program.jaxprs import (
    Program,
    has_side_effects,
    manual_axes,
    opened,
    parameter,
    to_varying,
)

# The record of an operation: u32[..., n], with an axis for each scan around it.
# The numbers are keys of floats, as `key_of` makes them: the largest and the smallest
# of an array in turn.
Records = dict[int, Any]  # by the index of the equation: of an operation, or of a call

# The keys of records that belong to no equation.
SLICES = -1  # of a scan: the record of the slices that each iteration gets
ITERATIONS = -2  # of a while loop: the number of iterations
TAKEN = -3  # of a branch: the record of an inf if it was taken, else zeros
CARRIED = -4  # of a while loop whose lanes end apart: the records of its carry

NEVER = np.uint32(0xFFFF_FFFF)

# Keys of float32: in order, NaN at both ends.
_SIGN, _INF = 0x8000_0000, 0x7F80_0000
ZERO_KEY = np.uint32(_SIGN)
INF_KEY = np.uint32(_SIGN | _INF)
MINUS_INF_KEY = np.uint32(_SIGN - 1 - _INF)


def key_of(x: Array) -> Array:
    """The keys of float32: `u32[...]`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(_SIGN)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def float_from_key(key: int) -> float:
    """The number that a key stands for."""
    return floats_from_keys(np.array([key], np.uint32)).item()


def floats_from_keys(keys: np.ndarray) -> np.ndarray:
    """The numbers that keys stand for: `f32[...]`."""
    bits = np.where(keys >= _SIGN, keys - np.uint32(_SIGN), ~keys)
    return bits.astype(np.uint32).view(np.float32)


class WhileRecords(NamedTuple):
    """The records of an operation in two iterations of a while loop."""

    bad: Any  # of the first iteration in which a number is inf or NaN; else the largest
    bad_iterations: Any  # u32[..., 2]  the first and the last of these iterations
    nan: Any  # of the first iteration in which a number is NaN
    nan_iterations: Any


class Watched(NamedTuple):
    """The results with which the program goes on, and the record of an operation."""

    results: Sequence[Any]  # of the same shapes and dtypes
    record: Any = None  # u32[n]; where there are only calls and scans, any arrays


Replayed = tuple[list[Any], Records]
Watch = Callable[[Site, Sequence[Any], Sequence[Any]], Watched]
Around = Callable[[Site, Callable[..., Any]], Callable[..., Any]]


def replay(
    program: Program,
    operands: Sequence[Any],
    watch: Watch,
    site: Site = MAIN,
    arithmetic: Arithmetic = AS_WRITTEN,
    only: Container[Indices] | None = None,
    merging: "Merging | None" = None,
    around: Around = lambda site, run: run,
) -> Replayed:
    """The results of a program, and the records of its operations.

    Args:
      program: a jaxpr.
      operands: its inputs; arrays, or tracers.
      watch: called with the site, the operands and the results of each operation,
        perhaps more than once. Slices, taken branches and carries come as the results
        of an operation with one of the negative indices above.
      site: the calls around the program.
      arithmetic: how it is computed. `BOTH` gives the watch pairs, and returns them.
      only: the places of the operations to watch, and of the calls around them. What
        they do not need is left out, and a result that is not computed is None.
      merging: how the records of several iterations or devices become one.
      around: gives the function that is called for a loop, branches or a `shard_map`,
        from its site and the function that runs it.
    """
    held = list(map(arithmetic.held, operands))
    used = None if only is None else ()
    run = _Replay(watch, arithmetic, only, merging or WORST, around).run
    return run(program, held, site, used)


class _Replay(NamedTuple):
    """A replay with one watch; each `shard_map` in it has a replay of its own."""

    watch: Watch
    arithmetic: Arithmetic
    only: Container[Indices] | None
    merging: "Merging"
    around: Around
    varying: frozenset[str] = frozenset()  # axes of shard_map that JAX keeps track of

    def run(
        self,
        program: Program,
        operands: Sequence[Any],
        site: Site,
        used: Collection[int] | None = None,
    ) -> Replayed:
        """One run of a program; of its results those that are `used`, None for all."""
        jaxpr, records = opened(program).jaxpr, Records()
        outvars = jaxpr.outvars if used is None else [jaxpr.outvars[i] for i in used]
        kept = {
            index
            for index, equation in enumerate(jaxpr.eqns)
            if self.only is None
            or (*site.indices, index) in self.only
            or has_side_effects(equation)
        }
        needed = live(jaxpr, outvars, kept)

        def run(here: Site, inputs: list[Any]) -> Sequence[Any]:
            index, atoms = here.indices[-1], here.equation.outvars
            mine = [i for i, x in enumerate(atoms) if x not in needed[index]]
            results, record = self._equation(here, inputs, mine)
            if record is not None:
                records[index] = record
            return results

        held = self.arithmetic.held
        return evaluate(program, operands, held, run, site, needed), records

    def _equation(
        self, site: Site, inputs: list[Any], used: Collection[int]
    ) -> tuple[Sequence[Any], Any]:
        calls = calls_of(site.equation)
        if not calls:
            return self._see(site, inputs, self.arithmetic.run(site, inputs))
        if calls[0].kind == "call":
            if parameter(site.equation, "prevent_cse"):
                inputs = list(lax.optimization_barrier(tuple(inputs)))
            results, records = self.run(calls[0].program, inputs, site, used)
        else:
            run = partial(self._rebuilt, site, calls)
            results, records = self.around(site, run)(inputs)
        return results, records or None

    def _see(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        seen = self.watch(site, inputs, results)
        if seen.record is None:
            return seen.results, None
        return seen.results, to_varying(seen.record, self.varying)

    def _full(self, shapes: Any, value: Any = ZERO_KEY) -> Any:
        def full(x):
            return to_varying(jnp.full(x.shape, value, x.dtype), self.varying)

        return jax.tree.map(full, shapes)

    def _rebuilt(self, site: Site, calls: list[Call], inputs: list[Any]) -> Replayed:
        """The results of a loop, of branches or of a `shard_map`."""
        equation, kind, inside = site.equation, calls[0].kind, self
        if kind == "devices":
            is_checked = parameter(equation, "check_vma")
            varying = manual_axes(equation) if is_checked else None
            inside = self._replace(varying=varying or frozenset())

        def run(call: Call, inputs: Sequence[Any]) -> Replayed:
            if call.kind == "condition":
                unseen = self._replace(watch=_see_nothing)
                return unseen.run(call.program, inputs, site)
            records: Records = {}
            if call.kind == "scan":
                last = call.consts + call.carried
                beside = site.beside(SLICES)
                slices, records[SLICES] = self._see(beside, (), inputs[last:])
                inputs = [*inputs[:last], *slices]
            if call.branch is not None:  # a record of it: what the watch says of inf
                beside = site.beside(call.branch, TAKEN)
                _, records[TAKEN] = self._see(beside, (), [jnp.float32(jnp.inf)])
            results, found = inside.run(call.program, inputs, call.site(site))
            return results, found | _recorded(records)

        if kind == "while":
            begin = partial(self._begin, site)
            results, (count, records) = rebuild(equation, calls, inputs, run, begin)
            if records:
                records[ITERATIONS] = to_varying(count.reshape(1), self.varying)
            return results, records
        if kind == "branch":
            shapes = [jax.eval_shape(partial(run, x), inputs[1:])[1] for x in calls]
            zeros = dict(enumerate(map(self._full, shapes)))

            def branch(call: Call, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
                results, records = run(call, inputs)
                every = zeros | {call.branch: records}
                return results, {i: x for i, x in every.items() if x}

            return rebuild(equation, calls, inputs, branch)
        results, records = rebuild(equation, calls, inputs, run)
        if kind == "devices":
            of_devices = self.merging.of_devices
            records = jax.tree.map(of_devices, records, is_leaf=_is_record)
        return results, records

    def _begin(self, site: Site, step: Any, carry: list[Any], has_lanes: bool) -> Any:
        """The records that a `while` carries besides, and its body; see `rebuild`."""

        def seen(carry: list[Any]) -> Replayed:
            results, records = step(carry)
            if has_lanes:
                places = (site.beside(CARRIED, i) for i in range(len(results)))
                pairs = zip(places, results, strict=True)
                every = (self._see(beside, (), [x])[1] for beside, x in pairs)
                carried = _recorded(dict(enumerate(every)))
                records = records | ({CARRIED: carried} if carried else {})
            return results, records

        def body(state: Any) -> Any:
            carry, (count, kept) = state
            results, records = seen(carry)
            after = partial(self.merging.after, count)
            kept = jax.tree.map(after, records, kept, is_leaf=_is_record)
            return results, (count + jnp.uint32(1), kept)

        shapes = jax.eval_shape(seen, carry)[1]
        before = partial(self.merging.before, self._full)
        kept = jax.tree.map(before, shapes, is_leaf=_is_record)
        return (jnp.uint32(0), kept), body


def _see_nothing(site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Watched:
    del site, inputs
    return Watched(results)


def _recorded(records: Records) -> Records:
    return {key: record for key, record in records.items() if record is not None}


def _is_record(node: Any) -> bool:
    return not isinstance(node, dict)


def _before_iterations(full: Callable[..., Any], shape: Any) -> WhileRecords:
    """The records of an operation before the first iteration."""
    nothing = full(shape)
    axes = jax.tree.leaves(shape)[0].shape[:-1]  # the lengths of the scans around
    never = jax.ShapeDtypeStruct((*axes, 2), jnp.uint32)
    iterations = full(never).at[..., 0].set(NEVER)
    return WhileRecords(nothing, iterations, nothing, iterations)


def _is_bad(record: Any) -> tuple[Array, Array]:
    """Whether a number of an operation is inf or NaN, and whether one is NaN."""
    if isinstance(record, WhileRecords):
        bad, _ = _is_bad(record.bad)
        _, nan = _is_bad(record.nan)
        return bad, nan
    bad = (record >= INF_KEY) | (record <= MINUS_INF_KEY)
    nan = (record > INF_KEY) | (record < MINUS_INF_KEY)
    return jnp.any(bad, axis=-1), jnp.any(nan, axis=-1)


def _after_iteration(iteration: Array, new: Any, old: WhileRecords) -> WhileRecords:
    """The records of an operation after one more iteration."""
    is_bad, is_nan = _is_bad(new)
    never_bad = old.bad_iterations[..., 0] == NEVER
    never_nan = old.nan_iterations[..., 0] == NEVER
    bad = _select_records(never_bad & is_bad, new, old.bad)
    finite = jax.tree.map(_wider, old.bad, new)
    return WhileRecords(
        bad=_select_records(never_bad & ~is_bad, finite, bad),
        bad_iterations=_next(old.bad_iterations, is_bad, iteration),
        nan=_select_records(never_nan & is_nan, new, old.nan),
        nan_iterations=_next(old.nan_iterations, is_nan, iteration),
    )


def _wider(one: Array, other: Array) -> Array:
    """The largest of the numbers in even places, the smallest of those in odd ones."""
    is_high = jnp.arange(one.shape[-1]) % 2 == 0
    return jnp.where(is_high, jnp.maximum(one, other), jnp.minimum(one, other))


def _next(iterations: Array, happened: Array, iteration: Array) -> Array:
    first, last = iterations[..., 0], iterations[..., 1]
    first = jnp.where(happened & (first == NEVER), iteration, first)
    return jnp.stack([first, jnp.where(happened, iteration, last)], axis=-1)


def _select_records(pred: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(pred[..., None], x, y), new, old)


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
    return jnp.where(jnp.any(bad, axis=0)[..., None], take(record), of_all)


class Merging(NamedTuple):
    """How the records of an operation in several iterations or devices become one."""

    before: Callable[..., Any]  # a loop: from `full(shapes, value)`, and a record
    after: Callable[..., Any]  # an iteration: from its number, its record, what is kept
    of_devices: Callable[[Any], Any]  # from records that are stacked by device


WORST = Merging(_before_iterations, _after_iteration, _of_worst_device)
