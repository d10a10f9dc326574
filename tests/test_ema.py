"""The average of the parameters: its value, and that a skipped step leaves it alone."""

import itertools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from excess import AS_WRITTEN_OR_ON_A_GPU
from flax import linen, nnx, serialization
from flax.training.train_state import TrainState
from shared import assert_identical, run

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.array([3.0, -2.0]), "b": jnp.float32(0.5)}
GRADS = [
    {"w": jnp.array([1.0, -0.5]) * k, "b": jnp.float32(2.0 - k)} for k in (1, -3, 2, 5)
]
BAD = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.float32(1.0)}
NAN = {"w": jnp.array([jnp.nan, 1.0]), "b": jnp.float32(1.0)}


def warmup(count):
    """The usual one: short averages first."""
    return jnp.minimum(0.9, (1.0 + count) / (4.0 + count))


def decays_of(decay, n):
    return [float(decay(jnp.int32(i)) if callable(decay) else decay) for i in range(n)]


def reference(history, decays, debias):
    """The weighted mean in float64; `history` begins with the initial params."""
    weights = [1.0 if not debias else 0.0]
    for decay in decays:
        weights = [decay * weight for weight in weights] + [1 - decay]
    terms = zip(weights, history, strict=True)
    total = sum(w * np.asarray(p, np.float64) for w, p in terms)
    return total / sum(weights)


def averaged(decay=0.9, inner=None, **kwargs):
    inner = optax.sgd(0.5, momentum=0.9) if inner is None else inner
    return optax.chain(inner, jls.params_ema(decay, **kwargs))


def scaled(*args, **kwargs):
    scaler = jls.dynamic(8.0, growth_interval=3)
    return jls.loss_scaled(averaged(*args, **kwargs), scaler)


def trajectory(optimizer, params, all_grads, jit=jax.jit):
    """All params, from the initial ones on, and all averages."""
    states = [optimizer.init(params)]
    history = [params]

    @jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in all_grads:
        params, state = step(params, states[-1], grads)
        history.append(params)
        states.append(state)
    return history, [jls.eval_params(state) for state in states]


def is_ema_state(node):
    return isinstance(node, jls.types.ParamsEmaState)


def state_of(state):
    nodes = jax.tree.leaves(state, is_leaf=is_ema_state)
    (found,) = filter(is_ema_state, nodes)
    return found


# What it computes ---------------------------------------------------------------------


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("decay", [0.9, 0.25, warmup], ids=["0.9", "0.25", "warmup"])
@pytest.mark.parametrize("make", [averaged, scaled])
def test_average_is_the_weighted_mean_of_the_params(make, decay, debias, jit_or_eager):
    history, averages = trajectory(
        make(decay, debias=debias), PARAMS, GRADS, jit_or_eager
    )
    assert_identical(averages[0], PARAMS)
    decays = decays_of(decay, len(GRADS))
    for n in range(1, len(history)):
        for name in PARAMS:
            params = [params[name] for params in history[: n + 1]]
            expected = reference(params, decays[:n], debias)
            np.testing.assert_allclose(averages[n][name], expected, rtol=1e-6)


def test_average_is_that_of_optax_ema_over_the_params():
    """`optax.ema` averages updates; fed with the params, it is the reference."""
    history, averages = trajectory(averaged(0.75), PARAMS, GRADS)
    ema = optax.ema(0.75, debias=True)
    state = ema.init(PARAMS)
    for params, average in zip(history[1:], averages[1:], strict=True):
        expected, state = ema.update(params, state)
        chex.assert_trees_all_close(average, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "decay", [0.999, warmup, lambda count: jnp.where(count < 2, 1.0, 0.5)]
)
def test_first_average_is_the_first_params_exactly(decay, jit_or_eager):
    # p_0 + (p_1 - p_0) would round: far apart.
    params = jnp.array([3e7, -3e7, -0.0])
    update = jnp.array([-3e7, 3e7, -0.0]) + jnp.array([1.1, 0.3, -0.0])
    optimizer = averaged(decay, optax.identity())
    history, averages = trajectory(optimizer, params, [update], jit_or_eager)
    assert_identical(averages[1], history[1])
    assert np.signbit(averages[1][2])


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("decay", [0, 0.0, lambda count: 0.0 * count])
def test_decay_of_zero_follows_the_params_exactly(decay, debias, jit_or_eager):
    optimizer = averaged(decay, optax.identity(), debias=debias)
    updates = [jnp.array([-3e7 + 1.1, 0.3]), jnp.array([5e6, -0.7]), jnp.ones(2)]
    history, averages = trajectory(
        optimizer, jnp.array([3e7, 0.1]), updates, jit_or_eager
    )
    for params, average in zip(history, averages, strict=True):
        assert_identical(average, params)


