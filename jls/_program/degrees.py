# SPDX-License-Identifier: Apache-2.0
"""The rules for degrees: which powers of the scales are factors of a result."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jls._program.control import Site
from jls._program.facts import (
    ANY,
    ZERO,
    AnyDegree,
    Degree,
    Mixed,
    Number,
    Operation,
    Powers,
    Unknown,
    Value,
)
from jls._program.jaxprs import parameter


def degree_of(op: Operation, has_data: bool) -> Degree:
    """The degree of a floating-point result.

    Args:
      op: the operation.
      has_data: whether the result depends on more than the states of scalers.
    """
    row, site, kind = op.row, op.site, op.row.degree
    degrees = [x.degree for x in op.operands]
    if kind == "product":
        return _degree_of_product(degrees)
    if kind == "quotient":
        return _degree_of_product([degrees[0], _degree_of_power(site, degrees[1], -1)])
    exponent = _exponent(op)
    if exponent is not None:
        return _degree_of_power(site, degrees[0], exponent)
    if row.is_homogeneous or (row.moves and len(op.data) == 1):
        return degrees[0]
    if kind in ("sum", "choice") or row.moves:
        return common_degree(site, op.data, has_data)
    if all(degree in (ZERO, ANY) for degree in degrees):
        return ZERO
    broken = [x for x in degrees if isinstance(x, Mixed | Unknown)]
    if broken:
        return broken[0]
    if kind == "order":
        return ZERO
    if kind == "bounded" and has_data:
        return Mixed(site)
    if op.name == "integer_pow":  # with an exponent that is not known
        return Unknown(site)
    return _of_scales_alone(site, op.operands, has_data) or Unknown(site)


def _exponent(op: Operation) -> float | None:
    """The exponent of a power; None for another operation, or if it is not known."""
    if not isinstance(op.row.degree, str):
        return op.row.degree
    if op.row.degree != "power":
        return None
    if op.name == "integer_pow":
        return parameter(op.equation, "y")
    known = op.operands[1].known
    return known.value if isinstance(known, Number) else None


def degree_of_integers(op: Operation) -> Degree:
    """Integers made from scaled numbers, as by rounding, have no known degree."""
    degrees = [x.degree for x in op.operands if x.degree not in (ZERO, ANY)]
    if not degrees or op.row.degree == "order" or op.name == "sort":
        return ZERO
    unknown = (x for x in degrees if isinstance(x, Unknown))
    return next(unknown, Unknown(op.site))


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
    return _of_scales_alone(site, values, has_data) or Mixed(site)


def _of_scales_alone(
    site: Site, values: Sequence[Value], has_data: bool
) -> Powers | None:
    """The degree of a value computed only from loss scales: a new symbol."""
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
    # The float 1/3 becomes the fraction that it stands for, so roots add up exactly.
    by = Fraction(exponent).limit_denominator(1000)
    return tuple((symbol, power * by) for symbol, power in degree if by)
