# SPDX-License-Identifier: Apache-2.0
"""Roll back what a function computes, at the place where it is computed.

A select after an optimizer has made its whole step costs memory: the new moments and
the old ones are needed at the same time, and what is computed from the new ones is
computed from values that nobody keeps. XLA copies the old ones, or computes twice.

Here the program of the optimizer is taken apart, and each value that becomes part of
its state is selected as soon as it is computed. Whatever is computed from it, such as
the update from the moments, is computed from what was selected:

    new_mu = b1 * mu + (1 - b1) * grads         mu = where(ok, b1 * mu + ..., mu)
    new_nu = ...                          ->    nu = where(ok, ..., nu)
    updates = new_mu / sqrt(new_nu)             updates = mu / sqrt(nu)

In a step that is kept, both are the same numbers. In a step that is rolled back,
nothing is left of either. The moments then change in place, in the passes of the bare
optimizer: on a CPU a wrapped AdamW moves 11 times the bytes of the parameters, the bare
one 10. With selects at the end it would be 16, and with `lax.cond` too.

What is computed from an old state may be NaN, as Adam's first bias correction is. It is
never kept, but some could see it: a loop until convergence, which then might not end; a
function of the host, which may raise; foreign code; and a derivative, since 0 times NaN
is NaN. So a program with any of these, or with effects, is selected at the end, and so
is anything that is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Literal

from jls._tree import Tree, is_array


def roll_back_unless(flag: Array, fun: Callable[[], Tree], old: Tree) -> Tree:
    """`fun()` where `flag`, else `old`: trees of one structure, shapes and dtypes.

    Leaves that are not arrays are those of `old`.
    """
    arrays = iter(_select_arrays(flag, lambda: _arrays(fun()), _arrays(old)))
    return jax.tree.map(lambda x: next(arrays) if is_array(x) else x, old)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def _select_arrays(
    flag: Array, fun: Callable[[], Sequence[Array]], old: Sequence[Array]
) -> list[Array]:
    if not isinstance(flag, Tracer):
        return _select(flag, fun(), old)
    # The compiled step keeps the functions below: they must not hold on to tracers.
    jaxpr, consts = _trace(fun)

    def at_the_end(flag, consts, old):
        return _select(flag, eval_jaxpr(jaxpr, consts), old)

    if jaxpr.effects or _might_see_nan(jaxpr):
        return at_the_end(flag, consts, old)

    @jax.custom_jvp
    def where_made(flag, consts, old):
        return _select_where_made(jaxpr, flag, consts, old)

    @where_made.defjvp
    def _(primals, tangents):
        return jax.jvp(at_the_end, primals, tangents)

    return where_made(flag, consts, list(old))


def _trace(fun: Callable[[], Sequence[Array]]) -> tuple[Any, list[Array]]:
    """The program of `fun`, and the arrays that it takes from outside."""
    traced = jax.make_jaxpr(fun)()
    return traced.jaxpr, list(traced.consts)


def _select(flag: Array, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    return [jnp.where(flag, x, y) for x, y in zip(new, old, strict=True)]


def _select_where_made(
    jaxpr: Any, flag: Array, consts: Sequence[Array], old: Sequence[Array]
) -> list[Array]:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    olds = {
        variable: x
        for variable, x in zip(jaxpr.outvars, old, strict=True)
        if _is_variable(variable) and variable not in values
    }
    for equation in jaxpr.eqns:
        inputs = list(dict.fromkeys(filter(_is_variable, equation.invars)))
        alone = jaxpr.replace(
            constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]
        )
        made = eval_jaxpr(alone, [], *(values[variable] for variable in inputs))
        for variable, x in zip(equation.outvars, made, strict=True):
            is_kept = variable in olds
            values[variable] = jnp.where(flag, x, olds[variable]) if is_kept else x

    def selected(output, x):
        value = values[output] if _is_variable(output) else output.val
        is_done = _is_variable(output) and olds.get(output) is x
        return value if is_done else jnp.where(flag, value, x)

    return [selected(*pair) for pair in zip(jaxpr.outvars, old, strict=True)]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)


# Loops that decide by themselves when to end, host functions, foreign code.
_WATCHFUL = ("while", "pure_callback", "ffi_call", "buffer_callback")


def _might_see_nan(jaxpr: Any) -> bool:
    """Whether a program holds, however deep, what a NaN on its way would change."""

    def holds_programs(value):
        return hasattr(value, "eqns")

    for equation in jaxpr.eqns:
        values = jax.tree.leaves([*equation.params.values()], is_leaf=holds_programs)
        inner = filter(holds_programs, values)
        if equation.primitive.name in _WATCHFUL or any(map(_might_see_nan, inner)):
            return True
    return False
