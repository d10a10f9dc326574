# SPDX-License-Identifier: Apache-2.0
"""Runs a program again, and has a say in each of its operations.

It goes into calls, rematerialized programs, custom rules, loops, branches and programs
over several devices, so that the operations in there are seen too. What is recorded of
them comes out beside the results:

    call              the records of its operations
    scan              the same, stacked along a first axis
    while             of each operation that of the first round in which it was bad
    cond              the records of all branches, zeros for those that were not taken
    shard_map         of each operation that of the device with the largest numbers
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import eval_jaxpr

from jls._program.jaxprs import (
    called_program,
    is_literal,
    manual_axes,
    opened,
    scan_counts,
    to_varying,
)
from jls._program.walk import ROOT, Site

# What is recorded of an operation: u32[..., n, 1 + 2 * whiles], with an axis for each
# scan around it and a row for each number. The first of its columns are the bits of a
# float; it is bad if they are at least those of inf. Then, for each while loop around
# it, the first and the last round in which one was bad.
Records = dict[int, Any]  # by the number of the equation: of an operation, or of a call

# What stands beside the equations of a program in its records.
SLICES = -1  # of a scan: what the watch says of the slices that each round gets
ROUNDS = -2  # of a while loop: how many there were
TAKEN = -3  # of a branch: inf if it was taken

INF = 0x7F80_0000
NEVER = np.uint32(0xFFFF_FFFF)
_WHOLE = ("xla_pmap", "run_state")


class Seen(NamedTuple):
    """What becomes of the results of an operation, and what is recorded of them."""

    results: Sequence[Any]  # of the same shapes and dtypes
    record: Array | None = None  # u32[n, 1]


Watch = Callable[[Site, Sequence[Any], Sequence[Any]], Seen]


def replay(
    program: Any, operands: Sequence[Any], watch: Watch, site: Site = ROOT
) -> tuple[list[Any], Records]:
    """The results of a program, and what was recorded on the way.

    Args:
      program: a jaxpr.
      operands: its inputs; arrays, or tracers.
      watch: gets the site of each operation, its operands and its results, perhaps more
        than once. The slices of a scan come as the results of an operation of the
        number `SLICES`.
      site: the calls around the program.
    """
    return _Replay(watch).run(program, operands, site)


class _Replay:
    def __init__(self, watch: Watch, varying: frozenset[str] = frozenset()) -> None:
        self._watch = watch
        self._varying = varying  # the axes of shard_map that JAX keeps track of

    def run(
        self, program: Any, operands: Sequence[Any], site: Site
    ) -> tuple[list[Any], Records]:
        jaxpr, consts = opened(program)
        values = dict(zip(jaxpr.constvars, consts, strict=False))
        values.update(zip(jaxpr.invars, operands, strict=True))
        records: Records = {}

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        for number, equation in enumerate(jaxpr.eqns):
            here = site.inside(equation, number)
            inputs = [read(atom) for atom in equation.invars]
            results, record = self._equation(jaxpr, here, inputs)
            values.update(zip(equation.outvars, results, strict=True))
            if record is not None:
                records[number] = record
        return [read(atom) for atom in jaxpr.outvars], records

    def _equation(
        self, jaxpr: Any, site: Site, inputs: list[Any]
    ) -> tuple[Sequence[Any], Any]:
        name, called = site.equation.primitive.name, called_program(site.equation)
        if name in self._CONTROL:
            results, records = self._CONTROL[name](self, site, inputs)
        elif called is not None and name not in _WHOLE:
            if site.equation.params.get("prevent_cse"):
                inputs = list(lax.optimization_barrier(tuple(inputs)))
            results, records = self.run(called, inputs, site)
        else:
            results = _run_alone(jaxpr, site.equation, inputs)
            return self._see(site, inputs, results)
        return results, records or None

    def _see(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Sequence[Any], Any]:
        seen = self._watch(site, inputs, results)
        if seen.record is None:
            return seen.results, None
        return seen.results, to_varying(seen.record, self._varying)

    def _full(self, shapes: Any, value: int = 0) -> Any:
        def full(x):
            return to_varying(jnp.full(x.shape, value, x.dtype), self._varying)

        return jax.tree.map(full, shapes)

    def _scan(self, site: Site, inputs: list[Any]) -> tuple[list[Any], Records]:
        params = site.equation.params
        consts, carried = scan_counts(site.equation)
        fixed, carry = inputs[:consts], inputs[consts : consts + carried]
        beside = Site(site.equations, (*site.numbers, SLICES))

        def body(carry, slices):
            seen, of_slices = self._see(beside, (), slices)
            operands = [*fixed, *carry, *seen]
            results, records = self.run(params["jaxpr"], operands, site)
            if of_slices is not None:
                records[SLICES] = of_slices
            return results[:carried], (results[carried:], records)

        carry, (stacks, records) = lax.scan(
            body,
            carry,
            inputs[consts + carried :],
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*carry, *stacks], records

    def _while(self, site: Site, inputs: list[Any]) -> tuple[list[Any], Records]:
        params = site.equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        fixed, carry = inputs[first:last], inputs[last:]

        def run(carry):
            return self.run(params["body_jaxpr"], [*fixed, *carry], site)

        def goes_on(state):
            cond, consts = opened(params["cond_jaxpr"])
            (is_on,) = eval_jaxpr(cond, consts, *inputs[:first], *state[0])
            return is_on

        def body(state):
            carry, rounds, kept = state
            results, records = run(carry)
            kept = jax.tree.map(partial(_first, rounds=rounds), kept, records)
            return results, rounds + jnp.uint32(1), kept

        nothing = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 2), x.dtype),
            jax.eval_shape(run, carry)[1],
        )
        kept = jax.tree.map(lambda x: x.at[..., -2].set(NEVER), self._full(nothing))
        carry, rounds, records = lax.while_loop(
            goes_on, body, (carry, jnp.uint32(0), kept)
        )
        if records:
            records[ROUNDS] = to_varying(rounds.reshape(1, 1), self._varying)
        return carry, records

    def _cond(self, site: Site, inputs: list[Any]) -> tuple[list[Any], Records]:
        index, *operands = inputs
        branches = [
            partial(self._branch, program, Site(site.equations, (*site.numbers, i)))
            for i, program in enumerate(site.equation.params["branches"])
        ]
        taken = jax.ShapeDtypeStruct((1, 1), jnp.uint32)
        shapes = []
        for run in branches:
            shape = jax.eval_shape(run, *operands)[1]
            shapes.append({**shape, TAKEN: taken} if shape else shape)
        if not any(shapes):
            plain = [partial(_results_of, run) for run in branches]
            return lax.switch(index, plain, *operands), {}

        def branch(number):
            def run(*operands):
                results, records = branches[number](*operands)
                found = dict(enumerate(map(self._full, shapes)))
                if records:
                    found[number] = {**records, TAKEN: self._full(taken, INF)}
                return results, found

            return run

        numbers = range(len(branches))
        return lax.switch(index, [branch(n) for n in numbers], *operands)

    def _branch(
        self, program: Any, site: Site, *operands: Any
    ) -> tuple[list[Any], Records]:
        return self.run(program, operands, site)

    def _shard_map(self, site: Site, inputs: list[Any]) -> tuple[list[Any], Records]:
        params, program = site.equation.params, called_program(site.equation)
        axes = manual_axes(site.equation)
        inside = _Replay(self._watch, axes if params["check_vma"] else frozenset())
        has_records = False

        def run(*operands):
            nonlocal has_records
            results, records = inside.run(program, operands, site)
            has_records = bool(records)
            return results, jax.tree.map(lambda x: x[None], records)

        # Of each device its own, stacked along a new first axis.
        devices = jax.sharding.PartitionSpec(tuple(sorted(axes)))
        results, records = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), devices),
            check_vma=params["check_vma"],
            axis_names=axes,
        )(*inputs)
        return results, jax.tree.map(_of_worst_device, records)

    _CONTROL: ClassVar = {
        "scan": _scan,
        "while": _while,
        "cond": _cond,
        "shard_map": _shard_map,
    }


def _results_of(run: Any, *operands: Any) -> list[Any]:
    return run(*operands)[0]


def _run_alone(jaxpr: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """The results of one operation: a program of its own."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {x: value for x, value in pairs if not is_literal(x)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(equation.outvars),
        eqns=[equation],
    )
    return eval_jaxpr(alone, [], *known.values())


def _first(old: Array, new: Array, *, rounds: Array) -> Array:
    """What is kept of an operation in a while loop, after one more round."""
    numbers, first, last = old[..., :-2], old[..., -2:-1], old[..., -1:]
    is_bad = jnp.any(new[..., :1] >= INF, axis=-2, keepdims=True)
    is_first = is_bad & (first == NEVER)
    larger = jnp.maximum(numbers, new)
    kept = jnp.where(first == NEVER, jnp.where(is_first, new, larger), numbers)
    first = jnp.where(is_first, rounds, first)
    last = jnp.where(is_bad, rounds, last)
    return jnp.concatenate([kept, first, last], axis=-1)


def _of_worst_device(record: Array) -> Array:
    """What is kept of an operation on several devices, along the first axis."""
    numbers = jnp.max(record[..., 0], axis=-1)
    worst = jnp.argmax(numbers, axis=0)[None, ..., None, None]
    return jnp.take_along_axis(record, worst, axis=0)[0]
