# SPDX-License-Identifier: Apache-2.0
"""What an optimizer does without the decision of a wrapper in it.

A wrapper around a part of an optimizer knows nothing of the others: they take a NaN in
a step that it skips. What comes after a wrapper, such as weight decay, moves parameters
in a step that it skips. And what comes before it, such as momentum, may keep a NaN.
"""

import operator
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
from jls._state import is_wrapper_state
from jls._step import FoundWrapper, wrapper_of
from jls._text import path_name
from jls._tree import is_inexact, named_floats


class Unguarded(NamedTuple):
    """What no wrapper decides on: paths of updates, and of an optimizer's state."""

    by_gradients: list[str]  # updates past every wrapper
    in_a_skip: list[str]  # those not 0 where the wrapper of their parameters skips
    kept: list[str]  # state that keeps a NaN, and hands it to a wrapper in each step


def unguarded_in(
    optimizer: Any,
    wrappers: Callable[[], list[FoundWrapper]],
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> Unguarded:
    """What an optimizer does without the decision of a wrapper in it.

    It is traced once for all questions, unless a wrapper is outermost.
    """
    nothing = Unguarded([], [], [])
    if wrapper_of(optimizer):
        return nothing
    try:
        found = wrappers()
    except Exception:  # it is raised where the step is taken
        return nothing
    update_fn = optax.with_extra_args_support(optimizer).update
    outside = _outside(state)

    def update(grads, outside):
        given = _with_outside(state, outside)
        updates, new = update_fn(grads, given, params, **extra)
        return updates, _outside(new)

    made = _trace(update, grads, outside)
    if made is None:
        return nothing
    names = {name for wrapper in found for name in wrapper.names}
    # Wrappers that are given all parameters, as in a chain, decide on all gradients.
    has_all = names.issuperset(named_floats(params)[0])
    given = made.floats
    of_grads = given[: len(given) - len(outside)] + [False] * len(outside)
    by_gradients, keep_them = {}, {}
    if outside or not has_all:
        by_gradients, keep_them = made.facts(_Data(), of_grads)
    are_zero, _ = made.facts(_Zero(), [False] * len(given))
    not_zero = jax.tree.map(operator.not_, are_zero)
    return Unguarded(
        by_gradients=[] if has_all else _true_in(by_gradients),
        in_a_skip=[name for name in _true_in(not_zero) if name in names],
        kept=_kept(made, outside, keep_them),
    )


def _outside(state: Any) -> dict[str, Any]:
    """The floating-point arrays of a state that are in that of no wrapper, by path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_wrapper_state)
    return {path_name(path): leaf for path, leaf in flat if is_inexact(leaf)}


def _with_outside(state: Any, outside: dict[str, Any]) -> Any:
    """`state` with other arrays in the places of those that `_outside` returns."""

    def replace(path, leaf):
        return outside.get(path_name(path), leaf)

    return jax.tree_util.tree_map_with_path(replace, state, is_leaf=is_wrapper_state)


def _kept(
    made: "_Traced", outside: dict[str, Any], keep_them: dict[str, bool]
) -> list[str]:
    """The paths of what keeps a NaN of the gradients, and hands it to a wrapper.

    Args:
      made: the program of an update.
      outside: the arrays that it is given in the state, outside of the wrappers.
      keep_them: whether gradients are data of each of them in the new state.
    """
    is_like = keep_them.keys() == outside.keys()  # or it is raised in the step
    if not (is_like and any(keep_them.values())):
        return []
    grads = [False] * (len(made.floats) - len(outside))
    _, keep_it = made.facts(_Data(), grads + jax.tree.leaves(keep_them))
    # What is overwritten in each step, such as a measure, keeps nothing.
    kept = {name: keep_them[name] and keep_it[name] for name in outside}
    question = _Data()
    made.facts(question, grads + jax.tree.leaves(kept))
    return _true_in(kept) if question.is_of_wrapper else []


def follow(
    fun: Callable[..., Any], *args: Any, through_bits: bool = False
) -> list[str]:
    """The paths of the results of `fun` that floating-point arguments are data of.

    Not past a wrapper: what that returns holds no inf or NaN. None where `fun` cannot
    be traced, which raises where the step is taken. `through_bits` also follows them
    where they are integers on the way.
    """
    made = _trace(fun, *args)
    return _true_in(made.facts(_Data(through_bits), made.floats)) if made else []


class _Traced(NamedTuple):
    """The program of a function, and the structure of its results."""

    program: Any
    structure: Any

    @property
    def floats(self) -> list[bool]:
        """Whether each input is floating point."""
        return list(map(is_inexact_atom, self.program.in_avals))

    def facts(self, question: Question[bool], inputs: list[bool]) -> Any:
        """The facts about the results, in their structure, from those about inputs."""
        results = walk(self.program, inputs, question)
        return jax.tree.unflatten(self.structure, results)


def _true_in(facts: Any) -> list[str]:
    """The paths of what is true."""
    flat, _ = jax.tree_util.tree_flatten_with_path(facts)
    return [path_name(path) for path, fact in flat if fact]


def _trace(fun: Callable[..., Any], *args: Any) -> _Traced | None:
    """The program of a function; None if it cannot be traced.

    It is raised where the step is taken.
    """
    try:
        program, results = program_beside(fun, *args)
    except Exception:
        return None
    return _Traced(program, jax.tree.structure(results))


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
        self.is_of_wrapper = False  # whether they are data of what a wrapper is given

    def of_constant(self, value: Any) -> bool:
        return False

    def results_of(self, site: Site, operands: Sequence[bool]) -> Sequence[bool]:
        equation = site.equation
        if UPDATE in marks_of(site):
            self.is_of_wrapper |= any(operands)
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
