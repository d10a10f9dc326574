# SPDX-License-Identifier: Apache-2.0
"""Programs whose result is inf or NaN, each with the line that is to blame marked.

Each is complete in itself: it makes a function and its arguments, and the line where
the first inf or NaN on the way to the result is born ends with the comment "here". Of a
derivative, that is the line of the forward pass which is differentiated. Where a bad
number came in with the arguments, no line is marked.

A birth is an operation whose result is NaN (inf) while no operand is. An inf that the
program writes down on purpose, such as a mask, is none.

They need implicit dtype promotion, as most programs of users do.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jls

MARK = "# <- here"


class Program(NamedTuple):
    """One program, and what is true of its first birth. None and empty: not asked."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]  # -> fun, args
    operation: tuple[str, ...] = ()  # primitives; each of them is right
    is_backward: bool | None = None
    # Of a loop: from 0, in the order of the elements of what is scanned, also where the
    # loop runs backward; outermost loop first.
    iteration: tuple[int, ...] | None = None
    argument: str = ""  # the path of the argument that was bad, such as "batch/image"
    is_from_scale: bool | None = None
    module: str = ""  # the name of a module or scope around the birth
    is_step: bool = False  # the results are finite, but a wrapper skipped the step
    wrapper: str = ""  # a step with two wrappers: the name of the one that skipped
    devices: int = 1


PROGRAMS: dict[str, Program] = {}


def program(**truth):
    def register(make):
        PROGRAMS[make.__name__] = Program(make, **truth)
        return make

    return register


def marked_lines(program: Program) -> set[int]:
    """The numbers of the lines of this file that are right."""
    lines, first = inspect.getsourcelines(program.make)
    return {n for n, line in enumerate(lines, first) if line.rstrip().endswith(MARK)}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


# Losses and gradients in plain JAX.


@program(operation=("log",), is_backward=False)
def log_of_a_probability_that_underflows():
    def loss_fn(logits):
        p = jax.nn.sigmoid(logits)
        return -jnp.mean(jnp.log(p))  # <- here

    return loss_fn, (jnp.array([1.0, -200.0]),)


@program(operation=("div",), is_backward=False)
def accuracy_over_an_empty_mask():
    def accuracy(correct, mask):
        hits = jnp.sum(correct * mask)
        return hits / jnp.sum(mask)  # <- here

    return accuracy, (jnp.ones(4), jnp.zeros(4))


@program(operation=("div",), is_backward=False)
def one_over_zero():
    def weights(counts):
        inverse = 1.0 / counts  # <- here
        return 0.5 * inverse

    return weights, (jnp.array([2.0, 0.0, 1.0]),)


@program(operation=("div",), is_backward=True)
def square_root_at_zero():
    def loss_fn(x):
        square = x * x
        return jnp.sum(jnp.sqrt(square))  # <- here

    return jax.value_and_grad(loss_fn), (jnp.array([3.0, 0.0]),)


@program(operation=("div",), is_backward=True)
def norm_at_zero():
    def loss_fn(params, x):
        error = params["w"] * x
        return 0.5 * jnp.linalg.norm(error)  # <- here

    return jax.grad(loss_fn), ({"w": jnp.ones(3)}, jnp.zeros(3))


@program(operation=("pow", "div", "rsqrt"), is_backward=True)
def power_of_a_half_at_zero():
    def loss_fn(x):
        root = x**0.5  # <- here
        return jnp.mean(root)

    return jax.value_and_grad(loss_fn), (jnp.array([0.0, 4.0]),)


@program(operation=("rsqrt", "div"), is_backward=True)
def angle_of_a_vector_with_itself():
    def angle(x, y):
        cosine = jnp.dot(x, y)
        return jnp.arccos(cosine)  # <- here

    x = jnp.array([0.0, 1.0])
    return jax.value_and_grad(angle), (x, x)


@program(operation=("div",), is_backward=True)
def polar_angle_at_the_origin():
    def loss_fn(point):
        theta = jnp.arctan2(point[1], point[0])  # <- here
        return theta**2

    return jax.value_and_grad(loss_fn), (jnp.zeros(2),)


@program(operation=("div",), is_backward=True)
def log_hidden_by_a_where():
    """The forward pass is right: the -inf is not chosen. Its derivative is 0 / 0."""

    def loss_fn(p):
        log_p = jnp.log(p)  # <- here
        return -jnp.sum(jnp.where(p > 0, log_p, 0.0))

    return jax.value_and_grad(loss_fn), (jnp.array([0.5, 0.5, 0.0]),)


@program(operation=("log",), is_backward=False)
def entropy_hidden_by_a_where():
    """Here the -inf itself reaches the derivative, which multiplies it by 0."""

    def entropy(p):
        log_p = jnp.log(p)  # <- here
        return -jnp.sum(jnp.where(p > 0, p * log_p, 0.0))

    return jax.value_and_grad(entropy), (jnp.array([0.5, 0.5, 0.0]),)


@program(operation=("div",), is_backward=True)
def square_root_hidden_by_a_where():
    def loss_fn(x):
        root = jnp.sqrt(x)  # <- here
        safe = jnp.where(x > 0, root, 0.0)
        return jnp.sum(safe)

    return jax.value_and_grad(loss_fn), (jnp.array([0.0, 1.0]),)


@program(operation=("sub",), is_backward=False)
def softmax_of_a_row_that_is_masked_out():
    def attend(scores, mask):
        scores = jnp.where(mask, scores, -jnp.inf)
        return jax.nn.softmax(scores)  # <- here

    mask = jnp.array([[True, True, False], [False, False, False]])
    return attend, (jnp.ones((2, 3)), mask)


@program(operation=("log",), is_backward=False)
def logsumexp_of_a_row_that_is_masked_out():
    def log_likelihood(scores, mask):
        scores = jnp.where(mask, scores, -jnp.inf)
        return jax.nn.logsumexp(scores, axis=-1)  # <- here

    mask = jnp.array([[True, False], [False, False]])
    return log_likelihood, (jnp.zeros((2, 2)), mask)


