# SPDX-License-Identifier: Apache-2.0
"""Equinox: a vision transformer. Its activation and dropout rates are no arrays.

`python equinox_vit.py` takes twenty seconds on a CPU. Nothing is downloaded: the images
are scikit-learn's digits.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jls
import numpy as np
import optax
from sklearn.datasets import load_digits


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, activation, key):
        key1, key2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=key1)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, activation, key=key2)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        key1, key2 = (None, None) if key is None else jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x = x + self.dropout(self.attention(y, y, y), key=key1)
        y = jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))
        return x + self.dropout(y, key=key2)


class ViT(eqx.Module):
    embedding: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    activation: Callable

    def __init__(self, width, depth, key, activation=jax.nn.gelu):
        keys = jax.random.split(key, depth + 3)
        self.embedding = eqx.nn.Linear(4, width, key=keys[0])
        self.positions = 0.02 * jax.random.normal(keys[1], (16, width))
        self.blocks = [Block(width, activation, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=keys[2])
        self.activation = activation

    def __call__(self, image, key=None):
        patches = image.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4)
        x = jax.vmap(self.embedding)(patches) + self.positions
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return self.head(self.activation(self.norm(x.mean(axis=0))))


def load():
    """Images of 8 by 8 and their labels, for training and for the test."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.float32) / 16
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def batches(images, labels, batch_size, rng):
    """The batches of one epoch."""
    order = rng.permutation(len(images))
    for i in range(0, len(images) - batch_size + 1, batch_size):
        chosen = order[i : i + batch_size]
        yield images[chosen], labels[chosen]


def loss_fn(model, batch, key):
    images, labels = batch
    logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
    logits = logits.astype(jnp.float32)  # whatever the model computes in
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), jnp.mean(logits.argmax(-1) == labels)


@eqx.filter_jit
def count_correct(model, images, labels):
    model = eqx.nn.inference_mode(model)
    return jnp.sum(jax.vmap(model)(images).argmax(-1) == labels)


def main(epochs=8, width=32, depth=2, batch_size=50):
    train_set, (test_images, test_labels) = load()
    key, rng = jax.random.key(1), np.random.default_rng(0)
    model = ViT(width, depth, jax.random.key(0))
    optimizer = optax.adamw(3e-3)
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=25))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = jls.train_step(
        loss_fn, optimizer, has_aux=True, compute_dtype=jnp.float16
    )

    step = eqx.filter_jit(train_step, donate="all")
    for epoch in range(1, epochs + 1):
        for batch in batches(*train_set, batch_size, rng):
            key, dropout_key = jax.random.split(key)
            model, opt_state, report = step(model, opt_state, batch, key=dropout_key)
        test = count_correct(model, test_images, test_labels) / len(test_labels)
        loss, train = report.loss, report.aux
        print(f"epoch {epoch}  loss {loss:.3f}  train {train:.2f}  test {test:.3f}")
    return model, opt_state


if __name__ == "__main__":
    main()
