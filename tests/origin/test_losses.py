# SPDX-License-Identifier: Apache-2.0
"""`Calibration.losses`: the lines that lose precision, where they are known."""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import lossy_programs
import numpy as np
import optax
import pytest
from jax import lax
from lossy_programs import LOSSY, RIGHT, layered, marked_line
from scaled_programs import normal, trained

import jls
from jls._program.alone import BOTH, Pair
from jls._program.frames import Frame
from jls._program.replay import Watched, replay
from jls._tools.origin import losses
from jls._tools.origin.losses import (
    Losses,
    PrecisionLoss,
    RelativeErrors,
    both_ways,
    find_losses,
)
from jls.types import Place

pytestmark = pytest.mark.standard_promotion

HERE = Path(lossy_programs.__file__)
HALVES = ("float16", "bfloat16")
SMALL = ("variance_by_the_difference_of_squares", "gradient_of_a_bias")
CASES = [
    # bfloat16 needs no search for a loss scale.
    pytest.param(
        name,
        dtype,
        marks=[pytest.mark.more] * (dtype == "float16" and name not in SMALL),
    )
    for name, program in LOSSY.items()
    for dtype in HALVES
    if program.only in ("", dtype)
]
LONG = ("transformer", "autocast_transformer")
RIGHT_CASES = [
    pytest.param(
        name,
        dtype,
        marks=[pytest.mark.more] * (dtype == "float16" or name in LONG),
    )
    for name in RIGHT
    for dtype in HALVES
]


@functools.cache
def calibrated(make, dtype):
    made = make(jnp.dtype(dtype))
    return jls.calibrate(made.step, *made.args, losses=True)


def test_there_are_twelve_programs():
    assert len(LOSSY) >= 12
    assert len(RIGHT) >= 12


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_line_is_the_right_one(name, dtype):
    program = LOSSY[name]
    found = calibrated(program.make, dtype)
    first, *others = found.losses
    assert (Path(first.place.file), first.place.line) == (
        HERE,
        marked_line(program.make),
    )
    assert first.place.is_backward == program.is_backward
    assert first.gain > 0.5
    assert first.factor >= 8
    assert {x.place.line for x in others} <= {first.place.line}
    text = str(found)
    assert f"{HERE.name}:{first.place.line}" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(("name", "dtype"), RIGHT_CASES)
def test_no_line_of_a_right_program_stands_out(name, dtype):
    found = calibrated(RIGHT[name], dtype)
    assert found.losses == ()
    assert found.notes[-1].endswith("no line of the step stands out")


def test_the_words_say_how_far_off_and_how_much_of_it_is_gone():
    line = PrecisionLoss(Place("sub"), 300.0, 0.1, 0.9)
    note = Losses(0.0644, (line,)).note
    assert note == (
        "The gradients are 6.44% off those of float32. With the line below as in "
        "float32, 90% of that is gone"
    )
    note = Losses(15.868, (line, line._replace(gain=0.2))).note
    assert note == (
        "The gradients are 15.9 times their size off those of float32. With each of "
        "the lines below as in float32, 90%, 20% of that is gone"
    )


def test_losses_are_found_on_demand():
    made = LOSSY["exp_minus_one"].make(jnp.float16)
    found = jls.calibrate(made.step, *made.args)
    assert found.losses == ()
    assert "off those of float32" not in str(found)


def test_float32_has_nothing_to_lose():
    made = layered(jnp.tanh, jnp.float32)
    found = jls.calibrate(made.step, *made.args, losses=True)
    assert found.losses == ()
    assert "No precision is lost" in found.notes[-1]


def test_step_may_take_losses_itself():
    """By a partial, as the docstring says."""

    def loss_fn(params, x, losses):
        return losses * jnp.mean((x.astype(jnp.bfloat16) @ params).astype(jnp.float32))

    made = trained(loss_fn, jnp.ones((4, 2)), normal(0, 8, 4), kwargs={"losses": 2.0})
    step = functools.partial(made.step, losses=2.0)
    assert jls.calibrate(step, *made.args).init_scale == 1.0


# The errors, by hand.


def errors_of(fun, *args):
    program = jax.make_jaxpr(fun)(*args)
    root = Frame(program)
    both = both_ways(root, [(root, x) for x in root.jaxpr.outvars])
    return both, root, RelativeErrors(both(args))


def test_error_is_that_of_the_sums_of_magnitudes():
    x = normal(0, 300)
    _, root, errors = errors_of(lambda x: x.astype(jnp.float16) * 3, x)
    atom = root.jaxpr.outvars[0]
    half = np.asarray(x).astype(np.float16)
    narrow = (half * np.float16(3)).astype(np.float64)
    wide = np.asarray(x, np.float64) * 3
    expected = np.abs(narrow - wide).sum() / np.abs(wide).sum()
    np.testing.assert_allclose(
        losses.error_of(errors.of(root, atom)), expected, rtol=1e-4
    )


