# SPDX-License-Identifier: Apache-2.0
"""A large program is recorded in parts; the answer is that of the whole."""

import jax
import jax.numpy as jnp
import optax
import pytest
from generated import arguments, generate
from more_programs import MORE
from programs import PROGRAMS
from scaled_programs import SCALED, made_of
from test_calibrate import calibrated
from test_lines import names_the_marked_line

import jls
from jls._program.places import is_transposed
from jls._tools.origin import record, regions
from jls._tools.origin.calibrate import read_scaled
from jls._tools.origin.case import read_case

pytestmark = pytest.mark.standard_promotion

# Of two births that meet one is left out: the text of `jls.why` says so.
TWO_BIRTHS = "entropy_hidden_by_a_where"
# Of generated programs those with two births, in any order.
TWO_BIRTHS_OF_A_SEED = [i for i in range(500, 650) if len(generate(i).births) == 2]
NAMES = [name for name in [*MORE, *PROGRAMS] if name != TWO_BIRTHS]


def some(names, step):
    """Every so many of the names, the others with `--all`."""
    return [
        pytest.param(name, marks=pytest.mark.more if i % step else ())
        for i, name in enumerate(names)
    ]


@pytest.fixture
def in_parts(monkeypatch):
    """As if each program were large."""
    monkeypatch.setattr(regions, "FEW", 0)
    monkeypatch.setattr(regions, "_ROW", 3)


@pytest.mark.parametrize("name", some(NAMES, 8))
def test_the_line_is_found_in_parts(name, in_parts):
    names_the_marked_line(name)


@pytest.mark.filterwarnings("ignore::jls.JlsWarning")
@pytest.mark.parametrize("name", some(SCALED, 8))
def test_the_scale_is_found_in_parts(name, request):
    _, whole = calibrated(name)
    request.getfixturevalue("in_parts")
    made = made_of(SCALED[name])
    found = jls.calibrate(made.step, *made.args, **made.kwargs)
    assert found.ceiling == whole.ceiling
    assert found.limited_by == whole.limited_by
    assert repr(found.keep) == repr(whole.keep)
    assert found.vanishing == whole.vanishing


@pytest.mark.parametrize("seed", some(TWO_BIRTHS_OF_A_SEED, 6))
def test_the_first_of_two_births_is_found_in_parts(seed, request):
    program = generate(seed)
    args = arguments(seed, 1.0)
    whole = jls.why(program.fun, *args).births
    request.getfixturevalue("in_parts")
    found = jls.why(program.fun, *args).births
    assert found[:1] == whole[:1]
    assert {x.place for x in found} <= {x.place for x in whole}


def deep(layers):
    """A function of many operations in a row."""

    def fun(x):
        for _ in range(layers):
            x = jnp.tanh(x @ x) * 0.5 + x
        return x

    return fun


@pytest.fixture
def records(monkeypatch):
    """How many operations each program that is run has records of."""
    counts = []

    class Counting(record.RecordedProgram):
        def __call__(self, *args, **kwargs):
            counts.append(len(self.operations))
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr("jls._tools.origin.case.RecordedProgram", Counting)
    return counts


def test_a_birth_is_looked_for_where_it_is(records):
    def fun(x):
        return deep(40)(jnp.sqrt(deep(40)(x) - 1))

    (birth,) = jls.why(fun, jnp.zeros((2, 2))).births
    assert birth.place.operation == "sqrt"
    first, _, closely = records
    assert first <= 90  # a product in each layer, and what cuts the rows
    assert closely <= 0.9 * regions.FEW + 60


def test_a_quotient_in_float16_is_recorded_first():
    """In float32 its divisor may not be 0."""

    def fun(x):
        half = x.astype(jnp.float16)
        return deep(80)((1 / half).astype(jnp.float32))

    case = read_case("jls.why", fun, (jnp.ones((2, 2)),), {})
    frames = case.main.by_site()
    names = {frames[at].jaxpr.eqns[i].primitive.name for at, i in places(case)}
    assert "div" in names


def places(case):
    landmarks = case.recorded.landmarks
    assert landmarks is not None
    return [((*numbers[:-1],), numbers[-1]) for numbers in landmarks]


@pytest.mark.parametrize("ask", [jls.why, jls.calibrate])
def test_a_tool_that_takes_long_says_what_it_does(ask, monkeypatch, caplog):
    monkeypatch.setattr("jls._tools.reading.slow._PATIENCE_IN_SECONDS", 0.0)
    made = made_of(SCALED[next(iter(SCALED))])
    ask(made.step, *made.args, **made.kwargs)
    name = ask.__module__.rpartition(".")[2]
    assert caplog.text.count(f"{name} is compiling and running") == 1


def test_the_twin_records_of_the_backward_pass_what_follows_the_scale():
    """XLA takes as long for a record as for an operation, and nobody reads the rest."""

    def loss_fn(params, x):
        h = jnp.tanh(x.astype(jnp.float16) @ params.astype(jnp.float16))
        return jnp.mean((h * h).astype(jnp.float32))

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(loss_fn, optimizer)
    args = jnp.eye(4), optimizer.init(jnp.eye(4)), jnp.ones((2, 4))
    scaled = read_scaled(read_case("jls.calibrate", jax.jit(step), args, {}))
    sites = [
        frame.site_of(index)
        for frame, index in (
            (frame, index)
            for frame in scaled.case.main.all()
            for index in range(len(frame.jaxpr.eqns))
        )
    ]
    backward = {x.indices for x in sites if is_transposed(x)}
    following = {
        (*frame.site.indices, frame.makers[atom].position)
        for frame, atom in scaled.following
    }
    assert scaled.twin.recorded.operations & backward == following & backward
    assert scaled.twin.recorded.operations - backward
