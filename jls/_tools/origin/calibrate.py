# SPDX-License-Identifier: Apache-2.0
"""`jls.calibrate`: the largest loss scale at which a batch does not overflow."""

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jls import _validate
from jls._program.facts import ANY, Unknown, Value
from jls._program.frames import Variable, behind
from jls._program.jaxprs import is_half_atom
from jls._program.places import Place
from jls._scalers.rule import bounds_of
from jls._state import how_to_nest
from jls._text import format_number, listed, scale_in_words
from jls._tools.origin.calibration import Calibration
from jls._tools.origin.case import (
    RESULTS,
    Case,
    RecordedRun,
    Recording,
    at_scale,
    read_case,
    record,
    run,
    run_with_all_records,
    settings,
)
from jls._tools.origin.far_off import find_near
from jls._tools.origin.kept import AGAIN, Forward, argument
from jls._tools.origin.losses import MIN_OFF, Losses, both_ways, find_losses
from jls._tools.origin.record import as_large_as
from jls._tools.origin.result import place_in_words
from jls._tools.origin.scalers import scalers_in
from jls._tools.origin.trail import OpResult, RunValue, Trail
from jls._tools.origin.twin import Twin
from jls._tools.origin.why import LOWEST_EXPONENT, birth_of, explain
from jls._tools.reading.precision import PrecisionReport, look_at
from jls._tools.reading.slow import logging_if_slow
from jls._tools.reading.widths import Widths

_CAST = "convert_element_type"
_HIGHEST_EXPONENT = 126  # of the largest loss scale that jls takes


def calibrate(
    step: Callable[..., Any], /, *args: Any, losses: bool = False, **kwargs: Any
) -> Calibration:
    """Finds the largest loss scale at which one batch does not overflow.

    If a dynamic scale starts too high, the first batches are skipped; if it starts too
    low, small gradients vanish. This finds the right power of two before the first
    step::

      result = jls.calibrate(step, params, opt_state, batch)
      opt_state = jls.set_loss_scale(opt_state, result.init_scale)

    For the host. The step is traced, compiled once with a number beside each operation,
    and run at several loss scales, so the `ceiling` is exact for this batch and this
    device: there the loss and all gradients are finite, at twice the scale one is not.
    Then the same step in float32 is compiled and run: it shows which values float16
    loses. Nothing of yours is changed or donated, but callbacks in the step run each
    time. It takes up to four times as long as compiling a large step, longer beside a
    small one.

    It sees one batch. Others may have larger gradients, so `init_scale` is half of the
    ceiling; from there let `jls.dynamic` follow.

    Args:
      step: a whole train step, jitted or not: of plain pytrees, Linen, NNX, Equinox or
        Haiku. Or another function of a loss scale and a batch, such as
        `jls.value_and_grad(loss_fn)`.
      *args: its arguments, with one state that carries a loss scale, of any value.
      losses: whether to find which lines lose precision, in float16 or bfloat16, and
        whether the error of a result builds up in a loop. This compiles the step three
        more times. If the step itself has a keyword `losses`, pass
        `functools.partial(step, losses=...)`.
      **kwargs: its keyword arguments.

    Returns:
      A `jls.types.Calibration`. `init_scale` is the scale to start with; `ceiling` the
      largest one, a power of two, None where none is needed; `limited_by` the
      `jls.types.Place` that overflows first above it; `keep` what to pass to
      `jls.autocast` or `jls.train_step`, so that nothing of the forward pass leaves the
      range of float16 in this batch, also of a step that is float32 now, and so that
      a cast step is finite if it is so in float32; None where nothing has to be kept; a
      regular expression, or a function where the modules have no scope (Flax NNX,
      Equinox), and with it the step has another ceiling: calibrate again; `losses` the
      lines that lose precision, each a `jls.types.PrecisionLoss`, by the factor, at
      most ten;
      `vanishing` the places where gradients vanish at `init_scale`, with the share of
      them, from the largest.
      `str()` is for people, and `plot()` a picture.

    Raises:
      TypeError: if `step` is not a function, or is compiled ahead of time.
      ValueError: if no argument carries a loss scale, or several do; if the step is not
        finite at any loss scale down to 2**-24, and no `keep` of an autocast mends it;
        for arguments, see `jls.why`.
      Exception: what `step` itself raises.

    Example:
      >>> def loss_fn(params, batch):
      ...     hidden = batch.astype(jnp.float16) @ params.astype(jnp.float16)
      ...     return jnp.sum(hidden.astype(jnp.float32) ** 2)
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1))
      >>> params = jnp.full((4, 2), 0.5)
      >>> opt_state = optimizer.init(params)
      >>> step = jax.jit(jls.train_step(loss_fn, optimizer))
      >>> result = jls.calibrate(step, params, opt_state, jnp.ones((8, 4)))
      >>> result.ceiling, result.limited_by.operation, result.limited_by.is_backward
      (1024.0, 'dot_general', True)
      >>> opt_state = jls.set_loss_scale(opt_state, result.init_scale)
    """
    _validate.traceable("step", step)
    losses = _validate.flag("losses", losses)
    with settings(), logging_if_slow(_SLOW):
        case = read_case("jls.calibrate", step, args, kwargs)
        scaled = read_scaled(case)
        seen = look_at(case.reading, [case.scales[i] for i in case.live])
        bounds = _bounds(step, (args, kwargs))
        found = _mended(scaled) or _calibrated(scaled, seen, bounds)
        if losses:
            found = _with_losses(scaled, found)
        result = _nearer(scaled, found) if found.is_far else found.result
        return result._replace(precision=seen.precision, half=seen.headline)


