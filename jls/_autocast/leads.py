# SPDX-License-Identifier: Apache-2.0
"""Which values of a program lead to a product that is computed in half.

Those that reach one through nothing but elementwise operations and moves: it rounds
them anyway, so nothing is lost if they are stored in half before. What leads to a sum,
or to the loss, must not be rounded. Read backwards, from the last operation.
"""

from collections.abc import Sequence
from typing import Any

from jls._autocast.keep import OUTER, Choice
from jls._program.control import MAIN, Call, Site, calls_of
from jls._program.jaxprs import Program, is_float32, is_literal, opened
from jls._program.primitives import primitive_of


class Leads:
    """The variables of a program, and of all that it calls, that lead to a product."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._found: dict[tuple[int, ...], set[Any]] = {}
        self.has_rules = False  # whether there is a custom_vjp

    def at(self, site: Site, atom: Any) -> bool:
        """Whether a variable of the program that is called at `site` leads to one."""
        return not is_literal(atom) and atom in self._found.get(site.indices, ())

    def read(
        self, program: Program, wanted: Sequence[bool], site: Site = MAIN
    ) -> list[bool]:
        """Which inputs of a program lead to a product.

        Args:
          program: a jaxpr.
          wanted: which of its results do, where it is called.
          site: the calls around it.
        """
        jaxpr = opened(program).jaxpr
        found: set[Any] = set()
        self._found[site.indices] = found
        found.update(
            atom
            for atom, is_wanted in zip(jaxpr.outvars, wanted, strict=True)
            if is_wanted and not is_literal(atom)
        )
        for index in reversed(range(len(jaxpr.eqns))):
            equation = jaxpr.eqns[index]
            here = site.inside(equation, index)
            results = [x in found for x in equation.outvars]
            operands = self._of_equation(here, results)
            found.update(
                atom
                for atom, leads in zip(equation.invars, operands, strict=True)
                if leads and not is_literal(atom)
            )
        return [x in found for x in jaxpr.invars]

    def _of_equation(self, site: Site, results: list[bool]) -> list[bool]:
        equation = site.equation
        row, calls = primitive_of(equation), calls_of(equation)
        self.has_rules |= equation.primitive.name == "custom_vjp_call"
        if calls:
            return self._of_calls(site, calls, results)
        if row.cast == "product":
            why_wide = self._choice.why_wide(site)
            leads = any(results) if why_wide == OUTER else why_wide is None
            return [leads and is_float32(atom) for atom in equation.invars]
        nothing = [False] * len(equation.invars)
        if self._choice.is_kept(site):
            return nothing
        if moves_each(equation):
            return results
        is_cast = equation.primitive.name == "convert_element_type"
        if (row.cast in ("", "devices") and not is_cast) or not any(results):
            return nothing
        data = {id(x) for x in equation.invars[row.data]}
        return [id(atom) in data for atom in equation.invars]

    def _of_calls(
        self, site: Site, calls: list[Call], results: list[bool]
    ) -> list[bool]:
        found = [False] * len(site.equation.invars)
        for call in calls:
            if call.kind == "condition":
                self.read(call.program, [False], call.site(site))
                continue
            if call.is_loop:
                inputs = self._loop(site, call, results)
            else:
                inputs = self.read(call.program, results, call.site(site))
            for i, leads in enumerate(inputs):
                found[call.operand(i)] |= leads
        return found

    def _loop(self, site: Site, call: Call, results: list[bool]) -> list[bool]:
        """What is carried leads to a product if it does in any later iteration."""
        wanted, last = list(results), call.consts + call.carried
        if self._choice.is_kept(site):
            inputs = self.read(call.program, [False] * len(results), site)
            inputs[call.consts : last] = [False] * call.carried
            return inputs
        while True:
            inputs = self.read(call.program, wanted, site)
            carry = inputs[call.consts : last]
            more = [a or b for a, b in zip(wanted, carry, strict=False)]
            if more == wanted[: call.carried]:
                inputs[call.consts : last] = more
                return inputs
            wanted[: call.carried] = more


def moves_each(equation: Any) -> bool:
    """Whether it moves several operands, each to a result of its own."""
    row, count = primitive_of(equation), len(equation.outvars)
    return bool(row.moves) and row.is_pairwise and len(equation.invars) == count > 1
