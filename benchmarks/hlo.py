"""Reads the text of a compiled program: what it launches, and what that moves."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
LAYOUT = re.compile(ARRAY.pattern + r"(\{[^}]*\})?")
ON_CHIP = re.compile(r"S\(\d+\)")
PARTS = ("slice", "dynamic-slice", "gather")
CALLED = re.compile(
    r"(to_apply|calls|body|condition|true_computation|false_computation|"
    r"branch_computations)=(\{[^}]*\}|%?[\w.-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
TARGET = re.compile(r'custom_call_target="(\w+)"')
# They move no data.
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
    # And these custom calls:
    "AllocateBuffer",
    "ConcatBitcast",
}
COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
}
# They run beside the kernels, on a TPU to bring data onto the chip ahead of time.
BACKGROUND = {"copy-start", "slice-start"}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    kind: str
    shape: str
    operands: list[str]
    attributes: str  # all that follows the opening parenthesis
    is_root: bool

    def called(self) -> dict[str, list[str]]:
        """The computations that it calls, by how it calls them."""
        found = CALLED.findall(self.attributes)
        return {how: re.findall(r"[\w.-]+", names) for how, names in found}


class Kernel(NamedTuple):
    """What is launched, and how often in one step."""

    kind: str
    bytes: int  # of one launch
    times: int
    collectives: dict[str, int]  # largest bytes in or out, by kind

    @property
    def is_launched(self) -> bool:
        """Whether it counts as a kernel: copies in the background do not."""
        return self.kind not in BACKGROUND


class Program:
    """A compiled program.

    Each launched instruction reads its operands, each once, and writes its result. A
    fusion is one, whatever happens inside; of an operand that it only slices or gathers
    from, however deep inside, it reads that part, and of one that it updates in place,
    nothing. Caches are ignored, and a scatter counts as if it read and wrote all. The
    body of a loop counts as often as it is known to run, else once; of a conditional
    the larger branch counts. An asynchronous instruction counts once: it reads at its
    start, and writes what its end returns. An array on a TPU's chip costs nothing,
    whoever reads or writes it, and what is brought there ahead of time counts once.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = current = ""
        for line in text.splitlines():
            if start := COMPUTATION.match(line):
                current = start[2]
                self.computations[current] = {}
                self.entry = current if start[1] else self.entry
            elif current and (found := INSTRUCTION.match(line)):
                operands = _operands(line[found.end() :])
                one = Instruction(
                    name=found[2],
                    kind=found[4],
                    shape=found[3],
                    operands=operands,
                    attributes=line[found.end() :],
                    is_root=bool(found[1]),
                )
                self.computations[current][one.name] = one

    @cached_property
    def launched(self) -> list[Kernel]:
        """What a step launches, in the order of the program."""
        return list(self._walk(self.entry, 1))

    @property
    def kernels(self) -> int:
        """How many kernels a step launches."""
        return sum(one.times for one in self.launched if one.is_launched)

    @property
    def bytes(self) -> int:
        """How many bytes they read and write."""
        return sum(one.times * one.bytes for one in self.launched)

    @property
    def collectives(self) -> dict[str, dict[str, int]]:
        """How often devices wait for each other, and for how many bytes, by kind."""
        found: dict[str, dict[str, int]] = {}
        for one in self.launched:
            for kind, size in one.collectives.items():
                entry = found.setdefault(kind, {"count": 0, "bytes": 0})
                entry["count"] += one.times
                entry["bytes"] += one.times * size
        return dict(sorted(found.items()))

    def _walk(self, computation: str, times: int) -> Iterator[Kernel]:
        inside = self.computations.get(computation, {})
        ends = {
            one.operands[0]: one
            for one in inside.values()
            if one.kind.endswith("-done") and one.operands
        }
        for one in inside.values():
            called = one.called()
            if one.kind == "while":
                trips = self._trips(one)
                yield from self._walk(called["body"][0], times * (trips or 1))
                if not trips:
                    yield from self._walk(called["condition"][0], times)
            elif one.kind == "conditional":
                branches = [
                    list(self._walk(name, times))
                    for how, names in called.items()
                    for name in names
                ]
                yield from max(branches, key=_size)
            elif one.kind == "call":
                yield from self._walk(called["to_apply"][0], times)
            elif not _is_free(one):
                yield self._kernel(one, inside, ends, times)

    def _kernel(
        self,
        one: Instruction,
        inside: dict[str, Instruction],
        ends: dict[str, Instruction],
        times: int,
    ) -> Kernel:
        operands = [inside[name].shape for name in one.operands if name in inside]
        result = ends.get(one.name, one).shape
        return Kernel(
            one.kind,
            self._moved(one, inside, result),
            times,
            dict(self._collectives(one, operands, result)),
        )

    def _trips(self, one: Instruction) -> int | None:
        """How often the body of a loop runs, where that is known."""
        if known := TRIPS.search(one.attributes):
            return int(known[1])
        condition = self.computations[one.called()["condition"][0]]
        (root,) = (part for part in condition.values() if part.is_root)
        ends = [condition[x] for x in root.operands if x in condition]
        numbers = [x.attributes.partition(")")[0] for x in ends if x.kind == "constant"]
        is_count = root.kind == "compare" and "direction=LT" in root.attributes
        return int(numbers[0]) if is_count and numbers else None

    def _moved(
        self, one: Instruction, inside: dict[str, Instruction], result: str
    ) -> int:
        """The bytes that one launch reads and writes."""
        if one.kind in ("copy-start", "slice-start"):
            made = array_bytes(result)
            source, target = LAYOUT.findall(one.shape)[:2]
            return sum(made for x in (source, target) if not ON_CHIP.search(x[2]))
        read = sum(
            self._read_by(one, inside, x)
            for x in {*one.operands}
            if x in inside and _in_memory(inside[x].shape)
        )
        return read + self._written(one, inside, _in_memory(result))

    def _body(self, one: Instruction) -> tuple[dict[str, Instruction], dict[int, str]]:
        """The computation of a fusion, and the names of its parameters."""
        body = self.computations[one.called()["calls"][0]]
        return body, {
            int(part.attributes.partition(")")[0]): part.name
            for part in body.values()
            if part.kind == "parameter"
        }

    def _read(self, body: dict[str, Instruction], name: str) -> int:
        """What a computation reads of one of its arrays."""
        users = (user for user in body.values() if name in user.operands)
        return min(
            sum(self._read_by(user, body, name) for user in users),
            array_bytes(body[name].shape),
        )

    def _read_by(
        self, user: Instruction, body: dict[str, Instruction], name: str
    ) -> int:
        is_first = user.operands.index(name) == 0 and user.operands.count(name) == 1
        if user.kind in PARTS and is_first:
            return array_bytes(user.shape)
        if user.kind == "dynamic-update-slice" and is_first:
            return 0
        if user.kind == "bitcast":
            return self._read(body, user.name)
        if user.kind == "fusion":
            inner, parameters = self._body(user)
            places = [i for i, x in enumerate(user.operands) if x == name]
            return sum(self._read(inner, parameters[i]) for i in places)
        return array_bytes(body[name].shape)

    def _written(
        self, one: Instruction, body: dict[str, Instruction], whole: int
    ) -> int:
        """What an instruction writes, of at most `whole` bytes: a part, if in place."""
        if one.kind == "dynamic-update-slice":
            return min(whole, array_bytes(body[one.operands[1]].shape))
        if one.kind == "bitcast":
            source = body[one.operands[0]]
            return self._written(source, body, whole)
        if one.kind != "fusion":
            return whole
        inner, _ = self._body(one)
        (root,) = (part for part in inner.values() if part.is_root)
        if root.kind != "tuple":
            return self._written(root, inner, whole)
        sizes = [_in_memory(found[0]) for found in LAYOUT.finditer(one.shape)]
        roots = [inner[x] for x in root.operands]
        if len(roots) != len(sizes):  # a tuple in a tuple
            return whole
        pairs = zip(roots, sizes, strict=True)
        return sum(self._written(x, inner, size) for x, size in pairs)

    def _collectives(
        self, one: Instruction, operands: list[str], result: str
    ) -> Iterator[tuple[str, int]]:
        """It may be one itself, or have one inside, as fusions on a TPU."""
        kind = one.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            yield kind, max(sum(map(array_bytes, operands)), array_bytes(result))
        if kind not in ("fusion", "async"):
            return
        for name in one.called().get("calls", []):
            inside = self.computations.get(name, {})
            for part in inside.values():
                shapes = [inside[x].shape for x in part.operands if x in inside]
                yield from self._collectives(part, shapes, part.shape)


