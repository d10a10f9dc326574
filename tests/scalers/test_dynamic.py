import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import Partial
from shared import assert_follows, assert_follows_eagerly

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
    assert_follows_eagerly(jls.dynamic, reference.dynamic, hyperparameters, flags)


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
    state = jls.types.ScalerState(jnp.float32(8.0), largest, largest)
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
def test_interval_array_of_another_dtype_is_a_type_error(jit_or_eager, name, value):
    rule = rf"{name} must be an integer, got an array of {value.dtype}\. .*astype"
    make = jit_or_eager(lambda x: jls.dynamic(8.0, **{name: x}).init())
    with pytest.raises(TypeError, match=rule):
        make(value)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_interval_arrays_of_any_integer_dtype_are_mapped_over(jit_or_eager, dtype):
    intervals = np.array([1, 2], dtype)

    def run(interval):
        scaler = jls.dynamic(8.0, growth_interval=interval)
        return scaler.adjust(scaler.init(), True).loss_scale

    mapped = jit_or_eager(jax.vmap(run))
    assert mapped(intervals).tolist() == [16.0, 8.0]
    assert run(intervals[0].reshape(())) == 16.0  # numpy


def test_numpy_scalars_are_numbers_and_arrays_pass_unchecked():
    scaler = jls.dynamic(np.float32(8.0), growth_interval=np.int64(2))
    assert scaler.adjust(scaler.init(), True) == (8.0, 1, 0)
    scaler = jls.dynamic(jnp.float32(8.0), growth_factor=jnp.float32(0.5))
    assert scaler.init().loss_scale == 8.0


# Finite steps counted across skips ----------------------------------------------------


NOT_CONSECUTIVE = {
    "consecutive": False,
    "init_scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "backoff_interval": 2,
    "min_scale": 2.0,
    "max_scale": 32.0,
}


def assert_follows_if_not_consecutive(state=None, **changes):
    hyperparameters = NOT_CONSECUTIVE | changes
    assert_follows(jls.dynamic, reference.dynamic, hyperparameters, state)


@pytest.mark.parametrize("growth_interval", [1, 2, 3])
@pytest.mark.parametrize("backoff_interval", [1, 2, 3])
def test_not_consecutive_all_sequences_follow_the_reference(
    growth_interval, backoff_interval
):
    assert_follows_if_not_consecutive(
        growth_interval=growth_interval, backoff_interval=backoff_interval
    )


def test_not_consecutive_all_sequences_follow_the_reference_with_inexact_factors():
    assert_follows_if_not_consecutive(
        init_scale=10.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        min_scale=float(np.float32(0.01)),
        max_scale=1000.0,
    )


@pytest.mark.parametrize("start", [0.5, 64.0])
def test_not_consecutive_all_sequences_follow_the_reference_from_outside_the_bounds(
    start,
):
    state = jls.set_loss_scale(jls.dynamic().init(), start)
    assert_follows_if_not_consecutive(state)


def test_not_consecutive_eager_steps_follow_the_reference():
    flags = [False, True, True, False, True, False, False, True]
    assert_follows_eagerly(jls.dynamic, reference.dynamic, NOT_CONSECUTIVE, flags)


def test_a_growth_leaves_the_nonfinite_count():
    scaler = jls.dynamic(8.0, growth_interval=1, backoff_interval=2, consecutive=False)
    state = scaler.adjust(scaler.adjust(scaler.init(), False), True)
    assert state == (16.0, 0, 1)
    assert scaler.adjust(state, False) == (8.0, 0, 0)


def test_not_consecutive_counts_at_the_int32_maximum_do_not_wrap():
    largest = jnp.int32(2**31 - 1)
    state = jls.types.ScalerState(jnp.float32(8.0), largest, largest)
    scaler = jls.dynamic(
        8.0,
        growth_interval=2**31 - 1,
        backoff_interval=2**31 - 1,
        consecutive=False,
    )
    assert scaler.adjust(state, True) == (16.0, 0, largest)
    assert scaler.adjust(state, False) == (4.0, 0, 0)


@pytest.mark.parametrize("value", [1, None, "False", jnp.asarray(False)])
def test_consecutive_that_is_no_bool_is_a_type_error(value):
    with pytest.raises(TypeError, match="consecutive must be True or False, got"):
        jls.dynamic(consecutive=value)


# What went wrong elsewhere ------------------------------------------------------------


def scales_of(scaler, all_finite):
    """The loss scale after each step, from one compiled scan."""

    def step(state, finite):
        state = scaler.adjust(state, finite)
        return state, state.loss_scale

    flags = jnp.asarray(all_finite)
    return jax.jit(lambda: lax.scan(step, scaler.init(), flags)[1])().tolist()


def _through_scan(scaler):
    return lax.scan(lambda s, _: (s, None), scaler, length=2)[0]


def _through_vmap(scaler):
    members = jax.vmap(lambda _: jax.tree.map(jnp.asarray, scaler))(jnp.arange(2))
    return jax.tree.map(lambda x: x[1], members)


