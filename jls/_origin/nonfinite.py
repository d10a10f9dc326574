# SPDX-License-Identifier: Apache-2.0
"""Which leaves are not finite: a table."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from jls._bits import magnitudes
from jls._reduce import count_true
from jls._tree import named_floats, widen

_SHOWN = 20  # rows of the table; a loss that is NaN spoils every leaf


class LeafReport(NamedTuple):
    """A row of `jls.nonfinite_report`: the counts of one leaf.

    Example:
      >>> jls.nonfinite_report(jnp.array([1.0, jnp.inf])).rows[0].infs
      1
    """

    path: str  # "" if the tree is a single leaf
    dtype: np.dtype
    shape: tuple[int, ...]
    nans: int  # elements; a complex one with NaN and inf counts here
    infs: int
    # The largest finite magnitude, of the parts if complex; None if there is none.
    largest: float | None

    @property
    def finite(self) -> bool:
        """Whether all elements are finite."""
        return not (self.nans or self.infs)


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport:
    """Result of `jls.nonfinite_report`: rows of data that print as a table.

    Example:
      >>> report = jls.nonfinite_report({"w": jnp.ones(3), "n": 7})
      >>> report.finite, report.rows[0].path, report.rows[0].largest
      (True, 'w', 1.0)
    """

    rows: tuple[LeafReport, ...]  # one for each floating-point leaf, in order

    @property
    def bad(self) -> tuple[LeafReport, ...]:
        """The rows that are not finite."""
        return tuple(row for row in self.rows if not row.finite)

    @property
    def finite(self) -> bool:
        """Whether every leaf is finite, like `jls.all_finite(tree)`."""
        return not self.bad

    def __bool__(self) -> bool:
        raise TypeError(
            "a report is neither true nor false: ask report.finite, or print it."
        )

    def __repr__(self) -> str:
        rows = sorted(self.rows, key=lambda row: row.finite)  # stable: bad ones first
        shown, hidden = rows[:_SHOWN], NonfiniteReport(tuple(rows[_SHOWN:]))
        lines = [_title(len(self.bad), len(self.rows)), *_aligned(shown)]
        if hidden.bad:
            lines.append(f"... {len(hidden.bad)} more not finite, see .bad")
        if len(hidden.rows) > len(hidden.bad):
            lines.append(f"... {len(hidden.rows) - len(hidden.bad)} more finite")
        if self.bad:
            lines.append("print(jls.why(fun, *args)) names the line that made them")
        return "\n".join(lines)


def nonfinite_report(tree: Any) -> NonfiniteReport:
    """Returns which leaves of `tree` hold NaN or inf, how many, and what else is there.

    For the host, when something has gone wrong: one jitted call and one transfer for
    the whole tree. Look at the parameters as well as at the gradients: NaN in both
    means that a bad step was committed; in the gradients alone, that one was skipped.
    If several processes share the arrays, every process has to call it.

    Args:
      tree: any pytree: gradients, parameters, an optimizer state, a Flax `TrainState`,
        an NNX or Equinox module. Leaves that are not floating point are left out.

    Returns:
      A report that prints as a table, leaves that are not finite first. `report.finite`
      says whether all are, `report.bad` and `report.rows` have a `LeafReport` of path,
      dtype, shape, numbers of NaN and inf elements, and largest finite magnitude for
      each leaf. The table stops after 20 of them.

    Raises:
      TypeError: if a leaf is traced: under jit there are no numbers to report yet.

    Example:
      >>> grads = {"b": jnp.ones(2), "w": jnp.array([[1.5, jnp.nan], [jnp.inf, -3.0]])}
      >>> jls.nonfinite_report(grads)
      1 of 2 leaves is not finite
      path  dtype    shape   NaN  inf  largest finite
      w     float32  (2, 2)    1    1               3
      b     float32  (2,)      0    0               1
      print(jls.why(fun, *args)) names the line that made them
    """
    paths, leaves = named_floats(tree)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tracer):
            raise TypeError(
                "tree must be arrays in memory, got a traced one at "
                f"'{path}': jls.nonfinite_report is for the host. Return the tree from "
                "the jitted function and report on that; under jit use jls.all_finite."
            )
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    table = np.asarray(_tallies(arrays)) if arrays else []
    return NonfiniteReport(tuple(map(_row, paths, arrays, table)))


@jax.jit
def _tallies(arrays: list[Array]) -> Array:
    """Two digits each of NaN, of inf, and of the bits of the largest: `u32[n, 6]`."""
    return jnp.stack([_tally_leaf(array) for array in arrays])


def _tally_leaf(array: Array) -> Array:
    wide = widen(array)
    is_nan, finite = jnp.isnan(wide), jnp.isfinite(wide)
    if jnp.finfo(wide.dtype).bits == 32:
        # As integers, since XLA would flush a subnormal one to zero.
        parts, none = magnitudes(wide), jnp.uint32(0)
    else:
        parts, none = [jnp.abs(wide.real), jnp.abs(wide.imag)], 0.0
    keys = [jnp.where(finite, part, none) for part in parts]
    counts, maxima = count_true([is_nan, ~is_nan & ~finite], keys)
    largest = lax.bitcast_convert_type(jnp.stack(maxima).max(), jnp.uint32).ravel()
    return jnp.concatenate([counts.ravel(), jnp.pad(largest, (0, 2 - largest.size))])


def _row(path: str, array: Array, digits: np.ndarray) -> LeafReport:
    nans, infs = (int(high) << 32 | int(low) for high, low in digits[:4].reshape(2, 2))
    is_double = jnp.finfo(array.dtype).bits == 64
    bits = digits[4:] if is_double else digits[4:5]
    largest = bits.view(np.float64 if is_double else np.float32).item()
    has_finite = nans + infs < array.size
    return LeafReport(
        path=path,
        dtype=np.dtype(array.dtype),
        shape=array.shape,
        nans=nans,
        infs=infs,
        largest=largest if has_finite else None,
    )


def _title(bad: int, total: int) -> str:
    if not total:
        return "no leaf is floating point"
    if total == 1:
        return f"the only leaf is {'not ' if bad else ''}finite"
    if not bad:
        return f"all {total} leaves are finite"
    return f"{bad} of {total} leaves {'is' if bad == 1 else 'are'} not finite"


def _aligned(rows: list[LeafReport]) -> list[str]:
    """The rows as lines: text to the left, numbers to the right."""
    if not rows:
        return []
    lines = [("path", "dtype", "shape", "NaN", "inf", "largest finite")]
    for row in rows:
        largest = "-" if row.largest is None else f"{row.largest:.4g}"
        texts = row.path or "(tree)", str(row.dtype), str(row.shape)
        lines.append((*texts, str(row.nans), str(row.infs), largest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligns = "<<<>>>"
    return [
        "  ".join(
            f"{cell:{align}{width}}"
            for cell, align, width in zip(line, aligns, widths, strict=True)
        )
        for line in lines
    ]
