"""One pure train step, for Linen, for NNX and for plain functions."""

import inspect
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from models import (
    BAD,
    GOOD,
    SCALER,
    Module,
    contents,
    cross_entropy,
    linear_loss,
    linear_state,
    linen_loss,
    make_batch,
    make_nnx,
    make_state,
    moved,
    nnx_contents,
    nnx_loss,
    norm,
    spoiled,
)
from shared import assert_identical

import jls
from jls._notes import noted

pytestmark = pytest.mark.standard_promotion


def test_linen_step_is_the_one_written_by_hand(jit_or_eager, on_cpu):
    # Gradients that are 0 but for rounding make Adam step by all of its rate.
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
    step = jit_or_eager(jls.train_step(linen_loss, carried=True))
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
        )
        assert_identical(jls.metrics(ours), jls.metrics(theirs))
    assert ours.step == 4
    assert jls.metrics(ours)["skips"] == 1


def test_linen_skipped_step_leaves_all_but_the_count_of_calls():
    step = jax.jit(jls.train_step(linen_loss, carried=True))
    state, _ = step(make_state(), make_batch())
    for value in (jnp.nan, jnp.inf, 1e30):
        before, calls = contents(state), state.step
        state, report = step(state, spoiled(make_batch(), value))
        assert report.skipped
        assert_identical(contents(state), before)
        assert state.step == calls + 1
    state, report = step(state, make_batch())
    assert not report.skipped
    assert all(moved(contents(state)[:3], before[:3]))


def test_skipped_step_keeps_params_that_an_addition_would_change(jit_or_eager):
    # XLA flushes subnormal numbers when it adds, and -0.0 + 0.0 is 0.0.
    state = linear_state([-0.0, 1e-40])
    step = jit_or_eager(jls.train_step(linear_loss))
    state, report = step(state, jnp.array([[jnp.inf, 1.0]]))
    assert report.skipped
    assert_identical(np.asarray(state.params), np.float32([-0.0, 1e-40]))


@pytest.mark.parametrize(
    "jit",
    [
        pytest.param(lambda f: f, id="eager", marks=pytest.mark.more),
        pytest.param(nnx.jit, id="jit"),
        pytest.param(partial(nnx.jit, donate_argnums=(0, 1)), id="donated"),
    ],
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
        assert report.skipped == (value is not None)
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
    step = jax.jit(jls.train_step(linen_loss, carried=True, local_norm=True))
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
    assert reports.skipped.tolist() == [False, True, False, False]


def test_vmap_gives_each_member_its_own_scale():
    step = jls.train_step(linear_loss)
    members = jax.vmap(lambda p: linear_state(p).replace(step=jnp.int32(0)))(
        jnp.array([[1.0, 2.0], [3.0, 4.0]])
    )
    batches = jnp.array([[[1.0, 1.0]], [[2e37, 1.0]]])
    members, reports = jax.jit(jax.vmap(step))(members, batches)
    assert reports.skipped.tolist() == [False, True]
    assert reports.loss_scale.tolist() == [64.0, 32.0]
    assert members.params.tolist() == [[0.5, 1.5], [3.0, 4.0]]


def test_wrapper_within_a_chain_steps_and_skips_too():
    tx = optax.chain(jls.loss_scaled(optax.sgd(1.0), SCALER()), optax.scale(0.5))
    step = jax.jit(jls.train_step(linear_loss))
    state, report = step(linear_state((0.0, 0.0), tx=tx), jnp.array([[3.0, 4.0]]))
    assert report.global_norm == 5.0
    assert state.params.tolist() == [-1.5, -2.0]
    state, report = step(state, BAD)
    assert report.skipped
    assert state.params.tolist() == [-1.5, -2.0]


def test_bfloat16_guard_makes_the_same_step():
    tx = jls.skip_nonfinite(optax.sgd(0.5))
    step = jax.jit(jls.train_step(linear_loss))
    state, report = step(linear_state(tx=tx), jnp.ones((1, 2), jnp.bfloat16))
    assert report.loss_scale == 1.0
    assert state.params.tolist() == [0.5, 1.5]
    state, report = step(state, BAD * jnp.inf)
    assert report.skipped


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_batches": 0}, ValueError, "micro_batches must be from 1 to .* got 0"),
        ({"micro_batches": 2.0}, TypeError, "micro_batches must be an integer"),
        ({"micro_batches": True}, TypeError, "micro_batches must be an integer"),
        ({"accumulation": "max"}, ValueError, "accumulation must be one of .*'max'"),
        ({"drop": None}, TypeError, "drop must be one of .*got NoneType None"),
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
    with pytest.raises(TypeError, match="loss_fn must be a function, got int 3"):
        jls.train_step(3)


def test_optimizer_without_a_wrapper_is_refused():
    with pytest.raises(ValueError, match="got a state with 0 such wrappers"):
        jls.train_step(linear_loss)(linear_state(tx=optax.sgd(0.1)), GOOD)


def with_logits(model, batch):
    x, labels = batch
    logits = model(x)
    return cross_entropy(logits, labels), logits


def nnx_metrics():
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )


