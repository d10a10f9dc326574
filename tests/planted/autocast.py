"""What casts the products of a program to half."""

from planted.fault import Fault

SEMANTICS = "tests/autocast/test_semantics.py"
PROGRAMS = "tests/autocast/test_any_program.py"
CALLS = "tests/autocast/test_autocast.py"
STEP = "tests/train/test_compute_dtype.py"
KINDS = "jls/_autocast/kinds.py"
REWRITE = "jls/_autocast/rewrite.py"
HELD = "jls/_autocast/held.py"

FAULTS = [
    Fault(
        "a chain with a mean in it is rounded at each step",
        KINDS,
        "return (Way.INSIDE if has_small_sum or is_inside else Way.HALF), made",
        "return Way.HALF, made",
        (SEMANTICS,),
    ),
    Fault(
        "a chain keeps its arrays of float32 for the derivative",
        HELD,
        "            run = jax.checkpoint(run, prevent_cse=False)\n",
        "            pass\n",
        (SEMANTICS,),
    ),
    Fault(
        "a chain has no end",
        HELD,
        "MOST = 8 ",
        "MOST = 800 ",
        (SEMANTICS,),
    ),
    Fault(
        "what begins as zeros is carried in half: an accumulator",
        KINDS,
        "kind = Kind.CACHE if after.kind == Kind.CACHE else Kind.WIDE\n",
        "kind = after.kind\n",
        (SEMANTICS,),
    ),
    Fault(
        "a carry of a while loop is half",
        KINDS,
        "    return before if is_unchanged else Kind.WIDE\n",
        "    return before if is_unchanged else after.kind\n",
        (SEMANTICS,),
    ),
    Fault(
        "a cache is float32",
        KINDS,
        "        return Way.HALF, Fact(Kind.CACHE, 1.0, is_beyond)\n",
        "        return Way.HALF, Fact(Kind.HALF, 1.0, is_beyond)\n",
        (SEMANTICS,),
    ),
    Fault(
        "a constant that half rounds to 0 is lost",
        KINDS,
        "if any(is_literal(x) and self._vanishes(x.val) for x in atoms):",
        "if False:",
        (SEMANTICS,),
    ),
    Fault(
        "a mask beyond the range becomes inf",
        HELD,
        "    largest = np.float32(jnp.finfo(dtype).max)\n",
        "    largest = np.float32(np.inf)\n",
        (SEMANTICS,),
    ),
    Fault(
        "an infinite mask becomes finite",
        HELD,
        "    clamped = lax.select(lax.is_finite(value), clamped, value)\n",
        "",
        (SEMANTICS,),
    ),
    Fault(
        "the loss is half",
        KINDS,
        "if not leads or self._leaves_range(equation, name, atoms, facts):",
        "if self._leaves_range(equation, name, atoms, facts):",
        (SEMANTICS,),
    ),
    Fault(
        "any exp of float16 is half",
        KINDS,
        "            return not facts[0].is_at_most_0  # softmax\n",
        "            return False\n",
        (SEMANTICS,),
    ),
    Fault(
        "the exp of a softmax is float32",
        KINDS,
        "is_at_most_0=facts[0].name in facts[1].maxima_of",
        "is_at_most_0=False",
        (SEMANTICS,),
    ),
    Fault(
        "the cast of a shared weight is made once, so its gradients are summed in half",
        HELD,
        "        return rounded(self.array, dtype, self._is_beyond)\n",
        "        if not hasattr(self, 'cast'):\n"
        "            self.cast = rounded(self.array, dtype, self._is_beyond)\n"
        "        return self.cast\n",
        (SEMANTICS,),
    ),
    Fault(
        "smaller operands decide",
        KINDS,
        "fact.kind for fact, n in zip(facts, differing, strict=True) if n == largest",
        "fact.kind for fact, n in zip(facts, differing, strict=True) if n",
        (SEMANTICS,),
    ),
    Fault(
        "inner products are cast",
        "jls/_autocast/keep.py",
        "        if is_inner(equation):\n",
        "        if False:\n",
        (SEMANTICS,),
    ),
    Fault(
        "what a custom_vjp closes over is differentiated",
        REWRITE,
        '        fixed = parameter(equation, "num_consts", 0)\n',
        "        fixed = 0\n",
        (SEMANTICS,),
    ),
    Fault(
        "what a rule of custom_vjp closes over is not looked up",
        REWRITE,
        "                self._closed_over |= made\n",
        "                pass\n",
        (SEMANTICS,),
    ),
    Fault(
        "an array that a rule of custom_vjp closes over is lost in silence",
        REWRITE,
        "            raise ClosedOverError\n",
        "            pass\n",
        (SEMANTICS,),
    ),
    Fault(
        "a clamped number has another derivative than in float32",
        HELD,
        "    return _clamped(*primals, largest), *tangents\n",
        "    return _clamped(*primals, largest), 0 * tangents[0]\n",
        (SEMANTICS,),
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
        "a symbol in a shape has no size",
        "jls/_program/jaxprs.py",
        "    if not is_symbolic_dim(dimension):\n",
        "    if True:\n",
        (CALLS,),
    ),
    Fault(
        "outer products are cast",
        "jls/_autocast/keep.py",
        "        return OUTER if is_outer(equation) else None\n",
        "        return None\n",
        (SEMANTICS,),
    ),
    Fault(
        "outer products are never half",
        KINDS,
        "    if is_half and leads and not is_beyond:\n",
        "    if False:\n",
        (SEMANTICS,),
    ),
    Fault(
        "outer products do not lead to a product",
        "jls/_autocast/leads.py",
        "            leads = any(results) if why_wide == OUTER else why_wide is None\n",
        "            leads = why_wide is None\n",
        (SEMANTICS,),
    ),
    Fault(
        "a product that asks for a precision is cast",
        "jls/_program/products.py",
        "    return any(one not in (None, lax.Precision.DEFAULT) for one in asked)\n",
        "    return False and bool(asked)\n",
        (SEMANTICS,),
    ),
    Fault(
        "the caller's default precision is lost",
        REWRITE,
        '            params["precision"] = self._precision\n',
        '            params["precision"] = None\n',
        (SEMANTICS,),
    ),
    Fault(
        "the rule of a custom_jvp is left out",
        REWRITE,
        '        "custom_jvp_call": _custom_jvp,\n',
        "",
        (SEMANTICS,),
    ),
    Fault(
        "a nested jit loses what it was given",
        REWRITE,
        "        if program is None or function_of_jax(equation) is not None:\n",
        "        if True:\n",
        (SEMANTICS,),
    ),
    Fault(
        "the branches of a cond need not agree",
        KINDS,
        "            kind = max(fact.kind for fact in results)\n",
        "            kind = min(fact.kind for fact in results)\n",
        (SEMANTICS,),
    ),
    Fault(
        "keep does not reach the operations beside the products",
        KINDS,
        "        if self._choice.is_kept(site):\n",
        "        if False:\n",
        (SEMANTICS,),
    ),
    Fault(
        "a keep that finds nothing is silent",
        "jls/_autocast/autocast.py",
        "        rewrite.choice.check_found()\n",
        "",
        (CALLS,),
    ),
    Fault(
        "the update of a wrapper is cast with the loss",
        "jls/_autocast/autocast.py",
        "        _refuse_update(program)\n",
        "",
        (CALLS,),
    ),
    Fault(
        "what an NNX model changes stays in the copy",
        "jls/_autocast/autocast.py",
        "            update_all(objects, state)\n",
        "            del objects\n",
        (CALLS,),
    ),
    Fault(
        "lines and scopes of the program are lost",
        "jls/_program/jaxprs.py",
        "    names = source_info_util.current_name_stack() + info.name_stack\n",
        "    names = source_info_util.current_name_stack()\n",
        (PROGRAMS,),
    ),
    Fault(
        "a line search sees the float32 loss",
        "jls/_train/step.py",
        '        more["value_fn"] = cast(more["value_fn"])\n',
        "        pass\n",
        (STEP,),
    ),
    Fault(
        "float16 that nothing scales is silent",
        "jls/_train/step.py",
        "    if any(is_real(scale) and scale == 1 for scale in scales):\n",
        "    if any(is_real(scale) and scale == 0 for scale in scales):\n",
        (STEP,),
    ),
]
