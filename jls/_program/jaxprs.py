# SPDX-License-Identifier: Apache-2.0
"""The parts of a jaxpr, under the names of every version of JAX that jls supports.

All private and undocumented parts of JAX that jls reads are read here, by `_part` and
`parameter`. What a version of JAX does not have makes the answer poorer: a line is not
known, a call is one operation that nothing is known of.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.export import is_symbolic_dim
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, primitives
from jax.extend.core import Literal as Number
from jax.extend.core.primitives import jit_p

Program = Jaxpr | ClosedJaxpr

# The parameters that hold the one program of a call.
_PROGRAM = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "fwd_jaxpr")


def _part(node: Any, name: str, default: Any = None) -> Any:
    """An attribute of one of JAX's objects, where it has one of this name."""
    return getattr(node, name, default)


def compiler_options(fun: Any) -> dict[str, Any]:
    """The options with which a jitted function is compiled."""
    return dict(_part(_part(fun, "_jit_info"), "compiler_options_kvs", None) or ())


def parameters(equation: Any) -> dict[str, Any]:
    """The parameters of an equation."""
    return equation.params


def parameter(equation: Any, name: str, default: Any = None) -> Any:
    """A parameter of an equation, where it has one of this name."""
    return parameters(equation).get(name, default)


class Opened(NamedTuple):
    """A jaxpr, and the values of its constants."""

    jaxpr: Any
    consts: Sequence[Any]


def opened(program: Program) -> Opened:
    """A closed or an open jaxpr, taken apart."""
    return Opened(getattr(program, "jaxpr", program), getattr(program, "consts", ()))


