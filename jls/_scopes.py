# SPDX-License-Identifier: Apache-2.0
"""The scopes under which a wrapper's own operations are traced.

They add nothing to a program. By them `jls.check_step` and `jls.why` find, in the
program of a step, what the wrapper was given and what it decided.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jls._program.jaxprs import Name, names_around

# The whole of an `update`; what it looks at, before and after it; the inner optimizer;
# what is decided; the adjusted loss scale. And what `jls.all_finite` looks at. NORM:
# whether the sum of the squares of the gradients is finite, where a clip computes it.
UPDATE = "jls_update"
GRADIENTS = "jls_gradients"
NORM = "jls_norm"
LOSS = "jls_loss"
NEW = "jls_new"
INNER = "jls_inner"
DECISION = "jls_decision"
SCALE = "jls_scale"
CHECKED = "jls_checked"
# Where `jls.bfloat16_params` makes its updates, in a guard or without one.
STORED = "jls_stored"
# What `jls.autocast` computes to float32; what it has rewritten, the products that its
# `keep`, or one inside, left as written, and the outer ones: their derivatives have
# these scopes too. Under a cast to float8 its products, and what it adds; those left in
# bfloat16 for their size, since one is no multiple of 16, or for their kind.
FLOAT32 = "jls_float32"
AUTOCAST = "jls_autocast"
KEPT = "jls_kept"
OUTER_PRODUCT = "jls_outer"
FLOAT8 = "jls_float8"
TOO_SMALL = "jls_too_small"
UNEVEN = "jls_uneven"
NOT_IN_FLOAT8 = "jls_not_in_float8"

_FLOAT8 = {FLOAT8, TOO_SMALL, UNEVEN, NOT_IN_FLOAT8}
_CASTS = {FLOAT32, AUTOCAST, KEPT, OUTER_PRODUCT, *_FLOAT8}
_WRAPPER = {UPDATE, GRADIENTS, NORM, LOSS, NEW, INNER, DECISION, SCALE, CHECKED}
_ALL = frozenset({*_WRAPPER, *_CASTS})
NONE = frozenset[str]()


def marks_of(site: Any) -> frozenset[str]:
    """Which of the scopes are around an equation of a program."""
    found = NONE
    for equation in site.equations:
        marks = _marks_in(names_around(equation))
        found = found | marks if marks else found
    return found


def is_in(equation: Any, mark: str) -> bool:
    """Whether one equation was traced under a scope."""
    return mark in _marks_in(names_around(equation))


@functools.lru_cache(4096)
def _marks_in(names: Sequence[Name]) -> frozenset[str]:
    return _ALL.intersection(name.text for name in names)
