# SPDX-License-Identifier: Apache-2.0
"""Finds the scalers of the optimizers that a user's step refers to."""

import dis
import inspect
from collections.abc import Iterator
from typing import Any

from jls._closures import held_by
from jls._step import WrapperUpdate
from jls._types import LossScaler

# Functions of these hold the user's optimizers in closures only, not in globals.
_LIBRARY_PACKAGES = ("jax", "jls", "optax", "flax", "equinox", "haiku", "numpy")
# Bounds the search. A step with Flax, optax and jls in it holds a few hundred objects.
_MAX_OBJECTS = 2**12


def scalers_in(step: Any, arguments: Any) -> list[LossScaler]:
    """The scalers of all wrappers that a step holds, or the states among its arguments.

    It looks into closures, defaults, bound methods, the globals that the step reads,
    and the optimizers that Flax's states hold. Nothing is called.
    """
    left: list[Any] = [step, arguments]
    visited: dict[int, Any] = {}
    found: list[LossScaler] = []
    while left and len(visited) < _MAX_OBJECTS:
        part = left.pop()
        if id(part) in visited:
            continue
        visited[id(part)] = part
        if isinstance(part, WrapperUpdate):
            found.append(part.scaler)
        else:
            left += _held_by(part)
    return found


def _held_by(part: Any) -> Iterator[Any]:
    if inspect.ismodule(part) or inspect.isclass(part):
        return
    yield from (x for _, x in held_by(part))
    fields = getattr(part, "__dict__", {})  # not of an object that makes up attributes
    for name in ("tx", "__wrapped__"):  # of Flax's states, of a jitted function
        if name in fields:
            yield fields[name]
    if inspect.ismethod(part):
        yield from getattr(part.__self__, "__dict__", {}).values()
    elif inspect.isfunction(part) and _is_of_user(part):
        names = _globals_of(part.__code__)
        yield from (part.__globals__[x] for x in names if x in part.__globals__)


def _is_of_user(function: Any) -> bool:
    return (function.__module__ or "").partition(".")[0] not in _LIBRARY_PACKAGES


def _globals_of(code: Any) -> set[str]:
    """The names of globals that a function reads, or a function in it."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    inner = (x for x in code.co_consts if inspect.iscode(x))
    return names.union(*map(_globals_of, inner))
