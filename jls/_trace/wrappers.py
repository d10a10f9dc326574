# SPDX-License-Identifier: Apache-2.0
"""The scalers of the optimizers that a user's step holds."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jls._nnx import is_optimizer
from jls._step import WrapperUpdate
from jls._types import LossScaler

# Their own functions hold no optimizer of the user's but in closures.
_LIBRARIES = ("jax", "jls", "optax", "flax", "equinox", "haiku", "numpy")
_MOST = 2**12  # a step that holds more is not searched to its end


def scalers_in(step: Callable[..., Any], args: tuple[Any, ...]) -> list[LossScaler]:
    """The scalers of all wrappers that a step holds, or the states among its arguments.

    It looks into closures, into what the step calls by name, and into the optimizers of
    Flax's states. Nothing is called.
    """
    held = [getattr(x, "tx", None) for x in args if _holds_optimizer(x)]
    left: list[Any] = [step, *held]
    seen: dict[int, Any] = {}
    found: list[LossScaler] = []
    while left and len(seen) < _MOST:
        part = left.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, WrapperUpdate):
            found.append(part.scaler)
        else:
            left += _held_by(part)
    return found


def _holds_optimizer(argument: Any) -> bool:
    return is_optimizer(argument) or hasattr(argument, "apply_gradients")


def _held_by(part: Any) -> Iterator[Any]:
    if isinstance(part, tuple | list):
        yield from part
    elif isinstance(part, functools.partial):
        yield from (part.func, *part.args, *part.keywords.values())
    elif inspect.ismethod(part):
        yield from (part.__func__, part.__self__)
    elif inspect.isfunction(part):
        yield from _cells(part)
        if (part.__module__ or "").partition(".")[0] not in _LIBRARIES:
            names = part.__code__.co_names
            yield from (part.__globals__[x] for x in names if x in part.__globals__)
    wrapped = getattr(part, "__wrapped__", None)  # of a jitted function
    if wrapped is not None:
        yield wrapped


def _cells(function: Any) -> Iterator[Any]:
    """What the closure of a function holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
