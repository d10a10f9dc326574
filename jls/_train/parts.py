# SPDX-License-Identifier: Apache-2.0
"""What `jls.train_step` needs from a model library."""

from typing import Any, NamedTuple, Protocol

import optax

from jls._types import StepReport


class Parts(NamedTuple):
    """The pure parts of what is trained; a skipped step leaves all four."""

    params: Any  # to be differentiated
    overwritten: Any  # whose "gradients" are its next values: the scales of fp8 layers
    opt_state: Any
    carried: Any  # what the loss function changes on the way, such as batch statistics


class Made(NamedTuple):
    """What a loss function returned."""

    loss: Any
    carried: Any
    aux: Any  # for the report


class Adapter(Protocol):
    """One call of a step: takes a library's objects apart, and puts them together."""

    @property
    def optimizer(self) -> optax.GradientTransformation: ...

    @property
    def model(self) -> Any:
        """What the user's functions take first: parameters, a state, a model."""
        ...

    def split(self) -> Parts: ...

    def call(self, params: Any, overwritten: Any, carried: Any, batch: Any) -> Made:
        """The user's loss of `batch`, and what comes with it."""
        ...

    def merge(self, parts: Parts, report: StepReport) -> Any:
        """What the step returns."""
        ...


def unpack(result: Any, carries: bool, has_aux: bool, carried: Any) -> Made:
    """Takes the result of a loss function apart; without `carries`, keeps `carried`."""
    names = ["loss", *(["carried"] if carries else []), *(["aux"] if has_aux else [])]
    if len(names) == 1:
        return Made(result, carried, None)
    if not (isinstance(result, tuple) and len(result) == len(names)):
        options = [
            f"{name}=True"
            for name, given in (("carries", carries), ("has_aux", has_aux))
            if given
        ]
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else None
        raise TypeError(
            f"with {' and '.join(options)} loss_fn must return "
            f"({', '.join(names)}), got {got or type(result).__name__}."
        )
    given = dict(zip(names, result, strict=True))
    return Made(given["loss"], given.get("carried", carried), given.get("aux"))
