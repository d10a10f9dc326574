# SPDX-License-Identifier: Apache-2.0
"""Roll back what a function computes, at the place where it is computed.

A select after an optimizer has made its whole step costs memory: the new moments and
the old ones are needed at the same time, and what is computed from the new ones is
computed from values that nobody keeps. XLA copies the old ones, or computes twice.

Here the program of the optimizer is taken apart, and each value that becomes part of
its state is selected as soon as it is computed. Whatever is computed from it, such as
the update from the moments, is computed from what was selected:

    new_mu = b1 * mu + (1 - b1) * grads         mu = where(ok, b1 * mu + ..., mu)
    new_nu = ...                          ->    nu = where(ok, ..., nu)
    updates = new_mu / sqrt(new_nu)             updates = mu / sqrt(nu)

In a step that is kept, both are the same numbers. In a step that is rolled back,
nothing is left of either. The moments then change in place, in the passes of the bare
optimizer: on a CPU a wrapped AdamW moves 11 times the bytes of the parameters, the bare
one 10. With selects at the end it would be 16, and with `lax.cond` too. XLA for GPU and
TPU does the same by itself, so there the selects are at the end: on a TPU that moves a
byte less for each parameter.

What is computed from bad gradients or an old state may be NaN, as Adam's first bias
correction is. It is never kept, but some could see it: a loop until convergence, which
then might not end; a function of the host, which may raise; foreign code; and a
derivative, since 0 times NaN is NaN. So a program gets ones in the place of bad inputs
and is selected at the end, and so is anything that is differentiated. Only one without
effects, all of whose operations are listed below as blind to NaN, gets its inputs as
they are on GPU and TPU: only then XLA sees that the norm of clipping and the check read
the same gradients, and reads them once. XLA CPU hands sums to a library, and writes
what is added up to memory for it; not where there is a select.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer, eval_jaxpr

from jls._program.jaxprs import is_literal, opened, programs_in
from jls._tree import Rest, Tree, combine, is_array, partition

Arrays = Sequence[Array]


class Prepared(NamedTuple):
    """A function and its inputs; traced once, or called as it is if nothing is."""

    fun: Callable[[Arrays], Any]
    inputs: Arrays  # floating-point arrays
    program: "_Program | None"
    consts: Arrays  # what the program takes from outside

    @property
    def sums_squares(self) -> bool:
        """Whether it sums the squares of an input, as clipping by the norm does."""
        program = self.program
        return program is not None and _sums_squares(program.jaxpr, len(self.inputs))


def prepare(fun: Callable[[Arrays], Any], inputs: Arrays, is_traced: bool) -> Prepared:
    """Gets `fun` ready to be rolled back.

    Args:
      fun: what must not see `inputs` that are not finite, if they could do harm there.
      inputs: floating-point arrays.
      is_traced: whether a flag of this step is a tracer.
    """
    traced = _trace(fun, inputs) if is_traced else (None, [])
    return Prepared(fun, inputs, *traced)


def roll_back_unless(
    flag: Array, is_finite: Array, prepared: Prepared, old: Tree
) -> Tree:
    """`fun(inputs)` where `flag`, else `old`: trees of one structure, shapes, dtypes.

    Leaves that are not arrays are those of `old`.

    Args:
      flag: `bool[]`.
      is_finite: `bool[]`, whether all inputs are; true wherever `flag` is.
      prepared: `fun` and its inputs.
      old: the tree before.
    """
    arrays = iter(_rolled_back(flag, is_finite, prepared, _arrays(old)))
    return jax.tree.map(lambda x: next(arrays) if is_array(x) else x, old)


def call(is_finite: Array, prepared: Prepared) -> Any:
    """`fun(inputs)`. If these are not finite, what it returns is to be rolled back."""
    fun, inputs, program, consts = prepared
    if program is None:
        return fun(_or_ones(is_finite, inputs))

    def of_ones(is_finite, inputs, consts):
        return program.run(_or_ones(is_finite, inputs), consts)

    def as_they_are(is_finite, inputs, consts):
        return program.run(as_seen(is_finite, inputs), consts)

    run = program.safe_form(as_they_are, of_ones)
    return combine(run(is_finite, list(inputs), consts), program.rest)


def as_seen(is_finite: Array, inputs: Arrays) -> Arrays:
    """`inputs` as most functions see them: on a CPU, ones in the place of bad ones."""

    def same(is_finite, inputs):
        return inputs

    arguments = is_finite, list(inputs)
    return inputs and lax.platform_dependent(*arguments, cpu=_or_ones, default=same)


def _rolled_back(
    flag: Array, is_finite: Array, prepared: Prepared, old: Arrays
) -> Arrays:
    fun, inputs, program, consts = prepared
    if program is None:
        return _select(flag, _arrays(fun(_or_ones(is_finite, inputs))), old)

    def at_the_end_of_ones(flag, is_finite, inputs, consts, old):
        return _select(flag, program.run(_or_ones(is_finite, inputs), consts), old)

    def where_made(flag, is_finite, inputs, consts, old):
        arguments = [*consts, *as_seen(is_finite, inputs)]
        return _select_where_made(program.jaxpr, flag, arguments, old)

    run = program.safe_form(where_made, at_the_end_of_ones)
    return run(flag, is_finite, list(inputs), consts, list(old))


class _Program(NamedTuple):
    """A function, traced. A compiled step keeps it, so it must not hold tracers."""

    jaxpr: Any  # of what the function takes from outside, and of its inputs
    rest: Rest  # of what the function returns, without its arrays
    is_watchful: bool

    def run(self, inputs: Arrays, consts: Arrays) -> list[Array]:
        return eval_jaxpr(self.jaxpr, [], *consts, *inputs)

    def safe_form(
        self, form: Callable[..., Any], of_ones: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`form`; but `of_ones` if the program is watchful, and when differentiated."""
        return of_ones if self.is_watchful else _with_derivative(form, like=of_ones)


