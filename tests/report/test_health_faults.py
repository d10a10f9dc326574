"""Each verdict of `jls.health` on a run with exactly that fault, and on right runs."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax import contrib

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
GOOD = {"w": jnp.ones(2), "b": jnp.ones(1)}


def loss_fn(params, x):
    return jnp.mean((params["w"] @ x + params["b"]) ** 2)


def run(optimizer, all_grads, params=PARAMS, **extra):
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in all_grads:
        updates, state = update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


# Poisoned -----------------------------------------------------------------------------


@pytest.mark.parametrize("check_updates", [False, True])
def test_parameters_that_the_wrapped_optimizer_spoils_itself(check_updates):
    spoil = optax.stateless(lambda updates, _: jax.tree.map(jnp.log, updates))
    optimizer = jls.loss_scaled(spoil, check_updates=check_updates)
    params, state = run(optimizer, [{"w": jnp.array([1.0, -1.0]), "b": jnp.ones(1)}])
    health = jls.health(state, params)
    if check_updates:  # what the sentence advises
        assert health.verdict == "non-finite update"
        return
    assert health.verdict == "poisoned"
    assert "in the parameters (w). No step" in health.sentence
    advice = "check_updates=True) skips, or something else"
    assert advice in health.sentence
    assert "nnx" not in health.sentence
    # Who has it already is not told to take it.
    checks = jls.loss_scaled(spoil, check_updates=True)
    known = jls.health(state, params, optimizer=checks)
    assert known.verdict == "poisoned"
    assert "check_updates" not in known.sentence
    assert "skips what it makes of finite gradients: something else" in known.sentence
    assert advice in jls.health(state, params, optimizer=optimizer).sentence
    assert health.numbers["poisoned_leaves"] == {"params": ["w"], "opt_state": []}
    assert "besides" not in health.sentence


def test_a_moment_that_overflows_is_seen_and_named():
    grads = GOOD | {"w": jnp.array([1.0, 1e20])}
    params, state = run(jls.loss_scaled(optax.adam(0.1)), [GOOD, grads, GOOD])
    assert jls.all_finite(params)
    health = jls.health(state, params)
    assert health.verdict == "poisoned"
    assert "in the optimizer's state (0/nu/w). No step" in health.sentence
    assert "clip gradients inside jls.loss_scaled" in health.sentence
    clipped = optax.chain(optax.clip(1.0), optax.adam(0.1))
    params, state = run(jls.loss_scaled(clipped), [GOOD, grads, GOOD])
    assert jls.health(state, params).verdict == "ok"


KEEP_AN_INF = {
    "lbfgs": optax.lbfgs,
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)
    ),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(4)),
    "plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("params", [PARAMS, jnp.ones(3), {"s": jnp.ones(())}])
@pytest.mark.parametrize("name", KEEP_AN_INF)
def test_an_inf_that_an_optimizer_keeps_on_purpose_is_no_poison(name, params):
    state = jls.loss_scaled(KEEP_AN_INF[name]()).init(params)
    leaves = jax.tree.leaves(state.inner_state)
    assert any(x.ndim == 0 and x == jnp.inf for x in leaves)
    assert jls.health(state, params).verdict == "no step"
    # A NaN is kept on purpose by none.
    bad = jax.tree.map(
        lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, state.inner_state
    )
    assert jls.health(state._replace(inner_state=bad), params).verdict == "poisoned"


def linear_loss(state, x):
    loss = jnp.mean((x @ state.params["w"] + state.params["b"]) ** 2)
    return loss, {"ema": state.ema * 1e30}


class State(TrainState):
    ema: jax.Array


def test_carried_state_that_overflows_in_an_applied_step():
    state = State.create(
        apply_fn=None,
        params=PARAMS,
        tx=jls.skip_nonfinite(optax.sgd(0.1)),
        ema=jnp.full(2, 1e20),
    )
    state, report = jls.train_step(linear_loss, carries=True)(state, jnp.ones((4, 2)))
    assert not report.skipped
    assert jls.health(state.opt_state, state.params).verdict == "ok"  # not handed in
    apart = jls.health(state.opt_state, state.params, carried={"ema": state.ema})
    assert "on purpose, leave out of carried." in apart.sentence
    for health in (apart, jls.health(state), jls.health(state, state.params)):
        assert health.verdict == "poisoned"
        assert not health.safe_to_save
        assert "in the carried state (ema). No step" in health.sentence
        assert "jls.select(applied, new, old)" in health.sentence
    assert "leave out: jls.health(state.opt_state, state.params" in health.sentence
    alone = jls.health(state.opt_state, carried=state.ema)
    assert "in the carried state ((tree)). No" in alone.sentence


def test_best_loss_so_far_may_be_inf_but_not_nan():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params = jnp.ones(2)
    _, state = optimizer.update(params, optimizer.init(params), params)
    best = {"best": jnp.float32(jnp.inf)}
    assert jls.health(state, params, carried=best).verdict == "ok"
    best = {"best": jnp.float32(jnp.nan)}
    assert jls.health(state, params, carried=best).verdict == "poisoned"


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def nnx_run(jit, steps=2):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)
    step = jit(jls.train_step(nnx_loss))
    for _ in range(steps):
        step(model, optimizer, jnp.ones((4, 2)))
    return model, optimizer


def test_the_other_variables_of_an_nnx_model_count_as_carried():
    model, optimizer = nnx_run(nnx.jit)
    health = jls.health(optimizer, model)
    assert health.verdict == "ok"
    assert health.numbers["poisoned_leaves"].keys() == {
        "params",
        "opt_state",
        "carried",
    }
    model.norm.mean.set_value(model.norm.mean.get_value() * jnp.inf)
    for state, given in (
        (optimizer, {}),
        (optimizer.opt_state, {}),  # without wrt, it is nnx.Param
        (optimizer.opt_state, {"optimizer": optimizer}),
        (optimizer, {"carried": {"more": jnp.ones(2)}}),
    ):
        health = jls.health(state, model, **given)
        assert health.verdict == "poisoned"
        assert "norm/mean" in health.sentence
        assert "the parameters (" not in health.sentence
    assert jls.health(optimizer, nnx.state(model, nnx.Param)).verdict == "ok"


def test_an_nnx_model_is_filtered_by_what_its_optimizer_updates():
    class Frozen(nnx.Param):
        pass

    model = Model(nnx.Rngs(0))
    model.linear.bias = Frozen(model.linear.bias.get_value())
    wrt = nnx.All(nnx.Param, nnx.Not(Frozen))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=wrt)
    nnx.jit(jls.train_step(nnx_loss))(model, optimizer, jnp.ones((4, 2)))
    assert jls.health(optimizer, model).verdict == "ok"
    assert jls.health(optimizer.opt_state, model, optimizer=optimizer).verdict == "ok"


# A scale that cannot be ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "text"), [(jnp.inf, "inf"), (jnp.nan, "nan"), (0.0, "0"), (-8.0, "-8")]
)
@pytest.mark.parametrize("scaler", [jls.dynamic(8.0), jls.static(8.0)])
def test_a_scale_that_is_no_positive_number(scaler, scale, text):
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    state = jax.jit(jls.set_loss_scale)(optimizer.init(PARAMS), scale)
    for steps in range(3):
        if steps:
            _, grads = jls.value_and_grad(loss_fn)(state, PARAMS, jnp.ones(2))
            _, state = optimizer.update(grads, state, PARAMS)
        for given in ({}, {"optimizer": optimizer, "max_consecutive_skips": 1}):
            health = jls.health(state, PARAMS, **given)
            assert health.verdict == "bad scale"
            assert f"the loss scale is {text}, but must be finite" in health.sentence
            assert not health.safe_to_save
    state = jls.set_loss_scale(state, 8.0)  # what the sentence advises
    assert jls.health(state, PARAMS).verdict != "bad scale"


# A cause that the counters know only in part ------------------------------------------

HALF = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1, jnp.float16)}


def half_loss(params, x):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    return jnp.mean((x @ half["w"] + half["b"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("is_stale", [True, False])
def test_gradients_scaled_by_another_state_than_the_newest(is_stale):
    optimizer = jls.loss_scaled(optax.sgd(1e-6), jls.dynamic(2.0**17))
    first = state = optimizer.init(PARAMS)
    params, x = PARAMS, jnp.ones((4, 2), jnp.float16)
    for _ in range(40):
        _, grads = jls.value_and_grad(half_loss)(
            first if is_stale else state, params, x
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    health = jls.health(state, params, optimizer=optimizer, max_consecutive_skips=60)
    assert health.verdict == ("at floor" if is_stale else "ok")
    assert ("give jls.value_and_grad the newest one" in health.sentence) == is_stale
    if is_stale:
        stalled = jls.health(state, params, max_consecutive_skips=30)
        assert stalled.verdict == "stalled"
        assert "scaled by another state" in stalled.sentence


@pytest.mark.parametrize("by_jls", [True, False])
def test_a_scale_at_its_ceiling_that_was_never_used(by_jls):
    scaler = jls.dynamic(2.0**14, growth_interval=1, max_scale=2.0**20)
    optimizer = jls.loss_scaled(optax.sgd(1e-3), scaler)
    params, state, x = PARAMS, optimizer.init(PARAMS), jnp.ones((4, 2), jnp.float16)
    for _ in range(8):
        if by_jls:
            _, grads = jls.value_and_grad(half_loss)(state, params, x)
        else:
            grads = jax.grad(half_loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    health = jls.health(state, params, optimizer=optimizer)
    assert (health.verdict == "at ceiling") != by_jls
    assert health.sentence.endswith("made by jls.value_and_grad?") != by_jls


@pytest.mark.parametrize("is_told", [True, False])
def test_a_loss_that_is_nan_and_was_not_told(is_told):
    scaler = jls.dynamic(8.0, growth_interval=100)
    optimizer = jls.loss_scaled(optax.sgd(0.01), scaler)
    params, state = PARAMS, optimizer.init(PARAMS)

    def step(params, state, x):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        told = {"value": loss} if is_told else {}
        updates, state = optimizer.update(grads, state, params, **told)
        return optax.apply_updates(params, updates), state

    def words(**given):
        health = jls.health(state, params, optimizer=optimizer, **given)
        return health.verdict, "pass value=loss" in health.sentence

    good, bad = jnp.ones(2), jnp.array([1.0, jnp.nan])
    params, state = step(params, state, good)
    for _ in range(5):
        params, state = step(params, state, bad)
    if is_told:
        assert words() == ("non-finite loss", False)
        assert words(max_consecutive_skips=2) == ("stalled", False)
    else:
        assert words() == ("at floor", True)
        assert words(max_consecutive_skips=2) == ("stalled", True)
    params, state = step(params, state, good)
    assert words() == ("ok", not is_told)


def test_an_ordinary_overflow_gets_no_advice_on_the_loss():
    bad = {"w": jnp.full(2, jnp.inf), "b": jnp.full(1, jnp.inf)}
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**10))
    for all_grads in ([bad], [GOOD, bad], [GOOD, bad, GOOD]):
        params, state = run(optimizer, all_grads)
        health = jls.health(state, params, optimizer=optimizer)
        assert "value=" not in health.sentence
    # At the floor it is said, but only where all gradients were bad.
    some = GOOD | {"b": jnp.full(1, jnp.inf)}
    for each, is_said in ((bad, True), (some, False)):
        params, state = run(optimizer, [each] * 12)
        sentence = jls.health(state, params, optimizer=optimizer).sentence
        assert ("pass value=loss" in sentence) == is_said
    # Who has told of one loss tells of all.
    _, state = optimizer.update(GOOD, optimizer.init(PARAMS), PARAMS, value=jnp.nan)
    for _ in range(12):
        _, state = optimizer.update(bad, state, PARAMS, value=1.0)
    health = jls.health(state, PARAMS, optimizer=optimizer)
    assert (health.verdict, "value=" in health.sentence) == ("at floor", False)


# No step ------------------------------------------------------------------------------


def test_nnx_updates_that_jax_jit_loses():
    model, optimizer = nnx_run(jax.jit)
    for state, params in ((optimizer, None), (optimizer.opt_state, model)):
        health = jls.health(state, params)
        assert health.verdict == "no step"
        assert "updates were lost: compile the step with nnx.jit" in health.sentence
        assert health.safe_to_save
    model, optimizer = nnx_run(nnx.jit)  # what the sentence advises
    assert jls.health(optimizer, model).verdict == "ok"


def test_a_state_that_was_not_kept():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    optimizer.update(GOOD, state, PARAMS)
    health = jls.health(state, PARAMS, optimizer=optimizer)
    assert health.verdict == "no step"
    assert "this is not the state that the last one returned" in health.sentence
    assert "nnx" not in health.sentence
    # What was asked about the gradients is answered all the same.
    tiny = jax.tree.map(lambda x: x * 1e-30, GOOD)
    assert jls.health(state, grads=tiny).verdict == "underflow"


# The wrapper inside of other transformations ------------------------------------------

SCALER = jls.dynamic(8.0, min_scale=4.0, max_scale=8.0)
WRAPPED = jls.loss_scaled(optax.sgd(0.1), SCALER)
OUTER = {
    "chain": optax.chain(optax.clip(1.0), optax.chain(WRAPPED, optax.scale(1.0))),
    "inject": optax.inject_hyperparams(
        lambda rate: jls.loss_scaled(optax.sgd(rate), SCALER)
    )(rate=0.1),
    "partition": optax.partition(
        {"ours": WRAPPED, "frozen": optax.set_to_zero()}, {"w": "ours", "b": "frozen"}
    ),
}


@pytest.mark.parametrize("name", OUTER)
def test_bounds_are_found_where_the_wrapper_is_inside(name):
    params, state = run(OUTER[name], [GOOD])
    health = jls.health(state, params, optimizer=OUTER[name])
    assert (health.verdict, health.numbers["max_scale"]) == ("at ceiling", 8.0)
    with pytest.raises(TypeError, match=r"pass the parameters too: jls.health\(opt_st"):
        jls.health(state, optimizer=OUTER[name])
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=OUTER[name])
    assert jls.health(train_state).numbers["max_scale"] == 8.0
    if name != "partition":  # its labels are for other parameters
        model = Model(nnx.Rngs(0))
        ours = nnx.Optimizer(model, OUTER[name], wrt=nnx.Param)
        assert jls.health(ours, model).numbers["max_scale"] == 8.0
        assert jls.health(ours).numbers["max_scale"] is None


def test_names_are_right_where_the_wrapper_knows_a_part_of_the_parameters():
    labels = {"a": "frozen", "b": "ours", "c": "frozen", "w": "ours"}
    transforms = {"ours": WRAPPED, "frozen": optax.set_to_zero()}
    optimizer = optax.partition(transforms, labels)
    params = dict.fromkeys(labels, jnp.ones(2))
    _, state = run(optimizer, [params | {"w": jnp.array([1.0, jnp.nan])}], params)
    health = jls.health(state, params, optimizer=optimizer)
    assert health.numbers["nonfinite_leaves"] == ["w"]
    train_state = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    train_state = train_state.replace(opt_state=state)
    assert jls.health(train_state, params).numbers["nonfinite_leaves"] == ["w"]
    # The state alone does not know which part it is.
    health = jls.health(state, params)
    assert health.verdict == "calibrating"
    assert health.numbers["nonfinite_leaves"] is None
    assert "Not finite: 1 of the 2 parameters that the" in health.sentence
    assert "optimizer= gives their names" in health.sentence
    with pytest.raises(ValueError, match=r"got 4 floating-point .* knows 2\. .*masked"):
        jls.nonfinite_leaves(state, params)
    with pytest.raises(ValueError, match=r"got 1 floating-point .* 2\. Pass all of"):
        jls.health(state, {"w": jnp.ones(2)})


LABELS = {"w": "w", "b": "b"}


def test_of_two_wrappers_the_one_that_made_the_state_is_to_be_passed():
    transforms = {"w": WRAPPED, "b": jls.loss_scaled(optax.sgd(0.1))}
    optimizer = optax.partition(transforms, LABELS)
    _, state = run(optimizer, [GOOD])
    part = state.inner_states["w"]
    with pytest.raises(ValueError, match=r"may have made state, got 2. Pass the one"):
        jls.health(part, PARAMS, optimizer=optimizer)
    both = optax.partition({"w": WRAPPED, "b": WRAPPED}, dict(a="b", **LABELS))
    params = PARAMS | {"a": jnp.ones(2)}
    state = both.init(params).inner_states["b"]
    numbers = jls.health(state, params, optimizer=both).numbers
    assert numbers["max_scale"] == 8.0
    flags = jnp.array([False, True])
    state = jax.tree.map(
        lambda x: flags if x.shape == (2,) and x.dtype == bool else x, state
    )
    assert jls.health(state, params, optimizer=both).numbers["nonfinite_leaves"] == [
        "b"
    ]
    assert jls.health(part, optimizer=transforms["w"]).verdict == "at ceiling"


def test_multi_steps_around_the_wrapper_is_refused():
    inside = jls.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2))
    params, state = run(inside, [GOOD])
    assert jls.health(state, params, optimizer=inside).verdict == "ok"
    outside = optax.MultiSteps(jls.loss_scaled(optax.sgd(0.1)), 2)
    params, state = run(outside, [GOOD])
    for nested in (state, (state, 3)):
        with pytest.raises(ValueError, match=r"MultiSteps must be inside jls.loss_s"):
            jls.health(nested, params)
