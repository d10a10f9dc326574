# SPDX-License-Identifier: Apache-2.0
"""The kind of each value of a program: what is stored in half, and why others are not.

    CONSTANT   a number in the program. It takes the dtype of what it meets
    GIVEN      an argument, or computed from arguments alone: the same
    CACHE      an array that is only written into, in half
    HALF       computed from the result of a product in half, and leads to another one
    WIDE       float32: a sum, a mean, what leads to no product, what leaves the range

The largest operands of an operation decide; smaller ones, such as a mean or a bias, do
not. Read forwards, from the arguments.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jls._autocast.keep import OUTER, Choice
from jls._autocast.leads import Leads, moves_each
from jls._program.control import MAIN, Call, Site, calls_of, evaluate
from jls._program.jaxprs import (
    Program,
    is_float32,
    is_inexact_atom,
    is_literal,
    opened,
    parameter,
    size_of,
)
from jls._program.primitives import Primitive, primitive_of
from jls._tree import is_extended

# Programs that JAX does not see into. What they return is as good as an argument.
_FOREIGN = ("custom_vjp_call", "ffi_call", "pallas_call", "run_state", "xla_pmap")


class Kind(IntEnum):
    CONSTANT = 0
    GIVEN = 1
    CACHE = 2
    HALF = 3
    WIDE = 4


class Fact(NamedTuple):
    """What is known of a value before anything is computed."""

    kind: Kind
    share: float = 1.0  # of its elements that differ: under 1 where it was broadcast
    is_beyond: bool = False  # whether a number beyond the range of half is in it
    name: Any = None  # of the array that it holds, moved or not
    maxima_of: frozenset[Any] = frozenset()  # names of arrays that it is no less than
    is_at_most_0: bool = False

    @property
    def is_half(self) -> bool:
        return self.kind in (Kind.HALF, Kind.CACHE)

    def plain(self, kind: Kind | None = None) -> "Fact":
        """The fact about what has been computed from it."""
        return Fact(self.kind if kind is None else kind, self.share, self.is_beyond)


class Way(IntEnum):
    """How an operation is computed."""

    WIDE = 0  # as written, in float32
    HALF = 1
    INSIDE = 2  # in float32, and rounded at the end of the chain
    PRODUCT = 3


class Step(NamedTuple):
    """What becomes of one operation."""

    way: Way
    results: list[Fact]


class Kinds:
    """The facts about the results of each operation, by its site."""

    def __init__(self, choice: Choice, leads: Leads) -> None:
        self._choice, self._leads = choice, leads
        self.steps: dict[tuple[int, ...], Step] = {}
        self._half = jnp.finfo(choice.dtype)
        self._is_float16 = choice.dtype == jnp.float16

    def read(
        self, program: Program, operands: Sequence[Fact], site: Site = MAIN
    ) -> list[Fact]:
        """The facts about the results of a program, from those about its inputs."""

        def run(here: Site, facts: list[Fact]) -> Sequence[Fact]:
            leads = [self._leads.at(site, x) for x in here.equation.outvars]
            step = self._of_equation(here, facts, leads)
            self.steps[here.indices] = step
            return step.results

        return evaluate(program, operands, self.of_constant, run, site)

    def of_constant(self, value: Any) -> Fact:
        """The fact about a number in the program, or about an array that it holds."""
        is_number = not np.shape(value) and not is_extended(value)
        is_known = is_number or isinstance(value, np.ndarray)
        if not is_known or isinstance(value, Tracer):
            return Fact(Kind.GIVEN, name=object())
        array = np.asarray(value) if hasattr(value, "dtype") else np.array(value)
        if array.dtype != np.float32:
            return Fact(Kind.CONSTANT)
        finite = np.abs(array[np.isfinite(array)])
        largest = finite.max(initial=0.0)
        return Fact(Kind.CONSTANT, is_beyond=bool(largest > float(self._half.max)))

    def _of_equation(self, site: Site, facts: list[Fact], leads: list[bool]) -> Step:
        equation = site.equation
        if equation.primitive.name in _FOREIGN:
            return Step(Way.WIDE, [Fact(Kind.GIVEN) for _ in equation.outvars])
        calls = calls_of(equation)
        if calls:
            return Step(Way.WIDE, self._of_calls(site, calls, facts, leads))
        is_product = primitive_of(equation).cast == "product"
        why_wide = self._choice.why_wide(site) if is_product else ""
        if why_wide is None:
            return Step(Way.PRODUCT, [Fact(Kind.HALF, name=object())])
        if why_wide == OUTER:
            return _of_outer(facts, leads[0])
        if self._choice.is_kept(site):
            return Step(Way.WIDE, [Fact(Kind.GIVEN) for _ in equation.outvars])
        way, results = self._of_operation(equation, facts, leads)
        named = (
            fact if fact.name is not None else fact._replace(name=object())
            for fact in results
        )
        return Step(way, list(named))

    def _of_operation(
        self, equation: Any, facts: list[Fact], leads: list[bool]
    ) -> tuple[Way, list[Fact]]:
        name, row = equation.primitive.name, primitive_of(equation)
        if not any(map(is_float32, equation.outvars)):
            return Way.WIDE, [_of_others(x, facts) for x in equation.outvars]
        if moves_each(equation):
            results = [
                fact.plain(Kind.WIDE) if fact.is_half and not lead else fact
                for fact, lead in zip(facts, leads, strict=True)
            ]
            return Way.HALF, results
        if name == "convert_element_type":
            return Way.WIDE, [self._of_cast(equation, facts[0], leads[0])]
        if row.cast in ("half", "inside", "leaves"):
            way, fact = self._of_elementwise(equation, row, facts, leads[0])
            return way, [fact]
        if row.cast == "write":
            way, fact = _of_write(facts[row.data], leads[0])
            return way, [fact]
        if row.cast in ("move", "shape", "extreme"):
            way, fact = self._of_move(equation, row, facts, any(leads))
            return way, [fact] * len(equation.outvars)
        if row.is_random or name in ("bitcast_convert_type", "iota"):
            return Way.WIDE, [_of_others(x, facts) for x in equation.outvars]
        if row.cast == "devices":
            wide = any(fact.kind == Kind.WIDE for fact in facts)
            kind = Kind.WIDE if wide else Kind.GIVEN
            return Way.WIDE, [Fact(kind) for _ in equation.outvars]
        is_constant = all(fact.kind == Kind.CONSTANT for fact in facts)
        kind = Kind.CONSTANT if is_constant else Kind.WIDE
        return Way.WIDE, [Fact(kind) for _ in equation.outvars]

    def _of_cast(self, equation: Any, fact: Fact, leads: bool) -> Fact:
        """An integer follows; another float that is cast to float32 stays there."""
        if is_float32(equation.invars[0]):
            return fact if leads or not fact.is_half else fact.plain(Kind.WIDE)
        if is_inexact_atom(equation.invars[0]):
            return Fact(Kind.WIDE)
        return fact.plain()

    def _of_elementwise(
        self, equation: Any, row: Primitive, facts: list[Fact], leads: bool
    ) -> tuple[Way, Fact]:
        name = equation.primitive.name
        atoms, facts = equation.invars[row.data], facts[row.data]
        size = _size(equation.outvars[0].aval)
        differing = [
            0.0
            if fact.kind == Kind.CONSTANT or not is_float32(atom)
            else _size(atom.aval) * fact.share
            for atom, fact in zip(atoms, facts, strict=True)
        ]
        largest = max(differing)
        is_beyond = any(fact.is_beyond for fact in facts)
        if not largest:
            return Way.WIDE, Fact(Kind.CONSTANT, is_beyond=is_beyond)
        deciding = [
            fact.kind for fact, n in zip(facts, differing, strict=True) if n == largest
        ]
        # exp of a number beyond the range is 0 or inf, tanh is -1 or 1.
        stays = is_beyond and row.infs != "exp" and row.degree != "bounded"
        made = Fact(max(deciding), min(1.0, largest / max(size, 1)), stays)
        made = _with_maximum(made, name, facts)
        has_small_sum = any(fact.kind == Kind.WIDE for fact in facts)
        # The norm of an argument is as good as half, where it leads to a product.
        is_half = made.is_half or (made.kind == Kind.GIVEN and has_small_sum and leads)
        if not is_half:
            return Way.WIDE, made
        made = made._replace(kind=Kind.HALF)
        if not leads or self._leaves_range(equation, row, atoms, facts):
            return Way.WIDE, made._replace(kind=Kind.WIDE)
        is_inside = row.cast == "inside" or (is_beyond and not row.is_choice)
        return (Way.INSIDE if has_small_sum or is_inside else Way.HALF), made

    def _leaves_range(
        self, equation: Any, row: Primitive, atoms: list[Any], facts: list[Fact]
    ) -> bool:
        """Whether half is too narrow for an operation, or for its derivative."""
        if any(is_literal(x) and self._vanishes(x.val) for x in atoms):
            return True
        if not self._is_float16:
            return False
        name = equation.primitive.name
        if name == "exp":
            return not facts[0].is_at_most_0  # softmax
        if name == "integer_pow":
            return parameter(equation, "y") < 0
        if name == "div":
            return facts[0].kind == Kind.CONSTANT
        return row.cast == "leaves"

    def _vanishes(self, value: Any) -> bool:
        """Whether half rounds a number in the program to 0."""
        with np.errstate(over="ignore"):
            return bool(value != 0 and np.asarray(value).astype(self._half.dtype) == 0)

    def _of_move(
        self, equation: Any, row: Primitive, facts: list[Fact], leads: bool
    ) -> tuple[Way, Fact]:
        moved = facts[row.data]
        sizes = [_size(x.aval) for x in equation.invars[row.data]]
        sized = [
            (size, fact)
            for size, fact in zip(sizes, moved, strict=True)
            if fact.kind != Kind.CONSTANT
        ]
        is_beyond = any(fact.is_beyond for fact in moved)
        if not sized:
            return Way.WIDE, Fact(Kind.CONSTANT, is_beyond=is_beyond)
        largest = max(sized, key=lambda pair: pair[0])[1]
        share = 1.0
        if equation.primitive.name == "broadcast_in_dim":
            size = _size(equation.outvars[0].aval)
            share = min(1.0, largest.share * sizes[0] / max(size, 1))
        elif len(moved) == 1 and row.moves:
            share = largest.share
        result = Fact(largest.kind, share, is_beyond)
        if len(moved) == 1:
            result = result._replace(
                name=largest.name,
                maxima_of=largest.maxima_of,
                is_at_most_0=largest.is_at_most_0,
            )
        if row.cast == "extreme":
            result = result._replace(
                name=None, maxima_of=largest.maxima_of | {largest.name}
            )
        if result.is_half:
            kind = Kind.HALF if leads else Kind.WIDE
            way = Way.HALF if leads else Way.WIDE
            return way, result._replace(kind=kind)
        return Way.WIDE, result

    # Control flow.

    def _of_calls(
        self, site: Site, calls: list[Call], facts: list[Fact], leads: list[bool]
    ) -> list[Fact]:
        if calls[0].is_loop:
            results = self._of_loop(site, calls[0], facts, leads)
            for call in calls[1:]:  # the condition of a `while`
                inputs = [*facts[: call.consts], *results]
                self.read(call.program, inputs, call.site(site))
            return results
        branches = [self.read(x.program, x.inputs(facts), x.site(site)) for x in calls]
        return _chosen(branches, leads) if calls[0].kind == "branch" else branches[0]

    def _of_loop(
        self, site: Site, call: Call, facts: list[Fact], leads: list[bool]
    ) -> list[Fact]:
        inputs, last = call.inputs(facts), call.consts + call.carried
        results = self._loop(
            site,
            call.program,
            inputs[: call.consts],
            inputs[call.consts : last],
            list(map(_entering, inputs[last:])),
            _scanned if call.kind == "scan" else _repeated,
        )
        carried, stacked = results[: call.carried], results[call.carried :]
        stacks = zip(stacked, leads[call.carried :], strict=True)
        return carried + [
            fact.plain() if lead or not fact.is_half else fact.plain(Kind.WIDE)
            for fact, lead in stacks
        ]

    def _loop(
        self,
        site: Site,
        body: Any,
        fixed: list[Fact],
        carry: list[Fact],
        slices: list[Fact],
        join: Any,
    ) -> list[Fact]:
        """The facts about the results of a loop's body, in any iteration."""
        inputs = opened(body).jaxpr.invars[len(fixed) :]
        is_kept = self._choice.is_kept(site)
        leads = [self._leads.at(site, x) and not is_kept for x in inputs]
        state = [_entering(fact) for fact in carry]
        while True:
            results = self.read(body, [*fixed, *state, *slices], site)
            joined = [
                before
                if not is_float32(atom)
                else _joined(before, after, join(before.kind, after, lead))
                for atom, before, after, lead in zip(
                    inputs, state, results, leads, strict=False
                )
            ]
            if joined == state:
                return [*state, *results[len(state) :]]
            state = joined


