# SPDX-License-Identifier: Apache-2.0
"""Derives the facts about each value in the program of a step, without running it.

With a wrapper's decision set to False, `known` shows what a skip leaves unchanged.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from jls._program.jaxprs import is_inexact_atom
from jls._program.rules import (
    ELEMENTWISE,
    LINEAR,
    MOVES,
    PRODUCTS,
    RANDOM,
    SUMS,
    UNCHANGED,
    data_of,
)
from jls._program.walk import Site
from jls._scopes import DECISION, GRADIENTS, INNER, LOSS, SCALE, UPDATE, marks_of
from jls._tools.check.degrees import common_degree, degree_of, degree_of_integers
from jls._tools.check.known import held_inputs, known_result, number_in, weights_of
from jls._tools.check.values import (
    ANY,
    ZERO,
    Cast,
    Degree,
    Mixed,
    Number,
    Same,
    Unknown,
    Value,
)


class UpdateCall:
    """A call of a wrapper's `update`."""

    def __init__(self, number: int, site: Site) -> None:
        self.number, self.site = number, site
        self.scale: int | None = None  # the number of its loss scale
        self.gradients: list[Value] = []
        self.losses: list[Value] = []
        self.is_over = False


class Flow:
    """The analysis; see `jls._program.walk.Question`.

    Args:
      avals: of the inputs.
      scales: which inputs are loss scales.
      states: all inputs that are in the state of a scaler.
      skipped: the calls, by number, that decide to skip; None for all of them.
    """

    def __init__(
        self,
        avals: Sequence[Any],
        scales: Sequence[int],
        states: frozenset[int],
        skipped: frozenset[int] | None = frozenset(),
    ) -> None:
        self._avals, self._skipped = avals, skipped
        self._random = 1 << len(avals)
        self._of_inputs = 2 * self._random - 1
        self.bit_of_gradients = 2 * self._random  # in `follows`: unscaled values
        self._of_scalers = sum(1 << i for i in states)
        self._given: dict[int, tuple[Value, int]] = {}  # gradients, by identity
        self._numbers: dict[Any, int] = {}  # of calls, by site
        self._open: UpdateCall | None = None
        self.calls: dict[int, UpdateCall] = {}
        self.reaches_gradients = 0  # a set of bits: inputs that gradients depend on
        self.inputs = [
            self._input(i, aval, scales.index(i) if i in scales else None)
            for i, aval in enumerate(avals)
        ]

    def _input(self, i: int, aval: Any, scale: int | None) -> Value:
        is_data = is_inexact_atom(aval)
        return Value(
            degree=ZERO if scale is None else ((("scale", scale), Fraction(1)),),
            depends=1 << i if is_data else 0,
            follows=1 << i if is_data else 0,
            known=Same(i),
            weights=((i, 1.0),),
            holds=1 << i,
            scale=scale,
            is_splat=aval.ndim == 0,
        )

    def bit_of_call(self, number: int) -> int:
        """The bit, in `follows`, of the gradients in a call of a wrapper."""
        return 1 << (len(self._avals) + 2 + number)

    def _has_data(self, depends: int) -> bool:
        """Whether a set of inputs has more than the states of scalers."""
        return bool(depends & ~self._of_scalers)

    def is_random(self, value: Value) -> bool:
        return bool(value.depends & self._random)

    # Numbers in the program.

    def of_constant(self, value: Any) -> Value:
        number = number_in(value)
        if number is None:
            return Value()
        # No factor changes 0, inf and NaN.
        is_any = isinstance(number.value, float) and (
            number.value == 0 or not math.isfinite(number.value)
        )
        return Value(degree=ANY if is_any else ZERO, known=number, is_splat=True)

    # Control flow.

    def on_call(self, site: Site, operands: Sequence[Value]) -> None:
        self._note(site, operands)

    def of_call(self, site: Site, results: Sequence[Value]) -> Sequence[Value]:
        marks = marks_of(site)
        if GRADIENTS in marks or LOSS in marks:
            return [dataclasses.replace(x, is_checked=True) for x in results]
        return results

    def branch(self, index: Value) -> int | None:
        known = index.known
        return int(known.value) if isinstance(known, Number) else None

    def slice(self, value: Value) -> Value:
        if isinstance(value.known, Same):
            value = dataclasses.replace(value, known=None)
        return dataclasses.replace(value, scale=None, is_splat=False)

    stack = slice

    def join(self, site: Site, one: Value, other: Value) -> Value:
        if one is other:
            return one
        depends = one.depends | other.depends
        return Value(
            degree=common_degree(site, [one, other], self._has_data(depends)),
            depends=depends,
            follows=one.follows | other.follows,
            known=one.known if one.known == other.known else None,
            weights=one.weights if one.weights == other.weights else None,
            holds=one.holds & other.holds,
            scale=one.scale if one.scale == other.scale else None,
            site=one.site or other.site,
            degree_site=one.degree_site or other.degree_site,
            is_narrow=one.is_narrow or other.is_narrow,
            is_splat=one.is_splat and other.is_splat,
            is_checked=one.is_checked or other.is_checked,
            unscaled=one.unscaled or other.unscaled,
            gain=max(one.gain, other.gain),
            narrowed=one.narrowed or other.narrowed,
            cleaned=one.cleaned or other.cleaned,
            scaled=one.scaled or other.scaled,
            is_of_scaled=one.is_of_scaled or other.is_of_scaled,
        )

    def carry(self, site: Site, before: Value, after: Value) -> Value:
        if before.scale is not None:
            return before  # the scaler adjusts it
        joined = self.join(site, before, after)
        return before if _says_the_same(before, joined) else joined

    # Operations.

    def of_equation(self, site: Site, operands: Sequence[Value]) -> Sequence[Value]:
        marks = self._note(site, operands)
        equation = site.equation
        name, count = equation.primitive.name, len(equation.outvars)
        if INNER in marks:
            operands = [self._marked(x) for x in operands]
        widens = UPDATE in marks and name == "convert_element_type"
        given = self._given.get(id(operands[0])) if widens and operands else None
        depends = functools.reduce(operator.or_, (x.depends for x in operands), 0)
        follows = functools.reduce(operator.or_, (x.follows for x in operands), 0)
        if name in RANDOM:
            depends |= self._random
        if name not in MOVES and name not in ELEMENTWISE:
            follows &= ~self._of_inputs if INNER in marks else 0
        is_splat = all(x.is_splat for x in operands)
        results = []
        for i, variable in enumerate(equation.outvars):
            ins = operands
            if name in ("sort", "optimization_barrier") and len(operands) == count:
                ins = [operands[i]]
            bits = depends, follows
            results.append(self._result(site, ins, variable.aval, bits, is_splat))
        if given:  # gradients that the wrapper widens
            self._given[id(results[0])] = results[0], given[1]
        if DECISION in marks and self._is_skipped():
            results = [
                dataclasses.replace(x, known=Number(False))
                if variable.aval.dtype == bool
                else x
                for x, variable in zip(results, equation.outvars, strict=True)
            ]
        if GRADIENTS in marks or LOSS in marks:
            results = [dataclasses.replace(x, is_checked=True) for x in results]
        if SCALE in marks:
            results = [self._adjusted(site, operands, x) for x in results]
        return results

    def _result(
        self,
        site: Site,
        operands: Sequence[Value],
        aval: Any,
        bits: tuple[int, int],
        is_splat: bool,
    ) -> Value:
        depends, follows = bits
        name = site.equation.primitive.name
        data = data_of(name, list(operands))
        known = known_result(site.equation, operands, aval, self._avals)
        if isinstance(known, Number):
            return dataclasses.replace(self.of_constant(known.value), known=known)
        if name == "select_n" and isinstance(operands[0].known, Number):
            return data[int(operands[0].known.value)]
        if not is_inexact_atom(aval):
            is_flag = aval.dtype == bool
            return Value(
                degree=ZERO if is_flag else degree_of_integers(site, operands),
                depends=depends & self._random if is_flag else depends,
                known=known,
                holds=held_inputs(name, operands, data, aval),
                is_splat=is_splat or aval.ndim == 0,
                unscaled=next((x.unscaled for x in operands if x.unscaled), None),
                is_of_scaled=any(_is_scaled(x) or x.is_of_scaled for x in operands),
            )
        if isinstance(known, Same) and name in UNCHANGED | {"convert_element_type"}:
            of_input = next(x for x in data if x.known == known)
            narrowed = _narrowed(site, of_input, aval)
            return (
                of_input
                if narrowed is of_input.narrowed
                else dataclasses.replace(of_input, narrowed=narrowed)
            )
        degree = degree_of(site, operands, data, self._has_data(depends))
        value = Value(
            degree=degree,
            depends=depends,
            follows=follows,
            known=known,
            weights=weights_of(name, operands),
            holds=held_inputs(name, operands, data, aval),
            site=site,
            is_narrow=any(x.is_narrow for x in operands)
            or _is_narrower(aval.dtype, np.float32),
            degree_site=_degree_site(site, degree, operands),
            is_splat=is_splat or aval.ndim == 0,
        )
        by_scale = any(
            x.depends and not x.depends & ~self._of_scalers for x in operands
        )
        value = _with_history(site, value, operands, data, aval, by_scale)
        if value.unscaled is site:
            self.reaches_gradients |= value.depends
            follows |= self.bit_of_gradients
            return dataclasses.replace(value, follows=follows)
        return value

    # The wrapper's own part of the program.

    def _note(self, site: Site, operands: Sequence[Value]) -> frozenset[str]:
        """Records the gradients and the losses that a wrapper checks."""
        marks = marks_of(site)
        if UPDATE not in marks:
            self._open = None
            return marks
        looks = GRADIENTS in marks or LOSS in marks
        if self._open is None or (self._open.is_over and looks):
            number = self._numbers.setdefault(site.numbers, len(self._numbers))
            self._open = self.calls[number] = UpdateCall(number, site)
        call = self._open
        for operand, variable in zip(operands, site.equation.invars, strict=True):
            if not is_inexact_atom(variable.aval) or operand.is_checked:
                continue
            if isinstance(operand.known, Number) and not operand.depends:
                continue
            if GRADIENTS in marks or LOSS in marks:
                self.reaches_gradients |= operand.depends
            if GRADIENTS in marks and not any(operand is x for x in call.gradients):
                call.gradients.append(operand)
                self._given[id(operand)] = operand, self.bit_of_call(call.number)
            if LOSS in marks and not any(operand is x for x in call.losses):
                call.losses.append(operand)
        if SCALE in marks:
            call.is_over = True
            numbers = [x.scale for x in operands if x.scale is not None]
            call.scale = numbers[0] if numbers else call.scale
        return marks

    def _marked(self, value: Value) -> Value:
        found = self._given.get(id(value))
        if found is None or value.follows & found[1]:
            return value
        return dataclasses.replace(value, follows=value.follows | found[1])

    def _is_skipped(self) -> bool:
        if self._skipped is None:
            return True
        return self._open is not None and self._open.number in self._skipped

    def _adjusted(self, site: Site, operands: Sequence[Value], result: Value) -> Value:
        """The loss scale after a step: another scale, with a symbol of its own."""
        old = next((x for x in operands if x.scale is not None), None)
        if old is None or result is old:
            return result
        symbol = ("adjusted", site.numbers)
        return dataclasses.replace(
            result, degree=((symbol, Fraction(1)),), scale=old.scale
        )


