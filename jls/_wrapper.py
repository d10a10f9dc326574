# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper: `loss_scaled` and `skip_nonfinite`.

Differs from `optax.apply_if_finite` in:
1. It never gives in: no number of bad steps gets one committed.
2. Non-finite losses are counted separately, since the scale cannot cure them.
3. Narrow gradients are widened to float32, and the state keeps the dtypes of `init`, so
   float16 and bfloat16 work where `lax.cond` raises a TypeError there.
4. The updates of a skipped step are -0.0: adding +0.0 turns a -0.0 parameter to +0.0.

`_step` has the table of what a step does.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jls import _validate
from jls._devices import AxisName, check_axis_name
from jls._mistakes import check_no_state, warn
from jls._notes import note, noted
from jls._placement import own_buffers, place_on_all
from jls._scalers.dynamic import dynamic
from jls._scalers.static import static
from jls._state import find, is_wrapper_state, scaler_state_in, wrapper_name
from jls._step import WrapperUpdate
from jls._text import (
    at,
    describe,
    first,
    listed,
    naming_arguments,
    no_field,
    path_name,
    quoted,
)
from jls._tree import is_inexact
from jls._types import FIELDS, LossScaledState, LossScaler, SpikePolicy
from jls._unguarded import follow


class _InitFn(Protocol):
    def __call__(self, params: Any) -> LossScaledState: ...


