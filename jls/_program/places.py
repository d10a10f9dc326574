# SPDX-License-Identifier: Apache-2.0
"""Turns an equation of a program into a place in the user's source."""

import functools
import itertools
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jls._program.control import Site
from jls._program.jaxprs import (
    Line,
    Name,
    is_hi,
    jitted_function,
    lines_of,
    names_around,
    rule_of,
)

# Packages whose lines are never named, and those named only if there is no other line.
_NEVER = ("jax", "jaxlib", "jls")
_RATHER_NOT = ("optax", "flax", "equinox", "haiku")
_INSTALLED = {"site-packages", "dist-packages"}  # the folders of libraries
# Python's names for lines that are in no file.
_TYPED = ("<stdin>", "<python-input", "<ipython-input", "<command-", "<doctest ")
# Scopes that jls and JAX open themselves.
_REMATTED = "rematted_computation"
_OF_JAX = ("checkpoint", _REMATTED)
_OF_JLS = "jls_"
_JVP, _TRANSPOSE = Name("jvp", True), Name("transpose", True)
_OF_PRODUCTS = ("jls_kept", "jls_outer", "jls_float32")  # anywhere in the loss


class Place(NamedTuple):
    """A place in a program: an operation, and the line of the source that made it.

    What is not known is "", 0 or ().

    Example:
      >>> place = jls.types.Place("exp", "model.py", 12, "attention", "Attention_0")
      >>> print(place)
      exp in attention (model.py:12)
    """

    operation: str  # JAX's primitive, such as "exp" or "dot_general"
    file: str = ""  # the path of the source file
    line: int = 0
    function: str = ""  # the function that holds the line
    module: str = ""  # the names of modules and scopes around it, as in a profile
    is_backward: bool = False  # whether it belongs to a derivative
    iteration: tuple[int, ...] = ()  # of each scan or loop around it

    def __str__(self) -> str:
        if not self.file:
            return self.operation
        within = f" in {self.function}" if self.function else ""
        line = f"{Path(self.file).name}:{self.line}"
        return f"{self.operation}{within} ({line_of_cell(self) or line})"


def line_of_cell(place: Place) -> str:
    """A line of a notebook, by the number of its cell; "" if it is in a file."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    compiler = getattr(shell, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(place.file)
    return "" if number is None else f"In [{number}], line {place.line}"


def short_path(file: str) -> str:
    """A path below the working directory, or below where packages are installed."""
    path, here = Path(file), Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    _, found, package = file.rpartition("-packages/")
    return package if found else file


def place_of(site: Site) -> Place:
    """The place of an equation: the innermost line that is the user's.

    A program that is all of libraries, such as a training package that is installed,
    has a line of theirs.
    """
    lines = [x for x in _lines(site) if _rank(x) < _NOBODYS]
    line = min(lines, key=_rank, default=Line("", 0, ""))
    return Place(
        operation=site.equation.primitive.name,
        file=line.file,
        line=line.line,
        function=line.function.rpartition("<locals>.")[2],
        module=modules_of(site),
        is_backward=is_transposed(site),
    )


def modules_of(site: Site) -> str:
    """The names of modules and scopes around an equation, "" if there are none."""
    return "/".join(_modules(_names(_stack_of(site))))


def modules_in_loss(site: Site) -> str:
    """As `modules_of`, without what is around the loss: what a `keep` is searched in.

    The loss is what a `jls.autocast` is of; without one, the function that is
    differentiated.
    """
    stack = _stack_of(site)
    begin = next((i for i, scope in enumerate(stack) if _JVP in scope.transforms), 0)
    names = [x for x in _names(stack[begin:]) if x not in _OF_PRODUCTS]
    marks = [i for i, name in enumerate(names, 1) if name.startswith(_OF_JLS)]
    return "/".join(_modules(names[marks[-1] if marks else 0 :]))


def is_differentiated(site: Site) -> bool:
    """Whether an equation is of a function that is differentiated, or of its result."""
    return any(_JVP in names_around(x) for x in site.equations)


def is_transposed(site: Site) -> bool:
    """Whether an equation belongs to a transposed function: to a backward pass."""
    return any(_TRANSPOSE in names_around(x) for x in site.equations)


def is_gradient_in_loss(site: Site) -> bool:
    """Whether an equation belongs to a backward pass that is differentiated itself.

    What a backward pass computes once more is what was differentiated.
    """
    names = [name for x in site.equations for name in names_around(x)]
    if Name(_REMATTED) in names:
        names = [_JVP, *names[len(names) - names[::-1].index(Name(_REMATTED)) :]]
    pairs = enumerate(itertools.pairwise(names))
    begin = next((i for i, pair in pairs if pair == (_TRANSPOSE, _JVP)), 0)
    return _JVP in names[:begin]


def is_recomputed(site: Site) -> bool:
    """Whether a backward pass computes an equation of the forward pass once more."""
    return any(Name(_REMATTED) in names_around(x) for x in site.equations)


def is_of_custom_rule(site: Site) -> bool:
    """Whether an equation is of a `custom_vjp` or a `custom_jvp` that is not of jls."""
    return any(_is_of_custom_rule(tuple(lines_of(x))) for x in site.equations)


@functools.lru_cache(4096)
def _is_of_custom_rule(lines: Sequence[Line]) -> bool:
    for i, line in enumerate(lines):
        if line.function in ("custom_vjp.__call__", "custom_jvp.__call__"):
            callers = (_known_package(x.file) for x in lines[i:])
            if next((x for x in callers if x != "jax"), "") != "jls":
                return True
    return False


def functions_of_jax(site: Site) -> set[str]:
    """The names of JAX's functions that made an equation, such as "arccos"."""
    return {
        x.function.rpartition(".")[2]
        for x in lines_of(site.equation)
        if _known_package(x.file) == "jax"
    }