def test_nnx_metrics_are_updated_from_the_report():
    model, optimizer = make_nnx()
    metrics = nnx_metrics()
    inner = jls.train_step(with_logits, has_aux=True)

    @nnx.jit
    def step(model, optimizer, metrics, batch):
        report = inner(model, optimizer, batch)
        metrics.update(loss=report.loss, logits=report.aux, labels=batch[1])
        return report

    for seed in range(2):
        report = step(model, optimizer, metrics, make_batch(seed=seed))
        assert report.aux.shape == (16, 3)
    values = metrics.compute()
    assert np.isfinite(values["loss"])
    assert 0 < values["accuracy"] <= 1


def test_metrics_within_the_model_are_rolled_back():
    class Counting(Module):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.metrics = nnx_metrics()

    def loss_fn(model, batch):
        loss, logits = with_logits(model, batch)
        model.metrics.update(loss=loss, logits=logits, labels=batch[1])
        return loss

    model = Counting(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, jls.loss_scaled(optax.adam(0.01), SCALER()), wrt=nnx.Param
    )
    step = nnx.jit(jls.train_step(loss_fn))
    for value in (1.0, jnp.nan, 1.0):
        report = step(model, optimizer, spoiled(make_batch(), value))
        assert report.skipped == np.isnan(value)
    assert model.metrics.accuracy.count[...] == 32


@pytest.mark.parametrize("form", ["returned", "merged", "cached"])
def test_nnx_steps_without_nnx_jit_train_where_updates_are_kept(form):
    model, optimizer = make_nnx()
    step = jls.train_step(nnx_loss)

    @jax.jit
    def returned(model, optimizer, batch):
        report = step(model, optimizer, batch)
        return model, optimizer, report

    @jax.jit
    def merged(graph, state, batch):
        model, optimizer = nnx.merge(graph, state)
        report = step(model, optimizer, batch)
        return nnx.state((model, optimizer)), report

    cached = nnx.cached_partial(nnx.jit(step), model, optimizer)
    losses = []
    for seed in range(5):
        batch = make_batch(seed=seed)
        batch = spoiled(batch) if seed == 2 else batch
        if form == "returned":
            model, optimizer, report = returned(model, optimizer, batch)
        elif form == "merged":
            state, report = merged(*nnx.split((model, optimizer)), batch)
            nnx.update((model, optimizer), state)
        else:
            report = cached(batch)
        losses.append(float(report.loss))
    expected_model, expected_optimizer = make_nnx()
    usual = nnx.jit(step)
    for seed in range(5):
        batch = make_batch(seed=seed)
        batch = spoiled(batch) if seed == 2 else batch
        report = usual(expected_model, expected_optimizer, batch)
    assert jls.metrics(optimizer)["steps"] == 5
    chex.assert_trees_all_close(
        nnx_contents(model, optimizer),
        nnx_contents(expected_model, expected_optimizer),
        rtol=1e-4,
        atol=1e-5,
    )


def test_keyword_arguments_reach_every_micro_batch(jit_or_eager):
    def loss_fn(state, batch, *, factor):
        return factor * linear_loss(state, batch)

    state, batch = linear_state(), jnp.array([[3.0, 4.0], [1.0, 2.0]])
    for micro_batches in (1, 2):
        step = jit_or_eager(jls.train_step(loss_fn, micro_batches=micro_batches))
        _, report = step(state, batch, factor=jnp.float32(2.0))
        np.testing.assert_allclose(report.loss, 2 * linear_loss(state, batch))


def test_several_wrappers_are_refused():
    group = jls.loss_scaled(optax.sgd(0.1), SCALER())
    tx = optax.chain(group, group)
    words = (
        r"once: got a state with 2 such wrappers\. Wrap the whole once.*parts, labels"
    )
    with pytest.raises(ValueError, match=words):
        jls.train_step(linear_loss)(linear_state(tx=tx), GOOD)


