# SPDX-License-Identifier: Apache-2.0
"""Loops that end by a tolerance, with a number that products in half precision gave.

Rounded, it may stay above the tolerance: then the loop takes more iterations, or all.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jls._program.control import Call
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import is_half_atom, is_inexact_atom, is_literal
from jls._program.places import place_of
from jls._program.products import PRODUCTS
from jls._scopes import UPDATE, marks_of
from jls._text import listed
from jls._tools.check.findings import Found, Note
from jls._tools.check.good_steps import Good

_COMPARES = ("ge", "gt", "le", "lt")
_UNITS = 4.0  # of half: a tolerance over them is wide enough


def note_tolerances(good: Good) -> Found:
    """Notes the loops of a program that end so."""
    if good.subject.reading is None:
        return
    found = dict.fromkeys(
        str(place_of(body.site))
        for body in good.subject.reading.main.all()
        if body.kind == "while" and UPDATE not in marks_of(body.site)
        if any(_is_rounded(*x) for x in _compared(body))
    )
    if found:
        loops = "loop ends" if len(found) == 1 else "loops end"
        yield Note(
            f"The {loops} by a tolerance, with a number that products in half give: "
            f"{listed(list(found))}. Rounded, it may take more iterations, or all. "
            "Keep those products in float32 (keep=), or widen the tolerance."
        )


def _compared(body: Frame) -> Iterator[tuple[list[Variable], list[Any]]]:
    """What is compared to end a loop: variables, and numbers in the program."""
    call, condition = body.condition, Frame(body.condition.program)
    stack: list[Variable] = [(condition, condition.jaxpr.outvars[0])]
    seen = set[Variable]()
    while stack:
        frame, atom = stack.pop()
        if is_literal(atom) or is_inexact_atom(atom) or (frame, atom) in seen:
            continue
        seen.add((frame, atom))
        maker = frame.makers.get(atom)
        equation = None if maker is None else frame.jaxpr.eqns[maker.position]
        name = "" if equation is None else equation.primitive.name
        if equation is not None and name in _COMPARES:
            pairs = [(frame, x) for x in equation.invars if is_inexact_atom(x)]
            if pairs:
                yield _in_the_loop(pairs, condition, call, body)
            continue
        inside = condition.inputs.get(atom) if frame is condition else None
        if inside is not None and inside >= call.consts:
            stack.append((body, body.jaxpr.outvars[inside - call.consts]))
        stack += frame.sources(atom)


def _in_the_loop(
    operands: list[Variable], condition: Frame, call: Call, body: Frame
) -> tuple[list[Variable], list[Any]]:
    """The variables and the numbers of a comparison; those of an input in the body."""
    found, numbers = list[Variable](), list[Any]()
    for frame, atom in operands:
        if is_literal(atom):
            numbers.append(atom.val)
            continue
        before = behind([(frame, atom)])
        found += before
        for at, i in condition.inputs.items():
            if (condition, at) not in before:
                continue
            if i >= call.consts:
                found.append((body, body.jaxpr.outvars[i - call.consts]))
            elif is_literal(given := body.caller.invars[call.operand(i)]):
                numbers.append(given.val)
    return found, numbers


def _is_rounded(variables: list[Variable], numbers: list[Any]) -> bool:
    """Whether a product in half gave it, and no number shows a wide tolerance."""
    halves = [
        atom
        for frame, atom in behind(variables) | set(variables)
        if atom in frame.makers and is_half_atom(atom)
        if frame.jaxpr.eqns[frame.makers[atom].position].primitive.name in PRODUCTS
    ]
    if not halves:
        return False
    unit = max(float(jnp.finfo(x.aval.dtype).eps) for x in halves)
    return not any(_UNITS * unit <= abs(float(np.max(x))) for x in numbers)
