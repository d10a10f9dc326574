"""One step: applied or skipped, atomically, and the state says which."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from excess import AS_WRITTEN_OR_ON_A_GPU
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from shared import (
    BAD,
    GOOD,
    INF,
    NAN,
    ONE,
    PARAMS,
    W,
    assert_close,
    assert_identical,
    bad_leaves,
    run,
    scaled,
    steps,
)

import jls
from jls._step import apply_updates, update_and_apply


def test_finite_steps_are_those_of_the_inner_optimizer():
    inner = optax.sgd(0.5, momentum=0.9)
    params, state = steps(scaled(inner), [GOOD, BAD, GOOD])
    expected, inner_state = steps(inner, [GOOD, GOOD])
    assert_close(params, expected)
    assert_close(state.inner_state, inner_state)


def test_scale_grows_and_backs_off_and_counters_advance():
    _, state = steps(scaled(optax.sgd(0.5)), [GOOD] * 3 + [BAD] * 2)
    assert state.scaler_state == (4.0, 0, 0)
    assert (state.steps, state.skips, state.consecutive_skips) == (5, 2, 2)
    assert not state.applied
    _, state = steps(scaled(optax.sgd(0.5)), [BAD, BAD, GOOD])
    assert (state.skips, state.consecutive_skips, state.applied) == (2, 0, True)


def test_applied_is_false_before_the_first_step():
    assert not scaled(optax.sgd(0.5)).init(PARAMS).applied


def test_works_under_strict_promotion_with_16_bit_gradients():
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GOOD)
    params, state = steps(scaled(optax.sgd(0.5)), [half])
    assert_close(params, steps(optax.sgd(0.5), [GOOD])[0])
    assert state.applied


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_nonfinite_loss_keeps_the_whole_scaler_state(value):
    optimizer = scaled(optax.sgd(0.5))
    _, state = steps(optimizer, [GOOD, GOOD])
    for grads in (GOOD, BAD):
        _, new = optimizer.update(grads, state, PARAMS, value=jnp.float32(value))
        assert_close(new.scaler_state, state.scaler_state)
        assert (new.skips, new.nonfinite_losses, new.applied) == (1, 1, False)


def test_inner_never_sees_what_is_not_finite_even_where_it_runs_on_a_bad_step():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(jls.all_finite((updates, extra)))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(0.5).init, update)
    optimizer = scaled(inner)
    state = optimizer.init(PARAMS)
    optimizer.update(BAD, state, PARAMS, value=jnp.float32(jnp.nan), grad=BAD)
    traced, ran = seen  # eager: the first step is traced before, and every step runs
    assert isinstance(traced, jax.core.Tracer)
    assert ran


def divided_by_itself():
    """Makes NaN updates of finite gradients, as Adam does whose eps underflows."""

    def update(updates, state, params=None):
        updates = jax.tree.map(lambda g: jnp.where(g == 0, g / g, -g), updates)
        return updates, jax.tree.map(lambda s: s + 1, state)

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


ZERO = jax.tree.map(jnp.zeros_like, GOOD)


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
@pytest.mark.parametrize(
    ("dtype", "check_updates", "is_checked"),
    [
        (jnp.float32, True, True),
        (jnp.float32, None, False),
        (jnp.float32, False, False),
        (jnp.bfloat16, None, True),
        (jnp.bfloat16, False, False),
    ],
)
def test_check_updates(dtype, check_updates, is_checked):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    optimizer = scaled(divided_by_itself(), check_updates=check_updates)
    with jax.numpy_dtype_promotion("standard"):
        params, state = steps(optimizer, [GOOD, ZERO], params)
    assert jls.all_finite(params) == is_checked
    assert state.inner_state == (1 if is_checked else 2)
    assert (state.applied, state.skips) == (not is_checked, int(is_checked))
    assert state.scaler_state == (8.0, 2, 0)  # a finite step for the scaler


# From these inner optimizers make updates, since no gradient may be inf.
MADE = [0.0, -1.0, 15.0, 17.0, 1e5, -1e5, 3.4e38, -3.4e38, jnp.inf, -jnp.inf, jnp.nan]
by_table = optax.stateless(lambda rows, _: jnp.array(MADE)[rows.astype(jnp.int32)])


@pytest.mark.cover(2)
@pytest.mark.filterwarnings("ignore:.*parameters are")
@pytest.mark.parametrize(
    "dtype",
    [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2, jnp.float8_e4m3fn],
)
@pytest.mark.filterwarnings("ignore:.*parameters are float16")
@pytest.mark.parametrize("compiled", AS_WRITTEN_OR_ON_A_GPU)
def test_a_parameter_never_overflows_in_its_own_dtype(dtype, compiled, jit_or_eager):
    info = jnp.finfo(dtype)
    values = [0.0, -2.0, float(info.max), float(info.min), float(info.smallest_normal)]
    values += [-jnp.inf, jnp.nan]  # a mask of -inf may stay one
    params = jnp.array(values).astype(dtype)
    rows = jnp.repeat(jnp.arange(float(len(MADE))), params.size)
    params = jnp.tile(params, len(MADE))
    wide = np.asarray(params, np.float32)
    made = np.array(MADE)[np.asarray(rows, int)]
    pairs = list(zip(wide.tolist(), made.tolist(), strict=True))
    expected = [reference.may_be_stored(*pair, np.dtype(dtype)) for pair in pairs]
    sums = np.array([reference.stored(*pair, np.dtype(dtype)) for pair in pairs])
    kept = np.where(expected, sums, np.asarray(params))
    optimizer = scaled(by_table, check_updates=True)

    def step(param, row):  # each element is a run of its own
        state = optimizer.init(param)
        updates, made = optimizer.update(row, state, param)
        stored, applied, *_ = update_and_apply(optimizer, row, state, param)
        return updates, made.applied, stored, applied.applied

    step = jit_or_eager(compiled(jax.vmap(step)))
    updates, made, stored, applied = step(params, rows)
    assert made.tolist() == applied.tolist() == expected
    assert 0 < sum(expected) < len(expected)
    is_number = ~np.isnan(wide)  # the payload of a NaN may change
    for new in stored, apply_updates(params, updates):
        assert_identical(np.asarray(new)[is_number], kept[is_number])


def test_what_cannot_be_seen_is_not_judged():
    """Without params, or if they are not what is updated: the updates alone."""
    optimizer = scaled(optax.identity(), check_updates=True)
    largest = jnp.full(2, jnp.finfo(jnp.float32).max)
    state = optimizer.init(largest)
    assert not optimizer.update(largest, state, largest)[1].applied
    assert optimizer.update(largest, state)[1].applied
    assert optimizer.update(largest, state, {"of": largest})[1].applied
    never = scaled(optax.identity(), check_updates=False)
    assert never.update(largest, state, largest)[1].applied


@pytest.mark.standard_promotion
def test_updates_are_applied_bit_for_bit_as_optax_does():
    numbers = np.concatenate(
        [np.float32(2.0) ** np.arange(-149, 128), [0.0, np.inf, np.nan, 3.4e38, 65504]]
    )
    numbers = np.concatenate([numbers, -numbers]).astype(np.float32)
    params, updates = (jnp.array(x.ravel()) for x in np.meshgrid(numbers, numbers[::7]))
    trees = {
        str(dtype): (params.astype(dtype), updates.astype(update_dtype))
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
        for update_dtype in (jnp.float32, dtype)
    }
    trees |= {
        "none": (None, None),
        "no update": (None, jnp.ones(2)),
        "complex": (jnp.array([1 + 2j]), jnp.array([3.0])),
        "integer": (jnp.array([1, 2]), jnp.array([0.5, -1.5])),
        "flag": (jnp.array([True]), jnp.array([0.0])),
        "number": (1.0, jnp.float32(2.0)),
    }
    for name, (param, update) in trees.items():
        expected = optax.apply_updates({"x": param}, {"x": update})
        assert_identical(apply_updates({"x": param}, {"x": update}), expected), name


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_parameters_of_8_bits_train(dtype, jit_or_eager):
    params = jnp.array([1.0, -2.0]).astype(dtype)
    optimizer = scaled(optax.sgd(0.5))
    state = optimizer.init(params)
    step = jit_or_eager(functools.partial(update_and_apply, optimizer))
    for grads, expected in ((NAN, [1.0, -2.0]), (ONE, [0.5, -2.5])):
        params, state, *_ = step(grads, state, params)
        assert params.dtype == dtype
        assert params.tolist() == expected


def test_check_updates_judges_by_the_gradients_without_params():
    optimizer = scaled(divided_by_itself())
    state = optimizer.init(PARAMS)
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), ZERO)
    assert not optimizer.update(half, state)[1].applied
    assert optimizer.update(ZERO, state)[1].applied


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*parameters are b?float16")
@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_state_keeps_its_dtypes_where_apply_if_finite_raises(dtype):
    params = {"w": jnp.ones(3, dtype)}
    grads = [{"w": jnp.full(3, 0.5, dtype)}] * 2
    inner = optax.adamw(0.1)
    new, state = steps(scaled(inner), grads, params)
    assert new["w"].dtype == dtype
    for a, b in zip(
        jax.tree.leaves(state), jax.tree.leaves(scaled(inner).init(params)), strict=True
    ):
        assert (a.dtype, a.weak_type) == (b.dtype, False)


def test_update_is_differentiable():
    optimizer = scaled(optax.sgd(0.5))

    def total(grads):
        return jnp.sum(optimizer.update(2 * grads, optimizer.init(grads))[0])

    assert jax.grad(total)(jnp.ones(2)).tolist() == [-1.0, -1.0]


@pytest.mark.standard_promotion
def test_debug_nans_finds_no_nan_that_jls_made():
    optimizer = scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)))
    state = optimizer.init(PARAMS)
    with jax.debug_nans(True):
        _, state = optimizer.update(BAD, state, PARAMS)
    assert not state.applied


@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_updates_take_the_wider_dtype_of_gradient_and_parameter():
    inner = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda u, s, p=None: (
            jax.tree.map(lambda g, x: g.astype(x.dtype) * x, u, p),
            s,
        ),
    )
    with jax.enable_x64(True):
        params = {"z": jnp.complex64(1j), "d": jnp.float64(1e300), "h": jnp.bfloat16(2)}
        grads = jax.tree.map(lambda _: jnp.float32(2.0), params)
        optimizer = scaled(inner, check_updates=False)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        assert updates == {"z": 2j, "d": 2e300, "h": 4.0}
        dtypes = jax.tree.map(lambda u: u.dtype.name, updates)
        assert dtypes == {"z": "complex64", "d": "float64", "h": "float32"}


def test_debug_nans_and_infs_do_not_trip_over_a_skipped_step():
    optimizer = scaled(optax.sgd(0.5, momentum=0.9))
    state = optimizer.init(PARAMS)
    with jax.debug_nans(True), jax.debug_infs(True):
        _, state = jax.jit(optimizer.update)(BAD, state, PARAMS)
    assert not state.applied


def test_step_skipped_for_its_updates_names_those(jit_or_eager):
    inner = optax.stateless(
        lambda updates, params: {"a": updates["a"] / 0, "b": params["b"]}
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=True)
    update = jit_or_eager(optimizer.update)
    _, state = update(params, optimizer.init(params), params)
    assert bad_leaves(state, params) == ["a"]
    assert (state.last_skip_reason, state.nonfinite_updates, state.skips) == (3, 1, 1)
    assert jls.loss_scale(state) == 8.0


def test_inner_state_that_becomes_nan_is_not_committed_either(jit_or_eager):
    """As dadapt_adamw does in float16: finite updates, and a state for ever NaN."""

    def update(updates, state, params=None):
        return updates, {"mean": state["mean"] / 0, "best": state["best"]}

    inner = optax.GradientTransformation(
        lambda params: {"mean": jnp.zeros(()), "best": jnp.float32(jnp.inf)}, update
    )
    params = jnp.ones(2)
    for checks in (True, False):
        optimizer = jls.loss_scaled(inner, jls.dynamic(8.0), check_updates=checks)
        step = jit_or_eager(optimizer.update)
        _, state = step(params, optimizer.init(params), params)
        assert state.applied == (not checks)
        assert jnp.isfinite(state.inner_state["mean"]) == checks
        assert bool(state.nonfinite_updates) == checks


def test_updates_with_other_leaves_than_the_params_are_refused():
    optimizer = scaled(optax.identity())
    with pytest.raises(
        ValueError, match=r"as many floating-point leaves .* got 1 and 2"
    ):
        optimizer.update({"a": jnp.ones(2)}, optimizer.init(PARAMS))


# What the scaler sees -----------------------------------------------------------------


def test_one_nan_among_many_is_never_committed(jit_or_eager):
    optimizer = scaled(optax.sgd(0.5))
    params = {"w": jnp.ones((65, 64)), "b": jnp.ones(3)}
    grads = {"w": jnp.ones((65, 64)).at[7, 7].set(jnp.nan), "b": jnp.ones(3)}
    updates, state = jit_or_eager(optimizer.update)(
        grads, optimizer.init(params), params
    )
    assert not state.applied
    assert state.nonfinite_leaves.tolist() == [False, True]
    assert jls.all_finite(updates)
    assert jls.loss_scale(state) == 4.0


def keep(state, grads_finite):
    return state._replace(loss_scale=jnp.where(grads_finite, 1.0, -1.0))


def test_the_wrapper_tells_the_scaler_whether_all_gradients_are_finite(jit_or_eager):
    scaler = jls.types.LossScaler(jls.static(8.0).init, keep)
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    update = jit_or_eager(optimizer.update)
    state = optimizer.init(params)
    grads = {"w": jnp.array([0.25, -4.0]), "b": jnp.array(2.0)}
    updates, state = update(grads, state, params)
    assert (jls.loss_scale(state), state.applied) == (1.0, True)
    assert updates["w"].tolist() == [-0.125, 2.0]
    bad = grads | {"b": jnp.array(jnp.nan)}
    _, state = update(bad, state, params)
    assert (jls.loss_scale(state), state.skips) == (-1.0, 1)
    assert state.nonfinite_leaves.tolist() == [True, False]
    _, state = update(grads, state, params, value=jnp.nan)
    assert (jls.loss_scale(state), state.nonfinite_losses) == (-1.0, 1)  # kept
    _, state = update(grads, state, params)
    assert jls.loss_scale(state) == 1.0
    _, state = update(grads, state, params, partial_overflow=jnp.array(True))
    assert (jls.loss_scale(state), state.applied) == (-1.0, True)


def test_a_scaler_is_a_pytree_of_its_two_functions():
    scaler = jls.types.LossScaler(jls.static(8.0).init, keep)
    assert jax.tree.leaves(scaler) == [8.0, keep]
    paths = jax.tree_util.tree_flatten_with_path(jls.dynamic(8.0))[0]
    assert jax.tree_util.keystr(paths[0][0]).startswith(".init")


def test_agreement_takes_one_collective():
    optimizer = jls.loss_scaled(optax.sgd(0.5), axis_name="i")
    params = jnp.ones(4)

    def step(grads, value):
        state = optimizer.init(params)
        return optimizer.update(grads, state, params, value=value)[0]

    mesh = Mesh(jax.devices()[:1], "i")
    spec = {"mesh": mesh, "in_specs": (P("i"), P()), "out_specs": P("i")}
    jaxpr = str(jax.make_jaxpr(jax.shard_map(step, **spec))(params, jnp.ones(())))
    assert jaxpr.count("pmin") == 1
    assert not any(name in jaxpr for name in ("pmax", "psum", "all_gather"))


# What went wrong elsewhere ------------------------------------------------------------


def test_gradients_are_true_on_steps_that_move_the_scale(jit_or_eager):
    """MPX M1: unscaled with the scale of the next step."""
    scaler = jls.dynamic(8.0, growth_interval=2)
    optimizer = jls.loss_scaled(optax.sgd(0.0), scaler)

    @jit_or_eager
    def step(params, state):
        loss, grads = jls.value_and_grad(lambda w: jnp.sum(w**2))(state, params)
        _, state = optimizer.update(grads, state, params)
        return loss, grads, state

    state = optimizer.init(W)
    for scale in (8.0, 16.0, 16.0, 32.0):
        loss, grads, state = step(W, state)
        assert loss == 5.0
        assert grads.tolist() == [2.0, -4.0]
        assert jls.loss_scale(state) == scale


def test_overflow_of_the_true_gradient_under_a_scale_below_one_is_seen():
    """Keras K3: tested before unscaling, an inf got in."""
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(0.25, min_scale=2.0**-4))
    state, w = optimizer.init(W), jnp.float32(0.5)

    def loss_fn(w):
        return w * jnp.float32(3e38) + w * jnp.float32(3e38)

    loss, grads = jls.value_and_grad(loss_fn)(state, w)
    assert jnp.isfinite(loss)
    _, state = optimizer.update(jnp.stack([grads, grads]), state, W)
    assert not state.applied
    assert jls.loss_scale(state) == 0.125


INNER = {
    "sgd": optax.sgd(0.5, momentum=0.9),
    "adamw": optax.adamw(0.5, weight_decay=0.1),
    "ema, decay and schedule": optax.chain(
        optax.ema(0.9),
        optax.add_decayed_weights(0.1),
        optax.scale_by_schedule(lambda n: -0.5 / (1 + n)),
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_bad_steps_leave_no_trace_in_the_optimizer(jit_or_eager, inner):
    """jmp J15, R6, R7, P1, P2, P3, P4a, R10: moments and windows kept the NaN."""
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    params, state = run(optimizer, W, [NAN, ONE, INF, ONE], jit_or_eager)
    expected, expected_state = run(optimizer, W, [ONE, ONE], jit_or_eager)
    assert_identical(params, expected)
    assert_identical(state.inner_state, expected_state.inner_state)
    assert jls.loss_scale(state) == 2.0


def test_skipped_updates_are_negative_zero():
    """Levanter P4a: 0 times NaN is NaN."""
    optimizer = jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0))
    updates, _ = jax.jit(optimizer.update)(NAN, optimizer.init(W), W)
    assert_identical(updates, jnp.array([-0.0, -0.0]))


def test_no_number_of_bad_steps_gets_one_committed():
    """optax O1, R1: apply_if_finite gave in."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0, min_scale=2.0))
    params, state = run(optimizer, W, [NAN] * 50)
    assert_identical(params, W)
    assert state.consecutive_skips == 50
    params, state = run(optimizer, W, [NAN] * 50 + [ONE])
    assert params.tolist() == [0.5, -2.5]


