"""The laws that every scaler obeys. A new scaler is one more line in SCALERS."""

import pickle
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.tree_util import Partial

import jls

GROWTH_INTERVAL = 3


class LadderState(NamedTuple):
    loss_scale: jax.Array
    rung: jax.Array


def _ladder_init(init_scale):
    return LadderState(jnp.array(init_scale, jnp.float32), jnp.zeros((), jnp.int32))


def _ladder_adjust(state, grads_finite, *, factor):
    """A scaler that a user might write: down by a factor, up again a rung at a time."""
    factor = jnp.asarray(factor, jnp.float32)
    up, down = state.loss_scale * 2, jnp.maximum(state.loss_scale / factor, 1.0)
    return LadderState(
        jnp.minimum(jnp.where(grads_finite, up, down), 2.0**20),
        jnp.where(grads_finite, state.rung + 1, 0),
    )


def ladder(init_scale=8.0, factor=8.0):
    return jls.types.LossScaler(
        Partial(_ladder_init, init_scale=init_scale),
        Partial(_ladder_adjust, factor=factor),
    )


SCALERS = {
    "static": partial(jls.static, 8.0),
    "dynamic": partial(jls.dynamic, 8.0, growth_interval=GROWTH_INTERVAL),
    "dynamic_patient": partial(
        jls.dynamic,
        8.0,
        growth_interval=GROWTH_INTERVAL,
        backoff_interval=2,
        min_scale=0.25,
        max_scale=64.0,
    ),
    "dynamic_not_consecutive": partial(
        jls.dynamic,
        8.0,
        growth_interval=GROWTH_INTERVAL,
        backoff_interval=2,
        consecutive=False,
    ),
    "hysteresis": partial(jls.hysteresis, 8.0, growth_interval=GROWTH_INTERVAL),
    "hysteresis_refilled_by_finite": partial(
        jls.hysteresis, 8.0, growth_interval=GROWTH_INTERVAL, refill="finite"
    ),
    "presets.torch": partial(jls.presets.torch, 8.0, growth_interval=GROWTH_INTERVAL),
    "presets.paddle": partial(
        jls.presets.paddle,
        init_loss_scaling=8.0,
        incr_every_n_steps=GROWTH_INTERVAL,
        decr_every_n_nan_or_inf=2,
    ),
    "presets.paddle_doc": partial(
        jls.presets.paddle_doc,
        init_loss_scaling=8.0,
        incr_every_n_steps=GROWTH_INTERVAL,
    ),
    "presets.mindspore": partial(jls.presets.mindspore, 8, 2, GROWTH_INTERVAL),
    "presets.mindformers_adaptive": partial(
        jls.presets.mindformers_adaptive, 8, 2, 2, GROWTH_INTERVAL, 1
    ),
    "presets.keras": partial(jls.presets.keras, 8.0, GROWTH_INTERVAL),
    "presets.flax": partial(
        jls.presets.flax, scale=8.0, growth_interval=GROWTH_INTERVAL
    ),
    "presets.deepspeed": partial(
        jls.presets.deepspeed, 8.0, scale_window=GROWTH_INTERVAL
    ),
    "presets.megatron": partial(
        jls.presets.megatron, 8.0, growth_interval=GROWTH_INTERVAL
    ),
    "user_written": ladder,
}
OURS = [name for name in SCALERS if "user" not in name]
FLAGS = np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1], bool)


def structure(name):
    return jax.tree.structure(SCALERS[name]())


# Presets that differ in numbers from one that is above them.
ALIKE = [
    name
    for i, name in enumerate(SCALERS)
    if name.startswith("presets")
    and structure(name) in map(structure, list(SCALERS)[:i])
]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.more if name in ALIKE else ())
        for name in SCALERS
    ]
)
def scaler(request):
    return SCALERS[request.param]()


def loop(adjust, state, flags=FLAGS):
    states = []
    for flag in flags:
        state = adjust(state, jnp.asarray(flag))
        states.append(state)
    return states