def _with_history(
    site: Site,
    value: Value,
    operands: Sequence[Value],
    data: list[Value],
    aval: Any,
    by_scale: bool,
) -> Value:
    """`value` with its history since the loss scale was divided out of it."""
    name = site.equation.primitive.name
    if any(map(_is_scaled, operands)):
        cleaned, scaled = _cleaned_while_scaled(site, name, operands, data)
        value = dataclasses.replace(value, cleaned=cleaned, scaled=scaled)
        if value.degree != ZERO:
            return value
        is_narrow = _is_narrower(aval.dtype, np.float32)
        narrowed = Cast(site, 1.0) if is_narrow and by_scale else None
        return dataclasses.replace(value, unscaled=site, narrowed=narrowed)
    if _is_scaled(value):
        return value
    gradients = [x for x in operands if x.unscaled]
    if not gradients:
        return value
    gradient = gradients[0]
    return dataclasses.replace(
        value,
        unscaled=gradient.unscaled,
        gain=gradient.gain * _gain(name, operands),
        narrowed=_narrowed(site, gradient, aval),
        cleaned=_cleaned(site, name, operands, data, gradients),
        scaled=next((x.scaled for x in gradients if x.scaled), None),
    )


def _degree_site(site: Site, degree: Degree, operands: Sequence[Value]) -> Site | None:
    if degree in (ZERO, ANY):
        return None
    same = (x.degree_site for x in operands if x.degree == degree and x.degree_site)
    return next(same, site)


