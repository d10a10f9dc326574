import jax.numpy as jnp
import numpy as np
import pytest
import reference
from shared import assert_follows

import jls

HYPERPARAMETERS = {
    "init_scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "backoff_interval": 2,
    "min_scale": 2.0,
    "max_scale": 32.0,
}


def assert_follows_reference(state=None, **changes):
    hyperparameters = HYPERPARAMETERS | changes
    assert_follows(jls.cumulative, reference.cumulative, hyperparameters, state)


@pytest.mark.parametrize("growth_interval", [1, 2, 3])
@pytest.mark.parametrize("backoff_interval", [1, 2, 3])
def test_all_sequences_follow_the_reference(growth_interval, backoff_interval):
    assert_follows_reference(
        growth_interval=growth_interval, backoff_interval=backoff_interval
    )


def test_all_sequences_follow_the_reference_with_inexact_factors():
    assert_follows_reference(
        init_scale=10.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        min_scale=float(np.float32(0.01)),
        max_scale=1000.0,
    )


@pytest.mark.parametrize("start", [0.5, 64.0])
def test_all_sequences_follow_the_reference_from_outside_the_bounds(start):
    state = jls.set_loss_scale(jls.cumulative().init(), start)
    assert_follows_reference(state)


def test_eager_steps_follow_the_reference():
    flags = [False, True, True, False, True, False, False, True]
    scaler = jls.cumulative(**HYPERPARAMETERS)
    state, ours = scaler.init(), []
    for flag in flags:
        state = scaler.adjust(state, flag)
        ours.append(tuple(field.item() for field in state))
    assert ours == list(reference.cumulative(flags, **HYPERPARAMETERS))


def test_a_growth_leaves_the_nonfinite_count():
    scaler = jls.cumulative(8.0, growth_interval=1, backoff_interval=2)
    state = scaler.adjust(scaler.adjust(scaler.init(), False), True)
    assert state == (16.0, 0, 1)
    assert scaler.adjust(state, False) == (8.0, 0, 0)


def test_counts_at_the_int32_maximum_do_not_wrap():
    largest = jnp.int32(2**31 - 1)
    state = jls.LossScaleState(jnp.float32(8.0), largest, largest)
    scaler = jls.cumulative(8.0, growth_interval=2**31 - 1, backoff_interval=2**31 - 1)
    assert scaler.adjust(state, True) == (16.0, 0, largest)
    assert scaler.adjust(state, False) == (4.0, 0, 0)


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval must be from 1 to"),
        ({"backoff_interval": 2**31}, "backoff_interval must be from 1 to"),
        ({"init_scale": 0.0}, "init_scale must be from 2"),
        ({"min_scale": 1e-40}, "min_scale must be from 2"),
        ({"max_scale": 2.0**127}, "max_scale must be from 2"),
        ({"init_scale": 0.5}, r"min_scale must be <= init_scale, got 1.0 > 0.5"),
    ],
)
def test_hyperparameter_out_of_range_is_a_value_error(kwargs, rule):
    with pytest.raises(ValueError, match=rule) as error:
        jls.cumulative(**kwargs)
    assert repr(next(iter(kwargs.values()))) in str(error.value)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
@pytest.mark.parametrize("value", ["2", None, True, 2j])
def test_hyperparameter_of_another_type_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an? "):
        jls.cumulative(**{name: value})
