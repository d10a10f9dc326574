# SPDX-License-Identifier: Apache-2.0
"""What a step that may be rejected asks of its trees.

Ones in, no update out, and a state that keeps its structure and dtypes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._tree import floats, is_array, is_inexact, wide_dtype, widen


def no_updates(updates: Any, params: Any) -> Any:
    """What leaves `params` as they are: -0.0, in the widest dtype of either tree."""
    same = jax.tree.structure(params) == jax.tree.structure(updates)
    return jax.tree.map(_no_update, updates, params if same else updates)


def _no_update(update: Any, param: Any) -> Any:
    if is_inexact(update):
        leaves = [leaf for leaf in (update, param) if is_inexact(leaf)]
        # numpy's rule: the one of JAX refuses under strict promotion.
        dtype = np.result_type(*(wide_dtype(jnp.result_type(leaf)) for leaf in leaves))
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        zero = complex(-0.0, -0.0) if is_complex else -0.0
        return jnp.full_like(update, zero, dtype=dtype)
    is_number = is_array(update) and not jnp.issubdtype(
        jnp.result_type(update), jax.dtypes.extended
    )
    return jnp.zeros_like(update) if is_number else update


def has_nan(tree: Any) -> Array:
    """Whether a floating-point leaf holds a NaN.

    Of a state no more is asked: some optimizers keep an inf on purpose, as the best
    value so far.
    """
    flags = [jnp.any(jnp.isnan(widen(leaf))) for leaf in floats(tree)]
    return jnp.any(jnp.stack(flags)) if flags else jnp.asarray(False)


def ones_unless(flag: Array, tree: Any) -> Any:
    """`tree`, with ones for inexact leaves unless `flag`: zeros might be divided by."""

    def choose(leaf):
        # A finite Python number stays one: the inner optimizer may branch on it.
        if not is_inexact(leaf) or (isinstance(leaf, float) and math.isfinite(leaf)):
            return leaf
        return jnp.where(flag, leaf, jnp.ones_like(leaf))

    return jax.tree.map(choose, tree)


def like(name: str, new: Any, old: Any) -> Any:
    """`new` in the dtypes of `old`, which bfloat16 moments leave on the first step."""
    leaves, structure = jax.tree.flatten(new)
    paths, old_structure = jax.tree_util.tree_flatten_with_path(old)
    if structure != old_structure:
        raise ValueError(
            f"{name} must keep its structure, but turned {old_structure} into "
            f"{structure}."
        )

    def cast(path, leaf, reference):
        if not is_array(reference):
            return reference
        shape, dtype = jnp.shape(reference), jnp.result_type(reference)
        new_shape, new_dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if (new_shape, _kind(new_dtype)) != (shape, _kind(dtype)):
            raise ValueError(
                f"{name} must keep its shapes and kinds of numbers, but turned "
                f"{dtype}{list(shape)} into {new_dtype}{list(new_shape)} at "
                f"'{jax.tree_util.keystr(path)}'."
            )
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        return leaf if is_key else jnp.asarray(leaf).astype(dtype)

    cast_leaves = [cast(p, x, r) for x, (p, r) in zip(leaves, paths, strict=True)]
    return structure.unflatten(cast_leaves)


def _kind(dtype: Any) -> Any:
    """Dtypes of one kind may be cast into each other; real and complex are one."""
    kinds = (jnp.bool_, jnp.integer, jnp.inexact)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)


def arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def with_arrays(tree: Any, arrays: list[Any]) -> Any:
    """`tree` with its array leaves replaced, in order."""
    replacements = iter(arrays)
    return jax.tree.map(lambda x: next(replacements) if is_array(x) else x, tree)


def is_narrow(tree: Any) -> bool:
    """Whether any inexact leaf is narrower than float32."""
    dtypes = [jnp.result_type(leaf) for leaf in floats(tree)]
    return any(wide_dtype(dtype) != dtype for dtype in dtypes)
