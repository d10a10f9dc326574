"""Mistakes that are told while a step is traced. Right programs hear nothing."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jls

pytestmark = pytest.mark.standard_promotion

PARAMS = {"w": jnp.ones(2)}
X = jnp.array([1.0, 2.0])
OPTIMIZER = jls.loss_scaled(optax.adam(0.1), jls.dynamic(8.0))
STATE = OPTIMIZER.init(PARAMS)


def loss_fn(params, x):
    return jnp.sum(params["w"] * x)


GRAD = jls.value_and_grad(loss_fn)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def nnx_loss(model, x):
    return jnp.sum(model.dropout(model.linear(x)))


def mlp():
    return eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))


def mlp_loss(model, x):
    return jnp.sum(model(x))


def train_state():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=OPTIMIZER)


# Errors that name the line to write ---------------------------------------------------

LABELLED = {"x": X, "y": jnp.arange(2)}
ERRORS = {
    "swapped": (
        lambda: GRAD(PARAMS, STATE, X),
        ValueError,
        r"state must come first, got dict before LossScaledState. The order is "
        r"f\(opt_state, params, ...\)\.$",
    ),
    "no state": (lambda: GRAD(PARAMS, X), ValueError, "must carry a loss scale"),
    "no params": (
        lambda: GRAD(train_state(), LABELLED),
        TypeError,
        r"first argument after state holds the parameters.*got dict with int32\[2\] at "
        r"'\['y'\]'. Write f\(state, params, batch\)",
    ),
    "train state": (
        lambda: GRAD(train_state(), train_state(), X),
        TypeError,
        r"got TrainState with int 0 at '.step'.*: f\(state, state.params, ...\)",
    ),
    "nnx": (
        lambda: jls.value_and_grad(nnx_loss)(STATE, Model(nnx.Rngs(0)), X),
        TypeError,
        r"got Model with .*jls.value_and_grad\(loss_fn, transform=nnx.value_and_grad",
    ),
    "equinox": (
        lambda: jls.value_and_grad(mlp_loss)(STATE, mlp(), X),
        TypeError,
        r"got MLP with .*transform=eqx.filter_value_and_grad\)",
    ),
    "decorated by equinox": (
        lambda: jls.value_and_grad(
            eqx.filter_value_and_grad(mlp_loss), transform=eqx.filter_value_and_grad
        ),
        TypeError,
        r"fun must be the loss .* Pass the undecorated function",
    ),
    "decorated by jax": (
        lambda: jls.value_and_grad(jax.value_and_grad(loss_fn))(STATE, PARAMS, X),
        TypeError,
        "got tuple. .*differentiated already, pass the undecorated one",
    ),
    "called at once": (
        lambda: jls.value_and_grad(loss_fn, PARAMS, X),
        TypeError,
        r"argnums must be .* got dict. .*jls.value_and_grad\(loss_fn\)\(opt_state, par",
    ),
    "an array as has_aux": (
        lambda: jls.value_and_grad(loss_fn, 0, X),
        TypeError,
        r"has_aux must be True or False, got float32\[2\]\.$",
    ),
    "no aux": (
        lambda: jls.value_and_grad(loss_fn, has_aux=True)(STATE, PARAMS, X),
        TypeError,
        r"the pair \(loss, aux\), got float32\[\]\.",
    ),
    "outside": (
        lambda: GRAD(optax.MultiSteps(OPTIMIZER, 2).init(PARAMS), PARAMS, X),
        ValueError,
        r"MultiSteps must be inside .*jls.loss_scaled\(optax.MultiSteps\(optimizer, k",
    ),
    "scaler is a number": (
        lambda: jls.loss_scaled(optax.sgd(0.1), 1024.0),
        TypeError,
        r"e.g. jls.static\(1024.0\), got float 1024.0\.$",
    ),
    "factor": (
        lambda: jls.dynamic(growth_factor=0.5),
        ValueError,
        r"growth_factor must be finite and > 1 \(as float32\), got 0.5\.$",
    ),
    "another optimizer": (
        lambda: OPTIMIZER.update(
            PARAMS, jls.loss_scaled(optax.sgd(0.1, 0.9)).init(PARAMS), PARAMS
        ),
        ValueError,
        "another optimizer: it holds TraceState, .* this one makes ScaleByAdamState",
    ),
    "loss as text": (
        lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value="x"),
        TypeError,
        "value must be the true loss, .* or None, got str 'x'",
    ),
    "loss and aux": (
        lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value=(X[0], X)),
        TypeError,
        r"got tuple. Write optimizer.update\(grads, opt_state, params, value=loss\)",
    ),
    "a step as loss": (
        lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value=jnp.int32(3)),
        TypeError,
        r"got int32\[\]",
    ),
    "losses": (
        lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value=X),
        ValueError,
        r"value must be .* got shape \(2,\). Reduce it in float32",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistake_is_an_error_with_the_line_to_write(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


def test_no_message_dumps_an_array():
    for call, error, _ in ERRORS.values():
        with pytest.raises(error) as caught:
            call()
        assert "Array(" not in str(caught.value)
        assert "Tracer" not in str(caught.value)


def test_what_fails_in_the_right_optimizer_is_not_blamed_on_the_state():
    def update(updates, state, params=None):
        raise AttributeError("their own")

    optimizer = jls.loss_scaled(optax.GradientTransformation(optax.sgd(1).init, update))
    state = optimizer.init(PARAMS)
    with pytest.raises(AttributeError, match="their own"):
        optimizer.update(PARAMS, state, PARAMS)
    with pytest.raises(AttributeError, match="their own"):
        optimizer.update(PARAMS, state)


# Warnings -----------------------------------------------------------------------------


def scaled_loss(state):
    return jls.value_and_grad(lambda p, x: jls.scale(state, loss_fn(p, x)))


def warned(call):
    """The messages of the warnings, which all point to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(one.category is jls.JlsWarning for one in caught)
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_a_loss_that_was_scaled_by_hand(jit_or_eager):
    @jit_or_eager
    def step(state, params):
        return scaled_loss(state)(state, params, X)

    (message,) = warned(lambda: step(STATE, PARAMS))
    assert "what jls.scale made" in message
    assert "Return the true loss, without jls.scale" in message


