# SPDX-License-Identifier: Apache-2.0
"""The codes that the program of a step settles by itself."""

import functools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

from jls._program.control import Site
from jls._program.facts import ANY, ZERO, Mixed, Multiple, Unknown, Value
from jls._program.places import Place, place_of
from jls._scopes import GRADIENTS, LOSS
from jls._text import join
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings
from jls._tools.check.leaves import is_fp8
from jls._tools.check.runs import Runner
from jls._tools.reading.derivatives import DERIVATIVE, devices_along, is_tracked
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale, is_switched_off
from jls._tools.reading.updates import Checked
from jls._tree import is_inexact

BY_READING: tuple[Code, ...] = (
    "not scaled",
    "scale leaks",
    "loss not passed",
    "gradients narrowed",
)
SUMMED: Code = "summed over devices"

# The factor before a cast to float16 from which on it is another loss scale: a sum over
# micro-batches or a few devices may multiply by their number, a scale wins four bits.
_SCALED_ON_PURPOSE = 2.0**4
# A decay and 1 - decay add up to 1, but for rounding: the eps of float16 is 9.8e-4.
_ROUNDING = 1e-3


def _mark_not_applicable(runner: Runner, findings: Findings) -> None:
    """Notes which codes do not apply to a step with these scales."""
    leaves, scales = runner.arguments.leaves, runner.scales
    if all(is_switched_off(leaves[x.at], x) for x in scales):
        for code in ("not scaled", "scale leaks", "gradients narrowed"):
            findings.does_not_apply(code, "the loss scale is static and 1")
    if not any(x.counters for x in scales):
        reason = "no wrapper is given the gradients"
        findings.does_not_apply("gradients narrowed", reason)
    if not any(x.counters and not x.is_static for x in scales):
        reason = "there is no wrapper with a loss scale that moves"
        findings.does_not_apply("loss not passed", reason)
    elif optax.LookaheadState in runner.around:
        reason = "optax.lookahead, outside, does not pass value= on"
        findings.does_not_apply("loss not passed", reason)
    if all(x.is_static for x in scales):
        findings.does_not_apply("scale stuck", "no loss scale moves")
    if not any(x.spikes for x in scales):
        findings.does_not_apply("spike not skipped", "there is no spike policy")


def read_codes(runner: Runner, findings: Findings) -> tuple[Value, ...]:
    """Settles the codes that the program decides, and those that do not apply.

    Returns:
      The gradients that may have lost an inf on their way.
    """
    _mark_not_applicable(runner, findings)
    reading = runner.reading
    if reading is None:
        return ()
    wrappers = [k for k, scale in enumerate(runner.scales) if scale.counters]
    # What is only read, such as the state of another network, is given no gradients.
    returned = [k for k in wrappers if runner.scales[k].own & runner.carried.leaves]
    missing = [k for k in returned if not reading.calls.get(k)]
    if missing:
        names = ", ".join(runner.scales[k].name for k in missing)
        reason = f"no update with {names} was found in the program of the step"
        for code in BY_READING:
            findings.not_tried(code, reason)
    calls = [(k, call) for k in wrappers for call in reading.calls.get(k, [])]
    _read_scaling(runner, reading, calls, findings)
    _read_losses(runner, calls, findings)
    _read_narrowed(runner, calls, findings)
    _read_stuck(runner, reading, findings)
    _read_summed(reading, calls, findings)
    for k in returned:
        _read_forgotten(runner, reading, k, findings)
    _note_subtracted(reading, findings)
    gradients = [gradient for _, call in calls for gradient in call.values(GRADIENTS)]
    cleaned = tuple(x for x in gradients if x.cleaned)
    if calls and not missing and not cleaned:
        findings.right("overflow hidden")
    return cleaned


# Scaling.


