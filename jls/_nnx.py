# SPDX-License-Identifier: Apache-2.0
"""All that jls knows of Flax NNX.

An NNX program keeps each array in a `Variable`, and changes model and optimizer in
place. So jls reads the variables into plain pytrees, computes with those, and writes
them back. Flax is imported only where its objects are handled; until then they are
recognized by what they have.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax

# Recognize.


def is_variable(node: Any) -> bool:
    """Whether `node` is an `nnx.Variable`."""
    # Of the type: an nnx.Rngs itself has every attribute.
    return hasattr(type(node), "get_value")


def has_variables(tree: Any) -> bool:
    """Whether `tree` is, or contains, something of NNX: a module or an `nnx.State`."""
    return any(map(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def is_model(tree: Any) -> bool:
    """Whether `tree` are `nnx.Module`s, not an `nnx.State` of what is trained."""
    return has_variables(tree) and not hasattr(tree, "to_pure_dict")


def is_optimizer(node: Any) -> bool:
    """Whether `node` is an `nnx.Optimizer`."""
    return hasattr(node, "wrt") and hasattr(type(node), "update")


def is_object(node: Any) -> bool:
    """Whether `node` is anything of NNX that a step may change in place."""
    nnx = sys.modules.get("flax.nnx")  # without Flax there is none
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable)


def objects_in(tree: Any) -> list[Any]:
    """The NNX objects among the leaves of `tree`."""
    return list(filter(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def modules_in(tree: Any) -> list[Any]:
    """The NNX models in `tree`; an `nnx.State` of one is none."""
    return [node for node in objects_in(tree) if not is_variable(node)]


def is_module_or_optimizer(node: Any) -> bool:
    """Whether `node` is an NNX object that carries a run from step to step."""
    return is_object(node) and isinstance(node, nnx().Module | nnx().Optimizer)


# Read and write.


def read_variables(tree: Any) -> Any:
    """`tree` with the value of each `nnx.Variable` in its place."""
    return jax.tree.map(
        lambda node: node.get_value() if is_variable(node) else node,
        tree,
        is_leaf=is_variable,
    )


def unbox(part: Any) -> Any:
    """The leaf in a variable, or in what Orbax makes of one."""
    is_box = isinstance(part, Mapping) and set(part) == {"value"}
    return part["value"] if is_box else read_variables(part)


def split_model(model: Any, *optimizers: Any) -> tuple[Any, Any, Any]:
    """Structure, trained variables and other variables of a model.

    Args:
      model: an `nnx.Module`, or a pytree of them.
      *optimizers: the first `nnx.Optimizer` among them says what is trained; without
        one it is `nnx.Param`.
    """
    trained = [one.wrt for one in optimizers if is_optimizer(one)]
    return nnx().split(model, *(trained or [nnx().Param])[:1], ...)


def split_objects(model: Any, optimizer: Any, objects: Any) -> tuple[Any, Any, Any]:
    """Structure, trained variables and other variables of a model and of `objects`.

    As one graph, so that what they share stays shared. The optimizer trains variables
    of the model alone, which are those of `nnx.state(model, optimizer.wrt)`.
    """
    is_wanted = nnx().filterlib.to_predicate(optimizer.wrt)

    def is_trained(path, variable):
        return path[0] == 0 and is_wanted(path[1:], variable)

    structure, trained, others = nnx().split((model, objects), is_trained, ...)
    return structure, trained.get(0, trained), others


def merge_objects(structure: Any, trained: Any, others: Any) -> tuple[Any, Any]:
    """A new model and new objects of what `split_objects` returned."""
    return nnx().merge(structure, nnx().State({0: trained}), others)


def update_objects(model: Any, objects: Any, trained: Any, others: Any) -> None:
    """Writes variables of `split_objects` back."""
    nnx().update((model, objects), nnx().State({0: trained}), others)


def variables_in(*trees: Any) -> list[Any]:
    """The variables in NNX objects, or in what an optimizer keeps; each once."""
    found = [x for _, x in nnx().iter_graph(trees) if is_variable(x)]
    return list({id(variable): variable for variable in found}.values())


def trained_variables(optimizer: Any, model: Any) -> list[Any]:
    """The variables of `model` that `optimizer` trains; without one `nnx.Param`."""
    wrt = optimizer.wrt if is_optimizer(optimizer) else nnx().Param
    is_wanted = nnx().filterlib.to_predicate(wrt)
    graph = nnx().iter_graph(model)
    return [x for path, x in graph if is_variable(x) and is_wanted(path, x)]


def nnx() -> Any:
    """The module `flax.nnx`."""
    from flax import nnx

    return nnx
