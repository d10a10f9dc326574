# SPDX-License-Identifier: Apache-2.0
"""The trials of `jls.check_step`: good steps, then one fault at a time.

    good steps      the scale is lowered until none is skipped; then on, until the
                    parameters have moved: each fault is injected at that point
    scales          the present one and three lower ones, and four near 1; inf, and
                    2**126, where float16 overflows
    batch           NaN in one element of an array that is not carried
    afterwards      good steps, until the parameters move again
    once more       the bad step in which parameters moved: random numbers move them
                    another way

A right step is never called broken: where something else could explain what was seen,
nothing is said. In a skipped step only parameters and trees like them have to stay as
they are; all else has to stay finite, unless it only stores what came with the fault.
"""

import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jls._monitor.check_args import Path
from jls._monitor.check_carried import (
    Scale,
    as_numbers,
    as_numpy,
    has_fp8,
    own_leaves,
    same,
)
from jls._monitor.check_good_steps import (
    CODES,
    Base,
    Code,
    Findings,
    always_compiles,
    is_switched_off,
    near_one_of,
    take_good_steps,
)
from jls._monitor.check_runs import (
    Leaves,
    OutOfRunsError,
    Run,
    Runner,
    filled,
    may_take_fault,
    planted,
    reads_on_host,
    reseeded,
)
from jls._text import format_scale
from jls._tree import is_array, is_extended, is_inexact
from jls._types import SIGNALS, SpikeState

HUGE = 2.0**126  # the largest scale that `jls.set_loss_scale` takes

STUCK = "the parameters did not move"
LOST = (
    "the parameters were not found among what comes back: name all arguments that do "
    "with carried_args="
)

Exempt = Mapping[int, Any]  # the indices of the planted elements, by leaf
NONE: Exempt = {}


class Fault(NamedTuple):
    """A run with a fault."""

    what: str
    run: Run
    scale: Scale | None  # where the fault was, if in a loss scale
    exempt: Exempt
    is_in_params: bool = False


def try_all(runner: Runner, start: Leaves) -> Findings:
    """Runs the trials one after the other, until no run is left."""
    findings, good = Findings(), list[Run]()
    base = take_good_steps(runner, start, good, findings)
    if "no step" in findings.broken:
        reason = "a good step does not change all that it should"
        _leave_out_the_rest(runner, findings, reason)
        return findings
    if always_compiles(good):
        _leave_out_the_rest(runner, findings, "every call compiles")
        return findings
    if base is None:
        audit = Audit(runner, Base(start, good[0], 1), good, findings)
        params = set(runner.groups.param_leaves)
        some = "some of " if any(params & runner.changed(run) for run in good) else ""
        audit.silent = f"{some}{STUCK} in {len(good)} good steps" if params else LOST
    else:
        runner.left += 2 * base.window
        audit = Audit(runner, base, good, findings)
        audit.repeat()
    for scale in runner.scales:
        audit.try_leaks(scale)
    for scale in runner.scales:
        audit.try_overflow(scale)
    audit.find_loss()
    for scale in runner.scales:
        if scale.spikes:
            audit.try_spike(scale)
    audit.try_batch()
    audit.judge()
    if base is None:
        findings.leave_out("frozen", audit.silent)
    else:
        audit.try_going_on()
    audit.compare_devices()
    _find_host_sync(runner, start, findings)
    return findings


def _find_host_sync(runner: Runner, leaves: Leaves, findings: Findings) -> None:
    """Traces the step three times: reading every so many steps is right."""
    how = ""
    for _ in range(3):
        calls = list[None]()
        with _noting_device_get(calls):
            read, seen = reads_on_host(runner, leaves)
        if read is None:
            findings.leave_out("host sync", seen)
            return
        if not read and not calls:
            return
        how = seen or "jax.device_get"
    findings.add("host sync", f"the step reads a value of the device ({how})")


@contextlib.contextmanager
def _noting_device_get(calls: list[None]) -> Iterator[None]:
    """Notes calls of `jax.device_get` with a tracer, which it gives back as it is."""
    code = inspect.unwrap(jax.device_get).__code__
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            arguments = jax.tree.leaves(list(frame.f_locals.values()))
            calls.extend(None for x in arguments if isinstance(x, Tracer))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _leave_out_the_rest(runner: Runner, findings: Findings, reason: str) -> None:
    has_policy = any(scale.spikes for scale in runner.scales)
    for code in CODES:
        if has_policy or code != "spike not skipped":
            findings.leave_out(code, reason)


