"""What is made of bfloat16 parameters has to reach them as it is."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls

pytestmark = pytest.mark.standard_promotion

BF16 = jnp.bfloat16
ADAM = optax.scale_by_adam()
RIGHT = optax.adam(1e-3)
STORED = jls.bfloat16_params(RIGHT)
SKIP = jls.skip_nonfinite
CHANGED = "is changed before it is applied"


def make_params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 8)), BF16),
        "v": jnp.asarray(rng.normal(size=8), BF16),
        "b": jnp.zeros(8),
    }


def loss_fn(params, x):
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean(jnp.square((x @ wide["w"] + wide["b"]) @ wide["v"] - 1))


X = jnp.ones((8, 4))


def warnings_of(optimizer):
    params = make_params()
    state = optimizer.init(params)
    step = jls.train_step(loss_fn, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(step, params, state, X)
    return {str(x.message) for x in caught}


WRONG = {
    "scaled": SKIP(optax.chain(jls.bfloat16_params(ADAM), optax.scale(-1e-5))),
    "scaled outside of the guard": optax.chain(
        SKIP(jls.bfloat16_params(ADAM)), optax.scale(-1e-5)
    ),
    "a schedule": SKIP(
        optax.chain(
            jls.bfloat16_params(ADAM),
            optax.scale_by_learning_rate(optax.constant_schedule(1e-5)),
        )
    ),
    "weight decay": SKIP(optax.chain(STORED, optax.add_decayed_weights(-1e-4))),
    "in MultiSteps": SKIP(
        optax.MultiSteps(optax.chain(jls.bfloat16_params(ADAM), optax.scale(-1e-5)), 2)
    ),
    "injected": SKIP(
        optax.inject_hyperparams(
            lambda rate: optax.chain(jls.bfloat16_params(ADAM), optax.scale(rate))
        )(rate=-1e-5)
    ),
    "of one part": SKIP(
        optax.chain(
            optax.masked(jls.bfloat16_params(ADAM), {"w": True, "v": False, "b": True}),
            optax.masked(STORED, {"w": False, "v": True, "b": False}),
            optax.masked(optax.scale(-1e-5), {"w": True, "v": False, "b": False}),
        )
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_changes_the_updates_is_warned_of(name):
    (message,) = warnings_of(WRONG[name])
    assert CHANGED in message
    assert "at 'w'" in message or "at 'v'" in message


PARTS = {"w": "x", "v": "x", "b": "y"}
GOOD = {
    "alone": SKIP(STORED),
    "an average": SKIP(optax.chain(STORED, jls.params_ema(0.9))),
    "clipped before": SKIP(optax.chain(optax.clip_by_global_norm(1.0), STORED)),
    "in MultiSteps": SKIP(optax.MultiSteps(STORED, 2)),
    "around MultiSteps": SKIP(
        jls.bfloat16_params(optax.MultiSteps(RIGHT, 2).gradient_transformation())
    ),
    "in a partition": SKIP(optax.multi_transform({"x": STORED, "y": RIGHT}, PARTS)),
    "the others scaled": SKIP(
        optax.chain(
            STORED,
            optax.masked(optax.scale(0.5), {"w": False, "v": False, "b": True}),
        )
    ),
    "injected": SKIP(
        optax.inject_hyperparams(lambda rate: jls.bfloat16_params(optax.adam(rate)))(
            rate=1e-3
        )
    ),
    "a chain around": optax.chain(SKIP(STORED), optax.identity()),
    "held positive": SKIP(optax.chain(STORED, optax.keep_params_nonnegative())),
    "masked by 0": SKIP(
        optax.chain(
            STORED,
            optax.stateless(
                lambda u, _: u | {"w": u["w"] * np.eye(4, 8, dtype=np.float32)}
            ),
        )
    ),
    "a guard that looks at updates": SKIP(STORED, check_updates=True),
    "conditionally": SKIP(
        optax.transforms.conditionally_transform(
            STORED, lambda step, *_: step > 2, forward_extra_args=False
        )
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_leaves_them_is_not(name):
    assert not {x for x in warnings_of(GOOD[name]) if CHANGED in x}
