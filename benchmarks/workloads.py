"""The workloads: what is trained, with which optimizer, and how large it is.

Not the full cross product: a list that covers each dimension that matters.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import models
from benchmarks.contestants import FEW, MAIN, Make
from benchmarks.sizes import Size


class Problem(NamedTuple):
    """What is trained; `bad` is a batch on which the gradients overflow."""

    params: Any
    loss_fn: Callable[[Any, Any], Any]
    good: Any
    bad: Any


class Workload(NamedTuple):
    """A problem, an optimizer, and how steps follow each other."""

    name: str
    problem: Callable[[], Problem]
    optimizer: optax.GradientTransformation
    cycle: int = 1  # steps that belong together: a sample is one or more cycles
    only: list[str] | None = None  # these contestants, unless the user names them
    contestants: dict[str, Make] | None = None  # in the place of the usual ones
    quick: bool = False  # whether `--quick` runs it


LEARNING_RATE = 1e-4
ADAMW = optax.adamw(LEARNING_RATE)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
MOMENTUM = optax.sgd(LEARNING_RATE, momentum=0.9)
ADAFACTOR = optax.adafactor(LEARNING_RATE)
MUON = optax.contrib.muon(LEARNING_RATE)
ACCUMULATED = optax.MultiSteps(ADAMW, 8).gradient_transformation()


def workloads(size: Size) -> Iterator[Workload]:
    """The list, the most telling first, since a run may run out of time."""

    def tree(shape=size.tree):
        return lambda: update_only(models.transformer_params(*shape))

    def transformer():
        width, _, vocabulary = size.transformer
        params = models.transformer_params(*size.transformer)
        batch = models.transformer_batch(*size.tokens, vocabulary)
        return training(params, models.transformer_loss(max(1, width // 64)), batch)

    def convnet():
        batch = models.convnet_batch(*size.images, size.convnet[2])
        params = models.convnet_params(*size.convnet)
        return training(params, models.convnet_loss, batch)

    secondary: dict[str, Any] = {"only": MAIN}
    accumulated: dict[str, Any] = {"cycle": 8, **secondary}
    yield Workload("update adamw", tree(), ADAMW, quick=True)
    yield Workload("update clip + adamw", tree(), CLIPPED, quick=True)
    yield Workload("step transformer, clip + adamw", transformer, CLIPPED, quick=True)
    yield Workload("step transformer, adamw", transformer, ADAMW)
    yield Workload("update sgd momentum", tree(), MOMENTUM)
    yield Workload("update adafactor", tree(), ADAFACTOR)
    yield Workload("update muon", tree(size.muon_tree), MUON)
    yield Workload("step convnet, sgd momentum", convnet, MOMENTUM)
    yield Workload(
        "step transformer, accumulation over 8", transformer, ACCUMULATED, **accumulated
    )
    yield Workload(
        "update adamw, accumulation over 8", tree(), ACCUMULATED, **accumulated
    )
    only = MAIN if size.many_leaves[0] < 1000 else FEW
    leaves = partial(many_leaves, *size.many_leaves)
    yield Workload("step many leaves, adamw", leaves, ADAMW, quick=True, only=only)


def many_leaves(count: int, width: int) -> Problem:
    """A train step of a model of many small leaves."""
    rng = models.generator(1)
    inputs = jnp.asarray(rng.standard_normal((8, width), np.float32))
    batch = inputs, jnp.asarray(rng.integers(0, width, 8), jnp.int32)
    params = models.many_leaves_params(count, width)
    return training(params, models.many_leaves_loss, batch)


def training(params: Any, loss_fn: Any, batch: tuple[Any, Any]) -> Problem:
    """A train step, whose batch also says whether the gradients overflow."""
    good, bad = jnp.asarray(models.GOOD), jnp.asarray(models.OVERFLOWING)
    return Problem(params, loss_fn, (*batch, good), (*batch, bad))


def update_only(params: Any) -> Problem:
    """A step whose gradients are its batch."""
    leaves, structure = jax.tree.flatten(params)
    rng = models.generator(2)
    grads = [models.normal(rng, *x.shape, fan_in=10**6) for x in leaves]
    bad = [grads[0].at[(0,) * grads[0].ndim].set(jnp.inf), *grads[1:]]
    return Problem(
        params,
        models.given_gradients,
        structure.unflatten(grads),
        structure.unflatten(bad),
    )
