"""How far a sampler with a cache is from a trainer: python docs/trainer_and_sampler.py

Prints the table of docs/questions/where_two_runs_differ.md: the log-probabilities of
sampled tokens, from a decode with a cache and from the whole sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jls

WIDTH, HEADS, LAYERS, WORDS, LENGTH, ROWS = 64, 4, 4, 256, 96, 8
SHAPE = HEADS, WIDTH // HEADS


def init(seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 5 * LAYERS + 2))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    layers = [
        {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {
        "embed": normal(WORDS, WIDTH) * np.sqrt(WORDS),
        "layers": layers,
        "head": 4.0 * normal(WIDTH, WORDS),
    }


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(w, x, attend):
    q, k, v = jnp.split(norm(x) @ w["qkv"], 3, -1)
    q, k, v = (y.reshape(*y.shape[:-1], *SHAPE) for y in (q, k, v))
    x = x + attend(q, k, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def log_probabilities(params, x):
    return jax.nn.log_softmax(norm(x) @ params["head"])


def whole(params, tokens):
    """The trainer: log-probabilities of a sequence, `[time, words]`."""

    def attend(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(SHAPE[1])
        mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("hqk,khd->qhd", weights, v)

    x = params["embed"][tokens]
    for w in params["layers"]:
        x = block(w, x, attend)
    return log_probabilities(params, x)


def cached(params, tokens):
    """The sampler: the same, one token after the other, with a cache."""

    def step(caches, given):
        at, token = given
        x, after = params["embed"][token], []
        for w, cache in zip(params["layers"], caches, strict=True):

            def attend(q, k, v, cache=cache):
                k, v = (c.at[at].set(y) for c, y in zip(cache, (k, v), strict=True))
                after.append((k, v))
                scores = jnp.einsum("hd,khd->hk", q, k) / np.sqrt(SHAPE[1])
                weights = jax.nn.softmax(
                    jnp.where(jnp.arange(len(k)) <= at, scores, -1e9)
                )
                return jnp.einsum("hk,khd->hd", weights, v)

            x = block(w, x, attend)
        return after, log_probabilities(params, x)

    empty = jnp.zeros((len(tokens), *SHAPE))
    caches = [(empty, empty) for _ in params["layers"]]
    return lax.scan(step, caches, (jnp.arange(len(tokens)), tokens))[1]


def sampled(params, key):
    """Sequences that the model samples itself: `i32[rows, time]`."""
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    keys = jax.random.split(key, LENGTH - 1)

    def step(i, tokens):
        log_p = jax.vmap(whole, (None, 0))(params, tokens)[:, i]
        return tokens.at[:, i + 1].set(jax.random.categorical(keys[i], log_p))

    return lax.fori_loop(0, LENGTH - 1, step, tokens)


def of_tokens(log_p, tokens):
    """The log-probability of each token that was sampled."""
    return jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def rows():
    """Of each dtype the mean difference, and the share of ratios over 1 % off."""
    params = init()
    tokens = jax.jit(sampled)(params, jax.random.key(1))
    for dtype, keep in (
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", "log_probabilities"),
        ("float16", None),
        ("float16", "log_probabilities"),
    ):

        def is_kept(place, keep=keep):
            return place.function == keep

        log_p = [
            jax.jit(jax.vmap(jls.autocast(f, dtype, keep=keep and is_kept), (None, 0)))
            for f in (whole, cached)
        ]
        one, other = (of_tokens(f(params, tokens), tokens) for f in log_p)
        apart = np.abs(np.asarray(one - other))
        yield dtype, keep or "", apart.mean(), np.mean(np.expm1(apart) > 0.01)


def main():
    print("| both in | `keep` | mean difference of log p | ratios over 1 % off |")
    print("|---|---|--:|--:|")
    for dtype, keep, mean, share in rows():
        print(f"| {dtype} | {keep and 'the last product'} | {mean:.1e} | {share:.1%} |")


if __name__ == "__main__":
    main()
