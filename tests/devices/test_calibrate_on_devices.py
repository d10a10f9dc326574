"""`jls.calibrate` of a step on a mesh."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jls

pytestmark = [pytest.mark.standard_promotion, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("losses", [False, True])
def test_calibrate_takes_a_step_on_a_mesh(kind, losses):
    """Explicit axes are those that `jax.make_mesh` gives by default."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"a": jax.random.normal(keys[0], (8, 16)) / 3, "b": jnp.ones((16, 4)) / 4}
    x = jax.random.normal(keys[1], (32, 8))

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - 1) ** 2)

    optimizer = jls.loss_scaled(optax.adam(1e-3))
    step = jax.jit(jls.train_step(loss_fn, optimizer, compute_dtype=jnp.float16))
    alone = jls.calibrate(step, params, optimizer.init(params), x)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        found = jls.calibrate(step, params, optimizer.init(params), x, losses=losses)
    assert found.ceiling == alone.ceiling
    assert len(found.cotangents) == len(alone.cotangents)
