# SPDX-License-Identifier: Apache-2.0
"""States across versions and optimizers: wrap, unwrap, upgrade.

The rule for versions: a field of `LossScaledState` that was added after a checkpoint
was saved starts as in a new run. FIELDS in `_types` says since when there is a field.

    saved has           target has           then
    the field           the field            the saved value
    nothing             a field added later  the target's value
    nothing             any other field      an error
    a field             nothing              an error: a newer jls, or another optimizer
                                             or scaler
    a static scale      a StaticState        the saved scale
    a scale that moves  a StaticState        the target's scale
    a static scale      a scale that moves   the target's scale and counts
    no spike policy     a spike policy       the target's: a new warm-up
    a spike policy      none                 an error that says how to drop it
    float32 training    `bfloat16_params`    moments rounded, lower bits of `params`
    `bfloat16_params`   another one          likewise, if there are no lower bits yet
    `bfloat16_params`   float32 training     moments widened
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jls import _validate
from jls._bfloat16 import rest_of
from jls._mistakes import warn
from jls._nnx import is_variable, read_variables, unbox
from jls._placement import copy_like, own_buffers, place_like, place_on_all
from jls._state import find, how_to_nest, is_scaler_state, is_wrapper_state
from jls._step import wrapper_of
from jls._text import at, describe, join, listed, naming_arguments, path_name
from jls._tree import (
    common_dtype,
    difference,
    is_array,
    is_concrete,
    is_leaf,
    is_narrow,
    kind_of,
    one_level,
    widen,
)
from jls._types import (
    FIELDS,
    Bfloat16ParamsState,
    LossScaledState,
    SkipReason,
    SpikeState,
    StaticState,
    has_policy,
)

State = TypeVar("State")
_ADDED = tuple(name for name, field in FIELDS.items() if field.since)
_OF_POLICY = tuple(name for name, field in FIELDS.items() if field.is_of_policy)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
# By field of a state of jls: the numbers that a run can have there. A judged value may
# overflow float32; without a budget the tokens are inf.
_NOT_NAN = "number other than NaN", -np.inf, np.inf
_COUNT = "number from 0 to 2^31 - 1", 0, 2**31 - 1
_RANGES = {
    **{name: _COUNT for name, field in FIELDS.items() if field.dtype == jnp.int32},
    "last_skip_reason": (
        f"number from 0 to {max(SkipReason)}, a jls.types.SkipReason,",
        0,
        max(SkipReason),
    ),
    "loss_scale": (
        "number from 2^-126 to 2^126",
        _validate.SMALLEST,
        _validate.LARGEST,
    ),
    "seen": ("finite number", -_LARGEST_FLOAT, _LARGEST_FLOAT),
    "tokens": ("number >= 0", 0, np.inf),
    "found": _COUNT,
    "value": _NOT_NAN,
    "limit": _NOT_NAN,
    "steady_share": ("number from 0 to 1", 0, 1),
}


@naming_arguments()
def wrap_state(
    optimizer: optax.GradientTransformation,
    inner_state: Any,
    params: Any = None,
) -> LossScaledState:
    """Returns the state with which a run that had no jls continues under jls.

    Moments, schedule counts and accumulators are those of `inner_state`; loss scale and
    counters start as in a new run.

    Args:
      optimizer: the optimizer that the run had, wrapped by `jls.loss_scaled` or
        `jls.skip_nonfinite`.
      inner_state: the state of that optimizer before it was wrapped.
      params: the parameters, as for `optimizer.init`.

    Returns:
      A `jls.types.LossScaledState` that shares no buffer with `inner_state` or
      `params`. Arrays that are placed on devices stay there; others go where
      `optimizer.init` puts them.

    Raises:
      TypeError: if `optimizer` was not made by jls, or has the wrapper further inside;
        if the parameters are missing, or come first.
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
    if not wrapper_of(optimizer):
        got = f"{describe(optimizer)}. The order is {_WRAPPING}."
        if _validate.is_transformation(optimizer):
            got = (
                f"another {type(optimizer).__name__}. If the wrapper is further "
                "inside, e.g. in an optax.chain, call this with that part alone, and "
                "put the result in its place."
            )
        raise TypeError(
            "optimizer must be made by jls.loss_scaled or jls.skip_nonfinite, got "
            f"{got}"
        )
    if params is None:
        raise TypeError(
            "params must be the parameters, as for optimizer.init, got none. Write "
            f"{_WRAPPING}."
        )
    if is_wrapper_state(inner_state):
        raise ValueError(
            "inner_state must be the state of the optimizer that was wrapped, got the "
            "state of one that is wrapped already. Go on from it as it is; of an older "
            "jls, jls.upgrade_state(optimizer.init(params), inner_state)."
        )
    state: Any = optimizer.init(params)
    write = how_to_nest(inner_state)
    if write:
        raise ValueError(
            "inner_state must be the state of the optimizer that was wrapped, got "
            f"{type(inner_state).__name__}. {write}"
        )
    of_both = ("inner_state", inner_state), ("its state", state.inner_state)
    how = difference(*of_both, _shape_and_dtype)
    if how:
        raise ValueError(
            "inner_state must be the state of the optimizer that was wrapped, in "
            f"structure, shapes and dtypes, but {how}. Wrap the same optimizer, and "
            f"pass the parameters that it had: {_WRAPPING}. Other cases: "
            "docs/questions/checkpoints.md."
        )

    def place(value, like):
        is_placed = is_concrete(value) and value.committed
        return value if is_placed else place_like(value, like)

    placed = jax.tree.map(place, inner_state, state.inner_state)
    owned = own_buffers(placed, (inner_state, params))
    return place_on_all(state._replace(inner_state=owned), params, scalars=True)