class Audit:
    """The faults, from one point, and what they show."""

    def __init__(
        self, runner: Runner, base: Base, good: list[Run], findings: Findings
    ) -> None:
        self.runner, self.base, self.good = runner, base, good
        self.findings = findings
        self.items = runner.arguments.items
        self.faults: list[Fault] = []
        self.losses: list[Path] = []  # scalars of the outputs, one of them the loss
        self.own = own_leaves(runner.scales)
        self.later: dict[str, Run] = {}  # the good step after a fault
        self.unsteady = set[int]()  # leaves that random numbers move
        self.passed_on = set[int]()  # leaves of which a fault was not judged
        self.silent = ""  # why results cannot be compared with those of a good step

    def repeat(self) -> None:
        """The good step once more: does it give the same?"""
        again = self._try(self.base.leaves, "a good step, repeated")
        compared = self.runner.carried.compared
        if again is None or not self._is_same(again, self.base.right, compared):
            self.silent = (
                "two equal calls gave different results (random numbers of the host?)"
            )

    def _try(self, leaves: Leaves, trial: str, of: Sequence[str] = ()) -> Run | None:
        """A run, or None and the reason why what it is for is not tried."""
        try:
            return self.runner.run(leaves, trial)
        except OutOfRunsError:
            reason = "no run was left"
        except Exception as error:
            reason = f"the step raised {type(error).__name__} in {trial}"
        for name in of:
            self.findings.leave_out(name, reason)
        return None

    def _is_same(self, run: Run, other: Run, leaves: Any) -> bool:
        return all(same(run.after[i], other.after[i]) for i in leaves)

    def _state_floats(self) -> list[int]:
        """Carried floating-point leaves that are not jls's own."""
        leaves = self.runner.carried.compared - self.own
        return [i for i in sorted(leaves) if is_inexact(self.items[i].value)]

    # Through the loss scale.

    def try_leaks(self, scale: Scale) -> None:
        """Whether the result depends on the loss scale."""
        code: Code = "scale leaks"
        if is_switched_off(self.base.leaves, scale):
            self.findings.leave_out(code, "the scale is static and 1")
            return
        if self.silent:
            self.findings.leave_out(code, self.silent)
            return
        present = as_numpy(self.base.leaves[scale.at])
        near_one = near_one_of(self.base.leaves, scale)
        tops = [present] if np.all(near_one == present) else [present, near_one]
        single = set[str]()  # groups with one large change that leak at one place
        for top in tops:
            runs = []
            for part in (1.0, 0.5, 0.25, 0.125):
                if top is present and part == 1.0:
                    runs.append(self.base.right)
                    continue
                leaves = self.runner.set_scale(self.base.leaves, scale, top * part)
                run = self._try(leaves, "another loss scale", of=[code])
                if run is None:
                    return
                runs.append(run)
            if any(self.runner.any_skipped(run) for run in runs):
                continue
            for name, group in self.runner.groups.all.items():
                if self._leaks(runs, group):
                    if self._is_single(runs[0], group) and name not in single:
                        # Its gradient may be a few quanta of float16 by chance.
                        single.add(name)
                        continue
                    low, high = (format_scale(float(np.max(top * x))) for x in (0.5, 1))
                    self.findings.add(
                        code,
                        f"{name} differs between a loss scale of {high} and one of "
                        f"{low}, though no gradient overflowed or vanished",
                    )
                    return

    def _leaks(self, runs: list[Run], group: list[int]) -> bool:
        """Whether a group follows a power of the scale, for the most part.

        Gradients that vanish at a low scale change the result too: but they cannot do
        so in proportion, four times in a row.
        """
        vectors = [self.runner.vector(run.after, group) for run in runs]
        if not all(np.isfinite(x).all() for x in vectors):
            return False
        change = _norm(vectors[0] - self.runner.vector(self.base.leaves, group))
        gaps = [high - low for high, low in itertools.pairwise(vectors)]
        if _norm(gaps[0]) <= 0.4 * change:
            return False
        return any(
            all(
                _norm(high - ratio * low) <= 0.05 * _norm(high)
                for high, low in itertools.pairwise(gaps)
            )
            for ratio in (0.25, 0.5, 2, 4)
        )

    def _is_single(self, run: Run, group: list[int]) -> bool:
        """Whether one number, in one element or more, makes up most of the change."""
        old, new = (self.runner.vector(x, group) for x in (self.base.leaves, run.after))
        sizes = np.abs(new - old) / (np.max(np.abs(new - old)) or 1.0)
        return bool(np.sum(np.square(np.unique(np.round(sizes, 2)))) < 2)

    def try_overflow(self, scale: Scale) -> None:
        """An infinite loss scale, and the largest finite one."""
        at_inf = self._try_scale(scale, math.inf)
        if at_inf is not None:
            self._judge_not_scaled(scale, at_inf)
        at_huge = self._try_scale(scale, HUGE)
        for run in (at_inf, at_huge):
            if run is not None:
                self._judge_applied(scale, run)

    def _try_scale(self, scale: Scale, value: float) -> Run | None:
        leaves = self.runner.set_scale(self.base.leaves, scale, value)
        text = "inf" if value == math.inf else format_scale(value)
        what, right = f"a loss scale of {text}", self.base.right.after
        run = self._try(leaves, what, of=["not scaled", "not atomic"])
        if run is not None:
            seen = [as_numpy(x[scale.at]) for x in (self.base.leaves, right)]
            exempt = self._stored(run, np.append(*seen))
            self.faults.append(Fault(what, run, scale, exempt))
        return run

    def _judge_not_scaled(self, scale: Scale, run: Run) -> None:
        code: Code = "not scaled"
        if is_switched_off(self.base.leaves, scale):
            self.findings.leave_out(code, "the scale is static and 1")
        elif self.silent:
            self.findings.leave_out(code, self.silent)
        elif scale.counters and not self.runner.counted(run, scale, "steps"):
            self.findings.leave_out(code, f"the step does not use {scale.name}")
        elif not self.runner.any_skipped(run) and self._is_same(
            run, self.base.right, self._state_floats()
        ):
            where = f" in {scale.name}" if len(self.runner.scales) > 1 else ""
            self.findings.add(
                code,
                f"with the loss scale{where} at inf the step came out as before: its "
                "gradients were not scaled by that state",
            )
        elif scale.counters and not self.runner.counted(run, scale, "skips"):
            others = [x for x in self.runner.scales if x.counters and x is not scale]
            for other in others:
                if self.runner.counted(run, other, "skips"):
                    self.findings.add(
                        code,
                        f"with the loss scale in {scale.name} at inf its own step was "
                        f"applied, and that of {other.name} was skipped: the gradients "
                        f"of {other.name} were scaled by {scale.name}",
                    )

    def _judge_applied(self, scale: Scale, run: Run) -> None:
        """A step whose gradients overflowed, and which nobody told of it."""
        told = self.runner.backed_off(run, scale)
        if scale.counters:
            told = told or self.runner.counted(run, scale, "skips") > 0
        explained = {"scale leaks", "not scaled"} & self.findings.broken.keys()
        # The gradients of fp8 layers are clipped, rightly.
        if told or explained or self.silent or has_fp8(self.items):
            return
        # A bare static scale never tells: `jls.select` may have kept the parameters.
        if scale.is_static and not scale.counters and not self._moved(run):
            return
        vector = self.runner.vector
        for name, group in self.runner.groups.all.items():
            right = vector(self.base.right.after, group)
            change = _norm(right - vector(self.base.leaves, group))
            wrong = _norm(vector(run.after, group) - right)
            if change and not wrong <= 0.5 * change:
                self.findings.add(
                    "nan committed",
                    f"a step whose gradients overflowed was applied, and {name} came "
                    "out wrong: something outside the wrapper cleaned or clipped them",
                    "no jnp.nan_to_num and no optax.clip before jls.loss_scaled sees "
                    "the gradients",
                )
                return

    # Through the spike policy.

    def try_spike(self, scale: Scale) -> None:
        """The good step after a window of far lower losses and norms: a spike."""
        code: Code = "spike not skipped"
        at, after = scale.spikes, self.base.right.after
        if not set(SpikeState._fields) <= at.keys():
            self.findings.leave_out(code, "the spike policy is not one of jls")
            return
        values = {name: as_numpy(after[i]).astype(np.float32) for name, i in at.items()}
        seen, last = values["seen"], values["value"]
        if seen.shape[-1] < 2:
            self.findings.leave_out(code, "the limits of the spike policy are constant")
            return
        if not np.all(values["tokens"] > 0):
            self.findings.leave_out(code, "the spike policy has no budget left, or 0")
            return
        loss, norm = (last[..., SIGNALS.index(name)] for name in ("loss", "norm"))
        if not np.all(norm > 0) or not self.runner.counted(
            self.base.right, scale, "steps"
        ):
            self.findings.leave_out(code, "a good step has no gradient to judge")
            return
        far = np.float32(2.0**40)  # however many deviations are allowed
        lower = np.stack([loss - far * (1 + np.abs(loss)), norm / far], axis=-1)
        leaves = list(self.base.leaves)
        for name, value in {
            "seen": np.repeat(lower[..., None], seen.shape[-1], axis=-1),
            "kept": seen.shape[-1],
            "tokens": np.maximum(values["tokens"], 1),
        }.items():
            leaves[at[name]] = filled(leaves[at[name]], value)
        run = self._try(leaves, "a window of far lower losses and norms", of=[code])
        if run is None:
            return
        value, limit = (as_numpy(run.after[at[name]]) for name in ("value", "limit"))
        has_limit = np.any(limit[..., SIGNALS.index("norm")] < np.inf)
        if has_limit and not np.any(value > limit):
            self.findings.leave_out(code, "no loss or norm is far enough above others")
        elif not self.runner.counted(run, scale, "spikes"):
            self.findings.add(
                code, "a step far above all that the spike policy had seen was applied"
            )
        elif np.any(values["kept"][..., 0] == 0):
            self.findings.notes[code] = "; the loss is not judged, pass value=loss"
        else:
            self.findings.notes[code] = ""

    # Through the batch.

    def find_loss(self) -> None:
        """Finds the loss among the outputs: a scalar that no loss scale makes inf.

        Of several any may be a metric, or the loss of other data: then all count.
        """
        shapes = [(), np.shape(self.base.leaves[self.runner.scales[0].at])]
        runs = [self.base.right, *(fault.run for fault in self.faults)]
        scalars = [
            item.path
            for item in self.base.right.outputs
            if is_inexact(item.value)
            and np.shape(item.value) in shapes
            and all(_is_finite(_output(run, item.path)) for run in runs)
        ]
        named = [path for path in scalars if path and path[-1] == "loss"]
        alike = [p for p in scalars if p and "loss" in p[-1]]
        plain = [p for p in scalars if all(key.isdigit() for key in p)]
        self.losses = named or alike or plain
        if not self.losses:
            self.findings.leave_out("loss not told", "the step returns no loss")

    def try_batch(self) -> None:
        """NaN in each array that is not carried; in a parameter if there is none."""
        leaves, carried = self.base.leaves, self.runner.carried.leaves
        batch = [
            i
            for i, leaf in enumerate(leaves)
            if i not in carried and self._is_input(i) and may_take_fault(leaf)
        ]
        for i in batch or self.runner.groups.param_leaves[:1]:
            path = "/".join(self.items[i].path)
            index = (0,) * np.ndim(leaves[i])
            faulty = [*leaves[:i], planted(leaves[i]), *leaves[i + 1 :]]
            run = self._try(faulty, f"NaN in {path}", of=[path])
            if run is not None:
                fault = Fault(f"NaN in {path}", run, None, NONE, i in carried)
                if fault.is_in_params:
                    exempt = {**self._from_params(run), i: index}
                else:
                    exempt = self._stored(run, as_numpy(leaves[i])[index])
                self.faults.append(fault._replace(exempt=exempt))

    def _is_input(self, i: int) -> bool:
        """Not a part of an argument that is carried, such as a field left out."""
        carried = {self.items[k].path[0] for k in self.runner.carried.leaves}
        return self.items[i].path[0] not in carried

    def _stored(self, run: Run, values: np.ndarray) -> Exempt:
        """Where the step only stored what came with a fault, as in a buffer.

        It writes a part of a leaf, and not the most of it; or the good step writes
        there one of `values`, which the fault replaced.
        """
        found = dict[int, np.ndarray]()
        for i in self.runner.nonfinite(run) - self.runner.groups.trained:
            old, new, right = (
                as_numbers(x[i]) for x in (run.before, run.after, self.base.right.after)
            )
            bad = np.isfinite(old) & ~np.isfinite(new)
            is_part = 2 * np.count_nonzero(right == old) >= right.size > 1
            dtype = self.items[i].value.dtype
            if is_part or np.isin(right[bad], as_numbers(values.astype(dtype))).all():
                found[i] = bad
        self._note_passed_on(found)
        return found

    def _from_params(self, run: Run) -> Exempt:
        """What a model with NaN in a parameter computed, such as an actor; and copies.

        No step of a right program begins with such parameters.
        """
        found = self.runner.nonfinite(run)
        trained = found & self.runner.groups.trained
        found -= trained - self._copies_of_params(run, trained)
        self._note_passed_on(found)
        return {i: ~np.isfinite(as_numbers(run.after[i])) for i in found}

    def _note_passed_on(self, leaves: Iterable[int]) -> None:
        self.passed_on |= set(leaves)
        if self.passed_on:
            self.findings.notes["nan committed"] = (
                f", but for {self.runner.names(self.passed_on)}: what is only stored, "
                "or computed from parameters with NaN, was not judged"
            )

    # What the faults show.

    def judge(self) -> None:
        for fault in self.faults:
            self._judge_nonfinite(fault)
            self._judge_atomic(fault)
            self._judge_loss(fault)
        if not any(self.runner.all_skipped(fault.run) for fault in self.faults):
            self.findings.leave_out("not atomic", "no fault made the step skip")
        if not any(self._loss_is_bad(fault.run) for fault in self.faults):
            self.findings.leave_out(
                "loss not told", "no fault made the loss inf or NaN"
            )

    def _loss_is_bad(self, run: Run) -> bool:
        """Whether the loss was inf or NaN, whichever of the candidates it is."""
        bad = [not _is_finite(_output(run, path)) for path in self.losses]
        return bool(bad) and all(bad) and self._reached_training(run)

    def _reached_training(self, run: Run) -> bool:
        """Whether a fault in the batch did more than spoil a metric."""
        if self.runner.any_skipped(run):
            return True
        params = self.runner.groups.param_leaves
        return not self.silent and not self._is_same(run, self.base.right, params)

    def _judge_nonfinite(self, fault: Fault) -> None:
        if self.losses:
            values = [_output(fault.run, path) for path in self.losses]
            if all(map(_is_finite, values)) or not self._reached_training(fault.run):
                return
        elif fault.is_in_params:
            return
        bad = self._kept(fault, "nan committed")
        bad -= self.runner.nonfinite(self.base.right)
        if bad:
            self.findings.add(
                "nan committed",
                f"after {fault.what} an inf or NaN stayed in {self.runner.names(bad)}",
            )

    def _kept(self, fault: Fault, code: Code) -> set[int]:
        """Where an inf or NaN is new, and stays: a record of the last loss does not."""
        bad = self.runner.nonfinite(fault.run, fault.exempt)
        trained = self.runner.groups.trained
        if bad <= trained:
            return bad
        later = self._good_step_after(fault, code)
        if later is None:
            return bad & trained
        since = later._replace(before=self.base.leaves)
        return bad & (trained | self.runner.nonfinite(since, fault.exempt))

    def _good_step_after(self, fault: Fault, code: Code) -> Run | None:
        run = self.later.get(fault.what)
        if run is None:
            leaves = self.runner.put_back(fault.run.after, self.base.leaves)
            for i in fault.exempt:
                leaves[i] = self.base.leaves[i]
            run = self._try(leaves, f"a good step after {fault.what}", of=[code])
            if run is not None:
                self.later[fault.what] = run
        return run

    def _judge_atomic(self, fault: Fault) -> None:
        code: Code = "not atomic"
        if code in self.findings.broken or not self.runner.all_skipped(fault.run):
            return
        if self._has_lookahead():
            self.findings.leave_out(
                code, "optax.lookahead, outside, moves parameters in skipped steps too"
            )
            return
        changed = {
            i
            for i in self.runner.changed(fault.run, fault.exempt)
            if i in self._state_floats() and not self._may_move(fault.run, i)
        }
        spoiled = self.runner.nonfinite(fault.run, fault.exempt) & changed
        moved = (changed - spoiled) & self.runner.groups.trained
        moved -= self._copies_of_params(fault.run, moved) | self.unsteady
        steady = self._steady(fault, moved)
        self.unsteady |= moved - steady
        bad = steady | (self._kept(fault, code) & spoiled)
        if bad:
            self.findings.add(
                code,
                f"{fault.what}: the step was skipped, but it changed "
                f"{self.runner.names(bad)}",
            )
        elif changed - spoiled:
            self.findings.notes.setdefault(
                code,
                f", but for {self.runner.names(changed - spoiled)}: taken for data or "
                "noise, else write new = jls.select(opt_state.applied, new, old)",
            )

    def _copies_of_params(self, run: Run, leaves: set[int]) -> set[int]:
        """Those that the step made equal to parameters that it kept."""
        params = self.runner.groups.param_leaves
        kept = [k for k in params if same(run.before[k], run.after[k])]
        return {
            i
            for i in leaves
            for k in kept
            if np.shape(run.after[i]) == np.shape(run.after[k])
            and same(run.after[i], run.after[k])
        }

    def _steady(self, fault: Fault, leaves: set[int]) -> set[int]:
        """Those that the next bad step moves the same way: random numbers do not."""
        if not leaves:
            return set()
        again = self.runner.put_back(fault.run.after, fault.run.before)
        for i in set(range(len(again))) - self.runner.carried.leaves:
            again[i] = reseeded(again[i])
        run = self._try(again, f"{fault.what}, once more", of=["not atomic"])
        if run is None:
            return set()
        trees = [leaves & set(tree) for tree in self.runner.groups.all.values()]
        return {
            i
            for tree in trees
            if tree and _is_parallel(*(self._move(x, tree) for x in (fault.run, run)))
            for i in tree
        }

    def _move(self, run: Run, leaves: set[int]) -> np.ndarray:
        old, new = (
            self.runner.vector(x, sorted(leaves)) for x in (run.before, run.after)
        )
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(new - old, posinf=0.0, neginf=0.0)

    def _has_lookahead(self) -> bool:
        """Whether `optax.lookahead` is around the wrapper, where it belongs."""
        return any("steps_since_sync" in item.path for item in self.items)

    def _may_move(self, run: Run, i: int) -> bool:
        """What no gradient moves: a count, a schedule, the state of a simulation.

        It moved as it does in a good step, and is neither a parameter nor like one.
        Rounding alone is no move either: weights that are normalized in each step.
        """
        old, new, right = (
            as_numpy(x[i]) for x in (run.before, run.after, self.base.right.after)
        )
        if old.ndim == 0 and bool(new == old + 1):
            return True
        groups = self.runner.groups
        trained = groups.trained
        if len(groups.params) > len(self.runner.scales):
            # Of more trees than wrappers one may be something else.
            trained -= set(groups.param_leaves)
        if (old.ndim == 0 or i not in trained) and same(new, right):
            return True
        return _is_rounding(old, new)

    def _judge_loss(self, fault: Fault) -> None:
        wrappers = [x for x in self.runner.scales if x.counters and not x.is_static]
        if not wrappers:
            self.findings.leave_out(
                "loss not told",
                "there is no loss scale that moves",
            )
        elif self._has_lookahead():
            self.findings.leave_out(
                "loss not told", "optax.lookahead, outside, does not pass value= on"
            )
        elif self._loss_is_bad(fault.run):
            called = any(self.runner.counted(fault.run, x, "steps") for x in wrappers)
            counts = [
                self.runner.counted(fault.run, x, "nonfinite_losses")
                for x in self.runner.scales
                if x.counters
            ]
            if called and not any(counts):
                self.findings.add(
                    "loss not told",
                    f"after {fault.what} the loss was not finite, but the optimizer "
                    "took the step for an overflow, or applied it",
                )

    # Afterwards.

    def try_going_on(self) -> None:
        """Good steps after a bad one: do the parameters move again?"""
        code: Code = "frozen"
        bad = [fault for fault in self.faults if self._did_harm(fault)]
        if not bad:
            self.findings.leave_out(code, "no fault had an effect")
        in_scale = [fault for fault in bad if fault.scale]
        in_batch = [fault for fault in bad if not fault.scale]
        for fault in in_scale[:1] + in_batch[:1]:
            run = self._good_step_after(fault, code)
            for _ in range(self.base.window):
                if run is None or self._moved(run):
                    break
                leaves = self.runner.put_back(run.after, self.base.leaves)
                trial = f"a good step after {fault.what}"
                run = self._try(leaves, trial, of=[code])
            if run is None:
                return
            if not self._moved(run):
                self._add_frozen(fault)

    def _did_harm(self, fault: Fault) -> bool:
        if self.runner.any_skipped(fault.run):
            return True
        reached = fault.scale is not None or self._reached_training(fault.run)
        return reached and bool(self.runner.nonfinite(fault.run))

    def _moved(self, run: Run) -> bool:
        """Whether any parameter is other than before."""
        params = self.runner.groups.param_leaves
        return any(not same(run.before[i], run.after[i]) for i in params)

    def _add_frozen(self, fault: Fault) -> None:
        kept = self.runner.nonfinite(fault.run, fault.exempt)
        cause = f": {self.runner.names(kept)} kept an inf or NaN" if kept else ""
        self.findings.add(
            "frozen",
            f"after {fault.what} no good step moved the parameters any more{cause}",
        )

    # Devices.

    def compare_devices(self) -> None:
        """Whether all devices hold the same, of what they hold together."""
        code: Code = "out of sync"
        devices = {
            device
            for i in self.runner.carried.leaves
            if isinstance(self.base.right.after[i], jax.Array)
            for device in self.base.right.after[i].sharding.device_set
        }
        if len(devices) < 2:
            self.findings.leave_out(code, "everything carried is on one device")
            return
        stacked = self._stacked()
        if stacked is None:
            self.findings.leave_out(code, "each device has parameters of its own")
        if self._add_parted(_copies_differ, self.runner.carried.compared):
            return
        if stacked and self._part_in_a_good_step(stacked):
            self.findings.leave_out(
                code, "each device seems to train a model of its own"
            )
        elif stacked:
            self._add_parted(_rows_differ, stacked & self.runner.carried.compared)

    def _add_parted(
        self, differs: Callable[[Any], bool], leaves: Iterable[int]
    ) -> bool:
        """Adds what devices hold differently after the first run in which they do."""
        for what, run in [
            *(("a good step", run) for run in self.good),
            *((fault.what, fault.run) for fault in self.faults),
        ]:
            bad = {i for i in leaves if differs(run.after[i])}
            if bad:
                self.findings.add(
                    "out of sync",
                    f"after {what} devices hold different values of "
                    f"{self.runner.names(bad)}",
                )
                return True
        return False

    def _part_in_a_good_step(self, stacked: set[int]) -> bool:
        """Whether copies part where nothing was skipped: other seeds or rates.

        Gradients of which no mean was taken look the same.
        """
        return any(
            _rows_differ(run.after[i])
            for run in self.good
            if not self.runner.any_skipped(run)
            for i in stacked - self.own
        )

    def _stacked(self) -> set[int] | None:
        """What `pmap` stacked, one copy a device; None if the copies never agreed."""
        if np.ndim(self.base.leaves[self.runner.scales[0].at]) == 0:
            return set()
        groups = self.runner.groups
        if any(_rows_differ(self.good[0].before[i]) for i in groups.param_leaves):
            return None
        return {i for x in groups.all.values() for i in x} | self.own


