# SPDX-License-Identifier: Apache-2.0
"""Flax Linen: a ResNet with batch statistics, dropout and accuracy.

`python linen_imagenet.py` takes half a minute on a CPU. Nothing is downloaded: the
images are scikit-learn's digits, enlarged and shifted at random.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jls
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits


class Block(nn.Module):
    width: int
    stride: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        y = self.conv(self.width, (3, 3), self.stride)(x)
        y = self.conv(self.width, (3, 3))(nn.relu(self.norm()(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = self.norm()(self.conv(self.width, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    widths: tuple[int, ...]
    dtype: Any = jnp.float32  # of the activations; parameters are float32

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        x = nn.relu(norm()(conv(self.widths[0], (5, 5), 2)(x)))
        for i, width in enumerate(self.widths):
            x = Block(width, stride=1 if i == 0 else 2, conv=conv, norm=norm)(x)
        x = nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(10, dtype=jnp.float32)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def load(size):
    """Images of `size` by `size` and their labels, for training and for the test."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    images = np.asarray(jax.image.resize(images, (len(images), size, size, 1), "cubic"))
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def batches(images, labels, batch_size, rng):
    """The batches of one epoch, each shifted by up to a tenth of the images' size."""
    order, most = rng.permutation(len(images)), images.shape[1] // 10
    for i in range(0, len(images) - batch_size + 1, batch_size):
        chosen = order[i : i + batch_size]
        shift = tuple(rng.integers(-most, most + 1, size=2))
        yield {"image": np.roll(images[chosen], shift, (1, 2)), "label": labels[chosen]}


def loss_fn(state, batch, dropout_key):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    rngs = {"dropout": dropout_key}
    logits, new = state.apply_fn(
        variables, batch["image"], train=True, rngs=rngs, mutable=["batch_stats"]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
    return losses.mean(), new, accuracy


@jax.jit
def count_correct(state, images, labels):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return jnp.sum(state.apply_fn(variables, images, train=False).argmax(-1) == labels)


def main(epochs=5, widths=(16, 32, 64), size=32, batch_size=50):
    train_set, (test_images, test_labels) = load(size)
    model = ResNet(widths, dtype=jnp.float16)
    variables = model.init(jax.random.key(0), test_images[:1], train=False)
    steps = epochs * (len(train_set[0]) // batch_size)
    optimizer = optax.adamw(optax.cosine_decay_schedule(5e-3, steps))
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=20))
    state = TrainState.create(apply_fn=model.apply, tx=optimizer, **variables)
    train_step = jls.train_step(loss_fn, carried=True, has_aux=True)

    step = jax.jit(train_step, donate_argnums=0)
    key, rng = jax.random.key(1), np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        for batch in batches(*train_set, batch_size, rng):
            dropout_key = jax.random.fold_in(key, state.step)
            state, report = step(state, batch, dropout_key=dropout_key)
        test = count_correct(state, test_images, test_labels) / len(test_labels)
        train, loss = report.aux, report.loss
        print(f"epoch {epoch}  loss {loss:.3f}  train {train:.2f}  test {test:.3f}")
    print(jls.health(state))
    return state


if __name__ == "__main__":
    main()
