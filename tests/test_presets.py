"""Each preset against the system of that name: its rule, and the thing itself."""

import inspect
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_presets
from flax.training.dynamic_scale import DynamicScale
from shared import SEQUENCES, judged, trajectories

import jls
from jls import presets

# Scales from 8, so that a floor of 1 is three backoffs away; factors that are float32
# numbers, and powers of two where the system divides.
SMALL = [
    *[
        ("torch", {"init_scale": 8.0, "growth_interval": n} | factors)
        for n in (1, 2, 3)
        for factors in ({}, {"growth_factor": 1.5, "backoff_factor": 0.375})
    ],
    *[
        (
            name,
            {
                "init_loss_scaling": 8.0,
                "incr_ratio": 1.5,
                "decr_ratio": 0.75,
                "incr_every_n_steps": n,
                "decr_every_n_nan_or_inf": m,
            },
        )
        for name in ("paddle", "paddle_doc")
        for n in (1, 2, 3)
        for m in (1, 2, 3)
    ],
    *[
        ("mindspore", {"scale_value": 8, "scale_factor": factor, "scale_window": n})
        for n in (1, 2, 3)
        for factor in (2, 4)
    ],
    *[
        (
            "mindformers_adaptive",
            {
                "loss_scale_value": 8,
                "scale_factor": factor,
                "scale_window": first,
                "max_scale_window": longest,
                "min_scale_window": shortest,
            },
        )
        for factor in (2, 3)
        for first, longest, shortest in [(1, 3, 1), (2, 3, 1), (3, 3, 1), (3, 3, 2)]
    ],
    *[("keras", {"initial_scale": 8.0, "dynamic_growth_steps": n}) for n in (1, 2, 3)],
    *[
        ("flax", {"scale": 8.0, "growth_interval": n, "minimum_scale": floor})
        for n in (1, 2, 3)
        for floor in (None, 2.0)
    ],
    *[
        (
            "deepspeed",
            {
                "init_scale": 8.0,
                "scale_window": n,
                "delayed_shift": shift,
                "consecutive_hysteresis": consecutive,
                "min_scale": 2.0,
            },
        )
        for n in (1, 2, 3)
        for shift in (1, 2, 3)
        for consecutive in (False, True)
    ],
    *[
        (
            "megatron",
            {
                "initial_scale": 8.0,
                "growth_interval": n,
                "hysteresis": h,
                "growth_factor": 1.5,
                "backoff_factor": 0.75,
                "min_scale": 3.0,
            },
        )
        for n in (1, 2, 3)
        for h in (1, 2, 3)
    ],
]
NAMES = [name for name in presets.__all__ if "spike" not in name]
REQUIRED = {
    "mindspore": {"scale_value": 1024, "scale_factor": 2, "scale_window": 1000},
    "mindformers_adaptive": {
        "loss_scale_value": 4096,
        "scale_factor": 2,
        "scale_window": 20,
    },
}
SWITCHES = ["enable", "enabled", "use_dynamic_loss_scaling", "consecutive_hysteresis"]


def rule(name, flags, **kwargs):
    """What the system does, with its own defaults."""
    return list(getattr(reference_presets, name)(flags, **kwargs))


def loss_scales(scaler, flags):
    """The loss scale after each step, in one jitted scan."""
    return trajectories(scaler, scaler.init(), np.atleast_2d(flags)).loss_scale


