# SPDX-License-Identifier: Apache-2.0
"""`jls.compare`: the first operation at which two programs give different numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from jls import _validate
from jls._program.places import Place
from jls._text import describe, listed, quantity
from jls._tools.compare.difference import Difference, Parting, percent
from jls._tools.compare.fingerprint import (
    ARGUMENT,
    CLOSED_OVER,
    IN_FLOAT32,
    RESULT,
    WRITTEN,
    Fingerprint,
    Value,
    fingerprint_of,
)
from jls._tools.compare.pairs import FACTOR, UNIT, Point, find, named
from jls._tools.compare.sketch import apart
from jls._tools.origin.result import place_in_words
from jls._tools.reading.arguments import check_takes


def compare(
    a: Callable[..., Any] | Fingerprint,
    b: Callable[..., Any] | Fingerprint,
    /,
    *args: Any,
    **kwargs: Any,
) -> Difference:
    """Says at which operation two programs of the same arguments part.

    For two versions of a step that should give the same: before and after a change, a
    layer and its conversion, a trainer and a sampler. Both are traced, and run one
    operation at a time. Operations are paired by scope, operation, shape and line, and
    by what they give. The results that differ are followed back, to the first operation
    whose operands agree and whose result does not. What rounding explains is no
    difference: 8 units of the dtype, and 8 times what changes if the arguments change
    in the last bit.

    If one of them is in half precision, as by `jls.autocast`, both are compared in
    float32 throughout: what is left is no matter of rounding. If nothing is, the text
    says how much the rounding costs.

    `compare(step, step, ...)` runs one program twice, and looks for the first operation
    that gives other bits: one that is not deterministic.

    Args:
      a: a loss, a gradient, or a whole step, jitted or not: of plain pytrees, Linen,
        NNX, Equinox or Haiku. Or a `jls.types.Fingerprint` of one, as `jls.fingerprint`
        makes it on another machine. One that is compiled ahead of time is compared by
        its results.
      b: the other one.
      *args: the arguments of those that are functions. Nothing of yours is changed or
        donated. In a run of several processes, process-local arrays.
      **kwargs: their keyword arguments.

    Returns:
      A `jls.types.Difference`. `birth` is None, or has the `jls.types.Place` of the
      operation in each program, the error of its result, the operands that only one of
      them gives it, and the first iteration of a loop in which they part. `only_a` and
      `only_b` have what only one of them computes on the way there, what comes right
      before it first. `results` has the error of each result by its path, and `equal`
      says whether all that both have are of one shape, and within rounding. `str()` is
      for people.

    Raises:
      TypeError: if `a` or `b` is neither a function nor a fingerprint, or if there are
        arguments and both are fingerprints.
      ValueError: if they have no result of one name and shape in common, or arguments
        of one name and other shapes; if an array was donated to an earlier call, or is
        spread over several processes.
      Exception: what a function itself raises.

    Example:
      >>> def mean(x):
      ...     return jnp.sum(x) / x.size
      >>> def unbiased(x):
      ...     return jnp.sum(x) / (x.size - 1)
      >>> found = jls.compare(mean, unbiased, jnp.arange(4.0))
      >>> found.birth.a.operation, found.birth.a.function, found.birth.b.function
      ('div', 'mean', 'unbiased')
      >>> jls.compare(jnp.mean, mean, jnp.arange(4.0)).equal
      True
    """
    for name, given in (("a", a), ("b", b)):
        if not (callable(given) or isinstance(given, Fingerprint)):
            write = "jls.compare(a, b, *args), with two functions of the same args"
            if isinstance(given, str) and given.endswith(".npz"):
                write = f"jls.types.Fingerprint.load({given!r})"
            if type(given).__name__ == "NpzFile":
                write = "jls.types.Fingerprint.load(path)"
            raise TypeError(
                f"{name} must be a function or a jls.types.Fingerprint, got "
                f"{describe(given)}. Write {write}."
            )
    for name, given in (("a", a), ("b", b)):
        if callable(given) and not isinstance(given, jax.stages.Compiled):
            _validate.function(name, given)
            check_takes("jls.compare", given, args, kwargs, written="a, b")
    are_made = isinstance(a, Fingerprint) and isinstance(b, Fingerprint)
    if are_made and (args or kwargs):
        raise TypeError(
            "args are those of functions, and a and b are fingerprints, which have "
            "been made of theirs. Write jls.compare(a, b)."
        )
    is_same = a is b and not are_made
    runs = (WRITTEN,) if is_same else ()
    # Of one program both are traced: what NumPy draws is another number in each.
    first, second = (
        given
        if isinstance(given, Fingerprint)
        else fingerprint_of("jls.compare", name, given, args, kwargs, runs)
        for name, given in (("a", a), ("b", b))
    )
    return _difference(first, second, is_same)


def _difference(a: Fingerprint, b: Fingerprint, is_same: bool = False) -> Difference:
    pair = named(a.values, b.values, RESULT)
    results = _results(a, b, pair)
    notes = [f"{x.note[0].upper()}{x.note[1:]}" for x in (a, b) if x.note]
    is_half = any(IN_FLOAT32 in x.runs for x in (a, b))
    in_float32 = is_half and not is_same and not notes
    notes = [*_not_compared(a, b, pair), *notes]
    found = find(a, b, in_float32, is_same)
    dtypes = {x.made_by["dtype"] for x in (a, b)}
    if in_float32 and len(dtypes) == 1 and all(dtypes) and not found.differs:
        found = find(a, b)
    is_equal = not (found.differs or _in_other_shapes(a, b, RESULT))
    birth = found.birth
    if is_equal and is_half and max(results.values()) > FACTOR * UNIT:
        notes += _rounding(a, b, results)
    if is_same and birth and a.values[birth.a].place.operation == ARGUMENT:
        notes.append("Each trace of the function makes it anew, as np.random does")
    if found.loop and not is_equal:
        i, times = found.loop
        of_a, of_b = (quantity(x, "time") for x in times)
        place = place_in_words(a.values[i].place)
        notes.append(f"A loop runs {of_a} in a, and {of_b} in b: {place}")
    if birth and a.values[birth.a].place.module.startswith(CLOSED_OVER):
        notes += _first_taken(a, birth.a)
    if found.flipped and is_equal and found.is_bad:
        place = a.values[found.flipped[0]].place
        notes.append(f"A choice falls otherwise by rounding: {place_in_words(place)}")
    if found.is_moved:
        notes.append("The operations agree: their results are in other places")
    return Difference(
        birth=None if is_equal or birth is None else _parting(a, b, birth),
        only_a=tuple(a.values[i].place for i in found.only_a) * (not is_equal),
        only_b=tuple(b.values[i].place for i in found.only_b) * (not is_equal),
        results=results,
        equal=is_equal,
        notes=tuple(notes),
        errors=tuple(
            (a.values[i].place, error)
            for i, error in sorted(found.errors.items())
            if a.values[i].is_operation
        ),
    )


def _results(
    a: Fingerprint, b: Fingerprint, pair: dict[int, list[int]]
) -> dict[str, float]:
    """The error of each result that both have, as they are written.

    Raises:
      ValueError: if there is none, or if they have other arguments.
    """
    if others := _in_other_shapes(a, b, ARGUMENT):
        value, other = others[0]
        raise ValueError(
            f"a and b must be given the same arguments, got {value.place.module} of "
            f"shape {list(value.shape)} for a and {list(other.shape)} for b."
        )
    if not pair:
        every = [listed(list(map(_with_shape, _of_kind(y, RESULT)))) for y in (a, b)]
        raise ValueError(
            "a and b must have a result of one name and shape in common, got "
            f"{every[0] or 'none'} of a and {every[1] or 'none'} of b."
        )
    runs = a.runs[WRITTEN], b.runs[WRITTEN]
    return {
        a.values[i].place.module: float(apart(runs[0][i], runs[1][j]))
        for i, (j, *_) in pair.items()
    }


def _not_compared(
    a: Fingerprint, b: Fingerprint, pair: dict[int, list[int]]
) -> list[str]:
    """What is said of results that only one has, by name or by shape."""
    sides = list[str]()
    paired = {*pair}, {*itertools.chain(*pair.values())}
    for name, values, known in zip("ab", (a.values, b.values), paired, strict=True):
        results = (i for i, x in enumerate(values) if x.place.operation == RESULT)
        alone = [_with_shape(values[i]) for i in results if i not in known]
        if alone:
            sides.append(f"{listed(alone, 1)} of {name}")
    return [f"Not compared: {'; '.join(sides)}"] if sides else []


def _in_other_shapes(
    a: Fingerprint, b: Fingerprint, kind: str
) -> list[tuple[Value, Value]]:
    """The arguments, or the results, of one name and two shapes."""
    others = {x.place.module: x for x in _of_kind(b, kind)}
    pairs = [(x, others.get(x.place.module, x)) for x in _of_kind(a, kind)]
    return [(x, y) for x, y in pairs if x.shape != y.shape]


def _of_kind(made: Fingerprint, kind: str) -> list[Value]:
    return [x for x in made.values if x.place.operation == kind]


def _with_shape(value: Value) -> str:
    return f"{value.place.module}{list(value.shape)}"


def _parting(a: Fingerprint, b: Fingerprint, at: Point) -> Parting:
    first, second = a.values[at.a], b.values[at.b]
    places = _place(a, first, at.iteration), _place(b, second, at.iteration)
    codes = first.code, second.code
    operands = (
        tuple(made.values[i].place for i in others)
        for made, others in ((a, at.only_a), (b, at.only_b))
    )
    errors = at.error, at.inputs_error
    return Parting(*places, first.dtype, *errors, codes, *operands)


def _first_taken(made: Fingerprint, number: int) -> list[str]:
    """The first operation that takes a value."""
    for value in made.values:
        if value.is_operation and number in [x.number for x in value.feeds]:
            place = value.place
            return [f"First {place.operation} takes it, {place_in_words(place)}"]
    return []


def _place(made: Fingerprint, value: Value, at: tuple[int, ...]) -> Place:
    """Where a value is, with the iteration as the program counts it."""
    pairs = zip(value.loops, at, strict=True)
    iteration = tuple(made.loops[loop].iterations[i] for loop, i in pairs)
    return value.place._replace(iteration=iteration)


def _rounding(a: Fingerprint, b: Fingerprint, results: dict[str, float]) -> list[str]:
    """What rounding costs where one of two programs is in half precision."""
    made = a if IN_FLOAT32 in a.runs else b
    pairs = zip(made.runs[WRITTEN], made.runs[IN_FLOAT32], strict=True)
    errors = [float(apart(x, y).max(initial=0.0)) for x, y in pairs]
    every = enumerate(made.values)
    floats = [i for i, x in every if x.unit and x.is_operation and x.place.line]

    def added(i: int) -> float:
        feeds = made.values[i].feeds
        return errors[i] - max((errors[x.number] for x in feeds), default=0)

    worst = max(results.values())
    notes = [f"The results differ by up to {percent(worst)}, which rounding explains"]
    if floats:
        place = made.values[max(floats, key=added)].place
        notes.append(
            f"Most of it comes in at {place.operation}, {place_in_words(place)}. "
            "jls.calibrate tries which keep it is worth"
        )
    known = {place[:3] for x in (a, b) if x is not made for place in x.rounded}
    for place in [x for x in made.rounded if x[:3] not in known][:1]:
        notes.append(f"Rounds to {made.made_by['dtype']} here: {place_in_words(place)}")
    return notes
