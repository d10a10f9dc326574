"""The trace of a user's function, and the scales and wrappers in it."""

from planted.fault import Fault

TRACE = "tests/reading/test_trace.py::"

FAULTS = [
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
        "Item(tokens((*path, *more)), x, REPORT)",
        'Item(tokens((*path, *more)), x, "")',
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
        "        if isinstance(node, BadBatch):\n",
        "        if False:\n",
        ("tests/test_why.py",),
    ),
]
