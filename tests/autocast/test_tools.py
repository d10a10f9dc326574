"""The tools that explain a step see through `jls.autocast`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jls
from jls._program.frames import Frame
from jls._program.places import place_of

X = jnp.asarray(np.random.RandomState(0).randn(8, 4), jnp.float32)
W = jnp.asarray(np.random.RandomState(1).randn(4, 4) * 0.3, jnp.float32)
OPTIMIZER = jls.loss_scaled(optax.sgd(0.1), jls.static(64.0))


def loss_fn(w, x):
    with jax.named_scope("layer"):
        hidden = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.mean((hidden @ w) ** 2)


def bad_forwards(w, x):
    with jax.named_scope("layer"):
        hidden = jnp.log(jnp.abs(x @ w) - 1e4)  # here
    return jnp.mean(hidden @ w)


def bad_backwards(w, x):
    with jax.named_scope("layer"):
        size = jnp.sqrt(jnp.sum((x @ w) ** 2) * 0)  # here
    return size + jnp.mean(x @ w)


def step_of(loss):
    step = jls.train_step(loss, OPTIMIZER, compute_dtype=jnp.float16)
    return step, (W, OPTIMIZER.init(W), jnp.abs(X))


WAYS = {
    "around a loss": lambda loss: (jls.autocast(loss, jnp.float16), (W, jnp.abs(X))),
    "in a gradient": lambda loss: (
        jax.grad(jls.autocast(loss, jnp.float16)),
        (W, jnp.abs(X)),
    ),
    "around a gradient": lambda loss: (
        jls.autocast(jax.grad(loss), jnp.float16),
        (W, jnp.abs(X)),
    ),
    "in a train_step": step_of,
    "in a jitted train_step": lambda loss: (
        jax.jit(step_of(loss)[0]),
        step_of(loss)[1],
    ),
}


def line_of(fun):
    code = fun.__code__
    lines = Path(code.co_filename).read_text(encoding="utf-8").splitlines()
    begin = code.co_firstlineno
    return next(n for n, x in enumerate(lines[begin:], begin + 1) if "# here" in x)


@pytest.mark.parametrize("way", WAYS)
def test_why_names_the_line_and_the_scope_of_what_is_born_forwards(way):
    fun, args = WAYS[way](bad_forwards)
    place = jls.why(fun, *args).births[0].place
    assert (place.operation, place.file) == ("log", __file__)
    assert (place.line, place.function) == (line_of(bad_forwards), "bad_forwards")
    assert (place.module, place.is_backward) == ("layer", False)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "around a loss"])
def test_why_names_the_line_and_the_direction_of_what_is_born_backwards(way):
    fun, args = WAYS[way](bad_backwards)
    place = jls.why(fun, *args).births[0].place
    assert (place.line, place.file) == (line_of(bad_backwards), __file__)
    assert (place.function, place.module) == ("bad_backwards", "layer")
    assert place.is_backward


def of_jax(w, x):
    """Of functions that JAX jits, with derivatives of its own, or calls the user's."""
    with jax.named_scope("layer"):
        hidden = jax.nn.silu(x @ w)
        hidden = jnp.where(hidden > 0, hidden, jax.nn.softplus(hidden @ w))
        hidden = jnp.clip(hidden @ w, -3.0, 3.0)
        factor = jnp.linalg.cholesky(hidden.T @ hidden + 0.1 * jnp.eye(4))
    return jnp.mean((hidden @ factor) ** 2)


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("grad", [jax.grad, lambda fun: fun], ids=["grad", "loss"])
def test_operations_inside_a_function_of_jax_have_the_line_and_scope_of_its_call(
    jit, grad
):
    other = jax.nn.silu(X), jnp.where(X > 0, X, 1.0), jnp.clip(X, -3.0, 3.0)
    del other  # what JAX has traced before has other lines
    written = jax.make_jaxpr(jit(grad(of_jax)))(W, X)
    cast = jax.make_jaxpr(jit(grad(jls.autocast(of_jax, jnp.float16))))(W, X)
    plain, ours = (
        [place_of(frame.site_of(i)) for frame, i in Frame(made).operations()]
        for made in (written, cast)
    )
    assert {(x.file, x.line) for x in ours} == {(x.file, x.line) for x in plain}
    last = max(x.line for x in plain)
    modules = {x.module for x in ours if x.line < last}
    assert modules - {"layer/layer"} == {"layer"}  # twice in what a remat recomputes


