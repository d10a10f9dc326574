# SPDX-License-Identifier: Apache-2.0
"""Axes of devices, and what the devices of an axis agree on: one small collective."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls._program.jaxprs import to_varying, varying_axes
from jls._text import describe

AxisName = str | tuple[str, ...] | None


def check_axis_name(axis_name: Any) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says what it should have been."""
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not all(isinstance(name, str) for name in names):
        is_tree = any(hasattr(x, "dtype") for x in jax.tree.leaves(axis_name))
        write = " Of two trees write jls.all_finite((loss, grads))." if is_tree else ""
        raise TypeError(
            "axis_name must be a str, a tuple of str or None, got "
            f"{describe(axis_name)}.{write}"
        )
    return names


def bound_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names in `axis_name`, or an error that says which is not bound."""
    names = check_axis_name(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"axis_name {name!r} is not bound here. Call under jax.shard_map, "
                "jax.pmap or jax.vmap with that axis; under plain jit leave it out."
            ) from None
    return names


def agree(flags: Array, axis_name: AxisName) -> Array:
    """`flags` and-ed over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    if not names:
        return flags
    numbers = _varying(flags.astype(jnp.int32), names)
    return lax.pmin(numbers, names).astype(jnp.bool_)


def agree_on_max(magnitudes: Array, axis_name: AxisName) -> Array:
    """The maximum of each over the devices of `axis_name`; one small collective."""
    names = bound_names(axis_name)
    return lax.pmax(_varying(magnitudes, names), names) if names else magnitudes


def _varying(array: Array, names: tuple[str, ...]) -> Array:
    """`array`, as one that differs over all axes, if JAX says that it does over some.

    jax 0.12 reduces over axes that are alike alone.
    """
    axes = frozenset(names)
    return to_varying(array, axes) if axes & varying_axes(array) else array
