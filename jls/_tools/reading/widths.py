# SPDX-License-Identifier: Apache-2.0
"""A step with an autocast in it, the products of which can be float32 in any run.

It is compiled once: which products are in half is an argument. Those are computed from
operands that are rounded, and their results are rounded; in float32 neither is. So one
finds which of them have to be float32 for a step to be finite, or near to float32: a
`keep`.
"""

import bisect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import Arithmetic, rounds, run_wide, widened
from jls._program.control import Indices, Site
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import bind, is_half_atom, is_inexact_atom
from jls._program.primitives import primitive_of
from jls._program.products import PRODUCTS
from jls._program.replay import (
    Records,
    Watched,
    WhileRecords,
    floats_from_keys,
    key_of,
    replay,
)
from jls._scopes import AUTOCAST, marks_of
from jls._tools.reading.keep import InFunctions, Unit, keep_of, unit_of

UnitT = TypeVar("UnitT", bound=Hashable)


class WidthsBy(Generic[UnitT]):
    """A program with the width of its products as an argument.

    Args:
      main: the frame of a program.
      roots: what is looked at.
      unit_of: products that are alike for it have one width.

    Attributes:
      units: those of the products that an autocast has made half, in their order.
    """

    def __init__(
        self,
        main: Frame,
        roots: Collection[Variable],
        unit_of: Callable[[Site], UnitT],
    ) -> None:
        self._program, self._unit_of = main.program, unit_of
        sites = (frame.site_of(index) for frame, index in main.operations())
        found = dict.fromkeys(unit_of(x) for x in sites if _is_cast_product(x))
        self.units = list(found)
        self._makers = makers(main, roots)
        self._only = {x[:n] for x in self._makers for n in range(1, len(x) + 1)}
        self._compiled = jax.jit(self._run)

    def least(self, inputs: Sequence[Any]) -> list[UnitT]:
        """The units that have to be float32 for a run that `holds`.

        [] if that does not help, or none has to. None of them can be left out.

        Args:
          inputs: of the program.
        """
        left = self.units
        if not self.units or not self._holds(inputs, self.units):
            return []
        needed = list[UnitT]()
        while not self._holds(inputs, needed):
            # With so many of the first ones it holds.
            high = bisect.bisect_left(
                range(len(left)),
                True,
                key=lambda n: self._holds(inputs, [*needed, *left[:n]]),
            )
            if not high:
                break
            needed.append(left[high - 1])
            left = left[: high - 1]
        for one in needed[:-1]:
            others = [x for x in needed if x != one]
            if self._holds(inputs, others):
                needed = others
        return [x for x in self.units if x in needed]

    def _holds(self, inputs: Sequence[Any], wide: Collection[UnitT]) -> bool:
        return self.holds(self.records(inputs, wide))

    def records(self, inputs: Sequence[Any], wide: Collection[UnitT]) -> Records:
        """The records of a run with these units in float32."""
        mask = np.array([x in wide for x in self.units])
        return self._compiled([*map(jnp.asarray, inputs), mask])

    def holds(self, records: Records) -> bool:
        """Whether a run is as it has to be."""
        raise NotImplementedError

    def record(self, results: Sequence[Any]) -> Any:
        """The record of an operation that makes a root."""
        raise NotImplementedError

    def _run(self, inputs: Sequence[Array]) -> Records:
        *operands, is_wide = inputs

        def run(site: Site, operands: Sequence[Any]) -> list[Any]:
            equation = site.equation
            if not rounds(equation):
                return bind(equation, operands)
            if _is_cast_product(site):
                kept = is_wide[self.units.index(self._unit_of(site))]
                rounded = _rounded(kept, equation.invars, operands)
                results = run_wide(equation, rounded)
                return _rounded(kept, equation.outvars, results)
            if AUTOCAST in marks_of(site) and _may_be_of_either(equation):
                return run_wide(equation, operands)
            pairs = zip(equation.invars, operands, strict=True)
            given = [_as_written(atom, x) for atom, x in pairs]
            return list(map(widened, bind(equation, given)))

        arithmetic = Arithmetic(widened, run)
        watch = self._watch
        _, records = replay(
            self._program, operands, watch, arithmetic=arithmetic, only=self._only
        )
        return records

    def _watch(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Watched:
        is_root = site.indices in self._makers
        return Watched(results, self.record(results) if is_root else None)


class Widths(WidthsBy[Unit]):
    """By function and scope; a run has to be finite."""

    def __init__(self, main: Frame, roots: Collection[Variable]) -> None:
        super().__init__(main, roots, unit_of)

    def keep(self, inputs: Sequence[Any]) -> str | InFunctions | None:
        """The least `keep` with which a run is finite; None if none helps."""
        found = self.least(inputs)
        return keep_of(found, self.units) if found else None

    def holds(self, records: Records) -> bool:
        return not any(map(_holds_nan, leaves_of(records)))

    def record(self, results: Sequence[Any]) -> Any:
        floats = filter(is_inexact_atom, results)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats])
        number = jnp.where(is_finite.all(), jnp.float32(0), jnp.float32(jnp.nan))
        return key_of(jnp.stack([number, number]))


def makers(main: Frame, roots: Collection[Variable]) -> set[Indices]:
    """The places of the operations that make these, in calls too."""
    nearest = behind(roots, _through_calls)
    return {
        frame.indices_of(index)
        for frame, index in main.operations()
        if any((frame, x) in nearest for x in frame.jaxpr.eqns[index].outvars)
    }


def _is_cast_product(site: Site) -> bool:
    equation = site.equation
    return (
        equation.primitive.name in PRODUCTS
        and any(map(is_half_atom, equation.invars))
        and AUTOCAST in marks_of(site)
    )


def _may_be_of_either(equation: Any) -> bool:
    """Whether it hands on, or sums up, what products take or give.

    An autocast rounds where a product takes a value, so that is done there.
    """
    name = equation.primitive.name
    return bool(primitive_of(equation).moves) or name in (*_CASTS, "add_any")


_CASTS = ("convert_element_type", "reduce_precision")


def _rounded(is_wide: Array, atoms: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Values in float32, of which those in half are rounded unless they are wide."""
    return [
        jnp.where(is_wide, x, widened(_as_written(atom, x)))
        if is_half_atom(atom)
        else x
        for atom, x in zip(atoms, values, strict=True)
    ]


def _as_written(atom: Any, value: Any) -> Any:
    if not is_half_atom(atom):
        return value
    # XLA would leave out a cast and back, and an overflow with it.
    return lax.optimization_barrier(jnp.asarray(value, atom.aval.dtype))


def _through_calls(frame: Frame, atom: Any) -> list[Variable]:
    """The variable of the program that makes a variable, one call in or out."""
    maker = frame.makers.get(atom)
    if maker is None:
        return frame.sources(atom)
    return [(x, x.jaxpr.outvars[maker.result]) for x in frame.called(maker.position)]


def leaves_of(records: Any) -> list[Any]:
    """The records of all operations."""
    if isinstance(records, WhileRecords):
        return leaves_of(records.bad)
    if isinstance(records, dict):
        return [leaf for x in records.values() for leaf in leaves_of(x)]
    return [records]


def _holds_nan(record: Any) -> bool:
    return bool(np.isnan(floats_from_keys(np.asarray(record))).any())
