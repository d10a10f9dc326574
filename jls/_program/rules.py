# SPDX-License-Identifier: Apache-2.0
"""Properties of JAX's primitives that several analyses need.

A primitive that is in no set is unknown: no analysis may assume anything about it.
"""


def _primitives(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Every element of the result is an element of an operand, with the same number: nothing
# is computed. The data of `gather`, `dynamic_slice` and the like come first; where more
# than one operand holds data, `_DATA` says which.
MOVES = _primitives(
    """
    all_gather all_gather_invariant all_to_all broadcast_in_dim concatenate copy copy_p
    device_put dynamic_slice dynamic_update_slice expand_dims gather layout_constraint
    name optimization_barrier pad pbroadcast pcast ppermute pvary random_clone reshape
    reshard rev scatter select_n sharding_constraint slice sort split squeeze stack
    stop_gradient tile transpose unstack
    """
)
# Of these, they give each operand back as it is.
UNCHANGED = _primitives(
    """
    copy copy_p device_put layout_constraint name optimization_barrier pbroadcast pcast
    pvary random_clone reshape reshard sharding_constraint squeeze stop_gradient
    expand_dims
    """
)
# Linear in the one operand that they have, beside moves.
LINEAR = _primitives(
    """
    convert_element_type cumsum fft imag neg pmean psum psum2 psum_invariant real conj
    reduce_precision reduce_scatter reduce_sum reduce_window_sum
    """
)
# A factor that all elements of the operand have is a factor of the result.
HOMOGENEOUS = LINEAR | _primitives(
    """
    abs cummax cummin pmax pmin reduce_max reduce_min reduce_window_max
    reduce_window_min top_k
    """
)
PRODUCTS = _primitives(
    """
    conv_general_dilated dot_general mul ragged_dot ragged_dot_general scatter-mul
    scatter_mul
    """
)
# Sums of operands, and choices between them: one factor of all is one of the result.
SUMS = _primitives("add add_any scatter-add scatter-sub scatter_add scatter_sub sub")
CHOICES = _primitives(
    """
    clamp complex max min nextafter scatter-max scatter-min scatter_max scatter_min
    select_and_gather_add select_and_scatter_add
    """
)
# A factor of the operand cannot be divided out of the result.
BOUNDED = _primitives("cos erf erfc logistic sin tanh")
# An element of the result is computed from the elements in its place.
ELEMENTWISE = (
    SUMS
    | CHOICES
    | BOUNDED
    | _primitives(
        """
        abs acos acosh asin asinh atan atan2 atanh cbrt ceil conj convert_element_type
        cosh div erf_inv exp exp2 expm1 floor imag integer_pow log log1p mul neg pmean
        pow psum psum2 psum_invariant real reduce_precision reduce_scatter rem round
        rsqrt sign sinh sqrt square tan
        """
    )
)
POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
RANDOM = _primitives(
    """
    random_bits random_gamma rng_bit_generator rng_uniform threefry2x32
    """
)

_DATA = {
    "dynamic_slice": 1,
    "gather": 1,
    "dynamic_update_slice": 2,
    "select_and_scatter_add": 1,
    "select_and_gather_add": 1,
}


def data_of(name: str, operands: list) -> list:
    """The operands whose elements the result holds: not indices, not a predicate."""
    if name == "select_n":
        return operands[1:]
    if name.startswith("scatter"):
        return [operands[0], operands[2]]
    return operands[: _DATA.get(name, len(operands))]
