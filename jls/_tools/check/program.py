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
from jls._tools.reading.reading import Reading, try_to_trace
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
        evidence = f"the step reads a value of the device ({last.reads})"
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
    findings.is_read = False
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
    given, narrowed = arguments.items, dict[str, str]()
    for scale in scales:
        state = _below(given, scale.path)
        end = next(path for path, i in state.items() if i == scale.at)
        # Where results have all paths of the state, with the leaves that are narrower.
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
    if narrowed:
        dtypes = " and ".join(sorted(set(narrowed.values())))
        findings.broken(CODE, f"{listed(list(narrowed))} came back as {dtypes}")
    else:
        findings.right(CODE)
    return traced._replace(outputs=outputs, objects=objects)


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
