"""Typed usage of the public API, for the type checkers; never run."""

from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import jls
from jls.types import (
    BadBatch,
    BatchQueue,
    Health,
    LossScaledState,
    LossScaler,
    ScalerState,
    SkipReason,
    StaticState,
    StepReport,
    Verdict,
)

Params = dict[str, jax.Array]
params: Params = {"w": jnp.ones(3)}
batch = jnp.ones(3)

# Scalers know their states.
scaler = jls.dynamic(2.0**15, growth_interval=100, consecutive=False)
assert_type(scaler, LossScaler[ScalerState])
assert_type(jls.static(128.0), LossScaler[StaticState])
assert_type(jls.hysteresis(refill="finite"), LossScaler[ScalerState])
assert_type(jls.presets.torch().hyperparameters, dict[str, Any])
state = scaler.init()
assert_type(state, ScalerState)
assert_type(scaler.adjust(state, True), ScalerState)
assert_type(scaler.adjust(state, jnp.asarray(True)), ScalerState)
assert_type(state.loss_scale, jax.Array)

# The type of a tree stays.
assert_type(jls.scale(state, params), Params)
assert_type(jls.unscale(state, params), Params)
assert_type(jls.select(True, params, params), Params)
assert_type(jls.all_finite(params, axis_name=("data", "model")), jax.Array)

# The optimizer is optax's, with a typed state.
optimizer = jls.loss_scaled(optax.adamw(3e-4), scaler, axis_name="data")
bare: optax.GradientTransformationExtraArgs = optimizer
guarded = jls.skip_nonfinite(optax.sgd(0.1), check_updates=True)
chained: optax.GradientTransformation = optax.chain(optimizer, guarded)
accumulating = jls.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 4))
opt_state = optimizer.init(params)
assert_type(opt_state, LossScaledState)
assert_type(opt_state.skips, jax.Array)
updates, opt_state = optimizer.update(params, opt_state, params, value=batch.sum())
assert_type(opt_state.applied, jax.Array)
reason: SkipReason = SkipReason(opt_state.last_skip_reason.item())
averaged = optax.chain(optax.adamw(3e-4), jls.params_ema(0.999, debias=False))
rounded = jls.bfloat16_params(averaged, rounding="exact", moments=None, seed=1)
assert_type(rounded, optax.GradientTransformationExtraArgs)
assert_type(jls.params_ema(lambda n: n / 9), optax.GradientTransformationExtraArgs)
average: Params = jls.eval_params(averaged.init(params))
inner_state = optax.adamw(3e-4).init(params)
assert_type(jls.wrap_state(optimizer, inner_state, params), LossScaledState)
assert_type(jls.upgrade_state(opt_state, {}), LossScaledState)


# Differentiation keeps the arguments of the loss function.
def loss_fn(params: Params, batch: jax.Array, *, rate: float = 0.0) -> jax.Array:
    return jnp.sum(params["w"] * batch)


def loss_and_aux(params: Params, batch: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return jnp.sum(params["w"] * batch), {"n": 1}


loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch, rate=0.5)
assert_type(loss, jax.Array)
(loss, aux), grads = jls.value_and_grad(loss_and_aux, has_aux=True)(
    opt_state, params, batch
)
assert_type(aux, dict[str, int])
grads = jls.grad(loss_fn, argnums=(0, 1))(opt_state, params, batch)
model_grads = jls.value_and_grad(lambda p: p, transform=nnx.value_and_grad)(state, 1.0)


# A train step, for pure functions.
plain_step = jls.train_step(loss_fn, optimizer, micro_batches=2)
new_params, new_state, plain_report = plain_step(params, opt_state, batch, rng=1)
assert_type(new_params, dict[str, jax.Array])
assert_type(new_state, LossScaledState)
assert_type(plain_report, StepReport)
carrying_step = jls.train_step(loss_fn, optimizer, carried=True, has_aux=True)
assert_type(carrying_step(params, opt_state, 1.5, batch)[2], float)
applied = jls.apply_gradients(optimizer, params, opt_state, params, value=loss)
assert_type(applied[2], StepReport)


# For Linen and for NNX.
class State(TrainState):  # type: ignore[no-untyped-call]
    batch_stats: Any


def train(
    state: State, model: nnx.Linear, nnx_optimizer: nnx.Optimizer[nnx.Linear]
) -> None:
    step = jls.train_step(lambda state, batch: batch.sum(), drop="micro_batch")
    new_state, report = step(state, (batch, batch))
    assert_type(new_state, State)
    assert_type(report, StepReport)
    assert_type(report.skipped, jax.Array)
    assert_type(step(model, nnx_optimizer, batch), StepReport)


# Reading and setting.
assert_type(jls.loss_scale(opt_state), jax.Array)
assert_type(jls.metrics(opt_state), dict[str, jax.Array])
assert_type(jls.set_loss_scale(state, 1024), ScalerState)

# Monitoring.
health = jls.health(opt_state, params, optimizer=optimizer, raise_if=["stalled"])
assert_type(health, Health)
verdict: Verdict = health.verdict
assert_type(jls.History().line(), str)

# The batches keep their type.
queue = jls.requeue([batch, batch], lag=0)
assert_type(queue, BatchQueue[jax.Array])
for next_batch in queue:
    assert_type(next_batch, jax.Array)
    assert_type(queue.observe(plain_report), None)
assert_type(queue.bad, tuple[BadBatch[jax.Array], ...])
assert_type(queue.bad[0].batch, jax.Array)
assert_type(queue.bad[0].reason, SkipReason)
assert_type(queue.outstanding(), tuple[tuple[int, jax.Array], ...])


# A scaler of one's own.
def adjust(state: ScalerState, grads_finite: Any, /) -> ScalerState:
    return state


own = LossScaler(jls.dynamic(8.0).init, adjust)
assert_type(own, LossScaler[ScalerState])
assert_type(own.adjust(own.init(), False), ScalerState)


# Modules of Equinox are pytrees too, but none of optax's aliases.
class Module(eqx.Module):
    weight: jax.Array


def with_equinox(model: Module) -> None:
    state = optimizer.init(model)
    optimizer.update(model, state, model)
    jls.wrap_state(optimizer, state.inner_state, model)
    jls.apply_gradients(optimizer, model, state, model)
    jls.health(state, model, grads=model)
