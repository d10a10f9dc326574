# SPDX-License-Identifier: Apache-2.0
"""One step of a wrapped optimizer: observe, attempt, adjust, count.

    loss        gradients   updates  inner optimizer  scale    counted as
    finite      finite      good     steps            adjusts  applied
    finite      not finite  -        keeps its state  adjusts  skip
    not finite  either      -        keeps its state  is kept  skip, nonfinite loss
    finite      finite      bad      keeps its state  adjusts  skip, nonfinite update

Updates are bad if they are checked and one is not finite. For the scaler that is a
finite step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jls._reduce import (
    AxisName,
    agree,
    agree_on_max,
    all_finite,
    any_nan,
    finite_leaves,
    global_norm,
    global_norm_once,
    leaf_magnitudes,
    varying_axes,
)
from jls._rollback import roll_back_unless
from jls._state import is_wrapper_state
from jls._tree import (
    Rest,
    as_flag,
    cast_like,
    combine,
    floats_of,
    is_array,
    is_extended,
    is_inexact,
    is_narrow,
    leaves_at_floats,
    map_rest,
    partition,
    select,
    wide_dtype,
    widen,
)
from jls._types import LossScaledState, MagnitudeScaler, Scaler, SkipReason


@dataclasses.dataclass(frozen=True, eq=False)
class WrapperUpdate:
    """The update function of `jls.loss_scaled`, with the arguments of that call.

    A class, so that `wrapper_of` recognizes it: Flax may rebuild the transformation
    from its two functions.
    """

    inner: optax.GradientTransformationExtraArgs
    scaler: Scaler
    axis_name: AxisName
    check_updates: bool | None

    @functools.cached_property
    def scaler_structure(self) -> Any:
        """The structure of the scaler's states; an eager step does not look it up."""
        return jax.tree.structure(jax.eval_shape(self.scaler.init))

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        """Returns the updates and the next state, as optax's `update` does."""
        step = _observe(self, updates, state, params, extra)
        made = _attempt(self, step, state, params, lambda made: made, step.no_updates)
        return made.result, _count(self, step, made, state)

    def apply(
        self, grads: Any, state: Any, params: Any, **extra: Any
    ) -> tuple[Any, LossScaledState, Array]:
        """Returns the new parameters, the next state and the global norm of `grads`.

        The norm costs nothing if the inner optimizer clips by it.
        """
        step = _observe(self, grads, state, params, extra)

        def add(updates):
            return optax.apply_updates(params, updates)

        made = _attempt(self, step, state, params, add, params)
        norm = global_norm_once(step.grads, step.grads_or_ones, step.is_finite)
        return made.result, _count(self, step, made, state), norm


def wrapper_of(optimizer: Any) -> WrapperUpdate | None:
    """The update function of `optimizer`, if `jls.loss_scaled` made it."""
    update = getattr(optimizer, "update", None)
    return update if isinstance(update, WrapperUpdate) else None


def update_and_apply(
    optimizer: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any, Array]:
    """The new parameters, the new state, and the global norm of `grads`."""
    wrapper = wrapper_of(optimizer)
    if wrapper:
        return wrapper.apply(grads, state, params, **extra)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, state = optimizer.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state, global_norm(floats_of(grads))


class _Step(NamedTuple):
    """The inputs of a step, and what all devices observed."""

    grads: list[Array]  # the floating-point leaves, in at least float32
    grads_or_ones: list[Array]  # the same, or ones if they or the loss are not finite
    rest: Rest  # the tree without those leaves
    checks_updates: bool
    extra: dict[str, Any]  # for the inner optimizer; ones likewise
    no_updates: Any  # the updates of a skipped step
    loss_finite: Array  # bool[]
    leaves_finite: Array  # bool[n]  of the gradients
    is_finite: Array  # bool[]  whether both are finite
    for_scaler: Array  # bool[] or f32[], what the scaler's `adjust` takes


class _Attempt(NamedTuple):
    """The outcome of a step."""

    result: Any  # the updates or the new parameters; rolled back if it was skipped
    inner_state: Any  # rolled back likewise
    applied: Array  # bool[]
    leaves_finite: Array  # bool[n]  of the gradients or, if those are, of the updates


