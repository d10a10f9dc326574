# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. Values inside arrays are not checked; they may be traced."""

import contextlib
import functools
import inspect
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jls._text import at, describe, path_name

Word = TypeVar("Word", bound=str)

# XLA flushes subnormal numbers to zero. These are the smallest normal float32, and the
# largest power of two whose reciprocal is one: XLA turns `x / s` into `x * (1 / s)`.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def is_unchecked(value: Any) -> bool:
    """Whether `value` is an array or a tracer, whose number may not be known yet."""
    return isinstance(value, jax.Array | np.ndarray)


def is_real(value: Any) -> bool:
    """Whether `value` is a Python or numpy number, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def number(name: str, value: Any, rule: str, low: float, high: float) -> Any:
    """`value` as the float32 that the device will see, which lies in [low, high]."""
    if is_unchecked(value):
        kinds = jnp.floating, jnp.integer
        if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            got = f"an array of {value.dtype}"
            raise TypeError(f"{name} must be a real number, got {got}.")
        return value
    if not is_real(value):
        raise TypeError(
            f"{name} must be a real number, got {describe(value)}."
            f"{field_meant(value, 'init_scale')}{_optimizer_meant(name, value)}"
        )
    try:
        exact = float(value)
    except OverflowError:  # an int of more than 308 digits
        exact = math.inf if value > 0 else -math.inf
    with np.errstate(over="ignore"):
        rounded = float(np.float32(exact))
    if not low <= rounded <= high:
        raise ValueError(f"{name} must be {rule} (as float32), got {value!r}.")
    return rounded


def field_meant(value: Any, name: str) -> str:
    """The sentence for a result of `jls.calibrate` in the place of its field."""
    is_result = name in getattr(type(value), "_fields", ())
    return f" Pass its field: result.{name}." if is_result else ""


def _optimizer_meant(name: str, value: Any) -> str:
    """The sentence for an optimizer in the place of a number."""
    if not isinstance(value, optax.GradientTransformation):
        return ""
    if name == "learning_rate":
        return (
            " It is what the report shows: a schedule or a number. The optimizer comes "
            "second: jls.train_step(loss_fn, jls.loss_scaled(optimizer))."
        )
    if name == "decay":
        return " Write optax.chain(optimizer, jls.params_ema(decay))."
    return " Write jls.loss_scaled(optimizer, scaler)."


def host_number(name: str, value: Any, rule: str, low: float, high: float) -> float:
    """Like `number`, or an error if only the device knows the value."""
    if is_unchecked(value):
        raise TypeError(
            f"{name} must be a real number known before the function is traced, got "
            f"{value!r}. Pass a Python number."
        )
    return number(name, value, rule, low, high)


def scale_value(name: str, value: Any) -> Any:
    """A loss scale that the arithmetic of every device can take."""
    return number(name, value, "from 2^-126 to 2^126", SMALLEST, LARGEST)


def interval(name: str, value: Any, low: int = 1) -> Any:
    """A count, such as of optimizer steps: an integer that fits int32."""
    if is_unchecked(value):
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be an integer, got an array of {value.dtype}. Convert it "
                "with .astype(jnp.int32)."
            )
        return value
    if not (is_real(value) and hasattr(value, "__index__")):
        raise TypeError(f"{name} must be an integer, got {describe(value)}.")
    if not low <= value < 2**31:
        raise ValueError(f"{name} must be from {low} to 2^31 - 1, got {value!r}.")
    return int(value)


def host_interval(name: str, value: Any, low: int = 1) -> int:
    """Like `interval`, for Python to count with: not a tracer."""
    if is_unchecked(value):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name} must be an integer known before tracing, got an array of "
                f"{describe(value)}. Pass a Python number."
            ) from None
    return interval(name, value, low)


def float_dtype(name: str, value: Any) -> np.dtype:
    """A dtype of floats that a backward pass may have: 8 to 32 bits, with a sign."""
    rule = (
        f"{name} must be a floating-point dtype of 8 to 32 bits with a sign, such as "
        "jnp.float16, jnp.bfloat16 or jnp.float8_e5m2,"
    )
    if is_unchecked(value):
        raise TypeError(f"{rule} got an array of {value.dtype}: pass its dtype.")
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{rule} got {value!r}.") from None
    if value is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{rule} got {value if value is None else dtype}.")
    info = jnp.finfo(dtype)
    if not 8 <= info.bits <= 32 or info.nmant == 0:
        raise ValueError(f"{rule} got {dtype}.")
    return dtype


def function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function, got {describe(value)}.{_call_meant(value)}"
        )
    if isinstance(value, type):
        raise TypeError(f"{name} must be a function, got the class {value.__name__}.")
    if all(hasattr(value, method) for method in ("bind", "apply", "lazy_init")):
        raise TypeError(
            f"{name} must be a function, got the Linen module {type(value).__name__}, "
            "which is called by its apply. Pass a function that calls that."
        )


def _call_meant(value: Any) -> str:
    """The sentence for what a function has returned in the place of the function."""
    if is_transformation(value):
        return ""
    if hasattr(value, "apply"):  # of Haiku
        return " Pass a function of the parameters and the batch that calls its apply."
    arrays, trees = jax.Array | np.ndarray, tuple | list | dict
    leaves = jax.tree.leaves(value) if isinstance(value, arrays | trees) else []
    is_result = leaves and all(isinstance(leaf, arrays) for leaf in leaves)
    return " Pass the function itself, without calling it." if is_result else ""


def signature_of(function: Any) -> inspect.Signature | None:
    """The parameters of a function; None if unknown. A decorator may take others.

    Of an object of a library, such as `nnx.jit` makes, it is that of what is inside.
    """
    for follow in (False, True):
        with contextlib.suppress(TypeError, ValueError):  # a built-in may have none
            return inspect.signature(function, follow_wrapped=follow)
    return None


def traceable(name: str, value: Any) -> None:
    """A function that JAX can trace."""
    function(name, value)
    if isinstance(value, jax.stages.Compiled):
        raise TypeError(
            f"{name} must be a function that JAX can trace, got one that is compiled "
            "ahead of time. Pass the function that was compiled."
        )


def flag(name: str, value: Any, allow_none: bool = False) -> Any:
    """A switch that Python reads."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if value is None and allow_none:
        return None
    rule = "True, False or None" if allow_none else "True or False"
    raise TypeError(f"{name} must be {rule}, got {describe(value)}.")


