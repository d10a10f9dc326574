"""The wrapper's own behaviour; what it promises is in test_promises.py."""

import inspect
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    run,
    scaled,
    steps,
)

import jls


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
    assert set(seen) == {"value", "grad", "marker", "n"}


def test_python_numbers_among_the_extra_arguments_stay_python_numbers():
    def update(updates, state, params=None, *, damping, **extra):
        return (updates if damping > 0 else None), state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(0.5).init, update)
    _, state = steps(scaled(inner), [GOOD], damping=0.5)
    assert state.applied


def test_extra_arguments_are_dropped_for_an_inner_without():
    _, state = steps(scaled(optax.sgd(0.5)), [GOOD], value=jnp.float32(1.0))
    assert state.applied


def update(optimizer, **extra):
    params = jnp.ones(2)
    state = optimizer.init(params)
    return optimizer.update(params, state, params, **extra)[1]


def test_the_loss_may_be_called_loss(jit_or_eager):
    """Levanter and MaxText call it so."""

    @jit_or_eager
    def skips(loss):
        optimizer = optax.chain(jls.skip_nonfinite(optax.sgd(0.1)))
        return update(optimizer, loss=loss)[0].nonfinite_losses

    assert skips(jnp.float32(jnp.nan)) == 1
    assert skips(jnp.float32(1.0)) == 0


def test_a_report_has_the_loss_that_is_called_loss():
    optimizer, params = jls.skip_nonfinite(optax.sgd(0.1)), jnp.ones(2)
    state = optimizer.init(params)
    loss = jnp.float32(jnp.nan)
    *_, report = jls.apply_gradients(optimizer, params, state, params, loss=loss)
    assert report.skip_reason == jls.types.SkipReason.LOSS
    assert report.loss is loss


def test_two_different_losses_are_an_error(jit_or_eager):
    def run(loss, value):
        return update(jls.skip_nonfinite(optax.sgd(0.1)), loss=loss, value=value)

    with pytest.raises(ValueError, match="value and loss are two names for the true"):
        jit_or_eager(run)(jnp.float32(1.0), jnp.float32(2.0))
    nan = jnp.float32(jnp.nan)
    assert run(nan, nan).nonfinite_losses == 1
    assert jax.jit(lambda x: run(x, x))(nan).nonfinite_losses == 1
    assert run(None, nan).nonfinite_losses == run(nan, None).nonfinite_losses == 1


def test_an_object_that_names_its_arguments_does_not_get_the_loss_as_loss():
    class Inner:
        def init(self, params):
            return ()

        def update(self, updates, state, params=None, *, value):
            return updates * value, state

    optimizer, params = jls.skip_nonfinite(Inner()), jnp.ones(2)
    updates, _ = optimizer.update(params, optimizer.init(params), loss=jnp.float32(3))
    np.testing.assert_array_equal(updates, 3.0)


def test_an_extra_argument_that_nothing_takes_is_named_once(jit_or_eager):
    optimizer = jls.skip_nonfinite(optax.sgd(0.1, momentum=0.9))

    def run(x, **more):
        return update(optimizer, valeu=x, other=x, **more)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jit_or_eager(run)(jnp.float32(1.0))
        jit_or_eager(lambda x: run(x, marker="text"))(jnp.float32(2.0))
    found = sorted(str(x.message) for x in caught)
    assert [x.category for x in caught] == [jls.JlsWarning] * 2
    assert "other=, which neither jls nor the inner optimizer takes" in found[0]
    assert "valeu=, which neither" in found[1]
    assert "Did you mean value?" in found[1]


def test_an_extra_argument_that_something_takes_is_not_named(jit_or_eager):
    """By the inner optimizer, or perhaps by what stands beside the wrapper."""

    def scaled(updates, state, params=None, *, by, **extra):
        return updates * by, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), scaled)

    def run(x):
        update(jls.skip_nonfinite(inner), by=x)
        beside = optax.chain(jls.skip_nonfinite(optax.sgd(0.1)), inner)
        return update(beside, by=x)

    jit_or_eager(run)(jnp.float32(2.0))  # warnings are errors


