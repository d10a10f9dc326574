# SPDX-License-Identifier: Apache-2.0
"""MindFormers' adaptive loss scaling: `jls.adaptive` on the ladder that it builds."""

import warnings

from jls import _validate
from jls._adaptive import adaptive
from jls._types import LossScaler


def mindformers_adaptive(
    loss_scale_value: float,
    scale_factor: float,
    scale_window: int,
    max_scale_window: int = 1000,
    min_scale_window: int = 20,
) -> LossScaler:
    """Returns the policy of MindFormers' `AdaptiveLossScaleUpdateCell`.

    `jls.adaptive` with the ladder that MindFormers builds. Its scale can grow to inf;
    here it stops at 2**126. The scale below 1 that it takes, and raises to 1 on the
    first overflow, is an error here.

    Args:
      loss_scale_value: the first loss scale, >= 1, which is also the floor.
      scale_factor: > 1; multiplies on a growth, and its reciprocal on a backoff.
      scale_window: the window to begin with. If it is not on the ladder, a warning says
        so and the shortest is taken, as there.
      max_scale_window: the longest window. The ladder comes down from it by halves in
        whole hundreds, then 50, then in steps of half of `min_scale_window`, until it
        reaches `min_scale_window` or passes it. Python numbers, as the other two.
      min_scale_window: >= 1 and below `max_scale_window`. The shortest window may be
        shorter; one of 0 acts as 1.

    Returns:
      A `LossScaler` whose state is a `jls.AdaptiveState`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.mindformers_adaptive(1024, 2, 20)
      >>> scaler.adjust.keywords["intervals"]
      (20, 30, 40, 50, 100, 200, 500, 1000)
    """
    highest = _validate.LARGEST
    scale = _validate.number(
        "loss_scale_value", loss_scale_value, "from 1 to 2**126", 1.0, highest
    )
    factor = _validate.raising_factor("scale_factor", scale_factor)
    window = _validate.host_interval("scale_window", scale_window)
    longest = _validate.host_interval("max_scale_window", max_scale_window)
    shortest = _validate.host_interval("min_scale_window", min_scale_window)
    if longest <= shortest:
        raise ValueError(
            "min_scale_window must be < max_scale_window, got "
            f"{min_scale_window!r} >= {max_scale_window!r}."
        )
    ladder = _ladder(longest, shortest)
    if window not in ladder:
        warnings.warn(
            f"scale_window {window!r} is not one of {ladder}: the shortest is taken.",
            stacklevel=2,
        )
        window = None
    return adaptive(
        scale,
        growth_factor=factor,
        backoff_factor=1 / factor,
        intervals=ladder,
        init_interval=window,
        min_scale=1.0,
        max_scale=highest,
    )


def _ladder(longest: int, shortest: int) -> tuple[int, ...]:
    window, ladder = float(longest), [longest]
    while window > shortest:
        if window > 100:
            window = window // 200 * 100
        else:
            window -= 50 if window == 100 else shortest / 2
        ladder.append(max(1, int(window)))
    return tuple(reversed(ladder))
