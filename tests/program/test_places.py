"""Places: from an equation of a program to a line of this file."""

import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

from jls._program.places import (
    Place,
    _rank_of,
    is_differentiated,
    is_gradient_in_loss,
    is_recomputed,
    is_transposed,
    modules_in_loss,
    modules_of,
    place_of,
)
from jls._program.walk import walk
from jls._tree import select

X = jnp.arange(1.0, 4.0)


class Places:
    """The places of one operation, or what `read` says of each."""

    def __init__(self, operation, read=place_of):
        self.operation, self.read, self.found = operation, read, []

    def of_constant(self, value):
        return None

    def results_of(self, site, operands):
        if site.equation.primitive.name == self.operation:
            self.found.append(self.read(site))
        return [None] * len(site.equation.outvars)

    def enter_call(self, site, operands):
        pass

    def call_results(self, site, results):
        return results

    def join(self, site, one, other):
        return None

    def carry(self, site, before, after):
        return before

    def slice(self, value):
        return value

    stack = slice

    def branch(self, index):
        return None


def places(operation, fun, *args, read=place_of):
    program = jax.make_jaxpr(fun)(*args)
    question = Places(operation, read)
    walk(program, [None] * len(jax.tree.leaves(args)), question)
    return question.found


def line_of(text):
    """The number of the one line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, x in enumerate(lines, 1) if x.endswith(f"# {text}"))
    return number


def rooted(x):
    return jnp.sqrt(x).sum()  # the root


@jax.jit
def jitted(x):
    return rooted(x)


def in_a_scan(x):
    def body(carry, z):
        return carry + jnp.exp(z), ()  # the exponential

    return lax.scan(body, 0.0, x)[0]


@pytest.mark.parametrize("fun", [rooted, jitted, jax.checkpoint(rooted)])
def test_place_is_the_line_of_the_user(fun):
    (place,) = places("sqrt", fun, X)
    assert place.file == __file__
    assert place.line == line_of("the root")
    assert place.function == "rooted"
    assert not place.is_backward


def test_place_in_a_scan():
    (place,) = places("exp", in_a_scan, X)
    assert (place.line, place.function) == (line_of("the exponential"), "body")


def test_backward_is_said():
    found = places("mul", jax.grad(lambda x: rooted(x) * 3.0), X)
    assert any(place.is_backward for place in found)


def test_function_of_jax_that_is_called_twice_has_two_lines():
    """Its program is one, with the lines of the first call in some versions of JAX."""

    def twice(x):
        first = jnp.where(x > 1, x, 0.0)  # first where
        return jnp.where(first > 2, first, 1.0)  # second where

    lines = [place.line for place in places("select_n", twice, X)]
    assert lines == [line_of("first where"), line_of("second where")]


def test_line_of_a_library_is_that_of_who_calls_it():
    def clips(grads):
        clip = optax.clip(1.0)
        return clip.update(grads, clip.init(grads))[0]  # clipped

    (place,) = places("clamp", clips, X) or places("min", clips, X)
    assert (place.file, place.line) == (__file__, line_of("clipped"))


LIBRARY = """
import functools
import jax, jax.numpy as jnp
from flax import nnx

def inverse(x):
    return jnp.sqrt(x) / jnp.sum(x)

jitted = jax.jit(inverse)

@functools.partial(jax.jit, static_argnums=0)
def mapped(fun, x):
    return fun(x)

@jax.custom_vjp
def ruled(x):
    return jnp.sqrt(x)

ruled.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g / jnp.sqrt(x),))

def renamed(fun):
    def wrapped(x):
        return fun(x) + 0
    wrapped.__name__ = fun.__name__
    return jax.jit(wrapped)

def merged(graph):
    return lambda state, x: nnx.merge(graph, state)(x)
