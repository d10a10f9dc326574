# SPDX-License-Identifier: Apache-2.0
"""`jls.calibrate`: the largest loss scale at which a batch does not overflow."""

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jls import _validate
from jls._program.facts import ANY, Unknown, Value
from jls._program.frames import Variable, behind
from jls._program.jaxprs import is_half_atom, is_narrow_atom
from jls._program.places import Place
from jls._scalers.rule import bounds_of
from jls._state import how_to_nest
from jls._text import format_number, scale_in_words
from jls._tools.origin import roots
from jls._tools.origin.calibration import Calibration
from jls._tools.origin.kept import AGAIN, Forward, Kept, argument, variables_of
from jls._tools.origin.losses import BothWays, Losses, find_built_up, find_losses
from jls._tools.origin.record import RecordedProgram, as_large_as
from jls._tools.origin.result import place_in_words
from jls._tools.origin.scalers import scalers_in
from jls._tools.origin.trail import OpResult, RunValue, Trail
from jls._tools.origin.twin import (
    Cotangent,
    Twin,
)
from jls._tools.origin.why import LOWEST_EXPONENT, AnyProgram, Bad, Case, settings
from jls._tools.reading.patience import logging_if_slow
from jls._tools.reading.precision import look_at
from jls._tools.reading.scales import is_switched_off

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
    with settings(), logging_if_slow(_SLOW):
        case = Case("jls.calibrate", step, args, kwargs)
        search = _Search(case, step, (args, kwargs))
        result = search.result()
        result = search.with_losses(result) if losses else result
        seen = search.seen
        return result._replace(precision=seen.precision, half=seen.headline)


_SLOW = (
    "jls.calibrate is compiling and running the step with a record beside each "
    "operation; this takes up to four times as long as to compile it alone."
)


