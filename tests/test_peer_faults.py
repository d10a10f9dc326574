# SPDX-License-Identifier: Apache-2.0
"""What went wrong in other loss scaling libraries does not go wrong here.

Policies, scaling and differentiation; the optimizer wrapper has its own file, and
sharded data are in sharded_program.py. Each test names its ids of peer_faults.py before
the colon of its docstring.
"""

import functools
import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import Partial
from peer_faults import IDS, NAN, NOT_APPLICABLE, ONE, W, either
from shared import assert_identical, run

import jls


def scales_of(scaler, all_finite):
    """The loss scale after each step, from one compiled scan."""

    def step(state, finite):
        state = scaler.adjust(state, finite)
        return state, state.loss_scale

    flags = jnp.asarray(all_finite)
    return jax.jit(lambda: lax.scan(step, scaler.init(), flags)[1])().tolist()


def test_every_fault_is_tested_or_cannot_apply():
    cited = set()
    for name in (
        "test_peer_faults",
        "test_peer_faults_optimizer",
        "devices/test_shard_map",
    ):
        text = Path(__file__).parent.joinpath(f"{name}.py").read_text()
        for ids in re.findall(r'^    """([^:"\n]+): ', text, re.MULTILINE):
            cited.update(re.findall(r"\b[A-Z]\d+[a-d]?\b", ids))
    assert cited | set(NOT_APPLICABLE) == set(IDS.split())
    assert not cited & set(NOT_APPLICABLE)


# Policies ----------------------------------------------------------------------------


def _through_scan(scaler):
    return lax.scan(lambda s, _: (s, None), scaler, length=2)[0]


def _through_vmap(scaler):
    members = jax.vmap(lambda _: jax.tree.map(jnp.asarray, scaler))(jnp.arange(2))
    return jax.tree.map(lambda x: x[1], members)


