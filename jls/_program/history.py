# SPDX-License-Identifier: Apache-2.0
"""The rules for what becomes of a gradient since it was made.

It is made where a scale is divided out of it, or by a backward pass that no scale goes
through. An inf may be lost on the way, small numbers in a cast to a narrow dtype.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jls._program.control import Site
from jls._program.facts import ANY, ZERO, Cast, Number, Operation, Value
from jls._program.jaxprs import is_inexact_atom, is_narrower, parameter
from jls._program.places import is_gradient_in_loss, is_transposed
from jls._program.products import PRODUCTS, wider_dtype


def with_history(op: Operation, value: Value, by_scale: bool) -> Value:
    """The value with its history.

    Args:
      op: the operation.
      value: its result.
      by_scale: whether an operand is computed only from the states of scalers.
    """
    if any(map(is_scaled, op.operands)):
        cleaned, scaled = _cleaned_while_scaled(op)
        value = value.replace(cleaned=cleaned, scaled=scaled)
        if value.degree != ZERO:
            return value
        is_narrow = is_narrower(op.aval.dtype, np.float32)
        narrowed = Cast(op.site, 1.0) if is_narrow and by_scale else None
        return value.replace(unscaled=op.site, narrowed=narrowed)
    if is_scaled(value):
        return value
    if is_transposed(op.site):
        return value.replace(unscaled=op.site)
    gradients = [x for x in op.operands if x.unscaled]
    if not gradients:
        return value
    return value.replace(
        unscaled=gradients[0].unscaled,
        gain=gradients[0].gain * _gain(op),
        narrowed=narrowed_by(op, gradients[0]),
        cleaned=_cleaned(op, gradients),
        scaled=next((x.scaled for x in gradients if x.scaled), None),
    )


def never_scaled_by(op: Operation, value: Value) -> Site | None:
    """The backward product in float16 behind a result of which no scale is a factor.

    What is computed once more for a backward pass leads to what is scaled there.
    """
    sites = [x.never_scaled for x in op.operands if x.never_scaled]
    if is_scaled(value):
        return next(filter(is_gradient_in_loss, sites), None)
    is_new = (
        op.name in PRODUCTS
        and value.degree == ZERO
        and wider_dtype(op.equation) == jnp.float16
        and is_transposed(op.site)
    )
    if is_new:
        sites.append(op.site)
    # One that JAX has moved out of a loop no longer says that it is in the loss.
    return next(filter(is_gradient_in_loss, sites), next(iter(sites), None))


def is_scaled(value: Value) -> bool:
    """Whether a scale is a factor of it, in any power."""
    return value.degree not in (ZERO, ANY)


def narrowed_by(op: Operation, gradient: Value) -> Cast | None:
    """The last cast of a gradient to a dtype in which small numbers vanish."""
    is_cast = op.name == "convert_element_type"
    if not (is_cast and gradient.unscaled and gradient.degree == ZERO):
        return gradient.narrowed
    old = op.equation.invars[0].aval
    loses = is_inexact_atom(old) and is_narrower(op.aval.dtype, old.dtype)
    return Cast(op.site, gradient.gain) if loses else gradient.narrowed


def _gain(op: Operation) -> float:
    """The number by which an operation multiplies; 1 if it is not known."""
    if op.name not in ("mul", "div"):
        return 1.0
    for place, operand in enumerate(op.operands):
        if isinstance(operand.known, Number) and operand.known.value:
            number = abs(float(operand.known.value))
            return 1 / number if op.name == "div" and place else number
    return 1.0


def _cleaned(op: Operation, gradients: Sequence[Value]) -> Site | None:
    """The operation that may have lost an inf of a gradient; None if it is kept."""
    row, lost = op.row, next((x.cleaned for x in gradients if x.cleaned), None)
    if row.degree in ("product", "sum"):
        # It is in the result if it is in any of them.
        return lost if all(x.cleaned for x in gradients) else None
    if row.degree == "quotient" and op.operands[0].unscaled:
        return op.operands[0].cleaned
    if op.name == "select_n" and op.operands[0].unscaled:
        # Chosen by what the gradients are: each case has to keep them.
        keeps = all(x.unscaled for x in op.data)
    elif op.name == "integer_pow":  # 1 / inf is 0
        keeps = parameter(op.equation, "y", -1) > 0
    else:
        keeps = bool(row.moves) or row.is_linear or row.keeps_inf
    return lost if keeps else lost or op.site


def _cleaned_while_scaled(op: Operation) -> tuple[Site | None, Site | None]:
    """Where an inf of a scaled value may have been lost, and what made that value.

    Only by a choice that the scaled values make themselves: what else a backward pass
    does with them, it does to all loss scales alike.
    """
    scaled = list(filter(is_scaled, op.data))
    lost = next(((x.cleaned, x.scaled) for x in scaled if x.cleaned), (None, None))
    if op.row.degree == "sum" and not all(x.cleaned for x in scaled):
        return None, None  # it is in the result if it is in any of them
    chooses = op.name == "select_n" and op.operands[0].is_of_scaled
    if chooses and scaled and len(scaled) < len(op.data) and lost == (None, None):
        return op.site, scaled[0].site
    return lost
