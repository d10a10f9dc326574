"""The way of a step through `jls.check_step`: through few modules, seldom back."""

from pathlib import Path

import pytest
from steps import plain
from walks import CallWalk

import jls
from jls._tools.check.runs import Runner
from jls._tools.reading.arguments import Arguments, BoundArguments

pytestmark = pytest.mark.standard_promotion


def test_a_step_goes_through_few_modules():
    """In 0.5.0: 89 stays."""
    holders = Runner, Arguments, BoundArguments
    walk = CallWalk(jls.check_step, *plain(), holders)
    modules = [Path(x).stem for x in walk.modules]
    assert walk.calls[:2] == ["check_step", "read_step"]
    assert {"match", "_try_all", "take_good_steps", "_attempt"} <= set(walk.calls)
    assert 20 < len(modules) <= 39, modules
    # One loop runs what the mistakes ask for: they never see the step.
    assert not any("mistakes" in x for x in walk.modules)
    # The arguments are bound and taken apart once, and a run is never handed on to be
    # compared.
    assert modules.count("arguments") <= 4
    assert "leaves" not in modules
