# SPDX-License-Identifier: Apache-2.0
"""The calls of a program as a tree, to follow a value back to its sources."""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from jls._program.control import MAIN, Call, Indices, Site, calls_of, live
from jls._program.jaxprs import Program, is_inexact_atom, is_literal, opened

Variable = tuple["Frame", Any]  # a variable of a program, and the call


class Maker(NamedTuple):
    """The equation that defines a variable, and which of its results it is."""

    position: int  # of the equation
    result: int


class Link(NamedTuple):
    """How a variable is made, and from what: one operation or one call back.

    constant    it is a number that the program closes over
    argument    it is an input of the whole program
    operation   from its operands
    call        the same value outside or inside of a call
    branch      the same value in one of several branches
    same        an input of a loop that no iteration changes
    slice       an iteration's part of an array
    carry       what the loop starts with; what the iteration before has made
    last        what the last iteration has made; without one, what the loop got
    stack       what each iteration has made
    """

    way: str
    sources: list[Variable]
    position: int = 0  # among the arguments, the slices, or what the loop carries


class Frame:
    """One call of a program.

    A program that is called twice has two frames: what holds for one need not hold for
    the other.
    """

    def __init__(
        self,
        program: Program,
        parent: "Frame | None" = None,
        site: Site = MAIN,
        call: Call | None = None,
    ) -> None:
        self.program = program
        self.jaxpr, consts = opened(program)
        self.call = call or Call("main", program, 0, 0)
        self.parent, self.site, self.kind = parent, site, self.call.kind
        self.is_loop, self.is_reversed = self.call.is_loop, self.call.is_reversed
        self.length = self.call.length or 0  # the number of iterations of a scan
        self.consts = dict(zip(self.jaxpr.constvars, consts, strict=False))
        self.inputs = {x: i for i, x in enumerate(self.jaxpr.invars)}
        self.makers = {
            x: Maker(index, i)
            for index, equation in enumerate(self.jaxpr.eqns)
            for i, x in enumerate(equation.outvars)
        }
        self._children: dict[int, list[Frame]] = {}

    @property
    def has_lanes(self) -> bool:
        """Whether it is the body of a batched while loop, whose lanes end apart."""
        if self.kind != "while":
            return False
        return self.condition.has_lanes

    @property
    def condition(self) -> Call:
        """The condition of a while loop of which this is the body."""
        (call,) = (x for x in calls_of(self.caller) if x.kind == "condition")
        return call

    @property
    def caller(self) -> Any:
        """The equation that calls this program."""
        return self.site.equation

    def site_of(self, index: int) -> Site:
        """The site of an equation of this program."""
        return self.site.inside(self.jaxpr.eqns[index], index)

    def indices_of(self, index: int) -> Indices:
        """The indices of that site, by which records and facts are kept."""
        return (*self.site.indices, index)

    def called(self, index: int) -> "list[Frame]":
        """The frames that an equation calls: one, or one for each branch of `cond`."""
        if index not in self._children:
            site = self.site_of(index)
            self._children[index] = [
                Frame(x.program, self, x.site(site), x)
                for x in calls_of(site.equation)
                if x.kind != "condition"
            ]
        return self._children[index]

    def around(self) -> "Iterator[Frame]":
        """This frame, and those around it, innermost first."""
        here: Frame | None = self
        while here is not None:
            yield here
            here = here.parent

    def loops(self) -> "list[Frame]":
        """The loops that this frame is in, and itself; outermost first."""
        return [x for x in self.around() if x.is_loop][::-1]

    def all(self) -> "Iterator[Frame]":
        """This frame, and all frames below it."""
        yield self
        for index in range(len(self.jaxpr.eqns)):
            for child in self.called(index):
                yield from child.all()

    def equations(self) -> "Iterator[tuple[Frame, int, Any]]":
        """The equations in this frame and in all below, with frame and index."""
        for frame in self.all():
            for index, equation in enumerate(frame.jaxpr.eqns):
                yield frame, index, equation

    def operations(self) -> "Iterator[tuple[Frame, int]]":
        """The equations that call nothing, by frame and index."""
        return ((x, i) for x, i, _ in self.equations() if not x.called(i))

    def makers_of(self, variables: "Container[Variable]") -> set[Indices]:
        """The places of the operations and calls that have one of these as a result."""
        return {
            frame.indices_of(index)
            for frame, index, equation in self.equations()
            if any((frame, x) in variables for x in equation.outvars)
        }

    def by_site(self) -> "dict[tuple[int, ...], Frame]":
        """This frame and those below it, by their places in the program."""
        return {frame.site.indices: frame for frame in self.all()}

    def unused(self, is_wanted: "Callable[[Frame, int], bool]") -> "Iterator[Variable]":
        """The unused results of this program and of its calls.

        Args:
          is_wanted: selects equations, by frame and index.
        """
        equations = self.jaxpr.eqns
        every = live(self.jaxpr, self.jaxpr.outvars, keep=range(len(equations)))
        for index, last in every.items():
            for x in last.intersection(equations[index].outvars):
                if is_wanted(self, index):
                    yield self, x
            for child in self.called(index):
                if not child.is_loop:
                    yield from child.unused(is_wanted)

    def given(self, index: int) -> Any:
        """The caller's operand for an input."""
        return self.caller.invars[self.call.operand(index)]

    def link(self, variable: Any) -> Link:
        """How a variable is made, and from what."""
        if variable in self.inputs:
            return self._link_of_input(self.inputs[variable])
        if variable not in self.makers:
            return Link("constant", [])
        index, result = self.makers[variable]
        called = self.called(index)
        if not called:
            operands = self.jaxpr.eqns[index].invars
            return Link("operation", [(self, x) for x in operands])
        inside: list[Variable]
        inside = [(child, child.jaxpr.outvars[result]) for child in called]
        child = called[0]
        if not child.is_loop:
            return Link("branch" if child.kind == "branch" else "call", inside)
        if result >= child.call.carried:
            return Link("stack", inside)
        begins = self, child.given(child.call.consts + result)
        return Link("last", [*inside, begins], result)

    def _link_of_input(self, index: int) -> Link:
        if self.parent is None:
            return Link("argument", [], index)
        outside = self.parent, self.given(index)
        if not self.is_loop:
            return Link("call", [outside])
        position = index - self.call.consts
        if position < 0:
            return Link("same", [outside])
        if position >= self.call.carried:
            return Link("slice", [outside], position - self.call.carried)
        after = self, self.jaxpr.outvars[position]
        return Link("carry", [outside, after], position)

    def sources(self, variable: Any) -> "list[Variable]":
        """The variables that a variable comes from, one operation or call back."""
        return self.link(variable).sources


def behind(
    roots: Iterable[Variable],
    sources: Callable[[Frame, Any], Iterable[Variable]] = Frame.sources,
) -> set[Variable]:
    """The roots, and all floating-point variables that they are computed from.

    Args:
      roots: variables, with their frames.
      sources: what a variable comes from, one step back.
    """
    stack, found = list(roots), set[Variable]()
    while stack:
        variable = stack.pop()
        frame, atom = variable
        if is_literal(atom) or not is_inexact_atom(atom) or variable in found:
            continue
        found.add(variable)
        stack += sources(frame, atom)
    return found
