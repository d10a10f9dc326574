# SPDX-License-Identifier: Apache-2.0
"""Runs a program once, compiled, with the size of each result beside it.

The records, two numbers for each array:

    an operation      the two ends of each result; on the device in its own dtype, but
                      in `while`, branches and `shard_map`, which work on float32's
    div, log, ...     after them the smallest magnitude of the operand that decides
    select_n          after them the ends of the elements taken from each case
    a scan            the ends of each slice that an iteration gets
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import AS_WRITTEN
from jls._program.control import Site
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import Program, is_inexact_atom, is_literal
from jls._program.primitives import primitive_of
from jls._program.replay import (
    TAKEN,
    ZERO_KEY,
    Records,
    Seen,
    WhileRecords,
    replay,
)
from jls._tools.origin.measure import ends, in_float32, own_ends

Numbers = tuple[int, ...]  # the place of an operation in a program


def record_of(records: Any, numbers: Numbers) -> Any:
    """The record of an operation in a run, by its place; None if there is none."""
    for number in numbers:
        records = records.get(number) if isinstance(records, dict) else None
    return records.bad if isinstance(records, WhileRecords) else records


def as_large_as(equation: Any, result: int) -> Any | None:
    """The operand that is as large as a result, for every number; None if none is."""
    operands = equation.invars
    if primitive_of(equation).moves in ("all", "same"):
        return operands[result] if len(operands) == len(equation.outvars) else None
    are_inexact = all(map(is_inexact_atom, (operands[:1] + equation.outvars[:1])))
    is_cast = equation.primitive.name == "convert_element_type"
    if is_cast and are_inexact:
        old, new = (jnp.finfo(x.aval.dtype) for x in (operands[0], equation.outvars[0]))
        is_wider = new.bits > old.bits and float(new.max) >= float(old.max)
        return operands[0] if is_wider or new.dtype == old.dtype else None
    return None


class Recording(NamedTuple):
    """The records of one run of a program."""

    arguments: list[np.ndarray]  # u32[2]: the ends
    records: Records


class RecordedProgram:
    """A program with a record beside each operation that its roots depend on.

    Args:
      program: a jaxpr.
      root: its frame.
      roots: the variables to follow back.
      at_roots: whether only the operations that make the roots are recorded: XLA
        compiles that in the time of the program itself.
      only: the operations to record, by their places in the program; None for all.
      beside: whether arguments, slices of loops and taken branches are recorded too.
        Without them it is a closer look at what another program has found.
    """

    ARITHMETIC = AS_WRITTEN

    def __init__(
        self,
        program: Program,
        root: Frame,
        roots: Iterable[Variable],
        at_roots: bool = False,
        only: Container[Numbers] | None = None,
        beside: bool = True,
    ) -> None:
        self._program = program
        behind_roots = to_nearest_records(roots) if at_roots else behind(roots)
        self._read = [beside and (root, x) in behind_roots for x in root.jaxpr.invars]
        self._wanted = makers_of(root, behind_roots)
        self._beside = beside
        every = recordable(root, behind_roots)
        self.operations = {x for x in every if only is None or x in only}
        self._own = {frame.site.numbers for frame in _calls_and_scans(root)}
        self._dtypes: dict[tuple[int, ...], list[Any]] = {}  # of records of operations
        self._count = 0  # of what was recorded
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, inputs: Sequence[Any], compiled: bool = True) -> Recording:
        """One run; without `compiled` one operation at a time."""
        inputs = [jnp.asarray(x) for x in inputs]
        run = self.compiled(inputs) if compiled else self._run
        arguments, records = jax.tree.map(np.asarray, run(inputs))
        self._bring_to_float32(records)
        return Recording(arguments, records)

    def compiled(self, inputs: Sequence[Any]) -> jax.stages.Compiled:
        """The program for inputs like these, compiled at the first call."""
        if self._compiled is None:
            inputs = [jnp.asarray(x) for x in inputs]
            lowered = jax.jit(self._run).lower(inputs)
            self._compiled = self._compile(lowered)
        return self._compiled

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        is_quick = self.ARITHMETIC is not AS_WRITTEN or not self._beside
        return lowered.compile(_quickly() if is_quick else None)

    def _bring_to_float32(self, records: Records) -> None:
        """Replaces the records in their own dtypes by `u32[..., n]`."""
        places = []
        for numbers in self._dtypes:
            inside = records
            for number in numbers[:-1]:
                inside = inside[number]
            places.append((inside, numbers[-1]))
        keys = [key for inside, number in places for key in inside[number]]
        dtypes = [dtype for every in self._dtypes.values() for dtype in every]
        found, start = in_float32(keys, dtypes), 0
        for inside, number in places:
            end = start + len(inside[number])
            inside[number], start = np.stack(found[start:end], axis=-1), end

    def _run(self, inputs: Sequence[Array]) -> tuple[list[Array], Records]:
        _, records = replay(
            self._program, inputs, self._watch, arithmetic=self.ARITHMETIC
        )
        pairs = zip(inputs, self._read, strict=True)
        nothing = jnp.full(2, ZERO_KEY)
        sizes = [jnp.stack(ends(x)) if is_read else nothing for x, is_read in pairs]
        return sizes, records

    def _watch(self, site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Seen:
        beside = next((i for i, x in enumerate(site.numbers) if x < 0), None)
        if beside is not None:  # what a loop slices or carries, which branch it was
            around = beside - (site.numbers[beside] == TAKEN)
            is_wanted = self._beside and site.numbers[:around] in self._wanted
            return Seen(results, ends_of(results) if is_wanted else None)
        equation = site.equation
        if results and all(map(is_literal, equation.invars)):
            # Of numbers alone, such as a mask: XLA would take seconds to fold them.
            results = lax.optimization_barrier(tuple(results))
        if site.numbers not in self.operations:
            return Seen(results)
        self._count += 1
        if self._count % _CHAIN == 0:
            results = lax.optimization_barrier(tuple(results))
        return Seen(results, self._record(site, inputs, results))

    def _record(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Array | tuple[Array, ...] | None:
        arrays = list(results)
        if site.equation.primitive.name == "select_n":
            arrays += _taken(*inputs)
        singular = primitive_of(site.equation).singular
        if singular is not None:
            arrays.append(jnp.abs(inputs[singular]))
        if site.numbers[:-1] not in self._own:
            return ends_of(arrays)
        keys, self._dtypes[site.numbers] = own_ends_of(arrays)
        return keys


def _quickly() -> dict[str, Any]:
    """Options with which XLA compiles in less time what runs a few times.

    The last bits may differ: so what decides whether a number is finite goes without.
    """
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0} if is_cpu else {}


class TwoPrograms:
    """Two programs that record different operations of one, as if they were one.

    Args:
      first: its records count where the other has none.
      second: the other.
    """

    def __init__(self, first: RecordedProgram, second: RecordedProgram) -> None:
        self._first, self._second = first, second

    def __call__(self, inputs: Sequence[Any], compiled: bool = True) -> Recording:
        """One run of each."""
        found = (x(inputs, compiled) for x in (self._first, self._second))
        (arguments, records), (_, more) = found
        return Recording(arguments, _merged(more, records))


def _merged(records: Any, more: Any) -> Any:
    if not (isinstance(records, dict) and isinstance(more, dict)):
        return more if records is None else records
    numbers = {**records, **more}
    return {key: _merged(records.get(key), more.get(key)) for key in numbers}


# XLA recomputes a chain of fused operations for each of them that is recorded. So the
# chain is broken after this many.
_CHAIN = 8


def ends_of(arrays: Sequence[Any]) -> Array | None:
    """The ends of each array, one after the other; zeros for integers."""
    nothing = [jnp.uint32(ZERO_KEY)] * 2
    keys = [key for x in arrays for key in (ends(x) if is_inexact_atom(x) else nothing)]
    return jnp.stack(keys) if keys else None


def own_ends_of(arrays: Sequence[Any]) -> tuple[tuple[Array, ...], list[Any]]:
    """The ends of each array in its own dtype, and the dtype of each.

    To stack them, and to bring them to float32, would double the kernels of a program.
    """
    nothing = [jnp.uint32(ZERO_KEY)] * 2, np.dtype(np.float32)
    pairs = [own_ends(x) if is_inexact_atom(x) else nothing for x in arrays]
    keys = tuple(key for found, _ in pairs for key in found)
    return keys, [dtype for found, dtype in pairs for _ in found]


def makers_of(root: Frame, variables: Container[Variable]) -> set[Numbers]:
    """The places of the operations and calls that have one of these as a result."""
    return {
        (*frame.site.numbers, number)
        for frame in root.all()
        for number, equation in enumerate(frame.jaxpr.eqns)
        if any((frame, x) in variables for x in equation.outvars)
    }


def recordable(root: Frame, variables: Container[Variable]) -> set[Numbers]:
    """The places of the operations of which records can be made, as of `makers_of`."""
    found = set[Numbers]()
    for frame in root.all():
        for number, equation in enumerate(frame.jaxpr.eqns):
            results = enumerate(equation.outvars)
            if not frame.called(number) and any(
                (frame, x) in variables and as_large_as(equation, i) is None
                for i, x in results
            ):
                found.add((*frame.site.numbers, number))
    return found


def to_nearest_records(roots: Iterable[Variable]) -> set[Variable]:
    """The roots, and what leads from the records that tell their sizes to them."""
    stack, found = list(roots), set[Variable]()
    while stack:
        variable = stack.pop()
        frame, atom = variable
        if is_literal(atom) or not is_inexact_atom(atom) or variable in found:
            continue
        found.add(variable)
        maker = frame.makers.get(atom)
        if maker is None or frame.called(maker.number):
            stack += frame.sources(atom)
        else:
            same = as_large_as(frame.jaxpr.eqns[maker.number], maker.result)
            stack += [] if same is None else [(frame, same)]
    return found


def _calls_and_scans(frame: Frame) -> Iterator[Frame]:
    """The frame, and those below it that are in calls and scans alone."""
    yield frame
    for number in range(len(frame.jaxpr.eqns)):
        for called in frame.called(number):
            if called.kind in ("call", "scan"):
                yield from _calls_and_scans(called)


def _taken(which: Array, *cases: Array) -> list[Array]:
    """Of each case of a `select_n` the elements that it takes, else 0."""
    which = jnp.asarray(which).astype(jnp.int32)
    pairs = enumerate(map(jnp.asarray, cases))
    return [jnp.where(which == i, x, jnp.zeros_like(x)) for i, x in pairs]
