# SPDX-License-Identifier: Apache-2.0
"""Finds where a program sums the squares of some of its inputs, as clipping does.

    square, sum     of each input: `jnp.sum(x**2)`, `jnp.sum((x.conj() * x).real)`, or
                    `jnp.sum(x.real**2 + x.imag**2)`
    add             of those sums, until all inputs are in
    psum            of that over devices, if the program goes on with it

What is computed otherwise, such as a norm over some of the inputs or over rows of them,
is not found.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jls._program.control import live
from jls._program.jaxprs import is_exact_cast, is_literal, parameter, variables_in

REAL, IMAG = "real", "imag"


class SumOfSquares(NamedTuple):
    """The equations of a program that sum the squares of its inputs."""

    jaxpr: Any  # inputs -> the sum of the squares of each, and `total`
    total: Any  # the variable of the whole program that holds the sum over all inputs


class _Term(NamedTuple):
    """An input, or its square, element by element; of a complex one, in parts."""

    power: int
    input: int  # its index
    parts: frozenset[str]
    is_conjugate: bool = False


class _Sum(NamedTuple):
    """The sum of the squares of all elements of some inputs."""

    inputs: frozenset[int]


_ZERO = "zero"


def find_sum_of_squares(jaxpr: Any, inputs: Sequence[Any]) -> SumOfSquares | None:
    """The sum over all of `inputs`, variables of `jaxpr`; None if there is no such sum.

    Only the equations of `jaxpr` itself are read, not those of the programs it calls.
    """
    names = [equation.primitive.name for equation in jaxpr.eqns]
    if names.count("reduce_sum") < len(inputs):
        return None
    known: dict[Any, Any] = {}
    total = None
    for index, variable in enumerate(inputs):
        known[variable] = _Term(1, index, _parts_of(variable))
    sum_of: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        variables = variables_in(equation.invars)
        if variables and known.keys().isdisjoint(variables):
            continue
        operands = [_term_of(atom, known) for atom in equation.invars]
        result = _apply(equation, operands, inputs) if all(operands) else None
        if result is None:
            continue
        (variable,) = equation.outvars
        known[variable] = result
        if isinstance(result, _Sum):
            if len(result.inputs) == 1:
                (index,) = result.inputs
                sum_of.setdefault(index, variable)
            is_total = len(result.inputs) == len(inputs)
            if is_total and (total is None or _is_over_devices(equation)):
                total = variable
    return None if total is None else _slice(jaxpr, inputs, sum_of, total)


def _parts_of(variable: Any) -> frozenset[str]:
    is_complex = variable.aval.dtype.kind == "c"
    return frozenset({REAL, IMAG} if is_complex else {REAL})


def _term_of(atom: Any, known: dict[Any, Any]) -> Any:
    if not is_literal(atom):
        return known.get(atom)
    return _ZERO if not getattr(atom.aval, "shape", ()) and atom.val == 0 else None


def _apply(equation: Any, operands: list[Any], inputs: Sequence[Any]) -> Any:
    """Result of one operation on terms, sums and zeros; None if it is none of them."""
    name, first = equation.primitive.name, operands[0] if operands else None
    if name == "add":
        return _add(*operands)
    if name in ("copy", "pvary") or _widens(equation):
        return first
    if _is_over_devices(equation):
        return first if isinstance(first, _Sum) and len(operands) == 1 else None
    if first == _ZERO:
        moved = "broadcast_in_dim", "square", "convert_element_type"
        return _ZERO if name in moved else None
    if not isinstance(first, _Term):
        return None
    if name == "reduce_sum":
        is_whole = first.parts == _parts_of(inputs[first.input])
        axes = parameter(equation, "axes", ())
        shape = equation.invars[0].aval.shape
        if first.power == 2 and is_whole and len(axes) == len(shape):
            return _Sum(frozenset({first.input}))
    elif first.power == 2:
        return first if name == REAL else None
    elif name in (REAL, IMAG):
        return first._replace(parts=first.parts & {name}, is_conjugate=False)
    elif name == "conj":
        return first._replace(is_conjugate=not first.is_conjugate)
    elif name == "square" or (name == "integer_pow" and parameter(equation, "y") == 2):
        return first._replace(power=2) if len(first.parts) == 1 else None
    elif name == "mul":
        return _multiply(*operands)
    return None


def _is_over_devices(equation: Any) -> bool:
    """Whether it sums over all devices of an axis of `shard_map` or `pmap`."""
    is_sum = equation.primitive.name in ("psum", "psum_invariant")
    return is_sum and parameter(equation, "axis_index_groups") is None


def _widens(equation: Any) -> bool:
    """Whether it casts to a dtype that holds all numbers of the old one."""
    if equation.primitive.name != "convert_element_type":
        return False
    old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return is_exact_cast(old, new)


def _add(one: Any, other: Any) -> Any:
    if _ZERO in (one, other):
        result = other if one == _ZERO else one
        return None if isinstance(result, _Term) and result.power == 1 else result
    if isinstance(one, _Sum) and isinstance(other, _Sum):
        if one.inputs.isdisjoint(other.inputs):
            return _Sum(one.inputs | other.inputs)
    elif isinstance(one, _Term) and isinstance(other, _Term):
        is_same = (one.power, one.input) == (2, other.input) and other.power == 2
        if is_same and one.parts.isdisjoint(other.parts):
            return one._replace(parts=one.parts | other.parts)
    return None


def _multiply(one: Any, other: Any) -> Any:
    """The square of a term: x * x, or of a complex one conj(x) * x."""
    if not (isinstance(one, _Term) and isinstance(other, _Term)):
        return None
    is_complex = len(one.parts) == 2
    wanted = one._replace(is_conjugate=one.is_conjugate != is_complex)
    if other != wanted:
        return None
    return one._replace(power=2, is_conjugate=False)


def _slice(
    jaxpr: Any, inputs: Sequence[Any], sum_of: dict[int, Any], total: Any
) -> SumOfSquares:
    outvars = [*(sum_of[index] for index in range(len(inputs))), total]
    return SumOfSquares(
        jaxpr.replace(
            constvars=[],
            invars=list(inputs),
            outvars=outvars,
            eqns=[jaxpr.eqns[i] for i in live(jaxpr, outvars)],
            effects=set(),
        ),
        total,
    )
