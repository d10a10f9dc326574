# SPDX-License-Identifier: Apache-2.0
"""Where in a state the loss scale is: optax nests, Flax wraps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jls._types import LossScaledState


def is_scaler_state(node: Any) -> bool:
    """Whether `node` is a policy's state: a NamedTuple with an array `loss_scale`."""
    if "loss_scale" not in getattr(node, "_fields", ()):
        return False
    # In a NamedTuple of the user's, a field of that name may hold the policy's state.
    return not isinstance(node.loss_scale, tuple)


def is_wrapper_state(node: Any) -> bool:
    return isinstance(node, LossScaledState)


def find(state: Any, is_node: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Path and value of each outermost node of `state` that `is_node` accepts."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_node)
    return [(jax.tree_util.keystr(p), node) for p, node in nodes if is_node(node)]


def unwrapped(tree: Any) -> Any:
    """`tree` with arrays for leaves: NNX keeps each leaf in a variable of its own."""
    return jax.tree.map(
        lambda leaf: leaf.get_value() if hasattr(leaf, "get_value") else leaf,
        tree,
        is_leaf=lambda leaf: hasattr(leaf, "get_value"),
    )


def without_loss_scale(state: Any) -> ValueError:
    return ValueError(
        f"state must carry a loss scale, got {type(state).__name__} without one. "
        "Pass a LossScaleState, or the state of an optimizer made by "
        "jls.loss_scaled or jls.skip_nonfinite."
    )


def locate(state: Any) -> Any:
    """The one policy state in `state`, or an error that says where there are two."""
    found = find(state, is_scaler_state)
    if not found:
        raise without_loss_scale(state)
    if len(found) > 1:
        paths = ", ".join(f"'{path}'" for path, _ in found)
        raise ValueError(
            f"state must carry exactly one loss scale, got {len(found)}: at {paths}. "
            "Pass the part of the state that is meant."
        )
    scaler_state = unwrapped(found[0][1])
    shape = jnp.shape(scaler_state.loss_scale)
    if shape != ():
        raise ValueError(
            f"loss_scale must have shape (), got shape {shape} at '{found[0][0]}'. If "
            "jax.vmap stacked it: keep the loss scale outside of the vmap (one for all "
            "examples), or vmap the whole train step (one state for each member)."
        )
    return scaler_state
