"""Mistakes with `jls.bfloat16_params` and what stands beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls

pytestmark = pytest.mark.standard_promotion

BF16 = jnp.bfloat16
WIDE = {"a": jnp.full((4, 8), 1 / 3), "b": jnp.zeros(8)}
HALF = jax.tree.map(lambda x: x.astype(BF16), WIDE)
ADAM = optax.adam(1e-2)
EXACT = jls.skip_nonfinite(jls.bfloat16_params(ADAM, rounding="exact"))


@pytest.mark.parametrize("guard", [lambda inner: inner, jls.skip_nonfinite])
def test_one_in_another_is_named(guard):
    optimizer = guard(jls.bfloat16_params(optax.chain(jls.bfloat16_params(ADAM))))
    with pytest.raises(ValueError, match=r"must not contain jls.bfloat16_params"):
        optimizer.init(HALF)


def test_lookahead_inside_is_named_and_goes_outside():
    params = optax.LookaheadParams.init_synced(HALF)
    inside = jls.bfloat16_params(optax.lookahead(ADAM, 2, 0.5))
    with pytest.raises(ValueError, match=r"optax\.lookahead\(jls\.skip_nonfinite"):
        inside.init(params)
    stored = jls.skip_nonfinite(jls.bfloat16_params(ADAM))
    optimizer = optax.lookahead(stored, 2, 0.5)
    state = optimizer.init(params)
    for _ in range(2):
        grads = jax.tree.map(jnp.ones_like, params.fast)
        params, state, _ = jls.apply_gradients(optimizer, grads, state, params)
    assert float(params.slow["a"][0, 0]) < 0.333


def test_swapped_arguments_of_master_params_are_named():
    for state in (EXACT.init(HALF), jls.skip_nonfinite(ADAM).init(WIDE)):
        with pytest.raises(ValueError, match=r"order is jls.master_params\(params"):
            jls.master_params(state, HALF)


def test_bfloat16_parameters_are_not_taken_for_the_float32_ones():
    saved = jls.skip_nonfinite(ADAM).init(WIDE)
    target = EXACT.init(HALF)
    for params in (HALF, WIDE | {"a": HALF["a"]}):
        with pytest.raises(ValueError, match=r"got bfloat16 at 'a'. If they"):
            jls.upgrade_state(target, saved, params=params)
    jls.upgrade_state(target, saved, params=jls.master_params(HALF, saved))
    state = jls.upgrade_state(target, saved, params=WIDE)
    np.testing.assert_array_equal(jls.master_params(HALF, state)["a"], WIDE["a"])


def test_what_follows_an_average_is_warned_of():
    ema = jls.params_ema(0.9)
    chains = [
        optax.chain(ema, ADAM),
        optax.chain(optax.chain(ADAM, ema), optax.trace(0.9)),
        optax.multi_transform({"x": optax.chain(ema, ADAM)}, {"a": "x", "b": "x"}),
    ]
    optimizers = [(jls.loss_scaled(inner), WIDE) for inner in chains]
    optimizers += [(jls.skip_nonfinite(jls.bfloat16_params(chains[0])), HALF)]
    for optimizer, params in optimizers:
        state = optimizer.init(params)
        with pytest.warns(jls.JlsWarning, match="averages parameters that no step has"):
            jax.jit(optimizer.update)(params, state, params)


def test_what_passes_the_updates_on_is_not():
    """A warning here is an error."""
    ema = jls.params_ema(0.9)
    for inner in (
        optax.chain(ADAM, ema),
        optax.chain(ADAM, ema, jls.params_ema(0.99)),
        optax.chain(optax.chain(ADAM, ema), optax.identity()),
        optax.chain(ADAM, ema, optax.snapshot("norm", lambda *_: jnp.ones(()))),
    ):
        optimizer = jls.loss_scaled(inner)
        jax.jit(optimizer.update)(WIDE, optimizer.init(WIDE), WIDE)


def test_members_of_a_vmap_have_counts_of_their_own():
    """The line of the page: each draws other bits."""
    optimizer = jls.skip_nonfinite(jls.bfloat16_params(optax.sgd(1e-3)))
    params = jnp.ones((2, 4096), BF16)
    state = jax.vmap(optimizer.init)(params)
    update = jax.vmap(lambda g, s, p: jls.apply_gradients(optimizer, g, s, p)[0])
    alike = update(jnp.ones((2, 4096)), state, params)
    np.testing.assert_array_equal(*alike)
    rounding = state.inner_state
    rounding = rounding._replace(count=jnp.arange(2, dtype=jnp.uint32) << 24)
    state = state._replace(inner_state=rounding)
    one, other = update(jnp.ones((2, 4096)), state, params)
    assert 0.1 < jnp.mean(one != other) < 0.6
