# SPDX-License-Identifier: Apache-2.0
"""`jls.requeue`: hands out batches again that were skipped for the loss scale."""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic

import jax
import numpy as np

from jls import _validate
from jls._mistakes import warn
from jls._text import describe, naming_arguments
from jls._tree import is_array
from jls._types import BadBatch, BatchT, SkipReason, StepReport


@dataclasses.dataclass
class _Entry(Generic[BatchT]):
    """A batch that may come again, and the history of its tries."""

    index: int
    batch: BatchT
    scale: float | None = None  # after its last try; None before the first
    counted: int = 0  # how many of its retries count


class BatchQueue(Iterator[BatchT]):
    """Result of `jls.requeue`: the batches of a run, some of them more than once.

    An iterator. Call `observe` once after each step.

    A new loop over it, such as after an interrupt in a notebook, first hands out again
    the batch that was not observed, if there is one: its step may not have run.

    Example:
      >>> jls.requeue([1, 2, 3])
      BatchQueue(0 handed out, 0 requeued, 0 bad, 0 waiting)
    """

    def __init__(
        self,
        batches: Iterable[BatchT],
        *,
        first: Iterable[BatchT],
        lag: int,
        retries: int,
        keep: int,
    ) -> None:
        self._lag, self._retries = lag, retries
        self._first = deque(itertools.starmap(_Entry, enumerate(first)))
        # Not a map over a count, which an error of the data would move.
        numbered = enumerate(batches, len(self._first))
        self._batches = itertools.starmap(_Entry, numbered)
        self._current: _Entry[BatchT] | None = None  # handed out and not observed
        self._is_reentered = self._is_at_end = False
        # Steps whose flag was not read yet: batches, and arrays on the device.
        self._unread: deque[tuple[_Entry[BatchT], list[Any]]] = deque()
        self._waiting: deque[_Entry[BatchT]] = deque()  # to come again
        self._recent_flags: deque[Any] = deque(maxlen=lag + 1)
        self._scale = math.inf  # after the last step of which the flag is read
        self._last_good_scale = 0.0  # after the last of these with finite gradients
        self._bad: deque[BadBatch[BatchT]] = deque(maxlen=keep)
        self._handed_out = self._requeued = self._bad_count = 0

    @property
    def bad(self) -> tuple[BadBatch[BatchT], ...]:
        """The last batches that were given up, `keep` of them at most; oldest first.

        `print(jls.why(step, params, opt_state, queue.bad[0].batch))` names the line.
        """
        return tuple(self._bad)

    @property
    def bad_count(self) -> int:
        """The number of batches that were given up."""
        return self._bad_count

    @property
    def requeued(self) -> int:
        """The number of times that a batch came again because its step was skipped."""
        return self._requeued

    def __repr__(self) -> str:
        return (
            f"BatchQueue({self._handed_out} handed out, {self._requeued} requeued, "
            f"{self._bad_count} bad, {len(self._waiting)} waiting)"
        )

    def __iter__(self) -> Iterator[BatchT]:
        if self._is_at_end:
            warn(
                "the queue has come to its end, and a new loop over it gets no batch. "
                "Make one for each epoch: queue = jls.requeue(batches)."
            )
        self._is_reentered = self._current is not None
        return self

    def __next__(self) -> BatchT:
        if self._current is None:
            self._current = self._take()
        elif not self._is_reentered:
            raise ValueError(
                "queue.observe(report) must be called once after each step, got no "
                f"report of the step on batch {self._current.index}. A prefetcher has "
                "to stand before the queue, not after it: jls.requeue(prefetched)."
            )
        self._is_reentered = False
        self._handed_out += 1
        return self._current.batch

    def _take(self) -> _Entry[BatchT]:
        """The next batch: what comes again goes first."""
        if not self._waiting:
            new = self._first.popleft() if self._first else next(self._batches, None)
            if new is not None:
                return new
            self._batches = iter(())
        while self._unread and not self._waiting:
            self._read_oldest()
        if not self._waiting:
            self._is_at_end = True
            raise StopIteration
        self._requeued += 1
        return self._waiting.popleft()

    def observe(self, report: StepReport) -> None:
        """Takes the report of the step on the batch that was handed out last.

        It starts to copy three numbers to the host, the skip reason, the loss scale and
        whether that moves, and reads those of the step `lag` steps before, which decide
        about the batch of that step. Nothing else of the report is read.

        Args:
          report: the `jls.types.StepReport` of the step.

        Raises:
          TypeError: if it is no `StepReport`.
          ValueError: if there is no batch to observe, if the report is traced or that
            of an earlier step, if it holds several runs, or if the step has donated the
            batch. The queue is then as it was.

        Example:
          >>> optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(1024.0))
          >>> params = jnp.ones(2)
          >>> opt_state = optimizer.init(params)
          >>> queue = jls.requeue([{"w": 1.0}], lag=0)
          >>> batch = next(queue)
          >>> params, opt_state, report = jls.apply_gradients(
          ...     optimizer, jnp.full(2, jnp.inf), opt_state, params
          ... )
          >>> queue.observe(report)
          >>> queue
          BatchQueue(1 handed out, 0 requeued, 0 bad, 1 waiting)
          >>> next(queue) is batch
          True
        """
        held = self._current
        if held is None:
            since = "since the last call" if self._handed_out else "yet"
            raise ValueError(
                "queue.observe(report) must be called once after each step, got a "
                f"report though no batch was handed out {since}."
            )
        self._check(report, held)
        with _reading():
            read = report.skip_reason, report.loss_scale, report.scale_moves
            local = list(map(_local, read))
            for array in local:
                if hasattr(array, "copy_to_host_async"):
                    array.copy_to_host_async()
        # First of all: an interrupt may end the wait below, and the step has run.
        self._unread.append((held, local))
        self._current = None
        try:
            while len(self._unread) > self._lag:
                self._read_oldest()
        except Exception:
            self._unread.pop()
            self._current = held
            raise
        self._recent_flags.append(report.skip_reason)

    def outstanding(self) -> tuple[tuple[int, BatchT], ...]:
        """Returns the batches that still have to come again, for a checkpoint.

        A run that resumes from the current position in the data would lose them. Save
        them, or their indices, with the checkpoint, and pass them to the new queue,
        which counts from 0::

          saved = [batch for _, batch in queue.outstanding()]
          queue = jls.requeue(rest, first=saved)

        It waits for all steps so far, and decides about their batches earlier than
        usual, but no differently. So if several processes train, all have to call it.

        Returns:
          A tuple of pairs of an index and a batch, in the order in which they will
          come. A batch that was handed out and not observed is the first of them; those
          of `first` that have not come yet are the last.

        Raises:
          ValueError: if a report holds several runs.

        Example:
          >>> queue = jls.requeue(["a", "b"])
          >>> batch = next(queue)
          >>> queue.outstanding()
          ((0, 'a'),)
        """
        while self._unread:
            self._read_oldest()
        current = [] if self._current is None else [self._current]
        entries = *current, *self._waiting, *self._first
        return tuple((entry.index, entry.batch) for entry in entries)

    def _check(self, report: Any, held: _Entry) -> None:
        if not isinstance(report, StepReport):
            raise TypeError(
                "report must be a jls.types.StepReport, as a step of jls.train_step or "
                f"jls.apply_gradients returns it, got {describe(report)}. Write "
                "params, opt_state, report = step(params, opt_state, batch), then "
                "queue.observe(report)."
            )
        flag = report.skip_reason
        read = {"skip_reason": flag, "loss_scale": report.loss_scale}
        _validate.concrete("report", read)
        # Arrays alone: Python has only one 0.
        is_recent = any(flag is one for one in self._recent_flags)
        if _validate.is_unchecked(flag) and is_recent:
            raise ValueError(
                f"report must be of the step on batch {held.index}, got that of an "
                "earlier step. Pass what the step on the last batch returned."
            )
        for leaf in jax.tree.leaves(held.batch):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(
                    f"batch {held.index} must be in memory, since it may come again, "
                    "but was donated to the step: leave the batch out of "
                    "donate_argnums."
                )

    def _read_oldest(self) -> None:
        """Reads the flag of the oldest step that is not read, and decides."""
        held, (flag, loss_scale, moves) = self._unread[0]
        reason = SkipReason(int(_read_scalar("skip_reason", flag)))
        scale = float(_read_scalar("loss_scale", loss_scale))
        is_overflow = reason == SkipReason.GRADIENTS
        may_pass = is_overflow and bool(_read_scalar("scale_moves", moves))
        self._unread.popleft()
        tried_at, self._scale = self._scale, scale
        if reason not in (SkipReason.GRADIENTS, SkipReason.LOSS):
            self._last_good_scale = scale  # the gradients were finite
        if reason == SkipReason.NONE:
            return
        if may_pass and self._should_retry(held, tried_at, scale):
            self._waiting.append(held)
        else:
            self._bad_count += 1
            self._bad.append(BadBatch(held.index, held.batch, reason))

    def _should_retry(self, held: _Entry, tried_at: float, scale: float) -> bool:
        """Counts a try that overflowed; whether there may be another."""
        if held.scale is not None:
            # If others pass at this scale, or the scale stays, it is the batch.
            others_pass = tried_at <= self._last_good_scale
            held.counted += others_pass or not scale < held.scale
        held.scale = scale
        return held.counted < self._retries


