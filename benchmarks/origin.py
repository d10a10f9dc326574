"""What `jls.why` takes: `python -m benchmarks.origin`.

For each step the seconds to compile it as it is and with a record beside each
operation, the seconds of one run of both, the temporary memory of both, and the seconds
of a whole call of `jls.why` on a batch with a NaN in it.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jls
from benchmarks.check import STEPS, Step
from jls._tools.origin.why import Case


def _layers_in_a_scan(width: int, layers: int, vocabulary: int) -> Step:
    """A float16 transformer whose layers are stacked."""

    def block(x, layer):
        q, k, v = jnp.split(_normal(x) @ layer["qkv"].astype(x.dtype), 3, axis=-1)
        scores = (q @ k.T).astype(jnp.float32) / width**0.5
        scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
        x = x + jax.nn.softmax(scores).astype(x.dtype) @ v
        hidden = jax.nn.gelu(_normal(x) @ layer["up"].astype(x.dtype))
        return x + hidden @ layer["down"].astype(x.dtype), None

    def loss_fn(params, batch):
        tokens, targets, weight = batch
        x = params["embedding"].astype(jnp.float16)[tokens]
        x, _ = lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = (x @ params["embedding"].astype(x.dtype).T).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses) * weight

    def normal(*shape):
        return np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)

    params = {
        "embedding": jnp.asarray(normal(vocabulary, width)),
        "layers": {
            "qkv": jnp.asarray(normal(layers, width, 3 * width)),
            "up": jnp.asarray(normal(layers, width, 4 * width)),
            "down": jnp.asarray(normal(layers, 4 * width, width)),
        },
    }
    tokens = jnp.arange(65) % vocabulary
    batch = tokens[:-1], tokens[1:], jnp.float32(1.0)
    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(64.0))
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, (params, optimizer.init(params), batch)


def _normal(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    spread = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * spread).astype(x.dtype)


ALL: dict[str, Callable[[], Step]] = {
    **STEPS,
    "transformer, 30 M parameters, layers in a scan": lambda: _layers_in_a_scan(
        512, 9, 3072
    ),
}


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def _fastest(run: Callable[[], Any]) -> float:
    return min(_seconds(run)[0] for _ in range(3))


def _with_nan(batch: Any) -> Any:
    """The batch with NaN in all that is floating point."""
    return jax.tree.map(lambda x: x * np.nan if x.dtype.kind == "f" else x, batch)


def main() -> None:
    """Prints the table."""
    head = (
        "parameters",
        "compile, s",
        "recorded",
        "run, s",
        "recorded",
        "MB",
        "recorded",
    )
    print(f"| step | {' | '.join([*head, 'jls.why, s'])} |")
    print("|---|" + "--:|" * (len(head) + 1))
    for name, make in ALL.items():
        step, args = make()
        args = (*args[:2], _with_nan(args[2]))
        count = sum(np.size(x) for x in jax.tree.leaves(args[0]))
        lowered = jax.jit(step).lower(*args)
        cells = []
        plain, compiled = _seconds(lowered.compile)
        run = _fastest(lambda f=compiled, x=args: jax.block_until_ready(f(*x)))
        case = Case("jls.why", step, args, {})
        recorded, program = _seconds(lambda x=case: x.recorded.compiled(x.leaves))
        again = _fastest(lambda x=case: x.recorded(x.leaves))
        cells += [f"{plain:.1f}", f"{recorded:.1f}", f"{run:.3f}", f"{again:.3f}"]
        for one in (compiled, program):
            cells.append(f"{one.memory_analysis().temp_size_in_bytes / 1e6:.0f}")
        whole, why = _seconds(lambda f=step, x=args: jls.why(f, *x))
        assert why.births[0].place.operation == "argument"
        print(f"| {name} | {count:,} | {' | '.join(cells)} | {whole:.1f} |", flush=True)


if __name__ == "__main__":
    main()
