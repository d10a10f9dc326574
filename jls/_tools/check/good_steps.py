# SPDX-License-Identifier: Apache-2.0
"""The good steps of `jls.check_step`, which lead to where faults are injected."""

from typing import Any

import numpy as np

from jls._program.frames import Frame
from jls._scopes import NEW
from jls._text import format_scale, join
from jls._tools.check.findings import Findings
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import OutOfRunsError, Run, Runner, with_changes
from jls._tools.check.subject import Subject
from jls._tools.reading.keep import argument_of
from jls._tools.reading.scales import is_switched_off
from jls._tools.reading.widths import Widths

# Good steps until the parameters have to move: two updates of optax.MultiSteps(8).
MOST_STEPS = 16
# By how many powers of two the scale is lowered, one try after the other: 2^24, the
# largest of jls.dynamic, comes down to 2^-24.
LOWER = (4, 4, 4, 4, 8, 8, 16)


def take_good_steps(
    runner: Runner, findings: Findings
) -> tuple[list[Run], Run | None, int]:
    """Takes good steps, one after the other, until the parameters have moved.

    No fault makes sense if nothing is carried, or if every call compiles: then all
    codes are in `findings`.

    Returns:
      The steps; the one in whose place faults are injected, None if the parameters
      never move; and how many steps there are from one move to the next.
    """
    first = runner.run(runner.start, "the first good step")
    if first.keeps(runner.subject.carried.compared):
        findings.broken("no step", "a good step changed nothing that the step carries")
        return [first], None, 1
    good = [_at_a_lower_scale(runner, first)]
    if findings.idle and not (good[0].skipped_once or good[0].nonfinite):
        evidence, write = findings.idle
        findings.broken("no step", evidence, write=write)
        return good, None, 1
    base, window = _step_until_moved(runner, good)
    # The third step is the first that must not compile: the second may, for the types
    # and devices that the first one returned.
    while len(good) < 3:
        good.append(runner.run(good[-1].next, "a good step"))
    if base is not None and _returns_old_state(runner.subject, good):
        findings.broken(
            "no step",
            "the parameters moved, but nothing in the optimizer state did: the step "
            "seems to return the old state",
        )
    later = [n for n, run in enumerate(good, 1) if run.compiled and n > 2]
    if later:
        findings.broken("retraced", f"good step {later[0]} compiled the step once more")
    _look_for_counting_numbers(runner, findings)
    return good, base, window


def _look_for_counting_numbers(runner: Runner, findings: Findings) -> None:
    """Breaks "retraced" if a static number counts: each call is compiled for it."""
    assert runner.numbers is not None
    before, after = runner.numbers
    if all(after.get(path, value) == value for path, value in before.items()):
        return
    try:
        series, compiled = runner.calls_in_a_row(3)
    except OutOfRunsError:
        return
    for path in series[0]:
        values = [numbers.get(path) for numbers in series]
        if len(set(values)) == len(values) and compiled[-1]:
            findings.broken(
                "retraced",
                f"{join(*path)} is a static number that counts, {values[0]}, "
                f"{values[1]}, {values[2]}: each call is compiled anew for it",
            )
        elif values[0] != values[1] and compiled[1] and not compiled[-1]:
            findings.notes.append(
                f"The second call compiles the step once more: {join(*path)} is a "
                f"static number, {values[0]}, that comes back as {values[1]}."
            )


def always_compiles(good: list[Run]) -> bool:
    return len(good) >= 3 and all(run.compiled for run in good)


def _returns_old_state(subject: Subject, good: list[Run]) -> bool:
    """Whether no good step changed an optimizer state that counts its calls."""
    scales, reading = subject.scales, subject.reading
    if not all(x.counters for x in scales) or not subject.own <= subject.carried.leaves:
        return False
    if reading is None:
        return all(run.keeps(subject.own) for run in good)
    return any(scales[k].counters["steps"] in subject.frozen for k in reading.calls)


def _step_until_moved(runner: Runner, good: list[Run]) -> tuple[Run | None, int]:
    """Adds good steps to the first one until two have moved the parameters.

    The base is the second step that moved, since moments are 0 in the first.
    """
    base, window, waited = None, 1, 1
    for number in range(1, MOST_STEPS + 1):
        run, params = good[-1], runner.subject.params
        if number > 1 and run.skipped_once:
            break
        if params and not any(map(run.keeps, params)):
            base, window, waited = run, max(waited, window), 0
            if number > 1:
                break
        if number == MOST_STEPS or always_compiles(good):
            break
        waited += 1
        good.append(runner.run(run.next, f"good step {number + 1}"))
    return base, window


def _at_a_lower_scale(runner: Runner, run: Run) -> Run:
    """The first good step again, at loss scales that are lowered until none skips."""
    used = [x for x in runner.subject.scales if x.counters or not run.keeps(x.state)]
    skipped = [x for x in used if x.at in run.skipped]
    for bits in LOWER:
        for scale in skipped:
            if scale.counters and run.counted(scale, "nonfinite_losses"):
                _raise_if_float32_is_finite(runner)
                raise ValueError(
                    "the loss of these arguments must be finite, but the step was "
                    "skipped for its loss. Pass a good batch; or the forward pass "
                    "overflows: see jls.health(opt_state, params)."
                )
            if "spikes" in scale.counters and run.counted(scale, "spikes"):
                raise ValueError(
                    "the step of these arguments must be a usual one, but the spike "
                    "policy skipped it: its loss or gradient norm is over the limit in "
                    "jls.metrics(opt_state). Pass a good batch, or a state from "
                    "optimizer.init(params)."
                )
        start, changes = runner.start, dict[int, Any]()
        for scale in skipped:
            if not is_switched_off(start[scale.at], scale):
                lower = as_numpy(start[scale.at]) * 2.0**-bits
                changes |= runner.at_scale(scale, np.maximum(lower, 2.0**-126))
        if not changes:
            break
        runner.start = with_changes(start, changes)
        run = runner.run(runner.start, "a good step at a lower loss scale")
        skipped = [x for x in used if x.at in run.skipped]
    if skipped:
        _raise_if_float32_is_finite(runner)
        scales = ", ".join(
            format_scale(float(as_numpy(runner.start[scale.at]).flat[0]))
            for scale in skipped
        )
        raise ValueError(
            "the step must not be skipped at every loss scale, but was with these "
            f"arguments, last at {scales}. Pass a good batch; or the step makes NaN of "
            "one: print(jls.why(step, ...)) with the same arguments names the line."
        )
    return run


def _raise_if_float32_is_finite(runner: Runner) -> None:
    """Raises if it is an autocast that makes the inf or the NaN, and a `keep` helps."""
    reading, start = runner.subject.reading, runner.start
    if reading is None:
        return
    live = [x for x in reading.scales if not is_switched_off(start[x.at], x)]
    leaves = with_changes(start, {x.at: 2.0**-24 for x in live})
    main = Frame(reading.traced.program)
    frames = main.by_site()
    roots = [
        (frames[x.around], x.atom)
        for call in reading.checked
        for role, given in call.given.items()
        if role != NEW
        for x in given.values()
    ]
    widths = Widths(main, roots)
    keep = widths.keep([leaves[i] for i in reading.traced.inputs])
    if keep is not None:
        write = argument_of(keep) or "the keep that jls.calibrate finds"
        raise ValueError(
            "the step must be finite with these arguments, but was skipped. The batch "
            "is good: in float32 this step is finite, in half at no loss scale. Write "
            f"{write}. print(jls.why(step, ...)) with the same arguments names the "
            "line."
        )
