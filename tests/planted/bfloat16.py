"""`jls.bfloat16_params`: rounding, random numbers, states; and what the tools say."""

from planted.fault import Fault

MODULE = "jls/_bfloat16.py"
TESTS = "tests/test_bfloat16.py::"
STEPS = "tests/train/test_bfloat16_steps.py::"
GRADIENTS = "tests/train/test_bfloat16_gradients.py::"
APPLIED = "tests/test_applied.py::"
DEVICES = "tests/devices/test_bfloat16_on_devices.py::"
STILL = "jls/_tools/check/still.py"
NOTES = "tests/check/test_still.py::"

FAULTS = [
    Fault(
        "lower bits are lost in the cast on a TPU",
        MODULE,
        "_number(lower | 0x4B000000) - 2.0**23",
        "_number(lower | 0x4B800000) - 2.0**24",
        (f"{TESTS}test_cast_of_the_lower_bits_on_a_tpu_is_exact",),
    ),
    Fault(
        "parameters are rounded to nearest",
        MODULE,
        "_quiet(bits), bits + noise)",
        "_quiet(bits), bits + 0x8000)",
        (
            f"{TESTS}test_parameters_take_the_update_that_they_should",
            f"{TESTS}test_small_network_is_as_right_as_in_float32",
        ),
    ),
    Fault(
        "a parameter and its moment draw the same bits",
        MODULE,
        "return hashed & 0xFFFF if number % 2 else hashed >> 16",
        "return hashed >> 16",
        (f"{TESTS}test_a_parameter_and_its_moments_draw_independently",),
    ),
    Fault(
        "two arrays draw alike in the same elements in each step",
        MODULE,
        "self._step * jnp.uint32(factor)",
        "self._step ^ jnp.uint32(factor)",
        (f"{TESTS}test_the_same_two_elements_do_not_draw_alike_in_each_step",),
    ),
    Fault(
        "each step draws the same numbers",
        MODULE,
        "_mixed(count * _ODD ^ jnp.uint32(seed))",
        "_mixed(count * 0 ^ jnp.uint32(seed))",
        (f"{TESTS}test_steps_leaves_neighbors_and_seeds_draw_independently",),
    ),
    Fault(
        "each seed draws the same numbers",
        MODULE,
        "_mixed(count * _ODD ^ jnp.uint32(seed))",
        "_mixed(count * _ODD)",
        (f"{TESTS}test_steps_leaves_neighbors_and_seeds_draw_independently",),
    ),
    Fault(
        "neighbors draw alike",
        MODULE,
        "_mixed(_indices(like) * _ODD ^ salt)",
        "_mixed((_indices(like) >> 1) * _ODD ^ salt)",
        (f"{TESTS}test_steps_leaves_neighbors_and_seeds_draw_independently",),
    ),
    Fault(
        "parts of a sharded parameter draw alike in shard_map",
        MODULE,
        "for axis in sorted(varying_axes(like)):",
        "for axis in ():",
        (f"{DEVICES}test_shards_in_shard_map_draw_numbers_of_their_own",),
    ),
    Fault(
        "the largest number becomes inf by a draw",
        MODULE,
        "(bits & 0x7FFFFFFF) >= 0x7F7F0000",
        "(bits & 0x7FFFFFFF) >= 0x7F800000",
        (f"{TESTS}test_stochastic_rounding_follows_the_rule_for_every_kind_of_number",),
    ),
    Fault(
        "a NaN with its payload in the lower bits becomes inf",
        MODULE,
        "return bits | _is_nan(bits).astype(jnp.uint32) << 22",
        "return bits",
        (f"{TESTS}test_stochastic_rounding_follows_the_rule_for_every_kind_of_number",),
    ),
    Fault(
        "a tie is rounded down",
        MODULE,
        "_quiet(bits), bits + 0x8000)",
        "_quiet(bits), bits + 0x7FFF)",
        (
            f"{TESTS}test_nearest_rounding_follows_the_rule_and_its_halves_make_the_number_again",
        ),
    ),
    Fault(
        "the lower bits are of a number that is not stored",
        MODULE,
        "is_apart = _is_nan(new) | (stored != _nearest(new))",
        "is_apart = _is_nan(new)",
        (
            f"{TESTS}test_steps_through_zero_and_across_all_powers_keep_state_and_params_together",
        ),
    ),
    Fault(
        "a tie that the cast rounds down goes on from the next lower number",
        MODULE,
        "jnp.where((bits & 0x1FFFF) == 0x8000, 0x7FFF, bits & 0xFFFF)",
        "bits & 0xFFFF",
        (f"{TESTS}test_cast_rounds_what_init_was_given_to_the_same_neighbor",),
    ),
    Fault(
        "a subnormal parameter that the cast flushes becomes NaN",
        MODULE,
        "jnp.where(_is_nan(bits) | is_subnormal, 0, lower)",
        "jnp.where(_is_nan(bits), 0, lower)",
        (f"{TESTS}test_cast_rounds_what_init_was_given_to_the_same_neighbor",),
    ),
    Fault(
        "a parameter of -0.0 that stays becomes 0.0",
        MODULE,
        "jnp.where(_bits(before) == stored, -0.0,",
        "jnp.where(_bits(before) == stored, 0.0,",
        (f"{TESTS}test_params_that_are_not_arrays_are_left_alone",),
    ),
    Fault(
        "moments of float32 parameters are bfloat16",
        MODULE,
        "is_narrow = narrow.get(_owner(path, narrow), True)",
        "is_narrow = True",
        (f"{TESTS}test_float32_and_integer_leaves_are_as_with_the_inner_optimizer",),
    ),
    Fault(
        "averages are bfloat16",
        MODULE,
        "return type(node).__name__ in _STAY",
        "return False",
        (f"{TESTS}test_averages_accumulators_and_copies_stay_float32",),
    ),
    Fault(
        "the inner optimizer computes with bfloat16 moments",
        MODULE,
        "before = jax.tree.map(_widened_moment, state.inner_state)",
        "before = state.inner_state",
        (f"{TESTS}test_second_moment_falls_whatever_b2_is",),
    ),
    Fault(
        "the inner optimizer computes with bfloat16 gradients",
        MODULE,
        "return grad.astype(jnp.float32) if _is_bfloat16(param) else grad",
        "return grad",
        (f"{TESTS}test_gradients_may_be_bfloat16_or_float32",),
    ),
    Fault(
        "a state of another rounding is taken",
        MODULE,
        "if was != rounding and jax.tree.leaves(params):",
        "if ():",
        (f"{TESTS}test_state_of_another_kind_is_named",),
    ),
    Fault(
        "a guard gives another error for a state of another rounding",
        "jls/_mistakes.py",
        "    except OtherStateError:\n        raise\n",
        "",
        (f"{TESTS}test_state_of_another_kind_is_named",),
    ),
    Fault(
        "the lower bits of an NNX model are not found",
        MODULE,
        "flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)\n"
        "    rests",
        "flat, _ = jax.tree_util.tree_flatten_with_path(params)\n    rests",
        (f"{STEPS}test_nnx_step_moves_bfloat16_parameters",),
    ),
    Fault(
        "updates of bfloat16 parameters are checked",
        "jls/_step.py",
        "if checks and rounds_bfloat16(state):",
        "if ():",
        (f"{STEPS}test_updates_of_bfloat16_parameters_are_not_checked",),
    ),
    Fault(
        "updates of float16 parameters beside them are not checked",
        "jls/_step.py",
        "if dtype_of(x) != jnp.bfloat16]",
        "if ()]",
        (f"{STEPS}test_updates_of_bfloat16_parameters_are_not_checked",),
    ),
    Fault(
        "init warns of bfloat16 parameters that move",
        "jls/_wrapper.py",
        'and not (dtype == "bfloat16" and path in are_stored)',
        "",
        (f"{STEPS}test_plain_step_stores_what_the_optimizer_rounded",),
    ),
    Fault(
        "the lower bits of a float32 run are dropped",
        "jls/_checkpoint.py",
        "jax.tree.map(lambda _: rest_of(param), like)",
        "like",
        (f"{TESTS}test_float32_run_goes_on_under_the_wrapper_and_back",),
    ),
    Fault(
        "moments are converted in any state",
        "jls/_checkpoint.py",
        "if bfloat16.casts and ",
        "if ",
        (f"{TESTS}test_moments_are_converted_nowhere_else",),
    ),
    Fault(
        "updates are noted as lost under the wrapper",
        STILL,
        "    if _is_stored(runner):",
        "    if ():",
        (f"{NOTES}test_under_the_wrapper_nothing_is_noted",),
    ),
    Fault(
        "parameters that come out of bits follow no gradient",
        "jls/_tools/reading/flow.py",
        "follows=follows if _is_of_bits(op) else 0",
        "follows=0",
        (f"{NOTES}test_step_under_the_wrapper_is_read_to_the_end",),
    ),
    Fault(
        "updates that are 0 count as lost",
        STILL,
        "has_moved & (good_run.after[i] == good_run.before[i])",
        "good_run.after[i] == good_run.before[i]",
        (f"{NOTES}test_count_is_that_of_the_updates",),
    ),
    Fault(
        "a second moment that falls is said to stand still",
        STILL,
        "np.array_equal(run.after[i], run.before[i])",
        "True",
        (f"{NOTES}test_second_moment_that_cannot_fall_is_named",),
    ),
    Fault(
        "the loss reads bfloat16 parameters as they are stored",
        MODULE,
        "return jax.tree.map(_widened, params) if rounds_bfloat16(state) else params",
        "return params",
        (
            f"{GRADIENTS}test_train_step",
            f"{GRADIENTS}test_value_and_grad_of_a_pytree",
        ),
    ),
    Fault(
        "an NNX model is read as it is stored",
        MODULE,
        "variable.set_value(_widened(value))",
        "variable.set_value(value)",
        (f"{GRADIENTS}test_nnx",),
    ),
    Fault(
        "an NNX model stays widened",
        MODULE,
        "        for variable, value in pairs:\n            variable.set_value(value)",
        "        pass",
        (f"{GRADIENTS}test_nnx_model_is_bfloat16_after_an_error",),
    ),
    Fault(
        "what is made of bfloat16 parameters is not known again",
        "jls/_applied.py",
        "return Way.MADE",
        "return Way.NONE",
        (f"{APPLIED}test_what_changes_the_updates_is_warned_of",),
    ),
    Fault(
        "a flag by which updates are multiplied changes them",
        "jls/_applied.py",
        "if Way.FACTOR in ways and len(operands) == 2:",
        "if ():",
        (f"{APPLIED}test_what_changes_the_updates_is_warned_of",),
    ),
    Fault(
        "a frozen part is warned of",
        "jls/_wrapper.py",
        "return [name for name in names if name in made] if made else names",
        "return names",
        (f"{APPLIED}test_frozen_part_does_not",),
    ),
    Fault(
        "products that are half already are warned of",
        "jls/_autocast/autocast.py",
        "if is_half and _REASONS[KEEP] not in reasons:",
        "if ():",
        (
            "tests/autocast/test_nothing_to_cast.py::"
            "test_nothing_is_said_of_what_is_half_already",
        ),
    ),
]
