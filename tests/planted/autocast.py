"""What casts the products of a program to half."""

from planted.fault import Fault

TOOLS = "tests/autocast/test_tools.py"
MEMORY = "tests/autocast/test_memory.py"
LOSS = "tests/autocast/test_loss.py"
SEMANTICS = "tests/autocast/test_semantics.py"
BORDERS = "tests/autocast/test_borders.py"
PROGRAMS = "tests/autocast/test_any_program.py"
CALLS = "tests/autocast/test_autocast.py"
COSTS = "tests/costs/test_tracing_autocast.py"
STEP = "tests/train/test_compute_dtype.py"
KEEP = "jls/_autocast/keep.py"
READERS = "jls/_autocast/readers.py"
HALVES = "jls/_autocast/halves.py"
REWRITE = "jls/_autocast/rewrite.py"
HELD = "jls/_autocast/held.py"
SHARED = "jls/_autocast/shared.py"
PICK = "jls/_autocast/pick.py"

READ = f"{BORDERS}::test_what_crosses_a_border_is_half_if_all_that_read_it_round_it"
INSIDE = (
    f"{BORDERS}::"
    "test_what_crosses_a_border_in_a_call_is_half_if_products_read_what_that_gives"
)
ALONE = f"{BORDERS}::test_what_is_half_by_itself_is_stored_in_half_and_nothing_else"
MOVED = f"{BORDERS}::test_what_is_moved_of_a_chain_is_half_if_products_alone_read_it"
WHILE = f"{BORDERS}::test_a_carry_that_the_condition_of_a_loop_reads_is_float32"
LATER = f"{BORDERS}::test_a_carry_that_a_later_iteration_reads_is_float32"
ONE = f"{BORDERS}::test_one_sum_or_a_row_of_biases_is_no_running_value"
STEPS = f"{BORDERS}::test_a_running_value_is_one_however_it_is_written"
GIVEN = f"{BORDERS}::test_a_running_value_that_a_call_is_given_is_kept_in_half_there"
KEPT = f"{BORDERS}::test_the_derivative_of_a_chain_keeps_no_float32"
RULE = f"{BORDERS}::test_a_function_with_a_derivative_of_its_own_has_products_in_half"
NUMBER = f"{BORDERS}::test_a_number_that_there_is_not_in_half_is_moved_in_float32"
INFINITE = f"{SEMANTICS}::test_an_infinite_constant_stays_infinite"
CARRIED = f"{SEMANTICS}::test_a_carry_of_scan_is_half_if_products_alone_read_it"
RUNNING = (
    f"{SEMANTICS}::"
    "test_a_running_value_is_kept_in_half_where_derivatives_are_as_good_with_it"
)
UNROLLED = (
    f"{SEMANTICS}::test_a_running_value_that_is_unrolled_is_float32_and_is_kept_in_half"
)
FIXED = f"{BORDERS}::test_cotangents_of_a_constant_of_a_scan_are_carried_in_float32"
CLAMPED = (
    f"{BORDERS}::"
    "test_a_mask_of_what_others_read_too_is_in_range_where_a_product_takes_it"
)
SCOPES = f"{TOOLS}::test_what_a_rule_computes_has_the_scopes_of_its_call_once"
EVERY = f"{TOOLS}::test_every_cast_and_every_rule_has_a_line_of_the_function"
BRANCHES = f"{SEMANTICS}::test_the_result_of_branches_is_half_if_products_alone_read_it"
KEPT_LOOP = f"{SEMANTICS}::test_a_loop_that_keep_finds_carries_float32"
HALF_KEPT = f"{SEMANTICS}::test_a_chain_keeps_its_half_operand_for_the_derivative"
OTHERS_READ = f"{SEMANTICS}::test_calls_share_no_body_where_others_read_the_results"
WHOLE_RULE = (
    f"{SEMANTICS}::test_a_rule_of_custom_vjp_may_close_over_an_array_of_the_program"
)
MASKS = (
    f"{SEMANTICS}::test_a_finite_constant_that_a_product_takes_is_the_largest_number"
)
LINES = (
    f"{TOOLS}::"
    "test_operations_inside_a_function_of_jax_have_the_line_and_scope_of_its_call"
)
ENTERS = f"{TOOLS}::test_why_names_the_line_of_what_enters_a_loop_and_a_keep_that_helps"

