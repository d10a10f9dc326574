"""What each public function says to a wrong argument: a good error, or it takes it.

Every argument of every function gets every value of VALUES, one at a time. Then either
TAKES lists the value for the argument, and it is taken; or the error is one of ERRORS,
and says the name of the argument.
"""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from test_scaler_laws import SCALERS

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ERRORS = (TypeError, ValueError, NameError, jls.UnhealthyError)


class Odd:
    pass


VALUES = {
    "None": None,
    "text": "text",
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "nan": math.nan,
    "inf": math.inf,
    "huge": 10**400,
    "1j": 1j,
    "True": True,
    "list": [1, "a"],
    "dict": {},
    "object": Odd(),
    "function": lambda: None,
    "array": np.ones((2, 2)),
    "vector": jnp.ones(3),
    "integers": jnp.arange(1, 3),
    "key": jax.random.key(0),
}
# Traced values: names of dtypes.
TRACED = ["float32", "int32", "bool"]
ALL = {*VALUES, *TRACED}
# Arrays of numbers, which are not checked.
ARRAYS = {"array", "vector", "integers", "float32", "int32"}

params = {"w": jnp.ones(2), "b": jnp.ones(())}
optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(8.0))
opt_state = optimizer.init(params)
scaler_state = jls.dynamic(8.0).init()
*_, step_report = jls.apply_gradients(optimizer, params, opt_state, params)
history = jls.History()
history.append({"loss": 1.0, "loss_scale": 2.0})


def update(updates, state, params, **extra):
    return optimizer.update(updates, state, params, **extra)


def ema(params, decay, debias):
    average = jls.params_ema(decay, debias=debias)
    return average.update(params, average.init(params), params)


def train_step(state, batch, **options):
    return jls.train_step(**options)(state, batch)


@jax.jit
def right_step(params, opt_state, batch):
    loss, grads = jls.value_and_grad(lambda params: jnp.sum(params["w"] * batch))(
        opt_state, params
    )
    return jls.apply_gradients(optimizer, grads, opt_state, params, value=loss)


def observe(report):
    queue = jls.requeue([1.0])
    next(queue)
    queue.observe(report)


def check_step(**options):
    # Its first argument is positional only: the others are the step's.
    batch = jnp.ones(2)
    return jls.check_step(options.pop("step"), params, opt_state, batch, **options)


def matmul(x):
    return x @ x


def cast(**options):
    return jls.autocast(**options)(jnp.ones((2, 2)))


def why(fun):
    return jls.why(fun, jnp.ones(2))


def calibrate(step):
    return jls.calibrate(step, params, opt_state, jnp.ones(2))


def compare(a, b):
    return jls.compare(a, b, jnp.ones(2))


def fingerprint(fun):
    return jls.fingerprint(fun, jnp.ones(2))


model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def atomic(optimizer, model):
    with jls.atomic(optimizer, model):
        optimizer.update(model, nnx.state(model, nnx.Param))


def state_loss(state, batch):
    return jnp.sum(state.params["w"] * batch)


def train_state():
    return TrainState.create(apply_fn=None, params=params, tx=optimizer)


def differentiated(state, **options):
    return jls.value_and_grad(**options)(state, jnp.ones(2))


def defaults(function, **required):
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: required.get(p.name, p.default)
        for p in parameters
        if p.kind != p.VAR_KEYWORD
    }


def adjusting(scaler):
    def adjust(state, grads_finite):
        return scaler.adjust(state, grads_finite)

    return adjust, {"state": scaler.init(), "grads_finite": True}


