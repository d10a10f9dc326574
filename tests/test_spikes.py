"""`jls.spikes`: the rule, its bound on skips, and what a skipped spike leaves."""

import functools
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import assert_identical, judged

import jls
from jls._tools.run.sync import _scalars
from jls._tools.run.verdict import Facts
from jls._types import SIGNALS
from jls.types import SkipReason, SpikePolicy

LOSS, NORM = map(SIGNALS.index, ("loss", "norm"))
W = jnp.array([1.0, -2.0])


def skips(policy, losses, norms):
    pair = jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32)
    if pair[0].ndim == 2:
        return np.asarray(judged(policy, *pair)[0])
    return np.asarray(judged(policy, *(x[None] for x in pair))[0][0])


def noise(rng, shape):
    """Losses and norms with a spike now and then, and no two alike."""
    values = rng.lognormal(0.0, 0.3, shape)
    return np.where(
        rng.random(shape) < 0.1, values * rng.uniform(2, 1e3, shape), values
    )


def guarded(policy, inner=None):
    inner = inner or optax.sgd(0.1, momentum=0.9)
    return jls.skip_nonfinite(inner, spikes=policy)


def run(optimizer, sizes, losses=None, jit=jax.jit):
    """The parameters and the state after each step; a gradient's norm is its size."""

    @jit
    def step(params, state, size, loss):
        grads = size * jnp.array([0.6, 0.8])
        extra = {} if losses is None else {"value": loss}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, made = W, []
    state = optimizer.init(params)
    given = itertools.repeat(1.0) if losses is None else losses
    for size, loss in zip(sizes, given, strict=False):
        params, state = step(params, state, jnp.float32(size), jnp.float32(loss))
        made.append((params, state))
    return made


# The rule.


@pytest.mark.cover(1)
@pytest.mark.parametrize("window", [2, 3, 8, 16])
@pytest.mark.parametrize("budget", [0, 1, 2.5, 4, None])
@pytest.mark.parametrize("options", [{}, {"warmup": 2, "max_norm": 20.0}], ids=str)
def test_policy_follows_its_rule_in_plain_python(window, budget, options):
    rng = np.random.default_rng(0)
    losses, norms = noise(rng, (20, 100)), noise(rng, (20, 100))
    numbers = {"window": window, "sigmas": 3.0, "budget": budget, **options}
    policy = jls.spikes(**numbers)
    skip, states = judged(policy, *(jnp.float32(x) for x in (losses, norms)))
    assert skip.any() == (budget != 0)
    for i, pairs in enumerate(zip(losses, norms, strict=True)):
        signals = [tuple(map(float, np.float32(x))) for x in zip(*pairs, strict=True)]
        expected = list(reference.spikes(signals, **numbers))
        columns = (skip[i], states.found[i], states.tokens[i])
        ours = zip(*(x.tolist() for x in columns), strict=True)
        for step, rule in zip(ours, expected, strict=True):
            assert step == pytest.approx(rule, abs=1e-4)


def test_norm_alone_is_judged_where_no_loss_is_given():
    norms = noise(np.random.default_rng(1), 200)
    policy = jls.spikes(window=8, sigmas=3.0)
    state, ours = policy.init(), []
    judge = jax.jit(policy.judge)
    for norm in norms:
        state, skip = judge(state, None, jnp.float32(norm))
        ours.append(bool(skip))
    signals = [(None, float(np.float32(norm))) for norm in norms]
    rule = [skip for skip, *_ in reference.spikes(signals, window=8, sigmas=3.0)]
    assert ours == rule
    assert any(ours)
    assert state.kept[0] == 0
    assert (state.value[LOSS], state.limit[LOSS]) == (0.0, math.inf)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 5, 16, 128]),
    st.sampled_from([1, 2, 4, 7]),
    st.floats(0.0, 1.0),
)
def test_of_any_steps_no_more_are_skipped_than_the_budget_allows(
    seed, window, budget, eagerness
):
    """An adversary sees the state, and spikes as often and as far as it likes."""
    budget = min(budget, max(window, 4))
    policy = jls.spikes(window=window, sigmas=2.0, budget=budget)
    count = 600
    skip = adversary(policy, jax.random.key(seed), count, eagerness)
    total = np.concatenate([[0], np.cumsum(skip)])
    # Of the steps from i to j.
    i, j = np.triu_indices(count + 1, 1)
    assert np.all(total[j] - total[i] <= budget + (j - i) * budget / window + 1e-3)


@functools.partial(jax.jit, static_argnames="count")
def adversary(policy, key, count, eagerness):
    def step(state, key):
        keys = jax.random.split(key, 3)
        above = state.limit[NORM] * (1 + jax.random.exponential(keys[0]))
        normal = jax.random.uniform(keys[1])
        norm = jnp.where(jax.random.uniform(keys[2]) < eagerness, above, normal)
        norm = jnp.where(jnp.isfinite(norm), norm, 1.0)
        return policy.judge(state, None, norm)

    return jax.lax.scan(step, policy.init(), jax.random.split(key, count))[1]


def test_the_whole_budget_can_be_spent_at_once():
    sizes = [1.0] * 16 + [1e3 * 10.0**i for i in range(4)]
    skip = skips(jls.spikes(window=16, budget=3), np.ones(20), sizes)
    assert skip[16:].tolist() == [True, True, True, False]


