# SPDX-License-Identifier: Apache-2.0
"""Traces a step and reads its program twice: as it is, and with every step skipped."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jls._notes import noted
from jls._program.facts import Same, Value
from jls._program.frames import Frame
from jls._program.jaxprs import opened
from jls._program.walk import walk
from jls._tools.reading.arguments import Arguments, Item
from jls._tools.reading.flow import Flow
from jls._tools.reading.scales import Scale
from jls._tools.reading.trace import READS, Traced, trace
from jls._tools.reading.updates import SeenValue, UpdateCall


class Unread(NamedTuple):
    """A step without a program to read, and the reason."""

    reason: str
    reads: str = ""  # how the step reads values at the host, "" if it does not


def try_to_trace(step: Callable[..., Any], arguments: Arguments) -> Traced | Unread:
    """The program of a step; or why there is none."""
    if isinstance(step, jax.stages.Compiled):
        return Unread("the step is compiled ahead of time")
    calls = list[None]()
    try:
        # A step under a transformation of JAX: its own effects, but no computation.
        with _noting_device_get(calls), noted("eager step"):
            traced = trace(step, arguments)
    except READS as error:
        name = type(error).__name__
        return Unread("the step reads a value at the host", reads=name)
    except Exception as error:
        return Unread(f"the step cannot be traced ({type(error).__name__})")
    return traced._replace(reads="jax.device_get" if calls else "")


@contextlib.contextmanager
def _noting_device_get(calls: list[None]) -> Iterator[None]:
    """Notes calls of `jax.device_get` with a tracer, which it gives back as it is.

    Under a profiler it notes none: `sys.setprofile` could not put cProfile back.
    """
    if sys.getprofile() is not None:
        yield
        return
    code = inspect.unwrap(jax.device_get).__code__

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            arguments = jax.tree.leaves(list(frame.f_locals.values()))
            calls.extend(None for x in arguments if isinstance(x, Tracer))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


class Result(NamedTuple):
    """The facts about a result, from both readings."""

    now: Value  # in a step that is applied
    skipped: Value  # in one that every wrapper skips


class Reading:
    """The facts about the results of a step.

    Args:
      traced: the program.
      scales: the loss scales among the inputs.
    """

    def __init__(self, traced: Traced, scales: Sequence[Scale]) -> None:
        self.traced, self.scales = traced, scales
        self._place = {i: n for n, i in enumerate(traced.inputs)}
        self._avals = [x.aval for x in opened(traced.program).jaxpr.invars]
        self.flow, self.results = self._read()
        self.checked = [x for x in self.flow.updates.calls.values() if x.given]
        self.calls = self._calls()

    def _read(self, is_skipped: bool = False) -> tuple[Flow, list[Value]]:
        places = [self._place[scale.at] for scale in self.scales]
        states = frozenset(
            self._place[i] for x in self.scales for i in x.state if i in self._place
        )
        flow = Flow(self._avals, places, states, is_skipped)
        return flow, walk(self.traced.program, flow.inputs, flow)

    @functools.cached_property
    def main(self) -> Frame:
        """The frame of the program."""
        return Frame(self.traced.program)

    @functools.cached_property
    def _by_path(self) -> list[dict[tuple[str, ...], Result]]:
        _, skipped = self._read(is_skipped=True)
        pairs = iter(map(Result, self.results, skipped))
        results = (self.traced.outputs, self.traced.objects)
        return [
            {x.path: next(pairs) for x in items if is_a_result(x)} for items in results
        ]

    @property
    def outputs(self) -> dict[tuple[str, ...], Result]:
        """The results that came back, by path."""
        return self._by_path[0]

    @property
    def objects(self) -> dict[tuple[str, ...], Result]:
        """The leaves of NNX arguments afterwards, by path."""
        return self._by_path[1]

    def _calls(self) -> dict[int, list[UpdateCall]]:
        """The calls of each wrapper, by the index of its loss scale."""
        found: dict[int, list[UpdateCall]] = {}
        lost: list[UpdateCall] = []
        for x in self._updates:
            (lost if x.scale is None else found.setdefault(x.scale, [])).append(x)
        wrappers = [k for k, scale in enumerate(self.scales) if scale.counters]
        left = [k for k in wrappers if k not in found]
        for k, call in zip(left or wrappers[:1], lost, strict=False):
            found.setdefault(k, []).append(call)
        return found

    @property
    def _updates(self) -> list[UpdateCall]:
        return [x for x in self.flow.updates.calls.values() if x.is_update]

    def bit(self, leaf: int) -> int:
        """The bit of a leaf of the arguments; 0 if it is not an array."""
        return 1 << self._place[leaf] if leaf in self._place else 0

    def bits_of_calls(self, scale: int) -> int:
        return sum(x.bit for x in self.calls.get(scale, []))

    @property
    def bits_of_updates(self) -> int:
        """The bits of what trains: updates; where no wrapper is, gradients."""
        return sum(x.bit for x in self._updates) or self.flow.bit_of_gradients

    @property
    def reaches_gradients(self) -> int:
        """The bits of the inputs that gradients depend on."""
        return self.flow.updates.reaches_gradients

    def given(self, scale: int, *roles: str) -> list[SeenValue]:
        """What a wrapper looks at in these roles."""
        calls = self.calls.get(scale, [])
        looks = [call.given.get(role, {}) for call in calls for role in roles]
        return [x for seen in looks for x in seen.values()]

    def leaf_of(self, value: Value) -> int | None:
        """The leaf of the arguments that a value is, unchanged."""
        known = value.known
        return self.traced.inputs[known.index] if isinstance(known, Same) else None

    def leaves_in(self, bits: int) -> list[int]:
        """The leaves of the arguments in a set of bits."""
        return [i for n, i in enumerate(self.traced.inputs) if bits >> n & 1]


def is_a_result(item: Item) -> bool:
    """Whether the program has a result for a leaf that came back."""
    return isinstance(item.value, jax.ShapeDtypeStruct | np.ndarray)
