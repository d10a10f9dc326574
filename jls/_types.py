# SPDX-License-Identifier: Apache-2.0
"""The records that every other module uses: states, scalers, the report of a step."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    get_type_hints,
)

import jax.numpy as jnp
from jax import Array
from jax import export as jax_export

from jls._text import (
    format_numbers,
    format_record,
    format_rule,
    format_state,
    no_field,
    no_key,
)

TypeT = TypeVar("TypeT", bound=type)
StateT = TypeVar("StateT")
InitT = TypeVar("InitT", covariant=True)
BatchT = TypeVar("BatchT")


class JlsWarning(UserWarning):
    """The category of every warning of jls.

    `warnings.simplefilter("ignore", jls.JlsWarning)` silences them all.

    Example:
      >>> issubclass(jls.JlsWarning, UserWarning)
      True
    """


def exportable(state_type: TypeT) -> TypeT:
    """Lets `jax.export` serialize a function that takes or returns a `NamedTuple`."""
    jax_export.register_namedtuple_serialization(
        state_type, serialized_name=f"jls.{state_type.__name__}"
    )
    return state_type


@exportable
class Bfloat16ParamsState(NamedTuple):
    """State of `jls.bfloat16_params`.

    Example:
      >>> optimizer = jls.bfloat16_params(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(2, jnp.bfloat16))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: Any  # of `inner`, its moments in bfloat16 unless `moments` is None
    # u16 like the parameters, what bfloat16 lacks; () if it rounds stochastically.
    rest: Any
    # Steps taken, modulo 2^32: which numbers are drawn.
    count: Array  # u32[]  # pyright: ignore[reportIncompatibleMethodOverride]
    # Like one parameter, to see whether it becomes what was made of it; [1] if none is
    # watched. The upper half has the number that it was, the lower one what was made.
    made: Array  # u32[...]
    # How often its numbers went elsewhere since one arrived; -1 of one that did.
    strayed: Array  # i8[...]


@exportable
class ScalerState(NamedTuple):
    """A loss scale and the two counts that decide when it moves.

    Example:
      >>> jls.dynamic(2.0**10).init()
      ScalerState(loss_scale=1024, finite_count=0, nonfinite_count=0)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    loss_scale: Array  # f32[]
    finite_count: Array  # i32[]  consecutive finite steps since the scale last changed
    nonfinite_count: Array  # i32[]  non-finite steps counted towards the next backoff

    __repr__ = format_state


@exportable
class StaticState(NamedTuple):
    """A loss scale that never moves: the state of `jls.static`.

    Example:
      >>> jls.static(128.0).init()
      StaticState(loss_scale=128)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    loss_scale: Array  # f32[]

    __repr__ = format_state


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
          grads_finite: `bool[]`, whether every gradient of the step is finite, as
            `jls.all_finite` says.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StaticPartial:
    """`func` with its static keyword arguments bound, which Python reads.

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

    To write your own, fill both fields. The state is a `ScalerState`, or any
    `NamedTuple` of arrays with a field `loss_scale` of type `f32[]`. Build the
    functions as `jax.tree_util.Partial` over module-level functions and the scaler is a
    pytree: it goes through `jit` and `vmap` as an argument, and its hyperparameters
    change without a retrace. (Do not borrow the `init` of `jls.static`: its
    `StaticState` says that the scale never moves.)

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
        """The numbers and switches that the scaler computes with, by name.

        The names are the rule's own: most are arguments of the function that made the
        scaler. Empty for functions of your own that are not a `Partial`.

        Example:
          >>> jls.dynamic(growth_interval=100).hyperparameters["growth_interval"]
          100
        """
        return _keywords(self.init) | _keywords(self.adjust)

    def __repr__(self) -> str:
        return format_rule(self, "adjust", self.hyperparameters)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a jls.types.LossScaler has no attribute {name!r}: it is two pure "
                "functions, init and adjust. Write optimizer = jls.loss_scaled(inner, "
                "scaler), then loss, grads = jls.value_and_grad(loss_fn)(opt_state, "
                "params, batch), then updates, opt_state = optimizer.update(grads, "
                "opt_state, params, value=loss). The scale is jls.loss_scale(opt_state)"
                "; docs/coming_from.md has the rest.",
                name=name,
                obj=self,
            )


class JudgeFn(Protocol[StateT]):
    def __call__(
        self, state: StateT, loss: Array | None, norm: Array, /
    ) -> tuple[StateT, Array | bool]:
        """Returns the next state, and whether to skip the step.

        A pure function that may run under `jit`, `scan` and `vmap`. It keeps the
        structure, the shapes and the dtypes of the state. Its result is kept on
        steps with finite gradients and a finite loss alone.

        Args:
          state: the state before the step.
          loss: `f32[]`, the unscaled loss; None if `update` gets no `value`.
          norm: `f32[]`, the global L2 norm of the unscaled gradients, before clipping.
            For gradients over 1.8e19 it may be inf (if the optimizer clips by it, such
            a step is skipped before): keep that out of averages.
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
        """The numbers that the policy computes with, by name; see `LossScaler`."""
        return _keywords(self.init) | _keywords(self.judge)

    def __repr__(self) -> str:
        return format_rule(self, "judge", self.hyperparameters)


