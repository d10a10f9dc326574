"""Twenty pairs of programs that `jls.compare` was never tuned on.

Each program has the name of its mistake as an argument. The line of a mistake has its
name in a comment; a pair without one is equal. They were written before the rule was.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

RNG = np.random.default_rng(21)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


# A GRU in a scan, with a step of Adam.


def gru(params, batch, bug):
    def cell(h, x):
        z = jax.nn.sigmoid(x @ params["wz"] + h @ params["uz"])
        r = jax.nn.sigmoid(x @ params["wr"] + h @ params["ur"])
        seen = h if bug == "reset gate" else r * h  # bug: reset gate
        new = jnp.tanh(x @ params["wh"] + seen @ params["uh"])
        if bug == "late carry":
            new = jnp.where(x[:, :1] > 1.5, new * 0.99, new)  # bug: late carry
        return (1 - z) * h + z * new, h

    start = jnp.zeros((batch["x"].shape[1], params["uz"].shape[0]))
    last, _ = lax.scan(cell, start, batch["x"])
    logits = last @ params["out"]
    if bug == "bias":
        logits = logits + params["bias"]  # bug: bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def gru_step(bug):
    b2 = 0.99 if bug == "b2" else 0.999
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(gru)(params, batch, bug)
        if bug == "b2":
            grads = jax.tree.map(lambda g: g * (b2 + 0.02), grads)  # bug: b2
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


GRU = {f"w{i}": normal(5, 8, scale=0.4) for i in "zrh"}
GRU |= {f"u{i}": normal(8, 8, scale=0.3) for i in "zrh"}
GRU |= {"out": normal(8, 4), "bias": normal(4)}
SEQUENCES = {"x": normal(12, 6, 5), "y": jnp.arange(6) % 4}
GRU_ARGS = (GRU, optax.adam(1e-3).init(GRU), SEQUENCES)


# A VAE, and its gradients.


def vae(params, x, key, bug):
    hidden = jax.nn.relu(x @ params["enc"])
    mean, log_var = jnp.split(hidden @ params["stats"], 2, axis=-1)
    scale = 1.0 if bug == "half" else 0.5
    deviation = jnp.exp(scale * log_var)  # bug: half
    z = mean + deviation * jax.random.normal(key, mean.shape)
    if bug == "stopped":
        z = lax.stop_gradient(z)  # bug: stopped
    logits = jax.nn.relu(z @ params["dec"]) @ params["out"]
    target = jax.nn.sigmoid(x)
    rest = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, target), -1)
    square = mean if bug == "square" else jnp.square(mean)  # bug: square
    kl = -0.5 * jnp.sum(1 + log_var - square - jnp.exp(log_var), -1)
    return jnp.mean(rest + kl)


VAE = {"enc": normal(10, 16, scale=0.3), "stats": normal(16, 8, scale=0.2)}
VAE |= {"dec": normal(4, 16, scale=0.5), "out": normal(16, 10, scale=0.3)}
VAE_ARGS = VAE, normal(7, 10), jax.random.key(3)


def vae_gradient(bug):
    return jax.value_and_grad(functools.partial(vae, bug=bug))


# PPO.


def ppo(params, batch, bug):
    hidden = jnp.tanh(batch["obs"] @ params["w1"] + params["b1"])
    logits, value = hidden @ params["pi"], (hidden @ params["v"])[:, 0]
    log_p = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["act"][:, None], axis=1
    )[:, 0]
    ratio = jnp.exp(log_p - batch["log_p"])
    adv = batch["adv"]
    spread = adv.std()
    if bug == "ddof":
        spread = jnp.std(adv, ddof=1)  # bug: ddof
    adv = (adv - adv.mean()) / (spread + 1e-8)
    top = 5.0 if bug == "clip" else 1.1
    clipped = jnp.clip(ratio, 0.9, top)  # bug: clip
    policy = -jnp.minimum(ratio * adv, clipped * adv).mean()
    entropy = -jnp.sum(jnp.exp(jax.nn.log_softmax(logits)) * logits, -1).mean()
    return policy + 0.5 * jnp.mean((value - batch["ret"]) ** 2) - 0.01 * entropy


PPO = {"w1": normal(6, 12, scale=0.4), "b1": normal(12, scale=0.1)}
PPO |= {"pi": normal(12, 3, scale=0.5), "v": normal(12, 1, scale=0.5)}
PLAYED = {"obs": normal(20, 6), "act": jnp.arange(20) % 3, "adv": normal(20)}
PLAYED |= {"log_p": -1.1 + normal(20, scale=0.05), "ret": normal(20)}


def ppo_gradient(bug):
    return jax.grad(functools.partial(ppo, bug=bug))


# A convolutional network of Flax Linen, with batch statistics.


class ConvNet(linen.Module):
    bug: str = ""

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(6, (3, 3))(x)
        x = linen.BatchNorm(use_running_average=False, epsilon=1e-5)(x)
        x = linen.relu(x)
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = linen.Conv(8, (3, 3), padding="SAME")(x)
        if self.bug == "shifted":
            x = jnp.roll(x, 1, axis=3)  # bug: shifted
        x = linen.gelu(x, approximate=self.bug != "exact")  # bug: exact
        return linen.Dense(5)(x.mean((1, 2)))


IMAGES = normal(4, 8, 8, 3)
CONV_VARIABLES = ConvNet().init(jax.random.key(0), IMAGES)


def conv(bug):
    def loss_fn(params, images):
        logits, changed = ConvNet(bug).apply(
            {**CONV_VARIABLES, "params": params}, images, mutable=["batch_stats"]
        )
        return jnp.mean(logits**2), changed

    return jax.grad(loss_fn, has_aux=True)


# An MLP of Flax NNX.


class Mlp(nnx.Module):
    def __init__(self, bug):
        self.first = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(16, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(16, 3, rngs=nnx.Rngs(2))
        self.bug = bug

    def __call__(self, x):
        x = self.norm(self.first(x))
        is_right = self.bug != "activation"
        x = nnx.silu(x) if is_right else nnx.softplus(x) - 0.3  # bug: activation
        return self.last(x)


def mlp(bug):
    def loss_fn(model, x):
        out = Mlp.__call__(model, x)
        if bug == "temperature":
            out = out / 1.01  # bug: temperature
        return jnp.mean(jax.nn.logsumexp(out, -1))

    return loss_fn


# A beam of a while loop.


def newton(bug):
    def fun(a, x):
        def body(carry):
            i, x = carry
            slope = 2.0 * x
            step = (x * x - a) / slope
            if bug == "damped":
                step = 0.9 * step  # bug: damped
            return i + 1, x - step

        _, x = lax.while_loop(lambda c: c[0] < 5, body, (0, x))
        return jnp.sum(x * jnp.cos(x))

    return fun


ROOTS = jnp.asarray(RNG.uniform(1, 9, 7), jnp.float32), jnp.full(7, 3.0)


# Equal programs.


def unrolled_gru(params, state, batch):
    """The step of the GRU, with a checkpoint, and the sums in another order."""
    optimizer = optax.adam(1e-3)

    def loss_fn(params):
        return jax.checkpoint(functools.partial(gru, bug=""))(params, batch)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def ppo_by_hand(params, batch):
    """The loss, with the mean of each half, and the square as a product."""

    def loss_fn(params):
        halves = [dict(batch)]
        loss = sum(ppo(params, x, "") for x in halves) / len(halves)
        return loss * 3.0 / 3.0

    return jax.grad(loss_fn)(params)


def vae_in_lanes(params, x, key):
    """Each example by itself, under vmap, with the noise of the whole batch."""
    noise = jax.random.normal(key, (x.shape[0], 4))

    def loss_fn(params):
        def one(x, noise):
            hidden = jax.nn.relu(x @ params["enc"])
            mean, log_var = jnp.split(hidden @ params["stats"], 2)
            z = mean + jnp.exp(0.5 * log_var) * noise
            logits = jax.nn.relu(z @ params["dec"]) @ params["out"]
            rest = optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(x)).sum()
            square, variance = jnp.square(mean), jnp.exp(log_var)
            return rest - 0.5 * jnp.sum(1 + log_var - square - variance)

        return jnp.mean(jax.vmap(one)(x, noise))

    return jax.value_and_grad(loss_fn)(params)


def roots_in_a_loop(a, x):
    for _ in range(5):
        x = x - (x * x - a) / (2.0 * x)
    return jnp.sum(x * jnp.cos(x))


def _gru_pair(bug):
    return gru_step(""), gru_step(bug), GRU_ARGS


def _vae_pair(bug):
    return vae_gradient(""), vae_gradient(bug), VAE_ARGS


def _ppo_pair(bug):
    return ppo_gradient(""), ppo_gradient(bug), (PPO, PLAYED)


def _conv_pair(bug):
    return conv(""), conv(bug), (CONV_VARIABLES["params"], IMAGES)


def _mlp_pair(bug):
    if bug == "activation":

        def other(model, x):
            return jnp.mean(jax.nn.logsumexp(Mlp(bug)(x), -1))

        def one(model, x):
            return jnp.mean(jax.nn.logsumexp(Mlp("")(x), -1))

        return one, other, (Mlp(""), normal(5, 6))
    return mlp(""), mlp(bug), (Mlp(""), normal(5, 6))


def _newton_pair(bug):
    return newton(""), newton(bug), ROOTS


EDITED = {
    "reset gate": _gru_pair,
    "late carry": _gru_pair,
    "bias": _gru_pair,
    "b2": _gru_pair,
    "half": _vae_pair,
    "stopped": _vae_pair,
    "square": _vae_pair,
    "ddof": _ppo_pair,
    "clip": _ppo_pair,
    "shifted": _conv_pair,
    "exact": _conv_pair,
    "activation": _mlp_pair,
    "temperature": _mlp_pair,
    "damped": _newton_pair,
}
EQUAL = {
    "GRU, checkpoint, not jitted": lambda: (gru_step(""), unrolled_gru, GRU_ARGS),
    "PPO, other sums": lambda: (ppo_gradient(""), ppo_by_hand, (PPO, PLAYED)),
    "VAE, vmap": lambda: (vae_gradient(""), vae_in_lanes, VAE_ARGS),
    "roots, while and loop": lambda: (newton(""), roots_in_a_loop, ROOTS),
    "conv, jitted": lambda: (conv(""), jax.jit(conv("")), _conv_pair("")[2]),
    "MLP, jitted": lambda: (mlp(""), nnx.jit(mlp("")), _mlp_pair("")[2]),
}