@program(operation=("div",), is_backward=True)
def deviation_of_constants():
    def loss_fn(x):
        spread = jnp.std(x, axis=0)  # <- here
        return jnp.mean((x - 1.0) * spread)

    return jax.value_and_grad(loss_fn), (jnp.ones((4, 2)),)


@program(operation=("exp",), is_backward=False)
def exponential_of_a_large_number():
    def rate(log_rate):
        return jnp.exp(log_rate).sum()  # <- here

    return rate, (jnp.array([1.0, 89.0]),)


@program(operation=("sqrt",), is_backward=False)
def variance_in_one_pass_below_zero():
    """E[x^2] - E[x]^2 is -0.0625 for two neighbors near 1000, fused or not."""

    def deviation(x):
        variance = jnp.mean(x * x) - jnp.mean(x) ** 2
        return jnp.sqrt(variance)  # <- here

    return deviation, (jnp.array([1000.0, np.nextafter(np.float32(1000), 0)]),)


@program(operation=("rsqrt",), is_backward=False)
def layer_norm_in_one_pass():
    def layer_norm(x):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(x * x, -1, keepdims=True) - mean**2
        return (x - mean) * lax.rsqrt(variance + 1e-5)  # <- here

    row = jnp.array([1000.0, np.nextafter(np.float32(1000), 0)])
    return layer_norm, (jnp.stack([jnp.arange(2.0), row]),)


@program(operation=("pow",), is_backward=False)
def power_of_a_negative_number():
    def focal_loss(p, gamma):
        """The probability comes from elsewhere, rounded to a little over 1."""
        weight = (1.0 - p) ** gamma  # <- here
        return -jnp.mean(weight * jnp.log(p))

    return focal_loss, (jnp.array([0.5, 1.0 + 1e-6]), jnp.float32(1.5))


@program(operation=("log",), is_backward=False)
def cross_entropy_by_hand():
    def loss_fn(logits, labels):
        p = jax.nn.softmax(logits)
        log_p = jnp.log(p)  # <- here
        return -jnp.mean(jnp.sum(labels * log_p, axis=-1))

    logits = jnp.array([[0.0, 200.0], [1.0, 2.0]])
    return jax.value_and_grad(loss_fn), (logits, jnp.eye(2))


@program(operation=("div",), is_backward=False)
def cosine_similarity_with_a_zero_vector():
    def similarity(x, y):
        dot = jnp.sum(x * y, axis=-1)
        lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
        return jnp.mean(dot / lengths)  # <- here

    return similarity, (jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.ones((2, 2)))


@program(operation=("log",), is_backward=False)
def divergence_with_a_zero_probability():
    def divergence(p, q):
        log_p = jnp.log(p)  # <- here
        return jnp.sum(p * (log_p - jnp.log(q)))

    return divergence, (jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5]))


@program(operation=("div",), is_backward=False)
def mean_of_an_empty_slice():
    def late_reward(rewards):
        late = rewards[4:]
        return jnp.mean(late)  # <- here

    return late_reward, (jnp.ones(4),)


# Linear algebra.


@program(is_backward=False)
def inverse_of_a_singular_matrix():
    def mahalanobis(x, covariance):
        precision = jnp.linalg.inv(covariance)  # <- here
        return x @ precision @ x

    return mahalanobis, (jnp.ones(2), jnp.ones((2, 2)))


@program(operation=("cholesky",), is_backward=False)
def cholesky_of_an_indefinite_matrix():
    def log_det(kernel):
        lower = jnp.linalg.cholesky(kernel)  # <- here
        return 2.0 * jnp.sum(jnp.log(jnp.diagonal(lower)))

    return log_det, (jnp.array([[1.0, 2.0], [2.0, 1.0]]),)


@program(is_backward=True)
def eigenvectors_of_equal_eigenvalues():
    """The derivative divides by the difference of the eigenvalues."""

    def loss_fn(a):
        _, vectors = jnp.linalg.eigh(a)  # <- here
        return jnp.sum(vectors[:, 0] ** 3)

    return jax.value_and_grad(loss_fn), (jnp.eye(3),)


@program(operation=("log", "constant"), is_backward=False)
def flow_with_a_singular_layer():
    """A normalizing flow: one layer maps the plane to a line.

    Older versions of JAX choose a constant -inf there.
    """

    def negative_log_likelihood(layers, x):
        total = 0.0
        for w in layers:
            x = jnp.tanh(x @ w)
            _, log_det = jnp.linalg.slogdet(w)  # <- here
            total += log_det
        return 0.5 * jnp.mean(jnp.sum(x**2, -1)) - total

    layers = [jnp.eye(2), jnp.array([[1.0, 2.0], [2.0, 4.0]])]
    return negative_log_likelihood, (layers, normal(0, 4, 2))


# Narrow types.


@program(operation=("dot_general",), is_backward=False)
def matmul_in_float16():
    def loss_fn(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)  # <- here
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return loss_fn, (200.0 * jnp.ones((4, 2)), 100.0 * jnp.ones((3, 4)))


@program(operation=("dot_general",), is_backward=False)
def attention_in_float16():
    """The scores are divided by the root of the width one operation too late."""

    def attend(q, k, v):
        scores = q @ k.T  # <- here
        weights = jax.nn.softmax(scores / np.sqrt(q.shape[-1]).astype(np.float16))
        return weights @ v

    q, k, v = (normal(seed, 4, 16).astype(jnp.float16) for seed in range(3))
    return attend, (q.at[0].set(100), k.at[0].set(50), v)


@program(operation=("convert_element_type",), is_backward=False)
def cast_to_float16():
    def embed(positions, table):
        rows = jnp.outer(positions, table)
        narrow = rows.astype(jnp.float16)  # <- here
        return jnp.tanh(narrow) + 1.0 / (narrow - narrow + 1.0)

    return embed, (jnp.array([1.0, 2000.0]), jnp.array([3.0, 50.0]))


