# SPDX-License-Identifier: Apache-2.0
"""The gradients of a batch as those of its micro-batches, one after the other.

    drop="window"       a bad micro-batch makes the result bad, and the step is skipped
    drop="micro_batch"  it is left out, and with it what it would have carried on; the
                        mean is over the rest

Which one is left out is one decision for all devices, as is the step.

What is added are true gradients in at least float32, so that a scale which changes
between two steps harms nothing. What is left out is selected away: 0 times NaN is NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._magnitude import all_finite
from jls._tree import (
    AxisName,
    agree,
    select,
    wide_dtype,
    widen,
)


class Accumulated(NamedTuple):
    loss: Array  # of the micro-batches whose loss is finite, or of all in a window
    grads: Any  # NaN if every micro-batch is left out
    carried: Any  # what the last micro-batch that counts carried on
    overflow: Array  # bool[]  one with a finite loss is left out
    dropped: Array  # i32[]   left out


def accumulate(
    grad_fn: Callable[[Any, Any], Any],
    params: Any,
    carried: Any,
    batch: Any,
    *,
    micro_batches: int,
    accumulation: str,
    drop: str,
    axis_name: AxisName = None,
) -> Accumulated:
    """Calls `grad_fn(carried, micro_batch)` on one after the other.

    It returns `((loss, carried), grads)`, with gradients like `params`.
    """
    if micro_batches == 1:
        (loss, carried), grads = grad_fn(carried, batch)
        return Accumulated(
            widen(loss), grads, carried, jnp.zeros((), jnp.bool_), jnp.int32(0)
        )

    def body(carry, micro_batch):
        old, total = carry
        (loss, carried), grads = grad_fn(old, micro_batch)
        finite = counts = jnp.asarray(True)
        if drop == "micro_batch":
            flags = jnp.stack([jnp.isfinite(loss), all_finite(grads)])
            flags = agree(flags, axis_name)
            finite, counts = flags[0], jnp.all(flags)
            grads = select(counts, grads, jax.tree.map(jnp.zeros_like, grads))
            carried = select(counts, carried, old)
        total = jax.tree.map(jnp.add, total, grads)
        return (carried, total), (widen(loss), finite, counts)

    zeros = jax.tree.map(_zeros, params)
    (carried, grads), (losses, finite, counts) = lax.scan(
        body, (carried, zeros), _split(batch, micro_batches)
    )
    losses = jnp.where(finite, losses, 0)

    def reduce(total, counted):
        if accumulation == "mean":
            total = total / jnp.sum(counted).astype(total.real.dtype)
        # A mean over nothing, said as what skips the step.
        return jnp.where(jnp.any(counted), total, jnp.nan)

    return Accumulated(
        loss=reduce(jnp.sum(losses), finite),
        grads=jax.tree.map(lambda total: reduce(total, counts), grads),
        carried=carried,
        overflow=jnp.any(finite & ~counts),
        dropped=jnp.sum(~counts, dtype=jnp.int32),
    )


def _zeros(param: Any) -> Array:
    return jnp.zeros_like(param, dtype=wide_dtype(jnp.result_type(param)))


def _split(batch: Any, micro_batches: int) -> Any:
    """`batch` with a leading axis of micro-batches: example i is in the i mod k-th.

    Strided, so that a batch that is sharded over devices stays where it is.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)

    def split(path, leaf):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % micro_batches:
            raise ValueError(
                "micro_batches must divide the leading axis of each array of batch, "
                f"got {micro_batches} for batch{jax.tree_util.keystr(path)} of shape "
                f"{shape}. Drop or pad the last examples."
            )
        size = shape[0] // micro_batches
        strided = jnp.asarray(leaf).reshape(size, micro_batches, *shape[1:])
        return jnp.swapaxes(strided, 0, 1)

    if not leaves:
        raise ValueError("batch must hold an array to split into micro_batches.")
    return structure.unflatten([split(path, leaf) for path, leaf in leaves])
