# SPDX-License-Identifier: Apache-2.0
"""A record of a run on the host: append the metrics of a step, then read and plot."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jls._metrics import Scalar, fetch, flatten_metrics
from jls._text import format_scale, quantity, wrapped
from jls._tools.run.columns import (
    Columns,
    as_array,
    count_backoffs,
    growths_and_backoffs,
    skip_counts,
    spike_counts,
)
from jls._types import StepReport


class History:
    """A table of what a run logged, one row for each step, on the host.

    Rows need not have the same keys: a value that is missing is None in a row, NaN in a
    column. `len` is the number of rows; iterating gives them as dicts, and
    `pandas.DataFrame(dict(history))` makes a pandas table, which writes CSV.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> history = jls.History()
      >>> for grad in (1.0, jnp.inf, 1.0):
      ...     _, state = optimizer.update({"w": jnp.array([grad, 1.0])}, state, params)
      ...     history.append(jls.metrics(state), loss=0.5)
      >>> history["loss_scale"]
      array([1024.,  512.,  512.])
      >>> print(history.summary())
      recorded    3 steps (1 to 3)
      skipped     1 of 3 steps (33.3%), up to 1 in a row
      loss scale  2^10 first, 2^9 last, 2^9 lowest, 2^10 highest
                  0 growths, 1 backoff
      loss        0.5 first, 0.5 last, 0.5 best (step 1)
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Scalar | None]] = {"step": []}

    def append(
        self,
        metrics: Mapping[str, Any] | StepReport,
        /,
        *,
        step: ArrayLike | None = None,
        **more: Any,
    ) -> None:
        """Appends a step, or the steps that `jax.lax.scan` stacked.

        One transfer from the device for all values, which waits for the step: in a fast
        loop append every so many steps, or scan over some and append what it stacked.

        Args:
          metrics: a dict of scalars, such as `jls.metrics(state)`, or a
            `jls.types.StepReport`. Values in nested dicts get keys such as
            "local_norm/layer/kernel"; None is left out, and so are values in a report's
            `aux` that are not real scalars. Or all of them stacked: arrays of one
            dimension and the same length, a row for each element. Arrays with one row
            on each device come from `jax.pmap`: the devices must agree, and make one
            row of the history. (Once fetched, such arrays are taken for steps: pass
            those of one device.)
          step: the number of the step, or an array of numbers for stacked values. None
            takes "step" or else "steps" out of the metrics, or continues by 1.
          more: further values by name: `loss=loss`, or with a report
            `**jls.metrics(state)`. They override those of `metrics`.

        Raises:
          TypeError: if `metrics` is neither, or if a value is not a real number.
          ValueError: if a value is traced, if it has another length than the others or
            several dimensions, if the devices of `jax.pmap` differ, if a step is not
            finite, or if there is no value at all. Nothing is appended then.

        Example:
          >>> history = jls.History()
          >>> history.append({"loss": jnp.float32(0.5)})
          >>> history.append({"loss": jnp.array([0.25, 0.125])})
          >>> history["step"], history["loss"]
          (array([1, 2, 3]), array([0.5  , 0.25 , 0.125]))
        """
        flat = flatten_metrics(metrics, more)
        if not flat:
            raise ValueError("metrics must have at least one value, got none.")
        if step is not None:
            flat["step"] = step
        arrays = fetch(flat)
        count = _row_count(arrays)
        values = {name: array.reshape(-1).tolist() for name, array in arrays.items()}
        if "step" not in values:
            last = (self._columns["step"] or [0])[-1] or 0
            counted = [last + i for i in range(1, count + 1)]
            values["step"] = values.get("steps") or counted
        for number in values["step"]:
            if not np.isfinite(number):
                raise ValueError(f"step must be finite, got {number!r}.")
        rows = len(self)
        for name in values:
            self._columns.setdefault(name, [None] * rows)
        for name, column in self._columns.items():
            column += values.get(name, [None] * count)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._columns:
            raise KeyError(f"no {name!r} was recorded, only {', '.join(self.keys())}")
        return as_array(self._columns[name])

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[dict[str, Scalar | None]]:
        for row in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, row, strict=True))

    def __repr__(self) -> str:
        return f"History({len(self)} rows: {', '.join(self.keys())})"

    def keys(self) -> list[str]:
        """Returns the names of the columns.

        Returns:
          A list, "step" first, then in the order in which they appeared.

        Example:
          >>> jls.History().keys()
          ['step']
        """
        return list(self._columns)

    def line(self) -> str:
        """Returns the last row in one short line, for a progress bar.

        With tqdm, `bar.set_postfix_str(history.line())`; with rich,
        `bar.update(task, description=history.line())`.

        Returns:
          A line of what the row has of `loss`, `loss_scale`, `skips` and
          `consecutive_skips`; without counts, the word "skipped" if the step was.
          A loss scale that is a power of two is written 2^k, other numbers with four
          digits. Empty if there is no row.

        Example:
          >>> state = jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3))
          >>> history = jls.History()
          >>> history.append(jls.metrics(state), loss=jnp.float32(0.231))
          >>> history.line()
          'loss 0.231  scale 2^15  skips 0 (0 in a row)'
        """
        now = {name: column[-1] for name, column in self._columns.items() if column}
        now = {name: value for name, value in now.items() if value is not None}
        parts = []
        if "loss" in now:
            parts.append(f"loss {now['loss']:.4g}")
        scales = _known(self._columns, "loss_scale")
        if "loss_scale" in now and np.any(scales != 1):
            parts.append(f"scale {format_scale(now['loss_scale'])}")
        if "skips" in now:
            streak = now.get("consecutive_skips")
            in_a_row = "" if streak is None else f" ({streak} in a row)"
            parts.append(f"skips {now['skips']}{in_a_row}")
            # Of a run that has applied no step yet the scale is still to be found.
            if streak is not None and 3 <= streak == now.get("steps"):
                parts.append("jls.calibrate finds the scale")
        elif now.get("skipped"):
            parts.append("skipped")
        return "  ".join(parts)

    def summary(self) -> str:
        """Returns a few lines to print: the skips, the loss scale, the loss.

        Skips are the run's own count if the metrics have it, else those of the rows. A
        growth or backoff is a row whose loss scale differs from the row before: append
        `jls.metrics(state)` before the first step to see what that step does. Without
        it, a first step that was skipped may have been a backoff or not: "1 or 2".

        Returns:
          Lines of at most 80 columns; `print` them.

        Example:
          >>> jls.History().summary()
          'No steps recorded.'
        """
        return _summary(self._columns)

    def plot(self, axes: Any = None) -> Any:
        """Draws loss, loss scale and gradient norm over the steps, one above the other.

        It draws what was recorded of "loss", "loss_scale" and "global_norm" (or
        "grad_norm"). A line has a gap where a value is inf or NaN. Ticks at the foot of
        a panel are skipped steps; triangles are growths and backoffs, counted as in
        `summary`; diamonds are skipped spikes, and a dashed line is the limit of
        `jls.spikes`. Long runs are drawn as medians with their range.

        Args:
          axes: None makes a figure, which a notebook shows if it is a cell's last line,
            and which `.savefig("run.png")` writes. Or the matplotlib `Axes` to draw
            into, as many as there are panels; for one panel the `Axes` itself.

        Returns:
          The matplotlib `Figure`.

        Raises:
          ImportError: if matplotlib is not installed.
          TypeError: if `axes` are not matplotlib's.
          ValueError: if there is nothing to draw, or another number of axes.

        Example:
          >>> history = jls.History()
          >>> history.append({"loss": 0.5, "loss_scale": 1024.0})
          >>> [panel.get_ylabel() for panel in history.plot().axes]
          ['loss', 'loss scale']
        """
        try:
            from jls._tools.run.history_plot import plot
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise ImportError(
                "History.plot needs the package matplotlib, which is not installed.\n"
                "Install it with: pip install matplotlib"
            ) from error
        return plot(self._columns, axes)