def test_clean_step_after_a_collapse_of_the_scale_is_finite():
    """Keras K2: 127 NaN steps took the scale to 0, and then 0 / 0 the weight."""
    scaler = jls.dynamic(1.0, growth_interval=1, min_scale=2.0**-126)
    optimizer = jls.loss_scaled(optax.sgd(0.5), scaler)

    @jax.jit
    def step(carry, factor):
        w, state = carry
        grads = jls.grad(lambda w: jnp.sum(w * factor))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), state.applied

    factors = jnp.array([jnp.nan] * 130 + [1.0])
    (w, _), applied = lax.scan(step, (W, optimizer.init(W)), factors)
    assert applied.tolist() == [False] * 130 + [True]
    assert w.tolist() == [0.5, -2.5]


def test_loss_that_is_not_finite_is_seen():
    """MPX M7: a NaN loss with finite gradients went unseen."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0, growth_interval=1))
    update = jax.jit(optimizer.update)
    updates, state = update(ONE, optimizer.init(W), W, value=jnp.float32(jnp.nan))
    assert_identical(updates, jnp.array([-0.0, -0.0]))
    assert state.nonfinite_losses == 1
    assert jls.loss_scale(state) == 8.0


@pytest.mark.standard_promotion
def test_a_run_traces_once():
    """jmp J5, F1, R3: the Python numbers of a first state cost a second trace."""
    optimizer = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0, growth_interval=2))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = W, optimizer.init(W)
    for grads in (ONE, ONE, NAN, ONE, INF):
        params, state = step(params, state, grads)
    step(params, jls.set_loss_scale(state, 64), ONE)
    assert_identical(
        jax.tree.map(jnp.zeros_like, optimizer.init(W)),
        jax.tree.map(jnp.zeros_like, state),
    )


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:update got float16 gradients")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "inner",
    [optax.adam(0.5), optax.adamw(0.5), optax.adam(0.5, mu_dtype=jnp.bfloat16)],
    ids=["adam", "adamw", "mu_dtype"],
)
def test_half_precision_gradients_keep_the_state_dtypes(jit_or_eager, inner, dtype):
    """optax O2: apply_if_finite was a TypeError of lax.cond."""
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    grads = [ONE.astype(dtype), NAN.astype(dtype), ONE.astype(dtype)]
    params, state = run(optimizer, W, grads, jit_or_eager)
    chex.assert_trees_all_equal_dtypes(state, optimizer.init(W))
    assert state.skips == 1
    assert jnp.all(params < W)


@pytest.mark.standard_promotion
def test_updates_that_are_not_finite_are_not_committed_to_float16_params():
    """optax R4: adam's eps is 0 in float16, and 0 / 0 of finite gradients is NaN."""
    half_eps = optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: u / (0 * p), u, p)
    )
    w = W.astype(jnp.float16)
    for inner, applied in ((optax.adam(0.5), True), (half_eps, False)):
        optimizer = jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=1))
        with pytest.warns(UserWarning, match="are float16"):
            params, state = run(optimizer, w, [jnp.zeros(2, jnp.float16)])
        assert_identical(params, w)
        assert state.applied == applied
        assert jls.loss_scale(state) == 16.0


