# SPDX-License-Identifier: Apache-2.0
"""Large products in float8: `autocast(fun, jnp.float8_e4m3fn)`.

Each operand is multiplied by a power of two that brings its largest magnitude to at
most 224 (e4m3fn) or 57344 (e5m2), and to more than half of that. The result is divided
by the two powers.

    forwards     both operands, in bfloat16, are rounded to e4m3fn
    backwards    the cotangent is rounded to e5m2, which has a wider range; the operands
                 are kept in e4m3fn

The powers come from the operands at that moment ("current scaling"), so there is no
state. They are exact, so another loss scale changes no bit.

If an operand has an inf or NaN in it, all of it becomes NaN: e4m3fn has no inf, and a
GPU would make its largest number of one.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from jls._autocast.product import stored
from jls._mistakes import warn
from jls._program.jaxprs import (
    Operation,
    opened,
    operation_of,
    parameter,
    size_of,
    with_dtype,
)
from jls._scopes import FLOAT8

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)
BFLOAT16 = jnp.dtype(jnp.bfloat16)
# The fewest rows, columns and terms of a sum with which float8 pays. On an H200 an MLP
# of width 2048 trains 1.13 times as fast as in bfloat16, and one of 1024 slower.
LEAST = 2048
_MULTIPLE = 16  # cuBLAS takes no others
# Two to this, times 1.75, is the largest magnitude after the multiplication: that of
# e5m2, and half of that of e4m3fn. With its highest exponent unused, e4m3fn survives
# `jax.checkpoint`, which rounds what a policy saves as if that exponent stood for inf.
_EXPONENTS = {E4M3: 7, E5M2: 15}
_MOST_EXPONENT = 100  # of a power, for operands that are almost 0


def is_large(equation: Any) -> bool:
    """Whether float8 pays for a product, by the sizes that it was traced with."""
    return is_matrix_product(equation) and all(
        n >= LEAST and n % _MULTIPLE == 0 for n in _sizes_of(equation)
    )


def is_uneven(equation: Any) -> bool:
    """Whether float8 would pay for a matrix product, if each size were padded."""
    return min(_sizes_of(equation)) >= LEAST


def _sizes_of(equation: Any) -> list[int]:
    """The rows, columns and terms of a sum of a matrix product."""
    axes, _ = parameter(equation, "dimension_numbers")
    sizes = list[int]()
    for contracted, atom in zip(axes, equation.invars[:2], strict=True):
        shape = dict(enumerate(atom.aval.shape))
        sizes.append(size_of(shape.pop(axis) for axis in contracted))
        sizes.append(size_of(shape.values()))
    return sizes


def is_matrix_product(equation: Any) -> bool:
    """Whether a product can be in float8: it has no batch dimensions."""
    if equation.primitive.name != "dot_general":
        return False
    numbers = parameter(equation, "dimension_numbers")
    return numbers is not None and not numbers[1][0]


class Quantized(NamedTuple):
    """An array in float8, and the power of two that it was multiplied by."""

    array: Array
    power: Array  # f32[], NaN if the array is not finite


def quantized(x: Array, dtype: Any = E4M3) -> Quantized:
    """Rounds an array to float8."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    # The exponent of the largest magnitude, one more if that is over 1.75 times its
    # power of two, and 127.
    above = (_bits(largest) + 0x1FFFFF) >> 23
    exponent = jnp.minimum(_EXPONENTS[dtype] + 127 - above, _MOST_EXPONENT)
    power = _number((exponent + 127) << 23)
    is_finite = largest < jnp.inf
    power = stored(lax.select(is_finite, power, lax.full_like(power, jnp.nan)))
    return Quantized(_scaled(x, power, dtype), power)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _scaled(x: Array, power: Array, dtype: Any) -> Array:
    return (x.astype(jnp.float32) * power).astype(dtype)


class Float8Product(NamedTuple):
    """A product of two bfloat16 operands, which are also given in float8.

    Its derivative takes them in float8.
    """

    forwards: Operation
    backwards: Operation

    def __call__(self, *arrays: Array) -> Array:
        left, right, *rounded = arrays
        left8, right8 = Quantized(*rounded[:2]), Quantized(*rounded[2:])
        return _product(self, (left, right), (left8, right8))


