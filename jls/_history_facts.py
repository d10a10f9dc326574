# SPDX-License-Identifier: Apache-2.0
"""What the rows of a `jls.History` tell: which steps were skipped, and a summary."""

from collections.abc import Mapping, Sequence

import numpy as np

from jls._logged import Scalar
from jls._repr import scale_text

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
    """How many steps were skipped since the row before; at the first row 0 or 1."""
    # Before the first step `applied` is False, though nothing was skipped.
    unapplied = (column(columns, "applied") == 0) & (column(columns, "steps") != 0)
    counts = (unapplied | (column(columns, "overflow") == 1)).astype(np.int64)
    # The counter knows of steps between the rows; back to less, it is another run's.
    since = np.diff(column(columns, "skips").astype(np.float64))
    counts[1:] = np.where(since >= 0, since, counts[1:])
    return counts


def moves(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a loss scale is above, and where below, the one before it."""
    change = np.diff(scales, prepend=scales[:1])
    return change > 0, change < 0


def step_text(step: Scalar) -> str:
    return f"{step:.0f}" if step == round(step) else f"{step:g}"


def summary(columns: Columns) -> str:
    steps = columns["step"]
    if not steps:
        return "No steps recorded."
    first, last = as_array(steps)[[0, -1]]
    span = step_text(first) + (f" to {step_text(last)}" if len(steps) > 1 else "")
    lines = [("recorded", f"{_count(len(steps), 'step')} ({span})")]
    skips, at_end = _skips(columns)
    scale, loss = _scale(columns), _loss(columns)
    lines += [("skipped", skips)] if skips else []
    lines += [("loss scale", scale)] if scale else []
    lines += [("loss", loss)] if loss else []
    text = [f"{name:<12}{value}" for name, value in lines]
    if last - first >= len(steps) and (skips or scale):
        text.append(
            "Not every step was recorded: there may be more growths and backoffs."
        )
    if at_end:
        text.append("The last step was skipped: jls.health(state) says why.")
    return "\n".join(text)


def _skips(columns: Columns) -> tuple[str, bool]:
    """How many steps were skipped, in words, and whether the last one was."""
    counts = skip_counts(columns)
    taken, skipped = _known(columns, "steps"), _known(columns, "skips")
    if taken.size and skipped.size:  # the run's own counters see every step
        total, of = int(skipped[-1]), int(taken[-1])
    elif "applied" in columns or "overflow" in columns:
        total, of = int(counts.sum()), len(counts)
    else:
        return "", False
    rows = _known(columns, "consecutive_skips")
    if not rows.size:
        rows = _lengths(counts > 0)
    share = f" ({total / of:.1%})" if of else ""
    in_a_row = f", up to {max(1, rows.max()):.0f} in a row" if total else ""
    return f"{total} of {of} steps{share}{in_a_row}", bool(rows[-1] > 0)


def _lengths(flags: np.ndarray) -> np.ndarray:
    """For each row the number of flags in a row up to it."""
    count = np.arange(1, len(flags) + 1)
    return count - np.maximum.accumulate(np.where(flags, 0, count))


def _scale(columns: Columns) -> str:
    scales = _known(columns, "loss_scale")
    if not scales.size:
        return ""
    first, last, low, high = map(
        scale_text, (scales[0], scales[-1], scales.min(), scales.max())
    )
    if low == high:
        return f"{low} throughout"
    grown, backed_off = (int(np.sum(where)) for where in moves(scales))
    return (
        f"{first} first, {last} last, {low} lowest, {high} highest; "
        f"{_count(grown, 'growth')}, {_count(backed_off, 'backoff')}"
    )


def _loss(columns: Columns) -> str:
    losses = _known(columns, "loss", finite=False)
    if not losses.size:
        return ""
    text = f"{losses[0]:.4g} first, {losses[-1]:.4g} last"
    is_finite = np.isfinite(losses)
    if is_finite.any():
        best = np.min(losses[is_finite])
        row = columns["loss"].index(best)
        text += f", {best:.4g} best (step {step_text(as_array(columns['step'])[row])})"
    bad = int(np.sum(~is_finite))
    return text + (f"; {bad} inf or NaN" if bad else "")


def _known(columns: Columns, name: str, finite: bool = True) -> np.ndarray:
    """The values of a column without the rows that have none."""
    values = np.array([x for x in columns.get(name, ()) if x is not None], np.float64)
    return values[np.isfinite(values)] if finite else values


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