def array_bytes(shape: str) -> int:
    """The bytes of all arrays in a shape, which may be a nested tuple."""
    return sum(
        (_bits(dtype) * _elements(sizes) + 7) // 8
        for dtype, sizes in ARRAY.findall(shape)
    )


def _in_memory(shape: str) -> int:
    """The bytes of those arrays in a shape that are not on the chip."""
    return sum(
        array_bytes(f"{dtype}[{sizes}]")
        for dtype, sizes, layout in LAYOUT.findall(shape)
        if not ON_CHIP.search(layout)
    )


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s4, c64, f8e4m3fn
    return int(digits[1]) if digits else 0  # a token


def _elements(sizes: str) -> int:
    total = 1
    for size in re.findall(r"\d+", sizes):
        total *= int(size)
    return total


def _operands(text: str) -> list[str]:
    """The names before the closing parenthesis."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return re.findall(r"%([\w.-]+)", text[:i])
    return []


def _is_free(one: Instruction) -> bool:
    target = TARGET.search(one.attributes) if one.kind == "custom-call" else None
    ends = one.kind.endswith(("-done", "-update"))
    return one.kind in FREE or ends or bool(target and target[1] in FREE)


def _size(kernels: list[Kernel]) -> tuple[int, int]:
    return sum(one.times * one.bytes for one in kernels), len(kernels)
