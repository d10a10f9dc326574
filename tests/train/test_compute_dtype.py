"""`jls.train_step(compute_dtype=)`: a float32 loss, its products in half."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state
from reading import products
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

STATE = np.random.RandomState(0)
W = jnp.asarray(STATE.randn(4, 4) * 0.3, jnp.float32)
BATCH = jnp.asarray(STATE.randn(8, 4), jnp.float32)
OPTIMIZER = jls.loss_scaled(optax.adam(0.01), jls.dynamic(1024.0))


def loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch @ params) ** 2)


def dots(step, *args):
    """How many products of a step are float16, and how many float32."""
    results = [
        one.results[0]
        for one in products(step, *args)
        if one.equation.outvars[0].aval.shape  # no inner products of an optimizer
    ]
    return results.count("float16"), results.count("float32")


def take(count=3, optimizer=OPTIMIZER, loss=loss_fn, **options):
    step = jax.jit(jls.train_step(loss, optimizer, **options))
    params, opt_state = W, optimizer.init(W)
    for _ in range(count):
        params, opt_state, report = step(params, opt_state, BATCH)
    return params, opt_state, report


def test_products_are_half_and_all_else_is_float32():
    step = jls.train_step(loss_fn, OPTIMIZER, compute_dtype=jnp.float16)
    assert dots(step, W, OPTIMIZER.init(W), BATCH) == (2, 0)
    params, state, report = take(compute_dtype="float16")
    plain, *_ = take()
    np.testing.assert_allclose(params, plain, atol=1e-3)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, OPTIMIZER.init(W))
    assert report.loss.dtype == report.global_norm.dtype == jnp.float32
    assert not report.skipped


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": None},
        {"compute_dtype": jnp.float32, "keep": "anything"},
        {"compute_dtype": "float32", "keep": None},
    ],
)
def test_none_and_float32_cast_nothing(options):
    assert_identical(take(**options), take())


@pytest.mark.parametrize("keep", ["router", lambda place: True])
def test_a_keep_of_nothing_that_is_cast_is_an_error_at_once(keep):
    with pytest.raises(ValueError, match=r"^keep must come with compute_dtype="):
        jls.train_step(loss_fn, OPTIMIZER, keep=keep)


@pytest.mark.parametrize(("first", "last"), [("float16", None), (None, "float16")])
def test_a_checkpoint_of_a_run_with_it_goes_on_without_and_the_other_way(first, last):
    made = take(compute_dtype=first)[:2]
    other = take(compute_dtype=last)[:2]
    read = serialization.from_bytes(other, serialization.to_bytes(made))
    chex.assert_trees_all_equal_shapes_and_dtypes(read, made)
    step = jax.jit(jls.train_step(loss_fn, OPTIMIZER, compute_dtype=last))
    assert_identical(step(*read, BATCH)[:2], step(*made, BATCH)[:2])


@pytest.mark.parametrize(
    "options",
    [{"micro_batches": 4}, {"micro_batches": 4, "drop": "micro_batch"}],
    ids=["", "drop"],
)
def test_micro_batches_accumulate_in_float32(options):
    step = jls.train_step(loss_fn, OPTIMIZER, compute_dtype=jnp.float16, **options)
    assert dots(step, W, OPTIMIZER.init(W), BATCH) == (2, 0)
    params, *_ = take(compute_dtype=jnp.float16, **options)
    np.testing.assert_allclose(params, take()[0], atol=1e-3)


def test_an_overflow_is_skipped_and_the_scale_backs_off():
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(2.0**24))
    params, _, report = take(1, optimizer, compute_dtype=jnp.float16)
    assert report.skipped
    assert report.loss_scale == 2.0**23
    assert jnp.isfinite(report.loss)
    assert_identical(params, W)


def test_carried_and_aux_are_float32():
    def loss(params, carried, batch):
        hidden = batch @ params
        return jnp.mean(hidden**2), {"mean": jnp.mean(hidden, 0)}, hidden

    step = jls.train_step(
        loss, OPTIMIZER, carried=True, has_aux=True, compute_dtype=jnp.float16
    )
    carried = {"mean": jnp.zeros(4)}
    *_, after, report = step(W, OPTIMIZER.init(W), carried, BATCH)
    assert after["mean"].dtype == report.aux.dtype == jnp.float32
    np.testing.assert_allclose(after["mean"], jnp.mean(BATCH @ W, 0), atol=1e-3)


def test_a_value_function_for_a_line_search_is_cast_too():
    optimizer = jls.loss_scaled(optax.lbfgs(), jls.dynamic(64.0))

    def extra(params, batch):
        return {"value_fn": lambda params: loss_fn(params, batch)}

    step = jls.train_step(loss_fn, optimizer, compute_dtype="float16", extra=extra)
    of_loss = [
        one.results[0]
        for one in products(step, W, optimizer.init(W), BATCH)
        if one.equation.outvars[0].aval.shape == BATCH.shape
    ]
    assert of_loss == ["float16"] * len(of_loss)
    assert len(of_loss) > 1  # of the step, and of the line search


def test_keep_leaves_a_scope_as_written():
    def loss(params, batch):
        with jax.named_scope("exact"):
            hidden = batch @ params
        return jnp.mean((hidden @ params) ** 2)

    step = jls.train_step(loss, OPTIMIZER, compute_dtype="float16", keep="exact")
    half, wide = dots(step, W, OPTIMIZER.init(W), BATCH)
    assert (half, wide) == (3, 2)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x))


class State(train_state.TrainState):
    batch_stats: dict


def test_a_linen_state_keeps_its_dtypes():
    def loss(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        y, new = state.apply_fn(variables, batch, mutable=["batch_stats"])
        return jnp.mean(y**2), {"batch_stats": new["batch_stats"]}

    variables = Network().init(jax.random.key(0), BATCH)
    state = State.create(apply_fn=Network().apply, tx=OPTIMIZER, **variables)
    step = jls.train_step(loss, carried=True, compute_dtype=jnp.float16)
    with jax.numpy_rank_promotion("allow"):
        assert dots(step, state, BATCH) == (5, 0)
        after, report = jax.jit(step)(state, BATCH)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.params, state.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.batch_stats, state.batch_stats)
    assert not report.skipped


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)

    def __call__(self, x, rngs):
        return self.last(self.dropout(self.norm(self.first(x)), rngs=rngs))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_nnx_model_is_trained_in_place(micro_batches):
    def loss(model, batch, rngs):
        return jnp.mean(model(batch, rngs) ** 2)

    model, rngs = Model(), nnx.Rngs(1)
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    step = jls.train_step(loss, compute_dtype="float16", micro_batches=micro_batches)
    before = model.first.kernel.get_value()
    with jax.numpy_rank_promotion("allow"):
        report = nnx.jit(step)(model, optimizer, BATCH, rngs=rngs)
    assert not report.skipped
    assert model.norm.mean.get_value().dtype == jnp.float32
    assert jnp.any(model.norm.mean.get_value() != 0)
    assert jnp.any(model.first.kernel.get_value() != before)


def test_a_static_scale_of_1_under_float16_is_a_warning():
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    with pytest.warns(jls.JlsWarning, match="the loss scale is static and 1"):
        take(1, optimizer, compute_dtype=jnp.float16)
    take(1, optimizer, compute_dtype=jnp.bfloat16)
    scaled = jls.loss_scaled(optax.sgd(0.1), jls.static(64.0))
    take(1, scaled, compute_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compute_dtype": 16}, TypeError, "^compute_dtype must be .*, got int 16"),
        (
            {"compute_dtype": "int8"},
            ValueError,
            "^compute_dtype must be .* got str 'int8'",
        ),
        ({"keep": 3}, TypeError, "^keep must be"),
        ({"keep": "("}, ValueError, "^keep must be"),
    ],
)
def test_a_bad_option_is_an_error_at_once(options, error, message):
    with pytest.raises(error, match=message):
        jls.train_step(loss_fn, OPTIMIZER, **options)


def test_check_step_finds_no_mistake():
    step = jax.jit(partial(jls.train_step(loss_fn, OPTIMIZER, compute_dtype="float16")))
    check = jls.check_step(step, W, OPTIMIZER.init(W), BATCH)
    assert check.ok, check
