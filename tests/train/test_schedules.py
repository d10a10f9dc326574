"""The learning rate that a report finds in an optimizer which was given a schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import (
    BAD,
    GOOD,
    SCALER,
    linear_loss,
    linear_state,
    make_batch,
    make_nnx,
    nnx_loss,
)

import jls
from jls._train import schedules

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(2)}
LABELS = {"w": "slow", "b": "fast"}
BATCHES = [GOOD, BAD, GOOD, GOOD]


def schedule(count):
    return 0.5 / (1.0 + count)


def slower(count):
    return 0.125 * schedule(count)


def applied(*counts):
    return [float(schedule(jnp.int32(count))) for count in counts]


def reported(tx, batches=BATCHES, jit=jax.jit):
    state, found = linear_state(tx=tx), []
    step = jit(jls.train_step(linear_loss))
    for batch in batches:
        state, report = step(state, batch)
        found.append(jax.tree.map(float, report.learning_rate))
    return found


def in_groups(slow, fast, labels=LABELS):
    return optax.partition({"slow": slow, "fast": fast}, labels)


def reported_by_group(inner, steps=3):
    optimizer = jls.loss_scaled(inner)
    params, state, found = PARAMS, optimizer.init(PARAMS), []
    for step in range(steps):
        grads = jax.tree.map(lambda p: p * (jnp.nan if step == 1 else 1.0), PARAMS)  # noqa: B023
        params, state, report = jls.apply_gradients(optimizer, grads, state, params)
        found.append(jax.tree.map(float, report.learning_rate))
    return found


INNER = {
    "sgd": optax.sgd(schedule),
    "adamw": optax.adamw(schedule),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
    "adafactor": optax.adafactor(schedule),  # flips the sign by a factor of its own
    "lion": optax.lion(schedule),
    "masked": optax.masked(optax.adamw(schedule), True),
    "flatten": optax.flatten(optax.adamw(schedule)),
    "named_chain": optax.named_chain(
        ("clip", optax.clip(1.0)), ("adamw", optax.adamw(schedule))
    ),
    "average": optax.chain(optax.adamw(schedule), jls.params_ema(0.9)),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(schedule), schedule),
    "jitted": optax.GradientTransformation(
        optax.sgd(schedule).init, jax.jit(optax.sgd(schedule).update)
    ),
    "an object": optax.MultiSteps(optax.adamw(schedule), 1),
}


@pytest.mark.parametrize("name", INNER)
def test_a_schedule_inside_is_found_and_counts_applied_steps(name):
    found = reported(jls.loss_scaled(INNER[name], SCALER()))
    assert found == applied(0, 1, 1, 2)


def test_a_schedule_is_found_jitted_and_eager(jit_or_eager):
    tx = jls.loss_scaled(optax.sgd(schedule), SCALER())
    assert reported(tx, jit=jit_or_eager) == applied(0, 1, 1, 2)


def test_a_schedule_outside_counts_all_steps():
    outside = optax.chain(
        jls.loss_scaled(optax.scale_by_adam(), SCALER()),
        optax.scale_by_learning_rate(schedule),
    )
    assert reported(outside) == applied(0, 1, 2, 3)


def test_a_schedule_in_an_accumulation_counts_its_windows():
    tx = jls.loss_scaled(optax.MultiSteps(optax.adamw(schedule), 2), SCALER())
    batches = [GOOD, BAD, GOOD, GOOD, GOOD, GOOD]
    assert reported(tx, batches) == applied(0, 0, 0, 1, 1, 2)


def test_the_reported_rate_is_what_the_step_used():
    state = linear_state((0.0, 0.0), tx=jls.loss_scaled(optax.sgd(schedule), SCALER()))
    step, used = jax.jit(jls.train_step(linear_loss)), []
    for _ in range(3):
        before = state.params
        state, report = step(state, GOOD)
        used.append(float(report.learning_rate))
        np.testing.assert_allclose(before - state.params, used[-1], rtol=1e-6)
    assert used == applied(0, 1, 2)


def test_a_schedule_in_an_nnx_optimizer_is_found():
    model, optimizer = make_nnx(optax.adamw(schedule))
    step = nnx.jit(jls.train_step(nnx_loss))
    found = [float(step(model, optimizer, make_batch())[3]) for _ in range(3)]
    assert found == applied(0, 1, 2)


def test_schedules_come_by_group():
    both = in_groups(optax.sgd(slower), optax.adamw(schedule))
    expected = [{"slow": 0.125 * x, "fast": x} for x in applied(0, 1, 1)]
    assert reported_by_group(both) == expected
    one = optax.sgd(schedule)
    expected = [{"slow": x, "fast": x} for x in applied(0, 1, 1)]
    assert reported_by_group(in_groups(one, one)) == expected


def test_a_group_beside_a_frozen_one_is_the_only_one():
    assert reported_by_group(
        in_groups(optax.sgd(schedule), optax.set_to_zero())
    ) == applied(0, 1, 1)


def test_a_group_whose_rate_is_not_known_is_left_out():
    mixed = in_groups(optax.sgd(schedule), optax.sgd(0.5))
    assert reported_by_group(mixed, 1) == [{"slow": 0.5}]
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    mixed = in_groups(optax.sgd(schedule), injected)
    assert reported_by_group(mixed, 1) == [{"slow": 0.5, "fast": 0.25}]


def printing(count):
    jax.debug.print("{}", count)
    return schedule(count)


NOT_FOUND = {
    "a constant": optax.adamw(0.1),
    "two schedules": optax.chain(optax.sgd(schedule), optax.sgd(slower)),
    "one optimizer twice": optax.chain(*[optax.sgd(schedule)] * 2),
    "a factor beside it": optax.chain(optax.adamw(schedule), optax.scale(0.5)),
    "a factor that is an array": optax.chain(
        optax.adamw(schedule), optax.scale(jnp.float32(0.5))
    ),
    "a scheduled factor": optax.chain(
        optax.adamw(0.1), optax.scale_by_schedule(schedule)
    ),
    "both scheduled": optax.chain(
        optax.adamw(schedule), optax.scale_by_schedule(schedule)
    ),
    "a group beside it": optax.chain(
        in_groups(optax.sgd(schedule), optax.sgd(schedule), "slow"), optax.scale(0.5)
    ),
    "rates by element": optax.sgd(lambda count: jnp.array([0.5, 0.25])),
    "a schedule that prints": optax.sgd(printing),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_no_learning_rate_where_it_is_not_certain(name):
    tx = jls.loss_scaled(NOT_FOUND[name], SCALER())
    assert reported(tx, [GOOD, BAD]) == [None, None]


def test_no_learning_rate_beside_an_injected_one():
    injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    tx = jls.loss_scaled(optax.chain(injected, optax.sgd(schedule)), SCALER())
    assert reported(tx, [GOOD]) == [0.25]
    group = in_groups(optax.sgd(schedule), optax.set_to_zero())
    assert reported_by_group(optax.chain(injected, group), 1) == [0.25]


def test_the_right_one_of_several_optimizers_in_a_dict_is_not_guessed():
    choices = {"sgd": optax.sgd(schedule), "adamw": optax.adamw(slower)}

    def update(updates, state, params=None):
        return choices["sgd"].update(updates, state, params)

    chosen = optax.GradientTransformation(choices["sgd"].init, update)
    assert reported(jls.loss_scaled(chosen, SCALER()), [GOOD]) == [None]


@pytest.mark.more
def test_closures_that_hold_themselves_end():
    inner, registry = optax.sgd(schedule), {}

    def update(updates, state, params=None):
        return registry["sgd"].update(updates, state, params)

    registry |= {"sgd": inner, "self": registry, "update": update}
    tx = jls.loss_scaled(optax.GradientTransformation(inner.init, update), SCALER())
    assert reported(tx, [GOOD]) == [None]


def test_a_cell_that_is_not_set_yet_is_passed_over():
    def make():
        def update(updates, state, params=None):
            return later if params is None else inner.update(updates, state, params)

        inner = optax.sgd(schedule)
        if inner is None:
            later = None
        return optax.GradientTransformation(inner.init, update)

    assert reported(jls.loss_scaled(make(), SCALER())) == applied(0, 1, 1, 2)


@pytest.mark.parametrize(
    "update",
    [optax.identity().update, functools.partial(optax.identity().update)],
    ids=["a function", "an object"],
)
def test_another_optax_hides_its_schedules_and_nothing_breaks(monkeypatch, update):
    other = optax.GradientTransformation(optax.identity().init, update)
    monkeypatch.setattr(optax, "scale_by_learning_rate", lambda learning_rate: other)
    schedules._codes.cache_clear()
    try:
        tx = jls.loss_scaled(optax.sgd(schedule), SCALER())
        assert reported(tx, [GOOD]) == [None]
    finally:
        schedules._codes.cache_clear()