def test_what_else_a_loss_function_may_do_with_jls_scale():
    def logs(params, x):
        loss = loss_fn(params, x)
        return loss, jls.scale(STATE, loss)

    def penalizes(params, x):  # a gradient penalty: a loss in the loss
        loss, grads = GRAD(STATE, params, x)
        return loss + jnp.sum(grads["w"] ** 2)

    def returns_the_inner_loss(params, x):
        return GRAD(STATE, params, x)[0]

    jls.value_and_grad(logs, has_aux=True)(STATE, PARAMS, X)
    jls.value_and_grad(penalizes)(STATE, PARAMS, X)
    jls.value_and_grad(returns_the_inner_loss)(STATE, PARAMS, X)
    jax.grad(lambda p: jls.scale(STATE, loss_fn(p, X)))(PARAMS)


@pytest.mark.parametrize("state", [STATE, jls.dynamic().init()])
def test_a_state_that_a_jitted_step_has_captured(state):
    for make in (jls.value_and_grad, jls.grad):
        step = jax.jit(lambda params, make=make: make(loss_fn)(state, params, X))
        (message,) = warned(lambda step=step: step(PARAMS))
        assert "its loss scale is compiled in and will never move" in message
        assert "e.g. step(params, opt_state, batch)" in message
        assert warned(lambda step=step: step(PARAMS)) == []  # once, when it is traced


STATIC = jls.static(8.0).init()
UNSCALED = jls.skip_nonfinite(optax.sgd(0.1)).init(PARAMS)
STACKED = {"w": jnp.ones((3, 2))}


def in_jit(params):
    state = OPTIMIZER.init(params)
    GRAD(state, params, X)
    scaler_state = jls.set_loss_scale(jls.dynamic().init(), 4.0)
    return GRAD(scaler_state, params, X)


