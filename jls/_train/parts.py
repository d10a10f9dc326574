# SPDX-License-Identifier: Apache-2.0
"""The interface between `jls.train_step` and a model library.

An adapter, one class for each library, is made of a `StepCall`:

    takes(call)   whether the arguments are of its library
    order(...)    the `Order` of the arguments
    jitted        the line that jits the step
    optimizer     that of optax
    model         the first argument of the user's functions: parameters, state, model
    kwargs        the keyword arguments of the loss function that are pytrees
    split()       takes the library's objects apart, into `Parts`
    call(...)     calls the loss function on these and a batch
    merge(...)    puts `Parts` together: the result of the step
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jls._text import describe


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


class StepCall(NamedTuple):
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


def unpack(result: Any, has_carried: bool, has_aux: bool, carried: Any) -> LossOutput:
    """Takes the result of a loss function apart; without a new one, keeps `carried`."""
    options = {"carried": has_carried, "has_aux": has_aux}
    options = [name for name, is_set in options.items() if is_set]
    if not options:
        return LossOutput(result, carried, None)
    names = ["loss", *(name.removeprefix("has_") for name in options)]
    if not (isinstance(result, tuple) and len(result) == len(names)):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else None
        raise TypeError(
            f"with {'=True and '.join(options)}=True loss_fn must return "
            f"({', '.join(names)}), got {got or type(result).__name__}."
        )
    given = dict(zip(names, result, strict=True))
    return LossOutput(given["loss"], given.get("carried", carried), given.get("aux"))
