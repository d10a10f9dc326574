# SPDX-License-Identifier: Apache-2.0
"""Derives the facts about each value in the program of a step, without running it.

With a wrapper's decision set to False, `known` shows what a skip leaves unchanged.
"""

import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jls._program.control import Site
from jls._program.degrees import common_degree, degree_of, degree_of_integers
from jls._program.facts import ANY, ZERO, Number, Operation, Same, Value, operations
from jls._program.history import is_scaled, narrowed_by, never_scaled_by, with_history
from jls._program.jaxprs import is_inexact_atom, is_narrow_atom, is_narrower
from jls._program.known import held_inputs, known_result, number_in, weights_of
from jls._program.places import is_transposed
from jls._program.products import PRODUCTS
from jls._program.walk import Question
from jls._scopes import DECISION, FLOAT8, INNER, SCALE, UPDATE, marks_of
from jls._tools.reading.derivatives import Derivatives
from jls._tools.reading.updates import ROLES, Updates

BITCAST = "bitcast_convert_type"
# In `Value.through`.
THROUGH_UPDATE, THROUGH_BACKWARD = 1, 2


class Flow(Question[Value]):
    """The analysis; see `jls._program.walk.Question`.

    Args:
      avals: of the inputs.
      scales: which inputs are loss scales.
      states: all inputs that are in the state of a scaler.
      is_skipped: whether every wrapper decides to skip.
    """

    def __init__(
        self,
        avals: Sequence[Any],
        scales: Sequence[int],
        states: frozenset[int],
        is_skipped: bool = False,
    ) -> None:
        self._avals, self._is_skipped = avals, is_skipped
        self._random = 1 << len(avals)
        self._of_inputs = 2 * self._random - 1
        self._of_scalers = sum(1 << i for i in states)
        self.bit_of_gradients = 2 * self._random  # in `follows`: unscaled values
        self._of_calls = -4 * self._random  # all bits of the gradients of wrappers
        self.updates = Updates(4 * self._random)
        self.derivatives = Derivatives(self._is_of_scales)
        # The place where updates with a negative factor are subtracted.
        self.subtracted: list[tuple[Site, Value]] = []
        # By the place in the program: what wrappers' updates are added to, and they.
        self.added: dict[tuple[int, ...], tuple[Site, Value, Value]] = {}
        # Inputs in the place of which a wrapper puts something, unless it skips.
        self.replaced = set[int]()
        # By the place in the program: the results of operations in narrow dtypes, but
        # for those that an autocast to float8 scales, and those of products.
        self.narrow: dict[tuple[int, ...], Value] = {}
        self.products: dict[tuple[int, ...], Value] = {}
        self.inputs = [
            self._input(i, aval, scales.index(i) if i in scales else None)
            for i, aval in enumerate(avals)
        ]

    def _input(self, i: int, aval: Any, scale: int | None) -> Value:
        bit = 1 << i
        is_data = is_inexact_atom(aval)
        return Value(
            degree=ZERO if scale is None else ((("scale", scale), Fraction(1)),),
            depends=bit if is_data else 0,
            follows=bit if is_data else 0,
            known=Same(i),
            weights=((i, 1.0),),
            holds=bit,
            scale=scale,
            is_splat=aval.ndim == 0,
        )

    def _has_data(self, depends: int) -> bool:
        """Whether a set of inputs has more than the states of scalers."""
        return bool(depends & ~self._of_scalers)

    def _is_of_scales(self, value: Value) -> bool:
        """Whether a value is computed only from the states of scalers."""
        return bool(value.depends) and not self._has_data(value.depends)

    def is_random(self, value: Value) -> bool:
        return bool(value.depends & self._random)

    # Numbers in the program, and control flow.

    def of_constant(self, value: Any) -> Value:
        number = number_in(value)
        if number is None:
            return Value()
        # No factor changes 0, inf and NaN.
        is_any = isinstance(number.value, float) and (
            number.value == 0 or not math.isfinite(number.value)
        )
        return Value(degree=ANY if is_any else ZERO, known=number, is_splat=True)

    def enter_call(self, site: Site, operands: Sequence[Value]) -> None:
        self.updates.note(site, operands)

    def call_results(self, site: Site, results: Sequence[Value]) -> Sequence[Value]:
        return _with_roles(marks_of(site), results)

    def branch(self, index: Value) -> int | None:
        known = index.known
        return int(known.value) if isinstance(known, Number) else None

    def slice(self, value: Value) -> Value:
        return value.sliced()

    def join(self, site: Site, one: Value, other: Value) -> Value:
        if one is other:
            return one
        has_data = self._has_data(one.depends | other.depends)
        return one.joined(other).replace(
            degree=common_degree(site, [one, other], has_data)
        )

    def carry(self, site: Site, before: Value, after: Value) -> Value:
        if before.scale is not None:
            return before  # the scaler adjusts it
        joined = self.join(site, before, after)
        return before if before.says_as_much_as(joined) else joined

    # Operations.

    def results_of(self, site: Site, operands: Sequence[Value]) -> Sequence[Value]:
        marks = self.updates.note(site, operands)
        if INNER in marks:
            operands = [self.updates.marked(x) for x in operands]
        ops = operations(site, operands)
        if UPDATE in marks and not self._is_skipped:
            self._note_replaced(ops)
        results = [self._with_multiple(op, self._result(op, marks)) for op in ops]
        if INNER in marks:
            self.derivatives.note_inner(ops)
        if UPDATE in marks and ops and ops[0].name == "convert_element_type":
            self.updates.widened(operands[0], results[0])
        if DECISION in marks and self._is_skipped:
            results = [
                x.replace(known=Number(False)) if op.aval.dtype == bool else x
                for op, x in zip(ops, results, strict=True)
            ]
        if SCALE in marks:
            results = [_adjusted(site, operands, x) for x in results]
        for i, op in enumerate(ops):
            if is_narrow_atom(op.aval) and FLOAT8 not in marks:
                self.narrow[(*site.indices, i)] = results[i]
            if op.name in PRODUCTS:
                self.products[site.indices] = results[i]
        return _with_roles(marks, results)

    def _with_multiple(self, op: Operation, value: Value) -> Value:
        multiple = self.derivatives.multiple(op) if is_inexact_atom(op.aval) else None
        return value if multiple == value.multiple else value.replace(multiple=multiple)

    def _result(self, op: Operation, marks: frozenset[str]) -> Value:
        """The facts about a result, from the rules of each kind."""
        known = known_result(op, self._avals)
        if isinstance(known, Number):
            return self.of_constant(known.value).replace(known=known)
        if op.name == "select_n" and isinstance(op.operands[0].known, Number):
            return op.data[int(op.operands[0].known.value)]
        depends, follows, through = self._taint(op, marks)
        holds = held_inputs(op)
        is_splat = op.aval.ndim == 0 or all(x.is_splat for x in op.operands)
        if not is_inexact_atom(op.aval):
            is_flag = op.aval.dtype == bool
            return Value(
                follows=follows if _is_of_bits(op) else 0,
                degree=ZERO if is_flag or FLOAT8 in marks else degree_of_integers(op),
                depends=depends & self._random if is_flag else depends,
                known=known,
                holds=holds,
                is_splat=is_splat,
                unscaled=next((x.unscaled for x in op.operands if x.unscaled), None),
                is_of_scaled=any(is_scaled(x) or x.is_of_scaled for x in op.operands),
            )
        is_same = op.row.moves == "same" or op.name == "convert_element_type"
        if isinstance(known, Same) and is_same:
            value = next(x for x in op.data if x.known == known)
            narrowed = narrowed_by(op, value)
            return (
                value
                if narrowed is value.narrowed
                else value.replace(narrowed=narrowed)
            )
        degree = degree_of(op, self._has_data(depends))
        is_narrow = is_narrower(op.aval.dtype, np.float32)
        value = Value(
            degree=degree,
            depends=depends,
            follows=follows,
            through=through,
            known=known,
            weights=weights_of(op),
            holds=holds,
            site=op.site,
            is_narrow=is_narrow or any(x.is_narrow for x in op.operands),
            degree_site=_degree_site(op, degree),
            is_splat=is_splat,
            sign=_sign(op, INNER in marks),
        )
        if op.name == "sub" and not marks:
            first, second = op.operands
            # From an input, what an optimizer has made negative.
            if isinstance(first.known, Same) and second.sign == -1:
                self.subtracted.append((op.site, second))
        if op.name == "add":
            self._note_added(op, INNER in marks)
        if INNER not in marks:  # parameters come out of it
            value = value.replace(never_scaled=never_scaled_by(op, value))
        by_scale = any(map(self._is_of_scales, op.operands))
        value = with_history(op, value, by_scale)
        if value.unscaled is not op.site or not any(map(is_scaled, op.operands)):
            return value
        self.updates.reaches_gradients |= value.depends
        return value.replace(follows=follows | self.bit_of_gradients)

    def _note_replaced(self, ops: Sequence[Operation]) -> None:
        """Notes old states where a wrapper selects between them and new ones."""
        for op in ops:
            known = [x.known for x in op.data] if op.name == "select_n" else []
            olds = {x.index for x in known if isinstance(x, Same)}
            if len(set(known)) > 1:
                self.replaced |= olds

    def _note_added(self, op: Operation, is_inner: bool) -> None:
        """Notes a sum of an update, as a wrapper made it, and something else."""
        for update, other in (op.operands, op.operands[::-1]):
            is_update = update.site and UPDATE in marks_of(update.site)
            if is_inner and not isinstance(other.known, Same):
                continue
            if is_update and update.follows & self._of_calls:
                self.added[op.site.indices] = op.site, other, update

    def _taint(self, op: Operation, marks: frozenset[str]) -> tuple[int, int, int]:
        """The inputs that a result depends on, follows, and goes through, as bits."""
        facts = ((x.depends, x.follows, x.through) for x in op.operands)
        columns = list(zip(*facts, strict=True)) or [(), (), ()]
        depends, follows, through = (
            functools.reduce(operator.or_, column, 0) for column in columns
        )
        if op.row.is_random:
            depends |= self._random
        if not (op.row.moves or op.row.is_elementwise or op.name == BITCAST):
            follows &= ~self._of_inputs if INNER in marks else 0
        if UPDATE in marks:
            through |= THROUGH_UPDATE
        if is_transposed(op.site):
            through |= THROUGH_BACKWARD
        return depends, follows, through


