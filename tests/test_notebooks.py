# The notebooks are part of the manual: they run, and what is stored in them is what a
# reader sees, so it is checked too.

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import jls

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# This very Python: the "python3" that Jupyter finds by itself may be another one.
KERNEL = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "Python 3",
    "language": "python",
}

# In a process of its own, which closes Jupyter's sockets and event loop with it.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

path, folder = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=90, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, path)
"""

# What shows a picture: pyplot, or a `jls.History` that is drawn in a cell's last line.
SHOWS = re.compile(r"plt\.show\(\)|^\w+\.plot\(\)\Z", re.M)

# What follows `%pip install` or the like.
INSTALL = re.compile(r"[%!].*\binstall\b(.*)")


@pytest.fixture(params=NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook):
    for number, cell in enumerate(code_cells(notebook), start=1):
        assert cell.execution_count == number
        kinds = [output.output_type for output in cell.outputs]
        assert "error" not in kinds
        assert "stderr" not in [output.get("name") for output in cell.outputs]
        images = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        assert len(images) == len(SHOWS.findall(cell.source))


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_it_runs_from_top_to_bottom(notebook, tmp_path):
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(KERNEL))
    path = [str(Path(jls.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "JUPYTER_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    env.pop("MPLBACKEND", None)  # plots go where Jupyter puts them
    copy = tmp_path / "copy.ipynb"
    nbformat.write(notebook, copy)
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(copy), str(FOLDER)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(copy, as_version=4)
    assert executed.metadata.language_info.version == platform.python_version()
    check_outputs(executed)


def test_the_stored_outputs_are_complete(notebook):
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert any(cell.outputs for cell in code_cells(notebook))


def test_nothing_in_it_tells_of_the_machine_that_ran_it(notebook):
    for cell in notebook.cells:
        assert cell.metadata == {}
        text = "".join(
            str(data)
            for output in cell.get("outputs", [])
            for data in (output.get("text", ""), *output.get("data", {}).values())
            if not str(data).startswith("iVBOR")  # a PNG; its letters say anything
        )
        assert not re.search(r"/(home|root|work|opt|tmp|usr|Users)/", text)
        assert "Warning" not in text
    assert notebook.metadata == {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }


def test_it_installs_jls_alone(notebook):
    first, *others = [cell.source for cell in code_cells(notebook)]
    arguments = INSTALL.findall(first)
    assert arguments
    for line in arguments:
        assert "--no-deps" in line.split()
        packages = {word for word in line.split() if not word.startswith("-")}
        assert packages <= {"jls", ".."}
    assert not any(INSTALL.search(source) for source in others)


def test_it_ends_in_an_assert_on_its_claim(notebook):
    assert re.search(r"^assert ", code_cells(notebook)[-1].source, re.M)
