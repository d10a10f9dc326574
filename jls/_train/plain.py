# SPDX-License-Identifier: Apache-2.0
"""The adapter for pure functions: plain pytrees, Haiku, Equinox."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jls._train.apply import inner_wrapper_state
from jls._train.parts import LossOutput, Parts, unpack
from jls._tree import cast_like, restore, trainable
from jls._types import StepReport


class PlainAdapter:
    """Differentiates by the floating-point arrays; everything else stays as it is.

    An Equinox model also holds functions and integers. As `equinox.filter` does it, the
    optimizer sees None in their places.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        has_carried: bool,
        has_aux: bool,
        state: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.kwargs = kwargs
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._has_carried = has_carried
        self._params, self._opt_state, *self._carried = state
        self.model, self.optimizer = self._params, optimizer

    def split(self) -> Parts:
        params = trainable(self._params)
        if params is not self._params:
            _check_initialized(self.optimizer, self._opt_state, params)
        carried = self._carried[0] if self._has_carried else None
        return Parts(params, None, self._opt_state, carried)

    def call(
        self, params: Any, overwritten: Any, carried: Any, batch: Any, **kwargs: Any
    ) -> LossOutput:
        model = restore(params, self._params)
        if not self._has_carried:
            result = self._loss_fn(model, batch, **kwargs)
            return unpack(result, False, self._has_aux, None)
        # A copy of the tree, since `equinox.nn.State` can be read only once.
        copy = jax.tree.map(lambda leaf: leaf, carried)
        result = self._loss_fn(model, copy, batch, **kwargs)
        output = unpack(result, True, self._has_aux, None)
        after = cast_like("what loss_fn carries", output.carried, carried)
        return output._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, ...]:
        params = restore(parts.params, self._params)
        carried = [parts.carried] if self._has_carried else []
        return params, parts.opt_state, *carried, report


def _check_initialized(optimizer: Any, opt_state: Any, params: Any) -> None:
    expected = jax.tree.structure(jax.eval_shape(optimizer.init, params))
    inner_wrapper_state(opt_state)
    if jax.tree.structure(opt_state) != expected:
        raise ValueError(
            "opt_state must be made from the floating-point arrays of params alone, "
            "since the others have no gradients: "
            "optimizer.init(eqx.filter(params, eqx.is_inexact_array)) for Equinox, or "
            "a tree with None in the places of the others."
        )
