"""Typed usage of the public API, for the type checker; never run.

Lines that misuse the API carry an ignore, and an ignore that is not needed is an error.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import jls

params: dict[str, jax.Array] = {"w": jnp.ones(3)}

# Policies.
scaler = jls.dynamic(2.0**15, growth_interval=100)
assert_type(scaler, jls.LossScaler)
assert_type(jls.static(128.0), jls.LossScaler)
state = scaler.init()
assert_type(state, jls.LossScaleState)
assert_type(scaler.adjust(state, True), jls.LossScaleState)
assert_type(scaler.adjust(state, jnp.asarray(True)), jls.LossScaleState)
assert_type(state.loss_scale, jax.Array)

# The type of a tree stays.
assert_type(jls.scale(state, params), dict[str, jax.Array])
assert_type(jls.unscale(state, params), dict[str, jax.Array])
assert_type(jls.select(True, params, params), dict[str, jax.Array])
assert_type(jls.all_finite(params, axis_name=("data", "model")), jax.Array)

# optax.
optimizer = jls.loss_scaled(optax.adamw(3e-4), scaler, axis_name="data")
assert_type(optimizer, optax.GradientTransformationExtraArgs)
guarded = jls.skip_nonfinite(optax.sgd(0.1), check_updates=True)
chained: optax.GradientTransformation = optax.chain(optimizer, guarded)
opt_state = optimizer.init(params)
averaged = optax.chain(optax.adamw(3e-4), jls.params_ema(0.999, debias=False))
assert_type(jls.params_ema(lambda n: n / 9), optax.GradientTransformationExtraArgs)
average: dict[str, jax.Array] = jls.eval_params(averaged.init(params))

# Reading and setting.
assert_type(jls.loss_scale(opt_state), jax.Array)
assert_type(jls.metrics(opt_state), dict[str, jax.Array])
assert_type(jls.set_loss_scale(state, 1024), jls.LossScaleState)

# Looking closer.
assert_type(jls.nonfinite_report(params), jls.NonfiniteReport)
assert_type(jls.nonfinite_report(params).bad, tuple[jls.LeafReport, ...])
assert_type(jls.underflow(opt_state, params, dtype=jnp.bfloat16), jls.Underflow)
assert_type(jls.underflow(1024.0, params).total, jls.UnderflowShares)
assert_type(jls.suggest_scale(params, headroom=2), jax.Array)

# Differentiation.
value_and_grad = jls.value_and_grad(lambda p: jnp.sum(p["w"]), has_aux=False)
loss, grads = value_and_grad(opt_state, params)


# A policy of one's own.
def adjust(state: jls.LossScaleState, grads_finite: Any, /) -> jls.LossScaleState:
    return state


own = jls.LossScaler(jls.static(8.0).init, adjust)
assert_type(own.adjust(own.init(), False), jls.LossScaleState)

# Misuse.
jls.dynamic(1.0, 2.0)  # pyright: ignore[reportCallIssue]
jls.dynamic(growth_intervall=3)  # pyright: ignore[reportCallIssue]
jls.static("8")  # pyright: ignore[reportArgumentType]
jls.loss_scaled(optax.sgd(0.1), 8.0)  # pyright: ignore[reportArgumentType]
jls.params_ema(0.9, False)  # pyright: ignore[reportCallIssue]
jls.params_ema("0.9")  # pyright: ignore[reportArgumentType]
jls.suggest_scale(params, 2)  # pyright: ignore[reportCallIssue]
scaler.adjust(True, state)  # pyright: ignore[reportArgumentType]
state.scale  # pyright: ignore[reportAttributeAccessIssue]
