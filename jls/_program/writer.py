# SPDX-License-Identifier: Apache-2.0
"""Writes programs without tracing them.

JAX traces an operation again for each array. Here it is traced once for each type of
array.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jls._program.jaxprs import run_as_call, substituted, variable_like


class Writer:
    """A program that is written equation by equation, and its arguments.

    Args:
      like: a program whose inputs become the first inputs; its equations are left out.
      arguments: the values of these inputs.
    """

    def __init__(self, like: Any = None, arguments: Sequence[Array] = ()) -> None:
        self._program = like or jax.make_jaxpr(lambda: ())().jaxpr
        self._inputs = [*self._program.invars]
        self._variables = dict(zip(map(id, arguments), self._inputs, strict=True))
        self._traced: dict[Any, Any] = {}
        self.arguments = [*arguments]
        self.equations: list[Any] = []

    def variable_of(self, array: Array) -> Any:
        """The variable that holds `array`. A new array becomes an argument."""
        if id(array) not in self._variables:
            self._variables[id(array)] = variable = variable_like(array)
            self._inputs.append(variable)
            self.arguments.append(array)
        return self._variables[id(array)]

    def apply(self, fun: Callable[..., Any], *operands: Any) -> list[Any]:
        """Adds the equations of `fun`, and returns the variables of its results.

        Args:
          fun: a function of arrays, without constants.
          operands: variables.
        """
        kinds = fun, *(x.aval for x in operands)
        if kinds not in self._traced:
            self._traced[kinds] = jax.make_jaxpr(fun)(*kinds[1:]).jaxpr
        jaxpr = self._traced[kinds]
        values = dict(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            results = list(map(variable_like, equation.outvars))
            inputs = substituted(equation.invars, values)
            values.update(zip(equation.outvars, results, strict=True))
            self.equations.append(equation.replace(invars=inputs, outvars=results))
        return substituted(jaxpr.outvars, values)

    def run(self, outvars: Sequence[Any], name: str) -> list[Array]:
        """Runs the program in a call named `name`, and returns values of variables."""
        if not outvars:
            return []
        program = self._program.replace(
            invars=self._inputs, outvars=list(outvars), eqns=self.equations
        )
        return run_as_call(program, self.arguments, name)


def of_each(fun: Callable[[Array], Any], arrays: Sequence[Array]) -> list[list[Array]]:
    """The results of `fun` for each array. It is traced once for each type."""
    types = Counter(map(jax.typeof, arrays))
    writer = Writer()
    results = [
        writer.apply(fun, writer.variable_of(x))
        for x in arrays
        if types[jax.typeof(x)] > 1
    ]
    values = iter(writer.run([x for one in results for x in one], "of_each"))
    written = ([next(values) for _ in one] for one in results)
    return [
        next(written) if types[jax.typeof(x)] > 1 else jax.tree.leaves(fun(x))
        for x in arrays
    ]