RIGHT = {
    "eager": lambda: GRAD(STATE, PARAMS, X),
    "passed": lambda: jax.jit(GRAD)(STATE, PARAMS, X),
    "only the batch is traced": lambda: jax.jit(lambda x: GRAD(STATE, PARAMS, x))(X),
    "static": lambda: jax.jit(lambda p: GRAD(STATIC, p, X))(PARAMS),
    "unscaled": lambda: jax.jit(lambda p: GRAD(UNSCALED, p, X))(PARAMS),
    "made inside": lambda: jax.jit(in_jit)(PARAMS),
    "vmap": lambda: jax.vmap(lambda p: GRAD(STATE, p, X))(STACKED),
    "map": lambda: jax.lax.map(lambda p: GRAD(STATE, p, X), STACKED),
    "scan": lambda: jax.lax.scan(
        lambda p, x: (GRAD(STATE, p, x)[1], None), PARAMS, X[None]
    ),
    "grad": lambda: jax.grad(lambda p: GRAD(STATE, p, X)[0])(PARAMS),
    "checkpoint": lambda: jax.grad(jax.checkpoint(lambda p: GRAD(STATE, p, X)[0]))(
        PARAMS
    ),
    "whole run": lambda: jax.jit(
        lambda s, p: jax.lax.scan(lambda p, _: (GRAD(s, p, X)[1], None), p, length=2)
    )(STATE, PARAMS),
    "numpy": lambda: GRAD(jax.device_get(STATE), PARAMS, X),
    "nnx": lambda: jls.value_and_grad(
        nnx_loss, transform=nnx.value_and_grad, argnums=nnx.DiffState(0, nnx.Param)
    )(STATE, Model(nnx.Rngs(0)), X),
    "equinox": lambda: jls.value_and_grad(
        mlp_loss, transform=eqx.filter_value_and_grad
    )(STATE, mlp(), X),
    "second argument": lambda: jls.value_and_grad(
        lambda labels, p: loss_fn(p, X), argnums=1
    )(STATE, jnp.arange(2), PARAMS),
    "last argument": lambda: jls.value_and_grad(
        lambda labels, p: loss_fn(p, X), argnums=(-1,)
    )(STATE, jnp.arange(2), PARAMS),
    "by name": lambda: jls.value_and_grad(lambda p, *, n: loss_fn(p, X) * n)(
        STATE, PARAMS, n=2
    ),
    "Python numbers": lambda: jls.value_and_grad(lambda p: p**2)(STATE, 3.0),
    "no value": lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS),
    "None": lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value=None),
    "numbers": lambda: [
        OPTIMIZER.update(PARAMS, STATE, PARAMS, value=one)
        for one in (1.0, np.float32(1.0), np.ones(()), jnp.bfloat16(1.0), jnp.nan)
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_hears_nothing(name):
    with jax.numpy_dtype_promotion("standard"):
        assert warned(RIGHT[name]) == []


@pytest.mark.parametrize("name", ["valeu", "vlaue", "val", "Value", "values", "loss"])
@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip(1.0), optax.adam(0.1)),
        optax.partition({"a": optax.adam(0.1)}, {"w": "a"}),
    ],
)
def test_a_misspelt_value(name, inner, jit_or_eager):
    optimizer = jls.loss_scaled(inner)
    state = optimizer.init(PARAMS)

    @jit_or_eager
    def step(state, loss):
        return optimizer.update(PARAMS, state, PARAMS, **{name: loss})

    (message,) = warned(lambda: step(state, jnp.float32(1.0)))
    assert f"got {name}=, which the wrapped optimizer does not use" in message
    assert "write value=loss" in message


def takes_loss():
    def update(updates, state, params=None, *, loss, **extra):
        del extra
        return jax.tree.map(lambda x: -x * loss, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def keeps_val():
    def update(updates, state, params=None, *, val=0.0, **extra):
        return updates, val

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


@pytest.mark.parametrize(
    ("inner", "extra"),
    [
        (takes_loss(), {"loss": jnp.float32(2.0)}),
        (optax.chain(optax.adam(0.1), takes_loss()), {"loss": jnp.float32(2.0)}),
        (keeps_val(), {"val": jnp.float32(2.0)}),
        (optax.sgd(0.1), {"loss": jnp.float32(2.0), "value": jnp.float32(2.0)}),
        (optax.sgd(0.1), {"loss": jnp.float32(2.0), "value": None}),
        (optax.sgd(0.1), {"grad": PARAMS, "value_fn": loss_fn, "temperature": 1.0}),
        (optax.sgd(0.1), {"loss": "l2"}),
        (optax.polyak_sgd(), {"value": jnp.float32(2.0)}),
    ],
)
def test_extra_arguments_that_are_used_or_are_no_loss(inner, extra, jit_or_eager):
    optimizer = jls.loss_scaled(inner)
    state = optimizer.init(PARAMS)

    @jit_or_eager
    def step(state):
        return optimizer.update(PARAMS, state, PARAMS, **extra)

    assert warned(lambda: step(state)) == []


@pytest.mark.parametrize("make", [jls.loss_scaled, jls.skip_nonfinite])
@pytest.mark.parametrize(
    ("dtype", "part"), [("float16", 1 / 4000), ("bfloat16", 1 / 512)]
)
def test_parameters_of_16_bits_without_master_weights(make, dtype, part):
    params = {"w": jnp.ones(2, dtype), "b": jnp.ones(2)}
    (message,) = warned(lambda: make(optax.sgd(0.1)).init(params))
    assert f"1 of 2 parameters are {dtype}, first '['w']'" in message
    assert f"about 1/{round(1 / part)} of the parameter, vanish" in message
    # It is so: below half a unit in the last place, and just above it.
    one, down = jnp.ones((), dtype), jnp.float32(part)
    assert optax.apply_updates(one, -down / 2.1) == 1
    assert optax.apply_updates(one, -down * 1.1) < 1
    assert warned(lambda: make(optax.sgd(0.1)).init({"b": jnp.ones(2)})) == []
