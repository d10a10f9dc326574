# SPDX-License-Identifier: Apache-2.0
"""The facts that `jls._tools.check.flow` derives about a value.

degree      the powers of the loss scales that are factors of it
depends     the floating-point inputs that it is computed from; booleans do not
            pass a dependency on
follows     the inputs, and the gradients given to a wrapper, from which it is
            computed element by element, as parameters are from updates
known       an input that it is, unchanged; or a number
holds       the inputs whose elements it holds, moved at most
gradient    its history since the loss scale was divided out of it
"""

import dataclasses
import enum
from fractions import Fraction
from typing import Any, NamedTuple

from jls._program.walk import Site

# The power of each loss scale, by its symbol, in order; () is degree 0.
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


class Cast(NamedTuple):
    """A cast in which small numbers vanish, and the gain before it."""

    site: Site
    gain: float


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
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
    is_of_scaled: bool = False  # whether it is a flag, computed from scaled values
    # Of a scaled value, or a gradient:
    cleaned: Site | None = None  # where an inf in it may have been lost
    scaled: Site | None = None  # what made it, if an inf was lost while it was scaled
    # Of a gradient:
    unscaled: Site | None = None  # where the loss scale was divided out of it
    gain: float = 1.0  # the factor it was multiplied by since
    narrowed: Cast | None = None  # where it became float16 since
