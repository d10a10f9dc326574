"""Compiles a step in float32, with `dtype=` by hand, and under `jls.autocast`.

Those of wide models under `jls.autocast` to bfloat16, and to float8.
Nothing is run, and no chip has to be here. Writes the figures as JSON, adding to those
that are in the file; prints the tables, and draws the picture.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.half import programs
from benchmarks.half.tables import tables
from benchmarks.on_target import versions
from benchmarks.targets import TARGETS


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Compiles what the command line asks for; returns all figures of the file."""
    options = _parser().parse_args(arguments)
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.target:
        for model, make in programs.chosen(name, options.tiny):
            if options.models not in model:
                continue
            for way in programs.ways_of(model):
                one = programs.figures(make(), way, TARGETS[name])
                entry = results.setdefault(name, {"versions": {}, "models": {}})
                entry["versions"] |= versions()
                entry["models"].setdefault(model, {})[way] = one
                options.json.write_text(json.dumps(results, indent=2) + "\n")
                print(name, model, way, one, flush=True)
    print(tables(results))
    if options.plot and results:
        from benchmarks.half import plot  # it takes a second to import matplotlib

        plot.save(results, options.plot)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.half", description=__doc__
    )
    add = parser.add_argument
    add("--target", nargs="*", default=[], choices=list(TARGETS), metavar="CHIP")
    add("--models", default="", metavar="TEXT", help="those with TEXT in their name")
    add("--tiny", action="store_true", help="models that compile in no time")
    add("--json", type=Path, default=Path("benchmarks_half.json"), metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="draw no picture by default")
    return parser


if __name__ == "__main__":
    main()
