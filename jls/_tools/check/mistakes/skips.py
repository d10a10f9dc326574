# SPDX-License-Identifier: Apache-2.0
"""What a skipped step leaves behind: NaN, parameters that moved, or no way on."""

import numpy as np
import optax

from jls._program.places import place_of
from jls._tools.check.faults import Fault, Faults, Trying, good_step_after
from jls._tools.check.findings import Finding, Found, broken, right, untried
from jls._tools.check.leaves import is_rounding, same
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.program import Library
from jls._tools.check.runs import Run, Trial
from jls._tools.check.subject import Subject
from jls._tree import is_inexact

# A decay and 1 - decay add up to 1, except for rounding: the eps of float16 is 9.8e-4.
_ROUNDING = 1e-3

_SELECT = (
    "new = jls.select(opt_state.applied, new, old) for what the optimizer does not hold"
)
_DECAY = "weight decay inside: jls.loss_scaled(optax.adamw(3e-4, weight_decay=1e-2))"
_ATOMIC = (
    "with jls.atomic({optimizer}, {model}): around the forward pass and the update; it "
    "takes back what the step changed in the model"
)
_OUTSIDE: dict[Library | type, str] = {
    optax.MaskedState: "jls.loss_scaled(optax.masked(inner, mask)): the wrapper sees "
    "no gradient of what a mask outside leaves out",
    optax.PartitionState: "jls.loss_scaled(optax.multi_transform(parts, labels)), with "
    "no wrapper in the parts: one sees no gradient of the others",
}
LEAVE_OUT = (
    ". If some state is meant to move in a bad step, name only the fields that must "
    'not: jls.check_step(..., carried={"state": ["params", "opt_state"]})'
)


def _judge_nonfinite(faults: Faults) -> Found:
    good, names = faults.good, faults.good.subject.names
    hides = faults.status("overflow hidden") == "broken"
    for fault in faults.every:
        # A hidden overflow explains what it leaves in a step that is applied.
        if hides and fault.scales and not fault.run.skipped_once:
            continue
        bad = fault.nonfinite - good.run.nonfinite
        if bad:
            yield broken(f"after {fault.what} an inf or NaN stayed in {names(bad)}")
    stored = {i for fault in faults.every for i in fault.stored}
    note = f", except {names(stored)}, where what came in is only stored"
    if faults.every:
        yield right(note if stored else "")


NAN_COMMITTED = Mistake(
    "nan committed",
    right="after a fault no inf or NaN stayed",
    write=_SELECT,
    write_with={"nnx": _ATOMIC, **_OUTSIDE},
    write_after=LEAVE_OUT,
    is_sure_unread=False,
    of_faults=_judge_nonfinite,
)


# A skipped step may change two kinds of leaves: those with added noise, and running
# averages of the parameters.


def is_noise(subject: Subject, leaf: int) -> bool:
    """Whether a skip changes a leaf by random numbers."""
    reading, result = subject.reading, subject.results.get(leaf)
    if reading is None or result is None:
        return False
    return reading.flow.is_random(result.skipped)


def is_average(subject: Subject, leaf: int) -> bool:
    """Whether a skip makes a leaf out of itself and other trained leaves only.

    A target network does, an average of the parameters, and a record of them. Weights
    that do not add up to 1 are no average.
    """
    reading, result = subject.reading, subject.results.get(leaf)
    if reading is None or result is None:
        return False
    items, weights = subject.items, result.skipped.weights
    if weights is not None and abs(sum(x for _, x in weights) - 1) > _ROUNDING:
        return False
    sources = set(reading.leaves_in(result.skipped.depends))
    others = {i for i in sources & subject.trained if i != leaf}
    # A rate or a count; pmap stacks it, as it does the loss scales.
    scalars = {(), (1,), *(np.shape(items[x.at].value) for x in subject.scales)}
    counts = {i for i in sources if np.shape(items[i].value) in scalars}
    return bool(others) and sources - counts <= subject.trained


