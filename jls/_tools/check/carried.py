# SPDX-License-Identifier: Apache-2.0
"""Matches the results of a step to its arguments.

Only an argument and a result with equal paths, shapes and dtypes can be a pair. First
come those that the program proves: in a skipped step the result is the argument, or it
is computed from it element by element, as new parameters are. What is left pairs in
order if there are equally many and nothing contradicts it; a bare array only if all
arguments before it come back.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._text import join, listed, quoted
from jls._tools.check.findings import StepError
from jls._tools.check.leaves import subtrees
from jls._tools.reading.arguments import AUX, REPORT, Arguments, Item, Keys
from jls._tools.reading.reading import Reading, Result
from jls._tools.reading.scales import Scale
from jls._tree import is_array, is_inexact

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

    def pick(
        self,
        items: Sequence[Item],
        outputs: Mapping[Keys, Any],
        objects: Mapping[Keys, Any],
    ) -> dict[int, Any]:
        """What came back, by leaf; not what the step has donated.

        Args:
          items: the arguments.
          outputs: something for each result, by path.
          objects: something for each leaf of the NNX arguments, by path.
        """
        found = {i: outputs.get(path) for i, path in self.sources.items()}
        found |= {i: objects.get(items[i].path) for i in self.in_place}
        return {i: x for i, x in found.items() if x is not None}


def match(
    arguments: Arguments,
    outputs: Sequence[Item],
    scales: Sequence[Scale],
    named: Named,
    reading: Reading | None,
) -> Carried:
    """Finds each carried argument in the outputs, or raises.

    Args:
      arguments: those of the step.
      outputs: its results.
      scales: the loss scales in the arguments.
      named: the arguments that are carried and the fields that count, None for all of
        them; or None to find out.
      reading: the facts from the program, if it can be read.
    """
    items = arguments.items
    tops = list(dict.fromkeys(x.path[:1] for x in items))
    if reading is None and named is None:
        names = listed([name for (name,) in tops])
        raise StepError(
            "carried must name the arguments that come back, since there is no "
            f"program to read, out of {names}",
            "Write their positions or names: "
            "jls.check_step(step, ..., carried=(0, 1)).",
        )
    holders = [items[x.at].path[0] for x in scales] if named is None else named
    states = [x for x in tops if x[0] in holders]
    others = [x for x in tops if named is None and x not in states]
    in_aux = [x for x in outputs if x.variable_type == AUX]
    # A report is for people, unless the caller says that it comes back.
    if named is None:
        outputs = [x for x in outputs if x.variable_type != AUX]
    pairs = _Pairs(items, outputs, reading)
    pairs.pair(states, may_be_data=False)
    pairs.check_clear(states)
    alone = [x for x in others if items[pairs.units[x][0]].path == x]
    trees = [x for x in [*states, *others] if x not in alone]
    pairs.pair([x for x in pairs.units if x[:1] in trees])
    for top in alone:
        is_next = pairs.found.keys() >= {*tops[: tops.index(top)]}
        pairs.pair([top], in_order=is_next)
    doubtful = {i for x in others if pairs.may_be_state(x) for i in pairs.units[x]}
    aux, free = _Pairs(items, in_aux, reading), [x for x in others if x in trees]
    doubtful |= {i for x in free if aux.may_be_state(x) for i in pairs.units[x]}
    changed = set[int]()
    if reading is not None:
        now = [reading.objects.get(x.path) for x in items]
        changed = {i for i, x in enumerate(now) if x and reading.leaf_of(x.now) != i}
    in_place = {
        i
        for top in [*states, *others]
        if top[0] in arguments.in_place
        and (top not in pairs.found or changed.intersection(pairs.units[top]))
        for i in pairs.units[top]
    }
    sources = {
        i: (*target, *items[i].path[len(unit) :])
        for unit, target in pairs.found.items()
        for i in pairs.units[unit]
        if i not in in_place
    }
    carried = in_place | sources.keys()
    _check_returned(items, carried, scales, named)
    compared = {i for i in carried if _counts(items[i], named)}
    found = in_place, compared, doubtful - carried
    return Carried(sources, *map(frozenset, found))


class _Fact(NamedTuple):
    """The program's evidence that a result is the next value of a leaf."""

    rank: int  # 0 if it proves nothing, 1 if a skip leaves it: the lower the surer
    is_frozen: bool  # it comes back as it was: an old copy, or what is only read
    is_computed: bool  # it is another value, into which the leaf goes


def _fact(reading: Reading, leaf: int, result: Result) -> _Fact:
    now, bit = result.now, reading.bit(leaf)
    kept, is_frozen = reading.leaf_of(result.skipped), reading.leaf_of(now) == leaf
    rank = int(kept == leaf and not is_frozen)
    if kept is None and now.follows & bit:
        rank = 1 + now.follows.bit_count()  # of an average both trees
    return _Fact(rank, is_frozen, bool(now.depends & bit) and not is_frozen)


