"""Where `jls.autocast` stores a value in half: at the borders of calls and chains.

What crosses a border is half if all that read it round it, or if it is half by itself.
Between two borders nothing is rounded, and what is kept for the derivative is half.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reading import named, off, operations, products, saved

import jls

F16, F32 = "float16", "float32"
X = jnp.asarray(np.random.RandomState(0).randn(4, 8), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(8, 8), jnp.float32)


def results_of(name, fun, keep=None):
    """The dtypes of the results of the first operation of this name."""
    return named(name, jls.autocast(fun, F16, keep=keep), X, W)[0].results


def kept_of(fun):
    """The dtypes of all arrays of the shape of X that a derivative keeps."""
    kept = saved(jls.autocast(fun, F16), X, W)
    return {x.dtype.name for x in kept if x.shape == X.shape and x.dtype != bool}


def chosen(x, w):
    """Of branches: an elementwise operation of a product."""
    return lax.cond(x[0, 0] > 0, jnp.tanh, lambda y: 2 * y, x @ w)


@jax.custom_vjp
def with_a_rule(x, w):
    return x @ w + 1e-3


with_a_rule.defvjp(
    lambda x, w: (with_a_rule(x, w), (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
)


@jax.custom_vjp
def a_product(x, w):
    return x @ w


a_product.defvjp(
    lambda x, w: (1.001 * (x @ w), (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
)


def exact(fun, *args):
    with jax.named_scope("exact"):
        return fun(*args)


READERS = {  # of the result of branches, and whether it is half
    "a product": (lambda y, w: y @ w, True),
    "a product of what is moved": (lambda y, w: y[::-1] @ w, True),
    "a product in a call": (jax.jit(lambda y, w: y @ w), True),
    "a product that is kept": (lambda y, w: exact(jnp.matmul, y, w), False),
    "a move that is kept": (lambda y, w: exact(lambda y: y[::-1], y) @ w, False),
    "a rule of custom_vjp": (with_a_rule, False),
    "a sum beside a product": (lambda y, w: y @ w + jnp.sum(y), False),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_crosses_a_border_is_half_if_all_that_read_it_round_it(reader):
    read, is_half = READERS[reader]
    keep = "exact" if "kept" in reader else None
    (dtype,) = results_of("cond", lambda x, w: read(chosen(x, w), w), keep)
    assert dtype == (F16 if is_half else F32)


def test_what_crosses_a_border_in_a_call_is_half_if_products_read_what_that_gives():
    def fun(x, w):
        return jax.jit(chosen)(x, w) @ w

    assert results_of("cond", fun) == (F16,)


def in_scan(begin, step):
    def fun(x, w):
        return lax.scan(lambda c, _: (step(c, w), None), begin(x, w), length=3)[0]

    return fun


ALONE = {  # what calls and loops give to whom reads it as it is
    "a product": ("jit", jax.jit(lambda x, w: x @ w), True),
    "what is moved of one": ("jit", jax.jit(lambda x, w: (x @ w)[::-1]), True),
    "a product that is kept": (
        "jit",
        jax.jit(lambda x, w: exact(jnp.dot, x, w)),
        False,
    ),
    "an outer product": (
        "jit",
        jax.jit(lambda x, w: jnp.einsum("i,j->ij", x[0, :4], w[0])),
        False,
    ),
    "a product beside an argument": (
        "jit",
        jax.jit(lambda x, w: jnp.concatenate([x @ w, x])),
        False,
    ),
    "what a rule gives": ("jit", jax.jit(lambda x, w: a_product(x, w)), False),
    "a carry of products": ("scan", in_scan(jnp.matmul, jnp.matmul), True),
    "one that begins as float32": ("scan", in_scan(lambda x, w: x, jnp.matmul), False),
    "one that begins as half": (
        "scan",
        in_scan(jnp.matmul, lambda c, w: c + jnp.tanh(c @ w)),
        False,
    ),
    "branches of products": (
        "cond",
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -x @ w),
        True,
    ),
    "branches with one product": (
        "cond",
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.sin(x)),
        False,
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_is_half_by_itself_is_stored_in_half_and_nothing_else(what):
    name, fun, is_half = ALONE[what]
    keep = "exact" if "kept" in what else None

    def read(x, w):
        return jnp.sin(fun(x, w)) + jnp.sum(x @ w)

    assert results_of(name, read, keep) == (F16 if is_half else F32,)


def test_a_carry_that_the_condition_of_a_loop_reads_is_float32():
    def fun(x, w, condition):
        return lax.while_loop(condition, lambda c: jnp.tanh(c @ w), x @ w) @ w

    def is_read(c):
        return jnp.sum(c) < 0

    def is_rounded(c):
        return (c @ W)[0, 0] < 0

    assert results_of("while", lambda x, w: fun(x, w, is_read)) == (F32,)
    assert results_of("while", lambda x, w: fun(x, w, is_rounded)) == (F16,)


def test_the_condition_of_a_loop_is_not_taken_for_its_body():
    def is_on(c):
        return jnp.sum(jnp.cos(jnp.sin(c)[::-1])) < 0

    def fun(x, w):
        return lax.while_loop(is_on, lambda c: jnp.tanh(c @ w), x @ w) @ w

    assert results_of("rev", fun) == (F32,)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_carry_that_a_later_iteration_reads_is_float32(is_read):
    def fun(x, w):
        def body(carry, _):
            now, next_one = carry
            out = jnp.sum(now) if is_read else 0.0
            return (next_one[::-1], jnp.tanh(now @ w)), out

        (_, last), sums = lax.scan(body, (2 * x, 3 * x), length=4)
        return last @ w + jnp.sum(sums)

    assert results_of("scan", fun)[:2] == ((F32,) * 2 if is_read else (F16,) * 2)


def test_what_a_call_is_given_is_half_if_products_alone_read_it():
    def reads(inner):
        def fun(x, w):
            return inner(jnp.sin(x @ w), w)

        (call,) = [
            x
            for x in operations(jls.autocast(fun, F16), X, W)
            if x.name in ("jit", "cond") and not x.calls
        ]
        return call.operands[-2 if call.name == "jit" else 1]

    def branches(one, other):
        return lambda y, w: lax.cond(w[0, 0] > 0, one, other, y, w)

    def sine(y, w):
        return jnp.sin(y) @ w

    def product(y, w):
        return y @ w

    assert reads(jax.jit(product)) == F16
    assert reads(jax.jit(sine)) == F32
    assert reads(branches(product, lambda y, w: y[::-1] @ w)) == F16
    assert reads(branches(product, sine)) == F32
    assert reads(branches(sine, product)) == F32


MOVES = {
    "rev": lambda y: y[::-1],
    "optimization_barrier": lambda y: lax.optimization_barrier((y, 2 * y))[0],
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_of_a_chain_is_half_if_products_alone_read_it(name):
    def moved(reads, keep=None):
        def fun(x, w):
            return reads(exact(MOVES[name], jnp.sin(x @ w)), w) @ w

        cast = jls.autocast(fun, F16, keep=keep)
        # Without a derivative, and inside of no chain.
        return named(name, cast, X, W)[0].results[0]

    assert moved(lambda y, w: y) == F16
    assert moved(lambda y, w: jnp.cos(y)) == F32
    assert moved(lambda y, w: y, keep="exact") == F32


def test_a_number_that_there_is_not_in_half_is_moved_in_float32():
    def fun(x, w):
        return lax.pad(x @ w, jnp.float32(0.1), [(0, 0, 0), (1, 0, 0)])

    assert jls.autocast(fun, F16)(X, W)[0, 0] == jnp.float32(0.1)


@pytest.mark.parametrize("number", [-3e38, -jnp.inf])
def test_a_mask_of_what_others_read_too_is_in_range_where_a_product_takes_it(number):
    def fun(x, w):
        y = jnp.where(jnp.eye(4, 8, dtype=bool), jnp.sin(x @ w), number)
        return jnp.exp(y) + y @ w

    result = jls.autocast(fun, F16)(X, jnp.ones((8, 8)) / 64)
    assert jnp.all(jnp.isfinite(result)) == np.isfinite(number)
    assert jnp.all(result < -1000)


def test_calls_share_no_body_with_one_that_is_kept():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def fun(x, w):
        return jnp.sin(layer(x, w)) + jnp.cos(exact(layer, x, w))

    cast = jls.autocast(fun, F16, keep="exact")
    assert [x.results[0] for x in products(cast, X, W)] == [F16, F32]


def test_calls_share_no_body_where_others_read_what_they_hand_on():
    @jax.jit
    def both(x, w):
        return x, jnp.tanh(x @ w)

    def fun(x, w):
        (first, _), (second, _) = both(x, w), both(x, w)
        return first @ w + jnp.sin(second)

    calls = [
        x
        for x in operations(jls.autocast(fun, F16), X, W)
        if x.name == "jit" and not x.calls
    ]
    assert [x.results[0] for x in calls] == [F16, F32]


# What is kept for the derivative.


CHAINS = {
    "a product of arrays": lambda y, w: (y * y[::-1]) @ w,
    "a quotient": lambda y, w: (1 / y) @ w,
    "an inner product": lambda y, w: jnp.einsum("bd,bd->b", jnp.sin(y), y),
    "an outer product": lambda y, w: jnp.einsum("bi,bj->bij", jnp.sin(y), y) @ w,
    "a maximum": lambda y, w: jnp.max(jnp.sin(y), axis=1),
    "a softmax": lambda y, w: jax.nn.softmax(jnp.sin(y)) @ w,
    "a logarithm of a sum": lambda y, w: jax.nn.logsumexp(jnp.sin(y), axis=1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_derivative_of_a_chain_keeps_no_float32(name):
    assert kept_of(lambda x, w: CHAINS[name](x @ w, w)) == {F16}


def test_a_rule_of_custom_jvp_computes_again_what_it_is_given():
    @jax.custom_jvp
    def total(y):
        return jnp.sum(jnp.sin(y), axis=1)

    @total.defjvp
    def rule(primals, tangents):
        return total(*primals), jnp.sum(jnp.cos(primals[0]) * tangents[0], axis=1)

    def fun(x, w):
        return total(jnp.cos(x) * jnp.exp(x)) + jnp.sum(x @ w)

    assert kept_of(fun) <= {F16}


def test_one_sum_or_a_row_of_biases_is_no_running_value():
    def one(x, w):
        return jnp.sin(x + jnp.tanh(x @ w)) @ w

    def biases(x, w):
        return jnp.sin(x @ w + w[:1] + w[1:2] + w[2:3]) @ w

    def spread(x, w):
        first, second, third = (jnp.broadcast_to(w[i], x.shape) for i in range(3))
        return jnp.sin(x @ w + first + second + third) @ w

    assert kept_of(one) == kept_of(biases) == kept_of(spread) == {F16}


FORMS = {
    "a sum": lambda x, y: x + 1e-3 * y,
    "a difference": lambda x, y: x - 1e-3 * y,
    "scaled": lambda x, y: 0.999 * x + 1e-3 * y,
    "scaled behind": lambda x, y: (x + 1e-3 * y) / 1.001,
    "selected": lambda x, y: jnp.where(W[:4] > 0, x + 1e-3 * y, x),
    "turned round": lambda x, y: (x + 1e-3 * y)[::-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_running_value_is_one_however_it_is_written(form):
    """It is in memory: no chain goes through more than one of its steps."""

    def steps(x, w):
        for _ in range(6):
            x = FORMS[form](x, (x * jnp.mean(x)) @ w)
        return jnp.sum(x)

    cast = jls.autocast(steps, F16)
    sums = "sub" if form == "a difference" else "add"
    assert len(named(sums, cast, X, W)) == 6
    assert kept_of(steps) == {F16}
    assert off([cast(X, W)], [steps(X, W)]) < 1e-4


def test_what_is_moved_of_a_running_value_is_kept_in_half():
    def steps(x, w):
        for _ in range(4):
            x = x + 1e-3 * (x @ w)
        return jnp.sum((x[::-1] * jnp.mean(x)) @ w)

    assert kept_of(steps) == {F16}


def test_what_a_scan_carries_is_kept_in_half():
    def fun(x, w):
        def body(c, _):
            return c + 1e-3 * ((c * jnp.mean(c)) @ w), None

        return jnp.sum(lax.scan(body, x, length=5)[0])

    kept = saved(jls.autocast(fun, F16), X, W)
    assert {x.dtype.name for x in kept if x.shape == (5, *X.shape)} == {F16}


def test_cotangents_of_a_constant_of_a_scan_are_carried_in_float32():
    def fun(x, w):
        keys = x @ w

        def body(c, _):
            return 0.9 * c + 0.1 * jnp.tanh(c @ w), jnp.sum(c @ keys.T)

        return jnp.sum(lax.scan(body, jnp.ones((4, 8)), length=5)[1])

    forwards, backwards = named("scan", jax.grad(jls.autocast(fun, F16)), X, W)
    assert F16 in forwards.operands
    assert backwards.results == (F32,)


def test_a_running_value_that_a_call_is_given_is_kept_in_half_there():
    """The first time it is an argument, which is kept as it is: it costs nothing."""

    @jax.jit
    def layer(x, w):
        return (x * jnp.mean(x)) @ w

    def steps(x, w):
        for _ in range(4):
            x = x + 0.1 * layer(x, w)
        return jnp.sum(x)

    assert kept_of(steps) == {F16}


def test_what_is_computed_from_a_mean_is_computed_once():
    def fun(x, w):
        y = x @ w
        scale = lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + 1e-6)
        return (y * scale) @ w + (jnp.sin(y) * scale) @ w

    assert len(named("rsqrt", jls.autocast(fun, F16), X, W)) == 1


# Functions with a derivative of their own.


def test_a_function_with_a_derivative_of_its_own_has_products_in_half():
    @jax.custom_jvp
    def thrice(y, w):
        return y @ w

    @thrice.defjvp
    def rule(primals, tangents):
        (y, w), (dy, dw) = primals, tangents
        return thrice(y, w), 3 * (dy @ w) + y @ dw

    def loss(x, w):
        return jnp.sum(jnp.sin(thrice(x @ w, w)))

    cast = jls.autocast(loss, F16)
    assert off(jax.grad(cast)(X, W), jax.grad(loss)(X, W)) < 0.01
    for fun in (cast, jax.grad(cast)):
        assert {d for x in products(fun, X, W) for d in x.operands} == {F16}
