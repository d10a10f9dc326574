# SPDX-License-Identifier: Apache-2.0
"""Losses and derivatives inside of `shard_map`: over which devices they are summed.

JAX keeps track there of the axes over which a value differs (`check_vma=True`). The
loss `l` of a device differs over some; the gradient of a parameter that does not is the
derivative of the sum of `l` over these, without a `psum` of the user's. Whether the
loss that an optimizer is given is that sum too is found by following both as multiples
of the value that they began as (`Multiple`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jls._program.control import Site
from jls._program.facts import Multiple, Number, Operation, Value
from jls._program.jaxprs import parameter, varying_axes
from jls._program.places import is_differentiated, is_of_custom_rule, is_transposed

SEED, DERIVATIVE = "seed", "derivative"  # of which there is no one operation


class Derivatives:
    """What is differentiated in a program, noted in its order.

    Args:
      is_of_scales: whether a value is computed only from loss scales.
    """

    def __init__(self, is_of_scales: Callable[[Value], bool]) -> None:
        self._is_of_scales = is_of_scales
        self._scalars = dict[Any, None]()  # that a differentiated function computes
        self._used = set[Any]()  # those of which it computes something else
        self._scaled = dict[Any, None]()  # those that it multiplies by a loss scale
        self._seeds = set[float]()  # of backward passes
        # The factors of custom rules in backward passes, and of inner optimizers; None
        # if one is not known.
        self._factors = set[float | None]()

    def multiple(self, op: Operation) -> Multiple | None:
        """What a result of an operation is a multiple of, if that is known."""
        if not is_tracked(op.site):
            return None
        if is_transposed(op.site):
            return self._derivative(op)
        is_forward = is_differentiated(op.site)
        known = op.operands[0].known if op.operands else None
        if op.name == "pvary" and isinstance(known, Number) and not is_forward:
            return Multiple(SEED, frozenset(), frozenset(), known.value)
        found = self._moved_or_scaled(op, is_forward)
        if found is None and not is_forward:
            found = _times_number(op) or _summed(op)
        if found is None and is_forward:
            self._used.update(x.multiple.of for x in op.operands if x.multiple)
            if op.aval.ndim == 0:
                of, axes = op.site.indices, varying_axes(op.aval)
                self._scalars[of] = None
                return Multiple(of, axes, axes)
        return found

    def _derivative(self, op: Operation) -> Multiple:
        for x in op.operands:
            if x.multiple and x.multiple.of == SEED:
                self._seeds.add(x.multiple.factor)
        if op.name in ("mul", "div") and is_of_custom_rule(op.site):
            known = [x.known for x in op.operands if not x.depends]
            self._factors |= {x.value if isinstance(x, Number) else None for x in known}
        axes = varying_axes(op.aval)
        return Multiple(DERIVATIVE, axes, axes)

    def _moved_or_scaled(self, op: Operation, is_forward: bool) -> Multiple | None:
        if op.name == "convert_element_type" or (op.row.moves and len(op.data) == 1):
            return op.operands[0].multiple
        if op.name != "mul":
            return None
        for x, other in (op.operands, op.operands[::-1]):
            if x.multiple and self._is_of_scales(other):
                if is_forward:
                    self._scaled[x.multiple.of] = None
                return x.multiple
        return None

    def of_the_loss(self, loss: Multiple) -> bool:
        """Whether derivatives are those of the value that `loss` is a multiple of.

        The only one that is scaled is differentiated; where none is, the only scalar
        that a differentiated function computes and does not use.
        """
        unused = [of for of in self._scalars if of not in self._used]
        if (list(self._scaled) or unused) != [loss.of]:
            return False
        return not loss.local or self._seeds == {1.0}

    def note_inner(self, ops: Sequence[Operation]) -> None:
        """Notes the numbers by which an inner optimizer multiplies or divides."""
        for op in ops:
            if op.name in ("mul", "div"):
                known = [x.known for x in op.operands]
                self._factors |= {abs(x.value) for x in known if isinstance(x, Number)}

    def has_factor(self, number: float) -> bool:
        """Whether derivatives may be multiplied by a number, or divided, on the way."""
        return any(
            x is None
            or math.isclose(x, number, rel_tol=1e-6)
            or math.isclose(x * number, 1, rel_tol=1e-6)
            for x in self._factors
        )


def is_tracked(site: Site) -> bool:
    """Whether JAX keeps track, at an operation, of where devices differ."""
    return bool(_shard_maps(site))


def _shard_maps(site: Site) -> list[Any]:
    found = (x for x in site.equations[:-1] if x.primitive.name == "shard_map")
    return [x for x in found if parameter(x, "check_vma")]


def devices_along(site: Site, axes: frozenset[str]) -> int:
    """The number of devices over which a sum at an operation is."""
    sizes: dict[str, int] = {}
    for equation in _shard_maps(site):
        sizes |= dict(parameter(equation, "mesh").shape)
    return math.prod(sizes[axis] for axis in axes)


def _times_number(op: Operation) -> Multiple | None:
    if op.name not in ("mul", "div"):
        return None
    (x, y), factor = op.operands, op.name == "mul"
    if isinstance(x.known, Number) and factor:
        x, y = y, x
    if not x.multiple or not isinstance(y.known, Number) or not y.known.value:
        return None
    by = y.known.value if factor else 1 / y.known.value
    return x.multiple._replace(factor=x.multiple.factor * by)


def _summed(op: Operation) -> Multiple | None:
    """A sum over devices; of equal values it is a multiple."""
    if op.name not in ("psum", "psum_invariant"):
        return None
    multiple, axes = op.operands[0].multiple, parameter(op.equation, "axes")
    groups = parameter(op.equation, "axis_index_groups")
    if multiple is None or axes is None or groups is not None:
        return None
    equal = frozenset(axes) - multiple.varying
    return multiple._replace(
        varying=multiple.varying - frozenset(axes),
        factor=multiple.factor * devices_along(op.site, equal),
    )