def test_schedule_that_begins_with_one_has_nothing_to_keep_and_later_keeps_all():
    decays = jnp.array([1.0, 1.0, 0.5, 1.0])
    optimizer = averaged(lambda count: decays[count])
    history, averages = trajectory(optimizer, PARAMS, GRADS)
    assert_identical(averages[:3], history[:3])
    assert_identical(averages[3], history[3])  # the first with a weight
    assert_identical(averages[4], averages[3])
    optimizer = averaged(lambda count: decays[count], debias=False)
    _, averages = trajectory(optimizer, PARAMS, GRADS)
    assert_identical(averages[2], PARAMS)


def test_schedule_sees_the_number_of_steps_averaged():
    seen = []

    def decay(count):
        assert (count.shape, count.dtype) == ((), jnp.int32)
        seen.append(int(count))
        return 0.5

    run(scaled(decay), PARAMS, [GRADS[0], BAD, GRADS[1], GRADS[2]], lambda f: f)
    # Eager: the first step is traced before, and a skipped one runs too.
    assert seen == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64])
def test_schedule_may_return_any_number(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        for decay in (lambda count: 0.5, lambda count: jnp.asarray(0.5, dtype)):
            _, state = run(averaged(decay), PARAMS, GRADS[:2])
            assert_identical(state_of(state)[:2], (jnp.int32(2), jnp.float32(0.75)))


def test_updates_go_on_untouched():
    ema = jls.params_ema(0.9)
    updates, _ = ema.update(GRADS[0], ema.init(PARAMS), PARAMS, value=jnp.float32(1.0))
    assert updates is GRADS[0]


def test_constant_decay_may_be_an_array_or_a_hyperparameter():
    expected = run(averaged(0.75), PARAMS, GRADS)[1]
    assert_identical(run(averaged(jnp.float32(0.75)), PARAMS, GRADS)[1], expected)
    make = optax.inject_hyperparams(jls.params_ema, static_args=("debias",))
    chained = optax.chain(optax.sgd(0.5, momentum=0.9), make(decay=0.75))
    _, state = run(chained, PARAMS, GRADS)
    assert_identical(state_of(state), state_of(expected))
    assert optax.tree.get(state, "decay") == 0.75


# Skipped steps ------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["inf", "nan", "loss"])
@pytest.mark.parametrize("debias", [True, False])
def test_skipped_step_leaves_no_trace(bad, debias, jit_or_eager):
    optimizer = scaled(warmup, optax.adamw(0.5), debias=debias)
    bad_grads = {"inf": BAD, "nan": NAN, "loss": GRADS[3]}[bad]

    @jit_or_eager
    def step(params, state, grads, loss):
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    def steps(batches):
        carry = PARAMS, optimizer.init(PARAMS)
        for grads in batches:
            before = carry[1]
            is_bad = grads is bad_grads
            loss = jnp.float32(jnp.nan if is_bad and bad == "loss" else 1.0)
            carry = step(*carry, grads, loss)
            if is_bad:
                assert_identical(state_of(carry[1]), state_of(before))
        return carry

    good = GRADS[:3]
    params, state = steps([bad_grads, good[0], bad_grads, bad_grads, *good[1:]])
    expected_params, expected = steps(good)
    assert state.skips == 3
    assert_identical(params, expected_params)
    assert_identical(state_of(state), state_of(expected))
    assert state_of(state).count == 3


def test_update_that_is_not_finite_stays_out(jit_or_eager):
    """Finite gradients, NaN updates: kept out of the params, and of the average."""
    nan = optax.stateless(lambda u, _: jax.tree.map(lambda u: u / jnp.abs(u), u))
    inner = averaged(0.9, nan)
    optimizer = jls.skip_nonfinite(inner, check_updates=True)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    params, state = run(optimizer, PARAMS, [zeros, GRADS[0], zeros], jit_or_eager)
    expected, expected_state = run(optimizer, PARAMS, [GRADS[0]], jit_or_eager)
    assert (state.skips, state_of(state).count) == (2, 1)
    assert_identical(params, expected)
    assert_identical(state_of(state), state_of(expected_state))


def test_element_that_is_not_finite_stays_out_of_the_average(jit_or_eager):
    """A float16 sum may overflow where the update is finite; a mask may be -inf."""
    optimizer = averaged(0.5, optax.identity())
    params = {"h": jnp.array([6e4, 1.0], jnp.float16), "mask": jnp.array([-jnp.inf])}
    update = {"h": jnp.array([1e4, 1.0], jnp.float16), "mask": jnp.zeros(1)}
    history, averages = trajectory(optimizer, params, [update, update], jit_or_eager)
    assert history[1]["h"].tolist() == [np.inf, 2.0]
    assert averages[1]["h"].tolist() == [np.float16(6e4), 2.0]
    assert averages[2]["h"][0] == np.float16(6e4)
    assert averages[2]["mask"].tolist() == [-np.inf]


def test_outside_of_the_wrapper_a_skipped_step_counts():
    outside = optax.chain(jls.loss_scaled(optax.sgd(0.5)), jls.params_ema(0.5))
    params, state = run(outside, PARAMS, [GRADS[0], BAD])
    assert state_of(state).count == 2
    assert_identical(jls.eval_params(state), params)


@pytest.mark.parametrize("k", [2, 3])
def test_inside_multi_steps_only_whole_steps_are_averaged(k):
    inner = optax.MultiSteps(averaged(0.75, optax.sgd(0.5)), k)
    optimizer = jls.loss_scaled(inner.gradient_transformation(), jls.dynamic(8.0))
    micro = [GRADS[0], BAD, GRADS[1], GRADS[2], NAN, GRADS[3], GRADS[0], GRADS[1]]
    history, averages = trajectory(optimizer, PARAMS, micro)
    real = [PARAMS]
    for before, after in itertools.pairwise(history):
        moved = any(jax.tree.leaves(jax.tree.map(jnp.any, _differ(before, after))))
        real += [after] if moved else []
    assert len(real) == 1 + 6 // k
    _, state = run(optimizer, PARAMS, micro)
    assert state_of(state).count == 6 // k
    for name in PARAMS:
        params = [params[name] for params in real]
        expected = reference(params, [0.75] * (len(real) - 1), True)
        np.testing.assert_allclose(averages[-1][name], expected, rtol=1e-6)


def _differ(tree, other):
    return jax.tree.map(lambda a, b: a != b, tree, other)


# Leaves and dtypes --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_narrow_params_are_averaged_in_float32(jit_or_eager):
    """In bfloat16 the average of a slow decay would never move."""
    params = jnp.array([1.0, -256.0], jnp.bfloat16)
    optimizer = scaled(0.998, optax.sgd(1.0), debias=False)
    steps = 5
    grads = [jnp.array([-1.0, 2.0], jnp.bfloat16)] * steps
    history, averages = trajectory(optimizer, params, grads, jit_or_eager)
    assert {params.dtype for params in history} == {jnp.dtype(jnp.bfloat16)}
    assert {average.dtype for average in averages} == {jnp.dtype(jnp.float32)}
    expected = reference(history, [float(np.float32(0.998))] * steps, False)
    np.testing.assert_allclose(averages[-1], expected, rtol=1e-6)
    assert np.all(averages[1] != averages[0])
    small = params + (history[1] - params) * jnp.bfloat16(0.002)
    assert_identical(small, params)  # what bfloat16 would make of the first step


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
@pytest.mark.parametrize("compiled", AS_WRITTEN_OR_ON_A_GPU)
def test_what_is_averaged_are_the_rounded_params(compiled):
    """Master weights are not invented: the average is of what the model ran with."""
    params = jnp.array([256.0, -256.0], jnp.bfloat16)
    grads = [jnp.full(2, 0.25)]
    history, averages = trajectory(scaled(0.5), params, grads, compiled)
    assert_identical(history[1], params)
    assert averages[1].tolist() == [256.0, -256.0]


def test_complex_and_float64_are_not_narrowed():
    with jax.enable_x64(True):
        params = {"d": jnp.float64(1.0), "z": jnp.complex128(1.0 - 2.0j)}
        grads = {"d": jnp.float64(1e-12), "z": jnp.complex128(1e-12j)}
        history, averages = trajectory(scaled(0.5), params, [grads] * 3)
        for name in params:
            assert averages[-1][name].dtype == params[name].dtype
            values = [complex(params[name]) for params in history]
            expected = (
                sum(w * v for w, v in zip((1, 2, 4), values[1:], strict=True)) / 7
            )
            assert abs(complex(averages[-1][name]) - expected) < 1e-15
        _, state = run(scaled(0.5), params, [grads])
        assert state_of(state).weight.dtype == jnp.float32
    params = {"z": jnp.array([1.0 - 2.0j, 0.5j], jnp.complex64)}
    history, averages = trajectory(scaled(0.5), params, [params, params])
    expected = (history[1]["z"] + 2 * history[2]["z"]) / 3
    np.testing.assert_allclose(averages[-1]["z"], expected, rtol=1e-6)


def test_average_works_under_strict_promotion(jit_or_eager):
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        dtypes = "bfloat16", "float32", "float64", "complex64", "complex128", "int32"
        params = {dtype: jnp.ones(2, dtype) for dtype in dtypes}
        _, averages = trajectory(averaged(0.5, optax.identity()), params, [params] * 2)
        for dtype in dtypes[:-1]:
            np.testing.assert_allclose(averages[-1][dtype], (2 + 2 * 3) / 3, rtol=1e-6)
        assert averages[-1]["int32"].tolist() == [3, 3]


def test_leaves_that_are_not_floating_point_are_the_newest(jit_or_eager):
    float0, key = np.zeros(2, jax.dtypes.float0), jax.random.key(3)
    params = {
        "w": jnp.array([1.0, 2.0]),
        "f8": jnp.ones(2, jnp.float8_e4m3fn),
        "i": jnp.int32(3),
        "u": jnp.array([250, 3], jnp.uint8),
        "b": jnp.array([True, False]),
        "k": key,
        "q": key,
        "n": None,
        "m": optax.MaskedNode(),
    }
    updates = {
        "w": jnp.array([1.0, -1.0]),
        "f8": jnp.ones(2, jnp.float8_e4m3fn),
        "i": jnp.int32(-5),
        "u": jnp.array([3, 0], jnp.uint8),
        "b": jnp.zeros(2, jnp.bool_),
        "k": None,  # as Equinox does for a leaf without a gradient
        "q": key,  # as what passes through jls.loss_scaled
        "n": None,
        "m": optax.MaskedNode(),
    }
    ema = jls.params_ema(0.9)

    def step(updates, state, params):
        # Static leaves cannot pass through jit's arguments.
        static = {"f": jnp.tanh, "0": float0}
        average = {**state.ema, **static}
        updates = {**updates, "f": None, "0": float0}
        params = {**params, **static}
        _, state = ema.update(updates, state._replace(ema=average), params)
        assert state.ema.pop("f") is jnp.tanh
        assert state.ema.pop("0") is float0
        return state

    state = ema.init(params)
    chex.assert_trees_all_equal_structs(state.ema, params)
    new = jit_or_eager(step)(updates, state, params)
    chex.assert_trees_all_equal_structs(new, state)
    for old_leaf, leaf in zip(*map(jax.tree.leaves, (state, new)), strict=True):
        assert old_leaf.dtype == leaf.dtype
    average = new.ema
    assert average["w"].tolist() == [2.0, 1.0]
    assert (average["f8"].dtype, average["f8"].tolist()) == ("float32", [2.0, 2.0])
    assert average["i"] == -2
    assert average["u"].tolist() == [253, 3]
    assert average["b"].tolist() == [True, False]
    for name in ("k", "q"):
        assert_identical(*map(jax.random.key_data, (average[name], key)))
    assert ema.init({**params, "f": jnp.tanh, "0": float0}).ema["0"] is float0


def test_leaf_without_an_update_is_averaged_as_it_is():
    ema = jls.params_ema(0.5, debias=False)
    state = ema.init(PARAMS)
    params = {"w": PARAMS["w"] + 1.0, "b": PARAMS["b"]}
    for absent in (None, optax.MaskedNode()):
        updates = {"w": absent, "b": jnp.float32(0.0)}
        _, new = ema.update(updates, state, params)
        assert_identical(new.ema["w"], PARAMS["w"] + 0.5)


@pytest.mark.parametrize("tree", [{}, None, (), {"m": optax.MaskedNode(), "n": None}])
def test_empty_tree(tree):
    optimizer = jls.loss_scaled(jls.params_ema(0.9), jls.dynamic(8.0))
    state = optimizer.init(tree)
    if tree is None:  # optax's word for no params
        with pytest.raises(ValueError, match="averages the parameters"):
            optimizer.update(tree, state, tree)
        return
    _, state = optimizer.update(tree, state, tree)
    assert jls.eval_params(state) == tree


def test_masked_average_holds_the_masked_leaves_only():
    masked = optax.masked(jls.params_ema(0.75), {"w": True, "b": False})
    optimizer = jls.loss_scaled(optax.chain(optax.sgd(0.5), masked), jls.dynamic(8.0))
    _, averages = trajectory(optimizer, PARAMS, GRADS)
    expected = trajectory(scaled(0.75, optax.sgd(0.5)), PARAMS, GRADS)[1]
    assert averages[-1]["b"] == optax.MaskedNode()
    chex.assert_trees_all_close(averages[-1]["w"], expected[-1]["w"], rtol=1e-6)


# Programs -----------------------------------------------------------------------------


def test_scan_vmap_donation_and_a_loop_agree_with_one_trace():
    optimizer, traces = scaled(warmup, optax.adamw(0.1)), []
    all_grads = [*GRADS[:2], BAD, *GRADS[2:], NAN, GRADS[0]]

    def step(params, state, grads):
        traces.append(None)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def loop(step, params, all_grads):
        state = optimizer.init(params)
        for grads in all_grads:
            params, state = step(params, state, grads)
        return params, state

    expected = loop(jax.jit(step), PARAMS, all_grads)
    assert len(traces) == 1
    assert state_of(expected[1]).count == 5
    donated = jax.tree.map(jnp.copy, PARAMS)
    donated = loop(jax.jit(step, donate_argnums=(0, 1)), donated, all_grads)
    chex.assert_trees_all_close(donated, expected, rtol=1e-6)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_grads)
    scanned, _ = jax.lax.scan(
        lambda carry, grads: (step(*carry, grads), None),
        (PARAMS, optimizer.init(PARAMS)),
        stacked,
    )
    chex.assert_trees_all_close(scanned, expected, rtol=1e-6)

    # Two members, of which the second has a bad step less.
    members = [all_grads, [*GRADS[:2], GRADS[1], *all_grads[3:]]]
    pairs = [
        jax.tree.map(lambda *x: jnp.stack(x), *grads)
        for grads in zip(*members, strict=True)
    ]
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
    state = jax.vmap(optimizer.init)(twice)
    for grads in pairs:
        twice, state = jax.vmap(step)(twice, state, grads)
    assert state_of(state).count.tolist() == [5, 6]
    for i, grads in enumerate(members):
        member = jax.tree.map(lambda x, i=i: x[i], jls.eval_params(state))
        average = jls.eval_params(loop(jax.jit(step), PARAMS, grads)[1])
        chex.assert_trees_all_close(member, average, rtol=1e-6)