class _Search:
    """One step and one batch, at several loss scales."""

    def __init__(self, case: Case, step: Callable[..., Any], arguments: Any) -> None:
        self.case = case
        self.at = _the_scale(case)
        leaf = np.asarray(case.leaves[self.at])
        self.now = float(np.max(leaf))
        case.leaves[self.at] = jnp.ones_like(leaf)  # a run multiplies it
        self.bounds = _bounds(step, arguments)
        self.roots = case.before_update
        self.on_the_way = behind(self.roots)
        self.narrow, self.following = self._read()
        scale = case.scales[self.at]
        self.is_off = is_switched_off(self.now, scale)
        self.seen = look_at(case.reading, case.main, [] if self.is_off else [scale])

    def result(self) -> Calibration:
        if not self.narrow:
            return self._mended(1.0) or self._no_scale(self._kept_if_half())
        self.twin = Twin(
            self.case.traced.program,
            self.case.main,
            self.roots,
            self.following,
        )
        if not self._is_finite(LOWEST_EXPONENT):
            return self._mended(2.0**LOWEST_EXPONENT) or self._never_finite()
        if not self.following:
            return self._no_scale(self._kept(self._run(1.0, self.twin)))
        ceiling = self._ceiling()
        if ceiling is None:
            kept = self._kept(self._run(1.0, self.twin))
            note = _ALL_ZERO if self._is_zero() else _NO_CEILING
            if self.case.scales[self.at].counters and not self.case.checked:
                note = _NO_UPDATE
            note = _OVERFLOWS if kept.keep is not None else note
            notes = tuple(filter(None, (note, kept.note)))
            return Calibration(self.now, notes=notes, write=kept.write, keep=kept.keep)
        init_scale, note = self._start(ceiling)
        limit, about_limit = self._limit(ceiling)
        trail = self._run(init_scale, self.twin)
        found = self._cotangents(trail, init_scale)
        kept = self._kept(trail)
        shares: dict[Place, float] = {}
        for x in found:
            shares[x.place] = max(x.vanishing, shares.get(x.place, 0.0))
        vanishing = sorted(shares.items(), key=lambda pair: -pair[1])
        notes = [self._about_now(ceiling), note, about_limit, kept.note]
        write = self._line(init_scale) if init_scale != self.now else ""
        if kept.keep is not None:  # the step that comes of it has another scale
            write = kept.write
        return Calibration(
            init_scale=init_scale,
            ceiling=ceiling,
            limited_by=limit,
            vanishing=tuple(pair for pair in vanishing if pair[1]),
            notes=tuple(filter(None, notes)),
            cotangents=tuple(found),
            write=write,
            keep=kept.keep,
        )

    def with_losses(self, result: Calibration) -> Calibration:
        """The result, with the lines that lose precision."""
        main = self.case.main
        if not any(is_half_atom(x) for frame in main.all() for x in frame.makers):
            notes = (*result.notes, *Losses(0.0, ()).notes)
            return result._replace(notes=notes)
        forward = self.case.forward()
        gradients = [
            x
            for checked in self.case.checked
            for role, found in checked.found.items()
            if role != roots.LOSS
            for x in found
            if x in checked.before_update
        ] or [x for x in self.case.results if forward is None or x not in forward]
        losses = [x for c in self.case.checked for x in c.found.get(roots.LOSS, ())]
        others = {
            x: name for x, name in self.case.results.items() if x in (forward or ())
        }
        results = {**dict.fromkeys(losses, "the loss"), **others}
        both = BothWays(self.case.traced.program, main, [*gradients, *results])
        leaves = self._leaves(self._low_scale(result))
        found = find_losses(both, main, leaves, gradients)
        built_up = find_built_up(both, main, leaves, results)
        notes = (*result.notes, *found.notes, *filter(None, [built_up]))
        return result._replace(losses=found.lines, notes=notes)

    def _low_scale(self, result: Calibration) -> float:
        """A loss scale at which no gradient overflows, though each is rounded."""
        largest = max((x.largest for x in result.cotangents), default=0.0)
        if result.ceiling is None or not largest:
            return self.now if result.ceiling is None else result.init_scale
        room = float(np.finfo(np.float16).max) / largest / 4
        return min(result.init_scale, 2.0 ** math.floor(math.log2(room)))

    def _leaves(self, scale: float) -> list[Any]:
        leaves = list(self.case.leaves)
        leaves[self.at] = jnp.asarray(leaves[self.at]) * jnp.float32(scale)
        return leaves

    def _no_scale(self, kept: Kept) -> Calibration:
        notes = tuple(filter(None, (self._why_none(), kept.note)))
        write = "\n".join(filter(None, (self.seen.write, kept.write)))
        return Calibration(1.0, notes=notes, write=write, keep=kept.keep)

    def _line(self, scale: float) -> str:
        """The line that sets the scale."""
        name = self.case.scales[self.at].path[0]
        name = name if name.isidentifier() else "opt_state"
        result = "" if name in self.case.arguments.in_place else f"{name} = "
        return f"{result}jls.set_loss_scale({name}, {format_number(scale)})"

    def _run(self, scale: float, program: AnyProgram | None = None) -> Trail:
        return self.case.run(scale, at=[self.at], program=program)

    def _is_finite(self, exponent: int) -> bool:
        return not self.case.bad_roots(self._run(2.0**exponent))

    def _ceiling(self) -> float | None:
        """The largest power of two that is finite; None if all are."""
        low, high = LOWEST_EXPONENT, _HIGHEST_EXPONENT
        if self._is_finite(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_finite(middle):
                low = middle
            else:
                high = middle
        return 2.0**low

    def _limit(self, ceiling: float) -> tuple[Place | None, str]:
        """The place that overflows first above the ceiling, and what to do."""
        trail = self._run(2 * ceiling)
        values = [x.value for x in self.case.bad_roots(trail)]
        found = self._limit_in(*self.case.closer(trail, values, True), values, ceiling)
        if found is None:  # what was born there is there at the ceiling too
            closer = self.case.closer(trail, values)
            found = self._limit_in(*closer, values, ceiling)
        return found or (None, "")

    def _limit_in(
        self,
        trail: Trail,
        program: AnyProgram,
        values: list[RunValue],
        ceiling: float,
    ) -> tuple[Place, str] | None:
        below = self._run(ceiling, program)
        for birth in trail.births(values):
            op = birth.origin
            if isinstance(op, OpResult):
                atom = op.site.equation.outvars[op.result]
                value = RunValue(op.frame, atom, op.iterations)
                if not below.is_bad(value):
                    found = self.case.explain(trail, [Bad(value, "", 0, None)], None)
                    (first, *_) = found.births
                    limit = first.place
                    # The loss scale itself, cast to the dtype of the loss by jls.
                    is_scale = first.operands == (2 * ceiling,)
                    if is_scale and limit.operation == _CAST and atom.aval.shape == ():
                        return limit._replace(file="", line=0, function=""), _OF_LOSS
                    return limit, ""
        return None

    def _start(self, ceiling: float) -> tuple[float, str]:
        """The scale to start with, and a note about the scaler's bounds."""
        half = ceiling / 2
        if self.bounds is None:
            return half, ""
        low, high = self.bounds
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

    def _about_now(self, ceiling: float) -> str:
        if self.is_off:
            return (
                "jls.skip_nonfinite does not scale the loss, and a scale that is set "
                "there never comes down. In float16 use jls.loss_scaled"
            )
        if self.now <= ceiling:
            return ""
        if math.isinf(self.now):  # of a state that is kept in float16
            return "The scale is inf now"
        return (
            f"The scale is {scale_in_words(self.now)} now, "
            f"{scale_in_words(self.now / ceiling)} times too high for this batch"
        )

    # What follows the scale, and what float16 loses of it.

    def _read(self) -> tuple[list[Variable], list[Variable]]:
        """The results in narrow dtypes that depend on the scale, and follow it.

        Those that follow it double with it. In the order of the program.
        """
        narrow, frames = self.case.reading.flow.narrow, self.case.main.by_site()
        depend, follow = [], []
        for indices in sorted(narrow):
            *around, index, result = indices
            value, frame = narrow[indices], frames[tuple(around)]
            equation = frame.jaxpr.eqns[index]
            variable = frame, equation.outvars[result]
            is_new = as_large_as(equation, result) is None
            if is_new and variable in self.on_the_way and value.depends >> self.at & 1:
                depend.append(variable)
                if _follows(value):
                    follow.append(variable)
        return depend, follow

    def _is_zero(self) -> bool:
        """Whether all that follows the scale is 0, in float32 too."""
        records = self._run(1.0, self.twin).records
        return not any(self.twin.largest(records, x) for x in self.following)

    def _cotangents(self, trail: Trail, scale: float) -> list[Cotangent]:
        """The float16 values that are proportional to the loss scale.

        Args:
          trail: of a run of the twin at `scale`.
          scale: a loss scale.
        """
        records = trail.records
        found = (self.twin.cotangent(records, x, scale) for x in self.following)
        return [x for x in found if x is not None]

    # What has to stay float32.

    @functools.cached_property
    def _forward(self) -> Forward:
        traced, main = self.case.traced, self.case.main
        return Forward(traced.program, main, self.case.forward())

    def _kept(self, trail: Trail) -> Kept:
        """What has to stay float32, of a step in float16; `trail` is of its twin."""
        return self._forward.kept(trail, self._forward.touches())

    def _kept_if_half(self) -> Kept:
        """The same of a step without float16."""
        touches = self._forward.touches()
        if not touches:
            return Kept()
        program, main = self.case.traced.program, self.case.main
        recorded = RecordedProgram(program, main, variables_of(touches))
        return self._forward.kept(self._run(1.0, recorded), touches)

    # When there is no answer.

    def _why_none(self) -> str:
        atoms = (x for frame in self.case.main.all() for x in frame.makers)
        if any(map(is_narrow_atom, atoms)):
            return (
                "No loss scale is needed, or the loss is not scaled: the step has "
                "float16 in it, but none of it follows the loss scale. jls.check_step "
                "says which"
            )
        if self.seen.headline:
            return "In float32 and bfloat16 no gradient vanishes"
        note = (
            "No loss scale is needed: all that follows it is float32 or bfloat16, in "
            "which no gradient vanishes"
        )
        skips = "jls.skip_nonfinite skips bad steps without one"
        return note if self.is_off else f"{note}. {skips}"

    def _mended(self, scale: float) -> Calibration | None:
        """The result for an autocast that makes inf or NaN at any loss scale.

        Args:
          scale: a low one.

        Returns:
          None if the step is finite, or no `keep` makes it so.
        """
        forward, widths = self._forward, self.case.widths
        if not widths.units:
            return None
        if not self.narrow:
            at_roots = self.case.program(at_roots=True)
            if not self.case.bad_roots(self._run(scale, at_roots)):
                return None
        trail, kept = self._run(scale), Kept()
        if self.narrow:
            kept = self._kept(self._run(scale, self.twin))
        units = widths.least(self._leaves(scale), kept.units)
        if not units:
            return None
        keep = forward.keep_of(units, widths.units)
        found = self.case.explain(trail, self.case.bad_roots(trail), None)
        notes = [kept.note or (AGAIN if self.narrow else "")]
        infs = [x for x in found.births if x.kind == "inf"]
        for birth in [*infs, *found.births][:1]:
            makes = "overflows" if infs else "makes NaN"
            here = place_in_words(birth.place)
            notes = [f"In half this line {makes}: {here}", *notes]
        return Calibration(
            self.now,
            notes=(_NEEDS_KEEP, *filter(None, notes)),
            write=argument(keep),
            keep=keep,
        )

    def _never_finite(self) -> NoReturn:
        trail = self._run(2.0**LOWEST_EXPONENT)
        found = self.case.explain(trail, self.case.bad_roots(trail), None)
        lowest = scale_in_words(2.0**LOWEST_EXPONENT)
        text = str(found).removeprefix("jls.why: ")
        raise ValueError(
            "step must be finite at some loss scale, got one that is not at any down "
            f"to {lowest}, so no scale mends it. {text}\n\n"
            "More: print(jls.why(step, ...)) with the same arguments."
        )


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
    # What is 0 as written may not be in float32: a quotient by a number over 65504.
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
