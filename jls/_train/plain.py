# SPDX-License-Identifier: Apache-2.0
"""The adapter for pure functions: plain pytrees, Haiku, Equinox."""

from typing import Any

import jax

from jls._state import find_scaler_states
from jls._train.apply import inner_wrapper_state
from jls._train.loss import warn_of_state_in_aux
from jls._train.parts import LossOutput, Order, Parts, StepCall, unpack
from jls._tree import cast_like, is_array, restore, trainable
from jls._types import StepReport


class PlainAdapter:
    """Differentiates with respect to floating-point arrays; the rest stays as it is.

    An Equinox model also holds functions and integers. The optimizer sees None in their
    places, as with `equinox.filter`.
    """

    def __init__(self, call: StepCall) -> None:
        self._call, self.kwargs = call, call.kwargs
        self._params, self._opt_state, *self._carried, _ = call.args
        self.model, self.optimizer = self._params, call.optimizer

    @property
    def jitted(self) -> str:
        # An Equinox model holds functions, which jax.jit does not take as arguments.
        arguments = jax.tree.leaves((self._call.args, self.kwargs))
        jit = "jax.jit" if all(map(is_array, arguments)) else "eqx.filter_jit"
        return f"{jit}(jls.train_step(loss_fn, optimizer))"

    @staticmethod
    def takes(call: StepCall) -> bool:
        return call.optimizer is not None and len(call.args) == 3 + call.has_carried

    @staticmethod
    def order(has_carried: bool) -> Order:
        carried = ["carried"] if has_carried else []
        return Order(["params", "opt_state", *carried, "batch"], 1, find_scaler_states)

    def split(self) -> Parts:
        params = trainable(self._params)
        if params is not self._params:
            _check_initialized(self.optimizer, self._opt_state, params)
        carried = self._carried[0] if self._carried else None
        return Parts(params, None, self._opt_state, carried)

    def call(
        self, params: Any, overwritten: Any, carried: Any, batch: Any, **kwargs: Any
    ) -> LossOutput:
        model = restore(params, self._params)
        if not self._carried:
            result = self._call.loss_fn(model, batch, **kwargs)
            output = unpack(result, False, self._call.has_aux, None)
            warn_of_state_in_aux(self._call.loss_fn, output.aux)
            return output
        # A copy of the tree, since `equinox.nn.State` can be read only once.
        copy = jax.tree.map(lambda leaf: leaf, carried)
        result = self._call.loss_fn(model, copy, batch, **kwargs)
        output = unpack(result, True, self._call.has_aux, None)
        after = cast_like("what loss_fn carries", output.carried, carried)
        return output._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, ...]:
        params = restore(parts.params, self._params)
        carried = [parts.carried] if self._carried else []
        return params, parts.opt_state, *carried, report


def _check_initialized(optimizer: Any, opt_state: Any, params: Any) -> None:
    expected = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    if jax.tree.structure(opt_state) != expected:
        inner_wrapper_state(opt_state)  # or raises its own error
        raise ValueError(
            "opt_state must be made from the floating-point arrays of params alone, "
            "since the others have no gradients: "
            "optimizer.init(eqx.filter(params, eqx.is_inexact_array)) for Equinox, or "
            "a tree with None in the places of the others."
        )
