"""The step for pure functions: plain pytrees, Haiku, Equinox."""

from functools import partial

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from excess import AS_WRITTEN_OR_ON_A_GPU
from flax import serialization
from models import SCALER, cross_entropy, linear_state, make_batch, spoiled
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}


def logits_of(params, x):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    return x.astype(jnp.float16) @ half["w"] + half["b"]


def loss_fn(params, batch):
    x, labels = batch
    return cross_entropy(logits_of(params, x), labels)


def carrying(params, carried, batch, rng=None):
    """Counts its calls, and keeps the mean of what it saw."""
    x, labels = batch
    if rng is not None:
        x = x + 0.01 * jax.random.normal(rng, x.shape)
    logits = logits_of(params, x)
    carried = {"calls": carried["calls"] + 1, "mean": x.mean()}
    aux = {"accuracy": jnp.mean(jnp.argmax(logits, 1) == labels), "logits": logits}
    return cross_entropy(logits, labels), carried, aux


def first_carried():
    return {"calls": jnp.int32(0), "mean": jnp.float32(0.0)}


def make_optimizer(**kwargs):
    return jls.loss_scaled(optax.adam(0.01), SCALER(), **kwargs)


def test_plain_step_is_the_one_written_by_hand(jit_or_eager):
    optimizer = make_optimizer()

    def by_hand(params, opt_state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jit_or_eager(jls.train_step(loss_fn, optimizer))
    other = jit_or_eager(by_hand)
    ours = theirs = PARAMS, optimizer.init(PARAMS)
    for seed in range(4):
        batch = make_batch(seed=seed)
        batch = spoiled(batch, 1e30) if seed == 2 else batch
        *ours, report = step(*ours, batch)
        *theirs, loss = other(*theirs, batch)
        chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        assert_identical(jls.metrics(ours[1]), jls.metrics(theirs[1]))
        assert_identical(report.loss, loss)
    assert jls.metrics(ours[1])["skips"] == 1


def test_skipped_step_rolls_back_what_is_carried_and_reports_aux(jit_or_eager):
    optimizer = make_optimizer()
    step = jit_or_eager(jls.train_step(carrying, optimizer, carried=True, has_aux=True))
    state = PARAMS, optimizer.init(PARAMS), first_carried()
    *state, report = step(*state, make_batch(), rng=jax.random.key(0))
    assert state[2]["calls"] == 1
    assert report.aux["logits"].shape == (16, 3)
    assert report.aux["logits"].dtype == jnp.float16
    before = jax.tree.map(np.asarray, (state[0], state[1].inner_state, state[2]))
    *state, report = step(*state, spoiled(make_batch()), rng=jax.random.key(1))
    assert report.skipped
    assert report.skip_reason == jls.types.SkipReason.LOSS
    assert not np.isfinite(report.aux["logits"]).all()
    after = jax.tree.map(np.asarray, (state[0], state[1].inner_state, state[2]))
    assert_identical(after, before)
    *state, report = step(*state, make_batch(), rng=jax.random.key(1))
    assert state[2]["calls"] == 2
    assert report.skip_reason == jls.types.SkipReason.NONE


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_micro_batches_stack_aux_and_carry_one_after_the_other(drop):
    optimizer = make_optimizer()
    step = jax.jit(
        jls.train_step(
            carrying,
            optimizer,
            carried=True,
            has_aux=True,
            micro_batches=4,
            drop=drop,
        )
    )
    state = PARAMS, optimizer.init(PARAMS), first_carried()
    x, labels = make_batch()
    *_, carried, report = step(*state, (x, labels))
    assert carried["calls"] == 4
    assert report.aux["accuracy"].shape == (4,)
    # Row j is of the examples j, j + 4, ...
    expected = logits_of(PARAMS, x).reshape(4, 4, 3).swapaxes(0, 1)
    assert_identical(report.aux["logits"], expected)
    bad = x.at[5, 0].set(jnp.nan)  # in micro-batch 1
    *_, carried, report = step(*state, (bad, labels))
    assert carried["calls"] == (0 if drop == "step" else 3)
    assert report.dropped == (0 if drop == "step" else 1)
    assert np.isnan(report.aux["logits"]).any(axis=(1, 2)).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("value", [jnp.nan, 1e37])
def test_one_micro_batch_that_is_dropped_is_counted(value, jit_or_eager):
    def loss_fn(params, batch):
        return jnp.mean(batch @ params)

    optimizer = jls.loss_scaled(optax.sgd(0.1), SCALER())
    params = jnp.ones(2)
    make = partial(jls.train_step, loss_fn, optimizer, drop="micro_batch")
    for count in (1, 2):
        step = jit_or_eager(make(micro_batches=count))
        batch = jnp.full((2, 2), value)
        *_, report = step(params, optimizer.init(params), batch)
        assert report.dropped == count
        assert report.skipped
        *_, report = step(params, optimizer.init(params), jnp.ones((2, 2)))
        assert report.dropped == 0


def scanned(step):
    def run(params, opt_state, carried, batches):
        def body(state, batch):
            *state, report = step(*state, batch)
            return tuple(state), report

        return jax.lax.scan(body, (params, opt_state, carried), batches)

    return run


def test_steps_in_a_scan_over_seeds_are_the_single_ones(on_cpu):
    optimizer = make_optimizer()
    step = jls.train_step(carrying, optimizer, carried=True, has_aux=True)
    batches = [make_batch(seed=seed) for seed in range(3)]
    batches[1] = spoiled(batches[1])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)

    def start(scale):
        params = jax.tree.map(lambda x: x * scale, PARAMS)
        return params, optimizer.init(params), first_carried()

    scales = jnp.array([1.0, 0.5])
    many = jax.vmap(start)(scales)
    state, reports = jax.jit(jax.vmap(scanned(step), in_axes=(0, 0, 0, None)))(
        *many, stacked
    )
    assert reports.skipped.tolist() == [[False, True, False]] * 2
    assert reports.aux["logits"].shape == (2, 3, 16, 3)
    single = jax.jit(step)
    for i, scale in enumerate(scales):
        alone = start(scale)
        for batch in batches:
            *alone, _ = single(*alone, batch)
        member = jax.tree.map(lambda x, i=i: x[i], state)
        chex.assert_trees_all_close(member, tuple(alone), rtol=1e-5, atol=1e-6)