def test_skipped_nan_inside_jit_does_not_trip_debug_nans():
    """flax F13, R16: only outputs are checked, and none of them is NaN here."""
    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.dynamic(8.0))

    @jax.jit
    def step(w, state, x):
        grads = jls.grad(lambda w: jnp.sum(w * x))(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    state = optimizer.init(W)
    x = jnp.array([1.0, jnp.inf])
    with jax.debug_nans(True), jax.debug_infs(True):
        w, state = step(W, state, x)
    assert_identical(w, W)
    assert state.skips == 1


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("jit", "inner", "steps"),
    [
        (jax.jit, optax.adam(0.1), 50),
        (jax.jit, optax.sgd(0.1, momentum=0.9), 50),
        (lambda f: f, optax.sgd(0.1, momentum=0.9), 3),
    ],
    ids=["adam", "sgd", "sgd, eager"],
)
def test_run_under_a_power_of_two_is_bitwise_the_run_under_another(jit, inner, steps):
    """E1, E2: the same executable, and eager."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [jax.random.normal(k, (4, 4)) for k in keys[:2]]
    x = jax.random.normal(keys[2], (8, 4))
    optimizer = jls.loss_scaled(inner, jls.static(2.0))

    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - x) ** 2)

    @jit
    def step(params, state):
        grads = jls.grad(loss_fn)(state, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train(scale):
        new, state = params, jls.set_loss_scale(optimizer.init(params), scale)
        for _ in range(steps):
            new, state = step(new, state)
        return new

    reference = train(1.0)
    for exponent in (10, 24):
        assert_identical(train(2.0**exponent), reference)
