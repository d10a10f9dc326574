"""`jls.compare` of programs on a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jls

W = jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (16, 8))


def local_loss(eps):
    def loss(w, x):
        h = jnp.tanh(x @ w)
        h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + eps)
        return jnp.mean(h @ w**2)

    return loss


def on_devices(eps):
    """The mean over four devices, each of which has a fourth of the batch."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda w, x: lax.pmean(local_loss(eps)(w, x), "data"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )


@pytest.mark.parametrize("of", [lambda fun: fun, jax.grad], ids=["value", "gradient"])
def test_the_line_inside_of_a_shard_map_is_named(of):
    found = jls.compare(of(on_devices(1e-6)), of(on_devices(1e-2)), W, X)
    assert found.birth.a.operation == "add"
    assert (found.birth.a.function, found.birth.a.file) == ("loss", __file__)


@pytest.mark.parametrize("of", [lambda fun: fun, jax.grad], ids=["value", "gradient"])
def test_one_device_and_four_are_equal(of):
    found = jls.compare(of(local_loss(1e-6)), of(on_devices(1e-6)), W, X)
    assert found.birth is None
    assert found.equal


def test_a_loop_on_devices_is_compared():
    """Each device counts its iterations."""

    def grown(rate):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("data")
        return jax.shard_map(
            lambda x: lax.while_loop(lambda y: jnp.max(y) < 8, lambda y: y * rate, x),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        )

    x = jnp.arange(1.0, 9.0)
    assert jls.compare(grown(1.5), grown(1.5), x)
    found = jls.compare(grown(1.5), grown(1.6), x)
    assert found.birth.a.operation == "mul"
