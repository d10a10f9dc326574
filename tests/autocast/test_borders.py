"""What `jls.autocast` keeps for a derivative, and what changes no number by it.

In the body of a loop or a branch the results of products are kept in half, those of
sums as they are; what is cheap is computed again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reading import named, off, products, saved

import jls

F16, F32 = "float16", "float32"
X = jnp.asarray(np.random.RandomState(0).randn(4, 8), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(8, 8), jnp.float32)


def exact(fun, *args):
    with jax.named_scope("exact"):
        return fun(*args)


def test_a_number_that_there_is_not_in_half_is_moved_in_float32():
    def fun(x, w):
        return lax.pad(x @ w, jnp.float32(0.1), [(0, 0, 0), (1, 0, 0)])

    assert jls.autocast(fun, F16)(X, W)[0, 0] == jnp.float32(0.1)


@pytest.mark.parametrize(("keep", "dtype"), [(None, F16), ("exact", F32)])
def test_what_a_product_takes_is_moved_in_half_unless_keep_finds_the_move(keep, dtype):
    def fun(x, w):
        return exact(lax.rev, jnp.sin(x @ w), [0]) @ w

    moved = named("rev", jls.autocast(fun, F16, keep=keep), X, W)
    assert moved[-1].results == (dtype,)


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


# What is kept for the derivative.


def kept_of(fun, *args):
    """Dtypes of what is kept of a function, by shape; masks and arguments left out."""
    found = {}
    for aval in saved(jls.autocast(fun, F16), *args):
        if aval.shape and aval.dtype in (jnp.float16, jnp.float32):
            found.setdefault(aval.shape, []).append(aval.dtype.name)
    return {shape: sorted(dtypes) for shape, dtypes in found.items()}


def layer(x, w):
    """A norm, an elementwise function and a product."""
    scale = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
    return jnp.cos(jnp.exp(jnp.sin((x * scale) @ w)))


def test_a_scan_keeps_products_in_half_and_sums_and_carries_as_they_are():
    def fun(x, w):
        return jnp.sum(lax.scan(lambda x, _: (layer(x, w), None), x, length=5)[0])

    found = kept_of(fun, X, W)
    assert found[5, 4, 8] == [F16, F32]  # the product; the carry
    assert found[5, 4] == [F32]  # the sum
    assert {shape for shape in found if shape[0] == 5} == {(5, 4, 8), (5, 4)}


def test_the_result_of_a_sort_in_the_body_of_a_scan_is_kept():
    def fun(x, w):
        def body(x, _):
            return jnp.sin(jnp.sort(x @ w, axis=1)) @ w, None

        return jnp.sum(lax.scan(body, x, length=5)[0])

    # The first product; the carry and what was sorted.
    assert kept_of(fun, X, W)[5, 4, 8] == [F16, F32, F32]


@pytest.mark.parametrize("kind", ["branch", "shard_map"])
def test_a_branch_and_a_shard_map_keep_no_elementwise_results(kind):
    def fun(x, w):
        if kind == "branch":
            y = lax.cond(x[0, 0] > 0, layer, lambda x, w: jnp.sin(x @ w), x, w)
        else:
            mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
            spec = jax.sharding.PartitionSpec()
            y = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec)(x, w)
        return jnp.sum(y)

    # Of branches the arguments are among it.
    expected = [F16, F32] if kind == "branch" else [F16]
    assert kept_of(fun, X, W)[4, 8] == expected


def test_in_a_body_what_a_choice_is_made_by_is_not_compared_again():
    def fun(x, w):
        def body(x, _):
            return jnp.where(jnp.sin(x @ w) > 0.5, x, -x), None

        return jnp.sum(lax.scan(body, x, length=5)[0])

    kept = saved(jls.autocast(fun, F16), X, W)
    assert [x.dtype.name for x in kept if x.shape == (5, 4, 8)].count("bool") == 1
    assert len(named("gt", jax.grad(jls.autocast(fun, F16)), X, W)) == 1


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_subnormal_result_of_a_product_reaches_the_derivative(in_loop):
    """JAX makes 0 of what one checkpoint keeps and is subnormal."""
    tiny = 2.0**-20

    def fun(x, w):
        y = x * tiny
        if in_loop:
            rows = jnp.stack([y, y])
            return jnp.sum(lax.scan(lambda c, y: (c, (y @ w) ** 2), 0.0, rows)[1])
        return jnp.sum((y @ w) ** 2)

    x, w = jnp.ones((4, 8)), jnp.eye(8)
    cast = jls.autocast(lambda w: fun(x, w) * 2.0**30, F16)
    grad = jax.jit(jax.grad(cast))(w)
    expected = jax.grad(lambda w: fun(x, w) * 2.0**30)(w)
    assert off(grad, expected) < 1e-3
    # Nor does a rounding in the program, which not every platform would leave out.
    rounded = named("reduce_precision", jax.grad(cast), w)
    assert {x.equation.params["exponent_bits"] for x in rounded} == {8}


def test_a_second_derivative_is_that_of_an_operand_that_was_rounded_and_moved():
    def loss(w):
        return jnp.sum(jnp.sin(X @ w.T) @ w.T)

    def second(loss):
        return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(W)

    assert off(second(jls.autocast(loss, F16)), second(loss)) < 0.01


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_the_same_in_each_iteration_is_rounded_outside_of_the_loop(is_moved):
    def fun(x, w):
        def body(c, _):
            return jnp.tanh(c @ (w.T if is_moved else w)), None

        return lax.scan(body, x, length=5)[0]

    rounded = [
        x
        for x in named("convert_element_type", jls.autocast(fun, F16), X, W)
        if x.results == (F16,) and x.equation.outvars[0].aval.shape == W.shape
    ]
    assert [x.calls for x in rounded] == [()]


def test_a_product_in_a_rule_of_custom_jvp_is_computed_once():
    @jax.custom_jvp
    def fun(y, w):
        return jnp.sin(y @ w)

    @fun.defjvp
    def rule(primals, tangents):
        (y, w), (dy, dw) = primals, tangents
        z = y @ w
        return jnp.sin(z), jnp.cos(z) * (dy @ w + y @ dw)

    def loss(x, w):
        return jnp.sum(lax.scan(lambda x, _: (fun(x, w), None), x, length=3)[0])

    # Forwards one; backwards one for each operand.
    assert len(products(jax.grad(jls.autocast(loss, F16), (0, 1)), X, W)) == 3


@pytest.mark.parametrize("in_loop", [False, True])
def test_an_effect_happens_once(in_loop, capfd):
    def body(x, w):
        y = jnp.sin(x @ w)
        jax.debug.print("here")
        return jnp.sin(y)

    def loss(x, w):
        if in_loop:
            return jnp.sum(lax.scan(lambda x, _: (body(x, w), None), x, length=1)[0])
        return jnp.sum(body(x, w))

    jax.jit(jax.grad(jls.autocast(loss, F16)))(X, W)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_a_checkpoint_of_the_user_says_what_is_kept(policy, in_loop):
    def body(x, w):
        inner = jax.checkpoint(
            lambda x: jnp.sin(jnp.sin(x @ w)),
            policy=getattr(jax.checkpoint_policies, policy),
        )
        return inner(x)

    def loss(x, w):
        if in_loop:
            return jnp.sum(lax.scan(lambda x, _: (body(x, w), None), x, length=5)[0])
        return jnp.sum(body(x, w))

    shape = (5, 4, 8) if in_loop else (4, 8)
    kept = kept_of(loss, X, W).get(shape, [])
    if policy == "nothing_saveable":
        assert kept == ([F32] if in_loop else [])  # what the loop carries
    else:
        assert len(kept) > (2 if in_loop else 1)


def test_in_a_body_what_a_rule_of_custom_vjp_keeps_is_kept():
    @jax.custom_vjp
    def fun(y):
        return jnp.exp(y)

    fun.defvjp(lambda y: (fun(y), jnp.tan(y)), lambda kept, g: (kept * g,))

    def loss(x, w):
        return jnp.sum(lax.scan(lambda x, _: (fun(x @ w), None), x, length=5)[0])

    # The carry, and what the rule keeps.
    assert kept_of(loss, X, W)[5, 4, 8].count(F32) == 2


def test_the_condition_of_a_loop_is_not_taken_for_its_body():
    def fun(x, w):
        return lax.while_loop(
            lambda c: exact(jnp.matmul, c, w)[0, 0] < 0,
            lambda c: jnp.tanh(c @ w),
            x,
        )

    found = products(jls.autocast(fun, F16, keep="exact"), X, W)
    assert sorted(x.operands[0] for x in found) == [F16, F32]


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


def test_what_a_rule_solves_by_iteration_can_be_transposed():
    def iterate(fun, guess):
        return lax.fori_loop(0, 8, lambda _, y: y - fun(y), guess)

    def loss(w, x):
        root = lax.custom_root(
            lambda y: y - jnp.tanh(y @ w) - x,
            x,
            iterate,
            lambda linear, b: iterate(lambda v: linear(v) - b, b),
        )
        return jnp.sum(root @ w)

    args = jnp.eye(8) * 0.3, X
    half = jax.grad(jls.autocast(loss, F16))
    assert {x.results[0] for x in products(half, *args)} == {F16}
    assert off(half(*args), jax.grad(loss)(*args)) < 1e-2
