import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shared import both

import jls
from jls._magnitude import finite_leaves

PARAMS = {
    "a": jnp.ones(2),
    "frozen": jnp.int32(3),
    "layer": {"kernel": jnp.ones((2, 2)), "none": None, "z": jnp.full(2, 1 + 1j)},
}


def grads(**bad):
    leaves = {
        "a": jnp.ones(2),
        "kernel": jnp.ones((2, 2)),
        "z": jnp.full(2, 1 + 1j),
    } | bad
    return {
        "a": leaves["a"],
        "frozen": np.zeros((), jax.dtypes.float0),
        "layer": {"kernel": leaves["kernel"], "none": None, "z": leaves["z"]},
    }


def identity():
    return optax.stateless(lambda updates, params: updates)


CASES = [
    ({"a": jnp.array([1.0, jnp.nan])}, ["a"]),
    ({"kernel": jnp.full((2, 2), -jnp.inf)}, ["layer/kernel"]),
    ({"z": jnp.array([1.0, complex(1, np.inf)])}, ["layer/z"]),
    (
        {"a": jnp.full(2, jnp.inf), "z": jnp.full(2, complex(np.nan, 0))},
        ["a", "layer/z"],
    ),
]


@pytest.mark.parametrize(("bad", "names"), CASES)
def test_bad_gradients_of_the_last_skipped_step_are_named(bad, names):
    optimizer = jls.loss_scaled(identity(), jls.dynamic(8.0))
    for update in both(optimizer.update):
        state = optimizer.init(PARAMS)
        assert jls.nonfinite_leaves(state, PARAMS) == []
        for step in (grads(), grads(**bad), grads()):  # it is remembered
            _, state = update(step, state, PARAMS)
        assert jls.nonfinite_leaves(state, PARAMS) == names
        _, state = update(grads(a=jnp.full(2, jnp.nan)), state, PARAMS)
        assert jls.nonfinite_leaves(state, PARAMS) == ["a"]


def test_step_skipped_for_its_loss_alone_names_no_parameter():
    optimizer = jls.loss_scaled(identity(), jls.dynamic(8.0))
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(grads(a=jnp.full(2, jnp.inf)), state, PARAMS)
    _, state = optimizer.update(grads(), state, PARAMS, value=jnp.nan)
    assert jls.nonfinite_leaves(state, PARAMS) == []
    assert state.skip_reason == 2


def test_step_skipped_for_its_updates_names_those():
    inner = optax.stateless(
        lambda updates, params: {"a": updates["a"] / 0, "b": params["b"]}
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=True)
    for update in both(optimizer.update):
        _, state = update(params, optimizer.init(params), params)
        assert jls.nonfinite_leaves(state, params) == ["a"]
        assert (state.skip_reason, state.nonfinite_updates, state.skips) == (3, 1, 1)
        assert jls.loss_scale(state) == 8.0


def test_inner_state_that_becomes_nan_is_not_committed_either():
    """As dadapt_adamw does in float16: finite updates, and a state for ever NaN."""

    def update(updates, state, params=None):
        return updates, {"mean": state["mean"] / 0, "best": state["best"]}

    inner = optax.GradientTransformation(
        lambda params: {"mean": jnp.zeros(()), "best": jnp.float32(jnp.inf)}, update
    )
    params = jnp.ones(2)
    for checks in (True, False):
        optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=checks)
        for step in both(optimizer.update):
            _, state = step(params, optimizer.init(params), params)
            assert state.applied == (not checks)
            assert jnp.isfinite(state.inner_state["mean"]) == checks
            assert bool(state.nonfinite_updates) == checks


def test_nnx_parameters_are_named_by_their_path_in_the_model():
    model = nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    )
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    bad = jax.tree.map(jnp.ones_like, params)
    bad.layers[0].bias.set_value(jnp.full(3, jnp.nan))
    optimizer.update(model, bad)
    assert jls.nonfinite_leaves(optimizer, params) == ["layers/0/bias"]


def test_flags_cost_one_read():
    params = [jnp.ones((64, 64)) for _ in range(20)]
    compiled = jax.jit(finite_leaves).lower(params).compile()
    size = sum(leaf.nbytes for leaf in params)
    assert size <= compiled.cost_analysis()["bytes accessed"] <= size + 1024


def test_bad_input_is_named():
    state = jls.loss_scaled(identity()).init(PARAMS)
    with pytest.raises(ValueError, match=r"one state of jls.loss_scaled .* 0 of them"):
        jls.nonfinite_leaves({}, PARAMS)
    with pytest.raises(ValueError, match=r"got 1 floating-point leaves, .* knows 3"):
        jls.nonfinite_leaves(state, {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="state must be concrete, got a traced one"):
        jax.jit(lambda state: jls.nonfinite_leaves(state, PARAMS))(state)


def test_updates_with_other_leaves_than_the_params_are_refused():
    optimizer = jls.loss_scaled(identity())
    with pytest.raises(
        ValueError, match=r"as many floating-point leaves .* got 1 and 3"
    ):
        optimizer.update({"a": jnp.ones(2)}, optimizer.init(PARAMS))
