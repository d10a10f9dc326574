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


class FlaggedLeaves:
    """The leaves of trees, with a flag for a NaN, and for an inf that may not be.

    Args:
      trees: what to look at.
      may_be_inf: whether a leaf may hold an inf on purpose.
    """

    def __init__(self, trees: list[Any], may_be_inf: Callable[[Any], bool]) -> None:
        finite, others = [], []
        for tree in trees:
            for name, leaf in zip(*named_floats(tree), strict=True):
                (others if may_be_inf(leaf) else finite).append((name, leaf))
        self._named = finite + others
        self.flags = _nonfinite_flags(  # bool[n], on the device
            [leaf for _, leaf in finite], [leaf for _, leaf in others]
        )

    def count_bad(self, flags: list[bool]) -> list[BadLeaf]:
        """Counts elements of the flagged leaves alone: in most runs there are none."""
        pairs = zip(self._named, flags, strict=True)
        flagged = [named for named, flag in pairs if flag]
        if not flagged:
            return []
        tallies = jax.device_get(_count_nonfinite([leaf for _, leaf in flagged]))
        return [
            BadLeaf(name, jnp.size(leaf), *(high << 32 | low for high, low in pair))
            for (name, leaf), pair in zip(flagged, tallies.tolist(), strict=True)
        ]


class Suspects:
    """The trees in which there may be poison, with the flags of their leaves.

    Args:
      params: the parameters, or None.
      inner_state: the state of the optimizer.
      carried: other trees.
    """

    def __init__(self, params: Any, inner_state: Any, carried: list[Any]) -> None:
        self._flagged: dict[str, FlaggedLeaves] = {}
        if params is not None:
            # All optimizers of optax that keep an inf on purpose keep it in a scalar.
            shapes = {jnp.shape(leaf) for leaf in named_floats(params)[1]} - {()}
            self._flagged["params"] = FlaggedLeaves([params], lambda _: False)
            self._flagged["opt_state"] = FlaggedLeaves(
                [inner_state], lambda leaf: jnp.shape(leaf) not in shapes
            )
        if carried:
            # A scalar may be the best loss so far, which starts at inf.
            self._flagged["carried"] = FlaggedLeaves(
                carried, lambda leaf: jnp.ndim(leaf) == 0
            )

    @property
    def flags(self) -> dict[str, Array]:
        """`bool[n]` for each tree, on the device."""
        return {tree: leaves.flags for tree, leaves in self._flagged.items()}

    def find(
        self, flags: dict[str, list[bool]], steps: int, consecutive_skips: int
    ) -> "Poison":
        """The leaves that are poisoned, by their flags on the host."""
        bad = {tree: x.count_bad(flags[tree]) for tree, x in self._flagged.items()}
        return _find_poison(bad, steps, consecutive_skips)


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


class Poison(NamedTuple):
    """The leaves that are poisoned, and those that hold a mask."""

    leaves: dict[str, list[str]]  # by tree
    masks: dict[str, int]  # elements that are -inf, by name
    is_doubted: bool  # the poisoned leaves hold -inf alone


def _find_poison(
    bad: dict[str, list[BadLeaf]], steps: int, consecutive_skips: int
) -> Poison:
    """Separates poisoned leaves from those whose -inf may be a mask.

    A leaf is a mask if all of its non-finite elements are -inf, the moments are finite,
    it has other elements too (or waits for its first step, as a maximum does that
    starts at -inf), and steps are applied, which poison prevents: no more are skipped
    in a row than a loss scale takes to come down. Averages of a mask, at its path in
    the optimizer's state, are masks.

    Args:
      bad: the flagged leaves, by tree.
      steps: the number of steps so far.
      consecutive_skips: the number of steps skipped in a row, up to now.
    """
    steps_go_on = consecutive_skips <= COMING_DOWN
    has_good_moments = not any(leaf.others for leaf in bad.get("opt_state", []))
    masks: dict[str, int] = {}

    def is_mask(tree, leaf):
        # A maximum of one element may be -inf until it has seen something.
        may_wait = steps == 0 or (tree == "carried" and leaf.size == 1)
        is_whole = leaf.lows == leaf.size and not may_wait
        if leaf.others or is_whole or not (steps_go_on and has_good_moments):
            return False
        return tree != "opt_state" or any(_ends_with(leaf.name, x) for x in masks)

    poisoned: dict[str, list[BadLeaf]] = {}
    for tree, leaves in bad.items():
        poisoned[tree] = [leaf for leaf in leaves if not is_mask(tree, leaf)]
        if tree != "opt_state":
            masks |= {x.name: x.lows for x in leaves if x not in poisoned[tree]}
    names = {tree: [leaf.name for leaf in found] for tree, found in poisoned.items()}
    found = list(itertools.chain(*poisoned.values()))
    has_others = any(leaf.others for leaf in found)
    return Poison(names, masks, bool(found) and not steps_go_on and not has_others)


def _ends_with(name: str, param: str) -> bool:
    return param in ("", name) or name.endswith(f"/{param}")
