"""Float32 programs of every kind, each a loss of parameters and a batch.

None has a dtype of its own. What each must do is in `test_any_program.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P


class Program(NamedTuple):
    loss: Callable[..., Any]  # (params, batch) -> f32[]
    params: Any
    batch: Any


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make):
    PROGRAMS[make.__name__] = make
    return make


class Numbers:
    """Arrays of random numbers, the same in every version of JAX."""

    def __init__(self, seed=0):
        self._state = np.random.RandomState(seed)

    def __call__(self, *shape, scale=None):
        scale = shape[0] ** -0.5 if scale is None and shape else scale or 1.0
        return jnp.asarray(self._state.randn(*shape) * scale, jnp.float32)

    def labels(self, high, *shape):
        return jnp.asarray(self._state.randint(0, high, shape), jnp.int32)


def layer_norm(x, scale, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * scale + bias


def cross_entropy(logits, labels):
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


WIDTH, HEADS, LENGTH, WORDS = 32, 2, 8, 29


def block_params(numbers):
    return {
        "norm1": (jnp.ones(WIDTH), jnp.zeros(WIDTH)),
        "norm2": (jnp.ones(WIDTH), jnp.zeros(WIDTH)),
        "qkv": numbers(WIDTH, 3 * WIDTH),
        "out": numbers(WIDTH, WIDTH),
        "up": numbers(WIDTH, 4 * WIDTH),
        "down": numbers(4 * WIDTH, WIDTH),
    }


def attention(qkv):
    batch, length, _ = qkv.shape
    q, k, v = jnp.split(qkv.reshape(batch, length, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, -1)


def block(x, params):
    y = attention(layer_norm(x, *params["norm1"]) @ params["qkv"])
    x = x + checkpoint_name(y @ params["out"], "mixed")
    y = jax.nn.gelu(layer_norm(x, *params["norm2"]) @ params["up"])
    return x + y @ params["down"]


def tokens(numbers):
    words = numbers.labels(WORDS, 4, LENGTH + 1)
    return words[:, :-1], words[:, 1:]


def gpt(apply_blocks, stacked):
    numbers = Numbers()
    blocks = [block_params(numbers) for _ in range(2)]
    if stacked:
        blocks = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    params = {"words": numbers(WORDS, WIDTH, scale=0.3), "blocks": blocks}

    def loss(params, batch):
        words, labels = batch
        x = apply_blocks(params["words"][words], params["blocks"])
        return cross_entropy(x @ params["words"].T, labels)

    return Program(loss, params, tokens(numbers))


@program
def gpt_unrolled():
    return gpt(lambda x, blocks: functools.reduce(block, blocks, x), stacked=False)


def scanned(step):
    return lambda x, blocks: lax.scan(lambda x, p: (step(x, p), None), x, blocks)[0]


@program
def gpt_scan_remat():
    return gpt(scanned(jax.checkpoint(block)), stacked=True)


@program
def gpt_scan_policy():
    policy = jax.checkpoint_policies.save_only_these_names("mixed")
    return gpt(scanned(jax.checkpoint(block, policy=policy)), stacked=True)


@program
def attention_of_jax():
    numbers = Numbers()
    params = {"qkv": numbers(WIDTH, 3 * WIDTH), "out": numbers(WIDTH, 3)}

    def loss(params, batch):
        x, labels = batch
        shape = (*x.shape[:2], HEADS, -1)
        q, k, v = (y.reshape(shape) for y in jnp.split(x @ params["qkv"], 3, -1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return cross_entropy(y.reshape(x.shape) @ params["out"], labels)

    return Program(
        loss, params, (numbers(4, LENGTH, WIDTH), numbers.labels(3, 4, LENGTH))
    )


@program
def lstm():
    numbers = Numbers()
    params = {
        "x": numbers(8, 4 * WIDTH),
        "h": numbers(WIDTH, 4 * WIDTH),
        "b": jnp.zeros(4 * WIDTH),
        "out": numbers(WIDTH, 1),
    }

    def loss(params, batch):
        xs, y = batch

        def cell(carry, x):
            c, h = carry
            gates = x @ params["x"] + h @ params["h"] + params["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        zeros = jnp.zeros((xs.shape[1], WIDTH))
        _, hidden = lax.scan(cell, (zeros, zeros), xs)
        return jnp.mean((hidden[-1] @ params["out"] - y) ** 2)

    return Program(loss, params, (numbers(12, 4, 8, scale=1.0), numbers(4, 1)))


@program
def convolutions_batch_norm():
    numbers = Numbers()
    params = {
        "conv1": numbers(3, 3, 3, 16, scale=0.2),
        "conv2": numbers(3, 3, 1, 16, scale=0.3),  # one a channel
        "conv3": numbers(3, 3, 16, 16, scale=0.1),  # transposed
        "scale": jnp.ones(16),
        "bias": jnp.zeros(16),
        "out": numbers(16, 5),
    }
    dims = ("NHWC", "HWIO", "NHWC")

    def norm(x, params):
        mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["bias"]

    def loss(params, batch):
        x, labels = batch
        x = lax.conv_general_dilated(
            x, params["conv1"], (2, 2), "SAME", dimension_numbers=dims
        )
        x = jax.nn.relu(norm(x, params))
        y = lax.conv_general_dilated(
            x,
            params["conv2"],
            (1, 1),
            "SAME",
            dimension_numbers=dims,
            feature_group_count=16,
        )
        x = jax.nn.relu(x + norm(y, params))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        x = lax.conv_transpose(
            x, params["conv3"], (2, 2), "SAME", dimension_numbers=dims
        )
        x = jnp.mean(jax.nn.silu(norm(x, params)), axis=(1, 2))
        return cross_entropy(x @ params["out"], labels)

    return Program(loss, params, (numbers(8, 8, 8, 3, scale=1.0), numbers.labels(5, 8)))


@program
def experts_cond_ragged():
    numbers = Numbers()
    params = {
        "router": numbers(WIDTH, 4),
        "experts": numbers(4, WIDTH, WIDTH, scale=0.2),
        "skip": numbers(WIDTH, WIDTH),
        "out": numbers(WIDTH, 3),
    }

    def loss(params, batch):
        x, labels = batch
        weights = jax.nn.softmax(x @ params["router"])
        weight, expert = lax.top_k(weights, 1)
        order = jnp.argsort(expert[:, 0])
        sizes = jnp.bincount(expert[:, 0], length=4)
        y = lax.ragged_dot(x[order], params["experts"], sizes)
        y = jnp.zeros_like(y).at[order].set(y) * weight
        x = lax.cond(
            jnp.sum(x) > 0,
            lambda y: y @ params["skip"],
            lambda y: jnp.tanh(y @ (2 * params["skip"])),
            x + y,
        )
        balance = jnp.sum(jnp.mean(weights, axis=0) ** 2)
        return cross_entropy(x @ params["out"], labels) + 0.01 * balance

    return Program(loss, params, (numbers(16, WIDTH, scale=1.0), numbers.labels(3, 16)))


@jax.custom_vjp
def fixed_point(w, x):
    def step(z):
        return jnp.tanh(z @ w + x)

    return lax.while_loop(
        lambda state: state[1] < 8,
        lambda state: (step(state[0]), state[1] + 1),
        (jnp.zeros_like(x), 0),
    )[0]


def _fixed_point_forwards(w, x):
    z = fixed_point(w, x)
    return z, (w, x, z)


def _fixed_point_backwards(saved, g):
    w, x, z = saved
    _, pull = jax.vjp(lambda w, x, z: jnp.tanh(z @ w + x), w, x, z)
    u = lax.fori_loop(0, 8, lambda i, u: g + pull(u)[2], g)
    return pull(u)[:2]


fixed_point.defvjp(_fixed_point_forwards, _fixed_point_backwards)


@program
def equilibrium_while_custom_vjp():
    numbers = Numbers()
    params = {
        "in": numbers(8, WIDTH),
        "w": numbers(WIDTH, WIDTH, scale=0.08),
        "out": numbers(WIDTH, 1),
    }

    def loss(params, batch):
        x, y = batch
        z = fixed_point(params["w"], x @ params["in"])
        return jnp.mean((z @ params["out"] - y) ** 2)

    return Program(loss, params, (numbers(16, 8, scale=1.0), numbers(16, 1)))


@jax.custom_vjp
def flash(q, k, v):
    return _flash_forwards(q, k, v)[0]


def _flash_forwards(q, k, v):
    def step(carry, block):
        total, largest, out = carry
        k, v = block
        scores = q @ k.T
        top = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights, decay = jnp.exp(scores - top[:, None]), jnp.exp(largest - top)
        total = decay * total + jnp.sum(weights, axis=-1)
        return (total, top, decay[:, None] * out + weights @ v), None

    blocks = tuple(x.reshape(2, -1, x.shape[-1]) for x in (k, v))
    zeros = jnp.zeros(q.shape[0])
    begin = (zeros, jnp.full_like(zeros, -jnp.inf), jnp.zeros_like(q))
    (total, top, out), _ = lax.scan(step, begin, blocks)
    out = out / total[:, None]
    return out, (q, k, v, out, top + jnp.log(total))


def _flash_backwards(saved, g):
    q, k, v, out, logs = saved
    weights = jnp.exp(q @ k.T - logs[:, None])
    dv = weights.T @ g
    ds = weights * (g @ v.T - jnp.sum(g * out, axis=-1, keepdims=True))
    return ds @ k, ds.T @ q, dv


flash.defvjp(_flash_forwards, _flash_backwards)


@program
def flash_attention_custom_vjp():
    numbers = Numbers()
    params = {"qkv": numbers(WIDTH, 3 * WIDTH), "out": numbers(WIDTH, 3)}

    def loss(params, batch):
        x, labels = batch
        q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
        y = jax.vmap(flash)(q / 5, k, v)
        return cross_entropy((x + y) @ params["out"], labels)

    return Program(
        loss, params, (numbers(4, LENGTH, WIDTH), numbers.labels(3, 4, LENGTH))
    )


@program
def mlp_vmap_map():
    numbers = Numbers()
    params = {"up": numbers(8, WIDTH), "down": numbers(WIDTH, 1)}

    def loss(params, batch):
        def norm_of_one(x):
            h = jax.nn.elu(x @ params["up"])
            return (h / (jnp.linalg.norm(h) + 1e-9)) @ params["down"]

        xs, ys = batch
        y = jnp.concatenate([jax.vmap(norm_of_one)(xs), lax.map(norm_of_one, xs)])
        return jnp.mean(huber(y - jnp.concatenate([ys, ys])))

    return Program(loss, params, (numbers(16, 8, scale=1.0), numbers(16, 1)))


def huber(x):
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x**2, size - 0.5)


@program
def associative_scan():
    numbers = Numbers()
    params = {
        "gate": numbers(WIDTH, WIDTH),
        "in": numbers(WIDTH, WIDTH),
        "out": numbers(WIDTH, 3),
    }

    def loss(params, batch):
        x, labels = batch
        decay = jax.nn.sigmoid(x @ params["gate"])
        value = (1 - decay) * (x @ params["in"])

        def compose(one, other):
            return one[0] * other[0], other[0] * one[1] + other[1]

        _, hidden = lax.associative_scan(compose, (decay, value), axis=1)
        return cross_entropy(hidden @ params["out"], labels)

    return Program(
        loss, params, (numbers(4, LENGTH, WIDTH), numbers.labels(3, 4, LENGTH))
    )


@program
def shard_map_tensor_parallel():
    numbers = Numbers()
    params = {"up": numbers(16, 64), "down": numbers(64, 16), "out": numbers(16, 3)}
    automatic = (jax.sharding.AxisType.Auto,)
    one = jax.devices()[:1]  # as the reference takes it
    mesh = jax.make_mesh((1,), ("d",), axis_types=automatic, devices=one)

    def loss(params, batch):
        x, labels = batch

        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P(None, "d"), P("d", None)),
            out_specs=P(),
        )
        def layer(x, up, down):
            return x + lax.psum(jax.nn.gelu(x @ up) @ down, "d")

        x = layer(x, params["up"], params["down"])
        return cross_entropy(x @ params["out"], labels)

    return Program(loss, params, (numbers(8, 16, scale=1.0), numbers.labels(3, 8)))


@program
def nested_jit():
    numbers = Numbers()
    params = {"up": numbers(8, WIDTH), "down": numbers(WIDTH, 1)}

    @functools.partial(jax.jit, static_argnames="act")
    def layer(x, w, act):
        return act(x @ w)

    def loss(params, batch):
        x, y = batch
        h = layer(x, params["up"], act=jax.nn.silu)
        return jnp.mean((layer(h, params["down"], act=jnp.tanh) - y) ** 2)

    return Program(loss, params, (numbers(16, 8, scale=1.0), numbers(16, 1)))


@program
def gradient_penalty():
    numbers = Numbers()
    params = {"up": numbers(8, WIDTH), "down": numbers(WIDTH, 1)}

    def critic(params, x):
        h = jax.nn.softplus(x @ params["up"])
        return jnp.sum(jax.checkpoint(jnp.tanh)(h) @ params["down"])

    def loss(params, x):
        slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, x)
        norms = jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12)
        return critic(params, x) / len(x) + 10 * jnp.mean((norms - 1) ** 2)

    return Program(loss, params, numbers(16, 8, scale=1.0))


@program
def fourier_and_linear_algebra():
    numbers = Numbers()
    params = {"in": numbers(8, 8), "mid": numbers(8, 8), "out": numbers(8, 1)}

    def loss(params, batch):
        x, y = batch
        h = x @ params["in"]
        h = h + jnp.real(jnp.fft.fft(h)) / 8
        h = jax.nn.gelu(h @ params["mid"], approximate=False)
        cover = h.T @ h / len(h) + jnp.eye(8)
        white = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(cover), h.T)
        ranked = jnp.cumsum(jnp.sort(h, axis=-1), axis=-1)
        pooled = jax.ops.segment_sum(ranked, jnp.arange(16) % 4, 4)
        y = jnp.mean((white.T @ params["out"] - y) ** 2)
        return y + jnp.mean((pooled @ params["out"]) ** 2)

    return Program(loss, params, (numbers(16, 8, scale=1.0), numbers(16, 1)))


@program
def variational_autoencoder():
    numbers = Numbers()
    params = {"in": numbers(12, WIDTH), "code": numbers(WIDTH, 8)}
    params |= {"up": numbers(4, WIDTH), "out": numbers(WIDTH, 12)}

    def loss(params, batch):
        x, key = batch
        mean, logvar = jnp.split(jax.nn.relu(x @ params["in"]) @ params["code"], 2, -1)
        code = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        y = jax.nn.relu(code @ params["up"]) @ params["out"]
        kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1)
        bce = jnp.sum(jax.nn.softplus(y) - y * (x > 0), axis=-1)
        return jnp.mean(kl + bce)

    return Program(loss, params, (numbers(16, 12, scale=1.0), jax.random.key(0)))