class _Pairs:
    """Pairs units, subtrees of the arguments, with subtrees of the results.

    Of one form are those of equal paths, shapes and dtypes.
    """

    def __init__(
        self, items: Sequence[Item], outputs: Sequence[Item], reading: Reading | None
    ) -> None:
        self.found: dict[Keys, Keys] = {}  # unit -> subtree of the results
        self.units, self._items, self._reading = subtrees(items), items, reading
        results = [x for x in outputs if x.variable_type != REPORT]
        self._alike = defaultdict[Any, list[Keys]](list)  # the results of each form
        for path, leaves in subtrees(results).items():
            self._alike[_form(results, path, leaves)].append(path)

    def pair(
        self, wanted: Iterable[Keys], may_be_data: bool = True, in_order: bool = True
    ) -> None:
        """Pairs units, as far as it can; a whole before its parts.

        Args:
          wanted: the units.
          may_be_data: whether they may be data.
          in_order: whether what the program leaves open pairs in order.
        """
        by_form = defaultdict[Any, list[Keys]](list)
        for unit in sorted(wanted, key=lambda x: -len(self.units[x])):
            by_form[self._form_of(unit)].append(unit)
        for form, units in by_form.items():
            units = _apart(units, self.found)
            proved = [
                (min(ranks), pair)
                for pair in itertools.product(units, self._targets(form))
                if (ranks := [x.rank for x in self._facts(*pair) if x.rank])
            ]
            for _, (unit, target) in sorted(proved, key=lambda x: x[0]):
                if unit not in self.found and target not in self.found.values():
                    self.found[unit] = target
            units, targets = _apart(units, self.found), self._targets(form)
            pairs = list(zip(units, targets, strict=False))
            is_open = may_be_data and any(self._looks_like_data(*x) for x in pairs)
            if in_order and len(units) == len(targets) and not is_open:
                self.found |= dict(pairs)

    def check_clear(self, states: Sequence[Keys]) -> None:
        """Raises if a state has not been paired, but looks like a result."""
        left = [unit for unit in states if unit not in self.found]
        targets = [x for unit in left for x in self._targets(self._form_of(unit))]
        if targets:
            names = listed(quoted(join(*unit) for unit in left))
            results = listed([join(*x) or "all of it" for x in dict.fromkeys(targets)])
            raise StepError(
                f"what comes back from the step must be clear, but {names} may be any "
                f"of its results {results}",
                "Name the arguments that come back, by position or name: "
                "jls.check_step(step, ..., carried=(0, 1)); and return the new state "
                "in the order of the arguments.",
            )

    def may_be_state(self, unit: Keys) -> bool:
        """Whether a result that looks like a unit is computed from it."""
        targets = self._targets(self._form_of(unit))
        return any(x.is_computed for y in targets for x in self._facts(unit, y))

    def _form_of(self, unit: Keys) -> Any:
        return _form(self._items, unit, self.units[unit])

    def _targets(self, form: Any) -> list[Keys]:
        """The results of a form that are not taken."""
        return _apart(self._alike[form], self.found.values())

    def _facts(self, unit: Keys, target: Keys) -> list[_Fact]:
        if self._reading is None:
            return []
        ends = {i: self._items[i].path[len(unit) :] for i in self.units[unit]}
        results = {i: self._reading.outputs.get((*target, *x)) for i, x in ends.items()}
        return [_fact(self._reading, i, x) for i, x in results.items() if x is not None]

    def _looks_like_data(self, unit: Keys, target: Keys) -> bool:
        # Floats that the program computes without these, such as predictions, are no
        # state. Of counts and keys the program does not show that.
        has_floats = any(is_inexact(self._items[i].value) for i in self.units[unit])
        return has_floats or all(x.is_frozen for x in self._facts(unit, target))


def _apart(paths: Iterable[Keys], others: Collection[Keys]) -> list[Keys]:
    """The subtrees that have no leaf in common with others."""
    return [
        path
        for path in paths
        if not any(x[: len(path)] == path[: len(x)] for x in others)
    ]


def _form(items: Sequence[Item], path: Keys, leaves: Sequence[int]) -> frozenset[Any]:
    """The paths of leaves below a path, and their shapes and dtypes.

    A Python number has those of its array.
    """
    found = [(items[i].path[len(path) :], items[i].value) for i in leaves]
    return frozenset(
        (x, np.shape(y), jnp.result_type(y)) if _has_form(y) else x for x, y in found
    )


def _has_form(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _counts(item: Item, named: Named) -> bool:
    """Whether a carried leaf is in no field that `carried` leaves out."""
    fields = named[item.path[0]] if named is not None else None
    is_named = fields is None or item.path[1:2] in [(field,) for field in fields]
    return is_named and _has_form(item.value)


def _check_returned(
    items: Sequence[Item], carried: Set[int], scales: Sequence[Scale], named: Named
) -> None:
    names = {items[i].path[0] for i in carried}
    missing = [name for name in named or () if name not in names]
    lost = [items[x.at].path[0] for x in scales if x.at not in carried]
    if missing or len(lost) == len(scales):
        where = listed(quoted(dict.fromkeys(missing or lost)))
        raise StepError(
            "the step must return what it carries on from step to step: no part of "
            f"what it returned has the paths, shapes and dtypes of {where}, which "
            f"{'carried names' if missing else 'holds the loss scale'}",
            "Return the new state, or name the arguments that come back with carried=.",
        )
