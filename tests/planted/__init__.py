"""Faults that a test must catch, a file for each part of jls."""

from pathlib import Path

from planted.fault import read

FAULTS = [
    fault
    for path in sorted(Path(__file__).parent.glob("*.txt"))
    for fault in read(path.read_text(encoding="utf-8"))
]
