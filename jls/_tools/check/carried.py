# SPDX-License-Identifier: Apache-2.0
"""Matches the results of a step to its arguments.

Only an argument and a result with equal paths, shapes and dtypes can be a pair. First
come those that the program proves: in a skipped step the result is the argument, or it
is computed from it element by element, as new parameters are. What is left pairs in
order if there are equally many and nothing contradicts it; an array alone only if all
arguments before it come back.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from jls._text import join, listed, quoted
from jls._tools.check.leaves import has_form, same_form, under, units
from jls._tools.reading.arguments import REPORT, Arguments, Item, Keys
from jls._tools.reading.reading import Reading, Result
from jls._tools.reading.scales import Scale
from jls._tree import is_inexact

Named = Mapping[str, Sequence[str] | None] | None


class Carried(NamedTuple):
    """The arguments' leaves that a step returns, and their paths in the results."""

    sources: Mapping[int, Keys] = {}  # leaf of the arguments -> path in the results
    in_place: frozenset[int] = frozenset()  # leaves that are read from the NNX objects
    compared: frozenset[int] = frozenset()  # leaves that have to be right
    doubtful: frozenset[int] = frozenset()  # taken as data, though a result looks so

    @property
    def leaves(self) -> frozenset[int]:
        return self.in_place | self.sources.keys()


def match(
    arguments: Arguments,
    outputs: Sequence[Item],
    objects: Mapping[int, bool],
    scales: Sequence[Scale],
    named: Named,
    reading: Reading | None,
) -> Carried:
    """Finds each carried argument in the outputs, or raises.

    Args:
      arguments: those of the step.
      outputs: its results.
      objects: the leaves of NNX arguments, and whether the step changed them in place.
      scales: the loss scales in the arguments.
      named: the arguments that are carried and the fields that count, None for all of
        them; or None to find out.
      reading: the facts from the program, if it can be read.
    """
    items, tops = arguments.items, units(arguments.items)
    if reading is None and named is None:
        names = listed([top[0] for top in tops])
        raise ValueError(
            "carried_args must name the arguments that come back, since there is no "
            f"program to read, out of {names}. Write their positions or names: "
            "jls.check_step(step, ..., carried_args=(0, 1))."
        )
    holders = [items[x.at].path[0] for x in scales] if named is None else named
    states = [x for x in tops if x[0] in holders]
    others = [x for x in tops if named is None and x not in states]
    trees = [x for x in others if items[tops[x][0]].path != x]
    pairs = _Pairs(items, outputs, reading)
    pairs.pair(states)
    pairs.check_clear(states)
    pairs.pair(trees, is_free=True)
    plain = [x for x in [*states, *trees] if x[0] not in arguments.in_place]
    pairs.pair_parts(plain, is_free=named is None)
    for n, top in enumerate(tops):
        is_array = hasattr(items[tops[top][0]].value, "dtype")
        if is_array and top in others and top not in trees:
            is_next = all(x in pairs.found for x in list(tops)[:n])
            pairs.pair([top], is_free=True, in_order=is_next)
    doubtful = {i for x in others if pairs.may_be_state(x) for i in tops[x]}
    in_place = set[int]()
    for top in [*states, *others]:
        is_changed = top not in pairs.found or any(map(objects.get, tops[top]))
        if top[0] in arguments.in_place and is_changed:
            pairs.found.pop(top, None)
            in_place |= set(tops[top])
    sources = {
        i: (*target, *items[i].path[len(unit) :])
        for unit, target in pairs.found.items()
        for i in under(items, unit)
    }
    carried = in_place | sources.keys()
    _check_returned(items, carried, scales, named)
    compared = {i for i in carried if _counts(items[i], named)}
    found = in_place, compared, doubtful - carried
    return Carried(sources, *map(frozenset, found))


class _Fact(NamedTuple):
    """What the program says of a leaf and a result that may be its next value."""

    rank: int  # 0 if it proves nothing, 1 if a skip leaves it: the lower the surer
    kept: int | None  # the leaf that the result is if the step is skipped
    is_frozen: bool  # it comes back as it was: an old copy, or what is only read
    is_computed: bool  # it is another value, into which the leaf goes


def _fact(reading: Reading, leaf: int, result: Result) -> _Fact:
    now, bit = result.now, reading.bit(leaf)
    kept, is_frozen = reading.leaf_of(result.skipped), reading.leaf_of(now) == leaf
    rank = int(kept == leaf and not is_frozen)
    if kept is None and now.follows & bit:
        rank = 1 + len(reading.leaves_in(now.follows))  # of an average both
    return _Fact(rank, kept, is_frozen, bool(now.depends & bit) and not is_frozen)