def test_committed_params_do_not_retrace_the_second_step():
    params = jax.device_put(PARAMS, jax.devices()[0])
    optimizer = scaled()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for grads in GRADS:
        params, state = step(params, state, grads)
    assert step._cache_size() == 1


KINDS = {
    "w": jnp.array([1.0, 2.0]),
    "same": jnp.array([1.0, 2.0]),
    "h": jnp.ones(2, jnp.bfloat16),
    "i": jnp.array([3, 4]),
}


@pytest.mark.parametrize("make", [averaged, scaled])
@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_average_shares_no_buffer_with_the_params(make, jit_or_eager):
    optimizer = make(0.0, optax.identity())  # the average is equal to the params

    def step(params, state, updates):
        updates, state = optimizer.update(updates, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, KINDS)
    zeros = jax.tree.map(jnp.zeros_like, params)
    carry = params, optimizer.init(params)
    for _ in range(2):
        leaves = jax.tree.leaves(carry)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
        carry = jit_or_eager(step)(*carry, zeros)


def test_donation_is_safe_without_the_wrapper_too():
    optimizer = averaged(0.5, optax.identity())
    key = jax.random.key(7)

    def donate(params, state, updates):
        _, state = optimizer.update({**updates, "k": None}, state, params)
        return {**params, "w": params["w"] + updates["w"]}, state

    step = jax.jit(donate, donate_argnums=(0, 1))
    params = {**jax.tree.map(jnp.copy, KINDS), "k": jnp.copy(key)}
    updates = {**jax.tree.map(jnp.ones_like, KINDS)}
    state = optimizer.init(params)
    params, state = donate(params, state, updates)  # eager, where nothing is copied
    assert jls.eval_params(state)["k"] is not params["k"]
    for _ in range(2):
        params, state = step(params, state, updates)
    average = jls.eval_params(state)
    expected = params["w"] - (1 * 2 + 2 * 1) / 7
    np.testing.assert_allclose(average["w"], expected, rtol=1e-6)
    assert_identical(*map(jax.random.key_data, (average["k"], key)))


