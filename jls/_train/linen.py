# SPDX-License-Identifier: Apache-2.0
"""The adapter for Flax Linen: a `TrainState`, or a subclass with fields of its own."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jls._mistakes import is_read, warn
from jls._train.accumulate import keys_in
from jls._train.parts import LossOutput, Order, Parts, StepCall, unpack
from jls._train_state import FP8, is_train_state, names_in, pytree_fields, without_fp8
from jls._tree import cast_like, restore, trainable
from jls._types import StepReport
from jls._validate import signature_of


class LinenAdapter:
    """Carries every pytree field of the state except those that a step replaces."""

    jitted = "jax.jit(jls.train_step(loss_fn))"

    def __init__(self, call: StepCall) -> None:
        self._call, self.kwargs = call, call.kwargs
        state = call.args[0]
        self._names = names = names_in(state)
        self.model, self.optimizer = state, getattr(state, names.tx)
        self._params = getattr(state, names.params)
        self._known, self._overwritten = without_fp8(self._params)

    @staticmethod
    def takes(call: StepCall) -> bool:
        return len(call.args) == 2 and is_train_state(call.args[0])

    @staticmethod
    def order(has_carried: bool) -> Order:
        return Order(["state", "batch"], 0, is_train_state)

    def split(self) -> Parts:
        opt_state = getattr(self.model, self._names.opt_state)
        carried = {
            name: getattr(self.model, name)
            for name in pytree_fields(self.model)
            if name not in self._names
        }
        return Parts(trainable(self._known), self._overwritten, opt_state, carried)

    def call(
        self, params: Any, overwritten: Any, carried: Any, batch: Any, **kwargs: Any
    ) -> LossOutput:
        given = {self._names.params: self._join(params, overwritten)} | carried

        def call(fields):
            state = self._replace(given | fields)
            with _params_named(self._call.loss_fn, state):
                result = self._call.loss_fn(state, batch, **kwargs)
            return unpack(result, self._call.has_carried, self._call.has_aux, carried)

        output = call({})
        _check_fields(output.carried, carried)
        _warn_of_fields_in_aux(output.aux, carried)
        fields = carried | dict(output.carried)
        if self._call.is_split:
            kept = {n: x for n, x in carried.items() if fields[n] is x}
            _warn_of_shared_keys(kept, lambda fields: call(fields).loss)
        after = cast_like("what loss_fn carries", fields, carried)
        return output._replace(carried=after)

    def merge(self, parts: Parts, report: StepReport) -> tuple[Any, StepReport]:
        names, new = self._names, dict(parts.carried)
        new[names.params] = self._join(parts.params, parts.overwritten)
        new[names.opt_state] = parts.opt_state
        if names.step_count is not None:
            new[names.step_count] = getattr(self.model, names.step_count) + 1
        return self._replace(new), report

    def _replace(self, fields: dict[str, Any]) -> Any:
        return dataclasses.replace(self.model, **fields)

    def _join(self, params: Any, overwritten: Any) -> Any:
        params = restore(params, self._known)
        has_fp8 = self._known is not self._params
        return {"params": params, FP8: overwritten} if has_fp8 else params


_NAMES_OF_PARAMS = ("params", "parameters", "variables", "weights", "p", "w")


@contextlib.contextmanager
def _params_named(loss_fn: Callable[..., Any], state: Any) -> Iterator[None]:
    """Explains an error in a loss function that takes the parameters, not the state."""
    try:
        yield
    except Exception as error:
        taken = getattr(signature_of(loss_fn), "parameters", ())
        name, first = type(state).__name__, next(iter(taken), "")
        # "'TrainState' object is not subscriptable"; to call one is another slip
        is_used_so = isinstance(error, TypeError) and f"'{name}'" in str(error)
        is_used_so &= "callable" not in str(error)
        if not (is_used_so or first in _NAMES_OF_PARAMS):
            raise
        raise TypeError(
            f"loss_fn gets the {name}, with the parameters to differentiate in it, but "
            f"takes {first or 'its first argument'} for the parameters themselves. "
            "Write def loss_fn(state, batch), and in it state.params."
        ) from error


def _warn_of_shared_keys(
    fields: dict[str, Any], loss: Callable[[dict[str, Any]], Any]
) -> None:
    """Warns of keys in `fields` that the loss reads: all micro-batches share them.

    Args:
      fields: the fields of the state that the loss function does not replace.
      loss: computes the loss with other values of these fields.
    """
    for path, key in keys_in(fields).items():

        def with_key(other, key=key):
            return loss(jax.tree.map(lambda x: other if x is key else x, fields))

        is_used = False
        with contextlib.suppress(Exception):  # not a loss: refused elsewhere
            is_used = is_read(with_key, key)
        if is_used:
            warn(
                f"each micro-batch gets the same PRNG key, state.{path}, and drops the "
                "same units. Pass a typed key by keyword, step(state, batch, key=key): "
                "the step folds the number of the micro-batch into it. Or return a new "
                f"{path.split('/')[0]}, with carried=True."
            )


def _check_fields(fields: Any, carried: dict[str, Any]) -> None:
    if not isinstance(fields, Mapping) or not fields.keys() <= carried.keys():
        got = list(fields) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(
            "with carried=True loss_fn must return a dict of new values for fields of "
            f"the state, of {list(carried)}, got {got}. Add a field to your TrainState "
            "for what the step should carry over; metrics go into aux, with "
            "has_aux=True."
        )


def _warn_of_fields_in_aux(aux: Any, carried: dict[str, Any]) -> None:
    if isinstance(aux, Mapping) and aux and aux.keys() <= carried.keys():
        warn(
            f"loss_fn returned {list(aux)} as aux, which only reaches the report: the "
            "fields of that name in the state stay as they are. To carry them on, pass "
            "carried=True, not has_aux=True."
        )
