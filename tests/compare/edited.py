"""Pairs of programs for `jls.compare`: edited in one line, and equal ones.

Each program has the name of its mistake as an argument. The line of a mistake has its
name in a comment.
"""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import jls

RNG = np.random.default_rng(4)
WIDTH, HEADS, LAYERS, TOKENS = 32, 4, 3, 12


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


# A GPT with AdamW.


def layer_norm(x, scale, bug):
    eps = 1e-5 if bug == "eps" else 1e-6
    mean = x.mean(-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    inverse = lax.rsqrt(variance + eps)  # bug: eps
    return (x - mean) * inverse * scale


def rotated(x, bug):
    half = x.shape[-1] // 2
    steps = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None]
    base = 500.0 if bug == "base" else 10000.0
    angles = steps * base ** (-jnp.arange(half) / half)  # bug: base
    angles = angles[None, :, None]
    first, second = x[..., :half], x[..., half:]
    if bug == "halves":
        first, second = second, first
    turned = first * jnp.cos(angles) - second * jnp.sin(angles)  # bug: halves
    other = first * jnp.sin(angles) + second * jnp.cos(angles)
    return jnp.concatenate([turned, other], -1)


def attention(w, x, bug):
    batch, length, _ = x.shape
    q, k, v = jnp.split(x @ w["qkv"], 3, -1)
    shape = (batch, length, HEADS, WIDTH // HEADS)
    q, k, v = (y.reshape(shape) for y in (q, k, v))
    q, k = rotated(q, bug), rotated(k, bug)
    size = WIDTH if bug == "scale" else WIDTH // HEADS
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = scores / np.sqrt(size)  # bug: scale
    offset = 1 if bug == "mask" else 0
    mask = jnp.arange(length)[:, None] + offset >= jnp.arange(length)  # bug: mask
    scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return mixed @ (w["out"].T if bug == "transposed" else w["out"])  # bug: transposed


def feed_forward(w, x, bug):
    hidden = x @ w["up"]
    if bug != "no bias":
        hidden = hidden + w["bias"]  # bug: no bias
    hidden = jax.nn.gelu(hidden, approximate=bug != "gelu")  # bug: gelu
    return hidden @ w["down"]


def block(w, x, bug):
    normed = layer_norm(x, w["one"], bug)
    x = x + attention(w, normed, bug)
    normed = layer_norm(x, w["two"], bug)
    more = feed_forward(w, normed, bug)
    if bug == "stopped":
        more = lax.stop_gradient(more)  # bug: stopped
    return x + more if bug != "residual" else more  # bug: residual


def gpt(params, tokens, bug="", kind="loop"):
    x = params["embed"][tokens]
    if bug == "embed":
        x = x * np.sqrt(WIDTH)  # bug: embed
    layers = params["layers"]
    count = LAYERS - 1 if bug == "layer less" else LAYERS
    if kind == "scan":
        x, _ = lax.scan(lambda x, w: (block(w, x, bug), None), x, layers)
    else:
        one = jax.checkpoint(block, static_argnums=2) if kind == "remat" else block
        for i in range(count):
            w = {name: y[i] for name, y in layers.items()}  # bug: layer less
            x = one(w, x, bug)
    x = layer_norm(x, params["last"], "")
    return x @ params["embed"].T


def gpt_loss(params, tokens, bug="", kind="loop"):
    logits = gpt(params, tokens[:, :-1], bug, kind)
    targets = tokens[:, :-1] if bug == "shift" else tokens[:, 1:]  # bug: shift
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    weights = jnp.arange(each.shape[-1]) >= 2
    if bug == "weights":
        return jnp.mean(each * weights)  # bug: weights
    return jnp.sum(each * weights) / (each.shape[0] * weights.sum())


def gpt_params():
    layers = {"qkv": normal(LAYERS, WIDTH, 3 * WIDTH, scale=0.2)}
    layers |= {"out": normal(LAYERS, WIDTH, WIDTH, scale=0.2)}
    layers |= {"up": normal(LAYERS, WIDTH, 64, scale=0.2)}
    layers |= {"bias": normal(LAYERS, 64, scale=0.2)}
    layers |= {"down": normal(LAYERS, 64, WIDTH, scale=0.2)}
    layers |= {name: 1 + normal(LAYERS, WIDTH, scale=0.1) for name in ("one", "two")}
    embed, last = normal(50, WIDTH, scale=0.5), 1 + normal(WIDTH, scale=0.1)
    return {"embed": embed, "layers": layers, "last": last}


GPT = gpt_params()
TEXT = jnp.asarray(RNG.integers(0, 50, (2, TOKENS + 1)))


def adam(grads, state, params, bug):
    """AdamW by hand, with a clip."""
    count, mu, nu = state
    count = count + 1
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    most = 0.1 if bug == "clip" else 0.2
    factor = jnp.minimum(1.0, most / norm)  # bug: clip
    grads = jax.tree.map(lambda g: g * factor, grads)
    b2 = 0.99 if bug == "b2" else 0.999
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, nu, grads)  # bug: b2
    power = count - 1 if bug == "count" else count
    corrected = 1 - 0.9 ** (power + 1)  # bug: count

    def update(p, m, n):
        decayed = 0.0 if bug == "decay" else 0.1 * p  # bug: decay
        step = m / corrected / (jnp.sqrt(n / (1 - b2 ** (count + 1))) + 1e-8)
        return p - 1e-2 * (step + decayed)  # bug: decay

    return jax.tree.map(update, params, mu, nu), (count, mu, nu)