def stacked(states):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def test_init_gives_a_scale_and_strong_arrays_in_buffers_of_their_own(scaler):
    state = scaler.init()
    assert state.loss_scale.dtype == jnp.float32
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert leaf.shape == ()
        assert not leaf.weak_type
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(scaler.init())]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_adjust_keeps_structure_dtypes_and_weak_types(scaler):
    state = scaler.init()
    after = jax.eval_shape(scaler.adjust, state, jnp.asarray(True))
    chex.assert_trees_all_equal_structs(after, state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (new.dtype, new.shape, new.weak_type) == (old.dtype, (), False)


def test_one_trace_serves_a_whole_run(scaler):

    @jax.jit
    @chex.assert_max_traces(n=1)
    def traced(state, flag):
        return scaler.adjust(state, flag)

    loop(traced, scaler.init(), [True] * (2 * GROWTH_INTERVAL) + [False])


def test_jit_equals_eager(scaler):
    states = loop(scaler.adjust, scaler.init())
    chex.assert_trees_all_equal(loop(jax.jit(scaler.adjust), scaler.init()), states)


def test_scan_equals_loop(scaler):
    def step(state, flag):
        state = scaler.adjust(state, flag)
        return state, state

    _, states = jax.jit(lambda s, f: jax.lax.scan(step, s, f))(scaler.init(), FLAGS)
    chex.assert_trees_all_equal(states, stacked(loop(scaler.adjust, scaler.init())))


def test_vmap_equals_stack(scaler):
    states = loop(scaler.adjust, scaler.init())
    flags = jnp.asarray(np.resize([True, False], len(states)))
    expected = [scaler.adjust(s, f) for s, f in zip(states, flags, strict=True)]
    chex.assert_trees_all_equal(
        jax.vmap(scaler.adjust)(stacked(states), flags), stacked(expected)
    )


def test_vmap_over_the_scaler_itself_equals_stack(scaler):
    scalers = [scaler, jax.tree.map(lambda x: x * 2, scaler)]
    many = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *jax.tree.map(jnp.asarray, scalers)
    )

    def run(scaler):
        return scaler.adjust(scaler.adjust(scaler.init(), False), False)

    chex.assert_trees_all_equal(jax.vmap(run)(many), stacked([run(s) for s in scalers]))


def test_tree_round_trip_is_the_identity_with_every_field_off_its_default(scaler):
    state = jax.tree.map(lambda x: x + 3, scaler.init())
    leaves, structure = jax.tree.flatten((scaler, state))
    off = [leaf + 1 for leaf in leaves]
    again, same = jax.tree.flatten(structure.unflatten(off))
    assert (again, same) == (off, structure)
    assert jax.tree.map(lambda _: None, state) == type(state)(*[None] * len(state))


def test_hyperparameter_changes_through_a_jit_argument_without_a_retrace(scaler):

    @jax.jit
    @chex.assert_max_traces(n=1)
    def overflow(scaler, state):
        return scaler.adjust(state, False)

    other = jax.tree.map(lambda x: x * 2, scaler)
    states = [overflow(s, s.init()) for s in (scaler, other)]
    chex.assert_trees_all_equal(
        states, [s.adjust(s.init(), False) for s in (scaler, other)]
    )


def test_numbers_of_any_kind_make_the_same_scaler():

    @jax.jit
    @chex.assert_max_traces(n=1)
    def finite(scaler, state):
        return scaler.adjust(state, True)

    for factor in (2.0, 4.0, 4, np.float32(4), Fraction(8, 2)):
        scaler = jls.dynamic(
            8, growth_factor=factor, growth_interval=1, max_scale=2**40
        )
        assert finite(scaler, scaler.init()).loss_scale == 8 * float(factor)


