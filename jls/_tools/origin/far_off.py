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
from jls._tools.origin.twin import sample_of
from jls._tools.reading.keep import Unit, least, unit_of
from jls._tools.reading.widths import makers, with_widths

MIN_OFF = 0.1  # what is nearer to float32 is as half precision is
_LEFT = 0.25  # of the error, at most, with a `keep` that helps
_MOST = 1 / 3  # of the lines of products: more of them are rounding, and no place


class _Line(NamedTuple):
    """The products of one line, forwards and backwards."""

    unit: Unit
    place: Place  # without what differs between them


class Found(NamedTuple):
    """What brings a step near to float32."""

    before: Mapping[str, float]  # the errors of what is far off, by its name
    after: Mapping[str, float]  # with these in float32
    units: tuple[Unit, ...]  # for a `keep`; () if there is none that leaves others
    lines: tuple[Place, ...]  # of the products that are needed


class FarOff:
    """A step with the width of its products as an argument, by line.

    Args:
      main: its frame.
      results: what is compared with float32, by name.
    """

    def __init__(self, main: Frame, results: Mapping[str, Sequence[Variable]]) -> None:
        self._makers_of = {name: makers(main, x) for name, x in results.items()}
        frames = main.by_site()
        around = {x for every in self._makers_of.values() for x in every}
        self._run = with_widths(main, around, _line, _sampled)
        self.units: list[_Line] = list(self._run.choices)
        self._is_readable = all(
            x.kind in ("call", "scan") or x.parent is None
            for indices in around
            for x in frames[indices[:-1]].around()
        )
        self._exact: dict[str, np.ndarray] = {}
        self._most: dict[str, float] = {}

    def find(self, inputs: Sequence[Any]) -> Found | None:
        """What brings a run near to float32; None if it is near, or nothing does.

        Args:
          inputs: of the program.
        """
        if not (self._is_readable and self.units):
            return None
        self._exact = self._samples(self._run(inputs, self.units))
        errors = self._errors(self._run(inputs))
        before = {name: x for name, x in errors.items() if x >= MIN_OFF}
        if not before:
            return None
        self._most = {name: x * _LEFT for name, x in before.items()}
        needed = least(self.units, lambda wide: self._holds(self._run(inputs, wide)))
        if not needed or len(needed) > max(1, _MOST * len(self.units)):
            return None
        units = list(dict.fromkeys(x.unit for x in needed))
        inside = [x for x in self.units if x.unit in units]
        is_some = len(inside) < len(self.units)
        records = self._run(inputs, inside if is_some else needed)
        if not self._holds(records):
            return None
        errors = self._errors(records)
        after = {name: errors[name] for name in before}
        lines = tuple(x.place for x in needed)
        return Found(before, after, tuple(units) if is_some else (), lines)

    def _holds(self, records: Records) -> bool:
        errors = self._errors(records)
        return all(errors[name] <= most for name, most in self._most.items())

    def _samples(self, records: Records) -> dict[str, np.ndarray]:
        return {
            name: _numbers(records, places) for name, places in self._makers_of.items()
        }

    def _errors(self, records: Records) -> dict[str, float]:
        """How far each result is off: the differences over the sizes."""
        found = dict[str, float]()
        for name, values in self._samples(records).items():
            exact = self._exact[name]
            is_known = np.isfinite(exact)
            size = float(np.abs(exact[is_known]).sum())
            apart = float(np.abs(values[is_known] - exact[is_known]).sum())
            found[name] = apart / size if size else 0.0
        return {name: np.inf if np.isnan(x) else x for name, x in found.items()}


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