def _lines(site: Site) -> Iterator[Line]:
    """The tracebacks of an equation and of the calls around it, innermost first.

    A function that JAX or a library jits, such as `jnp.where`, is traced once for many
    calls, and its equations have the lines of the first one: those around the function
    are left out. Those inside are of a function of the user's that it calls, as
    `jnp.piecewise` and `jax.pmap` do.
    """
    for depth in range(len(site.equations), 0, -1):
        lines, around = lines_of(site.equations[depth - 1]), site.equations[: depth - 1]
        functions = [(x, *jitted_function(x)) for x in around]
        jitted = {
            (file, name) for _, file, name in functions if file and _rank_of(file)
        }
        # A wrapper that a library jits has the name of what it wraps: it is not found.
        is_nobodys = any(_is_traced_once(x, file) for x, file, _ in functions)
        yield from _inside(lines, jitted) or (() if is_nobodys else lines)


def _is_traced_once(equation: Any, file: str) -> bool:
    """Whether a call, of a function in `file`, is of JAX, or of a rule of jls."""
    package = _known_package(file)
    is_rule = is_hi(equation) and rule_of(equation) in ("jvp", "vjp")
    return package == "jax" or (package == "jls" and is_rule)


def _inside(lines: Sequence[Line], functions: Collection[Any]) -> Sequence[Line]:
    """The lines that are inside of some functions of others."""
    for i, x in enumerate(lines):
        names = x.function.split(".")  # "_piecewise.<locals>.<lambda>"
        if any((x.file, name) in functions for name in names):
            return lines[:i]
    return ()


def has_line_inside(equation: Any, function: tuple[str, str] | None) -> bool:
    """Whether an equation of a function that JAX jits has a line of others there.

    Args:
      equation: of its program.
      function: that function, as `function_of_jax` gives it; None if it is a rule.
    """
    lines = tuple(lines_of(equation))
    return _has_line_inside(lines, function)


@functools.lru_cache(4096)
def _has_line_inside(lines: Sequence[Line], function: tuple[str, str] | None) -> bool:
    inside = lines if function is None else _inside(lines, {function})
    return any(_rank(x) < _NOBODYS for x in inside)


def function_of_jax(equation: Any) -> tuple[str, str] | None:
    """File and name of the function that a call is of, if JAX itself jits it."""
    file, name = jitted_function(equation)
    return (file, name) if file and _known_package(file) == "jax" else None


