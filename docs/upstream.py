# fmt: off
# ruff: noqa: I001, UP007, UP035, UP045
"""Skips bad steps of any optimizer, and scales the loss of float16 training."""

from typing import Any, Callable, NamedTuple, Optional, Union

import jax
from jax import lax
import jax.numpy as jnp
from optax._src import base
from optax._src import numerics
import optax.tree


class SpikeState(NamedTuple):
  """State of the guard returned by `spike_guard`; rows are value and norm."""

  seen: jax.typing.ArrayLike  # shape=(2, window), dtype=jnp.float32.
  count: jax.typing.ArrayLike  # shape=(2,), dtype=jnp.int32.
  tokens: jax.typing.ArrayLike  # shape=(), dtype=jnp.float32.


class SpikeGuard(NamedTuple):
  """A pair of pure functions that tell which finite steps to skip."""

  init: Callable[[], Any]
  judge: Callable[[Any, Optional[jax.Array], jax.Array], tuple[Any, jax.Array]]


def spike_guard(
    window: int = 128, sigmas: float = 6.0, budget: float = 4.0
) -> SpikeGuard:
  """Skips steps whose loss or gradient norm is far above the recent ones.

  A step is a spike if its value or norm exceeds ``mean + sigmas * max(std,
  |mean| / 512)`` of the last ``window`` steps that were not skipped. Of any T
  steps at most ``budget + T * budget / window`` are skipped, so that no lasting
  change freezes a run.

  Args:
    window: Number of steps to take statistics over. Nothing is skipped before
      half of them have been seen.
    sigmas: Number of standard deviations above the mean that is a spike.
    budget: Number of spikes to skip in a row, and in each ``window`` steps.

  Returns:
    A :class:`SpikeGuard` for :func:`optax.contrib.skip_nonfinite`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> guard = optax.contrib.spike_guard(window=4)
    >>> solver = optax.contrib.skip_nonfinite(optax.sgd(0.1), guard)
    >>> params = jnp.array([1.])
    >>> state = solver.init(params)
    >>> for loss in [1.1, 0.9, 1.0, 50.0]:
    ...   _, state = solver.update(params, state, params, value=loss)
    ...   print(state.skip_reason)
    0
    0
    0
    3
  """

  def init_fn():
    return SpikeState(
        seen=jnp.zeros([2, window], jnp.float32),
        count=jnp.zeros([2], jnp.int32),
        tokens=jnp.asarray(budget, jnp.float32),
    )

  def judge_fn(state, value, norm):
    value = jnp.nan if value is None else value
    new = jnp.stack([jnp.asarray(x, jnp.float32) for x in (value, norm)])
    seen, count, tokens = state
    valid = jnp.arange(window) < count[:, None]
    mean = jnp.mean(seen, axis=1, where=valid)
    std = jnp.std(seen, axis=1, where=valid)
    # A loss in bfloat16 may be constant for long, and then one rounding higher.
    limit = mean + sigmas * jnp.maximum(std, jnp.abs(mean) / 512)
    is_spike = jnp.any((count >= max(2, window // 2)) & (new > limit))
    skip = is_spike & (tokens >= 1)
    refilled = jnp.minimum(tokens + budget / window, budget)
    enters = ~skip & ~jnp.isnan(new)
    new = jnp.clip(new, -(2.0**60), 2.0**60)  # Squares stay finite.
    entered = seen.at[jnp.arange(2), count % window].set(new)
    count = jnp.where(count == 2 * window, window, count)
    return SpikeState(
        seen=jnp.where(enters[:, None], entered, seen),
        count=count + enters,
        tokens=jnp.where(skip, tokens - 1, refilled),
    ), skip

  return SpikeGuard(init_fn, judge_fn)


class SkipNonfiniteState(NamedTuple):
  """State of the `GradientTransformation` returned by `skip_nonfinite`."""

  inner_state: base.OptState
  # 0: applied, 1: gradients not finite, 2: value not finite, 3: spike.
  skip_reason: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32.
  consecutive_skips: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32.
  total_skips: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32.
  spike_state: Any


def _all_finite(tree):
  leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in inexact]))


