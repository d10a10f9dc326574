# SPDX-License-Identifier: Apache-2.0
"""Evaluates a float32 program with its products in half, and nothing else.

Calls, loops, branches and custom derivatives stay what they are, and are rewritten
inside. A cast is made where a value is used, so only XLA merges two of them.

An example in float16. The lines of a function, and what becomes of each operation:

    h = tanh(x @ w + b)
    s = sum(h)
    return h / s @ w

    x @ w         x and w are rounded to float16; the result is in memory, in float16
    b             is broadcast in float32, at once: it is a move of an array in memory
    +, tanh       not computed yet: a chain, which begins with x @ w and b
    sum           computes the chain in float32, and sums it: s is in memory, in float32
    /             not computed yet: the chain goes on, and begins with s too
    @ w           computes + and tanh again, and /, all in float32; rounds the result to
                  float16 once, rounds w again, and gives float16
    return        casts that to float32, the dtype of the result as written

The derivative keeps b and s in float32, and in float16 the result of x @ w and the
operands of both products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from jls._autocast.float8 import product_of
from jls._autocast.halves import IN_MEMORY, Fact, Halves
from jls._autocast.held import (
    MOST,
    Chain,
    Held,
    Stored,
    is_number,
    relu_of_running,
)
from jls._autocast.keep import OUTER, Choice
from jls._autocast.pick import bind_pick, is_pick
from jls._autocast.readers import MOVES, Readers
from jls._autocast.shared import Cast, bind_shared, call_shared
from jls._program.control import (
    MAIN,
    Call,
    Site,
    calls_of,
    evaluate,
    live,
    rebuild,
)
from jls._program.jaxprs import (
    Program,
    bind,
    bind_remat,
    called_program,
    in_scope,
    inlined,
    is_float32,
    is_inexact_atom,
    jitted_inline,
    opened,
    operation_of,
    parameter,
    parameters,
    rule_of,
    size_of,
    trace_of,
    traced_as,
    variable_of,
    with_dtype,
)
from jls._program.places import function_of_jax, has_line_inside, is_relu_of_jax
from jls._program.primitives import primitive_of
from jls._program.walk import walk


class ClosedOverError(Exception):
    """The rule of a custom_vjp needs an array that is no longer there."""


class Rewrite:
    """One program: the facts that were read about it, and its evaluation.

    Attributes:
      choice: which products are cast, and to which dtype.
    """

    def __init__(self, choice: Choice, precision: Any, trace: Any = None) -> None:
        self.choice, self._precision, self._own_trace = choice, precision, trace
        self._readers = Readers(choice, choice.is_half)
        # Which values something else reads than products in float8.
        self._others = Readers(choice, choice.takes_float8)
        self._halves = Halves(choice)
        # The arrays that the rule of a custom_vjp may close over, if there is one.
        self._closed_over: dict[Any, Held] = {}
        self._bodies: dict[Any, Any] = {}  # shared by calls that are alike
        # By site, equations of functions that JAX jits, and of rules: with the lines of
        # their callers.
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
          wanted: which of its results are read as they are; all by default.
          site: the calls around it.
        """
        results = opened(program).jaxpr.outvars
        wanted = wanted or [True] * len(results)
        self._readers.read(program, wanted, site)
        if self.choice.is_float8:
            self._others.read(program, wanted, site)
        return walk(program, facts, self._halves, site)

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
          caller: the equation of a rule, or of a function that JAX jits, which is
            inlined. Equations inside take its line if they have none of the user's.
          is_rule: whether it is a rule's program, which runs in the caller's scopes.
        """
        jaxpr = opened(program).jaxpr
        function = None if caller is None else function_of_jax(caller)

        def remember(atoms: Sequence[Any], held: Sequence[Held]) -> None:
            if self._readers.has_rules:
                self._closed_over.update(zip(atoms, held, strict=True))

        def run(here: Site, operands: list[Held]) -> Sequence[Held]:
            equation = here.equation
            if caller is not None:
                self._inlined[here.indices] = inlined(
                    equation,
                    caller,
                    has_line=has_line_inside(equation, function),
                    is_rule=is_rule,
                )
            results = self._equation(here, operands)
            self._note_others(here, operands, results)
            remember(equation.outvars, results)
            return results

        remember(jaxpr.invars, operands)
        ends = live(jaxpr, jaxpr.outvars, keep=range(len(jaxpr.eqns)))
        return evaluate(program, operands, self._constant, run, site, ends)

    def _constant(self, value: Any) -> Stored:
        held = self._closed_over.get(variable_of(value))
        if isinstance(held, Stored):
            (held,) = _anew([held])
        if held is not None:
            return self._in_memory(held, False)
        if self._own_trace is not None and trace_of(value) is self._own_trace:
            raise ClosedOverError
        return Stored(value)

    def _note_others(
        self, site: Site, operands: Sequence[Held], results: Sequence[Held]
    ) -> None:
        """Notes which results something else may keep in half, for its derivative."""
        if not self.choice.is_float8:
            return
        # XLA reshapes nothing: it is the same array.
        is_reshaped = site.equation.primitive.name == "reshape"
        is_other = is_reshaped and any(x.has_others for x in operands)
        for held, atom in zip(results, site.equation.outvars, strict=True):
            is_read = not self._others.round_result(site, atom)
            held.has_others |= is_other or is_read

    def _at(self, site: Site) -> Any:
        """The equation at a site, with the line and the scopes that it has there."""
        return self._inlined.get(site.indices, site.equation)

    def _equation(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        equation = self._at(site)
        name, row = equation.primitive.name, primitive_of(equation)
        calls = calls_of(equation)
        if calls and not _is_elementwise(equation):
            return self._call(site, calls, operands)
        if name == "convert_element_type" and is_float32(equation.invars[0]):
            if is_float32(equation.outvars[0]):
                return operands
            if is_number(operands[0]):
                dtype = equation.outvars[0].aval.dtype
                return [Stored(np.asarray(operands[0].wide()).astype(dtype))]
        if row.cast == "product":
            return self._product(site, operands)
        if row.cast in MOVES and not self.choice.is_kept(site):
            moved = self._moved(site, operands)
            if moved is not None:
                return moved
        if row.cast in ("chain", "shape") or calls:
            return self._elementwise(site, operands)
        if row.cast == "end":
            return self._end(equation, operands)
        return self._at_once(site, equation, operands)

    def _product(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        equation, why_wide = self._at(site), self.choice.why_wide(site)
        half, mark = self.choice.dtype, self.choice.mark_of(site)
        equation = in_scope(equation, mark) if mark else equation
        if self.choice.takes_float8(site):
            return self._product_in_float8(equation, operands)
        if why_wide is None:
            params = {}
            if parameter(equation, "preferred_element_type"):
                params["preferred_element_type"] = half
            each = [is_float32(x) for x in equation.invars]
            (array,) = self._bound(equation, operands, each, **params)
            return [Stored(array, is_float32(equation.outvars[0]))]
        if parameter(equation, "precision") is None:
            params = {**parameters(equation), "precision": self._precision}
            equation = equation.replace(params=params)
        if why_wide == OUTER:
            return self._chain(site, equation, operands)
        if why_wide == "inner product":
            return self._end(equation, operands)
        return self._at_once(site, equation, operands)

    def _product_in_float8(self, equation: Any, operands: list[Held]) -> Sequence[Held]:
        half = self.choice.dtype
        with traced_as(equation):
            arrays = [jnp.asarray(x.half(half)) for x in operands]
            pairs = zip(operands, arrays, strict=True)
            rounded = [held.in_float8(array) for held, array in pairs]
            # A value in float32 is rounded to half for this product only.
            keeps = [not (x.has_others and _is_cast(x)) for x in operands]
            product = product_of(equation, keeps)
            result = call_shared(product, [*arrays, *rounded[0], *rounded[1]])
        return [Stored(result, is_float32(equation.outvars[0]))]

    def _is_pick(self, site: Site) -> bool:
        return is_pick(site.equation) and not self.choice.is_kept(site)

    def _at_once(
        self, site: Site, equation: Any, operands: list[Held]
    ) -> Sequence[Held]:
        """Computes an operation in float32, at once."""
        if self._is_pick(site):
            results = bind_pick(equation, [_wide(equation, x) for x in operands])
        else:
            results = self._bound(equation, operands, [False] * len(operands))
        return self._stored(equation, results, operands)

    def _bound(
        self, equation: Any, operands: list[Held], each: list[bool], **params: Any
    ) -> list[Any]:
        """The results of an operation that takes some of its operands in half."""
        arrays, casts = list[Any](), list[Cast | None]()
        for held, is_half in zip(operands, each, strict=True):
            cast = None
            if not is_half:
                array = _wide(equation, held)
            elif isinstance(held, Stored) and not held.is_half:
                array, cast = held.array, Cast(self.choice.dtype)
            else:
                array = held.half(self.choice.dtype)
            arrays.append(array)
            casts.append(cast)
        return bind_shared(equation, arrays, casts, **params)

    def _moved(self, site: Site, operands: list[Held]) -> Sequence[Held] | None:
        """Makes a move at once, or returns None.

        A move is made at once if its operand is half, in memory, or rounded by all.
        """
        equation, half = self._at(site), self.choice.dtype
        row, count = primitive_of(equation), len(equation.outvars)
        is_pair = row.is_pairwise and count == len(operands) > 1
        if not any(map(is_float32, equation.outvars)):
            return None
        places = range(len(operands))[row.data]
        data = [operands[i] for i in places]
        rounds = [self._readers.round_result(site, x) for x in site.equation.outvars]
        grows = _size(equation.outvars[:1]) > _size(equation.invars[:1])
        if (row.moves == "all" and grows) or all(map(is_number, data)):
            return None
        if is_pair:
            # Each result has its own operand: in half if that is, or if all round it.
            each = [
                is_float32(atom) and (_is_half(x, half) or (fits and _is_cast(x)))
                for atom, x, fits in zip(equation.invars, operands, rounds, strict=True)
            ]
            return _results(self._bound(equation, operands, each), each)
        is_half = all(_is_half(x, half) for x in data)
        is_half |= all(rounds) and any(map(_is_cast, data))
        if not is_half and row.cast == "shape" and any(map(_is_cast, data)):
            return None  # it may become part of a chain
        if not is_half and self._is_pick(site):
            return None
        each = [is_half and i in places for i in range(len(operands))]
        is_running = not is_half and any(
            isinstance(x, Stored) and x.is_running for x in data
        )
        is_running |= any(x in self._halves.running for x in site.equation.outvars)
        results = self._bound(equation, operands, each)
        return self._stored(equation, results, operands, is_half, is_running)

    def _elementwise(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        """An operation that is part of a chain, or is computed at once."""
        equation = self._at(site)
        is_float = any(map(is_float32, equation.outvars))
        is_of_number = Chain.is_of_number(equation, operands) and is_float
        is_chained = any(isinstance(x, Chain) for x in operands)
        grows = _size(equation.outvars[:1]) > _size(equation.invars)
        is_small = not grows and all(is_number(x) or _is_reduced(x) for x in operands)
        is_arithmetic = is_float and not is_small
        if self._is_pick(site) or not (is_of_number or is_chained or is_arithmetic):
            return self._at_once(site, equation, operands)
        return self._chain(site, equation, operands)

    def _chain(self, site: Site, equation: Any, operands: list[Held]) -> Sequence[Held]:
        def made(operands: list[Held]) -> list[Chain]:
            return [
                Chain(equation, operands, self.choice.dtype, i)
                for i in range(len(equation.outvars))
            ]

        is_running = any(x in self._halves.running for x in site.equation.outvars)
        if is_running and is_relu_of_jax(equation):
            (held,) = operands
            with traced_as(equation):
                array = call_shared(relu_of_running, [held.wide()], self.choice.dtype)
            return [Stored(array, is_running=True)]
        chains = made(operands)
        if len(chains[0].nodes()) > MOST:
            # Too long: its operands are computed, and a new chain begins.
            chains = made([self._in_memory_wide(x) for x in operands])
        return [
            Stored(chain.wide(), is_running=True)
            if atom in self._halves.running
            else chain
            for chain, atom in zip(chains, site.equation.outvars, strict=True)
        ]

    def _end(self, equation: Any, operands: list[Held]) -> Sequence[Held]:
        """The last operation of a chain: its result is in memory."""
        row, half = primitive_of(equation), self.choice.dtype
        if row.degree == "same" and all(_is_half(x, half) for x in operands):
            results = self._bound(equation, operands, [True] * len(operands))
            return self._stored(equation, results, operands, is_half=True)
        if any(map(_is_cast, operands)):
            results = [Chain(equation, operands, half).wide()]
        else:
            results = self._bound(equation, operands, [False] * len(operands))
        return self._stored(equation, results, operands)

    def _stored(
        self,
        equation: Any,
        arrays: Sequence[Any],
        operands: Sequence[Held],
        is_half: bool = False,
        is_running: bool = False,
    ) -> list[Stored]:
        """Results, as values in memory."""
        results = [
            Stored(array, is_half and is_float32(atom), is_running)
            for array, atom in zip(arrays, equation.outvars, strict=True)
        ]
        is_small = all(is_number(x) or _is_reduced(x) for x in operands)
        for result, atom in zip(results, equation.outvars, strict=True):
            result.is_reduced = is_small or _size([atom]) < _size(equation.invars)
        return results

    def _in_memory(self, held: Held, is_half: bool) -> Stored:
        if isinstance(held, Stored) and held.is_half == is_half:
            return held
        array = held.half(self.choice.dtype) if is_half else held.wide()
        return Stored(array, is_half)

    def _in_memory_wide(self, held: Held) -> Stored:
        """Arrays in memory stay as they are; a chain becomes float32."""
        return held if isinstance(held, Stored) else self._in_memory(held, False)

    # Programs that are called: values go in and come out in memory.

    def _inputs(
        self, site: Site, calls: list[Call], operands: Sequence[Held]
    ) -> list[Stored]:
        """The operands in memory. The ones that are there already stay as they are.

        A chain is computed: in half if all programs that take it round it. If it is the
        same in each iteration of a loop, it stays in float32.
        """
        wide = {0} if calls[0].kind == "branch" else set[int]()
        for call in calls:
            here, fixed = call.site(site), call.consts if calls[0].is_loop else 0
            for i, atom in enumerate(opened(call.program).jaxpr.invars):
                rounds = is_float32(atom) and self._readers.round_input(here, atom)
                if i < fixed or not rounds:
                    wide.add(call.operand(i))
        return [
            x if isinstance(x, Stored) else self._in_memory(x, i not in wide)
            for i, x in enumerate(operands)
        ]

    def _are_half(self, site: Site, call: Call) -> list[bool]:
        """Which results of a call are stored in half."""
        atoms = site.equation.outvars
        rounds = [self._readers.round_result(site, x) for x in atoms]
        alone = [self._halves.is_half(site, i) for i in range(len(atoms))]
        if call.is_loop:
            rounds[: call.carried] = self._readers.round_carried(site)
            if self.choice.is_kept(site):
                alone[: call.carried] = [False] * call.carried
        return [
            is_float32(atom) and (is_rounded or is_half)
            for atom, is_rounded, is_half in zip(atoms, rounds, alone, strict=True)
        ]

    def _as(self, held: Sequence[Held], halves: Sequence[bool]) -> list[Any]:
        """Values as arrays, some of them in half."""
        pairs = zip(held, halves, strict=True)
        return [self._in_memory(x, is_half).array for x, is_half in pairs]

    def _call(self, site: Site, calls: list[Call], operands: list[Held]) -> Any:
        """A user's jit, remat and custom derivatives stay calls; JAX's jits do not."""
        call, equation = calls[0], self._at(site)
        if call.kind != "call":
            return self._rebuilt(site, calls, operands)
        rule, is_jit = rule_of(equation), equation.primitive.name == "jit"
        if rule == "jvp":
            return self._custom_jvp(site, call, operands)
        if rule == "vjp":
            return self._custom_vjp(site, call, operands)
        is_kept = is_jit and function_of_jax(equation) is None
        if not is_kept and rule != "remat":
            caller = equation if is_jit else None
            return self.run(call.program, operands, site, caller)
        inputs, halves = (
            self._inputs(site, [call], operands),
            self._are_half(site, call),
        )

        def run(*arrays):
            return self._as(self.run(call.program, _like(inputs, arrays), site), halves)

        def made(*arrays):
            if rule == "remat":
                return bind_remat(equation, run, arrays)
            body = jax.make_jaxpr(run)(*arrays)
            return operation_of(equation, jaxpr=body).bind(arrays)

        with traced_as(equation):
            # Layers that are alike have one body, which JAX differentiates once.
            steps = self._steps(call.program, site)
            if steps is not None:
                key = operation_of(equation), steps, tuple(halves)
                key += tuple((x.is_half, x.is_running) for x in inputs)
                made = self._bodies.setdefault(key, jitted_inline(made))
            return _results(made(*(x.array for x in inputs)), halves)

    def _steps(self, program: Program, site: Site) -> tuple[Any, ...] | None:
        """A key for the rewrite of a body; None if the body may close over arrays."""
        jaxpr, consts = opened(program)
        if consts:
            return None
        found = list[Any]()
        for index, equation in enumerate(jaxpr.eqns):
            here = site.inside(equation, index)
            if rule_of(equation) == "vjp":  # may close over arrays
                return None
            rounds = (self._readers.round_result(here, x) for x in equation.outvars)
            is_product = primitive_of(equation).cast == "product"
            mark = self.choice.mark_of(here) if is_product else None
            found.append((self.choice.is_kept(here), mark, *rounds))
            if self.choice.is_float8:
                others = (self._others.round_result(here, x) for x in equation.outvars)
                found.append((*others,))
            calls = calls_of(equation)
            if calls:
                found.append(tuple(self._are_half(here, calls[0])))
            for call in calls:
                steps = self._steps(call.program, call.site(here))
                if steps is None:
                    return None
                found.append(steps)
        return tuple(found)

    def _rebuilt(self, site: Site, calls: list[Call], operands: list[Held]) -> Any:
        """A loop, branches or a `shard_map`."""
        first, halves = calls[0], self._are_half(site, calls[0])
        if first.is_loop:
            begin, count = first.operand(first.consts), first.carried
            with traced_as(self._at(site)):
                carry = self._as(operands[begin : begin + count], halves[:count])
            operands[begin : begin + count] = [
                Stored(array, is_half, is_running=is_float32(array) and not is_half)
                for array, is_half in zip(carry, halves, strict=False)
            ]
        inputs = self._inputs(site, calls, operands)
        fixed = inputs[: first.consts] if first.kind == "scan" else []
        wide = [x.wide() for x in fixed]

        def run(call: Call, arrays: Sequence[Any]) -> tuple[list[Any], None]:
            held = _like(call.inputs(inputs), arrays)
            held[: len(fixed)] = [x.fixed(y) for x, y in zip(fixed, wide, strict=True)]
            results = self.run(call.program, held, call.site(site))
            if call.kind == "condition":
                return [results[0].wide()], None
            return self._as(results, halves), None

        with traced_as(self._at(site)):
            arrays = [x.array for x in inputs]
            results, _ = rebuild(self._at(site), calls, arrays, run)
        return _results(results, halves)

    # Custom derivatives. JAX gives the rule of an equation when it differentiates it.

    def _inner(
        self, program: Program, facts: Any, wanted: Any, site: Site
    ) -> "Rewrite":
        """The rewrite of a program that is no part of this one, such as a rule's."""
        inner = Rewrite(self.choice.anew(), self._precision, self._own_trace)
        inner._closed_over = self._closed_over
        inner.read(program, facts, wanted, site)
        return inner

    def _custom_jvp(self, site: Site, call: Call, operands: list[Held]) -> Any:
        """A rule is evaluated as the function is.

        The rule also takes the arrays from which chains are computed. It computes the
        chains again, so nothing of them is kept.
        """
        equation, atoms = self._at(site), site.equation.outvars
        inputs, halves = (
            self._inputs(site, [call], operands),
            self._are_half(site, call),
        )
        chains = [x if isinstance(x, Chain) else None for x in operands]
        leaves = dict[int, Stored]()
        for chain in filter(None, chains):
            leaves |= chain.leaves()
        count = len(inputs)
        caller = equation if function_of_jax(equation) else None

        @jax.custom_jvp
        def run(*arrays):
            held = _like(inputs, arrays[:count])
            results = self.run(call.program, held, site, caller)
            return self._as(results, halves)

        @run.defjvp
        def rule(primals, tangents):
            moving = [i for i, x in enumerate(equation.invars) if is_inexact_atom(x)]
            values, begun = primals[:count], primals[count:]
            begun = _like(list(leaves.values()), begun)
            arrays = dict(zip(leaves, begun, strict=True))
            held: list[Held] = [
                stored if chain is None or stored.is_half else chain.on(arrays)
                for stored, chain in zip(_like(inputs, values), chains, strict=True)
            ]
            held += _like([inputs[i] for i in moving], [tangents[i] for i in moving])

            def differentiated(*arrays):
                primals, given = arrays[:count], arrays[count:]
                tangents = [_no_tangent(x) for x in primals]
                for i, tangent in zip(moving, given, strict=True):
                    tangents[i] = tangent
                values, tangents = jax.jvp(
                    lambda *x: bind(equation, x), primals, tuple(tangents)
                )
                pairs = zip(tangents, atoms, strict=True)
                return [*values, *(x for x, atom in pairs if is_inexact_atom(atom))]

            avals = [_type_of(x) for x in (*inputs, *(inputs[i] for i in moving))]
            made = jax.make_jaxpr(differentiated)(*avals)
            moved = [i for i, atom in enumerate(atoms) if is_inexact_atom(atom)]
            outs = [*halves, *(halves[i] for i in moved)]
            known = [Fact(isinstance(x, Stored) and x.is_half) for x in held]
            inner = self._inner(made, known, [not x for x in outs], site)
            found = inner.run(made, held, site, equation, is_rule=True)
            arrays = inner._as(found, outs)
            values, changes = arrays[: len(atoms)], iter(arrays[len(atoms) :])
            tangents = [
                next(changes) if is_inexact_atom(atom) else _no_tangent(value)
                for atom, value in zip(atoms, values, strict=True)
            ]
            return values, tangents

        with traced_as(equation):
            arrays = [x.array for x in (*inputs, *leaves.values())]
            return _results(run(*arrays), halves)

    def _custom_vjp(self, site: Site, call: Call, operands: list[Held]) -> Any:
        """The rule takes and returns float32. Its products are in half."""
        equation = self._at(site)

        def traced(fun, *trees):
            """Traces and reads a function of trees, and returns its rewrite."""
            made, shape = jax.make_jaxpr(fun, return_shape=True)(*trees)
            facts = [IN_MEMORY for _ in jax.tree.leaves(trees)]
            inner = self._inner(made, facts, None, site)
            structure = jax.tree.structure(shape)
            for value in opened(made).consts:
                inner._constant(value)  # raises if it is no longer there

            def run(*trees):
                leaves = [Stored(x) for x in jax.tree.leaves(trees)]
                results = [x.wide() for x in inner.run(made, leaves, site)]
                return jax.tree.unflatten(structure, results)

            return run

        @jax.custom_vjp
        def run(*arrays):
            as_written = partial(eval_jaxpr, *opened(call.program))
            return traced(as_written, *arrays)(*arrays)

        def forwards(*primals):
            # A rule may ask which arguments are differentiated, or refuse one that is.
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
                    return bind(equation, given)

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
            # Traced now, while the arrays that the rule closes over can still be used.
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
        return [Stored(x) for x in results]


