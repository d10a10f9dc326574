# SPDX-License-Identifier: Apache-2.0
"""Which values of two programs are the same one, and where the programs part.

Operations are paired by scope, operation, shape and line, and by what they gave. Then
the results that differ are followed back, through values that differ or that only one
program has. Of those, the first in time that differs by more than its operands explain
is where they part.
"""

import difflib
import functools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jls._tools.compare.fingerprint import (
    ARGUMENT,
    IN_FLOAT32,
    NUDGED,
    NUDGED_IN_FLOAT32,
    RESULT,
    WRITTEN,
    Feed,
    Fingerprint,
    Value,
)
from jls._tools.compare.sketch import FIRST, apart

# Of a unit of the coarsest dtype, of what the last bits of the arguments change, and of
# the error of the operands.
FACTOR = 8.0
UNIT = 2.0**-23  # of float32
_FEW = 8  # fewer elements may be equal by chance


class Point(NamedTuple):
    """A value at which two programs part."""

    a: int
    b: int
    error: float
    inputs_error: float
    iteration: tuple[int, ...]  # in the order of time
    only_a: list[int]  # operands that only a gives it
    only_b: list[int]


class Found(NamedTuple):
    """How two programs differ."""

    birth: Point | None
    only_a: list[int]  # without a like in b, and on the way to the birth or a result
    only_b: list[int]
    errors: dict[int, float]  # by the value of a
    flipped: list[int]  # whose choices differ, by rounding
    is_bad: bool  # whether a result differs, by more than rounding
    is_unknown: bool  # whether the operations of one of them are not known
    is_moved: bool  # whether a result differs, and nothing that it is made of
    # Without a birth: the first value of a in a loop that runs another number of
    # times in b, and both numbers.
    loop: tuple[int, tuple[int, int]] | None

    @property
    def differs(self) -> bool:
        """Whether something but rounding is to blame."""
        is_known = self.birth or self.only_a or self.only_b or self.loop
        return bool(self.is_bad and (is_known or self.is_unknown or self.is_moved))


