# SPDX-License-Identifier: Apache-2.0
"""Which parameters were to blame: the flags of a state, by name."""

from typing import Any

import jax
from jax.core import Tracer

from jls._locate import find, is_wrapper_state, unwrapped
from jls._tally import inexact_leaves
from jls._types import LossScaledState


def nonfinite_leaves(state: Any, params: Any) -> list[str]:
    """Returns the names of the parameters that the last skipped step was skipped for.

    They are remembered in the state, at the cost of one bit each, until the next step
    that is skipped: those whose gradient, or for `skip_reason` 3 whose update, was inf
    or NaN. None, if the loss alone was not finite.

    Args:
      state: anything that carries one state of `jls.loss_scaled`.
      params: the parameters, for their names: the tree that `init` was given; with NNX
        `nnx.state(model, nnx.Param)`, or what else the optimizer is for.

    Returns:
      A list of paths such as "layer_0/kernel", in order; empty if there are none.

    Raises:
      ValueError: if `state` carries no such state, or several, if it is traced, or if
        `params` has another number of floating-point leaves.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
      >>> grads = {"kernel": jnp.array([1.0, jnp.nan]), "bias": jnp.ones(2)}
      >>> _, state = optimizer.update(grads, optimizer.init(params), params)
      >>> jls.nonfinite_leaves(state, params)
      ['kernel']
    """
    flags = jax.device_get(wrapper_in(state).nonfinite_leaves)
    return chosen(params, flags.tolist())


def wrapper_in(state: Any) -> LossScaledState:
    found = find(state, is_wrapper_state)
    if len(found) != 1:
        raise ValueError(
            "state must carry one state of jls.loss_scaled or jls.skip_nonfinite, got "
            f"{type(state).__name__} with {len(found)} of them. Pass the part that is "
            "meant."
        )
    wrapper = unwrapped(found[0][1])
    if isinstance(wrapper.steps, Tracer):
        raise ValueError(
            "state must be concrete, got a traced one: call this outside of jit, on "
            "the state that the step returned."
        )
    return wrapper


def chosen(params: Any, flags: list[bool]) -> list[str]:
    """The paths of the floating-point leaves of `params` whose flag is set."""
    names, _ = inexact_leaves(params)
    if len(names) != len(flags):
        raise ValueError(
            "params must be the parameters that the optimizer was initialized with: "
            f"got {len(names)} floating-point leaves, the state knows {len(flags)}."
        )
    return [name for name, is_bad in zip(names, flags, strict=True) if is_bad]
