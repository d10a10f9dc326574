"""Models without a dtype, of the depth that is used and of little width.

Each is written as the programs of its kind are: blocks in a Python loop, attention and
norms by hand or from the library.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Workload(NamedTuple):
    loss: Callable[..., Any]  # (params, batch) -> f32[]
    params: Any  # of shapes, or a module of Equinox
    batch: Any


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def of_linen(model, *inputs):
    """A loss of a classifier in Linen, with its batch statistics in the batch."""
    made = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    others = {name: tree for name, tree in made.items() if name != "params"}
    logits = jax.eval_shape(
        lambda made, *inputs: model.apply(made, *inputs, mutable=[*others])[0],
        made,
        *inputs,
    )
    labels = shape(*logits.shape[:-1], dtype=jnp.int32)

    def loss(params, batch):
        others, inputs, labels = batch
        variables = {"params": params, **others}
        logits, _ = model.apply(variables, *inputs, mutable=[*others])
        return cross_entropy(logits, labels)

    return Workload(loss, made["params"], (others, inputs, labels))


class ResNet18(nn.Module):
    @nn.compact
    def __call__(self, x):
        def conv(filters, size, stride=1):
            return nn.Conv(filters, (size, size), (stride, stride), use_bias=False)

        def norm():
            return nn.BatchNorm(use_running_average=False, momentum=0.9)

        x = nn.relu(norm()(conv(8, 7, 2)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage in range(4):
            for block in range(2):
                filters, stride = 8 * 2**stage, 2 if stage and not block else 1
                y = nn.relu(norm()(conv(filters, 3, stride)(x)))
                y = norm()(conv(filters, 3)(y))
                if y.shape != x.shape:
                    x = norm()(conv(filters, 1, stride)(x))
                x = nn.relu(x + y)
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


class LanguageModel(nn.Module):
    """A decoder with dropout and positions that are added, the norm before each."""

    layers: int = 6
    width: int = 16

    @nn.compact
    def __call__(self, words, key):
        padding = nn.make_attention_mask(words > 0, words > 0)
        mask = nn.combine_masks(padding, nn.make_causal_mask(words))
        embed = nn.Embed(64, self.width)
        places = np.sin(
            np.arange(words.shape[1])[:, None] / np.arange(1, 1 + self.width)
        )
        x = embed(words) + places.astype(np.float32)
        keys = iter(jax.random.split(key, 3 * self.layers))

        def dropped(x):
            return nn.Dropout(0.1, deterministic=False)(x, rng=next(keys))

        for _ in range(self.layers):
            attend = nn.MultiHeadDotProductAttention(2, use_bias=False)
            x = x + dropped(attend(nn.LayerNorm()(x), mask=mask))
            y = nn.relu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + dropped(nn.Dense(self.width)(dropped(y)))
        logits = embed.attend(nn.LayerNorm()(x))
        return logits / np.sqrt(self.width)


class Plain(nn.Module):
    """A small decoder with its attention by hand, and norms without a bias."""

    layers: int = 8
    width: int = 16
    heads: int = 2

    @nn.compact
    def __call__(self, words):
        length, size = words.shape[1], self.width // self.heads
        embed = nn.Embed(64, self.width)
        x = embed(words) + nn.Embed(length, self.width)(jnp.arange(length))
        causal = jnp.tril(jnp.ones((length, length), bool))
        for _ in range(self.layers):
            y = nn.LayerNorm(use_bias=False)(x)
            q, k, v = (
                nn.DenseGeneral((self.heads, size), use_bias=False)(y) for _ in range(3)
            )
            scores = jnp.einsum("...qhd,...khd->...hqk", q / size**0.5, k)
            scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
            mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
            dense = nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False)
            x = x + dense(mixed)
            y = nn.gelu(nn.Dense(4 * self.width, use_bias=False)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width, use_bias=False)(y)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


class Layer(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 2 * width, key=keys[1])
        self.down = eqx.nn.Linear(2 * width, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        one, two = jax.random.split(key)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        y = jax.vmap(self.down)(self.dropout(y, key=one))
        return x + self.dropout(y, key=two)


class VisionTransformer(eqx.Module):
    patches: eqx.nn.Linear
    places: jax.Array
    token: jax.Array
    layers: list[Layer]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key, width=16, layers=6):
        keys = jax.random.split(key, layers + 2)
        self.patches = eqx.nn.Linear(48, width, key=keys[0])
        self.places = jnp.zeros((17, width))
        self.token = jnp.zeros((1, width))
        self.layers = [Layer(width, one) for one in keys[1:-1]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=keys[-1])

    def __call__(self, image, key):
        patches = image.reshape(3, 4, 4, 4, 4).transpose(1, 3, 0, 2, 4).reshape(16, 48)
        x = jnp.concatenate([self.token, jax.vmap(self.patches)(patches)])
        x = x + self.places
        for layer, one in zip(
            self.layers, jax.random.split(key, len(self.layers)), strict=True
        ):
            x = layer(x, one)
        return self.head(self.norm(x[0]))


def of_equinox(make, loss, batch):
    """A loss of the arrays of a module; its functions are part of the program."""
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    arrays, rest = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return Workload(lambda params, x: loss(eqx.combine(params, rest), x), arrays, batch)


def vision_transformer():
    def loss(model, batch):
        images, labels, key = batch
        keys = jax.random.split(key, images.shape[0])
        return cross_entropy(jax.vmap(model)(images, keys), labels)

    images, labels = shape(4, 3, 16, 16), shape(4, dtype=jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return of_equinox(VisionTransformer, loss, (images, labels, key))


class Discriminator(eqx.Module):
    """Convolutions that halve the image, batch norm between them."""

    layers: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, key):
        sizes, keys = (3, 4, 8, 16, 32), jax.random.split(key, 5)
        self.layers = [
            eqx.nn.Conv2d(a, b, 4, 2, 1, use_bias=False, key=one)
            for a, b, one in zip(sizes, sizes[1:], keys, strict=False)
        ]
        self.layers.append(eqx.nn.Conv2d(32, 1, 4, 1, 0, use_bias=False, key=keys[4]))
        self.norms = [
            eqx.nn.BatchNorm(size, "batch", mode="batch") for size in sizes[2:]
        ]

    def __call__(self, x, state):
        x = jax.nn.leaky_relu(self.layers[0](x), 0.2)
        for layer, norm in zip(self.layers[1:-1], self.norms, strict=True):
            x, state = norm(layer(x), state)
            x = jax.nn.leaky_relu(x, 0.2)
        return self.layers[-1](x).reshape(()), state


def discriminator():
    make = eqx.nn.make_with_state(Discriminator)

    def loss(made, batch):
        model, state = made
        images, labels = batch
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, _ = run(images, state)
        return jnp.mean(jax.nn.softplus(logits) - logits * labels)

    return of_equinox(make, loss, (shape(4, 3, 64, 64), shape(4)))


WORDS = shape(2, 8, dtype=jnp.int32)
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "ResNet-18": lambda: of_linen(ResNet18(), shape(2, 32, 32, 3)),
    "language model": lambda: of_linen(
        LanguageModel(), WORDS, jax.eval_shape(lambda: jax.random.key(0))
    ),
    "plain decoder": lambda: of_linen(Plain(), WORDS),
    "vision transformer": vision_transformer,
    "discriminator": discriminator,
}
