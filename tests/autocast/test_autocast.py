"""`jls.autocast` as a function of functions: arguments, results, mistakes, the log."""

import inspect
import logging

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from reading import off, products
from shared import assert_identical

import jls

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1, jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


# The function.


@pytest.mark.parametrize("dtype", [jnp.float32, "float32", np.float32])
def test_float32_casts_nothing(dtype):
    cast = jls.autocast(loss, dtype)
    assert_identical(jax.jit(cast)(W, X), jax.jit(loss)(W, X))
    assert inspect.signature(cast) == inspect.signature(loss)


def squares(w):
    with jax.named_scope("square"):
        return w @ w


def of_a_scan(fun):
    return lambda w: lax.scan(lambda w, _: (fun(w), None), w, length=2)[0]


INSIDE = {
    "float32": jls.autocast(squares, jnp.float32),
    "keep": jls.autocast(lambda w: squares(w) @ w, jnp.float16, keep="square"),
    "in a scan": of_a_scan(jls.autocast(squares, jnp.float32)),
    "with a checkpoint": jax.checkpoint(jls.autocast(squares, jnp.float32)),
}


@pytest.mark.parametrize("around", ["forwards", "gradient outside", "gradient inside"])
@pytest.mark.parametrize("name", INSIDE)
def test_what_an_autocast_inside_keeps_stays_float32(name, around):
    def fun(w):
        return jnp.sum(INSIDE[name](w) @ w)

    made = {
        "forwards": jls.autocast(fun, jnp.float16),
        "gradient outside": jax.grad(jls.autocast(fun, jnp.float16)),
        "gradient inside": jls.autocast(jax.grad(fun), jnp.float16),
    }[around]
    found = [x.operands[0] for x in products(made, W)]
    count = 1 if around == "forwards" else 3
    assert found.count("float32") == count
    assert found.count("float16") == count * (1 + (name == "keep"))


def test_a_function_that_is_kept_whole_by_an_autocast_inside_is_warned_of():
    with pytest.warns(jls.JlsWarning, match="1 by an autocast inside. Leave one of"):
        jls.autocast(INSIDE["float32"], jnp.float16)(W)


@pytest.mark.parametrize("dtype", ["float16", jnp.float16, jnp.dtype("float16")])
def test_a_dtype_may_be_a_name(dtype):
    assert_identical(jls.autocast(loss, dtype)(W, X), jls.autocast(loss, "half")(W, X))


def test_name_signature_and_docstring_are_those_of_the_function():
    def fun(params, batch, *, train=True):
        """Computes."""

    cast = jls.autocast(fun, jnp.float16)
    assert inspect.signature(cast) == inspect.signature(fun)
    assert (cast.__name__, cast.__doc__) == ("fun", "Computes.")


def test_static_and_keyword_arguments_are_as_they_are():
    def fun(params, x, act, *, train, scale=2.0):
        assert (train, scale) == (True, 2.0)
        assert isinstance(params["depth"], int)
        for _ in range(params["depth"]):
            x = act(x @ params["w"])
        return {"y": x, "name": "model", "none": None, "act": act}

    params = {"w": W, "depth": 2}
    result = jls.autocast(fun, jnp.float16)(params, X, jnp.tanh, train=True)
    assert (result["name"], result["none"], result["act"]) == ("model", None, jnp.tanh)
    assert result["y"].dtype == jnp.float32


def test_aux_is_float32():
    def fun(w, x):
        hidden = x @ w
        return jnp.mean(hidden @ w), hidden

    (value, hidden), _ = jax.value_and_grad(
        jls.autocast(fun, jnp.float16), has_aux=True
    )(W, X)
    assert value.dtype == hidden.dtype == jnp.float32


