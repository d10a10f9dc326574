# SPDX-License-Identifier: Apache-2.0
"""Which parameters an optimizer moves without the decision of a wrapper in it.

A wrapper around a part of an optimizer knows nothing of the others: they take a NaN in
a step that it skips.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jls._notes import noted
from jls._program.control import Site
from jls._program.jaxprs import is_inexact_atom
from jls._program.primitives import primitive_of
from jls._program.walk import Question, walk
from jls._scopes import UPDATE, marks_of
from jls._step import FoundWrapper
from jls._text import path_name
from jls._tree import named_floats
from jls._types import JlsWarning


def unguarded(
    optimizer: Any,
    wrappers: Callable[[], list[FoundWrapper]],
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> list[str]:
    """The paths of the updates that are made of gradients past every wrapper.

    None if the wrappers are given all parameters, as those in a chain are.
    """
    try:
        found = wrappers()
    except Exception:  # it is raised where the step is taken
        return []
    names = {name for wrapper in found for name in wrapper.names}
    if names.issuperset(named_floats(params)[0]):
        return []  # without the time to trace the optimizer once more

    update_fn = optax.with_extra_args_support(optimizer).update

    def update(grads):
        with noted("update", apart=True):  # they are of this trace
            return update_fn(grads, state, params, **extra)[0]

    return follow(update, grads)


def follow(
    fun: Callable[..., Any], *args: Any, through_bits: bool = False
) -> list[str]:
    """The paths of the results of `fun` that floating-point arguments are data of.

    Not past a wrapper: what that returns holds no inf or NaN. None where `fun` cannot
    be traced, which raises where the step is taken. `through_bits` also follows them
    where they are integers on the way.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JlsWarning)  # given where the step is taken
            program, results = jax.make_jaxpr(fun, return_shape=True)(*args)
    except Exception:
        return []
    inputs = list(map(is_inexact_atom, program.in_avals))
    are_data = walk(program, inputs, _Data(through_bits))
    paths, _ = jax.tree_util.tree_flatten_with_path(results)
    pairs = zip(paths, are_data, strict=True)
    return [path_name(path) for (path, _), is_data in pairs if is_data]


class _Data(Question[bool]):
    """Whether the arguments are data of a value."""

    def __init__(self, through_bits: bool = False) -> None:
        self._through_bits = through_bits

    def of_constant(self, value: Any) -> bool:
        return False

    def of_equation(self, site: Site, operands: Sequence[bool]) -> Sequence[bool]:
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
