# SPDX-License-Identifier: Apache-2.0
"""`jls.fingerprint`: what each operation of a program gave, in a few numbers each.

The program is run one operation at a time, so that XLA compiles each kind of operation
once, in this program and in the next one. Loops, branches and `shard_map` are compiled
whole, with the sketches of what is inside them.
"""

import functools
import json
import linecache
import math
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jls import _validate
from jls._program.alone import AS_WRITTEN, WIDE, rounds, widened
from jls._program.control import Key, Site, calls_of
from jls._program.frames import Frame, Variable
from jls._program.jaxprs import (
    Opened,
    is_half_atom,
    is_inexact_atom,
    is_literal,
    is_staged,
    opened,
)
from jls._program.places import Place, place_of
from jls._program.primitives import primitive_of
from jls._program.records import Records
from jls._program.replay import Watched, replay
from jls._scopes import AUTOCAST, marks_of
from jls._text import describe
from jls._tools.compare.sketch import (
    FIRST,
    MERGING,
    WIDTH,
    has_numbers,
    random_bits,
    sketch_all,
)
from jls._tools.origin.case import result_name, settings, trace_call
from jls._tools.reading.arguments import items_of
from jls._tools.reading.reading import is_a_result
from jls._tools.reading.slow import logging_if_slow
from jls._tree import is_array

FORMAT = 2  # of the file

# The runs of a program: as it is; with its arguments changed in the last bit; both in
# float32 throughout, if something in it is narrower.
WRITTEN, NUDGED = "as written", "nudged"
IN_FLOAT32, NUDGED_IN_FLOAT32 = "in float32", "nudged, in float32"

# The operations of values that none gives; their modules are the names.
ARGUMENT, RESULT = "argument", "result"
CLOSED_OVER = "closed over: "  # begins the name of what is no argument


class Feed(NamedTuple):
    """A value that another one is computed from."""

    number: int
    late: tuple[int, ...] = ()  # the loops whose iteration before has made it


class Value(NamedTuple):
    """An argument, an array that is closed over, an operation, or a result."""

    place: Place
    code: str  # the line of its source
    shape: tuple[int, ...]  # of an operation: of its first result
    dtype: str
    unit: float  # of the coarsest dtype in it; 0 of integers
    loops: tuple[int, ...] = ()  # around it, outermost first
    feeds: tuple[Feed, ...] = ()

    @property
    def is_operation(self) -> bool:
        return self.place.operation not in (ARGUMENT, RESULT)


class Loop(NamedTuple):
    """A loop of a program."""

    is_while: bool
    iterations: tuple[int, ...]  # those that are kept, in the order of time

    @property
    def times(self) -> int:
        """How often it runs; of a `while` in another loop `FIRST` + 1."""
        return self.iterations[-1] + 1 if self.is_while else len(self.iterations)


