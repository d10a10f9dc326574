# SPDX-License-Identifier: Apache-2.0
"""The result of `jls.compare`, and its text."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jls._program.places import Place
from jls._text import and_more, no_field, wrapped
from jls._tools.compare.fingerprint import CLOSED_OVER
from jls._tools.origin.result import place_in_words


class Parting(NamedTuple):
    """An operation at which two programs part: its operands agree, its result does not.

    Errors are relative, in the root of the mean square.

    Example:
      >>> other = lambda x: jnp.tanh(x) * 1.01
      >>> birth = jls.compare(lambda x: jnp.tanh(x) * 1.02, other, jnp.ones(3)).birth
      >>> birth.a.operation, birth.error < 0.02, birth.inputs_error
      ('mul', True, 0.0)
    """

    a: Place
    b: Place
    dtype: str  # of the result
    error: float  # of the result
    inputs_error: float  # the largest one of an operand
    code: tuple[str, str] = ("", "")  # the lines of the source
    operands_a: tuple[Place, ...] = ()  # that only a gives it
    operands_b: tuple[Place, ...] = ()


class Difference(NamedTuple):
    """Result of `jls.compare`: where two programs part.

    `print` it: the operation, with the line of each program, then what only one of them
    has, then which results differ. `plot` draws the error of each operation. It is true
    if the results are equal, for `assert jls.compare(...)`.

    Example:
      >>> print(jls.compare(jnp.tanh, jax.jit(jnp.tanh), jnp.ones(3)))
      jls.compare: equal, to the last bit.
    """

    if not TYPE_CHECKING:  # which knows the fields
        __getattr__ = no_field

    birth: Parting | None = None  # None if rounding explains all, or no one operation
    # Without a like in b, and on the way to the birth, or to a result without one.
    only_a: tuple[Place, ...] = ()
    only_b: tuple[Place, ...] = ()
    results: Mapping[str, float] = MappingProxyType({})  # the relative errors, by path
    equal: bool = True  # whether every result is of one shape, and within rounding
    notes: tuple[str, ...] = ()
    # Of each operation of a that has a like in b, in the order of the program.
    errors: tuple[tuple[Place, float], ...] = ()

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        lines = wrapped(f"jls.compare: {self._headline()}")
        if self.birth:
            lines += _birth_in_lines(self.birth)
            if not (self.only_a or self.only_b):
                of_a, of_b = self.birth.operands_a, self.birth.operands_b
                lines += _only_in_lines(" gives it", of_a, of_b)
        lines += _only_in_lines("", self.only_a, self.only_b)
        if not self.equal:
            lines += wrapped(f"  {self._results_in_words()}", "    ")[:2]
        for note in self.notes:
            lines += wrapped(f"  {note}.", "    ")
        return "\n".join(lines[:_MOST_LINES])

    def __repr__(self) -> str:
        return str(self)

    def plot(self) -> Any:
        """Draws the error of each operation, in the order of the program.

        Returns:
          A Matplotlib `Figure`, which a notebook shows.

        Raises:
          ModuleNotFoundError: if Matplotlib is not installed.
        """
        from jls._tools.compare.difference_plot import draw

        return draw(self.errors, self.birth)

    def _headline(self) -> str:
        if self.equal:
            if any(self.results.values()):
                return "equal: no result differs by more than rounding."
            return "equal, to the last bit."
        if self.birth is None:
            return "the results differ, and no operation that both have parts them."
        size = percent(self.birth.error)
        if self.birth.a.operation == "argument":
            name = self.birth.a.module
            if name.startswith(CLOSED_OVER):
                name = name.removeprefix(CLOSED_OVER)
                return (
                    f"what the functions close over differs, by {size}: {name}. Pass "
                    "it as an argument to compare the rest."
                )
            return f"an argument differs, by {size}: {name}."
        place = f"they part at {self.birth.a.operation} ({self.birth.dtype})"
        sides = [x for x, y in (("a", self.only_a), ("b", self.only_b)) if y]
        if sides:
            has = "has" if len(sides) == 1 else "have each"
            where = f"behind what only {' and '.join(sides)} {has}"
            return f"{place}, {where}: its results differ by {size}."
        if self.birth.operands_a or self.birth.operands_b:
            return f"{place}, which a and b give other operands: by {size}."
        agree = "agree"
        if self.birth.inputs_error:
            agree = f"agree to {percent(self.birth.inputs_error)}"
        return f"{place}: its operands {agree}, its results differ by {size}."

    def _results_in_words(self) -> str:
        found = {name: x for name, x in self.results.items() if x}
        if not found:
            return "Those of one shape are equal, to the last bit."
        worst = max(found, key=lambda name: found[name])
        most = f"{worst} by {percent(found[worst])}"
        if len(self.results) == 1:
            return f"The result differs by {percent(found[worst])}."
        return f"{len(found)} of {len(self.results)} results differ, most {most}."


_MOST_LINES = 12


def percent(error: float) -> str:
    """A relative error in words."""
    if error >= 10:
        return f"{error:.3g} times its size"
    return f"{error:.3g}" if error < 1e-4 else f"{100 * error:.3g} %"


def _birth_in_lines(birth: Parting) -> list[str]:
    if birth.a.operation == "argument":
        return []
    pairs = list(zip("ab", (birth.a, birth.b), birth.code, strict=True))
    if pairs[0][1:] == pairs[1][1:]:
        pairs = [("both", *pairs[0][1:])]
    lines = []
    for name, place, code in pairs:
        lines += wrapped(f"  {name}: {place_in_words(place)}", "    ")[:2]
        if code:
            lines.append(f"      {code if len(code) <= 74 else f'{code[:70]} ...'}")
    return lines


def _only_in_lines(does: str, *places: tuple[Place, ...]) -> list[str]:
    lines = []
    for name, of_one in zip("ab", places, strict=True):
        if of_one:
            where = f"{of_one[0].operation}, {place_in_words(of_one[0])}"
            if of_one[0].operation == "argument":
                where = f"argument {of_one[0].module}"
            more = and_more(of_one, 1)
            text = f"  only {name}{does}: {where}{more and f', {more}'}"
            lines += wrapped(text, "    ")[:2]
    return lines