@pytest.mark.parametrize("power", [-80, -30, 30, 80])
def test_norms_times_a_power_of_two_change_no_decision(power):
    rng = np.random.default_rng(2)
    losses, norms = np.ones(300), noise(rng, 300).astype(np.float32)
    policy = jls.spikes(window=16, sigmas=3.0)
    plain = skips(policy, losses, norms)
    assert plain.any()
    np.testing.assert_array_equal(plain, skips(policy, losses, norms * 2.0**power))


def test_a_value_at_or_below_the_mean_is_never_over_its_limit():
    rng = np.random.default_rng(3)
    signals = jnp.float32(noise(rng, (2, 20, 200)))
    _, states = judged(
        jls.spikes(window=8, sigmas=1e-3, budget=None), signals[0] - 3, signals[1]
    )
    seen = np.asarray(states.seen, np.float64)[:, 7:-1]  # windows that are full
    for row in (LOSS, NORM):
        value = np.asarray(states.value)[:, 8:, row]
        limit = np.asarray(states.limit)[:, 8:, row]
        is_full = np.asarray(states.kept)[:, 7:-1, row] >= 8
        is_low = is_full & (value < seen[:, :, row].mean(-1) - 1e-5)
        assert is_low.any()
        assert not (value > limit)[is_low].any()


def test_a_constant_loss_may_rise_by_one_unit_of_bfloat16():
    steady = [2.0] * 128
    risen = 2.0 + 2.0**-6  # bfloat16 has 8 bits
    assert not skips(jls.spikes(), [*steady, risen], np.ones(129)).any()
    assert skips(jls.presets.maxtext_spikes(), [*steady, risen], np.ones(129))[-1]
    assert skips(jls.spikes(), [*steady, 2.2], np.ones(129))[-1]


def test_a_signal_that_is_0_throughout_is_not_judged():
    assert not skips(jls.spikes(window=8), [*np.zeros(8), 1e-3], np.ones(9)).any()


def test_negative_losses_are_judged_upwards_alone():
    losses = [*(-3.0 + 0.01 * np.arange(16) % 0.05), -2.0, -30.0]
    skip = skips(jls.spikes(window=16), losses, np.ones(18))
    np.testing.assert_array_equal(np.nonzero(skip)[0], [16])


@pytest.mark.parametrize("factor", [50.0, 1e6])
def test_a_new_level_costs_the_budget_and_is_learnt(factor):
    rng = np.random.default_rng(4)
    levels = np.where(np.arange(1000) < 200, 1.0, factor)
    norms = levels * rng.normal(1.0, 0.05, 1000)
    skip = skips(jls.spikes(), np.ones(1000), norms)
    assert 1 <= skip.sum() <= 4
    assert not skip[300:].any()
    down = skips(jls.spikes(), np.ones(1000), norms[::-1].copy())
    assert not down.any()


def test_a_second_spike_is_seen_behind_a_first():
    norms = np.random.default_rng(5).normal(1.0, 0.1, 200)
    norms[[150, 160, 190]] = 50.0, 26.0, 5.0
    assert np.nonzero(skips(jls.spikes(), np.ones(200), norms))[0].tolist() == [
        150,
        160,
        190,
    ]
    theirs = skips(jls.presets.levanter_spikes(), np.ones(200), norms)
    assert np.nonzero(theirs)[0].tolist() == [150]


STEADY = {
    "normal": (lambda rng, shape: 10 + rng.normal(size=shape), 0.0005),
    "lognormal 0.6": (lambda rng, shape: rng.lognormal(0, 0.6, shape), 0.008),
    "lognormal 1": (lambda rng, shape: rng.lognormal(0, 1, shape), 0.02),
    "Pareto 2.5": (lambda rng, shape: 1 + rng.pareto(2.5, shape), 0.028),
}


@pytest.mark.parametrize("name", STEADY)
def test_false_alarms_on_steady_noise_are_rare_and_never_called_spiking(name):
    draw, most = STEADY[name]
    rng = np.random.default_rng(6)
    losses, norms = draw(rng, (20, 2000)), draw(rng, (20, 2000))
    skip, states = judged(jls.spikes(), jnp.float32(losses), jnp.float32(norms))
    assert np.mean(skip) <= most
    found = np.asarray(states.found, float)
    steps = np.arange(1, 2001)
    share = np.asarray(states.steady_share)
    assert np.all(found - 2 * np.sqrt(found) <= share * steps)


def test_count_of_kept_values_never_overflows():
    policy = jls.spikes(window=2)
    _, states = judged(policy, jnp.ones((1, 50)), jnp.ones((1, 50)))
    assert states.kept.max() < 4
    assert states.kept[0, -1].tolist() in ([2, 2], [3, 3])


# In the optimizer.


def test_a_spike_is_skipped_bit_for_bit_counted_and_named(jit_or_eager):
    optimizer = guarded(jls.spikes(window=8))
    made = run(optimizer, [1.0, 1.1, 0.9, 1.0, 50.0, 1.0], jit=jit_or_eager)
    before, spike, after = made[3:]
    assert_identical(before[0], spike[0])
    assert_identical(before[1].inner_state, spike[1].inner_state)
    state = spike[1]
    assert not state.applied
    assert (state.spikes, state.skips, state.consecutive_skips) == (1, 1, 1)
    assert state.last_skip_reason == SkipReason.SPIKE
    assert (state.nonfinite_losses, state.nonfinite_updates) == (0, 0)
    assert not state.nonfinite_leaves.any()
    assert state.spike_state.value[NORM] == pytest.approx(50)
    assert after[1].applied