def _gain(name: str, operands: Sequence[Value]) -> float:
    """The number by which an operation multiplies; 1 if it is not known."""
    if name not in ("mul", "div"):
        return 1.0
    for place, operand in enumerate(operands):
        if isinstance(operand.known, Number) and operand.known.value:
            number = abs(float(operand.known.value))
            return 1 / number if name == "div" and place else number
    return 1.0


def _narrowed(site: Site, gradient: Value, aval: Any) -> Cast | None:
    """The last cast of a gradient to a dtype in which small numbers vanish."""
    is_cast = site.equation.primitive.name == "convert_element_type"
    if not (is_cast and gradient.unscaled and gradient.degree == ZERO):
        return gradient.narrowed
    (atom,) = site.equation.invars
    if not is_inexact_atom(atom.aval):
        return gradient.narrowed
    loses = _is_narrower(aval.dtype, atom.aval.dtype)
    return Cast(site, gradient.gain) if loses else gradient.narrowed


def _is_narrower(new: Any, old: Any) -> bool:
    """Whether small numbers vanish in `new` that are in the range of `old`."""
    return jnp.finfo(new).minexp > jnp.finfo(old).minexp


def _cleaned(
    site: Site,
    name: str,
    operands: Sequence[Value],
    data: list[Value],
    gradients: list[Value],
) -> Site | None:
    """The operation that may have lost an inf of a gradient; None if it is kept."""
    lost = next((x.cleaned for x in gradients if x.cleaned), None)
    if name in PRODUCTS or name in SUMS:
        # It is in the result if it is in any of them.
        return lost if all(x.cleaned for x in gradients) else None
    if name == "div":
        return operands[0].cleaned if operands[0].unscaled else lost or site
    if name == "select_n" and operands[0].unscaled:
        # Chosen by what the gradients are: each case has to keep them.
        if not all(x.unscaled for x in data):
            return lost or site
    elif name not in MOVES | LINEAR | {"square", "sqrt", "integer_pow", "abs"}:
        return lost or site
    return lost


