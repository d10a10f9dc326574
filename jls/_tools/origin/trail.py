# SPDX-License-Identifier: Apache-2.0
"""Follows what is not finite back to the operations that made it of finite numbers."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jls._program.control import Indices, Site
from jls._program.frames import Frame
from jls._program.jaxprs import is_inexact_atom, is_literal
from jls._program.primitives import Primitive, primitive_of
from jls._program.replay import (
    CARRIED,
    INF_KEY,
    ITERATIONS,
    MINUS_INF_KEY,
    NEVER,
    SLICES,
    TAKEN,
    WhileRecords,
)
from jls._tools.origin.measure import NOTHING, Size, read_size, size_of
from jls._tools.origin.record import RunRecords, as_large_as


class Range(NamedTuple):
    """The range of the numbers in an operand."""

    nearest: float  # the smallest magnitude
    low: float  # NaN if it is not known, as in some iterations of a while loop
    high: float


class RunValue(NamedTuple):
    """A value in a run: a variable of a program, in some iteration of each loop."""

    frame: Frame
    atom: Any
    # Of each loop around it, outermost first; in a scan, the index of the slice.
    iterations: tuple[int, ...] = ()


class Constant(NamedTuple):
    """A number in the program, or what its function closes over."""

    value: Any
    reader: "OpResult | None" = None  # the operation that it is an operand of


class Argument(NamedTuple):
    """An input of the whole program."""

    position: int


class Slice(NamedTuple):
    """The slice of an array that an iteration of a scan gets."""

    frame: Frame
    position: int  # among the arrays that are sliced
    iterations: tuple[int, ...]
    whole: RunValue


class Stack(NamedTuple):
    """The stacked results of all iterations of a scan."""

    frame: Frame
    atom: Any
    iterations: tuple[int, ...]  # but for those of this scan


class OpResult(NamedTuple):
    """A result of an operation."""

    frame: Frame
    position: int
    result: int
    iterations: tuple[int, ...]

    @property
    def site(self) -> Site:
        return self.frame.site_of(self.position)


class LoopCarry(NamedTuple):
    """A carried value of a batched while loop: some lanes have ended before."""

    frame: Frame
    position: int
    iterations: tuple[int, ...]


Origin = Constant | Argument | Slice | Stack | LoopCarry | OpResult


class Shortcuts(NamedTuple):
    """How to go through a run in which some operations were not recorded.

    `jls._tools.origin.regions` finds it.
    """

    open: frozenset[Indices]  # the operations whose operands are known too
    beyond: dict[OpResult, list[RunValue]]  # from the others to what made them NaN


class LostError(Exception):
    """A search came to an operation of whose operands nothing is known."""


class Trail:
    """One run, to be followed back.

    Args:
      run: what was recorded of a program.
      leaves: its arguments in that run.
      shortcuts: through what was not recorded; None if all operations were.
    """

    def __init__(
        self,
        run: RunRecords,
        leaves: Sequence[Any] = (),
        shortcuts: Shortcuts | None = None,
    ) -> None:
        self.records, self.leaves = run.records, leaves
        self._arguments = run.arguments
        self.shortcuts = shortcuts
        # Bounds the memory of a long search.
        self._size = functools.lru_cache(1 << 20)(self._find_size)

    def size(self, value: RunValue) -> Size:
        """The largest and the smallest number of a value."""
        if is_literal(value.atom):
            return size_of(value.atom.val)
        return self._size(value)

    def is_bad(self, value: RunValue) -> bool:
        return self.size(value).is_bad

    def is_known(self, value: RunValue) -> bool:
        """Whether there is a record of a value: of a while loop not all are kept."""
        origin = self.origin(value)
        if isinstance(origin, Stack):
            return all(map(self.is_known, self._iterations_of(origin)))
        if isinstance(origin, OpResult):
            index = origin.position
        elif isinstance(origin, Slice):
            index = SLICES
        elif isinstance(origin, LoopCarry):
            index = (CARRIED, origin.position)
        else:
            return origin is not None
        return len(self._record(origin.frame, index, origin.iterations)) > 0

    def births(self, roots: Iterable[RunValue]) -> "list[FoundBirth]":
        """The births of inf and NaN in the roots, in the order of the program.

        Raises:
          LostError: with `shortcuts`, if they do not lead on.
        """
        stack: list[tuple[RunValue, OpResult | None]]
        stack = [(value, None) for value in roots if self.is_bad(value)]
        visited = set[Any]()
        births: list[FoundBirth] = []
        on_purpose: list[FoundBirth] = []  # inf that is written in the program
        while stack:
            value, reader = stack.pop()
            origin, size = self.origin(value), self.size(value)
            if isinstance(origin, OpResult):
                origin = self.first_in_a_row(origin, reader)
                size = self.size_of_result(origin)
            if isinstance(origin, Constant):
                birth = FoundBirth(origin._replace(reader=reader), size)
                (births if size.is_nan else on_purpose).append(birth)
                continue
            if origin is None or (key := identity_of(origin)) in visited:
                continue
            visited.add(key)
            if isinstance(origin, OpResult):
                if self.shortcuts and origin.site.indices not in self.shortcuts.open:
                    stack += [(x, origin) for x in self._beyond(origin)]
                    continue
                operands = self.operands(origin)
                causes = self._causes(origin, operands, size)
                causes = self._choices(origin, causes) or causes
                are_nan = any(self.size(x).is_nan for x in causes)
                if not causes or (size.is_nan and not are_nan):
                    births.append(
                        FoundBirth(origin, size, operands, self.range_of(origin))
                    )
                stack += [(cause, origin) for cause in causes]
            elif isinstance(origin, Argument):
                births.append(FoundBirth(origin, size))
            else:
                stack.append(self.through_loop(origin, reader))
        return sorted(births or on_purpose, key=self._order)

    def through_loop(
        self, origin: Slice | Stack | LoopCarry, reader: OpResult | None
    ) -> tuple[RunValue, OpResult | None]:
        """The bad value in another iteration or loop, and what it is read by."""
        if isinstance(origin, Slice):
            return self._source_of(origin), reader
        if isinstance(origin, Stack):
            return self._first_bad_of(origin), reader
        # Other lanes, which had ended, may have been bad before.
        change = self._last_change_of(origin)
        return change, _maker_of(change) or reader

    def _beyond(self, op: OpResult) -> "list[RunValue]":
        beyond = self.shortcuts.beyond if self.shortcuts else {}
        if op not in beyond:
            raise LostError
        return beyond[op]

    def _causes(
        self, op: OpResult, operands: "list[RunValue]", size: Size
    ) -> "list[RunValue]":
        """The operands that may have made a result bad."""
        equation = op.site.equation
        sizes = [self.size(x) for x in operands]
        if equation.primitive.name == "select_n":  # what is not taken does no harm
            sizes = self._taken(op, len(operands)) or sizes
        pairs = list(zip(operands, sizes, strict=True))
        if size.is_nan and any(x.is_nan for x in sizes):
            return [value for value, x in pairs if x.is_nan]
        bad = [value for value, x in pairs if x.is_bad]
        if primitive_of(equation).moves:  # a NaN that is moved stays one
            same = [value for value, x in pairs if x.nonfinite & size.nonfinite]
            return same or bad
        if size.is_nan or any(x.is_nan for x in sizes):
            return bad
        possible = _signs(primitive_of(equation), sizes) if bad else None
        return bad if possible is None or size.nonfinite <= possible else []

    def _choices(self, op: OpResult, causes: "list[RunValue]") -> "list[RunValue]":
        """The bad values for which a `select_n` has put a number of the program in.

        `jnp.hypot` gives inf where an operand is inf. [] if the causes are others.
        """
        is_choice = op.site.equation.primitive.name == "select_n"
        origins = [self.origin(x) for x in causes]
        if not (is_choice and causes and all(isinstance(x, Constant) for x in origins)):
            return []
        here = RunValue(op.frame, op.site.equation.invars[0], op.iterations)
        waiting, found, seen = [here], [], set[Any]()
        while waiting:
            value = waiting.pop()
            if is_inexact_atom(value.atom) and self.is_bad(value):
                found.append(value)
                continue
            origin = self.origin(value)
            # What only decides is not recorded, so its operands are asked.
            if not isinstance(origin, OpResult) or origin in seen:
                continue
            seen.add(origin)
            record = self._recorded(origin.frame, origin.position, origin.iterations)
            if not (is_inexact_atom(value.atom) and isinstance(record, np.ndarray)):
                waiting += [
                    RunValue(origin.frame, x, origin.iterations)
                    for x in origin.site.equation.invars
                    if not is_literal(x)
                ]
        return found

    def _taken(self, op: OpResult, count: int) -> list[Size]:
        """The sizes of the elements that a `select_n` takes from each case."""
        keys = self._record(op.frame, op.position, op.iterations)
        sizes = [read_size(keys[i : i + 2]) for i in range(2, len(keys), 2)]
        return sizes if len(sizes) == count else []

    def operands(self, op: OpResult) -> "list[RunValue]":
        """The floating-point operands of an operation."""
        equation = op.site.equation
        return [
            RunValue(op.frame, x, op.iterations)
            for x in equation.invars
            if is_inexact_atom(x)
        ]

    def range_of(self, op: OpResult) -> Range | None:
        """The range of the operand that decides whether a result is finite."""
        equation = op.site.equation
        singular = primitive_of(equation).singular
        if singular is None:
            return None
        operand = equation.invars[singular]
        keys = self._record(op.frame, op.position, op.iterations)
        offset = 2 * len(equation.outvars)
        is_real = is_inexact_atom(operand) and operand.aval.dtype.kind != "c"
        if not is_real or len(keys) < offset + 2:
            return None
        value = RunValue(op.frame, operand, op.iterations)
        high, low = self.size(value) if self.is_known(value) else (math.nan, math.nan)
        return Range(read_size(keys[offset:]).low, low, high)

    # What a value is.

    def origin(self, value: RunValue) -> Origin | None:
        """The origin of a value, behind calls and operations that keep its size."""
        while True:
            frame, atom, iterations = value
            if is_literal(atom):
                return Constant(atom.val)
            if atom in frame.consts:
                return Constant(frame.consts[atom])
            if atom in frame.inputs:
                found = self._of_input(frame, frame.inputs[atom], iterations)
            elif atom in frame.makers:
                found = self._of_result(frame, *frame.makers[atom], iterations)
            else:
                return None
            if not isinstance(found, RunValue):
                return found
            value = found

    def _of_input(
        self, frame: Frame, index: int, iterations: tuple[int, ...]
    ) -> RunValue | Origin | None:
        if frame.parent is None:
            return Argument(index)
        if not frame.is_loop:
            return RunValue(frame.parent, frame.given(index), iterations)
        consts, carried = frame.counts()
        outside = RunValue(frame.parent, frame.given(index), iterations[:-1])
        if index < consts:
            return outside
        if index >= consts + carried:
            return Slice(frame, index - consts - carried, iterations, outside)
        before = _iteration_before(frame, iterations[-1])
        if before is None:
            return outside
        if frame.has_lanes:
            return LoopCarry(frame, index - consts, (*iterations[:-1], before))
        result = frame.jaxpr.outvars[index - consts]
        return RunValue(frame, result, (*iterations[:-1], before))

    def _of_result(
        self, frame: Frame, index: int, result: int, iterations: tuple[int, ...]
    ) -> RunValue | Origin | None:
        called = frame.called(index)
        equation = frame.jaxpr.eqns[index]
        if not called:
            operand = as_large_as(equation, result)
            if operand is not None:
                return RunValue(frame, operand, iterations)
            return OpResult(frame, index, result, iterations)
        if called[0].kind == "branch":
            taken = [
                RunValue(child, child.jaxpr.outvars[result], iterations)
                for child in called
                if self._is_taken(child, iterations)
            ]
            # Of a while loop it is known that both were taken about then.
            return next(filter(self.is_bad, taken), taken[0]) if taken else None
        child = called[0]
        atom = child.jaxpr.outvars[result]
        if (
            child.has_lanes
            and (last := self._last_iteration(child, iterations)) is not None
        ):
            return LoopCarry(child, result, (*iterations, last))
        if not child.is_loop:
            return RunValue(child, atom, iterations)
        consts, carried = child.counts()
        if result >= carried:
            return Stack(child, atom, iterations)
        last = self._last_iteration(child, iterations)
        if last is None:
            return RunValue(frame, child.given(consts + result), iterations)
        return RunValue(child, atom, (*iterations, last))

    def _is_taken(self, branch: Frame, iterations: tuple[int, ...]) -> bool:
        keys = self._record(branch, TAKEN, iterations)
        return len(keys) > 0 and int(keys[0]) == INF_KEY

    def _last_iteration(self, loop: Frame, iterations: tuple[int, ...]) -> int | None:
        """The last iteration of a loop; None if it has none."""
        if loop.kind == "while":
            counted = self._record(loop, ITERATIONS, (*iterations, 0))
            count = int(counted[0]) if len(counted) else 0
            return count - 1 if count else None
        if not loop.length:
            return None
        return 0 if loop.is_reversed else loop.length - 1

    # How large it is.

    def _find_size(self, value: RunValue) -> Size:
        if not is_inexact_atom(value.atom):
            return NOTHING
        origin = self.origin(value)
        if isinstance(origin, Constant):
            return size_of(origin.value)
        if isinstance(origin, Argument):
            return read_size(self._arguments[origin.position])
        if isinstance(origin, Slice):
            keys = self._record(origin.frame, SLICES, origin.iterations)
            return read_size(keys[2 * origin.position :][:2]) if len(keys) else NOTHING
        if isinstance(origin, Stack):
            sizes = [self.size(x) for x in self._iterations_of(origin)]
            worst = [x for x in sizes if x.is_nan] or [x for x in sizes if x.is_bad]
            return max(worst or sizes, key=lambda x: x.magnitude, default=NOTHING)
        if isinstance(origin, LoopCarry):
            indices = (CARRIED, origin.position)
            keys = self._record(origin.frame, indices, origin.iterations)
            return read_size(keys) if len(keys) else NOTHING
        return self.size_of_result(origin) if isinstance(origin, OpResult) else NOTHING

    def size_of_result(self, op: OpResult) -> Size:
        keys = self._record(op.frame, op.position, op.iterations)
        return read_size(keys[2 * op.result :][:2]) if len(keys) else NOTHING

    def first_in_a_row(self, op: OpResult, reader: OpResult | None) -> OpResult:
        """The same result in the first of the iterations in a row in which it is bad.

        Of a while loop no other iteration was recorded.

        Args:
          op: the result.
          reader: the operation that reads it. In the loops that both share, in the same
            iteration, it may have been bad before, and not been read.
        """
        shared = _shared_loops(op, reader)
        iterations = list(op.iterations)
        for i, loop in enumerate(op.frame.loops()):
            if i < shared:
                continue
            found = self._recorded(op.frame, op.position, tuple(iterations), every=i)
            if isinstance(found, WhileRecords) and loop.kind == "while":
                kept = _iterations_with(found, iterations[i])
                iterations[i] = iterations[i] if kept is None else int(kept[0])
            elif isinstance(found, np.ndarray) and loop.kind == "scan":
                keys = found[:, 2 * op.result : 2 * op.result + 2]
                iterations[i] = _start_of_run(keys, iterations[i], loop.is_reversed)
        return op._replace(iterations=tuple(iterations))

    def _record(
        self, frame: Frame, index: int | tuple[int, ...], iterations: tuple[int, ...]
    ) -> np.ndarray:
        """The record of an operation in an iteration, `u32[n]`; [] if there is none."""
        found = self._recorded(frame, index, iterations)
        return found if isinstance(found, np.ndarray) else _NO_RECORD

    def _recorded(
        self,
        frame: Frame,
        index: int | tuple[int, ...],
        iterations: tuple[int, ...],
        every: int | None = None,
    ) -> Any:
        """As `_record`, but with all recorded iterations of loop `every`."""
        indices = index if isinstance(index, tuple) else (index,)
        found: Any = self.records
        for key in (*frame.site.indices, *indices):
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            return None
        loops = frame.loops()
        axis = 0
        for i, (loop, iteration) in enumerate(zip(loops, iterations, strict=True)):
            if loop.kind == "scan" and i == every:
                axis += 1
            elif loop.kind == "scan":
                found = jax.tree.map(lambda x, i=iteration, a=axis: x.take(i, a), found)
        for i, (loop, iteration) in enumerate(zip(loops, iterations, strict=True)):
            if loop.kind == "while" and isinstance(found, WhileRecords):
                if i == every or found.bad_iterations.ndim > 1:
                    return found
                found = _in_iteration(found, iteration)
        return found

    # From iteration to iteration.

    def in_every_iteration(self, frame: Frame, atom: Any) -> list[RunValue]:
        """A value in each iteration of the loops that it is in, in order of time."""
        values: list[tuple[int, ...]] = [()]
        for loop in frame.loops():
            values = [
                (*iterations, index)
                for iterations in values
                for index in self._iterations_in(loop, iterations)
            ]
        return [RunValue(frame, atom, iterations) for iterations in values]

    def _iterations_in(self, loop: Frame, iterations: tuple[int, ...]) -> range:
        last = self._last_iteration(loop, iterations)
        if last is None:
            return range(0)
        if loop.is_reversed:
            return range(loop.length - 1, -1, -1)
        return range(last + 1)

    def _iterations_of(self, stack: Stack) -> Iterator[RunValue]:
        for index in range(stack.frame.length):
            yield RunValue(stack.frame, stack.atom, (*stack.iterations, index))

    def _first_bad_of(self, stack: Stack) -> RunValue:
        bad = list(filter(self.is_bad, self._iterations_of(stack)))
        return bad[-1 if stack.frame.is_reversed else 0]

    def _source_of(self, part: Slice) -> RunValue:
        """The sliced array; if a scan has stacked it, its result of that iteration."""
        whole = self.origin(part.whole)
        if isinstance(whole, Stack):
            same = RunValue(
                whole.frame, whole.atom, (*whole.iterations, part.iterations[-1])
            )
            length = part.frame.length
            if whole.frame.length == length and self.is_bad(same):
                return same
        return part.whole

    def _last_change_of(self, carried: LoopCarry) -> RunValue:
        """The value with which a lane became bad, in the first bad iteration."""
        *outer, last = carried.iterations
        indices, loops = (CARRIED, carried.position), len(carried.iterations)
        found = self._recorded(
            carried.frame, indices, carried.iterations, every=loops - 1
        )
        kept = (
            _iterations_with(found, last) if isinstance(found, WhileRecords) else None
        )
        first = last if kept is None else int(kept[0])
        result = carried.frame.jaxpr.outvars[carried.position]
        return RunValue(carried.frame, result, (*outer, first))

    def _order(self, birth: "FoundBirth") -> tuple[Any, ...]:
        """A key by which births are in the order in which they happened."""
        origin = birth.origin
        if isinstance(origin, Constant) and origin.reader is not None:
            origin = origin.reader
        if not isinstance(origin, OpResult):
            # What is -inf alone may be a mask, on purpose.
            index = origin.position if isinstance(origin, Argument) else -1
            return (1 if self.is_mask(birth) else -1, index)
        chain = [*reversed(list(origin.frame.around()))]
        iterations = iter(origin.iterations)
        key: list[int] = []
        for frame in chain[1:]:
            key.append(_equation_index(frame))
            if frame.is_loop:
                key.append(_nth(frame, next(iterations)))
        return (0, *key, origin.position)

    def is_mask(self, birth: "FoundBirth") -> bool:
        """Whether an argument holds -inf, but no inf and no NaN."""
        if not isinstance(birth.origin, Argument):
            return False
        return birth.size.nonfinite == {"-inf"}


class FoundBirth(NamedTuple):
    """The birth of an inf or a NaN; `jls.types.Birth` has it in words."""

    origin: OpResult | Argument | Constant
    size: Size
    operands: Sequence[RunValue] = ()
    range: Range | None = None


_NO_RECORD = np.zeros(0, np.uint32)


def _iterations_with(found: WhileRecords, index: int) -> np.ndarray | None:
    """The first and last bad iterations around this one; None if it is not bad."""
    for iterations in (found.nan_iterations, found.bad_iterations):
        if iterations.ndim == 1 and iterations[0] <= index <= iterations[1]:
            return iterations
    return None


def _start_of_run(keys: np.ndarray, index: int, is_reversed: bool) -> int:
    """The first of the iterations in a row in which a result is bad as in this one."""
    signs = np.stack(
        [
            (keys > INF_KEY).any(1) | (keys < MINUS_INF_KEY).any(1),
            keys[:, 0] == INF_KEY,
            keys[:, 1] == MINUS_INF_KEY,
        ],
        axis=1,
    )
    if not signs[index].any():
        return index
    differ = np.flatnonzero((signs != signs[index]).any(1))
    if is_reversed:
        later = differ[differ > index]
        return int(later[0]) - 1 if len(later) else len(keys) - 1
    earlier = differ[differ < index]
    return int(earlier[-1]) + 1 if len(earlier) else 0


def _in_iteration(found: WhileRecords, index: int) -> Any:
    """The record of an iteration of a while loop; [] if it was not kept."""
    for record, iterations in (
        (found.nan, found.nan_iterations.tolist()),
        (found.bad, found.bad_iterations.tolist()),
    ):
        if iterations[0] <= index <= iterations[1]:
            return record
    if int(found.bad_iterations[0]) == NEVER:
        return found.bad
    return _NO_RECORD


_FLIP = {"inf": "-inf", "-inf": "inf"}


def _signs(row: Primitive, sizes: "list[Size]") -> set[str] | None:
    """The infinities that bad operands can lead to in a result; None if unknown."""
    found = [x.nonfinite for x in sizes]
    if row.infs == "exp":
        return found[0] & {"inf"}
    if row.infs == "same":
        return found[0]
    if row.infs == "sum":
        return found[0] | found[1]
    if row.infs == "difference":
        return found[0] | {_FLIP[x] for x in found[1]}
    if row.infs == "quotient" and not sizes[0].is_bad:
        return set()
    return _signs_of_product(sizes) if row.infs else None


def _signs_of_product(sizes: "list[Size]") -> set[str] | None:
    """As `_signs`: without a negative number no sign changes.

    Zeros make NaN of an inf: here they stand for what a while loop has not kept.
    """
    one, other = sizes
    found = one.nonfinite | other.nonfinite
    for x, y in ((one, other), (other, one)):
        if x.is_bad and (y.low < 0 or y == NOTHING):
            found |= {_FLIP[sign] for sign in x.nonfinite}
    return found


def identity_of(origin: Origin) -> Any:
    """A hashable key of an origin; the numbers of a program have no hash."""
    if isinstance(origin, Slice):
        return origin[:3]
    if isinstance(origin, Stack):
        return origin.frame, id(origin.atom), origin.iterations
    return origin


def _maker_of(value: RunValue) -> OpResult | None:
    """The operation or the call that a value is a result of; None if it is none."""
    makers = value.frame.makers
    maker = None if is_literal(value.atom) else makers.get(value.atom)
    return maker and OpResult(value.frame, *maker, value.iterations)


def _shared_loops(op: OpResult, reader: OpResult | None) -> int:
    """How many loops two operations share, in the same iteration of each."""
    if reader is None:
        return 0
    count = 0
    for (loop, i), (other, j) in zip(
        zip(op.frame.loops(), op.iterations, strict=True),
        zip(reader.frame.loops(), reader.iterations, strict=True),
        strict=False,
    ):
        if loop is not other or i != j:
            break
        count += 1
    return count


def _equation_index(frame: Frame) -> int:
    """The index of the equation that calls a frame."""
    indices = frame.site.indices
    return indices[-2] if frame.kind == "branch" else indices[-1]


def _iteration_before(loop: Frame, index: int) -> int | None:
    if loop.is_reversed:
        last = loop.length - 1
        return index + 1 if index < last else None
    return index - 1 if index else None


def _nth(loop: Frame, index: int) -> int:
    """The index of an iteration in time."""
    if loop.is_reversed:
        return loop.length - 1 - index
    return index
