# SPDX-License-Identifier: Apache-2.0
"""Accumulates the gradients of micro-batches, one after the other.

    drop="step"         a bad micro-batch makes the result bad, and the step is skipped
    drop="micro_batch"  it is left out with the model state that it returned; the mean
                        is over the others

All devices leave out the same ones, as they skip the same steps.

The gradients are true ones in at least float32, so a scale that changes between two
steps does no harm. A micro-batch is left out by a select, since 0 times NaN is NaN.
Each micro-batch gets keys of its own, so that no two drop the same units.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._devices import AxisName, agree
from jls._mistakes import warn
from jls._nnx import is_object
from jls._reduce import all_finite
from jls._text import join, listed, path_name
from jls._tree import is_array, is_key, select, wide_dtype, widen

Accumulation = Literal["mean", "sum"]
Drop = Literal["step", "micro_batch"]


class Accumulated(NamedTuple):
    loss: Array  # f32[]  with drop="micro_batch", of those whose loss is finite
    grads: Any  # NaN if every micro-batch is left out
    carried: Any  # of the last micro-batch that counts
    aux: Any  # of each micro-batch, stacked; with one, its own
    # bool[]  whether a micro-batch with a finite loss was left out
    partial_overflow: Array
    dropped: Array  # i32[]  micro-batches left out


def accumulate(
    grad_fn: Callable[[Any, Any], Any],
    params: Any,
    carried: Any,
    batch: Any,
    *,
    micro_batches: int,
    accumulation: Accumulation,
    drop: Drop,
    axis_name: AxisName = None,
) -> Accumulated:
    """Calls `grad_fn(carried, (number, batch))` on each and adds up the gradients.

    The number, `i32[]`, is None if the batch is not split.
    `grad_fn` returns `((loss, (carried, aux)), grads)`, with gradients like `params`.
    """
    if micro_batches == 1:
        (loss, (carried, aux)), grads = grad_fn(carried, (None, batch))
        false, zero = jnp.zeros((), jnp.bool_), jnp.zeros((), jnp.int32)
        return Accumulated(widen(loss), grads, carried, aux, false, zero)

    def body(carry, micro_batch):
        old, total = carry
        (loss, (carried, aux)), grads = grad_fn(old, micro_batch)
        finite = is_kept = jnp.asarray(True)
        if drop == "micro_batch":
            flags = jnp.stack([jnp.isfinite(loss), all_finite(grads)])
            flags = agree(flags, axis_name)
            finite, is_kept = flags[0], jnp.all(flags)
            grads = select(is_kept, grads, jax.tree.map(jnp.zeros_like, grads))
            carried = select(is_kept, carried, old)
        total = jax.tree.map(jnp.add, total, grads)
        return (carried, total), (widen(loss), finite, is_kept, aux)

    zeros = jax.tree.map(
        lambda x: jnp.zeros_like(x, dtype=wide_dtype(jnp.result_type(x))), params
    )
    numbers = jnp.arange(micro_batches)
    parts = numbers, _split(batch, micro_batches)
    with _axes_named(batch):
        (carried, grads), (losses, finite, is_kept, aux) = lax.scan(
            body, (carried, zeros), parts
        )
    losses = jnp.where(finite, losses, 0)

    def reduce(total, counted):
        if accumulation == "mean":
            total = total / jnp.sum(counted).astype(total.real.dtype)
        # Nothing is left: NaN, so that the step is skipped.
        return jnp.where(jnp.any(counted), total, jnp.nan)

    return Accumulated(
        loss=reduce(jnp.sum(losses), finite),
        grads=jax.tree.map(lambda total: reduce(total, is_kept), grads),
        carried=carried,
        aux=aux,
        partial_overflow=jnp.any(finite & ~is_kept),
        dropped=jnp.sum(~is_kept, dtype=jnp.int32),
    )


def keys_for(number: Array | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`, with the number of the micro-batch folded into each typed PRNG key.

    A raw key cannot be told from numbers, so it stays, with a warning.
    """
    if number is None:
        return kwargs

    for name, leaf in keys_in(kwargs).items():
        if not is_key(leaf):
            warn(
                f"{name} is a raw PRNG key, uint32{list(leaf.shape)}: each micro-batch "
                "gets the same one, and drops the same units. Pass a typed key, "
                "jax.random.key(seed) or jax.random.wrap_key_data(key), into which the "
                "step folds the number of the micro-batch."
            )

    def fold(leaf):
        if not is_key(leaf):
            return leaf
        keys = leaf.reshape(-1)
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        return folded.reshape(leaf.shape)

    folded = {name: value for name, value in kwargs.items() if _has_keys(value)}
    return kwargs | jax.tree.map(fold, folded, is_leaf=is_object)


def keys_in(values: dict[str, Any]) -> dict[str, Any]:
    """The PRNG keys in `values` by name: the typed, and what seems to be a raw one."""
    found = {name: value for name, value in values.items() if _has_keys(value)}
    flat, _ = jax.tree_util.tree_flatten_with_path(found, is_leaf=is_object)
    leaves = {path_name(path): leaf for path, leaf in flat}
    return {
        name: leaf
        for name, leaf in leaves.items()
        if is_key(leaf) or (_is_raw_key(leaf) and _may_be_key(name))
    }


def _may_be_key(name: str) -> bool:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return bool(words & {"key", "keys", "rng", "rngs"})


def _has_keys(value: Any) -> bool:
    """Whether `value` holds something like a PRNG key."""
    try:
        leaves = jax.tree.leaves(value, is_leaf=is_object)
    except ValueError:  # keys of a dict that have no order
        return False
    return any(is_key(leaf) or _is_raw_key(leaf) for leaf in leaves)


def _is_raw_key(leaf: Any) -> bool:
    is_uint32 = is_array(leaf) and jnp.result_type(leaf) == jnp.uint32
    return is_uint32 and jnp.shape(leaf)[-1:] in ((2,), (4,))


@contextlib.contextmanager
def _axes_named(batch: Any) -> Iterator[None]:
    """Adds to an error which axes were split, if they are not of one size."""
    try:
        yield
    except Exception as error:
        leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
        names = {jnp.shape(x)[0]: join("batch", path_name(path)) for path, x in leaves}
        if len(names) > 1:
            sizes = listed([f"{size} ({name})" for size, name in names.items()])
            error.add_note(
                "micro_batches splits the leading axis of each array of batch, and "
                f"they differ: {sizes}. Put the examples in the first axis of all."
            )
        raise


def _split(batch: Any, micro_batches: int) -> Any:
    """`batch` with a leading axis of k micro-batches: example i is in number i mod k.

    Strided, so that a batch that is sharded over devices stays where it is.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)

    def split(path, leaf):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % micro_batches:
            raise ValueError(
                "micro_batches must divide the leading axis of each array of batch, "
                f"got {micro_batches} for {join('batch', path_name(path))} of shape "
                f"{shape}. Drop or pad the last examples."
            )
        size = shape[0] // micro_batches
        strided = jnp.asarray(leaf).reshape(size, micro_batches, *shape[1:])
        return jnp.swapaxes(strided, 0, 1)

    if not leaves:
        raise ValueError("batch must hold an array to split into micro_batches.")
    return structure.unflatten([split(path, leaf) for path, leaf in leaves])
