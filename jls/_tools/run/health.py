# SPDX-License-Identifier: Apache-2.0
"""`jls.health`: a verdict on a run from its counters, in words."""

import itertools
import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jls import _validate
from jls._metrics import strict
from jls._nnx import is_model, is_optimizer, read_variables, split_model
from jls._scalers.rule import bounds_of, scalar
from jls._scalers.static import is_static
from jls._state import Run, find, is_wrapper_state, run_in
from jls._step import FoundWrapper, find_wrappers, sums_squares, wrapper_of
from jls._text import an, at, listed, naming_arguments, no_field, wrapped
from jls._tools.run.poison import find_poison, suspects_in
from jls._tools.run.small import measure_small
from jls._tools.run.verdict import VERDICTS, Facts, Verdict, ask_for_half, diagnose
from jls._train_state import FP8, carried_by, optimizer_in, without_fp8
from jls._tree import check_holds, is_array, is_inexact, named_floats
from jls._types import (
    SIGNALS,
    Bfloat16ParamsState,
    JlsWarning,
    LossScaledState,
    LossScaler,
    SkipReason,
    SpikeState,
    StaticState,
    StepReport,
    skip_reason_of,
    wrapper_metrics,
)


class Health(NamedTuple):
    """Result of `jls.health`: a verdict, a sentence, and the numbers behind them.

    `print` it to read it, in lines of at most 80 columns. The sentence is one line, for
    logs. It is true if the verdict is "ok".

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.health(state).verdict
      'no step'
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    verdict: Verdict
    sentence: str
    numbers: dict[str, Any]
    # The call of `jls.check_step` that shows how much of the step is in half precision;
    # "" under a static scale, and for a run that is ok after 1000 steps.
    ask: str = ""

    @property
    def safe_to_save(self) -> bool:
        """Whether a checkpoint may replace an older one.

        False if the run is stalled, has a bad scale, or is poisoned: it will not
        recover by itself, and you may need the older checkpoint. Poison is found only
        in what was checked: see `numbers["poisoned_leaves"]`.
        """
        return self.verdict not in ("poisoned", "bad scale", "stalled")

    def __bool__(self) -> bool:
        return self.verdict == "ok"

    def __str__(self) -> str:
        """Verdict and sentence, in lines of at most 80 columns."""
        lines = wrapped(f"{self.verdict}: {self.sentence}")
        return "\n".join([*lines, self.ask] if self.ask else lines)


class UnhealthyError(RuntimeError):
    """Raised by `jls.health` for a verdict in `raise_if`; `health` has the verdict.

    Example:
      >>> issubclass(jls.UnhealthyError, RuntimeError)
      True
    """

    def __init__(self, health: Health) -> None:
        super().__init__(str(health))
        self.health = health


@naming_arguments()
def health(
    state: Any,
    params: Any = None,
    *,
    grads: Any = None,
    optimizer: Any = None,
    carried: Any = None,
    max_consecutive_skips: int = 50,
    max_small: float = 0.1,
    dtype: DTypeLike = jnp.float16,
    raise_if: Iterable[Verdict] = (),
    warn_if: Iterable[Verdict] = (),
) -> Health:
    """Returns a verdict on the run, in words; on the host, with small transfers.

    Call it every so many steps, and before you keep a checkpoint. It waits for the step
    that made `state`.

    Args:
      state: anything that carries one state of `jls.loss_scaled`, also with an axis of
        devices that all agree, as `jax.pmap` keeps it. All fields of a Flax
        `TrainState` are checked: `params` as such, the others as carried.
      params: the parameters, to see whether an inf or NaN is in them or in the
        optimizer's state, where an inf counts in arrays of the shape of a parameter:
        optimizers keep an inf in scalars on purpose, such as the best loss so far. Or
        an NNX model, whose parameters are then what the optimizer updates (its `wrt`;
        `nnx.Param` if no `nnx.Optimizer` is given), and whose other variables count as
        carried. One pass over them on the device; None checks nothing, unless `state`
        is a `TrainState`. If several processes share the arrays, every process has to
        make the call.
      grads: unscaled gradients of a recent step, to see whether they are too small for
        the loss scale. Two passes over them on the device; None checks nothing. Here
        too every process has to make the call.
      optimizer: what `jls.loss_scaled` returned, which knows the bounds of the scale;
        or an optimizer that has it inside, such as an `optax.chain`, for which `params`
        are needed; or an `nnx.Optimizer`. None takes it from `state` if that is a
        `TrainState` or an `nnx.Optimizer`. Without it, health does not know the bounds,
        and never says "at floor" or "at ceiling".
      carried: what else goes from step to step, such as batch statistics or an average
        of the parameters, to see whether an inf or NaN is in it: any pytree. An inf in
        a scalar does not count. One pass over it; None checks only what `state` and
        `params` carry themselves: fields of a `TrainState`, variables of an NNX model.
      max_consecutive_skips: >= 1, the largest number of steps skipped in a row that is
        tolerated.
      max_small: the tolerated share, in [0, 1], of nonzero gradients that are below the
        smallest normal number of `dtype` once scaled.
      dtype: the dtype of the backward pass, for `grads`: floating point, of 8 to 32
        bits.
      raise_if: verdicts for which to raise.
      warn_if: verdicts for which to warn.

    Of the first 100 steps "ok" says if five or more were skipped only because the loss
    scale started too high, if `optimizer` is known.

    A parameter or carried array may hold -inf as a mask, and so may an average of it.
    It is taken for one if some of its elements are finite, all of its others are -inf,
    the moments are finite and steps are still applied; the sentence then names it.

    Returns:
      A `jls.types.Health`: `verdict` is one of "ok", "no step", "calibrating",
      "recovering", "skipping", "dropping", "spike", "spiking", "at floor", "at
      ceiling", "underflow", "non-finite loss", "non-finite update", "rounded away",
      "bad scale", "stalled" and "poisoned"; `sentence` says what is the case, and where
      to read what to do, on one line; its `str` has lines of at most 80 columns, and
      under a dynamic scale ends with `ask`, the `jls.check_step` call that shows how
      much of the step is half, unless the run is ok after 1000 steps.
      `numbers` holds what `jls.metrics(state, host=True)` returns (`last_skip_reason`
      as a `jls.types.SkipReason`), whether the scale `is_static`, and its bounds, which
      are None if they are not known; whether the run is `poisoned`, None if nothing was
      looked at; the `poisoned_leaves`, names in lists by the tree that they are in,
      with a list for each tree that was looked at ("params", "opt_state", "carried");
      the `masks`, their numbers of elements that are -inf by name; with `params`, also
      the names of the `nonfinite_leaves` of the last step skipped for inf or NaN, None
      if the optimizer is for a part of `params` and was not given; with `grads`, also
      the share of `small` gradients in `dtype`, and whether they are `all_zero`; under
      `jls.spikes` or a preset like it, also its `window`, the `tokens` that are left,
      the `steady_share` of spikes let through that noise alone stays below, and
      `loss_given` and `loss_never_given`, both false while nothing is known.

    Raises:
      UnhealthyError: if the verdict is in `raise_if`.
      TypeError: if `params` holds no floating-point array, such as the optimizer, or
        `grads` none, or `carried` no array; if `optimizer` was not made by jls, or has
        the wrapper inside and `params` is None; if `max_consecutive_skips` is not an
        integer, `max_small` not a number known to Python, `dtype` not floating point,
        or `raise_if` or `warn_if` not iterable.
      ValueError: if `state` carries no such state, or several, such as those of the
        members of a `jax.vmap`, or one inside an `optax.MultiSteps`; if an array is
        traced, or was donated to an earlier step; if `optimizer` is of another kind
        than the one that made it, if `params` has fewer leaves than the state knows, or
        other shapes than the moments of Adam or of a momentum; if a name in `raise_if`
        or `warn_if` is not a verdict, or a number is out of range.

    Warns:
      JlsWarning: if the verdict is in `warn_if`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
      >>> state = optimizer.init(params)
      >>> grads = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(1)}
      >>> for _ in range(3):
      ...     _, state = optimizer.update(grads, state, params)
      >>> print(jls.health(state, params, optimizer=optimizer))
      calibrating: all 3 steps so far were skipped while the loss scale comes down, to
      128 now. That is normal for the first ten or so. print(jls.calibrate(step,
      params, opt_state, batch)) says where to start: then no batch is lost. Not
      finite: w. What to do: docs/questions/healthy_run.md#calibrating.
      Half precision? print(jls.check_step(step, params, opt_state, batch))
    """
    raise_if = _check_verdicts("raise_if", raise_if)
    warn_if = _check_verdicts("warn_if", warn_if)
    limit = _validate.host_interval("max_consecutive_skips", max_consecutive_skips)
    max_small = _validate.host_number("max_small", max_small, "from 0 to 1", 0.0, 1.0)
    dtype = _validate.float_dtype("dtype", dtype)
    run = _run_in(state, params)
    _check_params(params)
    if grads is not None:
        check_holds("grads", grads, is_inexact, "floating-point arrays")
    if carried is not None:
        check_holds("carried", carried, is_array, "arrays")
    for name, tree in {"params": params, "grads": grads, "carried": carried}.items():
        _validate.concrete(name, tree)
    subject = _gather(state, run.state, params, carried, optimizer)
    if subject.params is not None:
        _check_shapes(subject.params, run.inner_state)
    inner_state = None if subject.params is None else run.inner_state
    suspects = suspects_in(subject.params, inner_state, subject.others)
    on_device = {
        "counts": {"loss_scale": run.loss_scale} | wrapper_metrics(run.state),
        "leaves": run.state.nonfinite_leaves,
        "bad": {tree: found.flags for tree, found in suspects.items()},
        "small": {} if grads is None else measure_small(run.loss_scale, grads, dtype),
        "policy": _observe_spikes(run.state.spike_state),
    }
    on_host = jax.tree.map(lambda x: np.asarray(x).tolist(), jax.device_get(on_device))
    counts, small, policy = (on_host[name] for name in ("counts", "small", "policy"))
    counts["last_skip_reason"] = skip_reason_of(counts["last_skip_reason"])
    steps, skipped = counts["steps"], counts["consecutive_skips"]
    flags = on_host["bad"]
    flagged = {x: [*itertools.compress(suspects[x].named, flags[x])] for x in suspects}
    poisoned, masks, is_doubted = find_poison(flagged, steps, skipped)
    known = _describe_scale(subject, run.state.scaler_state, counts["loss_scale"])
    known |= {"poisoned_leaves": poisoned, "masks": masks}
    names, unnamed = _name_leaves(subject, on_host["leaves"])
    if grads is not None:
        small["dtype"] = dtype.name
    # Only if the last step was skipped for its gradients does it matter.
    was_bad = skipped > 0 and counts["last_skip_reason"] == SkipReason.GRADIENTS
    sums = was_bad and _sums_squares(subject, run.inner_state)
    facts = Facts(
        **counts,
        **small,
        **policy,
        **known,
        nonfinite_leaves=names,
        all_leaves_finite=bool(on_host["leaves"]) and not any(on_host["leaves"]),
        unnamed_leaves=unnamed,
        strays=_strays(run.inner_state),
        is_doubted=is_doubted,
        saw_params=subject.params is not None or subject.is_train_state,
        is_train_state=subject.is_train_state,
        is_nnx=subject.is_nnx,
        sums_squares=sums,
        scaler=_scaler_numbers(subject),
        max_consecutive_skips=limit,
        max_small=max_small,
    )
    if subject.params is not None:
        known["nonfinite_leaves"] = names
    known["poisoned"] = facts.poisoned if poisoned else None
    numbers = strict(counts | known | small | policy)
    verdict, sentence = diagnose(facts)
    result = Health(verdict, sentence, numbers, ask_for_half(facts, verdict))
    if result.verdict in raise_if:
        raise UnhealthyError(result)
    if result.verdict in warn_if:
        warnings.warn(str(result), JlsWarning, stacklevel=2)
    return result


def _check_params(params: Any) -> None:
    write = _ORDER
    if isinstance(params, StepReport):
        raise TypeError(f"params must be the parameters, got StepReport. {_ORDER}")
    if (hasattr(params, "update") and hasattr(params, "init")) or is_optimizer(params):
        write = (
            "The optimizer goes by keyword: "
            "jls.health(opt_state, params, optimizer=optimizer)."
        )
    elif params is None or is_model(params):
        return

    def is_held(leaf):
        return is_inexact(leaf) and not is_optimizer(params)

    check_holds("params", params, is_held, "floating-point arrays", write)


# What the verdict is on.


class _Subject(NamedTuple):
    """What a verdict is on."""

    params: Any  # None if they are not looked at
    others: list[Any]  # what else goes from step to step
    found: FoundWrapper | None  # the optimizer's wrapper, if it is known
    is_train_state: bool
    is_nnx: bool


def _run_in(state: Any, params: Any) -> Run:
    try:
        return run_in(state)
    except ValueError:
        if find(params, is_wrapper_state) and not find(state, is_wrapper_state):
            raise ValueError(
                "state must come first, got the parameters before it. The order is "
                "jls.health(opt_state, params), of NNX jls.health(optimizer, model)."
            ) from None
        raise


def _gather(
    state: Any,
    wrapper_state: LossScaledState,
    params: Any,
    carried: Any,
    optimizer: Any,
) -> _Subject:
    """What is given, and what `state` carries beside the optimizer's own."""
    held = carried_by(state)
    if held.params is not None and params is not None:
        _check_same(params, held.params)
    others = [] if carried is None else [carried]
    is_nnx = held.is_nnx or is_model(params)
    if is_model(params):
        _, params, variables = split_model(params, state, optimizer)
        others.append(variables)
    params = held.params if params is None else params
    params, overwritten = without_fp8(params)
    if overwritten is not None:
        others.append({FP8: overwritten})
    if held.others:
        others.append(dict(held.others))
    found = _wrapper_in(optimizer, held.optimizer, params, wrapper_state)
    is_train_state = held.params is not None or bool(held.others)
    return _Subject(params, others, found, is_train_state, is_nnx)