def test_step_goes_through_export_flax_bytes_and_pickle():
    # The states of optax are the user's to register: none here.
    ema = jls.params_ema(0.75)
    optimizer = jls.loss_scaled(ema, jls.dynamic(8.0))
    update = jax.jit(optimizer.update)
    args = GRADS[0], optimizer.init(PARAMS), PARAMS
    exported = jax.export.export(update)(*args)
    again = jax.export.deserialize(exported.serialize())
    assert_identical(again.call(*args), update(*args))

    optimizer = scaled(warmup)
    _, state = run(optimizer, PARAMS, [GRADS[0], BAD, GRADS[1]])
    fresh = optimizer.init(PARAMS)
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(fresh, saved)
    for other in (restored, pickle.loads(pickle.dumps(state))):
        assert_identical(jax.tree.map(jnp.asarray, other), state)
        update = jax.jit(optimizer.update)
        expected = update(GRADS[2], state, PARAMS)
        assert_identical(update(GRADS[2], other, PARAMS), expected)


def test_count_stops_at_the_int32_maximum_and_the_average_goes_on():
    optimizer = averaged(lambda count: jnp.where(count == 2**31 - 1, 0.5, 0.0))
    state = optimizer.init(PARAMS)
    _, state = run(optimizer, PARAMS, GRADS[:1])
    late = state[1]._replace(count=jnp.int32(2**31 - 1))
    state = (state[0], late)
    updates, new = jax.jit(optimizer.update)(GRADS[1], state, PARAMS)
    assert new[1].count == 2**31 - 1
    expected = jax.tree.map(
        lambda a, p: (a + p) / 2, late.ema, optax.apply_updates(PARAMS, updates)
    )
    chex.assert_trees_all_close(new[1].ema, expected, rtol=1e-6)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("decay", [0.75, 0.9999])