def _trace(
    fun: Callable[[Arrays], Any], inputs: Arrays
) -> tuple[_Program, list[Array]]:
    """The program of `fun`, and the arrays that it takes from outside."""
    rests = []

    def arrays_of(inputs):
        arrays, rest = partition(fun(inputs), is_array)
        rests.append(rest)
        return arrays

    traced = jax.make_jaxpr(arrays_of)(list(inputs))
    (rest,) = rests
    opened = traced.jaxpr
    invars = [*opened.constvars, *opened.invars]
    program = _Program(
        jaxpr=opened.replace(constvars=[], invars=invars),
        rest=rest,
        is_watchful=bool(opened.effects) or _might_see_nan(opened),
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
    ones = {}

    def chosen(i, x):
        # Arrays in memory may lie on different devices.
        kind = jax.typeof(x) if isinstance(x, Tracer) else i
        if kind not in ones:
            ones[kind] = lax.full_like(x, 1)
        return _where(is_finite, x, ones[kind])

    return [chosen(*pair) for pair in enumerate(inputs)]


def _select(flag: Array, new: Arrays, old: Arrays) -> list[Array]:
    return [_where(flag, x, y) for x, y in zip(new, old, strict=True)]


def _where(flag: Array, new: Any, old: Any) -> Array:
    """`jnp.where` for one flag and one dtype, which takes JAX less time to trace."""
    new = _as_array(new)  # a literal of the program may be a Python number
    return lax.select_n(flag, _as_array(old, new.dtype), new)


def _as_array(x: Any, dtype: Any = None) -> Array:
    if isinstance(x, Tracer) and dtype in (None, x.dtype):
        return x
    return jnp.asarray(x, dtype)


def _on_cpu() -> Array:
    """Whether the program is compiled for a CPU, which it knows when it is."""
    return lax.platform_dependent(
        cpu=lambda: jnp.asarray(True), default=lambda: jnp.asarray(False)
    )


def _select_where_made(
    jaxpr: Any, flag: Array, arguments: Arrays, old: Arrays
) -> list[Array]:
    """What `jaxpr` makes of `arguments` where `flag`, else `old`.

    On a CPU the program goes on with what was selected. Elsewhere it goes on with what
    it has made, so there the selects are at the end. Only what it goes on with differs:
    everything is traced once for all platforms.
    """
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    olds = {
        variable: x
        for variable, x in zip(jaxpr.outvars, old, strict=True)
        if _is_variable(variable) and variable not in values
    }
    read = {atom for equation in jaxpr.eqns for atom in _variables(equation.invars)}
    on_cpu = _on_cpu()
    selected = {}

    def run(equations):
        made = [variable for equation in equations for variable in equation.outvars]
        inputs = [atom for equation in equations for atom in equation.invars]
        inputs = [x for x in dict.fromkeys(_variables(inputs)) if x in values]
        part = jaxpr.replace(invars=inputs, outvars=made, eqns=equations)
        results = eval_jaxpr(part, [], *(values[variable] for variable in inputs))
        for variable, x in zip(made, results, strict=True):
            values[variable] = x
            if variable in olds:
                selected[variable] = kept = _where(flag, x, olds[variable])
                if variable in read:
                    values[variable] = _where(on_cpu, kept, x)

    waiting = []
    for equation in jaxpr.eqns:
        waiting.append(equation)
        if not olds.keys().isdisjoint(equation.outvars):
            run(waiting)
            waiting = []
    run(waiting)

    def result(output, x):
        if _is_variable(output) and olds.get(output) is x:
            return selected[output]
        return _where(flag, values[output] if _is_variable(output) else output.val, x)

    return [result(*pair) for pair in zip(jaxpr.outvars, old, strict=True)]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if _is_variable(atom)]