def zeros(params):
    like = jax.tree.map(jnp.zeros_like, params)
    return jnp.int32(0), like, like


def gpt_step(bug="", kind="loop", dtype=jnp.float32, keep=None):
    def step(params, state, tokens):
        loss_fn = functools.partial(gpt_loss, bug=bug, kind=kind)
        cast = jls.autocast(loss_fn, dtype, keep=keep)
        loss, grads = jax.value_and_grad(cast)(params, tokens)
        params, state = adam(grads, state, params, bug)
        return params, state, loss

    return step


def _gpt(bug):
    return gpt_step(), gpt_step(bug), (GPT, zeros(GPT), TEXT)


def _gpt_in_scan(bug):
    bug = bug.removesuffix(", scan")
    pair = (gpt_step(kind="scan"), jax.jit(gpt_step(bug, "scan")))
    return *pair, (GPT, zeros(GPT), TEXT)


# Rules, branches, loops, lanes.


@jax.custom_vjp
def clamped(x):
    return jnp.clip(x, -1, 1)


clamped.defvjp(
    lambda x: (clamped(x), x),
    lambda x, ct: (ct * (jnp.abs(x) <= 1),),
)


@jax.custom_vjp
def clamped_wrongly(x):
    return jnp.clip(x, -1, 1)


def _backward(x, ct):
    return (ct * (jnp.abs(x) <= 2),)


clamped_wrongly.defvjp(lambda x: (jnp.clip(x, -1, 1), x), _backward)


def ruled(bug):
    rule = clamped_wrongly if bug else clamped
    # JAX gives what a rule computes the line of its call.
    return jax.grad(lambda w, x: jnp.sum(jnp.sin(rule(x @ w))))  # bug: rule


def branched(bug):
    def fun(x, w):
        def large(y):
            y = jnp.tanh(y) * (0.5 if bug == "branch" else 0.4)  # bug: branch
            return y @ w

        limit = 100.0 if bug == "predicate" else 0.0
        is_large = jnp.sum(x**2) > limit  # bug: predicate
        return lax.cond(is_large, large, lambda y: y @ w * 2, x)

    return fun


def looped(bug):
    def fun(x, w):
        def body(carry):
            i, y = carry
            y = jnp.tanh(y @ w) + 0.1 * x
            if bug == "fourth":
                y = jnp.where(i == 3, y * 1.1, y)  # bug: fourth
            return i + 1, y

        return lax.while_loop(lambda carry: carry[0] < 20, body, (0, x))[1]

    return fun


def lanes(bug):
    def one(x, w):
        y = jnp.tanh(w @ x)
        return jnp.sum(y) if bug == "lane" else jnp.sum(y**2)  # bug: lane

    return lambda x, w: jax.vmap(one, (0, None))(x, w)


def drawn(bug):
    def fun(key, x):
        key = jax.random.fold_in(key, 1 if bug == "key" else 2)  # bug: key
        kept = jax.random.bernoulli(key, 0.9, x.shape)  # bug: key
        return jnp.mean(jnp.where(kept, x / 0.9, 0) ** 2)

    return fun


SQUARE, ROWS = normal(6, 6, scale=0.5), normal(5, 6)


# Modules of libraries.


class LinenNet(linen.Module):
    bug: str = ""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(16, name="first")(x)
        epsilon = 1e-3 if self.bug == "linen eps" else 1e-6
        x = linen.LayerNorm(epsilon=epsilon, name="norm")(x)  # bug: linen eps
        x = linen.relu(x)
        if self.bug == "linen order":
            x = x[:, ::-1]  # bug: linen order
        return linen.Dense(4, name="last")(x)


