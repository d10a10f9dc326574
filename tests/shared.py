"""What several test files do: take steps, follow a rule, compare bits."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jls

# Small params, and gradients for them.
W = jnp.array([1.0, -2.0])
ONE, NAN, INF = jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.array([jnp.inf, 1.0])
PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.float32(0.5)}
GOOD = {"a": jnp.array([0.5, 0.25]), "b": jnp.float32(-1.0)}
BAD = {"a": jnp.array([0.5, jnp.inf]), "b": jnp.float32(-1.0)}

# The floating-point dtypes that gradients may have, without those of x64.
FLOATS = [
    jnp.float16,
    jnp.bfloat16,
    jnp.float32,
    jnp.complex64,
    jnp.float8_e5m2,
    jnp.float8_e4m3fn,
]

# All 2**12 ways in which twelve steps can be finite or not.
SEQUENCES = np.array(list(itertools.product([False, True], repeat=12)))


def run(optimizer, params, all_grads, jit=jax.jit, **extra):
    """The params and the state after a step with each of the gradients."""

    @jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for grads in all_grads:
        params, state = step(params, state, grads)
    return params, state


def scaled(inner, **kwargs):
    return jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=3), **kwargs)


def steps(optimizer, grads, params=PARAMS, **extra):
    return run(optimizer, params, grads, **extra)


# To one rounding: two programs may fuse, and so round, differently.
assert_close = functools.partial(chex.assert_trees_all_close, rtol=3e-7)


@jax.jit
def trajectories(scaler, state, sequences):
    """The state after each step, for each of the sequences of flags."""

    def one(flags):
        def step(state, flag):
            state = scaler.adjust(state, flag)
            return state, state

        return jax.lax.scan(step, state, flags)[1]

    return jax.vmap(one)(sequences)


@jax.jit
def judged(policy, losses, norms):
    """Whether a spike policy skips each step, and its state, for each of the runs."""

    def one(losses, norms):
        def step(state, signals):
            state, skip = policy.judge(state, *signals)
            return state, (skip, state)

        return jax.lax.scan(step, policy.init(), (losses, norms))[1]

    return jax.vmap(one)(losses, norms)


def assert_follows(make, rule, hyperparameters, state=None, sequences=SEQUENCES):
    """Each state of each run of the scaler is what its rule in plain Python yields."""
    scaler = make(**hyperparameters)
    start = scaler.init() if state is None else state
    ours = trajectories(scaler, start, sequences)
    first = {"init_scale": float(start.loss_scale)}
    for sequence, *columns in zip(sequences, *map(np.asarray, ours), strict=True):
        expected = rule(sequence.tolist(), **(hyperparameters | first))
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == list(expected)


def assert_follows_eagerly(make, rule, hyperparameters, flags):
    """The same of one run, without a jit."""
    scaler = make(**hyperparameters)
    state, ours = scaler.init(), []
    for flag in flags:
        state = scaler.adjust(state, flag)
        ours.append(tuple(field.item() for field in state))
    assert ours == list(rule(flags, **hyperparameters))


def assert_identical(tree, other):
    """Same structure, shapes, dtypes and bits: to chex -0.0 and 0.0 are equal."""
    chex.assert_trees_all_equal_structs(tree, other)
    for leaf, reference in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
        assert jnp.result_type(leaf) == jnp.result_type(reference)
        assert jnp.shape(leaf) == jnp.shape(reference)
        assert np.asarray(leaf).tobytes() == np.asarray(reference).tobytes()


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def bad_leaves(state, params):
    """The names of the parameters that caused the last skip."""
    return jls.health(state, params).numbers["nonfinite_leaves"]


def is_placed_as(tree, other):
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
    return all(
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in zip(leaves, others, strict=True)
    )
