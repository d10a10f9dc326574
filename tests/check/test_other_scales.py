"""What depends on the loss scale in part: a leak, or a solve with a ridge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls
from jls._tools.check.other_scales import _SCALES, _errors

pytestmark = pytest.mark.standard_promotion

TRUE = np.linspace(-1, 1, 8, dtype=np.float32)
PENALTY = np.linspace(1, 2, 8, dtype=np.float32)
WAYS = {
    "nothing": lambda scale: TRUE,
    "penalty": lambda scale: TRUE + np.float32(1e-6 / scale) * PENALTY,
    "ridge": lambda scale: TRUE * np.float32(scale**2 / (scale**2 + 1e-5)),
    "clip": lambda scale: TRUE / np.float32(max(1, scale * np.linalg.norm(TRUE))),
}


@pytest.mark.parametrize(
    ("way", "low", "high", "in_proportion"),
    [
        ("nothing", False, False, None),
        ("penalty", True, False, True),
        ("ridge", True, False, False),
        ("clip", True, True, None),
    ],
)
def test_a_term_that_is_not_scaled_comes_out_over_the_scale(
    way, low, high, in_proportion
):
    errors = _errors([WAYS[way](scale) for scale in _SCALES])
    assert (errors.low > 1e-3, errors.high > 1e-3) == (low, high)
    assert in_proportion in (None, errors.are_in_proportion)


@jax.custom_vjp
def solved(x):
    return x


def backward(_, cotangent):
    """As a solve with a ridge: off where the cotangents are as small as that."""
    square = jnp.sum(cotangent**2)
    return (cotangent * square / (square + 1e-5),)


solved.defvjp(lambda x: (x, None), backward)


def loss_fn(params, batch):
    return jnp.mean((solved(jnp.tanh(batch @ params["w"])) - 1) ** 2)


def test_a_solve_with_a_ridge_is_no_leak():
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4)}
    optimizer = jls.loss_scaled(optax.adam(1e-3))
    step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=jnp.float16))
    batch = jnp.linspace(-1, 1, 24).reshape(3, 8)
    check = jls.check_step(step, params, optimizer.init(params), batch)
    assert "scale leaks" not in check.broken
    assert "off in float32" in str(check)
