# SPDX-License-Identifier: Apache-2.0
"""Gradients that are summed over devices, and devices that are not alike."""

import math

from jls._program.control import Site
from jls._program.facts import ZERO, Multiple, Value
from jls._program.places import place_of
from jls._scopes import GRADIENTS, LOSS
from jls._tools.check.faults import Faults
from jls._tools.check.findings import Found, away, broken, right, untried
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.subject import Subject
from jls._tools.reading.derivatives import DERIVATIVE, devices_along, is_tracked
from jls._tools.reading.reading import Reading


def _read_summed(subject: Subject) -> Found:
    """Whether the gradients are a sum over devices where the loss is their mean."""
    reading = subject.reading
    if reading is None:
        return
    found = [call for _, call in subject.calls if is_tracked(call.site)]
    if not found:
        yield away("no wrapper is in a shard_map that sums gradients by itself")
        return
    for call in found:
        losses = call.values(LOSS)
        loss = losses[0].multiple if len(losses) == 1 else None
        if not losses:
            yield untried("the update is not given the loss")
        elif loss is None or not reading.flow.derivatives.of_the_loss(loss):
            yield untried("the loss that is given is not seen to be differentiated")
        else:
            for gradient in call.values(GRADIENTS):
                yield from _read_sum(reading, call.site, loss, gradient)
    yield right()


def _read_sum(reading: Reading, site: Site, loss: Multiple, gradient: Value) -> Found:
    made, axes = gradient.multiple, loss.local - loss.varying
    count = devices_along(site, axes)
    is_whole = made is not None and not (loss.varying or made.varying & loss.local)
    has_factor = reading.flow.derivatives.has_factor(count)
    is_known = is_whole and not has_factor and gradient.degree == ZERO
    if made is not None and made.of is DERIVATIVE and is_known:
        is_mean = bool(axes) and math.isclose(loss.factor * count, 1)
        if math.isclose(made.factor, loss.factor):
            return
        if is_mean and math.isclose(made.factor, 1) and not made.local & axes:
            names = ", ".join(map(repr, sorted(axes)))
            place = place_of(gradient.site) if gradient.site else None
            yield broken(
                f"gradients are summed over {names} already: average the loss instead "
                f"of the gradients, which are {count} times too large",
                place._replace(operation="psum") if place else None,
            )
            return
    yield untried("over which devices the gradients are summed is not known")


def _on_one_device(faults: Faults) -> Found:
    if faults.good.is_on_one_device:
        yield away("everything carried is on one device")


SUMMED_OVER_DEVICES = Mistake(
    "summed over devices",
    right="the gradients match the loss passed to update",
    write='return jax.lax.pmean(loss, "data") from loss_fn, and drop the pmean of the '
    "gradients",
    needs="program",
    read=_read_summed,
    of_faults=_on_one_device,
)


def _compare_devices(faults: Faults) -> Found:
    """Whether all devices hold the same, of what they hold together."""
    good, subject = faults.good, faults.good.subject
    yield from _on_one_device(faults)
    runs = [("a good step", run) for run in good.steps]
    runs += [(fault.what, fault.run) for fault in faults.every]
    for what, run in runs:
        diverged = run.diverged & subject.carried.compared
        if diverged:
            names = subject.names(diverged)
            yield broken(f"after {what} devices hold different values of {names}")
    if any(good.run.after[x.at].ndim for x in subject.scales):
        reason = "of a state with an axis of devices each may train a model of its own"
        yield untried(reason)
    yield right()


OUT_OF_SYNC = Mistake(
    "out of sync",
    right="all devices hold the same",
    write='jls.loss_scaled(inner, axis_name="data"), and grads = jax.lax.pmean(grads, '
    '"data") before the update',
    of_faults=_compare_devices,
)
