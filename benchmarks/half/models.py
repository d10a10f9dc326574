"""Models of Flax Linen with a `dtype=`, written as Flax's own examples are.

With `dtype=None` each is the float32 program that `jls.autocast` casts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn


class Model(NamedTuple):
    """A classifier of words or of images, by its dtype, and a batch of shapes."""

    make: Callable[[Any], nn.Module]
    inputs: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct

    def variables(self) -> Any:
        """The shapes of its parameters and of its batch statistics."""
        made = jax.eval_shape(self.make(None).init, jax.random.key(0), self.inputs)
        return {"params": made["params"], "others": without_params(made)}

    def loss(self, dtype: Any = None) -> Callable[..., Any]:
        """(parameters and batch statistics, batch) -> the loss, and new statistics.

        The logits are cast to float32, as one does by hand.
        """
        model = self.make(dtype)

        def loss_fn(params, others, batch):
            inputs, labels = batch
            logits, changed = model.apply(
                {"params": params, **others}, inputs, mutable=[*others]
            )
            logs = jax.nn.log_softmax(logits.astype(jnp.float32))
            picked = jnp.take_along_axis(logs, labels[..., None], axis=-1)
            return -jnp.mean(picked), changed

        return loss_fn


def without_params(variables: Any) -> dict[str, Any]:
    """What a model has beside its parameters, such as batch statistics."""
    return {name: tree for name, tree in variables.items() if name != "params"}


class Block(nn.Module):
    """Attention and two layers, each behind a norm."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, _=None):  # noqa: D102
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool), dtype=bool)
        attend = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
        x = x + attend(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y), None


class Transformer(nn.Module):
    """A decoder whose layers are unrolled, in a scan, or in one with remat."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    form: str = "scan"
    dtype: Any = None

    @nn.compact
    def __call__(self, words):  # noqa: D102
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(words)
        if self.form == "unrolled":
            for _ in range(self.layers):
                x, _ = Block(self.heads, self.dtype)(x)
        else:
            block = nn.remat(Block) if self.form == "remat" else Block
            scan = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scan(self.heads, self.dtype)(x, None)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class Mlp(nn.Module):
    """Layers of two products, four times as wide inside; or nothing but products."""

    layers: int
    is_bare: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x):  # noqa: D102
        width = x.shape[-1]
        for _ in range(self.layers):
            y = nn.Dense(4 * width, use_bias=not self.is_bare, dtype=self.dtype)(x)
            y = y if self.is_bare else nn.gelu(y)
            y = nn.Dense(width, use_bias=not self.is_bare, dtype=self.dtype)(y)
            x = y if self.is_bare else x + y
        return x


class ResNet(nn.Module):
    """Bottlenecks with batch norm: ResNet-50, if there are 3, 4, 6 and 3."""

    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):  # noqa: D102
        def conv(filters, size, stride=1):
            strides = (stride, stride)
            kind = {"use_bias": False, "dtype": self.dtype}
            return nn.Conv(filters, (size, size), strides, **kind)

        def norm(x):
            kind = {"use_running_average": False, "momentum": 0.9}
            return nn.BatchNorm(dtype=self.dtype, **kind)(x)

        x = nn.relu(norm(conv(self.width, 7, 2)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for i, count in enumerate(self.stages):
            filters = self.width * 2**i
            for j in range(count):
                stride = 2 if i and not j else 1
                y = nn.relu(norm(conv(filters, 1)(x)))
                y = nn.relu(norm(conv(filters, 3, stride)(y)))
                y = norm(conv(4 * filters, 1)(y))
                if y.shape != x.shape:
                    x = norm(conv(4 * filters, 1, stride)(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


class Lstm(nn.Module):
    """Words, two layers of an LSTM, words."""

    vocabulary: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, words):  # noqa: D102
        x: Any = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(words)
        for _ in range(2):
            cell = nn.OptimizedLSTMCell(self.width, dtype=self.dtype)
            x = nn.RNN(cell)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def _words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def transformer(
    form: str, shape: tuple[int, int, int, int], tokens: tuple[int, int]
) -> Model:
    """Of (vocabulary, width, layers, heads), on batch and length of words."""
    return Model(
        lambda dtype: Transformer(*shape, form, dtype), _words(*tokens), _words(*tokens)
    )


def mlp(layers: int, shape: tuple[int, int], is_bare: bool = False) -> Model:
    """On so many vectors of so many numbers, which are its classes too."""
    inputs = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Model(lambda dtype: Mlp(layers, is_bare, dtype), inputs, _words(shape[0]))


def resnet(stages: tuple[int, ...], width: int, images: tuple[int, int]) -> Model:
    """On so many images of so many pixels."""
    count, pixels = images
    inputs = jax.ShapeDtypeStruct((count, pixels, pixels, 3), jnp.float32)
    return Model(
        lambda dtype: ResNet(stages, width, 1000, dtype), inputs, _words(count)
    )


def lstm(vocabulary: int, width: int, tokens: tuple[int, int]) -> Model:
    """Of so many words and units, on batch and length of words."""
    return Model(
        lambda dtype: Lstm(vocabulary, width, dtype), _words(*tokens), _words(*tokens)
    )
