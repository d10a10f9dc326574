"""Which products run as float8: `check_step` reads the executable on a GPU."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jls
from jls._autocast import autocast, float8
from jls._tools.check import float8 as of_check
from jls._tools.check.float8 import float8_in

pytestmark = pytest.mark.standard_promotion

# As XLA writes it for an H100, with fewer words.
HLO = """
%fused (p0: f8e4m3fn[16,16], p1: f8e4m3fn[16,16]) -> bf16[16,16] {
  %p0 = f8e4m3fn[16,16]{1,0} parameter(0)
  %p1 = f8e4m3fn[16,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[16,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, \
metadata={op_name="jit(step)/jvp(jls_autocast)/one/jls_float8/dot_general"}
}
ENTRY %main (a: f8e5m2[16,16], b: bf16[16,16]) -> bf16[16,16] {
  %a = f8e5m2[16,16]{1,0} parameter(0)
  %b = bf16[16,16]{1,0} convert(%a), metadata={op_name="jit(step)/jls_float8/convert"}
  %gemm.2 = (bf16[16,16]{1,0}, s8[9]{0}) custom-call(%a, %a), \
custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="two/jls_float8/dot"}
  %gemm.3 = (bf16[16,16]{1,0}, s8[9]{0}) custom-call(%b, %b), \
custom_call_target="__cublas$gemm", \
metadata={op_name="jit(step)/transpose(jvp(jls_autocast))/3/jls_float8/transpose()/dot"}
  %gemm.4 = (bf16[16,16]{1,0}, s8[9]{0}) custom-call(%b, %b), \
custom_call_target="__cublas$gemm", metadata={op_name="small/dot"}
  %dot.5 = bf16[16,16]{1,0} dot(f8e5m2[16,16]{1,0} %a, f8e5m2[16,16]{1,0} %a), \
metadata={op_name="five/jls_float8/dot"}
  ROOT %dot.6 = bf16[16,16]{1,0} dot(%a, %b), metadata={op_name="six/jls_float8/dot"}
}
"""


def test_what_runs_as_float8_is_read_from_the_executable():
    right, others = float8_in(HLO)
    assert right == ["jit(step)/jvp/one/dot_general", "two/dot", "five/dot"]
    assert others == ["jit(step)/transpose(jvp)/3/dot", "six/dot"]


def test_check_step_says_on_a_gpu_what_runs_as_float8(monkeypatch):
    monkeypatch.setattr(float8, "LEAST", 16)
    monkeypatch.setattr(autocast, "warn_of_chip", lambda: None)

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - 1) ** 2)

    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=jnp.float8_e4m3fn))
    params = {"in": jnp.ones((32, 64)), "out": jnp.ones((64, 32))}
    args = params, optimizer.init(params), jnp.ones((48, 32))
    assert not any("float8" in x for x in jls.check_step(step, *args).notes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = jls.check_step(step, *args)
    (note,) = [x for x in found.notes if "run as float8" in x]
    assert note.startswith("0 of 5 products in float8 run as float8 on cpu. In a wider")
    monkeypatch.setattr(of_check, "float8_in", lambda text: ([], []))
    assert not any("float8" in x for x in jls.check_step(step, *args).notes)
