import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import export
from shared import SEQUENCES, assert_follows, assert_follows_eagerly

import jls

HYPERPARAMETERS = {
    "init_scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "intervals": (1, 2),
    "init_interval": 1,
    "min_scale": 2.0,
    "max_scale": 64.0,
}


def assert_follows_reference(state=None, sequences=SEQUENCES, **changes):
    hyperparameters = HYPERPARAMETERS | changes
    assert_follows(jls.adaptive, reference.adaptive, hyperparameters, state, sequences)


@pytest.mark.parametrize(
    ("intervals", "init_interval"),
    [
        ((1, 2), 1),
        ((1, 2), 2),
        ((2, 3), 2),
        ((2, 3), 3),
        ((1, 1), 1),
        ((2,), 2),
        ((1, 1, 1), 1),
        ((1, 2, 3), 2),
    ],
)
def test_all_sequences_follow_the_reference(intervals, init_interval):
    assert_follows_reference(intervals=intervals, init_interval=init_interval)


@pytest.mark.parametrize("finite_rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("intervals", [(1, 2, 3, 5), (3, 4), (2, 2, 3)])
def test_long_runs_follow_the_reference(intervals, finite_rate):
    sequences = np.random.default_rng(0).random((40, 400)) < finite_rate
    assert_follows_reference(
        sequences=sequences,
        intervals=intervals,
        init_interval=intervals[-1],
        min_scale=2.0**-126,
        max_scale=2.0**126,
    )


def test_all_sequences_follow_the_reference_with_inexact_factors():
    assert_follows_reference(
        init_scale=10.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        min_scale=float(np.float32(0.01)),
        max_scale=1000.0,
    )


@pytest.mark.parametrize("start", [0.5, 128.0])
def test_all_sequences_follow_the_reference_from_outside_the_bounds(start):
    state = jls.set_loss_scale(jls.adaptive().init(), start)
    assert_follows_reference(state)


def test_eager_steps_follow_the_reference():
    flags = [True, True, True, True, False, False, False, True, True, True, False, True]
    assert_follows_eagerly(jls.adaptive, reference.adaptive, HYPERPARAMETERS, flags)


def test_three_growths_climb_and_three_overflows_fall():
    scaler = jls.adaptive(2.0**10, intervals=(1, 2))
    state, rungs = scaler.init(), []
    # The finite step among the overflows is no growth, and does not reset their count.
    for flag in [True, True, True, False, False, True, False, True, True, True]:
        state = scaler.adjust(state, flag)
        rungs.append(state.rung.item())
    assert rungs == [1, 1, 2, 2, 2, 2, 0, 0, 0, 1]


def test_overflows_at_the_shortest_interval_do_not_fall():
    scaler = jls.adaptive(2.0**20, intervals=(3, 4))
    state = scaler.init()
    for _ in range(9):
        state = scaler.adjust(state, False)
    assert state.rung == 1
    assert state.nonfinite_count == 9 % 4


def test_interval_lowered_below_the_count_grows_on_the_next_finite_step():
    state = jls.adaptive(8.0, intervals=(5,)).init()
    state = state._replace(finite_count=jnp.int32(4))
    assert jls.adaptive(8.0, intervals=(2,)).adjust(state, True).loss_scale == 16.0


def test_count_at_the_int32_maximum_does_not_wrap():
    state = jls.adaptive(8.0).init()._replace(finite_count=jnp.int32(2**31 - 1))
    state = jls.adaptive(8.0, intervals=(2**31 - 1,)).adjust(state, True)
    assert (state.loss_scale, state.finite_count) == (16.0, 0)


def test_setting_the_scale_restarts_the_counts_of_steps_and_keeps_the_interval():
    state = jls.types.AdaptiveState(
        jnp.float32(8.0), jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(3)
    )
    assert jls.set_loss_scale(state, 64.0) == (64.0, 0, 0, 1, 3)


def test_state_goes_through_export():
    scaler = jls.adaptive(8.0, intervals=(1, 2))
    state = scaler.init()
    exported = export.export(jax.jit(scaler.adjust))(state, jnp.asarray(True))
    again = export.deserialize(exported.serialize())
    after = again.call(state, jnp.asarray(True))
    assert after == scaler.adjust(state, True)
    assert isinstance(after, jls.types.AdaptiveState)


@pytest.mark.parametrize(
    "intervals", [[20, 30], np.array([20, 30]), range(20, 40, 10), jnp.array([20, 30])]
)
def test_intervals_of_any_kind_make_the_same_scaler(intervals):
    scaler = jls.adaptive(intervals=intervals)
    given = scaler.hyperparameters["intervals"]
    assert [int(interval) for interval in given] == [20, 30]
    assert scaler.adjust(scaler.init(), True).finite_count == 1


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\)"),
        ({"intervals": ()}, "intervals must be one or more, from the shortest to"),
        ({"intervals": (30, 20)}, "intervals must be one or more, from the shortest"),
        ({"init_interval": 7}, r"init_interval must be one of intervals, \(20, 30, "),
        ({"init_interval": 0}, "init_interval must be from 1 to"),
        ({"init_scale": 0.0}, "init_scale must be from 2"),
        ({"min_scale": 1e-40}, "min_scale must be from 2"),
        ({"max_scale": 2.0**127}, "max_scale must be from 2"),
        ({"init_scale": 0.5}, r"min_scale must be <= init_scale, got 1.0 > 0.5"),
    ],
)
def test_hyperparameter_out_of_range_is_a_value_error(kwargs, rule):
    with pytest.raises(ValueError, match=rule) as error:
        jls.adaptive(**kwargs)
    assert repr(next(iter(kwargs.values()))) in str(error.value)


def test_interval_out_of_range_is_named_by_its_place():
    with pytest.raises(ValueError, match=r"intervals\[1\] must be from 1 to .* got 0"):
        jls.adaptive(intervals=(1, 0))


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"intervals": 20}, "intervals must be a sequence of integers, got int 20"),
        ({"intervals": "20"}, "intervals must be a sequence of integers, got str"),
        ({"intervals": None}, "intervals must be a sequence of integers, got NoneType"),
        ({"intervals": (20, 30.0)}, r"intervals\[1\] must be an integer, got float"),
        ({"init_interval": 20.0}, "init_interval must be an integer, got float"),
        ({"init_interval": True}, "init_interval must be an integer, got bool"),
        ({"init_scale": "8"}, "init_scale must be a real number"),
        ({"growth_factor": None}, "growth_factor must be a real number"),
        ({"backoff_factor": 2j}, "backoff_factor must be a real number"),
        ({"min_scale": True}, "min_scale must be a real number"),
        ({"max_scale": [2.0]}, "max_scale must be a real number"),
    ],
)
def test_hyperparameter_of_another_type_is_a_type_error(kwargs, rule):
    with pytest.raises(TypeError, match=rule):
        jls.adaptive(**kwargs)
