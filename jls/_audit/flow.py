# SPDX-License-Identifier: Apache-2.0
"""Derives facts about each value in the program of a step, without running it.

    degree      the powers of the loss scales that are factors of it
    depends     the floating-point inputs that it is computed from; booleans do not
                pass a dependency on
    follows     the inputs, and the gradients given to a wrapper, from which it is
                computed element by element, as parameters are from updates
    known       an input that it is, unchanged; or a number
    holds       the inputs whose elements it holds, moved at most
    gradient    its history since the loss scale was divided out of it

With a wrapper's decision set to False, `known` shows what a skip leaves unchanged.
"""

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.jaxprs import is_inexact_atom
from jls._program.rules import (
    BOUNDED,
    CHOICES,
    ELEMENTWISE,
    HOMOGENEOUS,
    LINEAR,
    MOVES,
    POWERS,
    PRODUCTS,
    RANDOM,
    SUMS,
    UNCHANGED,
    data_of,
)
from jls._program.walk import Site
from jls._scopes import DECISION, GRADIENTS, INNER, LOSS, SCALE, UPDATE, marks_of

# A power of each loss scale by what stands for it, in order; () is degree 0.
Powers = tuple[tuple[Any, Fraction], ...]


class AnyDegree(enum.Enum):
    """The degree of zero, which has every factor."""

    ANY = "any"


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The degree of a sum or a choice of values of several degrees."""

    site: Site
    degrees: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """The degree of the result of an operation without a rule."""

    site: Site


Degree = Powers | AnyDegree | Mixed | Unknown
ANY, ZERO = AnyDegree.ANY, ()


class Same(NamedTuple):
    """An input, unchanged but for its shape."""

    number: int


class Number(NamedTuple):
    """A number, in each element."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AbstractValue:
    """The facts about a value."""

    degree: Degree = ZERO
    depends: int = 0  # a set of bits: inputs, by data
    follows: int = 0  # a set of bits: inputs and gradients, element by element
    known: Same | Number | None = None
    # Inputs and their weights, if it is a weighted sum of inputs.
    weights: tuple[tuple[int, float], ...] | None = None
    holds: int = 0  # a set of bits
    scale: int | None = None  # the number of the loss scale that it is
    site: Site | None = None  # the last operation on it
    degree_site: Site | None = None  # the operation that gave it this degree, if not 0
    is_narrow: bool = False  # whether it comes through float16, or narrower
    is_splat: bool = False  # whether all elements are one scalar
    is_checked: bool = False  # whether it is a result of a wrapper's check
    # Of a gradient:
    unscaled: Site | None = None  # where the loss scale was divided out of it
    gain: float = 1.0  # the factor it was multiplied by since
    narrowed: "Cast | None" = None  # where it became float16 since
    cleaned: Site | None = None  # where an inf in it may have been lost since


class Cast(NamedTuple):
    """A cast in which small numbers vanish, and the gain before it."""

    site: Site
    gain: float


