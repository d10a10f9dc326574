# SPDX-License-Identifier: Apache-2.0
"""A whole train step: differentiate, accumulate, step or skip, report.

A skipped step rolls back everything that a bad batch could have touched: the
parameters, the optimizer's state, and what the model carries from step to step, such as
batch statistics and RNG counters. The loss scale adjusts, and what counts calls goes
on: the counters of jls, `TrainState.step` and `nnx.Optimizer.step`.

`take_step` is the pure step. An adapter knows where its library keeps each part of the
state: `plain`, `linen`, `nnx`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import (
    Any,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

import jax
import jax.numpy as jnp
import optax

from jls import _validate
from jls._autocast.autocast import autocast, check_dtype, check_keep
from jls._autocast.keep import Keep
from jls._bfloat16 import read_wide, stored_narrow
from jls._ema import ParamsEmaState
from jls._mistakes import EagerCalls, check_loss_function, other_params_noted, warn
from jls._notes import noted
from jls._program.jaxprs import varying_axes
from jls._reduce import global_norm
from jls._scale import differentiate
from jls._step import FoundWrapper, find_wrappers, wrapper_of
from jls._text import describe, listed, naming_arguments, quoted
from jls._train.accumulate import Accumulated, Accumulation, Drop, accumulate, keys_for
from jls._train.apply import (
    WRAP_WHOLE,
    Rates,
    apply_and_report,
    check_optimizer,
    check_rates,
    given_rates,
    inner_wrapper_state,
    local_norms,
)
from jls._train.linen import LinenAdapter
from jls._train.loss import other_order_named, warn_of_no_gradient
from jls._train.nnx import NnxAdapter
from jls._train.parts import Parts, StepCall
from jls._train.plain import PlainAdapter
from jls._tree import floats_of, is_array, select
from jls._types import LossScaledState, SkipReason, StaticState, StepReport
from jls._unguarded import follow, unguarded_in
from jls._validate import is_real

Adapter = PlainAdapter | LinenAdapter | NnxAdapter


class _TrainState(Protocol):
    """A Flax `TrainState`."""

    @property
    def params(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def opt_state(self) -> Any: ...


_StateT = TypeVar("_StateT", bound=_TrainState)
_Params = TypeVar("_Params")
_OptState = TypeVar("_OptState")
_Carried = TypeVar("_Carried")


class TrainStep(Protocol):
    """The result of `jls.train_step` without an optimizer, for Flax."""

    @overload
    def __call__(
        self, state: _StateT, batch: Any, /, **kwargs: Any
    ) -> tuple[_StateT, StepReport]: ...
    @overload
    def __call__(
        self, model: Any, optimizer: Any, batch: Any, /, **kwargs: Any
    ) -> StepReport: ...


class PlainTrainStep(Protocol):
    """The result of `jls.train_step` with an optimizer."""

    def __call__(
        self, params: _Params, opt_state: _OptState, batch: Any, /, **kwargs: Any
    ) -> tuple[_Params, _OptState, StepReport]: ...


class CarryingTrainStep(Protocol):
    """The result of `jls.train_step` with an optimizer and `carried=True`."""

    def __call__(
        self,
        params: _Params,
        opt_state: _OptState,
        carried: _Carried,
        batch: Any,
        /,
        **kwargs: Any,
    ) -> tuple[_Params, _OptState, _Carried, StepReport]: ...


# Extra arguments of the optimizer's update by name, or a function that makes them of
# the model and the batch.
Extra = Mapping[str, Any] | Callable[[Any, Any], Mapping[str, Any]] | None


class Options(TypedDict, total=False):
    """The options of `train_step`."""

    has_aux: bool
    learning_rate: Rates
    micro_batches: int | None
    accumulation: Accumulation
    drop: Drop
    local_norm: bool
    update_norm: bool
    extra: Extra
    compute_dtype: Any
    keep: Keep


@overload
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: None = None,
    *,
    carried: bool = False,
    **options: Unpack[Options],
) -> TrainStep: ...
@overload
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    carried: Literal[False] = False,
    **options: Unpack[Options],
) -> PlainTrainStep: ...
@overload
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    carried: Literal[True],
    **options: Unpack[Options],
) -> CarryingTrainStep: ...
@naming_arguments(
    dtype="compute_dtype",
    param_dtype="compute_dtype",
    accumulate="micro_batches",
    accumulation_steps="micro_batches",
    gradient_accumulation_steps="micro_batches",
    carries="carried",
    rate="learning_rate",
    lr="learning_rate",
)
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation | None = None,
    *,
    has_aux: bool = False,
    carried: bool = False,
    learning_rate: Rates = None,
    micro_batches: int | None = None,
    accumulation: Accumulation = "mean",
    drop: Drop = "step",
    local_norm: bool = False,
    update_norm: bool = False,
    extra: Extra = None,
    compute_dtype: Any = None,
    keep: Keep = None,
) -> Any:
    """Returns a whole train step that scales the loss and skips bad steps.

    For plain pytrees, Haiku and Equinox, which need `optimizer`, and with `carried`::

      params, opt_state, report = step(params, opt_state, batch)
      params, opt_state, carried, report = step(params, opt_state, carried, batch)

    For a Flax Linen `TrainState`, and for Flax NNX, which hold their optimizers::

      state, report = step(state, batch)
      report = step(model, optimizer, batch)

    `loss_fn` takes `(params, batch)`, `(params, carried, batch)`, `(state, batch)` or
    `(model, batch)`, and the step's keyword arguments (`rng=`, `step=`), unchanged
    except for keys with `micro_batches`. NNX objects among these, such as
    `rngs=nnx.Rngs(0)` or a metric, are changed in place, and rolled back like the
    model. A `TrainState` may be a dataclass of your own. It may have no `step`, or
    `global_step` instead, and other names for `tx`, `params` and `opt_state` if only
    one field can be meant.

    The step is a pure function, except for NNX: there it changes model and optimizer in
    place (only variables: a Python number that the loss function counts in an attribute
    of the model stays as it was). Jit it with `jax.jit`, NNX with `nnx.jit`, an Equinox
    model with `equinox.filter_jit`; donate the arguments that it returns anew.

    A skipped step leaves parameters, the wrapped optimizer's state, batch statistics
    and RNG counters as they were, bit for bit. The loss scale adjusts.
    `TrainState.step` and `nnx.Optimizer.step` count calls, skipped ones too;
    `jls.metrics(state)` has the counts of all steps and of skipped ones.

    Under `jax.shard_map` and `jax.pmap` the optimizer needs `axis_name=`, and you
    average the gradients. Under `shard_map` return `jax.lax.pmean(loss, axis_name)`
    from `loss_fn`: its automatic sum does the rest. With `check_vma=False`, and under
    `pmap`, put the mean first inside the optimizer. If a parameter is sharded, the
    norms in the report cover the device's own shard. (`jax.shard_map` takes no keyword
    arguments: wrap the step there.)

    Args:
      loss_fn: returns the loss, a real floating-point scalar; with `has_aux` and
        `carried` more. Linen's takes the `TrainState` with the parameters to
        differentiate in `state.params`. An Equinox model is differentiated with respect
        to its floating-point arrays; its optimizer is initialized with
        `optimizer.init(equinox.filter(model, equinox.is_inexact_array))`.
      optimizer: made by `jls.loss_scaled` or `jls.skip_nonfinite`, or one that contains
        one such wrapper; None for Flax.
      has_aux: `loss_fn` returns `(loss, aux)`: metrics, logits, any pytree of arrays.
        It comes back as `report.aux`, untouched, also on a skipped step. With k
        micro-batches it is stacked to `[k, ...]`.
      carried: `loss_fn` returns `(loss, carried)`, or `(loss, carried, aux)` with
        `has_aux`: the next value of what the model carries from step to step, such as
        Haiku's state. A skipped step keeps the old one. For Linen it is a dict of new
        values for fields of the `TrainState`, e.g. `{"batch_stats": ...}`; NNX needs
        none, since a model's variables are carried anyway.
      learning_rate: for the report: a schedule or a number > 0, or a dict of them by
        group. A schedule is called with the number of steps applied so far. None takes
        that of `optax.inject_hyperparams`, if the optimizer has it.
      micro_batches: >= 1, splits the batch along its leading axis and accumulates the
        gradients in float32, one micro-batch after the other: with k micro-batches,
        example i goes into number i mod k. If k > 1, `jax.random.fold_in` puts that
        number into each typed PRNG key among the keyword arguments; keys in the batch
        are split like the rest of it. None is 1, and `accumulation` and `drop` are then
        an error.
      accumulation: "mean" or "sum" of the losses and gradients of the micro-batches.
      drop: what a non-finite micro-batch costs: "step", the whole step is skipped; or
        "micro_batch", only that one is left out. The mean is then over the others, the
        step is skipped only if none is left, and the scale still backs off after an
        overflow.
      local_norm: whether the report has the norm of each gradient.
      update_norm: whether the report has the norm of the updates, which are then read
        once more.
      extra: further arguments for the `update` of an optimizer that wants them, such as
        `value_fn` for `optax.lbfgs`: a dict, or a function of `(params, batch)` that
        returns one, for Linen of `(state, batch)`, for NNX of `(model, batch)`. The
        loss, as `value`, and the gradients, as `grad`, need no `extra`.
      compute_dtype: `jnp.float16`, `jnp.bfloat16` or `jnp.float8_e4m3fn`: the dtype of
        the products of `loss_fn`, and of `value_fn` in `extra`, as by `jls.autocast`.
        float8 is for large ones, the others are bfloat16. All else, parameters,
        gradients and the loss stay float32; bfloat16 parameters that a
        `jls.bfloat16_params` stores are widened for `loss_fn`, in any case. None or
        `jnp.float32` casts nothing.
      keep: what of `loss_fn` stays as written under `compute_dtype`, without which it
        is an error: a regular expression or a function, see `jls.autocast`.

    Returns:
      The step. Its report is a `jls.types.StepReport`:
      `loss` is unscaled, and finite whenever the forward loss is (with
      `drop="micro_batch"`, it is that of the micro-batches with a finite loss);
      `skipped` says whether the step was skipped, for whatever reason;
      `loss_scale` is that of the next step;
      `learning_rate` is the one that was given, or that `optax.inject_hyperparams`
      holds, without other factors of the updates; None without one, a dict by group if
      there are several (after a skipped step an injected one is still that of the last
      applied step);
      `global_norm` is the L2 norm of the unscaled gradients before clipping, not finite
      if they are not; if the optimizer clips by it, it is inf over 1.8e19;
      `local_norm` and `size` are dicts by the path of the parameter, or None;
      `dropped` counts micro-batches left out;
      `aux` is what `loss_fn` returned for it, or None;
      `skip_reason` is a `jls.types.SkipReason`, 0 if the step was applied;
      `limit_loss` and `limit_norm` are the limits of `jls.spikes` for loss and norm at
      the last step that it judged, None without it;
      `update_norm` is the L2 norm of what was added to the parameters, 0 if the step
      was skipped and nothing outside the wrapper makes updates; None unless it was
      asked for.

    Raises:
      TypeError, ValueError: at once for a bad option; when the step is traced, if the
        optimizer was not made by jls, is inside an `optax.MultiSteps` (which would keep
        a NaN for ever: put it inside), has the wrapper around a part of it, so that a
        skipped step would move the others, or weight decay, momentum or the like after
        it, which would move parameters then, if `micro_batches` does not divide the
        batch, if `loss_fn` returns something else, if the arguments come in another
        order, those of `loss_fn` too, if there is no parameter to train, if the
        parameters are `optax.LookaheadParams`, or if `shard_map` sums the gradients of
        a loss that each device has for itself.

    Warns:
      JlsWarning: at the second call that runs operation by operation, with 2**16
        parameters or more; not under `jax.disable_jit`. With several micro-batches, if
        a keyword argument seems to be a raw PRNG key, which all of them would share, or
        if they share a key in a field of a `TrainState`.
        If the loss does not follow the parameters; if `aux` is the next value of arrays
        that `loss_fn` closes over, such as Haiku's state.
        With `compute_dtype=jnp.float16`, if the loss scale is static and 1; and what
        `jls.autocast` warns of.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(1024.0))
      >>> def loss_fn(params, batch):
      ...     return jnp.sum(params * batch)
      >>> step = jax.jit(jls.train_step(loss_fn, optimizer))
      >>> params = jnp.ones(2)
      >>> opt_state = optimizer.init(params)
      >>> params, opt_state, report = step(params, opt_state, jnp.array([3.0, 4.0]))
      >>> params, report.global_norm
      (Array([-0.5, -1. ], dtype=float32), Array(5., dtype=float32))
      >>> params, opt_state, report = step(params, opt_state, jnp.array([3.0, 2e38]))
      >>> params, report.skipped
      (Array([-0.5, -1. ], dtype=float32), Array(True, dtype=bool))

      With Flax, model and optimizer come together:

      >>> from flax.training.train_state import TrainState
      >>> state = TrainState.create(
      ...     apply_fn=lambda params, x: params * x, params=jnp.ones(2), tx=optimizer
      ... )
      >>> def loss_fn(state, batch):
      ...     return jnp.sum(state.apply_fn(state.params, batch))
      >>> state, report = jax.jit(jls.train_step(loss_fn))(state, jnp.array([3.0, 4.0]))
      >>> state.params
      Array([-0.5, -1. ], dtype=float32)
    """
    if isinstance(loss_fn, optax.GradientTransformation):
        raise TypeError(
            f"loss_fn must come first, got {type(loss_fn).__name__}. The order is "
            "jls.train_step(loss_fn, optimizer)."
        )
    _validate.function("loss_fn", loss_fn)
    check_loss_function("loss_fn", loss_fn)
    if optimizer is not None:
        check_optimizer(optimizer, "jls.train_step(loss_fn, optimizer)")
    has_aux = _validate.flag("has_aux", has_aux)
    carried = _validate.flag("carried", carried)
    _validate.choice("accumulation", accumulation, get_args(Accumulation))
    _validate.choice("drop", drop, get_args(Drop))
    check_rates(learning_rate)
    for name, value in {"accumulation": accumulation, "drop": drop}.items():
        if micro_batches is None and value not in ("mean", "step"):
            raise ValueError(
                f"{name} must come with micro_batches=, got {value!r} alone. Add the "
                f"number of micro-batches, or leave {name} out."
            )
    count = 1 if micro_batches is None else micro_batches
    dtype = jnp.float32 if compute_dtype is None else compute_dtype
    options = SimpleNamespace(
        loss_fn=loss_fn,
        learning_rate=learning_rate,
        micro_batches=_validate.host_interval("micro_batches", count),
        accumulation=accumulation,
        drop=drop,
        local_norm=_validate.flag("local_norm", local_norm),
        update_norm=_validate.flag("update_norm", update_norm),
        extra=_check_extra(extra),
        compute_dtype=check_dtype("compute_dtype", dtype),
        keep=keep,
    )
    check_keep(keep)
    if keep is not None and compute_dtype is None:
        raise ValueError(
            f"keep must come with compute_dtype=, got {describe(keep)} alone. Add "
            "compute_dtype=jnp.bfloat16, or leave keep out."
        )

    eager_calls, is_split = EagerCalls(), options.micro_batches > 1

    def step(*args, **kwargs):
        call = StepCall(loss_fn, optimizer, carried, has_aux, is_split, args, kwargs)
        kind = _adapter_for(call)
        try:
            _check_loss_takes(call)
            adapter = kind(call)
            parts = adapter.split()
            state = inner_wrapper_state(parts.opt_state)
        except Exception:
            kind.order(carried).check(args)
            raise
        eager_calls.warn_at_second(parts.params, (args, kwargs), lambda: adapter.jitted)
        with other_order_named(loss_fn, kind.order(carried), args, kwargs):
            parts, report = take_step(adapter, parts, state, args[-1], options)
        return adapter.merge(parts, report)

    if optimizer is not None:  # else the arguments depend on the library
        kind = CarryingTrainStep if carried else PlainTrainStep
        signature = inspect.signature(kind.__call__)
        _, *parameters = signature.parameters.values()  # without self
        step.__signature__ = signature.replace(parameters=parameters)
    return step


def take_step(
    adapter: Adapter,
    parts: Parts,
    state: LossScaledState,
    batch: Any,
    options: Any,
) -> tuple[Parts, StepReport]:
    """The parts of a training state after one step, and the report.

    `state` is that of the one wrapper in them.
    """
    params, overwritten, opt_state, carried = parts
    _refuse_lookahead(params)
    _refuse_empty(params)
    _refuse_average_alone(adapter.optimizer, state)
    optimizer, scaler_state = adapter.optimizer, state.scaler_state
    wrappers = functools.cache(partial(find_wrappers, optimizer, params))
    if options.compute_dtype == jnp.float16 and isinstance(scaler_state, StaticState):
        _warn_of_static_one(wrappers())
    call = _cast(adapter.call, options)

    def loss(params, overwritten, carried, micro_batch):
        number, batch = micro_batch
        kwargs = keys_for(number, adapter.kwargs)
        output = call(params, overwritten, carried, batch, **kwargs)
        _refuse_local_loss(output.loss, params)
        return output.loss, (output.carried, output.aux)

    before = overwritten, carried

    def gradients_of(params, before, batch):
        def grad_fn(carried, part):
            given = read_wide(opt_state, params), carried, part
            shapes, transform = stored_narrow(params), _differentiate
            return differentiate(
                scaler_state, loss, given, {}, 0, True, transform, shapes
            )

        return accumulate(
            grad_fn,
            params,
            before,
            batch,
            micro_batches=options.micro_batches,
            accumulation=options.accumulation,
            drop=options.drop,
            axis_name=_axis_name(wrappers, options),
        )

    of_other_params = other_params_noted(optimizer.init, opt_state, params)
    with noted("follows") as follows, of_other_params:
        accumulated = gradients_of(params, before, batch)
    if not follows:
        warn_of_no_gradient(options.loss_fn, adapter.model)
    extra = {
        "value": accumulated.loss,
        "partial_overflow": accumulated.partial_overflow,
    }
    given_extra = _extra_arguments(options.extra, adapter.model, batch, extra)
    if callable(given_extra.get("value_fn")):  # the loss once more, for a line search
        given_extra["value_fn"] = _cast(given_extra["value_fn"], options)
    grads = accumulated.grads
    extra |= given_extra
    found = unguarded_in(optimizer, wrappers, grads, opt_state, params, **extra)
    if found.by_gradients:
        # A gradient that is constant cannot be NaN; only the program of the loss tells.
        may_be_nan = follow(
            lambda *given: gradients_of(*given).grads, params, before, batch
        )
        _refuse_unguarded([name for name in found.by_gradients if name in may_be_nan])
    _refuse_outside(found.in_a_skip)
    _refuse_kept(found.kept)
    with _missing_extra_named():
        new_params, new_opt_state, report, updates = apply_and_report(
            optimizer, grads, opt_state, params, extra, options.update_norm, wrappers
        )
    if options.learning_rate is not None:
        rates = given_rates(options.learning_rate, opt_state, state)
        report = report._replace(learning_rate=rates)
    norms, sizes = None, None
    if options.local_norm:
        norms, sizes = local_norms(grads)
    report = report._replace(
        local_norm=norms,
        size=sizes,
        dropped=_dropped(accumulated, report, options),
        aux=accumulated.aux,
        update_norm=global_norm(floats_of(updates)) if options.update_norm else None,
    )
    new_overwritten, new_carried = select(~report.skipped, accumulated.carried, before)
    return Parts(new_params, new_overwritten, new_opt_state, new_carried), report


def _cast(fun: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """`fun` under the options of a step."""
    if options.compute_dtype == jnp.float32:
        return fun
    return autocast(fun, options.compute_dtype, keep=options.keep)


def _refuse_unguarded(names: list[str]) -> None:
    """Raises if a step that is skipped would move parameters all the same."""
    if names:
        raise ValueError(
            "the optimizer must be wrapped whole, got a wrapper around a part of it: "
            f"a skipped step would move {listed(quoted(names))}. {WRAP_WHOLE} A part "
            "that must not move is optax.set_to_zero()."
        )


def _refuse_outside(names: list[str]) -> None:
    """Raises if what is outside of the wrapper moves parameters in a skipped step."""
    if names:
        raise ValueError(
            "what moves the parameters must be inside the wrapper, got weight decay, "
            "momentum or the like outside of it: a step that is skipped would move "
            f"{listed(quoted(names))}. Write jls.loss_scaled(optax.chain(inner, ...)), "
            "with all of it in the chain."
        )


def _refuse_kept(names: list[str]) -> None:
    """Raises if what is before the wrapper keeps what it takes out of gradients."""
    if names:
        raise ValueError(
            "what keeps gradients must be inside the wrapper, got momentum, moments or "
            "the like before it: after an inf or NaN in them every step would be "
            f"skipped, for ever, by {listed(quoted(names))} of the state. Write "
            "jls.loss_scaled(optax.chain(...)), with all of it in the chain."
        )


def _refuse_empty(params: Any) -> None:
    if not floats_of(params):
        raise ValueError(
            "the parameters must hold a floating-point array to train, got "
            f"{describe(params)} without one. Pass what the model was initialized "
            "with; of NNX, the nnx.Optimizer needs the wrt= that the model has, such "
            "as nnx.Param."
        )


def _refuse_average_alone(optimizer: Any, state: LossScaledState) -> None:
    """Raises for an average in the place of the optimizer: it adds the gradients."""
    if wrapper_of(optimizer) and isinstance(state.inner_state, ParamsEmaState):
        raise ValueError(
            "the optimizer must make updates, got jls.params_ema alone, which passes "
            "the gradients on. Write jls.loss_scaled(optax.chain(inner, "
            "jls.params_ema(decay)))."
        )


def _refuse_lookahead(params: Any) -> None:
    if isinstance(params, optax.LookaheadParams):
        raise ValueError(
            "params must not be optax.LookaheadParams, whose loss is that of the fast "
            "ones alone. Write loss, grads = jls.value_and_grad(loss_fn)(opt_state, "
            "params.fast, batch), and params, opt_state, report = "
            "jls.apply_gradients(optimizer, grads, opt_state, params, value=loss)."
        )


def _refuse_local_loss(loss: Any, params: Any) -> None:
    """Raises if each device has a loss of its own, and JAX sums its gradients.

    In `shard_map` it does so for parameters that all devices share. It would raise
    later, for the report, and advise to switch off its checks: then devices part.
    """
    axes = varying_axes(loss) if is_array(loss) else frozenset[str]()
    own = [varying_axes(x) for x in floats_of(params)] if axes else []
    axes = sorted(axes - frozenset.intersection(*own)) if own else []
    if axes:
        name = quoted(axes)[0] if len(axes) == 1 else str(tuple(axes))
        name = name.replace("'", '"')
        raise ValueError(
            "loss_fn must return the same loss on all devices of jax.shard_map, where "
            "JAX sums the gradients by itself, got one that varies over "
            f"{listed(quoted(axes))}. Write jax.lax.pmean(loss, {name}) in loss_fn; or "
            "jax.lax.psum, if the losses of the devices add up to the whole."
        )


def _differentiate(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """`jax.value_and_grad`; the "gradient" of what is overwritten is its next value.

    Flax's fp8 layers return new scales and histories in the place of gradients. They
    are not linear in the loss, so they must not be unscaled.
    """
    differentiated = jax.value_and_grad(fun, argnums=(0, 1), has_aux=has_aux)

    def run(params, carried, batch):
        value, (grads, overwritten) = differentiated(params, *carried, batch)
        scaled, (loss, (carried, aux)) = value
        return (scaled, (loss, ((overwritten, carried), aux))), grads

    return run


def _warn_of_static_one(found: list[FoundWrapper]) -> None:
    """Warns of float16 gradients that nothing scales."""
    scalers = [one.wrapper.scaler for one in found]
    scales = [scaler.hyperparameters.get("loss_scale") for scaler in scalers]
    if any(is_real(scale) and scale == 1 for scale in scales):
        warn(
            "compute_dtype is float16 and the loss scale is static and 1, so small "
            "gradients become 0. Write jls.loss_scaled(inner, jls.dynamic()), or "
            "compute_dtype=jnp.bfloat16, which needs no scale."
        )


def _check_extra(extra: Extra) -> Extra:
    if extra is None or callable(extra) or isinstance(extra, Mapping):
        return extra
    raise TypeError(
        "extra must be a dict of arguments for the optimizer's update, or a function "
        f"of the parameters and the batch that returns one, got {describe(extra)}."
    )


def _extra_arguments(
    extra: Extra, model: Any, batch: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    arguments = extra(model, batch) if callable(extra) else extra or {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"extra must return a dict, got {describe(arguments)}.")
    by_step = {*given, "grad", "updates", "grads", "state", "params"}
    taken = arguments.keys() & by_step
    if taken:
        raise ValueError(
            f"extra must not hold {' and '.join(sorted(taken))}, which the step passes "
            "by itself."
        )
    return dict(arguments)


@contextlib.contextmanager
def _missing_extra_named() -> Iterator[None]:
    """Says what cures an optimizer that wants an argument, or does not take one."""
    try:
        yield
    except TypeError as error:
        if "required keyword-only argument" in str(error):
            error.add_note(
                "What an optimizer takes beside gradients, state and parameters goes "
                "into extra=: jls.train_step(loss_fn, optimizer, extra=lambda params, "
                'batch: {"value_fn": lambda p: loss_fn(p, batch)}).'
            )
        if "unexpected keyword argument 'value'" in str(error):
            error.add_note(
                "The wrapper needs the loss, and what is around it does not hand it "
                "on. Put it inside: jls.loss_scaled(optax.contrib.sam(...))."
            )
        raise


def _axis_name(wrappers: Callable[[], list[FoundWrapper]], options: Any) -> Any:
    """The axis over which all devices must leave out the same micro-batches."""
    if options.drop == "step" or options.micro_batches == 1:
        return None
    found = wrappers()
    return found[0].wrapper.axis_name if found else None


def _dropped(accumulated: Accumulated, report: StepReport, options: Any) -> Any:
    if options.drop == "step" or options.micro_batches > 1:
        return accumulated.dropped
    # The one micro-batch is the step.
    reasons = jnp.array([SkipReason.GRADIENTS, SkipReason.LOSS], jnp.int32)
    return jnp.any(report.skip_reason == reasons).astype(jnp.int32)


def _adapter_for(call: StepCall) -> type[Adapter]:
    """The adapter for what the step was called with."""
    args, optimizer, has_carried = call.args, call.optimizer, call.has_carried
    if args and args[0] is call.loss_fn:
        raise TypeError(
            "loss_fn must be a function of the model that returns the loss, got the "
            f"model itself, {type(args[0]).__name__}. Write def loss_fn(model, batch)."
        )
    flax: list[type[Adapter]] = [NnxAdapter, LinenAdapter]
    of_flax = [kind for kind in flax if kind.takes(call)]
    kinds = flax if optimizer is None else [PlainAdapter]
    for kind in kinds if optimizer is None or not of_flax else []:
        if kind.takes(call):
            return kind
        kind.order(has_carried).check(args)
    got = ", ".join(map(describe, args)) or "no positional argument"
    if optimizer is None:
        form = (
            "call step(state, batch) with a Flax TrainState, or "
            "step(model, optimizer, batch) with an NNX model and its nnx.Optimizer. "
            "For step(params, opt_state, batch), pass the optimizer: "
            "jls.train_step(loss_fn, optimizer)"
        )
    elif of_flax:
        form = (
            "leave optimizer out for Flax, whose TrainState and nnx.Optimizer hold it: "
            "jls.train_step(loss_fn)"
        )
    else:
        form = f"call step({', '.join(PlainAdapter.order(has_carried).names)})"
    raise TypeError(f"{form}; got {got}. {_BATCH}")


def _check_loss_takes(call: StepCall) -> None:
    """Raises unless `loss_fn` can be called as the step calls it."""
    signature = _validate.signature_of(call.loss_fn)
    count = 2 + (call.has_carried and call.optimizer is not None)
    if signature is None:
        return
    try:
        signature.bind(*range(count), **call.kwargs)
    except TypeError as error:
        names = ["params or state", *(["carried"] if count == 3 else []), "batch"]
        given = ", ".join([*names, *(f"{name}={name}" for name in call.kwargs)])
        raise TypeError(
            f"loss_fn is called as loss_fn({given}), got one that takes {signature}: "
            f"{error}. {_BATCH}"
        ) from None


_BATCH = (
    "A batch is one argument: (x, y), or a dict; all else goes by keyword, such as "
    "rngs=rngs."
)