def random_flags(length, seed, gap):
    """Overflows about `gap` steps apart, singly and in bursts."""
    random = np.random.default_rng(seed)
    finite = random.random(length) > 1 / gap
    for start in random.integers(0, length, max(1, length // (8 * gap))):
        finite[start : start + random.integers(2, 6)] = False
    return finite


def test_every_preset_is_tested():
    assert {name for name, _ in SMALL} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [pytest.param(*x, marks=[pytest.mark.more] * (i % 2)) for i, x in enumerate(SMALL)],
)
def test_all_short_runs_follow_the_rule_of_the_system(name, kwargs):
    ours = loss_scales(getattr(presets, name)(**kwargs), SEQUENCES)
    expected = [rule(name, flags, **kwargs) for flags in SEQUENCES.tolist()]
    assert np.asarray(ours).tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_with_the_defaults_follow_the_rule_of_the_system(name):
    kwargs = REQUIRED.get(name, {})
    scaler = getattr(presets, name)(**kwargs)
    for seed in range(3):
        flags = random_flags(20_000, seed, gap=1500)
        (ours,) = loss_scales(scaler, flags)
        assert np.asarray(ours).tolist() == rule(name, flags.tolist(), **kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs"), list({name: (name, kwargs) for name, kwargs in SMALL}.values())
)
def test_eager_steps_follow_the_rule_of_the_system(name, kwargs):
    flags = [True] * 4 + [False, True, False, False, True, True, True, True, False]
    scaler = getattr(presets, name)(**kwargs)
    state, ours = scaler.init(), []
    for flag in flags:
        state = scaler.adjust(state, flag)
        ours.append(state.loss_scale.item())
    assert ours == rule(name, flags, **kwargs)


@pytest.mark.parametrize(
    ("longest", "shortest"),
    [(1000, 20), (150, 20), (21, 20), (3, 1), (101, 100), (99, 98), (5000, 7), (2, 1)],
)
def test_ladder_is_that_of_mindformers(longest, shortest):
    windows = reference_presets.mindformers_windows(longest, shortest)
    first = max(1, windows[0])
    scaler = presets.mindformers_adaptive(8, 2, first, longest, shortest)
    ladder = scaler.hyperparameters["intervals"]
    assert ladder == tuple(max(1, window) for window in windows)


def test_window_that_is_not_on_the_ladder_warns_and_begins_with_the_shortest():
    with pytest.warns(UserWarning, match=r"scale_window 25 is not one of \(20, 30, "):
        scaler = presets.mindformers_adaptive(8, 2, 25)
    assert scaler.init().rung == 1
    flags = np.ones(100, bool)
    kwargs = {"loss_scale_value": 8, "scale_factor": 2, "scale_window": 25}
    expected = rule("mindformers_adaptive", flags.tolist(), **kwargs)
    assert loss_scales(scaler, flags)[0].tolist() == expected


def test_window_of_0_acts_as_1():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = presets.mindformers_adaptive(8, 2, 1, 150, 20)
    kwargs = {"loss_scale_value": 8, "scale_factor": 2, "scale_window": 0}
    kwargs |= {"max_scale_window": 150, "min_scale_window": 20}
    flags = random_flags(400, seed=0, gap=40)
    expected = rule("mindformers_adaptive", flags.tolist(), **kwargs)
    assert loss_scales(scaler, flags)[0].tolist() == expected


@pytest.mark.parametrize(
    ("scaler", "scale"),
    [
        (presets.torch(enabled=False), 1.0),
        (presets.paddle(enable=False), 1.0),
        (presets.paddle(use_dynamic_loss_scaling=False), 65536.0),
        (presets.paddle_doc(enable=False), 1.0),
        (presets.paddle_doc(use_dynamic_loss_scaling=False), 32768.0),
    ],
)
def test_disabled_scaling_is_static(scaler, scale):
    state = scaler.init()
    for flag in (False, True, False):
        state = scaler.adjust(state, flag)
    assert state.loss_scale == scale


@pytest.mark.parametrize("name", NAMES)
def test_scale_stays_finite_and_positive_where_that_of_the_system_may_not(name):
    kwargs = dict(SMALL)[name]
    scaler = getattr(presets, name)(**kwargs)
    flags = np.stack([np.ones(1000, bool), np.zeros(1000, bool)])
    up, down = np.asarray(loss_scales(scaler, flags))
    assert up[-1] == 2.0**126
    assert (np.diff(up) >= 0).all()
    floors = {"flax": 2.0, "deepspeed": 2.0, "megatron": 3.0}
    floors |= {"mindspore": 1.0, "mindformers_adaptive": 1.0}
    assert down[-1] == floors.get(name, 2.0**-126)


@pytest.mark.parametrize("name", NAMES)
def test_overflow_never_raises_a_scale_below_the_floor(name):
    scaler = getattr(presets, name)(**dict(SMALL)[name])
    state = jls.set_loss_scale(scaler.init(), 2.0**-126)
    for _ in range(4):
        state = scaler.adjust(state, False)
    assert state.loss_scale == 2.0**-126


ARGUMENTS = [
    (name, argument)
    for name in NAMES
    for argument in inspect.signature(getattr(presets, name)).parameters
]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_argument_of_another_type_is_a_type_error_that_names_it(name, argument):
    kwargs = REQUIRED.get(name, {}) | {argument: "2"}
    with pytest.raises(TypeError, match=f"^{argument} must be .*'2'"):
        getattr(presets, name)(**kwargs)


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, argument in ARGUMENTS if argument not in SWITCHES],
)
@pytest.mark.parametrize("value", [-1, 0, 10**400])
def test_argument_out_of_range_is_a_value_error_that_names_it(name, argument, value):
    kwargs = REQUIRED.get(name, {}) | {argument: value}
    with pytest.raises(ValueError, match=f"^{argument} must be .* got {value}"):
        getattr(presets, name)(**kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch", {"growth_factor": 1.0}, "growth_factor must be finite and > 1"),
        ("torch", {"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\)"),
        ("paddle", {"incr_ratio": 1.0}, "incr_ratio must be finite and > 1"),
        ("paddle", {"decr_ratio": 1.0}, r"decr_ratio must be in \(0, 1\)"),
        ("mindspore", {"scale_value": 0.5}, r"scale_value must be from 1 to 2\^126"),
        ("mindspore", {"scale_factor": 1}, "scale_factor must be finite and > 1"),
        ("mindspore", {"scale_window": 2.0}, "scale_window must be an integer"),
        (
            "mindformers_adaptive",
            {"loss_scale_value": 0.5},
            r"loss_scale_value must be from 1 to 2\^126",
        ),
        (
            "mindformers_adaptive",
            {"min_scale_window": 1000},
            "min_scale_window must be < max_scale_window, got 1000 >= 1000",
        ),
        (
            "flax",
            {"minimum_scale": 2.0, "scale": 1.0},
            "minimum_scale must be <= scale, got 2.0 > 1.0",
        ),
        (
            "deepspeed",
            {"min_scale": 2.0, "init_scale": 1.0},
            "min_scale must be <= init_scale, got 2.0 > 1.0",
        ),
        (
            "megatron",
            {"min_scale": 2.0, "initial_scale": 1.0},
            "min_scale must be <= initial_scale, got 2.0 > 1.0",
        ),
    ],
)
def test_error_speaks_the_language_of_the_system(name, kwargs, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        getattr(presets, name)(**(REQUIRED.get(name, {}) | kwargs))


# The systems themselves, where they are installed. Overflows are so frequent that the
# scale stays in the range that all of them share.
RUNS = [
    pytest.param(
        random_flags(300, seed, gap=gap), interval, marks=[pytest.mark.more] * seed
    )
    for seed in range(2)
    for interval, gap in [(1, 3), (2, 4), (3, 6)]
]


def flax_scales(flags, **kwargs):
    @jax.jit
    def step(scale, factor):
        return scale.value_and_grad(lambda x: x * factor)(jnp.float32(1.0))[0]

    state, scales = DynamicScale(**kwargs), []
    for finite in flags:
        state = step(state, jnp.float32(1.0 if finite else jnp.inf))
        scales.append(float(state.scale))
    return scales


@pytest.mark.standard_promotion
@pytest.mark.cover(1)
@pytest.mark.parametrize(("flags", "interval"), RUNS)
@pytest.mark.parametrize("floor", [2.0**-126, 4.0, None])
def test_flax_itself_moves_so(flags, interval, floor):
    # As releases up to 0.12.12 do; a later one may have mended it.
    mended = flax_scales([True], growth_interval=1)[0] != 65536.0
    theirs = flax_scales(
        flags, growth_interval=interval + mended, minimum_scale=floor, scale=2.0**14
    )
    ours = presets.flax(growth_interval=interval, minimum_scale=floor, scale=2.0**14)
    assert loss_scales(ours, flags)[0].tolist() == theirs


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("flags", "period"), RUNS)
def test_jmp_itself_moves_as_dynamic(flags, period):
    jmp = pytest.importorskip("jmp")
    state, theirs = jmp.DynamicLossScale(jnp.float32(2.0**14), period=period), []
    for finite in flags:
        state = state.adjust(jnp.asarray(finite))
        theirs.append(float(state.loss_scale))
    ours = jls.dynamic(2.0**14, growth_interval=period, max_scale=2.0**126)
    assert loss_scales(ours, flags)[0].tolist() == theirs