def _is_scaled(value: Value) -> bool:
    return value.degree not in (ZERO, ANY)


def _cleaned_while_scaled(
    site: Site, name: str, operands: Sequence[Value], data: list[Value]
) -> tuple[Site | None, Site | None]:
    """Where an inf of a scaled value may have been lost, and what made that value.

    Only by a choice that the scaled values make themselves: what else a backward pass
    does with them, it does to all loss scales alike.
    """
    scaled = [x for x in data if _is_scaled(x)]
    lost = next(((x.cleaned, x.scaled) for x in scaled if x.cleaned), (None, None))
    if name in SUMS and not all(x.cleaned for x in scaled):
        return None, None  # it is in the result if it is in any of them
    chooses = name == "select_n" and operands[0].is_of_scaled
    if chooses and scaled and len(scaled) < len(data) and lost == (None, None):
        return site, scaled[0].site
    return lost


_SITES = ("site", "degree_site", "unscaled", "narrowed", "cleaned", "scaled")


def _says_the_same(one: Value, other: Value) -> bool:
    same_degree = one.degree == other.degree or (
        type(one.degree) is type(other.degree)
        and isinstance(one.degree, Mixed | Unknown)
    )
    return (
        same_degree
        and all(
            getattr(one, field.name) == getattr(other, field.name)
            for field in dataclasses.fields(Value)
            if field.name not in ("degree", "gain", *_SITES)
        )
        and all(
            (getattr(one, x) is None) == (getattr(other, x) is None) for x in _SITES
        )
    )