class Fingerprint(NamedTuple):
    """What each operation of a program gave, for `jls.compare`.

    It holds no values, but sums of them with random signs: another machine, another
    version of JAX or another dtype makes one that can be compared.

    Example:
      >>> made = jls.fingerprint(jnp.tanh, jnp.ones(3))
      >>> [value.place.operation for value in made.values]
      ['argument', 'tanh', 'result']
    """

    values: tuple[Value, ...]  # arguments, operations in order, results
    loops: tuple[Loop, ...]
    rounded: tuple[Place, ...]  # where the user's code rounds to a narrower dtype
    # Of each run the sketches of all values, `u32[..., results, WIDTH]`, with an axis
    # for each loop, in the order of time.
    runs: dict[str, tuple[np.ndarray, ...]]
    made_by: dict[str, str]  # jls, jax, platform, device; dtype: the narrowest
    note: str = ""  # why the operations are not known

    def __repr__(self) -> str:
        operations = sum(x.is_operation for x in self.values)
        results = sum(x.place.operation == RESULT for x in self.values)
        made = " ".join(self.made_by.values())
        return f"Fingerprint({operations} operations, {results} results, {made})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise TypeError(
            "fingerprints are equal within rounding, which == does not know. Write "
            "jls.compare(a, b).equal."
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def save(self, path: str | Path) -> None:
        """Writes a file that `load` reads; `path` ends in ".npz"."""
        path, shapes, arrays = _checked(path), list[Any](), dict[str, Any]()
        for name, run in self.runs.items():
            shapes = [x.shape for x in run]  # of all runs
            flat = [np.zeros(0, np.uint32), *(x.ravel() for x in run)]
            arrays[name] = np.concatenate(flat)
        described = json.dumps([FORMAT, self._replace(runs={}), shapes])
        with path.open("wb") as file:
            text = np.frombuffer(described.encode(), np.uint8)
            np.savez_compressed(file, described=text, **arrays)

    @staticmethod
    def load(path: str | Path) -> "Fingerprint":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: if it is no such file, or of another format.
        """
        path = _checked(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            number, *described = json.loads(arrays.pop("described").tobytes())
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"path must be a file that Fingerprint.save wrote, got {str(path)!r}. "
                "Write jls.fingerprint(step, *args).save(path)."
            ) from error
        if number != FORMAT:
            raise ValueError(
                f"{str(path)!r} has a fingerprint of format {number}, and this jls "
                f"reads format {FORMAT}. Write it with this version."
            )
        made, shapes = described
        ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=int)
        runs = {
            name: tuple(map(np.reshape, np.split(flat, ends[:-1]), shapes))
            for name, flat in arrays.items()
        }
        return _typed(Fingerprint, made)._replace(runs=runs)


def _checked(path: Any) -> Path:
    if not isinstance(path, str | Path):
        raise TypeError(f"path must be a string or a Path, got {describe(path)}.")
    if Path(path).suffix != ".npz":
        raise ValueError(f'path must end in ".npz", got {str(path)!r}.')
    return Path(path)


def _typed(kind: Any, value: Any) -> Any:
    """What JSON made of a value of a type, as it was: its lists are tuples."""
    if hasattr(kind, "_fields"):
        return kind(*map(_typed, get_type_hints(kind).values(), value))
    if isinstance(value, list):
        return tuple(_typed(get_args(kind)[0], x) for x in value)
    return value


def fingerprint(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Fingerprint:
    """What each operation of `fun(*args, **kwargs)` gives, for `jls.compare`.

    To compare what is not in one process: two machines, two versions of JAX, two
    commits. `fun` is traced, and run one operation at a time: twice, once with its
    arguments changed in the last bit, to see what rounding does to each operation; if
    it has a dtype narrower than float32, once as it is and twice in float32. Nothing of
    yours is changed or donated.

    Args:
      fun: a loss, a gradient, or a whole step, jitted or not: of plain pytrees, Linen,
        NNX, Equinox or Haiku. One that is compiled ahead of time is run once, and has a
        fingerprint of its results.
      *args: its arguments. In a run of several processes, process-local arrays.
      **kwargs: its keyword arguments.

    Returns:
      A `jls.types.Fingerprint`; `save` writes it to a file.

    Raises:
      TypeError: if `fun` is not a function.
      ValueError: if an array was donated to an earlier call, or is spread over several
        processes.
      Exception: what `fun` itself raises.

    Example:
      >>> made = jls.fingerprint(jax.grad(lambda x: jnp.sum(jnp.tanh(x))), jnp.ones(3))
      >>> made.values[-1].place.module, made.values[-1].shape
      ('result', (3,))
    """
    return fingerprint_of("jls.fingerprint", "fun", fun, args, kwargs)


def fingerprint_of(
    tool: str,
    name: str,
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    runs: Sequence[str] = (),
) -> Fingerprint:
    """The fingerprint of a function.

    Args:
      tool: which is called.
      name: of the function, in messages.
      fun: the function.
      args: its arguments.
      kwargs: its keyword arguments.
      runs: which; by default all that tell something.
    """
    _validate.function(name, fun)
    if isinstance(fun, jax.stages.Compiled):
        return _of_results(fun(*args, **kwargs))
    with settings():
        return _Program(tool, fun, args, kwargs).fingerprint(runs)


def _of_results(results: Any) -> Fingerprint:
    """The fingerprint of a function of which nothing but its results is known."""
    items = [x for x in items_of(results) if is_array(x.value) and has_numbers(x.value)]
    values = [_value(RESULT, x.name, jnp.asarray(x.value)) for x in items]
    run = tuple(_rows(sketch_all([x.value])) for x in items)
    note = "One is compiled ahead of time: its operations cannot be read"
    return Fingerprint(tuple(values), (), (), {WRITTEN: run}, _made_by([]), note)


class _Program:
    """The program of a function, with its arguments."""

    def __init__(
        self, tool: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _, _, arguments, traced = trace_call(tool, fun, args, kwargs)
        self._program, self._main = opened(traced.program), Frame(traced.program)
        main, items = self._main, [arguments.items[i] for i in traced.inputs]
        self._leaves = [jnp.asarray(x.value) for x in items]
        pairs = zip(main.jaxpr.invars, items, strict=True)
        self._arguments = {x: item.name for x, item in pairs if has_numbers(x)}
        constants = {x: y for frame in main.all() for x, y in frame.consts.items()}
        self._constants = {x: y for x, y in constants.items() if has_numbers(x)}
        sites = {
            frame.indices_of(index): (frame, index)
            for frame, index in main.operations()
            if _is_recorded(frame.jaxpr.eqns[index])
        }
        self._sites = dict(sorted(sites.items()))  # in the order of the program
        outputs = filter(is_a_result, (*traced.outputs, *traced.objects))
        named = enumerate(zip(outputs, main.jaxpr.outvars, strict=True))
        self._results = [
            (i, atom, result_name(item, traced, RESULT))
            for i, (item, atom) in named
            if has_numbers(atom)
        ]
        keys = [*self._arguments, *self._constants, *self._sites]
        self._number = {key: i for i, key in enumerate(keys)}
        frames = [frame for frame in main.all() if frame.is_loop]
        self._loops = {x.site.indices: x for x in frames}
        self._loop_number = {indices: i for i, indices in enumerate(self._loops)}
        self._compiled: dict[Any, Any] = {}  # of loops

    def fingerprint(self, runs: Sequence[str]) -> Fingerprint:
        equations = [x for _, _, x in self._main.equations()]
        if not runs and any(map(rounds, equations)):
            runs = (WRITTEN, IN_FLOAT32, NUDGED_IN_FLOAT32)
        with logging_if_slow(_SLOW):
            found = {name: self._run(name) for name in runs or (WRITTEN, NUDGED)}
        atoms = (y for x in equations for y in (*x.invars, *x.outvars))
        return Fingerprint(
            values=tuple(self._values()),
            loops=found[WRITTEN][1],
            rounded=tuple(
                place_of(frame.site_of(index))
                for frame, index in self._main.operations()
                if _rounds_itself(frame, index)
            ),
            runs={name: run for name, (run, _) in found.items()},
            made_by=_made_by({str(x.aval.dtype) for x in atoms if is_half_atom(x)}),
        )

    def _run(self, name: str) -> tuple[tuple[np.ndarray, ...], tuple[Loop, ...]]:
        """The sketches of one run, and the loops."""
        is_wide = name in (IN_FLOAT32, NUDGED_IN_FLOAT32)
        leaves, consts = self._leaves, self._program.consts
        arithmetic = WIDE if is_wide else AS_WRITTEN
        if name in (NUDGED, NUDGED_IN_FLOAT32):
            leaves = list(map(_nudged, leaves))
            consts = [_nudged(_nudged_number(x)) for x in consts]
        if name == NUDGED_IN_FLOAT32:
            arithmetic = WIDE._replace(held=_nudged_number)
        program: Any = Opened(self._program.jaxpr, consts)
        with jax.disable_jit():  # loops and branches too
            results, tree = replay(
                program,
                leaves,
                self._watch,
                arithmetic=arithmetic,
                merging=MERGING,
                around=functools.partial(self._around, is_wide),
            )
        constants = zip(self._program.jaxpr.constvars, consts, strict=False)
        given = [
            *filter(has_numbers, leaves),
            *(self._constants | dict(constants)).values(),
        ]
        given, made, tree = jax.device_get(
            (
                [sketch_all([jnp.asarray(x)]) for x in given],
                [sketch_all([results[i]]) for i, *_ in self._results],
                tree,
            )
        )
        records = Records(tree)
        operations = [
            _in_time(_rows(records.at(indices)), frame)
            for indices, (frame, _) in self._sites.items()
        ]
        loops = (_loop(frame, records) for frame in self._loops.values())
        return (*map(_rows, given), *operations, *map(_rows, made)), tuple(loops)

    def _watch(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Watched:
        del inputs
        if site.indices not in self._number:
            return Watched(results)
        if any(isinstance(x, Tracer) for x in results):  # in a loop
            results = lax.optimization_barrier(tuple(results))
        atoms = site.equation.outvars
        pairs = zip(results, atoms, strict=True)
        return Watched(results, sketch_all([x for x, y in pairs if has_numbers(y)]))

    def _around(self, is_wide: bool, site: Site, run: Any) -> Any:
        """Compiles what runs on several devices once, and long loops.

        Other loops run one operation at a time, as the rest does.
        """
        (call, *_) = calls_of(site.equation)
        is_long = (call.length or 0) > _LONG
        if is_staged() or not (call.kind == "devices" or is_long):
            return run
        key = (site.indices, is_wide)
        return jax.disable_jit(False)(self._compiled.setdefault(key, jax.jit(run)))

    def _values(self) -> Iterator[Value]:
        for atom, name in self._arguments.items():
            yield _value(ARGUMENT, name, atom)
        types = [f"{x.aval.dtype}{list(x.aval.shape)}" for x in self._constants]
        for atom, name in zip(self._constants, types, strict=True):
            count = types.count(name)
            which = f" (one of {count})" if count > 1 else ""
            yield _value(ARGUMENT, f"{CLOSED_OVER}{name}{which}", atom)
        for frame, index in self._sites.values():
            equation, place = frame.jaxpr.eqns[index], place_of(frame.site_of(index))
            atoms = (*equation.invars, *equation.outvars)
            results = list(filter(has_numbers, equation.outvars))
            is_number = any(map(is_inexact_atom, results))
            yield Value(
                place=place,
                code=linecache.getline(place.file, place.line).strip(),
                shape=tuple(results[0].aval.shape),
                dtype=str(results[0].aval.dtype),
                unit=max(map(_unit, atoms)) if is_number else 0.0,
                loops=tuple(self._loop_number[x.site.indices] for x in frame.loops()),
                feeds=self._feeds_of((frame, x) for x in equation.invars),
            )
        for _, atom, name in self._results:
            yield _value(RESULT, name, atom, self._feeds_of([(self._main, atom)]))

    def _feeds_of(self, variables: Iterable[Variable]) -> tuple[Feed, ...]:
        """The values that some variables are computed from, without any between."""
        stack = [(frame, atom, frozenset[int]()) for frame, atom in variables]
        found, seen = set[Feed](), set[Any]()
        while stack:
            frame, atom, late = here = stack.pop()
            if is_literal(atom) or here in seen:
                continue
            seen.add(here)
            link, maker = frame.link(atom), frame.makers.get(atom)
            key = atom if link.way in ("argument", "constant") else None
            if maker and link.way == "operation":
                key = frame.indices_of(maker.position)
            if key in self._number:
                found.add(Feed(self._number[key], tuple(sorted(late))))
                continue
            if maker and link.way == "branch":  # and what chooses
                equation = frame.jaxpr.eqns[maker.position]
                stack.append((frame, equation.invars[0], late))
            if link.way == "carry":
                outside, after = link.sources
                loop = self._loop_number[frame.site.indices]
                stack += [(*outside, late), (*after, late | {loop})]
                continue
            stack += [(*x, late) for x in link.sources]
        return tuple(sorted(found))


def _in_time(rows: np.ndarray, frame: Frame) -> np.ndarray:
    """The sketches of an operation, by iteration in the order of time."""
    axes = (i for i, loop in enumerate(frame.loops()) if loop.is_reversed)
    return np.ascontiguousarray(np.flip(rows, tuple(axes)))


def _loop(frame: Frame, records: Records) -> Loop:
    is_while, every = frame.kind == "while", range(frame.length)
    if is_while:
        count = records.at((*frame.site.indices, Key.ITERATIONS))
        is_known = np.shape(count) == (1, 2)  # and not one for each iteration outside
        last = int(count[0, 0]) - 1 if is_known else FIRST
        return Loop(True, (*range(FIRST), last))
    return Loop(False, tuple(every[::-1] if frame.is_reversed else every))


_LONG = 1000  # iterations
_SLOW = "jls.compare is running the program one operation at a time."
# Whose result has the numbers of an operand, and no more.
_NOT_RECORDED = ("broadcast_in_dim", "reduce_precision")


def _is_recorded(equation: Any) -> bool:
    if not any(map(has_numbers, equation.outvars)):
        return False
    name = equation.primitive.name
    if name == "convert_element_type":  # to an integer, or a flag, it decides
        return not is_inexact_atom(equation.outvars[0])
    if name == "stop_gradient":  # it decides what the backward pass has
        return True
    return primitive_of(equation).moves != "same" and name not in _NOT_RECORDED


def _rounds_itself(frame: Frame, index: int) -> bool:
    """Whether the user's code rounds to a narrower dtype."""
    equation = frame.jaxpr.eqns[index]
    name = equation.primitive.name
    is_rounded = name == "reduce_precision"
    if name == "convert_element_type":
        is_rounded = _unit(equation.outvars[0]) > _unit(equation.invars[0]) > 0
    return is_rounded and AUTOCAST not in marks_of(frame.site_of(index))


