# SPDX-License-Identifier: Apache-2.0
"""The faults of `jls.check_step`, one at a time, in the place of a good step.

    scales          all at inf, and each by itself if there are several; 2**126, where
                    float16 overflows, if what happens to an inf could not be read
    batch           NaN in one element of an array that is not carried

A mistake may have trials of its own, such as good steps after a fault.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jls._text import format_scale
from jls._tools.check.codes import Code
from jls._tools.check.findings import Finding, Status, untried
from jls._tools.check.good_steps import Good
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import OutOfRunsError, Run, is_new, nonfinite_since
from jls._tools.reading.scales import Scale
from jls._tree import is_inexact

HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes
# A batch has fewer arrays than this. Of a larger argument that is only read, such as
# another model, one array is enough: all of them go into the gradients together.
_MANY_LEAVES = 8


class Trial(NamedTuple):
    """A good step, and the fault to inject into its arguments."""

    what: str
    changes: Mapping[int, Any] = {}  # by leaf
    scales: tuple[Scale, ...] = ()  # where the fault is, if in loss scales


class Fault(NamedTuple):
    """A trial that was run."""

    what: str
    scales: tuple[Scale, ...]
    run: Run
    stored: Mapping[int, Any]  # the indices of elements that only store it, by leaf
    left: frozenset[int]  # leaves with an inf or NaN after it, other than stored ones
    nonfinite: frozenset[int]  # of these, those in which it stays
    later: Run | None  # the good step after it, where one was needed


class Faults(NamedTuple):
    """The trials that were run, and what could not be, by code or by the fault."""

    good: Good
    status: Callable[[Code], Status | None]  # what is found of a mistake so far
    in_scales: list[Fault]
    in_batch: list[Fault]
    not_tried: dict[str, Finding]

    @property
    def every(self) -> list[Fault]:
        return [*self.in_scales, *self.in_batch]


def inject(good: Good, status: Callable[[Code], Status | None]) -> Faults:
    """Runs the trials one after the other, until no run is left."""
    faults = Faults(good, status, [], [], {})
    trials = [*_in_scales(good), *_in_batch(good)]
    runs = [(trial, attempt(good, trial)) for trial in trials]
    for trial, run in runs:
        if isinstance(run, Finding):
            name = "nan committed" if trial.scales else trial.what
            faults.not_tried.setdefault(name, run)
    for trial, run in runs:
        if isinstance(run, Run):
            group = faults.in_scales if trial.scales else faults.in_batch
            group.append(_fault(faults, trial, run))
    return faults


def _in_scales(good: Good) -> list[Trial]:
    """The trials with other loss scales."""
    scales = tuple(good.subject.scales)
    groups = [(scales, math.inf)]
    if len(scales) > 1:
        groups += [((scale,), math.inf) for scale in scales]
    if not good.subject.keeps_inf:
        groups.append((scales, HUGE))
    trials = []
    for group, value in groups:
        text = "inf" if value == math.inf else format_scale(value)
        names = ", ".join(scale.name for scale in group)
        of = f" in {names}" if len(scales) > 1 else ""
        changes = dict[int, Any]()
        for scale in group:
            changes |= good.runner.at_scale(scale, value)
        what = f"a loss scale of {text}{of}"
        trials.append(Trial(what, changes, group))
    return trials


def _in_batch(good: Good) -> list[Trial]:
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
    trials = []
    for group in sorted(found.values(), key=lambda x: (x[0] < last, len(x))):
        for i in group if len(group) <= _MANY_LEAVES else group[:1]:
            array = np.array(as_numpy(leaves[i]))
            array[(0,) * array.ndim] = np.nan
            what = f"NaN in {subject.items[i].name}"
            trials.append(Trial(what, {i: array}))
    return trials


def _may_hold_nan(leaf: Any) -> bool:
    is_real = is_inexact(leaf) and not np.iscomplexobj(leaf)
    return is_real and np.ndim(leaf) > 0 and np.size(leaf) > 0


def attempt(good: Good, trial: Trial, after: Run | None = None) -> Run | Finding:
    """A run in the place of the good step or after another; or why it fails."""
    leaves = after.next if after else good.run.given
    try:
        return good.runner.run(leaves, trial.what, trial.changes)
    except OutOfRunsError:
        return untried("no run was left")
    except Exception as error:
        reason = f"the step raised {type(error).__name__} in {trial.what}"
        return untried(reason)


def _fault(faults: Faults, trial: Trial, run: Run) -> Fault:
    """The outcome of a trial."""
    good = faults.good
    subject, trained = good.subject, good.subject.trained
    # The program only moves elements there, as into a buffer.
    stored = {
        i: is_new(run.before[i], run.after[i])
        for i in run.nonfinite - trained
        if i in subject.results and subject.results[i].now.holds
    }
    left = nonfinite_since(subject, run.before, run.after, stored)
    fault = Fault(trial.what, trial.scales, run, stored, left, left, None)
    if left <= trained:
        return fault
    # Elsewhere it has to stay, unlike in a record of the loss.
    later = attempt(good, good_step_after(good, fault), run)
    if isinstance(later, Finding):
        faults.not_tried.setdefault("nan committed", later)
        return fault._replace(nonfinite=left & trained)
    stays = nonfinite_since(subject, good.run.before, later.after, stored)
    return fault._replace(nonfinite=left & (trained | stays), later=later)


def good_step_after(good: Good, fault: Fault) -> Trial:
    """A good step, with what the fault was stored in as it was."""
    changes = {i: good.run.given[i] for i in fault.stored}
    return Trial(f"a good step after {fault.what}", changes)
