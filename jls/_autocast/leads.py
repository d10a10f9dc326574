# SPDX-License-Identifier: Apache-2.0
"""Which values of a program lead to a product that is computed in half.

Those that reach one through nothing but elementwise operations and moves: it rounds
them anyway, so nothing is lost if they are stored in half before. What leads to a sum,
or to the loss, must not be rounded. Read backwards, from the last operation.
"""

from collections.abc import Sequence
from typing import Any

from jls._autocast.keep import OUTER, Choice
from jls._autocast.primitives import (
    ELEMENTWISE,
    EXTREMES,
    MOVES,
    OPAQUE,
    PAIRWISE,
    WRITES,
)
from jls._program.control import calls_of
from jls._program.jaxprs import (
    Program,
    called_program,
    is_float32,
    is_literal,
    opened,
    parameter,
    parameters,
)
from jls._program.products import PRODUCTS
from jls._program.rules import data_of
from jls._program.walk import ROOT, Site

_FOLLOW = ELEMENTWISE | MOVES | EXTREMES | WRITES | {"convert_element_type"}


class Leads:
    """The variables of a program, and of all that it calls, that lead to a product."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._found: dict[tuple[int, ...], set[Any]] = {}
        self.has_rules = False  # whether there is a custom_vjp

    def at(self, site: Site, atom: Any) -> bool:
        """Whether a variable of the program that is called at `site` leads to one."""
        return not is_literal(atom) and atom in self._found.get(site.numbers, ())

    def read(
        self, program: Program, wanted: Sequence[bool], site: Site = ROOT
    ) -> list[bool]:
        """Which inputs of a program lead to a product.

        Args:
          program: a jaxpr.
          wanted: which of its results do, where it is called.
          site: the calls around it.
        """
        jaxpr = opened(program).jaxpr
        found: set[Any] = set()
        self._found[site.numbers] = found
        found.update(
            atom
            for atom, is_wanted in zip(jaxpr.outvars, wanted, strict=True)
            if is_wanted and not is_literal(atom)
        )
        for number in reversed(range(len(jaxpr.eqns))):
            equation = jaxpr.eqns[number]
            here = site.inside(equation, number)
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
        name = equation.primitive.name
        if name in _CONTROL:
            return _CONTROL[name](self, site, results)
        self.has_rules |= name.startswith("custom_vjp_call")
        program = called_program(equation)
        if program is not None and name not in OPAQUE:
            return self.read(program, results, site)
        if name in PRODUCTS:
            why_wide = self._choice.why_wide(site)
            leads = any(results) if why_wide == OUTER else why_wide is None
            return [leads and is_float32(atom) for atom in equation.invars]
        nothing = [False] * len(equation.invars)
        if self._choice.is_kept(site):
            return nothing
        if name in PAIRWISE:
            return results
        if name not in _FOLLOW or not any(results):
            return nothing
        data = {id(x) for x in data_of(name, [*equation.invars])}
        return [id(atom) in data for atom in equation.invars]

    def _scan(self, site: Site, results: list[bool]) -> list[bool]:
        (call,) = calls_of(site.equation)
        consts, carried = call.consts, call.carried
        body = call.program
        return self._loop(site, body, consts, carried, results)

    def _while(self, site: Site, results: list[bool]) -> list[bool]:
        params = parameters(site.equation)
        first, carried = params["cond_nconsts"], len(results)
        condition = Site(site.equations, (*site.numbers, CONDITION))
        self.read(params["cond_jaxpr"], [False], condition)
        body, consts = params["body_jaxpr"], params["body_nconsts"]
        return [False] * first + self._loop(site, body, consts, carried, results)

    def _loop(
        self, site: Site, body: Any, consts: int, carried: int, results: list[bool]
    ) -> list[bool]:
        """What is carried leads to a product if it does in any later iteration."""
        wanted = list(results)
        while True:
            inputs = self.read(body, wanted, site)
            carry = inputs[consts : consts + carried]
            more = [a or b for a, b in zip(wanted, carry, strict=False)]
            if more == wanted[:carried]:
                inputs[consts : consts + carried] = more
                return inputs
            wanted[:carried] = more

    def _cond(self, site: Site, results: list[bool]) -> list[bool]:
        found = [False] * (len(site.equation.invars) - 1)
        for number, branch in enumerate(parameter(site.equation, "branches")):
            here = Site(site.equations, (*site.numbers, number))
            inputs = self.read(branch, results, here)
            found = [a or b for a, b in zip(found, inputs, strict=True)]
        return [False, *found]


CONDITION = -1  # of a while loop, in the place of the number of a branch

_CONTROL = {"scan": Leads._scan, "while": Leads._while, "cond": Leads._cond}
