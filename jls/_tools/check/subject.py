# SPDX-License-Identifier: Apache-2.0
"""The facts of the step that is checked, from its arguments and its program."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jls._program.facts import Value
from jls._scopes import GRADIENTS
from jls._text import listed
from jls._tools.check.carried import Carried
from jls._tools.check.program import Program
from jls._tools.reading.arguments import Item
from jls._tools.reading.reading import Reading, Result
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tools.reading.updates import UpdateCall
from jls._tree import is_inexact


class Subject(NamedTuple):
    """The step that is checked. A leaf is one of its arguments, by index."""

    program: Program
    items: Sequence[Item]
    scales: Sequence[Scale]
    reading: Reading | None  # None without a program to read
    carried: Carried
    own: frozenset[int]  # jls's own leaves
    inside: frozenset[int]  # carried leaves in the states of wrappers and scalers
    results: dict[int, Result]  # the facts about carried leaves; {} without a program
    places: dict[int, int]  # which of the program's results are carried leaves
    frozen: frozenset[int]  # leaves that the program returns as they were
    kept: frozenset[int]  # leaves that it returns as they were if it is skipped
    # Floating-point leaves that come back and have an update in them; or themselves and
    # gradients that were unscaled: where there is no wrapper, and where one is around a
    # part of the optimizer. Without a program, all that come back.
    trained: frozenset[int]
    params: Sequence[frozenset[int]]  # what each wrapper trains outside of its state
    all_params: frozenset[int]
    has_wrapper: bool
    live: Sequence[int]  # the scales that are not static and 1, by index
    # The wrappers that come back, by the index of their scale. One that is only read,
    # such as another network's, is given no gradients.
    returned: Sequence[int]
    missing: Sequence[int]  # those of them without an update in the program
    calls: Sequence[tuple[int, UpdateCall]]  # updates, with the indices of their scales
    cleaned: Sequence[Value]  # the gradients that may have lost an inf on their way
    keeps_inf: bool  # whether the program shows that an inf in them reaches a wrapper

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


def subject_of(program: Program, items: Sequence[Item], carried: Carried) -> Subject:
    scales, reading, *_ = program
    own = frozenset(i for scale in scales for i in scale.own)
    roots = [scale.path for scale in scales]
    inside = frozenset(
        i
        for i in carried.leaves
        if any(items[i].path[: len(root)] == root for root in roots)
    )
    trained = frozenset(i for i in carried.compared - own if is_inexact(items[i].value))
    results, places = dict[int, Result](), dict[int, int]()
    groups = list[frozenset[int]]()
    frozen = kept = frozenset[int]()

    def following(leaves: Collection[int], bits: int) -> frozenset[int]:
        """The leaves whose new values are computed from a set of bits."""
        found = [i for i in leaves if i in results and results[i].now.follows & bits]
        return frozenset(found)

    if reading is not None:
        results |= carried.pick(items, reading.outputs, reading.objects)
        outputs = {path: n for n, path in enumerate(reading.outputs)}
        objects = {path: n for n, path in enumerate(reading.objects, len(outputs))}
        places |= carried.pick(items, outputs, objects)
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
    by_scale = reading.calls if reading is not None else {}
    wrappers = [k for k, scale in enumerate(scales) if scale.counters]
    returned = [k for k in wrappers if scales[k].own & carried.leaves]
    calls = [(k, call) for k in wrappers for call in by_scale.get(k, [])]
    missing = [k for k in returned if reading is not None and k not in by_scale]
    gradients = [x for _, call in calls for x in call.values(GRADIENTS)]
    cleaned = [x for x in gradients if x.cleaned]
    pairs = enumerate((items[x.at].value, x) for x in scales)
    return Subject(
        program,
        items,
        scales,
        reading,
        carried,
        own,
        inside,
        results,
        places,
        frozen,
        kept,
        trained,
        [x for x in groups if x],
        frozenset().union(*groups),
        bool(wrappers),
        [k for k, (value, x) in pairs if not is_switched_off(value, x)],
        returned,
        missing,
        calls,
        cleaned,
        bool(calls) and not missing and not cleaned,
    )