def _read_scaling(
    runner: Runner,
    reading: Reading,
    calls: Sequence[tuple[int, Checked]],
    findings: Findings,
) -> None:
    leaves = runner.arguments.leaves
    live = [
        k for k, x in enumerate(runner.scales) if not is_switched_off(leaves[x.at], x)
    ]
    for k in live:
        scale = runner.scales[k]
        gradients = [x for j, call in calls if j == k for x in call.values(GRADIENTS)]
        if not scale.counters:
            gradients = _read_bare(runner, reading, scale, findings)
        elif gradients:
            site = next(call.site for j, call in calls if j == k)
            _read_not_scaled(runner, reading, k, gradients, site, findings)
        if any(map(is_fp8, runner.arguments.items)):
            reason = "8-bit layers keep magnitudes of scaled gradients, rightly"
            findings.not_tried("scale leaks", reason)
            continue
        losses = [x for j, call in calls if j == k for x in call.values(LOSS)]
        _read_leaks(runner, gradients, "the gradients", scale, findings)
        _read_leaks(runner, losses, "the loss", scale, findings)
        if scale.counters:
            updated = _trained(runner, reading.bits_of_calls(k))
            _read_leaks(runner, updated, "what is trained", scale, findings)
    if calls or not any(scale.counters for scale in runner.scales):
        for code in ("not scaled", "scale leaks"):
            findings.right(code)


def _trained(runner: Runner, bits: int) -> list[Value]:
    results = [runner.result(i) for i in sorted(runner.trained)]
    return [x.now for x in results if x is not None and x.now.follows & bits]


def _read_bare(
    runner: Runner, reading: Reading, scale: Scale, findings: Findings
) -> list[Value]:
    """The results that contain gradients scaled by a scaler without a wrapper."""
    bit = reading.bit(scale.at)
    leaves = runner.carried.compared - runner.own
    leaves = [i for i in leaves if is_inexact(runner.arguments.items[i].value)]
    results = [runner.result(i) for i in sorted(leaves)]
    found = [x.now for x in results if x is not None and x.now.depends & bit]
    if not results:
        reason = "nothing comes back that could be trained"
        findings.not_tried("not scaled", reason)
    elif not found:
        evidence = f"nothing that comes back depends on the loss scale in {scale.name}"
        findings.broken("not scaled", evidence)
    return [x for x in found if x.follows]


def _read_not_scaled(
    runner: Runner,
    reading: Reading,
    k: int,
    gradients: Sequence[Value],
    site: Site,
    findings: Findings,
) -> None:
    bit = reading.bit(runner.scales[k].at)
    lacking = [x for x in gradients if x.depends and not x.depends & bit]
    if not lacking:
        return
    if len(lacking) < len(gradients) and not any(x.is_narrow for x in lacking):
        note = f", but for {len(lacking)} of {len(gradients)}, made without float16"
        findings.right("not scaled", note)
        return
    name = runner.scales[k].name
    others = [
        scale.name
        for j, scale in enumerate(runner.scales)
        if j != k and lacking[0].depends & reading.bit(scale.at)
    ]
    if others:
        evidence = f"the gradients of {name} were scaled by {others[0]}"
    else:
        part = (
            ""
            if len(lacking) == len(gradients)
            else (f"{len(lacking)} of {len(gradients)} of ")
        )
        evidence = (
            f"{part}the gradients that the optimizer is given do not depend on the "
            f"loss scale in {name}"
        )
    findings.broken("not scaled", evidence, _place_of_update(site))


def _read_leaks(
    runner: Runner, values: Sequence[Value], what: str, scale: Scale, findings: Findings
) -> None:
    for value in values:
        degree = value.degree
        if degree in (ZERO, ANY) or isinstance(degree, Unknown):
            continue
        if isinstance(degree, Mixed):
            place = place_of(degree.site)
            verb = "follow" if what == "the gradients" else "follows"
            evidence = f"{what} {verb} the loss scale in part: mixed by {place}"
            findings.broken("scale leaks", evidence, place)
        else:
            place = place_of(value.degree_site) if value.degree_site else None
            by = f", last by {place}" if place and place.file else ""
            evidence = f"{what} {_factor_in_words(degree, what)}{by}"
            findings.broken("scale leaks", evidence, place)
        return
    for value in values:
        if isinstance(value.degree, Unknown):
            reason = f"what becomes of the loss scale in {place_of(value.degree.site)} "
            findings.not_tried("scale leaks", reason + "is not known")
            return


