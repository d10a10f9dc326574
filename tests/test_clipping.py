"""optax's own clipping, inside the wrapper: true gradients, in at least float32.

Each test shows first what goes wrong without; the ids of the faults are those of
test_peer_faults.py. Per-example clipping (`optax.per_example_global_norm_clip`) is left
out: it reduces a batch of gradients, which no optimizer step does.
"""

import dataclasses
import enum

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import INF, NAN, ONE, assert_identical, run

import jls

pytestmark = [
    pytest.mark.standard_promotion,
    # On purpose: what clipping makes of float16 gradients.
    pytest.mark.filterwarnings("ignore:update got float16 gradients"),
]

W = jnp.array([1.0, -2.0, 0.5, 3.0])
# Those that look at a norm, and what they make of a huge gradient on the params W.
NORMS = {
    "global norm": (optax.clip_by_global_norm(1.0), [0.5] * 4),
    "block rms": (optax.clip_by_block_rms(0.25), [0.25] * 4),
    "adaptive": (
        optax.adaptive_grad_clip(0.25),
        [0.125 * float(jnp.linalg.norm(W))] * 4,
    ),
}
CLIPS = {name: clip for name, (clip, _) in NORMS.items()} | {"clip": optax.clip(0.5)}

norms = pytest.mark.parametrize(("clip", "clipped"), NORMS.values(), ids=NORMS)
clips = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)


def bare(clip, grads, params=W, jit=jax.jit):
    """What the clipping alone makes of the gradients."""
    return jit(clip.update)(grads, clip.init(params), params)[0]


def scaled(*inner, **kwargs):
    scaler = jls.dynamic(8.0, growth_interval=2)
    return jls.loss_scaled(optax.chain(*inner), scaler, **kwargs)


def update(optimizer, grads, params=W, jit=jax.jit):
    return jit(optimizer.update)(grads, optimizer.init(params), params)


@norms
def test_squares_that_overflow_float16_are_summed_in_float32(
    clip, clipped, jit_or_eager
):
    """optax O6: 4 x 300, of norm 600, had the norm inf and a zero, finite update."""
    grads = jnp.full(4, 300.0, jnp.float16)
    peer = bare(clip, grads, W.astype(jnp.float16), jit_or_eager)
    assert peer.tolist() == [0.0] * 4
    updates, state = update(scaled(clip, optax.sgd(1.0)), grads, jit=jit_or_eager)
    np.testing.assert_allclose(updates, -np.array(clipped), rtol=1e-6)
    assert (updates.dtype, bool(state.applied)) == (jnp.float32, True)


