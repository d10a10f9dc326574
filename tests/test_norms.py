import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import assert_close

from jls._guard import ones_unless
from jls._norms import global_norm, norm_of_step


def rejected(tree):
    seen = ones_unless(jnp.asarray(False), tree)
    return norm_of_step(tree, seen, False)


NORMS = [
    global_norm,
    jax.jit(global_norm),
    jax.jit(lambda tree: norm_of_step(tree, tree, True)),
    jax.jit(rejected),
]
NAMES = ["eager", "jit", "kept", "rejected"]


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
@pytest.mark.parametrize("exponent", [-58, -10, 0, 30, 63, 64, 100, 126])
def test_global_norm_is_right_wherever_float32_can_hold_it(norm, exponent):
    tree = {
        "a": jnp.array([3.0, -4.0]) * 2.0 ** (exponent - 3),
        "b": jnp.full((2, 3), 0.5) * 2.0 ** (exponent - 3),
        "none": None,
        "key": jax.random.key(0),
        "count": jnp.int32(7),
    }
    expected = np.float32(np.sqrt(25 + 6 * 0.25) * 2.0 ** (exponent - 3))
    assert_close(norm(tree), expected, rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
def test_global_norm_of_narrow_and_complex_leaves_is_taken_in_float32(norm):
    # 300**2 is inf in float16; optax.global_norm of this is.
    assert norm(jnp.full(4, 300, jnp.float16)) == 600.0
    assert norm([jnp.array([3e30 + 4e30j], jnp.complex64)]) == np.float32(5e30)
    assert norm(jnp.array([3, 4], jnp.float8_e4m3fn)) == 5.0


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
def test_global_norm_says_when_a_leaf_is_not_finite(norm):
    assert norm([jnp.ones(2), jnp.array([jnp.inf, 1.0])]) == jnp.inf
    assert jnp.isnan(norm([jnp.array([jnp.nan, jnp.inf])]))
    assert norm([]) == 0.0


def test_global_norm_of_float64_is_a_float32():
    with jax.enable_x64(True):
        norm = global_norm([jnp.array([3e30, 4e30], jnp.float64), jnp.zeros(2)])
    assert norm.dtype == jnp.float32
    assert_close(norm, np.float32(5e30), rtol=1e-6)
