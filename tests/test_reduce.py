"""One pass over the leaves, and over the devices: finite, norms and counts."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from excess import AS_WRITTEN_OR_ON_A_GPU
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from shared import FLOATS

import jls
from jls import _reduce
from jls._reduce import (
    _add_digits,
    count_true,
    finite_leaves,
    global_norm,
)
from jls._tree import floats_of, named_floats, roles_of

# all_finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("compiled", AS_WRITTEN_OR_ON_A_GPU)
@pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn]
)
def test_what_has_just_overflowed_is_not_finite(dtype, compiled, shape):
    largest = jnp.full(shape, jnp.finfo(dtype).max).astype(jnp.float32)

    def keep_finite(wide):
        new = wide.astype(dtype)
        is_finite = jls.all_finite(new)
        return is_finite, jls.select(is_finite, new, jnp.zeros_like(new))

    step = jax.jit(compiled(keep_finite))
    assert step(largest)[0]
    is_finite, kept = step(largest * (1.003 if dtype == jnp.bfloat16 else 1.5))
    assert not is_finite
    assert not np.any(np.asarray(kept, np.float32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite_sees_one_bad_element_of_any_float_dtype(jit_or_eager, dtype):
    good = jnp.ones((2, 3), dtype)
    bad = good.at[1, 2].set(jnp.asarray(jnp.nan).astype(dtype))
    all_finite = jit_or_eager(jls.all_finite)
    assert all_finite({"a": good, "b": [good]})
    assert not all_finite({"a": good, "b": [bad]})


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_all_finite_sees_inf_and_nan_of_either_part(jit_or_eager, value):
    all_finite = jit_or_eager(jls.all_finite)
    assert not all_finite(jnp.array([1.0, value]))
    assert not all_finite(jax.lax.complex(jnp.float32(1.0), jnp.float32(value)))


def test_all_finite_never_sums(jit_or_eager):
    all_finite = jit_or_eager(jls.all_finite)
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


def test_flags_cost_one_read(on_cpu):
    params = [jnp.ones((64, 64)) for _ in range(20)]
    compiled = jax.jit(finite_leaves).lower(params).compile()
    size = sum(leaf.nbytes for leaf in params)
    assert size <= compiled.cost_analysis()["bytes accessed"] <= size + 1024


def test_a_float64_beyond_float32_is_finite_by_each_platform():
    with jax.enable_x64(True):
        for form in FORMS.values():
            assert form([jnp.array([1e300, -1e300])]).tolist() == [True]
            assert form([jnp.array([1.0, -jnp.inf])]).tolist() == [False]


def test_all_finite_is_what_numpy_says(jit_or_eager):
    rng = np.random.default_rng(0)
    values = np.array([0.0, 1e-45, -1e-39, 1.0, 3e38, np.inf, -np.inf, np.nan])
    trees = rng.choice(values, (500, 4), p=[0.18] * 5 + [0.03, 0.03, 0.04])
    trees = trees.astype(np.float32)
    all_finite = jit_or_eager(jls.all_finite)
    found = [bool(all_finite(jnp.asarray(tree))) for tree in trees]
    assert found == np.isfinite(trees).all(axis=1).tolist()
    assert set(found) == {True, False}


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(65, 64), (100_000,), (10, 1000), (3, 3, 64, 64)])
def test_one_nan_among_many_is_seen(jit_or_eager, shape, dtype):
    """XLA's maximum on a CPU loses it."""
    many = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    all_finite = jit_or_eager(jls.all_finite)
    for place in (0, 1234, many.size - 1):
        bad = many.reshape(-1).at[place].set(jnp.nan).reshape(shape)
        assert not all_finite(bad)
        both = jnp.stack([many, bad])
        assert jax.vmap(jls.all_finite)(both).tolist() == [True, False]
    assert not jls.all_finite(jnp.full(shape, jnp.nan, dtype))
    assert jls.all_finite(many)


