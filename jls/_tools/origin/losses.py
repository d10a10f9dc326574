# SPDX-License-Identifier: Apache-2.0
"""Which operations of a step in half precision lose most of it.

The program is run in half and in float32 beside each other. Of each result it is
recorded how far the two are apart, over all of its elements, and how large it is in
float32: the quotient is its error. An operation whose error is many times that of its
operands loses precision there, such as the difference of two numbers that are nearly
equal. Whether it matters is tried: with its result as in float32, how much of the
error of the gradients is gone?
"""

import math
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._program.alone import BOTH, Pair
from jls._program.control import Indices, Site
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import is_half_atom, is_inexact_atom, is_literal, variables_in
from jls._program.places import Place, is_recomputed, is_transposed, place_of
from jls._program.primitives import primitive_of
from jls._program.recorder import Recorder
from jls._program.records import Records, key_of
from jls._program.replay import Watched
from jls._tools.origin.record import as_large_as
from jls._tools.origin.result import place_in_words

MOST = 10  # lines that are named; each is tried in a run of its own
# Times the error of the operands, or that of one rounding: sums and products of what
# has been rounded a few times stay far below.
_MIN_FACTOR = 8.0
_MIN_GAIN = 0.1  # of the gradients' error
MIN_OFF = 0.1  # what is nearer to float32 is as half precision is
# Float32 loses at the same places, and so much less as its unit is smaller. A number of
# which it knows no digit, such as the gradient of a bias before a norm, is rounding.
_UNIT_OF_FLOAT32 = 2.0**-24
_KNOWN = 1 / 16


class PrecisionLoss(NamedTuple):
    """A line that loses precision, in half precision, for one batch.

    Errors are relative to the same program in float32: the sum of the magnitudes of all
    differences, over that of all numbers.

    Example:
      >>> jls.types.PrecisionLoss._fields
      ('place', 'factor', 'error', 'gain')
    """

    place: Place
    factor: float  # the error of its result, over the largest one of its operands
    error: float  # of its result
    gain: float  # the share of the gradients' error that is gone if it loses nothing


class Losses(NamedTuple):
    """The findings of one step and batch."""

    error: float = 0.0  # of the gradients, all together
    lines: tuple[PrecisionLoss, ...] = ()  # by the factor, the largest first
    built_up: str = ""  # a sentence on a result whose error builds up in a loop

    @property
    def note(self) -> str:
        """A sentence on the gradients of this batch."""
        if not math.isfinite(self.error):
            return (
                "In half precision the gradients of this batch are not finite, so no "
                "line that loses precision was looked for"
            )
        if not self.error:
            return "No precision is lost: the gradients are those of float32"
        size = f"{self.error:.2%}"
        if self.error >= 1:
            size = f"{self.error:.1f} times their size"
        text = f"The gradients are {size} off those of float32"
        if not self.lines:
            return f"{text}, and no line of the step stands out"
        gains = ", ".join(f"{x.gain:.0%}" for x in self.lines)
        lines = "each of the lines below" if len(self.lines) > 1 else "the line below"
        return f"{text}. With {lines} as in float32, {gains} of that is gone"


