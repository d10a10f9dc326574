"""Writes the parts of pages that are made from something else: python docs/made.py

In a page such a part stands between a comment with its name and one that says "end". A
test compares each with what it is made from.
"""

import difflib
import re
from pathlib import Path

from jls._tools.check import codes
from jls.types import SkipReason

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PART = re.compile(r"(<!-- made: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)

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

# What the advice of `jls.check_step` depends on, beside the mistake.
MENDS = {
    "NNX": codes.NNX,
    "a Flax TrainState": codes.LINEN,
    "optax.MultiSteps outside": codes.MULTI_STEPS,
    "optax.masked or optax.partition outside": codes.MASKED,
}


def table(rows: list[list[str]]) -> str:
    """Writes a table, with its code marked as such."""
    title, *rows = rows
    lines = [title, ["---"] * len(title)]
    lines += [[CODE.sub(r"`\g<0>`", cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def codes_of_check_step() -> str:
    """Writes the table of the mistakes that `jls.check_step` looks for."""
    ways = {"reading": "reading", "faults": "faults", "both": "reading, then faults"}
    rows = [["code", "broken when", "found by", "write"]]
    for code, row in codes.TABLE.items():
        rows.append([f'"{code}"', row.broken, ways[row.by], row.write])
    return table(rows)


def mends() -> str:
    """Writes which other line is right for NNX, for Linen, around the wrapper."""
    rows = [["of", "code", "write"]]
    for kind, lines in MENDS.items():
        for line in dict.fromkeys(lines.values()):
            names = ", ".join(f'"{code}"' for code in lines if lines[code] == line)
            rows.append([kind, names, line])
    return table(rows)


def skip_reasons() -> str:
    """Writes the reasons for which a step is skipped."""
    source = (DOCS.parent / "jls/_types.py").read_text(encoding="utf-8")
    rows = [["number", "reason", "when"]]
    for reason in SkipReason:
        (comment,) = re.findall(rf"^    {reason.name} = \d+  # (.*)$", source, re.M)
        rows.append([str(int(reason)), reason.name, comment])
    return table(rows)


def diff(name: str) -> str:
    """Writes what jls changes in an example."""
    old, new = EXAMPLES / "plain" / f"{name}.py", EXAMPLES / f"{name}.py"
    texts = (path.read_text(encoding="utf-8").splitlines() for path in (old, new))
    names = (path.relative_to(DOCS.parent).as_posix() for path in (old, new))
    lines = difflib.unified_diff(*texts, *names, n=1, lineterm="")
    return "\n".join(["```diff", *(line.rstrip() for line in lines), "```"])


PARTS = {
    "codes": codes_of_check_step,
    "mends": mends,
    "skip_reasons": skip_reasons,
    **{
        path.stem: lambda name=path.stem: diff(name)
        for path in sorted(EXAMPLES.glob("*.py"))
    },
}


def made(text: str) -> str:
    """Makes each of the parts of a page anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


if __name__ == "__main__":
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(made(text), encoding="utf-8")