_WRAPPING = "jls.wrap_state(optimizer, inner_state, params)"


def unwrap_state(state: Any) -> Any:
    """Returns `state` with the state of the bare optimizer in place of the wrapper's.

    Use it to take jls out of a running job. Loss scale and counters are dropped.

    Args:
      state: anything that carries states of `jls.loss_scaled`: an optax state however
        nested, a Flax `TrainState`, the `opt_state` of an `nnx.Optimizer`. A
        `TrainState` keeps its `tx`: exchange it too,
        `jls.unwrap_state(state).replace(tx=bare_optimizer)`.

    Returns:
      A state like `state`, in the same buffers: if it is donated, `state` must not be
      used any more.

    Raises:
      ValueError: if `state` carries no state of `jls.loss_scaled`.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(2))
      >>> jls.unwrap_state(state)
      (TraceState(trace=Array([0., 0.], dtype=float32)), EmptyState())
    """
    if not find(state, is_wrapper_state):
        write = how_to_nest(state) or (
            "Is it unwrapped already? For an nnx.Optimizer, pass its opt_state."
        )
        raise ValueError(
            "state must carry a state of jls.loss_scaled or jls.skip_nonfinite, got "
            f"{type(state).__name__} without one. {write}"
        )
    return jax.tree.map(
        lambda node: node.inner_state if is_wrapper_state(node) else node,
        state,
        is_leaf=is_wrapper_state,
    )


