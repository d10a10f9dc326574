# SPDX-License-Identifier: Apache-2.0
"""`Calibration.keep`: what has to stay float32, of models with one block too large."""

import functools
import re
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from scaled_programs import normal

import jls
from jls._program.frames import Frame
from jls._program.places import Place, modules_of, place_of
from jls._tools.reading.keep import Unit, argument_of, keep_of

pytestmark = pytest.mark.standard_promotion

GAIN = 1e3  # twice: far beyond float16
FEATURES, LARGE = 4, 1
EIGHT = (0, 1, 2, 3, 4, 5, 10, 11)  # the numbers of the blocks
THREE = (0, 1, 10)


def gains(numbers, leaves):
    """Of each block, by which its hidden values are multiplied; and of its result."""
    inside = [GAIN if i == LARGE else 1.0 for i in numbers]
    return [
        (i, x, 1.0 if leaves else 1 / x) for i, x in zip(numbers, inside, strict=True)
    ]


def normed(x):
    mean = jnp.mean(x, -1, keepdims=True)
    centered = x - mean
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-3)


class Block(nn.Module):
    gain: float
    back: float

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(FEATURES)(normed(x)) * self.gain * self.gain
        return x + nn.Dense(FEATURES)(h) * self.back * self.back


class Linen(nn.Module):
    numbers: tuple[int, ...]
    leaves: bool

    @nn.compact
    def __call__(self, x):
        for i, *pair in gains(self.numbers, self.leaves):
            x = Block(*pair, name=f"block_{i}")(x)
        return nn.Dense(1)(normed(x))


def in_linen(numbers, leaves):
    model = Linen(numbers, leaves)
    params = model.init(jax.random.key(0), jnp.ones((4, FEATURES)))
    return model.apply, params


class HaikuBlock(hk.Module):
    def __init__(self, gain, back, name):
        super().__init__(name=name)
        self.gain, self.back = gain, back

    def __call__(self, x):
        h = hk.Linear(FEATURES)(normed(x)) * self.gain * self.gain
        return x + hk.Linear(FEATURES)(h) * self.back * self.back


class Haiku(hk.Module):
    def __call__(self, x, numbers, leaves):
        for i, *pair in gains(numbers, leaves):
            x = HaikuBlock(*pair, name=f"block_{i}")(x)
        return hk.Linear(1)(normed(x))


def in_haiku(numbers, leaves):
    model = hk.without_apply_rng(hk.transform(lambda x: Haiku()(x, numbers, leaves)))
    return model.apply, model.init(jax.random.key(0), jnp.ones((4, FEATURES)))


def in_plain(numbers, leaves):
    def apply(params, x):
        for i, gain, back in gains(numbers, leaves):
            with jax.named_scope(f"block_{i}"):
                h = normed(x) @ params["up"][i] * gain * gain
                x = x + h @ params["down"][i] * back * back
        with jax.named_scope("head"):
            return normed(x) @ params["out"]

    square = (12, FEATURES, FEATURES)
    shapes = {"up": square, "down": square, "out": (FEATURES, 1)}
    return apply, {name: normal(1, *shape) / 3 for name, shape in shapes.items()}


MODELS = {"linen": in_linen, "haiku": in_haiku, "plain": in_plain}
X = normal(5, 4, FEATURES)


def step_of(apply: Any, params: Any, dtype: Any = None, keep: Any = None) -> Any:
    def loss_fn(params, x):
        return jnp.mean((apply(params, x) - 1.0) ** 2)

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**4))
    step = jls.train_step(loss_fn, optimizer, compute_dtype=dtype, keep=keep)
    return step, (params, optimizer.init(params), X)


def model_of(library, dtype=None, leaves=False):
    return MODELS[library](EIGHT if dtype is None else THREE, leaves)


@functools.cache
def calibrated(library, dtype=None, leaves=False):
    step, args = step_of(*model_of(library, dtype, leaves), dtype=dtype)
    return jls.calibrate(step, *args)


def modules_by_dtype(step, args):
    """The modules of the forward products, of those in half and those in float32."""
    found = {False: set(), True: set()}
    for frame in Frame(jax.make_jaxpr(step)(*args)).all():
        for number, equation in enumerate(frame.jaxpr.eqns):
            site = frame.site_of(number)
            is_product = equation.primitive.name == "dot_general"
            if is_product and not place_of(site).is_backward:
                found[equation.invars[0].aval.dtype == jnp.float32].add(
                    modules_of(site)
                )
    return found.values()


