# SPDX-License-Identifier: Apache-2.0
"""`jls.calibrate`: its numbers, by trying, and by hand in float32."""

import functools
import inspect
import math
import re
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scaled_programs
from flax import nnx
from flax.training import train_state
from jax import lax
from scaled_programs import HARMLESS, SCALED, SILENT, made_of, marked_lines, normal

import jls

pytestmark = pytest.mark.standard_promotion

FLOAT16_MAX = 65504.0
EVERY = {**SCALED, **SILENT, **HARMLESS}
MARKED = [name for name, program in SCALED.items() if marked_lines(program.make)]
HERE = Path(scaled_programs.__file__)


def devices_for(program):
    if jax.device_count() < program.devices:
        pytest.skip(f"needs {program.devices} devices")
    return program


@functools.cache
def _calibrated(name):
    program = EVERY[name]
    made = made_of(program)
    with warnings.catch_warnings():
        if program.warns:
            warnings.simplefilter("ignore", jls.JlsWarning)
        return made, jls.calibrate(made.step, *made.args, **made.kwargs)


def calibrated(name):
    devices_for(EVERY[name])
    return _calibrated(name)


def is_object(x):
    return isinstance(x, nnx.Module | nnx.Optimizer)


def is_state(x):
    return isinstance(x, jls.types.LossScaledState)


def skip_reason(name, scale):
    """Why the step, as the user compiles it, is skipped at a loss scale."""
    program = EVERY[name]
    made, _ = calibrated(name)
    with warnings.catch_warnings():
        if program.warns:
            warnings.simplefilter("ignore", jls.JlsWarning)
        if any(map(is_object, made.args)):
            made = made_of(program)
        args = [x if is_object(x) else jax.tree.map(copied, x) for x in made.args]
        args = [with_scale(x, scale) for x in args]
        results = made.step(*args, **made.kwargs)
    if made.is_skipped is not None:
        reasons = jls.types.SkipReason
        return reasons.GRADIENTS if made.is_skipped(results) else reasons.NONE
    nodes = jax.tree.leaves((results, *filter(is_object, args)), is_leaf=is_state)
    (state,) = filter(is_state, nodes)
    skips, reason = state.skips, state.last_skip_reason
    if hasattr(skips, "get_value"):
        skips, reason = skips.get_value(), reason.get_value()
    assert bool(skips) == bool(reason)
    return jls.types.SkipReason(int(reason))


def copied(x):
    return x.copy() if isinstance(x, jax.Array) else x


def with_scale(x, scale):
    try:
        jls.loss_scale(x)
    except ValueError:
        return x
    return jls.set_loss_scale(x, scale)


# The numbers.


def test_marks_of_lines_are_found():
    assert MARKED


@pytest.mark.parametrize("name", EVERY)
def test_step_is_taken_at_the_ceiling_and_skipped_above(name):
    _, found = calibrated(name)
    assert math.log2(found.ceiling).is_integer()
    assert skip_reason(name, found.ceiling) == jls.types.SkipReason.NONE
    assert skip_reason(name, 2 * found.ceiling) == jls.types.SkipReason.GRADIENTS


@pytest.mark.parametrize("name", EVERY)
def test_numbers_fit_together(name):
    program = EVERY[name]
    _, found = calibrated(name)
    bounds = 1.0, 2.0**24  # of jls.dynamic
    has_bounds = name in ("loss_times_a_millionth", "loss_times_ten_thousand")
    half = np.clip(found.ceiling / 2, *bounds) if has_bounds else found.ceiling / 2
    assert found.init_scale == half
    assert program.ceiling in (None, found.ceiling)
    assert found.limited_by.is_backward
    places = [place for place, _ in found.vanishing]
    assert set(places) == {x.place for x in found.cotangents if x.vanishing}
    assert len(set(places)) == len(places)
    shares = [share for _, share in found.vanishing]
    assert shares == sorted(shares, reverse=True)
    for x in found.cotangents:
        assert len(x.shares) == 41
        above = 1 - x.vanishing - sum(x.shares)  # of what overflows
        assert abs(above) < 1e-6
        assert x.largest * found.init_scale < FLOAT16_MAX * 1.02


@pytest.mark.parametrize("name", [n for n, p in SCALED.items() if p.has_twin])
def test_largest_of_the_twin_agrees_with_the_ceiling(name):
    _, found = calibrated(name)
    room = FLOAT16_MAX / max(x.largest for x in found.cotangents)
    assert 0.99 * found.ceiling <= room < 2.02 * found.ceiling


