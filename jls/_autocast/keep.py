# SPDX-License-Identifier: Apache-2.0
"""Which products are computed in half, and which operations stay as written.

The terms:

    keep       says what stays: a regular expression that is searched in the scope of an
               operation, or a function of its `Place`
    product    a dot, a convolution or a ragged dot of float32 arrays. Three are not
               computed in half: one that asks for a precision, an inner product, which
               is a sum, and an outer product, which sums nothing and is elementwise
"""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jls import _scopes
from jls._autocast.float8 import BFLOAT16, E4M3, is_large, is_matrix_product, is_uneven
from jls._mistakes import warn
from jls._program.control import MAIN, Site, calls_of
from jls._program.frames import Frame
from jls._program.jaxprs import Opened, Program, in_scope, is_float32, opened, rule_of
from jls._program.places import Place, modules_of, place_of
from jls._program.products import asks_for_precision, is_inner, is_outer, products_in
from jls._text import listed

Keep = str | Callable[[Place], Any] | None

KEEP = "keep"
INSIDE = "keep of an autocast inside"
OUTER = "outer product"
# These scopes tell the tools why a product, or its derivative, is as written.
_MARKS = {KEEP: _scopes.KEPT, INSIDE: _scopes.KEPT, OUTER: _scopes.OUTER_PRODUCT}


class Choice:
    """The dtype of a cast, and what stays as written in one program.

    Attributes:
      name: the dtype that was asked for.
      dtype: of products. A cast to float8 is one to bfloat16, but for large products.
      is_float8: whether it is such a cast.
    """

    def __init__(self, dtype: Any, keep: Keep | re.Pattern[str]) -> None:
        self.name = jnp.dtype(dtype).name
        self.is_float8 = self.name == E4M3.name
        self.dtype = BFLOAT16 if self.is_float8 else jnp.dtype(dtype)
        # `re.compile` returns a compiled pattern as it is.
        self._keep = keep if keep is None or callable(keep) else re.compile(keep)
        self._known: dict[tuple[int, ...], bool] = {}
        self._seen: dict[str, None] = {}  # scopes, or functions
        self._has_found = keep is None

    def anew(self) -> "Choice":
        """The same choice for another program, such as a rule's."""
        return Choice(self.name, self._keep)

    def is_kept(self, site: Site) -> bool:
        """Whether `keep` finds an operation."""
        if self._keep is None:
            return False
        if site.indices not in self._known:
            self._known[site.indices] = self._is_kept(site)
        return self._known[site.indices]

    def _is_kept(self, site: Site) -> bool:
        if isinstance(self._keep, re.Pattern):
            where = modules_of(site)
            is_found = bool(self._keep.search(where))
        else:
            assert self._keep is not None
            place = place_of(site)._replace(iteration=())
            where, is_found = place.function, bool(self._keep(place))
        self._seen[where] = None
        self._has_found |= is_found
        return is_found

    def check(self, program: Program) -> None:
        """Raises or warns if `keep` finds nothing in a whole program."""
        self._read(program, MAIN)
        if self._has_found:
            return
        seen = [where for where in self._seen if where]
        if isinstance(self._keep, re.Pattern):
            there = listed(seen) if seen else "no scopes at all"
            raise ValueError(
                "keep must be found in a scope of the program, got "
                f"{self._keep.pattern!r}. There are: {there}. Scopes are the modules "
                "of Flax Linen and Haiku, and jax.named_scope. By class or function: "
                'keep=lambda place: "Norm" in place.function.'
            )
        warn(
            "keep found no operation: it returned False for every place. The functions "
            f"of the program are: {listed(seen) if seen else 'not known'}."
        )

    def _read(self, program: Program, around: Site) -> None:
        for index, equation in enumerate(opened(program).jaxpr.eqns):
            site = around.inside(equation, index)
            self.is_kept(site)
            for call in calls_of(equation):
                self._read(call.program, call.site(site))

    def why_wide(self, site: Site) -> str | None:
        """Why a product stays as it is; None if it is computed in half."""
        equation = site.equation
        if not _is_of_floats(equation, self.dtype):
            return "dtype"
        if asks_for_precision(equation):
            return "precision="
        if is_inner(equation):
            return "inner product"
        if self.is_kept(site):
            return KEEP
        if _scopes.marks_of(site) & {_scopes.FLOAT32, _scopes.KEPT}:
            return INSIDE
        return OUTER if is_outer(equation) else None

    def is_half(self, site: Site) -> bool:
        """Whether a product is computed in half, or in float8."""
        return self.why_wide(site) is None

    def takes_float8(self, site: Site) -> bool:
        """Whether a product is computed in float8.

        In a function with a derivative of its own none is: there, nobody knows what the
        cotangents are.
        """
        return (
            self.is_float8
            and self.is_half(site)
            and is_large(site.equation)
            and not _is_in_rule(site)
        )

    def mark_of(self, site: Site) -> str | None:
        """The scope of jls that says why a product stays as it is, if there is one.

        Also of one in bfloat16, if float8 was asked for.
        """
        if not self.is_half(site):
            return _MARKS.get(self.why_wide(site) or "")
        if not self.is_float8 or self.takes_float8(site):
            return None
        if not is_matrix_product(site.equation) or _is_in_rule(site):
            return _scopes.NOT_IN_FLOAT8
        return _scopes.UNEVEN if is_uneven(site.equation) else _scopes.TOO_SMALL

    def marked(self, program: Program) -> Opened:
        """Adds the scopes of jls to a program that has no product in half.

        A call gets one scope for all its products: the scope of `keep`, if `keep` finds
        any of them.
        """
        marks = dict[int, str]()
        for product in products_in(Frame(program)):
            mark, index = self.mark_of(product.site), product.site.indices[0]
            if mark and marks.get(index) != _scopes.KEPT:
                marks[index] = mark
        jaxpr, consts = opened(program)
        equations = [
            in_scope(equation, marks[i]) if i in marks else equation
            for i, equation in enumerate(jaxpr.eqns)
        ]
        return Opened(jaxpr.replace(eqns=equations), consts)


def _is_in_rule(site: Site) -> bool:
    return any(rule_of(x) in ("jvp", "vjp") for x in site.equations[:-1])


def _is_of_floats(equation: Any, half: Any) -> bool:
    """Whether a product is of float32, or of float32 and an array already in half."""
    first, second = equation.invars[:2]
    dtypes = {first.aval.dtype, second.aval.dtype}
    is_wide = is_float32(equation.outvars[0]) and jnp.dtype(jnp.float32) in dtypes
    return is_wide and dtypes <= {jnp.dtype(jnp.float32), half}