class TracedError(ValueError, TypeError):
    """A function of the host got a traced array; for JAX this is a TypeError."""


def concrete(name: str, tree: Any, inside: str = "") -> None:
    """Raises if `tree` is traced; a message may say what to write `inside` of jit."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tracer):
            raise TracedError(
                f"{name} must be concrete, got a traced array{at(path_name(path))}: "
                f"call this outside jit, on what the step returned.{inside}"
            )
    not_donated(name, tree)


def not_donated(name: str, tree: Any) -> None:
    """Raises if an array of `tree` was donated."""
    for leaf in jax.tree.leaves(tree):
        is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        if is_known and leaf.is_deleted():
            raise ValueError(
                f"{name} must be in memory, got one that was donated to an earlier "
                "step. Pass what that step returned: params, opt_state, report = "
                "step(params, opt_state, batch)."
            )


def is_transformation(value: Any) -> bool:
    """Whether `value` is an optimizer: an object with `init` and `update`."""
    functions = (getattr(value, name, None) for name in ("init", "update"))
    return not isinstance(value, type) and all(map(callable, functions))


def transformation(inner: Any, order: str) -> optax.GradientTransformationExtraArgs:
    """A transformation, or an object with its methods, that takes extra arguments."""
    if not is_transformation(inner):
        raise TypeError(
            "inner must be an optax.GradientTransformation, e.g. optax.adamw(3e-4), or "
            f"an object with init and update, got {describe(inner)}. The order is "
            f"{order}."
        )
    if isinstance(inner, optax.GradientTransformation) and not isinstance(
        inner, optax.GradientTransformationExtraArgs
    ):
        return optax.with_extra_args_support(inner)
    update = _without_unknown_arguments(inner.update)
    return optax.GradientTransformationExtraArgs(inner.init, update)


def _without_unknown_arguments(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update`, given `value`, `loss` and `grad` only if its signature has them.

    These come without being asked for; any other name that it does not know is an
    error.
    """
    try:
        parameters = inspect.signature(update).parameters
    except ValueError:  # a built-in function may have none
        parameters = {}
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return update
    unknown = {"value", "loss", "grad"} - parameters.keys()

    @functools.wraps(update)
    def update_with_extra(updates, state, params=None, **extra):
        taken = {name: x for name, x in extra.items() if name not in unknown}
        return update(updates, state, params, **taken)

    return update_with_extra


def choice(name: str, value: Word, choices: Sequence[str]) -> Word:
    """One of the words in `choices`."""
    rule = f"{name} must be one of {', '.join(map(repr, choices))}"
    if not isinstance(value, str):
        raise TypeError(f"{rule}, got {describe(value)}.")
    if value not in choices:
        raise ValueError(f"{rule}, got {value!r}.")
    return value


def ascending(given: Mapping[str, Any]) -> dict[str, Any]:
    """Loss scales by name; raises unless each is at most the next."""
    scales = [(name, scale_value(name, x), x) for name, x in given.items()]
    known = [scale for scale in scales if not is_unchecked(scale[1])]
    for (name, low, a), (other, high, b) in itertools.combinations(known, 2):
        if low > high:
            raise ValueError(f"{name} must be <= {other}, got {a!r} > {b!r}.")
    return {name: scale for name, scale, _ in scales}


def scaler_state(state: Any, state_type: Any, exact: bool = False) -> None:
    """Raises unless `state` has the fields that a scaler with such states reads."""
    fields, needed = set(getattr(state, "_fields", ())), set(state_type._fields)
    if not (fields == needed if exact else fields >= needed):
        raise TypeError(
            f"state must be the scaler's own, a {state_type.__name__} as scaler.init() "
            f"makes it, got {type(state).__name__}. For a state of jls.loss_scaled, "
            "pass opt_state.scaler_state."
        )