def _sums_squares(subject: _Subject, inner_state: Any) -> bool:
    """Whether a sum of squares of the gradients decides about a step, if known."""
    if not subject.found:
        return False
    wrapper, inner_state = subject.found.wrapper, read_variables(inner_state)
    return sums_squares(wrapper, subject.params, inner_state)


def _name_leaves(
    subject: _Subject, flags: list[bool]
) -> tuple[list[str] | None, tuple[int, int] | None]:
    """The leaves of the last skipped step that were not finite.

    Their names, None if they are not known; and how many, of how many, if only that is.
    """
    params, found = subject.params, subject.found
    if params is None:
        return None, None
    names = found.names if found else named_floats(params)[0]
    if names and len(flags) < len(names):  # it is around a part of them
        return None, None if found else (sum(flags), len(flags))
    if len(flags) != max(len(names), 1):  # without a leaf there is one all the same
        raise ValueError(
            "params must be the parameters that the optimizer was initialized with: "
            f"got {len(names)} floating-point leaves, the state knows {len(flags)}. "
            "Pass all of them. If the model has changed since, its optimizer needs a "
            "new optimizer.init(params)."
        )
    return [name for name, is_bad in zip(names, flags, strict=False) if is_bad], None


def _check_shapes(params: Any, inner_state: Any) -> None:
    """Raises if no parameter has the shape of a moment, of which each should have one.

    An optimizer may keep flat moments, or smaller ones of large matrices.
    """
    kinds = {optax.ScaleByAdamState: "mu", optax.TraceState: "trace"}
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda x: type(x) in kinds)
    names, leaves = named_floats(params)
    shapes = list(map(jnp.shape, leaves))
    moments = [getattr(x, kinds[type(x)]) for x in nodes if type(x) in kinds]
    of_each = [list(map(jnp.shape, jax.tree.leaves(x))) for x in moments]
    of_all = list(itertools.chain(*of_each))
    fitting = [x for x in of_each if len(x) == len(shapes)]
    if not fitting and 1 < len(of_all) < len(shapes):  # for a part of the parameters
        fitting = [of_all]
    for known in fitting:
        without_axis = [x[1:] for x in known]  # of `jax.pmap`
        is_other = {*shapes}.isdisjoint([*known, *without_axis])
        if is_other and sum(map(math.prod, shapes)) != sum(map(math.prod, known)):
            raise ValueError(
                "params must be those that the optimizer was initialized with, got "
                f"shape {shapes[0]}{at(names[0])}, where its moments have {known[0]}. "
                f"{_ORDER}"
            )


