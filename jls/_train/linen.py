# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax Linen: a `TrainState`, or a subclass with fields of its own."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jls._state import find, is_wrapper_state
from jls._train.parts import Made, Parts, unpack
from jls._tree import cast_like
from jls._types import JlsWarning, StepReport

_FP8 = "_overwrite_with_gradient"  # the collection of Flax's fp8 layers


def is_linen(args: tuple[Any, ...]) -> bool:
    """Whether a step was called with a `TrainState` and a batch."""
    return len(args) == 2 and is_train_state(args[0])


def is_train_state(node: Any) -> bool:
    return hasattr(node, "tx") or bool(_optimizers(node))


class _Names(NamedTuple):
    """What the fields of a `TrainState` are called; a user's own may differ."""

    tx: str
    opt_state: str
    params: str
    calls: str | None  # their count; None if there is none


class LinenAdapter:
    """Carries every pytree field of the state but those of `_Names`."""

    def __init__(
        self, loss_fn: Callable[..., Any], carries: bool, has_aux: bool, state: Any
    ):
        self._loss_fn, self._carries, self._has_aux = loss_fn, carries, has_aux
        self._names = names = _names_in(state)
        self.model, self.optimizer = state, getattr(state, names.tx)
        self._params = getattr(state, names.params)
        self._has_fp8 = isinstance(self._params, Mapping) and _FP8 in self._params

    def split(self) -> Parts:
        params, overwritten = self._params, None
        if self._has_fp8:
            # As in Flax's `TrainState.create`, the optimizer knows only the others.
            params, overwritten = params["params"], params[_FP8]
        opt_state = getattr(self.model, self._names.opt_state)
        carried = {
            name: getattr(self.model, name)
            for name in _pytree_fields(self.model)
            if name not in self._names
        }
        return Parts(params, overwritten, opt_state, carried)

    def call(self, params: Any, overwritten: Any, carried: Any, batch: Any) -> Made:
        params = {self._names.params: self._join(params, overwritten)}
        state = self._replace(params | carried)
        made = unpack(
            self._loss_fn(state, batch), self._carries, self._has_aux, carried
        )
        _check_fields(made.carried, carried)
        _warn_of_fields_in_aux(made.aux, carried)
        fields = carried | dict(made.carried)
        after = cast_like("what loss_fn carries", fields, carried)
        return made._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, StepReport]:
        names, new = self._names, dict(parts.carried)
        new[names.params] = self._join(parts.params, parts.overwritten)
        new[names.opt_state] = parts.opt_state
        if names.calls is not None:
            new[names.calls] = getattr(self.model, names.calls) + 1
        return self._replace(new), report

    def _replace(self, fields: dict[str, Any]) -> Any:
        return dataclasses.replace(self.model, **fields)

    def _join(self, params: Any, overwritten: Any) -> Any:
        return {"params": params, _FP8: overwritten} if self._has_fp8 else params


def _names_in(state: Any) -> _Names:
    """As Flax calls them; else what can be nothing else."""
    if not dataclasses.is_dataclass(state):
        raise TypeError(
            "state must be a dataclass, as a Flax TrainState is, got "
            f"{type(state).__name__}."
        )
    fields = _pytree_fields(state)
    tx = "tx" if hasattr(state, "tx") else _only("an optimizer", _optimizers(state))

    def has_wrapper(name):
        return bool(find(getattr(state, name), is_wrapper_state))

    opt_state = "opt_state"
    if opt_state not in fields:
        states = filter(has_wrapper, fields)
        opt_state = _only("the state of an optimizer made by jls", states)
    params = "params"
    if params not in fields:
        init, made = getattr(state, tx).init, _shapes(getattr(state, opt_state))
        others = [name for name in fields if name != opt_state]
        fitting = (x for x in others if _made_of(init, getattr(state, x)) == made)
        params = _only("the parameters of that optimizer", fitting)
    calls = next((name for name in ("step", "global_step") if name in fields), None)
    return _Names(tx, opt_state, params, calls)


def _only(what: str, names: Iterable[str]) -> str:
    found = list(names)
    if len(found) != 1:
        raise ValueError(
            f"state must have one field that holds {what}, got {len(found)}. Call the "
            "fields tx, params and opt_state, as in a Flax TrainState."
        )
    return found[0]


def _made_of(init: Callable[[Any], Any], params: Any) -> Any:
    """The structure and the shapes of what `init` makes; None if it cannot."""
    try:
        return _shapes(jax.eval_shape(init, params))
    except Exception:  # it is not made for this
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


def _pytree_fields(state: Any) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", not field.metadata.get("static"))
    ]


def _check_fields(fields: Any, carried: dict[str, Any]) -> None:
    if not isinstance(fields, Mapping) or not fields.keys() <= carried.keys():
        got = list(fields) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(
            "with carries=True loss_fn must return a dict of new values for fields of "
            f"the state, of {list(carried)}, got {got}. Add a field to your TrainState "
            "for what the step should carry over; metrics go into aux, with "
            "has_aux=True."
        )


def _warn_of_fields_in_aux(aux: Any, carried: dict[str, Any]) -> None:
    if isinstance(aux, Mapping) and aux and aux.keys() <= carried.keys():
        warnings.warn(
            f"loss_fn returned {list(aux)} as aux, which only reaches the report: the "
            "fields of that name in the state stay as they are. To carry them on, pass "
            "carries=True, not has_aux=True.",
            JlsWarning,
            stacklevel=2,
        )
