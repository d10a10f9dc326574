# SPDX-License-Identifier: Apache-2.0
"""Runs a program once, compiled, with the size of each result beside it.

The records, two numbers for each array:

    an operation      the two ends of each result; on the device in its own dtype, but
                      in `while`, branches and `shard_map`, which work on float32's
    div, log, ...     after them the smallest magnitude of the operand that decides
    select_n          after them the ends of the elements taken from each case
    a scan            the ends of each slice that an iteration gets
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import AS_WRITTEN, Arithmetic
from jls._program.control import Indices, Key, Site
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import is_inexact_atom, is_literal
from jls._program.primitives import primitive_of
from jls._program.recorder import Recorder, fast_compile_options
from jls._program.records import Records
from jls._program.replay import Watched
from jls._tools.origin.measure import ends_of, in_float32, own_ends_of


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


Record = Callable[
    [Site, Sequence[Any], Sequence[Any]], Array | tuple[Array | None, ...] | None
]


class RecordedProgram:
    """A program with a record beside each operation that its roots depend on.

    Args:
      main: the frame of a program.
      roots: the variables to follow back.
      at_roots: whether only the operations that make the roots are recorded: XLA
        compiles that in the time of the program itself.
      only: the operations to record, by their places in the program; None for all.
      beside: whether arguments, slices of loops and taken branches are recorded too.
        Without them it is a closer look at what another program has found.
      options: of XLA, for which the user's function asks.
      arithmetic: how it is computed.
      record: makes the record of an operation, from its site, operands and results;
        by default of the ends of its results.
    """

    def __init__(
        self,
        main: Frame,
        roots: Iterable[Variable],
        at_roots: bool = False,
        only: frozenset[Indices] | None = None,
        beside: bool = True,
        options: Mapping[str, Any] | None = None,
        arithmetic: Arithmetic = AS_WRITTEN,
        record: Record | None = None,
    ) -> None:
        self._record = record or self._record_ends
        self.landmarks, self._beside = only, beside
        behind_roots = to_nearest_records(roots) if at_roots else behind(roots)
        inputs = enumerate(main.jaxpr.invars)
        self._read = {i for i, x in inputs if beside and (main, x) in behind_roots}
        self._wanted = main.makers_of(behind_roots)
        every = recordable(main, behind_roots)
        self.operations = {x for x in every if only is None or x in only}
        self._own = {frame.site.indices for frame in _calls_and_scans(main)}
        self._dtypes: dict[tuple[int, ...], list[Any]] = {}  # of records of operations
        self._count = 0  # of what was recorded
        is_quick = arithmetic is not AS_WRITTEN or not beside
        self._recorder = Recorder(
            main,
            self._wanted if beside else self.operations,
            self._watch,
            arithmetic,
            options,
            fast_compile_options() if is_quick else None,
        )

    def __call__(self, inputs: Sequence[Any], compiled: bool = True) -> Records:
        """One run; without `compiled` one operation at a time."""
        found = self._recorder(inputs, compiled=compiled)
        self._bring_to_float32(found)
        return found._replace(only=self.landmarks)

    def _bring_to_float32(self, records: Records) -> None:
        """Replaces the records in their own dtypes by ends."""
        places = [(records.at(x[:-1]), x[-1]) for x in self._dtypes]
        keys = [key for inside, index in places for key in inside[index]]
        dtypes = [dtype for every in self._dtypes.values() for dtype in every]
        found, start = in_float32(keys, dtypes), 0
        for inside, index in places:
            end = start + len(inside[index])
            ends = np.stack(found[start:end], axis=-1)
            inside[index], start = ends.reshape(*ends.shape[:-1], -1, 2), end

    def _watch(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Watched:
        if site.indices[0] == Key.ARGUMENTS:
            if site.indices[1] not in self._read:
                return Watched(results)
            return Watched(results, self._own_record(site, results))
        beside = next((i for i, x in enumerate(site.indices) if x < 0), None)
        if beside is not None:  # what a loop slices or carries, which branch it was
            around = beside - (site.indices[beside] == Key.TAKEN)
            is_wanted = self._beside and site.indices[:around] in self._wanted
            return Watched(results, ends_of(results) if is_wanted else None)
        equation = site.equation
        if results and all(map(is_literal, equation.invars)):
            # Made only of numbers, such as a mask: XLA would take seconds to fold it.
            results = lax.optimization_barrier(tuple(results))
        if site.indices not in self.operations:
            return Watched(results)
        self._count += 1
        if self._count % _CHAIN == 0:
            results = lax.optimization_barrier(tuple(results))
        return Watched(results, self._record(site, inputs, results))

    def _record_ends(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Array | tuple[Array | None, ...] | None:
        arrays = list(results)
        if site.equation.primitive.name == "select_n":
            arrays += _taken(*inputs)
        singular = primitive_of(site.equation).singular
        if singular is not None:
            arrays.append(jnp.abs(inputs[singular]))
        if site.indices[:-1] not in self._own:
            return ends_of(arrays)
        return self._own_record(site, arrays)

    def _own_record(self, site: Site, arrays: Sequence[Any]) -> tuple[Array, ...]:
        keys, self._dtypes[site.indices] = own_ends_of(arrays)
        return keys


def both(
    first: RecordedProgram, second: RecordedProgram
) -> Callable[[Sequence[Any]], Records]:
    """Runs two programs that record different operations of one, as if they were one.

    The records of the first count where the second has none.
    """

    def run(inputs: Sequence[Any]) -> Records:
        found = first(inputs)
        return found._replace(tree=_merged(second(inputs).tree, found.tree))

    return run


def _merged(records: Any, more: Any) -> Any:
    if not (isinstance(records, dict) and isinstance(more, dict)):
        return more if records is None else records
    keys = {**records, **more}
    return {key: _merged(records.get(key), more.get(key)) for key in keys}


# XLA recomputes a chain of fused operations for each of them that is recorded, one of 8
# in 36 operations. So it is broken after this many: that keeps an array in memory.
_CHAIN = 8


def recordable(main: Frame, variables: Container[Variable]) -> set[Indices]:
    """The places of the operations that make these, where they can be recorded."""
    return {
        frame.indices_of(index)
        for frame, index in main.operations()
        if any(
            (frame, x) in variables and as_large_as(frame.jaxpr.eqns[index], i) is None
            for i, x in enumerate(frame.jaxpr.eqns[index].outvars)
        )
    }


def to_nearest_records(roots: Iterable[Variable]) -> set[Variable]:
    """The roots, and what leads from the records that tell their sizes to them."""

    def sources(frame: Frame, atom: Any) -> list[Variable]:
        maker = frame.makers.get(atom)
        if maker is None or frame.called(maker.position):
            return frame.sources(atom)
        same = as_large_as(frame.jaxpr.eqns[maker.position], maker.result)
        return [] if same is None else [(frame, same)]

    return behind(roots, sources)


def _calls_and_scans(frame: Frame) -> Iterator[Frame]:
    """The frame, and those below it that are only in calls and scans."""
    yield frame
    for index in range(len(frame.jaxpr.eqns)):
        for called in frame.called(index):
            if called.kind in ("call", "scan"):
                yield from _calls_and_scans(called)


def _taken(which: Array, *cases: Array) -> list[Array]:
    """For each case of a `select_n` the elements that it takes, else 0."""
    which = jnp.asarray(which).astype(jnp.int32)
    pairs = enumerate(map(jnp.asarray, cases))
    return [jnp.where(which == i, x, jnp.zeros_like(x)) for i, x in pairs]
