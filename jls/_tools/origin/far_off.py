# SPDX-License-Identifier: Apache-2.0
"""Which products bring the loss or its gradients far off float32, and their `keep`.

The line that loses precision is often no product, so no `keep` finds it: the sine of a
large angle, the logarithm of a difference. The product that feeds it can be kept. So it
is tried: with the products of which lines in float32, in one program whose widths are
an argument, are loss and gradients near those of float32?
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jls._program.control import Indices, Site
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import is_inexact_atom
from jls._program.places import Place, place_of
from jls._program.records import Records, key_of
from jls._tools.origin.losses import MIN_OFF
from jls._tools.origin.twin import sample_of
from jls._tools.reading.keep import Unit, least, unit_of
from jls._tools.reading.widths import makers, with_widths

_LEFT = 0.25  # of the error, at most, with a `keep` that helps
_MOST = 1 / 3  # of the lines of products: more of them are rounding, and no place


class _Line(NamedTuple):
    """The products of one line, forwards and backwards."""

    unit: Unit
    place: Place  # without what differs between them


class Near(NamedTuple):
    """What brings a step near to float32."""

    before: Mapping[str, float]  # the errors of what is far off, by its name
    after: Mapping[str, float]  # with these in float32
    units: tuple[Unit, ...]  # for a `keep`; () if there is none that leaves others
    lines: tuple[Place, ...]  # of the products that are needed
    every: tuple[Unit, ...]  # those of all products, once for each line


def find_near(
    main: Frame, results: Mapping[str, Sequence[Variable]], inputs: Sequence[Any]
) -> Near | None:
    """What brings a run near to float32; None if it is near, or nothing does.

    Args:
      main: the frame of a step.
      results: what is compared with float32, by name.
      inputs: of the run.
    """
    places = {name: makers(main, x) for name, x in results.items()}
    around = {x for every in places.values() for x in every}
    run = with_widths(main, around, _line, _sampled)
    lines: list[_Line] = list(run.choices)
    if not (lines and _is_readable(main, around)):
        return None

    def samples(wide: Sequence[_Line]) -> dict[str, np.ndarray]:
        records = run(inputs, wide)
        return {name: _numbers(records, every) for name, every in places.items()}

    exact = samples(lines)

    def errors(wide: Sequence[_Line]) -> dict[str, float]:
        return {name: _error(x, exact[name]) for name, x in samples(wide).items()}

    before = {name: x for name, x in errors(()).items() if x >= MIN_OFF}

    def holds(found: Mapping[str, float]) -> bool:
        return all(found[name] <= _LEFT * x for name, x in before.items())

    needed = least(lines, lambda wide: holds(errors(wide))) if before else []
    if not needed or len(needed) > max(1, _MOST * len(lines)):
        return None
    units = tuple(dict.fromkeys(x.unit for x in needed))
    inside = [x for x in lines if x.unit in units]
    is_some = len(inside) < len(lines)
    after = errors(inside if is_some else needed)
    if not holds(after):
        return None
    return Near(
        before,
        {name: after[name] for name in before},
        units if is_some else (),
        tuple(x.place for x in needed),
        tuple(x.unit for x in lines),
    )


def _is_readable(main: Frame, places: Iterable[Indices]) -> bool:
    """Whether only calls and scans are around these operations."""
    frames = main.by_site()
    return all(
        x.kind in ("call", "scan") or x.parent is None
        for indices in places
        for x in frames[indices[:-1]].around()
    )


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    """How far a result is off: the differences over the sizes."""
    is_known = np.isfinite(exact)
    size = float(np.abs(exact[is_known]).sum())
    apart = float(np.abs(found[is_known] - exact[is_known]).sum())
    error = apart / size if size else 0.0
    return np.inf if np.isnan(error) else error


def _sampled(results: Sequence[Any]) -> tuple[Any, ...]:
    floats = (jnp.real(x) for x in results if is_inexact_atom(x))
    return tuple(key_of(sample_of(x)) for x in floats)


def _line(site: Site) -> _Line:
    place = place_of(site)
    return _Line(
        unit_of(site), place._replace(operation="", is_backward=False, iteration=())
    )


def _numbers(records: Records, places: Iterable[Indices]) -> np.ndarray:
    found = [
        sample.reshape(-1)
        for indices in sorted(places)
        for sample in records.numbers(indices)
    ]
    return np.concatenate(found).astype(np.float64) if found else np.zeros(0)
