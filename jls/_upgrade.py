# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of an older jls goes on in this one.

The rule for versions: the fields of the states of jls keep their names and meaning, and
new ones are only ever appended. A field that a checkpoint lacks starts as in a new run.

    saved has               target has               then
    the field               the field                the saved value
    nothing                 a field of ADDED         the target's value
    nothing                 any other field          an error
    a field                 nothing                  an error: a newer jls, or another
                                                     optimizer or policy
    another count           the mark of a fixed      the mark: older versions had none
                            scale
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._branches import at, branches, described, is_leaf, listed
from jls._locate import is_scaler_state, is_wrapper_state, unwrapped
from jls._tree import common_dtype, is_array, is_concrete
from jls._types import FIXED, LossScaledState

State = TypeVar("State")
# The fields that were not there from the start; a test holds the types to this.
ADDED = {LossScaledState: ("nonfinite_updates", "skip_reason", "nonfinite_leaves")}


def upgrade_state(target: State, saved: Any) -> State:
    """Returns the state that an older jls has saved, as one of this version.

    A checkpoint library restores into a `target` only what has its exact structure.
    Read the checkpoint without one instead, and give this function what you get.

    Args:
      target: a new state: `optimizer.init(params)`, or anything that contains one, such
        as a new Flax `TrainState`; of an `nnx.Optimizer` its `opt_state`.
      saved: the same state as nested dicts, lists and arrays:
        `flax.serialization.msgpack_restore(bytes)`, a `to_state_dict`, or what Orbax
        restores without a target; or as the object itself, such as a `TrainState`.
        (From other devices, let Orbax give NumPy arrays: docs/questions/checkpoints.md
        has the lines.)

    Returns:
      As `target`, where its arrays are and in buffers of its own, with the values of
      `saved`. Fields that the older jls did not have are those of `target`.

    Raises:
      TypeError: if `target` is no state, or has shapes in the place of arrays.
      ValueError: if `saved` lacks anything else, has anything that `target` lacks, or
        differs in a shape or dtype. The message has the path, and what to do.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2)}
      >>> saved = optimizer.init(params)._replace(steps=jnp.int32(7))._asdict()
      >>> del saved["skip_reason"]  # as an older version would have it
      >>> state = jls.upgrade_state(optimizer.init(params), saved)
      >>> state.steps, state.skip_reason
      (Array(7, dtype=int32), Array(0, dtype=int32))
    """
    if is_leaf(jax.tree.structure(target)) and not is_array(target):
        raise TypeError(
            "target must be a new state, such as optimizer.init(params), got "
            f"{described(target)}."
        )
    return _upgraded(target, saved, ())


def _upgraded(target: Any, saved: Any, path: tuple[str, ...]) -> Any:
    children, structure = branches(target)
    if is_leaf(structure):
        return _value(target, saved, path)
    parts = _parts(saved)
    if parts is None and hasattr(target, "get_value"):  # a variable of NNX
        parts = dict.fromkeys(children, saved)
    if parts is None:
        raise ValueError(
            f"saved must have {described(target)} {at(path)}, as target has, got "
            f"{described(saved)}. {_OTHER if is_array(saved) else _NO_TREE}"
        )
    if is_scaler_state(target) and _is_fixed(target):
        parts = parts | {"finite_count": target.finite_count}
    _check_names(target, children, parts, path)
    new = [
        _upgraded(child, parts[name], (*path, name))
        if name in parts
        else jax.tree.map(lambda leaf: _copied(leaf, leaf), child)
        for name, child in children.items()
    ]
    return structure.unflatten(new)


def _is_fixed(scaler_state: Any) -> bool:
    count: Any = getattr(unwrapped(scaler_state), "finite_count", None)
    return is_array(count) and np.ndim(count) == 0 and int(count) == FIXED


def _parts(saved: Any) -> dict[str, Any] | None:
    """The parts of a saved node by name; None of a leaf."""
    if isinstance(saved, Mapping):  # with keys of any kind
        return {str(name): part for name, part in saved.items()}
    children, structure = branches(saved)  # of None, Orbax's empty tuple, nothing
    return None if is_leaf(structure) else children


def _check_names(
    target: Any, children: dict[str, Any], parts: dict[str, Any], path: tuple[str, ...]
) -> None:
    may_lack = ADDED.get(type(target), ())
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
        f"{what} {listed(names)}"
        for what, names in (("lacks", lacking), ("also has", unknown))
        if names
    ]
    if "opt_state" in unknown:
        advice = "If target is the state of an optimizer: pass the opt_state of saved."
    elif is_wrapper_state(target) and not lacking:
        advice = "A newer jls has saved it: install that version."
    elif is_wrapper_state(target):
        advice = (
            "If it was saved without jls: jls.upgrade_state into the state of the bare "
            "optimizer, then jls.wrap_state."
        )
    elif is_scaler_state(target):
        advice = (
            "It is the state of another policy, or of a newer jls. To change the "
            "policy: make target with the policy that was saved, then "
            "opt_state._replace(scaler_state=scaler.init())."
        )
    elif {"inner_state", "scaler_state"} <= parts.keys():
        advice = (
            "It was saved with jls: make target with jls.loss_scaled, then "
            "jls.unwrap_state."
        )
    else:
        advice = _OTHER
    raise ValueError(
        f"saved must have what target has, but {at(path)}, in "
        f"{type(target).__name__}, it {' and '.join(differences)}. {advice}"
    )


_OTHER = "Make target with the optimizer and the parameters that were saved."
_NO_TREE = (
    "Pass nested dicts, lists and arrays; of an object, "
    "flax.serialization.to_state_dict(object)."
)


def _value(target: Any, saved: Any, path: tuple[str, ...]) -> Any:
    if isinstance(target, jax.ShapeDtypeStruct):
        raise TypeError(
            f"target must have arrays, got a jax.ShapeDtypeStruct {at(path)}. Make it "
            "with optimizer.init(params)."
        )
    if not is_array(target):  # a function or a string: code, which is not saved
        return target
    fits = is_array(saved) and np.shape(saved) == np.shape(target)
    dtype = common_dtype(saved, target) if fits else None
    if dtype is None:
        raise ValueError(
            f"saved must have {described(target)} {at(path)}, as target has, got "
            f"{described(saved)}. {_OTHER}"
        )
    if hasattr(saved, "dtype"):
        return _copied(saved, target)
    if hasattr(target, "dtype"):
        return _copied(np.asarray(saved, dtype), target)
    return saved  # Python numbers, such as the step of a new TrainState


def _copied(value: Any, like: Any) -> Array:
    """`value` in a buffer of its own, on the devices of `like` if that has any."""
    if is_concrete(like) and like.committed:
        # Two steps: on a CPU, device_put shares the memory of numpy arrays.
        value = jax.device_put(value, like.sharding)
    elif not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):  # a PRNG key
        value = np.asarray(value)  # which is on no device
    return jnp.array(value, copy=True)