def _chosen(branches: list[list[Fact]], leads: list[bool]) -> list[Fact]:
    """What is one of several is half if all are."""
    joined = []
    for results, lead in zip(zip(*branches, strict=True), leads, strict=True):
        kind = max(fact.kind for fact in results)
        is_half = kind in (Kind.HALF, Kind.CACHE)
        joined.append(
            Fact(
                Kind.WIDE if is_half and not lead else kind,
                max(fact.share for fact in results),
                any(fact.is_beyond for fact in results),
            )
        )
    return joined


def _size(aval: Any) -> int:
    return size_of(aval.shape)


def _of_others(atom: Any, facts: Sequence[Fact]) -> Fact:
    """What is no float follows; other floats are as the program has them."""
    if is_inexact_atom(atom) and not is_float32(atom):
        return Fact(Kind.WIDE)
    is_constant = all(fact.kind == Kind.CONSTANT for fact in facts)
    return Fact(Kind.CONSTANT if is_constant else Kind.GIVEN)


def _with_maximum(made: Fact, name: str, facts: Sequence[Fact]) -> Fact:
    """Adds that `x - max(x)` is at most 0, and what a maximum is taken over."""
    if name == "sub":
        return made._replace(is_at_most_0=facts[0].name in facts[1].maxima_of)
    if name == "max":
        names = frozenset(fact.name for fact in facts)
        maxima = frozenset[Any]().union(*(fact.maxima_of for fact in facts))
        return made._replace(maxima_of=names | maxima)
    if name == "select_n":  # 0 in the place of a maximum that is -inf
        maxima = frozenset[Any]().union(*(fact.maxima_of for fact in facts))
        return made._replace(maxima_of=maxima)
    return made


