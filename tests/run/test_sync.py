import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jls


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"opt": (state,)}])
def test_a_state_of_one_device_is_in_sync(wrap):
    state = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0)).init(jnp.ones(2))
    jls.check_in_sync(wrap(state))
    jls.check_in_sync(wrap(state.scaler_state))
    jls.check_in_sync(wrap(jax.tree.map(np.asarray, state)))  # as Flax restores it
    nan = state.scaler_state._replace(loss_scale=jnp.float32(jnp.nan))
    jls.check_in_sync(wrap(nan))
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    jls.check_in_sync(
        nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    )


def test_what_cannot_be_checked_is_refused():
    state = jls.dynamic(8.0).init()
    with pytest.raises(ValueError, match="must carry a loss scale, got dict"):
        jls.check_in_sync({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"must be concrete, got .* at '\w+'"):
        jax.jit(jls.check_in_sync)(state)
