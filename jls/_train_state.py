# SPDX-License-Identifier: Apache-2.0
"""The fields of a `TrainState`: Flax's, or a dataclass of the user's own.

Flax calls the optimizer `tx`, its state `opt_state` and the parameters `params`. Where
a field has another name, it is taken if no other field can be meant.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jls._nnx import is_optimizer
from jls._state import find, is_wrapper_state
from jls._tree import trainable
from jls._types import LossScaledState

FP8 = "_overwrite_with_gradient"  # the collection of Flax's fp8 layers


def without_fp8(params: Any) -> tuple[Any, Any]:
    """The parameters that an optimizer knows, and what a step overwrites, or None.

    As in Flax's `TrainState.create`.
    """
    has_fp8 = isinstance(params, Mapping) and FP8 in params
    return (params["params"], params[FP8]) if has_fp8 else (params, None)


def is_train_state(node: Any) -> bool:
    has_optimizer = hasattr(node, "tx") or bool(_optimizers(node))
    return has_optimizer and not is_optimizer(node)


def optimizer_in(state: Any) -> Any:
    """The optimizer in a `TrainState` or an `nnx.Optimizer`; None in other states."""
    held = [getattr(state, name) for name in _optimizers(state)]
    return getattr(state, "tx", held[0] if len(held) == 1 else None)


class Names(NamedTuple):
    """The names of the fields of a `TrainState`; a user's own may differ."""

    tx: str
    opt_state: str
    params: str
    step_count: str | None  # None if there is none


def names_in(state: Any) -> Names:
    """Flax's names, where the fields exist; else the only ones that fit."""
    if not dataclasses.is_dataclass(state):
        raise TypeError(
            "state must be a dataclass, as a Flax TrainState is, got "
            f"{type(state).__name__}."
        )
    fields = pytree_fields(state)
    tx = "tx" if hasattr(state, "tx") else _the_one("an optimizer", _optimizers(state))

    def has_wrapper(name):
        return bool(find(getattr(state, name), is_wrapper_state))

    opt_state = "opt_state"
    if opt_state not in fields:
        states = filter(has_wrapper, fields)
        opt_state = _the_one("the state of an optimizer made by jls", states)
    params = "params"
    if params not in fields:
        init, shapes = getattr(state, tx).init, _shapes(getattr(state, opt_state))
        others = [name for name in fields if name != opt_state]
        fitting = (x for x in others if _shapes_from(init, getattr(state, x)) == shapes)
        params = _the_one("the parameters of that optimizer", fitting)
    counts = (name for name in ("step", "global_step") if name in fields)
    return Names(tx, opt_state, params, next(counts, None))


def _the_one(what: str, names: Iterable[str]) -> str:
    found = list(names)
    if len(found) != 1:
        raise ValueError(
            f"state must have one field that holds {what}, got {len(found)}. Call the "
            "fields tx, params and opt_state, as in a Flax TrainState."
        )
    return found[0]


def _shapes_from(init: Callable[[Any], Any], params: Any) -> Any:
    """The structure and the shapes of what `init` makes; None if it cannot."""
    try:
        return _shapes(jax.eval_shape(init, trainable(params)))
    except Exception:  # these are no parameters for it
        return None


def _shapes(tree: Any) -> Any:
    return jax.tree.structure(tree), list(map(jnp.shape, jax.tree.leaves(tree)))


def _optimizers(state: Any) -> list[str]:
    """The fields of a dataclass that hold an optimizer."""
    if not dataclasses.is_dataclass(state):
        return []
    names = (field.name for field in dataclasses.fields(state))
    kind = optax.GradientTransformation
    return [name for name in names if isinstance(getattr(state, name, None), kind)]


def pytree_fields(state: Any) -> list[str]:
    """The fields that are no static metadata."""
    if not dataclasses.is_dataclass(state):
        return list(getattr(type(state), "_fields", vars(state)))
    return [
        field.name
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", not field.metadata.get("static"))
    ]


class Carried(NamedTuple):
    """What a state carries beside the optimizer's own and a count of steps."""

    optimizer: Any = None
    params: Any = None
    others: Mapping[str, Any] = MappingProxyType({})  # further fields of a `TrainState`
    is_nnx: bool = False  # it is an `nnx.Optimizer`


def carried_by(state: Any) -> Carried:
    """The optimizer, and the fields of a `TrainState` that only it knows."""
    is_own = isinstance(state, LossScaledState)
    if is_own or not (hasattr(state, "tx") or dataclasses.is_dataclass(state)):
        return Carried()
    optimizer = optimizer_in(state)
    if not is_train_state(state):
        return Carried(optimizer, is_nnx=optimizer is not None)
    try:
        names = names_in(state)
    except (TypeError, ValueError):  # no field, or several, may hold the parameters
        names = None
    fields = {name: getattr(state, name) for name in pytree_fields(state)}
    known = names or ("tx", "step")
    others = {
        name: field
        for name, field in fields.items()
        if name not in known and not find(field, is_wrapper_state)
    }
    params = fields.get(names.params) if names else others.pop("params", None)
    return Carried(optimizer, params, others)
