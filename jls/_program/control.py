# SPDX-License-Identifier: Apache-2.0
"""Control flow as data: the programs that an equation runs, and what they are given.

    jit, remat, custom rules    one call, with the operands of the equation
    shard_map                   one call, on each device
    scan                        one call in each iteration: constants, state, slices
    while                       two in each: of the body, and of the condition
    cond                        one of several, chosen by the first operand

Any other equation is one operation, and so is one of these that lacks a part.
"""

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._program.jaxprs import (
    Program,
    called_program,
    is_literal,
    manual_axes,
    opened,
    parameter,
    parameters,
    scan_counts,
    variables_in,
)
from jls._program.primitives import primitive_of

V = TypeVar("V")
Kind = Literal["main", "call", "devices", "scan", "while", "condition", "branch"]

Indices = tuple[int, ...]  # the place of an operation in a program


class Key(enum.IntEnum):
    """The index, in a place, of what is no equation but belongs to one."""

    ARGUMENTS = -1  # the inputs of the whole program
    SLICES = -2  # what an iteration of a scan gets of its arrays
    ITERATIONS = -3  # of a while loop: their number
    CARRIED = -4  # of a while loop whose lanes end apart: its carry
    CONDITION = -5  # of a while loop: what its condition computes
    TAKEN = -6  # of a branch: inf if it was taken


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


def live(
    jaxpr: Any, outvars: Sequence[Any], keep: Container[int] = ()
) -> dict[int, set[Any]]:
    """The equations that some variables are computed by, in their order, by index.

    Each comes with the variables that no later one needs. A result among them is not
    used at all.

    Args:
      jaxpr: the program.
      outvars: variables of it, or literals.
      keep: equations that are needed for something else, such as their effects.
    """
    needed, found = set(variables_in(outvars)), dict[int, set[Any]]()
    for index in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[index]
        if index in keep or not needed.isdisjoint(equation.outvars):
            found[index] = {*variables_in(equation.invars), *equation.outvars} - needed
            needed |= found[index]
    return dict(reversed(found.items()))


def evaluate(
    program: Program,
    operands: Sequence[V],
    held: Callable[[Any], V],
    run: Callable[[Site, list[V]], Sequence[V]],
    site: Site = MAIN,
    needed: Mapping[int, set[Any]] | None = None,
) -> list[V]:
    """The results of a program, one equation after the other.

    Args:
      program: a jaxpr.
      operands: what stands for its inputs.
      held: gives what stands for a number in the program.
      run: gives the results of an equation, from what stands for its operands.
      site: the calls around the program.
      needed: the equations to run, as `live` gives them, with the variables that are
        forgotten after each. A result that is not computed is None.
    """
    jaxpr, consts = opened(program)
    known: dict[Any, V] = dict(zip(jaxpr.constvars, map(held, consts), strict=False))
    known.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return held(atom.val) if is_literal(atom) else known.get(atom)

    if needed is None:
        needed = {index: set() for index in range(len(jaxpr.eqns))}
    for index, last in needed.items():
        equation = jaxpr.eqns[index]
        results = run(site.inside(equation, index), list(map(read, equation.invars)))
        known.update(zip(equation.outvars, results, strict=True))
        for atom in last:
            del known[atom]
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

    @property
    def has_lanes(self) -> bool:
        """Whether it is a condition under `vmap`: the lanes of the loop end apart."""
        return bool(opened(self.program).jaxpr.outvars[0].aval.shape)

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
            return site.beside(Key.CONDITION)
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


Extra = Any  # a tree of arrays
Run = Callable[[Call, Sequence[Any]], tuple[list[Any], Extra]]
Step = Callable[[list[Any]], tuple[list[Any], Extra]]


def _no_extra(
    step: Step, carry: list[Any], has_lanes: bool
) -> tuple[Extra, Callable[[Any], Any]]:
    return None, lambda state: (step(state[0])[0], None)


def rebuild(
    equation: Any,
    calls: list[Call],
    operands: Sequence[Any],
    run: Run,
    begin: Callable[..., tuple[Extra, Callable[[Any], Any]]] = _no_extra,
) -> tuple[list[Any], Extra]:
    """The results of a loop, of branches or of a `shard_map` with other bodies.

    Args:
      equation: the loop, or what it is.
      calls: its programs.
      operands: its operands.
      run: gives the results of a program from its inputs, and what it gives besides: a
        scan stacks that, branches all have the same, `shard_map` stacks it by device.
      begin: of a `while`, gives what the loop carries besides, and the body that
        carries it too; from a step of the loop, the carry, and whether its lanes end
        apart.
    """
    if calls[0].kind == "scan":
        return _scan_again(equation, calls[0], operands, run)
    if calls[0].kind == "while":
        return _while_again(calls, operands, run, begin)
    if calls[0].kind == "devices":
        return _devices_again(equation, calls[0], operands, run)
    which, *rest = operands
    return lax.switch(which, [lambda *x, c=call: run(c, x) for call in calls], *rest)


def _scan_again(
    equation: Any, call: Call, operands: Sequence[Any], run: Run
) -> tuple[list[Any], Extra]:
    first, last = call.consts, call.consts + call.carried

    def body(carry, slices):
        results, beside = run(call, [*operands[:first], *carry, *slices])
        return results[: call.carried], (results[call.carried :], beside)

    params = parameters(equation)
    options = {x: params[x] for x in ("unroll", "_split_transpose") if x in params}
    carry, (stacks, beside) = lax.scan(
        body,
        list(operands[first:last]),
        list(operands[last:]),
        length=call.length,
        reverse=call.is_reversed,
        **options,
    )
    return [*carry, *stacks], beside


def _while_again(
    calls: list[Call], operands: Sequence[Any], run: Run, begin: Any
) -> tuple[list[Any], Extra]:
    body, condition = calls
    inputs = body.inputs(operands)
    carry = inputs[body.consts :]
    has_lanes = condition.has_lanes

    def is_on(carry):
        return run(condition, [*operands[: condition.consts], *carry])[0][0]

    def step(carry):
        results, beside = run(body, [*inputs[: body.consts], *carry])
        return _in_lanes(is_on(carry), results, carry) if has_lanes else results, beside

    def is_any_on(state):
        return jnp.any(is_on(state[0])) if has_lanes else is_on(state[0])

    beside, around = begin(step, carry, has_lanes)
    return lax.while_loop(is_any_on, around, (carry, beside))


def _in_lanes(pred: Array, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """The new values in the active lanes, the old ones in the others."""

    def select(new, old):
        dimensions = tuple(range(pred.ndim))
        return lax.select(lax.broadcast_in_dim(pred, new.shape, dimensions), new, old)

    return jax.tree.map(select, list(new), list(old))


def _devices_again(
    equation: Any, call: Call, operands: Sequence[Any], run: Run
) -> tuple[list[Any], Extra]:
    axes = manual_axes(equation)
    assert axes is not None

    def stacked(*operands):
        results, beside = run(call, operands)
        return results, jax.tree.map(lambda x: x[None], beside)

    return jax.shard_map(
        stacked,
        mesh=parameter(equation, "mesh"),
        in_specs=tuple(parameter(equation, "in_specs")),
        out_specs=(
            list(parameter(equation, "out_specs")),
            jax.sharding.PartitionSpec(tuple(sorted(axes))),
        ),
        check_vma=parameter(equation, "check_vma"),
        axis_names=axes,
    )(*operands)
