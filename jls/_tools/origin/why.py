# SPDX-License-Identifier: Apache-2.0
"""`jls.why`: where the inf and NaN in the results of a function were born."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls import _validate
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import effects_of, is_inexact_atom, is_literal
from jls._program.places import Place, is_transposed, place_of
from jls._scopes import GRADIENTS, UPDATE, marks_of
from jls._text import join, scale_in_words
from jls._tools.origin import regions, roots
from jls._tools.origin.advice import (
    CAME_IN,
    NORM_OVERFLOWS,
    WRITTEN,
    advise,
    dtype_of,
    is_of_entropy,
)
from jls._tools.origin.measure import Size
from jls._tools.origin.record import RecordedProgram, TwoPrograms, makers_of
from jls._tools.origin.result import (
    ARGUMENT,
    CONSTANT,
    DIVERGED,
    FAR_TOO_LARGE,
    IN_FLOAT32,
    Birth,
    Why,
)
from jls._tools.origin.roots import CheckedValues, before_update, checked_values
from jls._tools.origin.trail import (
    Argument,
    FoundBirth,
    LostError,
    OpResult,
    Range,
    RunValue,
    Trail,
)
from jls._tools.reading.arguments import (
    Arguments,
    Item,
    items_of,
    open_call,
)
from jls._tools.reading.flow import THROUGH_BACKWARD, THROUGH_UPDATE
from jls._tools.reading.keep import argument_of
from jls._tools.reading.patience import logging_if_slow
from jls._tools.reading.reading import Reading
from jls._tools.reading.scales import Scale, is_switched_off, scales_in, without_value
from jls._tools.reading.trace import ALL, READS, Traced, trace
from jls._tools.reading.widths import Widths
from jls._tree import is_array
from jls._types import SkipReason, skip_reason_of

AnyProgram = RecordedProgram | TwoPrograms
# Of the lowest loss scale that is tried, 2^-24: the smallest float16. A lower one is 0
# when cast to float16.
LOWEST_EXPONENT = -24
# Each argument with NaN in it is tried alone, in a run of its own.
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
        return Case("jls.why", fun, args, kwargs).why()


_SLOW = (
    "jls.why is compiling and running the function with a record beside each "
    "operation; this takes two to four times as long as to compile it alone."
)


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


class Bad(NamedTuple):
    """A root that is not finite."""

    value: RunValue
    role: str  # in the wrapper; of a result its name
    position: int  # among those of its role
    checked: CheckedValues | None  # None of a result


class Case:
    """A function and its arguments, with the runs of its program."""

    def __init__(
        self,
        tool: str,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.fun, args, self.arguments = open_call(tool, "call", fun, args, kwargs)
        for item in self.arguments.items:
            _validate.concrete(item.name, item.value)
        self.traced = _traced(tool, self.fun, self.arguments)
        self.main = Frame(self.traced.program)
        inputs = self.traced.inputs
        self.leaves = [self.arguments.leaves[i] for i in inputs]
        self.scales = {
            inputs.index(scale.at): scale
            for scale in scales_in(args, kwargs, self.arguments)
            if scale.at in inputs
        }
        self.reading = Reading(self.traced, list(self.scales.values()))
        self.checked = checked_values(
            self.reading.checked, self.main, list(self.scales)
        )
        self.results = self._results()
        wanted = [x for checked in self.checked for x in checked.variables]
        self.roots = [*wanted, *self.results]
        self.landmarks = regions.landmarks(self.main, self.roots, regions.FEW)
        if effects_of(self.main.jaxpr):  # each program would print again
            self.landmarks = None
        self.recorded = self.program(only=self.landmarks)
        checked = [x for values in self.checked for x in values.before_update]
        self.before_update = checked or list(self.results)

    def program(self, **which: Any) -> RecordedProgram:
        """The program with records of its operations, see `RecordedProgram`."""
        return RecordedProgram(self.traced.program, self.main, self.roots, **which)

    def _results(self) -> dict[Variable, str]:
        """The results to check, by name, without arguments returned as they are."""
        items = [*self.traced.outputs, *self.traced.objects]
        items = [x for x in items if isinstance(x.value, _RESULTS)]
        outvars = self.main.jaxpr.outvars
        if not any(map(is_inexact_atom, outvars)):
            raise ValueError(
                "fun must return floating-point numbers, got "
                f"{len(outvars)} results without one: there is nothing to look at. "
                "Return the loss, the gradients, or what else is not finite."
            )
        names = dict[Variable, str]()
        for item, atom, value in zip(items, outvars, self.reading.results, strict=True):
            if is_literal(atom) or atom in self.main.inputs:
                continue
            # Results computed from an update follow from what the wrapper was given.
            if is_inexact_atom(atom) and not value.through & THROUGH_UPDATE:
                name = item.name
                if item not in self.traced.objects:
                    name = _result(item.path)
                names.setdefault((self.main, atom), name)
        return names

    def why(self) -> Why:
        came_in = self._came_in()
        if came_in:
            return came_in
        trail = self.run()
        bad = self.bad_roots(trail)
        if bad:
            found = self.explain(trail, bad, *self._is_from_scale(bad))
            return self._with_keep(found)
        found = self._at_higher_scales()
        if found:
            return found
        was_skipped = self._was_skipped()
        if not (was_skipped or self._is_bad_as_it_is()):
            return Why()
        self.landmarks, self.recorded = None, self.program()
        trail = self.run(compiled=False)
        bad = self.bad_roots(trail)
        if bad:
            return self.explain(trail, bad, None, _ONE_BY_ONE)
        return Why(notes=(_NOT_REPRODUCED_SKIP if was_skipped else _NOT_REPRODUCED,))

    # Runs.

    def run(
        self,
        factor: float = 1.0,
        compiled: bool = True,
        at: Iterable[int] = (),
        program: AnyProgram | None = None,
        leaves: Sequence[Any] | None = None,
    ) -> Trail:
        """One run, with the loss scales `at` these inputs multiplied by `factor`."""
        leaves = list(self.leaves if leaves is None else leaves)
        for i in at:
            scale = jnp.asarray(leaves[i], jnp.float32)  # it may be kept in float16
            leaves[i] = jnp.full_like(leaves[i], scale * jnp.float32(factor))
        return Trail((program or self.recorded)(leaves, compiled), leaves)

    def closer(
        self, trail: Trail, values: Sequence[RunValue], only_first: bool = False
    ) -> tuple[Trail, AnyProgram]:
        """A run like this one in which the births of bad values are found.

        Args:
          trail: the run.
          values: the bad values.
          only_first: whether one birth is enough.

        Returns:
          The run, and the program that was run.
        """
        if trail.shortcuts or self.landmarks is None:
            return trail, self.recorded
        wanted = makers_of(self.main, behind(self.roots))
        found = regions.search(
            trail, values, self.landmarks, wanted, regions.FEW, only_first
        )
        program: AnyProgram = self.recorded
        if found.only:
            closely = self.program(only=found.only, beside=False)
            program = TwoPrograms(self.recorded, closely)
        closer = Trail(program(trail.leaves), trail.leaves, found.shortcuts)
        with contextlib.suppress(LostError):
            if closer.births(values):
                return closer, program
        # XLA has rounded the two programs differently.
        self.landmarks, self.recorded = None, self.program()
        return self.run(leaves=trail.leaves), self.recorded

    def bad_roots(self, trail: Trail) -> list[Bad]:
        """The roots that are not finite; in loops, in the first such iteration."""
        bad = []
        for checked in self.checked:
            for role, variables in checked.found.items():
                for index, (frame, atom) in enumerate(variables):
                    every = trail.in_every_iteration(frame, atom)
                    value = next(filter(trail.is_bad, every), None)
                    if value is not None:
                        bad.append(Bad(value, role, index, checked))
        # Bad gradients make their norm and the new parameters bad too.
        for role in (roots.NEW, roots.NORM):
            bad = [x for x in bad if x.role != role] or bad
        if bad:
            return bad
        values = [
            (RunValue(*variable), name) for variable, name in self.results.items()
        ]
        return [Bad(x, name, 0, None) for x, name in values if trail.is_bad(x)]

    def _came_in(self) -> Why | None:
        """Explains NaN among the arguments, without a record of each operation.

        An argument is named if the results are finite with 0 in the place of NaN, and
        not with the NaN of this argument alone. An inf may be there on purpose. Where
        the program asks what is NaN, it may do something else with 0.
        """
        indices = [
            i
            for i, leaf in enumerate(self.leaves)
            if i not in self.scales and _holds_nan(leaf)
        ]
        if not 0 < len(indices) <= _MOST_RUNS or self._may_decide(indices):
            return None
        program = self.recorded
        if self.landmarks is None:
            program = self.program(at_roots=True)

        def bad_roots(kept: Iterable[int]) -> list[Bad]:
            leaves = list(self.leaves)
            for i in {*indices} - {*kept}:
                leaves[i] = _without_nan(leaves[i])
            return self.bad_roots(self.run(program=program, leaves=leaves))

        bad = bad_roots(indices)
        if not bad or bad_roots(()):
            return None
        found = [i for i in indices if bad_roots([i])]
        is_from_scale, note = self._is_from_scale(bad, program)
        if not found or is_from_scale:
            return None
        return Why(
            births=tuple(self._birth_of_argument("nan", i) for i in found),
            results=_loss_first(dict.fromkeys(map(self._name, bad))),
            is_from_scale=is_from_scale,
            notes=tuple(filter(None, (note,))),
        )

    def _may_decide(self, indices: Iterable[int]) -> bool:
        """Whether an integer or a flag is computed from one of these inputs.

        Those of jls do no harm. A `while` loop might not end, and what a callback does
        would be done again.
        """
        has_while = any(frame.kind == "while" for frame in self.main.all())
        if effects_of(self.main.jaxpr) or has_while:
            return True
        asked = [
            (frame, atom)
            for frame, index in self.main.operations()
            if not all(map(is_inexact_atom, frame.jaxpr.eqns[index].outvars))
            and not marks_of(frame.site_of(index))
            for atom in frame.jaxpr.eqns[index].invars
        ]
        given = {(self.main, self.main.jaxpr.invars[i]) for i in indices}
        return not given.isdisjoint(behind(asked))

    def _is_bad_as_it_is(self) -> bool:
        """Whether the function itself, on copies, gives a result that is not finite."""
        call = self.arguments.rebuild([_copy_leaf(x) for x in self.arguments.leaves])
        items = items_of(self.fun(*call.args, **call.kwargs))
        found = {without_value(x.path): x.value for x in [*items, *call.read()]}
        applied = {path: x for path, x in found.items() if path[-1:] == ("applied",)}
        if applied:
            return any(
                not np.all(x)
                and np.any(found.get((*path[:-1], "last_skip_reason")) != _SPIKE)
                for path, x in applied.items()
            )
        floats = [
            x.value for x in items if is_array(x.value) and is_inexact_atom(x.value)
        ]
        return not all(bool(jnp.all(jnp.isfinite(x))) for x in floats)

    # The loss scale.

    def _is_from_scale(
        self, bad: list[Bad], program: RecordedProgram | None = None
    ) -> tuple[bool | None, str]:
        """Whether a lower scale is finite, and a sentence that says which."""
        at = {x.checked.scale for x in bad if x.checked and x.checked.scale is not None}
        at = [
            i
            for i in at or self.scales
            if not is_switched_off(self.leaves[i], self.scales[i])
        ]
        if not at:
            return None, ""
        scale = max(float(np.max(self.leaves[i])) for i in at)
        if not 0 < scale < math.inf:
            return None, f"The loss scale is {scale}: no gradient can be finite"
        worse, better = 0, max(1, math.ceil(math.log2(scale)) - LOWEST_EXPONENT)

        def is_finite(halvings: int) -> bool:
            trail = self.run(2.0**-halvings, at=at, program=program)
            return not self.bad_roots(trail)

        if not is_finite(better):
            lowest = scale_in_words(min(2.0**LOWEST_EXPONENT, scale / 2))
            return False, f"No loss scale mends it: it is there at {lowest} too"
        while better - worse > 1:
            middle = (better + worse) // 2
            if is_finite(middle):
                better = middle
            else:
                worse = middle
        return True, (
            f"It is the loss scale of {scale_in_words(scale)}: at "
            f"{scale_in_words(scale * 2.0**-better)} all of this is finite, at "
            f"{scale_in_words(scale * 2.0**-worse)} it is not. A dynamic scale "
            "comes down by itself, if its min_scale lets it. This is what overflows "
            "first"
        )

    def _at_higher_scales(self) -> Why | None:
        """Explains skips from which the scale has backed off since."""
        for at, scale in self.scales.items():
            for doublings in range(1, self._backoffs(scale) + 1):
                factor = 2.0**doublings
                now = float(np.max(self.leaves[at]))
                if not now * factor <= 2.0**126:
                    break
                trail = self.run(factor, at=[at])
                bad = self.bad_roots(trail)
                if bad:
                    note = (
                        f"The last step was skipped at a higher loss scale: at "
                        f"{scale_in_words(now)} all of this is finite, at "
                        f"{scale_in_words(now * factor)} it is not. The "
                        "scale has come down since, and there is nothing to mend. "
                        "This overflowed first"
                    )
                    return self.explain(trail, bad, True, note)
        return None

    def _backoffs(self, scale: Scale) -> int:
        """The largest number of backoffs since the last good step."""
        leaves = self.arguments.leaves
        if scale.is_static:
            return 0
        if not scale.counters:
            finite = scale.fields.get("finite_count")
            return int(finite is not None and not np.any(np.asarray(leaves[finite])))
        if self._skip_reason(scale) in (SkipReason.GRADIENTS, SkipReason.NONE):
            return int(np.max(leaves[scale.counters["consecutive_skips"]]))
        return 0

    def _was_skipped(self) -> bool:
        reasons = [self._skip_reason(x) for x in self.scales.values() if x.counters]
        return any(x not in (None, SkipReason.SPIKE) for x in reasons)

    def _skip_reason(self, scale: Scale) -> SkipReason | None:
        """Why the last step was skipped; None if it was not."""
        leaves = self.arguments.leaves
        if not np.any(np.asarray(leaves[scale.counters["consecutive_skips"]])):
            return None
        reason = scale.counters.get("last_skip_reason")
        if reason is None:
            return SkipReason.NONE
        return skip_reason_of(int(np.max(leaves[reason])))

    # Words.

    def explain(
        self, trail: Trail, bad: list[Bad], is_from_scale: bool | None, note: str = ""
    ) -> Why:
        trail, _ = self.closer(trail, [x.value for x in bad])
        found = trail.births([x.value for x in bad])
        forward = self.forward()
        births: dict[Any, Birth] = {}
        for one in found:
            birth = self._birth(trail, one, forward)
            births.setdefault((birth.kind, birth.place._replace(iteration=())), birth)
        if any(is_of_entropy(x.advice) for x in births.values()):
            # The logarithm alone needs no mending: it is the product that does.
            is_log = "log", "log1p"
            births = {
                key: x._replace(advice="") if x.place.operation in is_log else x
                for key, x in births.items()
            }
        first = next(iter(births.values()), None)
        is_overflow = first and max(first.operands, default=0) >= _FAR_TOO_LARGE
        diverged = self._diverged(bad) if is_overflow and not is_from_scale else ""
        return Why(
            births=tuple(births.values()),
            results=_loss_first(dict.fromkeys(map(self._name, bad))),
            is_from_scale=is_from_scale,
            notes=tuple(filter(None, (diverged, note))),
        )

    @functools.cached_property
    def widths(self) -> Widths:
        """The program with the width of its products as an argument."""
        return Widths(self.traced.program, self.main, self.before_update)

    def leaves_at(self, scale: float) -> list[Any]:
        """The inputs, with this for each loss scale that is not switched off."""
        leaves = list(self.leaves)
        for i, one in self.scales.items():
            if not is_switched_off(leaves[i], one):
                leaves[i] = jnp.full_like(leaves[i], scale)
        return leaves

    def _with_keep(self, found: Why) -> Why:
        """The same, or the `keep` with which it is finite: then no line is to blame."""
        if found.is_from_scale or found.is_early:
            return found
        is_for_a_scale = all(
            x.place.is_backward and x.dtype == "float16" for x in found.births
        )
        if is_for_a_scale and found.is_from_scale is None:  # there is none yet
            return found
        keep = self.widths.keep(self.leaves_at(2.0**LOWEST_EXPONENT))
        if keep is None:
            return found
        write = argument_of(keep) or "jls.calibrate finds the keep"
        return found._replace(
            births=tuple(x._replace(advice="") for x in found.births),
            notes=(f"{IN_FLOAT32}: {write}", *found.notes),
        )

    def _diverged(self, bad: list[Bad]) -> str:
        """A sentence on parameters that came in far too large; "" if none did."""
        items, is_known = list[Item](), True
        for checked in {id(x.checked): x.checked for x in bad if x.checked}.values():
            scale = None if checked.scale is None else self.scales.get(checked.scale)
            items += self._items_of(checked.found.get(roots.GRADIENTS, []), scale)
        if not self.checked:  # a loss or its gradient, not a step
            items = self._items_of([x for x in self.results if x[1] in self.backward])
            is_known, first = bool(items), self.arguments.names[:1]
            items = items or [x for x in self._inexact if x.path[0] in first]
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
                f"{FAR_TOO_LARGE} {largest:.2g} ({name}). If that is a parameter, the "
                f"run diverged before. {write}"
            )
        return (
            f"{DIVERGED} {largest:.2g} ({name}): the run diverged before, and no line "
            f"is to blame. {write}"
        )

    def _birth(
        self, trail: Trail, found: FoundBirth, forward: set[Variable] | None
    ) -> Birth:
        kind: Literal["inf", "nan"] = "nan" if found.size.is_nan else "inf"
        origin = found.origin
        if isinstance(origin, Argument):
            return self._birth_of_argument(kind, origin.position)
        if not isinstance(origin, OpResult):
            reader = origin.reader
            place = place_of(reader.site) if reader else Place("")
            iterations = reader.iterations if reader else ()
            place = place._replace(operation=CONSTANT, iteration=iterations)
            return Birth(kind, place, advice=WRITTEN)
        site = origin.site
        place = place_of(site)
        is_backward = place.is_backward
        if forward is not None and UPDATE not in marks_of(site):
            results = site.equation.outvars
            is_backward |= not any((origin.frame, x) in forward for x in results)
        return Birth(
            kind=kind,
            place=place._replace(is_backward=is_backward, iteration=origin.iterations),
            operands=tuple(
                _magnitude(trail.size(x), kind)
                for x in found.operands
                if trail.is_known(x)
            ),
            dtype=str(dtype_of(origin)),
            range=_ends(found.range),
            advice=NORM_OVERFLOWS
            if GRADIENTS in marks_of(site)
            else advise(trail, found, is_backward),
        )

    def _birth_of_argument(self, kind: Literal["inf", "nan"], index: int) -> Birth:
        item = self.arguments.items[self.traced.inputs[index]]
        place = Place(ARGUMENT, module=item.name)
        dtype = str(jnp.result_type(item.value))
        return Birth(kind, place, (), dtype, advice=CAME_IN)

    def forward(self) -> set[Variable] | None:
        """The variables that the loss comes from; None if the loss is not known."""
        losses = [
            variable for x in self.checked for variable in x.found.get(roots.LOSS, ())
        ]
        forward = [x for x in self.results if x[1] not in self.backward]
        if not losses and len(forward) == len(self.results):
            return None
        losses += forward
        if not losses:  # a gradient alone does not use it: it is computed and dropped
            unused = self.main.unused(lambda x, i: not is_transposed(x.site_of(i)))
            losses = list(unused)
        return behind(losses, before_update)

    @functools.cached_property
    def backward(self) -> set[Any]:
        """The results that a backward pass makes."""
        pairs = zip(self.main.jaxpr.outvars, self.reading.results, strict=True)
        return {
            x
            for x, value in pairs
            if not is_literal(x) and value.through & THROUGH_BACKWARD
        }

    def _name(self, bad: Bad) -> str:
        """The name of a root in the text."""
        if bad.checked is None:
            return bad.role
        scale = (
            None if bad.checked.scale is None else self.scales.get(bad.checked.scale)
        )
        name = {
            roots.LOSS: "loss",
            roots.NORM: roots.NORM,
            roots.CHECKED: "what is checked for inf and NaN",
        }.get(bad.role)
        if name is None:
            known = self._names_of(bad.checked.found[bad.role], scale)
            one = bad.role.removesuffix("s")
            name = f"{one} of {known[bad.position]}" if known else bad.role
        if scale and len(self.scales) > 1:
            name += f" ({join(*scale.path)})"
        return name

    def _names_of(
        self, variables: Sequence[Variable], scale: Scale | None
    ) -> list[str]:
        """The names of the parameters of these gradients; [] if that is unclear."""
        items = self._items_of(variables, scale)
        return [join(*x.path[1:]) or x.path[0] for x in items]

    @property
    def _inexact(self) -> list[Item]:
        """The arguments that may be parameters."""
        states = [x.path for x in self.scales.values()]
        return [
            x
            for x in self.arguments.items
            if is_array(x.value)
            and is_inexact_atom(x.value)
            and x.variable_type in ("", "Param")
            and not any(x.path[: len(root)] == root for root in states)
        ]

    def _items_of(
        self, variables: Sequence[Variable], scale: Scale | None = None
    ) -> list[Item]:
        """The parameters with the shapes of these gradients; [] if that is unclear."""
        shapes, items = [atom.aval.shape for _, atom in variables], self._inexact
        found = []
        for start in range(len(items) - len(shapes) + 1):
            part = items[start : start + len(shapes)]
            is_one = len({x.path[0] for x in part}) == 1
            if is_one and [np.shape(x.value) for x in part] == shapes:
                found.append(part)
        if scale and len(self.scales) > 1:  # "critic" in both paths
            own = set(scale.path[1:])
            found = [x for x in found if own & set(x[0].path)] or found[:1]
        return found[0] if found and shapes else []


def _loss_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: name.split(" (")[0] != "loss"))


_SPIKE = SkipReason.SPIKE
_RESULTS = (jax.ShapeDtypeStruct, np.ndarray)
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


def _traced(tool: str, fun: Callable[..., Any], arguments: Arguments) -> Traced:
    try:
        return trace(fun, arguments, ALL)
    except READS as error:
        error.add_note(
            f"{tool} traces the function, as jax.jit does: it cannot read values at "
            "the host. Pass the part that is jitted."
        )
        raise


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


def _result(path: Sequence[str]) -> str:
    """A result by its path, such as "result[1].mu"."""
    keys = [f"[{key}]" if key.isdigit() else f".{key}" for key in path]
    return f"result{''.join(keys)}" if keys else "the result"


def _holds_nan(leaf: Any) -> bool:
    return is_inexact_atom(leaf) and bool(np.isnan(np.asarray(leaf)).any())


def _without_nan(leaf: Any) -> Any:
    """An array with 0 in the place of NaN, in the place of `leaf`."""
    array = np.asarray(leaf)
    array = np.where(np.isnan(array), np.zeros((), array.dtype), array)
    is_placed = getattr(leaf, "committed", False)
    return jax.device_put(array, leaf.sharding) if is_placed else array


def _copy_leaf(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf
