# SPDX-License-Identifier: Apache-2.0
"""Abstract interpretation of a program: one walk for every question about its values.

Nothing is computed. A question has the rule for a single operation: the facts about its
results, from the facts about its operands. The walk handles control flow:

    call                   goes into the called program, separately for each call
    scan, while            repeats the body until no fact about its carry changes
    cond                   all branches, joined; one of them if the question knows which
    anything else          the question
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jls._program.control import MAIN, Call, Site, calls_of, evaluate
from jls._program.jaxprs import Program

V = TypeVar("V")


class Question(abc.ABC, Generic[V]):
    """An analysis that derives a fact about each value of a program."""

    @abc.abstractmethod
    def of_constant(self, value: Any) -> V:
        """The fact about a number in the program."""

    @abc.abstractmethod
    def results_of(self, site: Site, operands: Sequence[V]) -> Sequence[V]:
        """The facts about the results of an operation."""

    @abc.abstractmethod
    def join(self, site: Site, one: V, other: V) -> V:
        """The fact about a value that is one or the other; `one` itself if that is it.

        A loop ends when what it carries is itself after a join with a later iteration.
        """

    def carry(self, site: Site, before: V, after: V) -> V:
        """The fact about a carried value; `before` itself if nothing was added."""
        return self.join(site, before, after)

    def enter_call(self, site: Site, operands: Sequence[V]) -> None:
        """Called before the walk goes into a call, a loop or a branch."""

    def call_results(self, site: Site, results: Sequence[V]) -> Sequence[V]:
        """The facts about the results of a call, from those of its program."""
        return results

    def slice(self, value: V) -> V:
        """The fact about a slice along the first axis, or about a stack of slices."""
        return value

    def branch(self, index: V) -> int | None:
        """Which branch `index` chooses, None if that is not known."""
        return None


def walk(
    program: Program, operands: Sequence[V], question: Question[V], site: Site = MAIN
) -> list[V]:
    """The facts about the results of a program, from those about its operands.

    Args:
      program: a jaxpr.
      operands: the facts about its inputs.
      question: the analysis.
      site: the calls around the program.
    """
    run = functools.partial(_results_of, question=question)
    return evaluate(program, operands, question.of_constant, run, site)


def _results_of(site: Site, operands: list[V], question: Question[V]) -> Sequence[V]:
    calls = [x for x in calls_of(site.equation) if x.kind != "condition"]
    if not calls:
        return question.results_of(site, operands)
    question.enter_call(site, operands)
    if calls[0].is_loop:
        results = _repeat(site, calls[0], operands, question)
    elif calls[0].kind == "branch":
        results = _choose(site, calls, operands, question)
    else:
        results = walk(calls[0].program, operands, question, site)
    return question.call_results(site, results)


def _repeat(
    site: Site, call: Call, operands: list[V], question: Question[V]
) -> list[V]:
    """The facts about a loop's carry and its stacked results, in any iteration."""
    inputs, last = call.inputs(operands), call.consts + call.carried
    fixed, state = inputs[: call.consts], inputs[call.consts : last]
    slices = [question.slice(x) for x in inputs[last:]]
    results: list[V] = []
    # Bounds the iterations: a fact reaches one more carried value in each of them, and
    # changes a few times.
    for _ in range(4 * len(state) + 8):
        results = walk(call.program, [*fixed, *state, *slices], question, site)
        pairs = zip(state, results, strict=False)
        joined = [question.carry(site, before, after) for before, after in pairs]
        if all(a is b for a, b in zip(joined, state, strict=True)):
            break
        state = joined
    return [*state, *map(question.slice, results[call.carried :])]


def _choose(
    site: Site, branches: list[Call], operands: list[V], question: Question[V]
) -> list[V]:
    chosen = question.branch(operands[0])
    if chosen is not None:
        chosen = min(max(chosen, 0), len(branches) - 1)  # as JAX clamps it
        branches = branches[chosen : chosen + 1]
    results = [
        walk(x.program, x.inputs(operands), question, x.site(site)) for x in branches
    ]
    joined = results[0]
    for others in results[1:]:
        pairs = zip(joined, others, strict=True)
        joined = [question.join(site, one, other) for one, other in pairs]
    return joined
