# SPDX-License-Identifier: Apache-2.0
"""Numbers in the static parts of arguments: for another one JAX compiles anew.

They are fields of a dataclass that are no pytrees, attributes of an NNX module, and
Python numbers among the leaves, which `equinox.filter_jit` takes for static.
"""

from typing import Any

from jls._nnx import is_object, is_variable, nnx
from jls._tools.reading.arguments import Keys
from jls._tree import one_level

_NUMBERS = (bool, int, float, complex, str)
Numbers = dict[Keys, Any]  # by path


def numbers_in(tree: Any, path: Keys = ()) -> Numbers:
    """The numbers and texts in the static parts of a tree."""
    if is_object(tree):
        return _numbers_in_object(tree, path)
    if type(tree) in _NUMBERS:
        return {path: tree}
    (children, _), found = one_level(tree), {}
    for name, value in getattr(tree, "__dict__", {}).items():
        if name not in children and type(value) in _NUMBERS:
            found[(*path, name)] = value
    for name, child in children.items():
        found |= numbers_in(child, (*path, name))
    return found


def _numbers_in_object(tree: Any, path: Keys) -> Numbers:
    found = {}
    for inner, node in nnx().iter_graph(tree):
        if is_variable(node) or not is_object(node):
            continue
        for name, value in vars(node).items():
            if type(value) in _NUMBERS and not name.startswith("_pytree__"):
                found[(*path, *map(str, inner), name)] = value
    return found


def subtree(tree: Any, path: Keys) -> Any:
    """The part of a tree at a path."""
    for name in path:
        tree = one_level(tree)[0][name]
    return tree
