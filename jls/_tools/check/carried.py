# SPDX-License-Identifier: Apache-2.0
"""Matches the results of a step to its arguments.

An argument and a result with equal paths, shapes and dtypes are a pair if the program
proves it: in a skipped step the result is the argument. Next come results that are
computed from the argument element by element, as new parameters are. The others pair in
order, if there are equally many.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jls._text import join, listed, quoted
from jls._tools.check.leaves import has_form, same_form, under, units
from jls._tools.reading.arguments import REPORT, Arguments, Item, Keys
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale
from jls._tree import is_extended, is_inexact

Named = Mapping[str, Sequence[str] | None] | None


class Carried(NamedTuple):
    """The arguments' leaves that a step returns, and their paths in the results."""

    sources: dict[int, Keys]  # leaf of the arguments -> path in the outputs
    in_place: frozenset[int]  # leaves that are read from the NNX objects
    compared: frozenset[int]  # leaves that have to be right
    doubtful: frozenset[int]  # leaves taken as data, though a result looks like them

    @property
    def leaves(self) -> frozenset[int]:
        return self.in_place | self.sources.keys()


# How sure a pair is, from least to most.
_AGAINST, _FROZEN, _ALIKE, _FOLLOWS, _PROVED = range(5)


class _Pairing:
    """Pairs subtrees of the arguments with subtrees of the outputs."""

    def __init__(
        self,
        items: Sequence[Item],
        outputs: Sequence[Item],
        scales: Sequence[Scale],
        reading: Reading | None,
    ) -> None:
        self.items, self.scales, self.reading = items, scales, reading
        self.sources: dict[Keys, Keys] = {}  # subtree of the arguments -> of outputs
        self.doubtful: set[Keys] = set()
        self.subtrees: dict[Keys, dict[Keys, Item]] = defaultdict(dict)
        for item in outputs:
            for end in range(len(item.path) + 1):
                self.subtrees[item.path[:end]][item.path[end:]] = item
        self._order = {path: n for n, path in enumerate(self.subtrees)}

    def pair(self, wanted: Sequence[Keys], is_free: bool) -> None:
        """Pairs each of `wanted`, as far as it can.

        Args:
          wanted: subtrees of the arguments.
          is_free: whether they may be data.
        """
        alike: dict[Any, list[Keys]] = defaultdict(list)
        for path in wanted:
            alike[frozenset(self._leaves(path))].append(path)
        # Larger ones first: a part of one is no result by itself.
        for keys in sorted(alike, key=len, reverse=True):
            for group in self._partition(alike[keys]):
                self._pair_alike(group, is_free)

    def _leaves(self, path: Keys) -> dict[Keys, int]:
        return {self.items[i].path[len(path) :]: i for i in under(self.items, path)}

    def _partition(self, paths: list[Keys]) -> list[list[Keys]]:
        """Groups of subtrees with equal shapes and dtypes."""
        parts: list[list[Keys]] = []
        for path in paths:
            mine = self._leaves(path)
            for part in parts:
                first = self._leaves(part[0])
                if all(
                    same_form(self.items[first[key]].value, self.items[mine[key]].value)
                    for key in mine
                ):
                    part.append(path)
                    break
            else:
                parts.append([path])
        return parts

    def _pair_alike(self, group: list[Keys], is_free: bool) -> None:
        first = self._leaves(group[0])
        targets = [
            target
            for target, leaves in self.subtrees.items()
            if leaves.keys() == first.keys()
            and not self.is_used(target)
            and all(
                same_form(self.items[i].value, leaves[key].value)
                for key, i in first.items()
            )
        ]
        sure = {(p, t): self._sureness(p, t) for p in group for t in targets}
        while targets and group:
            best = max(
                ((p, t) for p in group for t in targets),
                key=lambda pair: (sure[pair], -self._order[pair[1]]),
            )
            if sure[best] < _FOLLOWS:
                break
            self._take(*best, group, targets)
        if not group or not targets:
            return
        if self._pairs_in_order(group, targets, sure, is_free):
            for pair in list(zip(group, targets, strict=True)):
                self._take(*pair, group, targets)
        elif not is_free:
            self._raise_ambiguous(group, targets)
        else:
            self.doubtful |= {
                p for p in group for t in targets if self._may_be_state(p, t)
            }

    def _take(
        self, path: Keys, target: Keys, group: list[Keys], targets: list[Keys]
    ) -> None:
        self.sources[path] = target
        group.remove(path)
        targets[:] = [t for t in targets if not _are_nested(t, target)]

    def _pairs_in_order(
        self,
        group: list[Keys],
        targets: list[Keys],
        sure: Mapping[tuple[Keys, Keys], int],
        is_free: bool,
    ) -> bool:
        pairs = list(zip(group, targets, strict=False))
        least = _ALIKE if is_free else _FROZEN
        if len(group) != len(targets) or any(sure[pair] < least for pair in pairs):
            return False
        if not is_free or self.reading is None:
            return True
        # Floats that the program computes without these, such as predictions, are no
        # state. For counts and keys the program does not show that.
        return not any(
            is_inexact(self.items[i].value) for p in group for i in under(self.items, p)
        )

    def _sureness(self, path: Keys, target: Keys) -> int:
        if self.reading is None:
            return _ALIKE
        proved = frozen = follows = against = 0
        leaves = self._leaves(path)
        for key, i in leaves.items():
            result = self.reading.outputs.get((*target, *key))
            if result is None:
                continue
            kept = self.reading.leaf_of(result.skipped)
            if kept is not None and kept != i:
                against += self._is_outside(kept, path)
            is_same = self.reading.leaf_of(result.now) == i
            proved += kept == i and not is_same
            frozen += is_same
            follows += bool(result.now.follows & self.reading.bit(i))
        if proved:
            return _PROVED
        if against:
            return _AGAINST
        if frozen == len(leaves):
            return _FROZEN
        return _FOLLOWS if follows else _ALIKE

    def _may_be_state(self, path: Keys, target: Keys) -> bool:
        """Whether a whole argument goes into a result that looks like it."""
        if len(path) > 1 or self.reading is None:
            return False
        for key, i in self._leaves(path).items():
            result = self.reading.outputs.get((*target, *key))
            # What comes back as it was, such as a frozen teacher, is no new state.
            if result is None or self.reading.leaf_of(result.now) == i:
                continue
            if result.now.depends & self.reading.bit(i):
                return True
        return False

    def _is_outside(self, leaf: int, path: Keys) -> bool:
        return self.items[leaf].path[: len(path)] != path

    def is_used(self, target: Keys) -> bool:
        return any(_are_nested(target, x) for x in self.sources.values())

    def _raise_ambiguous(self, group: list[Keys], targets: list[Keys]) -> None:
        names = listed(quoted(join(*path) for path in group))
        found = listed([join(*path) or "all of it" for path in targets])
        if len(targets) == 1:
            raise ValueError(
                f"the step must return what it carries on from step to step, but its "
                f"result {found} is none of the new {names}. Return the new state, or "
                "name the arguments that come back with carried_args=."
            )
        raise ValueError(
            f"what comes back from the step must be clear, but {names} may be any of "
            f"its results {found}. Name the arguments that come back, by position or "
            "name: jls.check_step(step, ..., carried_args=(0, 1)); and return the new "
            "state in the order of the arguments."
        )


