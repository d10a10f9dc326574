import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_rounding import NARROW, fates, float32_of_every_kind
from shared import both

import jls


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("headroom", [0, 4, 20])
def test_the_scale_is_the_largest_that_does_not_overflow(dtype, headroom):
    scales = [2.0**k for k in (-100, 0, 10, 100)]
    x = float32_of_every_kind(scales, dtype).view(np.float32)
    x = x[np.isfinite(x) & (x != 0)]
    suggest = jax.vmap(lambda g: jls.suggest_scale(g, headroom=headroom, dtype=dtype))
    eager, jitted = (np.asarray(f(jnp.asarray(x))) for f in (suggest, jax.jit(suggest)))
    np.testing.assert_array_equal(eager, jitted)
    assert eager.dtype == np.float32
    assert (np.frexp(eager)[0] == 0.5).all()
    room = eager.astype(np.float64) * 2.0**headroom
    overflows, next_overflows = (fates(x, s, dtype) == 4 for s in (room, 2 * room))
    lowest, highest = eager == 2.0**-126, eager == 2.0**126
    assert (~overflows | lowest).all()
    assert (next_overflows | highest).all()
    assert not lowest.all()
    assert not highest.all()


@pytest.mark.parametrize(
    ("largest", "headroom", "expected"),
    [
        (1.0, 4, 2.0**11),
        (1.0, 0, 2.0**15),
        (65519.0 / 2**15, 0, 2.0**15),  # rounds to the largest number
        (65520.0 / 2**15, 0, 2.0**14),  # a tie, to inf
        (1.0, 0.9, 2.0**15),  # 2**15.9 is 61147
        (1.0, 1.1, 2.0**14),
        (1e-45, 0, 2.0**126),
        (3e38, 126, 2.0**-126),
        (-8.0, 1, 2.0**11),
    ],
)
def test_the_scale_for_float16_is_that_of_the_definition(largest, headroom, expected):
    grads = jnp.array([0.0, largest, jnp.nan, jnp.inf, largest / 3], jnp.float32)
    for suggest in both(lambda g: jls.suggest_scale(g, headroom=headroom)):
        assert suggest(grads) == expected


@pytest.mark.parametrize(
    "grads",
    [
        {},
        None,
        7,
        optax.MaskedNode(),
        jax.random.key(0),
        jnp.zeros((3, 0)),
        [jnp.zeros(3), -0.0],
        jnp.array([jnp.nan, -jnp.inf, 0.0]),
    ],
)
def test_gradients_with_nothing_to_go_by_start_as_dynamic_does(grads):
    for suggest in both(jls.suggest_scale):
        assert suggest(grads) == jls.dynamic().init().loss_scale


def test_every_leaf_kind_counts_as_in_the_other_functions():
    for leaf, largest in [
        (jnp.float16(2**-24), 2.0**-24),
        (jnp.asarray(2.0**-16).astype(jnp.float8_e5m2), 2.0**-16),
        (jnp.array([1j * 2.0**-3], jnp.complex64), 2.0**-3),
        (0.25, 0.25),
        (np.ones((2, 2), np.float32), 1.0),
    ]:
        tree = {"a": leaf, "b": None, "n": jnp.int32(9), "z": jnp.zeros(2)}
        assert jls.suggest_scale(tree, headroom=0) == 2.0**15 / largest
    with jax.enable_x64(True):
        scale = jls.suggest_scale(jnp.array([2.0**-30, 1e-300], jnp.float64))
        assert (scale, scale.dtype) == (2.0**41, jnp.float32)


def test_it_sets_the_scale_of_a_running_job_without_a_retrace():
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    traces = []

    @jax.jit
    def recalibrate(state, grads):
        traces.append(None)
        return jls.set_loss_scale(state, jls.suggest_scale(grads))

    state = optimizer.init(jnp.ones(3))
    for exponent in (-30, 3, -8):
        state = recalibrate(state, jnp.full(3, 2.0**exponent))
        assert jls.loss_scale(state) == 2.0 ** (11 - exponent)
    assert len(traces) == 1
    by_hand = jls.set_loss_scale(state, jls.suggest_scale(jnp.ones(3)))
    assert jls.loss_scale(by_hand) == 2.0**11


def test_at_the_suggested_scale_nothing_overflows_and_one_growth_more_may():
    grads = {"w": jnp.array([1.5e-3, 7e-8]), "b": jnp.float32(-3e-5)}
    scale = jls.suggest_scale(grads, headroom=0)
    assert jls.underflow(scale, grads).total.overflowed.tolist()[:2] == [0.0, 0.0]
    assert jls.underflow(scale, grads).total.overflowed[2] > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"headroom": "4"}, TypeError, "headroom must be a real number, got str '4'"),
        ({"headroom": None}, TypeError, "headroom must be a real number"),
        ({"headroom": True}, TypeError, "headroom must be a real number"),
        ({"headroom": jnp.ones(())}, TypeError, "headroom must be .* Pass a Python"),
        ({"headroom": -1}, ValueError, "headroom must be from 0 to 126 .* got -1"),
        ({"headroom": float("nan")}, ValueError, "headroom must be .* got nan"),
        ({"headroom": 127}, ValueError, "headroom must be from 0 to 126 .* got 127"),
        (
            {"dtype": jnp.int16},
            TypeError,
            "dtype must be a floating-point .* got int16",
        ),
        ({"dtype": float}, ValueError, "dtype must be .* got float64"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        jls.suggest_scale(jnp.ones(2), **options)
