"""Plants faults that a test must catch: `python tests/mutants.py [names...]`.

Each of `tests/planted` is planted alone, in a copy of the tree, and the tests that
must catch it run until the first one fails. A fault that SURVIVES is a promise without
a test. At the end the tests that failed run once more in a copy without a fault, where
they must pass.

`--file jls/_ema.py` plants those of one file or folder, `--part 2/8` every eighth.
A fault names a function and a statement there, so it goes along where code moves. If
`tests/test_mutants.py` fails, the statement is another one now: plant the fault anew.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from planted import FAULTS
from planted.fault import Fault, find, planted

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".*_cache", ".venv*", "__pycache__")
JOBS = 2  # at a time, each in a copy of its own
SECONDS = 600  # for the tests of one fault; to need more is to be caught
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
HEAD = (
    "| where | fault | outcome | first test that fails | seconds |\n" + "|---" * 5 + "|"
)


class Outcome(NamedTuple):
    is_caught: bool
    first: str  # the first test that failed, or what else happened
    seconds: float


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Runs `tests` in `tree` until one fails."""
    # The copies share what is compiled: a program is known by what it says.
    options = ["-q", "-x", "--tb=no", "--no-header", "-rfE"]
    options += ["-o", f"cache_dir={tree.parent / 'cache'}"]
    # A file that is changed within a second looks unchanged to a cache of bytecode.
    settings = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(True, "the time ran out", time.monotonic() - start)
    seconds = time.monotonic() - start
    if done.returncode > 1:  # pytest itself, or the import of a test, has failed
        raise RuntimeError(done.stdout + done.stderr)
    failed = FAILED.search(done.stdout)
    return Outcome(done.returncode == 1, failed[1] if failed else "", seconds)


def try_all(faults: Sequence[Fault], root: Path) -> bool:
    """Prints what catches each fault; whether nothing survived."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(JOBS):
            trees.put(
                Path(shutil.copytree(root, f"{folder}/{number}", ignore=NOT_COPIED))
            )

        def try_one(fault: Fault) -> Outcome:
            tree = trees.get()
            definition = find(fault, root)
            path = tree / definition.file
            text = path.read_text(encoding="utf-8")
            path.write_text(planted(fault, text, definition), encoding="utf-8")
            try:
                return run_tests(tree, fault.tests)
            finally:
                path.write_text(text, encoding="utf-8")
                trees.put(tree)

        print(HEAD, flush=True)
        outcomes = []
        for fault, outcome in zip(faults, pool.map(try_one, faults), strict=True):
            outcomes.append(outcome)
            word = "caught" if outcome.is_caught else "SURVIVED"
            seconds = f"{outcome.seconds:.0f}"
            row = fault.where, fault.name, word, outcome.first, seconds
            print("|", " | ".join(row), "|", flush=True)
        is_clean = _pass_without(trees.get(), outcomes)
    caught = sum(outcome.is_caught for outcome in outcomes)
    total = sum(outcome.seconds for outcome in outcomes)
    print(f"\n{caught} of {len(faults)} caught, in {total:.0f} seconds.")
    return is_clean and caught == len(faults)


def _pass_without(tree: Path, outcomes: Sequence[Outcome]) -> bool:
    """Whether the tests that failed pass without a fault."""
    failed = sorted({outcome.first for outcome in outcomes if "::" in outcome.first})
    again = [run_tests(tree, failed)] if failed else []
    for outcome in again:
        if outcome.is_caught:
            print(f"\nwithout a fault this fails too: {outcome.first}")
    return not any(outcome.is_caught for outcome in again)


def choose(names: Sequence[str], path: str, part: str) -> list[Fault]:
    """The faults with these names, or all, in `path`; of these each n-th for "k/n"."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        known = "\n".join(fault.name for fault in FAULTS)
        sys.exit(f"no fault is called {sorted(unknown)}. There are:\n{known}")
    chosen = [
        fault
        for fault in FAULTS
        if fault.name in (names or [fault.name])
        and find(fault, ROOT).file.startswith(path)
    ]
    number, of = (int(x) for x in part.split("/"))
    return chosen[number - 1 :: of]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of faults; without one, all")
    parser.add_argument(
        "--file", default="", help="a file or folder, such as jls/_tools/check"
    )
    parser.add_argument(
        "--part", default="1/1", help="2/8: every eighth, from the second"
    )
    given = parser.parse_args()
    chosen = choose(given.names, given.file, given.part)
    return 0 if try_all(chosen, ROOT) else 1


if __name__ == "__main__":
    sys.exit(main())
