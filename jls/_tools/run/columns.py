# SPDX-License-Identifier: Apache-2.0
"""Columns of the scalars that a run has logged."""

from collections.abc import Mapping, Sequence

import numpy as np

from jls._metrics import Scalar
from jls._types import SkipReason

Columns = Mapping[str, Sequence[Scalar | None]]


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
