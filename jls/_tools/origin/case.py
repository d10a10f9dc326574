# SPDX-License-Identifier: Apache-2.0
"""A function with its arguments, the values that are checked in it, and its runs.

A step that is skipped returns its old state, and no result is bad. So a search begins
at its roots: the values that the wrapper checks, and the results that do not come from
its update.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls import _scopes
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import effects_of, is_inexact_atom, is_literal
from jls._program.places import is_transposed
from jls._program.records import Records
from jls._scopes import marks_of
from jls._text import describe, join
from jls._tools.origin import regions
from jls._tools.origin.record import RecordedProgram, both
from jls._tools.origin.trail import FoundBirth, LostError, RunValue, Trail
from jls._tools.reading.arguments import Arguments, Item, open_call
from jls._tools.reading.flow import THROUGH_BACKWARD, THROUGH_UPDATE
from jls._tools.reading.reading import Reading, is_a_result
from jls._tools.reading.scales import Scale, is_switched_off, scales_in
from jls._tools.reading.trace import ALL, READS, Traced, trace
from jls._tree import is_array

# The roles of roots.
LOSS, GRADIENTS, NEW = "loss", "gradients", "updates"
CHECKED = "what is checked for inf and NaN"
NORM = "sum of the squares of the gradients"  # of a clip inside, which is the check
FORWARD, BACKWARD = "result", "result of a backward pass"
RESULTS = FORWARD, BACKWARD
_ROLES = {
    _scopes.LOSS: LOSS,
    _scopes.GRADIENTS: GRADIENTS,
    _scopes.NORM: NORM,
    _scopes.NEW: NEW,
    _scopes.CHECKED: CHECKED,
}


class Root(NamedTuple):
    """A value to begin a search at."""

    variable: Variable
    role: str
    name: str  # in the text
    parameter: Item | None = None  # of which it is a gradient, as far as that is clear
    group: int | None = None  # which call of a wrapper; None of a result
    scale: int | None = None  # the input that is the loss scale of the wrapper


class Case(NamedTuple):
    """A function and its arguments, and what is read of its program."""

    fun: Callable[..., Any]
    arguments: Arguments
    traced: Traced
    main: Frame
    leaves: list[Any]  # the inputs of the program
    scales: dict[int, Scale]  # by the input that is the number
    live: list[int]  # those inputs, without what `jls.skip_nonfinite` keeps
    reading: Reading
    parameters: list[Item]  # the arguments that may be some
    roots: list[Root]
    losses: list[Variable]  # those roots that a wrapper checks
    gradients: list[Variable]  # the others of them, but for the new parameters
    before_update: list[Variable]  # the roots that the loss scale can affect
    # The variables that the loss comes from; None if the loss is not known.
    forward: set[Variable] | None
    recorded: RecordedProgram


def read_case(
    tool: str, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Case:
    """Traces a function, and reads its program."""
    fun, args, arguments, traced = trace_call(tool, fun, args, kwargs)
    place = {x: i for i, x in enumerate(traced.inputs)}
    scales = {
        place[x.at]: x for x in scales_in(args, kwargs, arguments) if x.at in place
    }
    reading = Reading(traced, list(scales.values()))
    main = reading.main
    results = _results(traced, main, reading)
    leaves = [arguments.leaves[i] for i in traced.inputs]
    items = _possible_parameters(arguments, scales)
    roots = list(_checked(reading, main, scales, items))
    losses = [x.variable for x in roots if x.role == LOSS]
    gradients = [x.variable for x in roots if x.role not in (LOSS, NEW)]
    roots += results if roots else _named(results, items)
    variables = [x.variable for x in roots]
    # With effects each program would print again.
    landmarks = None if effects_of(main.jaxpr) else regions.landmarks(main, variables)
    options = traced.options
    recorded = RecordedProgram(main, variables, only=landmarks, options=options)
    return Case(
        fun=fun,
        arguments=arguments,
        traced=traced,
        main=main,
        leaves=leaves,
        scales=scales,
        live=[i for i, x in scales.items() if not is_switched_off(leaves[i], x)],
        reading=reading,
        parameters=items,
        roots=roots,
        losses=losses,
        gradients=gradients,
        before_update=losses + gradients or [x.variable for x in results],
        forward=_forward_of(main, roots),
        recorded=recorded,
    )


def trace_call(
    tool: str, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Arguments, Traced]:
    """The function and the arguments of a call, opened, and its program."""
    fun, args, arguments = open_call(tool, "call", fun, args, kwargs)
    try:
        return fun, args, arguments, trace(fun, arguments, ALL)
    except READS as error:
        error.add_note(
            f"{tool} traces the function, as jax.jit does: it cannot read values at "
            "the host. Pass the part that is jitted."
        )
        raise
    except Exception as error:
        given = [*zip(arguments.names, args, strict=False), *kwargs.items()]
        call = ", ".join(f"{name}: {describe(value)}" for name, value in given)
        note = f"{tool} called {getattr(fun, '__name__', 'the function')}({call})."
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arguments.leaves):
            note += " Pass arrays: it is run."
        error.add_note(note)
        raise


def record(case: Case, **which: Any) -> RecordedProgram:
    """The program with records of its operations, see `RecordedProgram`."""
    variables, options = [x.variable for x in case.roots], case.traced.options
    return RecordedProgram(case.main, variables, options=options, **which)


# The roots.


def _checked(
    reading: Reading, main: Frame, scales: dict[int, Scale], parameters: list[Item]
) -> Iterator[Root]:
    """The values that the wrappers in a program check, in order."""
    frames = main.by_site()
    for group, call in enumerate(reading.checked):
        at = None if call.scale is None else list(scales)[call.scale]
        scale = None if at is None else scales[at]
        of = f" ({join(*scale.path)})" if scale and len(scales) > 1 else ""
        for scope, given in call.given.items():
            role = _ROLES[scope]
            variables = [(frames[x.around], x.atom) for x in given.values()]
            items = _parameters_of(variables, parameters, scale if of else None)
            for i, variable in enumerate(variables):
                item = items[i] if items and role in (GRADIENTS, NEW) else None
                name = role
                if item is not None:
                    path = join(*item.path[1:]) or item.path[0]
                    name = f"{role.removesuffix('s')} of {path}"
                yield Root(variable, role, name + of, item, group, at)


def _results(traced: Traced, main: Frame, reading: Reading) -> list[Root]:
    """The results to check, without arguments returned as they are."""
    items = list(filter(is_a_result, (*traced.outputs, *traced.objects)))
    outvars = main.jaxpr.outvars
    if not any(map(is_inexact_atom, outvars)):
        raise ValueError(
            "fun must return floating-point numbers, got "
            f"{len(outvars)} results without one: there is nothing to look at. "
            "Return the loss, the gradients, or what else is not finite."
        )
    found = dict[Variable, Root]()
    for item, atom, value in zip(items, outvars, reading.results, strict=True):
        if is_literal(atom) or atom in main.inputs:
            continue
        # Results computed from an update follow from what the wrapper was given.
        if is_inexact_atom(atom) and not value.through & THROUGH_UPDATE:
            name = result_name(item, traced)
            role = BACKWARD if value.through & THROUGH_BACKWARD else FORWARD
            variable = main, atom
            found.setdefault(variable, Root(variable, role, name))
    return list(found.values())


def result_name(item: Item, traced: Traced, whole: str = "the result") -> str:
    """A result by its path, such as "result[1].mu"; a leaf of an object by its own."""
    if item in traced.objects:
        return item.name
    keys = [f"[{key}]" if key.isdigit() else f".{key}" for key in item.path]
    return f"result{''.join(keys)}" if keys else whole


def _named(results: list[Root], parameters: list[Item]) -> list[Root]:
    """The results, those of a backward pass with the parameters they are for."""
    backward = [x.variable for x in results if x.role == BACKWARD]
    items = iter(_parameters_of(backward, parameters))
    return [
        x._replace(parameter=next(items, None)) if x.role == BACKWARD else x
        for x in results
    ]


def _possible_parameters(arguments: Arguments, scales: dict[int, Scale]) -> list[Item]:
    """The arguments that may be parameters."""
    states = [x.path for x in scales.values()]
    return [
        x
        for x in arguments.items
        if is_array(x.value)
        and is_inexact_atom(x.value)
        and x.variable_type in ("", "Param")
        and not any(x.path[: len(root)] == root for root in states)
    ]


def _parameters_of(
    variables: Sequence[Variable], items: list[Item], scale: Scale | None = None
) -> list[Item]:
    """The parameters with the shapes of these gradients; [] if that is unclear.

    Args:
      variables: the gradients.
      items: what may be parameters.
      scale: one of several loss scales, to tell two models of the same shapes apart.
    """
    shapes, found = [atom.aval.shape for _, atom in variables], []
    for start in range(len(items) - len(shapes) + 1):
        part = items[start : start + len(shapes)]
        is_one = len({x.path[0] for x in part}) == 1
        if is_one and [np.shape(x.value) for x in part] == shapes:
            found.append(part)
    if scale:  # "critic" in both paths
        own = set(scale.path[1:])
        found = [x for x in found if own & set(x[0].path)] or found[:1]
    return found[0] if found and shapes else []


def _forward_of(main: Frame, roots: Sequence[Root]) -> set[Variable] | None:
    """The variables that the loss comes from; None if the loss is not known."""
    losses = [x.variable for x in roots if x.role in (LOSS, FORWARD)]
    if not any(x.role in (LOSS, BACKWARD) for x in roots):
        return None
    if not losses:  # the gradient does not use it: it is computed and dropped
        losses = list(main.unused(lambda x, i: not is_transposed(x.site_of(i))))
    return behind(losses, _before_update)


def _before_update(frame: Frame, atom: Any) -> list[Variable]:
    """The sources of a variable; none of what the update of a wrapper computes."""
    maker = frame.makers.get(atom)
    is_of_update = maker and _scopes.UPDATE in marks_of(frame.site_of(maker.position))
    return [] if is_of_update else frame.sources(atom)


# Runs.


class Bad(NamedTuple):
    """A root that is not finite."""

    value: RunValue
    root: Root


Recording = Callable[[Sequence[Any]], Records]


class RecordedRun(NamedTuple):
    """One run of a program."""

    leaves: list[Any]
    trail: Trail
    bad: list[Bad]


class CloseRun(NamedTuple):
    """A run with records of all that the births of its bad values need."""

    trail: Trail
    births: list[FoundBirth]
    program: Recording  # that was run


def run(case: Case, leaves: list[Any], program: Recording | None = None) -> RecordedRun:
    """One run, by default of `case.recorded`, and the roots that are not finite."""
    trail = Trail((program or case.recorded)(leaves))
    return RecordedRun(leaves, trail, _bad_roots(case.roots, trail))


def _bad_roots(roots: Iterable[Root], trail: Trail) -> list[Bad]:
    """The roots that are not finite; in loops, in the first such iteration."""
    bad = []
    for root in roots:
        every = trail.in_every_iteration(*root.variable)
        value = next(filter(trail.is_bad, every), None)
        if value is not None:
            bad.append(Bad(value, root))
    # Results count if nothing that is checked is bad. Bad gradients make their norm and
    # the new parameters bad too.
    for roles in (RESULTS, (NEW,), (NORM,)):
        bad = [x for x in bad if x.root.role not in roles] or bad
    return bad


def run_with_all_records(
    case: Case, found: RecordedRun, only_first: bool = False
) -> CloseRun:
    """A run like this one in which the births of bad values are found.

    Args:
      case: the function.
      found: the run.
      only_first: whether one birth is enough.
    """
    trail, values = found.trail, [x.value for x in found.bad]
    if trail.records.only is None:
        return CloseRun(trail, trail.births(values), case.recorded)
    wanted = case.main.makers_of(behind(x.variable for x in case.roots))
    where = regions.search(trail, values, wanted, only_first)
    program: Recording = case.recorded
    if where.only:
        program = both(case.recorded, record(case, only=where.only, beside=False))
    closely = Trail(program(found.leaves), where.shortcuts)
    with contextlib.suppress(LostError):
        if births := closely.births(values):
            return CloseRun(closely, births, program)
    # XLA has rounded the two programs differently.
    program = record(case)
    trail = Trail(program(found.leaves))
    return CloseRun(trail, trail.births(values), program)


def at_scale(leaves: Sequence[Any], at: Collection[int], scale: float) -> list[Any]:
    """The inputs, with this for the loss scales `at` these."""
    pairs, number = enumerate(leaves), jnp.float32(scale)  # float16 may not hold it
    return [jnp.full_like(x, number) if i in at else x for i, x in pairs]


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Sets JAX up to trace, compile and run programs with NaN."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
        jax.check_tracer_leaks(False),
        jax.transfer_guard("allow"),
    ):
        yield