def test_every_leaf_of_a_float16_tree_counts_in_the_norm(jit_or_eager):
    """The squares of one leaf overflow, those of the other underflow in float16."""
    params = {"big": jnp.zeros(4), "small": jnp.zeros(4)}
    grads = {
        "big": jnp.full(4, 300.0, jnp.float16),
        "small": jnp.full(4, 2.0**-14, jnp.float16),
    }
    optimizer = scaled(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    updates, _ = update(optimizer, grads, params, jit_or_eager)
    np.testing.assert_allclose(updates["big"], -0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["small"], -(2.0**-14) / 600, rtol=1e-6)


BY_NORM = optax.clip_by_global_norm(1.0)
HIDING = {
    "clip": (optax.clip(0.5), jnp.array([jnp.inf, 1.0])),
    "zero_nans": (optax.zero_nans(), jnp.array([jnp.nan, 1.0])),
    "global norm": (BY_NORM, jnp.array([300.0, 300.0], jnp.float16)),
}


@pytest.mark.parametrize(("clip", "grads"), HIDING.values(), ids=HIDING)
def test_clipping_outside_hides_from_the_wrapper_what_inside_does_not(
    clip, grads, jit_or_eager
):
    """optax O7, and MindFormers' pipeline cell: clipped first, and then checked."""
    params = jnp.ones(2)
    peer = optax.chain(clip, optax.apply_if_finite(optax.sgd(1.0), 5))
    _, peer_state = update(peer, grads, params, jit_or_eager)
    assert peer_state[1].last_finite
    outside = optax.chain(clip, scaled(optax.sgd(1.0)))
    _, state = update(outside, grads, params, jit_or_eager)
    assert state[1].applied
    assert jls.metrics(state)["skips"] == 0
    _, state = update(scaled(clip, optax.sgd(1.0)), grads, params, jit_or_eager)
    is_overflow = not jnp.all(jnp.isfinite(grads))
    assert state.applied == (not is_overflow)
    assert jls.loss_scale(state) == (4.0 if is_overflow else 8.0)


@clips
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=["inf", "-inf", "nan"])
def test_no_clipping_makes_a_bad_step_a_good_one(bad, clip, jit_or_eager):
    """optax.clip makes 0.5 of an inf; a norm of inf makes 0 of all the others."""
    params = jnp.array([1.0, -0.0])
    peer = bare(clip, bad, params, jit_or_eager)
    assert jnp.any(jnp.isfinite(peer)) or jnp.any(jnp.isnan(bad))
    inner = clip, optax.adamw(0.5)
    new, state = run(scaled(*inner), params, [bad, bad], jit_or_eager)
    assert_identical(new, params)
    assert_identical(state.inner_state, scaled(*inner).init(params).inner_state)
    assert (state.skips, jls.loss_scale(state)) == (2, 2.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gradients_below_the_norm_stay_bit_for_bit(dtype, jit_or_eager):
    """MindFormers multiplies by max_norm / (max_norm + 1e-6): 0.3 becomes 0.29999971"""
    grads = jnp.array([0.3, -0.7, 0.1, 1e-7], dtype)
    wide = grads.astype(jnp.float32)
    norm = jnp.linalg.norm(wide)
    factor = 1.0 / (jnp.maximum(norm, 1.0) + 1e-6)
    assert norm < 1.0
    assert np.all(wide * factor != wide)
    for max_norm in (1.0, float(np.nextafter(np.float32(norm), np.inf)) + 1e-6, 1e30):
        clip = optax.clip_by_global_norm(max_norm)
        updates, _ = update(scaled(clip, optax.scale(1.0)), grads, jit=jit_or_eager)
        assert_identical(updates, wide)
    for clip in (
        optax.clip(0.75),
        optax.clip_by_block_rms(0.75),
        optax.adaptive_grad_clip(0.75),
    ):
        updates, _ = update(scaled(clip, optax.scale(1.0)), grads, jit=jit_or_eager)
        assert_identical(updates, wide)


@norms
def test_a_norm_is_right_up_to_1_8e19(clip, clipped, jit_or_eager):
    optimizer = scaled(clip, optax.sgd(1.0))
    for huge in (1e9, 9e18):
        updates, state = update(optimizer, jnp.full(4, huge), jit=jit_or_eager)
        np.testing.assert_allclose(updates, -np.array(clipped), rtol=1e-6)
        assert state.applied


# The sum of the squares that a clip makes is the check --------------------------------

TWO = {"a": jnp.array([1.0, -0.0]), "b": jnp.array([[0.5], [2.0]])}
# One leaf overflows when squared; no leaf does, but their sum; bad ones.
TREES = {
    "one leaf": ({"a": jnp.full(2, 1e30), "b": jnp.ones((2, 1))}, [True, False]),
    "their sum": (jax.tree.map(lambda x: 0 * x + 1.2e19, TWO), [False, False]),
    "inf": ({"a": jnp.ones(2), "b": jnp.array([[1.0], [jnp.inf]])}, [False, True]),
    "nan": ({"a": jnp.array([jnp.nan, 1]), "b": jnp.ones((2, 1))}, [True, False]),
}
trees = pytest.mark.parametrize(("grads", "bad"), TREES.values(), ids=TREES)


@pytest.mark.eager
@pytest.mark.cover(2)
@trees
@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize("spikes", [None, jls.spikes(window=4)], ids=["", "spikes"])
def test_gradients_whose_squares_have_no_finite_sum_are_skipped(
    grads, bad, check_updates, spikes, jit_or_eager
):
    """optax turns all of them into 0, and Adam steps on momentum alone."""
    inner = optax.chain(BY_NORM, optax.adam(0.1))
    optimizer = jls.loss_scaled(
        inner, jls.dynamic(8.0), check_updates=check_updates, spikes=spikes
    )
    step = jit_or_eager(optimizer.update)
    good = jax.tree.map(jnp.ones_like, TWO)
    _, state = step(good, optimizer.init(TWO), TWO)
    updates, new = step(grads, state, TWO)
    assert_identical(updates, jax.tree.map(lambda x: jnp.full_like(x, -0.0), TWO))
    assert_identical(new.inner_state, state.inner_state)
    assert_identical(new.spike_state, state.spike_state)
    assert (new.applied, new.skips) == (False, 1)
    assert new.last_skip_reason == jls.types.SkipReason.GRADIENTS
    assert new.nonfinite_leaves.tolist() == bad
    assert new.scaler_state.loss_scale < state.scaler_state.loss_scale
    _, recovered = step(good, new, TWO)
    assert recovered.applied


@pytest.mark.eager
@trees
def test_without_a_clip_by_the_norm_the_check_is_of_every_element(
    grads, bad, jit_or_eager
):
    for inner in (optax.sgd(0.1), optax.chain(optax.clip(1e37), BY_NORM)):
        optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
        _, state = update(optimizer, grads, TWO, jit_or_eager)
        is_finite = bool(jls.all_finite(grads))
        assert state.applied == is_finite
        assert state.nonfinite_leaves.tolist() == ([False, False] if is_finite else bad)


@pytest.mark.eager
@trees
def test_the_report_has_the_norm_of_the_clip(grads, bad, jit_or_eager):
    for inner, is_clipped in ((BY_NORM, True), (optax.scale(1.0), False)):
        optimizer = jls.loss_scaled(optax.chain(inner, optax.sgd(0.1)))
        apply = jit_or_eager(lambda *args, o=optimizer: jls.apply_gradients(o, *args))
        good = jax.tree.map(lambda x: 3 * jnp.ones_like(x), TWO)
        assert apply(good, optimizer.init(TWO), TWO)[2].global_norm == 6.0
        params, _, report = apply(grads, optimizer.init(TWO), TWO)
        is_finite = bool(jls.all_finite(grads)) and not is_clipped
        assert report.skipped == (not is_finite)
        assert jnp.isfinite(report.global_norm) == is_finite
        if report.skipped:
            assert_identical(params, TWO)


def test_the_gradients_are_seen_once_by_clip_and_check():
    """In the program of every platform: no element is looked at but by the clip."""
    optimizer = jls.loss_scaled(optax.chain(BY_NORM, optax.sgd(0.1)))
    state = optimizer.init(TWO)
    traced = jax.jit(optimizer.update).trace(TWO, state)
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.is_finite") <= 4  # of numbers: leaves, sum, loss
        assert text.count("applies stablehlo.add across") == len(TWO)
    program = str(jax.make_jaxpr(optimizer.update)(TWO, state))
    assert program.count("reduce_sum") == len(TWO)


def complex_and_narrow():
    params = {"c": jnp.ones(2, jnp.complex64), "h": jnp.ones(3, jnp.float16)}
    return params, jax.tree.map(lambda x: 2 * x, params)


@pytest.mark.filterwarnings("ignore:.*parameters are float16")
def test_complex_and_narrow_gradients_are_summed_as_the_clip_sums_them(jit_or_eager):
    params, good = complex_and_narrow()
    optimizer = jls.loss_scaled(optax.chain(BY_NORM, optax.sgd(0.1)))
    _, state = update(optimizer, good, params, jit_or_eager)
    assert state.applied
    huge = good | {"c": jnp.array([1, 1e25j], jnp.complex64)}
    _, state = update(optimizer, huge, params, jit_or_eager)
    assert (state.applied, state.nonfinite_leaves.tolist()) == (False, [True, False])
    _, state = update(scaled(optax.scale(1.0)), huge, params, jit_or_eager)
    assert state.applied


@pytest.mark.standard_promotion
def test_the_norm_of_a_complex_sum_is_real(jit_or_eager):
    def halved(updates, state, params=None):
        total = sum(jnp.sum(jnp.conj(x) * x) for x in jax.tree.leaves(updates))
        return jax.tree.map(lambda x: x / jnp.sqrt(total.real), updates), state

    optimizer = jls.loss_scaled(optax.GradientTransformation(lambda _: (), halved))
    params = jnp.array([3 + 0j, 4j], jnp.complex64)
    apply = jit_or_eager(lambda *args: jls.apply_gradients(optimizer, *args))
    assert apply(params, optimizer.init(params), params)[2].global_norm == 5.0


def test_a_derivative_through_a_clipped_step_is_that_of_the_clip(jit_or_eager):
    optimizer = jls.loss_scaled(optax.chain(BY_NORM, optax.sgd(0.5)))
    bare = optax.chain(BY_NORM, optax.sgd(0.5))
    state, inner_state = optimizer.init(W), bare.init(W)

    def moved(update, state, grads):
        return jnp.sum(update(grads, state, W)[0] * jnp.arange(4.0))

    ours = jit_or_eager(jax.grad(lambda g: moved(optimizer.update, state, g)))(X)
    theirs = jax.grad(lambda g: moved(bare.update, inner_state, g))(X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    for bad in (X.at[0].set(jnp.nan), X.at[1].set(1e30)):
        ours = jit_or_eager(jax.grad(lambda g: moved(optimizer.update, state, g)))(bad)
        assert_identical(ours, jnp.zeros(4))


@pytest.mark.standard_promotion
def test_an_eager_step_that_branches_on_numbers_is_checked_element_by_element():
    """It cannot be traced: nobody knows what it sums."""

    def halved(updates, state, params=None):
        if float(jnp.sum(updates**2)) > 1:
            updates = updates / 2
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), halved)
    optimizer = jls.loss_scaled(inner)
    for grads, applied in ((X, True), (jnp.full(4, 1e30), True), (X / 0, False)):
        _, state = optimizer.update(grads, optimizer.init(W), W)
        assert state.applied == applied


