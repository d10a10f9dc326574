"""Each verdict of `jls.health` on a run with exactly that fault, and on right runs."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    if check_updates:  # what the page advises
        assert health.verdict == "non-finite update"
        return
    assert health.verdict == "poisoned"
    assert "in the parameters (w). No step" in health.sentence
    assert health.numbers["poisoned_leaves"] == {"params": ["w"], "opt_state": []}


def test_a_moment_that_overflows_is_seen_and_named():
    grads = GOOD | {"w": jnp.array([1.0, 1e20])}
    params, state = run(jls.loss_scaled(optax.adam(0.1)), [GOOD, grads, GOOD])
    assert jls.all_finite(params)
    health = jls.health(state, params)
    assert health.verdict == "poisoned"
    assert "in the optimizer's state (0/nu/w). No step" in health.sentence
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


@pytest.mark.cover(1)
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
    state, report = jls.train_step(linear_loss, carried=True)(state, jnp.ones((4, 2)))
    assert not report.skipped
    assert jls.health(state.opt_state, state.params).verdict == "ok"  # not handed in
    apart = jls.health(state.opt_state, state.params, carried={"ema": state.ema})
    for health in (apart, jls.health(state), jls.health(state, state.params)):
        assert health.verdict == "poisoned"
        assert not health.safe_to_save
        assert "in the carried state (ema). No step" in health.sentence
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
    state = jls.set_loss_scale(state, 8.0)  # what the page advises
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
    if is_stale:
        stalled = jls.health(state, params, max_consecutive_skips=30)
        assert stalled.verdict == "stalled"


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
    assert ("No step was ever skipped" in health.sentence) != by_jls


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

    def verdict(**given):
        health = jls.health(state, params, optimizer=optimizer, **given)
        return health.verdict

    good, bad = jnp.ones(2), jnp.array([1.0, jnp.nan])
    params, state = step(params, state, good)
    for _ in range(5):
        params, state = step(params, state, bad)
    if is_told:
        assert verdict() == "non-finite loss"
    else:
        assert verdict() == "at floor"
    assert verdict(max_consecutive_skips=2) == "stalled"
    params, state = step(params, state, good)
    assert verdict() == "ok"


# No step ------------------------------------------------------------------------------


def test_nnx_updates_that_jax_jit_loses():
    model, optimizer = nnx_run(lambda step: jax.jit(lambda *args: step(*args)))
    for state, params in ((optimizer, None), (optimizer.opt_state, model)):
        health = jls.health(state, params)
        assert health.verdict == "no step"
        assert health.safe_to_save
    model, optimizer = nnx_run(nnx.jit)  # what the page advises
    assert jls.health(optimizer, model).verdict == "ok"


def test_a_state_that_was_not_kept():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    optimizer.update(GOOD, state, PARAMS)
    health = jls.health(state, PARAMS, optimizer=optimizer)
    assert health.verdict == "no step"
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


def test_what_undoes_a_skip_is_refused_around_the_wrapper():
    inside = jls.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2))
    params, state = run(inside, [GOOD])
    assert jls.health(state, params, optimizer=inside).verdict == "ok"
    outside = optax.MultiSteps(jls.loss_scaled(optax.sgd(0.1)), 2)
    params, state = run(outside, [GOOD])
    for nested in (state, (state, 3)):
        with pytest.raises(ValueError, match=r"MultiSteps must be inside jls.loss_s"):
            jls.health(nested, params)
    around = optax.apply_if_finite(jls.loss_scaled(optax.sgd(0.1)), 5)
    with pytest.raises(ValueError, match=r"apply_if_finite must not be around jls\.lo"):
        jls.health(around.init(params))


# A Flax TrainState, all of it ---------------------------------------------------------


def bad_batch_loss(state, batch):
    loss = jnp.mean((batch @ state.params["w"] + state.params["b"]) ** 2)
    return loss, {"ema": 0.9 * state.ema + 0.1 * batch[0]}


def make_train_state(optimizer=None, **fields):
    optimizer = optimizer or jls.loss_scaled(optax.adam(1e-3))
    fields = {"params": PARAMS, "ema": jnp.ones(2)} | fields
    return State.create(apply_fn=None, tx=optimizer, **fields)


def test_batch_statistics_that_a_skipped_step_kept():
    """What `apply_gradients` and a `replace` without `jls.select` do."""
    state = make_train_state()

    @jax.jit
    def step(state, batch):
        grad_fn = jls.value_and_grad(
            lambda params: bad_batch_loss(state.replace(params=params), batch),
            has_aux=True,
        )
        (_, new), grads = grad_fn(state.opt_state, state.params)
        return state.apply_gradients(grads=grads).replace(ema=new["ema"])

    for value in (1.0, jnp.nan, 1.0):
        state = step(state, jnp.full((4, 2), value))
    assert jls.all_finite(state.params)
    health = jls.health(state)
    assert health.verdict == "poisoned"
    assert health.numbers["poisoned_leaves"] == {
        "params": [],
        "opt_state": [],
        "carried": ["ema"],
    }
    right = jax.jit(jls.train_step(bad_batch_loss, carried=True))
    state = make_train_state()
    for value in (1.0, jnp.nan, 1.0):
        state, _ = right(state, jnp.full((4, 2), value))
    assert jls.health(state).verdict == "ok"
    assert "not looked at" not in jls.health(state).sentence


def test_parameters_of_a_train_state_are_looked_at():
    nans = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    health = jls.health(make_train_state(params=nans))
    assert health.verdict == "poisoned"
    assert "in the parameters (b, w)" in health.sentence
    # What `carried=` gives is looked at beside the fields.
    state, more = make_train_state(), {"more": jnp.array([1.0, jnp.nan])}
    assert jls.health(state).verdict == "no step"
    assert "(more)" in jls.health(state, carried=more).sentence
    both = make_train_state(ema=jnp.array([1.0, jnp.nan]))
    assert jls.health(both, carried=more).numbers["poisoned_leaves"]["carried"] == [
        "more",
        "ema",
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OwnState:
    """Of the user's own, with names of their own."""

    weights: dict
    optimizer_state: Any
    stats: jax.Array
    tx: Any = dataclasses.field(metadata={"static": True})
    smallest: float = dataclasses.field(default=-jnp.inf, metadata={"static": True})


