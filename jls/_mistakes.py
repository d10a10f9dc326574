# SPDX-License-Identifier: Apache-2.0
"""Mistakes in calls of jls, each with the line to write.

Errors are for what no right program does; warnings also for what is only slow.
"""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jls._nnx import has_variables, modules_in
from jls._notes import note, noted
from jls._program.jaxprs import is_argument_of_jit, is_literal
from jls._state import (
    find,
    find_scaler_states,
    is_wrapper_state,
    no_loss_scale,
    scaler_state_in,
)
from jls._text import at, describe, path_name
from jls._tree import difference, floats_of, is_inexact, named_floats
from jls._types import JlsWarning, StaticState

_LIBRARIES = {"jls", "jax", "optax", "flax", "equinox", "contextlib"}


def warn(message: str) -> None:
    """Warns at the line of the user's program that led here."""
    # The innermost frame outside of the libraries, and how many calls away it is.
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, JlsWarning, stacklevel=level)


def program_beside(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The program of `fun`, and the shapes of its results, to look at.

    Warnings are given where the step itself is taken, and so are notes of its updates.
    """
    with warnings.catch_warnings(), noted("update", apart=True):
        warnings.simplefilter("ignore", JlsWarning)
        return jax.make_jaxpr(fun, return_shape=True)(*args)


# Mistakes with `value_and_grad`.


GRADIENT = "_gradient_of_jls"  # what `value_and_grad` returns, in itself


def check_loss_function(name: str, fun: Any) -> None:
    """Raises if Equinox or jls differentiates `fun`, the argument `name`, already."""
    if getattr(fun, GRADIENT, None) is fun:  # `functools.wraps` copies it
        raise TypeError(
            f"{name} must be the loss function itself, got what jls.value_and_grad or "
            "jls.grad returned. Pass the function that returns the loss."
        )
    kind = type(fun)
    if kind.__module__.startswith("equinox") and "Grad" in kind.__name__:
        raise TypeError(
            f"{name} must be the loss function itself, got one that Equinox "
            "differentiates already. Pass the undecorated function: "
            "jls.train_step(loss_fn, optimizer), or jls.value_and_grad(loss_fn, "
            "transform=eqx.filter_value_and_grad)."
        )


def check_argnums(argnums: Any) -> None:
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    if not all(isinstance(number, int | np.integer) for number in numbers):
        raise TypeError(
            f"argnums must be an integer or several, got {describe(argnums)}. The "
            "arguments go to the function that is returned: "
            "jls.value_and_grad(loss_fn)(opt_state, params, batch)."
        )


def differentiated(args: tuple[Any, ...], argnums: Any) -> list[Any]:
    """The arguments that `argnums` names."""
    return [args[n] for n in numbers_of(argnums) if -len(args) <= n < len(args)]


def numbers_of(argnums: Any) -> list[int]:
    """The numbers in `argnums`; an `nnx.DiffState` has one in it."""
    chosen = argnums if isinstance(argnums, tuple | list) else (argnums,)
    return [getattr(one, "argnum", one) for one in chosen]


NOT_GIVEN = inspect.Parameter.empty  # as a default: a signature then shows none


def check_positions(
    state: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any
) -> None:
    """Raises unless the state, and what `argnums` names, were passed by position.

    Args:
      state: the state, or `NOT_GIVEN`.
      args: the arguments after it.
      kwargs: the keyword arguments.
      argnums: what to differentiate; () if another transform knows.
    """
    names = ", ".join(f"{name}=" for name in kwargs)
    if state is NOT_GIVEN:
        raise TypeError(
            f"state must come first, by position, got {names or 'no argument'}. Write "
            "f(opt_state, params, batch)."
        )
    lost = next((n for n in numbers_of(argnums) if n >= len(args)), None)
    if lost is not None:
        got = f"{names} by keyword" if names else "nothing more"
        raise TypeError(
            f"what is differentiated, argument {lost} after state, must be passed by "
            f"position, got {got}. Write f(opt_state, params, batch)."
        )


def scaler_state_first(state: Any, args: tuple[Any, ...], name: str) -> Any:
    """The one scaler state in `state`, or an error that says what comes first.

    `name` is that of the function that needs it.
    """
    try:
        return scaler_state_in(state)
    except ValueError:
        if find_scaler_states(state):
            raise
    if args and find_scaler_states(args[0]):
        raise ValueError(
            f"state must come first, got {type(state).__name__} before "
            f"{type(args[0]).__name__}. The order is f(opt_state, params, ...)."
        )
    if has_variables(state):
        write = "First comes the nnx.Optimizer: f(optimizer, model, batch)."
        raise no_loss_scale(state, write)
    raise no_loss_scale(
        state,
        "First comes a ScalerState, or the state of an optimizer made by "
        "jls.loss_scaled or jls.skip_nonfinite: "
        f"jls.{name}(loss_fn)(opt_state, params, batch).",
    )


def check_differentiable(args: list[Any]) -> None:
    """Raises, before `jax.value_and_grad` does, unless all leaves are inexact.

    It would take an NNX model whose leaves are, and lose what the loss changes in it.
    """
    for arg in args:
        for model in modules_in(arg)[:1]:
            raise TypeError(
                "the parameters of an NNX model must be differentiated by NNX, got "
                f"{type(model).__name__} under jax.value_and_grad, which drops what "
                "the loss function changes in the model, such as batch statistics. "
                f"{_FOR_NNX}"
            )
        leaves, _ = jax.tree_util.tree_flatten_with_path(arg)
        bad = next((pair for pair in leaves if not is_inexact(pair[1])), None)
        if bad is None:
            continue
        what = f"{describe(bad[1])}{at(path_name(bad[0]))}"
        raise TypeError(
            "the first argument after state holds the parameters, which must be "
            f"floating point, got {type(arg).__name__} with {what}. {_instead(arg)}"
        )


_FOR_NNX = (
    "For an NNX model pass the transform: "
    "jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)."
)


def is_equinox(node: Any) -> bool:
    """Whether it is a module of Equinox."""
    return any(base.__module__.startswith("equinox") for base in type(node).__mro__)


def _instead(arg: Any) -> str:
    if has_variables(arg):
        return _FOR_NNX
    if is_equinox(arg):
        return (
            "For an Equinox model pass the transform: "
            "jls.value_and_grad(loss_fn, transform=eqx.filter_value_and_grad)."
        )
    if hasattr(arg, "tx"):
        return "Of a TrainState pass the parameters: f(state, state.params, ...)."
    return "Write f(state, params, batch), or choose other arguments with argnums=."


def warn_of_stale_state(scaler_state: Any, args: list[Any]) -> None:
    """Warns if a jitted function has the loss scale in it, as a constant."""
    is_constant = not isinstance(scaler_state.loss_scale, Tracer)
    if not is_constant or isinstance(scaler_state, StaticState):
        return
    tracers = [x for x in jax.tree.leaves(args) if isinstance(x, Tracer)]
    if any(map(is_argument_of_jit, tracers)):
        warn(
            "the parameters are arguments of a jitted function, but the state is not: "
            "its loss scale is compiled in and will never move. Pass the state to the "
            "jitted function too, e.g. step(params, opt_state, batch). If it must not "
            "move, use jls.static."
        )


def warn_of_scaled_loss(loss: Any, scaled: list[Any]) -> None:
    """Warns if `loss` is the very array that `jls.scale` returned."""
    if any(loss is one for one in scaled):
        warn(
            "the loss function returned what jls.scale made, and jls.value_and_grad "
            "scales it once more. Return the true loss, without jls.scale."
        )


# Mistakes with a whole step.


class EagerCalls:
    """Counts the calls of one step that ran operation by operation."""

    def __init__(self) -> None:
        self.count = 0

    def warn_at_second(
        self, params: Any, arguments: Any, write: Callable[[], str]
    ) -> None:
        """Warns if this is such a call of a model of some size, and the second.

        Args:
          params: the parameters of this call.
          arguments: all arguments.
          write: makes the line that jits the step.
        """
        if self.count > 1 or is_jit_disabled():
            return
        if sum(map(jnp.size, floats_of(params))) < _MANY_PARAMETERS:
            return
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
            return
        if isinstance(jnp.zeros(()), Tracer):  # the step closes over all that it has
            return
        if note("eager step"):  # by a tool of jls, which runs a step as it is
            return
        self.count += 1
        if self.count == 2:
            warn(
                "the step is not jitted: it runs operation by operation, many times "
                f"slower. Write step = {write()}, once, outside of the loop."
            )


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is on."""
    return bool(getattr(jax.config, "jax_disable_jit", False))


def check_is_of_nnx(arrays: Any) -> None:
    """Raises if JAX itself transforms the step that asks, of an NNX model.

    Args:
      arrays: those of the model and the optimizer.
    """
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        return
    frame, names = sys._getframe(), list[str]()
    while frame and _package(frame.f_globals.get("__name__")) == "jls":
        frame = frame.f_back
    while frame and _package(frame.f_globals.get("__name__")) in ("jax", "equinox"):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    caller = _package(frame.f_globals.get("__name__")) if frame else ""
    is_transformed = bool(names) and not _LOOKS.intersection(names)
    if is_transformed and caller not in ("jls", "flax"):
        raise TypeError(
            "the step must be jitted by NNX, got a model and an optimizer that "
            "jax.jit has copied: what the step changes in them is lost. Write step = "
            "nnx.jit(jls.train_step(loss_fn))."
        )


# What only looks at a program, and runs none.
_LOOKS = {"eval_shape", "make_jaxpr", "make_jaxpr_f"}

# Below, a loop of eager steps is a test, or a look at how it works.
_MANY_PARAMETERS = 2**16


# Mistakes with an optimizer.


def check_no_state(params: Any) -> None:
    """Raises if a `TrainState` comes in the place of the parameters in it."""
    if hasattr(params, "opt_state") and find(params, is_wrapper_state):
        raise TypeError(
            f"params must be the parameters alone, got {type(params).__name__}, which "
            "holds a state of jls too. Pass state.params."
        )


def check_shapes(grads: list[Any], params: list[Any] | None, updates: Any) -> None:
    """Raises if a gradient has another shape than its parameter.

    An axis of examples in front is allowed, as `optax.contrib.dpsgd` takes it.

    Args:
      grads: the floating-point leaves of the gradients.
      params: their parameters, None if they are not known.
      updates: the gradients.
    """
    for i, param in enumerate(params or []):
        shape, wanted = np.shape(grads[i]), np.shape(param)
        if wanted not in (shape, shape[1:]):
            raise ValueError(
                f"updates must be the gradients of params, but have shape {shape}"
                f"{at(named_floats(updates)[0][i])}, where params have {wanted}. "
                f"{_OF_THESE}"
            )


_OF_THESE = "Pass what jls.value_and_grad returned for these params."


def warn_of_narrowed(grads: list[Any], params: list[Any] | None) -> None:
    """Warns of float16 gradients of wider parameters: the small ones are lost.

    Args:
      grads: the floating-point leaves of the gradients.
      params: their parameters, None if they are not known.
    """
    wide = {
        str(jnp.result_type(param))
        for grad, param in zip(grads, params or [], strict=params is not None)
        if getattr(grad, "dtype", None) == jnp.float16
        and is_inexact(param)
        and jnp.finfo(jnp.result_type(param)).bits >= 32
    }
    if wide:
        warn(
            f"update got float16 gradients of {' and '.join(sorted(wide))} parameters: "
            "those below 2^-25 have become 0, which loss scaling is there to prevent. "
            "Pass the float32 gradients of jls.value_and_grad as they are; cast after "
            "the update, and average over devices in float32."
        )


def called_by(library: str) -> bool:
    """Whether the function that asks was called by a function of a library."""
    return _package(sys._getframe(2).f_globals.get("__name__")) == library


def is_of_optax(update: Callable[..., Any]) -> bool:
    """Whether a transformation is of optax or of jls, such as a chain."""
    return _package(getattr(update, "__module__", None)) in ("optax", "jls")


def _package(module: str | None) -> str:
    return (module or "").split(".")[0]


def value_among(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The loss among the extra arguments of `update`: `value`, or else `loss`.

    Levanter and MaxText call it `loss`.
    """
    value, loss = extra.get("value"), extra.get("loss")
    if loss is None:
        return {}
    if value is None:
        return {"value": loss}
    are_known = not any(isinstance(x, Tracer) for x in (value, loss))
    is_same = value is loss or (are_known and np.array_equal(value, loss, True))
    if not is_same:
        raise ValueError(
            "value and loss are two names for the true loss, got both, and not the "
            f"same: {describe(value)} and {describe(loss)}. Pass one of them."
        )
    return {}


def check_value(value: Any) -> None:
    """Raises unless `value` can be a loss; None means that it was not passed."""
    if value is None:
        return
    if not is_inexact(value) or jnp.iscomplexobj(value):
        raise TypeError(
            "value must be the true loss, one real floating-point number, or None, got "
            f"{describe(value)}. Write optimizer.update(grads, opt_state, params, "
            "value=loss)."
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"value must be the true loss, a scalar of shape (), got shape "
            f"{jnp.shape(value)}. Reduce it in float32."
        )


def update_with_average(
    update: Callable[[Any], tuple[Any, Any]], grads: Any
) -> tuple[Any, Any]:
    """`update(grads)`; warns of a `jls.params_ema` in it that is not the last.

    Args:
      update: makes updates and a state of gradients.
      grads: the gradients.
    """
    with noted("averaged", nearest=True) as seen:
        updates, state = update(grads)
    if seen and _are_changed(lambda grads: update(grads)[0], grads, updates, seen):
        warn(
            "a jls.params_ema is followed by a transformation that changes the "
            "updates, so it averages parameters that no step has. Put it last: "
            "optax.chain(inner, jls.params_ema(decay))."
        )
    return updates, state


def _are_changed(
    update: Callable[[Any], Any], grads: Any, updates: Any, seen: list[Any]
) -> bool:
    """Whether an update is another one than a transformation inside has seen."""
    if all(x is y for x, y in _at_the_same_paths(updates, seen)):
        return False  # without the time to trace it once more
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(grads)):
        return False  # one that runs operation by operation: not in each step

    def both(grads):
        with noted("averaged", apart=True) as again:
            updates = update(grads)
        return [*zip(*_at_the_same_paths(updates, again), strict=True)]

    try:
        program, _ = program_beside(both, grads)
    except jax.errors.UnexpectedTracerError:
        return False  # what was seen is inside of a loop or a branch
    jaxpr = program.jaxpr
    here = {*jaxpr.invars, *(x for one in jaxpr.eqns for x in one.outvars)}
    half = len(jaxpr.outvars) // 2
    pairs = zip(jaxpr.outvars[:half], jaxpr.outvars[half:], strict=True)
    return any(x is not y and not is_literal(x) and x in here for x, y in pairs)


def _at_the_same_paths(updates: Any, seen: list[Any]) -> list[tuple[Any, Any]]:
    """The floating-point updates that were seen, and those that came of them."""
    flat = dict(jax.tree_util.tree_flatten_with_path(updates)[0])
    return [
        (x, flat[path])
        for pairs in seen
        for path, x in pairs
        if path in flat and is_inexact(x) and is_inexact(flat[path])
    ]


def is_read(fun: Callable[[Any], Any], value: Any) -> bool:
    """Whether `fun(value)` computes with `value`, an array, or returns it."""
    program = jax.make_jaxpr(fun)(value).jaxpr
    read = [atom for equation in program.eqns for atom in equation.invars]
    return any(program.invars[0] is atom for atom in read + program.outvars)


class OtherStateError(ValueError):
    """A state is of another optimizer, and the message says how it becomes one."""


@contextlib.contextmanager
def foreign_state_named(
    init: Callable[[Any], Any], inner_state: Any, params: Any, updates: Any
) -> Iterator[None]:
    """Names what does not belong together as the cause of what fails in the block."""
    try:
        yield
    except OtherStateError:
        raise
    except Exception as error:
        cause = _foreign(init, inner_state, params, updates)
        if not cause:
            raise
        raise ValueError(cause) from error


@contextlib.contextmanager
def other_params_noted(
    init: Callable[[Any], Any], opt_state: Any, params: Any
) -> Iterator[None]:
    """Adds to an error in the block that a state was made for other parameters."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # `init` may fail too
            made = jax.eval_shape(init, params)
            if jax.tree.structure(made) != jax.tree.structure(opt_state):
                of_both = ("optimizer.init(params)", made), ("opt_state", opt_state)
                error.add_note(
                    f"opt_state was not made for these params: {difference(*of_both)}. "
                    f"{_STARTS_ANEW}"
                )
        raise


def _foreign(
    init: Callable[[Any], Any], inner_state: Any, params: Any, updates: Any
) -> str:
    """Why state, parameters and gradients are not of one run; "" if that is unknown."""
    known = params is not None
    trained, name = (params, "params") if known else (updates, "updates")
    try:
        made = jax.eval_shape(init, trained)
    except Exception:  # `init` may fail too
        return ""
    if known and jax.tree.structure(updates) != jax.tree.structure(params):
        return (
            "updates must be the gradients of params, but "
            f"{difference(('updates', updates), ('params', params))}. {_OF_THESE}"
        )
    of_both = ("it", inner_state), (f"a new state of these {name}", made)
    how = difference(*of_both, np.shape)
    return how and (
        f"state must be one that this optimizer made for the {name} that it is passed "
        f"with, but {how}. Pass what its init made for them. {_STARTS_ANEW}"
    )


_STARTS_ANEW = (
    "If the model has changed, its optimizer starts anew: opt_state = "
    "optimizer.init(params)."
)
