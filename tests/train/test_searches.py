"""How often a traced step searches its state for the wrapper, and traces `init`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from walks import Walk

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
STATIC = jls.static(8.0)


class Searches(Walk):
    """The searches of a tree, by the function that asks for one."""

    def is_on_way(self, frame, event):
        return frame.f_code.co_name in ("find", "init")


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]).astype(jnp.float32) ** 2)


def chained(*scaler):
    return optax.chain(jls.loss_scaled(optax.adam(0.1), *scaler), optax.identity())


# An `init` searches what it has made twice. In 0.4.0 there were 18, 24 and 30
# searches, and `init` was traced not at all, 2 and 4 times.
@pytest.mark.parametrize(
    ("optimizer", "options", "searches", "inits"),
    [
        (jls.loss_scaled(optax.adam(0.1)), {}, 2, 0),
        (chained(), {}, 2, 1),
        (
            chained(STATIC),
            {
                "compute_dtype": jnp.float16,
                "micro_batches": 2,
                "drop": "micro_batch",
                "learning_rate": 0.1,
            },
            3,
            1,
        ),
    ],
    ids=["outermost", "in a chain", "everything"],
)
def test_the_state_is_searched_once_before_a_step_and_once_after(
    optimizer, options, searches, inits
):
    state = optimizer.init(PARAMS)
    step = jax.jit(jls.train_step(loss_fn, optimizer, **options))
    found = Searches(lambda: step.trace(PARAMS, state, jnp.ones((4, 2)))).calls
    assert found.count("init") == inits
    assert found.count("find") == searches + 2 * inits
