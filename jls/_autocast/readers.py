# SPDX-License-Identifier: Apache-2.0
"""Which values of a program are read as they are: not rounded by every reader.

A product rounds what it takes, so a value that only products read may be stored in half
before: nothing is lost. What is moved is read by those who read the result. Anything
else reads a value as it is. Read backwards, from the last operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jls._autocast.keep import Choice
from jls._program.control import MAIN, Call, Site, calls_of
from jls._program.jaxprs import Program, is_literal, opened, rule_of
from jls._program.primitives import primitive_of

MOVES = (
    "move",
    "shape",
)  # how a primitive is cast that moves elements, or chooses them


class Readers:
    """The variables of a program, and of all that it calls, that are read as they are.

    Args:
      choice: what stays as written.
      rounds: whether a product rounds what it takes.

    Attributes:
      has_rules: whether there is a `custom_vjp`.
    """

    def __init__(self, choice: Choice, rounds: Callable[[Site], bool]) -> None:
        self._choice, self._rounds = choice, rounds
        self._found: dict[tuple[int, ...], set[Any]] = {}
        self._carried: dict[tuple[int, ...], list[bool]] = {}
        self.has_rules = False

    def round_input(self, site: Site, atom: Any) -> bool:
        """Whether all that read an input of the program at `site` round it first."""
        return atom not in self._found[site.indices]

    def round_result(self, site: Site, atom: Any) -> bool:
        """Whether all that read a result of the equation at `site` round it first."""
        return atom not in self._found[site.indices[:-1]]

    def round_carried(self, site: Site) -> list[bool]:
        """Whether all that read a value that the loop at `site` carries round it."""
        return [not x for x in self._carried[site.indices]]

    def read(
        self, program: Program, wanted: Sequence[bool], site: Site = MAIN
    ) -> list[bool]:
        """Which inputs of a program are read as they are.

        Args:
          program: a jaxpr.
          wanted: which of its results are, where it is called.
          site: the calls around it.
        """
        jaxpr = opened(program).jaxpr
        found: set[Any] = set()
        self._found[site.indices] = found
        _add(found, jaxpr.outvars, wanted)
        for index in reversed(range(len(jaxpr.eqns))):
            equation = jaxpr.eqns[index]
            results = [x in found for x in equation.outvars]
            operands = self._of_equation(site.inside(equation, index), results)
            _add(found, equation.invars, operands)
        return [x in found for x in jaxpr.invars]

    def _of_equation(self, site: Site, results: list[bool]) -> list[bool]:
        equation = site.equation
        row, calls = primitive_of(equation), calls_of(equation)
        is_rule = rule_of(equation) == "vjp"
        self.has_rules |= is_rule
        if calls:
            found = self._of_calls(site, calls, results)
            return [True] * len(found) if is_rule else found
        if row.cast == "product":
            return [not self._rounds(site)] * len(equation.invars)
        if row.cast not in MOVES or self._choice.is_kept(site):
            return [True] * len(equation.invars)
        if row.is_pairwise and len(results) == len(equation.invars):
            return results
        data = {id(x) for x in equation.invars[row.data]}
        return [id(atom) not in data or any(results) for atom in equation.invars]

    def _of_calls(
        self, site: Site, calls: list[Call], results: list[bool]
    ) -> list[bool]:
        found = [False] * len(site.equation.invars)
        if calls[0].kind == "branch":
            found[0] = True
        carry: list[bool] = []
        for call in reversed(calls):  # the condition of a `while` first
            if call.kind == "condition":
                inputs = self.read(call.program, [True], call.site(site))
                carry = inputs[call.consts :]
            elif call.is_loop:
                inputs = self._loop(site, call, results, carry)
            else:
                inputs = self.read(call.program, results, call.site(site))
            for i, is_read in enumerate(inputs):
                found[call.operand(i)] |= is_read
        return found

    def _loop(
        self, site: Site, call: Call, results: list[bool], carry: list[bool]
    ) -> list[bool]:
        """A carry is read as it is if any later iteration reads it so."""
        wanted, last = list(results), call.consts + call.carried
        is_kept = self._choice.is_kept(site)
        for i in range(call.carried):
            wanted[i] |= is_kept or (bool(carry) and carry[i])
        while True:
            inputs = self.read(call.program, wanted, site)
            carried = inputs[call.consts : last]
            more = [a or b for a, b in zip(wanted, carried, strict=False)]
            if more == wanted[: call.carried]:
                inputs[call.consts : last] = self._carried[site.indices] = more
                return inputs
            wanted[: call.carried] = more


def _add(found: set[Any], atoms: Sequence[Any], wanted: Sequence[bool]) -> None:
    pairs = zip(atoms, wanted, strict=True)
    found.update(x for x, is_wanted in pairs if is_wanted and not is_literal(x))
