# SPDX-License-Identifier: Apache-2.0
"""Whether all devices, of all processes, hold the same loss scale and counters."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from jls import _validate
from jls._nnx import read_variables
from jls._state import find, find_scaler_states, is_wrapper_state, no_loss_scale
from jls._text import format_scale, join, path_name
from jls._types import wrapper_metrics


def check_in_sync(state: Any) -> None:
    """Checks that all devices and processes hold the same loss scale and counters.

    They do unless something outside jls has made them differ: processes that restored
    different checkpoints, or `jax.shard_map(check_vma=False)` around a wrapper without
    `axis_name`. From then on each takes its own decisions, and no jitted step can
    notice. Call it on the host after a restore, and now and then.

    Every process has to call it, since they exchange a few bytes each.

    Args:
      state: anything that carries states of jls.

    Returns:
      None, if all values agree.

    Raises:
      ValueError: if a value differs, with its name, the values, and where they are; or
        if `state` is traced, or carries no state of jls.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> jls.check_in_sync(optimizer.init(jnp.ones(3)))
    """
    scalars = _scalars(state)
    if not scalars and find_scaler_states(state):
        raise ValueError(
            "state must be of one run, got arrays where one has scalars, as jax.vmap "
            "and jax.pmap stack them. Under jax.pmap, its members agree if each array "
            "of jls.metrics holds one value: jax.vmap(jls.metrics)(state)."
        )
    if not scalars:
        raise no_loss_scale(state)
    _validate.concrete("state", scalars)
    held = jax.device_get([_copies(leaf) for leaf in scalars.values()])
    ours = np.array([_first_and_another(values) for values in held], np.int32)
    all_held = np.asarray(multihost_utils.process_allgather(ours))
    for i, (path, leaf) in enumerate(scalars.items()):
        _check_agreement(path, all_held.reshape(-1, *ours.shape)[:, i], _dtype32(leaf))


def _scalars(state: Any) -> dict[str, Array]:
    """The scalars of jls in `state`, by path."""
    found = {}
    for path, node in find(state, is_wrapper_state):
        wrapper_state = read_variables(node)
        for name, leaf in wrapper_metrics(wrapper_state).items():
            found[join(path, name)] = leaf
        flat, _ = jax.tree_util.tree_flatten_with_path(wrapper_state.spike_state)
        for end, leaf in flat:
            found[join(path, "spike_state", path_name(end))] = leaf
    for path, node in find_scaler_states(state):
        for name, leaf in read_variables(node)._asdict().items():
            found[join(path, name)] = leaf
    return {path: leaf for path, leaf in found.items() if np.ndim(leaf) == 0}


def _copies(leaf: Any) -> list[Any]:
    """The copy of each device of this process; a numpy array itself."""
    shards = getattr(leaf, "addressable_shards", ())
    return [shard.data for shard in shards] or [leaf]


def _dtype32(leaf: Any) -> Any:
    """The dtype of 32 bits that a scalar of a state fits into."""
    return np.float32 if np.issubdtype(leaf.dtype, np.floating) else np.int32


def _first_and_another(values: list[np.ndarray]) -> tuple[int, int]:
    """The bits of the first value, and of one that differs from it, if any."""
    values = [np.asarray(value) for value in values]
    bits = [int(value.astype(_dtype32(value)).view(np.int32)) for value in values]
    return bits[0], next((other for other in bits if other != bits[0]), bits[0])


def _check_agreement(path: str, bits: np.ndarray, kind: Any) -> None:
    """Raises unless all processes hold one value; `bits[i]` has two of process i."""
    if (bits == bits[0, 0]).all():
        return
    held = np.ascontiguousarray(bits).view(kind)

    def text(value):
        is_scale = path.split("/")[-1] == "loss_scale"
        return format_scale(float(value)) if is_scale else f"{value:g}"

    texts = [
        f"{text(first)} on process {i}"
        if first == other
        else f"{text(first)} and {text(other)} on devices of process {i}"
        for i, (first, other) in enumerate(held)
    ]
    raise ValueError(
        f"{path} must be the same on all devices, got {', '.join(texts)}. Restore one "
        "checkpoint on all processes; under jax.shard_map and jax.pmap, pass "
        "axis_name= to jls.loss_scaled."
    )
