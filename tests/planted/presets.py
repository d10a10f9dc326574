"""The scalers of other systems."""

from planted.fault import Fault

PRESETS = "jls/presets.py"
TESTS = "tests/test_presets.py::"
DEFAULTS = TESTS + "test_long_runs_with_the_defaults_follow_the_rule_of_the_system"
ALL_ARGUMENTS = TESTS + "test_eager_steps_follow_the_rule_of_the_system"
BOUNDS = (
    "tests/test_presets.py::"
    "test_scale_stays_finite_and_positive_where_that_of_the_system_may_not"
)
SPIKES = TESTS + "test_spike_policies_follow_the_rules_in_plain_python"
MILLIONTH = TESTS + "test_norms_that_never_move_deviate_by_a_millionth_in_levanter"
WINDOW = (
    "tests/test_presets.py::"
    "test_window_that_is_not_on_the_ladder_warns_and_begins_with_the_shortest"
)

FAULTS = [
    Fault(
        "torch grows after 1000 steps by itself",
        PRESETS,
        "    growth_interval: int = 2000,\n    enabled: bool",
        "    growth_interval: int = 1000,\n    enabled: bool",
        (DEFAULTS + "[torch]",),
    ),
    Fault(
        "torch that is not enabled scales all the same",
        PRESETS,
        '"enabled", given.pop("enabled")):\n        return static(1.0)\n',
        '"enabled", given.pop("enabled")):\n        return static(init_scale)\n',
        (TESTS + "test_disabled_scaling_is_static",),
    ),
    Fault(
        "a preset's error has jls's name of the argument",
        "jls/presets.py",
        "lambda word: names.get(word[0], word[0])",
        "lambda word: word[0]",
        ("tests/test_bad_inputs.py",),
    ),
    Fault(
        "paddle adds up bad steps that are not in a row",
        PRESETS,
        "_paddle(consecutive=True, given=locals())",
        "_paddle(consecutive=False, given=locals())",
        (ALL_ARGUMENTS,),
    ),
    Fault(
        "paddle_doc backs off at the first bad step by itself",
        PRESETS,
        "decr_every_n_nan_or_inf: int = 2,",
        "decr_every_n_nan_or_inf: int = 1,",
        (DEFAULTS + "[paddle_doc]",),
    ),
    Fault(
        "paddle without dynamic scaling forgets its scale",
        PRESETS,
        'static(_validate.scale_value("init_loss_scaling", scale))',
        "static(1.0)",
        (TESTS + "test_disabled_scaling_is_static",),
    ),
    Fault(
        "mindspore has no floor",
        PRESETS,
        '"min_scale": 1.0,',
        '"min_scale": _validate.SMALLEST,',
        (BOUNDS + "[mindspore]",),
    ),
    Fault(
        "mindformers_adaptive begins with the longest window if it has no such",
        PRESETS,
        "        window = ladder[0]\n",
        "        window = longest\n",
        (WINDOW,),
    ),
    Fault(
        "the ladder of mindformers_adaptive has no rung of 50",
        PRESETS,
        "window -= 50 if window == 100 else shortest / 2",
        "window -= shortest / 2",
        (TESTS + "test_ladder_is_that_of_mindformers",),
    ),
    Fault(
        "keras grows a step early",
        PRESETS,
        "    given = locals()\n    names",
        "    dynamic_growth_steps -= 1\n    given = locals()\n    names",
        (DEFAULTS + "[keras]",),
    ),
    Fault(
        "flax grows a step early",
        PRESETS,
        'given["growth_interval"] = interval + 1',
        'given["growth_interval"] = interval',
        (DEFAULTS + "[flax]",),
    ),
    Fault(
        "flax falls through its floor",
        PRESETS,
        "    if minimum_scale is None:\n        del",
        "    if True:\n        del",
        (BOUNDS + "[flax]",),
    ),
    Fault(
        "deepspeed does not read consecutive_hysteresis",
        PRESETS,
        '"finite" if _validate.flag(name, given.pop(name)) else "growth"',
        '"growth" if _validate.flag(name, given.pop(name)) else "growth"',
        (ALL_ARGUMENTS,),
    ),
    Fault(
        "deepspeed counts the first finite step of a run",
        PRESETS,
        "finite_count=jnp.full((), -1, jnp.int32)",
        "finite_count=jnp.full((), 0, jnp.int32)",
        (DEFAULTS + "[deepspeed]",),
    ),
    Fault(
        "deepspeed counts the first finite step after an overflow",
        PRESETS,
        "jnp.where(finite, state.finite_count, -1)",
        "jnp.where(finite, state.finite_count, 0)",
        (ALL_ARGUMENTS,),
    ),
    Fault(
        "megatron does not read hysteresis",
        PRESETS,
        "return _like(hysteresis_scaler, given, ",
        'return _like(hysteresis_scaler, given | {"hysteresis": 2}, ',
        (ALL_ARGUMENTS,),
    ),
    Fault(
        "megatron has a floor of 1 whatever it is given",
        PRESETS,
        "return _like(hysteresis_scaler, given, ",
        'return _like(hysteresis_scaler, given | {"min_scale": 1.0}, ',
        (BOUNDS + "[megatron]",),
    ),
    Fault(
        "in levanter a norm that never moves has no deviation",
        PRESETS,
        "deviation = jnp.maximum(window.deviation, 1e-6 / window.unit)",
        "deviation = window.deviation",
        (MILLIONTH,),
    ),
    Fault(
        "in levanter the least deviation is a millionth of the norm",
        PRESETS,
        "1e-6 / window.unit",
        "1e-6",
        (MILLIONTH,),
    ),
    Fault(
        "maxtext divides by n where n - 1 is meant",
        PRESETS,
        "window = _spikes.window_of(state, fewer=1)",
        "window = _spikes.window_of(state)",
        (SPIKES + "[6-1.5-maxtext_spikes]",),
    ),
    Fault(
        "maxtext judges a step late",
        PRESETS,
        "_windowed(_maxtext_spikes_judge, window, sigmas, fewer=1)",
        "_windowed(_maxtext_spikes_judge, window, sigmas)",
        (SPIKES + "[6-1.5-maxtext_spikes]",),
    ),
    Fault(
        "spike_limit does not read max_loss",
        PRESETS,
        "_spikes.limits(loss=max_loss, norm=max_norm)",
        "_spikes.limits(norm=max_norm)",
        (TESTS + "test_spike_limits_are_constant",),
    ),
]
