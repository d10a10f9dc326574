import json
import os
import subprocess
import sys

import pytest

from jls.__main__ import main
from jls._cli import doctor

pytestmark = pytest.mark.standard_promotion


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jls", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_doctor_prints_what_a_person_can_act_on():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("float16", "GFLOP/s", "A wrapped train step took about", "Train in"):
        assert words in done.stdout
    for check in doctor.CHECKS:
        assert f"yes  {check}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 88


def test_doctor_in_json_has_the_same_findings():
    flags = "--xla_force_host_platform_device_count=2"
    done = run("--json", XLA_FLAGS=flags)
    findings = json.loads(done.stdout)
    assert done.returncode == 0
    assert findings["ok"]
    assert findings["devices"] == ["cpu", "cpu"]
    assert findings["xla_flags"] == flags
    assert list(findings["matmul_gflops"]) == ["float32", "bfloat16", "float16"]
    assert all(speed > 0 for speed in findings["matmul_gflops"].values())
    low, high = findings["step_overhead_range"]
    assert 0 < low <= findings["step_overhead"] <= high
    assert list(findings["checks"]) == list(doctor.CHECKS)


@pytest.mark.parametrize("broken", doctor.CHECKS)
def test_doctor_exits_with_1_if_a_check_fails(broken, monkeypatch, capsys):
    checks = {name: name != broken for name in doctor.CHECKS}
    monkeypatch.setattr(doctor, "_checks", lambda: checks)
    monkeypatch.setattr(doctor, "_step_overheads", lambda width: [0.5, 1.0, 2.0])
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert f"NO   {broken}" in said
    assert "look for fast-math in XLA_FLAGS" in " ".join(said.split())
    assert "took about 1.00 x the time of a bare one (0.50 to 2.00" in said


def test_checks_see_a_finite_check_that_is_blind(monkeypatch):
    monkeypatch.setattr(doctor, "all_finite", lambda tree: doctor.jnp.asarray(True))
    found = doctor._checks()
    assert [name for name, holds in found.items() if not holds] == [
        "an inf is seen",
        "a NaN is seen",
        "a float16 overflow is seen",
    ]


@pytest.mark.parametrize(
    ("bfloat16", "float16", "words"),
    [
        (8.0, 8.0, "bfloat16 with jls.skip_nonfinite"),
        (7.0, 8.0, "bfloat16 with jls.skip_nonfinite"),  # not worth a loss scale
        (1.0, 8.0, "float16 with jls.loss_scaled"),  # a T4
        (2.0, 8.0, "float16 with jls.loss_scaled"),
        (1.0, 1.1, "float32 with jls.skip_nonfinite"),
        (0.1, 0.1, "float32 with jls.skip_nonfinite"),
    ],
)
def test_advice_follows_from_the_speeds(bfloat16, float16, words):
    speeds = {"float32": 2.0, "bfloat16": 2.0 * bfloat16, "float16": 2.0 * float16}
    assert f"Train in {words}" in doctor.advice(speeds)


def test_doctor_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--steps", "3"])
    assert end.value.code == 2
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err


def test_demo_may_be_named():
    with pytest.raises(SystemExit) as end:
        main(["demo", "--steps", "0"])
    assert end.value.code == 2