@program(operation=("convert_element_type", "reduce_sum"), is_backward=False)
def sum_of_squares_in_float16():
    def rms_norm(x):
        squares = jnp.square(x)
        total = jnp.sum(squares, axis=-1, keepdims=True)  # <- here
        return x / (total / x.shape[-1]), total

    return rms_norm, (jnp.full((2, 512), 16, jnp.float16),)


@program(operation=("exp",), is_backward=False)
def exponential_in_bfloat16():
    def gate(x):
        x = x.astype(jnp.bfloat16)
        return (x * jnp.exp(x)).astype(jnp.float32)  # <- here

    return gate, (jnp.array([1.0, 100.0]),)


@program(operation=("convert_element_type",), is_backward=False)
def cast_to_float8():
    """There is no inf in this type: more than 464 is NaN."""

    def quantize(x, scale):
        return (x * scale).astype(jnp.float8_e4m3fn).astype(jnp.float32)  # <- here

    return quantize, (jnp.array([1.0, 40.0]), jnp.float32(16.0))


@program(operation=("convert_element_type",), is_backward=True)
def gradient_that_overflows_in_float16():
    """The forward pass holds small numbers; the loss is large by its weight alone."""

    def loss_fn(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)
        y = y.astype(jnp.float32)  # <- here
        return 1e6 * jnp.mean(y)

    return jax.value_and_grad(loss_fn), (jnp.ones(4), jnp.ones((3, 4)))


# Loops and branches.


@program(operation=("exp",), is_backward=False, iteration=(3,))
def exponential_in_a_scan():
    def run(x, steps):
        def body(total, step):
            rate = jnp.exp(step)  # <- here
            return 0.5 * total + rate, total

        return lax.scan(body, x, steps)

    return run, (jnp.float32(1.0), jnp.array([1.0, 2.0, 3.0, 100.0, 1.0, 1.0]))


@program(operation=("div",), is_backward=True, iteration=(2,))
def square_root_in_a_scan_backward():
    def loss_fn(w, xs):
        def body(total, x):
            total = total + jnp.sqrt(w * x)  # <- here
            return total, None

        return lax.scan(body, 0.0, xs)[0]

    return jax.value_and_grad(loss_fn), (jnp.float32(2.0), jnp.array([1.0, 4.0, 0, 9]))


@program(operation=("log",), is_backward=False, iteration=(1,))
def log_in_a_reversed_scan():
    """Returns to go: the last comes first."""

    def returns(rewards, discounts):
        def body(after, now):
            reward, discount = now
            after = reward + jnp.log(discount) * after  # <- here
            return after, after

        return lax.scan(body, 1.0, (rewards, discounts), reverse=True)[1]

    return returns, (jnp.ones(4), jnp.array([0.9, 0.0, 0.9, 0.9]))


@program(operation=("div",), is_backward=False, iteration=(1, 2))
def quotient_in_nested_scans():
    def fun(table):
        def row(total, values):
            def cell(total, value):
                return total + 1.0 / value, None  # <- here

            return lax.scan(cell, total, values)

        return lax.scan(row, 0.0, table)[0]

    return fun, (jnp.ones((3, 4)).at[1, 2].set(0.0),)


@program(operation=("rsqrt",), is_backward=False, iteration=(3,))
def root_in_a_fori_loop():
    def fun(x, count):
        def body(i, x):
            return lax.rsqrt(x) - i  # <- here

        return lax.fori_loop(0, count, body, x)

    # 4, 0.5, 0.41, -0.45, NaN
    return fun, (jnp.float32(4.0), 5)


@program(operation=("div",), is_backward=False, iteration=(2,))
def newton_in_a_while_loop():
    """The derivative of x^2 - 4x + 5 is 0 at x = 2, where the third step stands."""

    def solve(x):
        def goes_on(carry):
            return carry[0] < 5

        def body(carry):
            step, x = carry
            value, slope = x * x - 4.0 * x + 5.0, 2.0 * x - 4.0
            return step + 1, x - value / slope  # <- here

        return lax.while_loop(goes_on, body, (0, x))[1]

    return solve, (jnp.float32(2.0 + 1.0 + 2.0**0.5),)


@program(operation=("log",), is_backward=False, iteration=(3,))
def log_in_a_branch_in_a_scan():
    def fun(xs):
        def body(total, x):
            def small(x):
                return jnp.log(x)  # <- here

            def large(x):
                return jnp.log1p(x)

            return total + lax.cond(x < 1.0, small, large, x), None

        return lax.scan(body, 0.0, xs)[0]

    return fun, (jnp.array([2.0, 0.5, 3.0, 0.0, 2.0]),)


@program(operation=("div",), is_backward=True, iteration=(1,))
def norm_in_one_of_three_experts():
    """A switch in a scan, differentiated."""

    def loss_fn(w, choices, xs):
        experts = [
            lambda y: jnp.sum(y * y),
            lambda y: jnp.sum(jnp.abs(y)),
            lambda y: jnp.sqrt(jnp.sum(y * y)),  # <- here
        ]

        def body(total, inputs):
            choice, x = inputs
            return total + lax.switch(choice, experts, w * x), None

        return lax.scan(body, 0.0, (choices, xs))[0]

    choices = jnp.array([2, 2, 0, 1])
    xs = jnp.array([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    return jax.value_and_grad(loss_fn), (jnp.ones(2), choices, xs)


# What is done to functions.


@program(operation=("div",), is_backward=True)
def rematerialized_block():
    def loss_fn(params, x):
        @jax.checkpoint
        def block(w, x):
            x = jnp.tanh(w * x)
            return jnp.sqrt(x)  # <- here

        for w in params:
            x = block(w, x)
        return jnp.sum(x)

    return jax.value_and_grad(loss_fn), ([jnp.ones(3)] * 2, jnp.array([0.0, 1.0, 2]))


@program(operation=("div",), is_backward=True, iteration=(2,))
def rematerialized_block_in_a_scan():
    def loss_fn(params, x):
        @jax.checkpoint
        def block(x, w):
            x = x + jnp.sqrt(w) * x  # <- here
            return jnp.tanh(x), None

        return jnp.sum(lax.scan(block, x, params)[0])

    params = jnp.array([1.0, 2.0, 0.0, 1.0])
    return jax.value_and_grad(loss_fn), (params, jnp.ones(3))


@program(operation=("div",), is_backward=True)
def gradient_per_example():
    def loss_fn(w, x):
        length = jnp.linalg.norm(w - x)  # <- here
        return jnp.maximum(length - 1.0, -2.0)

    per_example = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))
    return per_example, (jnp.ones(2), jnp.array([[0.0, 3.0], [1.0, 1.0]]))


