import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from shared import assert_follows

import jls

# With scales of 2 to 64 and no headroom: nothing, far from an overflow, finite
# at 16 but not at 32 (the second just so), at no scale above 2, and an overflow.
MAGNITUDES = (0.0, 1.0, 3000.0, 4094.0, 30000.0, math.inf)
SEQUENCES = np.array(list(itertools.product(MAGNITUDES, repeat=5)), np.float32)
DEFAULTS = {
    "init_scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "backoff_interval": 1,
    "min_scale": 2.0,
    "max_scale": 64.0,
    "headroom": 0.0,
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"growth_interval": 1},
        {"growth_interval": 3, "backoff_interval": 2},
        {"headroom": 1.0},
        {"headroom": 4.0, "growth_interval": 1},
        {"growth_factor": 3.0, "backoff_factor": 0.3, "growth_interval": 1},
    ],
)
def test_every_short_run_follows_the_rule(changed):
    hyperparameters = DEFAULTS | changed
    assert_follows(
        jls.cautious, reference.cautious, hyperparameters, sequences=SEQUENCES
    )


@pytest.mark.parametrize("start", [1.0, 100.0])
def test_a_scale_set_out_of_bounds_follows_the_rule(start):
    state = jls.set_loss_scale(jls.cautious(**DEFAULTS).init(), start)
    assert_follows(jls.cautious, reference.cautious, DEFAULTS, state, SEQUENCES)


def test_small_gradients_move_it_as_dynamic_moves():
    flags = np.array(list(itertools.product([True, False], repeat=8)))
    magnitudes = np.where(flags, np.float32(1e-3), np.inf)
    hyperparameters = {k: v for k, v in DEFAULTS.items() if k != "headroom"}
    for sequence, finite in zip(magnitudes.tolist(), flags.tolist(), strict=True):
        ours = list(reference.cautious(sequence, **DEFAULTS))
        assert ours == list(reference.dynamic(finite, **hyperparameters))


def test_it_stops_below_the_overflow_that_dynamic_runs_into():
    cautious = jls.cautious(8.0, growth_interval=1, headroom=0.0)
    dynamic = jls.dynamic(8.0, growth_interval=1)
    ours, theirs, skips = cautious.init(), dynamic.init(), 0
    for _ in range(12):
        ours = cautious.adjust(ours, 100.0)
        overflows = bool(theirs.loss_scale * 100.0 > 65504.0)
        skips += overflows
        theirs = dynamic.adjust(theirs, not overflows)
    assert ours.loss_scale == 512.0  # 51200 fits float16, 102400 does not
    assert skips > 0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(jnp.float16, 16.0), (jnp.bfloat16, 512.0), (jnp.float8_e4m3fn, 8.0)],
)
def test_the_limit_is_that_of_the_dtype(dtype, expected):
    scaler = jls.cautious(8.0, growth_interval=1, max_scale=512.0, dtype=dtype)
    state = scaler.init()
    for _ in range(8):
        state = scaler.adjust(state, 2000.0)
    assert state.loss_scale == expected


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"headroom": -1.0}, ValueError, "headroom must be from 0 to 126 .* got -1.0"),
        ({"headroom": "2"}, TypeError, "headroom must be a real number, got str '2'"),
        ({"dtype": jnp.int8}, TypeError, "dtype must be a floating-point dtype"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be from 1"),
        (
            {"min_scale": 8.0, "init_scale": 4.0},
            ValueError,
            "min_scale must be <= init",
        ),
    ],
)
def test_bad_hyperparameters_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        jls.cautious(**kwargs)
