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
    "after MultiSteps": SKIP(
        optax.chain(
            optax.MultiSteps(STORED, 2).gradient_transformation(), optax.scale(0.5)
        )
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


# Parts of bfloat16 parameters without it.


def init_warnings(optimizer, params=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.init(make_params() if params is None else params)
    return [str(x.message) for x in caught]


def parted(of_w, of_v):
    parts = {"w": of_w, "v": of_v, "b": RIGHT}
    return SKIP(optax.multi_transform(parts, {"w": "w", "v": "v", "b": "b"}))


def test_each_part_that_is_bfloat16_needs_it():
    (message,) = init_warnings(parted(STORED, RIGHT))
    assert "1 of 3 parameters are bfloat16, 'v'" in message
    assert "Another part has jls.bfloat16_params" in message
    (message,) = init_warnings(
        SKIP(optax.masked(STORED, {"w": True, "v": False, "b": False}))
    )
    assert "'v'" in message
    assert not init_warnings(parted(STORED, STORED))


def test_frozen_part_does_not():
    """Such as the base of LoRA; of any half precision."""
    zero = optax.set_to_zero()
    assert not init_warnings(parted(STORED, zero))
    assert not init_warnings(parted(STORED, optax.chain(RIGHT, zero)))
    wide = make_params() | {"w": jnp.zeros((4, 8))}
    assert not init_warnings(parted(RIGHT, zero), wide)
    half = wide | {"v": jnp.zeros(8, jnp.float16)}
    assert not init_warnings(parted(RIGHT, zero), half)
    assert len(init_warnings(parted(RIGHT, RIGHT), half)) == 1


def check(optimizer, run=lambda step: step):
    params = make_params()
    with warnings.catch_warnings(action="ignore"):
        step = jax.jit(run(jls.train_step(loss_fn, optimizer)))
        return jls.check_step(step, params, optimizer.init(params), X)


@pytest.mark.parametrize("name", ["scaled", "scaled outside of the guard"])
def test_check_step_breaks_a_step_that_rounds_updates_away(name):
    found = check(WRONG[name])
    assert found.broken == ("no step",)
    assert "params/v, params/w" in found.seen["no step"]


def test_check_step_breaks_one_that_is_written_by_hand():
    optimizer, params = SKIP(jls.bfloat16_params(ADAM)), make_params()

    @jax.jit
    def step(params, state, x):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        updates = jax.tree.map(lambda u: -1e-5 * u, updates)
        return optax.apply_updates(params, updates), state

    found = jls.check_step(step, params, optimizer.init(params), X)
    assert found.broken == ("no step",)


@pytest.mark.parametrize(
    "name", ["alone", "an average", "in MultiSteps", "in a partition", "held positive"]
)
def test_check_step_breaks_no_right_step(name):
    found = check(GOOD[name])
    assert found.ok
    assert not [x for x in found.notes if "lost" in x]


def test_check_step_breaks_no_step_of_several():
    def repeated(step):
        def run(params, state, x):
            def body(carry, _):
                params, state, report = step(*carry, x)
                return (params, state), report.loss

            return jax.lax.scan(body, (params, state), None, length=3)[0]

        return run

    assert check(GOOD["alone"], repeated).ok


def test_check_step_notes_the_part_that_has_none():
    slow = optax.adam(1e-5, b2=0.9)
    (note,) = [x for x in check(parted(STORED, slow)).notes if "lost" in x]
    assert "(params/v)" in note
    assert not [x for x in check(parted(STORED, STORED)).notes if "lost" in x]


# In a run ----------------------------------------------------------------------------


def healths(optimizer, steps=30, change=lambda updates: updates):
    """Verdicts of a run that is written by hand, at its end and on the way."""
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(64, 64)) / 8, BF16),
        "v": jnp.asarray(rng.normal(size=64) / 8, BF16),
        "b": jnp.zeros(64),
    }
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, change(updates)), state

    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jls.JlsWarning)
        for i in range(steps):
            x = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)
            # Now and then a step is skipped.
            params, state = step(params, state, x * (np.inf if i % 7 == 3 else 1))
            found.add(jls.health(state, params).verdict)
    return found


# After these some of it arrives.
HALF_WRONG = ("weight decay", "after MultiSteps")


@pytest.mark.parametrize("name", [x for x in WRONG if x not in HALF_WRONG])
def test_health_says_that_nothing_arrives(name):
    assert "rounded away" in healths(WRONG[name])


def test_health_says_it_of_what_is_done_by_hand():
    def scaled(updates):
        return jax.tree.map(lambda u: -1e-5 * u, updates)

    assert "rounded away" in healths(SKIP(jls.bfloat16_params(ADAM)), change=scaled)


ARRIVES = {name: GOOD[name] for name in GOOD if name != "masked by 0"} | {
    "frozen after it": SKIP(
        optax.chain(
            STORED,
            optax.masked(optax.set_to_zero(), {"w": True, "v": False, "b": False}),
        )
    ),
    "exact": SKIP(jls.bfloat16_params(RIGHT, rounding="exact")),
    "too small to move much": SKIP(jls.bfloat16_params(optax.adam(1e-6))),
}


@pytest.mark.parametrize("name", ARRIVES)
def test_health_says_nothing_of_what_arrives(name):
    assert "rounded away" not in healths(ARRIVES[name])


def test_health_says_nothing_where_a_part_is_held():
    def held(updates):
        return updates | {"w": updates["w"].at[0].multiply(0.37)}

    assert "rounded away" not in healths(SKIP(STORED), change=held)


def test_health_says_nothing_of_slow_parameters():
    """At each second step a `lookahead` goes elsewhere with all of them."""
    optimizer = optax.lookahead(SKIP(STORED), 2, 0.5)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones((64, 64), BF16)})
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda p: jnp.sin(p.astype(jnp.float32)), params.fast)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(40):
        params, state = step(params, state)
        assert jls.health(state).verdict == "ok"
