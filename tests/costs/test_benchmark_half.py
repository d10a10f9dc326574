"""What half precision saves: the way there and back, and how traffic is counted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import targets
from benchmarks.half import programs, stored, timed, training
from benchmarks.half.__main__ import main
from benchmarks.half.tables import ratios
from benchmarks.hlo import Program
from jls._autocast import autocast, float8

pytestmark = pytest.mark.standard_promotion

# As a TPU's compiler writes it: a loop of 12 over a stack, of which each iteration
# slices a part, and a copy onto the chip (S(1)) that two kernels read.
TPU = """
%slices (param_0: f32[12,256], param_1: s32[]) -> f32[256] {
  %param_0 = f32[12,256]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %dynamic-slice.1 = f32[1,256]{1,0} dynamic-slice(%param_0, %param_1)
  ROOT %bitcast.1 = f32[256]{0} bitcast(%dynamic-slice.1)
}

%fused (param_0.1: f32[12,256], param_1.1: s32[]) -> f32[256] {
  %param_0.1 = f32[12,256]{1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %fusion.9 = f32[256]{0} fusion(%param_0.1, %param_1.1), kind=kLoop, calls=%slices
  ROOT %negate.1 = f32[256]{0} negate(%fusion.9)
}

%body (param: (s32[], f32[12,256], f32[256])) -> (s32[], f32[12,256], f32[256]) {
  %param = (s32[], f32[12,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%param), index=0
  %stack = f32[12,256]{1,0} get-tuple-element(%param), index=1
  %one = f32[256]{0} fusion(%stack, %i), kind=kLoop, calls=%fused
  ROOT %tuple = (s32[], f32[12,256]{1,0}, f32[256]{0}) tuple(%i, %stack, %one)
}

%condition (param.2: (s32[], f32[12,256], f32[256])) -> pred[] {
  %param.2 = (s32[], f32[12,256]{1,0}, f32[256]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%param.2), index=0
  %count = s32[] constant(12)
  ROOT %less = pred[] compare(%i.2, %count), direction=LT
}

ENTRY %main (x: f32[256], stack.3: f32[12,256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %stack.3 = f32[12,256]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %copy-start = (f32[256]{0}, f32[256]{0:S(1)}, u32[]) copy-start(%x)
  %near = f32[256]{0:S(1)} copy-done(%copy-start)
  %sine = f32[256]{0:S(1)} sine(%near)
  %cosine = f32[256]{0} cosine(%sine)
  %start = (s32[], f32[12,256]{1,0}, f32[256]{0}) tuple(%zero, %stack.3, %cosine)
  %loop = (s32[], f32[12,256]{1,0}, f32[256]{0}) while(%start), condition=%condition, body=%body
  ROOT %made = f32[256]{0} get-tuple-element(%loop), index=2
}
"""  # noqa: E501


def test_traffic_counts_loops_and_slices_and_no_array_on_the_chip():
    program = Program(TPU)
    array, number = 256 * 4, 4
    copied, written = (
        array,
        array,
    )  # the copy reads x; the sine reads and writes nothing
    in_loop = 12 * (array + number + array)  # a slice, its index, the result
    assert program.bytes == copied + written + in_loop
    assert program.kernels == 2 + 12


@pytest.fixture
def here(monkeypatch):
    """The CPU in the place of a chip."""
    monkeypatch.setattr(
        targets.Target, "devices", lambda target, chips=1: jax.devices("cpu")[:1]
    )


def test_command_compiles_and_draws(here, tmp_path, capsys):
    where = ["--json", str(tmp_path / "h.json"), "--plot", str(tmp_path / "h.png")]
    results = main([*where, "--tiny", "--target", "a100", "--models", "scan"])
    assert results == json.loads((tmp_path / "h.json").read_text())
    (ways,) = results["a100"]["models"].values()
    assert list(ways) == [*programs.WAYS]
    assert all(one["bytes"] > 0 and one["kernels"] > 0 for one in ways.values())
    said = capsys.readouterr().out
    assert "compiled, not run" in said
    assert "NVIDIA A100-SXM4-80GB, bfloat16" in said
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert main(where) == results  # what is in the file stays


@pytest.fixture
def float8_of_any_size(monkeypatch):
    monkeypatch.setattr(float8, "LEAST", 16)
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: None)


@pytest.mark.usefixtures("here", "float8_of_any_size")
def test_wide_models_are_compiled_in_float8(tmp_path, capsys):
    where = ["--json", str(tmp_path / "h.json"), "--models", "wide products"]
    results = main([*where, "--tiny", "--target", "b200"])
    (ways,) = results["b200"]["models"].values()
    assert list(ways) == [*programs.WIDE_WAYS]
    one, other = (ways[way] for way in programs.WIDE_WAYS)
    # 4 products and their derivatives, but none of the input.
    assert one.get("float8_products") is None
    assert other["float8_products"] + other["wider_products"] == 11
    # Inputs and parameters, the results between, and the cotangents of those.
    assert other["rounded"] == 4 + 4 + 4
    assert 0 < other["maxima_kernels"] <= 2 * other["rounded"]
    # Operands in half the bytes, and their powers of two.
    assert one["kept_bytes"] / 2 < other["kept_bytes"] < one["kept_bytes"]
    assert "| wide products, B200 | " in capsys.readouterr().out


@pytest.mark.parametrize("name", programs.MODELS)
def test_steps_of_all_models_are_traced_alike(name):
    model, shapes = programs.TINY[name](), []
    for way in programs.WAYS:
        run = programs.run_of(model, way, jnp.float16)
        variables = model.variables()
        state = jax.eval_shape(run.init, variables)
        batch = model.inputs, model.labels
        shapes.append(jax.eval_shape(run.step, variables, state, batch))
    assert shapes[0] == shapes[1] == shapes[2]


def test_ratios_are_of_autocast_and_by_hand():
    figures = {"bytes": 10, "temporary_bytes": 100}
    halves = {"bytes": 5, "temporary_bytes": 40}
    assert ratios({"by hand": figures, "autocast": halves}) == (0.5, 0.4)


def test_a_timed_step_has_a_row(tmp_path, capsys):
    arguments = ["--tiny", "--models", "LSTM", "--seconds", "0.1", "--rounds", "3"]
    results = timed.main([*arguments, "--json", str(tmp_path / "t.json")])
    assert results == json.loads((tmp_path / "t.json").read_text())
    (ways,) = results["models"].values()
    assert ways["by hand"]["ratio"]["median"] == 1.0
    assert all(ways[way]["seconds_per_step"]["median"] > 0 for way in programs.WAYS)
    assert "| LSTM | " in capsys.readouterr().out


@pytest.mark.usefixtures("float8_of_any_size")
def test_a_wide_model_is_timed_in_float8(tmp_path, capsys):
    arguments = ["--tiny", "--models", "wide MLP", "--seconds", "0.1", "--rounds", "3"]
    results = timed.main([*arguments, "--json", str(tmp_path / "t.json")])
    (ways,) = results["models"].values()
    assert list(ways) == ["autocast", "float8"]
    assert ways["autocast"]["ratio"]["median"] == 1.0
    assert ways["float8"]["ratio"]["median"] > 0
    said = capsys.readouterr().out
    assert "| model | autocast, ms | float8, ms | float8 / autocast | " in said
    assert "| wide MLP | " in said


def test_training_goes_on_with_what_follows(tmp_path, capsys, monkeypatch):
    names = ("float32", "float16 autocast", "float16 without a scale")
    ways = {name: training.WAYS[name] for name in names}
    monkeypatch.setattr(training, "WAYS", ways)
    arguments = ["--size", "tiny", "--steps", "20", "--seeds", "3"]
    arguments += ["--json", str(tmp_path / "t.json")]
    results = training.main([*arguments, "--plot", str(tmp_path / "t.png")])
    assert (tmp_path / "t.png").stat().st_size > 10_000
    assert results == json.loads((tmp_path / "t.json").read_text())
    for (one,) in results.values():
        assert one["steps"] == [*range(2, 21, 2)]
        assert one["losses"][-1] < one["losses"][0] < 7  # log(256) is 5.5
        assert one["health"].startswith("ok: 0 of 20 steps")
        assert one["steps_per_second"] > 0
        assert one["temporary_bytes"] > 0
    assert "loss scale" in results["float16 autocast"][0]["health"]
    assert "loss scale" not in results["float16 without a scale"][0]["health"]
    last = [results[name][0]["losses"][-1] for name in names[:2]]
    np.testing.assert_allclose(*last, rtol=1e-3)
    assert "| float16 autocast | 3 | " in capsys.readouterr().out


def test_training_in_float8_is_close_to_bfloat16(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: seen.append(float8.LEAST))
    where = ["--json", str(tmp_path / "t.json"), "--size", "tiny", "--seeds", "3"]
    ways = ["bfloat16 autocast", "float8 autocast"]
    results = training.main([*where, "--steps", "20", "--ways", *ways])
    assert seen == [16]  # some product took float8
    assert float8.LEAST == 2048
    one, other = (results[way][0]["losses"][-1] for way in ways)
    assert one != other
    np.testing.assert_allclose(one, other, rtol=1e-2)


def test_stored_parameters_are_fine_tuned_and_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stored, "LEARNING_RATES", (1e-5,))
    where = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    results = stored.main([*where, "--tiny", "--steps", "20", "24", "--seeds", "3"])
    assert results == json.loads((tmp_path / "s.json").read_text())
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    (ways,) = results.values()
    for name, (one,) in ways.items():
        assert one["steps"] == [*range(0, 25, 2)]
        assert (one["losses"][-1] < one["losses"][0]) or name == "plain bfloat16"
    gone = [one["ways"][-1] for (one,) in ways.values()]
    np.testing.assert_allclose(gone, [1, 0, 1, 1], atol=0.2)
    assert "| at the start | " in capsys.readouterr().out
    assert stored.main([*where, "--seeds"]) == results  # of the file


def test_targets_of_training_are_the_bytes_that_follow():
    data = training.text()
    assert len(data) > 5e6
    assert b"def " in data[:100_000].tobytes()
    inputs, targets = next(training.batches(data, (4, 8), 0))
    assert inputs.shape == targets.shape == (4, 8)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    again, _ = next(training.batches(data, (4, 8), 0))
    assert (again == inputs).all()
