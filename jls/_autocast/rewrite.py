# SPDX-License-Identifier: Apache-2.0
"""Evaluates a float32 program with its products, and what lies between them, in half.

Calls, loops, branches and custom derivatives stay what they are, and are rewritten
inside. Every cast is where a value is used, so nothing but XLA merges two of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from jls._autocast.held import MOST, Chain, Held, Stored, is_number
from jls._autocast.keep import Choice
from jls._autocast.kinds import Fact, Kind, Kinds, Step, Way
from jls._autocast.leads import Leads, moves_each
from jls._autocast.pick import bind_pick, is_pick
from jls._autocast.shared import Cast, bind_shared
from jls._program.control import MAIN, Call, Site, calls_of
from jls._program.jaxprs import (
    Program,
    bind,
    inlined,
    is_float32,
    is_inexact_atom,
    is_literal,
    jitted_inline,
    manual_axes,
    opened,
    operation_of,
    parameter,
    parameters,
    trace_of,
    traced_as,
    variable_of,
    with_dtype,
)
from jls._program.places import function_of_jax, has_line_inside
from jls._program.primitives import primitive_of
from jls._program.replay import select_lanes
from jls._scopes import KEPT


class ClosedOverError(Exception):
    """The rule of a custom_vjp needs an array that is no longer there."""


class Rewrite:
    """One program: what was read of it, and its evaluation.

    Attributes:
      choice: what is cast.
      leads: which of its variables lead to a product.
    """

    def __init__(self, choice: Choice, precision: Any, trace: Any = None) -> None:
        self.choice, self._precision, self._own_trace = choice, precision, trace
        self.leads = Leads(choice)
        # What the rule of a custom_vjp may close over, where there is one.
        self._closed_over: dict[Any, Held] = {}
        self._kinds = Kinds(choice, self.leads)
        self._bodies: dict[Any, Any] = {}  # of calls that are alike
        # Of functions that JAX jits, by their sites: with the lines of the calls.
        self._inlined: dict[tuple[int, ...], Any] = {}

    def read(
        self,
        program: Program,
        facts: Sequence[Fact],
        wanted: Sequence[bool] | None = None,
        site: Site = MAIN,
    ) -> list[Fact]:
        """Reads a program before it is run, and the facts about its results.

        Args:
          program: a jaxpr.
          facts: about its inputs.
          wanted: which of its results lead to a product.
          site: the calls around it.
        """
        results = opened(program).jaxpr.outvars
        self.leads.read(program, wanted or [False] * len(results), site)
        return self._kinds.read(program, facts, site)

    def run(
        self,
        program: Program,
        operands: Sequence[Held],
        site: Site = MAIN,
        caller: Any = None,
        is_rule: bool = False,
    ) -> list[Held]:
        """The results of a program that was read.

        Args:
          program: a jaxpr.
          operands: its inputs.
          site: the calls around it.
          caller: the equation of a function that JAX jits, which stays no call, or of
            a rule. What is inside may have no line of the user's, and takes this one.
          is_rule: whether it is of a rule, which is run inside of the caller's scopes.
        """
        jaxpr, consts = opened(program)
        known: dict[Any, Held] = {}
        known.update(zip(jaxpr.constvars, map(self._constant, consts), strict=False))
        known.update(zip(jaxpr.invars, operands, strict=True))
        if self.leads.has_rules:
            self._closed_over |= known

        def look_up(atom: Any) -> Held:
            return self._constant(atom.val) if is_literal(atom) else known[atom]

        function = None if caller is None else function_of_jax(caller)
        ends = _last_uses(jaxpr)
        for index, equation in enumerate(jaxpr.eqns):
            here = site.inside(equation, index)
            if caller is not None:
                self._inlined[here.indices] = inlined(
                    equation,
                    caller,
                    has_line=has_line_inside(equation, function),
                    is_rule=is_rule,
                )
            results = self._equation(here, list(map(look_up, equation.invars)))
            made = dict(zip(equation.outvars, results, strict=True))
            known |= made
            if self.leads.has_rules:
                self._closed_over |= made
            for atom in ends[index]:
                del known[atom]
        return list(map(look_up, jaxpr.outvars))

    def _constant(self, value: Any) -> Stored:
        held = self._closed_over.get(variable_of(value))
        if isinstance(held, Stored):
            (held,) = _anew([held])
        if held is not None:
            return self._in_memory(held, False)
        if self._own_trace is not None and trace_of(value) is self._own_trace:
            raise ClosedOverError
        return Stored(value, False, self._kinds.of_constant(value).is_beyond)

    def _at(self, site: Site) -> Any:
        """The equation at a site, with the line and the scopes that it has there."""
        return self._inlined.get(site.indices, site.equation)

    def _equation(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        equation = self._at(site)
        step = self._kinds.steps[site.indices]
        name, row = equation.primitive.name, primitive_of(equation)
        calls = calls_of(equation)
        if calls:
            control = self._CONTROL[calls[0].kind]
            return control(self, site, calls, operands, step.results)
        if name == "convert_element_type" and is_float32(equation.invars[0]):
            if is_float32(equation.outvars[0]):
                return operands
        elif name == "convert_element_type" and is_number(operands[0]):
            dtype = equation.outvars[0].aval.dtype
            return [Stored(np.asarray(operands[0].wide()).astype(dtype), False)]
        elif row.cast in ("half", "inside", "leaves", "shape"):
            return [self._elementwise(site, operands, step)]
        elif row.cast == "product" and self.choice.why_wide(site) == "keep":
            with jax.named_scope(KEPT):
                return self._operation(site, operands, step)
        return self._operation(site, operands, step)

    def _operation(
        self, site: Site, operands: list[Held], step: Step
    ) -> Sequence[Held]:
        """An operation that is computed at once."""
        params, equation = {}, self._at(site)
        is_product = primitive_of(equation).cast == "product"
        if is_product and step.way != Way.WIDE:
            if parameter(equation, "preferred_element_type"):
                params["preferred_element_type"] = self.choice.dtype
        elif is_product and parameter(equation, "precision") is None:
            params["precision"] = self._precision
        each = [step.way != Way.WIDE] * len(operands)
        if moves_each(equation):
            each = [fact.is_half for fact in step.results]
        if is_pick(equation) and step.way == Way.WIDE and not self.choice.is_kept(site):
            results = bind_pick(equation, [_wide(equation, x) for x in operands])
        else:
            results = self._bound(equation, operands, each, **params)
        return self._stored(equation, results, step.results)

    def _bound(
        self, equation: Any, operands: list[Held], each: list[bool], **params: Any
    ) -> list[Any]:
        """The results of an operation that takes some of its operands in half."""
        arrays, casts = list[Any](), list[Cast | None]()
        for atom, held, is_half in zip(equation.invars, operands, each, strict=True):
            dtype = self.choice.dtype if is_half and is_float32(atom) else None
            if isinstance(held, Stored) and dtype:
                arrays.append(held.array)
                casts.append(held.cast(dtype))
            else:
                arrays.append(held.half(dtype) if dtype else _wide(equation, held))
                casts.append(None)
        return bind_shared(equation, arrays, casts, **params)

    def _elementwise(self, site: Site, operands: list[Held], step: Step) -> Held:
        """An operation that is computed at once, or as part of a chain."""
        (fact,), equation = step.results, self._at(site)
        operands = [x.stored or x if isinstance(x, Chain) else x for x in operands]
        chains = [x for x in operands if isinstance(x, Chain)]
        if Chain.is_of_number(equation, operands):
            is_chain = is_float32(equation.outvars[0])
        elif step.way == Way.HALF:
            is_chain = any(x.is_half for x in chains)
        elif step.way == Way.INSIDE:
            is_chain = True
        else:
            is_grown = fact.share < 1 and fact.kind != Kind.CONSTANT
            is_chain = bool(chains) or is_grown or any(x.is_half for x in operands)
            is_chain &= is_float32(equation.outvars[0])
        if not is_chain:
            each = [step.way == Way.HALF] * len(operands)
            return self._stored(
                equation, self._bound(equation, operands, each), [fact]
            )[0]
        is_beside = not any(map(_is_run_apart, site.equations))
        chain = Chain(equation, operands, fact, is_beside)
        if chain.count > MOST:
            stored = [self._in_memory(x, x.is_half) for x in operands]
            chain = Chain(equation, stored, fact, is_beside)
        return chain

    def _stored(
        self, equation: Any, results: Sequence[Any], facts: Sequence[Fact]
    ) -> list[Stored]:
        """Results as arrays; of a loop also what it carries, the first of them."""
        return [
            Stored(array, is_float32(atom) and fact.is_half, fact.is_beyond)
            for atom, array, fact in zip(equation.outvars, results, facts, strict=False)
        ]

    def _in_memory(self, held: Held, is_half: bool) -> Stored:
        if isinstance(held, Stored) and held.is_half == is_half:
            return held
        array = held.half(self.choice.dtype) if is_half else held.wide()
        return Stored(array, is_half)

    # Of programs that are called: values go in and come out in memory.

    def _inputs(self, operands: Sequence[Held]) -> list[Stored]:
        return [
            x if isinstance(x, Stored) else self._in_memory(x, x.is_half)
            for x in operands
        ]

    def _as(self, held: Sequence[Held], facts: Sequence[Fact], atoms: Any) -> list[Any]:
        """Values as arrays, in half where the facts say so."""
        return [
            self._in_memory(x, fact.is_half).array if is_float32(atom) else x.wide()
            for x, fact, atom in zip(held, facts, atoms, strict=True)
        ]

    def _call(
        self, site: Site, calls: list[Call], operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        """A jit of the user's, remat and custom derivatives stay what they are."""
        (call,), equation = calls, self._at(site)
        name = equation.primitive.name
        if name == "custom_jvp_call":
            return self._custom_jvp(site, call, operands, facts)
        if name == "custom_vjp_call":
            return self._custom_vjp(site, call, operands, facts)
        is_kept = name == "jit" and function_of_jax(equation) is None
        if not is_kept and name != "remat2":
            caller = equation if name == "jit" else None
            return self.run(call.program, operands, site, caller)
        inputs, atoms = self._inputs(operands), opened(call.program).jaxpr.outvars

        def run(*arrays):
            results = self.run(call.program, _like(inputs, arrays), site)
            return self._as(results, facts, atoms)

        def made(*arrays):
            body: Any = jax.make_jaxpr(run)(*arrays)
            if name == "remat2":
                body, consts = opened(body)
                assert not consts  # arrays are operands
            return operation_of(equation, jaxpr=body).bind(arrays)

        arrays = [x.array for x in inputs]
        with traced_as(equation):
            steps = self._steps(call.program, site)
            if steps is None:
                return self._stored(equation, made(*arrays), facts)
            # Layers that are alike have one body, which JAX differentiates once.
            key = operation_of(equation), steps
            key += tuple((x.is_half, x.is_beyond) for x in (*inputs, *facts))
            if key not in self._bodies:
                self._bodies[key] = jitted_inline(made)
            return self._stored(equation, self._bodies[key](*arrays), facts)

    def _steps(self, program: Program, site: Site) -> tuple[Any, ...] | None:
        """What becomes of a program, if that is all that its results depend on."""
        jaxpr, consts = opened(program)
        if consts:
            return None
        found = list[Any]()
        for index, equation in enumerate(jaxpr.eqns):
            here = site.inside(equation, index)
            if equation.primitive.name == "custom_vjp_call":  # may close over arrays
                return None
            step = self._kinds.steps[here.indices]
            facts = ((x.kind, x.share < 1, x.is_beyond) for x in step.results)
            found.append((step.way, *facts))
            for call in calls_of(equation):
                steps = self._steps(call.program, call.site(here))
                if steps is None:
                    return None
                found.append(steps)
        return tuple(found)

    def _scan(
        self, site: Site, calls: list[Call], operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        (call,), atoms = calls, site.equation.outvars
        consts, carried = call.consts, call.carried
        inputs = self._inputs(operands)
        fixed, sliced = inputs[:consts], inputs[consts + carried :]
        entering = operands[consts : consts + carried]

        def body(carry, slices):
            state = self._stored(site.equation, carry, facts)
            held = [*_anew(fixed), *state, *_like(sliced, slices)]
            results = self.run(call.program, held, site)
            results = self._as(results, facts, atoms)
            return results[:carried], results[carried:]

        params = parameters(site.equation)
        options = {x: params[x] for x in ("unroll", "_split_transpose") if x in params}
        with traced_as(self._at(site)):
            carry, stacks = lax.scan(
                body,
                self._as(entering, facts[:carried], atoms[:carried]),
                [x.array for x in sliced],
                length=call.length,
                reverse=call.is_reversed,
                **options,
            )
        return self._stored(site.equation, [*carry, *stacks], facts)

    def _while(
        self, site: Site, calls: list[Call], operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        (body_call, condition), atoms = calls, site.equation.outvars
        first = condition.consts
        last = first + body_call.consts
        inputs = self._inputs(operands[:last])
        beside = condition.site(site)

        def is_on(carry):
            state = self._stored(site.equation, carry, facts)
            held = [*_anew(inputs[:first]), *state]
            return self.run(condition.program, held, beside)[0].wide()

        def body(carry):
            state = self._stored(site.equation, carry, facts)
            held = [*_anew(inputs[first:]), *state]
            results = self.run(body_call.program, held, site)
            results = self._as(results, facts, atoms)
            return select_lanes(is_on(carry), results, carry) if lanes else results

        # Of `vmap`: each lane ends by itself.
        lanes = opened(condition.program).jaxpr.outvars[0].aval.shape
        is_any_on = (lambda carry: jnp.any(is_on(carry))) if lanes else is_on
        with traced_as(self._at(site)):
            begin = self._as(operands[last:], facts, atoms)
            results = lax.while_loop(is_any_on, body, begin)
        return self._stored(site.equation, results, facts)

    def _cond(
        self, site: Site, calls: list[Call], operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        which, *rest = self._inputs(operands)
        atoms = site.equation.outvars

        def branch(call, *arrays):
            results = self.run(call.program, _like(rest, arrays), call.site(site))
            return self._as(results, facts, atoms)

        branches = [partial(branch, call) for call in calls]
        with traced_as(self._at(site)):
            results = lax.switch(which.array, branches, *(x.array for x in rest))
        return self._stored(site.equation, results, facts)

    def _devices(
        self, site: Site, calls: list[Call], operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        (call,), params = calls, parameters(site.equation)
        inputs, atoms = self._inputs(operands), site.equation.outvars

        def run(*arrays):
            results = self.run(call.program, _like(inputs, arrays), site)
            return self._as(results, facts, atoms)

        with traced_as(self._at(site)):
            results = jax.shard_map(
                run,
                mesh=params["mesh"],
                in_specs=tuple(params["in_specs"]),
                out_specs=list(params["out_specs"]),
                check_vma=params["check_vma"],
                axis_names=manual_axes(site.equation) or frozenset(),
            )(*(x.array for x in inputs))
        return self._stored(site.equation, results, facts)

    # Custom derivatives. JAX gives the rule of one equation as the derivative of it.

    def _inner(
        self, program: Program, facts: Any, wanted: Any, site: Site
    ) -> "Rewrite":
        """The rewrite of a program that is beside the one that was read."""
        inner = Rewrite(self.choice, self._precision, self._own_trace)
        inner._closed_over = self._closed_over
        inner.read(program, facts, wanted, site)
        return inner

    def _custom_jvp(
        self, site: Site, call: Call, operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        equation, atoms = self._at(site), site.equation.outvars
        inputs = self._inputs(operands)

        @jax.custom_jvp
        def run(*arrays):
            results = self.run(call.program, _like(inputs, arrays), site)
            return self._as(results, facts, atoms)

        @run.defjvp
        def rule(primals, tangents):
            moving = [i for i, x in enumerate(equation.invars) if is_inexact_atom(x)]
            held = [*_like(inputs, primals)]
            held += _like([inputs[i] for i in moving], [tangents[i] for i in moving])

            def differentiated(*arrays):
                primals, given = arrays[: len(inputs)], arrays[len(inputs) :]
                tangents = [_no_tangent(x) for x in primals]
                for i, tangent in zip(moving, given, strict=True):
                    tangents[i] = tangent
                bound = partial(_bound, equation)
                values, tangents = jax.jvp(bound, primals, tuple(tangents))
                pairs = zip(tangents, atoms, strict=True)
                return [*values, *(x for x, atom in pairs if is_inexact_atom(atom))]

            avals = [_type_of(x) for x in held]
            made = jax.make_jaxpr(differentiated)(*avals)
            known = [_fact_of(x) for x in held]
            results = opened(made).jaxpr.outvars
            moved = [i for i, atom in enumerate(atoms) if is_inexact_atom(atom)]
            outs = [*facts, *(facts[i] for i in moved)]
            wanted = [fact.is_half for fact in outs]
            inner = self._inner(made, known, wanted, site)
            held = inner.run(made, held, site, equation, is_rule=True)
            arrays = inner._as(held, outs, results)
            values, found = arrays[: len(atoms)], iter(arrays[len(atoms) :])
            tangents = [
                next(found) if is_inexact_atom(atom) else _no_tangent(value)
                for atom, value in zip(atoms, values, strict=True)
            ]
            return values, tangents

        with traced_as(equation):
            results = run(*(x.array for x in inputs))
        return self._stored(equation, results, facts)

    def _custom_vjp(
        self, site: Site, call: Call, operands: list[Held], facts: list[Fact]
    ) -> Sequence[Held]:
        """The rule gets and gives float32: its products are in half."""
        equation = self._at(site)

        def traced(fun, *trees):
            """The program of a function of trees, read; and a function that runs it."""
            made, shape = jax.make_jaxpr(fun, return_shape=True)(*trees)
            facts = [Fact(Kind.GIVEN) for _ in jax.tree.leaves(trees)]
            inner = self._inner(made, facts, None, site)
            structure = jax.tree.structure(shape)
            for value in opened(made).consts:
                inner._constant(value)  # raises, where one is not there

            def run(*trees):
                leaves = [Stored(x, False) for x in jax.tree.leaves(trees)]
                results = [x.wide() for x in inner.run(made, leaves, site)]
                return jax.tree.unflatten(structure, results)

            return run

        @jax.custom_vjp
        def run(*arrays):
            return traced(partial(_run_as_written, call.program), *arrays)(*arrays)

        def forwards(*primals):
            # A rule may ask what is differentiated, or refuse an argument that is.
            arrays = [x.value for x in primals]
            moving = [
                i
                for i, x in enumerate(primals)
                if x.perturbed and is_inexact_atom(equation.invars[i])
            ]

            def differentiated(*arrays):
                def bound(*moved):
                    given = list(arrays)
                    for i, array in zip(moving, moved, strict=True):
                        given[i] = array
                    return _bound(equation, *given)

                return jax.vjp(bound, *(arrays[i] for i in moving))

            def pulled(pullback, cotangents):
                whole = [
                    _no_tangent(atom.aval) if x is None else x
                    for x, atom in zip(cotangents, equation.outvars, strict=True)
                ]
                found = dict(zip(moving, pullback(whole), strict=True))
                return [found.get(i) for i in range(len(arrays))]

            results, pullback = traced(differentiated, *arrays)(*arrays)
            zeros = [x if is_inexact_atom(x) else None for x in results]
            # Now, while what the rule closes over can still be used.
            back = traced(pulled, pullback, zeros)
            return results, Partial(back, pullback)

        def backwards(pull, cotangents):
            zeros = [
                _instantiated(x) if is_inexact_atom(atom) else None
                for x, atom in zip(cotangents, equation.outvars, strict=True)
            ]
            return tuple(pull(zeros))

        run.defvjp(forwards, backwards, symbolic_zeros=True)
        with traced_as(equation):
            results = run(*(x.wide() for x in operands))
        return self._stored(equation, results, facts)

    _CONTROL: ClassVar = {
        "call": _call,
        "scan": _scan,
        "while": _while,
        "branch": _cond,
        "devices": _devices,
    }


def _wide(equation: Any, held: Held) -> Any:
    """The array in float32; if it is cast now, for this equation, with its line."""
    if isinstance(held, Chain) or not held.is_half:
        return held.wide()
    with traced_as(equation):
        return held.wide()


def _is_run_apart(equation: Any) -> bool:
    """Whether what it calls is in one body, and its derivative in another.

    The derivative of a remat runs it again: to keep chains in it apart from what they
    are then would compute them three times.
    """
    is_loop = any(call.is_loop for call in calls_of(equation))
    return is_loop or equation.primitive.name == "remat2"


def _last_uses(jaxpr: Any) -> list[list[Any]]:
    """Of each operation the variables that no later one needs."""
    needed = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    ends: list[list[Any]] = []
    for equation in reversed(jaxpr.eqns):
        atoms = [*equation.invars, *equation.outvars]
        last = {atom for atom in atoms if not is_literal(atom)} - needed
        needed |= last
        ends.append(list(last))
    return ends[::-1]


def _like(held: Sequence[Stored], arrays: Sequence[Any]) -> list[Stored]:
    """Other arrays in the places of those that are held."""
    return [
        Stored(array, x.is_half, x.is_beyond)
        for x, array in zip(held, arrays, strict=True)
    ]


def _anew(held: Sequence[Stored]) -> list[Stored]:
    """What is held outside of a body, for the inside."""
    return _like(held, [x.array for x in held])


def _fact_of(held: Stored) -> Fact:
    """What is known of an input of a program beside the one that was read."""
    return Fact(Kind.HALF if held.is_half else Kind.GIVEN)


def _type_of(held: Stored) -> Any:
    """What a program as written is traced with."""
    return with_dtype(held.array, jnp.float32) if held.is_half else held.array


def _no_tangent(value: Any) -> Any:
    return np.zeros(np.shape(value), jax.dtypes.float0)


def _instantiated(cotangent: Any) -> Any:
    """The array that a cotangent stands for."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _bound(equation: Any, *operands: Any) -> list[Any]:
    return bind(equation, operands)


def _run_as_written(program: Program, *operands: Any) -> list[Any]:
    jaxpr, consts = opened(program)
    return eval_jaxpr(jaxpr, consts, *operands)