def test_devices_agree_under_shard_map():
    many = jnp.array([[1.0, -7.0], [2.0, jnp.nan]])
    mesh = Mesh(jax.devices()[:1], "i")
    check = jax.shard_map(
        lambda x: jls.all_finite(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    assert check(many[:1])
    assert not check(many)


FORMS = {
    "cpu": _reduce._CPU.finite,
    "tpu": _reduce._TPU.finite,
    "gpu": _reduce._on_gpu(()).finite,
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize("value", [2.5, 3e38, 1e-40, -jnp.inf, jnp.inf, jnp.nan])
def test_the_form_of_each_platform_tells_what_is_finite(form, value, jit_or_eager):
    """XLA for GPU and TPU cannot be run here, their programs can."""
    leaves = [
        jnp.array([[1.0, 0.0], [0.5, -1.0]]).at[1, 0].set(value),
        jnp.ones((2, 2)),
        jnp.ones(5, jnp.float16),
        jnp.array([1 + 1j, complex(0.0, value)], jnp.complex64),
        jnp.zeros((2, 2)),
        jnp.zeros((0, 3)),
        jnp.float32(value),
        jnp.ones(2**16 + 1).at[-1].set(value),
    ]
    finite = jit_or_eager(form)(leaves)
    ok = bool(np.isfinite(value))
    assert finite.tolist() == [ok, True, True, ok, True, True, ok, ok]


@forms
def test_a_product_that_overflows_is_never_taken_for_finite(form):
    """XLA turns (x * a) * b into x * (a * b): 1e30 * 1e10 is inf, times 2**-64 not."""
    x = [jnp.full(64, 1e30), jnp.full(64, 1e30)]
    for product in (
        lambda x: x * jnp.float32(1e10),
        lambda x: x * jnp.float32(2.0**34),
        lambda x: -x / jnp.float32(1e-10),
        lambda x: jnp.abs(x * jnp.float32(1e5)) * jnp.float32(1e5),
        lambda x: x * jnp.full(64, 1e10),
    ):
        assert not np.any(jax.jit(lambda x, f=product: form(list(map(f, x))))(x))


def test_small_leaves_of_one_type_are_reduced_together():
    leaves = [jnp.ones((2, 3)), jnp.ones(4)] * 40 + [jnp.ones(2**17)] * 2
    groups = _reduce._groups(leaves, ())
    assert sorted(i for group in groups for i in group) == list(range(82))
    assert sorted(map(len, groups)) == [1, 1, 8, 8, 32, 32]
    leaves[5] = leaves[5].at[0].set(jnp.nan)
    leaves[76] = leaves[76].at[1, 1].set(jnp.inf)
    finite = jax.jit(FORMS["gpu"])(leaves)
    assert np.flatnonzero(~np.asarray(finite)).tolist() == [5, 76]


def test_leaves_of_one_role_are_reduced_together_and_others_only_if_they_are_small():
    """Large ones may be sharded in another way, and XLA would move them."""
    layer = {"query": jnp.ones(2**17), "out": [jnp.ones(2**17)] * 2, "b": jnp.ones(3)}
    tree = {"layers": [layer] * 3, "first": jnp.ones(3), "last": jnp.ones(3)}
    names, _ = named_floats(tree)
    groups = _reduce._groups(floats_of(tree), roles_of(tree))
    assert [[names[i] for i in group] for group in groups] == [
        ["first", "last"],
        [f"layers/{i}/b" for i in range(3)],
        [f"layers/{i}/out/0" for i in range(3)],
        [f"layers/{i}/out/1" for i in range(3)],
        [f"layers/{i}/query" for i in range(3)],
    ]
    flat = {f"Dense_{i}": jnp.ones(2**17) for i in range(2)}
    assert len(_reduce._groups(floats_of(flat), roles_of(flat))) == 2


@pytest.mark.parametrize("name", _reduce.Reductions._fields)
@pytest.mark.parametrize("bad", [None, 4, 9])
def test_what_is_reduced_together_is_what_is_reduced_alone(name, bad):
    leaves = [jnp.arange(6.0).reshape(2, 3) * i for i in range(4)]
    leaves += [jnp.full(2**16 + 1, i, jnp.float16) for i in range(8)]
    if bad is not None:
        leaves[bad] = leaves[bad].at[1].set(jnp.nan)
    roles = ["a", "b", "a", "b", *["c", "d"] * 4]
    together, alone = (
        jax.jit(getattr(of, name))(leaves)
        for of in (_reduce._on_gpu(roles), _reduce._TPU)
    )
    chex.assert_trees_all_close(together, alone, rtol=1e-6)


def test_a_gpu_checks_the_layers_of_a_model_in_a_few_kernels():
    """The 148 leaves of a GPT of 12 layers, of which 50 are large."""
    shapes = [(768,)] * 6 + [(2304,), (3072,)]
    shapes += [(768, 768), (768, 2304), (768, 3072), (3072, 768)]
    layer = {str(i): jax.ShapeDtypeStruct(x, jnp.float32) for i, x in enumerate(shapes)}
    ends = [(1024, 768), (50257, 768), (768,), (768,)]
    ends = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ends]
    params = {"layers": [{name: {"w": x} for name, x in layer.items()}] * 12}
    params["ends"] = ends
    optimizer = jls.loss_scaled(optax.sgd(0.1))
    state = jax.eval_shape(optimizer.init, params)
    # To check, to take the norm, and beside the norm in case it overflows.
    apply = functools.partial(jls.apply_gradients, optimizer)
    for update, passes in ((optimizer.update, 1), (apply, 3)):
        traced = jax.jit(update).trace(params, state, params)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert 0 < len(re.findall("call @.*sum_of_squares", text)) <= 16 * passes


def test_no_wide_copy_of_a_whole_tree_is_made(monkeypatch):
    seen = []
    parts = _reduce.float32_parts
    monkeypatch.setattr(
        _reduce, "float32_parts", lambda leaf: seen.append(leaf.dtype) or parts(leaf)
    )
    anew = jax.jit(_reduce._max_and_nan.__wrapped__)
    monkeypatch.setattr(_reduce, "_max_and_nan", anew)
    tree = [jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.float16)]
    assert jls.all_finite(tree)
    assert set(seen) == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}


