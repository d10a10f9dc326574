# SPDX-License-Identifier: Apache-2.0
"""A whole train step for Flax: differentiate, accumulate, step or skip, report.

Everything that a bad batch could have touched is taken back on a skipped step: the
parameters, the optimizer's state, and what the model itself carries on, such as batch
statistics and RNG counters. Only the count of calls goes on: `TrainState.step` and
`nnx.Optimizer.step`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax import Array

from jls import _validate
from jls._accumulate import accumulate
from jls._advance import apply_gradients, guard_of
from jls._grad import value_and_grad
from jls._guard import like
from jls._locate import find, is_wrapper_state, unwrapped
from jls._report import Rates, StepReport, check_rates, learning_rates, local_norms
from jls._tree import select
from jls._types import LossScaledState

_FP8 = "_overwrite_with_gradient"  # the collection of Flax's fp8 layers


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    learning_rate: Rates = None,
    micro_batches: int = 1,
    accumulation: str = "mean",
    drop: str = "window",
    local_norm: bool = False,
) -> Callable[..., Any]:
    """Returns a train step for Flax that scales the loss, and steps or skips.

    For Linen it is `step(state, batch) -> (state, report)`, where `state` is a
    `TrainState` whose `tx` is made by `jls.loss_scaled`; jit it with
    `jax.jit(step, donate_argnums=0)`. For NNX it is `step(model, optimizer, batch) ->
    report`, which changes model and optimizer in place; jit it with `nnx.jit(step)`.

    A skipped step leaves all as it was, bit for bit: parameters, optimizer state, batch
    statistics, RNG counters. `TrainState.step` and `nnx.Optimizer.step` count calls,
    skipped ones too; `jls.metrics(state)` has both counts.

    Under `jax.shard_map` and `jax.pmap` the optimizer needs `axis_name=`. Gradients are
    averaged by you: return `jax.lax.pmean(loss, axis_name)` from `loss_fn` under
    `shard_map`, whose automatic sum does the rest; without its checks, and under
    `pmap`, put the mean first inside the optimizer. Norms in the report are then those
    of the device's own part of a parameter that is split.

    Args:
      loss_fn: for Linen `loss_fn(state, batch)`, where `state` is the `TrainState` with
        the parameters to differentiate in `state.params`; for NNX
        `loss_fn(model, batch)`. Returns the loss, a real floating-point scalar.
      has_aux: Linen only: `loss_fn` returns `(loss, fields)`, where `fields` is a dict
        of new values for fields of the state, e.g. `{"batch_stats": ...}`. They are
        kept if the step is.
      learning_rate: for the report: a schedule or a number > 0, or a dict of them by
        group. A schedule is called with the count of steps applied before. None looks
        for `optax.inject_hyperparams` in the optimizer's state.
      micro_batches: >= 1, splits the batch along its leading axis and accumulates the
        gradients in float32, one micro-batch after the other: example i goes into the
        i mod k-th.
      accumulation: "mean" or "sum" of the losses and gradients of the micro-batches.
      drop: what one non-finite micro-batch takes with it: "window", the whole step, or
        "micro_batch", only itself: the mean is then over the rest, the step is skipped
        only if none is left, and the scale still backs off after an overflow.
      local_norm: whether the report has the norm of each single gradient.

    Returns:
      The step. Its report is a `jls.StepReport`:
      `loss` is true and finite whenever the forward loss is (with
      `drop="micro_batch"`, of the micro-batches with a finite loss);
      `overflow` says that the step was skipped, for whatever reason;
      `loss_scale` is the next step's;
      `learning_rate` is what this step used, None where none is found, a dict by group
      where there are several (after a skipped step an injected one is still that of
      the last applied step);
      `global_norm` is the L2 norm of the true gradients before clipping, which does
      not overflow on the way; not finite if they are not;
      `local_norm` and `size` are dicts by the path of the parameter, or None;
      `dropped` counts micro-batches left out.

    Raises:
      TypeError, ValueError: at once for a bad option; when the step is traced, if the
        state's optimizer is not made by jls or is inside an `optax.MultiSteps` (which
        would keep a NaN for ever: put it inside), if `micro_batches` does not divide
        the batch, or if `loss_fn` returns something else.

    Example:
      >>> from flax.training.train_state import TrainState
      >>> tx = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(1024.0))
      >>> state = TrainState.create(
      ...     apply_fn=lambda params, x: params * x, params=jnp.ones(2), tx=tx
      ... )
      >>> def loss_fn(state, batch):
      ...     return jnp.sum(state.apply_fn(state.params, batch))
      >>> step = jax.jit(jls.train_step(loss_fn, learning_rate=0.5))
      >>> state, report = step(state, jnp.array([3.0, 4.0]))
      >>> state.params, report.global_norm
      (Array([-0.5, -1. ], dtype=float32), Array(5., dtype=float32))
      >>> state, report = step(state, jnp.array([3.0, 2e38]))
      >>> state.params, report.overflow
      (Array([-0.5, -1. ], dtype=float32), Array(True, dtype=bool))
    """
    _validate.function("loss_fn", loss_fn)
    has_aux = _validate.flag("has_aux", has_aux)
    local_norm = _validate.flag("local_norm", local_norm)
    micro_batches = _validate.host_interval("micro_batches", micro_batches)
    _check_choice("accumulation", accumulation, ("mean", "sum"))
    _check_choice("drop", drop, ("window", "micro_batch"))
    check_rates(learning_rate)

    def advance(compute, optimizer, opt_state, params, carried, batch):
        """One step of the pure parts of a state; `compute` gives the loss."""
        wrapper = _wrapper_in(opt_state)
        guard = guard_of(optimizer)
        grad_fn = value_and_grad(compute, has_aux=True)
        made = accumulate(
            partial(grad_fn, wrapper.scaler_state, params),
            params,
            carried,
            batch,
            micro_batches=micro_batches,
            accumulation=accumulation,
            drop=drop,
            axis_name=guard and guard.axis_name,
        )
        new_params, new_opt_state, global_norm = apply_gradients(
            optimizer,
            made.grads,
            opt_state,
            params,
            value=made.loss,
            overflow=made.overflow,
        )
        new_wrapper = _wrapper_in(new_opt_state)
        norms, sizes = local_norms(made.grads) if local_norm else (None, None)
        report = StepReport(
            loss=made.loss,
            overflow=~new_wrapper.applied,
            loss_scale=new_wrapper.scaler_state.loss_scale,
            learning_rate=learning_rates(
                learning_rate, _applied_before(opt_state, wrapper), new_opt_state
            ),
            global_norm=global_norm,
            local_norm=norms,
            size=sizes,
            dropped=made.dropped,
        )
        carried = select(new_wrapper.applied, made.carried, carried)
        return new_params, new_opt_state, carried, report

    def linen_step(state, batch):
        if isinstance(state.params, Mapping) and _FP8 in state.params:
            raise ValueError(
                f"params must hold parameters alone, got {_FP8!r} too. Their gradients "
                "are their next values, neither scaled nor accumulated: write the step "
                "by hand, with jls.scale(state, grads[...]) for them."
            )

        def compute(params, carried, batch):
            result = loss_fn(state.replace(params=params, **carried), batch)
            if not has_aux:
                return result, carried
            loss, fields = _loss_and_fields(result, carried)
            return loss, like("loss_fn's aux", carried | fields, carried)

        carried = _carried_fields(state)
        params, opt_state, carried, report = advance(
            compute, state.tx, state.opt_state, state.params, carried, batch
        )
        step = state.step + 1
        return state.replace(
            step=step, params=params, opt_state=opt_state, **carried
        ), report

    def nnx_step(model, optimizer, batch):
        from flax import nnx

        if has_aux:
            raise ValueError(
                "has_aux must be False for an NNX model, which itself carries what is "
                "to be kept or taken back: assign it to an nnx.Variable of the model."
            )
        graph, *state = nnx.split(model, optimizer.wrt, ...)
        params, carried = unwrapped(state)

        def compute(params, carried, batch):
            copy = nnx.merge(graph, params, carried)
            loss = loss_fn(copy, batch)
            after = unwrapped(nnx.split(copy, optimizer.wrt, ...)[2])
            return loss, like("loss_fn, which ran on the model,", after, carried)

        opt_state = unwrapped(optimizer.opt_state)
        params, opt_state, carried, report = advance(
            compute, optimizer.tx, opt_state, params, carried, batch
        )
        nnx.update(model, params, carried)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        optimizer.step.set_value(optimizer.step.get_value() + 1)
        return report

    def step(state, *args):
        if len(args) == 1 and hasattr(state, "tx"):
            return linen_step(state, *args)
        if len(args) == 2 and hasattr(args[0], "wrt"):
            return nnx_step(state, *args)
        types = ", ".join(type(x).__name__ for x in (state, *args))
        raise TypeError(
            "call step(state, batch) with a Flax TrainState, or "
            "step(model, optimizer, batch) with an NNX model and its nnx.Optimizer; "
            f"got {types}. A batch is one argument: (x, y), or a dict."
        )

    return step


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def _carried_fields(state: Any) -> dict[str, Any]:
    """The fields of a `TrainState` that a loss function may change."""
    return {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
        and field.name not in ("step", "params", "opt_state")
    }


def _loss_and_fields(result: Any, carried: dict[str, Any]) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "with has_aux=True loss_fn must return the pair (loss, fields), got "
            f"{type(result).__name__}."
        )
    loss, fields = result
    if not isinstance(fields, Mapping) or not fields.keys() <= carried.keys():
        got = list(fields) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(
            "loss_fn's aux must be a dict of new values for fields of the state, of "
            f"{list(carried)}, got {got}. Add a field to your TrainState for what the "
            "step is to carry on."
        )
    return loss, dict(fields)


def _wrapper_in(opt_state: Any) -> LossScaledState:
    """The state of the one wrapper in `opt_state`; no `MultiSteps` may be around it."""
    found = [node for _, node in find(opt_state, is_wrapper_state)]
    if len(found) != 1:
        raise ValueError(
            "the optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, "
            f"once: got a state with {len(found)} such wrappers."
        )
    for _, around in find(opt_state, _is_multi_steps):
        if find(around, is_wrapper_state):
            raise ValueError(
                "optax.MultiSteps must be inside of jls.loss_scaled, got it outside, "
                "where a NaN stays in its accumulator for ever. Write jls.loss_scaled("
                "optax.MultiSteps(optimizer, k).gradient_transformation())."
            )
    return found[0]


def _is_multi_steps(node: Any) -> bool:
    return {"gradient_step", "acc_grads"} <= set(getattr(node, "_fields", ()))


def _applied_before(opt_state: Any, wrapper: LossScaledState) -> Array:
    """How many optimizer steps were applied; of `MultiSteps`, whole windows."""
    windows = find(opt_state, _is_multi_steps)
    return windows[0][1].gradient_step if windows else wrapper.steps - wrapper.skips