# Whose a line is: the user's; of a library; of one in which others are written.
_MINE, _OF_LIBRARY, _OF_MODELS, _NOBODYS = range(4)


def _rank(line: Line) -> int:
    return _rank_of(line.file, line.function)


@functools.lru_cache(4096)
def _rank_of(file: str, function: str = "") -> int:
    if file.startswith("<"):
        # "<string>" is of `python -c`, and has the __init__ of each dataclass.
        is_typed = file == "<string>" and "__" not in function
        return _MINE if is_typed or file.startswith(_TYPED) else _NOBODYS
    package = _known_package(file)
    if package:
        return _NOBODYS if package in _NEVER else _OF_MODELS
    if not _INSTALLED.isdisjoint(Path(file).parts):
        return _OF_LIBRARY
    is_of_python = file.startswith(sysconfig.get_path("stdlib"))
    return _NOBODYS if is_of_python or not file else _MINE


@functools.lru_cache(4096)
def _known_package(file: str) -> str:
    """JAX, jls, or a library of models or optimizers; "" for any other."""
    for package in (*_NEVER, *_RATHER_NOT):
        module = sys.modules.get(package)
        init = getattr(module, "__file__", None)
        if init and Path(file).is_relative_to(Path(init).parent):
            return package
    return ""


# The names of scopes and modules.


class _Scope(NamedTuple):
    """A scope, "" after the last one, and the transformations that begin at it."""

    name: str
    transforms: tuple[Name, ...]


def _stack_of(site: Site) -> list[_Scope]:
    """The scopes around an equation, outermost first.

    JAX writes those around a checkpoint twice in its backward pass, but not in that of
    a checkpoint inside of it.
    """
    stack, is_backward, is_inside = list[_Scope](), False, False
    jvps = 1  # that a scope has by the gradient itself: 0 in a program that it calls
    for equation in site.equations:
        scopes = _scopes(names_around(equation))
        is_backward |= _TRANSPOSE in names_around(equation)
        if equation.primitive.name == "remat2" and not is_inside:
            first, second = scopes[: len(scopes) // 2], scopes[len(scopes) // 2 :]
            is_twice = is_backward and _names(first) == _names(second)
            scopes, is_inside = first if is_twice else scopes, True
        if is_backward:
            _add_once(stack, scopes, jvps)
        else:
            stack += scopes
        if _JVP in names_around(equation) and not is_hi(equation):
            jvps = 0
    return stack


def _add_once(stack: list[_Scope], scopes: Sequence[_Scope], jvps: int) -> None:
    """Adds scopes, without those that are on the stack already.

    With jax_remat3, what a checkpoint computes in the backward pass is named from the
    start of the program that it is in, again for each further `jvp`.
    """
    rest = [x for x in scopes if x.name not in _OF_JAX or x.transforms]
    while rest:
        for _ in range(jvps, rest[0].transforms.count(_JVP)):
            counts = range(min(len(stack), len(rest)), 0, -1)
            again = (n for n in counts if _same(stack[-n:], rest[:n]))
            rest = rest[next(again, 0) :]
            if not rest:
                return
        stack.append(rest.pop(0))


def _same(one: Sequence[_Scope], other: Sequence[_Scope]) -> bool:
    return [x.name for x in one] == [x.name for x in other]


@functools.lru_cache(4096)
def _scopes(names: Sequence[Name]) -> tuple[_Scope, ...]:
    found, transforms = list[_Scope](), list[Name]()
    for name in names:
        if name.is_transform:
            transforms.append(name)
        else:
            found.append(_Scope(name.text, tuple(transforms)))
            transforms = []
    return (*found, _Scope("", tuple(transforms))) if transforms else tuple(found)


def _names(scopes: Sequence[_Scope]) -> list[str]:
    return [scope.name for scope in scopes if scope.name]


def _modules(names: Sequence[str]) -> list[str]:
    """The names without those of jls and JAX."""
    return [x for x in names if x not in _OF_JAX and not x.startswith(_OF_JLS)]