def test_chain_passes_the_loss_down_to_the_wrapper():
    optimizer = optax.chain(scaled(optax.sgd(0.5)), optax.scale(2.0))
    _, state = steps(optimizer, [GOOD], value=jnp.float32(jnp.nan))
    assert jls.metrics(state)["nonfinite_losses"] == 1


def test_float16_params_warn_once_at_init_and_name_the_leaf():
    params = {"dense": {"kernel": jnp.ones(2, jnp.float16)}, "scale": jnp.ones(2)}
    optimizer = scaled(optax.sgd(0.5))
    with pytest.warns(UserWarning, match="'dense/kernel'") as caught:
        state = optimizer.init(params)
    assert len(caught) == 1
    assert "1 of 2 parameters are float16" in str(caught[0].message)
    assert "Keep float32 master weights" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.update(params, state, params)


def test_inner_that_changes_its_structure_or_shapes_is_named():
    def grows(new_state):
        return optax.GradientTransformation(
            lambda params: {"n": jnp.zeros(2)}, lambda u, s, p=None: (u, new_state)
        )

    for new_state, message in [
        (
            {"m": jnp.zeros(2)},
            "optimizer's state must keep its structure, but 'm' is only in the new one",
        ),
        ({"n": jnp.zeros(3)}, r"turned float32\[2\] into float32\[3\] at 'n'"),
        ({"n": jnp.zeros(2, int)}, r"turned float32\[2\] into int32\[2\] at"),
    ]:
        optimizer = scaled(grows(new_state))
        state = optimizer.init(PARAMS)
        with pytest.raises(ValueError, match=message):
            optimizer.update(GOOD, state, PARAMS)


def test_faulty_scaler_is_named():
    state = jls.dynamic(8.0).init()
    for init, message in [
        (lambda: jnp.float32(8.0), "state must carry a loss scale"),
        (
            lambda: state._replace(loss_scale=jnp.int32(8)),
            "a float32 loss_scale",
        ),
    ]:
        scaler = jls.types.LossScaler(init, lambda state, flag: state)
        with pytest.raises(ValueError, match=message):
            jls.loss_scaled(optax.sgd(0.5), scaler).init(PARAMS)

    def adjust(state, grads_finite):
        return state._replace(finite_count=jnp.float32(1.0))

    optimizer = jls.loss_scaled(
        optax.sgd(0.5), jls.types.LossScaler(lambda: state, adjust)
    )
    with pytest.raises(ValueError, match=r"the scaler's state must keep .* kinds"):
        optimizer.update(GOOD, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize("wrapper", [jls.loss_scaled, jls.skip_nonfinite])
def test_nested_wrappers_are_refused_at_init(wrapper):
    optimizer = scaled(optax.chain(optax.clip(1.0), wrapper(optax.sgd(0.5))))
    with pytest.raises(ValueError, match=r"must not contain .* has one at '1'"):
        optimizer.init(PARAMS)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0.5,), {}, "inner must be an optax.GradientTransformation, .* got float 0.5"),
        ((optax.sgd,), {}, "inner must be .* or an object with init and update"),
        ((optax.MultiSteps,), {}, "inner must be .* got type"),
        (
            (optax.sgd(0.5), 8.0),
            {},
            r"scaler must be a jls.types.LossScaler, .*static\(8.0\), got float 8.0",
        ),
        ((optax.sgd(0.5), jls.dynamic), {}, "scaler must be a jls.types.LossScaler"),
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
    assert isinstance(state.scaler_state, jls.types.StaticState)
    other = other._replace(scaler_state=state.scaler_state)
    chex.assert_trees_all_equal_structs(state, other)


class Halving:
    """An optimizer of nobody's."""

    def init(self, params):
        return {"calls": jnp.zeros((), jnp.int32)}

    def update(self, updates, state, params=None):
        state = {"calls": state["calls"] + 1}
        return jax.tree.map(lambda x: -x / 2, updates), state


def test_inner_may_be_any_object_with_init_and_update(jit_or_eager):
    optimizer = scaled(Halving())
    state = optimizer.init(PARAMS)
    update = jit_or_eager(optimizer.update)
    updates, state = update(GOOD, state, PARAMS, value=jnp.float32(1.0))
    assert_identical(updates, jax.tree.map(lambda x: -x / 2, GOOD))
    _, state = update(BAD, state, PARAMS)
    assert (state.inner_state["calls"], state.skips) == (1, 1)


