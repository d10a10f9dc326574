# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m jls` trains a float32 network in float16.

`python -m jls doctor` examines the machine that it runs on, and `python -m jls compare`
says where two fingerprints of programs part.

Flax, matplotlib, rich and scikit-learn are imported when the demo starts: `--help` and
the advice on installing them work without them.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import jls
from jls import __version__

DEMO = (
    "Trains one float32 Flax network, untouched, on 1347 handwritten digits, four "
    "times: in float32, in float16 by jls.autocast without a loss scale, the same with "
    "jls.loss_scaled, and in bfloat16. Shows the loss, the loss scale and the skipped "
    "steps, then how well each run reads 450 digits that it has not seen, and the "
    "memory that its backward pass needs. Runs on the GPU if JAX has one, else on the "
    "CPU, in about a minute, and downloads nothing. Without a command, this is what "
    "runs."
)
DOCTOR = (
    "Times each dtype on this machine, checks that XLA detects inf and NaN inside jit, "
    "and measures what a wrapped step costs. Ends with the dtype to train in, and the "
    "lines to write. Exits with 0 if everything that jls relies on holds, else with 1."
)
COMPARE = (
    "Says at which operation two programs part, from their fingerprints: files that "
    "jls.fingerprint(step, *args).save(path) wrote, perhaps on two machines. Exits "
    "with 0 if they are equal, else with 1."
)

EXAMPLES = """\
examples:
  python -m jls
  python -m jls --seed 3 --output digits.svg
  python -m jls --steps 300 --no-plot
  python -m jls doctor
  python -m jls compare a100.npz tpu.npz
  JAX_PLATFORMS=cpu python -m jls   # not on the GPU
"""

EXTRA = {"flax", "matplotlib", "rich", "sklearn"}

INSTALL = """\
  in a checkout of jls:
    pip install -e ".[demo]"
  with jls from a wheel:
    pip install flax matplotlib rich scikit-learn
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demo, the doctor, or a comparison.

    Args:
      arguments: the command line without the program's name; None reads `sys.argv`. It
        may begin with `demo`, `doctor` or `compare`; `demo` is what runs without.

    Raises:
      SystemExit: with a sentence if an argument is bad or a package is missing; with 1
        if the doctor finds that something does not hold, or if programs differ.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    first = arguments[0] if arguments else "--"
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        arguments = ["demo", *arguments]
    parser = _parser()
    name = arguments[0]
    if name != "compare" and callable(getattr(jls, name, None)):
        parser.error(
            f"{name} is a function, no command: write jls.{name}(...) in Python, where "
            "the step is"
        )
    options = parser.parse_args(arguments)
    options.run(options)


def _run_doctor(options: argparse.Namespace) -> None:
    from jls._tools.cli import doctor

    findings = {"jls": __version__, **doctor.examine()}
    if options.json:
        print(json.dumps(findings, indent=2))
    else:
        print(doctor.report(findings, _columns()))
    if not findings["ok"]:
        raise SystemExit(1)


def _run_compare(options: argparse.Namespace) -> None:
    from jls._tools.compare.compare import compare
    from jls._tools.compare.fingerprint import Fingerprint

    try:
        found = compare(Fingerprint.load(options.a), Fingerprint.load(options.b))
    except (OSError, ValueError) as error:
        raise SystemExit(options.error(str(error))) from error
    print(found)
    if not found.equal:
        raise SystemExit(1)


def _run_demo(options: argparse.Namespace) -> None:
    if not options.no_plot:
        _check_output(options)
    save_plot = None
    try:
        from jls._tools.cli import demo_report

        if not options.no_plot:
            from jls._tools.cli.demo_plot import save as save_plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise SystemExit(
            f"The demo needs the package {error.name}, which is not installed.\n"
            f"To install what it needs,\n{INSTALL.rstrip()}"
        ) from error
    runs = demo_report.train_all(options.steps, options.seed)
    demo_report.show(runs)
    if save_plot:
        save_plot(runs, options.output)
        print(f"\nPlot: {options.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jls",
        description="Mixed precision for JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jls {__version__}")
    commands = parser.add_subparsers(title="commands")
    demo = commands.add_parser("demo", description=DEMO)
    doctor = commands.add_parser("doctor", description=DOCTOR)
    doctor.add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    doctor.set_defaults(run=_run_doctor)
    compare = commands.add_parser("compare", description=COMPARE)
    for name in ("a", "b"):
        compare.add_argument(name, metavar=f"{name}.npz", help="a fingerprint")
    compare.set_defaults(run=_run_compare, error=compare.error)
    demo.add_argument(
        "--steps",
        type=_integer_from(1),
        default=1200,
        metavar="N",
        help="training steps of each run (default: 1200; float32 itself needs several "
        "hundred)",
    )
    demo.add_argument(
        "--seed",
        type=_integer_from(0),
        default=0,
        metavar="N",
        help="draws the first weights and the split of the digits (default: 0)",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("jls_demo.png"),
        metavar="FILE",
        help="where the plot goes; the ending .png, .svg or .pdf says the format "
        "(default: jls_demo.png)",
    )
    demo.add_argument("--no-plot", action="store_true", help="write no plot")
    demo.set_defaults(run=_run_demo, error=demo.error)
    every = "\n".join(x.format_help() for x in (demo, doctor, compare))
    parser.epilog = f"{every}\n{EXAMPLES}\nwhat the demo needs:\n{INSTALL}"
    return parser


def _columns() -> int:
    """The width of text: that of the terminal, within limits."""
    # The table of the doctor has 52 columns; lines over 88 are hard to read.
    return min(max(shutil.get_terminal_size().columns, 52), 88)


def _integer_from(least: int):
    def integer(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to 2^31 - 1, got {text!r}"
            )
        return int(text)

    return integer


def _check_output(options: argparse.Namespace) -> None:
    """Refuses a file that cannot be written, before a minute of training."""
    output = options.output
    if output.suffix not in (".png", ".svg", ".pdf"):
        options.error(f"--output must end in .png, .svg or .pdf, got '{output}'")
    if not output.parent.is_dir():
        options.error(f"--output is in a folder that does not exist: '{output.parent}'")
    if output.is_dir():
        options.error(f"--output is a folder, not a file: '{output}'")
    target = output if output.exists() else output.parent
    if not os.access(target, os.W_OK):
        options.error(f"--output cannot be written: no permission for '{target}'")


def _stop(*_) -> None:
    """Ends the program in one line, when the user presses Ctrl-C.

    At once: a KeyboardInterrupt is lost where JAX calls back into Python, and the
    interpreter may crash at its end while XLA still computes.
    """
    show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # progress bars hide it
    os.write(2, f"{show_cursor}\nStopped.\n".encode())
    os._exit(130)


if __name__ == "__main__":
    # Another program, such as the notebook that calls this, may need the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not nohup's
        signal.signal(signal.SIGINT, _stop)
    main()
