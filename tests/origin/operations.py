# SPDX-License-Identifier: Apache-2.0
"""Expressions of which `generated` makes programs: safe ones, and births.

`x` and `y` are f32[4] from -2 to 2. `t` is f32[]: where it is 1, a birth is bad; where
it is 0, it is as safe as the others, which give numbers from -2 to 2 and have finite
derivatives.
"""

from typing import NamedTuple


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


SAFE = _lines("""
jnp.sin(x)
jnp.cos(2.0 * x)
jnp.tanh(x)
jnp.arctan(x)
jnp.arcsinh(x)
jnp.exp(-jnp.square(x))
jnp.exp(x - 2.0)
jnp.exp2(x - 1.0)
jnp.expm1(0.5 * x)
jnp.log1p(jnp.square(x))
jnp.log(x + 3.0)
jnp.log2(x + 3.5) - 0.5
jnp.sqrt(x + 2.1) - 0.1
lax.rsqrt(x + 3.0)
jnp.cbrt(x + 3.0)
x / (1.0 + jnp.square(x))
1.0 / (3.0 + x)
2.0 / (1.0 + jnp.exp(-x)) - 1.0
(x + 3.0) ** 0.4
0.25 * x**3
0.25 * lax.integer_pow(x, -4 + 7)
jnp.abs(x) - 1.0
-x
jnp.sign(x) * x
jnp.round(x)
x - jnp.floor(x)
jnp.ceil(x)
jnp.mod(x, 1.5)
jnp.fmod(x, 1.5)
jnp.clip(x, -1.0, 1.5)
jnp.minimum(x, 0.5)
jnp.maximum(x, 0.0)
jax.nn.relu(x)
jax.nn.gelu(x)
jax.nn.silu(x)
jax.nn.elu(x)
jax.nn.leaky_relu(x)
jax.nn.sigmoid(x)
jax.nn.softplus(x) - 1.0
jax.nn.softmax(x)
0.25 * jax.nn.log_softmax(x) + 0.5
jax.nn.hard_swish(0.5 * x)
jax.nn.logsumexp(x) - jnp.log(4.0) + 0.0 * x
lax.erf(x)
0.5 * jax.scipy.special.gammaln(x + 3.0)
lax.erf_inv(0.3 * x)
0.3 * (x - x.mean()) / jnp.sqrt(x.var() + 0.1)
0.5 * x / jnp.sqrt(jnp.mean(jnp.square(x)) + 1e-3)
0.5 * (x - x.mean())
jnp.cumsum(x) / 4.0
0.5 * jnp.cumprod(0.5 * x)
lax.cummax(x)
jnp.sort(x)
jnp.flip(x)
jnp.roll(x, 1)
jnp.take(x, jnp.array([3, 0, 0, 2]))
x[::-1].at[1].set(0.5)
0.5 * x.at[0].add(x[3])
jnp.concatenate([x[2:], 0.5 * x[:2]])
jnp.pad(x[:3], (1, 0))
x.reshape(2, 2).T.ravel()
(x.reshape(2, 2) @ jnp.full((2, 2), 0.5)).ravel()
jnp.dot(jnp.full((4, 4), 0.25), x)
jnp.einsum("i,ij->j", x, 0.5 * jnp.eye(4))
jnp.convolve(x, jnp.array([0.2, 0.5, 0.2]), mode="same")
0.5 * jnp.fft.ifft(jnp.fft.fft(x)).real
jnp.diff(x, prepend=0.0) / 2.0
jnp.outer(x, jnp.full(3, 0.3)).sum(1)
jax.ops.segment_sum(0.5 * x, jnp.array([0, 1, 1, 3]), 4)
jnp.where(x > 0.0, x, 0.1 * x)
lax.stop_gradient(x) * 0.5 + 0.5 * x
lax.dynamic_slice(jnp.tile(x, 2), (3,), (4,))
lax.reduce_precision(x, 8, 10)
x.astype(jnp.bfloat16).astype(jnp.float32)
jnp.tanh(x.astype(jnp.float16)).astype(jnp.float32)
jnp.interp(x, jnp.array([-2.0, 0.0, 2.0]), jnp.array([0.0, 1.0, -1.0]))
jnp.linalg.norm(x + 3.0) / 12.0 * x
jnp.linalg.solve(jnp.eye(4) + 0.1 * jnp.outer(x, x), x)
0.3 * jnp.abs(lax.complex(x, x + 3.0))
""")

