"""A fault that a test must catch, and the code that it is planted in.

It is found by the name of a function and by a statement there, as `ast.unparse` writes
it: what moves to another module, or is laid out anew, keeps its faults. (Pythons differ
in the quotes inside of an f-string.)
"""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """`old` in the code of `where` becomes `new`, and one of `tests` fails."""

    name: str  # the behaviour that breaks: what to plant anew in other code
    where: str  # a function, `Class.method`, class, constant or module
    old: str
    new: str
    tests: tuple[str, ...]  # the files or tests that must catch it, the fastest first


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """What has a name: a module, class, function or constant."""

    file: str
    name: str  # with its module in front
    node: ast.stmt | ast.Module

    @functools.cached_property
    def text(self) -> str:
        return ast.unparse(self.node)


def read(text: str) -> list[Fault]:
    """The faults of a file, which are divided by empty lines, after its title.

    `where: name` comes first. Lines with - are `old`, lines with + are `new`, as in a
    diff, and the others are tests.
    """
    return [_read_one(*block.splitlines()) for block in text.split("\n\n")[1:]]


def _read_one(head: str, *lines: str) -> Fault:
    where, _, name = head.partition(": ")
    old, new = (
        "\n".join(line[2:] for line in lines if line.startswith(mark)) for mark in "-+"
    )
    tests = tuple(line for line in lines if not line.startswith(("-", "+")))
    return Fault(name, where, old, new, tests)


def find(fault: Fault, root: Path) -> Definition:
    """The one definition whose name ends with `where` and that has `old`, once."""
    last = fault.where.rpartition(".")[2]
    named = [
        one
        for one in definitions(root).get(last, [])
        if f".{one.name}".endswith(f".{fault.where}")
    ]
    counts = [one.text.count(fault.old) for one in named]
    if sum(counts) != 1:
        names = [one.name for one in named]
        raise ValueError(f"{names} must have this once, not {counts}: {fault}")
    return named[counts.index(1)]


@functools.cache
def definitions(root: Path) -> dict[str, list[Definition]]:
    """Those of the package, by the last part of their names."""
    found: dict[str, list[Definition]] = {}
    for path in sorted(root.glob("jls/**/*.py")):
        file = path.relative_to(root).as_posix()
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, node in [(module, tree), *_inside(tree, module)]:
            one = Definition(file, name, node)
            found.setdefault(name.rpartition(".")[2], []).append(one)
    return found


def _inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=own) | ast.ClassDef(name=own):
                yield f"{name}.{own}", child
                yield from _inside(child, f"{name}.{own}")
            case (
                ast.Assign(targets=[ast.Name(id=own)])
                | ast.AnnAssign(target=ast.Name(id=own))
            ) if not isinstance(node, ast.FunctionDef):
                yield f"{name}.{own}", child
            case ast.stmt() | ast.ExceptHandler():
                yield from _inside(child, name)


def planted(fault: Fault, text: str, definition: Definition) -> str:
    """The text of the file with the fault in it. Other definitions stay as they are."""
    node = definition.node
    new = ast.parse(definition.text.replace(fault.old, fault.new))
    if isinstance(node, ast.Module):
        return ast.unparse(new) + "\n"
    # Inside of other blocks, so that `unparse` indents it, but not the docstring.
    depth = node.col_offset // 4
    for _ in range(depth):
        new = ast.Module([ast.If(ast.Constant(True), new.body, [])], [])
    code = "\n".join(ast.unparse(new).splitlines()[depth:]).lstrip("\n")
    first = min(x.lineno for x in [node, *getattr(node, "decorator_list", [])])
    lines = text.splitlines()
    return "\n".join([*lines[: first - 1], code, *lines[node.end_lineno :], ""])
