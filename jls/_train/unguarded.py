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
from jls._program.walk import walk
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


def follow(fun: Callable[..., Any], *args: Any) -> list[str]:
    """The paths of the results of `fun` that floating-point arguments are data of.

    Not past a wrapper: what that returns holds no inf or NaN. None where `fun` cannot
    be traced, which raises where the step is taken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JlsWarning)  # given where the step is taken
            program, results = jax.make_jaxpr(fun, return_shape=True)(*args)
    except Exception:
        return []
    inputs = list(map(is_inexact_atom, program.in_avals))
    are_data = walk(program, inputs, _Data())
    paths, _ = jax.tree_util.tree_flatten_with_path(results)
    pairs = zip(paths, are_data, strict=True)
    return [path_name(path) for (path, _), is_data in pairs if is_data]


class _Data:
    """Whether the arguments are data of a value; see `jls._program.walk.Question`."""

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
        return [is_data and is_inexact_atom(atom) for is_data, atom in pairs]

    def on_call(self, site: Site, operands: Sequence[bool]) -> None:
        pass

    def of_call(self, site: Site, results: Sequence[bool]) -> Sequence[bool]:
        return results

    def join(self, site: Site, one: bool, other: bool) -> bool:
        return one or other

    def carry(self, site: Site, before: bool, after: bool) -> bool:
        return before or after

    def slice(self, value: bool) -> bool:
        return value

    stack = slice

    def branch(self, index: bool) -> int | None:
        return None
