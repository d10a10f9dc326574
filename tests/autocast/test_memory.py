"""What `jls.autocast` keeps for the derivative, beside `dtype=` by hand: shapes alone.

It predicts the memory that compilers report, in seconds.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from reading import saved, size_in_bytes

import jls

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(autouse=True)
def _rank_promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


class Block(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool), dtype=bool)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y), None


class Transformer(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(512, 128, dtype=self.dtype)
        x = embed(words)
        scan = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
        )
        x, _ = scan(self.dtype)(x, None)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class Lstm(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        cell = nn.OptimizedLSTMCell(64, dtype=self.dtype)
        return nn.Dense(10, dtype=self.dtype)(nn.RNN(cell)(x))


MODELS = {
    "transformer, scan": (Transformer, jnp.int32, (4, 128)),
    "LSTM": (Lstm, jnp.float32, (4, 32, 16)),
}
# Of what is kept with `dtype=`, where a loop is: elsewhere XLA decides. What an LSTM
# carries is float32.
MOST = {"transformer, scan": 0.65, "LSTM": 1.0}


def kept(name, dtype=None, cast=None):
    make, kind, shape = MODELS[name]
    model = make(dtype)
    x = jax.ShapeDtypeStruct(shape, kind)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    others = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, others, x):
        logits, _ = model.apply({"params": params, **others}, x, mutable=list(others))
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(logs[..., 0])

    loss = jls.autocast(loss, cast) if cast else loss
    return size_in_bytes(saved(loss, variables["params"], others, x))


@pytest.mark.cover(1)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MOST)
def test_less_is_kept_than_with_dtype_by_hand(name, half):
    by_hand = kept(name, dtype=jnp.dtype(half))
    assert kept(name, cast=half) <= MOST[name] * by_hand
    assert by_hand < kept(name)
