# SPDX-License-Identifier: Apache-2.0
"""Runs a program operation by operation, with a say in what each operation gives.

What it calls is taken apart, so that the operations in there are seen too: calls,
rematerialized programs and custom rules. Loops, branches and programs over several
devices stay whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.core import eval_jaxpr

from jls._program.jaxprs import called_program, is_literal, opened
from jls._program.walk import ROOT, Site

Change = Callable[[Site, list[Any]], list[Any]]

_WHOLE = ("shard_map", "xla_pmap", "run_state")


def can_reach(site: Site) -> bool:
    """Whether a change sees an operation: all around it are mere calls."""
    return all(_is_taken_apart(equation) for equation in site.equations[:-1])


def replay(
    program: Any, operands: Sequence[Any], change: Change, site: Site = ROOT
) -> list[Any]:
    """The results of a program.

    Args:
      program: a jaxpr.
      operands: its inputs; arrays, or tracers.
      change: gets the site of each operation and its results, and returns what the
        program goes on with.
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
        if _is_taken_apart(equation):
            results = replay(called_program(equation), inputs, change, here)
        else:
            results = change(here, _bind(jaxpr, equation, inputs))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_taken_apart(equation: Any) -> bool:
    is_call = called_program(equation) is not None
    return is_call and equation.primitive.name not in _WHOLE


def _bind(jaxpr: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """The results of one operation: a program of its own."""
    known = {
        x: value
        for x, value in zip(equation.invars, inputs, strict=True)
        if not is_literal(x)
    }
    alone = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(equation.outvars),
        eqns=[equation],
    )
    return eval_jaxpr(alone, [], *known.values())
