# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax NNX: a model and its `nnx.Optimizer`, changed in place."""

from collections.abc import Callable
from typing import Any

from jls._nnx import is_optimizer, nnx, read_variables, split_model
from jls._train.parts import Made, Parts, unpack
from jls._tree import cast_like
from jls._types import StepReport


def is_nnx(args: tuple[Any, ...]) -> bool:
    """Whether a step was called with a model, an `nnx.Optimizer` and a batch."""
    return len(args) == 3 and is_optimizer(args[1])


class NnxAdapter:
    """Carries every variable of the model that the optimizer does not update."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        carries: bool,
        has_aux: bool,
        model: Any,
        optimizer: Any,
    ):
        if carries:
            raise ValueError(
                "carries must be False for an NNX model, whose own variables hold what "
                "a skipped step rolls back: assign it to an nnx.Variable of the model."
            )
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._model, self._optimizer = model, optimizer
        self._graph, *self._state = split_model(model, optimizer)
        self.optimizer = optimizer.tx

    def split(self) -> Parts:
        params, carried = read_variables(self._state)
        return Parts(params, None, read_variables(self._optimizer.opt_state), carried)

    def call(self, params: Any, overwritten: Any, carried: Any, batch: Any) -> Made:
        copy = nnx().merge(self._graph, params, carried)
        made = unpack(self._loss_fn(copy, batch), False, self._has_aux, None)
        after = read_variables(split_model(copy, self._optimizer)[2])
        after = cast_like("loss_fn, which ran on the model,", after, carried)
        return made._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> StepReport:
        optimizer = self._optimizer
        nnx().update(self._model, parts.params, parts.carried)
        nnx().update(optimizer.opt_state, nnx().state(parts.opt_state))
        optimizer.step.set_value(optimizer.step.get_value() + 1)
        return report
