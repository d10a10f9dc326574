# SPDX-License-Identifier: Apache-2.0
"""Which values of a program are half by themselves, and which are running values.

The results of products are half, and stay half when they are moved. A running value is
a sum to which one term after another is added: a residual stream, an integrator. Only
one exists at a time, so it is kept in memory instead of being summed again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jls._autocast.keep import Choice
from jls._autocast.readers import MOVES
from jls._program.control import Site
from jls._program.jaxprs import is_float32, is_literal, rule_of, size_of
from jls._program.places import is_relu_of_jax
from jls._program.primitives import Primitive, primitive_of
from jls._program.walk import Question


class Fact(NamedTuple):
    """The facts of a value, read before anything is computed."""

    is_half: bool = False
    # The last two variables of the row of sums that leads to the value. A row of one is
    # an array in memory.
    row: tuple[Any, ...] = ()
    is_spread: bool = False  # an array that was broadcast, such as a bias


IN_MEMORY = Fact(row=(None,))


class Halves(Question[Fact]):
    """The question for `walk`.

    Attributes:
      running: the variables that are running values.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.running: set[Any] = set()
        self._results: dict[tuple[int, ...], Sequence[Fact]] = {}

    def is_half(self, site: Site, index: int) -> bool:
        """Whether a result of a call, a loop or branches is half by itself."""
        return self._results[site.indices][index].is_half

    def of_constant(self, value: Any) -> Fact:
        """The fact about a number in the program."""
        return Fact()

    def of_call(self, site: Site, results: Sequence[Fact]) -> Sequence[Fact]:
        """The results of a `custom_vjp` rule are float32."""
        if rule_of(site.equation) == "vjp":
            results = [IN_MEMORY] * len(results)
        if is_relu_of_jax(site.equation):
            results = [self._of_relu(site.equation, *results)]
        self._results[site.indices] = results
        return results

    def _of_relu(self, equation: Any, fact: Fact) -> Fact:
        """The result of a relu is the running value, not its operand."""
        (before,), (after,) = equation.invars, equation.outvars
        if before in self.running:
            self.running.remove(before)
            self.running.add(after)
        return fact._replace(row=tuple(after if x is before else x for x in fact.row))

    def join(self, site: Site, one: Fact, other: Fact) -> Fact:
        """Joins the results of two branches."""
        is_half = one.is_half and other.is_half
        return Fact(is_half, max(one.row, other.row, key=len))

    def carry(self, site: Site, before: Fact, after: Fact) -> Fact:
        """A carry is in memory."""
        joined = IN_MEMORY._replace(is_half=before.is_half and after.is_half)
        return before if joined == before else joined

    def slice(self, value: Fact) -> Fact:
        """A slice is in memory."""
        return IN_MEMORY._replace(is_half=value.is_half)

    def of_equation(self, site: Site, operands: Sequence[Fact]) -> Sequence[Fact]:
        """The facts about the results of an operation."""
        equation, row = site.equation, primitive_of(site.equation)
        if not any(map(is_float32, equation.outvars)):
            return [Fact()] * len(equation.outvars)
        if row.cast == "product":
            return [Fact(self._choice.why_wide(site) is None)]
        is_kept = self._choice.is_kept(site)
        if row.cast in MOVES and not is_kept:
            return _moved(equation, row, operands)
        return [self._of_elementwise(equation, operands)] * len(equation.outvars)

    def _of_elementwise(self, equation: Any, operands: Sequence[Fact]) -> Fact:
        name, shape = equation.primitive.name, equation.outvars[0].aval.shape
        arrays = [
            (atom, fact)
            for atom, fact in zip(equation.invars, operands, strict=True)
            if not is_literal(atom) and not fact.is_spread and atom.aval.shape == shape
        ]
        row = max((fact.row for _, fact in arrays), default=(), key=len)
        if len(arrays) == 1 and name in (*_SUMS, *_SCALES):  # with a number or a bias
            return Fact(row=row)
        if len(arrays) < 2 or name not in _SUMS:
            return Fact()
        if len(row) > 1:  # the second sum in a row
            self.running.update((*row, *equation.outvars))
        return Fact(row=(*(row or equation.outvars)[-1:], *equation.outvars))


_SUMS = ("add", "add_any", "sub")
_SCALES = ("copy", "div", "max", "mul", "neg")


def _moved(equation: Any, primitive: Primitive, facts: Sequence[Fact]) -> list[Fact]:
    count = len(equation.outvars)
    if primitive.is_pairwise and count == len(facts) > 1:
        return list(facts)
    moved = facts[primitive.data]
    sizes = [size_of(x.aval.shape) for x in equation.invars[primitive.data]]
    grown = size_of(equation.outvars[0].aval.shape) > max(sizes, default=0)
    is_spread = equation.primitive.name == "broadcast_in_dim" and grown
    is_half = all(fact.is_half for fact in moved)
    row = max((fact.row for fact in moved), default=(), key=len)
    if len(row) == 1:
        row = tuple(equation.outvars[:1])
    return [Fact(is_half, () if is_spread else row, is_spread)] * count
