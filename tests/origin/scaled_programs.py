# SPDX-License-Identifier: Apache-2.0
"""Train steps in float16, each with the line that limits its loss scale marked.

Each is complete in itself: it makes a step, its arguments with one loss scale, and
where that is easy the loss alone, for which the same model in float32 gives the true
gradients. Where the ceiling is clear, the line of the forward pass whose derivative
overflows first, at twice the ceiling, ends with the comment "here".

They need implicit dtype promotion, as most programs of users do.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jls

MARK = "# <- here"


class Made(NamedTuple):
    """A step, and what it is called with."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    params: Any = None
    loss: Callable[[Any], Any] | None = None  # of the parameters
    is_skipped: Callable[[Any], Any] | None = None  # of a step without a wrapper


class Program(NamedTuple):
    """One program, and what is true of it. None: not asked."""

    make: Callable[..., Made]  # of the dtype: float16, or float32
    ceiling: float | None = None
    devices: int = 1
    has_twin: bool = True  # float16 is all that limits it
    has_gradients: bool = True  # those of the parameters, once each, in float16
    warns: bool = False  # jls itself warns of it, when it is traced


SCALED: dict[str, Program] = {}


def scaled(**truth):
    def register(make):
        SCALED[make.__name__] = Program(make, **truth)
        return make

    return register


def marked_lines(make: Callable[..., Any]) -> set[int]:
    """The numbers of the lines of this file that are right."""
    lines, first = inspect.getsourcelines(make)
    return {n for n, line in enumerate(lines, first) if line.rstrip().endswith(MARK)}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def uneven(*shape):
    """From 1 down to 2**-50."""
    exponents = np.linspace(0, -50, int(np.prod(shape)))
    return jnp.asarray(2.0**exponents, jnp.float32).reshape(shape)


def trained(
    loss_fn, params, batch, optimizer=None, jit=jax.jit, kwargs=None, **options
):
    """A step of plain pytrees."""
    optimizer = optimizer or jls.loss_scaled(optax.sgd(1e-3))
    kwargs = kwargs or {}
    step = jit(jls.train_step(loss_fn, optimizer, **options))

    def loss(params):
        result = loss_fn(params, batch, **kwargs)
        return result[0] if options.get("has_aux") else result

    args = (params, optimizer.init(params), batch)
    return Made(step, args, kwargs, params, loss)


# Losses of several sizes.


