# SPDX-License-Identifier: Apache-2.0
"""Traces a step and reads its program twice: as it is, and with every step skipped."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jls import _validate
from jls._audit.arguments import Arguments, Item, items_of
from jls._audit.flow import Call, Flow, Same, Value
from jls._audit.leaves import Scale
from jls._mistakes import eager_steps_allowed
from jls._program.jaxprs import opened
from jls._program.walk import walk
from jls._tree import is_array

_READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    _validate.TracedError,
)
# More operations than this outside of any jit: the step is not jitted.
_MANY = 64


class Traced(NamedTuple):
    """The program of a step."""

    program: Any
    inputs: list[int]  # the index of the leaf for each input
    outputs: list[Item]  # what it returned; arrays as shapes and dtypes
    objects: list[Item]  # what is in its NNX arguments afterwards, likewise
    reads: bool  # whether it asks for values at the host without computing with them

    @property
    def is_jitted(self) -> bool:
        return len(opened(self.program).jaxpr.eqns) <= _MANY


class Unread(NamedTuple):
    """Why there is no program to read."""

    reason: str
    reads: str = ""  # how the step reads values at the host, "" if it does not


def trace(step: Callable[..., Any], arguments: Arguments) -> Traced | Unread:
    """The program of a step, from abstract arrays; nothing is computed.

    Numpy arrays are abstract too, as under `jax.jit`, unless the step computes with
    them at the host, which is right.
    """
    if isinstance(step, jax.stages.Compiled):
        return Unread("the step is compiled ahead of time")
    leaves = arguments.leaves
    for kinds in ((jax.Array, np.ndarray), (jax.Array,)):
        inputs = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]
        found = _trace(step, arguments, inputs)
        if isinstance(found, Traced) or not found.reads:
            break
    return found


def _trace(
    step: Callable[..., Any], arguments: Arguments, inputs: list[int]
) -> Traced | Unread:
    made: list[list[Item]] = []
    rest = [None if i in set(inputs) else x for i, x in enumerate(arguments.leaves)]

    def run(arrays):
        traced = dict(zip(inputs, arrays, strict=True))
        # The step may change numpy arrays in place.
        leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in rest]
        leaves = [traced.get(i, x) for i, x in enumerate(leaves)]
        call = arguments.rebuild(leaves)
        result = step(*call.args, **call.kwargs)
        made[:] = items_of(result), call.read()
        return [x.value for items in made for x in items if is_array(x.value)]

    calls = list[None]()
    # A step under a transformation of JAX: its own effects, but no computation.
    with _noting_device_get(calls), eager_steps_allowed():
        try:
            program = jax.make_jaxpr(run)([arguments.leaves[i] for i in inputs])
        except _READS as error:
            name = type(error).__name__
            return Unread("the step reads a value at the host", reads=name)
        except Exception as error:
            return Unread(f"the step cannot be traced ({type(error).__name__})")
    outputs, objects = ([_abstract(x) for x in items] for items in made)
    return Traced(program, inputs, outputs, objects, bool(calls))


def _abstract(item: Item) -> Item:
    if not is_array(item.value):
        return item
    if not hasattr(item.value, "dtype"):
        return item._replace(value=np.asarray(item.value))
    shape, dtype = np.shape(item.value), item.value.dtype
    return item._replace(value=jax.ShapeDtypeStruct(shape, dtype))


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


class Result(NamedTuple):
    """A leaf that comes back, as the two readings have it."""

    now: Value  # in a step that is applied
    skipped: Value  # in one that every wrapper skips


class Reading:
    """What the program of a step says."""

    def __init__(self, traced: Traced, scales: Sequence[Scale]) -> None:
        self.traced, self._scales = traced, scales
        self._place = {i: n for n, i in enumerate(traced.inputs)}
        self._avals = [x.aval for x in opened(traced.program).jaxpr.invars]
        self.flow, now = self._read(frozenset())
        _, skipped = self._read(None)
        pairs = iter(map(Result, now, skipped))
        items = [*traced.outputs, *traced.objects]
        results = [next(pairs) if is_a_result(x) else None for x in items]
        count = len(traced.outputs)
        self.outputs = _by_path(traced.outputs, results[:count])
        self.objects = _by_path(traced.objects, results[count:])
        self.calls = self._calls()

    def _read(self, skipped: frozenset[int] | None) -> tuple[Flow, list[Value]]:
        places = [self._place[scale.at] for scale in self._scales]
        states = frozenset(
            self._place[i] for x in self._scales for i in x.state if i in self._place
        )
        flow = Flow(self._avals, places, states, skipped)
        return flow, walk(self.traced.program, flow.inputs, flow)

    def _calls(self) -> dict[int, list[Call]]:
        """The calls of each wrapper, by the number of its loss scale."""
        found: dict[int, list[Call]] = {}
        lost: list[Call] = []
        for call in self.flow.calls.values():
            if call.scale is None:
                lost.append(call)
            else:
                found.setdefault(call.scale, []).append(call)
        wrappers = [k for k, scale in enumerate(self._scales) if scale.counters]
        left = [k for k in wrappers if k not in found]
        for k, call in zip(left or wrappers[:1], lost, strict=False):
            found.setdefault(k, []).append(call)
        return found

    def bit(self, leaf: int) -> int:
        """The bit of a leaf of the arguments; 0 if it is not an array."""
        return 1 << self._place[leaf] if leaf in self._place else 0

    def bits_of_calls(self, scale: int) -> int:
        calls = self.calls.get(scale, [])
        return sum(self.flow.bit_of_call(call.number) for call in calls)

    @property
    def bits_of_updates(self) -> int:
        """The bits of what trains: updates; where no wrapper is, gradients."""
        calls = sum(self.flow.bit_of_call(number) for number in self.flow.calls)
        return calls or self.flow.bit_of_gradients

    def leaf_of(self, value: Value) -> int | None:
        """The leaf of the arguments that a value is, unchanged."""
        known = value.known
        return self.traced.inputs[known.number] if isinstance(known, Same) else None

    def leaves_in(self, bits: int) -> list[int]:
        """The leaves of the arguments in a set of bits."""
        return [i for n, i in enumerate(self.traced.inputs) if bits >> n & 1]


def is_a_result(item: Item) -> bool:
    """Whether the program has a result for a leaf that came back."""
    return isinstance(item.value, jax.ShapeDtypeStruct | np.ndarray)


def _by_path(
    items: Sequence[Item], results: Sequence[Result | None]
) -> dict[tuple[str, ...], Result]:
    return {x.path: y for x, y in zip(items, results, strict=True) if y is not None}