@pytest.mark.parametrize("wrap", [lambda x: x, np.asarray, jnp.asarray])
def test_adjust_takes_python_numpy_and_device_scalars(scaler, wrap):
    for flag in (True, False):
        ours = scaler.adjust(scaler.init(), wrap(flag))
        chex.assert_trees_all_equal(ours, scaler.adjust(scaler.init(), flag))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    ("flag", "error", "got"),
    [
        (1, TypeError, "int 1"),
        (None, TypeError, "NoneType None"),
        (np.float32(1.0), TypeError, "float32"),
        (np.array([True]), ValueError, r"shape \(1,\)"),
    ],
)
def test_adjust_refuses_what_it_cannot_mean(name, flag, error, got):
    scaler = SCALERS[name]()
    with pytest.raises(error, match=f"grads_finite must .* got {got}"):
        scaler.adjust(scaler.init(), flag)
    with pytest.raises(error, match=f"grads_finite must .* got {got}"):
        jax.jit(lambda state: scaler.adjust(state, flag))(scaler.init())


def test_scaler_and_state_survive_pickle(scaler):
    state = scaler.adjust(scaler.init(), True)
    again, state_again = pickle.loads(pickle.dumps((scaler, state)))
    chex.assert_trees_all_equal(state_again, state)
    chex.assert_trees_all_equal(
        again.adjust(state_again, False), scaler.adjust(state, False)
    )


def test_state_survives_flax_serialization_and_numpy(scaler):
    state = scaler.adjust(scaler.adjust(scaler.init(), True), False)
    restored = serialization.from_bytes(scaler.init(), serialization.to_bytes(state))
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, state), state)


@pytest.mark.standard_promotion
def test_optax_tree_finds_and_sets_the_loss_scale(scaler):
    state = jls.loss_scaled(optax.adam(1e-3), scaler).init(jnp.ones(2))
    assert optax.tree.get(state, "loss_scale") == 8.0
    changed = optax.tree.set(state, loss_scale=jnp.float32(2.0))
    assert jls.loss_scale(changed) == 2.0


def test_everything_else_works_with_the_scaler(scaler):
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)
    params = jnp.array([1.0, 2.0])

    @jax.jit
    def step(params, state, factor):
        loss, grads = jls.value_and_grad(lambda p: jnp.sum(p * factor))(state, params)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for factor in (2.0, jnp.nan, 1e38, 2.0):  # 1e38 overflows at any scale over 3
        params, state = step(params, state, jnp.float32(factor))
    assert params.tolist() == [-1.0, 0.0]
    assert (state.steps, state.skips, state.nonfinite_losses) == (4, 2, 1)
    flags = [True, False, True]  # the step of the non-finite loss is not counted
    chex.assert_trees_all_equal(
        state.scaler_state, loop(scaler.adjust, scaler.init(), flags)[-1]
    )
    chex.assert_trees_all_equal(
        jls.set_loss_scale(state, 2.0).scaler_state.loss_scale, np.float32(2.0)
    )


def test_hyperparameters_are_what_the_scaler_computes_with(scaler):
    given = scaler.hyperparameters
    numbers = [x for x in given.values() if not isinstance(x, bool | str)]
    assert sorted(map(str, jax.tree.leaves(numbers))) == sorted(
        map(str, jax.tree.leaves(scaler))
    )
    given.clear()  # a copy
    assert scaler.hyperparameters


@pytest.mark.parametrize(
    "make",
    [
        partial(jls.static, 4.0),
        partial(jls.dynamic, 4.0, growth_interval=7, consecutive=False),
        partial(jls.hysteresis, 4.0, hysteresis=3, refill="finite"),
    ],
)
def test_hyperparameters_make_the_scaler_again(make):
    again = make.func(**make().hyperparameters)
    chex.assert_trees_all_equal(again, make())
    assert repr(again) == repr(make())


def test_functions_of_ones_own_have_no_hyperparameters():
    for init in (jls.dynamic().init, lambda: None):
        scaler = jls.types.LossScaler(init, lambda state, flag: state)
        assert scaler.hyperparameters == dict(getattr(init, "keywords", {}))
