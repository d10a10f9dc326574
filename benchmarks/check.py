"""How long `jls.check_step` takes: `python -m benchmarks.check`.

For each step the seconds to read it (its trace, and two walks through the program), the
seconds of a whole check, and those of the first two steps with their compilation.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls
from benchmarks.models import (
    GOOD,
    convnet_batch,
    convnet_loss,
    convnet_params,
    transformer_batch,
    transformer_loss,
    transformer_params,
)

try:  # only to time the reading by itself
    from jls._tools.check.check import read_step
except ImportError:
    read_step = None

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _step(loss_fn: Callable[..., Any], params: Any, batch: Any) -> Step:
    clip = optax.clip_by_global_norm(1.0)
    optimizer = jls.loss_scaled(optax.chain(clip, optax.adamw(1e-3)), jls.dynamic(64.0))

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, optimizer.init(params), batch)


def _perceptron() -> Step:
    def loss_fn(params, batch):
        x, y = batch
        hidden = jnp.tanh(x.astype(jnp.float16) @ params["w1"].astype(jnp.float16))
        error = hidden @ params["w2"].astype(jnp.float16) - y.astype(jnp.float16)
        return jnp.mean(error.astype(jnp.float32) ** 2)

    params = {"w1": jnp.ones((4, 8)) / 4, "w2": jnp.ones((8, 1)) / 8}
    return _step(loss_fn, params, (jnp.ones((16, 4)), jnp.zeros((16, 1))))


def _convnet() -> Step:
    batch = (*convnet_batch(4, 16, 10), GOOD)
    return _step(convnet_loss, convnet_params(8, [1, 1], 10), batch)


def transformer_step(width: int, layers: int, vocabulary: int) -> Step:
    """A step of a float16 transformer, and its arguments."""
    params = transformer_params(width, layers, vocabulary)
    batch = (*transformer_batch(1, 16, vocabulary), GOOD)
    return _step(transformer_loss(8), params, batch)


STEPS: dict[str, Callable[[], Step]] = {
    "perceptron, 40 parameters": _perceptron,
    "convnet": _convnet,
    "transformer, 0.6 M parameters": lambda: transformer_step(64, 6, 2048),
    "transformer, 30 M parameters": lambda: transformer_step(512, 9, 3072),
}


def main() -> None:
    """Prints the table."""
    print("| step | parameters | reading, s | whole check, s | two first steps, s |")
    print("|---|--:|--:|--:|--:|")
    for name, make in STEPS.items():
        step, args = make()
        count = sum(np.size(x) for x in jax.tree.leaves(args[0]))
        reading = "-"
        if read_step is not None:
            start = time.perf_counter()
            read_step(step, args, {})
            reading = f"{time.perf_counter() - start:.2f}"
        step, args = make()
        start = time.perf_counter()
        jls.check_step(step, *args).raise_if_broken()
        whole = time.perf_counter() - start
        step, args = make()
        start = time.perf_counter()
        params, opt_state, _ = step(*args)
        jax.block_until_ready(step(params, opt_state, args[2]))
        plain = time.perf_counter() - start
        print(f"| {name} | {count:,} | {reading} | {whole:.1f} | {plain:.1f} |")


if __name__ == "__main__":
    main()
