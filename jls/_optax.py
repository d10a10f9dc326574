# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: check, step or skip, adjust.

    gradients finite  loss finite   inner optimizer  scale     counted as
    yes               yes           steps            adjusts   applied
    no                yes           keeps its state  adjusts   skip
    any               no            keeps its state  is kept   skip, nonfinite loss

Differs from `optax.apply_if_finite` in:
1. It never gives in: no number of bad steps gets one committed.
2. Non-finite losses are told apart; the scale cannot mend them.
3. Narrow gradients are widened to float32, and the state keeps the dtypes of `init`, so
   float16 and bfloat16 work where `lax.cond` raises a TypeError there.
4. The updates of a skipped step are -0.0: adding +0.0 turns a -0.0 parameter to +0.0.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jls._advance import Guard, GuardedUpdate
from jls._buffers import own, placed_like
from jls._dynamic import dynamic
from jls._locate import find, is_wrapper_state, locate
from jls._static import static
from jls._tree import AxisName, check_axis_name, is_inexact
from jls._types import LossScaledState, Scaler


def loss_scaled(
    inner: optax.GradientTransformation,
    scaler: Scaler = dynamic(),  # noqa: B008, a tuple of pure functions
    *,
    axis_name: AxisName = None,
    check_updates: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner`, made to skip steps that are not finite and to adjust the scale.

    Takes true gradients, as `jls.value_and_grad` gives them, and never unscales. A
    skipped step is whole: `inner`'s state stays bit for bit and the updates are -0.0,
    so parameters, moments, schedule counts and accumulators inside are the old ones.
    What is chained outside does not freeze; put clipping and accumulation inside.

    Args:
      inner: any optax transformation. Extra arguments of `update` reach it.
      scaler: how the loss scale moves.
      axis_name: the axis or axes of `shard_map` or `pmap` over which all devices have
        to take the same decision. Only the decision is reduced: average the gradients
        yourself, before. Under plain `jit` nothing is needed.
      check_updates: True skips the step also when `inner` makes non-finite updates out
        of finite gradients, or a NaN in a scalar of its state (a finite step for the
        scaler). Updates and new state are then read once more: on CPU a whole train
        step of a small transformer moves 1.4 times the bytes. None does so when a
        parameter is narrower than float32, where an optimizer's eps and moments
        underflow. False never.

    Returns:
      A transformation with state `LossScaledState`. Its `update` takes optax's extra
      argument `value`, the true loss: when that is not finite (on any device of
      `axis_name`) the step is skipped, the loss scale stays, since no scale can mend
      it, and the step counts as a nonfinite loss. It also takes `overflow`, a flag for
      gradients from which overflowing parts have been left out: the step is taken, and
      the scale adjusts as after an overflow. Updates come in the wider dtype of
      gradient and parameter, at least float32. (`optax.apply_updates` turns subnormal
      parameters to 0 on CPU whatever the update; `jls.select` does not.)

    Raises:
      TypeError: if `inner`, `scaler`, `axis_name` or `check_updates` is of another
        type; at `update`, if `state` is none of this wrapper.
      ValueError: at `init`, if `inner` already contains a wrapper of jls; at `update`,
        if `inner` or `scaler` changes the structure or a shape of its state.

    Warns:
      UserWarning: at `init`, if a parameter is float16.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(1024.0))
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.array([1.0, jnp.inf]), state, params)
      >>> updates
      Array([-0., -0.], dtype=float32)
      >>> state.applied, jls.loss_scale(state)
      (Array(False, dtype=bool), Array(512., dtype=float32))
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "inner must be an optax.GradientTransformation, e.g. optax.adamw(3e-4), "
            f"got {type(inner).__name__} {inner!r}. Of an optax.MultiSteps, pass "
            "its gradient_transformation()."
        )
    if not isinstance(scaler, Scaler):
        raise TypeError(
            "scaler must be a jls.LossScaler or a jls.MagnitudeScaler, e.g. "
            "jls.dynamic(), "
            f"got {type(scaler).__name__} {scaler!r}."
        )
    if not (check_updates is None or isinstance(check_updates, bool)):
        raise TypeError(
            f"check_updates must be True, False or None, got {check_updates!r}."
        )
    check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params):
        inner_state = inner.init(params)
        nested = find(inner_state, is_wrapper_state)
        if nested:
            raise ValueError(
                "inner must not contain jls.loss_scaled or jls.skip_nonfinite, but its "
                f"state has one at '{nested[0][0]}': the step would be checked and the "
                "scale adjusted twice. Keep the outermost wrapper."
            )
        # A policy may hold on to the arrays that it returns: all are foreign.
        scaler_state = scaler.init()
        scaler_state = own(scaler_state, scaler_state)
        dtype = locate(scaler_state).loss_scale.dtype
        if dtype != jnp.float32:
            raise ValueError(
                f"scaler.init must give a float32 loss_scale, got {dtype}."
            )
        _warn_of_half_params(params)
        count = sum(is_inexact(leaf) for leaf in jax.tree.leaves(params))
        state = LossScaledState(
            inner_state=own(inner_state, params),
            scaler_state=scaler_state,
            applied=jnp.zeros((), jnp.bool_),
            steps=jnp.zeros((), jnp.int32),
            skips=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            nonfinite_losses=jnp.zeros((), jnp.int32),
            nonfinite_updates=jnp.zeros((), jnp.int32),
            skip_reason=jnp.zeros((), jnp.int32),
            nonfinite_leaves=jnp.zeros(count, jnp.bool_),
        )
        return placed_like(params, state)

    guard = Guard(inner, scaler, axis_name, check_updates)
    return optax.GradientTransformationExtraArgs(init, GuardedUpdate(guard))


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = None,
    check_updates: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner`, made to skip steps that are not finite; no scaling.

    For bfloat16 and float32 runs, which need no loss scale. It is `jls.loss_scaled`
    with a fixed scale of 1: same state, same counters, and `jls.value_and_grad` works
    with it, so that a change of dtype is a change of this one line.

    Args:
      inner: any optax transformation.
      axis_name: see `jls.loss_scaled`.
      check_updates: see `jls.loss_scaled`.

    Returns:
      A transformation with state `LossScaledState`.

    Raises:
      TypeError, ValueError: see `jls.loss_scaled`.

    Example:
      >>> optimizer = jls.skip_nonfinite(optax.sgd(1e-3))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> _, state = optimizer.update({"w": jnp.full(2, jnp.nan)}, state, params)
      >>> jls.metrics(state)["skips"]
      Array(1, dtype=int32)
    """
    return loss_scaled(
        inner, static(1.0), axis_name=axis_name, check_updates=check_updates
    )


def _warn_of_half_params(params: Any) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    half = [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if getattr(leaf, "dtype", None) == jnp.float16
    ]
    if half:
        warnings.warn(
            f"{len(half)} of {len(leaves)} parameters are float16, first '{half[0]}'. "
            "Updates smaller than half a unit in the last place, about 1/4000 of the "
            "parameter, vanish. Keep float32 master weights and cast them to float16 "
            "in the forward pass.",
            stacklevel=3,
        )
