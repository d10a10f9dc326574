# SPDX-License-Identifier: Apache-2.0
"""The mistakes that `jls.check_step` looks for: what each means, and what to write."""

from typing import Literal, NamedTuple, get_args

Code = Literal[
    # A good step changes nothing of what it returns, or returns the old state of
    # the optimizer, or its updates reach nothing that comes back.
    "no step",
    # The third good step, or a later one, is compiled again.
    "retraced",
    # The step reads a value of the device at the host by itself.
    "host sync",
    # Gradients that a wrapper is given do not depend on its loss scale.
    "not scaled",
    # The loss scale is a factor of the gradients or the loss that the optimizer is
    # given, or of a part of them: unscaled twice, never, with the state after the
    # update; scaled twice; clipped while scaled.
    "scale leaks",
    # The optimizer is not given the loss: value= is missing or misspelt, or what is
    # around the wrapper drops it.
    "loss not passed",
    # True gradients are cast to float16 before the optimizer gets them, where the
    # small ones vanish.
    "gradients narrowed",
    # Something between the gradients and the optimizer replaces inf or NaN, so that
    # a step that overflowed is applied.
    "overflow hidden",
    # The state of a scaler comes back as it was, or a bad step is undone with the
    # counters and the loss scale: an overflow is then one for ever.
    "scale stuck",
    # The state of the optimizer comes back in a narrower dtype, or came in with a
    # loss scale narrower than float32, which is inf from 65520 on.
    "state narrowed",
    # After a fault an inf or NaN stays in what the step carries.
    "nan committed",
    # A skipped step changes parameters, or what belongs to them.
    "not atomic",
    # After one bad step the parameters never move again.
    "never recovers",
    # A step far above all that the spike policy has seen is applied.
    "spike not skipped",
    # In shard_map JAX has summed the gradients over devices, and the loss that the
    # optimizer is given is their mean.
    "summed over devices",
    # Devices hold different values of what they should hold together.
    "out of sync",
]
CODES: tuple[Code, ...] = get_args(Code)


class Mistake(NamedTuple):
    """What `jls.check_step` says of one."""

    right: str  # what holds in a right step
    write: str  # the line to write


_SELECT = (
    "new = jls.select(opt_state.applied, new, old) for what the optimizer does not hold"
)
_DECAY = "weight decay inside: jls.loss_scaled(optax.adamw(3e-4, weight_decay=1e-2))"
_UPDATE = "updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)"
_VALUE_AND_GRAD = "loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)"

TABLE: dict[Code, Mistake] = {
    "no step": Mistake(
        "a good step changes what the step carries",
        "return optax.apply_updates(params, updates) and the new opt_state from the "
        "step",
    ),
    "retraced": Mistake(
        "the third good step was not compiled again",
        "step = jax.jit(train_step) once, outside the loop; numbers that change go in "
        "as arrays",
    ),
    "host sync": Mistake(
        "the step reads no value at the host",
        "return the value from the step, and read it every so many steps: "
        "jls.metrics(opt_state), one jax.device_get",
    ),
    "not scaled": Mistake(
        "the gradients follow the loss scale",
        f"{_VALUE_AND_GRAD}, with the opt_state that the step was given",
    ),
    "scale leaks": Mistake(
        "the loss scale is left in neither gradients nor loss",
        "jls.value_and_grad(loss_fn) alone: it scales and unscales; no jls.scale in "
        "the loss, no jls.unscale after it; clipping inside, with clip = "
        "optax.clip_by_global_norm(1.0): jls.loss_scaled(optax.chain(clip, inner))",
    ),
    "loss not passed": Mistake(
        "the optimizer is given the loss",
        _UPDATE,
    ),
    "gradients narrowed": Mistake(
        "the true gradients stay in float32",
        "keep what jls.value_and_grad returns in float32; to send fewer bytes, cast to "
        "bfloat16, which has the range",
    ),
    "overflow hidden": Mistake(
        "an inf in the gradients reaches the optimizer",
        "no jnp.nan_to_num, no elementwise clip and no jnp.where(isfinite) before "
        "jls.loss_scaled sees the gradients; "
        "jls.loss_scaled(optax.chain(optax.clip(1.0), inner))",
    ),
    "scale stuck": Mistake(
        "the scaler is told of good and of bad steps",
        "return the opt_state that optimizer.update returns in every step, good or "
        "bad: the wrapper rolls back what has to stay; with the pure functions: "
        "state = scaler.adjust(state, jls.all_finite(grads)), after jls.unscale",
    ),
    "state narrowed": Mistake(
        "the state of the optimizer keeps its dtypes",
        "return the opt_state that optimizer.update returns, without a cast; moments "
        "in bfloat16: optax.adamw(3e-4, mu_dtype=jnp.bfloat16)",
    ),
    "nan committed": Mistake(
        "after a fault no inf or NaN stayed",
        _SELECT,
    ),
    "not atomic": Mistake(
        "a skipped step leaves what is trained as it was",
        f"{_SELECT}; {_DECAY}",
    ),
    "never recovers": Mistake(
        "after a bad step, good ones train on",
        _SELECT,
    ),
    "spike not skipped": Mistake(
        "a step far out of line was skipped",
        f"{_UPDATE}, with the true gradients, and keep all of the opt_state that it "
        "returns",
    ),
    "summed over devices": Mistake(
        "the gradients match the loss passed to update",
        'return jax.lax.pmean(loss, "data") from loss_fn, and drop the pmean of the '
        "gradients",
    ),
    "out of sync": Mistake(
        "all devices hold the same",
        'jls.loss_scaled(inner, axis_name="data"), and grads = jax.lax.pmean(grads, '
        '"data") before the update',
    ),
}