class UpdateCall:
    """A call of a wrapper's `update`."""

    def __init__(self, number: int, site: Site) -> None:
        self.number, self.site = number, site
        self.scale: int | None = None  # the number of its loss scale
        self.gradients: list[AbstractValue] = []
        self.losses: list[AbstractValue] = []
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
        self._given: dict[int, tuple[AbstractValue, int]] = {}  # gradients, by identity
        self._numbers: dict[Any, int] = {}  # of calls, by site
        self._open: UpdateCall | None = None
        self.calls: dict[int, UpdateCall] = {}
        self.reaches_gradients = 0  # a set of bits: inputs that gradients depend on
        self.inputs = [
            self._input(i, aval, scales.index(i) if i in scales else None)
            for i, aval in enumerate(avals)
        ]

    def _input(self, i: int, aval: Any, scale: int | None) -> AbstractValue:
        is_data = is_inexact_atom(aval)
        return AbstractValue(
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

    def is_random(self, value: AbstractValue) -> bool:
        return bool(value.depends & self._random)

    # Numbers in the program.

    def of_constant(self, value: Any) -> AbstractValue:
        number = _number_in(value)
        if number is None:
            return AbstractValue()
        # No factor changes 0, inf and NaN.
        is_any = isinstance(number.value, float) and (
            number.value == 0 or not math.isfinite(number.value)
        )
        return AbstractValue(
            degree=ANY if is_any else ZERO, known=number, is_splat=True
        )

    # Control flow.

    def on_call(self, site: Site, operands: Sequence[AbstractValue]) -> None:
        self._note(site, operands)

    def of_call(
        self, site: Site, results: Sequence[AbstractValue]
    ) -> Sequence[AbstractValue]:
        marks = marks_of(site)
        if GRADIENTS in marks or LOSS in marks:
            return [dataclasses.replace(x, is_checked=True) for x in results]
        return results

    def branch(self, index: AbstractValue) -> int | None:
        known = index.known
        return int(known.value) if isinstance(known, Number) else None

    def slice(self, value: AbstractValue) -> AbstractValue:
        if isinstance(value.known, Same):
            value = dataclasses.replace(value, known=None)
        return dataclasses.replace(value, scale=None, is_splat=False)

    stack = slice

    def join(
        self, site: Site, one: AbstractValue, other: AbstractValue
    ) -> AbstractValue:
        if one is other:
            return one
        depends = one.depends | other.depends
        return AbstractValue(
            degree=self._common(site, [one, other], depends),
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
        )

    def carry(
        self, site: Site, before: AbstractValue, after: AbstractValue
    ) -> AbstractValue:
        if before.scale is not None:
            return before  # the scaler adjusts it
        joined = self.join(site, before, after)
        return before if _says_the_same(before, joined) else joined

    # Operations.

    def of_equation(
        self, site: Site, operands: Sequence[AbstractValue]
    ) -> Sequence[AbstractValue]:
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
        operands: Sequence[AbstractValue],
        aval: Any,
        bits: tuple[int, int],
        is_splat: bool,
    ) -> AbstractValue:
        depends, follows = bits
        name = site.equation.primitive.name
        data = data_of(name, list(operands))
        known = self._known(site, operands, aval)
        if isinstance(known, Number):
            return dataclasses.replace(self.of_constant(known.value), known=known)
        if name == "select_n" and isinstance(operands[0].known, Number):
            return data[int(operands[0].known.value)]
        if not is_inexact_atom(aval):
            is_flag = aval.dtype == bool
            return AbstractValue(
                degree=ZERO if is_flag else self._degree_of_integers(site, operands),
                depends=depends & self._random if is_flag else depends,
                known=known,
                holds=self._holds(name, operands, data, aval),
                is_splat=is_splat or aval.ndim == 0,
                unscaled=next((x.unscaled for x in operands if x.unscaled), None),
            )
        if isinstance(known, Same) and name in UNCHANGED | {"convert_element_type"}:
            of_input = next(x for x in data if x.known == known)
            narrowed = _narrowed(site, of_input, aval)
            return (
                of_input
                if narrowed is of_input.narrowed
                else dataclasses.replace(of_input, narrowed=narrowed)
            )
        degree = self._degree(site, operands, data, depends)
        value = AbstractValue(
            degree=degree,
            depends=depends,
            follows=follows,
            known=known,
            weights=_weights(name, operands),
            holds=self._holds(name, operands, data, aval),
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

    def _note(self, site: Site, operands: Sequence[AbstractValue]) -> frozenset[str]:
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

    def _marked(self, value: AbstractValue) -> AbstractValue:
        found = self._given.get(id(value))
        if found is None or value.follows & found[1]:
            return value
        return dataclasses.replace(value, follows=value.follows | found[1])

    def _is_skipped(self) -> bool:
        if self._skipped is None:
            return True
        return self._open is not None and self._open.number in self._skipped

    def _adjusted(
        self, site: Site, operands: Sequence[AbstractValue], result: AbstractValue
    ) -> AbstractValue:
        """The loss scale after a step: another scale, with a symbol of its own."""
        old = next((x for x in operands if x.scale is not None), None)
        if old is None or result is old:
            return result
        symbol = ("adjusted", site.numbers)
        return dataclasses.replace(
            result, degree=((symbol, Fraction(1)),), scale=old.scale
        )

    # Degrees.

    def _degree(
        self,
        site: Site,
        operands: Sequence[AbstractValue],
        data: list[AbstractValue],
        depends: int,
    ) -> Degree:
        equation = site.equation
        name = equation.primitive.name
        degrees = [x.degree for x in operands]
        if name in PRODUCTS:
            return _degree_of_product(degrees)
        if name == "div":
            return _degree_of_product(
                [degrees[0], _degree_of_power(site, degrees[1], -1)]
            )
        if name in POWERS:
            return _degree_of_power(site, degrees[0], POWERS[name])
        if name == "integer_pow":
            return _degree_of_power(site, degrees[0], equation.params["y"])
        if name == "pow" and isinstance(operands[1].known, Number):
            return _degree_of_power(site, degrees[0], operands[1].known.value)
        if name in HOMOGENEOUS or (name in MOVES and len(data) == 1):
            return degrees[0]
        if name in SUMS or name in CHOICES or name in MOVES:
            return self._common(site, data, depends)
        if all(degree in (ZERO, ANY) for degree in degrees):
            return ZERO
        broken = [x for x in degrees if isinstance(x, Mixed | Unknown)]
        if broken:
            return broken[0]
        if name == "sign":
            return ZERO
        if name in BOUNDED and depends & ~self._of_scalers:
            return Mixed(site, (ZERO, *degrees))
        return self._of_scale_alone(site, operands, depends) or Unknown(site)

    def _degree_of_integers(
        self, site: Site, operands: Sequence[AbstractValue]
    ) -> Degree:
        """Of integers made from scaled numbers, as by rounding, nothing is known."""
        degrees = [x.degree for x in operands if x.degree not in (ZERO, ANY)]
        name = site.equation.primitive.name
        if not degrees or name in ("sign", "argmax", "argmin", "argsort", "sort"):
            return ZERO
        unknown = (x for x in degrees if isinstance(x, Unknown))
        return next(unknown, Unknown(site))

    def _common(
        self, site: Site, values: Sequence[AbstractValue], depends: int
    ) -> Degree:
        """The degree of a sum of values, or of a choice between them."""
        found = [x.degree for x in values if x.degree != ANY]
        for kind in (Mixed, Unknown):
            for degree in found:
                if isinstance(degree, kind):
                    return degree
        if not found:
            return ANY
        if all(degree == found[0] for degree in found):
            return found[0]
        powers = tuple(dict.fromkeys(found))
        return self._of_scale_alone(site, values, depends) or Mixed(site, powers)

    def _of_scale_alone(
        self, site: Site, values: Sequence[AbstractValue], depends: int
    ) -> Powers | None:
        """The degree of a value computed from loss scales alone: a new symbol."""
        if depends & ~self._of_scalers:
            return None
        inputs = tuple((x.degree, x.known, x.scale) for x in values)
        symbol = (site.equation.primitive.name, inputs)
        return ((symbol, Fraction(1)),)

    # What is known.

    def _known(
        self, site: Site, operands: Sequence[AbstractValue], aval: Any
    ) -> Same | Number | None:
        equation = site.equation
        name = equation.primitive.name
        known = [x.known for x in operands]
        if not known:
            return None
        numbers = [x.value for x in known if isinstance(x, Number)]
        first = known[0]
        if name in ("and", "or") and aval.dtype == bool:
            decisive = name == "or"
            if decisive in numbers:
                return Number(decisive)
            others = [x for x in known if not isinstance(x, Number)]
            return (
                others[0] if len(others) == 1 and numbers else _folded(equation, known)
            )
        if name == "select_n":
            cases = known[1:]
            if isinstance(first, Number):
                return cases[int(first.value)]
            return cases[0] if all(x == cases[0] for x in cases) else None
        if name == "convert_element_type":
            return self._cast(first, aval)
        if name in ("mul", "div", "add", "add_any", "sub"):
            neutral = _without_neutral(name, known)
            if neutral is not None:
                return neutral
        if name in MOVES and len(numbers) == len(known):
            return first if all(x == first for x in known) else None
        if name in MOVES and isinstance(first, Number) and name in _ONE_OF_MANY:
            return first
        is_whole = (
            isinstance(first, Same) and aval.size == self._avals[first.number].size
        )
        if name in UNCHANGED or name in ("broadcast_in_dim", "slice"):
            return first if is_whole or isinstance(first, Number) else None
        if name in _EXTREMES:
            return first if isinstance(first, Number) else None
        return _folded(equation, known)

    def _cast(self, known: Any, aval: Any) -> Same | Number | None:
        if isinstance(known, Number):
            is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
            if is_integer and not abs(known.value) < 2.0**31:
                return None  # it depends on the platform
            with np.errstate(all="ignore"):
                return _number_in(np.asarray(known.value).astype(aval.dtype))
        if isinstance(known, Same):
            old, new = self._avals[known.number].dtype, aval.dtype
            return known if _is_exact(old, new) else None
        return None

    def _holds(
        self,
        name: str,
        operands: Sequence[AbstractValue],
        data: list[AbstractValue],
        aval: Any,
    ) -> int:
        if name == "convert_element_type":
            return operands[0].holds
        if name not in MOVES or not data:
            return 0
        is_choice = name == "select_n" and (operands[0].is_splat or not aval.ndim)
        unite = operator.and_ if is_choice else operator.or_
        return functools.reduce(unite, (x.holds for x in data))


_ONE_OF_MANY = frozenset(["broadcast_in_dim", "gather", "dynamic_slice", "pad"])


_EXTREMES = frozenset(
    ["reduce_and", "reduce_or", "reduce_max", "reduce_min", "pmax", "pmin"]
)


def _weights(
    name: str, operands: Sequence[AbstractValue]
) -> tuple[tuple[int, float], ...] | None:
    """The weights of inputs in a sum, as far as numbers say them."""
    weights = [x.weights for x in operands]
    numbers = [x.known.value if isinstance(x.known, Number) else None for x in operands]
    factor = 1.0
    if name == "mul" and None in weights:
        at = weights.index(None)
        number = numbers[at]
        if number is None:
            return None
        factor, weights = number, [weights[1 - at]]
    elif name == "div" and numbers[1]:
        factor, weights = 1 / numbers[1], weights[:1]
    elif name == "neg":
        factor = -1.0
    elif name in ("add", "add_any", "sub"):
        # A sum of 0: the updates of a skip.
        weights = [() if n == 0 else w for n, w in zip(numbers, weights, strict=True)]
    elif name not in UNCHANGED and name != "convert_element_type":
        return None
    total: dict[int, float] = {}
    for place, part in enumerate(weights):
        if part is None:
            return None
        sign = -1.0 if name == "sub" and place else 1.0
        for i, weight in part:
            total[i] = total.get(i, 0.0) + sign * factor * weight
    return tuple(sorted(total.items()))


def _degree_of_product(degrees: Sequence[Degree]) -> Degree:
    for kind in (AnyDegree, Mixed, Unknown):
        for degree in degrees:
            if isinstance(degree, kind):
                return degree
    total: dict[Any, Fraction] = {}
    for degree in degrees:
        for symbol, power in degree if isinstance(degree, tuple) else ():
            total[symbol] = total.get(symbol, Fraction()) + power
    return tuple(sorted(((s, p) for s, p in total.items() if p), key=repr))


def _degree_of_power(site: Site, degree: Degree, exponent: Any) -> Degree:
    if not isinstance(degree, tuple) or degree == ZERO:
        return degree
    if not math.isfinite(exponent):
        return Unknown(site)
    # Of 1/3 as a float, the fraction: roots add up exactly.
    by = Fraction(exponent).limit_denominator(1000)
    return tuple((symbol, power * by) for symbol, power in degree if by)


def _number_in(value: Any) -> Number | None:
    """The number that all elements equal, if they do."""
    # Numbers in a program are of JAX's own types in some versions.
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        if not isinstance(value, bool | int | float):
            return None
        dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    # A larger constant is data, and costs time to compare.
    if np.size(value) != 1 and not (0 < np.size(value) <= 2**16):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    flat = np.asarray(value).ravel()
    if flat.size > 1 and np.any(flat != flat[0]):
        return None
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return Number(0.0) if flat[0] == 0 else None
    if jnp.issubdtype(dtype, jnp.inexact):
        return Number(float(flat[0]))
    return Number(flat[0].item())


_FOLDS: dict[str, Callable[..., Any]] = {
    "not": np.invert,
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "is_finite": np.isfinite,
}


def _folded(equation: Any, known: Sequence[Any]) -> Number | None:
    """The number that an operation gives for numbers, with their dtypes' overflow."""
    fold = _FOLDS.get(equation.primitive.name)
    if fold is None or not all(isinstance(x, Number) for x in known):
        return None
    with np.errstate(all="ignore"):
        pairs = zip(known, equation.invars, strict=True)
        operands = [np.asarray(x.value).astype(atom.aval.dtype) for x, atom in pairs]
        return _number_in(np.asarray(fold(*operands)))


def _without_neutral(name: str, known: Sequence[Any]) -> Any:
    """The other operand if one is neutral: x * 1, x / 1, x + (-0.0), x - 0.0."""

    def is_neutral(x: Any, place: int) -> bool:
        if not isinstance(x, Number):
            return False
        if name in ("mul", "div"):
            return x.value == 1 and (place == 1 or name == "mul")
        if x.value != 0 or (name == "sub" and place == 0):
            return False
        is_negative = math.copysign(1, x.value) < 0
        return isinstance(x.value, int) or is_negative == (name != "sub")

    first, second = known
    if isinstance(first, Same) and is_neutral(second, 1):
        return first
    if isinstance(second, Same) and is_neutral(first, 0):
        return second
    return None


def _with_history(
    site: Site,
    value: AbstractValue,
    operands: Sequence[AbstractValue],
    data: list[AbstractValue],
    aval: Any,
    by_scale: bool,
) -> AbstractValue:
    """`value` with its history since the loss scale was divided out of it."""
    if value.degree not in (ZERO, ANY):
        return value
    if any(x.degree not in (ZERO, ANY) for x in operands):
        if value.degree != ZERO:
            return value
        is_narrow = _is_narrower(aval.dtype, np.float32)
        narrowed = Cast(site, 1.0) if is_narrow and by_scale else None
        return dataclasses.replace(value, unscaled=site, narrowed=narrowed)
    name = site.equation.primitive.name
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
    )


