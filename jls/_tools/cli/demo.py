# SPDX-License-Identifier: Apache-2.0
"""The demo's training: a deep sigmoid network on scikit-learn's handwritten digits.

The network is float32, and stays untouched: `jls.autocast` computes it in float16.
Float16 fails here by ordinary means: a textbook network, Flax's default weights, and
the squared error that such networks were long trained with. A sigmoid's slope is at
most 1/4, so six layers divide a gradient by thousands, and the mean over all images and
classes by ten thousand more. What is left is below 2**-24, the smallest float16;
float32 and a loss scale both keep it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jls._autocast.autocast import autocast
from jls._metrics import metrics
from jls._scale import value_and_grad
from jls._scalers.dynamic import dynamic
from jls._wrapper import loss_scaled

CHUNK = 20  # steps between two looks at the device
MAX_SCALE = 2.0**40  # lets the scale follow gradients that shrink


class Digits(NamedTuple):
    """Images of 8 x 8 pixels from 0 to 1, and the digits they show."""

    train_images: Array  # f32[1347, 64]
    train_labels: Array  # i32[1347]
    test_images: Array  # f32[450, 64]
    test_labels: Array  # i32[450]


class Progress(NamedTuple):
    """The record of a run so far; `scales` is empty without a loss scale."""

    losses: np.ndarray  # f32[steps]
    zeros: np.ndarray  # f32[steps]  share of first-layer gradients that are exactly 0
    scales: np.ndarray  # f32[steps]
    applied: np.ndarray  # bool[steps]
    accuracy: float | None  # on the test images, when the run has ended
    memory: int = 0  # bytes that the backward pass needs of the forward pass


class Network(nn.Module):
    """Six sigmoid layers, in float32."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        """Returns the scores `f32[batch, 10]` of the digits."""
        x = images
        for _ in range(6):
            x = nn.sigmoid(nn.Dense(64)(x))
        return nn.Dense(10)(x)


def choose_device() -> Any:
    """The GPU, if JAX would use one, else the CPU.

    Not a TPU, which is made for bfloat16.
    """
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    return jax.local_devices(backend=platform)[0]


def load(seed: int) -> Digits:
    """Returns the digits, three quarters of each for training."""
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images / 16, labels, test_size=450, stratify=labels, random_state=seed
    )
    return Digits(
        jnp.asarray(train_images, jnp.float32),
        jnp.asarray(train_labels, jnp.int32),
        jnp.asarray(test_images, jnp.float32),
        jnp.asarray(test_labels, jnp.int32),
    )


def train(
    dtype: Any, scaled: bool, digits: Digits, steps: int, seed: int
) -> Iterator[Progress]:
    """Trains a network and yields its progress every `CHUNK` steps.

    Args:
      dtype: what `jls.autocast` computes the network in.
      scaled: whether jls scales the loss.
      digits: the images and labels; every step sees all training images.
      steps: how many, at least 1.
      seed: draws the first parameters, the same ones for every dtype.
    """
    network = Network()
    apply = autocast(network.apply, dtype)
    # Adam divides by the size of the gradients. They are smaller than its usual eps of
    # 1e-8, which would take their place in the division and stop float32 too.
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, steps), eps=1e-15)

    def loss_fn(params, images, labels):
        scores = jnp.asarray(network.apply(params, images))
        return optax.squared_error(scores, jax.nn.one_hot(labels, 10)).mean()

    loss_fn = autocast(loss_fn, dtype)
    if scaled:
        # An interval of 2000 suits long runs; in this short one 25 lets the scale
        # find its place.
        scaler = dynamic(growth_interval=25, max_scale=MAX_SCALE)
        optimizer = loss_scaled(optimizer, scaler)
    step = make_step(loss_fn, optimizer, scaled)

    @partial(jax.jit, static_argnames="length")
    def train_steps(carry, images, labels, length):
        return jax.lax.scan(
            lambda carry, _: step(*carry, images, labels), carry, length=length
        )

    params = network.init(jax.random.key(seed), digits.train_images)
    carry = params, optimizer.init(params)
    memory = memory_of(loss_fn, params, digits.train_images, digits.train_labels)
    chunks = []
    for start in range(0, steps, CHUNK):
        length = min(CHUNK, steps - start)
        carry, records = train_steps(
            carry, digits.train_images, digits.train_labels, length
        )
        chunks.append(jax.device_get(records))
        accuracy = None
        if start + length == steps:
            scores = apply(carry[0], digits.test_images)
            hits = jnp.argmax(jnp.asarray(scores), axis=1) == digits.test_labels
            accuracy = float(hits.mean())
        joined = [np.concatenate([x[name] for x in chunks]) for name in chunks[0]]
        records = dict(zip(chunks[0], joined, strict=True))
        yield Progress(
            losses=records["loss"],
            zeros=records["zeros"],
            scales=records.get("loss_scale", np.empty(0, np.float32)),
            applied=records.get("applied", np.ones(start + length, np.bool_)),
            accuracy=accuracy,
            memory=memory,
        )


def memory_of(loss_fn: Callable, params: Any, *batch: Array) -> int:
    """The bytes that the backward pass needs, by shapes alone: nothing is computed."""

    def pull_back(params):
        return jax.vjp(lambda params: loss_fn(params, *batch), params)[1]

    saved = jax.tree.leaves(jax.eval_shape(pull_back, params))
    return sum(x.size * x.dtype.itemsize for x in saved)


def make_step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, scaled: bool
) -> Callable[..., tuple[tuple[Any, Any], dict[str, Array]]]:
    """Returns a training step as one writes it in float32, or with a loss scale."""
    update = optax.with_extra_args_support(optimizer).update

    def step(params, opt_state, images, labels):
        if scaled:  # only these two lines differ
            loss, grads = value_and_grad(loss_fn)(opt_state, params, images, labels)
            updates, opt_state = update(grads, opt_state, params, value=loss)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
            updates, opt_state = update(grads, opt_state, params)
        zeros = jnp.mean(grads["params"]["Dense_0"]["kernel"] == 0)
        record = {"loss": loss, "zeros": zeros} | (metrics(opt_state) if scaled else {})
        return (optax.apply_updates(params, updates), opt_state), record

    return step
