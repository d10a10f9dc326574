"""The README's code runs, and says what it should."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from code_blocks import blocks, execute

import jls

pytestmark = pytest.mark.standard_promotion

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = blocks(TEXT)
FIRST, OWN, BAD = (
    "From float32 to float16",
    "In a step of your own",
    "A bad batch",
)


def block(title, language):
    (code,) = (x.code for x in FOUND if (x.title, x.language) == (title, language))
    return code


def run_first_program():
    names = {"__name__": "readme"}
    return execute(block(FIRST, "python"), "README.md", names)


def test_readme_is_short_and_begins_with_what_a_reader_does_first():
    lines = TEXT.splitlines()
    assert len(lines) <= 120
    assert "pip install -e ." in lines[:10]
    assert f"## {OWN}" in lines[:60]
    for number, line in enumerate(lines, start=1):
        is_command = line.startswith("python3 ")  # in one line, to be pasted
        assert len(line) <= 80 or is_command, number
    assert any(
        x.startswith("def loss_fn(params, batch):") for x in lines[:24]
    )  # of a terminal of 80 x 24
    assert 15 <= block(FIRST, "python").count("\n") <= 30


def test_every_block_is_tested():
    assert [(block.title, block.language) for block in FOUND] == [
        ("jls: mixed precision for JAX", "console"),
        (FIRST, "python"),
        (FIRST, "text"),
        (OWN, "diff"),
        (BAD, "python"),
        (BAD, "text"),
        ("Demo and tests, on a CPU", "console"),
        ("Demo and tests, on a CPU", "console"),
    ]


def test_first_program_prints_what_the_readme_says(capsys):
    names = run_first_program()
    assert capsys.readouterr().out == block(FIRST, "text")
    metrics = jax.device_get(jls.metrics(names["opt_state"]))
    assert (metrics["steps"], metrics["skips"]) == (100, 1)
    assert names["opt_state"].scaler_state.finite_count == 99  # the first was skipped
    assert metrics["nonfinite_losses"] == 0
    assert metrics["applied"]
    assert metrics["loss_scale"] == 2**14


def test_first_program_computes_in_float16_what_is_float32():
    names = run_first_program()
    for leaf in jax.tree.leaves(names["params"]):
        assert leaf.dtype == jnp.float32
    args = names["params"], names["opt_state"], names["batch"]
    program = str(jax.make_jaxpr(names["step"])(*args))
    products = [x for x in program.splitlines() if " dot_general[" in x]
    assert len(products) >= 5
    assert all("f16[" in line.split(" = ")[0] for line in products), products


def test_diff_leads_from_plain_optax_to_a_right_step(capsys):
    lines = block(OWN, "diff").splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    ours = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    names = run_first_program()
    exec(ours, names)
    state = names["params"], names["optimizer"].init(names["params"])
    args = names["train_step"], *state, names["batch"]
    jls.check_step(*args).raise_if_broken()
    assert "loss not passed" not in jls.check_step(*args).not_tried

    names = {"jax": jax, "optax": optax, "loss_fn": lambda p, b: jnp.sum(p * b)}
    exec(plain, names)
    params = jnp.ones(2)
    state = names["optimizer"].init(params)
    new, _, loss = names["train_step"](params, state, jnp.ones(2))
    assert loss == 2.0
    assert np.all(new < params)


def test_both_programs_are_one_file_that_prints_what_the_readme_says(capsys):
    code = block(FIRST, "python") + block(BAD, "python")
    names = execute(code, "train.py", {"__name__": "readme"})
    assert capsys.readouterr().out == block(FIRST, "text") + block(BAD, "text")
    step, params, opt_state = names["step"], names["params"], names["opt_state"]
    after, _, report = step(params, opt_state, names["empty"])
    assert report.skipped
    for old, new in zip(*map(jax.tree.leaves, (params, after)), strict=True):
        assert old.tobytes() == new.tobytes()


def test_commands_need_python_alone():
    consoles = [x.code.splitlines() for x in FOUND if x.language == "console"]
    (install,), *commands = consoles
    assert install == "pip install -e ."
    setup = "python3 -m venv .venv && . .venv/bin/activate && pip install -e "
    assert len(commands) == 2
    for (command,) in commands:  # each in a block of its own, to be copied
        assert command.startswith(setup)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert set(re.findall(r'pip install -e "\.\[(\w+)\]"', TEXT)) <= set(extras)


def test_ci_runs_the_commands_as_they_are_written():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    pasted = re.findall(r"^ *paste \w+ '(.*?)'(?: (\S+))?$", script, re.MULTILINE)
    assert {pattern for pattern, file in pasted if not file} == {
        '".[demo]"',
        '".[test]"',
    }
    for pattern, file in pasted:
        lines = (ROOT / (file or "README.md")).read_text(encoding="utf-8").splitlines()
        (command,) = (line for line in lines if pattern in line)
        assert command.startswith("python3 -m venv .venv && ")


def test_costs_are_those_of_the_documentation():
    (figure,) = re.findall(r"step takes (\d\.\d\d) times", " ".join(TEXT.split()))
    page = (ROOT / "docs/costs.md").read_text(encoding="utf-8")
    row = re.search(r"^\| whole step of a small float16 transformer.*", page, re.M)[0]
    assert row.split("|")[2].strip(" *") == figure


def test_links_exist():
    targets = re.findall(r"\]\(([^)#h][^)]*)\)", TEXT)
    assert len(targets) >= 12
    for target in targets:
        assert (ROOT / target.partition("#")[0]).exists(), target