FACTORIES = {
    scaler.__name__: scaler for scaler in (jls.static, jls.dynamic, jls.hysteresis)
}
PRESETS = {
    f"presets.{name}": getattr(jls.presets, name) for name in jls.presets.__all__
}
REQUIRED = {
    "init_scale": 2.5,
    "loss_scale_value": 8.0,
    "scale_value": 8.0,
    "scale_factor": 2.0,
    "scale_window": 20,
    "max_norm": 2.5,
}
GRAD = {
    "state": scaler_state,
    "fun": lambda w: jnp.sum(w**2),
    "argnums": 0,
    "has_aux": False,
    "transform": jax.value_and_grad,
}
WRAPPER = {
    "inner": optax.sgd(0.1),
    "axis_name": None,
    "check_updates": None,
    "spikes": None,
}
# Name -> a function, and arguments that it takes.
CASES = {
    **{n: (f, defaults(f, **REQUIRED)) for n, f in (FACTORIES | PRESETS).items()},
    "spikes": (jls.spikes, defaults(jls.spikes)),
    "value_and_grad": (differentiated, GRAD),
    "grad": (lambda state, **k: jls.grad(**k)(state, jnp.ones(2)), GRAD),
    "loss_scaled": (jls.loss_scaled, WRAPPER | {"scaler": jls.dynamic()}),
    "skip_nonfinite": (jls.skip_nonfinite, WRAPPER),
    "update": (
        update,
        {
            "updates": params,
            "state": opt_state,
            "params": params,
            "value": 1.0,
            "partial_overflow": False,
        },
    ),
    "scale": (jls.scale, {"state": scaler_state, "tree": params}),
    "unscale": (jls.unscale, {"state": scaler_state, "tree": params}),
    "all_finite": (jls.all_finite, {"tree": params, "axis_name": None}),
    "select": (jls.select, {"pred": True, "on_true": params, "on_false": params}),
    "loss_scale": (jls.loss_scale, {"state": scaler_state}),
    "metrics": (jls.metrics, {"state": scaler_state, "host": False}),
    "set_loss_scale": (jls.set_loss_scale, {"state": scaler_state, "value": 2.0}),
    "health": (
        jls.health,
        {
            "state": opt_state,
            "params": params,
            "grads": None,
            "optimizer": None,
            "carried": None,
            "max_consecutive_skips": 3,
            "max_small": 0.1,
            "dtype": jnp.float16,
            "raise_if": (),
            "warn_if": (),
        },
    ),
    "check_in_sync": (jls.check_in_sync, {"state": opt_state}),
    "wrap_state": (
        jls.wrap_state,
        {
            "optimizer": jls.loss_scaled(optax.adam(0.1)),
            "inner_state": optax.adam(0.1).init(params),
            "params": params,
        },
    ),
    "unwrap_state": (jls.unwrap_state, {"state": opt_state}),
    "upgrade_state": (
        jls.upgrade_state,
        {"target": opt_state, "saved": opt_state, "params": None},
    ),
    "bfloat16_params": (
        jls.bfloat16_params,
        defaults(jls.bfloat16_params, inner=optax.sgd(0.1)),
    ),
    "master_params": (jls.master_params, {"params": params, "state": opt_state}),
    "params_ema": (ema, {"params": params, "decay": 0.9, "debias": True}),
    "eval_params": (jls.eval_params, {"state": jls.params_ema(0.9).init(params)}),
    "History.append": (
        lambda metrics, **k: jls.History().append(metrics, **k),
        {"metrics": {"loss": 1.0}, "step": 1, "norm": 2.0},
    ),
    "History.plot": (history.plot, {"axes": None}),
    "train_step": (
        train_step,
        defaults(jls.train_step, loss_fn=state_loss)
        | {"state": train_state(), "batch": jnp.ones(2)},
    ),
    "apply_gradients": (
        jls.apply_gradients,
        {
            "optimizer": optimizer,
            "grads": params,
            "opt_state": opt_state,
            "params": params,
            "value": None,
            "return_updates": False,
        },
    ),
    "autocast": (cast, {"fun": matmul, "dtype": "float16", "keep": None}),
    "atomic": (atomic, {"optimizer": nnx_optimizer, "model": model}),
    "calibrate": (calibrate, {"step": right_step}),
    "compare": (compare, {"a": jnp.sqrt, "b": jnp.sqrt}),
    "fingerprint": (fingerprint, {"fun": jnp.sqrt}),
    "why": (why, {"fun": jnp.sqrt}),
    "requeue": (jls.requeue, defaults(jls.requeue, batches=[1.0])),
    "requeue.observe": (observe, {"report": step_report}),
    "check_step": (check_step, {"step": right_step, "carried": None}),
    **{
        f"{name}.adjust": adjusting(make())
        for name, make in SCALERS.items()
        if "user" not in name
    },
}

