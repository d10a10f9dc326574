"""docs/comparison.md as data: its tables, and the versions that it speaks of."""

import importlib.metadata
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
TEXT = PAGE.read_text(encoding="utf-8")
FOOTNOTE = re.compile(r"\[\^[\w-]+\]")


def _rows(title):
    """The cells of the table under a heading, without their footnotes."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [FOOTNOTE.sub("", line).strip("|").split("|") for line in lines]
    return [[cell.strip().replace("`", "") for cell in row] for row in rows]


def table(title):
    """(library, what is asked) -> answer."""
    head, _, *rows = _rows(title)
    return {
        (name, row[0]): cell
        for row in rows
        for name, cell in zip(head[1:], row[1:], strict=True)
    }


# Library -> (its distribution, the versions that the page speaks of).
VERSIONS = {
    name: (distribution, re.findall(r"[\d.]+\w*", versions))
    for name, distribution, versions in _rows("Versions")[2:]
}


def why_not(library):
    """Why the answers for a library cannot be checked here; None if they can."""
    if library == "jls":
        return None
    distribution, versions = VERSIONS[library]
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    if installed.split("+")[0] not in versions:  # torch has builds, as 2.13.0+cpu
        return f"the page speaks of {library} {versions}, not of {installed}"
    return None