def _output(run: Run, path: tuple[str, ...]) -> Any:
    return next((x.value for x in run.outputs if x.path == path), None)


def _is_finite(value: Any) -> bool:
    return value is not None and bool(np.isfinite(as_numpy(value)).all())


def _is_rounding(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether two arrays differ by 4 units in the last place at most; narrow ones 1."""
    eps = float(jnp.finfo(old.dtype).eps)
    most = 4 * eps if eps < 1e-5 else eps
    x, y = as_numbers(old), as_numbers(new)
    with np.errstate(invalid="ignore", over="ignore"):
        return same(old, new) or bool(np.all(np.abs(x - y) <= most * np.abs(x)))


def _is_parallel(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two moves have one direction; few numbers may have that by chance."""
    if first.size < 4:
        return _norm(second - first) <= 0.1 * _norm(first)
    return float(first @ second) >= 0.9 * _norm(first) * _norm(second)


def _norm(vector: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(vector))


def _copies_differ(leaf: Any) -> bool:
    """Whether devices hold different bits of the same part of an array."""
    if not isinstance(leaf, jax.Array):
        return False
    if is_extended(leaf):
        leaf = jax.random.key_data(leaf)
    first: dict[str, bytes] = {}
    for shard in leaf.addressable_shards:
        bits = np.asarray(shard.data).tobytes()
        if first.setdefault(str(shard.index), bits) != bits:
            return True
    return False


def _rows_differ(leaf: Any) -> bool:
    rows = as_numpy(leaf) if is_array(leaf) else np.zeros(1)
    return any(not same(rows[0], row) for row in rows[1:])