def skip_nonfinite(
    inner: base.GradientTransformation,
    spikes: Optional[SpikeGuard] = None,
    axis_name: Optional[Union[str, tuple[str, ...]]] = None,
) -> base.GradientTransformationExtraArgs:
  """Skips steps whose gradients or loss contain NaNs or Infs.

  A skipped step leaves the inner state as it was, and its updates are -0.0, so
  that params stay the same bit for bit. Unlike :func:`optax.apply_if_finite`
  this never accepts a bad step: stop the training if ``consecutive_skips`` in
  its state grows.

  Note that a bad loss can only be skipped if it is passed to the update
  function using the keyword argument ``value``.

  Args:
    inner: Inner transformation to be wrapped.
    spikes: Which finite steps to skip, if any, e.g. ``spike_guard()``.
    axis_name: Axes of ``jax.shard_map`` or ``jax.pmap`` over which devices must
      agree. Gradients are not averaged.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` object.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> solver = optax.contrib.skip_nonfinite(optax.adam(1e-3))
    >>> params = jnp.array([1., 2.])
    >>> state = solver.init(params)
    >>> updates, state = solver.update(jnp.array([jnp.nan, 1.]), state, params)
    >>> print(optax.apply_updates(params, updates), state.total_skips)
    [1. 2.] 1
  """
  inner = base.with_extra_args_support(inner)

  def init_fn(params):
    return SkipNonfiniteState(
        inner_state=inner.init(params),
        skip_reason=jnp.zeros([], jnp.int32),
        consecutive_skips=jnp.zeros([], jnp.int32),
        total_skips=jnp.zeros([], jnp.int32),
        spike_state=spikes.init() if spikes is not None else (),
    )

  def agree(flag):
    if axis_name is None:
      return flag
    return lax.pmin(flag.astype(jnp.int32), axis_name).astype(jnp.bool_)

  def update_fn(updates, state, params=None, **extra_args):
    value = extra_args.get("value")
    reason = jnp.where(agree(_all_finite(updates)), 0, 1)
    reason = jnp.where(agree(_all_finite(value)), reason, 2)
    is_finite = reason == 0

    # Nothing that the inner transformation does with a NaN matters, except that
    # a loop in it might not end.
    def clean(x):
      return jnp.where(is_finite, x, jnp.ones_like(x))

    updates = jax.tree.map(clean, updates)
    if value is not None:
      extra_args["value"] = value = clean(value)

    spike_state = state.spike_state
    if spikes is not None:
      wide = jax.tree.map(
          lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), updates
      )
      signals = value, optax.tree.norm(wide)  # Squares overflow in float16.
      if axis_name is not None:
        signals = lax.pmax(signals, axis_name)
      judged, is_spike = spikes.judge(spike_state, *signals)
      reason = jnp.where(is_finite & is_spike, 3, reason)
      spike_state = optax.tree.where(is_finite, judged, spike_state)

    applied = reason == 0
    updates, inner_state = inner.update(
        updates, state.inner_state, params, **extra_args
    )
    # Inner states of narrow params may have been promoted.
    inner_state = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old).astype(
            jnp.result_type(old)
        ),
        inner_state,
        state.inner_state,
    )
    updates = jax.tree.map(
        lambda x: jnp.where(applied, x, -jnp.zeros_like(x)), updates
    )
    return updates, SkipNonfiniteState(
        inner_state=inner_state,
        skip_reason=reason.astype(jnp.int32),
        consecutive_skips=jnp.where(
            applied, 0, numerics.safe_increment(state.consecutive_skips)
        ),
        total_skips=jnp.where(
            applied,
            state.total_skips,
            numerics.safe_increment(state.total_skips),
        ),
        spike_state=spike_state,
    )

  return base.GradientTransformationExtraArgs(init_fn, update_fn)


class LossScaledState(NamedTuple):
  """State of the `GradientTransformation` returned by `loss_scaled`."""

  inner_state: SkipNonfiniteState
  loss_scale: jax.typing.ArrayLike  # shape=(), dtype=jnp.float32.
  finite_count: jax.typing.ArrayLike  # shape=(), dtype=jnp.int32.


