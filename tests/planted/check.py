"""`check_step`: what it reads of a program, what it tries, what it says."""

from planted.fault import Fault

CHECK = "tests/check/test_check_step.py::"
READ = "tests/check/test_reading.py::"
RUNS = "tests/check/test_runs.py::"
UNREAD = "tests/check/test_unread.py::"
FLOW = "tests/check/test_flow.py::"
DEGREE = f"{FLOW}test_degree_is_what_numbers_say"
NO_DEGREE = f"{FLOW}test_what_has_no_degree_is_mixed"
MOVES_ON = f"{FLOW}test_what_moves_is_not_proved"
AVERAGE = f"{READ}test_weights_of_an_average_add_up_to_1"
GRADIENTS = f"{READ}test_mistake_in_the_gradients_is_read"
CLEANED = f"{READ}test_gradients_that_may_lose_an_inf_are_found"
RIGHT = f"{READ}test_right_step_is_proved"

SUMMED = "tests/devices/test_summed_over_devices.py::"
RIGHT_SUMS = f"{SUMMED}test_right_form_is_right"

# Sums over devices, and means.
SUMS = [
    Fault(
        "a sum over equal values does not multiply",
        "jls/_tools/reading/derivatives.py",
        "factor=multiple.factor * devices_along(op.site, equal),",
        "factor=multiple.factor,",
        (
            f"{SUMMED}test_sums_beside_a_mean_of_the_loss_are_broken[mean_of_both-plain]",
        ),
    ),
    Fault(
        "a division after the sum does not count",
        "jls/_tools/reading/derivatives.py",
        "return x.multiple._replace(factor=x.multiple.factor * by)",
        "return x.multiple",
        (
            f"{SUMMED}test_sums_beside_a_mean_of_the_loss_are_broken[mean_of_the_loss-plain]",
        ),
    ),
    Fault(
        "a division by a rule of the user's does not count",
        "jls/_tools/reading/derivatives.py",
        "            self._factors |= {x.value if",
        "            {x.value if",
        (f"{RIGHT_SUMS}[divided_by_a_rule-scaled]",),
    ),
    Fault(
        "a mean that the optimizer makes does not count",
        "jls/_tools/reading/flow.py",
        "            self.derivatives.note_inner(ops)\n",
        "            pass\n",
        (
            "tests/devices/test_summed_over_devices.py::"
            "test_sum_that_the_optimizer_makes_a_mean_is_not_tried",
        ),
    ),
    Fault(
        "a backward pass may begin with any number",
        "jls/_tools/reading/derivatives.py",
        "return not loss.local or self._seeds == {1.0}",
        "return True",
        (f"{RIGHT_SUMS}[seed_of_a_mean-plain]",),
    ),
    Fault(
        "any loss is the one that is differentiated",
        "jls/_tools/reading/derivatives.py",
        "if (list(self._scaled) or unused) != [loss.of]:",
        "if not self._scalars:",
        (f"{RIGHT_SUMS}[loss_beside_a_part_of_it-scaled]",),
    ),
    Fault(
        "a loss of each device is not refused",
        "jls/_train/step.py",
        "        _refuse_local_loss(output.loss, params)\n",
        "",
        ("tests/devices/test_train_step_on_devices.py",),
    ),
    Fault(
        "a loss of each device is refused where each has a model of its own",
        "jls/_train/step.py",
        "sorted(axes - frozenset.intersection(*own)) if own else []",
        "sorted(axes) if own else []",
        (
            "tests/devices/test_train_step_on_devices.py::"
            "test_models_of_each_device_have_losses_of_their_own",
        ),
    ),
]

