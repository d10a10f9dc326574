"""A whole train step through `jax.export`, and run in a process of its own."""

import contextlib
import importlib.util
import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from shared import NAN, W, assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

# The second and the fifth have a finite loss and no finite gradient.
BATCHES = [1.0, np.inf, 2.0, np.nan, np.inf, 3.0, 0.5]


def adamw():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def momentum():
    return optax.sgd(0.1, momentum=0.9)


def windows():
    inner = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    return optax.chain(inner.gradient_transformation(), jls.params_ema(0.9))


# Name -> the inner optimizer and the scaler.
STEPS = {
    "dynamic": (adamw, jls.dynamic(8.0, growth_interval=2)),
    "adaptive": (momentum, jls.presets.mindformers_adaptive(8.0, 2, 1, 3, 1)),
    "hysteresis": (momentum, jls.hysteresis(8.0, growth_interval=2)),
    "multi_steps_and_ema": (windows, jls.dynamic(8.0, growth_interval=2)),
}

# Flat steps need nothing but jax where they run; one with trees needs the types.
PROGRAM = """
import json, pickle, sys
from pathlib import Path

import jax
import numpy as np
from jax import export

folder, names, batches = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
for name in names:
    if name == "tree":
        assert "jls" not in sys.modules
        import jls, optax
        for state in (optax.EmptyState, optax.ScaleByAdamState):
            export.register_namedtuple_serialization(
                state, serialized_name=f"optax.{state.__name__}"
            )
    step = export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
    carry = pickle.loads((folder / f"{name}.start").read_bytes())
    steps = []
    for batch in batches:
        carry, metrics = step.call(carry, np.float32(batch))
        steps.append(jax.device_get((carry, metrics)))
    (folder / f"{name}.steps").write_bytes(pickle.dumps(steps))
"""


def loss_fn(params, x):
    """Finite at x = inf, where its gradient is not."""
    return jnp.sum(jnp.tanh(params["w"] * x)) + params["b"] ** 2


def make(name):
    inner, scaler = STEPS[name]
    optimizer = jls.loss_scaled(inner(), scaler)
    params = {"w": jnp.array([0.5, -1.5]), "b": jnp.float32(-0.0)}

    @jax.jit
    def step(carry, x):
        params, state = carry
        loss, grads = jls.value_and_grad(loss_fn)(state, params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return (params, state), jls.metrics(state)

    return step, (params, optimizer.init(params))


def flattened(step, start):
    """`step` from a list of arrays to such a list."""
    structure = jax.tree.structure(start)

    @jax.jit
    def flat(leaves, x):
        carry, metrics = step(jax.tree.unflatten(structure, leaves), x)
        return jax.tree.leaves(carry), metrics

    return flat, jax.tree.leaves(start)


def run(step, carry):
    steps = []
    for x in BATCHES:
        carry, metrics = step(carry, np.float32(x))
        steps.append((carry, metrics))
    return steps


def test_exported_steps_give_the_same_bits_in_another_process(tmp_path):
    expected = {}
    for name in [*STEPS, "tree"]:
        if name == "tree":
            step, start = make("dynamic")
            for state in (optax.EmptyState, optax.ScaleByAdamState):
                with contextlib.suppress(ValueError):  # by another test, under its name
                    export.register_namedtuple_serialization(
                        state, serialized_name=f"optax.{state.__name__}"
                    )
        else:
            step, start = flattened(*make(name))
        expected[name] = run(step, start)
        exported = export.export(step)(start, np.float32(1.0))
        (tmp_path / f"{name}.bin").write_bytes(exported.serialize())
        (tmp_path / f"{name}.start").write_bytes(pickle.dumps(jax.device_get(start)))
    arguments = [str(tmp_path), json.dumps(list(expected)), json.dumps(BATCHES)]
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, timeout=120)
    for name, steps in expected.items():
        metrics = jax.device_get([metrics for _, metrics in steps])
        applied = [1, 0, 1, 0, 0, 1, 1]
        assert [m["applied"] for m in metrics] == applied
        assert metrics[-1]["nonfinite_losses"] == 1
        assert len({float(m["loss_scale"]) for m in metrics}) > 1
        elsewhere = pickle.loads((tmp_path / f"{name}.steps").read_bytes())
        assert_identical(elsewhere, steps)


def test_flat_step_needs_no_registration_and_a_tree_of_optax_does():
    inner = optax.rmsprop(0.1)  # of whose state no other test knows
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    params = jnp.ones(2)
    args = params, optimizer.init(params), params
    with pytest.raises(ValueError, match=r"unregistered type .*optax"):
        export.export(jax.jit(optimizer.update))(*args).serialize()
    leaves, structure = jax.tree.flatten(args)

    @jax.jit
    def flat(leaves):
        return jax.tree.leaves(optimizer.update(*structure.unflatten(leaves)))

    again = export.deserialize(export.export(flat)(leaves).serialize())
    assert_identical(again.call(leaves), flat(leaves))


def test_step_can_be_exported_for_other_platforms():
    step, start = flattened(*make("adaptive"))
    platforms = "cpu", "cuda", "tpu"
    exported = export.export(step, platforms=platforms)(start, np.float32(1.0))
    again = export.deserialize(exported.serialize())
    assert again.platforms == platforms
    assert_identical(again.call(start, np.float32(1.0)), step(start, np.float32(1.0)))


def test_step_can_be_exported():
    """flax F11, O8, J13: the state was not registered, so no export could be saved."""
    inner = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, s))
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    args = NAN, optimizer.init(W), W
    exported = export.export(jax.jit(optimizer.update))(*args)
    assert exported.call(*args)[1].scaler_state.loss_scale == 4.0
    for state_type in (jls.types.ScalerState, jls.types.LossScaledState):
        with pytest.raises(ValueError, match=state_type.__name__):
            export.register_namedtuple_serialization(
                state_type, serialized_name="registered.Twice"
            )
    if importlib.util.find_spec("flatbuffers"):
        again = export.deserialize(exported.serialize())
        assert_identical(again.call(*args), exported.call(*args))