def test_the_loss_is_judged_too():
    losses = [1.0] * 8 + [9.0, 1.0]
    made = run(guarded(jls.spikes(window=8)), [1.0] * 10, losses)
    assert [bool(state.applied) for _, state in made] == [True] * 8 + [False, True]


def test_a_spike_is_no_overflow_for_the_scaler():
    optimizer = jls.loss_scaled(
        optax.sgd(0.1), jls.dynamic(8.0, growth_interval=5), spikes=jls.spikes(window=4)
    )
    made = run(optimizer, [1.0, 1.0, 1.0, 1.0, 50.0])
    assert not made[-1][1].applied
    assert jls.loss_scale(made[-1][1]) == 16  # the fifth finite step


def test_steps_that_are_not_finite_change_no_other_decision(jit_or_eager):
    rng = np.random.default_rng(7)
    sizes, losses = noise(rng, 40), noise(rng, 40)
    optimizer = guarded(jls.spikes(window=8, sigmas=3.0))
    plain = run(optimizer, sizes, losses, jit=jit_or_eager)
    at = np.sort(rng.integers(0, 40, 12))
    bad = rng.choice([np.nan, np.inf, -np.inf], 12)
    which = rng.random(12) < 0.5
    more = run(
        optimizer,
        np.insert(sizes, at, np.where(which, bad, 1.0)),
        np.insert(losses, at, np.where(which, 1.0, bad)),
        jit=jit_or_eager,
    )
    spike = SkipReason.SPIKE
    kept = [x for x in more if x[1].applied or x[1].last_skip_reason == spike]
    assert len(kept) == 40
    assert plain[-1][1].spikes > 0
    for (params, state), (others, other) in zip(plain, kept, strict=True):
        assert_identical(params, others)
        assert_identical(state.spike_state, other.spike_state)
        assert state.applied == other.applied


def test_jit_eager_scan_and_vmap_decide_alike():
    rng = np.random.default_rng(8)
    sizes, losses = noise(rng, 60), noise(rng, 60)
    optimizer = guarded(jls.spikes(window=8, sigmas=3.0))

    def decisions(made):
        return [bool(state.applied) for _, state in made]

    jitted = decisions(run(optimizer, sizes, losses))
    assert False in jitted
    assert jitted == decisions(run(optimizer, sizes, losses, jit=lambda f: f))

    def step(carry, signals):
        params, state = carry
        size, loss = signals
        grads = size * jnp.array([0.6, 0.8])
        updates, state = optimizer.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), state.applied

    def scanned(sizes, losses):
        return jax.lax.scan(step, (W, optimizer.init(W)), (sizes, losses))[1]

    pair = jnp.float32(sizes), jnp.float32(losses)
    assert jax.jit(scanned)(*pair).tolist() == jitted
    two = jax.vmap(scanned)(*(jnp.stack([x, x[::-1]]) for x in pair))
    assert two[0].tolist() == jitted
    assert two[1].tolist() == scanned(*(x[::-1] for x in pair)).tolist()


def test_one_trace_serves_a_run_with_donation():
    optimizer = guarded(jls.spikes(window=4))

    @chex.assert_max_traces(n=1)
    def step(params, state, grads, loss):
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params, state = jnp.ones(2), optimizer.init(jnp.ones(2))
    for size in [1.0, 1.0, 1.0, 50.0, jnp.nan, 1.0]:
        params, state = step(params, state, jnp.full(2, size), jnp.float32(1.0))
    assert (state.spikes, state.skips) == (1, 2)


@pytest.mark.parametrize("size", [1e25, 3e38])
def test_a_norm_that_overflows_is_a_spike(size, jit_or_eager):
    optimizer = guarded(
        jls.spikes(window=4), optax.chain(optax.clip_by_global_norm(1.0))
    )
    made = run(optimizer, [1.0, 1.0, 1.0, size, 1.0], jit=jit_or_eager)
    assert [bool(state.applied) for _, state in made] == [True] * 3 + [False, True]
    assert all(bool(jls.all_finite(state.spike_state.seen)) for _, state in made)


def test_a_norm_that_overflows_and_is_let_through_stays_out_of_the_window():
    made = run(
        guarded(jls.spikes(window=4, budget=0)), [1.0, 1.0, 1.0, 1e25, 1.0, 50.0]
    )
    states = [state.spike_state for _, state in made]
    assert states[3].value[NORM] == math.inf
    np.testing.assert_allclose(states[-1].seen[1], [50, 1, 1, 1], rtol=1e-6)
    assert states[-1].found == 2


def test_budget_0_counts_and_skips_nothing():
    made = run(guarded(jls.spikes(window=8, budget=0)), [1.0] * 8 + [50.0, 1.0, 50.0])
    state = made[-1][1]
    assert (state.skips, state.spikes, state.spike_state.found) == (0, 0, 1)
    made = run(guarded(jls.spikes(window=8, budget=0)), [1.0] * 8 + [50.0, 1.0, 1e4])
    assert made[-1][1].spike_state.found == 2


def test_max_norm_holds_from_the_first_step():
    made = run(guarded(jls.spikes(window=8, max_norm=10.0)), [11.0, 9.0])
    assert [bool(state.applied) for _, state in made] == [False, True]


