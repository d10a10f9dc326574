"""Reads what became of a program under `jls.autocast`."""

import contextlib
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from numpy.linalg import norm

from jls._program.jaxprs import opened, programs_in

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


class Operation(NamedTuple):
    name: str
    operands: tuple[str, ...]  # dtypes
    results: tuple[str, ...]
    equation: object
    calls: tuple[str, ...]  # the calls, loops and branches around it


def operations(fun, *args):
    """All operations of the program of `fun`, those of the programs inside too."""
    found = []

    def read(program, calls):
        for equation in opened(program).jaxpr.eqns:
            name = equation.primitive.name
            dtypes = [
                tuple(str(x.aval.dtype) for x in atoms if hasattr(x.aval, "dtype"))
                for atoms in (equation.invars, equation.outvars)
            ]
            found.append(Operation(name, *dtypes, equation, calls))
            for inner in programs_in(equation):
                read(inner, (*calls, name))

    read(jax.make_jaxpr(fun)(*args), ())
    return found


def named(name, fun, *args):
    return [x for x in operations(fun, *args) if x.name == name]


def only(name, fun, *args):
    """The dtype of the result of the one operation of this name."""
    (found,) = named(name, fun, *args)
    return found.results[0]


def products(fun, *args):
    return [x for x in operations(fun, *args) if x.name in PRODUCTS]


def off(tree, reference):
    """How far a tree is off another, relative to its norm."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(reference)
    distance = norm([norm(x - y) for x, y in zip(leaves, others, strict=True)])
    return float(distance / norm([norm(y) for y in others]))


def cast_by_hand(fun, dtype):
    """`fun` of trees cast to half: what one writes without a dtype switch."""

    def half(x):
        return x.astype(dtype) if x.dtype == jnp.float32 else x

    return lambda *args: fun(*jax.tree.map(half, args)).astype(jnp.float32)


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def saved(fun, *args):
    """What `fun` keeps for its derivative, beside its arguments; nothing is run."""
    program = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))
    jaxpr = opened(program(*args)).jaxpr
    kept = {id(x): x.aval for x in jaxpr.outvars}
    for x in jaxpr.invars:
        kept.pop(id(x), None)
    return [aval for aval in kept.values() if hasattr(aval, "dtype")]


def size_in_bytes(avals):
    return sum(aval.size * aval.dtype.itemsize for aval in avals)
