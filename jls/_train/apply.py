# SPDX-License-Identifier: Apache-2.0
"""Apply gradients, or skip the step, and report: the second half of a train step."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import DictKey

from jls import _validate
from jls._mistakes import NOT_GIVEN, value_among
from jls._nnx import is_optimizer
from jls._reduce import global_norm
from jls._state import (
    find,
    how_to_nest,
    is_multi_steps_state,
    is_wrapper_state,
    wrappers_in,
)
from jls._step import FoundWrapper, update_and_apply
from jls._text import describe, path_names
from jls._tree import difference, named_floats, restore, trainable
from jls._types import (
    SIGNALS,
    LossScaledState,
    SkipReason,
    SpikeState,
    StaticState,
    StepReport,
    spike_metrics,
)

Rates = Mapping[str, Any] | Callable[[Array], Any] | float | None


@overload
def apply_gradients(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    return_updates: Literal[False] = False,
    **extra: Any,
) -> tuple[Any, Any, StepReport]: ...
@overload
def apply_gradients(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    return_updates: Literal[True],
    **extra: Any,
) -> tuple[Any, Any, StepReport, Any]: ...
def apply_gradients(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any = NOT_GIVEN,
    params: Any = NOT_GIVEN,
    *,
    value: Any = None,
    return_updates: bool = False,
    **extra: Any,
) -> Any:
    """Applies unscaled gradients to the parameters or skips the step, and reports.

    For a step that computes the gradients itself, with `jls.value_and_grad` or
    otherwise: `optimizer.update` and `optax.apply_updates` in one. If updates are
    checked, it checks exactly the parameters that it returns.

    Args:
      optimizer: made by `jls.loss_scaled` or `jls.skip_nonfinite`, or one that contains
        one such wrapper, e.g. an `optax.chain`.
      grads: unscaled gradients, of the structure of `params`, of any floating-point
        dtype. Those of an Equinox model have None where the model has no floating-point
        array.
      opt_state: what `optimizer.init(params)` or the last step returned.
      params: the parameters. They keep their dtypes.
      value: the unscaled loss, a real floating-point scalar. If it is not finite, the
        step is skipped for it, and the loss scale stays. None if it is not known. It
        may be called `loss`, as in `update`.
      return_updates: whether to return the updates too, for example to log their norm.
        They then stay in memory.
      **extra: for `optimizer.update`, e.g. `partial_overflow=`.

    Returns:
      The new parameters, the new state, and a `jls.types.StepReport`; see
      `jls.train_step`. Its `loss` is `value`, its `aux` None, its `dropped` 0. A
      skipped step leaves parameters and inner state as they were, bit for bit. With
      `return_updates` also the updates, a tree like `grads`, in at least float32: what
      was added to the parameters, -0.0 if the step was skipped.

    Raises:
      ValueError: if the optimizer was not made by jls, or is inside an
        `optax.MultiSteps`, or if the structures differ.
      TypeError: if it is no optimizer.
      TypeError, ValueError: see `jls.loss_scaled`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(1024.0))
      >>> params = jnp.ones(2)
      >>> opt_state = optimizer.init(params)
      >>> grads = jnp.array([3.0, 4.0])
      >>> params, opt_state, report = jls.apply_gradients(
      ...     optimizer, grads, opt_state, params
      ... )
      >>> params, report.global_norm
      (Array([-0.5, -1. ], dtype=float32), Array(5., dtype=float32))
    """
    order = "jls.apply_gradients(optimizer, grads, opt_state, params)"
    check_optimizer(optimizer, order)
    if opt_state is NOT_GIVEN or params is NOT_GIVEN:
        raise TypeError(f"opt_state and params must be given. The order is {order}.")
    if is_wrapper_state(params):
        raise TypeError(
            f"params must come last, got an optimizer state. The order is {order}."
        )
    return_updates = _validate.flag("return_updates", return_updates)
    if value is not None:
        extra["value"] = value
    extra |= value_among(extra)

    trained, structure = trainable(params), jax.tree.structure(grads)
    is_of_trained = structure == jax.tree.structure(trained)
    # `optax.lookahead` takes the gradients of its fast parameters.
    fast = params.fast if isinstance(params, optax.LookaheadParams) else params
    if not is_of_trained and structure != jax.tree.structure(fast):
        raise ValueError(
            "grads and params must have the same structure, but "
            f"{difference(('grads', grads), ('params', fast))}. Of a part of the model "
            "pass the gradients, the parameters and the state of that part: "
            "optimizer.init(part)."
        )
    inner_wrapper_state(opt_state)  # or an error
    given = trained if is_of_trained else params
    new, *others, updates = apply_and_report(
        optimizer, grads, opt_state, given, extra, return_updates
    )
    new = restore(new, params) if is_of_trained else new
    return new, *others, *([updates] if return_updates else [])


def apply_and_report(
    optimizer: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    extra: dict[str, Any],
    keeps_updates: bool,
    wrappers: Callable[[], list[FoundWrapper]] | None = None,
) -> tuple[Any, Any, StepReport, Any]:
    """New parameters, new state, report, and the updates if they are to be kept."""
    new_params, new_opt_state, norm, updates = update_and_apply(
        optimizer, grads, opt_state, params, keeps_updates, wrappers, **extra
    )
    after = inner_wrapper_state(new_opt_state)
    policy = after.spike_state
    limits = spike_metrics(policy) if isinstance(policy, SpikeState) else {}
    report = StepReport(
        loss=extra.get("value"),
        skipped=~after.applied,
        loss_scale=after.scaler_state.loss_scale,
        learning_rate=injected_rates(new_opt_state),
        global_norm=norm,
        local_norm=None,
        size=None,
        dropped=jnp.zeros((), jnp.int32),
        aux=None,
        skip_reason=jnp.where(
            after.applied, SkipReason.NONE.value, after.last_skip_reason
        ),
        scale_moves=jnp.asarray(not isinstance(after.scaler_state, StaticState)),
        **{f"limit_{name}": limits.get(f"limit_{name}") for name in SIGNALS},
    )
    return new_params, new_opt_state, report, updates


def check_optimizer(optimizer: Any, order: str) -> None:
    """Raises unless it is an optimizer of optax; `order` is how it is passed."""
    is_one = _validate.is_transformation(optimizer)
    if is_optimizer(optimizer):
        raise TypeError(
            "optimizer must be left out for Flax NNX, whose nnx.Optimizer goes in with "
            "each call: step = nnx.jit(jls.train_step(loss_fn)), then report = "
            "step(model, optimizer, batch). With jls.apply_gradients: "
            "optimizer.update(model, grads, value=loss)."
        )
    if hasattr(optimizer, "opt_state") and not is_one:
        raise TypeError(
            f"optimizer must be the tx of the {type(optimizer).__name__}, got all of "
            "it. Write jls.apply_gradients(state.tx, grads, state.opt_state, "
            "state.params, value=loss), or step = jls.train_step(loss_fn), then state, "
            "report = step(state, batch)."
        )
    if not is_one:
        raise TypeError(
            "optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, got "
            f"{describe(optimizer)}. The order is {order}."
        )


_WRAP = (
    "Write optimizer = jls.loss_scaled(optimizer), and make the state with that: "
    "opt_state = optimizer.init(params), or a new TrainState or nnx.Optimizer. "
    "One restored as plain dicts is jls.upgrade_state(optimizer.init(params), saved)."
)


WRAP_WHOLE = (
    "Wrap the whole once, and none of its parts, as in "
    "jls.loss_scaled(optax.multi_transform(parts, labels))."
)


def inner_wrapper_state(opt_state: Any) -> LossScaledState:
    """The state of the one wrapper in `opt_state`, not inside a `MultiSteps`."""
    found = wrappers_in(opt_state)
    if not found and (callable(opt_state) or _validate.is_transformation(opt_state)):
        raise TypeError(
            "opt_state must be the state that the optimizer makes, got "
            f"{describe(opt_state)}. Write opt_state = optimizer.init(params)."
        )
    if len(found) != 1:
        write = WRAP_WHOLE if found else _WRAP
        raise ValueError(
            "the optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, "
            f"once: got a state with {len(found)} such wrappers. "
            f"{how_to_nest(opt_state) or write}"
        )
    return found[0].inside()


# Local norms and learning rates, for the report.


def local_norms(grads: Any) -> tuple[dict[str, Array], dict[str, Array]]:
    """The L2 norm and the number of elements of each gradient, by path."""
    leaves = dict(zip(*named_floats(grads), strict=True))
    norms = {path: global_norm([leaf]) for path, leaf in leaves.items()}
    return norms, {path: _size(leaf) for path, leaf in leaves.items()}


def _size(leaf: Any) -> Array:
    """`i32[]`, or `f32[]` from 2**31 elements on."""
    fits = jnp.size(leaf) < 2**31
    return jnp.asarray(jnp.size(leaf), jnp.int32 if fits else jnp.float32)


def check_rates(given: Any) -> None:
    """Raises unless `given` is None, a schedule, a number > 0, or a dict of these."""
    for rate in given.values() if isinstance(given, Mapping) else [given]:
        if not (rate is None or callable(rate)):
            _check_rate(rate)


def _check_rate(rate: Any) -> None:
    _validate.number("learning_rate", rate, "> 0 and finite", 2.0**-149, 2.0**127)


def given_rates(given: Any, opt_state: Any, before: LossScaledState) -> Any:
    """The learning rate of a step from a schedule or a number, or a dict of them.

    Args:
      given: the rates.
      opt_state: the optimizer's state before the step.
      before: that of the wrapper in it.
    """
    windows = find(opt_state, is_multi_steps_state)
    # Applied steps of the optimizer; `MultiSteps` makes one of several.
    count = windows[0][1].gradient_step if windows else before.steps - before.skips
    if isinstance(given, Mapping):
        return {name: _rate(rate, count) for name, rate in given.items()}
    return _rate(given, count)


def injected_rates(after: Any) -> Any:
    """The learning rate that `optax.inject_hyperparams` keeps in the new state."""
    flat, _ = jax.tree_util.tree_flatten_with_path(after, is_leaf=_has_learning_rate)
    injected = [(path, node) for path, node in flat if _has_learning_rate(node)]
    keys = [[x.key for x in path if isinstance(x, DictKey)] for path, _ in injected]
    names = ["/".join(map(str, group)) for group in keys]
    if len(set(names)) < len(names):
        names = path_names([path for path, _ in injected])
    rates = {
        name: _rate(node.hyperparams["learning_rate"])
        for name, (_, node) in zip(names, injected, strict=True)
    }
    if len(rates) == 1:
        (rate,) = rates.values()
        return rate
    return rates or None


def _has_learning_rate(node: Any) -> bool:
    is_injected = "hyperparams" in getattr(type(node), "_fields", ())
    return is_injected and "learning_rate" in (node.hyperparams or ())


def _rate(rate: Any, count: Array | None = None) -> Array:
    if callable(rate):
        rate = rate(count)
        _check_rate(rate)  # a constant schedule gives a number back
    value = jnp.asarray(rate, jnp.float32)
    if value.shape != ():
        raise ValueError(
            f"learning_rate must be a number of shape (), got shape {value.shape}."
        )
    return value
