"""What the tools take: `python -m benchmarks.tools`.

For whole steps the CPU seconds to trace and compile them; those of `jls.check_step`, of
`jls.why` on a batch whose loss overflows, and of `jls.calibrate`, also as multiples of
the first; and how many of the operations the first program of `jls.why` records.

Seconds are CPU time of the process: other work on the machine counts for little. Prints
a table, and writes the figures as JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jls
from benchmarks import tables
from benchmarks.half.models import ResNet
from benchmarks.models import (
    GOOD,
    boosted_cross_entropy,
    convnet_batch,
    transformer_batch,
    transformer_loss,
    transformer_params,
)
from jls._tools.origin.case import read_case, record

VOCABULARY = 512
Step = tuple[Callable[..., Any], tuple[Any, ...]]
# The loss is over 2: times this it is inf, and all gradients with it.
TOO_LARGE = np.float32(2.0**127)


def transformer_step(width: int, layers: int, vocabulary: int) -> Step:
    """A step of a float16 transformer, written by hand."""
    loss_fn = transformer_loss(8)
    params = transformer_params(width, layers, vocabulary)
    clip = optax.clip_by_global_norm(1.0)
    optimizer = jls.loss_scaled(optax.chain(clip, optax.adamw(1e-3)), jls.dynamic(64.0))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    batch = (*transformer_batch(1, 16, vocabulary), GOOD)
    return step, (params, optimizer.init(params), batch)


def scanned_step(scans: int, blocks: int, width: int) -> Step:
    """A float16 transformer: scans over stacked layers, each of some blocks, remat."""

    @jax.checkpoint
    def block(x, layer):
        q, k, v = jnp.split(_normal(x) @ layer["qkv"].astype(x.dtype), 3, axis=-1)
        scores = (q @ k.swapaxes(1, 2)).astype(jnp.float32) / width**0.5
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        x = x + jax.nn.softmax(scores).astype(x.dtype) @ v
        hidden = jax.nn.gelu(_normal(x) @ layer["up"].astype(x.dtype))
        return x + hidden @ layer["down"].astype(x.dtype)

    def blocks_of(x, layers):
        for layer in layers:
            x = block(x, layer)
        return x, None

    def loss_fn(params, batch):
        tokens, targets, boost = batch
        x = params["embedding"].astype(jnp.float16)[tokens]
        for stack in params["stacks"]:
            x, _ = lax.scan(blocks_of, x, stack)
        logits = x @ params["embedding"].astype(x.dtype).T
        return boosted_cross_entropy(logits, targets, boost)

    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(0, 0.02, shape).astype(np.float32))

    def layer():
        return {
            "qkv": normal(2, width, 3 * width),
            "up": normal(2, width, 4 * width),
            "down": normal(2, 4 * width, width),
        }

    params = {
        "embedding": normal(VOCABULARY, width),
        "stacks": [[layer() for _ in range(blocks)] for _ in range(scans)],
    }
    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(64.0))
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    batch = (*transformer_batch(2, 32, VOCABULARY), GOOD)
    return step, (params, optimizer.init(params), batch)


def _normal(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    spread = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * spread).astype(x.dtype)


def resnet_step(width: int, blocks: tuple[int, ...]) -> Step:
    """A step of a Linen model, with the batch statistics beside the parameters."""
    model = ResNet(blocks, width, 10, jnp.float16)
    images, targets = convnet_batch(4, 16, 10)
    variables = _filled(jax.eval_shape(model.init, jax.random.key(0), images))
    optimizer = jls.loss_scaled(optax.sgd(0.1, momentum=0.9), jls.dynamic(64.0))

    def loss_fn(params, stats, batch):
        images, targets, boost = batch
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, images, mutable=["batch_stats"]
        )
        loss = boosted_cross_entropy(logits, targets, boost)
        return loss, updated["batch_stats"]

    @jax.jit
    def step(params, stats, opt_state, batch):
        value_and_grad = jls.value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = value_and_grad(opt_state, params, stats, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), new, opt_state, loss

    params = variables["params"]
    args = params, variables["batch_stats"], optimizer.init(params)
    return step, (*args, (images, targets, GOOD))


def _filled(shapes: Any) -> Any:
    """Variables of these shapes: random matrices, and ones."""
    rng = np.random.default_rng(0)

    def fill(x):
        if len(x.shape) < 2:
            return jnp.ones(x.shape)
        return jnp.asarray(rng.normal(0, 0.1, x.shape).astype(np.float32))

    return jax.tree.map(fill, shapes)


class Layer(nnx.Module):
    """A layer of a transformer in bfloat16, in NNX."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        half = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(width, **half)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, **half)
        self.norm2 = nnx.LayerNorm(width, **half)
        self.up = nnx.Linear(width, 4 * width, **half)
        self.down = nnx.Linear(4 * width, width, **half)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next values of the residual stream."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    """A transformer in bfloat16, in NNX."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, VOCABULARY, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nnx_step(layers: int, width: int) -> Step:
    """A step that changes an NNX model in place."""
    model = LanguageModel(layers, width, nnx.Rngs(0))

    def loss_fn(model, batch):
        tokens, targets, boost = batch
        return boosted_cross_entropy(model(tokens), targets, boost)

    wrapper = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(64.0))
    optimizer = nnx.Optimizer(model, wrapper, wrt=nnx.Param)
    step = nnx.jit(jls.train_step(loss_fn))
    batch = (*transformer_batch(2, 32, VOCABULARY), GOOD)
    return step, (model, optimizer, batch)