def linen_step(bug):
    def step(state, batch):
        def loss_fn(state, batch):
            logits = LinenNet(bug).apply({"params": state.params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["y"]
            ).mean()

        return jls.train_step(loss_fn)(state, batch)

    return step


BATCH = {"x": normal(8, 10), "y": jnp.arange(8) % 4}


def linen_state():
    return TrainState.create(
        apply_fn=LinenNet().apply,
        params=LinenNet().init(jax.random.key(0), BATCH["x"])["params"],
        tx=jls.skip_nonfinite(optax.adamw(1e-3)),
    )


class NnxLayers(nnx.Module):
    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.first, self.last = (
            nnx.Linear(10, 16, rngs=rngs),
            nnx.Linear(16, 4, rngs=rngs),
        )
        self.norm = norm(16, rngs=rngs)


class NnxNet(NnxLayers):
    def __init__(self):
        super().__init__(nnx.BatchNorm)

    def __call__(self, x, bug=""):
        x = self.norm(self.first(x))
        slope = 0.02 if bug == "nnx slope" else 0.01
        x = nnx.leaky_relu(x, slope)  # bug: nnx slope
        return self.last(x)


def nnx_step(bug):
    def loss_fn(model, batch):
        logits = model(batch["x"], bug)
        smooth = 0.1 if bug == "nnx smooth" else 0.0
        labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], 4), smooth)
        # The numbers that the line above gives are whole where nothing is smooth.
        return optax.softmax_cross_entropy(logits, labels).mean()

    step = jls.train_step(loss_fn)
    return lambda model, optimizer, batch: step(model, optimizer, batch)


def nnx_arguments():
    model = NnxNet()
    optimizer = nnx.Optimizer(
        model, jls.skip_nonfinite(optax.sgd(0.1, momentum=0.9)), wrt=nnx.Param
    )
    return model, optimizer, BATCH


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first, self.last = (
            eqx.nn.Linear(10, 8, key=one),
            eqx.nn.Linear(8, 4, key=two),
        )

    def __call__(self, x, bug):
        x = jax.nn.silu(self.first(x))
        if bug == "eqx norm":
            x = x / jnp.linalg.norm(x)  # bug: eqx norm
        return self.last(x)


def eqx_gradient(bug):
    def loss_fn(model, x):
        return jnp.mean(jax.vmap(lambda y: model(y, bug))(x) ** 2)

    return eqx.filter_value_and_grad(loss_fn)


def haiku_net(bug):
    def net(x):
        x = jnp.tanh(hk.Linear(8)(x))
        x = x + (0.01 if bug == "haiku" else 0.0)  # bug: haiku
        return hk.Linear(2)(x).sum()

    return hk.without_apply_rng(hk.transform(net))


def haiku_gradient(bug):
    return jax.grad(haiku_net(bug).apply)


def haiku_params():
    return haiku_net("").init(jax.random.key(1), BATCH["x"])


EDITED = dict.fromkeys(
    (
        *("eps", "base", "halves", "scale", "mask", "transposed", "no bias", "gelu"),
        *("stopped", "residual", "embed", "layer less", "shift", "weights"),
        *("clip", "b2", "count", "decay"),
    ),
    _gpt,
)
EDITED |= dict.fromkeys(("eps, scan", "mask, scan", "gelu, scan"), _gpt_in_scan)
EDITED |= {
    "rule": lambda bug: (ruled(""), ruled(bug), (SQUARE, ROWS)),
    "branch": lambda bug: (branched(""), branched(bug), (ROWS, SQUARE)),
    "predicate": lambda bug: (branched(""), branched(bug), (ROWS, SQUARE)),
    "fourth": lambda bug: (looped(""), looped(bug), (ROWS, SQUARE)),
    "lane": lambda bug: (lanes(""), lanes(bug), (ROWS, SQUARE)),
    "key": lambda bug: (drawn(""), drawn(bug), (jax.random.key(0), ROWS)),
    "linen eps": lambda bug: (linen_step(""), linen_step(bug), (linen_state(), BATCH)),
    "linen order": lambda bug: (
        linen_step(""),
        linen_step(bug),
        (linen_state(), BATCH),
    ),
    "nnx slope": lambda bug: (nnx_step(""), nnx_step(bug), nnx_arguments()),
    "eqx norm": lambda bug: (
        eqx_gradient(""),
        eqx_gradient(bug),
        (EqxNet(jax.random.key(0)), BATCH["x"]),
    ),
    "haiku": lambda bug: (
        haiku_gradient(""),
        haiku_gradient(bug),
        (haiku_params(), BATCH["x"]),
    ),
}


