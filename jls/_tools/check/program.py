# SPDX-License-Identifier: Apache-2.0
"""Reads the program of a step, once.

In float16 a loss scale is inf from 65520 on, and every step after that is skipped. So
the wrapper refuses a state whose loss scale is narrower than float32: a step that is
given one, or returns one, is read as if its state had kept its dtypes, and not run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jls._program.jaxprs import is_exact_cast
from jls._text import join, listed
from jls._tools.check.codes import Code
from jls._tools.check.findings import Findings
from jls._tools.check.proofs import BY_READING, SUMMED
from jls._tools.reading.arguments import Arguments, Item, Keys
from jls._tools.reading.reading import Reading, Unread, try_to_trace
from jls._tools.reading.scales import Scale, without_value
from jls._tools.reading.trace import Traced
from jls._tree import is_concrete, is_inexact, is_narrow, widen

CODE: Code = "state narrowed"


def read_program(
    step: Callable[..., Any],
    arguments: Arguments,
    scales: Sequence[Scale],
    findings: Findings,
) -> tuple[Arguments, Reading | None]:
    """Reads the program of the step, and settles whether it syncs with the host.

    Returns:
      The arguments that it is read with, and what is read; None without a program.
    """
    arguments = _widen_scales(arguments, scales, findings)
    # A step may read a value every so many steps, which is right: it is a mistake only
    # if three traces in a row do.
    traces = [try_to_trace(step, arguments)]
    while len(traces) < 3 and traces[-1].reads:
        traces.append(try_to_trace(step, arguments))
    readable = [x for x in traces if isinstance(x, Traced)]
    last = traces[-1]
    if last.reads:
        how = last.reads if isinstance(last, Unread) else "jax.device_get"
        evidence = f"the step reads a value of the device ({how})"
        findings.broken("host sync", evidence)
    elif isinstance(last, Traced) or _is_compiled(step):
        findings.right("host sync")
    else:
        findings.not_tried("host sync", last.reason)
    reason = "" if isinstance(last, Traced) else last.reason
    if readable:
        traced = _restore_dtypes(readable[-1], arguments, scales, findings)
        try:
            reading = Reading(traced, scales)
        except Exception as error:  # a program that no test has: run it all the same
            reason = f"it raises {type(error).__name__}"
        else:
            if not (_is_compiled(step) or traced.is_jitted):
                findings.notes.append("Not jitted as passed: step = jax.jit(step).")
            return arguments, reading
    for code in (*BY_READING, CODE, SUMMED):
        findings.not_tried(code, f"there is no program to read: {reason}")
    findings.notes.append(f"The precision is not known: {reason}.")
    return arguments, None


def _is_compiled(step: Callable[..., Any]) -> bool:
    """Whether a step is one compiled program."""
    return hasattr(step, "lower") or isinstance(step, jax.stages.Compiled)


def _widen_scales(
    arguments: Arguments, scales: Sequence[Scale], findings: Findings
) -> Arguments:
    """`arguments` with loss scales in float32; those that were narrower are broken."""
    items = list(arguments.items)
    for scale in scales:
        loss_scale = items[scale.at].value
        if is_narrow(loss_scale):
            dtype = jnp.result_type(loss_scale)
            findings.broken(CODE, f"the loss scale in {scale.name} came in as {dtype}")
            wide = widen(loss_scale)
            wide = wide if is_concrete(loss_scale) else np.asarray(wide)
            items[scale.at] = items[scale.at]._replace(value=wide)
    return arguments._replace(items=items)


def _restore_dtypes(
    traced: Traced, arguments: Arguments, scales: Sequence[Scale], findings: Findings
) -> Traced:
    """`traced` with its states in the dtypes of `arguments`; narrower ones are broken.

    States are found by the paths in them, since a narrower one is no longer alike. One
    that also comes back as it has to be, such as that of another network or beside a
    snapshot in bfloat16, is right.
    """
    outputs, objects = list(traced.outputs), list(traced.objects)
    narrowed: dict[str, str] = {}
    for scale in scales:
        state = _state_of(arguments, scale)
        at = without_value(arguments.items[scale.at].path)[len(scale.path) :]
        copies = [
            (items, copy)
            for items in (outputs, objects)
            for copy in _copies_in(items, state, at)
        ]
        if any(not _narrower_in(items, copy, state) for items, copy in copies):
            continue
        for items, copy in copies:
            for path in _narrower_in(items, copy, state):
                i, before = copy[path], state[path]
                narrowed[join(*scale.path, *path)] = str(items[i].value.dtype)
                items[i] = _in_dtype(items[i], jnp.result_type(before))
    if narrowed:
        dtypes = " and ".join(sorted(set(narrowed.values())))
        findings.broken(CODE, f"{listed(list(narrowed))} came back as {dtypes}")
    else:
        findings.right(CODE)
    return traced._replace(outputs=outputs, objects=objects)


def _state_of(arguments: Arguments, scale: Scale) -> dict[Keys, Any]:
    """The leaves of the state that a loss scale is in, by the path in it."""
    size = len(scale.path)
    paths = [(without_value(item.path), item.value) for item in arguments.items]
    return {path[size:]: x for path, x in paths if path[:size] == scale.path}


def _copies_in(
    items: Sequence[Item], state: dict[Keys, Any], at: Keys
) -> list[dict[Keys, int]]:
    """Where results have all paths of a state: the index of each leaf, by path.

    Args:
      items: the results.
      state: the state.
      at: the path of its loss scale.
    """
    places = {without_value(item.path): i for i, item in enumerate(items)}
    roots = [path[: len(path) - len(at)] for path in places if path[-len(at) :] == at]
    return [
        {path: places[(*root, *path)] for path in state}
        for root in roots
        if all((*root, *path) in places for path in state)
    ]


def _narrower_in(
    items: Sequence[Item], copy: dict[Keys, int], state: dict[Keys, Any]
) -> list[Keys]:
    return [path for path, i in copy.items() if _is_cut(items[i].value, state[path])]


def _is_cut(new: Any, old: Any) -> bool:
    if not (is_inexact(old) and isinstance(new, jax.ShapeDtypeStruct)):
        return False
    dtype = jnp.result_type(old)
    is_float = jnp.issubdtype(new.dtype, jnp.inexact) and new.shape == jnp.shape(old)
    return is_float and new.dtype != dtype and is_exact_cast(new.dtype, dtype)


def _in_dtype(item: Item, dtype: Any) -> Item:
    return item._replace(value=jax.ShapeDtypeStruct(item.value.shape, dtype))
