"""The faults that are planted in the core fit the code as it is now."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from planted import FAULTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted_once_and_is_code(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    planted = text.replace(fault.old, fault.new)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_there_are_the_tests_that_must_catch_it(fault):
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert path.startswith("tests/")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        assert not name or name.partition("[")[0] in functions


def test_names_of_faults_differ():
    assert [name for name, n in Counter(f.name for f in FAULTS).items() if n > 1] == []
