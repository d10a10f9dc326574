"""The walk through programs, by a question that is easy to check: which inputs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jls._program.jaxprs import opened
from jls._program.replay import Watched, replay
from jls._program.walk import Question, walk

X, Y = jnp.arange(3.0), jnp.ones(3)


class Inputs(Question):
    """Which inputs a value is computed from; and where additions stand."""

    def __init__(self):
        self.additions = []

    def of_constant(self, value):
        return frozenset()

    def results_of(self, site, operands):
        if site.equation.primitive.name == "add":
            self.additions.append(site.indices)
        return [frozenset().union(*operands)] * len(site.equation.outvars)

    def join(self, site, one, other):
        return one | other

    def carry(self, site, before, after):
        return before if after <= before else before | after


def inputs_of(fun, *args):
    program = jax.make_jaxpr(fun)(*args)
    operands = [frozenset([i]) for i in range(len(opened(program).jaxpr.invars))]
    return walk(program, operands, Inputs())


@jax.custom_vjp
def with_a_rule(x, y):
    return x + 1.0


with_a_rule.defvjp(lambda x, y: (x + 1.0, None), lambda rest, ct: (ct, ct))


@jax.custom_jvp
def with_a_tangent(x, y):
    return y * 2.0


with_a_tangent.defjvp(lambda x, t: (with_a_tangent(*x), t[1]))


def mesh_of_one():
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def on_devices(x, y):
    spec = PartitionSpec("data")
    fun = jax.shard_map(
        lambda x, y: (x * 2, y), mesh=mesh_of_one(), in_specs=spec, out_specs=spec
    )
    return fun(x, y)


def loop_that_passes_on(x, y):
    """After two rounds the last carries the first."""

    def body(carry, _):
        a, b, c = carry
        return (a, a, b), c

    return lax.scan(body, (x, y, y), None, length=4)[0]


PROGRAMS = {
    "numbers alone": (lambda x, y: jnp.ones(2), [set()]),
    "jit": (jax.jit(lambda x, y: (x, y * 2)), [{0}, {1}]),
    "a number of the program": (lambda x, y: x + jnp.arange(3.0), [{0}]),
    "remat": (jax.checkpoint(lambda x, y: jnp.sin(x) * 3), [{0}]),
    "custom_vjp": (with_a_rule, [{0}]),
    "custom_jvp": (with_a_tangent, [{1}]),
    "cond": (
        lambda x, y: lax.cond(x[0] > 0, lambda: (x, y), lambda: (y, y)),
        [{0, 1}, {1}],
    ),
    "scan": (
        lambda x, y: lax.scan(lambda c, z: (c * 2, c + z), x[0], y),
        [{0}, {0, 1}],
    ),
    "a carry that passes on": (loop_that_passes_on, [{0}, {0, 1}, {0, 1}]),
    "while": (
        lambda x, y: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2, c[1]), (0, x, y)
        ),
        [set(), {0}, {0, 1}],
    ),
    "while that reads inputs": (
        lambda x, y: lax.while_loop(lambda c: c[0] < x[0], lambda c: c + y, y),
        [{1}],
    ),
    "fori_loop": (lambda x, y: lax.fori_loop(0, 3, lambda i, c: c * y, x), [{0, 1}]),
    "vmap": (jax.vmap(lambda x, y: (x * 2, y)), [{0}, {1}]),
    "grad of jit": (jax.grad(jax.jit(lambda x, y: (x * y).sum())), [{1}]),
    "shard_map": (on_devices, [{0}, {1}]),
    "platform_dependent": (
        lambda x, y: lax.platform_dependent(
            x, y, cpu=lambda x, y: x, default=lambda x, y: y
        ),
        [{0, 1}],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_walk_knows_the_inputs_of_each_result(name):
    fun, expected = PROGRAMS[name]
    assert inputs_of(fun, X, Y) == list(map(frozenset, expected))


@jax.jit
def added(x, y):
    return x + y


def test_two_calls_of_one_function_are_two_places():
    """They share one program in JAX."""
    question = Inputs()
    program = jax.make_jaxpr(lambda x, y: (added(x, x), added(x, y)))(X, Y)
    results = walk(program, [frozenset([0]), frozenset([1])], question)
    assert results == [frozenset([0]), frozenset([0, 1])]
    assert len(question.additions) == len(set(question.additions)) == 2


def test_branches_are_two_places():
    question = Inputs()
    program = jax.make_jaxpr(
        lambda x, y: lax.cond(x[0] > 0, lambda: x + y, lambda: y + x)
    )(X, Y)
    walk(program, [frozenset([0]), frozenset([1])], question)
    assert len(set(question.additions)) == 2


@pytest.mark.parametrize(
    ("known", "expected"), [(1, {1}), (-1, {0}), (2, {0, 1}), (7, {0, 1})]
)
def test_known_branch_is_the_only_one(known, expected):
    """One out of range is the first or the last, as JAX has it."""

    class Known(Inputs):
        def branch(self, index):
            return known

    program = jax.make_jaxpr(
        lambda i, x, y: lax.switch(i, [lambda: x, lambda: y, lambda: x + y])
    )(0, X, Y)
    operands = [frozenset(["i"]), frozenset([0]), frozenset([1])]
    assert walk(program, operands, Known()) == [frozenset(expected)]


# Replay.


@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_without_a_change_gives_the_same(name):
    fun = PROGRAMS[name][0]
    program = jax.make_jaxpr(fun)(X, Y)
    run = functools.partial(
        replay, program, watch=lambda site, x, results: Watched(results)
    )
    for new, records in (run([X, Y]), jax.jit(run)([X, Y])):
        assert not records
        for x, y in zip(new, jax.tree.leaves(fun(X, Y)), strict=True):
            assert jnp.array_equal(x, y)


def doubled_at(operation):
    seen = []

    def change(site, inputs, results):
        if site.equation.primitive.name != operation:
            return Watched(results)
        seen.append(site)
        return Watched([2 * x for x in results])

    return change, seen


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (added, [2 * (X + Y)]),
        (jax.checkpoint(lambda x, y: x + y), [2 * (X + Y)]),
        (lambda x, y: lax.scan(lambda c, z: (c + z, ()), 0.0, y)[0], [14.0]),
        (lambda x, y: lax.cond(True, lambda: x + y, lambda: x), [2 * (X + Y)]),
        (
            lambda x, y: lax.while_loop(lambda c: c < 9, lambda c: c + y[0], 1.0),
            [10.0],
        ),
    ],
    ids=["jit", "remat", "scan", "cond", "while"],
)
def test_replay_goes_on_with_what_was_changed(fun, expected):
    change, seen = doubled_at("add")
    results, records = replay(jax.make_jaxpr(fun)(X, Y), [X, Y], change)
    assert not records
    for x, y in zip(results, expected, strict=True):
        assert jnp.array_equal(x, jnp.asarray(y))
    assert seen


def test_replay_finds_the_sites_of_the_walk():
    question = Inputs()

    def fun(x, y):
        z = added(x, y)
        return lax.cond(z[0] > 0, lambda: z + x, lambda: z - x)

    program = jax.make_jaxpr(fun)(X, Y)
    walk(program, [frozenset([0]), frozenset([1])], question)
    change, seen = doubled_at("add")
    replay(program, [X, Y], change)
    indices = [site.indices for site in seen]
    assert list(dict.fromkeys(indices)) == question.additions


def test_replay_leaves_out_what_the_watched_operations_do_not_need():
    """Of the call one of two results; of the loop nothing."""

    @jax.jit
    def both(x, y):
        return jnp.exp(x), jnp.sin(y)

    def fun(x, y):
        one, other = both(x, y)
        total, _ = lax.scan(lambda c, z: (c + z, None), 0.0, other)
        return one - y, total

    program = jax.make_jaxpr(fun)(X, Y)
    equations = opened(program).jaxpr.eqns
    place = next(i for i, e in enumerate(equations) if e.primitive.name == "sub")
    seen = []

    def watch(site, inputs, results):
        seen.append(site.equation.primitive.name)
        return Watched(results, jnp.zeros(2, jnp.uint32))

    results, records = replay(program, [X, Y], watch, only={(place,)})
    assert results == [None, None]
    assert seen == ["exp", "sub"]
    assert place in records


def test_replay_runs_callbacks_that_nobody_watches():
    found = []

    def fun(x, y):
        jax.debug.callback(lambda z: found.append(float(z)), x[0])
        return x + y

    program = jax.make_jaxpr(fun)(X, Y)
    replay(program, [X, Y], lambda site, x, results: Watched(results), only=set())
    jax.effects_barrier()
    assert found == [0.0]


def test_replay_goes_into_programs_over_several_devices():
    change, seen = doubled_at("mul")
    program = jax.make_jaxpr(on_devices)(X, Y)
    results, _ = replay(program, [X, Y], change)
    assert jnp.array_equal(results[0], 4 * X)
    assert len(seen) == 1
