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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jls import _validate
from jls._program.alone import AS_WRITTEN, WIDE, Arithmetic, rounds
from jls._program.control import Indices, Key, Site, calls_of
from jls._program.frames import Frame
from jls._program.jaxprs import (
    Opened,
    has_side_effects,
    is_half_atom,
    is_inexact_atom,
    is_literal,
    is_staged,
    opened,
    operation_of,
    traced_as,
)
from jls._program.places import Place, place_of
from jls._program.primitives import primitive_of
from jls._program.recorder import fast_compile_options
from jls._program.records import Records
from jls._program.replay import Watched, replay
from jls._scopes import AUTOCAST, marks_of
from jls._text import describe
from jls._tools.compare.sketch import (
    MERGING,
    WIDTH,
    has_numbers,
    random_bits,
    sketch_all,
)
from jls._tools.origin.case import settings, trace_call
from jls._tools.reading.arguments import items_of
from jls._tools.reading.slow import logging_if_slow
from jls._tree import is_array

FORMAT = 1  # of the file

# The runs of a program: as it is; with its arguments changed in the last bit; both in
# float32 throughout, if something in it is narrower.
WRITTEN, NUDGED, IN_FLOAT32, NUDGED_IN_FLOAT32 = "", "nudged", "wide", "wide nudged"


CLOSED_OVER = "closed over: "  # begins the name of what is no argument


class Feed(NamedTuple):
    """An operation or an argument that a value is computed from."""

    number: int  # of the operation; of argument i it is -1 - i
    late: tuple[int, ...] = ()  # the loops whose iteration before has made it


class Operation(NamedTuple):
    """An operation of a program."""

    place: Place
    code: str  # the line of its source
    indices: Indices
    shape: tuple[int, ...]  # of its first result
    dtype: str
    unit: float  # of the coarsest dtype in it; 0 of integers
    loops: tuple[int, ...]  # around it, outermost first
    feeds: tuple[Feed, ...]


class Loop(NamedTuple):
    """A loop of a program."""

    indices: Indices
    is_while: bool
    is_reversed: bool
    length: int  # 0 of a `while` that is in another loop


class Value(NamedTuple):
    """An argument, what the function closes over, or a result."""

    name: str
    shape: tuple[int, ...]
    unit: float
    feeds: tuple[Feed, ...] = ()


class Run(NamedTuple):
    """The sketches of one run, `u32[..., results, WIDTH]` each."""

    operations: list[np.ndarray]  # an axis for each loop, in the order of time
    arguments: list[np.ndarray]
    results: list[np.ndarray]