# Norms --------------------------------------------------------------------------------


def norm_of(tree):
    return global_norm(floats_of(tree))


def norm_of_gpu(tree):
    """The form that the platforms have which are not here."""
    floats = floats_of(tree)
    return _reduce._on_gpu(()).norm(floats) if floats else 0.0


NORMS = [norm_of, jax.jit(norm_of), jax.jit(norm_of_gpu)]
NAMES = ["eager", "jit", "gpu"]


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
@pytest.mark.parametrize("exponent", [-120, -58, -10, 0, 30, 63, 64, 100, 126])
def test_global_norm_is_right_wherever_float32_can_hold_it(norm, exponent):
    tree = {
        "a": jnp.array([3.0, -4.0]) * 2.0 ** (exponent - 3),
        "b": jnp.full((2, 3), 0.5) * 2.0 ** (exponent - 3),
        "none": None,
        "key": jax.random.key(0),
        "count": jnp.int32(7),
    }
    expected = np.float32(np.sqrt(25 + 6 * 0.25) * 2.0 ** (exponent - 3))
    is_gpu = norm is NORMS[-1] or jax.default_backend() == "gpu"
    if exponent < -60 and is_gpu:
        expected = np.float32(0.0)  # as that of optax
    chex.assert_trees_all_close(norm(tree), expected, rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
def test_global_norm_of_narrow_and_complex_leaves_is_taken_in_float32(norm):
    # 300**2 is inf in float16; optax.global_norm of this is.
    assert norm(jnp.full(4, 300, jnp.float16)) == 600.0
    of_complex = norm([jnp.array([3e30 + 4e30j], jnp.complex64)])
    np.testing.assert_allclose(of_complex, np.float32(5e30), rtol=1e-6)
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
    chex.assert_trees_all_close(norm, np.float32(5e30), rtol=1e-6)


# Counts -------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("wraps_at", [1, 2**32], ids=["carried", "plain"])


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 3), (2, 3, 5)])
def test_count_true_counts_each_mask(wraps_at, shape):
    x = np.random.default_rng(0).uniform(size=shape).astype(np.float32)
    masks = [x > 0.3, x > 0.6, x > 2]
    counts = jax.jit(count_true, static_argnums=1)(masks, wraps_at)
    assert (counts.dtype, counts.shape) == (jnp.uint32, (3, 2))
    assert counts.tolist() == [[0, int(mask.sum())] for mask in masks]


@BOTH
def test_count_true_works_under_vmap(wraps_at):
    x = jnp.arange(12.0).reshape(3, 4)
    counts = jax.vmap(lambda row: count_true([row > 4], wraps_at))(x)
    assert counts.tolist() == [[[0, 0]], [[0, 3]], [[0, 4]]]


def test_partial_counts_are_added_with_their_carry():
    numbers = [5, 2**31, 2**32 - 1, 2**32, 3 * 2**32 + 7, 2**40 + 2**31]
    for a in numbers:
        for b in numbers:
            digits = [np.array([x >> 32, x % 2**32], np.uint32) for x in (a, b)]
            high, low = _add_digits(*(tuple(map(jnp.asarray, d)) for d in digits))
            assert int(high) * 2**32 + int(low) == a + b


def test_count_true_of_a_leaf_of_2_to_33_elements_has_both_digits():
    mask = jax.ShapeDtypeStruct((2**20, 2**13), jnp.bool_)
    jaxpr = jax.make_jaxpr(lambda mask: count_true([mask]))(mask)
    (reduce,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce")
    assert len(reduce.outvars) == 2
    small = jax.make_jaxpr(lambda mask: count_true([mask]))(jnp.zeros(3, bool))
    (reduce,) = (eqn for eqn in small.eqns if "reduce" in eqn.primitive.name)
    assert len(reduce.outvars) == 1
