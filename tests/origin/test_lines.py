# SPDX-License-Identifier: Apache-2.0
"""Whether `jls.why` names the marked line of each program, first."""

import jax
import pytest
from finite_programs import FINITE
from more_programs import MORE
from programs import PROGRAMS, marked_lines

import jls
from jls._program.places import has_line_inside

pytestmark = pytest.mark.standard_promotion


def made(program):
    if jax.device_count() < program.devices:
        pytest.skip(f"needs {program.devices} devices")
    return program.make()


@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_the_first_birth_is_at_the_marked_line(name):
    names_the_marked_line(name)


def names_the_marked_line(name):
    truth = (PROGRAMS | MORE)[name]
    fun, args = made(truth)
    why = jls.why(fun, *args)
    print(why)
    first = why.births[0]
    if truth.argument:
        assert (first.place.operation, first.place.module) == (
            "argument",
            truth.argument,
        )
    else:
        assert first.place.line in marked_lines(truth)
        assert first.place.file == truth.make.__code__.co_filename
    if truth.operation:
        assert first.place.operation in truth.operation
    if truth.is_backward is not None:
        assert first.place.is_backward == truth.is_backward
    if truth.iteration is not None:
        assert first.place.iteration == truth.iteration
    if truth.is_from_scale is not None:
        assert why.is_from_scale == truth.is_from_scale
    assert truth.module in first.place.module
    if truth.wrapper:
        assert all(truth.wrapper in name for name in why.results)
    assert all(len(line) <= 80 for line in str(why).splitlines())


@pytest.mark.parametrize("name", FINITE)
def test_what_is_finite_is_left_alone(name):
    fun, args = made(FINITE[name])
    why = jls.why(fun, *args)
    print(why)
    assert why == jls.types.Why()


def test_a_line_around_a_function_of_jax_is_none_inside_of_it():
    """Its program may have been traced where another one was called."""
    (equation,) = jax.make_jaxpr(lambda x: -x)(1.0).jaxpr.eqns
    assert has_line_inside(equation, None)
    assert not has_line_inside(equation, ("/jax/_src/numpy/util.py", "_where"))