def _are_nested(one: Keys, other: Keys) -> bool:
    return one[: len(other)] == other or other[: len(one)] == one


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
    items = arguments.items
    outputs = [item for item in outputs if item.variable_type != REPORT]
    pairing = _Pairing(items, outputs, scales, reading)
    tops = units(items)
    states = [path for path in tops if any(_holds(items, x, path) for x in scales)]
    if named is None:
        wanted = states
        trees = [path for path, at in tops.items() if items[at[0]].path != path]
        pairing.pair(states, is_free=False)
        pairing.pair([x for x in trees if x not in pairing.sources], is_free=True)
        _pair_parts(pairing, [x for x in trees if x not in pairing.sources])
        arrays = [path for path in tops if path not in trees]
        _pair_arrays(pairing, list(tops), arrays, states)
    else:
        wanted = [path for path in tops if path[0] in named]
        pairing.pair(wanted, is_free=False)
    for path in wanted:
        if path not in pairing.sources and path[0] not in arguments.in_place:
            inner = [part for part in units(items, path) if part != path]
            pairing.pair(inner, is_free=named is None)
    sources = pairing.sources
    in_place = frozenset[int]()
    for path, leaves in tops.items():
        if path[0] not in arguments.in_place or (
            named is not None and path not in wanted
        ):
            continue
        if path not in sources or any(objects.get(i) for i in leaves):
            sources.pop(path, None)
            in_place |= frozenset(leaves)
    by_leaf = {
        i: (*target, *items[i].path[len(path) :])
        for path, target in sources.items()
        for i in under(items, path)
    }
    doubtful = {i for path in pairing.doubtful for i in under(items, path)}
    carried = Carried(by_leaf, in_place, frozenset(), frozenset(doubtful))
    carried = carried._replace(doubtful=carried.doubtful - carried.leaves)
    _check_returned(arguments, carried, scales, named)
    return carried._replace(compared=_counted(arguments, carried, named))