def is_program(value: Any) -> bool:
    """Whether `value` is a jaxpr, closed or open."""
    return hasattr(value, "eqns")


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the program, not a variable."""
    return isinstance(atom, Number)


def variable_of(value: Any) -> Any:
    """The variable that stands for a tracer in the program that it was traced into."""
    return _part(value, "val") if isinstance(value, Tracer) else None


def trace_of(value: Any) -> Any:
    """The trace of a tracer, which may be used until that ends."""
    return _part(value, "_trace")


def variables_in(atoms: Sequence[Any]) -> list[Any]:
    """The operands that are variables, not numbers in the program."""
    return [atom for atom in atoms if not isinstance(atom, Number)]


def substituted(atoms: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """The operands, with `values` in the place of variables that have one."""
    return [x if isinstance(x, Number) else values.get(x, x) for x in atoms]


def is_inexact_atom(atom: Any) -> bool:
    """Whether a variable, a literal or an aval is real or complex floating point."""
    aval = getattr(atom, "aval", atom)
    dtype = getattr(aval, "dtype", None)
    if _part(aval, "inner_aval") is not None:  # a reference, as of jax.new_ref
        return False
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return jnp.issubdtype(dtype, jnp.inexact)


def is_float32(atom: Any) -> bool:
    """Whether a variable, a literal or an aval is float32."""
    return getattr(getattr(atom, "aval", atom), "dtype", None) == jnp.float32


# Three ways to be narrow. Half: few bits, for memory and precision. Narrow: large
# numbers overflow, as in float16 and not in bfloat16. Narrower: small numbers vanish.


def is_narrow_atom(atom: Any) -> bool:
    """Whether it is floating point with a smaller range than float32."""
    if not is_inexact_atom(atom):
        return False
    dtype = getattr(atom, "aval", atom).dtype
    return float(jnp.finfo(dtype).max) < float(jnp.finfo(jnp.bfloat16).max)


def is_half_atom(atom: Any) -> bool:
    """Whether it is floating point with fewer bits than float32."""
    if not is_inexact_atom(atom):
        return False
    return jnp.finfo(getattr(atom, "aval", atom).dtype).bits < 32


def is_narrower(new: Any, old: Any) -> bool:
    """Whether small numbers vanish in a dtype that are in the range of another."""
    return jnp.finfo(new).minexp > jnp.finfo(old).minexp


@functools.cache
def is_exact_cast(old: Any, new: Any) -> bool:
    """Whether a cast keeps every number."""
    if old == new:
        return True
    if jnp.issubdtype(old, jax.dtypes.extended) or jnp.issubdtype(
        new, jax.dtypes.extended
    ):
        return False
    if jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating):
        a, b = jnp.finfo(old), jnp.finfo(new)
        return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp
    if jnp.issubdtype(old, jnp.integer) and jnp.issubdtype(new, jnp.integer):
        a, b = jnp.iinfo(old), jnp.iinfo(new)
        return int(a.min) >= int(b.min) and int(a.max) <= int(b.max)
    return False


def programs_in(equation: Any) -> list[Any]:
    """All programs that an equation holds, however its parameters nest them."""
    of_hi = [] if _hi_of(equation) is None else [called_program(equation)]
    values = [*parameters(equation).values(), *of_hi]
    return list(filter(is_program, jax.tree.leaves(values, is_leaf=is_program)))


def called_program(equation: Any) -> Program | None:
    """The program of an equation that is a call, of its operands and no more."""
    hi = _hi_of(equation)
    programs = (parameter(equation, name) for name in _PROGRAM)
    program = next(filter(is_program, programs), None)
    if hi is not None:
        program = _part(_part(hi, "traced", hi), "jaxpr")
    if _fits(equation, program):
        return program
    return None if hi is None else _expanded(equation, hi)


def _fits(equation: Any, program: Any) -> bool:
    if not is_program(program):
        return False
    inner = opened(program).jaxpr
    fits = len(inner.invars) == len(equation.invars)
    return fits and len(inner.outvars) == len(equation.outvars)


# Since jax 0.12 there are calls of objects, hi primitives, that hold what they compute
# and the rules for their derivatives. With the flags jax_custom_jvp3, jax_custom_vjp3
# and jax_remat3 all custom derivatives and checkpoints are such calls.

Rule = Literal["", "jvp", "vjp", "remat"]

_RULES: dict[str, Rule] = {
    "custom_jvp_call": "jvp",
    "custom_vjp_call": "vjp",
    "remat2": "remat",
    "RematTraced": "remat",  # the classes of hi primitives
    "OptRemat": "",  # the forward pass of a rule
    "CheckpointName": "",
    "CheckpointNameFwd": "",
}
_NAMES = ("CheckpointName", "CheckpointNameFwd")
_EXPANDED: dict[int, Program | None] = {}  # by the id of a hi primitive


def _hi_of(equation: Any) -> Any:
    if equation.primitive.name != "call_hi_primitive":
        return None
    return parameter(equation, "_prim")


def is_hi(equation: Any) -> bool:
    """Whether it is a call of a hi primitive."""
    return _hi_of(equation) is not None


def _expanded(equation: Any, hi: Any) -> Program | None:
    """The program that JAX itself puts in the place of a hi primitive."""
    if id(hi) not in _EXPANDED:
        weakref.finalize(hi, _EXPANDED.pop, id(hi), None)
        expand = _part(equation.primitive, "to_lojax")
        try:
            program = jax.make_jaxpr(lambda *x: expand(*x, **parameters(equation)))(
                *(x.aval for x in equation.invars)
            )
        except Exception:  # it is an operation of which nothing is known
            program = None
        _EXPANDED[id(hi)] = program
    program = _EXPANDED[id(hi)]
    return program if _fits(equation, program) else None


def rule_of(equation: Any) -> Rule:
    """The part of a call beside its program: a rule for its derivative.

    "remat" if the derivative computes the program again.
    """
    hi = _hi_of(equation)
    kind = equation.primitive.name if hi is None else type(hi).__name__
    if hi is None or kind in _RULES:
        return _RULES.get(kind, "")
    backwards = _part(_part(type(hi), "vjp_fwd"), "__name__", "")
    return "jvp" if backwards.startswith("_vjp_fwd_from_") else "vjp"


def is_checkpoint_name(equation: Any) -> bool:
    """Whether it is a `checkpoint_name`, as a hi primitive."""
    return type(_hi_of(equation)).__name__ in _NAMES


# Programs that are written, see `writer`.


def variable_like(array: Any) -> Any:
    """A new variable of the type of an array, a variable or a literal."""
    return Var(_type_of(array))


def _type_of(array: Any) -> Any:
    return getattr(array, "aval", None) or jax.typeof(array)


def is_staged() -> bool:
    """Whether what is computed here becomes a part of a program."""
    return isinstance(jnp.zeros(()), Tracer)


def run_as_call(jaxpr: Any, arguments: Sequence[Any], name: str) -> list[Any]:
    """The results of an open program.

    It is one operation, a call, of a program that is traced around it: JAX does nothing
    for each equation.

    Args:
      jaxpr: the program, without constants.
      arguments: of its variables.
      name: of the call.
    """
    if effects_of(jaxpr) or not is_staged():
        return eval_jaxpr(jaxpr, [], *arguments)
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns
    if call.primitive is not jit_p:  # within `jax.disable_jit`
        return eval_jaxpr(jaxpr, [], *arguments)
    params = dict(parameters(call))
    for key in _OF_EACH:
        if parameter(call, key) is None:
            return eval_jaxpr(jaxpr, [], *arguments)
        params[key] *= len(jaxpr.outvars if key.startswith("out") else jaxpr.invars)
    params |= {"jaxpr": ClosedJaxpr(jaxpr, []), "name": name}
    arguments = [x if isinstance(x, Array) else jnp.asarray(x) for x in arguments]
    return jit_p.bind(*arguments, **params)


_OF_EACH = (
    *("in_shardings", "in_layouts", "donated_invars"),
    *("out_shardings", "out_layouts"),
)


def jitted_inline(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` jitted, which JAX traces once, and puts into the program as it is."""
    early = _part(_part(jax, "Inline"), "JAX_EARLY", True)  # since jax 0.12
    return jax.jit(fun, inline=early)


