from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

SCALER = partial(jls.dynamic, 64.0, growth_interval=3)


class Network(nn.Module):
    """Float16 compute, with batch statistics and a random number in each call."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(x)
        x = nn.Dropout(0.25, deterministic=False)(nn.relu(x))
        return nn.Dense(3, dtype=jnp.float16)(x)


class TrainState(train_state.TrainState):
    batch_stats: dict
    key: jax.Array


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def linen_loss(state, batch):
    x, labels = batch
    key, dropout = jax.random.split(state.key)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits, new = state.apply_fn(
        variables, x, mutable=["batch_stats"], rngs={"dropout": dropout}
    )
    fields = {"batch_stats": new["batch_stats"], "key": key}
    return cross_entropy(logits, labels), fields


def make_batch(size=16, seed=0):
    x = jax.random.normal(jax.random.key(seed), (size, 4))
    return x, jnp.argmax(x[:, :3], axis=1)


def make_state(inner=None, tx=None):
    model = Network()
    keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = model.init(keys, make_batch()[0])
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        key=jax.random.key(3, impl="rbg"),
        tx=tx or jls.loss_scaled(inner or optax.adamw(0.01), SCALER()),
    )


class Linear(train_state.TrainState):
    """The simplest state there is; its loss is `sum(params * batch)`."""


def linear_state(params=(1.0, 2.0), inner=None, tx=None):
    tx = tx or jls.loss_scaled(inner or optax.sgd(0.5), SCALER())
    return Linear.create(
        apply_fn=lambda params, x: jnp.sum(params * x),
        params=jnp.asarray(params, jnp.float32),
        tx=tx,
    )


def linear_loss(state, batch):
    """Mean over the examples of the batch."""
    return jnp.mean(jax.vmap(partial(state.apply_fn, state.params))(batch))


class Module(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.out = nnx.Linear(8, 3, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.linear(x)))))


def nnx_loss(model, batch):
    x, labels = batch
    return cross_entropy(model(x), labels)


def make_nnx(inner=None, wrt=nnx.Param):
    model = Module(nnx.Rngs(0))
    tx = jls.loss_scaled(inner or optax.adamw(0.01), SCALER())
    return model, nnx.Optimizer(model, tx, wrt=wrt)


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)))


def keyless(tree):
    return jax.tree.map(
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        ),
        tree,
    )


def contents(state):
    """All that a skipped step has to leave alone."""
    fields = state.params, state.batch_stats, state.key, state.opt_state.inner_state
    return jax.tree.map(np.asarray, keyless(fields))


def nnx_contents(model, optimizer):
    state = nnx.to_pure_dict(nnx.state(model))
    inner = nnx.to_pure_dict(nnx.state(optimizer.opt_state.inner_state))
    return jax.tree.map(np.array, keyless((state, inner)))


def spoiled(batch, value=jnp.nan):
    return batch[0].at[0, 0].set(value), batch[1]


def moved(tree, other):
    return [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    ]


# What the step does, for Linen and for NNX.


def test_linen_step_is_the_one_written_by_hand(jit_or_eager):
    def by_hand(state, batch):
        def loss_fn(params):
            return linen_loss(state.replace(params=params), batch)

        grad_fn = jls.value_and_grad(loss_fn, has_aux=True)
        (loss, fields), grads = grad_fn(state, state.params)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, value=loss
        )
        params = optax.apply_updates(state.params, updates)
        fields = jls.select(
            opt_state.applied, fields, {name: getattr(state, name) for name in fields}
        )
        new = state.replace(params=params, opt_state=opt_state, **fields)
        return new, (loss, norm(grads))

    ours, theirs = make_state(), make_state()
    step = jit_or_eager(jls.train_step(linen_loss, has_aux=True))
    other = jit_or_eager(by_hand)
    for seed in range(4):
        batch = make_batch(seed=seed)
        batch = spoiled(batch, 1e30) if seed == 2 else batch
        ours, report = step(ours, batch)
        theirs, (loss, grad_norm) = other(theirs, batch)
        chex.assert_trees_all_close(
            contents(ours), contents(theirs), rtol=1e-5, atol=1e-6
        )
        chex.assert_trees_all_close(
            [report.loss, report.global_norm],
            [loss, grad_norm],
            rtol=1e-5,
            equal_nan=True,
        )
        assert_identical(jls.metrics(ours), jls.metrics(theirs))
    assert ours.step == 4
    assert jls.metrics(ours)["skips"] == 1


def test_linen_skipped_step_leaves_all_but_the_count_of_calls():
    step = jax.jit(jls.train_step(linen_loss, has_aux=True))
    state, _ = step(make_state(), make_batch())
    for value in (jnp.nan, jnp.inf, 1e30):
        before, calls = contents(state), state.step
        state, report = step(state, spoiled(make_batch(), value))
        assert report.overflow
        assert_identical(contents(state), before)
        assert state.step == calls + 1
    state, report = step(state, make_batch())
    assert not report.overflow
    assert all(moved(contents(state)[:3], before[:3]))


def test_skipped_step_keeps_params_that_an_addition_would_change(jit_or_eager):
    # XLA flushes subnormal numbers when it adds, and -0.0 + 0.0 is 0.0.
    state = linear_state([-0.0, 1e-40])
    step = jit_or_eager(jls.train_step(linear_loss))
    state, report = step(state, jnp.array([[jnp.inf, 1.0]]))
    assert report.overflow
    assert_identical(np.asarray(state.params), np.float32([-0.0, 1e-40]))


@pytest.mark.parametrize(
    "jit",
    [lambda f: f, nnx.jit, partial(nnx.jit, donate_argnums=(0, 1))],
    ids=["eager", "jit", "donated"],
)
def test_nnx_step_changes_model_and_optimizer_or_leaves_them(jit):
    model, optimizer = make_nnx()
    step = jit(jls.train_step(nnx_loss))
    for seed, value in enumerate([None, jnp.nan, None, jnp.inf, 1e30, None]):
        batch = make_batch(seed=seed)
        before = nnx_contents(model, optimizer)
        report = step(
            model, optimizer, batch if value is None else spoiled(batch, value)
        )
        after = nnx_contents(model, optimizer)
        assert report.overflow == (value is not None)
        if value is None:
            kernel = before[0]["linear"]["kernel"], after[0]["linear"]["kernel"]
            assert all(moved(*kernel))
            count = after[0]["dropout"]["rngs"]["count"]
            assert count == before[0]["dropout"]["rngs"]["count"] + 1
            assert moved(before[0]["norm"]["mean"], after[0]["norm"]["mean"])
        else:
            assert_identical(after, before)
    assert optimizer.step.get_value() == 6
    metrics = jls.metrics(optimizer)
    assert (metrics["steps"], metrics["skips"]) == (6, 3)


def test_nnx_step_is_the_one_written_by_hand():
    @nnx.jit
    def by_hand(model, optimizer, batch):
        grad_fn = jls.value_and_grad(nnx_loss, transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer, model, batch)
        optimizer.update(model, grads, value=loss)
        return loss

    ours, theirs = make_nnx(), make_nnx()
    step = nnx.jit(jls.train_step(nnx_loss))
    for seed in range(3):
        batch = make_batch(seed=seed)
        report = step(*ours, batch)
        chex.assert_trees_all_close(report.loss, by_hand(*theirs, batch), rtol=1e-5)
        chex.assert_trees_all_close(
            nnx_contents(*ours), nnx_contents(*theirs), rtol=1e-5, atol=1e-6
        )


def test_nnx_step_trains_only_what_the_optimizer_is_for():
    class Frozen(nnx.Param):
        pass

    model = Module(nnx.Rngs(0))
    model.linear.kernel = Frozen(model.linear.kernel.get_value())
    wrt = nnx.All(nnx.Param, nnx.Not(Frozen))
    tx = jls.loss_scaled(optax.sgd(0.5), SCALER())
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    before = nnx_contents(model, optimizer)[0]
    report = nnx.jit(jls.train_step(nnx_loss, local_norm=True))(
        model, optimizer, make_batch()
    )
    after = nnx_contents(model, optimizer)[0]
    assert_identical(after["linear"]["kernel"], before["linear"]["kernel"])
    assert moved(after["linear"]["bias"], before["linear"]["bias"]) == [True]
    assert "linear/kernel" not in report.local_norm


# The report.


def test_report_is_in_the_order_of_mindformers():
    assert jls.StepReport._fields[:7] == (
        "loss",
        "overflow",
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
    expected = jls.StepReport(
        loss=np.float32(11.0),
        overflow=np.False_,
        loss_scale=np.float32(64.0),
        learning_rate=np.float32(0.25),
        global_norm=np.float32(5.0),
        local_norm=None,
        size=None,
        dropped=np.int32(0),
    )
    assert_identical(report, expected)
    assert_identical(np.asarray(state.params), np.float32([-0.5, 0.0]))
    _, report = step(linear_state(), jnp.array([[2e37, 0.0]]))
    bad = expected._replace(
        loss=np.float32(2e37),
        overflow=np.True_,
        loss_scale=np.float32(32.0),
        global_norm=np.float32(np.inf),
    )
    assert_identical(report, bad)


def test_report_calls_a_nonfinite_loss_an_overflow_and_keeps_the_scale():
    def loss_fn(state, batch):
        return linear_loss(state, batch) + jax.lax.stop_gradient(jnp.log(-batch[0, 0]))

    step = jax.jit(jls.train_step(loss_fn))
    state, report = step(linear_state(), jnp.array([[3.0, 4.0]]))
    assert report.overflow
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


def test_local_norms_and_sizes_are_labelled_by_path():
    report = jax.jit(jls.train_step(linen_loss, has_aux=True, local_norm=True))(
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
    assert not report.overflow
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


# 1e37 is finite and overflows when it is multiplied by the scale of 64.
GOOD, BAD = jnp.ones((1, 2)), jnp.full((1, 2), 1e37)


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


# Running it: one trace, no transfer, loops, the host's hand on the scale.


def test_one_trace_serves_a_donated_run_with_the_scale_set_from_the_host():
    loss_fn = chex.assert_max_traces(linear_loss, n=1)
    for scaler in (jls.static(64.0), SCALER()):
        chex.clear_trace_counter()
        step = jax.jit(jls.train_step(loss_fn), donate_argnums=0)
        tx = jls.loss_scaled(optax.adam(0.1), scaler)
        state, reports = linear_state(tx=tx), []
        values = (128.0, 2, np.float32(8.0), jnp.ones((1,)), np.ones((), np.int32))
        for value in values:
            state, report = step(state, GOOD)
            reports.append(report)
            state = jls.set_loss_scale(state, value)
            assert jls.loss_scale(state) == float(np.squeeze(value))
        # A report survives the donation of the state that it was made with.
        assert all(np.isfinite(jax.tree.leaves(report)).all() for report in reports)
        for value, error in [("8", TypeError), (None, TypeError), ([8.0], TypeError)]:
            with pytest.raises(error, match="loss_scale must be a real number"):
                jls.set_loss_scale(state, value)
        with pytest.raises(ValueError, match=r"loss_scale must have shape \(\) or"):
            jls.set_loss_scale(state, jnp.ones(2))


def test_step_makes_no_transfer():
    step = jax.jit(jls.train_step(linen_loss, has_aux=True, local_norm=True))
    state = jax.device_put(make_state())
    batch = make_batch()
    state, _ = step(state, batch)
    with jax.transfer_guard("disallow"):
        state, _ = step(state, batch)


def test_scan_of_steps_equals_a_loop():
    step = jls.train_step(linear_loss)
    batches = jnp.array([[[1.0, 2.0]], [[jnp.inf, 1.0]], [[3.0, 4.0]], [[1.0, 1.0]]])
    state = linear_state(inner=optax.adam(0.1)).replace(step=jnp.int32(0))
    last, reports = jax.jit(partial(jax.lax.scan, step))(state, batches)
    for batch, *expected in zip(batches, *reports[:3], strict=True):
        state, report = jax.jit(step)(state, batch)
        chex.assert_trees_all_close(list(report[:3]), expected, rtol=1e-6)
    chex.assert_trees_all_close(last.params, state.params, rtol=1e-6)
    assert reports.overflow.tolist() == [False, True, False, False]


def test_vmap_gives_each_member_its_own_scale():
    step = jls.train_step(linear_loss)
    members = jax.vmap(lambda p: linear_state(p).replace(step=jnp.int32(0)))(
        jnp.array([[1.0, 2.0], [3.0, 4.0]])
    )
    batches = jnp.array([[[1.0, 1.0]], [[2e37, 1.0]]])
    members, reports = jax.jit(jax.vmap(step))(members, batches)
    assert reports.overflow.tolist() == [False, True]
    assert reports.loss_scale.tolist() == [64.0, 32.0]
    assert members.params.tolist() == [[0.5, 1.5], [3.0, 4.0]]


def test_wrapper_within_a_chain_steps_and_skips_too():
    tx = optax.chain(jls.loss_scaled(optax.sgd(1.0), SCALER()), optax.scale(0.5))
    step = jax.jit(jls.train_step(linear_loss))
    state, report = step(linear_state((0.0, 0.0), tx=tx), jnp.array([[3.0, 4.0]]))
    assert report.global_norm == 5.0
    assert state.params.tolist() == [-1.5, -2.0]
    state, report = step(state, BAD)
    assert report.overflow
    assert state.params.tolist() == [-1.5, -2.0]


def test_bfloat16_guard_makes_the_same_step():
    tx = jls.skip_nonfinite(optax.sgd(0.5))
    step = jax.jit(jls.train_step(linear_loss))
    state, report = step(linear_state(tx=tx), jnp.ones((1, 2), jnp.bfloat16))
    assert report.loss_scale == 1.0
    assert state.params.tolist() == [0.5, 1.5]
    state, report = step(state, BAD * jnp.inf)
    assert report.overflow


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_batches": 0}, ValueError, "micro_batches must be from 1 to .* got 0"),
        ({"micro_batches": 2.0}, TypeError, "micro_batches must be an integer"),
        ({"micro_batches": True}, TypeError, "micro_batches must be an integer"),
        ({"accumulation": "max"}, ValueError, "accumulation must be one of .*'max'"),
        ({"drop": None}, ValueError, "drop must be one of .*got None"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be > 0 .*got 0.0"),
        ({"learning_rate": -1}, ValueError, "learning_rate must be > 0 .*got -1"),
        ({"learning_rate": "1"}, TypeError, "learning_rate must be a real number"),
        ({"learning_rate": {"a": -1}}, ValueError, "learning_rate must be > 0"),
    ],
)
def test_bad_options_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        jls.train_step(linear_loss, **options)


def test_loss_function_must_be_one():
    with pytest.raises(TypeError, match="loss_fn must be a function, got 3"):
        jls.train_step(3)


def test_optimizer_without_a_wrapper_is_refused():
    with pytest.raises(ValueError, match="got a state with 0 such wrappers"):
        jls.train_step(linear_loss)(linear_state(tx=optax.sgd(0.1)), GOOD)


def test_fp8_values_among_the_params_are_refused():
    state = linear_state().replace(params={"_overwrite_with_gradient": jnp.ones(2)})
    with pytest.raises(ValueError, match="params must hold parameters alone"):
        jls.train_step(linear_loss)(state, GOOD)


def test_several_wrappers_are_refused():
    group = jls.loss_scaled(optax.sgd(0.1), SCALER())
    tx = optax.chain(group, group)
    with pytest.raises(ValueError, match="once: got a state with 2 such wrappers"):
        jls.train_step(linear_loss)(linear_state(tx=tx), GOOD)


def test_multi_steps_around_the_wrapper_is_refused():
    tx = optax.MultiSteps(jls.loss_scaled(optax.sgd(0.1), SCALER()), 2)
    tx = tx.gradient_transformation()
    with pytest.raises(
        ValueError, match=r"MultiSteps must be inside of jls.loss_scaled"
    ):
        jls.train_step(linear_loss)(linear_state(tx=tx), GOOD)


@pytest.mark.parametrize("args", [(), (GOOD, GOOD, GOOD), (GOOD, GOOD)])
def test_wrong_arguments_of_the_step_are_named(args):
    with pytest.raises(TypeError, match=r"call step\(state, batch\) .*got Linear"):
        jls.train_step(linear_loss)(linear_state(), *args)


@pytest.mark.parametrize(
    ("aux", "error", "message"),
    [
        (None, ValueError, "a dict of new values for fields of the state"),
        ({"accuracy": 1.0}, ValueError, r"got \['accuracy'\]. Add a field"),
        ({"params": 1.0}, ValueError, r"got \['params'\]"),
        ({"key": jnp.ones(2)}, ValueError, "loss_fn's aux must keep its shapes"),
        ({"batch_stats": {}}, ValueError, "loss_fn's aux must keep its structure"),
    ],
)
def test_aux_that_is_no_field_of_the_state_is_refused(aux, error, message):
    def loss_fn(state, batch):
        return linen_loss(state, batch)[0], aux

    with pytest.raises(error, match=message):
        jls.train_step(loss_fn, has_aux=True)(make_state(), make_batch())


def test_missing_pair_is_named():
    with pytest.raises(TypeError, match=r"must return the pair \(loss, fields\), got"):
        jls.train_step(linear_loss, has_aux=True)(linear_state(), GOOD)


def test_nnx_refuses_aux_and_models_that_change_their_structure():
    model, optimizer = make_nnx()
    with pytest.raises(ValueError, match="has_aux must be False for an NNX model"):
        jls.train_step(nnx_loss, has_aux=True)(model, optimizer, make_batch())

    def sowing(model, batch):
        model.seen = nnx.Intermediate(batch[0])
        return nnx_loss(model, batch)

    with pytest.raises(ValueError, match="must keep its structure"):
        jls.train_step(sowing)(model, optimizer, make_batch())
    assert not hasattr(model, "seen")


def test_learning_rate_must_be_a_scalar():
    step = jls.train_step(linear_loss, learning_rate=lambda count: jnp.ones(2))
    with pytest.raises(ValueError, match=r"learning_rate must be .* got shape \(2,\)"):
        step(linear_state(), GOOD)


def test_constant_schedule_must_be_positive():
    step = jls.train_step(linear_loss, learning_rate=optax.constant_schedule(-0.5))
    with pytest.raises(ValueError, match=r"learning_rate must be > 0 .*got -0.5"):
        step(linear_state(), GOOD)