def _pair_parts(pairing: _Pairing, trees: Iterable[Keys]) -> None:
    """Pairs parts of trees that come back by themselves."""
    for path in trees:
        parts = [part for part in units(pairing.items, path) if part != path]
        if parts and pairing.reading is not None:
            found = dict(pairing.sources)
            pairing.pair(parts, is_free=True)
            if pairing.sources == found:
                _pair_parts(pairing, parts)


def _pair_arrays(
    pairing: _Pairing, tops: list[Keys], arrays: list[Keys], states: list[Keys]
) -> None:
    """Pairs arguments that are single arrays: parameters, counts, keys, or data."""
    last = max((tops.index(path) for path in states), default=-1)
    items = pairing.items
    for path in arrays:
        (at,) = under(items, path)
        leaf = items[at].value
        before = tops[: tops.index(path)]
        if not isinstance(leaf, jax.Array | np.ndarray):
            continue
        is_key = is_extended(leaf) or leaf.dtype == np.uint32
        pairing.pair([path], is_free=True)
        if path in pairing.sources:
            if _is_no_state(pairing, path, before):
                del pairing.sources[path]
            continue
        is_first = tops.index(path) < last
        is_first &= pairing.reading is None and not is_key
        if is_first and all(x in pairing.sources for x in before):
            _pair_first(pairing, path)


def _is_no_state(pairing: _Pairing, path: Keys, before: list[Keys]) -> bool:
    """Whether nothing but equal form makes two arrays a pair."""
    (at,) = under(pairing.items, path)
    reading, target = pairing.reading, pairing.sources[path]
    if reading is None:
        return True
    result = reading.outputs[target]
    if reading.leaf_of(result.now) == at:
        return True
    if reading.leaf_of(result.skipped) == at:
        return False
    if result.now.follows & reading.bits_of_updates:
        return False
    return not all(x in pairing.sources for x in before)


def _pair_first(pairing: _Pairing, path: Keys) -> None:
    """Pairs an array before the state with the first result of its form."""
    (at,) = under(pairing.items, path)
    for target, leaves in pairing.subtrees.items():
        is_free = list(leaves) == [()] and not pairing.is_used(target)
        if is_free and same_form(pairing.items[at].value, leaves[()].value):
            pairing.sources[path] = target
            return


def _holds(items: Sequence[Item], scale: Scale, path: Keys) -> bool:
    return items[scale.at].path[: len(path)] == path


def _check_returned(
    arguments: Arguments,
    carried: Carried,
    scales: Sequence[Scale],
    named: Named,
) -> None:
    paths = {arguments.items[i].path[0] for i in carried.leaves}
    missing = [name for name in named or () if name not in paths]
    lost = [arguments.items[s.at].path[0] for s in scales if s.at not in carried.leaves]
    if not missing and len(lost) < len(scales):
        return
    where = listed(quoted(dict.fromkeys(missing or lost)))
    raise ValueError(
        "the step must return what it carries on from step to step: no part of what "
        f"it returned has the paths, shapes and dtypes of {where}, which "
        f"{'carried_args names' if missing else 'holds the loss scale'}. Return the "
        "new state, or name the arguments that come back with carried_args=."
    )


def _counted(arguments: Arguments, carried: Carried, named: Named) -> frozenset[int]:
    """The carried arrays, without the fields that `carried_args` leaves out."""

    def counts(item: Item) -> bool:
        fields = named[item.path[0]] if named is not None else None
        return fields is None or item.path[1:2] in [(field,) for field in fields]

    items = arguments.items
    return frozenset(
        i for i in carried.leaves if has_form(items[i].value) and counts(items[i])
    )
