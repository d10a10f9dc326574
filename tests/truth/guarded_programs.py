"""Float32 programs that are right as they are: guards, small steps, tiny numbers.

Each block stands between two products: it gets what one gave, and the next one takes
what it returns, which is in float16's range. `TABLE` has each of them alone, and
programs of other shapes; `random_program` mixes and nests blocks, and moves of what a
product gave. What each program must do is in `test_truth.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from exact_programs import MOVES, cancels
from float32_programs import Numbers, Program
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ROWS, N = 4, 8
Block = Callable[[Any, Any], Any]  # (f32[ROWS, N], its parameters) -> f32[ROWS, N]
BLOCKS: dict[str, Block] = {}


def block(fun: Block) -> Block:
    BLOCKS[fun.__name__] = fun
    return fun


def block_params(numbers: Numbers) -> dict[str, Any]:
    return {"w": numbers(N, N), "u": numbers(N, N), "b": numbers(N, scale=0.5)}


def apart(x):
    """Less than 1 in magnitude, without a bend."""
    return x * lax.rsqrt(1 + jnp.mean(x * x, -1, keepdims=True))


def chance(h):
    """A probability that is 1 in float32 here and there."""
    return jax.nn.sigmoid(6 * h)


# Guards.


@block
def log1p_of_a_bound(h, p):
    return jnp.log1p(-jnp.minimum(chance(h), 1 - 1e-6))


@block
def log1p_of_a_negative_bound(h, p):
    return jnp.log1p(jnp.maximum(-chance(h), -1 + 1e-6))


@block
def logit_of_a_clip(h, p):
    q = jnp.clip(chance(h), 1e-5, 1 - 1e-5)
    return jnp.log(q / (1 - q))


@block
def arccos_of_a_clip(h, p):
    return jnp.arccos(jnp.clip(jnp.tanh(3 * h), -1 + 1e-6, 1 - 1e-6))


@block
def arctanh_of_a_clip(h, p):
    return jnp.arctanh(jnp.clip(jnp.tanh(3 * h), -1 + 1e-6, 1 - 1e-6))


@block
def erf_inv_of_a_clip(h, p):
    return lax.erf_inv(jnp.clip(jnp.tanh(2 * h), -1 + 1e-6, 1 - 1e-6))


@block
def gumbel(h, p):
    u = jnp.clip(chance(h), 1e-6, 1 - 1e-6)
    return -jnp.log(-jnp.log(u))


@block
def odds(h, p):
    return 1e-2 / (1 - jnp.minimum(chance(h), 1 - 1e-4))


@block
def odds_of_nearly_one(h, p):
    q = chance(h) * 0.9999
    return 1e-2 * q / (1 - q)


@block
def log_of_the_rest_and_epsilon(h, p):
    return jnp.log(1 - chance(h) + 1e-6)


@block
def log_of_a_share_and_epsilon(h, p):
    return jnp.log(jax.nn.softmax(6 * h) + 1e-9)


@block
def root_of_a_bound(h, p):
    return 1e2 * jnp.sqrt(jnp.maximum(1e-6 * chance(h), 1e-12))


@block
def root_of_distances(h, p):
    pairs = h[:, None] - h[None]
    away = jnp.sqrt(jnp.sum(pairs**2, -1) + 1e-12)
    return jnp.concatenate([away, h[:, ROWS:]], axis=1)


@block
def entropy(h, p):
    q = jax.nn.softmax(4 * h)
    return q * jnp.log(q + 1e-12)


# Offsets.


@block
def log_of_a_hundred_and_more(h, p):
    return jnp.log(h + 100)


@block
def a_difference_of_large_numbers(h, p):
    return ((h + 100) ** 2 - 1e4) / 200


@block
def less_a_shifted_mean(h, p):
    shifted = h + 50
    return shifted - jnp.mean(shifted, -1, keepdims=True)


@block
def fast_variance(h, p):
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean(h * h, -1, keepdims=True) - mean**2
    return (h - mean) * lax.rsqrt(variance + 1e-5)


@block
def fast_variance_with_an_offset(h, p):
    return fast_variance(h + 10, p)


@block
def one_plus_little(h, p):
    return 1e3 * ((1 + 1e-3 * h) ** 2 - 1)


# Constants.


@block
def tiny_and_huge(h, p):
    return jnp.sin((h * 4e-8) * 1e7)


@block
def huge_and_tiny(h, p):
    return jnp.tanh((h * 1e6) * 1e-6)


@block
def a_tiny_addend(h, p):
    return jnp.log(1e-7 * jnp.exp(2 * h) + 4e-8)


@block
def beyond_every_half(h, p):
    return jnp.log(jnp.exp(h) * 1e20) - jnp.log(1e20)


@block
def below_every_half(h, p):
    return (jnp.exp(h) * 1e-30) * 1e29


# Exponentials less a maximum of something else.


def _less(s, most):
    e = jnp.exp(s - most)
    return e / (1 + e) + 1e-3 * jnp.log(e)


def _most(s):
    return jnp.max(s, -1, keepdims=True)


@block
def exp_less_the_maximum(h, p):
    s = 8 * h
    return jnp.exp(s - _most(s))


@block
def exp_less_the_maximum_of_reversed_rows(h, p):
    s = 12 * h
    return _less(s, _most(s[::-1]))


@block
def exp_less_the_maximum_of_the_first_row(h, p):
    s = 12 * h
    return _less(s, _most(s[:1]))


@block
def exp_less_the_maximum_of_rolled_rows(h, p):
    s = 12 * h
    return _less(s, _most(jnp.roll(s, 1, 0)))


@block
def exp_less_the_maximum_of_a_half(h, p):
    s = 12 * h
    return _less(s, _most(s[:, : N // 2]))


@block
def exp_less_the_maximum_or_0(h, p):
    s = 12 * h
    return _less(s, jnp.where(p["b"][0] > 1e3, _most(s), 0.0))


@block
def logsumexp(h, p):
    return h - jax.nn.logsumexp(8 * h, axis=-1, keepdims=True) / 8


# Logs, roots, powers, angles.


@block
def log_of_exp(h, p):
    return jnp.log(jnp.exp(5 * h) + 1e-3) / 5


@block
def roots_and_powers(h, p):
    return (h * h + 1e-6) ** 0.25 + (jax.nn.softplus(h) + 1e-3) ** 3.5 / 50


@block
def sine_of_large_angles(h, p):
    return jnp.sin(h + 1e3 * jnp.arange(N, dtype=jnp.float32))


@block
def rotation(h, p):
    angles = jnp.float32(1e4) ** (-jnp.arange(N // 2, dtype=jnp.float32) / N)
    angles = 3000.0 * angles + jnp.arange(ROWS, dtype=jnp.float32)[:, None]
    one, other = jnp.split(h, 2, -1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = one * cosine - other * sine, one * sine + other * cosine
    return jnp.concatenate(turned, -1)


# Sums and products along an axis.


@block
def cumulative_product(h, p):
    return jnp.cumprod(1 + 0.01 * jnp.tanh(h), axis=1)


@block
def cumulative_product_of_shares(h, p):
    return jnp.log(jnp.cumprod(jax.nn.sigmoid(h) * 0.05, axis=1)) / 20


@block
def cumulative_sum(h, p):
    return jnp.cumsum(h + 1, axis=1) / N


@block
def associative_scan(h, p):
    def compose(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    decay = jnp.exp(-0.01 * jax.nn.softplus(h))
    return lax.associative_scan(compose, (decay, jnp.tanh(h)), axis=1)[1]


# Denominators.


@block
def a_tiny_denominator(h, p):
    g = 1e-8 * jax.nn.softplus(h)
    return h * g / g


@block
def tiny_squares(h, p):
    g = (1e-4 * (jnp.tanh(h) + 2)) ** 2
    return h * g / (g + 1e-12)


@block
def tiny_weights(h, p):
    weights = 1e-9 * jax.nn.softplus(h)
    return h * weights / jnp.sum(weights, -1, keepdims=True)


# Norms and shares.


@block
def layer_norm(h, p):
    mean = jnp.mean(h, -1, keepdims=True)
    variance = jnp.mean((h - mean) ** 2, -1, keepdims=True)
    return (h - mean) * lax.rsqrt(variance + 1e-6) * (1 + p["b"]) + p["b"]


@block
def rms_norm(h, p):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-12) * p["b"]


@block
def rms_norm_of_tiny(h, p):
    return rms_norm(h * 1e-5, p)


@block
def softmax(h, p):
    return jax.nn.softmax(5 * h)


@block
def softmax_with_a_mask(h, p):
    later = jnp.arange(N) > jnp.arange(ROWS)[:, None]
    return jax.nn.softmax(5 * h + jnp.where(later, -1e9, 0.0))


@block
def attention(h, p):
    q, k, v = h @ p["w"], h @ p["u"], jnp.tanh(h)
    later = jnp.arange(ROWS) > jnp.arange(ROWS)[:, None]
    scores = jnp.where(later, -1e9, q @ k.T / np.sqrt(N))
    return jax.nn.softmax(scores) @ v


# Bends.


@block
def leaky_relu(h, p):
    return jax.nn.leaky_relu(h + p["b"])


@block
def where_positive(h, p):
    return jnp.where(h > 0, jnp.log1p(jnp.abs(h)), 0.1 * h)


@block
def relu(h, p):
    return jax.nn.relu(h + p["b"])


@block
def gelu(h, p):
    return jax.nn.gelu(h + p["b"])


@block
def silu(h, p):
    return jax.nn.silu(2 * h)


@block
def softplus(h, p):
    return jnp.log(jax.nn.softplus(4 * h - 4) + 1e-6)


@block
def gated(h, p):
    one, other = jnp.split(h, 2, -1)
    made = jax.nn.sigmoid(one) * other
    return jnp.concatenate([made, jnp.tanh(one) * jnp.exp(-jnp.abs(other))], -1)


# Custom rules, calls and branches.


@jax.custom_jvp
def _guarded_log(x):
    return jnp.log(jnp.maximum(x, 1e-7))


@_guarded_log.defjvp
def _guarded_log_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _guarded_log(x), t / jnp.maximum(x, 1e-7)


@block
def custom_jvp(h, p):
    return _guarded_log(1 - jnp.minimum(chance(h), 1 - 1e-6))


@jax.custom_vjp
def _steep(x):
    return jnp.log1p(-jnp.minimum(jax.nn.sigmoid(x), 1 - 1e-6))


def _steep_backwards(saved, g):
    q = jax.nn.sigmoid(saved)
    return (-g * q * (1 - q) / (1 - jnp.minimum(q, 1 - 1e-6)),)


_steep.defvjp(lambda x: (_steep(x), x), _steep_backwards)


@block
def custom_vjp(h, p):
    return _steep(4 * h)


@block
def nested_jit(h, p):
    return jax.jit(lambda h: log1p_of_a_bound(jax.jit(jnp.sin)(h), p))(h)


@block
def remat(h, p):
    @jax.checkpoint
    def inner(h, w):
        return jnp.log1p(-jnp.minimum(chance(jnp.tanh(h) @ w), 1 - 1e-6))

    return inner(h, p["w"])


@block
def remat_with_a_policy(h, p):
    def inner(h, w):
        q = checkpoint_name(chance(jnp.tanh(h) @ w), "kept")
        return jnp.log(1 - q + 1e-6)

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(inner, policy=policy)(h, p["w"])


@block
def branch(h, p):
    return lax.cond(
        p["b"][0] < 1e3,
        lambda h: log1p_of_a_bound(h @ p["w"], p),
        lambda h: jnp.sin(h),
        h,
    )


@block
def vmapped(h, p):
    def of_one(row):
        row = row / (jnp.linalg.norm(row * 1e-6) * 1e6 + 1e-9)
        return jnp.log(1 - jax.nn.sigmoid(4 * (row @ p["w"])) + 1e-6)

    return jax.vmap(of_one)(h)


@block
def outer_product(h, p):
    decay = jnp.exp(jnp.einsum("bi,j->bij", jax.nn.softplus(h), -jnp.exp(p["b"])))
    return jnp.log(decay.sum(-1) + 1e-6)


# Loops.

STEPS = 200


@block
def small_steps_in_a_scan(h, p):
    def step(c, _):
        return c + 2e-3 * jnp.tanh(c @ p["w"]), None

    return lax.scan(step, h, length=STEPS)[0]


@block
def small_steps_in_fori(h, p):
    step = lambda i, c: c + 2e-3 * jnp.tanh(c @ p["w"])  # noqa: E731
    return lax.fori_loop(0, STEPS, step, h)


@block
def small_steps_in_a_while(h, p):
    def step(state):
        i, c = state
        return i + 1, c + 2e-3 * jnp.tanh(c @ w)

    begin, w = lax.stop_gradient((h, p["w"]))
    end = lax.while_loop(lambda s: s[0] < STEPS, step, (0, begin))[1]
    return h + (end - begin)


@block
def average_that_starts_from_data(h, p):
    def step(average, row):
        return 0.99 * average + 0.01 * row, average

    rows = jnp.tile(jnp.tanh(h) @ p["w"], (STEPS // ROWS, 1))
    last, all_of_them = lax.scan(step, h[0] + 2, rows)
    return h * last + all_of_them[-ROWS:]


@block
def runge_kutta(h, p):
    def slope(x):
        return jnp.tanh(x @ p["w"]) - 0.1 * x

    def step(x, _):
        one = slope(x)
        two = slope(x + 0.005 * one)
        three = slope(x + 0.005 * two)
        four = slope(x + 0.01 * three)
        return x + 0.01 / 6 * (one + 2 * two + 2 * three + four), None

    return lax.scan(step, h, length=40)[0]


@block
def sampler(h, p):
    noise = jnp.asarray(np.random.RandomState(3).randn(60, ROWS, N), jnp.float32)

    def step(x, noise):
        return x - 5e-3 * (x - jnp.tanh(x @ p["w"])) + 1e-2 * noise, None

    return lax.scan(step, h, noise)[0]


@block
def residual_stream(h, p):
    for i in range(12):
        h = h + 0.02 * jnp.tanh(h @ p["w" if i % 2 else "u"] + p["b"])
    return h


@block
def scaled_residual_stream(h, p):
    for _ in range(8):
        h = h * (1 + 0.01 * jnp.tanh(h @ p["w"])) - 0.01 * (apart(h) @ p["u"])
    return h


@block
def inner_optimizer(h, p):
    x = jnp.tanh(h)

    def step(state, _):
        w, speed = state
        slope = x.T @ (x @ w - 0.5 * x) / ROWS
        speed = 0.9 * speed + slope
        return (w - 5e-3 * speed, speed), None

    (w, _), _ = lax.scan(step, (p["w"], jnp.zeros((N, N))), length=60)
    return h @ w


@block
def inner_adam(h, p):
    x = jnp.tanh(h)

    def step(state, i):
        w, first, second = state
        slope = 1e-3 * (x.T @ (x @ w - 0.5 * x) / ROWS)
        first = 0.9 * first + 0.1 * slope
        second = 0.99 * second + 0.01 * slope**2
        one, other = 1 - 0.9 ** (i + 1), 1 - 0.99 ** (i + 1)
        update = first / one / (jnp.sqrt(second / other + 1e-10) + 1e-8)
        return (w - 3e-3 * update, first, second), None

    zeros = jnp.zeros((N, N))
    begin = (p["w"], zeros, zeros)
    (w, _, _), _ = lax.scan(step, begin, jnp.arange(30, dtype=jnp.float32))
    return h @ w


@block
def constant_of_a_long_scan(h, p):
    def step(c, _):
        return c + 5e-3 * jnp.tanh(h - c), None

    return lax.scan(step, jnp.tanh(h) @ p["w"], length=STEPS)[0]


@block
def nested_scan(h, p):
    def inner(c, w):
        return c + 1e-2 * jnp.sin(c @ w), None

    def outer(c, _):
        c, _ = lax.scan(inner, c, jnp.stack([p["w"], p["u"]]))
        return c, None

    return lax.scan(outer, h, length=20)[0]


@block
def cache(h, p):
    def step(state, i):
        x, cached = state
        cached = lax.dynamic_update_slice(cached, x[None], (i, 0, 0))
        scores = jnp.einsum("bn,tbn->bt", x @ p["w"], cached)
        seen = jnp.arange(6) <= i
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = jnp.tanh(jnp.einsum("bt,tbn->bn", weights, cached) @ p["u"])
        return (x, cached), x

    begin = jnp.tanh(h), jnp.zeros((6, ROWS, N))
    return lax.scan(step, begin, jnp.arange(6))[1].mean(0)


@block
def recurrent(h, p):
    def step(c, x):
        return jnp.tanh(c @ p["w"] + x), None

    return lax.scan(step, jnp.zeros_like(h), jnp.stack([h, -h, 2 * h, h]))[0]


@block
def lstm(h, p):
    def step(state, x):
        c, y = state
        gates = jnp.concatenate([x @ p["w"] + y @ p["u"], x + y @ p["w"] + p["b"]], 1)
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        y = jnp.concatenate([jax.nn.sigmoid(o) * jnp.tanh(c)] * 2, 1)
        return (c, y), y

    begin = jnp.zeros((ROWS, N // 2)), jnp.zeros((ROWS, N))
    return lax.scan(step, begin, jnp.stack([h, -h, 2 * h, h, h, h]))[1].mean(0)


# Programs.


def framed(*parts: Block, seed: int = 0, size: float = 1.0) -> Program:
    """Blocks between products, and a loss of each row."""
    numbers = Numbers(seed)
    params = {
        "x": numbers(ROWS, N, scale=size),
        "in": [numbers(N, N) for _ in parts],
        "inside": [block_params(numbers) for _ in parts],
        "out": numbers(N, 3),
    }

    def loss(params, batch):
        x = params["x"]
        for part, w, p in zip(parts, params["in"], params["inside"], strict=True):
            x = part(x @ w, p)
        last = x @ params["out"]
        return {"last": last, "before": x, "loss": jnp.mean((last - batch) ** 2, -1)}

    return Program(loss, params, numbers(ROWS, 3, scale=1.0))


# With these seeds no choice is near in any of them.
_SEEDS = {"logit_of_a_clip": 2}
TABLE: dict[str, Callable[[], Program]] = {
    name: functools.partial(framed, part, seed=_SEEDS.get(name, 1))
    for name, part in BLOCKS.items()
}


def row(make: Callable[[], Program]) -> Callable[[], Program]:
    TABLE[make.__name__] = make
    return make


@row
def tiny_input_squared_and_divided():
    numbers = Numbers()
    params = {"w": jnp.eye(N), "v": jnp.ones((N, 1))}
    params["x"] = 1e-4 * (2 + jnp.tanh(numbers(ROWS, N, scale=1.0)))

    def loss(params, _):
        h = params["x"] @ params["w"]
        g = h * h
        return {"loss": ((h * g / g) @ params["v"])[:, 0] * 1e3}

    return Program(loss, params, None)


@row
def small_constant_before_a_sine():
    numbers = Numbers()
    params = {"w": jnp.full((N, N), 100.0), "v": numbers(N, 1)}
    params["x"] = 10 + numbers(ROWS, N, scale=1.0)

    def loss(params, _):
        h = (params["x"] @ params["w"]) * 4e-8
        return {"loss": (jnp.sin(h) @ params["v"])[:, 0] * 1e3}

    return Program(loss, params, None)


@row
def mask_as_an_argument():
    program = framed(lambda h, p: jax.nn.softmax(5 * h + p["mask"]))
    mask = np.where(np.arange(N) > np.arange(ROWS)[:, None], -1e9, 0.0)

    def loss(params, batch):
        target, mask = batch
        (inside,) = params["inside"]
        return program.loss(params | {"inside": [inside | {"mask": mask}]}, target)

    return Program(loss, program.params, (program.batch, jnp.asarray(mask, "float32")))


@row
def slow_average_of_a_target():
    """Of a network, 300 times, from its data: what a target network is."""
    numbers = Numbers()
    params = {"w": numbers(N, N), "x": numbers(ROWS, N, scale=1.0)}
    params["slow"] = numbers(ROWS, N, scale=1.0)

    def loss(params, _):
        def step(slow, _):
            return 0.999 * slow + 0.001 * (params["x"] @ params["w"]), None

        slow, _ = lax.scan(step, params["slow"], length=300)
        return {"slow": slow, "loss": jnp.mean((slow @ params["w"]) ** 2, -1)}

    return Program(loss, params, None)


@row
def small_steps_unrolled():
    """From data, as a solver takes them; and what they changed."""
    numbers = Numbers()
    params = {"w": numbers(N, N), "x": numbers(ROWS, N, scale=1.0)}

    def loss(params, _):
        x = params["x"]
        for _ in range(10):
            x = x + 1e-3 * jnp.tanh(x @ params["w"])
        change = 100 * (x - params["x"])
        return {"change": change, "loss": jnp.mean((change @ params["w"]) ** 2, -1)}

    return Program(loss, params, None)


@row
def inverse_by_newton():
    numbers = Numbers()
    noise = 0.1 * numbers(N, N)
    params = {"w": jnp.eye(N) + noise, "x": numbers(ROWS, N, scale=1.0)}

    def loss(params, _):
        def step(y, _):
            return y + y @ (jnp.eye(N) - params["w"] @ y), None

        y, _ = lax.scan(step, jnp.eye(N), length=6)
        return {"inverse": y, "loss": jnp.mean((params["x"] @ y) ** 2, -1)}

    return Program(loss, params, None)


@row
def shared_weights():
    return framed(*[silu] * 4)


@row
def without_a_product():
    def loss(params, _):
        x = jnp.log1p(-jnp.minimum(jax.nn.sigmoid(params), 1 - 1e-6))
        return {"loss": jnp.mean(x**2, -1)}

    return Program(loss, Numbers()(ROWS, N, scale=4.0), None)


# Random ones.


def _plain(part, times):
    return part


def _in_jit(part, times):
    return jax.jit(part)


def _in_remat(part, times):
    return jax.checkpoint(part)


def _in_residual(part, times):
    return lambda h, p: h + 0.1 * part(h, p)


def _in_scan(part, times):
    def repeated(h, p):
        step = lambda c, _: (jnp.tanh(c + part(c @ p["w"], p)), None)  # noqa: E731
        return lax.scan(step, jnp.tanh(h), length=times)[0]

    return repeated


def _in_small_steps(part, times):
    def repeated(h, p):
        step = lambda c, _: (c + 1e-2 * jnp.tanh(part(c @ p["w"], p)), None)  # noqa: E731
        return lax.scan(step, h, length=10 * times)[0]

    return repeated


def _in_branch(part, times):
    return lambda h, p: lax.cond(p["b"][0] < 1e3, part, lambda h, p: jnp.sin(h), h, p)


def _in_vmap(part, times):
    return lambda h, p: jax.vmap(part, (0, None))(jnp.stack([h, -h]), p).mean(0)


def _in_map(part, times):
    return lambda h, p: lax.map(lambda h: part(h, p), jnp.stack([h, -h])).mean(0)


def _in_map_of_remat(part, times):
    return _in_map(jax.checkpoint(part), times)


def _in_custom_vjp(part, times):
    @jax.custom_vjp
    def fun(h, p):
        return part(h, p)

    def forwards(h, p):
        return jax.vjp(part, h, p)

    fun.defvjp(forwards, lambda pull, g: pull(g))
    return fun


WRAPS = [_plain] * 3
WRAPS += [_in_jit, _in_remat, _in_residual, _in_branch, _in_vmap]
WRAPS += [_in_scan, _in_small_steps, _in_map, _in_map_of_remat, _in_custom_vjp]
TAMED = {
    "as it is": lambda x: x,
    "tanh": jnp.tanh,
    "apart": apart,
    "larger": lambda x: 4 * apart(x),
}

# Moves beside what they move, of which the cotangents nearly cancel.
ALL_BLOCKS = BLOCKS | {
    f"less_its_{name}": lambda h, p, move=move: cancels(*move(h)) / 8
    for name, move in MOVES.items()
    if jax.eval_shape(move, jnp.zeros((ROWS, N)))[1].shape == (ROWS, N)
}

# Slow to compile or to run, so not inside of a loop.
LOOPS = [name for name in BLOCKS if "scan" in name or "steps" in name]
LOOPS += ["average_that_starts_from_data", "runge_kutta", "sampler", "inner_optimizer"]
LOOPS += ["inner_adam", "cache", "recurrent", "lstm", "residual_stream"]
LOOPS += ["scaled_residual_stream"]
SLOW = (_in_scan, _in_small_steps, _in_vmap, _in_map, _in_map_of_remat)


def random_program(seed: int) -> tuple[Program, str]:
    """A program, and what it is made of."""
    chosen = np.random.RandomState(seed)
    names, parts, said = sorted(ALL_BLOCKS), [], []
    for _ in range(chosen.choice([1, 1, 2, 2, 3])):
        name = names[chosen.randint(len(names))]
        wrap = WRAPS[chosen.randint(len(WRAPS))]
        if name in LOOPS and wrap in SLOW:
            wrap = _plain
        tame = sorted(TAMED)[chosen.randint(len(TAMED))]
        inner = wrap(ALL_BLOCKS[name], int(chosen.randint(2, 6)))
        parts.append(lambda h, p, inner=inner, tame=TAMED[tame]: tame(inner(h, p)))
        said.append(f"{name} ({wrap.__name__[1:]}, {tame})")
    size = float(chosen.choice([0.3, 1.0, 3.0]))
    return framed(*parts, seed=seed, size=size), "; ".join(said)
