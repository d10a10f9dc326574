"""The trace of a user's function, and the scales and wrappers in it."""

from planted.fault import Fault

TRACE = "tests/reading/test_trace.py::"
PRECISION = "jls/_tools/reading/precision.py"
SHARES = "tests/reading/test_precision.py::test_shares_are_those_worked_out_by_hand"
RAISES = "tests/reading/test_precision.py::test_a_right_step_in_float16_raises_nothing"
MISSES = (
    "tests/reading/test_precision.py::test_what_a_loss_scale_misses_is_in_the_headline"
)
COUNTS = "tests/program/test_products.py::"

WHOLE = (
    "tests/reading/test_precision.py::"
    "test_keep_is_the_reason_where_it_finds_all_products"
)

FAULTS = [
    Fault(
        "what keep finds has no mark if it finds everything",
        "jls/_autocast/keep.py",
        "in_scope(equation, marks[i]) if i in marks else equation",
        "equation",
        (WHOLE,),
    ),
    Fault(
        "the headline does not say that it is keep that leaves nothing in half",
        PRECISION,
        "if _KEEP in reasons and BY_MODEL not in reasons:",
        "if ():",
        (WHOLE,),
    ),
    Fault(
        "the derivative of an outer product is float32 by the model",
        PRECISION,
        "if OUTER_PRODUCT in marks or is_outer(equation):",
        "if is_outer(equation):",
        (
            "tests/reading/test_precision.py::"
            "test_an_outer_product_and_its_derivative_have_one_reason",
        ),
    ),
    Fault(
        "two arguments of one role have one name",
        "jls/_tools/reading/arguments.py",
        "is_unique = len(set(names)) == len(names)",
        "is_unique = bool(names)",
        (f"{TRACE}test_two_arguments_never_have_one_name",),
    ),
    Fault(
        "the function is given the caller's own NNX objects",
        "jls/_tools/reading/arguments.py",
        "new = nnx().merge(graph, new_state) if objects else []",
        "new = objects if new_state else []",
        (f"{TRACE}test_arguments_are_put_together_anew",),
    ),
    Fault(
        "objects that nnx.cached_partial binds are no arguments",
        "jls/_tools/reading/arguments.py",
        "            return inner, bound\n",
        "            return step, ()\n",
        (f"{TRACE}test_objects_that_cached_partial_binds_are_arguments",),
    ),
    Fault(
        "a report of a step counts as state",
        "jls/_tools/reading/arguments.py",
        'kind = AUX if tokens(more)[0] == "aux" else REPORT',
        'kind = ""',
        (f"{TRACE}test_report_is_no_state",),
    ),
    Fault(
        "a function that computes with numpy has no program",
        "jls/_tools/reading/trace.py",
        "    return _trace_abstract(fun, arguments, (jax.Array,))\n",
        "    return _trace_abstract(fun, arguments, _ARRAYS)\n",
        (f"{TRACE}test_function_that_computes_with_numpy_is_traced_with_its_numbers",),
    ),
    Fault(
        "a numpy array of the caller changes while its function is traced",
        "jls/_tools/reading/trace.py",
        "leaves = [x.copy() if isinstance(x, np.ndarray) else x for x in rest]",
        "leaves = list(rest)",
        (f"{TRACE}test_function_that_computes_with_numpy_is_traced_with_its_numbers",),
    ),
    Fault(
        "a count beside a scale makes a wrapper of it",
        "jls/_tools/reading/scales.py",
        'if "skips" not in counters or "steps" not in counters:',
        'if "skips" not in counters and "steps" not in counters:',
        (f"{TRACE}test_count_beside_a_bare_scale_is_no_wrapper",),
    ),
    Fault(
        "the scale in a state of nnx.split is not found",
        "jls/_tools/reading/scales.py",
        'name[:-1] for name in names if name[-1] == "loss_scale"',
        'name[:-1] for name in names if name[-1] == "scale"',
        (f"{TRACE}test_scale_of_an_nnx_optimizer_is_found[split]",),
    ),
    Fault(
        "the value that a spike policy judged is lost in an NNX optimizer",
        "jls/_tools/reading/scales.py",
        'above[-1:] not in ([], ["spike_state"])',
        "above != []",
        (f"{TRACE}test_scale_of_an_nnx_optimizer_is_found[whole]",),
    ),
    Fault(
        "a scale that moves is switched off while it is 1",
        "jls/_tools/reading/scales.py",
        "return scale.is_static and bool(np.all(np.asarray(leaf) == 1))",
        "return bool(np.all(np.asarray(leaf) == 1))",
        (
            f"{TRACE}test_only_a_static_scale_of_1_is_switched_off",
            "tests/check/test_reading.py::"
            "test_scale_of_1_that_moves_is_not_switched_off",
        ),
    ),
    Fault(
        "an optimizer that an inner function reads is not found",
        "jls/_tools/origin/scalers.py",
        "return names.union(*map(_globals_of, inner))",
        "return names",
        (
            f"{TRACE}test_scaler_that_a_step_holds_is_found"
            "[a global, in an inner function]",
        ),
    ),
    Fault(
        "an optimizer of a trainer is not found by its method",
        "jls/_tools/origin/scalers.py",
        '        yield from getattr(part.__self__, "__dict__", {}).values()\n',
        "        pass\n",
        (f"{TRACE}test_scaler_that_a_step_holds_is_found[a method]",),
    ),
    Fault(
        "what a queue keeps of a batch is taken for the batch",
        "jls/_tools/reading/arguments.py",
        "        if isinstance(leaf, BadBatch):  #",
        "        if False:  #",
        ("tests/test_why.py",),
    ),
    # How much of it is half.
    Fault(
        "a product in a scan counts once",
        "jls/_program/products.py",
        '(frame.length if frame.kind == "scan" else 1)',
        "1",
        (f"{COUNTS}test_a_product_counts_with_the_loops_around_it",),
    ),
    Fault(
        "each branch of a cond counts",
        "jls/_program/products.py",
        "int(i == largest)",
        "1",
        (f"{COUNTS}test_a_product_counts_with_the_loops_around_it",),
    ),
    Fault(
        "of two branches with as many multiplications the wider one counts",
        "jls/_program/products.py",
        "-sum(n * size for n, size in counts)",
        "sum(n * size for n, size in counts)",
        (f"{COUNTS}test_of_two_branches_with_as_many_the_narrower_one_counts",),
    ),
    Fault(
        "the zeros of a dilated operand are multiplied",
        "jls/_program/products.py",
        "len(elements))]].sum())",
        "len(elements))]].sum() * dilation)",
        (f"{COUNTS}test_a_gradient_takes_what_the_product_takes[stride-0]",),
    ),
    Fault(
        "the zeros of padding are multiplied",
        "jls/_program/products.py",
        "count *= int(elements[at[(at >= 0) & (at < len(elements))]].sum())",
        "count *= int(elements.sum())",
        (f"{COUNTS}test_a_convolution_counts_as_in_xla",),
    ),
    Fault(
        "each group of a ragged product has all rows",
        "jls/_program/products.py",
        "if set(numbers.lhs_ragged_dimensions) & set(axes):",
        "if False:",
        (f"{COUNTS}test_a_gradient_takes_what_the_product_takes[ragged-1]",),
    ),
    Fault(
        "what has no product is told to cast one",
        PRECISION,
        "has_products = bool(precision.products)",
        "has_products = True",
        (
            "tests/reading/test_precision.py::"
            "test_what_has_no_product_is_not_told_to_cast_one",
        ),
    ),
    Fault(
        "it is not said that a while counts once",
        PRECISION,
        "    if any(reason == _WHILE for _, reason in precision.wide):\n",
        "    if False:\n",
        ("tests/reading/test_precision.py::test_each_reason",),
    ),
    Fault(
        "a teacher counts",
        PRECISION,
        "follow = [x for x, value in values if value and value.depends & bit]",
        "follow = list(products)",
        (f"{RAISES}[teacher]",),
    ),
    Fault(
        "a static scale is one that moves",
        PRECISION,
        "if scale.is_static or not is_used",
        "if not is_used",
        ("tests/reading/test_precision.py::test_under_a_static_scale_nothing_is_said",),
    ),
    Fault(
        "float16 without a product is not seen",
        PRECISION,
        "is_narrow = any(map(is_backward, reading.flow.narrow.values()))",
        "is_narrow = False",
        (f"{RAISES}[elementwise]",),
    ),
    Fault(
        "bfloat16 is half as float16 is",
        PRECISION,
        "if jnp.dtype(jnp.float16) not in halves and not is_narrow:",
        "if False:",
        (f"{SHARES}[plain-bfloat16 under a scale]",),
    ),
    Fault(
        "a kernel that is not known is in float32",
        PRECISION,
        "primitive_of(equation) is UNKNOWN and any(",
        "False and any(",
        (f"{RAISES}[foreign kernel]",),
    ),
    Fault(
        "a temperature is told that nothing is half",
        PRECISION,
        "if not follow and len(reading.scales) > 1:",
        "if False:",
        (
            "tests/reading/test_precision.py::"
            "test_a_temperature_and_an_optimizer_of_matrices_raise_nothing",
        ),
    ),
    Fault(
        "products of the optimizer are the model's",
        PRECISION,
        "    if UPDATE in marks:\n",
        "    if False:\n",
        (
            "tests/reading/test_precision.py::"
            "test_products_of_an_optimizer_are_not_the_model_s",
        ),
    ),
    Fault(
        "what `keep` kept is of the model",
        "jls/_autocast/keep.py",
        "_MARKS = {KEEP: KEPT, ",
        '_MARKS = {KEEP: "kept", ',
        (
            "tests/reading/test_precision.py::"
            "test_keep_is_a_reason_forwards_and_backwards",
        ),
    ),
    Fault(
        "what remat computes once more is a gradient",
        "jls/_program/history.py",
        "    if is_scaled(value):\n"
        "        return next(filter(is_gradient_in_loss, sites), None)\n",
        "",
        (f"{RAISES}[remat]",),
    ),
    Fault(
        "a gradient inside the loss is not seen",
        "jls/_program/history.py",
        "return next(filter(is_gradient_in_loss, sites), None)",
        "return None",
        (f"{MISSES}[penalty]",),
    ),
    Fault(
        "a gradient that is computed once more is not inside the loss",
        "jls/_program/places.py",
        "    if Name(_REMATTED) in names:\n",
        "    if False:\n",
        ("tests/reading/test_precision.py::test_a_penalty_is_found_inside_of[remat]",),
    ),
    Fault(
        "a product that JAX moved out of a loop hides the gradient inside the loss",
        "jls/_program/history.py",
        "        sites.append(op.site)\n",
        "        sites = sites or [op.site]\n",
        ("tests/reading/test_precision.py::test_a_penalty_is_found_inside_of[scan]",),
    ),
    Fault(
        "a forward product in float16 lacks a scale",
        "jls/_program/history.py",
        "        and is_transposed(op.site)\n",
        "",
        (f"{RAISES}[weighed]",),
    ),
    Fault(
        "the gradients of one network are those of the next",
        "jls/_tools/reading/flow.py",
        "if INNER not in marks:  # parameters",
        "if True:  # parameters",
        (
            "tests/reading/test_precision.py::"
            "test_a_penalty_is_named_for_the_network_that_it_trains",
        ),
    ),
    Fault(
        "a cast with products in one branch alone is none",
        "jls/_autocast/autocast.py",
        "    if not half:\n",
        "    if not sum(half):\n",
        (
            "tests/autocast/test_semantics.py::"
            "test_a_product_in_the_smaller_branch_alone_is_half",
        ),
    ),
]
