# SPDX-License-Identifier: Apache-2.0
"""The trials of `jls.check_step`: good steps, then one fault at a time.

    good steps      the scale is lowered until none is skipped; then on, until the
                    parameters have moved: each fault is injected at that point
    spikes          the good step after a window of far lower losses and norms
    scales          all at inf, and each by itself if there are several; 2**126, where
                    float16 overflows, if what happens to an inf could not be read
    batch           NaN in one element of an array that is not carried
    gradients       inf in one element, where reading doubts that it is kept
    afterwards      good steps, until the parameters move again

A right step is never called broken. A skipped step must leave the trained leaves as
they are; all others must stay finite, unless they only store the faulty values.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jls._mistakes import is_jit_disabled
from jls._program.facts import Value
from jls._program.frames import Frame
from jls._program.places import place_of
from jls._text import format_scale, join, listed
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings
from jls._tools.check.good_steps import always_compiles, take_good_steps
from jls._tools.check.leaves import as_numpy, is_fp8, is_rounding, same
from jls._tools.check.planting import inf_is_applied
from jls._tools.check.proofs import SUMMED, is_average, is_noise
from jls._tools.check.runs import (
    OutOfRunsError,
    Run,
    Runner,
    is_new,
    nonfinite_since,
)
from jls._tools.check.still import changed_updates, note_still
from jls._tools.check.subject import Subject
from jls._tools.check.tolerance import note_tolerances
from jls._tools.check.two_scales import errors_between_scales
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tree import is_inexact
from jls._types import SIGNALS, SpikeState

# By how much the gradients may differ between loss scales where a solve or an iteration
# is differentiated: an Anderson iteration with a ridge of 1e-5 by 5e-6. Over the second
# number it is a leak.
_ERROR_OF_A_SOLVE, _MAY_BE_A_SOLVE = 1e-4, 1e-3
HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes
# A batch has fewer arrays than this. Of a larger argument that is only read, such as
# another model, one array is enough: all of them go into the gradients together.
_MANY_LEAVES = 8


class Base(NamedTuple):
    """Where faults are injected."""

    runner: Runner
    subject: Subject
    findings: Findings
    good_run: Run  # the good step from here
    window: int  # good steps from one move of the parameters to the next


class Trial(NamedTuple):
    """A good step, and the fault to inject into its arguments."""

    what: str
    changes: Mapping[int, Any]  # by leaf
    code: str  # what is not tried if the run fails
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


Faults = Sequence[Fault]


def try_all(runner: Runner, findings: Findings, cleaned: Sequence[Value]) -> None:
    """Runs the trials one after the other, until no run is left.

    Args:
      runner: of the step.
      findings: what was read.
      cleaned: gradients that may have lost an inf on their way.
    """
    judge_mix(runner, findings)
    good, base, window = list[Run](), None, 1
    if findings.status("no step") != "broken":
        try:
            good, base, window = take_good_steps(runner, findings)
        except ValueError as error:
            if not findings.of("broken"):
                raise
            # The reading says why, and what to write.
            findings.mark_others_not_tried(str(error).partition(". ")[0])
            return
    changed = changed_updates(runner)
    if changed:
        findings.broken(
            "no step",
            "the updates of bfloat16 parameters are rounded away: what "
            "jls.bfloat16_params made is changed before it is applied "
            f"({runner.subject.names(changed)}). Put all of it inside, schedule and "
            "learning rate too",
        )
    if findings.status("no step") == "broken":
        findings.mark_others_not_tried("a good step does not change all that it should")
        return
    subject, why_unmoved = runner.subject, ""
    if not subject.params:
        why_unmoved = (
            "the updates are applied to nothing that comes back: apply them, or name "
            "all arguments that come back with carried="
        )
    elif base is None:
        why_unmoved = f"the parameters did not move in {len(good)} good steps"
    if why_unmoved and findings.status("no step") != "broken":
        findings.not_tried("no step", why_unmoved)
        findings.doubts.append(why_unmoved.partition(":")[0])
    findings.right("no step")
    if always_compiles(good):
        findings.mark_others_not_tried("every call compiles")
        return
    if is_jit_disabled():
        findings.not_tried("retraced", "jax.disable_jit is on: nothing is compiled")
    findings.right("retraced")
    if not subject.params:
        findings.not_tried("not atomic", why_unmoved)
    if base is not None:
        runner.left += 2 * window
    point = Base(runner, subject, findings, base or good[0], window)
    note_still(runner, subject, point.good_run, findings)
    if subject.reading is not None:
        note_tolerances(Frame(subject.reading.traced.program), findings.notes)
    for scale in subject.scales:
        if scale.spikes:
            _try_spike(point, scale)
    runs = [(trial, _attempt(point, trial)) for trial in _in_scales(point)]
    runs += [(trial, _attempt(point, trial)) for trial in _in_batch(point)]
    faults = [_fault(point, trial, run) for trial, run in runs if run is not None]
    _note_finite_losses(point, faults)
    _judge_stuck(point, faults)
    _judge_overflow(point, faults, cleaned)
    _judge_nonfinite(point, faults)
    _judge_atomic(point, faults)
    if why_unmoved:
        findings.not_tried("never recovers", why_unmoved)
    else:
        _judge_recovery(point, faults)
    _compare_devices(point, faults, good)


# The trials.


def _in_scales(point: Base) -> list[Trial]:
    """The trials with other loss scales."""
    scales = tuple(point.subject.scales)
    groups = [(scales, math.inf)]
    if len(scales) > 1:
        groups += [((scale,), math.inf) for scale in scales]
    if point.findings.status("overflow hidden") != "right":
        groups.append((scales, HUGE))
    trials = []
    for group, value in groups:
        text = "inf" if value == math.inf else format_scale(value)
        names = ", ".join(scale.name for scale in group)
        of = f" in {names}" if len(scales) > 1 else ""
        changes = dict[int, Any]()
        for scale in group:
            changes |= point.runner.at_scale(scale, value)
        what = f"a loss scale of {text}{of}"
        trials.append(Trial(what, changes, "nan committed", group))
    return trials


def _in_batch(point: Base) -> list[Trial]:
    """The trials with NaN in an element of each array that is not carried."""
    subject, leaves = point.subject, point.good_run.given
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
            trials.append(Trial(what, {i: array}, what))
    return trials


def _may_hold_nan(leaf: Any) -> bool:
    is_real = is_inexact(leaf) and not np.iscomplexobj(leaf)
    return is_real and np.ndim(leaf) > 0 and np.size(leaf) > 0


def _attempt(point: Base, trial: Trial, after: Run | None = None) -> Run | None:
    """A run, from the point or after another; None if it fails, as findings say."""
    leaves = after.next if after else point.good_run.given
    try:
        return point.runner.run(leaves, trial.what, trial.changes)
    except OutOfRunsError:
        reason = "no run was left"
    except Exception as error:
        reason = f"the step raised {type(error).__name__} in {trial.what}"
    point.findings.not_tried(trial.code, reason)
    return None


def _fault(point: Base, trial: Trial, run: Run) -> Fault:
    """The outcome of a trial."""
    subject, trained = point.subject, point.subject.trained
    # The program only moves elements there, as into a buffer.
    stored = {
        i: is_new(run.before[i], run.after[i])
        for i in run.nonfinite - trained
        if i in subject.results and subject.results[i].now.holds
    }
    left = nonfinite_since(subject, run.before, run.after, stored)
    nonfinite, later = left, None
    if not nonfinite <= trained:
        # Elsewhere it has to stay, unlike in a record of the loss.
        good = _good_step_after(point, trial.what, stored, "nan committed")
        later = _attempt(point, good, run)
        stays = frozenset[int]()
        if later is not None:
            before = point.good_run.before
            stays = nonfinite_since(subject, before, later.after, stored)
        nonfinite &= trained | stays
    return Fault(trial.what, trial.scales, run, stored, left, nonfinite, later)


def _good_step_after(
    point: Base, what: str, stored: Mapping[int, Any], code: Code
) -> Trial:
    changes = {i: point.good_run.given[i] for i in stored}
    return Trial(f"a good step after {what}", changes, code)


# Judgements.


def judge_mix(runner: Runner, findings: Findings) -> None:
    """Whether gradients depend on the loss scale where reading cannot tell."""
    code: Code = "scale leaks"
    if findings.mix is None or findings.is_settled(code):
        return
    evidence, place, given, is_sum = findings.mix
    try:
        errors = errors_between_scales(runner.subject, runner.start, given)
    except Exception as problem:  # such as a callback that sees another scale
        reason = f"{evidence}; at another scale it raises {type(problem).__name__}"
        findings.not_tried(code, reason)
        return
    if errors is None:
        findings.not_tried(code, evidence)
        return
    error = max(errors.low, errors.high)
    leak = max(errors.low * errors.are_in_proportion, errors.high)
    if error <= _ERROR_OF_A_SOLVE:
        findings.right(code, f", to {error:.0e}, in spite of {place}")
    elif is_sum and leak > _MAY_BE_A_SOLVE:
        findings.broken(code, evidence, place)
    else:
        reason = f"{evidence}; at other scales they are {error:.0e} off in float32"
        findings.not_tried(code, reason)


def _note_finite_losses(point: Base, faults: Faults) -> None:
    """Notes where a wrapper whose scale moves skipped for the gradients only."""
    hidden = [
        fault.what
        for fault in faults
        if not fault.scales
        and any(
            scale.counters
            and not scale.is_static
            and fault.run.counted(scale, "skips") > 0
            and not fault.run.counted(scale, "nonfinite_losses")
            for scale in point.subject.scales
        )
    ]
    if hidden and point.findings.status("loss not passed") == "right":
        point.findings.notes.append(
            f"The loss stays finite with {listed(hidden)}, so the skip is "
            "taken for an overflow: the loss scale backs off, and jls.requeue "
            "hands the batch out again. If a jnp.nansum or a mask does it, give "
            "the optimizer a loss that is NaN."
        )


def _judge_stuck(point: Base, faults: Faults) -> None:
    """Whether an overflow changes nothing, not even the loss scale and counters."""
    code: Code = "scale stuck"
    subject, findings = point.subject, point.findings
    for fault in faults:
        for scale in fault.scales:
            own = scale.own & subject.carried.compared
            # An infinite scale shows nothing of a bare scaler.
            is_comparable = scale.counters and not scale.is_static
            counts = is_comparable and not point.good_run.keeps(own)
            if counts and fault.run.keeps(own):
                findings.broken(
                    code,
                    f"{fault.what} changed nothing in {join(*scale.path)}, not even "
                    "the counters: an overflow is one for ever",
                )
    is_seen = subject.reading or all(x.counters for x in subject.scales)
    if is_seen and any(fault.scales for fault in faults):
        findings.right(code)


def _judge_overflow(point: Base, faults: Faults, cleaned: Sequence[Value]) -> None:
    """Whether a step whose gradients overflowed was applied."""
    code: Code = "overflow hidden"
    subject, findings, leaves = point.subject, point.findings, point.good_run.given
    if any(map(is_fp8, subject.items)):
        findings.not_tried(code, "8-bit layers clip their gradients, rightly")
        return
    reason = ""
    if all(is_switched_off(leaves[x.at], x) for x in subject.scales):
        reason = "the loss scale is static and 1"
    elif {"not scaled", "scale leaks"} & findings.of("broken").keys():
        reason = "the gradients are not scaled and unscaled once"
    in_scales = [fault for fault in faults if fault.scales]
    for fault in in_scales:
        # Scales that the step does not use hide nothing.
        if not reason and not _scaler_was_notified(subject, fault):
            _report_applied(point, fault, cleaned)
    _plant_inf(point, cleaned)
    if reason:
        findings.not_tried(code, reason)
    elif in_scales:
        findings.right(code)


def _scaler_was_notified(subject: Subject, fault: Fault) -> bool:
    """Whether a scaler saw the overflow; a bare static one never does."""
    run = fault.run
    return any(
        scale.at in run.backed_off
        or (
            run.counted(scale, "skips") > 0 or not run.counted(scale, "steps")
            if scale.counters
            else scale.is_static and run.keeps(subject.all_params)
        )
        for scale in fault.scales
    )


def _report_applied(point: Base, fault: Fault, cleaned: Sequence[Value]) -> None:
    """Reports an applied step whose gradients overflowed and were cleaned."""
    code: Code = "overflow hidden"
    findings, run, right = point.findings, fault.run, point.good_run
    params = point.subject.all_params
    # At a large scale the gradients may fit, and then the step is the same rightly.
    if not run.comes_out_as(right, params) and _is_steady(point):
        site = cleaned[0].cleaned if cleaned else None
        place = place_of(site) if site else None
        by = f", by {place}" if place else ""
        evidence = (
            f"with {fault.what} the gradients overflowed, and the step was applied: "
            f"something cleaned them before they were looked at{by}"
        )
        findings.broken(code, evidence, place)
    elif not findings.is_read and all(
        np.all(np.isinf(run.before[scale.at])) for scale in fault.scales
    ):
        findings.not_tried(code, f"with {fault.what} the step was applied")


def _is_steady(point: Base) -> bool:
    """Whether two equal calls give the same parameters."""
    trial = Trial("a good step, repeated", {}, "overflow hidden")
    again = _attempt(point, trial)
    params = point.subject.all_params
    return again is not None and again.comes_out_as(point.good_run, params)


def _plant_inf(point: Base, cleaned: Sequence[Value]) -> None:
    """Plants an inf in gradients of which reading doubts that they keep it."""
    code: Code = "overflow hidden"
    all_kept = True
    for gradient in cleaned:
        if point.findings.is_settled(code):
            return
        assert gradient.cleaned is not None
        place = place_of(gradient.cleaned)
        applied = inf_is_applied(point.subject, point.good_run.given, gradient)
        all_kept &= applied is False
        if applied is None:
            reason = f"{place} may lose an inf, where no fault reaches it"
            point.findings.not_tried(code, reason)
        elif applied:
            evidence = (
                f"an inf in the gradients was lost by {place}; the step was applied"
            )
            point.findings.broken(code, evidence, place)
    if cleaned and all_kept:
        point.findings.right(code)


def _try_spike(point: Base, scale: Scale) -> None:
    """The good step after a window of far lower losses and norms: a spike."""
    code: Code = "spike not skipped"
    at, (_, subject, findings, good_run, _) = scale.spikes, point
    if not set(SpikeState._fields) <= at.keys():
        findings.not_tried(code, "the spike policy is not one of jls")
        return
    if subject.all_in(at.values(), subject.frozen):
        findings.broken(code, "the state of the spike policy comes back as it was")
        return
    values = {name: good_run.after[i].astype(np.float32) for name, i in at.items()}
    seen, last = values["seen"], values["value"]
    loss, norm = (last[..., SIGNALS.index(name)] for name in ("loss", "norm"))
    is_judged = np.all(norm > 0) and good_run.counted(scale, "steps")
    unfit = {
        "the limits of the spike policy are constant": seen.shape[-1] < 2,
        "the spike policy has no budget left, or 0": not np.all(values["tokens"] > 0),
        "a good step has no gradient to judge": not is_judged,
    }
    for reason, is_so in unfit.items():
        if is_so:
            findings.not_tried(code, reason)
            return
    far = np.float32(2.0**40)  # however many deviations are allowed
    lower = np.stack([loss - far * (1 + np.abs(loss)), norm / far], axis=-1)
    changes = {
        at["seen"]: np.repeat(lower[..., None], seen.shape[-1], axis=-1),
        at["kept"]: seen.shape[-1],
        at["tokens"]: np.maximum(values["tokens"], 1),
    }
    trial = Trial("a window of far lower losses and norms", changes, code)
    run = _attempt(point, trial)
    if run is None:
        return
    value, limit = (run.after[at[name]] for name in ("value", "limit"))
    has_limit = np.any(limit[..., SIGNALS.index("norm")] < np.inf)
    if has_limit and not np.any(value > limit):
        findings.not_tried(code, "no loss or norm is far enough above others")
    elif not run.counted(scale, "spikes"):
        findings.broken(
            code, "a step far above all that the spike policy had seen was applied"
        )
    else:
        has_no_loss = np.any(values["kept"][..., 0] == 0)
        note = "; the loss is not judged, pass value=loss" if has_no_loss else ""
        findings.right(code, note)


def _judge_nonfinite(point: Base, faults: Faults) -> None:
    code: Code = "nan committed"
    findings, names = point.findings, point.subject.names
    hides = findings.status("overflow hidden") == "broken"
    for fault in faults:
        # A hidden overflow explains what it leaves in a step that is applied.
        if hides and fault.scales and not fault.run.skipped_once:
            continue
        bad = fault.nonfinite - point.good_run.nonfinite
        if bad:
            findings.broken(
                code, f"after {fault.what} an inf or NaN stayed in {names(bad)}"
            )
    stored = {i for fault in faults for i in fault.stored}
    note = f", except {names(stored)}, where what came in is only stored"
    if faults:
        findings.right(code, note if stored else "")


def _judge_atomic(point: Base, faults: Faults) -> None:
    code: Code = "not atomic"
    subject, findings, names = point.subject, point.findings, point.subject.names
    if findings.is_settled(code):
        return
    doubted = subject.trained - subject.kept
    averages = {i for i in doubted if is_average(subject, i)}
    noisy = {i for i in doubted if is_noise(subject, i)}
    must = doubted - averages - noisy
    every = {scale.at for scale in subject.scales}
    skipped = [fault for fault in faults if fault.run.skipped == every]
    others = set[int]()  # buffers, environments: no update is in them
    for fault in skipped:
        run = fault.run
        moved = {
            i
            for i in run.changed & subject.carried.compared
            if is_inexact(subject.items[i].value)
            and not same(run.before[i], run.after[i], fault.stored.get(i))
            and not _may_move(run, i)
        }
        if moved & must:
            first = subject.results.get(min(moved & must))
            site = first.skipped.site if first is not None else None
            evidence = (
                f"{fault.what}: the step was skipped, but it changed "
                f"{names(moved & must)}"
            )
            findings.broken(code, evidence, place_of(site) if site else None)
            return
        others |= moved - subject.trained - subject.own - run.nonfinite
    if must and not skipped:
        findings.not_tried(code, "no fault made the step skip")
    notes = {
        "an average, which goes on towards what stays": averages,
        "noise is added to it": noisy,
        "taken for data, not for parameters": others,
    }
    but = (f"; but {names(x)}: {note}" for note, x in notes.items() if x)
    findings.right(code, "".join(but))


def _may_move(run: Run, i: int) -> bool:
    """Whether a leaf counts up, or is rounded, as weights that are normalized."""
    old, new = run.before[i], run.after[i]
    if old.ndim == 0 and bool(new == old + 1):
        return True
    return is_rounding(old, new)


def _judge_recovery(point: Base, faults: Faults) -> None:
    """Good steps after a bad one: do the parameters move again?"""
    code: Code = "never recovers"
    findings, params = point.findings, point.subject.all_params
    bad = [
        fault
        for fault in faults
        if fault.run.skipped_once
        or fault.run.nonfinite
        or not fault.run.comes_out_as(point.good_run, params)
    ]
    if not bad:
        findings.not_tried(code, "no fault had an effect")
        return
    in_scale = [fault for fault in bad if fault.scales]
    in_batch = [fault for fault in bad if not fault.scales]
    # First one that left something behind, if there is one.
    in_batch.sort(key=lambda x: not x.left)
    for fault in in_scale[:1] + in_batch[:1]:
        trial = _good_step_after(point, fault.what, fault.stored, code)
        run = fault.later or _attempt(point, trial, fault.run)
        for _ in range(point.window):
            if run is None or not run.keeps(params):
                break
            run = _attempt(point, trial._replace(changes={}), run)
        if run is None:
            return
        if run.keeps(params):
            names = point.subject.names(fault.left)
            findings.broken(
                code,
                f"after {fault.what} no good step moved the parameters any more"
                + (f": {names} kept an inf or NaN" if fault.left else ""),
            )
    findings.right(code)


def _compare_devices(point: Base, faults: Faults, good: Sequence[Run]) -> None:
    """Whether all devices hold the same, of what they hold together."""
    code: Code = "out of sync"
    findings, subject = point.findings, point.subject
    if len(point.runner.devices) < 2:
        for name in (code, SUMMED):
            findings.does_not_apply(name, "everything carried is on one device")
        return
    runs = [("a good step", run) for run in good]
    runs += [(fault.what, fault.run) for fault in faults]
    for what, run in runs:
        diverged = run.diverged & subject.carried.compared
        if diverged:
            names = subject.names(diverged)
            findings.broken(
                code, f"after {what} devices hold different values of {names}"
            )
    if any(point.good_run.after[x.at].ndim for x in subject.scales):
        reason = "of a state with an axis of devices each may train a model of its own"
        findings.not_tried(code, reason)
    findings.right(code)
