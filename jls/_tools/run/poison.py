# SPDX-License-Identifier: Apache-2.0
"""Finds an inf or a NaN that no further step removes, and masks of -inf."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jls._reduce import any_nan, count_true, finite_leaves
from jls._tools.run.verdict import COMING_DOWN
from jls._tree import named_floats, widen


class BadLeaf(NamedTuple):
    """A flagged leaf."""

    name: str
    size: int
    others: int  # elements that are NaN or +inf
    lows: int  # elements that are -inf


class Suspects(NamedTuple):
    """Leaves that may be poisoned, with a flag for a NaN, and for an inf that is none.

    Some leaves may hold an inf on purpose.
    """

    named: list[tuple[str, Any]]
    flags: Array  # bool[n], on the device


def suspects_in(params: Any, inner_state: Any, carried: list[Any]) -> dict[str, Any]:
    """The `Suspects` by the tree that they are in.

    Args:
      params: the parameters; None if neither they nor the optimizer's state count.
      inner_state: the state of the optimizer.
      carried: other trees.
    """
    found = {}
    if params is not None:
        # All optimizers of optax that keep an inf on purpose keep it in a scalar.
        shapes = {jnp.shape(leaf) for leaf in named_floats(params)[1]} - {()}
        found["params"] = _flagged([params], lambda _: False)
        found["opt_state"] = _flagged(
            [inner_state], lambda leaf: jnp.shape(leaf) not in shapes
        )
    if carried:
        # A scalar may be the best loss so far, which starts at inf.
        found["carried"] = _flagged(carried, lambda leaf: jnp.ndim(leaf) == 0)
    return found


def _flagged(trees: list[Any], may_be_inf: Callable[[Any], bool]) -> Suspects:
    finite, others = [], []
    for tree in trees:
        for name, leaf in zip(*named_floats(tree), strict=True):
            (others if may_be_inf(leaf) else finite).append((name, leaf))
    leaves = ([leaf for _, leaf in named] for named in (finite, others))
    return Suspects(finite + others, _nonfinite_flags(*leaves))


def _count_bad(named: list[tuple[str, Any]]) -> list[BadLeaf]:
    """Counts elements of the flagged leaves alone: in most runs there are none."""
    if not named:
        return []
    tallies = jax.device_get(_count_nonfinite([leaf for _, leaf in named]))
    return [
        BadLeaf(name, jnp.size(leaf), *(high << 32 | low for high, low in pair))
        for (name, leaf), pair in zip(named, tallies.tolist(), strict=True)
    ]


@jax.jit
def _nonfinite_flags(leaves: list[Any], may_be_inf: list[Any]) -> Array:
    """`bool[n]`: whether each leaf holds a NaN, or an inf unless it may be inf."""
    is_nan = [any_nan([leaf]) for leaf in may_be_inf]
    return jnp.concatenate([~finite_leaves(leaves), jnp.array(is_nan, jnp.bool_)])


@jax.jit
def _count_nonfinite(leaves: list[Any]) -> Array:
    """Numbers of NaN and +inf, and of -inf: `u32[n, 2, 2]`, in base 2**32."""

    def tally(leaf):
        wide = widen(leaf)
        if jnp.iscomplexobj(wide):
            return count_true([~jnp.isfinite(wide), jnp.zeros_like(wide, jnp.bool_)])
        return count_true([jnp.isnan(wide) | (wide == jnp.inf), wide == -jnp.inf])

    return jnp.stack([tally(leaf) for leaf in leaves])


def find_poison(
    flagged: dict[str, list[tuple[str, Any]]], steps: int, consecutive_skips: int
) -> tuple[dict[str, list[str]], dict[str, int], bool]:
    """Separates poisoned leaves from those whose -inf may be a mask.

    A leaf is a mask if all of its non-finite elements are -inf, the moments are finite,
    it has other elements too (or waits for its first step, as a maximum does that
    starts at -inf), and steps are applied, which poison prevents: no more are skipped
    in a row than a loss scale takes to come down. Averages of a mask, at its path in
    the optimizer's state, are masks.

    Args:
      flagged: the leaves with a flag, by tree.
      steps: the number of steps so far.
      consecutive_skips: the number of steps skipped in a row, up to now.

    Returns:
      The names of the poisoned leaves by tree, the numbers of elements that are -inf by
      the name of a mask, and whether the poisoned leaves hold only -inf.
    """
    bad = {tree: _count_bad(named) for tree, named in flagged.items()}
    steps_go_on = consecutive_skips <= COMING_DOWN
    has_good_moments = not any(leaf.others for leaf in bad.get("opt_state", []))
    masks: dict[str, int] = {}

    def is_mask(tree, leaf):
        # A maximum of one element may be -inf until it has seen something.
        may_wait = steps == 0 or (tree == "carried" and leaf.size == 1)
        is_whole = leaf.lows == leaf.size and not may_wait
        if leaf.others or is_whole or not (steps_go_on and has_good_moments):
            return False
        return tree != "opt_state" or any(
            x in ("", leaf.name) or leaf.name.endswith(f"/{x}") for x in masks
        )

    poisoned: dict[str, list[BadLeaf]] = {}
    for tree, leaves in bad.items():
        poisoned[tree] = [leaf for leaf in leaves if not is_mask(tree, leaf)]
        if tree != "opt_state":
            masks |= {x.name: x.lows for x in leaves if x not in poisoned[tree]}
    names = {tree: [leaf.name for leaf in found] for tree, found in poisoned.items()}
    found = list(itertools.chain(*poisoned.values()))
    has_others = any(leaf.others for leaf in found)
    return names, masks, bool(found) and not steps_go_on and not has_others
