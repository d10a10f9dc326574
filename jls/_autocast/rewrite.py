# SPDX-License-Identifier: Apache-2.0
"""Evaluates a float32 program with its products in half, and nothing else.

Each operation is traced once, in its place. A product becomes one of `product`; any
other stays as it is. Calls, loops, branches and custom derivatives stay what they are,
and are rewritten inside.

A move and a rounding may change places, and moves of half arrays are cheaper. So what a
product takes is rounded before it is moved, if that is all that happened to it since it
was computed. The derivative goes by the move in float32.

What the derivative keeps is another question, and changes no number. XLA answers it,
where it sees the derivative too. It does not in the body of a loop, a branch or a
`shard_map`. There what is cheap is computed again: operations on the elements of an
array, and moves. The results of products, in half, and those of sums, sorts and loops
are kept. `checkpointed` does it, but where there is a `jax.checkpoint` of the user's,
which says what is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from jls._autocast.float8 import no_forward_mode, product_of, quantized
from jls._autocast.keep import Choice
from jls._autocast.pick import bind_pick, is_pick
from jls._autocast.product import Product, checkpointed, narrow, stored, wide
from jls._autocast.shared import bind_shared, call_shared
from jls._notes import heard
from jls._program.control import MAIN, Call, Site, calls_of, evaluate, live, rebuild
from jls._program.frames import Frame
from jls._program.jaxprs import (
    Program,
    bind,
    bind_remat,
    effects_of,
    in_scope,
    inlined,
    is_float32,
    is_inexact_atom,
    is_literal,
    jitted_inline,
    opened,
    operation_of,
    parameter,
    parameters,
    rule_of,
    trace_of,
    traceback_of,
    traced_as,
    variable_of,
)
from jls._program.places import function_of_jax, has_line_inside
from jls._program.primitives import primitive_of
from jls._scopes import FLOAT8


class ClosedOverError(Exception):
    """The rule of a custom_vjp needs an array that is no longer there."""


class Held:
    """A value of the program.

    Attributes:
      wide: the array as the program has it, or a number.
      is_tangent: in a rule, whether it follows from what the rule is linear in.
    """

    def __init__(
        self,
        wide: Any,
        half: Any = None,
        move: "tuple[Any, list[Held]] | None" = None,
        is_widened: bool = False,
    ) -> None:
        self.wide, self._half, self._move = wide, half, move
        self._is_widened = is_widened  # from bfloat16
        self.is_tangent = False

    def half(self, dtype: Any, is_selected: bool = False) -> Any:
        """A float32 array rounded to half, before it was moved; None if it was not.

        Args:
          dtype: the half precision.
          is_selected: whether numbers in it are selected elsewhere: see `_in_half`.
        """
        if self._half is None and self._is_widened and dtype == jnp.bfloat16:
            # XLA drops the cast and its way back.
            self._half = lax.convert_element_type(self.wide, dtype)
        if self._half is None and self._move is not None:
            equation, operands = self._move
            is_selected |= equation.primitive.name == "select_n"
            with traced_as(equation):
                given = [_in_half(x, dtype, is_selected) for x in operands]
            (self._half,) = bind_shared(equation, given)
        return self._half

    def fix(self, half: Any) -> None:
        """Says what the array is, rounded to half."""
        self._half = half


class Rewrite:
    """The evaluation of one program.

    Attributes:
      choice: which products are cast, and to which dtype.
    """

    def __init__(self, choice: Choice, precision: Any, trace: Any = None) -> None:
        self.choice, self._precision, self._own_trace = choice, precision, trace
        self._is_stored = False  # whether what is not cheap is named for `checkpointed`
        self._is_linear = False  # whether the program is of tangents
        # The arrays that the rule of a custom_vjp may close over, if there is one.
        self._closed_over: dict[Any, Any] = {}
        self._has_rules = False
        self._is_rule = False
        self._bodies: dict[Any, Any] = {}  # shared by calls that are alike
        # What is the same in each iteration of a loop, in half: by its variable.
        self._fixed: dict[Any, Any] = {}
        # By site, equations of functions that JAX jits, and of rules: with the lines of
        # their callers.
        self._inlined: dict[tuple[int, ...], Any] = {}

    def __call__(self, program: Program, operands: Sequence[Any]) -> list[Any]:
        """The results of a whole program, from arrays."""
        equations = (x for _, _, x in Frame(program).equations())
        self._has_rules = any(rule_of(x) == "vjp" for x in equations)
        widened = {*map(id, heard("widened"))}
        held = [Held(x, is_widened=id(x) in widened) for x in operands]
        return [x.wide for x in self._evaluate(program, held, MAIN)]

    def _border(
        self, program: Program, run: Callable[..., Any]
    ) -> Callable[..., list[Any]]:
        """The body of a loop, a branch or a `shard_map`: little is kept of it."""
        if self._is_linear or not _may_run_again(program):
            return run

        def named(*arrays):
            with self._storing(True):
                return run(*arrays)

        return checkpointed(named)

    @contextmanager
    def _storing(self, is_stored: bool, is_linear: bool = False) -> Iterator[None]:
        """Names what is not cheap for `checkpointed`, or does not."""
        before = self._is_stored, self._is_linear
        self._is_stored, self._is_linear = is_stored, self._is_linear or is_linear
        try:
            yield
        finally:
            self._is_stored, self._is_linear = before

    def _run(
        self, program: Program, operands: Sequence[Any], site: Site = MAIN
    ) -> list[Any]:
        """The results of a program, from arrays and numbers."""
        held = list(map(Held, operands))
        return [x.wide for x in self._evaluate(program, held, site)]

    def _evaluate(
        self,
        program: Program,
        operands: Sequence[Held],
        site: Site,
        caller: Any = None,
        is_rule: bool = False,
    ) -> list[Held]:
        """The results of a program.

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

        def remember(atoms: Sequence[Any], values: Sequence[Held]) -> None:
            for atom, held in zip(atoms, values, strict=True):
                if atom in self._fixed:
                    held.fix(self._fixed[atom])
            if self._has_rules:
                self._closed_over.update(zip(atoms, values, strict=True))

        def run(here: Site, operands: list[Held]) -> Sequence[Held]:
            equation = here.equation
            if caller is not None:
                self._inlined[here.indices] = inlined(
                    equation,
                    caller,
                    has_line=has_line_inside(equation, function),
                    is_rule=is_rule,
                )
            results = self._in_rule(here, operands)
            remember(equation.outvars, results)
            return results

        remember(jaxpr.invars, operands)
        ends = live(jaxpr, jaxpr.outvars, keep=range(len(jaxpr.eqns)))
        return evaluate(program, operands, self._constant, run, site, ends)

    def _constant(self, value: Any) -> Held:
        held = self._closed_over.get(variable_of(value))
        if held is not None:
            return Held(held.wide)
        if self._own_trace is not None and trace_of(value) is self._own_trace:
            raise ClosedOverError
        return Held(value)

    def _at(self, site: Site) -> Any:
        """The equation at a site, with the line and the scopes that it has there."""
        return self._inlined.get(site.indices, site.equation)

    def _in_rule(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        """An equation; nothing of a tangent is stored: JAX could not transpose it."""
        if not any(x.is_tangent for x in operands):
            return self._equation(site, operands)
        with self._storing(False, is_linear=True):
            results = self._equation(site, operands)
        for held in results:
            held.is_tangent = True
        return results

    def _equation(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        equation, row = self._at(site), primitive_of(site.equation)
        calls = calls_of(equation)
        if calls and _is_inlined(equation):
            caller = equation if equation.primitive.name == "jit" else None
            return self._evaluate(calls[0].program, operands, site, caller)
        if calls:
            arrays = [x.wide for x in operands]
            return list(map(Held, self._call(site, calls, arrays)))
        if row.is_product:
            return self._product(site, operands)
        if equation.primitive.name == "convert_element_type" and is_float32(
            equation.outvars[0]
        ):
            (held,) = operands
            if is_float32(equation.invars[0]):
                return operands
            if not isinstance(held.wide, Array) and not np.shape(held.wide):
                return [Held(np.float32(held.wide))]
        is_kept = self.choice.is_kept(site)
        arrays = [x.wide for x in operands]
        if is_pick(equation) and not is_kept:
            return list(map(Held, bind_pick(equation, arrays)))
        results = self._stored(equation, bind_shared(equation, arrays))
        if not is_kept and _is_move(equation):
            return [Held(x, move=(equation, operands)) for x in results]
        return list(map(Held, results))

    def _stored(self, equation: Any, results: Sequence[Any]) -> Sequence[Any]:
        """Results of an operation; the derivative keeps those that are not cheap."""
        if not self._is_stored or primitive_of(equation).is_cheap:
            return results
        with traced_as(equation):
            return list(map(stored, results))

    def _product(self, site: Site, operands: list[Held]) -> Sequence[Held]:
        equation, why_wide = self._at(site), self.choice.why_wide(site)
        half, mark = self.choice.dtype, self.choice.mark_of(site)
        equation = in_scope(equation, mark) if mark else equation
        arrays = [x.wide for x in operands]
        if why_wide is not None:
            if parameter(equation, "precision") is None:
                params = {**parameters(equation), "precision": self._precision}
                equation = equation.replace(params=params)
            results = self._stored(equation, bind_shared(equation, arrays))
            return list(map(Held, results))
        is_rounded = tuple(is_float32(x) for x in equation.invars)
        pairs = zip(operands, is_rounded, strict=True)
        halves = [x.half(half) if is_one else None for x, is_one in pairs]
        params = {}
        if parameter(equation, "preferred_element_type"):
            params["preferred_element_type"] = half
        product = Product(
            operation=operation_of(equation, **params),
            dtype=half,
            is_rounded=is_rounded,
            is_stored=self._is_stored,
            line=traceback_of(equation),
        )
        arrays = list(map(jnp.asarray, arrays))
        with traced_as(equation):
            if not self.choice.takes_float8(site):
                return [Held(*self._multiplied(product, arrays, halves))]
            given = product.rounded(arrays, halves)
            with jax.named_scope(FLOAT8):
                parts = [call_shared(quantized, [lax.stop_gradient(x)]) for x in given]
            with no_forward_mode():
                result = call_shared(
                    product_of(equation), [*given, *parts[0], *parts[1]]
                )
            return [Held(wide(stored(result)))]

    def _multiplied(self, product: Product, *operands: Any) -> list[Any]:
        if self._is_rule:
            return call_shared(Product.in_rule, operands, product)
        return call_shared(product, operands)

    # Calls.

    def _call(self, site: Site, calls: list[Call], operands: list[Any]) -> Any:
        """A user's jit, remat and custom derivatives stay calls; JAX's jits do not."""
        call, equation = calls[0], self._at(site)
        if call.kind != "call":
            return self._rebuilt(site, calls, operands)
        rule = rule_of(equation)
        if rule == "jvp":
            return self._custom_jvp(site, call, operands)
        if rule == "vjp":
            return self._custom_vjp(site, call, operands)

        def run(*arrays):
            return self._run(call.program, arrays, site)

        if rule == "remat":
            with traced_as(equation), self._storing(False):
                results = bind_remat(equation, run, operands)
            return list(map(stored, results)) if self._is_stored else results

        def made(*arrays):
            body = jax.make_jaxpr(run)(*arrays)
            return operation_of(equation, jaxpr=body).bind(arrays)

        with traced_as(equation):
            # Layers that are alike have one body, which JAX differentiates once.
            choices = self._choices(call, site)
            if choices is not None:
                key = id(call.program), operation_of(equation), choices
                made = self._bodies.setdefault(key, jitted_inline(made))
            return made(*operands)

    def _choices(self, call: Call, site: Site) -> tuple[Any, ...] | None:
        """What is chosen in a body; None if a rule in it may close over arrays."""
        found = list[Any]()
        for frame, index, equation in Frame(call.program, site=site).equations():
            if opened(frame.program).consts or rule_of(equation) == "vjp":
                return None
            here = frame.site_of(index)
            if primitive_of(equation).is_product:
                found.append((self.choice.why_wide(here), self.choice.mark_of(here)))
            elif is_pick(equation):
                found.append(self.choice.is_kept(here))
        return self._is_stored, *found

    def _rebuilt(self, site: Site, calls: list[Call], operands: list[Any]) -> Any:
        """A loop, branches or a `shard_map`."""

        def run(call: Call, arrays: Sequence[Any]) -> tuple[list[Any], None]:
            def body(*arrays):
                if self._is_stored and call.is_loop:
                    last = call.consts + call.carried
                    carry = map(stored, arrays[call.consts : last])
                    arrays = (*arrays[: call.consts], *carry, *arrays[last:])
                return self._run(call.program, arrays, call.site(site))

            if call.kind == "condition":
                return body(*arrays), None
            return self._border(call.program, body)(*arrays), None

        with traced_as(self._at(site)):
            for call in calls:
                if call.is_loop:
                    self._fixed.update(self._fixed_in(call, site, operands))
            results, _ = rebuild(self._at(site), calls, operands, run)
            return list(map(stored, results)) if self._is_stored else results

    def _fixed_in(
        self, call: Call, site: Site, operands: Sequence[Any]
    ) -> dict[Any, Any]:
        """What products in the body of a loop take of what never changes, in half.

        It is rounded once, and not in each iteration.
        """
        jaxpr, half = opened(call.program).jaxpr, self.choice.dtype
        consts = zip(jaxpr.invars, call.inputs(operands)[: call.consts], strict=False)
        known = {atom: Held(array) for atom, array in consts}
        found = dict[Any, Any]()
        for index, equation in enumerate(jaxpr.eqns):
            here = call.site(site).inside(equation, index)
            given = [
                Held(x.val) if is_literal(x) else known.get(x) for x in equation.invars
            ]
            if primitive_of(equation).is_product and self.choice.is_half(here):
                for atom, held in zip(equation.invars, given, strict=True):
                    if held is not None and is_float32(atom) and not is_literal(atom):
                        with traced_as(equation):
                            array = _in_half(held, half)
                        found[atom] = lax.stop_gradient(array)
                        held.fix(array)
                continue
            moved = [x for x in given if x is not None]
            is_fixed = len(moved) == len(given) and _is_move(equation)
            if is_fixed and not self.choice.is_kept(here):
                known[equation.outvars[0]] = Held(None, move=(equation, moved))
        return found

    # Custom derivatives. JAX gives the rule of an equation when it differentiates it.

    def _inner(self, is_stored: bool) -> "Rewrite":
        """For a program that is no part of this one, such as a rule's."""
        inner = Rewrite(self.choice.anew(), self._precision, self._own_trace)
        inner._closed_over, inner._is_linear = self._closed_over, self._is_linear
        inner._is_stored = is_stored
        inner._has_rules, inner._is_rule = self._has_rules, True
        return inner

    def _custom_jvp(self, site: Site, call: Call, operands: list[Any]) -> Any:
        """A rule is evaluated as the function is."""
        equation, atoms = self._at(site), site.equation.outvars
        caller = equation if function_of_jax(equation) else None
        if caller is not None and _is_cheap(call.program):
            return bind_shared(equation, operands)
        is_stored = self._is_stored
        moving = [i for i, x in enumerate(equation.invars) if is_inexact_atom(x)]
        moved = [x for x in atoms if is_inexact_atom(x)]

        @jax.custom_jvp
        def run(*arrays):
            held = list(map(Held, arrays))
            found = self._evaluate(call.program, held, site, caller)
            return [x.wide for x in found]

        @run.defjvp
        def rule(primals, tangents):
            def differentiated(*arrays):
                primals, given = arrays[: len(tangents)], arrays[len(tangents) :]
                whole = list(map(_no_tangent, primals))
                for i, tangent in zip(moving, given, strict=True):
                    whole[i] = tangent
                values, changes = jax.jvp(
                    lambda *x: bind(equation, x), primals, tuple(whole)
                )
                pairs = zip(changes, atoms, strict=True)
                return [*values, *(x for x, atom in pairs if is_inexact_atom(atom))]

            changes = [tangents[i] for i in moving]
            made = jax.make_jaxpr(differentiated)(*primals, *changes)
            held = [Held(x) for x in (*primals, *changes)]
            for x in held[len(primals) :]:
                x.is_tangent = True
            inner = self._inner(is_stored)
            found = inner._evaluate(made, held, site, equation, is_rule=True)
            arrays = [x.wide for x in found]
            values, changes = arrays[: len(atoms)], iter(arrays[len(atoms) :])
            return values, [
                next(changes) if atom in moved else _no_tangent(value)
                for atom, value in zip(atoms, values, strict=True)
            ]

        with traced_as(equation):
            return run(*operands)

    def _custom_vjp(self, site: Site, call: Call, operands: list[Any]) -> Any:
        """The rule takes and returns float32. Its products are in half."""
        equation, is_stored = self._at(site), self._is_stored

        def traced(fun, *trees):
            """Traces a function of trees, and returns its rewrite."""
            made, shape = jax.make_jaxpr(fun, return_shape=True)(*trees)
            inner = self._inner(is_stored)
            structure = jax.tree.structure(shape)
            for value in opened(made).consts:
                inner._constant(value)  # raises if it is no longer there

            def run(*trees):
                results = inner._run(made, jax.tree.leaves(trees), site)
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
            if is_stored:
                results, pullback = jax.tree.map(stored, (results, pullback))
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
            return run(*operands)


_MASK = 1e6  # the least number that masks, if it is selected
_LOWEST = float(jnp.finfo(jnp.float32).max) / 2


def _in_half(held: Held, dtype: Any, is_selected: bool = False) -> Any:
    """A float32 value in half; another one as it is.

    A number in the program that is a mask, and out of the range of half, is the largest
    number of its sign: one near the largest float32, or one that is selected.
    """
    half = held.half(dtype, is_selected)
    if half is not None or not is_float32(jax.typeof(held.wide)):
        return held.wide if half is None else half
    if not isinstance(held.wide, Array) and not np.shape(held.wide):
        number, largest = float(held.wide), float(jnp.finfo(dtype).max)
        least = _MASK if is_selected else _LOWEST
        if np.isfinite(number) and abs(number) > max(least, largest):
            return narrow(np.float32(np.copysign(largest, number)), dtype)
    return narrow(held.wide, dtype)


def _is_move(equation: Any) -> bool:
    """Whether it is a cheap move of float32 arrays: all that is float32 is moved."""
    row, places = primitive_of(equation), range(len(equation.invars))
    others = {*places} - {*places[row.data]}
    return (
        bool(row.moves)
        and row.is_cheap
        and len(equation.outvars) == 1
        and is_float32(equation.outvars[0])
        and not any(is_float32(equation.invars[i]) for i in others)
    )


def _is_inlined(equation: Any) -> bool:
    """Whether it is a call of a function that JAX jits, or has no reason to be one."""
    is_call = calls_of(equation)[0].kind == "call" and not rule_of(equation)
    is_jit = equation.primitive.name == "jit"
    return is_call and (not is_jit or function_of_jax(equation) is not None)


def _may_run_again(program: Program) -> bool:
    """Whether the derivative may compute a part of a program again.

    It may not if that prints, or if the user says what it keeps.
    """
    return not any(
        effects_of(x) or rule_of(x) == "remat" for _, _, x in Frame(program).equations()
    )


def _is_cheap(program: Program) -> bool:
    """Whether all of a program is cheap."""
    equations = (x for frame in Frame(program).all() for x in frame.jaxpr.eqns)
    return all(
        calls_of(x)[0].kind == "call" if calls_of(x) else primitive_of(x).is_cheap
        for x in equations
    )


def _no_tangent(value: Any) -> Any:
    return np.zeros(np.shape(value), jax.dtypes.float0)


def _instantiated(cotangent: Any) -> Any:
    """The array that a cotangent stands for."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)
