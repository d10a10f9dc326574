# SPDX-License-Identifier: Apache-2.0
"""What a user's function does with jls while it runs, delivered to listeners.

A wrapper in a chain, a partition or a function of the user's cannot be reached by an
argument, nor can what it was given be returned. So it notes it here. The only such side
channel of the package, for some kinds of records.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Literal

# A wrapper that `init` was called of; a call of a wrapper's update; a result of
# `jls.scale`; a step that runs operation by operation. The parameters that `init` of a
# `jls.bfloat16_params` was given; the updates that it made of bfloat16 ones, with their
# paths; those that a `jls.params_ema` has seen. That a loss follows its parameters.
# And, told to what runs inside, arrays that were widened from bfloat16.
Kind = Literal[
    "wrapper",
    "update",
    "scaled",
    "eager step",
    "bfloat16",
    "stored",
    "averaged",
    "follows",
    "widened",
]

_LISTENERS: contextvars.ContextVar[tuple[tuple[Kind, list[Any]], ...]]
_LISTENERS = contextvars.ContextVar("_LISTENERS", default=())


@contextlib.contextmanager
def noted(
    kind: Kind, apart: bool = False, nearest: bool = False
) -> Iterator[list[Any]]:
    """Yields the list of what is noted of one kind in the block.

    Enclosing blocks get it too, unless this one is `apart`. If it takes only what is
    `nearest`, those of the same kind do not.
    """
    records: list[Any] = []
    others = () if apart else _LISTENERS.get()
    if nearest:
        others = tuple(x for x in others if x[0] != kind)
    token = _LISTENERS.set((*others, (kind, records)))
    try:
        yield records
    finally:
        _LISTENERS.reset(token)


def heard(kind: Kind) -> list[Any]:
    """What has been noted of one kind in the blocks around."""
    return [x for noted, records in _LISTENERS.get() if noted == kind for x in records]


def note(kind: Kind, record: Any = None) -> bool:
    """Delivers `record` to the enclosing blocks; returns whether there is one."""
    lists = [records for listened, records in _LISTENERS.get() if listened == kind]
    for records in lists:
        records.append(record)
    return bool(lists)