class _Side:
    """One of the two programs, in two runs that round otherwise.

    Args:
      made: its fingerprint.
      in_float32: whether it is run in float32 throughout.
      is_exact: whether every bit counts.
    """

    def __init__(self, made: Fingerprint, in_float32: bool, is_exact: bool) -> None:
        self.values, self.loops = made.values, made.loops
        is_half = IN_FLOAT32 in made.runs
        names = WRITTEN, IN_FLOAT32 if is_half else NUDGED
        if is_half and in_float32:
            names = IN_FLOAT32, NUDGED_IN_FLOAT32
        self.run = made.runs[names[0]]
        self._other = None if is_exact else made.runs.get(names[1])
        most = UNIT if names[0] == IN_FLOAT32 else math.inf
        self._most = 0.0 if is_exact else most  # a unit of the coarsest dtype
        every = list(enumerate(self.values))
        self.results = [i for i, x in every if x.place.operation == RESULT]
        self.operations = [i for i, x in every if x.is_operation]
        self._start = dict[int, int]()  # the first operation of each loop
        self._first = dict[bytes, int]()  # the first that gave these bits
        for i in self.operations:
            self._first.setdefault(self.run[i].tobytes(), i)
            for loop in self.values[i].loops:
                self._start.setdefault(loop, i)
        self.errors = dict[int, np.ndarray]()  # of the values that have a like
        self.operands = functools.cache(self._operands)

    # By equal ones operations are paired.

    def by_kind(self, i: int) -> tuple[Hashable, ...]:
        value, results = self.values[i], self.run[i].shape[-2]
        shape, loops = tuple(sorted(value.shape)), len(value.loops)
        return (value.place.operation, value.place.is_backward, shape, results, loops)

    def by_line(self, i: int) -> tuple[Hashable, ...]:
        return (*self.by_kind(i), self.values[i].place.module, self.values[i].code)

    def by_line_and_bits(self, i: int) -> Hashable:
        return (self.by_line(i), self.run[i].tobytes())

    def alike(self, i: int) -> Hashable:
        """What operations share that may give the same numbers.

        None of zeros, and of bits that an operation before has given.
        """
        size, run = math.prod(self.values[i].shape), self.run[i]
        few = self.values[i].place.operation if size < _FEW else ""
        is_telling = run[..., 1].any() and self._first[run.tobytes()] == i
        return (size, few, run.shape) if is_telling else None

    # What rounding explains.

    def unit(self, i: int) -> float:
        return min(self.values[i].unit, self._most)

    def noise(self, i: int) -> np.ndarray:
        """What rounding explains of a value, in each iteration."""
        other = self.run if self._other is None else self._other
        return np.maximum(apart(self.run[i], other[i]), self.unit(i))

    def may_flip(self, i: int, at: tuple[int, ...], error: float, known: float) -> bool:
        """Whether flags may fall otherwise if their operands differ that little."""
        if self.values[i].dtype != "bool":
            return True
        norm = float(self.run[i][at][..., 1].copy().view(np.float32).max())
        size = math.prod(self.values[i].shape)
        return (error * norm) ** 2 <= FACTOR * (1 + known * size)

    # Where a value comes from.

    def moment(self, i: int, iteration: Sequence[int]) -> list[int]:
        """By it values are in the order in which they are computed."""
        pairs = zip(self.values[i].loops, iteration, strict=True)
        return [x for loop, at in pairs for x in (self._start[loop], at)] + [i]

    def behind(self, numbers: Iterable[int], same: Container[int]) -> set[int]:
        """The values that some come from, through none that are the same in both."""
        stack, found = list(numbers), set[int]()
        while stack:
            i = stack.pop()
            if i not in found and i not in same:
                found.add(i)
                stack += [x.number for x in self.values[i].feeds]
        return found

    def _operands(self, i: int) -> tuple[set[Feed], set[int]]:
        """The values with a like that one is computed from, and those between."""
        stack, seen = list(self.values[i].feeds), set[Feed]()
        while stack:
            feed = stack.pop()
            if feed not in seen and feed.number not in self.errors:
                for x in self.values[feed.number].feeds:
                    late = sorted({*feed.late, *x.late})
                    stack.append(Feed(x.number, tuple(late)))
            seen.add(feed)
        paired = {x for x in seen if x.number in self.errors}
        return paired, {x.number for x in seen - paired}

    def inputs_error(self, i: int, iteration: Sequence[int]) -> float:
        """The largest error of the operands of a value in an iteration."""
        operands, _ = self.operands(i)
        return max((self._seen(x, i, iteration) for x in operands), default=0.0)

    def _seen(self, operand: Feed, i: int, iteration: Sequence[int]) -> float:
        """The largest error of an operand in the iterations that it may come from."""
        around, index = self.values[i].loops, list[slice]()
        for depth, loop in enumerate(self.values[operand.number].loops):
            if around[depth : depth + 1] != (loop,):
                break
            at = iteration[depth]
            if loop in operand.late:
                # Those before the last one of a `while` are not kept.
                is_last = self.loops[loop].is_while and at == FIRST
                index.append(slice(None if is_last else at))
                break
            index.append(slice(at, at + 1))
        return float(self.errors[operand.number][tuple(index)].max(initial=0.0))

    def only(self, behind: set[int], birth: int | None) -> list[int]:
        """The operations without a like, if there is a birth those on the way to it.

        What comes right before the birth is first.
        """
        found, last = behind - self.errors.keys(), set[int]()
        if birth is not None:
            _, found = self.operands(birth)
            last = {x.number for x in self.values[birth].feeds}
        found = found.intersection(self.operations)
        return sorted(found, key=lambda i: (i not in last, i))

    def stops(self) -> list[int]:
        """What only this program stops the gradient of."""
        alone = (i for i in self.operations if i not in self.errors)
        return [i for i in alone if self.values[i].place.operation == "stop_gradient"]