def test_weight_goes_to_one_and_stays_there(decay, debias):
    ema = jls.params_ema(decay, debias=debias)

    def step(state, _):
        return ema.update(jnp.zeros(()), state, jnp.float32(0.1))[1], state.weight

    state, weights = jax.lax.scan(step, ema.init(jnp.float32(0.1)), length=100_000)
    assert jnp.all(jnp.diff(weights) >= 0)
    # As near as float32 knows 1 - decay.
    assert 1 - 2.0**-24 / (1 - decay) - 5e-5 <= state.weight <= 1.0
    assert debias or state.weight == 1.0
    assert weights[0] == (0.0 if debias else 1.0)
    assert state.ema == jnp.float32(0.1)


# Reading ------------------------------------------------------------------------------


def test_average_is_found_wherever_it_is():
    make = optax.inject_hyperparams(lambda rate: averaged(0.9, optax.adam(rate)))
    optimizers = [
        jls.params_ema(0.9),
        averaged(),
        scaled(),
        optax.chain(optax.clip(1.0), scaled(), optax.scale(1.0)),
        jls.loss_scaled(make(rate=0.5)),
        optax.MultiSteps(scaled(), 2),
    ]
    for optimizer in optimizers:
        assert_identical(jls.eval_params(optimizer.init(PARAMS)), PARAMS)


