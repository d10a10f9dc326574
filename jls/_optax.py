# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: check, step or skip, adjust.

    gradients finite  loss finite   inner optimizer  scale     counted as
    yes               yes           steps            adjusts   applied
    no                yes           untouched        adjusts   skip
    any               no            untouched        is kept   skip, nonfinite loss

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
import numpy as np
import optax
from jax import Array, lax

from jls._dynamic import dynamic
from jls._locate import find, is_wrapper_state
from jls._static import static
from jls._tree import (
    AxisName,
    agree,
    all_finite,
    is_array,
    is_inexact,
    select,
    wide_dtype,
    widen,
)
from jls._types import LossScaledState, LossScaler


def loss_scaled(
    inner: optax.GradientTransformation,
    scaler: LossScaler = dynamic(),
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
        of finite gradients (a finite step for the scaler), for one more pass over
        them. None does so when a parameter is narrower than float32, where an
        optimizer's eps and moments underflow. False never.

    Returns:
      A transformation with state `LossScaledState`. Its `update` takes optax's extra
      argument `value`, the true loss: when that is not finite (on any device of
      `axis_name`) the step is skipped, the loss scale stays, since no scale can mend
      it, and the step counts as a nonfinite loss. Updates come in the gradients'
      dtypes, widened to float32.

    Raises:
      TypeError: if `inner`, `scaler` or `check_updates` is of another type.
      ValueError: at `init`, if `inner` already contains a wrapper of jls; at `update`,
        if `inner` changes the structure or a shape of its state or of the updates.

    Warns:
      UserWarning: at `init`, if a parameter is float16.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(1024.0))
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.array([1.0, jnp.inf]), state, params)
      >>> updates, state.applied, state.scaler_state.loss_scale
      (Array([-0., -0.], dtype=float32), Array(False, dtype=bool), Array(512., dtype=float32))
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "inner must be an optax.GradientTransformation, e.g. optax.adamw(3e-4), "
            f"got {type(inner).__name__} {inner!r}. Of an optax.MultiSteps, pass "
            "its gradient_transformation()."
        )
    if not isinstance(scaler, LossScaler):
        raise TypeError(
            "scaler must be a jls.LossScaler, e.g. jls.dynamic(), "
            f"got {type(scaler).__name__} {scaler!r}."
        )
    if not (check_updates is None or isinstance(check_updates, bool)):
        raise TypeError(
            f"check_updates must be True, False or None, got {check_updates!r}."
        )
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
        _warn_of_half_params(params)
        return LossScaledState(
            inner_state=_own(inner_state, params),
            scaler_state=jax.tree.map(lambda x: jnp.array(x, copy=True), scaler.init()),
            applied=jnp.zeros((), jnp.bool_),
            steps=jnp.zeros((), jnp.int32),
            skips=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            nonfinite_losses=jnp.zeros((), jnp.int32),
        )

    def update(updates, state, params=None, **extra):
        flags = jnp.stack([all_finite(updates), all_finite(extra.get("value"))])
        grads_finite, loss_finite = agree(flags, axis_name)
        acceptable = grads_finite & loss_finite
        kept = jax.tree.map(_no_update, updates), state.inner_state
        checks = _narrow(params, updates) if check_updates is None else check_updates
        # Measured on CPU in whole train steps: the branch is as fast as no guard at all
        # and a select up to 1.4 times slower. Elsewhere a select: for a branch the host
        # may have to read the flag, and the branches' constants fail shard_map's checks.
        branches = axis_name is None and jax.default_backend() == "cpu"

        def step():
            # A rejected step runs too wherever this is no branch. It sees zeros: a line
            # search might never end on NaN.
            grads = _zero_unless(acceptable, jax.tree.map(_widened, updates))
            stepped = inner.update(
                grads, state.inner_state, params, **_zero_unless(acceptable, extra)
            )
            stepped = (
                _like("updates", stepped[0], kept[0]),
                _like("state", stepped[1], kept[1]),
            )
            applied = acceptable
            if checks:
                applied = acceptable & all_finite(stepped[0], axis_name)
            if checks or not branches:
                stepped = select(applied, stepped, kept)
            return applied, _arrays(stepped)

        def skip():
            return acceptable, _arrays(kept)

        applied, arrays = lax.cond(acceptable, step, skip) if branches else step()
        new_updates, inner_state = _with_arrays(kept, arrays)
        adjusted = scaler.adjust(state.scaler_state, grads_finite)
        return new_updates, LossScaledState(
            inner_state=inner_state,
            scaler_state=select(loss_finite, adjusted, state.scaler_state),
            applied=applied,
            steps=optax.safe_increment(state.steps),
            skips=_increment_if(~applied, state.skips),
            consecutive_skips=jnp.where(
                applied, 0, optax.safe_increment(state.consecutive_skips)
            ),
            nonfinite_losses=_increment_if(~loss_finite, state.nonfinite_losses),
        )

    return optax.GradientTransformationExtraArgs(init, update)


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
      >>> optimizer = jls.skip_nonfinite(optax.adam(1e-3))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> _, state = optimizer.update({"w": jnp.full(2, jnp.nan)}, state, params)
      >>> jls.metrics(state)["skips"]
      Array(1, dtype=int32)
    """
    return loss_scaled(
        inner, static(1.0), axis_name=axis_name, check_updates=check_updates
    )


def _widened(leaf: Any) -> Any:
    return widen(leaf) if is_inexact(leaf) else leaf


def _no_update(leaf: Any) -> Any:
    """What leaves a parameter as it is, bit for bit."""
    if is_inexact(leaf):
        dtype = wide_dtype(jnp.result_type(leaf))
        zero = (
            complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0
        )
        return jnp.full_like(leaf, zero, dtype=dtype)
    is_number = is_array(leaf) and not jnp.issubdtype(
        jnp.result_type(leaf), jax.dtypes.extended
    )
    return jnp.zeros_like(leaf) if is_number else leaf


def _zero_unless(flag: Array, tree: Any) -> Any:
    def choose(leaf):
        if not is_inexact(leaf):
            return leaf
        return jnp.where(flag, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(choose, tree)


def _like(name: str, new: Any, old: Any) -> Any:
    """`new` in the dtypes of `old`, which a bfloat16 moment leaves on its first step."""
    leaves, structure = jax.tree.flatten(new)
    paths, old_structure = jax.tree_util.tree_flatten_with_path(old)
    if structure != old_structure:
        raise ValueError(
            f"the inner optimizer must keep the structure of its {name}, but turned "
            f"{old_structure} into {structure}. It cannot run in jax.lax.scan either."
        )

    def cast(path, leaf, reference):
        if not is_array(reference):
            return reference
        dtype, shape = jnp.result_type(reference), jnp.shape(reference)
        if jnp.shape(leaf) != shape:
            raise ValueError(
                f"the inner optimizer must keep the shapes of its {name}, but turned "
                f"{shape} into {jnp.shape(leaf)} at '{jax.tree_util.keystr(path)}'."
            )
        return jnp.asarray(leaf).astype(dtype)

    cast_leaves = [cast(p, x, r) for x, (p, r) in zip(leaves, paths, strict=True)]
    return structure.unflatten(cast_leaves)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def _with_arrays(tree: Any, arrays: list[Any]) -> Any:
    """`tree` with its array leaves replaced, in order."""
    replacements = iter(arrays)
    return jax.tree.map(lambda x: next(replacements) if is_array(x) else x, tree)


def _increment_if(flag: Array, count: Array) -> Array:
    return jnp.where(flag, optax.safe_increment(count), count)


def _narrow(params: Any, updates: Any) -> bool:
    """Whether any parameter is narrower than float32; judged by gradients without."""
    leaves = jax.tree.leaves(updates if params is None else params)
    return any(
        wide_dtype(x.dtype) != x.dtype
        for x in map(jnp.asarray, filter(is_inexact, leaves))
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


def _own(tree: Any, params: Any) -> Any:
    """`tree` as strongly typed arrays that share no buffer with `params` or each other.

    Two leaves in one buffer cannot both be donated, nor a leaf in a caller's buffer.
    """
    taken = {_buffer(leaf) for leaf in jax.tree.leaves(params) if is_array(leaf)}

    def own(leaf):
        if not is_array(leaf):
            return leaf
        array = jnp.asarray(leaf)
        array = array.astype(array.dtype)  # drops a weak type
        if not isinstance(leaf, jax.Array) or _buffer(array) in taken:
            array = jnp.array(array, copy=True)
        taken.add(_buffer(array))
        return array

    return jax.tree.map(own, tree)


def _buffer(leaf: Any) -> int:
    """What tells buffers apart: the address, or under tracing the tracer."""
    if isinstance(leaf, np.ndarray):
        return leaf.__array_interface__["data"][0]
    if isinstance(leaf, jax.core.Tracer) or not hasattr(leaf, "unsafe_buffer_pointer"):
        return id(leaf)
    return leaf.addressable_data(0).unsafe_buffer_pointer()
