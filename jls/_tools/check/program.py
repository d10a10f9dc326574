# SPDX-License-Identifier: Apache-2.0
"""Reads the program of a step, once.

In float16 a loss scale is inf from 65520 on, and every step after that is skipped. So
the wrapper refuses a state whose loss scale is narrower than float32: a step that is
given one, or returns one, is read as if its state had kept its dtypes, and not run.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jls._mistakes import is_equinox
from jls._program.jaxprs import is_exact_cast
from jls._state import find, is_wrapper_state, rounds_bfloat16
from jls._text import join, listed
from jls._tools.reading.arguments import Arguments, Item, Keys
from jls._tools.reading.reading import Reading, Unread, try_to_trace
from jls._tools.reading.scales import Scale, without_value
from jls._tools.reading.trace import Traced
from jls._tree import is_concrete, is_inexact, is_narrow, widen

Library = Literal["linen", "equinox", "nnx", "nnx without a wrapper"]
# Of optax's wrappers, those that may be a mistake if they are around jls's.
_OUTSIDE = (
    optax.LookaheadState,
    optax.MultiStepsState,
    optax.MaskedState,
    optax.PartitionState,
)


class Program(NamedTuple):
    """What the program of a step is read as."""

    scales: Sequence[Scale]
    reading: Reading | None
    reason: str  # why there is no reading, "" if there is
    last: Traced | Unread  # the last trace
    is_compiled: bool  # whether the step is one compiled program
    narrowed: Sequence[str]  # what came in, or came back, in a narrower dtype
    names: Sequence[str]  # of the positional arguments
    in_place: frozenset[str]  # names of the arguments that the step changes in place
    libraries: Sequence[Library]
    outside: frozenset[type]  # optax's states in which there is a wrapper's
    has_bfloat16_params: bool  # whether a `jls.bfloat16_params` is in the optimizer


def read_program(
    step: Callable[..., Any], arguments: Arguments, scales: Sequence[Scale], tree: Any
) -> tuple[Arguments, Program]:
    """Reads the program of the step.

    Args:
      step: the step.
      arguments: its arguments.
      scales: the loss scales in them.
      tree: the arguments in a whole.

    Returns:
      The arguments to run the step with, and what its program is read as.
    """
    arguments, narrowed = _widen_scales(arguments, scales)
    # A step may read a value every so many steps, which is right: it is a mistake only
    # if three traces in a row do.
    traces = [try_to_trace(step, arguments)]
    while len(traces) < 3 and traces[-1].reads:
        traces.append(try_to_trace(step, arguments))
    readable = [x for x in traces if isinstance(x, Traced)]
    last, reading = traces[-1], None
    reason = "" if isinstance(last, Traced) else last.reason
    if readable:
        traced, cut = _restore_dtypes(readable[-1], arguments, scales)
        narrowed += cut
        try:
            reading, reason = Reading(traced, scales), ""
        except Exception as error:  # a program that no test has: run it all the same
            reason = f"it raises {type(error).__name__}"
    is_compiled = hasattr(step, "lower") or isinstance(step, jax.stages.Compiled)
    return arguments, Program(
        scales,
        reading,
        reason,
        last,
        is_compiled,
        narrowed,
        arguments.names,
        arguments.in_place,
        _libraries_of(arguments, scales, tree),
        _outside(tree),
        rounds_bfloat16(tree),
    )


def _libraries_of(
    arguments: Arguments, scales: Sequence[Scale], tree: Any
) -> list[Library]:
    found: list[Library] = []
    if find(tree, lambda node: hasattr(node, "apply_gradients")):
        found.append("linen")
    if find(tree, is_equinox):
        found.append("equinox")
    if arguments.in_place:
        has_wrapper = any(scale.counters for scale in scales)
        found.append("nnx" if has_wrapper else "nnx without a wrapper")
    return found


def _outside(tree: Any) -> frozenset[type]:
    return frozenset(
        kind
        for kind in _OUTSIDE
        for _, node in find(tree, lambda node, kind=kind: isinstance(node, kind))
        if find(node, is_wrapper_state)
    )


def _widen_scales(
    arguments: Arguments, scales: Sequence[Scale]
) -> tuple[Arguments, list[str]]:
    """`arguments` with loss scales in float32, and which were narrower."""
    items, narrowed = list(arguments.items), list[str]()
    for scale in scales:
        loss_scale = items[scale.at].value
        if is_narrow(loss_scale):
            dtype = jnp.result_type(loss_scale)
            narrowed.append(f"the loss scale in {scale.name} came in as {dtype}")
            wide = widen(loss_scale)
            wide = wide if is_concrete(loss_scale) else np.asarray(wide)
            items[scale.at] = items[scale.at]._replace(value=wide)
    return arguments._replace(items=items), narrowed


def _restore_dtypes(
    traced: Traced, arguments: Arguments, scales: Sequence[Scale]
) -> tuple[Traced, list[str]]:
    """`traced` with its states in the dtypes of `arguments`, and what was narrower.

    States are found by the paths in them, since a narrower one is no longer alike. One
    that also comes back as it has to be, such as that of another network or beside a
    snapshot in bfloat16, is right.
    """
    outputs, objects = list(traced.outputs), list(traced.objects)
    given, narrowed = arguments.items, dict[str, str]()
    for scale in scales:
        state = _below(given, scale.path)
        end = next(path for path, i in state.items() if i == scale.at)
        # Results that have all paths of the state, with the leaves that are narrower.
        copies = list[tuple[list[Item], list[tuple[int, Item]]]]()
        for items in (outputs, objects):
            for path in [without_value(item.path) for item in items]:
                is_end = path[-len(end) :] == end
                copy = _below(items, path[: -len(end)]) if is_end else {}
                if copy.keys() >= state.keys():
                    pairs = [(copy[path], given[i]) for path, i in state.items()]
                    cut = [(n, x) for n, x in pairs if _is_cut(items[n].value, x.value)]
                    copies.append((items, cut))
        if all(cut for _, cut in copies):
            for items, cut in copies:
                for n, before in cut:
                    new, dtype = items[n].value, jnp.result_type(before.value)
                    narrowed[join(*without_value(before.path))] = str(new.dtype)
                    whole = jax.ShapeDtypeStruct(new.shape, dtype)
                    items[n] = items[n]._replace(value=whole)
    traced = traced._replace(outputs=outputs, objects=objects)
    if not narrowed:
        return traced, []
    dtypes = " and ".join(sorted(set(narrowed.values())))
    return traced, [f"{listed(list(narrowed))} came back as {dtypes}"]


def _below(items: Sequence[Item], root: Keys) -> dict[Keys, int]:
    """The leaves below a path, by the rest of theirs."""
    paths = enumerate(without_value(item.path) for item in items)
    return {path[len(root) :]: i for i, path in paths if path[: len(root)] == root}


def _is_cut(new: Any, old: Any) -> bool:
    if not (is_inexact(old) and isinstance(new, jax.ShapeDtypeStruct)):
        return False
    dtype = jnp.result_type(old)
    is_float = jnp.issubdtype(new.dtype, jnp.inexact) and new.shape == jnp.shape(old)
    return is_float and new.dtype != dtype and is_exact_cast(new.dtype, dtype)