def scan_counts(equation: Any) -> tuple[int, int] | None:
    """The numbers of constants and of carried values among a scan's operands."""
    counts = parameter(equation, "num_consts"), parameter(equation, "num_carry")
    if None not in counts:
        return counts
    unpack = _part(parameter(equation, "ft_in"), "unpack")  # since jax 0.12
    if unpack is None:
        return None
    consts, carry, _ = unpack()
    return len(consts), len(carry)


def manual_axes(equation: Any) -> frozenset[str] | None:
    """The mesh axes over which a `shard_map` divides its operands."""
    old = parameter(equation, "manual_axes")
    found = parameter(equation, "newly_manual_axes", old)  # since jax 0.10
    return None if found is None else frozenset(found)


# The lines and scopes of an equation.


class Line(NamedTuple):
    """A line of a traceback."""

    file: str
    line: int
    function: str  # such as "fun.<locals>.<lambda>"


def name_stack(equation: Any) -> Any:
    """The scopes around an equation."""
    return _part(_part(equation, "source_info"), "name_stack", "")


class Name(NamedTuple):
    """A scope around an equation, or a transformation of JAX, such as "jvp"."""

    text: str
    is_transform: bool = False


def names_around(equation: Any) -> tuple[Name, ...]:
    """The names around an equation, outermost first."""
    return _names_in(name_stack(equation))


@functools.lru_cache(4096)
def _names_in(stack: Any) -> tuple[Name, ...]:
    parts = _part(stack, "stack", ())
    names = [_part(x, "name") for x in parts]
    if None in names:
        return ()
    pairs = zip(names, parts, strict=True)
    return tuple(Name(name, type(x).__name__ == "Transform") for name, x in pairs)


def effects_of(node: Any) -> Collection[Any]:
    """The effects of an equation or a program, such as printing."""
    return _part(node, "effects", ())


def has_side_effects(equation: Any) -> bool:
    """Whether it matters how often an equation runs. A `psum` only names an axis."""
    names = {type(effect).__name__ for effect in effects_of(equation)}
    return bool(names - {"NamedAxisEffect"})


def lines_of(equation: Any) -> list[Line]:
    """The traceback of an equation, innermost first."""
    return [
        Line(
            _part(x, "file_name", ""),
            _part(x, "line_num", 0),
            _part(x, "function_name", ""),
        )
        for x in _part(traceback_of(equation), "frames", ())
    ]