@trees
def test_each_tool_says_that_the_norm_overflowed(grads, bad):
    optimizer = jls.loss_scaled(optax.chain(BY_NORM, optax.adam(0.1)), jls.static(8.0))

    @jax.jit
    def step(params, state, grads):
        return jls.apply_gradients(optimizer, grads, state, params)

    state = optimizer.init(TWO)
    found = jls.why(step, TWO, state, grads)
    _, new, _ = step(TWO, state, grads)
    health = jls.health(new, TWO)
    is_finite = bool(jls.all_finite(grads))
    assert ("sum of the squares of the gradients" in found.results) == is_finite
    assert ("their global norm is over 1.8e19" in str(found)) == is_finite
    assert ("global norm is over 1.8e19" in health.sentence) == (not any(bad))
    if is_finite:
        (birth,) = found.births
        assert birth.kind == "inf"
        assert not birth.place.is_backward
    if any(bad):
        assert "a" in health.sentence or "b" in health.sentence


@pytest.mark.parametrize(
    ("scaler", "skips", "verdict"),
    [
        (jls.dynamic(8.0), 1, "recovering"),
        (jls.dynamic(8.0, min_scale=1.0), 5, "at floor"),
        (jls.static(1.0), 30, "skipping"),
        (jls.dynamic(8.0, min_scale=1.0), 51, "stalled"),
        (jls.static(1.0), 51, "stalled"),
    ],
)
def test_health_does_not_call_a_norm_that_overflows_a_bad_gradient(
    scaler, skips, verdict
):
    optimizer = jls.loss_scaled(optax.chain(BY_NORM, optax.sgd(0.1)), scaler)
    params, step = {"a": jnp.ones(1), "b": jnp.ones(1)}, jax.jit(optimizer.update)
    _, state = step(params, optimizer.init(params), params)
    for _ in range(skips):
        grads = jax.tree.map(lambda x: 1.5e19 * x, params)  # each square is finite
        _, state = step(grads, state, params)
    health = jls.health(state, params, optimizer=optimizer)
    assert health.verdict == verdict
    assert "inf or NaN" not in health.sentence
    assert "Every gradient is finite, but their global norm" in health.sentence


