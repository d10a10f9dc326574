import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_rounding import FATES, NARROW, fates, float32_of_every_kind
from shared import assert_identical

import jls
from jls._report import underflow

POWERS = [2.0**k for k in (-126, -125, -100, -20, 0, 10, 15, 24, 100, 125, 126)]
OTHERS = [3.0, 1 / 3, 1000.1, 65504.0, 1.1e-30, 7e37]
SHARES = FATES


def per_element(shares):
    """The fate of each element at each of the three scales, from shares of 0 and 1."""
    rows = [np.asarray(getattr(shares, name)) for name in SHARES]
    rows = [np.broadcast_to(r.reshape(len(r), -1), (len(r), 3)) for r in rows]
    assert np.isin(rows, [0.0, 1.0]).all()
    assert (np.sum(rows, axis=0) <= 1).all()
    return np.where(np.sum(rows, axis=0) == 0, 5, np.argmax(rows, axis=0))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scales", [POWERS, OTHERS], ids=["powers of two", "others"])
def test_each_value_meets_the_fate_that_exact_rounding_has_for_it(dtype, scales):
    up_down = [factor * s for s in scales for factor in (0.5, 1.0, 2.0)]
    x = float32_of_every_kind(up_down, dtype).view(np.float32)

    def shares(scale, value):
        report = jls.underflow(scale, value, dtype=dtype)
        return report.loss_scale, report.total

    values = jnp.asarray(x)
    assert np.asarray(values).tobytes() == x.tobytes()
    elementwise = jax.jit(jax.vmap(shares, in_axes=(None, 0), out_axes=(None, 0)))
    for scale in scales:
        three, total = elementwise(jnp.float32(scale), values)
        ours = per_element(total)
        for column, one in enumerate(np.asarray(three)):
            expected = fates(x, one, dtype)
            wrong = np.flatnonzero(ours[:, column] != expected)
            assert not len(wrong), (one, x[wrong[:5]], expected[wrong[:5]])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (2.0**-25, "vanished"),  # a tie, to even
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), "subnormal"),
        (2.0**-14 - 2.0**-24, "subnormal"),
        (2.0**-14 - 2.0**-25, None),  # a tie, to the smallest normal number
        (65519.99, None),
        (65520.0, "overflowed"),  # a tie, to inf
        (1e-45, "vanished"),  # subnormal in float32: XLA takes it for zero
        (-0.0, "zero"),
        (np.inf, "nonfinite"),
        (np.nan, "nonfinite"),
    ],
)
def test_float16_changes_where_the_standard_says(value, name):
    for sign in (1, -1):
        grads = jnp.asarray(np.float32(sign * value))
        total = jls.underflow(1.0, grads).total
        shares = {key: np.ravel(getattr(total, key)) for key in SHARES}
        for key, share in shares.items():
            assert share[len(share) // 2] == (key == name), key


def a_tree(seed):
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        values = rng.normal(size=shape) * 2.0 ** rng.uniform(-45, 10, shape)
        return np.where(rng.random(shape) < 0.1, 0, values).astype(np.float32)

    tree = {"a": {"w": leaf(7, 5)}, "b": leaf(33), "s": leaf(), "e": leaf(0, 3)}
    tree["b"][:3] = np.nan, np.inf, -np.inf
    others = {
        "none": None,
        "key": jax.random.key(0),
        "n": 3,
        "mask": optax.MaskedNode(),
    }
    return jax.tree.map(jnp.asarray, tree), {
        **others,
        **jax.tree.map(jnp.asarray, tree),
    }


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
def test_shares_and_histogram_of_a_tree_are_those_of_numpy(dtype):
    for seed, scale in enumerate([2.0**-3, 1.0, 2.0**12]):
        plain, tree = a_tree(seed)
        arrays = {"a/w": plain["a"]["w"], "b": plain["b"]}
        arrays = {k: np.asarray(v) for k, v in arrays.items()}
        arrays |= {"s": np.asarray(plain["s"]), "e": np.asarray(plain["e"])}
        whole = np.concatenate([a.ravel() for a in arrays.values()])
        state = jls.static(scale).init()
        of = _of(dtype)
        assert_identical(of(state, tree), jax.jit(of)(state, tree))
        report = _of(dtype)(state, tree)
        assert list(report.leaves) == ["a/w", "b", "e", "s"]
        assert report.loss_scale.tolist() == [scale / 2, scale, scale * 2]
        for values, shares in [
            (whole, report.total),
            *((arrays[k], report.leaves[k]) for k in arrays),
        ]:
            for column, one in enumerate(report.loss_scale.tolist()):
                fate = fates(values.ravel(), one, dtype)
                for index, name in enumerate(SHARES):
                    ours = np.ravel(getattr(shares, name))
                    share = (fate == index).sum() / max(values.size, 1)
                    chex.assert_trees_all_close(
                        ours[column if len(ours) == 3 else 0], np.float32(share)
                    )
        counted = whole[np.isfinite(whole) & (whole != 0)].astype(np.float64)
        bins = np.maximum(np.frexp(counted)[1] - 1, -126) + 126
        expected = np.bincount(bins, minlength=254).astype(np.float32)
        np.testing.assert_array_equal(report.histogram, expected)


def _of(dtype):
    return lambda state, grads: jls.underflow(state, grads, dtype=dtype)


def test_the_histogram_has_a_bin_for_every_exponent():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    below = np.nextafter(2 * powers[:-1], np.float32(0))
    values = np.concatenate([powers, below, [1e-40, -1e-45, 0, -0.0, np.nan, np.inf]])
    histogram = jls.underflow(1.0, jnp.asarray(values, jnp.float32)).histogram
    assert histogram.tolist() == [4.0] + [2.0] * 252 + [1.0]


@pytest.mark.parametrize("shape", [(101,), (3, 40), (), (0,)])
def test_the_histogram_is_the_same_in_groups(shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32).view(np.uint32)
    pattern = jnp.asarray(x & 0x7FFFFFFF)
    assert_identical(
        underflow._histogram(pattern, group_size=7), underflow._histogram(pattern)
    )


def test_leaves_of_more_elements_than_int32_are_taken():
    grads = {"w": jax.ShapeDtypeStruct((2**21, 2**11), jnp.float32)}
    arrays = jax.eval_shape(lambda g: jls.underflow(1.0, g), grads)
    assert arrays.leaves["w"].vanished.shape == (3,)


def test_sizes_may_be_symbolic():
    """Under `jax.export`, where nobody knows whether a count needs a second digit."""
    (n,) = jax.export.symbolic_shape("n")

    def measured(state, grads):
        report = jls.underflow(state, grads)
        return report.total, report.leaves, report.histogram

    values = jnp.asarray(np.random.RandomState(0).standard_cauchy(3 * 40), jnp.float32)
    state, leaf = jls.static(16.0).init(), values.reshape(3, 40) * 2.0**-24
    grads = {"x": leaf, "y": leaf[0]}
    shapes = {
        "x": jax.ShapeDtypeStruct((3, n), jnp.float32),
        "y": jax.ShapeDtypeStruct((n,), jnp.float32),
    }
    exported = jax.export.export(jax.jit(measured))(state, shapes)
    assert_identical(exported.call(state, grads), jax.jit(measured)(state, grads))


def test_counts_over_uint32_keep_their_high_digit(monkeypatch):
    def tally(masks):
        return jnp.tile(jnp.array([3, 5], jnp.uint32), (len(masks), 1)), []

    monkeypatch.setattr(underflow, "count_true", tally)
    bounds = jnp.zeros((3, 3), jnp.uint32)
    counts = underflow._fate_counts(jnp.zeros(2, jnp.uint32), bounds)
    assert counts.tolist() == [3 * 2.0**32] * 11


def test_leaves_of_other_sizes_share_the_kernels_that_divide():
    """Else each of them is compiled anew for each size, for as long as the counting."""

    def kernels(n):
        grads = [jnp.ones((5 + i, 3)) for i in range(n)]
        compiled = jax.jit(lambda g: jls.underflow(8.0, g)).lower(grads).compile()
        names = r"%[\w.-]+|param_[\w.]+|, metadata=\{.*?\}"
        bodies = re.sub(names, "", compiled.as_text()).split("\n\n")
        return {body for body in bodies if re.search(r"\bdivide\(|\bmultiply\(", body)}

    assert len(kernels(4)) <= len(kernels(2)) + 2  # 10 more without


def test_no_values_have_no_shares():
    for tree in (None, {}, jnp.zeros((0, 2)), 7, optax.MaskedNode()):
        report = jls.underflow(1.0, tree)
        assert all(not leaf.any() for leaf in jax.tree.leaves(report[1:]))


def test_a_complex_value_counts_as_two_and_narrow_ones_are_widened():
    total = jls.underflow(1.0, jnp.array([1e-9 + 1j, 0j], jnp.complex64)).total
    assert (total.vanished[1], total.zero) == (0.25, 0.5)
    assert jls.underflow(1.0, jnp.float16(2**-24)).total.subnormal.tolist() == [0, 1, 1]
    eight = jnp.asarray(2.0**-16).astype(jnp.float8_e5m2)
    assert jls.underflow(1.0, eight).total.subnormal.tolist() == [1, 1, 1]
    assert jls.underflow(1.0, [1e-9, 1.0]).total.vanished[1] == 0.5


def test_float64_gradients_are_told_from_inf_and_zero():
    with jax.enable_x64(True):
        grads = jnp.array([1e300, 1e-300, jnp.inf, 0.0, 1.0], jnp.float64)
        report = jls.underflow(1.0, grads)
    for name in ("overflowed", "vanished"):
        chex.assert_trees_all_close(
            getattr(report.total, name)[1], np.float32(0.2), rtol=1e-7
        )
    for name in ("zero", "nonfinite"):
        chex.assert_trees_all_close(
            getattr(report.total, name), np.float32(0.2), rtol=1e-7
        )
    assert {leaf.dtype for leaf in jax.tree.leaves(report)} == {jnp.dtype("float32")}


def test_the_scale_comes_from_any_state_or_is_given():
    grads = jnp.array([1e-3, 1e-9])
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.static(64.0))
    expected = jls.underflow(64.0, grads)
    for state in (64, np.float32(64.0), jnp.float32(64.0), np.array([64.0])):
        assert_identical(jls.underflow(state, grads), expected)
    assert_identical(jls.underflow(optimizer.init(grads), grads), expected)
    assert_identical(jls.underflow(jls.static(64.0).init(), grads), expected)