def number_of(module):
    found = re.search(r"[Bb]lock_(\d+)", module)
    return int(found[1]) if found else None


@pytest.mark.parametrize(
    ("library", "dtype"), [*((x, None) for x in MODELS), ("linen", "float16")]
)
def test_block_that_overflows_is_kept_alone(library, dtype):
    found = calibrated(library, dtype)
    text = " ".join(str(found).split())
    assert ("In float16 forward values would" in text) == (dtype is None)
    assert ("values leave the range of float16 in" in text) == (dtype is not None)
    assert f'Write: keep=r"{found.keep}"' in str(found)
    model = model_of(library, dtype)
    step, args = step_of(*model, dtype="float16", keep=found.keep)
    *_, report = jax.jit(step)(*args)
    assert not report.skipped
    half, wide = modules_by_dtype(step, args)
    assert {number_of(x) for x in wide} == {LARGE}
    numbers = EIGHT if dtype is None else THREE
    assert {number_of(x) for x in half} >= {*numbers} - {LARGE}
    without, args = step_of(*model, dtype="float16")
    assert jax.jit(without)(*args)[-1].skipped


def test_cast_step_says_what_the_float32_step_says():
    step, args = step_of(*in_linen(THREE, False))
    found, cast = jls.calibrate(step, *args), calibrated("linen", "float16")
    assert found.keep == cast.keep
    note, again = found.notes[-1], "Then call jls.calibrate again for the loss scale"
    assert note.startswith("In float16 forward values would be out of range in Linen/b")
    assert again not in note
    assert cast.notes[-1].startswith("Forward values leave the range of float16 in L")
    assert cast.notes[-1].endswith(again)


def test_a_note_says_that_a_line_overflows_in_half():
    """It is what a product takes: it is rounded there."""
    found = calibrated("linen", "float16")
    assert found.notes[1].startswith("In half this line overflows: ")


def kept_in_steps(params, x):
    """A product of "a" overflows; one of "b" takes what is large for another reason."""
    with jax.named_scope("a"):
        large = jnp.exp(x @ params["up"][1]) * 1e6
        gate = jnp.tanh((x * 1e3) @ (params["up"][0] * 1e3))
    with jax.named_scope("b"):
        x = ((large + x @ params["up"][2]) @ params["down"][0]) / 1e6
    with jax.named_scope("head"):
        return (x + gate) @ params["out"]


def test_a_product_that_takes_what_is_large_is_kept():
    params = in_plain(THREE, False)[1]
    step, args = step_of(kept_in_steps, params)
    keep = jls.calibrate(step, *args).keep
    assert keep == "^(a|b)$"
    skips = {}
    for one in ("^a$", keep):
        step, args = step_of(kept_in_steps, params, "float16", one)
        skips[one] = bool(jax.jit(step)(*args)[-1].skipped)
    assert skips == {"^a$": True, keep: False}


def test_what_is_kept_already_is_in_the_next_keep():
    params = in_plain(THREE, False)[1]
    step, args = step_of(kept_in_steps, params, "float16", "^a$")
    found = jls.calibrate(step, *args)
    assert found.keep == "^(a|b)$"
    assert "range of float16 in b. Then" in found.notes[-1]


def test_what_is_large_inside_a_chain_alone_is_not_kept():
    def apply(params, x):
        with jax.named_scope("a"):
            gate = jnp.tanh((x * 1e3) @ (params["up"][0] * 1e3))
            x = (x @ params["up"][1]) * 1e3 * 1e3
        with jax.named_scope("b"):
            x = normed(x)
        with jax.named_scope("head"):
            return (x + gate) @ params["out"]

    params = in_plain(THREE, False)[1]
    step, args = step_of(apply, params)
    assert jls.calibrate(step, *args).keep == "^a$"
    step, args = step_of(apply, params, "float16", "^a$")
    assert not jax.jit(step)(*args)[-1].skipped


def overflowing_gate(params, x):
    """Of an inf it makes 1, and its derivative there is 0."""
    with jax.named_scope("gate"):
        gate = jnp.tanh((x * 1e3) @ (params["up"][0] * 1e3))
    with jax.named_scope("head"):
        return (gate + x) @ params["out"]


