"""Gradient accumulation: within a step, and across steps with `optax.MultiSteps`."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from models import (
    linear_loss,
    linear_state,
    linen_loss,
    make_batch,
    make_nnx,
    make_state,
    nnx_contents,
    nnx_loss,
)
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

K = 3
# The loss of the first is finite, its scaled gradient not.
OVERFLOWS, NAN = 1e37, np.nan


def batch_of(factors):
    """A batch whose i-th micro-batch of two examples has the gradient factors[i]."""
    rows = np.array([[f, 2 * f] for f in factors], np.float32)
    return jnp.asarray(np.concatenate([rows, rows]))


def reference(factors, accumulation, drop):
    """(gradient, loss finite, overflow, dropped) of the window, in plain Python."""
    bad = [f for f in factors if f in (OVERFLOWS,) or np.isnan(f)]
    loss_finite = not any(np.isnan(f) for f in factors)
    if drop == "step":
        kept = [] if bad else factors
        overflow, dropped = False, 0
    else:
        kept = [f for f in factors if f not in bad and not np.isnan(f)]
        overflow, dropped = OVERFLOWS in factors, len(bad)
        loss_finite = any(not np.isnan(f) for f in factors)
    if not kept:
        return None, loss_finite, overflow, dropped
    total = sum(kept)
    gradient = total / len(kept) if accumulation == "mean" else total
    return gradient, loss_finite, overflow, dropped


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
@pytest.mark.parametrize("accumulation", ["mean", "sum"])
def test_all_windows_follow_the_reference(accumulation, drop):
    step = jax.jit(
        jls.train_step(
            linear_loss, micro_batches=K, accumulation=accumulation, drop=drop
        )
    )
    start = linear_state((0.0, 0.0), optax.sgd(1.0))
    for factors in itertools.product([1.0, 4.0, OVERFLOWS, NAN], repeat=K):
        gradient, loss_finite, overflow, dropped = reference(
            factors, accumulation, drop
        )
        state, report = step(start, batch_of(factors))
        assert report.dropped == dropped
        assert report.skipped == (gradient is None)
        assert np.isfinite(report.loss) == loss_finite
        assert jls.metrics(state)["nonfinite_losses"] == (not loss_finite)
        backs_off = overflow or (gradient is None and loss_finite)
        assert report.loss_scale == (32.0 if backs_off and loss_finite else 64.0)
        if gradient is None:
            assert_identical(state.params, start.params)
        else:
            expected = -np.float32([gradient, 2 * gradient])
            chex.assert_trees_all_close(state.params, expected, rtol=1e-6)


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_mean_over_micro_batches_is_that_of_the_batch(jit_or_eager, drop):
    batch = jax.random.normal(jax.random.key(0), (12, 2))
    start = linear_state(inner=optax.adam(0.1))
    whole, one = jit_or_eager(jls.train_step(linear_loss))(start, batch)
    split, four = jit_or_eager(jls.train_step(linear_loss, micro_batches=4, drop=drop))(
        start, batch
    )
    chex.assert_trees_all_close(split.params, whole.params, rtol=1e-6)
    chex.assert_trees_all_close(
        [four.loss, four.global_norm], [one.loss, one.global_norm], rtol=1e-5
    )


def test_an_error_says_which_axes_were_split_if_they_differ():
    def loss_fn(params, batch):
        return jnp.sum(params * (batch["x"] - batch["y"]))

    def note_of(y):
        step = jls.train_step(loss_fn, jls.loss_scaled(optax.sgd(0.1)), micro_batches=2)
        params = jnp.ones(3)
        opt_state = jls.loss_scaled(optax.sgd(0.1)).init(params)
        with pytest.raises((TypeError, ValueError)) as caught:
            step(params, opt_state, {"x": jnp.ones((8, 3)), "y": y})
        return "".join(getattr(caught.value, "__notes__", []))

    assert "8 (batch/x), 6 (batch/y). Put the examples" in note_of(jnp.ones((6, 3)))
    assert "micro_batches" not in note_of(jnp.ones((8, 2)))


def test_sum_over_micro_batches_is_k_times_the_mean():
    batch = jax.random.normal(jax.random.key(0), (12, 2))
    reports = {
        accumulation: jax.jit(
            jls.train_step(linear_loss, micro_batches=K, accumulation=accumulation)
        )(linear_state(), batch)[1]
        for accumulation in ("mean", "sum")
    }
    for name in ("loss", "global_norm"):
        mean, total = (getattr(reports[key], name) for key in ("mean", "sum"))
        chex.assert_trees_all_close(total, K * mean, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_gradients_are_added_in_float32(dtype):
    def loss_fn(state, batch):
        product = state.params.astype(jnp.bfloat16) * batch.astype(jnp.bfloat16)
        return jnp.mean(jnp.sum(product, axis=1, dtype=jnp.float32))

    factors = jnp.array([[256.0, 0.0], [1.0, 0.0]])  # 256 + 1 is 256 in bfloat16
    step = jax.jit(jls.train_step(loss_fn, micro_batches=2, accumulation="sum"))
    tx = jls.loss_scaled(optax.sgd(1.0), jls.static(2.0))
    state = linear_state(tx=tx).replace(params=jnp.ones(2, dtype))
    _, report = step(state, factors)
    assert report.global_norm == 257.0


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_batch_statistics_and_keys_go_through_the_micro_batches_in_turn(drop):
    def one_by_one(state, batch):
        x, labels = batch
        for i in range(2):
            _, fields = linen_loss(state, (x[i::2], labels[i::2]))
            state = state.replace(**fields)
        return state.batch_stats, jax.random.key_data(state.key)

    step = jls.train_step(linen_loss, carried=True, micro_batches=2, drop=drop)
    batch = make_batch()
    state, _ = jax.jit(step)(make_state(), batch)
    carried = state.batch_stats, jax.random.key_data(state.key)
    chex.assert_trees_all_close(
        carried, one_by_one(make_state(), batch), rtol=1e-3, atol=1e-4
    )


def test_dropped_micro_batch_takes_its_statistics_with_it():
    x, labels = make_batch()
    step = jax.jit(
        jls.train_step(linen_loss, carried=True, micro_batches=2, drop="micro_batch")
    )
    state, report = step(make_state(), (x.at[1, 0].set(jnp.nan), labels))
    assert (report.skipped, report.dropped) == (False, 1)
    _, fields = linen_loss(make_state(), (x[::2], labels[::2]))
    chex.assert_trees_all_close(
        state.batch_stats, fields["batch_stats"], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_micro_batch_with_finite_gradients_and_a_nan_loss_is_bad_too(drop):
    def loss_fn(state, batch):
        return linear_loss(state, batch) + jax.lax.stop_gradient(jnp.log(batch[0, 0]))

    step = jax.jit(jls.train_step(loss_fn, micro_batches=2, drop=drop))
    start = linear_state((0.0, 0.0), optax.sgd(1.0))
    state, report = step(start, jnp.array([[-1.0, 1.0], [2.0, 3.0]]))
    assert report.loss_scale == 64.0
    assert report.dropped == (drop == "micro_batch")
    expected = [-2.0, -3.0] if drop == "micro_batch" else [0.0, 0.0]
    assert state.params.tolist() == expected


@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_nnx_accumulates_and_rolls_everything_back(drop):
    model, optimizer = make_nnx()
    step = nnx.jit(jls.train_step(nnx_loss, micro_batches=2, drop=drop))
    step(model, optimizer, make_batch())
    before = nnx_contents(model, optimizer)
    assert before[0]["dropout"]["rngs"]["count"] == 2
    x, labels = make_batch()
    report = step(model, optimizer, (x * jnp.nan, labels))
    assert report.skipped
    assert_identical(nnx_contents(model, optimizer), before)
    report = step(model, optimizer, (x.at[0, 0].set(jnp.inf), labels))
    assert report.skipped == (drop == "step")
    assert report.dropped == (drop == "micro_batch")


def bits(key):
    return jax.random.bits(key, (3,))


def random_loss(params, batch, *, rng, step=0):
    del step
    return jnp.mean(batch * params), jax.tree.map(bits, rng)


def plain_masks(micro_batches, **kwargs):
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    options = {"has_aux": True, "micro_batches": micro_batches}
    step = jax.jit(jls.train_step(random_loss, optimizer, **options))
    params = jnp.ones(2)
    return step(params, optimizer.init(params), jnp.ones((4, 2)), **kwargs)[-1].aux


def linen_masks(micro_batches, **kwargs):
    def loss_fn(state, batch, **kwargs):
        return random_loss(state.params, batch, **kwargs)

    step = jls.train_step(loss_fn, has_aux=True, micro_batches=micro_batches)
    return jax.jit(step)(linear_state(), jnp.ones((4, 2)), **kwargs)[-1].aux


def nnx_masks(micro_batches, **kwargs):
    def loss_fn(model, batch, **kwargs):
        return random_loss(model.kernel[...].sum(), batch, **kwargs)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    step = jls.train_step(loss_fn, has_aux=True, micro_batches=micro_batches)
    return nnx.jit(step)(model, optimizer, jnp.ones((4, 2)), **kwargs).aux


@pytest.mark.parametrize("masks", [plain_masks, linen_masks, nnx_masks])
def test_each_micro_batch_gets_keys_of_its_own(masks):
    key = jax.random.key(3)
    got = masks(2, rng=key, step=7)
    assert_identical(list(got), [bits(jax.random.fold_in(key, n)) for n in (0, 1)])
    assert_identical(masks(1, rng=key), bits(key))


def test_the_number_goes_into_each_of_an_array_of_keys():
    keys = jax.random.split(jax.random.key(4))

    def loss_fn(params, batch, rngs):
        return jnp.mean(batch * params), jax.random.key_data(rngs)

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(loss_fn, optimizer, has_aux=True, micro_batches=2)
    params, batch = jnp.ones(2), jnp.ones((4, 2))
    *_, report = step(params, optimizer.init(params), batch, rngs=keys)
    for number, folded in enumerate(report.aux):
        expected = [jax.random.fold_in(key, number) for key in keys]
        assert_identical(list(folded), list(map(jax.random.key_data, expected)))


def test_keys_in_the_batch_are_split_as_they_are():
    def loss_fn(params, batch):
        return jnp.mean(params), jax.random.key_data(batch)

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(loss_fn, optimizer, has_aux=True, micro_batches=2)
    params, keys = jnp.ones(2), jax.random.split(jax.random.key(4), 4)
    *_, report = jax.jit(step)(params, optimizer.init(params), keys)
    assert_identical(report.aux[1], jax.random.key_data(keys[1::2]))


def test_what_is_no_pytree_reaches_the_loss_as_it_is():
    def loss_fn(params, batch, config, table):
        assert config == {"a": 1, 2: 3}  # its keys have no order
        return jnp.mean(batch * params) * table.sum()

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(loss_fn, optimizer, micro_batches=2)
    params, table = jnp.ones(2), np.ones((3, 2), np.uint32)
    kwargs = {"config": {"a": 1, 2: 3}, "table": table}
    *_, report = step(params, optimizer.init(params), jnp.ones((4, 2)), **kwargs)
    assert report.loss == 6.0


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"rng": jax.random.PRNGKey(0)}, "rng is a raw PRNG key, uint32[2]"),
        ({"rngs": {"dropout": np.zeros((3, 4), np.uint32)}}, "rngs/dropout is a raw"),
        ({"dropout_key": np.zeros(2, np.uint32)}, "dropout_key is a raw PRNG key"),
    ],
)
def test_a_raw_key_is_told(kwargs, name):
    def loss_fn(params, batch, **kwargs):
        del kwargs
        return jnp.mean(batch * params)

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    params, batch = jnp.ones(2), jnp.ones((4, 2))
    state = optimizer.init(params)
    jax.jit(jls.train_step(loss_fn, optimizer))(params, state, batch, **kwargs)
    step = jax.jit(jls.train_step(loss_fn, optimizer, micro_batches=2))
    step(params, state, batch, tokens=np.zeros(2, np.uint32), key=np.zeros(2, int))
    step(params, state, batch, key=np.zeros(3, np.uint32))
    step(params, state, batch, monkey=np.zeros(2, np.uint32))
    with pytest.warns(jls.JlsWarning, match=re.escape(name)) as record:
        step(params, state, batch, **kwargs)
    assert len(record) == 1
    assert record[0].filename == __file__


class KeyedState(TrainState):
    dropout_key: jax.Array
    tables: dict


def keyed_loss(state, batch):
    key = jax.random.fold_in(state.dropout_key, state.step)
    return jnp.mean(batch * state.params * jax.random.normal(key, (2,)))


def keyed_step(loss_fn, key, **options):
    tx = jls.loss_scaled(optax.sgd(0.1))
    tables = {"hash": jnp.zeros(2, jnp.uint32), "seed": jax.random.key(0)}
    state = KeyedState.create(
        apply_fn=None, params=jnp.ones(2), tx=tx, dropout_key=key, tables=tables
    )
    return jax.jit(jls.train_step(loss_fn, **options))(state, jnp.ones((4, 2)))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_state_that_all_micro_batches_share_is_told(make):
    message = r"the same PRNG key, state.dropout_key, .* a new dropout_key, with carr"
    with pytest.warns(jls.JlsWarning, match=message) as record:
        keyed_step(keyed_loss, make(0), micro_batches=2)
    assert len(record) == 1


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_in_the_state_that_do_no_harm_are_not_told(make):
    def renewing(state, batch):
        loss = keyed_loss(state, batch)
        return loss, {"dropout_key": jax.random.split(state.dropout_key)[0]}

    def without_key(state, batch):
        return jnp.mean(batch * state.params) * (1 + state.tables["hash"].sum())

    keyed_step(keyed_loss, make(0))
    keyed_step(renewing, make(0), micro_batches=2, carried=True)
    keyed_step(without_key, make(0), micro_batches=2)


def test_one_trace_of_the_loss_serves_all_micro_batches_and_steps():
    loss_fn = chex.assert_max_traces(linear_loss, n=1)
    step = jax.jit(jls.train_step(loss_fn, micro_batches=K), donate_argnums=0)
    state = linear_state()
    for factors in ([1, 1, 1], [1, OVERFLOWS, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]):
        state, _ = step(state, batch_of(factors))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (jnp.ones((4, 2)), r"got 3 for batch of shape \(4, 2\)"),
        (
            {"x": jnp.ones((3, 2)), "y": jnp.float32(1)},
            r"got 3 for batch/y of shape \(\)",
        ),
        ((), "batch must hold an array"),
    ],
)
def test_batch_that_does_not_split_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        jls.train_step(linear_loss, micro_batches=K)(linear_state(), batch)


# Across calls.


def multi_steps(k=2):
    return optax.MultiSteps(optax.sgd(1.0), k).gradient_transformation()


@pytest.mark.parametrize("scales", [(64.0, 64.0), (64.0, 2.0**10), (2.0**10, 8.0)])
def test_scale_that_changes_within_a_window_harms_nothing(scales):
    tx = jls.loss_scaled(multi_steps(), jls.static(2.0))
    step = jax.jit(jls.train_step(linear_loss))
    state = linear_state((0.0, 0.0), tx=tx)
    for scale, factor in zip(scales, (1.0, 3.0), strict=True):
        state = jls.set_loss_scale(state, scale)
        state, _ = step(state, jnp.array([[factor, 2 * factor]]))
    assert state.params.tolist() == [-2.0, -4.0]


def test_multi_steps_inside_drops_the_bad_micro_batch_and_hears_of_it():
    step = jax.jit(jls.train_step(linear_loss, learning_rate=lambda count: count + 1.0))
    tx = jls.loss_scaled(multi_steps(), jls.dynamic(64.0))
    state, seen = linear_state((0.0, 0.0), tx=tx), []
    for factor in (1.0, OVERFLOWS, 3.0, 1.0, 1.0):
        state, report = step(state, jnp.array([[factor, 0.0]]))
        seen.append((state.params[0].item(), report.learning_rate.item()))
    # The window takes one more; the schedule counts windows.
    assert seen == [(0.0, 1.0), (0.0, 1.0), (-2.0, 1.0), (-2.0, 2.0), (-3.0, 2.0)]
    assert jls.loss_scale(state) == 32.0
    assert np.isfinite(
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(contents_of(state))])
    ).all()


def contents_of(state):
    return state.params, state.opt_state.inner_state.acc_grads


def test_multi_steps_outside_keeps_a_nan_for_ever_unless_it_skips():
    def run(**options):
        tx = optax.MultiSteps(
            jls.loss_scaled(optax.sgd(1.0), jls.dynamic(64.0)), 2, **options
        )
        params = jnp.zeros(1)
        state = tx.init(params)
        for grad in (jnp.inf, 1.0, 1.0, 1.0, 1.0, 1.0):
            updates, state = tx.update(jnp.array([grad]), state, params)
            params = optax.apply_updates(params, updates)
        return params[0], jls.metrics(state)

    params, metrics = run()
    assert (params, metrics["skips"]) == (0.0, 3)  # visible, and without an end
    params, metrics = run(should_skip_update_fn=optax.skip_not_finite)
    assert (params, metrics["loss_scale"]) == (
        -2.0,
        64.0,
    )  # the scale never hears of it
