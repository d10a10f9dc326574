# SPDX-License-Identifier: Apache-2.0
"""The average of the parameters over the steps that were applied.

    w_t = d_t * w_(t-1) + (1 - d_t)
    a_t = a_(t-1) + (1 - d_t) / w_t * (p_t - a_(t-1))

With `debias` w_0 is 0: nothing is averaged yet, and a_1 is p_1. Without it w_0 is 1:
the initial parameters count in full, and w stays 1.

Differs from `optax.ema` in: it averages parameters, and passes the updates on.
Differs from `optax.incremental_update` in: it sees whether the step was applied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jls import _validate
from jls._nnx import read_variables
from jls._notes import note
from jls._placement import own_buffers
from jls._scalers.rule import count_up
from jls._state import find
from jls._text import listed, naming_arguments, quoted
from jls._tree import is_array, is_extended, is_inexact, widen, widen_as_stored
from jls._types import exportable


@exportable
class ParamsEmaState(NamedTuple):
    """State of `jls.params_ema`. The count stops at the int32 maximum.

    Example:
      >>> state = jls.params_ema(0.999).init({"w": jnp.ones(2, jnp.float16)})
      >>> state.ema
      {'w': Array([1., 1.], dtype=float32)}
    """

    # Steps averaged, named as optax names its counts.
    count: Array  # i32[]  # pyright: ignore[reportIncompatibleMethodOverride]
    weight: Array  # f32[]  in [0, 1], of the average so far against an empty start
    ema: optax.Params  # like the parameters, in at least float32


@naming_arguments(rate="decay")
def params_ema(
    decay: ArrayLike | Callable[[Array], ArrayLike], *, debias: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that keeps an average of the parameters to evaluate.

    Put it last inside the wrapper, where it sees the updates that will be applied. It
    passes them on and averages `optax.apply_updates(params, updates)`. A skipped step
    leaves the average, its weight and its count as they were, bit for bit. Outside the
    wrapper a skipped step would count the unchanged parameters once more; before other
    transformations it would average parameters that no step has.

    Args:
      decay: how much of the average one step keeps, in [0, 1) as float32: 0.999
        averages over the last thousand steps or so. Or a schedule of it, called with
        the number of steps averaged so far (i32[], 0 at the first).
      debias: True leaves the initial parameters out: the average is corrected as in
        Adam, and after the first step it is exactly the parameters. False starts from
        the initial parameters.

    Returns:
      A transformation with state `jls.types.ParamsEmaState`, whose `update` needs
      `params`. The average is in the dtype of the parameter, at least float32, and
      ready at any time: before the first step it is the initial parameters. Leaves that
      are not floating point (int, PRNG keys) are the newest ones. An element that
      becomes inf or NaN in the parameters does not enter the average.

    Raises:
      TypeError: if `decay` is neither a real number nor a function, or `debias` not
        a bool.
      ValueError: if `decay` is out of range; arrays, traced values and what a schedule
        returns are not checked. At `update`, if `params` is missing.

    Example:
      >>> inner = optax.chain(optax.sgd(1.0), jls.params_ema(0.5))
      >>> optimizer = jls.loss_scaled(inner)
      >>> params = jnp.float32(0.0)
      >>> state = optimizer.init(params)
      >>> for grad in (-4.0, jnp.inf, -3.0):
      ...     updates, state = optimizer.update(jnp.float32(grad), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, jls.eval_params(state))
      4.0 4.0
      4.0 4.0
      7.0 6.0

    References:
      Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
      Kingma and Ba, Adam, ICLR 2015, arXiv:1412.6980, section 3 (the correction).
    """
    if not callable(decay):
        just_below = 1.0 - 2.0**-24  # in float32
        decay = _validate.number("decay", decay, "in [0, 1)", 0.0, just_below)
    debias = _validate.flag("debias", debias)

    def init(params: optax.Params) -> ParamsEmaState:
        return ParamsEmaState(
            count=jnp.zeros((), jnp.int32),
            weight=jnp.full((), 0.0 if debias else 1.0, jnp.float32),
            ema=own_buffers(jax.tree.map(widen, params), params),
        )

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError(
                "jls.params_ema averages the parameters: pass them as well, "
                "optimizer.update(grads, state, params)."
            )
        kept = jnp.asarray(decay(state.count) if callable(decay) else decay)
        kept = kept.astype(jnp.float32)
        weight = kept * state.weight + (1 - kept)
        # For a schedule that begins with 1: there is nothing to keep yet.
        is_first = state.weight == 0
        rate = jnp.where(is_first, 1, (1 - kept) / jnp.where(is_first, 1, weight))

        def average(old, param, update):
            # None, a mask or float0 in the place of an update leave it alone.
            is_number = is_array(param) and not is_extended(param)
            moves = is_number and is_array(update)
            new = optax.apply_updates(param, update) if moves else param
            if not is_inexact(old):
                return own_buffers(new, param)
            new = widen_as_stored(new)
            moved = old + rate.astype(old.dtype) * (new - old)
            moved = jnp.where(rate == 1, new, moved)  # exactly, whatever `old` is
            return jnp.where(jnp.isfinite(new), moved, old)

        note("averaged", jax.tree_util.tree_flatten_with_path(updates)[0])
        new_state = ParamsEmaState(
            count=count_up(state.count),
            weight=weight,
            ema=jax.tree.map(average, state.ema, params, updates),
        )
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


@naming_arguments()
def eval_params(state: Any) -> Any:
    """Returns the averaged parameters that a `jls.params_ema` in `state` keeps.

    They are in at least float32. To evaluate in the parameters' dtypes, cast them:
    `jax.tree.map(lambda a, p: a.astype(p.dtype), jls.eval_params(state), params)`.
    With Linen: `train_state.apply_fn({"params": jls.eval_params(train_state)}, x)`.
    With NNX, in a second model: `evaluated = nnx.clone(model)` and
    `nnx.update(evaluated, jls.eval_params(optimizer))`.

    Args:
      state: anything that carries exactly one average: a `jls.types.ParamsEmaState`, an
        optax state however nested, a Flax `TrainState`, an `nnx.Optimizer`.

    Returns:
      A tree like the parameters; for an `nnx.Optimizer`, an `nnx.State` of arrays.
      Before the first step, the initial parameters. Outside of jit they are the state's
      own buffers, which a step that donates the state deletes: evaluate before it, or
      copy them (`jax.tree.map(jnp.copy, ...)`).

    Raises:
      ValueError: if `state` carries no average, or several.

    Example:
      >>> optimizer = optax.chain(optax.sgd(0.5), jls.params_ema(0.99))
      >>> jls.eval_params(optimizer.init({"w": jnp.ones(2, jnp.bfloat16)}))
      {'w': Array([1., 1.], dtype=float32)}
    """
    found = find(state, lambda node: isinstance(node, ParamsEmaState))
    if not found:
        raise ValueError(
            "state must carry an average of the parameters, got "
            f"{type(state).__name__} without one. Pass the state of an optimizer with "
            "jls.params_ema in it, last inside jls.loss_scaled."
        )
    if len(found) > 1:
        paths = listed(quoted(path for path, _ in found))
        raise ValueError(
            "state must carry exactly one average of the parameters, got "
            f"{len(found)}: at {paths}. Pass the part that you mean."
        )
    return read_variables(found[0][1].ema)
