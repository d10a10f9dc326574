"""Prints figures as Markdown, for the documentation."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report, target_report


def tables(path: Path) -> str:
    """All tables of a file that the command wrote."""
    results: dict[str, Any] = json.loads(path.read_text())
    if "how" in results["about"]:
        return "\n\n".join(map(markdown, target_report.tables(results)))
    return "\n\n".join(map(markdown, report.tables(results)))


def markdown(table: Table) -> str:
    """A table with its title in bold."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    rule = ["---:" if c.justify == "right" else "---" for c in table.columns]
    lines = ["| " + " | ".join(row) + " |" for row in [headings, rule, *rows]]
    return "\n".join([f"**{table.title}**", "", *lines])