class LossScaledTransformation(optax.GradientTransformationExtraArgs):
    """The result of `jls.loss_scaled`: an optax transformation with a typed state.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> isinstance(optimizer, optax.GradientTransformation)
      True
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    # The same two fields, with narrower types.
    init: _InitFn  # pyright: ignore[reportIncompatibleVariableOverride]
    update: WrapperUpdate  # pyright: ignore[reportIncompatibleVariableOverride]


@naming_arguments(scale="scaler", loss_scale="scaler", policy="spikes")
def loss_scaled(
    inner: optax.GradientTransformation | optax.MultiSteps,
    scaler: LossScaler = dynamic(),  # noqa: B008, a tuple of pure functions
    *,
    axis_name: AxisName = None,
    check_updates: bool | None = None,
    spikes: SpikePolicy | None = None,
) -> LossScaledTransformation:
    """Wraps `inner` so that it skips non-finite steps and adjusts the loss scale.

    It takes unscaled gradients, as `jls.value_and_grad` returns them, and never
    unscales. A skipped step leaves `inner`'s state as it was, bit for bit, and its
    updates are -0.0: parameters, moments, schedule counts and accumulators inside keep
    their values. Transformations outside still act: put clipping and accumulation
    inside.

    A step is skipped if an element of the gradients is inf or NaN. If `inner` sums the
    squares of all gradients that it gets, as `optax.clip_by_global_norm` at the start
    of a chain does, the step is skipped if that sum is inf or NaN. A norm over 1.8e19
    then counts as not finite too: the clip would turn all gradients into zeros.

    Args:
      inner: any optax transformation, or an object with `init` and `update` such as
        `optax.MultiSteps`. (`optax.lookahead` goes outside.) If its `update` takes
        extra arguments, it gets those of the wrapper's `update`, and as `grad` its
        gradients, which line searches need. `value`, `loss` and `grad` are left out
        if its signature does not take them.
      scaler: how the loss scale moves.
      axis_name: the axis or axes of `shard_map` or `pmap` over which all devices have
        to take the same decision. Only the decision is reduced, and with `spikes` the
        largest loss and norm: average the gradients yourself, first. Plain `jit` needs
        no axis.
      check_updates: True also skips a step with finite gradients if `inner` makes an
        update that is not finite, an update with which a finite parameter overflows in
        its dtype, or a NaN in a scalar of its state. For the scaler such a step is
        finite. A mask of -inf among the parameters is allowed. Without `params`, or
        with transformations chained after the wrapper, it checks only the updates that
        the wrapper returns. It reads updates and new state once more: on a CPU, a whole
        train step of a small transformer moves 1.4 times the bytes. None means True if
        a parameter is narrower than float32, where an optimizer's eps and moments
        underflow, else False; bfloat16 ones in a `jls.bfloat16_params` do not count.
      spikes: a policy that also skips finite steps that are far out of line, such as
        `jls.spikes()`. It needs the loss as `value`; without it, it judges only the
        gradient norm. None skips no finite step.

    Returns:
      A transformation with state `jls.types.LossScaledState`. Its `update` takes
      optax's extra argument `value`, the unscaled loss: if that is not finite (on any
      device of `axis_name`), the step is skipped and counted as a nonfinite loss, and
      the loss scale stays, since no scale can cure it. `loss` is another name for
      `value`, which trainers such as Levanter use. It also takes `partial_overflow`, a
      flag for gradients from which overflowing parts have been left out: the step is
      applied, and the scale adjusts as after an overflow. Updates come in the wider
      dtype of gradient and parameter, at least float32.
      (`optax.apply_updates` turns subnormal parameters to 0 on a CPU whatever the
      update; `jls.select` does not.)

    Raises:
      TypeError: if `inner`, `scaler`, `axis_name`, `check_updates` or `spikes` is of
        another type; at `update`, if `state` is not a state of this wrapper, or
        `value` not a floating-point number.
      ValueError: at `init`, if `inner` already contains a wrapper of jls, or an
        `optax.lookahead`; at `update`, if `value` is no scalar, or `value` and `loss`
        are two numbers, if `params` are the gradients of `jls.value_and_grad`, if a
        gradient has another shape than its parameter (an axis of examples in front is
        allowed), if `state` was made by another inner optimizer, or with other
        `spikes`, or if `inner`, `scaler` or `spikes` changes the structure or a shape
        of its state.

    Warns:
      JlsWarning: at `init`, if a parameter that moves is float16, or bfloat16 in a part
        without a `jls.bfloat16_params`, or is among Flax's batch statistics; at
        `update`, when traced, if the updates of a `jls.bfloat16_params` are changed
        after it, or those that a `jls.params_ema` has seen, if it gets float16
        gradients of wider parameters, and once for each extra argument of another name
        that `inner` does not compute with.

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
    inner = _validate.transformation(inner, "jls.loss_scaled(inner, scaler)")
    if not isinstance(scaler, LossScaler):
        of_ours = f"static({scaler!r})" if _validate.is_real(scaler) else "dynamic()"
        raise TypeError(
            f"scaler must be a jls.types.LossScaler, e.g. jls.{of_ours}, got "
            f"{describe(scaler)}.{_meant(scaler)}"
        )
    check_updates = _validate.flag("check_updates", check_updates, allow_none=True)
    if spikes is not None and not isinstance(spikes, SpikePolicy):
        raise TypeError(
            "spikes must be a jls.types.SpikePolicy, e.g. jls.spikes(), or None, got "
            f"{describe(spikes)}.{_meant(spikes)}"
        )
    for name, rule in {"scaler": scaler, "spikes": spikes or ()}.items():
        for field, function in getattr(rule, "_asdict", dict)().items():
            if not callable(function):
                write = " Write lambda: state." if field == "init" else ""
                raise TypeError(
                    f"{name}.{field} must be a function, got {describe(function)}."
                    f"{write}"
                )
    check_axis_name(axis_name)

    def init(params):
        check_no_state(params)
        note("wrapper", (update, params))
        with _foreign_leaf_named(params), noted("bfloat16") as stored:
            inner_state = inner.init(params)
        misplaced = find(
            inner_state, lambda x: isinstance(x, LossScaledState | optax.LookaheadState)
        )
        nested = [path for path, node in misplaced if is_wrapper_state(node)]
        if nested:
            raise ValueError(
                "inner must not contain jls.loss_scaled or jls.skip_nonfinite, but its "
                f"state has one{at(nested[0])}: the step would be checked and the "
                "scale adjusted twice. Keep the outermost wrapper."
            )
        if misplaced:
            raise ValueError(
                "inner must not contain optax.lookahead, which keeps a second copy of "
                "the params. It goes outside: optax.lookahead("
                f"{wrapper_name(scaler.init())}(inner), sync_period, slow_step_size)."
            )
        # A scaler may hold on to the arrays that it returns: all are foreign.
        scaler_state = scaler.init()
        scaler_state = own_buffers(scaler_state, scaler_state)
        dtype = scaler_state_in(scaler_state).loss_scale.dtype
        if dtype != jnp.float32:
            raise ValueError(
                f"scaler.init must give a float32 loss_scale, got {dtype}."
            )
        _warn_of_half_params(inner, params, inner_state, stored)
        _warn_of_statistics(inner, params, inner_state)
        count = sum(is_inexact(leaf) for leaf in jax.tree.leaves(params))
        zeros: dict[str, Any] = {
            name: jnp.zeros((), field.dtype)
            for name, field in FIELDS.items()
            if field.dtype is not None
        }
        if spikes is None:
            zeros |= {name: () for name in zeros if FIELDS[name].is_of_policy}
        spike_state = spikes.init() if spikes else ()
        spike_state = own_buffers(spike_state, spike_state)
        state = LossScaledState(
            inner_state=own_buffers(inner_state, params),
            scaler_state=scaler_state,
            # At least one: Orbax saves no array without elements.
            nonfinite_leaves=jnp.zeros(max(count, 1), jnp.bool_),
            spike_state=place_on_all(spike_state, params),
            **zeros,
        )
        return place_on_all(state, params, scalars=True)

    update = WrapperUpdate(inner, scaler, axis_name, check_updates, spikes)
    return LossScaledTransformation(init, update)


