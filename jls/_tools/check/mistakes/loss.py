# SPDX-License-Identifier: Apache-2.0
"""An optimizer that is not given the loss."""

import optax

from jls._scopes import LOSS
from jls._text import listed
from jls._tools.check.faults import Faults
from jls._tools.check.findings import Found, Note, away, broken, right
from jls._tools.check.mistakes.mistake import Mistake, place_of_update
from jls._tools.check.subject import Subject

UPDATE = "updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)"


def _read_losses(subject: Subject) -> Found:
    scales = subject.scales
    if not any(x.counters and not x.is_static for x in scales):
        yield away("there is no wrapper with a loss scale that moves")
        return
    if optax.LookaheadState in subject.program.outside:
        yield away("optax.lookahead, outside, does not pass value= on")
        return
    for k, call in subject.calls:
        scale = scales[k]
        if not scale.is_static and not call.values(LOSS):
            name = f" with {scale.name}" if len(scales) > 1 else ""
            evidence = f"the update{name} is not given the loss, or only a constant"
            yield broken(evidence, place_of_update(call.site))
    if subject.calls:
        yield right()


def _note_finite_losses(faults: Faults) -> Found:
    """Notes where a wrapper whose scale moves skipped for the gradients only."""
    hidden = [
        fault.what
        for fault in faults.in_batch
        if any(
            scale.counters
            and not scale.is_static
            and fault.run.counted(scale, "skips") > 0
            and not fault.run.counted(scale, "nonfinite_losses")
            for scale in faults.good.subject.scales
        )
    ]
    if hidden and faults.status("loss not passed") == "right":
        yield Note(
            f"The loss stays finite with {listed(hidden)}, so the skip is "
            "taken for an overflow: the loss scale backs off, and jls.requeue "
            "hands the batch out again. If a jnp.nansum, a mask or, compiled for a "
            "CPU, a relu does it, give the optimizer a loss that is NaN."
        )


LOSS_NOT_PASSED = Mistake(
    "loss not passed",
    right="the optimizer is given the loss",
    write=UPDATE,
    write_with={
        "linen": "params, opt_state, report = jls.apply_gradients(state.tx, grads, "
        "state.opt_state, state.params, value=loss), then state = state.replace("
        "step=state.step + 1, params=params, opt_state=opt_state)",
        "nnx": "{optimizer}.update({model}, grads, value=loss)",
    },
    needs="updates",
    read=_read_losses,
    of_faults=_note_finite_losses,
)
