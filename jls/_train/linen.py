# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax Linen: a `TrainState`, or a subclass with fields of its own."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jls._train.parts import Parts
from jls._tree import cast_like
from jls._types import StepReport

_FP8 = "_overwrite_with_gradient"  # the collection of Flax's fp8 layers


def is_linen(args: tuple[Any, ...]) -> bool:
    """Whether a step was called with a `TrainState` and a batch."""
    return len(args) == 2 and hasattr(args[0], "tx")


class LinenAdapter:
    """Carries every pytree field of the state but `step`, `params` and `opt_state`."""

    def __init__(self, loss_fn: Callable[..., Any], has_aux: bool, state: Any):
        if isinstance(state.params, Mapping) and _FP8 in state.params:
            raise ValueError(
                f"params must hold parameters alone, got {_FP8!r} too. Their gradients "
                "are their next values, neither scaled nor accumulated: write the step "
                "by hand, with jls.scale(state, grads[...]) for them."
            )
        self._loss_fn, self._has_aux, self._state = loss_fn, has_aux, state
        self.optimizer = state.tx

    def split(self) -> Parts:
        state = self._state
        return Parts(state.params, state.opt_state, _carried_fields(state))

    def loss(self, params: Any, carried: Any, batch: Any) -> tuple[Any, Any]:
        result = self._loss_fn(self._state.replace(params=params, **carried), batch)
        if not self._has_aux:
            return result, carried
        loss, fields = _loss_and_fields(result, carried)
        return loss, cast_like("loss_fn's aux", carried | fields, carried)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, StepReport]:
        state = self._state.replace(
            step=self._state.step + 1,
            params=parts.params,
            opt_state=parts.opt_state,
            **parts.carried,
        )
        return state, report


def _carried_fields(state: Any) -> dict[str, Any]:
    return {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
        and field.name not in ("step", "params", "opt_state")
    }


def _loss_and_fields(result: Any, carried: dict[str, Any]) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "with has_aux=True loss_fn must return the pair (loss, fields), got "
            f"{type(result).__name__}."
        )
    loss, fields = result
    if not isinstance(fields, Mapping) or not fields.keys() <= carried.keys():
        got = list(fields) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(
            "loss_fn's aux must be a dict of new values for fields of the state, of "
            f"{list(carried)}, got {got}. Add a field to your TrainState for what the "
            "step should carry over."
        )
    return loss, dict(fields)
