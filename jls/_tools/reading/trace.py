# SPDX-License-Identifier: Apache-2.0
"""The program of a user's function."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jls import _validate
from jls._program.jaxprs import Program, compiler_options, opened
from jls._tools.reading.arguments import Arguments, Item, items_of
from jls._tree import is_array

# The errors of a function that reads values at the host while it is traced.
READS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    _validate.TracedError,
)
# A jitted function is one call and a few casts; a step that is not has hundreds of
# operations outside of any jit.
_MANY = 64


class Traced(NamedTuple):
    """The program of a function."""

    program: Program
    inputs: list[int]  # the index of the leaf for each input
    outputs: list[Item]  # its results; arrays as shapes and dtypes
    objects: list[Item]  # the leaves of its NNX arguments afterwards, in the same form
    reads: str = ""  # how it asks for values without computing with them, "" if not
    options: Mapping[str, Any] = {}

    @property
    def is_jitted(self) -> bool:
        return len(opened(self.program).jaxpr.eqns) <= _MANY


# The types that may be abstract while a function is traced: those that `jax.jit`
# traces; or only arrays.
ALL = (jax.Array, np.ndarray, np.generic, float, complex)
_ARRAYS = (jax.Array, np.ndarray)


def trace(
    fun: Callable[..., Any],
    arguments: Arguments,
    abstract: tuple[type, ...] = _ARRAYS,
) -> Traced:
    """The program of a function, from abstract arrays; nothing is computed.

    Values at the host are abstract too, as under `jax.jit`, unless the function
    computes with them at the host, which is right.

    Args:
      fun: the function.
      arguments: its arguments.
      abstract: the types to make abstract first.

    Raises:
      Exception: what the function raises; one of `READS` if it reads a value of a JAX
        array at the host.
    """
    if abstract != _ARRAYS:
        # The function may refuse the type of a number that is abstract.
        with contextlib.suppress(Exception):
            return _trace_abstract(fun, arguments, abstract)
    # It may compute with the arrays of numpy, at the host.
    with contextlib.suppress(*READS):
        return _trace_abstract(fun, arguments, _ARRAYS)
    return _trace_abstract(fun, arguments, (jax.Array,))


def _trace_abstract(
    fun: Callable[..., Any], arguments: Arguments, abstract: tuple[type, ...]
) -> Traced:
    returned: list[list[Item]] = []
    given = arguments.leaves
    inputs = [i for i, x in enumerate(given) if isinstance(x, abstract)]
    rest = [None if i in set(inputs) else x for i, x in enumerate(given)]

    def run(arrays):
        abstract = dict(zip(inputs, arrays, strict=True))
        # The function may change numpy arrays in place.
        leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in rest]
        leaves = [abstract.get(i, x) for i, x in enumerate(leaves)]
        call = arguments.rebuild(leaves)
        result = fun(*call.args, **call.kwargs)
        returned[:] = items_of(result), call.read()
        return [x.value for items in returned for x in items if is_array(x.value)]

    # JAX takes options at the outermost jit alone.
    jitted: Any = fun
    if options := compiler_options(jitted):
        fun = jitted.__wrapped__
    traced = jax.jit(run) if options else run
    program = jax.make_jaxpr(traced)([given[i] for i in inputs])
    outputs, objects = ([_abstract(x) for x in items] for items in returned)
    return Traced(program, inputs, outputs, objects, options=options)


def _abstract(item: Item) -> Item:
    if not is_array(item.value):
        return item
    if not hasattr(item.value, "dtype"):
        return item._replace(value=np.asarray(item.value))
    shape, dtype = np.shape(item.value), item.value.dtype
    is_weak = getattr(item.value, "weak_type", False)
    abstract = jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)
    return item._replace(value=abstract)
