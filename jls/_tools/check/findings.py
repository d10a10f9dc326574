# SPDX-License-Identifier: Apache-2.0
"""The findings of `jls.check_step` so far, by code."""

from typing import Literal, NamedTuple

from jls._program.places import Place
from jls._tools.check.codes import CODES, Code
from jls._tools.reading.updates import SeenValue

# A run may show these of a right step: only a program says what is an average, noise
# or a buffer.
DOUBTFUL: tuple[Code, ...] = ("overflow hidden", "nan committed", "not atomic")


class Mix(NamedTuple):
    """What may make the gradients depend on the loss scale: only numbers tell.

    It is a sum of what the scale is a factor of, and of what it is not, which is a leak
    or part of a solve; or an operation without a rule.
    """

    evidence: str
    place: Place
    given: list[SeenValue]  # what a wrapper is given, and it goes into
    is_sum: bool


Status = Literal["right", "broken", "not tried", "does not apply"]


class Finding(NamedTuple):
    """The status of one code."""

    status: Status
    text: str  # the evidence if broken, a note if right, else the reason
    place: Place | None = None
    write: str = ""  # the line to write, if it is not that of the code


class Findings:
    """The findings, by code. A mistake that was found stays found."""

    def __init__(self) -> None:
        # By code; and arrays without a fault, by name.
        self._found: dict[str, Finding] = {}
        self.notes: list[str] = []  # on what is no mistake
        # Of what may be meant, but trains nothing or wrongly if it is not: the headline
        # says it.
        self.doubts: list[str] = []
        self.is_read = True  # whether there is a program
        self.mix: Mix | None = None
        # Why the step trains nothing, if it is not skipped, and the line to write: a
        # factor of 0 is read, which may also be inf or NaN.
        self.idle: tuple[str, str] | None = None

    def broken(
        self, code: Code, evidence: str, place: Place | None = None, write: str = ""
    ) -> None:
        if not self.is_read and code in DOUBTFUL:
            reason = f"{evidence}. Without a program to read, that may be right"
            self.not_tried(code, reason)
        elif self.status(code) != "broken":
            self._found[code] = Finding("broken", evidence, place, write)

    def right(self, code: Code, note: str = "") -> None:
        self._found.setdefault(code, Finding("right", note))

    def not_tried(self, code: str, reason: str) -> None:
        self._found.setdefault(code, Finding("not tried", reason))

    def does_not_apply(self, code: Code, reason: str) -> None:
        self._found[code] = Finding("does not apply", reason)

    def status(self, code: str) -> Status | None:
        found = self._found.get(code)
        return found.status if found else None

    def is_settled(self, code: Code) -> bool:
        return self.status(code) in ("right", "broken", "does not apply")

    def mark_others_not_tried(self, reason: str) -> None:
        for code in CODES:
            self.not_tried(code, reason)

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
