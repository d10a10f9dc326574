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


# A chip a line: what `_gpu` takes.
GPUS = """
h100 9.0 84942979072 132 128 3352320000000 52428800 233472 232448 1.98 NVIDIA H100 80GB HBM3
a100 8.0 85100068864 108 64 2039040000000 41943040 167936 166912 1.41 NVIDIA A100-SXM4-80GB
v100 7.0 16935682048 80 64 898048000000 6291456 98304 98304 1.53 Tesla V100-SXM2-16GB
t4 7.5 15828320256 40 64 320064000000 4194304 65536 65536 1.59 Tesla T4
b200 10.0 191514411008 148 128 7672320000000 132644864 233472 232448 1.965 NVIDIA B200
"""  # noqa: E501


def _gpu(line: str) -> Target:
    name, capability, memory, *numbers, chip = line.split(maxsplit=10)
    major, minor = capability.split(".")
    names = ("cores", "fpus", "bandwidth", "l2", "shared", "shared_optin", "clock")
    config = GPU.format(
        major=major,
        minor=minor,
        memory=memory,
        chip=chip,
        features=ACCELERATED if int(major) >= 9 else "",
        **dict(zip(names, numbers, strict=True)),
    )
    return Target(name, "cuda", chip, int(memory), config)


TPUS = [
    Target("v5e", "tpu", "TPU v5e", 16 * GIB),
    Target("v5p", "tpu", "TPU v5p", 95 * GIB, axes=3),
    Target("v6e", "tpu", "TPU v6e", 32 * GIB),
]
TARGETS = {one.name: one for one in [*map(_gpu, GPUS.strip().splitlines()), *TPUS]}
