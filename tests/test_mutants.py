"""The faults that are planted in the core fit the code as it is now."""

import ast
import functools
from collections import Counter
from pathlib import Path

from planted import FAULTS

ROOT = Path(__file__).parents[1]


@functools.cache
def read(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    return text, ast.parse(text)


def test_faults_can_be_planted_once_and_are_code():
    for fault in FAULTS:
        text, _ = read(fault.file)
        assert text.count(fault.old) == 1, fault
        planted = text.replace(fault.old, fault.new)
        assert planted != text, fault
        compile(planted, fault.file, "exec")


def test_there_are_the_tests_that_must_catch_them():
    for fault in FAULTS:
        assert fault.tests, fault
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert path.startswith("tests/"), fault
            nodes = ast.walk(read(path)[1])
            functions = {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
            assert not name or name.partition("[")[0] in functions, fault


def test_names_of_faults_differ():
    assert [name for name, n in Counter(f.name for f in FAULTS).items() if n > 1] == []
