"""Train steps written by hand in four libraries, right and with a mistake planted.

A mistake is planted in one of three places: in how the gradients are made, in what the
optimizer is told, or in what is wrapped. `PLACES` has a step for each library, which
takes these three.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import jls

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
Y = jnp.asarray(np.random.default_rng(1).normal(size=(8, 2)), jnp.float32)
BATCH = {"x": X, "y": Y}
SCALER = jls.dynamic(2.0**10, growth_interval=4)


def half(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)


def mse(predicted, batch):
    return jnp.mean((predicted.astype(jnp.float32) - batch["y"]) ** 2)


# How the gradients are made: (state, loss_fn, params, transform) -> loss, grads.


def right_gradients(state, loss_fn, params, transform):
    return jls.value_and_grad(loss_fn, transform=transform)(state, params)


def unscaled_gradients(state, loss_fn, params, transform):
    return transform(loss_fn)(params)


def foreign_gradients(state, loss_fn, params, transform):
    return jls.value_and_grad(loss_fn, transform=transform)(SCALER.init(), params)


def twice_unscaled(state, loss_fn, params, transform):
    loss, grads = right_gradients(state, loss_fn, params, transform)
    return loss, jls.unscale(state, grads)


def twice_scaled(state, loss_fn, params, transform):
    def scaled(params):
        return jls.scale(state, loss_fn(params))

    loss, grads = right_gradients(state, scaled, params, transform)
    return loss / state_scale(state), grads


def never_unscaled(state, loss_fn, params, transform):
    loss, grads = twice_scaled(jls.static(1.0).init(), loss_fn, params, transform)
    return loss, jls.scale(state, grads)


def clipped_while_scaled(state, loss_fn, params, transform):
    loss, grads = right_gradients(state, loss_fn, params, transform)
    scaled = jls.scale(state, grads)
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(scaled, clip.init(scaled))
    return loss, jls.unscale(state, clipped)


def cleaned(state, loss_fn, params, transform):
    loss, grads = right_gradients(state, loss_fn, params, transform)
    return loss, jax.tree.map(jnp.nan_to_num, grads)


def clipped_by_element(state, loss_fn, params, transform):
    loss, grads = right_gradients(state, loss_fn, params, transform)
    return loss, jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), grads)


def with_the_scale_alone(state, loss_fn, params, transform):
    """For a state that `jls.value_and_grad` refuses."""
    alone = jls.types.StaticState(jls.loss_scale(state))
    return right_gradients(alone, loss_fn, params, transform)


def state_scale(state):
    return jls.loss_scale(state)


# What the optimizer is told.


def tell(loss):
    return {"value": loss}


def tell_nothing(loss):
    return {}


def misspell(loss):
    return {"valeu": loss}


# What is wrapped: inner -> optimizer.


def wrap(inner):
    return jls.loss_scaled(inner, SCALER)


def decay_outside(inner):
    return optax.chain(wrap(inner), optax.add_decayed_weights(1e-2))


def accumulate_outside(inner):
    return optax.MultiSteps(wrap(inner), 2).gradient_transformation()


# Plain JAX.


def plain_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (4, 8)) / 2,
        "w2": jax.random.normal(keys[1], (8, 2)) / 3,
    }


def predict(params, x):
    p = half(params)
    return jnp.tanh(x.astype(jnp.float16) @ p["w1"]) @ p["w2"]


def plain_loss(params, batch):
    return mse(predict(params, batch["x"]), batch)


def never_adjusted():
    """A bare scaler whose state comes back as it was."""
    scaler = jls.dynamic(2.0**10)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jls.value_and_grad(plain_loss)(state, params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jls.select(jls.all_finite(grads), new, params), state, loss

    return step, (plain_params(), scaler.init(), BATCH)


def plain(gradients=right_gradients, tell=tell, wrap=wrap, inner=None, **jit):
    optimizer = wrap(inner or optax.adam(1e-2))

    def step(params, opt_state, batch):
        loss, grads = gradients(
            opt_state, lambda p: plain_loss(p, batch), params, jax.value_and_grad
        )
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        return optax.apply_updates(params, updates), opt_state, loss

    params = plain_params()
    return jax.jit(step, **jit), (params, optimizer.init(params), BATCH)


# Flax Linen.


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=jnp.float16)(x)
        return nn.Dense(2, dtype=jnp.float16)(nn.tanh(x))


def linen_state(tx):
    model = Dense()
    params = model.init(jax.random.key(0), X)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def linen_loss(state, params, batch):
    return mse(state.apply_fn({"params": params}, batch["x"]), batch)


def linen(gradients=right_gradients, tell=tell, wrap=wrap, inner=None):
    @jax.jit
    def step(state, batch):
        loss, grads = gradients(
            state.opt_state,
            lambda p: linen_loss(state, p, batch),
            state.params,
            jax.value_and_grad,
        )
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, **tell(loss)
        )
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, loss

    return step, (linen_state(wrap(inner or optax.adam(1e-2))), BATCH)


# Flax NNX.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, dtype=jnp.float16, rngs=rngs)
        self.last = nnx.Linear(8, 2, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def nnx_loss(model, batch):
    return mse(model(batch["x"]), batch)


def nnx_step(gradients=right_gradients, tell=tell, wrap=wrap, inner=None):
    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = gradients(
            optimizer, lambda m: nnx_loss(m, batch), model, nnx.value_and_grad
        )
        optimizer.update(model, grads, **tell(loss))
        return loss

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrap(inner or optax.adam(1e-2)), wrt=nnx.Param)
    return step, (model, optimizer, BATCH)


# Equinox.


def equinox_loss(model, batch):
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, model
    )
    return mse(jax.vmap(narrow)(batch["x"].astype(jnp.float16)), batch)


def equinox(gradients=right_gradients, tell=tell, wrap=wrap, inner=None):
    optimizer = wrap(inner or optax.adam(1e-2))

    @eqx.filter_jit
    def step(model, opt_state, batch):
        loss, grads = gradients(
            opt_state,
            lambda m: equinox_loss(m, batch),
            model,
            eqx.filter_value_and_grad,
        )
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, **tell(loss))
        return eqx.apply_updates(model, updates), opt_state, loss

    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    return step, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), BATCH)


PLACES = {"plain": plain, "linen": linen, "nnx": nnx_step, "equinox": equinox}

# Mistakes in the gradients, and the code of each; what an optimizer is not told.

GRADIENTS = {
    "jax.value_and_grad": (unscaled_gradients, "not scaled"),
    "another state": (foreign_gradients, "not scaled"),
    "unscaled twice": (twice_unscaled, "scale leaks"),
    "scaled twice": (twice_scaled, "scale leaks"),
    "never unscaled": (never_unscaled, "scale leaks"),
    "clipped while scaled": (clipped_while_scaled, "scale leaks"),
    "nan_to_num": (cleaned, "overflow hidden"),
}
TOLD = {"nothing": tell_nothing, "valeu=": misspell}