def product_of(equation: Any) -> Float8Product:
    """The product of an equation. Its result is in bfloat16."""
    precise = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return Float8Product(
        operation_of(equation, preferred_element_type=BFLOAT16),
        # Without the fast sums of a Hopper GPU, which drop bits: gradients need them.
        operation_of(equation, preferred_element_type=BFLOAT16, precision=precise),
    )


_Pair = tuple[Any, Any]
_Kept = tuple[Sequence[Quantized], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(product: Float8Product, operands: _Pair, rounded: _Pair) -> Array:
    del operands
    with jax.named_scope(FLOAT8):
        (result,) = product.forwards.bind([x.array for x in rounded])
        return _divided(result, *(x.power for x in rounded))


def _divided(x: Array, *powers: Array) -> Array:
    """Divides by two powers, whose product may be out of range."""
    one, other = (_number(0x7F000000 - _bits(x)) for x in powers)  # 1 / power
    low, high = jnp.minimum(one, other), jnp.maximum(one, other)
    return (x.astype(jnp.float32) * low * high).astype(x.dtype)


@jax.custom_vjp
def _once(source: Any) -> Array:
    """1, by which a derivative is multiplied that has none itself.

    The derivative of what is rounded would be lost, or itself be in float8.
    """
    del source
    return jnp.ones((), jnp.float32)


def _refused(_: None, cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        raise TypeError(
            "a product in float8 must not be differentiated twice. Put the autocast "
            "around the function that takes the first derivative, as in "
            "jls.autocast(lambda params: penalty(jax.grad(loss_fn)(params)), "
            "jnp.float8_e4m3fn), or write jnp.bfloat16."
        )
    return (None,)


_once.defvjp(lambda _: (jnp.ones((), jnp.float32), None), _refused, symbolic_zeros=True)


def _forwards(
    product: Float8Product, operands: _Pair, rounded: _Pair
) -> tuple[Array, Any]:
    return _product(product, operands, rounded), (rounded, _once(operands))


def _backwards(product: Float8Product, residuals: _Kept, cotangent: Array) -> Any:
    kept, once = residuals
    with jax.named_scope(FLOAT8):
        given = quantized(cotangent, E5M2)
        found = [_cotangent(product, place, given, kept) for place in range(2)]
        one = _once((once, cotangent)).astype(BFLOAT16)
        return tuple(x * one for x in found), None


def _cotangent(
    product: Float8Product, place: int, given: Quantized, kept: Sequence[Quantized]
) -> Array:
    """The cotangent of one operand.

    Args:
      product: the product.
      place: 0 for the left operand, 1 for the right one.
      given: the cotangent of the result.
      kept: the operands.
    """
    other = kept[1 - place]

    def transposed(x, given, other):
        def bound(x):
            return product.backwards.bind([x, other] if place == 0 else [other, x])

        return jax.linear_transpose(bound, x)([given])

    # Traced in bfloat16: the transpose of a float8 operand would be float8. The result
    # does not depend on the first input.
    arrays = kept[place].array, given.array, other.array
    types = [with_dtype(x, BFLOAT16) for x in arrays]
    jaxpr, consts = opened(jax.make_jaxpr(transposed)(*types))
    with jax.enable_checks(False):  # of the dtypes
        (result,) = eval_jaxpr(jaxpr, consts, *arrays)
    return _divided(result, given.power, other.power)


_product.defvjp(_forwards, _backwards)


@contextlib.contextmanager
def no_forward_mode() -> Iterator[None]:
    """Says so in words of jls, where JAX says it of a `custom_vjp`."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "a product in float8 has no forward mode, as jax.jvp, jax.jacfwd and "
            "jax.hessian ask for. Write jax.grad, or jnp.bfloat16."
        ) from error


def has_float8() -> bool:
    """Whether the chip at hand multiplies in float8, as far as JAX says."""
    device = jax.local_devices()[0]
    if device.platform == "tpu":
        return "7" in device.device_kind
    capability = str(getattr(device, "compute_capability", ""))
    major, _, minor = capability.partition(".")
    is_number = major.isdigit() and minor.isdigit()
    return is_number and (int(major), int(minor)) >= (8, 9)


@functools.cache
def warn_of_chip() -> None:
    """Warns once if the chip at hand has no float8."""
    if not has_float8():
        kind = jax.local_devices()[0].device_kind
        warn(
            f"float8 on {kind}: it has no products in float8, and computes them in a "
            "wider dtype, more slowly. Write jnp.bfloat16 here; float8 is for an H100 "
            "or later."
        )
