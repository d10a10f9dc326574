# SPDX-License-Identifier: Apache-2.0
"""Steps far off float32 in half: the product that does it, with a `keep` that mends."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from scaled_programs import MARK, normal

import jls

pytestmark = pytest.mark.standard_promotion

BASIS = 10 * normal(0, 4, 16)
X, Y = normal(1, 32, 4), normal(2, 32, 2)
PARAMS = {"w": normal(3, 32, 16) / 6, "out": normal(4, 16, 2) / 4}


class Program(NamedTuple):
    loss: Any
    params: Any = PARAMS
    batch: Any = X
    dtype: Any = jnp.bfloat16
    losses: bool = True


def head(params, h):
    return jnp.mean((jnp.tanh(h @ params["w"]) @ params["out"] - Y) ** 2)


def waves(x):
    phases = 2 * jnp.pi * x @ BASIS  # <- here
    return jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)


def in_a_function(params, x):
    return head(params, waves(x))


def in_a_scope(params, x):
    with jax.named_scope("waves"):
        phases = 2 * jnp.pi * x @ BASIS  # <- here
    h = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
    return jnp.mean((jnp.tanh(h @ params["w"]) @ params["out"] - Y) ** 2)


def in_a_scan(params, x):
    h, _ = lax.scan(
        lambda h, _: (0.5 * h + waves(x), None), jnp.zeros((32, 32)), length=3
    )
    return head(params, h)


def with_a_checkpoint(params, x):
    return head(params, jax.checkpoint(waves)(x))


def differences(x):
    pairs = x * jnp.array([1.0, -1.0, -1.0, -1.0]) @ x.T  # <- here
    return jnp.log(jnp.abs(pairs) + 1e-3)


def a_logarithm(params, x):
    return head(params, differences(x))


def tiny(x):
    return (x @ BASIS[:, :16]) * 1e9  # <- here


def what_vanishes(params, x):
    h = jnp.concatenate([tiny(x), jnp.ones((32, 16))], -1)
    return head(params, jnp.tanh(h))


class Waves(nn.Module):
    @nn.compact
    def __call__(self, x):
        phases = 2 * jnp.pi * x @ BASIS  # <- here
        return nn.Dense(2)(jnp.sin(phases))


def of_linen(params, x):
    return jnp.mean((Model().apply(params, x) - Y) ** 2)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(8)(Waves()(x))))


SPACE = 10 * normal(6, 32, 3)
LENGTH = jnp.sqrt(jnp.sum(SPACE**2, -1, keepdims=True) + 0.02)
MOMENTA = jnp.concatenate([LENGTH, SPACE], -1)
FAR = {
    "in a function": Program(in_a_function),
    "in a scope": Program(in_a_scope),
    "in a scan": Program(in_a_scan),
    "with a checkpoint": Program(with_a_checkpoint),
    "a logarithm": Program(a_logarithm, batch=MOMENTA),
    "what vanishes": Program(what_vanishes, batch=X * 1e-9, dtype=jnp.float16),
    "what vanishes, at once": Program(
        what_vanishes, batch=X * 1e-9, dtype=jnp.float16, losses=False
    ),
    "of Linen": Program(of_linen, Model().init(jax.random.key(0), X)),
}


def calibrated(program, keep=None):
    inner = optax.sgd(0.1)
    is_float16 = program.dtype == jnp.float16
    optimizer = (jls.loss_scaled if is_float16 else jls.skip_nonfinite)(inner)
    options = {"compute_dtype": program.dtype, "keep": keep}
    step = jax.jit(jls.train_step(program.loss, optimizer, **options))
    state = optimizer.init(program.params)
    found = jls.calibrate(
        step, program.params, state, program.batch, losses=program.losses
    )
    return found, step


def off(program, keep):
    """How far the gradients are off float32."""
    cast = jls.autocast(program.loss, program.dtype, keep=keep)
    both = [jax.grad(x)(program.params, program.batch) for x in (program.loss, cast)]
    exact, half = (jax.flatten_util.ravel_pytree(x)[0] for x in both)
    return float(jnp.sum(jnp.abs(half - exact)) / jnp.sum(jnp.abs(exact)))


@pytest.mark.parametrize("name", FAR)
def test_the_product_that_brings_a_step_far_off_is_named_with_its_keep(name):
    program = FAR[name]
    found, _ = calibrated(program)
    text = " ".join(str(found).split())
    assert "his step is far off in half precision: " in text
    assert "`keep`" in text
    source, _ = inspect.findsource(program.loss)
    lines = {i for i, x in enumerate(source, 1) if x.rstrip().endswith(MARK)}
    assert any(f"test_far_off.py:{i} in" in text for i in lines)
    assert found.write.startswith("keep=")
    assert off(program, None) > 0.1
    assert off(program, found.keep) < 0.25 * off(program, None)
    assert "min_scale" not in text


def test_a_scale_that_cannot_come_down_is_no_news_beside_a_keep():
    """With it the step has another ceiling."""
    scaler = jls.dynamic(2.0**24, min_scale=2.0**24)
    optimizer = jls.loss_scaled(optax.sgd(0.1), scaler)
    step = jls.train_step(in_a_function, optimizer, compute_dtype=jnp.float16)
    found = jls.calibrate(jax.jit(step), PARAMS, optimizer.init(PARAMS), 10 * X)
    assert found.keep
    assert found.notes[0].startswith("This step is far off in half precision: ")
    assert "min_scale" not in str(found)


def all_in_one(params, x):
    phases = 2 * jnp.pi * x @ BASIS
    h = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
    return jnp.mean((jnp.tanh(h @ params["w"]) @ params["out"] - Y) ** 2)


def test_a_product_with_others_in_its_function_gets_a_scope():
    found, _ = calibrated(Program(all_in_one))
    assert found.keep is None
    assert found.write.startswith('with jax.named_scope("wide"): around it')


def alone(params, x):
    return jnp.mean(jnp.sin(x @ params) ** 3)


def test_the_only_product_is_left_without_a_cast():
    found, _ = calibrated(Program(alone, BASIS))
    assert found.keep is None
    assert "There is no other product" in str(found)
    assert "without compute_dtype=" in found.write


def deep(params, x):
    h = jnp.tile(x, (1, 4))
    h = jnp.tanh(3 * h @ params["square"])
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 1, 0))
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 2, 0))
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 3, 0))
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 4, 0))
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 5, 0))
    h = jnp.tanh(3 * h @ jnp.roll(params["square"], 6, 0))
    return jnp.mean(h)


def plain(params, x):
    return head(params, jnp.tile(x, (1, 8)))


def tiny_and_unread(params, x):
    return plain(params, x) + 1e-9 * jnp.sum(tiny(x * 1e-9))


NEAR = {
    "a network": Program(plain),
    "a network in float16": Program(plain, dtype=jnp.float16),
    "rounding everywhere": Program(deep, {"square": normal(5, 16, 16)}),
    "tiny numbers that do not matter": Program(
        tiny_and_unread, dtype=jnp.float16, losses=False
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_no_product_of_a_right_step_is_named(name):
    found, _ = calibrated(NEAR[name])
    assert "far off in half precision" not in " ".join(str(found).split())
    assert found.keep is None


class Network(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(32, 2, rngs=rngs)

    def waves(self, x):
        return waves(x)

    def __call__(self, x):
        return self.linear(self.waves(x))


def test_the_keep_of_an_nnx_model_is_a_function():
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jls.skip_nonfinite(optax.sgd(0.1)), wrt=nnx.Param)
    step = nnx.jit(
        jls.train_step(
            lambda model, x: jnp.mean((model(x) - Y) ** 2), compute_dtype=jnp.bfloat16
        )
    )
    found = jls.calibrate(step, model, optimizer, X, losses=True)
    assert repr(found.keep) == "<keep of waves (test_far_off.py)>"
