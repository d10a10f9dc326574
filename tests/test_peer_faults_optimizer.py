# SPDX-License-Identifier: Apache-2.0
"""What went wrong in other optimizer wrappers does not go wrong here.

Also checkpoints, export, Flax and Equinox; see test_peer_faults.py.
"""

import importlib.util
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax
from peer_faults import INF, NAN, ONE, W, either
from shared import assert_identical, run

import jls

INNER = {
    "sgd": optax.sgd(0.5, momentum=0.9),
    "adamw": optax.adamw(0.5, weight_decay=0.1),
    "ema, decay and schedule": optax.chain(
        optax.ema(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda n: -0.5 / (1 + n)),
    ),
}


@pytest.mark.standard_promotion
@either
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_bad_steps_leave_no_trace_in_the_optimizer(jit, inner):
    """jmp J15, R6, R7, P1, P2, P3, P4a, R10: moments and windows kept the NaN."""
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    params, state = run(optimizer, W, [NAN, ONE, INF, ONE], jit)
    expected, expected_state = run(optimizer, W, [ONE, ONE], jit)
    assert_identical(params, expected)
    assert_identical(state.inner_state, expected_state.inner_state)
    assert jls.loss_scale(state) == 2.0


def test_skipped_updates_are_negative_zero():
    """Levanter P4a: 0 times NaN is NaN."""
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0))
    updates, _ = jax.jit(optimizer.update)(NAN, optimizer.init(W), W)
    assert_identical(updates, jnp.array([-0.0, -0.0]))


def test_no_number_of_bad_steps_gets_one_committed():
    """optax O1, R1: apply_if_finite gave in."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0, min_scale=2.0))
    params, state = run(optimizer, W, [NAN] * 50)
    assert_identical(params, W)
    assert state.consecutive_skips == 50
    params, state = run(optimizer, W, [NAN] * 50 + [ONE])
    assert params.tolist() == [0.5, -2.5]


def test_clean_step_after_a_collapse_of_the_scale_is_finite():
    """Keras K2: 127 NaN steps took the scale to 0, and then 0 / 0 the weight."""
    scaler = jls.dynamic(1.0, growth_interval=1, min_scale=2.0**-126)
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)

    @jax.jit
    def step(carry, factor):
        w, state = carry
        grads = jls.grad(lambda w: jnp.sum(w * factor))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), state.applied

    factors = jnp.array([jnp.nan] * 130 + [1.0])
    (w, _), applied = lax.scan(step, (W, optimizer.init(W)), factors)
    assert applied.tolist() == [False] * 130 + [True]
    assert w.tolist() == [0.5, -2.5]


def test_loss_that_is_not_finite_is_seen():
    """MPX M7: a NaN loss with finite gradients went unseen."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0, growth_interval=1))
    update = jax.jit(optimizer.update)
    updates, state = update(ONE, optimizer.init(W), W, value=jnp.float32(jnp.nan))
    assert_identical(updates, jnp.array([-0.0, -0.0]))
    assert state.nonfinite_losses == 1
    assert jls.loss_scale(state) == 8.0


@pytest.mark.standard_promotion
def test_a_run_traces_once():
    """jmp J5, F1, R3: the Python numbers of a first state cost a second trace."""
    traces = []
    optimizer = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0, growth_interval=2))

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = W, optimizer.init(W)
    for grads in (ONE, ONE, NAN, ONE, INF):
        params, state = step(params, state, grads)
    step(params, jls.set_loss_scale(state, 64), ONE)
    assert len(traces) == 1
    assert_identical(
        jax.tree.map(jnp.zeros_like, optimizer.init(W)),
        jax.tree.map(jnp.zeros_like, state),
    )


@pytest.mark.standard_promotion
@either
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "inner",
    [optax.adam(0.5), optax.adamw(0.5), optax.adam(0.5, mu_dtype=jnp.bfloat16)],
    ids=["adam", "adamw", "mu_dtype"],
)
def test_half_precision_gradients_keep_the_state_dtypes(jit, inner, dtype):
    """optax O2: apply_if_finite was a TypeError of lax.cond."""
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    grads = [ONE.astype(dtype), NAN.astype(dtype), ONE.astype(dtype)]
    params, state = run(optimizer, W, grads, jit)
    for new, old in zip(
        jax.tree.leaves(state), jax.tree.leaves(optimizer.init(W)), strict=True
    ):
        assert new.dtype == old.dtype
    assert state.skips == 1
    assert jnp.all(params < W)


@either
def test_inner_optimizer_that_changes_its_state_is_named(jit):
    """optax O5: monitor changes the structure of its state at the first update."""
    inner = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, (1.0,)))
    with pytest.raises(ValueError, match="optimizer's state must keep its structure"):
        run(jls.loss_scaled(inner, jls.dynamic(8.0)), W, [ONE], jit)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("size", [4, 1000])
