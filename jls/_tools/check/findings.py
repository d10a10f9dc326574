# SPDX-License-Identifier: Apache-2.0
"""The findings of `jls.check_step`, by code."""

from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

from jls._program.places import Place
from jls._tools.check.codes import CODES, Code

Status = Literal["right", "broken", "not tried", "does not apply"]


class Finding(NamedTuple):
    """What is found of one code."""

    status: Status
    text: str  # the evidence if broken, a note if right, else the reason
    place: Place | None = None
    write: str = ""  # the line to write, if it is not that of the code
    ends: str = ""  # why no other code is tried, if it is so


class StepError(ValueError):
    """This step cannot be tried.

    Args:
      reason: why, for a row of the table.
      more: what to write.
    """

    def __init__(self, reason: str, more: str) -> None:
        super().__init__(f"{reason}. {more}")
        self.reason = reason


class Note(NamedTuple):
    """A line on what is no mistake."""

    text: str = ""
    # What may be meant, but trains nothing or wrongly if it is not: the headline says
    # it.
    doubt: str = ""


Found = Generator[Finding | Note, Any, None]


def broken(
    evidence: str, place: Place | None = None, write: str = "", ends: str = ""
) -> Finding:
    return Finding("broken", evidence, place, write, ends)


def right(note: str = "") -> Finding:
    return Finding("right", note)


def untried(reason: str) -> Finding:
    return Finding("not tried", reason)


def away(reason: str) -> Finding:
    return Finding("does not apply", reason)


# These count, whatever comes before, but a mistake that was found stays found. Of the
# rest the first one counts.
_STRONG: tuple[Status, ...] = ("broken", "does not apply")


class Findings:
    """The findings so far."""

    def __init__(self) -> None:
        # By code; and arrays without a fault, by name.
        self._found: dict[str, Finding] = {}
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.ends = ""  # why nothing more is tried

    def take(self, code: str, found: Sequence[Finding | Note]) -> None:
        for x in found:
            if isinstance(x, Note):
                self.notes += [x.text] if x.text else []
                self.doubts += [x.doubt] if x.doubt else []
                continue
            self.ends = self.ends or x.ends
            old = self.status(code)
            if old is None or (x.status in _STRONG and old != "broken"):
                self._found[code] = x

    def status(self, code: str) -> Status | None:
        found = self._found.get(code)
        return found.status if found else None

    def mark_others_not_tried(self, reason: str) -> None:
        for code in CODES:
            self._found.setdefault(code, untried(reason))

    @property
    def untried(self) -> dict[str, str]:
        """The codes that were not tried, and the others, and the reasons."""
        names = dict.fromkeys([*CODES, *self._found])
        return {x: self._found[x].text for x in names if self.status(x) == "not tried"}

    def of(self, status: Status) -> dict[Code, Finding]:
        """The findings of one kind, in the order of the codes."""
        return {
            code: self._found[code] for code in CODES if self.status(code) == status
        }