_SLOW = (
    "jls.calibrate is compiling and running the step with a record beside each "
    "operation; this takes up to four times as long as to compile it alone."
)


class ScaledStep(NamedTuple):
    """A step and the loss scale that is looked for."""

    case: Case
    at: int  # the input that is the scale
    now: float
    is_off: bool  # whether it is that of `jls.skip_nonfinite`
    is_needed: bool  # whether a result in a narrow dtype depends on it
    following: list[Variable]  # those that double with it
    forward: Forward
    twin: Twin

    def leaves(self, scale: float) -> list[Any]:
        """The inputs at a loss scale."""
        return at_scale(self.case.leaves, [self.at], scale)

    def run(self, scale: float, program: Recording | None = None) -> RecordedRun:
        return run(self.case, self.leaves(scale), program)


def read_scaled(case: Case) -> ScaledStep:
    """Reads what depends on the loss scale of a step."""
    at = _the_scale(case)
    now = float(np.max(case.leaves[at]))
    frames, on_the_way = case.main.by_site(), behind(case.before_update)
    depends: list[tuple[Variable, Value]] = []
    for (*around, index, result), value in sorted(case.reading.flow.narrow.items()):
        frame = frames[tuple(around)]
        equation = frame.jaxpr.eqns[index]
        variable = frame, equation.outvars[result]
        is_new = as_large_as(equation, result) is None
        if is_new and variable in on_the_way and value.depends >> at & 1:
            depends.append((variable, value))
    following = [variable for variable, value in depends if _follows(value)]
    forward = Forward(case.main, case.forward)
    sized = {(x.frame, atom) for x in forward.half_operations for atom in x.half}
    twin = Twin(case.main, sized & on_the_way, following, case.traced.options)
    is_off = at not in case.live
    return ScaledStep(case, at, now, is_off, bool(depends), following, forward, twin)


class _Found(NamedTuple):
    """A result, and what is known of it beside."""

    result: Calibration
    is_far: bool = False  # whether the step may be far off float32
    hints: tuple[str, ...] = ()  # the notes that hold unless it is


def _calibrated(
    scaled: ScaledStep, seen: PrecisionReport, bounds: tuple[float, float] | None
) -> _Found:
    """The loss scale, and what has to stay float32."""
    if scaled.following:
        found, too_low = _ceiling(scaled, bounds)
    else:
        notes, too_low = (_why_none(scaled, seen),), ""
        found = Calibration(1.0, notes=notes, write=seen.write)
    if not (scaled.following or scaled.forward.half_operations):
        return _Found(found)
    scale = 1.0 if found.ceiling is None else found.init_scale
    trail = Trail(scaled.twin.recorded(scaled.leaves(scale)))
    kept = scaled.forward.kept(trail)
    if found.ceiling is not None:
        found = _with_shares(scaled, found, trail)
    elif scaled.following:
        found = found._replace(notes=(_why_no_ceiling(scaled, trail, kept.keep),))
    write = kept.write
    if kept.keep is None or not scaled.following:
        write = "\n".join(filter(None, (found.write, kept.write)))
    notes = tuple(filter(None, (*found.notes, kept.note)))
    found = found._replace(notes=notes, write=write, keep=kept.keep)
    is_far = bool(too_low) or scaled.forward.has_vanished(trail)
    hints = too_low, "" if scaled.forward.has_float16 else kept.note
    return _Found(found, is_far, hints)