TRIPS = {
    "jit": jax.jit(lambda scaler: scaler),
    "tree_map": lambda scaler: jax.tree.map(lambda x: x, scaler),
    "scan": _through_scan,
    "vmap": _through_vmap,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_scaler_keeps_its_bounds_through_a_pytree_round_trip(trip):
    """jmp J1, J1b, R9: the floor went back to 1 and an overflow raised the scale."""
    bounded = jls.dynamic(8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    assert scales_of(trip(bounded), [False] * 3) == [4.0, 4.0, 4.0]
    assert scales_of(trip(bounded), [True] * 2) == [16.0, 16.0]
    assert scales_of(trip(jls.dynamic(0.25, min_scale=2.0**-10)), [False]) == [0.125]


@pytest.mark.parametrize("number", [jnp.float16, np.float16, float, int])
def test_scaler_takes_a_first_scale_of_any_type(jit_or_eager, number):
    """jmp J2, R9: DynamicLossScale(float16(2**15)) could not adjust."""
    scaler = jls.dynamic(number(2**15), growth_interval=1)
    state = jit_or_eager(scaler.adjust)(scaler.init(), jnp.asarray(True))
    assert state.loss_scale == 2.0**16
    assert state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("flag", [True, np.True_, jnp.array(True), np.array(True)])
def test_adjust_takes_any_boolean(flag):
    """jmp J9: adjust(True) was an AttributeError."""
    scaler = jls.dynamic(8.0, growth_interval=1)
    assert scaler.adjust(scaler.init(), flag).loss_scale == 16.0


@pytest.mark.parametrize("scaler", [jls.dynamic(8.0, growth_interval=2)])
def test_scaler_and_state_can_be_lowered_and_mapped_to_anything(scaler):
    """jmp J6, J13, M4: checks inside tree_unflatten refused AOT, None and specs."""

    def adjust(scaler, state, finite):
        return scaler.adjust(state, finite)

    args = scaler, scaler.init(), jnp.asarray(False)
    compiled = jax.jit(adjust).lower(*args).compile()
    assert compiled(*args).loss_scale == 4.0
    assert jax.eval_shape(adjust, *args).loss_scale.dtype == jnp.float32
    assert jax.tree.leaves(jax.tree.map(lambda _: None, args)) == []
    specs = jax.tree.map(lambda _: PartitionSpec(), args)
    assert set(jax.tree.leaves(specs)) == {PartitionSpec()}


@pytest.mark.parametrize("make", [jls.static, lambda s: jls.dynamic(s, min_scale=0.5)])
def test_new_hyperparameters_do_not_retrace(make):
    """jmp J7, J7b, M4: a static scale compiled once per value."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def first(scaler, x):
        return jls.scale(scaler.init(), x)

    x = jnp.float32(1.5)
    assert isinstance(make(2.0).init, Partial)
    for value in (2.0, 4.0, 8.0):
        assert first(make(value), x) == 1.5 * value
    assert jls.scale(make(jnp.float32(16.0)).init(), x) == 24.0


@pytest.mark.parametrize("loss_scale", [2.0**127, 2.0**-127, float("inf")])
def test_scale_with_a_subnormal_reciprocal_is_refused(loss_scale):
    """jmp J10, X2, X3: 1 / 2**127 is flushed to zero, and gradients with it."""
    with pytest.raises(ValueError, match=r"from 2\^-126 to 2\^126"):
        jls.static(loss_scale)
    with pytest.raises(ValueError, match=r"from 2\^-126 to 2\^126"):
        jls.dynamic(8.0, min_scale=2.0**-126, max_scale=loss_scale)
    if loss_scale > 1.0:
        with pytest.raises(ValueError, match=r"to 2\^126"):
            jls.set_loss_scale(jls.static(8.0).init(), loss_scale)


def test_scale_grows_on_the_last_step_of_the_interval():
    """flax F2, R3: grew after growth_interval + 1 finite steps."""
    scaler = jls.dynamic(4.0, growth_interval=3)
    assert scales_of(scaler, [True] * 6) == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_scale_stays_at_its_floor_and_comes_back():
    """flax F4, K2: 142 NaN steps took the scale to 1e-38, or to 0."""
    scaler = jls.dynamic(2.0**16, growth_interval=1, min_scale=0.5)
    scales = scales_of(scaler, [False] * 142 + [True] * 2)
    assert scales[17:] == [0.5] * 125 + [1.0, 2.0]


def test_scale_stays_at_its_cap():
    """Keras K1: grew to inf, and inf / 2 is inf."""
    scaler = jls.dynamic(2.0**125, growth_interval=1, max_scale=2.0**126)
    assert scales_of(scaler, [True] * 4 + [False]) == [2.0**126] * 4 + [2.0**125]


def test_scale_stays_a_power_of_two():
    """MPX M2: clipped to 65504, it never was one again."""
    scaler = jls.dynamic(2.0**14, growth_interval=1)
    scales = scales_of(scaler, [True] * 12 + [False] * 12)
    assert set(np.log2(scales)) <= set(range(25))
    assert max(scales) == 2.0**24


def test_scale_may_be_static_and_factors_any():
    """Keras K4: no fixed scale, no other factor than 2, no bounds."""
    assert scales_of(jls.static(8.0), [True, False]) == [8.0, 8.0]
    scaler = jls.dynamic(
        16.0, growth_factor=8.0, backoff_factor=0.25, growth_interval=1
    )
    assert scales_of(scaler, [True, False]) == [128.0, 32.0]


def test_each_member_of_a_vmap_has_its_own_scale():
    """jmp J14, F12: a control that worked."""
    scaler = jls.dynamic(4.0, growth_interval=1)
    states = jax.vmap(lambda _: scaler.init())(jnp.arange(3))
    finite = jnp.array([False, False, True])
    assert jax.vmap(scaler.adjust)(states, finite).loss_scale.tolist() == [
        2.0,
        2.0,
        8.0,
    ]
    with pytest.raises(ValueError, match=r"got shape \(3,\).*jax.vmap"):
        jls.scale(states, jnp.float32(1.0))
