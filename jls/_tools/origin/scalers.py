# SPDX-License-Identifier: Apache-2.0
"""Finds the scalers of the optimizers that a user's step refers to."""

import contextlib
import dis
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

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
    if isinstance(part, Mapping):
        yield from part.values()
    elif isinstance(part, tuple | list):
        yield from part
    elif isinstance(part, functools.partial):
        yield from (part.func, *part.args, *part.keywords.values())
    fields = getattr(part, "__dict__", {})  # not of an object that makes up attributes
    for name in ("tx", "__wrapped__"):  # of Flax's states, of a jitted function
        if name in fields:
            yield fields[name]
    if inspect.ismethod(part):
        yield from (part.__func__, part.__self__)
        yield from getattr(part.__self__, "__dict__", {}).values()
    if not inspect.isfunction(part):
        return
    yield from (*_cells(part), *(part.__defaults__ or ()))
    yield from (part.__kwdefaults__ or {}).values()
    if (part.__module__ or "").partition(".")[0] not in _LIBRARY_PACKAGES:
        names = _globals_of(part.__code__)
        yield from (part.__globals__[x] for x in names if x in part.__globals__)


def _cells(function: Any) -> Iterator[Any]:
    """The contents of a function's closure."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not set yet
            yield cell.cell_contents


def _globals_of(code: Any) -> set[str]:
    """The names of globals that a function reads, or a function in it."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    inner = (x for x in code.co_consts if inspect.iscode(x))
    return names.union(*map(_globals_of, inner))
