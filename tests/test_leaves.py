"""Steps with integers, keys and complex numbers, and optimizers that go outside."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify
from shared import (
    NAN,
    ONE,
    W,
    assert_close,
    assert_identical,
    run,
    scaled,
)

import jls


@pytest.mark.standard_promotion
@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.5),
        optax.sgd(0.5, momentum=0.9),
        optax.adam(0.5),
        optax.adamw(0.5, weight_decay=0.1),
        optax.identity(),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "identity"],
)
def test_integers_with_integer_gradients_stay(inner, check_updates, jit_or_eager):
    """They come from `tree.map(jnp.zeros_like, params)`."""
    large = jnp.array([2**24 + 1, -3])  # a float32 could not hold it
    params = {"a": W, "n": {"i": large, "flag": jnp.array(True)}}
    grads = jax.tree.map(jnp.zeros_like, params) | {"a": ONE}
    optimizer = scaled(inner, check_updates=check_updates)
    new, state = run(optimizer, params, [grads, grads], jit_or_eager)
    alone, _ = run(inner, W, [ONE, ONE], jit_or_eager)
    assert_close(new["a"], alone)
    assert_identical(new["n"], params["n"])
    chex.assert_trees_all_equal_dtypes(state, optimizer.init(params))
    assert state.skips == 0


def test_a_count_that_becomes_a_float_is_refused_beside_integer_parameters():
    def update(updates, state, params=None):
        return updates, {"count": state["count"] + jnp.float32(0.5)}

    inner = optax.GradientTransformation(lambda _: {"count": jnp.int32(0)}, update)
    params = {"a": W, "i": jnp.int32(3)}
    grads = {"a": ONE, "i": jnp.int32(0)}
    optimizer = scaled(inner)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match=r"int32\[\] into float32\[\] at 'count'"),
    ):
        optimizer.update(grads, optimizer.init(params), params)


def test_nothing_real_becomes_complex_without_a_word(jit_or_eager):
    def refuses(update, match):
        inner = optax.GradientTransformation(lambda _: {"m": jnp.zeros(2)}, update)
        optimizer = scaled(inner)
        step = jit_or_eager(optimizer.update)
        with pytest.raises(ValueError, match=match):
            step(W, optimizer.init(W), W)

    turned = r"turned float32\[2\] into complex64\[2\]"
    complex_one = jnp.ones(2, jnp.complex64)
    refuses(lambda u, s, p: (complex_one, s), rf"optimizer's update .* {turned}\.")
    refuses(lambda u, s, p: (u, {"m": complex_one}), f"state .* {turned} at 'm'")


def test_a_complex_state_may_be_given_real_numbers(jit_or_eager):
    start = {"m": jnp.ones(2, jnp.complex64)}
    inner = optax.GradientTransformation(
        lambda _: start, lambda u, s, p: (u, {"m": jnp.array([3.0, 4.0])})
    )
    _, state = run(scaled(inner), W, [ONE], jit_or_eager)
    assert_identical(state.inner_state, {"m": jnp.array([3, 4], jnp.complex64)})


@pytest.mark.standard_promotion
def test_lookahead_goes_outside(jit_or_eager):
    params = optax.LookaheadParams.init_synced(W)
    inside = scaled(optax.lookahead(optax.adam(0.5), 2, 0.5))
    with pytest.raises(ValueError, match=r"optax\.lookahead\(jls\.loss_scaled"):
        inside.update(ONE, inside.init(params), params)
    outside = optax.lookahead(scaled(optax.adam(0.5)), 2, 0.5)
    new, state = run(outside, params, [ONE, NAN, ONE, ONE], jit_or_eager)
    assert jls.all_finite((new, state))
    assert jls.metrics(state)["skips"] == 1


@pytest.mark.parametrize("check_updates", [True, False])
def test_a_key_that_a_step_uses_and_a_skip_keeps_is_not_used_twice(
    check_updates, jit_or_eager
):
    def update(updates, state, params=None):
        noise, key = jax.random.split(state["key"])
        return updates + jax.random.normal(noise, updates.shape), {"key": key}

    inner = optax.GradientTransformation(lambda _: {"key": jax.random.key(0)}, update)
    optimizer = scaled(inner, check_updates=check_updates)
    step = jit_or_eager(optimizer.update)
    state = optimizer.init(W)
    with jax.debug_key_reuse(True):
        for grads in (ONE, NAN, ONE):
            _, state = step(grads, state, W)
    assert state.skips == 1
    key = inner.init(W)["key"]
    for _ in range(2):
        key = jax.random.split(key)[1]
    assert jax.random.key_data(state.inner_state["key"]).tolist() == (
        jax.random.key_data(key).tolist()
    )


@pytest.mark.standard_promotion
def test_checkify_sees_nothing_in_a_good_step():
    """What it sees in a step with bad gradients is what is wrong with them."""
    for check_updates in (True, False):
        optimizer = scaled(optax.adam(0.1), check_updates=check_updates)
        checked = checkify.checkify(jax.jit(optimizer.update), checkify.float_checks)
        error, (_, state) = checked(ONE, optimizer.init(W), W)
        assert state.applied
        assert error.get() is None
        error, (_, state) = checked(NAN, state, W)
        assert state.skips == 1
        assert "nan" in error.get()


@pytest.mark.standard_promotion
def test_sam_without_extra_arguments_takes_a_loss():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=False)
    optimizer = scaled(optax.GradientTransformation(sam.init, sam.update))
    state = optimizer.init(W)
    _, state = optimizer.update(ONE, state, W, value=jnp.float32(1.0))
    assert state.applied
    _, state = optimizer.update(ONE, state, W, value=jnp.float32(jnp.nan))
    assert state.nonfinite_losses == 1
