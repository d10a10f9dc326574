"""The faults that are planted in the core fit the code as it is now."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest
from planted import FAULTS
from planted.fault import Fault, find, planted, read

ROOT = Path(__file__).parents[1]
MODULE = '''# A comment.
class Product:
    @property
    def rounded(self):
        """Rounds.

        Twice.
        """
        return round(
            self.exact,  # both
            self.digits)

def rounded(x): return x  # as it is
'''


@functools.cache
def functions_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}


def test_faults_can_be_planted_once_and_are_code():
    for fault in FAULTS:
        definition = find(fault, ROOT)
        text = (ROOT / definition.file).read_text(encoding="utf-8")
        compile(planted(fault, text, definition), definition.file, "exec")
        new = ast.parse(definition.text.replace(fault.old, fault.new))
        assert ast.unparse(new) != definition.text, fault


def test_there_are_the_tests_that_must_catch_them():
    for fault in FAULTS:
        assert fault.tests, fault
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert path.startswith("tests/"), fault
            assert not name or name.partition("[")[0] in functions_in(path), fault


def test_names_of_faults_differ():
    assert [name for name, n in Counter(f.name for f in FAULTS).items() if n > 1] == []


def test_faults_are_read_as_a_diff():
    text = "Title.\n\nf.g: it: fails\n- a\n-     b\n-\n+ -1\ntests/a\ntests/b\n"
    assert read(text) == [
        Fault("it: fails", "f.g", "a\n    b\n", "-1", ("tests/a", "tests/b"))
    ]


def test_a_fault_is_planted_where_the_statement_is_and_the_rest_stays(tmp_path):
    path = tmp_path / "jls/_products.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    old, new = "round(self.exact, self.digits)", "round(self.exact)"
    fault = Fault("", "Product.rounded", f"return {old}", f"return {new}", ())
    definition = find(fault, tmp_path)
    assert (definition.file, definition.name) == (
        "jls/_products.py",
        "jls._products.Product.rounded",
    )
    laid_out = "round(\n            self.exact,  # both\n            self.digits)"
    expected = MODULE.replace(laid_out, new)
    assert planted(fault, MODULE, definition) == expected


@pytest.mark.parametrize("where", ["rounded", "_products", "Product.round", "other"])
def test_a_fault_that_fits_nowhere_or_twice_is_refused(tmp_path, where):
    path = tmp_path / "jls/_products.py"
    path.parent.mkdir()
    path.write_text(MODULE)
    with pytest.raises(ValueError, match="must have this once"):
        find(Fault("", where, "return", "", ()), tmp_path)