@program(operation=("div",), is_backward=True)
def custom_jvp_with_a_bad_rule():
    @jax.custom_jvp
    def safe_norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    @safe_norm.defjvp
    def rule(primals, tangents):
        (x,), (dx,) = primals, tangents
        length = safe_norm(x)
        direction = x / length  # <- here
        return length, jnp.sum(direction * dx)

    def loss_fn(w, x):
        return safe_norm(w * x) + 1.0

    return jax.value_and_grad(loss_fn), (jnp.ones(3), jnp.zeros(3))


@program(operation=("log",), is_backward=True)
def custom_vjp_with_a_bad_rule():
    """JAX has the line of the call for what the rule of a `custom_vjp` does."""

    @jax.custom_vjp
    def gate(x):
        return x * x

    def forward(x):
        return gate(x), x

    def backward(x, g):
        slope = jnp.log(x)  # <- here
        return (g * slope,)

    gate.defvjp(forward, backward)

    def loss_fn(w, x):
        y = gate(w * x)  # <- here
        return jnp.sum(y)

    return jax.value_and_grad(loss_fn), (jnp.ones(3), jnp.array([1.0, 0.0, 2.0]))


@program(operation=("exp",), is_backward=False)
def library_function_called_twice():
    """The two calls may share one program: the second is to blame."""

    def loss_fn(x):
        first = jax.nn.softplus(x) + optax.losses.log_cosh(x)
        second = jnp.expm1(first)
        third = jax.nn.elu(second)
        return jnp.sum(jnp.exp(second - 1.0) + third)  # <- here

    return loss_fn, (jnp.array([0.5, 2.0, 3.0]),)


@program(operation=("div",), is_backward=False)
def same_helper_called_twice():
    """The helper is right for the first caller. Both lines say what happened."""

    def normalized(x):
        return x / jnp.sum(x)  # <- here

    def fun(p, q):
        first = normalized(p)
        return first * normalized(q)  # <- here

    return fun, (jnp.ones(3), jnp.zeros(3))


@program()
def label_that_is_masked_out():
    """The result is the -inf of the mask itself: mask and loss do not fit."""

    def loss_fn(logits, mask, labels):
        logits = jnp.where(mask, logits, -jnp.inf)  # <- here
        log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(log_p, labels[:, None], axis=-1)
        return -jnp.mean(chosen)  # <- here

    mask = jnp.array([[True, True, False], [True, True, True]])
    return loss_fn, (jnp.zeros((2, 3)), mask, jnp.array([2, 0]))


@program(operation=("gather", "select_n"), is_backward=False)
def token_out_of_range():
    """`jnp.take` fills with NaN what is not there."""

    def embed(table, tokens):
        x = jnp.take(table, tokens, axis=0)  # <- here
        return jnp.mean(x)

    return embed, (jnp.ones((8, 4)), jnp.array([1, 7, 8]))


# Eight devices.


@program(operation=("div",), is_backward=False, devices=8)
def mean_over_devices_of_which_one_has_no_data():
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    split = PartitionSpec("d")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(split, split), out_specs=PartitionSpec()
    )
    def mean(x, mask):
        local = jnp.sum(x * mask) / jnp.sum(mask)  # <- here
        return lax.pmean(local, "d")

    mask = jnp.ones(16).at[10:12].set(0.0)
    return mean, (jnp.arange(16.0), mask)


@program(operation=("div",), is_backward=True, devices=8)
def norm_on_eight_devices_backward():
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(),
    )
    def loss_fn(w, x):
        error = w - x
        length = jnp.sqrt(jnp.sum(error * error))  # <- here
        return lax.pmean(length, "d")

    x = jnp.ones((8, 2)).at[5].set(3.0)
    return jax.jit(jax.value_and_grad(loss_fn)), (jnp.full(2, 3.0), x)


@program(operation=("log",), is_backward=False, devices=8)
def global_array_under_jit():
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    split = NamedSharding(mesh, PartitionSpec("d"))

    @jax.jit
    def loss_fn(w, x):
        p = jax.nn.relu(x @ w)
        return -jnp.mean(jnp.log(p))  # <- here

    x = jax.device_put(jnp.ones((16, 4)).at[11].set(-1.0), split)
    w = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec()))
    return loss_fn, (w, x)


# Linen, NNX, Equinox, Haiku.


@program(operation=("log",), is_backward=False, module="Encoder_1")
def linen_module():
    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, kernel_init=nn.initializers.ones)(x)
            return jnp.log(x)  # <- here

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Encoder()(x)
            return Encoder()(x - 10.0)

    model, x = Model(), jnp.ones((2, 3))
    params = model.init(jax.random.key(0), x + 1e6)

    def loss_fn(params, x):
        return jnp.mean(model.apply(params, x))

    return jax.value_and_grad(loss_fn), (params, x)


@program(operation=("div",), is_backward=False, module="BatchNorm_0")
def linen_batch_norm_with_an_empty_mask():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            x = nn.Dense(4)(x)
            norm = nn.BatchNorm(use_running_average=False)
            return norm(x, mask=mask)  # <- here

    model, x, mask = Model(), normal(0, 6, 3), jnp.zeros((6, 1), bool)
    variables = model.init(jax.random.key(0), x, mask)

    def apply(variables, x, mask):
        return model.apply(variables, x, mask, mutable=["batch_stats"])

    return apply, (variables, x, mask)


