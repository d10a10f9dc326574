"""The contestants: one train step each, of the same model, optimizer and data.

Each follows its documentation. Only `jls` learns whether the loss is finite.
Only the step is compared. docs/comparison.md says how much each of them guards.
"""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jls

INIT_SCALE = 2.0**15


class Rules(NamedTuple):
    """What all dynamic loss scales of a workload have in common."""

    growth_interval: int = 2000
    # What a step returns of its loss and its gradients.
    report: Callable[[Any, Any], Any] = lambda loss, grads: loss


class Run(NamedTuple):
    """A contestant on a workload; its state is all but the parameters."""

    init: Callable[[Any], Any]  # params -> state
    step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    # (params, state, batch) -> (params, state, loss)


def plain(optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules) -> Run:
    """No scaling and no guard: the floor."""

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, rules.report(loss, grads)

    return Run(optimizer.init, step)


def apply_if_finite(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """The guard of optax; it has no loss scale."""
    return plain(optax.apply_if_finite(optimizer, 2**30), loss_fn, rules)


def flax(optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules) -> Run:
    """DynamicScale; selects parameters and optimizer state, as in Flax's examples."""

    def init(params):
        return dynamic_scale(rules), optimizer.init(params)

    def step(params, state, batch):
        scale, opt_state = state
        scale, is_finite, loss, grads = scale.value_and_grad(loss_fn)(params, batch)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        select = partial(jax.tree.map, partial(jnp.where, is_finite))
        opt_state = select(new_opt_state, opt_state)
        report = rules.report(loss, grads)
        return select(new_params, params), (scale, opt_state), report

    return Run(init, step)


def dynamic_scale(rules: Rules) -> Any:
    """Flax's loss scale, of arrays, as it is after the first step."""
    from flax.training.dynamic_scale import DynamicScale

    numbers: dict[str, Any] = {"scale": jnp.float32(INIT_SCALE)}
    numbers |= {"fin_steps": jnp.int32(0)}
    return DynamicScale(growth_interval=rules.growth_interval, **numbers)


def jmp(optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules) -> Run:
    """As in jmp's README: selects the parameters, but not the optimizer's state."""
    import jmp

    def init(params):
        # Not the object: `jax.jit(...).lower` cannot take jmp's.
        return (jnp.float32(INIT_SCALE), jnp.int32(0)), optimizer.init(params)

    def step(params, state, batch):
        counts, opt_state = state
        loss_scale = jmp.DynamicLossScale(*counts, period=rules.growth_interval)

        def scaled_loss_fn(params):
            return loss_scale.scale(loss_fn(params, batch))

        loss, grads = jax.value_and_grad(scaled_loss_fn)(params)
        loss, grads = loss_scale.unscale((loss, grads))
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params = jmp.select_tree(grads_finite, new_params, params)
        counts = loss_scale.loss_scale, loss_scale.counter
        return params, (counts, opt_state), loss

    return Run(init, step)


def mpx(optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules) -> Run:
    """MPX, which casts the parameters itself: its gradients are float16."""
    mpx: Any = _quietly_imported("mpx")
    mpx.set_half_precision_datatype(jnp.float16)

    def init(params):
        return (jnp.float32(INIT_SCALE), jnp.int32(0)), optimizer.init(params)

    def step(params, state, batch):
        (loss_scale, counter), opt_state = state
        scaling = mpx.DynamicLossScaling(
            loss_scale,
            jnp.ones((), jnp.float32),
            period=rules.growth_interval,
            counter=counter,
        )
        # The batch is closed over: as an argument it would be cast to float16 too.
        grad_fn = mpx.filter_value_and_grad(lambda p: loss_fn(p, batch), scaling)
        loss, scaling, grads_finite, grads = grad_fn(params)
        params, opt_state = mpx.optimizer_update(
            params, optimizer, opt_state, grads, grads_finite
        )
        return params, ((scaling.loss_scaling, scaling.counter), opt_state), loss

    return Run(init, step)


def ours(
    optimizer: optax.GradientTransformation,
    loss_fn: Any,
    rules: Rules,
    **options: Any,
) -> Run:
    """jls, as in the main loop of its README, with these options of the wrapper."""
    wrapped = guarded(optimizer, rules, **options)

    def step(params, state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(state, params, batch)
        updates, state = wrapped.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return Run(wrapped.init, step)


def guarded(
    optimizer: optax.GradientTransformation, rules: Rules, **options: Any
) -> Any:
    """The optimizer, with the guard of jls."""
    scaler = jls.dynamic(INIT_SCALE, growth_interval=rules.growth_interval)
    return jls.loss_scaled(optimizer, scaler, **options)


def train_step(
    optimizer: optax.GradientTransformation, loss_fn: Any, rules: Rules
) -> Run:
    """`jls.train_step`."""
    wrapped = guarded(optimizer, rules)
    return Run(wrapped.init, jls.train_step(loss_fn, wrapped))


Make = Callable[[optax.GradientTransformation, Any, Rules], Run]


def reporting(make: Make) -> Make:
    """A contestant that also reports the norm of the gradients."""

    def report(loss, grads):
        return loss, optax.tree.norm(grads)

    return lambda optimizer, loss_fn, rules: make(
        optimizer, loss_fn, rules._replace(report=report)
    )


ALL: dict[str, Make] = {
    "optax": plain,
    "jls": ours,  # second, since the last ones may run out of time
    "apply_if_finite": apply_if_finite,
    "flax": flax,
    "jmp": jmp,
    "mpx": mpx,
}
# These report the norm of the gradients, as `jls.train_step` does.
TRAIN_STEPS: dict[str, Make] = {
    "optax": reporting(plain),
    "jls": train_step,
    "apply_if_finite": reporting(apply_if_finite),
    "flax": reporting(flax),
}
FLOOR = "optax"  # the baseline for all others; it always runs
OURS = "jls"
# All that some workloads compare, to save time. For a thousand leaves, not even
# Flax's: its chain of a thousand `and`s takes XLA minutes to compile on a CPU.
MAIN = ["optax", "jls", "apply_if_finite", "flax"]
FEW = ["optax", "jls", "apply_if_finite"]
# They protect parameters and optimizer state: their costs can be compared.
WHOLE = ["jls", "apply_if_finite", "flax", "mpx"]


def available() -> list[str]:
    """The contestants whose package can be imported, in order."""
    modules = {"flax": "flax", "jmp": "jmp", "mpx": "mpx"}
    return [name for name in ALL if _quietly_imported(modules.get(name, "jls"))]


def _quietly_imported(name: str) -> ModuleType | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
