# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a loss function, which show when a step calls it."""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._mistakes import warn
from jls._nnx import is_object, nnx
from jls._text import listed, quoted
from jls._train.parts import Order
from jls._tree import is_array


@contextlib.contextmanager
def other_order_named(
    loss_fn: Callable[..., Any],
    order: Order,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterator[None]:
    """Raises the right error if the block fails for the order of `loss_fn`.

    It is tried: `loss_fn` fails in the order of the step, and runs in another one.
    """
    try:
        yield
    except Exception as error:
        given = {
            name: arg
            for name, arg in zip(order.names, args, strict=True)
            if name not in ("opt_state", "optimizer")
        }
        first, *others = itertools.permutations(given)
        if _runs(loss_fn, [given[name] for name in first], kwargs):
            raise
        for names in others:
            if _runs(loss_fn, [given[name] for name in names], kwargs):
                raise TypeError(
                    f"loss_fn is called as loss_fn({', '.join(first)}), got one that "
                    f"takes ({', '.join(names)}). Write def loss_fn({', '.join(first)})"
                    ", in this order."
                ) from error
        raise


def _runs(loss_fn: Callable[..., Any], args: list[Any], kwargs: Any) -> bool:
    """Whether `loss_fn` returns a loss for these arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = jax.eval_shape(lambda: loss_fn(*map(_own, args), **kwargs))
    except Exception:
        return False
    loss: Any = result[0] if isinstance(result, tuple) and result else result
    dtype = getattr(loss, "dtype", None)
    is_real = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_real and jnp.shape(loss) == ()


def _own(arg: Any) -> Any:
    """A model of NNX as one that the trace around may change."""
    if not is_object(arg):
        return arg
    graph, state = nnx().split(arg)
    leaves, structure = jax.tree.flatten(state)  # variables of its own
    return nnx().merge(graph, jax.tree.unflatten(structure, leaves))


def warn_of_no_gradient(loss_fn: Callable[..., Any], model: Any) -> None:
    """Warns that the loss does not depend on the model, and says what it closes over.

    `model` is what `loss_fn` was given: a model, its parameters, or a state.
    """
    like = _models_closed_over(loss_fn, model)
    write = "Compute it from the first argument of loss_fn."
    if like:
        write = f"loss_fn closes over {like}: compute it from its first argument."
    warn(
        "the loss does not depend on the parameters, or only behind "
        f"jax.lax.stop_gradient: all gradients are 0. {write}"
    )


@contextlib.contextmanager
def model_closed_over_named(loss_fn: Callable[..., Any], model: Any) -> Iterator[None]:
    """Adds to an error of NNX that `loss_fn` changes a model from around the step."""
    try:
        yield
    except Exception as error:
        like = _models_closed_over(loss_fn, model)
        if like and type(error).__name__ == "TraceContextError":
            error.add_note(
                f"loss_fn closes over {like}. Compute with its first argument; pass "
                "another model by keyword: step(model, optimizer, batch, "
                "teacher=teacher)."
            )
        raise


def warn_of_state_in_aux(loss_fn: Callable[..., Any], aux: Any) -> None:
    """Warns of a new state of the model that only reaches the report.

    It has the paths, shapes and dtypes of arrays that `loss_fn` closes over, which it
    then reads in each step anew.
    """
    if not jax.tree.leaves(aux):
        return
    parts = [aux, *aux] if isinstance(aux, tuple) else [aux]
    for name, value in _closed_over(loss_fn).items():
        if any(_has_shapes_of(part, value) for part in parts):
            warn(
                f"loss_fn closes over {name!r}, and returns its next value as aux, "
                "which only reaches the report: each step begins with the first one. "
                "Pass carried=True, def loss_fn(params, carried, batch), and return "
                "(loss, carried)."
            )


def _closed_over(fun: Any) -> dict[str, Any]:
    """What a function of the user's reads from around it, by name."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    with contextlib.suppress(TypeError, ValueError):  # no function, or an empty cell
        found = inspect.getclosurevars(inspect.unwrap(fun))
        return {**found.globals, **found.nonlocals}
    return {}


def _models_closed_over(loss_fn: Callable[..., Any], model: Any) -> str:
    """The names of what may be the model from around the step; "" without one."""
    around = _closed_over(loss_fn).items()
    return listed(quoted(name for name, x in around if _is_like(x, model)))


def _is_like(value: Any, model: Any) -> bool:
    """Whether it may be the model, from around the step."""
    if type(value) is not type(model) or is_array(model):
        return False
    return not isinstance(model, _TREES) or _has_shapes_of(value, model, least=0)


_TREES = Mapping, list, tuple


def _has_shapes_of(value: Any, other: Any, least: int = 1) -> bool:
    """Whether two trees of arrays have the same paths, shapes and dtypes.

    At least one array has `least` axes: numbers of any two functions are alike.
    """
    if not isinstance(other, _TREES):
        return False
    pairs = [jax.tree.flatten(x) for x in (value, other)]
    (ours, structure), (theirs, other_structure) = pairs
    if not theirs or structure != other_structure:
        return False
    arrays = jax.Array | np.ndarray
    if not all(isinstance(x, arrays) for x in (*ours, *theirs)):
        return False
    are_equal = all(
        (x.shape, x.dtype) == (y.shape, y.dtype)
        for x, y in zip(ours, theirs, strict=True)
    )
    return are_equal and max(x.ndim for x in theirs) >= least
