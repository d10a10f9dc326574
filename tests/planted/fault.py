"""A fault that a test must catch."""

from typing import NamedTuple


class Fault(NamedTuple):
    """`old` of `file` becomes `new`, and one of `tests` fails."""

    name: str  # the behaviour that breaks: what to plant anew where the code has moved
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # the files or tests that must catch it, the fastest first
