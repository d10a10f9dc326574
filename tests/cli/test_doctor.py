import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jls
from jls.__main__ import main
from jls._tools.cli import doctor

pytestmark = pytest.mark.standard_promotion


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "jls", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_doctor_prints_what_a_person_can_act_on():
    done = run(COLUMNS="60", XLA_FLAGS="", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Matrix product (384 x 384, median of 25)" in done.stdout
    for check in doctor.CHECKS:
        assert f"yes  {check}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 60
    *_, where, what, write = done.stdout.split("\n\n")
    assert where.startswith("JAX has no GPU or TPU here")
    assert what.startswith("Train in ")
    assert write.startswith("Write:\n  optimizer = jls.")


# What a T4 might give; no GPU is here.
GPU = {
    "jls": "1.2.3",
    "jax": "0.10.2",
    "backend": "gpu",
    "devices": ["NVIDIA H100 80GB HBM3"] * 8,
    "xla_flags": "",
    "matmul_size": 8192,
    "matmul_gflops": {"float32": 4e3, "bfloat16": 3e3, "float16": 812345.6},
    "checks": dict.fromkeys(doctor.CHECKS, True),
    "ok": True,
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_report_of_a_gpu_ends_with_its_dtype_and_cuts_no_number(width):
    findings = GPU | {
        "advice": doctor.advice(GPU["matmul_gflops"]),
        "write": doctor.lines_to_write("float16", "jls.loss_scaled"),
    }
    lines = doctor.report(findings, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "jls 1.2.3, jax 0.10.2 on gpu: 8 x NVIDIA H100 80GB HBM3"
    start = lines.index("Matrix product (8192 x 8192, median of 25)")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["float32", "4000", "GFLOP/s", "1.00", "x", "float32"],
        ["bfloat16", "3000", "GFLOP/s", "0.75", "x", "float32"],
        ["float16", "812346", "GFLOP/s", "203.09", "x", "float32"],
    ]
    *_, end, write = "\n".join(lines).split("\n\n")
    assert write.splitlines() == [
        "Write:",
        "  optimizer = jls.loss_scaled(optimizer)",
        "  step = jls.train_step(loss_fn, optimizer,",
        "                        compute_dtype=jnp.float16)",
    ]
    assert " ".join(end.split()) == (
        "Train in float16 with jls.loss_scaled: bfloat16 runs at 0.8 x the speed of "
        "float32 here, float16 at 203.1 x."
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_lines_to_write_train_a_float32_model(dtype):
    wrapper = "jls.loss_scaled" if dtype == "float16" else "jls.skip_nonfinite"

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    names = {"jls": jls, "jnp": jnp, "loss_fn": loss_fn, "optimizer": optax.sgd(0.1)}
    write = doctor.lines_to_write(dtype, wrapper)
    assert ("compute_dtype" in write) == (dtype != "float32")
    exec(write, names)
    w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
    program = jax.make_jaxpr(names["step"])(w, names["optimizer"].init(w), x)
    short = {"float16": "f16[3,2]", "bfloat16": "bf16[3,2]", "float32": "f32[3,2]"}
    assert short[dtype] in str(program)


def test_speeds_are_medians_of_turns_of_each_dtype(monkeypatch):
    """A product of float32 takes 1, of bfloat16 2, of float16 4 seconds; two stall."""
    taken = [1.0, 2.0, 4.0] * (doctor.TURNS - 1) + [99.0, 0.0, 99.0]
    clock = iter([x for seconds in taken for x in (0.0, seconds)])
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    assert doctor._matmul_speeds(10) == {
        name: pytest.approx(2e-6 / seconds)
        for name, seconds in (("float32", 1.0), ("bfloat16", 2.0), ("float16", 4.0))
    }


@pytest.mark.more
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
    assert findings["jls"] == jls.__version__
    for name in ("jaxlib", "optax", "python", "system"):  # what a bug report needs
        assert findings[name]
    assert list(findings["checks"]) == list(doctor.CHECKS)


@pytest.mark.parametrize("broken", doctor.CHECKS)
def test_doctor_exits_with_1_if_a_check_fails(broken, monkeypatch, capsys):
    checks = {name: name != broken for name in doctor.CHECKS}
    monkeypatch.setattr(doctor, "_checks", lambda: checks)
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert f"NO   {broken}" in said
    assert "Look for fast-math in XLA_FLAGS" in " ".join(said.split())


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
        (1.29, 1.34, "bfloat16 with jls.skip_nonfinite"),  # near enough
        (1.05, 1.3, "float16 with jls.loss_scaled"),
        (1.0, 1.1, "float32 with jls.skip_nonfinite"),
        (0.1, 0.1, "float32 with jls.skip_nonfinite"),
    ],
)
def test_advice_follows_from_the_speeds(bfloat16, float16, words):
    speeds = {"float32": 2.0, "bfloat16": 2.0 * bfloat16, "float16": 2.0 * float16}
    assert doctor.advice(speeds).startswith(f"Train in {words}: ")


@pytest.mark.parametrize("bfloat16", [800.0, 100.0])
def test_advice_names_float8_where_the_chip_has_it(monkeypatch, bfloat16):
    monkeypatch.setattr(doctor, "has_float8", lambda: True)
    speeds = {"float32": 100.0, "bfloat16": bfloat16, "float16": bfloat16}
    assert ("float8_e4m3fn" in doctor.advice(speeds)) == (bfloat16 == 800.0)


def test_doctor_refuses_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--steps", "3"])
    assert end.value.code == 2
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err


def test_demo_may_be_named():
    with pytest.raises(SystemExit) as end:
        main(["demo", "--steps", "0"])
    assert end.value.code == 2
