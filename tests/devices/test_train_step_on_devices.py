"""`jls.train_step` inside `shard_map`: a loss for each device is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jls

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
GRID = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
W = jnp.linspace(-1.0, 1.0, 4)
X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)), jnp.float32)


def local_loss(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def mean_loss(w, x):
    return lax.pmean(local_loss(w, x), "data")


def sum_loss(w, x):
    errors = (x @ w - 1) ** 2
    return lax.psum(
        jnp.sum(errors) / lax.psum(jnp.float32(errors.size), "data"), "data"
    )


def make(loss_fn, axis_name="data", mean_of_gradients=False, **options):
    rule = optax.sgd(0.1)
    if mean_of_gradients:
        mean = optax.stateless(lambda grads, _: lax.pmean(grads, "data"))
        rule = optax.chain(mean, rule)
    optimizer = jls.loss_scaled(rule, jls.dynamic(8.0), axis_name=axis_name)
    return optimizer, jls.train_step(loss_fn, optimizer, **options)


SPECS = P(), P(), P("data")
SAME = P()


def sharded(step, mesh=MESH, specs=SPECS, out_specs=SAME, **options):
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs, **options)
    )


TRUE = W - 0.1 * jax.grad(local_loss)(W, X)


@pytest.mark.parametrize("axis_name", ["data", None])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["one", "two"])
@pytest.mark.parametrize("half", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_loss_of_each_device_is_refused(axis_name, options, half):
    optimizer, step = make(local_loss, axis_name, compute_dtype=half, **options)
    with pytest.raises(ValueError, match="varies over 'data'") as error:
        sharded(step)(W, optimizer.init(W), X)
    assert 'Write jax.lax.pmean(loss, "data") in loss_fn' in str(error.value)
    assert "check_vma" not in str(error.value)


def test_both_axes_are_named():
    optimizer, step = make(local_loss, ("data", "model"))
    specs = (P(), P(), P(("data", "model")))
    with pytest.raises(ValueError, match=r"over 'data', 'model'") as error:
        sharded(step, GRID, specs)(W, optimizer.init(W), X)
    assert 'pmean(loss, ("data", "model"))' in str(error.value)


def in_scan(step):
    def train(w, opt_state, xs):
        def body(carry, x):
            *carry, report = step(*carry, x)
            return tuple(carry), report.loss

        return lax.scan(body, (w, opt_state), xs)

    return train


def test_loss_of_each_device_is_refused_in_a_scan():
    optimizer, step = make(local_loss)

    with pytest.raises(ValueError, match="varies over 'data'"):
        sharded(in_scan(step), specs=(P(), P(), P(None, "data")))(
            W, optimizer.init(W), jnp.stack([X, X])
        )


@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["one", "two"])
def test_mean_and_sum_in_the_loss_are_right(loss_fn, options):
    optimizer, step = make(loss_fn, **options)
    new, _, report = sharded(step)(W, optimizer.init(W), X)
    np.testing.assert_allclose(new, TRUE, rtol=1e-5)
    assert jnp.allclose(report.loss, local_loss(W, X))


def test_mean_in_the_loss_is_right_in_a_scan():
    optimizer, step = make(mean_loss)

    (new, _), _ = sharded(in_scan(step), specs=(P(), P(), P(None, "data")))(
        W, optimizer.init(W), X[None]
    )
    np.testing.assert_allclose(new, TRUE, rtol=1e-5)


def test_mean_of_the_gradients_without_checks_is_right():
    optimizer, step = make(local_loss, mean_of_gradients=True)

    def averaged(w, opt_state, x):
        w, opt_state, report = step(w, opt_state, x)
        return w, opt_state, lax.pmean(report.loss, "data")

    new, *_ = sharded(averaged, check_vma=False)(W, optimizer.init(W), X)
    np.testing.assert_allclose(new, TRUE, rtol=1e-5)


def test_models_of_each_device_have_losses_of_their_own():
    """An ensemble over devices, all of which decide as one."""
    optimizer, step = make(local_loss)
    ws = jnp.stack([W, -W, 2 * W, W + 1])

    def one(ws, opt_state, x):
        w, opt_state, report = step(ws[0], opt_state, x)
        return w[None], opt_state, report.loss[None]

    spec = P("data")
    step_of_all = sharded(one, specs=(spec, P(), P()), out_specs=(spec, P(), spec))
    new, _, losses = step_of_all(ws, optimizer.init(W), X)
    assert losses.shape == (4,)
    true = ws - 0.1 * jax.vmap(jax.grad(local_loss), (0, None))(ws, X)
    np.testing.assert_allclose(new, true, rtol=1e-5)


def test_loss_over_one_axis_of_two_is_right():
    """Each device of "model" has a part of the parameters, and all the same loss."""

    def loss_fn(w, x):
        y = lax.psum(x @ w, "model")
        return lax.pmean(jnp.mean((y - 1) ** 2), "data")

    optimizer, step = make(loss_fn, ("data", "model"))

    def parted(w, opt_state, x):
        w, opt_state, report = step(w, opt_state, x)
        return w, opt_state, report.loss

    specs = (P("model"), P(), P("data", "model"))
    out_specs = (P("model"), P(), P())
    new, *_ = sharded(parted, GRID, specs, out_specs)(W, optimizer.init(W), X)
    np.testing.assert_allclose(new, TRUE, rtol=1e-5)


def test_nnx_is_refused_too():
    optimizer, _ = make(local_loss)
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    held = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    step = jls.train_step(lambda model, x: jnp.mean(model(x) ** 2))
    graph, state = nnx.split((model, held))

    def pure(state, x):
        model, held = nnx.merge(graph, state)
        step(model, held, x)
        return nnx.state((model, held))

    with pytest.raises(ValueError, match="varies over 'data'"):
        sharded(pure, specs=(P(), P("data")))(state, X)
