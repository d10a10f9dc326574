import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_rounding import FATES, NARROW, fates, float32_of_every_kind

from jls._bits import magnitudes, normalized, rounding_boundaries, scaled_boundary


@pytest.mark.parametrize("dtype", NARROW)
def test_the_reference_rounds_as_numpy_does(dtype):
    x = float32_of_every_kind([1.0], dtype).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        cast = x.astype(dtype).astype(np.float64)
    fate = np.array([*FATES, "normal"])[fates(x, 1.0, dtype)]
    finite = np.isfinite(x)
    assert (np.isfinite(cast[finite]) == (fate[finite] != "overflowed")).all()
    assert ((cast == 0) == np.isin(fate, ["zero", "vanished"])).all()
    smallest = float(jnp.finfo(dtype).smallest_normal)
    is_subnormal = (np.abs(cast) < smallest) & (cast != 0)
    assert (is_subnormal == (fate == "subnormal")).all()


def test_edges_of_float16_are_those_that_everybody_knows():
    nonzero, normal, overflow = rounding_boundaries(jnp.float16)
    assert nonzero == (2.0**-25, True)
    assert normal == (2.0**-14 - 2.0**-25, False)
    assert overflow == (65520.0, False)
    assert rounding_boundaries(jnp.float8_e4m3fn).overflow == (464.0, True)


@pytest.mark.parametrize("scale", [1.0, 2.0**15, 3.0, 1e-30, 65504.0, 2.0**126])
def test_cuts_in_float32_are_those_of_numpy(jit_or_eager, scale):
    scale = np.float32(scale)
    with np.errstate(over="ignore", under="ignore"):
        for boundary in rounding_boundaries(jnp.float32):
            cut = jit_or_eager(
                lambda s, boundary=boundary: scaled_boundary(boundary, s)
            )
            first = int(cut(jnp.asarray(scale)))
            pair = np.array([first - 1, first], np.uint32).view(np.float32)
            below, past = pair.astype(np.float64) * np.float64(scale)
            is_past = past >= boundary.value and not (
                boundary.ties_below and past == boundary.value
            )
            assert is_past
            assert below <= boundary.value
            assert boundary.ties_below or below < boundary.value


def test_normalized_gives_significand_and_exponent_of_subnormals_too(jit_or_eager):
    x = float32_of_every_kind([1.0], jnp.float16).view(np.float32)
    x = np.abs(x[np.isfinite(x) & (x != 0)])
    fraction, exponent = np.frexp(x.astype(np.float64))
    function = jit_or_eager(normalized)
    significand, leading = function(jnp.asarray(x.view(np.uint32)))
    np.testing.assert_array_equal(significand, fraction * 2.0**24)
    np.testing.assert_array_equal(leading, exponent - 1)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2])
def test_magnitudes_of_narrow_leaves_keep_subnormals(dtype):
    patterns = np.arange(256, dtype=np.uint8)
    if jnp.dtype(dtype).itemsize == 2:
        patterns = np.arange(2**16, dtype=np.uint16)
    narrow = patterns.view(dtype)
    with np.errstate(invalid="ignore"):
        expected = np.abs(narrow.astype(np.float32)).view(np.uint32)
    (ours,) = magnitudes(jnp.asarray(narrow))
    finite = np.isfinite(narrow.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(ours)[finite], expected[finite])
    assert (np.asarray(ours)[~finite] >= 0x7F800000).all()


def test_magnitudes_of_float64_stay_within_float32():
    with jax.enable_x64(True):
        values = [0.0, 1e-300, -1.5, 1e300, np.inf, np.nan, 1e-39]
        (ours,) = magnitudes(jnp.array(values, jnp.float64))
    assert ours.dtype == jnp.uint32
    largest, inf = 0x7F7FFFFF, 0x7F800000
    assert ours.tolist() == [0, 1, 0x3FC00000, largest, inf, inf, 1]


@pytest.mark.parametrize(
    ("dtype", "error", "got"),
    [
        (jnp.int32, TypeError, "int32"),
        ("no dtype", TypeError, "'no dtype'"),
        (None, TypeError, "None"),
        (jnp.complex64, TypeError, "complex64"),
        (jnp.float64, ValueError, "float64"),
        (jnp.float8_e8m0fnu, ValueError, "float8_e8m0fnu"),
        (jnp.float4_e2m1fn, ValueError, "float4_e2m1fn"),
    ],
)
def test_a_dtype_that_is_no_float_of_8_to_32_bits_is_refused(dtype, error, got):
    with pytest.raises(error, match=f"dtype must be a floating-point .* got {got}"):
        rounding_boundaries(dtype)
