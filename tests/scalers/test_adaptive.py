"""The state of `presets.mindformers_adaptive`; its scale is in test_presets.py."""

import jax
import jax.numpy as jnp
from jax import export

import jls


def adaptive(init_scale, shortest, longest):
    return jls.presets.mindformers_adaptive(init_scale, 2, shortest, longest, shortest)


def test_three_growths_climb_and_three_overflows_fall():
    scaler = adaptive(2.0**10, 2, 3)
    state, rungs = scaler.init(), []
    # The finite step among the overflows is no growth, and does not reset their count.
    for flag in [*[True] * 6, False, False, True, False, True, True, True]:
        state = scaler.adjust(state, flag)
        rungs.append(state.rung.item())
    assert rungs == [1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 1]


def test_overflows_at_the_shortest_interval_do_not_fall():
    scaler = adaptive(2.0**20, 2, 4)
    state = scaler.init()
    for _ in range(9):
        state = scaler.adjust(state, False)
    assert state.rung == 1
    assert state.nonfinite_count == 9 % 4


def test_setting_the_scale_restarts_the_counts_of_steps_and_keeps_the_interval():
    state = jls.types.AdaptiveState(
        jnp.float32(8.0), jnp.int32(5), jnp.int32(2), jnp.int32(1), jnp.int32(3)
    )
    assert jls.set_loss_scale(state, 64.0) == (64.0, 0, 0, 1, 3)


def test_state_goes_through_export():
    scaler = adaptive(8.0, 2, 3)
    state = scaler.init()
    exported = export.export(jax.jit(scaler.adjust))(state, jnp.asarray(True))
    again = export.deserialize(exported.serialize())
    after = again.call(state, jnp.asarray(True))
    assert after == scaler.adjust(state, True)
    assert isinstance(after, jls.types.AdaptiveState)