SAFE_OF_TWO = _lines("""
0.5 * (x + y)
0.5 * (x - y)
0.5 * x * y
x / (1.0 + jnp.square(y))
jnp.maximum(x, y)
jnp.minimum(x, y)
jnp.where(x > y, x, 0.5 * y)
0.5 * jnp.logaddexp(x, y)
0.3 * jnp.hypot(x, y + 3.0)
0.5 * jnp.arctan2(x, y + 3.0)
0.1 * (x + 3.0) ** (0.5 * y)
jnp.mod(x, y + 3.0) / 3.0
0.05 * jnp.dot(x, y) * x
0.1 * jnp.outer(x, y).sum(0)
lax.clamp(-1.0, x, y + 3.0)
jnp.concatenate([x[:2], y[2:]])
lax.select(x > y, y, x)
""")

# inf and NaN on purpose, which reach no result.
CONTAINERS = _lines("""
jax.nn.softmax(jnp.where(jnp.arange(4) < 3, x, -jnp.inf))
jax.nn.softmax(x + jnp.array([0.0, 0.0, -jnp.inf, 0.0]))
0.3 * jax.nn.logsumexp(jnp.where(jnp.arange(4) > 0, x, -jnp.inf)) + 0.0 * x
jnp.where(x > 9.0, jnp.inf, x)
jnp.where(x > 9.0, jnp.nan, x)
jnp.where(x > 0.1, jnp.log(jnp.where(x > 0.1, x, 1.0)), 0.0)
jnp.where(x > 0.1, jnp.sqrt(lax.stop_gradient(x)), x)
jnp.where(x > 0.1, 0.01 / lax.stop_gradient(jax.nn.relu(x)), 0.0) + 0.5 * x
jnp.nan_to_num(jnp.log(lax.stop_gradient(x - 3.0))) + x
jnp.where(jnp.isfinite(jnp.exp(200.0 * x)), 0.5 * x, x)
jnp.minimum(jnp.exp(lax.stop_gradient(200.0 * x)), 1.0) * x
jnp.max(jnp.where(x > 0.0, x, -jnp.inf), initial=-1.0) * jnp.tanh(x)
lax.cummax(jnp.concatenate([jnp.full(1, -jnp.inf), x]))[1:]
jnp.min(jnp.where(jnp.arange(4) > 1, x, jnp.inf)) + 0.0 * x
jnp.clip(x, -jnp.inf, 1.0)
jnp.minimum(jnp.inf, x)
jnp.nanmean(jnp.where(jnp.arange(4) > 1, x, jnp.nan)) + 0.0 * x
jnp.where(jnp.arange(4) == jnp.argmax(jnp.where(x > 0.0, x, -jnp.inf)), x, 0.0)
1.0 / jnp.where(jnp.arange(4) > 1, x + 3.0, jnp.inf)
jnp.exp(jnp.where(x > 0.0, -jnp.inf, x))
jnp.sort(jnp.concatenate([x, jnp.full(2, jnp.inf)]))[:4]
lax.top_k(jnp.where(jnp.arange(6) < 4, jnp.pad(x, (0, 2)), -jnp.inf), 4)[0]
jnp.tanh(jnp.where(x > 1.0, jnp.inf, x))
""")


# A value with inf and NaN, and a later line that takes none of it. (Not a slice of an
# array that holds it: `why` knows the size of arrays, not of elements.)
NEVER_TAKEN = [
    (
        "jnp.sqrt(lax.stop_gradient(x) - 3.0)",
        "jnp.where(jnp.abs(x - 50.0) < 1.0, z, x)",
    ),
    (
        "jnp.exp(lax.stop_gradient(x) + 99.0)",
        "lax.select(jnp.abs(x - 50.0) < 1.0, z, x)",
    ),
    ("1.0 / lax.stop_gradient(x - x)", "jnp.where(x == jnp.pi, z, x)"),
    ("jnp.where(jnp.arange(4) < 2, -jnp.inf, 0.0)", "jax.nn.softmax(x + z)"),
]


class Birth(NamedTuple):
    """An expression that is bad where `t` is 1."""

    code: str
    before: str = "x"  # what `x` becomes on the line before, perhaps inf on purpose
    # Of a derivative: where it is bad, the result of the expression is finite.
    is_backward: bool = False
    # Or it is bad for what is bad in the expression, and reaches no result but through
    # the derivative.
    is_hidden: bool = False
    # An inf that JAX or the user writes down: on purpose until it makes a NaN.
    is_written: bool = False