# The ceiling.


def _ceiling(
    scaled: ScaledStep, bounds: tuple[float, float] | None
) -> tuple[Calibration, str]:
    """The largest power of two that is finite, unless all are; and where to start.

    And the note, if there is one, that the scaler cannot come down to it.
    """
    exponents = range(LOWEST_EXPONENT + 1, _HIGHEST_EXPONENT + 1)
    count = bisect.bisect_left(
        exponents, True, key=lambda x: bool(scaled.run(2.0**x).bad)
    )
    if count == len(exponents):
        return Calibration(scaled.now), ""
    ceiling = 2.0 ** (exponents[count] - 1)
    init_scale, about_start = _start(bounds, ceiling)
    limit, about_limit = _limit(scaled, ceiling)
    write = "" if init_scale == scaled.now else _line(scaled, init_scale)
    notes = _about_now(scaled, ceiling), about_start, about_limit
    found = Calibration(init_scale, ceiling, limit, notes=notes, write=write)
    return found, about_start if bounds and bounds[0] > ceiling else ""


def _limit(scaled: ScaledStep, ceiling: float) -> tuple[Place | None, str]:
    """The place that overflows first above the ceiling, and what to do."""
    above = scaled.run(2 * ceiling)
    for only_first in (True, False):
        closely = run_with_all_records(scaled.case, above, only_first)
        below = scaled.run(ceiling, closely.program).trail
        for birth in closely.births:
            op = birth.origin
            # A birth there may be one at the ceiling too.
            if not isinstance(op, OpResult) or below.is_bad(
                RunValue(op.frame, op.site.equation.outvars[op.result], op.iterations)
            ):
                continue
            first = birth_of(scaled.case, closely.trail, birth)
            # The loss scale itself, cast to the dtype of the loss by jls.
            is_scale = first.operands == (2 * ceiling,)
            is_number = op.site.equation.outvars[op.result].aval.shape == ()
            if is_scale and is_number and first.place.operation == _CAST:
                return first.place._replace(file="", line=0, function=""), _OF_LOSS
            return first.place, ""
    return None, ""


def _start(bounds: tuple[float, float] | None, ceiling: float) -> tuple[float, str]:
    """The scale to start with, and a note about the scaler's bounds."""
    half = ceiling / 2
    if bounds is None:
        return half, ""
    low, high = bounds
    if low > ceiling:
        return half, (
            f"The scaler's min_scale of {scale_in_words(low)} is over the ceiling: "
            "from there it cannot come down. Give it a far lower one, such as "
            f"min_scale={format_number(half / 2**10)}"
        )
    if high < half:
        return high, (
            f"The scaler's max_scale is {scale_in_words(high)}. Give it "
            f"max_scale={format_number(half)} or more, and start there"
        )
    return max(half, low), ""


def _about_now(scaled: ScaledStep, ceiling: float) -> str:
    if scaled.is_off:
        return (
            "jls.skip_nonfinite does not scale the loss, and a scale that is set "
            "there never comes down. In float16 use jls.loss_scaled"
        )
    if scaled.now <= ceiling:
        return ""
    if math.isinf(scaled.now):  # of a state that is kept in float16
        return "The scale is inf now"
    return (
        f"The scale is {scale_in_words(scaled.now)} now, "
        f"{scale_in_words(scaled.now / ceiling)} times too high for this batch"
    )


def _line(scaled: ScaledStep, scale: float) -> str:
    """The line that sets the scale."""
    name = scaled.case.scales[scaled.at].path[0]
    name = name if name.isidentifier() else "opt_state"
    result = "" if name in scaled.case.arguments.in_place else f"{name} = "
    return f"{result}jls.set_loss_scale({name}, {format_number(scale)})"


def _with_shares(scaled: ScaledStep, found: Calibration, trail: Trail) -> Calibration:
    """The same with what float16 loses of what follows the scale.

    Args:
      scaled: the step.
      found: its scale.
      trail: of a run of the twin at that scale.
    """
    scale, records = found.init_scale, trail.records
    every = [scaled.twin.cotangent(records, x, scale) for x in scaled.following]
    cotangents = tuple(x for x in every if x is not None)
    shares: dict[Place, float] = {}
    for x in cotangents:
        shares[x.place] = max(x.vanishing, shares.get(x.place, 0.0))
    vanishing = sorted(shares.items(), key=lambda pair: -pair[1])
    vanishing = tuple(pair for pair in vanishing if pair[1])
    return found._replace(cotangents=cotangents, vanishing=vanishing)