def test_a_clip_by_value_before_keeps_the_norm_finite(jit_or_eager):
    """The way out for gradients over 1.8e19: then every element is looked at."""
    clips = optax.clip(1e12), optax.clip_by_global_norm(1.0)
    grads = jnp.array([1e30, -1e30, 1.0, 0.0])
    updates, state = update(scaled(*clips, optax.sgd(1.0)), grads, jit=jit_or_eager)
    np.testing.assert_allclose(updates, [-(0.5**0.5), 0.5**0.5, 0, 0], atol=1e-6)
    assert state.applied
    moderate = jnp.array([3.0, 4.0, 0.0, 0.0])
    updates, _ = update(scaled(*clips, optax.sgd(1.0)), moderate, jit=jit_or_eager)
    np.testing.assert_allclose(updates, [-0.6, -0.8, 0, 0], rtol=1e-6)


X = jnp.array([3.0, -0.25, 0.125, 1.5])


@clips
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("size", [2.0**-6, 1.0], ids=["below", "above"])
def test_the_threshold_is_of_true_gradients_whatever_the_loss_scale(
    size, dtype, clip, jit_or_eager
):
    """Pain 5: a threshold of 1 on gradients times 2**15 left a 32768th of the update.

    The same compiled step for both scales, hence the same bits.
    """
    x = (size * X / 4).astype(dtype)

    def loss_fn(w):
        return jnp.sum((w.astype(dtype) * x).astype(jnp.float32))

    expected = bare(clip, x.astype(jnp.float32))
    clipped_scaled = bare(clip, jax.grad(lambda w: 2.0**13 * loss_fn(w))(W))
    assert not np.allclose(clipped_scaled / 2.0**13, expected, rtol=0.1)

    optimizer = jls.loss_scaled(optax.chain(clip, optax.sgd(1.0)), jls.static(8.0))

    @jit_or_eager
    def step(params, state):
        grads = jls.grad(loss_fn)(state, params)
        return optimizer.update(grads, state, params)[0]

    state = optimizer.init(W)
    updates = [step(W, jls.set_loss_scale(state, scale)) for scale in (2.0**3, 2.0**15)]
    assert_identical(*updates)
    chex.assert_trees_all_close(updates[0], -expected, rtol=1e-6)


