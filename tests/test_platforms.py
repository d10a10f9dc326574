"""What differs by platform is decided where a step is lowered, not where it is traced.

No GPU or TPU is needed to look at the program that it would be given.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from shared import assert_identical

import jls
from jls import _rollback_cpu

pytestmark = pytest.mark.standard_promotion

PARAMS = {"a": jnp.ones((4, 8)), "b": jnp.full(8, 0.5), "c": jnp.ones(8)}
BATCHES = np.float32([1.0, np.inf, 2.0, np.nan])


def loss_fn(params, x):
    hidden = jnp.tanh(x * params["a"]) @ params["b"]
    return jnp.sum(hidden**2) + jnp.sum(params["c"] ** 2)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def made(inner=CLIPPED):
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=2))
    return jax.jit(jls.train_step(loss_fn, optimizer)), optimizer.init(PARAMS)


def test_one_trace_gives_the_program_of_each_platform(monkeypatch):
    def host(*_):
        raise AssertionError("a decision of traced code asked for the host")

    step, state = made(optax.adamw(0.1))  # a clip would be the check
    monkeypatch.setattr(jax, "default_backend", host)
    monkeypatch.setattr(jax, "device_count", host)
    traced = step.trace(PARAMS, state, BATCHES[0])
    programs = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    # Two numbers in one reduction, and ones in the place of bad gradients: on CPU only.
    pair = re.compile(r"stablehlo\.reduce\(.* init: .*\), \(")
    together = {p: len(pair.findall(programs[p])) for p in programs}
    assert together["cpu"] >= 2
    assert together["cuda"] == together["tpu"] == 0
    # On GPU the two small leaves of one shape are stacked.
    stacks = {p: programs[p].count("tensor<2x8xf32>") for p in programs}
    assert stacks["cuda"] > 0
    assert stacks["cpu"] == stacks["tpu"] == 0
    here = traced.lower().compile().as_text()
    assert " conditional(" not in here  # it is decided before


def test_a_program_for_all_platforms_is_right_on_this_one():
    step, state = made()

    def flat(leaves, x):
        params, state = structure.unflatten(leaves)
        params, state, report = step(params, state, x)
        return jax.tree.leaves((params, state)), report.skipped

    leaves, structure = jax.tree.flatten((PARAMS, state))
    flat = jax.jit(flat)
    exported = export.export(flat, platforms=("cpu", "cuda", "tpu"))
    program = exported(leaves, BATCHES[0])
    ours, others = leaves, leaves
    for x in BATCHES:
        ours, skipped = flat(ours, x)
        others, also_skipped = program.call(others, x)
        assert_identical(others, ours)
        assert skipped == also_skipped == (not np.isfinite(x))


def test_an_optimizer_gets_gradients_as_they_are_where_nothing_could_harm_it(
    monkeypatch,
):
    """On GPU and TPU, where it lets XLA read them once for the norm and the check."""
    optimizer = jls.loss_scaled(optax.clip_by_global_norm(1.0), jls.dynamic(8.0))
    grads, state = jnp.ones(5), optimizer.init(jnp.ones(5))
    selects, at_once = {}, _rollback_cpu._at_once.__wrapped__
    for platform in ("cpu", "cuda", "tpu"):

        def choose(*args, default, platform=platform, **forms):
            return forms.get(platform, default)(*args)

        # What its program becomes, compiled here.
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)
        monkeypatch.setattr(_rollback_cpu, "_at_once", jax.jit(at_once))
        step = jax.jit(lambda *args: optimizer.update(*args))
        text = step.lower(grads, state).compile().as_text()
        selects[platform] = len(re.findall(r"f32\[5\]\S* select\(", text))
    assert selects["cpu"] == selects["tpu"] + 1
    assert selects["cuda"] == selects["tpu"]


def test_a_gpu_counts_in_one_kernel():
    """Of those that read one array XLA makes one, of those that read scalars none."""
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
    grads, state = jnp.ones(5), optimizer.init(jnp.ones(5))
    traced = jax.jit(optimizer.update).trace(grads, state)
    held = {
        platform: text.count("optimization_barrier")
        for platform in ("cpu", "cuda", "rocm", "tpu")
        for text in [traced.lower(lowering_platforms=(platform,)).as_text()]
    }
    assert held == {"cpu": 0, "cuda": 1, "rocm": 1, "tpu": 0}
