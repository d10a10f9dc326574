# SPDX-License-Identifier: Apache-2.0
"""The derivative of picking one element of each row: a label's logarithm in a loss.

JAX writes zeros of the size of all rows, in float32, and scatters into them. For the
logits of a language model they are the largest array of a step. Here they are made
where they are read: the cotangent at the picked place, 0 elsewhere. The numbers are the
same to the bit, and until then `jax.checkpoint` keeps only the indices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jls._autocast.shared import call_shared
from jls._program.jaxprs import (
    Operation,
    checkpointed,
    is_float32,
    operation_of,
    parameter,
    size_of,
    traced_as,
)

_DROPS = (
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def is_pick(equation: Any) -> bool:
    """Whether an equation takes one element of each row, along the last axis."""
    if equation.primitive.name != "gather" or not is_float32(equation.outvars[0]):
        return False
    numbers = parameter(equation, "dimension_numbers")
    shape, indices = (x.aval.shape for x in equation.invars)
    rows = tuple(range(len(shape) - 1))
    return (
        isinstance(numbers, lax.GatherDimensionNumbers)
        and numbers.operand_batching_dims == rows
        and numbers.start_indices_batching_dims == rows
        and numbers.collapsed_slice_dims == numbers.start_index_map == (len(rows),)
        and not numbers.offset_dims
        and size_of(indices) == size_of(shape[:-1])
        and parameter(equation, "mode") in _DROPS
    )


def bind_pick(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of such an equation with other operands."""
    with traced_as(equation):
        return [call_shared(_picked, operands, operation_of(equation))]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _picked(operation: Operation, rows: Any, indices: Any) -> Any:
    return operation.bind([rows, indices])[0]


@_picked.defjvp
def _tangent_of_picked(operation, primals, tangents):
    picked = _picked(operation, *primals)
    tangent = _selected(tangents[0], primals[1])
    return picked, lax.reshape(tangent, picked.shape)


@checkpointed
def _selected(rows: Any, indices: Any) -> Any:
    """As sums of rows of zeros with the picked elements; its transpose has no sum."""
    last = rows.ndim - 1
    places = lax.broadcasted_iota(jnp.int32, rows.shape, last)
    indices = lax.reshape(indices, rows.shape[:-1]).astype(jnp.int32)
    is_picked = lax.broadcast_in_dim(indices, rows.shape, range(last)) == places
    return jnp.sum(lax.select(is_picked, rows, lax.full_like(rows, 0)), axis=last)
