"""Float32 programs of every kind under `jls.autocast`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from float32_programs import PROGRAMS
from reading import cast_by_hand, off, operations, products

import jls
from jls._program.frames import Frame
from jls._program.places import place_of

SCALE = 1024.0

# Products that stay float32, forwards and with the gradient: those that ask for a
# precision, in the derivatives of a Cholesky factor; and the outer product of ones and
# a parameter, in the gradient of a sum.
AS_WRITTEN = {"fourier_and_linear_algebra": (0, 2), "gradient_penalty": (1, 2)}
# Programs whose trees, cast by hand, are no program: a carry changes its dtype, a
# product asks for an algorithm that a CPU does not have.
NOT_BY_HAND = {
    "gpt_scan_remat",
    "gpt_scan_policy",
    "attention_of_jax",
    "flash_attention_custom_vjp",
}
# The exact programs of tests/truth have their kinds too.
LIKE_OTHERS = {
    "gpt_unrolled",
    "gpt_scan_policy",
    "lstm",
    "convolutions_batch_norm",
    "associative_scan",
    "variational_autoencoder",
}
pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def scaled(loss, scale=SCALE):
    return lambda params, batch: scale * loss(params, batch)


def value_and_gradients(loss, params, batch):
    value, grads = jax.jit(jax.value_and_grad(scaled(loss)))(params, batch)
    return value / SCALE, jax.tree.map(lambda x: x / SCALE, grads)


def wide_products(fun, *args):
    found = [
        x
        for x in products(fun, *args)
        if "float32" in (*x.operands, *x.results) and "custom_vjp" not in str(x.calls)
    ]
    return len(found)


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_is_half_forwards_and_backwards(name, half):
    loss, params, batch = PROGRAMS[name]()
    cast = jls.autocast(loss, half)
    counts = (
        wide_products(cast, params, batch),
        wide_products(jax.grad(cast), params, batch),
    )
    assert counts == AS_WRITTEN.get(name, (0, 0))
    assert products(cast, params, batch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.more] * (name in LIKE_OTHERS))
        for name in PROGRAMS
    ],
)
def test_loss_and_gradients_are_as_near_to_float32_as_by_hand(name):
    loss, params, batch = PROGRAMS[name]()
    value, grads = value_and_gradients(loss, params, batch)
    cast, cast_grads = value_and_gradients(
        jls.autocast(loss, jnp.float16), params, batch
    )
    assert off(cast, value) < 2e-3
    allowed = 2e-3
    if name not in NOT_BY_HAND:
        by_hand = value_and_gradients(cast_by_hand(loss, jnp.float16), params, batch)
        allowed = max(1.2 * off(by_hand[1], grads), 1.2e-3)
    assert off(cast_grads, grads) < allowed


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_dtypes_and_the_structure_of_the_program(name):
    loss, params, batch = PROGRAMS[name]()
    cast = jax.value_and_grad(jls.autocast(loss, jnp.float16))
    shapes = jax.eval_shape(cast, params, batch)
    assert shapes == jax.eval_shape(jax.value_and_grad(loss), params, batch)


@pytest.mark.more
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_loss_after_200_steps_is_that_of_float32(name):
    loss, params, batch = PROGRAMS[name]()

    def trained(dtype):
        optimizer = jls.loss_scaled(optax.adam(1e-3))
        step = jls.train_step(loss, optimizer, compute_dtype=dtype)

        @jax.jit
        def run(params):
            def one(state, _):
                *state, report = step(*state, batch)
                return tuple(state), report.skipped

            state = params, optimizer.init(params)
            (params, _), skipped = jax.lax.scan(one, state, length=200)
            return loss(params, batch), jnp.sum(skipped)

        return run(params)

    (wide, _), (half, skipped) = trained(None), trained(jnp.float16)
    assert abs(half - wide) < 0.02 * abs(wide) + 1e-4
    assert skipped < 10


def test_names_and_scopes_of_the_program_are_kept():
    def loss(params, x):
        with jax.named_scope("outer"):
            return jax.lax.scan(
                lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([params, params])
            )[0].sum()

    plain = operations(loss, jnp.eye(4), jnp.ones((2, 4)))
    cast = operations(jls.autocast(loss, "float16"), jnp.eye(4), jnp.ones((2, 4)))

    def stack_of(found, name):
        one = next(x for x in found if x.name == name)
        return str(one.equation.source_info.name_stack)

    assert stack_of(cast, "scan") == "jls_autocast/" + stack_of(plain, "scan")
    inner = stack_of(cast, "dot_general")
    assert inner.removeprefix("jls_autocast/") == stack_of(plain, "dot_general")


def test_chains_that_look_alike_have_names_and_lines_of_their_own():
    def centred(y):
        with jax.named_scope("centre"):
            y = y - jnp.mean(y, -1, keepdims=True)
        with jax.named_scope("bend"):
            return jnp.tanh(y)

    def loss(w, x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = centred(x @ w)
        return (x @ w).sum()

    def places(fun):
        root = Frame(jax.make_jaxpr(fun)(jnp.eye(4), jnp.ones((2, 4))))
        sites = [
            frame.site_of(number)
            for frame in root.all()
            for number in range(len(frame.jaxpr.eqns))
        ]
        kinds = ("sub", "tanh")
        return [
            (x.equation.primitive.name, place_of(x)._replace(iteration=()))
            for x in sites
            if x.equation.primitive.name in kinds
        ]

    found = places(jls.autocast(loss, "float16"))
    modules = [place.module for _, place in found]
    assert modules == ["first/centre", "first/bend", "second/centre", "second/bend"]
    assert found == places(loss)