def by_hand(name):
    """The gradients of the same model in float32, but of what is not in float16."""
    params = jax.tree.map(lambda x: x.astype("f"), calibrated(name)[0].params)
    grads = jax.grad(made_of(SCALED[name], jnp.float32).loss)(params)
    leaves, _ = jax.tree_util.tree_flatten_with_path(grads)
    kept = [x for path, x in leaves if "LayerNorm" not in jax.tree_util.keystr(path)]
    assert {x.dtype for x in kept} == {np.dtype(np.float32)}
    return [np.asarray(x, np.float64) for x in kept]


@pytest.mark.parametrize("name", [n for n, p in SCALED.items() if p.has_gradients])
def test_shares_are_those_of_the_gradients_in_float32(name):
    _, found = calibrated(name)
    for gradient in by_hand(name):
        present = np.abs(gradient[gradient != 0]) * found.init_scale
        vanishing = np.mean(present <= 2.0**-25)
        largest = np.max(present) / found.init_scale
        assert any(
            math.isclose(x.largest, largest, rel_tol=0.02)
            and abs(x.vanishing - vanishing) < 0.02
            for x in found.cotangents
        )


def test_some_gradients_of_parameters_vanish():
    """Else the test above would be of zeros."""
    shares = [
        np.mean(np.abs(g[g != 0]) * calibrated(name)[1].init_scale <= 2.0**-25)
        for name in ("embedding_of_tokens", "mean_of_squares", "sums_of_segments")
        for g in by_hand(name)
    ]
    assert sum(0.01 < x < 0.99 for x in shares) >= 1


@pytest.mark.parametrize("name", MARKED)
def test_limit_is_the_marked_line(name):
    _, found = calibrated(name)
    place = found.limited_by
    assert Path(place.file) == HERE
    assert place.line in marked_lines(SCALED[name].make)


def test_limit_is_not_what_overflows_at_the_ceiling_too():
    """The sum in the forward pass is inf at every loss scale."""
    _, found = calibrated("softmax_without_the_maximum")
    (line,) = marked_lines(SILENT["softmax_without_the_maximum"].make)
    assert found.limited_by.line == line + 1


def test_what_is_half_of_the_least_number_vanishes():
    """2**-25 is as far from 0 as from 2**-24, and 0 is even."""
    sizes = 2.0 ** -np.array([0.0, 38.0, 39.0, 40.0])

    def loss_fn(params, x):
        y = params.astype(jnp.float16) * x
        return jnp.sum(y.astype(jnp.float32) * sizes)

    found = calibrate_plain(loss_fn, jnp.ones(4), jnp.ones(4, jnp.float16))
    assert found.init_scale == 2.0**14
    assert {x.vanishing for x in found.cotangents} == {0.5}
    assert np.float16(2.0**-25) == 0


def test_while_lanes_and_branches_under_vmap():
    def loss_fn(params, x):
        def one(x):
            y = jax.lax.cond(jnp.sum(x) > 0, lambda x: x * 2, lambda x: x * x, x)
            z = jax.lax.while_loop(
                lambda c: jnp.max(c) < 1000, lambda c: c * 2 + 1, jnp.abs(x)
            )
            return y * jax.lax.stop_gradient(z)

        h = x.astype(jnp.float16) * params.astype(jnp.float16)
        return jnp.mean(jax.vmap(one)(h).astype(jnp.float32))

    found = calibrate_plain(loss_fn, jnp.ones(4), normal(0, 8, 4))
    assert 16 <= found.ceiling <= 128


def test_scale_that_is_stacked():
    def loss_fn(params, x):
        return jnp.mean((x * params.astype(jnp.float16)).astype(jnp.float32))

    optimizer = jls.loss_scaled(optax.sgd(1e-3))
    step = jax.vmap(jls.train_step(loss_fn, optimizer), in_axes=(0, 0, None))
    params, x = jnp.ones((3, 4)), jnp.ones(4, jnp.float16)
    found = jls.calibrate(step, params, jax.vmap(optimizer.init)(params), x)
    assert found.ceiling == 2.0**17


def test_double_precision():
    made, found = calibrated("mean_of_squares")
    params, opt_state, x = made.args
    with jax.enable_x64(True):
        other = jls.calibrate(made.step, params, opt_state, np.asarray(x, np.float64))
    assert other.ceiling == found.ceiling