def _of_outer(facts: Sequence[Fact], leads: bool) -> Step:
    """A product that sums nothing; `facts` are of its two operands."""
    kind = max(fact.kind for fact in facts)
    is_beyond = any(fact.is_beyond for fact in facts)
    is_half = kind in (Kind.HALF, Kind.CACHE)
    if is_half and leads and not is_beyond:
        return Step(Way.HALF, [Fact(Kind.HALF, name=object())])
    made = Fact(Kind.WIDE if is_half else kind, 1.0, is_beyond, name=object())
    return Step(Way.WIDE, [made])


def _of_write(facts: Sequence[Fact], leads: bool) -> tuple[Way, Fact]:
    """An array with a part of it replaced; `facts` are of the array and of the part."""
    array, part = facts
    is_beyond = array.is_beyond or part.is_beyond
    kinds = {array.kind, part.kind}
    if Kind.WIDE not in kinds and kinds & {Kind.HALF, Kind.CACHE} and leads:
        return Way.HALF, Fact(Kind.CACHE, 1.0, is_beyond)
    kind = max(kinds)
    is_half = kind in (Kind.HALF, Kind.CACHE)
    return Way.WIDE, Fact(Kind.WIDE if is_half else kind, 1.0, is_beyond)


def _entering(fact: Fact) -> Fact:
    return fact.plain()._replace(share=1.0)


def _joined(before: Fact, after: Fact, kind: Kind) -> Fact:
    return Fact(kind, 1.0, before.is_beyond or after.is_beyond)


def _scanned(before: Kind, after: Fact, leads: bool) -> Kind:
    """The kind of a carry of `scan`; what begins as a constant is an accumulator."""
    if before == after.kind or after.kind == Kind.CONSTANT:
        kind = before
    elif before == Kind.CONSTANT:
        kind = Kind.CACHE if after.kind == Kind.CACHE else Kind.WIDE
    else:
        kind = max(before, after.kind)
    is_half = kind in (Kind.HALF, Kind.CACHE)
    return Kind.WIDE if is_half and not leads else kind


def _repeated(before: Kind, after: Fact, leads: bool) -> Kind:
    """The kind of a carry of `while_loop`: float32, but for a cache."""
    if after.kind == Kind.CACHE and before != Kind.WIDE and leads:
        return Kind.CACHE
    is_unchanged = before == after.kind and before in (Kind.CONSTANT, Kind.GIVEN)
    return before if is_unchanged else Kind.WIDE
