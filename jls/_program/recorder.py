# SPDX-License-Identifier: Apache-2.0
"""Runs a program with records of its operations, compiled once."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jls._program.alone import AS_WRITTEN, Arithmetic
from jls._program.control import MAIN, Indices, Key
from jls._program.frames import Frame
from jls._program.records import Records, Tree
from jls._program.replay import Watch, replay


class Recorder:
    """A program with records beside its operations.

    Args:
      main: the frame of a program.
      places: of the operations and calls to watch. What they do not need is left out.
      watch: as for `replay`. Each input comes as the result of an operation, too.
      arithmetic: how it is computed.
      options: of XLA, for which the user's function asks.
      quick: more of them, left out on a platform that has no such option.
      choices: of these a run chooses some.
    """

    def __init__(
        self,
        main: Frame,
        places: Iterable[Indices],
        watch: Watch,
        arithmetic: Arithmetic = AS_WRITTEN,
        options: Mapping[str, Any] | None = None,
        quick: Mapping[str, Any] | None = None,
        choices: Iterable[Any] = (),
    ) -> None:
        self._program, self._watch, self._arithmetic = main.program, watch, arithmetic
        self._only = {x[:n] for x in places for n in range(1, len(x) + 1)}
        self._options, self._quick = dict(options or {}), dict(quick or {})
        self.choices: dict[Any, int] = {x: i for i, x in enumerate(choices)}
        self._chosen: Any = None
        self._compiled: jax.stages.Compiled | None = None

    def __call__(
        self,
        inputs: Sequence[Any],
        chosen: Collection[Any] = (),
        compiled: bool = True,
    ) -> Records:
        """One run; without `compiled` one operation at a time."""
        mask = jnp.array([x in chosen for x in self.choices], bool)
        given = list(map(jnp.asarray, inputs)), mask
        run = self._compiled_for(*given) if compiled else self._run
        return Records(jax.tree.map(np.asarray, run(*given)))

    def is_chosen(self, choice: Any) -> Array:
        """Whether a run has chosen it: `bool[]`, for `watch` and `arithmetic`."""
        return self._chosen[self.choices[choice]]

    def _compiled_for(self, *given: Any) -> jax.stages.Compiled:
        if self._compiled is None:
            lowered = jax.jit(self._run).lower(*given)
            try:
                self._compiled = lowered.compile(self._quick | self._options)
            except Exception:
                self._compiled = lowered.compile(self._options)
        return self._compiled

    def _run(self, inputs: Sequence[Array], chosen: Array) -> Tree:
        self._chosen = chosen
        _, tree = replay(
            self._program,
            inputs,
            self._watch,
            arithmetic=self._arithmetic,
            only=self._only,
        )
        given = (MAIN.beside(Key.ARGUMENTS, i) for i in range(len(inputs)))
        pairs = zip(given, inputs, strict=True)
        records = [self._watch(site, (), [x]).record for site, x in pairs]
        return {**tree, Key.ARGUMENTS: dict(enumerate(records))}


def fast_compile_options() -> dict[str, Any]:
    """Options with which XLA compiles in less time what runs a few times.

    The last bits may differ: so what decides whether a number is finite goes without.
    """
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0} if is_cpu else {}