@pytest.mark.parametrize("scale", [2.0**-20, 3.0, 2.0**100])
def test_scale_of_the_state_does_not_matter(scale):
    made, found = calibrated("loss_times_ten_thousand")
    args = [with_scale(x, scale) for x in made.args]
    other = jls.calibrate(made.step, *args)
    assert other._replace(notes=()) == found._replace(notes=())


def test_functions_without_a_step():
    scaler = jls.dynamic()
    made, found = calibrated("step_by_hand")
    params, _, x = made.args

    def loss_fn(params):
        h = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
        return jnp.sum(h.astype(jnp.float32) * scaled_programs.uneven(8, 2))

    def unscaled(state, params):
        grads = jax.grad(lambda params: jls.scale(state, loss_fn(params)))(params)
        return jls.unscale(state, grads)

    for function in (jls.value_and_grad(loss_fn), jls.grad(loss_fn), unscaled):
        other = jls.calibrate(function, scaler.init(), params)
        assert other.ceiling == found.ceiling
        assert other.init_scale == found.ceiling / 2


# The forward pass.


@pytest.mark.parametrize("name", SILENT)
def test_silent_overflow_is_kept_in_float32(name):
    _, found = calibrated(name)
    assert found.keep is not None
    function = "layer" if name == "norm_in_each_layer" else "loss_fn"
    note = f"Forward values leave the range of float16 in {function}. Compute that in"
    assert found.notes[-1].startswith(note)


@pytest.mark.parametrize("name", SILENT)
def test_silent_overflow_changes_the_loss(name):
    losses = [
        float(made.loss(made.params))
        for made in (made_of(SILENT[name], x) for x in (jnp.float16, jnp.float32))
    ]
    assert np.isfinite(losses).all()
    assert abs(losses[0] - losses[1]) > 1e-3 * abs(losses[1])


def calibrate_plain(loss_fn, params, batch, optimizer=None):
    optimizer = optimizer or jls.loss_scaled(optax.sgd(1e-3))
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return jls.calibrate(step, params, optimizer.init(params), batch)


def loss_in(dtype):
    def loss_fn(params, x):
        y = x.astype(dtype) @ params.astype(dtype)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return loss_fn


W, X = normal(0, 4, 2), normal(1, 8, 4)


def test_overflow_behind_which_all_is_zero_is_named():
    """The second norm is of zeros: all gradients vanish, and nothing overflows."""

    def norm(h):
        return h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1)

    def loss_fn(params, x):
        h = norm(x.astype(jnp.float16) * params.astype(jnp.float16))
        return jnp.mean(norm(h).astype(jnp.float32) ** 2)

    found = calibrate_plain(loss_fn, jnp.ones(4), jnp.full((8, 4), 400.0))
    assert found.ceiling is None
    assert found.init_scale == 2.0**15  # as it was
    assert found.keep is not None
    assert found.notes[0].endswith("the forward pass overflows. The scale stays")
    assert "leave the range of float16 in norm" in found.notes[1]


# Where no scale is needed.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_wide_dtypes_need_none(dtype):
    found = calibrate_plain(loss_in(dtype), W, X)
    assert found[:4] == (1.0, None, None, ())
    assert found.notes == ("In float32 and bfloat16 no gradient vanishes",)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_empty_arrays_do_no_harm(dtype):
    """`lax.associative_scan` makes some."""

    def loss_fn(w, x):
        h = x.astype(dtype) @ w.astype(dtype)
        total = lax.associative_scan(jnp.add, h, axis=-1)
        total += jnp.sum(h[:0] @ w.T.astype(dtype))
        rows = lax.scan(lambda c, s: (c, jnp.tanh(s[:0])), 0.0, h)[1]
        ended = jnp.concatenate([h[:0], 1 / (1 + jnp.exp(h[:1]))])
        return sum(jnp.mean(x.astype(jnp.float32)) for x in (total, ended)) + jnp.sum(
            rows.astype(jnp.float32)
        )

    optimizer, w = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(16.0)), jnp.ones((8, 16))
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    args = w, optimizer.init(w), jnp.ones((16, 8))
    found = jls.calibrate(step, *args, losses=True)
    assert (found.ceiling is None) == (dtype == jnp.bfloat16)
    assert not jls.why(step, *args).births
    assert jls.why(step, *args[:2], jnp.full((16, 8), jnp.inf)).births


