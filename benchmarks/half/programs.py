"""The programs that are compiled: whole train steps of each model, in some ways."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jls
from benchmarks.contestants import Run
from benchmarks.half.models import Model, lstm, mlp, resnet, transformer
from benchmarks.hlo import Instruction, Program
from benchmarks.placement import whole
from benchmarks.targets import TARGETS, Target
from jls._program.jaxprs import is_literal, opened, programs_in
from jls._scopes import FLOAT8, is_in
from jls._tools.check.float8 import float8_in

ADAMW = optax.adamw(1e-4)
# The last one is compared with the one before it.
WAYS = ("float32", "by hand", "autocast")
WIDE_WAYS = ("autocast", "float8")
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
WIDE_GPT = (32768, 4096, 2, 32), (8, 1024)
# Wide enough for float8.
WIDE: dict[str, Callable[[], Model]] = {
    "wide MLP": lambda: mlp(2, (8192, 4096)),
    "wide products": lambda: mlp(2, (8192, 4096), is_bare=True),
    "wide transformer, scan": lambda: transformer("scan", *WIDE_GPT),
    "wide transformer, unrolled": lambda: transformer("unrolled", *WIDE_GPT),
}
# The first for all; the others for one chip of each kind.
CHIPS = {
    "transformer, scan": [*TARGETS],
    "transformer, remat": ["a100"],
    "transformer, unrolled": ["h100"],
    "ResNet-50": ["t4", "h100", "v5e"],
    "LSTM": ["t4", "h100", "v5e"],
    **{name: ["h100", "b200"] for name in WIDE},
}
TINY: dict[str, Callable[[], Model]] = {
    "transformer, scan": lambda: transformer("scan", (64, 16, 2, 2), (2, 8)),
    "transformer, remat": lambda: transformer("remat", (64, 16, 2, 2), (2, 8)),
    "transformer, unrolled": lambda: transformer("unrolled", (64, 16, 2, 2), (2, 8)),
    "ResNet-50": lambda: resnet((1, 1), 8, (4, 32)),
    "LSTM": lambda: lstm(64, 16, (2, 8)),
    "wide MLP": lambda: mlp(2, (32, 16)),
    "wide products": lambda: mlp(2, (32, 16), is_bare=True),
    "wide transformer, scan": lambda: transformer("scan", (64, 16, 2, 2), (2, 8)),
    "wide transformer, unrolled": lambda: transformer(
        "unrolled", (64, 16, 2, 2), (2, 8)
    ),
}


def ways_of(model: str) -> tuple[str, ...]:
    """The ways in which a model is compiled and run."""
    return WIDE_WAYS if model in WIDE else WAYS


def half_of(target: Target) -> Any:
    """The half precision that a chip is fast in."""
    return jnp.float16 if target.name in FLOAT16 else jnp.bfloat16


def loss_of(model: Model, way: str, half: Any) -> Callable[..., Any]:
    """The loss of a model, with its products as the way says."""
    loss_fn = model.loss(half if way == "by hand" else None)
    if way in WIDE_WAYS:
        dtype = jnp.float8_e4m3fn if way == "float8" else half
        loss_fn = jls.autocast(loss_fn, dtype)
    return loss_fn


def run_of(model: Model, way: str, half: Any, optimizer: Any = ADAMW) -> Run:
    """A whole step; without a loss scale, which would be the same in all.

    Its parameters are of the model, its state has the optimizer's and the batch
    statistics.
    """
    loss_fn = loss_of(model, way, half)

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
    half = half_of(target)
    run = run_of(model, way, half, optimizer)
    where = whole(target.devices(1))
    variables = model.variables()
    state = jax.eval_shape(run.init, variables)
    batch = model.inputs, model.labels
    args = where.sharded(variables), where.sharded(state), where.sharded_batch(batch)
    with warnings.catch_warnings(action="ignore", category=jls.JlsWarning):
        # There is no float8 where this is compiled.
        traced = jax.jit(run.step, donate_argnums=(0, 1)).trace(*args)
    compiled = traced.lower().compile()
    text = compiled.as_text() or ""
    program = Program(text)
    memory: Any = compiled.memory_analysis()
    found = {
        "bytes": program.bytes,
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "kernels": program.kernels,
        "instructions": len([x for x in program.launched if x.is_launched]),
        "kept_bytes": _kept_bytes(loss_of(model, way, half), variables, batch),
    }
    if way == "float8":
        right, others = float8_in(text)
        found["float8_products"] = len(right)
        found["wider_products"] = len(others)
        found["rounded"] = len([*_maxima(traced.jaxpr)])
        found["maxima_kernels"] = len([*_kernels_of_maxima(program)])
    return found


def _kept_bytes(loss_fn: Any, variables: Any, batch: Any) -> int:
    """What is kept for the derivative, beside the arguments."""

    def kept(params, *others):
        _, pullback, _ = jax.vjp(lambda x: loss_fn(x, *others), params, has_aux=True)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(kept)(*variables.values(), batch).jaxpr
    avals = {
        x: x.aval for x in jaxpr.outvars if not is_literal(x) and x not in jaxpr.invars
    }
    return sum(x.size * x.dtype.itemsize for x in avals.values())


def _maxima(program: Any) -> Iterator[Any]:
    """The largest magnitudes that float8 asks for, one for each array it rounds."""
    for equation in opened(program).jaxpr.eqns:
        if equation.primitive.name == "reduce_max" and is_in(equation, FLOAT8):
            yield equation
        for inner in programs_in(equation):
            yield from _maxima(inner)


def _kernels_of_maxima(program: Program) -> Iterator[Instruction]:
    """The kernels that compute them. The body of a loop counts once, as above."""

    def inside(one):
        if one.kind == "fusion":
            for part in program.computations[one.called()["calls"][0]].values():
                yield from inside(part)
        yield one

    whole = [x for part in program.computations.values() for x in part.values()]
    fused = {name for x in whole for name in x.called().get("calls", [])}
    for name, computation in program.computations.items():
        for one in [] if name in fused else computation.values():
            parts = [x for x in inside(one) if x.kind == "reduce"]
            if any(f"{FLOAT8}/reduce_max" in x.attributes for x in parts):
                yield one


def chosen(target: str, is_tiny: bool) -> list[tuple[str, Callable[[], Model]]]:
    """The models that are compiled for a chip."""
    models = TINY if is_tiny else MODELS | WIDE
    return [(name, models[name]) for name, chips in CHIPS.items() if target in chips]
