"""What the package as a whole keeps to."""

import ast
import graphlib
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import reference

import jls

PACKAGE = Path(jls.__file__).parent
ROOT = PACKAGE.parent
SOURCE = (PACKAGE / "__init__.py").read_text()
# The roof first, as the comment in __init__ draws them.
FLOORS = [line.split() for line in re.findall(r"^#   (\S.*)$", SOURCE, re.MULTILINE)]
PUBLIC = [name for name in dir(jls) if not name.startswith("_")]
PUBLIC_MODULES = ["presets", "types"]
# The docstring of a protocol is on its call; an alias has none.
PROTOCOLS = [
    "InitFn",
    "AdjustFn",
    "JudgeFn",
    "TrainStep",
    "PlainTrainStep",
    "CarryingTrainStep",
]
ALIASES = ["Verdict"]


def module_of(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def room(module):
    """The module, or the folder that it is in; of the tools, the tool."""
    parts = module.removesuffix(".__init__").split(".")
    return ".".join(parts[:2]) if parts[0] == "_tools" else parts[0]


def imports(module):
    """The modules of jls that `module` imports; those of others by their names."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if room(name) != "jls":
                yield name
                continue
            inner = name.removeprefix("jls").lstrip(".") or "__init__"
            names = inner, f"{inner}.__init__", inner.rpartition(".")[0]
            yield next((name for name in names if name in MODULES), "__init__")


def ours(module):
    return {name for name in imports(module) if name in MODULES} - {module}


def test_every_module_is_on_one_floor():
    rooms = sorted(name for floor in FLOORS for name in floor)
    assert rooms == sorted({room(module) for module in MODULES})


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_from_floors_below_or_their_own_folder(module):
    below = []
    for floor in reversed(FLOORS):
        if room(module) in floor:
            break
        below += floor
    strangers = {name for name in ours(module) if room(name) != room(module)}
    assert {room(name) for name in strangers} <= set(below)


def test_what_runs_in_a_training_job_imports_no_tool():
    asking = {
        module
        for module in MODULES
        if room(module).split(".")[0] != "_tools"
        and any(name.startswith("_tools") for name in ours(module))
    }
    assert asking == {"__init__", "types", "__main__"}


def test_the_house_is_small():
    """Few floors, and a folder that can be looked through."""
    assert len(FLOORS) <= 11
    folders = {path.parent for path in MODULES.values()} - {PACKAGE}
    assert all(len([*folder.glob("*.py")]) <= 24 for folder in folders)


def test_there_is_no_circle():
    graphlib.TopologicalSorter({module: ours(module) for module in MODULES}).prepare()


def test_every_scaler_of_the_folder_is_public_and_under_the_laws():
    from test_scaler_laws import SCALERS

    rules = [m for m in MODULES if room(m) == "_scalers" and "__" not in m]
    names = {module.partition(".")[2] for module in rules} - {"rule"}
    # One is the rule of a preset.
    assert names - {"adaptive"} <= set(PUBLIC)
    assert names - {"adaptive"} | {"presets.mindformers_adaptive"} <= set(SCALERS)
    # The rule once more, in plain Python, and the test that compares the two.
    folder = Path(__file__).parent / "scalers"
    compared = {path.stem.removeprefix("test_") for path in folder.glob("test_*.py")}
    assert names <= compared
    assert names - {"static", "adaptive"} <= set(vars(reference))
    states = {
        type(scaler().init())
        for name, scaler in SCALERS.items()
        if "user" not in name  # each can be exported, and users can name it
    }
    assert states <= {x for x in vars(jls.types).values() if isinstance(x, type)}


def test_import_brings_in_nothing_but_the_runtime_dependencies():
    extras = "flax", "matplotlib", "sklearn", "rich", "equinox", "orbax", "chex"
    code = f"import sys, jls; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    brought = set(ast.literal_eval(done.stdout))
    assert brought <= {"chex"}  # by optax


USE = """
import sys, jls
tools = lambda: [m for m in sys.modules if m.startswith("jls._tools")]
report: jls.types.StepReport
"why" in dir(jls) or exit(1)
"Why" in dir(jls.types) or exit(2)
hasattr(jls, "nothing") and exit(3)
tools() and exit(4)
from jls import why
why is jls.why is vars(jls)["why"] or exit(5)
from jls.types import Why
Why.__module__ in tools() or exit(6)
from jls import *
check_step is jls.check_step and types is jls.types or exit(7)
"""


def test_import_loads_no_tool_until_it_is_used():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["__init__", "types"])
def test_type_checkers_see_the_tools_where_they_are_loaded_from(module):
    """The imports that only they read; `attach` has the same names."""
    holder = jls if module == "__init__" else jls.types
    checked = []
    for node in ast.parse(MODULES[module].read_text()).body:
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "_typing.TYPE_CHECKING"
        ):
            checked += [line for line in node.body if isinstance(line, ast.ImportFrom)]
    names = [line.names[0].name for line in checked]
    assert names == holder.__all__[-len(names) :]
    for line in checked:
        (alias,) = line.names
        assert alias.name == alias.asname
        found = getattr(importlib.import_module(line.module), alias.name)
        assert getattr(holder, alias.name) is found


def public_values():
    """Name and value of all that users see, those of public modules too."""
    for name in PUBLIC:
        value = getattr(jls, name)
        if not inspect.ismodule(value):
            yield name, value
            continue
        assert name in PUBLIC_MODULES
        assert inspect.getdoc(value), name
        for inner in value.__all__:
            yield f"{name}.{inner}", getattr(value, inner)


@pytest.mark.parametrize("name", dict(public_values()))
def test_every_public_name_has_a_docstring_and_functions_an_example(name):
    value = dict(public_values())[name]
    short = name.rpartition(".")[2]
    if short in ALIASES:
        return
    if short in PROTOCOLS:
        assert inspect.getdoc(value.__call__) or inspect.getdoc(value)
        return
    doc = inspect.getdoc(value)
    assert doc
    assert ">>> " in doc
    if inspect.isfunction(value):
        for section in ("Args:", "Returns:", "Example:"):
            assert section in doc, section
        for parameter in inspect.signature(value).parameters:
            assert f"{parameter}: " in doc, parameter


def test_public_names_are_those_of_the_contract():
    assert sorted(PUBLIC) == [
        "History",
        "JlsWarning",
        "UnhealthyError",
        "all_finite",
        "apply_gradients",
        "atomic",
        "autocast",
        "bfloat16_params",
        "calibrate",
        "check_in_sync",
        "check_step",
        "compare",
        "dynamic",
        "eval_params",
        "fingerprint",
        "grad",
        "health",
        "hysteresis",
        "loss_scale",
        "loss_scaled",
        "master_params",
        "metrics",
        "params_ema",
        "presets",
        "requeue",
        "scale",
        "select",
        "set_loss_scale",
        "skip_nonfinite",
        "spikes",
        "static",
        "train_step",
        "types",
        "unscale",
        "unwrap_state",
        "upgrade_state",
        "value_and_grad",
        "why",
        "wrap_state",
    ]


def test_types_are_those_of_the_contract():
    names = [name for name in dir(jls.types) if not name.startswith("_")]
    assert names == [
        "AdaptiveState",
        "AdjustFn",
        "BadBatch",
        "BatchQueue",
        "Bfloat16ParamsState",
        "Birth",
        "Calibration",
        "CarryingTrainStep",
        "Cotangent",
        "Difference",
        "Fingerprint",
        "Health",
        "InitFn",
        "JudgeFn",
        "LossScaledState",
        "LossScaledTransformation",
        "LossScaler",
        "ParamsEmaState",
        "Parting",
        "Place",
        "PlainTrainStep",
        "Precision",
        "PrecisionLoss",
        "ScalerState",
        "SkipReason",
        "SpikePolicy",
        "SpikeState",
        "StaticState",
        "StepCheck",
        "StepReport",
        "TrainStep",
        "Verdict",
        "Why",
    ]
    assert get_args(jls.types.Verdict)[-1] == "ok"


def test_any_other_name_is_an_attribute_error_as_of_every_module():
    for module in (jls, jls.types):
        with pytest.raises(AttributeError, match="has no attribute 'dynamc'") as error:
            module.dynamc  # noqa: B018
        assert (error.value.name, error.value.obj) == ("dynamc", module)


def test_no_name_is_sought_for_what_inspect_asks_of_each_module():
    with pytest.raises(AttributeError) as error:
        jls.__versio__  # noqa: B018
    assert str(error.value) == "module 'jls' has no attribute '__versio__'"


def test_presets_are_those_of_the_contract():
    assert dir(jls.presets) == jls.presets.__all__
    assert jls.presets.__all__ == [
        "deepspeed",
        "flax",
        "keras",
        "levanter_spikes",
        "maxtext_spikes",
        "megatron",
        "mindformers_adaptive",
        "mindspore",
        "olmo_spikes",
        "paddle",
        "paddle_doc",
        "spike_limit",
        "torch",
    ]


def test_version_is_that_of_the_installed_package_and_the_changelog():
    assert importlib.metadata.version("jls") == jls.__version__
    assert f"## [{jls.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
