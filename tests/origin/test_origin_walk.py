"""The way of the arguments through `jls.why` and `jls.calibrate`.

A stay is a visit to a module, by a function that is given an argument, alone or in a
record; to come back is another. Each place in the code counts once, whatever the call
it is on the way of. What a recorder runs is the user's program, and no way of ours.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from walks import Walk, is_of_jls

import jls
from jls._program.recorder import Recorder

pytestmark = pytest.mark.more

BATCH = jnp.ones((16, 4)), jnp.full((16, 1), 30.0)
PARAMS = {"w": jnp.full((4, 8), 0.53), "v": jnp.full((8, 1), 0.51)}
OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**40, max_scale=2.0**60))


def loss_fn(params, batch):
    x, y = batch
    hidden = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
    out = hidden @ params["v"].astype(jnp.float16)
    return jnp.mean((out - y).astype(jnp.float32) ** 2)


def too_large(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] * 3e3 @ params["v"] * 3e3 - y) ** 2)


def far_off(params, batch):
    x, _ = batch
    waves = jnp.sin((x @ params["w"]) * 1e3)
    return jnp.mean(waves) + jnp.mean(jnp.tanh(x @ params["w"] @ params["v"]))


def diverged(params):
    return jnp.sum(jnp.exp(params["w"]))


def step_of(loss_fn, dtype=None, state=None):
    step = jls.train_step(loss_fn, OPTIMIZER, compute_dtype=dtype)
    state = OPTIMIZER.init(PARAMS) if state is None else state
    return jax.jit(step), PARAMS, state, BATCH


def skipped():
    """The state after a skip, at a scale that skips nothing."""
    step, *args = step_of(loss_fn)
    _, state, _ = step(*args)
    return jls.set_loss_scale(state, 8.0)


class ArgumentsWalk(Walk):
    """The way of some arguments through a few calls."""

    def __init__(self, *calls):
        self._arrays = {id(x) for call in calls for x in jax.tree.leaves(call.args[1:])}
        self._known = set()
        self._running = 0
        super().__init__(lambda: [call() for call in calls])

    def is_on_way(self, frame, event):
        if frame.f_code is Recorder.__call__.__code__:
            self._running += 1 if event == "call" else -1
        elif self._running:
            return False
        outer = frame.f_back
        while is_of_jls(outer) and outer.f_code.co_name.startswith("<"):
            outer = outer.f_back
        place = event, frame.f_code, outer.f_code, outer.f_lasti
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        given = [frame.f_locals.get(x) for x in ("args", *names)]
        if place in self._known or not self._holds(given):
            return False
        self._known.add(place)
        return True

    def _holds(self, value, depth=4):
        if id(value) in self._arrays:
            return True
        values = value.values() if isinstance(value, dict) else value
        is_tree = depth and isinstance(value, dict | list | tuple)
        return is_tree and any(self._holds(x, depth - 1) for x in values)


# Before a case held what is asked of it: 87 and 111.
def test_why_hands_its_arguments_on_in_few_stays():
    nan = jax.tree.map(lambda x: x.at[0].set(jnp.nan), PARAMS)
    calls = [
        step_of(loss_fn),
        step_of(too_large, jnp.float16),
        step_of(loss_fn, state=skipped()),
        (loss_fn, nan, BATCH),
        (diverged, jax.tree.map(lambda x: 1e7 * x, PARAMS)),
    ]
    walk = ArgumentsWalk(*(partial(jls.why, *call) for call in calls))
    assert walk.calls[0] == "why"
    assert {"_came_in", "_with_keep", "_diverged", "_one_by_one"} <= set(walk.calls)
    assert len(walk.modules) <= 65, walk.modules


def test_calibrate_hands_its_arguments_on_in_few_stays():
    walk = ArgumentsWalk(
        partial(jls.calibrate, *step_of(loss_fn)),
        partial(jls.calibrate, *step_of(too_large, jnp.float16)),
        partial(jls.calibrate, *step_of(far_off, jnp.float16), losses=True),
    )
    assert walk.calls[0] == "calibrate"
    assert {"_mended", "_with_losses", "_nearer"} <= set(walk.calls)
    assert len(walk.modules) <= 65, walk.modules