# A wrapper around a part of the optimizer.

PARTS = {"a": jnp.ones(2), "b": jnp.ones(2)}
LABELS = {"a": "a", "b": "b"}
ONLY_A, ONLY_B = {"a": True, "b": False}, {"a": False, "b": True}


def sum_of_parts(params, batch):
    return jnp.sum((batch @ params["a"] + batch @ params["b"]) ** 2)


def of_a_alone(params, batch):
    frozen = jax.lax.stop_gradient(params["b"])
    return sum_of_parts(params | {"b": frozen}, batch)


def wrapped():
    return jls.loss_scaled(optax.adam(0.1), SCALER())


def beside(other):
    return optax.multi_transform({"a": wrapped(), "b": other}, LABELS)


BESIDE_A_BARE_PART = {
    "sgd": lambda: beside(optax.sgd(0.1)),
    "a guard of its own": lambda: beside(optax.apply_if_finite(optax.sgd(0.1), 3)),
    "masked": lambda: optax.masked(wrapped(), ONLY_A),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), beside(optax.adam(0.1))
    ),
}
WHOLE = {
    "frozen": lambda: beside(optax.set_to_zero()),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), beside(optax.set_to_zero())
    ),
    "masked": lambda: optax.chain(
        optax.masked(wrapped(), ONLY_A), optax.masked(optax.set_to_zero(), ONLY_B)
    ),
    "decay of nothing": lambda: optax.chain(
        wrapped(), optax.add_decayed_weights(0.1, {"a": False, "b": False})
    ),
    "schedule": lambda: optax.chain(
        wrapped(), optax.scale_by_schedule(lambda count: 1 / (count + 1))
    ),
    "clip after it": lambda: optax.chain(
        wrapped(), optax.clip_by_global_norm(1.0), optax.clip(1.0), optax.zero_nans()
    ),
    "injected": lambda: optax.inject_hyperparams(
        lambda learning_rate: jls.loss_scaled(optax.sgd(learning_rate), SCALER())
    )(0.1),
    "average": lambda: optax.chain(wrapped(), jls.params_ema(0.9)),
    "flat": lambda: optax.flatten(wrapped()),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", BESIDE_A_BARE_PART)
def test_wrapper_around_a_part_is_refused(name, micro_batches, jit_or_eager):
    optimizer = BESIDE_A_BARE_PART[name]()
    step = jit_or_eager(
        jls.train_step(sum_of_parts, optimizer, micro_batches=micro_batches)
    )
    words = r"must be wrapped whole, .* would move 'b'\. Wrap the whole .*set_to_zero"
    with pytest.raises(ValueError, match=words):
        step(PARTS, optimizer.init(PARTS), jnp.stack([GOOD, GOOD]))


@pytest.mark.parametrize("name", WHOLE)
def test_wrapper_that_decides_on_all_that_moves_is_taken(name):
    optimizer = WHOLE[name]()
    step = jax.jit(jls.train_step(sum_of_parts, optimizer))
    with noted("update") as updates:
        *_, report = step(PARTS, optimizer.init(PARTS), GOOD[None])
    assert not report.skipped
    assert len(updates) == 1  # what was read of the optimizer is no step


MOVES_IN_A_SKIP = {
    "decay": lambda: optax.add_decayed_weights(0.1),
    "momentum": lambda: optax.trace(0.9),
    "noise": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "accumulation": lambda: optax.apply_every(2),
}


@pytest.mark.parametrize("name", MOVES_IN_A_SKIP)
def test_what_moves_parameters_outside_of_the_wrapper_is_refused(name, jit_or_eager):
    optimizer = optax.chain(wrapped(), MOVES_IN_A_SKIP[name]())
    step = jit_or_eager(jls.train_step(sum_of_parts, optimizer))
    words = r"must be inside the wrapper, .* would move 'a', 'b'\. Write jls.loss_scal"
    with pytest.raises(ValueError, match=words):
        step(PARTS, optimizer.init(PARTS), GOOD[None])


KEEPS_GRADIENTS = {
    "momentum": (lambda: optax.trace(0.9), "0/trace/a"),
    "moments": (optax.scale_by_adam, "0/mu/a"),
    "accumulation": (lambda: optax.apply_every(2), "0/grad_acc/a"),
    "an average of a momentum": (
        lambda: optax.chain(optax.trace(0.9), optax.ema(0.9)),
        "0/0/trace/a",
    ),
}