def test_one_trace_of_the_python_in_each_trace_and_none_between_steps():
    @chex.assert_max_traces(1)
    def counted(w, x):
        return loss(w, x)

    step = jax.jit(jax.value_and_grad(jls.autocast(counted, jnp.float16)))
    for _ in range(3):
        step(W, X)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f),
        lambda f: jax.vmap(jax.grad(f), (None, 0)),
        lambda f: jax.hessian(f),
        lambda f: jax.jacfwd(f),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x))[1],
        lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
        lambda f: lambda w, x: jax.jit(f).lower(w, x).compile()(w, x),
    ],
)
def test_transformations_go_around_it(transform):
    w = jnp.asarray(np.random.RandomState(0).randn(8, 8) * 0.3, jnp.float32)
    plain = transform(loss)(w, X)
    cast = transform(jls.autocast(loss, jnp.bfloat16))(w, X)
    assert jax.tree.map(jnp.shape, cast) == jax.tree.map(jnp.shape, plain)
    assert off(cast, plain) < 0.05


def test_it_can_be_exported_with_a_symbolic_shape():
    def fun(w, x):
        tokens = jnp.exp(-lax.conv(x[None], w[:, :, None], (1,), "SAME"))[0].T
        mixed = jax.nn.softmax((tokens @ w) @ tokens.T) @ tokens
        mixed = jnp.tanh(mixed + jnp.mean(mixed, axis=0, keepdims=True))
        return jnp.mean((mixed @ w).reshape(-1) ** 2)

    w, x = jnp.cos(jnp.arange(64.0).reshape(8, 8)), jnp.sin(jnp.arange(32.0))
    x = x.reshape(8, 4)
    shape = jax.export.symbolic_shape("8, batch")
    symbolic = jax.ShapeDtypeStruct(shape, jnp.float32)
    cast = jls.autocast(fun, jnp.float16)
    exported = jax.export.export(jax.jit(jax.grad(cast)))(w, symbolic)
    assert_identical(exported.call(w, x), jax.jit(jax.grad(cast))(w, x))


def test_it_can_be_exported_for_other_platforms():
    cast = jax.jit(jax.grad(jls.autocast(loss, jnp.bfloat16)))
    exported = jax.export.export(cast, platforms=("cuda", "tpu", "cpu"))(W, X)
    assert_identical(
        jax.export.deserialize(exported.serialize()).call(W, X), cast(W, X)
    )


def test_it_is_bitwise_the_same_twice():
    cast = jax.jit(jax.value_and_grad(jls.autocast(loss, jnp.float16)))
    assert_identical(cast(W, X), cast(W, X))


def test_it_works_without_jit_and_with_debug_nans():
    cast = jax.value_and_grad(jls.autocast(loss, jnp.float16))
    with jax.disable_jit():
        without = cast(W, X)
    with jax.debug_nans(True):
        assert off(cast(W, X), without) < 1e-3