@pytest.mark.parametrize(("flags", "interval"), RUNS)
@pytest.mark.parametrize(
    "factors", [{}, {"growth_factor": 1.5, "backoff_factor": 0.75}]
)
def test_torch_itself_moves_so(flags, interval, factors):
    torch = pytest.importorskip("torch")
    kwargs = {"init_scale": 2.0**14, "growth_interval": interval} | factors
    scaler = torch.amp.GradScaler("cpu", **kwargs)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = []
    for finite in flags:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if not finite:
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())
    assert loss_scales(presets.torch(**kwargs), flags)[0].tolist() == theirs


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("flags", "steps"), RUNS)
def test_keras_itself_moves_so(flags, steps, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    keras = pytest.importorskip("keras")
    kwargs = {"initial_scale": 2.0**14, "dynamic_growth_steps": steps}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), **kwargs)
    variable = keras.Variable(np.ones(2, np.float32))
    optimizer.build([variable])
    place = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    step = jax.jit(optimizer.stateless_apply)
    weights, state = [variable.value], [v.value for v in optimizer.variables]
    theirs = []
    for finite in flags:
        grad = jnp.asarray([1.0, 1.0 if finite else jnp.inf])
        weights, state = step(state, [grad], weights)
        theirs.append(float(state[place]))
    assert loss_scales(presets.keras(**kwargs), flags)[0].tolist() == theirs


