# SPDX-License-Identifier: Apache-2.0
"""The scalars that a step logs, by name: on the device, or in one transfer."""

import math
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls import _validate
from jls._nnx import read_variables
from jls._state import (
    find,
    find_scaler_states,
    is_wrapper_state,
    loss_scale,
    of_one_device,
)
from jls._text import describe, join, path_name
from jls._types import StepReport, wrapper_metrics

Scalar = bool | int | float


@overload
def metrics(state: Any, *, host: Literal[False] = False) -> dict[str, Array]: ...
@overload
def metrics(state: Any, *, host: Literal[True]) -> dict[str, Scalar | None]: ...
def metrics(state: Any, *, host: bool = False) -> dict[str, Any]:
    """Returns what a logger wants to know: scalars on the device, or Python numbers.

    On the device, the call does not wait for it. Fetch them every so many steps with
    one `jax.device_get(...)`, or return them from a `jax.lax.scan` to stack them.
    Outside of jit the values are the state's own buffers: fetch them before a step that
    donates it. With `host=True` they are fetched, in one transfer, for print, loggers
    and `json.dumps`.

    Args:
      state: anything that carries exactly one loss scale, or a `jls.types.StepReport`.
        With `host=True` of one step; also with an axis of devices that all agree, as
        `jax.pmap` returns it.
      host: whether to return Python numbers. It waits for the step that made `state`:
        call it every so many steps, and before a step that donates the state.

    Returns:
      For a state a flat dict: `loss_scale` (f32[], of the next step), `applied`
      (bool[], whether the last step was applied), the counts `steps`, `skips`,
      `consecutive_skips`, `nonfinite_losses` and `nonfinite_updates` (i32[]),
      `last_skip_reason` (i32[], a `jls.types.SkipReason`, of the last step that was
      skipped), and the count `partial_overflows` of steps that were applied without a
      part of their gradients, which was inf or NaN (i32[]). For a bare scaler state the
      `loss_scale` alone. With a spike policy also the count `spikes` of steps skipped
      as such (i32[]), and under `jls.spikes` or a preset `spikes_found`, skipped or let
      through (i32[]); and of the last step that was judged `judged_loss`, `limit_loss`,
      `judged_norm` and `limit_norm` (f32[]; a limit is inf while nothing is judged).

      For a report its fields, except `scale_moves`, with "learning_rate/group",
      "local_norm/layer/kernel" and "aux/name" for values in dicts, and only the real
      scalars of `aux`. A reason is an int, which every logger takes:
      `jls.types.SkipReason(number).name` has its name.

      With `host=True` the values are bool, int and float. Numbers that are not finite
      are None, such as a limit of `jls.spikes` during its warm-up, or a NaN loss: so it
      is strict JSON.

    Raises:
      ValueError: see `jls.loss_scale`. For several members use `jax.vmap(jls.metrics)`.
        With `host=True` also if a report is stacked, or if devices differ.
      TypeError: with `host=True`, if `state` is traced.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> metrics = jls.metrics(state)
      >>> metrics["loss_scale"], metrics["skips"]
      (Array(32768., dtype=float32), Array(0, dtype=int32))
      >>> jls.metrics(state, host=True)
      {'loss_scale': 32768.0, 'applied': False, 'steps': 0, 'skips': 0, ...}
    """
    host = _validate.flag("host", host)
    is_report = isinstance(state, StepReport)
    if is_report:
        values = flatten_metrics(state, {})
    else:
        part = _of_one_device(state) if host else state
        values = {"loss_scale": loss_scale(part)}
        for _, node in find(part, is_wrapper_state):
            values |= wrapper_metrics(read_variables(node))
    if not host:
        return values
    name = "report" if is_report else "state"
    write = f" Under jit write jls.metrics({name}), without host=True."
    _validate.concrete(name, values, write)
    arrays = fetch(values)
    if is_report:
        _check_one_step(arrays)
    return strict({name: array.item() for name, array in arrays.items()})


