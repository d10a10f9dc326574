"""Programs that an autocast once got wrong, where rounding by hand is right.

Each was wrong since a half array lived on outside of a product. `test_exact` has their
kinds; here they are as they were found.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from reference_autocast import as_written, evaluate

import jls

HALVES = ("float16", "bfloat16")


def arrays(*shapes):
    state = np.random.RandomState(0)
    return [jnp.asarray(state.randn(*shape), jnp.float32) for shape in shapes]


def off(found, right):
    return float(jnp.max(jnp.abs(found - right)) / jnp.max(jnp.abs(right)))


def assert_as_the_reference(loss, half, *args):
    """Value and gradient: as far from float32 as the reference, and near it."""
    both = jax.value_and_grad(loss)
    wide = jax.jit(both)(*args)
    found = jax.jit(jax.value_and_grad(jls.autocast(loss, half)))(*args)
    right = evaluate(jax.value_and_grad(as_written(loss)), half, *args)
    for x, y, z in zip(found, right, wide, strict=True):
        assert off(x, y) <= 0.1 * off(y, z) + 1e-5, (off(x, y), off(y, z))


def cancelling(move):
    x, w, c = arrays((8, 16), (16, 16), (8, 16))

    def loss(w):
        s = x @ w
        return jnp.mean((1000 * s - 999 * move(s)) * (1 + 0.01 * c))

    return loss, w


# What was wrong by more than everything, and what not at all.
CALLS = {
    "jit": jax.jit(lambda s: s * 1.0),
    "checkpoint": jax.checkpoint(lambda s: s * 1.0),
    "cond": lambda s: lax.cond(s[0, 0] < 1e9, lambda s: s, lambda s: 2 * s, s),
    "copy": jnp.copy,
    "where": lambda s: jnp.where(s > 1e9, s, s),
    "max_pool": lambda s: lax.reduce_window(
        s, -np.inf, lax.max, (1, 1), (1, 1), "VALID"
    ),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_calls_add_cotangents_in_float32(name, half):
    assert_as_the_reference(*_with_half(cancelling(CALLS[name]), half))


def _with_half(made, half):
    loss, w = made
    return loss, half, w


def in_a_body(read):
    """A product that a scan closes over, and something in its body reads."""

    def move(s):
        return lax.scan(lambda k, i: (k, read(s, i)), 0.0, jnp.arange(len(s)))[1]

    return move


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "read",
    [
        lambda s, i: jnp.roll(s, 0, 0)[i],
        lambda s, i: jax.jit(lambda s: s[i])(s),
        lambda s, i: lax.cond(i < 9, lambda s: s[i], lambda s: -s[i], s),
    ],
    ids=["roll", "jit", "cond"],
)
def test_a_product_that_a_scan_closes_over_and_its_body_reads(read, half):
    assert_as_the_reference(*_with_half(cancelling(in_a_body(read)), half))


@pytest.mark.parametrize("half", HALVES)
def test_moves_add_cotangents_in_float32(half):
    x, w = arrays((64, 16), (16, 1))
    flux = 1 + 0.5 * jnp.sin(jnp.arange(64.0) * 2 * np.pi / 64)

    def work(w):  # the sum of F du along a closed line
        u = (x @ w)[:, 0]
        return jnp.sum(flux * (jnp.roll(u, -1) - u))

    def reshaped(w):
        s = x @ w
        return jnp.sum(flux * (1000 * s[:, 0] - 999 * s.reshape(64)))

    assert_as_the_reference(work, half, w)
    assert_as_the_reference(reshaped, half, w)


def test_a_cotangent_of_one_move_may_be_beyond_float16():
    """Those of all together are not."""
    x, w = arrays((8, 16), (16, 16))
    factors = jnp.repeat(jnp.array([100.0, -99.0, 3.0, -2.0]), 8)[:, None]

    def loss(w):
        return 1e3 * jnp.sum(jnp.tile(x @ w, (4, 1)) * factors)

    assert_as_the_reference(loss, "float16", w)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_maximum_and_its_cotangent_are_float32(half, scale):
    x, w, c = arrays((4, 16), (16, 16), (16,))

    def loss(w):
        s = x @ w
        return scale * (jnp.log(s.max(-1, keepdims=True) - s + 1e-3) * c).mean()

    assert_as_the_reference(loss, half, w)


@pytest.mark.parametrize("half", HALVES)
def test_equal_maxima_are_counted_in_float32(half):
    x, w = jnp.ones((2, 8)), jnp.zeros((8, 70000))
    loss = jls.autocast(lambda w: (x @ w).max(-1).sum(), half)
    # Each is 1 / 70000, rounded.
    total = jnp.sum(jax.jit(jax.grad(loss))(w))
    share = jnp.float32(1 / 70000).astype(half).astype(jnp.float32)
    twice = (2 * share).astype(half).astype(jnp.float32)
    np.testing.assert_allclose(total, twice * 8 * 70000, rtol=1e-3)


@pytest.mark.parametrize("half", HALVES)
def test_a_product_is_not_above_its_maximum(half):
    x, w = arrays((4, 16), (16, 16))

    def loss(w):
        s = x @ w
        return jnp.sqrt(s.max(-1, keepdims=True) - s + 1e-3).mean()

    def by_hand(w):
        s = lax.reduce_precision(x.astype(half).astype(jnp.float32) @ w, 8, 7)
        return jnp.sqrt(s.max(-1, keepdims=True) - s + 1e-3).mean()

    assert jnp.isfinite(by_hand(w))
    assert_as_the_reference(loss, half, w)


def angle(s):
    return jnp.arccos(s / jnp.abs(s).max(-1, keepdims=True) * (1 - 1e-6)).mean()


def root(s):
    return jnp.sqrt(1 + 1e-6 - s / jnp.abs(s).max(-1, keepdims=True)).mean()


def shares(s):
    _, _, c = arrays((4, 4, 16), (16, 16), (16,))
    return jnp.mean(jax.nn.softmax(10 * s) * c)


@pytest.mark.cover(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("read", [angle, root, shares, lambda s: shares(10 * s)])
@pytest.mark.parametrize("place", ["scan", "cond"])
def test_a_body_keeps_one_number_for_forwards_and_backwards(read, place, half):
    x, w = arrays((4, 4, 16), (16, 16))

    def scan(w):
        return lax.scan(lambda k, a: (k, read(a @ w)), 0.0, x)[1].mean()

    def cond(w):
        return lax.cond(w[0, 0] < 1e9, lambda w: read(x @ w), lambda w: w.sum(), w)

    loss = {"scan": scan, "cond": cond}[place]
    found = jax.jit(jax.grad(jls.autocast(loss, half)))(w)
    right = evaluate(jax.grad(as_written(loss)), half, w)
    wide = jax.grad(loss)(w)
    if read in (angle, root):  # at a bend: last bits of float32 are 1e-3 of it
        assert jnp.all(jnp.isfinite(found))
    else:
        assert off(found, right) <= 0.1 * off(right, wide) + 1e-5


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0])
def test_a_running_value_that_no_product_takes_is_float32(offset, half):
    x, w, t = arrays((8, 16), (16, 16), (8, 1))
    t = t - t.mean()

    def loss(g):
        r = offset + x
        for _ in range(3):
            r = r + 1e-3 * jnp.tanh(x @ w)
        return jnp.sum(r * g * t)

    g = jnp.ones(16)
    found = jax.jit(jax.grad(jls.autocast(loss, half)))(g)
    assert off(found, evaluate(jax.grad(as_written(loss)), half, g)) < 1e-5


@pytest.mark.parametrize("half", HALVES)
def test_a_choice_is_made_of_what_the_forward_pass_had(half):
    """What is computed again may differ in its last bits, beside other operations.

    In one program XLA may do that by itself, in float32 too.
    """
    x, w, v = arrays((16, 32), (32, 48), (48,))

    def loss(w):
        def body(total, x):
            s = x @ w
            y = (s - s.mean(-1, keepdims=True)) / s.std(-1, keepdims=True) * 1.1 + v
            return total + jnp.where(
                y == y.max(-1, keepdims=True), y * y, y
            ).sum(), None

        return lax.scan(body, 0.0, jnp.stack([x, 1.1 * x]))[0]

    assert_as_the_reference(loss, half, w)


def expm(w, h):
    return (h @ jax.scipy.linalg.expm(w)).sum()


def ode(w, h):
    return odeint(lambda y, t: jnp.tanh(y @ w), h, jnp.array([0.0, 1.0]))[-1].sum()


def special(w, h):  # the gradient is NaN in float32 too
    x = jnp.abs(h @ w) + 1.0
    return (jax.scipy.special.expi(x) + jax.scipy.special.spence(x)).sum()


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "fun", [expm, pytest.param(ode, marks=pytest.mark.more), special]
)
def test_a_checkpoint_of_what_holds_a_table_of_constants(fun, half):
    h, w = arrays((4, 8), (8, 8))
    w = w * 0.2
    both = (
        jax.value_and_grad if fun is not special else lambda fun: lambda *x: [fun(*x)]
    )
    plain = jax.jit(both(jls.autocast(fun, half)))(w, h)
    found = jax.jit(both(jls.autocast(jax.checkpoint(fun), half)))(w, h)
    wide = jax.jit(both(fun))(w, h)
    for x, y, z in zip(found, plain, wide, strict=True):
        assert off(x, y) < 1e-3
        assert off(x, z) < 0.1


pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield
