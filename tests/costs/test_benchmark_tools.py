"""What the tools compile: counted, not timed."""

import json

import pytest

from benchmarks.tools import QUICK, STEPS, main
from jls._tools.origin.case import read_case, record

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("name", STEPS)
def test_few_operations_of_a_whole_step_are_recorded_first(name):
    """XLA takes as long for a record as for an operation."""
    step, args = STEPS[name]()
    case = read_case("jls.why", step, args, {})
    every = len(record(case).operations)
    assert every > 700
    assert len(case.recorded.operations) <= every / 5


def test_the_benchmark_prints_and_writes_its_figures(tmp_path, capsys):
    file = tmp_path / "figures.json"
    found = main(["--quick", "--steps", "clip", "--json", str(file)])
    assert json.loads(file.read_text()) == found
    (name,) = found
    assert name in QUICK
    rows = capsys.readouterr().out.splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows[-1].startswith(f"| {name} | ")