def test_what_has_no_loss_scale_is_told_that_it_needs_none():
    optimizer = jls.skip_nonfinite(optax.sgd(1e-3))
    step = jls.train_step(loss_in(jnp.float32), optimizer)
    found = jls.calibrate(step, W, optimizer.init(W), X)
    assert str(found).startswith("jls.calibrate: no loss scale is needed: all that ")
    assert found.notes[0].endswith("in which no gradient vanishes")
    assert found.write == ""


def test_data_in_float16_need_none():
    found = calibrate_plain(loss_in(jnp.bfloat16), W, X.astype(jnp.float16))
    assert found[:4] == (1.0, None, None, ())


def test_scaling_that_was_forgotten_is_said():
    optimizer = jls.loss_scaled(optax.sgd(1e-3))

    def step(params, opt_state, x):
        grads = jax.grad(loss_in(jnp.float16))(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    found = jls.calibrate(step, W, optimizer.init(W), X)
    assert found.ceiling is None
    assert "or the loss is not scaled" in " ".join(str(found).split())
    assert "jls.check_step" in str(found)


def test_loss_that_is_constant_says_nothing():
    def loss_fn(params, x):
        return 0.0 * loss_in(jnp.float16)(params, x)

    found = calibrate_plain(loss_fn, W, X)
    assert (found.init_scale, found.ceiling) == (2.0**15, None)
    assert "says nothing about the loss scale" in " ".join(str(found).split())
    with pytest.raises(ValueError, match="says nothing about"):
        found.plot()


# Bad inputs.


def test_what_is_never_finite_names_its_birth():
    def loss_fn(params, x):
        h = x.astype(jnp.float16) @ params.astype(jnp.float16)
        cube = h * h * h
        return jnp.mean(cube.astype(jnp.float32))

    here = inspect.getsourcelines(loss_fn)[1]
    with pytest.raises(ValueError, match="finite at some loss scale") as error:
        calibrate_plain(loss_fn, W, 300.0 * X)
    text = str(error.value)
    assert f"test_calibrate.py:{here + 2} in loss_fn" in text
    assert "mul made inf" in text
    assert "jls.why(step, ...)" in text


def test_true_nan_is_never_finite():
    def loss_fn(params, x):
        h = x.astype(jnp.float16) @ params.astype(jnp.float16)
        return jnp.sum(jnp.sqrt(jnp.sum(h * h, axis=-1)).astype(jnp.float32))

    with pytest.raises(ValueError, match="so no scale mends it"):
        calibrate_plain(loss_fn, W, X.at[2].set(0.0))


def test_arguments_without_a_loss_scale():
    words = r"must carry a loss scale, got none\. Pass the step and .*jls\.calibrate\("
    with pytest.raises(ValueError, match=words):
        jls.calibrate(loss_in(jnp.float16), W, X)


def test_arguments_with_several():
    scaler = jls.dynamic()

    def step(params, states, x):
        return [jls.grad(loss_in(jnp.float16))(state, params, x) for state in states]

    with pytest.raises(ValueError, match="must carry one loss scale, got 2: 'states/0"):
        jls.calibrate(step, W, [scaler.init(), scaler.init()], X)


@pytest.mark.parametrize("step", [None, 3, "step", (loss_in,)])
def test_step_that_is_no_function(step):
    with pytest.raises(TypeError, match="step must be a function, got"):
        jls.calibrate(step, W, jls.dynamic().init(), X)


def test_step_that_is_compiled_ahead_of_time():
    made, _ = calibrated("mean_of_squares")
    compiled = made.step.lower(*made.args).compile()
    with pytest.raises(TypeError, match="compiled ahead of time"):
        jls.calibrate(compiled, *made.args)


def test_arguments_that_were_donated():
    made = made_of(SCALED["accumulation_inside_the_wrapper"])
    made.step(*made.args)
    with pytest.raises(ValueError, match="donated to an earlier call"):
        jls.calibrate(made.step, *made.args)


def test_error_of_the_step_comes_out():
    def loss_fn(params, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        calibrate_plain(loss_fn, W, X)


@pytest.mark.parametrize(
    "name",
    [
        "accumulation_inside_the_wrapper",
        "linen_train_state",
        "nnx_with_dropout_and_statistics",
        "batch_statistics_that_are_carried",
    ],
)
def test_nothing_of_the_callers_is_changed_or_donated(name):
    made, first = calibrated(name)
    before = numbers(made.args)
    again = jls.calibrate(made.step, *made.args)
    assert again == first
    after = numbers(made.args)
    assert [x for x, _ in before] == [x for x, _ in after]
    assert all(
        np.array_equal(x, y) for (_, x), (_, y) in zip(before, after, strict=True)
    )


def numbers(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [(jax.tree_util.keystr(path), x) for path, x in leaves]
    return [
        (path, np.asarray(jax.random.key_data(x) if is_key(x) else x))
        for path, x in arrays
    ]


def is_key(x):
    return jnp.issubdtype(getattr(x, "dtype", np.dtype("f")), jax.dtypes.prng_key)


# The bounds of the scaler.


BOUNDED = jls.loss_scaled(
    optax.sgd(1e-3), jls.dynamic(2.0**6, min_scale=2.0**5, max_scale=2.0**7)
)
# Of another run, with a name that attributes have too.
optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**20, min_scale=2.0**20))


def updated(optimizer, params, opt_state, x):
    loss, grads = jls.value_and_grad(loss_in(jnp.float16))(opt_state, params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def step_with_a_global(params, opt_state, x):
    return updated(BOUNDED, params, opt_state, x)


def test_bounds_are_those_of_the_optimizer():
    def loss_fn(state, x):
        return loss_in(jnp.float16)(state.params, x)

    bounded = BOUNDED
    plain = jls.train_step(loss_in(jnp.float16), bounded)
    state = train_state.TrainState.create(apply_fn=None, params=W, tx=bounded)
    chain = optax.chain(optax.clip(1.0), bounded)

    def closed_over(params, opt_state, x):
        return updated(bounded, params, opt_state, x)

    calls = {
        "train_step": (plain, W, bounded.init(W), X),
        "jitted": (jax.jit(plain), W, bounded.init(W), X),
        "partial": (partial(plain, W), bounded.init(W), X),
        "chain": (jls.train_step(loss_in(jnp.float16), chain), W, chain.init(W), X),
        "TrainState": (jax.jit(jls.train_step(loss_fn)), state, X),
        "closure": (jax.jit(closed_over), W, bounded.init(W), X),
        "global": (jax.jit(step_with_a_global), W, bounded.init(W), X),
    }
    for call in calls.values():
        found = jls.calibrate(*call)
        assert found.ceiling == 2.0**11
        assert found.init_scale == 2.0**7
        (note,) = found.notes
        assert note.startswith("The scaler's max_scale is 128. Give it max_scale=1024")


def test_bounds_of_an_nnx_optimizer():
    model = nnx.Linear(4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, BOUNDED, wrt=nnx.Param)
    step = jls.train_step(lambda model, x: jnp.sum(model(x).astype(jnp.float32) ** 2))
    found = jls.calibrate(nnx.jit(step), model, optimizer, X)
    assert found.ceiling > found.init_scale == 2.0**7
    assert float(jls.loss_scale(optimizer)) == 2.0**6


def test_least_scale_of_the_scaler():
    at_the_ceiling = jls.dynamic(2.0**11, min_scale=2.0**11)
    found = calibrate_plain(
        loss_in(jnp.float16), W, X, jls.loss_scaled(optax.sgd(1e-3), at_the_ceiling)
    )
    assert found.init_scale == found.ceiling == 2.0**11


def test_least_scale_over_the_ceiling_is_a_note():
    found = calibrate_plain(loss_in(jnp.float16), W, X, optimizer)
    assert found.init_scale == 2.0**10
    text = " ".join(str(found).split())
    assert "min_scale of 2^20 is over the ceiling" in text
    assert "would be skipped" not in text  # it does not come down


def test_static_scale_over_the_ceiling_is_a_note():
    static = jls.loss_scaled(optax.sgd(1e-3), jls.static(2.0**14))
    text = " ".join(str(calibrate_plain(loss_in(jnp.float16), W, X, static)).split())
    assert "The scale is 2^14 now, 8 times too high for this batch." in text


def test_scale_that_is_too_high_says_how_far():
    text = " ".join(str(calibrate_plain(loss_in(jnp.float16), W, X)).split())
    assert "The scale is 2^15 now, 16 times too high for this batch." in text


def test_unknown_bounds_are_not_guessed():
    """Two optimizers: which of them has the scale is not known."""
    other = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**6, max_scale=2.0**6))

    def step(params, opt_state, x):
        params, opt_state = updated(BOUNDED, params, opt_state, x)
        return params, opt_state, other.init(params)

    found = jls.calibrate(step, W, BOUNDED.init(W), X)
    assert found.init_scale == found.ceiling / 2
    assert found.notes == ()