def _row_count(arrays: dict[str, np.ndarray]) -> int:
    """The number of rows that all the arrays have in common."""
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.ndim > 1:
            raise ValueError(
                f"{name} must be a scalar, or have the one leading axis that "
                f"jax.lax.scan stacks, got shape {array.shape}."
            )
        if array.shape != arrays[first].shape:
            raise ValueError(
                f"{name} must have the shape of {first}, {arrays[first].shape}, got "
                f"shape {array.shape}: scalars of one step, or all of them stacked."
            )
    return arrays[first].size


# Summary.


def _format_step(step: Scalar) -> str:
    return f"{step:.0f}" if step == round(step) else f"{step:g}"


def _summary(columns: Columns) -> str:
    steps = columns["step"]
    if not steps:
        return "No steps recorded."
    first, last = as_array(steps)[[0, -1]]
    span = _format_step(first) + (f" to {_format_step(last)}" if len(steps) > 1 else "")
    lines = [("recorded", f"{quantity(len(steps), 'step')} ({span})")]
    skips, at_end = _skips_line(columns)
    scales, loss = _scale_lines(columns), _loss_line(columns)
    lines += [("skipped", skips)] if skips else []
    lines += zip(("loss scale", ""), scales, strict=False)
    lines += [("loss", loss)] if loss else []
    text = []
    for name, value in lines:
        text += wrapped(value, indent=" " * 12, initial=f"{name:<12}")
    if last - first >= len(steps) and (skips or scales):
        text.append(
            "Not every step was recorded: there may be more growths and backoffs."
        )
    if at_end:
        text.append("The last step was skipped: jls.health(state) says why, and")
        text.append("print(jls.why(step, ...)), with its arguments, from which line.")
    return "\n".join(text)


