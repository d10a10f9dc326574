"""What `jls.autocast` says where it finds no product to cast."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import jls

pytestmark = pytest.mark.standard_promotion

F16, BF16 = jnp.float16, jnp.bfloat16
W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


def loss_fn(w, x):
    return jnp.mean((x @ w).astype(jnp.float32))


def said(fun, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(fun, *args)
    return [str(x.message) for x in caught if "no product" in str(x.message)]


@pytest.mark.parametrize("half", [F16, BF16])
def test_nothing_is_said_of_what_is_half_already(half):
    cast = jls.autocast(loss_fn, half)
    assert not said(cast, W.astype(half), X.astype(half))
    assert not said(jls.autocast(cast, half), W, X)
    layer = linen.Dense(4, dtype=half)
    params = layer.init(jax.random.key(0), X)
    assert not said(jls.autocast(layer.apply, half), params, X)


def test_nothing_is_said_in_a_step_of_bfloat16_parameters():
    for optimizer in (jls.bfloat16_params(optax.sgd(0.1)), optax.sgd(0.1)):
        with warnings.catch_warnings(action="ignore"):
            guarded = jls.skip_nonfinite(optimizer)
            state = guarded.init(W.astype(BF16))
        step = jls.train_step(loss_fn, guarded, compute_dtype=BF16)
        assert not said(step, W.astype(BF16), state, X.astype(BF16))


def test_another_half_precision_is_named():
    (message,) = said(jls.autocast(jls.autocast(loss_fn, F16), BF16), W, X)
    assert "1 of float16. They are float16 as they are written" in message
    layer = linen.Dense(4, dtype=BF16)
    params = layer.init(jax.random.key(0), X)
    (message,) = said(jls.autocast(layer.apply, F16), params, X)
    assert "write jnp.bfloat16 here" in message
    assert not said(jls.autocast(layer.apply, BF16), params, X)  # as it says


def test_float64_is_named():
    with jax.enable_x64(True):
        wide = W.astype(jnp.float64), X.astype(jnp.float64)
        (message,) = said(jls.autocast(loss_fn, BF16), *wide)
    assert "1 of float64. It casts those of float32 arrays" in message


def test_keep_of_all_is_still_warned_of():
    def both(w, x):
        with jax.named_scope("head"):
            kept = x @ w
        return jnp.mean(kept) + jnp.mean(x.astype(BF16) @ w.astype(BF16))

    (message,) = said(jls.autocast(both, BF16, keep="head"), W, X)
    assert "Write a narrower keep" in message


def test_no_product_at_all_is_as_before():
    (message,) = said(jls.autocast(lambda x: x + 1, BF16), X)
    assert "put it around the function that computes them" in message


def test_a_precision_that_is_asked_for_is_named():
    def asking(w, x):
        return jnp.matmul(x, w, precision="highest")

    (text,) = said(jls.autocast(asking, F16), W, X)
    assert text.endswith("1 with precision=. A product that asks for a precision "
                         "keeps it: leave precision= out.")  # fmt: skip
