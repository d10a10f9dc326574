# SPDX-License-Identifier: Apache-2.0
"""Roll back what a Flax NNX step that is written by hand changes in place."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jls._nnx import is_optimizer, objects_in, untrained_variables
from jls._state import wrapper_state_in
from jls._text import describe
from jls._tree import select


@contextlib.contextmanager
def atomic(optimizer: Any, model: Any, *objects: Any) -> Iterator[None]:
    """Around a Flax NNX step written by hand: a skipped step leaves all as it was.

    The forward pass changes batch statistics and RNG counters in place, before anyone
    knows whether the step is skipped. On leaving the block, if `optimizer.update`
    skipped the step, `atomic` puts them back, bit for bit. The parameters and the
    optimizer's state are those of the step before anyway. `jls.train_step` needs none
    of this.

    Args:
      optimizer: the `nnx.Optimizer`, made with `jls.loss_scaled` or
        `jls.skip_nonfinite`. Its `update` is called in the block, with `value=loss`.
      model: the `nnx.Module` that it trains. Every variable that the optimizer does not
        update is rolled back.
      *objects: further NNX objects whose variables are rolled back: an `nnx.Rngs`, a
        metric. What the block adds to them, such as sown values, stays.

    Returns:
      A context manager.

    Raises:
      TypeError: if `optimizer` is not an `nnx.Optimizer`, or another argument not an
        NNX object.
      ValueError: if its state carries no state of `jls.loss_scaled`, or several; on
        leaving, if the block has not called `optimizer.update`, or has changed the
        shape or the dtype of a variable.

    Example:
      >>> from flax import nnx
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x) ** 2)
      >>> @nnx.jit
      ... def step(model, optimizer, x):
      ...     with jls.atomic(optimizer, model):
      ...         grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
      ...         loss, grads = grad_fn(optimizer, model, x)
      ...         optimizer.update(model, grads, value=loss)
      ...     return loss
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> tx = jls.loss_scaled(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> step(model, optimizer, jnp.full((4, 2), jnp.nan))
      Array(nan, dtype=float32)
      >>> model.mean.get_value()
      Array([0., 0.], dtype=float32)
    """
    if not is_optimizer(optimizer):
        raise TypeError(
            "optimizer must be an nnx.Optimizer, got "
            f"{describe(optimizer)}. The order is jls.atomic(optimizer, model)."
        )
    for name, given in (("model", model), *(("objects", x) for x in objects)):
        if not objects_in(given):
            raise TypeError(f"{name} must be of Flax NNX, got {describe(given)}.")
    steps = wrapper_state_in(optimizer).steps  # or an error, before anything changes
    variables = untrained_variables(optimizer, model, objects)
    before = [variable.get_value() for variable in variables]
    yield
    state = wrapper_state_in(optimizer)
    if state.steps is steps:
        raise ValueError(
            "optimizer.update must be called in the block of jls.atomic, which then "
            "knows whether the step was skipped. Write the call inside."
        )
    for variable, old in zip(variables, before, strict=True):
        new = variable.get_value()
        if jax.tree.structure(new) == jax.tree.structure(old):  # else it was added to
            variable.set_value(select(state.applied, new, old))
