"""The wrapper's own behaviour; what it promises is in test_promises.py."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shared
from shared import run

import jls

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.float32(0.5)}
GOOD = {"a": jnp.array([0.5, 0.25]), "b": jnp.float32(-1.0)}
BAD = {"a": jnp.array([0.5, jnp.inf]), "b": jnp.float32(-1.0)}


def scaled(inner, **kwargs):
    return jls.loss_scaled(inner, jls.dynamic(8.0, growth_interval=3), **kwargs)


def steps(optimizer, grads, params=PARAMS, **extra):
    return run(optimizer, params, grads, **extra)


# To one rounding: two programs may fuse, and so round, differently.
assert_close = functools.partial(shared.assert_close, rtol=3e-7)


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


def test_extra_arguments_reach_the_inner_transformation():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    init = optax.sgd(0.5).init
    inner = optax.GradientTransformationExtraArgs(init, update)
    optimizer, marker = scaled(inner), object()
    state = optimizer.init(PARAMS)
    optimizer.update(GOOD, state, PARAMS, value=jnp.float32(3.0), marker=marker, n=7)
    assert (seen["marker"], seen["n"]) == (marker, 7)
    assert set(seen) == {"value", "marker", "n"}


def test_python_numbers_among_the_extra_arguments_stay_python_numbers():
    def update(updates, state, params=None, *, damping, **extra):
        return (updates if damping > 0 else None), state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(0.5).init, update)
    _, state = steps(scaled(inner), [GOOD], damping=0.5)
    assert state.applied


def test_inner_never_sees_what_is_not_finite_even_where_it_runs_on_a_bad_step():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(jls.all_finite((updates, extra)))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(0.5).init, update)
    optimizer = scaled(inner)
    state = optimizer.init(PARAMS)
    optimizer.update(BAD, state, PARAMS, value=jnp.float32(jnp.nan), grad=BAD)
    assert seen == [True]  # eager, every step runs


def test_extra_arguments_are_dropped_for_an_inner_without():
    _, state = steps(scaled(optax.sgd(0.5)), [GOOD], value=jnp.float32(1.0))
    assert state.applied


def test_chain_passes_the_loss_down_to_the_wrapper():
    optimizer = optax.chain(scaled(optax.sgd(0.5)), optax.scale(2.0))
    _, state = steps(optimizer, [GOOD], value=jnp.float32(jnp.nan))
    assert jls.metrics(state)["nonfinite_losses"] == 1


def divided_by_itself():
    """Makes NaN updates of finite gradients, as Adam does whose eps underflows."""

    def update(updates, state, params=None):
        updates = jax.tree.map(lambda g: jnp.where(g == 0, g / g, -g), updates)
        return updates, jax.tree.map(lambda s: s + 1, state)

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


ZERO = jax.tree.map(jnp.zeros_like, GOOD)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
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
def test_check_updates(dtype, check_updates, is_checked, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    optimizer = scaled(divided_by_itself(), check_updates=check_updates)
    with jax.numpy_dtype_promotion("standard"):
        params, state = steps(optimizer, [GOOD, ZERO], params)
    assert jls.all_finite(params) == is_checked
    assert state.inner_state == (1 if is_checked else 2)
    assert (state.applied, state.skips) == (not is_checked, int(is_checked))
    assert state.scaler_state == (8.0, 2, 0)  # a finite step for the scaler


def test_check_updates_judges_by_the_gradients_without_params():
    optimizer = scaled(divided_by_itself())
    state = optimizer.init(PARAMS)
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), ZERO)
    assert not optimizer.update(half, state)[1].applied
    assert optimizer.update(ZERO, state)[1].applied


def test_float16_params_warn_once_at_init_and_name_the_leaf():
    params = {"dense": {"kernel": jnp.ones(2, jnp.float16)}, "scale": jnp.ones(2)}
    optimizer = scaled(optax.sgd(0.5))
    with pytest.warns(UserWarning, match=r"'\['dense'\]\['kernel'\]'") as caught:
        state = optimizer.init(params)
    assert len(caught) == 1
    assert "1 of 2 parameters are float16" in str(caught[0].message)
    assert "Keep float32 master weights" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.update(params, state, params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*parameters are float16")
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


def test_inner_that_changes_its_structure_or_shapes_is_named():
    def grows(new_state):
        return optax.GradientTransformation(
            lambda params: {"n": jnp.zeros(2)}, lambda u, s, p=None: (u, new_state)
        )

    for new_state, message in [
        ({"m": jnp.zeros(2)}, "optimizer's state must keep its structure, but turned"),
        ({"n": jnp.zeros(3)}, r"turned float32\[2\] into float32\[3\] at '\['n'\]'"),
        ({"n": jnp.zeros(2, int)}, r"turned float32\[2\] into int32\[2\] at"),
    ]:
        optimizer = scaled(grows(new_state))
        state = optimizer.init(PARAMS)
        with pytest.raises(ValueError, match=message):
            optimizer.update(GOOD, state, PARAMS)


def test_faulty_policy_is_named():
    state = jls.static(8.0).init()
    for init, message in [
        (lambda: jnp.float32(8.0), "state must carry a loss scale"),
        (
            lambda: state._replace(loss_scale=jnp.int32(8)),
            "a float32 loss_scale",
        ),
    ]:
        policy = jls.LossScaler(init, lambda state, flag: state)
        with pytest.raises(ValueError, match=message):
            jls.loss_scaled(optax.sgd(0.5), policy).init(PARAMS)

    def adjust(state, grads_finite):
        return state._replace(finite_count=jnp.float32(1.0))

    optimizer = jls.loss_scaled(optax.sgd(0.5), jls.LossScaler(lambda: state, adjust))
    with pytest.raises(ValueError, match=r"the scaler's state must keep .* kinds"):
        optimizer.update(GOOD, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize("wrapper", [jls.loss_scaled, jls.skip_nonfinite])
def test_nested_wrappers_are_refused_at_init(wrapper):
    optimizer = scaled(optax.chain(optax.clip(1.0), wrapper(optax.sgd(0.5))))
    with pytest.raises(ValueError, match=r"must not contain .* has one at '\[1\]'"):
        optimizer.init(PARAMS)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0.5,), {}, "inner must be an optax.GradientTransformation, .* got float 0.5"),
        (
            (optax.MultiSteps(optax.sgd(0.5), 2),),
            {},
            r"its gradient_transformation\(\)",
        ),
        (
            (optax.sgd(0.5), 8.0),
            {},
            "scaler must be a jls.LossScaler or .* got float 8.0",
        ),
        ((optax.sgd(0.5), jls.dynamic), {}, "scaler must be a jls.LossScaler"),
        ((optax.sgd(0.5),), {"check_updates": 1}, "check_updates must be True, False"),
        ((optax.sgd(0.5),), {"axis_name": ["i"]}, "axis_name must be a str, a tuple"),
    ],
)
def test_arguments_of_another_type_are_a_type_error(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        jls.loss_scaled(*args, **kwargs)


def test_skip_nonfinite_has_the_state_of_loss_scaled_and_a_scale_of_one():
    guarded = jls.skip_nonfinite(optax.sgd(0.5, momentum=0.9))
    params, state = steps(guarded, [GOOD, BAD, BAD])
    assert jls.loss_scale(state) == 1.0
    assert state.skips == 2
    assert_close(params, steps(optax.sgd(0.5, momentum=0.9), [GOOD])[0])
    other = scaled(optax.sgd(0.5, momentum=0.9)).init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(other)


# Composition: what sits inside freezes on a skip, what sits outside does not.


@pytest.mark.standard_promotion
def test_chain_inside_freezes_and_chain_outside_goes_on():
    schedule = optax.scale_by_schedule(lambda count: -0.1 * (count + 1))
    inside = scaled(optax.chain(optax.trace(0.9), schedule))
    params, state = steps(inside, [GOOD, BAD])
    assert state.inner_state[1].count == 1
    assert_close(params, steps(inside, [GOOD])[0])

    outside = optax.chain(scaled(optax.trace(0.9)), schedule)
    _, state = steps(outside, [GOOD, BAD])
    assert state[1].count == 2
    weight_decay = optax.chain(scaled(optax.sgd(0.1)), optax.add_decayed_weights(-0.1))
    params, _ = steps(weight_decay, [BAD])
    np.testing.assert_allclose(params["a"], 0.9 * PARAMS["a"], rtol=1e-6)


@pytest.mark.standard_promotion
def test_multi_steps_inside_drops_the_bad_micro_batch_and_backs_off():
    multi_steps = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    params, state = steps(scaled(multi_steps), [GOOD, BAD, GOOD])
    assert_close(params, steps(optax.sgd(1.0), [GOOD])[0])
    assert state.inner_state.gradient_step == 1
    assert state.scaler_state.loss_scale == 4.0
    _, state = steps(scaled(multi_steps), [BAD] + [GOOD] * 8)
    assert state.inner_state.gradient_step == 4


@pytest.mark.standard_promotion
def test_multi_steps_outside_needs_its_skip_function_and_hides_bad_steps():
    plain = optax.MultiSteps(scaled(optax.sgd(1.0)), 2)
    params, _ = steps(plain, [GOOD, BAD] + [GOOD] * 8)
    assert_close(params, PARAMS)  # the accumulator holds a NaN for ever: 0 * inf
    skipping = optax.MultiSteps(
        scaled(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite
    )
    params, state = steps(skipping, [GOOD, BAD, GOOD])
    assert_close(params, steps(optax.sgd(1.0), [GOOD])[0])
    assert jls.loss_scale(state) == 8.0  # never told of the overflow


@pytest.mark.standard_promotion
def test_inject_hyperparams_inside_and_outside():
    inside = scaled(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params, state = steps(inside, [GOOD, BAD])
    assert_close(params, steps(optax.sgd(0.5), [GOOD])[0])
    assert state.inner_state.hyperparams["learning_rate"] == 0.5

    def make(learning_rate, growth_factor):
        policy = jls.dynamic(8.0, growth_interval=1, growth_factor=growth_factor)
        return jls.loss_scaled(optax.sgd(learning_rate), policy)

    outside = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
    _, state = steps(outside(learning_rate=0.5, growth_factor=4.0), [GOOD, BAD, GOOD])
    assert jls.loss_scale(state) == 64.0
    assert jls.metrics(state)["skips"] == 1


@pytest.mark.standard_promotion
def test_masked_and_multi_transform_inside_and_outside():
    mask = {"a": True, "b": False}
    for optimizer in (
        scaled(optax.masked(optax.adam(0.1), mask)),
        optax.masked(scaled(optax.adam(0.1)), mask),
    ):
        params, state = steps(optimizer, [GOOD, BAD])
        assert jls.metrics(state)["skips"] == 1
        assert_close(params["a"], steps(optax.adam(0.1), [GOOD])[0]["a"])

    labels = {"a": "adam", "b": "sgd"}
    parts = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}
    params, state = steps(scaled(optax.multi_transform(parts, labels)), [GOOD, BAD])
    assert_close(params, steps(optax.multi_transform(parts, labels), [GOOD])[0])
    # Outside, each part decides for itself: the inf in `a` does not stop `b`.
    parts = {name: scaled(part) for name, part in parts.items()}
    optimizer = optax.multi_transform(parts, labels)
    params, state = steps(optimizer, [BAD])
    assert_close(params["a"], PARAMS["a"])
    assert params["b"] != PARAMS["b"]
    with pytest.raises(ValueError, match="exactly one loss scale, got 2"):
        jls.loss_scale(state)


@pytest.mark.standard_promotion
def test_clip_inside_sees_true_gradients_in_float32():
    # Squares of 300 overflow in float16, and optax's clip would make them all 0.
    optimizer = scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    grads = jnp.full(4, 300.0, jnp.float16)
    params, state = steps(optimizer, [grads], jnp.zeros(4))
    assert state.applied
    np.testing.assert_allclose(params, [-0.5] * 4, rtol=1e-6)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_line_search_ends_on_a_rejected_step(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

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


def test_debug_nans_and_infs_do_not_trip_over_a_rejected_step():
    optimizer = scaled(optax.sgd(0.5, momentum=0.9))
    state = optimizer.init(PARAMS)
    with jax.debug_nans(True), jax.debug_infs(True):
        _, state = jax.jit(optimizer.update)(BAD, state, PARAMS)
    assert not state.applied


@pytest.mark.parametrize(
    ("old", "new"), [(jls.dynamic, jls.adaptive), (jls.adaptive, jls.dynamic)]
)
def test_state_of_another_policy_is_refused_with_the_way_on(old, new):
    params = jnp.ones(2)
    before, after = (jls.loss_scaled(optax.sgd(0.1), make()) for make in (old, new))
    state = before.init(params)
    with pytest.raises(ValueError, match="must be one that the policy has made"):
        after.update(params, state, params)
    state = state._replace(scaler_state=new().init())
    assert after.update(params, state, params)[1].applied
