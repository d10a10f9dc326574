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
MAIN_LOOP = "From float32 to a guarded run"


def block(title, language):
    (code,) = (x.code for x in FOUND if (x.title, x.language) == (title, language))
    return code


def run_main_loop():
    names = {"__name__": "readme"}
    return execute(block(MAIN_LOOP, "python"), "README.md", names)


def test_readme_is_short_and_begins_with_the_main_loop():
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    for number, line in enumerate(lines, start=1):
        is_command = line.startswith("python3 ")  # in one line, to be pasted
        assert len(line) <= 80 or is_command, number
    assert any(
        x.startswith("def loss_fn(params, batch):") for x in lines[:24]
    )  # of a terminal of 80 x 24


def test_every_block_is_tested():
    assert [(block.title, block.language) for block in FOUND] == [
        (MAIN_LOOP, "python"),
        (MAIN_LOOP, "text"),
        ("Three questions", "python"),
        ("Three questions", "text"),
        ("Install, and two commands", "console"),
        ("Install, and two commands", "console"),
        ("In a step of your own", "diff"),
    ]


def test_main_loop_prints_what_the_readme_says(capsys):
    names = run_main_loop()
    printed = capsys.readouterr().out
    assert printed.split() == block(MAIN_LOOP, "text").split()
    assert printed.count("skipped") == 3
    metrics = jax.device_get(jls.metrics(names["opt_state"]))
    assert (metrics["steps"], metrics["skips"]) == (10, 3)
    assert metrics["nonfinite_losses"] == 1
    assert metrics["applied"]
    assert names["report"].loss < 2


def test_main_loop_computes_in_float16_what_is_float32():
    names = run_main_loop()
    for leaf in jax.tree.leaves(names["params"]):
        assert leaf.dtype == jnp.float32
    args = names["params"], names["opt_state"], names["batch"]
    program = str(jax.make_jaxpr(names["step"])(*args))
    products = [x for x in program.splitlines() if " dot_general[" in x]
    assert len(products) >= 5
    assert all("f16[" in line.split(" = ")[0] for line in products), products


def test_diff_leads_from_plain_optax_to_a_right_step(capsys):
    lines = block("In a step of your own", "diff").splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    ours = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    names = run_main_loop()
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
    code = block(MAIN_LOOP, "python") + block("Three questions", "python")
    execute(code, "train.py", {"__name__": "readme"})
    said = block(MAIN_LOOP, "text") + block("Three questions", "text")
    assert capsys.readouterr().out == said


def test_commands_need_python_alone():
    commands = [x.code.splitlines() for x in FOUND if x.language == "console"]
    setup = "python3 -m venv .venv && . .venv/bin/activate && pip install -e "
    assert len(commands) == 2
    for (command,) in commands:
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