FAULTS = [
    # Who reads a value as it is.
    Fault(
        "an elementwise operation counts as one that rounds what it reads",
        READERS,
        "        if row.cast not in MOVES or self._choice.is_kept(site):\n"
        "            return [True] *",
        "        if row.cast not in MOVES or self._choice.is_kept(site):\n"
        "            return [False] *",
        (BRANCHES,),
    ),
    Fault(
        "a product that stays float32 counts as one that rounds what it reads",
        READERS,
        "            return [not self._rounds(site)] *",
        "            return [False] *",
        (READ,),
    ),
    Fault(
        "a move that is kept rounds what it reads",
        READERS,
        "        if row.cast not in MOVES or self._choice.is_kept(site):\n",
        "        if not row.moves:\n",
        (READ,),
    ),
    Fault(
        "what is moved is read as it is, though products alone read the result",
        READERS,
        "        return [id(atom) not in data or any(results) for",
        "        return [True or id(atom) in data or any(results) for",
        (BRANCHES,),
    ),
    Fault(
        "an operand of a custom_vjp is rounded",
        READERS,
        "            return [True] * len(found) if is_rule else found\n",
        "            return found\n",
        (READ,),
    ),
    Fault(
        "the condition of a while loop is not asked",
        READERS,
        "            wanted[i] |= is_kept or (bool(carry) and carry[i])\n",
        "            wanted[i] |= is_kept\n",
        (WHILE,),
    ),
    Fault(
        "a carried value is half though the loop reads it as it is",
        READERS,
        "            more = [a or b for a, b in zip(wanted, carried, strict=False)]\n",
        "            more = wanted[: call.carried]\n",
        (CARRIED,),
    ),
    Fault(
        "what a later iteration reads of a carried value is not asked",
        READERS,
        "            if more == wanted[: call.carried]:\n",
        "            if more:\n",
        (LATER,),
    ),
    Fault(
        "what a kept loop carries is rounded before it enters, and in each iteration",
        READERS,
        "            wanted[i] |= is_kept or (bool(carry) and carry[i])\n",
        "            wanted[i] |= bool(carry) and carry[i]\n",
        (KEPT_LOOP,),
    ),
    Fault(
        "what a call gives is read as it is, inside of the call",
        READERS,
        "                inputs = self.read(call.program, results, call.site(site))\n",
        "                inputs = self.read(\n"
        "                    call.program, [True] * len(results), call.site(site)\n"
        "                )\n",
        (INSIDE,),
    ),
    # What is half by itself, and what is a running value.
    Fault(
        "the result of a custom_vjp counts as half",
        HALVES,
        "            results = [IN_MEMORY] * len(results)\n",
        "            results = list(results)\n",
        (ALONE,),
    ),
    Fault(
        "a product that stays float32 counts as half",
        HALVES,
        "            return [Fact(self._choice.why_wide(site) is None)]\n",
        "            return [Fact(True)]\n",
        (ALONE,),
    ),
    Fault(
        "what is moved of half and of float32 counts as half",
        HALVES,
        "    is_half = all(fact.is_half for fact in moved)\n",
        "    is_half = any(fact.is_half for fact in moved)\n",
        (ALONE,),
    ),
    Fault(
        "a carry counts as half if it only begins as half",
        HALVES,
        "IN_MEMORY._replace(is_half=before.is_half and after.is_half)\n",
        "IN_MEMORY._replace(is_half=before.is_half)\n",
        (f"{SEMANTICS}::test_a_carry_of_while_is_float32",),
    ),
    Fault(
        "a carry counts as half though it begins as float32",
        HALVES,
        "IN_MEMORY._replace(is_half=before.is_half and after.is_half)\n",
        "IN_MEMORY._replace(is_half=after.is_half)\n",
        (ALONE,),
    ),
    Fault(
        "the branches of a cond need not agree",
        HALVES,
        "        is_half = one.is_half and other.is_half\n",
        "        is_half = one.is_half or other.is_half\n",
        (ALONE,),
    ),
    Fault(
        "a running value that is unrolled is not found",
        HALVES,
        "        if len(row) > 1:  # the second sum in a row\n",
        "        if ():\n",
        (STEPS,),
    ),
    Fault(
        "one sum is a running value",
        HALVES,
        "        if len(row) > 1:  # the second sum in a row\n",
        "        if row:\n",
        (ONE,),
    ),
    Fault(
        "a bias counts as a sum",
        HALVES,
        " and not fact.is_spread and ",
        " and ",
        (ONE,),
    ),
    Fault(
        "a running value that is scaled is none",
        HALVES,
        "name in (*_SUMS, *_SCALES):  # with",
        "name in _SUMS:  # with",
        (STEPS,),
    ),
    Fault(
        "a running value that is moved is none",
        HALVES,
        "    row = max((fact.row for fact in moved), default=(), key=len)\n",
        "    row = ()\n",
        (STEPS,),
    ),
    # Chains, and what is kept of them.
    Fault(
        "a chain keeps its arrays of float32 for the derivative",
        HELD,
        "        return checkpointed(self._run_kept)(*arrays)\n",
        "        return self._run_kept(*arrays)\n",
        (HALF_KEPT,),
    ),
    Fault(
        "what is in half is cast to float32 for each use: its cotangents are rounded",
        HELD,
        "        if self._wide is None:\n            self._wide = _cast(",
        "        if not self.is_half or True:\n            self._wide = _cast(",
        (LOSS,),
    ),
    Fault(
        "the cotangents of a chain are rounded before they are summed",
        HELD,
        "_in_place_of(next(wide), x) if f else x",
        "TO_FLOAT32(x) if f else x",
        (LOSS,),
    ),
    Fault(
        "a chain keeps its operands in float32 beside those in half",
        HELD,
        "    return TO_FLOAT32(half), tangents[0]  # needs",
        "    return _in_place_of(primals[0], half), tangents[0]  # needs",
        (HALF_KEPT,),
    ),
    Fault(
        "the last step of a chain decides whether it keeps anything",
        HELD,
        "        self._is_linear &= all(x._is_linear for x in inner)\n",
        "",
        (HALF_KEPT,),
    ),
    Fault(
        "a product of two arrays keeps them in float32",
        HELD,
        '        is_scaled = name == "mul" and any(map(is_number, operands))\n',
        '        is_scaled = name == "mul"\n',
        (KEPT,),
    ),
    Fault(
        "a quotient keeps its denominator in float32",
        HELD,
        '        is_scaled |= name == "div" and is_number(operands[1])\n',
        '        is_scaled |= name == "div"\n',
        (KEPT,),
    ),
    Fault(
        "a running value is kept in half whatever is computed with it",
        HELD,
        "    sums[place] = False\n",
        "    return True\n",
        (RUNNING,),
    ),
    Fault(
        "a running value is kept in float32",
        HELD,
        "    sums[place] = False\n",
        "    return False\n",
        (RUNNING,),
    ),
    Fault(
        "the derivative at a running value is that in float32, which is kept",
        HELD,
        "    _, tangent = jax.jvp(written.again, primals, tangents)\n",
        "    _, tangent = jax.jvp(written.from_wide, primals, tangents)\n",
        (UNROLLED,),
    ),
    Fault(
        "a running value is rounded by each chain, in the forward pass too",
        HELD,
        "            return _from_running(self, *arrays)\n",
        "            return self.again(*arrays)\n",
        (UNROLLED,),
    ),
    Fault(
        "the larger one of a running value and any number counts as a relu",
        HELD,
        "any(is_number(x) and x.array == 0 for x in operands)",
        "any(is_number(x) for x in operands)",
        (RUNNING,),
    ),
    Fault(
        "the sign of what is computed from a running value is that of half",
        HELD,
        "        elif not (_is_relu(node) and place in given):\n",
        "        elif not _is_relu(node):\n",
        (RUNNING,),
    ),
    Fault(
        "a running value is kept in half for its square",
        HELD,
        "            if len(found) > 1 or (is_sum",
        "            if False or (is_sum",
        (RUNNING,),
    ),
    Fault(
        "a running value is kept in half for a norm of it",
        HELD,
        '            is_sum |= row.degree == "sum"\n',
        "            pass\n",
        (RUNNING,),
    ),
    Fault(
        "a running value in a denominator is kept in half",
        HELD,
        '        elif name == "div" and given[1] in sums:\n',
        '        elif name == "div" and False:\n',
        (RUNNING,),
    ),
    Fault(
        "cotangents of what is the same in each iteration are summed in half",
        HELD,
        "        made._wide, made._is_fixed = wide, self.is_half\n",
        "        made._wide, made._is_fixed = wide, False\n",
        (FIXED,),
    ),
    Fault(
        "a chain has the scopes of its last operation",
        HELD,
        "                names,\n",
        "                inside[-1],\n",
        (f"{PROGRAMS}::test_chains_that_look_alike_have_names_and_lines_of_their_own",),
    ),
    Fault(
        "a linear chain, and the rounding at its end, has no line",
        HELD,
        "        with traced_as(self.equation, outside):\n",
        "        if True:\n",
        (EVERY,),
    ),
    Fault(
        "each chain is traced anew",
        HELD,
        "            return call_shared(Written(steps, forms, rounds), arrays)\n",
        "            return Written(steps, forms, rounds)(*arrays)\n",
        (COSTS,),
    ),
    Fault(
        "a mask in a chain becomes inf where a product takes it",
        HELD,
        "                self._half = self._clamped(dtype)._compute(Cast(dtype))\n",
        "                self._half = self._compute(Cast(dtype))\n",
        (CLAMPED,),
    ),
    Fault(
        "a number that is computed with is clamped",
        HELD,
        "        if not primitive_of(self.equation).moves:\n            return self\n",
        "",
        (f"{SEMANTICS}::test_a_constant_is_the_constant",),
    ),
    Fault(
        "an infinite mask in a chain becomes finite",
        HELD,
        "    if not np.isfinite(value) or abs(",
        "    if abs(",
        (CLAMPED,),
    ),
    # Operations that are traced once.
    Fault(
        "a mask beyond the range becomes inf",
        SHARED,
        "        largest = np.float32(jnp.finfo(self.dtype).max)\n",
        "        largest = np.float32(np.inf)\n",
        (MASKS,),
    ),
    Fault(
        "an infinite mask becomes finite",
        SHARED,
        "        return np.where(np.isfinite(value), clipped, value).astype(",
        "        return clipped.astype(",
        (INFINITE,),
    ),
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
        "the result of a product is float32",
        REWRITE,
        '                params["preferred_element_type"] = half\n',
        '                params["preferred_element_type"] = jnp.float32\n',
        (f"{SEMANTICS}::test_a_product_is_half_operands_and_result",),
    ),
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
        "the cast of a shared weight is made once, so its gradients are summed in half",
        REWRITE,
        "                array, cast = held.array, Cast(self.choice.dtype)\n",
        "                if not hasattr(held, 'once'):\n"
        "                    held.once = held.half(self.choice.dtype)\n"
        "                array = held.once\n",
        (f"{SEMANTICS}::test_the_gradient_of_a_shared_weight_is_summed_in_float32",),
    ),
    Fault(
        "inner products are cast",
        KEEP,
        "        if is_inner(equation):\n",
        "        if False:\n",
        (SEMANTICS,),
    ),
    Fault(
        "an inner product keeps its operands in float32",
        REWRITE,
        '        if why_wide == "inner product":\n',
        "        if ():\n",
        (KEPT,),
    ),
    Fault(
        "outer products are cast",
        KEEP,
        "        return OUTER if is_outer(equation) else None\n",
        "        return None\n",
        (f"{SEMANTICS}::test_angles_of_a_rotary_embedding_are_float32",),
    ),
    Fault(
        "an outer product keeps its operands and its result in float32",
        REWRITE,
        "        if why_wide == OUTER:\n",
        "        if ():\n",
        (KEPT,),
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
        "a move rounds, although an elementwise operation reads the result",
        REWRITE,
        "        is_half |= all(rounds) and any(map(_is_cast, data))\n",
        "        is_half |= any(map(_is_cast, data))\n",
        (MOVED,),
    ),
    Fault(
        "a move of several arrays rounds, although operations read the results",
        REWRITE,
        "or (fits and _is_cast(x)))\n",
        "or _is_cast(x))\n",
        (MOVED,),
    ),
    Fault(
        "a move that keep finds rounds",
        REWRITE,
        "        if row.cast in MOVES and not self.choice.is_kept(site):\n",
        "        if row.cast in MOVES:\n",
        (MOVED,),
    ),
    Fault(
        "a number is rounded where it is moved beside what is half",
        REWRITE,
        "    return bool(rounded == number or number != number)\n",
        "    return bool(rounded is not number)\n",
        (NUMBER,),
    ),
    Fault(
        "what is moved of a running value is kept in float32",
        REWRITE,
        "            isinstance(x, Stored) and x.is_running for x in data\n",
        "            isinstance(x, Stored) and x is None for x in data\n",
        (f"{BORDERS}::test_what_is_moved_of_a_running_value_is_kept_in_half",),
    ),
    Fault(
        "the maximum of what is half is float32",
        REWRITE,
        '        if row.degree == "same" and all(',
        "        if () and all(",
        (f"{SEMANTICS}::test_what_is_moved_of_a_product_is_half",),
    ),
    Fault(
        "the maximum of a chain keeps it in float32",
        REWRITE,
        "        if any(map(_is_cast, operands)):\n            results = [Chain(",
        "        if ():\n            results = [Chain(",
        (KEPT,),
    ),
    Fault(
        "a chain has no end",
        REWRITE,
        "        if len(chains[0].nodes()) > MOST:\n",
        "        if ():\n",
        (f"{SEMANTICS}::test_a_chain_has_so_many_operations_at_most",),
    ),
    Fault(
        "what is computed from sums is computed again in each chain",
        REWRITE,
        "        is_arithmetic = is_float and not is_small\n",
        "        is_arithmetic = is_float\n",
        (f"{BORDERS}::test_what_is_computed_from_a_mean_is_computed_once",),
    ),
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
        "the derivative of a label's logit is scattered into zeros",
        REWRITE,
        "        if self._is_pick(site):\n            results = bind_pick(",
        "        if ():\n            results = bind_pick(",
        (LOSS,),
    ),
    Fault(
        "a label that is kept is not computed as written",
        REWRITE,
        "        return is_pick(site.equation) and not self.choice.is_kept(site)\n",
        "        return is_pick(site.equation)\n",
        (f"{LOSS}::test_a_pick_in_a_vmap_and_one_that_is_kept",),
    ),
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
        "the results of a call are half though they are read as they are",
        REWRITE,
        "        rounds = [self._readers.round_result(site, x) for x in atoms]\n",
        "        rounds = [True for x in atoms]\n",
        (OTHERS_READ,),
    ),
    Fault(
        "what a call is given is float32 though products alone read it",
        REWRITE,
        "rounds = is_float32(atom) and self._readers.round_input(here, atom)\n",
        "rounds = False\n",
        (f"{BORDERS}::test_what_a_call_is_given_is_half_if_products_alone_read_it",),
    ),
    Fault(
        "what a call is given is half",
        REWRITE,
        "rounds = is_float32(atom) and self._readers.round_input(here, atom)\n",
        "rounds = is_float32(atom)\n",
        (f"{BORDERS}::test_what_a_call_is_given_is_half_if_products_alone_read_it",),
    ),
    Fault(
        "branches are given half if one of them alone rounds it",
        REWRITE,
        "        for call in calls:\n            here, fixed",
        "        for call in calls[:1]:\n            here, fixed",
        (f"{BORDERS}::test_what_a_call_is_given_is_half_if_products_alone_read_it",),
    ),
    Fault(
        "a carry is half if products alone read what the loop gives",
        REWRITE,
        "            rounds[: call.carried] = self._readers.round_carried(site)\n",
        "            pass\n",
        (CARRIED,),
    ),
    Fault(
        "what a kept loop carries is stored in half",
        REWRITE,
        "            if self.choice.is_kept(site):\n                alone[",
        "            if ():\n                alone[",
        (KEPT_LOOP,),
    ),
    Fault(
        "what a scan carries is kept in float32",
        REWRITE,
        "is_running=is_float32(array) and not is_half)\n",
        "is_running=False)\n",
        (f"{BORDERS}::test_what_a_scan_carries_is_kept_in_half",),
    ),
    Fault(
        "the constants of a scan are cast in each iteration",
        REWRITE,
        "= [x.fixed(y) for x, y in zip(fixed, wide, strict=True)]\n",
        "= _anew(fixed)\n",
        (FIXED,),
    ),
    Fault(
        "what is cast to float32 in a loop is used outside of it",
        REWRITE,
        "            held = _like(call.inputs(inputs), arrays)\n",
        "            held = _like(call.inputs(inputs), arrays)\n"
        "            held[: call.consts] = call.inputs(inputs)[: call.consts]\n",
        (f"{LOSS}::test_what_is_cast_in_a_while_loop_is_cast_anew_behind_it",),
    ),
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
        "a nested jit loses what it was given",
        REWRITE,
        "is_kept = is_jit and function_of_jax(equation) is None",
        "is_kept = False",
        (f"{SEMANTICS}::test_a_nested_jit_stays_one_with_what_it_donates",),
    ),
    Fault(
        "a checkpoint is left out",
        REWRITE,
        '        if not is_kept and rule != "remat":\n',
        "        if not is_kept:\n",
        (
            f"{SEMANTICS}::"
            "test_a_checkpoint_keeps_its_policy_and_prevents_what_it_prevented",
        ),
    ),
    Fault(
        "calls of one program share a body, whatever becomes of what is inside",
        REWRITE,
        "            key = operation_of(equation), steps, tuple(halves)\n",
        "            key = operation_of(equation), tuple(halves)\n",
        (f"{BORDERS}::test_calls_share_no_body_with_one_that_is_kept",),
    ),
    Fault(
        "calls of one program share a body, whatever becomes of what they give",
        REWRITE,
        "            key = operation_of(equation), steps, tuple(halves)\n",
        "            key = operation_of(equation), steps\n",
        (f"{BORDERS}::test_calls_share_no_body_where_others_read_what_they_hand_on",),
    ),
    Fault(
        "calls share a body with those of other dtypes",
        REWRITE,
        "            key += tuple((x.is_half, x.is_running) for x in inputs)\n",
        "            key += tuple(x.is_running for x in inputs)\n",
        (f"{SEMANTICS}::test_calls_of_an_argument_and_of_half_share_no_body",),
    ),
    Fault(
        "calls of an argument and of a running value share a body",
        REWRITE,
        "            key += tuple((x.is_half, x.is_running) for x in inputs)\n",
        "            key += tuple(x.is_half for x in inputs)\n",
        (GIVEN,),
    ),
    Fault(
        "layers that are alike are rewritten one by one",
        REWRITE,
        "self._bodies.setdefault(key, jitted_inline(made))",
        "jitted_inline(made)",
        (f"{SEMANTICS}::test_calls_that_become_the_same_share_a_body_and_no_others",),
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
        "a function with a derivative of its own is elementwise whatever it does",
        REWRITE,
        "    return program is not None and _is_chain(program)\n",
        "    return program is not None\n",
        (RULE,),
    ),
    Fault(
        "the rule of a custom_jvp keeps its operand in float32",
        REWRITE,
        "stored if chain is None or stored.is_half else chain.on(arrays)\n",
        "stored\n",
        (f"{BORDERS}::test_a_rule_of_custom_jvp_computes_again_what_it_is_given",),
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
        "the cast of a value that enters a loop has no line",
        REWRITE,
        "            with traced_as(self._at(site)):\n                carry = ",
        "            if True:\n                carry = ",
        (ENTERS,),
    ),
    Fault(
        "the cast of an operand to float32 has no line",
        REWRITE,
        "    with traced_as(equation):\n        return held.wide()\n",
        "    return held.wide()\n",
        (EVERY,),
    ),
    Fault(
        "what is inside of a function of JAX has no line",
        REWRITE,
        "            caller = equation if is_jit else None\n",
        "            caller = None\n",
        (LINES,),
    ),
    Fault(
        "what is inside of a function of JAX has no scope",
        "jls/_program/jaxprs.py",
        "names[:0] if is_rule else names + name_stack(equation),\n",
        "names[:0] if is_rule else name_stack(equation),\n",
        (LINES,),
    ),
    Fault(
        "what a rule computes is run as what stands beside its call",
        REWRITE,
        "            found = inner.run(made, held, site, equation, is_rule=True)\n",
        "            found = inner.run(made, held, site)\n",
        (SCOPES,),
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
        "an empty keep keeps everything",
        "jls/_autocast/autocast.py",
        "    if not keep:\n",
        "    if ():\n",
        (f"{CALLS}::test_a_bad_keep_is_an_error_at_once",),
    ),
    Fault(
        "a keep that finds nothing is silent",
        "jls/_autocast/autocast.py",
        "        choice.check_found()\n",
        "",
        (f"{CALLS}::test_a_keep_that_finds_nothing_lists_the_scopes_that_are_there",),
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
        '        more["value_fn"] = cast(more["value_fn"])\n',
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
        "an integer part of a running value is that of half",
        HELD,
        "        if not is_float32(node.atom):  # rounding may change an integer\n",
        "        if False:\n",
        (
            f"{SEMANTICS}::"
            "test_an_integer_part_of_a_running_value_is_the_same_in_the_derivative",
        ),
    ),
    Fault(
        "operations of a rule are kept if those of the function are",
        REWRITE,
        "Rewrite(self.choice.anew(), ",
        "Rewrite(self.choice, ",
        (f"{SEMANTICS}::test_keep_finds_operations_of_a_rule_by_their_own_scopes",),
    ),
    Fault(
        "what a long chain begins with is kept in float32",
        REWRITE,
        "            chains = made([self._in_memory_wide(x) for x in operands])\n",
        "            chains = made([self._in_memory(x, False) for x in operands])\n",
        (f"{SEMANTICS}::test_what_a_long_chain_begins_with_is_kept_in_half",),
    ),
    Fault(
        "a relu keeps what it takes beside what it gives",
        "jls/_autocast/halves.py",
        "        if before in self.running:\n",
        "        if False:\n",
        (f"{SEMANTICS}::test_of_a_residual_stream_through_a_relu_one_array_is_kept",),
    ),
    Fault(
        "a relu passes all cotangents on",
        HELD,
        "lax.select(half > 0, tangent",
        "lax.select(half >= 0, tangent",
        (f"{SEMANTICS}::test_of_a_residual_stream_through_a_relu_one_array_is_kept",),
    ),
    Fault(
        "any custom rule of a relu is taken for that of JAX",
        "jls/_program/places.py",
        "    functions = [function_of_jax(x) for x in inner]\n",
        '    functions = [("", "relu")]\n',
        (f"{SEMANTICS}::test_a_relu_with_a_derivative_of_its_own_keeps_it",),
    ),
    Fault(
        "a custom_jvp has a result",
        REWRITE,
        "or len(equation.outvars) != 1:\n",
        "or len(equation.outvars) > 1:\n",
        (f"{SEMANTICS}::test_a_custom_jvp_may_have_no_results",),
    ),
]
