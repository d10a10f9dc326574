# SPDX-License-Identifier: Apache-2.0
"""One level of a tree by name, for walks that have to say where they are."""

from typing import Any

import jax
import jax.numpy as jnp

from jls._tree import is_array


def branches(node: Any) -> tuple[dict[str, Any], Any]:
    """The children of `node` by name, and the structure that holds them.

    Of a leaf, which `is_leaf` tells: itself, under the name "".
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in flat]
    return dict(zip(names, [child for _, child in flat], strict=True)), structure


def is_leaf(structure: Any) -> bool:
    return structure == jax.tree.structure(0)


def described(node: Any) -> str:
    """What a message says of a node: its type and names, or dtype and shape."""
    if is_array(node):
        dtype = getattr(node, "dtype", f"a Python {type(node).__name__}")
        return f"{dtype} of shape {jnp.shape(node)}"
    children, structure = branches(node)
    if node is None:
        return "None"
    if is_leaf(structure):
        return f"a {type(node).__name__}"
    return f"{type(node).__name__}({listed(list(children))})"


def listed(names: list[str]) -> str:
    """The names, or as many as a message can hold."""
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more])


def at(path: tuple[str, ...]) -> str:
    return f"at '{'/'.join(path)}'" if path else "at the root"