def test_the_scale_is_set_when_nothing_is_left_to_keep():
    params = in_plain(THREE, False)[1]
    step, args = step_of(overflowing_gate, params, "float16")
    found = jls.calibrate(step, *args)
    assert found.ceiling is not None
    assert found.write == 'keep=r"^gate$"'
    step, args = step_of(overflowing_gate, params, "float16", found.keep)
    found = jls.calibrate(step, *args)
    assert found.keep is None
    assert found.write.startswith("opt_state = jls.set_loss_scale(opt_state, ")


def test_where_there_is_no_autocast_no_keep_is_written():
    def by_hand(params, x):
        params = jax.tree.map(lambda w: w.astype(jnp.float16), params)
        return overflowing_gate(params, x.astype(jnp.float16)).astype(jnp.float32)

    step, args = step_of(by_hand, in_plain(THREE, False)[1])
    found = jls.calibrate(step, *args)
    assert found.keep == "^gate$"
    assert "range of float16 in gate. Compute that in float32. Then" in found.notes[-1]
    assert "Write" not in str(found)


def test_a_long_expression_is_not_printed():
    def apply(params, x):
        for i in range(9):
            with jax.named_scope(f"a_long_name_of_number_{i}"):
                x = jnp.tanh((x * 1e3) @ (params["up"][i] * 1e3))
        return x @ params["out"]

    step, args = step_of(apply, in_plain(THREE, False)[1])
    found = jls.calibrate(step, *args)
    assert len(found.keep) > 80
    assert "Write: keep=calibration.keep" in str(found).splitlines()
    assert all(len(line) <= 80 for line in str(found).splitlines())


@pytest.mark.parametrize("library", MODELS)
def test_what_leaves_its_block_is_kept_where_a_product_takes_it(library):
    """None does: it is added and normalized in float32."""
    found = calibrated(library, leaves=True)
    model = model_of(library, leaves=True)
    step, args = step_of(*model, dtype="float16", keep=found.keep)
    assert not jax.jit(step)(*args)[-1].skipped
    _, wide = modules_by_dtype(step, args)
    assert {number_of(x) for x in wide} == {LARGE}


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_nothing_is_kept_where_nothing_overflows(dtype):
    step, args = step_of(*in_plain((0, 10), False), dtype=dtype)
    found = jls.calibrate(step, *args)
    assert found.keep is None
    assert "keep=" not in str(found)


def test_bfloat16_says_what_float16_would_need():
    step, args = step_of(*in_plain(THREE, False))
    assert calibrated("plain", "bfloat16").keep == jls.calibrate(step, *args).keep


def test_scopes_around_the_step_are_not_of_the_loss():
    step, args = step_of(*in_plain(EIGHT, False))

    def around(*args):
        with jax.named_scope("outer"):
            return step(*args)

    assert jls.calibrate(around, *args).keep == calibrated("plain").keep


def test_scope_of_special_characters():
    def apply(params, x):
        for name in ("a+b", "a.b", "ab", "aab"):
            with jax.named_scope(name):
                gain = GAIN if name == "a.b" else 1.0
                h = (x @ params["up"][0]) * gain * gain
                x = h @ params["down"][0] / gain / gain
        return x

    params = in_plain(THREE, False)[1]
    step, args = step_of(apply, params)
    keep = jls.calibrate(step, *args).keep
    assert keep == r"^a\.b$"
    step, args = step_of(apply, params, "float16", keep)
    assert not jax.jit(step)(*args)[-1].skipped


def test_masks_sums_and_the_loss_do_no_harm():
    """What an autocast keeps in float32 anyway, or clamps."""

    def apply(params, x):
        with jax.named_scope("attention"):
            scores = x @ params["up"][0] @ x.T
            scores = jnp.where(jnp.tril(jnp.ones((4, 4))) > 0, scores, -1e9)
            x = jax.nn.softmax(scores, -1) @ x
            scores = x @ x.T + jnp.where(jnp.eye(4) > 0, 0.0, -1e30)
            x = jax.nn.softmax(scores / 2, -1) @ x
            bias = (1.0 - (x[:, 0] > 0).astype(jnp.float32)) * -1e9
            x = jax.nn.softmax((x @ x.T + bias) * 0.5, -1) @ x
        with jax.named_scope("norm"):
            x = x * 1e3
            x = x * jax.lax.rsqrt(jnp.sum(jnp.square(x * 10), -1, keepdims=True))
        return (x @ params["out"]) * 1e6

    params = in_plain(THREE, False)[1]
    step, args = step_of(apply, params)
    assert jls.calibrate(step, *args).keep is None


