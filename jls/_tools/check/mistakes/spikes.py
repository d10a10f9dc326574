# SPDX-License-Identifier: Apache-2.0
"""A spike that the policy lets through."""

import numpy as np

from jls._tools.check.faults import Faults, Trying
from jls._tools.check.findings import Finding, Found, away, broken, right, untried
from jls._tools.check.good_steps import Good
from jls._tools.check.mistakes.loss import UPDATE
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.runs import Trial
from jls._tools.check.subject import Subject
from jls._tools.reading.scales import Scale
from jls._types import SIGNALS, SpikeState


def _read_policies(subject: Subject) -> Found:
    if not any(scale.spikes for scale in subject.scales):
        yield away("there is no spike policy")


def _try_spikes(faults: Faults) -> Trying[None]:
    for scale in faults.good.subject.scales:
        if scale.spikes:
            yield from _try_spike(faults.good, scale)


def _try_spike(good: Good, scale: Scale) -> Trying[None]:
    """The good step after a window of far lower losses and norms: a spike."""
    at, subject, good_run = scale.spikes, good.subject, good.run
    if not set(SpikeState._fields) <= at.keys():
        yield untried("the spike policy is not one of jls")
        return
    if subject.all_in(at.values(), subject.frozen):
        yield broken("the state of the spike policy comes back as it was")
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
            yield untried(reason)
            return
    far = np.float32(2.0**40)  # however many deviations are allowed
    lower = np.stack([loss - far * (1 + np.abs(loss)), norm / far], axis=-1)
    changes = {
        at["seen"]: np.repeat(lower[..., None], seen.shape[-1], axis=-1),
        at["kept"]: seen.shape[-1],
        at["tokens"]: np.maximum(values["tokens"], 1),
    }
    what = "a window of far lower losses and norms"
    run = yield Trial(good_run.given, what, changes)
    if isinstance(run, Finding):
        yield run
        return
    value, limit = (run.after[at[name]] for name in ("value", "limit"))
    has_limit = np.any(limit[..., SIGNALS.index("norm")] < np.inf)
    if has_limit and not np.any(value > limit):
        yield untried("no loss or norm is far enough above others")
    elif not run.counted(scale, "spikes"):
        yield broken("a step far above all that the spike policy had seen was applied")
    else:
        has_no_loss = np.any(values["kept"][..., 0] == 0)
        note = "; the loss is not judged, pass value=loss" if has_no_loss else ""
        yield right(note)


SPIKE_NOT_SKIPPED = Mistake(
    "spike not skipped",
    right="a step far out of line was skipped",
    write=f"{UPDATE}, with the true gradients, and keep all of the opt_state that it "
    "returns",
    read=_read_policies,
    of_faults=_try_spikes,
)
