"""What `python -m jls` says before it runs anything."""

import re

import pytest

import jls
from jls.__main__ import main

INSTALLS = ('pip install -e ".[demo]"', "pip install flax matplotlib rich scikit-learn")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_names_every_command_and_option(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    words = ("--steps", "--seed", "--output", "--no-plot", "--version", "examples:")
    for word in (*words, "python -m jls doctor [-h] [--json]", *INSTALLS):
        assert word in text
    commands = re.findall(r"^usage: python -m jls (\w+)", text, re.MULTILINE)
    assert commands == ["demo", "doctor", "compare"]
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: must be a whole number from 1"),
        (["--steps", "many"], "--steps: must be a whole number from 1"),
        (["--seed", "-1"], "--seed: must be a whole number from 0"),
        (["--output", "nowhere/plot.png"], "folder that does not exist: 'nowhere'"),
        (["--output", "plot.xyz"], "--output must end in .png, .svg or .pdf"),
        (["--output", "folder.png"], "--output is a folder"),
        (["doctr"], "argument {demo,doctor,compare}: invalid choice: 'doctr'"),
        (["train"], "argument {demo,doctor,compare}: invalid choice: 'train'"),
        (["check_step"], "check_step is a function, no command: write jls.check_step("),
        (["demo", "doctor"], "unrecognized arguments: doctor"),
        (["compare", "a.npz"], "the following arguments are required: b.npz"),
        (["compare", "a.npz", "b.npz"], "No such file or directory: 'a.npz'"),
        (["compare", "a.npy", "b.npz"], "path must end in \".npz\", got 'a.npy'"),
    ],
)
def test_a_bad_argument_is_refused_before_training(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"jls {jls.__version__}\n"
