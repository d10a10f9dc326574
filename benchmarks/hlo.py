"""Counts instructions in the text of a compiled program."""

import re

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(")
CALLED = re.compile(
    r"(?:to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations)=\{?((?:%?[\w.-]+(?:, )?)+)"
)
# They move no data, or only end an instruction that was counted at its start.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
}
COLLECTIVES = re.compile(
    r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)


def kernels(hlo: str) -> int:
    """Instructions that are launched one by one, in all branches and loop bodies.

    A fusion is one, and so is what a reduction applies to each element.
    """
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        if start := COMPUTATION.match(line):
            current = start[2]
            bodies[current] = []
            entry = current if start[1] else entry
        elif current:
            bodies[current].append(line)

    def count(name: str) -> int:
        total = 0
        for line in bodies.get(name, []):
            found = INSTRUCTION.match(line)
            kind = found[1] if found else "parameter"
            if kind in ("call", "while", "conditional"):
                called = CALLED.findall(line)
                names = [n.strip().lstrip("%") for c in called for n in c.split(",")]
                total += sum(count(n) for n in names)
            elif kind not in FREE and not kind.endswith("-done"):
                total += 1
        return total

    return count(entry)


def collectives(hlo: str) -> int:
    """Instructions in which devices wait for each other."""
    return len(COLLECTIVES.findall(hlo))
