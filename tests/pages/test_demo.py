"""The demo trains, draws and reports; it stops when it is told to."""

import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jls._tools.cli import demo, demo_report

INSTALLS = ('pip install -e ".[demo]"', "pip install flax matplotlib rich scikit-learn")


def run(*arguments, code="", cwd=None, width=88, **environment):
    """`python -m jls`, or Python code that ends in it."""
    program = ["-c", code] if code else ["-m", "jls"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ
        | {"COLUMNS": str(width), "PYTHONIOENCODING": "utf-8"}
        | environment,
    )


def without(module):
    """Code that runs `python -m jls` as if `module` were not installed."""
    return (
        f"import sys, runpy; sys.modules[{module!r}] = None; "
        "runpy.run_module('jls', run_name='__main__', alter_sys=True)"
    )


# In the place of the demo's runs: they end at once, and note where their arrays are.
IN_NO_TIME = """if True:
    import jax.numpy as jnp
    import numpy as np
    from jls._tools.cli import demo
    places, ones = [], np.ones(2)
    def train(dtype, scaled, digits, steps, seed):
        places.extend(x.devices() for x in (*digits, jnp.ones(3, dtype)))
        yield demo.Progress(ones, ones, ones, ones > 0, 0.5)
    demo.train = train
"""


def test_the_demo_shows_float16_failing_and_jls_matching_float32(tmp_path):
    plot = tmp_path / "plot.png"
    done = run("--output", str(plot))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = re.findall(
        r"│ (b?float\S+(?: \S+)*) +│ +([\d.]+)% │ +\S+ │ +(\S+) │ +(\S+) │ +([\d.]+)% │"
        r" ([\d.]+) MB │",
        done.stdout,
    )
    assert [row[0] for row in rows] == [row[0] for row in demo_report.CONFIGURATIONS]
    float32, unscaled, scaled, bfloat16 = (float(row[1]) for row in rows)
    assert float32 > 93
    assert unscaled < 30
    assert abs(scaled - float32) < 3
    assert abs(bfloat16 - float32) < 3
    assert int(rows[2][2]) >= 1  # skips
    assert float(rows[0][4]) < 20 < 90 < float(rows[1][4])  # zero gradients
    memory = [float(row[5]) for row in rows]
    assert memory[1] == memory[2] == memory[3] < 0.75 * memory[0]
    words = " ".join(done.stdout.split())
    assert "learned nothing" in words
    assert "is tiny, which says nothing: guessing has 9.0e-02" in words
    assert "The network is float32 in all four runs." in words
    assert "matched float32" in " ".join(done.stdout.split())
    highest = re.search(r"2\^15\s+and\s+2\^(\d+)", done.stdout)
    assert highest is not None, "the scale never grew"
    assert int(highest[1]) > 15
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(plot) in done.stdout.replace("\n", "")


