# SPDX-License-Identifier: Apache-2.0
"""Random programs with inf or NaN, whose line of birth is known.

Each seed is a program in Python: expressions of `operations` in functions, and these in
calls, loops and branches up to two deep. One line, or two, is bad where `t` is 1, in
one or more iterations of the loops around it; where `t` is 0, the program is finite.

`python tests/origin/generated.py 0 500` judges the programs of these seeds, and prints
what is not right.
"""

import linecache
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from operations import (
    BACKWARD,
    CONTAINERS,
    FORWARD,
    NEVER_TAKEN,
    RULES,
    SAFE,
    SAFE_OF_TWO,
    Birth,
)

import jls

_HEAD = ["import jax", "import jax.numpy as jnp", "from jax import lax"]
_LANES = "jnp.stack([x, 0.5 * x, -x])"


class Expected(NamedTuple):
    """The birth at a line."""

    lines: frozenset[int]  # one of them; JAX may not know more
    birth: Birth
    iterations: tuple[frozenset[int], ...]  # of each loop; one of them


class Program(NamedTuple):
    """A program, in the file that its functions say they are in."""

    seed: int
    file: str
    text: str
    fun: Callable[..., Any]  # of params, x and t
    has_gradient: bool
    births: list[Expected]


def arguments(seed: int, t: float) -> tuple[Any, ...]:
    w, b, x = np.random.default_rng(seed).uniform(-1, 1, (3, 4)).astype(np.float32)
    return {"w": w, "b": b}, x, np.float32(t)


def generate(seed: int) -> Program:
    """The program of a seed."""
    writer = _Writer(seed)
    writer.write_loss()
    text = "\n".join([*_HEAD, *writer.functions]) + "\n"
    file = f"generated/program_{seed}.py"
    lines = text.splitlines(keepends=True)
    linecache.cache[file] = len(text), None, lines, file
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names)
    births = []
    for number, (birth, iterations) in enumerate(writer.births):
        mark = f"  # <- {number}\n"
        found = frozenset(i for i, line in enumerate(lines, 1) if line.endswith(mark))
        births.append(Expected(found, birth, iterations))
    fun = names["loss_fn"]
    if writer.has_gradient:
        fun = jax.value_and_grad(fun, has_aux=True)
    fun = jax.jit(fun) if writer.chance(0.3) else fun
    return Program(seed, file, text, fun, writer.has_gradient, births)


class _Around(NamedTuple):
    """What is around a function."""

    iterations: tuple[frozenset[int], ...] = ()  # of each loop, in which `t` is 1
    has_lanes: bool = False  # both branches of a `cond` may run


class _Loop(NamedTuple):
    """A loop, and where in it `t` is 1."""

    length: int
    index: int
    is_reversed: bool
    again: bool  # in each later iteration too
    around: _Around  # its body

    def is_hit(self, number: str, first: int = 0) -> str:
        """Whether the iteration with this number is one, as an expression."""
        later = "<=" if self.is_reversed else ">="
        return f"{number} {later if self.again else '=='} {self.index + first}"

    @property
    def hits(self) -> str:
        """`t` in each iteration."""
        return f"t * ({self.is_hit(f'jnp.arange({self.length})')})"

    @property
    def reverse(self) -> str:
        return ", reverse=True" if self.is_reversed else ""