def test_clipping_inside_sees_float32_gradients(size):
    """optax O6, R8: squares overflowed in float16, the update was a finite 0."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    w = jnp.zeros(size)
    params, state = run(optimizer, w, [jnp.full(size, 300.0, jnp.float16)])
    np.testing.assert_allclose(params, -(size**-0.5), rtol=1e-6)
    assert state.applied


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "mask", [optax.clip(1.0), optax.zero_nans(), optax.clip_by_global_norm(1.0)]
)
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_what_hides_an_overflow_inside_does_not_hide_it_from_the_wrapper(mask, bad):
    """optax O7, R8: clip made 1 of an inf, zero_nans 0 of a NaN, and nobody knew."""
    optimizer = jls.loss_scaled(optax.chain(mask, optax.sgd(1.0)), jls.dynamic(8.0))
    params, state = run(optimizer, W, [bad])
    assert_identical(params, W)
    assert state.skips == 1
    assert jls.loss_scale(state) == 4.0


@pytest.mark.standard_promotion
def test_accumulated_gradients_are_true_across_a_change_of_scale():
    """optax O9: micro-gradients under 1024 and 2048 summed and divided by 2048."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    optimizer = jls.loss_scaled(inner, jls.dynamic(1024.0, growth_interval=1))

    @jax.jit
    def step(w, state):
        grads = jls.grad(jnp.sum)(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w, state = step(*step(W, optimizer.init(W)))
    assert jls.loss_scale(state) == 4096.0
    assert w.tolist() == [0.0, -3.0]


@pytest.mark.standard_promotion
def test_accumulation_inside_recovers_from_a_bad_micro_batch():
    """optax O10, R2: the accumulator kept the NaN, or the params never moved again."""
    inner = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    micro_batches = [ONE, NAN, 2 * ONE, 2 * ONE, 3 * ONE]
    params, state = run(optimizer, W, micro_batches)
    assert params.tolist() == [-1.0, -4.0]
    assert jls.loss_scale(state) == 4.0
    params, _ = run(optimizer, W, micro_batches + 4 * [ONE])
    assert params.tolist() == [-2.0, -5.0]


@pytest.mark.standard_promotion
def test_optimizer_that_holds_a_key_freezes_it():
    """jmp J8b, O4: apply_if_finite and MultiSteps could not handle keys."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.5))
    optimizer = jls.loss_scaled(noisy, jls.dynamic(8.0))
    params, state = run(optimizer, W, [NAN, ONE])
    expected, expected_state = run(optimizer, W, [ONE])
    assert_identical(params, expected)
    key, old = (optax.tree.get(s, "rng_key") for s in (state, expected_state))
    assert_identical(jax.random.key_data(key), jax.random.key_data(old))


@pytest.mark.standard_promotion
def test_updates_that_are_not_finite_are_not_committed_to_float16_params():
    """optax R4: adam's eps is 0 in float16, and 0 / 0 of finite gradients is NaN."""
    half_eps = optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: u / (0 * p), u, p)
    )
    w = W.astype(jnp.float16)
    for inner, applied in ((optax.adam(0.5), True), (half_eps, False)):
        optimizer = jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=1))
        with pytest.warns(UserWarning, match="are float16"):
            params, state = run(optimizer, w, [jnp.zeros(2, jnp.float16)])
        assert_identical(params, w)
        assert state.applied == applied
        assert jls.loss_scale(state) == 16.0


@pytest.mark.standard_promotion
def test_hyperparameters_can_be_injected_inside_and_outside():
    """optax R15: a control that worked."""

    def make(learning_rate):
        return jls.loss_scaled(optax.adam(learning_rate), jls.dynamic(8.0))

    outside = optax.inject_hyperparams(make)(learning_rate=0.5)
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    inside = jls.loss_scaled(injected, jls.dynamic(8.0))
    for optimizer in (outside, inside):
        params, state = run(optimizer, W, [ONE, NAN])
        np.testing.assert_allclose(params, W - 0.5, rtol=1e-5)
        assert jls.loss_scale(state) == 4.0
        assert optax.tree.get(state, "loss_scale") == 4.0
        assert optax.tree.get(state, "learning_rate") == 0.5


