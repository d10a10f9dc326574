# SPDX-License-Identifier: Apache-2.0
"""Find, read and set the loss scale in any state: optax nests, Flax wraps."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from jls import _validate
from jls._nnx import is_optimizer, is_variable, read_variables
from jls._placement import place_like
from jls._text import at, describe, join, listed, naming_arguments, path_name, quoted
from jls._types import Bfloat16ParamsState, LossScaledState, StaticState, StepReport

State = TypeVar("State")


# Find.


def is_scaler_state(node: Any) -> bool:
    """Whether `node` is a scaler's state: a NamedTuple with an array `loss_scale`."""
    # Asks the type: an nnx.Rngs itself has every attribute.
    if "loss_scale" not in getattr(type(node), "_fields", ()):
        return False
    # In a NamedTuple of the user's, a field of that name may hold the scaler's state.
    return not isinstance(node.loss_scale, tuple)


def is_wrapper_state(node: Any) -> bool:
    return isinstance(node, LossScaledState)


def rounds_bfloat16(state: Any) -> bool:
    """Whether there is a `jls.bfloat16_params` in the optimizer with this state."""
    return bool(find(state, lambda node: isinstance(node, Bfloat16ParamsState)))


def find(state: Any, is_node: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Path and value of each outermost node of `state` that `is_node` accepts."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_node)
    return [(path_name(path), node) for path, node in nodes if is_node(node)]


def find_scaler_states(state: Any) -> list[tuple[str, Any]]:
    """Path and value of each scaler's state in `state`.

    A wrapper keeps it in the field `scaler_state`. In a NamedTuple of parameters one
    may be called `loss_scale` too: neither these nor their moments are states.
    """
    if hasattr(state, "tx") and hasattr(state, "params"):  # a Flax TrainState
        # An Equinox module has no method for it.
        replace = getattr(state, "replace", None)
        without = replace or functools.partial(dataclasses.replace, state)
        state = without(params=None)
    found = []
    for path, node in find(state, lambda x: is_wrapper_state(x) or is_scaler_state(x)):
        if is_wrapper_state(node):
            inner = find(node.scaler_state, is_scaler_state)
            found += [(join(path, "scaler_state", end), part) for end, part in inner]
        else:
            found.append((path, node))
    return found


def scaler_state_in(state: Any) -> Any:
    """The one scaler state in `state`, or an error that says where there are two."""
    return read_variables(_scaler_node_in(state))


def _scaler_node_in(state: Any, of_devices: bool = False) -> Any:
    """The one scaler state, in the `nnx.Variable`s of an `nnx.Optimizer` if it is one.

    `of_devices` also takes one with an axis of devices, as `jax.pmap` keeps it.
    """
    found = find_scaler_states(state)
    if not found:
        raise no_loss_scale(state)
    if len(found) > 1:
        paths = listed(quoted(path for path, _ in found))
        raise ValueError(
            f"state must carry exactly one loss scale, got {len(found)}: at {paths}. "
            "Pass the part that you mean."
        )
    ((path, node),) = found
    shape = jnp.shape(read_variables(node.loss_scale))
    if shape != () and not (of_devices and len(shape) == 1):
        raise ValueError(
            f"loss_scale must have shape (), got shape {shape}{at(path)}. If "
            "jax.vmap or jax.pmap stacked it, it is of several members: pass the state "
            "of one, jax.tree.map(lambda a: a[0], state), or map over it. In a step "
            "that maps over examples, keep it outside the vmap."
        )
    return node


class Run(NamedTuple):
    """The state of a run's wrapper, and the loss scale in it.

    On the host, and of one device; the wrapped optimizer's is as it was given.
    """

    state: LossScaledState  # without that of the wrapped optimizer
    inner_state: Any
    loss_scale: np.ndarray


def run_in(state: Any) -> Run:
    """The one run in `state`, or an error; for functions of the host."""
    found = wrappers_in(state)
    if len(found) != 1:
        raise _not_one_wrapper(len(found), state)
    node = found[0].inside()
    _validate.concrete("state", node)
    own = jax.device_get(node._asdict() | {"inner_state": ()})
    own = of_one_device(LossScaledState(**read_variables(own)))
    loss_scale = _scaler_node_in(own).loss_scale
    return Run(own, node.inner_state, loss_scale)


def wrapper_state_in(state: Any) -> LossScaledState:
    """The one `LossScaledState` in `state`, or an error."""
    found = [node for _, node in find(state, is_wrapper_state)]
    if len(found) != 1:
        raise _not_one_wrapper(len(found), state)
    return read_variables(found[0])


def _not_one_wrapper(count: int, state: Any) -> ValueError:
    rule = "state must carry one state of jls.loss_scaled or jls.skip_nonfinite, got "
    kind = type(state).__name__
    if not count and find_scaler_states(state):
        return ValueError(
            f"{rule}{kind}, which has no counters: its loss scale is "
            "jls.loss_scale(state)."
        )
    write = "Pass the part that you mean."
    if not count:
        write = (
            "What a run without jls has saved becomes one by jls.wrap_state("
            "optimizer, state, params)."
        )
    if isinstance(state, Mapping) and "scaler_state" in state:
        write = "A saved one is jls.upgrade_state(optimizer.init(params), saved)."
    if not count and callable(getattr(state, "init", None)):
        write = "Pass the state that the optimizer makes: optimizer.init(params)."
    if not count and is_optimizer(state):
        write = (
            "Wrap what it is made with: nnx.Optimizer(model, jls.skip_nonfinite(tx)"
            ", wrt=nnx.Param), or jls.loss_scaled(tx)."
        )
    return ValueError(
        f"{rule}{kind} with {count} of them. {how_to_nest(state) or write}"
    )


class FoundState(NamedTuple):
    """The state of a wrapper, and of an optimizer around it that would undo skips."""

    state: LossScaledState
    enclosing: Any  # of the outermost `MultiSteps` or `apply_if_finite`, or `state`

    def inside(self) -> LossScaledState:
        """The state, or an error if it is in such an optimizer."""
        if self.enclosing is not self.state:
            raise _must_be_inside(self.state, self.enclosing)
        return self.state


def wrappers_in(state: Any) -> list[FoundState]:
    """The states of all wrappers in `state`, which is searched once."""
    undoing = optax.MultiStepsState | optax.ApplyIfFiniteState
    nodes = find(state, lambda x: is_wrapper_state(x) or isinstance(x, undoing))
    return [
        FoundState(inside, node)
        for _, node in nodes
        for inside in (
            [node]
            if is_wrapper_state(node)
            else [inner for _, inner in find(node, is_wrapper_state)]
        )
    ]


def is_multi_steps_state(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def wrapper_name(scaler_state: Any) -> str:
    """Which function makes wrappers with such a state, for messages.

    A static scale of 1 tells `jls.skip_nonfinite`; one that is traced counts as 1.
    """
    scale = read_variables(getattr(scaler_state, "loss_scale", 0))
    is_static = isinstance(scaler_state, StaticState)
    is_one = is_static and (isinstance(scale, Tracer) or bool(np.all(scale == 1)))
    return "jls.skip_nonfinite" if is_one else "jls.loss_scaled"


def _must_be_inside(state: LossScaledState, enclosing: Any) -> ValueError:
    """The error for a wrapper inside an optimizer that would undo its skips."""
    wrapper = wrapper_name(state.scaler_state)
    if is_multi_steps_state(enclosing):
        return ValueError(
            f"optax.MultiSteps must be inside {wrapper}, got it outside, "
            "where a NaN stays in its accumulator for ever. Write "
            f"{wrapper}(optax.MultiSteps(optimizer, k))."
        )
    return ValueError(
        f"optax.apply_if_finite must not be around {wrapper}, which does "
        "all that it does: on a bad step it takes back the counters and the "
        "loss scale too. Leave it out."
    )


def no_loss_scale(state: Any, write: str = "") -> ValueError:
    """The error for a state without a scale; a caller may know what to `write`."""
    write = how_to_nest(state) or write
    if not write:
        write = (
            "Pass a ScalerState, or the state of an optimizer made by jls.loss_scaled "
            "or jls.skip_nonfinite: opt_state = optimizer.init(params)."
        )
    return ValueError(
        f"state must carry a loss scale, got {type(state).__name__} without one. "
        f"{write}"
    )


# The path of a loss scale in a state, joined to one key; some leave out "_".
_JOINED = re.compile(r".*scaler_?state\W+loss_?scale", re.IGNORECASE)


def how_to_nest(tree: Any) -> str:
    """The advice if the leaves of a state are in a flat dict; "" if they are not."""
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = getattr(path[-1], "key", None) if path else None
        name = "/".join(map(str, key)) if isinstance(key, tuple) else key
        if isinstance(name, str) and _JOINED.fullmatch(name):
            return (
                f"{key!r} is a leaf of a state in a flat dict: put the state together "
                "first, by flax.traverse_util.unflatten_dict and jls.upgrade_state: "
                "docs/questions/faq.md has the lines."
            )
    return ""


def of_one_device(state: Any) -> Any:
    """`state`, or that of one device, if it has an axis of devices that all agree.

    Args:
      state: of a wrapper, or a scaler.

    Returns:
      That of one device is on the host, without the wrapped optimizer's.
    """
    one = state.steps if is_wrapper_state(state) else state.loss_scale
    is_array = isinstance(one, jax.Array | np.ndarray)
    if not is_array or isinstance(one, Tracer) or one.ndim != 1 or not one.size:
        return state
    state = state._replace(inner_state=()) if is_wrapper_state(state) else state
    own = jax.device_get(state)
    for path, leaf in jax.tree_util.tree_flatten_with_path(own)[0]:
        if not np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape)):
            raise ValueError(
                "all devices must hold the same state, but they differ in "
                f"{path_name(path)}: see jls.check_in_sync. If jax.vmap stacked the "
                "states of several runs, pass one of them, "
                "jax.tree.map(lambda a: a[0], state)."
            )
    return jax.tree.map(lambda leaf: leaf[0], own)


