"""One optimizer of each kind inside `jls.loss_scaled`; tests/corpus has all of them."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optimizers import (
    CANNOT,
    MARKS,
    NONFINITE_IN_FLOAT16,
    NOT_TRANSFORMATIONS,
    OPTIMIZERS,
    PATTERN,
    PER_EXAMPLE,
    TRANSFORMS,
    assert_members_skip_on_their_own,
    assert_skipped_and_stepped,
    assert_skips_whole_steps,
    assert_steps_like_the_optimizer_alone,
    exported,
    initial_params,
    make_step,
    poison,
    run_jitted,
    to_numpy,
)
from shared import bits, run

import jls

pytestmark = MARKS

KINDS = {
    "adamw": "moments",
    "adafactor": "factors, and counts",
    "galore": "might see a NaN",
    "lbfgs": "a line search",
    "momo_adam": "scalars of its own, and the loss",
    "noisy_sgd": "a key",
    "reduce_on_plateau": "an accumulator",
    "schedule_free_sgd": "parameters in its state",
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizer_skips_whole_steps_and_takes_its_own_otherwise(name):
    assert_skips_whole_steps(name, "float32")
    assert_steps_like_the_optimizer_alone(name)


@pytest.mark.parametrize("name", ["adamw", "galore", "schedule_free_sgd"])
def test_optimizer_of_float16_parameters_skips_whole_steps(name):
    assert_skips_whole_steps(name, "float16")


@pytest.mark.parametrize("name", ["adamw", "lbfgs"])
def test_members_of_a_vmapped_scan_skip_on_their_own(name):
    assert_members_skip_on_their_own(name, "float32")


def test_eager_run_is_the_jitted_one():
    name = "momo_adam"
    optimizer, step = make_step(name)
    params = initial_params(name, "float32")
    carry = params, optimizer.init(params)
    history = [to_numpy((*carry, params))]
    for letter in PATTERN:
        carry, out = step(carry, poison(params, letter))
        history.append(to_numpy(out))
    assert_skipped_and_stepped(history, PATTERN)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        history[-1],
        run_jitted(name, "float32")[0][-1],
    )


@pytest.mark.parametrize("name", exported(NONFINITE_IN_FLOAT16))
def test_float16_updates_that_are_not_finite_are_not_committed(name):
    optimizer = jls.loss_scaled(getattr(contrib, name)(), jls.dynamic(8.0))
    params = initial_params(name, "float16")
    state = optimizer.init(params)
    grads = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    update = jax.jit(optimizer.update)
    for _ in range(6):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert all(jnp.isfinite(p).all() for p in params.values())
    assert state.consecutive_skips >= 4
    assert jls.loss_scale(state) == 8.0


@pytest.mark.parametrize("name", exported(CANNOT))
def test_transformation_that_cannot_work_says_so(name):
    transformation, message, _ = CANNOT[name]
    params = grads = {"w": jnp.full((4, 3), 1.5)}
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    optimizer = jls.loss_scaled(transformation(), jls.dynamic(8.0))
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, optimizer.init(params), params)


@pytest.mark.cover(1)
@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize("name", exported(PER_EXAMPLE))
def test_gradients_of_examples_make_one_update(name, check_updates, jit_or_eager):
    params = {"w": jnp.ones(3), "s": jnp.float32(2.0)}
    good = {"w": jnp.arange(12.0).reshape(4, 3), "s": jnp.ones(4)}
    bad = good | {"w": good["w"].at[2, 1].set(jnp.nan)}
    inner = PER_EXAMPLE[name]()
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=check_updates)
    new, state = run(optimizer, params, [bad], jit_or_eager)
    assert bits(new) == bits(params)
    new, state = run(optimizer, params, [bad, good, bad, good], jit_or_eager)
    bare, _ = run(inner, params, [good, good], jit_or_eager)
    chex.assert_trees_all_close(new, bare, rtol=2e-6)
    assert state.skips == 2


def test_every_exported_transformation_is_listed():
    listed = {*OPTIMIZERS, *TRANSFORMS, *PER_EXAMPLE, *CANNOT, *NOT_TRANSFORMATIONS}
    for module in (optax, contrib):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            annotation = inspect.signature(function).return_annotation
            transforms = "GradientTransformation" in str(annotation)
            if transforms or annotation is inspect.Signature.empty:
                assert name.startswith("_") or name in listed, name


def test_line_search_ends_on_a_skipped_step():
    def loss_fn(params):
        return jnp.sum((params - 3.0) ** 2)

    optimizer = jls.loss_scaled(optax.lbfgs(), jls.static(8.0))

    @jax.jit
    def step(params, state, noise):
        value, grad = jls.value_and_grad(loss_fn)(state, params)
        value, grad = value + noise, grad + noise
        updates, state = optimizer.update(
            grad, state, params, value=value, grad=grad, value_fn=loss_fn
        )
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(2)
    state = optimizer.init(params)
    for noise in (0.0, jnp.nan, 0.0, jnp.inf, 0.0):
        params, state = step(params, state, jnp.float32(noise))
    assert state.skips == 2
    np.testing.assert_allclose(params, 3.0, rtol=1e-3)
    one = jax.vmap(step, (None, None, 0))(params, state, jnp.array([0.0, jnp.nan]))
    assert one[1].applied.tolist() == [True, False]
