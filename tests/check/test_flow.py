"""What is read of a program, compared with numbers: degrees, skips, dependence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jls._program.facts import ANY, ZERO, Mixed, Number, Same, Unknown
from jls._program.jaxprs import opened
from jls._program.walk import walk
from jls._scopes import DECISION, UPDATE
from jls._tools.reading.flow import Flow

X = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2.0, 6), jnp.float32)
SCALE = jnp.float32(8.0)
SCALES = np.array([2.0**-4, 0.5, 4.0, 64.0])


def read(fun, *args, is_skipped=False, scales=(0,)):
    program = jax.make_jaxpr(fun)(*args)
    avals = [variable.aval for variable in opened(program).jaxpr.invars]
    flow = Flow(avals, list(scales), frozenset(scales), is_skipped)
    return flow, walk(program, flow.inputs, flow)


@jax.custom_vjp
def with_a_rule(x):
    return x * 2


with_a_rule.defvjp(lambda x: (x * 2, x), lambda x, ct: (ct * x,))


def gradient(loss):
    """The gradient of a loss times the scale."""
    return lambda s, x: jax.grad(lambda x: s * loss(x))(x)


def accumulated(s, x):
    def body(total, row):
        return total + jax.grad(lambda r: s * jnp.tanh(r))(row), ()

    return lax.scan(body, 0.0, x)[0]


# Functions of the scale and X, and the power of the scale in the result.
DEGREES = {
    "itself": (lambda s, x: s, 1),
    "a product": (lambda s, x: s * x, 1),
    "square": (lambda s, x: (s * x) ** 2, 2),
    "quotient": (lambda s, x: x / s, -1),
    "unscaled": (lambda s, x: s * x * (1 / s), 0),
    "twice": (lambda s, x: s * x * (1 / s) * (1 / s), -1),
    "root": (lambda s, x: jnp.sqrt(s * x), 0.5),
    "power": (lambda s, x: (s * x) ** 3, 3),
    "power that is no integer": (lambda s, x: (s * x) ** 1.5, 1.5),
    "cube of a cube root": (lambda s, x: jnp.cbrt(s * x) ** 3 / s, 0),
    "norm": (lambda s, x: jnp.linalg.norm(s * x), 1),
    "normalized": (lambda s, x: s * x / jnp.linalg.norm(s * x), 0),
    "sum with zeros": (lambda s, x: s * x + jnp.zeros(6), 1),
    "sum of equals": (lambda s, x: s * x + (s * x)[::-1], 1),
    "masked": (lambda s, x: jnp.where(x > 1, s * x, 0.0), 1),
    "relu": (lambda s, x: jax.nn.relu(s * x), 1),
    "matrix product": (lambda s, x: (s * x) @ jnp.outer(x, x), 1),
    "sorted": (lambda s, x: jnp.sort(s * x), 1),
    "written": (lambda s, x: jnp.zeros(8).at[2].set(s), 1),
    "gathered": (lambda s, x: (s * x)[jnp.array([2, 0])], 1),
    "narrowed": (lambda s, x: (s * x).astype(jnp.float16), 1),
    "sign": (lambda s, x: jnp.sign(s * x), 0),
    "comparison": (lambda s, x: (s * x > s).astype(jnp.float32), 0),
    "gradient": (gradient(lambda x: jnp.sum(jnp.tanh(x) ** 3)), 1),
    "gradient of jit": (gradient(jax.jit(lambda x: jnp.sum(jnp.sin(x)))), 1),
    "gradient of remat": (
        gradient(jax.checkpoint(lambda x: jnp.sum(jnp.exp(jnp.sin(x))))),
        1,
    ),
    "gradient of a rule": (gradient(lambda x: jnp.sum(with_a_rule(x) ** 2)), 1),
    "gradient of softmax": (gradient(lambda x: jax.nn.log_softmax(x)[0]), 1),
    "gradient of a scan": (
        gradient(lambda x: lax.scan(lambda c, y: (jnp.tanh(c + y), c), 0.1, x)[0]),
        1,
    ),
    "gradient of a cond": (
        gradient(lambda x: lax.cond(x[0] > 0, jnp.sum, jnp.prod, x)),
        1,
    ),
    "accumulated": (accumulated, 1),
    "loop": (lambda s, x: lax.fori_loop(0, 3, lambda i, c: c * 0.5, s * x), 1),
    "not at all": (lambda s, x: jnp.exp(x) + 1, 0),
    "vmap": (lambda s, x: jax.vmap(lambda y: s * y)(x), 1),
    "least squares": (lambda s, x: (s * x + s) / (s + s), 0),
    "complex": (lambda s, x: jnp.fft.ifft(jnp.fft.fft(s * x)).real, 1),
}
NO_DEGREE = {
    "sum": lambda s, x: s * x + x,
    "clipped": lambda s, x: jnp.clip(s * x, -1.0, 1.0),
    "clipped by norm": lambda s, x: s * x * jnp.minimum(1, 9 / jnp.linalg.norm(s * x)),
    "written among others": lambda s, x: x.at[2].set(s),
    "squashed": lambda s, x: jnp.tanh(s * x),
    "accumulated with others": lambda s, x: lax.scan(
        lambda c, y: (c + s * y, ()), 1.0, x
    )[0],
    "either": lambda s, x: lax.cond(x[0] > 1, lambda: s * x, lambda: x),
    "a loop that squares": lambda s, x: lax.fori_loop(0, 2, lambda i, c: c * s, x),
}


def degree_in_numbers(fun):
    """The power of the scale that is in the result at every scale; None for none."""
    results = [np.abs(np.asarray(fun(jnp.float32(s), X))).ravel() for s in SCALES]
    logs = [np.log2(x[x != 0].astype(np.float64)) for x in results]
    if len({x.size for x in logs}) > 1:
        return None
    powers = np.diff(logs, axis=0) / np.diff(np.log2(SCALES))[:, None]
    return float(np.round(powers.flat[0], 2)) if np.ptp(powers) < 1e-2 else None


@pytest.mark.parametrize("name", DEGREES)
def test_degree_is_what_numbers_say(name):
    fun, degree = DEGREES[name]
    assert degree_in_numbers(fun) == degree
    _, (value,) = read(fun, SCALE, X)
    found = float(value.degree[0][1]) if value.degree else 0.0
    assert value.degree == ZERO or value.degree[0][0] == ("scale", 0)
    assert found == degree


@pytest.mark.parametrize("name", NO_DEGREE)
def test_what_has_no_degree_is_mixed(name):
    fun = NO_DEGREE[name]
    if name not in ("either", "a loop that squares"):  # which have one here
        assert degree_in_numbers(fun) is None
    _, (value,) = read(fun, SCALE, X)
    assert isinstance(value.degree, Mixed)


def test_what_has_no_rule_is_unknown():
    _, (value,) = read(lambda s, x: jnp.exp(s * x), SCALE, X)
    assert isinstance(value.degree, Unknown)
    assert value.degree.site.equation.primitive.name == "exp"


def test_integers_of_scaled_numbers_are_unknown():
    def fun(s, x):
        return (s * x).astype(jnp.int32).astype(jnp.float32), jnp.argmax(s * x)

    _, (truncated, largest) = read(fun, SCALE, X)
    assert isinstance(truncated.degree, Unknown)
    assert largest.degree == ZERO


def test_zero_has_any_degree():
    _, (zero,) = read(lambda s, x: jnp.zeros(3), SCALE, X)
    assert zero.degree is ANY


def test_results_of_one_operation_on_several_arrays_have_degrees_of_their_own():
    """Some versions of JAX sum a whole tree over devices in one operation."""

    def fun(s, x):
        return lax.psum((s * x, x, s * s * x), "devices")

    program = jax.make_jaxpr(fun, axis_env=[("devices", 2)])(SCALE, X)
    flow = Flow([x.aval for x in opened(program).jaxpr.invars], [0], frozenset([0]))
    values = walk(program, flow.inputs, flow)
    assert [dict(x.degree).get(("scale", 0), 0) for x in values] == [1, 0, 2]


def test_scales_of_two_states_are_two():
    def fun(s, t, x):
        return s * x / t, s * x / s, t * x

    _, values = read(fun, SCALE, SCALE, X, scales=(0, 1))
    degrees = [dict(value.degree) for value in values]
    assert degrees == [{("scale", 0): 1, ("scale", 1): -1}, {}, {("scale", 1): 1}]


def test_what_is_computed_from_the_scale_alone_is_a_scale_of_its_own():
    def fun(s, x):
        lower = jnp.minimum(s, 1024.0)
        power = jnp.exp2(jnp.floor(jnp.log2(s)))
        lowest = jnp.minimum(s, 512.0)
        return lower * x / lower, lower * x / s, power * x, lower * x / lowest

    _, (right, wrong, other, another) = read(fun, SCALE, X)
    assert right.degree == ZERO
    assert len(wrong.degree) == 2
    assert len(other.degree) == 1
    assert len(another.degree) == 2


def test_dependence_is_by_data():
    def fun(s, x, y):
        return (
            x + 1,
            jnp.where(x > 0, y, 0),
            jnp.argmax(x).astype(jnp.float32) * y,
            x @ y,
        )

    _, values = read(fun, SCALE, X, X)
    assert [value.depends for value in values] == [0b10, 0b100, 0b110, 0b110]
    assert [value.follows for value in values] == [0b10, 0b100, 0b100, 0]


# Skips.


def skippable(fun):
    """A program with the decision of a wrapper in it, as `jls._step` makes it."""

    def program(s, x, y):
        with jax.named_scope(UPDATE), jax.named_scope(DECISION):
            is_finite = jnp.all(jnp.isfinite(x)) & jnp.all(jnp.isfinite(y))
        return fun(is_finite, x, y)

    return program


def half(x):
    return x.astype(jnp.float16)


# Functions of the decision and of two inputs of which the first stays.
STAYS = {
    "select": lambda ok, x, y: jnp.where(ok, x + y, x),
    "cond": lambda ok, x, y: lax.cond(ok, lambda: x + y, lambda: x),
    "scalar cond": lambda ok, x, y: lax.cond(ok & (y[0] > 0), lambda: y, lambda: x),
    "not": lambda ok, x, y: jnp.where(~ok, x, y),
    "or": lambda ok, x, y: jnp.where(ok | False, y, x),
    "added -0.0": lambda ok, x, y: x + jnp.where(ok, y, -0.0),
    "a full array of -0.0": lambda ok, x, y: x + jnp.where(ok, y, jnp.full(6, -0.0)),
    "times 1": lambda ok, x, y: x * jnp.where(ok, y, 1.0),
    "cast and back": lambda ok, x, y: jnp.where(
        ok, half(y), half(x).astype(jnp.float32).astype(jnp.float16)
    ),
    "widened": lambda ok, x, y: jnp.where(ok, y, x).astype(jnp.float32),
    "reshaped": lambda ok, x, y: jnp.where(ok, y, x).reshape(2, 3).reshape(6),
    "jit": lambda ok, x, y: jax.jit(lambda ok: jnp.where(ok, y, x))(ok),
    "scan": lambda ok, x, y: lax.scan(
        lambda c, z: (jnp.where(ok, c + z, c), ()), x, jnp.ones(3)
    )[0],
    "platform": lambda ok, x, y: lax.platform_dependent(
        x, y, cpu=lambda x, y: jnp.where(ok, y, x), default=lambda x, y: x
    ),
}
MOVES_ON = {
    "added": lambda ok, x, y: x + 1,
    "added +0.0, which turns -0.0 over": lambda ok, x, y: x + jnp.where(ok, y, 0.0),
    "the other": lambda ok, x, y: jnp.where(ok, x, y),
    "decayed": lambda ok, x, y: jnp.where(ok, y, x) * 0.99,
    "inverted": lambda ok, x, y: 1 / jnp.where(ok, y, x),
    "taken from 0": lambda ok, x, y: 0 - jnp.where(ok, y, x),
    "its first element": lambda ok, x, y: jnp.full(6, jnp.where(ok, y, x)[0]),
    "its maximum": lambda ok, x, y: jnp.full(6, jnp.max(jnp.where(ok, y, x))),
    "turned": lambda ok, x, y: jnp.where(ok, y, x)[::-1],
    "one round of a scan": lambda ok, x, y: lax.scan(
        lambda c, z: (jnp.where(ok, c, c + z), ()), x, jnp.ones(3)
    )[0],
    "narrowed": lambda ok, x, y: half(jnp.where(ok, y, x)).astype(jnp.float32),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_is_proved(name):
    fun = STAYS[name]
    if name == "cast and back":
        program = skippable(fun)
        _, (value,) = read(
            lambda s, x, y: program(s, half(x), half(y)), SCALE, X, X, is_skipped=True
        )
        assert value.known is None  # it is a cast of the input: not the input
        return
    assert jnp.array_equal(fun(jnp.asarray(False), X, X + 1), X)
    _, (value,) = read(skippable(fun), SCALE, X, X, is_skipped=True)
    assert value.known == Same(1)
    _, (applied,) = read(skippable(fun), SCALE, X, X)
    assert applied.known is None


@pytest.mark.parametrize("name", MOVES_ON)
def test_what_moves_is_not_proved(name):
    fun = MOVES_ON[name]
    x = jnp.array([-0.0, *X[1:]]) + 1e-4 * X
    bits = functools.partial(np.ndarray.tobytes)
    if "-0.0" in name:
        x = jnp.array([-0.0, *X[1:]])
    assert bits(np.asarray(fun(jnp.asarray(False), x, X + 1))) != bits(np.asarray(x))
    _, (value,) = read(skippable(fun), SCALE, X, X, is_skipped=True)
    assert value.known != Same(1)


def test_input_1_is_not_the_number_1():
    def fun(s, x, y):
        chosen = lax.cond(y[0] > 0, lambda: x, lambda: jnp.ones(6))
        return chosen, jnp.where(y > 0, x, 1.0)

    _, values = read(fun, SCALE, X, X)
    assert [value.known for value in values] == [None, None]


def test_numbers_are_known():
    _, (value,) = read(lambda s, x: jnp.full(4, 2.5), SCALE, X)
    assert value.known == Number(2.5)


def test_what_holds_an_input_only_stores_it():
    def fun(s, x, y):
        stored = jnp.concatenate([y, x[:2]]), y.at[0].set(x[1]), x[::-1] * 1.0
        return *stored, jnp.where(y[0] > 0, x, y), jnp.where(y[0] > 0, x, 0.9 * x)

    _, values = read(fun, SCALE, X, X)
    assert [value.holds for value in values] == [0b110, 0b110, 0, 0, 0]


def test_sum_of_inputs_has_their_weights():
    def fun(s, x, y):
        return (3 * x - y) / 4, -(x + x), x * y, x + jnp.zeros(6), x.astype(jnp.float16)

    _, values = read(fun, SCALE, X, X)
    weights = [value.weights and dict(value.weights) for value in values]
    assert weights == [{1: 0.75, 2: -0.25}, {1: -2.0}, None, {1: 1.0}, {1: 1.0}]
