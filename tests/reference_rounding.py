"""Rounding to a narrow dtype in plain numpy: to nearest, ties to the even pattern."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

NARROW = [
    jnp.float16,
    jnp.bfloat16,
    jnp.float8_e5m2,
    jnp.float8_e5m2fnuz,
    jnp.float8_e4m3,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3fnuz,
    jnp.float8_e4m3b11fnuz,
    jnp.float8_e3m4,
]
FATES = ["zero", "nonfinite", "vanished", "subnormal", "overflowed"]


def ladder(dtype):
    """All finite magnitudes of `dtype`, in the order of their patterns."""
    dtype = np.dtype(dtype)
    patterns = np.arange(2 ** (8 * dtype.itemsize - 1))
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = patterns.astype(f"uint{8 * dtype.itemsize}").view(dtype)
        values = values.astype(np.float64)
    return values[np.isfinite(values)]


def fates(x, scale, dtype):
    """The index in FATES of each float32 times its `scale`; 5 where it stays normal."""
    magnitudes = ladder(dtype)
    past = 2 * magnitudes[-1] - magnitudes[-2]  # where inf is, or would be
    rungs = np.append(magnitudes, past)
    finite = np.isfinite(x)
    exact = np.abs(np.where(finite, x, 0).astype(np.float64))
    exact = exact * np.asarray(scale, np.float64)  # 48 of 53 bits
    above = np.clip(np.searchsorted(rungs, exact), 1, len(rungs) - 1)
    low, high = exact - rungs[above - 1], rungs[above] - exact
    goes_up = (high < low) | ((high == low) & (above % 2 == 0))
    rounded = np.where(goes_up, above, above - 1)
    normal = np.searchsorted(magnitudes, float(ml_dtypes.finfo(dtype).smallest_normal))
    fate = np.full(x.shape, 5)
    fate[rounded >= len(magnitudes)] = 4
    fate[rounded < normal] = 3
    fate[rounded == 0] = 2
    fate[x == 0] = 0
    fate[~finite] = 1
    return fate


def float32_of_every_kind(scales, dtype):
    """All exponents times telling significands, and every edge to one unit."""
    rng = np.random.default_rng(0)
    telling = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FEFFF, 0x7FF000, 0x7FFFFE]
    low = np.array([*telling, 0x7FFFFF, *rng.integers(0, 2**23, 2)], np.uint32)
    grid = (np.arange(256, dtype=np.uint32)[:, None] << 23 | low).ravel()
    rungs = ladder(dtype)
    ends = rungs[[0, 1, 2, -2, -1]]
    normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    ends = np.concatenate([ends, [normal, (normal + rungs[1]), normal - rungs[1]]])
    ends = np.concatenate([ends, ends / 2, [normal - rungs[1] / 2]])
    ends = np.append(ends, rungs[-1] + (rungs[-1] - rungs[-2]) / 2)
    with np.errstate(over="ignore"):
        near = (ends / np.asarray(scales, np.float64)[:, None]).astype(np.float32)
    near = near[np.isfinite(near)].ravel().view(np.uint32)
    around = (near[:, None] + np.arange(-2, 3)).astype(np.uint32) & 0x7FFFFFFF
    patterns = np.unique(np.concatenate([grid, around.ravel()]))
    return np.concatenate([patterns, patterns | 0x80000000]).astype(np.uint32)
