# SPDX-License-Identifier: Apache-2.0
"""Turns an equation of a program into a place in the user's source."""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jls._program.jaxprs import called_program, opened
from jls._program.walk import Site

# Packages whose lines nobody can mend; jax and jls are never named.
_NEVER = ("jax", "jaxlib", "jls")
_RATHER_NOT = ("optax", "flax", "equinox", "haiku")


class Place(NamedTuple):
    """A place in a program: an operation, and the line of the source that made it.

    What is not known is "", 0 or ().

    Example:
      >>> place = jls.types.Place("exp", "model.py", 12, "attention", "Attention_0")
      >>> print(place)
      exp in attention (model.py:12), module Attention_0
    """

    operation: str  # JAX's primitive, such as "exp" or "dot_general"
    file: str = ""  # the path of the source file
    line: int = 0
    function: str = ""  # the function that holds the line
    module: str = ""  # the names of modules and scopes around it, as in a profile
    is_backward: bool = False  # whether it belongs to a derivative
    iteration: tuple[int, ...] = ()  # of each scan or loop around it

    def __str__(self) -> str:
        text = self.operation
        if self.file:
            within = f" in {self.function}" if self.function else ""
            text += f"{within} ({os.path.basename(self.file)}:{self.line})"
        if self.module:
            text += f", module {self.module}"
        return text


class Frame(NamedTuple):
    """A line of a traceback."""

    file: str
    line: int
    function: str


def place_of(site: Site) -> Place:
    """The place of an equation: the innermost line that is the user's.

    Where a function of JAX is called twice, its equations have the lines of the first
    call: then the line of the call itself counts.
    """
    stack = scopes_of(site)
    found = (None, None)
    for depth in range(len(site.equations), 0, -1):
        if any(map(_is_of_jax, site.equations[: depth - 1])):
            continue
        mine, others = _lines(site.equations[depth - 1])
        found = found[0] or mine, found[1] or others
        if found[0]:
            break
    frame = found[0] or found[1] or Frame("", 0, "")
    return Place(
        operation=site.equation.primitive.name,
        file=frame.file,
        line=frame.line,
        function=frame.function.split(".<locals>.")[-1],
        module="/".join(_modules(stack)),
        is_backward=any("transpose(" in name for name in stack),
    )


def scopes_of(site: Site) -> list[str]:
    """The names of scopes around an equation, outermost first.

    Transformations are in them, such as "transpose(jvp(Dense_0))".
    """
    found: list[str] = []
    for equation in site.equations:
        stack = str(getattr(equation.source_info, "name_stack", ""))
        found += [name for name in _split(stack) if name]
    return found


@functools.lru_cache(4096)
def _split(stack: str) -> tuple[str, ...]:
    """The parts of a stack of names: a "/" within brackets parts nothing."""
    return tuple(re.findall(r"(?:[^/()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+", stack))


_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|rematted_computation)\((.*)\)$")


def _modules(stack: Sequence[str]) -> list[str]:
    """The names without transformations, and without those of jls."""
    found = []
    for name in stack:
        while match := _TRANSFORMED.match(name):
            name = match[1]
        found += [part for part in name.split("/") if part and not part.startswith("jls")]
    return found


def _is_of_jax(equation: Any) -> bool:
    """Whether a call is of a function of JAX itself, such as `jnp.where`."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    program = called_program(equation)
    info = program is not None and opened(program).jaxpr.debug_info
    where = str(getattr(info, "func_src_info", "")) if info else ""
    file = where.rpartition(" at ")[2].rpartition(":")[0]
    return bool(file) and _package_of(file) == "jax"


def _lines(equation: Any) -> tuple[Frame | None, Frame | None]:
    """The innermost line of the user's, and the innermost that is not of JAX or jls."""
    rather_not = None
    for frame in _frames(equation):
        package = _package_of(frame.file)
        if package in _NEVER:
            continue
        if package not in _RATHER_NOT:
            return frame, rather_not
        rather_not = rather_not or frame
    return None, rather_not


def _frames(equation: Any) -> list[Frame]:
    """The traceback of an equation, innermost first; empty if there is none."""
    traceback = getattr(equation.source_info, "traceback", None)
    try:
        return [
            Frame(x.file_name, x.line_num, x.function_name) for x in traceback.frames
        ]
    except AttributeError:
        return []


@functools.lru_cache(4096)
def _package_of(file: str) -> str:
    """The package that a file belongs to, "" for the user's own."""
    parts = re.split(r"[\\/]", file)
    for package in (*_NEVER, *_RATHER_NOT):
        if _directory(package) and file.startswith(_directory(package)):
            return package
    return "python" if "<frozen" in parts[0] else ""


@functools.cache
def _directory(package: str) -> str:
    """Where a package is, "" if it is not imported."""
    import sys

    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    return os.path.dirname(file) + os.sep if file else ""
