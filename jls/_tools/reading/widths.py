# SPDX-License-Identifier: Apache-2.0
"""A step with an autocast in it, the products of which can be float32 in any run.

It is compiled once: which products are in half is an argument. Those are computed from
operands that are rounded, and their results are rounded; in float32 neither is. So one
finds which of them have to be float32 for a step to be finite: a `keep`.
"""

import bisect
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import Arithmetic, rounds, run_wide, widened
from jls._program.control import Site
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


class Widths:
    """A program with the width of its products as an argument.

    Args:
      main: the frame of a program.
      roots: what has to be finite.

    Attributes:
      units: those of the products that an autocast has made half, in their order.
    """

    def __init__(self, main: Frame, roots: Collection[Variable]) -> None:
        self._program = main.program
        sites = (frame.site_of(index) for frame, index in main.operations())
        found = dict.fromkeys(unit_of(x) for x in sites if _is_cast_product(x))
        self.units = list(found)
        nearest = behind(roots, _through_calls)
        self._makers = {
            frame.indices_of(index)
            for frame, index in main.operations()
            if any((frame, x) in nearest for x in frame.jaxpr.eqns[index].outvars)
        }
        self._only = {x[:n] for x in self._makers for n in range(1, len(x) + 1)}
        self._compiled = jax.jit(self._run)

    def keep(self, inputs: Sequence[Any]) -> str | InFunctions | None:
        """The least `keep` with which a run is finite; None if none helps."""
        found = self.least(inputs)
        return keep_of(found, self.units) if found else None

    def least(self, inputs: Sequence[Any]) -> list[Unit]:
        """The units that have to be float32; [] if that does not help, or none has to.

        None of them can be left out.

        Args:
          inputs: of the program.
        """
        left = self.units
        if not self.units or not self._is_finite(inputs, self.units):
            return []
        needed = list[Unit]()
        while not self._is_finite(inputs, needed):
            # With so many of the first ones it is finite.
            high = bisect.bisect_left(
                range(len(left)),
                True,
                key=lambda n: self._is_finite(inputs, [*needed, *left[:n]]),
            )
            if not high:
                break
            needed.append(left[high - 1])
            left = left[: high - 1]
        for one in needed[:-1]:
            others = [x for x in needed if x != one]
            if self._is_finite(inputs, others):
                needed = others
        return [x for x in self.units if x in needed]

    def _is_finite(self, inputs: Sequence[Any], wide: Collection[Unit]) -> bool:
        mask = np.array([x in wide for x in self.units])
        given = [*map(jnp.asarray, inputs), mask]
        return not any(map(_holds_nan, _leaves(self._compiled(given))))

    def _run(self, inputs: Sequence[Array]) -> Records:
        *operands, is_wide = inputs

        def run(site: Site, operands: Sequence[Any]) -> list[Any]:
            equation = site.equation
            if not rounds(equation):
                return bind(equation, operands)
            if _is_cast_product(site):
                kept = is_wide[self.units.index(unit_of(site))]
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
        if site.indices not in self._makers:
            return Watched(results)
        floats = filter(is_inexact_atom, results)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats])
        number = jnp.where(is_finite.all(), jnp.float32(0), jnp.float32(jnp.nan))
        return Watched(results, key_of(jnp.stack([number, number])))


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


def _leaves(records: Any) -> list[Any]:
    if isinstance(records, WhileRecords):
        return _leaves(records.bad)
    if isinstance(records, dict):
        return [leaf for x in records.values() for leaf in _leaves(x)]
    return [records]


def _holds_nan(record: Any) -> bool:
    return bool(np.isnan(floats_from_keys(np.asarray(record))).any())