@naming_arguments()
def upgrade_state(target: State, saved: Any, params: Any = None) -> State:
    """Returns a state that an older jls saved, converted to this version.

    Checkpoint libraries restore into a `target` only what has its exact structure. Read
    the checkpoint without one instead, and pass what you get to this function.

    It also converts between a static scale and a dynamic one: the scale then starts as
    in `target`, and everything else continues. A spike policy may be added; it warms up
    first. And it converts to and from `jls.bfloat16_params`, and between its roundings
    and moments.

    Args:
      target: a new state: `optimizer.init(params)`, or anything that contains one, such
        as a new Flax `TrainState`; for an `nnx.Optimizer`, its `opt_state`.
      saved: the same state as nested dicts, lists and arrays:
        `flax.serialization.msgpack_restore(bytes)`, a `to_state_dict`, or what Orbax
        restores without a target; or as the object itself, such as a `TrainState`.
        (From other devices, let Orbax give NumPy arrays: docs/questions/checkpoints.md
        has the lines.)
      params: for a `target` with `jls.bfloat16_params(rounding="exact")` the float32
        parameters that belong to `saved`: the 16 bits that a cast to bfloat16 drops go
        into the state. Not used if these are in `saved`.

    Returns:
      A state like `target`, on the same devices and in buffers of its own, with the
      values of `saved`. Fields that the older jls did not have are those of `target`.
      A loss scale that was saved in a narrower dtype is float32 again.

    Raises:
      TypeError: if `target` is not a state, or has shapes in place of arrays.
      ValueError: if `saved` lacks anything else, has anything that `target` lacks,
        differs in a shape or dtype, or has a loss scale, a count or a number of
        `jls.spikes` that no run has; or if `params` lacks a parameter of `target`, or
        has it in bfloat16. The message has the path, and what to do.

    Warns:
      JlsWarning: if `target` keeps what bfloat16 parameters lack, and neither `saved`
        nor `params` has it.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optimizer.init(params)._replace(steps=jnp.int32(7))._asdict()
      >>> del saved["nonfinite_updates"]  # as an older version would have it
      >>> state = jls.upgrade_state(optimizer.init(params), saved)
      >>> state.steps, state.nonfinite_updates
      (Array(7, dtype=int32), Array(0, dtype=int32))
    """
    is_code = is_leaf(jax.tree.structure(target)) and not is_array(target)
    is_optimizer = hasattr(target, "init") and hasattr(target, "update")
    lacks = find(saved, is_wrapper_state) and not find(target, is_wrapper_state)
    if is_code or is_optimizer or lacks:
        raise TypeError(
            f"target must be a new state of jls, got {kind_of(target)}. target "
            "comes first: jls.upgrade_state(optimizer.init(params), saved)."
        )
    write = how_to_nest(saved)
    if write and not how_to_nest(target):
        raise ValueError(
            f"saved must be nested as target is, got {type(saved).__name__}. {write}"
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)
    named = {path_name(path): read_variables(leaf) for path, leaf in flat}
    return _upgrade(target, saved, (), _Bfloat16(named))


# Wrap.


def _shape_and_dtype(leaf: Any) -> Any:
    """Shape and dtype of a leaf; None if it is not an array."""
    return (jnp.shape(leaf), jnp.result_type(leaf)) if is_array(leaf) else None


# Upgrade.


class _Bfloat16(NamedTuple):
    """What a conversion to or from `jls.bfloat16_params` has to know."""

    params: Mapping[str, Any]  # the float32 parameters by name; {} if not given
    casts: bool = False  # whether moments may be of the other dtype here


def _upgrade(
    target: Any, saved: Any, path: tuple[str, ...], bfloat16: _Bfloat16
) -> Any:
    children, structure = one_level(target)
    if is_leaf(structure):
        if bfloat16.casts and {*map(_dtype_of, (saved, target))} == _MOMENTS:
            saved = saved.astype(target.dtype)
        return _restored_leaf(target, saved, path)
    parts = _parts_of(saved)
    is_bfloat16 = isinstance(target, Bfloat16ParamsState)
    if is_bfloat16 or _is_bfloat16_state(parts):
        bfloat16 = bfloat16._replace(casts=True)
    if is_bfloat16:
        parts = _parts_of_bfloat16(target, saved, parts, bfloat16.params)
    elif parts and _is_bfloat16_state(parts):
        return _upgrade(target, parts["inner_state"], path, bfloat16)
    if parts is None and is_variable(target):
        parts = dict.fromkeys(children, saved)
    if parts is None:
        raise ValueError(
            f"saved must have {kind_of(target)} {format_path(path)}, as target "
            f"has, got {kind_of(saved)}. "
            f"{_how_to_read(saved)}"
        )
    is_of_scaler = is_scaler_state(target)
    if is_of_scaler and _starts_anew(target, saved, parts):
        return _copy_tree(target)
    ranges: Mapping[str, tuple[str, float, float]]
    ranges = {"loss_scale": _RANGES["loss_scale"]} if is_of_scaler else {}
    if is_wrapper_state(target):
        parts, ranges = _check_spikes(target, parts, path), _RANGES
    if isinstance(target, SpikeState):
        most = 2 * jnp.shape(read_variables(target.seen))[-1] - 1
        rule = f"number from 0 to {most}, below two windows,"
        ranges = _RANGES | {"kept": (rule, 0, most)}
    for name, (rule, low, high) in ranges.items():
        _check_value(parts.get(name), (*path, name), rule, low, high)
    _check_names(target, children, parts, path)
    new = [
        _upgrade(child, parts[name], (*path, name), bfloat16)
        if name in parts
        else _copy_tree(child)
        for name, child in children.items()
    ]
    return structure.unflatten(new)