def test_number_of_the_program_that_multiplies_data_is_no_mask():
    """An autocast would clamp the product, as it does with a mask."""

    def apply(params, x):
        with jax.named_scope("large"):
            h = (x @ params["up"][0] + 10.0) * 1e5
            return h @ (params["out"] * 1e-5)  # which is in the range

    step, args = step_of(apply, in_plain(THREE, False)[1])
    assert jls.calibrate(step, *args).keep == "^large$"


def test_data_beyond_the_range_is_kept_where_it_comes_in():
    def apply(params, x):
        with jax.named_scope("first"):
            x = jnp.tanh((x * 1e5) @ params["up"][0] / 1e5)
        with jax.named_scope("second"):
            return x @ params["out"]

    params = in_plain(THREE, False)[1]
    step, args = step_of(apply, params)
    keep = jls.calibrate(step, *args).keep
    assert keep == "^first$"
    step, args = step_of(apply, params, "float16", keep)
    assert not jax.jit(step)(*args)[-1].skipped


# Without scopes.


class Small(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.down = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.up(x))


class Large(Small):
    def __call__(self, x):
        return x + self.down(self.up(x) * GAIN * GAIN) / GAIN / GAIN


class OfNNX(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List(
            [(Large if i == LARGE else Small)(rngs) for i in range(4)]
        )

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_modules_without_scopes_are_kept_by_functions(dtype):
    def loss_fn(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    def made(**options):
        model = OfNNX(nnx.Rngs(0))
        inner = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**4))
        optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
        return jls.train_step(loss_fn, **options), model, optimizer, X

    found = jls.calibrate(*made(compute_dtype=dtype))
    assert repr(found.keep) == "<keep of Large.__call__ (test_keep.py)>"
    assert repr(found.keep) in " ".join(str(found).split())
    step, *args = made(compute_dtype="float16", keep=found.keep)
    assert not nnx.jit(step)(*args).skipped
    if dtype:
        note, *_ = jls.why(*made(compute_dtype=dtype)).notes
        assert note.endswith('keep=lambda place: place.function == "Large.__call__"')


class BigBlock(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x * GAIN) / GAIN / GAIN


