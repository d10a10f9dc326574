# SPDX-License-Identifier: Apache-2.0
"""The loss scaling of other systems, step for step, under their argument names.

Each function but the last four returns a `jls.types.LossScaler` that moves the scale
as its namesake does, with the same defaults, and is used like any other scaler::

    optimizer = jls.loss_scaled(optax.adamw(3e-4), jls.presets.torch())

The last four are spike policies, for `jls.loss_scaled(..., spikes=...)`.

What no preset copies:

1. A scale that reaches 0 or inf: here it stays in [2**-126, 2**126], or above the
   system's own floor if that is higher.
2. A scale below the floor that jumps up to it on an overflow: here it stays.
3. An exception after an overflow at the floor, or after too many of them: here the
   step is skipped and counted.
4. Setters and constructors that check nothing: here a wrong argument is an error.
5. Steps that are not skipped because scaling is disabled: here bad steps always are.

The last bit may differ where a factor is not exact in float32, which torch applies in
float64, and where a system divides by a factor that is not a power of two, since jls
multiplies by the rounded reciprocal.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from jls import _elsewhere, _spikes, _validate
from jls._scalers.adaptive import adaptive_adjust, adaptive_init
from jls._scalers.dynamic import dynamic_adjust
from jls._scalers.hysteresis import hysteresis_adjust
from jls._scalers.rule import RAISING, make, start_at, switch
from jls._scalers.static import static
from jls._text import naming_arguments
from jls._tree import as_flag
from jls._types import JlsWarning, LossScaler, ScalerState, SpikePolicy, SpikeState

__all__ = [
    "deepspeed",
    "flax",
    "keras",
    "levanter_spikes",
    "maxtext_spikes",
    "megatron",
    "mindformers_adaptive",
    "mindspore",
    "olmo_spikes",
    "paddle",
    "paddle_doc",
    "spike_limit",
    "torch",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    raise _elsewhere.attribute_error(__name__, name)


def _dynamic(
    given: dict[str, Any], consecutive: bool = True, /, **names: str
) -> LossScaler:
    """By the rule of `jls.dynamic`, whose first bad step backs off by itself."""
    adjust = switch(dynamic_adjust, consecutive=consecutive)
    return make(start_at, adjust, {"backoff_interval": 1} | given, **names)


def _factors(scale_factor: Any) -> dict[str, Any]:
    """One factor for growth, and its reciprocal for a backoff."""
    factor = _validate.number("scale_factor", scale_factor, *RAISING)
    return {"growth_factor": factor, "backoff_factor": 1 / factor}


def _from_one(name: str, scale: Any) -> Any:
    """The first loss scale of a rule whose floor is 1."""
    return _validate.number(name, scale, "from 1 to 2^126", 1.0, _validate.LARGEST)


@naming_arguments()
def torch(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScaler:
    """Returns the scaler of PyTorch's `torch.amp.GradScaler`.

    torch has no floor, and its scale can reach 0; here it stops at 2**-126, and at
    2**126 above. The last bit may differ where a factor is not exact in float32.

    Args:
      init_scale: the first loss scale.
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, consecutive finite steps before a growth.
      enabled: False gives `jls.static(1.0)`, whatever the other arguments are.
        Non-finite steps are still skipped, which torch does not do.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. torch checks the two factors only.

    Example:
      >>> scaler = jls.presets.torch(growth_interval=100)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(32768., dtype=float32)
    """
    given = locals()
    if not _validate.flag("enabled", given.pop("enabled")):
        return static(1.0)
    return _dynamic(given)


@naming_arguments()
def paddle(
    enable: bool = True,
    init_loss_scaling: float = 65536.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> LossScaler:
    """Returns the scaler of `paddle.amp.GradScaler`, as in its code (3.3.1).

    Paddle's scale can reach 0, and grow to inf and stay there; here it stays in
    [2**-126, 2**126]. For the rule that it documents see `paddle_doc`.

    Args:
      enable: False gives `jls.static(1.0)`, whatever the other arguments are.
        Non-finite steps are still skipped, which Paddle does not do.
      init_loss_scaling: the first loss scale.
      incr_ratio: > 1.
      decr_ratio: in (0, 1).
      incr_every_n_steps: >= 1, consecutive finite steps before a growth.
      decr_every_n_nan_or_inf: >= 1, consecutive non-finite steps before a backoff.
      use_dynamic_loss_scaling: False gives `jls.static(init_loss_scaling)`.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Paddle checks the two ratios only.

    Example:
      >>> scaler = jls.presets.paddle(decr_every_n_nan_or_inf=2)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(65536., dtype=float32)
    """
    return _paddle(consecutive=True, given=locals())


@naming_arguments()
def paddle_doc(
    enable: bool = True,
    init_loss_scaling: float = 32768.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    use_dynamic_loss_scaling: bool = True,
) -> LossScaler:
    """Returns the scaler that Paddle documents (3.3.1).

    Its defaults are those documented for `AmpScaler`, and the non-finite steps that
    lead to a backoff accumulate: a finite step in between does not reset their count.
    As with `paddle`, the scale stays in [2**-126, 2**126].

    Args:
      enable: False gives `jls.static(1.0)`, whatever the other arguments are.
        Non-finite steps are still skipped, which Paddle does not do.
      init_loss_scaling: the first loss scale.
      incr_ratio: > 1.
      decr_ratio: in (0, 1).
      incr_every_n_steps: >= 1, consecutive finite steps before a growth.
      decr_every_n_nan_or_inf: >= 1, accumulated non-finite steps before a backoff.
      use_dynamic_loss_scaling: False gives `jls.static(init_loss_scaling)`.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.paddle_doc()
      >>> state = scaler.init()
      >>> for grads_finite in (False, True, False):
      ...     state = scaler.adjust(state, grads_finite)
      >>> state.loss_scale
      Array(16384., dtype=float32)
    """
    return _paddle(consecutive=False, given=locals())


@naming_arguments()
def mindspore(scale_value: float, scale_factor: float, scale_window: int) -> LossScaler:
    """Returns the scaler of `mindspore.amp.DynamicLossScaler`.

    It is also the rule of `nn.DynamicLossScaleUpdateCell`, which can grow to inf; here
    the scale stops at 2**126. MindSpore backs off by a division, so the last bit may
    differ if `scale_factor` is not a power of two.

    Args:
      scale_value: the first loss scale, >= 1, which is also the floor.
      scale_factor: > 1; multiplies on a growth and divides on a backoff. MindSpore also
        takes 1, which is `jls.static(scale_value)`.
      scale_window: >= 1, consecutive finite steps before a growth.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.mindspore(1024, scale_factor=2, scale_window=1000)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(512., dtype=float32)
    """
    given = {
        "init_scale": _from_one("scale_value", scale_value),
        "scale_window": scale_window,
        "min_scale": 1.0,
    }
    given |= _factors(scale_factor)
    return _dynamic(given, growth_interval="scale_window")


@naming_arguments()
def mindformers_adaptive(
    loss_scale_value: float,
    scale_factor: float,
    scale_window: int,
    max_scale_window: int = 1000,
    min_scale_window: int = 20,
) -> LossScaler:
    """Returns the scaler of MindFormers' `AdaptiveLossScaleUpdateCell`.

    It grows often while the scale is being found, rarely later. Three growths lead to
    the next longer window. Three non-finite steps without a growth in between lead down
    to a window of 1, from which the climb starts again, except at the shortest window.
    Its scale can grow to inf; here it stops at 2**126. A first scale below 1, which it
    accepts and raises to 1 on the first overflow, is an error here.

    Args:
      loss_scale_value: the first loss scale, >= 1, which is also the floor.
      scale_factor: > 1; multiplies on a growth, and its reciprocal on a backoff.
      scale_window: the first window. If it is not on the ladder, the shortest is taken,
        as in MindFormers, with a warning.
      max_scale_window: the longest window. The ladder comes down from it by halves in
        whole hundreds, then 50, then in steps of half of `min_scale_window`, until it
        reaches `min_scale_window` or passes it. A Python number, like the other two.
      min_scale_window: >= 1 and below `max_scale_window`. The shortest window may be
        shorter; one of 0 acts as 1.

    Returns:
      A `jls.types.LossScaler` whose state is a `jls.types.AdaptiveState`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.mindformers_adaptive(1024, 2, 20)
      >>> scaler.hyperparameters["intervals"]
      (20, 30, 40, 50, 100, 200, 500, 1000)
    """
    scale = _from_one("loss_scale_value", loss_scale_value)
    factors = _factors(scale_factor)
    window = _validate.host_interval("scale_window", scale_window)
    longest = _validate.host_interval("max_scale_window", max_scale_window)
    shortest = _validate.host_interval("min_scale_window", min_scale_window)
    if longest <= shortest:
        raise ValueError(
            "min_scale_window must be < max_scale_window, got "
            f"{min_scale_window!r} >= {max_scale_window!r}."
        )
    ladder = _ladder(longest, shortest)
    if window not in ladder:
        warnings.warn(
            f"scale_window {window!r} is not one of {ladder}: the shortest is taken.",
            JlsWarning,
            stacklevel=2,
        )
        window = ladder[0]
    return make(
        Partial(adaptive_init, init_rung=1 + ladder.index(window)),
        Partial(adaptive_adjust, intervals=ladder),
        {"init_scale": scale, "min_scale": 1.0} | factors,
    )


@naming_arguments()
def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> LossScaler:
    """Returns the scaler of `keras.optimizers.LossScaleOptimizer` (Keras 3).

    Keras has no bounds, and its scale can reach 0 or inf; here it stays in
    [2**-126, 2**126].

    Args:
      initial_scale: the first loss scale. It halves on each non-finite step.
      dynamic_growth_steps: >= 1, consecutive finite steps before it doubles.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Keras checks neither.

    Example:
      >>> scaler = jls.presets.keras()
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(16384., dtype=float32)
    """
    given = {"growth_factor": 2.0, "backoff_factor": 0.5, **locals()}
    names = {"init_scale": "initial_scale", "growth_interval": "dynamic_growth_steps"}
    return _dynamic(given, **names)


@naming_arguments()
def flax(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = None,
) -> LossScaler:
    """Returns the scaler of `flax.training.dynamic_scale.DynamicScale`.

    The scale grows on finite step `growth_interval` + 1, as it does in all releases up
    to 0.12.12 although its documentation says otherwise. Pass one less for a Flax
    that has fixed it. Its cap is the largest float32 number; here it is 2**126.

    Args:
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, consecutive finite steps before the one that grows.
      scale: the first loss scale, >= `minimum_scale`.
      minimum_scale: the floor; None for 2**-126, the smallest normal float32 number and
        Flax's default. (Flax's own None means no floor, and the scale can reach 0.)

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Flax checks none.

    Example:
      >>> scaler = jls.presets.flax(growth_interval=1)
      >>> state = scaler.adjust(scaler.init(), True)
      >>> state.loss_scale, scaler.adjust(state, True).loss_scale
      (Array(65536., dtype=float32), Array(131072., dtype=float32))
    """
    given = locals()
    interval = _validate.interval("growth_interval", growth_interval)
    given["growth_interval"] = interval + 1
    if minimum_scale is None:
        given["minimum_scale"] = _validate.SMALLEST
    return _dynamic(given, init_scale="scale", min_scale="minimum_scale")


@naming_arguments(
    loss_scale_window="scale_window",
    min_loss_scale="min_scale",
    hysteresis="delayed_shift",
)
def deepspeed(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
) -> LossScaler:
    """Returns the scaler of DeepSpeed's `DynamicLossScaler`, since 0.17.1.

    The defaults are those of the "fp16" section of its configuration. The first growth
    of a run and the first after an overflow come on finite step `scale_window` + 1, the
    next ones `scale_window` steps apart. (Before 0.17.1, of June 2025, they came on
    finite step `scale_window`, as with `jls.hysteresis`.) DeepSpeed has no cap; here
    the scale stops at 2**126. On an overflow at the floor it raises an exception; here
    the scale stays, and the step is skipped and counted.

    Args:
      init_scale: the first loss scale, 2**initial_scale_power of the configuration; a
        float if it is 32 or less: `deepspeed(16)` is an error, and not a loss scale of
        16.
      scale_factor: > 1; multiplies on a growth and divides on a backoff. DeepSpeed does
        so in float64, so the last bits may differ if it is not a power of two.
      scale_window: >= 1, finite steps before a growth; loss_scale_window of the
        configuration.
      min_scale: the floor, <= `init_scale`; min_loss_scale of the configuration.
      delayed_shift: >= 1, the non-finite step that first backs off; "hysteresis" of the
        configuration.
      consecutive_hysteresis: True lets any finite step refill that budget, False only a
        growth.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.deepspeed()
      >>> state = scaler.init()
      >>> for grads_finite in (False, False, False):
      ...     state = scaler.adjust(state, grads_finite)
      >>> state.loss_scale
      Array(16384., dtype=float32)
    """
    given = locals()
    if type(init_scale) is int and 0 < init_scale <= 32:
        raise ValueError(
            f"init_scale must be a float if it is 32 or less, got {init_scale}. Write "
            f"deepspeed(2.0**{init_scale}) for an initial_scale_power of {init_scale}, "
            f"or init_scale={init_scale:.1f}."
        )
    given |= _factors(given.pop("scale_factor"))
    name = "consecutive_hysteresis"
    refill = "finite" if _validate.flag(name, given.pop(name)) else "growth"
    adjust = switch(_deepspeed_adjust, refill=refill)
    names = {"growth_interval": "scale_window", "hysteresis": "delayed_shift"}
    return make(_deepspeed_init, adjust, given, **names)


@naming_arguments()
def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> LossScaler:
    """Returns the scaler of Megatron-LM's `DynamicGradScaler`.

    The defaults are those of its command line. Megatron has no cap, and its scale can
    grow to inf; here it stops at 2**126.

    Args:
      initial_scale: the first loss scale; --initial-loss-scale.
      min_scale: the floor, <= `initial_scale`; --min-loss-scale.
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, consecutive finite steps before a growth;
        --loss-scale-window.
      hysteresis: >= 1, the non-finite step since the last growth that first backs off.

    Returns:
      A `jls.types.LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.megatron(initial_scale=2.0**16)
      >>> state = scaler.init()
      >>> for grads_finite in (False, False, False):
      ...     state = scaler.adjust(state, grads_finite)
      >>> state.loss_scale
      Array(16384., dtype=float32)
    """
    given = locals()
    adjust = switch(hysteresis_adjust, refill="growth")
    return make(start_at, adjust, given, init_scale="initial_scale")


# DeepSpeed counts the steps between two: not the first finite one of a run, nor the
# first after an overflow. So `finite_count` starts at -1 there.


def _deepspeed_init(init_scale: ArrayLike) -> ScalerState:
    return start_at(init_scale=init_scale)._replace(
        finite_count=jnp.full((), -1, jnp.int32)
    )


def _deepspeed_adjust(
    state: ScalerState, grads_finite: Array | bool, **hyperparameters: Any
) -> ScalerState:
    finite = as_flag("grads_finite", grads_finite)
    state = hysteresis_adjust(state, finite, **hyperparameters)
    return state._replace(finite_count=jnp.where(finite, state.finite_count, -1))


def _paddle(consecutive: bool, given: dict[str, Any]) -> LossScaler:
    if not _validate.flag("enable", given.pop("enable")):
        return static(1.0)
    name, scale = "use_dynamic_loss_scaling", given["init_loss_scaling"]
    if not _validate.flag(name, given.pop(name)):
        return static(_validate.scale_value("init_loss_scaling", scale))
    return _dynamic(
        given,
        consecutive,
        init_scale="init_loss_scaling",
        growth_factor="incr_ratio",
        backoff_factor="decr_ratio",
        growth_interval="incr_every_n_steps",
        backoff_interval="decr_every_n_nan_or_inf",
    )


def _ladder(longest: int, shortest: int) -> tuple[int, ...]:
    window, ladder = float(longest), [longest]
    while window > shortest:
        if window > 100:
            window = window // 200 * 100
        else:
            window -= 50 if window == 100 else shortest / 2
        ladder.append(max(1, int(window)))
    return tuple(reversed(ladder))


# Spikes: steps that are finite and far out of line. What these systems do with NaN is
# not copied: it never enters a window.


@naming_arguments()
def levanter_spikes(window: int = 128, sigmas: float = 6.0) -> SpikePolicy[SpikeState]:
    """Returns the spike policy of Levanter's `SkipStepConfig`.

    A step is skipped if its loss or its gradient norm is above mean + sigmas *
    max(deviation, 1e-6) over the last `window` values, from
    `max(2, window // 2)` values on.
    Skipped values enter the window too: after one spike a second one of half its size
    passes for a whole window. There is no budget; `jls.spikes` has one.

    Args:
      window: >= 2, Levanter's `rolling_interval_length`.
      sigmas: > 0 and finite, Levanter's `sigma_factor`.

    Returns:
      A `jls.types.SpikePolicy`. Pass the loss, which Levanter demands, as `value=`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> jls.presets.levanter_spikes()
      levanter_spikes(budget=inf, window=128, sigmas=6, warmup=64)
    """
    return _windowed(_levanter_spikes_judge, window, sigmas)


@naming_arguments()
def maxtext_spikes(window: int = 128, sigmas: float = 6.0) -> SpikePolicy[SpikeState]:
    """Returns the spike policy of MaxText's `skip_step_on_spikes`.

    A step is skipped if its loss or its gradient norm is above mean + sigmas *
    deviation (with n - 1) over the last `window` values, from `max(2, window // 2) - 1`
    values on. Skipped values enter the window too, and there is no budget. MaxText
    judges the norm of the clipped gradients, which hides what clipping has cut; here it
    is the norm before clipping.

    `olmo_spikes` is the same function: MaxText has the rule from OLMo-core's
    `SkipStepOptimizer`. With a window below 6 OLMo-core skips the second step whatever
    it is, since the deviation of one value is NaN; here only if it is above the first.

    Args:
      window: >= 2, MaxText's `skip_step_interval`, OLMo-core's
        `rolling_interval_length`.
      sigmas: > 0 and finite, MaxText's `skip_step_scaling_factor`, OLMo-core's
        `sigma_factor`.

    Returns:
      A `jls.types.SpikePolicy`. Pass the loss as `value=`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> jls.presets.maxtext_spikes()
      maxtext_spikes(budget=inf, window=128, sigmas=6, warmup=63)
    """
    return _windowed(_maxtext_spikes_judge, window, sigmas, fewer=1)


# OLMo-core's `SkipStepOptimizer`, from which MaxText has the rule.
olmo_spikes = maxtext_spikes


@naming_arguments()
def spike_limit(
    max_norm: float | None, max_loss: float | None = None
) -> SpikePolicy[SpikeState]:
    """Returns a spike policy with constant limits.

    A step is skipped if its gradient norm is above `max_norm`, or its loss above
    `max_loss`. That is Megatron's `grad_norm_skip_threshold`, MindFormers'
    `global_norm_spike_threshold` with `use_skip_data_by_global_norm`, and a constant
    `drop_norm` of axlearn. (MindFormers, axlearn and `optax.skip_large_updates` skip
    at the limit itself too.)

    No skipped step moves the limit, and there is no budget: if the norms of a run
    settle above it, the run freezes, and `jls.health` says "stalled".

    Args:
      max_norm: > 0, or None for no limit.
      max_loss: > 0, or None for no limit.

    Returns:
      A `jls.types.SpikePolicy`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range, or both are None.

    Example:
      >>> policy = jls.presets.spike_limit(10.0)
      >>> optimizer = jls.skip_nonfinite(optax.sgd(0.1), spikes=policy)
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.array([8.0, 8.0]), state, params)
      >>> state.applied, jls.metrics(state)["judged_norm"]
      (Array(False, dtype=bool), Array(11.313708, dtype=float32))
    """
    if max_norm is None and max_loss is None:
        raise ValueError(
            "max_norm or max_loss must be a number > 0, got None for both."
        )
    limits = {
        "max_norm": _spikes.check_limit("max_norm", max_norm),
        "max_loss": _spikes.check_limit("max_loss", max_loss),
    }
    return SpikePolicy(_spikes.start(1), Partial(_spike_limit_judge, **limits))


def _windowed(
    judge: Callable[..., Any], window: int, sigmas: float, fewer: int = 0
) -> SpikePolicy[SpikeState]:
    """A policy whose warm-up is `fewer` values shorter than that of `jls.spikes`."""
    size = _validate.host_interval("window", window, 2)
    warmup = _spikes.half(size) - fewer
    judge = Partial(judge, sigmas=_spikes.check_sigmas(sigmas), warmup=warmup)
    return SpikePolicy(_spikes.start(size), judge)


def _levanter_spikes_judge(state: SpikeState, *signals: Any, **numbers: Any) -> Any:
    window = _spikes.window_of(state)
    deviation = jnp.maximum(window.deviation, 1e-6 / window.unit)
    return _judge_all(state, signals, window._replace(deviation=deviation), **numbers)


def _maxtext_spikes_judge(state: SpikeState, *signals: Any, **numbers: Any) -> Any:
    window = _spikes.window_of(state, fewer=1)
    return _judge_all(state, signals, window, **numbers)


def _judge_all(
    state: SpikeState, signals: Any, window: Any, *, sigmas: Any, warmup: Any
) -> Any:
    """By limits out of a window that skipped values enter too."""
    limit = window.limit(sigmas, window.deviation, warmup)
    return _spikes.decide(state, signals, limit, sigmas=sigmas, skipped_enter=True)


def _spike_limit_judge(
    state: SpikeState, *signals: Any, max_norm: ArrayLike, max_loss: ArrayLike
) -> Any:
    limit = _spikes.limits(loss=max_loss, norm=max_norm)
    return _spikes.decide(state, signals, limit)