# The powers of the loss scale.
DEGREES = [
    Fault(
        "a power of which the exponent is not known is another scale",
        "jls/_program/degrees.py",
        'if op.name == "integer_pow":  # with an',
        "if op.name == ():  # of which",
        ("tests/program/test_jaxprs.py",),
    ),
    Fault(
        "a product of two values that follow the scale counts as one",
        "jls/_program/degrees.py",
        "total[symbol] = total.get(symbol, Fraction()) + power",
        "total[symbol] = power",
        (f"{DEGREE}[unscaled]",),
    ),
    Fault(
        "what is divided by the scale counts as multiplied by it",
        "jls/_program/degrees.py",
        "_degree_of_power(site, degrees[1], -1)",
        "degrees[1]",
        (f"{DEGREE}[quotient]",),
    ),
    Fault(
        "a power that is no integer has no rule",
        "jls/_program/degrees.py",
        "return known.value if isinstance(known, Number) else None",
        "return None",
        (f"{DEGREE}[power that is no integer]",),
    ),
    Fault(
        "three cube roots do not add up to one",
        "jls/_program/degrees.py",
        "by = Fraction(exponent).limit_denominator(1000)",
        "by = Fraction(exponent)",
        (f"{DEGREE}[cube of a cube root]",),
    ),
    Fault(
        "zeros in the place of scaled values count as unscaled ones",
        "jls/_program/degrees.py",
        "found = [x.degree for x in values if x.degree != ANY]",
        "found = [ZERO if x.degree == ANY else x.degree for x in values]",
        (f"{DEGREE}[masked]",),
    ),
    Fault(
        "the sum of a scaled and an unscaled value counts as scaled",
        "jls/_program/degrees.py",
        "if all(degree == found[0] for degree in found):",
        "if any(degree == found[0] for degree in found):",
        (f"{NO_DEGREE}[sum]",),
    ),
    Fault(
        "what the scale was mixed into is clean again after a product",
        "jls/_program/degrees.py",
        "for kind in (AnyDegree, Mixed, Unknown):",
        "for kind in (AnyDegree, Unknown):",
        (f"{NO_DEGREE}[clipped by norm]",),
    ),
    Fault(
        "a scaled value that is squashed counts as unscaled",
        "jls/_program/degrees.py",
        "return Mixed(site, (ZERO, *degrees))",
        "return ZERO",
        (f"{NO_DEGREE}[squashed]",),
    ),
    Fault(
        "a scaled value that is rounded to integers counts as unscaled",
        "jls/_program/degrees.py",
        "return next(unknown, Unknown(op.site))",
        "return next(unknown, ZERO)",
        (f"{FLOW}test_integers_of_scaled_numbers_are_unknown",),
    ),
    Fault(
        "two numbers made of the scale in two ways count as one",
        "jls/_program/degrees.py",
        "symbol = (site.equation.primitive.name, inputs)",
        "symbol = (site.equation.primitive.name, len(inputs))",
        (f"{FLOW}test_what_is_computed_from_the_scale_alone_is_a_scale_of_its_own",),
    ),
]

# What stays, what holds what, and the weights of sums.
KNOWN = [
    Fault(
        "1 divided by a parameter counts as the parameter",
        "jls/_program/primitives.py",
        "neutral=(None, 1.0)",
        "neutral=(1.0, 1.0)",
        (f"{MOVES_ON}[inverted]",),
    ),
    Fault(
        "a parameter with its sign turned counts as the parameter",
        "jls/_program/primitives.py",
        "neutral=(None, 0.0)",
        "neutral=(0.0, 0.0)",
        (f"{MOVES_ON}[taken from 0]",),
    ),
    Fault(
        "a parameter rounded to float16 counts as the parameter",
        "jls/_program/known.py",
        "return known if is_exact_cast(old, new) else None",
        "return known",
        (f"{MOVES_ON}[narrowed]",),
    ),
    Fault(
        "one element of a parameter counts as the parameter",
        "jls/_program/known.py",
        "return first if aval.size == avals[first.index].size else None",
        "return first",
        (f"{MOVES_ON}[its first element]",),
    ),
    Fault(
        "what a where may compute anew counts as only stored",
        "jls/_program/known.py",
        "unite = operator.and_ if is_choice else operator.or_",
        "unite = operator.or_",
        (f"{FLOW}test_what_holds_an_input_only_stores_it",),
    ),
    Fault(
        "the factor of an input in a sum is not looked at",
        "jls/_program/known.py",
        "total[i] = total.get(i, 0.0) + sign * factor * weight",
        "total[i] = total.get(i, 0.0) + sign * weight",
        (f"{AVERAGE}[a sum with weights]",),
    ),
    Fault(
        "what is subtracted counts as added",
        "jls/_program/known.py",
        'sign = -1.0 if name == "sub" and place else 1.0',
        "sign = 1.0",
        (f"{AVERAGE}[one step towards the parameters]",),
    ),
]

