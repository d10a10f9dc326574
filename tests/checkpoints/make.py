"""Writes the checkpoints of this folder: run it with an older jls, see README.md."""

import functools
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import serialization
from flax.training.train_state import TrainState

import jls

SCALERS = {
    "static": jls.static(8.0),
    "dynamic": jls.dynamic(8.0, growth_interval=3),
    "cumulative": jls.dynamic(
        8.0, growth_interval=3, backoff_interval=2, consecutive=False
    ),
    "hysteresis": jls.hysteresis(8.0, growth_interval=3),
    "adaptive": jls.adaptive(8.0, intervals=(2, 3)),
    "cautious": jls.cautious(8.0, growth_interval=3),
    "log_max": jls.recent_max(8.0, growth_interval=3),
    "deepspeed": jls.presets.deepspeed(8.0, scale_window=3),
}
PARAMS = {"layers": [jnp.array([0.5, -1.5]), jnp.ones(3)], "bias": jnp.float32(2.0)}
GRADS = [1.0, jnp.inf, 2.0, jnp.nan, 3.0, 0.5, 1.0]


@functools.cache
def optimizer_of(name):
    inner = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
    return jls.loss_scaled(optax.chain(inner, jls.params_ema(0.5)), SCALERS[name])


def fresh(name):
    tx = optimizer_of(name)
    return TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


@jax.jit
def step(state, grad):
    grads = jax.tree.map(lambda p: p * grad, PARAMS)
    return state.apply_gradients(grads=grads)


def trained(name):
    """A `TrainState` in the middle of a window of accumulation."""
    state = fresh(name)
    for grad in GRADS:
        state = step(state, jnp.float32(grad))
    return state


if __name__ == "__main__":
    folder = Path(__file__).parent / jls.__version__
    folder.mkdir()
    for name in SCALERS:
        state = trained(name)
        (folder / f"{name}.msgpack").write_bytes(serialization.to_bytes(state))
        with tempfile.TemporaryDirectory() as scratch:
            saved = Path(scratch) / name
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(saved, state)
            (saved / "commit_success.txt").unlink(missing_ok=True)  # has the path
            shutil.make_archive(folder / f"{name}.orbax", "zip", saved)
