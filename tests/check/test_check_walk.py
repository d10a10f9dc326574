"""The way of a step through `jls.check_step`: through few modules, seldom back."""

from pathlib import Path

import jax
import numpy as np
import pytest
from steps import plain
from walks import Walk

import jls
from jls._tools.check.runs import Run, Runner
from jls._tools.reading.arguments import Arguments, BoundArguments

pytestmark = pytest.mark.standard_promotion

HOLDERS = (Run, Runner, Arguments, BoundArguments)


class StepWalk(Walk):
    """What `jls.check_step` does with a step.

    On the way are the functions that are handed the step, what runs it or has its
    arguments, one of its runs, or a list of its leaves. What such an object is asked,
    by a method of its own, is no way of the step. Each function counts once: the next
    fault is a turn of a loop.
    """

    def __init__(self, step, args):
        self._step, self._known = step, set()
        super().__init__(lambda: jls.check_step(step, *args))

    def is_on_way(self, frame, event):
        if (frame.f_code, event) in self._known:
            return False
        given = self.arguments(frame)
        is_handed = any(self._holds(x) for name, x in given.items() if name != "self")
        if is_handed:
            self._known.add((frame.f_code, event))
        return is_handed

    def _holds(self, value):
        if type(value) in (list, tuple):
            arrays = [x for x in value if isinstance(x, jax.Array | np.ndarray)]
            return len(arrays) > 1 or any(isinstance(x, HOLDERS) for x in value)
        return value is self._step or isinstance(value, HOLDERS)


def test_a_step_goes_through_few_modules():
    """In 0.3.0: 49 stays, counted in this way."""
    walk = StepWalk(*plain())
    modules = [Path(x).stem for x in walk.modules]
    assert walk.calls[:2] == ["check_step", "read_step"]
    assert {"match", "_try_all", "take_good_steps"} <= set(walk.calls)
    assert 20 < len(walk.modules) <= 31, walk.modules
    # The arguments are bound and taken apart once, and a run is never handed on to be
    # compared.
    assert modules.count("arguments") == 3
    assert "leaves" not in modules
