"""The rules of the policies in plain Python, for the tests to compare with.

numpy only rounds each product to float32, as the device does.
"""

import numpy as np


def float32(x):
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def lower(scale, backoff_factor, min_scale):
    return min(scale, max(float32(scale * float32(backoff_factor)), min_scale))


def higher(scale, growth_factor, max_scale):
    return min(float32(scale * float32(growth_factor)), max_scale)


def dynamic(
    flags,
    *,
    init_scale,
    growth_factor,
    backoff_factor,
    growth_interval,
    backoff_interval,
    min_scale,
    max_scale,
):
    """Yields (loss_scale, finite_count, nonfinite_count) after each step."""
    scale, good, bad = init_scale, 0, 0
    for finite in flags:
        if finite:
            good, bad = good + 1, 0
            if good >= growth_interval:
                scale, good = higher(scale, growth_factor, max_scale), 0
        else:
            good, bad = 0, bad + 1
            if bad >= backoff_interval:
                scale, bad = lower(scale, backoff_factor, min_scale), 0
        yield scale, good, bad


def cumulative(
    flags,
    *,
    init_scale,
    growth_factor,
    backoff_factor,
    growth_interval,
    backoff_interval,
    min_scale,
    max_scale,
):
    """Yields (loss_scale, finite_count, nonfinite_count) after each step."""
    scale, good, bad = init_scale, 0, 0
    for finite in flags:
        if finite:
            good += 1
            if good >= growth_interval:
                scale, good = higher(scale, growth_factor, max_scale), 0
        else:
            good, bad = 0, bad + 1
            if bad >= backoff_interval:
                scale, bad = lower(scale, backoff_factor, min_scale), 0
        yield scale, good, bad


def hysteresis(
    flags,
    *,
    init_scale,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    refill,
    min_scale,
    max_scale,
):
    """Yields (loss_scale, finite_count, nonfinite_count) after each step."""
    scale, good, bad = init_scale, 0, 0
    for finite in flags:
        if finite:
            good += 1
            if refill == "finite":
                bad = 0
            if good >= growth_interval:
                scale, good, bad = higher(scale, growth_factor, max_scale), 0, 0
        else:
            good, bad = 0, bad + 1
            if bad >= hysteresis:
                scale = lower(scale, backoff_factor, min_scale)
        yield scale, good, bad


def adaptive(
    flags,
    *,
    init_scale,
    growth_factor,
    backoff_factor,
    intervals,
    init_interval,
    min_scale,
    max_scale,
):
    """Yields the fields of `jls.AdaptiveState` after each step."""
    scale, good, bad, growths = init_scale, 0, 0, 0
    rung = intervals.index(init_interval)
    for finite in flags:
        if not finite:
            scale, good = lower(scale, backoff_factor, min_scale), 0
            bad = (bad + 1) % 4
            if bad == 3 and rung > 0:
                rung, bad, growths = -1, 0, 0
        else:
            good += 1
            if good >= (1 if rung < 0 else intervals[rung]):
                scale, good, bad = higher(scale, growth_factor, max_scale), 0, 0
                growths = (growths + 1) % 4
                if growths == 3 and rung + 1 < len(intervals):
                    rung, growths = rung + 1, 0
        yield scale, good, bad, growths, rung
