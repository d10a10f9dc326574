# SPDX-License-Identifier: Apache-2.0
"""The scalars that a step logs, by name: fetched with one transfer, and in columns."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls import _state, _validate
from jls._logged import Scalar, flatten_metrics, is_number
from jls._nnx import read_variables
from jls._text import describe
from jls._types import SkipReason, StepReport

Columns = Mapping[str, Sequence[Scalar | None]]


def host_metrics(state: Any) -> dict[str, float | int | bool | None]:
    """Returns `jls.metrics(state)`, or a report, as Python numbers, in one transfer.

    For print, loggers and `json.dumps`, on the host. It waits for the step that made
    `state`: call it every so many steps, and before a step that donates the state.

    Args:
      state: anything that carries exactly one loss scale, or the
        `jls.types.StepReport` of one step; also with an axis of devices that all
        agree, as `jax.pmap` returns it.

    Returns:
      A flat dict of bool, int and float. Numbers that are not finite are None, such as
      a limit of `jls.spikes` during its warm-up, or a NaN loss: so it is strict JSON.
      For a state it has the names of `jls.metrics`; for a report its fields, except
      `scale_moves`, with "learning_rate/group", "local_norm/layer/kernel" and
      "aux/name" for values in dicts, and only the real scalars of `aux`. A reason is an
      int, which every logger takes: `jls.types.SkipReason(number).name` has its name.

    Raises:
      ValueError: if `state` carries no loss scale, or several, or is traced; if a
        report is stacked; or if devices differ.

    Example:
      >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
      >>> jls.host_metrics(state)
      {'loss_scale': 32768.0, 'applied': False, 'steps': 0, 'skips': 0, ...}
    """
    if isinstance(state, StepReport):
        arrays = fetch(_flatten_report(state))
        _check_one_step(arrays)
    else:
        flat = _state.metrics(_of_one_device(state))
        _validate.concrete("state", flat, " Inside use jls.metrics.")
        arrays = fetch(flat)
    return strict({name: array.item() for name, array in arrays.items()})


def strict(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """`numbers` with None for what is not finite, as strict JSON has no inf."""

    def is_finite(number):
        return not isinstance(number, float) or math.isfinite(number)

    return {name: x if is_finite(x) else None for name, x in numbers.items()}


def _of_one_device(state: Any) -> Any:
    """The part of `state` that has metrics, if it has an axis of devices; else all."""
    wrappers = _state.find(state, _state.is_wrapper_state)
    found = wrappers or _state.find_scaler_states(state)
    if len(found) != 1:
        return state
    node = read_variables(found[0][1])
    one = _state.of_one_device(node)
    return state if one is node else one


def _flatten_report(report: StepReport) -> dict[str, Any]:
    """The fields of the report of one step by name, without those that are None."""
    _validate.concrete("report", report, " Return the report from the jitted step.")
    given = flatten_metrics(report, {})
    fields = report._fields
    return dict(sorted(given.items(), key=lambda x: fields.index(x[0].split("/")[0])))


def _check_one_step(arrays: Mapping[str, np.ndarray]) -> None:
    shape = arrays["skipped"].shape
    if shape != ():
        raise ValueError(
            f"report must be of one step, got fields of shape {shape}. For a table of "
            "all steps: history.append(report) with history = jls.History(). For the "
            "last one: jls.host_metrics(jax.tree.map(lambda x: x[-1], report))."
        )


def fetch(flat: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The values on the host, after one transfer for all of them.

    Without the axis of devices of `jax.pmap`, on which all have to agree.
    """
    for name, value in flat.items():
        _check_scalar(name, value)
    if _is_of_pmap(flat):
        flat = {name: _by_device(value) for name, value in flat.items()}
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


def _by_device(value: Any) -> Any:
    """The rows of an array; a number as it is."""
    if not np.ndim(value):
        return value
    return [shard.data for shard in value.addressable_shards]


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


def _check_scalar(name: str, value: Any) -> None:
    _validate.concrete(name, value)
    if not is_number(value):
        raise TypeError(
            f"{name} must be a real number of at most 64 bits, or an array, got "
            f"{describe(value)}."
        )


def _widest(value: np.ndarray) -> np.ndarray:
    """`value` in a type that converts exactly to Python's own numbers."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(np.float64)
    return value if value.dtype.kind in "biu" else value.astype(np.int64)


# Columns.


def as_array(values: Sequence[Scalar | None]) -> np.ndarray:
    """A column as bool, integers or float64; as float64 with NaN if any is missing."""
    types = {type(value) for value in values}
    if len(types) == 1 and types <= {bool, int}:
        return np.array(values)
    return np.array([np.nan if x is None else x for x in values], np.float64)


def column(columns: Columns, name: str) -> np.ndarray:
    """A column, all NaN if there is none."""
    return as_array(columns.get(name, [None] * len(columns["step"])))


def skip_counts(columns: Columns) -> np.ndarray:
    """The numbers of skipped steps since the row before; at the first row 0 or 1."""
    # Before the first step `applied` is False, though nothing was skipped.
    unapplied = (column(columns, "applied") == 0) & (column(columns, "steps") != 0)
    counts = (unapplied | (column(columns, "skipped") == 1)).astype(np.int64)
    # The counter knows of steps between the rows; if it is lower, the run is another.
    since = np.diff(column(columns, "skips").astype(np.float64))
    counts[1:] = np.where(since >= 0, since, counts[1:])
    return counts


def spike_counts(columns: Columns) -> np.ndarray:
    """The numbers of these that a spike policy skipped, as far as known."""
    skips = skip_counts(columns)
    # A report has the reason of its step, metrics that of the last skip.
    names = "skip_reason", "last_skip_reason"
    are_spikes = [column(columns, name) == SkipReason.SPIKE for name in names]
    counts = np.where(np.any(are_spikes, axis=0), skips, 0)
    if "spikes" in columns:
        since = np.diff(column(columns, "spikes").astype(np.float64))
        counts[1:] = np.where(since >= 0, since, counts[1:])
    return np.minimum(counts, skips)


def count_backoffs(columns: Columns, seen: int) -> str:
    """How many backoffs there were: `seen`, or one more if the first row may be one.

    It may if its step was skipped for the gradients: no row has the scale before it.
    """
    reason = column(columns, "skip_reason")[0], column(columns, "last_skip_reason")[0]
    is_other = any(x > SkipReason.GRADIENTS for x in reason)
    may_be_one = skip_counts(columns)[0] > 0 and not is_other
    return f"{seen} or {seen + 1}" if may_be_one else str(seen)


def growths_and_backoffs(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flags: whether a loss scale is above, and whether below, the one before it."""
    change = np.diff(scales, prepend=scales[:1])
    return change > 0, change < 0