def _factor_in_words(degree: Any, what: str) -> str:
    """The power with which the loss scale is a factor, in words."""
    verb = "are" if what == "the gradients" else "is"
    powers = {}
    for symbol, power in degree:
        powers[symbol] = power
    kinds = {symbol[0] for symbol in powers}
    if len(powers) == 1 and kinds == {"scale"}:
        (power,) = powers.values()
        if power == 1:
            return f"{verb} scaled: still multiplied by the loss scale"
        if power == -1:
            return f"{verb} divided by the loss scale once too often"
        return f"{verb} multiplied by the loss scale to the power of {power}"
    if "adjusted" in kinds:
        return (
            f"{verb} scaled with one state and unscaled with another: the loss scale "
            "may have changed in between"
        )
    return f"{verb} scaled by one number and unscaled by another"


# The loss, narrow gradients, bare scalers.


def _read_losses(
    runner: Runner, calls: Sequence[tuple[int, Checked]], findings: Findings
) -> None:
    code: Code = "loss not passed"
    if findings.is_settled(code):
        return
    for k, call in calls:
        scale = runner.scales[k]
        if not scale.is_static and not call.values(LOSS):
            name = f" with {scale.name}" if len(runner.scales) > 1 else ""
            evidence = f"the update{name} is not given the loss, or only a constant"
            findings.broken(code, evidence, _place_of_update(call.site))
    if calls:
        findings.right(code)


def _place_of_update(site: Site) -> Place:
    return place_of(site)._replace(operation="update", module="")


def _read_narrowed(
    runner: Runner, calls: Sequence[tuple[int, Checked]], findings: Findings
) -> None:
    code: Code = "gradients narrowed"
    for _, call in calls:
        for gradient in call.values(GRADIENTS):
            if gradient.narrowed is None:
                continue
            place = place_of(gradient.narrowed.site)
            if gradient.narrowed.gain >= _SCALED_ON_PURPOSE:
                findings.right(code, f", but for a cast of scaled ones by {place}")
            else:
                evidence = f"the true gradients became float16 by {place}"
                findings.broken(code, evidence, place)
    if calls:
        findings.right(code)


def _read_forgotten(
    runner: Runner, reading: Reading, k: int, findings: Findings
) -> None:
    """Whether updates reach nothing, and the parameters come back as they were."""
    items, carried = runner.arguments.items, runner.carried
    roots = [scale.path for scale in runner.scales]
    inside = {
        i
        for i in carried.leaves
        if any(items[i].path[: len(root)] == root for root in roots)
    }
    states = {carried.sources.get(i, items[i].path) for i in inside}
    results = (reading.outputs | reading.objects).items()
    returned = [x.now for path, x in results if path not in states]
    calls, bits = reading.calls.get(k, []), reading.bits_of_calls(k)
    trained = [x for call in calls for x in call.given.get(GRADIENTS, {}).values()]
    needs = functools.reduce(operator.or_, (x.value.depends for x in trained), 0)
    leaves = [reading.leaf_of(x) for x in returned]
    stays = {i for i in leaves if i is not None} - inside
    others = [x for x, i in zip(returned, leaves, strict=True) if i is None]
    if any(x.follows & bits for x in returned) or any(
        # By way of integers, which follow nothing.
        not x.follows & reading.bits_of_updates and not needs & ~x.depends
        for x in others
    ):
        return
    shapes = Counter(x.atom.aval.shape for x in trained)
    if shapes and shapes <= Counter(np.shape(items[i].value) for i in stays):
        findings.broken(
            "no step",
            "the updates reach nothing that comes back, and the parameters come back "
            "as they were",
            _place_of_update(calls[0].site),
        )


def _note_subtracted(reading: Reading, findings: Findings) -> None:
    """Notes that updates are subtracted: optax has made them negative, to be added.

    Right where the user has changed the sign of the gradients too.
    """
    gradients = [x for call in reading.checked for x in call.values(GRADIENTS)]
    if any(x.site and x.site.equation.primitive.name == "neg" for x in gradients):
        return
    results = (x.now.site for x in (reading.outputs | reading.objects).values())
    returned = {site.indices for site in results if site}
    for site, updates in reading.flow.subtracted:
        if updates.follows & reading.bits_of_updates and site.indices in returned:
            place = place_of(site)
            where = str(place).removeprefix(place.operation)
            findings.notes.append(
                f"The updates of optax are negative already, but subtracted{where}. "
                "Write optax.apply_updates(params, updates)."
            )
            return