# Equal pairs.


def summed_in_blocks(x):
    return x.reshape(64, -1).sum(1).sum()


def with_two_pass_variance(x):
    return jnp.mean((x - x.mean(-1, keepdims=True)) ** 2, -1)


def with_one_pass_variance(x):
    return jnp.mean(x**2, -1) - x.mean(-1) ** 2


def softmax_by_hand(x):
    shifted = jnp.exp(x - x.max(-1, keepdims=True))
    return jnp.log(shifted / shifted.sum(-1, keepdims=True))


def by_hand_attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def library_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


HEADED = tuple(normal(2, 7, 4, 8) for _ in range(3))
MANY = normal(64, 1000)


def accumulated(params, state, tokens):
    """The step on one example after the other."""

    def one(tokens):
        return jax.value_and_grad(gpt_loss)(params, tokens[None])

    each = [one(x) for x in tokens]
    loss, grads = jax.tree.map(lambda *x: sum(x) / len(x), *each)
    params, state = adam(grads, state, params, "")
    return params, state, loss


def unrolled(x, w):
    y = x
    for _ in range(20):
        y = jnp.tanh(y @ w) + 0.1 * x
    return y


def linen_of_nnx(weights, x):
    dense = {"kernel": weights[0], "bias": weights[1]}
    norm = {"scale": weights[2], "bias": weights[3]}
    last = {"kernel": weights[4], "bias": weights[5]}
    params = {"first": dense, "norm": norm, "last": last}
    return LinenNet().apply({"params": params}, x)


def nnx_of_linen(weights, x):
    model = NnxLayers(nnx.LayerNorm)
    variables = (
        *(model.first.kernel, model.first.bias),
        *(model.norm.scale, model.norm.bias),
        *(model.last.kernel, model.last.bias),
    )
    for variable, weight in zip(variables, weights, strict=True):
        variable.set_value(weight)
    return model.last(nnx.relu(model.norm(model.first(x))))


WEIGHTS = (
    normal(10, 16),
    normal(16),
    1 + normal(16),
    normal(16),
    normal(16, 4),
    normal(4),
)
STATE = (GPT, zeros(GPT), TEXT)

EQUAL = {
    "the same": lambda: (gpt_step(), gpt_step(), STATE),
    "jitted": lambda: (gpt_step(), jax.jit(gpt_step()), STATE),
    "remat": lambda: (gpt_step(), gpt_step(kind="remat"), STATE),
    "loop and scan": lambda: (gpt_step(), gpt_step(kind="scan"), STATE),
    "accumulated": lambda: (gpt_step(), accumulated, STATE),
    "sums": lambda: (jnp.sum, summed_in_blocks, (MANY,)),
    "mean": lambda: (jnp.mean, lambda x: jnp.sum(x) * (1 / x.size), (MANY,)),
    "variance": lambda: (with_two_pass_variance, with_one_pass_variance, (MANY,)),
    "softmax": lambda: (jax.nn.log_softmax, softmax_by_hand, (MANY,)),
    "attention": lambda: (by_hand_attention, library_attention, HEADED),
    "attention, gradients": lambda: (
        jax.grad(lambda *x: by_hand_attention(*x).sum(), (0, 1, 2)),
        jax.grad(lambda *x: library_attention(*x).sum(), (0, 1, 2)),
        HEADED,
    ),
    "unrolled": lambda: (looped(""), unrolled, (ROWS, SQUARE)),
    "lanes": lambda: (
        lanes(""),
        lambda x, w: jnp.sum(jnp.tanh(x @ w.T) ** 2, -1),
        (ROWS, SQUARE),
    ),
    "linen and nnx": lambda: (linen_of_nnx, nnx_of_linen, (WEIGHTS, BATCH["x"])),
    "linen step": lambda: (linen_step(""), linen_step(""), (linen_state(), BATCH)),
    "nnx step": lambda: (nnx_step(""), nnx_step(""), nnx_arguments()),
    "cancelled": lambda: (
        jax.grad(lambda b, x: jnp.sum((x + b - (x + b).mean(0)) ** 2)),
        jax.grad(lambda b, x: x.shape[0] * jnp.sum(jnp.var(x + b, 0))),
        (normal(6), ROWS),
    ),
    "optax": lambda: (
        lambda g, p: optax.adamw(1e-3).update(g, optax.adamw(1e-3).init(p), p)[0],
        lambda g, p: jls.skip_nonfinite(optax.adamw(1e-3)).update(
            g, jls.skip_nonfinite(optax.adamw(1e-3)).init(p), p
        )[0],
        (GPT, GPT),
    ),
}
