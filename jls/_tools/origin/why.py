# SPDX-License-Identifier: Apache-2.0
"""`jls.why`: where the inf and NaN in the results of a function were born."""

import bisect
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jls import _validate
from jls._program.frames import behind
from jls._program.jaxprs import effects_of, is_inexact_atom
from jls._program.places import Place, place_of
from jls._scopes import GRADIENTS, UPDATE, marks_of
from jls._text import scale_in_words
from jls._tools.origin.advice import (
    CAME_IN,
    NORM_OVERFLOWS,
    WRITTEN,
    advise,
    is_of_entropy,
)
from jls._tools.origin.case import (
    NEW,
    RESULTS,
    Bad,
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
from jls._tools.origin.measure import Size
from jls._tools.origin.result import ARGUMENT, CONSTANT, Birth, Why
from jls._tools.origin.trail import Argument, FoundBirth, OpResult, Range, Trail
from jls._tools.reading.arguments import items_of
from jls._tools.reading.keep import argument_of
from jls._tools.reading.scales import Scale, without_value
from jls._tools.reading.slow import logging_if_slow
from jls._tools.reading.widths import Widths
from jls._tree import is_array
from jls._types import SkipReason, skip_reason_of

# The lowest loss scale that is tried is 2^-24, the smallest float16: a lower one is 0
# when it is cast.
LOWEST_EXPONENT = -24
# Each argument with NaN in it is tried in a run of its own.
_MOST_RUNS = 32
# No model trains with parameters like these.
_FAR_TOO_LARGE = 1e6


def why(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Why:
    """Says where each inf and NaN in the results of `fun(*args, **kwargs)` was born.

    For the host, when something has gone wrong. `fun` is traced, compiled with a record
    beside each operation, and run; if there is a loss scale, at several scales. Then
    each inf and NaN is followed back to its birth: the operation that made it from
    finite numbers, also inside scan, while, cond, remat, vmap, custom derivatives and
    `shard_map`, forward and backward. A large function is compiled with few records
    first, then with those of the parts that have a birth, so a birth behind another NaN
    may be missed. An inf that is made on purpose and reaches no result, such as that in
    a mask, is not named. If nothing is found, `fun` itself may be run too, on copies,
    to see whether the failure repeats. Nothing of yours is changed or donated.

    For a train step that jls skips, pass the step itself, with the arguments of the
    skipped call or the state after it: a skip changes nothing else. Then the search
    begins at what the wrapper found: the loss, the gradients, or the new parameters.

    If `jls.autocast` is in it, and in float32 it is finite, that is said first, with
    the least `keep` that mends it, and no line is to blame.

    Args:
      fun: a loss, a gradient, or a whole step, jitted or not: of plain pytrees, Linen,
        NNX, Equinox or Haiku. NNX objects that it changes in place are copied first.
      *args: its arguments. In a run of several processes, process-local arrays.
      **kwargs: its keyword arguments.

    Returns:
      A `jls.types.Why`. `births` has a `jls.types.Birth` for each place, in the order
      of the program: `kind` is "inf" or "nan", `place` the operation, file, line,
      function, module, and the iteration of each loop around it; what came in with an
      argument has the operation "argument" and its path for the module. `results` names
      what is not finite. `is_from_scale` is True if it is gone at a lower loss scale,
      False if it is there at the lowest one tried, 2^-24, too; None if there is no loss
      scale, or if it was not tried. `str()` is for people.

    Raises:
      TypeError: if `fun` is not a function, or is compiled ahead of time.
      ValueError: if no result is floating point, if an array was donated to an earlier
        call, or is spread over several processes.
      Exception: what `fun` itself raises.

    Example:
      >>> def loss_fn(x):
      ...     return jnp.sum(jnp.sqrt(x))
      >>> birth = jls.why(jax.grad(loss_fn), jnp.array([0.0, 1.0])).births[0]
      >>> birth.kind, birth.place.operation, birth.place.is_backward
      ('inf', 'div', True)
    """
    _validate.traceable("fun", fun)
    with settings(), logging_if_slow(_SLOW):
        case = read_case("jls.why", fun, args, kwargs)
        return (
            _came_in(case)
            or _at_this_scale(case)
            or _at_higher_scales(case)
            or _one_by_one(case)
        )


_SLOW = (
    "jls.why is compiling and running the function with a record beside each "
    "operation; this takes two to four times as long as to compile it alone."
)


def _at_this_scale(case: Case) -> Why | None:
    """Explains what is not finite in a run with the arguments as they are."""
    found = run(case, case.leaves)
    if not found.bad:
        return None
    return _with_keep(case, explain(case, found, *_is_from_scale(case, found.bad)))


def _one_by_one(case: Case) -> Why:
    """Explains what is not finite if XLA fuses no operations; or says that all is."""
    was_skipped = _was_skipped(case)
    if not (was_skipped or _is_bad_as_it_is(case)):
        return Why()
    program = functools.partial(record(case), compiled=False)
    found = run(case, case.leaves, program)
    if found.bad:
        return explain(case, found, None, _ONE_BY_ONE)
    return Why(notes=(_NOT_REPRODUCED_SKIP if was_skipped else _NOT_REPRODUCED,))


# Bad arguments.


def _came_in(case: Case) -> Why | None:
    """Explains NaN among the arguments, without a record of each operation.

    An argument is named if the results are finite with 0 in the place of NaN, and not
    with only the NaN of this argument. An inf may be there on purpose. Where the
    program asks what is NaN, it may do something else with 0.
    """
    indices = [
        i
        for i, leaf in enumerate(case.leaves)
        if i not in case.scales and is_inexact_atom(leaf)
        if np.isnan(np.asarray(leaf)).any()
    ]
    if not 0 < len(indices) <= _MOST_RUNS or _may_decide(case, indices):
        return None
    program = case.recorded
    if program.landmarks is None:
        program = record(case, at_roots=True)

    def bad_roots(kept: Iterable[int]) -> list[Bad]:
        leaves = list(case.leaves)
        for i in {*indices} - {*kept}:
            leaves[i] = _without_nan(leaves[i])
        return run(case, leaves, program).bad

    bad = bad_roots(indices)
    if not bad or bad_roots(()):
        return None
    found = [i for i in indices if bad_roots([i])]
    is_from_scale, note = _is_from_scale(case, bad, program)
    if not found or is_from_scale:
        return None
    return Why(
        births=tuple(_birth_of_argument(case, "nan", i) for i in found),
        results=_names(bad),
        is_from_scale=is_from_scale,
        notes=tuple(filter(None, (note,))),
    )


def _may_decide(case: Case, indices: Iterable[int]) -> bool:
    """Whether an integer or a flag is computed from one of these inputs.

    Those of jls do no harm. A `while` loop might not end, and what a callback does
    would be done again.
    """
    has_while = any(frame.kind == "while" for frame in case.main.all())
    if effects_of(case.main.jaxpr) or has_while:
        return True
    asked = [
        (frame, atom)
        for frame, index in case.main.operations()
        if not all(map(is_inexact_atom, frame.jaxpr.eqns[index].outvars))
        and not marks_of(frame.site_of(index))
        for atom in frame.jaxpr.eqns[index].invars
    ]
    given = {(case.main, case.main.jaxpr.invars[i]) for i in indices}
    return not given.isdisjoint(behind(asked))


def _is_bad_as_it_is(case: Case) -> bool:
    """Whether the function itself, on copies, gives a result that is not finite."""
    arrays = jax.Array | np.ndarray
    leaves = (x.copy() if isinstance(x, arrays) else x for x in case.arguments.leaves)
    call = case.arguments.rebuild(list(leaves))
    items = items_of(case.fun(*call.args, **call.kwargs))
    found = {without_value(x.path): x.value for x in [*items, *call.read()]}
    applied = {path: x for path, x in found.items() if path[-1:] == ("applied",)}
    if applied:
        return any(
            not np.all(x)
            and np.any(found.get((*path[:-1], "last_skip_reason")) != SkipReason.SPIKE)
            for path, x in applied.items()
        )
    floats = [x.value for x in items if is_array(x.value) and is_inexact_atom(x.value)]
    return not all(bool(jnp.all(jnp.isfinite(x))) for x in floats)


# The loss scale.


def _is_from_scale(
    case: Case, bad: list[Bad], program: Recording | None = None
) -> tuple[bool | None, str]:
    """Whether a lower scale is finite, and a sentence that says which."""
    own = {x.root.scale for x in bad if x.root.scale is not None} or case.scales
    at = [i for i in case.live if i in own]
    if not at:
        return None, ""
    scale = max(float(np.max(case.leaves[i])) for i in at)
    if not 0 < scale < math.inf:
        return None, f"The loss scale is {scale}: no gradient can be finite"

    def is_finite(halvings: int) -> bool:
        return not run(case, _scaled(case, at, 2.0**-halvings), program).bad

    most = max(1, math.ceil(math.log2(scale)) - LOWEST_EXPONENT)
    if not is_finite(most):
        lowest = scale_in_words(min(2.0**LOWEST_EXPONENT, scale / 2))
        return False, f"No loss scale mends it: it is there at {lowest} too"
    worse = bisect.bisect_left(range(1, most), True, key=is_finite)
    return True, (
        f"It is the loss scale of {scale_in_words(scale)}: at "
        f"{scale_in_words(scale * 2.0 ** -(worse + 1))} all of this is finite, at "
        f"{scale_in_words(scale * 2.0**-worse)} it is not. A dynamic scale "
        "comes down by itself, if its min_scale lets it. This is what overflows "
        "first"
    )


def _scaled(case: Case, at: Iterable[int], factor: float) -> list[Any]:
    """The inputs, with the loss scales `at` these multiplied."""
    leaves = list(case.leaves)
    for i in at:
        scale = jnp.asarray(leaves[i], jnp.float32)  # it may be kept in float16
        leaves[i] = jnp.full_like(leaves[i], scale * jnp.float32(factor))
    return leaves


def _at_higher_scales(case: Case) -> Why | None:
    """Explains skips from which the scale has backed off since."""
    for at, scale in case.scales.items():
        now = float(np.max(case.leaves[at]))
        for doublings in range(1, _backoffs(case, scale) + 1):
            factor = 2.0**doublings
            if not now * factor <= 2.0**126:
                break
            found = run(case, _scaled(case, [at], factor))
            if found.bad:
                note = (
                    f"The last step was skipped at a higher loss scale: at "
                    f"{scale_in_words(now)} all of this is finite, at "
                    f"{scale_in_words(now * factor)} it is not. The "
                    "scale has come down since, and there is nothing to mend. "
                    "This overflowed first"
                )
                return explain(case, found, True, note)
    return None


def _backoffs(case: Case, scale: Scale) -> int:
    """The largest number of backoffs since the last good step."""
    leaves = case.arguments.leaves
    if scale.is_static:
        return 0
    if not scale.counters:
        finite = scale.fields.get("finite_count")
        return int(finite is not None and not np.any(np.asarray(leaves[finite])))
    if _skip_reason(leaves, scale) in (SkipReason.GRADIENTS, SkipReason.NONE):
        return int(np.max(leaves[scale.counters["consecutive_skips"]]))
    return 0


def _was_skipped(case: Case) -> bool:
    leaves = case.arguments.leaves
    reasons = [_skip_reason(leaves, x) for x in case.scales.values() if x.counters]
    return any(x not in (None, SkipReason.SPIKE) for x in reasons)


def _skip_reason(leaves: list[Any], scale: Scale) -> SkipReason | None:
    """Why the last step was skipped; None if it was not."""
    if not np.any(np.asarray(leaves[scale.counters["consecutive_skips"]])):
        return None
    reason = scale.counters.get("last_skip_reason")
    if reason is None:
        return SkipReason.NONE
    return skip_reason_of(int(np.max(leaves[reason])))


# Words.


def explain(
    case: Case, found: RecordedRun, is_from_scale: bool | None = None, note: str = ""
) -> Why:
    """Says where what is bad in a run was born."""
    closely = run_with_all_records(case, found)
    births: dict[Any, Birth] = {}
    for one in closely.births:
        birth = birth_of(case, closely.trail, one)
        births.setdefault((birth.kind, birth.place._replace(iteration=())), birth)
    if any(is_of_entropy(x.advice) for x in births.values()):
        # The logarithm needs no mending: the product does.
        is_log = "log", "log1p"
        births = {
            key: x._replace(advice="") if x.place.operation in is_log else x
            for key, x in births.items()
        }
    first = next(iter(births.values()), None)
    is_overflow = first and max(first.operands, default=0) >= _FAR_TOO_LARGE
    diverged = _diverged(case, found.bad) if is_overflow and not is_from_scale else ""
    return Why(
        births=tuple(births.values()),
        results=_names(found.bad),
        is_from_scale=is_from_scale,
        notes=tuple(filter(None, (diverged, note))),
        is_early=bool(diverged),
    )


def _names(bad: list[Bad]) -> tuple[str, ...]:
    """The roots that are not finite, the loss first."""
    names = dict.fromkeys(x.root.name for x in bad)
    return tuple(sorted(names, key=lambda name: name.split(" (")[0] != "loss"))


def _with_keep(case: Case, found: Why) -> Why:
    """The same, or the `keep` with which it is finite: then no line is to blame."""
    if found.is_from_scale or found.is_early:
        return found
    is_for_a_scale = all(
        x.place.is_backward and x.dtype == "float16" for x in found.births
    )
    if is_for_a_scale and found.is_from_scale is None:  # there is none yet
        return found
    leaves = at_scale(case.leaves, case.live, 2.0**LOWEST_EXPONENT)
    keep = Widths(case.main, case.before_update).keep(leaves)
    if keep is None:
        return found
    write = argument_of(keep) or "jls.calibrate finds the keep"
    return found._replace(
        births=tuple(x._replace(advice="") for x in found.births),
        notes=(f"In float32 this is finite: {write}", *found.notes),
        is_early=True,
    )


def _diverged(case: Case, bad: list[Bad]) -> str:
    """A sentence on parameters that came in far too large; "" if none did."""
    groups, is_known = {x.root.group for x in bad}, True
    roots = [x for x in case.roots if x.group in groups and x.role != NEW]
    items = [x.parameter for x in roots if x.parameter]
    if all(x.role in RESULTS for x in case.roots):  # a loss or its gradient, no step
        is_known, first = bool(items), case.arguments.names[:1]
        items = items or [x for x in case.parameters if x.path[0] in first]
        items = [x for x in items if len(x.path) > 1]  # an array may be data
    largest, name = 0.0, ""
    for item in items:
        size = float(np.max(np.abs(np.asarray(item.value)), initial=0))
        if largest < size < math.inf:
            largest, name = size, item.name
    if largest < _FAR_TOO_LARGE:
        return ""
    write = "Look at the learning rate, and go back to an older checkpoint"
    if not is_known:
        return (
            f"What came in reaches {largest:.2g} ({name}). If that is a parameter, the "
            f"run diverged before. {write}"
        )
    return (
        f"The parameters that came in reach {largest:.2g} ({name}): the run diverged "
        f"before, and no line is to blame. {write}"
    )


def birth_of(case: Case, trail: Trail, found: FoundBirth) -> Birth:
    """A birth in words."""
    kind: Literal["inf", "nan"] = "nan" if found.size.is_nan else "inf"
    is_negative = found.size.nonfinite == {"-inf"}
    origin = found.origin
    if isinstance(origin, Argument):
        birth = _birth_of_argument(case, kind, origin.position)
        return birth._replace(is_negative=is_negative)
    if not isinstance(origin, OpResult):
        reader = origin.reader
        place = place_of(reader.site) if reader else Place("")
        iterations = reader.iterations if reader else ()
        place = place._replace(operation=CONSTANT, iteration=iterations)
        return Birth(kind, place, advice=WRITTEN, is_negative=is_negative)
    site = origin.site
    place = place_of(site)
    is_backward = place.is_backward
    if case.forward is not None and UPDATE not in marks_of(site):
        results = site.equation.outvars
        is_backward |= not any((origin.frame, x) in case.forward for x in results)
    return Birth(
        kind=kind,
        place=place._replace(is_backward=is_backward, iteration=origin.iterations),
        operands=tuple(
            _magnitude(trail.size(x), kind) for x in found.operands if trail.is_known(x)
        ),
        dtype=str(origin.dtype),
        range=_ends(found.range),
        advice=NORM_OVERFLOWS
        if GRADIENTS in marks_of(site)
        else advise(trail, found, is_backward),
        is_negative=is_negative,
    )


def _birth_of_argument(case: Case, kind: Literal["inf", "nan"], index: int) -> Birth:
    item = case.arguments.items[case.traced.inputs[index]]
    place = Place(ARGUMENT, module=item.name)
    dtype = str(jnp.result_type(item.value))
    return Birth(kind, place, (), dtype, advice=CAME_IN)


_ONE_BY_ONE = (
    "Compiled as one program, everything was finite: this was found by running one "
    "operation at a time"
)
_NOT_REPRODUCED = (
    "Not reproduced: the function gives inf or NaN, but not with a record beside each "
    "operation, compiled or not. What XLA fuses is rounded differently"
)
_NOT_REPRODUCED_SKIP = (
    "Not reproduced: the last step was skipped, but with these arguments everything is "
    "finite, at this loss scale and at those since the skip. Pass the batch of the "
    "skipped step. If the program was changed since, this is mended. Random keys that "
    "are folded from the count of steps differ too"
)


def _ends(found: Range | None) -> tuple[float, float] | None:
    """The ends of a range, as far as they are known."""
    return None if found is None or math.isnan(found.low) else (found.low, found.high)


def _magnitude(size: Size, kind: str) -> float:
    """The largest magnitude of an operand.

    For a birth of inf the largest finite one. -inf if a birth of NaN has no other.
    """
    if size.nonfinite == {"-inf"} and kind == "nan":
        return -math.inf
    return size.finite if kind == "inf" else size.magnitude


def _without_nan(leaf: Any) -> Any:
    """An array with 0 in the place of NaN, in the place of `leaf`."""
    array = np.asarray(leaf)
    array = np.where(np.isnan(array), np.zeros((), array.dtype), array)
    is_placed = getattr(leaf, "committed", False)
    return jax.device_put(array, leaf.sharding) if is_placed else array