def test_a_loop_in_a_loop_is_read():
    def repeated(change, x):
        _, result = lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, change(s[1])), (0, x)
        )
        return result

    def fun(x):
        half = x.astype(jnp.float16)
        return repeated(lambda y: repeated(lambda z: z * 1.01, y), half)

    _, root, errors = errors_of(fun, normal(0, 300))
    error = losses.error_of(errors.of(root, root.jaxpr.outvars[0]))
    assert 2.0**-12 < error < 2.0**-7


def test_flags_and_indices_are_shared():
    """A relu whose sign rounding changes would be an error of 100 % there."""
    x = jnp.float32(1 + 2**-13)

    def fun(x):
        y = x.astype(jnp.float16)
        return jnp.where(y > 1, y, y * 100)

    _, root, errors = errors_of(fun, x)
    assert losses.error_of(errors.of(root, root.jaxpr.outvars[0])) < 1e-3


def test_an_index_beside_numbers_is_shared():
    """Which of two is the largest, if rounding makes them equal."""
    x = jnp.float32([1, 1 + 2**-13])

    def fun(x):
        _, at = lax.top_k(x.astype(jnp.float16), 1)
        return at.astype(jnp.float16) + 1

    _, root, errors = errors_of(fun, x)
    assert losses.error_of(errors.of(root, root.jaxpr.outvars[0])) < 1e-3


def test_both_ways_in_loops_and_branches():
    """Pairs go through all control flow: each side is what it is alone."""

    def fun(x):
        y = x.astype(jnp.float16)
        y, ys = lax.scan(lambda c, _: (c * 1.01, c + 1), y, None, length=3)
        y = lax.while_loop(lambda c: c.max() < 8, lambda c: c * 1.5, y)
        y = lax.cond(y[0] > 0, lambda y: y / 3, lambda y: y * 3, y)
        y = jax.checkpoint(jnp.sin)(y)
        return y, ys, jnp.argsort(y)

    x = jnp.abs(normal(0, 5)) + 0.5
    program = jax.make_jaxpr(fun)(x)

    def watch(site, inputs, results):
        return Watched(results)

    results, _ = replay(program, [x], watch, arithmetic=BOTH)
    pairs = [r for r in results if isinstance(r, Pair)]
    assert len(pairs) == 2
    for pair, value in zip(pairs, fun(x)[:2], strict=True):
        assert pair.narrow.dtype == jnp.float16
        assert pair.wide.dtype == jnp.float32
        np.testing.assert_array_equal(pair.narrow, value)
        np.testing.assert_allclose(pair.wide, value, rtol=2e-2)
        assert (np.asarray(pair.wide) != np.asarray(value, np.float32)).any()


def test_lines_are_limited(monkeypatch):
    def act(h):
        h = (h + jnp.asarray(30, h.dtype)) - jnp.asarray(30, h.dtype)
        return (h + jnp.asarray(50, h.dtype)) - jnp.asarray(50, h.dtype)

    made = layered(act, jnp.bfloat16)
    assert len(jls.calibrate(made.step, *made.args, losses=True).losses) == 2
    assert losses.MOST == 10
    monkeypatch.setattr(losses, "MOST", 1)
    assert len(jls.calibrate(made.step, *made.args, losses=True).losses) == 1


def test_sum_that_float32_does_not_know_either_is_not_named():
    """Such as the gradient of a bias before a norm: 0, but for rounding."""

    def fun(x):
        centered = x - jnp.mean(x)
        return jnp.sum(centered.astype(jnp.bfloat16).astype(jnp.float32))

    _, root, errors = errors_of(fun, normal(0, 301))
    error = losses.error_of(errors.of(root, root.jaxpr.outvars[0]))
    assert error > 1000 or np.isnan(error)  # in float32 it may be 0
    growths = losses._growths(errors, root, 2.0**-9)
    assert not [x for x in growths if x.site.equation.primitive.name == "reduce_sum"]


def test_find_losses_without_half_precision():
    both, root, _ = errors_of(lambda x: x * 3, normal(0, 3))
    gradients = [(root, root.jaxpr.outvars[0])]
    found = find_losses(both, root, [normal(0, 3)], gradients, {})
    assert found == Losses()


