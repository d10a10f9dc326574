# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax Linen: a `TrainState`, or a subclass with fields of its own."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jls._train.parts import Made, Parts, unpack
from jls._tree import cast_like
from jls._types import JlsWarning, StepReport

_FP8 = "_overwrite_with_gradient"  # the collection of Flax's fp8 layers


def is_linen(args: tuple[Any, ...]) -> bool:
    """Whether a step was called with a `TrainState` and a batch."""
    return len(args) == 2 and is_train_state(args[0])


def is_train_state(node: Any) -> bool:
    return hasattr(node, "tx")


class LinenAdapter:
    """Carries every pytree field of the state but `step`, `params` and `opt_state`."""

    def __init__(
        self, loss_fn: Callable[..., Any], carries: bool, has_aux: bool, state: Any
    ):
        self._loss_fn, self._carries, self._has_aux = loss_fn, carries, has_aux
        self._state, self.optimizer = state, state.tx
        self._has_fp8 = isinstance(state.params, Mapping) and _FP8 in state.params

    def split(self) -> Parts:
        params, overwritten = self._state.params, None
        if self._has_fp8:
            # As in Flax's `TrainState.create`, the optimizer knows only the others.
            params, overwritten = params["params"], params[_FP8]
        carried = _carried_fields(self._state)
        return Parts(params, overwritten, self._state.opt_state, carried)

    def call(self, params: Any, overwritten: Any, carried: Any, batch: Any) -> Made:
        params = self._join(params, overwritten)
        state = self._state.replace(params=params, **carried)
        made = unpack(
            self._loss_fn(state, batch), self._carries, self._has_aux, carried
        )
        _check_fields(made.carried, carried)
        _warn_of_fields_in_aux(made.aux, carried)
        fields = carried | dict(made.carried)
        after = cast_like("what loss_fn carries", fields, carried)
        return made._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, StepReport]:
        state = self._state.replace(
            step=self._state.step + 1,
            params=self._join(parts.params, parts.overwritten),
            opt_state=parts.opt_state,
            **parts.carried,
        )
        return state, report

    def _join(self, params: Any, overwritten: Any) -> Any:
        return {"params": params, _FP8: overwritten} if self._has_fp8 else params


def _carried_fields(state: Any) -> dict[str, Any]:
    return {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
        and field.name not in ("step", "params", "opt_state")
    }


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
            "carries=True in the place of has_aux=True.",
            JlsWarning,
            stacklevel=2,
        )
