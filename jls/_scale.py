# SPDX-License-Identifier: Apache-2.0
"""Scale and unscale, and differentiate in between: true loss and true gradients.

Both maps are linear and compute in at least float32.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

from jls import _mistakes, _validate
from jls._bfloat16 import models_read_wide, read_wide, stored_narrow, widened
from jls._nnx import modules_in
from jls._notes import note, noted
from jls._state import find_scaler_states, scaler_state_in, wrappers_in
from jls._text import describe, naming_arguments
from jls._tree import Tree, check_holds, is_array, is_differentiable, is_inexact, widen

P = ParamSpec("P")
Aux = TypeVar("Aux")


def scale(state: Any, tree: Tree) -> Tree:
    """Returns `tree` times the loss scale, in at least float32.

    Differentiable and linear. Scale a loss with it, or let `jls.value_and_grad` do it.

    Args:
      state: anything that carries exactly one loss scale.
      tree: a loss, or any pytree. Leaves that are not floating point pass untouched.

    Returns:
      A pytree like `tree`; floating-point leaves narrower than float32 become float32.

    Raises:
      TypeError: if `tree` is None, or has leaves and none that is floating point.
      ValueError: if `state` carries no loss scale, or several, or stacked ones.

    Warns:
      JlsWarning: at trace time, if `tree` is a float16 scalar. JAX casts its
        cotangent, which is the loss scale, back to float16: over 2**15 it overflows.

    Example:
      >>> state = jls.static(1024.0).init()
      >>> jls.scale(state, jnp.bfloat16(0.5))
      Array(512., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740,
      section 3.2.
    """
    scaler_state = _scaler_state_of("scale", state, tree)
    check_holds("tree", tree, is_differentiable, "floating-point numbers")
    return _scaled(scaler_state, tree)


def _scaled(scaler_state: Any, tree: Tree) -> Tree:
    loss: Any = tree
    if getattr(loss, "dtype", None) == jnp.float16 and jnp.shape(loss) == ():
        _mistakes.warn(
            "the loss is float16, so its gradient starts from the loss scale cast to "
            "float16: every step at a scale over 2^15 overflows. Reduce the loss in "
            "float32, e.g. losses.astype(jnp.float32).mean()."
        )
    loss_scale = scaler_state.loss_scale
    factor = functools.cache(lambda dtype: jnp.asarray(loss_scale, dtype))
    scaled = jax.tree.map(lambda leaf: _times(leaf, factor), tree)
    note("scaled", scaled)
    return scaled


def unscale(state: Any, tree: Tree) -> Tree:
    """Returns `tree` divided by the loss scale, in at least float32.

    Unscale with the state that scaled, before it is adjusted.

    Args:
      state: anything that carries exactly one loss scale.
      tree: gradients. Leaves that are not floating point pass untouched.

    Returns:
      A pytree like `tree`; floating-point leaves narrower than float32 become float32.
      Exact if the scale is a power of two; any other rounds twice.

    Raises:
      ValueError: if `state` carries no loss scale, or several, or stacked ones.

    Example:
      >>> state = jls.static(2.0**15).init()
      >>> jls.unscale(state, [jnp.float16(2**-14), 3])
      [Array(1.8626451e-09, dtype=float32), 3]
    """
    return _unscaled(_scaler_state_of("unscale", state, tree), tree)


def _unscaled(scaler_state: Any, tree: Tree) -> Tree:
    @functools.cache
    def factor(dtype):
        # XLA CPU would write the results of a division to memory. A product it repeats
        # wherever the gradients are read.
        return lax.reciprocal(jnp.asarray(scaler_state.loss_scale, dtype))

    return jax.tree.map(lambda leaf: _times(leaf, factor), tree)


def _scaler_state_of(name: str, state: Any, tree: Any) -> Any:
    try:
        return scaler_state_in(state)
    except ValueError:
        if find_scaler_states(tree) and not find_scaler_states(state):
            write = f"Write jls.{name}(state, tree)."
            raise ValueError(f"state must come first. {write}") from None
        raise


def _times(leaf: Any, factor: Callable[[Any], Array]) -> Any:
    """`leaf` times the factor in its dtype; what is not floating point as it is."""
    if not is_inexact(leaf):
        return leaf
    array = widen(leaf)
    if jnp.iscomplexobj(array):
        # Complex arithmetic would turn (inf + 1j) * (scale + 0j) into inf + NaN j.
        real, imag = array.real, array.imag
        by = factor(real.dtype)
        return lax.complex(lax.mul(real, by), lax.mul(imag, by))
    return lax.mul(array, factor(array.dtype))


@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[Concatenate[Any, P], tuple[Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[Concatenate[Any, P], tuple[tuple[Array, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[Concatenate[Any, P], Any]: ...
@naming_arguments(aux="has_aux", argnum="argnums")
def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[..., Any]:
    """Returns a function that computes the loss and its gradients under a loss scale.

    It multiplies the loss by the loss scale, differentiates, and divides the gradients
    by it, so that small ones do not vanish in float16 on the way. You see only unscaled
    values: clip, log, average and accumulate them as usual. It does not adjust the
    scale; the optimizer made by `jls.loss_scaled` does.

    Args:
      fun: returns the loss, a real floating-point scalar, or `(loss, aux)`. Reduce a
        float16 loss in float32.
      argnums: which arguments of `fun` to differentiate, an int or a tuple of ints;
        `state` is not counted.
      has_aux: whether `fun` returns `(loss, aux)`.
      transform: the function that differentiates: `jax.value_and_grad`,
        `nnx.value_and_grad`, `eqx.filter_value_and_grad`, or a `functools.partial` of
        one. It is called as `transform(f, has_aux=True)`, with `argnums=` only when
        that is not 0.

    Returns:
      `f(state, *args, **kwargs)` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. With the state of a `jls.bfloat16_params`, `fun` gets the
      bfloat16 parameters widened to float32: then their gradients add up in float32.
      The loss is what `fun` returned, and finite whenever that
      is, even if the gradients are not. Loss and gradients are in at least float32;
      leaves that are not floating point pass untouched.

    Raises:
      TypeError: at once, if `fun` or `transform` is not a function, `argnums` no
        integers, or `has_aux` not a bool; when called, if the state or the parameters
        are passed by keyword, if the parameters or the loss are not floating point or
        are in an NNX model that `jax.value_and_grad` would differentiate, if what `fun`
        returns is not a pair with `has_aux`, or if `transform` is of another form.
      ValueError: when called, if the loss is not a scalar, if `state` carries no loss
        scale, or several, or comes after the parameters, or if its wrapper is inside an
        `optax.MultiSteps`, which would keep a NaN for ever.

    Warns:
      JlsWarning: at trace time, for a float16 loss (see `jls.scale`); if the loss comes
        from `jls.scale`; or if the parameters are arguments of a jitted function but
        the state is not, so that its scale could never move.

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
    return _with_loss_scale("value_and_grad", fun, argnums, has_aux, transform)


def _with_loss_scale(
    name: str,
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    transform: Callable[..., Any],
) -> Callable[..., Any]:
    """What `value_and_grad` returns; `name` is what the user has called."""
    _validate.function("fun", fun)
    _mistakes.check_loss_function("fun", fun)
    _validate.function("transform", transform)
    if transform is jax.value_and_grad:  # others may take more
        _mistakes.check_argnums(argnums)
    has_aux = _validate.flag("has_aux", has_aux)

    @_rename_like(fun)
    def with_loss_scale(state=_mistakes.NOT_GIVEN, /, *args, **kwargs):
        is_jax = transform is jax.value_and_grad
        _mistakes.check_positions(state, args, kwargs, argnums if is_jax else ())
        scaler_state = _mistakes.scaler_state_first(state, args, name)
        for found in wrappers_in(state):
            found.inside()
        if is_jax:
            _mistakes.check_differentiable(_mistakes.differentiated(args, argnums))
        # `functools.partial(transform, argnums=...)` has its own.
        options = getattr(transform, "keywords", {})
        numbers = _mistakes.numbers_of(options.get("argnums", argnums))
        chosen = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
        shapes = stored_narrow(*args)
        args = tuple(
            read_wide(state, x) if n in chosen and not modules_in(x) else x
            for n, x in enumerate(args)
        )
        with models_read_wide(state, [args[n] for n in chosen]):
            return differentiate(
                scaler_state, fun, args, kwargs, argnums, has_aux, transform, shapes
            )

    return with_loss_scale


def differentiate(
    scaler_state: Any,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: Any,
    has_aux: bool,
    transform: Callable[..., Any],
    shapes: list[Any],
) -> tuple[Any, Any]:
    """A call of the function that `value_and_grad` returns, under one loss scale.

    `shapes` are those of what was widened: see `stored_narrow`.
    """
    _mistakes.warn_of_stale_state(scaler_state, _mistakes.differentiated(args, argnums))
    is_jax = transform is jax.value_and_grad
    names = [] if is_jax else _in_order(fun, argnums, len(args), kwargs)
    by_name = {name: x for name, x in kwargs.items() if name not in names}

    def scaled(*given, **kwargs):
        count = len(given) - len(names)
        kwargs |= zip(names, given[count:], strict=True)
        with noted("scaled") as made, widened(shapes, *given[:count]):
            result = fun(*given[:count], **kwargs)
        loss, aux = _loss_and_aux(result, has_aux)
        _mistakes.warn_of_scaled_loss(loss, made)
        # The true loss travels as aux: scaled and divided again it would be NaN
        # whenever the scaled one overflows.
        return _noting(_scaled(scaler_state, loss)), (loss, aux)

    options = {} if argnums == 0 else {"argnums": argnums}
    differentiated = transform(scaled, has_aux=True, **options)
    value, grads = differentiated(*args, *map(kwargs.get, names), **by_name)
    if not (isinstance(value, tuple) and len(value) == 2):
        raise TypeError(
            "transform must be of the form of jax.value_and_grad, and return "
            f"((value, aux), grads) with has_aux=True, got {transform!r}."
        )
    _, (loss, aux) = value
    loss = widen(loss)
    grads = _unscaled(scaler_state, grads)
    return ((loss, aux) if has_aux else loss), grads


@naming_arguments(aux="has_aux", argnum="argnums")
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[Concatenate[Any, P], Any]:
    """Returns a function that computes gradients under a loss scale.

    This is `jls.value_and_grad` without the value.

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
    with_value = _with_loss_scale("grad", fun, argnums, has_aux, transform)

    @_rename_like(fun)
    def with_loss_scale(state=_mistakes.NOT_GIVEN, /, *args, **kwargs):
        value, grads = with_value(state, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return with_loss_scale


@jax.custom_jvp
def _noting(scaled: Any) -> Any:
    """The loss; notes if it follows what is differentiated."""
    return scaled


@_noting.defjvp
def _noting_derivative(primals, tangents):
    # JAX asks for no derivative of what does not follow.
    note("follows")
    return *primals, *tangents


def _rename_like(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.wraps` without the signature, since `state` comes first here."""

    def rename(wrapper):
        names = ("__module__", "__name__", "__qualname__", "__doc__")
        functools.update_wrapper(wrapper, fun, assigned=names, updated=())
        del wrapper.__wrapped__
        setattr(wrapper, _mistakes.GRADIENT, wrapper)
        return wrapper

    return rename


def _in_order(
    fun: Callable[..., Any], argnums: Any, count: int, kwargs: dict[str, Any]
) -> list[str]:
    """The keyword arguments to pass after `count` others: NNX takes none by keyword.

    Those that `argnums` may name are where a signature has them.
    """
    found: list[str] = []
    for is_inner in (False, True):
        with contextlib.suppress(TypeError, ValueError):  # a function may have none
            signature = inspect.signature(fun, follow_wrapped=is_inner)
            after = list(signature.parameters)[count:]
            found = found or list(itertools.takewhile(kwargs.__contains__, after))
    if max(_mistakes.numbers_of(argnums), default=0) >= count + len(found):
        return found
    return [*found, *(name for name in kwargs if name not in found)]


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits what the loss function returned and checks the loss."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "with has_aux=True the loss function must return the pair (loss, aux), "
            f"got {describe(result)}."
        )
    loss: Any = result[0] if has_aux else result
    aux: Any = result[1] if has_aux else None
    if not is_array(loss):
        raise TypeError(
            "the loss function must return one real floating-point scalar, got "
            f"{describe(loss)}. Return more as (loss, aux), with has_aux=True. If the "
            "function is differentiated already, pass the undecorated one."
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
