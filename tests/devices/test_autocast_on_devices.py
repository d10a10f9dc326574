"""`jls.autocast` on eight devices: in `shard_map`, and under `jit` on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.linalg import norm

import jls

P = PartitionSpec
STATE = np.random.RandomState(0)
X = jnp.asarray(STATE.randn(16, 16), jnp.float32)
UP, DOWN = (jnp.asarray(STATE.randn(*s) / 4, jnp.float32) for s in [(16, 32), (32, 16)])


def off(ours, plain):
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True))
    return norm([norm(x - y) for x, y in pairs]) / norm([norm(y) for _, y in pairs])


def mesh_of(kind):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def loss_of_shards(x, up, down):
    def layer(x, up, down):
        return x + lax.psum(jnp.tanh(x @ up) @ down, "d")

    on_devices = jax.shard_map(
        layer,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(), P(None, "d"), P("d")),
        out_specs=P(),
    )
    return jnp.mean(jnp.square(on_devices(x, up, down) @ down.T))


def loss(x, up, down):
    return jnp.mean(jnp.square((x + jnp.tanh(x @ up) @ down) @ down.T))


def gradients(fun):
    return jax.jit(jax.value_and_grad(fun, argnums=(1, 2)))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_sum_over_devices_in_shard_map_is_float32(half):
    cast = jls.autocast(loss_of_shards, half)
    text = jax.jit(cast).lower(X, UP, DOWN).as_text()
    (of_sum,) = re.findall(r"all_reduce.*?\}\) : \(tensor<([^>]*)>", text, re.S)
    assert of_sum == "16x16xf32"
    tolerance = 2e-3 if half == "float16" else 2e-2
    assert off(gradients(cast)(X, UP, DOWN), gradients(loss)(X, UP, DOWN)) < tolerance


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_product_that_a_mesh_splits_is_as_without_a_mesh(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        specs = P("d"), P(), P()
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((X, UP, DOWN), specs, strict=True)
        ]
        made = gradients(jls.autocast(loss, jnp.float16))(*args)
        for grad, arg in zip(made[1], args[1:], strict=True):
            assert grad.sharding.is_equivalent_to(arg.sharding, 2)
    one = gradients(jls.autocast(loss, jnp.float16))(X, UP, DOWN)
    assert off(jax.device_get(made), one) < 1e-3
    assert off(jax.device_get(made), gradients(loss)(X, UP, DOWN)) < 2e-3