def _skips_line(columns: Columns) -> tuple[str, bool]:
    """The number of skipped steps in words, and whether the last step was skipped."""
    counts = skip_counts(columns)
    taken, skipped = _known(columns, "steps"), _known(columns, "skips")
    if taken.size and skipped.size:  # the run's own counters see every step
        total, of = int(skipped[-1]), int(taken[-1])
    elif "applied" in columns or "skipped" in columns:
        total, of = int(counts.sum()), len(counts)
    else:
        return "", False
    streaks = _known(columns, "consecutive_skips")
    last = columns.get("consecutive_skips", [None])[-1]
    if not streaks.size:
        streaks = _streaks(counts > 0)
        last = streaks[-1]
    at_end = last is not None and bool(last > 0)
    share = f" ({total / of:.1%})" if of else ""
    in_a_row = f", up to {max(1, streaks.max()):.0f} in a row" if total else ""
    counted = _known(columns, "spikes")
    spikes = int(counted[-1] if counted.size else spike_counts(columns).sum())
    as_spikes = f"; {quantity(spikes, 'spike')} among them" if spikes else ""
    return f"{total} of {of} steps{share}{in_a_row}{as_spikes}", at_end


def _streaks(flags: np.ndarray) -> np.ndarray:
    """For each row the number of flags in a row up to it."""
    count = np.arange(1, len(flags) + 1)
    return count - np.maximum.accumulate(np.where(flags, 0, count))


def _scale_lines(columns: Columns) -> list[str]:
    scales = _known(columns, "loss_scale")
    if not scales.size:
        return []
    first, last, low, high = map(
        format_scale, (scales[0], scales[-1], scales.min(), scales.max())
    )
    if scales.min() == scales.max() == 1:  # there is none
        return []
    if low == high:
        return [f"{low} throughout"]
    grown, backed_off = (int(np.sum(where)) for where in growths_and_backoffs(scales))
    backoffs = count_backoffs(columns, backed_off)
    return [
        f"{first} first, {last} last, {low} lowest, {high} highest",
        f"{quantity(grown, 'growth')}, {backoffs} backoff{'s' * (backoffs != '1')}",
    ]


def _loss_line(columns: Columns) -> str:
    losses = _known(columns, "loss", finite=False)
    if not losses.size:
        return ""
    text = f"{losses[0]:.4g} first, {losses[-1]:.4g} last"
    is_finite = np.isfinite(losses)
    if is_finite.any():
        best = np.min(losses[is_finite])
        row = columns["loss"].index(best)
        text += (
            f", {best:.4g} best (step {_format_step(as_array(columns['step'])[row])})"
        )
    bad = int(np.sum(~is_finite))
    return text + (f"; {bad} inf or NaN" if bad else "")


def _known(columns: Columns, name: str, finite: bool = True) -> np.ndarray:
    """The values of a column without the rows that have none."""
    values = np.array([x for x in columns.get(name, ()) if x is not None], np.float64)
    return values[np.isfinite(values)] if finite else values
