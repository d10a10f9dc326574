# SPDX-License-Identifier: Apache-2.0
"""The interface between `jls.train_step` and a model library."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import optax

from jls._text import describe
from jls._types import StepReport


class Parts(NamedTuple):
    """The pure parts of what is trained; a skipped step leaves all four."""

    params: Any  # to be differentiated
    overwritten: Any  # whose "gradients" are its next values: the scales of fp8 layers
    opt_state: Any
    carried: Any  # model state that the loss function returns anew: batch statistics


class LossOutput(NamedTuple):
    """Result of a loss function."""

    loss: Any
    carried: Any
    aux: Any  # for the report


class Call(NamedTuple):
    """One call of a step."""

    loss_fn: Callable[..., Any]
    optimizer: Any  # None for Flax, whose arguments hold it
    has_carried: bool
    has_aux: bool
    is_split: bool  # into several micro-batches
    args: tuple[Any, ...]  # the last is the batch
    kwargs: dict[str, Any]


class Order(NamedTuple):
    """The names of a step's arguments, and the place of one that is easily known."""

    names: Sequence[str]
    place: int
    belongs_there: Callable[[Any], Any]

    def check(self, args: tuple[Any, ...]) -> None:
        """Raises if the arguments seem to be the right ones in another order."""
        right = [self.belongs_there(arg) for arg in args]
        if len(args) != len(self.names) or right[self.place] or not any(right):
            return
        got = ", ".join(map(describe, args))
        raise ValueError(
            f"The order is step({', '.join(self.names)}), got {got}: "
            f"{self.names[self.place]} must be argument {self.place + 1}."
        )


class Adapter(Protocol):
    """One call of a step: takes a library's objects apart, and puts them together."""

    def __init__(self, call: Call) -> None: ...

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether the arguments are of this library."""
        ...

    @staticmethod
    def order(has_carried: bool) -> Order: ...

    @property
    def jitted(self) -> str:
        """The line that jits the step."""
        ...

    @property
    def optimizer(self) -> optax.GradientTransformation: ...

    @property
    def model(self) -> Any:
        """First argument of the user's functions: parameters, a state, a model."""
        ...

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the user's loss function that are pytrees."""
        ...

    def split(self) -> Parts: ...

    def call(
        self, params: Any, overwritten: Any, carried: Any, batch: Any, **kwargs: Any
    ) -> LossOutput:
        """Calls the user's loss function on `batch`."""
        ...

    def merge(self, parts: Parts, report: StepReport) -> Any:
        """Result of the step."""
        ...


def unpack(result: Any, has_carried: bool, has_aux: bool, carried: Any) -> LossOutput:
    """Takes the result of a loss function apart; without a new one, keeps `carried`."""
    names = [
        "loss",
        *(["carried"] if has_carried else []),
        *(["aux"] if has_aux else []),
    ]
    if len(names) == 1:
        return LossOutput(result, carried, None)
    if not (isinstance(result, tuple) and len(result) == len(names)):
        options = [
            f"{name}=True"
            for name, given in (("carried", has_carried), ("has_aux", has_aux))
            if given
        ]
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else None
        raise TypeError(
            f"with {' and '.join(options)} loss_fn must return "
            f"({', '.join(names)}), got {got or type(result).__name__}."
        )
    given = dict(zip(names, result, strict=True))
    return LossOutput(given["loss"], given.get("carried", carried), given.get("aux"))
