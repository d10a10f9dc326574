# SPDX-License-Identifier: Apache-2.0
"""`jls.check_step`: injects faults into a step and names the mistakes it finds."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
import optax

from jls import _validate
from jls._mistakes import is_jit_disabled
from jls._program.places import Place, short_path
from jls._state import how_to_nest
from jls._text import no_field, wrapped
from jls._tools.check.codes import CODES, Code
from jls._tools.check.faults import Trying, inject
from jls._tools.check.findings import Finding, Findings, Note, StepError, untried
from jls._tools.check.float8 import float8_notes
from jls._tools.check.good_steps import take_good_steps
from jls._tools.check.mistakes.mistake import Mistake
from jls._tools.check.mistakes.steps import is_idle
from jls._tools.check.mistakes.storage import note_still
from jls._tools.check.mistakes.table import MISTAKES
from jls._tools.check.program import read_program
from jls._tools.check.runs import OutOfRunsError, Run, Runner, Trial
from jls._tools.check.subject import Subject
from jls._tools.check.tolerance import note_tolerances
from jls._tools.reading.arguments import Arguments, open_call
from jls._tools.reading.precision import Precision, in_words, look_at
from jls._tools.reading.scales import Scale, scales_in
from jls._tree import is_array

CarriedNames = Mapping[int | str, Iterable[str]] | Iterable[int | str] | None
_TABLE = {mistake.code: mistake for mistake in MISTAKES}
_USUAL_NAMES = {x: x for x in ("optimizer", "state", "model", "batch")}
_T = TypeVar("_T")


class StepCheck(NamedTuple):
    """Result of `jls.check_step`: the mistakes it found, and what it could not check.

    `print` it: the table has a row for each check, and the line to write where one is
    broken. It is true if no mistake was found, as `ok` is, so a test may `assert` it.

    Example:
      >>> check = jls.types.StepCheck(broken=("not scaled",))
      >>> check.ok, bool(check)
      (False, False)
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    broken: tuple[Code, ...] = ()  # the codes of the mistakes
    not_tried: Mapping[str, str] = {}  # a code, or a fault, and the reason
    not_applicable: Mapping[Code, str] = {}  # a code, and why it does not apply
    seen: Mapping[Code, str] = {}  # the evidence of each mistake, or a note
    where: Mapping[Code, Place] = {}  # the line of the mistake, where it was read
    # The line to write for each mistake, and for more of "precision".
    write: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()  # such as which arguments were taken as state
    precision: Precision | None = None  # None without a program to read
    half: str = ""  # what the headline says of half precision; "" if nothing
    # What the headline says besides, such as that no good step moved the parameters: it
    # may be meant.
    doubts: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no mistake was found. What was not tried is in `not_tried`."""
        return not self.broken

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_broken(self, not_tried: Literal["allow", "raise"] = "allow") -> None:
        """Raises an `AssertionError` with the table if a mistake was found.

        For a test of the step: `jls.check_step(step, *args).raise_if_broken()`.

        Args:
          not_tried: "raise" also raises if a check that applies was not tried, or a
            fault could not be injected.
        """
        _validate.choice("not_tried", not_tried, ("allow", "raise"))
        if self.broken or (not_tried == "raise" and self.not_tried):
            raise AssertionError(str(self))

    def __str__(self) -> str:
        rows: list[tuple[str, str, str]] = []
        for code in CODES:
            if code in self.broken:
                rows.append((code, "BROKEN", self.seen.get(code, "")))
                place = self.where.get(code)
                if place and place.file:
                    rows.append(("", "where", f"{short_path(place.file)}:{place.line}"))
                rows.append(("", "write", self.write.get(code, _TABLE[code].write)))
            elif code in self.not_tried:
                rows.append((code, "not tried", self.not_tried[code]))
            elif code not in self.not_applicable:
                text = _TABLE[code].right + self.seen.get(code, "")
                rows.append((code, "ok", text))
        for name, reason in self.not_tried.items():
            if name not in CODES:
                rows.append(("", "not tried", f"{name}: {reason}"))
        if self.precision is not None:
            rows.append(("precision", "", in_words(self.precision)))
            if "precision" in self.write:
                rows.append(("", "write", self.write["precision"]))
        notes = [line for note in self.notes for line in wrapped(note)]
        return "\n".join([*wrapped(self._headline()), *_table(rows), *notes])

    def _headline(self) -> str:
        untried = [code for code in CODES if code in self.not_tried]
        others = [name for name in self.not_tried if name not in untried]
        names = ", ".join([*untried, *others])
        rest = f" Not tried: {names}." if names else ""
        more = "; ".join([*self.doubts, *([self.half] if self.half else [])])
        if self.broken:
            count = len(self.broken)
            mistakes = "1 mistake" if count == 1 else f"{count} mistakes"
            rest = f"{f' Besides, {more}.' if more else ''}{rest}"
            return f"jls.check_step found {mistakes}: {', '.join(self.broken)}.{rest}"
        applying = len(CODES) - len(self.not_applicable)
        looked_at = f"{applying - len(untried)} of" if untried else "all"
        rest = f"{f', but {more}' if more else ''}.{rest}"
        return f"jls.check_step: no mistake in {looked_at} {applying} that apply{rest}"


def check_step(
    step: Callable[..., Any],
    /,
    *args: Any,
    carried: CarriedNames = None,
    **kwargs: Any,
) -> StepCheck:
    """Reads a train step, runs it with faults injected, and names the mistakes in it.

    For a step written by hand, before a long run or in a test. First it reads the
    program of the step: whether the gradients follow the loss scale, and are divided by
    it once; whether the optimizer is given the loss; what stays if the step is skipped.
    Then it runs the step some ten times, on copies: your arguments stay as they are,
    even if the step donates them. An inf in the loss scale, and NaN in the batch, show
    whether a bad step leaves anything behind, and whether training goes on after it. A
    correct step is never called broken. The result says what could be neither read nor
    tried.

    Args:
      step: the function that you call in the loop: jitted or not, of plain pytrees,
        Linen, NNX, Equinox or Haiku. It takes its state as arguments, and returns the
        new state in any order or nesting; NNX objects it may change in place.
      *args: its arguments, with a batch that it can step on. In a run of several
        processes, process-local arrays.
      carried: which arguments come back. Positions and keyword names, or a dict
        from each of them to the fields to check, for example to leave out running
        metrics. None finds them from the program and the shapes. A step without a
        program to read, because it is compiled ahead of time or reads values at the
        host, needs them.
      **kwargs: its keyword arguments. If the step has a keyword `carried` itself, pass
        that one by position.

    Returns:
      A `jls.types.StepCheck`. `broken` has the codes of the mistakes: "no step",
      "retraced", "host sync", "not scaled", "scale leaks", "loss not passed",
      "gradients narrowed", "overflow hidden", "scale stuck", "state narrowed", "nan
      committed", "not atomic", "never recovers", "spike not skipped", "summed over
      devices", "out of sync". `not_tried` says what could not be tried, and why,
      `not_applicable` what does not apply to this step; `where` has the line of a
      mistake that was read; `ok` is whether none is broken; `str()` is a table for
      people, with the line to write; `raise_if_broken()` is for tests.

    Raises:
      TypeError: if `step` is not a function, or `carried` of another type.
      ValueError: if no argument carries a loss scale (a step that closes over its state
        cannot be checked), if the step does not return the state, if it is not clear
        which result is which argument (without a program to read, `carried` says
        so), if the step is skipped at every loss scale, or if an array was donated to
        an earlier step, or is spread over several processes.
      Exception: what the step itself raises, with a note that says in which trial.

    Example:
      >>> optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(1024.0))
      >>> @jax.jit
      ... def step(params, opt_state, x):
      ...     grads = jax.grad(lambda params: jnp.mean((x @ params) ** 2))(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> params = jnp.ones(3)
      >>> jls.check_step(step, params, optimizer.init(params), jnp.ones((4, 3))).broken
      ('not scaled', 'loss not passed')
    """
    with (
        jax.debug_nans(False),  # NaN is what the faults are made of
        jax.debug_infs(False),
        jax.check_tracer_leaks(False),
    ):
        runner, findings = read_step(step, args, kwargs, carried)
        if not findings.ends:
            _try_all(runner, findings)
        findings.mark_others_not_tried(findings.ends or "no trial shows it")
    subject = runner.subject
    for i in sorted(subject.carried.doubtful):
        reason = (
            "taken as data, but a result looks like it; if it is state, name all "
            "arguments that come back: jls.check_step(step, ..., carried=(0, 1))"
        )
        findings.take(subject.items[i].path[0], [untried(reason)])
    check = _step_check(subject, findings)
    products = check.precision.products if check.precision else ()
    if any(name.startswith("float8") for name, *_ in products):
        check = check._replace(notes=(*check.notes, *float8_notes(runner)))
    return check


def read_step(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carried: CarriedNames = None,
) -> tuple[Runner, Findings]:
    """The part of `check_step` that reads the program, and runs no step.

    Returns:
      What runs the step, and the findings.
    """
    _validate.function("step", step)
    given = len(args)
    _check_type(carried)
    step, args, arguments = open_call("jls.check_step", "step", step, args, kwargs)
    named = _named(carried, arguments, len(args) - given)
    scales = _require_scales(args, kwargs, arguments)
    arguments, program = read_program(step, arguments, scales, (args, kwargs))
    runner = Runner(step, arguments, program, named)
    subject, findings = runner.subject, Findings()
    missing = ", ".join(subject.scales[k].name for k in subject.missing)
    for mistake in MISTAKES:
        found = [*mistake.read(subject)]
        if mistake.needs and program.reading is None:
            reason = f"there is no program to read: {program.reason}"
            found = [untried(reason), *found]
        elif mistake.needs == "updates" and missing:
            reason = f"no update with {missing} was found in the program of the step"
            found = [untried(reason), *found]
        findings.take(mistake.code, found)
    return runner, findings


def _try_all(runner: Runner, findings: Findings) -> None:
    """Takes good steps, then injects faults, and asks what both show."""
    try:
        good = take_good_steps(runner, is_idle(runner.subject))
    except StepError as error:
        if not findings.of("broken"):
            raise
        findings.ends = error.reason  # the reading says what to write
        return
    for mistake in MISTAKES:
        findings.take(mistake.code, [*mistake.of_good_steps(good)])
    if findings.ends:
        return
    if not good.why_unmoved:
        runner.left += 2 * good.window
    runner.left += sum(bool(scale.spikes) for scale in good.subject.scales)
    for note in (note_still, note_tolerances):
        findings.take("", _answered(runner, note(good))[0])
    _, faults = _answered(runner, inject(good, findings.status))
    for name, reason in faults.not_tried.items():
        findings.take(name, [reason])
    for mistake in MISTAKES:
        found, _ = _answered(runner, mistake.of_faults(faults))
        if good.subject.reading is None and not mistake.is_sure_unread:
            found = [
                untried(f"{x.text}. Without a program to read, that may be right")
                if isinstance(x, Finding) and x.status == "broken"
                else x
                for x in found
            ]
        findings.take(mistake.code, found)


def _answered(runner: Runner, asking: Trying[_T]) -> tuple[list[Finding | Note], _T]:
    """What a function finds and returns, with the trials run that it asks for."""
    found: list[Finding | Note] = []
    run: Any = None
    while True:
        try:
            asked = asking.send(run)
        except StopIteration as end:
            return found, end.value
        if isinstance(asked, Trial):
            run = _attempt(runner, asked)
        else:
            run = None
            found.append(asked)


def _attempt(runner: Runner, trial: Trial) -> Run | Finding:
    """The run of a trial, or why there is none."""
    try:
        return runner.run(*trial)
    except OutOfRunsError:
        return untried("no run was left")
    except Exception as error:
        return untried(f"the step raised {type(error).__name__} in {trial.what}")


def _notes(subject: Subject) -> list[str]:
    items, carried, program = subject.items, subject.carried, subject.program
    mine = dict.fromkeys(items[i].path[0] for i in sorted(carried.leaves))
    data = dict.fromkeys(x.path[0] for x in items if x.path[0] not in mine)
    as_data = f" Taken as data: {', '.join(data)}." if data else ""
    notes = [f"Carried: {', '.join(mine)}.{as_data}"] if mine else []
    weak = _losing_weak_types(subject)
    if weak:
        notes.append(
            f"The second call compiles the step once more: {subject.names(weak)} "
            f"{'is' if len(weak) == 1 else 'are'} weakly typed, and what comes back is "
            "not. Give it a dtype: jnp.array(1.0, jnp.float32)."
        )
    if program.reading is None:
        notes.append(f"The precision is not known: {program.reason}.")
    elif not (program.is_compiled or program.reading.traced.is_jitted):
        notes.append("Not jitted as passed: step = jax.jit(step).")
    return notes


def _losing_weak_types(subject: Subject) -> list[int]:
    if subject.reading is None or is_jit_disabled():
        return []
    traced, carried = subject.reading.traced, subject.carried
    results = (traced.outputs, traced.objects)
    by_path = [{x.path: x.value for x in items} for items in results]
    new = carried.pick(subject.items, *by_path)
    return [
        i
        for i in sorted(carried.compared & new.keys())
        if getattr(subject.items[i].value, "weak_type", False)
        and isinstance(new[i], jax.ShapeDtypeStruct)
        and not new[i].weak_type
    ]


def _step_check(subject: Subject, findings: Findings) -> StepCheck:
    broken, away = findings.of("broken"), findings.of("does not apply")
    seen = findings.of("right") | broken
    write: dict[str, str] = {
        code: x.write or _line_to_write(_TABLE[code], subject)
        for code, x in broken.items()
    }
    precision, half = None, ""
    if subject.reading is not None:
        live = [subject.scales[k] for k in subject.live]
        precision, half, more = look_at(subject.reading, live)
        write |= {"precision": more} if more else {}
    return StepCheck(
        broken=tuple(broken),
        not_tried=findings.untried,
        not_applicable={code: x.text for code, x in away.items()},
        seen={code: x.text for code, x in seen.items() if x.text},
        where={code: x.place for code, x in broken.items() if x.place},
        write=write,
        notes=(*_notes(subject), *findings.notes),
        precision=precision,
        half=half,
        doubts=tuple(findings.doubts),
    )


def _line_to_write(mistake: Mistake, subject: Subject) -> str:
    """The line to write for a mistake in this step."""
    line, lines = mistake.write, mistake.write_with
    for library in subject.program.libraries:
        line = lines.get(library, line)
        if library.startswith("nnx") and library in lines:
            line = line.format_map(_USUAL_NAMES | _names_in(subject))
    if not subject.has_wrapper:  # only the scaler's state: nothing knows of the skip
        line = line.replace("opt_state.applied", "jls.all_finite(grads)")
    line += mistake.write_after
    outside = set(subject.program.outside)
    if optax.PartitionState in outside:  # it masks each of its parts
        outside.discard(optax.MaskedState)
    for kind, other in lines.items():
        line = f"{other}; and {line}" if kind in outside else line
    return line


def _names_in(subject: Subject) -> dict[str, str]:
    """An NNX step's own names of its arguments, by the usual ones; {} if not clear."""
    items, in_place = subject.items, subject.program.in_place
    if len(subject.scales) != 1:
        return {}
    (scale,) = subject.scales
    carries, *inner = scale.path  # an nnx.Optimizer, or the state of a scaler
    is_whole = inner[:1] == ["opt_state"] if scale.counters else not inner
    trained = {items[i].path[0] for i in subject.all_params} or in_place - {carries}
    if not is_whole or len(trained) != 1 or carries in trained:
        return {}
    others = {carries, *trained, *in_place}
    data = [x for x in subject.program.names if x not in others]
    names = {
        "optimizer" if scale.counters else "state": [carries],
        "model": list(trained),
        "batch": data,
    }
    is_clear = data and all(x.isidentifier() for own in names.values() for x in own)
    return {usual: ", ".join(own) for usual, own in names.items()} if is_clear else {}


def _require_scales(
    args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments
) -> list[Scale]:
    scales = scales_in(args, kwargs, arguments)
    if not scales:
        types = ", ".join(type(x).__name__ for x in (*args, *kwargs.values()))
        write = how_to_nest((args, kwargs)) or (
            "Pass the arguments of the step after it: jls.check_step(step, params, "
            "opt_state, batch). Is the optimizer wrapped? If not: optimizer = "
            "jls.loss_scaled(optimizer). A step that closes over its state cannot be "
            "checked: make the state an argument."
        )
        raise ValueError(
            "one argument of the step must carry a loss scale, got "
            f"{types or 'no arguments'}. {write}"
        )
    return scales


def _check_type(carried: Any) -> None:
    is_text_or_array = isinstance(carried, str | jax.Array | np.ndarray)
    if is_text_or_array or not isinstance(carried, Iterable | None):
        raise TypeError(_rule(carried))


def _rule(carried: Any) -> str:
    return (
        "carried must be positions and names of arguments, or a dict of them with "
        f"the fields that count, got {carried!r}."
    )


def _named(
    carried: CarriedNames, arguments: Arguments, bound: int
) -> dict[str, tuple[str, ...] | None] | None:
    """The names of the carried arguments, with the fields that count."""
    if carried is None:
        return None
    named: dict[str, tuple[str, ...] | None] = {}
    positions = arguments.names[bound:]
    arrays = dict.fromkeys(x.path[0] for x in arguments.items if is_array(x.value))
    there = f"The arguments with arrays are {', '.join(arrays)}."
    for key in carried:
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise TypeError(_rule(carried))
        if isinstance(key, int) and not 0 <= key < len(positions):
            raise ValueError(
                f"carried must be positions below {len(positions)}, got {key}."
            )
        name = positions[key] if isinstance(key, int) else key
        if name not in arrays:
            raise ValueError(
                f"carried must name arguments with arrays, got {name!r}. {there}"
            )
        if name in named:
            raise ValueError(
                f"carried must name each argument once, got {name!r} twice, by "
                "position or by name."
            )
        fields = carried[key] if isinstance(carried, Mapping) else None
        named[name] = None if fields is None else tuple(fields)
    if not named:
        raise ValueError(
            f"carried must name at least one argument, got {carried!r}. {there}"
        )
    return named


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """The lines of a table; long texts wrap within their column."""
    # The longest code has 18 letters, on one device: tables of all steps look alike.
    width = max(18, *(len(code) for code, _, _ in rows))
    lines = []
    for code, verdict, text in rows:
        head = f"{code:<{width}} {verdict:<9} "
        lines += wrapped(text, indent=" " * len(head), initial=head)
    return lines
