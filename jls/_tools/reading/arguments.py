# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step as a flat list of leaves, and back; NNX objects too.

Every run of `jls.check_step` gets arguments of its own, since the step may change NNX
objects and dicts in place.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jls import _validate
from jls._nnx import is_module_or_optimizer, is_object, is_optimizer, is_variable, nnx
from jls._text import join
from jls._tree import is_concrete
from jls._types import BadBatch, StepReport

Keys = tuple[str, ...]
# The `variable_type` of a leaf of a `jls.types.StepReport`, and of one in its `aux`.
REPORT, AUX = "StepReport", "StepReport.aux"


class Item(NamedTuple):
    """A leaf of the arguments or of the results of a step."""

    path: Keys  # of an argument: its name comes first
    value: Any
    variable_type: str  # of its nnx.Variable, REPORT, AUX, or ""

    @property
    def name(self) -> str:
        return join(*self.path)


class Arguments(NamedTuple):
    """The arguments of a step, taken apart."""

    names: list[str]  # of the positional ones
    items: list[Item]
    leaves: list[Any]  # their values
    rebuild: Callable[[Sequence[Any]], "BoundArguments"]
    in_place: frozenset[str]  # names of the arguments that the step changes in place


class BoundArguments(NamedTuple):
    """Arguments that are ready for one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: Callable[[], list[Item]]  # the leaves in the NNX objects by now


def open_call(
    tool: str,
    function: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], Arguments]:
    """A user's function, its arguments, and these taken apart.

    Args:
      tool: which was called.
      function: what the user calls the function, for messages.
      fun: the function; objects that are bound to it become its first arguments.
      args: its arguments.
      kwargs: its keyword arguments.
    """
    check_takes(tool, fun, args, kwargs)
    fun, bound = unbind(fun)
    args = (*bound, *args)
    arguments = take_apart(fun, args, kwargs)
    check_usable(arguments, tool, function)
    return fun, args, arguments


def check_takes(
    tool: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    written: str = "",
) -> None:
    """Raises if `fun`, `written` so in a call, does not take these arguments."""
    if hasattr(inspect.unwrap(fun), "__signature__"):
        return  # a step of jls says itself what it takes
    signature = _validate.signature_of(fun)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fun, "__name__", "fun")
        every = signature.parameters.values()
        names = ", ".join(
            [written or name, *(x.name for x in every if x.default is x.empty)]
        )
        raise TypeError(
            f"{tool} calls {name} with the arguments after it: {error}. Write "
            f"{tool}({names})."
        ) from None


def take_apart(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Arguments:
    """The leaves of the arguments by path, and a function that makes new arguments."""
    names, tree = _argument_names(step, args), (args, dict(kwargs))
    for name, given in [*zip(names, args, strict=True), *kwargs.items()]:
        if isinstance(given, Iterator):
            raise TypeError(
                f"{name} must be a batch, got {type(given).__name__}, which makes "
                f"them. Pass one: next({name})."
            )
    every, structure = nodes_by_path(
        tree, names, lambda node: is_object(node) or isinstance(node, BadBatch)
    )
    for path, leaf in every:
        if isinstance(leaf, BadBatch):  # what `jls.requeue` keeps of a batch
            raise TypeError(
                f"{join(*path)} must be a batch, got a BadBatch, which has one beside "
                "its index and reason. Pass queue.bad[0].batch."
            )
    nodes = [(path, leaf, is_object(leaf)) for path, leaf in every]
    plain = [Item(path, leaf, "") for path, leaf, is_one in nodes if not is_one]
    of_nnx = [(path, leaf) for path, leaf, is_one in nodes if is_one]
    prefixes, objects = [path for path, _ in of_nnx], [leaf for _, leaf in of_nnx]
    graph, state, variables = _split_nnx(objects, prefixes)
    state_structure = jax.tree.structure(state)

    def rebuild(leaves: Sequence[Any]) -> BoundArguments:
        new_state = jax.tree.unflatten(state_structure, list(leaves[len(plain) :]))
        new = nnx().merge(graph, new_state) if objects else []
        values, clones = iter(leaves[: len(plain)]), iter(new)
        whole = [next(clones if is_one else values) for *_, is_one in nodes]
        new_args, new_kwargs = jax.tree.unflatten(structure, whole)

        def read() -> list[Item]:
            items = _split_nnx(new, prefixes)[2]
            return [x for x in items if not _is_donated(x.value)]

        return BoundArguments(new_args, new_kwargs, read)

    in_place = frozenset(path[0] for path, x in of_nnx if is_module_or_optimizer(x))
    items = plain + variables
    return Arguments(names, items, [x.value for x in items], rebuild, in_place)


def _is_donated(leaf: Any) -> bool:
    return is_concrete(leaf) and leaf.is_deleted()


def check_usable(arguments: Arguments, tool: str, function: str) -> None:
    """Raises if an array among the arguments cannot be copied."""
    for path, leaf, _ in arguments.items:
        name = join(*path)
        if isinstance(leaf, Tracer):
            raise _validate.TracedError(
                f"{name} must be concrete, got a traced array: call {tool} outside "
                f"jit, with the {function} and its arguments."
            )
        if _is_donated(leaf):
            raise ValueError(
                f"{name} was donated to an earlier {function}, and is no more. Pass "
                f"what that {function} returned."
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{name} must be held by this process, got a global array over "
                f"several. Call {tool} with process-local arrays, such as the "
                f"{function} of a small model on jax.local_devices()."
            )


def items_of(tree: Any) -> list[Item]:
    """The leaves of a step's results, by path."""

    def is_end(node: Any) -> bool:
        return is_object(node) or isinstance(node, StepReport)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_end)
    items = []
    for path, leaf in flat:
        if is_object(leaf):
            items += _split_nnx([leaf], [tokens(path)])[2]
        elif isinstance(leaf, StepReport):
            inner, _ = jax.tree_util.tree_flatten_with_path(leaf)
            for more, x in inner:
                kind = AUX if tokens(more)[0] == "aux" else REPORT
                items.append(Item(tokens((*path, *more)), x, kind))
        else:
            items.append(Item(tokens(path), leaf, ""))
    return items