def test_effects_happen_once(capfd):
    def fun(w, x):
        y = x @ w
        jax.debug.print("seen {}", y[0, 0].dtype == jnp.float32)
        return jnp.sum(y)

    jax.block_until_ready(jax.jit(jls.autocast(fun, jnp.float16))(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1


def test_checkify_sees_into_it():
    from jax.experimental import checkify

    def fun(w, x):
        return jnp.sum(jnp.log(x @ w))

    cast = checkify.checkify(jls.autocast(fun, jnp.float16), checkify.float_checks)
    error, _ = jax.jit(cast)(-W, X)
    assert "nan" in error.get()


def test_parameters_that_come_in_half_give_gradients_in_half():
    half = W.astype(jnp.float16)
    grads = jax.grad(jls.autocast(lambda w, x: loss(w.astype(x.dtype), x), "float16"))(
        half, X
    )
    assert grads.dtype == jnp.float16


def test_closed_over_arrays_are_cast_and_differentiated():
    def outer(w):
        return jls.autocast(lambda x: loss(w, x), jnp.float16)(X)

    assert off(jax.jit(jax.grad(outer))(W), jax.grad(loss)(W, X)) < 1e-2


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded_arrays_stay_sharded(explicit):
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, PartitionSpec("d")))
        w = jax.device_put(W, NamedSharding(mesh, PartitionSpec()))
        cast = jax.jit(jls.autocast(lambda w, x: jnp.tanh(x @ w), jnp.bfloat16))
        assert cast(w, x).sharding.is_equivalent_to(x.sharding, 2)
        grads = jax.jit(jax.grad(jls.autocast(loss, jnp.bfloat16)))(w, x)
        assert off(jax.device_get(grads), jax.grad(loss)(W, jnp.ones((16, 8)))) < 0.02


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, "float16"), TypeError, "^fun must be a function, got int 3"),
        (
            ("cuda", "float16"),
            TypeError,
            "^fun must be .* is a function, no context",
        ),
        (
            (jnp.float16,),
            TypeError,
            "^fun must be .* got jnp.float16. .* is a function, no context",
        ),
        ((loss, None), TypeError, "^dtype must be given: jls.autocast"),
        ((loss, "halb"), TypeError, "^dtype must be jnp.float16, .*, got str 'halb'"),
        ((loss, X), TypeError, r"^dtype must be jnp.float16, .* got float32\[4,8\]"),
        ((loss, "float64"), ValueError, "^dtype must be .*, got str 'float64'"),
        ((loss, "int8"), ValueError, "^dtype must be .*, got str 'int8'"),
    ],
)
def test_a_bad_argument_is_an_error_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        jls.autocast(*arguments)


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (3, TypeError, "^keep must be a regular expression, a function .*, got int 3"),
        ("(", ValueError, r"^keep must be a regular expression, got '\('"),
        ("", ValueError, r'^keep must be .*, got ""\. It keeps everything: leave it'),
    ],
)
def test_a_bad_keep_is_an_error_at_once(keep, error, message):
    with pytest.raises(error, match=message):
        jls.autocast(loss, "float16", keep=keep)
    with pytest.raises(error, match=message):
        jls.train_step(loss, compute_dtype="float16", keep=keep)


def test_a_keep_that_finds_nothing_lists_the_scopes_that_are_there():
    def fun(w, x):
        with jax.named_scope("encoder"):
            return lax.cond(
                x[0, 0] > 0, jax.named_scope("branch")(jnp.tanh), jnp.sin, x @ w
            )

    cast = jls.autocast(fun, jnp.float16, keep="decoder")
    with pytest.raises(
        ValueError, match=r"got 'decoder'\. There are: .*encoder/branch"
    ):
        cast(W, X)
    jls.autocast(fun, jnp.float16, keep="branch")(W, X)
    with pytest.raises(ValueError, match=r"There are: no scopes at all\."):
        jls.autocast(loss, jnp.float16, keep="decoder")(W, X)


def test_keep_finds_a_scope_as_the_user_wrote_it():
    def fun(w, x):
        x = jax.named_scope("q(1)")(jnp.matmul)(x, w)
        return jnp.sum(jax.named_scope("k(1)")(jnp.matmul)(x, w))

    for keep in ("q", r"^q\(1\)$", lambda place: place.module == "q(1)"):
        found = products(jls.autocast(fun, "float16", keep=keep), W, X)
        assert [x.results for x in found] == [("float32",), ("float16",)]
    with pytest.raises(ValueError, match=r"There are: q\(1\), k\(1\)\."):
        jls.autocast(fun, "float16", keep="^1$")(W, X)


def test_what_keep_raises_is_raised():
    def keep(place):
        raise KeyError(place.operation)

    with pytest.raises(KeyError):
        jls.autocast(loss, jnp.float16, keep=keep)(W, X)


def test_a_function_keep_that_keeps_nothing_lists_the_functions():
    with pytest.warns(jls.JlsWarning, match="keep found no operation.*are: loss"):
        jls.autocast(loss, "float16", keep=lambda place: place.function == "los")(W, X)


@pytest.mark.filterwarnings("ignore::jls.JlsWarning")  # of no product
@pytest.mark.parametrize("fun", [jnp.sum, lambda x: jnp.sum(x @ x.T)])
def test_constant_results_are_arrays_of_their_types(fun):
    """JAX itself has numbers of its own for them, which are no arrays."""

    def constants(x):
        numbers = jnp.int32(3), jnp.asarray(2), jnp.float32(1.5), jnp.asarray(0.5)
        return fun(x), *numbers, jnp.ones(2)

    results = jls.autocast(constants, "bfloat16")(X)  # not jitted
    for one, other in zip(results[1:], constants(X)[1:], strict=True):
        assert isinstance(one, jax.Array)
        assert one.weak_type == other.weak_type
        assert_identical(one, other)


