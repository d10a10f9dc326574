"""A transformer-like model of 50 leaves for the tests of memory and bytes."""

import jax
import jax.numpy as jnp
import optax

WIDTH, HEADS, LAYERS, VOCABULARY = 128, 4, 4, 500


def init_params(seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 200))

    def dense(*shape):
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer():
        return {
            "query": dense(WIDTH, WIDTH),
            "key": dense(WIDTH, WIDTH),
            "value": dense(WIDTH, WIDTH),
            "out": dense(WIDTH, WIDTH),
            "up": dense(WIDTH, 4 * WIDTH),
            "up_bias": jnp.zeros(4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
            "down_bias": jnp.zeros(WIDTH),
            "norm1": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
            "norm2": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        }

    return {
        "embed": dense(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "unembed": dense(WIDTH, VOCABULARY),
    }


def make_batch(seed=1):
    tokens = jax.random.randint(jax.random.key(seed), (2, 17), 0, VOCABULARY)
    return tokens[:, :-1], tokens[:, 1:]


def _norm(x, params):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params[
        "bias"
    ]


def _attend(x, layer):
    def heads(name):
        return (x @ layer[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key"))
    weights = jax.nn.softmax(scores * (WIDTH // HEADS) ** -0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads("value"))
    return mixed.reshape(x.shape) @ layer["out"]


def loss_fn(params, batch):
    """Mean cross entropy; float32 master weights, float16 compute, float32 loss."""
    inputs, targets = batch
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    x = params["embed"][inputs]
    for layer in params["layers"]:
        x = x + _attend(_norm(x, layer["norm1"]), layer)
        hidden = jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"] + layer["up_bias"])
        x = x + hidden @ layer["down"] + layer["down_bias"]
    logits = (x @ params["unembed"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
