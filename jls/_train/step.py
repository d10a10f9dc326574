# SPDX-License-Identifier: Apache-2.0
"""A whole train step: differentiate, accumulate, step or skip, report.

A skipped step rolls back everything that a bad batch could have touched: the
parameters, the optimizer's state, and what the model carries from step to step, such as
batch statistics and RNG counters. Only the counts of calls go on: `TrainState.step` and
`nnx.Optimizer.step`.

`take_step` is the pure step. An adapter knows where its library keeps each part of the
state: `linen`, `nnx`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, overload

import optax
from jax import Array

from jls import _validate
from jls._scale import value_and_grad
from jls._state import find, is_wrapper_state
from jls._step import update_and_apply, wrapper_of
from jls._train.accumulate import Accumulation, Drop, accumulate
from jls._train.linen import LinenAdapter, is_linen
from jls._train.nnx import NnxAdapter, is_nnx
from jls._train.parts import Adapter, Parts
from jls._train.rates import Rates, check_rates, learning_rates, local_norms
from jls._tree import select
from jls._types import LossScaledState, StepReport


class _TrainState(Protocol):
    """A Flax `TrainState`."""

    @property
    def params(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def opt_state(self) -> Any: ...


class _NnxOptimizer(Protocol):
    """An `nnx.Optimizer`."""

    @property
    def tx(self) -> Any: ...
    @property
    def wrt(self) -> Any: ...


_StateT = TypeVar("_StateT", bound=_TrainState)


class TrainStep(Protocol):
    """What `jls.train_step` returns."""

    @overload
    def __call__(self, state: _StateT, batch: Any, /) -> tuple[_StateT, StepReport]: ...
    @overload
    def __call__(
        self, model: Any, optimizer: _NnxOptimizer, batch: Any, /
    ) -> StepReport: ...


class Options(NamedTuple):
    """What `train_step` was given, checked."""

    learning_rate: Rates
    micro_batches: int
    accumulation: Accumulation
    drop: Drop
    local_norm: bool


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    learning_rate: Rates = None,
    micro_batches: int = 1,
    accumulation: Accumulation = "mean",
    drop: Drop = "step",
    local_norm: bool = False,
) -> TrainStep:
    """Returns a train step for Flax that scales the loss and skips bad steps.

    For Linen it is `step(state, batch) -> (state, report)`, where `state` is a
    `TrainState` whose `tx` was made by `jls.loss_scaled`; jit it with
    `jax.jit(step, donate_argnums=0)`. For NNX it is `step(model, optimizer, batch) ->
    report`, which changes model and optimizer in place; jit it with `nnx.jit(step)`.

    A skipped step leaves everything as it was, bit for bit: parameters, optimizer
    state, batch statistics, RNG counters. `TrainState.step` and `nnx.Optimizer.step`
    count calls, skipped ones too; `jls.metrics(state)` has both counts.

    Under `jax.shard_map` and `jax.pmap` the optimizer needs `axis_name=`, and you
    average the gradients: return `jax.lax.pmean(loss, axis_name)` from `loss_fn` under
    `shard_map`, whose automatic sum does the rest; without its checks, and under
    `pmap`, put the mean first inside the optimizer. If a parameter is split, the norms
    in the report are of the device's own part.

    Args:
      loss_fn: for Linen `loss_fn(state, batch)`, where `state` is the `TrainState` with
        the parameters to differentiate in `state.params`; for NNX
        `loss_fn(model, batch)`. Returns the loss, a real floating-point scalar.
      has_aux: Linen only: `loss_fn` returns `(loss, fields)`, where `fields` is a dict
        of new values for fields of the state, e.g. `{"batch_stats": ...}`. A skipped
        step drops them.
      learning_rate: for the report: a schedule or a number > 0, or a dict of them by
        group. A schedule is called with the count of steps applied before. None looks
        for `optax.inject_hyperparams` in the optimizer's state.
      micro_batches: >= 1, splits the batch along its leading axis and accumulates the
        gradients in float32, one micro-batch after the other: with k micro-batches,
        example i goes into number i mod k.
      accumulation: "mean" or "sum" of the losses and gradients of the micro-batches.
      drop: what a non-finite micro-batch costs: "step", the whole step is skipped; or
        "micro_batch", only that one is left out. The mean is then over the others, the
        step is skipped only if none is left, and the scale still backs off after an
        overflow.
      local_norm: whether the report has the norm of each gradient.

    Returns:
      The step. Its report is a `jls.types.StepReport`:
      `loss` is true and finite whenever the forward loss is (with
      `drop="micro_batch"`, of the micro-batches with a finite loss);
      `skipped` says whether the step was skipped, for whatever reason;
      `loss_scale` is that of the next step;
      `learning_rate` is what this step used, None if none is found, a dict by group
      if there are several (after a skipped step an injected one is still that of
      the last applied step);
      `global_norm` is the L2 norm of the true gradients before clipping, which does
      not overflow on the way; not finite if they are not;
      `local_norm` and `size` are dicts by the path of the parameter, or None;
      `dropped` counts micro-batches left out.

    Raises:
      TypeError, ValueError: at once for a bad option; when the step is traced, if the
        state's optimizer was not made by jls or is inside an `optax.MultiSteps` (which
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
      >>> state.params, report.skipped
      (Array([-0.5, -1. ], dtype=float32), Array(True, dtype=bool))
    """
    _validate.function("loss_fn", loss_fn)
    has_aux = _validate.flag("has_aux", has_aux)
    _validate.choice("accumulation", accumulation, get_args(Accumulation))
    _validate.choice("drop", drop, get_args(Drop))
    check_rates(learning_rate)
    options = Options(
        learning_rate=learning_rate,
        micro_batches=_validate.host_interval("micro_batches", micro_batches),
        accumulation=accumulation,
        drop=drop,
        local_norm=_validate.flag("local_norm", local_norm),
    )

    def step(*args):
        adapter, batch = _adapt(loss_fn, has_aux, args)
        parts, report = take_step(adapter, batch, options)
        return adapter.merge(parts, report)

    return step


def take_step(
    adapter: Adapter, batch: Any, options: Options
) -> tuple[Parts, StepReport]:
    """The parts of a state after one step, and the report."""
    optimizer = adapter.optimizer
    params, opt_state, carried = adapter.split()
    before = _wrapper_state_in(opt_state)
    wrapper = wrapper_of(optimizer)
    grad_fn = value_and_grad(adapter.loss, has_aux=True)
    made = accumulate(
        partial(grad_fn, before.scaler_state, params),
        params,
        carried,
        batch,
        micro_batches=options.micro_batches,
        accumulation=options.accumulation,
        drop=options.drop,
        axis_name=wrapper.axis_name if wrapper else None,
    )
    new_params, new_opt_state, global_norm = update_and_apply(
        optimizer,
        made.grads,
        opt_state,
        params,
        value=made.loss,
        partial_overflow=made.partial_overflow,
    )
    after = _wrapper_state_in(new_opt_state)
    count = _applied_before(opt_state, before)
    norms, sizes = local_norms(made.grads) if options.local_norm else (None, None)
    report = StepReport(
        loss=made.loss,
        skipped=~after.applied,
        loss_scale=after.scaler_state.loss_scale,
        learning_rate=learning_rates(options.learning_rate, count, new_opt_state),
        global_norm=global_norm,
        local_norm=norms,
        size=sizes,
        dropped=made.dropped,
    )
    new_carried = select(after.applied, made.carried, carried)
    return Parts(new_params, new_opt_state, new_carried), report


def _adapt(
    loss_fn: Callable[..., Any], has_aux: bool, args: tuple[Any, ...]
) -> tuple[Adapter, Any]:
    """The adapter for what the step was called with, and the batch."""
    if is_linen(args):
        state, batch = args
        return LinenAdapter(loss_fn, has_aux, state), batch
    if is_nnx(args):
        model, optimizer, batch = args
        return NnxAdapter(loss_fn, has_aux, model, optimizer), batch
    types = ", ".join(type(x).__name__ for x in args)
    raise TypeError(
        "call step(state, batch) with a Flax TrainState, or "
        "step(model, optimizer, batch) with an NNX model and its nnx.Optimizer; "
        f"got {types}. A batch is one argument: (x, y), or a dict."
    )


def _wrapper_state_in(opt_state: Any) -> LossScaledState:
    """The state of the one wrapper in `opt_state`, not inside a `MultiSteps`."""
    found = [node for _, node in find(opt_state, is_wrapper_state)]
    if len(found) != 1:
        raise ValueError(
            "the optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, "
            f"once: got a state with {len(found)} such wrappers."
        )
    for _, around in find(opt_state, _is_multi_steps):
        if find(around, is_wrapper_state):
            raise ValueError(
                "optax.MultiSteps must be inside jls.loss_scaled, got it outside, "
                "where a NaN stays in its accumulator for ever. Write "
                "jls.loss_scaled(optax.MultiSteps(optimizer, k))."
            )
    return found[0]


def _is_multi_steps(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _applied_before(opt_state: Any, before: LossScaledState) -> Array:
    """How many optimizer steps were applied; `MultiSteps` counts accumulated ones."""
    windows = find(opt_state, _is_multi_steps)
    return windows[0][1].gradient_step if windows else before.steps - before.skips
