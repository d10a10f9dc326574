"""What reads and replays programs."""

from planted.fault import Fault

CLIP = "tests/test_clipping.py"
SQUARES = "tests/program/test_squares.py::"
WALK = "tests/program/test_walk.py::"
OPERATIONS = "tests/program/test_operations.py::"
PLACES = "tests/program/test_places.py::"

FAULTS = [
    Fault(
        "scopes around a checkpoint are named twice",
        "jls/_program/places.py",
        "is_twice = is_backward and _names(first) == _names(second)",
        "is_twice = False",
        (PLACES + "test_scopes_around_a_checkpoint_are_named_once",),
    ),
    Fault(
        "a scope in one of its own name is left out in the forward pass",
        "jls/_program/places.py",
        "is_twice = is_backward and _names(first) == _names(second)",
        "is_twice = _names(first) == _names(second)",
        (PLACES + "test_scopes_around_a_checkpoint_are_named_once",),
    ),
    Fault(
        "a jax without the names of convolutions is an error",
        "jls/_program/products.py",
        "    if numbers is None or None in windows:\n",
        "    if False:\n",
        ("tests/program/test_jaxprs.py",),
    ),
    Fault(
        "a scope in one of its own name is left out inside of a checkpoint",
        "jls/_program/places.py",
        'equation.primitive.name == "remat2" and not is_inside:',
        'equation.primitive.name == "remat2":',
        (PLACES + "test_scopes_around_a_checkpoint_are_named_once",),
    ),
    Fault(
        "a scope with the name of a transformation is taken for one",
        "jls/_program/jaxprs.py",
        'type(x).__name__ == "Transform"',
        'name.startswith(("jvp", "transpose", "vmap"))',
        (PLACES + "test_a_scope_is_named_as_the_user_wrote_it",),
    ),
    Fault(
        "a scope that begins as one of JAX's own is left out",
        "jls/_program/places.py",
        "if x not in _OF_JAX and not x.startswith(_OF_JLS)]",
        "if not x.startswith((*_OF_JAX, _OF_JLS))]",
        (PLACES + "test_a_scope_is_named_as_the_user_wrote_it",),
    ),
    Fault(
        "a mark on a product hides the scopes around the loop that it is in",
        "jls/_program/places.py",
        "if x not in _OF_PRODUCTS]",
        "if x]",
        (PLACES + "test_a_mark_on_a_product_is_no_border_of_the_loss",),
    ),
    Fault(
        "a norm that overflows is not looked at, only the leaves",
        "jls/_step.py",
        "norm_finite = jnp.isfinite(squares[-1])",
        "norm_finite = jnp.asarray(True)",
        (CLIP,),
    ),
    Fault(
        "an eager step looks at every element where a traced one looks at the sum",
        "jls/_step.py",
        "            sum_of_squares = known[key]\n",
        "            sum_of_squares = None\n",
        (CLIP,),
    ),
    Fault(
        "the sum over some leaves is taken for that over all",
        "jls/_program/squares.py",
        "is_total = len(result.inputs) == len(inputs)",
        "is_total = len(result.inputs) == min(2, len(inputs))",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "the sum over one axis is taken for that over all",
        "jls/_program/squares.py",
        "if first.power == 2 and is_whole and len(axes) == len(shape):",
        "if first.power == 2 and is_whole:",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "a part of complex numbers is taken for the whole",
        "jls/_program/squares.py",
        "is_whole = first.parts == _parts_of(inputs[first.input])",
        "is_whole = True",
        ("tests/program/test_squares.py",),
    ),
    Fault(
        "the sum over rounded gradients is taken for that over all",
        "jls/_program/squares.py",
        "    return is_exact_cast(old, new)\n",
        "    return bool(old) and bool(new)\n",
        (SQUARES + "test_no_other_sum_is_taken_for_it[rounded before]",),
    ),
    Fault(
        "the sum of c * c of complex numbers is taken for that of squares",
        "jls/_program/squares.py",
        "wanted = one._replace(is_conjugate=one.is_conjugate != is_complex)",
        "wanted = one._replace(is_conjugate=other.is_conjugate)",
        (SQUARES + "test_of_complex_numbers_both_parts_count",),
    ),
    Fault(
        "a sum with one leaf in it twice is taken for that over all",
        "jls/_program/squares.py",
        "if one.inputs.isdisjoint(other.inputs):",
        "if one.inputs or other.inputs:",
        (SQUARES + "test_no_other_sum_is_taken_for_it[one leaf twice, and the other]",),
    ),
    Fault(
        "a clip's check computes the whole update again",
        "jls/_program/control.py",
        "not needed.isdisjoint(equation.outvars):\n",
        "needed:\n",
        (SQUARES + "test_what_else_the_program_computes_is_left_out",),
    ),
    Fault(
        "a branch out of range is none",
        "jls/_program/walk.py",
        "chosen = min(max(chosen, 0), len(branches) - 1)  # as JAX clamps it\n",
        "chosen = min(chosen, len(branches) - 1)\n",
        (WALK + "test_known_branch_is_the_only_one",),
    ),
    Fault(
        "of a loop one round is followed",
        "jls/_program/walk.py",
        "        if all(a is b for a, b in zip(joined, state, strict=True)):\n"
        "            break\n"
        "        state = joined",
        "        state = joined\n        break",
        (WALK + "test_walk_knows_the_inputs_of_each_result[a carry that passes on]",),
    ),
    Fault(
        "of two branches the first is followed",
        "jls/_program/walk.py",
        "    for others in results[1:]:",
        "    for others in results[2:]:",
        (WALK + "test_walk_knows_the_inputs_of_each_result[cond]",),
    ),
    Fault(
        "what the condition of a while loop reads passes for what its body reads",
        "jls/_program/control.py",
        'Call("while", body, first, last, carried)',
        'Call("while", body, 0, last, carried)',
        (WALK + "test_walk_knows_the_inputs_of_each_result[while that reads inputs]",),
    ),
    Fault(
        "a reciprocal square root passes for a square root",
        "jls/_program/primitives.py",
        '"rsqrt", degree=-0.5',
        '"rsqrt", degree=0.5',
        (OPERATIONS + "test_power_of_a_factor[rsqrt]",),
    ),
    Fault(
        "an operation has no row, and nothing says so",
        "jls/_program/primitives.py",
        '    _blind("cumlogsumexp"),\n',
        "",
        ("tests/program/test_primitives.py",),
    ),
    Fault(
        "the largest element passes for one in its place",
        "jls/_program/primitives.py",
        '_blind(\n        "cummax cummin reduce_window_max',
        '_elementwise(\n        "cummax cummin reduce_window_max',
        (OPERATIONS + "test_element_is_computed_from_that_in_its_place",),
    ),
    Fault(
        "a logarithm to the base of 2 is not singular",
        "jls/_program/primitives.py",
        '_elementwise("log2", singular=0, like="log"',
        '_elementwise("log2", like="log"',
        (OPERATIONS + "test_every_singular_function_of_one_operand_has_an_example",),
    ),
    Fault(
        "a jax without names of scopes is an error",
        "jls/_program/jaxprs.py",
        'return _part(_part(equation, "source_info"), "name_stack", "")',
        "return equation.source_info.name_stack",
        ("tests/program/test_jaxprs.py",),
    ),
    Fault(
        "a loop that lacks a parameter is run as if it had it",
        "jls/_program/control.py",
        "length is None or counts is None or is_reversed is None:",
        "length is None or is_reversed is None:",
        ("tests/program/test_jaxprs.py::test_why_and_calibrate_go_on_without[scan]",),
    ),
    Fault(
        "the axes of devices are taken for known",
        "jls/_program/control.py",
        'return [x._replace(kind="devices") for x in _call(equation) if is_known]',
        'return [x._replace(kind="devices") for x in _call(equation)]',
        (
            "tests/program/test_jaxprs.py::"
            "test_why_and_calibrate_go_on_without[devices]",
        ),
    ),
    Fault(
        "a line of jls is named",
        "jls/_program/places.py",
        '_NEVER = ("jax", "jaxlib", "jls")',
        '_NEVER = ("jax", "jaxlib")',
        (PLACES + "test_lines_of_jls_are_never_named",),
    ),
    Fault(
        "a line of a library is named before the user's own",
        "jls/_program/places.py",
        "line = min(lines, key=_rank, default",
        "line = max(lines, key=_rank, default",
        (PLACES + "test_line_of_a_library_is_that_of_who_calls_it",),
    ),
    Fault(
        "what is installed is taken for the user's own",
        "jls/_program/places.py",
        '_INSTALLED = {"site-packages", "dist-packages"}',
        '_INSTALLED = {"site-packages"}',
        (PLACES + "test_what_is_installed_is_a_library",),
    ),
    Fault(
        "an operation has no advice",
        "jls/_program/primitives.py",
        '_rows("cholesky", like="cholesky"),',
        '_rows("cholesky"),',
        (OPERATIONS + "test_every_likeness_has_advice",),
    ),
    Fault(
        "a replay runs what the watched operations do not need",
        "jls/_program/replay.py",
        "            if self.only is None\n",
        "            if True\n",
        (WALK + "test_replay_leaves_out_what_the_watched_operations_do_not_need",),
    ),
    Fault(
        "a replay leaves out callbacks",
        "jls/_program/replay.py",
        "            or has_side_effects(equation)\n",
        "",
        (WALK + "test_replay_runs_callbacks_that_nobody_watches",),
    ),
]
