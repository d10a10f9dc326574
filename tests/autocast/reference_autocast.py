"""What an autocast means, in plain Python: the reference of promise 18.

    evaluate(fun, dtype, *args)                                 the value
    evaluate(jax.grad(as_written(fun)), dtype, *args)           and the gradient

The float32 program is traced, differentiated by JAX, and run equation by equation, with
no compiler around two of them. A product rounds its operands, adds in float32, and
rounds its result; the products of the derivative are equations as well. Every other
equation is float32, as written. NumPy rounds. Nothing of `jls._autocast` is used.

In float8 the operands of a product without batch dimensions are rounded to bfloat16,
brought into its range by a power of two, and rounded again: to e4m3fn, or to e5m2 if
they are cotangents. Other operands, and all results, are rounded to bfloat16.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from jls._program.jaxprs import bind, called_program, is_literal, opened, scan_counts

FLOAT8 = "float8_e4m3fn"
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def rounded(x: Any, dtype: Any) -> np.ndarray:
    """Each number to the nearest one of `dtype`, ties to even, in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(jnp.dtype(dtype)).astype(np.float32)


def in_float8(x: Any, kind: str) -> np.ndarray:
    """Rounded to float8, after a power of two brought the largest into its range."""
    size = np.max(np.abs(x), initial=0)
    most = float(jnp.finfo(kind).max)
    _, exponent = np.frexp(most / size if size else 1.0)
    power = np.ldexp(np.float32(1), min(exponent - 1, 100))
    return rounded(x * power, kind) / power


def _may_be_float8(equation: Any) -> bool:
    numbers = equation.params.get("dimension_numbers")
    return equation.primitive.name == "dot_general" and not numbers[1][0]


def is_rounded(equation: Any) -> bool:
    """Whether it is a product of float32 numbers that asks for no precision."""
    if equation.primitive.name not in PRODUCTS or _asks(equation):
        return False
    return all(x.aval.dtype == np.float32 for x in equation.invars[:2])


def _asks(equation: Any) -> bool:
    asked = np.ravel(equation.params.get("precision")).tolist()
    return not {*asked} <= {None, lax.Precision.DEFAULT}


def is_left(equation: Any) -> bool:
    """Whether it sums all, or nothing: an inner or an outer product."""
    if equation.primitive.name != "dot_general":
        return False
    contracted, batch = equation.params["dimension_numbers"]
    one, other = (x.aval.ndim for x in equation.invars)
    is_inner = one == other == len(contracted[0]) + len(batch[0]) and contracted[0]
    shape = equation.invars[0].aval.shape
    return bool(is_inner) or all(shape[axis] == 1 for axis in contracted[0])


def as_written(fun: Any, keep: str | None = None) -> Any:
    """`fun`, which asks for a precision where an autocast leaves a product alone.

    JAX asks for it in the derivatives too.
    """

    def edited(value, above):
        if hasattr(value, "eqns"):
            jaxpr, consts = opened(value)
            jaxpr = jaxpr.replace(eqns=[equation(one, above) for one in jaxpr.eqns])
            is_closed = value.__class__ is not jaxpr.__class__
            return value.replace(jaxpr=jaxpr, consts=consts) if is_closed else jaxpr
        return tuple(edited(x, above) for x in value) if type(value) is tuple else value

    def equation(one, above):
        scope = f"{above}/{one.source_info.name_stack}"
        params = {name: edited(value, scope) for name, value in one.params.items()}
        is_kept = keep is not None and re.search(keep, scope)
        if one.primitive.name in PRODUCTS and (is_kept or is_left(one)):
            params["precision"] = (lax.Precision.HIGHEST,) * 2
        return one.replace(params=params)

    def again(*args):
        program, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        jaxpr, consts = opened(edited(program, ""))
        results = eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return again