class Trainer:
    def __init__(self):
        self.optimizer = jls.loss_scaled(optax.sgd(1e-3))

    def step(self, params, opt_state, x):
        return updated(self.optimizer, params, opt_state, x)


def test_global_with_the_name_of_an_attribute_is_not_taken():
    trainer = Trainer()
    found = jls.calibrate(trainer.step, W, trainer.optimizer.init(W), X)
    assert not any("min_scale" in note for note in found.notes)


def test_overflow_in_one_row_is_named():
    """One token of eight has a large activation, and is 0 after its norm."""

    def loss_fn(params, x):
        h = x.astype(jnp.float16) * params.astype(jnp.float16)
        h *= jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True))
        return jnp.mean(h.astype(jnp.float32) * x)

    x = jnp.ones((8, 4)).at[3].set(400.0)
    found = calibrate_plain(loss_fn, jnp.ones(4), x)
    assert found.keep is not None
    assert calibrate_plain(loss_fn, jnp.ones(4), jnp.ones((8, 4))).keep is None


def test_overflow_with_no_part_in_the_loss_is_not_named():
    def loss_fn(params, x):
        h = x.astype(jnp.float16) * params.astype(jnp.float16)
        unit = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True))
        return jnp.mean(h.astype(jnp.float32)), {"unit": unit}

    optimizer = jls.loss_scaled(optax.sgd(1e-3))
    step = jax.jit(jls.train_step(loss_fn, optimizer, has_aux=True))
    params = jnp.ones(4)
    found = jls.calibrate(step, params, optimizer.init(params), jnp.full((8, 4), 3e2))
    assert found.keep is None


