# SPDX-License-Identifier: Apache-2.0
"""The facts about a value that are read of a program, and how two of them join.

known       an input that it is, unchanged; or a number
degree      the powers of chosen inputs, the scales, that are factors of it
depends     the floating-point inputs that it is computed from; booleans do not
            pass a dependency on
follows     the inputs, and the gradients given to a wrapper, from which it is
            computed element by element, as parameters are from updates
through     the parts of the program in which it is computed: updates, backward passes
holds       the inputs whose elements it holds, moved at most
history     what became of it since a scale was divided out of it, or a backward pass
            made it that has none
multiple    the loss or the derivative that it is a multiple of, in `shard_map`
"""

import dataclasses
import enum
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Annotated, Any, NamedTuple, get_type_hints

from jls._program.control import Site
from jls._program.primitives import Primitive, primitive_of

# The power of each scale, by its symbol, in order; () is degree 0.
Powers = tuple[tuple[Any, Fraction], ...]


class AnyDegree(enum.Enum):
    """The degree of zero, which has every factor."""

    ANY = "any"


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """The degree of a sum or a choice of values of several degrees."""

    site: Site


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown:
    """The degree of the result of an operation without a rule."""

    site: Site


Degree = Powers | AnyDegree | Mixed | Unknown
ANY, ZERO = AnyDegree.ANY, ()


@dataclasses.dataclass(frozen=True)
class Same:
    """An input; only its shape may have changed."""

    index: int


@dataclasses.dataclass(frozen=True)  # as tuples, input 0 and the number 0 were equal
class Number:
    """A number, in each element."""

    value: Any


class Cast(NamedTuple):
    """A cast in which small numbers vanish, and the gain before it."""

    site: Site
    gain: float


class Multiple(NamedTuple):
    """A number times a value, or times the sum of it over the devices of an axis."""

    of: Any  # the place of the operation that made the value
    local: frozenset[str]  # the axes over which the value differs
    varying: frozenset[str]  # those of them over which it is not summed
    factor: float = 1.0


class Fact(NamedTuple):
    """How a fact is joined with that of another value, to one that holds of both."""

    join: Callable[[Any, Any], Any]
    # The part that is compared, to see whether a loop has added anything.
    compared: Callable[[Any], Any] = lambda fact: fact


def _if_equal(one: Any, other: Any) -> Any:
    return one if one == other else None


def _kind_of_degree(degree: Any) -> Any:
    return type(degree) if isinstance(degree, Mixed | Unknown) else degree


_IF_EQUAL = Fact(_if_equal)
# One of several places stands for all of them.
_FIRST = Fact(lambda one, other: one or other, lambda place: place is not None)
Bits = Annotated[int, Fact(operator.or_)]
Is = Annotated[bool, Fact(operator.or_)]  # if it may be
Where = Annotated[Site | None, _FIRST]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
    """The facts about a value."""

    # Joined in `degrees`, where it is known what else the value depends on.
    degree: Annotated[Degree, Fact(_if_equal, _kind_of_degree)] = ZERO
    depends: Bits = 0  # inputs, by data
    follows: Bits = 0  # inputs and gradients, element by element
    through: Bits = 0  # parts of the program
    holds: Annotated[int, Fact(operator.and_)] = 0  # inputs
    known: Annotated[Same | Number | None, _IF_EQUAL] = None
    # Inputs and their weights, if it is a weighted sum of inputs.
    weights: Annotated[tuple[tuple[int, float], ...] | None, _IF_EQUAL] = None
    scale: Annotated[int | None, _IF_EQUAL] = None  # the index of the scale that it is
    site: Where = None  # the last operation on it
    degree_site: Where = None  # the operation that gave it this degree, if not 0
    is_narrow: Is = False  # it comes through float16, or narrower
    is_splat: Annotated[bool, Fact(operator.and_)] = (
        False  # all elements are one scalar
    )
    is_of_scaled: Is = False  # it is a flag, computed from scaled values
    # The scopes of jls's checks in which it is made.
    roles: Annotated[frozenset[str], Fact(operator.or_)] = frozenset()
    # For scaled values and gradients:
    cleaned: Where = None  # where an inf in it may have been lost
    scaled: Where = None  # what made it, if an inf was lost while it was scaled
    # For gradients:
    unscaled: Where = None  # where the scale was divided out of it, or what made it
    # The factor it was multiplied by since.
    gain: Annotated[float, Fact(max, lambda gain: None)] = 1.0
    narrowed: Annotated[Cast | None, _FIRST] = None  # where it became float16 since
    never_scaled: Where = None  # a backward product in float16 behind it, of no scale
    # For results of an inner optimizer: of the numbers that they are multiplied by.
    sign: Annotated[int | None, _IF_EQUAL] = None
    multiple: Annotated[Multiple | None, _IF_EQUAL] = None

    def replace(self, **facts: Any) -> "Value":
        """The value with other facts."""
        return dataclasses.replace(self, **facts)

    def sliced(self) -> "Value":
        """A slice of it along its first axis, or a stack of values like it."""
        known = None if isinstance(self.known, Same) else self.known
        return self.replace(known=known, scale=None, is_splat=False)

    def joined(self, other: "Value") -> "Value":
        """The facts that hold of both, without the degree."""
        pairs = {x: (getattr(self, x), getattr(other, x)) for x in _FACTS}
        return Value(**{x: fact.join(*pairs[x]) for x, fact in _FACTS.items()})

    def says_as_much_as(self, other: "Value") -> bool:
        """Whether it has the same facts; the places that stand for them may differ."""
        return all(
            fact.compared(getattr(self, x)) == fact.compared(getattr(other, x))
            for x, fact in _FACTS.items()
        )


_FACTS: dict[str, Fact] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(Value, include_extras=True).items()
}


class Operation(NamedTuple):
    """One result of an equation, for the rules."""

    site: Site
    row: Primitive
    operands: Sequence[Value]
    data: Sequence[Value]  # those whose elements the result holds
    aval: Any  # of the result

    @property
    def equation(self) -> Any:
        return self.site.equation

    @property
    def name(self) -> str:
        return self.site.equation.primitive.name


def operations(site: Site, operands: Sequence[Value]) -> list[Operation]:
    """Each result of an equation, with the operands that it is of."""
    row, results = primitive_of(site.equation), site.equation.outvars
    is_pairwise = row.is_pairwise and len(operands) == len(results)
    found = []
    for i, variable in enumerate(results):
        own = operands[i : i + 1] if is_pairwise else operands
        found.append(Operation(site, row, own, own[row.data], variable.aval))
    return found