def evaluate(fun: Any, dtype: Any, *args: Any) -> Any:
    """The results of `fun`, each product of which is rounded to `dtype`."""
    program, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    results = Interpreter(dtype).run(program, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


class Interpreter:
    """Runs programs with their products rounded, and remembers what it saw."""

    def __init__(self, dtype: Any, noise: int | None = None) -> None:
        self._dtype = dtype
        # With a seed: a result of arithmetic may be the next number of float32.
        self._noise = None if noise is None else np.random.RandomState(noise)
        self._is_backward = False  # what runs, or a call of it
        self.sizes: list[float] = []  # the largest operand or result of each product
        self.choices: list[Any] = []  # integers and booleans computed from floats
        self.margins: list[Any] = []  # of comparisons: how far the two are apart

    def run(self, program: Any, operands: Any) -> list[Any]:
        jaxpr, consts = opened(program)
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom):
            value = atom.val if is_literal(atom) else values[atom]
            is_array = hasattr(value, "dtype") and not _is_key(value)
            return np.asarray(value, None if is_array else atom.aval.dtype)

        def of(atoms):
            return [values[x] if _is_key(x.aval) else read(x) for x in atoms]

        with np.errstate(all="ignore"):
            for equation in jaxpr.eqns:
                before = self._is_backward
                self._is_backward |= "transpose" in str(equation.source_info.name_stack)
                results = self.equation(equation, of(equation.invars))
                self._is_backward = before
                values.update(zip(equation.outvars, results, strict=True))
        return of(jaxpr.outvars)

    def equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name = equation.primitive.name
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(equation, operands)
        if name in ALONE and not any(type(x) is int for x in _axes(equation)):
            return operands
        if name == "shard_map":  # of one device
            assert equation.params["mesh"].size == 1
            return self.run(equation.params["jaxpr"], operands)
        if program := called_program(equation):
            return self.run(program, operands)
        if is_rounded(equation):
            return [self._product(equation, operands)]
        results = self.bind(equation, operands)
        self._look(equation, operands, results)
        return [self._noisy(equation, x) for x in results]

    def bind(self, equation: Any, operands: list[Any], **params: Any) -> list[Any]:
        """The results of one operation, alone: of NumPy, or of JAX."""
        name, params = equation.primitive.name, equation.params | params
        if name in NUMPY and not any(map(_is_key, operands)):
            return [NUMPY[name](*operands)]
        if name in MOVES and not any(map(_is_key, operands)):
            return [MOVES[name](params, *operands)]
        return bind(equation, operands, **params)

    def _product(self, equation: Any, operands: list[Any]) -> Any:
        half = "bfloat16" if self._dtype == FLOAT8 else self._dtype
        taken = [rounded(x, half) for x in operands[:2]]
        if self._dtype == FLOAT8 and _may_be_float8(equation):
            # JAX puts the cotangent first.
            first = "float8_e5m2" if self._is_backward else FLOAT8
            taken = list(map(in_float8, taken, (first, FLOAT8)))
        exact = (lax.Precision.HIGHEST,) * 2
        (given,) = self.bind(equation, [*taken, *operands[2:]], precision=exact)
        numbers = (*operands[:2], given)
        self.sizes.append(max(np.max(np.abs(x), initial=0) for x in numbers))
        return rounded(self._noisy(equation, given), half)

    def _scan(self, equation: Any, operands: list[Any]) -> list[Any]:
        params = equation.params
        consts, carried = scan_counts(equation)
        fixed, carry = operands[:consts], operands[consts : consts + carried]
        slices = operands[consts + carried :]
        order = range(params["length"])
        rows = []
        for i in reversed(order) if params["reverse"] else order:
            given = self.run(params["jaxpr"], [*fixed, *carry, *(x[i] for x in slices)])
            carry = given[:carried]
            rows.append(given[carried:])
        rows = rows[::-1] if params["reverse"] else rows
        avals = [x.aval for x in equation.outvars[carried:]]
        empty = [np.zeros(x.shape, x.dtype) for x in avals if not rows]
        return [*carry, *(empty or map(_stack, zip(*rows, strict=True)))]

    def _while(self, equation: Any, operands: list[Any]) -> list[Any]:
        params = equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        of_cond, of_body, state = (
            operands[:first],
            operands[first:last],
            operands[last:],
        )
        while self.run(params["cond_jaxpr"], [*of_cond, *state])[0]:
            state = self.run(params["body_jaxpr"], [*of_body, *state])
        return state

    def _cond(self, equation: Any, operands: list[Any]) -> list[Any]:
        branches = equation.params["branches"]
        which = np.clip(int(operands[0]), 0, len(branches) - 1)
        return self.run(branches[which], operands[1:])

    def _look(self, equation: Any, operands: list[Any], results: list[Any]) -> None:
        name = equation.primitive.name
        # Bits taken from a float belong to random numbers, and choose nothing.
        if name == "bitcast_convert_type" or not any(map(is_float, operands)):
            return
        if name in ("eq", "ne", "lt", "le", "gt", "ge"):
            with np.errstate(invalid="ignore"):
                self.margins.append(np.subtract(*map(np.asarray, operands)))
        self.choices += [np.asarray(x) for x in results if not is_float(x)]

    def _noisy(self, equation: Any, x: Any) -> Any:
        is_exact = EXACT.fullmatch(equation.primitive.name)
        if self._noise is None or is_exact or not is_float(x):
            return x
        units = self._noise.randint(-1, 2, np.shape(x))
        return np.asarray(x * (1 + units * 2.0**-24), x.dtype)


