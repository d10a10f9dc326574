# SPDX-License-Identifier: Apache-2.0
"""What a cast to half precision must know of JAX's primitives.

One that is in no set runs as written, in float32, and what it returns stays float32.
"""

from jls._program.rules import MOVES as _MOVES
from jls._program.rules import RANDOM

# Computed in half, element by element.
_IN_HALF = frozenset(
    """
    abs acosh add add_any asinh atan atan2 atanh cbrt ceil clamp cos div erf erfc floor
    logistic max min mul neg rem round select_n sign sin sqrt sub tanh
    """.split()  # noqa: SIM905
)
# Computed in float32 and stored in half: float16 overflows on the way.
INSIDE = frozenset({"integer_pow", "square"})
# Of float16 the results are float32: they leave its range, or their derivatives do.
LEAVES_FLOAT16 = frozenset(
    """
    acos asin cosh erf_inv exp exp2 expm1 log log1p pow rsqrt sinh tan
    """.split()  # noqa: SIM905
)
ELEMENTWISE = _IN_HALF | INSIDE | LEAVES_FLOAT16
# They return one of their operands, so a number that is beyond the range stays a mask.
CHOICES = frozenset({"clamp", "max", "min", "select_n"})

# They move numbers. All but the last give each operand back, moved.
PAIRWISE = frozenset({"optimization_barrier", "sort"})
WRITES = frozenset({"dynamic_update_slice", "scatter"})
MOVES = _MOVES - ELEMENTWISE - PAIRWISE - WRITES - RANDOM
# Moves that are free where they are fused with arithmetic.
SHAPES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})

# The largest or smallest of several numbers: exact in any dtype.
EXTREMES = frozenset(
    """
    cummax cummin pmax pmin reduce_max reduce_min reduce_window_max reduce_window_min
    """.split()  # noqa: SIM905
)
SUMS_OVER_DEVICES = frozenset(
    "pmean psum psum2 psum_invariant reduce_scatter".split()  # noqa: SIM905
)
# Programs that JAX does not see into. What they return is as good as an argument.
FOREIGN = frozenset(
    """
    custom_vjp_call custom_vjp_call_jaxpr ffi_call pallas_call run_state xla_pmap
    """.split()  # noqa: SIM905
)
OPAQUE = FOREIGN - {"custom_vjp_call", "custom_vjp_call_jaxpr"}

# Nothing of their operands is kept for the derivative.
LINEAR = SHAPES | frozenset(
    "add add_any convert_element_type neg select_n sub".split()  # noqa: SIM905
)