TRIPS = {
    "jit": jax.jit(lambda scaler: scaler),
    "tree_map": lambda scaler: jax.tree.map(lambda x: x, scaler),
    "scan": _through_scan,
    "vmap": _through_vmap,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_policy_keeps_its_bounds_through_a_pytree_round_trip(trip):
    """jmp J1, J1b, R9: the floor went back to 1 and an overflow raised the scale."""
    bounded = jls.dynamic(8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    assert scales_of(trip(bounded), [False] * 3) == [4.0, 4.0, 4.0]
    assert scales_of(trip(bounded), [True] * 2) == [16.0, 16.0]
    assert scales_of(trip(jls.dynamic(0.25, min_scale=2.0**-10)), [False]) == [0.125]


@either
@pytest.mark.parametrize("number", [jnp.float16, np.float16, float, int])
def test_policy_takes_a_first_scale_of_any_type(jit, number):
    """jmp J2, R9: DynamicLossScale(float16(2**15)) could not adjust."""
    scaler = jls.dynamic(number(2**15), growth_interval=1)
    state = jit(scaler.adjust)(scaler.init(), jnp.asarray(True))
    assert state.loss_scale == 2.0**16
    assert state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("flag", [True, np.True_, jnp.array(True), np.array(True)])
def test_adjust_takes_any_boolean(flag):
    """jmp J9: adjust(True) was an AttributeError."""
    scaler = jls.dynamic(8.0, growth_interval=1)
    assert scaler.adjust(scaler.init(), flag).loss_scale == 16.0


@pytest.mark.parametrize("scaler", [jls.dynamic(8.0, growth_interval=2)])
def test_policy_and_state_can_be_lowered_and_mapped_to_anything(scaler):
    """jmp J6, J13, M4: checks inside tree_unflatten refused AOT, None and specs."""

    def adjust(scaler, state, finite):
        return scaler.adjust(state, finite)

    args = scaler, scaler.init(), jnp.asarray(False)
    compiled = jax.jit(adjust).lower(*args).compile()
    assert compiled(*args).loss_scale == 4.0
    assert jax.eval_shape(adjust, *args).loss_scale.dtype == jnp.float32
    assert jax.tree.leaves(jax.tree.map(lambda _: None, args)) == []
    specs = jax.tree.map(lambda _: PartitionSpec(), args)
    assert set(jax.tree.leaves(specs)) == {PartitionSpec()}


@pytest.mark.parametrize("make", [jls.static, lambda s: jls.dynamic(s, min_scale=0.5)])
def test_new_hyperparameters_do_not_retrace(make):
    """jmp J7, J7b, M4: a static scale compiled once per value."""
    traces = []

    @jax.jit
    def first(scaler, x):
        traces.append(None)
        return jls.scale(scaler.init(), x)

    x = jnp.float32(1.5)
    assert isinstance(make(2.0).init, Partial)
    for value in (2.0, 4.0, 8.0):
        assert first(make(value), x) == 1.5 * value
    assert len(traces) == 1
    assert first(make(jnp.float32(16.0)), x) == 24.0


@pytest.mark.parametrize("loss_scale", [2.0**127, 2.0**-127, float("inf")])
def test_scale_with_a_subnormal_reciprocal_is_refused(loss_scale):
    """jmp J10, X2, X3: 1 / 2**127 is flushed to zero, and gradients with it."""
    with pytest.raises(ValueError, match=r"from 2\*\*-126 to 2\*\*126"):
        jls.static(loss_scale)
    with pytest.raises(ValueError, match=r"from 2\*\*-126 to 2\*\*126"):
        jls.dynamic(8.0, min_scale=2.0**-126, max_scale=loss_scale)
    if loss_scale > 1.0:
        with pytest.raises(ValueError, match=r"to 2\*\*126"):
            jls.set_loss_scale(jls.static(8.0).init(), loss_scale)


def test_scale_grows_on_the_last_step_of_the_interval():
    """flax F2, R3: grew after growth_interval + 1 finite steps."""
    scaler = jls.dynamic(4.0, growth_interval=3)
    assert scales_of(scaler, [True] * 6) == [4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_scale_stays_at_its_floor_and_comes_back():
    """flax F4, K2: 142 NaN steps took the scale to 1e-38, or to 0."""
    scaler = jls.dynamic(2.0**16, growth_interval=1, min_scale=0.5)
    scales = scales_of(scaler, [False] * 142 + [True] * 2)
    assert scales[17:] == [0.5] * 125 + [1.0, 2.0]


def test_scale_stays_at_its_cap():
    """Keras K1: grew to inf, and inf / 2 is inf."""
    scaler = jls.dynamic(2.0**125, growth_interval=1, max_scale=2.0**126)
    assert scales_of(scaler, [True] * 4 + [False]) == [2.0**126] * 4 + [2.0**125]


def test_scale_stays_a_power_of_two():
    """MPX M2: clipped to 65504, it never was one again."""
    scaler = jls.dynamic(2.0**14, growth_interval=1)
    scales = scales_of(scaler, [True] * 12 + [False] * 12)
    assert set(np.log2(scales)) <= set(range(25))
    assert max(scales) == 2.0**24


def test_policy_may_be_fixed_and_have_any_factors():
    """Keras K4: no fixed scale, no other factor than 2, no bounds."""
    assert scales_of(jls.static(8.0), [True, False]) == [8.0, 8.0]
    scaler = jls.dynamic(
        16.0, growth_factor=8.0, backoff_factor=0.25, growth_interval=1
    )
    assert scales_of(scaler, [True, False]) == [128.0, 32.0]


def test_each_member_of_a_vmap_has_its_own_scale():
    """jmp J14, F12: a control that worked."""
    scaler = jls.dynamic(4.0, growth_interval=1)
    states = jax.vmap(lambda _: scaler.init())(jnp.arange(3))
    finite = jnp.array([False, False, True])
    assert jax.vmap(scaler.adjust)(states, finite).loss_scale.tolist() == [
        2.0,
        2.0,
        8.0,
    ]
    with pytest.raises(ValueError, match=r"got shape \(3,\).*jax.vmap"):
        jls.scale(states, jnp.float32(1.0))


# Scaling -----------------------------------------------------------------------------


@either
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_unscale_keeps_small_half_precision_gradients(jit, dtype):
    """jmp J3: float16 gradients divided in float16 became zero."""
    state = jls.static(2.0**15).init()
    grads = jnp.array([2.0**-10, 2.0**-14], dtype)
    assert_identical(jit(jls.unscale)(state, grads), jnp.array([2.0**-25, 2.0**-29]))


@either
def test_scale_is_computed_in_float32(jit):
    """jmp J4, M3: the scale or the loss in float16 made inf or 0 of the product."""
    with pytest.warns(UserWarning, match="the loss is float16"):
        scaled = jit(jls.scale)(jls.static(2.0**16).init(), jnp.float16(1.0))
    assert_identical(scaled, jnp.float32(2.0**16))
    tiny = jls.scale(jls.static(2.0**-26).init(), jnp.float32(1.0))
    assert tiny == 2.0**-26


def test_a_half_precision_loss_warns_and_a_float32_one_has_its_gradient():
    """jmp J4b: the cotangent of a float16 loss is the scale cast to float16, inf."""
    state = jls.static(2.0**16).init()
    w = jnp.float16(1.0)
    with pytest.warns(UserWarning, match="Reduce the loss in float32"):
        jls.grad(lambda w: w * jnp.float16(2.0**-8))(state, w)
    loss, grads = jls.value_and_grad(lambda w: w.astype(jnp.float32) / 256)(state, w)
    assert loss == grads == 2.0**-8


LEAVES = {
    "int": jnp.int32(3),
    "python int": 3,
    "bool": jnp.array(True),
    "key": jax.random.key(3),
    "float0": np.zeros(2, jax.dtypes.float0),
    "None": None,
    "function": jax.nn.relu,
    "string": "relu",
    "MaskedNode": optax.MaskedNode(),
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_leaf_that_is_not_floating_point_passes_untouched(leaf):
    """jmp J8, J8b, J8c, J8d, M5, O4: such leaves became floats or raised."""
    state = jls.dynamic(8.0).init()
    tree = {"leaf": leaf, "w": W}
    for function, w in ((jls.scale, 8 * W), (jls.unscale, W / 8)):
        result = function(state, tree)
        assert result["leaf"] is leaf or result["leaf"] == leaf == ()
        assert_identical(result["w"], w)
    assert jls.all_finite(tree)
    assert jls.select(False, tree, {"leaf": leaf, "w": ONE})["w"].tolist() == [1.0, 1.0]

    optimizer = jls.loss_scaled(optax.identity(), jls.dynamic(8.0))
    opt_state = optimizer.init(tree)
    for w, applied in ((W, True), (NAN, False)):
        updates, opt_state = optimizer.update({"leaf": leaf, "w": w}, opt_state, tree)
        assert opt_state.applied == applied
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert updates["w"].tolist() == (w.tolist() if applied else [0.0, 0.0])


def test_select_refuses_leaves_of_two_dtypes_by_name():
    """jmp J8d: select_tree on bfloat16 and float32 was an error inside lax."""
    with pytest.raises(ValueError, match=r"at '\['w'\]' must have the same dtype"):
        jls.select(True, {"w": W}, {"w": W.astype(jnp.bfloat16)})


@either
@pytest.mark.parametrize("exponent", [-126, -9, 1, 15, 24, 100, 126])
def test_scaling_by_a_power_of_two_is_exact_in_any_fusion(jit, exponent):
    """jmp J10, J11b, X1, X2: division rounded or not, by what XLA fused it with."""
    state = jls.static(2.0**exponent).init()
    x = jax.random.uniform(jax.random.key(0), 1000, minval=1.0, maxval=2.0)
    assert_identical(jit(lambda s, x: jls.unscale(s, jls.scale(s, x)))(state, x), x)
    quotient = jit(jls.unscale)(state, x)
    assert_identical(np.asarray(quotient), np.ldexp(np.asarray(x), -exponent))


@either
def test_complex_leaves_keep_their_imaginary_part(jit):
    """flax F5: cast to float32, gradients lost it."""
    z = jnp.array([2 + 3j, -1 + 0.5j], jnp.complex64)

    def loss_fn(z):
        return jnp.sum(jnp.real(z) * 3 + jnp.imag(z) ** 2)

    state = jls.dynamic(2.0**10).init()
    assert_identical(jit(jls.grad(loss_fn))(state, z), jax.grad(loss_fn)(z))
    assert not jls.all_finite(z + jnp.complex64(complex(0, np.inf)))


def test_float64_leaves_are_not_narrowed():
    """flax F14: cast to float32, a finite 1e300 was an overflow."""
    with jax.enable_x64(True):
        w = jnp.full(2, 1e300, jnp.float64)
        grads = jls.unscale(jls.dynamic(8.0).init(), w)
        assert grads.dtype == jnp.float64
        assert grads.tolist() == [1.25e299] * 2
        _, state = run(jls.loss_scaled(optax.sgd(1.0), jls.dynamic(8.0)), w, [w])
        assert state.applied
        assert state.scaler_state.loss_scale.dtype == jnp.float32


# Differentiation ---------------------------------------------------------------------


@either
def test_loss_is_the_true_one_when_the_scaled_one_overflows(jit):
    """flax F3: its own example returned inf / inf, NaN, as the loss."""
    state = jls.dynamic(2.0**100, max_scale=2.0**126).init()
    differentiate = jls.value_and_grad(lambda w: w * jnp.float32(1e30))
    loss, grads = jit(differentiate)(state, jnp.float32(2.0))
    assert loss == jnp.float32(2e30)
    assert not jls.all_finite(grads)


def test_keyword_arguments_reach_the_loss_function():
    """flax F6: unexpected keyword argument."""
    differentiate = jls.value_and_grad(lambda w, *, k: jnp.sum(w * k))
    loss, grads = differentiate(jls.dynamic(8.0).init(), W, k=jnp.float32(3.0))
    assert loss == -3.0
    assert grads.tolist() == [3.0, 3.0]


def test_scale_gives_back_a_gradient_that_is_a_next_value():
    """flax F7: the float8 layers overwrite a leaf with its "gradient", as it is."""

    @jax.custom_vjp
    def layer(x, history):
        return x

    layer.defvjp(lambda x, h: (x, None), lambda _, g: (g, jnp.full(3, 896.0)))
    state = jls.dynamic(1024.0).init()
    loss_fn = jls.grad(lambda w, h: jnp.sum(layer(w, h)), argnums=(0, 1))
    grads, history = loss_fn(state, W, jnp.zeros(3))
    assert grads.tolist() == [1.0, 1.0]
    assert jls.scale(state, history).tolist() == [896.0] * 3


def test_integer_and_empty_parameters_can_be_differentiated():
    """flax F8, F9: allow_int was out of reach."""
    transform = functools.partial(jax.value_and_grad, allow_int=True)
    params = {"w": W, "n": jnp.int32(2), "none": None}
    differentiate = jls.grad(lambda p: jnp.sum(p["w"] ** 2), transform=transform)
    grads = differentiate(jls.dynamic(8.0).init(), params)
    assert grads["w"].tolist() == [2.0, -4.0]
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["none"] is None


@either
def test_gradients_are_true_on_steps_that_move_the_scale(jit):
    """MPX M1: unscaled with the scale of the next step."""
    scaler = jls.dynamic(8.0, growth_interval=2)
    optimizer = jls.loss_scaled(optax.sgd(0.0), scaler)

    @jit
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