STEPS: dict[str, Callable[[], Step]] = {
    "transformer, float16, clip + adamw": lambda: transformer_step(128, 12, VOCABULARY),
    "ResNet, float16, batch norm, Linen": lambda: resnet_step(16, (2, 2, 2, 2)),
    "transformer, float16, scan and remat": lambda: scanned_step(2, 4, 128),
    "transformer, bfloat16, NNX, adamw": lambda: nnx_step(8, 128),
}
QUICK: dict[str, Callable[[], Step]] = {
    "transformer, float16, clip + adamw": lambda: transformer_step(16, 1, VOCABULARY),
    "ResNet, float16, batch norm, Linen": lambda: resnet_step(4, (1,)),
    "transformer, float16, scan and remat": lambda: scanned_step(1, 1, 16),
    "transformer, bfloat16, NNX, adamw": lambda: nnx_step(1, 16),
}


def overflowing(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a batch whose loss is inf."""
    return *args[:-1], (*args[-1][:-1], TOO_LARGE)


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def figures(make: Callable[[], Step]) -> dict[str, float]:
    """What the two tools take on one step."""
    step: Any
    step, args = make()
    plain, _ = _seconds(lambda: step.lower(*args).compile())
    case = read_case("jls.why", step, args, {})
    every = len(record(case).operations)
    why, found = _seconds(lambda: jls.why(step, *overflowing(args)))
    assert found.births
    calibrate, _ = _seconds(lambda: jls.calibrate(step, *args))
    check, report = _seconds(lambda: jls.check_step(step, *args))
    report.raise_if_broken()
    return {
        "compile": plain,
        "operations": every,
        "recorded": len(case.recorded.operations),
        "why": why,
        "calibrate": calibrate,
        "check": check,
    }


HEAD = (
    "compile, s",
    "operations",
    "recorded first",
    "`jls.why`, s",
    "times",
    "`jls.calibrate`, s",
    "times",
    "`jls.check_step`, s",
    "times",
)


def row(name: str, found: dict[str, float]) -> str:
    """A row of the table."""
    cells = [f"{found['compile']:.1f}", f"{found['operations']:,}"]
    cells.append(f"{found['recorded']:,}")
    for tool in ("why", "calibrate", "check"):
        cells += [f"{found[tool]:.1f}", f"{found[tool] / found['compile']:.1f}"]
    return tables.row([name, *cells])


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tools")
    add = parser.add_argument
    add("--quick", action="store_true", help="small steps, which prove nothing")
    add("--steps", default="", metavar="TEXT", help="those whose name contains it")
    add("--json", type=Path, default=Path("benchmarks_tools.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    steps = QUICK if options.quick else STEPS
    print(tables.head(["step", *HEAD]))
    results: dict[str, dict[str, float]] = {}
    for name, make in steps.items():
        if options.steps in name:
            results[name] = figures(make)
            print(row(name, results[name]), flush=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
