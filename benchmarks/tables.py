"""Tables, as Markdown: in the terminal, and for the documentation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.contestants import FLOOR


class Table(NamedTuple):
    """A title, what stands above the columns, and rows; the first columns are words."""

    title: str
    heads: Sequence[str]
    rows: Iterable[Sequence[str]]
    words: int = 1

    def __str__(self) -> str:
        lines = [head(self.heads, self.words), *map(row, self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def head(heads: Sequence[str], words: int = 1) -> str:
    """The first two lines of a table."""
    return f"{row(heads)}\n|{'---|' * words}{'--:|' * (len(heads) - words)}"


def row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def contestants_of(workloads: dict[str, Any]) -> list[str]:
    """The names of the contestants, in order."""
    names = [name for one in workloads.values() for name in one["results"]]
    return list(dict.fromkeys(names))


def matrix(
    workloads: dict[str, Any],
    title: str,
    cell: Callable[[dict[str, Any], dict[str, Any], int], str],
    without: str | None = None,
) -> Table:
    """A row for each workload, a column for each contestant.

    A cell is made of its figures, those of plain optax, and the number of parameters.
    """
    names = [name for name in contestants_of(workloads) if name != without]
    rows = []
    for workload, one in workloads.items():
        found = [one["results"].get(name) for name in names]
        bare, count = one["results"].get(FLOOR, {}), one["parameters"]
        cells = [
            "" if f is None else "-" if "error" in f else cell(f, bare, count)
            for f in found
        ]
        rows.append([workload, *cells])
    return Table(title, ["workload", *names], rows)


def compilation(one: dict[str, Any], bare: dict[str, Any], parameters: int) -> str:
    """The seconds of plain optax to trace / to compile; of others, how many times."""
    del parameters
    fields = ("trace_seconds", "compile_seconds")
    if not all(field in bare for field in fields):
        return "-"
    times = (one[x] if one is bare else one[x] / bare[x] for x in fields)
    return " / ".join(f"{x:.2f}" for x in times)