def test_all_rounds_of_a_loop_are_counted():
    def loss_fn(params, xs):
        def body(w, x):
            return w, w * x

        _, ys = jax.lax.scan(body, params.astype(jnp.float16), xs.astype(jnp.float16))
        small = 2.0 ** jnp.array([[0.0], [0.0], [-45.0], [0.0]])
        return jnp.sum(ys.astype(jnp.float32) * small)

    found = calibrate_plain(loss_fn, jnp.ones(3), jnp.ones((4, 3)))
    shares = {place.operation: share for place, share in found.vanishing}
    assert shares["mul"] == 0.25


def test_what_is_divided_by_the_scale_does_not_follow_it():
    """Float32, but the new parameters are returned in float16 as well."""

    def step(scaler_state, params, x):
        loss, grads = jls.value_and_grad(loss_in(jnp.float32))(scaler_state, params, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return loss, new, jax.tree.map(lambda p: p.astype(jnp.float16), new)

    found = jls.calibrate(step, jls.dynamic().init(), W, X)
    assert (found.init_scale, found.ceiling) == (1.0, None)


def test_gradients_that_are_clipped_on_their_way_have_no_ceiling():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def loss_fn(params, x):
        h = x.astype(jnp.float16) * params.astype(jnp.float16)
        return jnp.sum(clipped(h.astype(jnp.float32)))

    found = calibrate_plain(loss_fn, jnp.ones(4), jnp.ones((2, 4)))
    assert (found.init_scale, found.ceiling) == (1.0, None)
    found = calibrate_plain(
        lambda p, x: 1e-36 * loss_in(jnp.float16)(p, x).astype(jnp.float32), W, X
    )
    assert (found.init_scale, found.ceiling) == (2.0**15, None)
    assert "Nothing overflows up to a loss scale of 2^126" in found.notes[0]


def test_loss_in_float16_is_said():
    def loss_fn(params, x):
        return jnp.mean(x.astype(jnp.float16) * params.astype(jnp.float16))

    with pytest.warns(jls.JlsWarning, match="the loss is float16"):
        found = calibrate_plain(loss_fn, jnp.ones(4), jnp.ones((2, 4)))
    assert found.ceiling == 2.0**15
    text = " ".join(str(found).split())
    assert "It is the loss itself that is float16" in text
    assert "line not known" not in text


def test_step_may_have_an_argument_called_step():
    def loss_fn(params, x, step):
        return loss_in(jnp.float16)(params, x) + 0.0 * step

    optimizer = jls.loss_scaled(optax.sgd(1e-3))
    train_step = jls.train_step(loss_fn, optimizer)
    found = jls.calibrate(train_step, W, optimizer.init(W), X, step=3)
    assert found.ceiling == calibrate_plain(loss_in(jnp.float16), W, X).ceiling
    assert not jls.why(train_step, W, found_state(optimizer, found), X, step=3).births


def found_state(optimizer, found):
    return jls.set_loss_scale(optimizer.init(W), found.init_scale)


def test_skip_nonfinite_in_float16_is_told_to_scale():
    optimizer = jls.skip_nonfinite(optax.sgd(1e-3))
    found = calibrate_plain(loss_in(jnp.float16), W, X, optimizer)
    assert "In float16 use jls.loss_scaled" in " ".join(str(found).split())


def test_largest_scale_of_the_scaler_that_is_too_low_is_said():
    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**4, max_scale=2.0**4))
    found = calibrate_plain(loss_in(jnp.float16), W, X, optimizer)
    assert found.init_scale == 2.0**4 < found.ceiling / 2
    assert found.write == ""  # it has this scale
    text = " ".join(str(found).split())
    assert f"max_scale={found.ceiling / 2:g} or more" in text
    assert "would not help" not in text


