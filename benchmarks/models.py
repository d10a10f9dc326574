"""The models that the workloads train: float32 parameters, float16 compute.

A batch ends with `boost`, a float32 number that multiplies the loss: 1 in a good batch.
A boost of 2**100 leaves the loss finite and makes the float16 gradients overflow.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer

GOOD, OVERFLOWING = np.float32(1.0), np.float32(2.0**100)


class _Zeros:
    """Draws nothing: under `jax.eval_shape` only shapes matter, of any size."""

    def standard_normal(self, size: Any, dtype: Any) -> Any:
        return jnp.zeros(size, dtype)

    def integers(self, low: int, high: int, size: Any) -> Any:
        del low, high
        return jnp.zeros(size, jnp.int32)


def generator(seed: int) -> Any:
    """Random numbers of numpy, or zeros while JAX traces the caller."""
    traced = isinstance(jnp.zeros(()), Tracer)
    return _Zeros() if traced else np.random.default_rng(seed)


def normal(rng: Any, *shape: int, fan_in: int | None = None) -> Array:
    """Random weights of variance 1 / fan_in; drawn by numpy, which compiles nothing."""
    fan_in = math.prod(shape[:-1]) if fan_in is None else fan_in
    values = rng.standard_normal(shape, np.float32)
    return jnp.asarray(values / np.float32(fan_in**0.5))


def half(tree: Any) -> Any:
    """The tree in float16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)


def boosted_cross_entropy(logits: Array, targets: Array, boost: Array) -> Array:
    """The mean in float32. Its true value is finite with each boost."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean() * boost


@jax.custom_vjp
def given_gradients(params: Any, grads: Any) -> Array:
    """A loss of 0 whose gradients are `grads`: a step with no forward or backward."""
    del params, grads
    return jnp.float32(0.0)


def _forward(params, grads):
    return given_gradients(params, grads), (
        jax.tree.map(lambda p: jnp.zeros((), p.dtype), params),
        grads,
    )


def _backward(residuals, cotangent):
    dtypes, grads = residuals
    scaled = jax.tree.map(lambda g, d: (cotangent * g).astype(d.dtype), grads, dtypes)
    return scaled, jax.tree.map(jnp.zeros_like, grads)


given_gradients.defvjp(_forward, _backward)


def transformer_params(width: int, layers: int, vocabulary: int) -> Any:
    """Eight leaves in each layer, and two embeddings."""
    rng = generator(0)

    def layer():
        return {
            "query_key_value": normal(rng, width, 3 * width),
            "out": normal(rng, width, width),
            "up": normal(rng, width, 4 * width),
            "up_bias": jnp.zeros(4 * width),
            "down": normal(rng, 4 * width, width),
            "down_bias": jnp.zeros(width),
            "norm1": jnp.ones(width),
            "norm2": jnp.ones(width),
        }

    return {
        "embed": normal(rng, vocabulary, width, fan_in=1),
        "layers": [layer() for _ in range(layers)],
        "unembed": normal(rng, width, vocabulary),
    }


def transformer_loss(heads: int) -> Callable[[Any, Any], Array]:
    """Predicts the next token; no causal masks and positions, which cost nothing."""

    def attend(x, layer):
        batch, length, width = x.shape
        shape = batch, length, heads, width // heads
        query, key, value = (
            part.reshape(shape)
            for part in jnp.split(x @ layer["query_key_value"], 3, 2)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return mixed.reshape(x.shape) @ layer["out"]

    def loss_fn(params, batch):
        inputs, targets, boost = batch
        params = half(params)
        x = params["embed"][inputs]
        for layer in params["layers"]:
            x = x + attend(_norm(x) * layer["norm1"], layer)
            hidden = (_norm(x) * layer["norm2"]) @ layer["up"] + layer["up_bias"]
            x = x + jax.nn.gelu(hidden) @ layer["down"] + layer["down_bias"]
        return boosted_cross_entropy(_norm(x) @ params["unembed"], targets, boost)

    return loss_fn


def transformer_batch(size: int, length: int, vocabulary: int) -> tuple[Any, Any]:
    """Random tokens, and the tokens that follow."""
    tokens = generator(1).integers(0, vocabulary, (size, length + 1))
    tokens = jnp.asarray(tokens, jnp.int32)
    return tokens[:, :-1], tokens[:, 1:]


def convnet_params(width: int, blocks: list[int], classes: int) -> Any:
    """Bottleneck blocks as in ResNet-50, `blocks` of them in each stage."""
    rng = generator(0)
    channels = width

    def block(inputs, inner, outputs):
        return {
            "reduce": normal(rng, 1, 1, inputs, inner),
            "conv": normal(rng, 3, 3, inner, inner),
            "expand": normal(rng, 1, 1, inner, outputs),
            "scale": [jnp.ones(inner), jnp.ones(inner), jnp.ones(outputs)],
            "bias": [jnp.zeros(inner), jnp.zeros(inner), jnp.zeros(outputs)],
            "project": normal(rng, 1, 1, inputs, outputs),
        }

    stages = []
    for i, count in enumerate(blocks):
        inner, outputs = width * 2**i, width * 2**i * 4
        ins = [channels, *[outputs] * (count - 1)]
        stages.append([block(inputs, inner, outputs) for inputs in ins])
        channels = outputs
    for stage in stages:
        for later in stage[1:]:
            del later["project"]
    return {
        "stem": normal(rng, 7, 7, 3, width),
        "stages": stages,
        "head": normal(rng, channels, classes),
    }


def convnet_loss(params: Any, batch: Any) -> Array:
    """Batch normalization uses the batch alone; it keeps no running averages."""
    images, targets, boost = batch
    params = half(params)
    x = _convolve(images.astype(jnp.float16), params["stem"], 2)
    for i, stage in enumerate(params["stages"]):
        for j, block in enumerate(stage):
            stride = 2 if i > 0 and j == 0 else 1
            project = block.get("project")
            kept = x if project is None else _convolve(x, project, stride)
            for k, (name, step) in enumerate(
                (("reduce", 1), ("conv", stride), ("expand", 1))
            ):
                x = _norm(_convolve(x, block[name], step), (0, 1, 2))
                x = x * block["scale"][k] + block["bias"][k]
                x = jax.nn.relu(x + kept if name == "expand" else x)
    return boosted_cross_entropy(x.mean((1, 2)) @ params["head"], targets, boost)


def convnet_batch(size: int, pixels: int, classes: int) -> tuple[Any, Any]:
    """Random images and classes."""
    rng = generator(1)
    images = rng.standard_normal((size, pixels, pixels, 3), np.float32)
    return jnp.asarray(images), jnp.asarray(rng.integers(0, classes, size), jnp.int32)


def many_leaves_params(leaves: int, width: int) -> Any:
    """A matrix in each leaf."""
    rng = generator(0)
    return [normal(rng, width, width) for _ in range(leaves)]


def many_leaves_loss(params: Any, batch: Any) -> Array:
    """Each leaf is a layer beside the others; their outputs are averaged."""
    x, targets, boost = batch
    x = x.astype(jnp.float16)
    # One by one: XLA takes minutes to compile a stack of a thousand leaves.
    outputs = [jnp.tanh(x @ layer) for layer in half(params)]
    return boosted_cross_entropy(
        sum(outputs[1:], outputs[0]) * (8 / len(params)), targets, boost
    )


def _norm(x: Array, axes: int | tuple[int, ...] = -1) -> Array:
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def _convolve(x: Array, kernel: Array, stride: int) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
