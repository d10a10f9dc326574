"""What the files around the package say: they name what exists."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from apart import APART, command
from planted import FAULTS
from planted.fault import find

import jls
from benchmarks.targets import TARGETS
from jls.__main__ import _parser

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
# Every command, of a table or a block: `a && b` is two.
CODE = re.findall(r"`([^`\n]+)`", CONTRIBUTING) + re.findall(
    r"```console\n(.*?)```", CONTRIBUTING, re.DOTALL
)
COMMAND = r"(?:pip|pytest|ruff|pyright|mypy|sphinx-build|python|\.ci/run|pre-commit)\b"
CALLS = [
    call.strip()
    for code in CODE
    for call in code.split("&&")
    if re.match(COMMAND, call.strip())
]


def parsed(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_contributing_names_files_that_exist():
    paths = {
        code for code in CODE if re.fullmatch(r"[\w./-]+", code) and "NAME" not in code
    }
    paths = {code for code in paths if "/" in code or code.endswith((".py", ".md"))}
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_contributing_draws_the_tree_as_it_is():
    (tree,) = re.findall(r"```text\n(.*?)```", CONTRIBUTING, re.DOTALL)
    drawn, folder = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith("  ") else name
        drawn.add(name if name == folder else folder + name)
    assert all(list(ROOT.glob(name)) for name in drawn)
    is_package = [path.parent for path in (ROOT / "jls").glob("*/__init__.py")]
    assert {f"{path.relative_to(ROOT).as_posix()}/" for path in is_package} <= drawn


def test_contributing_names_commands_that_there_are():
    assert len(CALLS) >= 14
    for call in CALLS:
        for extra in re.findall(r'pip install -e "\.\[([\w-]+)\]"', call):
            assert extra in PROJECT["optional-dependencies"]
        for path in re.findall(r"(?<= )[\w./]+/[\w./]+(?= |$)", call):
            is_made = path.startswith("build/")
            assert is_made or (ROOT / path).exists(), call
        for module in re.findall(r"python -m (\w+)", call):
            assert (ROOT / module / "__main__.py").exists(), call
        for target in re.findall(r"--target (\w+)", call):
            assert target in TARGETS
        options = re.findall(r"--(?:quick|target)", call)
        text = (ROOT / "benchmarks/__main__.py").read_text(encoding="utf-8")
        assert all(f'"{option}"' in text for option in options)


MODULES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "jls").rglob("*.py")]


def read_tests_by_module():
    """Of each row of the table the modules or folders, and where their tests are."""
    table = CONTRIBUTING.partition("| module | its tests |\n")[2].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[1:]]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]


def is_in(path, places):
    return any(path == place or path.startswith(f"{place}/") for place in places)


def test_contributing_says_where_the_tests_of_each_module_are():
    rows, caught_by = read_tests_by_module(), {}
    for fault in FAULTS:
        files = {test.partition("::")[0] for test in fault.tests}
        caught_by.setdefault(find(fault, ROOT).file, set()).update(files)
    for module in MODULES:
        tests = [tests for modules, tests in rows if is_in(module, modules)]
        by_name = ROOT / "tests" / f"test_{Path(module).stem.lstrip('_')}.py"
        if module != "jls/_tools/__init__.py":
            assert len(tests) + (not tests and by_name.exists()) == 1, module
        # Of the tests that catch a fault in it, some are there.
        if tests and module in caught_by:
            assert any(is_in(file, tests[0]) for file in caught_by[module]), module
    for modules, _ in rows:
        assert all(any(is_in(x, [place]) for x in MODULES) for place in modules)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("tests/promises/test_scaler_laws.py", ["SCALERS"]),
        ("tests/test_bad_inputs.py", ["FACTORIES"]),
        ("jls/_tools/run/verdict.py", ["Verdict", "Facts"]),
        ("jls/_types.py", ["Field", "Event", "LossScaledState", "SIGNALS", "JudgeFn"]),
        ("jls/_scalers/rule.py", ["make"]),
        ("jls/_step.py", ["_count", "_query_spike_policy"]),
        ("benchmarks/targets.py", ["Target", "TARGETS"]),
        ("jls/_train/parts.py", ["StepCall", "Order", "Parts"]),
        ("jls/_train/step.py", ["_adapter_for"]),
    ],
)
def test_contributing_names_what_is_in_those_files(path, names):
    assert path in CONTRIBUTING
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {getattr(node, "name", None) for node in tree.body}
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        defined |= {getattr(target, "id", None) for target in targets}
    for name in names:
        assert f"`{name}`" in CONTRIBUTING
        assert name in defined


CI = (ROOT / ".ci/run").read_text(encoding="utf-8")
(README_TESTS,) = re.findall(
    r'pip install -e "\.\[test\]" && (.*)', (ROOT / "README.md").read_text("utf-8")
)


@pytest.mark.parametrize("folder", APART)
def test_folder_apart_is_in_contributing_and_run_by_ci(folder):
    assert list((ROOT / "tests" / folder).rglob("test_*.py"))
    assert command(folder) in CALLS
    stage = re.search(rf'^  dev "\$TESTS.*\btests/{folder}\b.*"$', CI, re.MULTILINE)
    assert stage


def test_one_command_can_collect_all_folders():
    """Modules of tests are in no package: each has a name of its own."""
    files = (ROOT / "tests").rglob("*.py")
    names = [x.name for x in files if not (x.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))


def test_all_other_tests_are_run_by_readme_and_ci():
    """`pytest` alone, and nothing takes a file away from it."""
    assert README_TESTS == "pytest -n 2 --dist loadfile" in CALLS
    assert len(re.findall(r"^ +paste \w+ '\"\.\[test\]\"'$", CI, re.MULTILINE)) == 1
    assert "--ignore" not in CI
    assert "--deselect" not in CI


def test_pytest_alone_runs_what_the_readme_runs():
    """Two workers are only faster: they choose as one process does."""
    for path in (ROOT / "conftest.py", ROOT / "tests/conftest.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"XDIST|xdist|worker_?(id|input)|numprocesses", text)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    options = table["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["jls", "tests"]
    strict = ["--strict-markers", "--strict-config", "--doctest-modules"]
    assert options["addopts"] == strict


class FakeConfig:
    def __init__(self, *args):
        self.args = list(args)
        self.invocation_params = SimpleNamespace(dir=ROOT)


@pytest.mark.parametrize(
    ("args", "collected"),
    [
        (["jls", "tests"], set()),
        (["tests/test_scale.py", "tests/promises"], set()),
        (["tests/pages"], {"pages"}),
        (
            ["tests/pages/test_docs.py::test_x", str(ROOT / "tests/costs")],
            {"pages", "costs"},
        ),
    ],
)
def test_folder_apart_is_collected_if_it_is_named(args, collected, request):
    (ours,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests/conftest.py")
    )
    config, tests = FakeConfig(*args), ROOT / "tests"
    left_out = APART.keys() - collected
    for path in [path for path in tests.iterdir() if path.is_dir()]:
        ignored = ours.pytest_ignore_collect(path, config)
        assert ignored is (True if path.name in left_out else None), path
    said = "\n".join(ours.pytest_report_header(config))
    assert {folder for folder in APART if command(folder) in said} == left_out


def test_ci_has_the_stages_that_it_names():
    (names,) = re.findall(r"^STAGES=\((.*)\)$", CI, re.MULTILINE)
    (more,) = re.findall(r"STAGES=\(.*\}\" (.*) test\)$", CI, re.MULTILINE)
    stages = re.findall(r"^stage_(\w+)\(\)", CI, re.MULTILINE)
    assert sorted([*names.split(), *more.split()]) == sorted(stages)
    for row in re.findall(r'"([^"]*)"', re.search(r"^BESIDE=.*$", CI, re.M)[0]):
        assert set(row.split()) < set(names.split())
    assert names.split()[:2] == ["lint", "types"]
    assert names.split()[-1] == "test"  # its closing lines are the ones that count


def test_ci_says_which_stages_there_are():
    done = subprocess.run([ROOT / ".ci/run", "lnt"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'lnt'. There are: lint types " in done.stderr


# A Python whose environments have commands that do nothing.
PYTHON = """#!/bin/sh
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
for name in pip uv pytest python; do
  printf '#!/bin/sh\\n' > "$3/bin/$name" && chmod +x "$3/bin/$name"
