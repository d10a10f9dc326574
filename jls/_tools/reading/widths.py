# SPDX-License-Identifier: Apache-2.0
"""A step with an autocast in it, the products of which can be float32 in any run.

It is compiled once: which products are in half is an argument. Those are computed from
operands that are rounded, and their results are rounded; in float32 neither is. So one
finds which of them have to be float32 for a step to be finite, or near to float32: a
`keep`.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._program.alone import Arithmetic, rounds, run_wide, widened
from jls._program.control import Indices, Site
from jls._program.frames import Frame, Variable, behind
from jls._program.jaxprs import bind, is_half_atom, is_inexact_atom
from jls._program.primitives import primitive_of
from jls._program.products import PRODUCTS
from jls._program.recorder import Recorder
from jls._program.records import key_of
from jls._program.replay import Watched
from jls._scopes import AUTOCAST, marks_of
from jls._tools.reading.keep import InFunctions, Unit, keep_of, least, unit_of


class Widths:
    """A step that has to be finite, with the width of its products as an argument.

    Args:
      main: the frame of a program.
      roots: what has to be finite.

    Attributes:
      units: those of the products that an autocast has made half, in their order.
    """

    def __init__(self, main: Frame, roots: Collection[Variable]) -> None:
        self._places = makers(main, roots)
        self._run = with_widths(main, self._places, unit_of, _finiteness)
        self.units: list[Unit] = list(self._run.choices)

    def least(self, inputs: Sequence[Any]) -> list[Unit]:
        """The units that have to be float32 for a run that is finite; see `least`."""

        def holds(wide: Sequence[Unit]) -> bool:
            records = self._run(inputs, wide)
            every = (x for indices in self._places for x in records.numbers(indices))
            return not any(np.isnan(x).any() for x in every)

        return least(self.units, holds)

    def keep(self, inputs: Sequence[Any]) -> str | InFunctions | None:
        """The least `keep` with which a run is finite; None if none helps."""
        found = self.least(inputs)
        return keep_of(found, self.units) if found else None


def _finiteness(results: Sequence[Any]) -> Array:
    """NaN if a result is not finite, else 0."""
    floats = filter(is_inexact_atom, results)
    is_finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats])
    number = jnp.where(is_finite.all(), jnp.float32(0), jnp.float32(jnp.nan))
    return key_of(jnp.stack([number, number])[None])


def with_widths(
    main: Frame,
    places: Collection[Indices],
    unit_of: Callable[[Site], Hashable],
    record: Callable[[Sequence[Any]], Any],
) -> Recorder:
    """A program of which a run chooses the products that are float32.

    Args:
      main: the frame of the program.
      places: of the operations that are recorded.
      unit_of: products that are alike for it have one width: the choices.
      record: makes the record of an operation, from its results.
    """
    sites = (frame.site_of(index) for frame, index in main.operations())
    units = dict.fromkeys(unit_of(x) for x in sites if _is_cast_product(x))

    def run(site: Site, operands: Sequence[Any]) -> list[Any]:
        equation = site.equation
        if not rounds(equation):
            return bind(equation, operands)
        if _is_cast_product(site):
            is_wide = recorder.is_chosen(unit_of(site))
            rounded = _rounded(is_wide, equation.invars, operands)
            results = run_wide(equation, rounded)
            return _rounded(is_wide, equation.outvars, results)
        if AUTOCAST in marks_of(site) and _may_be_of_either(equation):
            return run_wide(equation, operands)
        pairs = zip(equation.invars, operands, strict=True)
        given = [_as_written(atom, x) for atom, x in pairs]
        return list(map(widened, bind(equation, given)))

    def watch(site: Site, inputs: Sequence[Any], results: Sequence[Any]) -> Watched:
        del inputs
        return Watched(results, record(results) if site.indices in places else None)

    arithmetic = Arithmetic(widened, run)
    recorder = Recorder(main, places, watch, arithmetic, choices=units)
    return recorder


def makers(main: Frame, roots: Collection[Variable]) -> set[Indices]:
    """The places of the operations that make these, in calls too."""
    return main.makers_of(behind(roots, _through_calls))


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
