"""What XLA may do to half precision on a GPU, done here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from jls._program.control import calls_of
from jls._program.jaxprs import bind, is_exact_cast, is_program, opened


def with_excess_precision(fun):
    """`fun`, without any cast to a narrower float whose result is cast back.

    XLA may leave out both (`xla_allow_excess_precision`): on a GPU it does, where they
    meet in one kernel, on a CPU hardly ever. What differs by platform is as there.
    """

    def run(*args):
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        found = _run(program, [(leaf, None) for leaf in jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shapes), [x for x, _ in found])

    return run


def _run(program, args):
    """The results, and what each was before a cast to a narrower float, or None."""
    jaxpr, consts = opened(program)
    known = dict(zip(jaxpr.constvars, ((x, None) for x in consts), strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return (atom.val, None) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        calls, name = calls_of(equation), equation.primitive.name
        if calls and calls[0].kind == "call":
            found = _run(calls[0].program, inputs)
        elif name == "platform_index":
            found = [(np.int32(equation.params["platforms"].index(None)), None)]
        elif name == "cond" and isinstance(inputs[0][0], np.integer):
            found = _run(calls[inputs[0][0]].program, inputs[1:])
        elif name == "stop_gradient":
            found = inputs
        elif name == "convert_element_type":
            found = [_cast(equation, *inputs[0])]
        else:
            # Within a loop or a branch; nothing is left out across its edge.
            inside = equation.params if calls and calls[0].kind != "devices" else {}
            inside = jax.tree.map(_traced, inside, is_leaf=is_program)
            values = bind(equation, [value for value, _ in inputs], **inside)
            found = [(value, None) for value in values]
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _traced(program):
    if not is_program(program):
        return program

    def run(*args):
        return [x for x, _ in _run(program, [(x, None) for x in args])]

    avals = [x.aval for x in opened(program).jaxpr.invars]
    like = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals
    ]
    return jax.make_jaxpr(run)(*like)


def _cast(equation, value, before):
    dtype = equation.params["new_dtype"]
    if before is not None and before.dtype == dtype:
        return before, None
    (new,) = bind(equation, [value])
    is_rounded = jnp.issubdtype(dtype, jnp.floating)
    is_rounded &= not is_exact_cast(value.dtype, dtype)
    return new, value if is_rounded else None


AS_WRITTEN_OR_ON_A_GPU = [
    pytest.param(lambda fun: fun, id="as written"),
    pytest.param(with_excess_precision, id="as on a GPU"),
]
