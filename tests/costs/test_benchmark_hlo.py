"""Counting in the text of compiled programs, whose bytes are known by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo
from benchmarks.hlo import Program


def program(*lines, other=""):
    body = "\n".join(f"  {line}" for line in lines)
    return Program(
        f"HloModule m\n{other}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def compiled_here(fun, *args):
    return Program(jax.jit(fun).lower(*args).compile().as_text())


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)(2,1)S(1)}", 24),
        ("(f16[8]{0}, (pred[3]{0}, s32[]), /*index=2*/bf16[2]{0})", 16 + 3 + 4 + 4),
        ("s4[3]", 2),
        ("f8e4m3fn[5]", 5),
        ("c64[2]", 16),
        ("f32[0]", 0),
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert hlo.array_bytes(shape) == size


def test_what_moves_no_data_is_free():
    found = program(
        "%p = f32[8]{0:T(8)} parameter(0)",
        "%b = f32[2,4]{1,0} bitcast(%p)",
        "%t = (f32[2,4]{1,0}, f32[8]{0}) tuple(%b, %p)",
        '%a = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%g = f32[8]{0} get-tuple-element(%t), index=1",
        '%n = f32[8]{0} negate(%g), metadata={op_name="jit(f)/neg"}',
        "ROOT %s = f32[8]{0:T(8)(2,1)} add(%n, %p)",
    )
    assert (found.kernels, found.bytes) == (2, 64 + 96)
    assert [one.kind for one in found.launched] == ["negate", "add"]


LOOP = """
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %j = s32[] add(%i, %i)
  %y = f32[8]{0} sine(%x)
  ROOT %r = (s32[], f32[8]{0}) tuple(%j, %y)
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}
"""


@pytest.mark.parametrize(
    ("config", "kernels", "size"),
    [
        (', backend_config={"known_trip_count":{"n":"5"}}', 10, 5 * (8 + 64)),
        ("", 3, 8 + 64 + 5),  # once, and the condition
    ],
)
def test_a_loop_counts_as_often_as_it_is_known_to_run(config, kernels, size):
    found = program(
        "%p = (s32[], f32[8]{0}) parameter(0)",
        "ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%condition, body=%body"
        + config,
        other=LOOP,
    )
    assert (found.kernels, found.bytes) == (kernels, size)


BRANCHES = """
%small (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%x)
}

%large (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %s = f32[8]{0} sine(%y)
  ROOT %c = f32[8]{0} cosine(%s)
}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%small, %large}",
        "true_computation=%large, false_computation=%small",
    ],
)
def test_the_larger_branch_counts(branches):
    found = program(
        "%p = f32[8]{0} parameter(0)",
        "%i = s32[] constant(0)",
        f"ROOT %c = f32[8]{{0}} conditional(%i, %p, %p), {branches}",
        other=BRANCHES,
    )
    assert (found.kernels, found.bytes) == (2, 128)


def test_called_computations_and_asynchronous_instructions_count_once():
    found = program(
        "%p = f32[8]{0} parameter(0)",
        "%c = f32[8]{0} call(%p), to_apply=%small",
        "%s = (f32[8]{0}, f32[16]{0}) all-gather-start(%c), dimensions={0}",
        "%d = f32[16]{0} all-gather-done(%s)",
        "%k = (f32[16]{0}, f32[16]{0:S(1)}, u32[]{:S(2)}) copy-start(%d)",
        "ROOT %e = f32[16]{0:S(1)} copy-done(%k)",
        other=BRANCHES,
    )
    assert found.kernels == 2  # the copy runs in the background
    assert found.bytes == 64 + (32 + 64) + 64  # onto the chip it only reads
    assert found.collectives == {"all-gather": {"count": 1, "bytes": 64}}


FUSED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%reduced (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%sliced (x: f32[64], y: f32[8], i: s32[]) -> f32[8] {
  %i = s32[] parameter(2)
  %x = f32[64]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %d = f32[8]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={8}
  ROOT %s = f32[8]{0} add(%d, %y)
}

%updated (x: f32[64], y: f32[8], i: s32[]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[64]{0} dynamic-update-slice(%x, %y, %i)
}
"""


def test_fusions_read_what_they_slice_and_write_what_they_update():
    found = program(
        "%x = f32[64]{0} parameter(0)",
        "%y = f32[8]{0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%s = f32[8]{0} fusion(%x, %y, %i), kind=kLoop, calls=%sliced",
        "%r = f32[64]{0} fusion(%x), kind=kCustom, calls=%reduced",
        "ROOT %u = f32[64]{0} fusion(%r, %s, %i), kind=kLoop, calls=%updated",
        other=FUSED,
    )
    sizes = [one.bytes for one in found.launched]
    assert sizes == [32 + 32 + 4 + 32, 256 + 256, 32 + 4 + 32]
    assert found.collectives == {"all-reduce": {"count": 1, "bytes": 256}}


def test_programs_of_this_machine():
    x = jnp.ones((4, 4))
    one = compiled_here(lambda x: jnp.tanh(x) + 1, x)
    assert (one.kernels, one.bytes) == (1, 128)
    assert compiled_here(lambda x: x @ x @ x, x).kernels == 2

    def loop(x):
        return jax.lax.fori_loop(0, 7, lambda i, x: x @ x, x)

    assert compiled_here(loop, x).kernels >= 7
    branch = compiled_here(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x)
    assert branch.kernels >= 2  # the comparison and a branch
