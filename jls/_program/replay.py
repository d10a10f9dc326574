# SPDX-License-Identifier: Apache-2.0
"""Runs a program again, with a say in what each of its operations gives.

It goes into calls, rematerialized programs, custom rules, loops and branches, so that
the operations in there are seen too. Programs over several devices stay whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.core import eval_jaxpr

from jls._program.jaxprs import called_program, is_literal, opened, scan_counts
from jls._program.walk import ROOT, Site

Change = Callable[[Site, list[Any]], list[Any]]

_WHOLE = ("shard_map", "xla_pmap", "run_state")


def can_reach(site: Site) -> bool:
    """Whether a replay sees an operation: nothing around it stays whole."""
    return not any(x.primitive.name in _WHOLE for x in site.equations)


def replay(
    program: Any, operands: Sequence[Any], change: Change, site: Site = ROOT
) -> list[Any]:
    """The results of a program.

    Args:
      program: a jaxpr.
      operands: its inputs; arrays, or tracers.
      change: gets the site of each operation and its results, and returns what the
        program goes on with, of the same shapes and dtypes.
      site: the calls around the program.
    """
    jaxpr, consts = opened(program)
    values = dict(zip(jaxpr.constvars, consts, strict=False))
    values.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        here = site.inside(equation, number)
        inputs = [read(atom) for atom in equation.invars]
        name, called = equation.primitive.name, called_program(equation)
        if name in _CONTROL:
            results = _CONTROL[name](here, inputs, change)
        elif called is not None and name not in _WHOLE:
            results = replay(called, inputs, change, here)
        else:
            results = change(here, _run_alone(jaxpr, equation, inputs))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_alone(jaxpr: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """The results of one operation: a program of its own."""
    pairs = zip(equation.invars, inputs, strict=True)
    known = {x: value for x, value in pairs if not is_literal(x)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(equation.outvars),
        eqns=[equation],
    )
    return eval_jaxpr(alone, [], *known.values())


def _scan(site: Site, inputs: list[Any], change: Change) -> list[Any]:
    params = site.equation.params
    consts, carried = scan_counts(site.equation)
    fixed, carry = inputs[:consts], inputs[consts : consts + carried]

    def body(carry, slices):
        operands = [*fixed, *carry, *slices]
        results = replay(params["jaxpr"], operands, change, site)
        return results[:carried], results[carried:]

    carry, stacks = lax.scan(
        body,
        carry,
        inputs[consts + carried :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *stacks]


def _while(site: Site, inputs: list[Any], change: Change) -> list[Any]:
    params = site.equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def goes_on(carry):
        cond, consts = opened(params["cond_jaxpr"])
        (is_on,) = eval_jaxpr(cond, consts, *inputs[:first], *carry)
        return is_on

    def body(carry):
        operands = [*inputs[first:last], *carry]
        return replay(params["body_jaxpr"], operands, change, site)

    return lax.while_loop(goes_on, body, inputs[last:])


def _cond(site: Site, inputs: list[Any], change: Change) -> list[Any]:
    def branch(number, program):
        here = Site(site.equations, (*site.numbers, number))
        return lambda *operands: replay(program, operands, change, here)

    branches = enumerate(site.equation.params["branches"])
    index, *operands = inputs
    return lax.switch(index, [branch(*pair) for pair in branches], *operands)


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
