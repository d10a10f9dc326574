# SPDX-License-Identifier: Apache-2.0
"""The rules for degrees: which powers of the loss scales are factors of a result."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jls._program.rules import (
    BOUNDED,
    CHOICES,
    HOMOGENEOUS,
    MOVES,
    POWERS,
    PRODUCTS,
    SUMS,
)
from jls._program.walk import Site
from jls._tools.check.values import (
    ANY,
    ZERO,
    AnyDegree,
    Degree,
    Mixed,
    Number,
    Powers,
    Unknown,
    Value,
)


def degree_of(
    site: Site, operands: Sequence[Value], data: list[Value], has_data: bool
) -> Degree:
    """The degree of a floating-point result.

    Args:
      site: the operation.
      operands: the facts about its operands.
      data: those of the operands whose elements the result holds.
      has_data: whether the result depends on more than the states of scalers.
    """
    equation = site.equation
    name = equation.primitive.name
    degrees = [x.degree for x in operands]
    if name in PRODUCTS:
        return _degree_of_product(degrees)
    if name == "div":
        return _degree_of_product([degrees[0], _degree_of_power(site, degrees[1], -1)])
    if name in POWERS:
        return _degree_of_power(site, degrees[0], POWERS[name])
    if name == "integer_pow":
        return _degree_of_power(site, degrees[0], equation.params["y"])
    if name == "pow" and isinstance(operands[1].known, Number):
        return _degree_of_power(site, degrees[0], operands[1].known.value)
    if name in HOMOGENEOUS or (name in MOVES and len(data) == 1):
        return degrees[0]
    if name in SUMS or name in CHOICES or name in MOVES:
        return common_degree(site, data, has_data)
    if all(degree in (ZERO, ANY) for degree in degrees):
        return ZERO
    broken = [x for x in degrees if isinstance(x, Mixed | Unknown)]
    if broken:
        return broken[0]
    if name == "sign":
        return ZERO
    if name in BOUNDED and has_data:
        return Mixed(site, (ZERO, *degrees))
    return _of_scales_alone(site, operands, has_data) or Unknown(site)


def degree_of_integers(site: Site, operands: Sequence[Value]) -> Degree:
    """Of integers made from scaled numbers, as by rounding, nothing is known."""
    degrees = [x.degree for x in operands if x.degree not in (ZERO, ANY)]
    name = site.equation.primitive.name
    if not degrees or name in ("sign", "argmax", "argmin", "argsort", "sort"):
        return ZERO
    unknown = (x for x in degrees if isinstance(x, Unknown))
    return next(unknown, Unknown(site))


def common_degree(site: Site, values: Sequence[Value], has_data: bool) -> Degree:
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
    return _of_scales_alone(site, values, has_data) or Mixed(site, powers)


def _of_scales_alone(
    site: Site, values: Sequence[Value], has_data: bool
) -> Powers | None:
    """The degree of a value computed from loss scales alone: a new symbol."""
    if has_data:
        return None
    inputs = tuple((x.degree, x.known, x.scale) for x in values)
    symbol = (site.equation.primitive.name, inputs)
    return ((symbol, Fraction(1)),)


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
