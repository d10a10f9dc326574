# SPDX-License-Identifier: Apache-2.0
"""The trials of `jls.check_step`: good steps, then one fault at a time.

    good steps      the scale is lowered until none is skipped; then on, until the
                    parameters have moved: each fault is injected at that point
    spikes          the good step after a window of far lower losses and norms
    scales          all at inf, and each alone if there are several; 2**126, where
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
from jls._program.places import place_of
from jls._text import format_scale, join, listed
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings
from jls._tools.check.good_steps import Base, always_compiles, take_good_steps
from jls._tools.check.leaves import as_numpy, is_fp8, is_rounding
from jls._tools.check.planting import inf_is_applied
from jls._tools.check.proofs import SUMMED, is_average, is_noise
from jls._tools.check.runs import Leaves, OutOfRunsError, Run, Runner, is_new
from jls._tools.check.subject import Subject
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tree import is_inexact
from jls._types import SIGNALS, SpikeState

HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes
# A batch has fewer arrays than this. Of a larger argument that is only read, such as
# another model, one array is enough: all of them go into the gradients together.
_MANY_LEAVES = 8


class Trial(NamedTuple):
    """A good step, and the fault to inject into its arguments."""

    what: str
    changes: Mapping[int, Any]  # by leaf
    code: Code | None = None  # is not tried if the run fails; None if no one code is
    scales: tuple[Scale, ...] = ()  # where the fault is, if in loss scales


class Fault(NamedTuple):
    """A trial that was run."""

    what: str
    scales: tuple[Scale, ...]
    run: Run
    stored: Mapping[int, Any]  # the indices of elements that only store it, by leaf
    nonfinite: set[int]  # leaves with an inf or NaN that stays
    later: Run | None  # the good step after it, where one was needed


class Trials(NamedTuple):
    """The faults that were injected at one point."""

    runner: Runner
    findings: Findings
    base: Base  # the point
    faults: Sequence[Fault]

    @property
    def good_run(self) -> Run:
        return self.base.good_run

    @property
    def subject(self) -> Subject:
        return self.runner.subject


def try_all(runner: Runner, findings: Findings, cleaned: Sequence[Value]) -> None:
    """Runs the trials one after the other, until no run is left.

    Args:
      runner: of the step.
      findings: what was read.
      cleaned: gradients that may have lost an inf on their way.
    """
    good, base = list[Run](), None
    if findings.status("no step") != "broken":
        try:
            good, base = take_good_steps(runner, findings)
        except ValueError as error:
            if not findings.of("broken"):
                raise
            # What was read says why, and what to write.
            findings.mark_others_not_tried(str(error).partition(". ")[0])
            return
    if findings.status("no step") == "broken":
        findings.mark_others_not_tried("a good step does not change all that it should")
        return
    subject, why_unmoved = runner.subject, ""
    if not subject.params:
        why_unmoved = (
            "the updates are applied to nothing that comes back: apply them, or name "
            "all arguments that come back with carried="
        )
        findings.not_tried("no step", why_unmoved)
    elif base is None:
        why_unmoved = f"the parameters did not move in {len(good)} good steps"
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
        runner.left += 2 * base.window
    base = base or Base(good[0], 1)
    for scale in subject.scales:
        if scale.spikes:
            _try_spike(runner, findings, base.good_run, scale)
    is_read = findings.status("overflow hidden") == "right"
    leaves, faults = base.good_run.given, list[Fault]()
    for trial in _in_scales(runner, is_read) + _in_batch(subject, leaves):
        run = _attempt(runner, findings, leaves, trial)
        if run is not None:
            faults.append(_fault(runner, findings, base, trial, run))
    trials = Trials(runner, findings, base, faults)
    _note_finite_losses(findings, faults)
    _judge_stuck(trials)
    _judge_overflow(trials, cleaned)
    _judge_nonfinite(trials)
    _judge_atomic(trials)
    if why_unmoved:
        findings.not_tried("never recovers", why_unmoved)
    else:
        _judge_recovery(trials)
    _compare_devices(trials, good)


# The trials.


def _in_scales(runner: Runner, is_read: bool) -> list[Trial]:
    """The trials with other loss scales.

    Args:
      runner: of the step.
      is_read: whether the program says what becomes of an inf in the gradients.
    """
    scales = tuple(runner.subject.scales)
    groups = [(scales, math.inf)]
    if len(scales) > 1:
        groups += [((scale,), math.inf) for scale in scales]
    if not is_read:
        groups.append((scales, HUGE))
    trials = []
    for group, value in groups:
        text = "inf" if value == math.inf else format_scale(value)
        names = ", ".join(scale.name for scale in group)
        of = f" in {names}" if len(scales) > 1 else ""
        changes = dict[int, Any]()
        for scale in group:
            changes |= runner.at_scale(scale, value)
        what = f"a loss scale of {text}{of}"
        trials.append(Trial(what, changes, "nan committed", group))
    return trials


def _in_batch(subject: Subject, leaves: Leaves) -> list[Trial]:
    """The trials with NaN in an element of each array that is not carried."""
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
            trials.append(Trial(f"NaN in {subject.items[i].name}", {i: array}))
    return trials


def _may_hold_nan(leaf: Any) -> bool:
    is_real = is_inexact(leaf) and not np.iscomplexobj(leaf)
    return is_real and np.ndim(leaf) > 0 and np.size(leaf) > 0


def _attempt(
    runner: Runner, findings: Findings, leaves: Leaves, trial: Trial
) -> Run | None:
    """A run; None if it fails, with the reason in the findings."""
    try:
        return runner.run(leaves, trial.what, trial.changes)
    except OutOfRunsError:
        reason = "no run was left"
    except Exception as error:
        reason = f"the step raised {type(error).__name__} in {trial.what}"
    if trial.code:
        findings.not_tried(trial.code, reason)
    else:
        findings.untried[trial.what] = reason
    return None


def _fault(
    runner: Runner, findings: Findings, base: Base, trial: Trial, run: Run
) -> Fault:
    """What a trial did."""
    trained, results = run.subject.trained, run.subject.results
    # The program only moves elements there, as into a buffer.
    stored = {
        i: is_new(run.before[i], run.after[i])
        for i in run.nonfinite() - trained
        if i in results and results[i].now.holds
    }
    nonfinite, later = run.nonfinite(stored), None
    if not nonfinite <= trained:
        # Elsewhere it has to stay, unlike in a record of the loss.
        after = _good_step_after(trial.what, stored, base, "nan committed")
        later = _attempt(runner, findings, run.next, after)
        stays = later.nonfinite(stored, since=base.good_run) if later else set()
        nonfinite &= trained | stays
    return Fault(trial.what, trial.scales, run, stored, nonfinite, later)


def _good_step_after(
    what: str, stored: Mapping[int, Any], base: Base, code: Code
) -> Trial:
    changes = {i: base.good_run.given[i] for i in stored}
    return Trial(f"a good step after {what}", changes, code)


# What they show.


def _note_finite_losses(findings: Findings, faults: Sequence[Fault]) -> None:
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
            for scale in fault.run.subject.scales
        )
    ]
    if hidden and findings.status("loss not passed") == "right":
        findings.notes.append(
            f"The loss stays finite with {listed(hidden)}, so the skip is "
            "taken for an overflow: the loss scale backs off, and jls.requeue "
            "hands the batch out again. If a jnp.nansum or a mask does it, give "
            "the optimizer a loss that is NaN."
        )


def _judge_stuck(trials: Trials) -> None:
    """Whether an overflow changes nothing, not even the loss scale and counters."""
    code: Code = "scale stuck"
    subject, findings = trials.subject, trials.findings
    for fault in trials.faults:
        for scale in fault.scales:
            own = scale.own & subject.carried.compared
            # Of a bare scaler an infinite scale shows nothing.
            is_comparable = scale.counters and not scale.is_static
            counts = is_comparable and not trials.good_run.keeps(own)
            if counts and fault.run.keeps(own):
                findings.broken(
                    code,
                    f"{fault.what} changed nothing in {join(*scale.path)}, not even "
                    "the counters: an overflow is one for ever",
                )
    is_seen = subject.reading or all(x.counters for x in subject.scales)
    if is_seen and any(fault.scales for fault in trials.faults):
        findings.right(code)


def _judge_overflow(trials: Trials, cleaned: Sequence[Value]) -> None:
    """Whether a step whose gradients overflowed was applied."""
    code: Code = "overflow hidden"
    subject, findings, leaves = trials.subject, trials.findings, trials.good_run.given
    if any(map(is_fp8, subject.items)):
        findings.not_tried(code, "8-bit layers clip their gradients, rightly")
        return
    reason = ""
    if all(is_switched_off(leaves[x.at], x) for x in subject.scales):
        reason = "the loss scale is static and 1"
    elif {"not scaled", "scale leaks"} & findings.of("broken").keys():
        reason = "the gradients are not scaled and unscaled once"
    in_scales = [fault for fault in trials.faults if fault.scales]
    for fault in in_scales:
        # Scales that the step does not use hide nothing.
        if not reason and not _scaler_was_notified(fault):
            _report_applied(trials, fault, cleaned)
    _plant_inf(trials, cleaned)
    if reason:
        findings.not_tried(code, reason)
    elif in_scales:
        findings.right(code)


def _scaler_was_notified(fault: Fault) -> bool:
    """Whether a scaler saw the overflow; a bare static one never does."""
    run = fault.run
    return any(
        run.backed_off(scale)
        or (
            run.counted(scale, "skips") > 0 or not run.counted(scale, "steps")
            if scale.counters
            else scale.is_static and run.keeps(run.subject.all_params)
        )
        for scale in fault.scales
    )


def _report_applied(trials: Trials, fault: Fault, cleaned: Sequence[Value]) -> None:
    """Reports an applied step whose gradients overflowed and were cleaned."""
    code: Code = "overflow hidden"
    findings, run, right = trials.findings, fault.run, trials.good_run
    # At a large scale the gradients may fit, and then the step is the same rightly.
    if not _is_as_good(run, right) and _is_steady(trials):
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


def _is_as_good(run: Run, right: Run) -> bool:
    """Whether the parameters come out as in a good step."""
    return run.comes_out_as(right, run.subject.all_params)


def _is_steady(trials: Trials) -> bool:
    """Whether two equal calls give the same parameters."""
    trial = Trial("a good step, repeated", {}, "overflow hidden")
    again = _attempt(trials.runner, trials.findings, trials.good_run.given, trial)
    return again is not None and _is_as_good(again, trials.good_run)


def _plant_inf(trials: Trials, cleaned: Sequence[Value]) -> None:
    """Plants an inf in gradients of which reading doubts that they keep it."""
    code: Code = "overflow hidden"
    for gradient in cleaned:
        if trials.findings.is_settled(code):
            return
        assert gradient.cleaned is not None
        place = place_of(gradient.cleaned)
        applied = inf_is_applied(trials.subject, trials.good_run.given, gradient)
        if applied is None:
            reason = f"{place} may lose an inf, where no fault reaches it"
            trials.findings.not_tried(code, reason)
        elif applied:
            evidence = (
                f"an inf in the gradients was lost by {place}; the step was applied"
            )
            trials.findings.broken(code, evidence, place)


def _try_spike(runner: Runner, findings: Findings, good_run: Run, scale: Scale) -> None:
    """The good step after a window of far lower losses and norms: a spike."""
    code: Code = "spike not skipped"
    at, subject = scale.spikes, runner.subject
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
    run = _attempt(runner, findings, good_run.given, trial)
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


def _judge_nonfinite(trials: Trials) -> None:
    code: Code = "nan committed"
    findings, names = trials.findings, trials.subject.names
    hides = findings.status("overflow hidden") == "broken"
    for fault in trials.faults:
        # A hidden overflow explains what it leaves in a step that is applied.
        if hides and fault.scales and not fault.run.any_skipped():
            continue
        bad = fault.nonfinite - trials.good_run.nonfinite()
        if bad:
            findings.broken(
                code, f"after {fault.what} an inf or NaN stayed in {names(bad)}"
            )
    stored = {i for fault in trials.faults for i in fault.stored}
    note = f", but for {names(stored)}, where what came in is only stored"
    if trials.faults:
        findings.right(code, note if stored else "")


def _judge_atomic(trials: Trials) -> None:
    code: Code = "not atomic"
    subject, findings, names = trials.subject, trials.findings, trials.subject.names
    if findings.is_settled(code):
        return
    doubted = subject.trained - subject.kept
    averages = {i for i in doubted if is_average(subject, i)}
    noisy = {i for i in doubted if is_noise(subject, i)}
    must = doubted - averages - noisy
    skipped = [fault for fault in trials.faults if fault.run.all_skipped()]
    others = set[int]()  # buffers, environments: no update is in them
    for fault in skipped:
        run = fault.run
        moved = {
            i
            for i in run.changed(fault.stored)
            if is_inexact(subject.items[i].value) and not _may_move(run, i)
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
        others |= moved - subject.trained - subject.own - run.nonfinite()
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


def _judge_recovery(trials: Trials) -> None:
    """Good steps after a bad one: do the parameters move again?"""
    code: Code = "never recovers"
    findings, params = trials.findings, trials.subject.all_params
    bad = [
        fault
        for fault in trials.faults
        if fault.run.any_skipped()
        or fault.run.nonfinite()
        or not _is_as_good(fault.run, trials.good_run)
    ]
    if not bad:
        findings.not_tried(code, "no fault had an effect")
        return
    in_scale = [fault for fault in bad if fault.scales]
    in_batch = [fault for fault in bad if not fault.scales]
    # Of the batch one that left something behind, if there is one.
    in_batch.sort(key=lambda x: not x.run.nonfinite(x.stored))
    for fault in in_scale[:1] + in_batch[:1]:
        trial = _good_step_after(fault.what, fault.stored, trials.base, code)
        run = fault.later or _attempt(trials.runner, findings, fault.run.next, trial)
        for _ in range(trials.base.window):
            if run is None or not run.keeps(params):
                break
            again = trial._replace(changes={})
            run = _attempt(trials.runner, findings, run.next, again)
        if run is None:
            return
        if run.keeps(params):
            kept = fault.run.nonfinite(fault.stored)
            names = trials.subject.names(kept)
            findings.broken(
                code,
                f"after {fault.what} no good step moved the parameters any more"
                + (f": {names} kept an inf or NaN" if kept else ""),
            )
    findings.right(code)


def _compare_devices(trials: Trials, good: Sequence[Run]) -> None:
    """Whether all devices hold the same, of what they hold together."""
    code: Code = "out of sync"
    findings, subject = trials.findings, trials.subject
    if len(trials.runner.devices) < 2:
        for name in (code, SUMMED):
            findings.does_not_apply(name, "everything carried is on one device")
        return
    runs = [("a good step", run) for run in good]
    runs += [(fault.what, fault.run) for fault in trials.faults]
    for what, run in runs:
        diverged = run.diverged & subject.carried.compared
        if diverged:
            names = subject.names(diverged)
            findings.broken(
                code, f"after {what} devices hold different values of {names}"
            )
    if any(trials.good_run.after[x.at].ndim for x in subject.scales):
        reason = "of a state with an axis of devices each may train a model of its own"
        findings.not_tried(code, reason)
    findings.right(code)
