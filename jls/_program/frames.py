# SPDX-License-Identifier: Apache-2.0
"""The calls of a program as a tree, to follow a value back to its sources."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

from jls._program.jaxprs import (
    Program,
    called_program,
    is_inexact_atom,
    is_literal,
    opened,
    scan_counts,
)
from jls._program.walk import ROOT, Site

Kind = Literal["root", "call", "scan", "while", "branch"]


Variable = tuple["Frame", Any]  # a variable of a program, and the call


class Maker(NamedTuple):
    """The equation that defines a variable, and which of its results it is."""

    number: int  # of the equation
    result: int


class Frame:
    """One call of a program.

    A program that is called twice has two frames: what holds for one need not hold for
    the other.
    """

    def __init__(
        self,
        program: Program,
        parent: "Frame | None" = None,
        site: Site = ROOT,
        kind: Kind = "root",
    ) -> None:
        self.jaxpr, consts = opened(program)
        self.parent, self.site, self.kind = parent, site, kind
        self.consts = dict(zip(self.jaxpr.constvars, consts, strict=False))
        self.inputs = {x: i for i, x in enumerate(self.jaxpr.invars)}
        self.makers = {
            x: Maker(number, i)
            for number, equation in enumerate(self.jaxpr.eqns)
            for i, x in enumerate(equation.outvars)
        }
        self._children: dict[int, list[Frame]] = {}

    @property
    def is_loop(self) -> bool:
        return self.kind in ("scan", "while")

    @property
    def has_lanes(self) -> bool:
        """Whether it is the body of a batched while loop, whose lanes end apart."""
        if self.kind != "while":
            return False
        cond, _ = opened(self.caller.params["cond_jaxpr"])
        return bool(cond.outvars[0].aval.shape)

    @property
    def caller(self) -> Any:
        """The equation that calls this program."""
        return self.site.equation

    def site_of(self, number: int) -> Site:
        """The site of an equation of this program."""
        return self.site.inside(self.jaxpr.eqns[number], number)

    def called(self, number: int) -> "list[Frame]":
        """The frames that an equation calls: one, or one for each branch of `cond`."""
        if number not in self._children:
            self._children[number] = list(self._call(number))
        return self._children[number]

    def _call(self, number: int) -> "Iterator[Frame]":
        site = self.site_of(number)
        equation = site.equation
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            yield Frame(params["jaxpr"], self, site, "scan")
        elif name == "while":
            yield Frame(params["body_jaxpr"], self, site, "while")
        elif name == "cond":
            for i, branch in enumerate(params["branches"]):
                here = Site(site.equations, (*site.numbers, i))
                yield Frame(branch, self, here, "branch")
        else:
            program = called_program(equation)
            if program is not None:
                yield Frame(program, self, site, "call")

    def all(self) -> "Iterator[Frame]":
        """This frame, and all frames below it."""
        yield self
        for number in range(len(self.jaxpr.eqns)):
            for child in self.called(number):
                yield from child.all()

    def unused(self, is_wanted: "Callable[[Frame, int], bool]") -> "Iterator[Variable]":
        """The unused results of this program and of its calls.

        Args:
          is_wanted: selects equations, by frame and number.
        """
        used = {x for e in self.jaxpr.eqns for x in e.invars if not is_literal(x)}
        used |= {x for x in self.jaxpr.outvars if not is_literal(x)}
        for x, maker in self.makers.items():
            if x not in used and is_wanted(self, maker.number):
                yield self, x
        for number in range(len(self.jaxpr.eqns)):
            for child in self.called(number):
                if not child.is_loop:
                    yield from child.unused(is_wanted)

    def counts(self) -> tuple[int, int]:
        """The numbers of constants and of carried values among a loop's inputs."""
        if self.kind == "scan":
            return scan_counts(self.caller)
        consts = self.caller.params["body_nconsts"]
        return consts, len(self.inputs) - consts

    def given(self, index: int) -> Any:
        """The caller's operand for an input."""
        offset = {"branch": 1, "while": self.caller.params.get("cond_nconsts", 0)}
        return self.caller.invars[index + offset.get(self.kind, 0)]

    def sources(self, variable: Any) -> "list[Variable]":
        """The variables that a variable comes from, one operation or call back."""
        if variable in self.inputs:
            return self._sources_of_input(self.inputs[variable])
        if variable not in self.makers:
            return []
        number, result = self.makers[variable]
        equation, called = self.jaxpr.eqns[number], self.called(number)
        found: list[Variable]
        found = [(child, child.jaxpr.outvars[result]) for child in called]
        if not called:
            found = [(self, atom) for atom in equation.invars]
        elif called[0].is_loop:
            consts, carried = called[0].counts()
            if result < carried:  # a loop of no iterations gives back what it got
                found.append((self, called[0].given(consts + result)))
        return found

    def _sources_of_input(self, index: int) -> "list[Variable]":
        if self.parent is None:
            return []
        found: list[Variable] = [(self.parent, self.given(index))]
        if self.is_loop:
            consts, carried = self.counts()
            if consts <= index < consts + carried:
                found.append((self, self.jaxpr.outvars[index - consts]))
        return found


def behind(
    roots: Iterable[Variable],
    is_end: Callable[[Frame, Any], bool] = lambda frame, atom: False,
) -> set[Variable]:
    """The roots, and all floating-point variables that they are computed from.

    Args:
      roots: variables, with their frames.
      is_end: where to stop.
    """
    known = set[Variable]()
    for root in roots:
        known |= _behind([root], known, lambda frame, atom: False, is_end) or set()
    return known


def independent_of(
    roots: Iterable[Variable], is_excluded: Callable[[Frame, Any], bool]
) -> list[Variable]:
    """The floating-point roots that are not computed from an excluded variable."""
    known, found = set[Variable](), []
    for root in roots:
        if is_literal(root[1]) or not is_inexact_atom(root[1]):
            continue
        visited = _behind([root], known, is_excluded)
        if visited is not None:
            known |= visited
            found.append(root)
    return found


def _behind(
    roots: Iterable[Variable],
    known: AbstractSet[Variable],
    is_excluded: Callable[[Frame, Any], bool],
    is_end: Callable[[Frame, Any], bool] = lambda frame, atom: False,
) -> set[Variable] | None:
    """As `behind`, without the known variables; None if one is excluded."""
    stack, visited = list(roots), set[Variable]()
    while stack:
        variable = stack.pop()
        frame, atom = variable
        if is_literal(atom) or not is_inexact_atom(atom):
            continue
        if variable in visited or variable in known:
            continue
        if is_excluded(frame, atom):
            return None
        visited.add(variable)
        if not is_end(frame, atom):
            stack += frame.sources(atom)
    return visited
