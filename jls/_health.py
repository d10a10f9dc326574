# SPDX-License-Identifier: Apache-2.0
"""What a run's counters mean, in words, for a person at the host."""

import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jls import _validate
from jls._advance import guard_of
from jls._dynamic import dynamic
from jls._guard import has_nan
from jls._leaves import chosen, wrapper_in
from jls._magnitude import all_finite
from jls._read import metrics
from jls._rounding import edges
from jls._static import static
from jls._suggest import too_small
from jls._tally import inexact_leaves
from jls._types import FIXED, SKIP_REASONS, Scaler
from jls._verdict import VERDICTS, sentence_of, verdict_of


class Health(NamedTuple):
    """What `jls.health` says: a verdict, a sentence, and the numbers behind them.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.health(state).verdict
      'ok'
    """

    verdict: str
    sentence: str
    numbers: dict[str, Any]

    @property
    def safe_to_save(self) -> bool:
        """Whether a checkpoint may take the place of an older one.

        False of a run that is poisoned, which shows only if `params` was given, or
        stalled: it does not get better, and its older checkpoints may be what you need.
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

    def __init__(self, health: Health):
        super().__init__(str(health))
        self.health = health


def health(
    state: Any,
    params: Any = None,
    *,
    grads: Any = None,
    scaler: Scaler | None = None,
    max_consecutive_skips: int = 50,
    max_small: float = 0.1,
    dtype: Any = jnp.float16,
    raise_if: Iterable[str] = (),
    warn_if: Iterable[str] = (),
) -> Health:
    """Returns how the run is, in words; on the host, with one small transfer.

    Call it every so many steps, and before you keep a checkpoint. It waits for the step
    that made `state`.

    Args:
      state: anything that carries one state of `jls.loss_scaled`.
      params: the parameters, to see whether a non-finite number is in them or in the
        optimizer's state. One pass over both on the device; None looks at neither. Of
        arrays that several processes share, every process has to call it then.
      grads: true gradients of a recent step, to see whether they are too small for the
        loss scale. Two passes over them on the device; None does not look. Likewise for
        every process to call.
      scaler: the policy, which knows the bounds of the scale. None takes it from a
        `TrainState` or an `nnx.Optimizer` whose `tx` is made by `jls.loss_scaled`;
        else the bounds are those of `jls.dynamic()`, 1 and 2**24, unless the state
        says that the scale is a fixed one.
      max_consecutive_skips: >= 1, how many steps skipped in a row are too many.
      max_small: in [0, 1]. Of the gradients but 0, how large a share may be below the
        smallest normal number of `dtype` once scaled.
      dtype: in which the backward pass computes, of `grads`: a floating-point dtype of
        8 to 32 bits.
      raise_if: verdicts for which to raise.
      warn_if: verdicts for which to warn.

    Returns:
      A `jls.Health`: `verdict` is one of "ok", "calibrating", "recovering", "at floor",
      "at ceiling", "underflow", "non-finite loss", "non-finite update", "stalled" and
      "poisoned"; `sentence` says what it means and what to do; `numbers` is what
      `jls.metrics` says, as Python numbers, with the names of the bad parameters if
      `params` is given, and with the share of `small` gradients and the
      `suggested_scale` if `grads` is.

    Raises:
      UnhealthyError: if the verdict is in `raise_if`.
      TypeError: if `scaler` is no policy, `max_consecutive_skips` not an integer,
        `max_small` not a number known to Python, `dtype` not floating point, or
        `raise_if` or `warn_if` no sequence.
      ValueError: if `state` carries no such state, or several, if it is traced, or if
        a name in `raise_if` or `warn_if` is no verdict, or a number is out of range.

    Warns:
      UserWarning: if the verdict is in `warn_if`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> grads = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(1)}
      >>> for _ in range(3):
      ...     _, state = optimizer.update(grads, state, params)
      >>> print(jls.health(state, params))
      calibrating: all 3 steps so far were skipped while the loss scale comes down, to
      128 now. That is normal for the first ten or so. Not finite: w.
    """
    raise_if = _checked_names("raise_if", raise_if)
    warn_if = _checked_names("warn_if", warn_if)
    limit = _validate.host_interval("max_consecutive_skips", max_consecutive_skips)
    max_small = _validate.host_number("max_small", max_small, "from 0 to 1", 0.0, 1.0)
    edges(dtype)  # or an error, with and without `grads`
    _check_policy(scaler)
    wrapper = wrapper_in(state)
    on_device = dict(
        metrics(wrapper),
        leaves=wrapper.nonfinite_leaves,
        is_fixed=getattr(wrapper.scaler_state, "finite_count", jnp.int32(0)) == FIXED,
    )
    if params is not None:
        on_device["poisoned"] = _poisoned(params, wrapper.inner_state)
    if grads is not None:
        on_device |= too_small(wrapper, grads, dtype)
    numbers = {name: x.tolist() for name, x in jax.device_get(on_device).items()}
    numbers["skip_reason"] = SKIP_REASONS[numbers["skip_reason"]]
    flags = numbers.pop("leaves")
    if params is not None:
        numbers["nonfinite_leaves"] = chosen(params, flags)
    scaler = _scaler_in(state) if scaler is None else scaler
    bounds = _bounds(scaler, numbers.pop("is_fixed"), numbers["loss_scale"])
    numbers["min_scale"], numbers["max_scale"] = bounds
    if grads is not None:
        numbers["dtype"] = jnp.dtype(dtype).name

    verdict = verdict_of(numbers, limit, max_small)
    result = Health(verdict, sentence_of(verdict, numbers), numbers)
    if verdict in raise_if:
        raise UnhealthyError(result)
    if verdict in warn_if:
        warnings.warn(str(result), stacklevel=2)
    return result


@jax.jit
def _is_poisoned(params: Any, inner_state: Any) -> Array:
    return ~all_finite(params) | has_nan(inner_state)


def _poisoned(params: Any, inner_state: Any) -> Array:
    return _is_poisoned(inexact_leaves(params)[1], inexact_leaves(inner_state)[1])


def _scaler_in(state: Any) -> Scaler | None:
    """That of the optimizer that a Flax `TrainState` or `nnx.Optimizer` carries."""
    guard = guard_of(getattr(state, "tx", None))
    return guard.scaler if guard else None


def _check_policy(scaler: Any) -> None:
    if not (scaler is None or isinstance(scaler, Scaler)):
        raise TypeError(
            "scaler must be a jls.LossScaler, a jls.MagnitudeScaler or None, got "
            f"{type(scaler).__name__} {scaler!r}."
        )


def _bounds(
    scaler: Scaler | None, is_fixed: bool, loss_scale: float
) -> tuple[float, float]:
    """The floor and the ceiling of a policy; of a fixed scale, equal."""
    if scaler is not None:
        ours, fixed = (getattr(s.adjust, "func", s) for s in (scaler, static()))
        is_fixed = ours is fixed
    if is_fixed:
        return loss_scale, loss_scale
    adjust = dynamic().adjust if scaler is None else scaler.adjust
    keywords = getattr(adjust, "keywords", {})
    keywords = getattr(keywords.get("adjust"), "keywords", keywords)
    # Of a policy of the user's own nothing is known.
    low, high = keywords.get("min_scale", 0.0), keywords.get("max_scale", math.inf)
    return float(low), float(high)


def _checked_names(name: str, verdicts: Iterable[str]) -> tuple[str, ...]:
    rule = f"{name} must be verdicts out of {VERDICTS}, got {verdicts!r}."
    try:
        names = tuple(verdicts)  # an iterator can be asked only once
    except TypeError:
        raise TypeError(rule) from None
    known = all(isinstance(name, str) and name in VERDICTS for name in names)
    if isinstance(verdicts, str) or not known:
        raise ValueError(rule)
    return names