def test_factors_are_those_of_the_scaler_within_the_bounds():
    up_down = {"growth_factor": 8.0, "backoff_factor": 0.25}
    scales = jls.underflow(4.0, jnp.ones(2), **up_down).loss_scale
    assert scales.tolist() == [1.0, 4.0, 32.0]
    assert jls.underflow(2.0**126, 1.0).loss_scale.tolist()[1:] == [2.0**126] * 2
    assert jls.underflow(2.0**-126, 1.0).loss_scale.tolist()[:2] == [2.0**-126] * 2


def test_one_trace_serves_a_run_in_a_jitted_step_and_in_vmap_and_scan():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, grads):
        report = jls.underflow(state, grads)
        return jls.dynamic().adjust(state, jls.all_finite(grads)), report

    state, reports = jls.dynamic(8.0).init(), []
    for seed in range(3):
        state, report = step(state, a_tree(seed)[1] | {"key": None})
        reports.append(report)
    assert reports[1].loss_scale.tolist() == [2.0, 4.0, 8.0]

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(a_tree(s)[0] for s in range(3)))
    one = jls.static(8.0).init()
    expected = [jls.underflow(one, a_tree(s)[0]) for s in range(3)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_identical(jax.vmap(lambda g: jls.underflow(one, g))(stacked), expected)
    scanned = jax.lax.scan(lambda c, g: (c, jls.underflow(one, g)), 0, stacked)[1]
    assert_identical(scanned, expected)


def test_what_a_step_returns_can_be_exported():
    exported = jax.export.export(jax.jit(lambda g: jls.underflow(8.0, g)))(jnp.ones(3))
    again = jax.export.deserialize(exported.serialize())
    assert_identical(again.call(jnp.ones(3)), jls.underflow(8.0, jnp.ones(3)))


def test_gradients_that_underflowed_before_show_as_zeros():
    state = jls.static(1.0).init()

    def loss(w):
        losses = w * jnp.float16(1e-6) * jnp.float16(1e-3)
        return losses.astype(jnp.float32).sum()

    _, grads = jls.value_and_grad(loss)(state, jnp.ones(4, jnp.float16))
    assert jls.underflow(state, grads).total.zero == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1.0, 1.0), ValueError, r"loss_scale must be from 2\^-126 .* got -1.0"),
        ((float("nan"), 1.0), ValueError, r"loss_scale must be from .* got nan"),
        ((jnp.float32(jnp.nan), 1.0), ValueError, r"loss_scale must be .* got nan"),
        ((0, 1.0), ValueError, r"loss_scale must be from .* got 0"),
        ((jnp.ones(3), 1.0), ValueError, r"loss_scale must have shape \(\)"),
        ((1j, 1.0), ValueError, "state must carry a loss scale, got complex"),
        ((np.complex64(1j), 1.0), TypeError, "loss_scale must be a real number"),
        ((True, 1.0), ValueError, "state must carry a loss scale, got bool"),
        (
            ({"w": jnp.ones(2)}, 8.0),
            ValueError,
            "state must carry a loss scale, got dict",
        ),
    ],
)
def test_a_scale_that_is_none_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        jls.underflow(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": jnp.int8}, TypeError, "dtype must be a floating-point .* got int8"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor must be .* got 1.0"),
        ({"backoff_factor": "half"}, TypeError, "backoff_factor must be a real number"),
        ({"backoff_factor": 1.5}, ValueError, "backoff_factor must be .* got 1.5"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        jls.underflow(1.0, jnp.ones(2), **options)
