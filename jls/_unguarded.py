# SPDX-License-Identifier: Apache-2.0
"""Which parameters an optimizer moves without the decision of a wrapper in it.

A wrapper around a part of an optimizer knows nothing of the others: they take a NaN in
a step that it skips. And what comes after a wrapper, such as weight decay, moves
parameters in a step that it skips.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.core import Tracer

from jls._mistakes import program_beside
from jls._program.control import Site
from jls._program.jaxprs import is_inexact_atom, names_around
from jls._program.known import number_in
from jls._program.primitives import primitive_of
from jls._program.walk import Question, walk
from jls._scopes import STORED, UPDATE, marks_of
from jls._step import FoundWrapper, wrapper_of
from jls._text import path_name
from jls._tree import named_floats


class Moved(NamedTuple):
    """The paths of updates that no wrapper decides on."""

    by_gradients: list[str]  # past every wrapper
    in_a_skip: list[str]  # not 0 where the wrapper of their parameters skips a step


def moved_past(
    optimizer: Any,
    wrappers: Callable[[], list[FoundWrapper]],
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> Moved:
    """The updates of an optimizer that no wrapper in it decides on.

    It is traced once for both questions, unless a wrapper is outermost.
    """
    nothing = Moved([], [])
    if wrapper_of(optimizer):
        return nothing
    try:
        found = wrappers()
    except Exception:  # it is raised where the step is taken
        return nothing
    update_fn = optax.with_extra_args_support(optimizer).update

    def update(grads):
        return update_fn(grads, state, params, **extra)[0]

    made = _trace(update, grads)
    if made is None:
        return nothing
    names = {name for wrapper in found for name in wrapper.names}
    # Wrappers that are given all parameters, as in a chain, decide on all gradients.
    has_all = names.issuperset(named_floats(params)[0])
    by_gradients = [] if has_all else made.of_data(_Data())
    are_zero = walk(made.program, [False] * len(made.program.in_avals), _Zero())
    pairs = zip(made.paths, are_zero, strict=True)
    moved = [name for name, is_zero in pairs if not is_zero and name in names]
    return Moved(by_gradients, moved)


def follow(
    fun: Callable[..., Any], *args: Any, through_bits: bool = False
) -> list[str]:
    """The paths of the results of `fun` that floating-point arguments are data of.

    Not past a wrapper: what that returns holds no inf or NaN. None where `fun` cannot
    be traced, which raises where the step is taken. `through_bits` also follows them
    where they are integers on the way.
    """
    made = _trace(fun, *args)
    return made.of_data(_Data(through_bits)) if made else []


class _Traced(NamedTuple):
    """The program of a function, and the paths of its results."""

    program: Any
    paths: list[str]

    def of_data(self, question: "_Data") -> list[str]:
        """The paths of the results that floating-point arguments are data of."""
        inputs = list(map(is_inexact_atom, self.program.in_avals))
        are_data = walk(self.program, inputs, question)
        pairs = zip(self.paths, are_data, strict=True)
        return [name for name, is_data in pairs if is_data]


def _trace(fun: Callable[..., Any], *args: Any) -> _Traced | None:
    """The program of a function; None if it cannot be traced.

    It is raised where the step is taken.
    """
    try:
        program, results = program_beside(fun, *args)
    except Exception:
        return None
    flat, _ = jax.tree_util.tree_flatten_with_path(results)
    return _Traced(program, [path_name(path) for path, _ in flat])


class _Zero(Question[bool]):
    """Whether a value is 0 where a wrapper skips: what it returns is then -0.0."""

    def of_constant(self, value: Any) -> bool:
        # Of what is outside of the optimizer only the type is known.
        number = None if isinstance(value, Tracer) else number_in(value)
        return number is not None and number.value == 0

    def results_of(self, site: Site, operands: Sequence[bool]) -> Sequence[bool]:
        equation = site.equation
        if UPDATE in marks_of(site):
            return [True] * len(equation.outvars)
        if any(name.text == STORED for name in names_around(equation)):
            # `jls.bfloat16_params` makes 0 of updates that are 0.
            return [True] * len(equation.outvars)
        row = primitive_of(equation)
        if row.is_pairwise and len(operands) == len(equation.outvars):
            return operands
        if row.degree == "product":
            is_zero = any(operands)
        elif row.degree == "quotient":
            is_zero = operands[0]
        elif equation.primitive.name in ("max", "min", "clamp"):
            is_zero = any(operands)  # a clip of it: 0 is between the bounds
        elif row.degree == "sum" or row.is_homogeneous or row.moves:
            is_zero = all(operands[row.data])
        else:
            is_zero = isinstance(row.degree, float) and row.degree > 0 and operands[0]
        return [is_zero] * len(equation.outvars)

    def join(self, site: Site, one: bool, other: bool) -> bool:
        return one and other


class _Data(Question[bool]):
    """Whether the arguments are data of a value."""

    def __init__(self, through_bits: bool = False) -> None:
        self._through_bits = through_bits

    def of_constant(self, value: Any) -> bool:
        return False

    def results_of(self, site: Site, operands: Sequence[bool]) -> Sequence[bool]:
        equation = site.equation
        if UPDATE in marks_of(site):
            return [False] * len(equation.outvars)
        is_pairwise = primitive_of(equation).is_pairwise
        if not is_pairwise or len(operands) != len(equation.outvars):
            operands = [any(operands)] * len(equation.outvars)
        pairs = zip(operands, equation.outvars, strict=True)
        return [
            is_data and (self._through_bits or is_inexact_atom(atom))
            for is_data, atom in pairs
        ]

    def join(self, site: Site, one: bool, other: bool) -> bool:
        return one or other