class Fingerprint(NamedTuple):
    """What each operation of a program gave, for `jls.compare`.

    It holds no values, but sums of them with random signs: another machine, another
    version of JAX or another dtype makes one that can be compared.

    Example:
      >>> made = jls.fingerprint(jnp.tanh, jnp.ones(3))
      >>> [operation.place.operation for operation in made.operations]
      ['tanh']
    """

    operations: tuple[Operation, ...]  # in the order of the program
    loops: tuple[Loop, ...]
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    rounded: tuple[Place, ...]  # where the user's code rounds to a narrower dtype
    runs: dict[str, Run]
    made_by: dict[str, str]  # jls, jax, platform, device; dtype: the narrowest
    note: str = ""  # why the operations are not known

    def __repr__(self) -> str:
        count, made = len(self.operations), " ".join(self.made_by.values())
        return f"Fingerprint({count} operations, {len(self.results)} results, {made})"

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
        path = _checked(path)
        described = self._asdict() | {"runs": list(self.runs), "format": FORMAT}
        arrays: dict[str, Any] = {
            "described": np.frombuffer(json.dumps(described).encode(), np.uint8)
        }
        for name, run in self.runs.items():
            flat = [x for part in run for x in part]
            empty = [np.zeros(0, np.uint32)]
            shapes = json.dumps([[x.shape for x in part] for part in run])
            arrays[f"shapes {name}"] = np.frombuffer(shapes.encode(), np.uint8)
            every = np.concatenate([*empty, *(x.ravel() for x in flat)])
            arrays[f"sketches {name}"] = every
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @staticmethod
    def load(path: str | Path) -> "Fingerprint":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: if it is no such file, or of another format.
        """
        path = _checked(path)
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            described = json.loads(found["described"].tobytes())
            number = described.pop("format")
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
        return _of_json(described, found)


def _checked(path: Any) -> Path:
    if not isinstance(path, str | Path):
        raise TypeError(f"path must be a string or a Path, got {describe(path)}.")
    if Path(path).suffix != ".npz":
        raise ValueError(f'path must end in ".npz", got {str(path)!r}.')
    return Path(path)


def _of_json(described: dict[str, Any], found: dict[str, np.ndarray]) -> Fingerprint:
    def feeds(rows: Any) -> tuple[Feed, ...]:
        return tuple(Feed(index, tuple(late)) for index, late in rows)

    def place(row: Any) -> Place:
        return Place(*row[:-1], iteration=tuple(row[-1]))

    def value(row: Any) -> Value:
        name, shape, unit, sources = row
        return Value(name, tuple(shape), unit, feeds(sources))

    def operation(row: Any) -> Operation:
        where, code, indices, shape, dtype, unit, loops, sources = row
        indices, shape, loops = map(tuple, (indices, shape, loops))
        fed = feeds(sources)
        return Operation(place(where), code, indices, shape, dtype, unit, loops, fed)

    def run(name: str) -> Run:
        flat, start, parts = found[f"sketches {name}"], 0, []
        for shapes in json.loads(found[f"shapes {name}"].tobytes()):
            parts.append([])
            for shape in shapes:
                end = start + math.prod(shape)
                parts[-1].append(flat[start:end].reshape(shape))
                start = end
        return Run(*parts)

    return Fingerprint(
        operations=tuple(map(operation, described["operations"])),
        loops=tuple(Loop(tuple(i), *rest) for i, *rest in described["loops"]),
        arguments=tuple(map(value, described["arguments"])),
        results=tuple(map(value, described["results"])),
        rounded=tuple(map(place, described["rounded"])),
        runs={name: run(name) for name in described["runs"]},
        made_by=described["made_by"],
        note=described["note"],
    )


def fingerprint(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Fingerprint:
    """What each operation of `fun(*args, **kwargs)` gives, for `jls.compare`.

    To compare what is not in one process: two machines, two versions of JAX, two
    commits. `fun` is traced, and run one operation at a time: twice, once with its
    arguments changed in the last bit, to see what rounding does to each operation; four
    times if it has a dtype narrower than float32, twice in float32. Nothing of yours is
    changed or donated.

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
      >>> [result.shape for result in made.results]
      [(3,)]
    """
    return program_of("jls.fingerprint", "fun", fun, args, kwargs).fingerprint()


def program_of(
    tool: str, name: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "_Traced | _Compiled":
    """A function to run, of this name in messages."""
    _validate.function(name, fun)
    if isinstance(fun, jax.stages.Compiled):
        return _Compiled(fun, args, kwargs)
    with settings():
        return _Traced(tool, fun, args, kwargs)


class _Compiled:
    """A function that is compiled ahead of time, with its arguments."""

    def __init__(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fun, self._args, self._kwargs = fun, args, kwargs

    def fingerprint(self, runs: Sequence[str] | None = None) -> Fingerprint:
        del runs
        items = items_of(self._fun(*self._args, **self._kwargs))
        items = [x for x in items if is_array(x.value) and has_numbers(x.value)]
        run = Run([], [], [_rows(sketch_all([x.value])) for x in items])
        names = [_value(x.name, jnp.asarray(x.value)) for x in items]
        note = "One is compiled ahead of time: its operations cannot be read"
        return Fingerprint((), (), (), tuple(names), (), {"": run}, _made_by([]), note)


class _Traced:
    """A function that is traced, with its arguments.

    Args:
      tool: which is called.
      fun: the function.
      args: its arguments.
      kwargs: its keyword arguments.
    """

    def __init__(
        self, tool: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _, _, arguments, traced = trace_call(tool, fun, args, kwargs)
        self._program = opened(traced.program)
        main = Frame(traced.program)
        items = [arguments.items[i] for i in traced.inputs]
        self._leaves = [jnp.asarray(x.value) for x in items]
        self._names = [x.name for x in items]
        sites = {
            frame.indices_of(index): (frame, index)
            for frame, index in main.operations()
            if _is_recorded(frame.jaxpr.eqns[index])
        }
        self._sites = dict(sorted(sites.items()))  # in the order of the program
        self._number = {indices: i for i, indices in enumerate(self._sites)}
        frames = [frame for frame in main.all() if frame.is_loop]
        self._loops = {x.site.indices: x for x in frames}
        self._loop_number = {indices: i for i, indices in enumerate(self._loops)}
        equations = [x for _, _, x in main.equations()]
        self._rounds = any(map(rounds, equations))
        self._dtypes = {
            str(x.aval.dtype)
            for equation in equations
            for x in (*equation.invars, *equation.outvars)
            if is_half_atom(x)
        }
        self._rounded = tuple(
            place_of(frame.site_of(index))
            for frame, index in main.operations()
            if _rounds_itself(frame, index)
        )
        outputs = [*traced.outputs, *traced.objects]
        named = [x for x in outputs if isinstance(x.value, _RESULTS)]
        self._results = [
            (_name(item, item in traced.objects), atom)
            for item, atom in zip(named, main.jaxpr.outvars, strict=True)
        ]
        self._main = main
        inputs = list(filter(has_numbers, main.jaxpr.invars))
        constants = {x: y for frame in main.all() for x, y in frame.consts.items()}
        self._constants = {x: y for x, y in constants.items() if has_numbers(x)}
        self._inputs = {x: i for i, x in enumerate([*inputs, *self._constants])}
        self._compiled: dict[Any, Any] = {}  # of loops

    def fingerprint(self, runs: Sequence[str] | None = None) -> Fingerprint:
        """The fingerprint of some runs; by default of all that tell something."""
        names = [WRITTEN, NUDGED]
        if self._rounds:
            names = [WRITTEN, IN_FLOAT32, NUDGED_IN_FLOAT32]
        with settings(), logging_if_slow(_SLOW):
            found = {name: self._run(name) for name in runs or names}
        lengths = found[next(iter(found))][1]
        loops = [
            Loop(indices, x.kind == "while", x.is_reversed, lengths.get(indices, 0))
            for indices, x in self._loops.items()
        ]
        results = [
            _value(name, atom, self._feeds_of([(self._main, atom)]))
            for name, atom in self._results
            if has_numbers(atom)
        ]
        pairs = zip(self._names, self._leaves, strict=True)
        arguments = [_value(name, x) for name, x in pairs if has_numbers(x)]
        return Fingerprint(
            operations=tuple(self._operations()),
            loops=tuple(loops),
            arguments=(*arguments, *_closed_over(self._constants)),
            results=tuple(results),
            rounded=self._rounded,
            runs={name: run for name, (run, _) in found.items()},
            made_by=_made_by(self._dtypes),
        )

    def _run(self, name: str) -> tuple[Run, dict[Indices, int]]:
        """One run, and the numbers of iterations of its loops."""
        is_wide, nudged = "wide" in name, "nudged" in name
        consts, leaves = self._program.consts, self._leaves
        if nudged:
            consts, leaves = (list(map(_nudged, x)) for x in (consts, leaves))
        program: Any = Opened(self._program.jaxpr, consts)
        with jax.disable_jit():  # loops and branches too
            results, tree = replay(
                program,
                leaves,
                self._watch,
                arithmetic=_quick(WIDE if is_wide else AS_WRITTEN),
                merging=MERGING,
                around=_Around(self._compiled, is_wide),
            )
        kept = [
            x
            for x, (_, atom) in zip(results, self._results, strict=True)
            if has_numbers(atom)
        ]
        constants = self._constants | dict(
            zip(self._program.jaxpr.constvars, consts, strict=False)
        )
        given = [sketch_all([x]) for x in leaves if has_numbers(x)]
        given += [sketch_all([jnp.asarray(constants[x])]) for x in self._constants]
        made = [sketch_all([x]) for x in kept]
        tree, given, made = jax.device_get((tree, given, made))
        operations, records = [], Records(tree)
        for indices, (frame, _) in self._sites.items():
            rows = _rows(records.at(indices))
            for axis, loop in enumerate(frame.loops()):
                rows = np.flip(rows, axis) if loop.is_reversed else rows
            operations.append(np.ascontiguousarray(rows))
        lengths = {}
        for indices, loop in self._loops.items():
            lengths[indices] = loop.length
            if loop.kind == "while":
                count = records.at((*indices, Key.ITERATIONS))
                lengths[indices] = int(count[0, 0]) if np.shape(count) == (1, 2) else 0
        return Run(operations, *(list(map(_rows, x)) for x in (given, made))), lengths

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

    def _operations(self) -> Iterator[Operation]:
        for indices, (frame, index) in self._sites.items():
            equation, place = frame.jaxpr.eqns[index], place_of(frame.site_of(index))
            atoms = (*equation.invars, *equation.outvars)
            results = list(filter(has_numbers, equation.outvars))
            is_number = any(map(is_inexact_atom, results))
            yield Operation(
                place=place,
                code=linecache.getline(place.file, place.line).strip(),
                indices=indices,
                shape=tuple(results[0].aval.shape),
                dtype=str(results[0].aval.dtype),
                unit=max(map(_unit, atoms)) if is_number else 0.0,
                loops=tuple(self._loop_number[x.site.indices] for x in frame.loops()),
                feeds=self._feeds_of([(frame, x) for x in equation.invars]),
            )

    def _feeds_of(self, variables: Sequence[tuple[Frame, Any]]) -> tuple[Feed, ...]:
        """What has sketches of its own, and some variables are computed from."""
        stack = [(frame, atom, frozenset[int]()) for frame, atom in variables]
        found, seen = dict[Feed, None](), set[Any]()
        while stack:
            frame, atom, late = stack.pop()
            if is_literal(atom) or (frame, atom, late) in seen:
                continue
            seen.add((frame, atom, late))
            link = frame.link(atom)
            if link.way in ("argument", "constant") and atom in self._inputs:
                number = -1 - self._inputs[atom]
                found[Feed(number, tuple(sorted(late)))] = None
            maker = frame.makers.get(atom)
            if link.way == "operation" and maker:
                number = self._number.get(frame.indices_of(maker.position))
                if number is not None:
                    found[Feed(number, tuple(sorted(late)))] = None
                    continue
            if link.way == "branch" and maker:  # and what chooses
                equation = frame.jaxpr.eqns[maker.position]
                stack.append((frame, equation.invars[0], late))
            if link.way == "carry":
                outside, after = link.sources
                stack.append((*outside, late))
                loop = self._loop_number[frame.site.indices]
                stack.append((*after, late | {loop}))
                continue
            stack += [(*x, late) for x in link.sources]
        return tuple(sorted(found))


def _quick(arithmetic: Arithmetic) -> Arithmetic:
    """The same, with operations that are compiled in less time, and once if equal."""

    def run(site: Site, inputs: Sequence[Any]) -> list[Any]:
        equation = site.equation
        is_wide = arithmetic is WIDE and rounds(equation)
        if is_staged() or is_wide or has_side_effects(equation):
            return arithmetic.run(site, inputs)
        try:
            jitted = _jitted(operation_of(equation))
        except TypeError:  # a parameter has no hash
            return arithmetic.run(site, inputs)
        with traced_as(equation), jax.disable_jit(False):
            return jitted(*inputs)

    return Arithmetic(arithmetic.held, run)


@functools.lru_cache(4096)
def _jitted(operation: Any) -> Any:
    return jax.jit(
        lambda *x: operation.bind(x), compiler_options=fast_compile_options()
    )


class _Around:
    """Compiles what runs on several devices once, and long loops.

    Other loops run one operation at a time, as the rest does.
    """

    def __init__(self, compiled: dict[Any, Any], is_wide: bool) -> None:
        self._compiled, self._is_wide = compiled, is_wide

    def __call__(self, site: Site, run: Any) -> Any:
        (call, *_) = calls_of(site.equation)
        is_long = (call.length or 0) > _LONG
        if is_staged() or not (call.kind == "devices" or is_long):
            return run
        key = (site.indices, self._is_wide)
        jitted = self._compiled.setdefault(key, jax.jit(run))

        def run_compiled(inputs: list[Any]) -> Any:
            with jax.disable_jit(False):
                return jitted(inputs)

        return run_compiled


_LONG = 1000  # iterations
_RESULTS = (jax.ShapeDtypeStruct, np.ndarray)
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
    equation, site = frame.jaxpr.eqns[index], frame.site_of(index)
    name, (atom, *_) = equation.primitive.name, (*equation.invars, None)
    if name not in ("convert_element_type", "reduce_precision") or not rounds(equation):
        return False
    is_narrower = _unit(equation.outvars[0]) > _unit(atom) > 0
    is_narrower |= name == "reduce_precision"
    return is_narrower and AUTOCAST not in marks_of(site)


def _unit(value: Any) -> float:
    """The unit of a floating-point value; of float32, if it is wider. 0 of others."""
    if is_literal(value) or not is_inexact_atom(value):
        return 0.0
    dtype = getattr(value, "aval", value).dtype
    return max(float(jnp.finfo(dtype).eps), 2.0**-23)


def _value(name: str, value: Any, feeds: tuple[Feed, ...] = ()) -> Value:
    shape = getattr(value, "aval", value).shape
    return Value(name, tuple(shape), _unit(value), feeds)


def _closed_over(constants: Iterable[Any]) -> Iterator[Value]:
    """The arrays that a function closes over: of one name if there are as many."""
    types = [f"{x.aval.dtype}{list(x.aval.shape)}" for x in constants]
    for i, (x, name) in enumerate(zip(constants, types, strict=True)):
        place, count = types[:i].count(name) + 1, types.count(name)
        which = f" ({place} of {count})" if count > 1 else ""
        yield _value(f"{CLOSED_OVER}{name}{which}", x)


def _name(item: Any, is_object: bool) -> str:
    if is_object:
        return item.name
    keys = [f"[{key}]" if key.isdigit() else f".{key}" for key in item.path]
    return f"result{''.join(keys)}"


def _rows(record: Any) -> np.ndarray:
    """Sketches one after the other, apart."""
    record = np.asarray(record)
    return record.reshape(*record.shape[:-1], -1, WIDTH)


def _nudged(value: Any) -> Any:
    """Numbers, each changed by a unit of float32; whole ones as they are.

    A whole number may be a mask, a power of two or a step, and is not rounded.
    """
    return _nudge(jnp.asarray(value)) if is_inexact_atom(value) else value


@jax.jit
def _nudge(x: Array) -> Array:
    x = x.astype(jnp.float32) if is_half_atom(x) else x
    is_up = random_bits(x.size).reshape(x.shape) & 1 == 1
    unit = jnp.where(is_up, jnp.float32(2.0**-23), jnp.float32(-(2.0**-23)))
    return jnp.where(x == jnp.round(x), x, (x + x * unit).astype(x.dtype))


def _made_by(dtypes: Any) -> dict[str, str]:
    device = jax.devices()[0]
    jls = sys.modules["jls"].__version__
    made = {"jls": jls, "jax": jax.__version__, "platform": device.platform}
    return made | {"device": device.device_kind, "dtype": ", ".join(sorted(dtypes))}
