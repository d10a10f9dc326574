# SPDX-License-Identifier: Apache-2.0
"""What a run's counters mean, in words, for a person at the host."""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax import Array

from jls import _validate
from jls._dynamic import dynamic
from jls._guard import has_nan
from jls._leaves import chosen, wrapper_in
from jls._read import metrics
from jls._tally import inexact_leaves
from jls._tree import all_finite
from jls._types import SKIP_REASONS, LossScaler, MagnitudeScaler
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
    scaler: LossScaler | MagnitudeScaler | None = None,
    max_consecutive_skips: int = 50,
    raise_if: Iterable[str] = (),
    warn_if: Iterable[str] = (),
) -> Health:
    """Returns how the run is, in words; on the host, with one small transfer.

    Call it every so many steps, and before you keep a checkpoint. It waits for the step
    that made `state`.

    Args:
      state: anything that carries one state of `jls.loss_scaled`.
      params: the parameters, to see whether a non-finite number is in them or in the
        optimizer's state. One pass over both on the device; None looks at neither.
      scaler: the policy, which knows the bounds of the scale. None takes those of
        `jls.dynamic()`, 1 and 2**24.
      max_consecutive_skips: >= 1, how many steps skipped in a row are too many.
      raise_if: verdicts for which to raise.
      warn_if: verdicts for which to warn.

    Returns:
      A `jls.Health`: `verdict` is one of "ok", "calibrating", "recovering", "at floor",
      "at ceiling", "non-finite loss", "non-finite update", "stalled" and "poisoned";
      `sentence` says what it means and what to do; `numbers` is what `jls.metrics`
      says, as Python numbers, with the names of the bad parameters if `params` is
      given.

    Raises:
      UnhealthyError: if the verdict is in `raise_if`.
      TypeError: if `scaler` is no policy, `max_consecutive_skips` not an integer, or
        `raise_if` or `warn_if` no sequence.
      ValueError: if `state` carries no such state, or several, if it is traced, or if
        a name in `raise_if` or `warn_if` is no verdict.

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
    bounds = _bounds(scaler)
    wrapper = wrapper_in(state)
    on_device = dict(metrics(wrapper), leaves=wrapper.nonfinite_leaves)
    if params is not None:
        on_device["poisoned"] = _poisoned(params, wrapper.inner_state)
    numbers = {name: x.tolist() for name, x in jax.device_get(on_device).items()}
    numbers["skip_reason"] = SKIP_REASONS[numbers["skip_reason"]]
    flags = numbers.pop("leaves")
    if params is not None:
        numbers["nonfinite_leaves"] = chosen(params, flags)
    numbers["min_scale"], numbers["max_scale"] = bounds

    verdict = verdict_of(numbers, limit)
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


def _bounds(scaler: LossScaler | MagnitudeScaler | None) -> tuple[float, float]:
    """The floor and the ceiling of a policy; of a static one, equal."""
    if not (scaler is None or isinstance(scaler, LossScaler | MagnitudeScaler)):
        raise TypeError(
            "scaler must be a jls.LossScaler, a jls.MagnitudeScaler or None, got "
            f"{type(scaler).__name__} {scaler!r}."
        )
    adjust = dynamic().adjust if scaler is None else scaler.adjust
    keywords = getattr(adjust, "keywords", {})
    keywords = getattr(keywords.get("adjust"), "keywords", keywords)
    low, high = keywords.get("min_scale", 0.0), keywords.get("max_scale", 0.0)
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
