# SPDX-License-Identifier: Apache-2.0
"""The loss scaling of other systems, step for step, under their argument names.

Each function returns a `LossScaler` that moves the scale exactly as its namesake does,
with the defaults of its namesake, and is used like any other policy::

    optimizer = jls.loss_scaled(optax.adamw(3e-4), jls.presets.torch())

What no preset copies:

1. A scale that reaches 0 or inf: it stays in [2**-126, 2**126], with a floor of the
   system's own if that is higher.
2. A scale below the floor that jumps up to it on an overflow: it stays.
3. An exception when an overflow comes at the floor, or after too many of them: the
   step is skipped, and jls counts it.
4. Setters and constructors that check nothing: a wrong argument is an error here.
5. Steps that are not skipped since scaling is disabled: the guard always works.

The last bit may differ where a factor is no float32 number, which torch applies in
float64, and where a system divides by a factor that is no power of two, since jls
multiplies by the rounded reciprocal.
"""

from collections.abc import Callable

from jls import _cumulative, _dynamic, _hysteresis, _static, _validate
from jls._late_growth import late_growth as _late_growth
from jls._mindformers import mindformers_adaptive as mindformers_adaptive
from jls._types import LossScaler

_LOWEST, _HIGHEST = _validate.SMALLEST, _validate.LARGEST


