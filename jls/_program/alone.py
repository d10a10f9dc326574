# SPDX-License-Identifier: Apache-2.0
"""Runs one operation of a program by itself, as it is or in float32.

In float32, what is half precision or 8 bits wide in a program is not rounded, does not
overflow and does not vanish: all of its values are known as they would be without the
narrow dtype. Operations that cannot be computed like this get narrow operands, as
before, and widen their results.

    AS_WRITTEN    each operation as the program has it
    WIDE          in float32
    BOTH          both ways beside each other, each value a `Pair`
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.control import Site, evaluate
from jls._program.jaxprs import (
    bind,
    has_side_effects,
    is_checkpoint_name,
    is_half_atom,
    is_inexact_atom,
    parameter,
    parameters,
    programs_in,
)


class Arithmetic(NamedTuple):
    """How the values of a program are held, and its operations computed."""

    held: Callable[[Any], Any]  # an argument of the program, or a number in it
    run: Callable[[Site, Sequence[Any]], list[Any]]  # an operation, of its operands


class Pair(NamedTuple):
    """A floating-point value as the program has it, and as it is in float32."""

    narrow: Any
    wide: Any


def widened(value: Any) -> Any:
    """The same numbers in float32, if they are in a narrower dtype."""
    # The numbers in a program are of a class of its own in some versions of JAX.
    return jnp.asarray(value, jnp.float32) if is_half_atom(value) else value


def run_wide(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """The results of one operation, in float32 where the program has a narrow dtype.

    Args:
      equation: the operation.
      inputs: its operands, widened.
    """
    if not rounds(equation):
        return bind(equation, inputs)
    if equation.primitive.name == "reduce_precision" or is_checkpoint_name(equation):
        return list(inputs)
    wide = _try_wide(equation, inputs)
    if wide is not None:
        return wide
    narrow = [
        jnp.asarray(x, atom.aval.dtype) if is_half_atom(atom) else x
        for atom, x in zip(equation.invars, inputs, strict=True)
    ]
    return list(map(widened, bind(equation, narrow)))


def rounds(equation: Any) -> bool:
    """Whether an operation has a narrow dtype, or rounds as if it had."""
    is_narrow = any(map(is_half_atom, (*equation.invars, *equation.outvars)))
    return is_narrow or equation.primitive.name == "reduce_precision"


def _try_wide(equation: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """As `run_wide`, with float32 in the operation's parameters; None if that fails."""
    params = {name: _wide_dtype(x) for name, x in parameters(equation).items()}
    if programs_in(equation):  # they are in the narrow dtype
        update = parameter(equation, "update_jaxpr")  # of a scatter
        if update is None:
            return None
        params["update_jaxpr"] = _wide_program(update)
    try:
        results = bind(equation, inputs, **params)
    except Exception:
        return None
    is_same = all(
        x.shape == atom.aval.shape and x.dtype == _wide_dtype(atom.aval.dtype)
        for x, atom in zip(results, equation.outvars, strict=True)
    )
    return results if is_same else None


def _wide_program(jaxpr: Any) -> Any:
    """A program without constants, such as the sum of two numbers, in float32."""

    def run(*operands):
        return evaluate(jaxpr, operands, WIDE.held, WIDE.run)

    avals = (x.aval for x in jaxpr.invars)
    shapes = [jax.ShapeDtypeStruct(x.shape, _wide_dtype(x.dtype)) for x in avals]
    return jax.make_jaxpr(run)(*shapes).jaxpr


def _wide_dtype(value: Any) -> Any:
    """float32 for a narrow dtype, anything else as it is."""
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    if is_dtype and is_half_atom(jax.ShapeDtypeStruct((), value)):
        return np.dtype(np.float32)
    return value


def _run_both(site: Site, inputs: Sequence[Any]) -> list[Any]:
    """The results of one operation both ways.

    What is no floating-point number, such as a flag or an index, is that of the program
    as it is. So both ways take the same branches, and differ only by rounding.
    """
    equation = site.equation
    narrow = [x.narrow if isinstance(x, Pair) else x for x in inputs]
    results = bind(equation, narrow)
    atoms = equation.outvars
    if not any(map(is_inexact_atom, atoms)):
        return results
    pairs = [x for x in inputs if isinstance(x, Pair)]
    is_same = all(x.narrow is x.wide for x in pairs)
    is_once = has_side_effects(equation)
    if is_once or (is_same and not rounds(equation)):
        others = list(map(widened, results))
    else:
        wide = [x.wide if isinstance(x, Pair) else x for x in inputs]
        others = run_wide(equation, wide)
    return [
        Pair(one, other) if is_inexact_atom(atom) else one
        for one, other, atom in zip(results, others, atoms, strict=True)
    ]


AS_WRITTEN = Arithmetic(lambda value: value, lambda site, x: bind(site.equation, x))
WIDE = Arithmetic(widened, lambda site, x: run_wide(site.equation, x))
BOTH = Arithmetic(lambda x: Pair(x, widened(x)) if is_inexact_atom(x) else x, _run_both)