def _wide(equation: Any, held: Held) -> Any:
    """The array in float32. If it is cast here, the cast has the equation's line."""
    if isinstance(held, Chain) or not held.is_half:
        return held.wide()
    with traced_as(equation):
        return held.wide()


def _is_cast(held: Held) -> bool:
    """Whether it comes from a product: it is in half, or not computed yet."""
    return isinstance(held, Chain) or held.is_half


def _is_reduced(held: Held) -> bool:
    return isinstance(held, Stored) and held.is_reduced


def _size(atoms: Sequence[Any]) -> int:
    """The size of the largest one."""
    return max((size_of(getattr(x.aval, "shape", ())) for x in atoms), default=0)


def _is_half(held: Held, dtype: Any) -> bool:
    """Whether it is in half, or is a number that half has exactly."""
    if not is_number(held):
        return isinstance(held, Stored) and held.is_half
    number = np.asarray(held.wide())
    with np.errstate(over="ignore"):
        rounded = number.astype(dtype).astype(number.dtype)
    return bool(rounded == number or number != number)


def _is_elementwise(equation: Any) -> bool:
    """Whether it is a call of a `custom_jvp` function that a chain may have in it."""
    if rule_of(equation) != "jvp" or len(equation.outvars) != 1:
        return False
    if not is_float32(equation.outvars[0]):
        return False
    program = called_program(equation)
    return program is not None and _is_chain(program)


def _is_chain(program: Program) -> bool:
    jaxpr, consts = opened(program)
    return not consts and all(
        _is_chain(calls[0].program)
        if (calls := calls_of(x)) and calls[0].kind == "call"
        else primitive_of(x).cast in ("chain", "shape")
        for x in jaxpr.eqns
    )


def _results(arrays: Sequence[Any], halves: Sequence[bool]) -> list[Stored]:
    return [Stored(x, is_half) for x, is_half in zip(arrays, halves, strict=True)]


def _like(held: Sequence[Stored], arrays: Sequence[Any]) -> list[Stored]:
    """Other arrays, in the same forms as the values that are held."""
    return [x.like(array) for x, array in zip(held, arrays, strict=True)]


def _anew(held: Sequence[Stored]) -> list[Stored]:
    """The same arrays, without the casts that were made outside of a body."""
    return _like(held, [x.array for x in held])


def _type_of(held: Stored) -> Any:
    """An operand with which a program as written is traced."""
    return with_dtype(held.array, jnp.float32) if held.is_half else held.array


def _no_tangent(value: Any) -> Any:
    return np.zeros(np.shape(value), jax.dtypes.float0)


def _instantiated(cotangent: Any) -> Any:
    """The array that a cotangent stands for."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)
