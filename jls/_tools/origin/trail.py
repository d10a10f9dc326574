# SPDX-License-Identifier: Apache-2.0
"""Follows what is not finite back to the operations that made it of finite numbers."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jls._program.control import Indices, Key, Site
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import is_inexact_atom, is_literal, variables_in
from jls._program.primitives import Primitive, primitive_of
from jls._program.records import INF_KEY, Records
from jls._scopes import FLOAT8, marks_of
from jls._tools.origin.measure import NOTHING, Size, read_size, size_of_constant
from jls._tools.origin.record import as_large_as


class Range(NamedTuple):
    """The range of the numbers in an operand."""

    nearest: float  # the smallest magnitude
    low: float  # NaN if it is not known, as in some iterations of a while loop
    high: float


class RunValue(NamedTuple):
    """A value in a run: a variable of a program, in some iteration of each loop."""

    frame: Frame
    atom: Any
    # The iteration of each loop around it, outermost first; in a scan, the slice.
    iterations: tuple[int, ...] = ()


class Constant(NamedTuple):
    """A number in the program, or what its function closes over."""

    value: Any
    reader: "OpResult | None" = None  # the operation that it is an operand of


class Argument(NamedTuple):
    """An input of the whole program."""

    position: int


class Stack(NamedTuple):
    """The stacked results of all iterations of a scan."""

    frame: Frame
    atom: Any
    iterations: tuple[int, ...]  # except those of this scan


# A value with a record: `key` is its place in the records of its program, `result` the
# place of its numbers in that record.


class OpResult(NamedTuple):
    """A result of an operation."""

    frame: Frame
    position: int
    result: int
    iterations: tuple[int, ...]

    @property
    def site(self) -> Site:
        return self.frame.site_of(self.position)

    @property
    def dtype(self) -> Any:
        return self.site.equation.outvars[self.result].aval.dtype

    @property
    def key(self) -> Indices:
        return (self.position,)


class Slice(NamedTuple):
    """The slice of an array that an iteration of a scan gets."""

    frame: Frame
    result: int  # among the arrays that are sliced
    iterations: tuple[int, ...]
    whole: RunValue

    @property
    def key(self) -> Indices:
        return (Key.SLICES,)


class LoopCarry(NamedTuple):
    """A carried value of a batched while loop: some lanes have ended before."""

    frame: Frame
    position: int
    iterations: tuple[int, ...]
    result: int = 0

    @property
    def key(self) -> Indices:
        return (Key.CARRIED, self.position)


Followed = TypeVar("Followed", OpResult, LoopCarry)
Origin = Constant | Argument | Slice | Stack | LoopCarry | OpResult
# Called with what is bad, and with what reads it: gives what has made it bad.
Visit = Callable[[Constant | Argument | OpResult, OpResult | None], Iterable[RunValue]]


class Shortcuts(NamedTuple):
    """How to go through a run in which some operations were not recorded.

    `jls._tools.origin.regions` finds it.
    """

    open: frozenset[Indices]  # the operations whose operands are known too
    beyond: dict[OpResult, list[RunValue]]  # from the others to what made them NaN


class LostError(Exception):
    """A search came to an operation of whose operands nothing is known."""


class FoundBirth(NamedTuple):
    """The birth of an inf or a NaN; `jls.types.Birth` has it in words."""

    origin: OpResult | Argument | Constant
    size: Size
    operands: Sequence[RunValue] = ()
    range: Range | None = None


class Trail:
    """One run, to be followed back.

    Args:
      records: what was recorded of a program.
      shortcuts: through what was not recorded; None if all operations were.
    """

    def __init__(self, records: Records, shortcuts: Shortcuts | None = None) -> None:
        self.records, self.shortcuts = records, shortcuts
        # Bounds the memory of a long search.
        self._size = functools.lru_cache(1 << 20)(
            lambda value: self.size_of(self.origin(value))
        )

    # How large a value is.

    def size(self, value: RunValue) -> Size:
        """The largest and the smallest number of a value."""
        if is_literal(value.atom):
            return size_of_constant(value.atom.val)
        return self._size(value) if is_inexact_atom(value.atom) else NOTHING

    def is_bad(self, value: RunValue) -> bool:
        return self.size(value).is_bad

    def size_of(self, origin: Origin | None) -> Size:
        """The size of what has this origin."""
        if origin is None:
            return NOTHING
        if isinstance(origin, Constant):
            return size_of_constant(origin.value)
        if isinstance(origin, Argument):
            ends = self.records.at((Key.ARGUMENTS, origin.position))
            return NOTHING if ends is None else read_size(ends[0])
        if isinstance(origin, Stack):
            sizes = list(map(self.size, self._parts(origin)))
            worst = [x for x in sizes if x.is_nan] or [x for x in sizes if x.is_bad]
            return max(worst or sizes, key=lambda x: x.magnitude, default=NOTHING)
        ends = self._ends(origin)[origin.result :]
        return read_size(ends[0]) if len(ends) else NOTHING

    def is_known(self, value: RunValue) -> bool:
        """Whether there is a record of a value: of a while loop not all are kept."""
        origin = self.origin(value)
        if isinstance(origin, Stack):
            return all(map(self.is_known, self._parts(origin)))
        if isinstance(origin, OpResult | Slice | LoopCarry):
            return len(self._ends(origin)) > 0
        return origin is not None

    def range_of(self, op: OpResult) -> Range | None:
        """The range of the operand that decides whether a result is finite."""
        equation = op.site.equation
        singular = primitive_of(equation).singular
        if singular is None:
            return None
        operand = equation.invars[singular]
        ends = self._ends(op)[len(equation.outvars) :]
        is_real = is_inexact_atom(operand) and operand.aval.dtype.kind != "c"
        if not is_real or not len(ends):
            return None
        value = RunValue(op.frame, operand, op.iterations)
        high, low = self.size(value) if self.is_known(value) else (math.nan, math.nan)
        return Range(read_size(ends[0]).low, low, high)

    # From what is bad to what has made it so.

    def births(self, roots: Iterable[RunValue]) -> list[FoundBirth]:
        """The births of inf and NaN in the roots, in the order of the program.

        Raises:
          LostError: with `shortcuts`, if they do not lead on.
        """
        births: list[FoundBirth] = []
        on_purpose: list[FoundBirth] = []  # inf that is written in the program

        def visit(
            origin: Constant | Argument | OpResult, reader: OpResult | None
        ) -> Iterable[RunValue]:
            size = self.size_of(origin)
            if isinstance(origin, Constant):
                birth = FoundBirth(origin._replace(reader=reader), size)
                (births if size.is_nan else on_purpose).append(birth)
                return ()
            if isinstance(origin, Argument):
                births.append(FoundBirth(origin, size))
                return ()
            if self.shortcuts and origin.site.indices not in self.shortcuts.open:
                if origin not in self.shortcuts.beyond:
                    raise LostError
                return self.shortcuts.beyond[origin]
            operands = self.operands(origin)
            causes = self._causes(origin, operands, size)
            causes = self._choices(origin, causes) or causes
            are_nan = any(self.size(x).is_nan for x in causes)
            is_born = not causes or (size.is_nan and not are_nan)
            # An operand in float8 is NaN if there is an inf in it.
            if is_born and not (causes and FLOAT8 in marks_of(origin.site)):
                births.append(FoundBirth(origin, size, operands, self.range_of(origin)))
            return causes

        self.follow(filter(self.is_bad, roots), visit)
        return sorted(births or on_purpose, key=self._order)

    def follow(self, roots: Iterable[RunValue], visit: Visit) -> None:
        """Follows bad values back, through loops to where they became bad first."""
        stack: list[tuple[RunValue, OpResult | None]] = [(x, None) for x in roots]
        visited = set[Any]()
        while stack:
            value, reader = stack.pop()
            origin = self.origin(value)
            if isinstance(origin, OpResult):
                origin = self._first_in_a_row(origin, _shared_loops(origin, reader))
            if isinstance(origin, Constant):
                visit(origin, reader)
            elif origin is not None and (key := identity_of(origin)) not in visited:
                visited.add(key)
                if isinstance(origin, OpResult):
                    stack += [(x, origin) for x in visit(origin, reader)]
                elif isinstance(origin, Argument):
                    visit(origin, reader)
                else:
                    stack.append(self._through_loop(origin, reader))

    def _through_loop(
        self, origin: Slice | Stack | LoopCarry, reader: OpResult | None
    ) -> tuple[RunValue, OpResult | None]:
        """The bad value in another iteration or loop, and what it is read by."""
        if isinstance(origin, Stack):
            return next(filter(self.is_bad, self._parts(origin))), reader
        if isinstance(origin, LoopCarry):
            # Other lanes, which had ended, may have been bad before.
            change = self._first_in_a_row(origin, len(origin.iterations) - 1)
            result = origin.frame.jaxpr.outvars[origin.position]
            value = RunValue(origin.frame, result, change.iterations)
            return value, _maker_of(value) or reader
        whole = self.origin(origin.whole)
        if isinstance(whole, Stack) and whole.frame.length == origin.frame.length:
            # The iteration of the scan that has stacked it.
            iterations = *whole.iterations, origin.iterations[-1]
            part = RunValue(whole.frame, whole.atom, iterations)
            if self.is_bad(part):
                return part, reader
        return origin.whole, reader

    def _causes(
        self, op: OpResult, operands: list[RunValue], size: Size
    ) -> list[RunValue]:
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

    def _choices(self, op: OpResult, causes: list[RunValue]) -> list[RunValue]:
        """The bad values for which a `select_n` has put a number of the program in.

        `jnp.hypot` gives inf where an operand is inf. [] if the causes are others.
        """
        is_choice = op.site.equation.primitive.name == "select_n"
        origins = [self.origin(x) for x in causes]
        if not (is_choice and causes and all(isinstance(x, Constant) for x in origins)):
            return []
        # A predicate has no record, so its operands are asked.
        found = self.nearest([self.predicate(op)], lambda x: len(self._ends(x)) > 0)
        return [value for value, _ in found if self.is_bad(value)]

    def _taken(self, op: OpResult, count: int) -> list[Size]:
        """The sizes of the elements that a `select_n` takes from each case."""
        sizes = list(map(read_size, self._ends(op)[1:]))
        return sizes if len(sizes) == count else []

    def operands(self, op: OpResult) -> list[RunValue]:
        """The floating-point operands of an operation."""
        atoms = filter(is_inexact_atom, op.site.equation.invars)
        return [RunValue(op.frame, x, op.iterations) for x in atoms]

    def predicate(self, op: OpResult) -> RunValue:
        """What decides in a `select_n`."""
        return RunValue(op.frame, op.site.equation.invars[0], op.iterations)

    def nearest(
        self, values: Iterable[RunValue], is_end: Callable[[OpResult], bool]
    ) -> Iterator[tuple[RunValue, Origin]]:
        """The floating-point values that some are computed from, with their origins.

        Args:
          values: where to begin.
          is_end: whether to stop at a result; else its operands are asked.
        """
        stack, visited = list(values), set[Any]()
        while stack:
            value = stack.pop()
            origin = self.origin(value)
            if origin is None or isinstance(origin, Constant):
                continue
            if (key := identity_of(origin)) in visited:
                continue
            visited.add(key)
            is_float = is_inexact_atom(value.atom)
            if isinstance(origin, OpResult) and not (is_float and is_end(origin)):
                atoms = variables_in(origin.site.equation.invars)
                stack += [RunValue(origin.frame, x, origin.iterations) for x in atoms]
            elif is_float:
                yield value, origin

    # Origins.

    def origin(self, value: RunValue) -> Origin | None:
        """The origin of a value, behind calls and operations that keep its size."""
        found: RunValue | Origin | None = value
        while isinstance(found, RunValue):
            found = self._step(found)
        return found

    def _step(self, value: RunValue) -> RunValue | Origin | None:
        """The origin of a value, one operation or one call back."""
        frame, atom, iterations = value
        if is_literal(atom):
            return Constant(atom.val)
        way, sources, position = frame.link(atom)
        if way == "constant":
            return Constant(frame.consts[atom]) if atom in frame.consts else None
        if way == "argument":
            return Argument(position)
        if way == "operation":
            index, result = frame.makers[atom]
            operand = as_large_as(frame.jaxpr.eqns[index], result)
            if operand is not None:
                return RunValue(frame, operand, iterations)
            return OpResult(frame, index, result, iterations)
        if way == "branch":
            taken = [RunValue(*x, iterations) for x in sources]
            taken = [x for x in taken if self._is_taken(x)]
            # In a while loop both were taken about then.
            return next(filter(self.is_bad, taken), taken[0]) if taken else None
        if way == "call":
            return RunValue(*sources[0], iterations)
        if way == "stack":
            return Stack(*sources[0], iterations)
        if way == "last":
            (loop, _), outside = sources
            every = self._iterations(loop, iterations)
            if not every:
                return RunValue(*outside, iterations)
            return self._carried(sources[0], position, (*iterations, every[-1]))
        outside = RunValue(*sources[0], iterations[:-1])
        if way == "slice":
            return Slice(frame, position, iterations, outside)
        before = iterations[-1] + (1 if frame.is_reversed else -1)
        is_first = before < 0 or (frame.is_reversed and before == frame.length)
        if way == "same" or is_first:
            return outside
        return self._carried(sources[1], position, (*iterations[:-1], before))

    def _carried(
        self, variable: Variable, position: int, iterations: tuple[int, ...]
    ) -> RunValue | LoopCarry:
        """The carry that a loop hands on from an iteration."""
        if variable[0].has_lanes:
            return LoopCarry(variable[0], position, iterations)
        return RunValue(*variable, iterations)

    def _is_taken(self, value: RunValue) -> bool:
        """Whether the branch that a value is in was taken."""
        ends = self.records.ends(value.frame, (Key.TAKEN,), value.iterations)
        return len(ends) > 0 and ends[0, 0] == INF_KEY

    # From iteration to iteration.

    def in_every_iteration(self, frame: Frame, atom: Any) -> list[RunValue]:
        """A value in each iteration of the loops that it is in, in order of time."""
        values: list[tuple[int, ...]] = [()]
        for loop in frame.loops():
            values = [(*x, i) for x in values for i in self._iterations(loop, x)]
        return [RunValue(frame, atom, iterations) for iterations in values]

    def _iterations(self, loop: Frame, around: tuple[int, ...]) -> range:
        """The iterations of a loop, in order of time."""
        if loop.kind == "while":
            counted = self.records.ends(loop, (Key.ITERATIONS,), (*around, 0))
            return range(int(counted[0, 0]) if len(counted) else 0)
        every = range(loop.length)
        return every[::-1] if loop.is_reversed else every

    def _parts(self, stack: Stack) -> Iterator[RunValue]:
        """The values that the iterations have stacked, in order of time."""
        for index in self._iterations(stack.frame, stack.iterations):
            yield RunValue(stack.frame, stack.atom, (*stack.iterations, index))

    def _first_in_a_row(self, op: Followed, shared: int) -> Followed:
        """The same result in the first of the iterations in a row in which it is bad.

        Args:
          op: the result.
          shared: the number of outer loops to leave as they are: what reads it is in
            the same iteration, and before it may have been bad and not been read.
        """
        first = self.records.first_bad(
            op.frame, op.key, op.iterations, op.result, shared
        )
        return op._replace(iterations=first)

    def _ends(self, op: OpResult | Slice | LoopCarry) -> np.ndarray:
        """The record of what has one, `u32[n, 2]`; `u32[0, 2]` if it was not kept."""
        return self.records.ends(op.frame, op.key, op.iterations)

    def _order(self, birth: FoundBirth) -> tuple[Any, ...]:
        """A key by which births are in the order in which they happened."""
        origin = birth.origin
        if isinstance(origin, Constant) and origin.reader is not None:
            origin = origin.reader
        if not isinstance(origin, OpResult):
            # An array with no other bad value than -inf may be a mask.
            is_argument = isinstance(origin, Argument)
            is_mask = is_argument and birth.size.nonfinite == {"-inf"}
            return (1 if is_mask else -1, origin.position if is_argument else -1)
        iterations = iter(origin.iterations)
        key: list[int] = []
        for frame in [*origin.frame.around()][-2::-1]:
            key.append(_equation_index(frame))
            if frame.is_loop:
                index = next(iterations)
                key.append(frame.length - 1 - index if frame.is_reversed else index)
        return (0, *key, origin.position)


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