class _Pairs:
    """Pairs units, subtrees of the arguments, with subtrees of the results."""

    def __init__(
        self, items: Sequence[Item], outputs: Sequence[Item], reading: Reading | None
    ) -> None:
        self.found: dict[Keys, Keys] = {}  # unit -> subtree of the results
        self._items, self._reading = items, reading
        self._subtrees = defaultdict[Keys, dict[Keys, Any]](dict)
        for path, value, kind in outputs:
            for end in range(len(path) + 1) if kind != REPORT else ():
                self._subtrees[path[:end]][path[end:]] = value
        self._alike = defaultdict[Any, list[Keys]](list)  # with equal paths and shapes
        for path, leaves in self._subtrees.items():
            self._alike[_form(leaves)].append(path)

    def pair(
        self, wanted: Sequence[Keys], is_free: bool = False, in_order: bool = True
    ) -> None:
        """Pairs units, as far as it can.

        Args:
          wanted: the units.
          is_free: whether they may be data.
          in_order: whether what the program leaves open pairs in order.
        """
        proved = [
            (-len(facts), min(ranks), unit, target)
            for unit in wanted
            for target in self._targets(unit)
            if (facts := self._facts(unit, target))
            and (ranks := [x.rank for x in facts if x.rank])
        ]
        # A whole before its parts.
        for *_, unit, target in sorted(proved, key=lambda x: x[:2]):
            if unit not in self.found and self._is_untaken(target):
                self.found[unit] = target
        by_size = defaultdict[int, list[Keys]](list)
        for unit in wanted if in_order else ():
            by_size[-len(self._leaves(unit))].append(unit)
        for _, alike in sorted(by_size.items()):
            self._pair_in_order(alike, is_free)

    def _pair_in_order(self, wanted: Sequence[Keys], is_free: bool) -> None:
        """Pairs units of one size."""
        by_targets = defaultdict[tuple[Keys, ...], list[Keys]](list)
        for unit in wanted:
            if unit not in self.found:
                by_targets[tuple(self._targets(unit))].append(unit)
        for targets, alike in by_targets.items():
            pairs = list(zip(alike, targets, strict=False))
            is_contradicted = any(self._is_contradicted(*x, is_free) for x in pairs)
            if len(alike) == len(targets) and not is_contradicted:
                self.found |= dict(pairs)

    def pair_parts(self, wanted: Sequence[Keys], is_free: bool) -> None:
        """Pairs the parts of units that come back by themselves."""
        left = [unit for unit in wanted if unit not in self.found]
        parts = [x for unit in left for x in units(self._items, unit) if x != unit]
        if parts:
            self.pair(parts, is_free)
            self.pair_parts(parts, is_free)

    def check_clear(self, wanted: Sequence[Keys]) -> None:
        """Raises if a unit has not been paired, but looks like a result."""
        left = [unit for unit in wanted if unit not in self.found]
        targets = [target for unit in left for target in self._targets(unit)]
        if targets:
            names = listed(quoted(join(*unit) for unit in left))
            results = listed([join(*x) or "all of it" for x in dict.fromkeys(targets)])
            raise ValueError(
                f"what comes back from the step must be clear, but {names} may be any "
                f"of its results {results}. Name the arguments that come back, by "
                "position or name: jls.check_step(step, ..., carried_args=(0, 1)); and "
                "return the new state in the order of the arguments."
            )

    def may_be_state(self, unit: Keys) -> bool:
        """Whether a result that looks like a unit is computed from it."""
        facts = (self._facts(unit, target) for target in self._targets(unit))
        return any(x.is_computed for x in itertools.chain(*facts))

    def _leaves(self, unit: Keys) -> dict[Keys, int]:
        return {self._items[i].path[len(unit) :]: i for i in under(self._items, unit)}

    def _targets(self, unit: Keys) -> list[Keys]:
        """The results of the form of a unit that are not taken."""
        leaves = {key: self._items[i].value for key, i in self._leaves(unit).items()}
        return [
            target
            for target in self._alike[_form(leaves)]
            if self._is_untaken(target)
            and all(
                same_form(leaves[key], x) for key, x in self._subtrees[target].items()
            )
        ]

    def _is_untaken(self, target: Keys) -> bool:
        taken = self.found.values()
        return not any(x[: len(target)] == target[: len(x)] for x in taken)

    def _facts(self, unit: Keys, target: Keys) -> list[_Fact]:
        outputs = self._reading.outputs if self._reading else {}
        return [
            _fact(self._reading, i, outputs[path])
            for key, i in self._leaves(unit).items()
            if self._reading and (path := (*target, *key)) in outputs
        ]

    def _is_contradicted(self, unit: Keys, target: Keys, is_free: bool) -> bool:
        facts, mine = self._facts(unit, target), self._leaves(unit).values()
        if not {x.kept for x in facts} <= {None, *mine}:
            return True
        # Floats that the program computes without these, such as predictions, are no
        # state. Of counts and keys the program does not show that.
        has_floats = any(is_inexact(self._items[i].value) for i in mine)
        return is_free and (has_floats or all(x.is_frozen for x in facts))


def _form(leaves: Mapping[Keys, Any]) -> frozenset[tuple[Keys, Any]]:
    return frozenset(
        (key, np.shape(x) if has_form(x) else None) for key, x in leaves.items()
    )


def _counts(item: Item, named: Named) -> bool:
    """Whether a carried leaf is in no field that `carried_args` leaves out."""
    fields = named[item.path[0]] if named is not None else None
    is_named = fields is None or item.path[1:2] in [(field,) for field in fields]
    return is_named and has_form(item.value)


def _check_returned(
    items: Sequence[Item], carried: Set[int], scales: Sequence[Scale], named: Named
) -> None:
    names = {items[i].path[0] for i in carried}
    missing = [name for name in named or () if name not in names]
    lost = [items[x.at].path[0] for x in scales if x.at not in carried]
    if missing or len(lost) == len(scales):
        where = listed(quoted(dict.fromkeys(missing or lost)))
        raise ValueError(
            "the step must return what it carries on from step to step: no part of "
            f"what it returned has the paths, shapes and dtypes of {where}, which "
            f"{'carried_args names' if missing else 'holds the loss scale'}. Return "
            "the new state, or name the arguments that come back with carried_args=."
        )
