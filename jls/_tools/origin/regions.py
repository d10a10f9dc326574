# SPDX-License-Identifier: Apache-2.0
"""Chooses which operations to record, if recording all takes minutes to compile.

XLA takes as long to compile a few records as the operation itself. So a large program
is first compiled with few records, at landmarks. They show between which landmarks an
inf or a NaN was born. A second program records only the operations between those.

    landmark    an operation that is recorded first: a product of matrices, whose result
                is in memory anyway; one at the end of a long row without a landmark;
                one that makes a root, or a result of a loop's iteration; each in a
                `while`; for `calibrate`, one that may be inf in float16 and small in
                float32
    region      a landmark with a bad result, and the operations between it and the
                landmarks before it
    open        a region whose operations are recorded: something was born there
    passed      a region where a NaN came in and got to the result by arithmetic.
                Another may be born there, so it is open too, as long as few operations
                are recorded
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from jls._program.control import Indices
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import is_literal, is_narrow_atom
from jls._program.primitives import Primitive, primitive_of
from jls._tools.origin.record import recordable, to_nearest_records
from jls._tools.origin.trail import OpResult, RunValue, Shortcuts, Trail, identity_of

# This many records do not take long to compile. A program with no more operations is
# recorded at once. Passed regions need no records: they get them only while there are
# no more than half as many.
FEW = 256
# The longest row of operations between landmarks.
_ROW = 32


def landmarks(main: Frame, roots: Collection[Variable]) -> frozenset[Indices] | None:
    """The operations to record first; None if all, since they are few.

    Args:
      main: the frame of the program.
      roots: the variables to follow back.
    """
    every = recordable(main, behind(roots))
    if len(every) <= FEW:
        return None
    found = set(_in_rows(main, every, {}))
    ends = list(roots)
    for frame in main.all():
        if frame.is_loop:
            ends += [(frame, x) for x in frame.jaxpr.outvars]
        if _is_in_while(frame):
            places = range(len(frame.jaxpr.eqns))
            found |= {frame.indices_of(index) for index in places} & every
    return frozenset(found | main.makers_of(to_nearest_records(ends)) & every)


def _in_rows(
    frame: Frame, every: set[Indices], rows: dict[Variable, int]
) -> Iterator[Indices]:
    """The landmarks of a program and its calls.

    Args:
      frame: the program.
      every: the operations that can be recorded.
      rows: how many operations without a landmark are before each variable.
    """

    def row_of(frame: Frame, atoms: Iterable[Any]) -> int:
        known = [rows.get((frame, x), 0) for x in atoms if not is_literal(x)]
        return max(known, default=0)

    for index, equation in enumerate(frame.jaxpr.eqns):
        called = frame.called(index)
        for child in called:
            if not child.is_loop:
                for x, i in child.inputs.items():
                    rows[child, x] = row_of(frame, [child.given(i)])
            yield from _in_rows(child, every, rows)
        row, indices = row_of(frame, equation.invars), frame.indices_of(index)
        if indices in every:
            row += 1
            known = primitive_of(equation)
            if row > _ROW or _is_in_memory(known) or _is_pole(known, equation):
                yield indices
                row = 0
        for i, x in enumerate(equation.outvars):
            ends = [row_of(child, child.jaxpr.outvars[i : i + 1]) for child in called]
            rows[frame, x] = max(ends, default=row)


def _is_in_memory(row: Primitive) -> bool:
    """Whether it is a product of matrices or a convolution."""
    return row.degree == "product" and not row.is_elementwise


def _is_pole(row: Primitive, equation: Any) -> bool:
    """Whether it may divide by a number that a narrow dtype has rounded to 0."""
    return row.like in ("div", "root", "log") and is_narrow_atom(equation.outvars[0])


def _is_in_while(frame: Frame) -> bool:
    return any(x.kind == "while" for x in frame.around())


class Region(NamedTuple):
    """A landmark, and the operations between it and the landmarks before it."""

    top: OpResult
    inside: frozenset[OpResult]
    ends: tuple[RunValue, ...]  # the values that come in
    nan: tuple[RunValue, ...]  # those with a NaN that surely reaches the top


class Search(NamedTuple):
    """Where to look closely."""

    only: frozenset[Indices]  # the operations to record
    shortcuts: Shortcuts


def search(
    trail: Trail,
    roots: Iterable[RunValue],
    wanted: Collection[Indices],
    only_first: bool = False,
) -> Search:
    """Says where to look for the births of the bad values in some roots.

    Args:
      trail: a run with records at landmarks.
      roots: its bad roots.
      wanted: the operations that the roots are computed from.
      only_first: whether one birth is enough.
    """
    regions = _regions(trail, roots, wanted)
    only, opened = set[Indices](), set[Indices]()
    ranked = sorted(regions, key=lambda x: _rank(trail, x))
    for region in ranked[:1] if only_first else ranked:
        here = {x.site.indices for x in (region.top, *region.inside)}
        ends = map(trail.origin, region.ends)
        around = [x for x in ends if isinstance(x, OpResult)]
        more = here.union(x.site.indices for x in around if not _is_in_while(x.frame))
        if _is_passed(trail, region) and len(only | more) > FEW // 2:
            continue
        opened |= here
        if region.inside:
            only |= more
    beyond = {
        x.top: [*(x.nan if _is_passed(trail, x) else filter(trail.is_bad, x.ends))]
        for x in regions
        if only_first or _is_passed(trail, x)
    }
    return Search(frozenset(only), Shortcuts(frozenset(opened), beyond))


def _is_passed(trail: Trail, region: Region) -> bool:
    return bool(region.nan) and trail.size_of(region.top).is_nan


def _rank(trail: Trail, region: Region) -> tuple[Any, ...]:
    """A key that sorts regions in the order in which to look: program order.

    Passed regions come last. Among them, those that an inf came into are first: it may
    be a NaN later.
    """
    is_passed = _is_passed(trail, region)
    has_inf = any(trail.is_bad(x) and not trail.size(x).is_nan for x in region.ends)
    return is_passed, is_passed and not has_inf, region.top.site.indices


def _regions(
    trail: Trail, roots: Iterable[RunValue], wanted: Collection[Indices]
) -> list[Region]:
    """The regions that an inf or a NaN in the roots may have come through."""
    regions: list[Region] = []

    def visit(origin: Any, reader: OpResult | None) -> Iterable[RunValue]:
        del reader
        if not isinstance(origin, OpResult):
            return ()
        region = _region(trail, origin, wanted)
        regions.append(region)
        ends = region.nan if _is_passed(trail, region) else region.ends
        return filter(trail.is_bad, ends)

    trail.follow(roots, visit)
    return regions


def _region(trail: Trail, top: OpResult, wanted: Collection[Indices]) -> Region:
    """The region of a landmark."""
    recorded = trail.records.only or frozenset()

    def is_wanted(op: OpResult) -> bool:
        return op.site.indices in wanted

    inside, ends, nan = set[OpResult](), dict[Any, RunValue](), dict[Any, RunValue]()
    # Two rounds. The first follows only operations from which a NaN reaches the top.
    for is_sure in (True, False):
        stack, visited = [top], set[OpResult]()
        while stack:
            op = stack.pop()
            if op in visited:
                continue
            visited.add(op)
            if is_sure and not _keeps_nan(op.site.equation):
                continue
            values = trail.operands(op)
            if op.site.equation.primitive.name == "select_n":
                values.append(trail.predicate(op))
            for value, origin in trail.nearest(values, is_wanted):
                if isinstance(origin, OpResult) and origin.site.indices not in recorded:
                    inside.add(origin)
                    stack.append(origin)
                else:
                    ends[identity_of(origin)] = value
                    if is_sure and trail.size(value).is_nan:
                        nan[identity_of(origin)] = value
    return Region(top, frozenset(inside), tuple(ends.values()), tuple(nan.values()))


def _keeps_nan(equation: Any) -> bool:
    """Whether a NaN in any operand is one in the result.

    XLA's maximum may lose it. A convolution with strides may step over it, but counts
    as one that keeps it: no array has been seen that is NaN only there, with another
    NaN born behind it.
    """
    row = primitive_of(equation)
    if row.moves:
        is_whole = equation.primitive.name in ("concatenate", "pad", "stack", "tile")
        return row.moves != "some" or is_whole
    is_function = row.like in ("exp", "log", "log1p", "root")
    arithmetic = ("linear", "sum", "product", "quotient", "bounded")
    is_smooth = row.degree in arithmetic or not isinstance(row.degree, str)
    return row.infs != "" or row.keeps_inf or is_function or is_smooth
