# SPDX-License-Identifier: Apache-2.0
"""The records that every other module uses: states, scalers, the report of a step."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jax import Array
from jax import export as jax_export

from jls._text import format_fields, format_record, format_rule

AnyType = TypeVar("AnyType", bound=type)
StateT = TypeVar("StateT")
InitT = TypeVar("InitT", covariant=True)


class JlsWarning(UserWarning):
    """The category of every warning of jls.

    `warnings.simplefilter("ignore", jls.JlsWarning)` silences them all.

    Example:
      >>> issubclass(jls.JlsWarning, UserWarning)
      True
    """


def exportable(state_type: AnyType) -> AnyType:
    """Lets `jax.export` serialize a function that takes or returns a `NamedTuple`."""
    jax_export.register_namedtuple_serialization(
        state_type, serialized_name=f"jls.{state_type.__name__}"
    )
    return state_type


@exportable
class ScalerState(NamedTuple):
    """A loss scale and the two counts that decide when it moves.

    Example:
      >>> jls.dynamic(2.0**10).init()
      ScalerState(loss_scale=1024, finite_count=0, nonfinite_count=0)
    """

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  consecutive finite steps since the scale last changed
    nonfinite_count: Array  # i32[]  non-finite steps counted towards the next backoff

    def __repr__(self) -> str:
        return format_record("ScalerState", **format_fields(self, self._fields))


@exportable
class StaticState(NamedTuple):
    """A loss scale that never moves: the state of `jls.static`.

    Example:
      >>> jls.static(128.0).init()
      StaticState(loss_scale=128)
    """

    loss_scale: Array  # f32[]

    def __repr__(self) -> str:
        return format_record("StaticState", **format_fields(self, self._fields))


class InitFn(Protocol[InitT]):
    def __call__(self) -> InitT:
        """Returns the first state of a run: fresh buffers, strong dtypes."""
        ...


class AdjustFn(Protocol[StateT]):
    def __call__(self, state: StateT, grads_finite: Array | bool, /) -> StateT:
        """Returns the state after one step.

        A pure function that may run under `jit`, `scan` and `vmap`. It keeps the
        structure and the dtypes of the state.

        Args:
          state: the state that scaled this step's loss.
          grads_finite: `bool[]`, whether every gradient of the step is finite.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Switched:
    """`func` with its switches bound, which are static: Python reads them.

    The leaves of a scaler are numbers. A switch belongs to its structure: equal ones
    make equal structures, where a `functools.partial` equals nothing but itself.
    """

    func: Callable[..., Any]
    switches: tuple[tuple[str, Any], ...]

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.switches)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **self.keywords, **kwargs)


class LossScaler(NamedTuple, Generic[StateT]):
    """A rule that moves the loss scale: two pure functions.

    To write your own, fill the two fields. The state is a `ScalerState`, or any
    `NamedTuple` of arrays with a field `loss_scale` of type `f32[]`. Build the fields
    as `jax.tree_util.Partial` over module-level functions and the scaler is a pytree:
    it goes through `jit` and `vmap` as an argument, and its hyperparameters change
    without a retrace. (Do not borrow the `init` of `jls.static`: its `StaticState` says
    that the scale never moves.)

    Example:
      >>> def adjust(state, grads_finite):
      ...     scale = jnp.where(grads_finite, state.loss_scale, state.loss_scale / 8)
      ...     return state._replace(loss_scale=scale)
      >>> scaler = jls.types.LossScaler(jls.dynamic(1024.0).init, adjust)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(128., dtype=float32)
    """

    init: InitFn[StateT]
    adjust: AdjustFn[StateT]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What the scaler computes with, by name: numbers, and switches if it has any.

        The names are the rule's own: most are arguments of the function that made the
        scaler. Empty for functions of your own that are not a `Partial`.

        Example:
          >>> jls.dynamic(growth_interval=100).hyperparameters["growth_interval"]
          100
        """
        return _keywords(self.init) | _keywords(self.adjust)

    def __repr__(self) -> str:
        return format_rule("LossScaler", self, **self.hyperparameters)


class MagnitudeAdjustFn(Protocol[StateT]):
    def __call__(self, state: StateT, max_abs: Array | float, /) -> StateT:
        """Returns the state after one step; see `AdjustFn`.

        Args:
          state: the state that scaled this step's loss.
          max_abs: `f32[]`, the largest magnitude among the true gradients of the step,
            as `jls.max_abs` computes it: inf if any of them is not finite.
        """
        ...


class MagnitudeScaler(NamedTuple, Generic[StateT]):
    """A scaler that sees how large the gradients are, not only whether they overflow.

    Like `LossScaler`, except that `adjust` takes a number instead of a flag: the
    largest magnitude, which is inf after an overflow. `jls.loss_scaled` recognizes the
    type, and takes the maximum in the pass that checks for inf and NaN.

    Example:
      >>> def adjust(state, max_abs):  # keep the largest scaled gradient near 2**8
      ...     scale = 2.0 ** (8 - jnp.ceil(jnp.log2(max_abs)))
      ...     scale = jnp.where(jnp.isfinite(max_abs), scale, state.loss_scale / 2)
      ...     return state._replace(loss_scale=jnp.clip(scale, 1.0, 2.0**24))
      >>> scaler = jls.types.MagnitudeScaler(jls.dynamic(1024.0).init, adjust)
      >>> scaler.adjust(scaler.init(), jls.max_abs(jnp.array([0.5, -2.0]))).loss_scale
      Array(128., dtype=float32)
    """

    init: InitFn[StateT]
    adjust: MagnitudeAdjustFn[StateT]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What the scaler computes with, by name; see `LossScaler`."""
        return _keywords(self.init) | _keywords(self.adjust)

    def __repr__(self) -> str:
        return format_rule("MagnitudeScaler", self, **self.hyperparameters)