def _unit(value: Any) -> float:
    """The unit of a floating-point value; of float32, if it is wider. 0 of others."""
    if is_literal(value) or not is_inexact_atom(value):
        return 0.0
    dtype = getattr(value, "aval", value).dtype
    return max(float(jnp.finfo(dtype).eps), 2.0**-23)


def _value(kind: str, name: str, given: Any, feeds: tuple[Feed, ...] = ()) -> Value:
    """An argument or a result, of this name; `given` is an array, or its variable."""
    aval = getattr(given, "aval", given)
    shape, dtype = tuple(aval.shape), str(aval.dtype)
    return Value(Place(kind, module=name), "", shape, dtype, _unit(given), feeds=feeds)


def _rows(record: Any) -> np.ndarray:
    """Sketches one after the other, apart."""
    record = np.asarray(record)
    return record.reshape(*record.shape[:-1], -1, WIDTH)


def _nudged(value: Any) -> Any:
    """Numbers, each changed by a unit of float32; whole ones as they are.

    A whole number may be a mask, a power of two or a step, and is not rounded.
    """
    if not is_inexact_atom(value):
        return value
    x = widened(jnp.asarray(value))
    return jnp.where(x == jnp.round(x), x, _nudge(x, 2.0**-23))


def _nudged_number(value: Any) -> Any:
    """A number in a program, if it is narrow in float32, changed by 1/8 of its unit.

    It may have been rounded to its dtype where the program was written, as a square
    root of the width is: `FACTOR` times this explains half a unit. Numbers of three
    bits, such as 6 or 0.5, are as they are.
    """
    if not is_half_atom(value):
        return value
    x = widened(value)
    is_short = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=2) == x
    return jnp.where(is_short, x, _nudge(x, _unit(value) / 8))


@jax.jit
def _nudge(x: Array, unit: float) -> Array:
    is_up = random_bits(x.size).reshape(x.shape) & 1 == 1
    change = jnp.where(is_up, x, -x) * jnp.asarray(unit, jnp.float32)
    return (x + change).astype(x.dtype)


def _made_by(dtypes: Any) -> dict[str, str]:
    device = jax.devices()[0]
    jls = sys.modules["jls"].__version__
    made = {"jls": jls, "jax": jax.__version__, "platform": device.platform}
    return made | {"device": device.device_kind, "dtype": ", ".join(sorted(dtypes))}
