"""Mistakes that are told while a step is traced. Right programs hear nothing."""

import copy
import functools
import pickle
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
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
REPORT = jls.types.StepReport(*[None] * len(jls.types.StepReport._fields))


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


def linear():
    return nnx.Linear(2, 1, rngs=nnx.Rngs(0))


def nnx_linear_loss(model, x):
    return jnp.sum(model(x))


def nnx_run():
    model = linear()
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def dropout_run():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


BOTH = {"w": X, "frozen": X}
OF_BOTH = OPTIMIZER.init(BOTH)
FAST = optax.LookaheadParams.init_synced(PARAMS)
INSIDE = jls.loss_scaled(optax.lookahead(optax.sgd(0.1), 2, 0.5))
PRIVATE = jls.skip_nonfinite(
    optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
)
MOMENTUM = jls.skip_nonfinite(optax.sgd(0.1, 0.9))
ALONE = jls.loss_scaled(jls.params_ema(0.9))
OUTSIDE = optax.lookahead(jls.loss_scaled(optax.sgd(0.1)), 2, 0.5)


def of_flat_leaves(inner):
    """An optimizer that keeps its moments flat."""

    def init(params):
        return inner.init(jax.tree.map(jnp.ravel, params))

    return optax.GradientTransformation(init, inner.update)


def model_for_loss(model):
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    jls.train_step(model)(model, optimizer, X)


# Errors that name the line to write ---------------------------------------------------

LABELLED = {"x": X, "y": jnp.arange(2)}
AROUND = optax.apply_if_finite(OPTIMIZER, 5)

