# SPDX-License-Identifier: Apache-2.0
"""What a step carries on: which arguments come back, loss scales, groups of leaves."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._monitor.check_args import REPORT, Arguments, Item, Path
from jls._placement import place_like
from jls._tree import common_dtype, is_array, is_extended, is_inexact

FAR = 1e300  # a distance that is not finite

# Flax keeps the amax history and the scales of its fp8 layers in variables whose
# gradients are their next values. Their numbers follow the loss scale, rightly.
_FP8 = ("_overwrite_with_gradient", "OverwriteWithGradient")

_Key = tuple[Path, str]  # the path of a tree, and the type of its nnx.Variables
_Form = frozenset[tuple[Path, tuple[int, ...]]]


class Scale(NamedTuple):
    """One loss scale among the leaves of the arguments."""

    name: str
    at: int  # the index of the leaf `loss_scale`
    state: frozenset[int]  # all leaves of the scaler's state
    counters: dict[str, int]  # leaves of the wrapper around it, by name; {} if bare
    own: frozenset[int]  # all leaves that are jls's own
    fields: dict[str, int]  # leaves of the scaler's state, by name
    spikes: dict[str, int]  # leaves of the spike policy's state, by name; {} if none

    @property
    def is_static(self) -> bool:
        return len(self.state) == 1


class Carried(NamedTuple):
    """How to read what comes back from a step."""

    sources: dict[int, Path]  # leaf of the arguments -> path in the outputs
    in_place: frozenset[int]  # leaves that are read from the NNX objects
    compared: frozenset[int]  # leaves that have to be right

    @property
    def leaves(self) -> frozenset[int]:
        return self.in_place | self.sources.keys()


# Match.


def match(
    arguments: Arguments,
    outputs: Sequence[Item],
    objects: Sequence[Item],
    scales: Sequence[Scale],
    named: Mapping[str, Sequence[str] | None] | None,
    probe: "Probe | None" = None,
) -> Carried:
    """Finds each carried argument in the outputs, or raises.

    Args:
      arguments: those of the step.
      outputs: what it returned.
      objects: what is in its NNX arguments after the step.
      scales: the loss scales in the arguments.
      named: the arguments that are carried and the fields that count, None for all of
        them; or None to find out.
      probe: a run that tells trees apart that look alike.
    """
    items = arguments.items
    outputs = [item for item in outputs if item.kind != REPORT]
    units = _units(items, ())
    with_scale = [path for path in units if _is_any_below(items, scales, path)]
    if named is None:
        trees = [path for path, at in units.items() if items[at[0]].path != path]
        keys = [path for path in units if path not in trees and _is_key(items, path)]
        sources = _assign(items, trees + keys, outputs, probe=probe)
        last = list(units).index(with_scale[-1])
        arrays = [path for path in list(units)[:last] if path not in trees + keys]
        arrays = _lone_params(items, arrays, sources, scales)
        sources |= _assign(items, arrays, outputs, sources.values(), probe)
        wanted = with_scale
    else:
        wanted = [path for path in units if path[0] in named]
        sources = _assign(items, wanted, outputs)
    for path in wanted:
        if path not in sources and path[0] not in arguments.in_place:
            inner = [part for part in _units(items, path) if part != path]
            sources |= _assign(items, inner, outputs, sources.values())
    if named is None:
        sources = _plausible(items, sources, outputs, scales, probe)
    in_place = frozenset[int]()
    new = {item.path: item.value for item in objects}
    for path in units:
        leaves = units[path]
        if path[0] not in arguments.in_place or (
            named is not None and path not in wanted
        ):
            continue
        is_changed = any(
            _differs(items[i].value, new.get(items[i].path)) for i in leaves
        )
        if is_changed or path not in sources:
            sources.pop(path, None)
            in_place |= frozenset(leaves)
    by_leaf = {
        i: (*target, *items[i].path[len(path) :])
        for path, target in sources.items()
        for i in _under(items, path)
    }
    carried = Carried(by_leaf, in_place, frozenset())
    _check_carried(arguments, carried, scales, named)
    return carried._replace(compared=_counted(arguments, carried, named))


def _units(items: Sequence[Item], prefix: Path) -> dict[Path, list[int]]:
    """The leaves below `prefix`, by the next key."""
    found = defaultdict(list)
    for i, item in enumerate(items):
        if item.path[: len(prefix)] == prefix:
            found[item.path[: len(prefix) + 1]].append(i)
    return dict(found)


def _under(items: Sequence[Item], prefix: Path) -> list[int]:
    return [i for i, x in enumerate(items) if x.path[: len(prefix)] == prefix]


def _is_any_below(items: Sequence[Item], scales: Sequence[Scale], path: Path) -> bool:
    return any(_is_below(items[scale.at], path) for scale in scales)


def _is_key(items: Sequence[Item], path: Path) -> bool:
    (at,) = _under(items, path)
    return isinstance(items[at].value, jax.Array) and is_extended(items[at].value)


def _has_params(
    items: Sequence[Item], trees: Iterable[Path], scales: Sequence[Scale]
) -> bool:
    """Whether there are parameters in the trees that come back.

    If there are, no array is taken by itself: it might be a batch, of the form of the
    predictions that come back.
    """
    floats = [i for path in trees for i in _under(items, path)]
    floats = [i for i in floats if is_inexact(items[i].value)]
    size = max(1, *(_count_of_params(items, scale) for scale in scales))
    roots = _optimizer_states(items, floats, scales, size)
    outside = [i for i in floats if not any(_is_below(items[i], x) for x in roots)]
    return len(outside) >= size


def _lone_params(
    items: Sequence[Item],
    arrays: Iterable[Path],
    trees: Iterable[Path],
    scales: Sequence[Scale],
) -> list[Path]:
    """The arguments among `arrays` that may be parameters by themselves.

    Args:
      items: the leaves of the arguments.
      arrays: the arguments that are arrays.
      trees: those that are trees, and come back.
      scales: the loss scales.
    """
    shapes = {}
    for path in arrays:
        (at,) = _under(items, path)
        leaf = items[at].value
        if isinstance(leaf, jax.Array | np.ndarray) and is_inexact(leaf):
            shapes[path] = leaf.shape
    of_one_leaf = [scale for scale in scales if _count_of_params(items, scale) == 1]
    moments = [_moments(items, scale) for scale in of_one_leaf]
    if not _has_params(items, trees, scales):
        # A scalar might be a learning rate, and look like the loss that comes back.
        large = [path for path in shapes if shapes[path] != ()]
        if large:
            return large
    else:
        # The trees may be statistics.
        forms = _forms_of_one_leaf(items, trees, scales)
        moments = [x for x in moments if not any(form <= x for form in forms)]
    return [x for x in shapes if any(((), shapes[x]) in inside for inside in moments)]


def _forms_of_one_leaf(
    items: Sequence[Item], trees: Iterable[Path], scales: Sequence[Scale]
) -> list[_Form]:
    """Of the trees with one floating-point leaf that hold no loss scale."""
    floats = (
        [i for i in _under(items, path) if is_inexact(items[i].value)]
        for path in trees
        if not _is_any_below(items, scales, path)
    )
    return [
        _form(items, items[at].path[:-1], [at])
        for (at, *more) in filter(None, floats)
        if not more
    ]


def _assign(
    items: Sequence[Item],
    wanted: Sequence[Path],
    outputs: Sequence[Item],
    taken: Iterable[Path] = (),
    probe: "Probe | None" = None,
) -> dict[Path, Path]:
    """The subtree of the outputs for each wanted subtree of the arguments.

    Of several that look alike, such as parameters and gradients, those that are nearest
    in value are taken, in the probe first; of equally near ones the first.
    """
    subtrees: dict[Path, list[Item]] = defaultdict(list)
    for item in outputs:
        for end in range(len(item.path) + 1):
            subtrees[item.path[:end]].append(item)
    alike = defaultdict(list)  # wanted subtrees that look alike
    for path in wanted:
        leaves = {items[i].path[len(path) :]: items[i] for i in _under(items, path)}
        alike[frozenset(leaves)].append((path, leaves))
    used = set(taken)
    found: dict[Path, Path] = {}
    for keys, group in sorted(alike.items(), key=lambda pair: -len(pair[0])):
        for is_like in _partition(group):
            first = is_like[0][1]
            candidates = [
                (target, leaves)
                for target, subtree in subtrees.items()
                if len(subtree) == len(keys) and not _overlap(target, used)
                for leaves in [{x.path[len(target) :]: x for x in subtree}]
                if _look_alike(first, leaves)
            ]
            for (path, _), target in _nearest(is_like, candidates, probe):
                found[path] = target
                used.add(target)
    return found


def _partition(group: list[Any]) -> list[list[Any]]:
    """Groups of subtrees with equal shapes and dtypes."""
    parts: list[list[Any]] = []
    for path, leaves in group:
        for part in parts:
            if _look_alike(part[0][1], leaves):
                part.append((path, leaves))
                break
        else:
            parts.append([(path, leaves)])
    return parts


def _look_alike(old: dict[Path, Item], new: dict[Path, Item]) -> bool:
    return old.keys() == new.keys() and all(
        _same_form(old[key].value, new[key].value) for key in old
    )


def _same_form(old: Any, new: Any) -> bool:
    """Equal shape and dtype; a Python number may become an array."""
    if not (is_array(old) and is_array(new)):
        return is_array(old) == is_array(new)
    if np.shape(old) != np.shape(new):
        return False
    if isinstance(old, np.ndarray):
        old = np.zeros((), jax.dtypes.canonicalize_dtype(old.dtype))
    return common_dtype(new, old) is not None


def _overlap(path: Path, used: Iterable[Path]) -> bool:
    return any(path[: len(x)] == x or x[: len(path)] == path for x in used)


def _nearest(
    wanted: Sequence[Any], candidates: Sequence[Any], probe: "Probe | None"
) -> list[tuple[Any, Path]]:
    """Pairs of a wanted subtree and the path of a candidate."""
    count = min(len(wanted), len(candidates))
    if len(wanted) == len(candidates) == 1 or max(len(wanted), len(candidates)) > 6:
        return list(zip(wanted, [target for target, _ in candidates], strict=False))

    def distance(i: int, j: int) -> tuple[float, float]:
        (path, old), (target, new) = wanted[i], candidates[j]
        in_probe = probe.distance(path, target) if probe else 0.0
        return in_probe, _distance(old, new)

    distances = {
        (i, j): distance(i, j)
        for i in range(len(wanted))
        for j in range(len(candidates))
    }
    pairings = (
        list(zip(some, targets, strict=True))
        for some in itertools.combinations(range(len(wanted)), count)
        for targets in itertools.permutations(range(len(candidates)), count)
    )

    def total(pairs: Any) -> list[float]:
        """How many are not finite, and the sum of the others; first in the probe."""
        sums = []
        for found in zip(*(distances[pair] for pair in pairs), strict=True):
            near = [x for x in found if x < FAR]
            sums += [len(found) - len(near), math.fsum(near)]
        return sums

    best = min(pairings, key=total)
    return [(wanted[i], candidates[j][0]) for i, j in best]


class Probe(NamedTuple):
    """A step with the loss scale at inf, from trees that all differ.

    It is skipped if it is right: then whatever is carried comes back bit for bit.
    """

    before: dict[Path, Any]  # the leaves of the arguments
    after: dict[Path, Any]  # the outputs

    def distance(self, path: Path, target: Path) -> float:
        """Between a subtree of the arguments and one of the outputs."""

        def below(tree: dict[Path, Any], root: Path) -> dict[Path, Item]:
            return {
                at[len(root) :]: Item(at, leaf, "")
                for at, leaf in tree.items()
                if at[: len(root)] == root
            }

        old, new = below(self.before, path), below(self.after, target)
        return _distance(old, new) if old.keys() == new.keys() else FAR


def probe_leaves(items: Sequence[Item], scales: Sequence[Scale]) -> list[Any]:
    """The leaves of the arguments for a probe, but for the loss scales."""
    own = own_leaves(scales)
    leaves = [item.value for item in items]
    for number, (path, at) in enumerate(_units(items, ()).items(), 1):
        if items[at[0]].path == path:
            continue
        for i in at:
            leaf = leaves[i]
            is_number = isinstance(leaf, jax.Array | np.ndarray) and is_inexact(leaf)
            if is_number and i not in own:
                other = np.asarray(as_numbers(leaf) * (1 + number / 32) + number / 128)
                leaves[i] = like(other, leaf)
    return leaves


def like(array: np.ndarray, leaf: Any) -> Any:
    """Numbers in the dtype and on the devices of `leaf`."""
    array = array.astype(leaf.dtype)
    return place_like(jnp.array(array), leaf) if isinstance(leaf, jax.Array) else array


def _plausible(
    items: Sequence[Item],
    sources: dict[Path, Path],
    outputs: Sequence[Item],
    scales: Sequence[Scale],
    probe: Probe | None,
) -> dict[Path, Path]:
    """The pairs without those that may be a batch and predictions of its form.

    What is carried comes back bit for bit in the probe, or is returned beside other
    things that are carried.
    """

    def place(target: Path) -> tuple[int, int]:
        found = [n for n, x in enumerate(outputs) if x.path[: len(target)] == target]
        return found[0], found[-1]

    states = {items[scale.at].path[:1] for scale in scales}
    accepted = {
        path: target
        for path, target in sources.items()
        if path[:1] in states or (probe and probe.distance(path, target) == 0)
    }
    ends = {path: place(target) for path, target in sources.items()}
    waiting = [path for path in sources if path not in accepted]
    while True:
        beside = [
            path
            for path in waiting
            if any(
                ends[path][0] == ends[other][1] + 1
                or ends[path][1] == ends[other][0] - 1
                for other in accepted
            )
        ]
        if not beside:
            return {path: sources[path] for path in sources if path in accepted}
        accepted |= {path: sources[path] for path in beside}
        waiting = [path for path in waiting if path not in accepted]


def _distance(old: dict[Path, Item], new: dict[Path, Item]) -> float:
    total = 0.0
    for key, item in old.items():
        if is_inexact(item.value):
            before, after = as_numbers(item.value), as_numbers(new[key].value)
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.where(after == before, 0, np.abs(after - before)).sum()
            total += float(gap) if np.isfinite(gap) else FAR
    return total


def _differs(old: Any, new: Any) -> bool:
    return is_array(old) and is_array(new) and not same(old, new)


def _check_carried(
    arguments: Arguments,
    carried: Carried,
    scales: Sequence[Scale],
    named: Mapping[str, Any] | None,
) -> None:
    paths = {arguments.items[i].path[0] for i in carried.leaves}
    missing = [name for name in named or () if name not in paths]
    lost = [arguments.items[s.at].path[0] for s in scales if s.at not in carried.leaves]
    if not missing and len(lost) < len(scales):
        return
    where = ", ".join(f"'{name}'" for name in dict.fromkeys(missing or lost))
    raise ValueError(
        "the step must return what it carries on from step to step: no part of what "
        f"it returned has the paths, shapes and dtypes of {where}, which "
        f"{'carried_args names' if missing else 'holds the loss scale'}. Return the "
        "new state, or name the arguments that come back with carried_args=."
    )


def _counted(
    arguments: Arguments,
    carried: Carried,
    named: Mapping[str, Sequence[str] | None] | None,
) -> frozenset[int]:
    """The carried arrays, without the fields that `carried_args` leaves out."""

    def counts(item: Item) -> bool:
        fields = named[item.path[0]] if named is not None else None
        return fields is None or item.path[1:2] in [(field,) for field in fields]

    items = arguments.items
    return frozenset(
        i for i in carried.leaves if is_array(items[i].value) and counts(items[i])
    )


# Loss scales.


def find_scales(items: Sequence[Item], nodes: Iterable[Path]) -> list[Scale]:
    """The loss scales below the scaler states `nodes`, or else by their names.

    A state that `nnx.split` made has lost the types of its nodes.
    """
    names = [_without_value(item.path) for item in items]
    prefixes = list(dict.fromkeys(nodes)) or [
        name[:-1] for name in names if name[-1] == "loss_scale"
    ]
    scales = []
    for prefix in prefixes:
        state = {i for i, x in enumerate(names) if x[: len(prefix)] == prefix}
        fields = {names[i][-1]: i for i in state}
        around = prefix[:-1]
        counters = {name[-1]: i for i, name in enumerate(names) if name[:-1] == around}
        if "skips" not in counters or "steps" not in counters:
            counters = {}
        policy = (*around, "spike_state")
        spikes = {
            "/".join(name[len(policy) :]): i
            for i, name in enumerate(names)
            if counters and name[: len(policy)] == policy
        }
        if "loss_scale" in fields:
            scales.append(
                Scale(
                    "/".join(prefix),
                    fields["loss_scale"],
                    frozenset(state),
                    counters,
                    frozenset([*state, *counters.values(), *spikes.values()]),
                    fields,
                    spikes,
                )
            )
    return scales


def own_leaves(scales: Sequence[Scale]) -> set[int]:
    """All leaves that are jls's own."""
    return {i for scale in scales for i in scale.own}


