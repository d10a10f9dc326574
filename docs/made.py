"""Writes the parts of pages that are made from something else: python docs/made.py

In a page such a part stands between a comment with its name and one that says "end". A
test compares each with what it is made from.
"""

import difflib
import re
from pathlib import Path

from jls.types import SkipReason

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
# One of each kind: the others change the same lines.
DIFFS = (
    "gpt_sharded",
    "haiku_state",
    "linen_imagenet",
    "nnx_convnet",
    "ppo",
)
PART = re.compile(r"(<!-- made: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)

# A block of a diff that is gone.
LONG = re.compile(r"(?:^-.*\n){4,}", re.MULTILINE)

# What people write in programs: a call, an assignment of one, a name. Brackets may hold
# brackets.
BRACKETS = r"\([^()]*\)"
for _ in range(3):
    BRACKETS = rf"\((?:[^()]|{BRACKETS})*\)"
CODE = re.compile(
    r"(?:with )?(?:\w+(?:, \w+)* = )?"
    r"\b(?:jls|jnp|jax|nnx|optax|optimizer|scaler)\.[\w.]*\w"
    rf"(?:{BRACKETS})*:?|\bvalue=|\bopt_state\b"
)


def table(rows: list[list[str]]) -> str:
    """Writes a table, with its code marked as such."""
    title, *rows = rows
    lines = [title, ["---"] * len(title)]
    lines += [[CODE.sub(r"`\g<0>`", cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def skip_reasons() -> str:
    """Writes the reasons for which a step is skipped."""
    source = (DOCS.parent / "jls/_types.py").read_text(encoding="utf-8")
    rows = [["number", "reason", "when"]]
    for reason in SkipReason:
        (comment,) = re.findall(rf"^    {reason.name} = \d+  # (.*)$", source, re.M)
        rows.append([str(int(reason)), reason.name, comment])
    return table(rows)


def shorten(block: re.Match[str]) -> str:
    """Writes the first of the lines that are gone, and how many follow."""
    first, *rest = block[0].splitlines()
    indent = re.match(r"- *", first)[0]
    return f"{first}\n{indent}    ...  # {len(rest)} lines\n"


def diff(name: str) -> str:
    """Writes what jls changes in an example, a gap in the place of what stays."""
    old, new = EXAMPLES / "plain" / f"{name}.py", EXAMPLES / f"{name}.py"
    texts = (path.read_text(encoding="utf-8").splitlines() for path in (old, new))
    _, _, _, *lines = difflib.unified_diff(*texts, n=0, lineterm="")
    text = "\n".join("" if line.startswith("@@") else line.rstrip() for line in lines)
    text = re.sub(r"^-\n", "", text, flags=re.MULTILINE)
    return f"```diff\n{LONG.sub(shorten, text)}\n```"


PARTS = {
    "skip_reasons": skip_reasons,
    **{name: lambda name=name: diff(name) for name in DIFFS},
}


def made(text: str) -> str:
    """Makes each of the parts of a page anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(made(text), encoding="utf-8")