@naming_arguments()
def skip_nonfinite(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    axis_name: AxisName = None,
    check_updates: bool | None = None,
    spikes: SpikePolicy | None = None,
) -> LossScaledTransformation:
    """Wraps `inner` so that it skips non-finite steps, without loss scaling.

    For bfloat16 and float32 runs, which need no loss scale. It is `jls.loss_scaled`
    with a static scale of 1, with the same counters, and `jls.value_and_grad` works
    with it: to change the dtype of a program, change this one line.

    Args:
      inner: see `jls.loss_scaled`.
      axis_name: see `jls.loss_scaled`.
      check_updates: see `jls.loss_scaled`.
      spikes: see `jls.loss_scaled`.

    Returns:
      A transformation with state `jls.types.LossScaledState`.

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
        inner,
        static(1.0),
        axis_name=axis_name,
        check_updates=check_updates,
        spikes=spikes,
    )


def _meant(rule: Any) -> str:
    """The sentence for another argument, or the function that makes the right one."""
    if isinstance(rule, SpikePolicy):
        return " Write spikes=policy."
    if isinstance(rule, LossScaler):
        return " Write jls.loss_scaled(inner, scaler)."
    if hasattr(rule, "init_scale"):  # of jls.calibrate
        return " Write jls.dynamic(result.init_scale)."
    is_ours = inspect.isfunction(rule) and rule.__module__.startswith("jls.")
    return f" Call it: {rule.__name__}(...)." if is_ours else ""


@contextlib.contextmanager
def _foreign_leaf_named(params: Any) -> Iterator[None]:
    """Names a leaf that is no array as the cause of what fails in the block."""
    try:
        yield
    except Exception as error:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        for path, leaf in leaves:
            if isinstance(leaf, str | bytes) or callable(leaf):
                raise TypeError(
                    f"params must hold arrays, got {type(leaf).__name__}"
                    f"{at(path_name(path))}. Put None in the places of all else, as "
                    "eqx.filter(model, eqx.is_inexact_array) does."
                ) from error
        raise


# By dtype of 16 bits: the part of a parameter below which updates vanish, and advice.
_VANISHES = {
    "float16": (
        "1/4000",
        "Keep float32 master weights and cast them to float16 in the forward pass.",
    ),
    "bfloat16": (
        "1/512",
        "Write jls.bfloat16_params(inner), with which they move; or keep float32 "
        "master weights and cast them to bfloat16 in the forward pass.",
    ),
}


def _warn_of_half_params(
    inner: Any, params: Any, inner_state: Any, stored: list[Any]
) -> None:
    """Warns of 16-bit parameters that stand still.

    Args:
      inner: the wrapped optimizer.
      params: the parameters.
      inner_state: its state of them.
      stored: what the `init` of each `jls.bfloat16_params` in it was given.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    flat = [jax.tree_util.tree_flatten_with_path(x)[0] for x in stored]
    are_stored = {path for pairs in flat for path, _ in pairs}
    for dtype, (part, write) in _VANISHES.items():
        half = [
            path_name(path)
            for path, leaf in leaves
            if str(getattr(leaf, "dtype", None)) == dtype
            and not (dtype == "bfloat16" and path in are_stored)
        ]
        half = half and _that_move(half, inner, params, inner_state)
        if half:
            if dtype == "bfloat16" and stored:
                write = (
                    "Another part has jls.bfloat16_params: write it in this one too, "
                    "or around both."
                )
            warn(
                f"{len(half)} of {len(leaves)} parameters are {dtype}"
                f"{f', {listed(quoted(half))}' if stored else first(half[0])}. Updates "
                f"smaller than half a unit in the last place, about {part} of the "
                f"parameter, vanish. {write}"
            )


def _warn_of_statistics(inner: Any, params: Any, inner_state: Any) -> None:
    """Warns of all variables of a Linen model in the place of the parameters."""
    if not isinstance(params, Mapping) or not {"params", "batch_stats"} <= {*params}:
        return
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, leaf in leaves if is_inexact(leaf)]
    inside = [name for name in names if name.startswith("batch_stats/")]
    inside = inside and _that_move(inside, inner, params, inner_state)
    if inside:
        warn(
            "batch statistics are among the parameters, and would move by their "
            f"gradients{first(inside[0])}. Pass the parameters alone, "
            'optimizer.init(variables["params"]), and carry the others on: '
            "jls.train_step(..., carried=True)."
        )


def _that_move(
    names: list[str], inner: Any, params: Any, inner_state: Any
) -> list[str]:
    """Those of the parameters that are not frozen, as by `optax.set_to_zero`."""

    def update(grads):
        return inner.update(grads, inner_state, params)[0]

    made = follow(update, params, through_bits=True)
    return [name for name in names if name in made] if made else names
