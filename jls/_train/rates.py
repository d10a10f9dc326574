# SPDX-License-Identifier: Apache-2.0
"""What a train step reports besides its loss: learning rates, and local norms."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import DictKey

from jls import _validate
from jls._reduce import global_norm
from jls._text import path_names
from jls._tree import named_floats

Rates = Mapping[str, Any] | Callable[[Array], Any] | float | None


def local_norms(grads: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """The L2 norm and the number of elements of each gradient, by path."""
    leaves = dict(zip(*named_floats(grads), strict=True))
    norms = {path: global_norm([leaf]) for path, leaf in leaves.items()}
    return norms, {path: _size(leaf) for path, leaf in leaves.items()}


def _size(leaf: Any) -> Array:
    """`i32[]`, or `f32[]` from 2**31 elements on."""
    fits = jnp.size(leaf) < 2**31
    return jnp.asarray(jnp.size(leaf), jnp.int32 if fits else jnp.float32)


def check_rates(given: Any) -> None:
    """Raises unless `given` is None, a schedule, a number > 0, or a dict of these."""
    for rate in given.values() if isinstance(given, Mapping) else [given]:
        if not (rate is None or callable(rate)):
            _check_rate(rate)


def _check_rate(rate: Any) -> None:
    _validate.number("learning_rate", rate, "> 0 and finite", 2.0**-149, 2.0**127)


def learning_rates(given: Rates, count: Array, opt_state: Any) -> Any:
    """The learning rate of the step: the given one, or that of `opt_state`, or None.

    Args:
      given: a schedule or a number, or a dict of them by group.
      count: `i32[]`, steps applied before.
      opt_state: after the step; `optax.inject_hyperparams` keeps the rate there.
    """
    if isinstance(given, Mapping):
        return {name: _rate(rate, count) for name, rate in given.items()}
    if given is not None:
        return _rate(given, count)
    flat, _ = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=_has_learning_rate
    )
    found = [(path, node) for path, node in flat if _has_learning_rate(node)]
    rates = [_rate(node.hyperparams["learning_rate"], count) for _, node in found]
    if len(found) < 2:
        return rates[0] if found else None
    # optax.partition keeps its groups in a dict.
    groups = [
        "/".join(str(k.key) for k in p if isinstance(k, DictKey)) for p, _ in found
    ]
    if len(set(groups)) < len(groups):
        groups = path_names([path for path, _ in found])
    return dict(zip(groups, rates, strict=True))


def _has_learning_rate(node: Any) -> bool:
    return "learning_rate" in (getattr(node, "hyperparams", None) or ())


def _rate(rate: Any, count: Array) -> Array:
    if callable(rate):
        rate = rate(count)
        _check_rate(rate)  # a constant schedule gives a number back
    value = jnp.asarray(rate, jnp.float32)
    if value.shape != ():
        raise ValueError(
            f"learning_rate must be a number of shape (), got shape {value.shape}."
        )
    return value