READING = [
    Fault(
        "gradients that were cleaned count as those that keep an inf",
        "jls/_program/history.py",
        '    """The operation that may have lost an inf of a gradient; None if it is '
        'kept."""\n',
        "    return None\n",
        (f"{CLEANED}[nan_to_num]",),
    ),
    Fault(
        "a where that puts 0 in the place of an inf keeps it",
        "jls/_program/history.py",
        "keeps = all(x.unscaled for x in op.data)",
        "keeps = any(x.unscaled for x in op.data)",
        (f"{CLEANED}[zero where it is not finite]",),
    ),
    Fault(
        "a division by gradients keeps an inf in them",
        "jls/_program/history.py",
        'if row.degree == "quotient" and op.operands[0].unscaled:',
        'if row.degree == "quotient":',
        (f"{CLEANED}[divided by themselves]",),
    ),
    Fault(
        "a parameter that one of two branches leaves stays in both",
        "jls/_program/facts.py",
        "return one if one == other else None",
        "return one",
        (f"{MOVES_ON}[one round of a scan]",),
    ),
    Fault(
        "the loss scale after an update counts as the one before it",
        "jls/_tools/reading/flow.py",
        "result.but(degree=((symbol, Fraction(1)),), scale=old.scale)",
        "result.but(degree=old.degree if symbol else ZERO, scale=old.scale)",
        (f"{READ}test_scale_after_the_update_is_another",),
    ),
    Fault(
        "small gradients vanish in bfloat16",
        "jls/_program/jaxprs.py",
        "return jnp.finfo(new).minexp > jnp.finfo(old).minexp",
        "return jnp.finfo(new).bits < jnp.finfo(old).bits",
        (f"{RIGHT}[bfloat16 and back]",),
    ),
    Fault(
        "a factor before a cast to float16 is not looked at",
        "jls/_program/history.py",
        "gain=gradients[0].gain * _gain(op),",
        "gain=gradients[0].gain,",
        (f"{RIGHT}[scaled, float16 and back]",),
    ),
    Fault(
        "the state of a skipped step is read from one that is applied",
        "jls/_tools/reading/reading.py",
        "_, skipped = self._read(is_skipped=True)",
        "_, skipped = self._read()",
        (f"{READ}test_parameters_that_a_skip_may_change_are_found",),
    ),
    Fault(
        "jax.device_get in a step goes unseen",
        "jls/_tools/reading/reading.py",
        'return traced._replace(reads="jax.device_get" if calls else "")',
        "return traced",
        (f"{READ}test_value_that_the_host_reads_is_read[device_get]",),
    ),
    Fault(
        "not scaled: never found",
        "jls/_tools/check/proofs.py",
        "lacking = [x for x in gradients if x.depends and not x.depends & bit]",
        "lacking = list[Value]()",
        (f"{GRADIENTS}[not scaled]",),
    ),
    Fault(
        "scale leaks: a factor of the whole is not found in the gradients",
        "jls/_tools/check/proofs.py",
        "if degree in (ZERO, ANY) or isinstance(degree, Unknown):",
        "if not isinstance(degree, Mixed):",
        (f"{READ}test_leak_that_an_optimizer_of_signs_hides_is_read",),
    ),
    Fault(
        "a sum in a backward pass leaks without a look at the numbers",
        "jls/_tools/check/proofs.py",
        "if mixed and is_sum and is_transposed(degree.site):",
        "if ():",
        (
            "tests/check/test_answers.py::test_a_solve_in_the_backward_pass_leaks_no_scale",
        ),
    ),
    Fault(
        "an inf is looked for only where a scale was divided out",
        "jls/_program/history.py",
        "    if is_transposed(op.site):\n        return value.but(unscaled=op.site)\n",
        "",
        (
            "tests/check/test_answers.py::test_an_overflow_is_hidden_from_a_guard_without_a_loss_scale",
        ),
    ),
    Fault(
        "moments that come back as they were are right",
        "jls/_tools/check/proofs.py",
        "if state and all(map(operator.or_, is_old, is_number)):",
        "if ():",
        ("tests/check/test_answers.py::test_a_step_that_trains_nothing_is_no_step",),
    ),
    Fault(
        "scale leaks: not found in the loss",
        "jls/_tools/check/proofs.py",
        '_read_leaks(losses, "the loss", given, findings)',
        '_read_leaks(losses[1:], "the loss", given, findings)',
        (f"{GRADIENTS}[the scaled loss told]",),
    ),
    Fault(
        "scale leaks: not found in the updates",
        "jls/_tools/check/proofs.py",
        "[x for x in new if x.follows & bits]",
        "[x for x in new if not bits]",
        (f"{READ}test_updates_that_are_scaled_leak",),
    ),
    Fault(
        "loss not passed: never found",
        "jls/_tools/check/proofs.py",
        "if not scale.is_static and not call.values(LOSS):",
        "if scale.is_static and not call.values(LOSS):",
        (f"{READ}test_loss_that_is_not_passed_is_read[nothing]",),
    ),
    Fault(
        "gradients narrowed: any cast counts as one on purpose",
        "jls/_tools/check/proofs.py",
        "if gradient.narrowed.gain >= _SCALED_ON_PURPOSE:",
        "if gradient.narrowed.gain >= 1.0:",
        (f"{GRADIENTS}[narrowed]",),
    ),
    Fault(
        "scale stuck: a state that comes back as it was is not found",
        "jls/_tools/check/subject.py",
        "return bool(back) and back <= among",
        "return not back and back <= among",
        (f"{READ}test_scaler_that_is_put_back_is_stuck",),
    ),
    Fault(
        "scale stuck: not found where a skip alone undoes the state",
        "jls/_tools/check/proofs.py",
        "scale.own, subject.kept\n",
        "scale.own, subject.frozen\n",
        (f"{READ}test_state_that_a_skip_undoes_is_stuck",),
    ),
    Fault(
        "the weights of an average are not added up",
        "jls/_tools/check/proofs.py",
        "abs(sum(x for _, x in weights) - 1) > _ROUNDING",
        "abs(sum(x for _, x in weights) - 1) > 1 / _ROUNDING",
        (f"{AVERAGE}[a sum that grows]",),
    ),
    Fault(
        "a parameter that a skip decays counts as an average",
        "jls/_tools/check/proofs.py",
        "return bool(others) and sources - counts <= subject.trained",
        "return sources - counts <= subject.trained",
        (f"{READ}test_parameters_that_a_skip_decays_a_little_are_no_average",),
    ),
    Fault(
        "what a skip changes counts as noise",
        "jls/_tools/check/proofs.py",
        "return reading.flow.is_random(result.skipped)",
        "return True",
        (f"{READ}test_noise_is_told_from_what_is_not_random",),
    ),
    Fault(
        "what a skip changes is not looked at",
        "jls/_tools/check/subject.py",
        "if reading.leaf_of(x.skipped) == i",
        "if reading.leaf_of(x.skipped) != i",
        (f"{READ}test_parameters_that_a_skip_may_change_are_found",),
    ),
    Fault(
        "host sync: never found",
        "jls/_tools/check/program.py",
        "    if last.reads:\n",
        "    if last.reads and isinstance(last, Traced):\n",
        (f"{READ}test_value_that_the_host_reads_is_read[float]",),
    ),
    Fault(
        "host sync: found where the host reads a value now and then",
        "jls/_tools/check/program.py",
        "while len(traces) < 3 and traces[-1].reads:",
        "while len(traces) < 1 and traces[-1].reads:",
        (f"{READ}test_value_that_the_host_reads_once_in_three_traces_is_right",),
    ),
]

