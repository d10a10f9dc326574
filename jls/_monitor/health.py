# SPDX-License-Identifier: Apache-2.0
"""What a run's counters mean, in words, for a person at the host."""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array

from jls import _validate
from jls._bits import edges
from jls._monitor.nonfinite import select_names
from jls._monitor.underflow import measure_small
from jls._monitor.verdict import VERDICTS, Facts, Limits, Verdict, judge
from jls._reduce import any_nan, finite_leaves
from jls._scalers.static import is_static
from jls._state import (
    concrete_wrapper_state_in,
    metrics,
    optimizer_in,
)
from jls._step import wrapper_of
from jls._tree import is_array, named_floats
from jls._types import LossScaledState, Scaler, SkipReason, StaticState


class Health(NamedTuple):
    """What `jls.health` says: a verdict, a sentence, and the numbers behind them.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.health(state).verdict
      'ok'
    """

    verdict: Verdict
    sentence: str
    numbers: dict[str, Any]

    @property
    def safe_to_save(self) -> bool:
        """Whether a checkpoint may replace an older one.

        False if the run is stalled, or poisoned, which shows only if `params` was
        given: it will not get better, and you may need the older checkpoint.
        """
        return self.verdict not in ("poisoned", "stalled")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.sentence}"


class UnhealthyError(RuntimeError):
    """Raised by `jls.health` for a verdict in `raise_if`; `health` has the verdict.

    Example:
      >>> issubclass(jls.UnhealthyError, RuntimeError)
      True
    """

    def __init__(self, health: Health) -> None:
        super().__init__(str(health))
        self.health = health


def health(
    state: Any,
    params: Any = None,
    *,
    grads: Any = None,
    optimizer: Any = None,
    max_consecutive_skips: int = 50,
    max_small: float = 0.1,
    dtype: Any = jnp.float16,
    raise_if: Iterable[Verdict] = (),
    warn_if: Iterable[Verdict] = (),
) -> Health:
    """Returns a verdict on the run, in words; on the host, with one small transfer.

    Call it every so many steps, and before you keep a checkpoint. It waits for the step
    that made `state`.

    Args:
      state: anything that carries one state of `jls.loss_scaled`.
      params: the parameters, to see whether an inf or NaN is in them or in the
        optimizer's state. One pass over both on the device; None looks at neither. If
        several processes share the arrays, every process has to make the call.
      grads: true gradients of a recent step, to see whether they are too small for the
        loss scale. Two passes over them on the device; None does not look. Every
        process has to make the call here too.
      optimizer: what `jls.loss_scaled` returned, which knows the bounds of the scale;
        or an `nnx.Optimizer` with it. None takes it from `state` if that is a
        `TrainState` or an `nnx.Optimizer`. Without it, health does not know the bounds,
        and never says "at floor" or "at ceiling".
      max_consecutive_skips: >= 1, how many steps skipped in a row are too many.
      max_small: the tolerated share, in [0, 1], of nonzero gradients that are below the
        smallest normal number of `dtype` once scaled.
      dtype: the dtype of the backward pass, for `grads`: floating point, of 8 to 32
        bits.
      raise_if: verdicts for which to raise.
      warn_if: verdicts for which to warn.

    Returns:
      A `jls.types.Health`: `verdict` is one of "ok", "calibrating", "recovering", "at
      floor", "at ceiling", "underflow", "non-finite loss", "non-finite update",
      "stalled" and "poisoned"; `sentence` says what it means and what to do; `numbers`
      holds what `jls.metrics` returns as Python numbers (`skip_reason` as a
      `jls.types.SkipReason`), whether the scale `is_static`, and its bounds, which are
      None if they are not known; with `params`, also whether the run is `poisoned` and
      the names of the parameters that caused the last skip; with `grads`, also the
      share of `small` gradients in `dtype`, whether they are `all_zero`, and the
      `suggested_scale`.

    Raises:
      UnhealthyError: if the verdict is in `raise_if`.
      TypeError: if `optimizer` was not made by jls, `max_consecutive_skips` not an
        integer, `max_small` not a number known to Python, `dtype` not floating point,
        or `raise_if` or `warn_if` not a sequence.
      ValueError: if `state` carries no such state, or several, if it is traced, if
        `optimizer` is of another kind than the one that made it, if a name in
        `raise_if` or `warn_if` is not a verdict, or a number is out of range.

    Warns:
      UserWarning: if the verdict is in `warn_if`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> grads = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(1)}
      >>> for _ in range(3):
      ...     _, state = optimizer.update(grads, state, params)
      >>> print(jls.health(state, params, optimizer=optimizer))
      calibrating: all 3 steps so far were skipped while the loss scale comes down, to
      128 now. That is normal for the first ten or so. Not finite: w.
    """
    raise_if = _check_verdicts("raise_if", raise_if)
    warn_if = _check_verdicts("warn_if", warn_if)
    limit = _validate.host_interval("max_consecutive_skips", max_consecutive_skips)
    max_small = _validate.host_number("max_small", max_small, "from 0 to 1", 0.0, 1.0)
    edges(dtype)  # or an error, with and without `grads`
    wrapper = concrete_wrapper_state_in(state)
    scaler = _scaler_of(optimizer, state, wrapper)

    on_device = dict(metrics(wrapper), leaves=wrapper.nonfinite_leaves)
    if params is not None:
        on_device["poisoned"] = _poisoned(params, wrapper.inner_state)
    if grads is not None:
        on_device |= measure_small(wrapper, grads, dtype)
    numbers = {name: x.tolist() for name, x in jax.device_get(on_device).items()}
    numbers["skip_reason"] = SkipReason(numbers["skip_reason"])
    flags = numbers.pop("leaves")
    if params is not None:
        numbers["nonfinite_leaves"] = select_names(params, flags)
    if grads is not None:
        numbers["dtype"] = jnp.dtype(dtype).name
    scale = _describe_scale(scaler, wrapper, numbers["loss_scale"])

    facts = Facts(**numbers, **scale)
    known = {name: x for name, x in dataclasses.asdict(facts).items() if x is not None}
    bounds = {name: scale[name] for name in ("min_scale", "max_scale")}
    result = Health(*judge(facts, Limits(limit, max_small)), known | bounds)
    if result.verdict in raise_if:
        raise UnhealthyError(result)
    if result.verdict in warn_if:
        warnings.warn(str(result), stacklevel=2)
    return result