_ATOMIC = (
    "with jls.atomic(optimizer, model): around the forward pass and the update; it "
    "takes back what the step changed in the model"
)
_MASKED = (
    "jls.loss_scaled(optax.masked(inner, mask)): the wrapper sees no gradient of what "
    "a mask outside leaves out"
)
_PARTITION = (
    "jls.loss_scaled(optax.multi_transform(parts, labels)), with no wrapper in the "
    "parts: one sees no gradient of the others"
)

_NNX_STEP = (
    "step = nnx.jit(jls.train_step(loss_fn)); under jax.jit return model and optimizer "
    "from the step, and use what it returns"
)
_NNX_GRAD_FN = "jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)"

# The line to write in the place of the table's, by what the step carries.
NNX: dict[Code, str] = {
    "no step": _NNX_STEP,
    "not scaled": f"loss, grads = {_NNX_GRAD_FN}(optimizer, model, batch)",
    "loss not passed": "optimizer.update(model, grads, value=loss)",
    "nan committed": _ATOMIC,
    "not atomic": f"{_ATOMIC}; {_DECAY}",
    "never recovers": _ATOMIC,
}
# With only the scaler's state: there is no optimizer for `jls.atomic`.
NNX_BARE: dict[Code, str] = {
    "no step": _NNX_STEP,
    "not scaled": f"loss, grads = {_NNX_GRAD_FN}(state, model, batch)",
}
EQUINOX: dict[Code, str] = {
    "not scaled": "loss, grads = jls.value_and_grad(loss_fn, "
    "transform=eqx.filter_value_and_grad)(opt_state, model, batch), with the opt_state "
    "that the step was given",
}
LINEN: dict[Code, str] = {
    "loss not passed": "params, opt_state, report = jls.apply_gradients(state.tx, "
    "grads, state.opt_state, state.params, value=loss), then state = state.replace("
    "step=state.step + 1, params=params, opt_state=opt_state)"
}
# Before that line, if the optimizer has this around the wrapper.
MULTI_STEPS: dict[Code, str] = {
    "never recovers": "jls.loss_scaled(optax.MultiSteps(inner, k)), accumulation inside"
}
_AROUND: tuple[Code, ...] = ("nan committed", "not atomic", "never recovers")
MASKED: dict[Code, str] = dict.fromkeys(_AROUND, _MASKED)
PARTITION: dict[Code, str] = dict.fromkeys(_AROUND, _PARTITION)
LEAVE_OUT = (
    "If some state is meant to move in a bad step, name only the fields that must not: "
    'jls.check_step(..., carried={"state": ["params", "opt_state"]})'
)