def test_line_to_write_names_the_state():
    optimizer = jls.loss_scaled(optax.sgd(1e-3))
    found = calibrate_plain(loss_in(jnp.float16), W, X, optimizer)
    assert (
        found.write
        == f"opt_state = jls.set_loss_scale(opt_state, {found.init_scale:g})"
    )
    _, found = calibrated("linen_train_state")
    assert found.write.startswith("state = jls.set_loss_scale(state, ")
    _, found = calibrated("nnx_with_dropout_and_statistics")
    assert found.write.startswith("jls.set_loss_scale(optimizer, ")


# Text and pictures.


@pytest.mark.parametrize(
    "name",
    [
        "loss_times_ten_thousand",
        "recurrent_network",
        "linen_train_state",
        "embedding_of_tokens",
        "norm_of_large_numbers",
    ],
)
def test_text(name):
    _, found = calibrated(name)
    text = str(found)
    assert repr(found) == text
    assert max(map(len, text.splitlines())) <= 80
    exponent = round(math.log2(found.init_scale))
    start = f"2^{exponent}" if exponent > 10 else f"{found.init_scale:g}"
    assert text.startswith(f"jls.calibrate: start with a loss scale of {start}. ")
    place = found.limited_by
    assert f":{place.line} in {place.function}" in text
    assert f"\n  {place.operation}\n" in f"{text}\n"
    assert not re.search(r"[.?]\.|  +$|None|nan", text)


def test_text_of_vanishing_says_shares():
    _, found = calibrated("embedding_of_tokens")
    share = found.vanishing[0][1]
    assert 0.2 < share < 0.8
    assert f"\n  {share:.0%}  " in str(found)
    assert "these gradients vanish in part" in str(found)


def test_text_names_at_most_five_places():
    place = jls.types.Place("mul", "model.py", 3, "loss_fn")
    many = tuple((place._replace(line=i), 0.5) for i in range(8))
    found = jls.types.Calibration(8.0, 16.0, place, vanishing=many)
    assert "  and 3 more" in str(found)
    one = found._replace(vanishing=((place, 0.5), (place, 0.4)))
    assert str(one).count("model.py") == 2  # it limits too
    few = found._replace(vanishing=((place, 0.009),))
    assert "vanish" not in str(few)


# Without the modules of NNX, which leave no trace in a program, and LayerNorm, which
# Flax computes in float32.
ROWS = {
    "linen_train_state": ["Block_0/Dense_0", "Block_0", "Block_0/Dense_1", "head", 1],
    "haiku_network": ["inner", "outer", 2],
    "nnx_with_dropout_and_statistics": [3],
    "mean_of_squares": [2],
    "recurrent_network": [2],
}