done
"""


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_ci_leaves_out_the_same_tests_of_the_same_commit(tmp_path):
    tree, stubs = tmp_path / "tree", tmp_path / "stubs"
    (tree / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tree / ".ci/run")
    stubs.mkdir()
    for name, text in {"python3": PYTHON, "date": "#!/bin/sh\necho $$\n"}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    env = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def call(*command):
        run = subprocess.run(
            command, cwd=tree, env=env, check=True, capture_output=True, text=True
        )
        return run.stdout.splitlines()

    def commit(text):
        (tree / "file").write_text(text)
        call("git", "add", ".")
        call("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", text)

    def chosen(*arguments):
        """What CI says first, and the commands that follow from it."""
        first, *lines = call(".ci/run", *arguments, "tools", "bits")
        lines = [line for line in lines if line.startswith("+ ")]
        (part,) = {*re.findall(r"--part (\d/\d)", "\n".join(lines))}
        others = re.findall(r"max_isa=(\w+)", "\n".join(lines))
        assert f": part {part}, bits {' '.join(others)}" in first
        return first, *lines

    without_git = chosen()
    call("git", "init", "-q")
    assert chosen() == without_git
    seen = set()
    for number in range(8):
        commit(f"{number}")
        seen.add(chosen())
    assert "--part 2/6" in chosen("--part", "2")[1]
    (tree / "file").write_text("not committed")
    (tree / "new").write_text("not committed")
    assert chosen() in seen
    assert len({first.partition(": ")[2] for first, *_ in seen}) > 1
    first, *_ = call(".ci/run", "--all", "faults")
    assert re.search(r": part 1/1, bits SSE4_2.*, faults [1-8]/8$", first)


def test_no_table_is_cut_in_two():
    """What comes after an empty line is a table of its own, and has to have a head."""
    cut = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        before, is_code = ["", ""], False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            is_second = before[1].startswith("|") and not before[0].startswith("|")
            if is_second and not is_code and not re.match(r"\|[ :|-]+$", line):
                cut.append(f"{path.relative_to(ROOT)}:{number - 1}")
            before = [before[1], line]
    assert cut == []


def test_hosted_ci_runs_what_ci_runs():
    (job,) = parsed(".github/workflows/ci.yml")["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_hosted_documentation_is_built_as_ours():
    config = parsed(".readthedocs.yaml")
    assert (ROOT / config["sphinx"]["configuration"]).exists()
    assert config["sphinx"]["fail_on_warning"]
    (install,) = config["python"]["install"]
    assert set(install["extra_requirements"]) <= set(PROJECT["optional-dependencies"])


def test_all_that_describe_jls_say_what_the_readme_says():
    (said,) = re.findall(
        "^`jls` (runs .*)\\.$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert PROJECT["description"] == f"Mixed precision for JAX: {said}"
    assert jls.__doc__ == f"jls: mixed precision for JAX.\n\nIt {said}.\n"
    assert parsed("CITATION.cff")["title"] == "jls: mixed precision for JAX"


def test_the_citation_is_of_this_version():
    citation = parsed("CITATION.cff")
    assert citation["version"] == jls.__version__
    assert citation["authors"] == PROJECT["authors"] == [{"name": "The jls developers"}]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_issues_ask_for_the_output_of_the_doctor(name):
    assert _parser().parse_args(["doctor", "--json"]).json
    fields = parsed(f".github/ISSUE_TEMPLATE/{name}.yml")["body"]
    by_id = {field["id"]: field for field in fields}
    assert "`python -m jls doctor --json`" in by_id["doctor"]["attributes"]["label"]
    required = by_id["doctor"].get("validations", {}).get("required", False)
    assert required == (name == "bug")


# A package of that name would be somebody else's.
STRANGER = re.compile(
    r"""\bpip install [^\n`#&;|]*?(?<=[ "'])jls(?:\[\w+\])?(?=["'`\\\s]|$)"""
)


def test_nothing_installs_the_name_jls_from_an_index():
    for said in (
        "pip install jls",
        '%pip install -q --no-deps jls\\n"',
        'pip install "jls[demo]"\n',
    ):
        assert STRANGER.search(said)
    folders = ("jls", "docs", "notebooks", "examples", "benchmarks", ".github", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += ROOT.glob("*.*")
    copies = ROOT / "docs" / "notebooks"
    texts = (".py", ".md", ".ipynb", ".yml", ".yaml", ".toml", ".cff")
    for path in paths:
        is_text = path.suffix in texts or path.name == "run"
        if is_text and path.is_file() and copies not in path.parents:
            found = STRANGER.search(path.read_text(encoding="utf-8"))
            assert not found, (path, found)