"""


@pytest.fixture(params=["site-packages", "dist-packages", "editable"])
def library(request, tmp_path, monkeypatch):
    """A module in one of these folders."""
    folder = tmp_path / request.param
    folder.mkdir()
    folder.joinpath("fakelib.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("fakelib")
    del sys.modules["fakelib"]


def test_what_is_installed_is_a_library(library):
    """It is the user's own where it is installed in editable mode."""

    def calls(x):
        first = library.inverse(x)  # called
        second = library.jitted(x)  # called jitted
        third = library.jitted(x)  # called jitted again
        fourth = library.ruled(x)  # called with a rule
        return first, second, third, fourth

    library.jitted(X)
    found = places("sqrt", calls, X)
    if "editable" in library.__file__:
        assert {x.file for x in found} == {library.__file__}
        return
    called = ["called", "called jitted", "called jitted again", "called with a rule"]
    assert [x.line for x in found] == list(map(line_of, called))
    assert {(x.file, x.function) for x in found} == {(__file__, "calls")}
    grads = jax.grad(lambda x: library.ruled(x).sum())  # called backward
    (*_, backward) = places("sqrt", grads, X)
    assert (backward.line, backward.is_backward) == (line_of("called backward"), True)


def test_a_function_of_the_user_that_a_library_calls_is_the_users(library):
    def passes(x):
        return library.mapped(rooted, x) + library.renamed(rooted)(x)

    assert [x.line for x in places("sqrt", passes, X)] == [line_of("the root")] * 2


def test_a_program_that_is_all_of_libraries_has_a_line_of_theirs(library):
    """Rather of one that is not known: a training package that is installed."""
    graph, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    (place,) = places("dot_general", library.merged(graph), state, X)
    # Before 0.9 JAX's tracebacks go on to the script.
    assert place.file in (library.__file__, __file__)


@pytest.mark.parametrize(
    ("file", "function", "is_the_users"),
    [
        ("<stdin>", "f", True),
        ("<ipython-input-1-0a>", "<module>", True),
        ("<command-12>", "loss", True),
        ("<doctest jls[0]>", "loss", True),
        ("<string>", "loss", True),
        ("<string>", "__create_fn__.<locals>.__init__", False),
        ("<frozen runpy>", "_run_code", False),
        ("<attrs generated init>", "Model.__init__", False),
        (functools.__file__, "reduce", False),
        (pytest.__file__, "main", False),
        ("/home/me/my-packages/model.py", "loss", True),
        (__file__, "loss", True),
    ],
)
def test_whose_a_line_is(file, function, is_the_users):
    assert (_rank_of(file, function) == 0) == is_the_users


def test_lines_of_jls_are_never_named():
    def selects(x):
        return select(x[0] > 0, x, 2 * x)  # selected

    (place,) = places("select_n", selects, X)
    assert place.line == line_of("selected")


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.exp(nn.Dense(3)(x))


def test_modules_of_linen_are_named():
    model = Dense()
    params = model.init(jax.random.key(0), X)
    found = places("dot_general", model.apply, params, X)
    assert [place.module for place in found] == ["Dense/Dense_0"]
    grad = jax.grad(lambda params: model.apply(params, X).sum())
    assert {place.module for place in places("dot_general", grad, params)} == {
        "Dense/Dense_0"
    }


def test_scopes_of_the_user_are_named_and_those_of_jls_are_not():
    def fun(x):
        with jax.named_scope("block"), jax.named_scope("jls_update"):
            return jnp.exp(x)

    (place,) = places("exp", fun, X)
    assert place.module == "block"


# Names that a user may give a scope, and JAX gives its transformations or its own.
OF_THE_USER = [
    "head(1)",
    "jvp(1)",
    "transpose(jvp(a/b))",
    "vmap()",
    "f(a)/g(b)",
    "checkpoint_2",
    "rematted_computations",
    ")/(",
]