TRIALS = [
    Fault(
        "what no wrapper trains beside one that trains is data",
        "jls/_tools/check/subject.py",
        "itself, reading.flow.bit_of_gradients\n",
        "(), reading.flow.bit_of_gradients\n",
        (f"{CHECK}test_wrapper_in_a_partition_is_told_of_the_whole",),
    ),
    Fault(
        "a move of 4,000 units in the last place is rounding",
        "jls/_tools/check/leaves.py",
        "most = 4 * eps if eps < 1e-5 else eps",
        "most = 4000 * eps if eps < 1e-5 else eps",
        (f"{RUNS}test_rounding_is_a_few_units_in_the_last_place[float32-4]",),
    ),
    Fault(
        "a parameter that stays NaN has moved",
        "jls/_tools/check/leaves.py",
        "equal = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) < tiny)",
        "equal = (x == y) | (np.abs(x - y) < tiny)",
        (f"{RUNS}test_nan_is_the_same_as_nan_and_inf_is_another",),
    ),
    Fault(
        "one of two calls that skips is a skip of both",
        "jls/_tools/check/runs.py",
        'return calls > 0 and calls == self.counted(scale, "skips")',
        'return calls > 0 and self.counted(scale, "skips") > 0',
        (f"{RUNS}test_all_calls_of_a_wrapper_have_to_skip_to_be_a_skip",),
    ),
    Fault(
        "the step is given the caller's arrays, and may donate them",
        "jls/_tools/check/runs.py",
        "return jnp.array(leaf, copy=True) if is_concrete(leaf) else leaf",
        "return leaf",
        (f"{RUNS}test_step_does_not_get_the_arrays_of_the_caller",),
    ),
    Fault(
        "a lowered scale grows as soon as the old one would have",
        "jls/_tools/check/runs.py",
        "np.minimum(as_numpy(self.start[count]), 0)",
        "as_numpy(self.start[count])",
        (f"{RUNS}test_another_scale_starts_the_count_to_its_growth_anew",),
    ),
    Fault(
        "the next step starts at the scale of the fault",
        "jls/_tools/check/runs.py",
        "kept = subject.carried.leaves - {i for x in subject.scales for i in x.state}",
        "kept = subject.carried.leaves",
        (f"{RUNS}test_next_step_starts_with_what_came_back_at_the_first_scale",),
    ),
    Fault(
        "out of sync: never found",
        "jls/_tools/check/runs.py",
        "if first.setdefault(str(shard.index), bits) != bits:",
        "if first.setdefault(str(shard.device), bits) != bits:",
        (
            "tests/devices/test_check_step_on_devices.py::"
            "test_gradients_of_each_device_are_out_of_sync",
        ),
    ),
    Fault(
        "no step: never found where nothing changes",
        "jls/_tools/check/good_steps.py",
        "if not first.changed():",
        "if not first.given:",
        (f"{CHECK}test_plain_step_that_returns_what_it_got_is_no_step",),
    ),
    Fault(
        "no step: not found where the old state comes back",
        "jls/_tools/check/good_steps.py",
        "if base is not None and _returns_old_state(runner.subject, good):",
        "if base is None and _returns_old_state(runner.subject, good):",
        (f"{CHECK}test_old_state_that_comes_back_is_no_step",),
    ),
    Fault(
        "no step: not found where the updates reach nothing",
        "jls/_tools/check/proofs.py",
        "if shapes and shapes <= Counter(",
        "if not shapes and shapes <= Counter(",
        (f"{CHECK}test_updates_that_are_never_applied_are_no_step",),
    ),
    Fault(
        "no step: found where integers are computed from the updates",
        "jls/_tools/check/proofs.py",
        "not x.follows & reading.bits_of_updates and not needs & ~x.depends",
        "x.follows & reading.bits_of_updates and not needs & ~x.depends",
        (f"{CHECK}test_parameters_in_integers_are_not_called_forgotten",),
    ),
    Fault(
        "updates that are made positive by a factor count as negative",
        "jls/_tools/reading/flow.py",
        "return math.prod([*own, *signs])",
        "return min([*own, *signs])",
        (f"{CHECK}test_updates_that_are_made_to_be_subtracted_are_not_noted",),
    ),
    Fault(
        "updates are noted as subtracted without a negative learning rate",
        "jls/_tools/reading/flow.py",
        "isinstance(first.known, Same) and second.sign == -1",
        "isinstance(first.known, Same)",
        (f"{CHECK}test_updates_that_are_made_to_be_subtracted_are_not_noted",),
    ),
    *SUMS,
    Fault(
        "retraced: never found",
        "jls/_tools/check/good_steps.py",
        "    if later:\n",
        "    if later and base is None:\n",
        (f"{CHECK}test_jit_in_each_call_is_retraced",),
    ),
    Fault(
        "retraced: found where the second step alone is compiled anew",
        "jls/_tools/check/good_steps.py",
        "if run.compiled and n > 2",
        "if run.compiled and n > 1",
        (f"{RUNS}test_second_step_may_compile_once_more",),
    ),
    Fault(
        "nothing is planted where an inf should be",
        "jls/_tools/check/planting.py",
        "return x.at[(0,) * x.ndim].set(jnp.inf)",
        "return x.at[(0,) * x.ndim].set(0.0)",
        (f"{RUNS}test_inf_that_is_lost_is_told_from_one_that_is_kept",),
    ),
    Fault(
        "overflow hidden: not found where gradients are cleaned while they are scaled",
        "jls/_tools/check/faults.py",
        "if not run.comes_out_as(right) and",
        "if run.comes_out_as(right) and",
        (f"{CHECK}test_overflow_that_is_hidden_is_named[while they are scaled]",),
    ),
    Fault(
        "overflow hidden: not found where an inf alone is lost, and NaN stays",
        "jls/_tools/check/faults.py",
        "        elif applied:\n",
        "        elif not applied:\n",
        (f"{CHECK}test_overflow_that_is_hidden_is_named[where NaN stays]",),
    ),
    Fault(
        "nan committed: never found",
        "jls/_tools/check/faults.py",
        "bad = fault.nonfinite - point.good_run.nonfinite()",
        "bad = fault.nonfinite - fault.run.nonfinite()",
        (f"{CHECK}test_metrics_that_a_bad_step_spoils_can_be_left_out",),
    ),
    Fault(
        "nan committed: what is not trained only stores what came in",
        "jls/_tools/check/faults.py",
        "if i in results and results[i].now.holds",
        "if i in results",
        (f"{CHECK}test_metrics_that_a_bad_step_spoils_can_be_left_out",),
    ),
    Fault(
        "not atomic: any leaf may move in a skip",
        "jls/_tools/check/faults.py",
        "    return is_rounding(old, new)\n",
        "    return True\n",
        (f"{CHECK}test_weight_decay_outside_is_not_atomic",),
    ),
    Fault(
        "never recovers: never found",
        "jls/_tools/check/faults.py",
        "        if run.keeps(params):\n",
        "        if not run.after:\n",
        (f"{CHECK}test_accumulation_outside_never_recovers",),
    ),
    Fault(
        "spike not skipped: never found by a run",
        "jls/_tools/check/faults.py",
        'elif not run.counted(scale, "spikes"):',
        'elif run.counted(scale, "spikes") < 0:',
        (f"{CHECK}test_spike_policy_that_is_started_anew_in_each_step_is_named",),
    ),
    Fault(
        "a mistake that was found is taken back",
        "jls/_tools/check/findings.py",
        'self._found.setdefault(code, Finding("right", note))',
        'self._found[code] = Finding("right", note)',
        (f"{RUNS}test_mistake_that_was_found_stays_found",),
    ),
    Fault(
        "what was not tried is not raised",
        "jls/_tools/check/check.py",
        'if self.broken or (not_tried == "raise" and self.not_tried):',
        "if self.broken:",
        (f"{RUNS}test_what_was_not_tried_is_raised_if_asked_for",),
    ),
    Fault(
        "carried leaves no field out",
        "jls/_tools/check/check.py",
        "named[name] = None if fields is None else tuple(fields)",
        "named[name] = None",
        (f"{CHECK}test_metrics_that_a_bad_step_spoils_can_be_left_out",),
    ),
    Fault(
        "a step with a bare scale is told of an optimizer",
        "jls/_tools/check/check.py",
        "    if not has_wrapper:  #",
        "    if has_wrapper:  #",
        (f"{CHECK}test_advice_on_nnx_is_for_nnx_whatever_carries_the_scale",),
    ),
    Fault(
        "accumulation outside is not told to go inside",
        "jls/_tools/check/codes.py",
        '"never recovers": "jls.loss_scaled(optax.MultiSteps(inner, k))',
        '"no step": "jls.loss_scaled(optax.MultiSteps(inner, k))',
        (f"{CHECK}test_accumulation_outside_is_told_to_go_inside",),
    ),
]