# Signals that a spike policy judges: the loss, and the global norm of the gradients.
SIGNALS = "loss", "norm"


@exportable
class SpikeState(NamedTuple):
    """State of `jls.spikes`, and of the presets like it.

    Index 0 of the first axis of an array is the loss, index 1 the norm. A loss that is
    not given counts as 0, and is not judged. A limit is inf while nothing is judged.

    Example:
      >>> jls.spikes(window=4, budget=2).init()
      SpikeState(tokens=2, found=0, value=Array([0., 0.], dtype=float32),
       limit=Array([inf, inf], dtype=float32))
    """

    seen: Array  # f32[n, window]  the last values that were kept
    # i32[n]  there are min(kept, window) of them; the next goes to kept % window
    kept: Array
    tokens: Array  # f32[]  how many steps may be skipped now
    found: Array  # i32[]  spikes so far, skipped or let through
    value: Array  # f32[n]  the last values that were judged
    limit: Array  # f32[n]  the limits that these were compared with
    steady_share: Array  # f32[]  the share of spikes that noise alone stays below

    def __repr__(self) -> str:
        """All fields but `seen`, `kept` and `steady_share`."""
        shown = "tokens", "found", "value", "limit"
        fields = {name: getattr(self, name) for name in shown}
        return format_record("SpikeState", **format_numbers(fields))


def spike_metrics(state: SpikeState) -> dict[str, Array]:
    """The last values that were judged, and their limits, by the names of metrics."""
    return {
        f"{prefix}_{signal}": numbers[..., i]
        for i, signal in enumerate(SIGNALS)
        for prefix, numbers in (("judged", state.value), ("limit", state.limit))
    }


class SkipReason(enum.IntEnum):
    """Why a step was skipped: the codes of `LossScaledState.last_skip_reason`.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.types.SkipReason(int(state.last_skip_reason))
      <SkipReason.NONE: 0>
    """

    NONE = 0  # no step was skipped yet
    GRADIENTS = 1  # a gradient, or the sum of their squares, was inf or NaN
    LOSS = 2  # the forward loss was inf or NaN
    UPDATES = 3  # gradients and loss were finite, but not the update or the new state
    SPIKE = 4  # all was finite, but loss or gradient norm was far out of line
    ATOMIC = 5  # another optimizer in the block of jls.atomic skipped


def skip_reason_of(code: int) -> SkipReason:
    """NONE for a code that only a later version knows."""
    return SkipReason(code) if code in list(SkipReason) else SkipReason.NONE


class BadBatch(NamedTuple, Generic[BatchT]):
    """A batch that `jls.requeue` has given up, and why.

    Example:
      >>> jls.types.BadBatch(3, jnp.ones(2), jls.types.SkipReason.LOSS).reason.name
      'LOSS'
    """

    # From 0, its place in the data.
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    batch: BatchT
    reason: SkipReason  # of its last try


# Events that `LossScaledState` counts; `_step` says when each happens.
Event = Literal[
    "step", "skip", "nonfinite loss", "nonfinite update", "spike", "partial overflow"
]


class Field(NamedTuple):
    """All facts about a field of `LossScaledState` but its type.

    The only place that knows it: `init`, the counting of a step, `jls.metrics`,
    `jls.health`, `jls.History` and `jls.upgrade_state` read it.
    """

    dtype: Any = None  # of a number that starts at 0; None if `init` has to make it
    counts: Event | None = None  # the event that it counts
    is_consecutive: bool = False  # whether a step without the event restarts the count
    is_logged: bool = False  # whether it is a metric
    is_of_policy: bool = False  # whether it is () without a spike policy
    since: str | None = None  # the version that added it; None for the first


_counter = functools.partial(Field, jnp.int32, is_logged=True)


