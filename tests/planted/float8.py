"""Products in float8."""

from planted.fault import Fault

FLOAT8 = "jls/_autocast/float8.py"
REWRITE = "jls/_autocast/rewrite.py"
KEEP = "jls/_autocast/keep.py"
TESTS = "tests/autocast/test_float8.py::"
ROUNDS = f"{TESTS}test_operand_is_rounded_by_the_rule"
PRODUCT = f"{TESTS}test_product_and_derivative_are_those_of_rounded_operands"

FAULTS = [
    Fault(
        "the largest number overflows in float8",
        FLOAT8,
        "above = (_bits(largest) + 0x1FFFFF) >> 23",
        "above = _bits(largest) >> 23",
        (ROUNDS,),
    ),
    Fault(
        "half of the range of float8 is not used",
        FLOAT8,
        "above = (_bits(largest) + 0x1FFFFF) >> 23",
        "above = (_bits(largest) + 0x7FFFFF) >> 23",
        (ROUNDS,),
    ),
    Fault(
        "an operand of almost 0 is multiplied by what float32 does not have",
        FLOAT8,
        "jnp.minimum(_EXPONENTS[dtype] + 127 - above, _MOST_EXPONENT)",
        "_EXPONENTS[dtype] + 127 - above",
        (f"{TESTS}test_zeros_and_the_smallest_numbers_are_rounded",),
    ),
    Fault(
        "an inf is the largest number of float8",
        FLOAT8,
        "is_finite = largest < jnp.inf",
        "is_finite = largest <= jnp.inf",
        (f"{TESTS}test_what_is_not_finite_is_nan",),
    ),
    Fault(
        "the division by two powers goes out of range",
        FLOAT8,
        "low, high = jnp.minimum(one, other), jnp.maximum(one, other)",
        "low, high = jnp.maximum(one, other), jnp.minimum(one, other)",
        (f"{TESTS}test_product_of_one_huge_and_one_tiny_operand_is_in_range",),
    ),
    Fault(
        "a policy of jax.checkpoint makes NaN of an operand",
        FLOAT8,
        "_EXPONENTS = {E4M3: 7,",
        "_EXPONENTS = {E4M3: 8,",
        (f"{TESTS}test_remat_with_any_policy_gives_the_same",),
    ),
    Fault(
        "a second derivative is wrong, in silence",
        FLOAT8,
        "if not isinstance(cotangent, SymbolicZero):",
        "if ():",
        (f"{TESTS}test_second_derivative_is_refused",),
    ),
    Fault(
        "a cotangent is rounded to e4m3fn",
        FLOAT8,
        "given = quantized(cotangent, E5M2)",
        "given = quantized(cotangent, E4M3)",
        (PRODUCT,),
    ),
    Fault(
        "the derivatives of the two operands are the wrong way round",
        FLOAT8,
        "other = kept[1 - place]",
        "other = kept[place]",
        (f"{TESTS}test_training_goes_as_in_bfloat16",),
    ),
    Fault(
        "a derivative is not divided by the power of the other operand",
        FLOAT8,
        "return _divided(result, given.power, other.power)",
        "return _divided(result, given.power, given.power)",
        (PRODUCT,),
    ),
    Fault(
        "small products take float8",
        FLOAT8,
        "n >= LEAST and n % _MULTIPLE == 0",
        "n % _MULTIPLE == 0",
        (f"{TESTS}test_large_products_take_float8",),
    ),
    Fault(
        "sizes that are no multiple of 16 take float8",
        FLOAT8,
        "n >= LEAST and n % _MULTIPLE == 0",
        "n >= LEAST",
        (f"{TESTS}test_large_products_take_float8",),
    ),
    Fault(
        "products with batch dimensions take float8",
        FLOAT8,
        "return numbers is not None and not numbers[1][0]",
        "return numbers is not None",
        (f"{TESTS}test_large_products_take_float8",),
    ),
    Fault(
        "products in a rule take float8",
        KEEP,
        "            and not _is_in_rule(site)\n        )",
        "        )",
        (f"{TESTS}test_products_with_a_derivative_of_their_own_stay_bfloat16",),
    ),
    Fault(
        "a loss scale leaks through the powers",
        "jls/_tools/reading/flow.py",
        "degree=ZERO if is_flag or FLOAT8 in marks else degree_of_integers(op),",
        "degree=ZERO if is_flag else degree_of_integers(op),",
        (f"{TESTS}test_tools_read_float8",),
    ),
    Fault(
        "float8 counts as what needs a loss scale",
        "jls/_tools/reading/flow.py",
        "if is_narrow_atom(op.aval) and FLOAT8 not in marks:",
        "if is_narrow_atom(op.aval):",
        (f"{TESTS}test_tools_read_float8",),
    ),
    Fault(
        "an inf in an operand is said to be born in float8",
        "jls/_tools/origin/trail.py",
        "if is_born and not (causes and FLOAT8 in marks_of(origin.site)):",
        "if is_born:",
        (f"{TESTS}test_an_inf_is_followed_to_where_it_came_in",),
    ),
    Fault(
        "products that nothing needs are counted",
        "jls/_program/products.py",
        "for index in live(jaxpr, jaxpr.outvars, keep=acts):",
        "for index in range(len(jaxpr.eqns)):",
        (f"{TESTS}test_tools_read_float8",),
    ),
    Fault(
        "a product that became wider counts as float8",
        "jls/_tools/check/float8.py",
        "(right if is_float8 else others).append(",
        "right.append(",
        ("tests/check/test_float8_runs.py",),
    ),
]
