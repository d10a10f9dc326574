"""Programs that float32 computes without rounding: all is in what a cast rounds.

Numbers are small integers over powers of two. A product's result and the cotangent that
one takes have more bits than a half dtype, and fewer than float32 with all that comes
after. `test_exact` has what each must give, and that the numbers are such.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, N = 4, 8


class Exact(NamedTuple):
    fun: Callable[[Any], Any]  # of a dict of arrays; an array
    params: dict[str, Any]
    weights: tuple[int, int, float] = (257, 511, 16)  # the cotangents, as `integers`


EXACT: dict[str, Callable[[], Exact]] = {}


def integers(state, least, most, *shape, over=1):
    """With a sign, in magnitude from `least` to `most`, over a power of two."""
    sizes = state.randint(least, most + 1, shape)
    return jnp.asarray(sizes * state.choice([-1, 1], shape) / over, jnp.float32)


def params(seed=0):
    state = np.random.RandomState(seed)
    return {
        "x": integers(state, 32, 63, ROWS, N, over=16),
        "w": integers(state, 8, 15, N, N, over=8),
        "v": integers(state, 1, 1, N, N, over=4),
    }


# What reads a product's result s: f32[4, 8] -> an array.

READERS: dict[str, Callable[[Any], Any]] = {}


def reader(fun):
    READERS[fun.__name__] = fun
    return fun


def cancels(one, other):
    return 20 * one - 19 * other


# Moves beside what they move: their cotangents nearly cancel.

TABLE = np.array([[3, 1, 4, 1, 5, 1, 2, 6]] * ROWS)
MOVES = {
    "copy": lambda s: (s, jnp.copy(s)),
    "reshape": lambda s: (s.reshape(N, ROWS), s.reshape(-1).reshape(N, ROWS)),
    "flatten": lambda s: (s[0], s.reshape(-1)[:N]),
    "squeeze": lambda s: (s, s[:, None].squeeze(1)),
    "roll": lambda s: (s, jnp.roll(s, 1, 0)),
    "rev": lambda s: (s, s[::-1]),
    "transpose": lambda s: (s[:, :ROWS], s[:, :ROWS].T),
    "slice": lambda s: (s[1:], s[:-1]),
    "strided_slice": lambda s: (s[:, 1::2], s[:, ::2]),
    "gather": lambda s: (s, s[np.array([1, 1, 0, 2])]),
    "take_along_axis": lambda s: (s, jnp.take_along_axis(s, TABLE, 1)),
    "take_by_an_argument": lambda s: (s, s[jnp.argsort(s[:, 0])]),
    "dynamic_slice": lambda s: (
        s[1:],
        lax.dynamic_slice_in_dim(s, (s[0, 0] > 1e6).astype(int), ROWS - 1),
    ),
    "split": lambda s: tuple(jnp.split(s, 2, 1)),
    "pad": lambda s: (s, jnp.pad(s[1:], ((0, 1), (0, 0)))),
    "repeat": lambda s: (s, jnp.repeat(s[::2], 2, 0)),
    "tile": lambda s: (s, jnp.tile(s[:2], (2, 1))),
    "broadcast": lambda s: (s, jnp.broadcast_to(s[:1], s.shape)),
    "concatenate": lambda s: (s, jnp.concatenate([s[2:], s[:2]])),
    "where_of_itself": lambda s: (s, jnp.where(TABLE > 2, s, s)),
    "select_by_sign": lambda s: (s, jnp.where(s > 0, s, s[::-1])),
    "triangle": lambda s: (s, jnp.tril(s)),
    "sort": lambda s: (s, jnp.sort(s, 1)),
    "top_k": lambda s: (s[:, :3], lax.top_k(s, 3)[0]),
    "cummax": lambda s: (s, lax.cummax(s, 1)),
    "max_pool_of_1": lambda s: (
        s,
        lax.reduce_window(s, -np.inf, lax.max, (1, 1), (1, 1), "VALID"),
    ),
    "max_pool": lambda s: (
        s[::2, ::2],
        lax.reduce_window(s, -np.inf, lax.max, (2, 2), (2, 2), "VALID"),
    ),
    "updated_row": lambda s: (s, s.at[1].set(s[2])),
    "updated_by_0": lambda s: (s, lax.dynamic_update_slice(s, 0 * s[:1], (2, 0))),
    "scattered": lambda s: (s, jnp.zeros_like(s).at[np.array([2, 0, 1, 3])].set(s)),
    "negative": lambda s: (s, -s),
    "product_with_1": lambda s: (s, s * 1.0),
    "absolute": lambda s: (s, jnp.abs(s)),
    "relu": lambda s: (s, jax.nn.relu(s)),
    "clip": lambda s: (s, jnp.clip(s, -8, 8)),
    "maximum_of_two": lambda s: (s, jnp.maximum(s, jnp.roll(s, 1, 1))),
    "minimum_of_two": lambda s: (s, jnp.minimum(s, -s)),
    "stop_gradient": lambda s: (s, lax.stop_gradient(s)),
    "jit": lambda s: (s, jax.jit(lambda s: s * 1.0)(s)),
    "jit_of_a_roll": lambda s: (s, jax.jit(lambda s: jnp.roll(s, 1, 0))(s)),
    "remat": lambda s: (s, jax.checkpoint(lambda s: s * 1.0)(s)),
    "remat_of_a_roll": lambda s: (s, jax.checkpoint(lambda s: jnp.roll(s, 1, 0))(s)),
    "cond": lambda s: (s, lax.cond(s[0, 0] < 1e6, lambda s: s, lambda s: -s, s)),
    "cond_of_a_roll": lambda s: (
        s,
        lax.cond(s[0, 0] < 1e6, lambda s: jnp.roll(s, 1, 0), lambda s: -s, s),
    ),
    "switch": lambda s: (
        s,
        lax.switch((s[0, 0] > 0).astype(int), [jnp.flip, jnp.negative], s),
    ),
    "vmap": lambda s: (s, jax.vmap(jnp.flip)(s)),
    "map": lambda s: (s, lax.map(lambda row: row[::-1], s)),
    "scan_of_rows": lambda s: (s, lax.scan(lambda c, row: (c, row), 0.0, s)[1]),
    "scan_that_closes_over_it": lambda s: (
        s,
        lax.scan(lambda c, i: (c, s[i]), 0.0, jnp.arange(ROWS))[1],
    ),
    "scan_with_a_roll_of_it": lambda s: (
        s,
        lax.scan(lambda c, i: (c, jnp.roll(s, 1, 0)[i]), 0.0, jnp.arange(ROWS))[1],
    ),
    "scan_with_a_cond_of_it": lambda s: (
        s,
        lax.scan(
            lambda c, i: (c, lax.cond(i > 1, lambda s: s[0], lambda s: s[1], s)),
            0.0,
            jnp.arange(ROWS),
        )[1],
    ),
    "scan_with_a_jit_of_it": lambda s: (
        s,
        lax.scan(
            lambda c, i: (c, jax.jit(lambda s, i: s[i])(s, i)), 0.0, jnp.arange(ROWS)
        )[1],
    ),
    "carry": lambda s: (s, lax.scan(lambda c, _: (c, None), s, length=2)[0]),
    "carry_that_rolls": lambda s: (
        s,
        lax.fori_loop(0, 2, lambda i, c: jnp.roll(c, 1, 0), s),
    ),
    "two_scans_of_rows": lambda s: tuple(
        lax.scan(lambda c, row: (c, row[::-1]), 0.0, one)[1] for one in (s[1:], s[:-1])
    ),
    "custom_jvp": lambda s: (s, _jvp_copy(s)),
    "custom_vjp": lambda s: (s, _vjp_copy(s)),
}


@jax.custom_jvp
def _jvp_copy(s):
    return s[::-1]


_jvp_copy.defjvp(lambda primals, tangents: (primals[0][::-1], tangents[0][::-1]))


@jax.custom_vjp
def _vjp_copy(s):
    return s[::-1]


_vjp_copy.defvjp(lambda s: (s[::-1], s), lambda s, g: (jnp.where(s > 0, g, 2 * g),))


def _pair(move):
    return lambda s: cancels(*move(s))


READERS |= {f"less_its_{name}": _pair(move) for name, move in MOVES.items()}


@reader
def itself(s):
    return s


@reader
def maximum_less_all(s):
    return s.max(-1, keepdims=True) - s


@reader
def all_less_the_minimum(s):
    return s - s.min(0, keepdims=True)


@reader
def maximum_less_minimum(s):
    return 16 * s.max(-1) - 15 * s.min(-1)


@reader
def is_the_maximum(s):
    return jnp.where(s == s.max(-1, keepdims=True), 3.0, s)


@reader
def equal_maxima(s):
    """JAX divides the cotangent by their number."""
    return jnp.concatenate([s, s[:, ::-1]], 1).max(1) + jnp.minimum(s, s).sum(1)


@reader
def at_argmax(s):
    return s[np.arange(ROWS), jnp.argmax(s, -1)] - 2 * jnp.argmin(s, 0)[:ROWS]


@reader
def one_hot_of_argmax(s):
    return s * jax.nn.one_hot(jnp.argmax(s, -1), N)


@reader
def total(s):
    return s.sum()


@reader
def less_the_mean(s):
    return s - s.mean(-1, keepdims=True)


@reader
def sums_both_ways(s):
    return s - s.sum(0) + s.sum(1, keepdims=True)


@reader
def cumulative_sum(s):
    return jnp.cumsum(s, 1)


@reader
def squares(s):
    return s * s


@reader
def square_of_the_difference(s):
    return (s - jnp.roll(s, 1, 0)) ** 2


@reader
def product_of_parts(s):
    return s[:2] * s[2:]


@reader
def gate(s):
    one, other = jnp.split(s, 2, -1)
    return jnp.where(one > 0, one, 0.5 * one) + 4 * other


@reader
def stacked(s):
    return jnp.stack([20 * s, -21 * s, 2 * s])


@reader
def stacked_alike(s):
    return jnp.stack([s, s, s]) * np.array([20, -21, 2], "float32")[:, None, None]


@reader
def tiled_alike(s):
    factors = np.repeat(np.array([20, -21, 2], "float32"), ROWS)
    return jnp.tile(s, (3, 1)) * factors[:, None]


@reader
def concatenated_alike(s):
    return jnp.concatenate([s, s[::-1]]) * np.repeat([20, -19], ROWS)[:, None]


@reader
def segments(s):
    return jax.ops.segment_sum(20 * s, np.array([0, 1, 0, 1]), 2) - 19 * s[:2]


@reader
def an_offset(s):
    return s + 1024.0


@reader
def floors(s):
    return s - jnp.floor(s)


@reader
def many_readers(s):
    return 8 * s + 4 * s[::-1] - 11 * jnp.roll(s, 1, 1) + s.max(1, keepdims=True)


@reader
def a_count(s):
    return s * jnp.sum(s > 0, -1, keepdims=True)


@reader
def loop_that_adds(s):
    return lax.fori_loop(0, 3, lambda i, c: c + s * 0.5, s)


@reader
def loop_that_sums_rows(s):
    return lax.scan(lambda c, row: (c + row, c), jnp.zeros(N), s)[1] + s


@reader
def while_forward(s):
    def step(state):
        i, c = state
        return i + 1, c + lax.stop_gradient(jnp.roll(s, 1, 0))

    return s + lax.while_loop(lambda x: x[0] < 3, step, (0, jnp.zeros_like(s)))[1]


@reader
def loop_until_it_is_large(s):
    fixed = lax.stop_gradient(jnp.abs(s).max())
    steps, _ = lax.while_loop(
        lambda x: x[1] < 200, lambda x: (x[0] + 1, x[1] + fixed), (0.0, 0.0)
    )
    return s + steps


def reader_alone(read):
    return lambda p: read(p["x"] @ p["w"])


def reader_between(read):
    """Its value is what a product takes, its cotangent what one gave."""

    def fun(p):
        y = read(p["x"] @ p["w"])
        return jnp.tensordot(y, p["v"][: y.shape[-1]], 1)

    return fun


# The same in loops, branches, calls.


def in_jit(part):
    return jax.jit(part)


def in_remat(part):
    return jax.checkpoint(part)


def in_remat_that_saves_products(part):
    return jax.checkpoint(part, policy=jax.checkpoint_policies.dots_saveable)


def in_cond(part):
    return lambda p: lax.cond(p["v"][0, 0] < 9, part, lambda p: -part(p), p)


def in_vmap(part):
    def fun(p):
        both = jnp.stack([p["x"], -p["x"]])
        return jax.vmap(lambda x: part(p | {"x": x}))(both)

    return fun


def in_scan(part):
    """Over inputs; the weights are constants of it."""

    def fun(p):
        both = jnp.stack([p["x"], -p["x"]])
        return lax.scan(lambda k, x: (k, part(p | {"x": x})), 0.0, both)[1]

    return fun


def in_scan_of_weights(part):
    def fun(p):
        both = jnp.stack([p["w"], p["w"][::-1]])
        return lax.scan(lambda k, w: (k, part(p | {"w": w})), 0.0, both)[1]

    return fun


def in_scan_of_remat(part):
    return in_scan(jax.checkpoint(part))


def in_scan_that_adds(part):
    def fun(p):
        both = jnp.stack([p["x"], -p["x"]])
        begin = jax.eval_shape(part, p)
        add = lambda c, x: (c + part(p | {"x": x}), None)  # noqa: E731
        return lax.scan(add, jnp.zeros(begin.shape), both)[0]

    return fun


def in_custom_vjp(part):
    @jax.custom_vjp
    def fun(p):
        return part(p)

    def backwards(p, g):
        return jax.vjp(part, p)[1](g)

    fun.defvjp(lambda p: (part(p), p), backwards)
    return fun


def in_custom_jvp(part):
    """Its tangent is transposed."""

    @jax.custom_jvp
    def fun(p):
        return part(p)

    fun.defjvp(lambda primals, tangents: jax.jvp(part, primals, tangents))
    return fun


WRAPS = [in_jit, in_remat, in_remat_that_saves_products, in_cond, in_vmap, in_scan]
WRAPS += [in_scan_of_weights, in_scan_of_remat, in_scan_that_adds]
WRAPS += [in_custom_vjp, in_custom_jvp]


def add_readers():
    for name, read in READERS.items():
        for wrap in (None, *WRAPS):
            fun = reader_alone(read)
            name_of_it = f"{name}-{wrap.__name__}" if wrap else name
            part = wrap(fun) if wrap else fun
            weights = MANY_BITS if name in LINEAR else FEW_BITS
            EXACT[name_of_it] = functools.partial(Exact, part, PARAMS, weights)


LINEAR = ("itself", "total", "is_the_maximum", "an_offset", "floors", "while_forward")
FEW_BITS, MANY_BITS, FEWER_BITS = (257, 511, 16), (4097, 8191, 256), (16, 31, 16)
PARAMS = params()
add_readers()
BETWEEN = [x for x in READERS if x.startswith("less_its")]
BETWEEN += ["itself", "maximum_less_all", "less_the_mean", "many_readers", "gate"]
for _name in BETWEEN:
    EXACT[f"{_name}-between"] = functools.partial(
        Exact, reader_between(READERS[_name]), PARAMS, FEWER_BITS
    )


# Programs of other shapes.

OTHERS: list[str] = []


def program(make):
    EXACT[make.__name__] = make
    OTHERS.append(make.__name__)
    return make


def small(seed=0, **shapes):
    """Arrays of few bits, to be multiplied more than once."""
    state = np.random.RandomState(seed)
    return {k: integers(state, 1, 7, *shape, over=4) for k, shape in shapes.items()}


@program
def operands_with_many_bits():
    state = np.random.RandomState(0)
    p = {"x": integers(state, 1, 7, ROWS, N, over=4)}
    p["w"] = integers(state, 2048, 8191, N, N, over=4096)
    return Exact(lambda p: p["x"] @ p["w"], p)


@program
def an_operand_that_is_read_too():
    """The parameter is rounded for the product, and for nothing else."""
    made = operands_with_many_bits()
    return made._replace(fun=lambda p: p["x"] @ p["w"] + p["w"][:ROWS])


@program
def product_of_a_product():
    p = small(x=(ROWS, N), w1=(N, N), w2=(N, N))
    return Exact(lambda p: p["x"] @ p["w1"] @ p["w2"], p)


@program
def product_of_a_product_of_weights():
    p = small(x=(ROWS, N), w1=(N, N), w2=(N, N))
    return Exact(lambda p: p["x"] @ (p["w1"] @ p["w2"]), p)


@program
def product_of_a_product_and_its_reader():
    p = small(x=(ROWS, N), w1=(N, N), w2=(N, N))

    def fun(p):
        s = p["x"] @ p["w1"]
        return s @ p["w2"] + 20 * s - 19 * s[::-1]

    return Exact(fun, p)


@program
def two_products_of_one():
    p = small(x=(ROWS, N), w1=(N, N), w2=(N, N), w3=(N, N))

    def fun(p):
        s = p["x"] @ p["w1"]
        return s @ p["w2"] - jnp.roll(s, 1, 0) @ p["w3"]

    return Exact(fun, p)


@program
def moves_between_products():
    p = small(x=(ROWS, N), w1=(N, N), w2=(ROWS, N))

    def fun(p):
        s = (p["x"] @ p["w1"]).reshape(2, 2, 2, ROWS).transpose(0, 2, 1, 3)[:, ::-1]
        return s.reshape(-1, ROWS) @ p["w2"]

    return Exact(fun, p)


@program
def shared_weights():
    p = small(x=(ROWS, N), w=(N, N))
    return Exact(lambda p: (p["x"] @ p["w"]) @ p["w"].T, p)


@program
def shared_weights_in_a_scan():
    p = small(x=(3, ROWS, N), w=(N, N))

    def fun(p):
        return lax.scan(
            lambda c, x: (c + x @ p["w"], x[::-1] @ p["w"]), 0 * p["x"][0], p["x"]
        )

    return Exact(lambda p: jnp.stack([fun(p)[0], *fun(p)[1]]), p)


@program
def attention():
    p = small(x=(2, ROWS, 4), q=(4, 4), k=(4, 4), v=(4, 4))

    def fun(p):
        q, k, v = (p["x"] @ p[name] for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 2
        later = np.arange(ROWS) > np.arange(ROWS)[:, None]
        scores = jnp.where(later, 0.0, scores - scores.max(-1, keepdims=True))
        return jnp.einsum("bqk,bkd->bqd", jax.nn.relu(scores + 64), v)

    return Exact(fun, p)


@program
def attention_of_heads():
    p = small(x=(2, ROWS, 4), qkv=(4, 24), out=(8, 4))

    def fun(p):
        q, k, v = jnp.split((p["x"] @ p["qkv"]).reshape(2, ROWS, 2, 12), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        best = scores == scores.max(-1, keepdims=True)
        y = jnp.einsum("bhqk,bkhd->bqhd", jnp.where(best, 1.0, 0.0), v)
        return y.reshape(2, ROWS, 8) @ p["out"] + scores.sum(1)

    return Exact(fun, p)


@program
def residual_stream():
    p = small(x=(ROWS, N), w1=(N, N), w2=(N, N))

    def fun(p):
        h = p["x"] + 256
        h = h + jax.nn.relu(h @ p["w1"]) / 16
        return h + jax.nn.relu((h - 256) @ p["w2"]) / 16

    return Exact(fun, p)


@program
def a_stream_that_a_scale_multiplies():
    p = small(x=(ROWS, N), w=(N, N), g=(N,))
    targets = np.array([[3.0], [-2.0], [-4.0], [3.0]], "float32")

    def fun(p):
        r = 256 + p["x"]
        for _ in range(3):
            r = r + jax.nn.relu(p["x"] @ p["w"]) / 16
        return r * p["g"] * targets

    return Exact(fun, p, (1, 3, 1))


@program
def a_carry_that_a_product_takes():
    p = small(x=(ROWS, N), w=(N, N))

    def fun(p):
        step = lambda c, _: (c + jax.nn.relu(c @ p["w"]) / 4, c)  # noqa: E731
        last, all_of_them = lax.scan(step, p["x"], length=2)
        return jnp.concatenate([last, *all_of_them])

    return Exact(fun, p)


@program
def a_carry_that_a_product_gives():
    p = small(x=(2, ROWS, N), w=(N, N))

    def fun(p):
        def step(c, x):
            c = jnp.sign(c) * 4 + x
            return c @ p["w"], 20 * c - 19 * c[::-1]

        last, others = lax.scan(step, jnp.ones((ROWS, N)), p["x"])
        return jnp.concatenate([last, *others])

    return Exact(fun, p)


@program
def an_average():
    p = small(x=(ROWS, N), w=(N, N))

    def fun(p):
        target = p["x"] @ p["w"]
        step = lambda a, _: (a + (target - a) / 2, None)  # noqa: E731
        return lax.scan(step, p["x"] + 64, length=4)[0]

    return Exact(fun, p)


@program
def nested_scans():
    p = small(x=(2, 2, ROWS, N), w=(N, N))

    def inner(p, c, x):
        s = x @ p["w"]
        return c + s - s[::-1], s.max(-1)

    def fun(p):
        def outer(c, xs):
            c, ys = lax.scan(lambda c, x: inner(p, c, x), c, xs)
            return c, ys - c[:, 0]

        c, ys = lax.scan(outer, jnp.zeros((ROWS, N)), p["x"])
        return jnp.concatenate([c.reshape(-1), ys.reshape(-1)])

    return Exact(fun, p)


@program
def a_cond_with_products():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        return s[::-1] + lax.cond(
            s[0, 0] < 1e6, lambda s: s - s.max(), lambda s: s @ p["v"], s
        )

    return Exact(fun, p)


@program
def a_cond_that_multiplies():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        return s - lax.cond(s[0, 0] < 1e6, lambda s: s @ p["v"], lambda s: -s, s)

    return Exact(fun, p)


@program
def convolution():
    p = small(x=(2, 3, 6, 6), k=(4, 3, 3, 3))

    def fun(p):
        y = lax.conv_general_dilated(p["x"], p["k"], (1, 1), "SAME")
        return y.max((2, 3), keepdims=True) - y

    return Exact(fun, p)


@program
def convolution_of_groups_with_strides():
    p = small(x=(2, 4, 7, 7), k=(4, 2, 3, 3))

    def fun(p):
        y = lax.conv_general_dilated(
            p["x"], p["k"], (2, 2), "SAME", feature_group_count=2
        )
        return 20 * y - 19 * y[:, ::-1]

    return Exact(fun, p)


@program
def convolution_and_max_pool():
    p = small(x=(2, 6, 6, 2), k=(3, 3, 2, 4), w=(4, 3))

    def fun(p):
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            p["x"], p["k"], (1, 1), "SAME", dimension_numbers=dims
        )
        y = lax.reduce_window(y, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return y @ p["w"]

    return Exact(fun, p)


@program
def ragged_product():
    p = small(x=(6, N), w=(3, N, 4))

    def fun(p):
        y = lax.ragged_dot(p["x"], p["w"], jnp.array([2, 3, 1]))
        return 20 * y - 19 * y[::-1]

    return Exact(fun, p)


@program
def batched_product():
    p = small(x=(3, ROWS, N), w=(3, N, 4))

    def fun(p):
        y = jnp.einsum("bij,bjk->bik", p["x"], p["w"])
        return y.max(0) - y

    return Exact(fun, p)


@program
def one_row():
    """The derivative of the product is outer in its form, and rounded all the same."""
    made = operands_with_many_bits()
    p = made.params | {"x": made.params["x"][:1]}
    return Exact(lambda p: p["x"] @ p["w"], p)


@program
def matrix_and_vector():
    made = operands_with_many_bits()
    return Exact(lambda p: p["w"] @ p["x"][0], made.params)


@program
def inner_and_outer_products():
    state = np.random.RandomState(0)
    p = {"x": integers(state, 1024, 4095, N, over=64)}
    p["y"] = integers(state, 64, 255, N, over=64)
    p["w"] = integers(state, 1, 7, N, N, over=4)

    def fun(p):
        outer = jnp.einsum("i,j->ij", p["x"], p["y"])
        return outer + jnp.dot(p["x"], p["y"]) + (p["x"] @ p["w"])[:, None]

    return Exact(fun, p)


@program
def a_precision():
    made = operands_with_many_bits()

    def fun(p):
        exact = jnp.dot(p["x"], p["w"], precision="highest")
        return exact - p["x"] @ p["w"][::-1]

    return made._replace(fun=fun, weights=FEWER_BITS)


@program
def gradient_inside():
    p = small(x=(ROWS, N), w=(N, 4), v=(4, 1))

    def fun(p):
        def energy(x):
            return jnp.sum(jax.nn.relu(x @ p["w"]) ** 2 @ p["v"])

        return jax.grad(energy)(p["x"])

    return Exact(fun, p, (257, 511, 64))


@program
def a_mask_of_a_product():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        return jnp.where(s > s.mean(-1, keepdims=True), s, 0.0) @ p["v"] / 4

    return Exact(fun, p)


@program
def embedding():
    p = small(words=(5, N), w=(N, 5))

    def fun(p):
        h = p["words"][np.array([[1, 1, 3], [0, 1, 4]])]
        return h @ p["w"] - (h[:, ::-1] @ p["words"].T)

    return Exact(fun, p)


@program
def sums_of_products_then_a_product():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N), u=(N, 4))

    def fun(p):
        return (p["x"] @ p["w"] + p["x"][::-1] @ p["v"]) @ p["u"] / 4

    return Exact(fun, p)


@program
def weights_of_a_sum():
    """The cotangent is rounded after the two were added."""
    p = small(x=(ROWS, N), w=(N, N), u=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        return jnp.stack([s @ p["u"], s @ p["v"], 16 * s])

    return Exact(fun, p)


@program
def a_sum_over_devices_alone():
    return Exact(
        lambda p: jax.vmap(
            lambda x: lax.psum(x @ p["w"], "i") - (x @ p["w"])[::-1], axis_name="i"
        )(p["x"].reshape(2, 2, N)),
        small(x=(ROWS, N), w=(N, N)),
    )


@program
def an_array_times_itself():
    p = small(x=(ROWS, N))
    return Exact(lambda p: p["x"] @ p["x"].T, p)


@program
def a_product_times_itself():
    p = small(x=(ROWS, N), w=(N, 4))

    def fun(p):
        s = p["x"] @ p["w"]
        return s @ s.T / 4

    return Exact(fun, p, (16, 31, 16))


@program
def a_constant_operand():
    constant = np.asarray(operands_with_many_bits().params["w"])
    return Exact(lambda p: p["x"] @ constant + constant[:ROWS], small(x=(ROWS, N)))


@program
def three_operands():
    p = small(x=(ROWS, N), w=(N, 4), v=(4, 3))
    return Exact(lambda p: jnp.einsum("ij,jk,kl->il", *map(p.get, "xwv")), p)


@program
def scan_of_a_product_s_rows():
    """What it gives is stacked, and a product takes that."""
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        rows = lax.scan(lambda c, r: (c + r, c - r), 0 * s[0], s, reverse=True)[1]
        return rows @ p["v"] / 4

    return Exact(fun, p, (16, 31, 16))


@program
def scan_that_stacks_products():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        rows = lax.scan(lambda c, r: (c, r @ p["w"]), 0.0, p["x"])[1]
        return rows @ p["v"] + 20 * rows - 19 * rows[::-1]

    return Exact(fun, p)


@program
def unrolled_scan():
    p = small(x=(4, ROWS, N), w=(N, N))

    def fun(p):
        step = lambda c, x: (c + jax.nn.relu(x @ p["w"]), None)  # noqa: E731
        return lax.scan(step, 0 * p["x"][0], p["x"], unroll=2)[0]

    return Exact(fun, p)


@program
def scan_whose_carry_products_alone_read():
    p = small(x=(ROWS, N), w=(N, N), u=(N, N))
    p["w"] = jnp.sign(p["w"]) / 2

    def fun(p):
        step = lambda c, _: (c @ p["w"], c @ p["u"])  # noqa: E731
        last, all_of_them = lax.scan(step, p["x"], length=3)
        return jnp.concatenate([last, *all_of_them])

    return Exact(fun, p, (16, 31, 16))


@program
def a_cond_in_a_scan():
    p = small(x=(2, ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        def step(c, x):
            s = lax.cond(x[0, 0] > 0, lambda x: x @ p["w"], lambda x: x @ p["v"], x)
            return c + s.max(-1), s - s.min(-1, keepdims=True)

        last, others = lax.scan(step, jnp.zeros(ROWS), p["x"])
        return jnp.concatenate([last[:, None] * jnp.ones(N), *others])

    return Exact(fun, p)


@program
def a_while_with_products():
    """Forwards; its result is multiplied."""
    p = small(x=(ROWS, N), w=(N, N))

    def fun(p):
        x, w = lax.stop_gradient((p["x"], jnp.sign(p["w"])))
        powers = lax.while_loop(
            lambda c: jnp.abs(c).max() < 500, lambda c: c + c[::-1] @ w, x
        )
        return powers / 64 * p["x"]

    return Exact(fun, p)


@program
def remat_of_a_chain():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        @jax.checkpoint
        def layer(x, w):
            s = x @ w
            return s.max(-1, keepdims=True) - s

        return layer(layer(p["x"], p["w"]) / 8, p["v"])

    return Exact(fun, p, (16, 31, 16))


@program
def scan_of_layers_with_remat():
    p = small(x=(ROWS, N), w=(3, N, N))
    p["w"] = jnp.sign(p["w"]) / 2

    def fun(p):
        @jax.checkpoint
        def layer(x, w):
            return x + jax.nn.relu(x @ w) / 4

        return lax.scan(lambda x, w: (layer(x, w), None), p["x"], p["w"])[0]

    return Exact(fun, p, (16, 31, 16))


@program
def scan_of_layers():
    p = small(x=(ROWS, N), w=(3, N, N))
    p["w"] = jnp.sign(p["w"]) / 2

    def fun(p):
        def layer(x, w):
            s = x @ w
            best = jnp.where(s == s.max(-1, keepdims=True), 0.0, s)
            return x + best / 4 - best.sum(-1, keepdims=True) / 16, s[0]

        x, rows = lax.scan(layer, p["x"], p["w"])
        return jnp.concatenate([x, rows])

    return Exact(fun, p, (16, 31, 16))


@jax.custom_vjp
def _with_a_rule(x, w):
    return jax.nn.relu(x @ w)


def _with_a_rule_forwards(x, w):
    s = x @ w
    return jax.nn.relu(s), (x, w, s)


def _with_a_rule_backwards(saved, g):
    x, w, s = saved
    g = jnp.where(s > 0, 20 * g, 0.0) - 19 * g[::-1]
    return g @ w.T, x.T @ g + s[:1] * 2


_with_a_rule.defvjp(_with_a_rule_forwards, _with_a_rule_backwards)


@program
def a_rule_that_keeps_a_product():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))
    return Exact(lambda p: _with_a_rule(p["x"], p["w"]) @ p["v"], p, (16, 31, 16))


@program
def a_rule_in_a_scan():
    p = small(x=(2, ROWS, N), w=(N, N))

    def fun(p):
        step = lambda c, x: (c, _with_a_rule(x, p["w"]))  # noqa: E731
        return lax.scan(step, 0.0, p["x"])[1]

    return Exact(fun, p)


@program
def depthwise_convolution():
    p = small(x=(2, 8, 5), k=(5, 1, 3))

    def fun(p):
        y = lax.conv_general_dilated(
            p["x"],
            p["k"],
            (1,),
            "SAME",
            rhs_dilation=(2,),
            feature_group_count=5,
            dimension_numbers=("NWC", "OIW", "NWC"),
        )
        return y.max(1, keepdims=True) - y

    return Exact(fun, p)


@program
def transposed_convolution():
    p = small(x=(2, 4, 4, 3), k=(3, 3, 3, 2))

    def fun(p):
        y = lax.conv_transpose(
            p["x"], p["k"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return 20 * y - 19 * y[:, ::-1]

    return Exact(fun, p)


@program
def normalized_by_a_power_of_two():
    """A denominator from the product itself."""
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        power = jnp.where(jnp.abs(s).max(-1, keepdims=True) > 8, 0.5, 2.0)
        return (s * power) @ p["v"] - s / power

    return Exact(fun, p, (16, 31, 16))


@program
def a_barrier():
    p = small(x=(ROWS, N), w=(N, N), v=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        moved = lax.optimization_barrier(s[::-1])
        return 20 * s - 19 * moved + moved @ p["v"]

    return Exact(fun, p)


@program
def associative_scan():
    p = small(x=(ROWS, N), w=(N, N))

    def fun(p):
        s = p["x"] @ p["w"]
        return lax.associative_scan(jnp.add, s) - lax.associative_scan(jnp.maximum, s)

    return Exact(fun, p)


@program
def arrays_beside_it():
    """What no product touches is as it is, in all its bits."""
    p = small(x=(ROWS, N), w=(N, N))
    p["a"] = integers(np.random.RandomState(2), 2**20, 2**23, N, over=2**16)
    return Exact(lambda p: jnp.stack([*(p["x"] @ p["w"] / 512), p["a"]]), p, (1, 3, 1))


@program
def a_loop_that_carries_it():
    p = small(x=(ROWS, N), w=(N, N))
    p["a"] = integers(np.random.RandomState(2), 2**20, 2**22, ROWS, N, over=2**16)

    def fun(p):
        step = lambda c, _: ((c[0][::-1], c[1] @ p["w"] / 8), c[0] * 2)  # noqa: E731
        (a, x), others = lax.scan(step, (p["a"], p["x"]), length=2)
        return jnp.stack([a, *others, x])

    return Exact(fun, p, (1, 3, 1))


@program
def subnormal_operands():
    """Of float16, of eleven bits: to which others are rounded before."""
    sizes = np.array([3, 4, 5, 11, 12, 13, 1023, 2045, 2047])
    x = jnp.asarray(np.stack([sizes, -sizes]) * 2.0**-27, jnp.float32)
    return Exact(lambda p: p["x"] @ (1024 * jnp.eye(9)), {"x": x}, (1, 3, 1))


def fixed(bits):
    """An array of NumPy, which stands in the program as it is."""
    state = np.random.RandomState(3)
    return np.asarray(integers(state, *bits, N, N, over=4096))


@program
def a_fixed_matrix_in_a_loop():
    """It is rounded for the product, and for nothing else."""
    p, filters = small(x=(2, ROWS, N)), fixed((2048, 8191))

    def step(p, i, c):
        return c + p["x"][i] @ filters + filters[:ROWS]

    start = np.zeros((ROWS, N), np.float32)
    return Exact(lambda p: lax.fori_loop(0, 2, lambda *x: step(p, *x), start), p)


@program
def a_fixed_matrix_that_each_iteration_makes():
    p, filters = small(x=(2, ROWS, N), w=(N, N)), fixed((1, 7))

    def fun(p):
        step = lambda c, x: (c + x @ jnp.array(filters), x @ p["w"])  # noqa: E731
        return jnp.stack([*lax.scan(step, jnp.zeros((ROWS, N)), p["x"])[1]])

    return Exact(fun, p)


@program
def a_fixed_matrix_in_a_branch():
    p, filters = small(x=(ROWS, N), w=(N, N)), fixed((2048, 8191))

    def fun(p):
        branches = lambda x: x @ filters, lambda x: x @ p["w"]
        return lax.cond(p["x"][0, 0] < 99, *branches, p["x"])

    return Exact(fun, p)
