"""What casts the products of a program to half."""

from planted.fault import Fault

TOOLS = "tests/autocast/test_tools.py"
LOSS = "tests/autocast/test_loss.py"
SEMANTICS = "tests/autocast/test_semantics.py"
BORDERS = "tests/autocast/test_borders.py"
PROGRAMS = "tests/autocast/test_any_program.py"
CALLS = "tests/autocast/test_autocast.py"
COSTS = "tests/costs/test_tracing_autocast.py"
STEP = "tests/train/test_compute_dtype.py"
KEEP = "jls/_autocast/keep.py"
PRODUCT = "jls/_autocast/product.py"
REWRITE = "jls/_autocast/rewrite.py"
SHARED = "jls/_autocast/shared.py"
PICK = "jls/_autocast/pick.py"
PRIMITIVES = "jls/_program/primitives.py"

RULE = f"{BORDERS}::test_a_function_with_a_derivative_of_its_own_has_products_in_half"
SCOPES = f"{TOOLS}::test_what_a_rule_computes_has_the_scopes_of_its_call_once"
WHOLE_RULE = (
    f"{SEMANTICS}::test_a_rule_of_custom_vjp_may_close_over_an_array_of_the_program"
)
LINES = (
    f"{TOOLS}::"
    "test_operations_inside_a_function_of_jax_have_the_line_and_scope_of_its_call"
)
KEPT_MOVE = (
    f"{BORDERS}::test_what_a_product_takes_is_moved_in_half_unless_keep_finds_the_move"
)
SECOND = (
    f"{BORDERS}::"
    "test_a_second_derivative_is_that_of_an_operand_that_was_rounded_and_moved"
)
SUBNORMAL = f"{BORDERS}::test_a_subnormal_result_of_a_product_reaches_the_derivative"
SCAN_KEEPS = (
    f"{BORDERS}::test_a_scan_keeps_products_in_half_and_sums_and_carries_as_they_are"
)
CHOICE = f"{BORDERS}::test_in_a_body_what_a_choice_is_made_by_is_not_compared_again"
ONCE_ROUNDED = (
    f"{BORDERS}::test_what_is_the_same_in_each_iteration_is_rounded_outside_of_the_loop"
)
HALF_PRODUCT = f"{SEMANTICS}::test_a_product_is_half_operands_and_result"
CONVOLVE = f"{SEMANTICS}::test_a_convolution_and_a_ragged_dot_are_half"
EFFECT = f"{BORDERS}::test_an_effect_happens_once"
POLICY = f"{BORDERS}::test_a_checkpoint_of_the_user_says_what_is_kept"
SMALL_STEPS = f"{SEMANTICS}::test_a_loop_of_small_steps_moves"
MASKS = (
    f"{SEMANTICS}::test_a_finite_constant_that_a_product_takes_is_the_largest_number"
)
INFINITE = f"{SEMANTICS}::test_an_infinite_constant_stays_infinite"
PREVENTS = (
    f"{SEMANTICS}::test_a_checkpoint_keeps_its_policy_and_prevents_what_it_prevented"
)
DONATES = f"{SEMANTICS}::test_a_nested_jit_stays_one_with_what_it_donates"
KEPT_CALL = f"{BORDERS}::test_calls_share_no_body_with_one_that_is_kept"
ONE_PRODUCT = f"{BORDERS}::test_a_product_in_a_rule_of_custom_jvp_is_computed_once"
SORTED = f"{BORDERS}::test_the_result_of_a_sort_in_the_body_of_a_scan_is_kept"

