# SPDX-License-Identifier: Apache-2.0
"""The programs for `jls.why` are what they say: bad, or finite, and marked."""

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
    """The states of all wrappers."""

    def is_state(node):
        return isinstance(node, jls.types.LossScaledState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def applied(tree):
    return [bool(np.asarray(state.applied)) for state in wrapper_states(tree)]


def run(program):
    """The results, with the arguments that NNX changes in place; and the flags."""
    if jax.device_count() < program.devices:
        pytest.skip(f"needs {program.devices} devices")
    fun, args = program.make()
    before = applied(args)
    results = fun(*args)
    changed = [x for x in args if isinstance(x, nnx.Module | nnx.Optimizer)]
    return (results, changed), before + applied((results, changed))


def test_there_are_enough():
    assert len(PROGRAMS) >= 46
    assert len(FINITE) >= 12


@pytest.mark.parametrize("name", PROGRAMS)
def test_result_is_not_finite(name):
    program = PROGRAMS[name]
    results, flags = run(program)
    if program.is_step:
        assert False in flags
        assert is_finite([state.inner_state for state in wrapper_states(results)])
    else:
        assert not flags
        assert list(numbers(results))
        assert not is_finite(results)


@pytest.mark.parametrize("name", PROGRAMS)
def test_line_is_marked_unless_an_argument_was_bad(name):
    program = PROGRAMS[name]
    assert bool(marked_lines(program)) != bool(program.argument)


@pytest.mark.parametrize("name", FINITE)
def test_result_is_finite(name):
    results, flags = run(FINITE[name])
    assert list(numbers(results))
    assert is_finite(results)
    assert False not in flags
