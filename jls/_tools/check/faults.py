# SPDX-License-Identifier: Apache-2.0
"""The trials of `jls.check_step`: good steps, then one fault at a time.

    good steps      the scale is lowered until none is skipped; then on, until the
                    parameters have moved: each fault is injected at that point
    scales          all at inf, and each alone if there are several; 2**126, where
                    float16 overflows, if what happens to an inf could not be read
    batch           NaN in one element of an array that is not carried
    gradients       inf in one element, where reading doubts that it is kept
    afterwards      good steps, until the parameters move again

A right step is never called broken. A skipped step must leave the trained leaves as
they are; all others must stay finite, unless they only store the faulty values.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jls._mistakes import is_jit_disabled
from jls._program.facts import Value
from jls._program.places import Place, place_of
from jls._text import format_scale, join, listed
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings
from jls._tools.check.good_steps import (
    Base,
    always_compiles,
    take_good_steps,
)
from jls._tools.check.leaves import (
    is_fp8,
    is_rounding,
    subtrees,
)
from jls._tools.check.planting import inf_is_applied
from jls._tools.check.proofs import SUMMED, is_average, is_noise
from jls._tools.check.runs import (
    Leaves,
    OutOfRunsError,
    Run,
    Runner,
    is_new,
    may_take_fault,
    with_nan,
)
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tree import is_inexact
from jls._types import SIGNALS, SpikeState

HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes
# A batch has fewer arrays than this. Of a larger argument that is only read, such as
# another model, one array is enough: all of them go into the gradients together.
_MANY_LEAVES = 8

# The indices of elements that only store something, by leaf.
StoredElements = Mapping[int, Any]


class Fault(NamedTuple):
    """A run with a fault."""

    what: str
    run: Run
    scales: tuple[Scale, ...]  # where the fault was, if in loss scales
    exempt: StoredElements


def try_all(runner: Runner, findings: Findings, cleaned: Sequence[Value]) -> None:
    """Runs the trials one after the other, until no run is left.

    Args:
      runner: of the step.
      findings: what was read.
      cleaned: gradients that may have lost an inf on their way.
    """
    unchanged = "a good step does not change all that it should"
    if findings.status("no step") == "broken":
        findings.mark_others_not_tried(unchanged)
        return
    good = list[Run]()
    try:
        base = take_good_steps(runner, good, findings)
    except ValueError as error:
        if not findings.of("broken"):
            raise
        # What was read says why, and what to write.
        findings.mark_others_not_tried(str(error).partition(". ")[0])
        return
    if findings.status("no step") == "broken":
        findings.mark_others_not_tried(unchanged)
        return
    no_params = (
        "the updates are applied to nothing that comes back: apply them, or name all "
        "arguments that come back with carried="
    )
    if runner.params:
        findings.right("no step")
    else:
        findings.not_tried("no step", no_params)
    if always_compiles(good):
        findings.mark_others_not_tried("every call compiles")
        return
    if is_jit_disabled():
        findings.not_tried("retraced", "jax.disable_jit is on: nothing is compiled")
    findings.right("retraced")
    why_unmoved = (
        "" if base else f"the parameters did not move in {len(good)} good steps"
    )
    if not runner.params:
        why_unmoved = no_params
        findings.not_tried("not atomic", why_unmoved)
    trials = _Trials(runner, base or Base(good[0], 1), good, findings, cleaned)
    if base is not None:
        runner.left += 2 * base.window
    trials.try_scales()
    for scale in runner.scales:
        if scale.spikes:
            trials.try_spike(scale)
    trials.try_batch()
    trials.check_stuck()
    trials.check_overflow()
    trials.check_skips()
    if why_unmoved:
        findings.not_tried("never recovers", why_unmoved)
    else:
        trials.try_recovery()
    trials.compare_devices()


class _Trials:
    """The faults, from one point, and what they show."""

    def __init__(
        self,
        runner: Runner,
        base: Base,
        good: list[Run],
        findings: Findings,
        cleaned: Sequence[Value],
    ) -> None:
        self.runner, self.base, self.good = runner, base, good
        self.leaves = base.good_run.given  # the point
        self.findings, self.cleaned = findings, cleaned
        self.items = runner.arguments.items
        self.faults: list[Fault] = []
        self.later: dict[str, Run] = {}  # the good step after a fault
        self.stored = set[int]()  # leaves of which a fault was only stored

    def _run_or_note(
        self,
        leaves: Leaves,
        trial: str,
        code: Code | None = None,
        changes: Mapping[int, Any] = {},
    ) -> Run | None:
        """A run; None if it fails, with the reason in the findings."""
        try:
            return self.runner.run(leaves, trial, changes)
        except OutOfRunsError:
            reason = "no run was left"
        except Exception as error:
            reason = f"the step raised {type(error).__name__} in {trial}"
        if code:
            self.findings.not_tried(code, reason)
        else:
            self.findings.untried[trial] = reason
        return None

    def _report(self, code: Code, evidence: str, place: Place | None = None) -> None:
        """A mistake; not tried where only a program says whether it is one."""
        if self.runner.reading is not None:
            self.findings.broken(code, evidence, place)
        else:
            reason = f"{evidence}. Without a program to read, that may be right"
            self.findings.not_tried(code, reason)

    # Through the loss scales.

    def try_scales(self) -> None:
        scales = self.runner.scales
        groups = [tuple(scales)]
        groups += [(scale,) for scale in scales] if len(scales) > 1 else []
        for group in groups:
            self._try_scale(group, math.inf)
        is_read = self.findings.status("overflow hidden") == "right"
        if not is_read:
            self._try_scale(tuple(scales), HUGE)

    def _try_scale(self, scales: tuple[Scale, ...], value: float) -> None:
        text = "inf" if value == math.inf else format_scale(value)
        names = ", ".join(scale.name for scale in scales)
        of = f" in {names}" if len(self.runner.scales) > 1 else ""
        what, changes = f"a loss scale of {text}{of}", dict[int, Any]()
        for scale in scales:
            changes |= self.runner.at_scale(scale, value)
        run = self._run_or_note(self.leaves, what, "nan committed", changes)
        if run is not None:
            self.faults.append(Fault(what, run, scales, self._stored(run)))

    def check_overflow(self) -> None:
        """Whether a step whose gradients overflowed was applied."""
        code: Code = "overflow hidden"
        if any(map(is_fp8, self.items)):
            self.findings.not_tried(code, "8-bit layers clip their gradients, rightly")
            return
        if all(is_switched_off(self.leaves[x.at], x) for x in self.runner.scales):
            self._check_cleaned()
            self.findings.not_tried(code, "the loss scale is static and 1")
            return
        explained = {"not scaled", "scale leaks"} & self.findings.of("broken").keys()
        for fault in self.faults:
            # Scales that the step does not use hide nothing.
            if fault.scales and not explained and not self._scaler_was_notified(fault):
                self._report_applied(fault)
        self._check_cleaned()
        if explained and not self.findings.is_settled(code):
            self.findings.not_tried(
                code, "the gradients are not scaled and unscaled once"
            )
        elif not self.findings.status(code) and any(x.scales for x in self.faults):
            self.findings.right(code)

    def check_stuck(self) -> None:
        """Whether an overflow changes nothing, not even the loss scale and counters."""
        code: Code = "scale stuck"
        right = self.base.good_run
        for fault in self.faults:
            for scale in fault.scales:
                own = scale.own & self.runner.carried.compared
                # Of a bare scaler an infinite scale shows nothing.
                is_comparable = scale.counters and not scale.is_static
                counts = is_comparable and not right.keeps(own)
                if counts and fault.run.keeps(own):
                    self.findings.broken(
                        code,
                        f"{fault.what} changed nothing in {join(*scale.path)}, not "
                        "even the counters: an overflow is one for ever",
                    )
        is_seen = self.runner.reading or all(x.counters for x in self.runner.scales)
        if is_seen and any(fault.scales for fault in self.faults):
            self.findings.right(code)

    def _scaler_was_notified(self, fault: Fault) -> bool:
        """Whether a scaler saw the overflow; a bare static one never does."""
        run = fault.run
        return any(
            run.backed_off(scale)
            or (
                run.counted(scale, "skips") > 0 or not run.counted(scale, "steps")
                if scale.counters
                else scale.is_static and run.keeps(self._params())
            )
            for scale in fault.scales
        )

    def _report_applied(self, fault: Fault) -> None:
        """Reports an applied step whose gradients overflowed and were cleaned."""
        params = self._params()
        # At a large scale the gradients may fit, and then the step is the same rightly.
        if self._is_steady() and not fault.run.comes_out_as(self.base.good_run, params):
            site = self.cleaned[0].cleaned if self.cleaned else None
            place = place_of(site) if site else None
            by = f", by {place}" if place else ""
            evidence = (
                f"with {fault.what} the gradients overflowed, and the step was applied"
            )
            self._report(
                "overflow hidden",
                f"{evidence}: something cleaned them before they were looked at{by}",
                place,
            )
        elif self.runner.reading is None and np.all(np.isinf(self._faulty(fault))):
            reason = f"with {fault.what} the step was applied"
            self.findings.not_tried("overflow hidden", reason)

    def _faulty(self, fault: Fault) -> list[np.ndarray]:
        return [fault.run.before[scale.at] for scale in fault.scales]

    def _is_steady(self) -> bool:
        """Whether two equal calls give the same parameters."""
        again = self._run_or_note(
            self.leaves, "a good step, repeated", "overflow hidden"
        )
        right = self.base.good_run
        return again is not None and again.comes_out_as(right, self._params())

    def _check_cleaned(self) -> None:
        """Plants an inf in gradients of which reading doubts that they keep it."""
        code: Code = "overflow hidden"
        reading = self.runner.reading
        if reading is None or self.findings.is_settled(code):
            return
        for gradient in self.cleaned:
            assert gradient.cleaned is not None
            place = place_of(gradient.cleaned)
            applied = inf_is_applied(self.runner, reading, self.leaves, gradient)
            if applied is None:
                self.findings.not_tried(
                    code, f"{place} may lose an inf, where no fault reaches it"
                )
            elif applied:
                evidence = (
                    f"an inf in the gradients was lost by {place}; the step was applied"
                )
                self.findings.broken(code, evidence, place)
                return

    # Through the spike policy.

    def try_spike(self, scale: Scale) -> None:
        """The good step after a window of far lower losses and norms: a spike."""
        code: Code = "spike not skipped"
        at, after = scale.spikes, self.base.good_run.after
        if not set(SpikeState._fields) <= at.keys():
            self.findings.not_tried(code, "the spike policy is not one of jls")
            return
        if self.runner.is_proved_to_stay(at.values(), is_skipped=False):
            evidence = "the state of the spike policy comes back as it was"
            self.findings.broken(code, evidence)
            return
        values = {name: after[i].astype(np.float32) for name, i in at.items()}
        seen, last = values["seen"], values["value"]
        if seen.shape[-1] < 2:
            self.findings.not_tried(code, "the limits of the spike policy are constant")
            return
        if not np.all(values["tokens"] > 0):
            self.findings.not_tried(code, "the spike policy has no budget left, or 0")
            return
        loss, norm = (last[..., SIGNALS.index(name)] for name in ("loss", "norm"))
        if not np.all(norm > 0) or not self.base.good_run.counted(scale, "steps"):
            self.findings.not_tried(code, "a good step has no gradient to judge")
            return
        far = np.float32(2.0**40)  # however many deviations are allowed
        lower = np.stack([loss - far * (1 + np.abs(loss)), norm / far], axis=-1)
        changes = {
            at["seen"]: np.repeat(lower[..., None], seen.shape[-1], axis=-1),
            at["kept"]: seen.shape[-1],
            at["tokens"]: np.maximum(values["tokens"], 1),
        }
        what = "a window of far lower losses and norms"
        run = self._run_or_note(self.leaves, what, code, changes)
        if run is None:
            return
        value, limit = (run.after[at[name]] for name in ("value", "limit"))
        has_limit = np.any(limit[..., SIGNALS.index("norm")] < np.inf)
        if has_limit and not np.any(value > limit):
            self.findings.not_tried(code, "no loss or norm is far enough above others")
        elif not run.counted(scale, "spikes"):
            self.findings.broken(
                code, "a step far above all that the spike policy had seen was applied"
            )
        elif np.any(values["kept"][..., 0] == 0):
            self.findings.right(code, "; the loss is not judged, pass value=loss")
        else:
            self.findings.right(code)

    # Through the batch.

    def try_batch(self) -> None:
        """NaN in an element of each array that is not carried."""
        leaves, items = self.leaves, self.items
        carried = self.runner.carried
        # Not a part of an argument that is carried, such as a field left out.
        owners = {items[k].path[0] for k in carried.leaves}
        last = max(scale.at for scale in self.runner.scales)
        after_state, before_state = list[list[int]](), list[list[int]]()
        for path, below in subtrees(items).items():
            if len(path) == 1 and path[0] not in owners:
                fit = (i for i in below if may_take_fault(leaves[i]))
                where = before_state if below[0] < last else after_state
                where.append([i for i in fit if self._reaches(i)])
        # The batch comes after the state, as a rule, and has few arrays.
        for found in [*sorted(after_state, key=len), *sorted(before_state, key=len)]:
            for i in found if len(found) <= _MANY_LEAVES else found[:1]:
                self._try_nan(i)
        hidden = [
            x.what for x in self.faults if not x.scales and self._hides_nan(x.run)
        ]
        is_told = self.findings.status("loss not passed") == "right"
        if hidden and is_told:
            self.findings.notes.append(
                f"The loss stays finite with {listed(hidden)}, so the skip is "
                "taken for an overflow: the loss scale backs off, and jls.requeue "
                "hands the batch out again. If a jnp.nansum or a mask does it, give "
                "the optimizer a loss that is NaN."
            )

    def _hides_nan(self, run: Run) -> bool:
        """Whether a wrapper whose scale moves skipped for the gradients alone."""
        return any(
            scale.counters
            and not scale.is_static
            and run.counted(scale, "skips") > 0
            and not run.counted(scale, "nonfinite_losses")
            for scale in self.runner.scales
        )

    def _reaches(self, leaf: int) -> bool:
        """Whether gradients or loss depend on it: on a learning rate they do not."""
        reading = self.runner.reading
        if reading is None:
            return True
        return bool(reading.bit(leaf) & reading.reaches_gradients)

    def _try_nan(self, i: int) -> None:
        what = f"NaN in {self.items[i].name}"
        run = self._run_or_note(
            self.leaves, what, changes={i: with_nan(self.leaves[i])}
        )
        if run is not None:
            self.faults.append(Fault(what, run, (), self._stored(run)))

    def _stored(self, run: Run) -> StoredElements:
        """The elements that only store faulty values, as those of a buffer do.

        The program only moves elements there.
        """
        found = dict[int, np.ndarray]()
        for i in run.nonfinite() - self.runner.trained:
            result = self.runner.result(i)
            if result is not None and result.now.holds:
                found[i] = is_new(run.before[i], run.after[i])
        self.stored |= set(found)
        return found

    # The effects of the faults.

    def check_skips(self) -> None:
        hides = self.findings.status("overflow hidden") == "broken"
        for fault in self.faults:
            # A hidden overflow explains what it leaves in a step that is applied.
            if not (hides and fault.scales and not fault.run.any_skipped()):
                self._check_nonfinite(fault)
        if self.stored:
            names = self.runner.names(self.stored)
            note = f", but for {names}, where what came in is only stored"
        else:
            note = ""
        if self.faults:
            self.findings.right("nan committed", note)
        self._check_atomic()

    def _check_nonfinite(self, fault: Fault) -> None:
        bad = self._persistent_nonfinite(fault)
        bad -= self.base.good_run.nonfinite()
        if bad:
            self._report(
                "nan committed",
                f"after {fault.what} an inf or NaN stayed in {self.runner.names(bad)}",
            )

    def _persistent_nonfinite(self, fault: Fault) -> set[int]:
        """Leaves with a new inf or NaN that stays, unlike in a record of the loss."""
        bad = fault.run.nonfinite(fault.exempt)
        trained = self.runner.trained
        if bad <= trained:
            return bad
        later = self._good_step_after(fault, "nan committed")
        if later is None:
            return bad & trained
        return bad & (trained | later.nonfinite(fault.exempt, since=self.base.good_run))

    def _good_step_after(self, fault: Fault, code: Code) -> Run | None:
        run = self.later.get(fault.what)
        if run is None:
            stored = {i: self.leaves[i] for i in fault.exempt}
            what = f"a good step after {fault.what}"
            run = self._run_or_note(fault.run.next, what, code, stored)
            if run is not None:
                self.later[fault.what] = run
        return run

    def _check_atomic(self) -> None:
        code: Code = "not atomic"
        if self.findings.is_settled(code):
            return
        runner = self.runner
        doubted = runner.doubted
        averages = {i for i in doubted if is_average(runner, i)}
        noisy = {i for i in doubted if is_noise(runner, i)}
        must = doubted - averages - noisy
        notes = []
        if averages:
            notes.append(
                f"{runner.names(averages)}: an average, which goes on towards what "
                "stays"
            )
        if noisy:
            notes.append(f"{runner.names(noisy)}: noise is added to it")
        skipped = [fault for fault in self.faults if fault.run.all_skipped()]
        for fault in skipped:
            moved = {
                i
                for i in fault.run.changed(fault.exempt) & must
                if not self._may_move(fault.run, i)
            }
            if moved:
                self._report(
                    code,
                    f"{fault.what}: the step was skipped, but it changed "
                    f"{runner.names(moved)}",
                    self._place_of_move(min(moved)),
                )
                return
        if self.findings.status(code) == "not tried":
            return
        if must and not skipped:
            self.findings.not_tried(code, "no fault made the step skip")
            return
        others = self._moved_data(skipped)
        if others:
            notes.append(f"{runner.names(others)}: taken for data, not for parameters")
        self.findings.right(code, "".join(f"; but {note}" for note in notes))

    def _place_of_move(self, leaf: int) -> Place | None:
        """The last operation on a leaf in a step that is skipped."""
        result = self.runner.result(leaf)
        site = result.skipped.site if result is not None else None
        return place_of(site) if site else None

    def _moved_data(self, skipped: list[Fault]) -> set[int]:
        """Leaves that a skip changed and no update is in: buffers, environments."""
        return {
            i
            for fault in skipped
            for i in fault.run.changed(fault.exempt)
            - self.runner.trained
            - self.runner.own
            if is_inexact(self.items[i].value)
            and not self._may_move(fault.run, i)
            and i not in fault.run.nonfinite()
        }

    def _may_move(self, run: Run, i: int) -> bool:
        """Whether a leaf counts up, or is rounded, as weights that are normalized."""
        old, new = run.before[i], run.after[i]
        if old.ndim == 0 and bool(new == old + 1):
            return True
        return is_rounding(old, new)

    # Afterwards.

    def try_recovery(self) -> None:
        """Good steps after a bad one: do the parameters move again?"""
        code: Code = "never recovers"
        bad = [fault for fault in self.faults if self._had_effect(fault)]
        if not bad:
            self.findings.not_tried(code, "no fault had an effect")
            return
        in_scale = [fault for fault in bad if fault.scales]
        in_batch = [fault for fault in bad if not fault.scales]
        # Of the batch one that left something behind, if there is one.
        in_batch.sort(key=lambda x: not x.run.nonfinite(x.exempt))
        for fault in in_scale[:1] + in_batch[:1]:
            run = self._good_step_after(fault, code)
            for _ in range(self.base.window):
                if run is None or not run.keeps(self._params()):
                    break
                what = f"a good step after {fault.what}"
                run = self._run_or_note(run.next, what, code)
            if run is None:
                return
            if run.keeps(self._params()):
                kept = fault.run.nonfinite(fault.exempt)
                names = self.runner.names(kept)
                self.findings.broken(
                    code,
                    f"after {fault.what} no good step moved the parameters any more"
                    + (f": {names} kept an inf or NaN" if kept else ""),
                )
        self.findings.right(code)

    def _had_effect(self, fault: Fault) -> bool:
        run, right = fault.run, self.base.good_run
        is_seen = run.any_skipped() or bool(run.nonfinite())
        return is_seen or not run.comes_out_as(right, self._params())

    def _params(self) -> list[int]:
        return sorted(set().union(*self.runner.params))

    # Devices.

    def compare_devices(self) -> None:
        """Whether all devices hold the same, of what they hold together."""
        code: Code = "out of sync"
        if len(self.runner.devices) < 2:
            for name in (code, SUMMED):
                reason = "everything carried is on one device"
                self.findings.does_not_apply(name, reason)
            return
        runs = [("a good step", run) for run in self.good]
        runs += [(fault.what, fault.run) for fault in self.faults]
        compared = self.runner.carried.compared
        for what, run in runs:
            if run.diverged & compared:
                names = self.runner.names(run.diverged & compared)
                self.findings.broken(
                    code, f"after {what} devices hold different values of {names}"
                )
        if any(self.base.good_run.after[x.at].ndim for x in self.runner.scales):
            reason = (
                "of a state with an axis of devices each may train a model of its own"
            )
            self.findings.not_tried(code, reason)
        self.findings.right(code)
