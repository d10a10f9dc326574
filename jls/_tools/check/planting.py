# SPDX-License-Identifier: Apache-2.0
"""Plants an inf in a gradient, inside the program of a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.facts import Value
from jls._program.primitives import primitive_of
from jls._program.replay import Watched, replay
from jls._tools.check.subject import Subject


def inf_is_applied(
    subject: Subject, leaves: Sequence[Any], gradient: Value
) -> bool | None:
    """Whether a step is applied in which a true gradient has an inf in one element.

    Args:
      subject: the step.
      leaves: its arguments.
      gradient: the facts about a gradient that a wrapper is given.

    Returns:
      Whether no wrapper skipped; None if nothing can be planted where the loss scale
      was divided out of the gradient, or before that where an inf may be lost.
    """
    reading, site = subject.reading, gradient.scaled or gradient.unscaled
    skips = [x.counters["skips"] for x in subject.scales if x.counters]
    counters = {i: subject.places[i] for i in skips if i in subject.places}
    if reading is None or site is None or not counters:
        return None
    if any(primitive_of(x).control == "devices" for x in site.equations):
        return None
    traced = reading.traced

    def plant(here, inputs, results):
        if here.indices != site.indices:
            return Watched(results)
        return Watched([_with_inf(x) for x in results])

    @jax.jit
    def run(inputs):
        results, _ = replay(traced.program, inputs, plant)
        return {i: results[n] for i, n in counters.items()}

    new = run([jnp.asarray(leaves[i]) for i in traced.inputs])
    return not any(np.any(np.asarray(new[i]) > np.asarray(leaves[i])) for i in counters)


def _with_inf(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return x
    return x.at[(0,) * x.ndim].set(jnp.inf)
