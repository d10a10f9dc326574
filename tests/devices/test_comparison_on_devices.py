"""The row of docs/comparison.md that needs devices: inside `shard_map`."""

import sys
from pathlib import Path

import comparison_page
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

sys.path.append(str(Path(__file__).parents[1] / "pages/comparison"))
import jax_peers

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore"),  # of other libraries
]

ROW = "devices agree inside shard_map"
PAGE = {
    name: cell
    for title in ("In JAX, you apply the step", "In JAX, the optimizer skips the step")
    for (name, row), cell in comparison_page.table(title).items()
    if row == ROW
}
PEERS = {
    "jls": jax_peers.Jls,
    "Flax": jax_peers.Flax,
    "jmp": jax_peers.Jmp,
    "optax": jax_peers.Optax,
    "MPX": jax_peers.Mpx,
    "Keras": jax_peers.Keras,
}
MESH = Mesh(np.array(jax.devices()), ("d",))
SPLIT = PartitionSpec("d")
ONE_IS_BAD = jnp.ones(8).at[3].set(jnp.inf)


def devices_agree(peer):
    """Whether all devices have the same state after a step that is bad on one."""
    run = peer.init(scale=8.0)

    def step(run, gradients):
        run = peer.step(run, gradients[0])
        state = run.scaling, jax.tree.map(jnp.isfinite, run.params)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], state)

    step = jax.shard_map(
        step, mesh=MESH, in_specs=(None, SPLIT), out_specs=SPLIT, check_vma=False
    )
    scaling = jax.tree.leaves(jax.jit(step)(run, ONE_IS_BAD))
    return all(np.all(leaf == leaf[0]) for leaf in map(np.asarray, scaling))


@pytest.mark.parametrize("name", PAGE)
def test_devices_agree_or_not_as_the_page_says(name):
    if why_not := comparison_page.why_not(name):
        pytest.skip(why_not)
    assert not devices_agree(PEERS[name]())
    if PAGE[name] != "no":
        assert PAGE[name] == "axis_name"
        peer = PEERS[name]()
        peer.axis_name = "d"
        assert devices_agree(peer)


def test_flax_averages_what_jax_has_summed():
    """The footnote: under the default checks its gradient is too large."""
    peer = jax_peers.Flax()
    peer.axis_name = "d"
    scaling = peer.init(scale=8.0).scaling

    def gradient(params, x):
        transformed = scaling.value_and_grad(lambda p: p * x[0], axis_name="d")
        return transformed(params).grad

    for check_vma, times in ((False, 1), (True, 8)):
        compute = jax.shard_map(
            gradient,
            mesh=MESH,
            in_specs=(PartitionSpec(), SPLIT),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        assert jax.jit(compute)(jnp.float32(1.0), jnp.arange(8.0)) == 3.5 * times