def _reading() -> Any:
    """Lets a few bytes through where `jax.transfer_guard` forbids it by default."""
    return jax.transfer_guard_device_to_host("allow")


def _local(array: Any) -> Any:
    """The copy that this process has of an array that several processes share."""
    is_global = isinstance(array, jax.Array) and not array.is_fully_addressable
    return array.addressable_data(0) if is_global else array


def _read_scalar(name: str, array: Any) -> Any:
    """The one value of an array, which may be there once for each device."""
    with _reading():
        values = np.unique(np.asarray(array))
    if values.size != 1:
        raise ValueError(
            f"report.{name} must be one value, or the same on all devices of jax.pmap, "
            f"got {values.tolist()}. Runs under jax.vmap differ in what they skip: "
            "train each with a step and a queue of its own."
        )
    return values[0]


@naming_arguments(max_retries="retries")
def requeue(
    batches: Iterable[BatchT],
    *,
    first: Iterable[BatchT] = (),
    lag: int = 2,
    retries: int = 3,
    keep: int = 8,
) -> BatchQueue[BatchT]:
    """Returns the batches, and hands out again those skipped for the loss scale.

    A skipped step leaves everything as it was, so its batch can simply come again when
    the scale has come down. The step itself is not changed::

      queue = jls.requeue(batches)
      for batch in queue:
          params, opt_state, report = step(params, opt_state, batch)
          queue.observe(report)

    What becomes of a batch, by the `jls.types.SkipReason` of its step::

      NONE                   it was used
      GRADIENTS              it comes again, before any new batch; under a static scale
                             it is bad
      LOSS, UPDATES, SPIKE   it is bad: no loss scale can mend it

    A retry counts if other batches pass at its loss scale, that is, if the last step
    with finite gradients left that scale or a higher one. It also counts if the scale
    does not come down. After `retries` that count the batch is bad. So at the start of
    a run, while nothing passes, a batch may come as often as the scale has to come
    down; later a gradient that is NaN at any scale costs `retries` further backoffs at
    most; and the queue comes to an end with any scaler. Under a static scale, which
    `jls.skip_nonfinite` has, a batch is bad at once.

    The queue knows of a non-finite loss only if the step was given the loss:
    `jls.train_step` passes it; to `jls.apply_gradients` pass `value=loss`.

    Flags are read `lag` steps late, so that the device always has a step to run; only
    at the end of the data the queue waits for the last of them. Batches are held, not
    copied: beside the one in the loop at most `lag + keep`. So the step must not donate
    its batch, and a loader must not write the next batch into the same array.

    A batch that two optimizers learn from, as in a GAN, has two reports. If only one of
    them is skipped, the batch cannot come again for that one alone. Let both skip
    together, and observe one report.

    With several processes each has its own queue, over its own part of the data, and
    all decide the same, since their reports agree. Under `jax.pmap` reports have a
    value for each device; they agree too.

    An error that the data raises is passed on, and the next call continues. The queue
    ends with the data: make one for each epoch.

    Args:
      batches: any iterable. A prefetcher belongs here, before the queue.
      first: the batches that `outstanding` gave before a resume. They are handed out
        before `batches`, and count as outstanding until then.
      lag: >= 0, how many steps late flags are read. 0 waits for every step.
      retries: >= 1, retries that count before a batch is given up.
      keep: >= 0, how many bad batches are kept, in `queue.bad`.

    Returns:
      A `jls.types.BatchQueue`, an iterator.

    Raises:
      TypeError: if `batches` or `first` cannot be iterated over, or is an array, whose
        rows would come; or if a number is no integer.
      ValueError: if a number is out of range.

    Warns:
      JlsWarning: if a loop begins over a queue that has come to its end.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(1024.0))
      >>> def loss_fn(params, batch):
      ...     return jnp.sum(params * batch)
      >>> step = jax.jit(jls.train_step(loss_fn, optimizer))
      >>> params = jnp.ones(1)
      >>> opt_state = optimizer.init(params)
      >>> queue = jls.requeue([jnp.array([x]) for x in (1.0, 1e36, jnp.nan, 2.0)])
      >>> for batch in queue:
      ...     params, opt_state, report = step(params, opt_state, batch)
      ...     queue.observe(report)
      >>> queue
      BatchQueue(6 handed out, 2 requeued, 1 bad, 0 waiting)
      >>> [(bad.index, bad.reason.name) for bad in queue.bad]
      [(2, 'LOSS')]
    """
    lag = _validate.host_interval("lag", lag, 0)
    retries = _validate.host_interval("retries", retries)
    keep = _validate.host_interval("keep", keep, 0)
    for name, given in (("batches", batches), ("first", first)):
        is_one = is_array(given) or isinstance(given, Mapping | str | type)
        # An object with `__getitem__` alone is iterable too.
        can_iterate = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
        if is_one or not can_iterate:
            raise TypeError(
                f"{name} must be an iterable of batches, got {describe(given)}. Pass a "
                "list, a data loader or a generator: jls.requeue(batches)."
            )
    return BatchQueue(batches, first=first, lag=lag, retries=retries, keep=keep)
