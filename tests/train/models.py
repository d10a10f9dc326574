"""Small models of Linen and NNX, their losses and states, and what is in them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import jls

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


# 1e37 is finite and overflows when it is multiplied by the scale of 64.
GOOD, BAD = jnp.ones((1, 2)), jnp.full((1, 2), 1e37)