_FORWARD = _lines("""
0.5 * jnp.log(jnp.square(x) + 1.0 - 9.0 * t)
jnp.log(1.0 - t) + x
0.5 * jnp.log2(jnp.square(x) + 1.0 - 9.0 * t)
jnp.log10(jnp.square(x) + 1.0 - 9.0 * t)
jnp.log1p(0.4 * x - 5.0 * t)
0.5 * jnp.log(1.0 - jnp.tanh(x / 4.0 + 50.0 * t))
0.5 * jnp.log(jax.nn.sigmoid(x - 200.0 * t))
0.5 * jnp.sqrt(jnp.square(x) + 1.0 - 9.0 * t)
lax.rsqrt(jnp.square(x) + 1.0 - 9.0 * t)
lax.rsqrt((jnp.square(x) + 1.0) * (1.0 - t))
0.5 * (jnp.square(x) + 1.0 - 9.0 * t) ** 0.5
jnp.power(1.0 - t, -1.0) * x
jnp.power(x + 4.0, 1.0 + 200.0 * t) / 3.0
jnp.arcsin(0.4 * x + 5.0 * t)
jnp.arccos(0.4 * x + 5.0 * t) / 2.0
jnp.arccosh(jnp.square(x) + 2.0 - 9.0 * t) / 2.0
jnp.arctanh(0.4 * x + 5.0 * t)
lax.erf_inv(0.4 * x + 5.0 * t)
x / (1.0 - t)
x * ((1.0 - t) / (1.0 - t))
jnp.reciprocal((x + 3.0) * (1.0 - t))
lax.integer_pow(1.0 - t, -2) * x
(x - x.mean()) / (4.0 * (1.0 - t))
jnp.sum(x * (1.0 - t)) / jnp.sum(jnp.full(4, 1.0 - t)) + 0.0 * x
0.4 * (x + 3.0) * (1.0 - t) / jnp.mean((x + 3.0) * (1.0 - t))
0.4 * jnp.floor_divide(x + 3.0, 1.0 - t)
jnp.remainder(x + 3.0, 1.0 - t) + 0.5 * x
jnp.fmod(x, 1.0 - t)
jnp.exp(x - 2.0 + 200.0 * t)
jnp.exp2(x - 1.0 + 300.0 * t)
0.3 * jnp.expm1(x + 200.0 * t)
jnp.sinh(0.5 * x + 200.0 * t)
0.5 * jnp.cosh(0.5 * x + 200.0 * t)
0.2 * (x + 3.0) * (1.0 + 1e30 * t) * (1.0 + 1e30 * t)
jnp.square((x + 3.0) * (1.0 + 1e30 * t)) / 16.0
((x + 3.0) * (1.0 + 1e10 * t)) ** 4 / 400.0
jnp.sum(jnp.full(4, 1.0 + 3e38 * t)) * x / 4.0
jnp.cumsum(jnp.full(4, 1.0 + 3e38 * t)) * x / 4.0
jnp.prod(jnp.full(4, 1.0 + 1e20 * t)) * x
jnp.dot(jnp.full((4, 4), 1.0 + 3e38 * t), x + 3.0) / 10.0
jnp.einsum("i,ij->j", x + 3.0, jnp.full((4, 4), 0.1 + 3e38 * t))
jnp.convolve(x + 3.0, jnp.full(3, 0.1 + 3e38 * t), mode="same")
jax.ops.segment_sum((x + 3.0) * (0.1 + 1e38 * t), jnp.zeros(4, int), 4)
jnp.fft.fft((x + 3.0) * (0.1 + 3e38 * t)).real
(jnp.exp(200.0 * t) - jnp.exp(200.0 * t)) + x
x * ((1.0 - t) * jnp.exp(200.0 * t)) * (jnp.exp(200.0 * t) * (1.0 - t))
jnp.linalg.inv(jnp.eye(4) * (1.0 - t)) @ x
jnp.linalg.solve(jnp.eye(4) * (1.0 - t), x)
jnp.linalg.cholesky(jnp.eye(4) * (1.0 - 2.0 * t)) @ x
jax.scipy.special.logit(0.5 + 0.1 * x + 5.0 * t)
0.3 * jax.scipy.special.xlogy(2.0, jnp.square(x) + 1.0 - 9.0 * t)
0.5 * jax.scipy.special.gammaln((x + 3.0) * (1.0 - t))
0.3 * jax.scipy.special.digamma((x + 3.0) * (1.0 - t))
jax.scipy.special.i0(0.3 * (x + 3.0) + 500.0 * t) / 2.0
jnp.take(x, jnp.arange(4) + (9.0 * t).astype(int), mode="fill")
x.at[0].divide(1.0 - t)
x.at[1].multiply((0.5 + 1e30 * t) * (1.0 + 1e30 * t))
0.3 * jnp.abs(lax.complex(x, x + 3.0) / (1.0 - t))
jnp.exp((x - 2.0 + 20.0 * t).astype(jnp.float16)).astype(jnp.float32)
jnp.square((x + 3.0 + 300.0 * t).astype(jnp.float16)).astype(jnp.float32) / 16.0
jnp.log((x + 3.0 - 9.0 * t).astype(jnp.bfloat16)).astype(jnp.float32)
0.5 * jax.nn.log_softmax(jnp.where(t > 0.5, -jnp.inf, x)) + 1.0
jax.nn.softmax(jnp.where(t > 0.5, -jnp.inf, x))
jnp.nanmean(jnp.where(t > 0.5, jnp.nan, x)) + 0.0 * x
jnp.where(t > 0.5, jnp.nan, x)
""")

