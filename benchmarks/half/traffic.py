"""Counts what a program moves to and from a chip's memory, on GPUs and TPUs alike."""

import re

from benchmarks.hlo import ARRAY, Instruction, Program, array_bytes

LAYOUT = re.compile(ARRAY.pattern + r"(\{[^}]*\})?")
ON_CHIP = re.compile(r"S\(\d+\)")
PARTS = ("slice", "dynamic-slice", "gather")


class Traffic(Program):
    """A compiled program of which loops count as often as they run.

    A TPU's compiler counts the body of a loop once, and what it brings onto the chip
    ahead of time twice: as a copy, and where it is read there. Here an array on the
    chip costs nothing, whoever reads or writes it. Of an array that a fusion only
    slices, however deep inside, that part counts.
    """

    def _trips(self, one: Instruction) -> int | None:
        known = super()._trips(one)
        if known is not None:
            return known
        condition = self.computations[one.called()["condition"][0]]
        (root,) = (part for part in condition.values() if part.is_root)
        ends = [condition[x] for x in root.operands if x in condition]
        numbers = [x.attributes.partition(")")[0] for x in ends if x.kind == "constant"]
        is_count = root.kind == "compare" and "direction=LT" in root.attributes
        return int(numbers[0]) if is_count and numbers else None

    def _moved(
        self, one: Instruction, inside: dict[str, Instruction], result: str
    ) -> int:
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


def _in_memory(shape: str) -> int:
    """The bytes of those arrays in a shape that are not on the chip."""
    return sum(
        array_bytes(f"{dtype}[{sizes}]")
        for dtype, sizes, layout in LAYOUT.findall(shape)
        if not ON_CHIP.search(layout)
    )
