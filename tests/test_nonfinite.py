import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from shared import FLOATS

import jls
from jls._origin import nonfinite

DTYPES = [*FLOATS, jnp.float8_e4m3fnuz]


def reference(array):
    """NaNs, infs and the largest finite magnitude of a part, in numpy."""
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    with np.errstate(invalid="ignore"):
        values = np.asarray(array).astype(wide).ravel()
    finite = values[np.isfinite(values)]
    parts = np.concatenate([finite.real, finite.imag])
    is_inf = np.isinf(values) & ~np.isnan(values)
    largest = float(np.abs(parts).max()) if finite.size else None
    return int(np.isnan(values).sum()), int(is_inf.sum()), largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 3, 2)])
def test_a_row_counts_as_numpy_does(dtype, shape):
    rng = np.random.default_rng(0)
    for _ in range(5):
        values = rng.normal(size=shape) * 10.0 ** rng.uniform(-5, 3, shape)
        specials = rng.choice([0, 0, 0, np.nan, np.inf, -np.inf], shape)
        values = jnp.asarray(values + specials, jnp.float32)
        if dtype == jnp.complex64:
            values = jax.lax.complex(values, jnp.asarray(specials, jnp.float32))
        array = values.astype(dtype)
        (row,) = jls.nonfinite_report({"w": array}).rows
        assert row[:3] == ("w", dtype, shape)
        assert row[3:] == reference(array)
        assert row.finite == bool(jls.all_finite(array))


def test_every_pattern_of_the_narrow_floats_is_counted_right():
    for dtype in DTYPES:
        size = jnp.dtype(dtype).itemsize
        if size > 2:
            continue
        patterns = np.arange(2 ** (8 * size), dtype=f"uint{8 * size}").view(dtype)
        (row,) = jls.nonfinite_report(jnp.asarray(patterns)).rows
        assert row[3:] == reference(patterns)


def test_the_largest_of_subnormals_is_not_flushed_to_zero():
    tiny = np.array([1e-45, -3e-40, 0], np.float32)
    assert jls.nonfinite_report(tiny).rows[0].largest == float(np.float32(3e-40))
    narrow = jnp.asarray(np.array([3e-40], jnp.bfloat16))
    assert jls.nonfinite_report(narrow).rows[0].largest == float(jnp.bfloat16(3e-40))


def test_float64_is_not_narrowed():
    with jax.enable_x64(True):
        tree = [jnp.array([1e300, jnp.nan]), jnp.array([2e-300j, jnp.inf])]
        rows = jls.nonfinite_report(tree).rows
    assert [row.dtype for row in rows] == [jnp.float64, jnp.complex128]
    assert [row[3:] for row in rows] == [(1, 0, 1e300), (0, 1, 2e-300)]


def test_other_leaves_are_left_out():
    tree = {
        "none": None,
        "int": jnp.int32(3),
        "bool": True,
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "masked": optax.MaskedNode(),
        "function": jnp.tanh,
        "text": "nan",
        "python": float("nan"),
        "complex": complex(1.0, float("inf")),
        "numpy": np.array([1.0, 2.0], np.float32),
    }
    report = jls.nonfinite_report(tree)
    assert [row.path for row in report.rows] == ["complex", "numpy", "python"]
    assert [row.path for row in report.bad] == ["complex", "python"]


@pytest.mark.parametrize("tree", [None, {}, [], optax.MaskedNode(), jnp.int32(1)])
def test_a_tree_without_floats_is_finite_and_says_so(tree):
    report = jls.nonfinite_report(tree)
    assert report.finite
    assert report.rows == ()
    assert repr(report) == "no leaf is floating point"


class Linear(eqx.Module):
    weight: jax.Array
    activation: object = eqx.field(static=True)


@pytest.mark.standard_promotion
def test_paths_are_those_in_the_model():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel.set_value(model.kernel.get_value().at[0, 0].set(jnp.nan))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    params = {"dense": {"kernel": jnp.array([jnp.inf])}}
    train_state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    module = {"layers": [Linear(jnp.array([jnp.nan]), jnp.tanh)]}
    for tree, bad in [
        (model, ["kernel"]),
        (nnx.state(model), ["kernel"]),
        (nnx.state(model, nnx.Param), ["kernel"]),
        ({"model": model}, ["model/kernel"]),
        (train_state, ["params/dense/kernel"]),
        (module, ["layers/0/weight"]),
    ]:
        assert [row.path for row in jls.nonfinite_report(tree).bad] == bad
    paths = [row.path for row in jls.nonfinite_report(optimizer).rows]
    assert "opt_state/0/mu/kernel" in paths
    assert jls.nonfinite_report(optimizer).finite
    assert isinstance(model.kernel, nnx.Param)