_WRITTEN = _lines("""
jnp.linalg.slogdet(jnp.eye(4) * (1.0 - t))[1] + x
jax.ops.segment_max(x, jnp.where(t > 0.5, 0, jnp.arange(4)), 4)
jnp.max(x, initial=-jnp.inf, where=t < 0.5) + 0.0 * x
jnp.where(t > 0.5, jnp.inf, x)
""")

_BACKWARD = _lines("""
0.5 * jnp.sqrt((jnp.square(x) + 1.0) * (1.0 - t))
jnp.linalg.norm((x + 3.0) * (1.0 - t)) / 8.0 * jnp.ones(4)
jnp.sqrt(jnp.sum(jnp.square((x + 3.0) * (1.0 - t)))) / 16.0 + 0.3 * x
jnp.cbrt((x + 3.0) * (1.0 - t))
jnp.power((x + 3.0) * (1.0 - t), 0.3)
((x + 3.0) * (1.0 - t)) ** 0.3
jnp.arcsin(0.3 * x * (1.0 - t) + t)
jnp.arccos(0.3 * x * (1.0 - t) + t) / 2.0
0.5 * jnp.arccosh((x + 3.0) * (1.0 - t) + 1.0)
0.5 * jnp.arctan2((x + 3.0) * (1.0 - t), (x + 3.0) * (1.0 - t))
jnp.std(jnp.arange(4.0) * (x + 3.0) * (1.0 - t)) / 8.0 + 0.5 * x
jnp.linalg.norm(jnp.outer(x + 3.0, x + 3.0) * (1.0 - t)) / 100.0 + 0.5 * x
1e-15 * lax.rsqrt((x + 3.0) * (1.0 - t) + 1e-30 * (x + 3.0) * t)
jnp.sin(jnp.sin(x * (1.0 + 1e25 * t)) * (1.0 + 1e25 * t))
jnp.sin((1.0 + 1e6 * t) * x.astype(jnp.float16).astype(jnp.float32))
jnp.linalg.eigh(jnp.diag(jnp.arange(4.0) + 0.1 * x) * (1.0 - t))[1][0] + 0.5 * x
""")

_HIDDEN = _lines("""
jnp.where(t > 0.5, x, 0.5 * jnp.sqrt(jnp.square(x) + 1.0 - 9.0 * t))
jnp.where(t > 0.5, x, 0.5 * jnp.log((x + 3.0) * (1.0 - t)))
jnp.where(t > 0.5, x, 1.0 / ((x + 3.0) * (1.0 - t)))
jnp.minimum(jnp.exp(x - 2.0 + 200.0 * t), 1.0) * jnp.tanh(x)
""")

_OF_MASKS = [
    Birth("jnp.exp(x - 2.0 + 200.0 * t)", "jnp.where(jnp.arange(4) < 3, x, -jnp.inf)"),
    Birth("jnp.exp(x + 200.0 * t)", "jnp.log(jnp.where(x > 0.0, 1.0, 0.0)) + 0.1 * x"),
    Birth("1.0 / (x * (1.0 - t))", "jnp.where(jnp.arange(4) < 3, x + 3.0, jnp.inf)"),
    Birth("jnp.tanh(x) / (1.0 - t)", "jnp.where(x > 1.0, jnp.inf, x)"),
    Birth("jnp.exp(x) + jnp.log(1.0 - t)", "jnp.where(x > 0.0, -jnp.inf, x)"),
    Birth(
        "jax.nn.softmax(x / (1.0 - t))",
        "jnp.where(jnp.arange(4) < 2, -jnp.inf, x + 3.0)",
    ),
]

FORWARD = [
    *map(Birth, _FORWARD),
    *_OF_MASKS,
    *(Birth(code, is_written=True) for code in _WRITTEN),
]
BACKWARD = [
    *(Birth(code, is_backward=True) for code in _BACKWARD),
    *(Birth(code, is_backward=True, is_hidden=True) for code in _HIDDEN),
]

# In the derivative rule of a function: `d` is a tangent or a cotangent.
RULES = _lines("""
d / (1.0 - t)
d * jnp.log(1.0 - t)
d * jnp.sqrt(1.0 - 9.0 * t)
d * jnp.exp(200.0 * t)
""")