_OFTEN = 10


def _strays(inner_state: Any) -> bool:
    """Whether what was made of bfloat16 parameters never reaches them.

    Not of those that do not move at all, which may be frozen. Looks at the part of this
    process.
    """

    def is_one(node):
        return isinstance(node, Bfloat16ParamsState)

    for node in filter(is_one, jax.tree.leaves(inner_state, is_leaf=is_one)):
        shards = jnp.asarray(read_variables(node.strayed)).addressable_shards
        parts = [x.data for x in shards if x.data.size]
        least = min((int(jnp.min(x)) for x in parts), default=0)
        most = max((int(jnp.max(x)) for x in parts), default=0)
        if least >= 0 and most > _OFTEN:
            return True
    return False


def _check_same(params: Any, held: Any) -> None:
    """Raises if a `TrainState` comes with parameters that cannot be its own."""
    given, own = (
        sorted(map(jnp.shape, named_floats(tree)[1])) for tree in (params, held)
    )
    if given not in (own, sorted(x[1:] for x in own)):  # of `jax.pmap`
        raise ValueError(
            "params must be those of the TrainState, or left out, got others: their "
            f"shapes are {listed(list(map(str, given)))}, its own "
            f"{listed(list(map(str, own)))}. Write jls.health(state)."
        )