class _Writer:
    """Writes the functions of a program, the inner ones first."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.functions: list[str] = []
        self.births: list[tuple[Birth, tuple[frozenset[int], ...]]] = []
        self.has_gradient = self.chance(0.5)
        self._count = 0

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def write_loss(self) -> None:
        kind = self.random.choices(["one", "two", "none"], [0.75, 0.15, 0.1])[0]
        plants = []
        for _ in range({"one": 1, "two": 2, "none": 0}[kind]):
            is_backward = self.has_gradient and kind == "one" and self.chance(0.4)
            table = BACKWARD if is_backward else FORWARD
            plants.append(self.random.choice(table))
        body = ['start = jnp.tanh(params["w"] * x + params["b"])']
        chains = plants or [None]
        for number, plant in enumerate(chains):
            body += ["x = start", *self.chain(plant), f"sum_{number} = jnp.sum(x)"]
        sums = [f"sum_{number}" for number in range(len(chains))]
        results = f"[{', '.join(sums)}]"
        body.append(f"return {' + '.join(sums)}, {results}")
        self.function("loss_fn(params, x, t)", body)

    def chain(self, plant: Birth | None) -> list[str]:
        """Statements on `x`, with the plant in one of them."""
        plants = [plant, *[None] * self.random.choice([0, 0, 1])]
        self.random.shuffle(plants)
        lines = self.safe()
        for one in plants:
            depth = self.random.choice([0, 1, 1, 2, 2, 2]) if one else 1
            lines += self.beside(self.statements(depth, one, _Around())) + self.safe()
        return lines

    def function(self, head: str, body: list[str], decorator: str = "") -> None:
        lines = ["", "", *filter(None, [decorator]), f"def {head}:"]
        self.functions += [*lines, *(f"    {line}" for line in body)]

    def name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"

    def safe(self) -> list[str]:
        """A few statements that keep `x` finite, and from -2 to 2."""
        lines = []
        for _ in range(self.random.choice([0, 1, 1, 2])):
            kind = self.random.choice(["one", "one", "two", "container", "tree"])
            one, other = self.random.choices(SAFE, k=2)
            if kind == "one":
                lines.append(f"x = {one}")
            elif kind == "two":
                lines += [f"y = {one}", f"x = {self.random.choice(SAFE_OF_TWO)}"]
            elif kind == "container":
                lines.append(f"x = {self.random.choice(CONTAINERS)}")
            else:
                lines.append(f'tree = {{"a": x, "b": (None, [{other}])}}')
                lines.append("tree = jax.tree.map(jnp.sin, tree)")
                lines.append('x = 0.5 * (tree["a"] + tree["b"][1][0])')
        return lines

    def beside(self, lines: list[str]) -> list[str]:
        """The lines, perhaps with a value beside them that is bad and never taken."""
        if self.chance(0.7):
            return lines
        value, result = self.random.choice(NEVER_TAKEN)
        return [f"z = {value}", *lines, f"x = {result}"]

    def born(self, code: str, birth: Birth, around: _Around) -> str:
        """A line with a birth."""
        self.births.append((birth, around.iterations))
        return f"{code}  # <- {len(self.births) - 1}"

    def part(self, depth: int, plant: Birth | None, around: _Around) -> str:
        """Writes a function of `x` and `t`, and returns its name."""
        lines = self.beside(self.statements(depth, plant, around))
        body = [*self.safe(), *lines, *self.safe()]
        name = self.name("part")
        self.function(f"{name}(x, t)", [*body, "return x"])
        return name

    def statements(self, depth: int, plant: Birth | None, around: _Around) -> list[str]:
        """Statements with a birth in them, `depth` calls and loops down."""
        if not depth:
            if plant is None:
                return self.safe()
            line = self.born(f"x = {plant.code}", plant, around)
            before = plant.before
            return [line] if before == "x" else [f"x = {before}", line]
        forms = [*_FORMS]
        if plant and plant.is_backward:
            forms = [x for x in forms if x not in _NOT_DIFFERENTIATED]
        if around.has_lanes:
            forms.remove(_Writer._untaken)
        return self.random.choice(forms)(self, depth - 1, plant, around)

    def loop(self, around: _Around, length: int = 0, is_forward: bool = False) -> _Loop:
        """A loop with 2 to 4 iterations, in one or more of which `t` is 1."""
        length = length or self.random.randint(2, 4)
        index = self.random.randrange(length)
        again, is_reversed = self.chance(0.4), self.chance(0.5) and not is_forward
        hit = range(index + 1) if is_reversed else range(index, length)
        hit = frozenset(hit if again else [index])
        around = around._replace(iterations=(*around.iterations, hit))
        return _Loop(length, index, is_reversed, again, around)

    # Calls.

    def _call(self, depth, plant, around):
        return [f"x = {self.part(depth, plant, around)}(x, t)"]

    def _jit(self, depth, plant, around):
        return [f"x = jax.jit({self.part(depth, plant, around)})(x, t)"]

    def _remat(self, depth, plant, around):
        return [f"x = jax.checkpoint({self.part(depth, plant, around)})(x, t)"]

    def _jit_of_tree(self, depth, plant, around):
        part, name = self.part(depth, plant, around), self.name("over")
        body = ['x, others = tree["pair"]', f'x = {part}(x, tree["t"])']
        self.function(f"{name}(tree)", [*body, 'return {"pair": (x, others)}'])
        return [
            f'tree = jax.jit({name})({{"pair": (x, [0.5 * x]), "t": t}})',
            'x = 0.5 * (tree["pair"][0] + tree["pair"][1][0])',
        ]

    def _custom_jvp(self, depth, plant, around):
        name, rule, call = self._ruled("jvp", depth, plant, around)
        body = ["x, t = primals", "d = tangents[0]", rule, f"return {name}(x, t), d"]
        head = f"{name}_jvp(primals, tangents)"
        self.function(head, body, f"@{name}.defjvp")
        return [call]

    def _custom_vjp(self, depth, plant, around):
        name, rule, call = self._ruled("vjp", depth, plant, around)
        body = [f"return {name}(x, t), (x, t)"]
        self.function(f"{name}_fwd(x, t)", body)
        body = ["x, t = saved", rule, "return d, jnp.zeros_like(t)"]
        self.function(f"{name}_bwd(saved, d)", body)
        self.functions += ["", "", f"{name}.defvjp({name}_fwd, {name}_bwd)"]
        return [call]

    def _ruled(self, kind, depth, plant, around):
        """A function with a rule of its own: its name, the line of the rule, a call."""
        name, rule = self.name("ruled"), "d = d * jnp.cos(x)"
        is_in_rule = plant is not None and plant.is_backward
        before = len(self.births)
        part = self.part(depth, None if is_in_rule else plant, around)
        self.function(f"{name}(x, t)", [f"return {part}(x, t)"], f"@jax.custom_{kind}")
        if is_in_rule:
            code = self.random.choice(RULES)
            rule = self.born(f"d = {code}", Birth(code, is_backward=True), around)
        call = f"x = {name}(x, t)"
        if self.has_gradient and len(self.births) > before:
            # JAX may give all that a derivative rule does the line of the call.
            call += f"  # <- {before}"
        return name, rule, call

    # Loops.

    def _vmap(self, depth, plant, around):
        lane = self.random.randrange(3)
        part = self.part(depth, plant, around._replace(has_lanes=True))
        hits = f"t * jax.nn.one_hot({lane}, 3)"
        return [f"x = jax.vmap({part})({_LANES}, {hits}).mean(0)"]

    def _map(self, depth, plant, around):
        loop = self.loop(around, length=3, is_forward=True)
        part = self.part(depth, plant, loop.around)
        lanes = f"({_LANES}, {loop.hits})"
        return [f"x = lax.map(lambda a: {part}(*a), {lanes}).mean(0)"]

    def _scan(self, depth, plant, around):
        loop = self.loop(around)
        part, name = self.part(depth, plant, loop.around), self.name("step")
        self.function(f"{name}(x, hit)", [f"return {part}(x, hit), None"])
        return [f"x, _ = lax.scan({name}, x, {loop.hits}{loop.reverse})"]

    def _scan_of_tree(self, depth, plant, around):
        loop = self.loop(around)
        part, name = self.part(depth, plant, loop.around), self.name("step")
        body = [
            'x, t = carry["x"], carry["t"]',
            f"x = {part}(x, jnp.where({loop.is_hit('i')}, t, 0.0))",
            'return {"x": x, "t": t}, (x, [0.5 * x])',
        ]
        self.function(f"{name}(carry, i)", body)
        scanned = f'{{"x": x, "t": t}}, jnp.arange({loop.length})'
        return [
            f"carry, (_, [stack]) = lax.scan({name}, {scanned}{loop.reverse})",
            'x = 0.5 * (carry["x"] + stack.mean(0))',
        ]

    def _stacked(self, depth, plant, around):
        loop = self.loop(around)
        part, name = self.part(depth, plant, loop.around), self.name("step")
        self.function(f"{name}(x, hit)", [f"return 0.5 * x, {part}(x, hit)"])
        return [
            f"_, stack = lax.scan({name}, x, {loop.hits}{loop.reverse})",
            "x = stack.mean(0)",
        ]

    def _fori(self, depth, plant, around):
        loop = self.loop(around, is_forward=True)
        part, first = self.part(depth, plant, loop.around), self.random.randrange(2)
        hit = f"jnp.where({loop.is_hit('i', first)}, t, 0.0)"
        ends = f"{first}, {first + loop.length}"
        return [f"x = lax.fori_loop({ends}, lambda i, x: {part}(x, {hit}), x)"]

    def _while(self, depth, plant, around):
        loop = self.loop(around, is_forward=True)
        name = self.while_loop(depth, plant, loop)
        return [f"x = {name}(x, t, {loop.length})"]

    def _batched_while(self, depth, plant, around):
        lane, lengths = self.random.randrange(3), self.random.choices(range(1, 5), k=3)
        around = around._replace(has_lanes=True)
        loop = self.loop(around, length=lengths[lane], is_forward=True)
        name = self.while_loop(depth, plant, loop)
        lanes = f"{_LANES}, t * jax.nn.one_hot({lane}, 3), jnp.array({lengths})"
        return [f"x = jax.vmap({name})({lanes}).mean(0)"]

    def while_loop(self, depth: int, plant: Birth | None, loop: _Loop) -> str:
        """Writes a loop with `n` iterations, of which no derivative is taken."""
        part, name = self.part(depth, plant, loop.around), self.name("loop")
        body = [
            "i, x, t, n = state",
            f"x = {part}(x, jnp.where({loop.is_hit('i')}, t, 0.0))",
            "return i + 1, x / (n - i).astype(x.dtype), t, n",  # bad after the end
        ]
        self.function(f"{name}_body(state)", body)
        body = [
            "state = lax.stop_gradient((0, x, t, jnp.asarray(n)))",
            f"state = lax.while_loop(lambda s: s[0] < s[3], {name}_body, state)",
            "return 0.5 * (x + lax.stop_gradient(state[1]))",
        ]
        self.function(f"{name}(x, t, n)", body)
        return name

    # Branches.

    def _cond(self, depth, plant, around):
        parts = [self.part(depth, plant, around), self.part(0, None, around)]
        sign = self.random.choice([1, -1])
        test = "jnp.sum(x) > -100.0" if sign == 1 else "jnp.sum(x) < -100.0"
        return [f"x = lax.cond({test}, {', '.join(parts[::sign])}, x, t)"]

    def _switch(self, depth, plant, around):
        parts = [self.part(0, None, around) for _ in range(3)]
        number = self.random.randrange(3)
        parts[number] = self.part(depth, plant, around)
        index = f"jnp.where(x[0] > 9.0, 0, {number})"
        return [f"x = lax.switch({index}, [{', '.join(parts)}], x, t)"]

    def _untaken(self, depth, plant, around):
        """A branch that would be bad is not taken."""
        part = self.part(depth, plant, around)
        code = self.random.choice(FORWARD).code
        never, safe = self.name("never"), self.part(0, None, around)
        self.function(f"{never}(x, t)", [f"return {code}"])
        test = "jnp.abs(jnp.sum(x) - 500.0) < 1.0"
        cond = f"x = lax.cond({test}, {never}, {safe}, x, t)"
        lines = [f"x = {part}(x, t)", cond]
        return lines if self.chance(0.5) else lines[::-1]


_FORMS = [
    _Writer._call,
    _Writer._jit,
    _Writer._remat,
    _Writer._jit_of_tree,
    _Writer._custom_jvp,
    _Writer._custom_vjp,
    _Writer._vmap,
    _Writer._map,
    _Writer._scan,
    _Writer._scan_of_tree,
    _Writer._stacked,
    _Writer._fori,
    _Writer._while,
    _Writer._batched_while,
    _Writer._cond,
    _Writer._switch,
    _Writer._untaken,
]
_NOT_DIFFERENTIATED = [_Writer._while, _Writer._batched_while]


class Verdict(NamedTuple):
    """What is true of the answer of `jls.why`."""

    word: str  # "right", "wrong", "silent", "crash" or "not judged"
    reason: str = ""
    text: str = ""  # the answer


def judge(program: Program) -> Verdict:
    """Asks `jls.why` about a program, and compares with what is known of it."""
    fun = jax.jit(program.fun)
    if not _is_finite(fun(*arguments(program.seed, 0.0))):
        return Verdict("not judged", "bad without the birth")
    bad = arguments(program.seed, 1.0)
    results = fun(*bad)
    value, sums = results[0] if program.has_gradient else results
    if program.births and program.births[0].birth.is_backward and not _is_finite(value):
        return Verdict("not judged", "the birth is not of a derivative alone")
    try:
        why = jls.why(program.fun, *bad)
        text = str(why)
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {error}")
    if _is_finite(results):
        if why == jls.types.Why():
            return Verdict("right", "the results are finite", text)
        with jax.disable_jit():
            if not _is_finite(program.fun(*bad)):
                return Verdict("not judged", "XLA makes it finite", text)
        return Verdict("wrong", "the results are finite", text)
    if not why.births:
        return Verdict("silent", "", text)
    reason = _difference(program, why.births, [not _is_finite(x) for x in sums])
    return Verdict("wrong" if reason else "right", reason, text)


def _difference(program: Program, found: Any, are_bad: list[bool]) -> str:
    """How births differ from those of a program; "" if they do not."""
    lines = {line for expected in program.births for line in expected.lines}
    is_written = any(expected.birth.is_written for expected in program.births)
    first = found[0]
    is_right = first.place.file == program.file and first.place.line in lines
    if not (is_right or (is_written and _is_nan_of_inf(first))):
        return f"line {first.place.line} is first"
    for expected, is_bad in zip(program.births, are_bad, strict=True):
        birth = expected.birth
        places = [x.place for x in found if x.place.line in expected.lines]
        if not places:
            # An inf that is written is named only if no other birth is.
            if is_bad and not birth.is_written:
                return f"line {min(expected.lines)} is not named"
            continue
        if birth.is_written and places[0].operation != "constant":
            continue  # it has made a NaN there later
        is_known = is_bad or birth.is_backward  # else a later iteration may be read
        found_in, hit = places[0].iteration, expected.iterations
        is_hit = len(found_in) == len(hit) and all(
            map(frozenset.__contains__, hit, found_in)
        )
        if is_known and not is_hit:
            return f"iteration {found_in}, not {[*map(sorted, hit)]}"
        is_known &= not birth.is_hidden
        if is_known and places[0].is_backward != birth.is_backward:
            return f"is_backward is {places[0].is_backward}"
    return ""


def _is_nan_of_inf(birth: Any) -> bool:
    return birth.kind == "nan" and any(map(math.isinf, birth.operands))


def _is_finite(tree: Any) -> bool:
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


def main() -> None:
    counts: Counter[str] = Counter()
    for seed in range(*map(int, sys.argv[1:])):
        program = generate(seed)
        verdict = judge(program)
        is_finite = verdict == ("right", "the results are finite", verdict.text)
        counts[f"{verdict.word}, finite" if is_finite else verdict.word] += 1
        if verdict.word not in ("right", "not judged"):
            print("-" * 88, program.text, sep="\n")
        if verdict.word != "right":
            print(seed, verdict.word, verdict.reason, verdict.text, flush=True)
        if seed % 20 == 19:
            jax.clear_caches()
    print(*(f"{word}: {count}" for word, count in counts.items()), sep="\n")


if __name__ == "__main__":
    main()