def _degree_site(
    site: Site, degree: Degree, operands: Sequence[AbstractValue]
) -> Site | None:
    if degree in (ZERO, ANY):
        return None
    same = (x.degree_site for x in operands if x.degree == degree and x.degree_site)
    return next(same, site)


def _gain(name: str, operands: Sequence[AbstractValue]) -> float:
    """The number by which an operation multiplies; 1 if it is not known."""
    if name not in ("mul", "div"):
        return 1.0
    for place, operand in enumerate(operands):
        if isinstance(operand.known, Number) and operand.known.value:
            number = abs(float(operand.known.value))
            return 1 / number if name == "div" and place else number
    return 1.0


def _narrowed(site: Site, gradient: AbstractValue, aval: Any) -> Cast | None:
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
    operands: Sequence[AbstractValue],
    data: list[AbstractValue],
    gradients: list[AbstractValue],
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


_SITES = ("site", "degree_site", "unscaled", "narrowed", "cleaned")


def _says_the_same(one: AbstractValue, other: AbstractValue) -> bool:
    same_degree = one.degree == other.degree or (
        type(one.degree) is type(other.degree)
        and isinstance(one.degree, Mixed | Unknown)
    )
    return (
        same_degree
        and all(
            getattr(one, field.name) == getattr(other, field.name)
            for field in dataclasses.fields(AbstractValue)
            if field.name not in ("degree", "gain", *_SITES)
        )
        and all(
            (getattr(one, x) is None) == (getattr(other, x) is None) for x in _SITES
        )
    )


@functools.cache
def _is_exact(old: Any, new: Any) -> bool:
    """Whether a cast keeps every number."""
    if old == new:
        return True
    if jnp.issubdtype(old, jax.dtypes.extended) or jnp.issubdtype(
        new, jax.dtypes.extended
    ):
        return False
    if jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating):
        a, b = jnp.finfo(old), jnp.finfo(new)
        return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp
    if jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer):
        a, b = jnp.iinfo(old), jnp.iinfo(new)
        return int(a.min) >= int(b.min) and int(a.max) <= int(b.max)
    return False