def both_ways(
    main: Frame, roots: Iterable[Variable], options: Mapping[str, Any] | None = None
) -> Recorder:
    """A program in half precision, and in float32 beside it.

    A run chooses operations whose results are as in float32, rounded once.

    Args:
      main: the frame of a program.
      roots: the variables to follow back.
      options: of XLA, for which the user's function asks.
    """
    places = main.makers_of(behind(roots))

    def watch(site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Watched:
        del inputs
        is_new = site.indices in places and any(
            as_large_as(site.equation, i) is None for i in range(len(results))
        )
        pairs = [x for x in results if isinstance(x, Pair)]
        if not is_new or all(x.narrow is x.wide for x in pairs):
            return Watched(results)
        is_exact = recorder.is_chosen(site.indices)
        held, sizes = [], []
        for x in results:
            size = jnp.zeros(2, jnp.float32)
            if isinstance(x, Pair):
                narrow, size = _measured(is_exact, *x)
                x = Pair(narrow, x.wide)
            held.append(x)
            sizes.append(size)
        # As in `RecordedProgram`, but after each: there are twice the operations.
        held = jax.lax.optimization_barrier(held)
        keys = key_of(jnp.concatenate(sizes))
        return Watched(held, jnp.stack([keys, keys], -1))

    recorder = Recorder(main, places, watch, BOTH, options, _OPTIONS, places)
    return recorder


# XLA would leave out roundings between operations that it fuses, and with them what the
# next platform does not leave out.
# With optimizations a compile takes three times as long, for a run of milliseconds.
_OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


# Compiled apart, so that JAX traces it once for all arrays of one shape and dtype.
@jax.jit
def _measured(is_exact: Array, narrow: Array, wide: Array) -> tuple[Array, Array]:
    """A value in half, or as in float32, and its distance from that and its size."""
    narrow = jnp.where(is_exact, wide.astype(narrow.dtype), narrow)
    other = narrow.astype(wide.dtype)
    apart = jnp.where(other == wide, 0, jnp.abs(other - wide))  # of inf and inf too
    size = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    sums = [jnp.sum(x.astype(jnp.float32)) for x in (apart, size)]
    return narrow, jnp.stack(sums)


# The distances of a value from float32, added up, and its size there: `f32[2, ...]`,
# an axis for each loop around it, outermost first, of length 1 where the iterations are
# not kept apart.
Sizes = np.ndarray


def error_of(sizes: Sizes) -> np.ndarray:
    """The distance over the size; NaN where all numbers are 0."""
    apart, size = sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(size > 0, apart / size, np.nan)


class RelativeErrors:
    """The errors of all values in one run."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._known: dict[Variable, Sizes] = {}

    def of(self, frame: Frame, atom: Any) -> Sizes:
        """The sizes of a value in each iteration of the loops around it."""
        if is_literal(atom) or not is_inexact_atom(atom):
            return _exact(frame)
        if (frame, atom) not in self._known:
            self._known[frame, atom] = _exact(frame)  # a carry that nothing changes
            self._known[frame, atom] = self._find(frame, atom)
        return self._known[frame, atom]

    def recorded(self, frame: Frame, index: int) -> list[Sizes] | None:
        """The errors of each result of an operation; None if it has no record."""
        every = self._records.numbers(frame.indices_of(index))
        if not every:
            return None
        numbers = every[0][..., 0]
        for axis, loop in enumerate(frame.loops()):
            if loop.kind == "while":
                numbers = np.expand_dims(numbers, axis)
        pairs = numbers.reshape(*numbers.shape[:-1], -1, 2)
        return list(np.moveaxis(pairs, (-2, -1), (0, 1)))

    def _find(self, frame: Frame, atom: Any) -> Sizes:
        way, sources, _ = frame.link(atom)
        if way == "operation":
            index, result = frame.makers[atom]
            recorded = self.recorded(frame, index)
            if recorded is not None:
                return recorded[result]
            same = as_large_as(frame.jaxpr.eqns[index], result)
            return _exact(frame) if same is None else self.of(frame, same)
        if not sources:
            return _exact(frame)
        if way in ("call", "branch"):
            return np.add.reduce([self.of(*x) for x in sources])
        first = self.of(*sources[0])
        if way == "stack":
            return first.sum(-1)
        if way == "last":
            return first[..., 0 if sources[0][0].is_reversed else -1]
        if way != "carry":
            return first[..., None]
        after = self.of(*sources[1])
        if frame.kind == "while":
            return after
        return _one_later(first[..., None], after, frame.is_reversed)


def _one_later(first: Sizes, after: Sizes, is_reversed: bool) -> Sizes:
    """What each iteration is given, from what it makes."""
    shape = np.broadcast_shapes(first.shape[:-1], after.shape[:-1])
    first, after = (np.broadcast_to(x, (*shape, x.shape[-1])) for x in (first, after))
    if is_reversed:
        return np.concatenate([after[..., 1:], first], axis=-1)
    return np.concatenate([first, after[..., :-1]], axis=-1)


def _exact(frame: Frame) -> Sizes:
    shape = (1,) * len(frame.loops())
    return np.stack([np.zeros(shape), np.ones(shape)])


class _Growth(NamedTuple):
    """How much an operation adds to the error of its operands."""

    frame: Frame
    position: int
    factor: float
    error: float

    @property
    def site(self) -> Site:
        return self.frame.site_of(self.position)

    def error_in(self, errors: RelativeErrors) -> float:
        """The error of its results in another run."""
        every = errors.recorded(self.frame, self.position) or []
        found = (float(np.nan_to_num(error_of(x)).max()) for x in every)
        return max(found, default=0.0)

    @property
    def readers(self) -> list[Site]:
        """The operations beside it that read its results."""
        equations = self.frame.jaxpr.eqns
        results = equations[self.position].outvars
        return [
            self.frame.site_of(index)
            for index, equation in enumerate(equations)
            if not self.frame.called(index)
            and not set(results).isdisjoint(variables_in(equation.invars))
        ]


def find_losses(
    both: Recorder,
    main: Frame,
    inputs: Sequence[Any],
    gradients: Sequence[Variable],
    results: Mapping[Variable, str],
) -> Losses:
    """Where a step loses precision.

    Args:
      both: its program, both ways.
      main: its frame.
      inputs: of one call.
      gradients: what the error of a line is judged by.
      results: of the forward pass, with their names: their error may build up.
    """
    errors = RelativeErrors(both(inputs))

    def exact(places: Collection[Indices]) -> RelativeErrors:
        return RelativeErrors(both(inputs, places))

    error = _of_all(errors, gradients)
    lines = _lines(errors, exact, main, gradients, error)
    return Losses(error, tuple(lines), _built_up(errors, exact, main, results))


# The errors of a run in which these operations are as in float32.
Exact = Callable[[Collection[Indices]], RelativeErrors]


def _lines(
    errors: RelativeErrors,
    exact: Exact,
    main: Frame,
    gradients: Sequence[Variable],
    error: float,
) -> Iterator[PrecisionLoss]:
    """The lines that lose precision which the gradients miss; `error` is of these."""
    units = [_unit(x) for frame in main.all() for x in frame.makers if is_half_atom(x)]
    if not units or not _MIN_FACTOR * min(units) / 2 < error < math.inf:
        return
    growths: dict[Place, list[_Growth]] = {}
    for growth in _growths(errors, main, min(units)):
        growths.setdefault(_line_of(growth.site), []).append(growth)
    largest = {at: max(every, key=lambda x: x.factor) for at, every in growths.items()}
    order = sorted(largest, key=lambda at: -largest[at].factor)
    for at in order[:MOST]:
        # An operation that a backward pass computes again has another place.
        there = [
            growth
            for other, every in growths.items()
            if other._replace(is_backward=at.is_backward) == at
            for growth in every
        ]
        one = largest[at]
        left = exact({growth.site.indices for growth in there})
        if one.error_in(left) > one.error / 2:  # half has no numbers that are so small
            left = exact({x.indices for growth in there for x in growth.readers})
        gain = 1 - _of_all(left, gradients) / error
        if gain >= _MIN_GAIN:
            yield PrecisionLoss(at, one.factor, one.error, gain)


def _built_up(
    errors: RelativeErrors,
    exact: Exact,
    main: Frame,
    results: Mapping[Variable, str],
) -> str:
    """A sentence on a result whose error builds up in a loop; "" if there is none.

    From iteration to iteration it grows a little, so that no line stands out.
    """
    loops = [x for x in main.all() if x.is_loop and not is_transposed(x.site)]
    for variable, name in results.items():
        error = _of_all(errors, [variable])
        if not MIN_OFF <= error < math.inf:
            continue
        found = behind([variable])
        for loop in loops:
            if not _builds_up(errors, loop, found):
                continue
            inside = {frame.indices_of(index) for frame, index in loop.operations()}
            if _of_all(exact(inside), [variable]) < error / 2:
                place = place_of(loop.site)._replace(module="")
                off = f"{error:.1f} times its size" if error >= 1 else f"{error:.0%}"
                return (
                    f"In half precision {name} is {off} off that of float32: "
                    f"the error builds up in the loop at {place_in_words(place)}"
                )
    return ""


def _builds_up(
    errors: RelativeErrors, loop: Frame, wanted: Container[Variable]
) -> bool:
    """Whether the error of what a loop carries grows with its iterations."""
    assert loop.parent is not None
    for i, atom in enumerate(loop.jaxpr.outvars[: loop.call.carried]):
        if (loop, atom) not in wanted:
            continue
        every = error_of(errors.of(loop, atom))
        before = error_of(errors.of(loop.parent, loop.given(loop.call.consts + i)))
        if loop.kind != "while":  # its iterations are known
            before = every[..., -1 if loop.is_reversed else 0]
        before = np.nanmax(np.fmax(before, _HALF_A_UNIT))
        last = np.nanmax(np.nan_to_num(every, nan=0.0))
        if last >= max(MIN_OFF, _MIN_FACTOR * before):
            return True
    return False


_HALF_A_UNIT = 2.0**-12  # of float16


def _of_all(errors: RelativeErrors, variables: Iterable[Variable]) -> float:
    """The error of several values together."""
    every = [errors.of(frame, atom).reshape(2, -1).sum(-1) for frame, atom in variables]
    apart, size = np.sum(every, axis=0, dtype=float).tolist()
    return apart / size if size else 0.0


def _line_of(site: Site) -> Place:
    place = place_of(site)
    return place._replace(is_backward=False) if is_recomputed(site) else place


def _unit(atom: Any) -> float:
    """The largest relative error of one rounding to the dtype of a value."""
    return float(jnp.finfo(getattr(atom, "aval", atom).dtype).eps) / 2


def _growths(errors: RelativeErrors, main: Frame, unit: float) -> Iterator[_Growth]:
    """The operations whose results have many times the error of their operands."""
    for frame, index in main.operations():
        equation = frame.jaxpr.eqns[index]
        if primitive_of(equation).moves:
            continue
        recorded = errors.recorded(frame, index)
        if recorded is None:
            continue
        atoms = [*equation.invars, *equation.outvars]
        least = max((_unit(x) for x in atoms if is_half_atom(x)), default=unit)
        sizes = [errors.of(frame, x) for x in equation.invars]
        if (start := _accumulated(frame, index)) is not None:
            begins, _ = frame.sources(_behind_casts(frame, equation.invars[start]))
            sizes[start] = errors.of(*begins)[..., None]
        before = np.fmax.reduce(np.broadcast_arrays(least, *map(error_of, sizes)))
        for found in recorded:
            errors_here = error_of(found)
            factors = errors_here / before
            is_known = errors_here * _UNIT_OF_FLOAT32 / least < _KNOWN
            factors = np.where(is_known & np.isfinite(factors), factors, 0.0)
            i = int(np.argmax(factors))
            factor = float(factors.flat[i])
            if factor >= _MIN_FACTOR:
                error = float(np.broadcast_to(errors_here, factors.shape).flat[i])
                yield _Growth(frame, index, factor, error)


def _accumulated(frame: Frame, index: int) -> int | None:
    """The operand that a loop adds up, and does nothing else with; None if none is.

    The error of a sum grows from iteration to iteration, so it is compared with that of
    what is added, and with that of the number that the loop starts with.
    """
    equation = frame.jaxpr.eqns[index]
    if not frame.is_loop or primitive_of(equation).degree != "sum":
        return None
    carry = frame.jaxpr.invars[frame.call.consts :]
    carried = frame.jaxpr.outvars[: frame.call.carried]
    for given, made in zip(carry, carried, strict=False):
        if is_literal(made) or _behind_casts(frame, made) is not equation.outvars[0]:
            continue
        for operand, atom in enumerate(equation.invars):
            users = [e for e in frame.jaxpr.eqns if given in variables_in(e.invars)]
            if (
                not is_literal(atom)
                and _behind_casts(frame, atom) is given
                and len(users) == 1
            ):
                return operand
    return None


def _behind_casts(frame: Frame, atom: Any) -> Any:
    """The variable that is moved or cast to `atom`."""
    while atom in frame.makers:
        equation = frame.jaxpr.eqns[frame.makers[atom].position]
        is_cast = equation.primitive.name == "convert_element_type"
        if not is_cast and primitive_of(equation).moves not in ("all", "same"):
            return atom
        if len(equation.invars) != 1 or is_literal(equation.invars[0]):
            return atom
        atom = equation.invars[0]
    return atom
