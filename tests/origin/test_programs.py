# SPDX-License-Identifier: Apache-2.0
"""The programs for `jls.why` are what they say: bad, or finite, and marked."""

from pathlib import Path

import jax
import numpy as np
import pytest
from finite_programs import FINITE
from flax import nnx
from programs import PROGRAMS, marked_lines

import jls

pytestmark = pytest.mark.standard_promotion


def numbers(tree):
    """The floating-point arrays of a tree, in float32 or wider."""
    for leaf in jax.tree.leaves(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating):
            yield np.asarray(leaf, np.float64)


def is_finite(tree):
    return all(np.isfinite(x).all() for x in numbers(tree))


def wrapper_states(tree):
    """The states of all wrappers, by their paths."""

    def is_state(node):
        return isinstance(node, jls.types.LossScaledState)

    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)
    return {jax.tree_util.keystr(p): node for p, node in nodes if is_state(node)}


def skips(tree):
    return {p: int(np.asarray(x.skips)) for p, x in wrapper_states(tree).items()}


def is_whole(node):
    return isinstance(node, jls.types.LossScaledState | nnx.Module | nnx.Optimizer)


def lowered(node):
    """A state at a very low loss scale; anything else as it is."""
    is_state = is_whole(node) and not isinstance(node, nnx.Module)
    return jls.set_loss_scale(node, 2.0**-4) if is_state else node


def made(program):
    if jax.device_count() < program.devices:
        pytest.skip(f"needs {program.devices} devices")
    return program.make()


def run(fun, args):
    """The results, and the arguments that NNX changes in place."""
    results = fun(*args)
    return results, [x for x in args if isinstance(x, nnx.Module | nnx.Optimizer)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_result_is_not_finite(name):
    program = PROGRAMS[name]
    results = run(*made(program))
    counts = skips(results)
    if program.is_step:
        assert is_finite([x.inner_state for x in wrapper_states(results).values()])
        assert [program.wrapper in path for path in counts] == [*counts.values()]
    else:
        assert not any(counts.values())
        assert list(numbers(results))
        assert not is_finite(results)


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.is_step])
def test_low_scale_mends_what_is_from_the_scale(name):
    program = PROGRAMS[name]
    fun, args = made(program)
    before = sum(skips(args).values())
    args = jax.tree.map(lowered, args, is_leaf=is_whole)
    after = sum(skips(run(fun, args)).values())
    assert (after == before) == bool(program.is_from_scale)


@pytest.mark.parametrize("name", PROGRAMS)
def test_line_is_marked_unless_an_argument_was_bad(name):
    program = PROGRAMS[name]
    assert bool(marked_lines(program)) != bool(program.argument)


@pytest.mark.parametrize("name", FINITE)
def test_result_is_finite(name):
    results = run(*made(FINITE[name]))
    assert list(numbers(results))
    assert is_finite(results)
    assert not any(skips(results).values())


def test_the_page_counts_these_programs():
    page = Path(__file__).parents[2] / "docs" / "questions" / "which_line.md"
    text = page.read_text(encoding="utf-8")
    marked = sum(not program.argument for program in PROGRAMS.values())
    assert f"| **all** | **{marked}** | **{marked}** |" in text
    assert f"| right programs, of {len(FINITE)}, " in text
    steps = sum(p.is_step and not p.argument for p in PROGRAMS.values())
    assert f"| of these, steps that jls skips | {steps} | {steps} |" in text
