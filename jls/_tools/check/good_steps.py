# SPDX-License-Identifier: Apache-2.0
"""The good steps of `jls.check_step`, which lead to where faults are injected."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jls._program.frames import Frame
from jls._scopes import NEW
from jls._text import format_scale, join
from jls._tools.check.findings import Findings
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Leaves, OutOfRunsError, Run, Runner, filled
from jls._tools.reading.keep import argument_of
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tools.reading.widths import Widths

# Good steps until the parameters have to move: two updates of optax.MultiSteps(8).
MOST_STEPS = 16
# By how many powers of two the scale is lowered, one try after the other: 2^24, the
# largest of jls.dynamic, comes down to 2^-24.
LOWER = (4, 4, 4, 4, 8, 8, 16)


class Base(NamedTuple):
    """The point at which faults are injected."""

    good_run: Run  # the good step from here
    window: int  # good steps from one move of the parameters to the next


def take_good_steps(runner: Runner, good: list[Run], findings: Findings) -> Base | None:
    """Good steps until the parameters have moved, None if they never do.

    Every run is added to `good`. No fault makes sense if nothing is carried, or if
    every call compiles: then all codes are in `findings`.
    """
    good.append(runner.run(runner.start, "the first good step"))
    if not good[0].changed():
        findings.broken("no step", "a good step changed nothing that the step carries")
        return None
    _lower_scales(runner, good)
    base = _step_until_moved(runner, good, MOST_STEPS)
    # The third step of a series is the first that must not compile.
    for _ in range(3 - max(_positions(good))):
        good.append(runner.run(good[-1].next, "a good step"))
    if base is not None and _returns_old_state(runner, good):
        findings.broken(
            "no step",
            "the parameters moved, but nothing in the optimizer state did: the step "
            "seems to return the old state",
        )
    later = [
        place
        for place, run in zip(_positions(good), good, strict=True)
        if run.compiled and place > 2
    ]
    if later:
        findings.broken("retraced", f"good step {later[0]} compiled the step once more")
    _look_for_counting_numbers(runner, findings)
    return base


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
    return all(run.compiled for run in good) and max(_positions(good)) >= 3


def _returns_old_state(runner: Runner, good: list[Run]) -> bool:
    """Whether no good step changed an optimizer state that counts its calls."""
    scales = runner.scales
    if not all(x.counters for x in scales) or not runner.own <= runner.carried.leaves:
        return False
    if runner.reading is None:
        return all(run.keeps(runner.own) for run in good)
    return any(
        runner.is_proved_to_stay([scales[k].counters["steps"]], is_skipped=False)
        for k in runner.reading.calls
    )


def _positions(good: list[Run]) -> list[int]:
    """The position of each run in its series: 1 for the first, 2 for the next.

    The second step may compile once more, for the types and devices that the first one
    returned. Each try at another loss scale starts a series at the caller's arguments.
    """
    places = [1]
    for last, run in itertools.pairwise(good):
        old, new = last.returned, run.given
        went_on = any(
            a is b for a, b, c in zip(old, new, last.given, strict=True) if a is not c
        )
        places.append(places[-1] + 1 if went_on else 1)
    return places


def _step_until_moved(runner: Runner, good: list[Run], most: int) -> Base | None:
    """Takes good steps until two have moved the parameters.

    The last run so far was the first of them. The base is the second step that moved,
    since moments are 0 in the first.
    """
    base, waited = None, 1
    for number in range(1, most + 1):
        run = good[-1]
        if number > 1 and run.any_skipped():
            break
        if run.moved():
            window = max(waited, base.window if base else 1)
            base, waited = Base(run, window), 0
            if number > 1:
                break
        if number == most or always_compiles(good):
            break
        waited += 1
        good.append(runner.run(run.next, f"good step {number + 1}"))
    return base


def _lower_scales(runner: Runner, good: list[Run]) -> None:
    """Lowers each loss scale at which the last step was skipped, until none is."""
    used = [x for x in runner.scales if x.counters or not good[-1].keeps(x.state)]
    for bits in LOWER:
        skipped = list(filter(good[-1].was_skipped, used))
        for scale in skipped:
            if scale.counters and good[-1].counted(scale, "nonfinite_losses"):
                _raise_if_float32_is_finite(runner)
                raise ValueError(
                    "the loss of these arguments must be finite, but the step was "
                    "skipped for its loss. Pass a good batch; or the forward pass "
                    "overflows: see jls.health(opt_state, params)."
                )
        for scale in skipped:
            if "spikes" in scale.counters and good[-1].counted(scale, "spikes"):
                raise ValueError(
                    "the step of these arguments must be a usual one, but the spike "
                    "policy skipped it: its loss or gradient norm is over the limit in "
                    "jls.metrics(opt_state). Pass a good batch, or a state from "
                    "optimizer.init(params)."
                )
        start = runner.start
        skipped = [x for x in skipped if not is_switched_off(start[x.at], x)]
        if not skipped:
            break
        changes = dict[int, Any]()
        for scale in skipped:
            lower = np.maximum(as_numpy(start[scale.at]) * 2.0**-bits, 2.0**-126)
            changes |= runner.at_scale(scale, lower)
        good.append(runner.run(start, "a good step at a lower loss scale", changes))
        runner.start = good[-1].given
    skipped = list(filter(good[-1].was_skipped, used))
    if skipped:
        _raise_if_float32_is_finite(runner)
        scales = ", ".join(_format(runner.start, scale) for scale in skipped)
        raise ValueError(
            "the step must not be skipped at every loss scale, but was with these "
            f"arguments, last at {scales}. Pass a good batch; or the step makes NaN of "
            "one: print(jls.why(step, ...)) with the same arguments names the line."
        )


def _raise_if_float32_is_finite(runner: Runner) -> None:
    """Raises if it is an autocast that makes the inf or the NaN, and a `keep` helps."""
    if runner.reading is None:
        return
    leaves, reading = list(runner.start), runner.reading
    for scale in runner.scales:
        if not is_switched_off(leaves[scale.at], scale):
            leaves[scale.at] = filled(leaves[scale.at], 2.0**-24)
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


def _format(leaves: Leaves, scale: Scale) -> str:
    return format_scale(float(as_numpy(leaves[scale.at]).flat[0]))
