"""What rounding products alone explains: the reference of promise 18.

A program and its gradients are traced as float32 into one program, and that is run
equation by equation. Where it comes to a float32 product, the operands are rounded to
half, multiplied and summed in float32, and the result is rounded. The backward pass is
a part of the program, so its products are rounded too. Nothing else is changed, and
nothing of `jls._autocast` is used.

It runs seven times: with nothing rounded, and for each half dtype with products rounded
to nearest, and twice to either neighbour by a hash of the number. One compiled program
does all of them, so they differ by what is rounded and by nothing else.

In float8 the operands of a product without batch dimensions are rounded after they were
brought into its range by a power of two: to e4m3fn, or to e5m2 if they are cotangents.
Other operands, and all results, are rounded to bfloat16.

A product that an autocast leaves as written is left as written here too, with its
derivative: an inner product, an outer one, one that asks for a precision.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from jls._program.jaxprs import (
    bind,
    called_program,
    is_float32,
    is_literal,
    manual_axes,
    opened,
    scan_counts,
)
from jls._program.products import PRODUCTS, asks_for_precision, is_inner, is_outer

HALVES = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
# Of the loss: the first with which the gradients are in the range of float16.
LOSS_SCALES = (1024.0, 16.0, 0.25)

# What is promised.
RESULTS, GRADIENTS, UNITS = 2.0, 4.0, 2.0

# What is not judged.
MOST = 6e4  # into or out of a product, near the end of float16
USELESS = 0.2  # the error of a reference that says nothing any more
NEAR = 3.0  # how many times the reference's error a choice has to be away


# Rounding.


class Rounding(NamedTuple):
    """How products are rounded: numbers, so that one compiled program does all."""

    is_on: Any
    seed: Any  # 0: to nearest; else to either neighbour
    unit: Any  # the distance of two neighbours at 1
    least: Any  # the distance of two neighbours at 0
    largest: Any
    is_float8: Any = np.bool_(False)


def rounding(dtype: Any, seed: int = 0) -> Rounding:
    if dtype == FLOAT8:
        return rounding("bfloat16", seed)._replace(is_float8=np.bool_(True))
    return _numbers_of(dtype)._replace(seed=np.uint32(seed))


def _numbers_of(dtype: Any) -> Rounding:
    info = jnp.finfo(dtype)
    # Below this float32 has no normal numbers to compute with.
    least = max(float(info.smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
    is_on = np.bool_(dtype != "float32")
    numbers = (np.float32(x) for x in (info.eps, least, info.max))
    return Rounding(is_on, np.uint32(0), *numbers)


WIDE = rounding("float32")
SEEDS = (0, 1, 2)
# For a second look, where something is wrong by these three: of a result of four
# numbers they may all be near by luck. Products rounded with a seed of their own are
# wrong by the first look in 4 % of random programs, by the second in 0.2 % at most.
MORE_SEEDS = range(3, 16)


def rounded(x: Any, how: Rounding) -> Any:
    """A neighbour of each number in half, in float32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = bits & jnp.uint32(0x7F80_0000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    step = jnp.maximum(power * how.unit, how.least)
    steps = x / step
    noise = (_hash(bits, how.seed) >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    near = jnp.where(how.seed == 0, jnp.round(steps), jnp.floor(steps + noise)) * step
    endless = jnp.where(x > 0, jnp.float32(np.inf), jnp.float32(-np.inf))
    near = jnp.where(jnp.abs(near) > how.largest, endless, near)
    return jnp.where(how.is_on & jnp.isfinite(x), near, x)


def in_float8(x: Any, how: Rounding, dtype: Any) -> Any:
    """A neighbour of each number in float8, in float32, by the largest magnitude."""
    how8 = _numbers_of(dtype)._replace(is_on=how.is_on, seed=how.seed)
    x = rounded(x, how)
    size = jnp.max(jnp.abs(x), initial=0.0)
    _, exponent = jnp.frexp(jnp.where(size > 0, how8.largest / size, 1.0))
    power = jnp.ldexp(jnp.float32(1), jnp.minimum(exponent - 1, 100))
    return rounded(x * power, how8) / power


def _hash(bits: Any, seed: Any) -> Any:
    """Of a number, not of its place: a number is rounded alike wherever it is used."""
    bits = (bits ^ (seed * jnp.uint32(0x9E37_79B9))) * jnp.uint32(0x7FEB_352D)
    return (bits ^ (bits >> 15)) * jnp.uint32(0x846C_A68B)


# Running a program with its products rounded.


class Seen(NamedTuple):
    """What is to be known of a run, beside its results: of each equation in order."""

    sizes: list[Any]  # the largest operand or result of a product
    margins: list[Any]  # of comparisons: how far the operands are apart
    choices: list[Any]  # other integers and booleans that were computed from floats


def _nothing() -> Seen:
    return Seen([], [], [])


def _both(one: Seen, other: Seen) -> Seen:
    return Seen(*(x + y for x, y in zip(one, other, strict=True)))


def run(program: Any, operands: Any, how: Rounding) -> tuple[list[Any], Seen]:
    """The results of a program with its products rounded.

    It runs as it is, since operations alike are compiled once for all programs. Loops
    and branches are compiled. Comparisons in `while` and `shard_map` are not seen.
    """
    jaxpr, consts = opened(program)
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    seen = _nothing()

    def read(atom):
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        results, more = _equation(equation, list(map(read, equation.invars)), how)
        values.update(zip(equation.outvars, results, strict=True))
        seen = _both(seen, more)
    return list(map(read, jaxpr.outvars)), seen


def _equation(equation: Any, operands: list[Any], how: Rounding) -> Any:
    name = equation.primitive.name
    if name in _CONTROL:
        return _compiled(_CONTROL[name], _Same(equation))(operands, how)
    if program := called_program(equation):
        return run(program, operands, how)
    if is_rounded(equation):
        return _compiled(_product, _Alike(equation))(operands, how)
    results = bind(equation, operands)
    return results, _seen_of(equation, operands, results)


class _Same(NamedTuple):
    """An equation as a key: a program that it holds is equal to itself only."""

    equation: Any

    def __hash__(self):
        return id(self.equation)

    def __eq__(self, other):
        return self.equation is other.equation


class _Alike(NamedTuple):
    """An equation as a key, equal to others of the same parameters."""

    equation: Any

    @property
    def parts(self):
        name, params = self.equation.primitive.name, self.equation.params
        params = sorted((key, str(value)) for key, value in params.items())
        return name, _is_backward(self.equation), tuple(params)

    def __hash__(self):
        return hash(self.parts)

    def __eq__(self, other):
        return self.parts == other.parts


@functools.lru_cache(maxsize=200)
def _compiled(rule: Callable[..., Any], key: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(rule, key.equation))


def is_rounded(equation: Any) -> bool:
    """Whether it is a product of float32 numbers that asks for no precision."""
    if equation.primitive.name not in PRODUCTS or asks_for_precision(equation):
        return False
    return all(map(is_float32, equation.invars[:2]))


def _product(equation: Any, operands: list[Any], how: Rounding) -> Any:
    exact = lax.Precision.HIGHEST
    one, other, *rest = operands
    # As one array: half as much to compile.
    both = jnp.concatenate([one.ravel(), other.ravel()])
    taken = jnp.split(rounded(both, how), [one.size])
    taken = [x.reshape(like.shape) for x, like in zip(taken, (one, other), strict=True)]
    if _can_be_float8(equation):
        # JAX puts the cotangent first.
        kind = "float8_e5m2" if _is_backward(equation) else FLOAT8
        narrow = [in_float8(one, how, kind), in_float8(other, how, FLOAT8)]
        pairs = zip(narrow, taken, strict=True)
        taken = [jnp.where(how.is_float8, x, y) for x, y in pairs]
    (given,) = bind(equation, [*taken, *rest], precision=(exact, exact))
    size = jnp.max(jnp.abs(jnp.concatenate([both, given.ravel()])), initial=0.0)
    return [rounded(given, how)], _nothing()._replace(sizes=[size])


def _can_be_float8(equation: Any) -> bool:
    numbers = equation.params.get("dimension_numbers")
    return equation.primitive.name == "dot_general" and not numbers[1][0]


def _is_backward(equation: Any) -> bool:
    return "transpose" in str(equation.source_info.name_stack)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _seen_of(equation: Any, operands: list[Any], results: list[Any]) -> Seen:
    name = equation.primitive.name
    # Bits taken from a float belong to random numbers, and choose nothing.
    if name == "bitcast_convert_type" or not any(map(_is_float, operands)):
        return _nothing()
    if name in _COMPARISONS:
        return _nothing()._replace(margins=[lax.sub(*operands)])
    if name == "sign":
        return _nothing()._replace(margins=[*operands])
    return _nothing()._replace(choices=[x for x in results if not _is_float(x)])


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _scan(equation: Any, operands: list[Any], how: Rounding) -> Any:
    params = equation.params
    consts, carried = scan_counts(equation)
    fixed, carry = operands[:consts], operands[consts : consts + carried]

    def body(carry, slices):
        results, seen = run(params["jaxpr"], [*fixed, *carry, *slices], how)
        return results[:carried], (results[carried:], seen)

    carry, (stacks, seen) = lax.scan(
        body,
        carry,
        operands[consts + carried :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *stacks], seen


def _while(equation: Any, operands: list[Any], how: Rounding) -> Any:
    params = equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    fixed = operands[first:last]

    def is_on(state):
        (result,), _ = run(params["cond_jaxpr"], [*operands[:first], *state[0]], how)
        return result

    def body(state):
        results, seen = run(params["body_jaxpr"], [*fixed, *state[0]], how)
        sizes = [jnp.max(x) for x in seen.sizes]
        return results, functools.reduce(jnp.maximum, sizes, state[1])

    results, size = lax.while_loop(is_on, body, (operands[last:], jnp.float32(0)))
    return results, _nothing()._replace(sizes=[size])


def _cond(equation: Any, operands: list[Any], how: Rounding) -> Any:
    which, *rest = operands
    branches = [
        functools.partial(lambda program, *x: run(program, x, how), program)
        for program in equation.params["branches"]
    ]
    shapes = [jax.eval_shape(branch, *rest)[1] for branch in branches]

    def padded(index, *rest):
        results, seen = branches[index](*rest)
        all_seen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        all_seen[index] = seen
        return results, functools.reduce(_both, all_seen)

    alike = [functools.partial(padded, i) for i in range(len(branches))]
    return lax.switch(lax.convert_element_type(which, jnp.int32), alike, *rest)


def _shard_map(equation: Any, operands: list[Any], how: Rounding) -> Any:
    params = equation.params
    results = jax.shard_map(
        lambda *x: run(params["jaxpr"], x, how)[0],
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=manual_axes(equation) or frozenset(),
    )(*operands)
    return results, _nothing()


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}


# A program with its gradients.


def with_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The results of `fun(params, batch)`, and the gradients of its scaled loss."""

    def scaled(params, batch, scale):
        results = fun(params, batch)
        results = results if isinstance(results, dict) else {"loss": results}
        return scale * jnp.mean(results["loss"]), results

    def both(params, batch, scale):
        grads, results = jax.grad(scaled, has_aux=True)(params, batch, scale)
        return {"result": results, "gradient": grads}

    return both


def as_written(program: Any) -> Any:
    """A program that asks for a precision where an autocast leaves products alone.

    JAX gives the precision to the derivatives too.
    """

    def edited(value):
        if hasattr(value, "eqns"):
            jaxpr, _ = opened(value)
            jaxpr = jaxpr.replace(eqns=list(map(equation, jaxpr.eqns)))
            is_closed = value.__class__ is not jaxpr.__class__
            return value.replace(jaxpr=jaxpr) if is_closed else jaxpr
        return tuple(map(edited, value)) if type(value) is tuple else value

    def equation(one):
        params = {name: edited(value) for name, value in one.params.items()}
        if is_inner(one) or is_outer(one):
            params["precision"] = (lax.Precision.HIGHEST,) * 2
        return one.replace(params=params)

    return edited(program)


def _traced(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The program of a function of trees, and the shapes of its results."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def _given_by_products(program: Any, is_given: list[bool]) -> list[bool]:
    """Which results are the numbers that a product gave, moved at most."""
    jaxpr, _ = opened(program)
    known = dict(zip(jaxpr.invars, is_given, strict=True))
    for equation in jaxpr.eqns:
        given = [not is_literal(x) and known.get(x, False) for x in equation.invars]
        name, inner = equation.primitive.name, called_program(equation)
        if is_rounded(equation):
            results = [True]
        elif name in _MOVES:
            results = [given[0]]
        elif inner is not None and name not in _CONTROL:
            results = _given_by_products(inner, given)
        else:
            results = [False] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [not is_literal(x) and known.get(x, False) for x in jaxpr.outvars]


_MOVES = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "rev", "copy")


# The verdict.


class Line(NamedTuple):
    """How one result of an autocast compares."""

    name: str
    ours: float
    reference: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.ours <= self.allowed

    def __str__(self):
        numbers = f"{self.ours:.3g} off, the reference {self.reference:.3g}"
        return f"{self.name}: {numbers}, allowed {self.allowed:.3g}"


class Truth:
    """What a program gives in float32, and how far the reference is off."""

    def __init__(self, fun: Callable[..., Any], params: Any, batch: Any) -> None:
        program, shape = _traced(fun, params, batch)
        marked, structure = as_written(program), jax.tree.structure(shape)

        def again(params, batch):
            results = eval_jaxpr(*opened(marked), *jax.tree.leaves((params, batch)))
            return jax.tree.unflatten(structure, results)

        args = params, batch, jnp.float32(1)
        self._program, shape = _traced(with_gradients(again), *args)
        self._structure = jax.tree.structure(shape)
        self._leaves = jax.tree.leaves((params, batch))
        for scale in LOSS_SCALES:
            self.scale = jnp.float32(scale)
            self.wide, self._seen = self._run(WIDE)
            if all(np.max(x) <= MOST for x in self._seen.sizes):
                break
        flags = _given_by_products(self._program, [False] * (len(self._leaves) + 1))
        paths = jax.tree.leaves_with_path(jax.tree.unflatten(self._structure, flags))
        self.given = {jax.tree_util.keystr(path) for path, is_so in paths if is_so}
        self._known: dict[Any, Any] = {}

    def named(self, results: Any) -> dict[str, np.ndarray]:
        """The floats in a tree of results by name, gradients without their scale."""
        found = {}
        for path, leaf in jax.tree.leaves_with_path(results):
            if _is_float(leaf):
                scale = float(self.scale) if path[0].key == "gradient" else 1.0
                found[jax.tree_util.keystr(path)] = np.asarray(leaf, float) / scale
        return found

    def _run(self, how: Rounding) -> tuple[dict[str, np.ndarray], Seen]:
        found, seen = run(self._program, [*self._leaves, self.scale], how)
        return self.named(jax.tree.unflatten(self._structure, found)), seen

    def runs(self, half: str, seeds: Sequence[int] = SEEDS) -> list[Any]:
        """What the reference gives, for each of the seeds."""
        for seed in seeds:
            if (half, seed) not in self._known:
                self._known[half, seed] = self._run(rounding(half, seed))
        return [self._known[half, seed] for seed in seeds]

    def errors(self, half: str, seeds: Sequence[int] = SEEDS) -> dict[str, float]:
        """How far the reference is off in each result, in the worst of some runs."""
        runs = self.runs(half, seeds)
        return {
            name: max(error(found[name], right) for found, _ in runs)
            for name, right in self.wide.items()
        }

    def why_left_out(self, half: str) -> str:
        """Why the program is not judged; "" if it is."""
        seen, errors = self._seen, self.errors(half)
        others = [other for _, other in self.runs(half)]
        if not all(np.all(np.isfinite(x)) for x in self.wide.values()):
            return "float32 is not finite"
        if half == "float16" and not all(np.max(x) <= MOST for x in seen.sizes):
            return "a product takes or gives over 6e4"
        if not all(map(math.isfinite, errors.values())):
            return "the reference is not finite"
        margins = [x.margins for x in (seen, *others)]
        if any(_is_near(*x) for x in zip(*margins, strict=True)):
            return "a choice is near"
        choices = [x.choices for x in (seen, *others)]
        if any(np.any(x[0] != y) for x in zip(*choices, strict=True) for y in x[1:]):
            return "a choice differs"
        return "the reference is off by over a fifth" * (max(errors.values()) > USELESS)

    def compare(self, found: dict[str, np.ndarray], half: str) -> list[Line]:
        """Each result beside what is allowed; a second look where one is wrong."""
        lines = self._lines(found, half, SEEDS)
        if all(line.is_right for line in lines):
            return lines
        return self._lines(found, half, (*SEEDS, *MORE_SEEDS))

    def _lines(
        self, found: dict[str, np.ndarray], half: str, seeds: Sequence[int]
    ) -> list[Line]:
        errors = self.errors(half, seeds)
        assert found.keys() == self.wide.keys()
        lines = []
        for name, right in self.wide.items():
            factor = GRADIENTS if name.startswith("['gradient']") else RESULTS
            kind = "bfloat16" if half == FLOAT8 else half
            unit = jnp.finfo(kind if name in self.given else jnp.float32).eps
            allowed = factor * errors[name] + UNITS * float(unit)
            lines.append(Line(name, error(found[name], right), errors[name], allowed))
        return lines


def error(x: np.ndarray, right: np.ndarray) -> float:
    """The largest difference over the largest magnitude."""
    if not np.all(np.isfinite(x)):
        return math.inf
    size = np.max(np.abs(right), initial=0.0)
    return float(np.max(np.abs(x - right), initial=0.0) / (size or 1.0))


def _is_near(margin: Any, *others: Any) -> bool:
    """Whether a comparison might come out otherwise for a little more rounding."""
    margin = np.asarray(margin)
    with np.errstate(invalid="ignore"):
        moved = np.max([np.abs(other - margin) for other in others], axis=0)
    moved = np.where(np.isnan(moved), 0.0, moved)
    return bool(np.any((np.abs(margin) <= NEAR * moved) & (moved > 0)))