def _without_value(path: Path) -> Path:
    """The path of an NNX variable without its last key."""
    *above, last = path
    is_key = last in ("value", "raw_value")
    # A `SpikeState` has a field of that name.
    return tuple(above) if is_key and above[-1:] not in ([], ["spike_state"]) else path


# Groups.


class Groups(NamedTuple):
    """Carried leaves that belong together: the parameters, the moments, averages."""

    params: dict[str, list[int]]
    others: dict[str, list[int]]  # trees like the parameters
    trained: frozenset[int]  # leaves of both, without trees that may be something else

    @property
    def all(self) -> dict[str, list[int]]:
        return self.params | self.others

    @property
    def param_leaves(self) -> list[int]:
        return [i for tree in self.params.values() for i in tree]


def find_groups(
    arguments: Arguments, carried: Carried, scales: Sequence[Scale]
) -> Groups:
    """The parameters, and every carried tree that has their paths and shapes."""
    items = arguments.items
    own = own_leaves(scales)
    floats = [
        i
        for i in sorted(carried.compared - own)
        if is_inexact(items[i].value) and not _is_fp8(items[i])
    ]
    sizes = [_count_of_params(items, scale) for scale in scales]
    optimizers = _optimizer_states(items, floats, scales, max(sizes))
    trees = defaultdict(list)
    for i in floats:
        if not any(_is_below(items[i], path) for path in optimizers):
            trees[_root(items[i], optimizers), items[i].kind].append(i)
    params = {key: x for key, x in trees.items() if len(x) in sizes}
    params = params or _parts(items, trees, sizes) or trees
    forms = {key: _form(items, key[0], x) for key, x in params.items()}
    clear = forms
    if len(forms) > len(scales):
        moments = [_moments(items, scale) for scale in scales]
        forms = _like_moments(forms, moments)
        clear = forms if len(forms) <= len(scales) else _clear(forms, moments)
    shapes = dict(pair for form in (clear or forms).values() for pair in form)
    others = defaultdict(list)
    for i in sorted(set(floats) - {i for key in forms for i in params[key]}):
        path = _without_value(items[i].path)
        for start in range(1, len(path) + 1):
            if shapes.get(path[start:]) == np.shape(items[i].value):
                others["/".join(path[:start])].append(i)
                break
    named = {_name(path, kind): params[path, kind] for path, kind in forms}
    counts = set(map(len, clear.values()))
    trained = [params[key] for key in clear]
    trained += [leaves for leaves in others.values() if len(leaves) in counts]
    return Groups(named, dict(others), frozenset(itertools.chain(*trained)))


def _parts(
    items: Sequence[Item], trees: Mapping[_Key, list[int]], sizes: Sequence[int]
) -> dict[_Key, list[int]]:
    """The largest parts of trees that have as many leaves as a wrapper has flags."""
    found: dict[_Key, list[int]] = {}
    for (root, kind), leaves in trees.items():
        for end in range(len(root) + 1, max(len(items[i].path) for i in leaves)):
            parts = defaultdict(list)
            for i in leaves:
                if not any(_is_below(items[i], path) for path, _ in found):
                    parts[items[i].path[:end], kind].append(i)
            found |= {key: part for key, part in parts.items() if len(part) in sizes}
    return found


def _form(items: Sequence[Item], root: Path, leaves: list[int]) -> _Form:
    """The paths below `root`, with the shapes."""
    return frozenset(
        (_without_value(items[i].path)[len(root) :], np.shape(items[i].value))
        for i in leaves
    )


def _moments(items: Sequence[Item], scale: Scale) -> _Form:
    """Every end of a path in the state of a wrapper, with the shape of its leaf."""
    found = set[tuple[Path, tuple[int, ...]]]()
    for i, item in enumerate(items):
        is_inside = _is_below(item, _outermost(items, scale)) and i not in scale.own
        if is_inside and is_inexact(item.value):
            path = _without_value(item.path)
            ends = (path[start:] for start in range(1, len(path) + 1))
            found |= {(end, np.shape(item.value)) for end in ends}
    return frozenset(found)