@pytest.mark.parametrize("bad", [None, "weights", "stats"])
def test_a_train_state_with_other_names_is_looked_at_too(bad):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params, opt_state = run(optimizer, [GOOD])
    state = OwnState(params, opt_state, jnp.ones(2), optimizer)
    if bad:
        spoilt = jax.tree.map(lambda x: x * jnp.nan, getattr(state, bad))
        state = dataclasses.replace(state, **{bad: spoilt})
    health = jls.health(state)
    assert health.verdict == ("poisoned" if bad else "ok")
    assert "not looked at" not in health.sentence


def test_an_ok_says_whether_the_parameters_were_looked_at():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params, state = run(optimizer, [GOOD])
    for given in ({}, {"optimizer": optimizer}, {"carried": jnp.ones(2)}):
        health = jls.health(state, **given)
        assert health.sentence.endswith("is 2^15; the parameters were not looked at.")
        assert "params" not in health.numbers["poisoned_leaves"]
        assert health.numbers["poisoned"] is (False if "carried" in given else None)
    assert "looked" not in jls.health(state, params).sentence
    model, optimizer = nnx_run(nnx.jit)
    assert "not looked at" in jls.health(optimizer).sentence
    assert "not looked at" not in jls.health(optimizer, model).sentence


def test_fp8_collections_are_carried_and_not_the_optimizers():
    params = {"params": PARAMS, "_overwrite_with_gradient": {"scale": jnp.ones(2)}}
    state = make_train_state().replace(params=params)
    for health in (jls.health(state), jls.health(state, state.params)):
        assert health.numbers["nonfinite_leaves"] == []
        assert health.verdict == "no step"
    params = params | {"_overwrite_with_gradient": {"scale": jnp.full(2, jnp.nan)}}
    health = jls.health(state.replace(params=params))
    assert "_overwrite_with_gradient/scale" in health.sentence


# Masks --------------------------------------------------------------------------------

MASK = jnp.where(jnp.arange(16).reshape(4, 4) % 4 < 1, 0.0, -jnp.inf)


def masked_loss(params, x):
    logits = jnp.outer(x, params["w"]) + jax.lax.stop_gradient(params["mask"])
    return jnp.mean(jax.nn.softmax(logits)[:, 0] * params["w"].sum())


