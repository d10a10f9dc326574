"""The rows of primitives, tried with numbers: each does what its row says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jls._program.jaxprs import opened, programs_in
from jls._program.primitives import TABLE
from jls._tools.origin import advice

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
Y = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)
ROWS = jnp.array([2, 0])


def on_one_device(fun):
    """`fun` of the shards of one device, as a program over several would call it."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    return jax.shard_map(fun, **options)


def reduce_window(init, operator):
    return lambda x: lax.reduce_window(x, init, operator, (2, 2), (1, 1), "VALID")


DIMENSIONS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def scattered(scatter):
    return lambda x, y: scatter(x, ROWS[:, None], y[:2], DIMENSIONS)


# Functions of X alone, or of X and Y, that are one operation.
ONE = {
    "abs": jnp.abs,
    "all_gather": on_one_device(lambda x: lax.all_gather(x, "d")),
    "all_to_all": on_one_device(lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True)),
    "broadcast_in_dim": lambda x: lax.broadcast(x, (2,)),
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "copy": lambda x: lax.copy_p.bind(x),
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumsum": lax.cumsum,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, ROWS, (2, 2)),
    "fft": lambda x: jnp.fft.fft(x),
    "gather": lambda x: x[ROWS],
    "imag": lambda x: lax.imag(lax.complex(x, x)),
    "real": lambda x: lax.real(lax.complex(x, x)),
    "neg": lax.neg,
    "optimization_barrier": lax.optimization_barrier,
    "pad": lambda x: lax.pad(x, 0.0, ((1, 1, 0), (0, 0, 0))),
    "pmax": on_one_device(lambda x: lax.pmax(x, "d")),
    "pmin": on_one_device(lambda x: lax.pmin(x, "d")),
    "ppermute": on_one_device(lambda x: lax.ppermute(x, "d", [(0, 0)])),
    "psum": on_one_device(lambda x: lax.psum(x, "d")),
    "reduce_max": lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None),
    "reduce_min": lambda x: lax.reduce_min_p.bind(x, axes=(0,), out_sharding=None),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "reduce_scatter": on_one_device(lambda x: lax.psum_scatter(x[:1], "d")),
    "reduce_sum": lambda x: x.sum(0),
    "reduce_window_max": reduce_window(-jnp.inf, lax.max),
    "reduce_window_min": reduce_window(jnp.inf, lax.min),
    "reduce_window_sum": reduce_window(0.0, lax.add),
    "reshape": lambda x: x.reshape(24),
    "rev": lambda x: lax.rev(x, (0,)),
    "slice": lambda x: x[1:3],
    "sort": lambda x: lax.sort(x),
    "split": lambda x: lax.split(x, [2, 2])[0],
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "transpose": lambda x: x.T,
}
TWO = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "max": lax.max,
    "min": lax.min,
    "clamp": lambda x, y: lax.clamp(-jnp.abs(y), x, jnp.abs(y)),
    "complex": lax.complex,
    "concatenate": lambda x, y: lax.concatenate([x, y], 0),
    "conv_general_dilated": lambda x, y: lax.conv(
        x.reshape(1, 1, 4, 6), y[:2, :2].reshape(1, 1, 2, 2), (1, 1), "VALID"
    ),
    "dot_general": lambda x, y: x @ y.T,
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2], (1, 0)),
    "select_n": lambda x, y: lax.select_n(jnp.eye(4, 6, dtype=bool), x, y),
    **{name: scattered(scatter) for name, scatter in SCATTERS.items()},
}
OF_POSITIVE = {
    "cbrt": lax.cbrt,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "square": lax.square,
}
BOUNDED = {
    "cos": lax.cos,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "logistic": lax.logistic,
    "sin": lax.sin,
    "tanh": lax.tanh,
}


def is_number(degree):
    return not isinstance(degree, str)


def operations(program):
    found = set()
    for equation in opened(program).jaxpr.eqns:
        found.add(equation.primitive.name.replace("_invariant", "").rstrip("2"))
        for inner in programs_in(equation):
            found |= operations(inner)
    return found


def flat(result):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(result)])


def those(examples, is_wanted):
    """The examples whose rows are wanted."""
    return sorted(name for name in examples if is_wanted(TABLE[name]))