NUMBERS = {"2.5", *ARRAYS}
FLAGS = {"True", "bool"}
LOGGED = {"None", "-1", "0", "2.5", "nan", "inf", "True", "dict"}
# What an argument takes, in all functions or in one; nothing, if it is not listed.
TAKES = {
    "init_scale": NUMBERS,
    "loss_scale": NUMBERS,
    "init_loss_scaling": NUMBERS,
    "initial_scale": NUMBERS,
    "scale": NUMBERS,
    "scale_value": NUMBERS,
    "loss_scale_value": NUMBERS,
    "min_scale": NUMBERS,
    "max_scale": NUMBERS,
    "growth_factor": NUMBERS,
    "scale_factor": NUMBERS,
    "incr_ratio": NUMBERS,
    "backoff_factor": ARRAYS,
    "decr_ratio": ARRAYS,
    "growth_interval": {"int32", "integers"},
    "backoff_interval": {"int32", "integers"},
    "hysteresis": {"int32", "integers"},
    "window": {"int32", "integers"},
    "scale_window": {"int32", "integers"},
    "delayed_shift": {"int32", "integers"},
    "dynamic_growth_steps": {"int32", "integers"},
    "incr_every_n_steps": {"int32", "integers"},
    "decr_every_n_nan_or_inf": {"int32", "integers"},
    "has_aux": {"True"},
    "local_norm": {"True"},
    "update_norm": {"True"},
    "return_updates": {"True"},
    "extra": {"None", "dict"},
    "debias": {"True"},
    "consecutive": {"True"},
    "enable": {"True"},
    "enabled": {"True"},
    "use_dynamic_loss_scaling": {"True"},
    "consecutive_hysteresis": {"True"},
    "tree": {"2.5", "nan", "inf", "1j", "dict", "array", "vector", "float32"},
    "grads": ALL,
    "params": ALL,
    "value": {"None", "2.5", "nan", "inf", "float32"},
    "grads_finite": FLAGS,
    "pred": FLAGS,
    "partial_overflow": FLAGS,
    "raise_if": {"dict"},
    "warn_if": {"dict"},
    "check_updates": {"None", "True"},
    "sigmas": NUMBERS,
    "max_norm": {"None", "inf", *NUMBERS},
    "max_loss": {"None", "inf", *NUMBERS},
    "budget": {"None", "0", "inf", *NUMBERS},
    "warmup": {"None", "int32", "integers"},
    ("loss_scaled", "spikes"): {"None"},
    ("skip_nonfinite", "spikes"): {"None"},
    ("presets.spike_limit", "max_norm"): {"inf", *NUMBERS},
    **{
        (name, "window"): set()  # a shape
        for name in (
            "spikes",
            *(f"presets.{x}_spikes" for x in ("levanter", "maxtext", "olmo")),
        )
    },
    ("health", "optimizer"): {"None"},
    ("presets.flax", "minimum_scale"): {"None", "2.5", *ARRAYS},
    ("presets.mindformers_adaptive", "scale_window"): set(),
    ("value_and_grad", "has_aux"): set(),  # this loss function has none
    ("grad", "has_aux"): set(),
    ("metrics", "host"): {"True"},
    ("train_step", "has_aux"): set(),
    ("train_step", "micro_batches"): {"None"},
    ("train_step", "carried"): set(),
    ("train_step", "compute_dtype"): {"None"},
    ("train_step", "keep"): {"None"},  # there is no compute_dtype
    ("autocast", "keep"): {"None"},
    ("apply_gradients", "grads"): set(),
    ("apply_gradients", "params"): set(),
    ("check_step", "carried"): {"None"},
    ("train_step", "optimizer"): {"None"},
    ("loss_scaled", "axis_name"): {"None", "text"},
    ("skip_nonfinite", "axis_name"): {"None", "text"},
    ("loss_scaled", "scaler"): set(),
    ("all_finite", "tree"): ALL - {"text"},
    ("unscale", "tree"): ALL,  # a leaf of any kind
    ("all_finite", "axis_name"): {"None"},
    ("set_loss_scale", "value"): {"2.5", "float32", "int32"},
    ("health", "params"): {"None"},
    ("health", "carried"): set(VALUES) - {"text", "object", "function"},
    ("health", "grads"): {"None", "2.5", "nan", "inf", "1j", "dict", "array", "vector"},
    ("health", "max_small"): {"0"},
    ("upgrade_state", "target"): set(),
    ("upgrade_state", "params"): ALL,  # for another target
    ("master_params", "params"): ALL,  # what is not bfloat16 stays as it is
    ("master_params", "state"): ALL,
    ("bfloat16_params", "moments"): {"None"},
    ("bfloat16_params", "seed"): {"0"},
    ("nonfinite_leaves", "params"): set(),
    ("wrap_state", "params"): set(),
    ("params_ema", "params"): ALL - {"None", "huge"},
    ("params_ema", "decay"): {"0", "array", "float32", "int32"},
    ("History.append", "metrics"): {"dict"},
    ("History.append", "step"): {"None", "-1", "0", "2.5", "True"},
    ("History.append", "norm"): LOGGED,
    ("History.plot", "axes"): {"None"},
    ("train_step", "learning_rate"): {"None", "2.5", "dict", "float32", "int32"},
    ("requeue", "batches"): {"list"},
    ("requeue", "first"): {"list"},
    ("requeue", "lag"): {"0"},
    ("requeue", "keep"): {"0"},
}
# What the error calls an argument, if not by its name.
CALLED = {
    ("set_loss_scale", "value"): "loss_scale",
    ("apply_gradients", "opt_state"): "got a state|opt_state",
    ("wrap_state", "params"): "inner_state",
}
# Where the error is another's, and why.
LEFT = {
    # A function of the user's raises, or what the user's function is given does.
    ("value_and_grad", "fun", "function"),
    ("value_and_grad", "transform", "function"),
    ("grad", "fun", "function"),
    ("grad", "transform", "function"),
    ("params_ema", "decay", "function"),
    ("train_step", "loss_fn", "function"),
    ("autocast", "fun", "function"),
    ("autocast", "keep", "function"),
    ("check_step", "step", "function"),
    ("calibrate", "step", "function"),
    ("why", "fun", "function"),
    ("compare", "a", "function"),
    ("compare", "b", "function"),
    ("fingerprint", "fun", "function"),
    ("train_step", "learning_rate", "function"),
    ("train_step", "extra", "function"),
    ("train_step", "batch"),
    # It is for `transform`, which may take more than jax does.
    ("value_and_grad", "argnums"),
    ("grad", "argnums"),
    # Shapes of hyperparameters are not checked: one for each member of a vmap is fine.
    ("params_ema", "decay", "vector"),
    ("params_ema", "decay", "integers"),
    # The optimizer's own, of parameters that are none.
    *(("wrap_state", "params", label) for label in ("text", "list", "object")),
    ("wrap_state", "params", "function"),
    # JAX has no number for it.
    ("params_ema", "params", "huge"),
    # jax says that these are no numpy arrays.
    *(("History.plot", "axes", label) for label in ("key", *TRACED)),
}


