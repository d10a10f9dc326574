"""Flax's fp8 layers, whose scales and histories take the place of gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from models import SCALER
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

FP8 = "_overwrite_with_gradient"


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        op = partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=4)
        x = nn.Dense(32, dot_general_cls=op)(x)
        return nn.Dense(32)(nn.relu(x))


def loss_fn(state, batch):
    return jnp.mean(state.apply_fn(state.params, batch) ** 2)


def make_state(tx=None):
    model = Model()
    variables = model.init(jax.random.key(0), batch_of(0))
    tx = tx or jls.loss_scaled(optax.adam(0.01), SCALER())
    return TrainState.create(apply_fn=model.apply, params=variables, tx=tx)


def batch_of(seed):
    # With fewer columns than 16 XLA makes NaN of Flax's layers on an H100.
    return jax.random.normal(jax.random.key(seed), (32, 32))


def scaled_by_hand(state, batch):
    """Flax's own step, of the loss times the scale, the gradients divided by it."""
    loss_scale = 64.0

    def scaled(params):
        return loss_scale * loss_fn(state.replace(params=params), batch)

    grads = jax.grad(scaled)(state.params)
    grads["params"] = jax.tree.map(lambda g: g / loss_scale, grads["params"])
    return state.apply_gradients(grads=grads)


def test_next_values_are_kept_or_rolled_back_and_never_unscaled(jit_or_eager):
    step = jit_or_eager(jls.train_step(loss_fn))
    other = jit_or_eager(scaled_by_hand)
    ours, theirs = make_state(), make_state(optax.adam(0.01))
    for seed in range(2):
        ours, report = step(ours, batch_of(seed))
        theirs = other(theirs, batch_of(seed))
        assert not report.skipped
    assert_identical(ours.params[FP8], theirs.params[FP8])
    history = ours.params[FP8]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    assert (np.asarray(history["output_grad_amax_history"]) > 0).sum() == 2
    for ours_leaf, leaf in zip(
        jax.tree.leaves(ours.params["params"]),
        jax.tree.leaves(theirs.params["params"]),
        strict=True,
    ):
        np.testing.assert_allclose(ours_leaf, leaf, rtol=1e-5, atol=1e-7)

    before = jax.tree.map(np.asarray, ours.params)
    ours, report = step(ours, batch_of(2).at[0, 0].set(jnp.nan))
    assert report.skipped
    assert_identical(jax.tree.map(np.asarray, ours.params), before)


def test_micro_batches_hand_them_on_and_do_not_add_them_up():
    state = make_state()
    step = jax.jit(jls.train_step(loss_fn, micro_batches=2))
    after, _ = step(state, batch_of(1))
    single = jax.jit(jls.train_step(loss_fn))
    expected = state
    for part in range(2):
        params = {"params": state.params["params"], FP8: expected.params[FP8]}
        expected = single(state.replace(params=params), batch_of(1)[part::2])[0]
    assert_identical(after.params[FP8], expected.params[FP8])