_ORDER = "The order is jls.health(opt_state, params); None does not look."


# Spikes.


def _observe_spikes(state: Any) -> dict[str, Any]:
    """The facts of a spike policy of jls; none of others."""
    if not isinstance(state, SpikeState):
        return {}
    losses, norms = (state.kept[SIGNALS.index(name)] for name in ("loss", "norm"))
    # One that is too large for float32 is judged, but does not enter the window.
    given = (losses > 0) | (state.value[SIGNALS.index("loss")] != 0)
    judges_by_window = state.seen.shape[1] > 1
    return {
        "tokens": state.tokens,
        "steady_share": state.steady_share,
        "loss_never_given": ~given & (norms > 0) & judges_by_window,
        "loss_given": given,
        "window": np.int32(state.seen.shape[1]),
    }


# The scale.


def _wrapper_in(
    optimizer: Any, held: Any, params: Any, wrapper_state: LossScaledState
) -> FoundWrapper | None:
    """The wrapper of the optimizer, or of the one `held` by a Flax state."""
    if isinstance(optimizer, LossScaler):
        raise TypeError(
            "optimizer must be what jls.loss_scaled returned, got its scaler. Write "
            "optimizer = jls.loss_scaled(inner, scaler), and pass that."
        )
    if optimizer is None:
        found = _wrappers_in(held, params)
        return found[0] if len(found) == 1 else None
    found = _wrappers_in(optimizer_in(optimizer) or optimizer, params)
    if not found:
        further_inside = (
            " If the wrapper is further inside, e.g. in an optax.chain, pass the "
            "parameters too: jls.health(opt_state, params, optimizer=optimizer)."
        )
        raise TypeError(
            "optimizer must be what jls.loss_scaled or jls.skip_nonfinite returned, or "
            f"have it inside, got {type(optimizer).__name__}."
            f"{further_inside if params is None else ''}"
        )
    structure = jax.tree.structure(wrapper_state.scaler_state)
    fitting = [one for one in found if one.wrapper.scaler_structure == structure]
    if not fitting:
        ours = jax.eval_shape(found[0].wrapper.scaler.init)
        states = ours, wrapper_state.scaler_state
        names = " and state carries ".join(an(type(x).__name__) for x in states)
        raise ValueError(
            f"optimizer must be the one that made state: its scaler makes {names}. "
            "Pass the optimizer that state comes from."
        )
    if len(fitting) > 1:  # each for a part of the parameters
        size = wrapper_state.nonfinite_leaves.size
        fitting = [one for one in fitting if len(one.names) == size]
    if len(fitting) != 1:
        raise ValueError(
            "optimizer must have one wrapper that may have made state, got "
            f"{len(fitting)}. Pass the one that did, and its part of params."
        )
    return fitting[0]


