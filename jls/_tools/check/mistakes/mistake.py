# SPDX-License-Identifier: Apache-2.0
"""One mistake that `jls.check_step` looks for."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jls._program.control import Site
from jls._program.places import Place, place_of
from jls._tools.check.codes import Code
from jls._tools.check.faults import Faults, Trying
from jls._tools.check.findings import Found
from jls._tools.check.good_steps import Good
from jls._tools.check.program import Library
from jls._tools.check.subject import Subject


def place_of_update(site: Site) -> Place:
    return place_of(site)._replace(operation="update", module="")


def _nothing(_: Any) -> Found:
    yield from ()


class Mistake(NamedTuple):
    """One code: its words, and how it is found.

    The questions at the end are asked in their order, each of all mistakes before the
    next one.
    """

    code: Code
    right: str  # what holds in a right step
    write: str  # the line to write
    # Another line for a library, for NNX with the arguments in braces; what goes before
    # the line if a wrapper of optax is around jls's.
    write_with: Mapping[Library | type, str] = {}
    write_after: str = ""  # what goes after the line
    # What it is not tried without: the program, or also the update of each wrapper.
    needs: Literal["", "program", "updates"] = ""
    # Whether a run is enough to call it broken: only a program says what is an average,
    # noise or a buffer.
    is_sure_unread: bool = True
    # What the program shows, or that this step cannot have it.
    read: Callable[[Subject], Found] = _nothing
    of_good_steps: Callable[[Good], Found] = _nothing
    of_faults: Callable[[Faults], Trying[None]] = _nothing
