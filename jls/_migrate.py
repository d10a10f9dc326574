# SPDX-License-Identifier: Apache-2.0
"""A running job gets the wrapper, or loses it; the optimizer inside goes on."""

from typing import Any

import jax
import jax.numpy as jnp

from jls._advance import guard_of
from jls._branches import at, branches, described, is_leaf
from jls._buffers import own, placed_like, put
from jls._locate import find, is_wrapper_state
from jls._tree import is_array, is_concrete
from jls._types import LossScaledState


def wrap_state(optimizer: Any, inner_state: Any, params: Any) -> LossScaledState:
    """Returns the state with which a run that had no jls goes on with it.

    Moments, schedule counts and accumulators are those of `inner_state`; loss scale and
    counters start as in a new run.

    Args:
      optimizer: what `jls.loss_scaled` or `jls.skip_nonfinite` made of the optimizer
        that the run had.
      inner_state: the state of that optimizer before it was wrapped.
      params: the parameters, as for `optimizer.init`.

    Returns:
      A `LossScaledState` that shares no buffer with `inner_state` or `params`. Arrays
      that are placed on devices stay there; others go where `optimizer.init` puts
      them.

    Raises:
      TypeError: if `optimizer` is not made by jls, or has the wrapper further inside.
      ValueError: if `inner_state` differs from what `optimizer` keeps inside, in the
        structure, or in a shape or dtype. The message has the first path that differs.

    Example:
      >>> params = {"w": jnp.ones(2)}
      >>> running = optax.sgd(0.1, momentum=0.9)
      >>> _, opt_state = running.update(params, running.init(params), params)
      >>> optimizer = jls.loss_scaled(running, jls.dynamic(1024.0))
      >>> opt_state = jls.wrap_state(optimizer, opt_state, params)
      >>> opt_state.inner_state[0].trace["w"], jls.loss_scale(opt_state)
      (Array([1., 1.], dtype=float32), Array(1024., dtype=float32))
    """
    if not guard_of(optimizer):
        raise TypeError(
            "optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, got "
            f"another {type(optimizer).__name__}. If the wrapper is further inside, "
            "e.g. in an optax.chain, call this with that part alone, and put the "
            "result in its place."
        )
    state = optimizer.init(params)
    _check_alike(inner_state, state.inner_state, ())
    moved = jax.tree.map(_arrived, inner_state, state.inner_state)
    moved = own(moved, (inner_state, params))
    return placed_like(params, state._replace(inner_state=moved))


def unwrap_state(state: Any) -> Any:
    """Returns `state` with the state of the bare optimizer in the place of jls' own.

    The way to take jls out of a running job. Loss scale and counters are dropped.

    Args:
      state: anything that carries states of `jls.loss_scaled`: an optax state however
        nested, a Flax `TrainState`, the `opt_state` of an `nnx.Optimizer`. A
        `TrainState` keeps its `tx`: exchange it too,
        `jls.unwrap_state(state).replace(tx=bare_optimizer)`.

    Returns:
      As `state`, in the same buffers: `state` itself must not be used any more if what
      is returned is donated.

    Raises:
      ValueError: if `state` carries no state of `jls.loss_scaled`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(2))
      >>> jls.unwrap_state(state)
      (TraceState(trace=Array([0., 0.], dtype=float32)), EmptyState())
    """
    if not find(state, is_wrapper_state):
        raise ValueError(
            "state must carry a state of jls.loss_scaled or jls.skip_nonfinite, got "
            f"{type(state).__name__} without one. Is it unwrapped already? Of an "
            "nnx.Optimizer, pass its opt_state."
        )
    return jax.tree.map(
        lambda node: node.inner_state if is_wrapper_state(node) else node,
        state,
        is_leaf=is_wrapper_state,
    )


def _arrived(value: Any, like: Any) -> Any:
    """`value` where it is, or if it is nowhere in particular, where `like` is."""
    is_placed = is_concrete(value) and value.committed
    if is_placed or not (is_concrete(like) and like.committed):
        return value
    return put(jnp.asarray(value), like.sharding)


def _check_alike(given: Any, wanted: Any, path: tuple[str, ...]) -> None:
    """Raises for the first place where the two states differ."""
    (children, form), (others, other_form) = branches(given), branches(wanted)
    is_end = is_leaf(form)
    if form != other_form or (is_end and _kind(given) != _kind(wanted)):
        raise ValueError(
            "inner_state must be the state of the optimizer that was wrapped, in "
            f"structure, shapes and dtypes, but {at(path)} it has "
            f"{described(given)}, and the optimizer {described(wanted)}. "
            f"{_advice(given, wanted)}"
        )
    if not is_end:
        for name, child in children.items():
            _check_alike(child, others[name], (*path, name))


def _kind(leaf: Any) -> Any:
    """What two leaves have to share: of no array, that it is none."""
    return (jnp.shape(leaf), jnp.result_type(leaf)) if is_array(leaf) else None


def _advice(given: Any, wanted: Any) -> str:
    if find(given, is_wrapper_state):
        return "It is a state of jls already: restore it as it is."
    if hasattr(given, "get_value"):
        return (
            "Of an nnx.Optimizer: make the new one, then new.opt_state = "
            "new.opt_state._replace(inner_state=old.opt_state)."
        )
    if is_array(given) and is_array(wanted) and jnp.shape(given) == jnp.shape(wanted):
        return "Cast it to the dtype that the optimizer starts with."
    if isinstance(given, list | dict) and isinstance(wanted, tuple):
        return (
            "A checkpoint that was read without a target has lost its structure: "
            "jls.upgrade_state(bare_optimizer.init(params), saved) gives it back."
        )
    return "Wrap the same optimizer, and pass the parameters that it had."