def loss_scaled(
    inner: base.GradientTransformation,
    init_scale: float = 2.0**15,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    spikes: Optional[SpikeGuard] = None,
    axis_name: Optional[Union[str, tuple[str, ...]]] = None,
) -> base.GradientTransformationExtraArgs:
  """Keeps a loss scale for float16 training, and skips bad steps.

  The scale is doubled after ``growth_interval`` finite steps and halved after
  one with gradients that are not finite. The update function takes gradients
  that have been unscaled, as those of :func:`scaled_value_and_grad` are, so that
  any clipping is right inside and outside of ``inner``.

  Args:
    inner: Inner transformation to be wrapped.
    init_scale: First loss scale.
    growth_interval: Number of finite steps after which the scale is doubled.
    min_scale: The scale is not halved below this.
    max_scale: The scale is not doubled above this.
    spikes: See :func:`skip_nonfinite`.
    axis_name: See :func:`skip_nonfinite`.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` object.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> solver = optax.contrib.loss_scaled(optax.adamw(1e-3))
    >>> params = jnp.array([1.])
    >>> state = solver.init(params)
    >>> _, state = solver.update(jnp.array([jnp.inf]), state, params)
    >>> print(optax.tree.get(state, 'loss_scale'))
    16384.0

  References:
    Micikevicius et al, `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018
  """
  guard = skip_nonfinite(inner, spikes, axis_name)

  def init_fn(params):
    return LossScaledState(
        inner_state=guard.init(params),
        loss_scale=jnp.asarray(init_scale, jnp.float32),
        finite_count=jnp.zeros([], jnp.int32),
    )

  def update_fn(updates, state, params=None, **extra_args):
    updates, inner_state = guard.update(
        updates, state.inner_state, params, **extra_args
    )
    scale, count = state.loss_scale, state.finite_count + 1
    grow = count >= growth_interval
    grown = jnp.maximum(scale, jnp.minimum(scale * 2, max_scale))
    halved = jnp.minimum(scale, jnp.maximum(scale / 2, min_scale))
    # No scale cures a bad loss; a spike is no overflow.
    overflow, bad_value = (inner_state.skip_reason == i for i in (1, 2))
    new_scale = jnp.where(overflow, halved, jnp.where(grow, grown, scale))
    return updates, LossScaledState(
        inner_state=inner_state,
        loss_scale=jnp.where(bad_value, scale, new_scale),
        finite_count=jnp.where(
            bad_value, state.finite_count, jnp.where(overflow | grow, 0, count)
        ),
    )

  return base.GradientTransformationExtraArgs(init_fn, update_fn)


def scaled_value_and_grad(
    fun: Callable[..., Any], argnums: Union[int, tuple[int, ...]] = 0
) -> Callable[..., tuple[jax.Array, base.Updates]]:
  """Like ``jax.value_and_grad``, by way of the scaled loss.

  Args:
    fun: Function to be differentiated, e.g. the loss.
    argnums: Which of its arguments to differentiate with respect to.

  Returns:
    A function of the state of :func:`loss_scaled`, however nested, and the
    arguments of ``fun``, that returns its value and gradients, both unscaled.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> solver = optax.contrib.loss_scaled(optax.sgd(0.1), init_scale=2.0**12)
    >>> params = jnp.array([2.], jnp.float16)
    >>> state = solver.init(params)
    >>> loss_fn = lambda x: jnp.sum(x * 2.0**-12) * 2.0**-14
    >>> print(jax.grad(loss_fn)(params))
    [0.]
    >>> print(optax.contrib.scaled_value_and_grad(loss_fn)(state, params)[1])
    [1.4901161e-08]
  """

  def value_and_grad_fn(opt_state, *args):
    scale = optax.tree.get(opt_state, "loss_scale")

    def scaled_fun(*args):
      value = fun(*args).astype(jnp.float32)
      return value * scale, value

    grads, value = jax.grad(scaled_fun, argnums, has_aux=True)(*args)
    return value, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)

  return value_and_grad_fn