def test_a_donated_step_compiles_once():
    optimizer = make_optimizer()
    step = jax.jit(
        chex.assert_max_traces(jls.train_step(loss_fn, optimizer), n=1),
        donate_argnums=(0, 1),
    )
    params = jax.tree.map(jnp.copy, PARAMS)
    opt_state = optimizer.init(params)
    for seed, value in enumerate([1.0, jnp.nan, 1.0]):
        params, opt_state, _ = step(
            params, opt_state, spoiled(make_batch(seed=seed), value)
        )
    assert jls.metrics(opt_state)["skips"] == 1


# Haiku.


def test_haiku_state_is_carried():
    def forward(x, is_training):
        x = hk.Linear(8)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(3)(jax.nn.relu(x))

    network = hk.transform_with_state(forward)

    def loss_fn(params, state, batch, rng):
        x, labels = batch
        logits, state = network.apply(params, state, rng, x, is_training=True)
        return cross_entropy(logits, labels), state

    batch = make_batch()
    params, state = network.init(jax.random.key(0), batch[0], is_training=True)
    optimizer = make_optimizer()
    step = jax.jit(jls.train_step(loss_fn, optimizer, carried=True))
    opt_state = optimizer.init(params)
    losses = []
    for seed in range(6):
        bad = seed == 3
        before = jax.tree.map(np.asarray, state)
        params, opt_state, state, report = step(
            params,
            opt_state,
            state,
            spoiled(batch) if bad else batch,
            rng=jax.random.key(seed),
        )
        if bad:
            assert report.skipped
            assert_identical(jax.tree.map(np.asarray, state), before)
        else:
            losses.append(float(report.loss))
    assert losses[-1] < losses[0]


# Equinox.


def make_model():
    """An activation function, a rate that is a Python number, an integer array."""
    mlp = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    return {"mlp": mlp, "dropout": eqx.nn.Dropout(0.1), "steps": jnp.int32(7)}


def equinox_loss(model, batch, *, key):
    x, labels = batch
    x = model["dropout"](x, key=key)
    return cross_entropy(jax.vmap(model["mlp"])(x), labels)