def test_gradients_that_are_not_finite_are_said():
    """The difference of squares is below 0 where it is rounded."""

    def act(h):
        variance = (
            jnp.mean(h * h, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2
        )
        return h * lax.rsqrt(variance)

    made = layered(act, jnp.bfloat16, offset=64.0)
    found = jls.calibrate(made.step, *made.args, losses=True)
    assert found.losses == ()
    assert found.notes[-1] == (
        "In half precision the gradients of this batch are not finite, so no line that "
        "loses precision was looked for"
    )


def test_of_an_overflow_no_note_denies_the_line_that_is_named():
    def loss_fn(w, x):
        return jnp.mean((x @ w * 1e3) @ w)

    w, optimizer = jnp.full((8, 8), 30.0), jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(loss_fn, optimizer, compute_dtype="float16")
    args = w, optimizer.init(w), jnp.ones((4, 8))
    found = jls.calibrate(jax.jit(step), *args, losses=True)
    assert found.keep is not None
    assert "in loss_fn" in str(found)
    assert "No line is named" not in str(found)


# Error that builds up from iteration to iteration: no line stands out.


def repeated(gain, loop):
    """A recurrent network: from a gain over 1 on two states nearby part from it."""

    def loss_fn(params, x):
        def cell(c):
            return jnp.tanh(gain * c @ params["w"])

        return jnp.mean((loop(cell, x) @ params["v"] - 1) ** 2)

    return loss_fn


def in_fori(cell, x):
    return lax.fori_loop(0, 60, lambda i, c: cell(c), x)


def in_scan(cell, x):
    step = jax.checkpoint(lambda c, _: (cell(c), None))
    return lax.scan(step, x, None, length=60)[0]


def in_while(cell, x):
    state = lax.while_loop(
        lambda s: s[0] < 60, lambda s: (s[0] + 1, cell(s[1])), (0, x)
    )
    return lax.stop_gradient(state[1])


def small_steps(cell, x):
    return lax.fori_loop(0, 300, lambda i, c: c + 1e-3 * cell(c), x)


LOOPS = (in_fori, in_scan, in_while)


def built_up_in(loop, gain, dtype, has_aux=False):
    params = {"w": normal(1, 16, 16) / 4, "v": normal(2, 16, 1)}
    loss_fn = repeated(gain, loop)

    def with_aux(params, x):
        return jnp.mean((x @ params["v"]) ** 2), {"later": loss_fn(params, x)}

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(16.0, min_scale=2.0**-24))
    fun = with_aux if has_aux else loss_fn
    step = jls.train_step(fun, optimizer, compute_dtype=dtype, has_aux=has_aux)
    args = params, optimizer.init(params), normal(3, 8, 16)
    notes = jls.calibrate(jax.jit(step), *args, losses=True).notes
    return [x for x in notes if "builds up" in x]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("loop", LOOPS)
def test_error_that_builds_up_in_a_loop_is_said_with_its_line(loop, dtype):
    (note,) = built_up_in(loop, 3.0, dtype)
    assert note.startswith("In half precision the loss is ")
    _, line = inspect.getsourcelines(loop)
    last = line + len(inspect.getsource(loop).splitlines())
    found = re.search(rf"in the loop at \S*:(\d+) in {loop.__name__}$", note)
    assert found
    assert line < int(found[1]) < last


def test_error_that_builds_up_in_what_else_comes_back_is_said():
    (note,) = built_up_in(in_fori, 3.0, "bfloat16", has_aux=True)
    assert note.startswith("In half precision result[2].aux.later is ")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("loop", [*LOOPS, small_steps])
def test_no_error_builds_up_in_a_right_loop(loop, dtype):
    assert built_up_in(loop, 0.9, dtype) == []


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_that_are_summed_over_devices_have_their_errors(check_vma):
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    def step_of(axis):
        optimizer = jls.loss_scaled(optax.sgd(0.1), axis_name=axis)

        def step(w, state, x):
            cast = jls.autocast(loss, jnp.float16)
            value, grads = jls.value_and_grad(cast)(state, w, x)
            if axis:
                value, grads = lax.pmean((value, grads), axis)
            updates, state = optimizer.update(grads, state, w, value=value)
            return optax.apply_updates(w, updates), state, value

        return optimizer, step

    w, x = 0.3 * normal(0, 8, 8), normal(1, 16, 8)
    optimizer, alone = step_of(None)
    expected = jls.calibrate(jax.jit(alone), w, optimizer.init(w), x, losses=True)
    optimizer, step = step_of("data")
    one, several = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(one, one, several),
        out_specs=one,
        check_vma=check_vma,
    )
    made = jls.calibrate(jax.jit(sharded), w, optimizer.init(w), x, losses=True)
    (note,) = (x for x in expected.notes if "off those of float32" in x)
    assert note in made.notes
