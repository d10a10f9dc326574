# SPDX-License-Identifier: Apache-2.0
"""Roll back what a Flax NNX step that is written by hand changes in place."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jls._mistakes import warn
from jls._nnx import is_optimizer, objects_in, trained_variables, variables_in
from jls._notes import noted
from jls._scalers.rule import count_up
from jls._state import find, is_wrapper_state, wrapper_state_in
from jls._step import Update
from jls._text import describe, naming_arguments
from jls._tree import select
from jls._types import COUNTED_IN, SkipReason


@naming_arguments()
def atomic(
    optimizer: Any, model: Any, *objects: Any
) -> contextlib.AbstractContextManager[None]:
    """Surrounds a Flax NNX step written by hand: a skipped step then changes nothing.

    The forward pass changes batch statistics and RNG counters in place, before anyone
    knows whether the step is skipped. If an `update` in the block skips its step, or
    the block raises, `atomic` at its end restores all variables to what they were
    before, bit for bit. This includes parameters and moments that another update in the
    block has moved, as in a GAN, and parameters that were changed by hand before the
    update. The counters of jls and the loss scale are not rolled back, nor is
    `nnx.Optimizer.step`, which counts calls. Each update of a block that is restored
    counts as skipped, a good one too. `jls.train_step` needs none of this.

    Args:
      optimizer: the `nnx.Optimizer`, made with `jls.loss_scaled` or
        `jls.skip_nonfinite`. Its `update` is called in the block, with `value=loss`.
      model: the `nnx.Module` that it trains.
      *objects: further NNX objects whose variables are rolled back: an `nnx.Rngs`, a
        metric, the model and the `nnx.Optimizer` of another loss. If one of them skips,
        the step of each is rolled back. What the block adds to them, such as sown
        values, stays. So does what it changes in objects that are not passed, such as a
        NaN in a metric.

    Returns:
      A context manager.

    Raises:
      TypeError: if `optimizer` is not an `nnx.Optimizer`, or another argument not an
        NNX object.
      ValueError: if its state carries no state of `jls.loss_scaled`, or several; on
        leaving, if the block has not called `optimizer.update`, or has changed the
        shape or the dtype of a variable.

    Warns:
      JlsWarning: if `with` was left out.

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
            f"optimizer must be an nnx.Optimizer, got {describe(optimizer)}. {_ORDER}"
        )
    for name, given in (("model", model), *(("objects", x) for x in objects)):
        if not objects_in(given):
            raise TypeError(f"{name} must be of Flax NNX, got {describe(given)}.")
    wrapper_state_in(optimizer)  # or an error, before anything changes
    return _Block(functools.partial(_roll_back_skipped, optimizer, model, objects))


_ORDER = (
    "The order is jls.atomic(optimizer, model); of two networks, as in a GAN, "
    "jls.atomic(optimizer, model, other_optimizer, other_model)."
)


