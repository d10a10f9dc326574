"""Mistakes that both type checkers must refuse; never run.

Each line carries the ignores of both checkers, and an ignore that is not needed is an
error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jls
from jls.types import LossScaler, StaticState

Params = dict[str, jax.Array]
params: Params = {"w": jnp.ones(3)}
batch = jnp.ones(3)
scaler = jls.dynamic()
state = scaler.init()
optimizer = jls.loss_scaled(optax.sgd(0.1))
opt_state = optimizer.init(params)

# Factories.
jls.dynamic(1.0, 2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.dynamic(growth_intervall=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.static("8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jls.hysteresis(refill="growths")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jls.loss_scaled(optax.sgd(0.1), 8.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jls.params_ema(0.9, False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.params_ema("0.9")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# Names that there are not.
jls.dynamc()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
jls.types.ScalerStat  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

# States.
opt_state.skip  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
opt_state.loss_scale  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
state.scale  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
jls.static().init().finite_count  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
scaler.adjust(True, state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
LossScaler(jls.dynamic().init)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# The order of arguments.
def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * batch)


jls.value_and_grad(loss_fn)(params, opt_state, batch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jls.value_and_grad(loss_fn)(opt_state, params)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.value_and_grad(loss_fn)(opt_state, params, batch, rng=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.value_and_grad(loss_fn, params, batch)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
jls.grad(loss_fn)(params, opt_state, batch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# Choices.
jls.train_step(loss_fn, drop="batch")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jls.train_step(loss_fn, accumulation="average")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jls.train_step(loss_fn, micro_batches="4")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
jls.train_step(loss_fn, optax.sgd(0.1), carry=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
jls.train_step(loss_fn, optimizer)(params, batch)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
jls.health(opt_state, raise_if=["staled"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
jls.health(opt_state, warn_if=["at the floor"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
jls.requeue([batch], 2)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
jls.requeue(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
jls.requeue([batch]).observe(opt_state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def train(train_state: TrainState) -> None:
    step = jls.train_step(lambda state, batch: batch.sum())
    step(batch, train_state)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    step(train_state)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    _, report = step(train_state, batch)
    report.overflow  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


# A scaler of one's own whose functions disagree on the state.
def adjust(state: StaticState, grads_finite: Any, /) -> StaticState:
    return state


LossScaler(jls.dynamic().init, adjust)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