WHY = "print(jls.why(fun, *args)) names the line that made them"


def test_the_table_has_bad_leaves_first():
    grads = {
        "layers": [jnp.ones((2, 3), jnp.float16), jnp.full((), jnp.nan)],
        "embedding": jnp.array([1e-7, 65504.0, -jnp.inf, jnp.inf]),
    }
    report = jls.nonfinite_report(grads)
    assert repr(report) == str(report)
    assert str(report).splitlines() == [
        "2 of 3 leaves are not finite",
        "path       dtype    shape   NaN  inf  largest finite",
        "embedding  float32  (4,)      0    2        6.55e+04",
        "layers/1   float32  ()        1    0               -",
        "layers/0   float16  (2, 3)    0    0               1",
        WHY,
    ]
    assert [row.path for row in report.rows] == ["embedding", "layers/0", "layers/1"]


@pytest.mark.parametrize(
    ("bad", "good", "headline"),
    [
        (1, 13, "1 of 14 leaves is not finite"),
        (2, 12, "2 of 14 leaves are not finite"),
        (0, 14, "all 14 leaves are finite"),
        (0, 1, "the only leaf is finite"),
        (1, 0, "the only leaf is not finite"),
    ],
)
def test_the_headline_says_how_many(bad, good, headline):
    report = jls.nonfinite_report([jnp.nan] * bad + [1.0] * good)
    assert repr(report).splitlines()[0] == headline


@pytest.mark.parametrize(
    ("bad", "good", "last"),
    [
        (2, 18, []),
        (2, 30, ["... 12 more finite"]),
        (30, 0, ["... 10 more not finite, see .bad"]),
        (30, 5, ["... 10 more not finite, see .bad", "... 5 more finite"]),
    ],
)
def test_a_long_table_is_cut_and_says_what_is_not_shown(bad, good, last):
    report = jls.nonfinite_report([1.0] * good + [jnp.nan] * bad)
    lines = repr(report).splitlines()
    assert lines[22:] == [*last, WHY]
    assert lines[2].startswith(str(good))
    assert len(report.rows) == bad + good


def test_a_single_leaf_has_a_place_in_the_table():
    report = jls.nonfinite_report(jnp.ones(2))
    assert report.rows[0].path == ""
    assert repr(report).splitlines()[2].startswith("(tree)")


def test_a_report_is_neither_true_nor_false():
    with pytest.raises(TypeError, match=r"ask report\.finite"):
        bool(jls.nonfinite_report(jnp.ones(2)))


def test_one_call_and_one_transfer_serve_the_whole_tree(monkeypatch):
    made, traced, jitted = [], [], nonfinite._tallies
    tally = nonfinite.count_true
    monkeypatch.setattr(
        nonfinite, "_tallies", lambda a: made.append(jitted(a)) or made[-1]
    )
    monkeypatch.setattr(
        nonfinite, "count_true", lambda *a: traced.append(None) or tally(*a)
    )
    tree = {"an": jnp.ones((3, 1, 7)), "uncommon": [jnp.ones(11, jnp.bfloat16)] * 2}
    for value in (1.0, jnp.nan, jnp.inf):
        new = jax.tree.map(lambda x, value=value: x * jnp.asarray(value, x.dtype), tree)
        with jax.transfer_guard_host_to_device("disallow"):
            assert jls.nonfinite_report(new).finite == bool(value == 1.0)
    assert len(traced) == 3  # leaves, at the first of three calls
    assert [(x.shape, x.dtype) for x in made] == [((3, 6), jnp.uint32)] * 3


def test_counts_over_int32_have_room():
    leaf = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32)
    assert jax.eval_shape(nonfinite._tallies, [leaf]).shape == (1, 6)
    digits = np.array([2, 5, 1, 0, 0x3F800000, 0], np.uint32)
    row = nonfinite._row("w", leaf, digits)
    assert (row.nans, row.infs, row.largest) == (2 * 2**32 + 5, 2**32, 1.0)


def test_under_jit_it_says_that_it_is_for_the_host():
    message = "got a traced one at 'w': jls.nonfinite_report is for the host"
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TypeError, match=message):
            transform(lambda w: jls.nonfinite_report({"w": w}))(jnp.ones(2))
