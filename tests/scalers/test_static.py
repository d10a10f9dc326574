import jax.numpy as jnp
import pytest

import jls


def test_adjust_returns_the_state_itself():
    scaler = jls.static(128.0)
    state = scaler.init()
    assert state == (128.0,)
    assert scaler.adjust(state, True) is state
    assert scaler.adjust(state, False) is state


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 2.0**127])
def test_scale_out_of_range_is_a_value_error(value):
    with pytest.raises(ValueError, match=r"loss_scale must be from 2\^-126 to") as e:
        jls.static(value)
    assert repr(value) in str(e.value)


@pytest.mark.parametrize("value", ["8", None, True, 8j])
def test_scale_of_another_type_is_a_type_error(value):
    with pytest.raises(TypeError, match="loss_scale must be a real number, got "):
        jls.static(value)


def test_init_copies_an_array():
    scale = jnp.float32(8.0)
    assert jls.static(scale).init().loss_scale is not scale
