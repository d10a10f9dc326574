# The notebooks are part of the manual: they run, and what is stored in them is what a
# reader sees, so it is checked too.

import base64
import io
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

import jls
from jls._tools import figure as _figure

FOLDER = Path(__file__).parents[2] / "notebooks"
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
resources = {"metadata": {"path": folder}}
NotebookClient(notebook, timeout=600, resources=resources).execute()
nbformat.write(notebook, path)
"""

# What shows a picture: the first cell, pyplot, or a `plot()` of jls in a last line.
SHOWS = re.compile(r"^poster = |plt\.show\(\)|^(\S+\.plot\(\)|figure)\Z", re.M)

# What folds a cell on Colab, in Jupyter and on the pages.
HIDDEN = {
    "poster": {"jupyter": {"source_hidden": True}, "tags": ["remove-input"]},
    "setup": {
        "cellView": "form",
        "jupyter": {"source_hidden": True},
        "tags": ["hide-input"],
    },
}

# What follows `%pip install` or the like.
INSTALL = re.compile(r"[%!].*\binstall\b(.*)")


@pytest.fixture(params=NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell):
    data = [output.get("data", {}) for output in cell.outputs]
    return [one["image/png"] for one in data if "image/png" in one]


def thumbnail(png):
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        return np.asarray(picture.convert("L").resize((64, 64)), float)


def check_outputs(notebook):
    for number, cell in enumerate(code_cells(notebook), start=1):
        assert cell.execution_count == number
        kinds = [output.output_type for output in cell.outputs]
        assert "error" not in kinds
        # What takes long says so there.
        stderr = [x["text"] for x in cell.outputs if x.get("name") == "stderr"]
        assert all(text.startswith("jls.") for text in stderr), stderr
        assert len(pictures(cell)) == len(SHOWS.findall(cell.source))
    poster, *others = code_cells(notebook)
    (drawn,) = [cell for cell in others if "poster.update(" in cell.source]
    first, again = map(thumbnail, pictures(poster) + pictures(drawn))
    assert np.abs(first - again).mean() < 1  # drawn again, it may move by a pixel


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
        assert cell.metadata == HIDDEN.get(cell.id, {})
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


def test_it_opens_with_a_few_sentences_and_its_best_picture(notebook):
    kinds = [cell.cell_type for cell in notebook.cells[:4]]
    assert kinds == ["markdown", "code", "markdown", "code"]
    assert [cell.id for cell in code_cells(notebook)[:2]] == ["poster", "setup"]
    title, blank, text = notebook.cells[0].source.splitlines()
    assert title.startswith("# ")
    assert not blank
    assert len(text) < 450
    assert len(notebook.cells[1].source.splitlines()) == 1


def test_its_colours_mean_what_they_mean_in_the_pictures_of_jls(notebook):
    source = "\n".join(cell.source for cell in code_cells(notebook))
    colours = {}
    for names, values in re.findall(r'^([A-Z, ]+) = ("#.*)$', source, re.M):
        colours |= zip(names.split(", "), re.findall(r"#\w+", values), strict=True)
    assert colours["JLS"] == _figure.JLS
    assert colours == {n: getattr(_figure, n, c) for n, c in colours.items()}
    assert source.count(_figure.JLS) == 1  # elsewhere by its name


def test_it_installs_jls_alone(notebook):
    poster, setup, *others = [cell.source for cell in code_cells(notebook)]
    arguments = [line.split("--no-deps")[1].split() for line in INSTALL.findall(setup)]
    assert arguments == [["-e", '"{checkout}"'], ['"{wheels[-1]}"']]
    assert not any(INSTALL.search(source) for source in (poster, *others))


def test_they_all_find_jls_in_the_same_way(notebook):
    assert code_cells(notebook)[1].source == setup_cell()


def setup_cell():
    return code_cells(nbformat.read(NOTEBOOKS[0], as_version=4))[1].source


# Runs the cell that installs jls as on a machine without it. pip only says what it is
# to install, and makes a wheel importable.
WITHOUT_JLS = """if True:
    import sys
    from pathlib import Path

    has_jls = [path for path in sys.path if Path(path, "jls/__init__.py").exists()]
    sys.path[:] = [path for path in sys.path if path not in has_jls]

    from IPython.core.interactiveshell import InteractiveShell

    def pip(line):
        print("pip", line)
        if line.endswith('.whl"'):
            sys.path.append(line.split()[-1].strip('"'))

    shell = InteractiveShell.instance()
    shell.register_magic_function(pip, magic_name="pip")
    result = shell.run_cell(sys.stdin.read())
    print(getattr(sys.modules.get("jls"), "__file__", None))
"""


def run_setup_cell(folder):
    """What pip was called with, where jls then comes from, and all that was printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JLS],
        input=setup_cell(),
        capture_output=True,
        text=True,
        cwd=folder,
        env=env | {"IPYTHONDIR": str(folder / ".ipython")},
    )
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stdout.splitlines() if line.startswith("pip ")]
    return calls, done.stdout.splitlines()[-1], done.stdout


def checkout_at(path):
    """Something that looks like a checkout of jls, and imports as it."""
    (path / "jls").mkdir(parents=True)
    (path / "jls/__init__.py").write_text("__version__ = '1.2.3'")
    return path / "jls/__init__.py"


@pytest.mark.parametrize("place", ["my drive", "my drive/notebooks/jls"])
def test_they_take_jls_from_the_checkout_around_or_beside_them(place, tmp_path):
    """As opened in a checkout; and where one was cloned, as `jls`, into the folder."""
    file = checkout_at(tmp_path / place)
    folder = tmp_path / "my drive/notebooks"
    folder.mkdir(exist_ok=True)
    (folder / "jls-1.0-py3-none-any.whl").touch()  # the checkout goes first
    calls, imported, printed = run_setup_cell(folder)
    assert calls == [f'pip install --quiet --no-deps -e "{tmp_path / place}"']
    assert Path(imported) == file
    assert "and jls 1.2.3" in printed


def test_they_take_jls_from_the_wheel_beside_them(tmp_path):
    for version in ("1.0", "1.1"):
        path = tmp_path / f"jls-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("jls/__init__.py", f"__version__ = {version!r}")
    calls, _, printed = run_setup_cell(tmp_path)
    assert calls == ['pip install --quiet --no-deps "jls-1.1-py3-none-any.whl"']
    assert "and jls 1.1" in printed


def test_they_say_where_to_get_jls_and_ask_no_index(tmp_path):
    (tmp_path / "jls").mkdir()  # a folder that Python would import
    calls, imported, printed = run_setup_cell(tmp_path)
    assert (calls, imported) == ([], "None")
    assert "in a checkout makes a wheel." in printed


def test_it_runs_on_the_gpu_if_there_is_one(notebook):
    source = "\n".join(cell.source for cell in code_cells(notebook))
    pins = re.findall(r"jax_platforms|JAX_PLATFORMS|default_device", source)
    needs_eight_devices = "jax_num_cpu_devices" in source
    assert bool(pins) == needs_eight_devices
    intro = notebook.cells[2].source
    assert needs_eight_devices or "It runs on the GPU if JAX has one" in intro


def test_it_ends_in_an_assert_on_its_claim(notebook):
    assert re.search(r"^assert ", code_cells(notebook)[-1].source, re.M)
