# SPDX-License-Identifier: Apache-2.0
"""Train steps in half precision, of which one line loses most of it, and right ones.

Each takes the dtype. The line that loses most ends with the comment "here"; the right
ones beside them compute the same, or much more, and no line of theirs stands out.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from scaled_programs import MARK, Made, normal, trained

import jls


class Lossy(NamedTuple):
    """One program, and where its precision is lost."""

    make: Callable[..., Made]  # of the dtype
    is_backward: bool = False
    only: str = ""  # the one dtype in which it loses any; "" if in both


LOSSY: dict[str, Lossy] = {}
RIGHT: dict[str, Callable[..., Made]] = {}


def lossy(**truth):
    def register(make):
        LOSSY[make.__name__] = Lossy(make, **truth)
        return make

    return register


def right(make):
    RIGHT[make.__name__] = make
    return make


def marked_line(make) -> int:
    lines, first = inspect.getsourcelines(make)
    (found,) = (n for n, x in enumerate(lines, first) if x.rstrip().endswith(MARK))
    return found


def layered(act, dtype, features=16, rows=32, offset=0.0, seed=0, scale=1.0):
    """A step of two products with `act`, from half to half, between them."""

    def loss_fn(params, batch):
        h = batch.astype(dtype) @ params["w"].astype(dtype) + jnp.asarray(offset, dtype)
        h = act(h)
        y = h.astype(dtype) @ params["out"].astype(dtype)
        return jnp.mean((y.astype(jnp.float32) - 1.0) ** 2)

    params = {
        "w": scale * normal(seed, 8, features) / 8**0.5,
        "out": normal(seed + 1, features, 4) / features**0.5,
    }
    return trained(loss_fn, params, normal(seed + 2, rows, 8))


# Of each pair the first loses precision, and the second does not.


@lossy()
def variance_by_the_difference_of_squares(dtype):
    def act(h):
        mean = jnp.mean(h, axis=-1, keepdims=True)
        squares = jnp.mean(h * h, axis=-1, keepdims=True)
        variance = squares - mean * mean  # <- here
        return (h - mean) * lax.rsqrt(jnp.abs(variance) + 0.1)

    return layered(act, dtype, offset=16.0)


@right
def variance_by_the_mean_of_squares(dtype):
    def act(h):
        mean = jnp.mean(h, axis=-1, keepdims=True)
        centered = h - mean
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        return centered * lax.rsqrt(variance + 0.1)

    return layered(act, dtype)


def summed(add, dtype, length):
    def loss_fn(params, batch):
        h = jnp.abs(batch.astype(dtype) * params["w"].astype(dtype))
        total, _ = lax.scan(add, jnp.zeros(8, dtype), h)
        mean = total.astype(jnp.float32) / length
        return jnp.mean((mean - params["to"]) ** 2)

    params = {"w": jnp.ones(8), "to": jnp.zeros(8)}
    return trained(loss_fn, params, normal(0, length, 8))


@lossy()
def long_sum(dtype):
    def add(total, x):
        return total + x, None  # <- here

    return summed(add, dtype, 20_000)


@right
def long_sum_in_float32(dtype):
    def loss_fn(params, batch):
        h = jnp.abs(batch.astype(dtype) * params["w"].astype(dtype))
        total, _ = lax.scan(
            lambda total, x: (total + x.astype(jnp.float32), None), jnp.zeros(8), h
        )
        return jnp.mean((total / 20_000 - params["to"]) ** 2)

    params = {"w": jnp.ones(8), "to": jnp.zeros(8)}
    return trained(loss_fn, params, normal(0, 20_000, 8))


@lossy(only="float16")
def product_of_ten_thousand_and_its_inverse(dtype):
    def act(h):
        tiny = h * h * jnp.asarray(1e-4, dtype)  # <- here
        return h * (tiny * jnp.asarray(1e4, dtype))

    return layered(act, dtype, scale=0.03)


@right
def product_of_a_hundred_and_its_inverse(dtype):
    def act(h):
        return (h * jnp.asarray(1e-2, dtype)) * jnp.asarray(1e2, dtype)

    return layered(act, dtype)


@lossy()
def small_beside_large(dtype):
    def act(h):
        return (h + jnp.asarray(300, dtype)) - jnp.asarray(300, dtype)  # <- here

    return layered(act, dtype)


@lossy()
def logits_of_a_thousand(dtype):
    def act(h):
        return jax.nn.softmax(h, axis=-1)  # <- here

    return layered(act, dtype, offset=1000.0)


@right
def logits_of_five(dtype):
    def act(h):
        return jax.nn.softmax(5 * h, axis=-1)

    return layered(act, dtype)


@lossy()
def one_minus_a_probability(dtype):
    def act(h):
        p = jax.nn.sigmoid(h.astype(jnp.float32)).astype(dtype)
        return 32 * (1 - p)  # <- here

    return layered(act, dtype, offset=5.0)


@right
def probability_of_the_other(dtype):
    def act(h):
        return 32 * jax.nn.sigmoid(-h)

    return layered(act, dtype, offset=2.0)


@lossy()
def exp_minus_one(dtype):
    def act(h):
        return (jnp.exp(h) - 1) * 50  # <- here

    return layered(act, dtype, scale=0.02)


@right
def expm1(dtype):
    def act(h):
        return jnp.expm1(h) * 50

    return layered(act, dtype, scale=0.02)


@lossy()
def difference_of_roots(dtype):
    def act(h):
        return 40 * (jnp.sqrt(h + 1) - jnp.sqrt(h))  # <- here

    return layered(act, dtype, offset=200.0, scale=10.0)


@right
def quotient_by_a_sum_of_roots(dtype):
    def act(h):
        return 40 / (jnp.sqrt(h + 1) + jnp.sqrt(h))

    return layered(act, dtype, offset=200.0, scale=10.0)


def with_positions(angle, dtype):
    def loss_fn(params, batch):
        h = batch.astype(dtype) @ params["w"].astype(dtype)
        h = h * angle(jnp.arange(2048.0)[:, None])
        y = h @ params["out"].astype(dtype)
        return jnp.mean((y.astype(jnp.float32) - 1.0) ** 2)

    params = {"w": normal(0, 8, 16), "out": normal(1, 16, 4)}
    return trained(loss_fn, params, normal(2, 2048, 8))


@lossy()
def sine_of_a_position(dtype):
    frequencies = 10.0 ** -jnp.linspace(0, 2, 16)

    def angle(positions):
        angles = positions.astype(dtype) * frequencies.astype(dtype)
        return jnp.sin(angles)  # <- here

    return with_positions(angle, dtype)


@right
def sine_in_float32(dtype):
    frequencies = 10.0 ** -jnp.linspace(0, 2, 16)

    def angle(positions):
        return jnp.sin(positions * frequencies).astype(dtype)

    return with_positions(angle, dtype)


def segments(dtype, add, count):
    def loss_fn(params, batch):
        h = jnp.abs(batch.astype(dtype) * params["w"].astype(dtype))
        sums = add(h, jnp.arange(len(batch)) % count)
        return jnp.mean((sums.astype(jnp.float32) / len(batch) - params["to"]) ** 2)

    params = {"w": jnp.ones(4), "to": jnp.zeros(4)}
    return trained(loss_fn, params, normal(0, 20_000, 4))


@lossy()
def sum_of_segments(dtype):
    def add(h, ids):
        return jax.ops.segment_sum(h, ids, 4)  # <- here

    return segments(dtype, add, 4)


@right
def sum_of_short_segments(dtype):
    def add(h, ids):
        return jax.ops.segment_sum(h, ids, 5000) * 1000

    return segments(dtype, add, 5000)


@lossy()
def high_power(dtype):
    def act(h):
        return h**64  # <- here

    return layered(act, dtype, offset=1.0, scale=0.02)


@right
def square(dtype):
    return layered(lambda h: h**2, dtype)


def distances(dtype, between, offset):
    def loss_fn(params, batch):
        h = batch.astype(dtype) @ params["w"].astype(dtype)
        h = h + jnp.asarray(offset, dtype)
        apart = between(h[:16], h[16:])
        return jnp.mean((apart.astype(jnp.float32) - 1.0) ** 2)

    return trained(loss_fn, {"w": normal(0, 8, 8) / 8}, normal(2, 32, 8))


@lossy()
def distance_by_expansion(dtype):
    def between(a, b):
        squares = jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1)
        return squares - 2 * (a @ b.T)  # <- here

    return distances(dtype, between, offset=8)


@right
def distance_of_differences(dtype):
    def between(a, b):
        return jnp.sum((a[:, None] - b) ** 2, -1)

    return distances(dtype, between, offset=0)


def with_bias(dtype, add):
    def loss_fn(params, batch):
        h = batch.astype(dtype) @ params["w"].astype(dtype)
        h = add(h, params["b"].astype(dtype))
        return jnp.mean(jnp.abs(h).astype(jnp.float32))

    params = {"w": 0.01 * normal(0, 4, 8), "b": jnp.ones(8)}
    return trained(loss_fn, params, normal(1, 20_000, 4))


@lossy(is_backward=True)
def gradient_of_a_bias(dtype):
    def rows(bias, length):
        def row(_, i):
            return None, bias + 0 * i

        return lax.scan(row, None, jnp.zeros(length, dtype))[1]  # <- here

    return with_bias(dtype, lambda h, b: h + rows(b, len(h)))


@right
def gradient_of_a_bias_in_float32(dtype):
    def loss_fn(params, batch):
        h = batch.astype(dtype) @ params["w"].astype(dtype)
        h = h.astype(jnp.float32) + params["b"]
        return jnp.mean(jnp.abs(h))

    params = {"w": 0.01 * normal(0, 4, 8), "b": jnp.ones(8)}
    return trained(loss_fn, params, normal(1, 20_000, 4))


# Models.


@right
def perceptron(dtype):
    return layered(jax.nn.gelu, dtype)


class Block(nn.Module):
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x, _=None):
        half = {"dtype": self.dtype}
        h = nn.LayerNorm(**half)(x)
        x = x + nn.MultiHeadDotProductAttention(4, **half)(h, h)
        h = nn.gelu(nn.Dense(2 * self.features, **half)(nn.LayerNorm(**half)(x)))
        return x + nn.Dense(self.features, **half)(h), None


class Transformer(nn.Module):
    dtype: Any
    depth: int = 2
    is_scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 32, dtype=self.dtype)(tokens)
        if self.is_scanned:
            scanned = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = scanned(32, self.dtype)(x, None)
        else:
            for _ in range(self.depth):
                x, _ = Block(32, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(50, dtype=self.dtype)(x).astype(jnp.float32)


def of_tokens(model, **options):
    tokens = jax.random.randint(jax.random.key(3), (4, 16), 0, 50)
    params = model.init(jax.random.key(4), tokens)

    def loss_fn(params, batch):
        logits = model.apply(params, batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    optimizer = jls.loss_scaled(optax.adamw(1e-3))
    return trained(loss_fn, params, tokens, optimizer, **options)


@right
def transformer(dtype):
    return of_tokens(Transformer(dtype))


@right
def scanned_transformer(dtype):
    return of_tokens(Transformer(dtype, depth=4, is_scanned=True))


@right
def autocast_transformer(dtype):
    return of_tokens(Transformer(None), compute_dtype=dtype)


class Convolutions(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Conv(8, (3, 3), dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
            x = nn.relu(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


@right
def convolutions(dtype):
    model, images = Convolutions(dtype), normal(0, 8, 12, 12, 3)
    variables = model.init(jax.random.key(0), images)

    def loss_fn(params, batch):
        held = {"params": params, "batch_stats": variables["batch_stats"]}
        logits, _ = model.apply(held, batch, mutable=["batch_stats"])
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.arange(8)
        ).mean()

    return trained(loss_fn, variables["params"], images)


@right
def recurrent(dtype):
    def loss_fn(params, batch):
        w, u = (params[x].astype(dtype) for x in ("w", "u"))

        def cell(h, x):
            return jnp.tanh(h @ w + x @ u), None

        h, _ = lax.scan(cell, jnp.zeros((8, 16), dtype), batch.astype(dtype))
        y = h @ params["out"].astype(dtype)
        return jnp.mean((y.astype(jnp.float32) - 1.0) ** 2)

    params = {
        "w": normal(0, 16, 16) / 5,
        "u": normal(1, 4, 16) / 2,
        "out": normal(2, 16, 3) / 4,
    }
    return trained(loss_fn, params, normal(3, 64, 8, 4))
