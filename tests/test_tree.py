import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import both

import jls

FLOATS = [
    jnp.float16,
    jnp.bfloat16,
    jnp.float32,
    jnp.complex64,
    jnp.float8_e5m2,
    jnp.float8_e4m3fn,
]


def bits(x):
    return np.asarray(x).tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite_sees_one_bad_element_of_any_float_dtype(dtype):
    good = jnp.ones((2, 3), dtype)
    bad = good.at[1, 2].set(jnp.asarray(jnp.nan).astype(dtype))
    for all_finite in both(jls.all_finite):
        assert all_finite({"a": good, "b": [good]})
        assert not all_finite({"a": good, "b": [bad]})


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_all_finite_sees_inf_and_nan_of_either_part(value):
    for all_finite in both(jls.all_finite):
        assert not all_finite(jnp.array([1.0, value]))
        assert not all_finite(jax.lax.complex(jnp.float32(1.0), jnp.float32(value)))


def test_all_finite_never_sums():
    for all_finite in both(jls.all_finite):
        assert all_finite(jnp.full(1000, 3e38))
        assert all_finite(jnp.full(1000, 65504.0, jnp.float16))


def test_all_finite_of_python_numbers():
    assert jls.all_finite([1.5, 2j, 7, True])
    assert not jls.all_finite([1.5, float("nan")])
    assert not jls.all_finite(complex(1.0, float("inf")))


@pytest.mark.parametrize("tree", [None, [], {}, (None, {"a": []}), optax.MaskedNode()])
def test_an_empty_tree_is_finite(tree):
    assert jls.all_finite(tree)


def test_all_finite_sees_float64():
    with jax.enable_x64(True):
        assert jls.all_finite(jnp.float64(1e300))
        assert not jls.all_finite(jnp.array([1.0, jnp.nan], jnp.float64))


@pytest.mark.parametrize("axis_name", ["i", ("i",), ("i", "j")])
def test_all_finite_agrees_over_an_axis(axis_name):
    values = jnp.ones((2, 3)).at[0, 1].set(jnp.inf)

    def flags(values, axis_name):
        finite = functools.partial(jls.all_finite, axis_name=axis_name)
        return jax.vmap(jax.vmap(finite, axis_name="i"), axis_name="j")(values)

    expected = [[False] * 3, [("j" not in axis_name)] * 3]
    assert flags(values, axis_name).tolist() == expected
    assert flags(values, None).tolist() == [[True, False, True], [True] * 3]


def test_unbound_axis_is_named():
    for axis_name in ("no_such_axis", ("i", "no_such_axis")):
        finite = functools.partial(jls.all_finite, axis_name=axis_name)
        with pytest.raises(NameError, match="axis_name 'no_such_axis' is not bound"):
            jax.vmap(finite, axis_name="i")(jnp.ones(2))


@pytest.mark.parametrize("axis_name", [["i"], 0, ("i", 1)])
def test_axis_name_of_another_type_is_a_type_error(axis_name):
    with pytest.raises(TypeError, match="axis_name must be a str, a tuple of str or"):
        jls.all_finite(jnp.ones(2), axis_name=axis_name)


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), "device"])
def test_select_takes_python_numpy_and_device_predicates(pred):
    pred = jnp.asarray(True) if isinstance(pred, str) else pred
    assert jls.select(pred, {"a": jnp.float32(2.0)}, {"a": jnp.float32(3.0)})["a"] == 2


def test_select_is_bitwise_and_keeps_subnormals_and_minus_zero():
    odd = jnp.array([1e-45, -0.0, jnp.nan, -jnp.inf], jnp.float32)
    for select in both(jls.select):
        for pred in (True, False):
            trees = (odd, jnp.zeros(4)) if pred else (jnp.zeros(4), odd)
            assert bits(select(jnp.asarray(pred), *trees)) == bits(odd)


@pytest.mark.parametrize("dtype", [*FLOATS, jnp.int8, jnp.uint32, jnp.bool_])
def test_select_keeps_every_dtype(dtype):
    new, old = jnp.ones(3, dtype), jnp.zeros(3, dtype)
    for select in both(jls.select):
        chosen = select(jnp.asarray(False), new, old)
        assert (chosen.dtype, bits(chosen)) == (old.dtype, bits(old))


def test_select_carries_none_static_keys_and_float0():
    key, other = jax.random.key(1), jax.random.key(2)
    float0 = np.zeros(2, jax.dtypes.float0)
    new = {"n": None, "f": jnp.tanh, "s": "relu", "k": key, "z": float0, "i": 3}
    old = {"n": None, "f": jnp.tanh, "s": "relu", "k": other, "z": float0, "i": 4}
    chosen = jls.select(False, new, old)
    assert (chosen["n"], chosen["f"], chosen["s"]) == (None, jnp.tanh, "relu")
    assert jnp.array_equal(jax.random.key_data(chosen["k"]), jax.random.key_data(other))
    assert chosen["z"] is float0
    assert chosen["i"] == 4


def test_select_gives_a_python_number_the_dtype_of_the_other():
    chosen = jls.select(True, {"step": 0}, {"step": jnp.int32(5)})
    assert (chosen["step"], chosen["step"].dtype) == (0, jnp.int32)


def test_select_works_under_vmap():
    chosen = jax.vmap(jls.select)(jnp.array([True, False]), jnp.ones(2), jnp.zeros(2))
    assert chosen.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("pred", "error"),
    [(1, TypeError), (None, TypeError), (jnp.ones(2, bool), ValueError)],
)
def test_select_refuses_what_is_no_predicate(pred, error):
    with pytest.raises(error, match="pred must be"):
        jls.select(pred, jnp.ones(2), jnp.zeros(2))


@pytest.mark.parametrize(
    ("number", "array"),
    [
        (0.5, jnp.int32(1)),
        (True, jnp.int32(1)),
        (1, jnp.asarray(True)),
        (2j, jnp.float32(1.0)),
        (1, 2.0),
    ],
)
def test_select_never_rounds_a_python_number(number, array):
    if not isinstance(array, float):
        with pytest.raises(ValueError, match=r"same dtype, got .*Python"):
            jls.select(True, number, array)
    assert jls.select(True, 1, jnp.float32(2.0)) == 1.0
    assert jls.select(True, 2, 3).dtype == jnp.int32


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, "must have the same structure"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"'\['a'\]' must have the same shape"),
        (
            {"a": jnp.ones(2)},
            {"a": jnp.ones(2, jnp.bfloat16)},
            r"'\['a'\]' must have the same dtype, got float32 and bfloat16",
        ),
        ({"a": "relu"}, {"a": "tanh"}, r"'\['a'\]' are no arrays and differ: 'relu'"),
    ],
)
def test_select_refuses_trees_that_differ(new, old, message):
    with pytest.raises(ValueError, match=message):
        jls.select(True, new, old)