Scaler = LossScaler | MagnitudeScaler


class JudgeFn(Protocol[StateT]):
    def __call__(
        self, state: StateT, loss: Array | None, norm: Array, /
    ) -> tuple[StateT, Array | bool]:
        """Returns the next state, and whether to skip the step.

        A pure function that may run under `jit`, `scan` and `vmap`. It keeps the
        structure, the shapes and the dtypes of the state. What it returns is kept on
        steps with finite gradients and a finite loss alone.

        Args:
          state: the state before the step.
          loss: `f32[]`, the true loss; None if `update` gets no `value`.
          norm: `f32[]`, the global L2 norm of the true gradients, before clipping. Of
            gradients over 1.8e19 it may be inf: keep that out of averages.
        """
        ...


class SpikePolicy(NamedTuple, Generic[StateT]):
    """A rule that skips finite steps that are far out of line: two pure functions.

    `jls.spikes` makes one. To write your own, fill the two fields; the state is any
    pytree of arrays. Nothing bounds how many steps your own rule skips: if no accepted
    step can move its limit, a lasting rise of the loss or the norm freezes the run.
    Then `jls.health` says "stalled".

    Example:
      >>> def judge(state, loss, norm):  # three times the smallest loss so far
      ...     return jnp.minimum(state, loss), loss > 3 * state
      >>> policy = jls.types.SpikePolicy(lambda: jnp.float32(jnp.inf), judge)
      >>> optimizer = jls.skip_nonfinite(optax.sgd(0.1), spikes=policy)
      >>> state = optimizer.init(jnp.ones(2))
      >>> for loss in [1.0, 2.9, 3.1]:
      ...     _, state = optimizer.update(jnp.ones(2), state, value=jnp.float32(loss))
      >>> state.spikes, state.applied
      (Array(1, dtype=int32), Array(False, dtype=bool))
    """

    init: InitFn[StateT]
    judge: JudgeFn[StateT]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What the policy computes with, by name; see `LossScaler`."""
        return _keywords(self.init) | _keywords(self.judge)

    def __repr__(self) -> str:
        return format_rule("SpikePolicy", self, **self.hyperparameters)


@exportable
class SpikeState(NamedTuple):
    """State of `jls.spikes`, and of the presets like it.

    Row 0 is of the losses, row 1 of the norms. A loss that is not given counts as 0,
    and is not judged. A limit is inf while nothing is judged.

    Example:
      >>> jls.spikes(window=4, budget=2).init()
      SpikeState(tokens=2, found=0, judged_loss=0, limit_loss=inf, judged_norm=0,
       limit_norm=inf)
    """

    seen: Array  # f32[2, window]  the last values that were kept
    # i32[2]  there are min(kept, window) of them; the next goes to kept % window
    kept: Array
    tokens: Array  # f32[]  how many steps may be skipped now
    found: Array  # i32[]  spikes so far, skipped or let through
    judged_loss: Array  # f32[]  the last loss that was judged
    limit_loss: Array  # f32[]  what it was held against
    judged_norm: Array  # f32[]  the last gradient norm that was judged
    limit_norm: Array  # f32[]  what it was held against
    steady_share: Array  # f32[]  the share of spikes that noise alone stays below

    def __repr__(self) -> str:
        """All fields but `seen`, `kept` and `steady_share`."""
        fields = ("tokens", "found", *JUDGED_FIELDS)
        return format_record("SpikeState", **format_fields(self, fields))


JUDGED_FIELDS = "judged_loss", "limit_loss", "judged_norm", "limit_norm"


class SkipReason(enum.IntEnum):
    """Why a step was skipped: the codes of `LossScaledState.skip_reason`.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.types.SkipReason(int(state.skip_reason))
      <SkipReason.NONE: 0>
    """

    NONE = 0  # no step was skipped yet
    GRADIENTS = 1  # a gradient was inf or NaN
    LOSS = 2  # the forward loss was inf or NaN
    UPDATES = 3  # gradients and loss were finite, but not what would have been kept
    SPIKE = 4  # all was finite, but loss or gradient norm was far out of line


@exportable
class LossScaledState(NamedTuple):
    """State of `jls.loss_scaled`. The counters stop at the int32 maximum.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> optimizer.init(jnp.ones(3)).steps
      Array(0, dtype=int32)
    """

    inner_state: Any  # the wrapped optimizer's state
    scaler_state: Any  # the scaler's state
    applied: Array  # bool[]  whether the last step was applied; False before the first
    steps: Array  # i32[]  calls of update
    skips: Array  # i32[]  steps that were skipped
    consecutive_skips: Array  # i32[]  steps skipped since the last applied one
    nonfinite_losses: Array  # i32[]  skipped because the forward loss was not finite
    nonfinite_updates: Array  # i32[]  skipped for an update: inf, NaN or too large
    skip_reason: Array  # i32[]  a SkipReason, of the last skipped step
    # bool[n]  by floating-point leaf, of the last step skipped for inf or NaN
    nonfinite_leaves: Array
    spikes: Any = ()  # i32[]  steps skipped by the spike policy; () without one
    spike_state: Any = ()  # the spike policy's state; () without one

    def __repr__(self) -> str:
        """All fields but those that may be long."""
        return format_record(
            "LossScaledState",
            inner_state="...",
            scaler_state=self.scaler_state,
            **format_fields(self, logged_fields(self)),
        )


# The fields of a LossScaledState that a logger wants to see.
LOGGED_FIELDS = (
    "applied",
    "steps",
    "skips",
    "consecutive_skips",
    "nonfinite_losses",
    "nonfinite_updates",
    "skip_reason",
)


def logged_fields(state: LossScaledState) -> tuple[str, ...]:
    """`LOGGED_FIELDS`, and under a spike policy `spikes`."""
    return (*LOGGED_FIELDS, "spikes") if has_policy(state) else LOGGED_FIELDS


def has_policy(state: LossScaledState) -> bool:
    """Whether it was made with a spike policy, whose own state may be empty."""
    return not isinstance(state.spikes, tuple)


@exportable
class StepReport(NamedTuple):
    """What `jls.train_step` and `jls.apply_gradients` report; arrays on the device.

    The order of the first seven is that of MindFormers' `MFTrainOneStepCell`, so that
    its callbacks can be ported. `local_norm` holds norms; MindFormers holds squares.

    Example:
      >>> jls.types.StepReport._fields
      ('loss', 'skipped', 'loss_scale', 'learning_rate', 'global_norm', 'local_norm',
       'size', 'dropped', 'aux', 'skip_reason', 'limit_loss', 'limit_norm')
    """

    loss: Any  # f32[] or wider, the true forward loss, also of a skipped step; or None
    skipped: Array  # bool[]  whether the step was skipped
    loss_scale: Array  # f32[]  the loss scale of the next step
    learning_rate: Any  # f32[], a dict of f32[] by group, or None
    global_norm: Array  # f32[]  of the true gradients, before clipping
    local_norm: Any  # None, or a dict of f32[] by the path of the parameter
    size: (
        Any  # None, or a dict by path: numbers of elements, i32[]; f32[] from 2**31 on
    )
    dropped: Array  # i32[]  micro-batches left out of this step
    aux: Any  # what the loss function returned for it, or None
    skip_reason: Array  # i32[]  a SkipReason; 0 if this step was applied
    limit_loss: Any = (
        None  # f32[]  above it, the loss is a spike; None without jls.spikes
    )
    limit_norm: Any = None  # f32[]  above it, global_norm is one


def _keywords(function: Any) -> dict[str, Any]:
    if not isinstance(function, functools.partial | Switched):
        return {}
    inner = _keywords(function.func)
    # Numbers first, then switches; what is bound last counts.
    bound = dict(function.keywords)
    return bound | {key: x for key, x in inner.items() if key not in bound}
