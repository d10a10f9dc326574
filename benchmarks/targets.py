"""The accelerators to compile for; none of them has to be here.

XLA's compilers for TPUs and GPUs run on any machine. They give the program that a chip
would run, not its time.
"""

import importlib.util
from typing import Any, NamedTuple

import numpy as np

GIB = 2**30
# Numbers as in openxla/xla, xla/backends/gpu/target_config/specs.
GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_optin} core_count: {cores}
  fpus_per_core: {fpus} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }} device_description_str: "{chip}"
"""
ACCELERATED = "feature_extension: ACCELERATED_FEATURES"


class MissingCompilerError(Exception):
    """The compiler for a target is not installed."""


class Target(NamedTuple):
    """A kind of chip."""

    name: str
    kind: str  # "tpu" or "cuda"
    chip: str
    memory: int  # bytes
    config: str = ""  # of a GPU, as text of a GpuTargetConfigProto
    axes: int = 2  # of a TPU's topology
    most_chips: int = 256  # for more on a v5e libtpu ends the process

    @property
    def extra(self) -> str:
        """The extra of this package that brings the compiler."""
        return f"{self.kind}-aot"

    def check(self) -> None:
        """Raises MissingCompilerError, in one clear line."""
        wheel = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}[self.kind]
        if importlib.util.find_spec(wheel) is None:
            raise MissingCompilerError(
                f"{self.name}: the compiler for it is not installed. "
                f'Install it with: pip install -e ".[{self.extra}]"'
            )

    def devices(self, chips: int = 1) -> list[Any]:
        """Devices to compile for; none is there. GPUs are those of one host."""
        from jax.experimental import topologies

        self.check()
        if self.kind == "cuda":
            described = topologies.get_topology_desc(
                topology_name="",
                platform="cuda",
                target_config=self.config,
                topology=f"1x1x{chips}",
            )
        else:
            shape = tpu_shape(chips, self.axes)
            described = topologies.get_topology_desc(
                topology_name=f"{self.name}:{'x'.join(map(str, shape))}",
                platform="tpu",
            )
        return described.devices[:chips]


def tpu_shape(chips: int, axes: int) -> tuple[int, ...]:
    """The smallest topology of a host or more that has so many chips: (16, 16)."""
    shape = [2, 2, *[1] * (axes - 2)]
    while np.prod(shape) < chips:
        shape[shape.index(min(shape))] *= 2
    return tuple(sorted(shape, reverse=True)) if axes == 2 else tuple(shape)


def _gpu(name: str, capability: str, memory: int, chip: str, **numbers: Any) -> Target:
    major, minor = capability.split(".")
    numbers = {"features": "", **numbers}
    config = GPU.format(major=major, minor=minor, memory=memory, chip=chip, **numbers)
    return Target(name, "cuda", chip, memory, config)


H100 = _gpu(
    name="h100",
    capability="9.0",
    memory=84942979072,
    chip="NVIDIA H100 80GB HBM3",
    cores=132,
    fpus=128,
    bandwidth=3352320000000,
    l2=52428800,
    shared=233472,
    shared_optin=232448,
    clock=1.98,
    features=ACCELERATED,
)
A100 = _gpu(
    name="a100",
    capability="8.0",
    memory=85100068864,
    chip="NVIDIA A100-SXM4-80GB",
    cores=108,
    fpus=64,
    bandwidth=2039040000000,
    l2=41943040,
    shared=167936,
    shared_optin=166912,
    clock=1.41,
)
V100 = _gpu(
    name="v100",
    capability="7.0",
    memory=16935682048,
    chip="Tesla V100-SXM2-16GB",
    cores=80,
    fpus=64,
    bandwidth=898048000000,
    l2=6291456,
    shared=98304,
    shared_optin=98304,
    clock=1.53,
)
T4 = _gpu(
    name="t4",
    capability="7.5",
    memory=15828320256,
    chip="Tesla T4",
    cores=40,
    fpus=64,
    bandwidth=320064000000,
    l2=4194304,
    shared=65536,
    shared_optin=65536,
    clock=1.59,
)
B200 = _gpu(
    name="b200",
    capability="10.0",
    memory=191514411008,
    chip="NVIDIA B200",
    cores=148,
    fpus=128,
    bandwidth=7672320000000,
    l2=132644864,
    shared=233472,
    shared_optin=232448,
    clock=1.965,
    features=ACCELERATED,
)
V5E = Target("v5e", "tpu", "TPU v5e", 16 * GIB)
V5P = Target("v5p", "tpu", "TPU v5p", 95 * GIB, axes=3)
V6E = Target("v6e", "tpu", "TPU v6e", 32 * GIB)

TARGETS = {one.name: one for one in (H100, A100, V100, T4, B200, V5E, V5P, V6E)}
