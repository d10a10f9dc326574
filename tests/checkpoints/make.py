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
    "adaptive": jls.presets.mindformers_adaptive(8.0, 2, 2, 3, 2),
    "deepspeed": jls.presets.deepspeed(8.0, scale_window=3),
}
SPIKES = {
    "spikes": jls.spikes(window=4, sigmas=3.0, budget=2),
    "spike_limit": jls.presets.spike_limit(10.0),
    "levanter_spikes": jls.presets.levanter_spikes(4, 3.0),
    "maxtext_spikes": jls.presets.maxtext_spikes(4, 3.0),
    "olmo_spikes": jls.presets.olmo_spikes(4, 3.0),
}
PARAMS = {"layers": [jnp.array([0.5, -1.5]), jnp.ones(3)], "bias": jnp.float32(2.0)}
GRADS = [1.0, jnp.inf, 2.0, jnp.nan, 3.0, 0.5, 1.0]
# Enough for a window, a spike, a loss that is NaN, and one more.
SPIKY = [(g, 1.0) for g in (1.0, 1.5, 0.5, jnp.inf, 1.0, 99.0)]
SPIKY += [(1.0, jnp.nan), (1.0, 2.0)]


def _inner():
    inner = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
    return optax.chain(inner, jls.params_ema(0.5))


def _cases():
    paddles = {"init_loss_scaling": 8.0, "incr_every_n_steps": 3}
    presets = {
        "torch": jls.presets.torch(8.0, growth_interval=3),
        "paddle": jls.presets.paddle(**paddles),
        "paddle_doc": jls.presets.paddle_doc(**paddles),
        "mindspore": jls.presets.mindspore(8.0, 2.0, 3),
        "mindformers_adaptive": jls.presets.mindformers_adaptive(8.0, 2.0, 20),
        "keras": jls.presets.keras(8.0, dynamic_growth_steps=3),
        "flax": jls.presets.flax(scale=8.0, growth_interval=3),
        "megatron": jls.presets.megatron(8.0, growth_interval=3),
    }
    for name, scaler in (SCALERS | presets).items():
        yield name, jls.loss_scaled(_inner(), scaler)
    for name, policy in SPIKES.items():
        yield name, jls.loss_scaled(_inner(), SCALERS["dynamic"], spikes=policy)
    yield "skip_nonfinite", jls.skip_nonfinite(_inner())
    # The spike policy of one's own, whose state is one array.
    own = jls.types.SpikePolicy(
        lambda: jnp.float32(jnp.inf),
        lambda state, loss, norm: (jnp.minimum(state, norm), norm > 9 * state),
    )
    yield "own_spikes", jls.skip_nonfinite(_inner(), spikes=own)
    yield (
        "in_a_chain",
        optax.chain(optax.clip(1.0), jls.loss_scaled(optax.adam(0.1)), optax.scale(2)),
    )
    yield (
        "two_wrappers",
        optax.partition(
            {
                "layers": jls.loss_scaled(optax.adam(0.1), SCALERS["dynamic"]),
                "bias": jls.skip_nonfinite(optax.sgd(0.1), spikes=SPIKES["spikes"]),
            },
            {"layers": "layers", "bias": "bias"},
        ),
    )


@functools.cache
def optimizers():
    """The optimizer of each checkpoint, by name."""
    return dict(_cases())


# Of those that libraries read in another way, also as a folder of Orbax's.
WITH_ORBAX = {"static", "dynamic", "adaptive", "spikes", "own_spikes"}
WITH_ORBAX |= {"skip_nonfinite", "two_wrappers"}


def fresh(name):
    tx = optimizers()[name]
    return TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


@jax.jit
def step(state, grad, loss=None):
    grads = jax.tree.map(lambda p: p * grad, PARAMS)
    value = {} if loss is None else {"value": loss}
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, **value)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def trained(name):
    """A `TrainState` in the middle of a window of accumulation."""
    state = fresh(name)
    if "spike" not in name and name != "two_wrappers":
        for grad in GRADS:
            state = step(state, jnp.float32(grad))
        return state
    for grad, loss in SPIKY:
        state = step(state, jnp.float32(grad), jnp.float32(loss))
    return state


if __name__ == "__main__":
    folder = Path(__file__).parent / jls.__version__
    folder.mkdir()
    for name in optimizers():
        state = trained(name)
        (folder / f"{name}.msgpack").write_bytes(serialization.to_bytes(state))
        if name not in WITH_ORBAX:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            saved = Path(scratch) / name
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(saved, state)
            (saved / "commit_success.txt").unlink(missing_ok=True)  # has the path
            shutil.make_archive(folder / f"{name}.orbax", "zip", saved)
