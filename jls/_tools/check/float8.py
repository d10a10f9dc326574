# SPDX-License-Identifier: Apache-2.0
"""Which products run as float8 on a GPU: what XLA made of them."""

import re

import jax

from jls._scopes import AUTOCAST, FLOAT8
from jls._text import listed
from jls._tools.check.runs import Runner

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\(([^)]*)\)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
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
    kind = jax.local_devices()[0].device_kind
    count = len(right) + len(others)
    note = f"{len(right)} of {count} products in float8 run as float8 on {kind}."
    if others:
        note += (
            f" In a wider dtype are {listed(others)}. Write jnp.bfloat16, or run it on "
            "an H100 or later."
        )
    return [note]


def float8_in(text: str) -> tuple[list[str], list[str]]:
    """The float8 products in a compiled program, and those that became wider.

    Args:
      text: HLO, as `compiled.as_text()` gives it.

    Returns:
      The names of both, as JAX's transformations and scopes make them.
    """
    types = dict[str, str]()
    found = list[tuple[str, str, str]]()
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, made, kind, operands = match.groups()
        types[name] = made
        made_of = _OP_NAME.search(line)
        target = _TARGET.search(line)
        is_product = kind == "dot" or (target is not None and "cublas" in target[1])
        if is_product and made_of is not None and FLOAT8 in made_of[1]:
            where = made_of[1].replace(f"{AUTOCAST}/", "").replace(f"{FLOAT8}/", "")
            found.append((where, target[1] if target else "", operands))
    right, others = list[str](), list[str]()
    for made_of, target, operands in found:
        pair = [x.strip().split(" ")[-1].lstrip("%") for x in operands.split(",")[:2]]
        is_float8 = all(types.get(x, "").startswith("f8") for x in pair)
        (right if is_float8 or "f8" in target else others).append(made_of)
    return right, others
