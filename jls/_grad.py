# SPDX-License-Identifier: Apache-2.0
"""Differentiate under a loss scale: the true loss and the true gradients come out."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jls import _validate
from jls._locate import locate
from jls._scale import scale, unscale
from jls._tree import is_array


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Returns a function that computes the loss and its gradients under a loss scale.

    The gradients are computed of the loss times the loss scale and divided by it
    afterwards, so that small ones do not vanish in float16 on the way. Nothing scaled
    is visible: clip, log, average and accumulate the result as usual. The scale is not
    adjusted; the optimizer made by `jls.loss_scaled` does so.

    Args:
      fun: returns the loss, a real floating-point scalar, or `(loss, aux)`. Reduce a
        float16 loss in float32.
      argnums: which arguments of `fun` to differentiate, an int or a tuple of ints;
        `state` is not counted.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: what differentiates: `jax.value_and_grad`, `nnx.value_and_grad`,
        `eqx.filter_value_and_grad`, or a `functools.partial` of one. It is called as
        `transform(f, has_aux=True)`, with `argnums=` only when that is not 0.

    Returns:
      `f(state, *args, **kwargs)` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. The loss is what `fun` returned, finite whenever that is,
      also when the gradients are not. Gradients have at least float32; leaves that are
      not floating point pass untouched.

    Raises:
      TypeError: at once, if `fun` or `transform` is no function, or `has_aux` no bool;
        when called, if the loss is not real floating point, or not a pair
        with `has_aux`, or if `transform` is of another form.
      ValueError: when called, if the loss is not a scalar, or `state` carries no loss
        scale, or several.

    Warns:
      UserWarning: at trace time, for a float16 loss; see `jls.scale`.

    Example:
      >>> state = jls.dynamic(2.0**15).init()
      >>> def loss_fn(w, x):
      ...     return jnp.sum((w * x).astype(jnp.float32)) * 1e-6
      >>> w = jnp.ones(2, jnp.float16)
      >>> loss, grads = jls.value_and_grad(loss_fn)(state, w, jnp.float16(0.01))
      >>> grads
      Array([1.0004442e-08, 1.0004442e-08], dtype=float32)
      >>> jax.grad(loss_fn)(w, jnp.float16(0.01))
      Array([0., 0.], dtype=float16)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      section 3.2.
    """
    _validate.function("fun", fun)
    _validate.function("transform", transform)
    has_aux = _validate.flag("has_aux", has_aux)

    @_named_after(fun)
    def with_loss_scale(state, /, *args, **kwargs):
        scaler_state = locate(state)

        def scaled(*args, **kwargs):
            loss, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
            # The true loss travels as aux: scaled and divided again it would be NaN
            # whenever the scaled one overflows.
            return scale(scaler_state, loss), (loss, aux)

        options = {} if argnums == 0 else {"argnums": argnums}
        differentiated = transform(scaled, has_aux=True, **options)
        value, grads = differentiated(*args, **kwargs)
        if not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(
                "transform must be of the form of jax.value_and_grad, and return "
                f"((value, aux), grads) with has_aux=True, got {transform!r}."
            )
        _, (loss, aux) = value
        return ((loss, aux) if has_aux else loss), unscale(scaler_state, grads)

    return with_loss_scale


def grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Returns a function that computes gradients under a loss scale.

    `jls.value_and_grad` without the value; all that is said there holds.

    Args:
      fun: returns the loss, or `(loss, aux)`.
      argnums: which arguments of `fun` to differentiate; `state` is not counted.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: of the form of `jax.value_and_grad`, not of `jax.grad`.

    Returns:
      `f(state, *args, **kwargs)` that returns `grads`, or `(grads, aux)`.

    Example:
      >>> state = jls.static(1024.0).init()
      >>> jls.grad(lambda w: jnp.sum(w**2))(state, jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """
    with_value = value_and_grad(fun, argnums, has_aux, transform=transform)

    @_named_after(fun)
    def with_loss_scale(state, /, *args, **kwargs):
        value, grads = with_value(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return with_loss_scale


def _named_after(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Like `functools.wraps`, without the signature: `state` comes first here."""

    def rename(wrapper):
        names = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(wrapper, fun, assigned=names, updated=())
        del wrapper.__wrapped__
        return wrapper

    return rename


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits what the loss function returned and checks the loss."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "with has_aux=True the loss function must return the pair (loss, aux), "
            f"got {type(result).__name__}."
        )
    loss: Any = result[0] if has_aux else result
    aux: Any = result[1] if has_aux else None
    if not is_array(loss):
        raise TypeError(
            "the loss function must return one real floating-point scalar, got "
            f"{type(loss).__name__}. Return more as (loss, aux), with has_aux=True."
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            "the loss must be real floating point, got dtype "
            f"{jnp.result_type(loss)}. Only such a loss has gradients to scale."
        )
    if jnp.shape(loss) != ():
        raise ValueError(
            f"the loss must be a scalar of shape (), got shape {jnp.shape(loss)}. "
            "Reduce it in float32, e.g. losses.astype(jnp.float32).mean()."
        )
    return loss, aux
