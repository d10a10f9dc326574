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

What is kept of a while loop and of several devices can be chosen: see `Merging` in
`records`.
"""

from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jls._program.alone import AS_WRITTEN, Arithmetic
from jls._program.control import (
    MAIN,
    Call,
    Indices,
    Key,
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
from jls._program.records import WORST, ZERO_KEY, Merging, Tree


class Watched(NamedTuple):
    """The results with which the program goes on, and the record of an operation."""

    results: Sequence[Any]  # of the same shapes and dtypes
    record: Any = None  # see `records`; or what `merging` merges


Replayed = tuple[list[Any], Tree]
Watch = Callable[[Site, Sequence[Any], Sequence[Any]], Watched]
Around = Callable[[Site, Callable[..., Any]], Callable[..., Any]]


def replay(
    program: Program,
    operands: Sequence[Any],
    watch: Watch,
    arithmetic: Arithmetic = AS_WRITTEN,
    only: Container[Indices] | None = None,
    merging: Merging = WORST,
    around: Around = lambda site, run: run,
) -> Replayed:
    """The results of a program, and the records of its operations.

    Args:
      program: a jaxpr.
      operands: its inputs; arrays, or tracers.
      watch: called with the site, the operands and the results of each operation,
        perhaps more than once. Slices, taken branches and carries come as the results
        of an operation with one of the negative indices above.
      arithmetic: how it is computed. `BOTH` gives the watch pairs, and returns them.
      only: the places of the operations to watch, and of the calls around them. What
        they do not need is left out, and a result that is not computed is None.
      merging: how the records of several iterations or devices become one.
      around: gives the function that is called for a loop, branches or a `shard_map`,
        from its site and the function that runs it.
    """
    held = list(map(arithmetic.held, operands))
    used = None if only is None else ()
    run = _Replay(watch, arithmetic, only, merging, around).run
    return run(program, held, MAIN, used)


class _Replay(NamedTuple):
    """A replay with one watch; each `shard_map` in it has a replay of its own."""

    watch: Watch
    arithmetic: Arithmetic
    only: Container[Indices] | None
    merging: Merging
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
        jaxpr, records = opened(program).jaxpr, Tree()
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
                unseen = self._replace(watch=lambda site, x, results: Watched(results))
                return unseen.run(call.program, inputs, site)
            records: Tree = {}
            if call.kind == "scan":
                last = call.consts + call.carried
                beside = site.beside(Key.SLICES)
                slices, records[Key.SLICES] = self._see(beside, (), inputs[last:])
                inputs = [*inputs[:last], *slices]
            if call.branch is not None:  # a record of it: what the watch says of inf
                beside = site.beside(call.branch, Key.TAKEN)
                _, records[Key.TAKEN] = self._see(beside, (), [jnp.float32(jnp.inf)])
            results, found = inside.run(call.program, inputs, call.site(site))
            return results, found | _recorded(records)

        if kind == "while":
            begin = partial(self._begin, site)
            results, (count, records) = rebuild(equation, calls, inputs, run, begin)
            if records:
                records[Key.ITERATIONS] = to_varying(
                    jnp.full((1, 2), count), self.varying
                )
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
                places = (site.beside(Key.CARRIED, i) for i in range(len(results)))
                pairs = zip(places, results, strict=True)
                every = (self._see(beside, (), [x])[1] for beside, x in pairs)
                carried = _recorded(dict(enumerate(every)))
                records = records | ({Key.CARRIED: carried} if carried else {})
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


def _recorded(records: Tree) -> Tree:
    return {key: record for key, record in records.items() if record is not None}


def _is_record(node: Any) -> bool:
    return not isinstance(node, dict)
