# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: a convolutional network with batch norm, dropout and metrics.

`python nnx_convnet.py` takes ten seconds on a CPU. Nothing is downloaded: the images
are scikit-learn's digits.
"""

import jax.numpy as jnp
import jls
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Block(nnx.Module):
    def __init__(self, width_in, width_out, rngs):
        kernel = (3, 3)
        self.conv = nnx.Conv(width_in, width_out, kernel, rngs=rngs)
        self.norm = nnx.BatchNorm(width_out, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))


class ConvNet(nnx.Module):
    def __init__(self, width, rngs):
        self.block1 = Block(1, width, rngs)
        self.block2 = Block(width, 2 * width, rngs)
        self.linear = nnx.Linear(8 * width, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 * width, 10, rngs=rngs)
        loss, accuracy = nnx.metrics.Average("loss"), nnx.metrics.Accuracy()
        self.metrics = nnx.MultiMetric(loss=loss, accuracy=accuracy)

    def __call__(self, x):
        x = self.block2(self.block1(x))
        x = nnx.relu(self.linear(x.reshape(len(x), -1)))
        return self.head(self.dropout(x))


def load():
    """Images of 8 by 8 and their labels, for training and for the test."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def batches(images, labels, batch_size, rng):
    """The batches of one epoch."""
    order = rng.permutation(len(images))
    for i in range(0, len(images) - batch_size + 1, batch_size):
        chosen = order[i : i + batch_size]
        yield images[chosen], labels[chosen]


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    model.metrics.update(loss=losses.mean(), logits=logits, labels=labels)
    return losses.mean()


@nnx.jit
def count_correct(model, images, labels):
    return jnp.sum(model(images).argmax(-1) == labels)


def main(epochs=8, width=16, batch_size=50):
    train_set, (test_images, test_labels) = load()
    model = ConvNet(width, nnx.Rngs(0))
    tx = optax.adamw(1e-3)
    tx = jls.loss_scaled(tx, jls.dynamic(growth_interval=25))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = jls.train_step(loss_fn, compute_dtype=jnp.float16)

    step, rng = nnx.jit(train_step), np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in batches(*train_set, batch_size, rng):
            step(model, optimizer, batch)
        train = model.metrics.compute()
        loss, accuracy = train["loss"], train["accuracy"]
        model.metrics.reset()
        model.eval()
        test = count_correct(model, test_images, test_labels) / len(test_labels)
        print(f"epoch {epoch}  loss {loss:.3f}  train {accuracy:.3f}  test {test:.3f}")
    print(jls.health(optimizer, model))
    return model, optimizer


if __name__ == "__main__":
    main()
