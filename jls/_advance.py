# SPDX-License-Identifier: Apache-2.0
"""One step of a guarded optimizer: check, step or skip, adjust, count."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jls import _guard, _validate
from jls._magnitude import (
    agree_on_largest,
    all_finite,
    finite_leaves,
    leaf_magnitudes,
)
from jls._norms import norm_of_step
from jls._rollback import unless_taken_back
from jls._tree import (
    AxisName,
    agree,
    as_flag,
    select,
    varying_axes,
    widen,
)
from jls._types import LossScaledState, MagnitudeScaler, Scaler


@dataclasses.dataclass(frozen=True, eq=False)
class Guard:
    """What `jls.loss_scaled` was given."""

    inner: optax.GradientTransformationExtraArgs
    scaler: Scaler
    axis_name: AxisName
    check_updates: bool | None

    @functools.cached_property
    def scaler_structure(self) -> Any:
        """That of the policy's states; looked up once, not in each eager step."""
        return jax.tree.structure(jax.eval_shape(self.scaler.init))


def advance(
    guard: Guard,
    updates: Any,
    state: LossScaledState,
    params: Any,
    extra: dict[str, Any],
    *,
    apply: bool,
) -> tuple[Any, LossScaledState, Any]:
    """The updates, or if `apply` the new parameters and the norm; the next state.

    The norm costs nothing if the inner optimizer clips by it.
    """
    inner, axis_name = guard.inner, guard.axis_name
    _validate.wrapper_state(state)
    overflow = as_flag("overflow", extra.pop("overflow", False))
    flags = jnp.stack([all_finite(extra.get("value")), ~overflow])
    flags, observed = _observe(guard, flags, updates)
    loss_finite, leaves_finite = flags[0], flags[2:]
    _check_count(leaves_finite, state.nonfinite_leaves)
    grads_finite = jnp.all(leaves_finite)
    acceptable = grads_finite & loss_finite
    _check_axes(acceptable, state.steps, axis_name)
    no_updates = _guard.no_updates(updates, params)
    kept = (params if apply else no_updates), state.inner_state
    checks = guard.check_updates
    if checks is None:
        watched = params
        checks = _guard.is_narrow(updates if watched is None else watched)
    # A rejected step runs too. It sees ones: a line search might never end on NaN.
    grads, clean = _guard.ones_unless(acceptable, (jax.tree.map(widen, updates), extra))

    def step():
        made, new = inner.update(grads, state.inner_state, params, **clean)
        made = _guard.like("the inner optimizer's update", made, no_updates)
        return made, _guard.like("the inner optimizer's state", new, state.inner_state)

    def stepped(made, new):
        return (optax.apply_updates(params, made) if apply else made), new

    applied, good = acceptable, leaves_finite
    if checks:
        made, new = step()
        # A NaN moment shows in its update. A NaN estimate of one number for all may
        # not, as that of D-Adaptation does not at first.
        numbers = [x for x in jax.tree.leaves(new) if jnp.ndim(x) == 0]
        flags = [~_guard.has_nan(numbers)[None], finite_leaves(made)]
        flags = agree(jnp.concatenate(flags), axis_name)
        applied = acceptable & jnp.all(flags)
        good = jnp.where(acceptable, flags[1:], leaves_finite)
        made, inner_state = select(applied, stepped(made, new), kept)
    else:
        arrays = unless_taken_back(
            acceptable,
            lambda: _guard.arrays(stepped(*step())),
            _guard.arrays(kept),
        )
        made, inner_state = _guard.with_arrays(kept, arrays)
    grad_norm = norm_of_step(updates, grads, acceptable) if apply else None
    _check_policy(guard.scaler_structure, state.scaler_state)
    adjusted = guard.scaler.adjust(state.scaler_state, observed)
    adjusted = _guard.like("the scaler's state", adjusted, state.scaler_state)
    reason = jnp.where(loss_finite, jnp.where(grads_finite, 3, 1), 2)
    new_state = LossScaledState(
        inner_state=inner_state,
        scaler_state=select(loss_finite, adjusted, state.scaler_state),
        applied=applied,
        steps=_increment(state.steps),
        skips=jnp.where(applied, state.skips, _increment(state.skips)),
        consecutive_skips=jnp.where(applied, 0, _increment(state.consecutive_skips)),
        nonfinite_losses=jnp.where(
            loss_finite, state.nonfinite_losses, _increment(state.nonfinite_losses)
        ),
        nonfinite_updates=jnp.where(
            applied | ~acceptable,
            state.nonfinite_updates,
            _increment(state.nonfinite_updates),
        ),
        skip_reason=jnp.where(applied, state.skip_reason, reason),
        nonfinite_leaves=jnp.where(applied, state.nonfinite_leaves, ~good),
    )
    return made, new_state, grad_norm


class GuardedUpdate:
    """The update function of `jls.loss_scaled`: one that can be told from others."""

    def __init__(self, guard: Guard):
        self.guard = guard

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        return advance(self.guard, updates, state, params, extra, apply=False)[:2]


def guard_of(optimizer: Any) -> Guard | None:
    """What `jls.loss_scaled` was given, if it made `optimizer`."""
    update = getattr(optimizer, "update", None)
    return update.guard if isinstance(update, GuardedUpdate) else None


def apply_gradients(
    optimizer: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any, Array]:
    """The new parameters, the new state, and the global norm of `grads`."""
    guard = guard_of(optimizer)
    if guard:
        return advance(guard, grads, state, params, extra, apply=True)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, state = optimizer.update(grads, state, params, **extra)
    params = optax.apply_updates(params, updates)
    return params, state, norm_of_step(grads, grads, True)


def _observe(guard: Guard, flags: Array, updates: Any) -> tuple[Array, Any]:
    """`flags` of the loss, of overflow, and of each leaf; and what the policy sees.

    All devices agree on both, by one collective.
    """
    if isinstance(guard.scaler, MagnitudeScaler):
        sizes = [jnp.where(flags, jnp.float32(0.0), jnp.inf), leaf_magnitudes(updates)]
        sizes = agree_on_largest(jnp.concatenate(sizes), guard.axis_name)
        return sizes < jnp.inf, jnp.max(sizes[1:])
    flags = jnp.concatenate([flags, finite_leaves(updates)])
    flags = agree(flags, guard.axis_name)
    return flags, jnp.all(flags[1:])


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


def _check_policy(expected: Any, scaler_state: Any) -> None:
    if jax.tree.structure(scaler_state) != expected:
        raise ValueError(
            "the state of the policy must be one that the policy has made: "
            f"scaler.init gives {expected}, the optimizer's state carries "
            f"{jax.tree.structure(scaler_state)}. To go on under another policy, "
            "put a fresh state of it there: "
            "opt_state._replace(scaler_state=scaler.init())."
        )


def _increment(count: Array) -> Array:
    """`count + 1`; stays at the int32 maximum instead of wrapping."""
    return jnp.asarray(optax.safe_increment(count))
