# SPDX-License-Identifier: Apache-2.0
"""The codes that the program of a step settles by itself."""

import functools
import math
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import optax

from jls._program.control import Site
from jls._program.facts import ANY, ZERO, Mixed, Multiple, Number, Unknown, Value
from jls._program.jaxprs import has_side_effects
from jls._program.places import Place, is_transposed, place_of
from jls._program.primitives import primitive_of
from jls._scopes import GRADIENTS, LOSS
from jls._text import join
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings, Mix
from jls._tools.check.leaves import is_fp8
from jls._tools.check.subject import Subject
from jls._tools.reading.derivatives import DERIVATIVE, devices_along, is_tracked
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale
from jls._tools.reading.updates import SeenValue, UpdateCall
from jls._tree import is_inexact

BY_READING: tuple[Code, ...] = (
    "not scaled",
    "scale leaks",
    "loss not passed",
    "gradients narrowed",
)
SUMMED: Code = "summed over devices"
Calls = Sequence[
    tuple[int, UpdateCall]
]  # of wrappers, with the index of the loss scale

# Gradients that are multiplied by 16 or more before the cast are scaled on purpose.
# Smaller factors come from sums over micro-batches or devices.
_SCALED_ON_PURPOSE = 2.0**4
# A decay and 1 - decay add up to 1, except for rounding: the eps of float16 is 9.8e-4.
_ROUNDING = 1e-3


def _mark_not_applicable(
    subject: Subject, around: Collection[type], findings: Findings
) -> None:
    """Notes which codes do not apply to a step with these scales."""
    scales = subject.scales
    if not subject.live:
        for code in ("not scaled", "scale leaks", "gradients narrowed"):
            findings.does_not_apply(code, "the loss scale is static and 1")
    if not any(x.counters for x in scales):
        reason = "no wrapper is given the gradients"
        findings.does_not_apply("gradients narrowed", reason)
    if not any(x.counters and not x.is_static for x in scales):
        reason = "there is no wrapper with a loss scale that moves"
        findings.does_not_apply("loss not passed", reason)
    elif optax.LookaheadState in around:
        reason = "optax.lookahead, outside, does not pass value= on"
        findings.does_not_apply("loss not passed", reason)
    if all(x.is_static for x in scales):
        findings.does_not_apply("scale stuck", "no loss scale moves")
    if not any(x.spikes for x in scales):
        findings.does_not_apply("spike not skipped", "there is no spike policy")


def read_codes(
    subject: Subject, around: Collection[type], findings: Findings
) -> tuple[Value, ...]:
    """Settles the codes that the program decides, and those that do not apply.

    Args:
      subject: the step.
      around: the types of optax's states in which there is a wrapper's.
      findings: of the step.

    Returns:
      The gradients that may have lost an inf on their way.
    """
    _mark_not_applicable(subject, around, findings)
    reading, scales = subject.reading, subject.scales
    if reading is None:
        return ()
    wrappers = [k for k, scale in enumerate(scales) if scale.counters]
    # A state that is only read, such as another network's, is given no gradients.
    returned = [k for k in wrappers if scales[k].own & subject.carried.leaves]
    missing = [k for k in returned if not reading.calls.get(k)]
    if missing:
        names = ", ".join(scales[k].name for k in missing)
        reason = f"no update with {names} was found in the program of the step"
        for code in BY_READING:
            findings.not_tried(code, reason)
    calls = [(k, call) for k in wrappers for call in reading.calls.get(k, [])]
    _read_scaling(subject, reading, calls, findings)
    _read_losses(scales, calls, findings)
    _read_narrowed(calls, findings)
    _read_stuck(subject, reading, findings)
    _read_summed(reading, calls, findings)
    for k in returned:
        _read_forgotten(subject, reading, k, findings)
        _read_dropped(subject, reading, k, findings)
    _read_idle(subject, reading, returned, findings)
    _note_subtracted(reading, findings)
    _note_added_twice(reading, findings)
    gradients = [gradient for _, call in calls for gradient in call.values(GRADIENTS)]
    cleaned = tuple(x for x in gradients if x.cleaned)
    if calls and not missing and not cleaned:
        findings.right("overflow hidden")
    return cleaned


# Scaling.