def test_a_short_run_writes_its_plot_where_it_says(tmp_path):
    done = run("--steps", "3", "--seed", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Plot: jls_demo.png" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["jls_demo.png"]
    assert "try more --steps" in " ".join(done.stdout.split())


def test_no_plot_writes_nothing_and_needs_no_matplotlib(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None\n" + IN_NO_TIME
    code += "from jls.__main__ import main\nsys.exit(main())"
    done = run("--steps", "2", "--no-plot", code=code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Plot" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_extra():
    done = run("--help", code=without("flax"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m jls" in done.stdout


@pytest.mark.parametrize("module", ["flax", "matplotlib"])
def test_a_missing_package_is_answered_with_the_command_that_installs_it(module):
    done = run(code=without(module))
    assert done.returncode == 1
    assert module in done.stderr
    for command in INSTALLS:
        assert command in done.stderr
    assert "Traceback" not in done.stderr


# What happens when the module is imported: the user presses Ctrl-C, and JAX may be in
# a callback, where an exception would be lost.
INTERRUPTS = {
    "anywhere": "os.kill(os.getpid(), signal.SIGINT)",
    "in a callback": "gc.callbacks.append("
    "lambda *_: os.kill(os.getpid(), signal.SIGINT)); gc.collect()",
}


@pytest.mark.parametrize(
    ("command", "module", "interrupt"),
    [
        ("demo", "sklearn", "anywhere"),
        ("demo", "jls._tools.cli.demo", "in a callback"),
        ("doctor", "jls._tools.cli.doctor", "anywhere"),
    ],
)
def test_an_interrupt_ends_in_one_line(command, module, interrupt):
    code = (
        "import gc, os, runpy, signal, sys\n"
        # The tests themselves may run in the background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: {INTERRUPTS[interrupt]}\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('jls', run_name='__main__', alter_sys=True)"
    )
    done = run(command, code=code)
    assert (done.returncode, done.stderr.strip()) == (130, "Stopped.")


def test_a_process_in_the_background_keeps_ignoring_interrupts():
    code = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "try: runpy.run_module('jls', run_name='__main__', alter_sys=True)\n"
        "finally: print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    )
    assert run("--version", code=code).stdout.splitlines()[-1] == "True"


class FakeGpu:
    platform, device_kind = "gpu", "Tesla T4"


@pytest.mark.parametrize(
    ("backend", "platform"), [("gpu", "gpu"), ("cpu", "cpu"), ("tpu", "cpu")]
)
def test_the_demo_trains_on_the_gpu_if_jax_has_one(backend, platform, monkeypatch):
    devices = {"gpu": [FakeGpu()], "cpu": jax.local_devices(backend="cpu")}
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices[backend])
    device = demo.choose_device()
    assert device is devices[platform][0]
    said = "on the GPU, Tesla T4" if platform == "gpu" else "on the CPU"
    assert demo_report.on_device(device) == said


def test_every_run_is_on_the_device_that_was_chosen():
    """On the second of two CPUs, in the place of a GPU."""
    code = f"""{IN_NO_TIME}
    import jax
    from jls._tools.cli import demo_report
    _, second = jax.devices()
    demo.choose_device = lambda: second
    demo_report.train_all(2, 0)
    print(len(places), all(x == {{second}} for x in places))
    """
    flags = "--xla_force_host_platform_device_count=2"
    done = run(code=code, XLA_FLAGS=flags)
    assert done.stdout.splitlines()[0] == "Training on the CPU."
    assert done.stdout.splitlines()[-1] == "20 True", done.stderr


@pytest.mark.parametrize("width", [60, 77, 78, 120])
def test_the_table_fits_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    runs = demo_report.Runs(*map(finished, (0.95, 0.10, 0.94, 0.95)))
    demo_report.show(runs)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for text in ("95.0%", "2^16", "50.0%", "accuracy", "with jls", "1.0e+00", "2.4 MB"):
        assert text in printed
    wide, narrow = (demo_report._status(runs.scaled, flag) for flag in (True, False))
    assert wide == "loss 1.0e+00  scale 2^16  skips 1"
    assert len(f"{'':18} 1200/1200 {narrow}") <= 60
    assert len(f"{'':18} {'':12} 1200/1200 {wide}") <= demo_report.WIDE


def finished(accuracy, applied=(False, True, True), zeros=(0.0, 0.5, 0.6)):
    return demo.Progress(
        losses=np.ones(3, np.float32),
        zeros=np.array(zeros, np.float32),
        scales=np.array([2.0**14, 2.0**15, 2.0**16], np.float32),
        applied=np.array(applied),
        accuracy=accuracy,
        memory=2364508,
    )


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        (
            (0.95, 0.10, 0.94, 0.96),
            [
                "learned nothing",
                "matched float32",
                "2^16 (max_scale=2^40), and 1 step whose",
                "reads 96.0%, since",
            ],
        ),
        (
            (0.95, 0.10, 0.40, 0.50),
            [
                "learned nothing",
                "did not match float32",
                "scale reads 50.0%. The",
            ],
        ),
        ((0.95, 0.94, 0.95, 0.95), ["kept up this time", "matched float32"]),
        ((0.80, 0.10, 0.95, 0.80), ["learned nothing", "better than float32"]),
        ((0.20, 0.10, 0.95, 0.20), ["try more --steps"]),
    ],
)
def test_the_sentence_says_what_the_results_say(accuracies, words):
    text = demo_report.sentence(demo_report.Runs(*map(finished, accuracies)))
    assert all(word in text for word in words), text


@pytest.mark.standard_promotion
def test_memory_is_that_of_shapes_worked_out_by_hand():
    digits = demo.load(0)
    images, hidden, scores = (1347 * size for size in (64, 64, 10))
    float32, half = (
        next(demo.train(dtype, False, digits, 1, 0)).memory
        for dtype in (np.float32, np.float16)
    )
    # Of each sigmoid its result, which a product takes, and its slope; six layers.
    taken, rest = images + 6 * hidden, 6 * hidden + scores
    assert float32 == pytest.approx(4 * (taken + rest), rel=0.02)
    assert half == pytest.approx(2 * taken + 4 * rest, rel=0.02)


def test_three_skips_at_the_start_point_to_calibrate():
    def at_start(*applied):
        return demo_report.at_start(finished(0.9)._replace(applied=np.array(applied)))

    assert at_start(True, False, False, False) == ""
    assert at_start(False, False, True) == ""
    assert "The first 3 were among them: jls.calibrate" in at_start(*[False] * 3, True)
    assert "The first 4 were" in at_start(*[False] * 4)


def test_the_zeros_of_a_skipped_step_do_not_count():
    assert demo_report.first_zeros(finished(0.9)) == 0.5
    none_taken = finished(0.9, applied=(False, False, False))
    assert math.isnan(demo_report.first_zeros(none_taken))


@pytest.mark.standard_promotion
def test_the_same_seed_gives_the_same_run():
    digits = demo.load(3)
    assert len(digits.test_labels) == 450
    assert np.bincount(np.asarray(digits.test_labels)).min() >= 43

    def losses():
        (progress,) = demo.train(np.float32, False, digits, 2, 3)
        return progress.losses

    np.testing.assert_array_equal(losses(), losses())