@pytest.mark.parametrize("name", KEEPS_GRADIENTS)
def test_what_keeps_gradients_before_the_wrapper_is_refused(name, jit_or_eager):
    make, path = KEEPS_GRADIENTS[name]
    optimizer = optax.chain(make(), wrapped())
    step = jit_or_eager(jls.train_step(sum_of_parts, optimizer))
    words = rf"keeps gradients must be inside the wrapper, .* for ever, by '{path}'"
    with pytest.raises(ValueError, match=words):
        step(PARTS, optimizer.init(PARTS), GOOD[None])


def test_optimizer_around_the_wrapper_that_takes_no_loss_is_named():
    outside = optax.contrib.sam(wrapped(), optax.sgd(0.1))
    step = jls.train_step(sum_of_parts, outside)
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        step(PARTS, outside.init(PARTS), GOOD[None])
    assert "Put it inside: jls.loss_scaled(" in caught.value.__notes__[0]


def last_gradient():
    """Adds the gradient of the step before, and keeps nothing else."""

    def update(updates, state, params=None):
        return optax.tree.add(updates, state), updates

    return optax.GradientTransformation(optax.tree.zeros_like, update)


FORGETS_GRADIENTS = {
    "a measure": lambda: optax.monitor({"norm": lambda g, **_: optax.tree.norm(g)}),
    "an averaged measure": lambda: optax.monitor(
        {"norm": optax.measure_with_ema(lambda g, **_: optax.tree.norm(g), 0.9)}
    ),
    "the last gradient": last_gradient,
    "a clip": lambda: optax.adaptive_grad_clip(0.1),
}


@pytest.mark.parametrize("name", FORGETS_GRADIENTS)
def test_what_forgets_gradients_before_the_wrapper_is_taken(name):
    optimizer = optax.chain(FORGETS_GRADIENTS[name](), wrapped())
    step = jax.jit(jls.train_step(sum_of_parts, optimizer))
    params, opt_state = PARTS, optimizer.init(PARTS)
    for batch in (GOOD, BAD, GOOD, GOOD):
        params, opt_state, report = step(params, opt_state, batch[None])
    assert not report.skipped


@pytest.mark.parametrize("name", [x for x in WHOLE if x != "masked"])
def test_a_skip_moves_nothing_whatever_is_outside(name):
    optimizer = WHOLE[name]()
    step = jax.jit(jls.train_step(sum_of_parts, optimizer))
    params, _, report = step(PARTS, optimizer.init(PARTS), BAD[None])
    assert report.skipped
    assert_identical(params, PARTS)


@pytest.mark.parametrize("around", ["all", "a part"])
def test_optimizer_around_a_wrapper_is_traced_once_more(around):
    """To see whether it moves parameters in a step that is skipped."""
    calls = []

    def update(updates, state, params=None):
        calls.append(params)
        return updates, state

    counts = optax.GradientTransformation(lambda params: (), update)
    inner = wrapped() if around == "all" else beside(optax.sgd(0.1))
    optimizer = optax.chain(counts, inner)
    step = jax.jit(jls.train_step(of_a_alone, optimizer))
    step(PARTS, optimizer.init(PARTS), GOOD[None])
    assert len(calls) == 2


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "masked"])
def test_part_without_a_gradient_needs_no_wrapper(name, micro_batches):
    optimizer, batch = BESIDE_A_BARE_PART[name](), jnp.stack([GOOD, BAD])
    step = jax.jit(jls.train_step(of_a_alone, optimizer, micro_batches=micro_batches))
    params, _, report = step(PARTS, optimizer.init(PARTS), batch)
    assert report.skipped
    assert_identical(params, PARTS)


def test_multi_steps_around_the_wrapper_is_refused():
    tx = optax.MultiSteps(jls.loss_scaled(optax.sgd(0.1), SCALER()), 2)
    tx = tx.gradient_transformation()
    with pytest.raises(ValueError, match=r"MultiSteps must be inside jls.loss_scaled"):
        jls.train_step(linear_loss)(linear_state(tx=tx), GOOD)


