# SPDX-License-Identifier: Apache-2.0
"""Applies a patch of this folder to a checkout of the project that it is for.

`python apply.py CHECKOUT` finds the patch by the files that it changes;
`python apply.py CHECKOUT NAME` takes NAME.patch. Nothing changes unless all of the
patch applies.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.patch"))


def git(checkout, *arguments):
    command = ["git", "-C", str(checkout), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit("git was not found. Install it, and try again.") from None


def text_of(name):
    return (FOLDER / f"{name}.patch").read_text(encoding="utf-8")


def field(name, key):
    """What the lines above the diff say, such as the commit."""
    return re.search(rf"^{key}: (\S+)$", text_of(name), re.MULTILINE)[1]


def files(name):
    return re.findall(r"^--- a/(\S+)$", text_of(name), re.MULTILINE)


def find_name(checkout):
    for name in NAMES:
        if all((checkout / file).is_file() for file in files(name)):
            return name
    raise SystemExit(
        f"{checkout} has the files of none of the patches. It must be a checkout of "
        f"one of: {', '.join(field(name, 'Project') for name in NAMES)}."
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="the top folder of a git checkout")
    parser.add_argument("name", nargs="?", choices=NAMES, help="default: what fits")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    if not checkout.is_dir():
        raise SystemExit(f"{checkout} is not a folder. Name a git checkout.")
    top = git(checkout, "rev-parse", "--show-toplevel")
    if top.returncode or Path(top.stdout.strip()).resolve() != checkout:
        raise SystemExit(
            f"{checkout} is not the top folder of a git checkout. Clone the project "
            "with git, and name the folder that holds its .git."
        )

    name = options.name or find_name(checkout)
    patch, commit = str(FOLDER / f"{name}.patch"), field(name, "Commit")
    head = git(checkout, "rev-parse", "HEAD").stdout.strip()
    if head != commit:
        print(
            f"Warning: {name}.patch was made for commit {commit[:12]} of "
            f"{field(name, 'Project')}, and {checkout} is at {head[:12]}.",
            file=sys.stderr,
        )
    check = git(checkout, "apply", "--check", patch)
    if check.returncode:
        if git(checkout, "apply", "--check", "--reverse", patch).returncode == 0:
            raise SystemExit(f"{name}.patch is already applied to {checkout}.")
        raise SystemExit(
            f"{name}.patch does not apply to {checkout}, which was left as it was:\n"
            f"{check.stderr.strip()}\n"
            f"Take a clean checkout: git checkout {commit}"
        )
    applied = git(checkout, "apply", patch)
    if applied.returncode:
        raise SystemExit(applied.stderr.strip())
    print(f"Applied {name}.patch: {', '.join(files(name))}.")


if __name__ == "__main__":
    main()
