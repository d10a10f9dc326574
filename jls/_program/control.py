# SPDX-License-Identifier: Apache-2.0
"""Control flow as data: the programs that an equation runs, and what they are given.

    jit, remat, custom rules    one call, with the operands of the equation
    shard_map                   likewise, on each device
    scan                        one call in each iteration: constants, state, slices
    while                       two in each: of the body, and of the condition
    cond                        one of several, chosen by the first operand

Any other equation is one operation, and so is one of these that lacks a part.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jls._program.jaxprs import (
    Program,
    called_program,
    is_literal,
    manual_axes,
    opened,
    parameter,
    scan_counts,
)
from jls._program.primitives import primitive_of

V = TypeVar("V")
Kind = Literal["call", "devices", "scan", "while", "condition", "branch"]

_CONDITION = -5  # beside the index of a `while`: of what its condition computes

Indices = tuple[int, ...]  # the place of an operation in a program


class Site(NamedTuple):
    """The position of an equation: the calls around it and itself, outermost first."""

    equations: tuple[Any, ...]
    indices: Indices  # of each in its program: sites of two calls differ

    @property
    def equation(self) -> Any:
        return self.equations[-1]

    def inside(self, equation: Any, index: int) -> "Site":
        return Site((*self.equations, equation), (*self.indices, index))

    def beside(self, *indices: int) -> "Site":
        """The position of a part of an equation, such as a branch."""
        return Site(self.equations, (*self.indices, *indices))


MAIN = Site((), ())


def evaluate(
    program: Program,
    operands: Sequence[V],
    held: Callable[[Any], V],
    run: Callable[[Site, list[V]], Sequence[V]],
    site: Site = MAIN,
) -> list[V]:
    """The results of a program, one equation after the other.

    Args:
      program: a jaxpr.
      operands: what stands for its inputs.
      held: gives what stands for a number in the program.
      run: gives the results of an equation, from what stands for its operands.
      site: the calls around the program.
    """
    jaxpr, consts = opened(program)
    known: dict[Any, V] = dict(zip(jaxpr.constvars, map(held, consts), strict=False))
    known.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> V:
        return held(atom.val) if is_literal(atom) else known[atom]

    for index, equation in enumerate(jaxpr.eqns):
        results = run(site.inside(equation, index), list(map(read, equation.invars)))
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


class Call(NamedTuple):
    """A program that an equation runs.

    Its inputs are constants, then what a loop carries, then slices along the first
    axis. Its results are what a loop carries, then slices of the equation's results.
    """

    kind: Kind
    program: Program
    first: int  # of its operands among those of the equation
    consts: int  # the number of inputs that are the same in each iteration: all
    carried: int = 0  # the number of inputs that each iteration changes
    gap: int = 0  # the operands between constants and carry, of the other program
    branch: int | None = None
    length: int | None = None  # of a scan
    is_reversed: bool = False

    @property
    def is_loop(self) -> bool:
        return self.kind in ("scan", "while")

    def operand(self, index: int) -> int:
        """The operand of the equation that an input is, in the first iteration."""
        return self.first + index + (self.gap if index >= self.consts else 0)

    def inputs(self, operands: Sequence[Any]) -> list[Any]:
        """The inputs among the operands of the equation."""
        count = len(opened(self.program).jaxpr.invars)
        return [operands[self.operand(i)] for i in range(count)]

    def site(self, site: Site) -> Site:
        """The position of the program, from that of the equation."""
        if self.kind == "condition":
            return site.beside(_CONDITION)
        return site if self.branch is None else site.beside(self.branch)


def calls_of(equation: Any) -> list[Call]:
    """The programs that an equation runs; none if it is an operation."""
    control = primitive_of(equation).control
    return _CALLS[control](equation) if control else []


def _call(equation: Any) -> list[Call]:
    program = called_program(equation)
    if program is None:
        return []
    return [Call("call", program, 0, len(equation.invars))]


def _devices(equation: Any) -> list[Call]:
    needed = (parameter(equation, x) for x in ("mesh", "in_specs", "out_specs"))
    is_known = parameter(equation, "check_vma") is not None
    is_known &= all(x is not None for x in (*needed, manual_axes(equation)))
    return [x._replace(kind="devices") for x in _call(equation) if is_known]


def _scan(equation: Any) -> list[Call]:
    program, length = parameter(equation, "jaxpr"), parameter(equation, "length")
    counts, is_reversed = scan_counts(equation), parameter(equation, "reverse")
    if program is None or length is None or counts is None or is_reversed is None:
        return []
    return [Call("scan", program, 0, *counts, length=length, is_reversed=is_reversed)]


def _while(equation: Any) -> list[Call]:
    body, cond = (parameter(equation, f"{x}_jaxpr") for x in ("body", "cond"))
    last, first = (parameter(equation, f"{x}_nconsts") for x in ("body", "cond"))
    if body is None or cond is None or last is None or first is None:
        return []
    carried = len(equation.outvars)
    return [
        Call("while", body, first, last, carried),
        Call("condition", cond, 0, first, carried, gap=last),
    ]


def _cond(equation: Any) -> list[Call]:
    branches = parameter(equation, "branches") or ()
    count = len(equation.invars) - 1
    return [Call("branch", x, 1, count, branch=i) for i, x in enumerate(branches)]


_CALLS = {
    "call": _call,
    "devices": _devices,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