@pytest.mark.parametrize("check_updates", [False, True])
def test_nonfinite_updates_leave_the_policy_alone(check_updates):
    def update(updates, state, params=None):
        return jax.tree.map(lambda x: jnp.where(x > 3, jnp.inf, x), updates), state

    inner = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    optimizer = jls.skip_nonfinite(
        inner, check_updates=check_updates, spikes=jls.spikes(window=4)
    )
    made = run(optimizer, [1.0, 1.0, 1.0, 1.0, 50.0, 1.0])
    spike = made[4][1]
    assert spike.last_skip_reason == SkipReason.SPIKE
    assert (spike.spikes, spike.nonfinite_updates) == (1, 0)
    if check_updates:
        optimizer = jls.skip_nonfinite(
            inner, check_updates=True, spikes=jls.spikes(window=4, budget=0)
        )
        made = run(optimizer, [1.0, 1.0, 1.0, 1.0, 50.0])
        assert made[-1][1].last_skip_reason == SkipReason.UPDATES
        assert_identical(made[3][1].spike_state, made[4][1].spike_state)


def test_what_an_outer_chain_spoils_leaves_the_policy_alone():
    optimizer = optax.chain(
        jls.skip_nonfinite(
            optax.sgd(1.0), spikes=jls.spikes(window=4), check_updates=True
        ),
        optax.scale(1e38),
    )
    params = jnp.ones(2)
    state = optimizer.init(params)
    new_params, new, report = jls.apply_gradients(
        optimizer, jnp.full(2, 1e6), state, params
    )
    assert report.skip_reason == SkipReason.UPDATES
    assert_identical(new_params, params)
    assert_identical(new[0].spike_state, state[0].spike_state)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("check_updates", [False, True])
def test_everything_inside_is_rolled_back(check_updates):
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    inner = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(schedule), jls.params_ema(0.9)
    )
    optimizer = jls.loss_scaled(
        optax.MultiSteps(inner, 2),
        check_updates=check_updates,
        spikes=jls.spikes(window=4),
    )
    made = run(optimizer, [1.0, 1.0, 1.0, 1.0, 1.0, 50.0, 1.0])
    (params, before), (others, after), (_, later) = made[4:]
    assert after.last_skip_reason == SkipReason.SPIKE
    assert_identical(params, others)
    assert_identical(before.inner_state, after.inner_state)
    assert later.inner_state.gradient_step == 3


# In `train_step`.


def batch_loss(params, x):
    return jnp.mean(x * params.sum() ** 2)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("drop", ["step", "micro_batch"])
def test_train_step_decides_on_the_whole_step(micro_batches, drop):
    optimizer = jls.loss_scaled(
        optax.sgd(1e-3), jls.dynamic(8.0), spikes=jls.spikes(window=4)
    )
    step = jax.jit(
        jls.train_step(batch_loss, optimizer, micro_batches=micro_batches, drop=drop)
    )
    params, state, good = W, optimizer.init(W), jnp.ones(8)
    # One example of many that is out of line: its micro-batch alone would be a spike.
    mild, wild = good.at[3].set(1.05), good.at[3].set(100.0)
    skipped = []
    for batch in [good, good, good, good, mild, wild, good]:
        params, state, report = step(params, state, batch)
        skipped.append(bool(report.skipped))
    assert skipped == [False] * 5 + [True, False]
    assert report.limit_norm < math.inf
    assert report.dropped == 0


def test_train_step_rolls_back_what_is_carried_and_reports_limits():
    optimizer = jls.skip_nonfinite(optax.sgd(1e-3), spikes=jls.spikes(window=4))

    def loss_fn(params, carried, x):
        return batch_loss(params, x), {"mean": 0.5 * carried["mean"] + x.mean()}

    step = jax.jit(jls.train_step(loss_fn, optimizer, carried=True))
    params, state, carried = W, optimizer.init(W), {"mean": jnp.float32(0)}
    for _ in range(5):
        params, state, carried, report = step(params, state, carried, jnp.ones(4))
    assert report.limit_loss == state.spike_state.limit[LOSS]
    after = step(params, state, carried, jnp.full(4, 100.0))
    assert after[3].skip_reason == SkipReason.SPIKE
    assert_identical((params, carried), (after[0], after[2]))
    assert after[3].loss > after[3].limit_loss


def test_report_has_no_limits_without_a_policy_of_jls():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    _, _, report = jls.apply_gradients(optimizer, W, optimizer.init(W), W)
    assert report.limit_loss is None
    assert report.limit_norm is None


# Policies of one's own.


def loss_judge(state, loss, norm):
    return jnp.minimum(state, loss), loss > 3 * state


def threshold_judge(state, loss, norm):
    """A threshold of each run, that only steps that are kept raise."""
    return state, norm > state["most"]


def test_a_policy_may_use_the_loss_alone():
    policy = SpikePolicy(lambda: jnp.float32(jnp.inf), loss_judge)
    made = run(guarded(policy), [1.0] * 4, [1.0, 2.0, 4.0, 2.5])
    assert [bool(state.applied) for _, state in made] == [True, True, False, True]
    assert made[-1][1].spikes == 1
    metrics = jls.metrics(made[-1][1], host=True)
    assert metrics["spikes"] == 1
    assert "judged_norm" not in metrics


def test_a_policy_may_have_a_threshold_for_each_run_of_a_vmap():
    policy = SpikePolicy(lambda: {"most": jnp.float32(10.0)}, threshold_judge)
    optimizer = guarded(policy)
    state = jax.vmap(
        lambda most: optimizer.init(W)._replace(spike_state={"most": most})
    )(jnp.array([1.0, 100.0]))
    grads = jnp.array([6.0, 8.0])
    _, state = jax.vmap(lambda state: optimizer.update(grads, state, W))(state)
    assert state.applied.tolist() == [False, True]