@pytest.mark.parametrize("args", [(), (GOOD, GOOD, GOOD), (GOOD, GOOD)])
def test_wrong_arguments_of_the_step_are_named(args):
    with pytest.raises(TypeError, match=r"call step\(state, batch\) .*got Linear"):
        jls.train_step(linear_loss)(linear_state(), *args)


def indexing(net, batch):
    return jnp.sum(net["w"] * batch)


def searching(net, batch):
    return jnp.sum(batch) if "w" in net else 0.0


def of_params(params, batch):
    return jnp.sum(params.x * batch)


def of_variables(variables, batch):
    return jnp.sum(nn.Dense(1).apply({"params": variables}, batch))


@pytest.mark.parametrize("loss_fn", [indexing, searching, of_params, of_variables])
def test_a_linen_loss_that_wants_the_parameters_is_told(loss_fn):
    name = next(iter(inspect.signature(loss_fn).parameters))
    message = rf"gets the \w+, .* takes {name} for .* loss_fn\(state, batch\)"
    with pytest.raises(TypeError, match=message):
        jls.train_step(loss_fn)(linear_state(), GOOD)


def test_what_else_fails_in_a_linen_loss_is_its_own_error():
    def calling(state, batch):
        return state(batch)

    def lacking(state, batch):
        return state.batch_stats

    def of_nothing(*args):
        raise KeyError

    for loss_fn, error in (
        (calling, TypeError),
        (lacking, AttributeError),
        (of_nothing, KeyError),
    ):
        with pytest.raises(error) as caught:
            jls.train_step(loss_fn)(linear_state(), GOOD)
        assert "loss_fn gets" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (None, ValueError, "a dict of new values for fields of the state"),
        ({"accuracy": 1.0}, ValueError, r"got \['accuracy'\]. Add a field"),
        ({"params": 1.0}, ValueError, r"got \['params'\]"),
        ({"key": jnp.ones(2)}, ValueError, "what loss_fn carries must keep its shapes"),
        (
            {"batch_stats": {}},
            ValueError,
            "what loss_fn carries must keep its structure",
        ),
    ],
)
def test_what_is_no_field_of_the_state_cannot_be_carried(fields, error, message):
    def loss_fn(state, batch):
        return linen_loss(state, batch)[0], fields

    with pytest.raises(error, match=message):
        jls.train_step(loss_fn, carried=True)(make_state(), make_batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"carried": True}, r"with carried=True .* \(loss, carried\), got"),
        ({"has_aux": True}, r"with has_aux=True .* \(loss, aux\), got"),
        (
            {"has_aux": True, "carried": True},
            r"carried=True and has_aux=True .* \(loss, carried, aux\), got",
        ),
    ],
)
def test_what_the_loss_function_must_return_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        jls.train_step(linear_loss, **options)(linear_state(), GOOD)


def test_aux_that_names_fields_of_the_state_gets_a_warning():
    step = jls.train_step(linen_loss, has_aux=True)
    with pytest.warns(jls.JlsWarning, match=r"'batch_stats', 'key'.*carried=True"):
        step(make_state(), make_batch())


def test_nnx_refuses_carried_and_models_that_change_their_structure():
    model, optimizer = make_nnx()
    with pytest.raises(ValueError, match="carried must be False for an NNX model"):
        jls.train_step(nnx_loss, carried=True)(model, optimizer, make_batch())

    def sowing(model, batch):
        model.seen = nnx.Intermediate(batch[0])
        return nnx_loss(model, batch)

    with pytest.raises(ValueError, match="must leave the variables"):
        jls.train_step(sowing)(model, optimizer, make_batch())
    assert not hasattr(model, "seen")


# Steps that carry weakly typed arrays, which plain JAX compiles once.


def weak():
    return {"calls": jnp.array(0), "mean": jnp.asarray(0.0)}


def strong():
    return {"calls": jnp.int32(0), "mean": jnp.float32(0.0)}


def all_weak(tree):
    return all(x.weak_type for x in jax.tree.leaves(tree))


def moved_on(carried, x):
    """The carried arrays after a batch: no dtype is named, so they stay weak."""
    calls, mean = carried["calls"] + 1, 0.75 * carried["mean"]
    return {"calls": calls, "mean": mean + jnp.where(x[0, 0] > 1, 0.5, 0.25)}


def run_plain(make, batches, traces, **options):
    def loss_fn(params, carried, x):
        traces.append(None)
        return jnp.mean((x @ params) ** 2), moved_on(carried, x)

    optimizer, params = moving(), jnp.eye(8)
    step = jax.jit(jls.train_step(loss_fn, optimizer, carried=True, **options))
    state = params, optimizer.init(params), make()
    for x in batches:
        *state, report = step(*state, x)
        yield state[-1], report


