"""What a guarded step costs on a TPU, beside the peers: compiled there, not run.

Needs libtpu (`pip install -e ".[tpu-aot]"`), and no TPU.
"""

import functools
from functools import partial

import optax
import pytest

from benchmarks import ENVIRONMENT, compiled, placement, target_workloads
from benchmarks.contestants import ALL, FLOOR, OURS
from benchmarks.contestants import ours as by_hand
from benchmarks.half import models as half_models
from benchmarks.half import programs as half_programs
from benchmarks.targets import TARGETS
from jls import spikes

pytest.importorskip("libtpu")
pytestmark = pytest.mark.standard_promotion

# One layer, to compile fast; too large for the memory on the chip, to tell the truth.
SHAPE, TOKENS = (2560, 1, 12000), (4, 512)
SPIKES = "jls with spikes"
WORKLOADS = {
    one.name: one._replace(
        contestants={**ALL, SPIKES: partial(by_hand, spikes=spikes())}
    )
    for one in target_workloads.target_workloads(target_workloads.TINY)
    if one.name in ("adamw", "clip + adamw")
}


@pytest.fixture(autouse=True)
def _quiet_libtpu(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@functools.cache
def figures_of(workload, name):
    target = TARGETS["v5e"]
    problem = compiled.abstract(lambda: target_workloads.transformer(SHAPE, TOKENS))
    where = placement.whole(target.devices(1))
    return compiled.compile_step(WORKLOADS[workload], name, problem, target, where)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_peer_moves_fewer_bytes_or_needs_less_memory(workload):
    ours = figures_of(workload, OURS)
    for peer in ("apply_if_finite", "flax"):
        theirs = figures_of(workload, peer)
        assert ours["bytes_accessed"] <= 1.001 * theirs["bytes_accessed"], peer
        # So much more has a step by hand with selects at the end.
        assert ours["temporary_bytes"] <= 1.12 * theirs["temporary_bytes"], peer


def test_with_clipping_the_check_costs_no_pass():
    ours, bare = (figures_of("clip + adamw", name) for name in (OURS, FLOOR))
    assert ours["bytes_accessed"] <= bare["bytes_accessed"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_spikes_read_the_gradients_no_more_often(workload):
    plain, ours = (figures_of(workload, name) for name in (OURS, SPIKES))
    assert ours["bytes_accessed"] <= 1.001 * plain["bytes_accessed"]
    assert ours["temporary_bytes"] <= 1.01 * plain["temporary_bytes"]


def test_autocast_needs_less_than_dtype_by_hand():
    """A transformer whose layers are in a scan, forward, backward and update."""
    model = half_models.transformer("scan", (4096, 512, 4, 8), (8, 512))
    by_dtype, ours = (
        half_programs.figures(model, way, TARGETS["v5e"], optax.sgd(0.1))
        for way in ("by hand", "autocast")
    )
    assert ours["bytes"] <= 0.95 * by_dtype["bytes"]
    assert ours["temporary_bytes"] <= 0.92 * by_dtype["temporary_bytes"]
    assert ours["kernels"] <= by_dtype["kernels"]


LAYOUTS = {
    "data": (placement.whole, 0),
    "fsdp": (placement.fsdp, 1),
    "fsdp x tensor": (placement.fsdp_tensor, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_agree_in_one_small_all_reduce_for_each_axis(layout):
    """Of the numbers of the leaves: none where parameters are whole, no all-gather."""
    target = TARGETS["v5e"]
    make, axes = LAYOUTS[layout]
    problem = compiled.abstract(
        lambda: target_workloads.transformer((512, 1, 512), (8, 64))
    )
    ours, bare = (
        compiled.compile_step(
            WORKLOADS["clip + adamw"], name, problem, target, make(target.devices(4))
        )["collectives"]
        for name in (OURS, FLOOR)
    )
    more = {
        kind: ours[kind]["count"] - bare.get(kind, {"count": 0})["count"]
        for kind in ours
    }
    assert more.pop("all-reduce", 0) <= axes
    assert not any(more.values()), more