@scaled()
def mean_of_squares(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.mean(y.astype(jnp.float32) ** 2 * uneven(2))

    return trained(loss_fn, {"w": normal(0, 6, 2)}, normal(1, 16, 6))


@scaled()
def sum_without_jit(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)
        y = y.astype(jnp.float32)
        return jnp.sum(y * uneven(16, 1))

    def not_jitted(step):
        return step

    return trained(loss_fn, {"w": normal(0, 6, 2)}, normal(1, 16, 6), jit=not_jitted)


@scaled()
def loss_times_a_millionth(dtype):
    def loss_fn(params, x):
        h = jnp.tanh(x.astype(dtype) @ params["w"].astype(dtype))
        y = h @ params["out"].astype(dtype)
        return 1e-6 * jnp.mean(y.astype(jnp.float32) * uneven(3))

    params = {"w": normal(0, 6, 8), "out": normal(2, 8, 3)}
    return trained(loss_fn, params, normal(1, 16, 6))


@scaled()
def loss_times_ten_thousand(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)  # <- here
        h = h.astype(jnp.float32)
        return 1e4 * jnp.sum(jnp.cos(h) * uneven(6))

    return trained(loss_fn, {"w": jnp.full(6, 0.1)}, normal(1, 16, 6))


@scaled(ceiling=2.0**15, has_twin=False, warns=True)
def loss_in_float16(dtype):
    """The cotangent of the loss is the loss scale itself."""

    def loss_fn(params, x):
        return jnp.mean(x.astype(dtype) * params["w"].astype(dtype))

    return trained(loss_fn, {"w": jnp.ones(6)}, normal(1, 16, 6))


# Parameters.


@scaled(warns=True)
def parameters_in_float16(dtype):
    def loss_fn(params, x):
        h = jnp.tanh(x.astype(dtype) @ params["w"])
        y = h @ params["out"]
        return jnp.sum(y.astype(jnp.float32) ** 2 * uneven(3))

    params = {"w": normal(0, 6, 8).astype(dtype), "out": normal(2, 8, 3).astype(dtype)}
    return trained(loss_fn, params, normal(1, 4, 6))


@scaled()
def bias_of_many_rows(dtype):
    """The derivative of the addition sums 1,024 rows in float16."""

    def loss_fn(params, x):
        y = x.astype(dtype) * params["w"].astype(dtype)
        y = y + params["b"].astype(dtype)  # <- here
        return jnp.mean(y.astype(jnp.float32) * uneven(4))

    params = {"w": jnp.ones(4), "b": jnp.zeros(4)}
    return trained(loss_fn, params, jnp.full((1024, 4), 1e-3))


@scaled()
def last_layer_with_large_weights(dtype):
    def loss_fn(params, x):
        x = x.astype(dtype) @ params["w"].astype(dtype)
        y = x @ params["out"].astype(dtype)  # <- here
        return jnp.mean(y.astype(jnp.float32) * uneven(2))

    params = {"w": normal(0, 4, 4), "out": 500.0 + normal(1, 4, 2)}
    return trained(loss_fn, params, 0.1 * normal(2, 8, 4))


# Operations.


@scaled()
def embedding_of_tokens(dtype):
    """The rows of rare tokens have gradients that vanish."""

    def loss_fn(params, tokens):
        rows = params["embedding"].astype(dtype)[tokens]
        rows = rows * dtype(0.25)
        return jnp.sum(rows.astype(jnp.float32) * uneven(12, 1))

    tokens = jnp.array([0, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8])
    return trained(loss_fn, {"embedding": normal(0, 10, 4)}, tokens)


@scaled()
def convolution_and_pooling(dtype):
    def loss_fn(params, images):
        y = lax.conv_general_dilated(  # <- here
            images.astype(dtype),
            params["kernel"].astype(dtype),
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = nn.max_pool(jax.nn.relu(y), (2, 2), (2, 2))
        return jnp.sum(y.astype(jnp.float32) * uneven(8))

    return trained(loss_fn, {"kernel": normal(0, 3, 3, 2, 8)}, normal(1, 4, 8, 8, 2))


@scaled()
def attention_with_a_causal_mask(dtype):
    def loss_fn(params, x):
        x = x.astype(dtype)
        q, k, v = (x @ params[name].astype(dtype) for name in ("q", "k", "v"))
        scores = q @ k.T / dtype(2.0)
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        return jnp.sum((weights @ v).astype(jnp.float32) ** 2)

    params = {name: normal(seed, 4, 4) for seed, name in enumerate(("q", "k", "v"))}
    return trained(loss_fn, params, normal(5, 6, 4))


@scaled()
def attention_with_an_additive_mask(dtype):
    """What is added is -1e9: -inf in float16."""

    def loss_fn(params, batch):
        x = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        weights = jax.nn.softmax(x @ x.T + batch["mask"].astype(dtype))
        return jnp.mean((weights @ x).astype(jnp.float32) ** 2)

    mask = jnp.triu(jnp.full((6, 6), -1e9), 1)
    return trained(
        loss_fn, {"w": normal(0, 4, 4)}, {"x": normal(1, 6, 4), "mask": mask}
    )


@scaled()
def layer_norm_in_float16(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + dtype(1e-3))
        h = h * params["gain"].astype(dtype)
        return jnp.sum(h.astype(jnp.float32) * uneven(8))

    params = {"w": normal(0, 4, 8), "gain": jnp.ones(8)}
    return trained(loss_fn, params, normal(1, 16, 4))


@scaled()
def dropout_with_a_key(dtype):
    def loss_fn(params, x, rng):
        h = jax.nn.relu(x.astype(dtype) @ params["w"].astype(dtype))
        keep = jax.random.bernoulli(rng, 0.5, h.shape)
        h = jnp.where(keep, h / dtype(0.5), dtype(0.0))
        return jnp.mean((h @ params["out"].astype(dtype)).astype(jnp.float32) ** 2)

    params = {"w": normal(0, 4, 8), "out": normal(1, 8, 2)}
    rng = {"rng": jax.random.key(3)}
    return trained(loss_fn, params, normal(2, 8, 4), kwargs=rng)


@scaled()
def einsum_of_heads(dtype):
    def loss_fn(params, x):
        heads = jnp.einsum("ti,hio->hto", x.astype(dtype), params["w"].astype(dtype))
        y = jnp.einsum("hto,hoj->tj", heads, params["out"].astype(dtype))
        return jnp.sum(y.astype(jnp.float32) * uneven(6, 4))

    params = {"w": normal(0, 3, 4, 5), "out": normal(1, 3, 5, 4)}
    return trained(loss_fn, params, normal(2, 6, 4))


@scaled()
def sorted_and_accumulated(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        largest, _ = lax.top_k(h, 4)
        total = jnp.cumsum(jnp.sort(largest, axis=-1), axis=-1)
        order = jnp.argsort(x[:, :4], axis=-1)
        total = jnp.take_along_axis(total, order, axis=-1)
        return jnp.sum(total.astype(jnp.float32) * uneven(5, 4))

    return trained(loss_fn, {"w": 1.0 + normal(0, 8) / 8}, normal(1, 5, 8))


@scaled()
def sums_of_segments(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        of = jnp.array([0, 0, 1, 2, 2, 2])
        sums = jax.ops.segment_sum(h, of, 3) * dtype(0.5)
        return jnp.sum(sums.astype(jnp.float32) ** 2 * uneven(3, 1))

    return trained(loss_fn, {"w": jnp.ones(4)}, normal(0, 6, 4))


@scaled(has_twin=False, has_gradients=False)
def gradients_in_float8(dtype):
    """Only the cotangent of the cast is narrow: 57,344 is the most in float8_e5m2."""
    narrow = jnp.float32 if dtype == jnp.float32 else jnp.float8_e5m2

    def loss_fn(params, x):
        y = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        y = y.astype(narrow).astype(jnp.bfloat16)  # <- here
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return trained(loss_fn, {"w": normal(0, 4, 2)}, normal(1, 8, 4))


# Loops, branches, rules.


@scaled(has_gradients=False)
def recurrent_network(dtype):
    def loss_fn(params, xs):
        w, u = params["w"].astype(dtype), params["u"].astype(dtype)

        def cell(h, x):
            h = jnp.tanh(h @ w + x @ u)  # <- here
            return h, h

        h, _ = lax.scan(cell, params["h"].astype(dtype), xs.astype(dtype))
        return jnp.sum(h.astype(jnp.float32) * uneven(6))

    params = {"w": 3.0 * jnp.eye(6), "u": normal(1, 3, 6), "h": jnp.zeros((2, 6))}
    return trained(loss_fn, params, 1e-4 * normal(2, 7, 2, 3))


@scaled()
def rematerialized_layers(dtype):
    def loss_fn(params, x):
        @jax.checkpoint
        def layer(h, w):
            return jnp.sin(h @ w) * dtype(3.0), None  # <- here

        h, _ = lax.scan(layer, x.astype(dtype), params["layers"].astype(dtype))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return trained(loss_fn, {"layers": normal(0, 4, 5, 5)}, normal(1, 8, 5))


@scaled()
def one_example_at_a_time(dtype):
    def loss_fn(params, batch):
        def one(x, target):
            y = jnp.tanh(params["w"].astype(dtype) @ x.astype(dtype))
            return jnp.sum((y.astype(jnp.float32) - target) ** 2)

        return jnp.mean(jax.vmap(one)(batch["x"], batch["y"]) * uneven(8))

    batch = {"x": normal(1, 8, 4), "y": normal(2, 8, 3)}
    return trained(loss_fn, {"w": normal(0, 3, 4)}, batch)


@scaled()
def branch_that_is_taken(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)

        def large(h):
            return h * dtype(100.0)  # <- here

        h = lax.cond(jnp.sum(x) > -1e3, large, jnp.tanh, h)
        return jnp.sum(h.astype(jnp.float32) * uneven(2))

    return trained(loss_fn, {"w": 1e-2 * normal(0, 4, 2)}, 1e-2 * normal(1, 8, 4))


@scaled()
def loops_of_both_kinds(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)
        size = lax.while_loop(
            lambda size: size < 100.0,
            lambda size: 2 * size + 1,
            lax.stop_gradient(jnp.max(jnp.abs(h))),
        )
        h = lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * dtype(2.0), h / size)
        return jnp.mean(h.astype(jnp.float32) * uneven(2))

    return trained(loss_fn, {"w": normal(0, 4, 2)}, normal(1, 8, 4))


@scaled()
def rule_of_the_users_own(dtype):
    @jax.custom_vjp
    def amplified(x):
        return x

    def backward(_, cotangent):
        return (cotangent * dtype(64.0),)  # <- here

    amplified.defvjp(lambda x: (x, None), backward)

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        h = amplified(h)  # <- here
        return jnp.mean(h.astype(jnp.float32) * uneven(4))

    return trained(loss_fn, {"w": jnp.ones(4)}, 1e-2 * normal(1, 8, 4))


@scaled()
def tangent_of_the_users_own(dtype):
    @jax.custom_jvp
    def softened(x):
        return jnp.maximum(x, 0)

    @softened.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return jnp.maximum(x, 0), jax.nn.sigmoid(x) * t

    def loss_fn(params, x):
        h = softened(x.astype(dtype) @ params["w"].astype(dtype))
        return jnp.sum(h.astype(jnp.float32) * uneven(8, 1))

    return trained(loss_fn, {"w": normal(0, 4, 3)}, normal(1, 8, 4))


# Several devices.


@scaled(devices=2, has_gradients=False)
def step_in_shard_map(dtype):
    """Of the second device the gradients are the largest."""
    optimizer = jls.loss_scaled(optax.sgd(1e-3))

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)  # <- here
        return lax.pmean(jnp.mean(h.astype(jnp.float32)), "data")

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    every, split = PartitionSpec(), PartitionSpec("data")
    step = jax.shard_map(
        jls.train_step(loss_fn, optimizer),
        mesh=mesh,
        in_specs=(every, every, split),
        out_specs=every,
    )
    params = {"w": jnp.ones(4)}
    x = jnp.concatenate([jnp.full((4, 4), 0.1), jnp.full((4, 4), 100.0)])
    return Made(jax.jit(step), (params, optimizer.init(params), x), {}, params)


@scaled(devices=2)
def batch_over_two_devices(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.mean(y.astype(jnp.float32) ** 2 * uneven(2))

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.device_put(normal(1, 8, 4), NamedSharding(mesh, PartitionSpec("data")))
    return trained(loss_fn, {"w": normal(0, 4, 2)}, x)


# Whole steps.


@scaled(has_gradients=False)
def micro_batches(dtype):
    """The second of two micro-batches has the larger gradients."""

    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.mean(y.astype(jnp.float32) * uneven(2))

    x = normal(1, 8, 4).at[4:].multiply(50.0)
    return trained(loss_fn, {"w": normal(0, 4, 2)}, x, micro_batches=2)


@scaled()
def loss_with_other_results(dtype):
    """One of them, a sigmoid that overflows inside, has no part in the loss."""

    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        chance = 1 / (1 + jnp.exp(-100 * h))
        return jnp.mean(h.astype(jnp.float32) ** 2 * uneven(2)), {"chance": chance}

    return trained(loss_fn, {"w": normal(0, 4, 2)}, normal(1, 8, 4), has_aux=True)


@scaled()
def batch_statistics_that_are_carried(dtype):
    optimizer = jls.loss_scaled(optax.adam(1e-3))

    def loss_fn(params, mean, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        mean = 0.9 * mean + 0.1 * jnp.mean(h.astype(jnp.float32), axis=0)
        return jnp.sum((h - mean.astype(dtype)).astype(jnp.float32) ** 2), mean

    params, mean, x = {"w": normal(0, 4, 2)}, jnp.zeros(2), normal(1, 8, 4)
    step = jax.jit(jls.train_step(loss_fn, optimizer, carried=True))
    args = (params, optimizer.init(params), mean, x)
    return Made(step, args, {}, params, lambda params: loss_fn(params, mean, x)[0])


@scaled()
def accumulation_inside_the_wrapper(dtype):
    """Arguments are donated."""

    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.sum(y.astype(jnp.float32) * uneven(2))

    inner = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2)
    return trained(
        loss_fn,
        {"w": normal(0, 4, 2)},
        3.0 * normal(1, 8, 4),
        jls.loss_scaled(inner.gradient_transformation()),
        jit=partial(jax.jit, donate_argnums=(0, 1)),
    )


@scaled()
def step_by_hand(dtype):
    """Without an optimizer of jls: a scaler, and what it needs."""
    scaler = jls.dynamic()

    def loss_fn(params, x):
        h = jnp.tanh(x.astype(dtype) @ params["w"].astype(dtype))
        h = h.astype(jnp.float32)
        return jnp.sum(h * uneven(8, 2))

    @jax.jit
    def train_step(params, state, x):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        is_finite = jls.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        params = jls.select(is_finite, new, params)
        return params, scaler.adjust(state, is_finite), is_finite, loss

    params, x = {"w": normal(0, 4, 2)}, normal(1, 8, 4)
    return Made(
        train_step,
        (params, scaler.init(), x),
        {},
        params,
        lambda params: loss_fn(params, x),
        lambda results: not results[2],
    )


@scaled()
def scale_that_is_static(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)
        return jnp.mean(y.astype(jnp.float32) * uneven(2))

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.static(128.0))
    return trained(loss_fn, {"w": normal(0, 4, 2)}, normal(1, 8, 4), optimizer)


@scaled()
def without_a_scale_as_yet(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.sum(y.astype(jnp.float32) ** 2)

    optimizer = jls.skip_nonfinite(optax.sgd(1e-3))
    return trained(loss_fn, {"w": normal(0, 4, 2)}, normal(1, 8, 4), optimizer)


# Libraries.


@scaled()
def linen_train_state(dtype):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
            return x + nn.Dense(4, dtype=dtype)(nn.relu(h))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block()(x)
            return nn.Dense(1, dtype=dtype, name="head")(x)

    model, batch = Network(), normal(1, 8, 4)
    params = model.init(jax.random.key(0), batch)["params"]

    def loss(params):
        y = model.apply({"params": params}, batch)
        return jnp.mean(y.astype(jnp.float32) ** 2 * uneven(8, 1))

    def loss_fn(state, batch):
        y = state.apply_fn({"params": state.params}, batch)
        return jnp.mean(y.astype(jnp.float32) ** 2 * uneven(8, 1))

    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=jls.loss_scaled(optax.adam(1e-3))
    )
    step = jax.jit(jls.train_step(loss_fn), donate_argnums=0)
    return Made(step, (state, batch), {}, params, loss)


@scaled(has_gradients=False)
def nnx_with_dropout_and_statistics(dtype):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(4, 8, dtype=dtype, rngs=rngs)
            self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.outer = nnx.Linear(8, 2, dtype=dtype, rngs=rngs)

        def __call__(self, x):
            h = nnx.relu(self.norm(self.inner(x)))
            return self.outer(self.dropout(h))  # <- here

    def loss_fn(model, batch):
        return jnp.sum(model(batch).astype(jnp.float32) ** 2)

    model = Network(nnx.Rngs(0))
    tx = jls.loss_scaled(optax.adam(1e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return Made(nnx.jit(jls.train_step(loss_fn)), (model, optimizer, normal(1, 8, 4)))


@scaled(has_gradients=False)
def equinox_network(dtype):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        scale: jax.Array

        def __call__(self, x):
            return self.linear(x) * self.scale  # <- here

    def loss_fn(model, x):
        model = jax.tree.map(lambda p: p.astype(dtype), model)
        y = jax.vmap(model)(x.astype(dtype))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    linear = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    model, optimizer = Model(linear, jnp.full(2, 3.0)), jls.loss_scaled(optax.sgd(1e-3))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = eqx.filter_jit(jls.train_step(loss_fn, optimizer))
    return Made(step, (model, opt_state, normal(1, 8, 4)))


@scaled()
def haiku_network(dtype):
    def network(x):
        h = hk.Linear(8, name="inner")(x.astype(dtype))
        return hk.Linear(2, name="outer")(jnp.tanh(h))

    network = hk.without_apply_rng(hk.transform(network))
    x = normal(1, 8, 4)
    params = network.init(jax.random.key(0), x.astype(jnp.float32))

    def loss_fn(params, x):
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        y = network.apply(params, x).astype(jnp.float32)
        return jnp.mean(y * uneven(8, 2))

    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return trained(loss_fn, params, x)


@scaled(has_gradients=False)
def transformer(dtype):
    def block(x, layer):
        h = x.astype(dtype)
        q, k, v = (h @ layer[name].astype(dtype) for name in ("q", "k", "v"))
        scores = (q @ k.T).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(dtype)
        h = jax.nn.relu((weights @ v) @ layer["up"].astype(dtype))
        return x + (h @ layer["down"].astype(dtype)).astype(jnp.float32)

    def loss_fn(params, tokens):
        x = params["embedding"].astype(dtype)[tokens].astype(jnp.float32)
        x = block(x, params["layer"])
        logits = x.astype(dtype) @ params["embedding"].T.astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:-1].astype(jnp.float32), tokens[1:]
        ).mean()

    shapes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "up": (8, 16), "down": (16, 8)}
    layer = {
        name: 0.3 * normal(seed, *shape)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    params = {"embedding": normal(9, 10, 8), "layer": layer}
    return trained(loss_fn, params, jnp.array([1, 5, 2, 2, 9, 0]))


@scaled()
def shared_by_two_losses(dtype):
    """Two backward passes, of one loss scale: the second is the larger."""
    optimizer = jls.loss_scaled(optax.sgd(1e-3))

    def first(params, x):
        return jnp.mean(
            (x.astype(dtype) * params["w"].astype(dtype)).astype(jnp.float32)
        )

    def second(params, x):
        y = x.astype(dtype) @ params["w"].astype(dtype)  # <- here
        return jnp.sum(y.astype(jnp.float32) ** 2)

    @jax.jit
    def train_step(params, opt_state, x):
        one, grads = jls.value_and_grad(first)(opt_state, params, x)
        other, more = jls.value_and_grad(second)(opt_state, params, x)
        grads = jax.tree.map(jnp.add, grads, more)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, value=one + other
        )
        return optax.apply_updates(params, updates), opt_state

    params, x = {"w": jnp.ones(4)}, normal(1, 8, 4)
    return Made(
        train_step,
        (params, optimizer.init(params), x),
        {},
        params,
        lambda params: first(params, x) + second(params, x),
    )


# The forward pass overflows, all ends are finite, and the numbers are wrong.

SILENT: dict[str, Program] = {}


def silent(make):
    SILENT[make.__name__] = Program(make)
    return make


@silent
def norm_of_large_numbers(dtype):
    """The variance is inf, and one over its root 0."""

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        variance = jnp.mean(h * h, axis=-1, keepdims=True)  # <- here
        h = h * lax.rsqrt(variance + dtype(1e-3))
        return jnp.mean(h.astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(4)}, 300.0 + normal(0, 8, 4))