def of_few_lines(w, x):
    half = x @ w
    linear = 2 * half + x
    soft = jax.nn.softmax(jnp.sin(linear @ w))
    return jnp.sum(half @ w) + jnp.sum(jnp.cos(soft @ w))


@pytest.mark.parametrize("grad", [jax.grad, lambda fun: fun], ids=["grad", "loss"])
def test_every_cast_and_every_rule_has_a_line_of_the_function(grad):
    jax.jvp(jax.nn.softmax, (X,), (X,))  # what JAX has traced before has other lines
    made = jax.make_jaxpr(grad(jls.autocast(of_few_lines, jnp.float16)))(W, X)
    places = [place_of(frame.site_of(i)) for frame, i in Frame(made).operations()]
    assert {(x.file, x.function) for x in places} == {(__file__, "of_few_lines")}
    half, linear, soft, last = range(4)
    begin = of_few_lines.__code__.co_firstlineno + 1
    casts = {x.line - begin for x in places if x.operation == "convert_element_type"}
    assert casts == {half, soft, last}  # where a product takes or gives a value
    assert linear in {x.line - begin for x in places}


def test_what_a_rule_computes_has_the_scopes_of_its_call_once():
    @jax.custom_jvp
    def twice(y, w):
        return 2 * (y @ w)

    @twice.defjvp
    def rule(primals, tangents):
        (y, w), (dy, dw) = primals, tangents
        return twice(y, w), 2 * (dy @ w + y @ dw)

    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(twice(jnp.sin(x @ w), w))

    def pushed(w, x):
        return jax.jvp(lambda w: jls.autocast(loss, jnp.float16)(w, x), (w,), (w,))

    made = jax.make_jaxpr(pushed)(W, X)
    places = [place_of(frame.site_of(i)) for frame, i in Frame(made).operations()]
    found = {x.module for x in places if x.operation == "dot_general"}
    assert found == {"layer"}


def scanned(w, x):
    def body(carry, _):
        return jnp.sin(carry @ w), None  # here

    y = jax.lax.scan(body, x, length=2)[0]
    return jnp.mean(jnp.log1p((y @ w) ** 2))


def test_why_names_the_line_of_what_enters_a_loop_and_a_keep_that_helps():
    args = W, X.at[0, 0].set(1e6)
    why = jls.why(jls.autocast(scanned, jnp.float16), *args)
    place = why.births[0].place
    assert (place.operation, place.file) == ("convert_element_type", __file__)
    assert (place.line, place.function) == (line_of(scanned), "body")
    advice = " ".join(str(why).split())
    assert 'keep=lambda place: place.function == "body"' in advice
    kept = jls.autocast(
        scanned, jnp.float16, keep=lambda place: place.function == "body"
    )
    assert jnp.isfinite(kept(*args))


def test_calibrate_and_check_step_work_on_a_step_with_it():
    step, args = step_of(loss_fn)
    calibration = jls.calibrate(step, *args)
    assert calibration.precision is not None
    assert calibration.limited_by is not None
    assert calibration.precision.products[0][0] == "float16"
    assert "jls" not in calibration.limited_by.module
    assert calibration.limited_by.file == __file__
    check = jls.check_step(jax.jit(step), *args)
    assert check.ok, check
    assert check.precision is not None
    assert [x[0] for x in check.precision.products] == ["float16"]


def test_the_update_of_a_wrapper_inside_is_an_error_in_a_whole_step_too():
    step = jls.train_step(loss_fn, OPTIMIZER)
    for cast in (jls.autocast(step, "float16"), jls.autocast(jax.jit(step), "float16")):
        with pytest.raises(ValueError, match="Put it around the loss"):
            cast(W, OPTIMIZER.init(W), X)
