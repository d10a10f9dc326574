# SPDX-License-Identifier: Apache-2.0
"""Advice on the most common births of inf and NaN."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jls._program.places import functions_of_jax, place_of
from jls._program.primitives import primitive_of
from jls._tools.origin.trail import (
    Constant,
    FoundBirth,
    OpResult,
    RunValue,
    Trail,
    identity_of,
)

SQRT = (
    "The derivative of a square root, and of a norm, is inf at 0. Keep the argument "
    "away from 0: jnp.sqrt(x + {small})"
)
WHERE = (
    "0 times inf: a jnp.where hides this value, and its derivative still meets it. "
    "Make the argument safe first: f(jnp.where(ok, x, 1.0))"
)
LOG_0 = (
    "The logarithm of 0. Use jax.nn.log_softmax, jax.nn.log_sigmoid or jnp.logaddexp "
    "on what comes before, or jnp.log(x + {small})"
)
ENTROPY = (
    "0 times the logarithm of 0. Write x * jnp.log(y + {small}): xlogy and entr of "
    "jax.scipy.special are finite too, but their gradients are not"
)
ARC = (
    "{name} or its derivative is not finite at -1, at 1 and beyond, where rounding may "
    "have brought the argument. Clip it: jnp.clip(x, -1 + {edge}, 1 - {edge})"
)
ARCCOSH = (
    "arccosh or its derivative is not finite at 1 and below, where rounding may have "
    "brought the argument. Keep it above: jnp.maximum(x, 1 + {edge})"
)
EIGENVECTORS = (
    "The derivative of eigenvectors divides by the differences of the eigenvalues, of "
    "which two are equal. Part them first, such as by adding "
    "jnp.diag({edge} * jnp.arange(n)), or use the eigenvalues alone"
)
LOG_NEGATIVE = (
    "The logarithm of a negative number. Keep the argument positive: "
    "jnp.log(jnp.maximum(x, {small}))"
)
LOG1P = (
    "The logarithm of 1 + x for an x of -1 or less. Keep x above it: "
    "jnp.log1p(jnp.maximum(x, -1 + {edge}))"
)
ROOT_NEGATIVE = (
    "The square root of a negative number, from rounding perhaps. Keep the argument "
    "above 0: jnp.maximum(x, {small}). Compute a variance as jnp.mean((x - mean) ** 2)"
)
POWER = (
    "A power of 0 with a negative exponent, as in the derivative of x ** 0.5 or of "
    "a / x. Keep x away from 0: (x + {small}) ** p"
)
POWER_NEGATIVE = (
    "A negative number to a power that is no integer. Keep the number positive: "
    "jnp.maximum(x, {small}) ** p"
)
DIVIDE = (
    "A quotient by 0, such as a mean over nothing. Divide by jnp.maximum(count, 1), or "
    "add {divisor} to the divisor"
)
EXP = (
    "{name} is over {largest:.5g} from {limit:.4g} on. Clip the argument, subtract its "
    "maximum first, or stay with logarithms"
)
SOFTMAX = (
    "inf - inf: a softmax or logsumexp over a row that is -inf throughout, or that has "
    "overflowed. Give such a row one finite number, or leave it out of the loss"
)
BEYOND_NARROW = (
    "Over {largest:.5g}, the largest {dtype}. Compute this line in float32, or make "
    "its operands smaller"
)
BEYOND = (
    "Over {largest:.4g}, the largest {dtype}. Make its operands smaller, such as "
    "x / jnp.max(jnp.abs(x))"
)
NOT_POSITIVE = (
    "The matrix is not positive definite, from rounding perhaps: add "
    "{edge} * jnp.eye(n)"
)
NORM_OVERFLOWS = (
    "The gradients are finite, but their global norm is over 1.8e19: a float32 cannot "
    "hold its square. A clip by that norm would turn them all into zeros, so the step "
    "is skipped. Look at the loss, or clip each element first: optax.clip(1e6)"
)
INDEX = (
    "An index out of range, perhaps a label: JAX reads NaN there. Keep it in range, "
    "jnp.clip(i, 0, n - 1), and leave such a row out of the loss"
)
CAME_IN = "It came in with the arguments: nothing in this program made it"
WRITTEN = "It is written in the program as a number, or the function closes over it"

_MAXIMA = ("max", "reduce_max", "pmax")
_NEAR = 4  # operations back to a where: casts and products may come in between
_LOG_OF_BASE = {"exp": 1.0, "exp2": math.log(2.0)}


def advise(trail: Trail, birth: FoundBirth, is_backward: bool) -> str:
    """One sentence of advice on a birth; "" if it is no known pattern."""
    origin = birth.origin
    assert isinstance(origin, OpResult)
    words = _words(trail, birth, origin, is_backward)
    words = words or _overflow(origin, birth)
    return _for_dtype(words, origin.dtype)


def _words(trail: Trail, birth: FoundBirth, origin: OpResult, is_backward: bool) -> str:
    name = origin.site.equation.primitive.name
    if is_backward and "eigh" in functions_of_jax(origin.site):
        return EIGENVECTORS
    if is_backward and name in ("div", "integer_pow", "rsqrt"):
        for arc in _differentiated(trail, birth, "arc"):
            return _of_arc(arc)
    if name in ("div", "rsqrt") and not is_backward:
        return _for_forward_div(birth)
    if name == "mul" and not is_backward:
        return _for_forward_mul(trail, birth)
    row = primitive_of(origin.site.equation)
    if row.like == "arc":
        return _of_arc(name)
    if row.like in _BY_KIND and (birth.range is not None or row.singular is None):
        return _BY_KIND[row.like][birth.size.is_nan]
    return _BY_LIKENESS[row.like](trail, birth) if row.like in _BY_LIKENESS else ""


# The number that keeps another away from 0, or from 1, by dtype. 1e-12 is 0 in float16,
# and 1 - 1e-6 is 1 in both narrow ones.
_SMALL, _EDGE = {"float16": "1e-4"}, {"float16": "2e-3", "bfloat16": "2e-2"}
# The derivative of a quotient divides by its square.
_DIVISOR = {"float16": "1e-2"}


def _for_dtype(words: str, dtype: Any) -> str:
    small, edge = _SMALL.get(dtype.name, "1e-12"), _EDGE.get(dtype.name, "1e-6")
    words = words.replace("{small}", small).replace("{edge}", edge)
    return words.replace("{divisor}", _DIVISOR.get(dtype.name, "1e-12"))


def _differentiated(trail: Trail, birth: FoundBirth, likeness: str) -> set[str]:
    """The functions of one likeness whose derivative rule made this operation.

    It is made of the same argument, in the same line.
    """
    assert isinstance(birth.origin, OpResult)
    near = {birth.origin, *_near(trail, birth.operands[-1], 4)}
    read = {x for op in near for y in trail.operands(op) for x in _named(trail, y)}
    here = place_of(birth.origin.site)
    found = set[str]()
    for frame, iterations in {(op.frame, op.iterations) for op in near}:
        for index, equation in enumerate(frame.jaxpr.eqns):
            if primitive_of(equation).like != likeness:
                continue
            place = place_of(frame.site_of(index))
            argument = RunValue(frame, equation.invars[0], iterations)
            is_here = (place.file, place.line) == (here.file, here.line)
            if is_here and read & _named(trail, argument):
                found.add(equation.primitive.name)
    return found


def _of_arc(name: str) -> str:
    # As people write it: "acos" is arccos, "erf_inv" is erfinv.
    written = name.replace("a", "arc", 1).replace("_", "")
    return ARCCOSH if name == "acosh" else ARC.replace("{name}", written)


def _overflow(origin: OpResult, birth: FoundBirth) -> str:
    """A result beyond the largest number of its dtype."""
    equation, dtype = origin.site.equation, origin.dtype
    if equation.primitive.name == "gather" and birth.size.is_nan:
        return INDEX
    if not primitive_of(equation).can_overflow or not jnp.issubdtype(
        dtype, jnp.floating
    ):
        return ""
    info = jnp.finfo(dtype)
    has_inf = not dtype.name.startswith("float8_e4m3")
    if birth.size.is_nan and has_inf:
        return ""
    # bfloat16 ends at 3.4e38, as float32 does: a wider dtype would not help.
    words = BEYOND_NARROW if info.bits < 32 and float(info.max) < 1e30 else BEYOND
    return words.format(largest=float(info.max), dtype=dtype.name)


def is_of_entropy(advice: str) -> bool:
    """Whether advice is on 0 times the logarithm of 0."""
    return advice.startswith(ENTROPY.partition("{")[0])


def _for_div(trail: Trail, birth: FoundBirth) -> str:
    if birth.range is None or birth.range.nearest > 0:
        return ""
    if birth.size.is_nan and "where" in _makers(trail, birth.operands[0], _NEAR):
        return WHERE
    if "sqrt" in _makers(trail, birth.operands[-1]):
        return SQRT
    return LOG_0 if _differentiated(trail, birth, "log") else DIVIDE


def _for_forward_div(birth: FoundBirth) -> str:
    """As `_for_div`, but not in a derivative: no square root is to blame."""
    if birth.range is None:
        return ""
    if birth.range.nearest == 0:
        return DIVIDE
    if birth.range.low < 0 and birth.size.is_nan:
        # The derivative of an inverse root divides by it and by the number.
        return ROOT_NEGATIVE.replace("{small}", "{divisor}")
    return ""


def _for_power(trail: Trail, birth: FoundBirth) -> str:
    if birth.range is None:
        return ""
    if birth.size.is_nan:
        return POWER_NEGATIVE if birth.range.low < 0 else ""
    return POWER if birth.range.nearest == 0 else ""


def _for_exp(trail: Trail, birth: FoundBirth) -> str:
    assert isinstance(birth.origin, OpResult)
    largest = float(jnp.finfo(birth.origin.dtype).max)
    name = birth.origin.site.equation.primitive.name
    base = _LOG_OF_BASE.get(name, 1.0)
    return EXP.format(name=name, largest=largest, limit=math.log(largest) / base)


def _for_sub(trail: Trail, birth: FoundBirth) -> str:
    is_pair = len(birth.operands) == 2 and all(map(trail.is_bad, birth.operands))
    if not (birth.size.is_nan and is_pair):
        return ""
    # A variance, and a deviation from the mean, are inf - inf too.
    one, other = birth.operands
    pairs = (one, other), (other, one)
    return SOFTMAX if any(_is_of_maximum(trail, *pair) for pair in pairs) else ""


def _is_of_maximum(trail: Trail, value: RunValue, other: RunValue) -> bool:
    """Whether `other` is made of a maximum of `value`, as in a softmax."""
    moved = _moved_to(trail, value)
    near = _near(trail, other, 7)
    maxima = [x for x in near if x.site.equation.primitive.name in _MAXIMA]
    return any(
        moved & _moved_to(trail, x) for maker in maxima for x in trail.operands(maker)
    )


def _moved_to(trail: Trail, value: RunValue, depth: int = _NEAR) -> set[Any]:
    """The origin of the elements of a value, behind operations that move them."""
    origin, found = trail.origin(value), _named(trail, value)
    if not isinstance(origin, OpResult) or not depth:
        return found
    if primitive_of(origin.site.equation).moves:
        for operand in trail.operands(origin):
            found |= _moved_to(trail, operand, depth - 1)
    return found


def _named(trail: Trail, value: RunValue) -> set[Any]:
    """A key for what a value is; none if that is not known."""
    origin = trail.origin(value)
    if isinstance(origin, Constant):
        return {id(origin.value)}
    return {identity_of(origin)} if origin else set()


def _for_mul(trail: Trail, birth: FoundBirth) -> str:
    """0 * inf where the 0 is from the other branch of a `where`."""
    if not birth.size.is_nan:
        return ""
    good = [x for x in birth.operands if not trail.is_bad(x)]
    return WHERE if any("where" in _makers(trail, x, _NEAR) for x in good) else ""


def _for_forward_mul(trail: Trail, birth: FoundBirth) -> str:
    bad = [x for x in birth.operands if trail.is_bad(x)]
    is_log = any("log" in _makers(trail, x) for x in bad)
    return ENTROPY if birth.size.is_nan and is_log else ""


def _makers(trail: Trail, value: RunValue, depth: int = 2) -> set[str]:
    """The names of the last operations behind a value, "where" for a `jnp.where`."""
    names = set[str]()
    for maker in _near(trail, value, depth):
        calls = [x.params.get("name") for x in maker.site.equations]
        names.add(maker.site.equation.primitive.name)
        names |= {"where"} if "_where" in calls else set()
    return names


def _near(trail: Trail, value: RunValue, depth: int) -> set[OpResult]:
    """The last operations behind a value."""
    origin = trail.origin(value)
    if not isinstance(origin, OpResult) or not depth:
        return set()
    found = {origin}
    for operand in trail.operands(origin):
        found |= _near(trail, operand, depth - 1)
    return found


# By likeness: of a birth of inf, and of one of NaN.
_BY_KIND = {
    "cholesky": ("", NOT_POSITIVE),
    "log": (LOG_0, LOG_NEGATIVE),
    "log1p": (LOG1P, LOG1P),
    "root": (SQRT, ROOT_NEGATIVE),
}
_BY_LIKENESS: dict[str, Callable[[Trail, FoundBirth], str]] = {
    "div": _for_div,
    "exp": _for_exp,
    "mul": _for_mul,
    "power": _for_power,
    "sub": _for_sub,
}