@pytest.mark.parametrize("name", OF_THE_USER)
def test_a_scope_is_named_as_the_user_wrote_it(name):
    fun = in_scopes("out", name, "in")(jax.checkpoint)
    vmapped = jax.vmap(lambda x: fun(x[None]))
    for program in (fun, jax.jit(fun), jax.grad(fun), vmapped, jax.grad(jax.jit(fun))):
        assert {x.module for x in places("sin", program, X)} == {f"out/{name}/in"}
    for read in (is_differentiated, is_transposed, is_gradient_in_loss, is_recomputed):
        assert not any(places("sin", fun, X, read=read))
    assert any(x.is_backward for x in places("mul", jax.grad(fun), X))
    remat = in_scopes("out", name, None, "in")(jax.checkpoint)
    for operation in ("sin", "cos"):
        for place in places(operation, jax.grad(remat), X):
            assert place.module == f"out/{name}/in"


def test_two_scopes_that_differ_before_a_parenthesis_are_two():
    def fun(x):
        q = jax.named_scope("q(1)")(jnp.sin)(x)
        return q + jax.named_scope("k(1)")(jnp.sin)(x)

    assert [x.module for x in places("sin", fun, X)] == ["q(1)", "k(1)"]


def test_a_mark_on_a_product_is_no_border_of_the_loss():
    def fun(x):
        kept = jax.named_scope("jls_kept")(jax.named_scope("in")(jnp.sin))
        body = scanned(kept)
        with jax.named_scope("outside"), jax.named_scope("jls_autocast"):
            return jax.named_scope("layers")(body)(x)

    assert places("sin", fun, X, read=modules_in_loss) == ["layers/in"]
    assert places("sin", fun, X, read=modules_of) == ["outside/layers/in"]


def in_scopes(*names):
    """Each name is a scope; None is a checkpoint of what is inside of it."""

    def wrapped(checkpoint):
        def fun(x):
            return jnp.sin(jnp.sin(x))

        for name in reversed(names):
            if name == "scan":
                fun = scanned(fun)
            elif name == "jit":
                fun = jax.jit(fun)
            else:
                fun = jax.named_scope(name)(fun) if name else checkpoint(fun)
        return lambda x: fun(x).sum()

    return wrapped


def scanned(fun):
    return lambda x: lax.scan(lambda x, _: (fun(x), ()), x, length=2)[0]


GRADS = {
    "grad": jax.grad,
    "jitted": lambda fun: jax.jit(jax.grad(jax.jit(fun))),
    "forward": lambda fun: lambda x: jax.jvp(fun, (x,), (x,)),
}


@pytest.mark.parametrize("gradient", GRADS)
@pytest.mark.parametrize(
    "names",
    [
        ("layer", None),
        ("layer", None, "in"),
        ("out", "layer", None, "in"),
        ("layer", "layer", None, "in"),  # a module that has the name of its parent
        ("layer", None, "layer"),
        ("out", None, "layer", None, "in"),
        ("out", None, "layer", "layer", None, "in"),
        ("out", "scan", "layer", None, "in"),
        ("out", "scan", None, "layer", None, "in"),
        ("out", "jit", "layer", None, "in"),
    ],
)
def test_scopes_around_a_checkpoint_are_named_once(names, gradient):
    fun, modules = in_scopes(*names), []
    for checkpoint in (jax.checkpoint, lambda fun: fun):
        program = GRADS[gradient](fun(checkpoint))
        found = {x.module for name in ("sin", "cos") for x in places(name, program, X)}
        modules.append(found)
    assert modules[0] == modules[1]


def test_nnx_modules_are_read_through():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def fun(state):
        return nnx.merge(graph, state)(X)  # the linear layer

    (place,) = places("dot_general", fun, state)
    assert place.line == line_of("the linear layer")


def test_what_is_not_known_is_empty():
    program = jax.make_jaxpr(jnp.sin)(1.0)
    question = Places("sin")
    equation = program.jaxpr.eqns[0]
    bare = equation.replace(source_info=type("Nothing", (), {})())
    walk(program.jaxpr.replace(eqns=[bare]), [None], question)
    assert question.found == [Place("sin")]
    assert str(question.found[0]) == "sin"


def test_text_has_the_name_of_the_file_alone():
    (place,) = places("sqrt", rooted, X)
    assert str(place) == f"sqrt in rooted ({Path(__file__).name}:{place.line})"