class Watching(Halving):
    """It takes the loss, as some of optax do."""

    def update(self, updates, state, params=None, *, value=0.0, **extra):
        updates, state = super().update(updates, state, params)
        return jax.tree.map(lambda x: x * value, updates), state


def test_extra_arguments_reach_an_inner_object_that_takes_them(jit_or_eager):
    optimizer = scaled(Watching())
    update = jit_or_eager(optimizer.update)
    value = jnp.float32(2.0)
    updates, _ = update(GOOD, optimizer.init(PARAMS), PARAMS, value=value, other=3)
    assert_identical(updates, jax.tree.map(lambda x: -x, GOOD))


class Naming(Halving):
    """It names what it takes."""

    def update(self, updates, state, params=None, *, value):
        return Watching().update(updates, state, params, value=value)


def test_extra_arguments_reach_an_inner_object_that_names_them():
    optimizer = scaled(Naming())
    value = jnp.float32(2.0)
    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update(GOOD, state, PARAMS, value=value)
    assert_identical(updates, jax.tree.map(lambda x: -x, GOOD))
    with pytest.raises(TypeError, match="other"):
        optimizer.update(GOOD, state, PARAMS, value=value, other=3)


@pytest.mark.parametrize("names", [(), ("value",), ("grad",), ("value", "grad")])
def test_value_and_grad_reach_only_an_inner_that_names_them(names):
    seen = {}

    def strict(updates, state, params=None, *, value=None, grad=None, scale=1.0):
        seen.update(value=value, grad=grad, scale=scale)
        return updates, state

    kept = {"updates", "state", "params", "scale", *names}
    signature = inspect.signature(strict)
    strict.__signature__ = signature.replace(
        parameters=[p for name, p in signature.parameters.items() if name in kept]
    )
    inner = optax.GradientTransformationExtraArgs(optax.sgd(0.5).init, strict)
    optimizer = scaled(inner)
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(
        GOOD, state, PARAMS, value=jnp.float32(jnp.nan), scale=2.0
    )
    assert (seen["value"] is not None) == ("value" in names)
    assert (seen["grad"] is not None) == ("grad" in names)
    assert seen["scale"] == 2.0
    assert state.nonfinite_losses == 1  # the wrapper is told all the same


@pytest.mark.standard_promotion
def test_extra_arguments_reach_what_is_inside_multi_steps():
    inner = optax.MultiSteps(
        optax.GradientTransformationExtraArgs(Watching().init, Watching().update), 1
    )
    optimizer = scaled(inner)
    value = jnp.float32(2.0)
    updates, _ = optimizer.update(GOOD, optimizer.init(PARAMS), PARAMS, value=value)
    assert_identical(updates, jax.tree.map(lambda x: -x, GOOD))


@pytest.mark.standard_promotion
def test_multi_steps_goes_inside_unchanged():
    inner = optax.MultiSteps(optax.sgd(1.0, momentum=0.5), 2)
    batches = [GOOD, BAD, GOOD, GOOD, GOOD]
    params, state = steps(scaled(inner), batches)
    other = scaled(inner.gradient_transformation())
    assert_identical((params, state), steps(other, batches))
    assert isinstance(state.inner_state, optax.MultiStepsState)
    assert (state.inner_state.gradient_step, state.skips) == (2, 1)


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
        scaler = jls.dynamic(8.0, growth_interval=1, growth_factor=growth_factor)
        return jls.loss_scaled(optax.sgd(learning_rate), scaler)

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
@pytest.mark.filterwarnings("ignore:update got float16 gradients")
def test_clip_inside_sees_true_gradients_in_float32():
    # Squares of 300 overflow in float16, and optax's clip would make them all 0.
    optimizer = scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    grads = jnp.full(4, 300.0, jnp.float16)
    params, state = steps(optimizer, [grads], jnp.zeros(4))
    assert state.applied
    np.testing.assert_allclose(params, [-0.5] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"), [(jls.dynamic, jls.static), (jls.static, jls.dynamic)]
)
def test_state_of_another_scaler_is_refused_with_the_way_on(old, new):
    params = jnp.ones(2)
    before, after = (jls.loss_scaled(optax.sgd(0.1), make()) for make in (old, new))
    state = before.init(params)
    with pytest.raises(ValueError, match="must be one that this scaler made"):
        after.update(params, state, params)
    state = state._replace(scaler_state=new().init())
    assert after.update(params, state, params)[1].applied