def test_a_max_norm_of_zero_moves_nothing(jit_or_eager):
    clip = optax.clip_by_global_norm(0.0)
    params, state = run(scaled(clip, optax.sgd(1.0)), W, [X, 2 * X], jit_or_eager)
    assert_identical(params, W)
    assert state.applied


@pytest.mark.parametrize(
    "clip", [optax.clip_by_global_norm(0.0), optax.clip_by_block_rms(0.0)]
)
@pytest.mark.filterwarnings("ignore:.*parameters are bfloat16")
def test_a_max_norm_of_zero_on_a_zero_gradient_needs_the_check_of_updates(
    clip, jit_or_eager
):
    """0 / 0 inside optax: a finite gradient, a NaN update."""
    zeros = jnp.zeros(4)
    assert np.all(np.isnan(bare(clip, zeros, jit=jit_or_eager)))
    checked = scaled(clip, optax.sgd(1.0), check_updates=True)
    params, state = run(checked, W, [zeros], jit_or_eager)
    assert_identical(params, W)
    assert (state.applied, state.skips) == (False, 1)
    narrow = W.astype(jnp.bfloat16)  # checked unasked
    params, state = run(scaled(clip, optax.sgd(1.0)), narrow, [zeros], jit_or_eager)
    assert_identical(params, narrow)
    params, state = run(scaled(clip, optax.sgd(1.0)), W, [zeros], jit_or_eager)
    assert state.applied  # float32: as documented, only where it is asked for
    assert np.all(np.isnan(params))


