"""What half precision saves: the way there and back, and how traffic is counted."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import targets
from benchmarks.half import programs
from benchmarks.half.__main__ import main
from benchmarks.half.tables import ratios
from benchmarks.half.traffic import Traffic

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
    program = Traffic(TPU)
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
    results = main([*where, "--tiny", "--target", "h100", "--models", "scan"])
    assert results == json.loads((tmp_path / "h.json").read_text())
    (ways,) = results["h100"]["models"].values()
    assert list(ways) == [*programs.WAYS]
    assert all(one["bytes"] > 0 and one["kernels"] > 0 for one in ways.values())
    said = capsys.readouterr().out
    assert "compiled, not run" in said
    assert "NVIDIA H100 80GB HBM3, bfloat16" in said
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    assert main(where) == results  # what is in the file stays


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
