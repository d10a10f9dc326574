# SPDX-License-Identifier: Apache-2.0
"""The values of a program while it is rewritten: in memory, or not computed yet.

A chain of elementwise operations in which a mean, a norm or a sum takes part is put off
until something else needs its result. It is then computed in float32 from what is in
memory, rounded once, and computed again for the derivative: what is kept until then are
its operands in half, and no array of float32.

Where the derivative is computed in the same body, XLA merges what both computations
share. A sum, or what is cheap, it then computes again by itself; but what is costly,
such as the tanh of a GELU, it keeps in float32, unless it is kept apart.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jls._autocast.kinds import Fact
from jls._autocast.shared import TO_FLOAT32, Cast, Number, bind_shared, call_shared
from jls._program.jaxprs import (
    Operation,
    operation_of,
    settings_beside,
    shared_names,
    traceback_of,
    traced_as,
    traced_at,
)
from jls._program.primitives import primitive_of

MOST = 8  # operations of a chain, all of which are computed again


class Stored:
    """An array in memory. If it is in half, the program has it in float32."""

    def __init__(self, array: Any, is_half: bool, is_beyond: bool = False) -> None:
        self.array, self.is_half, self.is_beyond = array, is_half, is_beyond
        self._wide: Any = None if is_half else array

    def wide(self) -> Any:
        """The array as the program has it.

        One for all who use it: the cotangents of what is in half are summed in float32.
        Those of a loss may all but cancel.
        """
        if self._wide is None:
            self._wide = _cast(self.array, TO_FLOAT32)
        return self._wide

    def half(self, dtype: Any) -> Any:
        # Anew for each use: the gradients of a shared weight are summed in float32.
        cast = self.cast(dtype)
        return _cast(self.array, cast) if cast else self.array

    def cast(self, dtype: Any) -> Cast | None:
        """What makes it half, unless it is."""
        return None if self.is_half else Cast(dtype, self.is_beyond)


class Chain:
    """The result of an operation in float32 that is not computed yet."""

    def __init__(
        self,
        equation: Any,
        operands: Sequence["Stored | Chain"],
        fact: Fact,
        is_beside: bool = False,
    ) -> None:
        self._equation, self._fact = equation, fact
        self._is_beside = is_beside  # in one body with its derivative
        self._operands = operands
        row, name = primitive_of(equation), equation.primitive.name
        inner = [x for x in operands if isinstance(x, Chain)]
        self.count = (row.cast != "shape") + sum(x.count for x in inner)
        is_product = name == "mul" and any(map(is_number, operands))
        self._is_linear = row.saves_nothing or is_product
        self._is_linear &= all(x._is_linear for x in inner)
        self._wide: Stored | None = None
        self._half: Stored | None = None

    @classmethod
    def is_of_number(cls, equation: Any, operands: Sequence["Stored | Chain"]) -> bool:
        """Whether an operation gives a number in the program a shape."""
        is_shape = primitive_of(equation).cast == "shape"
        return is_shape and all(map(is_number, operands))

    @property
    def is_half(self) -> bool:
        """Whether it is half where it is stored."""
        return self._fact.is_half

    @property
    def stored(self) -> Stored | None:
        """What of it is in memory already."""
        return self._half if self.is_half else self._wide

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._equation.outvars[0].aval.shape

    def wide(self) -> Any:
        if self._wide is None:
            self._wide = Stored(self._compute(None), False, self._fact.is_beyond)
        return self._wide.array

    def half(self, dtype: Any) -> Any:
        if self._half is None:
            if self.is_of_number(self._equation, self._operands):
                (number,) = (x.half(dtype) for x in self._operands)
                (array,) = bind_shared(self._equation, [number])
            else:
                array = self._compute(Cast(dtype, self._fact.is_beyond))
            self._half = Stored(array, True)
        return self._half.array

    def _compute(self, rounds: Cast | None) -> Any:
        if self._is_linear:
            with traced_as(self._equation):
                wide = {id(x): x.wide() for x in self._leaves().values()}
            result = self._in_float32(wide)
            if rounds is None:
                return result
            with traced_as(self._equation):
                return _cast(result, rounds)
        leaves, equations = self._leaves(), list[Any]()
        places = {key: i for i, key in enumerate(leaves)}
        operands = list[tuple[Any, ...]]()
        self._write(places, equations, operands)
        outside, inside = shared_names(equations)
        steps = (
            Step(
                operation_of(equation),
                traceback_of(equation),
                names,
                settings_beside(equation, self._equation),
                given,
            )
            for equation, names, given in zip(equations, inside, operands, strict=True)
        )
        is_half = tuple(x.is_half for x in leaves.values())
        is_apart = self._is_beside and rounds is not None
        is_apart &= any(primitive_of(x).is_costly for x in equations)
        # With a mean or a sum in it, it would have to be written before it is apart.
        is_apart &= all(x.array.shape == self._shape for x in leaves.values())
        written = Written(tuple(steps), is_half, rounds, is_apart)
        with traced_as(self._equation, outside):
            arrays = [x.array for x in leaves.values()]
            wide = [x.wide() for x in leaves.values() if x.is_half]
            return call_shared(written, [*arrays, *wide])

    def _write(self, places: dict[int, int], equations: Any, operands: Any) -> None:
        """Adds its operations, in their order; `places` are of arrays among all."""
        if id(self) in places:
            return
        given = list[Any]()
        for x in self._operands:
            if isinstance(x, Chain):
                x._write(places, equations, operands)
            elif is_number(x):
                given.append(Number(x.array))
                continue
            given.append(places[id(x)])
        places[id(self)] = len(places)
        equations.append(self._equation)
        operands.append(tuple(given))

    def _leaves(self) -> dict[int, Stored]:
        found: dict[int, Stored] = {}
        for operand in self._operands:
            if isinstance(operand, Chain):
                found |= operand._leaves()
            elif not is_number(operand):
                found[id(operand)] = operand
        return found

    def _in_float32(self, known: dict[int, Any]) -> Any:
        if id(self) not in known:
            operands = [
                x._in_float32(known)
                if isinstance(x, Chain)
                else known.get(id(x), x.array)
                for x in self._operands
            ]
            (known[id(self)],) = bind_shared(self._equation, operands)
        return known[id(self)]


class Step(NamedTuple):
    """An operation of a chain."""

    operation: Operation
    traceback: Any
    names: Any  # of the scopes within that of the chain
    settings: Any  # of JAX, where they are not those of the chain
    operands: tuple[int | Number, ...]  # numbers of arrays and of earlier results


class Written(NamedTuple):
    """A chain as a function of arrays, the same for all chains that look alike.

    After them it takes those in half once more, in float32: that is what it is
    differentiated with respect to, while those in half are kept.
    """

    steps: tuple[Step, ...]
    is_half: tuple[bool, ...]  # of each array
    rounds: Cast | None
    is_apart: bool  # from what is computed again

    def __call__(self, *arrays: Any) -> Any:
        return jax.checkpoint(self._run, prevent_cse=self.is_apart)(*arrays)

    def _run(self, *arrays: Any) -> Any:
        count = len(self.is_half)
        wide = iter(arrays[count:])
        values = [
            _in_place_of(next(wide), array) if is_half else array
            for array, is_half in zip(arrays[:count], self.is_half, strict=True)
        ]
        for step in self.steps:
            operands = [
                x.value if isinstance(x, Number) else values[x] for x in step.operands
            ]
            settings = getattr(step.settings, "manager", contextlib.nullcontext())
            with traced_at(step.traceback, step.names), settings:
                values += step.operation.bind(operands)
        return self.rounds(values[-1]) if self.rounds else values[-1]


@jax.custom_jvp
def _in_place_of(wide: Any, half: Any) -> Any:
    """`wide`, computed from the same array in half."""
    return TO_FLOAT32(half)


@_in_place_of.defjvp
def _tangent_in_place_of(primals, tangents):
    _, half = primals
    return TO_FLOAT32(half), tangents[0]  # needs `wide` no more: it is not kept


Held = Stored | Chain


def _cast(array: Any, cast: Cast) -> Any:
    return call_shared(cast, [array]) if isinstance(array, Array) else cast(array)


def is_number(held: Held) -> bool:
    """Whether it is a number in the program."""
    return (
        isinstance(held, Stored)
        and not isinstance(held.array, Array)
        and not np.shape(held.array)
    )
