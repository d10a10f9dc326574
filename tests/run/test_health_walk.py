"""The way of a state through `jls.health`: it is found once, in a few modules."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from walks import Walk, is_of_jls

import jls

PARAMS = {"w": jnp.ones(3), "b": jnp.ones(1)}
OPTIMIZER = jls.loss_scaled(optax.adam(0.1))
STATE = OPTIMIZER.init(PARAMS)


class StateWalk(Walk):
    """What `call` does with `value`.

    On the way are the functions of jls that are called by jls with a tree of two or
    more of the arrays of `value`: one array alone is a turn of a loop over the leaves,
    and what JAX calls is a turn of its own.
    """

    def __init__(self, call, value):
        self._arrays = {id(leaf) for leaf in jax.tree.leaves(value)}
        super().__init__(call)

    def is_on_way(self, frame, event):
        caller = frame.f_back
        is_called = is_of_jls(caller) or caller.f_code.co_filename == __file__
        given = self.arguments(frame).values()
        return is_called and any(self._count(argument) > 1 for argument in given)

    def _count(self, argument):
        try:
            leaves = jax.tree.leaves(argument)
        except ValueError:  # a dict with keys that have no order is none of a state
            return 0
        return sum(id(leaf) in self._arrays for leaf in leaves)


# In 0.3.0: 31 stays and 7 searches without the parameters, 37 and 7 with them. The last
# one is the return into what names a misspelt argument.
@pytest.mark.parametrize(
    ("args", "most"), [((STATE,), 8), ((STATE, PARAMS), 12)], ids=["state", "params"]
)
def test_health_finds_its_state_once(args, most):
    walk = StateWalk(lambda: jls.health(*args), STATE)
    assert walk.calls[0] == "health"
    assert 1 < len(walk.modules) <= most, walk.modules
    # From there on the wrapper's own state is numbers on the host.
    assert walk.calls.count("run_in") == 1
    assert walk.calls.count("find") == 1
    assert "wrapper_metrics" not in walk.calls


def test_a_walk_has_a_stay_for_each_module_and_for_each_return():
    walk = StateWalk(lambda: jls.metrics(STATE), STATE)
    names = [Path(module).stem for module in walk.modules]
    # It reads the variables of NNX in the scaler's state, then in the wrapper's.
    assert names[:2] == ["_metrics", "_state"]
    assert "_nnx" in names
    assert names[-2:] == ["_types", "_metrics"]
    assert walk.calls[0] == "metrics"