def _poisoned(params: Any, inner_state: Any) -> Array:
    return _is_poisoned(named_floats(params)[1], named_floats(inner_state)[1])


@jax.jit
def _is_poisoned(params: list[Any], inner_state: list[Any]) -> Array:
    # Some optimizers keep an inf in their state on purpose, as the best value so far.
    return ~jnp.all(finite_leaves(params)) | any_nan(inner_state)


def _scaler_of(
    optimizer: Any, state: Any, wrapper_state: LossScaledState
) -> Scaler | None:
    """The scaler of the optimizer, or of the one that a Flax state carries."""
    if optimizer is None:
        wrapper = wrapper_of(optimizer_in(state))
        return wrapper.scaler if wrapper else None
    wrapper = wrapper_of(optimizer) or wrapper_of(optimizer_in(optimizer))
    if not wrapper:
        raise TypeError(
            "optimizer must be what jls.loss_scaled or jls.skip_nonfinite returned, or "
            f"None, got {type(optimizer).__name__} {optimizer!r}. If the wrapper is "
            "further inside, e.g. in an optax.chain, pass that part."
        )
    made = jax.tree.structure(wrapper_state.scaler_state)
    if made != wrapper.scaler_structure:
        raise ValueError(
            "optimizer must be the one that made state: its scaler's states are "
            f"{wrapper.scaler_structure}, and state carries {made}."
        )
    return wrapper.scaler


def _describe_scale(
    scaler: Scaler | None, wrapper: LossScaledState, loss_scale: float
) -> dict[str, Any]:
    """Whether the scale can never move, and its bounds; None if they are not known."""
    static = isinstance(wrapper.scaler_state, StaticState)
    if is_static(scaler) if scaler else static:
        return {"is_static": True, "min_scale": loss_scale, "max_scale": loss_scale}
    known = scaler.hyperparameters if scaler else {}
    low, high = (known.get(name) for name in ("min_scale", "max_scale"))
    if not (_is_number(low) and _is_number(high)):
        return {"is_static": False, "min_scale": None, "max_scale": None}
    low, high = float(low), float(high)
    return {"is_static": low == high, "min_scale": low, "max_scale": high}


def _is_number(bound: Any) -> TypeGuard[float]:
    return is_array(bound) and jnp.ndim(bound) == 0


def _check_verdicts(name: str, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    rule = f"{name} must be verdicts out of {VERDICTS}, got {verdicts!r}."
    try:
        names = tuple(verdicts)  # an iterator can be asked only once
    except TypeError:
        raise TypeError(rule) from None
    known = all(isinstance(name, str) and name in VERDICTS for name in names)
    if isinstance(verdicts, str) or not known:
        raise ValueError(rule)
    return names
