# SPDX-License-Identifier: Apache-2.0
"""Flax NNX with its random numbers beside the model: a variational autoencoder.

`python nnx_vae.py` takes ten seconds on a CPU. Nothing is downloaded: the images are
scikit-learn's digits.
"""

import jax
import jax.numpy as jnp
import jls
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Layer(nnx.Module):
    def __init__(self, width_in, width_out, dtype, rngs):
        self.linear = nnx.Linear(width_in, width_out, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width_out, momentum=0.9, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)  # is given its random numbers at each call

    def __call__(self, x, rngs):
        return self.dropout(nnx.relu(self.norm(self.linear(x))), rngs=rngs)


class VAE(nnx.Module):
    def __init__(self, width, latents, rngs, dtype=jnp.float32):  # parameters: float32
        self.encoder = Layer(64, width, dtype, rngs)
        self.mean = nnx.Linear(width, latents, rngs=rngs)
        self.log_var = nnx.Linear(width, latents, rngs=rngs)
        self.decoder = Layer(latents, width, dtype, rngs)
        self.logits = nnx.Linear(width, 64, rngs=rngs)

    def __call__(self, x, rngs):
        x = self.encoder(x, rngs)
        mean, log_var = self.mean(x), self.log_var(x)
        noise = jax.random.normal(rngs.noise(), mean.shape)
        latent = mean + jnp.exp(0.5 * log_var) * noise
        return self.logits(self.decoder(latent, rngs)), mean, log_var


def loss_fn(model, images, rngs):
    """Nats for each image: to draw it, and to say from which latents."""
    logits, mean, log_var = model(images, rngs)
    drawn = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
    said = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(axis=-1)
    return jnp.mean(drawn + said)


def load():
    """Images of 8 by 8, for training and for the test."""
    images = load_digits().data.astype(np.float32) / 16
    return images[:1500], images[1500:]


def batches(images, batch_size, rng):
    """The batches of one epoch."""
    order = rng.permutation(len(images))
    for i in range(0, len(images) - batch_size + 1, batch_size):
        yield images[order[i : i + batch_size]]


def main(epochs=12, width=128, latents=8, batch_size=50):
    train_set, test_set = load()
    model = VAE(width, latents, nnx.Rngs(0), dtype=jnp.float16)
    tx = optax.adam(2e-3)
    tx = jls.loss_scaled(tx, jls.dynamic(growth_interval=50))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rngs = nnx.Rngs(noise=1, dropout=2)
    train_step = jls.train_step(loss_fn)

    step, evaluate = nnx.jit(train_step), nnx.jit(loss_fn)
    order = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        model.train()
        for images in batches(train_set, batch_size, order):
            step(model, optimizer, images, rngs=rngs)
        model.eval()
        loss, test = (evaluate(model, images, rngs) for images in (train_set, test_set))
        print(f"epoch {epoch:2}  loss {loss:.2f}  test {test:.2f}")
    print(jls.health(optimizer, model))
    return model, optimizer


if __name__ == "__main__":
    main()