def jitted_function(equation: Any) -> tuple[str, str]:
    """File and name of the function that a `jit` is of; "" if they are not known.

    Functions with custom derivatives that are hi primitives are jitted too.
    """
    is_jit = equation.primitive.name == "jit" or is_hi(equation)
    program = called_program(equation) if is_jit else None
    # JAX puts its own code in the place of a hi primitive: no function of the user's.
    if program is None or program is _EXPANDED.get(id(_hi_of(equation))):
        return "", ""
    info = _part(opened(program).jaxpr, "debug_info")
    where = str(_part(info, "func_src_info", ""))  # "where at /.../jax/numpy.py:1"
    name, _, line = where.rpartition(" at ")
    return line.rpartition(":")[0], name


def is_argument_of_jit(tracer: Any) -> bool:
    """Whether a jit traces it: not grad, vmap, scan or shard_map."""
    info = _part(_part(_part(tracer, "_trace"), "frame"), "debug_info")
    return _part(info, "traced_for", "") == "jit"


# Sizes.

_SYMBOL = 1000  # any number above 1: a symbol is a size that is not known yet


def size_of(shape: Iterable[Any]) -> int:
    """How many elements an array has. A symbol in its shape counts as 1000."""
    return math.prod(map(_as_number, shape))


def _as_number(dimension: Any) -> int:
    if not is_symbolic_dim(dimension):
        return dimension
    symbols, evaluate = _part(dimension, "_get_vars"), _part(dimension, "_evaluate")
    if symbols is None or evaluate is None:
        return _SYMBOL
    return evaluate(dict.fromkeys(symbols(), _SYMBOL))


# Inside of `shard_map`.


def varying_axes(array: Any) -> frozenset[str]:
    """The axes of `shard_map` over which `array` differs, where JAX keeps track.

    Args:
      array: an array, a variable, a literal or an aval.
    """
    kind = array if isinstance(array, ShapedArray) else _type_of(array)
    since_0_12 = _part(_part(kind, "mat"), "varying")
    return _part(kind, "vma", frozenset()) if since_0_12 is None else since_0_12


def to_varying(array: Array, axes: frozenset[str]) -> Array:
    """`array`, as one that may differ over all of these axes."""
    missing = tuple(sorted(axes - varying_axes(array))) if axes else ()
    if not missing:
        return array
    if hasattr(lax, "pcast"):
        return lax.pcast(array, missing, to="varying")
    return lax.pvary(array, missing)  # pyright: ignore  # before jax 0.9


@contextlib.contextmanager
def traced_as(equation: Any) -> Iterator[None]:
    """Names, lines and settings of an equation, for what is traced in its place."""
    settings = _part(_part(equation, "ctx"), "manager") or contextlib.nullcontext()
    with traced_at(traceback_of(equation), name_stack(equation)), settings:
        yield


def traced_at(traceback: Any, names: Any) -> Any:
    """Lines, and names of scopes, for what is traced there."""
    context = _part(source_info_util, "user_context")
    around = _part(source_info_util, "current_name_stack")
    if context is None:
        return contextlib.nullcontext()
    if around is None or isinstance(names, str):
        return context(traceback)
    return context(traceback, name_stack=around() + names)


def traceback_of(equation: Any) -> Any:
    """Where the user's program computes it; equal for equal calls of one line."""
    return _part(_part(equation, "source_info"), "traceback")


def inlined(equation: Any, caller: Any, *, has_line: bool, is_rule: bool) -> Any:
    """An equation of a program that is run in the place of a call of it.

    Args:
      equation: of the program.
      caller: the call.
      has_line: whether it keeps its own traceback, or gets that of the call.
      is_rule: whether it is run inside of the scopes of the call.
    """
    names = name_stack(caller)
    return _with_source(
        equation,
        traceback=traceback_of(equation if has_line else caller),
        name_stack=names[:0] if is_rule else names + name_stack(equation),
    )


def in_scope(equation: Any, name: str) -> Any:
    """An equation with one more scope around all of its own."""
    scope, names = _part(source_info_util, "new_name_stack"), name_stack(equation)
    if scope is None or isinstance(names, str):
        return equation
    return _with_source(equation, name_stack=scope(name) + names)


def _with_source(equation: Any, **parts: Any) -> Any:
    """An equation with another line or other scopes, as far as they are known."""
    replace = _part(_part(equation, "source_info"), "replace")
    if replace is None:
        return equation
    known = {x: y for x, y in parts.items() if not isinstance(y, str | None)}
    return equation.replace(source_info=replace(**known))