def _wrappers_in(optimizer: Any, params: Any) -> list[FoundWrapper]:
    """The wrappers in `optimizer`; without `params` only an outermost one is found."""
    if wrapper_of(optimizer):
        return find_wrappers(optimizer, params)
    can_look = callable(getattr(optimizer, "init", None)) and params is not None
    return find_wrappers(optimizer, params) if can_look else []


def _describe_scale(
    subject: _Subject, scaler_state: Any, loss_scale: float
) -> dict[str, Any]:
    """Whether the scale can never move, and its bounds; None if they are not known."""
    scaler = subject.found.wrapper.scaler if subject.found else None
    static = is_static(scaler) if scaler else isinstance(scaler_state, StaticState)
    bounds = (loss_scale, loss_scale) if static else scaler and bounds_of(scaler)
    low, high = bounds or (None, None)
    static = static or (low is not None and low == high)
    return {"is_static": static, "min_scale": low, "max_scale": high}


_OF_SCALER = "init_scale", "backoff_factor", "backoff_interval", "growth_interval"


def _scaler_numbers(subject: _Subject) -> dict[str, float | None]:
    """What is known of the scaler, if the optimizer is."""
    if subject.found is None:
        return {}
    known = subject.found.wrapper.scaler.hyperparameters
    return {name: scalar(known, name) for name in _OF_SCALER}


def _check_verdicts(name: str, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    rule = f"{name} must be verdicts out of {VERDICTS}, got {verdicts!r}."
    try:
        names = tuple(verdicts)  # an iterator can be asked only once
    except TypeError:
        raise TypeError(rule) from None
    if isinstance(verdicts, str):
        raise ValueError(f"{rule} Write {name}=[{verdicts!r}].")
    if not all(isinstance(x, str) and x in VERDICTS for x in names):
        raise ValueError(rule)
    return names
