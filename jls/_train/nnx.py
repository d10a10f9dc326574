# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax NNX: a model and its `nnx.Optimizer`, changed in place."""

from typing import Any

import jax

from jls._mistakes import check_is_of_nnx
from jls._nnx import (
    is_optimizer,
    merge_objects,
    nnx,
    objects_in,
    read_variables,
    split_objects,
    update_objects,
)
from jls._train.loss import model_closed_over_named
from jls._train.parts import LossOutput, Order, Parts, StepCall, unpack
from jls._tree import cast_like, difference
from jls._types import StepReport


class NnxAdapter:
    """Carries every variable that the optimizer does not update.

    Those of the model, and of the NNX objects among the keyword arguments.
    """

    jitted = "nnx.jit(jls.train_step(loss_fn))"

    def __init__(self, call: StepCall) -> None:
        self.model, self._optimizer, batch = call.args
        if call.has_carried:
            raise ValueError(
                "carried must be False for an NNX model, whose own variables hold what "
                "a skipped step rolls back: assign it to an nnx.Variable of the model."
            )
        if objects_in(batch):
            raise TypeError(
                "batch must hold arrays, got an NNX object in it. Pass it by keyword, "
                "step(model, optimizer, batch, rngs=rngs): then a skipped step rolls "
                "it back."
            )
        kwargs = call.kwargs
        self._objects = {name: x for name, x in kwargs.items() if objects_in(x)}
        self.kwargs = {n: x for n, x in kwargs.items() if n not in self._objects}
        self._call = call
        self._graph, *self._state = self._split(self.model, self._objects)
        self.optimizer = self._optimizer.tx
        check_is_of_nnx(read_variables((self._state, self._optimizer.opt_state)))

    @staticmethod
    def takes(call: StepCall) -> bool:
        return len(call.args) == 3 and is_optimizer(call.args[1])

    @staticmethod
    def order(has_carried: bool) -> Order:
        return Order(["model", "optimizer", "batch"], 1, is_optimizer)

    def _split(self, model: Any, objects: Any) -> tuple[Any, Any, Any]:
        return split_objects(model, self._optimizer, objects)

    def split(self) -> Parts:
        params, carried = read_variables(self._state)
        return Parts(params, None, read_variables(self._optimizer.opt_state), carried)

    def call(
        self, params: Any, overwritten: Any, carried: Any, batch: Any, **kwargs: Any
    ) -> LossOutput:
        model, objects = merge_objects(self._graph, params, carried)
        with model_closed_over_named(self._call.loss_fn, model):
            result = self._call.loss_fn(model, batch, **objects, **kwargs)
        output = unpack(result, False, self._call.has_aux, None)
        after = read_variables(self._split(model, objects)[2])
        of_both = ("the model before", carried), ("the one after", after)
        if jax.tree.structure(after) != jax.tree.structure(carried):
            raise ValueError(
                "loss_fn must leave the variables of the model as many as they are, "
                f"but {difference(*of_both)}. What it sows, take out and return as "
                "aux: aux = nnx.pop(model, nnx.Intermediate)."
            )
        after = cast_like("loss_fn, which ran on the model,", after, carried)
        return output._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> StepReport:
        optimizer = self._optimizer
        update_objects(self.model, self._objects, parts.params, parts.carried)
        nnx().update(optimizer.opt_state, nnx().state(parts.opt_state))
        optimizer.step.set_value(optimizer.step.get_value() + 1)
        return report