def find(
    a: Fingerprint, b: Fingerprint, in_float32: bool = False, is_exact: bool = False
) -> Found:
    """How two programs differ, from their fingerprints.

    Args:
      a: one program.
      b: the other one.
      in_float32: whether to compare what they give in float32.
      is_exact: whether they are two runs of one program, of which every bit counts.
    """
    one, two = (_Side(x, in_float32, is_exact) for x in (a, b))
    pair = _paired(one, two)
    errors = {i: apart(one.run[i], two.run[j]) for i, j in pair.items()}
    differs = {
        i: errors[i] > FACTOR * _largest(one.noise(i), two.noise(j))
        for i, j in pair.items()
    }
    one.errors = {i: error.copy() for i, error in errors.items()}
    two.errors = {pair[i]: error for i, error in one.errors.items()}  # the same arrays
    roots = pair if is_exact else one.results
    bad = [i for i in roots if i in pair and differs[i].any()]
    same = {i: j for i, j in pair.items() if not differs[i].any()}
    behind_a = one.behind(bad, same.keys())
    behind_b = two.behind([pair[i] for i in bad], {*same.values()})
    points = [
        (one.moment(i, at), i, tuple(at))
        for i in behind_a.intersection(pair).difference(one.results)
        for at in np.argwhere(differs[i]).tolist()
    ]
    birth, flipped = _birth(one, two, pair, errors, points, max)
    counts = _other_counts(one, two, pair)
    if birth and birth.a not in counts:
        operands, _ = one.operands(birth.a)
        if any(x.number in counts for x in operands):  # they end otherwise
            birth = None
    only_a, only_b = list[int](), list[int]()
    is_unknown = bool(a.note or b.note)
    if not is_unknown:
        only_a = one.only(behind_a, birth and birth.a)
        only_b = two.only(behind_b, birth and birth.b)
        ends = [a.values[birth.a if birth else i] for i in only_a]
        ends += [b.values[birth.b if birth else j] for j in only_b]
        if any(x.place.is_backward for x in ends):
            # They compute nothing, but decide what the backward pass has.
            only_a = [*dict.fromkeys(one.stops() + only_a)]
            only_b = [*dict.fromkeys(two.stops() + only_b)]
    if not (birth or only_a or only_b or is_unknown or counts):
        # Of two pairs that cross, each one's operands may differ by the other one.
        birth, _ = _birth(one, two, pair, errors, points, min)
    is_known = birth or only_a or only_b or is_unknown or counts
    is_moved = not is_known and any(
        errors[i].max(initial=0.0)
        > FACTOR * max(one.inputs_error(i, ()), two.inputs_error(pair[i], ()))
        for i in bad
        if i in one.results
    )
    return Found(
        birth=birth,
        only_a=only_a,
        only_b=only_b,
        errors={i: float(x.max()) for i, x in errors.items() if x.size},
        flipped=flipped,
        is_bad=bool(bad),
        is_unknown=is_unknown,
        is_moved=is_moved,
        loop=None if birth or not counts else next(iter(counts.items())),
    )


def _birth(
    a: _Side,
    b: _Side,
    pair: dict[int, int],
    errors: dict[int, np.ndarray],
    points: list[tuple[list[int], int, tuple[int, ...]]],
    known_of: Callable[[float, float], float],
) -> tuple[Point | None, list[int]]:
    """The first point that the errors of its operands do not explain.

    Args:
      a: one program.
      b: the other one.
      pair: the values of `b` by those of `a`.
      errors: by the value of `a`.
      points: the moment, the value of `a` and the iteration of all that differ.
      known_of: the error of the operands, from that in `a` and that in `b`.

    Returns:
      The birth, and the choices before it that rounding explains.
    """
    flipped = list[int]()
    for _, i, at in sorted(points):
        error = float(errors[i][at])
        known = known_of(a.inputs_error(i, at), b.inputs_error(pair[i], at))
        if a.unit(i) == 0 and known > 0 and a.may_flip(i, at, error, known):
            flipped.append(i)
            a.errors[i][at] = np.inf
        elif error > FACTOR * known:
            others = _other_operands(a, b, pair, i)
            return Point(i, pair[i], error, known, at, *others), flipped
    return None, flipped