NUMPY: dict[str, Any] = {
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply},
    **{"div": np.divide, "neg": np.negative, "abs": np.abs, "sign": np.sign},
    **{"sqrt": np.sqrt, "square": np.square, "floor": np.floor, "ceil": np.ceil},
    **{"max": np.maximum, "min": np.minimum, "eq": np.equal, "ne": np.not_equal},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
    **{"copy": np.array, "copy_p": np.array, "stop_gradient": np.array},
}
MOVES: dict[str, Any] = {
    "reshape": lambda params, x: np.reshape(
        x if params["dimensions"] is None else np.transpose(x, params["dimensions"]),
        params["new_sizes"],
    ),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "select_n": lambda params, which, *x: np.choose(which, x),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "broadcast_in_dim": lambda params, x: _broadcast(params, x),
    "reduce_max": lambda params, x: np.max(x, tuple(params["axes"])),
    "reduce_min": lambda params, x: np.min(x, tuple(params["axes"])),
    "reduce_sum": lambda params, x: np.sum(x, tuple(params["axes"]), x.dtype),
}


def _broadcast(params: Any, x: Any) -> Any:
    shape = np.ones(len(params["shape"]), int)
    shape[[*params["broadcast_dimensions"]]] = x.shape
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _stack(rows: Any) -> Any:
    return jnp.stack(rows) if _is_key(rows[0]) else np.stack(rows)


# What one device does with a mesh.
ALONE = ("psum", "psum2", "psum_invariant", "pvary", "pbroadcast", "pcast")
# What computes no new number.
EXACT = re.compile(
    r"neg|abs|sign|max|min|select_n|select_and_gather_add|copy|copy_p|"
    r"reduce_precision|reshape|transpose|broadcast_in_dim|squeeze|expand_dims|"
    r"rev|slice|dynamic_slice|pad|dynamic_update_slice|gather|concatenate|split|"
    r"sort|top_k|cummax|cummin|stop_gradient|reduce_max|reduce_min|"
    r"reduce_window_max|reduce_window_min|clamp|iota|convert_element_type|"
    r"optimization_barrier|name|floor|ceil|round|scatter"
)


def _axes(equation: Any) -> Any:
    """Of a mesh by name, of an array by number."""
    return equation.params.get("axes", ())


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _is_key(x: Any) -> bool:
    """Whether it is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