def _like_moments(
    forms: Mapping[_Key, _Form], moments: Sequence[_Form]
) -> dict[_Key, _Form]:
    """The trees of the form of a wrapper's moments; all, if one has no such moments.

    A buffer or another model may have as many leaves as the parameters.
    """
    if not all(any(form <= inside for form in forms.values()) for inside in moments):
        return dict(forms)
    return {
        key: form
        for key, form in forms.items()
        if any(form <= inside for inside in moments)
    }


def _clear(forms: Mapping[_Key, _Form], moments: Sequence[_Form]) -> dict[_Key, _Form]:
    """Of more trees than wrappers those like its moments, or like one another."""
    return {
        key: form
        for key, form in forms.items()
        if any(form <= inside for inside in moments)
        or (len(form) > 1 and list(forms.values()).count(form) > 1)
    }


def _optimizer_states(
    items: Sequence[Item], floats: Sequence[int], scales: Sequence[Scale], size: int
) -> list[Path]:
    """The largest subtrees around the loss scales that leave room for parameters."""
    paths = [_outermost(items, scale) for scale in scales]
    for depth in range(1, max(map(len, paths)) + 1):
        roots = [path[:depth] for path in paths]
        outside = [i for i in floats if not any(_is_below(items[i], x) for x in roots)]
        if len(outside) >= max(size, 1):
            return roots
    return [path[:1] for path in paths]


