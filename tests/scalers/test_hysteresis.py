import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from shared import assert_follows, assert_follows_eagerly

import jls

HYPERPARAMETERS = {
    "init_scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "hysteresis": 2,
    "refill": "growth",
    "min_scale": 2.0,
    "max_scale": 32.0,
}


def assert_follows_reference(state=None, **changes):
    hyperparameters = HYPERPARAMETERS | changes
    assert_follows(jls.hysteresis, reference.hysteresis, hyperparameters, state)


@pytest.mark.cover(2)
@pytest.mark.parametrize("refill", ["growth", "finite"])
@pytest.mark.parametrize("growth_interval", [1, 2, 3])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_all_sequences_follow_the_reference(growth_interval, hysteresis, refill):
    assert_follows_reference(
        growth_interval=growth_interval, hysteresis=hysteresis, refill=refill
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
    state = jls.set_loss_scale(jls.hysteresis().init(), start)
    assert_follows_reference(state)


@pytest.mark.parametrize("refill", ["growth", "finite"])
def test_eager_steps_follow_the_reference(refill):
    hyperparameters = HYPERPARAMETERS | {"refill": refill}
    flags = [False, True, False, False, True, True, False, False]
    assert_follows_eagerly(jls.hysteresis, reference.hysteresis, hyperparameters, flags)


def test_every_overflow_backs_off_once_the_budget_is_spent():
    scaler = jls.hysteresis(2.0**10, hysteresis=3, growth_interval=2)
    state, scales = scaler.init(), []
    for flag in [False, False, False, False, True, False, True, True, False]:
        state = scaler.adjust(state, flag)
        scales.append(state.loss_scale.item())
    assert scales == [1024, 1024, 512, 256, 256, 128, 128, 256, 256]


def test_a_growth_at_the_cap_refills_too():
    scaler = jls.hysteresis(8.0, growth_interval=1, max_scale=8.0)
    state = scaler.adjust(scaler.adjust(scaler.init(), False), True)
    assert state == (8.0, 0, 0)


def test_intervals_lowered_below_the_counts_act_on_the_next_step():
    state = jls.types.ScalerState(jnp.float32(8.0), jnp.int32(5), jnp.int32(5))
    scaler = jls.hysteresis(8.0, growth_interval=2, hysteresis=2)
    assert scaler.adjust(state, True) == (16.0, 0, 0)
    assert scaler.adjust(state, False) == (4.0, 0, 6)


def test_counts_at_the_int32_maximum_do_not_wrap():
    largest = jnp.int32(2**31 - 1)
    state = jls.types.ScalerState(jnp.float32(8.0), largest, largest)
    scaler = jls.hysteresis(8.0, growth_interval=2**31 - 1, hysteresis=2**31 - 1)
    assert scaler.adjust(state, True) == (16.0, 0, 0)
    assert scaler.adjust(state, False) == (4.0, 0, largest)


def test_leaves_are_numbers_and_the_kind_of_refill_is_static():
    growth, finite = (jls.hysteresis(refill=refill) for refill in ("growth", "finite"))
    assert all(type(leaf) in (int, float) for leaf in jax.tree.leaves(growth))
    assert jax.tree.structure(growth) != jax.tree.structure(finite)
    chex.assert_trees_all_equal_structs(growth, jls.hysteresis(16.0))


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval must be from 1 to"),
        ({"hysteresis": 0}, "hysteresis must be from 1 to"),
        ({"refill": "never"}, "refill must be one of 'growth', 'finite', got 'never'"),
        ({"init_scale": 0.0}, "init_scale must be from 2"),
        ({"min_scale": 1e-40}, "min_scale must be from 2"),
        ({"max_scale": 2.0**127}, "max_scale must be from 2"),
        ({"max_scale": 2.0}, r"init_scale must be <= max_scale, got 32768.0 > 2.0"),
    ],
)
def test_hyperparameter_out_of_range_is_a_value_error(kwargs, rule):
    with pytest.raises(ValueError, match=rule) as error:
        jls.hysteresis(**kwargs)
    assert repr(next(iter(kwargs.values()))) in str(error.value)


@pytest.mark.parametrize("name", HYPERPARAMETERS)
@pytest.mark.parametrize("value", [b"2", None, True, 2j, ["growth"]])
def test_hyperparameter_of_another_type_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=f"{name} must be (an?|one of) "):
        jls.hysteresis(**{name: value})
