# SPDX-License-Identifier: Apache-2.0
"""Programs whose results are finite although they hold inf or NaN inside.

Nothing in them is a birth: no bad number reaches a result. Steps are applied.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from programs import Program, normal

import jls

FINITE: dict[str, Program] = {}


def finite(make):
    FINITE[make.__name__] = Program(make)
    return make


# Masks.


@finite
def masked_softmax():
    def attend(q, k, v):
        scores = q @ k.T / np.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ v

    def loss_fn(q, k, v):
        return jnp.sum(attend(q, k, v) ** 2)

    args = tuple(normal(seed, 4, 8) for seed in range(3))
    return jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1, 2))), args


@finite
def masked_attention_of_linen():
    """Flax masks with the lowest finite number; the bias of the user is -inf."""
    layer = nn.Dense(4, dtype=jnp.float16)

    def loss_fn(params, x, bias):
        y = layer.apply(params, x)
        weights = jax.nn.softmax((y @ y.T).astype(jnp.float32) + bias)
        return jnp.mean(weights @ y.astype(jnp.float32))

    x = normal(0, 4, 4)
    bias = jnp.triu(jnp.full((4, 4), -jnp.inf), 1)
    return jax.value_and_grad(loss_fn), (layer.init(jax.random.key(0), x), x, bias)


@finite
def logsumexp_of_nothing_but_masks():
    """`logsumexp` guards against -inf - -inf; its -inf ends in an exp."""

    def weight(scores, mask):
        scores = jnp.where(mask, scores, -jnp.inf)
        return jnp.exp(jax.nn.logsumexp(scores, axis=-1))

    mask = jnp.array([[True, False], [False, False]])
    return jax.jit(weight), (jnp.zeros((2, 2)), mask)


@finite
def top_k_logits_with_gradient():
    def loss_fn(logits, labels):
        threshold = lax.top_k(logits, 2)[0][:, -1:]
        kept = jnp.where(logits < threshold, -jnp.inf, logits)
        log_p = jax.nn.log_softmax(kept)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))

    logits = jnp.array([[1.0, 2.0, 3.0, 0.0], [4.0, 1.0, 0.0, 3.0]])
    return jax.jit(jax.value_and_grad(loss_fn)), (logits, jnp.array([2, 3]))


@finite
def best_of_padded_choices():
    def choose(values, lengths):
        is_real = jnp.arange(values.shape[1]) < lengths[:, None]
        padded = jnp.where(is_real, values, -jnp.inf)
        best = jnp.argmax(padded, axis=1)
        return jnp.take_along_axis(values, best[:, None], axis=1), best

    return jax.jit(choose), (normal(0, 3, 4), jnp.array([2, 4, 0]))


# Loops that begin with inf.


@finite
def best_so_far_in_a_scan():
    def search(xs):
        def body(best, x):
            value = jnp.sum((x - 1.0) ** 2)
            return jnp.minimum(best, value), None

        return lax.scan(body, jnp.inf, xs)[0]

    return jax.value_and_grad(search), (normal(0, 5, 2),)


@finite
def until_the_error_is_small():
    """The error before the first step is inf."""

    def solve(x):
        def goes_on(carry):
            _, error = carry
            return error > 1e-3

        def body(carry):
            x, _ = carry
            new = 0.5 * (x + 2.0 / x)
            return new, jnp.abs(new - x)

        return lax.while_loop(goes_on, body, (x, jnp.float32(jnp.inf)))

    return jax.jit(solve), (jnp.float32(1.0),)


@finite
def lowest_with_an_initial_value():
    def nearest(points, mask):
        distance = jnp.sum(points**2, axis=-1)
        return jnp.min(distance, axis=-1, initial=jnp.inf, where=mask)

    mask = jnp.array([[True, False, True], [False, True, True]])
    return jax.jit(nearest), (normal(0, 2, 3, 2), mask)


@finite
def beam_search():
    """All beams but the first begin at -inf; after one step none is left there."""

    def search(log_p):
        width = 2

        def step(scores, now):
            total = (scores[:, None] + now).reshape(-1)
            scores, chosen = lax.top_k(total, width)
            return scores, chosen

        start = jnp.array([0.0] + [-jnp.inf] * (width - 1))
        return lax.scan(step, start, log_p)

    return jax.jit(search), (jax.nn.log_softmax(normal(0, 3, 2, 4)),)


# Bad numbers that are not chosen.


@finite
def log_of_zero_that_is_not_chosen():
    def entropy(p):
        return -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0))

    return jax.jit(entropy), (jnp.array([0.5, 0.5, 0.0]),)


@finite
def quotient_of_zeros_made_a_number():
    def rates(hits, counts):
        return jnp.nan_to_num(hits / counts, nan=0.0, posinf=1.0)

    return jax.jit(rates), (jnp.array([1.0, 0.0, 2.0]), jnp.array([2.0, 0.0, 0.0]))


@finite
def overflow_that_becomes_zero():
    """exp(100) is inf in float32, and the sigmoid by hand is 0, as it should be."""

    def gate(x):
        return x / (1.0 + jnp.exp(-x))

    return jax.jit(gate), (jnp.array([-100.0, 0.0, 100.0]),)


@finite
def safe_norm():
    """The where before and after: right forward and backward."""

    def loss_fn(x):
        square = jnp.sum(x * x, axis=-1)
        is_zero = square == 0.0
        root = jnp.sqrt(jnp.where(is_zero, 1.0, square))
        inverse = jnp.where(is_zero, 0.0, 1.0 / root)
        return jnp.sum(inverse)

    return jax.jit(jax.value_and_grad(loss_fn)), (jnp.array([[3.0, 4.0], [0, 0]]),)


# Linear algebra and random numbers.


@finite
def decompositions():
    def fun(a):
        values, vectors = jnp.linalg.eigh(a)
        lower = jnp.linalg.cholesky(a)
        _, log_det = jnp.linalg.slogdet(a)
        solved = jnp.linalg.solve(a, vectors)
        return values, lower, log_det, solved, jnp.linalg.svd(a)[1]

    a = jnp.array([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
    return jax.jit(fun), (a,)


@finite
def sampling():
    """Masked logits into categorical, gumbel, gamma and truncated numbers."""

    def sample(key, logits):
        keys = jax.random.split(key, 4)
        masked = jnp.where(jnp.arange(4) < 3, logits, -jnp.inf)
        token = jax.random.categorical(keys[0], masked)
        noise = jax.random.gumbel(keys[1], (4,))
        gamma = jax.random.gamma(keys[2], jnp.full(4, 0.5))
        narrow = jax.random.truncated_normal(keys[3], -2.0, 2.0, (4,))
        return token, logits + noise, gamma, narrow

    return jax.jit(sample), (jax.random.key(0), jnp.zeros(4))


# Steps that are applied.


def float16_loss(params, batch):
    x, labels = batch
    scores = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    scores = jnp.where(jnp.arange(4) < 3, scores.astype(jnp.float32), -jnp.inf)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.mean(losses)


@finite
def step_in_float16():
    optimizer = jls.loss_scaled(optax.adamw(1e-3), jls.dynamic(2.0**10))
    params = {"w": normal(0, 5, 4)}
    step = jax.jit(jls.train_step(float16_loss, optimizer))
    batch = normal(1, 6, 5), jnp.arange(6) % 3
    return step, (params, optimizer.init(params), batch)


@finite
def step_with_a_mask_among_its_parameters():
    """A parameter that is -inf on purpose, gets no gradient and stays as it is.

    It ends in an exp before anything comes out.
    """
    optimizer = jls.skip_nonfinite(optax.sgd(0.1))

    def loss_fn(params, batch):
        weights = jax.nn.softmax(lax.stop_gradient(params["mask"]) + params["b"])
        return jnp.sum(weights * batch)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jls.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates)["b"], opt_state, loss

    params = {"mask": jnp.array([0.0, 0.0, -jnp.inf]), "b": jnp.zeros(3)}
    return train_step, (params, optimizer.init(params), jnp.arange(3.0))


@finite
def step_after_a_spike_with_clipping():
    """The limits of `jls.spikes` are inf until there are losses enough."""
    chain = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    optimizer = jls.loss_scaled(chain, jls.dynamic(4.0), spikes=jls.spikes())

    def loss_fn(params, batch):
        return 1e4 * jnp.mean((params["w"] * batch - 1.0) ** 2)

    def train_step(params, opt_state, batch):
        """Without the limits, which are inf in the report."""
        step = jls.train_step(loss_fn, optimizer)
        params, opt_state, report = step(params, opt_state, batch)
        return params, report.loss, jnp.where(report.skipped, jnp.nan, 0.0)

    params = {"w": jnp.zeros(3)}
    return jax.jit(train_step), (params, optimizer.init(params), jnp.ones(3))
