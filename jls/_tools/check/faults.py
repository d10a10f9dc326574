# SPDX-License-Identifier: Apache-2.0
"""The faults of `jls.check_step`, one at a time, in the place of a good step.

    scales          all at inf, and each by itself if there are several; 2**126, where
                    float16 overflows, if what happens to an inf could not be read
    batch           NaN in one element of an array that is not carried

A mistake may have trials of its own, such as good steps after a fault.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jls._text import format_scale
from jls._tools.check.codes import Code
from jls._tools.check.findings import Finding, Note, Status
from jls._tools.check.good_steps import Good
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Run, Trial, at_scale, is_new, nonfinite_since
from jls._tools.reading.scales import Scale
from jls._tree import is_inexact

HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes
# A batch has fewer arrays than this. Of a larger argument that is only read, such as
# another model, one array is enough: all of them go into the gradients together.
_MANY_LEAVES = 8

_T = TypeVar("_T")
# It yields what it finds, and trials: it is sent the run of each, or the finding that
# says why there is none. It returns T.
Trying = Generator[Finding | Note | Trial, Run | Finding, _T]


class Fault(NamedTuple):
    """A fault that was injected."""

    what: str
    scales: tuple[Scale, ...]  # where the fault is, if in loss scales
    run: Run
    stored: Mapping[int, Any]  # the indices of elements that only store it, by leaf
    left: frozenset[int]  # leaves with an inf or NaN after it, other than stored ones
    nonfinite: frozenset[int]  # of these, those in which it stays
    later: Run | None  # the good step after it, where one was needed


class Faults(NamedTuple):
    """The faults that were injected, and what could not be, by code or by the fault."""

    good: Good
    status: Callable[[Code], Status | None]  # what is found of a mistake so far
    in_scales: list[Fault]
    in_batch: list[Fault]
    not_tried: dict[str, Finding]

    @property
    def every(self) -> list[Fault]:
        return [*self.in_scales, *self.in_batch]


def inject(good: Good, status: Callable[[Code], Status | None]) -> Trying[Faults]:
    """Tries one fault after the other, until no run is left."""
    faults = Faults(good, status, [], [], {})
    runs = list[tuple[Trial, tuple[Scale, ...], Run]]()
    for trial, scales in [*_in_scales(good), *_in_batch(good)]:
        run = yield trial
        if isinstance(run, Finding):
            name = "nan committed" if scales else trial.what
            faults.not_tried.setdefault(name, run)
        else:
            runs.append((trial, scales, run))
    for trial, scales, run in runs:
        fault = yield from _fault(faults, trial, scales, run)
        (faults.in_scales if scales else faults.in_batch).append(fault)
    return faults


def _in_scales(good: Good) -> Iterator[tuple[Trial, tuple[Scale, ...]]]:
    """The trials with other loss scales, and which these are."""
    scales = tuple(good.subject.scales)
    groups = [(scales, math.inf)]
    if len(scales) > 1:
        groups += [((scale,), math.inf) for scale in scales]
    if not good.subject.keeps_inf:
        groups.append((scales, HUGE))
    for group, value in groups:
        text = "inf" if value == math.inf else format_scale(value)
        names = ", ".join(scale.name for scale in group)
        of = f" in {names}" if len(scales) > 1 else ""
        changes = dict[int, Any]()
        for scale in group:
            changes |= at_scale(good.run.given, scale, value)
        yield Trial(good.run.given, f"a loss scale of {text}{of}", changes), group


def _in_batch(good: Good) -> Iterator[tuple[Trial, tuple[Scale, ...]]]:
    """The trials with NaN in an element of each array that is not carried."""
    subject, leaves = good.subject, good.run.given
    # Not a part of an argument that is carried, such as a field left out.
    owners = {subject.items[k].path[0] for k in subject.carried.leaves}
    found = defaultdict[str, list[int]](list)
    for i, item in enumerate(subject.items):
        is_data = item.path[0] not in owners and _may_hold_nan(leaves[i])
        if is_data and subject.reaches_gradients(i):
            found[item.path[0]].append(i)
    # The batch comes after the state, as a rule, and has few arrays.
    last = max(scale.at for scale in subject.scales)
    for group in sorted(found.values(), key=lambda x: (x[0] < last, len(x))):
        for i in group if len(group) <= _MANY_LEAVES else group[:1]:
            array = np.array(as_numpy(leaves[i]))
            array[(0,) * array.ndim] = np.nan
            yield Trial(leaves, f"NaN in {subject.items[i].name}", {i: array}), ()


def _may_hold_nan(leaf: Any) -> bool:
    is_real = is_inexact(leaf) and not np.iscomplexobj(leaf)
    return is_real and np.ndim(leaf) > 0 and np.size(leaf) > 0


def _fault(
    faults: Faults, trial: Trial, scales: tuple[Scale, ...], run: Run
) -> Trying[Fault]:
    """What a trial did; a good step after it shows what stays."""
    good = faults.good
    subject, trained = good.subject, good.subject.trained
    # The program only moves elements there, as into a buffer.
    stored = {
        i: is_new(run.before[i], run.after[i])
        for i in run.nonfinite - trained
        if i in subject.results and subject.results[i].now.holds
    }
    left = nonfinite_since(subject, run.before, run.after, stored)
    fault = Fault(trial.what, scales, run, stored, left, left, None)
    if left <= trained:
        return fault
    # Elsewhere it has to stay, unlike in a record of the loss.
    later = yield good_step_after(good, fault)
    if isinstance(later, Finding):
        faults.not_tried.setdefault("nan committed", later)
        return fault._replace(nonfinite=left & trained)
    stays = nonfinite_since(subject, good.run.before, later.after, stored)
    return fault._replace(nonfinite=left & (trained | stays), later=later)


def good_step_after(good: Good, fault: Fault) -> Trial:
    """A good step, with what the fault was stored in as it was."""
    changes = {i: good.run.given[i] for i in fault.stored}
    return Trial(fault.run.next, f"a good step after {fault.what}", changes)