def _read_scaling(
    subject: Subject, reading: Reading, calls: Calls, findings: Findings
) -> None:
    for k in subject.live:
        scale, own = subject.scales[k], [call for j, call in calls if j == k]
        gradients = [x for call in own for x in call.values(GRADIENTS)]
        given = [
            x
            for call in own
            for role in (GRADIENTS, LOSS)
            for x in call.given.get(role, {}).values()
        ]
        if not scale.counters:
            gradients = _read_bare(subject, reading, scale, findings)
        elif gradients:
            _read_not_scaled(reading, k, gradients, own[0].site, findings)
        if any(map(is_fp8, subject.items)):
            reason = "8-bit layers keep magnitudes of scaled gradients, rightly"
            findings.not_tried("scale leaks", reason)
            continue
        losses = [x for call in own for x in call.values(LOSS)]
        bits = reading.bits_of_calls(k) if scale.counters else 0
        new = [subject.results[i].now for i in sorted(subject.trained)]
        trained = [x for x in new if x.follows & bits]
        _read_leaks(gradients, "the gradients", given, findings)
        _read_leaks(losses, "the loss", given, findings)
        _read_leaks(trained, "what is trained", given, findings)
    if calls or not any(scale.counters for scale in subject.scales):
        findings.right("not scaled")
        if findings.mix is None:
            findings.right("scale leaks")


def _read_bare(
    subject: Subject, reading: Reading, scale: Scale, findings: Findings
) -> list[Value]:
    """The results that contain gradients scaled by a scaler without a wrapper."""
    results = [
        subject.results[i].now
        for i in sorted(subject.carried.compared - subject.own)
        if i in subject.results and is_inexact(subject.items[i].value)
    ]
    found = [x for x in results if x.depends & reading.bit(scale.at)]
    if not results:
        reason = "nothing comes back that could be trained"
        findings.not_tried("not scaled", reason)
    elif not found:
        evidence = f"nothing that comes back depends on the loss scale in {scale.name}"
        findings.broken("not scaled", evidence)
    return [x for x in found if x.follows]


def _read_not_scaled(
    reading: Reading,
    k: int,
    gradients: Sequence[Value],
    site: Site,
    findings: Findings,
) -> None:
    scales = reading.scales
    bit, name = reading.bit(scales[k].at), scales[k].name
    lacking = [x for x in gradients if x.depends and not x.depends & bit]
    if not lacking:
        return
    is_part = len(lacking) < len(gradients)
    share = f"{len(lacking)} of {len(gradients)}"
    if is_part and not any(x.is_narrow for x in lacking):
        findings.right("not scaled", f", except {share}, made without float16")
        return
    others = [x.name for x in scales if lacking[0].depends & reading.bit(x.at)]
    if others:
        evidence = f"the gradients of {name} were scaled by {others[0]}"
    else:
        evidence = (
            f"{f'{share} of ' if is_part else ''}the gradients that the optimizer is "
            f"given do not depend on the loss scale in {name}"
        )
    findings.broken("not scaled", evidence, _place_of_update(site))


def _read_leaks(
    values: Sequence[Value], what: str, given: Sequence[SeenValue], findings: Findings
) -> None:
    verb = "are" if what == "the gradients" else "is"
    for value in values:
        degree = value.degree
        if degree in (ZERO, ANY) or isinstance(degree, Unknown):
            continue
        if isinstance(degree, Mixed):
            place = place_of(degree.site)
            follow = "follow" if what == "the gradients" else "follows"
            evidence = f"{what} {follow} the loss scale in part: mixed by {place}"
            mixed = [x for x in given if x.value.degree == degree]
            is_sum = primitive_of(degree.site.equation).degree == "sum"
            # A solve that is differentiated; what is added to gradients is a leak.
            if mixed and is_sum and is_transposed(degree.site):
                findings.mix = findings.mix or Mix(evidence, place, mixed, True)
            else:
                findings.broken("scale leaks", evidence, place)
        else:
            place = place_of(value.degree_site) if value.degree_site else None
            by = f", last by {place}" if place and place.file else ""
            evidence = f"{what} {verb} {_factor_in_words(degree)}{by}"
            findings.broken("scale leaks", evidence, place)
        return
    for value in values:
        if isinstance(value.degree, Unknown):
            place = place_of(value.degree.site)
            reason = f"what becomes of the loss scale in {place} is not known"
            lost = [x for x in given if x.value.degree == value.degree]
            if lost and not _runs_elsewhere(value.degree.site):
                findings.mix = findings.mix or Mix(reason, place, lost, False)
            else:
                findings.not_tried("scale leaks", reason)
            return


def _runs_elsewhere(site: Site) -> bool:
    """Whether an operation runs at the host, or in foreign code."""
    name = site.equation.primitive.name
    return "callback" in name or "call" in name or has_side_effects(site.equation)