@program(operation=("div",), is_backward=True, iteration=(1,), module="Block")
def linen_scan_of_remat():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            gain = self.param("gain", nn.initializers.ones, ())
            return x + jnp.sqrt(gain) * nn.Dense(3)(x), None  # <- here

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.remat(Block, prevent_cse=False)
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            layers = nn.scan(block, length=3, **axes)
            return layers(name="Block")(x, None)[0]

    model, x = Model(), normal(0, 2, 3)
    params = model.init(jax.random.key(0), x)["params"]
    params["Block"]["gain"] = params["Block"]["gain"].at[1].set(0.0)

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    return jax.value_and_grad(loss_fn), (params, x)


class Reward(nnx.Module):
    """A linear model of NNX, used below."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)[:, 0]


@program(operation=("log",), is_backward=False)
def nnx_module():
    class Head(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            x = self.dropout(nnx.relu(self.linear(x)))
            return jnp.log(x)  # <- here

    def loss_fn(model, x):
        return jnp.mean(model(x))

    return nnx.value_and_grad(loss_fn), (Head(nnx.Rngs(0)), -jnp.ones((4, 3)))


@program(operation=("div",), is_backward=True)
def nnx_train_step():
    """The loss that comes back is right; the model is changed in place."""

    @nnx.jit
    def train_step(model, optimizer, rngs, x):
        x = x * rngs.noise.uniform(x.shape)

        def loss_fn(model):
            return jnp.linalg.norm(model(x))  # <- here

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    model = Reward(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return train_step, (model, optimizer, nnx.Rngs(noise=1), jnp.zeros((4, 3)))


@program(operation=("div",), is_backward=True)
def equinox_module():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        temperature: jax.Array

        def __call__(self, x):
            y = self.linear(x) - self.linear(x[::-1])
            return jnp.sqrt(y @ y) / self.temperature  # <- here

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x))

    model = Model(eqx.nn.Linear(3, 2, key=jax.random.key(0)), jnp.ones(()))
    return loss_fn, (model, jnp.ones((2, 3)))


@program(operation=("exp",), is_backward=False, module="policy")
def haiku_module():
    class Policy(hk.Module):
        def __call__(self, x):
            log_scale = hk.Linear(2, w_init=hk.initializers.Constant(50.0))(x)
            return jnp.exp(log_scale)  # <- here

    model = hk.without_apply_rng(hk.transform(lambda x: Policy()(x)))
    x = jnp.ones((4, 3))
    params = model.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(model.apply(params, x))

    return jax.jit(loss_fn), (params, x)


# What was bad when it came in.


def squared_error(params, batch):
    """A right loss."""
    y = jnp.tanh(batch["image"] @ params["dense"]["kernel"])
    return jnp.mean((y[:, 0] - batch["label"]) ** 2)


def right_arguments():
    params = {"dense": {"kernel": jnp.ones((3, 1))}}
    return params, {"image": normal(0, 4, 3), "label": jnp.ones(4)}


@program(argument="batch/image")
def bad_batch():
    params, batch = right_arguments()
    batch["image"] = batch["image"].at[2, 1].set(jnp.nan)
    return jax.value_and_grad(squared_error), (params, batch)


@program(argument="batch/label")
def infinite_label():
    params, batch = right_arguments()
    batch["label"] = batch["label"].at[0].set(jnp.inf)
    return jax.jit(squared_error), (params, batch)


@program(argument="params/dense/kernel")
def bad_parameter():
    params, batch = right_arguments()
    params["dense"]["kernel"] = params["dense"]["kernel"].at[1, 0].set(jnp.nan)
    return jax.jit(jax.value_and_grad(squared_error)), (params, batch)


@program(argument="opt_state/0/nu/dense/kernel")
def bad_moment_of_adam():
    optimizer = optax.adam(1e-3)

    @jax.jit
    def train_step(params, opt_state, batch):
        grads = jax.grad(squared_error)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, batch = right_arguments()
    adam, *others = optimizer.init(params)
    nu = jax.tree.map(lambda x: x.at[0].set(jnp.nan), adam.nu)
    return train_step, (params, (adam._replace(nu=nu), *others), batch)


@program(argument="learning_rate")
def bad_learning_rate():
    @jax.jit
    def train_step(params, batch, learning_rate):
        grads = jax.grad(squared_error)(params, batch)
        return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)

    return train_step, (*right_arguments(), jnp.float32(jnp.nan))


@program(argument="model/linear/kernel")
def bad_parameter_of_nnx():
    def loss_fn(model, x):
        return jnp.mean(model(x))

    model = Reward(nnx.Rngs(0))
    model.linear.kernel[...] = model.linear.kernel[...].at[2].set(jnp.inf)
    return nnx.jit(loss_fn), (model, jnp.ones((4, 3)))


# Steps that jls skips.


@program(
    operation=("convert_element_type",),
    is_backward=True,
    is_from_scale=True,
    is_step=True,
)
def step_whose_scale_is_too_large():
    def loss_fn(params, batch):
        y = batch["x"].astype(jnp.float16) @ params["w"].astype(jnp.float16)
        y = y.astype(jnp.float32)  # <- here
        return jnp.mean((y - batch["y"]) ** 2)

    optimizer = jls.loss_scaled(optax.adam(1e-3), jls.dynamic(2.0**24))
    params = {"w": jnp.full((4, 1), 0.5)}
    batch = {"x": normal(0, 8, 4), "y": jnp.ones((8, 1))}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, (params, optimizer.init(params), batch)


@program(operation=("dot_general",), is_backward=True, is_from_scale=True, is_step=True)
def step_whose_scale_is_too_large_for_one_layer():
    """The last layer has large weights: their product with the gradient overflows."""

    def loss_fn(params, batch):
        x = jnp.tanh(batch["x"].astype(jnp.float16) @ params["w1"].astype(jnp.float16))
        y = x @ params["w2"].astype(jnp.float16)  # <- here
        return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2)

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**10))
    params = {"w1": normal(0, 4, 4), "w2": jnp.full((4, 1), 50.0)}
    batch = {"x": normal(1, 8, 4), "y": jnp.full((8, 1), 20.0)}
    step = jls.train_step(loss_fn, optimizer)
    return step, (params, optimizer.init(params), batch)


@program(
    operation=("reduce_sum", "convert_element_type"),
    is_backward=True,
    is_from_scale=True,
    is_step=True,
)
def step_whose_bias_has_too_large_a_gradient():
    """The derivative of the addition sums 1,024 rows in float16."""

    def loss_fn(params, batch):
        y = batch["x"].astype(jnp.float16) @ params["w"].astype(jnp.float16)
        y = y + params["b"].astype(jnp.float16)  # <- here
        return jnp.mean(y.astype(jnp.float32))

    optimizer = jls.loss_scaled(optax.sgd(1e-3), jls.dynamic(2.0**18))
    params = {"w": jnp.ones((4, 1)), "b": jnp.zeros((1,))}
    batch = {"x": jnp.full((1024, 4), 1e-3)}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, (params, optimizer.init(params), batch)


@program(operation=("div",), is_backward=True, is_from_scale=False, is_step=True)
def step_with_a_true_nan():
    """The loss is finite, and no scale mends the gradient."""

    def loss_fn(params, batch):
        x = batch["x"].astype(jnp.float16) * params["w"].astype(jnp.float16)
        length = jnp.sqrt(jnp.sum(x * x, axis=-1))  # <- here
        return jnp.mean(length.astype(jnp.float32))

    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(8.0))
    params = {"w": jnp.ones(4)}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    batch = {"x": jnp.ones((3, 4)).at[1].set(0.0)}
    return step, (params, optimizer.init(params), batch)


@program(operation=("log",), is_backward=False, is_step=True)
def step_with_a_bad_loss():
    def loss_fn(params, batch):
        p = jax.nn.softmax(batch["x"] @ params["w"])
        log_p = jnp.log(p)  # <- here
        return -jnp.mean(jnp.sum(batch["y"] * log_p, axis=-1))

    optimizer = jls.skip_nonfinite(optax.sgd(0.1))
    params = {"w": jnp.eye(2)}
    batch = {"x": jnp.array([[0.0, 300.0]]), "y": jnp.array([[1.0, 0.0]])}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, (params, optimizer.init(params), batch)


@program(argument="batch/image", is_from_scale=False, is_step=True)
def step_with_a_bad_batch():
    optimizer = jls.loss_scaled(optax.sgd(0.1), jls.dynamic(4.0))
    params, batch = right_arguments()
    batch["image"] = batch["image"].at[0, 0].set(jnp.nan)
    step = jax.jit(jls.train_step(squared_error, optimizer))
    return step, (params, optimizer.init(params), batch)


@program(operation=("dot_general",), is_backward=False, is_from_scale=False)
def loss_that_overflows_forward_under_a_loss_scale():
    """The value and the gradient alone, without an optimizer."""

    def loss_fn(params, x):
        y = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)  # <- here
        return jnp.mean(y.astype(jnp.float32))

    state = jls.static(8.0).init()
    args = (state, {"w": jnp.full((8, 2), 300.0)}, jnp.full((2, 8), 100.0))
    return jls.value_and_grad(loss_fn), args


@program(
    operation=("convert_element_type",),
    is_backward=True,
    is_from_scale=True,
    is_step=True,
)
def step_by_hand():
    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(2.0**20))

    def loss_fn(params, x):
        x = x.astype(jnp.float16)
        h = jnp.tanh(x @ params["w"].astype(jnp.float16)) + x
        h = h.astype(jnp.float32)  # <- here
        return jnp.sum(h**2)

    @jax.jit
    def train_step(params, opt_state, x):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": jnp.eye(3)}
    return train_step, (params, optimizer.init(params), jnp.ones((2, 3)))


@program(
    operation=("div",),
    is_backward=True,
    is_from_scale=False,
    is_step=True,
    wrapper="critic",
)
def actor_and_critic_of_which_one_skips():
    optimizer = jls.loss_scaled(optax.adam(1e-3), jls.dynamic(16.0))

    def actor_loss(params, batch):
        return jnp.mean(jnp.tanh(batch["obs"] @ params) * batch["advantage"])

    def critic_loss(params, batch):
        error = batch["obs"] @ params - batch["returns"]
        return jnp.sqrt(jnp.sum(error**2))  # <- here

    losses = {"actor": actor_loss, "critic": critic_loss}

    @jax.jit
    def train_step(params, opt_states, batch):
        params, opt_states = dict(params), dict(opt_states)
        for name, loss_fn in losses.items():
            old = opt_states[name]
            loss, grads = jls.value_and_grad(loss_fn)(old, params[name], batch)
            updates, opt_states[name] = optimizer.update(
                grads, old, params[name], value=loss
            )
            params[name] = optax.apply_updates(params[name], updates)
        return params, opt_states

    params = {"actor": jnp.ones(3), "critic": jnp.zeros(3)}
    opt_states = {name: optimizer.init(params[name]) for name in losses}
    batch = {"obs": normal(0, 4, 3), "advantage": jnp.ones(4), "returns": jnp.zeros(4)}
    return train_step, (params, opt_states, batch)


@program(operation=("div",), is_backward=False, is_step=True)
def step_whose_updates_are_bad():
    """An optimizer of the user's own that forgets the eps."""

    def update(grads, count, params=None):
        def sign(g):
            return -0.1 * g / jnp.abs(g)  # <- here

        return jax.tree.map(sign, grads), count + 1

    own = optax.GradientTransformation(lambda params: jnp.int32(0), update)
    optimizer = jls.skip_nonfinite(own, check_updates=True)

    def loss_fn(params, batch):
        return jnp.sum(params["w"] * batch)

    params = {"w": jnp.ones(3)}
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    return step, (params, optimizer.init(params), jnp.array([1.0, 0.0, 2.0]))


