"""The code blocks of Markdown files, for the tests that run them."""

import linecache
import re
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    title: str  # of the section it is in
    language: str
    code: str
    start: int  # where it is in the text
    end: int


def blocks(text):
    """All fenced blocks with a language, in order."""
    return [
        Block(
            re.findall(r"^#+ (.*)$", BLOCK.sub("", text[: match.start()]), re.M)[-1],
            match[1],
            match[2],
            *match.span(),
        )
        for match in BLOCK.finditer(text)
    ]


def execute(code, name, names):
    """Runs `code`, which tracebacks call `name`, in the namespace `names`; these.

    Its lines are found as those of a notebook's cell are.
    """
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    exec(compile(code, name, "exec"), names)
    return names
