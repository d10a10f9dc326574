# SPDX-License-Identifier: Apache-2.0
"""What a run's counters mean, in words, for a person at the host."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array

from jls import _validate
from jls._bits import edges
from jls._nnx import is_model, is_optimizer, split_model
from jls._reduce import any_nan, finite_leaves
from jls._report.nonfinite import select_names
from jls._report.underflow import measure_small
from jls._report.verdict import (
    VERDICTS,
    Facts,
    Limits,
    PolicyFacts,
    Small,
    Verdict,
    judge,
)
from jls._scalers.static import is_static
from jls._state import (
    concrete_wrapper_state_in,
    metrics,
    optimizer_in,
    refuse_multi_steps_around,
)
from jls._step import Reached, reach_wrappers, wrapper_of
from jls._tree import is_array, named_floats
from jls._types import (
    SIGNALS,
    JlsWarning,
    LossScaledState,
    LossScaler,
    SkipReason,
    SpikeState,
    StaticState,
)


class Health(NamedTuple):
    """What `jls.health` says: a verdict, a sentence, and the numbers behind them.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.health(state).verdict
      'no step'
    """

    verdict: Verdict
    sentence: str
    numbers: dict[str, Any]

    @property
    def safe_to_save(self) -> bool:
        """Whether a checkpoint may replace an older one.

        False if the run is stalled, has a bad scale, or is poisoned, which shows only
        if `params` or `carried` was given: it will not get better by itself, and you
        may need the older checkpoint.
        """
        return self.verdict not in ("poisoned", "bad scale", "stalled")

    def __str__(self) -> str:
        return f"{self.verdict}: {self.sentence}"


class UnhealthyError(RuntimeError):
    """Raised by `jls.health` for a verdict in `raise_if`; `health` has the verdict.

    Example:
      >>> issubclass(jls.UnhealthyError, RuntimeError)
      True
    """

    def __init__(self, health: Health) -> None:
        super().__init__(str(health))
        self.health = health


def health(
    state: Any,
    params: Any = None,
    *,
    grads: Any = None,
    optimizer: Any = None,
    carried: Any = None,
    max_consecutive_skips: int = 50,
    max_small: float = 0.1,
    dtype: Any = jnp.float16,
    raise_if: Iterable[Verdict] = (),
    warn_if: Iterable[Verdict] = (),
) -> Health:
    """Returns a verdict on the run, in words; on the host, with one small transfer.

    Call it every so many steps, and before you keep a checkpoint. It waits for the step
    that made `state`.

    Args:
      state: anything that carries one state of `jls.loss_scaled`.
      params: the parameters, to see whether an inf or NaN is in them or in the
        optimizer's state, where an inf counts in arrays of the shape of a parameter:
        optimizers keep an inf in scalars on purpose, such as the best loss so far. Or
        an NNX model, whose parameters are then what the optimizer updates (its `wrt`;
        `nnx.Param` if no `nnx.Optimizer` is given), and whose other variables count as
        carried. One pass over them on the device; None does not look. If several
        processes share the arrays, every process has to make the call.
      grads: true gradients of a recent step, to see whether they are too small for the
        loss scale. Two passes over them on the device; None does not look. Every
        process has to make the call here too.
      optimizer: what `jls.loss_scaled` returned, which knows the bounds of the scale;
        or an optimizer that has it inside, such as an `optax.chain`, for which `params`
        are needed; or an `nnx.Optimizer`. None takes it from `state` if that is a
        `TrainState` or an `nnx.Optimizer`. Without it, health does not know the bounds,
        and never says "at floor" or "at ceiling".
      carried: what else goes from step to step, such as batch statistics or an average
        of the parameters, to see whether an inf or NaN is in it: any pytree. An inf in
        a scalar does not count. One pass over it; None does not look.
      max_consecutive_skips: >= 1, how many steps skipped in a row are too many.
      max_small: the tolerated share, in [0, 1], of nonzero gradients that are below the
        smallest normal number of `dtype` once scaled.
      dtype: the dtype of the backward pass, for `grads`: floating point, of 8 to 32
        bits.
      raise_if: verdicts for which to raise.
      warn_if: verdicts for which to warn.

    Returns:
      A `jls.types.Health`: `verdict` is one of "ok", "no step", "calibrating",
      "recovering", "spike", "spiking", "at floor", "at ceiling", "underflow",
      "non-finite loss", "non-finite update", "bad scale", "stalled" and "poisoned";
      `sentence` says what it means and what to do; `numbers` holds what
      `jls.host_metrics` returns (`last_skip_reason` as a `jls.types.SkipReason`),
      whether the scale `is_static`, and its bounds, which are None if they are not
      known; with `params` or `carried`, also whether the run is `poisoned` and the
      `poisoned_leaves`, names in lists by the tree that they are in ("params",
      "opt_state", "carried"); with `params`, also the names of the `nonfinite_leaves`
      that caused the last skip; with `grads`, also the share of `small` gradients in
      `dtype`, whether they are `all_zero`, and the `suggested_scale`; under
      `jls.spikes` or a preset like it, also the `tokens` that are left, the
      `steady_share` of spikes that no steady run exceeds, and whether the loss was
      never given.

    Raises:
      UnhealthyError: if the verdict is in `raise_if`.
      TypeError: if `optimizer` was not made by jls, or has the wrapper inside and
        `params` is None; if `max_consecutive_skips` is not an integer, `max_small` not
        a number known to Python, `dtype` not floating point, or `raise_if` or `warn_if`
        not a sequence.
      ValueError: if `state` carries no such state, or several, or one inside an
        `optax.MultiSteps`, if an array is traced, if `optimizer` is of another kind
        than the one that made it, if `params` has another number of leaves, if a name
        in `raise_if` or `warn_if` is not a verdict, or a number is out of range.

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
      128 now. That is normal for the first ten or so. Not finite: w.
    """
    raise_if = _check_verdicts("raise_if", raise_if)
    warn_if = _check_verdicts("warn_if", warn_if)
    limit = _validate.host_interval("max_consecutive_skips", max_consecutive_skips)
    max_small = _validate.host_number("max_small", max_small, "from 0 to 1", 0.0, 1.0)
    edges(dtype)  # or an error, with and without `grads`
    wrapper = concrete_wrapper_state_in(state)
    refuse_multi_steps_around(state)
    for name, tree in {"params": params, "grads": grads, "carried": carried}.items():
        _validate.concrete(name, tree)
    is_nnx = is_optimizer(state) or is_model(params)
    if is_model(params):
        _, params, others = split_model(params, state, optimizer)
        carried = others if carried is None else (carried, others)
    reached = _reached_in(optimizer, state, params, wrapper)
    scaler = reached.wrapper.scaler if reached else None

    watched = _watch(params, wrapper.inner_state, carried)
    on_device = {
        "metrics": metrics(wrapper),
        "leaves": wrapper.nonfinite_leaves,
        "bad": {tree: flags for tree, (_, flags) in watched.items()},
        "small": {} if grads is None else measure_small(wrapper, grads, dtype),
        "policy": _observe_spikes(wrapper.spike_state),
    }
    seen = jax.tree.map(lambda x: x.tolist(), jax.device_get(on_device))
    counts, flags, small, policy = (
        seen[name] for name in ("metrics", "leaves", "small", "policy")
    )
    counts["last_skip_reason"] = SkipReason(counts["last_skip_reason"])
    known = _describe_scale(scaler, wrapper, counts["loss_scale"])
    if watched:
        known["poisoned_leaves"] = {
            tree: list(itertools.compress(names, seen["bad"][tree]))
            for tree, (names, _) in watched.items()
        }
    if params is not None:
        names = reached.names if reached else named_floats(params)[0]
        known["nonfinite_leaves"] = select_names(names, flags)
    if grads is not None:
        small["dtype"] = jnp.dtype(dtype).name

    facts = Facts(
        metrics=counts,
        all_leaves_nonfinite=all(flags),
        is_nnx=is_nnx,
        small=Small(**small) if small else None,
        policy=PolicyFacts(**policy) if policy else None,
        **known,
    )
    if watched:
        known["poisoned"] = facts.poisoned
    numbers = counts | known | small | policy
    result = Health(*judge(facts, Limits(limit, max_small)), numbers)
    if result.verdict in raise_if:
        raise UnhealthyError(result)
    if result.verdict in warn_if:
        warnings.warn(str(result), JlsWarning, stacklevel=2)
    return result


# Poison.


def _watch(
    params: Any, inner_state: Any, carried: Any
) -> dict[str, tuple[list[str], Array]]:
    """By tree: the names of its leaves, and which of them are poisoned, `bool[n]`."""
    watched = {}
    if params is not None:
        # All optimizers of optax that keep an inf on purpose keep it in a scalar.
        shapes = {jnp.shape(leaf) for leaf in named_floats(params)[1]} - {()}
        watched["params"] = _flag(params, lambda _: False)
        watched["opt_state"] = _flag(
            inner_state, lambda leaf: jnp.shape(leaf) not in shapes
        )
    if carried is not None:
        # A scalar may be the best loss so far, which starts at inf.
        watched["carried"] = _flag(carried, lambda leaf: jnp.ndim(leaf) == 0)
    return watched


def _flag(tree: Any, may_be_inf: Callable[[Any], bool]) -> tuple[list[str], Array]:
    """The names of the leaves of a tree, and which of them are poisoned."""
    finite, others = {}, {}
    for name, leaf in zip(*named_floats(tree), strict=True):
        (others if may_be_inf(leaf) else finite)[name] = leaf
    flags = _poisoned([*finite.values()], [*others.values()])
    return [*finite, *others], flags


@jax.jit
def _poisoned(leaves: list[Any], may_be_inf: list[Any]) -> Array:
    """`bool[n]`, whether each holds a NaN, or an inf unless it may."""
    is_nan = [any_nan([leaf]) for leaf in may_be_inf]
    return jnp.concatenate([~finite_leaves(leaves), jnp.array(is_nan, jnp.bool_)])


# Spikes.


def _observe_spikes(state: Any) -> dict[str, Any]:
    """What a policy of jls knows; nothing is claimed of others."""
    if not isinstance(state, SpikeState):
        return {}
    losses, norms = (state.kept[SIGNALS.index(name)] for name in ("loss", "norm"))
    judges_by_window = state.seen.shape[1] > 1
    return {
        "tokens": state.tokens,
        "steady_share": state.steady_share,
        "loss_never_given": (losses == 0) & (norms > 0) & judges_by_window,
    }


# The scale.


def _reached_in(
    optimizer: Any, state: Any, params: Any, wrapper_state: LossScaledState
) -> Reached | None:
    """The wrapper of the optimizer, or of the one that a Flax state carries."""
    params = getattr(state, "params", None) if params is None else params
    if optimizer is None:
        reached = _reach(optimizer_in(state), params)
        return reached[0] if len(reached) == 1 else None
    reached = _reach(optimizer_in(optimizer) or optimizer, params)
    if not reached:
        further_inside = (
            " If the wrapper is further inside, e.g. in an optax.chain, pass the "
            "parameters too: jls.health(opt_state, params, optimizer=optimizer)."
        )
        raise TypeError(
            "optimizer must be what jls.loss_scaled or jls.skip_nonfinite returned, or "
            f"have it inside, got {type(optimizer).__name__}."
            f"{further_inside if params is None else ''}"
        )
    made = jax.tree.structure(wrapper_state.scaler_state)
    fitting = [one for one in reached if one.wrapper.scaler_structure == made]
    if not fitting:
        raise ValueError(
            "optimizer must be the one that made state: its scaler's states are "
            f"{reached[0].wrapper.scaler_structure}, and state carries {made}."
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


def _reach(optimizer: Any, params: Any) -> list[Reached]:
    """The wrappers in `optimizer`; without `params` only an outermost one is found."""
    if wrapper_of(optimizer):
        return reach_wrappers(optimizer, params)
    can_look = callable(getattr(optimizer, "init", None)) and params is not None
    return reach_wrappers(optimizer, params) if can_look else []


def _describe_scale(
    scaler: LossScaler | None, wrapper: LossScaledState, loss_scale: float
) -> dict[str, Any]:
    """Whether the scale can never move, and its bounds; None if they are not known."""
    static = isinstance(wrapper.scaler_state, StaticState)
    if is_static(scaler) if scaler else static:
        return {"is_static": True, "min_scale": loss_scale, "max_scale": loss_scale}
    known = scaler.hyperparameters if scaler else {}
    low, high = (known.get(name) for name in ("min_scale", "max_scale"))
    if not (_is_number(low) and _is_number(high)):
        return {"is_static": False, "min_scale": None, "max_scale": None}
    low, high = float(low), float(high)
    return {"is_static": low == high, "min_scale": low, "max_scale": high}


def _is_number(bound: Any) -> TypeGuard[float]:
    return is_array(bound) and jnp.ndim(bound) == 0


def _check_verdicts(name: str, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    rule = f"{name} must be verdicts out of {VERDICTS}, got {verdicts!r}."
    try:
        names = tuple(verdicts)  # an iterator can be asked only once
    except TypeError:
        raise TypeError(rule) from None
    known = all(isinstance(name, str) and name in VERDICTS for name in names)
    if isinstance(verdicts, str) or not known:
        raise ValueError(rule)
    return names
