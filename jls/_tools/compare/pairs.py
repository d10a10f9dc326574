# SPDX-License-Identifier: Apache-2.0
"""Which operations of two programs are the same one, and where they part.

Operations are paired by scope, operation, shape and line, then in order, then by what
they gave. What a program computes twice, such as in a checkpoint, counts once. Then the
results that differ are followed back, through operations that differ, to those whose
operands do not.
"""

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jls._program.places import Place
from jls._tools.compare.fingerprint import (
    CLOSED_OVER,
    IN_FLOAT32,
    Feed,
    Fingerprint,
)
from jls._tools.compare.sketch import apart

# Of a unit of the coarsest dtype, of what the last bits of the arguments change, and of
# the error of the operands.
FACTOR = 8.0
# Fewer elements may be equal by chance.
_FEW = 8
UNIT = 2.0**-23  # of float32
_LEAST = 2.0**-149  # the error of two runs of which a bit differs


class Point(NamedTuple):
    """An operation at which two programs part."""

    a: int
    b: int
    error: float
    inputs_error: float
    iteration: tuple[int, ...]  # in the order of time


class Found(NamedTuple):
    """How two programs differ."""

    birth: Point | None
    argument: tuple[int, float] | None  # the first that differs
    only_a: list[int]
    only_b: list[int]
    errors: dict[int, float]  # by the operation of the first program
    results: list[tuple[int, int, float]]  # of both programs, and the error
    bad: list[int]  # those in `results` that rounding does not explain
    flipped: list[int]  # whose choices differ, by rounding
    is_same: bool  # whether they are two runs of one program


class _Side:
    """One of the two programs, without what it computes twice."""

    def __init__(self, made: Fingerprint, run: str, nudged: str, is_same: bool) -> None:
        self.made, self.run, self.nudged = made, made.runs[run], made.runs.get(nudged)
        # The unit of the coarsest dtype in this run.
        self.most = UNIT if run == IN_FLOAT32 else math.inf
        first, self.once = dict[Hashable, int](), list[int]()
        for i, operation in enumerate(made.operations):
            place = operation.place
            sketch = self.run.operations[i]
            key = (place.operation, operation.code, sketch.shape, sketch.tobytes())
            key = i if is_same else key
            self.once.append(first.setdefault(key, i))
        self.kept = sorted(first.values())
        self.feeds = {
            i: tuple({self._merged(x) for x in made.operations[i].feeds})
            for i in self.kept
        }
        self.result_feeds = [
            tuple({self._merged(x) for x in value.feeds}) for value in made.results
        ]
        self.noise = dict[int, np.ndarray]()
        if self.nudged:
            for i in self.kept:
                other = self.nudged.operations[i]
                self.noise[i] = apart(self.run.operations[i], other).error

    def _merged(self, feed: Feed) -> Feed:
        return feed if feed.number < 0 else Feed(self.once[feed.number], feed.late)

    def behind(self, results: Iterable[int], is_odd: Callable[[int], bool]) -> set[int]:
        """The operations that some results come from, through those that are odd."""
        stack = [x.number for i in results for x in self.result_feeds[i]]
        found = set[int]()
        while stack:
            i = stack.pop()
            if i >= 0 and i not in found and is_odd(i):
                found.add(i)
                stack += [x.number for x in self.feeds[i]]
        return found

    def place(self, i: int) -> Place:
        return self.made.operations[i].place

    @property
    def stops(self) -> list[int]:
        return [i for i in self.kept if self.place(i).operation == "stop_gradient"]

    def unit(self, i: int) -> float:
        return min(self.made.operations[i].unit, self.most)

    def moment(self, i: int, iteration: Sequence[int]) -> tuple[int, ...]:
        """By it operations are in the order in which they run."""
        operation, at = self.made.operations[i], []
        starts = [len(self.made.loops[x].indices) for x in operation.loops]
        for depth, index in enumerate(operation.indices):
            if depth in starts:
                at.append(iteration[starts.index(depth)])
            at.append(index)
        return tuple(at)


def find(
    a: Fingerprint,
    b: Fingerprint,
    runs: tuple[str, str],
    nudged: tuple[str, str],
    is_same: bool = False,
) -> Found:
    """How two programs differ, from their fingerprints.

    Args:
      a: one program.
      b: the other one.
      runs: which run of each.
      nudged: another run of each, which rounds otherwise.
      is_same: whether they are two runs of one program, of which every bit counts.
    """
    sides = [
        _Side(made, name, other, is_same)
        for made, name, other in zip((a, b), runs, nudged, strict=True)
    ]
    return _Search(sides[0], sides[1], is_same).found()