def test_of_one_equinox_block_the_function_alone_is_kept():
    """The scope of its layer, "eqx.nn.Linear", is that of every layer."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Linear(8, 8, key=key) for key in keys]
    model = layers[0], BigBlock(layers[1]), layers[2]

    def loss_fn(model, x):
        first, block, last = model
        block = eqx.tree_at(
            lambda m: m.layer.weight, block, replace_fn=lambda w: w * 1e3
        )
        return jnp.mean(jax.vmap(lambda x: last(block(first(x))))(x) ** 2)

    def made(**options):
        step = jls.train_step(loss_fn, optimizer, **options)
        return eqx.filter_jit(step), model, state, jnp.ones((4, 8))

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**4))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    written = 'keep=lambda place: place.function == "BigBlock.__call__"'
    step, *args = made(compute_dtype="float16")
    assert jls.why(step, *args).notes[0] == f"In float32 this is finite: {written}"
    for dtype in (None, "float16"):
        found = jls.calibrate(*made(compute_dtype=dtype))
        assert repr(found.keep) == "<keep of BigBlock.__call__ (test_keep.py)>"
    step, *args = made(compute_dtype="float16", keep=found.keep)
    assert not step(*args)[-1].skipped
    half, wide = modules_by_dtype(lambda *args: step(*args)[-1], args)
    assert half == wide == {"eqx.nn.Linear"}


def test_a_function_in_two_scopes_is_kept_in_one():
    """And one scope with two functions."""

    def large(x, w):
        return (x * 1e3) @ (w * 1e3) * 1e-6

    def apply(params, x):
        with jax.named_scope("a"):
            x = large(x, params["up"][0]) + x @ params["up"][1]
        with jax.named_scope("b"):
            return large(x * 1e-6, params["up"][2]) @ params["out"]

    step, args = step_of(apply, in_plain(THREE, False)[1], "float16")
    found = jls.calibrate(step, *args)
    assert repr(found.keep) == "<keep of large (test_keep.py) in 'a'>"
    condition = 'place.function == "large" and place.module == "a"'
    note = jls.why(step, *args).notes[0]
    assert note.endswith(f": keep=lambda place: {condition}")
    step, args = step_of(apply, args[0], "float16", found.keep)
    assert not jax.jit(step)(*args)[-1].skipped


def test_code_without_lines_is_kept():
    """As `exec` and the prompt have it."""
    other = Unit("", "model.py", "apply")
    keep = keep_of([Unit("", "", "")], [other])
    assert repr(keep) == "<keep of lines that are not known>"
    assert argument_of(keep) == 'keep=lambda place: place.file == ""'
    assert keep(Place("dot_general"))
    assert not keep(Place("dot_general", "model.py", 3, "apply"))


def test_a_carry_that_leaves_the_range_is_found_where_a_product_takes_it():
    def loss_fn(w, x):
        def body(carry, _):
            return jnp.tanh(carry @ w) * 1e3 * 1e3, None

        return jnp.mean(jnp.log1p(jax.lax.scan(body, x, length=2)[0] ** 2))

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    w = jnp.eye(4)
    state = optimizer.init(w)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    made = jls.calibrate(step, w, state, jnp.ones((2, 4)))
    assert "out of range in body" in str(made)
    cast = jls.train_step(loss_fn, optimizer, compute_dtype="float16", keep=made.keep)
    with pytest.warns(jls.JlsWarning, match="no product to cast: 1 by keep"):
        assert jnp.isfinite(cast(w, state, jnp.ones((2, 4)))[2].loss)


# What is finite in float32 alone.


def distances(z):
    """Of points to each other: the product is rounded, so some squares are below 0."""
    squares = jnp.sum(z * z, axis=-1)
    return jnp.sqrt(squares[:, None] + squares - 2 * (z @ z.T) + 1e-3)


def in_order(params, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ params["up"][0])
    with jax.named_scope("distances"):
        d = jnp.mean(distances(h))
    with jax.named_scope("head"):
        return d + h @ params["out"]


def in_a_scan(params, x):
    def body(h, w):
        with jax.named_scope("mix"):
            h = jnp.tanh(h @ w)
        with jax.named_scope("distances"):
            return h, jnp.mean(distances(h))

    h, found = jax.lax.scan(body, x, params["up"][:3])
    with jax.named_scope("head"):
        return jnp.sum(found) + h @ params["out"]


def rematted(params, x):
    return jax.checkpoint(in_order)(params, x)


def in_a_branch(params, x):
    h = jnp.tanh(x @ params["up"][0])
    with jax.named_scope("distances"):
        d = jax.lax.cond(jnp.sum(x) < 1e9, distances, lambda h: jnp.ones((32, 32)), h)
    return jnp.mean(d) + h @ params["out"]


def over_and_chained(params, x):
    with jax.named_scope("first"):
        h = (x @ params["up"][0] + 10.0) * 1e5
    with jax.named_scope("second"):
        h = jnp.tanh((h @ params["down"][0]) * 1e-6)
    with jax.named_scope("head"):
        return h @ params["out"]


POINTS = 4 * normal(3, 32, FEATURES)
BROKEN = {
    in_order: "^distances$",
    in_a_scan: "^distances$",
    rematted: "^distances$",
    in_a_branch: "^distances$",
    over_and_chained: "^second$",
}
DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apply", BROKEN)
def test_what_float32_mends_is_said_with_the_least_keep(apply, dtype):
    params = in_plain(THREE, False)[1]
    step, (params, state, _) = step_of(apply, params, dtype)
    args = params, state, POINTS
    why = jls.why(step, *args)
    if apply is over_and_chained and dtype == "bfloat16":  # in range
        assert not why.births
        return
    keep = BROKEN[apply]
    assert why.notes[0] == f'In float32 this is finite: keep=r"{keep}"'
    assert str(why).index("In float32") < str(why).index(".py:")
    assert not any(x.advice for x in why.births)
    found = jls.calibrate(step, *args)
    assert found.keep == keep
    text = " ".join(str(found).split())
    assert text.count("n float32 this step is finite, in half at no loss scale") == 1
    assert f'Write: keep=r"{keep}"' in str(found)
    with pytest.raises(ValueError, match="The batch is good: in float32") as error:
        jls.check_step(jax.jit(step), *args)
    assert f'keep=r"{keep}"' in str(error.value)
    mended = jax.jit(step_of(apply, params, dtype, keep)[0])
    assert not mended(*args)[-1].skipped
    _, wide = modules_by_dtype(mended, args)
    assert wide == {keep[1:-1]}


@pytest.mark.parametrize("apply", [in_order, in_a_scan])
def test_of_a_loss_alone_it_is_said_too(apply):
    def loss_fn(params):
        return jnp.mean(apply(params, POINTS))

    params = in_plain(THREE, False)[1]
    cast = jls.autocast(loss_fn, "bfloat16")
    for fun in (cast, jax.jit(jax.grad(cast))):
        note, *_ = jls.why(fun, params).notes
        assert note == 'In float32 this is finite: keep=r"^distances$"'
    both = jls.autocast(loss_fn, "bfloat16", keep="^distances$")
    assert not jls.why(jax.value_and_grad(both), params).births


def test_no_keep_is_said_where_float32_is_no_better():
    def apply(params, x):
        h = jnp.tanh(x @ params["up"][0])
        return jnp.log(h - 2.0) @ params["down"][0] @ params["out"]

    step, args = step_of(apply, in_plain(THREE, False)[1], "float16")
    why = jls.why(step, *args)
    assert why.births[0].advice.startswith("The logarithm of a negative number")
    assert "keep=" not in str(why)
    with pytest.raises(ValueError, match="finite at some loss scale") as error:
        jls.calibrate(step, *args)
    assert "keep=" not in str(error.value)
    with pytest.raises(ValueError, match="Pass a good batch"):
        jls.check_step(jax.jit(step), *args)


def test_what_only_needs_another_scale_is_told_of_no_keep():
    step, (params, state, x) = step_of(*in_plain((0, 10), False), dtype="float16")
    args = params, jls.set_loss_scale(state, 2.0**40), x
    why = jls.why(step, *args)
    assert why.is_from_scale
    assert "keep=" not in str(why)
    assert jls.check_step(jax.jit(step), *args).ok


def test_two_that_are_each_too_large_are_both_kept():
    def apply(params, x):
        found = []
        for i, gain in enumerate((1.0, 1e3, 1.0, 1e3, 1.0)):
            with jax.named_scope(f"branch_{i}"):
                h = (x * gain) @ (params["up"][i] * gain)
                found.append(h / gain**2)
        with jax.named_scope("head"):
            return sum(found) @ params["out"]

    params = in_plain(THREE, False)[1]
    for skip in (1, 2):  # the scaler has no part in it
        step, args = step_of(apply, params, "float16")
        args = args[0], jls.set_loss_scale(args[1], float(skip)), POINTS
        note, *_ = jls.why(step, *args).notes
        assert note == 'In float32 this is finite: keep=r"^(branch_1|branch_3)$"'


def test_what_a_mask_hides_is_not_kept_with_what_overflows():
    """Linear attention with decays: scores behind the mask are over 65504 too."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (2, 16, 8))
    params = {
        n: jax.random.normal(k, (8, 8)) / 3
        for n, k in zip("qkvg", keys[1:], strict=True)
    }

    def loss_fn(params, x):
        q, k, v, g = (x @ params[name] for name in "qkvg")
        g = jnp.cumsum(-2 * jax.nn.softplus(g), 1)
        scores = jnp.einsum("btd,bsd->bts", q * jnp.exp(g), k * jnp.exp(-g))
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, 0.0)
        return jnp.mean((scores @ v - x) ** 2)

    optimizer = jls.loss_scaled(optax.adam(1e-3))

    def calibrated_with(keep):
        step = jls.train_step(loss_fn, optimizer, compute_dtype="float16", keep=keep)
        args = params, optimizer.init(params), x
        return jls.calibrate(step, *args), str(jls.why(step, *args))

    found, why = calibrated_with(None)
    assert found.keep == r"^btd,bsd\->bts$"
    assert found.keep in why
    found, _ = calibrated_with(found.keep)
    assert found.keep is None
    assert found.ceiling is not None