def masked_run(inner, batches, scaler=None, **options):
    optimizer = jls.loss_scaled(inner, scaler or jls.dynamic(8.0), **options)
    params = {"w": jnp.ones(4), "mask": MASK}
    step = jax.jit(jls.train_step(masked_loss, optimizer))
    state = optimizer.init(params)
    for x in batches:
        params, state, _ = step(params, state, jnp.full(4, x))
    return params, state, optimizer


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.1),
        optax.chain(optax.adam(0.1), jls.params_ema(0.9)),
        optax.sgd(0.1, 0.9),
    ],
    ids=["adam", "average", "momentum"],
)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_mask_is_a_note_and_no_poison(inner, steps):
    params, state, optimizer = masked_run(inner, [1.0] * steps, check_updates=True)
    assert params["mask"].tolist() == MASK.tolist()
    health = jls.health(state, params, optimizer=optimizer, raise_if=["poisoned"])
    assert health.verdict == ("ok" if steps else "no step")
    assert health.numbers["masks"] == {"mask": 12}
    assert "mask holds -inf in 12 elements, taken for a mask." in health.sentence
    # As carried too, and in a TrainState.
    carried = jls.health(state, params, carried={"causal": MASK})
    assert carried.numbers["masks"] == {"mask": 12, "causal": 12}
    assert "mask, causal hold -inf in 24 elements, taken for masks" in carried.sentence
    whole = make_train_state(optimizer, params=params, ema=MASK)
    whole = whole.replace(opt_state=state)
    assert jls.health(whole).numbers["masks"] == {"mask": 12, "ema": 12}


def test_a_mask_in_a_step_that_is_skipped_now_and_then_is_none_the_less_one():
    params, state, _ = masked_run(optax.adam(0.1), [1.0, jnp.nan])
    health = jls.health(state, params)
    assert health.verdict == "non-finite loss"
    assert "taken for a mask: if not on purpose, no step can cure" in health.sentence
    # A loss scale that comes down from far above.
    params, state, _ = masked_run(optax.adam(0.1), [jnp.nan] * 24)
    assert jls.health(state, params).verdict != "poisoned"
    params, state, _ = masked_run(optax.adam(0.1), [1.0] + [jnp.nan] * 26)
    health = jls.health(state, params)
    assert health.verdict == "poisoned"
    assert "-inf is in the parameters (mask), and the last 26 steps" in health.sentence
    assert "Unless it is a mask, no step can cure that" in health.sentence


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"mask": MASK.at[0, 0].set(jnp.inf)}, "params"),
        ({"mask": MASK.at[0, 0].set(jnp.nan)}, "params"),
        ({"mask": jnp.full((4, 4), -jnp.inf)}, "params"),
        ({"w": jnp.full(4, -jnp.inf)}, "params"),
    ],
)
def test_what_is_no_mask_is_poison(changed, where):
    params, state, _ = masked_run(optax.adam(0.1), [1.0] * 2)
    health = jls.health(state, params | changed)
    assert health.verdict == "poisoned"
    assert health.numbers["poisoned_leaves"][where] == list(changed)
    carried = jls.health(state, params, carried=changed)
    assert carried.numbers["poisoned_leaves"]["carried"] == list(changed)


def test_minus_inf_with_moments_that_are_not_finite_is_poison():
    params, state, _ = masked_run(optax.adam(0.1), [1.0] * 2)
    moments = state.inner_state[0]
    for bad in (jnp.inf, jnp.nan, -jnp.inf):
        nu = moments.nu | {"w": moments.nu["w"].at[0].set(bad)}
        inner = (moments._replace(nu=nu), *state.inner_state[1:])
        health = jls.health(state._replace(inner_state=inner), params)
        assert health.verdict == "poisoned"
        assert health.numbers["poisoned_leaves"]["opt_state"] == ["0/nu/w"]
        # -inf in a moment of another leaf says nothing of the mask.
        is_mask = "mask" in health.numbers["masks"]
        assert is_mask == (bad == -jnp.inf)
    # Where the parameter is no mask, an average of it is none.
    health = jls.health(state, params | {"mask": jnp.ones((4, 4))}, carried=MASK)
    assert health.numbers["masks"] == {"": 12}
    assert "(tree) holds -inf in 12 elements" in health.sentence


# What is skipped, and what is left out ------------------------------------------------


def counted(made_by, kinds, **given):
    """The health after steps: . good, g bad gradients, l a bad loss, p in part."""
    update, state = jax.jit(made_by.update), made_by.init(PARAMS)
    for kind in kinds:
        size = jnp.float32(jnp.nan if kind == "g" else 1.0)
        grads = jax.tree.map(lambda x, size=size: x * size, GOOD)
        loss = jnp.float32(jnp.nan if kind == "l" else 1.0)
        is_partial = jnp.asarray(kind == "p")
        _, state = update(grads, state, PARAMS, value=loss, partial_overflow=is_partial)
    return jls.health(state, PARAMS, **given)