def _observe(
    wrapper: WrapperUpdate, updates: Any, state: Any, params: Any, extra: dict[str, Any]
) -> _Step:
    _check_state(state)
    partial_overflow = extra.pop("partial_overflow", False)
    overflowed = as_flag("partial_overflow", partial_overflow)
    floats, rest = partition(updates)
    flags = jnp.stack([all_finite(extra.get("value")), ~overflowed])
    # All devices agree on the flags and on what the scaler sees, by one collective.
    if isinstance(wrapper.scaler, MagnitudeScaler):
        flags = jnp.where(flags, jnp.float32(0.0), jnp.inf)
        sizes = jnp.concatenate([flags, leaf_magnitudes(floats)])
        sizes = agree_on_max(sizes, wrapper.axis_name)
        flags, for_scaler = sizes < jnp.inf, jnp.max(sizes[1:])
    else:
        flags = jnp.concatenate([flags, finite_leaves(floats)])
        flags = agree(flags, wrapper.axis_name)
        for_scaler = jnp.all(flags[1:])
    loss_finite, leaves_finite = flags[0], flags[2:]
    _check_count(leaves_finite, state.nonfinite_leaves)
    is_finite = jnp.all(leaves_finite) & loss_finite
    _check_axes(is_finite, state.steps, wrapper.axis_name)
    grads = list(map(widen, floats))
    # A skipped step runs too. It sees ones: a line search might never end on NaN.
    return _Step(
        grads=grads,
        grads_or_ones=[jnp.where(is_finite, x, jnp.ones_like(x)) for x in grads],
        rest=rest,
        checks_updates=_checks_updates(wrapper, updates, params),
        extra=_ones_unless(is_finite, extra),
        no_updates=_no_updates(updates, grads, rest, params),
        loss_finite=loss_finite,
        leaves_finite=leaves_finite,
        is_finite=is_finite,
        for_scaler=for_scaler,
    )


def _attempt(
    wrapper: WrapperUpdate,
    step: _Step,
    state: LossScaledState,
    params: Any,
    finish: Callable[[Any], Any],
    unfinished: Any,
) -> _Attempt:
    """Runs the inner optimizer, and rolls back if the step must not be applied.

    Args:
      wrapper: what `jls.loss_scaled` was given.
      step: what was observed.
      state: the state before.
      params: the parameters, or None.
      finish: turns the updates into the result.
      unfinished: the result of a step that is skipped.
    """

    def run():
        grads = combine(step.grads_or_ones, step.rest)
        made, new = wrapper.inner.update(grads, state.inner_state, params, **step.extra)
        made = cast_like("the inner optimizer's update", made, step.no_updates)
        new = cast_like("the inner optimizer's state", new, state.inner_state)
        return made, new

    def run_and_finish():
        made, new = run()
        return finish(made), new

    old = unfinished, state.inner_state
    if not step.checks_updates:
        new = roll_back_unless(step.is_finite, run_and_finish, old)
        return _Attempt(*new, step.is_finite, step.leaves_finite)
    made, new = run()
    updates_finite = finite_leaves(leaves_at_floats(made, step.rest))
    # A NaN moment shows in its update. A NaN in a scalar shared by all parameters may
    # not, as at first in D-Adaptation. Some optimizers keep an inf on purpose.
    scalars = [x for x in floats_of(new) if jnp.ndim(x) == 0]
    flags = jnp.concatenate([~any_nan(scalars)[None], updates_finite])
    flags = agree(flags, wrapper.axis_name)
    applied = step.is_finite & jnp.all(flags)
    new = select(applied, (finish(made), new), old)
    leaves_finite = jnp.where(step.is_finite, flags[1:], step.leaves_finite)
    return _Attempt(*new, applied, leaves_finite)


