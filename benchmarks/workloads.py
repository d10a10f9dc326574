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
from benchmarks.placement import whole
from benchmarks.sizes import Size


class Problem(NamedTuple):
    """What is trained; `bad` is a batch on which the gradients overflow."""

    params: Any
    loss_fn: Callable[[Any, Any], Any]
    good: Any
    bad: Any


def placed(problem: Problem, devices: int) -> Problem:
    """`problem` with its parameters on each device, and its batch spread over all."""
    if devices == 1:
        return problem
    where = whole(jax.devices()[:devices])
    # Given gradients are not a batch: each device has them all.
    is_given = problem.loss_fn is models.given_gradients
    of_batch = where.sharded if is_given else where.sharded_batch

    def put(tree, shapes):
        return jax.device_put(tree, jax.tree.map(lambda x: x.sharding, shapes))

    return problem._replace(
        params=put(problem.params, where.sharded(problem.params)),
        good=put(problem.good, of_batch(problem.good)),
        bad=put(problem.bad, of_batch(problem.bad)),
    )


class Workload(NamedTuple):
    """A problem, an optimizer, and how steps follow each other."""

    name: str
    problem: Callable[[], Problem]
    optimizer: optax.GradientTransformation
    cycle: int = 1  # steps that belong together: a sample is one or more cycles
    # The fewest extra reads of all gradients that a guard needs, in an update alone.
    least_reads: int | None = None
    only: list[str] | None = None  # these contestants, unless the user names them
    contestants: dict[str, Make] | None = None  # in the place of the usual ones
    quick: bool = False  # whether `--quick` runs it
    growth: str | None = None  # "leaves" or "parameters" if this is a point of a curve


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
    yield Workload("update adamw", tree(), ADAMW, least_reads=1, quick=True)
    yield Workload("update clip + adamw", tree(), CLIPPED, least_reads=0, quick=True)
    yield Workload("step transformer, clip + adamw", transformer, CLIPPED, quick=True)
    yield Workload("step transformer, adamw", transformer, ADAMW)
    yield Workload("update sgd momentum", tree(), MOMENTUM, least_reads=1)
    yield Workload("update adafactor", tree(), ADAFACTOR, least_reads=0)
    yield Workload("update muon", tree(size.muon_tree), MUON, least_reads=1)
    yield Workload("step convnet, sgd momentum", convnet, MOMENTUM)
    yield Workload(
        "step transformer, accumulation over 8", transformer, ACCUMULATED, **accumulated
    )
    yield Workload(
        "update adamw, accumulation over 8", tree(), ACCUMULATED, **accumulated
    )
    for total in size.parameters:
        problem = _even_tree(total, 50)
        name = f"update adamw, {total:,} parameters"
        yield Workload(name, problem, ADAMW, growth="parameters", **secondary)
    for count in size.leaves:
        problem = _even_tree(size.leaf_total, count)
        name = f"update adamw, {count:,} leaves"
        only = MAIN if count < 1000 else FEW
        yield Workload(name, problem, ADAMW, quick=True, growth="leaves", only=only)
    only = MAIN if size.many_leaves[0] < 1000 else FEW
    leaves = partial(many_leaves, *size.many_leaves)
    yield Workload("step many leaves, adamw", leaves, ADAMW, only=only)


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


def _even_tree(total: int, leaves: int) -> Callable[[], Problem]:
    def problem():
        rng = models.generator(0)
        leaf = total // leaves
        return update_only([models.normal(rng, leaf, fan_in=1) for _ in range(leaves)])

    return problem
