"""The programs that are compiled: three whole train steps of each model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jls
from benchmarks.contestants import Run
from benchmarks.half.models import Model, lstm, resnet, transformer
from benchmarks.hlo import Program
from benchmarks.placement import whole
from benchmarks.targets import TARGETS, Target

ADAMW = optax.adamw(1e-4)
WAYS = ("float32", "by hand", "autocast")
# What each chip is fast in.
FLOAT16 = ("t4", "v100")
# (vocabulary, width, layers, heads), 136 million parameters; batch and length.
GPT = (32768, 768, 12, 12), (8, 512)
MODELS: dict[str, Callable[[], Model]] = {
    "transformer, scan": lambda: transformer("scan", *GPT),
    "transformer, remat": lambda: transformer("remat", *GPT),
    "transformer, unrolled": lambda: transformer(
        "unrolled", (32768, 768, 4, 12), (8, 512)
    ),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), 64, (64, 224)),
    "LSTM": lambda: lstm(32768, 1024, (64, 128)),
}
# The first for all; the others for one chip of each kind.
CHIPS = {
    "transformer, scan": [*TARGETS],
    "transformer, remat": ["a100"],
    "transformer, unrolled": ["h100"],
    "ResNet-50": ["t4", "h100", "v5e"],
    "LSTM": ["t4", "h100", "v5e"],
}
TINY: dict[str, Callable[[], Model]] = {
    "transformer, scan": lambda: transformer("scan", (64, 16, 2, 2), (2, 8)),
    "transformer, remat": lambda: transformer("remat", (64, 16, 2, 2), (2, 8)),
    "transformer, unrolled": lambda: transformer("unrolled", (64, 16, 2, 2), (2, 8)),
    "ResNet-50": lambda: resnet((1, 1), 8, (4, 32)),
    "LSTM": lambda: lstm(64, 16, (2, 8)),
}


def half_of(target: Target) -> Any:
    """The half precision that a chip is fast in."""
    return jnp.float16 if target.name in FLOAT16 else jnp.bfloat16


def run_of(model: Model, way: str, half: Any, optimizer: Any = ADAMW) -> Run:
    """A whole step; without a loss scale, which would be the same in all.

    Its parameters are of the model, its state has the optimizer's and the batch
    statistics.
    """
    loss_fn = model.loss(half if way == "by hand" else None)
    if way == "autocast":
        loss_fn = jls.autocast(loss_fn, half)

    def init(variables):
        return optimizer.init(variables["params"])

    def step(variables, state, batch):
        params, others = variables["params"], variables["others"]
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, others), grads = grad_fn(params, others, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "others": others}, state, loss

    return Run(init, step)


def figures(
    model: Model, way: str, target: Target, optimizer: Any = ADAMW
) -> dict[str, int]:
    """Of one step, compiled for one chip: what it moves, needs and launches."""
    run = run_of(model, way, half_of(target), optimizer)
    where = whole(target.devices(1))
    variables = model.variables()
    state = jax.eval_shape(run.init, variables)
    batch = model.inputs, model.labels
    args = where.sharded(variables), where.sharded(state), where.sharded_batch(batch)
    compiled = jax.jit(run.step, donate_argnums=(0, 1)).lower(*args).compile()
    program = Program(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    return {
        "bytes": program.bytes,
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "kernels": program.kernels,
        "instructions": len([x for x in program.launched if x.is_launched]),
    }


def chosen(target: str, is_tiny: bool) -> list[tuple[str, Callable[[], Model]]]:
    """The models that are compiled for a chip."""
    models = TINY if is_tiny else MODELS
    return [(name, models[name]) for name, chips in CHIPS.items() if target in chips]