@program(operation=("exp",), is_backward=False, is_from_scale=False, is_step=True)
def step_of_a_chain_inside_the_wrapper():
    """Accumulated over two micro-batches, of which the second is bad."""

    def loss_fn(params, batch):
        rate = jnp.exp(batch @ params["w"])  # <- here
        return jnp.mean(rate)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = jls.loss_scaled(chain, jls.dynamic(8.0))
    params = {"w": jnp.ones(2)}
    step = jax.jit(jls.train_step(loss_fn, optimizer, micro_batches=2))
    batch = jnp.ones((4, 2)).at[3].set(60.0)
    return step, (params, optimizer.init(params), batch)


@program(
    operation=("convert_element_type",),
    is_backward=True,
    is_from_scale=True,
    is_step=True,
)
def step_that_was_skipped_a_moment_ago():
    """The state after the skip: at the scale that it has now the step is applied."""

    def loss_fn(params, x):
        y = x.astype(jnp.float16) * params.astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32)) * 4.0  # <- here

    optimizer = jls.loss_scaled(optax.sgd(1e-6), jls.dynamic(2.0**14))
    params, x = jnp.full(4, 0.5), jnp.ones(4)
    step = jax.jit(jls.train_step(loss_fn, optimizer))
    params, opt_state, _ = step(params, optimizer.init(params), x)
    return step, (params, opt_state, x)