def _factor_in_words(degree: Any) -> str:
    """The power with which the loss scale is a factor, in words."""
    kinds, powers = {symbol[0] for symbol, _ in degree}, [power for _, power in degree]
    if len(powers) == 1 and kinds == {"scale"}:
        (power,) = powers
        if power == 1:
            return "scaled: still multiplied by the loss scale"
        if power == -1:
            return "divided by the loss scale once too often"
        return f"multiplied by the loss scale to the power of {power}"
    if "adjusted" in kinds:
        return (
            "scaled with one state and unscaled with another: the loss scale may have "
            "changed in between"
        )
    return "scaled by one number and unscaled by another"


# The loss, narrow gradients, bare scalers.


def _read_losses(scales: Sequence[Scale], calls: Calls, findings: Findings) -> None:
    code: Code = "loss not passed"
    if findings.is_settled(code):
        return
    for k, call in calls:
        scale = scales[k]
        if not scale.is_static and not call.values(LOSS):
            name = f" with {scale.name}" if len(scales) > 1 else ""
            evidence = f"the update{name} is not given the loss, or only a constant"
            findings.broken(code, evidence, _place_of_update(call.site))
    if calls:
        findings.right(code)


def _place_of_update(site: Site) -> Place:
    return place_of(site)._replace(operation="update", module="")


def _read_narrowed(calls: Calls, findings: Findings) -> None:
    code: Code = "gradients narrowed"
    for _, call in calls:
        for gradient in call.values(GRADIENTS):
            if gradient.narrowed is None:
                continue
            place = place_of(gradient.narrowed.site)
            if gradient.narrowed.gain >= _SCALED_ON_PURPOSE:
                findings.right(code, f", except a cast of scaled ones by {place}")
            else:
                evidence = f"the true gradients became float16 by {place}"
                findings.broken(code, evidence, place)
    if calls:
        findings.right(code)


def _read_forgotten(
    subject: Subject, reading: Reading, k: int, findings: Findings
) -> None:
    """Whether updates reach nothing, and the parameters come back as they were."""
    items, carried, inside = subject.items, subject.carried, subject.inside
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


def _read_dropped(
    subject: Subject, reading: Reading, k: int, findings: Findings
) -> None:
    """Whether the inner optimizer's state is not carried on from step to step."""
    scale, results = subject.scales[k], subject.results
    if subject.all_in(scale.own, subject.frozen):
        return  # all of the state is the old one
    inner = (*scale.path, "inner_state")
    replaced = [reading.traced.inputs[n] for n in sorted(reading.flow.replaced)]
    state = [
        i
        for i in replaced
        if i in results and subject.items[i].path[: len(inner)] == inner
    ]
    ndim = np.ndim(subject.items[scale.at].value)
    # A learning rate or a count may be set in each step.
    state = [i for i in state if np.ndim(subject.items[i].value) > ndim] or state
    is_old = [reading.leaf_of(results[i].now) == i for i in state]
    is_number = [isinstance(results[i].now.known, Number) for i in state]
    if state and all(map(operator.or_, is_old, is_number)):
        how = "comes back as it was" if all(is_old) else "is set back"
        findings.broken(
            "no step",
            f"the state of the inner optimizer {how} in each step: "
            f"{subject.names(state)}",
            write="return the opt_state that optimizer.update returns, all of it",
        )


def _read_idle(
    subject: Subject, reading: Reading, returned: Sequence[int], findings: Findings
) -> None:
    """Whether gradients or updates are 0, whatever the parameters are.

    Of some leaves, or under one of several wrappers, that may be meant: they are
    frozen.
    """
    found = dict[int, tuple[str, str]]()
    for k in returned:
        calls = reading.calls.get(k, [])
        given = [x for call in calls for x in call.given.get(GRADIENTS, {}).values()]
        idle = [x.value.degree == ANY for x in given]
        added = reading.flow.added.values()
        bits = reading.bits_of_calls(k)
        updates = [x for _, _, x in added if x.follows & bits]
        if given and all(idle):
            found[k] = (
                "the gradients are 0, whatever the parameters are: the loss does not "
                "depend on them, or only behind jax.lax.stop_gradient",
                "a loss_fn that returns the loss of the params that it is given, with "
                "no stop_gradient around all of them",
            )
        elif updates and all(x.degree == ANY for x in updates):
            found[k] = (
                "the updates are 0, whatever the gradients are: the learning rate is 0",
                "a learning rate over 0, or a schedule that gives one",
            )
        elif any(idle):
            findings.notes.append(
                f"The gradients of {sum(idle)} of {len(idle)} arrays are 0, whatever "
                "the parameters are: the loss does not depend on them, or only behind "
                "jax.lax.stop_gradient."
            )
    if found and len(found) == len(returned):
        findings.idle = next(iter(found.values()))
    else:
        names = {k: reading.scales[k].name for k in found}
        findings.doubts += [f"with {names[k]} {x}" for k, (x, _) in found.items()]


