# SPDX-License-Identifier: Apache-2.0
"""Runs a step on copies of its arguments, and notes what each run did."""

import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jls._mistakes import eager_steps_allowed
from jls._monitor.check_args import Arguments, Item, items_of
from jls._monitor.check_carried import (
    Carried,
    Groups,
    Probe,
    Scale,
    as_numbers,
    as_numpy,
    find_groups,
    like,
    match,
    own_leaves,
    probe_leaves,
    same,
)
from jls._tree import is_array, is_extended, is_inexact

Leaves = list[Any]

# A loop or a branch outside of jit is compiled in each call; that is not the step.
_LOOPS = ("jit(scan)", "jit(while)", "jit(cond)")

_COMPILED: contextvars.ContextVar[list[str] | None]
_COMPILED = contextvars.ContextVar("_COMPILED", default=None)


class OutOfRunsError(Exception):
    """No run is left."""


class Run(NamedTuple):
    """What one run of the step did."""

    before: Leaves  # all leaves of the arguments
    after: Leaves  # the same, with those that came back
    outputs: list[Item]  # what else the step returned
    compiled: bool


class Runner:
    """Runs the step; knows what it carries and how many runs are left."""

    def __init__(
        self,
        step: Callable[..., Any],
        arguments: Arguments,
        scales: Sequence[Scale],
        named: Mapping[str, Sequence[str] | None] | None,
        runs: int,
    ) -> None:
        self.step, self.arguments, self.scales = step, arguments, scales
        self._named, self.left = named, runs
        self._carried: Carried | None = None
        self._probe: Probe | None = None

    @property
    def carried(self) -> Carried:
        assert self._carried is not None
        return self._carried

    @functools.cached_property
    def groups(self) -> Groups:
        return find_groups(self.arguments, self.carried, self.scales)

    def run(self, leaves: Sequence[Any], trial: str) -> Run:
        """One call of the step with copies of `leaves`."""
        if self._carried is None and self._probe is None:
            self._probe = self._try_probe()
        outputs, objects, compiled = self._call(leaves, trial)
        if self._carried is None:
            scales, named, probe = self.scales, self._named, self._probe
            self._carried = match(
                self.arguments, outputs, objects, scales, named, probe
            )
        after = self._after(leaves, outputs, objects)
        taken = set(self.carried.sources.values())
        others = [item for item in outputs if item.path not in taken]
        return Run(list(leaves), after, others, compiled)

    def _try_probe(self) -> Probe | None:
        """A step from trees that all differ, with the loss scales at inf."""
        leaves = probe_leaves(self.arguments.items, self.scales)
        for scale in self.scales:
            leaves = self.set_scale(leaves, scale, np.inf)
        try:
            outputs, _, _ = self._call(leaves, "with the loss scale at inf")
        except Exception:  # the good step will raise it, if it is more than the fault
            return None
        before = dict(zip([x.path for x in self.arguments.items], leaves, strict=True))
        return Probe(before, {item.path: item.value for item in outputs})

    def _call(
        self, leaves: Sequence[Any], trial: str
    ) -> tuple[list[Item], list[Item], bool]:
        """What the step returned and left in NNX objects; whether it compiled."""
        if self.left <= 0:
            raise OutOfRunsError
        self.left -= 1
        call = self.arguments.rebuild(leaves)
        names: list[str] = []
        _listen()
        token = _COMPILED.set(names)
        try:
            with eager_steps_allowed():
                result = self.step(*call.args, **call.kwargs)
        except Exception as error:
            error.add_note(f"jls.check_step ran the step on copies: {trial}.")
            raise
        finally:
            _COMPILED.reset(token)
        compiled = any(name not in _LOOPS for name in names)
        return items_of(result), call.read(), compiled

    def _after(
        self, leaves: Sequence[Any], outputs: Sequence[Item], objects: Sequence[Item]
    ) -> Leaves:
        after = list(leaves)
        returned = {item.path: item.value for item in outputs}
        for i, path in self.carried.sources.items():
            after[i] = returned[path]
        in_place = {item.path: item.value for item in objects}
        for i in self.carried.in_place:
            # What the copies hold now, in buffers that no later run donates.
            after[i] = in_place.get(self.arguments.items[i].path, leaves[i])
        return after

    # Loss scales.

    def set_scale(self, leaves: Leaves, scale: Scale, value: Any) -> Leaves:
        """`leaves` with another loss scale, and the count of finite steps at 0."""
        new = list(leaves)
        new[scale.at] = filled(leaves[scale.at], value)
        count = scale.fields.get("finite_count")
        if count is not None:  # below 0 steps do not count yet
            new[count] = filled(leaves[count], np.minimum(as_numpy(leaves[count]), 0))
        return new

    def put_back(self, leaves: Leaves, base: Leaves) -> Leaves:
        """`leaves` with the scaler states and all that is not carried as in `base`."""
        kept = self.carried.leaves - {i for x in self.scales for i in x.state}
        return [leaves[i] if i in kept else base[i] for i in range(len(base))]

    # What a run did.

    def counted(self, run: Run, scale: Scale, counter: str) -> int:
        """By how much a counter of the wrapper rose."""
        at = scale.counters[counter]
        return int((as_numpy(run.after[at]) - as_numpy(run.before[at])).sum())

    def was_skipped(self, run: Run, scale: Scale) -> bool:
        """Whether every call of the wrapper in this run skipped."""
        if not scale.counters:
            return self.backed_off(run, scale)
        calls = self.counted(run, scale, "steps")
        return calls > 0 and calls == self.counted(run, scale, "skips")

    def all_skipped(self, run: Run) -> bool:
        return all(self.was_skipped(run, scale) for scale in self.scales)

    def any_skipped(self, run: Run) -> bool:
        return any(
            self.counted(run, x, "skips") > 0 if x.counters else self.backed_off(run, x)
            for x in self.scales
        )

    def was_told(self, run: Run, scale: Scale) -> bool:
        """Whether the state of the scaler is other than before."""
        return any(not same(run.before[i], run.after[i]) for i in scale.state)

    def backed_off(self, run: Run, scale: Scale) -> bool:
        """Whether the scaler was told of an overflow, as far as its state shows."""
        old, new = (as_numpy(x[scale.at]) for x in (run.before, run.after))
        if np.any(new < old):
            return True
        bad = scale.fields.get("nonfinite_count")
        if bad is not None and np.any(
            as_numpy(run.after[bad]) > as_numpy(run.before[bad])
        ):
            return True
        good = scale.fields.get("finite_count")
        if good is None or np.any(new > old):
            return False
        return not np.any(as_numpy(run.after[good]) > as_numpy(run.before[good]))

    def changed(self, run: Run, exempt: Mapping[int, Any] = {}) -> set[int]:
        """The carried leaves that are other than before."""
        return {
            i
            for i in self.carried.compared
            if not same(run.before[i], run.after[i], exempt.get(i))
        }

    def moved(self, run: Run) -> bool:
        """Whether the parameters are other than before, all trees of them."""
        trees = self.groups.params.values()
        return bool(trees) and all(
            any(not same(run.before[i], run.after[i]) for i in tree) for tree in trees
        )

    def nonfinite(self, run: Run, exempt: Mapping[int, Any] = {}) -> set[int]:
        """The carried leaves in which an inf or NaN is new; not jls's own."""
        own = own_leaves(self.scales)
        return {
            i
            for i in self.carried.compared - own
            if is_inexact(run.after[i])
            and _is_new(run.before[i], run.after[i], exempt.get(i))
        }

    def vector(self, leaves: Leaves, group: Sequence[int]) -> np.ndarray:
        return np.concatenate([as_numbers(leaves[i]).ravel() for i in group])

    def names(self, leaves: Sequence[int] | set[int]) -> str:
        """The paths of leaves, the first three of them."""
        paths = ["/".join(self.arguments.items[i].path) for i in sorted(leaves)]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return ", ".join(paths[:3]) + more