_MOMENTS = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)


def _is_bfloat16_state(parts: dict[str, Any] | None) -> bool:
    """Whether these are the parts of a saved state of `jls.bfloat16_params`."""
    needed, later = {"inner_state", "count"}, {"rest", "made", "strayed"}
    return parts is not None and needed <= parts.keys() <= needed | later


def _parts_of_bfloat16(
    target: Bfloat16ParamsState,
    saved: Any,
    parts: dict[str, Any] | None,
    params: Mapping[str, Any],
) -> dict[str, Any]:
    """The parts of such a state; `saved` may be that of the optimizer inside."""
    if parts is None or not _is_bfloat16_state(parts):
        parts = {"inner_state": saved, "count": target.count}
    parts = {"made": target.made, "strayed": target.strayed} | parts  # since 0.6.0
    if not jax.tree.leaves(target.rest):
        return parts | {"rest": ()}
    if jax.tree.leaves(parts.get("rest")):
        return parts
    if not params:
        warn(
            "saved has not the lower bits of bfloat16 parameters, which target keeps: "
            "they begin as 0. If you have the float32 parameters, pass them: "
            "jls.upgrade_state(target, saved, params=float32_params)."
        )
        return parts | {"rest": target.rest}

    def rest(of, like):
        name = path_name(of)
        shape = jnp.shape(read_variables(like))
        param = params.get(name)
        if param is None or jnp.shape(param) != shape:
            got = "none" if param is None else f"shape {jnp.shape(param)}"
            raise ValueError(
                f"params must have the parameters of target, got {got}{at(name)} for "
                f"shape {shape}. Pass the float32 parameters of which those of target "
                "were cast."
            )
        if jnp.result_type(param) == jnp.bfloat16:
            raise ValueError(
                "params must be the float32 parameters, which have the bits that the "
                f"cast drops, got bfloat16{at(name)}. If they are bfloat16 in saved "
                "too, widen them: params=jls.master_params(params, saved)."
            )
        return jax.tree.map(lambda _: rest_of(param), like)  # maybe in a variable

    made = jax.tree_util.tree_map_with_path(rest, target.rest, is_leaf=is_variable)
    return parts | {"rest": made}


def _starts_anew(target: Any, saved: Any, parts: dict[str, Any]) -> bool:
    """Whether one of the two scales is static, and the other moves."""
    is_static, was_static = (isinstance(x, StaticState) for x in (target, saved))
    if "loss_scale" not in parts:  # an error further on
        return False
    if not hasattr(saved, "_fields"):  # else its type says it
        was_static = parts.keys() == {"loss_scale"}
    moves = "finite_count" in target._fields  # if not, it may be a scaler of one's own
    return was_static != is_static and (
        is_static or moves or isinstance(saved, StaticState)
    )


