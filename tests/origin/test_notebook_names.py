# SPDX-License-Identifier: Apache-2.0
"""In a notebook, and at a prompt, a line has no file: what `jls.why` calls it."""

import subprocess
import sys

import pytest

CELL = """\
import jax, jax.numpy as jnp, jls

def loss_fn(x):
    return jnp.log(x)
"""
ASK = "why = jls.why(loss_fn, jnp.zeros(())); print(why); print(why.births[0].place)"

# Like the kernel of a notebook, and like IPython in a terminal.
IPYTHON = f"""if True:
    import sys
    from IPython.core.interactiveshell import InteractiveShell
    from ipykernel.compiler import XCachingCompiler

    kinds = {{"compiler_class": XCachingCompiler}} if sys.argv[1:] else {{}}
    shell = InteractiveShell.instance(**kinds)
    for cell in ("1", {CELL!r}, {ASK!r}):
        shell.run_cell(cell, store_history=True).raise_error()
"""


def run(arguments, text):
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kernel", [[], ["kernel"]], ids=["terminal", "kernel"])
def test_a_cell_has_its_number_and_no_path(kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    printed = run(["-c", IPYTHON, *kernel], "")
    assert "  In [2], line 4 in loss_fn\n      return jnp.log(x)\n" in printed
    assert "log in loss_fn (In [2], line 4)" in printed
    assert ".py" not in printed
    assert "ipython" not in printed


def test_a_line_that_was_typed_is_named():
    printed = run(["-"], f"{CELL}\n{ASK}")
    assert "  <stdin>:4 in loss_fn\n" in printed
    assert "log in loss_fn (<stdin>:4)" in printed


def test_jls_does_not_import_ipython():
    check = "import sys; print('IPython' in sys.modules)"
    assert run(["-"], f"{CELL}\n{ASK}\n{check}").endswith("False\n")
