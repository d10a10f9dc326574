# SPDX-License-Identifier: Apache-2.0
"""Formats states, scalers, numbers and paths on one line."""

import difflib
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def path_name(path: Sequence[Any]) -> str:
    """The keys of a path of JAX as a person writes them, `l1/b`; "" for the root."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def path_names(paths: Sequence[Any]) -> list[str]:
    """The names of paths, all different."""
    names = list(map(path_name, paths))
    if len(set(names)) < len(names):  # {"a/b": x, "a": {"b": y}}
        names = list(map(jax.tree_util.keystr, paths))
    return names


def join(*names: str) -> str:
    """One path out of several, or of keys; some may be the root of the one before."""
    return "/".join(filter(None, names))


def at(name: str) -> str:
    """A path for a sentence, " at 'l1/b'"; "" for the root."""
    return f" at '{name}'" if name else ""


def quoted(names: Iterable[str]) -> list[str]:
    """Paths for a list in a sentence."""
    return [f"'{name}'" for name in names]


def first(name: str) -> str:
    """The first of several paths for a sentence, ", first 'l1/b'"; "" for the root."""
    return f", first '{name}'" if name else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """`names`, "a, b, c and 2 more"; the name of a tree that is one leaf is empty."""
    more = and_more(names, most)
    return ", ".join(name or "(tree)" for name in names[:most]) + (more and f" {more}")


def and_more(items: Sequence[Any], most: int) -> str:
    """How many come after the first, "and 2 more"; "" if none does."""
    return f"and {len(items) - most} more" if len(items) > most else ""


def quantity(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def an(name: str) -> str:
    """The name of a type, with its article."""
    return f"{'an' if name[:1] in 'AEIOUaeio' else 'a'} {name}"


def format_record(name: str, **fields: Any) -> str:
    """`name(field=value, ...)`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in fields.items())})"