def test_a_policy_that_freezes_is_called_stalled():
    made = run(guarded(jls.presets.spike_limit(2.0)), [3.0] * 60)
    health = jls.health(made[-1][1])
    assert health.verdict == "stalled"
    assert "the last one as a spike" in health.sentence
    policy = SpikePolicy(lambda: {"most": jnp.float32(1.0)}, threshold_judge)
    assert jls.health(run(guarded(policy), [3.0] * 60)[-1][1]).verdict == "stalled"


@pytest.mark.parametrize(
    ("judge", "error", "words"),
    [
        (lambda s, loss, norm: ((s, s), norm > 1), ValueError, "keep its structure"),
        (lambda s, loss, norm: (s[None], norm > 1), ValueError, "keep its shapes"),
        (lambda s, loss, norm: (s > 0, norm > 1), ValueError, "kinds of numbers"),
        (
            lambda s, loss, norm: (s, norm),
            TypeError,
            r"whether to skip, one boolean, got \(float32\[\], float32\[\]\)\. Write",
        ),
        (
            lambda s, loss, norm: norm > 1,
            TypeError,
            r"boolean, got bool\[\]\. Write ret",
        ),
        (
            lambda s, loss, norm: (norm > 1, s),
            TypeError,
            r"got \(bool\[\], float32\[\]",
        ),
        (lambda s, loss, norm: (s, jnp.ones(2) > 0), ValueError, "shape"),
    ],
)
def test_a_policy_that_breaks_the_rules_is_refused(judge, error, words, jit_or_eager):
    optimizer = guarded(SpikePolicy(lambda: jnp.float32(1.0), judge))
    with pytest.raises(error, match=words):
        jit_or_eager(optimizer.update)(W, optimizer.init(W), W)


def test_numbers_of_a_first_state_become_strong_arrays():
    policy = SpikePolicy(lambda: (1.0, 2), lambda s, loss, norm: (s, norm > s[0]))
    state = guarded(policy).init(W)
    assert all(not x.weak_type for x in jax.tree.leaves(state.spike_state))
    run(guarded(policy), [1.0, 2.0])