def test_rejected_nan_inside_jit_does_not_trip_debug_nans():
    """flax F13, R16: only outputs are checked, and none of them is NaN here."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0))

    @jax.jit
    def step(w, state, x):
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    state = optimizer.init(W)
    x = jnp.array([1.0, jnp.inf])
    with jax.debug_nans(True), jax.debug_infs(True):
        w, state = step(W, state, x)
    assert_identical(w, W)
    assert state.skips == 1


# Exactness, checkpoints, export ------------------------------------------------------


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("jit", "inner", "steps"),
    [
        (jax.jit, optax.adam(0.1), 50),
        (jax.jit, optax.sgd(0.1, momentum=0.9), 50),
        (lambda f: f, optax.sgd(0.1, momentum=0.9), 3),
    ],
    ids=["adam", "sgd", "sgd, eager"],
)
def test_run_under_a_power_of_two_is_bitwise_the_run_under_another(jit, inner, steps):
    """E1, E2: the same executable, and eager."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(k, (4, 4)) for k in keys[:2]]
    x = jax.random.normal(keys[2], (8, 4))
    optimizer = jls.loss_scaled(inner, jls.static(2.0))

    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - x) ** 2)

    @jit
    def step(params, state):
        grads = jls.grad(loss_fn)(state, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train(scale):
        new, state = params, jls.set_loss_scale(optimizer.init(params), scale)
        for _ in range(steps):
            new, state = step(new, state)
        return new

    reference = train(1.0)
    for exponent in (10, 24):
        assert_identical(train(2.0**exponent), reference)


@pytest.mark.standard_promotion
def test_state_resumes_from_a_checkpoint_bitwise():
    """jmp J12: invisible to flax.serialization, people saved the scale only."""
    scaler = jls.dynamic(8.0, growth_interval=3, backoff_interval=2)
    optimizer = jls.loss_scaled(optax.adam(0.5), scaler)
    _, state = run(optimizer, W, [NAN, ONE, ONE])
    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(optimizer.init(W), saved)
    assert_identical(jax.tree.map(jnp.asarray, restored), state)
    update = jax.jit(optimizer.update)
    assert_identical(update(ONE, restored, W), update(ONE, state, W))
    assert_identical(pickle.loads(pickle.dumps(state)), state)


def test_step_can_be_exported():
    """flax F11, O8, J13: the state was not registered, so no export could be saved."""
    inner = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, s))
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    args = NAN, optimizer.init(W), W
    exported = export.export(jax.jit(optimizer.update))(*args)
    assert exported.call(*args)[1].scaler_state.loss_scale == 4.0
    for state_type in (jls.LossScaleState, jls.LossScaledState):
        with pytest.raises(ValueError, match=state_type.__name__):
            export.register_namedtuple_serialization(
                state_type, serialized_name="registered.Twice"
            )
    if importlib.util.find_spec("flatbuffers"):
        again = export.deserialize(exported.serialize())
        assert_identical(again.call(*args), exported.call(*args))


# Flax and Equinox --------------------------------------------------------------------


def test_select_rolls_back_what_the_optimizer_does_not_hold():
    """flax F10: batch_stats of a NaN step stayed, and `step` advanced."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0))

    @jax.jit
    def step(carry, x):
        w, state, rest = carry
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        new = {"mean": 0.9 * rest["mean"] + 0.1 * x, "step": rest["step"] + 1}
        rest = jls.select(state.applied, new, rest)
        return optax.apply_updates(w, updates), state, rest

    carry = W, optimizer.init(W), {"mean": jnp.zeros(2), "step": 0}
    clean, bad = step(carry, ONE), step(step(carry, NAN), ONE)
    assert_identical((clean[0], clean[2]), (bad[0], bad[2]))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.norm = (
            nnx.Linear(2, 2, rngs=rngs),
            nnx.BatchNorm(2, rngs=rngs),
        )

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.standard_promotion
def test_nnx_batch_norm_can_be_rolled_back():
    """flax R5, R14: an inf input stayed in the mean of BatchNorm."""
    model = Net()
    tx = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 3)

    @nnx.jit
    def step(model, optimizer, x):
        old = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        differentiate = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        _, grads = differentiate(optimizer, model, x)
        optimizer.update(model, grads)
        new = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        applied = jls.metrics(optimizer)["applied"]
        nnx.update(model, jls.select(applied, new, old))

    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model)))
    x = jnp.array([[1.0, 2.0], [3.0, 5.0]])
    step(model, optimizer, x.at[0, 0].set(jnp.inf))
    assert_identical(nnx.to_pure_dict(nnx.state(model)), before)
    assert jls.loss_scale(optimizer) == 4.0
    step(model, optimizer, x)
    assert jls.metrics(optimizer)["applied"]
    assert jls.all_finite(nnx.to_pure_dict(nnx.state(model)))
    assert jnp.any(model.norm.mean.get_value() != before["norm"]["mean"])


@pytest.mark.standard_promotion
def test_equinox_module_goes_through_every_function():
    """jmp R9: all_finite and select_tree raised on an Equinox MLP."""
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    optimizer = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        differentiate = jls.value_and_grad(
            lambda model, x: jnp.sum(model(x) ** 2), transform=eqx.filter_value_and_grad
        )
        _, grads = differentiate(state, model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    same, state = step(model, state, INF)
    assert eqx.tree_equal(same, model)
    moved, state = step(model, state, ONE)
    assert jls.all_finite(moved)
    assert not eqx.tree_equal(moved, model)
    assert eqx.tree_equal(jls.select(False, moved, model), model)
    assert jls.scale(state, model).activation is model.activation


def test_vmapped_state_is_a_clear_error():
    """flax R13: a scale of shape (4,) went on silently."""
    states = jax.vmap(lambda _: jls.dynamic(8.0).init())(jnp.arange(4))
    for function in (jls.scale, jls.unscale):
        with pytest.raises(ValueError, match=r"must have shape \(\).*jax.vmap"):
            function(states, W)
    with pytest.raises(ValueError, match=r"must have shape \(\).*jax.vmap"):
        jls.value_and_grad(jnp.sum)(states, W)