def _read_summed(
    reading: Reading,
    calls: Sequence[tuple[int, Checked]],
    findings: Findings,
) -> None:
    """Whether the gradients are a sum over devices where the loss is their mean."""
    code = SUMMED
    found = [call for _, call in calls if is_tracked(call.site)]
    if not found:
        reason = "no wrapper is in a shard_map that sums gradients by itself"
        findings.does_not_apply(code, reason)
    for call in found:
        losses, gradients = call.values(LOSS), call.values(GRADIENTS)
        loss = losses[0].multiple if len(losses) == 1 else None
        if not losses:
            findings.not_tried(code, "the update is not given the loss")
        elif loss is None or not reading.flow.derivatives.of_the_loss(loss):
            reason = "the loss that is given is not seen to be differentiated"
            findings.not_tried(code, reason)
        else:
            for gradient in gradients:
                _read_sum(reading, call.site, loss, gradient, findings)
    if found:
        findings.right(code)


def _read_sum(
    reading: Reading, site: Site, loss: Multiple, gradient: Value, findings: Findings
) -> None:
    code = SUMMED
    made, axes = gradient.multiple, loss.local - loss.varying
    count = devices_along(site, axes)
    unknown = "over which devices the gradients are summed is not known"
    if made is None or made.of is not DERIVATIVE or gradient.degree != ZERO:
        findings.not_tried(code, unknown)
        return
    is_whole = not loss.varying and not made.varying & loss.local
    is_mean = bool(axes) and math.isclose(loss.factor * count, 1)
    if reading.flow.derivatives.has_factor(count) or not is_whole:
        findings.not_tried(code, unknown)
    elif math.isclose(made.factor, loss.factor):
        pass
    elif is_mean and math.isclose(made.factor, 1) and not made.local & axes:
        names = ", ".join(map(repr, sorted(axes)))
        place = place_of(gradient.site) if gradient.site else None
        findings.broken(
            code,
            f"gradients are summed over {names} already: average the loss instead of "
            f"the gradients, which are {count} times too large",
            place._replace(operation="psum") if place else None,
        )
    else:
        findings.not_tried(code, unknown)


def _read_stuck(runner: Runner, reading: Reading, findings: Findings) -> None:
    code: Code = "scale stuck"
    for k, scale in enumerate(runner.scales):
        is_used = not scale.counters or reading.calls.get(k)
        if scale.is_static or not is_used:
            continue
        if scale.counters and runner.is_proved_to_stay(scale.own, is_skipped=False):
            continue  # it is all of the old state: no step
        if runner.is_proved_to_stay(scale.state, is_skipped=False):
            findings.broken(code, f"the state in {scale.name} comes back as it was")
        elif scale.counters and runner.is_proved_to_stay(scale.own):
            name = join(*scale.path)
            findings.broken(
                code,
                f"in a step that is skipped {name} comes back as it was, with its "
                "counters and its loss scale: an overflow is one for ever",
            )


# Skips. Two kinds of leaves that one moves are right: leaves that random numbers
# are added to, and averages that go on towards the parameters.


def is_noise(runner: Runner, leaf: int) -> bool:
    """Whether a skip changes a leaf by random numbers."""
    reading, result = runner.reading, runner.result(leaf)
    if reading is None or result is None:
        return False
    return reading.flow.is_random(result.skipped)


def is_average(runner: Runner, leaf: int) -> bool:
    """Whether a skip makes a leaf out of itself and other trained leaves alone.

    A target network does, an average of the parameters, and a record of them. Weights
    that do not add up to 1 are no average.
    """
    reading, result = runner.reading, runner.result(leaf)
    if reading is None or result is None:
        return False
    items, weights = runner.arguments.items, result.skipped.weights
    if weights is not None and abs(sum(x for _, x in weights) - 1) > _ROUNDING:
        return False
    sources = set(reading.leaves_in(result.skipped.depends))
    others = {i for i in sources & runner.trained if i != leaf}
    # A rate or a count; pmap stacks it, as it does the loss scales.
    scalars = {(), (1,), *(np.shape(items[x.at].value) for x in runner.scales)}
    counts = {i for i in sources if np.shape(items[i].value) in scalars}
    return bool(others) and sources - counts <= runner.trained