@silent
def unit_vectors(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        length = jnp.sqrt(jnp.sum(h * h, axis=-1, keepdims=True))  # <- here
        return jnp.mean((h / length).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((2, 8), 200.0))


@silent
def softmax_without_the_maximum(dtype):
    """Each exp is below 65,504, but not their sum."""

    def loss_fn(params, x):
        h = jnp.exp(x.astype(dtype) * params["w"].astype(dtype))
        h = h / jnp.sum(h, axis=-1, keepdims=True)  # <- here
        return jnp.mean(h.astype(jnp.float32) * x)

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((2, 8), 10.5))


@silent
def heavy_tails(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        square = lax.stop_gradient(h) ** 2  # <- here
        near = 1 / (1 + square)
        return jnp.sum((near * h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(4)}, 260.0 + normal(0, 8, 4))


@silent
def share_of_a_segment(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        total = jax.ops.segment_sum(h, jnp.arange(400) % 2, 2)  # <- here
        return jnp.mean((h[:2] / total).astype(jnp.float32)) + 1e-5 * jnp.mean(
            h, dtype="f"
        )

    return trained(loss_fn, {"w": jnp.ones(400)}, jnp.full(400, 500.0))


@silent
def norm_in_each_layer(dtype):
    def loss_fn(params, x):
        def layer(h, w):
            h = h * w
            power = jnp.sum(h * h, axis=-1, keepdims=True)  # <- here
            return h / dtype(2.0) + h * lax.rsqrt(power + dtype(1.0)), None

        h, _ = lax.scan(layer, x.astype(dtype), params["layers"].astype(dtype))
        return jnp.mean(h.astype(jnp.float32))

    return trained(loss_fn, {"layers": jnp.ones((3, 4))}, jnp.full((2, 4), 200.0))


# An inf that does no harm.

HARMLESS: dict[str, Program] = {}


def harmless(make):
    HARMLESS[make.__name__] = Program(make)
    return make


@harmless
def mask_that_was_an_argument(dtype):
    """The lowest float16 added to scores below 0: some are -inf, some are not."""

    def loss_fn(params, batch):
        x = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        scores = dtype(30.0) * (x @ x.T) + batch["mask"].astype(dtype)
        return jnp.mean((jax.nn.softmax(scores) @ x).astype(jnp.float32) ** 2)

    mask = jnp.triu(jnp.full((6, 6), -65504.0), 1)
    return trained(
        loss_fn, {"w": normal(0, 4, 4)}, {"x": normal(1, 6, 4), "mask": mask}
    )


@harmless
def mask_upon_mask(dtype):
    """Causal and padded: their sum is -inf."""

    def loss_fn(params, batch):
        x = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        padded, later = (1 - batch[name].astype(dtype) for name in ("real", "causal"))
        scores = x @ x.T + padded * dtype(-6e4) + later * dtype(-6e4)
        return jnp.mean((jax.nn.softmax(scores) @ x).astype(jnp.float32) ** 2)

    batch = {"x": normal(1, 6, 4), "causal": jnp.tril(jnp.ones((6, 6)))}
    batch["real"] = jnp.ones(6).at[5].set(0.0)
    return trained(loss_fn, {"w": normal(0, 4, 4)}, batch)


@harmless
def logsumexp_of_masked_logits(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)
        h = jnp.where(jnp.arange(6) < 4, h, -jnp.inf)
        return jnp.mean(jax.nn.logsumexp(h, axis=-1).astype(jnp.float32))

    return trained(loss_fn, {"w": normal(0, 4, 6)}, normal(1, 8, 4))


@harmless
def bell_curve_far_away(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        return jnp.mean((jnp.exp(-h * h) + h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((2, 8), 300.0))


@harmless
def square_that_is_clipped(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        h = jnp.clip(h * h, 0, 100) + jnp.minimum(h * h, 5) + h
        return jnp.mean(h.astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((2, 8), 300.0))


@harmless
def saturated_tanh(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        return jnp.mean((jnp.tanh(h * dtype(300.0)) + h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((2, 8), 300.0))


@harmless
def gate_written_with_exp(dtype):
    """Some are over 11, and 1 / inf is the right 0."""

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        gate = 1 / (1 + jnp.exp(-lax.stop_gradient(h)))
        return jnp.mean((gate * h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, 10.0 * normal(0, 3, 8))


@harmless
def gate_that_is_shut(dtype):
    """2e-9 is 0 in float16 in any case."""

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        gate = 1 / (1 + jnp.exp(-lax.stop_gradient(h)))
        return jnp.mean((gate + h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, jnp.full((3, 8), -20.0))


@harmless
def nearest_with_a_sentinel(dtype):
    """The distance to itself is made as large as can be."""

    def loss_fn(params, x):
        h = x.astype(dtype) @ params["w"].astype(dtype)
        distance = jnp.sum((h[:, None] - h) ** 2, axis=-1)
        distance = distance + jnp.eye(len(x), dtype=dtype) * dtype(6e4) * dtype(2)
        return jnp.mean(jnp.min(distance, axis=-1).astype(jnp.float32))

    return trained(loss_fn, {"w": normal(0, 4, 3)}, normal(1, 6, 4))


@harmless
def distance_over_a_sentinel(dtype):
    """A constant that stands for infinity, and is: no line of the data overflows."""

    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        far = jnp.full(4, 6e4, dtype) * 2
        return jnp.mean((h + h / far).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(4)}, 8.0 + jnp.arange(4.0))


@harmless
def sentinel_of_the_data(dtype):
    def loss_fn(params, batch):
        h = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        missing = batch["missing"].astype(dtype)  # 1e9 is inf
        h = jnp.minimum(h, missing)
        return jnp.mean(h.astype(jnp.float32))

    batch = {"x": normal(1, 6, 4), "missing": jnp.full((6, 3), 1e9)}
    return trained(loss_fn, {"w": normal(0, 4, 3)}, batch)


@harmless
def choice_of_what_is_small(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)
        inside = lax.stop_gradient(h)
        weight = jnp.where(inside > 5, dtype(1.0), jnp.exp(dtype(3.0) * inside))
        return jnp.mean((weight * h).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(8)}, 8.0 + normal(0, 3, 8))


@harmless
def iteration_that_begins_with_inf(dtype):
    def loss_fn(params, x):
        h = x.astype(dtype) * params["w"].astype(dtype)

        def body(carry):
            root, _ = carry
            new = dtype(0.5) * (root + lax.stop_gradient(h) / root)
            return new, jnp.max(jnp.abs(new - root))

        root, _ = lax.while_loop(
            lambda carry: carry[1] > 1e-2, body, (jnp.ones_like(h), dtype(jnp.inf))
        )
        return jnp.mean((h / root).astype(jnp.float32))

    return trained(loss_fn, {"w": jnp.ones(4)}, 1.0 + jnp.arange(4.0))


def made_of(program: Program, dtype: Any = jnp.float16) -> Made:
    with warnings.catch_warnings():
        if program.warns:
            warnings.simplefilter("ignore", jls.JlsWarning)
        return program.make(dtype)