def _check_spikes(
    target: LossScaledState, parts: dict[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    """`parts`; without the fields of a spike policy where there was none."""
    if not jax.tree.leaves(parts.get("spikes")):
        return {name: part for name, part in parts.items() if name not in _OF_POLICY}
    shapes = _policy_shapes(parts.get("spike_state"))
    if not has_policy(target) or shapes != _policy_shapes(target.spike_state):
        other = "another one" if has_policy(target) else "none"
        raise ValueError(
            f"saved must be of the spike policy of target {format_path(path)}, but it "
            f"was saved with spikes=, and target has {other}. Make target with the "
            "policy that was saved, jls.loss_scaled(..., spikes=...), or start "
            "the policy anew: delete 'spikes' and 'spike_state' from saved, or of an "
            "object saved._replace(spikes=(), spike_state=())."
        )
    return parts


def _policy_shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of a policy's arrays, in the order of their names."""
    return sorted(jnp.shape(leaf) for leaf in jax.tree.leaves(read_variables(tree)))


def _check_value(
    part: Any, path: tuple[str, ...], rule: str, low: float, high: float
) -> None:
    """Raises for a number that no run can have."""
    value = unbox(part)
    if not jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.number):
        return  # missing, or an error further on
    numbers = np.asarray(value).astype(np.float64)
    bad = np.asarray(value)[~((low <= numbers) & (numbers <= high))]
    if bad.size:
        raise ValueError(
            f"saved must have a {rule} {format_path(path)}, got {bad[0]}. No run can "
            "go on from there: take another checkpoint, or write what target has there."
        )


def _copy_tree(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: copy_like(leaf, leaf), tree)


def _parts_of(saved: Any) -> dict[str, Any] | None:
    """The parts of a saved node by name; None for a leaf."""
    if isinstance(saved, Mapping):  # with keys of any kind
        return {str(name): part for name, part in saved.items()}
    children, structure = one_level(saved)  # None, and Orbax's empty tuple, have none
    return None if is_leaf(structure) else children


def _check_names(
    target: Any, children: dict[str, Any], parts: dict[str, Any], path: tuple[str, ...]
) -> None:
    may_lack = _ADDED if is_wrapper_state(target) else ()
    lacking = [
        name
        for name, child in children.items()
        if name not in parts and name not in may_lack and jax.tree.leaves(child)
    ]
    unknown = [
        name
        for name, part in parts.items()
        if name not in children and jax.tree.leaves(part)
    ]
    if not lacking and not unknown:
        return
    differences = [
        f"{what} {listed(names, _NAMES)}"
        for what, names in (("lacks", lacking), ("also has", unknown))
        if names
    ]
    raise ValueError(
        f"saved must have what target has, but {format_path(path)}, in "
        f"{type(target).__name__}, it {' and '.join(differences)}. {_OTHER} "
        "Other changes: docs/questions/checkpoints.md."
    )


_OTHER = "Make target with the optimizer and the parameters that were saved."
_NAMES = 8  # in a list: a state of jls has more fields than three


def _how_to_read(saved: Any) -> str:
    """What to write for a part that has no parts."""
    if is_array(saved):
        return _OTHER
    if isinstance(saved, bytes):
        return "Pass what is in them: flax.serialization.msgpack_restore(saved)."
    return (
        "Pass nested dicts, lists and arrays; for an object, "
        "flax.serialization.to_state_dict(object)."
    )


def _restored_leaf(target: Any, saved: Any, path: tuple[str, ...]) -> Any:
    if isinstance(target, jax.ShapeDtypeStruct):
        raise TypeError(
            f"target must have arrays, got a jax.ShapeDtypeStruct {format_path(path)}. "
            "Make it with optimizer.init(params)."
        )
    if not is_array(target):  # a function or a string: code, which is not saved
        return target
    fits = is_array(saved) and np.shape(saved) == np.shape(target)
    if path[-1:] == ("loss_scale",) and is_narrow(saved):
        saved = widen(saved)
    dtype = common_dtype(saved, target) if fits else None
    if dtype is None:
        raise ValueError(
            f"saved must have {kind_of(target)} {format_path(path)}, as target "
            f"has, got {kind_of(saved)}. {_OTHER}"
        )
    if hasattr(saved, "dtype"):
        return copy_like(saved, target)
    if hasattr(target, "dtype"):
        return copy_like(_number_as_array(saved, dtype, path), target)
    return saved  # Python numbers, such as the step of a new TrainState


def _number_as_array(number: Any, dtype: Any, path: tuple[str, ...]) -> np.ndarray:
    """A Python number as an array, or an error where it does not fit."""
    try:
        with np.errstate(over="raise"):
            return np.asarray(number, dtype)
    except (OverflowError, FloatingPointError):
        raise ValueError(
            f"saved must have a number that fits into {dtype} {format_path(path)}, got "
            f"{number}. {_OTHER}"
        ) from None


def format_path(path: tuple[str, ...]) -> str:
    return at(join(*path)).lstrip() or "at the root"