def test_average_is_read_under_jit_too():
    state = scaled().init(PARAMS)
    assert_identical(jax.jit(jls.eval_params)(state), PARAMS)


def test_none_or_two_averages_are_an_error_that_names_them():
    state = jls.loss_scaled(optax.adam(0.5)).init(PARAMS)
    with pytest.raises(ValueError, match=r"LossScaledState without one.*params_ema"):
        jls.eval_params(state)
    two = optax.chain(jls.params_ema(0.9), jls.params_ema(0.99)).init(PARAMS)
    message = r"exactly one average.*got 2: at '0', '1'.*part that you mean"
    with pytest.raises(ValueError, match=message):
        jls.eval_params(two)
    assert_identical(jls.eval_params(two[1]), PARAMS)


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_linen_train_state_evaluates_with_the_average():
    model = linen.Dense(3, param_dtype=jnp.bfloat16)
    x = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    params = model.init(jax.random.key(0), x)["params"]
    tx = scaled(0.75, optax.adam(0.5))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

        return state.apply_gradients(grads=jls.grad(loss_fn)(state, state.params))

    history = [state.params]
    for batch in (x, 2 * x, jnp.inf * x, -x):
        state = step(state, batch)
        history.append(state.params)
    del history[3]  # the bad one
    average = jls.eval_params(state)
    for name in params:
        values = [params[name] for params in history]
        expected = reference(values, [0.75] * 3, True)
        np.testing.assert_allclose(average[name], expected, rtol=1e-5)
    y = state.apply_fn({"params": average}, x)
    assert (y.shape, y.dtype) == ((2, 3), jnp.float32)
    assert not jnp.allclose(y, state.apply_fn({"params": state.params}, x))
    cast = jax.tree.map(lambda a, p: a.astype(p.dtype), average, state.params)
    chex.assert_trees_all_equal_structs(cast, state.params)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_nnx_optimizer_evaluates_a_second_model_with_the_average():
    model = Net()
    tx = scaled(0.75, optax.adam(0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.array([[1.0, -2.0], [0.5, 3.0]])

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model, x):
            return jnp.mean((model(x) - x) ** 2)

        differentiate = jls.grad(loss_fn, transform=nnx.value_and_grad)
        optimizer.update(model, differentiate(optimizer, model, x))

    def kernel():
        return jnp.copy(model.linear.kernel.get_value())

    history = [kernel()]
    assert_identical(jls.eval_params(optimizer)["linear"]["kernel"], history[0])
    for batch in (x, 2 * x, jnp.inf * x, -x):
        step(model, optimizer, batch)
        history.append(kernel())
    assert_identical(history.pop(3), history[2])  # the bad one
    average = jls.eval_params(optimizer)
    evaluated = nnx.clone(model)
    nnx.update(evaluated, average)
    expected = reference(history, [0.75] * 3, True)
    np.testing.assert_allclose(evaluated.linear.kernel.get_value(), expected, rtol=1e-5)
    assert isinstance(evaluated.linear.kernel, nnx.Param)
    assert_identical(kernel(), history[-1])  # the model goes on with its own
    assert_identical(
        nnx.to_pure_dict(nnx.state(evaluated, nnx.BatchStat)),
        nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    )


# Errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (1, ValueError, r"decay must be in \[0, 1\) .*got 1\."),
        (1 - 1e-9, ValueError, r"decay must be in \[0, 1\) \(as float32\)"),
        (-0.1, ValueError, r"got -0\.1"),
        (float("nan"), ValueError, "got nan"),
        (np.float32(2.0), ValueError, "decay must be"),
        ("0.9", TypeError, "decay must be a real number, got str"),
        (None, TypeError, "decay must be a real number, got NoneType"),
        (True, TypeError, "decay must be a real number, got bool"),
    ],
)
def test_bad_decay_is_named(decay, error, message):
    with pytest.raises(error, match=message):
        jls.params_ema(decay)


@pytest.mark.parametrize("decay", [0, 1 - 2.0**-24, np.float16(0.5), np.float64(0.9)])
def test_any_number_below_one_is_a_decay(decay):
    _, state = run(averaged(decay), PARAMS, GRADS[:1])
    expected = np.float32(1) - np.float32(decay)
    assert state_of(state).weight == expected


def test_bad_debias_is_named():
    with pytest.raises(TypeError, match="debias must be True or False, got int 1"):
        jls.params_ema(0.9, debias=1)


def test_missing_params_are_an_error_that_says_what_to_do():
    for optimizer in (averaged(), scaled()):
        with pytest.raises(ValueError, match=r"pass them.*state, params\)"):
            optimizer.update(GRADS[0], optimizer.init(PARAMS))