class Operation(NamedTuple):
    """The results of an equation, wherever it stands, with the settings of JAX there.

    Equal ones compute the same.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    results: int  # how many it has

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        hi = dict(self.params).get("_prim")
        if type(hi).__name__ in _NAMES:  # it holds the type of its operand
            return [checkpoint_name(operands[0], _part(hi, "name"))]
        prepare = _part(self.primitive, "get_bind_params")
        if prepare is None:
            return self._evaluated(operands)
        made = prepare(dict(self.params))
        # Before jax 0.10 a pair, with functions among the operands.
        functions, made = made if isinstance(made, tuple) else ((), made)
        results = self.primitive.bind(*functions, *operands, **made)
        return list(results) if self.primitive.multiple_results else [results]

    def _evaluated(self, operands: Sequence[Any]) -> list[Any]:
        """Its results, without the settings of JAX, as a program of one equation."""
        like = jax.make_jaxpr(jnp.negative)(0.0).jaxpr
        equation = like.eqns[0].replace(
            invars=list(map(variable_like, operands)),
            outvars=[variable_like(0.0) for _ in range(self.results)],
            primitive=self.primitive,
            params=dict(self.params),
        )
        alone = like.replace(
            invars=equation.invars, outvars=equation.outvars, eqns=[equation]
        )
        return eval_jaxpr(alone, [], *operands)


def operation_of(equation: Any, **params: Any) -> Operation:
    """The results of an equation with other parameters."""
    params = {**equation.params, **params}
    count = len(equation.outvars)
    return Operation(equation.primitive, tuple(params.items()), count)


def bind(equation: Any, operands: Sequence[Any], **params: Any) -> list[Any]:
    """The results of an equation with other operands, and with other parameters."""
    with traced_as(equation):
        return operation_of(equation, **params).bind(operands)


def bind_remat(
    equation: Any, fun: Callable[..., Any], operands: Sequence[Any]
) -> list[Any]:
    """The results of a checkpoint, of another function of its operands."""
    hi = _hi_of(equation)
    if hi is not None:
        policy, prevent_cse = _part(hi, "policy"), _part(hi, "prevent_cse", True)
        return jax.checkpoint(fun, policy=policy, prevent_cse=prevent_cse)(*operands)
    body, consts = opened(jax.make_jaxpr(fun)(*operands))
    if consts:  # they become operands, which the body of a checkpoint has nothing but
        operands = [*consts, *operands]
        run = functools.partial(eval_jaxpr, body)
        split = len(consts)
        body, _ = opened(
            jax.make_jaxpr(lambda *x: run(x[:split], *x[split:]))(*operands)
        )
    return operation_of(equation, jaxpr=body).bind(operands)


def checkpointed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, a function of arrays, which the derivative computes again from these.

    Part of what is linear, where a checkpoint of jax_remat3 has no transpose.
    """

    def run(*arrays):
        if not _part(jax.config, "jax_remat3", False):
            return jax.checkpoint(fun, prevent_cse=False)(*arrays)
        remat = _part(primitives, "remat_p")
        if remat is None:
            return fun(*arrays)
        body, shape = jax.make_jaxpr(fun, return_shape=True)(*arrays)
        jaxpr, consts = opened(body)
        assert not consts  # arrays are operands
        params = {"prevent_cse": False, "differentiated": False, "policy": None}
        results = remat.bind(*arrays, jaxpr=jaxpr, **params)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def with_dtype(array: Any, dtype: Any) -> Any:
    """The type of an array, with another dtype: to trace with."""
    kind, dtype = jax.typeof(array), jnp.dtype(dtype)
    update = _part(kind, "update")
    if update is None:
        return jax.ShapeDtypeStruct(kind.shape, dtype)
    return update(dtype=dtype, weak_type=False)


def traced_wide(fun: Callable[..., Any], arrays: Sequence[Any]) -> Program:
    """The program of a function whose products ask for no precision by default."""
    with jax.default_matmul_precision(None), jax.disable_jit(False):
        return jax.make_jaxpr(fun)(*arrays)