def run_linen(make, batches, traces, is_returned=True, **options):
    class State(train_state.TrainState):
        seen: Any = None

    def loss_fn(state, x):
        traces.append(None)
        loss = jnp.mean((x @ state.params) ** 2)
        return loss, {"seen": moved_on(state.seen, x)} if is_returned else {}

    state = State.create(
        apply_fn=None, params=jnp.eye(8), tx=moving(), seen=make()
    ).replace(step=jnp.int32(0))
    step = jax.jit(jls.train_step(loss_fn, carried=True, **options))
    for x in batches:
        state, report = step(state, x)
        yield state.seen, report


def run_nnx(make, batches, traces, **options):
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(8))
            self.calls, self.mean = map(nnx.Variable, make().values())

        def seen(self):
            return {"calls": self.calls.get_value(), "mean": self.mean.get_value()}

    def loss_fn(model, x):
        traces.append(None)
        for name, value in moved_on(model.seen(), x).items():
            getattr(model, name).set_value(value)
        return jnp.mean((x @ model.w[...]) ** 2)

    model = Net()
    optimizer = nnx.Optimizer(model, moving(), wrt=nnx.Param)
    step = nnx.jit(jls.train_step(loss_fn, **options))
    for x in batches:
        report = step(model, optimizer, x)
        yield model.seen(), report


def moving():
    return jls.loss_scaled(optax.adam(1e-3), jls.dynamic(1024.0))


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compute_dtype": jnp.float16},
        {"micro_batches": 2},
        {"micro_batches": 2, "drop": "micro_batch", "compute_dtype": jnp.bfloat16},
    ],
    ids=["", "autocast", "micro", "drop"],
)
@pytest.mark.parametrize("run", [run_plain, run_linen, run_nnx])
def test_what_is_carried_stays_weak_and_a_step_is_traced_once(run, options):
    good = jnp.ones((4, 8))
    batches, traces = [good, good, good * jnp.nan, good], list[None]()
    seen, reports = zip(*run(weak, batches, traces, **options), strict=True)
    assert [bool(x.skipped) for x in reports] == [False, False, True, False]
    assert all_weak(seen)
    of_one_step = list[None]()
    list(run(weak, batches[:1], of_one_step, **options))
    assert len(traces) == len(of_one_step)
    as_strong, others = zip(*run(strong, batches, [], **options), strict=True)
    assert not any(x.weak_type for x in jax.tree.leaves(as_strong))
    assert_identical((seen, reports), (as_strong, others))


def test_a_weak_field_that_is_not_returned_stays_weak():
    run = run_linen(weak, [jnp.ones((4, 8))] * 3, traces := [], is_returned=False)
    assert all_weak([seen for seen, _ in run])
    assert len(traces) == 1


@pytest.mark.parametrize("before", [weak, lambda: {"calls": 0, "mean": 0.0}])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weak_constants_are_rolled_back_too(before, dtype, jit_or_eager):
    def loss_fn(params, carried, x):
        after = {"calls": jnp.array(1), "mean": jnp.asarray(0.5)}
        return jnp.mean((x @ params) ** 2), after

    optimizer, params = moving(), jnp.eye(8)
    step = jls.train_step(loss_fn, optimizer, carried=True, compute_dtype=dtype)
    state = params, optimizer.init(params), before()
    for bad, expected in ((jnp.nan, (0, 0.0)), (1.0, (1, 0.5))):
        *_, carried, _ = jit_or_eager(step)(*state, bad * jnp.ones((4, 8)))
        assert tuple(carried.values()) == expected
        assert all_weak(carried)


@pytest.mark.parametrize(("before", "after"), [(weak, strong), (strong, weak)])
def test_what_is_carried_is_strong_if_it_was_or_if_the_new_one_is(before, after):
    def loss_fn(params, carried, x):
        return jnp.mean((x @ params) ** 2), after()

    optimizer = moving()
    step = jax.jit(jls.train_step(loss_fn, optimizer, carried=True))
    args = jnp.eye(8), optimizer.init(jnp.eye(8)), before()
    *_, carried, _ = step(*args, jnp.ones((4, 8)))
    assert not any(x.weak_type for x in jax.tree.leaves(carried))