def _is_variable(atom: Any) -> bool:
    return not is_literal(atom)


# What computes the same time whatever it is given, and shows the result to nobody. All
# else might see a NaN: a loop until convergence, and what JAX computes by one on some
# platform (svd, igamma); functions of the host; foreign code; exported programs.
_BLIND = frozenset(
    """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
    conv_general_dilated convert_element_type copy copy_p cos cosh cumlogsumexp cummax
    cummin cumprod cumsum device_put digamma div dot_general dynamic_slice
    dynamic_update_slice eq eq_to erf erf_inv erfc exp exp2 expm1 fft floor full_like
    gather ge gt imag integer_pow iota is_finite le le_to lgamma log log1p log2 logistic
    lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square
    optimization_barrier or pad polynomial population_count pow real reduce_and
    reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum
    reduce_window_max reduce_window_min reduce_window_sum reduce_xor rem reshape rev
    round rsqrt scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    select_and_gather_add select_and_scatter_add select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt
    square squeeze stack stop_gradient sub tan tanh tile top_k transpose unstack xor

    iota_2x32_shape random_bits random_clone random_fold_in random_seed random_split
    random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32

    all_gather all_gather_invariant all_to_all axis_index layout_constraint pbroadcast
    pcast platform_index pmax pmin ppermute psum psum2 psum_invariant pvary
    reduce_scatter reshard sharding_constraint
    """.split()  # noqa: SIM905
)
# What is as blind as the programs in it.
_CALLS = frozenset(
    """
    checkpoint closed_call cond core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr jit pjit reduce reduce_window remat remat2 scan
    select_and_scatter shard_map
    """.split()  # noqa: SIM905
)


def _might_see_nan(program: Any) -> bool:
    """Whether a program holds, however deep, what a NaN on its way might change."""
    return not all(map(_is_blind, opened(program).jaxpr.eqns))


def _is_blind(equation: Any) -> bool:
    name = equation.primitive.name
    if name not in _CALLS:
        return name in _BLIND
    return not any(map(_might_see_nan, programs_in(equation)))


# What a square is computed with; 0 is added for the imaginary part of a real number.
_OF_SQUARES = {"square", "mul", "integer_pow", "add", "real", "imag"}
_OF_SQUARES |= {"broadcast_in_dim"}


def _sums_squares(jaxpr: Any, count: int) -> bool:
    """Whether squares of one of the last `count` inputs are summed over all axes."""
    known, squares = set(jaxpr.invars[len(jaxpr.invars) - count :]), set()
    for equation in jaxpr.eqns:
        read = set(_variables(equation.invars))
        name, axes = equation.primitive.name, equation.params.get("axes")
        if name == "reduce_sum" and read <= squares:
            if len(axes) == len(equation.invars[0].aval.shape):
                return True
        elif name in _OF_SQUARES and read <= known:
            known |= set(equation.outvars)
            if name in ("square", "mul", "integer_pow") or read & squares:
                squares |= set(equation.outvars)
    return False