# Read.


def loss_scale(state: Any) -> Array:
    """Returns the loss scale that the next step will use.

    Args:
      state: anything that carries exactly one loss scale: a `jls.types.ScalerState`, an
        optax state however nested, a Flax `TrainState`, an `nnx.Optimizer`.

    Returns:
      `f32[]`, on the device; `float()` of it waits for the step. Outside of jit it is
      the state's own buffer, which a step that donates the state deletes.

    Raises:
      ValueError: if `state` carries no loss scale, or several, one for each member of a
        `jax.vmap` among them, or was donated to an earlier step.

    Example:
      >>> jls.loss_scale(jls.dynamic().init())
      Array(32768., dtype=float32)
    """
    scaler_state = scaler_state_in(state)
    _validate.not_donated("state", scaler_state)
    return jnp.asarray(scaler_state.loss_scale)


# Set.


@naming_arguments()
def set_loss_scale(state: State, value: ArrayLike) -> State:
    """Returns `state` with the loss scale set by hand and its counts restarted at 0.

    Structure, dtypes and placement stay, so that a jitted step does not retrace. The
    bounds of the scaler are not consulted: it goes on from the new scale.

    Args:
      state: anything that carries exactly one loss scale; with an axis of devices, as
        `jax.pmap` keeps it, all of them get the new one.
      value: a number, or an array of shape `()` or `(1,)`; from 2**-126 to 2**126.
        Stored as float32 in a buffer of its own.

    Returns:
      A state like `state`. An `nnx.Optimizer` is changed in place and returned.

    Raises:
      TypeError: if `value` is not a real number, or `state` is a report.
      ValueError: if it has another shape or is out of range, or if `state` carries no
        loss scale, or several. Traced values are not checked.

    Example:
      >>> state = jls.set_loss_scale(jls.dynamic().init(), 1024)
      >>> state.loss_scale
      Array(1024., dtype=float32)
    """
    if find_scaler_states(value):
        raise TypeError(
            f"state must come first, got {describe(state)} before "
            f"{describe(value)}. The order is jls.set_loss_scale(state, value)."
        )
    if isinstance(state, StepReport):
        raise TypeError(
            "state must be the state of the optimizer, got StepReport, which goes into "
            "no step. Write opt_state = jls.set_loss_scale(opt_state, value)."
        )
    new_scale = check_scale(value)
    # One, or an error, before anything changes.
    node = _scaler_node_in(state, of_devices=True)
    scaler_state = read_variables(node)
    shape = jnp.shape(scaler_state.loss_scale)
    fresh = {"loss_scale": jnp.broadcast_to(new_scale, shape) if shape else new_scale}
    for count in ("finite_count", "nonfinite_count"):
        if count in node._fields:
            # Below 0 steps do not count yet: see jls.presets.deepspeed.
            fresh[count] = jnp.minimum(getattr(scaler_state, count), 0)
    if is_variable(node.loss_scale):
        for name, new in fresh.items():
            variable = getattr(node, name)
            variable.set_value(place_like(new, variable.get_value()))
        return state
    restarted = node._replace(
        **{name: place_like(new, getattr(node, name)) for name, new in fresh.items()}
    )
    return jax.tree.map(
        lambda x: restarted if x is node else x, state, is_leaf=lambda x: x is node
    )


def check_scale(value: Any) -> Array:
    """The loss scale `value` as `f32[]` in a fresh buffer, or an error."""
    if not _is_real_array(value) and not _validate.is_real(value):
        raise TypeError(
            f"loss_scale must be a real number or array, got {describe(value)}."
            f"{_validate.field_meant(value, 'init_scale')}"
        )
    shape = np.shape(value)
    if shape not in ((), (1,)):
        raise ValueError(f"loss_scale must have shape () or (1,), got shape {shape}.")
    if isinstance(value, Tracer):
        return jnp.array(value, jnp.float32, copy=True).reshape(())
    # Through the host: the value's device must not become that of the state.
    exact = np.asarray(value).item() if _is_real_array(value) else value
    return jnp.array(_validate.scale_value("loss_scale", exact), jnp.float32)


def _is_real_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic) and any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