def _why_no_ceiling(scaled: ScaledStep, trail: Trail, keep: Any) -> str:
    """Why no loss scale overflows; `trail` is of a run of the twin."""
    if keep is not None:
        return _OVERFLOWS
    if scaled.case.scales[scaled.at].counters and not scaled.case.reading.checked:
        return _NO_UPDATE
    sizes = (scaled.twin.largest(trail.records, x) for x in scaled.following)
    return _NO_CEILING if any(sizes) else _ALL_ZERO


def _why_none(scaled: ScaledStep, seen: PrecisionReport) -> str:
    """Why no loss scale is needed."""
    if scaled.case.reading.flow.narrow:
        return (
            "No loss scale is needed, or the loss is not scaled: the step has "
            "float16 in it, but none of it follows the loss scale. jls.check_step "
            "says which"
        )
    if seen.headline:
        return "In float32 and bfloat16 no gradient vanishes"
    note = (
        "No loss scale is needed: all that follows it is float32 or bfloat16, in "
        "which no gradient vanishes"
    )
    skips = "jls.skip_nonfinite skips bad steps without one"
    return note if scaled.is_off else f"{note}. {skips}"


# Steps that are finite at no loss scale.


def _mended(scaled: ScaledStep) -> _Found | None:
    """The result for an autocast that makes inf or NaN at any loss scale.

    Returns:
      None if the step is finite, or needs no scale.

    Raises:
      ValueError: if it is not finite, and no `keep` makes it so.
    """
    case, is_needed = scaled.case, scaled.is_needed
    widths = Widths(case.main, case.before_update)
    scale = 2.0**LOWEST_EXPONENT if is_needed else 1.0
    if not (is_needed or widths.units):
        return None
    program = None if is_needed else record(case, at_roots=True)
    if not scaled.run(scale, program).bad:
        return None
    # As in `jls.why`. What else leaves the range, and is finite all the same, is found
    # by the next call.
    units = widths.least(scaled.leaves(scale))
    if not (units or is_needed):
        return None
    found = explain(case, scaled.run(scale))
    if not units:
        lowest, text = scale_in_words(scale), str(found).removeprefix("jls.why: ")
        raise ValueError(
            "step must be finite at some loss scale, got one that is not at any down "
            f"to {lowest}, so no scale mends it. {text}\n\n"
            "More: print(jls.why(step, ...)) with the same arguments."
        )
    keep = scaled.forward.keep_of(units, widths.units)
    infs = [x for x in found.births if x.kind == "inf"]
    notes = [_NEEDS_KEEP]
    for birth in [*infs, *found.births][:1]:
        makes = "overflows" if infs else "makes NaN"
        here = place_in_words(birth.place)
        notes.append(f"In half this line {makes}: {here}")
    if is_needed:
        trail = Trail(scaled.twin.recorded(scaled.leaves(scale)))
        kept = scaled.forward.kept(trail)
        notes.append(kept.note if {*kept.units} == {*units} else AGAIN)
    write = argument(keep)
    result = Calibration(scaled.now, notes=tuple(notes), write=write, keep=keep)
    return _Found(result)


# Which lines lose precision.


def _with_losses(scaled: ScaledStep, found: _Found) -> _Found:
    """The result, with the lines that lose precision."""
    case, main, result = scaled.case, scaled.case.main, found.result
    if not any(is_half_atom(x) for frame in main.all() for x in frame.makers):
        notes = (*result.notes, Losses().note)
        return found._replace(result=result._replace(notes=notes))
    forward = case.forward or set[Variable]()
    results = {x.variable: x.name for x in case.roots if x.role in RESULTS}
    gradients = case.gradients or [x for x in results if x not in forward]
    watched = dict.fromkeys(case.losses, _THE_LOSS)
    watched |= {x: name for x, name in results.items() if x in forward}
    both = both_ways(main, [*gradients, *watched], case.traced.options)
    leaves = scaled.leaves(_low_scale(scaled, result))
    lost = find_losses(both, main, leaves, gradients, watched)
    notes = (*result.notes, *filter(None, (lost.note, lost.built_up)))
    result = result._replace(losses=lost.lines, notes=notes)
    is_far = found.is_far or lost.error >= MIN_OFF or bool(lost.built_up)
    return found._replace(result=result, is_far=is_far)


