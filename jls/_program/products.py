# SPDX-License-Identifier: Apache-2.0
"""The matrix products and convolutions of a program, and what each multiplies."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax import lax

from jls._program.control import Site
from jls._program.frames import Frame
from jls._program.jaxprs import parameter, size_of
from jls._program.primitives import TABLE

PRODUCTS = frozenset(name for name, row in TABLE.items() if row.cast == "product")


class Product(NamedTuple):
    """A product in a program, with all its calls."""

    site: Site
    multiplications: int

    @property
    def equation(self) -> Any:
        return self.site.equation

    @property
    def dtype(self) -> Any:
        return wider_dtype(self.equation)


def products_in(frame: Frame) -> list[Product]:
    """The products of a program and of all that it calls, in its order.

    A scan multiplies by its length; a `while` counts as one iteration, without its
    condition; of the branches of `cond` only one counts, that with the most
    multiplications: those of the others are 0. `shard_map` counts one device.
    """
    found = []
    for index, equation in enumerate(frame.jaxpr.eqns):
        called = frame.called(index)
        if called:
            found += _of_calls(called)
        elif equation.primitive.name in PRODUCTS:
            found.append(Product(frame.site_of(index), multiplications(equation)))
    return found


def _of_calls(called: list[Frame]) -> list[Product]:
    each = [products_in(frame) for frame in called]
    largest = max(range(len(each)), key=lambda i: _weight(each[i]))
    return [
        product._replace(multiplications=product.multiplications * times)
        for i, frame in enumerate(called)
        for times in [int(i == largest) * (frame.length if frame.kind == "scan" else 1)]
        for product in each[i]
    ]


def _weight(products: Iterable[Product]) -> tuple[int, int]:
    """The multiplications of a branch; of two with as many the narrower one counts."""
    counts = [(x.multiplications, x.dtype.itemsize) for x in products]
    return sum(n for n, _ in counts), -sum(n * size for n, size in counts)


def wider_dtype(equation: Any) -> Any:
    """The wider dtype of the two operands of a product."""
    dtypes = (atom.aval.dtype for atom in equation.invars[:2])
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def multiplications(equation: Any) -> int:
    """How many multiplications one product takes."""
    left, right = equation.invars[:2]
    size = size_of(equation.outvars[0].aval.shape)
    if equation.primitive.name == "dot_general":
        (axes, _), _ = parameter(equation, "dimension_numbers")
        return size * size_of(left.aval.shape[axis] for axis in axes)
    if equation.primitive.name == "conv_general_dilated":
        features = parameter(equation, "dimension_numbers").rhs_spec[0]
        window = size_of(x for i, x in enumerate(right.aval.shape) if i != features)
        # The zeros between the elements of a dilated operand are not multiplied.
        return size * window // math.prod(parameter(equation, "lhs_dilation", ()))
    numbers = parameter(equation, "ragged_dot_dimension_numbers")
    (axes, _), _ = numbers.dot_dimension_numbers
    summed = size_of(left.aval.shape[axis] for axis in axes)
    if set(numbers.lhs_ragged_dimensions) & set(axes):  # each row is in one group
        summed = summed // max(1, equation.invars[2].aval.shape[-1])
    return size * summed


def asks_for_precision(equation: Any) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = parameter(equation, "precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(one not in (None, lax.Precision.DEFAULT) for one in asked)


def is_inner(equation: Any) -> bool:
    """Whether each operand is summed over all axes but those of the batch."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batch = parameter(equation, "dimension_numbers")
    return all(
        len(one) + len(other) == len(atom.aval.shape)
        for one, other, atom in zip(contracted, batch, equation.invars[:2], strict=True)
    )


def is_outer(equation: Any) -> bool:
    """Whether nothing is summed: positions times frequencies, for one."""
    if equation.primitive.name != "dot_general":
        return False
    (axes, _), _ = parameter(equation, "dimension_numbers")
    shape = equation.invars[0].aval.shape
    return all(shape[axis] == 1 for axis in axes)