def make_equinox():
    model, optimizer = make_model(), make_optimizer()
    return model, optimizer, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "jit",
    [
        pytest.param(lambda f: f, id="eager", marks=pytest.mark.more),
        pytest.param(eqx.filter_jit, id="jit"),
        pytest.param(partial(eqx.filter_jit, donate="all"), id="donated"),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_equinox_model_keeps_what_is_no_floating_point_array(jit, micro_batches):
    model, optimizer, opt_state = make_equinox()
    step = jit(jls.train_step(equinox_loss, optimizer, micro_batches=micro_batches))
    structure = jax.tree.structure(model)
    for value in (1.0, jnp.nan, 1.0):
        before = np.array(model["mlp"].layers[0].weight)
        batch = spoiled(make_batch(), value)
        model, opt_state, report = step(model, opt_state, batch, key=jax.random.key(3))
        assert jax.tree.structure(model) == structure
        assert model["steps"] == 7
        assert model["dropout"].p == 0.1
        assert report.skipped == np.isnan(value)
        is_same = np.array_equal(model["mlp"].layers[0].weight, before)
        assert is_same == np.isnan(value)


def test_an_equinox_state_restored_as_dicts_is_upgraded_as_the_error_says():
    model, optimizer, opt_state = make_equinox()
    step = eqx.filter_jit(jls.train_step(equinox_loss, optimizer))
    call = model, make_batch()

    def run(state):
        return step(call[0], state, call[1], key=jax.random.key(3))

    dicts = serialization.to_state_dict(opt_state)
    words = "got a state with 0 such wrappers.*jls.upgrade_state"
    with pytest.raises(ValueError, match=words):
        run(dicts)
    run(jls.upgrade_state(opt_state, dicts))


def test_equinox_state_is_carried():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")
    linear = eqx.nn.Linear(4, 3, key=jax.random.key(0))

    def loss_fn(model, state, batch):
        norm, linear = model
        x, labels = batch
        vmapped = jax.vmap(
            norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        x, state = vmapped(x, state)
        return cross_entropy(jax.vmap(linear)(x), labels), state

    model = model, linear
    optimizer = make_optimizer()
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = eqx.filter_jit(jls.train_step(loss_fn, optimizer, carried=True))
    for seed, value in enumerate([1.0, jnp.nan, 1.0]):
        before = [np.array(x) for x in jax.tree.leaves(state)]
        batch = spoiled(make_batch(seed=seed), value)
        model, opt_state, state, report = step(model, opt_state, state, batch)
        assert report.skipped == np.isnan(value)
        after = [np.array(x) for x in jax.tree.leaves(state)]
        same = all(map(np.array_equal, before, after))
        assert same == np.isnan(value)


def test_state_of_a_whole_equinox_model_is_refused():
    optimizer = make_optimizer()
    params = {"w": jnp.ones(2), "n": jnp.int32(1)}
    step = jls.train_step(lambda params, batch: params["w"].sum() * batch, optimizer)
    with pytest.raises(
        ValueError, match=r"made from the floating-point arrays .* alone"
    ):
        step(params, optimizer.init(params), jnp.float32(1.0))


# Mistakes.


@pytest.mark.parametrize(
    ("optimizer", "options", "args", "message"),
    [
        (None, {}, 3, r"For step\(params, opt_state, batch\), pass the optimizer"),
        (optax.sgd(0.1), {}, 3, "must be made by jls.loss_scaled"),
        (make_optimizer(), {}, 2, r"call step\(params, opt_state, batch\); got dict"),
        (make_optimizer(), {}, 4, r"call step\(params, opt_state, batch\)"),
        (
            make_optimizer(),
            {"carried": True},
            3,
            r"call step\(params, opt_state, carried, batch\); got",
        ),
        (make_optimizer(), {}, 0, r"call step\(params, opt_state, batch\); got no"),
    ],
)
def test_wrong_calls_are_named(optimizer, options, args, message):
    step = jls.train_step(loss_fn, optimizer, **options)
    opt_state = optimizer.init(PARAMS) if optimizer else None
    given = PARAMS, opt_state, make_batch(), make_batch()
    with pytest.raises((TypeError, ValueError), match=message):
        step(*given[:args])


def test_optimizer_is_left_out_for_flax():
    step = jls.train_step(loss_fn, make_optimizer())
    with pytest.raises(TypeError, match="leave optimizer out for Flax"):
        step(linear_state(), make_batch())


def test_what_is_no_optimizer_is_named():
    with pytest.raises(TypeError, match=r"optimizer must be made by jls\.loss_scaled"):
        jls.train_step(loss_fn, {"w": 1})


# Gradients that the user makes.


@pytest.mark.parametrize("value", [None, 1.0, jnp.nan])
def test_apply_gradients_updates_and_applies(value, jit_or_eager):
    optimizer = make_optimizer()
    opt_state = optimizer.init(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    value = None if value is None else jnp.float32(value)

    @jit_or_eager
    def by_hand(params, opt_state):
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    @jit_or_eager
    def ours(params, opt_state):
        return jls.apply_gradients(optimizer, grads, opt_state, params, value=value)

    *state, report = ours(PARAMS, opt_state)
    assert_identical(tuple(state), by_hand(PARAMS, opt_state))
    is_bad = value is not None and bool(jnp.isnan(value))
    assert report.skipped == is_bad
    assert (report.loss is None) == (value is None)
    assert report.dropped == 0
    assert report.aux is None
    np.testing.assert_allclose(report.global_norm, np.sqrt(15), rtol=1e-6)


def test_apply_gradients_takes_partial_overflow_and_a_deep_wrapper():
    tx = optax.chain(make_optimizer(), optax.scale(0.5))
    _, opt_state, report = jls.apply_gradients(
        tx, PARAMS, tx.init(PARAMS), PARAMS, partial_overflow=jnp.asarray(True)
    )
    assert not report.skipped
    assert report.loss_scale == 32.0
    assert jls.metrics(opt_state)["skips"] == 0


def test_apply_gradients_takes_a_whole_equinox_model():
    model, optimizer, opt_state = make_equinox()
    loss = partial(equinox_loss, batch=make_batch(), key=jax.random.key(0))
    grad_fn = jls.value_and_grad(loss, transform=eqx.filter_value_and_grad)
    value, grads = grad_fn(opt_state, model)
    new, _, report = jls.apply_gradients(
        optimizer, grads, opt_state, model, value=value
    )
    assert not report.skipped
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert new["steps"] == 7
    assert not np.array_equal(
        new["mlp"].layers[0].weight, model["mlp"].layers[0].weight
    )


def test_apply_gradients_takes_the_parameters_of_lookahead():
    optimizer = optax.lookahead(make_optimizer(), 2, 0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    new, _, report = jls.apply_gradients(
        optimizer, grads, optimizer.init(params), params
    )
    assert not report.skipped
    assert np.all(new.fast["w"] < 1)


def test_apply_gradients_refuses_a_bare_optimizer():
    optimizer = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"must be made by jls\.loss_scaled"):
        jls.apply_gradients(optimizer, PARAMS, optimizer.init(PARAMS), PARAMS)


@pytest.mark.filterwarnings("ignore:.*parameters are")
@pytest.mark.parametrize("check_updates", [None, False])
@pytest.mark.parametrize("compiled", AS_WRITTEN_OR_ON_A_GPU)
def test_what_is_stored_is_checked_also_around_the_wrapper(
    check_updates, compiled, jit_or_eager
):
    """The update of 1 becomes one of 1e5 outside, and float16 ends at 65504."""
    tx = optax.chain(
        jls.loss_scaled(
            optax.sgd(1.0, momentum=0.5), SCALER(), check_updates=check_updates
        ),
        optax.scale_by_schedule(lambda count: jnp.where(count == 1, 1e5, 1.0)),
    )
    params = jnp.array([1.0, -jnp.inf], jnp.float16)  # a mask stays legal
    opt_state = tx.init(params)

    @jit_or_eager
    @compiled
    def step(params, opt_state):
        return jls.apply_gradients(tx, jnp.ones(2), opt_state, params)

    first, opt_state, report = step(params, opt_state)
    assert not report.skipped
    second, after, report = step(first, opt_state)
    if check_updates is None:
        assert report.skipped
        assert report.skip_reason == jls.types.SkipReason.UPDATES
        assert_identical(second, first)
        assert_identical(after[0].inner_state, opt_state[0].inner_state)
        assert_identical(after[1], opt_state[1])
        assert jls.metrics(after)["nonfinite_updates"] == 1
        assert jls.metrics(after)["steps"] == 2
        assert after[0].nonfinite_leaves.tolist() == [True]
    else:
        assert not report.skipped
        assert jnp.isinf(second[0])
