# SPDX-License-Identifier: Apache-2.0
"""The good steps of `jls.check_step`, which lead to where faults are injected."""

from typing import Any, NamedTuple

import numpy as np

from jls._scopes import NEW
from jls._text import format_scale
from jls._tools.check.findings import StepError
from jls._tools.check.leaves import as_numpy
from jls._tools.check.runs import Run, Runner, at_scale, with_changes
from jls._tools.check.static import Numbers
from jls._tools.check.subject import Subject
from jls._tools.reading.keep import argument_of
from jls._tools.reading.scales import is_switched_off
from jls._tools.reading.widths import Widths

# Good steps until the parameters have to move: two updates of optax.MultiSteps(8).
MOST_STEPS = 16
# By how many powers of two the scale is lowered, one try after the other: 2^24, the
# largest of jls.dynamic, comes down to 2^-24.
LOWER = (4, 4, 4, 4, 8, 8, 16)


class Good(NamedTuple):
    """The good steps that were taken."""

    subject: Subject
    steps: list[Run]
    run: Run  # the step in whose place faults are injected
    window: int = 1  # how many steps there are from one move to the next
    why_unmoved: str = ""  # why the parameters are not seen to move, "" if they are
    doubt: str = ""  # the same for the headline
    trains: bool = True  # False if the first one shows that no step does
    is_on_one_device: bool = True  # whether all that is carried is
    # Of calls that were made for a static number that changes: see `calls_in_a_row`.
    in_a_row: tuple[list[Numbers], list[bool]] | None = None

    @property
    def always_compile(self) -> bool:
        return len(self.steps) >= 3 and all(run.compiled for run in self.steps)


def take_good_steps(runner: Runner, is_idle: bool) -> Good:
    """Takes good steps, one after the other, until the parameters have moved.

    Args:
      runner: of the step.
      is_idle: whether the step trains nothing, if it is not skipped.
    """
    first = runner.run(runner.start, "the first good step")
    trains = not first.keeps(runner.subject.carried.compared)
    if trains:
        first = _at_a_lower_scale(runner, first)
        trains = not is_idle or bool(first.skipped_once or first.nonfinite)
    good = Good(runner.subject, [first], first, trains=trains)
    if trains:
        good = _step_until_moved(runner, good)
        # The third step is the first that must not compile: the second may, for the
        # types and devices that the first one returned.
        while len(good.steps) < 3:
            good.steps.append(runner.run(good.steps[-1].next, "a good step"))
        if runner.numbers_change:
            good = good._replace(in_a_row=runner.calls_in_a_row(3))
    return good._replace(is_on_one_device=len(runner.devices) < 2)


def _step_until_moved(runner: Runner, good: Good) -> Good:
    """Takes good steps until two have moved the parameters.

    Faults are injected in the place of the second one, since moments are 0 in the
    first.
    """
    params, moved, window, waited = good.subject.params, None, 1, 1
    for number in range(1, MOST_STEPS + 1):
        run = good.steps[-1]
        if number > 1 and run.skipped_once:
            break
        if params and not any(map(run.keeps, params)):
            moved, window, waited = run, max(waited, window), 0
            if number > 1:
                break
        if number == MOST_STEPS or good.always_compile:
            break
        waited += 1
        good.steps.append(runner.run(run.next, f"good step {number + 1}"))
    if moved is not None:
        return good._replace(run=moved, window=window)
    count, write = max(3, len(good.steps)), ""
    doubt = f"the parameters did not move in {count} good steps"
    if not params:
        doubt = "the updates are applied to nothing that comes back"
        write = ": apply them, or name all arguments that come back with carried="
    return good._replace(why_unmoved=f"{doubt}{write}", doubt=doubt)


def _at_a_lower_scale(runner: Runner, run: Run) -> Run:
    """The first good step again, at loss scales that are lowered until none skips."""
    used = [x for x in runner.subject.scales if x.counters or not run.keeps(x.state)]
    skipped = [x for x in used if x.at in run.skipped]
    for bits in LOWER:
        for scale in skipped:
            if scale.counters and run.counted(scale, "nonfinite_losses"):
                _raise_if_float32_is_finite(runner)
                raise StepError(
                    "the loss of these arguments must be finite, but the step was "
                    "skipped for its loss",
                    "Pass a good batch; or the forward pass overflows: see "
                    "jls.health(opt_state, params).",
                )
            if "spikes" in scale.counters and run.counted(scale, "spikes"):
                raise StepError(
                    "the step of these arguments must be a usual one, but the spike "
                    "policy skipped it: its loss or gradient norm is over the limit in "
                    "jls.metrics(opt_state)",
                    "Pass a good batch, or a state from optimizer.init(params).",
                )
        start, changes = runner.start, dict[int, Any]()
        for scale in skipped:
            if not is_switched_off(start[scale.at], scale):
                lower = as_numpy(start[scale.at]) * 2.0**-bits
                changes |= at_scale(start, scale, np.maximum(lower, 2.0**-126))
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
        raise StepError(
            "the step must not be skipped at every loss scale, but was with these "
            f"arguments, last at {scales}",
            "Pass a good batch; or the step makes NaN of one: print(jls.why(step, "
            "...)) with the same arguments names the line.",
        )
    return run


def _raise_if_float32_is_finite(runner: Runner) -> None:
    """Raises if it is an autocast that makes the inf or the NaN, and a `keep` helps."""
    reading, start = runner.subject.reading, runner.start
    if reading is None:
        return
    live = [x for x in reading.scales if not is_switched_off(start[x.at], x)]
    leaves = with_changes(start, {x.at: 2.0**-24 for x in live})
    frames = reading.main.by_site()
    roots = [
        (frames[x.around], x.atom)
        for call in reading.checked
        for role, given in call.given.items()
        if role != NEW
        for x in given.values()
    ]
    inputs = [leaves[i] for i in reading.traced.inputs]
    keep = Widths(reading.main, roots).keep(inputs)
    if keep is not None:
        write = argument_of(keep) or "the keep that jls.calibrate finds"
        raise StepError(
            "the step must be finite with these arguments, but was skipped",
            "The batch is good: in float32 this step is finite, in half at no loss "
            f"scale. Write {write}. print(jls.why(step, ...)) with the same arguments "
            "names the line.",
        )
