"""The way of a step through `jls.check_step`: through few modules, seldom back."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from steps import plain

import jls
from jls._tools.check.runs import Run, Runner
from jls._tools.reading.arguments import Arguments, BoundArguments

pytestmark = pytest.mark.standard_promotion

ROOT = str(Path(jls.__file__).parent)
HOLDERS = (Run, Runner, Arguments, BoundArguments)


def is_of_jls(frame):
    return frame.f_code.co_filename.startswith(ROOT)


class Walk:
    """What `jls.check_step` does with a step, as `sys.setprofile` sees it.

    On the way are the functions that are handed the step, what runs it or has its
    arguments, one of its runs, or a list of its leaves. What such an object is asked,
    by a method of its own, is no way of the step. Each function counts once: the next
    fault is a turn of a loop. A stay is a run of such functions in one module; to come
    back to the caller's module begins another.
    """

    def __init__(self, step, args):
        self.modules, self.calls = [], []  # a module for each stay; names of functions
        self._step, self._known = step, set()
        sys.setprofile(self._on_event)
        try:
            jls.check_step(step, *args)
        finally:
            sys.setprofile(None)

    def _on_event(self, frame, event, _):
        code = frame.f_code
        is_way = event in ("call", "return") and is_of_jls(frame)
        if not is_way or code.co_name.startswith("<") or (code, event) in self._known:
            return
        if not self._is_handed(frame):
            return
        self._known.add((code, event))
        caller = frame.f_back
        if event == "call":
            self.calls.append(code.co_name)
            self._stay(frame)
        elif is_of_jls(caller):
            self._stay(caller)

    def _stay(self, frame):
        name = Path(frame.f_code.co_filename).stem
        if self.modules[-1:] != [name]:
            self.modules.append(name)

    def _is_handed(self, frame):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(self._holds(frame.f_locals[x]) for x in names if x != "self")

    def _holds(self, value):
        if type(value) in (list, tuple):
            arrays = [x for x in value if isinstance(x, jax.Array | np.ndarray)]
            return len(arrays) > 1 or any(isinstance(x, HOLDERS) for x in value)
        return value is self._step or isinstance(value, HOLDERS)


def test_a_step_goes_through_few_modules():
    """In 0.3.0: 49 stays, counted in this way."""
    walk = Walk(*plain())
    assert walk.calls[:2] == ["check_step", "read_step"]
    assert {"match", "read_codes", "try_all", "take_good_steps"} <= set(walk.calls)
    assert 20 < len(walk.modules) <= 31, walk.modules
    # The arguments are taken apart once, and a run is never handed on to be compared.
    assert walk.modules.count("arguments") == 2
    assert "leaves" not in walk.modules