FAULTS = [
    # The meaning, and what is kept.
    Fault(
        "the inner checkpoint is left out: what is subnormal is lost",
        PRODUCT,
        "return again(again(fun))",
        "return again(fun)",
        (SUBNORMAL,),
    ),
    Fault(
        "the body of a loop keeps all that it computes",
        PRODUCT,
        "return again(again(fun))",
        "return fun",
        (SCAN_KEEPS,),
    ),
    Fault(
        "a checkpoint keeps nothing by name",
        PRODUCT,
        "names = policies.save_only_these_names(_STORED)",
        'names = policies.save_only_these_names("other")',
        (SCAN_KEEPS,),
    ),
    Fault(
        "what a choice is made by is computed again",
        PRODUCT,
        "return primitive.name in _CHOICES",
        "return False",
        (CHOICE,),
    ),
    Fault(
        "comparisons by order are computed again",
        PRODUCT,
        '"gt", "is_finite"',
        '"is_finite"',
        (CHOICE,),
    ),
    Fault(
        "XLA may leave a rounding out",
        PRODUCT,
        "return lax.reduce_precision(array, 8, int(jnp.finfo(dtype).nmant))",
        "return array",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a rounding makes 0 of what is subnormal in float16",
        PRODUCT,
        "lax.reduce_precision(array, 8,",
        "lax.reduce_precision(array, 5,",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "an array that is rounded once has no derivative",
        PRODUCT,
        "return _taken(half, array), narrow(tangents[1], half.dtype)",
        "return _taken(half, array), narrow(0 * tangents[1], half.dtype)",
        (SECOND,),
    ),
    Fault(
        "an operand that is in half already is rounded again",
        PRODUCT,
        "given[i] = _taken(half, array)",
        "given[i] = narrow(array, self.dtype)",
        (ONCE_ROUNDED,),
    ),
    Fault(
        "an operand is not rounded",
        PRODUCT,
        "            elif self.is_rounded[i]:\n",
        "            elif False:\n",
        (HALF_PRODUCT,),
    ),
    Fault(
        "an operand in half is rounded as if it were float32",
        PRODUCT,
        "elif self.is_rounded[i]:",
        "elif True:",
        (CONVOLVE,),
    ),
    Fault(
        "a product in a rule is not named",
        PRODUCT,
        "result = stored(result) if self.is_stored else result",
        "result = result",
        (SCAN_KEEPS,),
    ),
    Fault(
        "the tangents of the operands are not added",
        PRODUCT,
        "whole = sum(parts[1:], parts[0]) if parts",
        "whole = parts[0] if parts",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "the tangent moves the wrong operand",
        PRODUCT,
        "moved = [*operands[:i], tangent, *operands[i + 1 :]]",
        "moved = [*operands[: i + 1], tangent][-2:]",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "the operand that is moved is taken in half as it was",
        PRODUCT,
        "fixed = [*halves[:i], None, *halves[i + 1 :]]",
        "fixed = list(halves)",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a tangent of a product is not rounded",
        PRODUCT,
        "parts.append(wide(product.in_half(moved, fixed)))",
        "parts.append(wide(product.in_half(moved, fixed)) * 1.01)",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a product is never stored",
        REWRITE,
        "is_stored=self._is_stored,\n            line",
        "is_stored=False,\n            line",
        (SCAN_KEEPS,),
    ),
    Fault(
        "the results of sums are computed again",
        REWRITE,
        "            return list(map(stored, results))\n\n    def _product",
        "            return results\n\n    def _product",
        (SCAN_KEEPS,),
    ),
    Fault(
        "what is cheap is kept",
        REWRITE,
        "if not self._is_stored or primitive_of(equation).is_cheap:",
        "if not self._is_stored:",
        (SCAN_KEEPS,),
    ),
    Fault(
        "a body with an effect runs again",
        REWRITE,
        "effects_of(x) or rule_of(x)",
        "rule_of(x)",
        (EFFECT,),
    ),
    Fault(
        "a body with a checkpoint of the user has one around it",
        REWRITE,
        'effects_of(x) or rule_of(x) == "remat" for',
        "effects_of(x) for",
        (POLICY,),
    ),
    Fault(
        "a body has no checkpoint around it",
        REWRITE,
        "if not _may_run_again(program):",
        "if True:",
        (SCAN_KEEPS,),
    ),
    Fault(
        "a loop rounds in each iteration what never changes",
        REWRITE,
        "self._fixed.update(self._fixed_in(call, site, operands))",
        "pass",
        (ONCE_ROUNDED,),
    ),
    Fault(
        "what is moved and never changes is rounded in each iteration",
        REWRITE,
        "is_fixed = len(moved) == len(given) and _is_move(equation)",
        "is_fixed = False",
        (ONCE_ROUNDED,),
    ),
    Fault(
        "what changes in a loop is taken for what never does",
        REWRITE,
        "call.inputs(operands)[: call.consts], strict=False",
        "call.inputs(operands), strict=False",
        (SMALL_STEPS,),
    ),
    Fault(
        "the result of a product is float32",
        REWRITE,
        'params["preferred_element_type"] = half',
        "pass",
        (HALF_PRODUCT,),
    ),
    Fault(
        "a move is rounded behind",
        REWRITE,
        "if not is_kept and _is_move(equation):",
        "if False:",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a move that keep finds is rounded before",
        REWRITE,
        "if not is_kept and _is_move(equation):",
        "if _is_move(equation):",
        (KEPT_MOVE,),
    ),
    Fault(
        "what is not moved at all is taken for a move",
        REWRITE,
        "        bool(row.moves)\n        and row.is_cheap",
        "        row.is_cheap",
        (f"{SEMANTICS}::test_elementwise_operations_are_float32",),
    ),
    Fault(
        "a mask is inf where a product takes it",
        REWRITE,
        "if np.isfinite(number) and abs(number) > max(least, largest):",
        "if False:",
        (MASKS,),
    ),
    Fault(
        "an infinite mask becomes finite",
        REWRITE,
        "if np.isfinite(number) and abs(number) >",
        "if abs(number) >",
        (INFINITE,),
    ),
    Fault(
        "a mask has the other sign",
        REWRITE,
        "np.copysign(largest, number)",
        "np.copysign(largest, -number)",
        (MASKS,),
    ),
    Fault(
        "a mask that is selected is inf",
        REWRITE,
        "least = _MASK if is_selected else _LOWEST",
        "least = _LOWEST",
        (MASKS,),
    ),
    Fault(
        "any large number counts as a mask",
        REWRITE,
        "least = _MASK if is_selected else _LOWEST",
        "least = _MASK",
        (f"{SEMANTICS}::test_a_number_that_is_not_selected_is_no_mask",),
    ),
    Fault(
        "what is selected is not known behind a move",
        REWRITE,
        'is_selected |= equation.primitive.name == "select_n"',
        'is_selected = equation.primitive.name == "select_n"',
        (MASKS,),
    ),
    Fault(
        "a checkpoint of the user is left out",
        REWRITE,
        "results = bind_remat(equation, run, operands)",
        "results = run(*operands)",
        (POLICY, PREVENTS),
    ),
    Fault(
        "a nested jit loses what it donates",
        REWRITE,
        "return operation_of(equation, jaxpr=body).bind(arrays)",
        "return eval_jaxpr(*opened(body), *arrays)",
        (DONATES,),
    ),
    Fault(
        "calls share a body whatever keep finds inside",
        REWRITE,
        "return self._is_stored, *found",
        "return self._is_stored, None",
        (KEPT_CALL,),
    ),
    Fault(
        "a tangent in a rule is named, and cannot be transposed",
        REWRITE,
        "        if not any(x.is_tangent for x in operands):\n",
        "        if True:\n",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a product in a rule is a function with its own derivative",
        REWRITE,
        "        if self._is_rule:\n            return call_shared(Product",
        "        if False:\n            return call_shared(Product",
        (ONE_PRODUCT,),
    ),
    Fault(
        "results of a custom_vjp are computed again",
        REWRITE,
        "results, pullback = jax.tree.map(stored, (results, pullback))",
        "pass",
        (f"{BORDERS}::test_in_a_body_what_a_rule_of_custom_vjp_keeps_is_kept",),
    ),
    Fault(
        "a cast to float32 of float32 rounds",
        REWRITE,
        "if is_float32(equation.invars[0]):\n                return operands",
        "if is_float32(equation.invars[0]):\n"
        "                return [Held(1.01 * held.wide)]",
        (
            BORDERS,
            SEMANTICS,
        ),
    ),
    Fault(
        "a pick is scattered into zeros",
        REWRITE,
        "if is_pick(equation) and not is_kept:",
        "if False:",
        (LOSS,),
    ),
    Fault(
        "the default precision is put on a product that asks for one",
        REWRITE,
        'if parameter(equation, "precision") is None:',
        "if True:",
        (
            f"{SEMANTICS}::"
            "test_a_precision_that_is_asked_for_is_not_that_of_the_default",
        ),
    ),
    Fault(
        "a convolution is no product",
        PRIMITIVES,
        '"conv_general_dilated", degree',
        '"conv", degree',
        (CONVOLVE,),
    ),
    Fault(
        "a ragged dot is no product",
        PRIMITIVES,
        '"ragged_dot_general", degree',
        '"ragged_dot", degree',
        (CONVOLVE,),
    ),
    Fault(
        "a sum is cheap",
        PRIMITIVES,
        '"cumsum reduce_sum", degree',
        '"cumsum reduce_sum", is_cheap=True, degree',
        (SCAN_KEEPS,),
    ),
    Fault(
        "a sort is cheap",
        PRIMITIVES,
        '_blind("sort", moves="some", is_pairwise=True)',
        '_blind("sort", moves="some", is_pairwise=True, is_cheap=True)',
        (SORTED,),
    ),
    Fault(
        "a sine is not cheap",
        PRIMITIVES,
        'sin tanh", degree="bounded", is_cheap=True',
        'sin tanh", degree="bounded"',
        (SCAN_KEEPS,),
    ),
    Fault(
        "an exponential is not cheap",
        PRIMITIVES,
        '"exp exp2", infs="exp", singular=0, like="exp", is_cheap=True',
        '"exp exp2", infs="exp", singular=0, like="exp"',
        (SCAN_KEEPS,),
    ),
    # Operations that are traced once.
    Fault(
        "each operation is traced anew",
        SHARED,
        "@functools.lru_cache(_MOST)\n",
        "@functools.lru_cache(0)\n",
        (COSTS,),
    ),
    Fault(
        "operations share a trace with those on other meshes",
        SHARED,
        "        jitted = _jitted(fun, jax.sharding.get_abstract_mesh(), *static)\n",
        "        jitted = _jitted(fun, None, *static)\n",
        (f"{CALLS}::test_sharded_arrays_stay_sharded",),
    ),
    Fault(
        "operations on two numbers share a trace",
        SHARED,
        "        self._bits = type(value), array.dtype, array.tobytes()\n",
        "        self._bits = type(value), array.dtype\n",
        (SEMANTICS,),
    ),
    # Products.
    Fault(
        "the caller's default precision is lost",
        REWRITE,
        '"precision": self._precision}',
        '"precision": None}',
        (
            f"{SEMANTICS}::"
            "test_the_default_precision_of_the_user_counts_for_what_stays_float32",
        ),
    ),
    Fault(
        "inner products are cast",
        KEEP,
        "        if is_inner(equation):\n",
        "        if False:\n",
        (SEMANTICS,),
    ),
    Fault(
        "outer products are cast",
        KEEP,
        "        return OUTER if is_outer(equation) else None\n",
        "        return None\n",
        (f"{SEMANTICS}::test_angles_of_a_rotary_embedding_are_float32",),
    ),
    Fault(
        "a product that asks for a precision is cast",
        "jls/_program/products.py",
        "    return any(one not in (None, lax.Precision.DEFAULT) for one in asked)\n",
        "    return False and bool(asked)\n",
        (SEMANTICS,),
    ),
    Fault(
        "products of other dtypes are cast",
        KEEP,
        "    return is_wide and dtypes <= {jnp.dtype(jnp.float32), half}\n",
        "    return is_wide or dtypes <= {jnp.dtype(jnp.float32), half}\n",
        (SEMANTICS,),
    ),
    # Moves and elementwise operations.
    Fault(
        "a sum over devices is half",
        "jls/_program/primitives.py",
        '        "psum psum_invariant",\n        degree="linear",\n',
        '        "psum psum_invariant",\n        moves="same",\n'
        '        cast="move",\n        degree="linear",\n',
        (f"{SEMANTICS}::test_a_psum_is_float32",),
    ),
    Fault(
        "a scatter that computes is taken for one that writes",
        "jls/_program/primitives.py",
        "    return update is not None and bool(update.eqns)\n",
        "    return False\n",
        (f"{SEMANTICS}::test_a_scatter_that_computes_is_as_written",),
    ),
    Fault(
        "a scatter that writes is taken for one that computes",
        "jls/_program/primitives.py",
        "    return update is not None and bool(update.eqns)\n",
        "    return update is None or bool(update.eqns)\n",
        ("tests/program/test_primitives.py",),
    ),
    # The element that is picked of each row.
    Fault(
        "a label in a loop keeps a mask of all logits",
        PICK,
        "@checkpointed\n",
        "",
        (f"{LOSS}::test_a_pick_in_a_loop_keeps_the_indices_alone",),
    ),
    Fault(
        "a label beyond the last one that is clipped has no derivative",
        PICK,
        "    lax.GatherScatterMode.FILL_OR_DROP,\n",
        "    lax.GatherScatterMode.FILL_OR_DROP,\n    lax.GatherScatterMode.CLIP,\n",
        (f"{LOSS}::test_the_derivative_of_a_picked_element_is_the_same_number",),
    ),
    # Calls, loops and branches.
    Fault(
        "a lane of a batched loop goes on after its end",
        "jls/_program/control.py",
        "_in_lanes(is_on(carry), results, carry) if has_lanes else results",
        "results",
        (f"{SEMANTICS}::test_each_lane_of_a_batched_while_ends_by_itself",),
    ),
    Fault(
        "the condition of a loop has the place of its body",
        "jls/_program/control.py",
        "            return site.beside(_CONDITION)\n",
        "            return site\n",
        (f"{BORDERS}::test_the_condition_of_a_loop_is_not_taken_for_its_body",),
    ),
    Fault(
        "layers that are alike are rewritten one by one",
        REWRITE,
        "self._bodies.setdefault(key, jitted_inline(made))",
        "jitted_inline(made)",
        (f"{SEMANTICS}::test_calls_that_become_the_same_share_a_body",),
    ),
    # Custom derivatives.
    Fault(
        "the rule of a custom_jvp is left out",
        REWRITE,
        '        if rule == "jvp":\n',
        "        if ():\n",
        (RULE,),
    ),
    Fault(
        "integers of a custom_jvp have tangents",
        REWRITE,
        "                return [*values, *(x for x, atom in pairs if is_inexact_atom"
        "(atom))]\n",
        "                return [*values, *(x for x, _ in pairs)]\n",
        (SEMANTICS,),
    ),
    Fault(
        "all arguments of a custom_vjp are differentiated",
        REWRITE,
        "                if x.perturbed and is_inexact_atom(equation.invars[i])\n",
        "                if is_inexact_atom(equation.invars[i])\n",
        (f"{SEMANTICS}::test_a_rule_of_custom_vjp_sees_what_is_differentiated",),
    ),
    Fault(
        "a cotangent of 0 reaches the rule of a custom_vjp as a symbol",
        REWRITE,
        "                _instantiated(x) if is_inexact_atom(atom) else None\n",
        "                x if is_inexact_atom(atom) else None\n",
        (f"{SEMANTICS}::test_a_result_of_a_custom_vjp_may_be_unused",),
    ),
    Fault(
        "what a rule of custom_vjp closes over is not looked up",
        REWRITE,
        "            remember(equation.outvars, results)\n",
        "",
        (WHOLE_RULE,),
    ),
    Fault(
        "an array that a rule of custom_vjp closes over is lost in silence",
        REWRITE,
        "            raise ClosedOverError\n",
        "            pass\n",
        (f"{SEMANTICS}::test_where_that_array_is_lost_the_function_runs_as_written",),
    ),
    # Lines and scopes.
    Fault(
        "what is inside of a function of JAX has no scope",
        "jls/_program/jaxprs.py",
        "names[:0] if is_rule else names + name_stack(equation),\n",
        "names[:0] if is_rule else name_stack(equation),\n",
        (LINES,),
    ),
    Fault(
        "what a rule computes has the scopes of its call twice",
        "jls/_program/jaxprs.py",
        "names[:0] if is_rule else names + name_stack(equation),\n",
        "names + name_stack(equation),\n",
        (SCOPES,),
    ),
    Fault(
        "what is inside of a function of JAX has the line where that was traced first",
        "jls/_program/places.py",
        "    return ()\n",
        "    return lines\n",
        (
            "tests/origin/test_lines.py::test_a_line_around_a_function_of_jax_is_none_inside_of_it",
        ),
    ),
    Fault(
        "lines and scopes of the program are lost",
        "jls/_program/jaxprs.py",
        "    return context(traceback, name_stack=around() + names)\n",
        "    return context(traceback, name_stack=around())\n",
        (f"{PROGRAMS}::test_names_and_scopes_of_the_program_are_kept",),
    ),
    # keep.
    Fault(
        "a keep that finds nothing is silent",
        KEEP,
        "        if self._has_found:\n            return\n",
        "        return\n",
        (f"{CALLS}::test_a_keep_that_finds_nothing_lists_the_scopes_that_are_there",),
    ),
    Fault(
        "an empty keep keeps everything",
        "jls/_autocast/autocast.py",
        "    if not keep:\n",
        "    if ():\n",
        (f"{CALLS}::test_a_bad_keep_is_an_error_at_once",),
    ),
    Fault(
        "a function that keeps nothing is silent",
        KEEP,
        "        self._has_found = keep is None\n",
        "        self._has_found = keep is None or callable(keep)\n",
        (f"{CALLS}::test_a_function_keep_that_keeps_nothing_lists_the_functions",),
    ),
    # Functions, arguments and results.
    Fault(
        "a constant result is no array, and is not rolled back",
        "jls/_autocast/autocast.py",
        "out[i] = jnp.asarray(array)",
        "out[i] = array",
        (
            f"{CALLS}::test_constant_results_are_arrays_of_their_types",
            "tests/train/test_train_step.py::test_weak_constants_are_rolled_back_too",
        ),
    ),
    Fault(
        "a symbol in a shape has no size",
        "jls/_program/jaxprs.py",
        "    if not is_symbolic_dim(dimension):\n",
        "    if True:\n",
        (f"{CALLS}::test_it_can_be_exported_with_a_symbolic_shape",),
    ),
    Fault(
        "the update of a wrapper is cast with the loss",
        "jls/_autocast/autocast.py",
        "        _refuse_update(program)\n",
        "",
        (f"{CALLS}::test_the_update_of_a_wrapper_inside_is_an_error",),
    ),
    Fault(
        "what an NNX model changes stays in the copy",
        "jls/_autocast/autocast.py",
        "            update_all(objects, state)\n",
        "            del objects\n",
        (f"{CALLS}::test_an_nnx_model_is_changed_in_place_as_without_a_cast",),
    ),
    Fault(
        "reading an array at the host gets no note",
        "jls/_autocast/autocast.py",
        "    jax.errors.TracerArrayConversionError,\n",
        "",
        (f"{CALLS}::test_a_function_that_reads_values_at_the_host_gets_a_note",),
    ),
    # A step of training.
    Fault(
        "a keep without compute_dtype keeps nothing",
        "jls/_train/step.py",
        "if keep is not None and compute_dtype is None:",
        "if ():",
        (f"{STEP}::test_a_keep_of_nothing_that_is_cast_is_an_error_at_once",),
    ),
    Fault(
        "a line search sees the float32 loss",
        "jls/_train/step.py",
        '        more["value_fn"] = _cast(more["value_fn"], options)\n',
        "        pass\n",
        (f"{STEP}::test_a_value_function_for_a_line_search_is_cast_too",),
    ),
    Fault(
        "float16 that nothing scales is silent",
        "jls/_train/step.py",
        "    if any(is_real(scale) and scale == 1 for scale in scales):\n",
        "    if any(is_real(scale) and scale == 0 for scale in scales):\n",
        (f"{STEP}::test_a_static_scale_of_1_under_float16_is_a_warning",),
    ),
    Fault(
        "operations of a rule are kept if those of the function are",
        REWRITE,
        "Rewrite(self.choice.anew(), ",
        "Rewrite(self.choice, ",
        (f"{SEMANTICS}::test_keep_finds_operations_of_a_rule_by_their_own_scopes",),
    ),
    Fault(
        "what an autocast inside keeps is cast by the one around it",
        "jls/_autocast/keep.py",
        "if marks_of(site) & {FLOAT32, KEPT}:",
        "if False:",
        (
            "tests/autocast/test_autocast.py::"
            "test_what_an_autocast_inside_keeps_stays_float32",
        ),
    ),
]
