# SPDX-License-Identifier: Apache-2.0
"""Computes what a wrapper is given at other loss scales, in float32.

Reading finds a sum of what the scale is a factor of and of what it is not. A leak is
one. But a solve whose right side and result scale alike is none, although it adds a
small number to the diagonal: what comes out does not depend on the scale, but for the
error of the solve. The program does not say that, so the numbers decide: a term that
is not scaled comes out over the scale.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jls._program.alone import WIDE
from jls._program.control import Indices
from jls._program.frames import Frame
from jls._program.recorder import Recorder
from jls._program.replay import Watched
from jls._tools.check.subject import Subject
from jls._tools.reading.updates import SeenValue

# At a scale of 1 nothing leaks. An L2 penalty of 1e-6 that is not scaled shows at the
# lowest of these, a clip of scaled gradients at the highest.
_SCALES = (2.0**-10, 2.0**-8, 1.0, 2.0**10, 2.0**20)
_IN_PROPORTION = 0.1


class ScaleErrors(NamedTuple):
    """How far values are off at one scale from those at another, relative to them."""

    low: float  # at the lowest, from those at 1
    high: float  # at the highest, from those at 2**10
    # Whether they follow 1 / scale, as a term that is not scaled does. With a ridge or
    # an epsilon that is lost beside scaled numbers they do not.
    are_in_proportion: bool


class _Seen(NamedTuple):
    """Where a variable can be seen: a result or an operand of an operation."""

    indices: Indices
    is_result: bool
    position: int


def errors_between_scales(
    subject: Subject, leaves: Sequence[Any], values: Sequence[SeenValue]
) -> ScaleErrors | None:
    """How far values are off at other scales, in float32.

    Args:
      subject: the step.
      leaves: its arguments.
      values: what a wrapper is given.

    Returns:
      The largest errors of any of them; None if they cannot be computed.
    """
    reading = subject.reading
    if reading is None:
        return None
    frames = reading.main.by_site()
    seen = [_seen(frames[x.around], x.atom) for x in values]
    found = [x for x in seen if x is not None]
    if not found or len(found) < len(seen):
        return None

    def watch(site, inputs, results):
        mine = [x for x in found if x.indices == site.indices]
        if not mine:
            return Watched(results)
        pairs = [(results if x.is_result else inputs, x.position) for x in mine]
        return Watched(results, [arrays[i] for arrays, i in pairs])

    run = Recorder(reading.main, [x.indices for x in found], watch, WIDE)
    scales = {subject.scales[k].at for k in subject.live}
    at_each = [
        run([np.full_like(leaves[i], x) if i in scales else leaves[i]
             for i in reading.traced.inputs])
        for x in _SCALES
    ]  # fmt: skip
    numbers = [jax.tree.leaves(x.tree) for x in at_each]
    every = [_errors(x) for x in zip(*numbers, strict=True)]
    low, high, are_in_proportion = zip(*every, strict=True)
    errors = ScaleErrors(max(low), max(high), any(are_in_proportion))
    return errors if np.isfinite(errors.low + errors.high) else None


def _seen(frame: Frame, atom: Any) -> _Seen | None:
    """Where a variable is made, or else read; None in a loop, or on each device."""
    if any(x.kind not in ("main", "call") for x in frame.around()):
        return None
    maker = frame.makers.get(atom)
    if maker is not None:
        called = frame.called(maker.position)
        if not called:
            return _Seen(frame.indices_of(maker.position), True, maker.result)
        (inside, *_) = called
        made = _seen(inside, inside.jaxpr.outvars[maker.result])
        if made is not None:
            return made
    for index, equation in enumerate(frame.jaxpr.eqns):
        if atom in equation.invars and not frame.called(index):
            return _Seen(frame.indices_of(index), False, equation.invars.index(atom))
    return None


def _errors(at_each: Sequence[np.ndarray]) -> ScaleErrors:
    lowest, low, one, high, highest = (x.astype(np.complex128) for x in at_each)
    lowest_scale, low_scale, *_ = _SCALES
    slopes = (
        (lowest - low) / (1 / lowest_scale - 1 / low_scale),
        (low - one) / (1 / low_scale - 1),
    )
    return ScaleErrors(
        _error(one, lowest), _error(high, highest), _error(*slopes) <= _IN_PROPORTION
    )


def _error(one: np.ndarray, other: np.ndarray) -> float:
    norm = float(np.linalg.norm(one))
    error = float(np.linalg.norm(one - other))
    return error / norm if norm else (np.inf if error else 0.0)
