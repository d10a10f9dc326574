# SPDX-License-Identifier: Apache-2.0
"""The matrix products and convolutions of a program, and what each multiplies."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jls._program.control import Site, live
from jls._program.frames import Frame
from jls._program.jaxprs import has_side_effects, parameter, size_of
from jls._program.primitives import TABLE

PRODUCTS = frozenset(name for name, row in TABLE.items() if row.is_product)


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
    multiplications: those of the others are 0. `shard_map` counts one device. What
    `jax.checkpoint` computes again counts again. A product counts only if its own
    program uses the result.
    """
    found, jaxpr = [], frame.jaxpr
    acts = [i for i, x in enumerate(jaxpr.eqns) if has_side_effects(x)]
    for index in live(jaxpr, jaxpr.outvars, keep=acts):
        equation = jaxpr.eqns[index]
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
    """How many multiplications one product takes; 1 for each result if unknown."""
    left, *_ = equation.invars
    size = size_of(equation.outvars[0].aval.shape)
    if equation.primitive.name == "dot_general":
        axes = _contracted(equation)
        return size * size_of(left.aval.shape[axis] for axis in axes or ())
    if equation.primitive.name == "conv_general_dilated":
        found = _of_convolution(equation)
        return size if found is None else found
    numbers = parameter(equation, "ragged_dot_dimension_numbers")
    if numbers is None:
        return size
    (axes, _), _ = numbers.dot_dimension_numbers
    count = size * size_of(left.aval.shape[axis] for axis in axes)
    if set(numbers.lhs_ragged_dimensions) & set(axes):  # each row is in one group
        count = count // max(1, equation.invars[2].aval.shape[-1])
    return count


def _contracted(equation: Any) -> Sequence[int] | None:
    """The axes of the left operand of a dot that are summed."""
    numbers = parameter(equation, "dimension_numbers")
    return None if numbers is None else numbers[0][0]


_OF_WINDOWS = ("window_strides", "lhs_dilation", "padding", "rhs_dilation")


def _of_convolution(equation: Any) -> int | None:
    """The multiplications of a convolution, without those of padding.

    Nor are the zeros between the elements of a dilated operand multiplied.
    """
    numbers = parameter(equation, "dimension_numbers")
    windows = [parameter(equation, name) for name in _OF_WINDOWS]
    if numbers is None or None in windows:
        return None
    left, right, result = (
        [size_of([n]) for n in atom.aval.shape]
        for atom in (*equation.invars[:2], *equation.outvars)
    )
    of_left, of_right, of_result = numbers
    batch, features, *axes = (result[axis] for axis in of_result)
    count = batch * features * right[of_right[1]]
    for i, outputs in enumerate(axes):
        stride, dilation, padding, hole = (x[i] for x in windows)
        reach, window = outputs * stride, right[of_right[2 + i]] * hole
        # How many elements of the windows of all results are in each place: the window
        # of a result begins at its place, and goes on in steps of `hole`.
        begun = np.zeros((-(-(reach + window) // hole), hole), int)
        begun.reshape(-1)[:reach:stride] += 1
        begun.reshape(-1)[window : window + reach : stride] -= 1
        elements = begun.cumsum(0).reshape(-1)
        at = np.arange(left[of_left[2 + i]]) * dilation + size_of(padding[:1])
        count *= int(elements[at[(at >= 0) & (at < len(elements))]].sum())
    return count


def asks_for_precision(equation: Any) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = parameter(equation, "precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(one not in (None, lax.Precision.DEFAULT) for one in asked)


def is_inner(equation: Any) -> bool:
    """Whether each operand is summed over all axes but those of the batch."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batch = parameter(equation, "dimension_numbers", ((), ()))
    return bool(contracted) and all(
        len(one) + len(other) == len(atom.aval.shape)
        for one, other, atom in zip(contracted, batch, equation.invars[:2], strict=True)
    )


def is_outer(equation: Any) -> bool:
    """Whether nothing is summed: positions times frequencies, for one."""
    if equation.primitive.name != "dot_general":
        return False
    axes, shape = _contracted(equation), equation.invars[0].aval.shape
    return axes is not None and all(shape[axis] == 1 for axis in axes)
