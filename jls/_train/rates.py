# SPDX-License-Identifier: Apache-2.0
"""What a train step reports besides its loss: learning rates, and local norms."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jls import _validate
from jls._reduce import global_norm
from jls._text import path_names
from jls._train.schedules import find_schedules, group_of
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


def learning_rates(
    given: Rates, count: Array, optimizer: Any, before: Any, after: Any
) -> Any:
    """The learning rate of the step: the given one, or one that is found, or None.

    Args:
      given: a schedule or a number, or a dict of them by group.
      count: `i32[]`, steps applied before.
      optimizer: whose closures hold its schedule, see `find_schedules`.
      before: the optimizer's state before the step.
      after: the state after it, in which `optax.inject_hyperparams` keeps the rate.
    """
    if isinstance(given, Mapping):
        return {name: _rate(rate, count) for name, rate in given.items()}
    if given is not None:
        return _rate(given, count)
    flat, _ = jax.tree_util.tree_flatten_with_path(after, is_leaf=_has_learning_rate)
    injected = [(path, node) for path, node in flat if _has_learning_rate(node)]
    groups = [group_of(path) for path, _ in injected]
    names = ["/".join(group) for group in groups]
    if len(set(names)) < len(names):
        names = path_names([path for path, _ in injected])
    rates = {
        "/".join(group): _scheduled_rate(*found)
        for group, found in find_schedules(optimizer, before, groups).items()
    }
    rates = {name: rate for name, rate in rates.items() if rate is not None}
    is_one = list(rates) == [""] or (len(injected) == 1 and not rates)
    for name, (_, node) in zip(names, injected, strict=True):
        rates[name] = _rate(node.hyperparams["learning_rate"], count)
    if is_one:
        (rate,) = rates.values()
        return rate
    return rates or None


def _scheduled_rate(schedule: Callable[[Array], Any], count: Array) -> Array | None:
    """None if the schedule must not be called again, as it prints, say."""
    if jax.make_jaxpr(lambda count: schedule(count))(count).effects:
        return None
    rate = jnp.asarray(schedule(count), jnp.float32)
    return rate if rate.shape == () else None


def _has_learning_rate(node: Any) -> bool:
    is_injected = "hyperparams" in getattr(type(node), "_fields", ())
    return is_injected and "learning_rate" in (node.hyperparams or ())


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
