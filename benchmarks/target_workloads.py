"""The workloads that are compiled for a target: too large for a chip's own memory.

A TPU keeps a model of a few million parameters on the chip, where bytes cost nothing.
Nothing here is allocated, so any size will do; few layers keep compilation short.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import models
from benchmarks.contestants import ALL, FEW, MAIN, TRAIN_STEPS, ours
from benchmarks.workloads import (
    ADAFACTOR,
    ADAMW,
    CLIPPED,
    LEARNING_RATE,
    MOMENTUM,
    MUON,
    Problem,
    Workload,
    many_leaves,
    training,
    update_only,
)

LION = optax.lion(LEARNING_RATE)


class TargetSize(NamedTuple):
    """A transformer is (width, layers, vocabulary)."""

    transformer: tuple[int, int, int] = (2560, 2, 12000)
    deep: tuple[int, int, int] = (768, 12, 50257)  # 98 leaves, half of them small
    tokens: tuple[int, int] = (4, 512)  # batch, length
    convnet: tuple[int, list[int], int] = (64, [3, 4, 6, 3], 1000)
    images: tuple[int, int] = (64, 224)  # batch, pixels
    many_leaves: tuple[int, int] = (1000, 256)  # leaves, width


SIZE = TargetSize()
TINY = TargetSize(
    transformer=(32, 1, 50),
    deep=(32, 2, 50),
    tokens=(1, 8),
    convnet=(4, [1], 4),
    images=(1, 16),
    many_leaves=(3, 8),
)


def transformer(
    shape: tuple[int, int, int], tokens: tuple[int, int], dtype: Any = jnp.float32
) -> Problem:
    """A train step of a transformer whose parameters have this dtype."""
    params = models.transformer_params(*shape)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    loss_fn = models.transformer_loss(max(1, shape[0] // 64))
    return training(params, loss_fn, models.transformer_batch(*tokens, shape[2]))


def convnet(size: TargetSize) -> Problem:
    """A train step of ResNet-50."""
    batch = models.convnet_batch(*size.images, size.convnet[2])
    params = models.convnet_params(*size.convnet)
    return training(params, models.convnet_loss, batch)


def target_workloads(size: TargetSize) -> Iterator[Workload]:
    """The list for all targets, the most telling first."""

    def usual(dtype: Any = jnp.float32) -> Callable[[], Problem]:
        return lambda: transformer(size.transformer, size.tokens, dtype)

    main: dict[str, Any] = {"only": MAIN}
    checked = {**ALL, "jls": partial(ours, check_updates=True)}
    yield Workload("adamw", usual(), ADAMW, quick=True, **main)
    yield Workload("clip + adamw", usual(), CLIPPED, quick=True, **main)
    yield Workload("sgd momentum", usual(), MOMENTUM, **main)
    yield Workload(
        "train_step, clip + adamw", usual(), CLIPPED, contestants=TRAIN_STEPS
    )
    yield Workload("adafactor", usual(), ADAFACTOR, **main)
    yield Workload("muon", usual(), MUON, **main)
    yield Workload("lion", usual(), LION, **main)
    yield Workload("check_updates, adamw", usual(), ADAMW, contestants=checked, **main)
    yield Workload("bfloat16 parameters, adamw", usual(jnp.bfloat16), ADAMW, **main)
    yield Workload("ResNet-50, sgd momentum", lambda: convnet(size), MOMENTUM, **main)

    def update():
        return update_only(models.transformer_params(*size.deep))

    yield Workload("update alone, adamw", update, ADAMW, **main)
    yield Workload("update alone, sgd momentum", update, MOMENTUM, **main)
    leaves = partial(many_leaves, *size.many_leaves)
    # XLA takes two minutes for each, and for Flax's chain of a thousand `and`s four.
    yield Workload("1,000 leaves, adamw", leaves, ADAMW, only=FEW)
