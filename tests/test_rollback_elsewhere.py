"""What other platforms do with a bad step, run here: see test_rollback.py."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from shared import assert_identical
from test_rollback import OLD, STEPS, guarded

import jls
from jls import _rollback_cpu

PLATFORMS = ["cuda", "tpu"]


@pytest.fixture(scope="module", params=PLATFORMS)
def as_elsewhere(request):
    """The program of another platform, run here: by all tests of this file."""

    def choose(*args, default, **forms):
        return forms.get(request.param, default)(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "platform_dependent", choose)
        at_once = _rollback_cpu._at_once.__wrapped__
        patch.setattr(_rollback_cpu, "_at_once", jax.jit(at_once))
        yield request.param


@pytest.mark.cover(1)
@pytest.mark.parametrize("step", STEPS)
def test_other_platforms_apply_or_roll_back_the_same(step, as_elsewhere):
    for flag in (True, False):
        expected = jax.jit(step)(*OLD) if flag else list(OLD)
        assert_identical(jax.jit(guarded(step))(jnp.asarray(flag), *OLD), expected)


INNERS = {
    "clip, adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "adafactor": optax.adafactor(0.1),
    "muon": optax.contrib.muon(0.1),
    "lbfgs": optax.scale_by_lbfgs(),
}


@pytest.mark.cover(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("as_elsewhere", ["cuda"], indirect=True)
@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_bad_gradients_leave_nothing_on_other_platforms(
    inner, check_updates, as_elsewhere
):
    """There the optimizer gets them as they are."""
    scaler = jls.dynamic(8.0)
    optimizer = jls.loss_scaled(inner, scaler, check_updates=check_updates)
    step = jax.jit(lambda *args: jls.apply_gradients(optimizer, *args)[:2])
    params = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.ones(2)}
    good = jax.tree.map(lambda x: 0.5 * x + 0.1, params)
    state = optimizer.init(params)
    for bad in (jnp.nan, None, jnp.inf, -jnp.inf, None, None):
        if bad is None:
            params, state = step(good, state, params)
            assert state.applied
            assert jls.all_finite((params, state.inner_state))
            continue
        grads = good | {"w": good["w"].at[0, 1].set(bad)}
        new, new_state = step(grads, state, params)
        assert not new_state.applied
        assert_identical((new, new_state.inner_state), (params, state.inner_state))
        state = new_state
    assert state.skips == 3