# Spike policies: which of the steps are skipped.


def signals(seed, count, length):
    """Losses and norms with spikes, bursts and new levels; no two alike."""
    rng = np.random.default_rng(seed)
    values = rng.lognormal(0.0, 0.3, (2, count, length))
    values *= np.where(rng.random(values.shape) < 0.05, rng.uniform(3, 1e4), 1.0)
    level = np.where(np.arange(length) < rng.integers(length, size=(count, 1)), 1, 3.0)
    losses, norms = np.float32(values * level)
    return losses - 2, norms


def skips(policy, losses, norms):
    return judged(policy, losses, norms)[0]


WINDOWED = ["levanter_spikes", "maxtext_spikes", "olmo_spikes"]


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(("window", "sigmas"), [(6, 1.5), (16, 3.0), (33, 6.0)])
def test_spike_policies_follow_the_rules_in_plain_python(name, window, sigmas):
    losses, norms = signals(window, 334, 80)
    ours = np.asarray(skips(getattr(presets, name)(window, sigmas), losses, norms))
    assert ours.any()
    rule = getattr(reference_presets, name)
    for i, pairs in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        expected = list(rule(list(zip(*pairs, strict=True)), window, sigmas))
        assert ours[i].tolist() == expected


@pytest.mark.parametrize(("norm", "loss"), [(3.0, None), (None, 2.0), (3.0, 2.0)])
def test_spike_limits_are_constant(norm, loss):
    losses, norms = signals(0, 334, 40)
    ours = np.asarray(skips(presets.spike_limit(norm, loss), losses, norms))
    assert 0 < ours.mean() < 1
    for i, pairs in enumerate(zip(losses.tolist(), norms.tolist(), strict=True)):
        pairs = list(zip(*pairs, strict=True))
        assert ours[i].tolist() == list(
            reference_presets.spike_limit(pairs, norm, loss)
        )


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "3"])
@pytest.mark.parametrize("name", ["max_norm", "max_loss"])
def test_spike_limits_must_be_positive_numbers(name, value):
    error = TypeError if isinstance(value, str) else ValueError
    with pytest.raises(error, match=name):
        presets.spike_limit(**({"max_norm": 1.0} | {name: value}))
    with pytest.raises(ValueError, match="None for both"):
        presets.spike_limit(None)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_spikes_are_checked(name):
    with pytest.raises(ValueError, match="window must be from 2"):
        getattr(presets, name)(1)
    with pytest.raises(ValueError, match="sigmas must be finite and > 0"):
        getattr(presets, name)(8, 0)


@pytest.mark.parametrize("window", [2, 3, 5])
def test_olmo_differs_below_a_window_of_6_as_documented(window):
    norms = np.array([[1.0, 0.9], [1.0, 1.1]])
    ours = skips(presets.olmo_spikes(window), np.ones((2, 2)), norms)
    assert ours.tolist() == [[False, False], [False, True]]


def test_norms_that_never_move_deviate_by_a_millionth_in_levanter():
    norms = np.full((2, 5), 1e-3)
    norms[:, 4] = 1.005e-3, 1.007e-3  # over the mean by 5e-6, and by 7e-6
    ours = skips(presets.levanter_spikes(4), np.ones((2, 5)), norms)
    assert ours.tolist() == [[False] * 5, [False] * 4 + [True]]


def test_a_second_spike_hides_behind_the_first_as_in_the_systems():
    norms = np.random.default_rng(1).normal(1.0, 0.1, (1, 200))
    norms[0, [150, 180]] = 50.0, 20.0
    for name in WINDOWED:
        ours = skips(getattr(presets, name)(), np.ones((1, 200)), norms)
        assert np.nonzero(np.asarray(ours)[0])[0].tolist() == [150]


def test_an_error_has_the_presets_name_and_the_results_own():
    class Result(NamedTuple):
        init_scale: float = 1024.0

    expected = r"^initial_scale must be .*\. Pass its field: result\.init_scale\.$"
    for preset in (presets.megatron, presets.keras):
        with pytest.raises(TypeError, match=expected):
            preset(Result())
