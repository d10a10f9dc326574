"""The rules of the scalers, and of rounding, in plain Python, to compare with.

Each product is rounded to float32, as the device does: by C, which is quick.
"""

import ctypes
import itertools
import math
from fractions import Fraction

import numpy as np


def float32(x):
    return ctypes.c_float(x).value


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
    consecutive=True,
):
    """Yields (loss_scale, finite_count, nonfinite_count) after each step."""
    scale, good, bad = init_scale, 0, 0
    for finite in flags:
        if finite:
            good, bad = good + 1, 0 if consecutive else bad
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


def stored(param, update, dtype):
    """The parameter after an update, in its own dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.float32(param) + np.float32(update)).astype(dtype)


def may_be_stored(param, update, dtype):
    """Whether a step that is checked may give a parameter of `dtype` this update."""
    overflows = math.isfinite(param) and not np.isfinite(stored(param, update, dtype))
    return math.isfinite(update) and not overflows


def _over(values, given, seen, count, judged_from, limit_of):
    """Whether a value is above the limit that the kept ones before it give."""
    over = False
    for row in given:
        kept = seen[row][-count:]
        if len(kept) >= judged_from:
            over |= values[row] > limit_of(kept)
    return over


def _deviation(kept, mean, fewer=0):
    total = sum((x - mean) ** 2 for x in kept)
    return math.sqrt(total / max(len(kept) - fewer, 1))


def spikes(signals, *, window, sigmas, budget=4, warmup=None, max_norm=math.inf):
    """Yields (skip, found, tokens) for each pair of a loss, or None, and a norm."""
    budget = math.inf if budget is None else budget
    warmup = max(2, window // 2) if warmup is None else warmup
    refill = budget / window if budget == math.inf else Fraction(budget) / window
    seen, found, tokens = ([], []), 0, budget

    def limit_of(kept):
        mean = sum(kept) / len(kept)
        if not any(kept):
            return math.inf
        return mean + sigmas * max(_deviation(kept, mean), abs(mean) / 512)

    for values in signals:
        given = [row for row in (0, 1) if values[row] is not None]
        over = _over(values, given, seen, window, warmup, limit_of)
        over |= values[1] > max_norm
        skip = over and tokens >= 1
        found += over
        tokens = tokens - 1 if skip else min(tokens + refill, budget)
        if not skip:
            for row in given:
                if math.isfinite(values[row]):
                    seen[row].append(values[row])
        yield skip, found, float(tokens)


def requeue(fates, step, *, lag, retries):
    """What a loop does in which skipped batches come again.

    `step(fate)` takes a step and returns the name of a skip reason, and the loss scale
    after it.

    Returns:
      All tries in their order, as (batch, reason, scale); and the batches that are bad.
    """
    new, again, tries, bad = list(range(len(fates))), [], [], []

    def is_over(last):
        """Whether the try number `last` is the last one of its batch."""
        ours = [i for i in range(last + 1) if tries[i][0] == tries[last][0]]
        counted = 0
        for before, after in itertools.pairwise(ours):
            passed = [
                scale
                for _, reason, scale in tries[:after]
                if reason not in ("GRADIENTS", "LOSS")
            ]
            others_pass = passed and tries[after - 1][2] <= passed[-1]
            comes_down = tries[after][2] < tries[before][2]
            counted += bool(others_pass or not comes_down)
        return counted >= retries

    decided = 0
    while True:
        while len(tries) - decided > lag or (decided < len(tries) and not again + new):
            batch, reason, _ = tries[decided]
            if reason == "GRADIENTS" and not is_over(decided):
                again.append(batch)
            elif reason != "NONE":
                bad.append(batch)
            decided += 1
        if not again + new:
            return tries, bad
        batch = (again or new).pop(0)
        tries.append((batch, *step(fates[batch])))


# Rounding to bfloat16: numbers as the 32 bits of a float32, upper halves as 16 bits.


def is_nan(bits):
    return bits & 0x7FFFFFFF > 0x7F800000


def rounded_by(bits, noise):
    """The upper half, raised if the lower one and `noise` carry over."""
    upper, lower = divmod(bits, 2**16)
    if is_nan(bits):
        return upper | 0x40  # one with its payload only in the lower half stays one
    is_largest = upper & 0x7FFF >= 0x7F7F  # of those that are finite; or inf
    return upper if is_largest or lower + noise < 2**16 else upper + 1


def split(bits):
    """The upper half, rounded to nearest with ties away from zero, and the lower."""
    upper, lower = divmod(bits, 2**16)
    if is_nan(bits):
        return upper | 0x40, 0
    return (upper + 1 if lower >= 2**15 else upper), lower


def joined(upper, lower):
    """The number that `split` took apart."""
    return ((upper - 1 if lower >= 2**15 else upper) << 16) + lower


def float8(numbers, largest, mantissa_bits, least):
    """Numbers rounded to float8, and the exponent of the power of two before.

    Args:
      numbers: finite.
      largest: the largest number of the float8.
      mantissa_bits: how many it has behind the leading one.
      least: its smallest number over 0.
    """
    size = max(map(abs, numbers))
    exponent = 100
    while size * 2.0**exponent > largest:
        exponent -= 1
    rounded = []
    for x in numbers:
        scaled = Fraction(x) * Fraction(2) ** exponent
        step = Fraction(least)
        while abs(scaled) >= step * 2 ** (mantissa_bits + 1):
            step *= 2
        rounded.append(float(round(scaled / step) * step))  # ties to even
    return rounded, exponent
