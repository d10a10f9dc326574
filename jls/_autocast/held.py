# SPDX-License-Identifier: Apache-2.0
"""The values of a program while it is rewritten: in memory, or not computed yet.

Products give arrays in memory, in half. Sums give arrays in memory too, in float32;
loops and calls give either. An elementwise operation is put off, as part of a chain,
until something else needs its result. The chain is then computed in float32 from arrays
in memory, and rounded if a product takes it. The derivative computes it again. Until
then, only the arrays that it began with are kept, and no other float32 array.

    h = x @ w              in memory, in half
    y = gelu(h + b)        a chain of all these operations, from h and b
    y @ v                  computes it in float32, and rounds it once
                           the derivative computes it again from h and b
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jls._autocast.float8 import Quantized, quantized
from jls._autocast.shared import TO_FLOAT32, Cast, Number, bind_shared, call_shared
from jls._program.jaxprs import (
    Operation,
    checkpointed,
    in_settings,
    is_float32,
    operation_of,
    settings_beside,
    shared_names,
    traceback_of,
    traced_as,
    traced_at,
)
from jls._program.places import is_relu_of_jax
from jls._program.primitives import primitive_of
from jls._scopes import FLOAT8

MOST = 32  # the most operations in a chain: all of them are computed again


class _Operand:
    """A value that products in float8 may take.

    Attributes:
      has_others: whether something else may keep it in half for its derivative.
    """

    def __init__(self) -> None:
        self.has_others = False
        self._float8: Quantized | None = None

    def in_float8(self, half: Array) -> Quantized:
        """The array, rounded to half before. All products share it.

        Nothing is differentiated through it.
        """
        if self._float8 is not None:
            return self._float8
        with jax.named_scope(FLOAT8):
            made = call_shared(quantized, [lax.stop_gradient(half)])
        self._float8 = made
        return made


class Stored(_Operand):
    """An array in memory. If it is in half, the program has it in float32.

    A running value is in float32. If a derivative is no worse for it, a copy in half is
    kept for the derivative.
    """

    def __init__(
        self, array: Any, is_half: bool = False, is_running: bool = False
    ) -> None:
        super().__init__()
        self.array, self.is_half, self.is_running = array, is_half, is_running
        self._wide: Any = None if is_half else array
        self._kept: Any = None
        self._is_fixed = False
        self.is_reduced = False  # smaller than its operands, as a mean is

    def wide(self) -> Any:
        """The array as the program has it.

        All readers share it, so the cotangents of an array in half are summed in
        float32. The cotangents of a loss may nearly cancel.
        """
        if self._wide is None:
            self._wide = _cast(self.array, TO_FLOAT32)
        return self._wide

    def half(self, dtype: Any) -> Any:
        if self._is_fixed:
            return call_shared(_half_of, [self.array, self.wide()])
        # Cast for each use: the gradients of a shared weight are summed in float32.
        return self.array if self.is_half else _cast(self.array, Cast(dtype))

    def fixed(self, wide: Any) -> "Stored":
        """The same array inside of a loop: its cotangents are summed in float32.

        Args:
          wide: the array in float32, from outside of the loop.
        """
        made = self.like(self.array)
        made._wide, made._is_fixed = wide, self.is_half
        return made

    def like(self, array: Any) -> "Stored":
        """Another array in the same form, such as that inside of a call."""
        made = Stored(array, self.is_half, self.is_running)
        made.has_others = self.is_half  # something outside may keep it
        return made

    def kept(self, dtype: Any) -> Any:
        """A running value in half."""
        if self._kept is None:
            self._kept = _cast(self.array, Cast(dtype))
        return self._kept


class Chain(_Operand):
    """The result of an operation in float32 that is not computed yet.

    Args:
      equation: the operation.
      operands: its operands.
      dtype: the half precision.
      index: which result of the operation it is.
    """

    def __init__(
        self,
        equation: Any,
        operands: Sequence["Stored | Chain"],
        dtype: Any,
        index: int = 0,
    ) -> None:
        super().__init__()
        self.equation, self.operands = equation, operands
        self._dtype, self._index = dtype, index
        inner = [x for x in operands if isinstance(x, Chain)]
        row, name = primitive_of(equation), equation.primitive.name
        is_scaled = name == "mul" and any(map(is_number, operands))
        is_scaled |= name == "div" and is_number(operands[1])
        self._is_linear = row.saves_nothing or is_scaled
        self._is_linear &= all(x._is_linear for x in inner)
        self._wide: Any = None
        self._half: Any = None

    @classmethod
    def is_of_number(cls, equation: Any, operands: Sequence["Stored | Chain"]) -> bool:
        """Whether an operation gives a number in the program a shape."""
        is_shape = primitive_of(equation).cast == "shape"
        return is_shape and all(map(is_number, operands))

    def on(self, arrays: Mapping[int, "Stored"]) -> "Chain":
        """The same chain, with `arrays` in the places of some of its own."""
        made: dict[int, Any] = dict(arrays)
        for node in self.nodes():
            made[id(node)] = node._with([made.get(id(x), x) for x in node.operands])
        return made[id(self)]

    def _with(self, operands: Sequence["Stored | Chain"]) -> "Chain":
        return Chain(self.equation, operands, self._dtype, self._index)

    @property
    def atom(self) -> Any:
        """Its variable in the program."""
        return self.equation.outvars[self._index]

    def wide(self) -> Any:
        if self._wide is None:
            self._wide = self._compute(None)
        return self._wide

    def half(self, dtype: Any) -> Any:
        if self._half is None:
            if self.is_of_number(self.equation, self.operands):
                numbers = [x.half(dtype) for x in self.operands]
                (self._half,) = bind_shared(self.equation, numbers)
            else:
                self._half = self._clamped(dtype)._compute(Cast(dtype))
        return self._half

    def _clamped(self, dtype: Any) -> "Chain":
        """The same chain; numbers that end up in the result are within half's range.

        A mask that a product takes may hold the lowest number of float32.
        """
        if not primitive_of(self.equation).moves:
            return self
        data = primitive_of(self.equation).data
        operands = list(self.operands)
        for i in range(*data.indices(len(operands))):
            held = operands[i]
            if isinstance(held, Chain):
                operands[i] = held._clamped(dtype)
            elif is_number(held) and is_float32(self.equation.invars[i]):
                operands[i] = _within_range(held, dtype)
        pairs = zip(operands, self.operands, strict=True)
        return self if all(a is b for a, b in pairs) else self._with(operands)

    def _compute(self, rounds: Cast | None) -> Any:
        nodes, leaves = self.nodes(), self.leaves()
        places = {key: i for i, key in enumerate(leaves)}
        operands = list[tuple[int | Number, ...]]()
        for node in nodes:
            operands.append(
                tuple(
                    Number(x.array) if is_number(x) else places[id(x)]
                    for x in node.operands
                )
            )
            places[id(node)] = len(places)
        outside, inside = shared_names([x.equation for x in nodes])
        steps = tuple(
            Step(
                operation_of(node.equation),
                traceback_of(node.equation),
                names,
                settings_beside(node.equation, self.equation),
                given,
                node._index,
            )
            for node, names, given in zip(nodes, inside, operands, strict=True)
        )
        stored = list(leaves.values())
        with traced_as(self.equation, outside):
            if self._is_linear:
                arrays = [x.wide() for x in stored]
                return call_shared(Written(steps, (), rounds, is_linear=True), arrays)
            forms = tuple(
                "half"
                if x.is_half
                else "running"
                if x.is_running and _is_kept_in_half(i, len(leaves), nodes, operands)
                else ""
                for i, x in enumerate(stored)
            )
            pairs = list(zip(forms, stored, strict=True))
            arrays = [
                x.kept(self._dtype) if form == "running" else x.array
                for form, x in pairs
            ]
            arrays += [x.wide() for form, x in pairs if form]
            return call_shared(Written(steps, forms, rounds), arrays)

    def nodes(self) -> "list[Chain]":
        """Its operations. Each comes after the ones that it needs."""
        found: dict[int, Chain] = {}

        def visit(chain: Chain) -> None:
            for x in chain.operands:
                if isinstance(x, Chain) and id(x) not in found:
                    visit(x)
            found[id(chain)] = chain

        visit(self)
        return list(found.values())

    def leaves(self) -> dict[int, Stored]:
        """The arrays in memory from which it is computed."""
        return {
            id(x): x
            for node in self.nodes()
            for x in node.operands
            if not isinstance(x, Chain) and not is_number(x)
        }


class Step(NamedTuple):
    """An operation of a chain."""

    operation: Operation
    traceback: Any
    names: Any  # of the scopes inside the scope of the chain
    settings: Any  # of JAX; None if the chain has the same
    operands: tuple[int | Number, ...]  # indices of arrays and earlier results
    result: int  # which of its results counts


class Written(NamedTuple):
    """A chain as a function of arrays, the same for all chains that look alike.

    The arrays that are kept in half are also given in float32, after all the others.
    The function is differentiated with respect to the float32 ones, but only the half
    ones are kept.
    """

    steps: tuple[Step, ...]
    # The kind of each array: "half", a "running" value in half, or "". A linear chain
    # takes float32, and its derivative needs none of them.
    forms: tuple[str, ...]
    rounds: Cast | None
    is_linear: bool = False

    def __call__(self, *arrays: Any) -> Any:
        if self.is_linear:
            return self._run([*arrays])
        if "running" in self.forms:
            return _from_running(self, *arrays)
        return self.again(*arrays)

    def again(self, *arrays: Any) -> Any:
        """The chain from what is kept, as the derivative computes it too."""
        return checkpointed(self._run_kept)(*arrays)

    def _run_kept(self, *arrays: Any) -> Any:
        wide = iter(arrays[len(self.forms) :])
        pairs = zip(self.forms, arrays, strict=False)
        return self._run([_in_place_of(next(wide), x) if f else x for f, x in pairs])

    def from_wide(self, *arrays: Any) -> Any:
        """The chain from running values as they are, in float32."""
        wide = iter(arrays[len(self.forms) :])
        pairs = zip(self.forms, arrays, strict=False)
        return self._run([next(wide) if f else x for f, x in pairs])

    def _run(self, values: list[Any]) -> Any:
        for step in self.steps:
            operands = [
                x.value if isinstance(x, Number) else values[x] for x in step.operands
            ]
            with traced_at(step.traceback, step.names), in_settings(step.settings):
                values.append(step.operation.bind(operands)[step.result])
        return self.rounds(values[-1]) if self.rounds else values[-1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _from_running(written: Written, *arrays: Any) -> Any:
    """A chain of running values. Its derivative is taken at their copies in half."""
    return written.from_wide(*arrays)


@_from_running.defjvp
def _tangent_from_running(written, primals, tangents):
    _, tangent = jax.jvp(written.again, primals, tangents)
    return written.from_wide(*primals), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def relu_of_running(dtype: Any, array: Any) -> Any:
    """JAX's relu if its result is a running value. A copy in half is kept.

    Its derivative asks only for the sign of the result.
    """
    del dtype
    return lax.max(array, lax.full_like(array, 0))


@relu_of_running.defjvp
def _tangent_of_relu(dtype, primals, tangents):
    @checkpointed
    def passed(half, tangent):
        return lax.select(half > 0, tangent, lax.full_like(tangent, 0))

    result = relu_of_running(dtype, *primals)
    return result, passed(Cast(dtype)(result), *tangents)


@jax.custom_jvp
def _half_of(half: Any, wide: Any) -> Any:
    """`half`, differentiated as if `wide`, the same array, were cast to it."""
    del wide
    return half


@_half_of.defjvp
def _tangent_of_half_of(primals, tangents):
    return primals[0], Cast(primals[0].dtype)(tangents[1])


@jax.custom_jvp
def _in_place_of(wide: Any, half: Any) -> Any:
    """`wide`, but computed from `half`, which is the same array."""
    return TO_FLOAT32(half)


@_in_place_of.defjvp
def _tangent_in_place_of(primals, tangents):
    _, half = primals
    return TO_FLOAT32(half), tangents[0]  # needs no `wide`: it is not kept


def _within_range(number: Stored, dtype: Any) -> Stored:
    """A number, or the largest one in half with the same sign if it is larger."""
    value, largest = np.asarray(number.array), float(jnp.finfo(dtype).max)
    if not np.isfinite(value) or abs(float(value)) <= largest:
        return number
    return Stored(np.float32(np.copysign(largest, value)))


def _is_kept_in_half(
    place: int,
    count: int,
    nodes: Sequence[Chain],
    operands: Sequence[tuple[Any, ...]],
) -> bool:
    """Whether the derivatives of a chain are as good with one of its arrays in half.

    They are if the array is multiplied, and after that added to something, if at all:
    they have only its relative error. After a difference, a root or a comparison, only
    the part that half rounds away may be left. A relu asks only for the sign, which
    half keeps.
    """
    # For each value computed from the array, by its place: whether it is a sum.
    sums = dict[int, bool]()
    sums[place] = False
    for i, (node, given) in enumerate(zip(nodes, operands, strict=True)):
        row, name = primitive_of(node.equation), node.equation.primitive.name
        found = [sums[x] for x in given if not isinstance(x, Number) and x in sums]
        if not found:
            continue
        is_sum = any(found)
        if not is_float32(node.atom):  # rounding may change an integer
            return False
        if row.saves_nothing:
            is_sum |= row.degree == "sum"
        elif name == "div" and given[1] in sums:
            return False
        elif name in ("div", "mul"):
            by_number = any(isinstance(x, Number) for x in given)
            if len(found) > 1 or (is_sum and not by_number):
                return False
        elif not (_is_relu(node) and place in given):
            return False
        sums[count + i] = is_sum
    return True


def _is_relu(chain: Chain) -> bool:
    """Whether it is the maximum of an array and 0."""
    operands = [
        x.operands[0] if isinstance(x, Chain) and len(x.operands) == 1 else x
        for x in chain.operands
    ]
    is_larger = chain.equation.primitive.name == "max"
    is_larger &= any(is_number(x) and x.array == 0 for x in operands)
    return is_larger or is_relu_of_jax(chain.equation)


Held = Stored | Chain


def _cast(array: Any, cast: Cast) -> Any:
    return call_shared(cast, [array]) if isinstance(array, Array) else cast(array)


def is_number(held: Held) -> TypeGuard[Stored]:
    """Whether it is a number in the program."""
    return (
        isinstance(held, Stored)
        and not isinstance(held.array, Array)
        and not np.shape(held.array)
    )