def wrapped(text: str, indent: str = "", initial: str = "") -> list[str]:
    """The lines of a text in a terminal of 80 columns, with words kept whole.

    Args:
      text: words.
      indent: of all lines but the first.
      initial: what the first line begins with.
    """
    return textwrap.wrap(
        text,
        80,
        initial_indent=initial,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe(value: Any) -> str:
    """A description of `value` for an error, without the numbers of an array."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    if isinstance(value, arrays) and shape is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    name = type(value).__name__
    text = "" if isinstance(value, dict | list | tuple | set) else repr(value)
    # A longer text would hide the rest of the message.
    return f"{name} {text}" if 0 < len(text) <= 60 and "\n" not in text else name


def nearest(name: str, names: Iterable[str]) -> str:
    """A question with the name that is nearly `name`; "" if none is."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f"Did you mean {near[0]}?" if near else ""


def naming_arguments(**meant: str) -> Callable[[FunctionT], FunctionT]:
    """A decorator: an unknown keyword argument is an error with the name here.

    So is a call without an argument, as in `@jls.autocast(dtype=half)`, and one by
    position of what has to be named.

    Args:
      **meant: the argument that one of another name is, where no name is near.
    """

    def decorate(function: Any) -> Any:
        names = inspect.signature(function).parameters
        kinds = {name: parameter.kind for name, parameter in names.items()}
        by_position = [n for n, kind in kinds.items() if kind in _BY_POSITION]
        is_open = inspect.Parameter.VAR_POSITIONAL in kinds.values()
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        required = [n for n in by_position if names[n].default is names[n].empty]
        is_preset = function.__module__ == "jls.presets"
        own = f"jls.{'presets.' if is_preset else ''}{function.__name__}"
        for name in names:
            _TAKEN_BY.setdefault(name, []).append(own)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = () if takes_any else kwargs.keys() - names
            for name in unknown:
                near = [meant[name]] if name in meant else []
                near = near or difflib.get_close_matches(name, list(names), 1)
                question = f"Did you mean {near[0]}=? " if near else _taken_by(name)
                raise TypeError(
                    f"{function.__name__} takes no argument {name}=. {question}It "
                    f"takes {', '.join(names)}."
                )
            if len(args) > len(by_position) and not is_open:
                raise TypeError(_by_name(function, by_position, list(names), args))
            given = {*by_position[: len(args)], *kwargs}
            missing = [name for name in required if name not in given]
            if missing:
                raise TypeError(_without(own, missing, required, kwargs))
            return function(*args, **kwargs)

        return call

    return decorate


_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
# Of each argument the functions that take it, as far as they are imported.
_TAKEN_BY: dict[str, list[str]] = {}


def _taken_by(name: str) -> str:
    """A sentence with the functions that take an argument; "" if none does."""
    takers = [x for x in _TAKEN_BY.get(name, []) if "presets" not in x]
    if not takers:
        return ""
    return f"It is an argument of {' and '.join(takers)}. "


def _by_name(
    function: Any, by_position: list[str], names: list[str], args: Sequence[Any]
) -> str:
    others = ", ".join(f"{name}=" for name in names if name not in by_position)
    if not by_position:
        return f"{function.__name__} takes its arguments by name: {others}."
    message = (
        f"{function.__name__} takes {', '.join(by_position)} by position, got "
        f"{len(args)} arguments."
    )
    if by_position[0] in _FUNCTIONS:
        return f"{message} Those of {by_position[0]} go to what is returned."
    return f"{message} By name it takes {others}." if others else message


_FUNCTIONS = "fun", "loss_fn"  # what a decorator takes


def _without(
    own: str, missing: list[str], required: list[str], kwargs: Mapping[str, Any]
) -> str:
    given = [f"{name}=..." for name in kwargs if name not in required]
    call = f"{own}({', '.join([*required, *given])})"
    *others, last = missing
    what = f"{', '.join(others)} and {last}" if others else last
    message = f"{what} must be given: {call}."
    if missing != required or required[0] not in _FUNCTIONS:
        return message
    return f"{message} A decorator is @functools.partial({', '.join([own, *given])})."


def no_field(self: Any, name: str) -> Any:
    """The `__getattr__` of a record: an error with what `name` is called here.

    Python adds a name that is nearly the same where it prints the error.
    """
    kind = type(self).__name__
    message = f"{kind!r} object has no attribute {name!r}"
    if (kind, name) in _FIELDS_ELSEWHERE:
        raise AttributeError(f"{message}. {_FIELDS_ELSEWHERE[kind, name]}")
    if not (name.startswith("_") or nearest(name, self._fields)):
        message = f"{message}. It has {', '.join(self._fields)}."
    raise AttributeError(message, name=name, obj=self)


def no_key(self: Any, key: Any) -> Any:
    """The `__getitem__` of a record: an error for what would be a key of a dict."""
    if isinstance(key, str):
        there_are = f"There are {', '.join(self._fields)}."
        raise TypeError(
            f"{type(self).__name__} has fields, no keys, got {key!r}. "
            f"{f'Write .{key}.' if key in self._fields else there_are}"
        )
    return tuple.__getitem__(self, key)


_APPLY = (
    "Write params, opt_state, report = jls.apply_gradients(optimizer, grads, opt_state,"
    " params, value=loss)."
)
# What other libraries, or other records of jls, call a field.
_FIELDS_ELSEWHERE = {
    ("StepReport", "grad_norm"): "Did you mean global_norm?",
    ("StepReport", "lr"): "Did you mean learning_rate?",
    ("StepReport", "scale"): "Did you mean loss_scale?",
    ("StepReport", "applied"): "Did you mean ~report.skipped?",
    ("LossScaledState", "loss_scale"): "Write jls.loss_scale(opt_state).",
    ("LossScaledState", "scale"): "Write jls.loss_scale(opt_state).",
    ("LossScaledState", "skipped"): "Did you mean ~opt_state.applied, or skips?",
    ("LossScaledTransformation", "step"): _APPLY,
    ("LossScaledTransformation", "apply"): _APPLY,
    ("LossScaledTransformation", "apply_gradients"): _APPLY,
    ("ScalerState", "scale"): "Did you mean loss_scale?",
    ("StaticState", "scale"): "Did you mean loss_scale?",
    ("Health", "ok"): "Write if health, or health.verdict.",
    ("Health", "message"): "Did you mean sentence?",
    ("StepCheck", "passed"): "Did you mean ok?",
    ("Why", "line"): "Write why.births[0].place.line.",
    ("Difference", "line"): "Write difference.birth.a.line, or .b.line.",
    ("Calibration", "scale"): "Did you mean init_scale?",
    ("Calibration", "loss_scale"): "Did you mean init_scale?",
}


def format_number(value: Any) -> str:
    """A scalar in memory as a person writes it; anything else as it prints itself."""
    if isinstance(value, float):
        return _format_float(value)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or isinstance(value, Tracer) or value.shape != ():
        return repr(value)
    if isinstance(value, jax.Array) and value.is_deleted():
        return "<donated>"
    plain = value.item()
    return _format_float(plain) if isinstance(plain, float) else repr(plain)


def format_numbers(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a record by name, formatted as numbers."""
    return {name: format_number(value) for name, value in fields.items()}


def format_state(self: Any) -> str:
    """The `repr` of a state of numbers."""
    return format_record(type(self).__name__, **format_numbers(self._asdict()))


def format_rule(rule: Any, named_by: str, hyperparameters: Mapping[str, Any]) -> str:
    """A rule of jls by name, with its hyperparameters; any other by its fields.

    Args:
      rule: a NamedTuple of functions.
      named_by: the field whose function has the rule's name: `dynamic_adjust` in
        "adjust" is `dynamic`.
      hyperparameters: what the rule computes with.
    """
    function = getattr(rule, named_by)
    while callable(getattr(function, "func", None)):
        function = function.func
    name, _, suffix = getattr(function, "__name__", "").rpartition("_")
    is_ours = (getattr(function, "__module__", None) or "").startswith("jls.")
    if not (is_ours and suffix == named_by):
        reprs = {field: repr(value) for field, value in rule._asdict().items()}
        return format_record(type(rule).__name__, **reprs)
    return format_record(name.lstrip("_"), **format_numbers(hyperparameters))


def format_scale(scale: float) -> str:
    """`32768.0` as `2^15`; with four digits if it is not a power of two."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"


def scale_in_words(scale: float) -> str:
    """A loss scale for a sentence: a small one as a number, `512`; else `2^15`."""
    return f"{scale:g}" if 2.0**-3 <= scale <= 2.0**10 else format_scale(scale)


def _format_float(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    is_long = not 2.0**-3 <= value <= 2.0**10
    return f"2**{exponent - 1}" if mantissa == 0.5 and is_long else f"{value:g}"