DYNAMIC = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**24))
PATIENT = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**24, backoff_interval=2))
STATIC = jls.loss_scaled(optax.sgd(0.1), jls.static(1024.0))
HASTY = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**15, growth_interval=2))


@pytest.mark.parametrize(
    ("optimizer", "kinds", "words"),
    [
        (DYNAMIC, "lll." * 30, "90 for their loss; the loss scale is"),
        (DYNAMIC, "gg." * 20, "40 for their gradients; the loss scale is"),
        (STATIC, "g." * 30, "30 for their gradients; the loss scale is 1024"),
        (
            HASTY,
            "..g" * 30,
            "30 for their gradients; .* few steps once its scale is found",
        ),
        (DYNAMIC, "gl.." * 15, "15 for their gradients, 15 for their loss; "),
    ],
)
def test_a_quarter_skipped_is_called_skipping(optimizer, kinds, words):
    for ending in (".", "l", ""):  # whatever the last step was
        health = counted(optimizer, kinds + ending, optimizer=optimizer)
        assert health.verdict == "skipping"
    assert re.search(words, health.sentence), health.sentence


@pytest.mark.parametrize("skips", [10, 24])
@pytest.mark.parametrize("knows", [True, False])
def test_a_start_far_too_high_is_not_called_skipping(skips, knows):
    given = {"optimizer": DYNAMIC} if knows else {}
    assert counted(DYNAMIC, "g" * skips, **given).verdict == (
        "at floor" if skips == 24 and knows else "calibrating"
    )
    for good in (1, 5, 60):
        health = counted(DYNAMIC, "g" * skips + "." * good, **given)
        assert health.verdict == "ok"
    health = counted(DYNAMIC, "g" * skips + "..g", **given)
    assert health.verdict in ("recovering", "at floor")


def test_a_scaler_that_waits_may_skip_as_often_as_it_waits():
    kinds = "g" * 40 + "." * 20
    assert counted(PATIENT, kinds, optimizer=PATIENT).verdict == "ok"
    assert counted(PATIENT, kinds + "g" * 11 + ".", optimizer=PATIENT).verdict == (
        "skipping"
    )


SCALERS = {
    "dynamic": jls.dynamic(),
    "eager": jls.dynamic(2.0**24, growth_interval=25),
    "hysteresis": jls.hysteresis(),
    "deepspeed": jls.presets.deepspeed(),
    "megatron": jls.presets.megatron(),
    "mindformers": jls.presets.mindformers_adaptive(2.0**24, 2.0, 1000),
    "mindformers, shortest": jls.presets.mindformers_adaptive(2.0**15, 2.0, 20),
    "paddle": jls.presets.paddle(),
    "keras": jls.presets.keras(),
}


@pytest.mark.parametrize("name", SCALERS)
def test_no_scaler_skips_so_much_of_a_run_with_a_limit(name):
    """Gradients overflow above a scale that wanders, as in a real run."""
    scaler = SCALERS[name]
    state = scaler.init()
    limit = 2.0 ** (12 + np.cumsum(np.random.default_rng(0).normal(0, 0.05, 600)))

    def body(carry, limit):
        state, skips = carry
        largest = 1.0 / limit  # of the true gradients; overflows where scaled above 1
        finite = state.loss_scale * largest <= 1.0
        skips = skips + ~finite
        return (scaler.adjust(state, finite), skips), skips

    start = (state, jnp.int32(0))
    _, skips = jax.lax.scan(body, start, jnp.asarray(limit, jnp.float32))
    steps = np.arange(1, 601)
    assert not np.any((np.asarray(skips) > 25) & (4 * np.asarray(skips) >= steps))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_part_of_the_gradients_left_out_in_every_step_is_called_dropping(by_hand):
    if by_hand:
        health = counted(DYNAMIC, "p" * 30, optimizer=DYNAMIC)
    else:

        def loss_fn(params, x):
            return -jnp.mean(jnp.sqrt(params["w"][0] * (2.0 - x)))  # at 2 a NaN

        step = jls.train_step(loss_fn, DYNAMIC, micro_batches=2, drop="micro_batch")
        step, params, state = jax.jit(step), PARAMS, DYNAMIC.init(PARAMS)
        for _ in range(30):
            params, state, report = step(params, state, jnp.array([1.0, 2.0]))
            assert (int(report.dropped), bool(report.skipped)) == (1, False)
        health = jls.health(state, params, optimizer=DYNAMIC)
    assert health.verdict == "dropping"
    assert health.numbers["partial_overflows"] == 30
    assert "30 of 30 steps were applied without a part" in health.sentence
    assert "loss scale is 1, its floor. What to do" in health.sentence
    assert health.safe_to_save


