# SPDX-License-Identifier: Apache-2.0
"""An overflow that is hidden from the wrapper, or that a scaler does not learn of."""

import numpy as np

from jls._program.facts import Number
from jls._program.places import place_of
from jls._text import join
from jls._tools.check.faults import Fault, Faults, Trying
from jls._tools.check.findings import Finding, Found, away, broken, right, untried
from jls._tools.check.good_steps import Good
from jls._tools.check.leaves import is_fp8
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.planting import inf_is_applied
from jls._tools.check.runs import Trial
from jls._tools.check.subject import Subject
from jls._tools.reading.scales import Scale, is_switched_off


def _read_overflow(subject: Subject) -> Found:
    if subject.keeps_inf:
        yield right()


def _judge_overflow(faults: Faults) -> Trying[None]:
    """Whether a step whose gradients overflowed was applied."""
    subject, leaves = faults.good.subject, faults.good.run.given
    if any(map(is_fp8, subject.items)):
        yield untried("8-bit layers clip their gradients, rightly")
        return
    reason, is_hidden = "", False
    if all(is_switched_off(leaves[x.at], x) for x in subject.scales):
        reason = "the loss scale is static and 1"
    elif "broken" in (faults.status("not scaled"), faults.status("scale leaks")):
        reason = "the gradients are not scaled and unscaled once"
    for fault in faults.in_scales:
        # Scales that the step does not use hide nothing.
        if not reason and not _scaler_was_notified(subject, fault):
            is_hidden |= yield from _of_applied(faults.good, fault)
    if not is_hidden:
        yield from _plant_inf(faults.good)
    if reason:
        yield untried(reason)
    elif faults.in_scales:
        yield right()


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


def _of_applied(good: Good, fault: Fault) -> Trying[bool]:
    """Whether a step was applied whose gradients overflowed and were cleaned."""
    subject, run = good.subject, fault.run
    # At a large scale the gradients may fit, and then the step is the same rightly.
    if not run.comes_out_as(good.run, subject.all_params):
        # But two equal calls have to give the same parameters.
        again = yield Trial(good.run.given, "a good step, repeated")
        if isinstance(again, Finding):
            yield again
        elif again.comes_out_as(good.run, subject.all_params):
            site = subject.cleaned[0].cleaned if subject.cleaned else None
            place = place_of(site) if site else None
            by = f", by {place}" if place else ""
            yield broken(
                f"with {fault.what} the gradients overflowed, and the step was "
                f"applied: something cleaned them before they were looked at{by}",
                place,
            )
            return True
    if subject.reading is None and all(
        np.all(np.isinf(run.before[scale.at])) for scale in fault.scales
    ):
        yield untried(f"with {fault.what} the step was applied")
    return False


def _plant_inf(good: Good) -> Found:
    """Plants an inf in gradients of which reading doubts that they keep it."""
    subject, all_kept = good.subject, True
    for gradient in subject.cleaned:
        assert gradient.cleaned is not None
        place = place_of(gradient.cleaned)
        applied = inf_is_applied(subject, good.run.given, gradient)
        all_kept &= applied is False
        if applied is None:
            yield untried(f"{place} may lose an inf, where no fault reaches it")
        elif applied:
            yield broken(
                f"an inf in the gradients was lost by {place}; the step was applied",
                place,
            )
            return
    if subject.cleaned and all_kept:
        yield right()


OVERFLOW_HIDDEN = Mistake(
    "overflow hidden",
    right="an inf in the gradients reaches the optimizer",
    write="no jnp.nan_to_num, no elementwise clip and no jnp.where(isfinite) before "
    "jls.loss_scaled sees the gradients; "
    "jls.loss_scaled(optax.chain(optax.clip(1.0), inner))",
    is_sure_unread=False,
    read=_read_overflow,
    of_faults=_judge_overflow,
)


def _read_stuck(subject: Subject) -> Found:
    reading = subject.reading
    if all(x.is_static for x in subject.scales):
        yield away("no loss scale moves")
    if reading is None:
        return
    for k, scale in enumerate(subject.scales):
        is_used = not scale.counters or reading.calls.get(k)
        if scale.is_static or not is_used:
            continue
        # A wrapper whose whole state is the old one is no step.
        is_old = scale.counters and subject.all_in(scale.own, subject.frozen)
        scaler_never_changes = subject.all_in(scale.state, subject.frozen)
        skip_changes_nothing = scale.counters and subject.all_in(
            scale.own, subject.kept
        )
        if scaler_never_changes and not is_old:
            yield broken(f"the state in {scale.name} comes back as it was")
        for field in ("loss_scale", "finite_count"):
            number = _number_set(subject, scale, field)
            if number is not None:
                yield broken(
                    f"{scale.name}/{field} is set to {number:g} in each step, whatever "
                    "the scaler makes of it",
                )
        if skip_changes_nothing and not is_old:
            yield broken(
                f"in a step that is skipped {join(*scale.path)} comes back as it was, "
                "with its counters and its loss scale: an overflow is one for ever",
            )


def _number_set(subject: Subject, scale: Scale, field: str) -> float | None:
    """The number to which a step sets what the scaler moves; None if to none."""
    reading, at = subject.reading, scale.fields.get(field)
    if reading is None or at is None or at not in subject.results:
        return None
    now, skipped = (x.known for x in subject.results[at])
    is_moved = at in [reading.traced.inputs[n] for n in reading.flow.replaced]
    if isinstance(now, Number) and now == skipped and is_moved:
        return float(now.value)
    return None


def _judge_stuck(faults: Faults) -> Found:
    """Whether an overflow changes nothing, not even the loss scale and counters."""
    subject = faults.good.subject
    for fault in faults.in_scales:
        for scale in fault.scales:
            own = scale.own & subject.carried.compared
            # An infinite scale shows nothing of a bare scaler.
            is_comparable = scale.counters and not scale.is_static
            counts = is_comparable and not faults.good.run.keeps(own)
            if counts and fault.run.keeps(own):
                yield broken(
                    f"{fault.what} changed nothing in {join(*scale.path)}, not even "
                    "the counters: an overflow is one for ever",
                )
    is_seen = subject.reading or all(x.counters for x in subject.scales)
    if is_seen and faults.in_scales:
        yield right()


SCALE_STUCK = Mistake(
    "scale stuck",
    right="the scaler is told of good and of bad steps",
    write="return the opt_state that optimizer.update returns in every step, good or "
    "bad: the wrapper rolls back what has to stay; with the pure functions: "
    "state = scaler.adjust(state, jls.all_finite(grads)), after jls.unscale",
    read=_read_stuck,
    of_faults=_judge_stuck,
)
