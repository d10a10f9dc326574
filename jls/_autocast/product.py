# SPDX-License-Identifier: Apache-2.0
"""A product in half precision, with float32 operands and a float32 result.

This is all that `jls.autocast` means. In bfloat16, with `round` for a rounding to it:

    product(x, w)    round(round(x) @ round(w)), summed in float32
    its tangent      product(dx, w) + product(x, dw), added in float32
    its transposes   product(ct, w.T), product(x.T, ct)

So a cotangent is rounded where a product takes it, after all that reach a value were
added. What a product gave is one number for all who read it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.dtypes import float0

from jls._program.jaxprs import Operation

_STORED = "jls_stored"


def stored(array: Any) -> Any:
    """An array that the derivative of what is `checkpointed` keeps."""
    return checkpoint_name(array, _STORED) if isinstance(array, Array) else array


def checkpointed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`; its derivative keeps what is `stored`, and computes the rest again.

    XLA may merge both, where it sees both. There are two checkpoints: the outer one
    would make 0 of what it keeps and is subnormal in float16.
    """
    policies = jax.checkpoint_policies
    names = policies.save_only_these_names(_STORED)
    policy = policies.save_from_both_policies(names, _is_choice)
    again = partial(jax.checkpoint, policy=policy, prevent_cse=False)
    return again(again(fun))


def _is_choice(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether the last bit may decide: what is computed again may differ in it."""
    dtypes = [x.dtype for x in operands if hasattr(x, "dtype")]
    if not any(jnp.issubdtype(x, jnp.inexact) for x in dtypes):
        return False
    if primitive.name == "convert_element_type":
        return not jnp.issubdtype(params["new_dtype"], jnp.inexact)
    return primitive.name in _CHOICES


_CHOICES = ("eq", "ge", "gt", "is_finite", "le", "lt", "ne")


def narrow(array: Any, dtype: Any) -> Array:
    """Rounds a float32 array to half. Its cotangent is rounded as `wide` does."""
    return lax.convert_element_type(_rounded(array, dtype), dtype)


def wide(array: Array) -> Array:
    """The same numbers in float32. Its cotangent is rounded as `narrow` does."""
    return _rounded(lax.convert_element_type(array, jnp.float32), array.dtype)


def _rounded(array: Any, dtype: Any) -> Array:
    """A float32 array with the digits of `dtype`.

    XLA takes a cast and its way back for nothing, and may do so for one reader of a
    value alone; this it does not leave out. It has the exponents of float32, since it
    would make 0 of what is subnormal in float16: that is left to the cast, which rounds
    it once more.
    """
    return lax.reduce_precision(array, 8, int(jnp.finfo(dtype).nmant))


@jax.custom_jvp
def _taken(half: Any, array: Any) -> Any:
    """`half`, which is `array` rounded to half, differentiated as its rounding."""
    del array
    return half


@_taken.defjvp
def _tangent_of_taken(primals: Any, tangents: Any) -> Any:
    half, array = primals
    return _taken(half, array), narrow(tangents[1], half.dtype)


class Product(NamedTuple):
    """A product in half, as a function of its operands.

    Attributes:
      operation: of operands in half, with a result in half.
      dtype: the half precision.
      is_rounded: of each operand, whether it is float32. Others are taken as they are.
      is_stored: whether the result is `stored`.
      line: of the program; products of other lines are traced apart.
    """

    operation: Operation
    dtype: Any
    is_rounded: tuple[bool, ...]
    is_stored: bool
    line: Any

    def __call__(self, operands: Sequence[Any], halves: Sequence[Any]) -> list[Array]:
        """The result in float32, and in half, which has no derivative.

        Args:
          operands: arrays.
          halves: operands that are in half already; None for others.
        """
        return _product(self, list(operands), list(halves))

    def in_rule(self, operands: Sequence[Any], halves: Sequence[Any]) -> list[Array]:
        """The same in a rule, which nothing differentiates; what is stored is seen."""
        return self.results(self.rounded(operands, halves))

    def results(self, given: Sequence[Any]) -> list[Array]:
        """The results, of operands as the product takes them."""
        (result,) = self.operation.bind(given)
        result = stored(result) if self.is_stored else result
        return [wide(result), result]

    def rounded(self, operands: Sequence[Any], halves: Sequence[Any]) -> list[Any]:
        """The operands, each as the product takes it."""
        given = list(operands)
        for i, (array, half) in enumerate(zip(operands, halves, strict=True)):
            if half is not None:
                given[i] = _taken(half, array)
            elif self.is_rounded[i]:
                given[i] = narrow(array, self.dtype)
        return given


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(product: Product, operands: list[Any], halves: list[Any]) -> list[Array]:
    return product.in_rule(operands, halves)


@partial(_product.defjvp, symbolic_zeros=True)
def _tangent_of_product(product: Product, primals: Any, tangents: Any) -> Any:
    operands, halves = primals
    given = product.rounded(operands, halves)  # once: XLA may see two as two
    result, half = product.results(given)
    parts = list[Array]()
    for i, tangent in enumerate(tangents[0]):
        if isinstance(tangent, SymbolicZero) or tangent.dtype == float0:
            continue
        if product.is_rounded[i]:
            tangent = narrow(tangent, product.dtype)
        (part,) = product.operation.bind([*given[:i], tangent, *given[i + 1 :]])
        parts.append(wide(part))
    whole = sum(parts[1:], parts[0]) if parts else lax.full_like(result, 0)
    return [result, half], [whole, SymbolicZero(jax.typeof(half))]
