# SPDX-License-Identifier: Apache-2.0
"""A GPT with its parameters split over all devices; it saves, resumes and logs.

`python gpt_sharded.py FOLDER` takes half a minute on a CPU; an interrupted run goes on
from its last checkpoint. The text to learn is the source of Python's standard library.
`XLA_FLAGS=--xla_force_host_platform_device_count=8` splits it over eight devices.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jls
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MICRO_BATCHES = 2


def load():
    """Bytes of text: some modules of the standard library, one after the other."""
    files = sorted(Path(json.__file__).parents[1].glob("[a-d]*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def make_batch(text, step, batch_size, length):
    """The batch of this step, whichever run asks for it."""
    starts = np.random.default_rng(step).integers(len(text) - length, size=batch_size)
    return text[starts[:, None] + np.arange(length + 1)]


def init(key, length, width, depth):
    keys = iter(jax.random.split(key, 2 + 4 * depth))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    def block():
        return {
            "norm1": jnp.ones(width),
            "qkv": weights(width, 3 * width),
            "out": weights(width, width) / (2 * depth) ** 0.5,
            "norm2": jnp.ones(width),
            "up": weights(width, 4 * width),
            "down": weights(4 * width, width) / (2 * depth) ** 0.5,
        }

    return {
        "bytes": weights(256, width),
        "positions": weights(length, width),
        "blocks": [block() for _ in range(depth)],
        "norm": jnp.ones(width),
    }


def norm(x, scale):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attend(q, k, v):
    """Causal attention; the softmax is in float32."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(logits * q.shape[-1] ** -0.5, where=causal)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def gpt(params, tokens, heads=4, dtype=jnp.float32):
    """The logits of the next byte; products are in `dtype`, the rest in float32."""
    batch, length = tokens.shape

    def product(x, weights):
        return x.astype(dtype) @ weights.astype(dtype)

    x = params["bytes"][tokens] + params["positions"][:length]
    for p in params["blocks"]:
        qkv = product(norm(x, p["norm1"]), p["qkv"])
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, -1), 2, 0)
        mixed = attend(q, k, v).reshape(batch, length, -1)
        x = x + product(mixed, p["out"])
        hidden = jax.nn.gelu(product(norm(x, p["norm2"]), p["up"]))
        x = x + product(hidden, p["down"])
    return product(norm(x, params["norm"]), params["bytes"].T).astype(jnp.float32)


def split(mesh, tree):
    """The sharding of each array: the last axis over all devices, where it divides."""

    def sharding(x):
        fits = x.ndim and x.shape[-1] % mesh.size == 0
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "all") if fits else P())

    return jax.tree.map(sharding, tree)


def main(
    folder, steps=300, save_every=50, batch_size=16, length=64, width=128, depth=2
):
    def loss_fn(params, batch):
        logits = gpt(params, batch[:, :-1], dtype=jnp.float16)
        targets = batch[:, 1:].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    optimizer = jls.loss_scaled(optimizer, jls.dynamic(growth_interval=25))
    train_step = jls.train_step(loss_fn, optimizer, micro_batches=MICRO_BATCHES)

    def start():
        params = init(jax.random.key(0), length, width, depth)
        return params, optimizer.init(params)

    mesh = Mesh(jax.devices(), "all")
    shardings = split(mesh, jax.eval_shape(start))
    params, opt_state = jax.jit(start, out_shardings=shardings)()
    step = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(*shardings, None))

    text, folder = load(), Path(folder).absolute()
    with ocp.CheckpointManager(folder) as manager, (folder / "log").open("a") as log:
        first = manager.latest_step() or 0
        if first:
            target = ocp.args.StandardRestore((params, opt_state))
            params, opt_state = manager.restore(first, args=target)
        for i in range(first + 1, steps + 1):
            batch = make_batch(text, i, batch_size, length)
            batch = jax.device_put(batch, NamedSharding(mesh, P("all")))
            params, opt_state, report = step(params, opt_state, batch)
            if i % save_every:
                continue
            health = jls.health(opt_state, params, raise_if=["stalled", "poisoned"])
            line = {"step": i, "loss": float(report.loss)} | health.numbers
            print(f"step {i:4}  loss {line['loss']:.3f}")
            print(json.dumps(line), file=log, flush=True)
            manager.save(i, args=ocp.args.StandardSave((params, opt_state)))
    return params, opt_state


if __name__ == "__main__":
    main(sys.argv[1])