def torch(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScaler:
    """Returns the policy of PyTorch's `torch.amp.GradScaler`.

    torch has no floor, and its scale can reach 0; here it stops at 2**-126, and at
    2**126 above. The last bit may differ where a factor is no float32 number.

    Args:
      init_scale: the first loss scale.
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, consecutive finite steps before a growth.
      enabled: False gives `jls.static(1.0)`, and the other arguments are not looked at.
        A step that is not finite is skipped all the same, which torch does not do.

    Returns:
      A `LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. torch checks the two factors only.

    Example:
      >>> scaler = jls.presets.torch(growth_interval=100)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(32768., dtype=float32)
    """
    if not _validate.flag("enabled", enabled):
        return _static.static(1.0)
    return _dynamic.dynamic(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=_LOWEST,
        max_scale=_HIGHEST,
    )


def paddle(
    enable: bool = True,
    init_loss_scaling: float = 65536.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> LossScaler:
    """Returns the policy of `paddle.amp.GradScaler`, as its code (3.3.1) has it.

    Paddle's scale can reach 0, and grow to inf and stay there; here it stays in
    [2**-126, 2**126]. For the rule on its documentation page see `paddle_doc`.

    Args:
      enable: False gives `jls.static(1.0)`, and the other arguments are not looked at.
        A step that is not finite is skipped all the same, which Paddle does not do.
      init_loss_scaling: the first loss scale.
      incr_ratio: > 1.
      decr_ratio: in (0, 1).
      incr_every_n_steps: >= 1, consecutive finite steps before a growth.
      decr_every_n_nan_or_inf: >= 1, consecutive non-finite steps before a backoff.
      use_dynamic_loss_scaling: False gives `jls.static(init_loss_scaling)`.

    Returns:
      A `LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Paddle checks the two ratios only.

    Example:
      >>> scaler = jls.presets.paddle(decr_every_n_nan_or_inf=2)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(65536., dtype=float32)
    """
    return _paddle(
        _dynamic.dynamic,
        enable,
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        decr_every_n_nan_or_inf,
        use_dynamic_loss_scaling,
    )


def paddle_doc(
    enable: bool = True,
    init_loss_scaling: float = 32768.0,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    use_dynamic_loss_scaling: bool = True,
) -> LossScaler:
    """Returns the policy that the documentation page of Paddle's GradScaler describes.

    Its defaults are other than the code's, and the non-finite steps that lead to a
    backoff are accumulated: a finite step in between does not reset their number. As in
    `paddle` the scale stays in [2**-126, 2**126].

    Args:
      enable: False gives `jls.static(1.0)`, and the other arguments are not looked at.
        A step that is not finite is skipped all the same, which Paddle does not do.
      init_loss_scaling: the first loss scale.
      incr_ratio: > 1.
      decr_ratio: in (0, 1).
      incr_every_n_steps: >= 1, consecutive finite steps before a growth.
      decr_every_n_nan_or_inf: >= 1, accumulated non-finite steps before a backoff.
      use_dynamic_loss_scaling: False gives `jls.static(init_loss_scaling)`.

    Returns:
      A `LossScaler`.

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
    return _paddle(
        _cumulative.cumulative,
        enable,
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        decr_every_n_nan_or_inf,
        use_dynamic_loss_scaling,
    )


def mindspore(scale_value: float, scale_factor: float, scale_window: int) -> LossScaler:
    """Returns the policy of `mindspore.amp.DynamicLossScaler`.

    Also that of `nn.DynamicLossScaleUpdateCell`, which can grow to inf; here the scale
    stops at 2**126. MindSpore backs off by a division, so that the last bit may differ
    where `scale_factor` is no power of two.

    Args:
      scale_value: the first loss scale, >= 1, which is also the floor.
      scale_factor: > 1; multiplies on a growth and divides on a backoff. MindSpore also
        takes 1, which is `jls.static(scale_value)`.
      scale_window: >= 1, consecutive finite steps before a growth.

    Returns:
      A `LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range.

    Example:
      >>> scaler = jls.presets.mindspore(1024, scale_factor=2, scale_window=1000)
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(512., dtype=float32)
    """
    factor = _validate.raising_factor("scale_factor", scale_factor)
    return _dynamic.dynamic(
        _validate.number("scale_value", scale_value, "from 1 to 2**126", 1.0, _HIGHEST),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=_validate.interval("scale_window", scale_window),
        min_scale=1.0,
        max_scale=_HIGHEST,
    )


def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> LossScaler:
    """Returns the policy of `keras.optimizers.LossScaleOptimizer` (Keras 3).

    Keras has no bounds, and its scale can reach 0 or inf; here it stays in
    [2**-126, 2**126].

    Args:
      initial_scale: the first loss scale.
      dynamic_growth_steps: >= 1, consecutive finite steps before it doubles. On each
        step that is not finite it halves.

    Returns:
      A `LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Keras checks neither.

    Example:
      >>> scaler = jls.presets.keras()
      >>> scaler.adjust(scaler.init(), False).loss_scale
      Array(16384., dtype=float32)
    """
    return _dynamic.dynamic(
        _validate.scale_value("initial_scale", initial_scale),
        growth_interval=_validate.interval(
            "dynamic_growth_steps", dynamic_growth_steps
        ),
        min_scale=_LOWEST,
        max_scale=_HIGHEST,
    )


def flax(
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = None,
) -> LossScaler:
    """Returns the policy of `flax.training.dynamic_scale.DynamicScale`.

    The scale grows on finite step `growth_interval` + 1, as it does in all releases up
    to 0.12.12 although the argument is documented otherwise. Pass one less for a Flax
    that has mended it. Its cap is the largest float32 number; here it is 2**126.

    Args:
      growth_factor: > 1.
      backoff_factor: in (0, 1).
      growth_interval: >= 1, consecutive finite steps before the one that grows.
      scale: the first loss scale, >= `minimum_scale`.
      minimum_scale: the floor; None for 2**-126, the smallest normal float32 number and
        Flax's default. (Flax's own None means no floor, and the scale can reach 0.)

    Returns:
      A `LossScaler`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if one is out of range. Flax checks none.

    Example:
      >>> scaler = jls.presets.flax(growth_interval=1)
      >>> state = scaler.adjust(scaler.init(), True)
      >>> state.loss_scale, scaler.adjust(state, True).loss_scale
      (Array(65536., dtype=float32), Array(131072., dtype=float32))
    """
    floor = _LOWEST if minimum_scale is None else minimum_scale
    checked = _validate.ascending(minimum_scale=floor, scale=scale)
    return _dynamic.dynamic(
        checked["scale"],
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=_validate.interval("growth_interval", growth_interval) + 1,
        min_scale=checked["minimum_scale"],
        max_scale=_HIGHEST,
    )


def deepspeed(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
) -> LossScaler:
    """Returns the policy of DeepSpeed's `DynamicLossScaler`.

    The defaults are those of the "fp16" section of its configuration. The first growth
    of a run and the first after an overflow come on finite step `scale_window` + 1, the
    next ones `scale_window` steps apart. DeepSpeed has no cap; here the scale stops at
    2**126. On an overflow at the floor it raises an exception; here the scale stays,
    and the step is skipped and counted.

    Args:
      init_scale: the first loss scale; 2**initial_scale_power of the configuration.
      scale_factor: > 1; multiplies on a growth and divides on a backoff. DeepSpeed does
        so in float64, so that the last bits may differ where it is no power of two.
      scale_window: >= 1, finite steps before a growth; loss_scale_window of the
        configuration.
      min_scale: the floor, <= `init_scale`; min_loss_scale of the configuration.
      delayed_shift: >= 1, the non-finite step that first backs off; "hysteresis" of the
        configuration.
      consecutive_hysteresis: True lets any finite step refill that budget, False only a
        growth.

    Returns:
      A `LossScaler`.

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
    factor = _validate.raising_factor("scale_factor", scale_factor)
    refilled_by_finite = _validate.flag(
        "consecutive_hysteresis", consecutive_hysteresis
    )
    return _late_growth(
        _hysteresis.hysteresis(
            init_scale,
            growth_factor=factor,
            backoff_factor=1 / factor,
            growth_interval=_validate.interval("scale_window", scale_window),
            hysteresis=_validate.interval("delayed_shift", delayed_shift),
            refill="finite" if refilled_by_finite else "growth",
            min_scale=min_scale,
            max_scale=_HIGHEST,
        )
    )


def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> LossScaler:
    """Returns the policy of Megatron-LM's `DynamicGradScaler`.

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
      A `LossScaler`.

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
    checked = _validate.ascending(min_scale=min_scale, initial_scale=initial_scale)
    return _hysteresis.hysteresis(
        checked["initial_scale"],
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=checked["min_scale"],
        max_scale=_HIGHEST,
    )


def _paddle(
    policy: Callable[..., LossScaler],
    enable: bool,
    init_loss_scaling: float,
    incr_ratio: float,
    decr_ratio: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int,
    use_dynamic_loss_scaling: bool,
) -> LossScaler:
    if not _validate.flag("enable", enable):
        return _static.static(1.0)
    scale = _validate.scale_value("init_loss_scaling", init_loss_scaling)
    if not _validate.flag("use_dynamic_loss_scaling", use_dynamic_loss_scaling):
        return _static.static(scale)
    return policy(
        scale,
        growth_factor=_validate.raising_factor("incr_ratio", incr_ratio),
        backoff_factor=_validate.lowering_factor("decr_ratio", decr_ratio),
        growth_interval=_validate.interval("incr_every_n_steps", incr_every_n_steps),
        backoff_interval=_validate.interval(
            "decr_every_n_nan_or_inf", decr_every_n_nan_or_inf
        ),
        min_scale=_LOWEST,
        max_scale=_HIGHEST,
    )
