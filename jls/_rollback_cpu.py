# SPDX-License-Identifier: Apache-2.0
"""Selects between new and old values: on a CPU, each where it is computed.

    new_mu = b1 * mu + (1 - b1) * grads         mu = where(ok, b1 * mu + ..., mu)
    new_nu = ...                          ->    nu = where(ok, ..., nu)
    updates = new_mu / sqrt(new_nu)             updates = mu / sqrt(nu)

In a step that is kept, both programs compute the same numbers. In a step that is rolled
back, nothing is left of either. On the right, the moments change in place, in the
passes of the bare optimizer. On a CPU a wrapped AdamW moves 11 times the bytes of the
parameters, and a bare one 10 times. With selects at the end, or with `lax.cond`, it
would be 16 times: the new moments and the old ones would be needed at the same time,
and XLA CPU would copy the old ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from jls._program.jaxprs import is_literal, variables_in
from jls._program.writer import Writer

Flags = TypeVar("Flags", bound=tuple[Array, ...])


class Chosen(NamedTuple):
    """The `new` arrays where `flag` is true, else the `old` ones."""

    flag: Array  # bool[]
    new: Sequence[Array]
    old: Sequence[Array]


def select_in_place(
    jaxpr: Any,
    flag: Array,
    consts: Sequence[Array],
    inputs: Chosen,
    old: Sequence[Array],
) -> list[Array]:
    """The results of `jaxpr` where `flag` is true, else `old`.

    On a CPU the program continues with the selected values. Elsewhere it continues
    with its own values, so the selects are at the end. Nothing else differs: there is
    one program for all platforms.

    Args:
      jaxpr: a program of `consts` and `inputs`.
      flag: `bool[]`; where it is true, the flag of `inputs` is too.
      consts: arrays.
      inputs: arrays.
      old: the old values of the results.
    """
    writer = Writer(jaxpr, [*consts, *inputs.new])
    given = dict(zip(jaxpr.invars, writer.arguments, strict=True))
    places = {
        variable: i  # the last place, if it is returned twice
        for i, variable in enumerate(jaxpr.outvars)
        if not is_literal(variable) and variable not in given
    }
    is_kept, is_given = map(writer.variable_of, (flag, inputs.flag))
    (is_here,) = writer.apply(on_cpu)  # in the program, where XLA folds it first
    kept = {}  # selected results
    read = {}  # the variables to read in the place of others; None until one is read

    def select(flag, new, old):
        (selected,) = writer.apply(where, flag, new, old)
        return selected

    def of_its_type(x, selected):
        # Another type would change the types of all that is computed from it.
        return selected if selected.aval == x.aval else x

    of_inputs = jaxpr.invars[len(consts) :]
    for x, ones in zip(of_inputs, map(writer.variable_of, inputs.old), strict=True):
        read[x] = of_its_type(x, select(is_given, x, ones))

    def operand(atom):
        if is_literal(atom) or atom not in read:
            return atom
        if read[atom] is None:
            read[atom] = of_its_type(atom, select(is_here, kept[atom], atom))
        return read[atom]

    for equation in jaxpr.eqns:
        if not read.keys().isdisjoint(variables_in(equation.invars)):
            equation = equation.replace(invars=list(map(operand, equation.invars)))
        writer.equations.append(equation)
        for x in equation.outvars:
            if x in places:
                other = writer.variable_of(_to_array(old[places[x]], x.aval.dtype))
                kept[x], read[x] = select(is_kept, x, other), None

    defined = [(i, x) for i, x in enumerate(jaxpr.outvars) if not is_literal(x)]
    defined = [(i, kept[x] if places[x] == i else x) for i, x in defined if x in places]
    results = writer.run([x for _, x in defined], "optimizer")
    new = {i: result for (i, _), result in zip(defined, results, strict=True)}

    def result(i, output, x):
        if is_literal(output):
            return where(flag, output.val, x)
        if output in given:
            return where(flag, given[output], x)
        return new[i] if places[output] == i else where(flag, new[i], x)

    pairs = zip(jaxpr.outvars, old, strict=True)
    return [result(i, *pair) for i, pair in enumerate(pairs)]


def computed_once(flags: Array) -> Array:
    """`flags`; on a CPU they are in memory before anything reads them.

    XLA CPU copies cheap computations into each fusion that reads them. A clip's sum of
    squares is a chain with one addition per leaf, and as many fusions ask for the
    decision. With 200 leaves XLA would compile for minutes.
    """
    if not isinstance(flags, Tracer):
        return flags
    return lax.platform_dependent(
        flags, cpu=lax.optimization_barrier, default=lambda flags: flags
    )


def at_once_on_gpu(flags: Flags) -> Flags:
    """A tuple of flags; on a GPU they are in memory, as one array.

    XLA GPU makes one kernel of all the counters that read the same array. If they read
    the same scalar, each would be a kernel of its own.
    """
    return _at_once(flags) if isinstance(flags[0], Tracer) else flags


@jax.jit
def _at_once(flags: Flags) -> Flags:
    array = lax.platform_dependent(
        jnp.stack(flags),
        cpu=lambda array: array,
        tpu=lambda array: array,
        default=lax.optimization_barrier,
    )
    each = [array[i] for i in range(len(flags))]
    return jax.tree.unflatten(jax.tree.structure(flags), each)


def where(flag: Array, new: Any, old: Any) -> Array:
    """`jnp.where` for one flag and one dtype, which takes JAX less time to trace."""
    new = _to_array(new)  # a literal of the program may be a Python number
    return lax.select_n(flag, _to_array(old, new.dtype), new)


def _to_array(x: Any, dtype: Any = None) -> Array:
    if isinstance(x, Tracer) and dtype in (None, x.dtype):
        return x
    return jnp.asarray(x, dtype)


def on_cpu() -> Array:
    """True on a CPU; decided when the program is lowered."""
    return lax.platform_dependent(
        cpu=lambda: jnp.asarray(True), default=lambda: jnp.asarray(False)
    )