@pytest.mark.parametrize("name", ONE | TWO | OF_POSITIVE | BOUNDED)
def test_example_is_of_its_operation(name):
    args = (X,) if name in ONE | OF_POSITIVE | BOUNDED else (X, Y)
    fun = (ONE | TWO | OF_POSITIVE | BOUNDED)[name]
    assert name.replace("_invariant", "") in operations(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize("name", those(ONE, lambda x: x.moves or x.is_homogeneous))
def test_factor_of_the_operand_is_one_of_the_result(name):
    np.testing.assert_array_equal(flat(ONE[name](4 * X)), 4 * flat(ONE[name](X)))


@pytest.mark.parametrize("name", those(ONE, lambda x: x.is_linear))
def test_linear_operation_is_additive(name):
    x, y = jnp.round(8 * X) / 8, jnp.round(8 * Y) / 8
    both, one, other = (flat(ONE[name](z)) for z in (x + y, x, y))
    np.testing.assert_allclose(both, one + other, atol=0.02)


@pytest.mark.parametrize("name", those(ONE, lambda x: x.moves))
def test_moved_elements_are_those_of_the_operand(name):
    assert set(flat(ONE[name](X))) <= {*flat(X), 0.0}


@pytest.mark.parametrize("name", those(TWO, lambda x: x.moves))
def test_moved_elements_are_those_of_the_operands(name):
    assert set(flat(TWO[name](X, Y))) <= {*flat(X), *flat(Y)}


@pytest.mark.parametrize("name", those(ONE, lambda x: x.moves in ("all", "same")))
def test_all_elements_are_in_the_result(name):
    x = X[:1] if name == "squeeze" else X
    assert set(flat(ONE[name](x))) == {*flat(x)}


@pytest.mark.parametrize("name", those(ONE, lambda x: x.moves == "same"))
def test_unchanged_elements_are_the_same_in_order(name):
    x = X[:1] if name == "squeeze" else X
    np.testing.assert_array_equal(flat(ONE[name](x)), flat(x))


@pytest.mark.parametrize("name", those(TWO, lambda x: x.degree == "product"))
def test_factors_of_a_product_multiply(name):
    old, new = flat(TWO[name](X, Y)), flat(TWO[name](2 * X, 4 * Y))
    if name == "scatter-mul":  # only where it multiplies
        assert set(np.unique(np.round(new / old, 3))) == {2.0, 8.0}
    else:
        np.testing.assert_array_equal(new, 8 * old)


def is_of_one_factor(row):
    return row.degree in ("sum", "choice") or row.moves


@pytest.mark.parametrize("name", those(TWO, is_of_one_factor))
def test_common_factor_of_a_sum_or_choice_is_one_of_the_result(name):
    old, new = TWO[name](X, Y), TWO[name](4 * X, 4 * Y)
    np.testing.assert_array_equal(flat(new), 4 * flat(old))


POWERS = {name: row.degree for name, row in TABLE.items() if is_number(row.degree)}


@pytest.mark.parametrize("name", POWERS)
def test_power_of_a_factor(name):
    x, power = jnp.abs(X), POWERS[name]
    new, old = flat(OF_POSITIVE[name](64 * x)), flat(OF_POSITIVE[name](x))
    np.testing.assert_allclose(new, 64.0**power * old, rtol=1e-6)


@pytest.mark.parametrize("name", those(TABLE, lambda x: x.degree == "bounded"))
def test_bounded_function_has_no_factor(name):
    x = jnp.linspace(0.5, 1.5, 9)
    ratio = flat(BOUNDED[name](2 * x)) / flat(BOUNDED[name](x))
    assert np.ptp(ratio) > 0.01


ELEMENTWISE = those({**ONE, **OF_POSITIVE, **BOUNDED}, lambda x: x.is_elementwise)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_is_computed_from_that_in_its_place(name):
    if name in ("psum", "reduce_scatter"):  # over devices, of which there is one
        return
    fun = (ONE | OF_POSITIVE | BOUNDED)[name]
    old, new = flat(fun(jnp.abs(X))), flat(fun(jnp.abs(X).at[1, 2].add(0.5)))
    assert np.flatnonzero(old != new).tolist() == [8]


KEEP_INF = those(ONE | OF_POSITIVE, lambda x: x.keeps_inf or x.is_linear)


@pytest.mark.parametrize("name", KEEP_INF)
def test_an_inf_is_kept(name):
    x = jnp.abs(X).at[0, 1].set(jnp.inf)
    assert not np.isfinite(flat((ONE | OF_POSITIVE)[name](x))).all()


FOLDS = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min,
    "neg": lax.neg, "clamp": lax.clamp, "is_finite": lax.is_finite,
    "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
}  # fmt: skip


@pytest.mark.parametrize("name", those(TABLE, lambda x: x.fold))
def test_numbers_are_folded_as_jax_does(name):
    count = {"neg": 1, "not": 1, "is_finite": 1, "clamp": 3}.get(name, 2)
    is_bitwise = name in ("and", "or", "xor", "not")
    dtype = np.int32 if is_bitwise else np.float32
    for values in np.array([[3, 5, 4], [5, 3, 4], [-2, -2, 7], [0, 1, 0]], dtype):
        expected = FOLDS[name](*map(jnp.asarray, values[:count]))
        np.testing.assert_array_equal(TABLE[name].fold(*values[:count]), expected)


SINGULAR = {
    "acos": 1.0, "acosh": 1.0, "asin": 1.0, "atanh": 1.0, "cosh": 200.0,
    "erf_inv": 1.0, "exp": 200.0, "exp2": 200.0, "expm1": 200.0, "log": 0.0,
    "log1p": -1.0, "log2": 0.0, "rsqrt": 0.0, "sinh": 200.0, "sqrt": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_function_or_its_derivative_is_inf_there(name):
    fun = getattr(lax, name, None) or jnp.log2
    value, slope = jax.value_and_grad(fun)(SINGULAR[name])
    assert not np.isfinite([value, slope]).all()


def test_every_singular_function_of_one_operand_has_an_example():
    by_two = {"div", "integer_pow", "pow"}
    assert those(TABLE, lambda x: x.singular is not None) == sorted(
        by_two | SINGULAR.keys()
    )


def test_every_likeness_has_advice():
    """And no advice is for operations that there are not."""
    known = {"arc"} | advice._BY_LIKENESS.keys() | advice._BY_KIND.keys()
    assert {row.like for row in TABLE.values()} - {""} == known


def test_every_row_with_a_degree_has_an_example():
    """But for names of one version, and what only several devices or keys have."""
    known = ONE | TWO | OF_POSITIVE | BOUNDED
    rows = those(TABLE, lambda x: x.moves or x.degree not in ("", "power", "order"))
    versions = {
        "add_any", "all_gather_invariant", "conj", "device_put", "layout_constraint",
        "name", "nextafter", "pbroadcast", "psum_invariant", "pvary",
        "ragged_dot_general", "random_clone", "relayout", "reshard", "scatter-sub",
        "select_and_gather_add", "select_and_scatter_add", "sharding_constraint",
        "stack", "stop_gradient", "tile", "unstack", "xla_metadata_value",
    }  # fmt: skip
    assert set(rows) - known.keys() == versions
