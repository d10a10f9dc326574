# SPDX-License-Identifier: Apache-2.0
"""Which line the other tools name for each program: `python tests/origin/peers.py`.

Each runs the program as it stands. That is the best case for `jax_debug_nans`: what is
not jitted, it checks one operation at a time.

`eqx.debug.backward_nan` has no column. The user puts it around a value in the program,
and it prints that value and its cotangent: it confirms a line, and names none.

The message of `checkify` has no line ("division by zero"). What counts here is the
traceback that its exception keeps beside it.
"""

import contextlib
import io
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
from finite_programs import FINITE
from jax.experimental import checkify
from programs import PROGRAMS, Program, marked_lines

PEERS = {
    "jax_debug_nans": "debug_nans",
    "jax_debug_nans + jax_debug_infs": "+ debug_infs",
    "checkify.float_checks": "checkify",
}
SECONDS = 60


def line_named_by(peer: str, program: Program) -> int | None:
    """The line of the program that a peer names; None if it names none of them."""
    file = program.make.__code__.co_filename
    jax.clear_caches()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if peer == "checkify.float_checks":
                return _line_of_checkify(program, file)
            return _line_of_debug_nans(program, file, "infs" in peer)
    finally:
        jax.clear_caches()


def _line_of_debug_nans(program: Program, file: str, infs: bool) -> int | None:
    fun, args = program.make()
    with jax.debug_nans(True), jax.debug_infs(infs):
        try:
            jax.block_until_ready(jax.tree.leaves(fun(*args)))
        except Exception as error:
            # JAX has a class of its own, which some functions let through.
            if "FloatingPointError" not in type(error).__name__:
                raise
            return _line_of_error(error, file)
    return None


def _line_of_error(error: BaseException, file: str) -> int | None:
    """The innermost line; of the forward pass, where the error tells that too."""
    before = error.__cause__
    if before is not None and (line := _innermost(before.__traceback__, file)):
        return line
    return _innermost(error.__traceback__, file)


def _innermost(traceback: TracebackType | None, file: str) -> int | None:
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _line_of_checkify(program: Program, file: str) -> int | None:
    fun, args = program.make()
    checked = checkify.checkify(fun, errors=checkify.float_checks)
    error, _ = checked(*args)
    exception = error.get_exception()
    traceback = getattr(exception, "traceback_info", None)
    return traceback and _innermost(traceback.as_python_traceback(), file)


# The table.


class OutOfTimeError(Exception):
    """A peer took longer than it may."""


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _cell(peer: str, program: Program) -> tuple[str, bool]:
    """What stands in the table, and whether it is right."""
    try:
        with _at_most(SECONDS):
            line = line_named_by(peer, program)
    except Exception as error:
        return type(error).__name__, False
    if line is None:
        return "", False
    is_right = line in marked_lines(program)
    return f"**{line}**" if is_right else str(line), is_right


def main() -> None:
    """Prints which line each peer names; the right ones are bold."""
    print("| program | right line |", " | ".join(PEERS.values()), "|")
    print("|---|---|" + "---|" * len(PEERS))
    right, shown = dict.fromkeys(PEERS, 0), 0
    for name, program in PROGRAMS.items():
        if jax.device_count() < program.devices:
            continue
        cells = {peer: _cell(peer, program) for peer in PEERS}
        lines = ", ".join(map(str, sorted(marked_lines(program))))
        print(f"| {name} | {lines or program.argument} |", end=" ", flush=True)
        print(" | ".join(text for text, _ in cells.values()), "|", flush=True)
        shown += not program.argument
        for peer, (_, is_right) in cells.items():
            right[peer] += is_right
    print("| **right, of those with a line** | |", _row(right, shown))
    alarms = {
        peer: sum(bool(_cell(peer, x)[0]) for x in FINITE.values()) for peer in PEERS
    }
    print("| **stops a program that is right** | |", _row(alarms, len(FINITE)))


def _row(counts: dict[str, int], total: int) -> str:
    return " | ".join(f"{count} of {total}" for count in counts.values()) + " |"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
