# SPDX-License-Identifier: Apache-2.0
"""What `jls.train_step` needs from a model library."""

from typing import Any, NamedTuple, Protocol

import optax

from jls._types import StepReport


class Parts(NamedTuple):
    """The pure parts of what is trained; a skipped step leaves all three."""

    params: Any  # to be differentiated
    opt_state: Any
    carried: Any  # what the loss function changes on the way, such as batch statistics


class Adapter(Protocol):
    """One call of a step: takes a library's objects apart, and puts them together."""

    @property
    def optimizer(self) -> optax.GradientTransformation: ...

    def split(self) -> Parts: ...

    def loss(self, params: Any, carried: Any, batch: Any) -> tuple[Any, Any]:
        """The user's loss of `batch`, and what is carried on from it."""
        ...

    def merge(self, parts: Parts, report: StepReport) -> Any:
        """What the step returns."""
        ...