def _outermost(items: Sequence[Item], scale: Scale) -> Path:
    """The path of the wrapper's state, or of the scaler's if it is bare."""
    scaler_state = _without_value(items[scale.at].path)[:-1]
    return scaler_state[:-1] if scale.counters else scaler_state


def _root(item: Item, optimizers: Sequence[Path]) -> Path:
    """The path of the tree that `item` is in: where it parts from the optimizers."""
    depths = [0]
    for path in optimizers:
        pairs = zip(item.path, path, strict=False)
        depths.append(
            sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))
        )
    return item.path[: max(depths) + 1]


def _is_fp8(item: Item) -> bool:
    return item.kind in _FP8 or any(key in _FP8 for key in item.path)


def has_fp8(items: Sequence[Item]) -> bool:
    return any(map(_is_fp8, items))


def _is_below(item: Item, prefix: Path) -> bool:
    return item.path[: len(prefix)] == prefix


def _count_of_params(items: Sequence[Item], scale: Scale) -> int:
    """How many floating-point parameters the wrapper has flags for; -1 if unknown."""
    flags = scale.counters.get("nonfinite_leaves")
    return -1 if flags is None else np.shape(items[flags].value)[-1]


def _name(path: Path, kind: str) -> str:
    return "/".join(path) + (f" ({kind})" if kind else "")


# Values on the host.


def as_numpy(leaf: Any) -> np.ndarray:
    if is_array(leaf) and is_extended(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def as_numbers(leaf: Any) -> np.ndarray:
    """A floating-point leaf in a width in which differences are exact enough."""
    value = as_numpy(leaf)
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def same(old: Any, new: Any, exempt: Any | None = None) -> bool:
    """Equal numbers; NaN equals NaN, and what is subnormal may have become 0.

    An element at index `exempt` may differ.
    """
    a, b = as_numpy(old), as_numpy(new)
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    tiny = float(jnp.finfo(a.dtype).tiny)
    with np.errstate(invalid="ignore"):
        x, y = as_numbers(a), as_numbers(b)
        equal = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) < tiny)
    if exempt is not None:
        equal = np.array(equal)
        equal[exempt] = True
    return bool(np.all(equal))
