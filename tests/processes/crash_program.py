"""A training run that saves checkpoints, made to be killed: see test_crash.py.

It says on its standard output what it does: `step 7 <sum of the state>` after a step,
`save 7` and `saved 7` around a checkpoint, `restore 7` when it goes on from one.
"""

import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

import jls

SAVE_EVERY = 4
OVERFLOWS, BAD_LOSSES = (3, 4), (8,)  # of each ten steps

schedule = optax.cosine_decay_schedule(0.1, 500)
inner = optax.MultiSteps(optax.adamw(schedule), 2).gradient_transformation()
optimizer = jls.loss_scaled(
    optax.chain(inner, jls.params_ema(0.9)), jls.dynamic(2.0**12, growth_interval=3)
)


def initial():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (4, 8)), "v": jnp.ones((8, 1))}
    return params, optimizer.init(params)


def loss_fn(params, x, factor):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    out = jnp.tanh(x.astype(jnp.float16) @ half["w"]) @ half["v"]
    return factor * jnp.mean(out.astype(jnp.float32) ** 2)


def _step(carry, x, factor):
    params, state = carry
    loss, grads = jls.value_and_grad(loss_fn)(state, params, x, factor)
    updates, state = optimizer.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


step = jax.jit(_step, donate_argnums=0)


def batch(i):
    x = np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)
    factor = 1e30 if i % 10 in OVERFLOWS else np.nan if i % 10 in BAD_LOSSES else 1.0
    return x, np.float32(factor)


def digest(carry):
    total = 0
    for leaf in jax.tree.leaves(jax.device_get(carry)):
        total = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), total)
    return total


class Files:
    """One file that is written aside and put in its place."""

    def __init__(self, folder):
        self.path = Path(folder) / "checkpoint"

    def restore(self, template):
        if not self.path.exists():
            return 0, None
        return serialization.from_bytes((0, template), self.path.read_bytes())

    def save(self, i, carry):
        aside = self.path.with_suffix(".new")
        aside.write_bytes(serialization.to_bytes((i, carry)))
        aside.replace(self.path)

    def close(self):
        pass


class Orbax:
    def __init__(self, folder, is_async):
        import orbax.checkpoint as ocp

        self.args = ocp.args
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=is_async
        )
        self.manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def restore(self, template):
        latest = self.manager.latest_step()
        if latest is None:
            return 0, None
        args = self.args.StandardRestore(template)
        return latest, self.manager.restore(latest, args=args)

    def save(self, i, carry):
        self.manager.save(i, args=self.args.StandardSave(carry))

    def close(self):
        self.manager.wait_until_finished()
        self.manager.close()


def say(*words):
    print(*words, flush=True)


def main(folder, store, total, result):
    is_async = store == "async"
    store = Files(folder) if store == "files" else Orbax(folder, is_async)
    first, carry = store.restore(jax.eval_shape(initial))
    carry = initial() if carry is None else carry
    say("restore", first)
    for i in range(first, total):
        carry = step(carry, *batch(i))
        say("step", i + 1, digest(carry))
        if (i + 1) % SAVE_EVERY == 0:
            say("save", i + 1)
            store.save(i + 1, carry)
            say("saved", i + 1)
    store.close()
    Path(result).write_bytes(serialization.to_bytes(carry))
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
