# SPDX-License-Identifier: Apache-2.0
"""Sets of primitives, until `jls.autocast` reads their rows."""

from jls._program.primitives import TABLE, Primitive

MOVES = frozenset(name for name, row in TABLE.items() if row.moves)
RANDOM = frozenset(name for name, row in TABLE.items() if row.is_random)


def data_of(name: str, operands: list) -> list:
    """The operands whose elements the result holds: not indices, not a predicate."""
    return operands[TABLE.get(name, Primitive()).data]
