"""A user's function: its arguments, its program, its loss scales and its scalers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jls
from jls._tools.origin.scalers import scalers_in
from jls._tools.reading.arguments import AUX, REPORT, items_of, take_apart, unbind
from jls._tools.reading.scales import is_switched_off, scales_in
from jls._tools.reading.trace import READS, trace

OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**7))
OTHER = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**9))
X = jnp.ones(3)


def arguments_of(fun, *args, **kwargs):
    return take_apart(fun, args, kwargs)


def paths(arguments):
    return ["/".join(item.path) for item in arguments.items]


def scales_of(*args, **kwargs):
    def fun(params, opt_state):
        pass

    return scales_in(args, kwargs, take_apart(fun, args, kwargs))


# Arguments.


def test_arguments_are_called_as_the_function_calls_them():
    def fun(params, /, batch, *more, rate):
        pass

    arguments = arguments_of(fun, {"w": X}, X, X, rate=0.1)
    assert paths(arguments) == ["params/w", "batch", "argument 2", "rate"]
    assert paths(arguments_of(jax.jit(fun), {"w": X}, X)) == ["params/w", "batch"]


class State(NamedTuple):
    """As the state of a training of Linen."""

    params: Any

    def apply_gradients(self):
        pass


def test_two_arguments_never_have_one_name():
    def step(*args):
        pass

    assert arguments_of(step, State(X), X).names == ["state", "batch"]
    names = arguments_of(step, State(X), State(X), X).names
    assert names == ["argument 0", "argument 1", "argument 2"]


def test_arguments_are_put_together_anew():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tree = {"table": np.ones(2)}

    def fun(model, tree):
        pass

    arguments = arguments_of(fun, model, tree)
    assert arguments.in_place == {"model"}
    call = arguments.rebuild([2 * x for x in arguments.leaves])
    assert call.args[0] is not model
    assert call.args[1] is not tree
    np.testing.assert_array_equal(call.args[1]["table"], 2.0)
    np.testing.assert_array_equal(call.args[0].kernel[...], 2 * model.kernel[...])
    call.args[0].kernel[...] = jnp.zeros((2, 1))
    read = {"/".join(item.path): item.value for item in call.read()}
    np.testing.assert_array_equal(read["model/kernel"], 0.0)
    assert np.any(model.kernel[...])


def test_objects_that_cached_partial_binds_are_arguments():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    @nnx.jit
    def fun(model, x):
        return model(x)

    step, bound = unbind(nnx.cached_partial(fun, model))
    assert [type(x) for x in bound] == [nnx.Linear]
    assert step(*bound, jnp.ones((1, 2))).shape == (1, 1)
    assert unbind(fun) == (fun, ())


def test_report_is_no_state():
    """Its loss scale has the name and the form of the state's."""
    report = jls.types.StepReport(*map(jnp.float32, range(14)))
    types = {"/".join(x.path): x.variable_type for x in items_of((report, {"w": X}))}
    assert types.pop("1/w") == ""
    assert types.pop("0/aux") == AUX
    assert len(types) == 13
    assert set(types.values()) == {REPORT}


# Programs.


def test_function_that_computes_with_numpy_is_traced_with_its_numbers():
    """And may change them in place: they are the caller's."""
    counts = np.arange(3)

    def fun(x, counts):
        counts += 1
        return x * float(np.sum(counts))

    traced = trace(fun, arguments_of(fun, X, counts))
    assert traced.inputs == [0]
    np.testing.assert_array_equal(counts, np.arange(3))


def test_function_that_reads_an_array_has_no_program():
    def fun(x):
        return x * float(x.sum())

    with pytest.raises(READS):
        trace(fun, arguments_of(fun, X))


def test_program_has_a_result_for_each_array():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def fun(model, x):
        model.bias[...] = model.bias[...] + 1
        return {"x": x, "text": "of the step", "number": 2}

    traced = trace(fun, arguments_of(fun, model, X))
    forms = {item.path: item.value for item in traced.outputs}
    assert forms["x",] == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert forms["text",] == "of the step"
    assert forms["number",] == 2
    assert {"/".join(x.path) for x in traced.objects} == {"model/kernel", "model/bias"}


