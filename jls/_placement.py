# SPDX-License-Identifier: Apache-2.0
"""Gives each leaf of a state a buffer of its own, on the devices where it belongs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jls._tree import is_array, is_concrete, is_extended


def replicated(x: Array) -> Array:
    """An array whole on each device, if it lies on explicit axes of a mesh."""
    if any(axes is not None for axes in jax.typeof(x).sharding.spec):
        return jax.sharding.reshard(x, PartitionSpec())
    return x


def own_buffers(tree: Any, foreign: Any) -> Any:
    """`tree` as strong arrays that share no buffer with `foreign` or each other.

    Two leaves in one buffer cannot both be donated, and a leaf in a caller's buffer
    cannot be donated.
    """
    taken = {_buffer(leaf) for leaf in jax.tree.leaves(foreign) if is_array(leaf)}

    def own(leaf):
        if not is_array(leaf):
            return leaf
        array = jnp.asarray(leaf)
        if getattr(array, "weak_type", False):
            array = array.astype(array.dtype)
        if not isinstance(leaf, jax.Array) or _buffer(array) in taken:
            array = jnp.array(array, copy=True)
        taken.add(_buffer(array))
        return array

    return jax.tree.map(own, tree)


def place_on_all(state: Any, params: optax.Params, scalars: bool = False) -> Any:
    """`state` with its arrays, or only `scalars` and flags, on all devices of `params`.

    Otherwise the first step would return a scalar with the placement of the parameters,
    and the second step would compile again.
    """
    shardings = [
        leaf.sharding
        for leaf in jax.tree.leaves(params)
        if is_concrete(leaf) and leaf.committed
    ]
    if not shardings:
        return state
    home = shardings[0]
    if isinstance(home, NamedSharding):
        home = NamedSharding(home.mesh, PartitionSpec())
    elif not home.is_fully_replicated:
        return state

    def place(leaf):
        if not is_concrete(leaf) or leaf.committed:
            return leaf
        belongs = not scalars or leaf.ndim == 0 or leaf.dtype == jnp.bool_
        return put(leaf, home) if belongs else leaf

    return jax.tree.map(place, state)


def place_like(array: Any, like: Any) -> Any:
    """`array` on the devices of `like`, if `like` is committed to any."""
    if isinstance(array, Tracer) or not (is_concrete(like) and like.committed):
        return array
    return put(jnp.asarray(array), like.sharding)


def copy_like(value: Any, like: Any) -> Array:
    """`value` in a buffer of its own, on the devices of `like` if it is committed."""
    if is_concrete(like) and like.committed:
        # Two steps: on a CPU, device_put shares the memory of numpy arrays.
        value = jax.device_put(value, like.sharding)
    elif not is_extended(value):
        value = np.asarray(value)  # which is on no device
    return jnp.array(value, copy=True)


def put(array: Array, sharding: Any) -> Array:
    """Puts `array`, which every process has, on the devices of `sharding`.

    Across several processes it goes through the host. If each process has one device,
    `device_put` of a JAX array in jax 0.10 to 0.12 returns an array whose
    `addressable_shards` raise, so it cannot be saved.
    """
    if sharding.is_fully_addressable or is_extended(array):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def _buffer(leaf: Any) -> int:
    """Identifies a buffer by its address, or by the tracer under tracing."""
    if isinstance(leaf, np.ndarray):
        return leaf.__array_interface__["data"][0]
    if isinstance(leaf, Tracer) or not hasattr(leaf, "unsafe_buffer_pointer"):
        return id(leaf)
    return leaf.addressable_data(0).unsafe_buffer_pointer()