ANSWERS = [
    Fault(
        "the lines of an NNX step have the usual names",
        "jls/_tools/check/check.py",
        "lambda found: names.get(found[0], found[0])",
        "lambda found: found[0]",
        (f"{CHECK}test_lines_of_an_nnx_step_have_the_names_of_its_arguments",),
    ),
    Fault(
        "what scaled values choose is not doubted",
        "jls/_program/history.py",
        'chooses = op.name == "select_n" and op.operands[0].is_of_scaled',
        "chooses = False",
        ("tests/check/test_reading.py",),
    ),
    Fault(
        "every choice between scaled values and 0 is doubted",
        "jls/_program/history.py",
        'chooses = op.name == "select_n" and op.operands[0].is_of_scaled',
        'chooses = op.name == "select_n"',
        ("tests/check/test_reading.py",),
    ),
    Fault(
        "a number that changes once is taken for one that counts",
        "jls/_tools/check/good_steps.py",
        "if len(set(values)) == len(values) and compiled[-1]:",
        "if len(set(values)) > 1 and compiled[-1]:",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "a number that counts outside of the program is a mistake",
        "jls/_tools/check/good_steps.py",
        "if len(set(values)) == len(values) and compiled[-1]:",
        "if len(set(values)) == len(values):",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "an argument of numbers alone does not come back",
        "jls/_tools/check/static.py",
        "        if len(same) == 1:\n",
        "        if False:\n",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "attributes of a module are no static numbers",
        "jls/_tools/check/static.py",
        "if type(value) in _NUMBERS and not name",
        "if type(value) is complex and not name",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "a moment that comes back narrower is right",
        "jls/_tools/check/program.py",
        "if _is_cut(items[n].value, x.value)",
        "if x.path[-1] == 'loss_scale' and _is_cut(items[n].value, x.value)",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "a rate with the axis of pmap makes an average a mistake",
        "jls/_tools/check/proofs.py",
        "scalars = {(), (1,), *",
        "scalars = {(), *",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "a state that is only read leaves codes untried",
        "jls/_tools/check/proofs.py",
        "if scales[k].own & subject.carried.leaves]",
        "]",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "what was taken as data is not in the headline",
        "jls/_tools/check/check.py",
        "others = [name for name in self.not_tried if name not in untried]",
        "others = list[str]()",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "without a program a scale at which the gradients fit leaves a code untried",
        "jls/_tools/check/faults.py",
        "elif not findings.is_read and all(",
        "elif not findings.is_read or all(",
        (f"{UNREAD}test_gradients_that_fit_at_any_scale_hide_no_overflow",),
    ),
    Fault(
        "without a program an overflow that no one saw is hidden from no one",
        "jls/_tools/check/faults.py",
        "elif not findings.is_read and all(",
        "elif findings.is_read and all(",
        (f"{UNREAD}test_overflow_that_no_one_sees_is_not_tried",),
    ),
    Fault(
        "without a program what moves in a skip is a mistake",
        "jls/_tools/check/findings.py",
        "if not self.is_read and code in DOUBTFUL:",
        "if code in ():",
        ("tests/check/test_unread.py",),
    ),
    Fault(
        "without a program a bare scaler that is never adjusted is right",
        "jls/_tools/check/faults.py",
        "if is_seen and any(fault.scales for fault in faults):",
        "if any(fault.scales for fault in faults):",
        (f"{UNREAD}test_bare_scaler_may_be_stuck",),
    ),
    Fault(
        "without a program what comes back is guessed",
        "jls/_tools/check/carried.py",
        "    if reading is None and named is None:\n",
        "    if reading is None and named == {}:\n",
        (f"{UNREAD}test_what_comes_back_must_be_named",),
    ),
]

