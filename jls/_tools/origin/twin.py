# SPDX-License-Identifier: Apache-2.0
"""The float32 twin of a float16 program: which values float16 loses at a loss scale.

The twin has float32 in place of every narrower dtype (`_program.alone`), so no value
overflows or vanishes. Only what somebody asks about is recorded: the two ends of what
is narrow in the forward pass or follows the scale, and of the latter a sample where it
is float16. Its elements are counted on the host, so XLA need not compile that for each
of them; on the device in a `while` loop and on several devices, where several records
become one.

    counts    of a sample: of zeros, of those that vanish in float16, of those in each
              of the powers of two of float16, of those that overflow
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._placement import replicated
from jls._program.alone import WIDE
from jls._program.control import Site
from jls._program.frames import Frame, Variable
from jls._program.places import Place, place_of
from jls._program.records import Records, key_of
from jls._tools.origin.measure import ends_of
from jls._tools.origin.record import RecordedProgram, to_nearest_records

LOWEST, HIGHEST = -25, 15  # the powers of two whose numbers float16 does not lose
_BINS = HIGHEST - LOWEST + 1
_SAMPLE = 2**14  # elements of an array to count: they show a share of 1 % to a tenth


class Cotangent(NamedTuple):
    """A float16 value of the backward pass, as it would be in float32.

    Example:
      >>> jls.types.Cotangent._fields
      ('place', 'largest', 'vanishing', 'shares')
    """

    place: Place
    largest: float  # magnitude, at a loss scale of 1
    # The share of its nonzero numbers that is rounded to 0 at `init_scale`.
    vanishing: float
    # 41 shares of them, at `init_scale`: number i is from 2**(i - 25) to 2**(i - 24).
    shares: tuple[float, ...]


class Twin:
    """The twin of a program.

    Args:
      main: the frame of a program.
      sized: variables whose size is asked for.
      following: variables that follow the loss scale; those of float16 are counted.
      options: of XLA, for which the user's function asks.

    Attributes:
      recorded: the program to run.
    """

    def __init__(
        self,
        main: Frame,
        sized: Iterable[Variable],
        following: Iterable[Variable],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        following = list(following)
        asked = [*sized, *following]
        self.recorded = RecordedProgram(
            main,
            asked,
            only=frozenset(main.makers_of(to_nearest_records(asked))),
            options=options,
            arithmetic=WIDE,
            record=self._record,
        )
        # Of which several iterations or devices have one record.
        self._merged = {
            frame.site.indices
            for frame in main.all()
            if any(x.kind in ("while", "devices") for x in frame.around())
        }
        self._counted: dict[tuple[int, ...], set[int]] = {}
        for frame, atom in following:
            index, result = frame.makers[atom]
            if atom.aval.dtype == jnp.float16 and atom.aval.size:
                key = frame.indices_of(index)
                self._counted.setdefault(key, set()).add(result)

    def _record(
        self, site: Site, inputs: Sequence[Any], results: Sequence[Any]
    ) -> Array | tuple[Array | None, ...] | None:
        del inputs
        counted = self._counted.get(site.indices)
        if not counted:
            return ends_of(results)
        samples = [sample_of(results[i]) for i in sorted(counted)]
        if site.indices[:-1] not in self._merged:
            # The ends of what the samples hold whole are found on the host.
            sizes = [x.size for x in results]
            is_whole = all(sizes) and [x.size for x in samples] == sizes
            found = jnp.zeros((0, 2), jnp.uint32) if is_whole else ends_of(results)
            return found, *map(key_of, samples)
        ends = ends_of(results)
        assert ends is not None
        counts = [key_of(_bin_counts(jnp.abs(x))) for x in samples]
        return jnp.concatenate([ends, *(jnp.stack([x, x], -1) for x in counts)])

    def cotangent(
        self, records: Records, variable: Variable, loss_scale: float
    ) -> Cotangent | None:
        """A counted variable, over all iterations of the loops around it.

        Args:
          records: those of a run at `loss_scale`.
          variable: a result of an operation.
          loss_scale: the scale of that run.

        Returns:
          None if the variable was not counted, or is 0 throughout.
        """
        frame, atom = variable
        index, result = frame.makers[atom]
        key = frame.indices_of(index)
        counted = sorted(self._counted.get(key, ()))
        if result not in counted:
            return None
        ends, *samples = records.numbers(key)
        column = counted.index(result)
        if samples:
            sample = samples[column].reshape(-1, samples[column].shape[-1])
            found = np.stack([_count_on_host(np.abs(x)) for x in sample])
        else:
            place = len(frame.jaxpr.eqns[index].outvars) + _NUM_COUNTS * column
            found = ends[..., place : place + _NUM_COUNTS, 0].reshape(-1, _NUM_COUNTS)
        counts = found.astype(np.float64).sum(0)
        present = counts[1:].sum()
        if not present:
            return None
        shares = counts / present
        return Cotangent(
            place=place_of(frame.site_of(index)),
            largest=self.largest(records, variable) / loss_scale,
            vanishing=float(shares[1]),
            shares=tuple(shares[2:-1].tolist()),
        )

    def largest(self, records: Records, variable: Variable) -> float:
        """The largest magnitude of a variable in one run; 0 if it is not recorded."""
        frame, atom = variable
        index, result = frame.makers[atom]
        every = records.numbers(frame.indices_of(index))
        if not every:
            return 0.0
        ends, *samples = every
        is_whole = samples and not ends.shape[-2]
        found = samples[result] if is_whole else ends[..., result, :]
        return float(np.abs(found).max(initial=0.0))


_NUM_COUNTS = _BINS + 3


def sample_of(x: Array) -> Array:
    """At most `_SAMPLE` elements: `f32[n]`."""
    flat = jnp.ravel(replicated(x))
    step = -(-flat.size // _SAMPLE)
    while math.gcd(step, flat.size) > 1 and step > 1:  # not one channel of many
        step += 1
    return (flat[::step] if step > 1 else flat).astype(jnp.float32)


def _count_on_host(sample: np.ndarray) -> np.ndarray:
    # All of one length, so that this is compiled once: zeros count for nothing.
    return np.asarray(_bin_counts(np.pad(sample, (0, _SAMPLE - len(sample)))))


@jax.jit
def _bin_counts(sample: Array) -> Array:
    """The numbers of a sample that are 0, vanish, are in each bin, overflow."""
    _, exponent = jnp.frexp(sample)  # 1 for 1.0
    inside = jnp.clip(exponent - 1, LOWEST - 1, HIGHEST + 1) - LOWEST + 2
    # The lowest power itself is half of the least number: it rounds to the even 0.
    bins = jnp.where(sample <= 2.0**LOWEST, 1, inside)
    bins = jnp.where(sample == 0, 0, bins)
    return jnp.zeros(_NUM_COUNTS, jnp.float32).at[bins].add(jnp.float32(1.0))