@pytest.mark.parametrize("k", [2, 4])
def test_clipping_under_accumulation_is_of_the_mean(k):
    """The norm is of the whole batch's gradient, and bad micro-batches do not count."""
    clip = optax.clip_by_global_norm(1.0)
    steps = optax.MultiSteps(optax.chain(clip, optax.sgd(1.0)), k)
    optimizer = scaled(steps.gradient_transformation())
    micro = [X.at[0].set(jnp.nan), 2 * X, *[0 * X] * (k - 1)]
    params, state = run(optimizer, W, micro)
    mean = 2 * X / k
    expected = W - mean / jnp.maximum(1.0, jnp.linalg.norm(mean))
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert state.skips == 1


@pytest.mark.standard_promotion
@pytest.mark.parametrize("size", [4, 1000])
def test_clipping_inside_sees_float32_gradients(size):
    """optax O6, R8: squares overflowed in float16, the update was a finite 0."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = jls.loss_scaled(inner, jls.dynamic(8.0))
    w = jnp.zeros(size)
    params, state = run(optimizer, w, [jnp.full(size, 300.0, jnp.float16)])
    np.testing.assert_allclose(params, -(size**-0.5), rtol=1e-6)
    assert state.applied


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "mask", [optax.clip(1.0), optax.zero_nans(), optax.clip_by_global_norm(1.0)]
)
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_what_hides_an_overflow_inside_does_not_hide_it_from_the_wrapper(mask, bad):
    """optax O7, R8: clip made 1 of an inf, zero_nans 0 of a NaN, and nobody knew."""
    optimizer = jls.loss_scaled(optax.chain(mask, optax.sgd(1.0)), jls.dynamic(8.0))
    params, state = run(optimizer, ONE, [bad])
    assert_identical(params, ONE)
    assert state.skips == 1
    assert jls.loss_scale(state) == 4.0


# What an attack has found -------------------------------------------------------------


@pytest.mark.standard_promotion
@pytest.mark.parametrize("is_first", [True, False])
def test_effects_of_the_optimizer_happen_once_and_never_see_nan(is_first, jit_or_eager):
    seen = []

    def update(grads, count, params=None):
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(grads)))
        jax.debug.callback(lambda *x: seen.append(tuple(map(float, x))), norm, count)
        return grads, count + 1

    counting = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    chain = [counting, BY_NORM] if is_first else [BY_NORM, counting]
    optimizer = jls.loss_scaled(optax.chain(*chain, optax.sgd(0.1)))
    step, state = jit_or_eager(optimizer.update), optimizer.init(TWO)
    for grads in (TWO, TREES["nan"][0], TREES["one leaf"][0]):
        _, state = step(grads, state, TWO)
    jax.effects_barrier()
    assert len(seen) == 3
    assert np.isfinite(seen).all()
    assert state.skips == 2


@pytest.mark.standard_promotion
def test_an_eager_step_that_may_branch_is_checked_element_by_element():
    """On a number, a member of an enumeration or a function: as it is called."""

    class Mode(enum.Enum):
        PLAIN = 0
        CLIPPED = 1

    def update(grads, state, params=None, *, clips=True, **extra):
        clips = clips in (True, Mode.CLIPPED, max)
        return BY_NORM.update(grads, state) if clips else (grads, state)

    inner = optax.GradientTransformationExtraArgs(BY_NORM.init, update)
    grads = TREES["one leaf"][0]
    for clips in (False, True, 0.0, 1.0, Mode.PLAIN, Mode.CLIPPED, min, max):
        optimizer = jls.loss_scaled(inner)
        _, state = optimizer.update(grads, optimizer.init(TWO), TWO, clips=clips)
        assert state.applied
        bad = jax.tree.map(lambda x: x / 0, TWO)
        _, state = optimizer.update(bad, optimizer.init(TWO), TWO, clips=clips)
        assert not state.applied


def test_eager_steps_look_again_for_gradients_of_another_shape():
    optimizer = jls.loss_scaled(BY_NORM)
    for shape in ((2,), (3, 2), ()):
        for size, applied in ((1.0, True), (1e20, False)):
            grads = jnp.full(shape, size)
            _, state = optimizer.update(grads, optimizer.init(grads))
            assert state.applied == applied


@pytest.mark.standard_promotion
def test_eager_steps_are_traced_once_for_arrays_of_the_same_types():
    traces = []

    def update(grads, state, params=None, *, step, **extra):
        if isinstance(jax.tree.leaves(grads)[0], jax.core.Tracer):
            traces.append(jnp.shape(step))
        return BY_NORM.update(grads, state)

    inner = optax.GradientTransformationExtraArgs(BY_NORM.init, update)
    optimizer = jls.loss_scaled(inner)
    state = optimizer.init(TWO)
    for step in (jnp.int32(7), jnp.int32(8), jnp.ones(3), jnp.int32(9)):
        given = {"step": step, "value": jnp.float32(0.5)}
        _, state = optimizer.update(TWO, state, TWO, **given)
    assert state.applied
    assert traces == [(), (3,)]


@pytest.mark.standard_promotion
def test_eager_steps_of_a_model_whose_static_field_has_no_hash_are_made():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: jax.Array
        sizes: list[int] = dataclasses.field(metadata={"static": True})

    params = Model(jnp.ones(2), [1, 2])
    optimizer = jls.loss_scaled(BY_NORM)
    _, state = optimizer.update(params, optimizer.init(params), params)
    assert state.applied


@pytest.mark.standard_promotion
def test_eager_steps_look_again_for_another_tree():
    mask = optax.masked(BY_NORM, lambda tree: {name: name != "b" for name in tree})
    optimizer = jls.loss_scaled(mask)
    for names in ("ac", "ab"):
        tree = {name: jnp.full(2, 1e20) for name in names}
        state = optimizer.init(tree)
        for params in (tree, None):
            _, eager = optimizer.update(tree, state, params)
            _, jitted = jax.jit(optimizer.update)(tree, state, params)
            assert eager.applied == jitted.applied == ("b" in names)


def test_sums_of_two_widths_are_found():
    with jax.enable_x64(True):
        tree = {"a": jnp.full(2, 1e20, jnp.float32), "b": jnp.ones(2, jnp.float64)}
        optimizer = jls.loss_scaled(BY_NORM)
        for update in (jax.jit(optimizer.update), optimizer.update):
            _, state = update(tree, optimizer.init(tree), tree)
            assert not state.applied


@pytest.mark.standard_promotion
def test_the_sum_is_found_where_devices_differ():
    mesh = jax.sharding.Mesh(jax.devices()[:1], "d")
    spec = jax.sharding.PartitionSpec
    optimizer = jls.loss_scaled(BY_NORM, axis_name="d")
    state = optimizer.init(jnp.ones(2))
    for check_vma in (True, False):
        update = jax.shard_map(
            lambda grads, state: optimizer.update(grads, state)[1].applied,
            mesh=mesh,
            in_specs=(spec("d"), spec()),
            out_specs=spec(),
            check_vma=check_vma,
        )
        assert jax.jit(update)(jnp.ones(2), state)
        assert not jax.jit(update)(jnp.full(2, 1e20), state)
