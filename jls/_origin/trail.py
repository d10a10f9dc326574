# SPDX-License-Identifier: Apache-2.0
"""Follows what is not finite back to the operations that made it of finite numbers."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jls._origin.measure import Range, bits_of, read_range
from jls._origin.record import SINGULAR, Run, as_large_as, is_bad, is_nan
from jls._program.frames import Frame
from jls._program.jaxprs import is_inexact, is_literal
from jls._program.replay import INF, NEVER, ROUNDS, SLICES, TAKEN
from jls._program.walk import Site


class Value(NamedTuple):
    """A value in a run: a variable of a program, in some round of each loop."""

    frame: Frame
    atom: Any
    rounds: tuple[int, ...] = ()  # outermost first; in a scan, the index of the slice


class Constant(NamedTuple):
    """A number in the program, or what its function closes over."""

    value: Any
    reader: "Made | None" = None  # the operation that it is an operand of


class Argument(NamedTuple):
    """An input of the whole program."""

    number: int


class Slice(NamedTuple):
    """What a round of a scan gets of an array."""

    frame: Frame
    number: int  # among the arrays that are sliced
    rounds: tuple[int, ...]
    whole: Value


class Stack(NamedTuple):
    """What the rounds of a scan have made, together."""

    frame: Frame
    atom: Any
    rounds: tuple[int, ...]  # but for those of this scan


class Made(NamedTuple):
    """A result of an operation."""

    frame: Frame
    number: int
    result: int
    rounds: tuple[int, ...]

    @property
    def site(self) -> Site:
        return self.frame.site_of(self.number)


Origin = Constant | Argument | Slice | Stack | Made


class Trail:
    """One run, to be followed back.

    Args:
      root: the frame of the program.
      run: what was recorded of it.
    """

    def __init__(self, root: Frame, run: Run) -> None:
        self._root, self._run = root, run
        self._bits = functools.lru_cache(1 << 20)(self._find_bits)

    def bits(self, value: Value) -> int:
        """The bits of the largest magnitude of a value."""
        if is_literal(value.atom):
            return bits_of(value.atom.val)
        return self._bits(value)

    def is_bad(self, value: Value) -> bool:
        return is_bad(self.bits(value))

    def births(self, roots: Iterable[Value]) -> "list[Birth]":
        """Where inf and NaN of the roots came from, in the order of the program."""
        stack: list[tuple[Value, Made | None]]
        stack = [(value, None) for value in roots if self.is_bad(value)]
        seen = set[Any]()
        births: list[Birth] = []
        on_purpose: list[Birth] = []  # inf that is written in the program
        while stack:
            value, reader = stack.pop()
            origin, bits = self.origin(value), self.bits(value)
            if isinstance(origin, Constant):
                birth = Birth(origin._replace(reader=reader), bits)
                (births if is_nan(bits) else on_purpose).append(birth)
                continue
            if origin is None or (key := _key(origin)) in seen:
                continue
            seen.add(key)
            if isinstance(origin, Made):
                operands = self.operands(origin)
                causes = self._causes(origin, operands, bits)
                if self._is_birth(bits, causes):
                    births.append(Birth(origin, bits, operands, self.range_of(origin)))
                stack += [(cause, origin) for cause in causes]
            elif isinstance(origin, Slice):
                stack.append((self._source_of(origin), reader))
            elif isinstance(origin, Stack):
                stack.append((self._first_bad_of(origin), reader))
            else:
                births.append(Birth(origin, bits))
        return sorted(births or on_purpose, key=self._order)

    def _is_birth(self, bits: int, causes: "list[Value]") -> bool:
        """No operand is bad; or none is NaN, and the result is."""
        return not causes or (is_nan(bits) and not any(map(self._is_nan, causes)))

    def _is_nan(self, value: Value) -> bool:
        return is_nan(self.bits(value))

    def _causes(self, made: Made, operands: "list[Value]", bits: int) -> "list[Value]":
        """The operands that may have made a result bad."""
        bad = [x for x in operands if self.is_bad(x)]
        nan = [x for x in bad if self._is_nan(x)]
        if is_nan(bits) and nan:
            return nan
        name = made.site.equation.primitive.name
        found = self.range_of(made)
        if bits == INF and found and not nan:
            # exp(-inf) is 0, and 1 / inf: such an operand is on purpose.
            if name in ("exp", "exp2") and found.high < float("inf"):
                return []
            if name == "div" and not self.is_bad(operands[0]):
                return []
        return bad

    def operands(self, made: Made) -> "list[Value]":
        """The floating-point operands of an operation."""
        equation = made.site.equation
        return [
            Value(made.frame, x, made.rounds) for x in equation.invars if is_inexact(x)
        ]

    def range_of(self, made: Made) -> Range | None:
        """The range of the operand on which it depends whether a result is finite."""
        equation = made.site.equation
        if equation.primitive.name not in SINGULAR:
            return None
        rows = self._record(made.frame, made.number, made.rounds)
        if rows is None or len(rows) < len(equation.outvars) + 3:
            return None
        return read_range(rows[len(equation.outvars) :, 0])

    # What a value is.

    def origin(self, value: Value) -> Origin | None:
        """What has made a value, behind calls and operations that leave its size."""
        while True:
            frame, atom, rounds = value
            if is_literal(atom):
                return Constant(atom.val)
            if atom in frame.consts:
                return Constant(frame.consts[atom])
            if atom in frame.inputs:
                found = self._of_input(frame, frame.inputs[atom], rounds)
            elif atom in frame.makers:
                found = self._of_result(frame, *frame.makers[atom], rounds)
            else:
                return None
            if not isinstance(found, Value):
                return found
            value = found

    def _of_input(
        self, frame: Frame, index: int, rounds: tuple[int, ...]
    ) -> Value | Origin | None:
        if frame.parent is None:
            return Argument(index)
        if not frame.is_loop:
            return Value(frame.parent, frame.given(index), rounds)
        consts, carried = frame.counts()
        outside = Value(frame.parent, frame.given(index), rounds[:-1])
        if index < consts:
            return outside
        if index >= consts + carried:
            return Slice(frame, index - consts - carried, rounds, outside)
        before = _round_before(frame, rounds[-1])
        if before is None:
            return outside
        result = frame.jaxpr.outvars[index - consts]
        return Value(frame, result, (*rounds[:-1], before))

    def _of_result(
        self, frame: Frame, number: int, result: int, rounds: tuple[int, ...]
    ) -> Value | Origin | None:
        called = frame.called(number)
        equation = frame.jaxpr.eqns[number]
        if not called:
            operand = as_large_as(equation, result)
            if operand is not None:
                return Value(frame, operand, rounds)
            return Made(frame, number, result, rounds)
        if called[0].kind == "branch":
            taken = [
                Value(child, child.jaxpr.outvars[result], rounds)
                for child in called
                if self._is_taken(child, rounds)
            ]
            # Of a while loop it is known that both were taken about then.
            return max(taken, key=self.bits) if taken else None
        child = called[0]
        atom = child.jaxpr.outvars[result]
        if not child.is_loop:
            return Value(child, atom, rounds)
        consts, carried = child.counts()
        if result >= carried:
            return Stack(child, atom, rounds)
        last = self._last_round(child, rounds)
        if last is None:
            return Value(frame, child.given(consts + result), rounds)
        return Value(child, atom, (*rounds, last))

    def _is_taken(self, branch: Frame, rounds: tuple[int, ...]) -> bool:
        rows = self._record(branch, TAKEN, rounds)
        return rows is not None and is_bad(int(rows[0, 0]))

    def _last_round(self, loop: Frame, rounds: tuple[int, ...]) -> int | None:
        """The last round of a loop; None if it has none."""
        if loop.kind == "while":
            rows = self._record(loop, ROUNDS, (*rounds, 0))
            count = 0 if rows is None else int(rows[0, 0])
            return count - 1 if count else None
        length = loop.caller.params["length"]
        if not length:
            return None
        return 0 if loop.caller.params["reverse"] else length - 1

    # How large it is.

    def _find_bits(self, value: Value) -> int:
        if not is_inexact(value.atom):
            return 0
        origin = self.origin(value)
        if isinstance(origin, Constant):
            return bits_of(origin.value)
        if isinstance(origin, Argument):
            return int(self._run.arguments[origin.number][0])
        if isinstance(origin, Slice):
            rows = self._record(origin.frame, SLICES, origin.rounds)
            return int(rows[origin.number, 0]) if rows is not None else 0
        if isinstance(origin, Stack):
            every = self._rounds_of(origin)
            return max(map(self.bits, every), default=0)
        if isinstance(origin, Made):
            rows = self._record(origin.frame, origin.number, origin.rounds)
            return int(rows[origin.result, 0]) if rows is not None else 0
        return 0

    def _record(
        self, frame: Frame, number: int, rounds: tuple[int, ...]
    ) -> np.ndarray | None:
        """What was recorded of an operation in some round: `u32[n, ...]`.

        Of a round of a while loop that was not recorded, zeros.
        """
        found: Any = self._run.records
        for key in (*frame.site.numbers, number):
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            return None
        loops = [x.kind for x in _loops_around(frame)]
        pairs = list(zip(loops, rounds, strict=False))
        for kind, index in pairs:
            if kind == "scan":
                found = found[index]
        if number == ROUNDS:
            return found
        inner_first = [index for kind, index in reversed(pairs) if kind == "while"]
        for i, index in enumerate(inner_first):
            first, last = found[0, 1 + 2 * i], found[0, 2 + 2 * i]
            if first != NEVER and not first <= index <= last:
                return np.zeros_like(found)
        return found

    # From round to round.

    def in_every_round(self, frame: Frame, atom: Any) -> list[Value]:
        """A value in each round of the loops that it is in, in their order in time."""
        values: list[tuple[int, ...]] = [()]
        for loop in _loops_around(frame):
            values = [
                (*rounds, index)
                for rounds in values
                for index in self._rounds_in(loop, rounds)
            ]
        return [Value(frame, atom, rounds) for rounds in values]

    def _rounds_in(self, loop: Frame, rounds: tuple[int, ...]) -> range:
        last = self._last_round(loop, rounds)
        if last is None:
            return range(0)
        if loop.kind == "scan" and loop.caller.params["reverse"]:
            return range(loop.caller.params["length"] - 1, -1, -1)
        return range(last + 1)

    def _rounds_of(self, stack: Stack) -> Iterator[Value]:
        for index in range(stack.frame.caller.params["length"]):
            yield Value(stack.frame, stack.atom, (*stack.rounds, index))

    def _first_bad_of(self, stack: Stack) -> Value:
        bad = list(filter(self.is_bad, self._rounds_of(stack)))
        return bad[-1] if stack.frame.caller.params["reverse"] else bad[0]

    def _source_of(self, part: Slice) -> Value:
        """What a slice is of: if a scan has stacked it, the same round of that."""
        whole = self.origin(part.whole)
        if isinstance(whole, Stack):
            same = Value(whole.frame, whole.atom, (*whole.rounds, part.rounds[-1]))
            length = part.frame.caller.params["length"]
            if whole.frame.caller.params["length"] == length and self.is_bad(same):
                return same
        return part.whole

    def _order(self, birth: "Birth") -> tuple[Any, ...]:
        """A key by which births are in the order in which they happened."""
        origin = birth.origin
        if isinstance(origin, Constant) and origin.reader is not None:
            origin = origin.reader
        if not isinstance(origin, Made):
            # What is -inf alone may be a mask, on purpose.
            return (1 if self.is_mask(birth) else -1,)
        chain = [*reversed(list(_up(origin.frame)))]
        rounds = iter(origin.rounds)
        key: list[int] = []
        for frame in chain[1:]:
            key.append(_number(frame))
            if frame.is_loop:
                key.append(_nth(frame, next(rounds)))
        return (0, *key, origin.number)

    def is_mask(self, birth: "Birth") -> bool:
        """Whether an argument holds -inf, but no inf and no NaN."""
        if not isinstance(birth.origin, Argument):
            return False
        rows = self._run.arguments[birth.origin.number]
        return birth.bits == INF and read_range(rows[1:]).high < float("inf")


class Birth(NamedTuple):
    """Where an inf or a NaN came from, before it is put into words."""

    origin: Made | Argument | Constant
    bits: int
    operands: Sequence[Value] = ()
    range: Range | None = None


def _key(origin: Origin) -> Any:
    """What tells origins apart; numbers of a program have no hash."""
    if isinstance(origin, Slice):
        return origin[:3]
    if isinstance(origin, Stack):
        return origin.frame, id(origin.atom), origin.rounds
    return origin


def _up(frame: Frame) -> Iterator[Frame]:
    """A frame, and those around it."""
    here: Frame | None = frame
    while here is not None:
        yield here
        here = here.parent


def _loops_around(frame: Frame) -> list[Frame]:
    """The loops that a frame is in, and the frame itself; outermost first."""
    return [x for x in _up(frame) if x.is_loop][::-1]


def _number(frame: Frame) -> int:
    """The number of the equation that calls a frame."""
    numbers = frame.site.numbers
    return numbers[-2] if frame.kind == "branch" else numbers[-1]


def _round_before(loop: Frame, index: int) -> int | None:
    if loop.kind == "scan" and loop.caller.params["reverse"]:
        last = loop.caller.params["length"] - 1
        return index + 1 if index < last else None
    return index - 1 if index else None


def _nth(loop: Frame, index: int) -> int:
    """Which round it is in time."""
    if loop.kind == "scan" and loop.caller.params["reverse"]:
        return loop.caller.params["length"] - 1 - index
    return index