# What went wrong elsewhere ------------------------------------------------------------


def test_inner_optimizer_that_changes_its_state_is_named(jit_or_eager):
    """optax O5: monitor changes the structure of its state at the first update."""
    inner = optax.GradientTransformation(lambda _: (), lambda u, s, p=None: (u, (1.0,)))
    with pytest.raises(ValueError, match="optimizer's state must keep its structure"):
        run(jls.loss_scaled(inner, jls.dynamic(8.0)), W, [ONE], jit_or_eager)


@pytest.mark.standard_promotion
def test_accumulated_gradients_are_true_across_a_change_of_scale():
    """optax O9: micro-gradients under 1024 and 2048 summed and divided by 2048."""
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    optimizer = jls.loss_scaled(inner, jls.dynamic(1024.0, growth_interval=1))

    @jax.jit
    def step(w, state):
        grads = jls.grad(jnp.sum)(state, w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w, state = step(*step(W, optimizer.init(W)))
    assert jls.loss_scale(state) == 4096.0
    assert w.tolist() == [0.0, -3.0]


@pytest.mark.standard_promotion
def test_accumulation_inside_recovers_from_a_bad_micro_batch():
    """optax O10, R2: the accumulator kept the NaN, or the params never moved again."""
    inner = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    micro_batches = [ONE, NAN, 2 * ONE, 2 * ONE, 3 * ONE]
    params, state = run(optimizer, W, micro_batches)
    assert params.tolist() == [-1.0, -4.0]
    assert jls.loss_scale(state) == 4.0
    params, _ = run(optimizer, W, micro_batches + 4 * [ONE])
    assert params.tolist() == [-2.0, -5.0]


@pytest.mark.standard_promotion
def test_optimizer_that_holds_a_key_freezes_it():
    """jmp J8b, O4: apply_if_finite and MultiSteps could not handle keys."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.5))
    optimizer = jls.loss_scaled(noisy, jls.dynamic(8.0))
    params, state = run(optimizer, W, [NAN, ONE])
    expected, expected_state = run(optimizer, W, [ONE])
    assert_identical(params, expected)
    key, old = (optax.tree.get(s, "rng_key") for s in (state, expected_state))
    assert_identical(jax.random.key_data(key), jax.random.key_data(old))


@pytest.mark.standard_promotion
def test_hyperparameters_can_be_injected_inside_and_outside():
    """optax R15: a control that worked."""

    def make(learning_rate):
        return jls.loss_scaled(optax.adam(learning_rate), jls.dynamic(8.0))

    outside = optax.inject_hyperparams(make)(learning_rate=0.5)
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    inside = jls.loss_scaled(injected, jls.dynamic(8.0))
    for optimizer in (outside, inside):
        params, state = run(optimizer, W, [ONE, NAN])
        np.testing.assert_allclose(params, W - 0.5, rtol=1e-5)
        assert jls.loss_scale(state) == 4.0
        assert optax.tree.get(state, "loss_scale") == 4.0
        assert optax.tree.get(state, "learning_rate") == 0.5


@pytest.mark.standard_promotion
def test_equinox_module_goes_through_every_function():
    """jmp R9: all_finite and select_tree raised on an Equinox MLP."""
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    optimizer = jls.loss_scaled(optax.adam(0.5), jls.dynamic(8.0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        differentiate = jls.value_and_grad(
            lambda model, x: jnp.sum(model(x) ** 2), transform=eqx.filter_value_and_grad
        )
        _, grads = differentiate(state, model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    same, state = step(model, state, INF)
    assert eqx.tree_equal(same, model)
    moved, state = step(model, state, ONE)
    assert jls.all_finite(moved)
    assert not eqx.tree_equal(moved, model)
    assert eqx.tree_equal(jls.select(False, moved, model), model)
    assert jls.scale(state, model).activation is model.activation