CARRIED_BY = "tests/check/test_carried.py::"
CARRIED = [
    Fault(
        "what is made of the new parameters counts as the new parameters",
        "jls/_tools/check/carried.py",
        "rank = 1 + now.follows.bit_count()",
        "rank = 1",
        (f"{CARRIED_BY}test_new_parameters_are_found_wherever_they_are",),
    ),
    Fault(
        "the old parameters, returned too, count as the new ones",
        "jls/_tools/check/carried.py",
        "rank = int(kept == leaf and not is_frozen)",
        "rank = int(kept == leaf)",
        (f"{CARRIED_BY}test_new_parameters_are_found_wherever_they_are",),
    ),
    Fault(
        "an average of the parameters counts as the parameters",
        "jls/_tools/check/carried.py",
        "rank = 1 + now.follows.bit_count()",
        "rank = 2",
        (f"{CARRIED_BY}test_parameters_that_a_skip_changes_come_before_an_average",),
    ),
    Fault(
        "predictions count as state",
        "jls/_tools/check/carried.py",
        "return has_floats or all(x.is_frozen",
        "return all(x.is_frozen",
        (f"{CARRIED_BY}test_predictions_are_data_and_said_to_be_doubtful",),
    ),
    Fault(
        "labels that come back as they were count as state",
        "jls/_tools/check/carried.py",
        "return has_floats or all(x.is_frozen",
        "return has_floats or all(False",
        (f"{CARRIED_BY}test_labels_that_come_back_as_they_were_are_data",),
    ),
    Fault(
        "the line to write for an Equinox model is that for plain arrays",
        "jls/_tools/check/check.py",
        "    if find(given, is_equinox):\n",
        "    if False:\n",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "what comes back in the aux of a report is data",
        "jls/_tools/check/carried.py",
        "for x in free if aux.may_be_state(x) for",
        "for x in free if False for",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "no argument that is named comes back in the aux of a report",
        "jls/_tools/check/carried.py",
        "    if named is None:\n        outputs =",
        "    if True:\n        outputs =",
        ("tests/check/test_answers.py",),
    ),
    Fault(
        "two counts pair with one result",
        "jls/_tools/check/carried.py",
        "len(units) == len(targets)",
        "len(units) >= len(targets)",
        (f"{CARRIED_BY}test_counts_pair_in_order_if_there_are_equally_many",),
    ),
    Fault(
        "a count after the batch counts as state",
        "jls/_tools/check/carried.py",
        "pairs.pair([top], in_order=is_next)",
        "pairs.pair([top])",
        (f"{CARRIED_BY}test_an_array_alone_pairs_if_all_before_it_come_back",),
    ),
    Fault(
        "a state that may be either of two results is no error",
        "jls/_tools/check/carried.py",
        "    pairs.check_clear(states)\n",
        "",
        (f"{CARRIED_BY}test_what_stays_open_is_an_error_with_the_candidates",),
    ),
    Fault(
        "a step whose updates go nowhere is a step",
        "jls/_tools/check/faults.py",
        "    if not subject.params:\n        why_unmoved",
        "    if not subject:\n        why_unmoved",
        ("tests/check/test_check_step.py",),
    ),
    Fault(
        "a loop with a wide tolerance is noted",
        "jls/_tools/check/tolerance.py",
        "    return not any(_UNITS",
        "    return True or any(_UNITS",
        ("tests/check/test_tolerance.py::test_other_loops_are_not_noted",),
    ),
    Fault(
        "a flag of a loop's body is not followed",
        "jls/_tools/check/tolerance.py",
        "if inside is not None and inside >= call.consts:",
        "if False:",
        (
            "tests/check/test_tolerance.py::"
            "test_a_loop_that_ends_by_a_rounded_number_is_noted",
        ),
    ),
]

FAULTS = DEGREES + KNOWN + READING + TRIALS + ANSWERS + CARRIED
