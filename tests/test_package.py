"""What the package as a whole keeps to."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import jls

PACKAGE = Path(jls.__file__).parent
ROOT = PACKAGE.parent
# A module imports only from those before it.
ORDER = [
    "_repr",
    "_types",
    "_tree",
    "_magnitude",
    "_branches",
    "_locate",
    "_scale",
    "_rounding",
    "_validate",
    "_move",
    "_static",
    "_dynamic",
    "_cumulative",
    "_hysteresis",
    "_adaptive",
    "_late_growth",
    "_cautious",
    "_log_max",
    "_mindformers",
    "presets",
    "_grad",
    "_guard",
    "_buffers",
    "_norms",
    "_rollback",
    "_advance",
    "_optax",
    "_migrate",
    "_upgrade",
    "_ema",
    "_read",
    "_sync",
    "_tally",
    "_leaves",
    "_underflow",
    "_suggest",
    "_verdict",
    "_health",
    "_nonfinite",
    "_accumulate",
    "_report",
    "_train_step",
    "_doctor",
    "_logged",
    "_progress",
    "_history_facts",
    "_history_marks",
    "_history_plot",
    "_history",
    "__init__",
]
PUBLIC = [name for name in vars(jls) if not name.startswith("_")]
PUBLIC_MODULES = ["presets"]


def modules():
    return [path.stem for path in PACKAGE.glob("*.py") if "demo" not in path.stem]


def imports(module):
    """Names of the modules that `module` imports, those of jls by their short names."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jls":
            yield from (f"jls.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def public_values():
    """Name and value of all that users see, the functions of public modules too."""
    for name in PUBLIC:
        value = getattr(jls, name)
        if not inspect.ismodule(value):
            yield name, value
            continue
        assert name in PUBLIC_MODULES
        assert inspect.getdoc(value), name
        for inner, function in inspect.getmembers(value, inspect.isfunction):
            if not inner.startswith("_"):
                yield f"{name}.{inner}", function


def test_modules_import_only_leftwards():
    assert sorted(modules()) == sorted([*ORDER, "__main__"])
    for i, module in enumerate(ORDER):
        ours = {n.removeprefix("jls.") for n in imports(module) if n.startswith("jls.")}
        assert ours <= set(ORDER[:i]), module


def test_only_what_optax_calls_imports_optax():
    users = [m for m in ORDER if any(n.split(".")[0] == "optax" for n in imports(m))]
    assert users == ["_advance", "_optax", "_ema", "_doctor"]


def test_import_brings_in_nothing_but_the_runtime_dependencies():
    extras = "flax", "matplotlib", "sklearn", "rich", "equinox", "orbax"
    code = f"import sys, jls; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_modules_stay_within_their_size():
    for module in modules():
        # Code and comments; docstrings may be as long as users need.
        source = (PACKAGE / f"{module}.py").read_text()
        docs = 0
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                docs += len((ast.get_docstring(node, clean=False) or "").splitlines())
        assert len(source.splitlines()) - docs <= 200, module


def test_every_public_name_has_a_docstring_and_functions_an_example():
    for name, value in public_values():
        if name in (
            "InitFn",
            "AdjustFn",
            "MagnitudeAdjustFn",
        ):  # protocols: the docstring is on __call__
            assert inspect.getdoc(value.__call__)
            continue
        doc = inspect.getdoc(value)
        assert doc, name
        assert ">>> " in doc, name
        if inspect.isfunction(value):
            for section in ("Args:", "Returns:", "Example:"):
                assert section in doc, (name, section)
            for parameter in inspect.signature(value).parameters:
                assert f"{parameter}: " in doc, (name, parameter)


def test_public_names_are_those_of_the_contract():
    assert sorted(PUBLIC) == [
        "AdaptiveState",
        "AdjustFn",
        "Health",
        "History",
        "InitFn",
        "LeafReport",
        "RecentMaxState",
        "ScalerState",
        "LossScaledState",
        "LossScaler",
        "MagnitudeAdjustFn",
        "MagnitudeScaler",
        "NonfiniteReport",
        "ParamsEmaState",
        "StepReport",
        "Underflow",
        "UnderflowShares",
        "UnhealthyError",
        "adaptive",
        "all_finite",
        "cautious",
        "check_in_sync",
        "cumulative",
        "dynamic",
        "eval_params",
        "grad",
        "health",
        "hysteresis",
        "recent_max",
        "loss_scale",
        "loss_scaled",
        "max_abs",
        "metrics",
        "nonfinite_leaves",
        "nonfinite_report",
        "params_ema",
        "presets",
        "progress",
        "scale",
        "select",
        "set_loss_scale",
        "skip_nonfinite",
        "static",
        "suggest_scale",
        "train_step",
        "underflow",
        "unscale",
        "unwrap_state",
        "upgrade_state",
        "value_and_grad",
        "wrap_state",
    ]


def test_presets_are_those_of_the_contract():
    functions = inspect.getmembers(jls.presets, inspect.isfunction)
    assert [name for name, _ in functions if not name.startswith("_")] == [
        "deepspeed",
        "flax",
        "keras",
        "megatron",
        "mindformers_adaptive",
        "mindspore",
        "paddle",
        "paddle_doc",
        "torch",
    ]


def test_version_is_that_of_the_installed_package_and_the_changelog():
    assert importlib.metadata.version("jls") == jls.__version__
    assert f"## [{jls.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
