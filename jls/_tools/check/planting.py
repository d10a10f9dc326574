# SPDX-License-Identifier: Apache-2.0
"""Plants an inf in a gradient, inside the program of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.control import Site
from jls._program.facts import Value
from jls._program.primitives import primitive_of
from jls._program.replay import Watched, replay
from jls._tools.check.runs import Leaves, Runner
from jls._tools.reading.reading import Reading


def inf_is_applied(
    runner: Runner, reading: Reading, leaves: Leaves, gradient: Value
) -> bool | None:
    """Whether a step is applied in which a true gradient has an inf in one element.

    Args:
      runner: of the step.
      reading: of its program.
      leaves: its arguments.
      gradient: the facts about a gradient that a wrapper is given.

    Returns:
      Whether no wrapper skipped; None if nothing can be planted where the loss scale
      was divided out of the gradient, or before that where an inf may be lost.
    """
    site = gradient.scaled or gradient.unscaled
    if site is None or _is_on_several_devices(site):
        return None

    def plant(here, inputs, results):
        if here.indices != site.indices:
            return Watched(results)
        return Watched([_with_inf(x) for x in results])

    @jax.jit
    def run(inputs):
        results, _ = replay(reading.traced.program, inputs, plant)
        return {i: results[n] for i, n in counters.items()}

    counters = _results_of_counters(runner, reading)
    if not counters:
        return None
    inputs = [jnp.asarray(leaves[i]) for i in reading.traced.inputs]
    new = run(inputs)
    return not any(np.any(np.asarray(new[i]) > np.asarray(leaves[i])) for i in counters)


def _is_on_several_devices(site: Site) -> bool:
    return any(primitive_of(x).control == "devices" for x in site.equations)


def _with_inf(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return x
    return x.at[(0,) * x.ndim].set(jnp.inf)


def _results_of_counters(runner: Runner, reading: Reading) -> dict[int, int]:
    """The place among the results of each wrapper's count of skips, by leaf."""
    paths = {
        runner.carried.sources.get(scale.counters["skips"]): scale.counters["skips"]
        for scale in runner.scales
        if scale.counters
    }
    paths |= {
        runner.arguments.items[i].path: i
        for i in runner.carried.in_place
        if any(i == scale.counters.get("skips") for scale in runner.scales)
    }
    order = [*reading.outputs, *reading.objects]
    return {paths[path]: n for n, path in enumerate(order) if path in paths}
