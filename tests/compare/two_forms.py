"""Two forms of one program, one of which has a mistake.

As in `edited`, the line of a mistake has its name in a comment: in either form.
"""

import functools

import edited
import held_out
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

# Attention by hand, and that of JAX.


def attention(q, k, v, bug):
    size = 2.0 * q.shape[-1] if bug == "of hand, scale" else q.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores / np.sqrt(size)  # bug: of hand, scale
    offset = 1 if bug == "of hand, mask" else 0
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool), offset)  # bug: of hand, mask
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    if bug == "of hand, values":
        v = v[:, ::-1]  # bug: of hand, values
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention_pair(bug):
    by_hand = functools.partial(attention, bug=bug)
    return edited.library_attention, by_hand, edited.HEADED


# Each example by itself, and all at once.


def vae_in_lanes(params, x, key, bug):
    noise = jax.random.normal(key, (x.shape[0], 4))

    def one(x, noise):
        hidden = jax.nn.relu(x @ params["enc"])
        mean, log_var = jnp.split(hidden @ params["stats"], 2)
        scale = 1.0 if bug == "in lanes, half" else 0.5
        z = mean + jnp.exp(scale * log_var) * noise  # bug: in lanes, half
        logits = jax.nn.relu(z @ params["dec"]) @ params["out"]
        rest = optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(x)).sum()
        square = mean if bug == "in lanes, square" else jnp.square(mean)
        kl = 1 + log_var - square - jnp.exp(log_var)  # bug: in lanes, square
        return rest - 0.5 * jnp.sum(kl)

    return jnp.mean(jax.vmap(one)(x, noise))


def lanes_pair(bug):
    of_all = functools.partial(held_out.vae, bug="")
    of_each = functools.partial(vae_in_lanes, bug=bug)
    return of_all, of_each, held_out.VAE_ARGS


# A model of Linen, and its conversion to NNX.


def converted(weights, x, bug):
    epsilon = 1e-3 if bug == "converted, eps" else 1e-6
    model = edited.NnxLayers(functools.partial(nnx.LayerNorm, epsilon=epsilon))
    layers = model.first, model.norm, model.last
    names = ("kernel", "bias"), ("scale", "bias"), ("kernel", "bias")
    variables = [getattr(x, y) for x, z in zip(layers, names, strict=True) for y in z]
    for variable, weight in zip(variables, weights, strict=True):
        variable.set_value(weight)
    hidden = model.norm(model.first(x))  # bug: converted, eps
    slope = 0.1 if bug == "converted, slope" else 0.0
    hidden = nnx.leaky_relu(hidden, slope) if slope else nnx.relu(hidden)
    return model.last(hidden)  # bug: converted, slope


def converted_pair(bug):
    arguments = edited.WEIGHTS, edited.BATCH["x"]
    return edited.linen_of_nnx, functools.partial(converted, bug=bug), arguments


# An LSTM with its gates as two products, and as one.


def lstm(params, batch):
    h = c = jnp.zeros((6, 8))
    for x in batch:
        gates = x @ params["x"] + h @ params["h"] + params["bias"]
        i, f, g, o = jnp.split(gates, 4, -1)
        f = f + 1.0  # bug: one product, forget
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)  # bug: one product, tanh
    return h


def lstm_of_one_product(params, batch, bug):
    weights = jnp.concatenate([params["x"], params["h"]])
    h = c = jnp.zeros((6, 8))
    more = 0.0 if bug == "one product, forget" else 1.0
    for x in batch:
        gates = jnp.concatenate([x, h], -1) @ weights + params["bias"]
        i, f, g, o = jnp.split(gates, 4, -1)
        kept = 1 / (1 + jnp.exp(-f - more))  # bug: one product, forget
        c = kept * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        seen = jnp.sin(c) if bug == "one product, tanh" else jnp.tanh(c)
        h = jax.nn.sigmoid(o) * seen  # bug: one product, tanh
    return h


LSTM = {"x": edited.normal(5, 32, scale=0.4), "h": edited.normal(8, 32, scale=0.3)}
LSTM_ARGS = LSTM | {"bias": edited.normal(32, scale=0.1)}, edited.normal(3, 6, 5)


def lstm_pair(bug):
    return lstm, functools.partial(lstm_of_one_product, bug=bug), LSTM_ARGS


EDITED = dict.fromkeys(
    ("of hand, scale", "of hand, mask", "of hand, values"), attention_pair
)
EDITED |= dict.fromkeys(("in lanes, half", "in lanes, square"), lanes_pair)
EDITED |= dict.fromkeys(("converted, eps", "converted, slope"), converted_pair)
EDITED |= dict.fromkeys(("one product, forget", "one product, tanh"), lstm_pair)
EQUAL = {
    "VAE, in lanes": lambda: lanes_pair(""),
    "LSTM, one product": lambda: lstm_pair(""),
}
