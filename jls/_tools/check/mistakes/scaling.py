# SPDX-License-Identifier: Apache-2.0
"""Gradients that do not follow the loss scale, or that still have it in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jls._program.control import Site
from jls._program.facts import ANY, ZERO, Mixed, Unknown, Value
from jls._program.jaxprs import has_side_effects
from jls._program.places import Place, is_transposed, place_of
from jls._program.primitives import primitive_of
from jls._scopes import GRADIENTS, LOSS
from jls._tools.check.findings import Finding, Found, away, broken, right, untried
from jls._tools.check.leaves import is_fp8
from jls._tools.check.mistakes.mistake import Mistake, place_of_update
from jls._tools.check.other_scales import errors_between_scales
from jls._tools.check.runs import to_host
from jls._tools.check.subject import Subject
from jls._tools.reading.reading import Reading
from jls._tools.reading.updates import SeenValue, UpdateCall
from jls._tree import is_inexact

# By how much the gradients may differ between loss scales where a solve or an iteration
# is differentiated: an Anderson iteration with a ridge of 1e-5 by 5e-6. Over the second
# number it is a leak.
_ERROR_OF_A_SOLVE, _MAY_BE_A_SOLVE = 1e-4, 1e-3

_VALUE_AND_GRAD = "loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)"
_NNX = "loss, grads = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)"


class _Mix(NamedTuple):
    """What may make the gradients depend on the loss scale: only numbers tell.

    It is a sum of what the scale is a factor of, and of what it is not, which is a leak
    or part of a solve; or an operation without a rule.
    """

    evidence: str
    place: Place
    given: list[SeenValue]  # what a wrapper is given, and it goes into
    is_sum: bool


_OFF = away("the loss scale is static and 1")


def _read_not_scaled(subject: Subject) -> Found:
    reading = subject.reading
    if not subject.live:
        yield _OFF
    if reading is None:
        return
    for k in subject.live:
        scale, own = subject.scales[k], [x for j, x in subject.calls if j == k]
        if scale.counters:
            yield from _lacking(reading, k, own)
            continue
        results = _results(subject)
        if not results:
            yield untried("nothing comes back that could be trained")
        elif not any(x.depends & reading.bit(scale.at) for x in results):
            yield broken(
                f"nothing that comes back depends on the loss scale in {scale.name}"
            )
    if subject.calls or not subject.has_wrapper:
        yield right()


def _results(subject: Subject) -> list[Value]:
    """What may contain gradients scaled by a scaler without a wrapper."""
    return [
        subject.results[i].now
        for i in sorted(subject.carried.compared - subject.own)
        if i in subject.results and is_inexact(subject.items[i].value)
    ]


def _lacking(reading: Reading, k: int, own: Sequence[UpdateCall]) -> Found:
    """Of the gradients that a wrapper is given, those without its loss scale."""
    scales = reading.scales
    bit, name = reading.bit(scales[k].at), scales[k].name
    gradients = [x for call in own for x in call.values(GRADIENTS)]
    lacking = [x for x in gradients if x.depends and not x.depends & bit]
    if not lacking:
        return
    is_part = len(lacking) < len(gradients)
    share = f"{len(lacking)} of {len(gradients)}"
    if is_part and not any(x.is_narrow for x in lacking):
        yield right(f", except {share}, made without float16")
        return
    others = [x.name for x in scales if lacking[0].depends & reading.bit(x.at)]
    if others:
        evidence = f"the gradients of {name} were scaled by {others[0]}"
    else:
        evidence = (
            f"{f'{share} of ' if is_part else ''}the gradients that the optimizer is "
            f"given do not depend on the loss scale in {name}"
        )
    yield broken(evidence, place_of_update(own[0].site))


NOT_SCALED = Mistake(
    "not scaled",
    right="the gradients follow the loss scale",
    write=f"{_VALUE_AND_GRAD}, with the opt_state that the step was given",
    write_with={
        "equinox": "loss, grads = jls.value_and_grad(loss_fn, "
        "transform=eqx.filter_value_and_grad)(opt_state, model, batch), with the "
        "opt_state that the step was given",
        "nnx": _NNX + "({optimizer}, {model}, {batch})",
        "nnx without a wrapper": _NNX + "({state}, {model}, {batch})",
    },
    needs="updates",
    read=_read_not_scaled,
)


def _read_leaks(subject: Subject) -> Found:
    reading, mix, is_broken = subject.reading, None, False
    if not subject.live:
        yield _OFF
    if reading is None:
        return
    for k in subject.live:
        if any(map(is_fp8, subject.items)):
            yield untried("8-bit layers keep magnitudes of scaled gradients, rightly")
            continue
        scale, own = subject.scales[k], [x for j, x in subject.calls if j == k]
        given = reading.given(k, GRADIENTS, LOSS)
        gradients = [x for call in own for x in call.values(GRADIENTS)]
        if not scale.counters:
            bit = reading.bit(scale.at)
            gradients = [x for x in _results(subject) if x.depends & bit and x.follows]
        losses = [x for call in own for x in call.values(LOSS)]
        bits = reading.bits_of_calls(k) if scale.counters else 0
        new = [subject.results[i].now for i in sorted(subject.trained)]
        trained = [x for x in new if x.follows & bits]
        for found in (
            _leak_in(gradients, ("the gradients", "are", "follow"), given),
            _leak_in(losses, ("the loss", "is", "follows"), given),
            _leak_in(trained, ("what is trained", "is", "follows"), given),
        ):
            if isinstance(found, _Mix):
                mix = mix or found
            elif found is not None:
                is_broken |= found.status == "broken"
                yield found
    if mix is not None:
        if not is_broken:
            yield _judge_mix(subject, mix)
    elif subject.calls or not subject.has_wrapper:
        yield right()


def _leak_in(
    values: Sequence[Value], words: tuple[str, str, str], given: Sequence[SeenValue]
) -> Finding | _Mix | None:
    what, are, follow = words
    for value in values:
        degree = value.degree
        if degree in (ZERO, ANY) or isinstance(degree, Unknown):
            continue
        if isinstance(degree, Mixed):
            place = place_of(degree.site)
            evidence = f"{what} {follow} the loss scale in part: mixed by {place}"
            mixed = [x for x in given if x.value.degree == degree]
            is_sum = primitive_of(degree.site.equation).degree == "sum"
            # A solve that is differentiated; what is added to gradients is a leak.
            if mixed and is_sum and is_transposed(degree.site):
                return _Mix(evidence, place, mixed, True)
        else:
            place = place_of(value.degree_site) if value.degree_site else None
            by = f", last by {place}" if place and place.file else ""
            evidence = f"{what} {are} {_factor_in_words(degree)}{by}"
        return broken(evidence, place)
    for value in values:
        if isinstance(value.degree, Unknown):
            place = place_of(value.degree.site)
            reason = f"what becomes of the loss scale in {place} is not known"
            lost = [x for x in given if x.value.degree == value.degree]
            if lost and not _runs_elsewhere(value.degree.site):
                return _Mix(reason, place, lost, False)
            return untried(reason)
    return None


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


def _judge_mix(subject: Subject, mix: _Mix) -> Finding:
    """Whether gradients depend on the loss scale where reading cannot tell."""
    evidence, place, given, is_sum = mix
    leaves = to_host([x.value for x in subject.items])
    try:
        errors = errors_between_scales(subject, leaves, given)
    except Exception as problem:  # such as a callback that sees another scale
        reason = f"{evidence}; at another scale it raises {type(problem).__name__}"
        return untried(reason)
    if errors is None:
        return untried(evidence)
    error = max(errors.low, errors.high)
    leak = max(errors.low * errors.are_in_proportion, errors.high)
    if error <= _ERROR_OF_A_SOLVE:
        return right(f", to {error:.0e}, in spite of {place}")
    if is_sum and leak > _MAY_BE_A_SOLVE:
        return broken(evidence, place)
    return untried(f"{evidence}; at other scales they are {error:.0e} off in float32")


SCALE_LEAKS = Mistake(
    "scale leaks",
    right="the loss scale is left in neither gradients nor loss",
    write="jls.value_and_grad(loss_fn) alone: it scales and unscales; no jls.scale in "
    "the loss, no jls.unscale after it; clipping inside, with clip = "
    "optax.clip_by_global_norm(1.0): jls.loss_scaled(optax.chain(clip, inner))",
    needs="updates",
    read=_read_leaks,
)
