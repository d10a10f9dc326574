# SPDX-License-Identifier: Apache-2.0
"""What Python objects hold: a function its closure, a partial its arguments."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any


def held_by(part: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The objects that a container or a function holds; none of any other object.

    Yields:
      The key of an object in a dict, () elsewhere, and the object.
    """
    if isinstance(part, Mapping):
        yield from (((str(key),), x) for key, x in part.items())
        return
    held: list[Any] = []
    if isinstance(part, tuple | list):
        held = [*part]
    elif isinstance(part, functools.partial):
        held = [part.func, *part.args, *part.keywords.values()]
    elif inspect.ismethod(part):
        held = [part.__func__, part.__self__]
    elif inspect.isfunction(part):
        defaults = part.__defaults__ or (), (part.__kwdefaults__ or {}).values()
        held = [*cells(part), *defaults[0], *defaults[1]]
    yield from (((), x) for x in held)


def cells(function: Any) -> list[Any]:
    """The contents of a function's closure."""
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    return held
