"""What else an optimizer's update takes, through `jls.train_step`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import linear_loss, linear_state, make_batch, make_nnx, nnx_loss
from optax import contrib
from shared import assert_identical

import jls

pytestmark = pytest.mark.standard_promotion

WEIGHTS = jnp.array([1.0, 2.0, 4.0])


def loss_fn(params, batch):
    return jnp.sum(WEIGHTS * (params["w"] - batch) ** 2) / 2


def train(optimizer, batches, jit, **options):
    step = jit(jls.train_step(loss_fn, optimizer, **options))
    params = {"w": jnp.zeros(3)}
    opt_state = optimizer.init(params)
    history = [(params, opt_state)]
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, jnp.float32(batch))
        history.append((params, opt_state))
    return history


def value_fn(params, batch):
    return {"value_fn": lambda params: loss_fn(params, batch)}


@pytest.mark.parametrize(
    "make",
    [
        optax.lbfgs,
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4, store_grad=False)
        ),
    ],
    ids=["lbfgs", "backtracking"],
)
def test_a_line_search_gets_value_and_gradient_by_itself(make, jit_or_eager):
    inner = make()
    optimizer = jls.loss_scaled(inner, jls.static(64.0))
    history = train(optimizer, [1.0, jnp.nan, 1.0], jit_or_eager, extra=value_fn)
    assert_identical(history[1][0], history[2][0])
    assert_identical(history[1][1].inner_state, history[2][1].inner_state)

    @jit_or_eager
    def bare(params, state):
        value, grad = jax.value_and_grad(loss_fn)(params, 1.0)
        extra = {"value": value, "grad": grad, **value_fn(params, 1.0)}
        updates, state = inner.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = {"w": jnp.zeros(3)}, inner.init({"w": jnp.zeros(3)})
    for _ in range(2):
        params, state = bare(params, state)
    np.testing.assert_allclose(history[3][0]["w"], params["w"], rtol=1e-6)


def sam(**kwargs):
    return contrib.sam(optax.sgd(0.1), optax.sgd(0.05), **kwargs)


def test_sam_takes_no_value_and_the_wrapper_is_told_all_the_same(jit_or_eager):
    history = train(jls.loss_scaled(sam()), [1.0, jnp.nan, 1.0], jit_or_eager)
    state = history[-1][1]
    assert (state.skips, state.nonfinite_losses) == (1, 1)
    assert jls.loss_scale(state) == 2.0**15


def test_opaque_sam_takes_its_gradients_from_a_function(jit_or_eager):
    inner = sam(sync_period=2, opaque_mode=True)

    def extra(params, batch):
        return {"grad_fn": lambda params, _: jax.grad(loss_fn)(params, batch)}

    history = train(
        jls.loss_scaled(inner, jls.static(8.0)), [1.0], jit_or_eager, extra=extra
    )
    params = {"w": jnp.zeros(3)}
    grads = jax.grad(loss_fn)(params, 1.0)
    updates, _ = inner.update(grads, inner.init(params), params, **extra(params, 1.0))
    expected = optax.apply_updates(params, updates)
    np.testing.assert_allclose(history[-1][0]["w"], expected["w"], rtol=1e-6)


def test_a_dict_reaches_the_optimizer_as_it_is():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update)
    marker = object()
    train(jls.loss_scaled(inner), [1.0], lambda f: f, extra={"marker": marker})
    assert seen[0]["marker"] is marker
    assert set(seen[0]) == {"marker", "value", "grad"}


def test_the_function_gets_what_the_loss_function_gets(jit_or_eager):
    """Of all micro-batches; Linen's state, and an NNX model."""
    seen = []

    def extra(model, batch):
        seen.append((model, batch))
        return {}

    step = jls.train_step(linear_loss, extra=extra, micro_batches=2)
    jit_or_eager(step)(linear_state(), jnp.ones((4, 2)))
    (state, batch) = seen.pop()
    assert hasattr(state, "opt_state")
    assert batch.shape == (4, 2)
    model, optimizer = make_nnx()
    nnx.jit(jls.train_step(nnx_loss, extra=extra))(model, optimizer, make_batch())
    assert isinstance(seen.pop()[0], nnx.Module)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (3, TypeError, "extra must be a dict"),
        (lambda params, batch: 3, TypeError, "extra must return a dict, got int 3"),
        ({"value": 1.0}, ValueError, "extra must not hold value"),
        ({"grad": 1.0}, ValueError, "extra must not hold grad"),
        ({"partial_overflow": True}, ValueError, "must not hold partial_overflow"),
        ({"params": 1.0}, ValueError, "must not hold params"),
        ({"misspelt": 1.0}, TypeError, "misspelt"),
    ],
)
def test_wrong_arguments_are_named(extra, error, message):
    def update(updates, state, params=None, *, value=None):
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.sgd(1.0).init, update)
    with pytest.raises(error, match=message):
        train(jls.loss_scaled(inner), [1.0], jax.jit, extra=extra)
