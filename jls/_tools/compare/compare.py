# SPDX-License-Identifier: Apache-2.0
"""`jls.compare`: the first operation at which two programs give different numbers."""

from collections.abc import Callable
from typing import Any

import jax

from jls import _validate
from jls._program.places import Place
from jls._text import describe, listed
from jls._tools.compare.difference import Difference, Parting, percent
from jls._tools.compare.fingerprint import (
    IN_FLOAT32,
    NUDGED,
    NUDGED_IN_FLOAT32,
    WRITTEN,
    Fingerprint,
    Operation,
    program_of,
)
from jls._tools.compare.pairs import FACTOR, UNIT, Found, find, same_names
from jls._tools.compare.sketch import FIRST, apart
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
    operation at a time. Operations are paired by scope, operation, shape and line, then
    in order, then by what they give. The results that differ are followed back, to the
    first operation whose operands agree and whose result does not. What rounding
    explains is no difference: 8 units of the dtype, and 8 times what changes if the
    arguments change in the last bit.

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
      operation in each program and the error of its result, with the first iteration of
      a loop in which they part; `only_a` and `only_b` have what only one of them
      computes, on the way to a result that differs. `results` has the error of each
      result by its path, and `equal` says whether all are within rounding. `str()` is
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
        if callable(given) and not isinstance(given, jax.stages.Compiled):
            _validate.function(name, given)
            check_takes("jls.compare", given, args, kwargs, written="a, b")
    are_made = isinstance(a, Fingerprint) and isinstance(b, Fingerprint)
    if are_made and (args or kwargs):
        raise TypeError(
            "args are those of functions, and a and b are fingerprints, which have "
            "been made of theirs. Write jls.compare(a, b)."
        )
    if a is b and not are_made:
        # Each is traced: what NumPy draws meanwhile is another number in each program.
        first, second = (
            program_of("jls.compare", "a", a, args, kwargs).fingerprint([WRITTEN])
            for _ in range(2)
        )
        return _difference(first, second, is_same=True)
    first, second = (
        given
        if isinstance(given, Fingerprint)
        else program_of("jls.compare", name, given, args, kwargs).fingerprint()
        for name, given in (("a", a), ("b", b))
    )
    return _difference(first, second)


def _difference(a: Fingerprint, b: Fingerprint, is_same: bool = False) -> Difference:
    _check(a, b)
    written = find(a, b, (WRITTEN, WRITTEN), (IN_FLOAT32, IN_FLOAT32), is_same)
    runs = [IN_FLOAT32 if IN_FLOAT32 in x.runs else WRITTEN for x in (a, b)]
    found, notes = (
        written,
        [f"{x.note[0].upper()}{x.note[1:]}" for x in (a, b) if x.note],
    )
    if not is_same and not notes:
        nudged = [NUDGED_IN_FLOAT32 if x else NUDGED for x in runs]
        found = find(a, b, (runs[0], runs[1]), (nudged[0], nudged[1]))
        dtype = a.made_by["dtype"]
        if dtype and dtype == b.made_by["dtype"] and not _differs(found):
            found = written
    is_equal = not _differs(found)
    results = {a.results[i].name: error for i, _, error in written.results}
    is_rounded = max(results.values()) > FACTOR * UNIT
    if is_equal and any(runs) and not is_same and is_rounded:
        notes += _rounding(a, b, results)
    if is_same and found.argument:
        notes.append("Each trace of the function makes it anew, as np.random does")
    if found.flipped and is_equal and found.bad:
        place = a.operations[found.flipped[0]].place
        notes.append(f"A choice falls otherwise by rounding: {place_in_words(place)}")
    return Difference(
        birth=_birth(a, b, found),
        only_a=tuple(a.operations[i].place for i in found.only_a) * (not is_equal),
        only_b=tuple(b.operations[i].place for i in found.only_b) * (not is_equal),
        results=results,
        equal=is_equal,
        notes=tuple(notes),
        errors=tuple((a.operations[i].place, x) for i, x in found.errors.items()),
    )


def _differs(found: Found) -> bool:
    """Whether something but rounding is to blame."""
    is_to_blame = found.birth or found.argument or _is_apart(found)
    return bool((found.bad or found.is_same) and is_to_blame)


def _is_apart(found: Found) -> bool:
    is_unknown = found.bad and not found.errors
    return bool(found.only_a or found.only_b or is_unknown)


def _check(a: Fingerprint, b: Fingerprint) -> None:
    """Raises if there is nothing to compare."""
    shapes = {x.name: x.shape for x in b.arguments}
    for name, shape, *_ in a.arguments:
        if shapes.get(name, shape) != shape:
            raise ValueError(
                f"a and b must be given the same arguments, got {name} of shape "
                f"{list(shape)} for a and {list(shapes[name])} for b."
            )
    if not same_names(a.results, b.results):
        found = [
            listed([f"{x.name}{list(x.shape)}" for x in y.results]) for y in (a, b)
        ]
        raise ValueError(
            "a and b must have a result of one name and shape in common, got "
            f"{found[0] or 'none'} of a and {found[1] or 'none'} of b."
        )


def _birth(a: Fingerprint, b: Fingerprint, found: Found) -> Parting | None:
    if not _differs(found):
        return None
    if found.argument:
        index, error = found.argument
        place = Place("argument", module=a.arguments[index].name)
        return Parting(place, place, "", error, 0.0)
    if not found.birth:
        return None
    at = found.birth
    first, second = a.operations[at.a], b.operations[at.b]
    places = [
        x.place._replace(iteration=_iteration(made, x, at.iteration))
        for made, x in ((a, first), (b, second))
    ]
    codes = first.code, second.code
    return Parting(places[0], places[1], first.dtype, at.error, at.inputs_error, codes)


def _iteration(
    made: Fingerprint, operation: Operation, at: tuple[int, ...]
) -> tuple[int, ...]:
    """The iteration of each loop, as the program counts it, from that in time."""
    found = []
    for number, index in zip(operation.loops, at, strict=True):
        loop = made.loops[number]
        if loop.is_while and index == FIRST and loop.length:
            index = loop.length - 1
        found.append(loop.length - 1 - index if loop.is_reversed else index)
    return tuple(found)


def _rounding(a: Fingerprint, b: Fingerprint, results: dict[str, float]) -> list[str]:
    """What rounding costs where one of two programs is in half precision."""
    made = a if IN_FLOAT32 in a.runs else b
    runs = made.runs[WRITTEN].operations, made.runs[IN_FLOAT32].operations
    pairs = zip(*runs, strict=True)
    errors = [float(apart(x, y).error.max(initial=0.0)) for x, y in pairs]
    floats = [i for i, x in enumerate(made.operations) if x.unit]

    def added(i: int) -> float:
        feeds = made.operations[i].feeds
        return errors[i] - max(
            (errors[x.number] for x in feeds if x.number >= 0), default=0
        )

    worst = max(results.values())
    notes = [f"The results differ by up to {percent(worst)}, which rounding explains"]
    if floats:
        place = made.operations[max(floats, key=added)].place
        notes.append(
            f"Most of it comes in at {place.operation}, {place_in_words(place)}. "
            "jls.calibrate tries which keep it is worth"
        )
    known = {place[:3] for x in (a, b) if x is not made for place in x.rounded}
    for place in [x for x in made.rounded if x[:3] not in known][:1]:
        notes.append(f"Rounds to {made.made_by['dtype']} here: {place_in_words(place)}")
    return notes