def outcomes(function, arguments, name):
    """Each value for the argument `name`, and what comes of it: None or an error."""

    def call(value):
        function(**arguments | {name: value})

    for label, value in VALUES.items():
        yield label, error_of(call, value)
    for dtype in TRACED:
        yield dtype, error_of(jax.make_jaxpr(call), jnp.ones((), dtype))


def error_of(call, value):
    try:
        call(value)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("case", CASES)
def test_wrong_argument_is_taken_or_refused_by_name(case):
    function, arguments = CASES[case]
    function(**arguments)
    faults = []
    for name in arguments:
        taken = TAKES.get((case, name), TAKES.get(name, set()))
        for label, error in outcomes(function, arguments, name):
            if (case, name, label) in LEFT or (case, name) in LEFT:
                continue
            if error is None:
                if label not in taken:
                    faults.append(f"{name}={label} was taken")
            elif label in taken or not isinstance(error, ERRORS):
                faults.append(f"{name}={label}: {error!r:.150}")
            elif not re.search(CALLED.get((case, name), name), str(error)):
                faults.append(f"{name}={label} is not named: {error!r:.150}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", [name for name in SCALERS if "user" not in name])
def test_scaler_says_where_its_state_is_in_that_of_the_optimizer(name):
    scaler = SCALERS[name]()
    with pytest.raises(
        TypeError, match=r"LossScaledState.*pass opt_state.scaler_state"
    ):
        scaler.adjust(opt_state, jnp.asarray(True))
    with pytest.raises(TypeError, match=r"got tuple"):
        scaler.adjust((opt_state, optax.EmptyState()), jnp.asarray(True))


def test_verdicts_to_raise_for_may_be_an_iterator():
    with pytest.raises(jls.UnhealthyError):
        jls.health(opt_state, raise_if=iter(["no step"]))


def test_every_public_function_is_here():
    functions = {name for name, _ in inspect.getmembers(jls, inspect.isfunction)}
    functions -= {"__dir__", "__getattr__"}
    # A case "dynamic.adjust" is of the scaler, not of the function that makes it.
    cases = [case for case in CASES if not case.endswith(".adjust")]
    assert functions <= {case.split(".")[0] for case in cases}