def test_call_of_one_program_is_jitted():
    def fun(x):
        for _ in range(100):
            x = jnp.sin(x)
        return x

    assert not trace(fun, arguments_of(fun, X)).is_jitted
    assert trace(jax.jit(fun), arguments_of(fun, X)).is_jitted


# Loss scales.


def test_each_scale_has_the_counters_of_its_own_wrapper():
    state = OPTIMIZER.init(X)
    one, two = scales_of({"one": state, "two": state}, state.scaler_state)[:2]
    assert (one.name, two.name) == (
        "params/one/scaler_state",
        "params/two/scaler_state",
    )
    assert {"skips", "steps", "nonfinite_losses"} <= one.counters.keys()
    assert not one.own & two.own
    bare = scales_of({"one": state}, state.scaler_state)[1]
    assert bare.counters == {}
    assert bare.own == bare.state
    assert bare.path == ("opt_state",)


def test_count_beside_a_bare_scale_is_no_wrapper():
    run = {"scaler": jls.dynamic().init(), "steps": jnp.int32(0)}
    (scale,) = scales_of(run)
    assert scale.counters == {}
    assert scale.fields.keys() == {"loss_scale", "finite_count", "nonfinite_count"}


def nnx_optimizer(**options):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = jls.loss_scaled(optax.sgd(0.1), **options)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_scale_of_an_nnx_optimizer_is_found(split):
    optimizer = nnx_optimizer(spikes=jls.spikes())
    given = nnx.split(optimizer)[1] if split else optimizer
    (scale,) = scales_of(X, given)
    assert {"skips", "steps"} <= scale.counters.keys()
    assert scale.fields.keys() == {"loss_scale", "finite_count", "nonfinite_count"}
    assert scale.spikes.keys() == set(jls.types.SpikeState._fields)


def test_only_a_static_scale_of_1_is_switched_off():
    def is_off(scaler):
        leaves = scaler.init()
        (scale,) = scales_of(leaves)
        return is_switched_off(leaves.loss_scale, scale)

    assert is_off(jls.static(1.0))
    assert not is_off(jls.static(2.0))
    assert not is_off(jls.dynamic(1.0))


# Scalers.


def scales_held(step, *args):
    return sorted(float(x.init().loss_scale) for x in scalers_in(step, args))


def of_a_global(grads, state):
    return OPTIMIZER.update(grads, state)


def of_a_global_in_an_inner_function(grads, state):
    def update(grads):
        return OPTIMIZER.update(grads, state)

    return update(grads)


class Trainer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, grads, state):
        return self.optimizer.update(grads, state)


def in_a_closure(optimizer):
    return lambda grads, state: optimizer.update(grads, state)


def as_a_default(grads, state, *, optimizer=OPTIMIZER):
    return optimizer.update(grads, state)


STEPS = {
    "a global": of_a_global,
    "a global, in an inner function": of_a_global_in_an_inner_function,
    "a closure": in_a_closure(OPTIMIZER),
    "a closure of a jitted function": jax.jit(in_a_closure(OPTIMIZER)),
    "a method": Trainer(OPTIMIZER).step,
    "a default": as_a_default,
    "a partial": functools.partial(lambda optimizer, x: x, OPTIMIZER),
    "a chain": in_a_closure(optax.chain(optax.clip(1.0), OPTIMIZER)),
    "a dict": in_a_closure({"all": [OPTIMIZER]}),
}


@pytest.mark.parametrize("held", STEPS)
def test_scaler_that_a_step_holds_is_found(held):
    assert scales_held(STEPS[held]) == [2.0**7]


def test_scaler_that_a_step_does_not_hold_is_not_found():
    """`OTHER` is a global of this file that no step here reads."""
    assert scales_held(lambda x: x) == []
    assert scales_held(in_a_closure((OPTIMIZER, OTHER))) == [2.0**7, 2.0**9]


def test_each_scaler_is_found_once():
    assert scales_held(in_a_closure([OPTIMIZER, OPTIMIZER]), OPTIMIZER) == [2.0**7]
