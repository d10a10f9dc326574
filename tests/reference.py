"""The rule of `jls.dynamic` in plain Python, for the tests to compare with.

numpy only rounds each product to float32, as the device does.
"""

import numpy as np


def float32(x):
    with np.errstate(over="ignore"):
        return float(np.float32(x))


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
                scale, good = min(float32(scale * float32(growth_factor)), max_scale), 0
        else:
            good, bad = 0, bad + 1
            if bad >= backoff_interval:
                lower = max(float32(scale * float32(backoff_factor)), min_scale)
                scale, bad = min(scale, lower), 0
        yield scale, good, bad
