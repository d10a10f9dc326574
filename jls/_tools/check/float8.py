# SPDX-License-Identifier: Apache-2.0
"""Which products run as float8 on a GPU: what XLA made of them."""

import re

import jax

from jls._autocast.float8 import has_float8
from jls._scopes import FLOAT8
from jls._text import listed
from jls._tools.check.runs import Runner

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# In the name of an operation: jls's scopes, and JAX's words that say nothing.
_OURS = re.compile(r"\(jls_\w+\)|jls_\w+/|transpose\(\)/")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def float8_notes(runner: Runner) -> list[str]:
    """How many of the products in float8 run as such on the GPU at hand."""
    if jax.default_backend() != "gpu":
        return []
    call = runner.arguments.rebuild(runner.start)
    lower = getattr(runner.step, "lower", None) or jax.jit(runner.step).lower
    try:
        text = lower(*call.args, **call.kwargs).compile().as_text() or ""
    except Exception as error:
        return [f"Whether float8 runs as float8 is not known: {error}"]
    right, others = float8_in(text)
    count = len(right) + len(others)
    if not count:  # the user's own float8
        return []
    kind = jax.local_devices()[0].device_kind
    note = f"{len(right)} of {count} products in float8 run as float8 on {kind}."
    if others:
        note += f" In a wider dtype are {listed([*dict.fromkeys(others)])}."
    if others and not has_float8():
        note += " Write jnp.bfloat16, or run it on an H100 or later."
    return [note]


def float8_in(text: str) -> tuple[list[str], list[str]]:
    """The float8 products in a compiled program, and those that became wider.

    Args:
      text: HLO, as `compiled.as_text()` gives it.

    Returns:
      The names of both, as JAX's transformations and scopes make them.
    """
    types = dict[str, str]()
    right, others = list[str](), list[str]()
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        name, made, kind, operands = found.groups()
        types[name] = made
        op_name, target = _OP_NAME.search(line), _TARGET.search(line)
        is_product = kind == "dot" or (target is not None and "cublas" in target[1])
        if not is_product or op_name is None or FLOAT8 not in op_name[1]:
            continue
        made_of = [types.get(x, "") for x in re.findall(r"%([\w.-]+)", operands)[:2]]
        is_float8 = bool(made_of) and all(x.startswith("f8") for x in made_of)
        is_float8 |= target is not None and "f8" in target[1]
        (right if is_float8 else others).append(_OURS.sub("", op_name[1]))
    return right, others
