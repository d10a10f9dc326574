"""`jls.check_step` on a mesh: devices that part are named, right steps are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jls

pytestmark = pytest.mark.standard_promotion

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
W = jnp.asarray(np.random.default_rng(0).normal(size=4), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)


def loss_fn(w, x):
    y = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((y - 1) ** 2)


def make(axis_name=None, mean="gradients"):
    """The optimizer, and one device's step."""
    optimizer = jls.loss_scaled(
        optax.adam(0.1), jls.dynamic(2.0**10), axis_name=axis_name
    )

    def step(w, opt_state, x):
        def mean_loss(w):
            loss = loss_fn(w, x)
            return jax.lax.pmean(loss, "data") if mean == "loss" else loss

        loss, grads = jls.value_and_grad(mean_loss)(opt_state, w)
        if mean == "gradients":
            loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, loss

    return optimizer, step


def shard_mapped(step, **options):
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=MESH, **specs, **options))


def stack(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * 4), tree)


pmap = functools.partial(jax.pmap, axis_name="data", devices=jax.devices()[:4])


@pytest.mark.parametrize("placed", [False, True], ids=["where JAX puts it", "placed"])
def test_jit_on_a_mesh_is_right(placed):
    optimizer, step = make(mean=None)
    args = W, optimizer.init(W), X
    if placed:
        w = jax.device_put(W, NamedSharding(MESH, P()))
        x = jax.device_put(X, NamedSharding(MESH, P("data")))
        args = w, optimizer.init(w), x
    result = jls.check_step(jax.jit(step, donate_argnums=(0, 1)), *args)
    assert result.ok, str(result)
    assert ("out of sync" in result.not_applicable) == (not placed)


def test_sharded_parameters_are_right():
    optimizer, step = make(mean=None)
    w = jax.device_put(W, NamedSharding(MESH, P("data")))
    result = jls.check_step(jax.jit(step), w, optimizer.init(w), X)
    assert result.ok, str(result)
    assert not {"out of sync"} & {*result.not_tried, *result.not_applicable}


def test_shard_map_with_a_mean_of_the_loss_is_right():
    optimizer, step = make("data", mean="loss")
    result = jls.check_step(shard_mapped(step), W, optimizer.init(W), X)
    assert result.ok, str(result)
    assert set(result.not_tried) == set()


def test_unchecked_shard_map_with_axis_name_is_right():
    optimizer, step = make("data")
    step = shard_mapped(step, check_vma=False)
    result = jls.check_step(step, W, optimizer.init(W), X)
    assert result.ok, str(result)


def test_gradients_of_each_device_are_out_of_sync():
    """Each device has its own: the parameters part on the first good step."""
    optimizer, step = make("data", mean="loss")
    step = shard_mapped(step, check_vma=False)
    result = jls.check_step(step, W, optimizer.init(W), X)
    assert "out of sync" in result.broken
    assert "a good step" in result.seen["out of sync"]


def test_decisions_of_each_device_are_out_of_sync():
    """Without axis_name each device looks at its own shard of the gradients."""
    optimizer, _ = make()

    def step(w, opt_state, x):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, w, x)
        # The mean comes after the decision.
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        updates = jax.lax.pmean(updates, "data")
        return optax.apply_updates(w, updates), opt_state, jax.lax.pmean(loss, "data")

    step = shard_mapped(step, check_vma=False)
    result = jls.check_step(step, W, optimizer.init(W), X)
    assert "out of sync" in result.broken


# Each member of a state of `pmap` may be a model of its own: nothing is compared.
OWN = "of a state with an axis of devices each may train a model of its own"


@pytest.mark.parametrize("mean", ["gradients", None])
def test_devices_under_pmap_are_not_compared(mean):
    optimizer, step = make("data", mean=mean)
    args = stack((W, optimizer.init(W)))
    result = jls.check_step(pmap(step), *args, X.reshape(4, 2, 4))
    assert result.ok, str(result)
    assert result.not_tried == {"out of sync": OWN}


@pytest.mark.parametrize("mapped", ["pmap", "vmap"])
def test_rates_that_differ_on_purpose_are_right(mapped):
    optimizer = jls.loss_scaled(optax.sgd(0.1))

    def step(w, opt_state, x, rate):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, w, x)
        updates, opt_state = optimizer.update(grads, opt_state, w, value=loss)
        return optax.apply_updates(w, rate * updates), opt_state, loss

    args = (*stack((W, optimizer.init(W), X)), jnp.arange(1.0, 5))
    if mapped == "vmap":
        args = jax.device_put(args, NamedSharding(MESH, P("data")))
    run = pmap(step) if mapped == "pmap" else jax.jit(jax.vmap(step))
    result = jls.check_step(run, *args)
    assert result.ok, str(result)
    assert result.not_tried["out of sync"] == OWN


def test_ensemble_over_devices_is_right():
    optimizer, step = make(mean=None)
    w = jnp.stack([W, -W, 2 * W, W + 1])
    opt_state = jax.vmap(optimizer.init)(w)
    result = jls.check_step(pmap(step), w, opt_state, X.reshape(4, 2, 4))
    assert result.ok, str(result)
    assert result.not_tried["out of sync"] == OWN


def test_mistakes_are_named_on_a_mesh_too():
    optimizer, _ = make("data")

    def step(w, opt_state, x):
        def mean_loss(w):
            return jax.lax.pmean(loss_fn(w, x), "data")

        loss, grads = jax.value_and_grad(mean_loss)(w)
        updates, opt_state = optimizer.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, loss

    result = jls.check_step(shard_mapped(step), W, optimizer.init(W), X)
    assert result.broken == ("not scaled", "loss not passed")
