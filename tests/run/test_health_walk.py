"""The way of a state through `jls.health`: it is found once, in a few modules."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jls

ROOT = str(Path(jls.__file__).parent)
PARAMS = {"w": jnp.ones(3), "b": jnp.ones(1)}
OPTIMIZER = jls.loss_scaled(optax.adam(0.1))
STATE = OPTIMIZER.init(PARAMS)


def is_of_jls(frame):
    return frame is not None and frame.f_code.co_filename.startswith(ROOT)


class Walk:
    """What `call` does with `value`, as `sys.setprofile` sees it.

    On the way are the functions of jls that are called by jls with a tree of two or
    more of the arrays of `value`: one array alone is a turn of a loop over the leaves,
    and what JAX calls is a turn of its own. A stay is a run of such functions in one
    module; to come back to the caller's module begins another.
    """

    def __init__(self, call, value):
        self.modules = []  # one for each stay
        self.calls = []  # the names of the functions
        self._arrays = {id(leaf) for leaf in jax.tree.leaves(value)}
        sys.setprofile(self._on_event)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _on_event(self, frame, event, _):
        if event not in ("call", "return") or not is_of_jls(frame):
            return
        code, caller = frame.f_code, frame.f_back
        is_inline = code.co_name.startswith("<")  # a lambda, a comprehension
        is_called = is_of_jls(caller) or caller.f_code.co_filename == __file__
        if is_inline or not is_called or not self._holds(frame):
            return
        if event == "call":
            self.calls.append(code.co_name)
            self._stay(frame)
        elif is_of_jls(caller):
            self._stay(caller)

    def _stay(self, frame):
        module = frame.f_code.co_filename
        if self.modules[-1:] != [module]:
            self.modules.append(module)

    def _holds(self, frame):
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals.get(name) for name in names]
        return any(self._count(argument) > 1 for argument in given)

    def _count(self, argument):
        try:
            leaves = jax.tree.leaves(argument)
        except ValueError:  # a dict with keys that have no order is none of a state
            return 0
        return sum(id(leaf) in self._arrays for leaf in leaves)


# In 0.3.0: 31 stays and 7 searches without the parameters, 37 and 7 with them.
@pytest.mark.parametrize(
    ("args", "most"), [((STATE,), 11), ((STATE, PARAMS), 15)], ids=["state", "params"]
)
def test_health_finds_its_state_once(args, most):
    walk = Walk(lambda: jls.health(*args), STATE)
    assert walk.calls[0] == "health"
    assert 1 < len(walk.modules) <= most, walk.modules
    # The others look for the wrapper in what was found, and for its loss scale.
    assert walk.calls.count("run_in") == 1
    assert walk.calls.count("find") == 4


def test_a_walk_has_a_stay_for_each_module_and_for_each_return():
    walk = Walk(lambda: jls.metrics(STATE), STATE)
    names = [Path(module).stem for module in walk.modules]
    # It reads the variables of NNX in the scaler's state, then in the wrapper's.
    assert names[:3] == ["_state", "_nnx", "_state"]
    assert names[-2:] == ["_types", "_state"]
    assert walk.calls[0] == "metrics"
