import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from shared import assert_follows, trajectories

import jls

MAGNITUDES = (0.0, 1e-3, 1.0, 1.9995, 5000.0, math.inf)
SEQUENCES = np.array(list(itertools.product(MAGNITUDES, repeat=6)), np.float32)
DEFAULTS = {
    "init_scale": 8.0,
    "window": 2,
    "growth_interval": 3,
    "backoff_factor": 0.5,
    "min_scale": 2.0,
    "max_scale": 2.0**24,
    "headroom": 4.0,
}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"window": 1},
        {"window": 3},
        {"growth_interval": 1},
        {"growth_interval": 2, "window": 1},
        {"headroom": 0.0},
        {"headroom": 1.0, "max_scale": 1024.0},
        {"backoff_factor": 0.25, "window": 3},
    ],
)
def test_every_short_run_follows_the_rule(changed):
    hyperparameters = DEFAULTS | changed
    assert_follows(
        jls.recent_max, reference.recent_max, hyperparameters, sequences=SEQUENCES
    )


@pytest.mark.parametrize("start", [0.5, 2.0**30])
def test_a_scale_set_out_of_bounds_follows_the_rule(start):
    state = jls.set_loss_scale(jls.recent_max(**DEFAULTS).init(), start)
    assert_follows(jls.recent_max, reference.recent_max, DEFAULTS, state, SEQUENCES)


def test_the_scale_is_the_largest_that_leaves_the_headroom():
    scaler = jls.recent_max(max_scale=2.0**100, min_scale=2.0**-100, headroom=4.0)
    magnitudes = np.logspace(-20, 20, 400).astype(np.float32)

    def scale_after(largest):
        return scaler.adjust(scaler.init(), largest).loss_scale

    ours = jax.vmap(scale_after)(jnp.asarray(magnitudes))
    room = np.asarray(ours, np.float64) * magnitudes.astype(np.float64) * 2.0**4
    assert (room < 65520).all()  # from there on float16 rounds to inf
    assert (2 * room >= 65520).all()


def test_every_scale_leaves_the_headroom_and_is_a_power_of_two():
    scaler = jls.recent_max(min_scale=2.0**-100, headroom=3.0, window=3)
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.uniform(-12, 12, (200, 30))).astype(np.float32)
    scales = np.asarray(trajectories(scaler, scaler.init(), magnitudes).loss_scale)
    assert (np.frexp(scales)[0] == 0.5).all()
    assert (scales * magnitudes * 2.0**3 <= 65504.0).all()


def test_gradients_that_grow_slower_than_the_headroom_never_overflow():
    scaler = jls.recent_max(
        window=2, headroom=4.0, max_scale=2.0**40, min_scale=2.0**-40
    )
    state, largest = scaler.adjust(scaler.init(), 1.0), 1.0
    rng = np.random.default_rng(1)
    for _ in range(100):
        largest *= 2.0 ** rng.uniform(-6, 3.9)
        assert largest * float(state.loss_scale) < 65504.0
        state = scaler.adjust(state, largest)


def test_a_gradient_is_forgotten_after_one_to_two_windows():
    scaler = jls.recent_max(window=3)
    state = scaler.adjust(scaler.init(), 100.0)
    low = state.loss_scale
    scales = []
    for _ in range(8):
        state = scaler.adjust(state, 1.0)
        scales.append(float(state.loss_scale / low))
    assert scales == [1.0] * 5 + [64.0] * 3


def test_after_an_overflow_the_scale_comes_back_as_that_of_dynamic():
    scaler = jls.recent_max(window=2, growth_interval=3)
    state = scaler.adjust(scaler.init(), 1.0)
    usual = state.loss_scale
    for _ in range(2):
        state = scaler.adjust(state, jnp.nan)
    scales = [float(state.loss_scale / usual)]
    for _ in range(8):
        state = scaler.adjust(state, 1.0)
        scales.append(float(state.loss_scale / usual))
    assert scales == [0.25] * 3 + [0.5] * 3 + [1.0] * 3


def test_an_overflow_at_a_scale_set_by_hand_forgets_nothing():
    scaler = jls.recent_max(8.0, window=2)
    state = scaler.adjust(scaler.adjust(scaler.init(), 1.0), jnp.inf)
    ceiling = state.overflow_ceiling
    state = scaler.adjust(jls.set_loss_scale(state, 2.0**30), jnp.inf)
    assert state.overflow_ceiling == ceiling


def test_the_lowest_floor_is_left_again():
    scaler = jls.recent_max(8.0, min_scale=2.0**-126, growth_interval=1)
    state = jls.set_loss_scale(scaler.init(), 2.0**-126)
    state = scaler.adjust(state, jnp.inf)
    for _ in range(2):
        state = scaler.adjust(state, 1.0)
    assert state.loss_scale > 2.0**-126


def test_zeros_alone_double_the_scale_up_to_the_cap():
    scaler = jls.recent_max(8.0, max_scale=64.0, window=2)
    state, scales = scaler.init(), []
    for _ in range(4):
        state = scaler.adjust(state, 0.0)
        scales.append(float(state.loss_scale))
    assert scales == [16.0, 32.0, 64.0, 64.0]


def test_subnormal_and_huge_magnitudes_do_no_harm():
    scaler = jls.recent_max(window=2)
    for largest in (1e-45, 1e-39, 3e38):
        state = scaler.adjust(scaler.init(), np.float32(largest))
        assert 1.0 <= state.loss_scale <= 2.0**24


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be from 1 to"),
        ({"window": 2.5}, TypeError, "window must be an integer, got float 2.5"),
        ({"headroom": 127.0}, ValueError, "headroom must be from 0 to 126"),
        ({"dtype": "no"}, TypeError, "dtype must be a floating-point dtype"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be in"),
        ({"max_scale": 0.5}, ValueError, "min_scale must be <= max_scale"),
    ],
)
def test_bad_hyperparameters_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        jls.recent_max(**kwargs)