def _is_new(old: Any, new: Any, exempt: Any | None) -> bool:
    found = np.array(np.isfinite(as_numbers(old)) & ~np.isfinite(as_numbers(new)))
    if exempt is not None:
        found[exempt] = False
    return bool(found.any())


def filled(leaf: Any, value: Any) -> Any:
    """`value` in the shape, the dtype and on the devices of `leaf`."""
    return like(np.broadcast_to(np.asarray(value), np.shape(leaf)), leaf)


def planted(leaf: Any, value: float = np.nan) -> Any:
    """`leaf` with its first element replaced."""
    array = np.array(as_numpy(leaf))
    array[(0,) * array.ndim] = value
    return like(array, leaf)


def reseeded(leaf: Any) -> Any:
    """Another random key or seed; any other leaf as it is."""
    if not is_array(leaf):
        return leaf
    if is_extended(leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        data = jax.random.key_data(leaf) ^ 1
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    is_seed = getattr(leaf, "dtype", None) == np.uint32
    return like(as_numpy(leaf) ^ 1, leaf) if is_seed else leaf


def may_take_fault(leaf: Any) -> bool:
    """Whether `leaf` is a floating-point array of one dimension or more."""
    is_large = isinstance(leaf, jax.Array | np.ndarray) and leaf.size and leaf.ndim
    return (
        bool(is_large)
        and not is_extended(leaf)
        and is_array(leaf)
        and (jnp.issubdtype(leaf.dtype, jnp.floating))
    )


# Compilations.


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    names = _COMPILED.get()
    if names is not None and event.endswith("backend_compile_duration"):
        names.append(str(kwargs.get("fun_name", "")))


# Reading on the host.


def reads_on_host(runner: Runner, leaves: Sequence[Any]) -> tuple[bool | None, str]:
    """Whether the step reads a device value at the host, None if that is not known.

    It is traced with all JAX arrays abstract, and nothing is computed: a value that
    Python asks for is then an error.
    """
    if hasattr(runner.step, "lower") or isinstance(runner.step, jax.stages.Compiled):
        return False, ""  # one compiled program
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

    def traced(arrays):
        call = runner.arguments.rebuild(
            [arrays.get(i, x) for i, x in enumerate(leaves)]
        )
        runner.step(*call.args, **call.kwargs)

    try:
        jax.eval_shape(traced, arrays)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        return True, type(error).__name__
    except Exception as error:
        return None, f"the step cannot be traced ({type(error).__name__})"
    return False, ""
