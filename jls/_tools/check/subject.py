# SPDX-License-Identifier: Apache-2.0
"""What is known of the step that is checked, from its arguments and its program."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jls._text import listed
from jls._tools.check.carried import Carried
from jls._tools.reading.arguments import Arguments, Item
from jls._tools.reading.reading import Reading, Result
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tree import is_inexact


class Subject(NamedTuple):
    """The step that is checked. A leaf is one of its arguments, by index."""

    items: Sequence[Item]
    in_place: frozenset[str]  # names of the arguments that the step changes in place
    scales: Sequence[Scale]
    reading: Reading | None  # None without a program to read
    carried: Carried
    own: frozenset[int]  # jls's own leaves
    inside: frozenset[int]  # carried leaves in the states of wrappers and scalers
    results: dict[int, Result]  # the facts about carried leaves; {} without a program
    frozen: frozenset[int]  # leaves that the program returns as they were
    kept: frozenset[int]  # leaves that it returns as they were if it is skipped
    # Floating-point leaves that come back and have an update in them; or themselves and
    # gradients that were unscaled: where there is no wrapper, and where one is around a
    # part of the optimizer. Without a program, all that come back.
    trained: frozenset[int]
    params: Sequence[frozenset[int]]  # what each wrapper trains outside of its state

    @property
    def live(self) -> list[int]:
        """The scales that are not static and 1, by index."""
        values = [self.items[x.at].value for x in self.scales]
        pairs = enumerate(zip(values, self.scales, strict=True))
        return [k for k, (value, x) in pairs if not is_switched_off(value, x)]

    @property
    def all_params(self) -> frozenset[int]:
        return frozenset().union(*self.params)

    def all_in(self, leaves: Iterable[int], among: frozenset[int]) -> bool:
        """Whether those of `leaves` that come back are all among others."""
        back = self.carried.leaves.intersection(leaves)
        return bool(back) and back <= among

    def reaches_gradients(self, leaf: int) -> bool:
        """Whether gradients or loss depend on it: on a learning rate they do not."""
        reading = self.reading
        return reading is None or bool(reading.bit(leaf) & reading.reaches_gradients)

    def names(self, leaves: Iterable[int]) -> str:
        """The paths of leaves, the first three of them."""
        return listed([self.items[i].name for i in sorted(leaves)])


def subject_of(
    arguments: Arguments,
    scales: Sequence[Scale],
    carried: Carried,
    reading: Reading | None,
) -> Subject:
    items = arguments.items
    own = frozenset(i for scale in scales for i in scale.own)
    roots = [scale.path for scale in scales]
    inside = frozenset(
        i
        for i in carried.leaves
        if any(items[i].path[: len(root)] == root for root in roots)
    )
    trained = frozenset(i for i in carried.compared - own if is_inexact(items[i].value))
    results, groups = dict[int, Result](), list[frozenset[int]]()
    frozen = kept = frozenset[int]()

    def following(leaves: Collection[int], bits: int) -> frozenset[int]:
        """The leaves whose new values are computed from a set of bits."""
        found = [i for i in leaves if i in results and results[i].now.follows & bits]
        return frozenset(found)

    if reading is not None:
        results |= carried.pick(items, reading.outputs, reading.objects)
        frozen = frozenset(i for i, x in results.items() if reading.leaf_of(x.now) == i)
        kept = frozenset(
            i for i, x in results.items() if reading.leaf_of(x.skipped) == i
        )
        itself = [i for i in trained if following([i], reading.bit(i))]
        trained = following(trained, reading.bits_of_updates) | following(
            itself, reading.flow.bit_of_gradients
        )
        groups = [
            following(trained - inside, reading.bits_of_calls(k)) for k in reading.calls
        ]
    if reading is None or not reading.calls:
        groups = [trained - inside]
    return Subject(
        items,
        arguments.in_place,
        scales,
        reading,
        carried,
        own,
        inside,
        results,
        frozen,
        kept,
        trained,
        [x for x in groups if x],
    )
