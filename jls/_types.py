# SPDX-License-Identifier: Apache-2.0
"""The types that every other module speaks; no computation."""

from typing import Any, NamedTuple, Protocol, TypeVar

from jax import Array
from jax import export as jax_export

from jls._repr import numbers, policy_shown, shown

Type = TypeVar("Type", bound=type)


def exportable(state_type: Type) -> Type:
    """Lets `jax.export` serialize a function that takes or returns a `NamedTuple`."""
    jax_export.register_namedtuple_serialization(
        state_type, serialized_name=f"jls.{state_type.__name__}"
    )
    return state_type


# The finite_count of a fixed scale, which no other policy has. One that takes over such
# a state grows two steps later, once.
FIXED = -2


@exportable
class LossScaleState(NamedTuple):
    """A loss scale and the two counts that decide when it moves.

    Example:
      >>> jls.dynamic(2.0**10).init().loss_scale
      Array(1024., dtype=float32)
    """

    loss_scale: Array  # f32[]
    # Consecutive finite steps since the scale last changed; -2 of a fixed scale.
    finite_count: Array  # i32[]
    nonfinite_count: Array  # i32[]  non-finite steps counted towards the next backoff

    def __repr__(self) -> str:
        return shown("LossScaleState", **numbers(self, self._fields))


class InitFn(Protocol):
    def __call__(self) -> LossScaleState:
        """Returns the first state of a run: fresh buffers, strong dtypes."""
        ...


class AdjustFn(Protocol):
    def __call__(
        self, state: LossScaleState, grads_finite: Array | bool, /
    ) -> LossScaleState:
        """Returns the state after one step.

        A pure function that may run under `jit`, `scan` and `vmap`; the structure
        and dtypes of the state stay.

        Args:
          state: the state that scaled this step's loss.
          grads_finite: `bool[]`, whether every gradient of the step is finite.
        """
        ...


class LossScaler(NamedTuple):
    """A policy: two pure functions. Write your own by filling the two fields.

    The state is `LossScaleState`, or any `NamedTuple` of arrays with a field
    `loss_scale` of type `f32[]`. Build the fields as `jax.tree_util.Partial` over
    module-level functions and the policy is a pytree: it goes through `jit` and
    `vmap` as an argument, and its hyperparameters change without a retrace.

    Example:
      >>> def adjust(state, grads_finite):
      ...     scale = jnp.where(grads_finite, state.loss_scale, state.loss_scale / 8)
      ...     return state._replace(loss_scale=scale)
      >>> scaler = jls.LossScaler(jls.dynamic(1024.0).init, adjust)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(128., dtype=float32)
    """

    init: InitFn
    adjust: AdjustFn

    def __repr__(self) -> str:
        return policy_shown("LossScaler", self.init, self.adjust)


class MagnitudeAdjustFn(Protocol):
    def __call__(
        self, state: LossScaleState, largest: Array | float, /
    ) -> LossScaleState:
        """Returns the state after one step; see `AdjustFn`.

        Args:
          state: the state that scaled this step's loss.
          largest: `f32[]`, the largest magnitude among the true gradients of the step,
            as `jls.max_abs` gives it: inf if any of them is not finite.
        """
        ...


class MagnitudeScaler(NamedTuple):
    """A policy that sees how large the gradients are, not only whether they overflow.

    As `LossScaler`, but its `adjust` takes one number in the place of the flag: the
    largest magnitude, inf after an overflow. `jls.loss_scaled` tells the two by their
    type and measures the magnitude, in the pass that checks for inf and NaN, only for a
    policy that asks for it. A whole train step moves about 5 % more bytes then.

    Example:
      >>> def adjust(state, largest):  # keep the largest scaled gradient near 2**8
      ...     scale = 2.0 ** (8 - jnp.ceil(jnp.log2(largest)))
      ...     scale = jnp.where(jnp.isfinite(largest), scale, state.loss_scale / 2)
      ...     return state._replace(loss_scale=jnp.clip(scale, 1.0, 2.0**24))
      >>> scaler = jls.MagnitudeScaler(jls.dynamic(1024.0).init, adjust)
      >>> scaler.adjust(scaler.init(), jls.max_abs(jnp.array([0.5, -2.0]))).loss_scale
      Array(128., dtype=float32)
    """

    init: InitFn
    adjust: MagnitudeAdjustFn

    def __repr__(self) -> str:
        return policy_shown("MagnitudeScaler", self.init, self.adjust)


Scaler = LossScaler | MagnitudeScaler


# Why a step was skipped; the first before there is such a step.
SKIP_REASONS = ("none", "gradients", "loss", "updates")


@exportable
class LossScaledState(NamedTuple):
    """State of `jls.loss_scaled`. The counters stop at the int32 maximum.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> optimizer.init(jnp.ones(3)).steps
      Array(0, dtype=int32)
    """

    inner_state: Any  # the wrapped optimizer's state
    scaler_state: LossScaleState
    applied: Array  # bool[]  was the last step applied; False before the first
    steps: Array  # i32[]   calls of update
    skips: Array  # i32[]   of these, skipped
    consecutive_skips: Array  # i32[]   skipped since the last applied step
    nonfinite_losses: Array  # i32[]   skipped because the forward loss was not finite
    nonfinite_updates: Array  # i32[]   skipped though gradients and loss were finite
    # Of the last skipped step: 0 none yet, 1 gradients, 2 loss, 3 updates.
    skip_reason: Array  # i32[]
    nonfinite_leaves: Array  # bool[n]  of the last skipped step, by floating-point leaf

    def __repr__(self) -> str:
        """All but `inner_state` and `nonfinite_leaves`, which may be long."""
        return shown(
            "LossScaledState",
            inner_state="...",
            scaler_state=self.scaler_state,
            **numbers(self, SCALARS),
        )


# The fields of a LossScaledState that a logger wants to see.
SCALARS = LossScaledState._fields[2:-1]


@exportable
class ParamsEmaState(NamedTuple):
    """State of `jls.params_ema`. The count stops at the int32 maximum.

    Example:
      >>> state = jls.params_ema(0.999).init({"w": jnp.ones(2, jnp.float16)})
      >>> state.ema
      {'w': Array([1., 1.], dtype=float32)}
    """

    # Steps averaged. The name is that of optax's counts, and of a method of tuples.
    count: Array  # i32[]  # pyright: ignore[reportIncompatibleMethodOverride]
    weight: Array  # f32[]  in [0, 1], of what is averaged against an empty start
    ema: Any  # like the parameters, in at least float32