def test_a_policy_may_have_no_state():
    policy = SpikePolicy(tuple, lambda state, loss, norm: (state, norm > 2))
    optimizer, plain = guarded(policy), guarded(None)
    state = run(optimizer, [1.0, 3.0, 1.0])[-1][1]
    assert state.spikes == 1
    again = jls.upgrade_state(optimizer.init(W), state._asdict())
    assert_identical(again, state)
    with pytest.raises(ValueError, match="made without spikes="):
        optimizer.update(W, plain.init(W), W)
    with pytest.raises(ValueError, match="but the optimizer has none"):
        plain.update(W, state, W)
    with pytest.raises(ValueError, match="target has none"):
        jls.upgrade_state(plain.init(W), state._asdict())


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"window": 1}, ValueError, "window must be from 2"),
        ({"window": 8.5}, TypeError, "window must be an integer"),
        ({"sigmas": 0.0}, ValueError, "sigmas must be finite and > 0"),
        ({"sigmas": math.inf}, ValueError, "sigmas must be finite and > 0"),
        ({"sigmas": math.nan}, ValueError, "sigmas must be finite and > 0"),
        ({"budget": 0.5}, ValueError, "budget must be 0, or >= 1, or None, got 0.5"),
        (
            {"budget": -1},
            ValueError,
            "budget must be 0, or >= 1, or None (as float32), got -1",
        ),
        ({"budget": "4"}, TypeError, "budget"),
        (
            {"budget": 500},
            ValueError,
            "budget must be at most window, 128, or None for no bound, got 500. It "
            "comes back once in each window: write budget=4.",
        ),
        ({"budget": 17, "window": 16}, ValueError, "at most window, 16, or None"),
        ({"warmup": 1}, ValueError, "warmup must be from 2 to window, 128, got 1"),
        ({"warmup": 129}, ValueError, "warmup must be from 2 to window, 128, got 129"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be > 0, or None"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be > 0, or None"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
        jls.spikes(**arguments)


def test_budget_of_inf_is_none():
    assert jls.spikes(budget=math.inf).hyperparameters["budget"] == math.inf
    assert jls.spikes(budget=None).hyperparameters["budget"] == math.inf


@pytest.mark.parametrize("value", [True, jls.spikes, 4, {"window": 3}, "levanter"])
def test_spikes_must_be_a_policy(value):
    with pytest.raises(TypeError, match=r"spikes must be a jls.types.SpikePolicy"):
        jls.loss_scaled(optax.sgd(0.1), spikes=value)


def test_hyperparameters_change_without_a_retrace():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def judge(policy, state, norm):
        return policy.judge(state, None, norm)

    state = jls.spikes(window=8).init()
    judge(jls.spikes(window=8, sigmas=6.0), state, 1.0)
    judge(jls.spikes(window=8, sigmas=7.0, budget=None, max_norm=3.0), state, 1.0)


def test_repr_says_what_made_it():
    policy = jls.spikes(window=8, budget=2)
    assert repr(policy).startswith("spikes(budget=2, window=8, sigmas=6")
    assert "SpikePolicy(init=" in repr(SpikePolicy(lambda: (), loss_judge))


# Without and with a policy.


def test_without_a_policy_nothing_is_kept():
    state = jls.loss_scaled(optax.sgd(0.1)).init(W)
    assert (state.spikes, state.spike_state) == ((), ())
    assert "spikes" not in jls.metrics(state)
    assert "spikes" not in repr(state)


def test_state_is_small_and_shares_no_buffer():
    state = guarded(jls.spikes()).init(W)
    assert sum(x.nbytes for x in jax.tree.leaves(state.spike_state)) <= 2048
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_a_state_made_with_other_spikes_is_refused_with_what_to_write():
    plain, policy = guarded(None), guarded(jls.spikes(window=4))
    with pytest.raises(ValueError, match=r"made without spikes=.*upgrade_state"):
        policy.update(W, plain.init(W), W)
    state = jls.upgrade_state(policy.init(W), plain.init(W))
    policy.update(W, state, W)
    with pytest.raises(ValueError, match=r"_replace\(spikes=\(\), spike_state=\(\)\)"):
        plain.update(W, policy.init(W), W)
    plain.update(W, policy.init(W)._replace(spikes=(), spike_state=()), W)
    limit, longer = guarded(jls.presets.spike_limit(9.0)), guarded(jls.spikes(window=8))
    for other in (limit, longer):
        with pytest.raises(ValueError, match=r"another spike policy.*new warm-up"):
            policy.update(W, other.init(W), W)
    dropped = limit.init(W)._replace(spikes=(), spike_state=())
    policy.update(W, jls.upgrade_state(policy.init(W), dropped), W)


def test_a_run_that_froze_goes_on_under_a_smaller_budget():
    """As `health` advises of "stalled": its tokens, here inf, must not stay."""
    policy = jls.spikes(window=8, budget=None)
    frozen = run(guarded(policy), [1.0] * 8 + [50.0] * 60)[-1][1]
    assert frozen.consecutive_skips == 60
    optimizer = guarded(jls.spikes(window=8))
    state, applied = jls.upgrade_state(optimizer.init(W), frozen), []
    for _ in range(6):
        _, state = optimizer.update(jnp.array([30.0, 40.0]), state, W)
        applied.append(bool(state.applied))
    assert applied == [False] * 4 + [True] * 2


# What is said.


def test_metrics_have_what_was_judged():
    made = run(guarded(jls.spikes(window=4)), [1.0, 1.0, 1.0, 50.0], [2.0] * 4)
    metrics = jls.metrics(made[-1][1], host=True)
    assert metrics["spikes"] == metrics["spikes_found"] == 1
    assert metrics["judged_norm"] == pytest.approx(50)
    assert metrics["limit_norm"] == pytest.approx(1 + 6 / 512)
    assert metrics["judged_loss"] == 2.0
    assert metrics["limit_loss"] == pytest.approx(2 + 12 / 512)
    first = jls.metrics(run(guarded(jls.spikes(window=4)), [1.0])[0][1])
    assert first["limit_norm"] == first["limit_loss"] == math.inf


def test_health_names_the_spike_and_its_limit():
    made = run(guarded(jls.spikes(window=4)), [1.0, 1.0, 1.0, 50.0, 1.0], [2.0] * 5)
    spike, later = (jls.health(state) for _, state in made[3:])
    assert str(spike) == (
        "spike: the last step was skipped: its gradient norm of 50 was over the limit "
        "of\n1.012 (1 of 4 steps so far). What to do: "
        "docs/questions/healthy_run.md#spiking."
    )
    assert later.verdict == "ok"
    assert "Spikes: 1 found, 1 skipped" in later.sentence
    assert spike.safe_to_save
    both = run(guarded(jls.spikes(window=4)), [1.0] * 3 + [50.0], [2.0] * 3 + [9.0])
    sentence = jls.health(both[-1][1]).sentence
    assert "its loss of 9 was over" in sentence
    assert "its gradient norm of 50 was over" in sentence


def unstable(kind, rng):
    """Norms of a run that gets worse from step 100 on."""
    sizes, later = rng.normal(1.0, 0.05, 400), np.arange(300)
    if kind == "diverges":
        sizes[100:] *= 1.3 ** np.minimum(later, 150)
    elif kind == "doubles every fourth step":
        sizes[100:] *= 2.0 ** np.minimum(later // 4, 60)
    else:
        sizes[100:] *= np.exp(np.minimum(np.cumsum(rng.normal(0.3, 0.8, 300)), 60))
    return sizes


@pytest.mark.parametrize("kind", ["diverges", "doubles every fourth step", "wanders"])
def test_health_says_spiking_of_a_run_that_gets_worse(kind):
    sizes = unstable(kind, np.random.default_rng(9))
    health = jls.health(run(guarded(jls.spikes()), sizes)[-1][1])
    assert health.verdict == "spiking"
    assert "more than noise alone explains" in health.sentence
    few = [*np.random.default_rng(9).normal(1.0, 0.05, 100), 50.0, 1.0]
    assert jls.health(run(guarded(jls.spikes(window=16)), few)[-1][1]).verdict == "ok"


# Draws that do not change their nature, so that none of them is unstable.
UNCHANGING = {
    "normal": lambda rng, shape: rng.normal(1.0, 0.1, shape),
    "student": lambda rng, shape: np.abs(rng.standard_t(2, shape)),
    "cauchy": lambda rng, shape: np.abs(rng.standard_cauchy(shape)),
    "pareto": lambda rng, shape: 1 + rng.pareto(0.5, shape),
    "lognormal": lambda rng, shape: np.exp(4 * rng.normal(size=shape)),
    "one in 12": lambda rng, shape: np.where(rng.random(shape) < 0.08, 100.0, 1.0),
    "one in 33": lambda rng, shape: np.where(rng.random(shape) < 0.03, 100.0, 1.0),
}
POLICIES = {
    "default": jls.spikes(),
    "window 16": jls.spikes(window=16),
    "budget 8": jls.spikes(budget=8),
    "no budget": jls.spikes(budget=None),
    "no budget, window 16": jls.spikes(window=16, budget=None),
    "counts": jls.spikes(budget=0),
    "olmo": jls.presets.olmo_spikes(),
    "3 sigmas": jls.spikes(window=64, sigmas=3.0),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.more] * ("window 16" in name))
        for name in POLICIES
    ],
)
def test_no_steady_run_is_called_spiking(name):
    rng, runs, steps = np.random.default_rng(11), 8, 1500
    shape = (len(UNCHANGING) * runs, steps)
    signals = [
        jnp.float32(
            np.concatenate([draw(rng, (runs, steps)) for draw in UNCHANGING.values()])
        )
        for _ in range(2)
    ]
    skip, states = judged(POLICIES[name], *signals)
    skipped = np.cumsum(np.asarray(skip), axis=1)
    assert skipped.shape == shape
    for member in range(shape[0]):
        for step in (100, 400, steps - 1):
            facts = facts_of(states, skipped, (member, step))
            assert not facts.is_spiking, (list(UNCHANGING)[member // runs], step)


def facts_of(states, skipped, at):
    """What health knows of a run at a step."""
    counts = {
        "steps": at[1] + 1,
        "spikes": int(skipped[at]),
        "spikes_found": int(states.found[at]),
        "tokens": float(states.tokens[at]),
        "steady_share": float(states.steady_share[at]),
    }
    return Facts(**counts, is_static=True, min_scale=1.0, max_scale=1.0)


def test_spikes_that_were_skipped_prove_nothing_unless_they_enter_the_window():
    """The bound is for values and the mean of a window that they enter."""
    sizes = np.random.default_rng(9).normal(1.0, 0.05, 400)
    sizes[64::12] *= 1000 * 3.0 ** np.arange(28)
    state = run(guarded(jls.spikes(window=32)), sizes)[-1][1]
    health = jls.health(state)
    assert (health.verdict, int(state.spikes)) == ("ok", 28)
    assert "28 found, 28 skipped" in health.sentence
    entering = jls.presets.maxtext_spikes(32)
    assert jls.health(run(guarded(entering), sizes)[-1][1]).verdict == "spiking"


@pytest.mark.parametrize(
    "policy",
    [
        jls.spikes(window=2),
        jls.spikes(window=64, sigmas=1.0, budget=None),
        jls.spikes(window=64, budget=32, max_norm=1.1),
        SpikePolicy(lambda: jnp.float32(1.0), lambda s, loss, norm: (s, norm > s)),
    ],
)
def test_health_says_skipping_where_much_is_thrown_away(policy):
    sizes = np.random.default_rng(3).normal(1.0, 0.3, 200)
    losses = np.random.default_rng(4).normal(1.0, 0.3, 200)
    optimizer = guarded(policy)
    state = run(optimizer, [*sizes, 0.1], [*losses, 0.1])[-1][1]
    health = jls.health(state, optimizer=optimizer)
    assert (health.verdict, bool(state.applied)) == ("skipping", True)
    assert f"{state.spikes} as spikes." in health.sentence
    with pytest.raises(jls.UnhealthyError):
        jls.health(state, raise_if=["skipping"])


@pytest.mark.parametrize("window", [8, 16, 128])
def test_a_policy_that_skips_little_is_no_reason_to_say_skipping(window):
    sizes = np.random.default_rng(3).normal(1.0, 0.3, 200)
    sizes[50::20] = 60.0  # one in twenty
    health = jls.health(run(guarded(jls.spikes(window=window)), sizes)[-1][1])
    assert health.verdict == "ok"


def test_a_loss_beyond_float32_was_given_all_the_same(jit_or_eager):
    with jax.enable_x64(True):
        policy, norm = jls.spikes(window=4), jnp.float32(1.0)
        judge, state = jit_or_eager(policy.judge), policy.init()
        optimizer = guarded(policy)
        for _ in range(5):
            state, _ = judge(state, jnp.float64(1e300), norm)
        given = optimizer.init(W)._replace(spike_state=state, steps=jnp.int32(5))
        assert "value=loss" not in jls.health(given).sentence
        untold = state._replace(value=state.value.at[LOSS].set(0.0))
        untold = given._replace(spike_state=untold)
        assert "pass value=loss" in jls.health(untold).sentence


@pytest.mark.parametrize("window", [2, 3, 4, 8])
def test_small_windows_are_not_called_spiking(window):
    norms = np.random.default_rng(10).normal(1.0, 0.1, (20, 500))
    _, states = judged(
        jls.spikes(window=window), jnp.ones((20, 500)), jnp.float32(norms)
    )
    found, steps = np.asarray(states.found, float), np.arange(1, 501)
    share = np.asarray(states.steady_share)
    assert np.all(found - 2 * np.sqrt(found) <= share * steps)


def test_health_says_that_the_budget_is_spent():
    sizes = [1.0] * 8 + [50.0, 60.0, 70.0, 80.0, 90.0]
    state = run(guarded(jls.spikes(window=8)), sizes)[-1][1]
    health = jls.health(state)
    assert (health.verdict, state.spikes) == ("ok", 4)
    assert "The budget is spent" in health.sentence


def test_health_claims_nothing_of_a_policy_of_the_users():
    policy = SpikePolicy(lambda: {"most": jnp.float32(2.0)}, threshold_judge)
    made = run(guarded(policy), [1.0, 3.0] * 20)
    assert jls.health(made[-1][1]).verdict == "spike"
    assert "the spike policy wanted it" in jls.health(made[-1][1]).sentence


def test_health_says_that_no_loss_was_ever_given():
    made = run(guarded(jls.spikes(window=4)), [1.0] * 5)
    assert "pass value=loss" in jls.health(made[-1][1]).sentence
    made = run(guarded(jls.spikes(window=4)), [1.0] * 5, [1.0] * 5)
    assert "value=loss" not in jls.health(made[-1][1]).sentence
    made = run(guarded(jls.presets.spike_limit(9.0)), [1.0] * 5)
    assert "value=loss" not in jls.health(made[-1][1]).sentence


def test_a_spike_at_the_floor_is_not_taken_for_an_overflow():
    scaler = jls.dynamic(1.0, growth_interval=1000)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler, spikes=jls.spikes(window=4))
    made = run(optimizer, [1.0, 1.0, 1.0, 50.0])
    assert jls.health(made[-1][1], optimizer=optimizer).verdict == "spike"


def test_history_counts_spikes_and_marks_them_apart():
    history = jls.History()
    sizes = [1.0, 1.0, 1.0, 50.0, jnp.nan, 1.0]
    for _, state in run(guarded(jls.spikes(window=4)), sizes):
        history.append(jls.metrics(state), loss=1.0, global_norm=1.0)
    assert "2 of 6 steps (33.3%), up to 2 in a row; 1 spike among" in history.summary()
    labels = history.plot().axes[0].get_legend_handles_labels()[1]
    assert "skipped steps (1)" in labels
    assert "skipped spikes (1)" in labels
    reports = jls.History()
    for skipped, reason in [(False, 0), (True, 4), (True, 1)]:
        reports.append({"skipped": skipped, "skip_reason": reason, "loss": 1.0})
    labels = reports.plot().axes[0].get_legend_handles_labels()[1]
    assert "skipped spikes (1)" in labels


def test_processes_compare_the_scalars_of_the_policy():
    state = guarded(jls.spikes(window=4)).init(W)
    jls.check_in_sync(state)
    compared = set(_scalars(state))
    assert {"spikes", "spike_state/tokens", "spike_state/found"} <= compared


# The audit.


def right_step(policy):
    optimizer = jls.skip_nonfinite(optax.sgd(0.1, momentum=0.9), spikes=policy)
    step = jax.jit(jls.train_step(batch_loss, optimizer))
    return step, W, optimizer.init(W), jnp.ones(4)


def test_check_step_finds_a_right_step_right():
    check = jls.check_step(*right_step(jls.spikes(window=4)))
    check.raise_if_broken(not_tried="raise")
    assert "spike not skipped" not in check.not_applicable
    assert "spike not skipped  ok" in str(check)
    plain = jls.check_step(*right_step(None))
    assert "spike" not in str(plain)


def test_check_step_says_that_the_loss_is_missing():
    optimizer = jls.skip_nonfinite(
        optax.sgd(0.1, momentum=0.9), spikes=jls.spikes(window=4)
    )

    @jax.jit
    def step(params, state, x):
        grads = jls.grad(batch_loss)(state, params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    check = jls.check_step(step, W, optimizer.init(W), jnp.ones(4))
    check.raise_if_broken()
    assert "pass value=loss" in str(check)


def test_check_step_finds_statistics_that_are_thrown_away():
    optimizer = jls.skip_nonfinite(
        optax.sgd(0.1, momentum=0.9), spikes=jls.spikes(window=4)
    )

    @jax.jit
    def step(params, state, x):
        state = state._replace(spike_state=optimizer.init(params).spike_state)
        loss, grads = jls.value_and_grad(batch_loss)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    check = jls.check_step(step, W, optimizer.init(W), jnp.ones(4))
    assert check.broken == ("spike not skipped",)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (jls.spikes(window=4, budget=0), "no budget"),
        (jls.presets.spike_limit(1e9), "constant"),
        (SpikePolicy(lambda: jnp.float32(jnp.inf), loss_judge), "not one of jls"),
    ],
    ids=["budget 0", "limit", "own"],
)
def test_check_step_leaves_out_what_cannot_be_tried(policy, words):
    check = jls.check_step(*right_step(policy))
    check.raise_if_broken()
    assert words in check.not_tried["spike not skipped"]


def test_check_step_says_that_its_batch_is_a_spike():
    step, params, state, batch = right_step(jls.spikes(window=4))
    for _ in range(4):
        params, state, _ = step(params, state, batch)
    with pytest.raises(ValueError, match="the spike policy skipped it"):
        jls.check_step(step, params, state, 1e3 * batch)


def test_check_step_takes_a_limit_that_is_absolute():
    optimizer = jls.skip_nonfinite(
        optax.sgd(0.1), spikes=jls.presets.levanter_spikes(4)
    )

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(lambda params: 1e-7 * batch_loss(params, x))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    check = jls.check_step(step, W, optimizer.init(W), jnp.ones(4))
    assert "spike not skipped" not in check.broken


def test_check_step_takes_any_number_of_sigmas():
    check = jls.check_step(*right_step(jls.spikes(window=4, sigmas=1e6)))
    check.raise_if_broken(not_tried="raise")
    assert "spike not skipped" not in check.not_applicable