def _other_counts(
    a: _Side, b: _Side, pair: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """How often loops run, by the values of `a` in those that do not agree in that."""
    found = dict[int, tuple[int, int]]()
    for i, j in sorted(pair.items()):
        for one, other in zip(a.values[i].loops, b.values[j].loops, strict=False):
            times = a.loops[one].times, b.loops[other].times
            if times[0] != times[1]:
                found.setdefault(i, times)
    return found


def _other_operands(
    a: _Side, b: _Side, pair: dict[int, int], i: int
) -> tuple[list[int], list[int]]:
    """The operands of an operation of `a` that are none of its like's, and of `b`."""
    of_a, of_b = (
        sorted({x.number for x in side.operands(at)[0]})
        for side, at in ((a, i), (b, pair[i]))
    )

    def is_like(i: int, j: int) -> bool:
        if pair[i] == j or a.run[i].ndim != b.run[j].ndim:
            return pair[i] == j
        noise = _largest(a.noise(i), b.noise(j))
        return bool((apart(a.run[i], b.run[j]) <= FACTOR * noise).all())

    like = [(i, j) for i in of_a for j in of_b if is_like(i, j)]
    only_a = [i for i in of_a if all(i != x for x, _ in like)]
    return only_a, [j for j in of_b if all(j != x for _, x in like)]


def _largest(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The larger one of each, as far as both go."""
    cut = tuple(slice(min(x)) for x in zip(one.shape, other.shape, strict=True))
    return np.maximum(one[cut], other[cut])


def _paired(a: _Side, b: _Side) -> dict[int, int]:
    """The values of the second program by those of the first."""
    pair = dict[int, int]()
    for key in (_Side.by_line_and_bits, _Side.alike, _Side.by_line):
        found: dict[Hashable, tuple[list[int], list[int]]] = {}
        for n, (side, paired) in enumerate([(a, {*pair}), (b, {*pair.values()})]):
            for i in side.operations:
                value = None if i in paired else key(side, i)
                if value is not None:
                    found.setdefault(value, ([], []))[n].append(i)
        for of_a, of_b in found.values():
            if key is _Side.alike:
                pair |= _by_value(a, b, of_a, of_b)
            else:
                pair |= zip(of_a, of_b, strict=False)  # in order
    pair |= _by_kind(a, b, pair)
    for kind in (ARGUMENT, RESULT):
        for i, others in named(a.values, b.values, kind).items():
            # What is closed over comes in any order.
            pair[i] = min(others, key=lambda j, i=i: float(apart(a.run[i], b.run[j])))
    return pair


def _by_value(
    a: _Side, b: _Side, of_a: list[int], of_b: list[int]
) -> Iterator[tuple[int, int]]:
    """The pairs of operations that gave the same numbers, to rounding."""
    for i in of_a:
        if of_b:
            many = np.stack([b.run[j] for j in of_b])
            errors = apart(np.broadcast_to(a.run[i], many.shape), many)
            errors = errors.reshape(len(of_b), -1).max(1, initial=0.0)
            best = int(np.argmin(errors))
            unit = max(a.values[i].unit, b.values[of_b[best]].unit)
            if errors[best] <= FACTOR * unit:
                yield i, of_b.pop(best)


def _by_kind(a: _Side, b: _Side, pair: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Pairs of one kind among the other operations, between the same two pairs."""
    ends = np.array(sorted(pair.items())).reshape(-1, 2)
    ends = np.maximum.accumulate(ends)
    left = [i for i in a.operations if i not in pair]
    rest = sorted({*b.operations}.difference(pair.values()))
    kinds = [
        [(int(np.searchsorted(known, i)), side.by_kind(i)) for i in every]
        for side, every, known in ((a, left, ends[:, 0]), (b, rest, ends[:, 1]))
    ]
    matcher = difflib.SequenceMatcher(None, *kinds, autojunk=False)
    for block in matcher.get_matching_blocks():
        for n in range(block.size):
            yield left[block.a + n], rest[block.b + n]


def named(a: Sequence[Value], b: Sequence[Value], kind: str) -> dict[int, list[int]]:
    """The arguments, or the results, of `b` that each of `a` may be.

    Those of one name and shape; if there are none, that in its place.
    """
    of_a, of_b = (
        {
            i: (x.place.module, x.shape)
            for i, x in enumerate(values)
            if x.place.operation == kind
        }
        for values in (a, b)
    )
    found = {i: [j for j, x in of_b.items() if x == key] for i, key in of_a.items()}
    if any(found.values()):
        return {i: others for i, others in found.items() if others}
    one, other = ([shape for _, shape in x.values()] for x in (of_a, of_b))
    pairs = zip(of_a, of_b, strict=False)
    return {i: [j] for i, j in pairs} if one == other else {}