@program(
    operation=("div",),
    is_backward=True,
    is_from_scale=False,
    is_step=True,
    module="Network",
)
def step_of_a_linen_train_state():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, dtype=jnp.float16)(x)
            x = x - jnp.mean(x, axis=0)
            return jnp.std(x.astype(jnp.float32), axis=0)  # <- here

    class TrainState(train_state.TrainState):
        count: int = 0

    def loss_fn(state, batch):
        return jnp.sum(state.apply_fn({"params": state.params}, batch))

    model, batch = Network(), jnp.ones((4, 3))
    params = model.init(jax.random.key(0), batch)["params"]
    optimizer = jls.loss_scaled(optax.adam(1e-3), jls.dynamic(64.0))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    return jax.jit(jls.train_step(loss_fn)), (state, batch)


@program(operation=("div",), is_backward=True, is_from_scale=False, is_step=True)
def step_of_nnx():
    def loss_fn(model, batch):
        return jnp.linalg.norm(model(batch))  # <- here

    model = Reward(nnx.Rngs(0))
    transformation = jls.loss_scaled(optax.adam(1e-3), jls.dynamic(32.0))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    step = nnx.jit(jls.train_step(loss_fn))
    return step, (model, optimizer, jnp.zeros((4, 3)))


@program(operation=("rsqrt",), is_backward=False, is_step=True)
def step_of_equinox():
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            x = self.linear(x)
            return x * lax.rsqrt(jnp.sum(x * x))  # <- here

    def loss_fn(model, batch):
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    linear = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    model, optimizer = Model(linear), jls.skip_nonfinite(optax.adam(1e-3))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = eqx.filter_jit(jls.train_step(loss_fn, optimizer))
    return step, (model, opt_state, jnp.ones((4, 3)).at[1].set(0.0))


# Small ones of what people train.


@program(operation=("integer_pow", "square", "mul"), is_backward=False, iteration=(2,))
def transformer_in_float16():
    """A squared ReLU overflows in the third of four layers."""

    def block(x, layer):
        q, k, v = (x @ layer[name] for name in ("q", "k", "v"))
        scores = (q @ k.T).astype(jnp.float32) / np.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        x = x + weights.astype(jnp.float16) @ v
        h = jax.nn.relu(x @ layer["up"])
        h = h**2  # <- here
        return x + h @ layer["down"], None

    def loss_fn(params, tokens):
        layers = jax.tree.map(lambda x: x.astype(jnp.float16), params["layers"])
        x = params["embedding"][tokens].astype(jnp.float16)
        x, _ = lax.scan(block, x, layers)
        logits = x.astype(jnp.float32) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:-1], tokens[1:]
        ).mean()

    shapes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "up": (8, 16), "down": (16, 8)}
    layers = {
        name: 0.1 * normal(seed, 4, *shape)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    layers["up"] = layers["up"].at[2].multiply(4000.0)
    params = {"embedding": normal(9, 10, 8), "layers": layers}
    return jax.value_and_grad(loss_fn), (params, jnp.arange(6))


@program(
    operation=("convert_element_type", "dot_general"),
    is_backward=True,
    iteration=(1,),
    is_from_scale=True,
    is_step=True,
)
def step_of_a_transformer_in_float16():
    """The scale overflows in the second of three layers, on the way back."""

    def loss_fn(params, tokens):
        def layer(x, w):
            h = jnp.tanh(x.astype(jnp.float16) @ w["up"].astype(jnp.float16))
            h = h @ w["down"].astype(jnp.float16)  # <- here
            return x + h.astype(jnp.float32), None

        x = params["embedding"][tokens]
        x, _ = lax.scan(layer, x, params["layers"])
        logits = x @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:-1], tokens[1:]
        ).mean()

    down = 0.1 * normal(2, 3, 8, 4)
    layers = {"up": normal(1, 3, 4, 8), "down": down.at[1].multiply(2000.0)}
    params = {"embedding": 0.1 * normal(0, 10, 4), "layers": layers}
    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(2.0**12))
    step = jax.jit(jls.train_step(loss_fn, optimizer), donate_argnums=(0, 1))
    return step, (params, optimizer.init(params), jnp.arange(6))


