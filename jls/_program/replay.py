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
"""

from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import AS_WRITTEN, Arithmetic
from jls._program.control import MAIN, Call, Indices, Site, calls_of
from jls._program.jaxprs import (
    Program,
    has_side_effects,
    is_literal,
    manual_axes,
    opened,
    parameter,
    to_varying,
    variables_in,
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
    record: Any = None  # u32[n]; in calls and scans alone any arrays


Replayed = tuple[list[Any], Records]
Watch = Callable[[Site, Sequence[Any], Sequence[Any]], Watched]


def replay(
    program: Program,
    operands: Sequence[Any],
    watch: Watch,
    site: Site = MAIN,
    arithmetic: Arithmetic = AS_WRITTEN,
    only: Container[Indices] | None = None,
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
    """
    held = list(map(arithmetic.held, operands))
    used = None if only is None else ()
    return _Replay(watch, arithmetic, only=only).run(program, held, site, used)


class _Replay:
    """A replay with one watch; each `shard_map` in it has a replay of its own."""

    def __init__(
        self,
        watch: Watch,
        arithmetic: Arithmetic,
        varying: frozenset[str] = frozenset(),
        only: Container[Indices] | None = None,
    ) -> None:
        self._watch = watch
        self._arithmetic = arithmetic
        self._varying = varying  # the axes of shard_map that JAX keeps track of
        self._only = only

    def run(
        self,
        program: Program,
        operands: Sequence[Any],
        site: Site,
        used: Collection[int] | None = None,
    ) -> Replayed:
        """One run of a program; of its results those that are `used`, None for all."""
        jaxpr, consts = opened(program)
        known = self._arithmetic.held
        values = dict(zip(jaxpr.constvars, map(known, consts), strict=False))
        values.update(zip(jaxpr.invars, operands, strict=True))
        records: Records = {}

        def read(atom: Any) -> Any:
            return known(atom.val) if is_literal(atom) else values[atom]

        if used is None:
            used = range(len(jaxpr.outvars))
        needed = self._needed(jaxpr, site, used)
        for index in sorted(needed):
            equation = jaxpr.eqns[index]
            here = site.inside(equation, index)
            inputs = [read(atom) for atom in equation.invars]
            results, record = self._equation(jaxpr, here, inputs, needed[index])
            values.update(zip(equation.outvars, results, strict=True))
            if record is not None:
                records[index] = record
        found = enumerate(jaxpr.outvars)
        return [read(x) if i in used else None for i, x in found], records

    def _needed(
        self, jaxpr: Any, site: Site, used: Collection[int]
    ) -> dict[int, list[int]]:
        """The equations to run, and of each the results that are used."""
        live = set(variables_in([jaxpr.outvars[i] for i in used]))
        needed = dict[int, list[int]]()
        for index in reversed(range(len(jaxpr.eqns))):
            equation = jaxpr.eqns[index]
            mine = [i for i, x in enumerate(equation.outvars) if x in live]
            is_watched = self._only is None or (*site.indices, index) in self._only
            if mine or is_watched or has_side_effects(equation):
                needed[index] = mine
                live.update(variables_in(equation.invars))
        return needed

    def _equation(
        self, jaxpr: Any, site: Site, inputs: list[Any], used: Collection[int]
    ) -> tuple[Sequence[Any], Any]:
        calls = calls_of(site.equation)
        if not calls:
            results = self._arithmetic.run(jaxpr, site, inputs)
            return self._see(site, inputs, results)
        if calls[0].kind == "call":
            results, records = self._call(site, calls[0], inputs, used)
        else:
            results, records = self._CONTROL[calls[0].kind](self, site, calls, inputs)
        return results, records or None

    def _call(
        self, site: Site, call: Call, inputs: list[Any], used: Collection[int]
    ) -> Replayed:
        if parameter(site.equation, "prevent_cse"):
            inputs = list(lax.optimization_barrier(tuple(inputs)))
        return self.run(call.program, inputs, site, used)

    def _see(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        seen = self._watch(site, inputs, results)
        if seen.record is None:
            return seen.results, None
        return seen.results, to_varying(seen.record, self._varying)

    def _full(self, shapes: Any, value: Any = ZERO_KEY) -> Any:
        def full(x):
            return to_varying(jnp.full(x.shape, value, x.dtype), self._varying)

        return jax.tree.map(full, shapes)

    def _scan(self, site: Site, calls: list[Call], inputs: list[Any]) -> Replayed:
        (call,) = calls
        last = call.consts + call.carried
        fixed, carry = inputs[: call.consts], inputs[call.consts : last]
        beside = site.beside(SLICES)

        def body(carry, slices):
            seen, of_slices = self._see(beside, (), slices)
            operands = [*fixed, *carry, *seen]
            results, records = self.run(call.program, operands, site)
            if of_slices is not None:
                records[SLICES] = of_slices
            return results[: call.carried], (results[call.carried :], records)

        carry, (stacks, records) = lax.scan(
            body,
            carry,
            inputs[last:],
            length=call.length,
            reverse=call.is_reversed,
        )
        return [*carry, *stacks], records

    def _while(self, site: Site, calls: list[Call], inputs: list[Any]) -> Replayed:
        body_call, condition = calls
        of_body = body_call.inputs(inputs)
        fixed, carry = of_body[: body_call.consts], of_body[body_call.consts :]

        def run(carry):
            return self.run(body_call.program, [*fixed, *carry], site)

        # Of `vmap`: each lane ends by itself.
        lanes = opened(condition.program).jaxpr.outvars[0].aval.shape
        unseen = _Replay(_see_nothing, self._arithmetic, self._varying)

        def is_on(carry):
            operands = [*inputs[: condition.consts], *carry]
            return unseen.run(condition.program, operands, site)[0][0]

        def stepped(carry):
            results, records = run(carry)
            if lanes:
                results = select_lanes(is_on(carry), results, carry)
                seen = {i: self._see_carried(site, i, x) for i, x in enumerate(results)}
                seen = {i: record for i, record in seen.items() if record is not None}
                records = {**records, CARRIED: seen} if seen else records
            return results, records

        def body(state):
            carry, iterations, kept = state
            results, records = stepped(carry)
            kept = {
                key: _after_iteration(kept[key], record, iterations)
                for key, record in _flat(records).items()
            }
            return results, iterations + jnp.uint32(1), kept

        shapes = _flat(jax.eval_shape(stepped, carry)[1])
        kept = {key: self._no_iteration_of(shape) for key, shape in shapes.items()}
        carry, iterations, kept = lax.while_loop(
            lambda state: jnp.any(is_on(state[0])),
            body,
            (carry, jnp.uint32(0), kept),
        )
        records = _nested(kept)
        if records:
            records[ITERATIONS] = to_varying(iterations.reshape(1), self._varying)
        return carry, records

    def _see_carried(self, site: Site, index: int, value: Any) -> Any:
        beside = site.beside(CARRIED, index)
        return self._see(beside, (), [value])[1]

    def _no_iteration_of(self, shape: Any) -> WhileRecords:
        """The records of an operation before the first iteration."""
        nothing = self._full(shape)
        axes = _axes_of(shape)
        never = jax.ShapeDtypeStruct((*axes, 2), jnp.uint32)
        iterations = self._full(never).at[..., 0].set(NEVER)
        return WhileRecords(nothing, iterations, nothing, iterations)

    def _cond(self, site: Site, calls: list[Call], inputs: list[Any]) -> Replayed:
        which, *operands = inputs
        branches = [partial(self._branch, x.program, x.site(site)) for x in calls]
        indices = range(len(branches))
        # Which branch it was is a record of each: what the watch says of inf.
        taken = [self._see_taken(site, index) for index in indices]
        shapes = []
        for run, mark in zip(branches, taken, strict=True):
            shape = jax.eval_shape(run, *operands)[1]
            shapes.append(shape if mark is None else {**shape, TAKEN: mark})

        def branch(index):
            def run(*operands):
                results, records = branches[index](*operands)
                found = dict(enumerate(map(self._full, shapes)))
                if taken[index] is not None:
                    records = {**records, TAKEN: taken[index]}
                found[index] = records
                return results, {i: x for i, x in found.items() if x}

            return run

        return lax.switch(which, [branch(i) for i in indices], *operands)

    def _see_taken(self, site: Site, index: int) -> Any:
        beside = site.beside(index, TAKEN)
        return self._see(beside, (), [jnp.float32(jnp.inf)])[1]

    def _branch(self, program: Program, site: Site, *operands: Any) -> Replayed:
        return self.run(program, operands, site)

    def _devices(self, site: Site, calls: list[Call], inputs: list[Any]) -> Replayed:
        (call,), equation = calls, site.equation
        axes, is_checked = manual_axes(equation), parameter(equation, "check_vma")
        assert axes is not None
        varying = axes if is_checked else frozenset[str]()
        inside = _Replay(self._watch, self._arithmetic, varying)

        def run(*operands):
            results, records = inside.run(call.program, operands, site)
            return results, jax.tree.map(lambda x: x[None], records)

        # Of each device its own, stacked along a new first axis.
        devices = jax.sharding.PartitionSpec(tuple(sorted(axes)))
        results, records = jax.shard_map(
            run,
            mesh=parameter(equation, "mesh"),
            in_specs=tuple(parameter(equation, "in_specs")),
            out_specs=(list(parameter(equation, "out_specs")), devices),
            check_vma=is_checked,
            axis_names=axes,
        )(*inputs)
        return results, jax.tree.map(_of_worst_device, records, is_leaf=_is_record)

    _CONTROL: ClassVar = {
        "scan": _scan,
        "while": _while,
        "branch": _cond,
        "devices": _devices,
    }


def _see_nothing(site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Watched:
    del site, inputs
    return Watched(results)


def select_lanes(pred: Array, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """The new values in the active lanes, the old ones in the others."""

    def select(new, old):
        dimensions = tuple(range(pred.ndim))
        return lax.select(lax.broadcast_in_dim(pred, new.shape, dimensions), new, old)

    return jax.tree.map(select, list(new), list(old))


def _is_record(node: Any) -> bool:
    return not isinstance(node, dict)


def _flat(records: Records) -> dict[tuple[int, ...], Any]:
    """The records of operations, by their indices."""
    flat, _ = jax.tree_util.tree_flatten_with_path(records, is_leaf=_is_record)
    return {tuple(key.key for key in path): record for path, record in flat}


def _nested(flat: dict[tuple[int, ...], Any]) -> Records:
    records: Records = {}
    for indices, record in flat.items():
        inner = records
        for index in indices[:-1]:
            inner = inner.setdefault(index, {})
        inner[indices[-1]] = record
    return records


def _axes_of(record: Any) -> tuple[int, ...]:
    """The lengths of the scans around an operation."""
    return jax.tree.leaves(record)[0].shape[:-1]


def _is_bad(record: Any) -> tuple[Array, Array]:
    """Whether a number of an operation is inf or NaN, and whether one is NaN."""
    if isinstance(record, WhileRecords):
        bad, _ = _is_bad(record.bad)
        _, nan = _is_bad(record.nan)
        return bad, nan
    bad = (record >= INF_KEY) | (record <= MINUS_INF_KEY)
    nan = (record > INF_KEY) | (record < MINUS_INF_KEY)
    return jnp.any(bad, axis=-1), jnp.any(nan, axis=-1)


def _after_iteration(old: WhileRecords, new: Any, iteration: Array) -> WhileRecords:
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