def strict(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """`numbers` with None for what is not finite, as strict JSON has no inf."""

    def is_finite(number):
        return not isinstance(number, float) or math.isfinite(number)

    return {name: x if is_finite(x) else None for name, x in numbers.items()}


def _of_one_device(state: Any) -> Any:
    """The part of `state` that has metrics, if it has an axis of devices; else all."""
    found = find(state, is_wrapper_state) or find_scaler_states(state)
    if len(found) != 1:
        return state
    node = read_variables(found[0][1])
    one = of_one_device(node)
    return state if one is node else one


def _check_one_step(arrays: Mapping[str, np.ndarray]) -> None:
    shape = arrays["skipped"].shape
    if shape != ():
        raise ValueError(
            f"report must be of one step, got fields of shape {shape}. For a table of "
            "all steps: history.append(report) with history = jls.History(). For the "
            "last one: jls.metrics(jax.tree.map(lambda x: x[-1], report), host=True)."
        )


def fetch(flat: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The values on the host, after one transfer for all of them.

    Without the axis of devices of `jax.pmap`, on which all have to agree.
    """
    for name, value in flat.items():
        _validate.concrete(name, value)
        if not is_number(value):
            raise TypeError(
                f"{name} must be a real number of at most 64 bits, or an array, got "
                f"{describe(value)}."
            )
    if _is_of_pmap(flat):
        flat = {
            name: [row.data for row in value.addressable_shards]
            if np.ndim(value)
            else value
            for name, value in flat.items()
        }
    on_host = jax.device_get(dict(flat))
    # In the given order: a transfer of a dict sorts its keys.
    return {name: _widest(_agreed(name, on_host[name])) for name in flat}


def _is_of_pmap(flat: Mapping[str, Any]) -> bool:
    """Whether the arrays have a row on each device, as under `jax.pmap`.

    What a scan stacked is whole on each device that holds it. Arrays of the user's may
    be sharded by step; of what jls makes, nothing is.
    """
    arrays = [value for value in flat.values() if np.ndim(value)]
    is_ours = not flat.keys().isdisjoint(("loss_scale", "skipped"))
    return is_ours and bool(arrays) and all(map(_has_rows_on_devices, arrays))


def _has_rows_on_devices(value: Any) -> bool:
    if not isinstance(value, jax.Array):
        return False
    count, *rest = value.shape
    # Of one device, one row is one step either way.
    is_one_each = 1 < count == len(value.sharding.device_set)
    return is_one_each and value.sharding.shard_shape(value.shape) == (1, *rest)


def _agreed(name: str, value: Any) -> np.ndarray:
    """The value that all devices have, or an error."""
    if not isinstance(value, list):
        return np.asarray(value)
    first, *others = (row[0] for row in value)
    if not all(np.array_equal(first, row, equal_nan=True) for row in others):
        raise ValueError(
            f"all devices must hold the same value, but they differ in {name}: average "
            "it in the step with jax.lax.pmean, or pass the report of one device, "
            "jax.tree.map(lambda a: a[0], report). Skips and the loss scale must not "
            "differ: see jls.check_in_sync."
        )
    return np.asarray(first)


def _widest(value: np.ndarray) -> np.ndarray:
    """`value` in a type that converts exactly to Python's own numbers."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(np.float64)
    return value if value.dtype.kind in "biu" else value.astype(np.int64)


# The names of metrics and reports.


def flatten_metrics(
    metrics: Mapping[str, Any] | StepReport, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The given values by name, "a/b" for those in nested dicts; None is left out."""
    if isinstance(metrics, StepReport):
        numbers = {"aux": _numbers_in_aux(metrics), "scale_moves": None}
        metrics = metrics._asdict() | numbers
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of scalars, such as jls.metrics(state), or a "
            f"jls.types.StepReport, got {type(metrics).__name__}."
        )
    flat: dict[str, Any] = {}
    _flatten_into((), {**metrics, **more}, flat)
    return flat


def _numbers_in_aux(report: StepReport) -> dict[str, Any]:
    """The values in aux that are one number for each step, by name; no logits."""
    flat, _ = jax.tree_util.tree_flatten_with_path(report.aux)
    return {
        path_name(path): leaf
        for path, leaf in flat
        if is_number(leaf) and np.shape(leaf) == np.shape(report.skipped)
    }


def _flatten_into(path: tuple[str, ...], value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten_into((*path, str(name)), inner, flat)
    elif value is not None:
        name = join(*path)
        if name in flat:
            raise ValueError(f"{name} must be given once, got it as a dict too.")
        flat[name] = value


def is_number(value: Any) -> bool:
    """Whether `value` is a real number of at most 64 bits, or an array of them."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not (is_array or isinstance(value, Scalar)):
        return False
    dtype = value.dtype if is_array else np.asarray(value).dtype
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)
