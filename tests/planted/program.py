"""What reads and replays programs."""

from planted.fault import Fault

CLIP = "tests/test_clipping.py"
SQUARES = "tests/program/test_squares.py::"
WALK = "tests/program/test_walk.py::"
PLACES = "tests/program/test_places.py::"

FAULTS = [
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
        "    return known[key]\n",
        "    return None\n",
        (CLIP,),
    ),
    Fault(
        "the sum over some leaves is taken for that over all",
        "jls/_program/squares.py",
        "is_total = len(result.numbers) == len(inputs)",
        "is_total = len(result.numbers) == min(2, len(inputs))",
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
        "is_whole = first.parts == _parts_of(inputs[first.number])",
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
        "if one.numbers.isdisjoint(other.numbers):",
        "if one.numbers or other.numbers:",
        (SQUARES + "test_no_other_sum_is_taken_for_it[one leaf twice, and the other]",),
    ),
    Fault(
        "a clip's check computes the whole update again",
        "jls/_program/squares.py",
        "        if not needed.isdisjoint(equation.outvars):\n",
        "        if needed:\n",
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
        "jls/_program/walk.py",
        "fixed, state = operands[first:last], operands[last:]",
        "fixed, state = operands[:first], operands[last:]",
        (WALK + "test_walk_knows_the_inputs_of_each_result[while that reads inputs]",),
    ),
    Fault(
        "a reciprocal square root passes for a square root",
        "jls/_program/rules.py",
        '"rsqrt": -0.5',
        '"rsqrt": 0.5',
        ("tests/program/test_rules.py::test_power_of_a_factor[rsqrt]",),
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
        "frame = next(mine, None) or next(others, None)",
        "frame = next(others, None) or next(mine, None)",
        (PLACES + "test_line_of_a_library_is_that_of_who_calls_it",),
    ),
]