def _nearer(scaled: ScaledStep, found: _Found) -> Calibration:
    """The result, with the `keep` of the products that bring it far off float32."""
    case, result = scaled.case, found.result
    if result.keep is not None and scaled.is_needed:
        return result  # what leaves the range comes first
    compared = {_THE_LOSS: case.losses, "the gradients": case.gradients}
    leaves = scaled.leaves(_low_scale(scaled, result))
    near = find_near(case.main, compared, leaves)
    if near is None:
        return result
    names = " and ".join(near.before)
    are = "is" if names == _THE_LOSS else "are"
    before, after = (_percents(x.values()) for x in (near.before, near.after))
    text = f"This step is far off in half precision: {names} {are} {before} off float32"
    here = listed([place_in_words(x) for x in near.lines])
    keep, write, then = result.keep, "", [AGAIN] if scaled.is_needed else []
    if near.units:
        keep = scaled.forward.keep_of(near.units, near.every)
        text += f"; with this `keep`, {after}. It is for the product at {here}"
        write = argument(keep)
    elif len(near.lines) == len(near.every):
        text += f"; with {here} in float32, {after}. There is no other product"
        write, then = "jls.train_step(...), without compute_dtype= or autocast", []
    else:
        text += f"; with the product at {here} in float32, {after}"
        write = 'with jax.named_scope("wide"): around it, and keep="wide"'
    notes = (text, *then, *(x for x in result.notes if x not in found.hints))
    return result._replace(notes=notes, keep=keep, write=write)


def _percents(shares: Iterable[float]) -> str:
    return " and ".join("under 1 %" if x < 0.01 else f"{100 * x:.0f} %" for x in shares)


_THE_LOSS = "the loss"


def _low_scale(scaled: ScaledStep, result: Calibration) -> float:
    """A loss scale at which no gradient overflows, though each is rounded."""
    largest = max((x.largest for x in result.cotangents), default=0.0)
    if result.ceiling is None or not largest:
        return scaled.now if result.ceiling is None else result.init_scale
    room = float(np.finfo(np.float16).max) / largest / 4
    return min(result.init_scale, 2.0 ** math.floor(math.log2(room)))


_ALL_ZERO = (
    "All float16 gradients of this batch are 0, in float32 too. So it says nothing "
    "about the loss scale, which stays. The loss may be constant, or all units dead"
)
_OVERFLOWS = (
    "No float16 gradient is left that could say which scale is right, since the "
    "forward pass overflows. The scale stays"
)
_NEEDS_KEEP = (
    "In float32 this step is finite, in half at no loss scale: it needs `keep`"
)
_NO_UPDATE = (
    "No update of the optimizer was found in the step, so what overflows in it is not "
    "seen. The scale stays"
)
_NO_CEILING = (
    "Nothing overflows up to a loss scale of 2^126: the gradients of this batch are "
    "tiny, or clipped on their way. The scale stays"
)


_OF_LOSS = (
    "It is the loss itself that is float16, and the scale is cast to it. Compute the "
    "loss in float32: jnp.mean(error.astype(jnp.float32))"
)


def _follows(value: Value) -> bool:
    """Whether the one loss scale is a factor of a value, as far as can be read."""
    # A 0 as written may be none in float32: a quotient by a number over 65504.
    is_any = value.degree is ANY or isinstance(value.degree, Unknown)
    return is_any or value.degree == _ONE


_ONE = ((("scale", 0), 1),)


def _the_scale(case: Case) -> int:
    """The input that is the loss scale."""
    if len(case.scales) == 1:
        return next(iter(case.scales))
    if not case.scales:
        call = case.arguments.rebuild(case.arguments.leaves)
        write = how_to_nest((call.args, call.kwargs)) or (
            "Pass the step and its arguments, among them the state of an optimizer "
            "made by jls.loss_scaled: jls.calibrate(step, params, opt_state, batch)."
        )
        raise ValueError(f"The arguments must carry a loss scale, got none. {write}")
    names = ", ".join(repr(x.name) for x in case.scales.values())
    raise ValueError(
        f"The arguments must carry one loss scale, got {len(case.scales)}: {names}. "
        "Close over the others, at a low scale: other = jls.set_loss_scale(other, 1.0) "
        "and jls.calibrate(lambda state: step(state, other, batch), state)."
    )


def _bounds(step: Callable[..., Any], arguments: Any) -> tuple[float, float] | None:
    """The bounds that all scalers of the step share; None if they are not known."""
    found = set(map(bounds_of, scalers_in(step, arguments)))
    return found.pop() if len(found) == 1 else None
