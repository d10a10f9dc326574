# SPDX-License-Identifier: Apache-2.0
"""Selects between new and old: on a CPU each value where it is computed.

    new_mu = b1 * mu + (1 - b1) * grads         mu = where(ok, b1 * mu + ..., mu)
    new_nu = ...                          ->    nu = where(ok, ..., nu)
    updates = new_mu / sqrt(new_nu)             updates = mu / sqrt(nu)

In a step that is kept, both are the same numbers. In a step that is rolled back,
nothing is left of either. The moments then change in place, in the passes of the bare
optimizer: on a CPU a wrapped AdamW moves 11 times the bytes of the parameters, the bare
one 10. With selects at the end it would be 16, and with `lax.cond` too: the new moments
and the old ones would be needed at the same time, and XLA CPU would copy the old ones.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer, eval_jaxpr

from jls._program.jaxprs import is_literal


def select_in_place(
    jaxpr: Any, flag: Array, arguments: Sequence[Array], old: Sequence[Array]
) -> list[Array]:
    """Results of `jaxpr` where `flag`, else `old`.

    On a CPU the program continues with the selected values. Elsewhere it continues
    with its own, and so the selects are at the end. Nothing else differs: the program
    is traced once for all platforms.
    """
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    olds = {
        variable: x
        for variable, x in zip(jaxpr.outvars, old, strict=True)
        if not is_literal(variable) and variable not in values
    }
    read = {atom for equation in jaxpr.eqns for atom in _variables(equation.invars)}
    on_cpu = _on_cpu()
    selected = {}

    def run(equations):
        made = [variable for equation in equations for variable in equation.outvars]
        inputs = [atom for equation in equations for atom in equation.invars]
        inputs = [x for x in dict.fromkeys(_variables(inputs)) if x in values]
        part = jaxpr.replace(invars=inputs, outvars=made, eqns=equations)
        results = eval_jaxpr(part, [], *(values[variable] for variable in inputs))
        for variable, x in zip(made, results, strict=True):
            values[variable] = x
            if variable in olds:
                selected[variable] = kept = where(flag, x, olds[variable])
                if variable in read:
                    values[variable] = where(on_cpu, kept, x)

    waiting = []
    for equation in jaxpr.eqns:
        waiting.append(equation)
        if not olds.keys().isdisjoint(equation.outvars):
            run(waiting)
            waiting = []
    run(waiting)

    def result(output, x):
        if is_literal(output):
            return where(flag, output.val, x)
        if olds.get(output) is x:  # else returned twice, with two old values
            return selected[output]
        return where(flag, values[output], x)

    return [result(*pair) for pair in zip(jaxpr.outvars, old, strict=True)]


def computed_once(flags: Array) -> Array:
    """`flags`, which on a CPU are in memory before anything reads them.

    XLA CPU copies what is cheap into each fusion that reads it. The sum of a clip's
    squares is a chain of one addition a leaf, and as many fusions ask for the decision:
    with 200 leaves XLA would compile for minutes.
    """
    if not isinstance(flags, Tracer):
        return flags
    return lax.platform_dependent(
        flags, cpu=lax.optimization_barrier, default=lambda flags: flags
    )


def where(flag: Array, new: Any, old: Any) -> Array:
    """`jnp.where` for one flag and one dtype, which takes JAX less time to trace."""
    new = _to_array(new)  # a literal of the program may be a Python number
    return lax.select_n(flag, _to_array(old, new.dtype), new)


def _to_array(x: Any, dtype: Any = None) -> Array:
    if isinstance(x, Tracer) and dtype in (None, x.dtype):
        return x
    return jnp.asarray(x, dtype)


def _on_cpu() -> Array:
    """True on a CPU; decided when the program is lowered."""
    return lax.platform_dependent(
        cpu=lambda: jnp.asarray(True), default=lambda: jnp.asarray(False)
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not is_literal(atom)]
