"""Gradients of parameters that a `jls.bfloat16_params` stores add up in float32."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from shared import assert_identical

import jls
from benchmarks.half.models import transformer

pytestmark = pytest.mark.standard_promotion

BF16 = jnp.bfloat16
OPTIMIZER = jls.skip_nonfinite(jls.bfloat16_params(optax.sgd(1.0)))
# One token 4,096 times: in bfloat16 its gradient stops at 4, where 40.96 is right.
TOKENS = jnp.zeros(4096, jnp.int32)


def loss_of(rows):
    return 0.01 * jnp.sum(rows @ jnp.eye(4, 1))


def is_right(grads):
    table = next(x for x in jax.tree.leaves(grads) if x.ndim == 2)
    assert table.dtype == jnp.float32
    return abs(float(table[0, 0]) - 40.96) < 0.1


def moved(params):
    table = next(x for x in jax.tree.leaves(params) if x.ndim == 2)
    assert table.dtype == BF16
    return abs(float(table[0, 0]) + 40.96) < 0.5


def test_value_and_grad_of_a_pytree(jit_or_eager):
    params = {"table": jnp.zeros((8, 4), BF16), "scale": jnp.ones(4)}

    def loss_fn(params, tokens):
        assert params["table"].dtype == jnp.float32
        return loss_of(params["table"][tokens] * params["scale"])

    state = OPTIMIZER.init(params)
    for fun in (
        lambda *args: jls.value_and_grad(loss_fn)(*args)[1],
        jls.grad(loss_fn),
        jls.grad(jls.autocast(loss_fn, BF16)),
    ):
        assert is_right(jit_or_eager(fun)(state, params, TOKENS))


def test_what_another_optimizer_stores_is_read_as_it_is():
    """And so is what is differentiated under a scale alone."""
    table = jnp.zeros((8, 4), BF16)

    def loss_fn(table, tokens):
        assert table.dtype == BF16
        return loss_of(table[tokens])

    with pytest.warns(jls.JlsWarning, match="parameters are bfloat16"):
        plain = jls.skip_nonfinite(optax.sgd(1.0)).init(table)
    for state in (plain, jls.static(1.0).init()):
        jls.grad(loss_fn)(state, table, TOKENS)


@pytest.mark.parametrize(
    ("argnums", "transform"),
    [
        (1, jax.value_and_grad),
        ((1,), jax.value_and_grad),
        (-1, jax.value_and_grad),
        (0, partial(jax.value_and_grad, argnums=1)),
    ],
)
def test_only_what_is_differentiated_is_widened(argnums, transform):
    table, others = jnp.zeros((8, 4), BF16), jnp.ones(3, BF16)

    def loss_fn(others, table):
        assert others.dtype == BF16
        return loss_of(table[TOKENS])

    grad_fn = jls.value_and_grad(loss_fn, argnums, transform=transform)
    if transform is not jax.value_and_grad:
        with pytest.raises(AssertionError):  # the fault that this test is for
            jls.value_and_grad(loss_fn)(OPTIMIZER.init(table), others, table)
    _, grads = grad_fn(OPTIMIZER.init(table), others, table)
    assert is_right(grads)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 2, "accumulation": "sum"}], ids=str
)
def test_train_step(dtype, options, jit_or_eager):
    table = jnp.zeros((8, 4), BF16)
    step = jls.train_step(
        lambda table, tokens: loss_of(table[tokens]),
        OPTIMIZER,
        compute_dtype=dtype,
        **options,
    )
    state = OPTIMIZER.init(table)
    table, _, report = jit_or_eager(step)(table, state, TOKENS)
    assert report.loss.dtype == jnp.float32
    assert moved(table)


@pytest.mark.parametrize("by_step", [True, False])
def test_nnx(by_step):
    """The model that comes out is bfloat16; what it counts is kept."""

    class Model(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros((8, 4), BF16))
            self.calls = nnx.Variable(jnp.zeros((), BF16))

        def __call__(self, tokens):
            assert self.table[...].dtype == jnp.float32
            assert self.calls[...].dtype == BF16
            self.calls[...] += 1
            return self.table[...][tokens]

    def loss_fn(model, tokens):
        return loss_of(model(tokens))

    @nnx.jit
    def by_hand(model, optimizer, tokens):
        grad_fn = jls.value_and_grad(loss_fn, transform=nnx.value_and_grad)
        loss, grads = grad_fn(optimizer, model, tokens)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(grads))
        optimizer.update(model, grads, value=loss)

    model = Model()
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    step = nnx.jit(jls.train_step(loss_fn)) if by_step else by_hand
    step(model, optimizer, TOKENS)
    assert moved(nnx.state(model, nnx.Param))
    assert model.calls[...] == 1


def test_nnx_model_is_bfloat16_after_an_error():
    model = nnx.Linear(4, 1, param_dtype=BF16, rngs=nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def loss_fn(model, batch):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        jls.grad(loss_fn, transform=nnx.value_and_grad)(optimizer, model, TOKENS)
    assert_identical(nnx.to_pure_dict(nnx.state(model)), before)


def widened_and_rounded(program, shape):
    """How often arrays of a shape are widened, cast back as they are, and rounded."""
    equations = [x for x in program.jaxpr.eqns if x.outvars[0].aval.shape == shape]
    casts = [x for x in equations if x.primitive.name == "convert_element_type"]
    wide = [x.outvars[0] for x in casts if x.invars[0] in program.jaxpr.invars]
    rounds = [x for x in equations if x.primitive.name == "reduce_precision"]
    back, rounded = ([x for x in y if x.invars[0] in wide] for y in (casts, rounds))
    return len(wide), len(back), len(rounded)


@pytest.mark.parametrize("by", ["step", "value_and_grad", "nnx"])
def test_products_take_what_is_stored(by):
    """XLA drops a cast and its way back, and makes no copy of a weight."""
    weights, x = {"w": jnp.full((16, 8), 0.3, BF16)}, jnp.ones((4, 16))
    state = OPTIMIZER.init(weights)

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) + (params["w"].T @ x.T).T)

    if by == "step":
        step = jls.train_step(loss_fn, OPTIMIZER, compute_dtype=BF16)
        program = jax.make_jaxpr(step)(weights, state, x)
    elif by == "value_and_grad":
        grad_fn = jls.value_and_grad(jls.autocast(loss_fn, BF16))
        program = jax.make_jaxpr(grad_fn)(state, weights, x)
    else:
        model = nnx.Linear(16, 8, param_dtype=BF16, use_bias=False, rngs=nnx.Rngs(0))
        structure, arrays = nnx.split(model)
        cast = jls.autocast(lambda model, x: jnp.mean(model(x)), BF16)
        grad_fn = jls.value_and_grad(cast, transform=nnx.value_and_grad)
        program = jax.make_jaxpr(
            lambda arrays, x: grad_fn(state, nnx.merge(structure, arrays), x)[0]
        )(arrays, x)
    assert widened_and_rounded(program, (16, 8)) == (1, 1, 0)


def test_linen():
    model = linen.Embed(8, 4, param_dtype=BF16)
    params = {"embedding": jnp.zeros((8, 4), BF16)}
    state = TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)

    def loss_fn(state, tokens):
        return loss_of(state.apply_fn({"params": state.params}, tokens))

    state, _ = jax.jit(jls.train_step(loss_fn))(state, TOKENS)
    assert moved(state.params)


@pytest.mark.parametrize("by_step", [True, False])
def test_equinox(by_step):
    model = eqx.nn.Embedding(weight=jnp.zeros((8, 4), BF16))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, tokens):
        return loss_of(jax.vmap(model)(tokens))

    @eqx.filter_jit
    def by_hand(model, state, tokens):
        transform = eqx.filter_value_and_grad
        grads = jls.grad(loss_fn, transform=transform)(state, model, tokens)
        assert grads.weight.dtype == jnp.float32
        return jls.apply_gradients(OPTIMIZER, grads, state, model)

    step = eqx.filter_jit(jls.train_step(loss_fn, OPTIMIZER)) if by_step else by_hand
    assert moved(step(model, state, TOKENS)[0])


# Beside float32 parameters of the same numbers, under the same cast.


def off(loss_fn, params, batch):
    """The relative error of the gradients, of float32 parameters and of bfloat16 ones.

    Against those of float32 without a cast.
    """
    wide = jls.master_params(params, ())
    cast = jls.autocast(loss_fn, BF16)
    right = jax.jit(jax.grad(loss_fn))(wide, batch)
    state = OPTIMIZER.init(params)
    theirs = jax.jit(jax.grad(cast))(wide, batch)
    ours = jax.jit(jls.grad(cast))(state, params, batch)
    difference = [optax.tree.sub(x, right) for x in (theirs, ours)]
    return [float(optax.tree.norm(x) / optax.tree.norm(right)) for x in difference]


def embedding(tokens):
    """Tokens by Zipf's law, in a model of one layer."""
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, 257)
    drawn = rng.choice(256, tokens, p=chances / chances.sum())
    params = {
        "table": jnp.asarray(rng.normal(size=(256, 16)), BF16),
        "w": jnp.asarray(rng.normal(size=(16, 256)) / 4, BF16),
    }

    def loss_fn(params, tokens):
        logits = params["table"][tokens] @ params["w"]
        labels = jnp.roll(tokens, 1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    return loss_fn, params, jnp.asarray(drawn)


def loop(steps):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 8)) / 8, BF16)}
    params |= {"b": jnp.zeros(8, BF16)}
    inputs = jnp.abs(jnp.float32(rng.normal(size=(steps, 4, 8))))

    def loss_fn(params, inputs):
        def body(h, x):
            h = jnp.tanh(x @ params["w"] + 0.1 * h + params["b"])
            return h, h

        _, hs = jax.lax.scan(body, jnp.zeros((4, 8)), inputs)
        return jnp.mean(hs**2) + jnp.mean(hs)

    return loss_fn, params, inputs


def decoder(form):
    """Tokens by Zipf's law, in layers of attention."""
    model = transformer(form, (256, 32, 2, 2), (4, 64))
    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, 257)
    drawn = rng.choice(256, (4, 65), p=chances / chances.sum())
    words = jnp.asarray(drawn)
    made = jax.jit(model.make(None).init)(jax.random.key(0), words[:, :-1])["params"]
    params = optax.tree.cast(made, BF16)
    loss_fn = model.loss()
    batch = words[:, :-1], words[:, 1:]
    return lambda params, batch: loss_fn(params, {}, batch)[0], params, batch


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(partial(decoder, "unrolled"), marks=pytest.mark.more),
        partial(decoder, "scan"),
        partial(embedding, 512),
        pytest.param(partial(embedding, 65_536), marks=pytest.mark.more),
        partial(loop, 64),
        pytest.param(partial(loop, 4096), marks=pytest.mark.more),
    ],
)
def test_error_is_that_of_float32_parameters(made):
    theirs, ours = off(*made())
    assert ours <= 1.1 * theirs
