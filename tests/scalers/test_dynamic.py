import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from shared import assert_follows, both

import jls


def assert_follows_reference(state, **hyperparameters):
    assert_follows(jls.dynamic, reference.dynamic, hyperparameters, state)


@pytest.mark.parametrize("growth_interval", [1, 2, 3])
@pytest.mark.parametrize("backoff_interval", [1, 2, 3])
def test_all_sequences_follow_the_reference(growth_interval, backoff_interval):
    # From 8 the floor is two backoffs away and the cap two growths.
    assert_follows_reference(
        None,
        init_scale=8.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=growth_interval,
        backoff_interval=backoff_interval,
        min_scale=2.0,
        max_scale=32.0,
    )


def test_all_sequences_follow_the_reference_with_inexact_factors():
    assert_follows_reference(
        None,
        init_scale=10.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=2,
        backoff_interval=1,
        min_scale=float(np.float32(0.01)),
        max_scale=1000.0,
    )


@pytest.mark.parametrize("start", [0.5, 64.0])
def test_all_sequences_follow_the_reference_from_outside_the_bounds(start):
    hyperparameters = {
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "backoff_interval": 1,
        "min_scale": 2.0,
        "max_scale": 32.0,
    }
    state = jls.set_loss_scale(jls.dynamic(8.0).init(), start)
    assert_follows_reference(state, init_scale=8.0, **hyperparameters)


def test_eager_steps_follow_the_reference():
    hyperparameters = {
        "init_scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "backoff_interval": 2,
        "min_scale": 1.0,
        "max_scale": 16.0,
    }
    flags = [True] * 5 + [False] * 9 + [True, False, False, True, True]
    scaler = jls.dynamic(**hyperparameters)
    state, ours = scaler.init(), []
    for flag in flags:
        state = scaler.adjust(state, flag)
        ours.append(tuple(field.item() for field in state))
    assert ours == list(reference.dynamic(flags, **hyperparameters))


def test_overflow_never_raises_a_scale_below_the_floor():
    scaler = jls.dynamic(8.0, min_scale=4.0)
    state = jls.set_loss_scale(scaler.init(), 0.25)
    assert scaler.adjust(state, False).loss_scale == 0.25


def test_growth_that_overflows_float32_stops_at_the_cap():
    scaler = jls.dynamic(
        2.0**126, growth_factor=2.0**100, growth_interval=1, max_scale=2.0**126
    )
    assert scaler.adjust(scaler.init(), True).loss_scale == 2.0**126


def test_interval_lowered_below_the_count_grows_on_the_next_finite_step():
    state = jls.dynamic(8.0, growth_interval=3).init()
    state = state._replace(finite_count=jnp.int32(2))
    assert jls.dynamic(8.0, growth_interval=1).adjust(state, True).loss_scale == 16.0


def test_counts_at_the_int32_maximum_do_not_wrap():
    largest = jnp.int32(2**31 - 1)
    state = jls.LossScaleState(jnp.float32(8.0), largest, largest)
    scaler = jls.dynamic(8.0, growth_interval=2**31 - 1, backoff_interval=2**31 - 1)
    assert scaler.adjust(state, True) == (16.0, 0, 0)
    assert scaler.adjust(state, False) == (4.0, 0, 0)


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ({"growth_factor": 1.0 + 1e-12}, "growth_factor must be finite and > 1"),
        ({"growth_factor": float("inf")}, "growth_factor must be finite and > 1"),
        ({"growth_factor": float("nan")}, "growth_factor must be finite and > 1"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be in \(0, 1\)"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\)"),
        ({"backoff_factor": -0.5}, r"backoff_factor must be in \(0, 1\)"),
        ({"backoff_factor": 1.0 - 1e-12}, r"backoff_factor must be in \(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval must be from 1 to"),
        ({"growth_interval": 2**31}, "growth_interval must be from 1 to"),
        ({"backoff_interval": -1}, "backoff_interval must be from 1 to"),
        ({"init_scale": 0.0}, "init_scale must be from 2"),
        ({"init_scale": float("nan")}, "init_scale must be from 2"),
        ({"init_scale": 10**400}, "init_scale must be from 2"),
        ({"min_scale": 0.0}, "min_scale must be from 2"),
        ({"min_scale": 1e-40}, "min_scale must be from 2"),
        ({"max_scale": 2.0**127}, "max_scale must be from 2"),
        ({"init_scale": 0.5}, r"min_scale must be <= init_scale, got 1.0 > 0.5"),
        ({"max_scale": 2.0}, r"init_scale must be <= max_scale, got 32768.0 > 2.0"),
    ],
)
def test_hyperparameter_out_of_range_is_a_value_error(kwargs, rule):
    with pytest.raises(ValueError, match=rule) as error:
        jls.dynamic(**kwargs)
    assert repr(next(iter(kwargs.values()))) in str(error.value)


def test_bounds_are_compared_with_each_other_when_init_scale_is_an_array():
    with pytest.raises(ValueError, match="min_scale must be <= max_scale, got 8 > 4"):
        jls.dynamic(jnp.float32(6.0), min_scale=8, max_scale=4)


@pytest.mark.parametrize("value", ["2", None, True, 2j, [2.0]])
@pytest.mark.parametrize(
    "name", ["init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"]
)
def test_hyperparameter_of_another_type_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a real number, got "):
        jls.dynamic(**{name: value})


@pytest.mark.parametrize("value", [2.0, "2", None, True, np.bool_(True)])
@pytest.mark.parametrize("name", ["growth_interval", "backoff_interval"])
def test_interval_that_is_no_integer_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
        jls.dynamic(**{name: value})


NO_INTEGERS = [
    np.array(2.0, np.float32),
    jnp.float32(2.0),
    jnp.array([2.0, 3.0]),
    jnp.array(True),
]


@pytest.mark.parametrize("value", NO_INTEGERS)
@pytest.mark.parametrize("name", ["growth_interval", "backoff_interval"])
def test_interval_array_of_another_dtype_is_a_type_error(name, value):
    rule = rf"{name} must be an integer, got an array of {value.dtype}\. .*astype"
    for make in both(lambda x: jls.dynamic(8.0, **{name: x}).init()):
        with pytest.raises(TypeError, match=rule):
            make(value)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_interval_arrays_of_any_integer_dtype_are_mapped_over(dtype):
    intervals = np.array([1, 2], dtype)

    def run(interval):
        scaler = jls.dynamic(8.0, growth_interval=interval)
        return scaler.adjust(scaler.init(), True).loss_scale

    for mapped in both(jax.vmap(run)):
        assert mapped(intervals).tolist() == [16.0, 8.0]
    assert run(intervals[0].reshape(())) == 16.0  # numpy


def test_numpy_scalars_are_numbers_and_arrays_pass_unchecked():
    scaler = jls.dynamic(np.float32(8.0), growth_interval=np.int64(2))
    assert scaler.adjust(scaler.init(), True) == (8.0, 1, 0)
    scaler = jls.dynamic(jnp.float32(8.0), growth_factor=jnp.float32(0.5))
    assert scaler.init().loss_scale == 8.0