ERRORS = {
    "spikes in a chain": (
        lambda: optax.chain(jls.spikes(), optax.sgd(0.1)).init(PARAMS),
        TypeError,
        r"no optax transformation, .*Write jls.loss_scaled\(inner, spikes=policy\)",
    ),
    "an optimizer for its state": (
        lambda: jls.health(OPTIMIZER),
        ValueError,
        r"Pass the state that the optimizer makes: optimizer.init\(params\)\.$",
    ),
    "a class in jls.types": (
        lambda: jls.Fingerprint,
        AttributeError,
        r"no attribute 'Fingerprint'\. Write jls.types.Fingerprint\.$",
    ),
    "a number without its name": (
        lambda: jls.spikes(4),
        TypeError,
        r"^spikes takes its arguments by name: window=, sigmas=, budget=, warmup=, ",
    ),
    "an argument of a preset": (
        lambda: jls.presets.megatron(initial_loss_scale=2.0),
        TypeError,
        r"^megatron takes no argument .*=\. Did you mean initial_scale=\?",
    ),
    "a preset without its numbers": (
        lambda: jls.presets.mindspore(scale_factor=2),
        TypeError,
        r"^scale_value and scale_window must be given: jls.presets.mindspore\("
        r"scale_value, scale_factor, scale_window\)\.$",
    ),
    "a preset without any number": (
        lambda: jls.presets.mindspore(),
        TypeError,
        r"^scale_value, scale_factor and scale_window must be given: ",
    ),
    "a power of DeepSpeed as the scale": (
        lambda: jls.presets.deepspeed(16),
        ValueError,
        r"a float if it is 32 or less, got 16\. Write deepspeed\(2\.0\*\*16\) for an "
        r"initial_scale_power of 16, or init_scale=16\.0\.$",
    ),
    "the arguments of the loss": (
        lambda: jls.train_step(loss_fn, OPTIMIZER, PARAMS, STATE, X),
        TypeError,
        r"loss_fn, optimizer by position, got 5 arguments\. Those of loss_fn go to "
        r"what is returned\.$",
    ),
    "what has to be named": (
        lambda: jls.bfloat16_params(optax.sgd(0.1), jnp.bfloat16),
        TypeError,
        r"takes inner by position, got 2 arguments\. By name it takes rounding=, mom",
    ),
    "an argument of another function": (
        lambda: jls.train_step(loss_fn, spikes=jls.spikes()),
        TypeError,
        r"no argument spikes=\. It is an argument of jls\.loss_scaled and jls\.skip_n",
    ),
    "no state for the masters": (
        lambda: jls.master_params(PARAMS),
        TypeError,
        r"^state must be given: jls\.master_params\(params, state\)\.$",
    ),
    "no model": (
        lambda: jls.atomic(nnx_run()[1]),
        TypeError,
        r"^model must be given: jls\.atomic\(optimizer, model\)\.$",
    ),
    "no other branch": (
        lambda: jls.select(True, PARAMS),
        TypeError,
        r"^on_false must be given: jls\.select\(pred, on_true, on_false\)\.$",
    ),
    "the predicate second": (
        lambda: jls.select(PARAMS, True, PARAMS),
        TypeError,
        r"got dict\. .* The order is jls\.select\(pred, on_true, on_false\)\.$",
    ),
    "the result of the loss": (
        lambda: jls.value_and_grad(loss_fn(PARAMS, X)),
        TypeError,
        r"got float32\[\]\. Pass the function itself, without calling it\.$",
    ),
    "the result of a step": (
        lambda: jls.why((PARAMS, STATE)),
        TypeError,
        r"got tuple\. Pass the function itself, without calling it\.$",
    ),
    "an optimizer as the step": (
        lambda: jls.calibrate(OPTIMIZER, PARAMS),
        TypeError,
        r"step must be a function, got LossScaledTransformation\.$",
    ),
    "a scaler that is not called": (
        lambda: jls.loss_scaled(optax.sgd(0.1), jls.presets.torch),
        TypeError,
        r"Call it: torch\(\.\.\.\)\.$",
    ),
    "spikes as the scaler": (
        lambda: jls.loss_scaled(optax.sgd(0.1), jls.spikes()),
        TypeError,
        r"got SpikePolicy\. Write spikes=policy\.$",
    ),
    "a scaler as spikes": (
        lambda: jls.skip_nonfinite(optax.sgd(0.1), spikes=jls.dynamic()),
        TypeError,
        r"got LossScaler\. Write jls\.loss_scaled\(inner, scaler\)\.$",
    ),
    "a state as the init of a policy": (
        lambda: jls.skip_nonfinite(
            optax.sgd(0.1), spikes=jls.types.SpikePolicy(X, lambda s, *_: (s, X[0] > 1))
        ),
        TypeError,
        r"spikes\.init must be a function, got float32\[2\]\. Write lambda: state\.$",
    ),
    "the optimizer as a learning rate": (
        lambda: jls.train_step(loss_fn, learning_rate=optax.sgd(0.1)),
        TypeError,
        r"The optimizer comes second: jls\.train_step\(loss_fn, jls\.loss_scaled\(",
    ),
    "the optimizer as a decay": (
        lambda: jls.params_ema(optax.sgd(0.1)),
        TypeError,
        r"Write optax\.chain\(optimizer, jls\.params_ema\(decay\)\)\.$",
    ),
    "the state before the optimizer": (
        lambda: jls.wrap_state(optax.sgd(0.1).init(PARAMS), OPTIMIZER, PARAMS),
        TypeError,
        r"got tuple\. The order is jls\.wrap_state\(optimizer, inner_state, params",
    ),
    "a state that is wrapped": (
        lambda: jls.wrap_state(OPTIMIZER, STATE, PARAMS),
        ValueError,
        r"wrapped already\. Go on from it as it is; of an older jls, jls\.upgrade_",
    ),
    "bytes to upgrade": (
        lambda: jls.upgrade_state(STATE, b"state"),
        ValueError,
        r"got bytes b'state'\. Pass what is in them: flax\.serialization\.msgp",
    ),
    "the optimizer for its state, in a step": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)(PARAMS, OPTIMIZER, X),
        TypeError,
        r"got LossScaledTransformation\. Write opt_state = optimizer\.init\(params",
    ),
    "loss and gradients for gradients": (
        lambda: OPTIMIZER.update(GRAD(STATE, PARAMS, X), STATE, PARAMS),
        ValueError,
        r"got a pair\. Write loss, grads = jls\.value_and_grad\(loss_fn\)\(opt_state",
    ),
    "no parameters": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)({}, OPTIMIZER.init({}), X),
        ValueError,
        r"must hold a floating-point array to train, got dict without one",
    ),
    "a report to set the scale of": (
        lambda: jls.set_loss_scale(REPORT, 8.0),
        TypeError,
        r"got StepReport, which goes into no step\. Write opt_state = jls\.set_loss_sc",
    ),
    "an average as the optimizer": (
        lambda: jls.train_step(loss_fn, ALONE)(PARAMS, ALONE.init(PARAMS), X),
        ValueError,
        r"got jls\.params_ema alone, .* Write jls\.loss_scaled\(optax\.chain\(inner",
    ),
    "a calibration as the scaler": (
        lambda: jls.loss_scaled(optax.sgd(0.1), jls.types.Calibration(8.0)),
        TypeError,
        r"got Calibration\. Write jls\.dynamic\(result\.init_scale\)\.$",
    ),
    "the optimizer for its state, of masters": (
        lambda: jls.master_params(PARAMS, OPTIMIZER),
        TypeError,
        r"got LossScaledTransformation\. Write jls\.master_params\(params, opt_state",
    ),
    "a loader in the place of a batch": (
        lambda: jls.check_step(
            jls.train_step(loss_fn, OPTIMIZER), PARAMS, STATE, iter([X])
        ),
        TypeError,
        r"batch must be a batch, got list_iterator, .* Pass one: next\(batch\)\.$",
    ),
    "a word for the losses": (
        lambda: jls.calibrate(loss_fn, PARAMS, X, losses="all"),
        TypeError,
        r"losses must be True or False, got str 'all'\.$",
    ),
    "no state, of grad": (
        lambda: jls.grad(loss_fn)(PARAMS, X),
        ValueError,
        r"jls\.grad\(loss_fn\)\(opt_state, params, batch\)\.$",
    ),
    "a pattern of file names": (
        lambda: jls.autocast(loss_fn, jnp.float16, keep="*norm*"),
        ValueError,
        r"It is searched for: write keep='norm'\.$",
    ),
    "a compiled pattern": (
        lambda: jls.autocast(loss_fn, jnp.float16, keep=re.compile("norm")),
        TypeError,
        r"Write keep='norm'\.$",
    ),
    "the batch first": (
        lambda: jls.train_step(lambda x, params: loss_fn(params, x), OPTIMIZER)(
            PARAMS, STATE, X
        ),
        TypeError,
        r"called as loss_fn\(params, batch\), got one that takes \(batch, params\)\. "
        r"Write def loss_fn\(params, batch\), in this order\.$",
    ),
    "what is carried last": (
        lambda: jls.train_step(
            lambda params, x, n: (loss_fn(params, x) * n["n"], n),
            OPTIMIZER,
            carried=True,
        )(PARAMS, STATE, {"n": jnp.ones(())}, X),
        TypeError,
        r"takes \(params, batch, carried\)\. Write def loss_fn\(params, carried, batc",
    ),
    "the batch before a model of NNX": (
        lambda: jls.train_step(lambda x, model: nnx_loss(model, x))(*dropout_run(), X),
        TypeError,
        r"takes \(batch, model\)\. Write def loss_fn\(model, batch\), in this order\.$",
    ),
    "a class to keep": (
        lambda: jls.autocast(loss_fn, jnp.float16, keep=dict),
        TypeError,
        r"got the class dict\. Write keep=lambda place: 'dict' in place.function\.$",
    ),
    "swapped": (
        lambda: GRAD(PARAMS, STATE, X),
        ValueError,
        r"state must come first, got dict before LossScaledState. The order is "
        r"f\(opt_state, params, ...\)\.$",
    ),
    "no state": (
        lambda: GRAD(PARAMS, X),
        ValueError,
        r"must carry a loss scale, got dict without one. First comes .*"
        r"jls.value_and_grad\(loss_fn\)\(opt_state, params, batch\)\.$",
    ),
    "all by keyword": (
        lambda: GRAD(opt_state=STATE, params=PARAMS, x=X),
        TypeError,
        r"state must come first, by position, got opt_state=, params=, x=\. Write "
        r"f\(opt_state, params, batch\)\.$",
    ),
    "all by keyword, of grad": (
        lambda: jls.grad(loss_fn)(state=STATE, params=PARAMS, x=X),
        TypeError,
        r"got state=, params=, x=\. Write f\(opt_state, params, batch\)\.$",
    ),
    "nothing at all": (
        lambda: GRAD(),
        TypeError,
        r"state must come first, by position, got no argument\. Write",
    ),
    "parameters by keyword": (
        lambda: GRAD(STATE, params=PARAMS, x=X),
        TypeError,
        r"what is differentiated, argument 0 after state, must be passed by position, "
        r"got params=, x= by keyword\. Write f\(opt_state, params, batch\)\.$",
    ),
    "one of two by keyword": (
        lambda: jls.value_and_grad(loss_fn, argnums=(0, 1))(STATE, PARAMS, x=X),
        TypeError,
        r"argument 1 after state, must be passed by position, got x= by keyword",
    ),
    "the state alone": (
        lambda: GRAD(STATE),
        TypeError,
        r"argument 0 after state, must be passed by position, got nothing more\.",
    ),
    "no params": (
        lambda: GRAD(train_state(), LABELLED),
        TypeError,
        r"first argument after state holds the parameters.*got dict with int32\[2\] at "
        r"'y'. Write f\(state, params, batch\)",
    ),
    "train state": (
        lambda: GRAD(train_state(), train_state(), X),
        TypeError,
        r"got TrainState with int 0 at 'step'.*: f\(state, state.params, ...\)",
    ),
    "nnx": (
        lambda: jls.value_and_grad(nnx_loss)(STATE, Model(nnx.Rngs(0)), X),
        TypeError,
        r"got Model under .*jls.value_and_grad\(loss_fn, transform=nnx.value_and_grad",
    ),
    "nnx without dropout": (
        lambda: jls.value_and_grad(nnx_linear_loss)(STATE, linear(), X),
        TypeError,
        r"got Linear under .*jls.value_and_grad\(loss_fn, transform=nnx.value_and_grad",
    ),
    "nnx under jls.grad": (
        lambda: jls.grad(nnx_linear_loss)(STATE, linear(), X),
        TypeError,
        "got Linear under .*transform=nnx.value_and_grad",
    ),
    "nnx in a tuple": (
        lambda: jls.value_and_grad(nnx_linear_loss)(STATE, (linear(), linear()), X),
        TypeError,
        "got Linear under .*transform=nnx.value_and_grad",
    ),
    "nnx as the second argument": (
        lambda: jls.value_and_grad(lambda x, m: m(x), argnums=(0, 1))(
            STATE, X, linear()
        ),
        TypeError,
        "got Linear under .*transform=nnx.value_and_grad",
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
        r"one that this optimizer made for the params .* but '0' is a TraceState in "
        r"it, a ScaleByAdamState in a new state",
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
    "state first": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)(STATE, PARAMS, X),
        ValueError,
        r"order is step\(params, opt_state, batch\), got LossScaledState, dict, float",
    ),
    "state last": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)(PARAMS, X, STATE),
        ValueError,
        r"order is step\(params, opt_state, batch\), .*: opt_state must be argument 2",
    ),
    "state after what is carried": (
        lambda: jls.train_step(loss_fn, OPTIMIZER, carried=True)(PARAMS, X, STATE, X),
        ValueError,
        r"The order is step\(params, opt_state, carried, batch\), got dict, float32",
    ),
    "batch before a train state": (
        lambda: jls.train_step(loss_fn)(X, train_state()),
        ValueError,
        r"The order is step\(state, batch\), got float32.2\], TrainState",
    ),
    "optimizer before the model": (
        lambda: jls.train_step(nnx_loss)(*nnx_run()[::-1], X),
        ValueError,
        r"The order is step\(model, optimizer, batch\), got Optimizer, Linear, float32",
    ),
    "update with the state last": (
        lambda: OPTIMIZER.update(PARAMS, PARAMS, STATE),
        TypeError,
        r"The order is update\(grads, state, params\)\.$",
    ),
    "the state of a run without jls": (
        lambda: OPTIMIZER.update(PARAMS, optax.sgd(0.1).init(PARAMS), PARAMS),
        TypeError,
        r"got tuple\. Pass .* jls\.wrap_state\(optimizer, state, params\)\.$",
    ),
    "processes of stacked states": (
        lambda: jls.check_in_sync(jax.vmap(OPTIMIZER.init)({"w": jnp.ones((3, 2))})),
        ValueError,
        r"must be of one run, .*jax\.vmap\(jls\.metrics\)\(state\)\.$",
    ),
    "another guard around": (
        lambda: jls.train_step(loss_fn, AROUND)(PARAMS, AROUND.init(PARAMS), X),
        ValueError,
        r"optax\.apply_if_finite must not be around jls\.loss_scaled.* Leave it out\.$",
    ),
    "health of the model first": (
        lambda: jls.health(PARAMS, STATE),
        ValueError,
        r"The order is jls\.health\(opt_state, params\), of NNX jls\.health\(optimi",
    ),
    "train_step of lookahead": (
        lambda: jls.train_step(loss_fn, OUTSIDE)(FAST, OUTSIDE.init(FAST), X),
        ValueError,
        r"not be optax.LookaheadParams.*\(loss_fn\)\(opt_state, params.fast, batch\)",
    ),
    "lookahead inside": (
        lambda: INSIDE.init(FAST),
        ValueError,
        r"goes outside: optax.lookahead\(jls.loss_scaled\(inner\), sync_period",
    ),
    "lookahead inside, in a chain": (
        lambda: jls.skip_nonfinite(
            optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(0.1), 2, 0.5))
        ).init(FAST),
        ValueError,
        r"goes outside: optax.lookahead\(jls.skip_nonfinite\(inner\)",
    ),
    "skip_nonfinite in MultiSteps": (
        lambda: jls.value_and_grad(loss_fn)(
            optax.MultiSteps(jls.skip_nonfinite(optax.sgd(0.1)), 2).init(PARAMS),
            PARAMS,
            X,
        ),
        ValueError,
        r"Write jls.skip_nonfinite\(optax.MultiSteps\(optimizer, k\)\)\.$",
    ),
    "a static scale in MultiSteps": (
        lambda: jls.value_and_grad(loss_fn)(
            optax.MultiSteps(jls.loss_scaled(optax.sgd(0.1), jls.static(8.0)), 2).init(
                PARAMS
            ),
            PARAMS,
            X,
        ),
        ValueError,
        r"Write jls.loss_scaled\(optax.MultiSteps\(optimizer, k\)\)\.$",
    ),
    "skip_nonfinite in apply_if_finite": (
        lambda: jls.health(
            optax.apply_if_finite(jls.skip_nonfinite(optax.sgd(0.1)), 2).init(PARAMS)
        ),
        ValueError,
        r"must not be around jls.skip_nonfinite, which",
    ),
    "a TrainState for apply_gradients": (
        lambda: jls.apply_gradients(train_state(), PARAMS, value=1.0),
        TypeError,
        r"Write jls\.apply_gradients\(state\.tx, grads, state\.opt_state, "
        r"state\.params, value=loss\), or step = jls\.train_step\(loss_fn\)",
    ),
    "a TrainState for train_step": (
        lambda: jls.train_step(loss_fn, train_state()),
        TypeError,
        r"optimizer must be the tx of the TrainState, got all of it",
    ),
    "a TrainState as the state": (
        lambda: OPTIMIZER.update(PARAMS, train_state(), PARAMS),
        TypeError,
        r"got TrainState\. Pass the field that holds it: state\.opt_state\.$",
    ),
    "a TrainState as the parameters": (
        lambda: OPTIMIZER.update(PARAMS, STATE, train_state()),
        TypeError,
        r"params must be the parameters alone, got TrainState.*Pass state\.params\.$",
    ),
    "a TrainState for init": (
        lambda: OPTIMIZER.init(train_state()),
        TypeError,
        r"params must be the parameters alone, got TrainState.*Pass state\.params\.$",
    ),
    "apply_gradients without a state": (
        lambda: jls.apply_gradients(OPTIMIZER, PARAMS),
        TypeError,
        r"opt_state and params must be given. The order is jls\.apply_gradients\(opt",
    ),
    "apply_gradients with the state last": (
        lambda: jls.apply_gradients(OPTIMIZER, PARAMS, PARAMS, STATE),
        TypeError,
        r"params must come last, got an optimizer state. The order is "
        r"jls\.apply_gradients\(opt",
    ),
    "gradients of another shape": (
        lambda: OPTIMIZER.update({"w": jnp.ones(5)}, STATE, PARAMS),
        ValueError,
        r"updates must be the gradients of params, but have shape \(5,\) at 'w', where "
        r"params have \(2,\)\. Pass what jls\.value_and_grad",
    ),
    "gradients that would be broadcast": (
        lambda: jls.apply_gradients(OPTIMIZER, {"w": jnp.ones(())}, STATE, PARAMS),
        ValueError,
        r"but have shape \(\) at 'w', where params have \(2,\)",
    ),
    "gradients of another shape, without params": (
        lambda: OPTIMIZER.update({"w": jnp.ones(5)}, OPTIMIZER.init(PARAMS)),
        ValueError,
        r"made for the updates that it is passed with, but '0/mu/w' is float32\[2\] in "
        r"it, float32\[5\] in a new state of these updates\.",
    ),
    "a None more in the parameters": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)(
            PARAMS | {"n": None}, OPTIMIZER.init(PARAMS), X
        ),
        ValueError,
        r"made for the params .* but '0/mu/n' is only in a new "
        r"state of these params.*optimizer\.init\(params\)\.$",
    ),
    "a None fewer in the parameters": (
        lambda: jls.train_step(loss_fn, OPTIMIZER)(
            PARAMS, OPTIMIZER.init(PARAMS | {"n": None}), X
        ),
        ValueError,
        r"but '0/mu/n' is only in it\. .* If the model has changed",
    ),
    "the tree before the state": (
        lambda: jls.scale(X, STATE),
        ValueError,
        r"state must come first. Write jls\.scale\(state, tree\)\.$",
    ),
    "gradients before the state": (
        lambda: jls.unscale(PARAMS, STATE),
        ValueError,
        r"state must come first. Write jls\.unscale\(state, tree\)\.$",
    ),
    "integers to scale": (
        lambda: jls.scale(STATE, jnp.arange(3)),
        TypeError,
        r"tree must hold floating-point numbers, got int32\[3\]\.$",
    ),
    "a name of a dtype": (
        lambda: jls.autocast(loss_fn, "fp16"),
        TypeError,
        r'or a name that jnp.dtype takes, such as "float16" or "half", got str \'fp16',
    ),
    "drop without micro-batches": (
        lambda: jls.train_step(loss_fn, drop="micro_batch"),
        ValueError,
        r"drop must come with micro_batches=, got 'micro_batch' alone",
    ),
    "accumulation without micro-batches": (
        lambda: jls.train_step(loss_fn, accumulation="sum"),
        ValueError,
        r"accumulation must come with micro_batches=, got 'sum' alone",
    ),
    "a state to wrap, without params": (
        lambda: jls.wrap_state(OPTIMIZER, optax.sgd(0.1).init(PARAMS)),
        TypeError,
        r"params must be the parameters, as for optimizer\.init, got none\. Write "
        r"jls\.wrap_state\(optimizer, inner_state, params\)\.",
    ),
    "why without arguments": (
        lambda: jls.why(loss_fn),
        TypeError,
        r"jls.why calls loss_fn with the arguments after it: missing .*'params'. Write "
        r"jls.why\(loss_fn, params, x\)\.$",
    ),
    "why of a jitted function without arguments": (
        lambda: jls.why(jax.jit(loss_fn), PARAMS),
        TypeError,
        r"Write jls.why\(loss_fn, params, x\)\.$",
    ),
    "calibrate without arguments": (
        lambda: jls.calibrate(nnx.jit(nnx_linear_loss)),
        TypeError,
        r"Write jls.calibrate\(nnx_linear_loss, model, x\)\.$",
    ),
    "hysteresis as the first argument": (
        lambda: jls.hysteresis(2),
        ValueError,
        r"init_scale must be a float if it is below 16, got 2. Write "
        r"hysteresis\(hysteresis=2\) for the count of steps, or init_scale=2\.0\.$",
    ),
    "a batch in the place of the parameters": (
        lambda: jls.health(OPTIMIZER.init(PARAMS), (jnp.ones((4, 3)),)),
        ValueError,
        r"params must be those that the optimizer was initialized with, got shape "
        r"\(4, 3\) at '0', where its moments have \(2,\)\. The order is jls\.health\(",
    ),
    "another batch there": (
        lambda: jls.health(MOMENTUM.init(PARAMS), jnp.ones((4, 2))),
        ValueError,
        r"got shape \(4, 2\), where its moments have \(2,\)\.",
    ),
    "a batch of more arrays": (
        lambda: jls.health(OPTIMIZER.init(BOTH), (jnp.ones((4, 3)),) * 3),
        ValueError,
        r"got shape \(4, 3\) at '0', where its moments have \(",
    ),
    "a batch beside a TrainState": (
        lambda: jls.health(train_state(), (jnp.ones((4, 3)), jnp.ones(4))),
        ValueError,
        r"must be those of the TrainState, .* Write jls\.health\(state\)\.$",
    ),
    "a report in the place of the parameters": (
        lambda: jls.health(STATE, REPORT),
        TypeError,
        r"params must be the parameters, got StepReport\. The order is jls\.health",
    ),
    "text as gradients": (
        lambda: jls.health(STATE, PARAMS, grads="x"),
        TypeError,
        r"grads must hold floating-point arrays, got str 'x'",
    ),
    "gradients of a part": (
        lambda: OPTIMIZER.update({"w": X, "frozen": None}, OF_BOTH, PARAMS),
        ValueError,
        r"got 1 and 2\. Differentiate what optimizer.init\(params\) got\. If the model "
        r"has changed, .* To mask or freeze a part, write it inside: jls.loss_scaled\(",
    ),
    "gradients of a part, without params": (
        lambda: OPTIMIZER.update(PARAMS, OF_BOTH),
        ValueError,
        r"got 1 and 2\. Differentiate what optimizer.init\(params\) got\.",
    ),
    "state of a part": (
        lambda: OPTIMIZER.update(BOTH, STATE, BOTH),
        ValueError,
        r"got 2 and 1\. Differentiate what optimizer.init\(params\) got\.",
    ),
    "gradients under a mask": (
        lambda: OPTIMIZER.update({"w": X, "frozen": optax.MaskedNode()}, OF_BOTH),
        ValueError,
        r"write it inside: jls.loss_scaled\(optax.masked\(inner, mask\)\)\.$",
    ),
    "parameters of the whole": (
        lambda: jls.apply_gradients(OPTIMIZER, PARAMS, STATE, BOTH),
        ValueError,
        r"same structure, but 'frozen' is only in params\. .*optimizer.init\(part\)",
    ),
    "another scaler": (
        lambda: jls.skip_nonfinite(optax.adam(0.1)).update(PARAMS, STATE, PARAMS),
        ValueError,
        "scaler.init makes a StaticState, the optimizer's state carries a ScalerState",
    ),
    "select of two kinds": (
        lambda: jls.select(True, {"a": (X, X)}, {"a": [X, X]}),
        ValueError,
        "same structure, but 'a' is a tuple in on_true, a list in on_false",
    ),
    "model for the loss function, of NNX": (
        lambda: model_for_loss(linear()),
        TypeError,
        r"got the model itself, Linear. Write def loss_fn\(model, batch\)\.$",
    ),
    "model for the loss function, of Linen": (
        lambda: jls.train_step(nn.Dense(2)),
        TypeError,
        "loss_fn must be a function, got the Linen module Dense, .* a function that ca",
    ),
    "class for a function": (
        lambda: jls.value_and_grad(nnx.Linear),
        TypeError,
        r"fun must be a function, got the class Linear\.$",
    ),
    "optimizer without jls": (
        lambda: jls.train_step(loss_fn, optax.sgd(0.1))(PARAMS, (), X),
        ValueError,
        r"got a state with 0 such .* Write optimizer = jls.loss_scaled\(optimizer\), a",
    ),
    "model without its optimizer": (
        lambda: jls.value_and_grad(nnx_loss, transform=nnx.value_and_grad)(linear(), X),
        ValueError,
        r"got Linear without one. First comes the nnx.Optimizer: f\(optimizer, model, ",
    ),
    "scaler before the optimizer": (
        lambda: jls.loss_scaled(jls.dynamic(), optax.sgd(0.1)),
        TypeError,
        r"got LossScaler. The order is jls.loss_scaled\(inner, scaler\)\.$",
    ),
    "optimizer before the loss function": (
        lambda: jls.train_step(OPTIMIZER, loss_fn),
        TypeError,
        r"loss_fn must come first, got Loss.* jls.train_step\(loss_fn, optimizer\)\.$",
    ),
    "gradients before the optimizer": (
        lambda: jls.apply_gradients(PARAMS, OPTIMIZER, STATE, PARAMS),
        TypeError,
        r"got dict. The order is jls.apply_gradients\(optimizer, grads, opt_state, p",
    ),
    "scale before the state": (
        lambda: jls.set_loss_scale(8.0, STATE),
        TypeError,
        r"state must come first, got float 8.0 before LossScaledState. The order is "
        r"jls.set_loss_scale\(state, value\)\.$",
    ),
    "optimizer for its state": (
        lambda: jls.loss_scale(OPTIMIZER),
        ValueError,
        r"got LossScaledTransformation without one. .*optimizer.init\(params\)\.$",
    ),
    "batch in two parts": (
        lambda: jax.jit(jls.train_step(loss_fn, OPTIMIZER))(PARAMS, STATE, X, X),
        TypeError,
        r"got dict, LossScaledState, float32\[2\], float32\[2\]. A batch is one arg",
    ),
    "cast by another name": (
        lambda: jls.auto_cast,
        AttributeError,
        r"'auto_cast': jls.autocast\(loss_fn, jnp.float16\) makes a function",
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
        assert "PyTreeDef" not in str(caught.value)
        assert "['" not in str(caught.value)  # paths are written a/b


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


def of_states(count):
    """The loss of the bare parameters of one NNX model, or of several in a tuple."""
    graph, params = nnx.split(linear())
    if count == 1:
        return jls.value_and_grad(lambda p: jnp.sum(nnx.merge(graph, p)(X)))(
            STATE, params
        )
    return jls.value_and_grad(
        lambda several: sum(jnp.sum(nnx.merge(graph, p)(X)) for p in several)
    )(STATE, (params,) * count)


RIGHT = {
    "nnx.State": lambda: of_states(1),
    "several nnx.State": lambda: of_states(2),
    "nnx model in the batch": lambda: jls.value_and_grad(
        lambda p, model: jnp.sum(model(p["w"]))
    )(STATE, PARAMS, linear()),
    "equinox arrays alone": lambda: jls.value_and_grad(
        lambda p, static: jnp.sum(eqx.combine(p, static)(X))
    )(STATE, *eqx.partition(mlp(), eqx.is_inexact_array)),
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
    "gradients twice": lambda: [
        OPTIMIZER.update(grads, STATE, grads) for grads in [GRAD(STATE, PARAMS, X)[1]]
    ],
    "None": lambda: OPTIMIZER.update(PARAMS, STATE, PARAMS, value=None),
    "gradients of examples": lambda: PRIVATE.update(
        {"w": jnp.ones((3, 2))}, PRIVATE.init(PARAMS), PARAMS
    ),
    "frozen layers of a tuple": lambda: OPTIMIZER.update(
        (X, None), OPTIMIZER.init((X, None)), (X, None)
    ),
    "one micro-batch": lambda: jls.train_step(
        loss_fn, OPTIMIZER, micro_batches=1, drop="micro_batch", accumulation="sum"
    )(PARAMS, STATE, jnp.ones((1, 2))),
    "a first scale of 8": lambda: [
        jls.hysteresis(8.0),
        jls.hysteresis(2**15),
        jls.hysteresis(2**3, hysteresis=4),
    ],
    "moments of other shapes": lambda: [
        jls.health(tx.init(params), params)
        for params in ({"w": jnp.ones((2, 3))}, {"w": jnp.ones((2, 3)), "b": X})
        for inner in (optax.adam(0.1), optax.sgd(0.1, momentum=0.9))
        for tx in (
            jls.loss_scaled(optax.flatten(inner)),
            jls.loss_scaled(of_flat_leaves(inner)),
        )
    ],
    "gradients with an axis of examples": lambda: jls.health(
        MOMENTUM.init(PARAMS), PARAMS, grads=jnp.ones((4, 2))
    ),
    "float0 to unscale": lambda: jls.unscale(STATE, np.zeros(2, jax.dtypes.float0)),
    "a decorated loss": lambda: jls.why(
        functools.wraps(loss_fn)(lambda *args: jnp.log(args[0])), X
    ),
    "parameters of which a part is trained": lambda: [
        jls.health(tx.init(PARAMS), {"other": jnp.ones(3), **PARAMS})
        for tx in [jls.loss_scaled(optax.adam(0.1))]
    ],
    "numbers": lambda: [
        OPTIMIZER.update(PARAMS, STATE, PARAMS, value=one)
        for one in (1.0, np.float32(1.0), np.ones(()), jnp.bfloat16(1.0), jnp.nan)
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_hears_nothing(name):
    with jax.numpy_dtype_promotion("standard"):
        assert warned(RIGHT[name]) == []


@pytest.mark.parametrize("make", [jls.loss_scaled, jls.skip_nonfinite])
@pytest.mark.parametrize(
    ("dtype", "part"), [("float16", 1 / 4000), ("bfloat16", 1 / 512)]
)
def test_parameters_of_16_bits_without_master_weights(make, dtype, part):
    params = {"w": jnp.ones(2, dtype), "b": jnp.ones(2)}
    (message,) = warned(lambda: make(optax.sgd(0.1)).init(params))
    assert f"1 of 2 parameters are {dtype}, first 'w'" in message
    assert f"about 1/{round(1 / part)} of the parameter, vanish" in message
    # It is so: below half a unit in the last place, and just above it.
    one, down = jnp.ones((), dtype), jnp.float32(part)
    assert optax.apply_updates(one, -down / 2.1) == 1
    assert optax.apply_updates(one, -down * 1.1) < 1
    assert warned(lambda: make(optax.sgd(0.1)).init({"b": jnp.ones(2)})) == []


def narrow(dtype="float16"):
    return {"w": jnp.ones(2, dtype)}


UPDATES = {
    "update": lambda optimizer, grads, state: optimizer.update(grads, state, PARAMS),
    "apply_gradients": lambda optimizer, grads, state: jls.apply_gradients(
        optimizer, grads, state, PARAMS
    ),
}


@pytest.mark.parametrize("how", UPDATES)
@pytest.mark.parametrize("make", [jls.loss_scaled, jls.skip_nonfinite])
def test_gradients_that_were_cast_to_float16(how, make, jit_or_eager):
    optimizer = make(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    step = jit_or_eager(lambda *args: UPDATES[how](optimizer, *args))
    (message,) = warned(lambda: step(narrow(), state))
    assert "float16 gradients of float32 parameters" in message
    assert "Pass the float32 gradients of jls.value_and_grad as they are" in message
    assert (jnp.float32(2.0**-25 * 0.99).astype("float16") == 0).all()  # it is so


def test_gradients_in_float16_of_one_parameter_of_several():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = optax.chain(jls.loss_scaled(optax.adam(0.1)), optax.scale(1.0))
    grads = params | {"b": jnp.ones(2, jnp.float16)}
    assert len(warned(lambda: optimizer.update(grads, optimizer.init(params), params)))


def half_params():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jls.JlsWarning)
        return narrow(), OPTIMIZER.init(narrow())


GRADIENTS = {
    "float32": lambda: OPTIMIZER.update(narrow("float32"), STATE, PARAMS),
    "bfloat16": lambda: OPTIMIZER.update(narrow("bfloat16"), STATE, PARAMS),
    "no params": lambda: OPTIMIZER.update(narrow(), STATE),
    "no match": lambda: OPTIMIZER.update(narrow(), STATE, (PARAMS["w"],)),
    "float16 parameters": lambda: OPTIMIZER.update(
        narrow(), half_params()[1], half_params()[0]
    ),
    "a float16 model": lambda: jax.jit(
        lambda params, state: OPTIMIZER.update(
            jls.value_and_grad(loss_fn)(state, params, X)[1], state, params
        )
    )(*half_params()),
    "float16 inside of the loss": lambda: jax.jit(
        jls.train_step(
            lambda p, x: loss_fn(
                jax.tree.map(lambda a: a.astype("float16"), p), x
            ).astype("float32"),
            OPTIMIZER,
        )
    )(PARAMS, STATE, X.astype("float16")),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_are_as_narrow_as_they_may_be(name):
    assert warned(GRADIENTS[name]) == []


# Names that other libraries have, or that are nearly right.


@pytest.mark.parametrize(
    ("ask", "error", "answer"),
    [
        (lambda: REPORT.grad_norm, AttributeError, "Did you mean global_norm?"),
        (lambda: REPORT.lr, AttributeError, "Did you mean learning_rate?"),
        (lambda: REPORT.other, AttributeError, "no attribute 'other'. It has loss, sk"),
        (lambda: REPORT.los, AttributeError, "no attribute 'los'$"),  # Python asks
        (lambda: REPORT._other, AttributeError, "no attribute '_other'$"),
        (lambda: jls.types.StepCheck().passed, AttributeError, "Did you mean ok?"),
        (
            lambda: jls.types.Why().line,
            AttributeError,
            r"Write why\.births\[0\]\.place",
        ),
        (
            lambda: jls.types.Difference().tol,
            AttributeError,
            "It has birth, only_a, on",
        ),
        (lambda: REPORT["loss"], TypeError, r"has fields, no keys, .* Write \.loss\.$"),
        (lambda: REPORT["other"], TypeError, "got 'other'. There are loss, skipped,"),
        (
            lambda: jls.autocast(dtype=jnp.float16),
            TypeError,
            r"A decorator is @functools\.partial\(jls\.autocast, dtype=\.\.\.\)",
        ),
        (
            lambda: jls.autocast(abs, compute_dtype=jnp.float16),
            TypeError,
            "Did you mean dtype=",
        ),
        (
            lambda: jls.loss_scaled(scaler=jls.dynamic()),
            TypeError,
            r"^inner must be given: jls\.loss_scaled\(inner, scaler=\.\.\.\)\.$",
        ),
        (
            lambda: jls.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(2)).loss_scale,
            AttributeError,
            r"Write jls.loss_scale\(opt_state\)\.",
        ),
        (lambda: jls.dynamic().init().scale, AttributeError, "Did you mean loss_scale"),
        (lambda: jls.presets.pytorch, AttributeError, "Did you mean torch?"),
        (lambda: jls.presets.apex, AttributeError, "There are deepspeed, flax, keras,"),
        (lambda: OPTIMIZER.step, AttributeError, r"Write .* = jls\.apply_gradients\("),
        (
            lambda: jls.static(2.0).init().scale,
            AttributeError,
            "Did you mean loss_scal",
        ),
        (
            lambda: jls.health(STATE).ok,
            AttributeError,
            r"Write if health, or health\.v",
        ),
        (
            lambda: jls.types.Calibration(2.0).scale,
            AttributeError,
            "Did you mean init_scale?",
        ),
        (lambda: jls.skip_non_finite, AttributeError, "Did you mean skip_nonfinite?"),
        (
            lambda: jls.train_step(abs, dtype=jnp.float16),
            TypeError,
            r"train_step takes no argument dtype=\. Did you mean compute_dtype=\?",
        ),
        (
            lambda: jls.train_step(abs, microbatches=2),
            TypeError,
            r"Did you mean micro_batches=\? It takes loss_fn, optimizer, has_aux",
        ),
        (lambda: jls.dynamic(scale=2.0), TypeError, "Did you mean init_scale=?"),
        (
            lambda: jls.loss_scaled(optax.sgd(0.1), zzz=1),
            TypeError,
            r"takes no argument zzz=\. It takes inner, scaler",
        ),
        (
            lambda: jls.all_finite(jnp.float32(1.0), {"w": jnp.ones(9)}),
            TypeError,
            r"got dict\. Of two trees write jls.all_finite\(\(loss, grads\)\)\.",
        ),
        (
            lambda: jls.dynamic().init(jnp.ones(2)),
            TypeError,
            r"scaler\.init takes no arguments",
        ),
        (
            lambda: jax.jit(lambda x: jls.check_step(lambda x: x, x))(jnp.ones(2)),
            ValueError,
            r"x must be concrete, .* call jls\.check_step outside jit",
        ),
    ],
)
def test_a_name_of_another_library_is_answered(ask, error, answer):
    with pytest.raises(error, match=answer):
        ask()


def test_a_record_is_asked_for_what_it_has_not_as_any_other():
    assert not hasattr(REPORT, "grad_norm")
    assert getattr(REPORT, "__jax_array__", None) is None
    assert REPORT[0] is None
    assert REPORT[:2] == (None, None)
    assert copy.deepcopy(REPORT) == pickle.loads(pickle.dumps(REPORT)) == REPORT


DIFFERENTIATED = {
    "value_and_grad": jls.value_and_grad(loss_fn),
    "grad": jls.grad(loss_fn),
}


@pytest.mark.parametrize("make", [jls.value_and_grad, jls.grad, jls.train_step])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_function_that_jls_differentiates_already_is_no_loss(name, make):
    @functools.wraps(DIFFERENTIATED[name])
    def of_a_gradient(params, x):
        return sum(jnp.sum(x) for x in jax.tree.leaves(params))

    make(of_a_gradient)
    with pytest.raises(TypeError, match=r"must be the loss function itself, got what"):
        make(DIFFERENTIATED[name])


AVERAGE = jls.params_ema(0.9)
LAST = optax.chain(optax.sgd(0.1), AVERAGE)
# Optimizers with an average, and whether something changes the updates after it.
AVERAGING = {
    "last": (LAST, False),
    "first": (optax.chain(AVERAGE, optax.sgd(0.1)), True),
    "before adam": (optax.chain(AVERAGE, optax.adam(0.1)), True),
    "before a clip": (optax.chain(LAST, optax.clip(1.0)), True),
    "in a chain in a chain": (optax.chain(optax.chain(AVERAGE), optax.scale(-1)), True),
    "before another average": (optax.chain(LAST, jls.params_ema(0.99)), False),
    "before what passes on": (optax.chain(LAST, optax.identity()), False),
    "accumulated": (optax.MultiSteps(LAST, 2), False),
    "masked": (optax.masked(LAST, {"w": True}), False),
    "under a condition": (optax.conditionally_transform(LAST, lambda n: n > 2), False),
    "injected": (optax.inject_hyperparams(lambda rate: LAST)(rate=0.1), False),
}


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_that_is_not_last_is_warned_of(name):
    inner, is_wrong = AVERAGING[name]
    optimizer = jls.loss_scaled(inner)
    state = optimizer.init(PARAMS)
    found = warned(lambda: jax.eval_shape(optimizer.update, PARAMS, state, PARAMS))
    assert ["a jls.params_ema is followed by" in x for x in found] == [True] * is_wrong


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_an_average_inside_of_bfloat16_params_is_last_in_there(rounding):
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for inner, is_wrong in ((LAST, False), (AVERAGING["first"][0], True)):
        stored = jls.bfloat16_params(inner, rounding=rounding)
        optimizer = jls.skip_nonfinite(stored)
        state = optimizer.init(params)
        found = warned(
            lambda o=optimizer, s=state: jax.eval_shape(o.update, PARAMS, s, params)
        )
        assert ["is followed by" in x for x in found] == [True] * is_wrong


def test_an_average_before_the_wrapper_is_warned_of():
    for optimizer, is_wrong in (
        (optax.chain(AVERAGE, jls.loss_scaled(optax.sgd(0.1))), True),
        (optax.chain(jls.loss_scaled(optax.sgd(0.1)), AVERAGE), False),
    ):
        step, state = jls.train_step(loss_fn, optimizer), optimizer.init(PARAMS)
        found = warned(lambda s=step, o=state: jax.eval_shape(s, PARAMS, o, X))
        assert ["is followed by" in x for x in found] == [True] * is_wrong


# A loss that does not follow its parameters.


def steps_of(loss, **options):
    return lambda: jax.eval_shape(
        jls.train_step(loss, OPTIMIZER, **options), PARAMS, STATE, X
    )


WITH = {
    "as written": {},
    "in half": {"compute_dtype": jnp.bfloat16},
    "in micro-batches": {"micro_batches": 2},
}


def product(params, x):  # which autocast casts
    return jnp.sum(jnp.outer(x, params["w"]) @ jnp.ones((2, 3)))


@pytest.mark.parametrize("how", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", WITH)
def test_a_loss_of_other_parameters_is_warned_of(name, how):
    right, wrong = how(product), how(lambda params, x: product(PARAMS, x))
    assert warned(steps_of(right, **WITH[name])) == []
    (message,) = warned(steps_of(wrong, **WITH[name]))
    assert "the loss does not depend on the parameters, or only behind" in message
    assert message.endswith(
        "loss_fn closes over 'PARAMS': compute it from its first argument."
    )


def test_what_fails_after_a_loss_is_not_put_down_to_its_order():
    def update(updates, state, params=None):
        raise TypeError("their own")

    inner = optax.GradientTransformation(optax.sgd(1).init, update)
    optimizer = jls.loss_scaled(inner)

    def symmetric(params, x):  # it runs in each order
        pair = params["w"] if isinstance(params, dict) else params
        return jnp.sum(pair * (x["w"] if isinstance(x, dict) else x))

    with pytest.raises(TypeError, match=r"^their own"):
        jls.train_step(symmetric, optimizer)(PARAMS, optimizer.init(PARAMS), X)

    def missing(params, x):  # it runs in none
        return loss_fn(params["layer"], x)

    with pytest.raises(KeyError, match="layer"):
        jls.train_step(missing, OPTIMIZER)(PARAMS, STATE, X)


def test_a_loss_behind_stop_gradient_is_warned_of():
    (message,) = warned(steps_of(lambda p, x: jax.lax.stop_gradient(loss_fn(p, x))))
    assert message.endswith("Compute it from the first argument of loss_fn.")


def test_a_model_from_around_the_step_is_warned_of():
    model, optimizer = nnx_run()

    def loss(_, x):
        return nnx_linear_loss(model, x)

    step = nnx.jit(jls.train_step(loss))
    (message,) = warned(lambda: step(model, optimizer, X))
    assert "loss_fn closes over 'model'" in message
    teacher = linear()  # a right program

    def distil(model, x):
        return jnp.sum((model(x) - teacher(x)) ** 2)

    assert warned(lambda: nnx.jit(jls.train_step(distil))(model, optimizer, X)) == []


def test_a_model_from_around_the_step_that_changes_is_named():
    model, optimizer = dropout_run()

    def loss(_, x):
        return nnx_loss(model, x)

    with pytest.raises(Exception, match="trace level") as caught:
        nnx.jit(jls.train_step(loss))(model, optimizer, X)
    assert any("loss_fn closes over 'model'" in x for x in caught.value.__notes__)


# What only reaches the report.

STATISTICS = {"norm": {"average": jnp.zeros(2), "counter": jnp.zeros((), jnp.int32)}}


def next_statistics(old, x):
    new = old["norm"]["average"] * 0.9 + x * 0.1
    return {"norm": {"average": new, "counter": old["norm"]["counter"] + 1}}


def test_a_state_that_is_returned_as_aux_is_warned_of():
    def closing(params, x):
        return loss_fn(params, x), next_statistics(STATISTICS, x)

    def with_metrics(params, x):
        return loss_fn(params, x), (next_statistics(STATISTICS, x), {"n": 1.0})

    for loss in (closing, with_metrics):
        (message,) = warned(steps_of(loss, has_aux=True))
        assert "closes over 'STATISTICS', and returns its next value as aux" in message
        assert "def loss_fn(params, carried, batch)" in message


def test_aux_that_is_no_state_of_the_model_is_not_warned_of():
    scale, zeros = {"scale": jnp.ones(2)}, {"loss": jnp.zeros(())}
    loader = iter([X])

    def normalized(params, x):  # other names
        return loss_fn(params, x * scale["scale"]), {"logits": x}

    def summed(params, x):  # numbers of any two losses are alike
        loss = loss_fn(params, x)
        return loss, {"loss": zeros["loss"] + loss}

    def of_one_array(params, x):
        return loss_fn(params, x * X), x

    def of_a_loader(params, x):
        return loss_fn(params, x), {"is_loaded": bool(loader)}

    for loss in (normalized, summed, of_one_array, of_a_loader):
        assert warned(steps_of(loss, has_aux=True)) == []

    def carrying(params, carried, x):
        return loss_fn(params, x), next_statistics(carried, x)

    step = jls.train_step(carrying, OPTIMIZER, carried=True)
    given = PARAMS, STATE, STATISTICS, X
    assert warned(lambda: jax.eval_shape(step, *given)) == []


def test_batch_statistics_among_the_parameters_are_warned_of():
    variables = {"params": PARAMS, "batch_stats": {"mean": jnp.zeros(2)}}
    (message,) = warned(lambda: jls.loss_scaled(optax.sgd(0.1)).init(variables))
    assert "would move by their gradients, first 'batch_stats/mean'. Pass" in message
    labels = {"params": "trained", "batch_stats": "frozen"}
    parts = {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    frozen = jls.loss_scaled(optax.multi_transform(parts, labels))
    assert warned(lambda: frozen.init(variables)) == []
    assert warned(lambda: frozen.init({"params": PARAMS, "batch_stats": PARAMS})) == []


# Notes.


def test_an_argument_that_an_optimizer_lacks_is_named():
    optimizer = jls.skip_nonfinite(optax.lbfgs())
    step = jls.train_step(loss_fn, optimizer)
    with pytest.raises(TypeError, match="value_fn") as caught:
        step(PARAMS, optimizer.init(PARAMS), X)
    assert any("goes into extra=" in note for note in caught.value.__notes__)


def test_a_tool_says_how_it_called_a_function_that_raises():
    other = {"x": X}
    for call, note in (
        (
            lambda: jls.compare(
                loss_fn, lambda x, params: loss_fn(params, x), PARAMS, X
            ),
            "jls.compare called <lambda>(x: dict, params: float32[2]).",
        ),
        (
            lambda: jls.why(loss_fn, other, X),
            "jls.why called loss_fn(params: dict, x: float32[2]).",
        ),
    ):
        with pytest.raises((KeyError, TypeError)) as caught:
            call()
        assert note in caught.value.__notes__