def _count(
    wrapper: WrapperUpdate, step: _Step, made: _Attempt, state: LossScaledState
) -> LossScaledState:
    """The next state: the scaler adjusts, the counters advance."""
    _check_scaler_state(wrapper.scaler_structure, state.scaler_state)
    adjusted = wrapper.scaler.adjust(state.scaler_state, step.for_scaler)
    adjusted = cast_like("the scaler's state", adjusted, state.scaler_state)
    applied, loss_finite = made.applied, step.loss_finite
    bad_updates = step.is_finite & ~applied
    gradients, loss, updates = SkipReason.GRADIENTS, SkipReason.LOSS, SkipReason.UPDATES
    reason = jnp.where(bad_updates, updates.value, gradients.value)
    reason = jnp.where(loss_finite, reason, loss.value)
    return LossScaledState(
        inner_state=made.inner_state,
        scaler_state=select(loss_finite, adjusted, state.scaler_state),
        applied=applied,
        steps=_increment(state.steps),
        skips=jnp.where(applied, state.skips, _increment(state.skips)),
        consecutive_skips=jnp.where(applied, 0, _increment(state.consecutive_skips)),
        nonfinite_losses=jnp.where(
            loss_finite, state.nonfinite_losses, _increment(state.nonfinite_losses)
        ),
        nonfinite_updates=jnp.where(
            bad_updates, _increment(state.nonfinite_updates), state.nonfinite_updates
        ),
        skip_reason=jnp.where(applied, state.skip_reason, reason),
        nonfinite_leaves=jnp.where(
            applied, state.nonfinite_leaves, ~made.leaves_finite
        ),
    )


def _checks_updates(wrapper: WrapperUpdate, updates: Any, params: Any) -> bool:
    if wrapper.check_updates is None:
        return is_narrow(updates if params is None else params)
    return wrapper.check_updates


def _no_updates(updates: Any, grads: list[Array], rest: Rest, params: Any) -> Any:
    """What leaves `params` as they are: -0.0, in the wider dtype of either tree."""
    same = jax.tree.structure(params) == jax.tree.structure(updates)
    targets = leaves_at_floats(params, rest) if same else grads

    def zero(grad, target):
        leaves = [leaf for leaf in (grad, target) if is_inexact(leaf)]
        # numpy's rule: JAX's rule raises under strict promotion.
        dtype = np.result_type(*(wide_dtype(jnp.result_type(leaf)) for leaf in leaves))
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        value = complex(-0.0, -0.0) if is_complex else -0.0
        return jnp.full_like(grad, value, dtype=dtype)

    def zero_rest(leaf):
        is_number = is_array(leaf) and not is_extended(leaf)
        return jnp.zeros_like(leaf) if is_number else leaf

    zeros = [zero(*pair) for pair in zip(grads, targets, strict=True)]
    return combine(zeros, map_rest(zero_rest, rest))


def _ones_unless(flag: Array, extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` with ones for inexact leaves unless `flag`; zeros might be divided by."""

    def choose(leaf):
        # A finite Python number stays one: the inner optimizer may branch on it.
        if not is_inexact(leaf) or (isinstance(leaf, float) and math.isfinite(leaf)):
            return leaf
        return jnp.where(flag, leaf, jnp.ones_like(leaf))

    return jax.tree.map(choose, extra)


def _increment(count: Array) -> Array:
    """`count + 1`; stays at the int32 maximum instead of wrapping."""
    return jnp.asarray(optax.safe_increment(count))


def _check_state(state: Any) -> None:
    if not is_wrapper_state(state):
        raise TypeError(
            "state must be a LossScaledState as the optimizer's init makes it, got "
            f"{type(state).__name__}. The order is update(grads, state, params)."
        )


def _check_count(flags: Array, old: Array) -> None:
    if flags.shape != old.shape:
        raise ValueError(
            "updates must have as many floating-point leaves as the params of init, "
            f"got {flags.size} and {old.size}."
        )


def _check_axes(flag: Array, count: Array, axis_name: AxisName) -> None:
    undecided = varying_axes(flag) - varying_axes(count)
    if undecided:
        raise ValueError(
            "axis_name must name each axis of jax.shard_map over which gradients or "
            f"loss differ, so that all devices decide as one: got {axis_name!r}, but "
            f"they differ over {sorted(undecided)}. Pass axis_name= to jls.loss_scaled."
        )


def _check_scaler_state(expected: Any, scaler_state: Any) -> None:
    if jax.tree.structure(scaler_state) != expected:
        raise ValueError(
            "the scaler's state must be one that this scaler made: "
            f"scaler.init gives {expected}, the optimizer's state carries "
            f"{jax.tree.structure(scaler_state)}. To go on under another scaler, "
            "replace it with a fresh one: "
            "opt_state._replace(scaler_state=scaler.init())."
        )
