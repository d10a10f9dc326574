# SPDX-License-Identifier: Apache-2.0
"""What a step that may be rejected asks of its trees.

Zeros in, no update out, and a state that keeps its structure and dtypes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._tree import is_array, is_inexact, wide_dtype, widen


def widened(leaf: Any) -> Any:
    return widen(leaf) if is_inexact(leaf) else leaf


def materialized(tree: Any) -> Any:
    """`tree`, computed once: a branch needs its operands in memory.

    Without, XLA may compute them a second time for the finite check, which costs 7 %
    more bytes in a whole step on jax 0.12.
    """
    return with_arrays(tree, lax.optimization_barrier(arrays(tree)))


def no_update(leaf: Any) -> Any:
    """What leaves a parameter as it is, bit for bit."""
    if is_inexact(leaf):
        dtype = wide_dtype(jnp.result_type(leaf))
        zero = (
            complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0
        )
        return jnp.full_like(leaf, zero, dtype=dtype)
    is_number = is_array(leaf) and not jnp.issubdtype(
        jnp.result_type(leaf), jax.dtypes.extended
    )
    return jnp.zeros_like(leaf) if is_number else leaf


def zero_unless(flag: Array, tree: Any) -> Any:
    def choose(leaf):
        if not is_inexact(leaf):
            return leaf
        return jnp.where(flag, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(choose, tree)


def like(name: str, new: Any, old: Any) -> Any:
    """`new` in the dtypes of `old`, which bfloat16 moments leave on the first step."""
    leaves, structure = jax.tree.flatten(new)
    paths, old_structure = jax.tree_util.tree_flatten_with_path(old)
    if structure != old_structure:
        raise ValueError(
            f"the inner optimizer must keep the structure of its {name}, but turned "
            f"{old_structure} into {structure}. It cannot run in jax.lax.scan either."
        )

    def cast(path, leaf, reference):
        if not is_array(reference):
            return reference
        dtype, shape = jnp.result_type(reference), jnp.shape(reference)
        if jnp.shape(leaf) != shape:
            raise ValueError(
                f"the inner optimizer must keep the shapes of its {name}, but turned "
                f"{shape} into {jnp.shape(leaf)} at '{jax.tree_util.keystr(path)}'."
            )
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf).astype(dtype)

    cast_leaves = [cast(p, x, r) for x, (p, r) in zip(leaves, paths, strict=True)]
    return structure.unflatten(cast_leaves)


def arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def with_arrays(tree: Any, arrays: list[Any]) -> Any:
    """`tree` with its array leaves replaced, in order."""
    replacements = iter(arrays)
    return jax.tree.map(lambda x: next(replacements) if is_array(x) else x, tree)


def is_narrow(tree: Any) -> bool:
    """Whether any inexact leaf is narrower than float32."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree) if is_inexact(x)]
    return any(wide_dtype(dtype) != dtype for dtype in dtypes)
