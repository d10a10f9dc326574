"""Random trees and numbers: what jls computes is what numpy computes, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from shared import assert_identical

import jls

pytestmark = pytest.mark.filterwarnings("ignore:the loss is float16")

few = settings(max_examples=50, deadline=None, derandomize=True, database=None)

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [*FLOATS, "complex64", "int32", "bool"]
NUMBERS = [0.0, -0.0, 1.0, -2.5, 3e-40, 1e-30, 65504.0, 3e38, np.nan, np.inf, -np.inf]
GOOD = NUMBERS[:8]
TINY = np.finfo(np.float32).tiny


@st.composite
def arrays(draw, numbers):
    dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    size = int(np.prod(shape))
    drawn = draw(st.lists(st.sampled_from(numbers), min_size=size, max_size=size))
    values = np.array(drawn, np.float32).reshape(shape)
    if dtype == jnp.int32:
        values = np.nan_to_num(values, posinf=7, neginf=-7).clip(-9, 9)
    with np.errstate(over="ignore"):
        array = values.astype(dtype)
    return array if draw(st.booleans()) else jnp.asarray(array)


def leaves_of(numbers):
    others = [7, True, 1.5, None, "text", len, jax.random.key(3)]
    return st.one_of(arrays(numbers), st.sampled_from(others))


def trees(numbers=NUMBERS):
    # A second choice for the leaves alone, or half of the trees have only one.
    names = st.sampled_from(["a", "b", "c/d"])
    containers = st.one_of(
        st.lists(leaves_of(numbers), max_size=4),
        st.dictionaries(names, leaves_of(numbers), min_size=1),
    )
    return st.recursive(
        st.one_of(leaves_of(numbers), containers),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(names, inner),
        ),
        max_leaves=4,
    )


def has_floats(tree):
    leaves = jax.tree.leaves(tree)
    return tree is not None and (not leaves or any(map(is_number, leaves)))


def is_number(leaf):
    """Whether it is real or complex floating point, to numpy."""
    if isinstance(leaf, float):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and any(dtype == d for d in (*FLOATS, "complex64"))


def parts(leaf):
    """The real numbers in a floating-point leaf, as float32."""
    array = np.asarray(leaf)
    if np.iscomplexobj(array):
        return np.stack([array.real, array.imag]).ravel()
    return array.astype(np.float32).ravel()


def numbers_in(tree):
    found = [parts(leaf) for leaf in jax.tree.leaves(tree) if is_number(leaf)]
    return np.concatenate([np.zeros(0, np.float32), *found])


def flushed(values):
    """Subnormal numbers as the zeros that XLA may make of them."""
    values = np.asarray(values, np.float32)
    return np.where(np.abs(values) < TINY, np.float32(0), values)


@few
@given(trees())
@example([np.full(3, 3e38, np.float32)])  # its sum is inf
def test_all_finite(tree):
    leaves = jax.tree.leaves(tree)
    assume(not leaves or not all(isinstance(x, str) for x in leaves))
    assert jls.all_finite(tree) == np.isfinite(numbers_in(tree)).all()


def one_nan(leaf):
    """`leaf` with a single kind of NaN: XLA keeps no others in some narrow dtypes."""
    array = np.array(leaf)
    if is_number(leaf) and array.dtype != jnp.complex64:
        array[np.isnan(array.astype(np.float32))] = np.nan
    return array


@few
@given(trees(), st.booleans(), st.data())
def test_select_is_bitwise(tree, pred, data):
    leaves, structure = jax.tree.flatten(tree)

    def other(leaf):
        if not hasattr(leaf, "dtype") or leaf.dtype == jax.random.key(0).dtype:
            return leaf
        fresh = np.resize(np.arange(5.0), leaf.shape).astype(leaf.dtype)
        return data.draw(st.sampled_from([leaf, fresh]))

    others = [other(leaf) for leaf in leaves]
    chosen = jls.select(pred, tree, structure.unflatten(others))
    expected = leaves if pred else others
    for got, leaf in zip(jax.tree.leaves(chosen), expected, strict=True):
        if isinstance(leaf, jax.Array) and leaf.dtype == jax.random.key(0).dtype:
            assert (jax.random.key_data(got) == jax.random.key_data(leaf)).all()
        elif hasattr(leaf, "dtype"):
            assert_identical(one_nan(got), one_nan(leaf))
        else:
            assert got == leaf


@few
@given(trees(), st.integers(-20, 20), st.sampled_from(["scale", "unscale"]))
def test_scale_and_unscale(tree, exponent, name):
    assume(name == "unscale" or has_floats(tree))
    state = jls.static(2.0**exponent).init()
    result = getattr(jls, name)(state, tree)
    factor = np.float32(2.0 ** (exponent if name == "scale" else -exponent))
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True)
    for got, leaf in pairs:
        if not is_number(leaf):
            assert got is leaf
            continue
        assert got.dtype in (jnp.float32, jnp.complex64)
        assert got.shape == np.shape(leaf)
        with np.errstate(over="ignore"):
            expected = flushed(parts(leaf)) * factor
        np.testing.assert_array_equal(flushed(parts(got)), flushed(expected))


@few
@given(trees(GOOD), st.integers(-3, 3))
def test_unscale_takes_scale_back(tree, exponent):
    assume(has_floats(tree))
    state = jls.static(2.0**exponent).init()
    again = jls.unscale(state, jls.scale(state, tree))
    before = numbers_in(tree)
    fits = (np.abs(before) < 1e37) & (np.abs(before) > 1e-36) | (before == 0)
    np.testing.assert_array_equal(numbers_in(again)[fits], before[fits])


@jax.jit
def scales(scaler, flags):
    def step(state, flag):
        state = scaler.adjust(state, flag)
        return state, state.loss_scale

    return jax.lax.scan(step, scaler.init(), flags)[1]


@few
@given(
    st.sampled_from([jls.dynamic, jls.hysteresis]),
    st.lists(st.floats(-126, 126), min_size=3, max_size=3).map(sorted),
    st.floats(1.001, 64.0),
    st.floats(0.01, 0.999),
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_scale_stays_within_any_bounds_and_moves_the_right_way(
    make, exponents, growth_factor, backoff_factor, growth_interval, flags
):
    low, first, high = (float(np.float32(2.0**e)) for e in exponents)
    scaler = make(
        first,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=low,
        max_scale=high,
    )
    after = np.asarray(scales(scaler, np.array(flags)))
    before = np.concatenate([[first], after[:-1]])
    assert ((after >= low) & (after <= high)).all()
    assert (after <= before)[~np.array(flags)].all()
    assert (after >= before)[np.array(flags)].all()
