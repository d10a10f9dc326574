# SPDX-License-Identifier: Apache-2.0
"""Numbers in the static parts of arguments: JAX compiles once more for another one.

They are fields of a dataclass that are no pytrees, attributes of an NNX module, and
Python numbers among the leaves, which `equinox.filter_jit` takes for static.
"""

from typing import Any

import jax

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


def static_roots(
    given: dict[str, Any], result: Any, known: dict[str, Keys]
) -> dict[str, Keys]:
    """Where arguments with only numbers, such as a dict of rates, come back.

    Args:
      given: the arguments by name, in order.
      result: of the step.
      known: where other arguments come back.
    """
    outputs, found = one_level(result)[0], dict[str, Keys]()
    free = {key: x for key, x in outputs.items() if (key,) not in known.values()}
    for i, (name, value) in enumerate(given.items()):
        numbers = numbers_in(value)
        has_arrays = any(hasattr(x, "dtype") for x in jax.tree.leaves(value))
        if name in known or not numbers or has_arrays:
            continue
        same = [
            key
            for key, x in free.items()
            if type(x) is type(value) and numbers_in(x).keys() == numbers.keys()
        ]
        if type(value) in _NUMBERS:  # only where all before it came back in order
            before = enumerate(list(given)[:i])
            is_next = all((known | found).get(x) == (str(j),) for j, x in before)
            same = [key for key in same if is_next and key == str(i)]
        if len(same) == 1:
            found[name] = (same[0],)
    return found


def subtree(tree: Any, path: Keys) -> Any:
    """The part of a tree at a path."""
    for name in path:
        tree = one_level(tree)[0][name]
    return tree
