"""Every optimizer of optax inside `jls.loss_scaled`, in each dtype of parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from optimizers import (
    CANNOT_NARROW,
    MARKS,
    OPTIMIZERS,
    TRANSFORMS,
    assert_members_skip_on_their_own,
    assert_skips_whole_steps,
    assert_steps_like_the_optimizer_alone,
    exported,
    extra_arguments,
    initial_params,
    make,
    poison,
    to_numpy,
)
from shared import bits

import jls

pytestmark = MARKS


@pytest.mark.parametrize("name", exported({**OPTIMIZERS, **TRANSFORMS}))
def test_optimizer_skips_whole_steps_and_takes_its_own_otherwise(name):
    assert_skips_whole_steps(name, "float32")
    if name in OPTIMIZERS:
        assert_steps_like_the_optimizer_alone(name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", exported(OPTIMIZERS))
def test_optimizer_of_narrow_parameters_skips_whole_steps(name, dtype):
    assert_skips_whole_steps(name, dtype)


MEMBERS = [
    (name, dtype)
    for name in exported(OPTIMIZERS)
    for dtype in ("float32", "bfloat16", "float16")
    if dtype == "float32" or name not in CANNOT_NARROW
]


@pytest.mark.parametrize(("name", "dtype"), MEMBERS)
def test_members_of_a_vmapped_scan_skip_on_their_own(name, dtype):
    """There a branch is a select."""
    assert_members_skip_on_their_own(name, dtype)


def as_exported(name, params, extra):
    """The transformation as a program that went through `jax.export`."""
    inner = optax.with_extra_args_support(make(name))
    arguments = params, inner.init(params), params
    leaves, structure = jax.tree.flatten(arguments)
    results = jax.eval_shape(lambda *x: inner.update(*x, **extra), *arguments)

    def flat_update(*leaves):
        return jax.tree.leaves(inner.update(*structure.unflatten(leaves), **extra))

    program = export.export(jax.jit(flat_update))(*leaves)

    def update(updates, state, params=None, **_):
        made = program.call(*jax.tree.leaves((updates, state, params)))
        return jax.tree.unflatten(jax.tree.structure(results), made)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@pytest.mark.parametrize("name", exported(OPTIMIZERS))
def test_a_skipped_step_of_an_exported_optimizer_ends(name):
    params = initial_params(name, "float32")
    value = jnp.float32(1.0)
    extra = extra_arguments(name, value, params)
    optimizer = jls.loss_scaled(as_exported(name, params, extra), jls.dynamic(8.0))
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    good = jax.tree.map(lambda p: 0.5 * p, params)
    for letter in "NF":
        grads = jax.tree.map(jnp.add, good, poison(params, letter))
        updates, new = update(grads, state, params)
        assert new.applied == (letter == "F")
        if letter != "F":
            old = state.inner_state
            assert bits(to_numpy(new.inner_state)) == bits(to_numpy(old))
        state = new
    assert jls.all_finite(updates)