@exportable
class LossScaledState(NamedTuple):
    """State of `jls.loss_scaled`. The counters stop at the int32 maximum.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> optimizer.init(jnp.ones(3)).steps
      Array(0, dtype=int32)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field
        __getitem__ = no_key

    # The wrapped optimizer's state.
    inner_state: Any
    # The scaler's state.
    scaler_state: Any
    # bool[]  whether the last step was applied; False before the first
    applied: Annotated[Array, Field(jnp.bool_, is_logged=True)]
    # i32[]  calls of update
    steps: Annotated[Array, _counter("step")]
    # i32[]  steps that were skipped
    skips: Annotated[Array, _counter("skip")]
    # i32[]  steps skipped since the last applied one
    consecutive_skips: Annotated[Array, _counter("skip", is_consecutive=True)]
    # i32[]  skipped because the forward loss was not finite
    nonfinite_losses: Annotated[Array, _counter("nonfinite loss")]
    # i32[]  skipped for an update: inf, NaN or too large
    nonfinite_updates: Annotated[Array, _counter("nonfinite update", since="0.1.0")]
    # i32[]  a SkipReason, of the last skipped step
    last_skip_reason: Annotated[Array, Field(jnp.int32, is_logged=True, since="0.1.0")]
    # bool[n]  by floating-point leaf, of the last step skipped for inf or NaN
    nonfinite_leaves: Annotated[Array, Field(since="0.1.0")]
    # i32[]  steps skipped by the spike policy; () without one
    spikes: Annotated[Any, _counter("spike", is_of_policy=True, since="0.2.0")]
    # The spike policy's state; () without one.
    spike_state: Annotated[Any, Field(is_of_policy=True, since="0.2.0")]
    # i32[]  applied without the parts of the gradients that were not finite
    partial_overflows: Annotated[Array, _counter("partial overflow", since="0.3.0")]

    def __repr__(self) -> str:
        """All fields but those that may be long."""
        return format_record(
            "LossScaledState",
            inner_state="...",
            scaler_state=self.scaler_state,
            **format_numbers(logged(self)),
        )


# Only ever appended to. Subclasses of NamedTuple cannot hold it themselves.
FIELDS: dict[str, Field] = {
    name: next(iter(getattr(hint, "__metadata__", ())), Field())
    for name, hint in get_type_hints(LossScaledState, include_extras=True).items()
}
# In its signature `help` shows the types alone.
LossScaledState.__new__.__annotations__ = get_type_hints(LossScaledState)

# The field that counts the skips for a reason; for gradients it is what is left.
COUNTED_IN: dict[SkipReason, str] = {
    SkipReason.LOSS: "nonfinite_losses",
    SkipReason.UPDATES: "nonfinite_updates",
    SkipReason.SPIKE: "spikes",
}


def logged(state: LossScaledState) -> dict[str, Array]:
    """The fields that a logger wants to see, by name."""
    has_all = has_policy(state)
    return {
        name: getattr(state, name)
        for name, field in FIELDS.items()
        if field.is_logged and (has_all or not field.is_of_policy)
    }


def wrapper_metrics(state: LossScaledState) -> dict[str, Any]:
    """The same, and what a spike policy of jls has found."""
    spikes = state.spike_state
    if not isinstance(spikes, SpikeState):
        return logged(state)
    return logged(state) | {"spikes_found": spikes.found, **spike_metrics(spikes)}


def has_policy(state: LossScaledState) -> bool:
    """Whether it was made with a spike policy, whose own state may be empty."""
    return not isinstance(state.spikes, tuple)


@exportable
class StepReport(NamedTuple):
    """The report of `jls.train_step` and `jls.apply_gradients`; arrays on the device.

    The order of the first seven is that of MindFormers' `MFTrainOneStepCell`, so that
    its callbacks can be ported. `local_norm` holds norms; MindFormers holds squares.

    Example:
      >>> jls.types.StepReport._fields
      ('loss', 'skipped', 'loss_scale', 'learning_rate', 'global_norm', 'local_norm',
       'size', 'dropped', 'aux', 'skip_reason', 'limit_loss', 'limit_norm',
       'update_norm', 'scale_moves')
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field
        __getitem__ = no_key

    loss: Any  # f32[] or wider, the unscaled loss, also of a skipped step; or None
    skipped: Array  # bool[]  whether the step was skipped
    loss_scale: Array  # f32[]  the loss scale of the next step
    # f32[], or a dict of f32[] by group; None if it is neither given nor found
    learning_rate: Any
    # f32[]  of the unscaled gradients, before clipping; inf over 1.8e19 where one clips
    global_norm: Array
    local_norm: Any  # None, or a dict of f32[] by the path of the parameter
    # None, or a dict by path: numbers of elements, i32[]; f32[] from 2**31 on
    size: Any
    dropped: Array  # i32[]  micro-batches left out of this step
    aux: Any  # what the loss function returned for it, or None
    skip_reason: Array  # i32[]  a SkipReason; 0 if this step was applied
    # f32[]  above it, the loss is a spike; None without jls.spikes
    limit_loss: Any = None
    limit_norm: Any = None  # f32[]  above it, global_norm is one
    # f32[]  of the updates that were applied; None unless it was asked for
    update_norm: Any = None
    # bool[]  whether a bad step lowers the loss scale at all: not a static one
    scale_moves: Any = True


def _keywords(function: Any) -> dict[str, Any]:
    if not isinstance(function, functools.partial | StaticPartial):
        return {}
    inner = _keywords(function.func)
    # Numbers first, then switches; what is bound last counts.
    bound = dict(function.keywords)
    return bound | {key: x for key, x in inner.items() if key not in bound}