@program(operation=("exp",), is_backward=False)
def variational_autoencoder():
    def loss_fn(params, x, key):
        mean, log_variance = jnp.split(x @ params["encoder"], 2, axis=-1)
        noise = jax.random.normal(key, mean.shape)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        reconstructed = jnp.tanh(z @ params["decoder"])
        variance = jnp.exp(log_variance)  # <- here
        divergence = 0.5 * jnp.sum(variance + mean**2 - 1.0 - log_variance, axis=-1)
        return jnp.mean(jnp.sum((x - reconstructed) ** 2, axis=-1) + divergence)

    params = {"encoder": jnp.full((3, 4), 30.0), "decoder": normal(0, 2, 3)}
    args = (params, jnp.ones((5, 3)), jax.random.key(1))
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("exp",), is_backward=False)
def ratio_of_ppo():
    def loss_fn(logits, old_log_p, actions, advantages):
        log_p = jax.nn.log_softmax(logits)
        log_p = jnp.take_along_axis(log_p, actions[:, None], axis=1)[:, 0]
        ratio = jnp.exp(log_p - old_log_p)  # <- here
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))

    args = (
        jnp.array([[0.0, 1.0], [2.0, 0.0]]),
        jnp.array([-0.5, -120.0]),
        jnp.array([1, 0]),
        jnp.array([1.0, -1.0]),
    )
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("div",), is_backward=False)
def contrastive_loss_with_an_empty_image():
    def loss_fn(w, images, texts):
        x, y = images @ w, texts @ w
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # <- here
        y = y / jnp.linalg.norm(y, axis=-1, keepdims=True)
        logits = x @ y.T / 0.07
        labels = jnp.arange(len(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    images = normal(1, 4, 3).at[2].set(0.0)
    args = (normal(0, 3, 5), images, normal(2, 4, 3))
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("log",), is_backward=False)
def discriminator_that_is_sure():
    def loss_fn(params, real, fake):
        def discriminate(x):
            return jax.nn.sigmoid(jnp.tanh(x) @ params)

        good = jnp.log(discriminate(real))
        bad = jnp.log(1.0 - discriminate(fake))  # <- here
        return -jnp.mean(good + bad)

    args = (jnp.full(3, 20.0), jnp.ones((4, 3)), jnp.ones((4, 3)))
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("dot_general",), is_backward=False, iteration=(3,))
def recurrent_network_that_explodes():
    def run(w, h, xs):
        def cell(h, x):
            h = jax.nn.relu(h @ w + x)  # <- here
            return h, h

        return lax.scan(cell, h, xs)[1]

    return jax.jit(run), (1e10 * jnp.eye(3), jnp.ones((2, 3)), jnp.ones((8, 2, 3)))


@program(operation=("dot_general",), is_backward=True, iteration=(2,))
def recurrent_network_whose_gradient_explodes():
    """All states are 0. Each of the six steps back multiplies by 1e10."""

    def loss_fn(w, xs):
        def cell(h, x):
            return h @ w + x, None  # <- here

        h, _ = lax.scan(cell, jnp.zeros((2, 3)), xs)
        return jnp.sum(h)

    args = (1e10 * jnp.eye(3), jnp.zeros((6, 2, 3)))
    return jax.jit(jax.value_and_grad(loss_fn, argnums=1)), args


@program(operation=("div",), is_backward=False)
def mixture_with_an_empty_expert():
    def loss_fn(params, x):
        choice = jnp.argmax(x @ params["router"], axis=-1)
        chosen = jax.nn.one_hot(choice, 3)
        loads = jnp.sum(chosen, axis=0)
        centers = (chosen.T @ x) / loads[:, None]  # <- here
        y = jnp.einsum("te,ti,eio->to", chosen, x, params["experts"])
        return jnp.mean(y**2) + jnp.mean(centers**2)

    router = normal(0, 4, 3).at[:, 2].set(-100.0)
    params = {"router": router, "experts": normal(1, 3, 4, 4)}
    args = (params, jnp.abs(normal(2, 8, 4)))
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("div",), is_backward=True)
def molecule_relaxed_with_adam():
    """The distance of each atom to itself is 0, and has no derivative."""

    optimizer = optax.adam(1e-2)

    def energy(positions):
        difference = positions[:, None] - positions[None]
        distance = jnp.sqrt(jnp.sum(difference**2, axis=-1))  # <- here
        pairs = jnp.triu(jnp.ones(distance.shape), 1)
        return jnp.sum(pairs * (distance - 1.0) ** 2)

    @jax.jit
    def relax(positions, opt_state):
        value, forces = jax.value_and_grad(energy)(positions)
        updates, opt_state = optimizer.update(forces, opt_state)
        return optax.apply_updates(positions, updates), opt_state, value

    positions = normal(0, 4, 3)
    return relax, (positions, optimizer.init(positions))


@program(operation=("log", "pow", "div", "mul"), is_backward=True)
def focal_loss_of_a_sure_prediction():
    """x**0.5 has no derivative at 0: the forward pass is right."""

    def loss_fn(logits, labels):
        p = jax.nn.sigmoid(logits)
        p_right = jnp.where(labels, p, 1.0 - p)
        weight = jnp.power(1.0 - p_right, 0.5)  # <- here
        return -jnp.mean(weight * jnp.log(p_right))

    args = (jnp.array([1.0, 50.0]), jnp.array([True, True]))
    return jax.jit(jax.value_and_grad(loss_fn)), args


@program(operation=("sub",), is_backward=False, iteration=(1,))
def beam_search_without_candidates():
    """All beams have ended: a row of nothing but -inf is normalized."""

    def search(scores, alive):
        def step(total, inputs):
            score, mask = inputs
            score = jnp.where(mask, score, -jnp.inf)
            log_p = jax.nn.log_softmax(score)  # <- here
            return total + jnp.max(log_p), log_p

        return lax.scan(step, 0.0, (scores, alive))[0]

    alive = jnp.ones((3, 4), bool).at[1].set(False)
    return jax.jit(search), (normal(0, 3, 4), alive)
