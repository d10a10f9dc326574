"""What a train step reports: loss, norms, sizes and the learning rate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from models import (
    BAD,
    GOOD,
    SCALER,
    Linear,
    linear_loss,
    linear_state,
    linen_loss,
    make_batch,
    make_nnx,
    make_state,
    nnx_loss,
    norm,
)
from shared import assert_identical

import jls
from jls._train.apply import local_norms

pytestmark = pytest.mark.standard_promotion


def test_report_is_in_the_order_of_mindformers():
    assert jls.types.StepReport._fields[:7] == (
        "loss",
        "skipped",
        "loss_scale",
        "learning_rate",
        "global_norm",
        "local_norm",
        "size",
    )


def test_report_of_a_good_and_of_a_bad_step(jit_or_eager):
    # 2e37 times the scale of 64 overflows, the loss itself does not.
    step = jit_or_eager(jls.train_step(linear_loss, learning_rate=0.25))
    state, report = step(linear_state(), jnp.array([[3.0, 4.0]]))
    expected = jls.types.StepReport(
        loss=np.float32(11.0),
        skipped=np.False_,
        loss_scale=np.float32(64.0),
        learning_rate=np.float32(0.25),
        global_norm=np.float32(5.0),
        local_norm=None,
        size=None,
        dropped=np.int32(0),
        aux=None,
        skip_reason=np.int32(0),
    )
    assert_identical(report, expected)
    assert_identical(np.asarray(state.params), np.float32([-0.5, 0.0]))
    _, report = step(linear_state(), jnp.array([[2e37, 0.0]]))
    bad = expected._replace(
        loss=np.float32(2e37),
        skipped=np.True_,
        loss_scale=np.float32(32.0),
        global_norm=np.float32(np.inf),
        skip_reason=np.int32(jls.types.SkipReason.GRADIENTS),
    )
    assert_identical(report, bad)


def test_report_of_a_nonfinite_loss_says_skipped_and_keeps_the_scale():
    def loss_fn(state, batch):
        return linear_loss(state, batch) + jax.lax.stop_gradient(jnp.log(-batch[0, 0]))

    step = jax.jit(jls.train_step(loss_fn))
    state, report = step(linear_state(), jnp.array([[3.0, 4.0]]))
    assert report.skipped
    assert jnp.isnan(report.loss)
    assert report.global_norm == 5.0
    assert report.loss_scale == 64.0
    assert jls.metrics(state)["nonfinite_losses"] == 1


def test_report_shows_the_scale_of_the_next_step():
    step = jax.jit(jls.train_step(linear_loss))
    state, scales = linear_state(), []
    for factor in (1.0, 1.0, 1.0, 2e37, 1.0):
        state, report = step(state, jnp.full((1, 2), factor))
        scales.append(report.loss_scale.item())
        assert report.loss_scale == jls.loss_scale(state)
    assert scales == [64.0, 64.0, 128.0, 64.0, 64.0]


def test_sizes_that_int32_cannot_hold_are_reported_as_floats():
    largest = jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32)
    larger = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    _, sizes = jax.eval_shape(local_norms, {"a": largest, "b": larger})
    dtypes = jax.tree.map(lambda size: size.dtype.name, sizes)
    assert dtypes == {"a": "int32", "b": "float32"}


def test_local_norms_and_sizes_are_labelled_by_path():
    report = jax.jit(jls.train_step(linen_loss, carried=True, local_norm=True))(
        make_state(), make_batch()
    )[1]
    grads = jls.grad(
        lambda params: linen_loss(make_state().replace(params=params), make_batch()),
        has_aux=True,
    )(make_state(), make_state().params)[0]
    assert (
        sorted(report.local_norm)
        == sorted(report.size)
        == [
            "BatchNorm_0/bias",
            "BatchNorm_0/scale",
            "Dense_0/bias",
            "Dense_0/kernel",
            "Dense_1/bias",
            "Dense_1/kernel",
        ]
    )
    expected = {
        "/".join((layer, name)): norm(leaf)
        for layer, leaves in grads.items()
        for name, leaf in leaves.items()
    }
    chex.assert_trees_all_close(report.local_norm, expected, rtol=1e-3, atol=1e-4)
    assert report.size["Dense_0/kernel"] == 32
    squares = [local**2 for local in report.local_norm.values()]
    chex.assert_trees_all_close(report.global_norm, np.sqrt(sum(squares)), rtol=1e-5)


def test_labels_that_would_collide_are_written_out():
    params = {"a/b": jnp.full(1, 1.0), "a": {"b": jnp.full(1, 1.0)}}
    tx = jls.loss_scaled(optax.sgd(0.1), SCALER())
    state = Linear.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(state, batch):
        return jnp.sum(3 * state.params["a/b"] + 4 * state.params["a"]["b"])

    _, report = jls.train_step(loss_fn, local_norm=True)(state, GOOD)
    assert report.local_norm == {"['a/b']": 3.0, "['a']['b']": 4.0}


def test_nnx_labels_are_the_paths_in_the_model():
    model, optimizer = make_nnx()
    report = nnx.jit(jls.train_step(nnx_loss, local_norm=True))(
        model, optimizer, make_batch()
    )
    assert sorted(report.local_norm) == [
        "linear/bias",
        "linear/kernel",
        "norm/bias",
        "norm/scale",
        "out/bias",
        "out/kernel",
    ]


@pytest.mark.parametrize("tx", ["wrapper", "in a chain"])
def test_norms_do_not_overflow_on_the_way(jit_or_eager, tx):
    tx = jls.loss_scaled(optax.sgd(1e-30), jls.static(4.0))
    tx = optax.chain(tx) if tx == "in a chain" else tx
    state = linear_state(tx=tx)
    step = jit_or_eager(jls.train_step(linear_loss, local_norm=True))
    state, report = step(state, jnp.array([[3e30, 4e30]]))
    assert not report.skipped
    chex.assert_trees_all_close(report.global_norm, 5e30, rtol=1e-6)
    chex.assert_trees_all_close(report.local_norm[""], 5e30, rtol=1e-6)
    chex.assert_trees_all_close(state.params, np.float32([-2.0, -2.0]), rtol=1e-6)


def test_norm_is_that_before_clipping():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    step = jax.jit(jls.train_step(linear_loss))
    state, report = step(linear_state((0.0, 0.0), inner), jnp.array([[3.0, 4.0]]))
    assert report.global_norm == 5.0
    chex.assert_trees_all_close(state.params, np.float32([-0.6, -0.8]), rtol=1e-6)


# The learning rate.


def rates(step, state, batches):
    found = []
    for batch in batches:
        state, report = step(state, batch)
        found.append(jax.tree.map(float, report.learning_rate))
    return found


def halving(count):
    return 0.5**count


def test_learning_rate_is_none_where_none_is_found():
    assert jls.train_step(linear_loss)(linear_state(), GOOD)[1].learning_rate is None


def test_learning_rate_given_as_a_schedule_counts_applied_steps():
    step = jax.jit(jls.train_step(linear_loss, learning_rate=halving))
    state = linear_state(inner=optax.sgd(halving))
    before = state.params
    assert rates(step, state, [GOOD, BAD, GOOD, GOOD]) == [1.0, 0.5, 0.5, 0.25]
    after, _ = step(step(step(state, GOOD)[0], BAD)[0], GOOD)
    chex.assert_trees_all_close(
        before - after.params, np.float32([1.5, 1.5]), rtol=1e-6
    )


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_injected_learning_rate_is_what_the_step_used(where):
    if where == "inside":
        tx = jls.loss_scaled(optax.inject_hyperparams(optax.sgd)(halving), SCALER())
    else:
        tx = optax.inject_hyperparams(
            lambda learning_rate: jls.loss_scaled(optax.sgd(learning_rate), SCALER()),
            hyperparam_dtype=jnp.float32,
        )(halving)
    state, used = linear_state((0.0, 0.0), tx=tx), []
    step = jax.jit(jls.train_step(linear_loss))
    for _ in range(3):
        before = state.params
        state, report = step(state, GOOD)
        used.append((before - state.params)[0].item())
        assert report.learning_rate == used[-1]
    assert used == [1.0, 0.5, 0.25]


def test_learning_rates_of_several_groups_come_by_group():
    def group(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    class Two(train_state.TrainState):
        pass

    tx = jls.loss_scaled(
        optax.partition(
            {"slow": group(0.125), "fast": group(halving)},
            {"w": "slow", "b": "fast"},
        ),
        SCALER(),
    )
    state = Two.create(
        apply_fn=None, params={"w": jnp.ones(2), "b": jnp.ones(2)}, tx=tx
    )

    def loss_fn(state, batch):
        return jnp.sum(state.params["w"] * batch) + jnp.sum(state.params["b"])

    step = jax.jit(jls.train_step(loss_fn))
    expected = [{"fast": 1.0, "slow": 0.125}, {"fast": 0.5, "slow": 0.125}]
    assert rates(step, state, [GOOD[0], GOOD[0]]) == expected
    given = jls.train_step(loss_fn, learning_rate={"slow": 0.125, "fast": halving})
    assert rates(jax.jit(given), state, [GOOD[0], GOOD[0]]) == expected


def test_learning_rate_of_an_nnx_optimizer_is_found():
    model, optimizer = make_nnx(optax.inject_hyperparams(optax.sgd)(halving))
    step = nnx.jit(jls.train_step(nnx_loss))
    found = [step(model, optimizer, make_batch()).learning_rate for _ in range(3)]
    assert found == [1.0, 0.5, 0.25]


def test_learning_rate_must_be_a_scalar():
    step = jls.train_step(linear_loss, learning_rate=lambda count: jnp.ones(2))
    with pytest.raises(ValueError, match=r"learning_rate must be .* got shape \(2,\)"):
        step(linear_state(), GOOD)


def test_constant_schedule_must_be_positive():
    step = jls.train_step(linear_loss, learning_rate=optax.constant_schedule(-0.5))
    with pytest.raises(ValueError, match=r"learning_rate must be > 0 .*got -0.5"):
        step(linear_state(), GOOD)


# The updates.


def scaled_adam(where):
    wrapped = jls.loss_scaled(optax.adam(0.5), jls.dynamic(64.0))
    return optax.chain(wrapped, optax.scale(0.25)) if where == "chain" else wrapped


@pytest.mark.parametrize("where", ["outermost", "chain"])
def test_update_norm_is_what_was_added_to_the_parameters(where, jit_or_eager):
    optimizer = scaled_adam(where)
    params = {"a": jnp.array([3.0, 4.0]), "n": jnp.float32(1.0)}

    def loss_fn(params, batch):
        return jnp.sum(params["a"] ** 2) * batch + params["n"]

    step = jit_or_eager(jls.train_step(loss_fn, optimizer, update_norm=True))
    plain = jit_or_eager(jls.train_step(loss_fn, optimizer))
    opt_state = optimizer.init(params)
    for batch in (1.0, jnp.nan, jnp.inf, 2.0):
        new, new_state, report = step(params, opt_state, jnp.float32(batch))
        same, _, bare = plain(params, opt_state, jnp.float32(batch))
        assert bare.update_norm is None
        chex.assert_trees_all_close(new, same, rtol=1e-6)
        added = jax.tree.map(jnp.subtract, new, params)
        assert report.update_norm.dtype == jnp.float32
        np.testing.assert_allclose(report.update_norm, norm(added), rtol=1e-5)
        assert (report.update_norm == 0) == report.skipped
        params, opt_state = new, new_state


@pytest.mark.parametrize("where", ["outermost", "chain"])
def test_the_updates_come_back_as_they_were_applied(where, jit_or_eager):
    optimizer = scaled_adam(where)
    params = {"a": jnp.array([3.0, 4.0]), "n": None}
    opt_state = optimizer.init(params)

    @jit_or_eager
    def step(grads, value):
        return jls.apply_gradients(
            optimizer, grads, opt_state, params, value=value, return_updates=True
        )

    grads = {"a": jnp.array([1.0, -2.0]), "n": None}
    new, _, report, updates = step(grads, jnp.float32(1.0))
    chex.assert_trees_all_close(new, optax.apply_updates(params, updates))
    assert not report.skipped
    for bad, value in ((jnp.nan, 1.0), (1.0, jnp.nan)):
        grads = {"a": jnp.array([bad, -2.0]), "n": None}
        new, _, report, updates = step(grads, jnp.float32(value))
        assert report.skipped
        assert_identical(updates["a"], jnp.full(2, -0.0))
        assert_identical(new, params)


@pytest.mark.filterwarnings("ignore:.*parameters are")
def test_updates_that_are_not_stored_count_as_none():
    """The update of 1 becomes one of 1e5 outside, and float16 ends at 65504."""
    wrapped = jls.loss_scaled(optax.sgd(1.0), jls.static(1.0))
    tx = optax.chain(wrapped, optax.scale(1e5))
    params = jnp.ones(2, jnp.float16)
    *_, report, updates = jls.apply_gradients(
        tx, jnp.ones(2), tx.init(params), params, return_updates=True
    )
    assert report.skip_reason == jls.types.SkipReason.UPDATES
    assert_identical(updates, jnp.full(2, -0.0))


def test_return_updates_is_a_switch():
    optimizer = scaled_adam("outermost")
    with pytest.raises(TypeError, match="return_updates must be True or False"):
        jls.apply_gradients(optimizer, {}, None, {}, return_updates="yes")
