"""What casts the products of a program to half."""

from planted.fault import Fault

TOOLS = "tests/autocast/test_tools.py"
SEMANTICS = "tests/autocast/test_semantics.py"
PROGRAMS = "tests/autocast/test_any_program.py"
CALLS = "tests/autocast/test_autocast.py"
COSTS = "tests/costs/test_tracing_autocast.py"
STEP = "tests/train/test_compute_dtype.py"
KINDS = "jls/_autocast/kinds.py"
REWRITE = "jls/_autocast/rewrite.py"
HELD = "jls/_autocast/held.py"
SHARED = "jls/_autocast/shared.py"

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
        "        return jax.checkpoint(self._run, prevent_cse=False)(*arrays)\n",
        "        return self._run(*arrays)\n",
        (SEMANTICS,),
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
        "        jitted = _jitted(fun, jax.sharding.get_abstract_mesh())\n",
        "        jitted = _jitted(fun, None)\n",
        (CALLS,),
    ),
    Fault(
        "each chain is traced anew",
        HELD,
        "            return call_shared(written, [x.array for x in leaves.values()])\n",
        "            return written(*(x.array for x in leaves.values()))\n",
        (COSTS,),
    ),
    Fault(
        "operations on two numbers share a trace",
        SHARED,
        "        self._bits = type(value), array.dtype, array.tobytes()\n",
        "        self._bits = type(value), array.dtype\n",
        (SEMANTICS,),
    ),
    Fault(
        "calls of one program share a body, whatever becomes of it",
        REWRITE,
        "            key = operation_of(equation), steps\n",
        "            key = (operation_of(equation),)\n",
        (SEMANTICS,),
    ),
    Fault(
        "calls share a body with operands of other dtypes",
        REWRITE,
        "for x in (*inputs, *facts))\n",
        "for x in facts)\n",
        (SEMANTICS,),
    ),
    Fault(
        "layers that are alike are rewritten one by one",
        REWRITE,
        "            if key not in self._bodies:\n",
        "            if True:\n",
        (SEMANTICS,),
    ),
    Fault(
        "a chain has the scopes of its last operation",
        HELD,
        "                names,\n",
        "                inside[-1],\n",
        (PROGRAMS,),
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
        SHARED,
        "        largest = np.float32(jnp.finfo(self.dtype).max)\n",
        "        largest = np.float32(np.inf)\n",
        (SEMANTICS,),
    ),
    Fault(
        "the softmax of a mask is clamped, and kept in float32 until it is",
        KINDS,
        '        stays = is_beyond and row.infs != "exp" and row.degree != "bounded"\n',
        "        stays = is_beyond\n",
        (SEMANTICS,),
    ),
    Fault(
        "twice a mask is not clamped",
        KINDS,
        '        stays = is_beyond and row.infs != "exp" and row.degree != "bounded"\n',
        "        stays = False\n",
        (SEMANTICS,),
    ),
    Fault(
        "an infinite mask becomes finite",
        SHARED,
        "    return lax.select(lax.is_finite(value), clamped, value)\n",
        "    return clamped\n",
        (SEMANTICS,),
    ),
    Fault(
        "the loss is half",
        KINDS,
        "if not leads or self._leaves_range(equation, row, atoms, facts):",
        "if self._leaves_range(equation, row, atoms, facts):",
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
        REWRITE,
        "                arrays.append(held.array)\n"
        "                casts.append(held.cast(dtype) if dtype else TO_FLOAT32)\n",
        "                if not hasattr(held, 'once'):\n"
        "                    held.once = held.half(dtype) if dtype else held.wide()\n"
        "                arrays.append(held.once)\n"
        "                casts.append(None)\n",
        (SEMANTICS,),
    ),
    Fault(
        "a reciprocal root is half in float16",
        "jls/_program/primitives.py",
        'like="root", cast="leaves"),',
        'like="root", cast="half"),',
        (SEMANTICS,),
    ),
    Fault(
        "the condition of a loop is read like a call",
        "jls/_autocast/leads.py",
        '            if call.kind == "condition":\n',
        "            if False:\n",
        (SEMANTICS, PROGRAMS),
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
        "all arguments of a custom_vjp are differentiated",
        REWRITE,
        "                if x.perturbed and is_inexact_atom(equation.invars[i])\n",
        "                if is_inexact_atom(equation.invars[i])\n",
        (SEMANTICS,),
    ),
    Fault(
        "a cotangent of 0 reaches the rule of a custom_vjp as a symbol",
        REWRITE,
        "                _instantiated(x) if is_inexact_atom(atom) else None\n",
        "                x if is_inexact_atom(atom) else None\n",
        (SEMANTICS,),
    ),
    Fault(
        "the cast of a value that enters a loop has no line",
        REWRITE,
        "        with traced_as(site.equation):\n"
        "            carry, stacks = lax.scan(\n"
        "                body,\n"
        "                self._as(entering, facts[:carried], atoms[:carried]),\n",
        "        begin = self._as(entering, facts[:carried], atoms[:carried])\n"
        "        with traced_as(site.equation):\n"
        "            carry, stacks = lax.scan(\n"
        "                body,\n"
        "                begin,\n",
        (TOOLS,),
    ),
    Fault(
        "what a kept loop carries is stored in half",
        KINDS,
        "        leads = [self._leads.at(site, x) and not is_kept for x in inputs]\n",
        "        leads = [self._leads.at(site, x) for x in inputs]\n",
        (SEMANTICS, TOOLS),
    ),
    Fault(
        "what a kept loop carries is rounded before it enters, and in each iteration",
        "jls/_autocast/leads.py",
        "        if self._choice.is_kept(site):\n            inputs",
        "        if False:\n            inputs",
        (SEMANTICS,),
    ),
    Fault(
        "calibrate takes every loop for one that is kept",
        "jls/_tools/origin/kept.py",
        " and not calls_of(site.equation)\n",
        "\n",
        ("tests/origin/test_keep.py",),
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
        SHARED,
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
        'if name == "custom_jvp_call":',
        "if False:",
        (SEMANTICS,),
    ),
    Fault(
        "a nested jit loses what it was given",
        REWRITE,
        'is_kept = name == "jit" and function_of_jax(equation) is None',
        "is_kept = False",
        (SEMANTICS,),
    ),
    Fault(
        "the branches of a cond need not agree",
        KINDS,
        "        kind = max(fact.kind for fact in results)\n",
        "        kind = min(fact.kind for fact in results)\n",
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
        "    names = source_info_util.current_name_stack() + names\n",
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
    Fault(
        "a lane of a batched loop goes on after its end",
        REWRITE,
        "            return select_lanes(is_on(carry), results, carry) if lanes else "
        "results\n",
        "            return results\n",
        (SEMANTICS,),
    ),
    Fault(
        "a scatter that computes is taken for one that writes",
        "jls/_program/primitives.py",
        "    return update is not None and bool(update.eqns)\n",
        "    return False\n",
        (SEMANTICS,),
    ),
    Fault(
        "a scatter that writes is taken for one that computes",
        "jls/_program/primitives.py",
        "    return update is not None and bool(update.eqns)\n",
        "    return update is None or bool(update.eqns)\n",
        ("tests/program/test_primitives.py",),
    ),
    Fault(
        "the condition of a loop has the place of its body",
        "jls/_program/control.py",
        "            return site.beside(_CONDITION)\n",
        "            return site\n",
        (SEMANTICS,),
    ),
    Fault(
        "a function that keeps nothing is silent",
        "jls/_autocast/keep.py",
        "        self._has_found = keep is None\n",
        "        self._has_found = keep is None or callable(keep)\n",
        (CALLS,),
    ),
    Fault(
        "reading an array at the host gets no note",
        "jls/_autocast/autocast.py",
        "    jax.errors.TracerArrayConversionError,\n",
        "",
        (CALLS,),
    ),
    Fault(
        "the result of a product is float32",
        REWRITE,
        '                params["preferred_element_type"] = self.choice.dtype\n',
        '                params["preferred_element_type"] = jnp.float32\n',
        (SEMANTICS,),
    ),
    Fault(
        "products of other dtypes are cast",
        "jls/_autocast/keep.py",
        "    return is_wide and dtypes <= {jnp.dtype(jnp.float32), half}\n",
        "    return is_wide or dtypes <= {jnp.dtype(jnp.float32), half}\n",
        (SEMANTICS,),
    ),
    Fault(
        "a sum over devices is half",
        "jls/_program/primitives.py",
        '        can_overflow=True,\n        cast="devices",\n',
        '        can_overflow=True,\n        cast="half",\n',
        (SEMANTICS,),
    ),
]