class _Block(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """A context, or a decorator, that warns if it was never entered."""

    def __init__(
        self, make: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._make, self._is_used = make, False

    def __call__(self, fun: Any) -> Any:
        self._is_used = True
        return super().__call__(fun)

    def __enter__(self) -> None:
        self._is_used = True
        self._block = self._make()
        self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    def __del__(self) -> None:
        if not self._is_used:
            warn(
                "jls.atomic was called, but not entered, and changes nothing. Write "
                "`with jls.atomic(optimizer, model):` before the block."
            )


@contextlib.contextmanager
def _roll_back_skipped(optimizer: Any, model: Any, objects: Any) -> Iterator[None]:
    optimizers = [optimizer, *filter(is_optimizer, objects_in(objects))]
    found = [find(one.opt_state, is_wrapper_state) for one in optimizers]
    wrappers = [node for nodes in found for _, node in nodes]
    # What counts and scales moves in a step that is rolled back too.
    of_jls = [node._replace(inner_state=(), spike_state=()) for node in wrappers]
    kept = variables_in(of_jls, [one.step for one in optimizers])
    changed = _without(variables_in(optimizers, model, objects), kept)
    before = {id(variable): variable.get_value() for variable in changed}
    counts = [_counters_of(node) for node in wrappers]
    updates: list[Update] = []
    try:
        with noted("update") as updates:
            yield
        _check_updated(wrappers[0], counts[0]["steps"])
    except BaseException:
        for variable in changed:
            variable.set_value(before[id(variable)])
        for node in wrappers if updates else ():
            node.applied.set_value(jnp.zeros_like(node.applied.get_value()))
        raise
    has_one = len(optimizers) == 1
    is_one = has_one and _is_one_update(wrappers[0], updates, before.values())
    if is_one:
        trained = trained_variables(optimizer, model)
        changed = _without(changed, [*trained, *variables_in(optimizer)])
    after = list(map(_counters_of, wrappers))
    pairs = list(zip(counts, after, strict=True))
    are_applied = jnp.stack([new["skips"] == old["skips"] for old, new in pairs])
    is_applied = jnp.all(are_applied)
    for variable in changed:
        new, old = variable.get_value(), before[id(variable)]
        if jax.tree.structure(new) == jax.tree.structure(old):  # else it was added to
            variable.set_value(select(is_applied, new, old))
    if not is_one:
        reasons = jnp.stack([new["last_skip_reason"] for new in after])
        reason = reasons[jnp.argmin(are_applied)]  # the first that skipped
        for node, (old, new) in zip(wrappers, pairs, strict=True):
            _count_as_skipped(node, old, new, reason, is_applied)


def _counters_of(node: Any) -> dict[str, Array]:
    """The counters of a wrapper."""
    return {name: getattr(node, name).get_value() for name in _COUNTED}


def _count_as_skipped(
    node: Any,
    old: dict[str, Array],
    now: dict[str, Array],
    reason: Array,
    is_applied: Array,
) -> None:
    """Counts the updates that were good, and are lost with the block, as skipped."""
    steps = now["steps"] - old["steps"]
    own_skips = now["skips"] - old["skips"]
    lost = jnp.where(is_applied, 0, steps - own_skips)
    in_a_row = count_up(old["consecutive_skips"], steps)
    new = {
        "applied": now["applied"] & is_applied,
        "skips": count_up(now["skips"], lost),
        "consecutive_skips": jnp.where(is_applied, now["consecutive_skips"], in_a_row),
        "last_skip_reason": jnp.where(
            (lost > 0) & (own_skips == 0),
            SkipReason.ATOMIC.value,
            now["last_skip_reason"],
        ),
    }
    for of, name in COUNTED_IN.items():
        counter = getattr(node, name)
        if not isinstance(counter, tuple):  # without a spike policy
            by_reason = jnp.where(reason == of, lost, 0)
            new[name] = count_up(counter.get_value(), by_reason)
    for name, value in new.items():
        getattr(node, name).set_value(value)


_COUNTED = "steps", "applied", "skips", "consecutive_skips", "last_skip_reason"


def _without(variables: list[Any], others: list[Any]) -> list[Any]:
    left_out = set(map(id, others))
    return [variable for variable in variables if id(variable) not in left_out]


def _check_updated(wrapper: Any, old_steps: Any) -> None:
    if wrapper.steps.get_value() is old_steps:
        raise ValueError(
            "optimizer.update must be called in the block of jls.atomic, which then "
            "knows whether the step was skipped. Write the call inside."
        )


def _is_one_update(wrapper: Any, updates: list[Update], before: Iterable[Any]) -> bool:
    """Whether the block has updated once, from the parameters that it began with.

    Then the wrapper has rolled back what the optimizer updates, and a second select
    would cost a copy of it. An update in a loop is not known by its state.
    """
    if len(updates) != 1:
        return False
    ((params, state),) = updates
    is_direct = wrapper.steps.get_value() is state.steps
    return is_direct and set(map(id, jax.tree.leaves(params))) <= set(map(id, before))
