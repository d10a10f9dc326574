# SPDX-License-Identifier: Apache-2.0
"""Skips finite steps that are far out of line, and can never skip many.

For the loss and for the gradient norm, over the last `window` values that were kept:

    limit   mean + sigmas * max(deviation, |mean| / 512), once `warmup` values are there
    over    a value is above its limit, or the norm above max_norm
    skip    over, and a token is left
    tokens  start at `budget`; a skip takes one, any other step gives budget / window
            back, up to `budget`
    kept    what is not skipped enters the window; what is not finite never does

Of any T steps at most budget + T * budget / window are skipped. So no new level freezes
a run: when the tokens are spent, its values enter the window, and the limit follows.

OLMo-core, Levanter and MaxText have a rule of this kind. Differs in:
1. There, skipped values enter the window, so that one spike hides the next for a whole
   window, and a run of spikes ends only because the window is full of them. Here they
   stay out, and the tokens bound their number.
2. There, one NaN in the window makes every limit NaN until it has left.
3. There, a loss that was constant, as one in bfloat16 often is, is a spike when it
   rises by a unit in the last place. Here a deviation counts as at least a 512th of the
   mean.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._reduce import power_of_two_below
from jls._scalers.rule import count_up, f32, switch
from jls._text import naming_arguments
from jls._types import SIGNALS, SpikePolicy, SpikeState

_BUDGET = 4  # without one


@naming_arguments(threshold="sigmas", max_grad_norm="max_norm")
def spikes(
    *,
    window: int = 128,
    sigmas: float = 6.0,
    budget: float | None = _BUDGET,
    warmup: int | None = None,
    max_norm: float | None = None,
) -> SpikePolicy[SpikeState]:
    """Returns a policy that skips steps whose loss or gradient norm is far out of line.

    For `jls.loss_scaled(..., spikes=...)` and `jls.skip_nonfinite(..., spikes=...)`. A
    step is a spike if its loss, or the global norm of its unscaled gradients before
    clipping, is above the mean of the last `window` kept ones by more than `sigmas`
    deviations. It is skipped as any bad step is, except that the loss scale adjusts as
    after a finite step. Pass the loss to `update` as `value=loss`, or only the norm is
    judged; `jls.train_step` does.

    It is a seat belt: it helps against single bad batches and hardware faults, not
    against an unstable model. The budget bounds how many steps are skipped, not which:
    valid data that is rare and far larger than the rest, such as a few long documents,
    may be skipped each time. Count first, with `budget=0`, and look at the spikes
    found. docs/questions/spikes.md has the evidence.

    Args:
      window: >= 2, how many kept steps the mean and the deviation are taken over. With
        fewer than 16 even normal noise causes false alarms.
      sigmas: > 0 and finite. The deviation counts as at least a 512th of the mean. No
        steady signal exceeds its own mean by 6 deviations in more than 1 of 37 steps,
        whatever its distribution (Cantelli's inequality: 1 / (1 + sigmas**2)).
      budget: from 1 to `window`, or 4 if that is more: how many steps may be skipped at
        once; as many again for each window. When it is spent, spikes are let through
        and enter the window. 0 skips nothing and only counts; it misses more of a
        burst, since what is let through raises the limit. None has no bound: a lasting
        rise then freezes the run.
      warmup: from 2 to `window`, how many values there must be before one is judged.
        None is `max(2, window // 2)`.
      max_norm: > 0, a norm above it is a spike, from the first step on. None has no
        such bound.

    Returns:
      A `jls.types.SpikePolicy` with a `jls.types.SpikeState` of 8 * `window` bytes and
      a few more. A signal that was 0 throughout its window is not judged.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if one is out of range.

    Example:
      >>> policy = jls.spikes(window=8)
      >>> optimizer = jls.skip_nonfinite(optax.sgd(0.1), spikes=policy)
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> for size in [1.0, 1.1, 0.9, 1.0, 50.0, 1.0]:
      ...     grads = jnp.full(2, size)
      ...     updates, state = optimizer.update(grads, state, params)
      ...     print(state.applied, end=" ")
      True True True True False True
      >>> state.spikes
      Array(1, dtype=int32)
    """
    window = _validate.host_interval("window", window, 2)
    allowed = _budget(budget, window)
    return SpikePolicy(
        start(window, allowed),
        Partial(
            spikes_judge,
            sigmas=check_sigmas(sigmas),
            budget=allowed,
            warmup=half(window) if warmup is None else _warmup(warmup, window),
            max_norm=check_limit("max_norm", max_norm),
        ),
    )


def spikes_init(*params: Any, window: int, budget: ArrayLike) -> SpikeState:
    if params:
        raise TypeError(
            "a spike policy is no optax transformation, and was given parameters in a "
            "chain. Write jls.loss_scaled(inner, spikes=policy), or jls.skip_nonfinite."
        )
    return SpikeState(
        seen=jnp.zeros((len(SIGNALS), window), jnp.float32),
        kept=jnp.zeros(len(SIGNALS), jnp.int32),
        tokens=jnp.array(budget, jnp.float32),
        found=jnp.zeros((), jnp.int32),
        value=jnp.zeros(len(SIGNALS), jnp.float32),
        limit=jnp.full(len(SIGNALS), jnp.inf, jnp.float32),
        steady_share=jnp.ones((), jnp.float32),
    )


def spikes_judge(
    state: SpikeState,
    *signals: Array | None,
    sigmas: ArrayLike,
    budget: ArrayLike,
    warmup: ArrayLike,
    max_norm: ArrayLike,
) -> tuple[SpikeState, Array]:
    window = window_of(state)
    least = jnp.abs(window.mean) / 512
    limit = window.limit(sigmas, jnp.maximum(window.deviation, least), warmup)
    limit = jnp.where(window.is_silent, jnp.inf, limit)
    limit = jnp.minimum(limit, limits(norm=max_norm))
    return decide(state, signals, limit, sigmas=sigmas, budget=budget)


# Shared with the presets in `jls.presets`.


def start(window: int, budget: ArrayLike = math.inf) -> Partial:
    """The first state of a policy; the window is a shape, and no leaf."""
    return Partial(switch(spikes_init, window=window), budget=budget)


def half(window: int) -> int:
    """From how many values on one is judged, where nothing else is said."""
    return max(2, window // 2)


class Window(NamedTuple):
    """Mean and deviation of the kept values, in units of a power of two near them.

    So that no square over- or underflows, and norms times 2**k give the same decisions.
    """

    size: Array  # i32[n]
    unit: Array  # f32[n]
    mean: Array  # f32[n]
    deviation: Array  # f32[n]
    is_silent: Array  # bool[n]  all values are 0

    def limit(self, sigmas: ArrayLike, deviation: Array, warmup: ArrayLike) -> Array:
        """The limits, `f32[n]`; inf for a signal that is not judged yet."""
        limit = self.unit * (self.mean + f32(sigmas) * deviation)
        has_enough = self.size >= jnp.asarray(warmup, jnp.int32)
        return jnp.where(has_enough, limit, jnp.inf)


def window_of(state: SpikeState, fewer: int = 0) -> Window:
    """Mean and deviation of the kept values; the divisor is their number - `fewer`."""
    size = state.seen.shape[1]
    count = jnp.minimum(state.kept, size)
    is_kept = _places(size) < count[:, None]
    seen = jnp.where(is_kept, state.seen, 0)
    most = jnp.max(jnp.abs(seen), axis=1)
    unit = power_of_two_below(most)
    scaled = seen * (1 / unit)[:, None]
    mean = jnp.sum(scaled, axis=1) / f32(jnp.maximum(count, 1))
    off = jnp.where(is_kept, scaled - mean[:, None], 0)
    variance = jnp.sum(off * off, axis=1) / f32(jnp.maximum(count - fewer, 1))
    return Window(count, unit, mean, jnp.sqrt(variance), most == 0)


def limits(**given: ArrayLike) -> Array:
    """Limits that do not move, `f32[n]`, by signal; inf for a signal without one."""
    return jnp.stack([f32(given.get(signal, math.inf)) for signal in SIGNALS])


def decide(
    state: SpikeState,
    signals: Sequence[Array | None],
    limit: Array,
    *,
    sigmas: ArrayLike | None = None,
    budget: ArrayLike = math.inf,
    skipped_enter: bool = False,
) -> tuple[SpikeState, Array]:
    """The next state, and whether to skip.

    Args:
      state: the state before.
      signals: `f32[]` each, in the order of `SIGNALS`; None for one that is not given.
      limit: `f32[n]`, over which a value is a spike.
      sigmas: by how many deviations; None if the limits are constant.
      budget: see `spikes`.
      skipped_enter: whether a value that is skipped enters the window all the same.
    """
    is_given = np.array([signal is not None for signal in signals])
    values = jnp.stack([f32(0.0 if signal is None else signal) for signal in signals])
    limit = jnp.where(is_given, limit, jnp.inf)
    size = state.seen.shape[1]
    # The state may be one of a larger budget, or of none: inf would never be spent.
    tokens = jnp.minimum(state.tokens, f32(budget))
    # In parts of a token that add up exactly: a skip costs `size` of them.
    parts = jnp.round(tokens * size * 1024) / 1024
    is_over = jnp.any(values > limit)
    skip = is_over & (parts >= size)
    refilled = jnp.minimum(parts + f32(budget), f32(budget) * size)
    # A norm that overflows float32 is over any limit, but says nothing of the next one.
    enters = is_given & jnp.isfinite(values) & (skipped_enter | ~skip)
    here = enters[:, None] & (_places(size) == (state.kept % size)[:, None])
    # From 2 * size back to size, which is as full, so that it never overflows.
    kept = jnp.where(state.kept == 2 * size - 1, size, state.kept + 1)
    share = f32(1.0)
    if sigmas is not None:
        # Cantelli's bound for each; of few values, one in so many is the largest.
        share = jnp.maximum(1 / (1 + f32(sigmas) ** 2), 1 / (size + 1))
        share = jnp.minimum(float(is_given.sum()) * share, 1)
        if not skipped_enter:
            # Without a budget all spikes stay out, however many there are.
            share = jnp.where(f32(budget) < jnp.inf, share, 1.0)
    return SpikeState(
        seen=jnp.where(here, values[:, None], state.seen),
        kept=jnp.where(enters, kept, state.kept),
        tokens=jnp.where(skip, parts - size, refilled) / size,
        found=count_up(state.found, is_over),
        value=values,
        limit=limit,
        steady_share=share,
    ), skip


def _places(size: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (len(SIGNALS), size), 1)


# Arguments.


def check_sigmas(sigmas: Any) -> Any:
    return _validate.number(
        "sigmas", sigmas, "finite and > 0", _validate.SMALLEST, _validate.LARGEST
    )


def check_limit(name: str, limit: Any) -> Any:
    """A limit > 0; None and inf are none."""
    if _is_none(limit):
        return math.inf
    most = float(np.finfo(np.float32).max)
    return _validate.number(name, limit, "> 0, or None", _validate.SMALLEST, most)


def _is_none(bound: Any) -> bool:
    return bound is None or (_validate.is_real(bound) and bound == math.inf)


def _budget(budget: Any, window: int) -> Any:
    if _is_none(budget):
        return math.inf
    rule = "0, or >= 1, or None"
    number = _validate.number("budget", budget, rule, 0.0, _validate.LARGEST)
    if not _validate.is_unchecked(number) and 0 < number < 1:
        raise ValueError(f"budget must be {rule}, got {budget!r}.")
    if not _validate.is_unchecked(number) and number > max(window, _BUDGET):
        # It would come back faster than it is spent.
        raise ValueError(
            f"budget must be at most window, {window}, or None for no bound, got "
            f"{budget!r}. It comes back once in each window: write budget={_BUDGET}."
        )
    return number


def _warmup(warmup: Any, window: int) -> Any:
    steps = _validate.interval("warmup", warmup)
    if not _validate.is_unchecked(steps) and not 2 <= steps <= window:
        raise ValueError(f"warmup must be from 2 to window, {window}, got {warmup!r}.")
    return steps