def _note_added_twice(reading: Reading, findings: Findings) -> None:
    """Notes that an update is added to what it was added to before."""
    added = reading.flow.added
    for site, other, update in added.values():
        before = added.get(other.site.indices) if other.site else None
        if before is None or before[0].indices == site.indices:
            continue
        _, _, first = before
        if first.site and update.site and first.site.indices == update.site.indices:
            place = place_of(site)
            where = str(place).removeprefix(place.operation)
            findings.doubts.append("the updates are added twice")
            findings.notes.append(
                f"The updates are added to the parameters twice, the second time{where}"
                ": the learning rate is twice what it says."
            )
            return


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
            findings.doubts.append("the updates are subtracted")
            findings.notes.append(
                f"The updates of optax are negative already, but subtracted{where}. "
                "Write optax.apply_updates(params, updates)."
            )
            return


def _read_summed(reading: Reading, calls: Calls, findings: Findings) -> None:
    """Whether the gradients are a sum over devices where the loss is their mean."""
    code = SUMMED
    found = [call for _, call in calls if is_tracked(call.site)]
    if not found:
        reason = "no wrapper is in a shard_map that sums gradients by itself"
        findings.does_not_apply(code, reason)
        return
    for call in found:
        losses = call.values(LOSS)
        loss = losses[0].multiple if len(losses) == 1 else None
        if not losses:
            findings.not_tried(code, "the update is not given the loss")
        elif loss is None or not reading.flow.derivatives.of_the_loss(loss):
            reason = "the loss that is given is not seen to be differentiated"
            findings.not_tried(code, reason)
        else:
            for gradient in call.values(GRADIENTS):
                _read_sum(reading, call.site, loss, gradient, findings)
    findings.right(code)


def _read_sum(
    reading: Reading, site: Site, loss: Multiple, gradient: Value, findings: Findings
) -> None:
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
            findings.broken(
                SUMMED,
                f"gradients are summed over {names} already: average the loss instead "
                f"of the gradients, which are {count} times too large",
                place._replace(operation="psum") if place else None,
            )
            return
    reason = "over which devices the gradients are summed is not known"
    findings.not_tried(SUMMED, reason)


def _read_stuck(subject: Subject, reading: Reading, findings: Findings) -> None:
    code: Code = "scale stuck"
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
            findings.broken(code, f"the state in {scale.name} comes back as it was")
        for field in ("loss_scale", "finite_count"):
            number = _number_set(subject, scale, field)
            if number is not None:
                findings.broken(
                    code,
                    f"{scale.name}/{field} is set to {number:g} in each step, whatever "
                    "the scaler makes of it",
                )
        if skip_changes_nothing and not is_old:
            findings.broken(
                code,
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


# A skipped step may change two kinds of leaves: those with added noise, and running
# averages of the parameters.


def is_noise(subject: Subject, leaf: int) -> bool:
    """Whether a skip changes a leaf by random numbers."""
    reading, result = subject.reading, subject.results.get(leaf)
    if reading is None or result is None:
        return False
    return reading.flow.is_random(result.skipped)


def is_average(subject: Subject, leaf: int) -> bool:
    """Whether a skip makes a leaf out of itself and other trained leaves only.

    A target network does, an average of the parameters, and a record of them. Weights
    that do not add up to 1 are no average.
    """
    reading, result = subject.reading, subject.results.get(leaf)
    if reading is None or result is None:
        return False
    items, weights = subject.items, result.skipped.weights
    if weights is not None and abs(sum(x for _, x in weights) - 1) > _ROUNDING:
        return False
    sources = set(reading.leaves_in(result.skipped.depends))
    others = {i for i in sources & subject.trained if i != leaf}
    # A rate or a count; pmap stacks it, as it does the loss scales.
    scalars = {(), (1,), *(np.shape(items[x.at].value) for x in subject.scales)}
    counts = {i for i in sources if np.shape(items[i].value) in scalars}
    return bool(others) and sources - counts <= subject.trained