def unbind(step: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step without the NNX objects that `nnx.cached_partial` bound, and these.

    It would change them, and they are the caller's.
    """
    if isinstance(step, functools.partial) and not step.keywords:
        return step.func, step.args
    inner = getattr(step, "__wrapped__", None)
    if inner is not None and inspect.isfunction(step):
        bound = inspect.getclosurevars(step).nonlocals.get("cached_args")
        if isinstance(bound, tuple) and any(
            map(is_object, jax.tree.leaves(bound, is_leaf=is_object))
        ):
            return inner, bound
    return step, ()


def _argument_names(step: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """The names of the positional arguments, by the signature or their types."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    unnamed = [_role_of(x) for x in args[len(named) :]]
    if unnamed[1:] and all(unnamed[:-1]) and not unnamed[-1]:
        unnamed[-1] = "batch"
    names = [*named[: len(args)], *unnamed]
    is_unique = len(set(names)) == len(names)
    return [
        name if name and is_unique else f"argument {i}" for i, name in enumerate(names)
    ]


def _role_of(argument: Any) -> str:
    """The usual name of an argument that carries a run, by its type; "" for others."""
    if is_module_or_optimizer(argument):
        return "optimizer" if is_optimizer(argument) else "model"
    return "state" if hasattr(argument, "apply_gradients") else ""


def nodes_by_path(
    given: tuple[tuple[Any, ...], dict[str, Any]],
    names: Sequence[str],
    is_end: Callable[[Any], bool],
) -> tuple[list[tuple[Keys, Any]], Any]:
    """The nodes of arguments with their paths, and the structure.

    Args:
      given: the arguments, and the keyword arguments.
      names: of the positional ones.
      is_end: whether a node is not taken apart.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_end)
    found = []
    for (_, first, *inner), node in flat:
        key = getattr(first, "key", None)
        name = names[first.idx] if key is None else str(key)
        found.append(((name, *tokens(inner)), node))
    return found, structure


def tokens(path: Any) -> Keys:
    """The keys of a path of JAX, as text."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


# NNX, if the program uses it.


def _split_nnx(objects: list[Any], prefixes: list[Keys]) -> tuple[Any, Any, list[Item]]:
    """The graph and the state of NNX objects together, and the leaves of that state."""
    if not objects:
        return None, None, []
    graph, state = nnx().split(objects)
    flat, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
    items = []
    for path, node in flat:
        variable_type = type(node).__name__ if is_variable(node) else ""
        index, *inner = path
        place = (*prefixes[index.key], *tokens(inner))
        items += [Item(place, leaf, variable_type) for leaf in jax.tree.leaves(node)]
    return graph, state, items