class _Search:
    def __init__(self, a: _Side, b: _Side, is_same: bool) -> None:
        self.a, self.b, self.is_same = a, b, is_same
        self.pair = {i: i for i in a.kept} if is_same else _paired(a, b)
        self.back = {j: i for i, j in self.pair.items()}
        self.error = {i: self._error(i, j) for i, j in self.pair.items()}
        self.noise = {i: self._noise(i, j) for i, j in self.pair.items()}
        self.arguments = same_names(a.made.arguments, b.made.arguments)
        self.given = {i: self._error_of_argument(i) for i in self.arguments}

    def _error_of_argument(self, i: int) -> float:
        """How far an argument is off; 0 if both close over it, in another order."""
        name, shape, *_ = self.a.made.arguments[i]

        def error(j: int) -> float:
            pair = self.a.run.arguments[i], self.b.run.arguments[j]
            return float(apart(*pair).error.max())

        own = error(self.arguments[i])
        if own <= FACTOR * UNIT or not name.startswith(CLOSED_OVER):
            return own
        is_elsewhere = any(
            error(j) <= FACTOR * UNIT
            for j, x in enumerate(self.b.made.arguments)
            if x.name.startswith(CLOSED_OVER) and x.shape == shape
        )
        return 0.0 if is_elsewhere else own

    def _error(self, i: int, j: int) -> np.ndarray:
        return self._apart(self.a.run.operations[i], self.b.run.operations[j])

    def _apart(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        found = apart(one, other)
        least = _LEAST if self.is_same else 0.0
        return np.where(found.has_bits, np.maximum(found.error, least), 0.0)

    def _noise(self, i: int, j: int) -> np.ndarray:
        """What rounding explains of an operation, in each iteration."""
        unit = 0.0 if self.is_same else max(self.a.unit(i), self.b.unit(j))
        cut = tuple(map(slice, self.error[i].shape))
        found = np.full(self.error[i].shape, unit)
        for side, k in ((self.a, i), (self.b, j)):
            if k in side.noise:
                found = np.maximum(found, side.noise[k][cut])
        return found if unit else np.zeros_like(found)

    def is_odd(self, i: int) -> bool:
        """Whether an operation of the first program has no like, or differs from it."""
        return i not in self.pair or bool(self.differs(i).any())

    def differs(self, i: int) -> np.ndarray:
        return self.error[i] > FACTOR * self.noise[i]

    def found(self) -> Found:
        results = self._results()
        bad = [i for i, _, error, limit in results if error > limit]
        pairs = {i: j for i, j, _, _ in results}
        behind_a = self.a.behind(bad, self.is_odd)
        if self.is_same:  # what reaches no result counts too
            behind_a = set(filter(self.is_odd, self.a.kept))
        of_b = [pairs[i] for i in bad]
        behind_b = self.b.behind(of_b, lambda j: self._is_odd_in_b(j))
        reach_a = _reach(self.a, self.error, self.given)
        of_b_errors = {self.pair[i]: x for i, x in self.error.items()}
        given = {self.arguments[i]: x for i, x in self.given.items()}
        reach_b = _reach(self.b, of_b_errors, given)
        births, flipped = list[Point](), list[int]()
        for i in sorted(behind_a & self.pair.keys()):
            known = np.maximum(
                _known(self.a, i, reach_a, self.error[i].shape, self.given),
                _known(self.b, self.pair[i], reach_b, self.error[i].shape, given),
            )
            if not self.a.unit(i) and (self.differs(i) & (known > 0)).any():
                flipped.append(i)
                reach_a[i] = np.full(self.error[i].shape, np.inf)
                reach_b[self.pair[i]] = reach_a[i]
            is_birth = self.differs(i) & (self.error[i] > FACTOR * known)
            if self.is_same or not self.a.unit(i):
                is_birth &= known == 0
            if is_birth.any():
                at = np.unravel_index(int(np.argmax(is_birth)), is_birth.shape)
                births.append(
                    Point(
                        i,
                        self.pair[i],
                        float(self.error[i][at]),
                        float(known[at]),
                        tuple(map(int, at)),
                    )
                )
        births.sort(key=lambda x: self.a.moment(x.a, x.iteration))
        birth = births[0] if births else None
        argument = next(
            ((i, x) for i, x in self.given.items() if x > FACTOR * UNIT), None
        )
        only_a = _only(self.a, behind_a, self.pair, birth and birth.a)
        only_b = _only(self.b, behind_b, self.back, birth and birth.b)
        ends = [self.a.place(birth.a if birth else i) for i in only_a]
        ends += [self.b.place(birth.b if birth else j) for j in only_b]
        if any(x.is_backward for x in ends):
            # It computes nothing, but decides what the backward pass has.
            only_a |= {i for i in self.a.stops if i not in self.pair}
            only_b |= {j for j in self.b.stops if j not in self.back}
        return Found(
            birth,
            argument,
            sorted(only_a),
            sorted(only_b),
            {i: float(x.max()) for i, x in self.error.items() if x.size},
            [(i, j, error) for i, j, error, _ in results],
            [n for n, (i, *_) in enumerate(results) if i in bad],
            flipped,
            self.is_same,
        )

    def _is_odd_in_b(self, j: int) -> bool:
        return j not in self.back or self.is_odd(self.back[j])

    def _results(self) -> list[tuple[int, int, float, float]]:
        """The results that both have, with the error and what rounding explains."""
        found = []
        for i, j in same_names(self.a.made.results, self.b.made.results).items():
            error = self._apart(self.a.run.results[i], self.b.run.results[j]).item()
            noise = 0.0
            for side, k in ((self.a, i), (self.b, j)):
                if not self.is_same:
                    noise = max(noise, min(side.made.results[k].unit, side.most))
                if side.nudged:
                    other = side.nudged.results[k]
                    more = apart(side.run.results[k], other).error.item()
                    noise = max(noise, more)
            found.append((i, j, error, FACTOR * noise))
        return found


def _only(
    side: _Side, behind: set[int], pair: Collection[int], birth: int | None
) -> set[int]:
    """The operations without a like, if there is a birth those on the way to it.

    Args:
      side: the program.
      behind: what differs, and leads to a result that does.
      pair: the operations that have a like.
      birth: that of the program, if there is one.
    """
    found = {i for i in behind if i not in pair}
    near = set[int]()
    stack = [] if birth is None else [birth]
    while stack:
        feeds = {x.number for x in side.feeds[stack.pop()]} & found - near
        near |= feeds
        stack += feeds
    return found if birth is None else near


def same_names(a: Sequence, b: Sequence) -> dict[int, int]:
    """The places of the values that both have: of one name, or else in order."""
    names = {x.name: i for i, x in enumerate(b)}
    found = {
        i: names[x.name]
        for i, x in enumerate(a)
        if x.name in names and b[names[x.name]].shape == x.shape
    }
    if found or [x.shape for x in a] != [x.shape for x in b]:
        return found
    return {i: i for i in range(len(a))}


# Pairs.


def _paired(a: _Side, b: _Side) -> dict[int, int]:
    """The operations of the second program by those of the first."""
    pair = _aligned(a, b, a.kept, b.kept, _by_line)
    left = [i for i in a.kept if i not in pair]
    others = set(pair.values())
    rest = [j for j in b.kept if j not in others]
    pair |= _between(a, b, pair, left, rest)
    return _by_value(a, b, pair)


def _by_line(side: _Side, i: int) -> Hashable:
    operation = side.made.operations[i]
    return (*_by_kind(side, i), operation.place.module, operation.code)


def _by_kind(side: _Side, i: int) -> tuple[Hashable, ...]:
    operation, sketch = side.made.operations[i], side.run.operations[i]
    place = operation.place
    results, loops = sketch.shape[-2], len(operation.loops)
    shape = tuple(sorted(operation.shape))
    return (place.operation, place.is_backward, shape, results, loops)


def _aligned(
    a: _Side,
    b: _Side,
    of_a: Sequence[int],
    of_b: Sequence[int],
    key: Callable[[_Side, int], Hashable],
) -> dict[int, int]:
    """Pairs with equal keys, in one order."""
    keys = [key(a, i) for i in of_a], [key(b, j) for j in of_b]
    start, most = 0, min(map(len, keys))
    while start < most and keys[0][start] == keys[1][start]:
        start += 1
    pair = dict(zip(of_a[:start], of_b[:start], strict=True))
    rest = [x[start:] for x in keys]
    matcher = difflib.SequenceMatcher(None, *rest, autojunk=False)
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            pair[of_a[start + block.a + k]] = of_b[start + block.b + k]
    return pair


def _between(
    a: _Side, b: _Side, pair: dict[int, int], left: Sequence[int], rest: Sequence[int]
) -> dict[int, int]:
    """Pairs of one kind among those that are between two pairs."""
    ends = sorted(pair.items())
    gaps: dict[int, tuple[list[int], list[int]]] = {}
    for side, every in enumerate((left, rest)):
        known = np.array([x[side] for x in ends])
        for i in every:
            gap = int(np.searchsorted(known, i)) if len(known) else 0
            gaps.setdefault(gap, ([], []))[side].append(i)
    found = dict[int, int]()
    for of_a, of_b in gaps.values():
        if of_a and of_b:
            found |= _aligned(a, b, of_a, of_b, _by_kind)
    return found


def _by_value(a: _Side, b: _Side, pair: dict[int, int]) -> dict[int, int]:
    """The same pairs, but operations that gave the same numbers are paired.

    Where the two of a pair gave other numbers, and another operation gave the same.
    """

    def differs(i: int) -> bool:
        if i not in pair:
            return True
        error = apart(a.run.operations[i], b.run.operations[pair[i]]).error
        unit = max(a.unit(i), b.unit(pair[i]))
        return bool((error > FACTOR * unit).any())

    odd = [i for i in a.kept if differs(i)]
    taken = {j for i, j in pair.items() if i not in set(odd)}
    free: dict[Hashable, list[int]] = {}
    for j in b.kept:
        if j not in taken:
            free.setdefault(_alike(b, j), []).append(j)
    stacks = {
        key: np.stack([b.run.operations[j] for j in every])
        for key, every in free.items()
    }
    units = {key: np.array([b.unit(j) for j in every]) for key, every in free.items()}
    is_used = {key: np.zeros(len(every), bool) for key, every in free.items()}
    found = dict[int, int]()
    for i in odd:
        key, own = _alike(a, i), a.run.operations[i]
        if key not in free or not _is_telling(own):
            continue
        others, stack = free[key], stacks[key]
        errors = apart(np.broadcast_to(own, stack.shape), stack).error
        errors = errors.reshape(len(others), -1).max(1, initial=0.0)
        limits = FACTOR * np.maximum(a.unit(i), units[key])
        errors = np.where((errors > limits) | is_used[key], np.inf, errors)
        best = int(np.argmin(errors))
        if errors[best] < np.inf:
            found[i], is_used[key][best] = others[best], True
    used = {*found.values()}
    kept = {i: j for i, j in pair.items() if i not in found and j not in used}
    return kept | found


def _alike(side: _Side, i: int) -> Hashable:
    """What two operations share if they may give the same numbers."""
    operation, sketch = side.made.operations[i], side.run.operations[i]
    size = int(np.prod(operation.shape))
    few = operation.place.operation if size < _FEW else ""
    return (size, sketch.shape, few)


def _is_telling(sketch: np.ndarray) -> bool:
    """Whether it is not all zeros."""
    return bool((sketch[..., 1].copy().view(np.float32) > 0).any())


# Errors of operands.

Errors = dict[int, np.ndarray]


def _reach(side: _Side, errors: Errors, given: dict[int, float]) -> Errors:
    """The error with which each operation's result goes on, in each iteration.

    Of an operation without a like it is that of its operands.
    """
    reach = {
        i: errors.get(i, np.zeros(side.run.operations[i].shape[:-2])) for i in side.kept
    }
    odd = [i for i in side.kept if i not in errors]
    for _ in range(3):  # what a loop carries comes later in the program
        for i in odd:
            reach[i] = _known(side, i, reach, reach[i].shape, given)
    return reach


def _known(
    side: _Side, i: int, reach: Errors, shape: tuple[int, ...], given: dict[int, float]
) -> np.ndarray:
    """The largest error among the operands of an operation, in each iteration."""
    loops, found = side.made.operations[i].loops, np.zeros(shape)
    for feed in side.feeds[i]:
        if feed.number < 0:
            found = np.maximum(found, given.get(-1 - feed.number, 0.0))
        elif feed.number in reach:
            found = np.maximum(found, _seen(side, feed, loops, reach, shape))
    return found


def _seen(
    side: _Side, feed: Feed, loops: tuple[int, ...], reach: Errors, shape: tuple
) -> np.ndarray:
    """The error of an operand in the iterations of the loops around its reader."""
    theirs, error = side.made.operations[feed.number].loops, reach[feed.number]
    if error.size == 0:
        return np.zeros(shape)
    pairs = zip(loops, theirs, strict=False)
    shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    late = next((n for n in range(shared) if loops[n] in feed.late), None)
    # Of loops inside, and where it may come from any iteration of them, the largest.
    inside = range(shared if late is None else late + 1, error.ndim)
    error = error.max(tuple(inside)) if inside else error
    if late is not None:
        is_while = side.made.loops[loops[late]].is_while
        error = _before(error, late, is_while)
    error = error.reshape(error.shape + (1,) * (len(shape) - error.ndim))
    return np.broadcast_to(error[tuple(map(slice, shape))], shape)


def _before(error: np.ndarray, axis: int, is_while: bool) -> np.ndarray:
    """The largest error in all iterations before each one."""
    error = np.maximum.accumulate(np.moveaxis(error, axis, 0), 0)
    before = np.concatenate([np.zeros_like(error[:1]), error[:-1]])
    if is_while:  # those before the last one are not kept
        before[-1] = error[-1]
    return np.moveaxis(before, 0, axis)
