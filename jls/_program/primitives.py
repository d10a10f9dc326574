# SPDX-License-Identifier: Apache-2.0
"""All that is known of JAX's primitives: one row each, or one for several alike.

A primitive without a row is unknown: nothing may be assumed about it. A new one is an
entry here, and `tests/program/test_primitives.py` says which are missing.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from jls._program.jaxprs import is_checkpoint_name, parameter


class Primitive(NamedTuple):
    """A row of the table: the facts of a primitive. The defaults assume nothing.

    In the degree of a result, a factor is one that all elements of an operand have:

        "linear"     a factor of the one operand is one of the result; and it is linear
        "same"       a factor of the one operand is one of the result
        "sum"        a factor that all operands share is one of the result
        "choice"     the same; each element of the result is one of theirs
        "product"    factors of the operands multiply
        "quotient"   that of the second divides that of the first
        "power"      a power that is a parameter or an operand
        a number     that power
        "order"      no positive factor changes the result
        "bounded"    a factor cannot be divided out of the result
    """

    # How it reacts to NaN: not at all if it takes the same time on any number, and
    # shows the result to nobody. A call does not if what it calls does not.
    is_blind: bool = False
    # An element of the result is computed from the elements in its place.
    is_elementwise: bool = False
    # The result has elements of the operands, and no others: "some" of them; "all" of
    # the one operand, in another order; or the "same" in their order.
    moves: Literal["", "some", "all", "same"] = ""
    # The operands whose elements the result has: not indices, not a predicate.
    data: slice = slice(None)
    # With as many operands as results each result is of one operand.
    is_pairwise: bool = False
    degree: str | float = ""
    # An inf in an operand is one in the result, or NaN. Moves and "linear" keep it too.
    keeps_inf: bool = False
    # Which infinities a result may have from those of its operands.
    infs: Literal["", "exp", "same", "sum", "difference", "product", "quotient"] = ""
    # It makes numbers beyond the largest from finite ones that are large enough.
    can_overflow: bool = False
    # The operand that decides: near some value of it the result is inf, or grows fast.
    singular: int | None = None
    # Its like, among operations with advice of their own.
    like: str = ""
    # For each of two operands the number with which the result is the other one.
    neutral: tuple[float | None, ...] = ()
    # For folding known numbers.
    fold: Callable[..., Any] | None = None
    # The result of elements that are all equal is one of them.
    is_extreme: bool = False
    is_random: bool = False
    # A matrix product or a convolution, which `jls.autocast` computes in half.
    is_product: bool = False
    # It costs little more than to read its operands, so a derivative may compute it
    # again rather than keep its result.
    is_cheap: bool = False
    # The programs that it runs; see `control`.
    control: Literal["", "call", "scan", "while", "cond", "devices"] = ""
    # The versions of JAX that have it, of those that are tested; "" if all do.
    since: str = ""
    until: str = ""

    @property
    def is_linear(self) -> bool:
        return self.degree == "linear"

    @property
    def is_homogeneous(self) -> bool:
        return self.degree in ("linear", "same")


UNKNOWN = Primitive()
_Rows = dict[str, Primitive]


def _rows(names: str, **columns: Any) -> _Rows:
    return dict.fromkeys(names.split(), Primitive(**columns))


def _blind(names: str, **columns: Any) -> _Rows:
    return _rows(names, is_blind=True, **columns)


def _elementwise(names: str, **columns: Any) -> _Rows:
    return _blind(names, is_elementwise=True, **columns)


_SUM = {"degree": "sum", "can_overflow": True}
_ADD = {**_SUM, "infs": "sum", "neutral": (-0.0, -0.0), "is_cheap": True}
_POWER = {"degree": "power", "can_overflow": True, "singular": 0, "like": "power"}
_SCATTER = {"data": slice(0, 3, 2), "is_elementwise": True}

TABLES: tuple[_Rows, ...] = (
    # Each operand as it is.
    _blind(
        """
        copy device_put layout_constraint name optimization_barrier pbroadcast pvary
        random_clone reshape reshard sharding_constraint squeeze stop_gradient
        xla_metadata_value
        """,
        moves="same",
        is_pairwise=True,
        is_cheap=True,
    ),
    _blind("relayout", moves="same", is_cheap=True, since="0.11"),
    # Elements of the operands.
    _blind("broadcast_in_dim rev transpose", moves="all", is_cheap=True),
    _blind("all_gather all_gather_invariant all_to_all ppermute", moves="some"),
    _blind("concatenate pad slice split", moves="some", is_cheap=True),
    _blind("stack tile unstack", moves="some", is_cheap=True, since="0.10"),
    _blind("dynamic_slice gather", moves="some", data=slice(1), is_cheap=True),
    _blind("dynamic_update_slice", moves="some", data=slice(2)),
    _blind("scatter", moves="some", data=slice(0, 3, 2)),
    _blind("select_n", moves="some", data=slice(1, None), is_cheap=True),
    _blind("sort", moves="some", is_pairwise=True),
    # Sums and differences.
    _elementwise("add", fold=np.add, **_ADD),
    _elementwise("add_any", **_ADD),
    _elementwise(
        "sub",
        infs="difference",
        neutral=(None, 0.0),
        like="sub",
        fold=np.subtract,
        is_cheap=True,
        **_SUM,
    ),
    _blind("scatter-add scatter-sub", **_SCATTER, **_SUM),
    _blind("cumsum reduce_sum", degree="linear", infs="same", can_overflow=True),
    _blind("fft reduce_window_sum", degree="linear", can_overflow=True),
    _elementwise(
        "psum psum_invariant",
        degree="linear",
        is_pairwise=True,
        can_overflow=True,
    ),
    _elementwise("reduce_scatter", degree="linear", can_overflow=True),
    # Products.
    _elementwise(
        "mul",
        degree="product",
        infs="product",
        can_overflow=True,
        like="mul",
        neutral=(1.0, 1.0),
        fold=np.multiply,
        is_cheap=True,
    ),
    _elementwise(
        "div",
        degree="quotient",
        infs="quotient",
        can_overflow=True,
        singular=1,
        like="div",
        neutral=(None, 1.0),
        is_cheap=True,
    ),
    _blind(
        "dot_general",
        degree="product",
        infs="product",
        can_overflow=True,
        is_product=True,
    ),
    _blind(
        "conv_general_dilated", degree="product", can_overflow=True, is_product=True
    ),
    _rows("ragged_dot_general", degree="product", can_overflow=True, is_product=True),
    _blind("scatter-mul", data=slice(0, 3, 2), degree="product", can_overflow=True),
    _blind("cumprod reduce_prod", can_overflow=True),
    # Powers.
    _elementwise(
        "square", degree=2.0, keeps_inf=True, can_overflow=True, is_cheap=True
    ),
    _elementwise(
        "sqrt", degree=0.5, keeps_inf=True, singular=0, like="root", is_cheap=True
    ),
    _elementwise("rsqrt", degree=-0.5, singular=0, like="root", is_cheap=True),
    _elementwise("cbrt", degree=1 / 3, is_cheap=True),
    _elementwise("integer_pow pow", is_cheap=True, **_POWER),
    _elementwise("one_minus_square", is_cheap=True, since="0.11"),
    _elementwise("polynomial", is_cheap=True, since="0.12"),
    # Numbers cast, signs changed, parts taken.
    _elementwise(
        "convert_element_type reduce_precision",
        degree="linear",
        infs="same",
        can_overflow=True,
        is_cheap=True,
    ),
    _elementwise(
        "neg", degree="linear", can_overflow=True, fold=np.negative, is_cheap=True
    ),
    _elementwise("conj imag real", degree="linear", is_cheap=True),
    _elementwise("abs", degree="same", keeps_inf=True, is_cheap=True),
    _elementwise("complex nextafter", degree="choice", is_cheap=True),
    _elementwise("ceil floor rem round", is_cheap=True),
    _blind("bitcast_convert_type", is_cheap=True),
    # One of several numbers.
    _elementwise("max", degree="choice", fold=np.maximum, is_cheap=True),
    _elementwise("min", degree="choice", fold=np.minimum, is_cheap=True),
    _elementwise(
        "clamp",
        degree="choice",
        fold=lambda low, x, high: np.minimum(np.maximum(x, low), high),
        is_cheap=True,
    ),
    _blind("scatter-max scatter-min", **_SCATTER, degree="choice"),
    _elementwise(
        "select_and_gather_add select_and_scatter_add", data=slice(1), degree="choice"
    ),
    _blind("pmax pmin", degree="same", is_pairwise=True, is_extreme=True),
    _blind("reduce_max reduce_min", degree="same", is_extreme=True),
    _blind(
        "cummax cummin reduce_window_max reduce_window_min",
        degree="same",
    ),
    _blind("top_k", degree="same"),
    # Functions of one number, or of two.
    _elementwise("cos erf erfc logistic sin tanh", degree="bounded", is_cheap=True),
    _elementwise("exp exp2", infs="exp", singular=0, like="exp", is_cheap=True),
    _elementwise("expm1", singular=0, like="exp", is_cheap=True),
    _elementwise("log", singular=0, like="log", is_cheap=True),
    _elementwise("log1p", singular=0, like="log1p", is_cheap=True),
    _elementwise("log2", singular=0, like="log", is_cheap=True, since="0.11"),
    _elementwise("acosh atanh", singular=0, like="arc", is_cheap=True),
    _elementwise("acos asin erf_inv", singular=0, like="arc", is_cheap=True),
    _elementwise("cosh sinh", singular=0, is_cheap=True),
    _elementwise("asinh atan atan2 digamma lgamma tan", is_cheap=True),
    _rows(
        """
        bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma
        regularized_incomplete_beta zeta
        """,
        is_elementwise=True,
        is_cheap=True,
    ),
    _blind("cumlogsumexp"),
    # Signs, order, comparisons, integers.
    _elementwise("sign", degree="order", is_cheap=True),
    _blind("argmax argmin", degree="order"),
    _blind("is_finite", fold=np.isfinite, is_cheap=True),
    _blind("eq", fold=np.equal, is_cheap=True),
    _blind("ne", fold=np.not_equal, is_cheap=True),
    _blind("lt", fold=np.less, is_cheap=True),
    _blind("le", fold=np.less_equal, is_cheap=True),
    _blind("gt", fold=np.greater, is_cheap=True),
    _blind("ge", fold=np.greater_equal, is_cheap=True),
    _blind("and", fold=np.bitwise_and, is_cheap=True),
    _blind("or", fold=np.bitwise_or, is_cheap=True),
    _blind("xor", fold=np.bitwise_xor, is_cheap=True),
    _blind("not", fold=np.invert, is_cheap=True),
    _blind("reduce_and reduce_or", is_extreme=True),
    _blind(
        """
        axis_index clz eq_to iota iota_2x32_shape le_to lt_to platform_index
        population_count shift_left shift_right_arithmetic shift_right_logical
        """,
        is_cheap=True,
    ),
    _blind("reduce_xor"),
    _blind("mulhi", since="0.10"),
    # Random numbers.
    _blind("random_bits rng_bit_generator rng_uniform threefry2x32", is_random=True),
    _blind("philox2x32 philox4x32 threefry4x32", is_random=True, since="0.10"),
    _rows("random_gamma", is_random=True),
    _blind("random_fold_in random_seed random_split random_unwrap random_wrap"),
    # Linear algebra.
    _rows("cholesky", like="cholesky"),
    # Control flow.
    _blind("custom_jvp_call custom_vjp_call jit remat2", control="call"),
    _blind("call closed_call", control="call", until="0.10"),
    _blind("call_hi_primitive eval_jaxpr", control="call"),
    _rows("composite custom_vmap_call", control="call"),
    _blind("cond", control="cond"),
    _blind("scan", control="scan"),
    _rows("while", control="while"),
    _blind("shard_map", control="devices"),
    _blind("reduce reduce_window select_and_scatter"),
)
TABLE: _Rows = {name: row for rows in TABLES for name, row in rows.items()}


def primitive_of(equation: Any) -> Primitive:
    """The row of an equation's primitive."""
    name = equation.primitive.name
    if is_checkpoint_name(equation):
        name = "name"
    if name == "scatter":
        update = parameter(equation, "update_jaxpr")
        if update is not None and update.eqns:
            return UNKNOWN  # it writes more than it is given: `x.at[i].apply(fun)`
    return TABLE.get(name, UNKNOWN)