def test_parts_left_out_now_and_then_are_counted_in_an_ok():
    for kinds in ("p" * 24 + "....", "." * 200 + "p" * 30):
        health = counted(DYNAMIC, kinds)
        assert health.verdict == "ok"
        count = kinds.count("p")
        assert f"In {count} of them a part of the gradients was" in health.sentence
    assert "a part of" not in counted(DYNAMIC, "....").sentence


# What nobody has seen is not said, and no advice is given twice -----------------------


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_no_overflow_is_claimed_of_gradients_that_are_nan(bad):
    for scaler in (jls.dynamic(8.0), jls.static(8.0)):
        optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
        params, state = run(optimizer, [GOOD, GOOD | {"b": jnp.full(1, bad)}])
        health = jls.health(state, params)
        assert health.verdict == "recovering"
        assert health.sentence.startswith("the gradients of the last step were inf or")
        assert "overflow" not in health.sentence
        unknown = state._replace(last_skip_reason=jnp.int32(0))
        sentence = jls.health(unknown, params).sentence
        assert sentence.startswith("the last step was skipped, 1 in a row")


def test_a_scale_above_its_maximum_is_called_so():
    optimizer = jls.loss_scaled(
        optax.sgd(0.1), jls.dynamic(8.0, growth_interval=2, max_scale=2.0**16)
    )
    params, state = run(optimizer, [GOOD])
    above = jls.set_loss_scale(state, 2.0**20)
    health = jls.health(above, params, optimizer=optimizer)
    assert health.verdict == "at ceiling"
    assert "2^20 is above its maximum of 2^16: it was set by hand" in health.sentence
    assert "no further" not in health.sentence
    for _ in range(2):  # as the sentence has it
        _, above = optimizer.update(GOOD, above, params)
    assert jls.loss_scale(above) == 2.0**16
    at = jls.health(above, params, optimizer=optimizer)
    assert "2^16 can grow no further" in at.sentence


# States that are of several, or gone --------------------------------------------------


ON_HOST = functools.partial(jls.metrics, host=True)


@pytest.mark.parametrize("read", [jls.health, jls.metrics, ON_HOST])
def test_one_member_of_a_vmapped_state_is_read_as_the_error_says(read):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    state = jax.vmap(optimizer.init)(params)
    state = state._replace(steps=jnp.arange(2))  # they differ
    whole = TrainState(0, None, params, optimizer, state)
    for several in (state, (state, 3), whole):
        with pytest.raises(ValueError, match=r"jax\.vmap") as caught:
            read(several)
        (line,) = re.findall(
            r"jax\.tree\.map\(lambda a: a\[0\], state\)", str(caught.value)
        )
        assert "whole train step" not in str(caught.value)
    one = eval(line, {"jax": jax, "state": state})
    assert read(one) is not None
    assert jax.vmap(jls.metrics)(state)["skips"].tolist() == [0, 0]


@pytest.mark.parametrize("read", [jls.health, jls.metrics, ON_HOST, jls.loss_scale])
def test_a_donated_state_is_named(read):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update, donate_argnums=1)
    _, new = step(GOOD, state, PARAMS)
    with pytest.raises(ValueError, match=r"donated to an earlier step\. Pass"):
        read(state)
    read(new)
    jax.jit(read if read is jls.metrics else jls.loss_scale)(new)


def test_donated_parameters_are_named_in_health():
    params, state = run(jls.loss_scaled(optax.sgd(0.1)), [GOOD])
    jax.tree.map(lambda x: x.delete(), params)
    for given in ({"params": params}, {"grads": params}, {"carried": params}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} must be in memory"):
            jls.health(state, **given)
    assert jls.health(state).verdict == "ok"


