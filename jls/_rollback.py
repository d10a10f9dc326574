# SPDX-License-Identifier: Apache-2.0
"""Runs the inner optimizer, and rolls its results back where the step is skipped.

    inner optimizer              inputs in a bad step      new and old are selected
    no operation observes NaN    GPU, TPU: as they are     at the end
                                 CPU: ones                 where each is computed
    one might                    ones                      at the end
    differentiated               ones                      at the end
    not traced                   ones                      at the end

Where updates are checked, new and old are selected at the end on each platform, and
only `call` is used.

Bad gradients give results that are NaN, and so may an old state: Adam's first bias
correction divides 0 by 0. These results are thrown away. But some operations react to a
NaN before that: a loop until convergence may never end, a host callback or a foreign
function may raise, and in a derivative 0 times NaN is NaN. A program with one of them
gets ones in the place of bad inputs. On GPU and TPU any other gets its inputs as they
are: only then XLA sees that the optimizer and the check read the same gradients, and
reads them once. XLA GPU and TPU also change the moments in place by themselves, with
the selects at the end; for a CPU see `_rollback_cpu`.

Where the program sums the squares of all gradients, to clip them by their global norm,
that sum is computed first. It tells whether they are finite, and a program that is
given its inputs as they are goes on with it: the check needs no pass of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.core import Tracer

from jls._program.control import live
from jls._program.jaxprs import effects_of, opened, programs_in, run_as_call
from jls._program.primitives import primitive_of
from jls._program.squares import SumOfSquares, find_sum_of_squares
from jls._rollback_cpu import Chosen, on_cpu, select_in_place, where
from jls._scopes import GRADIENTS
from jls._tree import Remainder, Tree, combine, is_array, partition

Arrays = Sequence[Array]
Function = Callable[[Arrays], Any]


class Prepared(NamedTuple):
    """A function and its inputs; traced if the step is, else called directly."""

    fun: Function
    inputs: Arrays  # floating-point arrays
    program: "_Program | None"
    consts: Arrays  # that the function closes over
    squares: list[Array] | None  # sums of the squares of each gradient, then of all


def prepare(
    fun: Function,
    inputs: Arrays,
    is_traced: bool,
    gradients: int = 0,
    sum_of_squares: SumOfSquares | None = None,
) -> Prepared:
    """Traces `fun` if the step is traced, and sums squares where `fun` would.

    Args:
      fun: the inner optimizer as a function of `inputs`.
      inputs: floating-point arrays, the gradients first.
      is_traced: whether what decides about the step is a tracer.
      gradients: how many of the inputs are gradients.
      sum_of_squares: what `sum_of_squares_in` has found, if the step is not traced.
    """
    program, consts = None, []
    if is_traced:
        program, consts = _trace_program(fun, inputs, gradients)
        sum_of_squares = program.sum_of_squares
    squares = None
    if sum_of_squares is not None:
        with jax.named_scope(GRADIENTS):
            squares = run_as_call(sum_of_squares.jaxpr, inputs[:gradients], "squares")
    return Prepared(fun, inputs, program, consts, squares)


def sum_of_squares_in(
    fun: Function, inputs: Arrays, gradients: int
) -> SumOfSquares | None:
    """The sum of the squares of all gradients in `fun`, for a step that is not traced.

    None too if `fun` cannot be traced, since it may branch on numbers.
    """
    try:
        program, _ = _trace_program(fun, inputs, gradients)
    except Exception:  # if it is a mistake, the call itself will raise it
        return None
    return program.sum_of_squares


def roll_back_unless(
    flag: Array, is_finite: Array, prepared: Prepared, old: Tree
) -> Tree:
    """`fun(inputs)` where `flag`, else `old`: trees of one structure, shapes, dtypes.

    Leaves that are not arrays are those of `old`.

    Args:
      flag: `bool[]`.
      is_finite: `bool[]`, whether gradients and loss are; true wherever `flag` is.
      prepared: `fun` and its inputs.
      old: the tree before.
    """
    if prepared.program is None:
        new = _select(flag, _arrays(call(is_finite, prepared)), _arrays(old))
    else:
        new = _run(is_finite, prepared, prepared.program, flag, _arrays(old))
    arrays = iter(new)
    return jax.tree.map(lambda x: next(arrays) if is_array(x) else x, old)


def call(is_finite: Array, prepared: Prepared) -> Any:
    """`fun(inputs)`. If these are not finite, the result is to be rolled back."""
    program = prepared.program
    if program is None:
        return prepared.fun(_or_ones(is_finite, prepared.inputs))
    return combine(_run(is_finite, prepared, program), program.remainder)


def _run(
    is_finite: Array,
    prepared: Prepared,
    program: "_Program",
    flag: Array | None = None,
    old: Arrays = (),
) -> list[Array]:
    """The results of the program; where a `flag` is given and false, `old`.

    Bad inputs stay as they are if the program cannot observe a NaN and is not
    differentiated; else it gets ones in their place.
    """
    arrays, places = _each_once([*prepared.consts, *old])
    count = len(prepared.consts)

    def unpacked(arrays):
        arrays = [arrays[i] for i in places]
        return arrays[:count], arrays[count:]

    def on_sanitized_inputs(flag, is_finite, inputs, total, arrays):
        consts, old = unpacked(arrays)
        inputs = _or_ones(is_finite, inputs)
        new = run_as_call(program.jaxpr, [*consts, *inputs], "optimizer")
        return new if flag is None else _select(flag, new, old)

    def on_raw_inputs(flag, is_finite, inputs, total, arrays):
        consts, old = unpacked(arrays)
        inputs = [*inputs, *total]
        is_given = _is_given(is_finite)
        if flag is None:
            inputs = _or_ones(is_given, inputs)
            return run_as_call(program.after_sum, [*consts, *inputs], "optimizer")
        chosen = Chosen(is_given, inputs, _ones_like(inputs))
        return select_in_place(program.after_sum, flag, consts, chosen, old)

    run = on_sanitized_inputs
    if not program.observes_nan:
        run = _with_derivative(on_raw_inputs, like=on_sanitized_inputs)
    total = [] if prepared.squares is None else prepared.squares[-1:]
    return run(flag, is_finite, list(prepared.inputs), total, arrays)


def _each_once(arrays: Arrays) -> tuple[list[Array], list[int]]:
    """The arrays without repetitions, and for each of all the place of its own."""
    found = {id(x): x for x in arrays}
    places = {key: i for i, key in enumerate(found)}
    return list(found.values()), [places[id(x)] for x in arrays]


def _is_given(is_finite: Array) -> Array:
    """Whether a program that cannot observe NaN gets its inputs as they are.

    On a CPU it does not if they are bad. There XLA hands sums to a library, and writes
    the operand to memory for it, unless a select is in between.
    """
    return is_finite | ~on_cpu()


class _Program(NamedTuple):
    """A function, traced. Closures keep it, so it must not hold tracers."""

    jaxpr: Any  # takes what the function closes over, then its inputs
    after_sum: Any  # the same, given the sum of squares if one was found
    remainder: Remainder  # the result of the function without its arrays
    observes_nan: bool
    sum_of_squares: SumOfSquares | None


def _trace_program(
    fun: Function, inputs: Arrays, gradients: int
) -> tuple[_Program, list[Array]]:
    """The program of `fun`, and the arrays that it takes from outside."""
    remainders = []

    def arrays_of(inputs):
        arrays, remainder = partition(fun(inputs), is_array)
        remainders.append(remainder)
        return arrays

    traced = jax.make_jaxpr(arrays_of)(list(inputs))
    (remainder,) = remainders
    jaxpr = traced.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    jaxpr = jaxpr.replace(constvars=[], invars=invars)
    grads = invars[len(invars) - len(inputs) :][:gradients]
    found = find_sum_of_squares(jaxpr, grads) if grads else None
    after_sum = jaxpr
    if found is not None:
        rest = [x for x in jaxpr.eqns if found.total not in x.outvars]
        rest = jaxpr.replace(invars=[*invars, found.total], eqns=rest)
        needed = live(rest, rest.outvars)
        after_sum = rest.replace(eqns=[rest.eqns[i] for i in needed])
    program = _Program(
        jaxpr=jaxpr,
        after_sum=after_sum,
        remainder=remainder,
        observes_nan=bool(effects_of(jaxpr)) or _observes_nan(jaxpr),
        sum_of_squares=found,
    )
    return program, list(traced.consts)


def _with_derivative(
    fun: Callable[..., Any], like: Callable[..., Any]
) -> Callable[..., Any]:
    """`fun`, differentiated as if it were `like`."""
    fun = jax.custom_jvp(fun)
    fun.defjvp(lambda primals, tangents: jax.jvp(like, primals, tangents))
    return fun


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def _or_ones(is_finite: Array, inputs: Arrays) -> list[Array]:
    return _select(is_finite, inputs, _ones_like(inputs))


def _ones_like(inputs: Arrays) -> list[Array]:
    ones = {}

    def one(i, x):
        # Concrete arrays may lie on different devices: each gets ones of its own.
        kind = jax.typeof(x) if isinstance(x, Tracer) else i
        if kind not in ones:
            ones[kind] = lax.full_like(x, 1)
        return ones[kind]

    return [one(*pair) for pair in enumerate(inputs)]


def _select(flag: Array, new: Arrays, old: Arrays) -> list[Array]:
    return [where(flag, x, y) for x, y in zip(new, old, strict=True)]


def _observes_nan(program: Any) -> bool:
    """Whether any operation, at any depth, could loop or raise on NaN.

    A loop until convergence could, and what JAX computes by one on some platform (svd,
    igamma); functions of the host; foreign code; exported programs.
    """
    return any(
        not primitive_of(x).is_blind or any(map(_observes_nan, programs_in(x)))
        for x in opened(program).jaxpr.eqns
    )