def _is_of_bits(op: Operation) -> bool:
    """Whether an integer may be bits of a number, as rounding with bits takes them.

    Other integers follow nothing.
    """
    atoms = op.equation.invars
    return op.name == BITCAST or not any(is_inexact_atom(x.aval) for x in atoms)


def _with_roles(marks: frozenset[str], values: Sequence[Value]) -> Sequence[Value]:
    roles = marks.intersection(ROLES)
    return [x.replace(roles=x.roles | roles) for x in values] if roles else values


def _sign(op: Operation, is_inner: bool) -> int | None:
    """The sign of the numbers that an inner optimizer has multiplied by."""
    signs = [x.sign for x in op.operands]
    if op.name in ("mul", "div", "neg"):
        known = [x.known.value for x in op.operands if isinstance(x.known, Number)]
        own = [-1 if x < 0 else 1 for x in known] + [-1] * (op.name == "neg")
        signs = [x for x in signs if x is not None]
        return math.prod([*own, *signs]) if signs or (is_inner and own) else None
    data = op.data if op.row.moves else op.operands[: op.name == "convert_element_type"]
    # A skip makes zeros.
    moved = {x.sign for x in data if not isinstance(x.known, Number)}
    return moved.pop() if len(moved) == 1 else None


def _degree_site(op: Operation, degree: Any) -> Site | None:
    if degree in (ZERO, ANY):
        return None
    same = (x.degree_site for x in op.operands if x.degree == degree and x.degree_site)
    return next(same, op.site)


def _adjusted(site: Site, operands: Sequence[Value], result: Value) -> Value:
    """The loss scale after a step: another scale, with a symbol of its own."""
    old = next((x for x in operands if x.scale is not None), None)
    if old is None or result is old:
        return result
    symbol = ("adjusted", site.indices)
    return result.replace(degree=((symbol, Fraction(1)),), scale=old.scale)