def test_no_product_is_a_warning_that_says_why():
    with pytest.warns(jls.JlsWarning, match="no product to cast: 1 inner. It casts"):
        jls.autocast(lambda x: jnp.vdot(x, x), jnp.float16)(X)


def test_arrays_in_another_half_are_a_warning():
    x = X.astype(jnp.bfloat16)
    with pytest.warns(jls.JlsWarning, match="float16 got arrays of bfloat16") as seen:
        jls.autocast(lambda w, x: loss(w, x.astype(w.dtype)), jnp.float16)(W, x)
    assert len(seen) == 1


def test_the_update_of_a_wrapper_inside_is_an_error():
    optimizer = jls.loss_scaled(optax.sgd(0.1))

    def step(w, state):
        grads = jax.grad(loss)(w, X)
        return optimizer.update(grads, state, w)

    with pytest.raises(ValueError, match="Put it around the loss"):
        jls.autocast(step, jnp.float16)(W, optimizer.init(W))


@pytest.mark.parametrize(
    "read",
    [
        float,
        bool,
        np.asarray,
        lambda value: list(range(10))[value.astype(int)],
        lambda value: X[value < X],
    ],
    ids=["float", "bool", "array", "index", "mask"],
)
def test_a_function_that_reads_values_at_the_host_gets_a_note(read):
    with pytest.raises((TypeError, IndexError)) as error:
        jls.autocast(lambda w, x: read(loss(w, x)), jnp.float16)(W, X)
    assert "pass only the part that can be jitted" in "".join(error.value.__notes__)


def test_the_log_gets_one_line(caplog):
    def fun(w, x):
        with jax.named_scope("exact"):
            x = x @ w
        y = lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]
        return jnp.vdot(x, x) + jnp.sum(y)

    with caplog.at_level(logging.INFO, logger="jls"):
        jls.autocast(fun, jnp.float16, keep="exact")(W, X)
    (record,) = caplog.records
    line = "float16: 72.7 % of the multiplications; kept: "
    assert record.getMessage().startswith(line)
    assert {"1 inner", "1 by keep"} == set(record.getMessage()[len(line) :].split(", "))


# Tools.


def test_why_names_the_line_of_the_user():
    def bad(w, x):
        y = x @ w
        return jnp.sum(jnp.log(y - y))

    made = jls.why(jax.grad(jls.autocast(bad, jnp.bfloat16)), W, X)
    assert {birth.place.function for birth in made.births} == {"bad"}
    assert "jls" not in made.births[0].place.module


# Libraries.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = self.first

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


def model_loss(model, x):
    return jnp.mean(model(x) ** 2)


def noise():
    return jnp.asarray(np.random.RandomState(0).randn(16, 8), jnp.float32)


@pytest.mark.standard_promotion
def test_an_nnx_model_is_changed_in_place_as_without_a_cast():
    plain, cast = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    with jax.numpy_rank_promotion("allow"):
        value = model_loss(plain, noise())
        ours = jls.autocast(model_loss, jnp.bfloat16)(cast, noise())
    assert off(ours, value) < 0.02
    assert cast.last is cast.first
    assert off(cast.norm.mean.get_value(), plain.norm.mean.get_value()) < 0.02
    counts = [
        [x for x in jax.tree.leaves(nnx.state(model)) if x.dtype == jnp.uint32]
        for model in (plain, cast)
    ]
    assert_identical(*counts)
    assert any(int(count) for count in counts[0])


