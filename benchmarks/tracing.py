"""What JAX needs to trace an update alone, by the number of leaves.

CPU seconds, and calls of Python functions, which no other process disturbs.
"""

import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

ADAM = optax.adam(1e-3)
OPTIMIZERS = {
    "adam": ADAM,
    "clip + adam": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "sgd momentum": optax.sgd(1e-3, momentum=0.9),
}


class Update:
    """An update of so many leaves, to be traced; nothing is allocated."""

    def __init__(self, optimizer: Any, leaves: int) -> None:
        shapes = (48, 48), (48,)
        self._optimizer = optimizer
        self._params = {
            f"w{i}": jax.ShapeDtypeStruct(shapes[i % 2], jnp.float32)
            for i in range(leaves)
        }
        self._state = jax.eval_shape(optimizer.init, self._params)

    def trace(self) -> Any:
        """The program, of a function that JAX has not seen."""

        def step(params, state, grads):
            return self._optimizer.update(grads, state, params)

        return jax.jit(step).trace(self._params, self._state, self._params)

    def calls(self) -> int:
        """The calls of Python functions, once JAX knows the types of the leaves."""
        self.trace()
        return python_calls(self.trace)


def python_calls(fun: Callable[[], Any]) -> int:
    """How many Python functions are called while `fun` runs."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # JAX has callbacks for it
    sys.setprofile(see)
    try:
        fun()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def calls_per_leaf(optimizer: Any, few: int = 20, many: int = 40) -> float:
    """Calls of Python functions for one leaf more."""
    more = Update(optimizer, many).calls() - Update(optimizer, few).calls()
    return more / (many - few)
