import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jls
from jls._text import describe, listed


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (
            jls.dynamic(growth_interval=100, min_scale=2.0**-14),
            "dynamic(init_scale=2**15, growth_factor=2, backoff_factor=0.5, "
            "growth_interval=100, backoff_interval=1, min_scale=2**-14, "
            "max_scale=2**24, consecutive=True)",
        ),
        (jls.static(48), "static(loss_scale=48)"),
        (jls.static(jnp.float32(2.0**20)), "static(loss_scale=2**20)"),
        (jls.static(65504.0), "static(loss_scale=65504)"),
        (
            jls.presets.deepspeed(),
            "deepspeed(init_scale=2**16, growth_factor=2, backoff_factor=0.5, "
            "growth_interval=1000, hysteresis=2, min_scale=1, max_scale=2**126, "
            "refill='growth')",
        ),
        (
            jls.dynamic(2.0**12).init(),
            "ScalerState(loss_scale=2**12, finite_count=0, nonfinite_count=0)",
        ),
        (
            jax.tree.map(np.asarray, jls.static(3.0).init()),
            "StaticState(loss_scale=3)",
        ),
        (
            jls.presets.mindformers_adaptive(8.0, 2, 20).init(),
            "AdaptiveState(loss_scale=8, finite_count=0, nonfinite_count=0, "
            "growth_count=0, rung=1)",
        ),
        (
            jls.loss_scaled(optax.sgd(0.1, 0.9)).init(jnp.ones(3)),
            "LossScaledState(inner_state=..., scaler_state=ScalerState("
            "loss_scale=2**15, finite_count=0, nonfinite_count=0), applied=False, "
            "steps=0, skips=0, consecutive_skips=0, nonfinite_losses=0, "
            "nonfinite_updates=0, last_skip_reason=0, partial_overflows=0)",
        ),
    ],
)
def test_repr_says_what_a_person_wants_to_know(thing, text):
    assert repr(thing) == text


@pytest.mark.parametrize(
    "state",
    [jls.loss_scaled(optax.sgd(0.1)).init(jnp.ones(3)), jls.dynamic().init()],
    ids=["wrapper", "scaler"],
)
def test_repr_does_no_harm_to_what_is_no_scalar_in_memory(state):
    seen = []
    jax.jit(lambda state: (seen.append(repr(state)), state)[1])(state)
    assert "Tracer" in seen[0]
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for other in (
        stacked,
        jax.eval_shape(lambda: state),
        jax.tree.map(lambda _: None, state),
        jax.tree.map(lambda _: "a spec", state),
        jax.tree.map(nnx.Variable, state),
    ):
        assert repr(other).startswith(type(state).__name__ + "(")
    copy = jax.tree.map(jnp.copy, state)
    jax.jit(lambda x: jax.tree.map(lambda y: ~y, x), donate_argnums=0)(
        copy.nonfinite_count if hasattr(copy, "nonfinite_count") else copy.steps
    )
    assert "<donated>" in repr(copy)


def test_scaler_of_a_user_prints_its_functions():
    scaler = jls.types.LossScaler(jls.static().init, max)
    assert repr(scaler).endswith("adjust=<built-in function max>)")
    assert repr(scaler).startswith("LossScaler(init=")
    assert "loss_scale=1.0" in repr(scaler)
    assert repr(jls.types.LossScaler(min, max)).startswith("LossScaler(init=<built-in")


class Odd:
    """A callable with attributes that look like those of a partial."""

    func = None
    keywords = "none"

    def __call__(self, *args):
        return args[0]


def test_scaler_of_odd_functions_prints_them():
    for functions in ((Odd(), Odd()), (functools.partial(max, 1), Odd().__call__)):
        scaler = jls.types.LossScaler(*functions)
        assert repr(scaler).startswith("LossScaler(init=")
        assert scaler.hyperparameters == {}


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        ([], 3, ""),
        (["a", ""], 3, "a, (tree)"),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d", "e"], 3, "a, b, c and 2 more"),
        (["a", "b", "c", "d", "e"], 4, "a, b, c, d and 1 more"),
    ],
)
def test_a_long_list_says_how_many_more_there_are(names, most, text):
    assert listed(names, most) == text


def test_a_value_is_described_on_one_line_without_the_numbers_of_an_array():
    described = {
        "str 'x'": "x",
        "int 3": 3,
        "NoneType None": None,
        "float32[2,1]": jnp.ones((2, 1)),
        "int64[]": np.array(3),
        "list": [jnp.ones(3)],
        "str": "x" * 80,
    }
    assert [describe(value) for value in described.values()] == list(described)
