"""Where parameters, optimizer state and batch lie: on one chip or on many."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Smaller arrays stay whole.
LEAST_SPLIT = 2**14


class Placement(NamedTuple):
    """A mesh, and how an array of given shape is split over it."""

    mesh: Mesh
    split: Callable[[tuple[int, ...]], P]

    def sharded(self, tree: Any) -> Any:
        """The tree of shapes, each with its sharding. Moments follow parameters."""
        return jax.tree.map(
            lambda leaf: self._placed(leaf, self.split(leaf.shape)), tree
        )

    def sharded_batch(self, tree: Any) -> Any:
        """The batch, split along its leading axis over the data axis."""
        count = self.mesh.shape["data"]

        def placed(leaf):
            shared = leaf.ndim and leaf.shape[0] % count == 0
            return self._placed(leaf, P("data") if shared else P())

        return jax.tree.map(placed, tree)

    def _placed(self, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def whole(devices: list[Any]) -> Placement:
    """All on each device; only the batch is split."""
    return Placement(Mesh(np.asarray(devices), ("data",)), lambda shape: P())


def fsdp(devices: list[Any]) -> Placement:
    """The largest axis of each array is split over the devices, as is the batch."""
    mesh = Mesh(np.asarray(devices), ("data",))
    return Placement(mesh, lambda shape: split(shape, {"data": len(devices)}))


def fsdp_tensor(devices: list[Any]) -> Placement:
    """The largest axis is split over "model", the next over "data" and the batch."""
    model = 2 ** (int(np.log2(len(devices))) // 2)
    mesh = Mesh(np.asarray(devices).reshape(-1, model), ("data", "model"))
    counts = {"model": model, "data": len(devices) // model}
    return Placement(mesh, lambda shape: split(shape, counts))


def split(shape: tuple[int, ...], counts: dict[str, int]) -> P:
    """Gives each mesh axis the largest axis of the array that it divides."""
    spec: list[str | None] = [None] * len(shape)
    if np.prod(shape, dtype=np.int64) >= LEAST_SPLIT:
        for name, count in counts.items():
            free = [
                i for i, size in enumerate(shape) if not spec[i] and size % count == 0
            ]
            if free:
                spec[max(free, key=lambda i: shape[i])] = name
    return P(*spec)


MESHES: dict[str, Callable[[list[Any]], Placement]] = {
    "data": whole,
    "fsdp": fsdp,
    "fsdp x tensor": fsdp_tensor,
}