def _judge_atomic(faults: Faults) -> Found:
    good, subject, names = faults.good, faults.good.subject, faults.good.subject.names
    if not subject.params:
        yield untried(good.why_unmoved)
    doubted = subject.trained - subject.kept
    averages = {i for i in doubted if is_average(subject, i)}
    noisy = {i for i in doubted if is_noise(subject, i)}
    must = doubted - averages - noisy
    every = {scale.at for scale in subject.scales}
    skipped = [fault for fault in faults.every if fault.run.skipped == every]
    others = set[int]()  # buffers, environments: no update is in them
    for fault in skipped:
        moved = _moved(subject, fault)
        if moved & must:
            first = subject.results.get(min(moved & must))
            site = first.skipped.site if first is not None else None
            evidence = (
                f"{fault.what}: the step was skipped, but it changed "
                f"{names(moved & must)}"
            )
            yield broken(evidence, place_of(site) if site else None)
            return
        others |= moved - subject.trained - subject.own - fault.run.nonfinite
    if must and not skipped:
        yield untried("no fault made the step skip")
    notes = {
        "an average, which goes on towards what stays": averages,
        "noise is added to it": noisy,
        "taken for data, not for parameters": others,
    }
    but = (f"; but {names(x)}: {note}" for note, x in notes.items() if x)
    yield right("".join(but))


def _moved(subject: Subject, fault: Fault) -> set[int]:
    """The numbers that a skipped step changed, by leaf."""
    before, after = fault.run.before, fault.run.after
    return {
        i
        for i in fault.run.changed & subject.carried.compared
        if is_inexact(subject.items[i].value)
        and not same(before[i], after[i], fault.stored.get(i))
        and not _may_move(before[i], after[i])
    }


def _may_move(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether a leaf counts up, or is rounded, as weights that are normalized."""
    if old.ndim == 0 and bool(new == old + 1):
        return True
    return is_rounding(old, new)


NOT_ATOMIC = Mistake(
    "not atomic",
    right="a skipped step leaves what is trained as it was",
    write=f"{_SELECT}; {_DECAY}",
    write_with={"nnx": f"{_ATOMIC}; {_DECAY}", **_OUTSIDE},
    write_after=LEAVE_OUT,
    is_sure_unread=False,
    of_faults=_judge_atomic,
)


def _judge_recovery(faults: Faults) -> Trying[None]:
    """Good steps after a bad one: do the parameters move again?"""
    good, params = faults.good, faults.good.subject.all_params
    if good.why_unmoved:
        yield untried(good.why_unmoved)
        return

    def has_effect(run: Run) -> bool:
        is_bad = bool(run.skipped_once or run.nonfinite)
        return is_bad or not run.comes_out_as(good.run, params)

    in_scale = [fault for fault in faults.in_scales if has_effect(fault.run)]
    in_batch = [fault for fault in faults.in_batch if has_effect(fault.run)]
    if not (in_scale or in_batch):
        yield untried("no fault had an effect")
        return
    # First one that left something behind, if there is one.
    in_batch.sort(key=lambda x: not x.left)
    for fault in in_scale[:1] + in_batch[:1]:
        trial = good_step_after(good, fault)
        run = fault.later or (yield trial)
        for _ in range(good.window):
            if isinstance(run, Finding) or not run.keeps(params):
                break
            run = yield Trial(run.next, trial.what)
        if isinstance(run, Finding):
            yield run
            return
        if run.keeps(params):
            names = good.subject.names(fault.left)
            yield broken(
                f"after {fault.what} no good step moved the parameters any more"
                + (f": {names} kept an inf or NaN" if fault.left else "")
            )
    yield right()


_ACCUMULATION = "jls.loss_scaled(optax.MultiSteps(inner, k)), accumulation inside"
NEVER_RECOVERS = Mistake(
    "never recovers",
    right="after a bad step, good ones train on",
    write=_SELECT,
    write_with={"nnx": _ATOMIC, optax.MultiStepsState: _ACCUMULATION, **_OUTSIDE},
    of_faults=_judge_recovery,
)