@pytest.mark.parametrize("name", ROWS)
def test_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    _, found = calibrated(name)
    figure = found.plot()
    figure.savefig(tmp_path / "made.png")
    (axes,) = figure.axes
    *modules, lines = ROWS[name]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    of_lines = [x for x in rows if re.fullmatch(r"scaled_programs\.py:\d+", x)]
    assert [x for x in rows if x not in of_lines] == modules
    assert len({*of_lines}) == len(of_lines) == lines
    assert of_lines == sorted(of_lines)  # in the order of the forward pass
    colors = [label.get_color() for label in axes.get_yticklabels()]
    assert sum(color != "#000000" for color in colors) == 1  # the one that limits


def test_no_picture_without_float16():
    pytest.importorskip("matplotlib")
    _, found = calibrated("gradients_in_float8")
    with pytest.raises(ValueError, match="nothing to draw: no float16"):
        found.plot()


def test_picture_on_axes_of_the_callers():
    figures = pytest.importorskip("matplotlib.figure")
    _, found = calibrated("mean_of_squares")
    figure = figures.Figure()
    axes = figure.subplots()
    assert found.plot(axes) is figure
    with pytest.raises(TypeError, match="axes must be one of"):
        found.plot([axes])


def step_in(dtypes, wrapper=jls.loss_scaled):
    """A step of two layers in these dtypes, and its arguments."""

    def loss_fn(params, x):
        for w, dtype in zip(params, dtypes, strict=True):
            x = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    optimizer = wrapper(optax.sgd(0.1))
    params = [jnp.full((16, 16), 0.1), jnp.full((16, 16), 0.1)]
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, params, optimizer.init(params), jnp.ones((4, 16))


WHOLE, HALF, BRAIN = jnp.float32, jnp.float16, jnp.bfloat16


@pytest.mark.parametrize(
    ("dtypes", "begin", "line"),
    [
        (
            (WHOLE, WHOLE),
            "no product is half: the loss scale does nothing. In float32 and ",
            "float32 in 100 % of the multiplications.",
        ),
        (
            (WHOLE, HALF),
            # Two products of the first layer, three of the second.
            "start with a loss scale of ",
            "float32 in 40 % of the multiplications, float16 in 60 %; float32 by ",
        ),
        (
            (HALF, WHOLE),
            "float16 in 40 % of the multiplications. Start with a loss scale of ",
            "float32 in 60 % of the multiplications, float16 in 40 %; float32 by ",
        ),
        (
            (HALF, HALF),
            "start with a loss scale of ",
            "float16 in 100 % of the multiplications.",
        ),
        (
            (BRAIN, BRAIN),
            "bfloat16 needs no loss scale: jls.skip_nonfinite. In float32 and bf",
            "bfloat16 in 100 % of the multiplications.",
        ),
    ],
)
def test_the_text_says_how_much_of_the_step_is_half(dtypes, begin, line):
    found = jls.calibrate(*step_in(dtypes))
    text = " ".join(str(found).split())
    assert text.startswith(f"jls.calibrate: {begin}")
    assert f" Precision: {line}" in text
    assert max(map(len, str(found).splitlines())) <= 80


def test_of_a_step_that_is_not_scaled_on_purpose_nothing_is_said():
    for dtype in (WHOLE, BRAIN):
        found = jls.calibrate(*step_in((dtype, dtype), jls.skip_nonfinite))
        assert str(found).startswith("jls.calibrate: no loss scale is needed")
        assert found.half == ""
        assert found.precision is not None


OPTIONS = {"xla_allow_excess_precision": False}
TOOLS = {
    "check_step": jls.check_step,
    "why": jls.why,
    "calibrate": jls.calibrate,
    "losses": partial(jls.calibrate, losses=True),
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_step_with_options_of_the_compiler_is_compiled_with_them(name, monkeypatch):
    asked = []
    compile_as_is = jax.stages.Lowered.compile

    def compile_noted(lowered, options=None, **kwargs):
        asked.append(options or {})
        return compile_as_is(lowered, options, **kwargs)

    optimizer = jls.loss_scaled(optax.sgd(0.1))
    step = jls.train_step(
        lambda w, x, power: jnp.mean(jnp.tanh(x @ w) ** power),
        optimizer,
        compute_dtype=jnp.float16,
    )
    step = jax.jit(step, compiler_options=OPTIONS, static_argnames="power")
    w = jnp.eye(4)
    arguments = w, optimizer.init(w), jnp.ones((2, 4))
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_noted)
    TOOLS[name](step, *arguments, power=2)
    if name != "check_step":
        assert asked
        assert all(OPTIONS.items() <= options.items() for options in asked)
