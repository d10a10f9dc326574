"""`health`, `History` and `requeue`."""

from planted.fault import Fault

REQUEUED = "tests/run/test_requeue.py"
VERDICT = "jls/_tools/run/verdict.py"
HEALTH = "jls/_tools/run/health.py"
POISON = "jls/_tools/run/poison.py"
HISTORY = "jls/_tools/run/history.py"
METRICS = "jls/_metrics.py"
RECORD = "jls/_tools/run/columns.py"
BY_HAND = "tests/run/test_verdict.py::"
SHORT = "tests/run/test_health.py::"
RUNS = "tests/run/test_health_faults.py::"
OF_PMAP = "tests/devices/test_states_of_pmap.py"
RECORDED = "tests/run/test_history.py::"
UNDERFLOW = (
    "tests/run/test_health.py::"
    "test_a_skipped_step_comes_before_an_underflow_and_that_before_the_ceiling"
)
NUMBERS = BY_HAND + "test_each_number_of_a_sentence_is_the_right_one"

FAULTS = [
    Fault(
        "a scale that has grown counts as one that started too high",
        VERDICT,
        'not (start == known["init_scale"] or is_too_high)',
        "start < 0",
        (BY_HAND + "test_a_scale_that_started_too_high_is_called_so",),
    ),
    Fault(
        "skips for a loss count as those of a scale that started too high",
        VERDICT,
        "if not (backoff and is_all and",
        "if not (backoff and",
        (BY_HAND + "test_a_scale_that_started_too_high_is_called_so",),
    ),
    Fault(
        "a scale above its maximum is told at the ceiling alone",
        VERDICT,
        'sentences.append(_above_ceiling(facts, "The"))',
        "pass",
        (BY_HAND + "test_a_scale_above_its_maximum_is_called_so_under_any_verdict",),
    ),
    Fault(
        "parameters of other shapes are taken",
        HEALTH,
        "        if is_other and sum(",
        "        if False and sum(",
        ("tests/test_mistakes.py",),
    ),
    Fault(
        "a line goes on over a NaN",
        "jls/_tools/run/history_plot.py",
        "    x, y = steps, np.where(is_finite, values, np.nan)\n",
        "    x, y = steps[is_finite], values[is_finite]\n",
        (RECORDED + "test_a_line_has_a_gap_where_a_value_is_not_finite",),
    ),
    Fault(
        "a first step that was skipped for its loss may be a backoff",
        RECORD,
        "is_other = any(x > SkipReason.GRADIENTS for x in reason)",
        "is_other = False",
        (RECORDED + "test_a_first_step_that_was_skipped_may_be_a_backoff",),
    ),
    Fault(
        "a retry counts only if others pass",
        "jls/_tools/run/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += others_pass",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if the scale stays",
        "jls/_tools/run/requeue.py",
        "held.counted += others_pass or not scale < held.scale",
        "held.counted += not scale < held.scale",
        (REQUEUED,),
    ),
    Fault(
        "a retry counts only if a batch was applied in between",
        "jls/_tools/run/requeue.py",
        "            self._last_good_scale = scale  # the gradients were finite\n",
        "            self._last_good_scale = scale\n"
        "        if reason == SkipReason.GRADIENTS:\n"
        "            self._last_good_scale = 0.0\n",
        (REQUEUED,),
    ),
    Fault(
        "a scale of NaN is lower than another",
        "jls/_tools/run/requeue.py",
        "not scale < held.scale",
        "scale >= held.scale",
        (REQUEUED,),
    ),
    Fault(
        "the first try of a batch counts",
        "jls/_tools/run/requeue.py",
        "        if held.scale is not None:\n",
        "        held.counted += held.scale is None\n"
        "        if held.scale is not None:\n",
        (REQUEUED,),
    ),
    Fault(
        "a batch is tried once more than it may be",
        "jls/_tools/run/requeue.py",
        "return held.counted < self._retries",
        "return held.counted <= self._retries",
        (REQUEUED,),
    ),
    Fault(
        "a batch with a bad loss comes again",
        "jls/_tools/run/requeue.py",
        "is_overflow = reason == SkipReason.GRADIENTS",
        "is_overflow = reason <= SkipReason.LOSS",
        (REQUEUED,),
    ),
    Fault(
        "new batches come before those that come again",
        "jls/_tools/run/requeue.py",
        "        if not self._waiting:\n            new = ",
        "        if True:\n            new = ",
        (REQUEUED,),
    ),
    Fault(
        "a flag is read a step early",
        "jls/_tools/run/requeue.py",
        "while len(self._unread) > self._lag:",
        "while len(self._unread) >= max(self._lag, 1):",
        (REQUEUED,),
    ),
    Fault(
        "an interrupt of the wait lets the batch of a step that ran come again",
        "jls/_tools/run/requeue.py",
        "        except Exception:\n            self._unread.pop()",
        "        except BaseException:\n            self._unread.pop()",
        (REQUEUED,),
    ),
    Fault(
        "of several processes, one reads the flags of all",
        "jls/_tools/run/requeue.py",
        "return array.addressable_data(0) if is_global else array",
        "return array",
        ("tests/processes/test_processes.py",),
    ),
    Fault(
        "at a quarter of the steps a run is not called skipping yet",
        VERDICT,
        "4 * count >= self.steps\n",
        "4 * count > self.steps\n",
        (BY_HAND + "test_skipping_begins_at_a_quarter_of_the_steps",),
    ),
    Fault(
        "a scale that comes down is called skipping a step early",
        VERDICT,
        "return count > patience and",
        "return count >= patience and",
        (BY_HAND + "test_skipping_begins_at_a_quarter_of_the_steps",),
    ),
    Fault(
        "a scaler that waits before it backs off is called skipping",
        VERDICT,
        'patience = COMING_DOWN * max(1, self.scaler.get("backoff_interval") or 1)',
        "patience = COMING_DOWN",
        (RUNS + "test_a_scaler_that_waits_may_skip_as_often_as_it_waits",),
    ),
    Fault(
        "what the last step was decides whether a run is skipping",
        VERDICT,
        '"skipping", lambda f: f.is_often(f.skips)',
        '"skipping", lambda f: not f.skipped and f.is_often(f.skips)',
        (RUNS + "test_a_quarter_skipped_is_called_skipping",),
    ),
    Fault(
        "a run stalls at the limit, not above it",
        VERDICT,
        "f.consecutive_skips > f.max_consecutive_skips",
        "f.consecutive_skips >= f.max_consecutive_skips",
        (SHORT + "test_verdict_and_sentence",),
    ),
    Fault(
        "at floor comes before stalled",
        VERDICT,
        '"stalled", lambda f: f',
        '"stalled", lambda f: not f.is_at_floor and f',
        (SHORT + "test_verdict_and_sentence",),
    ),
    Fault(
        "a loss scale of 0 passes for a good one",
        VERDICT,
        "not 0 < f.loss_scale < math.inf",
        "not 0 <= f.loss_scale < math.inf",
        (RUNS + "test_a_scale_that_is_no_positive_number",),
    ),
    Fault(
        "underflow comes before a step that was skipped",
        VERDICT,
        '"recovering", lambda f: f.skipped,',
        '"recovering", lambda f: f.skipped and not hasattr(f, "small"),',
        (UNDERFLOW,),
    ),
    Fault(
        "of a scale at its floor all skips are said to be in a row",
        VERDICT,
        "its floor ({facts.consecutive_skips} skipped",
        "its floor ({facts.skips} skipped",
        (NUMBERS + "[at floor]",),
    ),
    Fault(
        "a bad loss is said to be the cause of every skip",
        VERDICT,
        'f"({facts.nonfinite_losses} of',
        'f"({facts.skips} of',
        (NUMBERS + "[non-finite loss]",),
    ),
    Fault(
        "skips for updates and spikes are said to be for gradients",
        VERDICT,
        "gradients = max(0, self.skips - sum(others.values()))",
        "gradients = max(0, self.skips - self.nonfinite_losses)",
        (NUMBERS + "[skipping]",),
    ),
    Fault(
        "the spikes found and those skipped change places",
        VERDICT,
        'f"{facts.spikes_found} found, {facts.spikes} skipped"',
        'f"{facts.spikes} found, {facts.spikes_found} skipped"',
        (NUMBERS + "[ok, with spikes]",),
    ),
    Fault(
        "what chance adds is called spiking",
        VERDICT,
        "return count - 2 * math.sqrt(count) > self",
        "return count > self",
        (BY_HAND + "test_spiking_is_more_than_the_share_and_what_chance_adds",),
    ),
    Fault(
        "spikes that were skipped prove that a run is unstable",
        VERDICT,
        "            count -= self.spikes\n",
        "            count -= 0\n",
        (BY_HAND + "test_spiking_is_more_than_the_share_and_what_chance_adds",),
    ),
    Fault(
        "a budget with one skip left is called spent",
        VERDICT,
        "facts.tokens >= 1 or",
        "facts.tokens > 1 or",
        (BY_HAND + "test_a_budget_is_spent_where_less_than_one_step_is_left",),
    ),
    Fault(
        "who has skipped before is said to have skipped nothing",
        VERDICT,
        '"" if facts.skips else',
        '"" if facts.skipped else',
        (SHORT + "test_verdict_and_sentence",),
    ),
    Fault(
        "a state is searched a second time",
        HEALTH,
        "    _check_params(params)\n    if",
        "    _check_params(params)\n    run = run_in(state)\n    if",
        ("tests/run/test_health_walk.py",),
    ),
    Fault(
        "the counters are read one by one on the device",
        "jls/_state.py",
        '    own = jax.device_get(node._asdict() | {"inner_state": ()})\n',
        '    own = node._asdict() | {"inner_state": ()}\n',
        ("tests/run/test_health_walk.py",),
    ),
    Fault(
        "a wrapper inside another optimizer passes for one outside",
        "jls/_state.py",
        "        if self.around is not self.state:\n",
        "        if False:\n",
        (RUNS + "test_what_undoes_a_skip_is_refused_around_the_wrapper",),
    ),
    Fault(
        "where the parameters come first, the state is said to be none",
        HEALTH,
        "if find(params, is_wrapper_state) and not",
        "if find(state, is_wrapper_state) and not",
        (
            "tests/run/test_doors.py::test_parameters_before_the_state_are_told_the_order",
        ),
    ),
    Fault(
        "a checkpoint with a bad scale is safe to save",
        HEALTH,
        'not in ("poisoned", "bad scale", "stalled")',
        'not in ("poisoned", "stalled")',
        (RUNS + "test_a_scale_that_is_no_positive_number",),
    ),
    Fault(
        "what was not looked at passes for not poisoned",
        HEALTH,
        'known["poisoned"] = facts.poisoned if poisoned else None',
        'known["poisoned"] = facts.poisoned',
        (RUNS + "test_an_ok_says_whether_the_parameters_were_looked_at",),
    ),
    Fault(
        "of two wrappers the first is taken for the one of the state",
        HEALTH,
        "fitting = [one for one in fitting if len(one.names) == size]",
        "fitting = fitting[:1]",
        (RUNS + "test_of_two_wrappers_the_one_that_made_the_state_is_to_be_passed",),
    ),
    Fault(
        "a verdict that was asked for raises only where nothing may be saved",
        HEALTH,
        "    if result.verdict in raise_if:\n        raise",
        "    if result.verdict in raise_if and not result.safe_to_save:\n        raise",
        (SHORT + "test_raise_if_carries_the_verdict_and_warn_if_warns",),
    ),
    Fault(
        "a maximum that is -inf before its first step is poison",
        POISON,
        "may_wait = steps == 0 or (tree",
        "may_wait = False and (tree",
        (BY_HAND + "test_a_maximum_is_minus_inf_before_its_first_step_alone",),
    ),
    Fault(
        "a mask is doubted a skip early",
        POISON,
        "steps_go_on = consecutive_skips <= COMING_DOWN",
        "steps_go_on = consecutive_skips < COMING_DOWN",
        (
            BY_HAND
            + "test_a_mask_is_doubted_where_more_is_skipped_than_a_scale_takes_down",
        ),
    ),
    Fault(
        "a moment whose name ends like a mask's passes for its average",
        POISON,
        'name.endswith(f"/{param}")',
        "name.endswith(param)",
        (BY_HAND + "test_an_average_of_a_mask_has_its_whole_name[unmask-False]",),
    ),
    Fault(
        "-inf is a mask though the moments are not finite",
        POISON,
        "not (steps_go_on and has_good_moments)",
        "not steps_go_on",
        (RUNS + "test_minus_inf_with_moments_that_are_not_finite_is_poison",),
    ),
    Fault(
        "an inf that an optimizer keeps on purpose is poison",
        POISON,
        "lambda leaf: jnp.shape(leaf) not in shapes",
        "lambda leaf: False",
        (RUNS + "test_an_inf_that_an_optimizer_keeps_on_purpose_is_no_poison",),
    ),
    Fault(
        "the best loss so far is poison while it is inf",
        POISON,
        "lambda leaf: jnp.ndim(leaf) == 0",
        "lambda leaf: False",
        (RUNS + "test_best_loss_so_far_may_be_inf_but_not_nan",),
    ),
    Fault(
        "a complex number that is not finite passes for a mask",
        POISON,
        "count_true([~jnp.isfinite(wide), jnp.zeros_like(wide, jnp.bool_)])",
        "count_true([jnp.zeros_like(wide, jnp.bool_), ~jnp.isfinite(wide)])",
        (BY_HAND + "test_a_complex_leaf_is_no_mask",),
    ),
    Fault(
        "the best loss is given the step of a NaN",
        HISTORY,
        'row = columns["loss"].index(best)',
        "row = int(np.argmin(losses))",
        (RECORDED + "test_summary_of_reports_counts_their_skips",),
    ),
    Fault(
        "the skips of a run are those of the rows that were recorded",
        HISTORY,
        "if taken.size and skipped.size:",
        "if not taken.size and skipped.size:",
        (RECORDED + "test_summary_of_every_tenth_step_has_the_counts_of_the_run",),
    ),
    Fault(
        "a last row without counts passes for a skipped step",
        HISTORY,
        "at_end = last is not None and bool(last > 0)",
        "at_end = bool(streaks[-1] > 0)",
        (RECORDED + "test_summary_does_not_know_of_a_last_row_without_counts",),
    ),
    Fault(
        "a gap of one step passes for a record of every step",
        HISTORY,
        "if last - first >= len(steps) and",
        "if last - first > len(steps) and",
        (
            RECORDED
            + "test_summary_says_of_one_missing_step_that_not_all_were_recorded",
        ),
    ),
    Fault(
        "what a bad append has is appended in part",
        HISTORY,
        '        for number in values["step"]:\n',
        '        self._columns["step"] += values["step"]\n'
        '        for number in list(values["step"]):\n',
        (RECORDED + "test_a_bad_append_appends_nothing",),
    ),
    Fault(
        "before the first step a step passes for skipped",
        RECORD,
        '(column(columns, "applied") == 0) & (column(columns, "steps") != 0)',
        'column(columns, "applied") == 0',
        (RECORDED + "test_summary_of_a_state_before_its_first_step_has_no_skips",),
    ),
    Fault(
        "where another run begins, fewer than no steps were skipped",
        RECORD,
        "    counts[1:] = np.where(since >= 0, since, counts[1:])\n    return counts\n",
        "    counts[1:] = np.where(np.isfinite(since), since, counts[1:])\n"
        "    return counts\n",
        (RECORDED + "test_skips_of_another_run_do_not_count_against_those_before",),
    ),
    Fault(
        "skips between two rows are not counted",
        RECORD,
        "    counts[1:] = np.where(since >= 0, since, counts[1:])\n    return counts\n",
        "    return counts\n",
        (RECORDED + "test_plot_of_every_tenth_step_marks_the_rows_after_skips",),
    ),
    Fault(
        "a metric that is inf or NaN is no strict JSON",
        METRICS,
        "return not isinstance(number, float) or math.isfinite(number)",
        "return True",
        ("tests/run/test_columns.py::test_a_limit_of_nothing_is_none",),
    ),
    Fault(
        "a batch that no scale can mend comes again",
        "jls/_tools/run/requeue.py",
        'is_overflow and bool(_read_scalar("scale_moves", moves))',
        "is_overflow",
        (REQUEUED,),
    ),
    Fault(
        "what was saved and has not come yet is not outstanding",
        "jls/_tools/run/requeue.py",
        "entries = *current, *self._waiting, *self._first",
        "entries = *current, *self._waiting",
        (REQUEUED,),
    ),
    Fault(
        "an optimizer is taken for parameters",
        "jls/_tools/run/health.py",
        "    _check_params(params)\n",
        "",
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "devices that differ are read as the first",
        "jls/_state.py",
        "if not np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape)):",
        "if False:",
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "a run without a loss scale is told of one",
        "jls/_tools/run/verdict.py",
        "return not (self.is_static and self.loss_scale == 1)",
        "return True",
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "a parameter of one element that is -inf is taken for a mask",
        "jls/_tools/run/poison.py",
        '(tree == "carried" and leaf.size == 1)',
        "leaf.size == 1",
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "finite gradients behind a clip are called inf or NaN",
        "jls/_step.py",
        "    return sum_of_squares_in(update, grads, len(grads)) is not None\n",
        "    return False\n",
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "each device of pmap is a row of the history",
        METRICS,
        "name: [row.data for row in value.addressable_shards]\n",
        "name: value\n",
        (OF_PMAP,),
    ),
    Fault(
        "the steps of a scan on several devices are one row",
        METRICS,
        "return is_one_each and value.sharding.shard_shape(value.shape) == (1, *rest)",
        "return is_one_each",
        (OF_PMAP,),
    ),
    Fault(
        "the devices of a report may differ",
        METRICS,
        "if not all(np.array_equal(first, row, equal_nan=True) for row in others):",
        "if False:",
        (OF_PMAP,),
    ),
    Fault(
        "a NaN on one device is another on the next",
        METRICS,
        ", equal_nan=True",
        "",
        (OF_PMAP,),
    ),
    Fault(
        "a flat dict is any with a loss scale in it",
        "jls/_state.py",
        "if isinstance(name, str) and _JOINED.fullmatch(name):",
        'if "loss_scale" in str(name):',
        ("tests/run/test_doors.py",),
    ),
    Fault(
        "a queue at its end is silent in a new loop",
        "jls/_tools/run/requeue.py",
        "            self._is_at_end = True\n            raise StopIteration",
        "            raise StopIteration",
        (REQUEUED,),
    ),
    Fault(
        "a state under a static scale is asked for half precision",
        "jls/_tools/run/verdict.py",
        "if not facts.moves or (",
        "if False or (",
        (
            "tests/run/test_health.py::"
            "test_the_text_under_a_scale_that_moves_ends_with_the_question_for_half",
        ),
    ),
    Fault(
        "the demo trains in float32 throughout",
        "jls/_tools/cli/demo.py",
        "    loss_fn = autocast(loss_fn, dtype)\n",
        "",
        ("tests/pages/test_demo.py::test_memory_is_that_of_shapes_worked_out_by_hand",),
    ),
    Fault(
        "the doctor writes another dtype than it says",
        "jls/_tools/cli/doctor.py",
        "compute_dtype=jnp.{dtype}",
        "compute_dtype=jnp.float16",
        ("tests/cli/test_doctor.py::test_the_lines_to_write_train_a_float32_model",),
    ),
    Fault(
        "a run that is well is asked for half for ever",
        "jls/_tools/run/verdict.py",
        'verdict == "ok" and facts.steps > _EARLY',
        "False",
        (
            "tests/run/test_health.py::"
            "test_a_run_that_is_well_for_long_is_not_asked_again",
        ),
    ),
    Fault(
        "a batch of more arrays passes for parameters",
        "jls/_tools/run/health.py",
        "if not fitting and 1 < len(of_all) < len(shapes):",
        "if False:",
        ("tests/test_mistakes.py",),
    ),
]