@pytest.mark.parametrize("around", ["masked", "multi_transform"])
def test_a_wrapper_inside_of_what_freezes_a_part_can_be_read(around):
    if around == "masked":
        optimizer = optax.masked(
            jls.loss_scaled(optax.sgd(0.1)), {"w": True, "b": False}
        )
    else:
        parts = {"w": jls.loss_scaled(optax.sgd(0.1)), "b": optax.set_to_zero()}
        optimizer = optax.multi_transform(parts, {"w": "w", "b": "b"})
    bad = GOOD | {"w": jnp.array([1.0, jnp.inf])}
    params, state = run(optimizer, [GOOD, bad])
    params = params | {"b": jnp.ones(1)}
    health = jls.health(state, params)
    assert health.verdict == "recovering"
    assert "Not finite: 1 of the 1 parameters that the optimizer's" in health.sentence
    named = jls.health(state, params, optimizer=optimizer)
    assert "Not finite: w." in named.sentence
    # What needs no names is said all the same.
    nans = params | {"b": jnp.full(1, jnp.nan)}
    assert "in the parameters (b)" in jls.health(state, nans).sentence


@pytest.mark.parametrize("number", [-7, jnp.nan, jnp.inf, -jnp.inf, 2**31 - 1])
def test_no_number_in_a_state_is_too_much_for_health(number):
    optimizer = jls.skip_nonfinite(optax.sgd(0.1), spikes=jls.spikes(window=4))
    params, state = run(optimizer, [GOOD] * 3, value=1.0)

    def spoilt(leaf):
        fits = jnp.issubdtype(leaf.dtype, jnp.floating)
        fits |= leaf.dtype == jnp.int32 and abs(number) < 2**31
        return jnp.full_like(leaf, number) if fits else leaf

    leaves, structure = jax.tree.flatten(state)
    for i, leaf in enumerate(leaves):
        one = structure.unflatten([*leaves[:i], spoilt(leaf), *leaves[i + 1 :]])
        assert jls.health(one, params, optimizer=optimizer).sentence
    whole = jax.tree.map(spoilt, state)
    assert jls.health(whole, params, optimizer=optimizer).sentence


def test_an_optimizer_that_reads_a_mask_is_told_of_it():
    params = {"mask": jnp.array([0.0, -jnp.inf]), "w": jnp.ones(2)}
    grads = {"mask": jnp.zeros(2), "w": jnp.ones(2)}
    for inner, verdict in (
        (optax.adamw(0.1), "non-finite update"),
        (optax.adam(0.1), "ok"),
        (optax.adamw(0.1, mask={"mask": False, "w": True}), "ok"),
    ):
        optimizer = jls.loss_scaled(inner, check_updates=True)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        health = jls.health(state, params, optimizer=optimizer)
        assert health.verdict == verdict
        assert "mask holds -inf in 1 element" in health.sentence


def test_a_rate_that_was_set_to_nan_is_to_be_set_again():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = jls.loss_scaled(inner, check_updates=True)
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    state = optax.tree.set(state, learning_rate=jnp.float32(jnp.nan))
    _, state = optimizer.update(params, state, params)
    health = jls.health(state, params)
    assert health.verdict == "poisoned"
    assert "optimizer's state (hyperparams/learning_rate)" in health.sentence
    assert "checkpoint" not in health.sentence
    state = optax.tree.set(state, learning_rate=jnp.float32(0.1))
    _, state = optimizer.update(params, state, params)
    assert jls.health(state, params).verdict == "ok"


def test_each_rate_that_was_set_to_nan_is_named():
    inner = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.1)
    params = {"w": jnp.ones(2)}
    state = jls.loss_scaled(inner).init(params)
    for name in ("learning_rate", "weight_decay"):
        state = optax.tree.set(state, **{name: jnp.float32(jnp.nan)})
    sentence = jls.health(state, params).sentence
    assert "(hyperparams/learning_rate, hyperparams/weight_decay)" in sentence


def test_a_mask_around_the_wrapper_is_named_where_it_did_harm():
    guarded = jls.loss_scaled(optax.sgd(0.1))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for inner, verdict in (
        (optax.masked(guarded, {"a": True, "b": False}), "poisoned"),
        (jls.loss_scaled(optax.sgd(0.1)), "calibrating"),
    ):
        grads = {"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}
        updates, state = inner.update(grads, inner.init(params), params)
        health = jls.health(state, optax.apply_updates(params, updates))
        assert health.verdict == verdict


def test_an_optimizer_with_another_scaler_is_named_without_structures():
    state = jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    scaler = jls.presets.mindformers_adaptive(8.0, 2, 20)
    other = jls.loss_scaled(optax.sgd(0.1), scaler)
    message = "makes an AdaptiveState and state carries a ScalerState. Pass the optimi"
    with pytest.raises(ValueError, match=message):
        jls.health(state, PARAMS, optimizer=other)
