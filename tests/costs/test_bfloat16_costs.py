"""What `jls.bfloat16_params` costs beside optax alone: compiled, not run.

On a CPU always; for an H100 and a v5e where their compilers are installed:
`pip install -e ".[cuda-aot,tpu-aot]"`. That for a GPU needs `JAX_PLATFORMS=cpu`.
"""

import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jls
from benchmarks import ENVIRONMENT
from benchmarks.hlo import Program
from benchmarks.placement import whole
from benchmarks.targets import TARGETS

pytestmark = pytest.mark.standard_promotion

# Two layers of 12.6 M parameters: on a TPU too large for the memory on the chip.
SHAPES = {
    f"layer{i}": {
        "qkv": (1024, 3072),
        "o": (1024, 1024),
        "up": (1024, 4096),
        "n": (1024,),
    }
    | {"down": (4096, 1024)}
    for i in range(2)
}
ADAMW = optax.adamw(1e-5)
WAYS = {
    "bfloat16": ADAMW,
    "stochastic": jls.bfloat16_params(ADAMW),
    "exact": jls.bfloat16_params(ADAMW, rounding="exact"),
}
CHIPS = {"h100": "jax_cuda12_plugin", "v5e": "libtpu"}


@pytest.fixture(autouse=True)
def _quiet_libtpu(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def lowered(way, place=lambda tree: tree):
    optimizer = WAYS[way]
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = map(place, (params, state, params))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args)


@functools.cache
def figures(chip, way):
    """The program, the bytes a parameter that it moves, its temporary memory."""
    try:
        devices = TARGETS[chip].devices(1)
    except NotImplementedError as error:
        pytest.skip(f"{error}: set JAX_PLATFORMS=cpu")
    compiled = lowered(way, whole(devices).sharded).compile()
    program = Program(compiled.as_text())
    count = sum(
        math.prod(shape) for layer in SHAPES.values() for shape in layer.values()
    )
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return program, program.bytes / count, temporary / count


chips = pytest.mark.parametrize(
    "chip",
    [
        pytest.param(
            chip,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(module) is None, reason=f"no {module}"
            ),
        )
        for chip, module in CHIPS.items()
    ],
)


@chips
def test_stochastic_rounding_moves_the_bytes_of_optax_alone(chip):
    plain, bytes_of_plain, temporary = figures(chip, "bfloat16")
    ours, moved, more = figures(chip, "stochastic")
    assert moved <= 1.01 * bytes_of_plain
    assert more <= temporary + 0.01
    # On a TPU a scalar is an instruction.
    assert chip != "h100" or ours.kernels <= plain.kernels + 1


@chips
def test_exact_rounding_moves_the_rest_too(chip):
    _, bytes_of_plain, _ = figures(chip, "bfloat16")
    _, moved, temporary = figures(chip, "exact")
    # 4 bytes more of 14.
    assert moved <= 1.3 * bytes_of_plain
    assert temporary < 0.01


@pytest.mark.parametrize("way", ["stochastic", "exact"])
def test_no_array_of_random_numbers_or_of_hashes_is_in_memory(way, on_cpu):
    """XLA for a CPU fuses no kernel with two results, and still writes none."""
    text = lowered(way).compile().as_text()
    main = text[text.index("\nENTRY") :]
    assert "bf16[1024,4096]" in main
    assert not re.findall(r"u32\[\d+,\d+\]", main)
    operations = lowered(way).as_text()
    assert "rng" not in operations
    assert "threefry" not in operations