@pytest.mark.standard_promotion
def test_gradients_of_nnx_and_of_jls_go_around_it():
    def gradients(differentiate, *state):
        with jax.numpy_rank_promotion("allow"):
            model = Model(nnx.Rngs(0))
            return nnx.jit(differentiate)(*state, model, noise())[1]

    cast = jls.autocast(model_loss, jnp.bfloat16)
    plain = gradients(nnx.value_and_grad(model_loss))
    assert off(gradients(nnx.value_and_grad(cast)), plain) < 0.05
    scaled = jls.value_and_grad(cast, transform=nnx.value_and_grad)
    assert off(gradients(scaled, jls.static(64.0).init()), plain) < 0.05


@pytest.mark.standard_promotion
def test_what_an_nnx_model_sows_reaches_the_caller():
    class Sowing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls.set_value(self.calls.get_value() + 1)
            self.seen = nnx.Variable(self.linear(x))
            return self.seen.get_value()

    model = Sowing()
    with jax.numpy_rank_promotion("allow"):
        result = jls.autocast(model, jnp.bfloat16)(X)
    assert int(model.calls.get_value()) == 1
    assert_identical(model.seen.get_value(), result)


@pytest.mark.standard_promotion
def test_to_change_an_nnx_model_that_is_closed_over_is_an_error():
    model = Model(nnx.Rngs(0))
    cast = jls.autocast(lambda x: model_loss(model, x), jnp.bfloat16)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(ValueError, match="Pass it as an argument"),
    ):
        cast(noise())


@pytest.mark.standard_promotion
def test_models_of_other_libraries_are_cast():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.LayerNorm()(nn.relu(nn.Dense(8)(x))))

    x, key = noise(), jax.random.key(0)
    linen = Linen()
    haiku = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))
    mlp = eqx.nn.MLP(8, 8, 8, 1, key=key)
    with jax.numpy_rank_promotion("allow"):
        for apply, params in (
            (linen.apply, linen.init(key, x)),
            (haiku.apply, haiku.init(key, x)),
        ):
            cast = jls.autocast(apply, jnp.float16)
            assert {d for p in products(cast, params, x) for d in p.operands} == {
                "float16"
            }
            assert off(cast(params, x), apply(params, x)) < 1e-2
        kept = jls.autocast(linen.apply, jnp.float16, keep="Dense_1")
        found = products(kept, linen.init(key, x), x)
        assert [p.results[0] for p in found] == ["float32", "float16"]

        def of_equinox(model, x):
            return jnp.mean(jax.vmap(model)(x) ** 2)

        plain = eqx.filter_value_and_grad(of_equinox)(mlp, x)
        ours = eqx.filter_value_and_grad(jls.autocast(of_equinox, "float16"))(mlp, x)
    leaves = [eqx.filter(tree, eqx.is_inexact_array) for tree in (ours, plain)]
    assert off(*leaves) < 1e-2


class Router(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)


class Routed(nnx.Module):
    def __init__(self):
        self.router, self.linear = Router(), nnx.Linear(8, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.linear(self.router(x))


class EquinoxRouter(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)


def of_equinox(x):
    keys = jax.random.split(jax.random.key(0))
    router = EquinoxRouter(eqx.nn.Linear(8, 8, key=keys[0]))
    return jax.vmap(eqx.nn.Linear(8, 8, key=keys[1]))(jax.vmap(router)(x))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("model", [lambda x: Routed()(x), of_equinox])
def test_keep_finds_the_modules_of_nnx_and_equinox_by_file_and_function(model):
    def keep(place):
        return place.file == __file__ and "Router" in place.function

    with jax.numpy_rank_promotion("allow"):
        found = products(jls.autocast(model, jnp.float16, keep=keep), X)
    assert [x.results[0] for x in found] == ["float32", "float16"]


def test_scalars_and_keys_that_it_closes_over():
    key = jax.random.key(0)

    def noise(w):
        return jax.random.normal(key, X.shape) @ w

    assert jls.autocast(noise, jnp.float16)(W).dtype == jnp.float32

    @jax.jit
    def divided(t):
        return jls.autocast(lambda w: (X @ w) / t, jnp.float16)(W)

    assert divided(2.0).dtype == jnp.float32
