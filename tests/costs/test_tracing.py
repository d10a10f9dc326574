"""What it costs to trace a wrapped update: counted, not timed."""

from collections import Counter

import jax
import pytest

import jls
from benchmarks.tracing import OPTIMIZERS, Update, calls_per_leaf
from jls._program.jaxprs import opened, programs_in

pytestmark = pytest.mark.standard_promotion

# Older versions of JAX do more for each operand, and stack numbers one by one.
IS_OLD = jax.__version_info__ < (0, 10)
CALLS = 1.45 if IS_OLD else 1.4
# Beside those of the bare update: two selects of each moment, one of the update and one
# of the gradient, and what looks at the gradient on three platforms, or sums squares.
EQUATIONS = {"adam": 25, "clip + adam": 8, "sgd momentum": 23}


@pytest.mark.parametrize("name", ["adam", "clip + adam"])
def test_tracing_takes_few_more_calls_for_each_leaf(name):
    """The inner optimizer is traced, and not bound again equation by equation."""
    bare = calls_per_leaf(OPTIMIZERS[name])
    assert calls_per_leaf(jls.loss_scaled(OPTIMIZERS[name])) <= CALLS * bare


def equations_in(program):
    found = Counter()
    for equation in opened(program).jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in programs_in(equation):
            found += equations_in(inner)
    return found


def equations_per_leaf(optimizer):
    few, many = (
        equations_in(Update(optimizer, count).trace().jaxpr).total()
        for count in (20, 40)
    )
    return (many - few) / 20


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_leaf_adds_few_equations(name):
    bare = equations_per_leaf(OPTIMIZERS[name])
    ours = equations_per_leaf(jls.loss_scaled(OPTIMIZERS[name]))
    assert ours <= bare + EQUATIONS[name]


@pytest.mark.parametrize("name", EQUATIONS)
def test_in_the_step_itself_a_leaf_adds_no_equation(name):
    """The optimizer is one call there, of any number of leaves."""
    optimizer = jls.loss_scaled(OPTIMIZERS[name])
    few, many = (len(Update(optimizer, n).trace().jaxpr.eqns) for n in (20, 40))
    of_stack = 20 if IS_OLD and "clip" in name else 0
    assert many == few + of_stack
