# SPDX-License-Identifier: Apache-2.0
"""As `dynamic`, with an interval that adapts: it climbs a ladder, and falls off.

    finite, or not    as `dynamic` with a backoff on each non-finite step
    a growth          growth_count + 1, nonfinite_count = 0
    the 3rd growth    the next longer interval, growth_count = 0
    not finite        nonfinite_count + 1
    the 3rd of them   if the interval is not the shortest: interval 1, both counts 0
    interval 1        not on the ladder; its 3rd growth leads to the shortest interval

The rule of MindFormers' AdaptiveLossScaleUpdateCell, of which these are worth knowing:
a finite step does not reset nonfinite_count, an overflow does not reset growth_count,
and where the third has no effect (growths at the longest interval, overflows at the
shortest) the count goes on from 3 to 0, so that another four are needed. Differs in:
1. It has no cap; here the scale stops at max_scale.
2. It raises a scale below 1 to 1 on an overflow; here an overflow never raises it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _validate
from jls._move import is_due, moved
from jls._repr import numbers, shown
from jls._static import start_at
from jls._tree import as_flag
from jls._types import LossScaler, exportable


@exportable
class AdaptiveState(NamedTuple):
    """State of `jls.adaptive`. `jls.set_loss_scale` restarts the first two counts.

    Example:
      >>> jls.adaptive(2.0**10).init().interval_index
      Array(0, dtype=int32)
    """

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  consecutive finite steps since the scale last changed
    nonfinite_count: Array  # i32[]  non-finite steps since the last growth, modulo 4
    growth_count: Array  # i32[]  growths since the interval last changed, modulo 4
    interval_index: Array  # i32[]  in `intervals`; -1 stands for an interval of 1

    def __repr__(self) -> str:
        return shown("AdaptiveState", **numbers(self, self._fields))


def _start(loss_scale: ArrayLike, interval_index: ArrayLike) -> AdaptiveState:
    return AdaptiveState(
        *start_at(loss_scale),
        growth_count=jnp.zeros((), jnp.int32),
        interval_index=jnp.array(interval_index, jnp.int32),
    )


def _adjust(
    state: AdaptiveState,
    grads_finite: Array | bool,
    *,
    intervals: tuple[ArrayLike, ...],
    **factors_and_bounds: ArrayLike,
) -> AdaptiveState:
    _validate.policy_state(state, AdaptiveState)
    finite = as_flag("grads_finite", grads_finite)
    loss_scale, finite_count, nonfinite_count, growth_count, index = state

    ladder = jnp.stack([jnp.asarray(i, jnp.int32) for i in intervals])
    interval = jnp.where(index < 0, 1, ladder[jnp.maximum(index, 0)])
    up = finite & is_due(finite_count, interval)
    growths = jnp.where(up, (growth_count + 1) % 4, growth_count)
    climb = up & (growths == 3) & (index < len(intervals) - 1)
    bad = jnp.where(
        up, 0, jnp.where(finite, nonfinite_count, (nonfinite_count + 1) % 4)
    )
    fall = ~finite & (bad == 3) & (index > 0)
    return AdaptiveState(
        loss_scale=moved(loss_scale, up, ~finite, **factors_and_bounds),
        finite_count=jnp.where(finite & ~up, finite_count + 1, 0),
        nonfinite_count=jnp.where(fall, 0, bad),
        growth_count=jnp.where(climb | fall, 0, growths),
        interval_index=jnp.where(fall, -1, jnp.where(climb, index + 1, index)),
    )


def adaptive(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    intervals: Iterable[int] = (20, 30, 40, 50, 100, 200, 500, 1000),
    init_interval: int | None = None,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> LossScaler:
    """Returns a policy that grows often while the scale is being found, later seldom.

    Three growths lead to the next longer interval. Three non-finite steps without a
    growth in between lead to an interval of 1, from which the climb starts again. At
    the shortest interval they do not.

    Args:
      init_scale: the first loss scale, in [min_scale, max_scale].
      growth_factor: finite and > 1; multiplies the scale.
      backoff_factor: in (0, 1); multiplies the scale on every non-finite step.
      intervals: the ladder: from the shortest to the longest number of consecutive
        finite optimizer steps before a growth, each >= 1.
      init_interval: one of `intervals`, to begin with; None begins with the shortest.
      min_scale: >= 2**-126.
      max_scale: <= 2**126.

    Returns:
      A `LossScaler` whose state is an `AdaptiveState`. Its hyperparameters are pytree
      leaves.

    Raises:
      TypeError: if a factor or bound is not a real number, `intervals` no sequence, or
        an interval not an integer.
      ValueError: if one is out of range, if `intervals` is empty or not in order, or
        `init_interval` not one of them. Arrays and traced values are not checked.

    Example:
      >>> scaler = jls.adaptive(8.0, intervals=(1, 2))
      >>> state = scaler.init()
      >>> for grads_finite in (True, True, True, True, True):
      ...     state = scaler.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      16.0
      32.0
      64.0
      64.0
      128.0

    References:
      AdaptiveLossScaleUpdateCell of MindFormers.
    """
    first_scale, hyperparameters = _validate.policy(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    ladder = _checked(intervals)
    return LossScaler(
        Partial(
            _start, loss_scale=first_scale, interval_index=_place(init_interval, ladder)
        ),
        Partial(_adjust, intervals=ladder, **hyperparameters),
    )


def _checked(intervals: Iterable[int]) -> tuple[int, ...]:
    is_many = isinstance(intervals, Iterable) and getattr(intervals, "ndim", 1)
    if isinstance(intervals, str | bytes) or not is_many:
        raise TypeError(
            "intervals must be a sequence of integers, got "
            f"{type(intervals).__name__} {intervals!r}."
        )
    ladder = tuple(
        _validate.interval(f"intervals[{i}]", x) for i, x in enumerate(intervals)
    )
    numbers = [x for x in ladder if not _validate.is_unchecked(x)]
    if not ladder or numbers != sorted(numbers):
        raise ValueError(
            "intervals must be one or more, from the shortest to the longest, got "
            f"{ladder!r}."
        )
    return ladder


def _place(init_interval: int | None, ladder: tuple[int, ...]) -> int:
    if init_interval is None:
        return 0
    first = _validate.host_interval("init_interval", init_interval)
    if first not in ladder:
        raise ValueError(
            f"init_interval must be one of intervals, {ladder!r}, got {first!r}."
        )
    return ladder.index(first)
